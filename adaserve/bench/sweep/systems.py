"""What is compared: a policy with its prefills, or SGLang without speculation. Each has a name of one word.

``turbospec`` is that policy with SGLang's own prefills, as its authors have it; ``turbospec+gate`` is the
same with our paced prefills and admission gate, so that only drafting and selection differ from ours.
A mode of prefills in its place (``+mixed``, ``+slack``, ``+exclusive``) compares these for one policy.
``chain``, without a length, is a family: its length is chosen on a seed that is not reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from adaserve.config import PREFILLS, AdaServeConfig, ConfigError
from adaserve.scheduler.policies import chain_length, is_slo_aware, policy_names

PLAIN = "none"
STOCK, STOCK_PRIORITY = "sglang", "sglang-priority"
"""SGLang without speculation: as it is, and with its scheduling by priority."""
GATE = "+gate"
_MODES = {GATE: "mixed", "": "exclusive", **{f"+{mode}": mode for mode in PREFILLS}}
"""How prompts are read, by how the name of a system ends."""
FAMILIES = ("chain", "adaptive-verify", "urgency")
"""Policies with a length to choose."""
PUBLISHED = ("adaserve", "adaserve-v1")

AS_IT_IS = (
    "chain", "adaptive-verify", "urgency", "turbospec", "global-greedy", "adaserve", "priced", STOCK,
    STOCK_PRIORITY,
)  # fmt: skip
GATED = tuple(f"{name}{GATE}" for name in ("chain", "adaptive-verify", "turbospec", "adaserve"))


@dataclass(frozen=True, slots=True)
class System:
    """How a server is set for a block."""

    name: str
    policy: str | None  # None = SGLang without speculation
    prefill: str | None  # of config.PREFILLS
    priority: bool = False  # requests carry SGLang's priorities

    @property
    def server(self) -> str:
        """The kind of server that can be set so, one of ``adaserve``, STOCK, STOCK_PRIORITY."""
        return "adaserve" if self.policy is not None else self.name


def system(name: str) -> System:
    """The system called ``name``, with its length. Raises ConfigError for an unknown policy.

    By itself only the default policy paces prefills: the gate is part of it and of no other."""
    if name in (STOCK, STOCK_PRIORITY):
        return System(name, None, None, name == STOCK_PRIORITY)
    policy = bare(name)
    AdaServeConfig(policy=policy, max_depth=length_of(name) or 1)  # servers are made as deep as that
    end = name.removeprefix(policy)
    if end not in _MODES:
        raise ConfigError(f"{name!r} ends in none of {', '.join(filter(None, _MODES))}")
    return System(name, policy, _MODES[GATE if name == default_policy() else end])


def bare(name: str) -> str:
    """``chain-4`` for ``chain-4+gate``."""
    return name.partition("+")[0]


def family(name: str) -> str | None:
    """The family whose length is to be chosen, for ``chain`` and ``chain+gate``; None for all others."""
    policy = bare(name)
    return policy if policy in FAMILIES else None


def length_of(name: str) -> int | None:
    """4 for ``chain-4`` and ``chain-4+gate``; None for systems without a length."""
    return chain_length(bare(name))


def with_length(name: str, length: int) -> str:
    """``chain+gate``, 4 -> ``chain-4+gate``."""
    policy = bare(name)
    return f"{policy}-{length}{name[len(policy) :]}"


def default_policy() -> str:
    """The policy that ``adaserve serve`` uses unless told otherwise."""
    return AdaServeConfig().policy


def slo_aware(name: str) -> bool:
    """Whether the system looks at SLOs, so that figures can tell it from the others."""
    return is_slo_aware(bare(name)) or family(name) == "urgency"


def is_baseline(policy: str) -> bool:
    """Whether it is a policy that ignores SLOs. The simulator's tables hold bounds, too, which are not
    policies."""
    known = policy in policy_names() or length_of(policy) is not None
    return known and not slo_aware(policy)


def is_rival(name: str, gated: bool) -> bool:
    """Whether the default policy is judged against it: as it is, or with the same gate and prefills.

    Compared in tables of their own are the published rules of AdaServe, and modes of prefills."""
    policy = bare(name)
    return name == policy + GATE * gated and policy not in (default_policy(), *PUBLISHED)
