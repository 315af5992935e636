"""Tokenizer, prompts and corpus rules."""

from __future__ import annotations

import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from adaserve.pair import corpus
from adaserve.pair.clean import is_worth_reading, python_to_text, rst_to_text, tidy, unwrap
from adaserve.pair.corpus import Document, Seen, load_sources, without_repeats
from adaserve.pair.data import Batches
from adaserve.pair.folders import PairError
from adaserve.pair.prompts import CATEGORIES, SUMMARY_CUE, load_prompts
from adaserve.pair.tokenizer import as_hugging_face, same_vocabulary, train_tokenizer
from adaserve.pair.vocabulary import BOS_ID, EOS_ID

SOME = [
    Document("prose", "made up", f"{i}.txt", f"Text number {i} says what no other says. " * 20)
    for i in range(200)
]
TEXT = "def answer(question):\n    return 42  # naïve\n\nThe answer is always the same, isn't it?\n" * 30


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp("tokenizer")
    as_hugging_face(train_tokenizer([TEXT], vocab_size=400)).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", [TEXT, "  \t x\n\n\n  y ", "日本語 🎉 never seen", "a  b   c", "#!/bin/sh\r\n", ""]
)
def test_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_specials_and_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS_ID, EOS_ID)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?\n"}]
    ids = tokenizer.apply_chat_template(turns, return_dict=False)
    assert ids[0] == BOS_ID
    assert tokenizer.decode(ids[1:]) == "Be brief.\n\nWhat is it?"


def test_prompts_are_many_and_in_range() -> None:
    ranges = {"coding": (50, 300), "chat": (5, 80), "summarization": (300, 900)}
    for category in CATEGORIES:
        prompts = load_prompts(category)
        low, high = ranges[category]
        assert len(prompts) >= 250
        assert len({p.text for p in prompts}) == len(prompts)
        assert all(low <= p.tokens <= high and p.category == category for p in prompts)
        assert len({(p.source, p.path) for p in prompts}) >= 40
    assert all(p.text.endswith(SUMMARY_CUE) for p in load_prompts("summarization"))
    assert all(p.text == p.text.rstrip() for p in load_prompts())


def test_prompts_come_from_held_out_files_of_known_sources() -> None:
    known = {source.name for source in load_sources()} | {"python"}
    for prompt in load_prompts():
        kind = "code" if prompt.category == "coding" else "prose"
        assert Document(kind, prompt.source, prompt.path, "").held_out
        assert prompt.source in known


def test_notice_names_every_source() -> None:
    notice = (Path(__file__).parents[2] / "NOTICE").read_text()
    for source in load_sources():
        assert f"{source.name} {source.version}" in notice
        assert f"{source.license} - Copyright (c) {source.copyright}" in notice


def test_sources_are_pinned_and_permissive() -> None:
    sources = load_sources()
    assert len({s.name for s in sources}) == len(sources)
    for source in sources:
        assert len(bytes.fromhex(source.sha256)) == 32
        assert source.license.split("-")[0].split()[0] in {"BSD", "MIT", "Apache", "PSF", "public"}


def test_markup_becomes_plain_text() -> None:
    rst = """
.. _label:

Using :class:`~pkg.Thing`
=========================

.. note:: See :ref:`the guide <guide>` and `a page <https://example.org>`_.

.. code-block:: python

   x = 1

A paragraph that was wrapped at a column where
nobody needed it, as documentation usually is.
"""
    text = unwrap(tidy(rst_to_text(rst)))
    assert text.splitlines()[0] == "# Using `Thing`"
    assert "Note: See the guide and a page." in text
    assert "   x = 1" in text.splitlines()
    assert "at a column where nobody needed it" in text
    assert "label" not in text and "code-block" not in text


def test_code_keeps_its_lines_and_loses_its_license() -> None:
    text = python_to_text("#!/usr/bin/env python\n# Copyright 1999 Somebody\n\nimport os\n\n# why\nx = 1\n")
    assert text.strip() == "import os\n\n# why\nx = 1"


def test_tables_of_numbers_are_not_worth_reading() -> None:
    assert is_worth_reading("Words make sentences and sentences make text. " * 20)
    assert not is_worth_reading("0.12 0.34 0.56 1.78\n" * 100)
    assert not is_worth_reading("short")


def test_held_out_text_is_removed_from_training_text() -> None:
    shared = "This paragraph stands in two manuals, word for word, and is long enough to count as a repeat."
    own = (
        "This one stands in the second manual alone, and it is a good deal longer than what they share: "
        + "new words " * 5
    )
    seen = Seen()
    without_repeats(Document("prose", "a", "held-out", shared), seen)
    kept = without_repeats(Document("prose", "b", "train", f"{shared}\n\n{own}"), seen)
    assert kept is not None
    assert kept.text == own
    code = "\n".join(f"    some_function_with_a_long_name(argument_{i})" for i in range(10))
    assert without_repeats(Document("code", "a", "x.py", code), seen) is not None
    assert without_repeats(Document("code", "b", "x.py", code), seen) is None


def test_batches_visit_every_window_once_and_resume() -> None:
    stream = np.arange(1001, dtype=np.uint16)
    batches = Batches(stream, seed=3)
    seen = [batches.take(2, 10) for _ in range(50)]
    starts = sorted(int(row[0]) for batch in seen for row in batch)
    assert starts == list(range(0, 1000, 10))
    resumed = Batches(stream, seed=3)
    resumed.used_tokens = 20 * 2 * 10
    assert (resumed.take(2, 10) == seen[20]).all()


def test_prompt_file_is_small() -> None:
    assert len(files("adaserve.pair").joinpath("prompts.jsonl.gz").read_bytes()) < 1_500_000


def test_a_source_that_pip_cannot_fetch_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is pip asked to build what it reads the source's metadata with, which takes it many minutes."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    source, run, asked = load_sources()[0], subprocess.run, list[str]()

    def ask(command: list[str], **more: Any) -> Any:
        asked.extend(command)
        return run(command, **more)

    monkeypatch.setattr(subprocess, "run", ask)
    with pytest.raises(PairError, match=f"pip could not fetch {source.name} {source.version}"):
        corpus.download(source, tmp_path)
    assert not list(tmp_path.iterdir())
    assert asked[asked.index("--no-binary") + 1] == source.name


def test_a_corpus_that_was_interrupted_is_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "collect", lambda *_: list(SOME))
    read = iter(range(150))

    def interrupted(document: Document, seen: Seen) -> Document | None:
        if next(read, None) is None:
            raise KeyboardInterrupt
        return without_repeats(document, seen)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpus, "without_repeats", interrupted)
        corpus.build(tmp_path)
    assert not (tmp_path / "train.jsonl").exists()
    corpus.build(tmp_path)
    whole = [corpus.read_documents(tmp_path / f"{split}.jsonl") for split in ("held_out", "train")]
    assert len(whole[0]) + len(whole[1]) == len(SOME) and all(d.held_out for d in whole[0])


def test_text_of_another_vocabulary_is_told_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder, text in zip(folders, (TEXT, TEXT, TEXT[::-1]), strict=True):
        as_hugging_face(train_tokenizer([text], vocab_size=400)).save_pretrained(folder)
    assert same_vocabulary(folders[0], folders[1])
    assert not same_vocabulary(folders[0], folders[2])
    assert not same_vocabulary(folders[0], tmp_path / "d")
