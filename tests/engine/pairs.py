"""Tiny random model pairs: a peaked target, an exact copy of it, and a copy with noise on the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB = 512
MAX_POSITIONS = 512
CORPUS = """the quick brown fox jumps over the lazy dog and then it goes on to say that a request is served
at its own speed {"name": "value", "count": 12, "items": [1, 2, 3]} def main(argv): return 0 if True else
None while the server accepts tokens 0123456789 from the draft model, it keeps what the target would say. """

SETTINGS = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False, "initializer_range": 0.12, "bos_token_id": None, "eos_token_id": 0,
    "pad_token_id": 1,
}  # fmt: skip
"""Of a configuration."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE: every string has an encoding, every single character is a token (as grammars need)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 20, trainer)
    filler = [f"<unused{i}>" for i in range(VOCAB - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(filler)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", model_max_length=MAX_POSITIONS
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def random_target(seed: int = 1) -> Any:
    """Llama whose next-token distributions are neither flat nor one-hot, and depend on the context."""
    return random_model("Llama", seed)


def random_model(family: str, seed: int, **more: Any) -> Any:
    """The same in another of transformers' families; ``more``: of its configuration."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SETTINGS, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(2.2)
    return model


def noisy_copy(model: Any, scale: float, seed: int = 2) -> Any:
    """Every matrix plus ``scale`` times its own standard deviation of Gaussian noise."""
    copy = type(model)(model.config).eval()
    copy.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in copy.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (scale * parameter.std()))
    return copy


def agreement(target: Any, draft: Any, ids: torch.Tensor) -> float:
    """Share of positions at which both models have the same best token."""
    with torch.no_grad():
        return float((target(ids).logits.argmax(-1) == draft(ids).logits.argmax(-1)).float().mean())


def agreeing_copy(target: Any, share: float = 0.6, seed: int = 2) -> Any:
    """A noisy copy whose best token is the target's at about ``share`` of the positions; copies of different
    seeds go wrong at different ones."""
    prompts = torch.randint(2, VOCAB, (8, 8), generator=torch.Generator().manual_seed(3))
    ids = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=96,
        do_sample=True,
        top_k=0,
        pad_token_id=1,
    )
    low, high = 0.0, 1.0
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if agreement(target, noisy_copy(target, middle, seed), ids) > share
            else (low, middle)
        )
    return noisy_copy(target, low, seed)


def save_pair(folder: Path) -> None:
    """Writes ``target``, ``noisy``, ``second`` and ``swapped`` below ``folder``."""
    torch.set_num_threads(1)  # for models this small, threads only wait for each other
    target = random_target()
    drafts = {"noisy": agreeing_copy(target), "second": agreeing_copy(target, seed=7)}
    for name, model in {"target": target, **drafts}.items():
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    _save_with_swapped_tokens(target, folder / "swapped")


def _save_with_swapped_tokens(model: Any, folder: Path) -> None:
    """The same model under a tokenizer that numbers two tokens the other way round."""
    model.save_pretrained(folder)
    save_tokenizer(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = "a", "b"
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
