"""A server with its default settings, as far as the simulator knows them."""

from __future__ import annotations

from adaserve.config import MAX_RUNNING, AdaServeConfig
from adaserve.scheduler.admission.situation import PrefillConfig
from adaserve.scheduler.costs.latency import LatencyModel
from adaserve.scheduler.policies import build_policy, chain_length, is_slo_aware
from adaserve.scheduler.simulator.replica import ReplicaConfig
from adaserve.scheduler.simulator.run import SimulationConfig


def server_defaults(policy: str, latency: LatencyModel, seed: int, kv_tokens: int) -> SimulationConfig:
    """One replica. Trees are as deep as by default, or as the policy's chains; none stops growing early, as
    on a CPU host. Raises ValueError if the policy is unknown."""
    build_policy(policy)
    server = AdaServeConfig()
    server = server.changed(max_depth=max(server.max_depth, chain_length(policy) or 0))
    prefill = server.for_prefills() if is_slo_aware(policy) else PrefillConfig()
    replica = ReplicaConfig(latency, kv_tokens, MAX_RUNNING, prefill_mode="exclusive", prefill=prefill)
    return SimulationConfig(replica, policy, server.for_policies(latency=latency), seed=seed)
