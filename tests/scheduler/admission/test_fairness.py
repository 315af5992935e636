"""How long one tenant's SLOs may hold up the prompts of others."""

import math

import numpy as np
import pytest

from adaserve.scheduler.admission.fairness import HoldBudget, binding_rows


def test_a_share_of_the_time_and_no_more():
    budget, held = HoldBudget(0.25, most_s=1.0), 0
    for k in range(4000):
        now_s = 0.01 * k
        if budget.has("a", now_s):
            held += 1
            budget.charge(["a"], 0.01, now_s + 0.01)
    assert 0.01 * held == pytest.approx(0.25 * 40 + 1.0, abs=0.05), "a quarter of 40 s, and what was saved up"


def test_tenants_do_not_pay_for_each_other_and_are_forgotten():
    budget = HoldBudget(0.5, most_s=1.0)
    budget.charge(["a"], 1.5, 10.0)
    assert not budget.has("a", 10.0) and budget.has("b", 10.0)
    assert not budget.has("a", 10.9) and budget.has("a", 11.1)
    budget.charge(["b"], 0.1, 20.0)
    assert set(budget._credit) == {"b"}, "a has everything back"


def test_a_server_that_stood_still_does_not_charge_its_tenants_for_it():
    budget = HoldBudget(0.5, most_s=1.0)
    budget.charge(["a"], 3600.0, 5000.0)
    assert not budget.has("a", 5001.9) and budget.has("a", 5002.1)


def test_no_limit():
    budget = HoldBudget(1.0, most_s=1.0)
    assert not budget.limits
    budget.charge(["a"], 100.0, 0.0)
    assert budget.has("a", 0.0)


def test_for_whom_prompts_wait():
    inf = math.inf
    assert binding_rows(np.array([0.3, 0.1, inf]), np.array([0.01, 0.02, inf])) == [0, 1]
    assert binding_rows(np.array([0.1, inf]), np.array([0.01, inf])) == [0]
    assert binding_rows(np.full(2, inf), np.full(2, inf)) == []
    assert binding_rows(np.zeros(0), np.zeros(0)) == []
