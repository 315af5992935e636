"""The server of a soak: small, always short of memory, and told to retract requests."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from adaserve.bench.soak.answers import Answer, read_whole
from adaserve.bench.soak.calls import CLASSES, Call
from adaserve.bench.soak.checks import answer_faults
from adaserve.config import PREFILLS, AdaServeConfig
from adaserve.loadgen.server_metrics import parse_metrics
from adaserve.server import ServerError, ServerProcess, ServerSpec

POOL_TOKENS, CONTEXT_TOKENS, RUNNING = 1536, 256, 24
POLICIES = (
    "priced", "adaserve", "none", "chain-2", "fixed-tree", "equal-greedy", "global-greedy", "adaserve-v1",
    "turbospec", "chain-3",
)  # fmt: skip
MODES = (*PREFILLS, "default")
ENVIRONMENT = {
    # SGLang counts its KV slots after every iteration, and stops the scheduler when one is missing.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    # One running request is retracted after every 60 forwards, as if the KV pool were full.
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "60",
    # After a retraction it admits cautiously for hundreds of iterations; here for a few.
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
    # Clients and HTTP workers need the other cores.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Otherwise inductor compiles a function at the first repetition penalty: half a minute of gcc.
    "TORCHDYNAMO_DISABLE": "1",
}


def soak_spec(folder: Path, workers: int, learn: bool, seed: int) -> ServerSpec:
    """The server to start; writes the file with its classes into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    classes = folder / "classes.yaml"
    classes.write_text(yaml.safe_dump({"classes": CLASSES}, sort_keys=False))
    flags = {
        "--tokenizer-worker-num": workers, "--max-total-tokens": POOL_TOKENS,
        "--context-length": CONTEXT_TOKENS, "--max-running-requests": RUNNING,
        "--schedule-conservativeness": 0.1, "--chunked-prefill-size": 64, "--random-seed": seed,
        "--log-level-http": "warning",
    }  # fmt: skip
    extra = [str(word) for flag in flags.items() for word in flag]
    return ServerSpec(
        size="1M",  # less than the embedded target has: it is served as it is
        # Small trees: here every token costs the same, so large ones would only make it slow. The trainer's
        # memory is full before the soak begins to judge it.
        config=AdaServeConfig(
            slo_config=str(classes),
            budget=48,
            max_depth=3,
            max_width=2,
            learn=learn,
            learn_share=1.0,
            learn_nice=0,
            learn_memory_mb=16,
        ),
        # A model that knows no JSON would fill it with blanks for ever.
        extra=(*extra, "--constrained-json-disable-any-whitespace"),
    )


def references(server: ServerProcess, cases: list[Call]) -> dict[int, tuple[Call, Answer]]:
    """What the server says to each case without speculation and without load. Raises ServerError."""
    found = {}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for number, call in enumerate(cases):
            response = client.post(call.path, json=call.body)
            if response.status_code != 200:
                raise ServerError(f"no reference answer: {response.status_code} {response.text} to {call}")
            answer = read_whole(call.path, response.json())
            if faults := answer_faults(call, answer):
                raise ServerError(f"a reference answer is wrong: {'; '.join(faults)} in the answer to {call}")
            found[number] = (call, answer)
    return found


class Control:
    """What the soak asks of the server beside the clients' load."""

    def __init__(self, url: str, deadline_s: float, rng: random.Random) -> None:
        self._client = httpx.Client(base_url=url, timeout=deadline_s)
        self._deadline_s, self._rng = deadline_s, rng

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        return parse_metrics(self._client.get("/metrics").raise_for_status().text)

    def total(self, name: str) -> int:
        """The sum of a counter over all its labels."""
        return int(sum(value for (at, _), value in self.metrics().items() if at == name))

    def snapshot(self) -> dict[str, Any]:
        """What the live page shows, newer than this call."""
        time.sleep(1.1)
        return dict(self._client.get("/slo/snapshot.json").raise_for_status().json())

    def load(self) -> dict[str, Any]:
        return dict(self._client.get("/v1/loads").raise_for_status().json()["loads"][0])

    def set(self, setting: str) -> None:
        """``policy=NAME`` or ``prefill=MODE``. Raises ServerError."""
        body = {"server_args": {f"adaserve_{setting}": 1}}
        answer = self._client.post("/set_internal_state", json=body)
        if answer.status_code != 200:
            raise ServerError(f"the change to {setting} was refused: {answer.status_code} {answer.text}")

    def any_setting(self) -> str:
        """A random change that the server must take."""
        name, values = self._rng.choice((("policy", POLICIES), ("prefill", MODES)))
        return f"{name}={self._rng.choice(values)}"

    def await_idle(self) -> str | None:
        """None once nothing runs or waits; else what still does at the deadline."""
        end_s = time.monotonic() + self._deadline_s
        while (load := self.load())["num_running_reqs"] or load["num_waiting_reqs"]:
            if time.monotonic() > end_s:
                return f"{load['num_running_reqs']} requests run and {load['num_waiting_reqs']} wait"
            time.sleep(0.2)
        return None

    def fill(self) -> list[int]:
        """Tokens of the answers to prompts that take most of the pool, all at once: whatever the prefix
        cache holds has to go. Raises httpx.HTTPError."""
        count, length = 9, POOL_TOKENS // 10
        prompts = [[self._rng.randrange(2, 4000) for _ in range(length)] for _ in range(count)]
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        answer = self._client.post("/generate", json={"input_ids": prompts, "sampling_params": params})
        return [item["meta_info"]["completion_tokens"] for item in answer.raise_for_status().json()]

    def flush(self) -> str | None:
        """None once the prefix cache is empty, which SGLang does for an idle server only."""
        end_s = time.monotonic() + self._deadline_s
        while (answer := self._client.post("/flush_cache")).status_code != 200:
            if time.monotonic() > end_s:
                return answer.text
            time.sleep(0.2)
        return None
