"""Variants of learning on one stream of requests, without a server.

The embedded target writes the answers once, as a server would; every variant then learns from them, and is
scored on held-out texts of each domain by the tokens of a chain of 4 that the server would accept: draft and
target share their noise, so that is known exactly. Among them are those of Online Speculative Decoding
(arXiv:2310.07177): the interval of updates, learning from errors only, text drawn from target and draft, and
one draft per domain.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as fn

from adaserve.bench.learn.online import LearnPlan
from adaserve.bench.learn.texts import HOME, Texts
from adaserve.bench.terminal import progress, table
from adaserve.learning import losses, reading
from adaserve.learning.draft import DraftCopy
from adaserve.learning.home import home_records
from adaserve.learning.records import Record, kept
from adaserve.learning.trainer import Recipe, Snapshot, Trainer
from adaserve.loadgen.results import new_results_dir, provenance
from adaserve.noise import request_key
from adaserve.pair.acceptance import load_sharpening
from adaserve.pair.data import load_tokenizer
from adaserve.pair.generate import Cache, extend, generate
from adaserve.pair.model import TinyLlama, load_hf
from adaserve.pair.vocabulary import BOS_ID
from adaserve.pair.widen import shipped_draft, weights_folder

ROWS = 32
PROMPT_TOKENS = (24, 100)
SCORED = 64
"""Held-out requests of each domain."""
REPLAY_BYTES = 64_000_000


class ErrorsOnly(Trainer):
    """Learns where its own draft is wrong, as the paper's does, and nowhere else."""

    def loss_on(self, record: Record, logits: Tensor) -> Tensor:
        right = guesses(record, logits.detach(), reading.noise_weight(record, self.sharpening))
        return super().loss_on(record, logits) * (1 - right)


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs from the default."""

    recipe: Recipe = field(default_factory=Recipe)
    trainer: type[Trainer] = Trainer
    top: bool = False  # the target's likeliest tokens and the rest, as with large vocabularies
    mixed: bool = False  # text drawn from the middle of target and draft
    routed: bool = False  # one draft per domain


VARIANTS: Mapping[str, Variant] = {
    "default": Variant(),
    "forward": Variant(Recipe(loss="forward")),
    "reverse": Variant(Recipe(loss="reverse")),
    "lk": Variant(Recipe(loss="lk")),
    "hard": Variant(Recipe(loss="hard", rate=1e-4)),
    "interval-32": Variant(Recipe(interval=32)),
    "interval-128": Variant(Recipe(interval=128)),
    "no-replay": Variant(Recipe(replayed=0.0)),
    "no-home": Variant(Recipe(home=0.0)),
    "top-32": Variant(top=True),
    "errors": Variant(trainer=ErrorsOnly),
    "mixed": Variant(mixed=True),
    "routed": Variant(routed=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One variant after the whole stream."""

    variant: str
    accepted: dict[str, float]  # domain -> accepted tokens of a chain of 4 on held-out texts
    tokens: int  # learned from
    cpu_s: float


def run_offline(plan: LearnPlan, variants: Sequence[str], out: Path | None, console: Console) -> None:
    """Compares the variants; JSON and a table. Raises ServerError where there are no texts of a domain."""
    torch.set_num_threads(1)
    folder = out or new_results_dir(Path("results"), "learn-offline")
    folder.mkdir(parents=True, exist_ok=True)
    with progress(console) as bar:
        study = _Study(plan, bar)
        outcomes = [study.first()]
        for name in variants:
            outcomes.append(study.run(name))
            result = {"plan": asdict(plan), "outcomes": [asdict(o) for o in outcomes], **provenance()}
            (folder / "learn-offline.json").write_text(json.dumps(result, indent=1) + "\n")
    Console().print(_table(outcomes))
    console.print(f"written to {folder}")


