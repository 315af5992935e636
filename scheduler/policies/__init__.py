"""Policies by name. A policy is a value: the engine and the simulator build it here and call it."""

from __future__ import annotations

import re
from collections.abc import Callable

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.policies.fixed import FixedPolicy
from adaserve.scheduler.policies.paper import (
    AdaServePolicy,
    AdaServeV1Policy,
    EqualGreedyPolicy,
    GlobalGreedyPolicy,
)
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.policies.turbospec import TurboSpecPolicy

__all__ = ["SLO_AWARE", "PolicyConfig", "build_policy", "policy_names"]

SLO_AWARE = ("priced", "adaserve", "adaserve-v1")
"""Policies that look at requests' SLOs. The others are baselines, and nothing around them may look either."""

_BUILDERS: dict[str, Callable[[str, PolicyConfig], Policy]] = {
    "adaserve": AdaServePolicy,
    "adaserve-v1": AdaServeV1Policy,
    "priced": PricedPolicy,
    "global-greedy": GlobalGreedyPolicy,
    "equal-greedy": EqualGreedyPolicy,
    "fixed-tree": lambda name, config: FixedPolicy(name, config, config.fixed_branching),
    "turbospec": TurboSpecPolicy,
    "none": lambda name, config: FixedPolicy(name, config, ()),
}
_CHAIN = re.compile(r"chain-([1-9][0-9]?)")


def policy_names() -> tuple[str, ...]:
    """Accepted names; ``chain-K`` stands for chain-1 to chain-99."""
    return (*_BUILDERS, "chain-K")


def build_policy(name: str, config: PolicyConfig | None = None) -> Policy:
    """The policy called ``name``. Raises ValueError listing the accepted names."""
    config = PolicyConfig() if config is None else config
    if builder := _BUILDERS.get(name):
        return builder(name, config)
    if chain := _CHAIN.fullmatch(name):
        return FixedPolicy(name, config, (1,) * int(chain.group(1)))
    raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(policy_names())}")
