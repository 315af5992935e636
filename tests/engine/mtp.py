"""A tiny MTP layer in plain torch, and a target whose checkpoint has it, as MiMo's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from tests.engine.heads import followable
from tests.engine.pairs import random_model, save_tokenizer


class Mtp(nn.Module):
    """DeepSeek-V3, section 2.2, over a layer of Qwen2; parameters are named as in public checkpoints."""

    def __init__(self, target: Any) -> None:
        super().__init__()
        c = self.config = target.config
        self.target, self.token_ids = [target], torch.arange(c.vocab_size)
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm = (
            nn.RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(3)
        )
        self.input_proj = nn.Linear(2 * c.hidden_size, c.hidden_size, bias=False)
        self.block = Qwen2DecoderLayer(c, 0)

    def target_states(self, text: Tensor) -> Tensor:
        """[n, T, H]: what comes out of the target's final norm."""
        with torch.no_grad():
            return self.target[0].model(text).last_hidden_state

    def forward(self, tokens: Tensor, before: Tensor, first: int = 1) -> Tensor:
        """States [n, T, H] of ``tokens``, given those ``before`` each of them. ``first``: place of the first
        one in its text."""
        model = self.target[0].model
        places = torch.arange(first, first + tokens.shape[1])[None]
        embedded = model.embed_tokens(tokens) * (places > 1)[..., None]  # as SGLang reads MiMo's layer
        x = self.input_proj(torch.cat([self.hidden_layernorm(before), self.token_layernorm(embedded)], -1))
        out = self.block(x, position_ids=places, position_embeddings=model.rotary_emb(x, places))
        return self.final_layernorm(out[0] if isinstance(out, tuple) else out)

    def logits(self, states: Tensor) -> Tensor:
        """[.., vocabulary]."""
        return self.target[0].lm_head(states)


def mtp_target(seed: int = 1) -> Any:
    """A Qwen2 that a layer can follow, with biases."""
    model = random_model("Qwen2", seed)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                bias = getattr(layer.self_attn, name).bias
                bias.copy_(0.1 * torch.randn(bias.shape))
    return followable(model)


def following_layer(target: Any, weight: float = 0.05, seed: int = 2) -> Mtp:
    """The target's first layer, over embeddings and little of hidden states. ``weight``: of the random matrix
    by which it reads these."""
    layer, size = Mtp(target), target.config.hidden_size
    scale = target.model.embed_tokens.weight.square().mean().sqrt()
    noise = torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) / size**0.5
    with torch.no_grad():
        layer.block.load_state_dict(target.model.layers[0].state_dict())
        layer.input_proj.weight.copy_(torch.cat([weight * scale * noise, scale * torch.eye(size)], 1))
        layer.final_layernorm.weight.copy_(target.model.norm.weight)
    return layer.requires_grad_(False)


def save_with_layer(folder: Path) -> None:
    """Writes a target with its layer to ``folder``, in the public format."""
    torch.set_num_threads(1)
    target = mtp_target()
    target.save_pretrained(folder)
    save_tokenizer(folder)
    own = {
        f"model.mtp_layers.0.{name.removeprefix('block.')}": value.contiguous()
        for name, value in following_layer(target).state_dict().items()
    }
    file, path = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), **own}, file, {"format": "pt"})
    config = json.loads(path.read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(config))
