"""Training and measuring, on models so small that seconds suffice."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from adaserve.cli import app
from adaserve.pair import distill, export
from adaserve.pair.candidates import ModelDrafter, Trees, draft_trees
from adaserve.pair.data import Batches, open_stream
from adaserve.pair.distill import divergence, sliced
from adaserve.pair.evaluate import (
    best_shared,
    best_tau,
    calibration_error,
    held_out_loss,
    prompt_batch,
    reliability,
)
from adaserve.pair.export import Recipe, ensure_corpus, train_pair
from adaserve.pair.folders import MEDUSA, PACKED_NAME, PLAIN_NAME, PairError, weights_folder
from adaserve.pair.generate import Cache, extend, generate
from adaserve.pair.model import TinyLlama, load_hf, save_hf
from adaserve.pair.optimizer import orthogonalized
from adaserve.pair.packed import average
from adaserve.pair.schedule import Phase, Stage, learning_rate
from adaserve.pair.shape import Shape
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.pair.train import Run, Trainer, next_token_loss
from adaserve.sharpening import DraftSharpening, load_sharpening

TINY = Shape(vocab=50, hidden=32, layers=2, mlp=48, heads=4, kv_heads=2)


def random_model(seed: int = 0, shape: Shape = TINY) -> TinyLlama:
    torch.manual_seed(seed)
    model = TinyLlama(shape)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    return model.requires_grad_(False)


def make_run(folder: Path, minutes: float) -> Run:
    """A stream that counts: the next token follows from the last, so a loss near zero can be learned."""
    (np.arange(20_000) % TINY.vocab).astype(np.uint16).tofile(folder / "train.bin")
    return Run(folder, folder / "out", minutes, threads=1, compile=False, phases=(Phase(1.0, 8, 32),))


def trainer(run: Run) -> Trainer:
    torch.manual_seed(run.seed)
    model = TinyLlama(TINY)
    text = Batches(open_stream(run.corpus / "train.bin"), seed=run.seed)
    return Trainer(run, model, text, lambda window: next_token_loss(model, window))


def test_learns_and_resumes_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve.pair.train.learning_rate", lambda share: 1.0)
    first = trainer(make_run(tmp_path, minutes=60))
    losses = [first.train_step() for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]
    first.save_checkpoint()

    second = trainer(make_run(tmp_path, minutes=60))
    assert (second.step, second.tokens) == (first.step, first.tokens)
    assert 0 < second.clock.before_s < first.clock.elapsed_s
    assert abs(second.train_step() - first.train_step()) < 0.05


def test_a_full_disk_is_named_and_the_earlier_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(make_run(tmp_path, minutes=60))
    one.save_checkpoint()

    def full(part: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint\.pt'"):
        one.save_checkpoint()
    assert [file.name for file in one.run.out.iterdir()] == ["checkpoint.pt"]


def test_saved_weights_are_float16_numbers(tmp_path: Path) -> None:
    """Others may read them as they may read any file of the folder."""
    save_hf(random_model(), tmp_path)
    loaded = load_hf(tmp_path)
    assert all((p == p.half().float()).all() for p in loaded.parameters())
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_cached_generation_is_the_plain_forward() -> None:
    model = random_model()
    tokens = torch.randint(2, TINY.vocab, (3, 12))
    cache = Cache.empty(model, 3, 12)
    extend(model, tokens[:, :7], cache)
    for position in range(7, 12):
        step = extend(model, tokens[:, position : position + 1], cache)
    torch.testing.assert_close(step, model(tokens)[:, -1], rtol=1e-4, atol=1e-4)


def test_greedy_rows_do_not_depend_on_the_seed() -> None:
    model, prompts = random_model(), torch.randint(2, TINY.vocab, (4, 5))
    temperature = torch.tensor([0.0, 0.0, 1.0, 1.0])
    a, b = (generate(model, prompts, 16, temperature, seed=s) for s in (1, 2))
    assert (a[:2] == b[:2]).all()
    assert (a[2:] != b[2:]).any()


def test_draft_that_is_the_target_is_always_accepted_when_greedy() -> None:
    model, prompts = random_model(), torch.randint(2, TINY.vocab, (6, 9))
    whole = generate(model, prompts, 4, torch.zeros(6), seed=0)
    for w in (1, 3):
        trees = draft_trees(ModelDrafter(model), prompts, depth=4, w=w, tau=0.01)
        # Every level of a beam holds its likeliest path, which near tau = 0 is the greedy one.
        assert trees.accepted(whole[:, 9:]).tolist() == [4] * 6


def test_beam_levels_are_the_best_of_all_extensions() -> None:
    model, prompts = random_model(seed=4), torch.randint(2, TINY.vocab, (2, 6))
    trees = draft_trees(ModelDrafter(model), prompts, depth=2, w=2, tau=0.7)
    for row in range(2):
        logits = model(prompts[row : row + 1])[0, -1] / 0.7
        logits[:2] = -torch.inf
        root = logits.softmax(-1)
        best = root.topk(2)
        torch.testing.assert_close(trees.probability[0][row], best.values, rtol=1e-4, atol=1e-6)
        brute: dict[tuple[int, int], float] = {}
        for p, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            below = model(torch.cat((prompts[row], torch.tensor([token])))[None])[0, -1] / 0.7
            below[:2] = -torch.inf
            brute |= {(token, child): p * q for child, q in enumerate(below.softmax(-1).tolist())}
        expected = sorted(brute, key=brute.__getitem__, reverse=True)[:2]
        assert [tuple(path) for path in trees.paths[1][row].tolist()] == expected


def test_half_of_each_batch_is_what_the_target_wrote() -> None:
    """Also of a run that goes on."""
    streams = [np.arange(first, first + 1001, dtype=np.uint16) for first in (0, 2000)]
    whole, rest = (distill.Mixture(*(Batches(stream, seed=3) for stream in streams)) for _ in range(2))
    seen = [whole.take(4, 10) for _ in range(30)]
    assert all((batch[:2] < 2000).all() and (batch[2:] >= 2000).all() for batch in seen)
    assert len({int(row[0]) for batch in seen for row in batch}) == 4 * 30, "no window comes twice"
    rest.used_tokens = 20 * 4 * 10
    assert (rest.take(4, 10) == seen[20]).all()


def test_slice_of_same_shape_is_the_target() -> None:
    model, tokens = random_model(), torch.randint(2, TINY.vocab, (2, 10))
    draft = sliced(model, TINY)
    torch.testing.assert_close(draft(tokens), model(tokens))
    assert divergence(draft(tokens), model(tokens), 0.5).item() == pytest.approx(0.0, abs=1e-6)
    smaller = sliced(model, Shape(vocab=50, hidden=32, layers=1, mlp=16, heads=4, kv_heads=2))
    assert divergence(smaller(tokens), model(tokens), 1.0).item() > 0


def test_best_tau_recovers_the_true_one() -> None:
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, 8000, 30)
    actual = torch.distributions.Categorical(logits=logits / 0.6).sample()
    assert best_tau(logits, actual) == pytest.approx(0.6, rel=0.08)


def test_shared_noise_is_read_as_what_it_is() -> None:
    """A target whose logits differ by Gumbel errors of scale 0.4 from its draft's: tau finds that scale."""
    torch.manual_seed(0)
    drafted, noise, error = (torch.randn(1, 6000, 40), *(gumbel_like(1, 6000, 40) for _ in range(2)))
    actual = (drafted + noise + 0.4 * error).argmax(-1)
    tau, weight = best_shared(drafted, noise, actual, 1.0)
    assert tau == pytest.approx(0.4, rel=0.2)
    assert weight == pytest.approx(1.0, abs=0.16)
    assert best_shared(drafted, noise, actual, 0.0)[1] == 0.0


