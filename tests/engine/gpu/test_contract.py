"""What the device path uses of SGLang and FlashInfer, whose kernels no test can run without a GPU."""

from __future__ import annotations

import inspect
import json
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaserve.algorithm import AdaServeAlgorithm
from adaserve.config import AdaServeConfig
from adaserve.errors import UnsupportedError
from adaserve.sglang_compat import NAME

SGLANG = "sglang.srt"
MEMBERS = [
    f"{SGLANG}.distributed.parallel_state.graph_capture",
    f"{SGLANG}.model_executor.runner_utils.pool.get_or_create_global_graph_memory_pool",
    f"{SGLANG}.model_executor.runner_utils.pool.get_or_create_global_graph_capture_stream",
    f"{SGLANG}.distributed.device_communicators.pynccl_allocator.set_graph_pool_id",
    f"{SGLANG}.model_executor.runner_utils.capture_mode.model_capture_mode",
    f"{SGLANG}.model_executor.forward_context.forward_context",
    f"{SGLANG}.model_executor.forward_batch_info.ForwardMode.TARGET_VERIFY",
    f"{SGLANG}.layers.attention.base_attn_backend.AttentionBackend.forward",
    f"{SGLANG}.runtime_context.get_model",
    f"{SGLANG}.runtime_context.get_parallel",
    f"{SGLANG}.configs.model_config.ModelConfig.get_num_kv_heads",
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.reset_workspace_buffer",
]
PARAMETERS = {
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.__init__": {
        "float_workspace_buffer", "kv_layout", "use_cuda_graph", "qo_indptr_buf", "paged_kv_indptr_buf",
        "paged_kv_indices_buf", "paged_kv_last_page_len_buf", "custom_mask_buf", "mask_indptr_buf", "backend",
    },
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.plan": {
        "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len", "num_qo_heads",
        "num_kv_heads", "head_dim_qk", "page_size", "sm_scale", "q_data_type", "kv_data_type", "o_data_type",
        "non_blocking",
    },
    "flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper.run": {"q", "paged_kv_cache", "out"},
    f"{SGLANG}.model_executor.pool_configurator.DefaultPoolConfigurator.__init__": {"kvc"},
    f"{SGLANG}.distributed.parallel_state.graph_capture": {"stream"},
}  # fmt: skip


@pytest.mark.parametrize("name", MEMBERS)
def test_member(name: str) -> None:
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert PARAMETERS[name] <= set(inspect.signature(pkgutil.resolve_name(name)).parameters)


def test_the_planner_leaves_mask_and_slots_to_us() -> None:
    """In graph mode, without a mask argument, ``plan`` keeps the buffers, and ``run`` uses the mask's."""
    wrapper = pkgutil.resolve_name("flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper")
    source = inspect.getsource(wrapper)
    assert "if self._custom_mask_buf is not None or self._variant_owns_mask:" in source
    assert (
        "if custom_mask is not None or packed_custom_mask is not None:\n            mask_indptr =" in source
    )


def test_queries_are_read_by_their_strides() -> None:
    """And rows of the output lie one behind another."""
    import flashinfer

    data = Path(flashinfer.__file__).parent / "data"
    launch = (data / "csrc" / "batch_prefill_paged.cuh").read_text()
    assert "q_stride_n = q.stride(0)" in launch and "q_stride_h = q.stride(1)" in launch
    kernel = (data / "include" / "flashinfer" / "attention" / "prefill.cuh").read_text()
    assert "o_stride_n = num_qo_heads * HEAD_DIM_VO, o_stride_h = HEAD_DIM_VO" in kernel


def test_the_draft_counts_in_a_tokens_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from adaserve.patches.start import kv_sizing

    named = SimpleNamespace(architectures=["LlamaForCausalLM"])
    draft = SimpleNamespace(
        num_hidden_layers=16, num_nextn_predict_layers=None, head_dim=64, hidden_size=512, hf_config=named,
        get_num_kv_heads=lambda tp, dcp: 8 // tp, dtype=torch.float16,
    )  # fmt: skip
    drafts = ["first"]
    monkeypatch.setattr(kv_sizing, "draft_paths", lambda config: drafts)
    monkeypatch.setattr(kv_sizing, "draft_config", lambda args, path: draft)
    parallel = SimpleNamespace(attn_tp_size=2, attn_dcp_size=1)
    monkeypatch.setattr(f"{SGLANG}.runtime_context.get_parallel", lambda: parallel)
    of_target, of_draft = (
        SimpleNamespace(kv_cache_dtype="auto"),
        SimpleNamespace(speculative_draft_kv_cache_dtype=None),
    )
    monkeypatch.setattr(f"{SGLANG}.runtime_context.get_model", lambda: of_target)
    monkeypatch.setattr(f"{SGLANG}.runtime_context.get_spec", lambda: of_draft)

    def sized(**over: Any) -> Any:
        values = {"is_draft_worker": False, "server_args": None,
                  "kv_cache_dtype": torch.bfloat16, "device": "cuda",
                  "model_config": SimpleNamespace(vocab_size=1000)}  # fmt: skip
        configurator = SimpleNamespace(_cell_size=1000, _fixed_overhead_bytes=5)
        kv_sizing._count_draft(None, configurator, SimpleNamespace(**values | over))
        return configurator

    # Keys and values, 16 layers, 4 of 8 heads on this rank, 64 wide, 2 bytes.
    assert sized()._cell_size == 1000 + 2 * 16 * 4 * 64 * 2
    assert sized()._fixed_overhead_bytes == 5 + kv_sizing.DEVICE_RESERVE_BYTES + 6_144_000
    quarter = torch.float8_e4m3fn
    assert sized(kv_cache_dtype=quarter)._cell_size == 1000 + 2 * 16 * 4 * 64 * 2, "the target's checkpoint"
    of_target.kv_cache_dtype = "fp8_e4m3"
    assert sized(kv_cache_dtype=quarter)._cell_size == 1000 + 2 * 16 * 4 * 64
    of_target.kv_cache_dtype = "auto"
    named.architectures = ["LlamaForCausalLMEagle3"]  # and one hidden state of the target
    assert sized()._cell_size == 1000 + 2 * 16 * 4 * 64 * 2 + 512 * 2
    assert sized(kv_cache_dtype=quarter)._cell_size == sized()._cell_size, "which is not rounded"
    named.architectures = ["LlamaForCausalLM"]
    drafts.append("second")
    assert sized()._cell_size == 1000 + 2 * (2 * 16 * 4 * 64 * 2)
    assert sized(device="cpu")._fixed_overhead_bytes == 5
    assert sized(is_draft_worker=True)._cell_size == 1000

    drafts.clear()  # Medusa heads: a hidden state per token, and weights that SGLang does not load
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(bytes(77))
    monkeypatch.setattr(AdaServeConfig, "load", lambda: AdaServeConfig(medusa=str(tmp_path)))
    with_heads = sized(model_config=SimpleNamespace(vocab_size=1000, hidden_size=512, dtype=None))
    assert with_heads._cell_size == 1000 + 512 * 2
    assert with_heads._fixed_overhead_bytes == 5 + kv_sizing.DEVICE_RESERVE_BYTES + 6_144_000 + 77


