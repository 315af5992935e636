"""Policies that a running server can be switched to, and what their drafts read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaserve.config import AdaServeConfig
from adaserve.engine.policies import ServedPolicies
from adaserve.scheduler.costs.latency import ForwardCost, LatencyModel
from adaserve.scheduler.costs.learned import LearnedCosts

COSTS = LearnedCosts(LatencyModel(ForwardCost(0.0005), ForwardCost(0.010, per_token_s=0.001), 0.001))


def served(windows: bool = True, **config: Any) -> ServedPolicies:
    device: Any = SimpleNamespace(stops_early=True, least_gain=0.05, most_beams=24)
    return ServedPolicies(AdaServeConfig(**config), COSTS, device, windows)


def test_a_name_says_what_drafts_read() -> None:
    policies = served()
    names = ["priced", "priced@auto", "priced@0", "priced@256", "priced@64"]
    read = [policies.get(name).config.draft_windows for name in names]  # type: ignore[attr-defined]
    assert read == [(0,), (0, 256, 64), (0,), (256,), (64,)]
    assert policies.get("priced@256").name == "priced"


def test_a_policy_has_the_settings_of_its_server() -> None:
    config = served(max_depth=4, max_width=2, budget=30).current.config  # type: ignore[attr-defined]
    assert (config.d_max, config.w_max, config.budget) == (4, 2, 30)
    assert (config.costs, config.early_stop, config.least_gain, config.most_beams) == (COSTS, True, 0.05, 24)


def test_windows_are_offered_where_drafts_can_read_them() -> None:
    own = served(drafts="self", draft_window=256)
    assert own.get("priced@auto").name == "priced"
    for policies, name, known in (
        (served(windows=False), "priced@256", "none"),
        (own, "priced@0", "auto, 256, 64"),
        (served(), "priced@", "auto, 0, 256, 64"),
    ):
        with pytest.raises(ValueError, match=f"cannot read a window of .*: known are {known}$"):
            policies.get(name)


def test_a_target_that_drafts_never_reads_everything_for_it() -> None:
    """Which policies that choose no window would have it do, where the server leaves that to the policy."""
    own = served(drafts="self", draft_window="auto")
    for name in ("none", "priced", "adaserve@64"):
        assert own.get(name).name == name.partition("@")[0]
    for name in ("adaserve", "adaserve@auto"):
        with pytest.raises(ValueError, match="chooses no draft window: give one, as in adaserve@256"):
            own.get(name)
    served(draft_window="auto").get("adaserve")


def test_a_policy_that_is_not_served_is_named_with_those_that_are() -> None:
    for name, why in (
        ("best", "unknown policy 'best': known are adaserve, .*chain-K"),
        ("chain-6", "chain-6 drafts 6 tokens deep, and trees have at most 5 levels"),
    ):
        with pytest.raises(ValueError, match=why):
            served().get(name)
