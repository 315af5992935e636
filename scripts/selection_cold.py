"""What a policy costs per iteration in a loop, and behind a forward that has emptied the caches.

    python scripts/selection_cold.py

Median microseconds of each part; before each cold call 48 MB are written.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from adaserve.bench.selection import PARTS, measure_iteration

BATCHES = (1, 4, 8, 16, 32)
REPEATS, WARM_UP = 300, 60
CACHES = np.zeros(6 << 20)


def empty_caches() -> None:
    """Writes more than the caches of a core hold."""
    np.add(CACHES, 1.0, out=CACHES)


def main() -> None:
    """Prints the table."""
    table = Table(title="microseconds per iteration of `priced`")
    for column in ("requests", "caches", *PARTS, "all"):
        table.add_column(column, justify="right")
    for n in track(BATCHES, description="deciding"):
        for name, before in (("warm", lambda: None), ("cold", empty_caches)):
            took = np.median(measure_iteration("priced", n, REPEATS, before)[WARM_UP:], axis=0)
            table.add_row(str(n), name, *(f"{us:.0f}" for us in (*took, took.sum())))
    Console().print(table)


if __name__ == "__main__":
    main()