def test_sglang_leaves_graphs_to_us(tmp_path: Path) -> None:
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from adaserve.algorithm import leave_graphs_to_us

    given = CudaGraphConfig(decode=PhaseConfig(backend="full"), prefill=PhaseConfig(backend="breakable"))
    plain, heads = AdaServeConfig(), AdaServeConfig(medusa="heads")
    for kind, ours, prefill in (
        ("LlamaForCausalLM", plain, "breakable"),
        ("LlamaForCausalLMEagle3", plain, "disabled"),
        (None, heads, "disabled"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [kind]}))
        args = SimpleNamespace(
            cuda_graph_config=given,
            _cuda_graph_config_locked=set(),
            speculative_draft_model_path=kind and str(tmp_path),
            speculative_draft_model_revision=None,
        )
        leave_graphs_to_us(args, ours)
        assert args.cuda_graph_config.decode.backend == "disabled"
        assert args.cuda_graph_config.prefill.backend == prefill, "a head reads what prefills hand out"
        assert args.disable_flashinfer_autotune
    assert given.decode.backend == "full", "the user's own object must stay as it was"
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    args.speculative_draft_model_path = str(tmp_path)
    with pytest.raises(UnsupportedError, match="draft_kind is mtp"):  # before models are loaded
        leave_graphs_to_us(args, AdaServeConfig(draft_kind="mtp"))


def test_sglang_makes_up_no_verification_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With which it would tune FlashInfer's kernels: its attention backends ask for the mask."""
    from sglang.srt.speculative import spec_info

    algorithm = AdaServeAlgorithm(NAME, lambda _: object)
    monkeypatch.setattr(spec_info, "get_spec_config", lambda: None)
    assert algorithm.is_speculative()
    assert spec_info.create_dummy_verify_input(algorithm, None, 49, False) is None


@pytest.mark.parametrize("off", ["decode", "prefill"])
def test_graphs_that_are_turned_off_are_ours_as_well(off: str) -> None:
    """By any of SGLang's flags. What it turns off by itself (prefills of models with images) is not."""
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig

    from adaserve.algorithm import leave_graphs_to_us

    for asked in (set(), {(off, "backend")}):
        args = SimpleNamespace(
            cuda_graph_config=CudaGraphConfig(**{off: PhaseConfig(backend="disabled")}),
            _cuda_graph_config_locked=asked,
            speculative_draft_model_path=None,
            speculative_draft_model_revision=None,
        )
        leave_graphs_to_us(args, AdaServeConfig())
        for phase in ("decode", "prefill"):
            assert getattr(args, f"disable_{phase}_cuda_graph") is (bool(asked) and phase == off)


def test_which_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaserve.host.device import DEVICE_PATH_ENV, on_device

    monkeypatch.delenv(DEVICE_PATH_ENV, raising=False)
    assert on_device("cuda:0") and not on_device("cpu")
    monkeypatch.setenv(DEVICE_PATH_ENV, "1")
    assert on_device("cpu")


def test_a_draft_may_pad_its_vocabulary_less() -> None:
    from adaserve.engine.sources.draft_model import require_same_size

    class Tokenizer:
        def __len__(self) -> int:
            return 150

    def worker(size: int, device: str = "cuda") -> Any:
        config = SimpleNamespace(vocab_size=size)
        runner = SimpleNamespace(model_config=config, device=device)
        return SimpleNamespace(model_runner=runner, tokenizer=Tokenizer())

    require_same_size(worker(256), worker(160), "draft")
    for target, draft in [(worker(160), worker(256)), (worker(256), worker(149))]:
        with pytest.raises(ValueError, match="choose a draft of the same family"):
            require_same_size(target, draft, "draft")
    with pytest.raises(ValueError, match="choose a draft of the same family"):
        require_same_size(worker(256, "cpu"), worker(160, "cpu"), "draft")
