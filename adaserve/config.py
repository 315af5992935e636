"""The settings of an AdaServe server, fixed before it starts.

SGLang's child processes inherit the environment and nothing else of ours, so the configuration
travels as one JSON value in ``ADASERVE_CONFIG``. Flags take precedence over it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from adaserve.checked import Checked, shown
from adaserve.checkpoints.hub import HUB_NAME
from adaserve.errors import UserError, why_unwritable
from adaserve.slo.classes import SLOConfig

if TYPE_CHECKING:
    from adaserve.scheduler.admission.situation import PrefillConfig
    from adaserve.scheduler.config import PolicyConfig

ENV = "ADASERVE_CONFIG"
CLASSES_ENV = "ADASERVE_CLASSES"
"""What the file of SLO classes held when the server started, as JSON. Its processes need it at other times:
an HTTP worker when it is started, perhaps a second time, and some at their first request."""
PREFILLS = ("mixed", "slack", "exclusive")
DRAFTS = ("model", "self", "suffix")
AUTO_WINDOWS = (0, 256, 64)
"""What the policy chooses among with ``draft_window`` auto."""
MAX_RUNNING = 64
"""Requests that a server runs at once, unless ``--max-running-requests`` says otherwise."""
CPU_WIDTH, GPU_WIDTH = 3, 8
"""W_max unless ``--max-width`` says otherwise. With an H200's costs and one request, eight beams give 6% more
tokens per second than three; on a CPU verified tokens are too expensive for that."""


class ConfigError(UserError, ValueError):
    """A setting is wrong; the message says which and what is accepted."""


class AdaServeConfig(Checked):
    """Each setting with its range and its help; ``max_depth`` is the flag ``--adaserve-max-depth``."""

    refusal = ConfigError
    policy: str = Field(
        default="priced", description="scheduling policy: adaserve, priced, turbospec, chain-K, none, ..."
    )
    budget: int | None = Field(
        default=None,
        ge=1,
        description="token budget B of one verification, roots included (default: from the measured profile)",
    )
    max_depth: int = Field(default=5, ge=1, le=32, description="largest draft depth D_max")
    max_width: int | None = Field(
        default=None, ge=1, le=16, description="largest beam width W_max (default: 3; on a GPU 8)"
    )
    drafts: str = Field(
        default="model",
        description="what proposes tokens: model (a draft model), self (the target, reading a draft_window), "
        "suffix (earlier text that repeats), or model,suffix or self,suffix: both in one tree",
    )
    draft_kind: Literal["auto", "model", "eagle3", "mtp", "medusa"] = Field(
        default="auto",
        description="what the draft is: model (a language model), eagle3 (an EAGLE-3 head on the target's "
        "hidden states), mtp (an MTP layer of the target's own checkpoint), medusa (Medusa heads on hidden "
        "states), or auto: by its config.json",
    )
    medusa: str | None = Field(
        default=None, description="folder of Medusa heads, which draft in place of a draft model"
    )
    second_draft: str | None = Field(
        default=None,
        description="another draft model with the target's vocabulary, whose candidates join the same tree",
    )
    draft_window: int | Literal["auto"] = Field(
        default=0,
        description="recent tokens of the context that a draft model reads, besides the first ones: 0 = all; "
        "auto: the policy `priced` chooses for each request",
    )
    draft_sinks: int = Field(
        default=4, ge=0, le=256, description="first tokens of the context that a draft with a window reads"
    )
    suffix_depth: int = Field(
        default=12, ge=1, le=64, description="tokens that suffix proposes in a row, at most"
    )
    suffix_memory_mb: int = Field(
        default=128, ge=1, le=1 << 20, description="memory for the texts that suffix searches, in MB"
    )
    suffix_scope: Literal["request", "key"] = Field(
        default="request",
        description="text that suffix searches: request (the request's own), or key (also what was served to "
        "others with the same API key)",
    )
    forced_depth: int = Field(
        default=8,
        ge=0,
        le=64,
        description="tokens that are proposed in a row because a grammar forces them, at most (0 = none)",
    )
    slo_config: str | None = Field(
        default=None, description="YAML file with the SLO classes (default: the paper's classes)"
    )
    profile: str | None = Field(
        default=None,
        description="JSON file written by `adaserve profile` (default: the cached one of this host and pair)",
    )
    record: str | None = Field(
        default=None,
        description="record every iteration (of the first data-parallel replica) to this file, for "
        "`adaserve simulate run --recorded`; to NAME-2 and so on if the file exists",
    )
    record_requests: str | None = Field(
        default=None,
        description="append the lengths and SLOs of finished requests to this trace file, for "
        "`adaserve simulate capacity`",
    )
    cpu_weights: Literal["auto", "fp32", "fp16", "bf16", "off"] = Field(
        default="auto", description="storage of weights on CPU hosts"
    )
    draft_weights: Literal["auto", "fp32", "fp16", "bf16", "int8"] = Field(
        default="auto",
        description="storage of a draft's weights on CPU hosts; auto: int8 where the processor multiplies "
        "8-bit numbers fast, else what cpu_weights says",
    )
    attention: Literal["auto", "flashinfer", "triton"] = Field(
        default="auto",
        description="attention kernel of tree forwards on a GPU: triton (AdaServe's own), flashinfer (or "
        "triton where that does not work), or auto (currently triton, the faster one)",
    )
    baseline_ms: float | None = Field(
        default=None,
        gt=0,
        lt=1e6,
        description="unloaded milliseconds per token, which classes given as x_baseline multiply "
        "(default: measured)",
    )
    learn: bool = Field(
        default=False,
        description="train the draft on what is served, in a process of its own, and swap in better versions",
    )
    learn_share: float = Field(
        default=0.25, gt=0, le=1, description="share of the requests to learn from, 0 to 1"
    )
    learn_loss: Literal["forward", "reverse", "jsd", "lk", "hard"] = Field(
        default="jsd", description="loss of the training (docs/learning.md)"
    )
    learn_device: str = Field(
        default="cpu",
        description="where the draft is trained: cpu (one thread, in spare time), or a GPU such as cuda:1",
    )
    learn_rate: float = Field(default=6e-4, gt=0, lt=1, description="learning rate of AdamW")
    learn_nice: int = Field(
        default=19,
        ge=0,
        le=19,
        description="priority of the trainer, as in `nice`; at 19 it gets spare processor time only",
    )
    learn_memory_mb: int = Field(
        default=192, ge=16, le=1 << 20, description="memory for requests to learn from, in MB"
    )
    learn_folder: str | None = Field(
        default=None, description="keep better drafts in this folder, and start with the last one"
    )
    prefill: Literal["mixed", "slack", "exclusive"] | None = Field(
        default=None,
        description="mixed (default of policies that look at SLOs on a CPU): prefill chunks share forwards "
        "with verification, where that is possible, and are as large as the running requests' SLOs allow; "
        "slack (their default on a GPU): such chunks have forwards of their own; exclusive (default of the "
        "other policies): all prefills first",
    )
    prefill_interval: int = Field(
        default=8,
        ge=1,
        le=1000,
        description="mixed, slack: decode iterations between two chunks of a waiting prompt, at most",
    )
    prefill_patience_ms: float = Field(
        default=3000.0,
        gt=0,
        lt=1e9,
        description="mixed, slack: prompts that state no TTFT SLO are queued as if they had stated this one",
    )
    prefill_headroom: float = Field(
        default=1.1,
        ge=0,
        lt=100,
        description="mixed, slack: a prompt waits while one more request would leave the tightest "
        "running TPOT SLO with less headroom than this factor; a prompt with a TTFT SLO waits only until "
        "that is nearly due (0 = never wait)",
    )
    prefill_lost_interval_ms: float = Field(
        default=4000.0,
        ge=0,
        lt=1e9,
        description="mixed, slack: a prompt that would make running requests miss their SLOs is given up "
        "when its TTFT SLO is nearly due. From then on it waits for room; once in this time one of those "
        "that were given up starts in any case (0 = none is given up)",
    )

    shed: bool = Field(
        default=False,
        description="answer 429 with Retry-After to waiting requests that will miss their TTFT SLO, or whose "
        "class is over its share",
    )
    orca: bool = Field(
        default=False,
        description="add ORCA's response header endpoint-load-metrics, by which Envoy can weigh servers",
    )

    @field_validator("policy")
    @classmethod
    def _known_policy(cls, name: str) -> str:
        from adaserve.scheduler.policies import chain_length, policy_names

        length = chain_length(name)
        known = name in policy_names() and not name.endswith("-K") if length is None else length <= 32
        if not known:
            chains = ", with K from 1 to 32" if length is not None else ""
            raise ConfigError(f"unknown policy {shown(name)}: known are {', '.join(policy_names())}{chains}")
        return name

    @field_validator("drafts")
    @classmethod
    def _known_drafts(cls, value: str) -> str:
        names = value.split(",")
        if len(set(names)) < len(names) or not set(names) <= set(DRAFTS):
            raise ConfigError(
                f"is {shown(value)}: it should be model, self, suffix, model,suffix or self,suffix"
            )
        if {"model", "self"} <= set(names):
            raise ConfigError(f"is {shown(value)}: choose either model or self")
        return value

    @field_validator("draft_window", mode="before")
    @classmethod
    def _auto_or_tokens(cls, value: Any) -> Any:
        from adaserve.scheduler.interface import MIN_WINDOW

        number = int(value) if isinstance(value, str) and value.isdigit() else value
        whole = isinstance(number, int) and not isinstance(number, bool)
        if number != "auto" and not (whole and (number == 0 or MIN_WINDOW <= number <= 1 << 20)):
            raise ConfigError(
                f"is {shown(value)}: it should be auto, 0 (the whole context), or {MIN_WINDOW} to "
                f"{1 << 20} recent tokens"
            )
        return number

    @field_validator("learn_device")
    @classmethod
    def _cpu_or_gpu(cls, device: str) -> str:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            raise ConfigError(f"is {shown(device)}: it should be cpu, or a GPU such as cuda:1")
        return device

    @field_validator("second_draft")
    @classmethod
    def _a_model(cls, path: str | None) -> str | None:
        if path is None or (path and Path(path).is_dir()) or HUB_NAME.fullmatch(path):
            return path
        raise ConfigError(f"there is no folder {path}")

    @field_validator("slo_config")
    @classmethod
    def _classes(cls, path: str | None) -> str | None:
        if path is not None and CLASSES_ENV not in os.environ:  # else it was read when the server started
            SLOConfig.load(cls._a_file(path))
        return path

    @field_validator("profile")
    @classmethod
    def _measured(cls, path: str | None) -> str | None:
        from adaserve.scheduler.costs.profile import load_profile

        if path is not None and CLASSES_ENV not in os.environ:
            load_profile(cls._a_file(path))
        return path

    @staticmethod
    def _a_file(path: str) -> Path:
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
        return Path(path)

    @field_validator("record", "record_requests")
    @classmethod
    def _a_new_file(cls, path: str | None) -> str | None:
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise ConfigError(f"is {shown(path)}: give a file in a folder that exists")
        return cls._writable(path)

    @field_validator("learn_folder")
    @classmethod
    def _a_folder(cls, path: str | None) -> str | None:
        if path is not None and Path(path).is_file():
            raise ConfigError(f"{path} is a file: give a folder")
        return cls._writable(path)

    @staticmethod
    def _writable(path: str | None) -> str | None:
        if path is not None and (why := why_unwritable(Path(path))) is not None:
            raise ConfigError(why)
        return path

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for is_refused, reason in self._contradictions():
            if is_refused:
                raise ConfigError(reason)
        return self

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Settings that cannot hold together, and what to do about it."""
        from adaserve.scheduler.policies import chain_length

        length, drafts = chain_length(self.policy), f"drafts are {self.drafts}"
        yield (
            bool(self.draft_models) and length is not None and length > self.max_depth,
            f"{self.policy} drafts {length} tokens deep, and trees have at most {self.max_depth} levels: "
            "give a larger max_depth (Medusa heads allow one level each), or a shorter chain",
        )
        yield (
            self.second_draft is not None and not self.has_model,
            f"{drafts}, so a second draft model would not be used: leave it out, or set drafts to model or "
            "model,suffix",
        )
        yield (
            self.draft_kind != "auto" and not self.has_model,
            f"{drafts}, so draft_kind {self.draft_kind} would have no effect: give a draft "
            "(--draft-model-path), or leave draft_kind out",
        )
        yield (
            self.draft_window != 0 and not self.draft_models,
            f"{drafts}, which read no draft_window: leave it out, or set drafts to model or self",
        )
        if self.medusa is not None:
            yield (
                not self.has_model,
                f"Medusa heads draft, but {drafts}: set drafts to model or model,suffix",
            )
            yield (
                self.second_draft is not None,
                "Medusa heads cannot be one of two drafts: leave --second-draft out",
            )
            yield self.learn, "Medusa heads do not learn: leave --learn out"
            yield self.draft_window != 0, "Medusa heads read no context: use --draft-window 0"
        yield (
            self.learn_folder is not None and not self.learn,
            "learn_folder keeps drafts that learn: give --learn as well, or no folder",
        )
        yield (
            self.learn and not self.has_model,
            f"{drafts}, so nothing can learn: give --drafts model",
        )
        yield (
            self.has_self and self.draft_window == 0,
            "drafts are self, and a target that reads its whole context drafts no faster than it decodes: "
            "set draft_window to auto or to a number of recent tokens",
        )

    @property
    def has_model(self) -> bool:
        """Whether a draft model is served, or heads."""
        return "model" in self.drafts.split(",")

    @property
    def has_self(self) -> bool:
        """Whether the target drafts for itself, from a small part of its KV cache (MagicDec, section 4)."""
        return "self" in self.drafts.split(",")

    @property
    def draft_windows(self) -> tuple[int, ...]:
        """How many recent tokens of a context drafting may read; 0 = all of it."""
        return AUTO_WINDOWS if self.draft_window == "auto" else (self.draft_window,)

    @property
    def leaves_window(self) -> bool:
        """Whether the policy should choose the window, and can't: it would have drafts read everything."""
        return self.draft_window == "auto" and self.policy not in ("priced", "none")

    @property
    def draft_models(self) -> int:
        """How many models draft; the target counts if it drafts for itself."""
        return self.has_self if not self.has_model else 1 if self.second_draft is None else 2

    def for_policies(self, **host: Any) -> PolicyConfig:
        """The settings of policies on this server. ``host``: those that depend on where it runs."""
        from adaserve.scheduler.config import PolicyConfig

        return PolicyConfig(
            budget=self.budget,
            drafts=self.draft_models,
            draft_windows=self.draft_windows,
            draft_sinks=self.draft_sinks,
            d_max=self.max_depth,
            w_max=self.widest,
            **host,
        )

    def for_prefills(self, **host: Any) -> PrefillConfig:
        """The settings of the rule that paces prefills, in forwards of their own and in shared ones."""
        from adaserve.scheduler.admission.situation import PrefillConfig

        return PrefillConfig(
            order="deadline",
            pacing="slack",
            most_decodes=self.prefill_interval,
            patience_s=self.prefill_patience_ms / 1e3,
            gate=self.prefill_headroom or None,
            lost_every_s=self.prefill_lost_interval_ms / 1e3 or None,
            **host,
        )

    @property
    def has_suffix(self) -> bool:
        """Whether earlier text is searched for drafts."""
        return "suffix" in self.drafts.split(",")

    @property
    def widest(self) -> int:
        """Beams of the widest draft."""
        return CPU_WIDTH if self.max_width is None else self.max_width

    @property
    def most_children(self) -> int:
        """Most children that a draft step looks for below one node."""
        return max(self.widest, *self.for_policies().fixed_branching)

    @property
    def beam_candidates(self) -> int:
        """Nodes that one model drafts for one request."""
        return self.max_depth * self.widest if self.draft_models else 0

    @property
    def suffix_candidates(self) -> int:
        """Nodes that suffix proposes for one request: one whole continuation and half of another."""
        return self.suffix_depth + self.suffix_depth // 2 if self.has_suffix else 0

    @property
    def max_candidates(self) -> int:
        """Nodes that one request's candidate tree can have, root not counted."""
        return self.candidates(self.widest)

    def candidates(self, width: int) -> int:
        """``max_candidates`` if drafts have at most ``width`` beams."""
        drafted = self.draft_models * self.max_depth * width
        return drafted + self.suffix_candidates + self.forced_depth

    @property
    def deepest(self) -> int:
        """Tokens that one iteration can accept per request."""
        return max(
            self.max_depth * bool(self.draft_models), self.suffix_depth * self.has_suffix, self.forced_depth
        )

    def to_json(self) -> str:
        return self.model_dump_json()

    def export(self) -> None:
        """Makes this the configuration of all SGLang processes started from here on."""
        os.environ[ENV] = self.to_json()

    @classmethod
    def load(cls) -> Self:
        """The configuration of this process. Raises ConfigError."""
        try:
            values = json.loads(os.environ.get(ENV) or "{}")
        except json.JSONDecodeError as error:
            raise ConfigError(f"{ENV} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f'{ENV} is {shown(values)}: it should be an object such as {{"policy": "priced"}}'
            )
        return cls(**values)


@lru_cache(maxsize=1)
def slo_classes() -> SLOConfig:
    """The SLO classes of this process's server. Raises SLOError."""
    if (settled := os.environ.get(CLASSES_ENV)) is not None:
        return SLOConfig(**json.loads(settled))
    path = AdaServeConfig.load().slo_config
    return SLOConfig() if path is None else SLOConfig.load(path)


def settle_classes() -> None:
    """Fixes the SLO classes of this process, and of all that it starts, to what the file holds now, even if
    the file changes later. Raises ConfigError."""
    os.environ.pop(CLASSES_ENV, None)
    slo_classes.cache_clear()
    os.environ[CLASSES_ENV] = slo_classes().model_dump_json()
