"""What cannot be served is refused with a sentence that says what to change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from adaserve.algorithm import refuse_unsupported, size_reserve
from adaserve.config import AdaServeConfig, ConfigError
from adaserve.engine.hidden_states import layers_to_capture, require_same_sizes
from adaserve.engine.sources.draft_model import require_common_vocabulary, require_servable
from tests.engine.conftest import adaserve_server


def arguments(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = dict(
        speculative_draft_model_path="draft", page_size=1, enable_lora=None, lora_paths=None, tp_size=1,
        pp_size=1, enable_dp_attention=False, disaggregation_mode="null", enable_return_hidden_states=False,
        enable_hierarchical_cache=False, enable_streaming_session=False, speculative_adaptive=False,
        device="cpu", tokenizer_worker_num=1, api_key=None, admin_api_key=None, grpc_port=None,
        smg_grpc_mode=False, grpc_mode=False,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_what_is_supported_passes() -> None:
    refuse_unsupported(arguments(), AdaServeConfig())
    refuse_unsupported(arguments(), AdaServeConfig(drafts="model,suffix"))
    refuse_unsupported(arguments(speculative_draft_model_path=None), AdaServeConfig(drafts="suffix"))


def test_medusa_heads_draft_in_place_of_a_model() -> None:
    config = AdaServeConfig(medusa="heads")
    refuse_unsupported(arguments(speculative_draft_model_path=None), config)
    with pytest.raises(ValueError, match="remove --speculative-draft-model-path"):
        refuse_unsupported(arguments(), config)
    refuse_unsupported(arguments(speculative_draft_model_path=None, device="cuda"), config)
    with pytest.raises(ValueError, match="Medusa heads are not shared between ranks"):
        refuse_unsupported(arguments(speculative_draft_model_path=None, device="cuda", tp_size=2), config)


def test_ranks_do_not_prefill_by_the_clock() -> None:
    """Unless it was asked for, they simply prefill exclusively."""
    ranks = arguments(device="cuda", tp_size=2)
    for prefill in (None, "exclusive"):
        refuse_unsupported(ranks, AdaServeConfig(prefill=prefill))
    with pytest.raises(ValueError, match=r"must prefill alike.* remove --adaserve-prefill slack"):
        refuse_unsupported(ranks, AdaServeConfig(prefill="slack"))
    refuse_unsupported(arguments(device="cuda"), AdaServeConfig(prefill="slack"))


def test_a_draft_model_without_a_use_is_refused() -> None:
    with pytest.raises(ValueError, match="remove --speculative-draft-model-path"):
        refuse_unsupported(arguments(), AdaServeConfig(drafts="suffix"))


@pytest.mark.parametrize(
    ("kinds", "settings", "remedy"),
    [
        (["eagle3", "model"], {}, "leave --second-draft out"),
        (["mtp"], {"learn": True}, "an MTP layer .* leave --learn out"),
    ],
)
def test_where_no_head_is_served(kinds: Any, settings: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        require_servable(kinds, AdaServeConfig(**settings))
    require_servable(["eagle3"], AdaServeConfig())
    require_servable(["model"] * len(kinds), AdaServeConfig(**settings))


def test_an_mtp_layer_of_another_target_is_refused() -> None:
    """The kernels would read foreign memory."""
    layer = SimpleNamespace(hidden_size=128, vocab_size=512)
    require_same_sizes(SimpleNamespace(hidden_size=128, vocab_size=512), layer)
    for sizes in ((64, 512), (128, 500)):
        target = SimpleNamespace(hidden_size=sizes[0], vocab_size=sizes[1])
        with pytest.raises(ValueError, match="128 numbers and 512 .* {} and {}: serve".format(*sizes)):
            require_same_sizes(target, layer)


class CapturingTarget:
    """What SGLang's models do when they are asked for hidden states."""

    def __init__(self, layers: int) -> None:
        self.config, self.model = SimpleNamespace(num_hidden_layers=layers), SimpleNamespace()

    def set_eagle3_layers_to_capture(self, ids: list[int] | None) -> None:
        n = self.config.num_hidden_layers
        self.model.layers_to_capture = [2, n // 2, n - 3] if ids is None else [i + 1 for i in ids]


@pytest.mark.parametrize(
    ("layers", "ids", "captured"),
    [
        (32, None, [2, 16, 29]),
        (3, None, [0, 1, 2]),
        (32, [1, 28, 14], [2, 15, 29]),
        (4, None, None),
        (8, [1, 3, 7], None),
    ],
)
def test_layers_that_a_head_reads(layers: int, ids: list[int] | None, captured: list[int] | None) -> None:
    """In ascending order, as SGLang hands them out; None = there are not three of them."""
    options = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    head = SimpleNamespace(config=SimpleNamespace(**options), model=SimpleNamespace(num_aux_hidden_states=3))
    if captured is None:
        with pytest.raises(ValueError, match=r"reads 3 hidden states.*eagle_aux_hidden_state_layer_ids"):
            layers_to_capture(CapturingTarget(layers), head)
    else:
        assert layers_to_capture(CapturingTarget(layers), head) == captured
    with pytest.raises(ValueError, match="hands out no hidden states"):
        layers_to_capture(SimpleNamespace(), head)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"page_size": 16}, "--page-size 1"),
        ({"lora_paths": ["x"]}, "--lora-paths"),
        ({"enable_lora": True}, "--lora-paths"),
        ({"tp_size": 2}, "--tp-size 1"),
        ({"pp_size": 2}, "--pp-size 1"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_return_hidden_states": True}, "--enable-return-hidden-states"),
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"tokenizer_worker_num": 2, "api_key": "k"}, "--tokenizer-worker-num"),
        ({"tokenizer_worker_num": 2, "admin_api_key": "k"}, "--tokenizer-worker-num"),
        ({"api_key": "clé"}, "ASCII"),
        ({"api_key": ""}, "an empty key lets everybody in"),
        ({"admin_api_key": "root "}, "without spaces at the ends"),
        ({"grpc_port": 40000}, "remove --grpc-port"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"grpc_mode": True}, "--smg-grpc-mode"),
    ],
)
def test_refusals_name_the_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=r"ADASERVE: ") as refused:
        refuse_unsupported(arguments(**changes), AdaServeConfig())
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_RUST_SERVER", "1"),
        ("SGLANG_GRPC_PORT", "40000"),
        ("SGLANG_ENABLE_REQUEST_DECOMPRESSION", "1"),
    ],
)
def test_so_do_those_of_variables(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"unset {name}"):
        refuse_unsupported(arguments(), AdaServeConfig())


