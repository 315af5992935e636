"""Architecture of the pair's models, as Hugging Face's Llama configuration knows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from adaserve.pair.folders import PairError
from adaserve.pair.vocabulary import BOS_ID, EOS_ID, MAX_CONTEXT_TOKENS, VOCAB_SIZE

NORM_EPS = 1e-5
ROPE_THETA = 160000.0
"""Base of the rotary embedding: 16 times Llama's first one, so that 8,192 positions stay apart."""


@dataclass(frozen=True)
class Shape:
    """Architecture of one model; the embedding is tied to the output layer unless ``tied`` is False."""

    vocab: int = VOCAB_SIZE
    hidden: int = 256
    layers: int = 4
    mlp: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_width: int | None = None  # None: what the hidden size gives each head
    tied: bool = True
    rope_theta: float = ROPE_THETA

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        per_layer = attention + 3 * self.hidden * self.mlp + 2 * self.hidden
        tables = 1 if self.tied else 2
        return tables * self.vocab * self.hidden + self.layers * per_layer + self.hidden


TARGET = Shape()
DRAFT = replace(TARGET, layers=2, mlp=512)
MEDUSA_DEPTH, MEDUSA_LAYERS = 4, 2
HEAD_VOCABULARY, HEAD_MLP, HEAD_KV_HEADS = 2048, 256, 1
MAX_VOCABULARY = 1 << 16
"""Tokens of a model that is trained: text is kept as 16-bit ids."""
MIN_SIZE = 100_000
"""Parameters. The pair that ships has more, and a smaller size leaves any pair as it is."""
_UNITS = {"K": 1_000, "M": 1_000_000, "B": 1_000_000_000}


def hf_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float16",
    }


_OTHER = "is not of the embedded family: give a Llama model with the settings of the embedded target"
_ALIKE = (
    "architectures", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings",
    "bos_token_id", "eos_token_id",
)  # fmt: skip
"""In all models of the family."""


def shape_of(config: dict[str, Any]) -> Shape:
    """Raises PairError for a model of another family that lacks one of these figures."""
    rope = config.get("rope_parameters") or config  # as transformers writes it since 5.0, and before
    try:
        shape = Shape(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            mlp=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            tied=config["tie_word_embeddings"],
            rope_theta=rope["rope_theta"],
        )
    except KeyError as error:
        raise PairError(f"a model without {error.args[0]} in its config.json {_OTHER}") from error
    head_dim = config.get("head_dim") or shape.head_dim
    return shape if head_dim == shape.head_dim else replace(shape, head_width=head_dim)


def require_family(config: dict[str, Any]) -> None:
    """Raises PairError for a model whose forward is not that of our own copies (``TinyLlama``)."""
    rope = config.get("rope_parameters") or config
    for name, value in hf_config(TARGET).items():
        if name in _ALIKE and config.get(name) != value:
            raise PairError(f"a model with {name} {config.get(name)} in its config.json {_OTHER} ({value})")
    if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise PairError(f"a model whose rotary embedding is scaled {_OTHER}")


def require_short_ids(config: dict[str, Any]) -> None:
    """Raises PairError for a model whose training text has no room for its token ids."""
    if config["vocab_size"] > MAX_VOCABULARY:
        raise PairError(
            f"a vocabulary of {config['vocab_size']} tokens cannot be trained here: training text has 16 "
            f"bits for each token, which is enough for {MAX_VOCABULARY}"
        )


def parse_size(size: int | str) -> int:
    """Parameters from a number or a text like 100M or 1.5B. Raises PairError, also for "1.5", whose unit was
    forgotten: the smallest pair would be served without a word."""
    text = str(size).strip().upper().replace("_", "")
    unit = text[-1:] if text[-1:] in _UNITS else ""
    try:
        parameters = int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        parameters = 0
    if parameters < MIN_SIZE:
        raise PairError(f"{size!r} is not a model size: write a number of parameters, such as 100M or 1.5B")
    return parameters
