"""Builds the policy that a server was started with."""

from __future__ import annotations

from typing import Any

from adaserve.config import AdaServeConfig
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.policies import PolicyConfig, build_policy


def load_policy(config: AdaServeConfig, server_args: Any) -> Policy:
    return build_policy(
        config.policy,
        PolicyConfig(budget=config.budget, d_max=config.max_depth, w_max=config.max_width),
    )
