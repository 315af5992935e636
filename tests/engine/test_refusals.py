"""What cannot be served is refused with a sentence that says what to change."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from sglang.srt.arg_groups.overrides import record_foreign_defaults, resolving_view
from sglang.srt.arg_groups.serving_hook import handle_missing_default_values
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from adaserve.algorithm import (
    let_drafts_say_how_they_are_quantized,
    settle_width,
    size_reserve,
    tell_what_is_not_used,
)
from adaserve.config import ENV, AdaServeConfig, ConfigError
from adaserve.engine.costs import measure
from adaserve.engine.hidden_states import layers_to_capture, require_same_sizes
from adaserve.engine.sources import draft_model
from adaserve.engine.sources.draft_model import require_same_size, require_same_tokens, require_servable
from adaserve.host.device import DEVICE_PATH_ENV
from adaserve.pair.folders import weights_folder
from adaserve.refusals import CORES_ENV, refuse_unsupported
from tests.engine.conftest import adaserve_server
from tests.engine.harness import Zygote
from tests.engine.pairs import VOCAB


def arguments(**changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = dict(
        speculative_draft_model_path="draft", page_size=1, enable_lora=None, lora_paths=None, tp_size=1,
        pp_size=1, attn_dp_size=1, disaggregation_mode="null", enable_return_hidden_states=False,
        enable_hierarchical_cache=False, enable_streaming_session=False, device="cpu",
        tokenizer_worker_num=1, api_key=None, admin_api_key=None, grpc_port=None,
        smg_grpc_mode=False, grpc_mode=False, dp_size=1, reasoning_parser=None, grammar_backend="xgrammar",
        enable_strict_thinking=False, enable_memory_saver=False, is_embedding=False,
        enable_forward_pass_metrics=False, debug_tensor_dump_output_folder=None, forward_hooks=None,
        attention_backend="adaserve_cpu", prefill_attention_backend=None, decode_attention_backend=None,
        log_level="INFO", log_level_http=None, max_prefill_tokens=1, prefill_max_requests=None,
        max_queued_requests=None, decode_log_interval=40, watchdog_timeout=300.0, model_path="target",
        tokenizer_path=None, skip_tokenizer_init=False, revision=None, speculative_draft_model_revision=None,
        context_length=None, json_model_override_args="{}", trust_remote_code=False,
        quantization=None, speculative_draft_model_quantization=None, kv_cache_dtype="auto",
        speculative_draft_kv_cache_dtype=None,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_what_is_supported_passes() -> None:
    refuse_unsupported(arguments(), AdaServeConfig())
    refuse_unsupported(arguments(), AdaServeConfig(drafts="model,suffix"))
    for backend in ("xgrammar", "none"):
        refuse_unsupported(arguments(reasoning_parser="qwen3", grammar_backend=backend), AdaServeConfig())
    refuse_unsupported(arguments(grammar_backend="llguidance"), AdaServeConfig())
    refuse_unsupported(arguments(log_level="warn", log_level_http="error"), AdaServeConfig())
    refuse_unsupported(arguments(attention_backend="triton", device="cuda"), AdaServeConfig())
    for flag in ("enable_strict_thinking", "enable_memory_saver", "enable_forward_pass_metrics"):
        refuse_unsupported(arguments(device="cuda", **{flag: True}), AdaServeConfig())
    refuse_unsupported(arguments(speculative_draft_model_path=None), AdaServeConfig(drafts="suffix"))
    refuse_unsupported(arguments(forward_hooks=[{"name": "norms"}]), AdaServeConfig(cpu_weights="off"))


def test_medusa_heads_draft_in_place_of_a_model() -> None:
    config = AdaServeConfig(medusa="heads")
    refuse_unsupported(arguments(speculative_draft_model_path=None), config)
    with pytest.raises(ValueError, match="remove --speculative-draft-model-path"):
        refuse_unsupported(arguments(), config)
    refuse_unsupported(arguments(speculative_draft_model_path=None, device="cuda"), config)
    with pytest.raises(ValueError, match="Medusa heads are not shared between ranks"):
        refuse_unsupported(arguments(speculative_draft_model_path=None, device="cuda", tp_size=2), config)


def test_data_parallel_ranks_on_a_cpu_need_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or SGLang's schedulers end in a traceback. More ranks than any host has NUMA nodes."""
    many, config = {"dp_size": 5000}, AdaServeConfig()
    for unset in ("", "all"):
        monkeypatch.setenv(CORES_ENV, unset) if unset else monkeypatch.delenv(CORES_ENV, raising=False)
        with pytest.raises(ValueError, match=r"set SGLANG_CPU_OMP_THREADS_BIND, .*adaserve fleet up"):
            refuse_unsupported(arguments(**many), config)
    refuse_unsupported(arguments(**many, device="cuda"), config)
    monkeypatch.setenv(CORES_ENV, "0|1")
    refuse_unsupported(arguments(**many), config)


