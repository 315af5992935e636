"""How long a forward takes, by parametric and tabulated costs, and how long an iteration takes by these."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol, overload

import numpy as np

from adaserve.checked import shown
from adaserve.errors import UserError
from adaserve.scheduler.averages import FloatOrArray
from adaserve.scheduler.interface import NO_CONTEXT, Context, FloatArray

SCHEMA_VERSION = 2

FEW = 8
"""Tokens of a small verification, of which the knee is a multiple."""

MOST = 4096
"""Tokens of the largest verification that is looked at for the knee."""


class ProfileError(UserError, ValueError):
    """A latency profile is malformed; the message names the field and the remedy."""


class KVReadCost(NamedTuple):
    """Time of attention to cached tokens: ``per_context_s`` x sum L + ``per_pair_s`` x sum q L, over requests
    with L cached tokens and q tokens in the forward.

    The first part is for fetching the KV cache, the second for multiplying with it.
    """

    per_context_s: float = 0.0
    per_pair_s: float = 0.0

    def seconds(self, tokens: FloatOrArray, context: Context) -> FloatOrArray:
        """Of a forward of ``tokens``, or of several [k], spread evenly over the requests."""
        return self.per_context_s * context.tokens + self.per_pair_s * context.each * tokens


class StepCost(Protocol):
    """Seconds of one forward pass of one model."""

    def alone(self, tokens: FloatArray) -> FloatArray:
        """Seconds [k] of k alternative forwards of ``tokens`` [k] with nothing in the KV cache."""
        ...

    @property
    def kv_read(self) -> KVReadCost:
        """What is added for cached tokens."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """``fixed + (weights^s + compute^s)^(1/s) + kv_read``: one family from TurboSpec's line to a roofline.

    compute = ``per_token_s * N_batched``; ``kv_read`` as in ``KVReadCost``: attention has kernels of its own,
    so fetching the KV cache never overlaps with the products. ``sharpness`` s = 1 and no ``per_pair_s`` is
    the linear form T = alpha N_context + gamma N_batched + delta (TurboSpec, section 4); s -> inf is
    max(weights, compute) (MagicDec, section 3).
    """

    fixed_s: float
    weights_s: float = 0.0
    per_token_s: float = 0.0
    per_context_s: float = 0.0
    per_pair_s: float = 0.0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        values = (self.fixed_s, self.weights_s, self.per_token_s, *self.kv_read)
        if not all(math.isfinite(v) and v >= 0 for v in values):
            raise ProfileError(f"cost coefficients must be finite and >= 0, got {values}; measure again")
        if not self.sharpness >= 1:
            raise ProfileError(f"sharpness must be >= 1, got {self.sharpness}")

    @property
    def kv_read(self) -> KVReadCost:
        return KVReadCost(self.per_context_s, self.per_pair_s)

    def alone(self, tokens: FloatArray) -> FloatArray:
        compute = self.per_token_s * tokens
        if self.sharpness == 1:
            return self.fixed_s + self.weights_s + compute
        top = np.maximum(self.weights_s, compute)
        low = np.minimum(self.weights_s, compute)
        ratio = np.divide(low, top, out=np.zeros_like(top), where=top > 0)
        roof: FloatArray = top * (1 + ratio**self.sharpness) ** (1 / self.sharpness)
        return self.fixed_s + roof

    def to_json(self) -> dict[str, Any]:
        return {"form": "forward", **asdict(self)}


@dataclass(frozen=True, slots=True)
class TabulatedCost:
    """Points without cached tokens, joined by lines; the last slope continues beyond them.

    Small CPUs and padded CUDA graphs have steps that no smooth curve fits.
    """

    tokens: tuple[float, ...]
    seconds_at: tuple[float, ...]
    per_context_s: float = 0.0
    per_pair_s: float = 0.0
    known: tuple[float, ...] = ()  # those of ``tokens`` that were learned from forwards that were served

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.seconds_at) or not self.tokens:
            raise ProfileError("a table needs as many seconds as tokens, and at least one point")
        values = (*self.tokens, *self.seconds_at, *self.kv_read, *self.known)
        if not all(math.isfinite(v) and v >= 0 for v in values) or min(self.seconds_at) <= 0:
            raise ProfileError(
                f"a table holds finite numbers, and seconds above 0, got {shown(values)}; measure again"
            )
        if any(b <= a for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ProfileError("table tokens must be strictly increasing")

    @property
    def kv_read(self) -> KVReadCost:
        return KVReadCost(self.per_context_s, self.per_pair_s)

    def alone(self, tokens: FloatArray) -> FloatArray:
        xs, ys = np.asarray(self.tokens), np.asarray(self.seconds_at)
        out: FloatArray = np.interp(tokens, xs, ys) + self._tail_slope() * np.maximum(0.0, tokens - xs[-1])
        return out

    def _tail_slope(self) -> float:
        """Seconds per token beyond the last point; 0 for a single point."""
        xs, ys = self.tokens, self.seconds_at
        if len(xs) == 1:
            return 0.0
        return max(0.0, (ys[-1] - ys[0]) / (xs[-1] - xs[0]), (ys[-1] - ys[-2]) / (xs[-1] - xs[-2]))

    def to_json(self) -> dict[str, Any]:
        return {"form": "table", **asdict(self)}


class Latency(ABC):
    """Predicts a decode iteration: ``depth`` draft forwards, one verify forward, a fixed overhead.

    All times in seconds; ``context`` is the cached tokens of the batch's requests. For draft steps it is the
    part of these that they read.
    """

    __slots__ = ()

    @overload
    def verify_s(self, tokens: float, context: Context = ...) -> float: ...
    @overload
    def verify_s(self, tokens: FloatArray, context: Context = ...) -> FloatArray: ...
    @abstractmethod
    def verify_s(self, tokens: float | FloatArray, context: Context = NO_CONTEXT) -> float | FloatArray:
        """A target forward over ``tokens`` (scalar or array)."""

    @abstractmethod
    def draft_step_s(self, rows: float, context: Context = NO_CONTEXT) -> float:
        """One draft forward over ``rows`` tokens."""

    @abstractmethod
    def draft_start_s(self, n: int) -> float:
        """Seconds that drafting for n requests takes besides its steps."""

    @abstractmethod
    def other_s(self) -> float:
        """Seconds that an iteration takes besides draft and verification."""

    @property
    def slowdown(self) -> float:
        """How many times as long as on a quiet host forwards take at present; predictions include it."""
        return 1.0

    def draft_s(self, n: int, depth: int, width: int, context: Context = NO_CONTEXT) -> float:
        """A beam of ``depth`` steps: n rows first, then n * width (AdaServe section 4.3, step 1)."""
        if depth <= 0:
            return 0.0
        later = (depth - 1) * self.draft_step_s(n * width, context) if depth > 1 else 0.0
        return self.draft_start_s(n) + self.draft_step_s(n, context) + later

    def iteration_s(
        self,
        n: int,
        depth: int,
        width: int,
        verify_tokens: float,
        context: Context = NO_CONTEXT,
        draft_context: Context | None = None,
    ) -> float:
        """One whole decode iteration, prefill not included. ``draft_context``: if it is not ``context``."""
        draft_s = self.draft_s(n, depth, width, context if draft_context is None else draft_context)
        return draft_s + self.verify_s(verify_tokens, context) + self.other_s()

    def knee_tokens(self, factor: float) -> int:
        """Largest B whose verification takes at most ``factor`` times as long as one of a few tokens (>= 1).

        AdaServe (EuroSys) section 3 chooses B by a profiled trade-off of throughput and latency; with
        factor 2 compute has caught up with weight loading, v1's FLOP/s over bandwidth. A few are one to
        ``FEW``, of which the median counts: a single token may have a kernel of its own, which is faster
        than that of two, and is seldom seen under load.
        """
        seconds = self.verify_s(np.arange(1, MOST + 1, dtype=np.float64))
        within = np.flatnonzero(seconds <= factor * np.median(seconds[:FEW]))
        return int(within[-1]) + 1 if len(within) else 1


@dataclass(frozen=True, slots=True)
class LatencyModel(Latency):
    """What was measured, or learned in an earlier run."""

    draft: StepCost
    verify: StepCost
    overhead_s: float = 0.0
    source: str = "default"
    draft_first: StepCost | None = None
    """The first draft step including the time around it, without reading contexts; None = like the others."""

    @overload
    def verify_s(self, tokens: float, context: Context = ...) -> float: ...
    @overload
    def verify_s(self, tokens: FloatArray, context: Context = ...) -> FloatArray: ...
    def verify_s(self, tokens: float | FloatArray, context: Context = NO_CONTEXT) -> float | FloatArray:
        if isinstance(tokens, np.ndarray):
            return forward_s(self.verify, tokens, context)
        return _one(self.verify, tokens, context)

    def draft_step_s(self, rows: float, context: Context = NO_CONTEXT) -> float:
        return _one(self.draft, rows, context)

    def draft_start_s(self, n: int) -> float:
        if self.draft_first is None:
            return 0.0
        return max(0.0, _one(self.draft_first, n, NO_CONTEXT) - self.draft_step_s(n))

    def other_s(self) -> float:
        return self.overhead_s

    def baseline_s(self) -> float:
        """Unloaded seconds per output token: one request, no speculation."""
        return self.verify_s(1.0) + self.overhead_s

    def to_json(self) -> dict[str, Any]:
        """A form that ``from_json`` reads back."""
        return {
            "schema_version": SCHEMA_VERSION,
            "draft": self.draft.to_json(),
            "verify": self.verify.to_json(),
            "overhead_s": self.overhead_s,
            "source": self.source,
            "draft_first": None if self.draft_first is None else self.draft_first.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> LatencyModel:
        """Reads ``to_json``'s form. Raises ProfileError with the field that is wrong."""
        if not isinstance(data, Mapping):
            raise ProfileError(
                f"a latency model is an object, got {shown(data)}; run `adaserve profile` again"
            )
        first, overhead_s = data.get("draft_first"), overhead_of(data)
        for name in ("draft", "verify"):
            if not isinstance(data.get(name), Mapping):
                raise ProfileError(f"latency model lacks {name!r}; run `adaserve profile` again")
        return LatencyModel(
            _cost_from_json(data["draft"]),
            _cost_from_json(data["verify"]),
            overhead_s,
            str(data.get("source", "file")),
            None if first is None else _cost_from_json(first),
        )