class _Study:
    """The stream, and the texts that variants are scored on."""

    def __init__(self, plan: LearnPlan, bar: Progress) -> None:
        self.plan, self._bar = plan, bar
        self._writer = Writer(plan)
        batches = max(1, plan.requests // ROWS)
        every = [domain for domain in plan.order for _ in range(batches)]
        texts = {domain: Texts(domain, plan.seed) for domain in dict.fromkeys(plan.order)}
        self._prompts = [(d, texts[d].take(ROWS)) for d in self._track(every, "prompts")]
        self._served: dict[bool, list[tuple[str, list[Record]]]] = {}
        domains = dict.fromkeys((*plan.order, HOME))
        held_out = {d: Texts(d, plan.seed + 1, held_out=True).take(SCORED) for d in domains}
        self._scored = {d: self._writer.write(t, 1_000_000 + i) for i, (d, t) in enumerate(held_out.items())}

    def _track(self, items: Sequence[str], what: str) -> Sequence[str]:
        return list(self._bar.track(items, description=what))

    def _stream(self, mixed: bool) -> list[tuple[str, list[Record]]]:
        """(domain, requests) in the order in which they are served."""
        if mixed not in self._served:
            what = "mixed texts" if mixed else "texts"
            every = self._bar.track(list(enumerate(self._prompts)), description=f"writing {what}")
            self._served[mixed] = [(d, self._writer.write(t, i, mixed=mixed)) for i, (d, t) in every]
        return self._served[mixed]

    def first(self) -> Outcome:
        """The draft as it came."""
        trainer = self._trainer(Variant())
        scores = {d: self._score(trainer, trainer.first, of) for d, of in self._scored.items()}
        return Outcome("draft as it came", scores, 0, 0.0)

    def run(self, name: str) -> Outcome:
        """One variant on the whole stream."""
        variant = VARIANTS[name]
        stream = self._stream(variant.mixed)
        domains = list(self._scored)
        trainers = {d: self._trainer(variant) for d in (domains if variant.routed else domains[:1])}
        start_s = time.process_time()
        for domain, records in self._bar.track(stream, description=name):
            trainer = trainers.get(domain, trainers[domains[0]])
            trainer.learn([_top(r) for r in records] if variant.top else records, lambda: None)
        cpu_s = time.process_time() - start_s
        scores = {}
        for domain, records in self._scored.items():
            trainer = trainers.get(domain, trainers[domains[0]])
            draft = trainer.snapshot(lambda: None) if trainer.updates else trainer.first
            scores[domain] = self._score(trainer, draft, records)
        return Outcome(name, scores, sum(t.tokens for t in trainers.values()), cpu_s)

    def _trainer(self, variant: Variant) -> Trainer:
        folder = shipped_draft()
        draft = DraftCopy(str(folder))
        return variant.trainer(
            draft,
            home_records(draft, str(folder)),
            variant.recipe,
            sharpening=load_sharpening(folder),
            replay_bytes=REPLAY_BYTES,
        )

    @torch.no_grad()
    def _score(self, trainer: Trainer, draft: Snapshot, records: Sequence[Record]) -> float:
        trainer.draft.load(draft.state)
        sharpening = trainer.sharpening.corrected(draft.correction)
        scores = []
        for record in records:
            (logits,) = trainer.draft.logits([record])
            right = guesses(record, logits, reading.noise_weight(record, sharpening))
            scores.append(losses.expected_accepted(right))
        return float(np.mean(scores))


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
    caches = [(m, Cache(m, len(prompts), prompts.shape[1] + new)) for m in (target, draft)]
    heat = temperature.clamp(min=1e-3)[:, None]
    for _ in range(new):
        both = [fn.softmax(extend(model, tokens, cache) / heat, -1) for model, cache in caches]
        tokens = torch.multinomial(torch.stack(both).mean(0), 1, generator=random_)
        whole = torch.cat((whole, tokens), dim=1)
    return whole


def guesses(record: Record, logits: Tensor, weight: float) -> Tensor:
    """[n]: 1 where the draft's best token under the record's own noise is the target's, else 0."""
    if record.temperature == 0:
        return (logits.argmax(-1) == reading.served(record)).float()
    noise = reading.noise(record, logits.shape[1])
    drawn = (reading.target(record) + noise).argmax(-1) if record.ids is None else reading.served(record)
    return ((logits + weight * noise).argmax(-1) == drawn).float()


def _top(record: Record) -> Record:
    logprobs, ids = kept(torch.from_numpy(record.logprobs.astype("float32")), whole=0)
    return replace(record, logprobs=logprobs, ids=ids)


def _table(outcomes: Sequence[Outcome]) -> object:
    domains = list(outcomes[0].accepted)
    heads = ("variant", *domains, "gain", "home", "CPU s per 1,000 tokens")
    made = table("Accepted tokens of a chain of 4 on held-out texts", heads, left=heads[:1])
    away = [d for d in domains if d != HOME]
    first = outcomes[0].accepted
    for o in outcomes:
        gain = np.mean([o.accepted[d] / first[d] - 1 for d in away])
        cpu = f"{o.cpu_s / o.tokens * 1e3:.2f}" if o.tokens else "-"
        home = f"{o.accepted[HOME] / first[HOME] - 1:+.1%}"
        made.add_row(o.variant, *(f"{o.accepted[d]:.3f}" for d in domains), f"{gain:+.1%}", home, cpu)
    return made
