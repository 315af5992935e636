"""A tiny draft learns what its target says; bad candidates are seen as such."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adaserve.sharpening import Correction, load_sharpening
from adaserve.trainer.draft import UNKNOWN, DraftCopy, checked, to_bytes
from adaserve.trainer.judging import Judgement, Snapshot, verdict
from adaserve.trainer.losses import LOSSES
from adaserve.trainer.records import Newest
from adaserve.trainer.trainer import JUDGE_EVERY, Recipe, Trainer
from tests.engine.pairs import VOCAB
from tests.trainer.factories import record, save_drafts, served


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, str]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("draft")
    return save_drafts(folder), str(folder)


def trainer_of(folder: str, *, loss: str = "forward", rate: float = 1e-3) -> Trainer:
    sharpening = load_sharpening(Path(folder))
    return Trainer(DraftCopy(folder), [], Recipe(loss, rate), sharpening=sharpening, replay_bytes=10_000_000)


def learned(trainer: Trainer, target: torch.nn.Module, requests: int = 96) -> Judgement:
    trainer.learn(served(target, 96, seed=1)[:requests], lambda: None)
    return trainer.judge(served(target, 32, seed=2), lambda: None)


@pytest.mark.parametrize("loss", [*LOSSES, "hard"])
def test_a_draft_learns(target: tuple[torch.nn.Module, str], loss: str) -> None:
    found = learned(trainer_of(target[1], loss=loss), target[0])
    assert found.candidate.mean() > 1.03 * found.present.mean()
    assert torch.equal(found.present, found.first)
    assert found.verdict == "better"


@pytest.mark.parametrize("rate", [1.0, 1e9])
def test_a_wrong_learning_rate_is_found_out_and_undone(
    target: tuple[torch.nn.Module, str], rate: float
) -> None:
    trainer = trainer_of(target[1], rate=rate)
    assert learned(trainer, target[0], 64).verdict == "worse"
    trainer.restart()
    now = trainer.draft.state()
    assert all(torch.equal(now[name], first) for name, first in trainer.first.state.items())


def test_an_update_that_is_no_number_is_left_out(target: tuple[torch.nn.Module, str]) -> None:
    trainer = trainer_of(target[1])
    trainer.recipe = Recipe(replayed=0.0)
    before = [w.detach().clone() for w in trainer.draft.weights]
    good = served(target[0], 8)
    broken = replace(good[0], logprobs=np.full_like(good[0].logprobs, np.nan))
    trainer.learn([broken, *good[1:]], lambda: None)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.draft.weights, strict=True))
    trainer.learn(good, lambda: None)
    assert trainer.updates == 1
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.draft.weights, strict=True))


def test_what_is_judged_is_the_average_of_the_weights(target: tuple[torch.nn.Module, str]) -> None:
    trainer = trainer_of(target[1])
    started = [w.detach().clone() for w in trainer.draft.weights]
    trainer.learn(served(target[0], 8), lambda: None)
    once = [w.detach().clone() for w in trainer.draft.weights]
    trainer.learn(served(target[0], 16)[8:], lambda: None)
    twice = [w.detach().clone() for w in trainer.draft.weights]
    trainer.snapshot(lambda: None)
    for a, b, c, now in zip(started, once, twice, trainer.draft.weights, strict=True):
        average = (a + 10 * b) / 11
        average = (2 * average + 10 * c) / 12
        assert torch.allclose(
            now, average.to(trainer.draft.dtypes[next(iter(trainer.draft.dtypes))]), atol=2e-3
        )
        assert not torch.allclose(now, c, atol=1e-7) or torch.equal(b, c)


def test_two_bad_judgements_in_a_row_start_the_training_again(
    target: tuple[torch.nn.Module, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(target[1])
    found = trainer.judge(served(target[0], 8), lambda: None)
    verdicts = iter(["worse", "undecided", "worse", "worse", "worse"])
    restarts = []
    monkeypatch.setattr(trainer, "restart", lambda: restarts.append(len(seen)))
    seen: list[str] = []

    def judge(*_: object) -> Judgement:
        seen.append(next(verdicts))
        gain = {"worse": -1.0, "undecided": 0.0}[seen[-1]]
        return replace(found, candidate=found.present + gain)

    monkeypatch.setattr(trainer, "judge", judge)
    for _ in range(5 * JUDGE_EVERY):
        trainer.round([], lambda found: False, lambda: None)
    assert seen == ["worse", "undecided", "worse", "worse", "worse"] and restarts == [4]


def test_the_first_draft_serves_again_where_a_learned_one_has_become_worse(
    target: tuple[torch.nn.Module, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the served draft was trained on is not asked for any more, and little is learned of the rest."""
    monkeypatch.setattr("adaserve.trainer.sharpening_fit.fit", lambda *_: Correction())
    trainer = trainer_of(target[1], rate=1e-9)
    spoilt = {name: t + 0.05 * torch.randn_like(t) for name, t in trainer.first.state.items()}
    trainer.present = Snapshot(spoilt, Correction())
    trainer.restart()
    found: list[Judgement] = []

    def judged(judgement: Judgement) -> bool:
        found.append(judgement)
        return judgement.wins

    for seed in range(3 * JUDGE_EVERY):
        trainer.round(served(target[0], 32, seed=seed), judged, lambda: None)
    assert [f.verdict for f in found] == ["undecided", "first", "undecided"], "once may be chance"
    assert found[1].first.mean() > found[1].present.mean()
    assert found[1].draft is trainer.first is trainer.present
    now = trainer.draft.state()
    assert all(torch.allclose(now[name], t, atol=1e-4) for name, t in trainer.first.state.items())


