"""From nothing to a finished pair: corpus, target, draft, measured acceptance. Every step resumes."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from adaserve.pair.corpus import build
from adaserve.pair.data import prepare
from adaserve.pair.distill import train_draft
from adaserve.pair.eagle import HeadShape
from adaserve.pair.evaluate import evaluate, write_acceptance
from adaserve.pair.packed import PLAIN_NAME, pack
from adaserve.pair.prompts import write_prompts
from adaserve.pair.train import Run, train_target
from adaserve.pair.train_head import train_eagle
from adaserve.pair.widen import HEAD

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Recipe:
    """Wall-clock minutes for each model and how much text the target writes for its draft."""

    target_minutes: float = 60.0
    draft_minutes: float = 14.5
    written_tokens: int = 250_000
    seed: int = 0
    threads: int = 2
    compile: bool = True
    start: Path | None = None


def settle(run: Path, corpus: Path, out: Path) -> None:
    """The shipped form of a trained model, tokenizer included; from here on it is the model."""
    pack(run, out)
    for file in TOKENIZER_FILES:
        shutil.copy(corpus / file, out / file)


def ensure_corpus(work: Path, *, seed: int) -> Path:
    corpus = work / "corpus"
    if not (corpus / "train.jsonl").exists():
        build(corpus)
    if not (corpus / "tokens.json").exists():
        prepare(corpus, seed=seed)
    return corpus


def train_pair(work: Path, recipe: Recipe) -> Path:
    """Trains below `work`; returns the folder with target/ and draft/."""
    corpus = ensure_corpus(work, seed=recipe.seed)
    runs, pair = work / "runs", work / "pair"
    run = Run(corpus, runs / "target", recipe.target_minutes, recipe.seed, recipe.threads, recipe.compile)
    run = replace(run, start=recipe.start)
    if not (run.out / PLAIN_NAME).exists():
        train_target(run)
    settle(run.out, corpus, pair / "target")
    run = replace(run, out=runs / "draft", minutes=recipe.draft_minutes)
    if not (run.out / PLAIN_NAME).exists():
        train_draft(run, pair / "target", written_tokens=recipe.written_tokens)
    settle(run.out, corpus, pair / "draft")
    write_prompts(corpus, pair / "prompts.jsonl.gz", seed=recipe.seed)
    report = evaluate(pair, corpus, rows=32, new=128, seed=recipe.seed, threads=recipe.threads)
    (pair / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    write_acceptance(report, pair / "draft")
    return pair


def export_head(
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
    """Trains an EAGLE-3 head of ``pair/target`` below ``work``; returns the folder of its shipped form."""
    run = Run(
        ensure_corpus(work, seed=seed),
        work / "runs" / HEAD,
        minutes,
        seed,
        threads,
        compile=False,
        start=start,
    )
    train_eagle(run, pair, written_tokens=written_tokens, shape=shape)
    out = work / "pair" / HEAD
    pack(run.out, out)
    return out
