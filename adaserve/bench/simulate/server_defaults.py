"""A server with its default settings, as far as the simulator knows them."""

from __future__ import annotations

from adaserve.config import MAX_RUNNING, AdaServeConfig
from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.policies import build_policy, chain_length, is_slo_aware
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig


def server_defaults(
    policy: str, latency: LatencyModel, seed: int, kv_tokens: int, mixed: bool = False
) -> SimulationConfig:
    """One replica. Trees are as deep as by default, or as the policy's chains; none stops growing early, as
    on a CPU host. ``mixed``: paced prompts share forwards with verification, as on a CPU host. Raises
    ValueError if the policy is unknown."""
    build_policy(policy)
    server = AdaServeConfig()
    server = server.changed(max_depth=max(server.max_depth, chain_length(policy) or 0))
    paced = is_slo_aware(policy)
    prefill = server.for_prefills() if paced else PrefillConfig()
    replica = ReplicaConfig(latency, kv_tokens, MAX_RUNNING, mixed and paced, prefill)
    return SimulationConfig(replica, policy, server.for_policies(latency=latency), seed=seed)
