"""Heads in our kernels against the same heads in plain torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adaserve.engine.cpu import LlamaModel, build
from adaserve.engine.cpu.draft_heads import HeadForward
from adaserve.engine.cpu.extract import read_head
from adaserve.engine.cpu.forwards import CpuForward, LlamaForward
from adaserve.engine.cpu.native import NativeBackend
from adaserve.engine.cpu.noise import transformed
from adaserve.engine.cpu.params import Before, Inputs, InputStage, LayerWeights, ModelWeights
from adaserve.engine.device import Beams, KeepGoing, Search
from adaserve.engine.hidden_states import HiddenStates, project
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.engine.trees.attention import attention_plan, token_slots
from adaserve.engine.trees.batch import ContextGap, TreeBatch
from adaserve.engine.trees.shape import tree_shape
from tests.engine.cpu.factories import Pool, read_hf
from tests.engine.heads import LAYERS, Head, following_head, frequent_tokens, head_target
from tests.engine.mtp import Mtp, following_layer, mtp_target

ROWS = np.array([2, 0])
LENGTHS = np.array([9, 23])
WINDOW = 32

Heads = dict[str, Head | Mtp]


@pytest.fixture(scope="module")
def heads() -> Heads:
    """Hidden states matter to them as much as tokens do."""
    target = head_target()
    frequent = frequent_tokens(target, 379)  # no multiple of a vector
    layer = following_layer(mtp_target(), weight=1.0)
    for norm in (layer.token_layernorm, layer.hidden_layernorm, layer.final_layernorm):
        norm.weight += 0.2 * torch.randn(norm.weight.shape, generator=torch.Generator().manual_seed(1))
    raw, normed = (following_head(target, frequent, weight=0.5) for _ in range(2))
    normed.norm_output = True
    return {"eagle3": raw, "normed": normed, "mtp": layer}


@pytest.fixture
def head(heads: Heads) -> Head | Mtp:
    return heads["eagle3"]


@pytest.fixture(params=["native", "torch"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(build, "load_kernels", lambda: None)
    return str(request.param)


class Walking(HeadForward):
    """Level by level, though the kernels could do it in one call."""

    def _native(
        self, native: NativeBackend, pool: Any, first: TreeBatch, search: Search, keep: KeepGoing | None
    ) -> Beams:
        return self._walk(first, search, keep)


class Setting:
    """Two texts whose prefixes the target and the head have read; the last token of each is its root."""

    def __init__(self, head: Head | Mtp, backend: str, forward: type[HeadForward] = HeadForward) -> None:
        self.head = head
        weights, config = read_hf(head.target[0])
        self.target = LlamaModel(weights, config, "fp32")
        of_head = mtp_weights(head) if isinstance(head, Mtp) else head_weights(head, weights)
        self.llama = LlamaModel(of_head, config, "fp32")
        assert {self.target.native is None, self.llama.native is None} == {backend == "torch"}
        pools = [Pool(config, layers) for layers in (len(weights.layers), 1)]
        self.table = torch.zeros(3, 64, dtype=torch.int32)
        for row, length in zip(ROWS, LENGTHS, strict=True):
            taken = pools[0].take(int(length) + WINDOW)
            self.table[row, : len(taken)] = torch.tensor(taken, dtype=torch.int32)
        slots, size = pools[0].slots, head.config.hidden_size
        if isinstance(head, Mtp):
            self.states = HiddenStates(slots, size, torch.float32)
        else:
            loaded = SimpleNamespace(fc=head.fc, input_norm=None, fc_norm=None)
            self.states = HiddenStates(slots, size, torch.float32, LAYERS, partial(project, loaded))
        self.target.sink = self.states
        paged = [SimpleNamespace(k_buffer=pool.k, v_buffer=pool.v) for pool in pools]
        self.reads = LlamaForward(self.target, paged[0])
        self.drafts = forward(LlamaForward(self.llama, paged[1]), self.table, self.states)
        rng = np.random.default_rng(1)
        self.texts = [rng.integers(2, 500, length + 1).tolist() for length in LENGTHS]

    def batch(self, starts: np.ndarray, ends: np.ndarray) -> TreeBatch:
        """The texts' tokens from ``starts`` to ``ends``."""
        tokens = [t for text, s, e in zip(self.texts, starts, ends, strict=True) for t in text[s:e]]
        return TreeBatch.causal(np.array(tokens), ROWS, starts, ends - starts)

    def read(self, *ends: np.ndarray, pending: int = 0) -> None:
        """The target reads in chunks, and the head behind it all but the last ``pending`` tokens."""
        target, starts = CpuForward(self.reads, self.table), np.zeros(2, np.int64)
        for end in ends:
            target.run(self.batch(starts, end))
            known = np.minimum(end, LENGTHS - pending)
            self.drafts.run(self.batch(np.minimum(starts, known), known))
            starts = end

    def search(self, depth: int, width: int, pending: int = 0, gap: ContextGap | None = None) -> Beams:
        """``pending``: cached tokens that the head has not read."""
        ones = np.ones(2, np.float32)
        search = Search(
            tree_shape(depth, width, None), LENGTHS, ROWS, ones, 0.7 * ones, np.array([3, 4], np.uint64)
        )
        batch = self.batch(LENGTHS - pending, LENGTHS + 1)
        if gap is not None:
            batch = replace(batch, kv_lens=batch.kv_lens - gap.length, gap=gap)
        return self.drafts.search(batch, search, None).read()


