"""`adaserve pair`: build, measure and widen the embedded models."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from adaserve.checkpoints.draft_kind import read_config
from adaserve.commands import empty_folder, given, new_file, new_folder
from adaserve.host.cache import cache_folder
from adaserve.host.cores import usable_cores
from adaserve.host.files import write_json
from adaserve.pair.folders import HEAD, MEDUSA, PairError, drafts_of, has_weights, weights_folder
from adaserve.pair.shape import (
    HEAD_KV_HEADS,
    HEAD_MLP,
    HEAD_VOCABULARY,
    require_family,
    require_short_ids,
    shape_of,
)
from adaserve.terminal import say

app = typer.Typer(help="Train, measure and widen the embedded target and draft.", no_args_is_help=True)
console = Console()

Work = Annotated[
    Path | None,
    typer.Option(
        "--work",
        help="Folder for corpus, checkpoints and results.",
        show_default="a cache folder",
        callback=new_folder,
    ),
]
Pair = Annotated[
    Path | None, typer.Option(help="Folder with target/ and draft/.", show_default="the shipped one")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random choice.")]
Threads = Annotated[int, typer.Option(min=1, help="CPU threads.")]
WrittenTokens = Annotated[
    int, typer.Option(min=50_000, help="Tokens that the target writes to train its draft.")
]
Compile = Annotated[bool, typer.Option(help="Compile the training step (needs a C++ compiler).")]
Bf16 = Annotated[bool, typer.Option(help="Multiply in bfloat16; twice as fast on CPUs with AMX.")]
THREADS = usable_cores()


class HeadKind(StrEnum):
    """Heads that can be trained, by their folders beside target and draft."""

    eagle3 = HEAD
    medusa = MEDUSA


def _work(folder: Path | None) -> Path:
    return folder if folder is not None else cache_folder() / "pair-training"


def _with(pair: Path | None, *models: str) -> Path:
    """The pair to train from: refused now, not once the corpus is there. Raises PairError."""
    folder = pair if pair is not None else weights_folder()
    for model in models:
        if not has_weights(folder / model):
            raise PairError(f"{folder} holds no {model}: give a folder with {' and '.join(models)} in it")
        config = read_config(folder / model)
        require_family(config)
        require_short_ids(config)
    if not (folder / models[0] / "tokenizer.json").exists():
        raise PairError(f"{folder / models[0]} has no tokenizer.json, in whose vocabulary text is written")
    return folder


@app.command()
def corpus(work: Work = None, seed: Seed = 0) -> None:
    """Download the pinned sources with pip and write the training text (about 60 MB)."""
    from adaserve.pair.export import ensure_corpus

    folder = ensure_corpus(_work(work), seed=seed)
    say(console, f"{folder}: {(folder / 'tokens.json').read_text().strip()} tokens")


@app.command()
def train(
    *,
    minutes: Annotated[
        float,
        typer.Option(min=0, help="Wall-clock minutes for the target; 0 with --go-on: it stays as it is."),
    ] = 60,
    draft_minutes: Annotated[float, typer.Option(min=0.1, help="Wall-clock minutes for the draft.")] = 14.5,
    written_tokens: WrittenTokens = 250_000,
    compile: Compile = True,
    bf16: Bf16 = False,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Start from the shipped weights instead of from scratch.")
    ] = False,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = THREADS,
) -> None:
    """Train a pair: corpus, target, draft, measurements. After Ctrl-C the same command resumes.

    It takes the minutes of both models, and some more for the corpus, the target's text and measurements.
    A finished run, or one with other settings, is refused.
    """
    from adaserve.pair.schedule import FIRST, FURTHER

    if minutes == 0 and not go_on:
        raise typer.BadParameter("0 keeps a trained target, so it needs --go-on", param_hint="--minutes")
    stage, start = (FURTHER, weights_folder()) if go_on else (FIRST, None)
    _train(_work(work), minutes, draft_minutes, written_tokens, seed, threads, compile, bf16, stage, start)


def _train(work: Path, *recipe: Any) -> None:
    from adaserve.pair.export import Recipe, train_pair

    pair = train_pair(work, Recipe(*recipe))
    say(console, f"{pair} holds target/ and draft/; ADASERVE_PAIR_WEIGHTS={pair} makes AdaServe use them")


@app.command()
def extend(
    *,
    pair: Pair = None,
    minutes: Annotated[
        float, typer.Option(min=0, help="Wall-clock minutes for the target; 0: it stays as it is.")
    ] = 9,
    draft_minutes: Annotated[float, typer.Option(min=0.1, help="Wall-clock minutes for the draft.")] = 9,
    written_tokens: WrittenTokens = 250_000,
    compile: Compile = False,
    bf16: Bf16 = False,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = THREADS,
) -> None:
    """Train a pair further, on windows of up to 8,192 tokens. After Ctrl-C the same command resumes.

    A finished run, or one with other settings, is refused.
    """
    from adaserve.pair.schedule import LONG

    start = _with(pair, "target", "draft")
    work = _work(work)
    _train(work, minutes, draft_minutes, written_tokens, seed, threads, compile, bf16, LONG, start)


@app.command("train-head")
def train_head(
    context: typer.Context,
    *,
    kind: Annotated[HeadKind, typer.Option(help="An EAGLE-3 head, or Medusa heads.")] = HeadKind.eagle3,
    minutes: Annotated[float, typer.Option(min=0.1, help="Wall-clock minutes.")] = 20,
    pair: Annotated[
        Path | None,
        typer.Option(
            help="Folder with target/, the model that the head is for.", show_default="the shipped one"
        ),
    ] = None,
    written_tokens: Annotated[
        int, typer.Option(min=50_000, help="Tokens the target writes for its head.")
    ] = 400_000,
    vocabulary: Annotated[
        int,
        typer.Option(min=16, help="Tokens that the head can propose: the most frequent ones."),
    ] = HEAD_VOCABULARY,
    mlp: Annotated[
        int, typer.Option(min=16, help="Width of the head's MLP, at most the target's.")
    ] = HEAD_MLP,
    kv_heads: Annotated[
        int, typer.Option(min=1, help="KV heads, each with as many query heads as one of the target's.")
    ] = HEAD_KV_HEADS,
    go_on: Annotated[
        bool, typer.Option("--go-on", help="Start from the pair's head, at half the learning rates.")
    ] = False,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = THREADS,
) -> None:
    """Train heads for the embedded target. After Ctrl-C the same command resumes.

    A finished run, or one with other settings, is refused.
    """
    from adaserve.pair.eagle import HeadShape
    from adaserve.pair.export import export_heads

    _refuse_unused(context, kind, go_on)
    folder = _with(pair, "target")
    shape = HeadShape(vocab=vocabulary, mlp=mlp, kv_heads=kv_heads)
    if kind is HeadKind.eagle3 and not go_on:  # which keeps the size of the head that there is
        shape.require_target(shape_of(read_config(folder / "target")))
    head = export_heads(
        kind, _work(work), folder, shape,
        minutes=minutes, written_tokens=written_tokens, seed=seed, threads=threads,
        start=_trained(folder, kind, kv_heads) if go_on else None,
    )  # fmt: skip
    say(
        console,
        f"{head} is trained; copy it to {folder / kind.value}, then measure it with "
        f"`adaserve pair eval --pair {folder} --only {kind.value} --calibrate`",
    )


def _trained(pair: Path, kind: HeadKind, kv_heads: int) -> Path:
    """The pair's head: refused now, not once the target has written its text. Raises PairError."""
    head = pair / kind
    if kind not in drafts_of(pair):
        raise PairError(f"{pair} holds no {kind.value} to go on from: leave out --go-on")
    has = read_config(head).get("num_key_value_heads", kv_heads)
    if kv_heads > has:
        raise PairError(f"{head} has {has} KV heads, and training adds none: give --kv-heads {has} or fewer")
    return head


