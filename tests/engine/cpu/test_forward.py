"""Our own forward against Hugging Face's, over a shuffled paged pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from adaserve.engine.cpu import LlamaModel
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.trees.attention import TreeAttentionPlan
from tests.engine.cpu.factories import Chunk, Pool, hf_model, path_to, read_hf, run, tree_mask

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]
TREE_TOKENS = [7, 11, 13, 17, 19, 23, 29, 31]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied-bias": ("llama", dict(tie_word_embeddings=False, attention_bias=True)),
    "llama3-rope": (
        "llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3", rope_theta=1e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "heads-1": ("llama", dict(num_attention_heads=2, num_key_value_heads=2, head_dim=80)),
    "heads-8": ("llama", dict(num_attention_heads=8, num_key_value_heads=1, head_dim=128)),
    "heads-3": ("llama", dict(num_attention_heads=3, num_key_value_heads=1, head_dim=64)),
    "head-96": ("llama", dict(num_attention_heads=4, num_key_value_heads=4, head_dim=96)),
    "odd": ("llama", dict(hidden_size=68, intermediate_size=77, vocab_size=101, head_dim=10)),
    "two-k-blocks": ("llama", dict(hidden_size=300, intermediate_size=601, head_dim=16)),
}  # fmt: skip


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def prefill(llama: LlamaModel, pool: Pool, tokens: list[int]) -> tuple[list[int], torch.Tensor]:
    slots = pool.take(len(tokens))
    return slots, run(llama, pool, [Chunk(tokens, list(range(len(tokens))), slots, [])])


@pytest.mark.parametrize("name", MODELS)
def test_prefill_decode_and_tree_match_the_reference(name: str) -> None:
    kind, overrides = MODELS[name]
    model = hf_model(kind, **overrides)
    llama = LlamaModel(*read_hf(model), storage="fp32")
    pool = Pool(llama.config, 2)
    prompt = torch.randint(0, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    slots, hidden = prefill(llama, pool, prompt)
    torch.testing.assert_close(llama.logits(hidden), reference_logits(model, prompt), atol=2e-4, rtol=2e-4)

    tree_slots = pool.take(len(PARENTS))
    depths = [len(path_to(i, PARENTS)) - 1 for i in range(len(PARENTS))]
    chunk = Chunk(TREE_TOKENS, [40 + d for d in depths], tree_slots, slots, tree_mask(PARENTS, 40))
    logits = llama.logits(run(llama, pool, [chunk])).clone()
    for node in range(len(PARENTS)):
        path = [TREE_TOKENS[i] for i in path_to(node, PARENTS)]
        expected = reference_logits(model, prompt + path)[-1]
        torch.testing.assert_close(logits[node], expected, atol=2e-4, rtol=2e-4)

    (slot,) = pool.take(1)
    decoded = run(llama, pool, [Chunk([5], [40], [slot], slots)])
    expected = reference_logits(model, [*prompt, 5])[-1:]
    torch.testing.assert_close(llama.logits(decoded), expected, atol=2e-4, rtol=2e-4)


def test_ragged_batch_equals_single_requests() -> None:
    model = hf_model()
    llama = LlamaModel(*read_hf(model))
    pool = Pool(llama.config, 2)
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
    chunks = [Chunk(p, list(range(len(p))), pool.take(len(p)), []) for p in prompts]
    together = llama.logits(run(llama, pool, chunks)).clone()
    expected = torch.cat([reference_logits(model, p) for p in prompts])
    torch.testing.assert_close(together, expected, atol=2e-4, rtol=2e-4)


def test_empty_requests_and_empty_forwards() -> None:
    llama = LlamaModel(*read_hf(hf_model()))
    pool = Pool(llama.config, 2)
    empty = Chunk([], [], [], [])
    full = Chunk([1, 2], [0, 1], pool.take(2), [])
    with_empty = run(llama, pool, [empty, full, empty])
    assert torch.equal(with_empty, run(llama, pool, [full]))
    assert run(llama, pool, [empty]).shape == (0, llama.config.hidden_size)


def test_query_that_sees_nothing_stays_finite() -> None:
    llama = LlamaModel(*read_hf(hf_model()))
    pool = Pool(llama.config, 2)
    chunk = Chunk([1, 2], [0, 1], pool.take(2), [], torch.tensor([[True, False], [False, False]]))
    assert torch.isfinite(run(llama, pool, [chunk])).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_pools(dtype: torch.dtype) -> None:
    model = hf_model()
    llama = LlamaModel(*read_hf(model))
    pool = Pool(llama.config, 2, dtype=dtype)
    tokens = list(range(1, 30))
    _, hidden = prefill(llama, pool, tokens)
    expected = reference_logits(model, tokens)
    assert (llama.logits(hidden) - expected).abs().max() < 0.05 * expected.abs().max()


def test_topk_logprobs_and_argmax() -> None:
    llama = LlamaModel(*read_hf(hf_model()))
    hidden = torch.randn(5, llama.config.hidden_size)
    logits = llama.logits(hidden).clone()
    scale = torch.tensor([1.0, 0.5, 2.0, 10.0, 1.5])
    logprobs, tokens = llama.topk_logprobs(hidden, LogitTransform.plain(scale.numpy()), 4)
    expected = (logits * scale[:, None]).log_softmax(-1).topk(4, -1)
    assert torch.equal(tokens, expected.indices)
    torch.testing.assert_close(logprobs, expected.values, atol=1e-5, rtol=1e-5)
    assert torch.equal(llama.argmax(hidden), logits.argmax(-1))


def test_plan_rejects_lists_of_different_requests() -> None:
    with pytest.raises(ValueError, match="same requests"):
        TreeAttentionPlan(torch.zeros(2), torch.zeros(3), torch.zeros(0))