def test_a_draft_learns_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would have a trainer of its own, and one folder would seem to be another server's."""
    monkeypatch.setenv(CORES_ENV, "0|1")
    refuse_unsupported(arguments(dp_size=2), AdaServeConfig())
    refuse_unsupported(arguments(), AdaServeConfig(learn=True))
    for ranks in ({"dp_size": 2}, {"tp_size": 2, "device": "cuda"}):
        with pytest.raises(ValueError, match="of a single rank: use --dp-size 1 and --tp-size 1, or leave"):
            refuse_unsupported(arguments(**ranks), AdaServeConfig(learn=True))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for device in ("cuda", "cuda:1"):
        refuse_unsupported(arguments(device="cuda"), AdaServeConfig(learn=True, learn_device=device))
    with pytest.raises(
        ValueError, match="no cuda:2 to train drafts on: give another --adaserve-learn-device"
    ):
        refuse_unsupported(arguments(), AdaServeConfig(learn=True, learn_device="cuda:2"))
    with pytest.raises(ValueError, match="learn_device is 'gpu': it should be cpu, or a GPU such as cuda:1"):
        AdaServeConfig(learn_device="gpu")


@pytest.mark.parametrize(("ranks", "is_served"), [(1, True), (2, True), (4, False), (7, True)])
def test_ranks_share_the_heads_of_drafts(tmp_path: Path, ranks: int, is_served: bool) -> None:
    """Qwen 2.5 0.5B has 14. SGLang says only where it failed, once the target is loaded."""
    transformers.LlamaConfig(num_attention_heads=14, hidden_size=896).save_pretrained(tmp_path)
    args = arguments(speculative_draft_model_path=str(tmp_path), device="cuda", tp_size=ranks)
    says = "has 14 attention heads, which 4 ranks cannot share: use a --tp-size that divides them, or another"
    with nullcontext() if is_served else pytest.raises(ValueError, match=says):
        refuse_unsupported(args, AdaServeConfig())


@pytest.mark.parametrize("drafts", ["model", "self,suffix"])
def test_only_priced_chooses_what_drafts_read(drafts: str) -> None:
    """Others would read everything, which a target that drafts for itself must never do."""
    args = arguments() if drafts == "model" else arguments(speculative_draft_model_path=None)
    for policy, window in (("priced", "auto"), ("none", "auto"), ("adaserve", 256)):
        refuse_unsupported(args, AdaServeConfig(drafts=drafts, policy=policy, draft_window=window))
    with pytest.raises(ValueError, match="chain-4 chooses no draft window"):
        refuse_unsupported(args, AdaServeConfig(drafts=drafts, policy="chain-4", draft_window="auto"))