def forward_s(cost: StepCost, tokens: FloatArray, context: Context) -> FloatArray:
    """Seconds [k] of forwards of ``tokens`` [k]."""
    sizes = np.asarray(tokens, np.float64)
    return cost.alone(sizes) + cost.kv_read.seconds(sizes, context)


def _one(cost: StepCost, size: float, context: Context) -> float:
    return float(forward_s(cost, np.array([float(size)]), context)[0])


def overhead_of(data: Mapping[str, Any]) -> float:
    """The field ``overhead_s``, 0 where there is none. Raises ProfileError."""
    value = data.get("overhead_s", 0.0)
    if isinstance(value, int | float) and 0 <= value < 1e9:
        return float(value)
    raise ProfileError(f"overhead_s must be a number of seconds from 0 on, got {shown(value)}; measure again")


def _cost_from_json(data: Mapping[str, Any]) -> StepCost:
    try:
        fields = {k: v for k, v in data.items() if k != "form"}
        if data.get("form") == "table":
            for name in ("tokens", "seconds_at", "known"):
                fields[name] = tuple(map(float, fields.get(name, ())))
            return TabulatedCost(**fields)
        return ForwardCost(**fields)
    except ProfileError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ProfileError(f"unknown or missing cost field: {error}; run `adaserve profile` again") from error


def default_latency() -> LatencyModel:
    """Llama-70B on four A100s: the line through published 54/77/124/217 ms at 128/256/512/1024 tokens.

    The 1B draft costs its weights (2.5 GB at 2 TB/s) plus launch time, and compute per row.
    """
    return LatencyModel(
        draft=ForwardCost(fixed_s=0.0020, per_token_s=1.6e-5),
        verify=ForwardCost(fixed_s=0.0307, per_token_s=1.82e-4),
        source="70B on 4x A100, published table",
    )
