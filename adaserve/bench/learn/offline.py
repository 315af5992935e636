"""Variants of learning, replayed on one stream of requests without a server.

The embedded target writes the answers once, as a server would. Every variant then plays the stream with the
trainer and the gate that a server has: the draft that serves is scored on each request before any is learned
from it, in chains of 4 that are verified as a server does. Draft and target share their noise, so what is
accepted is known exactly, and drafts are compared on the same texts.

Among the variants are those of Online Speculative Decoding (arXiv:2310.07177): the interval of updates,
learning from errors only, text drawn from target and draft, and one draft per domain.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as fn

from adaserve.bench.display import progress, table
from adaserve.bench.learn.online import LearnPlan
from adaserve.bench.learn.texts import HOME, Texts
from adaserve.host.files import write_json
from adaserve.loadgen.results import provenance
from adaserve.noise import request_key
from adaserve.pair.folders import weights_folder
from adaserve.pair.generate import Cache, extend, generate
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.tokenizer import load_tokenizer
from adaserve.pair.vocabulary import BOS_ID
from adaserve.pair.widen import shipped_draft
from adaserve.sharpening import load_sharpening
from adaserve.terminal import say
from adaserve.trainer import sharpening_fit
from adaserve.trainer.draft import DraftCopy
from adaserve.trainer.judging import Judgement, Snapshot
from adaserve.trainer.losses import CHAIN
from adaserve.trainer.records import Record, kept
from adaserve.trainer.rehearsal import rehearsal_records
from adaserve.trainer.trainer import JUDGED, Recipe, Trainer

PROMPT_TOKENS = (24, 100)
SCORED = 64
"""Held-out requests of each domain."""
REPLAY_BYTES = 64_000_000
WINDOW = 50
"""Requests in a row over which the worst gain is taken."""


class ErrorsOnly(Trainer):
    """Learns where its own draft is wrong, as the paper's does, and nowhere else."""

    def loss_on(self, record: Record, logits: Tensor) -> Tensor:
        right = guesses(record, logits.detach(), sharpening_fit.noise_weight(record, self.sharpening))
        return super().loss_on(record, logits) * (1 - right)


@dataclass(frozen=True, slots=True)
class Variant:
    """How a variant differs from the default."""

    recipe: Recipe = field(default_factory=Recipe)
    trainer: type[Trainer] = Trainer
    top: bool = False  # the target's likeliest tokens and the rest, as with large vocabularies
    mixed: bool = False  # text drawn from the middle of target and draft
    routed: bool = False  # one draft per domain
    damage: float = 0.0  # noise on the first draft's matrices, in standard deviations of each