@pytest.mark.parametrize(
    ("draft", "on_cpu", "on_gpu"), [(300, True, True), (200, True, False), (256, False, False), (None,) * 3]
)
def test_another_vocabulary_is_refused_before_anything_is_loaded(
    tmp_path: Path, draft: int | None, on_cpu: bool, on_gpu: bool
) -> None:
    """On a GPU the target's tokenizer decides, where the draft has fewer tokens."""
    ours = {"model_type": "gemma3", "text_config": {"vocab_size": 256}}
    theirs = {"model_type": "llama", "max_position_embeddings": 2**20}
    theirs |= {} if draft is None else {"vocab_size": draft}
    for name, config in (("target", ours), ("draft", theirs)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "tokenizer.json").touch()
    paths, second = {"model_path": str(tmp_path / "target")}, str(tmp_path / "draft")
    for device, refused in (("cpu", on_cpu), ("cuda", on_gpu)):
        for args, config in (
            (arguments(**paths, device=device, speculative_draft_model_path=second), AdaServeConfig()),
            (arguments(**paths, device=device), AdaServeConfig(second_draft=second)),
        ):
            says = pytest.raises(ValueError, match=f"vocabulary of {draft} tokens and the target one of 256")
            with says if refused else nullcontext():
                refuse_unsupported(args, config)


def test_a_draft_for_shorter_contexts_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, most in (("target", 1024), ("draft", 512)):
        transformers.LlamaConfig(max_position_embeddings=most).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").touch()
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    pairs = (
        ({"speculative_draft_model_path": draft}, AdaServeConfig()),
        ({"speculative_draft_model_path": target}, AdaServeConfig(second_draft=draft)),
    )
    says = "contexts of 512 tokens, and 1024 are served: use --context-length 512, or set SGLANG_ALLOW_"
    for paths, config in pairs:
        args = {"model_path": target, **paths}
        refuse_unsupported(arguments(**args, context_length=512), config)
        both = '{"max_position_embeddings": 256}'
        refuse_unsupported(arguments(**args, json_model_override_args=both), config)
        with pytest.raises(ValueError, match=says):
            refuse_unsupported(arguments(**args), config)
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    refuse_unsupported(arguments(**args), config)


def test_weights_in_the_shipped_form_are_refused() -> None:
    """They were served without their scales, and what they said was nonsense."""
    target, draft = (str(weights_folder() / name) for name in ("target", "draft"))
    for paths, config in (
        ({"model_path": target}, AdaServeConfig()),
        ({"speculative_draft_model_path": draft}, AdaServeConfig()),
        ({}, AdaServeConfig(second_draft=draft)),
    ):
        with pytest.raises(ConfigError, match=r"holds 8-bit weights.*set ADASERVE_PAIR_WEIGHTS"):
            refuse_unsupported(arguments(**paths), config)