def _refuse_unused(context: typer.Context, kind: HeadKind, go_on: bool) -> None:
    """Raises BadParameter on options that would change nothing."""
    for applies, why, names in (
        (kind is HeadKind.medusa, "Medusa heads have no such sizes", {"vocabulary", "mlp", "kv_heads"}),
        (go_on, "--go-on keeps the size of the pair's head", {"vocabulary", "mlp"}),
    ):
        if applies and (unused := sorted(names & given(context))):
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            raise typer.BadParameter(f"{why}: leave out {flags}")


@app.command()
def average(
    first: Annotated[Path, typer.Argument(help="Folder of a trained draft.")],
    second: Annotated[Path, typer.Argument(help="Folder of the draft that it was trained from.")],
    out: Annotated[Path, typer.Argument(help="New folder for the result.", callback=empty_folder)],
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the second draft in the result, 0 to 1.")
    ] = 0.2,
) -> None:
    """Average a draft with the one it was trained from, to bring back what training made it forget."""
    from adaserve.pair.packed import average

    average(first, second, share, out)
    say(
        console,
        f"{out} is written; copy it to FOLDER/draft (a head: FOLDER/{HEAD}), beside FOLDER/target, then "
        "measure it with `adaserve pair eval --pair FOLDER --calibrate`",
    )


