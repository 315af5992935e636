"""Other weights for a served model: all of them or none, in SGLang's copy and in the packed one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adaserve.engine.cpu import LlamaModel, ModelConfig, ModelWeights
from adaserve.engine.cpu.install import LLAMA_ATTRIBUTE
from adaserve.engine.cpu.swap import CpuSwap
from adaserve.engine.learning.swap import EMBEDDING, require_fit
from tests.engine.cpu.factories import Chunk, Pool, hf_model, read_hf, run

PADDING = 5


class Served(nn.Module):
    """The parameters of a Hugging Face model under SGLang's names: fused, and with a padded vocabulary."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.hf, self.names = model, {}
        for name in state_of(model):
            if ".k_proj" in name or ".v_proj" in name or ".up_proj" in name:
                continue
            ours = name.replace(".q_proj", ".qkv_proj").replace(".gate_proj", ".gate_up_proj")
            self.names[ours.replace(".", "/")] = ours
            self.register_parameter(ours.replace(".", "/"), nn.Parameter(self._fused(ours)))

    def _fused(self, name: str) -> Tensor:
        state = state_of(self.hf)
        if "qkv_proj" in name:
            return torch.cat([state[name.replace("qkv_proj", p)] for p in ("q_proj", "k_proj", "v_proj")])
        if "gate_up_proj" in name:
            return torch.cat([state[name.replace("gate_up_proj", p)] for p in ("gate_proj", "up_proj")])
        tensor = state[name]
        return nn.functional.pad(tensor, (0, 0, 0, PADDING)) if "embed" in name else tensor.clone()

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return [(self.names[n], p) for n, p in self._parameters.items()]


def state_of(model: Any) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_every_parameter_is_exchanged_and_back() -> None:
    model, other = Served(hf_model("qwen2", seed=1)), Served(hf_model("qwen2", seed=2))
    swap = CpuSwap(model)
    before = swap.served()
    kept = {name: t.clone() for name, t in before.params.items()}
    swap.exchange(swap.prepared(state_of(other.hf)))
    assert dict(model.named_parameters()).keys() == dict(other.named_parameters()).keys()
    for (name, one), (_, right) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, right), name
    swap.exchange(before)
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("output", [EMBEDDING, "lm_head.weight"])
def test_a_draft_that_knows_some_tokens_gets_their_rows(output: str) -> None:
    """Of the checkpoint's output matrix, which may be its embedding."""
    model, state, ids = Served(hf_model(seed=1)), state_of(hf_model(seed=2)), torch.tensor([7, 3, 90])
    model.names["lm_head"] = "lm_head.weight"
    model.register_parameter("lm_head", nn.Parameter(torch.zeros(len(ids), state[EMBEDDING].shape[1])))
    model.hot_token_id = ids
    state.setdefault(output, torch.randn_like(state[EMBEDDING]))
    require_fit(model, {name: tuple(t.shape) for name, t in state.items()})
    swap = CpuSwap(model)
    swap.exchange(swap.prepared(state))
    new = dict(model.named_parameters())
    assert torch.equal(new["lm_head.weight"], state[output][ids])
    assert torch.equal(new[EMBEDDING][:-PADDING], state[EMBEDDING])


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"])
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str) -> None:
    model = Served(hf_model(seed=1))
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = state_of(hf_model(seed=2))
    for wrong in (torch.ones(3, 96), torch.ones(400, 96), torch.ones(len(state[name]), 95)):
        if "embed" in name and len(wrong) < 100:
            continue  # fewer rows could be padding
        with pytest.raises((ValueError, RuntimeError)):
            CpuSwap(model).prepared(state | {name: wrong})
    with pytest.raises(ValueError, match="there is no"):
        CpuSwap(model).prepared({n: t for n, t in state.items() if n != name})
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters())


def read(model: Served) -> tuple[ModelWeights, ModelConfig]:
    """Views of the parameters, as `extract.read_weights` gives them."""
    weights, config = read_hf(model.hf)
    own = {name: p.detach() for name, p in model.named_parameters()}
    embed = own["model.embed_tokens.weight"][: config.vocab_size]
    layers = tuple(
        replace(
            layer,
            qkv=own[f"model.layers.{i}.self_attn.qkv_proj.weight"],
            o=own[f"model.layers.{i}.self_attn.o_proj.weight"],
            gate_up=own[f"model.layers.{i}.mlp.gate_up_proj.weight"],
            down=own[f"model.layers.{i}.mlp.down_proj.weight"],
            input_norm=own[f"model.layers.{i}.input_layernorm.weight"],
            post_norm=own[f"model.layers.{i}.post_attention_layernorm.weight"],
        )
        for i, layer in enumerate(weights.layers)
    )
    final_norm = own["model.norm.weight"]
    return replace(weights, embed=embed, lm_head=embed, layers=layers, final_norm=final_norm), config


def logits(llama: LlamaModel) -> Tensor:
    """What a model says behind five tokens."""
    chunk = Chunk([5, 6, 7, 8, 9], list(range(5)), list(range(5)), [])
    return llama.logits(run(llama, Pool(llama.config, layers=2), [chunk]))


def test_our_kernels_draft_with_the_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old weights that were put aside still work after they are exchanged."""
    monkeypatch.setattr("adaserve.engine.cpu.swap.read_weights", read)
    model, other = Served(hf_model(seed=1)), hf_model(seed=2)
    llama = LlamaModel(*read(model))
    object.__setattr__(model, LLAMA_ATTRIBUTE, llama)
    before = logits(llama)
    swap = CpuSwap(model)
    new, old = swap.prepared(state_of(other)), swap.served()
    assert torch.equal(logits(llama), before), "preparing changes nothing"
    swap.exchange(new)
    assert torch.equal(logits(llama), logits(LlamaModel(*read_hf(other))))
    swap.exchange(old)
    assert torch.equal(logits(llama), before)