def test_quantized_weights_are_refused_where_sglang_cannot_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang says in a traceback that they cannot be float32, which `adaserve serve` sets."""
    config, says = AdaServeConfig(), "serve models in 16 or 32 bits"
    for name, quantised in (("plain", {}), ("quantised", {"quantization_config": {"quant_method": "fp8"}})):
        transformers.LlamaConfig(**quantised).save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").touch()
    plain, quantised = str(tmp_path / "plain"), str(tmp_path / "quantised")
    refuse_unsupported(arguments(model_path=plain, speculative_draft_model_path=plain), config)
    refuse_unsupported(arguments(speculative_draft_model_quantization="unquant"), config)
    for given in (
        {"model_path": quantised},
        {"model_path": plain, "speculative_draft_model_path": quantised},
        {"quantization": "fp8"},
        {"speculative_draft_model_quantization": "w8a8_int8"},
    ):
        with pytest.raises(ValueError, match=says):
            refuse_unsupported(arguments(**given), config)
        refuse_unsupported(arguments(**given, device="cuda"), config)
        with monkeypatch.context() as patch:
            patch.setattr("sglang.srt.utils.cpu_has_amx_support", lambda: True)
            refuse_unsupported(arguments(**given), config)


@pytest.mark.parametrize(
    ("target", "asked", "loaded"),
    [
        (None, None, None),
        ("fp8", None, "fp8"),
        ("fp8", "unquant", None),
        ("awq_marlin", None, None),
        ("awq_marlin", "awq_marlin", "awq_marlin"),
    ],
)
def test_drafts_in_16_bits_are_read_as_they_are(
    tmp_path: Path, target: str | None, asked: str | None, loaded: str | None
) -> None:
    """SGLang would read them as the target, and most ways to do that need a checkpoint of their own."""
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    args = ServerArgs(
        model_path=str(tmp_path), quantization=target, speculative_draft_model_quantization=asked
    )
    handle_missing_default_values(args)
    record_foreign_defaults(args, "adaserve", let_drafts_say_how_they_are_quantized)
    draft = ModelConfig.from_server_args(args, model_path=str(tmp_path), is_draft_model=True)
    assert draft.quantization == loaded and resolving_view(args).quantization == target


def test_a_quantized_draft_does_not_learn(tmp_path: Path) -> None:
    """Its weights have no room for those of a checkpoint in 16 bits. On a GPU this showed once all was
    loaded, or for a head with the first candidate."""
    config = AdaServeConfig(learn=True)
    for name, quantised in (("plain", {}), ("quantised", {"quantization_config": {"quant_method": "fp8"}})):
        transformers.LlamaConfig(**quantised).save_pretrained(tmp_path / name)
    plain, quantised = str(tmp_path / "plain"), str(tmp_path / "quantised")
    refuse_unsupported(arguments(speculative_draft_model_path=plain, device="cuda"), config)
    for given in (
        {"speculative_draft_model_path": quantised},
        {"speculative_draft_model_path": plain, "speculative_draft_model_quantization": "fp8"},
    ):
        with pytest.raises(ValueError, match="a quantized draft does not learn: serve one in 16 bits"):
            refuse_unsupported(arguments(**given, device="cuda"), config)
        refuse_unsupported(arguments(**given, device="cuda"), AdaServeConfig())


@pytest.mark.parametrize("of", ["kv_cache_dtype", "speculative_draft_kv_cache_dtype"])
def test_caches_that_attention_cannot_read_are_refused_early(
    monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    config, asked = AdaServeConfig(), {of: "fp8_e4m3"}
    with pytest.raises(
        ValueError, match="a KV cache of mxfp8 is not supported: use --kv-cache-dtype auto, b"
    ):
        refuse_unsupported(arguments(kv_cache_dtype="mxfp8", device="cuda"), config)
    refuse_unsupported(arguments(**asked, device="cuda"), config)  # without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, is_read in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        refuse_unsupported(arguments(**{of: "fp8_e5m2"}, device="cuda"), config)
        with nullcontext() if is_read else pytest.raises(ValueError, match="needs a GPU of the Ada gen"):
            refuse_unsupported(arguments(**asked, device="cuda"), config)


def test_a_target_without_a_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    """SGLang says in a traceback that there is none, and not what to do."""
    config, bare = AdaServeConfig(), {"model_path": str(tmp_path)}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ValueError, match=f"{tmp_path} has no tokenizer: give .*--skip-tokenizer-init"):
        refuse_unsupported(arguments(**bare), config)
    refuse_unsupported(arguments(**bare, skip_tokenizer_init=True), config)
    refuse_unsupported(arguments(**bare, tokenizer_path="owner/on-a-hub"), config)
    for name in ("tokenizer.json", "vocab.txt", "spiece.model", "qwen.tiktoken", "tekken.json", "own.py"):
        (tmp_path / name).touch()
        refuse_unsupported(arguments(**bare), config)
        (tmp_path / name).unlink()


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
        ({"page_size": 16}, "--page-size 1, and no --attention-backend"),
        ({"lora_paths": ["x"]}, "--lora-paths"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"tp_size": 2}, "--tp-size 1"),
        ({"pp_size": 2}, "--pp-size 1"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"enable_return_hidden_states": True}, "--return-hidden-states-mode"),  # which sets it
        ({"enable_streaming_session": True}, "--enable-streaming-session"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"tokenizer_worker_num": 2, "api_key": "k"}, "--tokenizer-worker-num"),
        ({"tokenizer_worker_num": 2, "admin_api_key": "k"}, "--tokenizer-worker-num"),
        ({"api_key": "clé"}, "ASCII"),
        ({"api_key": ""}, "keys must be ASCII text, not empty"),
        ({"admin_api_key": "root "}, "without spaces at the ends"),
        ({"grpc_port": 40000}, "remove --grpc-port"),
        ({"smg_grpc_mode": True}, "--smg-grpc-mode"),
        ({"grpc_mode": True}, "--grpc-mode"),
        ({"reasoning_parser": "qwen3", "grammar_backend": "llguidance"}, "--grammar-backend xgrammar"),
        ({"reasoning_parser": "qwen3", "grammar_backend": "outlines"}, "remove --reasoning-parser"),
        ({"enable_strict_thinking": True}, "--enable-strict-thinking"),
        ({"enable_memory_saver": True}, "--enable-memory-saver"),
        ({"enable_forward_pass_metrics": True}, "--enable-forward-pass-metrics"),
        ({"debug_tensor_dump_output_folder": "dumps"}, "add --adaserve-cpu-weights off"),
        ({"forward_hooks": [{"name": "norms"}]}, "remove --debug-tensor-dump-output-folder"),
        ({"is_embedding": True}, "--is-embedding"),
        ({"attention_backend": "triton"}, "remove --attention-backend"),
        ({"prefill_attention_backend": "torch_native"}, "--prefill-attention-backend"),
        ({"decode_attention_backend": "torch_native"}, "--decode-attention-backend"),
        ({"log_level": "warn"}, "no log level warn: give --log-level-http critical"),
        ({"max_prefill_tokens": 0}, "--max-prefill-tokens 0"),
        ({"prefill_max_requests": 0}, "--prefill-max-requests 0"),
        ({"max_queued_requests": 0}, "--max-queued-requests 0"),
        ({"decode_log_interval": 0}, "--decode-log-interval 0"),
        ({"watchdog_timeout": 0.0}, "--watchdog-timeout 0.0"),
    ],
)
def test_refusals_name_the_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=r"ADASERVE: ") as refused:
        refuse_unsupported(arguments(**changes), AdaServeConfig())
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    "flags", [{"enable_dp_attention": True, "dp_size": 2}, {"attn_dp_size": 2}], ids=["old", "new"]
)
def test_data_parallel_attention_is_refused_as_it_is_resolved(flags: dict[str, Any]) -> None:
    """Of the old flag SGLang makes the new one before it asks us, and then takes the old one for unset."""
    given = ServerArgs(model_path="none", tp_size=2, **flags)
    given.resolve_once()
    resolved = resolving_view(given)
    width, old, dp = resolved.attn_dp_size, resolved.enable_dp_attention, resolved.dp_size
    assert not old
    args = arguments(device="cuda", tp_size=2, attn_dp_size=width, enable_dp_attention=old, dp_size=dp)
    with pytest.raises(ValueError, match="remove --attn-dp-size and --enable-dp-attention"):
        refuse_unsupported(args, AdaServeConfig())


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


def target_of(folder: Path, size: int = VOCAB, device: str = "cpu") -> Any:
    """SGLang's worker of the target, as far as it is asked."""
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=size), device=device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return SimpleNamespace(model_runner=runner, tokenizer=tokenizer)


