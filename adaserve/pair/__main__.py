"""`python -m adaserve.pair` is `adaserve pair`."""

from adaserve.pair.cli import app

app()
