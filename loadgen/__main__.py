"""``python -m adaserve.loadgen``: the load generator's commands without the rest of AdaServe."""

from __future__ import annotations

import typer

from adaserve.commands import Commands
from adaserve.loadgen.cli import bench_app, report

app = typer.Typer(
    cls=Commands,
    help="Load tests and reports with per-request SLOs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.command()(report)


if __name__ == "__main__":
    app()
