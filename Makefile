# What people and CI run. `make` alone says what there is.
PYTHON ?= python3
ARGS ?=
MINUTES ?= 10
REQUESTS ?=
JOBS ?= 2
BIN := .venv/bin
# The type checker and the import linter see the packages as they are imported, not as folders lie.
TREE := .local/tree

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all check format bench sweep soak results gpu-check gpu-bundle pins clean

help: ## List the targets
	@echo "AdaServe: every LLM request at the speed it asks for"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-17s %s\n", $$1, $$2}'
	@echo
	@echo "The first run installs SGLang and PyTorch: about 11 GB on disk, 4 to 8 minutes."
	@echo "More: make demo ARGS='--seconds 120', make test ARGS='-k tree', make PYTHON=/path/to/python3.12 ..."

env: ## Make the environment .venv, or bring it up to date
	@$(PYTHON) scripts/env.py

demo: env ## Three classes of requests, three speeds: with AdaServe and without it (4 minutes)
	@$(BIN)/adaserve demo $(ARGS)

test: env ## Run the tests (15 to 25 minutes on 2 cores, no GPU needed; JOBS=1: one after the other)
	@$(BIN)/python -m pytest -n $(JOBS) -m "not slow" --durations=15 $(ARGS)

test-all: env ## Run all tests, slow ones included
	@$(BIN)/python -m pytest -n $(JOBS) --durations=30 $(ARGS)

check: env ## Formatter, linter, type checker, import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/python scripts/link_packages.py $(TREE)
	@cd $(TREE) && "$(CURDIR)/$(BIN)/mypy" --config-file "$(CURDIR)/pyproject.toml" -p adaserve
	@cd $(TREE) && "$(CURDIR)/$(BIN)/lint-imports" --no-cache --config "$(CURDIR)/pyproject.toml"

format: env ## Format, and repair what the linter can repair
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format .

bench: env ## Measure TPOT against plain decoding at several batch sizes; JSON under results/
	@$(BIN)/adaserve bench latency $(ARGS)

sweep: env ## Systems against load on a real server, judged by both SLOs (80 minutes; ARGS=--quick: four)
	@$(BIN)/adaserve bench sweep $(ARGS)

soak: env ## A long test: random requests of every kind, invariants checked all the time (MINUTES=10 or REQUESTS=N)
	@$(BIN)/adaserve bench soak $(if $(REQUESTS),--requests $(REQUESTS),--minutes $(MINUTES)) $(ARGS)

results: env ## Draw the tables and figures under results/ again from their records
	@for dir in results/*/; do \
	  if [ -f "$$dir/requests.jsonl" ]; then $(BIN)/adaserve report "$$dir" || exit 1; fi; \
	  if grep -qs "schema_version\": 2" "$$dir/sweep.json"; then $(BIN)/adaserve bench sweep --plot-only "$$dir" || exit 1; fi; \
	done

gpu-check: env ## On a GPU host: exactness, TPOT and mixed SLOs against SGLang; JSON under results/
	@$(BIN)/adaserve gpu-check $(ARGS)

gpu-bundle: env ## Wheels for a GPU host without network, in parts of at most 31 MiB
	@$(BIN)/python scripts/gpu_bundle.py build $(ARGS)

pins: env ## Rewrite constraints.txt from what is installed
	@$(BIN)/python scripts/pins.py > constraints.new && mv constraints.new constraints.txt

clean: ## Remove what was made in this folder (the shared environment stays in the cache)
	@rm -rf .venv .local build dist adaserve.egg-info
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