@app.command("eval")
def evaluate_pair(
    *,
    pair: Pair = None,
    only: Annotated[
        str | None, typer.Option(help="One of the drafts: draft, eagle3 or medusa.", show_default="all")
    ] = None,
    rows: Annotated[int, typer.Option(min=2, help="Prompts per category and temperature.")] = 32,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens the target writes per prompt.")] = 128,
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON.", callback=new_file)] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Store the measured sharpening in the draft's acceptance.json.")
    ] = False,
    work: Work = None,
    seed: Seed = 0,
    threads: Threads = THREADS,
) -> None:
    """Measure loss, repetition, agreement and accepted tokens of draft and heads.

    Loss needs a --work folder with text in the pair's vocabulary.
    """
    from adaserve.pair.evaluate import evaluate, write_acceptance

    folder = pair if pair is not None else weights_folder()
    reports = {}
    if not (drafts := [name for name in drafts_of(folder) if only in (None, name)]):
        raise PairError(f"{folder} holds no {only or 'draft'} to measure")
    for draft in drafts:
        console.print(f"[bold]{draft}[/]")
        reports[draft] = report = evaluate(
            folder, _work(work) / "corpus", draft, rows=rows, new=new_tokens, seed=seed, threads=threads
        )
        if calibrate:
            write_acceptance(report, folder / draft)
        _print_report(report)
    if out is not None:
        write_json(out, reports)


_COLUMNS = {
    "category": "category",
    "temperature": "T",
    "distinct_8_grams": "distinct",
    "top_1_agrees": "top-1",
    "accepted_w1": "w=1",
    "accepted_w2": "w=2",
    "accepted_w3": "w=3",
    "accepted_w3_without_noise": "w=3, noise unknown",
}
"""Columns of the table of accepted tokens: names in a report, and titles that fit into 80 columns."""


def _print_report(report: dict[str, Any]) -> None:
    for kind, losses in report.get("held_out_loss", {}).items():
        console.print(f"held-out loss, {kind}: {losses}")
    table = Table(*_COLUMNS.values(), title="Trees of depth 4, accepted tokens without the bonus token")
    for row in report["acceptance"]:
        table.add_row(*(str(row[c]) for c in _COLUMNS))
    console.print(table)
    if report["contexts"]:  # not of heads
        _print_contexts(report["contexts"])
    console.print(f"draft logits are read at tau: {report['draft_temperature']}")
    for temperature, measured in report["reliability"].items():
        console.print(f"T={temperature}: path probabilities are off by {measured['error']} on average")


def _print_contexts(rows: list[dict[str, Any]]) -> None:
    columns = ["context", "temperature", "window", "top_1_agrees", "top_1_predicted", "accepted_w1"]
    table = Table(*columns, title="Chains of 4 after long texts; window 0 = the draft reads everything")
    for row in rows:
        table.add_row(*(str(row[c]) for c in columns))
    console.print(table)


@app.command()
def widen(
    size: Annotated[
        str, typer.Argument(help="Parameters of the widened target, such as 100M or 1.5B.")
    ] = "100M",
    extra_layers: Annotated[int, typer.Option(min=0, help="Layers to add that change nothing.")] = 0,
) -> None:
    """Make a target that costs as much as a model of this size but writes the same text, in the cache."""
    from adaserve.pair.widen import ensure_embedded_pair

    target, draft = ensure_embedded_pair(size, extra_layers=extra_layers)
    say(console, f"target {target}\ndraft  {draft}")


@app.command("test-draft")
def test_draft(
    target: Annotated[Path, typer.Argument(help="Folder of a model of the embedded family.")],
    out: Annotated[Path, typer.Argument(help="New folder for the draft.", callback=empty_folder)],
    agreement: Annotated[float, typer.Option(min=0.05, max=1.0, help="Top-1 agreement to aim at.")] = 0.6,
    seed: Seed = 0,
) -> None:
    """Make a draft for tests: the target plus noise (or, with agreement 1, its copy)."""
    from adaserve.pair.perturbed import noisy_copy

    if agreement >= 1.0:
        shutil.copytree(target, out, dirs_exist_ok=True)
        say(console, f"{out} is a copy of {target}")
    else:
        say(console, f"{out}: top-1 agreement {noisy_copy(target, out, agreement=agreement, seed=seed):.2f}")
