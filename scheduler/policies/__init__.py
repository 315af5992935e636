"""Policies by name. A policy is a value: the engine and the simulator build it here and call it."""

from __future__ import annotations

import re
from collections.abc import Callable

from adaserve.scheduler.config import PolicyConfig
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.policies.adaptive_verify import AdaptiveVerifyPolicy
from adaserve.scheduler.policies.fixed import FixedPolicy
from adaserve.scheduler.policies.paper import (
    AdaServePolicy,
    AdaServeV1Policy,
    EqualGreedyPolicy,
    GlobalGreedyPolicy,
)
from adaserve.scheduler.policies.priced import PricedPolicy
from adaserve.scheduler.policies.turbospec import TurboSpecPolicy
from adaserve.scheduler.policies.urgency import UrgencyPolicy

__all__ = ["PolicyConfig", "build_policy", "chain_length", "is_slo_aware", "policy_names"]

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
_BY_LENGTH: dict[str, Callable[[str, PolicyConfig, int], Policy]] = {
    "chain": lambda name, config, k: FixedPolicy(name, config, (1,) * k),
    "adaptive-verify": AdaptiveVerifyPolicy,
    "urgency": UrgencyPolicy,
}
_WITH_LENGTH = re.compile(rf"({'|'.join(_BY_LENGTH)})-([1-9][0-9]?)")


def policy_names() -> tuple[str, ...]:
    """Accepted names. K stands for 1 to 99, as in ``chain-4``; a server accepts up to 32."""
    return (*_BUILDERS, *(f"{name}-K" for name in _BY_LENGTH))


def chain_length(name: str) -> int | None:
    """K of a policy that is named by the length of its chains."""
    found = _WITH_LENGTH.fullmatch(name)
    return int(found.group(2)) if found else None


def is_slo_aware(name: str) -> bool:
    """Whether the policy looks at requests' SLOs. The others are baselines, and nothing around them may look
    either."""
    found = _WITH_LENGTH.fullmatch(name)
    builder = _BY_LENGTH[found.group(1)] if found else _BUILDERS.get(name)
    return bool(getattr(builder, "slo_aware", False))


def build_policy(name: str, config: PolicyConfig | None = None) -> Policy:
    """The policy called ``name``. Raises ValueError listing the accepted names."""
    config = PolicyConfig() if config is None else config
    if builder := _BUILDERS.get(name):
        return builder(name, config)
    if found := _WITH_LENGTH.fullmatch(name):
        return _BY_LENGTH[found.group(1)](name, config, int(found.group(2)))
    raise ValueError(f"unknown policy {name!r}; choose one of {', '.join(policy_names())}")
