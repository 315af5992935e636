"""Offline fits of a latency profile: TurboSpec's line, a roofline, and a table; errors reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from adaserve.scheduler.interface import FloatArray
from adaserve.scheduler.latency import ForwardCost, LatencyModel, Profile, StepCost, TableCost

SHARPNESS_GRID = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)
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


def fit_linear(points: FloatArray) -> ForwardCost:
    """T = alpha N_context + gamma N_batched + delta (TurboSpec section 4), relative least squares, >= 0."""
    x, context, seconds = points.T
    design = np.stack([np.ones_like(x), x, context], axis=1) / seconds[:, None]
    (delta, gamma, alpha), _ = nnls(design, np.ones_like(seconds))
    return ForwardCost(fixed_s=float(delta), per_token_s=float(gamma), per_context_s=float(alpha))


def fit_roofline(points: FloatArray) -> ForwardCost:
    """fixed + soft-max of memory and compute: alternates a linear solve with the local gradients."""
    best = fit_linear(points)
    best_error = _errors(best, points).mean()
    for sharpness in SHARPNESS_GRID[1:]:
        cost = _fit_at_sharpness(points, sharpness)
        error = _errors(cost, points).mean()
        if error < best_error:
            best, best_error = cost, error
    return best


def _fit_at_sharpness(points: FloatArray, sharpness: float) -> ForwardCost:
    """Gauss-Newton on (fixed, weights, per_token, per_context); the roof is homogeneous of degree 1,
    so roof = sum of coefficient x gradient holds exactly and each step is a linear solve.

    No part can have cost more than the slowest forward took: a host that is very busy while it is measured
    gives points without an order, on which the steps would run away."""
    x, context, seconds = points.T
    most = float(seconds.max()) / np.array([1.0, 1.0, float(x.min()), max(1.0, float(context.max()))])
    knee = float(np.median(x))
    floor = float(seconds.min())
    coef = np.array([0.2 * floor, 0.8 * floor, 0.8 * floor / knee, 0.0])
    for _ in range(60):
        memory = np.maximum(coef[1] + coef[3] * context, 1e-12)
        compute = np.maximum(coef[2] * x, 1e-12)
        roof = (memory**sharpness + compute**sharpness) ** (1 / sharpness)
        d_memory, d_compute = (memory / roof) ** (sharpness - 1), (compute / roof) ** (sharpness - 1)
        design = np.stack([np.ones_like(x), d_memory, d_compute * x, d_memory * context], axis=1)
        solved, _ = nnls(design / seconds[:, None], np.ones_like(seconds))
        coef = 0.5 * coef + 0.5 * np.minimum(solved, most)
    return ForwardCost(float(coef[0]), float(coef[1]), float(coef[2]), float(coef[3]), sharpness)


def fit_table(points: FloatArray) -> TableCost:
    """Joins the medians at each token count, which may fall: 16 tokens can fill a tile that 12 only begin.
    The context slope comes from the linear fit."""
    slope = fit_linear(points).per_context_s
    x, context, seconds = points.T
    reference = float(np.median(context))
    level = seconds - slope * (context - reference)
    tokens = np.unique(x)
    medians = np.array([np.median(level[x == t]) for t in tokens])
    return TableCost(tuple(map(float, tokens)), tuple(map(float, medians)), slope, reference)


def _errors(cost: StepCost, points: FloatArray) -> FloatArray:
    predicted = np.array([float(cost.seconds(np.asarray(x), c)) for x, c, _ in points])
    relative: FloatArray = np.abs(predicted - points[:, 2]) / points[:, 2]
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