def test_draft_that_is_the_target_finds_every_draw() -> None:
    model, prompts = random_model(), torch.randint(2, TINY.vocab, (6, 9))
    keys = np.arange(6, dtype=np.uint64)
    whole = generate(model, prompts, 4, torch.full((6,), 0.9), seed=0, keys=keys)
    trees = draft_trees(ModelDrafter(model), prompts, depth=4, w=1, tau=0.5, keys=keys, noise=0.9)
    assert trees.accepted(whole[:, 9:]).tolist() == [4] * 6
    guesses = draft_trees(ModelDrafter(model), prompts, depth=4, w=1, tau=0.5)
    assert guesses.accepted(whole[:, 9:]).sum() < 20


def gumbel_like(*shape: int) -> torch.Tensor:
    return -torch.empty(shape).exponential_().log()


def test_path_probabilities_are_compared_with_what_happened() -> None:
    """Of two nodes in 40 trees one claims 0.3 and is right in 12 of them, the other claims 0.9 in vain."""
    actual, paths = torch.zeros(40, 1, dtype=torch.long), torch.ones(40, 2, 1, dtype=torch.long)
    paths[:12, 0] = 0
    rows = reliability([(Trees([paths], [torch.tensor([0.3, 0.9]).repeat(40, 1)]), actual)])
    assert [(r["nodes"], r["predicted"], r["observed"]) for r in rows] == [(40, 0.3, 0.3), (40, 0.9, 0.0)]
    assert calibration_error(rows) == pytest.approx(0.45)