VARIANTS: Mapping[str, Variant] = {
    "default": Variant(),
    "forward": Variant(Recipe(loss="forward")),
    "reverse": Variant(Recipe(loss="reverse")),
    "lk": Variant(Recipe(loss="lk")),
    "hard": Variant(Recipe(loss="hard", rate=1e-4)),
    "no-average": Variant(Recipe(rate=3e-4, ema=0.0)),
    "interval-32": Variant(Recipe(interval=32)),
    "no-replay": Variant(Recipe(replayed=0.0)),
    "no-home": Variant(Recipe(rehearsal=0.0)),
    "top-32": Variant(top=True),
    "errors": Variant(trainer=ErrorsOnly),
    "mixed": Variant(mixed=True),
    "routed": Variant(routed=True),
    "damaged": Variant(damage=0.3),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant on the whole stream. Gains are shares of what the first draft gets accepted on the same
    texts, per verification of a chain of 4."""

    variant: str
    gains: dict[str, float]  # domain -> in the last quarter of its requests
    worst: float  # over any ``WINDOW`` requests in a row
    held_out: dict[str, float]  # domain -> on texts of files that the stream does not have
    recovered: float | None  # in the last quarter of the stream: share of what a damaged first draft lacks
    swaps: int
    rejected: int
    tokens: int  # learned from
    cpu_s: float


def run_offline(plan: LearnPlan, variants: Sequence[str], folder: Path, console: Console) -> None:
    """Compares the variants; JSON and a table. Raises ServerError if there are no texts of a domain."""
    made, outcomes = provenance(), list[Outcome]()
    torch.set_num_threads(1)
    with progress(console) as bar:
        study = _Study(plan, bar)
        folder.mkdir(parents=True, exist_ok=True)
        for name in variants:
            outcomes.append(study.run(name))
            result = {"plan": asdict(plan), "outcomes": [asdict(o) for o in outcomes], **made}
            write_json(folder / "learn-offline.json", result)
    Console().print(_table(outcomes))
    say(console, f"written to {folder}")


class _Study:
    """The stream, and the texts that variants are scored on."""

    def __init__(self, plan: LearnPlan, bar: Progress) -> None:
        self._bar, self._writer = bar, Writer(plan)
        self._domains = [domain for _, domain in replace(plan, block=JUDGED).blocks]
        every = dict.fromkeys(self._domains)
        texts = {domain: Texts(domain, plan.seed) for domain in every}
        self._prompts = [texts[domain].take(JUDGED) for domain in self._domains]
        held_out = {d: Texts(d, plan.seed + 1, held_out=True).take(SCORED) for d in (*every, HOME)}
        self._held_out = {
            d: self._writer.write(t, 1_000_000 + i)
            for i, (d, t) in enumerate(bar.track(held_out.items(), description="writing held-out texts"))
        }
        self._written: dict[bool, list[list[Record]]] = {}
        self._first: dict[tuple[bool, float], tuple[np.ndarray, dict[str, np.ndarray]]] = {}

    def run(self, name: str) -> Outcome:
        """One variant on the whole stream."""
        variant = VARIANTS[name]
        shared = _trainer(variant)
        trainers = {d: _trainer(variant) if variant.routed else shared for d in self._held_out}
        first, first_held_out = self._first_draft(variant)
        served, verdicts, cpu_s = [], Counter[str](), 0.0

        def judged(found: Judgement) -> bool:
            verdicts[found.verdict] += 1
            return found.wins

        stream = self._stream(variant.mixed)
        for domain, records in self._bar.track(
            list(zip(self._domains, stream, strict=True)), description=name
        ):
            trainer = trainers[domain]
            served.append(counts(trainer, trainer.present, records))
            start_s = time.process_time()
            trainer.round([_top(r) for r in records] if variant.top else records, judged, lambda: None)
            cpu_s += time.process_time() - start_s
        now = np.concatenate(served)
        held_out = {d: counts(trainers[d], trainers[d].present, of) for d, of in self._held_out.items()}
        domains = np.repeat(self._domains, JUDGED)
        return Outcome(
            name,
            {
                d: gain(*(_last_quarter(c[domains == d]) for c in (now, first)))
                for d in dict.fromkeys(domains)
            },
            worst_window(now, first),
            {d: gain(of, first_held_out[d]) for d, of in held_out.items()},
            self._recovered(variant, now),
            verdicts["better"] + verdicts["first"],
            verdicts["worse"],
            sum(t.tokens for t in {id(t): t for t in trainers.values()}.values()),
            cpu_s,
        )

    def _stream(self, mixed: bool) -> list[list[Record]]:
        """Requests in the order in which they are served."""
        if mixed not in self._written:
            what = "writing mixed texts" if mixed else "writing texts"
            every = self._bar.track(list(enumerate(self._prompts)), description=what)
            self._written[mixed] = [self._writer.write(t, i, mixed=mixed) for i, t in every]
        return self._written[mixed]

    def _first_draft(self, variant: Variant) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Its counts on the stream, and on held-out texts of each domain."""
        kind = variant.mixed, variant.damage
        if kind not in self._first:
            trainer = _trainer(Variant(damage=variant.damage))
            texts = self._bar.track(self._stream(variant.mixed), description="scoring the first draft")
            stream = [counts(trainer, trainer.first, of) for of in texts]
            held_out = {d: counts(trainer, trainer.first, of) for d, of in self._held_out.items()}
            self._first[kind] = np.concatenate(stream), held_out
        return self._first[kind]

    def _recovered(self, variant: Variant, now: np.ndarray) -> float | None:
        if not variant.damage:
            return None
        damaged, whole = (self._first_draft(v)[0] for v in (variant, replace(variant, damage=0.0)))
        reached, low, high = (accepted(_last_quarter(of)) for of in (now, damaged, whole))
        return (reached - low) / (high - low)


def _trainer(variant: Variant) -> Trainer:
    folder = shipped_draft()
    draft = DraftCopy(str(folder))
    if variant.damage:
        damage(draft, variant.damage)
    return variant.trainer(
        draft,
        rehearsal_records(draft, str(folder)),
        variant.recipe,
        sharpening=load_sharpening(folder),
        replay_bytes=REPLAY_BYTES,
    )


@torch.no_grad()
def damage(draft: DraftCopy, share: float) -> None:
    """Adds noise to every matrix, of ``share`` of its standard deviation."""
    noise = torch.Generator().manual_seed(0)
    for weight in draft.weights:
        if weight.ndim == 2:
            weight.add_(share * weight.std() * torch.randn(weight.shape, generator=noise))


@torch.no_grad()
def counts(trainer: Trainer, draft: Snapshot, records: Sequence[Record]) -> np.ndarray:
    """int64 [n, 2]: accepted tokens and verifications of each request. The training goes on as it was."""
    master = {name: t.clone() for name, t in trainer.draft.model.state_dict().items()}
    trainer.draft.load(draft.state)
    sharpening = trainer.sharpening.corrected(draft.correction)
    found = []
    for record in records:
        (logits,) = trainer.draft.logits([record])
        found.append(verified(guesses(record, logits, sharpening_fit.noise_weight(record, sharpening))))
    trainer.draft.model.load_state_dict(master)
    return np.array(found)


def verified(right: Tensor) -> tuple[int, int]:
    """Accepted tokens and verifications of a request whose draft is ``right`` (1, else 0) at positions [n].

    A verification accepts the tokens up to the first wrong one, at most ``CHAIN``, and adds the target's own.
    """
    times, at, sequence = 0, 0, [bool(r) for r in right.tolist()]
    taken = 0
    while at < len(sequence):
        ahead = sequence[at : at + CHAIN]
        run = ahead.index(False) if False in ahead else len(ahead)
        taken, times, at = taken + run, times + 1, at + run + 1
    return taken, times


def accepted(of: np.ndarray) -> float:
    """Tokens accepted per verification, of ``counts`` [n, 2]."""
    tokens, times = of.sum(0)
    return float(tokens / times)


def gain(now: np.ndarray, first: np.ndarray) -> float:
    """Share by which ``now`` has more accepted than ``first``, both ``counts`` of the same requests."""
    return accepted(now) / accepted(first) - 1


def worst_window(now: np.ndarray, first: np.ndarray, window: int = WINDOW) -> float:
    """The least gain over ``window`` requests in a row."""
    starts = range(max(1, len(now) - window + 1))
    return min(gain(now[at : at + window], first[at : at + window]) for at in starts)


def _last_quarter(of: np.ndarray) -> np.ndarray:
    return of[len(of) * 3 // 4 :]


class Writer:
    """The embedded target, as a server would have it: its texts, and what it says at every position."""

    def __init__(self, plan: LearnPlan) -> None:
        self._plan = plan
        self._target = load_hf(weights_folder() / "target")
        self._draft = load_hf(weights_folder() / "draft")
        self._tokenizer = load_tokenizer(weights_folder() / "target")

    def write(self, texts: Sequence[str], number: int, *, mixed: bool = False) -> list[Record]:
        """Requests number ``number`` of the stream, all with prompts of one length."""
        encoded = [self._tokenizer.encode(t, add_special_tokens=False).ids for t in texts]
        wanted = random.Random(number).randint(*PROMPT_TOKENS)
        length = min(wanted, *map(len, encoded))
        prompts = torch.tensor([[BOS_ID, *ids[:length]] for ids in encoded])
        keys = np.array([request_key(self._plan.seed, number, row) for row in range(len(texts))], np.uint64)
        temperature = torch.full((len(texts),), self._plan.temperature)
        if mixed:
            whole = mixed_text(self._target, self._draft, prompts, self._plan.tokens, temperature, number)
        else:
            whole = generate(self._target, prompts, self._plan.tokens, temperature, seed=number, keys=keys)
        return self._records(whole, length, keys)

    @torch.no_grad()
    def _records(self, whole: Tensor, start: int, keys: np.ndarray) -> list[Record]:
        logits = self._target(whole[:, :-1])[:, start:] / (self._plan.temperature or 1.0)
        records = []
        for row, says, key in zip(whole, logits, keys.tolist(), strict=True):
            logprobs, ids = kept(fn.log_softmax(says, -1))
            tokens = row.numpy().astype(np.int32)
            records.append(Record(tokens, start, logprobs, ids, self._plan.temperature, key))
        return records


@torch.no_grad()
def mixed_text(
    target: TinyLlama, draft: TinyLlama, prompts: Tensor, new: int, temperature: Tensor, seed: int
) -> Tensor:
    """Continues [rows, prompt] by tokens of ``(p + q) / 2``: the paper's mixed sampling."""
    random_ = torch.Generator().manual_seed(seed)
    whole, tokens = prompts, prompts
    caches = [(m, Cache.empty(m, len(prompts), prompts.shape[1] + new)) for m in (target, draft)]
    heat = temperature.clamp(min=1e-3)[:, None]
    for _ in range(new):
        both = [fn.softmax(extend(model, tokens, cache) / heat, -1) for model, cache in caches]
        tokens = torch.multinomial(torch.stack(both).mean(0), 1, generator=random_)
        whole = torch.cat((whole, tokens), dim=1)
    return whole


def guesses(record: Record, logits: Tensor, weight: float) -> Tensor:
    """[n]: 1 if the draft's best token under the record's own noise is the target's, else 0."""
    if record.temperature == 0:
        return (logits.argmax(-1) == sharpening_fit.served(record)).float()
    noise = sharpening_fit.noise(record, logits.shape[1])
    drawn = (
        (sharpening_fit.target(record) + noise).argmax(-1)
        if record.ids is None
        else sharpening_fit.served(record)
    )
    return ((logits + weight * noise).argmax(-1) == drawn).float()


def _top(record: Record) -> Record:
    logprobs, ids = kept(torch.from_numpy(record.logprobs.astype("float32")), whole=0)
    return replace(record, logprobs=logprobs, ids=ids)


def _table(outcomes: Sequence[Outcome]) -> object:
    """Held-out texts of the stream's domains are one column, their mean."""
    domains = list(outcomes[0].gains)
    heads = ("variant", *domains, "held out", HOME, "worst", "recovered", "swaps", "CPU s")
    made = table("Gain in accepted tokens per verification over the first draft", heads, left=heads[:1])
    for o in outcomes:
        away = float(np.mean([o.held_out[d] for d in domains if d != HOME]))
        shares = [*(o.gains[d] for d in domains), away, o.held_out[HOME], o.worst]
        recovered = "-" if o.recovered is None else f"{o.recovered:.0%}"
        made.add_row(
            o.variant,
            *(f"{s:+.1%}" for s in shares),
            recovered,
            str(o.swaps),
            f"{o.cpu_s / o.tokens * 1e3:.2f}",
        )
    made.caption = f"worst: over {WINDOW} requests in a row; CPU s: of training, for 1,000 tokens"
    return made
