"""Attention that our code does not compute is refused, on every device: its text would be another one."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import sglang.srt.configs
import torch
import transformers
from sglang.srt.environ import envs
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding

from adaserve.engine.cpu import params as cpu
from adaserve.engine.cpu import sglang_forward
from adaserve.engine.cpu.attention_backend import CpuAttentionBackend
from adaserve.engine.cpu.kv_pool import CpuMHATokenToKVPool
from adaserve.engine.gpu import model as gpu
from adaserve.engine.gpu.attention import TreeAttentionBackend
from adaserve.engine.gpu.attention_shape import AttentionShape
from adaserve.engine.model_support import require_own_positions, require_supported_model, require_windows
from adaserve.engine.trees.attention import Scores, attend, attention_plan
from adaserve.engine.trees.batch import TreeBatch
from tests.engine.gpu.factories import CPU

MORE = {
    "capped by sigmoid": {"logit_cap": 50.0, "logit_capping_method": "sigmoid"},
    "positions": {"pos_encoding_mode": "ALIBI"},
    "their own chunk": {"use_irope": True},
    "another width": {"v_head_dim": 4},
    "later ones": {"attn_type": AttentionType.DECODER_BIDIRECTIONAL},
    "another text": {"is_cross_attention": True},
}


def runner(*layers: dict[str, Any]) -> SimpleNamespace:
    model = torch.nn.ModuleList(RadixAttention(4, 8, 0.5, 2, i, **more) for i, more in enumerate(layers))
    pool = SimpleNamespace(dtype=torch.float32)
    return SimpleNamespace(
        model=model,
        dtype=torch.float32,
        token_to_kv_pool=pool,
        req_to_token_pool=None,
        kv_index_translator=None,
    )


def test_plain_layers_are_served() -> None:
    shape = AttentionShape.of(runner({}, {}))
    assert shape.q_heads == 4 and shape.plain_scores
    CpuAttentionBackend(runner({}, {}))


@pytest.mark.parametrize("more", [{"sliding_window_size": 128}, {"logit_cap": 50.0}])
def test_windows_and_caps_are_served(more: dict[str, Any]) -> None:
    assert not AttentionShape.of(runner({}, more)).plain_scores
    CpuAttentionBackend(runner({}, more))


def test_windows_are_longer_than_trees_are_deep() -> None:
    """And nothing is left out before them: keys are counted in the list."""
    model = runner({"sliding_window_size": 20}, {}, {"sliding_window_size": 12}).model
    require_windows(model, deepest=12, leaves_out=False)
    with pytest.raises(ValueError, match=r"12 earlier tokens.*--max-depth 12 or less"):
        require_windows(model, deepest=13, leaves_out=False)
    with pytest.raises(ValueError, match=r"--draft-window 0, and not --drafts self"):
        require_windows(model, deepest=12, leaves_out=True)
    require_windows(runner({}).model, deepest=13, leaves_out=True)


@pytest.mark.parametrize("what", MORE)
def test_more_is_refused(what: str) -> None:
    for takes in (AttentionShape.of, CpuAttentionBackend):
        with pytest.raises(ValueError, match=what):
            takes(runner({}, MORE[what]))


def test_keys_of_different_sizes_are_refused() -> None:
    """As in Gemma 4: one pool holds them all."""
    asks = runner({}, {})
    asks.model[1].qk_head_dim = asks.model[1].v_head_dim = 16
    for takes in (AttentionShape.of, CpuAttentionBackend):
        with pytest.raises(ValueError, match="keys of different sizes"):
            takes(asks)


def test_grok_is_refused() -> None:
    """Its model sets this after the layer was made."""
    asks = runner({}, {})
    asks.model[1].xai_temperature_len = 1024
    for takes in (AttentionShape.of, CpuAttentionBackend):
        with pytest.raises(ValueError, match="positions"):
            takes(asks)


@pytest.mark.parametrize(
    ("pool", "remedy"),
    [
        ({"dtype": torch.float16, "use_hnd": True}, "unset SGLANG_USE_HND_KVCACHE"),
        ({"dtype": torch.uint8}, "of nvfp4 is not supported: use --kv-cache-dtype auto, bf16, fp8_e4m3"),
        ({"dtype": torch.float8_e4m3fn, "k_scale_buffer": []}, "--kv-cache-dtype auto, bf16, fp8_e4m3"),
    ],
)
def test_caches_that_kernels_cannot_read_are_refused(pool: dict[str, Any], remedy: str) -> None:
    asked = runner({})
    asked.kv_cache_dtype_str = "nvfp4"
    asked.token_to_kv_pool = SimpleNamespace(**pool)
    with pytest.raises(ValueError, match=remedy):
        AttentionShape.of(asked)
    assert hasattr(envs, "SGLANG_USE_HND_KVCACHE")


@pytest.mark.parametrize("backend", [CpuAttentionBackend, TreeAttentionBackend])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_keys_and_values_in_eight_bits_have_scales(backend: Any, dtype: torch.dtype) -> None:
    """Those of a checkpoint, without which such numbers would overflow; for others SGLang's own backends have
    none either."""
    asked, k_scale, v_scale = runner({}), 40.0, 500.0
    asked.token_to_kv_pool = CpuMHATokenToKVPool(8, 1, dtype, 2, 8, 1, "cpu", False)
    (layer,) = asked.model
    layer.k_scale, layer.v_scale = torch.tensor(k_scale), torch.tensor(v_scale)
    layer.k_scale_float, layer.v_scale_float = k_scale, v_scale
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(3, heads, 8, generator=generator) for heads in (4, 2, 2))
    q, keys, values = q * 0.001, keys * 1e3, values * 1e4  # fp8_e4m3 ends at 448
    batch = TreeBatch.causal(np.zeros(3, np.int64), np.array([0]), np.array([0]), np.array([3]))
    plan = attention_plan(torch.arange(1, 9, dtype=torch.int32)[None], batch)
    opened = backend(asked)
    if backend is CpuAttentionBackend:
        opened.plan = plan
    else:
        opened.kernel = SimpleNamespace(run=lambda q, k, v, scores, _: attend(q.float(), k, v, plan, scores))
    where = SimpleNamespace(out_cache_loc=torch.arange(1, 4))
    out = opened.forward_extend(q, keys.clone(), values.clone(), layer, where)
    right = attend(q, keys, values, replace(plan, kv_indices=torch.arange(3)), Scores(0.5))
    assert (out - right).abs().max() < (0.07 if dtype.itemsize == 1 else 0.01) * right.abs().max()


@pytest.mark.parametrize("backend", [CpuAttentionBackend, TreeAttentionBackend])
def test_what_a_model_asks_in_its_forward_is_refused(backend: Any) -> None:
    asked = runner({})
    with pytest.raises(ValueError, match="k_rope"):
        backend(asked).forward_extend(None, None, None, asked.model[0], None, k_rope=torch.zeros(4))


class AddsOne(torch.nn.ModuleList):
    """As Gemma 3 does with positions, in place."""

    shared_experts_config = None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, batch: Any) -> Any:
        positions += 1
        return SimpleNamespace(next_token_logits=torch.zeros(len(tokens), 9))


@pytest.mark.parametrize("way", ["cpu", "gpu"])
def test_a_model_may_change_its_positions(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are counted from what they were."""
    for module in (sglang_forward, gpu):
        context = SimpleNamespace(override=lambda **_: nullcontext())
        monkeypatch.setattr(module, "get_model", lambda context=context: context)
    asked = runner({"sliding_window_size": 8})
    asked.model, asked.device, asked.spec_algorithm = AddsOne(asked.model), CPU, None
    batch = TreeBatch.causal(np.array([5, 6]), np.array([0]), np.array([3]), np.array([2]))
    tokens, positions = torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions)
    slots = torch.ones(2, dtype=torch.int64)
    if way == "cpu":
        plan = attention_plan(torch.zeros(1, 9, dtype=torch.int32), batch)
        sglang_forward.SGLangForward(asked).hidden(cpu.Inputs(tokens, positions, slots, plan))
        seen = plan.positions
    else:
        call = gpu.SGLangCall(asked)
        call(gpu.Inputs(tokens, positions, slots), 1, cast("Any", None))
        seen = call._backend.positions
    assert seen is not None and seen.tolist() == [3, 4]