def test_held_out_loss_is_told_by_position(tmp_path: Path) -> None:
    """Of windows spread over the stream, the first and the last among them."""
    model, tokens = random_model(), torch.randint(2, TINY.vocab, (31,))
    tokens.numpy().astype(np.uint16).tofile(tmp_path / "stream")
    with torch.no_grad():
        every = [
            cross_entropy(model(part[None, :-1])[0], part[1:], reduction="none")
            for part in (tokens[:11], tokens[10:21], tokens[20:])
        ]
    found = held_out_loss(model, tmp_path / "stream", length=10, windows=3)
    torch.testing.assert_close(found, torch.stack(every).mean(0))


def test_orthogonalized_updates_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for size in ((16, 40), (40, 16)):
        values = torch.linalg.svdvals(orthogonalized(torch.randn(size)))
        assert values.min() > 0.7 and values.max() < 1.3


def test_learning_rate_rises_holds_and_falls() -> None:
    shares = np.linspace(0, 1, 101)
    rates = [learning_rate(s) for s in shares]
    assert max(rates) == 1.0 and rates[0] < 0.05 and rates[-1] == pytest.approx(0.01)
    falling = rates[30:]
    assert falling == sorted(falling, reverse=True)


def test_sharpening_interpolates_and_stays_inside(tmp_path: Path) -> None:
    sharpening = DraftSharpening((0.0, 1.0), (0.4, 1.0))
    np.testing.assert_allclose(sharpening.tau([0.0, 0.5, 1.0, 2.0]), [0.4, 0.7, 1.0, 1.0])
    np.testing.assert_allclose(load_sharpening(tmp_path).tau([0.0, 1.0]), [0.5, 1.0])
    with pytest.raises(ValueError, match="rise"):
        DraftSharpening((1.0, 0.0), (1.0, 0.5))
    scale, spread = DraftSharpening(
        (0.0,), (1.0,), shared=((0.0, 1.0), (0.4, 0.8), (0.0, 0.9))
    ).with_shared_noise([0.0, 0.5, 1.0])
    np.testing.assert_allclose(scale, [2.5, 1 / 0.6, 1.25])
    np.testing.assert_allclose(spread, [0.0, 0.75, 1.125])


def test_rotary_base_is_read_from_the_folder(tmp_path: Path) -> None:
    model, tokens = random_model(shape=replace(TINY, rope_theta=500.0)), torch.randint(2, TINY.vocab, (2, 40))
    save_hf(model, tmp_path)
    same = load_hf(tmp_path)
    assert same.shape.rope_theta == 500.0
    torch.testing.assert_close(same(tokens), model(tokens), rtol=1e-2, atol=1e-2)


def test_long_texts_are_fed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaserve.pair.generate._AT_ONCE", 5)
    model, tokens = random_model(), torch.randint(2, TINY.vocab, (2, 12))
    torch.testing.assert_close(
        extend(model, tokens, Cache.empty(model, 2, 12)), model(tokens)[:, -1], rtol=1e-4, atol=1e-4
    )


