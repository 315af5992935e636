"""``python -m adaserve.loadgen``: the load generator's commands without the rest of AdaServe."""

from __future__ import annotations

import typer

from adaserve.loadgen.cli import bench_app, report


def main() -> None:
    app = typer.Typer(no_args_is_help=True, help="Load tests and reports with per-request SLOs.")
    app.add_typer(bench_app, name="bench")
    app.command()(report)
    app()


if __name__ == "__main__":
    main()
