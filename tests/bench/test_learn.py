"""What `adaserve bench learn` compares: texts, blocks, variants of the training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress
from typer.testing import CliRunner

from adaserve.bench.learn import offline, online
from adaserve.bench.learn.offline import (
    VARIANTS,
    ErrorsOnly,
    damage,
    gain,
    guesses,
    mixed_text,
    verified,
    worst_window,
)
from adaserve.bench.learn.online import LearnPlan
from adaserve.bench.learn.texts import HOME, PATTERNS, Texts
from adaserve.cli import app
from adaserve.pair.folders import weights_folder
from adaserve.pair.model import load_hf
from adaserve.pair.widen import shipped_draft
from adaserve.sharpening import load_sharpening
from adaserve.trainer import sharpening_fit
from adaserve.trainer.draft import DraftCopy
from adaserve.trainer.trainer import JUDGED, Recipe, Trainer
from tests.trainer.factories import record


@pytest.mark.parametrize("domain", [*PATTERNS, HOME])
def test_prompts_are_the_same_by_seed_and_held_out_ones_come_from_other_files(domain: str) -> None:
    one, again = Texts(domain, 3), Texts(domain, 3)
    assert one.take(20) == again.take(20)
    held_out = Texts(domain, 4, held_out=True)
    assert not set(held_out._texts) & set(one._texts)
    assert len(held_out.take(5)) == 5


def test_blocks_of_a_stream() -> None:
    plan = LearnPlan(order=("cpp", "law"), requests=64, block=32, against="held")
    assert plan.blocks == [(0, "cpp"), (0, "cpp"), (1, "law"), (1, "law")]
    assert plan.settings == ("held", "present")


@pytest.mark.parametrize("every", [1, 2, 4])
def test_both_drafts_begin_equally_often(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, begun = LearnPlan(order=("cpp:512",), every=every), []
    server = SimpleNamespace(url="", drain=lambda: None, number_requests=lambda _: None)
    meta = {"spec_verify_ct": 1, "slo": {"met": True, "tpot_slo_ms": 9.0, "tpot_ms": 8.0}}
    reply = SimpleNamespace(output_ids=[1, 2, 3], meta=meta)
    monkeypatch.setattr(online, "send_in_order", lambda *_: [reply])
    for index in range(len(plan.blocks)):
        served: list[str] = []
        server.set_draft = served.append
        online._played(server, [], plan, index)  # type: ignore[arg-type]
        begun += served[:1] if len(served) == 2 else []
    assert len(begun) == len(plan.blocks) // every and begun.count("first") == begun.count("present")


@pytest.mark.parametrize("words", [[], ["--offline"]])
def test_results_go_where_the_help_says(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(online, "run_learn", lambda *given: told.extend(given))
    monkeypatch.setattr(offline, "run_offline", lambda *given: told.extend(given))
    assert CliRunner().invoke(app, ["bench", "learn", *words]).exit_code == 0
    (folder,) = (given for given in told if isinstance(given, Path))
    assert folder.parent == Path("results") and folder.name.endswith("Z-learn")
    assert not list(tmp_path.iterdir()), "it is made when there is something to write"


def test_domains_of_a_part_take_turns() -> None:
    plan = LearnPlan(order=("cpp+law", "home:64"), requests=96, block=32)
    assert plan.blocks == [(0, "cpp"), (0, "law"), (0, "cpp"), (1, "home"), (1, "home")]


@pytest.mark.parametrize(
    ("right", "tokens", "times"),
    [
        ("1111 1 1111", 8, 2),  # the target's own token is at the fifth place, whatever the draft said there
        ("1111 0 11", 6, 2),
        ("0 0 0", 0, 3),
        ("10 110 0", 3, 3),
        ("", 0, 0),
    ],
)
def test_chains_are_verified_as_a_server_does(right: str, tokens: int, times: int) -> None:
    assert verified(torch.tensor([float(c) for c in right.replace(" ", "")])) == (tokens, times)


def test_gains_are_of_tokens_per_verification() -> None:
    first = np.array([[10, 10]] * 8)
    now = np.array([[12, 9]] * 4 + [[6, 12]] + [[12, 9]] * 3)
    assert gain(now[:1], first[:1]) == pytest.approx(1 / 3)
    assert worst_window(now, first, window=1) == pytest.approx(-0.5)
    assert worst_window(now, first, window=2) == pytest.approx(18 / 21 - 1)
    assert worst_window(now, first, window=50) == pytest.approx(gain(now, first))


def test_a_damaged_draft_guesses_worse() -> None:
    whole, damaged = (DraftCopy(str(shipped_draft())) for _ in range(2))
    damage(damaged, 0.3)
    for before, after in zip(whole.weights, damaged.weights, strict=True):
        if before.ndim == 2:
            assert float((after - before).std() / before.std()) == pytest.approx(0.3, rel=0.05)
        else:
            assert torch.equal(after, before)


def test_variants_differ_from_the_default_in_one_thing() -> None:
    usual = VARIANTS["default"]
    for name, variant in VARIANTS.items():
        fields = ("trainer", "top", "mixed", "routed", "damage")
        differ = [f for f in fields if getattr(variant, f) != getattr(usual, f)]
        assert (len(differ) + (variant.recipe != usual.recipe) == 1) == (name != "default"), name


def test_no_update_is_of_more_requests_than_a_round_has() -> None:
    """Two variants would be the same, and one would be called what it is not."""
    assert max(v.recipe.interval for v in VARIANTS.values()) == JUDGED
    nothing: Any = None
    with pytest.raises(AssertionError, match="a round has no more"):
        Trainer(nothing, [], Recipe(interval=JUDGED + 1), sharpening=nothing, replay_bytes=0)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--offline", "--loss", "reverse", "--at-once", "4"], "--offline has no use for --at-once, --loss:"),
        (["--offline", "--classes", "chat"], "--offline has no use for --classes:"),
        (["--variants", "lk"], "--variants are compared with --offline only"),
    ],
)
def test_what_would_change_nothing_is_refused(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "run_learn", lambda *_: pytest.fail("it runs"))
    monkeypatch.setattr(offline, "run_offline", lambda *_: pytest.fail("it runs"))
    done = CliRunner().invoke(app, ["bench", "learn", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and says in done.output, done.output


def test_all_that_takes_long_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing held-out texts, writing the stream, scoring the first draft: each takes a minute."""
    monkeypatch.setattr(offline, "Writer", lambda _: SimpleNamespace(write=lambda *_, **__: []))
    monkeypatch.setattr(offline, "_trainer", lambda _: SimpleNamespace(first=None))
    monkeypatch.setattr(offline, "counts", lambda *_: np.zeros((1, 2)))
    bar = Progress(disable=True)
    study = offline._Study(LearnPlan(order=("law:96",)), bar)
    assert [(t.total, t.finished) for t in bar.tasks] == [(2, True)], "of the domain and of rehearsal texts"
    study._first_draft(VARIANTS["default"])
    assert [(t.total, t.finished) for t in bar.tasks[1:]] == [(3, True), (3, True)]