def draft_of(folder: Path, size: int = VOCAB) -> Any:
    """The same of a draft, whose tokenizer SGLang does not load."""
    config = SimpleNamespace(vocab_size=size, model_path=str(folder), revision=None)
    return SimpleNamespace(model_runner=SimpleNamespace(model_config=config), tokenizer=None)


def test_sizes_of_vocabularies(pair: Path) -> None:
    target = target_of(pair / "target")
    require_same_size(target, draft_of(pair / "noisy"), "lab/noisy")
    with pytest.raises(ValueError, match=r"lab/noisy has a vocabulary of 300 tokens .* choose a draft"):
        require_same_size(target, draft_of(pair / "noisy", size=300), "lab/noisy")


def test_a_larger_target_may_pad_its_vocabulary_on_a_gpu(pair: Path) -> None:
    padded, draft = target_of(pair / "target", size=640, device="cuda"), draft_of(pair / "noisy")
    require_same_size(padded, draft, "noisy")
    with pytest.raises(ValueError, match="choose a draft"):
        require_same_size(target_of(pair / "target", size=640), draft, "noisy")
    with pytest.raises(ValueError, match="choose a draft"):
        require_same_size(padded, draft_of(pair / "noisy", size=256), "noisy")


@pytest.fixture
def tokenizer_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say how tokenizers are read."""
    serving = SimpleNamespace(tokenizer_mode="auto", tokenizer_backend="huggingface")
    monkeypatch.setattr(draft_model, "get_serving", lambda: serving)
    monkeypatch.setattr(draft_model, "get_model", lambda: SimpleNamespace(trust_remote_code=False))


@pytest.mark.usefixtures("tokenizer_flags")
def test_a_draft_with_other_tokens_is_refused(pair: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = target_of(pair / "target")
    require_same_tokens(target, draft_of(pair / "noisy"), "lab/noisy")
    with pytest.raises(
        ValueError, match=r"lab/swapped and the target number 2 .* \(first 'a', .* choose a draft"
    ):
        require_same_tokens(target, draft_of(pair / "swapped"), "lab/swapped")
    assert "not compared" not in caplog.text


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.usefixtures("tokenizer_flags")
def test_a_draft_without_a_tokenizer_is_served(
    family: str, pair: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For a Qwen 2, Transformers makes one of a single token."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    require_same_tokens(target_of(pair / "target"), draft_of(tmp_path), "lab/bare")
    assert "tokens of the draft lab/bare were not compared" in caplog.text


def test_without_the_targets_tokenizer_nobody_can_tell(
    pair: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With --skip-tokenizer-init. And some tokenizers, such as Mistral's own, do not say what was added."""
    monkeypatch.setattr(draft_model, "_tokenizer_of", lambda _: pytest.fail("it was read"))
    require_same_tokens(SimpleNamespace(tokenizer=None), draft_of(pair / "swapped"), "swapped")
    monkeypatch.setattr(draft_model, "_tokenizer_of", lambda _: object())
    require_same_tokens(target_of(pair / "target"), draft_of(pair / "swapped"), "lab/other")
    assert "tokens of the draft lab/other were not compared" in caplog.text


