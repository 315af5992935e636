"""How well the forms of latency model fit a profile."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from adaserve.bench.display import table
from adaserve.scheduler.config import KNEE
from adaserve.scheduler.costs.fit import fit_latency
from adaserve.scheduler.costs.profile import load_profile


def show_fit(path: Path) -> None:
    """Prints how well each form of latency model fits a profile. Raises ProfileError."""
    fit = fit_latency(load_profile(path))
    heads = ("phase", "form", "mean", "worst", "left out", "")
    made = table("relative error of the fitted latency models", heads, left=("phase", "form"))
    for phase, forms in fit.errors.items():
        for form, error in forms.items():
            mark = "chosen" if fit.chosen[phase] == form else ""
            cells = (f"{e:.1%}" for e in (error.mean, error.worst, error.held_out))
            made.add_row(phase, form, *cells, mark)
    console, model = Console(), fit.model
    console.print(made)
    console.print(
        f"unloaded: {model.baseline_s() * 1e3:.2f} ms per token; "
        f"budget B {model.knee_tokens(KNEE)} tokens (knee: {KNEE} times the time of a few)"
    )