def model_config(config: Any, architecture: str) -> SimpleNamespace:
    """As much of SGLang's ``ModelConfig`` as tells whether trees can go through its layers."""
    config.architectures = [architecture]
    return SimpleNamespace(hf_config=config, is_draft_model=False, linear_attn_registry_result=None)


@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2", "FalconH1", "NemotronH"])
def test_layers_that_keep_a_state_are_refused(name: str) -> None:
    """The state would hold candidates that were not accepted."""
    hybrid = getattr(sglang.srt.configs, f"{name}Config")()
    with pytest.raises(ValueError, match=f"{name}ForCausalLM .*keep a state.* ADASERVE"):
        require_supported_model(model_config(hybrid, f"{name}ForCausalLM"))
    require_supported_model(model_config(transformers.Qwen3Config(), "Qwen3ForCausalLM"))


def test_models_that_write_images_are_refused() -> None:
    """A request's shift says nothing of the positions of what they write."""
    name = "GlmImageForConditionalGeneration"
    with pytest.raises(ValueError, match=rf"{name} .*writes images.*without --speculative-algorithm"):
        require_supported_model(model_config(transformers.Qwen3Config(), name))


def test_positions_that_neighbours_change_are_refused() -> None:
    """A candidate beyond the first positions would change the text of everybody in its batch."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = Phi3LongRoPEScaledRotaryEmbedding(8, 8, 512, 64, 10000, True, torch.float32, **factors)
    longer = Phi3LongRoPEScaledRotaryEmbedding(8, 8, 512, 128, 10000, True, torch.float32, **factors)
    model = torch.nn.ModuleList([longer, rope])
    with pytest.raises(ValueError, match=r"beyond 64 .*--context-length 52 or less"):
        require_own_positions(model, context_len=53, deepest=12)
    require_own_positions(model, context_len=52, deepest=12)
    require_own_positions(torch.nn.ModuleList(), context_len=512, deepest=12)
    query = torch.randn(2, 8)
    alone, _ = rope(torch.tensor([3]), query[:1].clone(), query[:1].clone())
    beside, _ = rope(torch.tensor([3, 65]), query.clone(), query.clone())
    assert not torch.allclose(alone[0], beside[0]), "SGLang tells its tokens apart now: serve such models"