def test_learning_from_errors_learns_from_nothing_else() -> None:
    folder = shipped_draft()
    made = [
        kind(DraftCopy(str(folder)), [], Recipe(), sharpening=load_sharpening(folder), replay_bytes=1)
        for kind in (Trainer, ErrorsOnly)
    ]
    one = record(start=4, positions=40, vocab=4096)
    with torch.no_grad():
        (logits,) = made[0].draft.logits([one])
    logits = logits + 3 * torch.from_numpy(one.logprobs.astype(np.float32))  # often right
    every, errors = (trainer.loss_on(one, logits) for trainer in made)
    right = guesses(one, logits, sharpening_fit.noise_weight(one, made[0].sharpening)) == 1
    assert 0 < right.sum() < len(right)
    assert errors[right].eq(0).all() and torch.equal(errors[~right], every[~right])


def test_mixed_text_is_drawn_from_target_and_draft() -> None:
    target, draft = (load_hf(weights_folder() / name) for name in ("target", "draft"))
    prompts = torch.tensor([[1, 50, 60, 70]] * 3)
    cold = mixed_text(target, draft, prompts, 4, torch.full((3,), 1e-3), seed=1)
    assert cold.shape == (3, 8) and torch.equal(cold[:, :4], prompts)
    for row in cold:
        at = {m: m(row[None, :-1])[0, 3:].argmax(-1) for m in (target, draft)}
        assert all(t in (at[target][i], at[draft][i]) for i, t in enumerate(row[4:]))
