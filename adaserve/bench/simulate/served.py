"""What a server does that was given no settings, as far as the simulator knows it."""

from __future__ import annotations

import numpy as np

from adaserve.config import MOST_RUNNING, AdaServeConfig
from adaserve.scheduler.latency import LatencyModel
from adaserve.scheduler.policies import build_policy, chain_length, is_slo_aware
from adaserve.scheduler.prefill import PrefillConfig
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig
from adaserve.scheduler.simulator.trees import ChildSource, SyntheticChildren


def served(
    policy: str,
    latency: LatencyModel,
    seed: int,
    kv_tokens: int,
    children: ChildSource | None = None,
    slowdown: float = 1.0,
) -> SimulationConfig:
    """One replica, whose forwards take ``slowdown`` times as long as ``latency`` says. Trees are as deep as
    by default, or as the policy's chains; none stops growing early, as on a CPU host. Raises ValueError
    where the policy is unknown."""
    build_policy(policy)
    server = AdaServeConfig()
    server = server.changed(max_depth=max(server.max_depth, chain_length(policy) or 0))
    prefill = server.for_prefills() if is_slo_aware(policy) else PrefillConfig()
    replica = ReplicaConfig(
        latency,
        kv_tokens,
        MOST_RUNNING,
        prefill_mode="exclusive",
        prefill=prefill,
        busy=((0.0, np.inf, slowdown),),
    )
    settings = server.for_policies(latency=latency)
    return SimulationConfig(replica, policy, settings, children=children or SyntheticChildren(), seed=seed)
