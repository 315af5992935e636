"""From nothing to a finished pair: corpus, target, draft, measured acceptance. Every step resumes."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from adaserve.checkpoints.fingerprint import fingerprint
from adaserve.host.files import write_json
from adaserve.pair import distill, runs, train
from adaserve.pair.corpus import build
from adaserve.pair.data import prepare
from adaserve.pair.eagle import HeadShape
from adaserve.pair.evaluate import evaluate, write_acceptance
from adaserve.pair.folders import MEDUSA, PLAIN_NAME, PairError
from adaserve.pair.medusa import train_medusa
from adaserve.pair.packed import pack
from adaserve.pair.prompts import write_prompts
from adaserve.pair.schedule import Stage
from adaserve.pair.tokenizer import same_vocabulary
from adaserve.pair.train_head import train_eagle

TOKENIZER_FILES = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json")
"""A model of somebody else's may lack any but the last."""


@dataclass(frozen=True)
class Recipe:
    """Wall-clock minutes for each model and how much text the target writes for its draft.

    With ``target_minutes`` 0 the target of ``start`` stays as it is.
    """

    target_minutes: float
    draft_minutes: float
    written_tokens: int
    seed: int
    threads: int
    compile: bool
    bf16: bool
    stage: Stage
    start: Path | None  # a pair to train further


def settle(run: Path, corpus: Path, out: Path) -> None:
    """The shipped form of a trained model, tokenizer included; from here on it is the model."""
    pack(run, out)
    _copy_tokenizer(corpus, out)


def _copy_tokenizer(start: Path, to: Path) -> None:
    """The file that is asked for comes last: where it is, all are there."""
    for file in TOKENIZER_FILES:
        if (start / file).exists():
            shutil.copy(start / file, to / file)


def ensure_corpus(work: Path, *, seed: int, start: Path | None = None) -> Path:
    """The training text below `work`, in the vocabulary of the pair in `start` if there is one.

    Raises PairError if that text was encoded with another vocabulary.
    """
    corpus = work / "corpus"
    if not (corpus / "train.jsonl").exists():
        build(corpus)
    if start is not None:
        _take_vocabulary(start / "target", corpus)
    if not (corpus / "tokens.json").exists():
        prepare(corpus, seed=seed)
    return corpus


def _take_vocabulary(model: Path, corpus: Path) -> None:
    """Another interpreter's library would give another vocabulary, and trained weights need theirs."""
    if not (corpus / TOKENIZER_FILES[-1]).exists():
        _copy_tokenizer(model, corpus)
    elif not same_vocabulary(corpus, model):
        raise PairError(
            f"{corpus} was encoded with another vocabulary than {model}: give another --work folder"
        )


def train_pair(work: Path, recipe: Recipe) -> Path:
    """Trains below `work`; returns the folder with target/ and draft/. Goes on with a run of the same recipe
    that was interrupted; raises PairError if another one lies there."""
    corpus = ensure_corpus(work, seed=recipe.seed, start=recipe.start)
    out, pair = work / "runs" / "pair", work / "pair"
    if recipe.start is not None and recipe.start.resolve() == pair.resolve():
        raise PairError(
            f"{pair} would be overwritten with what is trained from it: give another --work folder"
        )
    settings = _settings(recipe, corpus)
    runs.begin(out, settings)
    run = _target_run(corpus, out / "target", recipe)
    if recipe.target_minutes == 0:
        assert recipe.start is not None
        shutil.rmtree(pair / "target", ignore_errors=True)  # an earlier run's may have other files
        shutil.copytree(recipe.start / "target", pair / "target")
    else:
        if not (run.out / PLAIN_NAME).exists():
            train.train_target(run)
        settle(run.out, corpus, pair / "target")
    run = _draft_run(run, out / "draft", recipe)
    if not (run.out / PLAIN_NAME).exists():
        distill.train_draft(run, pair / "target", written_tokens=recipe.written_tokens)
    settle(run.out, corpus, pair / "draft")
    write_prompts(corpus, pair / "prompts.jsonl.gz", seed=recipe.seed)
    report = evaluate(pair, corpus, rows=32, new=128, seed=recipe.seed, threads=recipe.threads)
    write_json(pair / "report.json", report)
    write_acceptance(report, pair / "draft")
    runs.finish(out, settings)
    return pair


def _settings(recipe: Recipe, corpus: Path) -> dict[str, str | int | float | None]:
    """All of a recipe but what changes no more than its speed."""
    start = recipe.start
    return {
        "minutes": recipe.target_minutes,
        "draft minutes": recipe.draft_minutes,
        "written_tokens": recipe.written_tokens,
        "seed": recipe.seed,
        "bf16": recipe.bf16,
        "share of the learning rates": recipe.stage.rates,
        "target to go on from": None if start is None else fingerprint(start / "target"),
        "draft to go on from": None if start is None else fingerprint(start / "draft"),
        "bytes of text": (corpus / "train.bin").stat().st_size,
    }


def _target_run(corpus: Path, out: Path, recipe: Recipe) -> train.Run:
    rates = recipe.stage.rates
    return train.Run(
        corpus, out, recipe.target_minutes, recipe.seed, recipe.threads, recipe.compile, recipe.bf16,
        matrix_lr=rates * train.MATRIX_LR, vector_lr=rates * train.VECTOR_LR,
        phases=recipe.stage.target, start=recipe.start,
    )  # fmt: skip


def _draft_run(run: train.Run, out: Path, recipe: Recipe) -> train.Run:
    rates = recipe.stage.rates
    return replace(
        run, out=out, minutes=recipe.draft_minutes, phases=recipe.stage.draft,
        matrix_lr=rates * distill.MATRIX_LR, vector_lr=rates * distill.VECTOR_LR,
    )  # fmt: skip


def export_heads(
    kind: str,
    work: Path,
    pair: Path,
    shape: HeadShape,
    *,
    minutes: float,
    written_tokens: int,
    seed: int,
    threads: int,
    start: Path | None,
) -> Path:
    """Trains heads of ``pair/target`` below ``work``: MEDUSA, or HEAD, an EAGLE-3 head of that shape. Returns
    the folder of their shipped form. Goes on with a run of the same settings that was interrupted; raises
    PairError if another one lies there."""
    corpus, out = ensure_corpus(work, seed=seed, start=pair), work / "runs" / kind
    run = train.Run(corpus, out, minutes, seed, threads, compile=False, start=start)
    settings = {
        "minutes": minutes,
        "written_tokens": written_tokens,
        "seed": seed,
        "weights to go on from": None if start is None else fingerprint(start),
        "weights of the target": fingerprint(pair / "target"),
        "bytes of text": (corpus / "train.bin").stat().st_size,
        **({} if kind == MEDUSA else asdict(shape) | {"layers": str(shape.layers)}),
    }
    runs.begin(out, settings)
    if kind == MEDUSA:
        shipped = train_medusa(run, pair, written_tokens=written_tokens)
    else:
        head = train_eagle(run, pair, written_tokens=written_tokens, shape=shape)
        pack(head, shipped := work / "pair" / kind)
    runs.finish(out, settings)
    return shipped
