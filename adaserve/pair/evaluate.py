"""Measures the pair on held-out text: loss, loops, accepted tokens, reliability of path probabilities."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress, track
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as fn

from adaserve.checkpoints.draft_kind import draft_kind, medusa_folder
from adaserve.checkpoints.medusa import load_medusa
from adaserve.host.files import write_json
from adaserve.noise import request_key
from adaserve.pair.candidates import Drafter, ModelDrafter, Trees, draft_trees
from adaserve.pair.data import open_stream
from adaserve.pair.eagle import load_head
from adaserve.pair.generate import Written, generate, shared_noise
from adaserve.pair.head_drafts import HeadDrafter
from adaserve.pair.long_context import CATEGORIES as LONG_TEXTS
from adaserve.pair.long_context import long_prompts, ranks, sparse_logits, tree_tokens
from adaserve.pair.medusa import MedusaBlocks, MedusaDrafter
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.prompts import CATEGORIES, distinct_share, load_prompts
from adaserve.pair.sharpening_loss import top_k_log_loss
from adaserve.pair.tokenizer import load_tokenizer, same_vocabulary
from adaserve.pair.vocabulary import BOS_ID, MAX_CONTEXT_TOKENS
from adaserve.sharpening import FILE_NAME, DraftSharpening, sharpening_of

TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
REPORTED = (0.0, 0.7, 1.0)
DEPTH, WIDTHS = 4, (1, 2, 3)
CONTEXTS, WINDOWS, LONG_TEMPERATURES = (1024, MAX_CONTEXT_TOKENS), (0, 256), (0.0, 0.8)
_LONG_NEW, _SINKS = 96, 4
_MAX_LONG = 8
"""Long texts of a category, however many rows are asked for: the prompts hold no more of the longest ones."""
_PROMPT_TOKENS = {"coding": 96, "chat": 14, "summarization": 256}
_TAUS = np.geomspace(0.15, 1.6, 40)
_SHARED_TAUS = np.geomspace(0.2, 1.2, 14)
_NOISE = np.linspace(0.6, 1.5, 7)  # over the request's temperature


@torch.no_grad()
def held_out_loss(model: TinyLlama, stream: Path, *, length: int, windows: int) -> Tensor:
    """Loss in nats by position, [length], averaged over windows spread evenly over the stream."""
    tokens = open_stream(stream)
    starts = np.linspace(0, len(tokens) - length - 1, windows).astype(int)
    total = torch.zeros(length)
    for start in starts:
        window = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))[None]
        total += fn.cross_entropy(model(window[:, :-1])[0], window[0, 1:], reduction="none")
    return total / windows


def prompt_batch(tokenizer: Tokenizer, category: str, rows: int, *, odd: bool) -> Tensor:
    """The last tokens of every other held-out prompt that is long enough, each begun with `begin`."""
    length = _PROMPT_TOKENS[category]
    chosen = []
    for prompt in load_prompts(category)[int(odd) :: 2]:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        if len(ids) >= length:
            chosen.append([BOS_ID, *ids[-length:]])
    return torch.tensor(chosen[:rows])


def write(target: TinyLlama, prompts: Tensor, new: int, temperature: float, *, seed: int) -> Written:
    keys = np.array([request_key(seed, row) for row in range(len(prompts))], np.uint64)
    temperatures = torch.full((len(prompts),), temperature)
    whole = generate(target, prompts, new, temperatures, seed=seed, keys=keys)
    return Written(prompts, whole[:, prompts.shape[1] :], keys)


@torch.no_grad()
def draft_logits(drafter: Drafter, written: Written) -> Tensor:
    """The draft's logits for every written token, [rows, new, vocab]."""
    return drafter.after(written.whole[:, :-1])[:, written.prompts.shape[1] - 1 :]


def best_tau(logits: Tensor, actual: Tensor, taus: np.ndarray = _TAUS) -> float:
    """The divisor of logits [..., n, vocab] under which they say best which tokens the target chose."""
    return float(taus[top_k_log_loss(logits.flatten(0, -2), actual.flatten(), taus).argmin()])