def test_a_candidate_that_has_caught_up_is_taken_in_place_of_the_first_draft(
    target: tuple[torch.nn.Module, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(target[1])
    found = trainer.judge(served(target[0], 8), lambda: None)
    behind = replace(found, present=found.first - 0.5, candidate=found.first + 0.1)
    monkeypatch.setattr(trainer, "judge", lambda *_: behind)
    seen: list[Judgement] = []
    for _ in range(3 * JUDGE_EVERY):
        trainer.round([], lambda found: bool(seen.append(found)), lambda: None)
    assert [f.verdict for f in seen] == ["better"] * 3


def test_a_candidate_that_the_server_drops_is_trained_no_further(
    target: tuple[torch.nn.Module, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was found to gain is not served, so the next one must be found on its own."""
    trainer = trainer_of(target[1])
    found = trainer.judge(served(target[0], 8), lambda: None)
    monkeypatch.setattr(trainer, "judge", lambda *_: replace(found, candidate=found.present + 1.0))
    restarts: list[bool] = []
    for taken in (True, False):
        monkeypatch.setattr(trainer, "restart", lambda taken=taken: restarts.append(taken))
        for _ in range(JUDGE_EVERY):
            trainer.round([], lambda _, taken=taken: taken, lambda: None)
    assert restarts == [False]


def test_a_draft_that_has_just_begun_to_serve_is_not_blamed_for_the_one_before(
    target: tuple[torch.nn.Module, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(target[1])
    found = trainer.judge(served(target[0], 8), lambda: None)
    worse = replace(found, present=found.first - 0.5, candidate=found.first - 0.5)
    better = replace(worse, candidate=found.first - 0.1, draft=Snapshot(found.draft.state, Correction()))
    judgements = iter([better, worse, worse])
    monkeypatch.setattr(trainer, "judge", lambda *_: next(judgements))
    seen: list[str] = []

    def judged(judgement: Judgement) -> bool:
        seen.append(judgement.verdict)
        return judgement.wins

    for _ in range(3 * JUDGE_EVERY):
        trainer.round([], judged, lambda: None)
    assert seen == ["better", "undecided", "first"]


def test_judging_changes_nothing(target: tuple[torch.nn.Module, str]) -> None:
    trainer = trainer_of(target[1])
    trainer.learn(served(target[0], 8), lambda: None)
    before = {n: t.clone() for n, t in trainer.draft.model.state_dict().items()}
    trainer.judge(served(target[0], 8, seed=3), lambda: None)
    after = trainer.draft.model.state_dict()
    assert all(torch.equal(t, after[n]) for n, t in before.items())


def test_padding_does_not_change_what_a_draft_says(target: tuple[torch.nn.Module, str]) -> None:
    draft, records = DraftCopy(target[1]), served(target[0], 3)
    short = records[1]
    cut = type(short)(short.tokens[:15], short.start, short.logprobs[:8], None, 0.8, 0)
    with torch.no_grad():
        together, alone = draft.logits([records[0], cut, records[2]])[1], draft.logits([cut])[0]
    assert torch.allclose(together, alone, atol=1e-4)


@pytest.mark.parametrize("kind", ["granite", "cohere", "gemma2"])
def test_a_draft_says_what_its_model_says_also_where_that_scales_its_logits(
    kind: str, tmp_path: Path
) -> None:
    own = {"granite": {"logits_scaling": 8.0}, "cohere": {"logit_scale": 0.0625}}
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    sizes = shape | heads | own.get(kind, {"final_logit_softcapping": 0.2})
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    draft, records = DraftCopy(str(tmp_path)), [record(vocab=64), record(2, 5, 64, seed=1)]
    with torch.no_grad():
        for r, said in zip(records, draft.logits(records), strict=True):
            every = draft.model(input_ids=torch.from_numpy(r.tokens.astype("int64"))[None]).logits[0]
            assert torch.allclose(said, every[r.start : r.start + len(r)], atol=1e-6)


def test_a_draft_that_knows_some_tokens_is_trained_as_it_is_served(
    target: tuple[torch.nn.Module, str],
) -> None:
    """What it can't propose counts as not accepted, and nothing of its capacity goes there."""
    known = np.random.default_rng(4).permutation(VOCAB)[: VOCAB // 40]
    draft, whole = DraftCopy(target[1], "cpu", VOCAB, known), DraftCopy(target[1])
    records, is_known = served(target[0], 4), np.isin(np.arange(VOCAB), known)
    with torch.no_grad():
        for said, every in zip(draft.logits(records), whole.logits(records), strict=True):
            assert said.shape == every.shape
            assert torch.equal(said[:, is_known], every[:, is_known])
            assert (said[:, ~is_known] == UNKNOWN).all()
    trainer = Trainer(draft, [], Recipe(), sharpening=load_sharpening(Path(target[1])), replay_bytes=1)
    found, all_known = (
        t.judge(served(target[0], 8, seed=2), lambda: None) for t in (trainer, trainer_of(target[1]))
    )
    assert found.first.mean() < 0.9 * all_known.first.mean()


def test_a_draft_with_fewer_tokens_than_its_target_learns(tmp_path: Path) -> None:
    """A larger model of a family may pad its vocabulary further."""
    whole = save_drafts(tmp_path / "whole")
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    small.resize_token_embeddings(VOCAB - 32)
    small.config.pad_token_id = None
    small.save_pretrained(tmp_path / "small")
    draft = DraftCopy(str(tmp_path / "small"), "cpu", VOCAB, np.arange(VOCAB - 32))
    sharpening = load_sharpening(tmp_path / "small")
    trainer = Trainer(draft, [], Recipe("hard", 1e-3), sharpening=sharpening, replay_bytes=10_000_000)
    assert learned(trainer, whole, 64).candidate.mean() > 0


def test_verdicts() -> None:
    assert verdict(torch.tensor([0.1, 0.2, 0.1, 0.2])) == "better"
    assert verdict(torch.tensor([-0.1, -0.2, -0.1, -0.2])) == "worse"
    assert verdict(torch.tensor([-0.1, 0.2, 0.1, -0.2])) == "undecided"
    assert verdict(torch.tensor([0.1, float("nan"), 0.2])) == "worse"
    assert verdict(torch.zeros(5)) == "undecided"
    once = torch.tensor([0.0, 0.2, 0.1, -0.1, 0.1])
    assert once.mean() > once.std() / 5**0.5 and verdict(once) == "undecided", "that may well be chance"
    assert verdict(torch.ones(1)) == "undecided", "one request proves nothing"
    assert verdict(torch.tensor([0.1, 0.2])) == "undecided", "nor do two"


def test_the_newest_are_kept_within_their_memory() -> None:
    one = record()
    newest = Newest(5 * one.nbytes)
    for seed in range(50):
        assert newest.add(record(seed=seed)) == (seed < 5)
        assert newest.nbytes == sum(r.nbytes for r in newest.records) <= 5 * one.nbytes
    assert newest.take().key == 45
    assert newest.add(one) and not newest.add(one)
    assert [r.key for r in newest.records] == [47, 48, 49, one.key, one.key]


def test_what_cannot_be_served_is_refused(target: tuple[torch.nn.Module, str]) -> None:
    draft = DraftCopy(target[1])
    manifest, state = draft.manifest(), draft.state()
    assert checked(to_bytes(state), manifest).keys() == manifest.keys()
    name = next(iter(state))
    bad = {
        "not finite": state | {name: torch.full_like(state[name], float("nan"))},
        "not float32": state | {name: state[name][:-1]},
        "not float32 ": state | {name: state[name].half()},
        "other tensors": {n: t for n, t in state.items() if n != name},
    }
    for reason, tensors in bad.items():
        with pytest.raises(ValueError, match=reason.strip()):
            checked(to_bytes(tensors), manifest)
    with pytest.raises(ValueError, match="cannot be read"):
        checked(to_bytes(state)[:-100], manifest)
