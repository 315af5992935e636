"""What an AdaServe server can be told, once, before it starts.

SGLang's child processes inherit the environment and nothing else of ours, so the configuration
travels as one JSON value in ``ADASERVE_CONFIG``. Precedence: command line > environment > default.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENV = "ADASERVE_CONFIG"
POLICY_ENV = "ADASERVE_POLICY"
CPU_WEIGHTS = ("auto", "fp32", "fp16", "bf16", "off")
PREFILLS = ("slack", "exclusive")


class ConfigError(ValueError):
    """A setting is wrong; the message says which and what is accepted."""


@dataclass(frozen=True, slots=True)
class AdaServeConfig:
    """Field names are the command line's flags (``--adaserve-policy`` and so on)."""

    policy: str = "priced"  # a name that adaserve.scheduler.policies knows
    budget: int | None = None  # B, tokens per verification, roots included; None = from the profile
    max_depth: int = 5  # D_max
    max_width: int = 3  # W_max
    slo_config: str | None = None  # YAML file with the SLO classes; None = the paper's classes
    profile: str | None = None  # JSON of `adaserve profile`; None = the cached one of this host and pair
    record: str | None = None  # file that every iteration is recorded to (replay)
    cpu_weights: str = "auto"  # storage of the weights on a CPU: auto | fp32 | fp16 | bf16 | off
    baseline_ms: float | None = None  # unloaded ms per token that x_baseline classes multiply
    prefill: str | None = None  # slack: chunks as the running requests bear them | exclusive: SGLang's way
    # (all prefills first) | None: slack with policies that know SLOs, exclusive with the others
    prefill_interval: int = 4  # slack: most decode iterations between two chunks while a prompt waits
    prefill_patience_ms: float = 3000.0  # slack: TTFT to aim at for requests that state no TTFT SLO
    prefill_headroom: float = 1.1  # slack: prompts start while the tightest running SLO keeps this headroom,
    # or when their TTFT aim comes near; 0 = at once

    def __post_init__(self) -> None:
        from adaserve.scheduler.policies import policy_names

        if not _known_policy(self.policy, policy_names()):
            raise ConfigError(f"unknown policy {self.policy!r}: known are {', '.join(policy_names())}")
        for name, low, high in (("max_depth", 1, 32), ("max_width", 1, 16), ("prefill_interval", 1, 1000)):
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer from {low} to {high}, not {value!r}")
        if self.budget is not None and self.budget < 1:
            raise ConfigError(f"budget must be at least 1 token, not {self.budget}")
        if self.baseline_ms is not None and not 0 < self.baseline_ms < 1e6:
            raise ConfigError(
                f"baseline_ms must be a positive number of milliseconds, not {self.baseline_ms}"
            )
        if self.cpu_weights not in CPU_WEIGHTS:
            raise ConfigError(
                f"cpu_weights must be one of {', '.join(CPU_WEIGHTS)}, not {self.cpu_weights!r}"
            )
        if not 0 < self.prefill_patience_ms < 1e9:
            raise ConfigError(
                "prefill_patience_ms must be a positive number of milliseconds, "
                f"not {self.prefill_patience_ms}"
            )
        if not 0 <= self.prefill_headroom < 100:
            raise ConfigError(
                f"prefill_headroom must be a factor such as 1.1, or 0 for none, not {self.prefill_headroom}"
            )
        if self.prefill is not None and self.prefill not in PREFILLS:
            raise ConfigError(f"prefill must be one of {', '.join(PREFILLS)}, not {self.prefill!r}")
        for name in ("slo_config", "profile"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}: there is no file {path}")

    @property
    def max_candidates(self) -> int:
        """Nodes that one request's candidate tree can have, root not counted."""
        return self.max_depth * self.max_width

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def export(self) -> None:
        """Makes this the configuration of all SGLang processes started from here on."""
        os.environ[ENV] = self.to_json()

    @classmethod
    def load(cls) -> AdaServeConfig:
        """The configuration of this process. Raises ConfigError."""
        values: dict[str, Any] = {}
        if os.environ.get(POLICY_ENV):
            values["policy"] = os.environ[POLICY_ENV]
        if os.environ.get(ENV):
            try:
                values.update(json.loads(os.environ[ENV]))
            except json.JSONDecodeError as error:
                raise ConfigError(f"{ENV} is not valid JSON: {error}") from error
        unknown = set(values) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ConfigError(f"{ENV} has unknown settings: {', '.join(sorted(unknown))}")
        return cls(**values)


def _known_policy(name: str, names: tuple[str, ...]) -> bool:
    kind, _, number = name.rpartition("-")
    return name in names or (kind == "chain" and number.isdigit() and 1 <= int(number) <= 32)