def _proposable(logits: Tensor, wanted: Tensor) -> Tensor:
    """bool [n]: where [n, vocab] logits allow the ``wanted`` token; a head knows only some."""
    return logits.gather(1, wanted[:, None])[:, 0].isfinite()


def noise_of(written: Written, vocabulary: int) -> Tensor:
    """[rows, new, vocabulary]: the noise with which every token was drawn."""
    first = written.prompts.shape[1] - 1
    steps = range(first, first + written.text.shape[1])
    return torch.stack([shared_noise(written.keys, p, vocabulary) for p in steps], dim=1)


def best_shared(logits: Tensor, noise: Tensor, actual: Tensor, temperature: float) -> tuple[float, float]:
    """(tau, weight of the noise), all [..., n, vocab]. The weight is the one under which the target's draws
    were most likely, of those that can be proposed; tau is the best one for it and for all draws."""
    if temperature == 0:
        return best_tau(logits, actual), 0.0
    flat, own, wanted = logits.flatten(0, 1), noise.flatten(0, 1), actual.flatten()
    proposable = _proposable(flat, wanted)
    known, known_noise, known_wanted = flat[proposable], own[proposable], wanted[proposable]
    best = (math.inf, 0.0)
    for weight in temperature * _NOISE:
        noisy = known + weight * known_noise
        losses = [fn.cross_entropy(noisy / tau, known_wanted).item() for tau in _SHARED_TAUS]
        best = min(best, (min(losses), float(weight)))
    return best_tau(flat + best[1] * own, wanted, _SHARED_TAUS), best[1]


def tree_samples(
    drafter: Drafter, written: Written, *, w: int, tau: float, every: int, noise: float = 0.0
) -> list[tuple[Trees, Tensor]]:
    """Trees at every `every`-th written token, with the continuation that the target really took.

    noise: weight of the noise that the target drew by; 0 drafts without knowing it.
    """
    start = written.prompts.shape[1]
    samples = []
    for position in range(every, written.text.shape[1] - DEPTH, every):
        trees = draft_trees(
            drafter,
            written.whole[:, : start + position],
            depth=DEPTH,
            w=w,
            tau=tau,
            keys=written.keys,
            noise=noise,
        )
        samples.append((trees, written.text[:, position : position + DEPTH]))
    return samples


def mean_accepted(samples: list[tuple[Trees, Tensor]]) -> float:
    return float(torch.cat([trees.accepted(actual) for trees, actual in samples]).float().mean())


def reliability(samples: list[tuple[Trees, Tensor]]) -> list[dict[str, float]]:
    """Mean predicted and observed acceptance of nodes, binned by predicted path probability."""
    bins = 8
    predicted = torch.cat([torch.stack(t.probability, 1).flatten() for t, _ in samples])
    observed = torch.cat([t.hits(actual).flatten() for t, actual in samples]).float()
    edge = (predicted * bins).long().clamp(max=bins - 1)
    rows = []
    for index in range(bins):
        chosen = edge == index
        if chosen.sum() > 20:
            rows.append({
                "nodes": int(chosen.sum()),
                "predicted": round(float(predicted[chosen].mean()), 4),
                "observed": round(float(observed[chosen].mean()), 4),
            })  # fmt: skip
    return rows


def calibration_error(rows: list[dict[str, float]]) -> float:
    nodes = sum(r["nodes"] for r in rows)
    return sum(r["nodes"] * abs(r["predicted"] - r["observed"]) for r in rows) / max(nodes, 1)


