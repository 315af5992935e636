"""Figure 5 and the code block of docs/policy.md are true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import paper_algorithms as reference
import pytest
from sched_factories import beam_trees, kept_sets, running

from adaserve.scheduler import figure5

PAGE = Path(__file__).parents[2] / "docs" / "policy.md"


def test_figure_5():
    chosen = figure5.select()
    assert chosen.verify_tokens == figure5.BUDGET == 2 + 3 + 3
    assert chosen.slo_counts.tolist() == [1, 2]
    assert kept_sets(figure5.trees(), chosen) == [{0, 1, 2, 3}, {0, 1}]
    literal = reference.algorithm_2(reference.rows_of(figure5.trees()), [1.6, 1.8], 8, 5)
    assert [set(k) for k in literal.kept] == kept_sets(figure5.trees(), chosen)


def test_greed_alone_would_fail_the_second_request():
    greedy = figure5.select(slo_phase=False)
    assert greedy.expected_tokens[1] == pytest.approx(1.5) and greedy.verify_tokens == 8


def test_code_on_the_page_runs():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    scope: dict = {}
    exec(code.group(1), scope)
    policy = scope["policy"]
    plan = policy.plan(running(3, decoded_tokens=np.array([5, 30, 5])), 1.0)
    selection = policy.select(plan, beam_trees(3, 1, 1))
    assert selection.keep.tolist() == [True, False, True]
