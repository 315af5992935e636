"""The pair's byte-level BPE vocabulary and its Hugging Face wrapping."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from adaserve.pair.vocabulary import BOS, EOS, MAX_CONTEXT_TOKENS, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Runs of blanks stay whole (Python's indentation), a word takes the blank before it, digits stand alone.
_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+ *(?= )|\s+(?!\S)|\s+"

# The pair was trained on running text, not on conversations: a turn is simply a paragraph.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] | trim }}"
    "{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_hugging_face(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast  # which takes a second: prompts are read without it

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=MAX_CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def same_vocabulary(first: Path, second: Path) -> bool:
    """Whether two folders have tokenizers, and the same one."""
    files = [folder / "tokenizer.json" for folder in (first, second)]
    return all(file.exists() for file in files) and files[0].read_bytes() == files[1].read_bytes()
