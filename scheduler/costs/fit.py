"""Offline fits of a latency profile: TurboSpec's line, a roofline, and a table; errors reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from adaserve.scheduler.costs.latency import (
    ForwardCost,
    KVReadCost,
    LatencyModel,
    StepCost,
    TabulatedCost,
    forward_s,
)
from adaserve.scheduler.costs.profile import Profile
from adaserve.scheduler.interface import Context, FloatArray

SHARPNESS_GRID = (1.5, 2.0, 3.0, 4.0, 8.0)  # and 1, the line
MIN_ALONE = 0.1
"""Share of a forward's time that is never attributed to its cached tokens."""

Fitter = Callable[[FloatArray], StepCost]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative error of predicted seconds; ``held_out`` leaves one point out at a time."""

    mean: float
    worst: float
    held_out: float


@dataclass(frozen=True, slots=True)
class LatencyFit:
    """The chosen model and the errors of every form that was tried: ``errors[phase][form]``."""

    model: LatencyModel
    chosen: dict[str, str]
    errors: dict[str, dict[str, FitError]]


def fit_kv_read(points: FloatArray) -> KVReadCost:
    """The time that cached tokens add: c1 sum L + c2 sum q L, from forwards that differ only in their
    contexts. Relative least squares, >= 0; 0 if no two such forwards were measured."""
    tokens, context, requests, seconds = points.T
    pairs = context / requests * tokens
    rows, more = [], []
    for shape in np.unique(points[:, [0, 2]], axis=0):
        same = np.flatnonzero((tokens == shape[0]) & (requests == shape[1]))
        shortest = same[context[same].argmin()]
        for i in same[context[same] > context[shortest]]:
            rows.append(np.array([context[i] - context[shortest], pairs[i] - pairs[shortest]]) / seconds[i])
            more.append((seconds[i] - seconds[shortest]) / seconds[i])
    if not rows:
        return KVReadCost()
    (per_context, per_pair), _ = nnls(np.array(rows), np.array(more))
    return KVReadCost(float(per_context), float(per_pair))


def _alone(points: FloatArray) -> tuple[FloatArray, FloatArray, KVReadCost]:
    """Tokens, seconds without what cached tokens add, and what that is.

    Most of a forward's time at least is left: what a busy host was measured at must not turn negative."""
    kv_read = fit_kv_read(points)
    tokens, context, requests, seconds = points.T
    read = kv_read.per_context_s * context + kv_read.per_pair_s * context / requests * tokens
    return tokens, np.maximum(seconds - read, MIN_ALONE * seconds), kv_read


def fit_linear(points: FloatArray) -> ForwardCost:
    """T = alpha N_context + gamma N_batched + delta (TurboSpec section 4) and a part for q x L, by relative
    least squares, >= 0."""
    x, seconds, kv_read = _alone(points)
    design = np.stack([np.ones_like(x), x], axis=1) / seconds[:, None]
    (delta, gamma), _ = nnls(design, np.ones_like(seconds))
    return ForwardCost(
        fixed_s=float(delta),
        per_token_s=float(gamma),
        per_context_s=kv_read.per_context_s,
        per_pair_s=kv_read.per_pair_s,
    )


def fit_roofline(points: FloatArray) -> ForwardCost:
    """fixed + soft-max of weights and compute: alternates a linear solve with the local gradients."""
    best = fit_linear(points)
    best_error = _errors(best, points).mean()
    for sharpness in SHARPNESS_GRID:
        cost = _fit_at_sharpness(points, sharpness)
        error = _errors(cost, points).mean()
        if error < best_error:
            best, best_error = cost, error
    return best


def _fit_at_sharpness(points: FloatArray, sharpness: float) -> ForwardCost:
    """Gauss-Newton on (fixed, weights, per_token); the roof is homogeneous of degree 1, so roof = sum of
    coefficient x gradient holds exactly and each step is a linear solve.

    No part can have cost more than the slowest forward took: a host that is very busy while it is measured
    gives points without an order, on which the steps would run away."""
    x, seconds, kv_read = _alone(points)
    most = float(seconds.max()) / np.array([1.0, 1.0, float(x.min())])
    knee = float(np.median(x))
    floor = float(seconds.min())
    coef = np.array([0.2 * floor, 0.8 * floor, 0.8 * floor / knee])
    for _ in range(60):
        weights, compute = max(coef[1], 1e-12), np.maximum(coef[2] * x, 1e-12)
        roof = (weights**sharpness + compute**sharpness) ** (1 / sharpness)
        d_weights, d_compute = (weights / roof) ** (sharpness - 1), (compute / roof) ** (sharpness - 1)
        design = np.stack([np.ones_like(x), d_weights, d_compute * x], axis=1)
        solved, _ = nnls(design / seconds[:, None], np.ones_like(seconds))
        coef = 0.5 * coef + 0.5 * np.minimum(solved, most)
    fixed, weights, per_token = map(float, coef)
    return ForwardCost(fixed, weights, per_token, *kv_read, sharpness)


def fit_table(points: FloatArray) -> TabulatedCost:
    """Joins the medians at each token count, which may fall: 16 tokens can fill a tile that 12 only begin."""
    x, seconds, kv_read = _alone(points)
    tokens = np.unique(x)
    medians = [float(np.median(seconds[x == t])) for t in tokens]
    return TabulatedCost(tuple(map(float, tokens)), tuple(medians), *kv_read)


def _errors(cost: StepCost, points: FloatArray) -> FloatArray:
    taken = points[:, 3]
    contexts = [Context(float(c), int(n)) for c, n in points[:, 1:3]]
    predicted = np.array([forward_s(cost, x, c)[0] for x, c in zip(points[:, :1], contexts, strict=True)])
    relative: FloatArray = np.abs(predicted - taken) / taken
    return relative


def fit_error(fitter: Fitter, points: FloatArray) -> FitError:
    """In-sample and leave-one-out relative errors of one form."""
    inside = _errors(fitter(points), points)
    held: list[float] = []
    if len(points) >= 4:
        for i in range(len(points)):
            rest = np.delete(points, i, axis=0)
            held.append(float(_errors(fitter(rest), points[i : i + 1])[0]))
    return FitError(
        float(inside.mean()), float(inside.max()), float(np.mean(held)) if held else float(inside.mean())
    )


FITTERS: dict[str, Fitter] = {"linear": fit_linear, "roofline": fit_roofline, "table": fit_table}


def fit_latency(profile: Profile) -> LatencyFit:
    """Fits every form to both phases and keeps the one with the smallest held-out error."""
    errors: dict[str, dict[str, FitError]] = {}
    chosen: dict[str, str] = {}
    costs: dict[str, StepCost] = {}
    for phase, points in (("draft", profile.draft), ("verify", profile.verify)):
        errors[phase] = {form: fit_error(fitter, points) for form, fitter in FITTERS.items()}
        # A simpler form wins ties: dicts keep insertion order and min takes the first.
        chosen[phase] = min(errors[phase], key=lambda form: round(errors[phase][form].held_out, 3))
        costs[phase] = FITTERS[chosen[phase]](points)
    source = str(profile.meta.get("device", "profile"))
    return LatencyFit(
        LatencyModel(costs["draft"], costs["verify"], profile.overhead_s, source), chosen, errors
    )
