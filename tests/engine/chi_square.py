"""Chi-square tests of token counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from scipy import stats

SMALLEST_EXPECTED = 8.0


def chi_square_p(observed: np.ndarray, expected: np.ndarray) -> float:
    """p-value of counts against expected counts; rare outcomes are pooled, impossible ones fail at once."""
    if observed[expected <= 0].sum():
        return 0.0
    keep = expected >= SMALLEST_EXPECTED
    o = np.append(observed[keep], observed[~keep].sum())
    e = np.append(expected[keep], expected[~keep].sum())
    if e[-1] < SMALLEST_EXPECTED:
        o, e = np.append(o[:-2], o[-2:].sum()), np.append(e[:-2], e[-2:].sum())
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), max(1, len(o) - 1)))


def two_sample_p(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """p-value that both samples come from one distribution; outcomes seen rarely are pooled."""
    a, b = Counter(first), Counter(second)
    common = [k for k in a | b if a[k] + b[k] >= 2 * SMALLEST_EXPECTED]
    table = np.array(
        [[c[k] for k in common] + [sum(c.values()) - sum(c[k] for k in common)] for c in (a, b)], float
    )
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return 1.0
    return float(stats.chi2_contingency(table).pvalue)