def logprobs(
    head: Head | Mtp, text: list[int], path: tuple[int, ...], key: int, spread: float, left_out: int = 1
) -> torch.Tensor:
    """float64 [vocab] of what may follow ``path`` behind ``text``, root included: from scratch, step by step
    on the head's own states. ``left_out``: tokens that the head does not see, though the target does."""
    tokens = torch.tensor([text])
    before, tokens = head.target_states(tokens[:, :-1])[:, left_out - 1 :], tokens[:, left_out:]
    states = head(tokens, before, left_out)
    for token in path:
        before = torch.cat([before, states[:, -1:]], 1)
        tokens = torch.cat([tokens, torch.tensor([[token]])], 1)
        states = head(tokens, before, left_out)
    logits = torch.full((1, head.config.vocab_size), -torch.inf)
    logits[:, head.token_ids] = head.logits(states[:, -1])
    one, position = np.ones(1, np.float32), np.array([len(text) - 1 + len(path)])
    transform = LogitTransform(one, spread * one, np.array([key], np.uint64), position)
    return transformed(logits, transform)[0].double().log_softmax(-1)


def check_levels(
    head: Head | Mtp,
    text: list[int],
    tokens: np.ndarray,
    scores: np.ndarray,
    width: int,
    key: int,
    spread: float,
    left_out: int = 1,
) -> None:
    """The candidates of one row against a beam search over all tokens that the head knows."""
    beams: dict[tuple[int, ...], float] = {(): 0.0}
    for level in range(len(tokens) // width):
        grown = {
            (*path, token): score + logprob
            for path, score in beams.items()
            for token, logprob in enumerate(logprobs(head, text, path, key, spread, left_out).tolist())
        }
        beams = dict(sorted(grown.items(), key=lambda item: -item[1])[:width])
        nodes = slice(level * width, (level + 1) * width)
        assert tokens[nodes].tolist() == [path[-1] for path in beams]
        assert np.allclose(scores[nodes], list(beams.values()), atol=1e-3)


def head_weights(head: Head, target: ModelWeights) -> ModelWeights:
    layer = head.midlayer
    attention, mlp = layer["self_attn"], layer["mlp"]
    weights = LayerWeights(
        layer["input_layernorm"].weight,
        torch.cat([attention[f"{name}_proj"].weight for name in "qkv"]), None, None, None,
        attention["o_proj"].weight, None, layer["post_attention_layernorm"].weight,
        torch.cat([mlp["gate_proj"].weight, mlp["up_proj"].weight]), mlp["down_proj"].weight,
        layer["hidden_norm"].weight,
    )  # fmt: skip
    return ModelWeights(
        target.embed, (weights,), head.norm.weight, head.lm_head.weight, target.cos_sin, head.token_ids,
        norm_output=head.norm_output,
    )  # fmt: skip


def mtp_weights(layer: Mtp) -> ModelWeights:
    target, block = layer.target[0], SimpleNamespace(layers=[layer.block], norm=layer.final_layernorm)
    block.embed_tokens, block.rotary_emb = target.model.embed_tokens, target.model.rotary_emb
    weights, _ = read_hf(SimpleNamespace(model=block, config=layer.config, lm_head=target.lm_head))
    of_hidden, of_token = layer.input_proj.weight.chunk(2, 1)
    norms = (layer.token_layernorm.weight, layer.hidden_layernorm.weight)
    return replace(weights, stage=InputStage(*norms, torch.cat([of_token, of_hidden], 1)))


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_hidden_states_are_those_of_the_target(kind: str, heads: Heads, backend: str) -> None:
    head = heads[kind]
    case = Setting(head, backend)
    case.read(LENGTHS // 2, LENGTHS)
    for row, text, length in zip(ROWS, case.texts, LENGTHS, strict=True):
        expected = head.target_states(torch.tensor([text[:length]]))[0]
        got = case.states.read(case.table[row, :length].long())
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("forward", [HeadForward, Walking])
@pytest.mark.parametrize(("depth", "width", "pending"), [(3, 3, 0), (2, 4, 3), (1, 2, 9)])
@pytest.mark.parametrize("kind", ["eagle3", "normed", "mtp"])
def test_the_best_of_all_extensions(
    kind: str,
    heads: Heads,
    backend: str,
    forward: type[HeadForward],
    depth: int,
    width: int,
    pending: int,
) -> None:
    """Every beam expanded by all tokens that the head knows, each on the states of its own path."""
    head = heads[kind]
    case = Setting(head, backend, forward)
    case.read(LENGTHS // 2, LENGTHS, pending=pending)
    found = case.search(depth, width, pending)
    for r in range(2):
        check_levels(head, case.texts[r], found.tokens[r], found.logprobs[r], width, 3 + r, 0.7)


@pytest.mark.parametrize("forward", [HeadForward, Walking])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_window_leaves_out_early_tokens(
    kind: str, heads: Heads, backend: str, forward: type[HeadForward]
) -> None:
    """Of one of two texts; the other one is read as a whole, but for its first token."""
    head = heads[kind]
    case = Setting(head, backend, forward)
    case.read(LENGTHS)
    left_out = np.array([0, 12])
    found = case.search(2, 3, pending=2, gap=ContextGap(0, left_out))
    for r in range(2):
        seen = (found.tokens[r], found.logprobs[r])
        check_levels(head, case.texts[r], *seen, 3, 3 + r, 0.7, max(1, int(left_out[r])))


def test_hidden_states_that_do_not_fit_are_refused(head: Head) -> None:
    """By the C kernels, which would read foreign memory."""
    case = Setting(head, "native")
    batch = case.batch(np.zeros(2, np.int64), LENGTHS)
    with pytest.raises(IndexError, match="hidden states are missing"):
        CpuForward(case.drafts.model, case.table).run(batch)
    case.states.layers = torch.tensor([0, 3], dtype=torch.int32)  # of three layers
    with pytest.raises(IndexError, match="a layer that the model does not have"):
        CpuForward(case.reads, case.table).run(batch)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_states_of_half_precision(head: Head, dtype: torch.dtype) -> None:
    """They are read as they are stored."""
    case = Setting(head, "native")
    case.read(LENGTHS)
    stored = case.states.by_slot.to(dtype)
    case.states.by_slot = stored
    of_half = case.search(3, 3, pending=2)
    case.states.by_slot = stored.float()
    assert np.array_equal(of_half.logprobs, case.search(3, 3, pending=2).logprobs)


def test_rows_of_hidden_states_that_are_not_there_are_refused(head: Head) -> None:
    case = Setting(head, "native")
    batch, states = case.batch(np.zeros(2, np.int64), LENGTHS), case.states.by_slot
    model, tokens = case.drafts.model, len(batch)
    slots, rows = token_slots(case.table, batch), torch.zeros(tokens, dtype=torch.int64)
    plan = attention_plan(case.table, batch)
    read = partial(Inputs, torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions), slots, plan)
    model.hidden(read(Before(states, rows)))
    for wrong in (-1, len(states)):
        rows[tokens - 1] = wrong
        with pytest.raises(IndexError, match="hidden states are missing"):
            model.hidden(read(Before(states, rows)))
    with pytest.raises(IndexError, match="hidden states are missing"):
        model.hidden(read(Before(states[: tokens - 1])))
    for unfit in (Before(states, rows[1:]), Before(states.double(), rows), Before(states[:, 1:], rows)):
        with pytest.raises(ValueError, match="a head"):
            model.hidden(read(unfit))


def test_a_head_that_shares_the_embedding_knows_as_many_tokens_as_it_says(head: Head) -> None:
    """SGLang takes the first rows of the embedding for them, whatever they are worth as drafts. The kernels
    would read the tokens of further rows from foreign memory."""
    layer, c, rows = head.midlayer, head.config, len(head.token_ids)
    attention, mlp = layer["self_attn"], layer["mlp"]
    rotary = SimpleNamespace(rotary_dim=c.head_dim, cos_sin_cache=read_hf(head.target[0])[0].cos_sin)
    qkv = SimpleNamespace(weight=torch.cat([attention[f"{name}_proj"].weight for name in "qkv"]), bias=None)
    one = SimpleNamespace(
        self_attn=SimpleNamespace(
            num_heads=c.num_attention_heads, num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim,
            qkv_proj=qkv, o_proj=attention["o_proj"], rotary_emb=rotary,
        ),
        mlp=SimpleNamespace(
            gate_up_proj=SimpleNamespace(weight=torch.cat([mlp["gate_proj"].weight, mlp["up_proj"].weight])),
            down_proj=mlp["down_proj"],
        ),
        **{name: layer[name] for name in ("input_layernorm", "post_attention_layernorm", "hidden_norm")},
    )  # fmt: skip
    norm = SimpleNamespace(weight=head.norm.weight, variance_epsilon=c.rms_norm_eps)
    embed = head.target[0].model.embed_tokens
    loaded = SimpleNamespace(
        model=SimpleNamespace(embed_tokens=embed, layers=[one], norm=norm, norm_output=False),
        lm_head=embed, hot_token_id=head.token_ids,
        config=SimpleNamespace(hidden_size=c.hidden_size, vocab_size=c.vocab_size, draft_vocab_size=rows),
    )  # fmt: skip
    llama = LlamaModel(*read_head(loaded), "fp32")
    states = torch.randn(64, c.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens = llama.topk_logprobs(states, LogitTransform.plain(np.ones(64)), 4)[1]
    assert torch.isin(tokens, head.token_ids).all()
    assert llama.logits(states).isfinite().sum() == 64 * rows