class Evaluation:
    """One target and one draft, one set of rows; fills `report` step by step behind a progress bar."""

    def __init__(self, pair: Path, draft: str, corpus: Path, *, rows: int, new: int, seed: int) -> None:
        self.target = load_hf(pair / "target")
        self.drafter = load_drafter(pair / draft, self.target)
        self.tokenizer = load_tokenizer(pair / "target")
        self.corpus, self.rows, self.new, self.seed = corpus, rows, new, seed
        self.report: dict[str, Any] = {"rows": rows, "new_tokens": new, "seed": seed}

    def losses(self, draft: TinyLlama) -> None:
        table: dict[str, Any] = {}
        for kind in track(("code", "prose"), description="Held-out loss"):
            stream = self.corpus / f"held_out-{kind}.bin"
            row = {n: held_out_loss(m, stream, length=512, windows=60).mean().item()
                   for n, m in (("target", self.target), ("draft", draft))}  # fmt: skip
            by_position = held_out_loss(self.target, stream, length=MAX_CONTEXT_TOKENS, windows=6)
            for start, end in ((256, 512), (1024, 2048), (4096, 8192)):
                row[f"target_tokens_{start}_to_{end}"] = by_position[start:end].mean().item()
            table[kind] = {name: round(value, 4) for name, value in row.items()}
        self.report["held_out_loss"] = table

    def calibrate(self) -> dict[float, tuple[float, float, float]]:
        """(tau, tau and weight of shared noise) by request temperature, on prompts that the acceptance
        table does not use."""
        taus = {}
        for temperature in track(TEMPERATURES, description="Calibration"):
            logits, noise, actual = [], [], []
            for category in CATEGORIES:
                prompts = prompt_batch(self.tokenizer, category, self.rows // 2, odd=True)
                written = write(self.target, prompts, self.new, temperature, seed=self.seed)
                logits.append(draft_logits(self.drafter, written).flatten(0, 1)[None])
                noise.append(noise_of(written, logits[-1].shape[-1]).flatten(0, 1)[None])
                actual.append(written.text.flatten()[None])
            drafted, wanted = torch.cat(logits, 1), torch.cat(actual, 1)
            shared = best_shared(drafted, torch.cat(noise, 1), wanted, temperature)
            taus[temperature] = (best_tau(drafted, wanted), *shared)
        alone, with_noise, weights = (
            [round(t, 4) for t in column] for column in zip(*taus.values(), strict=True)
        )
        temperatures = list(taus)
        self.report["draft_temperature"] = {"request_temperature": temperatures, "tau": alone}
        self.report["shared_noise"] = {
            "request_temperature": temperatures,
            "tau": with_noise,
            "noise": weights,
        }
        return taus

    def acceptance(self, taus: dict[float, tuple[float, float, float]]) -> None:
        table: list[dict[str, Any]] = []
        pooled: dict[float, list[tuple[Trees, Tensor]]] = {t: [] for t in REPORTED}
        with Progress() as bar:
            task = bar.add_task("Acceptance", total=len(CATEGORIES) * len(REPORTED))
            for category in CATEGORIES:
                for temperature in REPORTED:
                    row, samples = self._cell(category, temperature, taus[temperature])
                    table.append(row)
                    pooled[temperature] += samples
                    bar.advance(task)
        self.report["acceptance"] = table
        self.report["reliability"] = {
            str(t): {"error": round(calibration_error(rows), 4), "bins": rows}
            for t, rows in ((t, reliability(s)) for t, s in pooled.items())
        }

    def long_contexts(self, draft: TinyLlama) -> None:
        """Agreement, and accepted tokens of chains, by context and by what the draft reads of it."""
        sharpening = sharpening_of(self.report)
        cases = [(c, t) for c in CONTEXTS for t in LONG_TEMPERATURES]
        self.report["contexts"] = [
            row
            for case in track(cases, description="Long contexts")
            for row in self._long_rows(draft, *case, sharpening)
        ]

    def _long_rows(
        self, draft: TinyLlama, context: int, temperature: float, sharpening: DraftSharpening
    ) -> list[dict[str, Any]]:
        scale, spread = (float(x) for x in sharpening.with_shared_noise(temperature))
        ranked: dict[int, list[Tensor]] = {window: [] for window in WINDOWS}
        predicted: dict[int, list[Tensor]] = {window: [] for window in WINDOWS}
        rows = min(max(2, self.rows // 8), _MAX_LONG)
        for category in LONG_TEXTS:
            prompts = long_prompts(self.tokenizer, category, rows, context - _LONG_NEW)
            written = write(self.target, prompts, _LONG_NEW, temperature, seed=self.seed)
            noise = noise_of(written, draft.shape.vocab)
            for window in WINDOWS:
                logits = sparse_logits(draft, written, window, _SINKS)
                ranked[window].append(ranks(logits, written, noise, scale, spread))
                best = (logits * scale + noise * spread).softmax(-1).max(-1).values
                predicted[window].append(best)
        return [
            {
                "context": context,
                "temperature": temperature,
                "window": window,
                "top_1_agrees": round((torch.cat(ranked[window]) == 0).float().mean().item(), 3),
                "top_1_predicted": round(torch.cat(predicted[window]).mean().item(), 3),
                "accepted_w1": round(tree_tokens(torch.cat(ranked[window]), DEPTH)[-1] - 1.0, 3),
            }
            for window in WINDOWS
        ]

    def _cell(
        self, category: str, temperature: float, taus: tuple[float, float, float]
    ) -> tuple[dict[str, Any], list[Any]]:
        prompts = prompt_batch(self.tokenizer, category, self.rows, odd=False)
        written = write(self.target, prompts, self.new, temperature, seed=self.seed + 1)
        alone, tau, noise = taus
        logits = draft_logits(self.drafter, written)
        own = noise * noise_of(written, logits.shape[-1]) if noise else torch.zeros(1)
        agrees = ((logits + own).argmax(-1) == written.text).float().mean()
        every = max(4, math.ceil(self.new / 8))

        def samples(w: int, tau: float, noise: float) -> list[tuple[Trees, Tensor]]:
            return tree_samples(self.drafter, written, w=w, tau=tau, every=every, noise=noise)

        by_width = {w: samples(w, tau, noise) for w in WIDTHS}
        row = {
            "category": category,
            "temperature": temperature,
            "distinct_8_grams": round(statistics.mean(map(distinct_share, written.text.tolist())), 3),
            "top_1_agrees": round(float(agrees), 3),
            **{f"accepted_w{w}": round(mean_accepted(s), 3) for w, s in by_width.items()},
            "accepted_w3_without_noise": round(mean_accepted(samples(WIDTHS[-1], alone, 0.0)), 3),
            "sample": self.tokenizer.decode(written.text[0].tolist())[:400],
        }
        return row, by_width[WIDTHS[-1]]


def load_drafter(folder: Path, target: TinyLlama) -> Drafter:
    """The draft model or the heads in ``folder``."""
    if medusa_folder(str(folder), "auto") is not None:
        return MedusaDrafter(target, MedusaBlocks.of(load_medusa(folder), target))
    architectures = json.loads((folder / "config.json").read_text())["architectures"]
    if draft_kind(architectures, "auto", str(folder)) == "eagle3":
        return HeadDrafter(target, load_head(folder, target))
    return ModelDrafter(load_hf(folder))


def evaluate(
    pair: Path, corpus: Path, draft: str = "draft", *, rows: int, new: int, seed: int, threads: int
) -> dict[str, Any]:
    """Everything the documentation reports about the target and ``pair / draft``. The text is the same for
    all drafts. Needs the corpus, in the pair's vocabulary, only for the losses of language models."""
    torch.set_num_threads(threads)
    evaluation = Evaluation(pair, draft, corpus, rows=rows, new=new, seed=seed)
    drafter = evaluation.drafter
    readable = (corpus / "held_out-code.bin").exists() and same_vocabulary(corpus, pair / "target")
    if isinstance(drafter, ModelDrafter) and readable:
        evaluation.losses(drafter.model)
    evaluation.acceptance(evaluation.calibrate())
    if isinstance(drafter, ModelDrafter):
        evaluation.long_contexts(drafter.model)
    else:
        evaluation.report["contexts"] = []
    return evaluation.report


def write_acceptance(report: dict[str, Any], draft: Path) -> None:
    """The part of a report that the server reads, beside the draft's weights."""
    cells = [{k: v for k, v in row.items() if k != "sample"} for row in report["acceptance"]]
    table = {
        **{k: report[k] for k in ("draft_temperature", "shared_noise", "reliability")},
        "acceptance": cells,
        "contexts": report["contexts"],
    }
    write_json(draft / FILE_NAME, table)