def worker(folder: Path, size: int = 512, device: str = "cpu") -> Any:
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=size), device=device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return SimpleNamespace(model_runner=runner, tokenizer=tokenizer)


def test_vocabularies(pair: Path) -> None:
    target = worker(pair / "target")
    require_common_vocabulary(target, worker(pair / "noisy"))
    with pytest.raises(ValueError, match=r"vocabulary of 300 tokens .* choose a draft"):
        require_common_vocabulary(target, worker(pair / "noisy", size=300))
    with pytest.raises(ValueError, match=r"first difference: 'a' .* choose a draft"):
        require_common_vocabulary(target, worker(pair / "swapped"))
    with pytest.raises(ValueError, match="the draft model lab/second has a vocabulary of 300"):
        require_common_vocabulary(target, worker(pair / "second", size=300), "lab/second")


def test_a_larger_target_may_pad_its_vocabulary_on_a_gpu(pair: Path) -> None:
    padded, draft = worker(pair / "target", size=640, device="cuda"), worker(pair / "noisy")
    require_common_vocabulary(padded, draft)
    with pytest.raises(ValueError, match="choose a draft"):
        require_common_vocabulary(worker(pair / "target", size=640), draft)
    with pytest.raises(ValueError, match="choose a draft"):
        require_common_vocabulary(padded, worker(pair / "noisy", size=256))


@pytest.mark.parametrize(
    ("json_text", "message"),
    [
        ('{"policy": "best"}', "unknown policy 'best': known are adaserve"),
        ('{"policy": "chain-0"}', "unknown policy"),
        ("{policy: none}", "not valid JSON"),
        ('{"polizy": "none"}', "unknown setting 'polizy': known are policy"),
        ('{"max_depth": 0}', "max_depth is 0: it should be greater than or equal to 1"),
        ('{"max_width": "wide"}', "max_width is 'wide': it should be a valid integer"),
        ('{"budget": 0}', "budget is 0: it should be greater than or equal to 1"),
        ('{"profile": "/nowhere.json"}', "there is no file /nowhere.json"),
    ],
)
def test_bad_configuration(monkeypatch: pytest.MonkeyPatch, json_text: str, message: str) -> None:
    monkeypatch.setenv("ADASERVE_CONFIG", json_text)
    with pytest.raises(ConfigError, match=message):
        AdaServeConfig.load()


PAGES: dict[str, Any] = {"page-size": 16}


def test_a_server_that_is_refused_ends_with_the_sentence(pair: Path, tmp_path: Path) -> None:
    server, _ = adaserve_server(tmp_path, pair, "noisy", {}, **PAGES)
    ended = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *server.flags],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode != 0
    assert "page size 16 is not supported: use --page-size 1" in ended.stderr + ended.stdout


def test_sizes_of_trees_that_sglang_was_given_are_not_silently_lost(caplog: pytest.LogCaptureFixture) -> None:
    config = AdaServeConfig(max_depth=4, max_width=2)
    args = SimpleNamespace(
        speculative_num_steps=9, speculative_eagle_topk=2, speculative_num_draft_tokens=None
    )
    for _ in range(2):  # SGLang resolves its arguments in every process
        size_reserve(args, config)
    assert (args.speculative_num_steps, args.speculative_eagle_topk) == (config.deepest, 2)
    assert args.speculative_num_draft_tokens == 1 + config.max_candidates
    assert [r.getMessage() for r in caplog.records] == [
        "AdaServe: --speculative-num-steps 9 has no effect: see --adaserve-max-depth"
    ]
