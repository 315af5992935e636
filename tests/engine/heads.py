"""A tiny EAGLE-3 head in plain torch and in the public checkpoint format, and a target that it can follow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as fn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.engine.harness import Job, workload
from tests.engine.medusa import fitted_heads, save_published
from tests.engine.pairs import MAX_POSITIONS, VOCAB, random_model, random_target, save_tokenizer

DRAFT_VOCAB = 384
LAYERS = [0, 1, 2]
"""Of the three-layer target: SGLang's default, 2, n / 2 and n - 3, in the order in which it captures them."""


class Head(nn.Module):
    """EAGLE-3, section 3.1, in plain torch; its parameters have the names of public checkpoints."""

    norm_output = False
    """Whether its states are what comes out of its final norm."""

    def __init__(self, target: Any, token_ids: Tensor) -> None:
        super().__init__()
        c = self.config = target.config
        size, dim = c.hidden_size, c.head_dim
        self.target, self.token_ids = [target], token_ids  # in a list: its weights are not the head's
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer = nn.ModuleDict({
            "self_attn": nn.ModuleDict({
                "q_proj": nn.Linear(2 * size, c.num_attention_heads * dim, bias=False),
                "k_proj": nn.Linear(2 * size, c.num_key_value_heads * dim, bias=False),
                "v_proj": nn.Linear(2 * size, c.num_key_value_heads * dim, bias=False),
                "o_proj": nn.Linear(c.num_attention_heads * dim, size, bias=False),
            }),
            "mlp": nn.ModuleDict({
                "gate_proj": nn.Linear(size, c.intermediate_size, bias=False),
                "up_proj": nn.Linear(size, c.intermediate_size, bias=False),
                "down_proj": nn.Linear(c.intermediate_size, size, bias=False),
            }),
            **{name: nn.RMSNorm(size, c.rms_norm_eps)
               for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        })  # fmt: skip
        self.norm = nn.RMSNorm(size, c.rms_norm_eps)
        self.lm_head = nn.Linear(size, len(token_ids), bias=False)
        self.rope = LlamaRotaryEmbedding(c)

    def target_states(self, text: Tensor) -> Tensor:
        """[n, T, H]: what the head reads of the target beside the tokens that follow."""
        with torch.no_grad():
            states = self.target[0](text, output_hidden_states=True).hidden_states
        return self.fc(torch.cat([states[i] for i in LAYERS], -1))

    def forward(self, tokens: Tensor, before: Tensor, first: int = 1) -> Tensor:
        """States [n, T, H] of ``tokens``, given those ``before`` each of them. ``first``: place of the first
        one in its text."""
        layer, c = self.midlayer, self.config
        attention, (n, length) = layer["self_attn"], tokens.shape
        embedded = layer["input_layernorm"](self.target[0].model.embed_tokens(tokens))
        joined = torch.cat([embedded, layer["hidden_norm"](before)], -1)
        q, k, v = (attention[f"{name}_proj"](joined).view(n, length, -1, c.head_dim).transpose(1, 2)
                   for name in "qkv")  # fmt: skip
        q, k = apply_rotary_pos_emb(q, k, *self.rope(v, torch.arange(first, first + length)[None]))
        mixed = fn.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = before + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        mlp, normed = layer["mlp"], layer["post_attention_layernorm"](x)
        out = x + mlp["down_proj"](fn.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return self.norm(out) if self.norm_output else out

    def logits(self, states: Tensor) -> Tensor:
        """[.., draft vocabulary]."""
        return self.lm_head(states if self.norm_output else self.norm(states))


def head_target(seed: int = 1) -> Any:
    """A target that a head can follow."""
    return followable(random_target(seed))


def followable(target: Any) -> Any:
    """The same model, and the attention of its first layer says nearly all."""
    first, *later = target.model.layers
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(0.1)
        first.self_attn.q_proj.weight.mul_(2)
        first.self_attn.o_proj.weight.mul_(4)
        first.mlp.down_proj.weight.mul_(0.02)
        for layer in later:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    return target


def following_head(target: Any, token_ids: Tensor, weight: float = 0.05, seed: int = 2) -> Head:
    """Its layer is the target's first one, so that half of its first tokens are right and a seventh of its
    second ones. ``weight``: of the random matrices by which it reads hidden states."""
    head = Head(target, token_ids)
    first, layer = target.model.layers[0], head.midlayer
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            own, joined = mean_projection(first.self_attn, name), layer["self_attn"][name].weight
            noise = torch.randn(own.shape, generator=generator)
            joined.copy_(torch.cat([own, weight * own.std() * noise], 1))
        layer["self_attn"]["o_proj"].weight.copy_(first.self_attn.o_proj.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer["mlp"][name].weight.copy_(getattr(first.mlp, name).weight)
        rows, columns = head.fc.weight.shape
        head.fc.weight.copy_(torch.randn(rows, columns, generator=generator) * weight / columns**0.5)
        head.lm_head.weight.copy_(target.lm_head.weight[token_ids])
    return head.requires_grad_(False)


def mean_projection(attention: Any, name: str) -> Tensor:
    """Of an attention of the target's; where queries and keys are normed, with the mean effect of that."""
    weight = getattr(attention, name).weight
    if (norm := getattr(attention, f"{name[0]}_norm", None)) is None:
        return weight
    heads = weight.view(-1, len(norm.weight), weight.shape[1])
    return (
        heads / heads.norm(dim=(1, 2), keepdim=True) * norm.weight[:, None] * heads.shape[1] ** 0.5
    ).view_as(weight)


def frequent_tokens(target: Any, count: int = DRAFT_VOCAB) -> Tensor:
    """What the target says most, int64 [count], ascending: a head's reduced vocabulary."""
    prompts = torch.randint(2, VOCAB, (32, 8), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    said = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=64, do_sample=True, top_k=0,
        pad_token_id=1,
    )  # fmt: skip
    return torch.bincount(said.flatten(), minlength=VOCAB).topk(count).indices.sort().values


def with_more_parts(head: Head, seed: int = 6) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the head with what few heads have, and the settings that name it: a second layer, which
    changes little, norms of the hidden states before their projection, all together and each alone, and steps
    that read what the final norm gives."""
    generator = torch.Generator().manual_seed(seed)
    size = head.config.hidden_size

    def norm(width: int) -> Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    tensors = {name.replace("midlayer", "layers.0"): value for name, value in head.state_dict().items()}
    for name, value in head.midlayer.state_dict().items():
        own = norm(size)
        if value.dim() == 2:
            own = value.std() * torch.randn(value.shape, generator=generator)
            own = 0.1 * own[:, :size] if name[-13] in "qkv" else 0.1 * own
        tensors[f"layers.1.{name}"] = own
    tensors["input_norm.weight"] = norm(len(LAYERS) * size)
    tensors |= {f"fc_norm.{i}.weight": norm(size) for i in range(len(LAYERS))}
    return tensors, {"num_hidden_layers": 2, "norm_before_fc": True, "fc_norm": True, "norm_output": True}


def save_head(head: Head, folder: Path, more_parts: bool = False) -> None:
    """As published: no embeddings, one ``midlayer``, and the tokens as differences to their rows (d2t)."""
    folder.mkdir()
    c, ids = head.config, head.token_ids
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[ids] = True
    own, settings = with_more_parts(head) if more_parts else (head.state_dict(), {})
    tensors = {name: value.contiguous() for name, value in own.items()}
    save_file({**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": known}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "draft_vocab_size": len(ids), "tie_word_embeddings": False, "torch_dtype": "float32",
        "rope_theta": c.rope_parameters["rope_theta"], "max_position_embeddings": MAX_POSITIONS,
    }  # fmt: skip
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    config |= {name: getattr(c, name) for name in same} | settings
    (folder / "config.json").write_text(json.dumps(config))


def save_headed_pair(folder: Path) -> None:
    """Writes ``target`` and heads of both kinds, ``eagle3`` and ``medusa``, below ``folder``."""
    torch.set_num_threads(1)
    target = head_target()
    target.save_pretrained(folder / "target")
    save_tokenizer(folder / "target")
    save_head(following_head(target, frequent_tokens(target)), folder / "eagle3")
    short = [job.input_ids for job in headed_jobs() if len(job.input_ids) <= 8]
    save_published(fitted_heads(target, short), folder / "medusa")


def qwen3_target(seed: int = 1) -> Any:
    """A Qwen3 that a head can follow."""
    model = random_model("Qwen3", seed, head_dim=32)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
                norm.weight.add_(0.2 * torch.randn(norm.weight.shape))
    return followable(model)


def save_qwen3_pair(folder: Path) -> None:
    """Writes ``target`` and ``eagle3``, a head with all its parts, below ``folder``."""
    torch.set_num_threads(1)
    target = qwen3_target()
    target.save_pretrained(folder / "target")
    save_tokenizer(folder / "target")
    save_head(following_head(target, frequent_tokens(target)), folder / "eagle3", more_parts=True)


def headed_jobs() -> list[Job]:
    """What the servers with heads are asked."""
    return workload(90, seed=5, leave_every=11)