def test_trained_weights_need_text_in_their_own_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of it, also where an earlier run was killed while it took them."""
    corpus, start = tmp_path / "corpus", weights_folder()
    corpus.mkdir()
    (corpus / "train.jsonl").touch()
    (corpus / "tokens.json").touch()
    copy = shutil.copy
    for kills in (True, False):

        def killed(source: Path, out: Path, kills: bool = kills) -> None:
            copy(source, out)
            if kills:
                raise KeyboardInterrupt

        monkeypatch.setattr(shutil, "copy", killed)
        with suppress(KeyboardInterrupt):
            ensure_corpus(tmp_path, seed=0, start=start)
    assert all((corpus / name).exists() for name in export.TOKENIZER_FILES)
    assert load_tokenizer(corpus).to_str() == load_tokenizer(start / "target").to_str()
    (corpus / "tokenizer.json").write_text("{}")
    with pytest.raises(PairError, match="another vocabulary"):
        ensure_corpus(tmp_path, seed=0, start=start)
    (bare := tmp_path / "bare" / "target").mkdir(parents=True)
    copy(start / "target" / "tokenizer.json", bare)  # as of a model without a chat template
    for name in export.TOKENIZER_FILES:
        (corpus / name).unlink()
    ensure_corpus(tmp_path, seed=0, start=bare.parent)
    assert load_tokenizer(corpus).to_str() == load_tokenizer(bare).to_str()


def test_a_draft_goes_on_while_its_target_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft keeps its rotary base, whatever it is. What is measured and cut from held-out text afterwards
    is left out: it takes minutes."""
    for name in ("evaluate", "write_acceptance", "write_prompts"):
        monkeypatch.setattr(export, name, lambda *_, **__: {})

    def stream(path: Path) -> None:
        (np.arange(2_000) % 500).astype(np.uint16).tofile(path)

    monkeypatch.setattr(distill, "write_text", lambda _target, _text, out, *_, **__: stream(out))
    start, corpus = shutil.copytree(weights_folder(), tmp_path / "start"), tmp_path / "corpus"
    config = start / "draft" / "config.json"
    config.write_text(config.read_text().replace("160000.0", "500.0"))
    corpus.mkdir()
    for name in ("train.jsonl", "tokens.json"):
        (corpus / name).touch()
    stream(corpus / "train.bin")
    phases = (Phase(1.0, 2, 64),)
    recipe = Recipe(
        0, 0.01, 250_000, seed=0, threads=1, compile=False, bf16=False, stage=Stage(phases, phases, 0.5),
        start=start,
    )  # fmt: skip
    (tmp_path / "pair" / "target").mkdir(parents=True)
    (tmp_path / "pair" / "target" / PLAIN_NAME).touch()
    pair = train_pair(tmp_path, recipe)
    packed = Path("target") / PACKED_NAME
    assert not (pair / "target" / PLAIN_NAME).exists(), "an earlier run's"
    assert (pair / packed).read_bytes() == (start / packed).read_bytes()
    before, after = load_hf(start / "draft"), load_hf(pair / "draft")
    assert before.shape.rope_theta == after.shape.rope_theta == 500.0
    assert not torch.equal(before.embed.weight, after.embed.weight)
    assert (before.embed.weight - after.embed.weight).abs().mean() < 0.5 * before.embed.weight.abs().mean()
    with pytest.raises(PairError, match="finished"):
        train_pair(tmp_path, replace(recipe, draft_minutes=0.02))
    with pytest.raises(PairError, match="would be overwritten"):
        train_pair(tmp_path, replace(recipe, start=pair))


def test_an_average_lies_between_two_models(tmp_path: Path) -> None:
    models = [random_model(seed) for seed in (1, 2)]
    for name, model in zip("ab", models, strict=True):
        save_hf(model, tmp_path / name)
    average(tmp_path / "a", tmp_path / "b", 0.25, tmp_path / "c")
    first, second, between = (m.state_dict() for m in (*models, load_hf(tmp_path / "c")))
    for name, weight in between.items():
        wanted = 0.75 * first[name] + 0.25 * second[name]
        assert (weight - wanted).abs().max() <= 0.01 * wanted.abs().max() + 1e-3
    save_hf(random_model(shape=replace(TINY, mlp=32)), tmp_path / "d")
    medusa = weights_folder() / MEDUSA
    for other, reason in (("d", "different shapes"), ("e", "holds no model"), (medusa, "holds no model")):
        with pytest.raises(PairError, match=reason):
            average(tmp_path / "a", tmp_path / other, 0.25, tmp_path / "f")


def test_heads_that_know_different_tokens_have_no_average(tmp_path: Path) -> None:
    """A row of one's output matrix stands for another token in the other, and so would what lies between."""
    for name, token in (("a", 7), ("b", 8)):
        (tmp_path / name).mkdir()
        tensors = {"lm_head.weight": torch.rand(1, 4).half(), "d2t": torch.tensor([token])}
        save_file(tensors, tmp_path / name / PLAIN_NAME)
    with pytest.raises(PairError, match="know different tokens"):
        average(tmp_path / "a", tmp_path / "b", 0.25, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    average(tmp_path / "a", tmp_path / "a", 0.25, tmp_path / "c")


@pytest.mark.parametrize("agreement", [0.6, 1.0])
def test_a_draft_for_tests_agrees_as_often_as_asked(
    agreement: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may be there, if nothing is in it."""
    monkeypatch.setattr("adaserve.pair.perturbed._BISECTIONS", 5)  # enough for one digit
    target = weights_folder() / "target"
    words = ["pair", "test-draft", str(target), str(tmp_path), "--agreement", str(agreement)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    tokens = prompt_batch(load_tokenizer(target), "coding", 8, odd=True)
    with torch.no_grad():
        best, drafted = (load_hf(folder)(tokens).argmax(-1) for folder in (target, tmp_path))
    assert float((best == drafted).float().mean()) == pytest.approx(agreement, abs=0.1)
