"""``python -m adaserve.scheduler.simulator``: the same command as ``adaserve simulate``."""

from adaserve.scheduler.simulator.cli import app

if __name__ == "__main__":
    app()
