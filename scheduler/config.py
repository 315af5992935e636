"""One frozen configuration for every policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaserve.scheduler.costs.latency import LatencyModel, default_latency
from adaserve.scheduler.costs.learned import LearnedCosts
from adaserve.scheduler.interface import MIN_WINDOW

KNEE = 1.5
"""If no budget is given, B is how many tokens can be verified in this many times the time of a few."""

NARROW = 3
"""Beams that each request of any batch may have, whatever ``PolicyConfig.most_beams`` is."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Built once, passed whole. Letters follow the AdaServe paper; times are seconds."""

    latency: LatencyModel = field(default_factory=default_latency)
    costs: LearnedCosts | None = None  # of the server, learned by all its policies; None = the policy's own
    budget: int | None = None  # B: verify tokens per iteration, roots included; None = knee of the costs
    knee: float = KNEE  # B by the knee costs at most this many times what a few tokens do
    drafts: int = 1
    """Draft models, which all draft to the planned depth and width; 0: only offered candidates."""
    draft_windows: tuple[int, ...] = (0,)
    """Recent tokens that draft steps may read of a context, 0 = all. `priced` chooses among them, and the
    other policies use the first."""
    draft_sinks: int = 4  # first tokens that draft steps with a window read
    d_min: int = 1
    d_max: int = 8
    w_max: int = 3
    most_beams: int | None = None
    """Most beams of all requests together in a draft step, if any request has more than ``NARROW``; None = no
    limit. A GPU has CUDA graphs of such wide drafts only for few requests."""
    n_max_factor: float = 1.2  # n_max = int(factor * B / n), the authors' public code
    B1: int | None = None  # verifier tokens per step in the EuroSys depth rule; None = B
    B2: int | None = None  # draft tokens per step in the EuroSys width rule; None = 3 B / 4
    c1: float = 0.0
    c2: int = 0

    calibrate: bool = True  # correct path probabilities online (priced)
    learn_costs: bool = True  # learn from served iterations; False: take ``latency`` as it is
    early_stop: bool = False  # priced: ask the frontier after every draft step (drivers that can stop)

    least_gain: float = 0.0  # priced: drafting has to promise this much more than the roots alone
    surplus_rate: float = 0.08  # priced: step of the moving average of what levels and beams are worth
    probe_every: int = 16  # priced: iterations between drafts of one level and one beam more than pay
    horizon_tokens: int = 96  # priced: tokens looked ahead at most when weighing a request
    attain_weight: float = 3.0  # priced: weight = 1 + attain_weight * g

    turbo_k_max: int = 8
    turbo_probe_every: int = 32  # turbospec: iterations at k = 0 before one probe
    turbo_skip_prefill: bool = False  # turbospec: no draft prefill above the batch size where k* was 0
    turbo_reset_steps: int = 32  # turbospec: skipped draft prefills before the threshold is lifted
    fixed_branching: tuple[int, ...] = (1, 1, 3, 1, 1, 1, 1, 1)  # SpecInfer's static tree

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 1:
            raise ValueError(f"budget must be >= 1 token or None (from the profile), got {self.budget}")
        if not 1 <= self.d_min <= self.d_max:
            raise ValueError(f"need 1 <= d_min <= d_max, got {self.d_min} and {self.d_max}")
        if self.w_max < 1:
            raise ValueError(f"w_max must be >= 1, got {self.w_max}")
        for name in ("knee", "probe_every", "turbo_probe_every", "turbo_reset_steps"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("c1", "turbo_k_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.draft_windows or any(0 < w < MIN_WINDOW or w < 0 for w in self.draft_windows):
            raise ValueError(f"draft_windows must be 0 or at least {MIN_WINDOW}, got {self.draft_windows}")
        if len(self.draft_windows) > 1 and self.draft_windows[0] != 0:
            raise ValueError(f"the first of several draft_windows must be 0, got {self.draft_windows}")
        if not self.fixed_branching or min(self.fixed_branching) < 1:
            raise ValueError(f"fixed_branching needs children >= 1 at every step, got {self.fixed_branching}")

    def widest(self, n: int) -> int:
        """Beams of each of n requests in a draft step, at most."""
        if self.most_beams is None:
            return self.w_max
        return min(self.w_max, max(NARROW, self.most_beams // n))