class Words:
    """A tokenizer of these words; those in angle brackets were added."""

    def __init__(self, *words: str) -> None:
        self._ids = {word: i for i, word in enumerate(words)}

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def get_added_vocab(self) -> dict[str, int]:
        return {word: i for word, i in self._ids.items() if word.startswith("<")}


@pytest.mark.parametrize(
    ("words", "differ"),
    [
        (("a", "b", "<end>"), 0),
        (("a", "b", "<end>", "<tool>", "<think>"), 0),
        (("a", "b", "<stop>", "<spare>"), 0),
        (("b", "a", "<end>", "<tool>"), 2),
        (("a", "c", "<end>", "<tool>"), 2),
        (("a", "<end>", "<tool>"), 1),
        (("a", "b", "c", "<end>", "<tool>"), 1),
    ],
)
def test_tokens_that_were_added_may_differ(
    words: tuple[str, ...], differ: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of a family have other marks of turns, thoughts and tools."""
    one, other = Words("a", "b", "<end>", "<tool>"), Words(*words)
    draft = SimpleNamespace(model_runner=SimpleNamespace(model_config=None))
    for ours, theirs in ((one, other), (other, one)):
        monkeypatch.setattr(draft_model, "_tokenizer_of", lambda _, read=theirs: read)
        refused = pytest.raises(ValueError, match=f"number {differ} of their tokens differently")
        with refused if differ else nullcontext():
            require_same_tokens(SimpleNamespace(tokenizer=ours), draft, "lab/draft")


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


@pytest.mark.parametrize(
    ("second", "flags", "sentence"),
    [
        (None, {"page-size": 16}, "page size 16 is not supported: use --page-size 1"),
        ("swapped", {}, r"an exception: the draft \S+ and the target number 2 of their tokens differently"),
    ],
)
def test_a_server_that_is_refused_ends_with_the_sentence(
    zygote: Zygote, pair: Path, tmp_path: Path, second: str | None, flags: dict[str, Any], sentence: str
) -> None:
    """Before it serves anybody, whether SGLang's first process finds out or a scheduler, which gives no more
    than the sentence."""
    config = {} if second is None else {"second_draft": str(pair / second)}
    server, _ = adaserve_server(tmp_path, pair, "noisy", config, **flags)
    with pytest.raises(RuntimeError, match="the server ended"), server.running(zygote):
        pass
    assert re.search(sentence, server.log.read_text())


def test_gpus_draft_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a width was asked for."""
    monkeypatch.delenv(DEVICE_PATH_ENV, raising=False)
    monkeypatch.setenv(ENV, "{}")
    assert settle_width(AdaServeConfig(), "cpu").widest == AdaServeConfig.load().widest == 3
    assert settle_width(AdaServeConfig(max_width=2), "cuda").widest == 2
    assert settle_width(AdaServeConfig(), "cuda").widest == AdaServeConfig.load().widest == 8
    monkeypatch.setenv(DEVICE_PATH_ENV, "1")
    assert settle_width(AdaServeConfig(), "cpu").widest == 8, "which exercises a GPU's parts"


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


def test_flags_that_are_not_used_are_not_silently_lost(caplog: pytest.LogCaptureFixture) -> None:
    tell_what_is_not_used(ServerArgs(model_path="none"))
    assert not caplog.records
    given = ServerArgs(model_path="none", enable_mixed_chunk=True, speculative_accept_threshold_acc=0.4)
    tell_what_is_not_used(given)
    assert [r.getMessage().partition(":")[2] for r in caplog.records] == [
        " --enable-mixed-chunk has no effect: see --adaserve-prefill mixed",
        " --speculative-accept-threshold-acc has no effect: all text is exactly the target's",
    ]


def test_a_full_profile_has_no_more_points_than_its_progress_bar() -> None:
    def mark() -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    target = SimpleNamespace(run=lambda batch: batch, argmax=lambda states: states)
    draft = SimpleNamespace(rehearse=lambda batch, width: 1)
    device = SimpleNamespace(target=target, mark=mark, time=lambda models, step: 1e-3)
    table = torch.zeros(64, 16_384, dtype=torch.int32)
    room = measure.Room(device, table, 1 << 20, 64, 16_384)  # type: ignore[arg-type]
    said: list[str] = []
    measure.measure(room, [draft], measure.FULL, said.append)  # type: ignore[list-item]
    assert len(said) == measure.profile_steps()


def test_a_slow_host_is_not_measured_with_large_forwards() -> None:
    """A server would take minutes to start."""
    ran: list[int] = []
    target = SimpleNamespace(run=lambda batch: ran.append(len(batch)), argmax=lambda states: states)
    mark = SimpleNamespace(wait=lambda: None)
    device: Any = SimpleNamespace(target=target, mark=lambda: mark, time=lambda models, step: 0.1 * ran[-1])
    room = measure.Room(device, torch.zeros(8, 512, dtype=torch.int32), 1 << 20, 8, 256)
    measure.measure(room, [], measure.Grid((1, 2, 8, 32, 64), (), (64,), repeats=1, stop_s=0.5))
    assert 8 in ran and not {32, 64} & set(ran)


def test_a_pool_without_room_for_a_request() -> None:
    device = SimpleNamespace(target=None, mark=lambda: SimpleNamespace(wait=lambda: None))
    room = measure.Room(device, torch.zeros(4, 64, dtype=torch.int32), 1, 4, 64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"room for 1 tokens.* raise --max-total-tokens"):
        measure.measure(room, [], measure.FULL)
