"""The policies that a server can switch between while it runs."""

from __future__ import annotations

from adaserve.checked import shown
from adaserve.config import AUTO_WINDOWS, AdaServeConfig
from adaserve.engine.device import Device
from adaserve.scheduler.config import KNEE
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import Policy
from adaserve.scheduler.policies import build_policy

WINDOWS = ("auto", *map(str, AUTO_WINDOWS))
"""After an @, a policy's name says what its drafts read: ``priced@256``."""


class ServedPolicies:
    """Builds each policy once, for this host. ``current`` is the one that serves."""

    def __init__(
        self, config: AdaServeConfig, costs: LearnedCosts, device: Device, windows: bool = False
    ) -> None:
        """``windows``: whether the drafts that are served here can read little of a context."""
        self._config, self._costs, self._device = config, costs, device
        self._windows = tuple(w for w in WINDOWS if windows and not (config.has_self and w == "0"))
        self._built: dict[str, Policy] = {}
        self.current = self.get(config.policy)

    def choose(self, name: str) -> None:
        """Takes effect at the next iteration. A policy that is chosen again still knows what it learned.

        ``NAME@WINDOW`` is that policy with a draft window: auto, 0 (everything) or a number of tokens. Raises
        ValueError for an unknown name."""
        self.current = self.get(name)

    @property
    def speculates(self) -> bool:
        """Whether the current policy wants candidates at all."""
        return self.current.name != "none"

    def get(self, name: str) -> Policy:
        """Raises ValueError for an unknown name."""
        if name not in self._built:
            self._built[name] = self.build(name)
        return self._built[name]

    def build(self, name: str) -> Policy:
        """A fresh policy. Raises ValueError for an unknown name."""
        name, at, window = name.partition("@")
        if at and window not in self._windows:
            known = ", ".join(self._windows) or "none"
            raise ValueError(f"drafts cannot read a window of {shown(window)} here: known are {known}")
        config = self._config.changed(policy=name, **({"draft_window": window} if at else {}))
        if config.has_self and config.leaves_window:
            raise ValueError(f"{name} chooses no draft window: give one, as in {name}@{self._windows[1]}")
        # If the draft cannot be stopped early, the planned depth itself must pay.
        device = self._device
        settings = config.for_policies(
            costs=self._costs,
            early_stop=device.stops_early,
            least_gain=device.least_gain,
            most_beams=device.most_beams,
        )
        return build_policy(name, settings)

    @property
    def budget_tokens(self) -> int:
        """B of the policies that have a fixed one, roots included, from the costs known now."""
        return self._config.budget or self._costs.knee_tokens(KNEE)

    def forget(self, rid: str) -> None:
        """A request may have been served under several policies."""
        for policy in self._built.values():
            policy.forget(rid)
