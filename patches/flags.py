"""``--adaserve-*`` flags for ``sglang.launch_server``.

Why: SGLang builds its parser from a closed dataclass. The values reach child processes through the
environment (adaserve.config), which they inherit.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.config import AdaServeConfig
from adaserve.patches import hook

_HELP = {
    "policy": "scheduling policy: adaserve, priced, turbospec, chain-K, none, ...",
    "budget": "token budget B of one verification, roots included (default: from the measured profile)",
    "max_depth": "largest draft depth D_max",
    "max_width": "largest beam width W_max",
    "slo_config": "YAML file with the SLO classes",
    "profile": "JSON file written by `adaserve profile`",
    "record": "record every iteration to this file, for replay",
    "cpu_weights": "storage of weights on CPU hosts: auto, fp32, fp16, bf16, off",
    "baseline_ms": "unloaded milliseconds per token, which classes given as x_baseline multiply",
    "prefill": "slack (default of policies that know SLOs): prefill chunks between decode iterations, as "
    "large as the running requests' SLOs allow; exclusive (default of the others): all prefills first",
    "prefill_interval": "most decode iterations between two prefill chunks while a prompt waits (default 4)",
    "prefill_patience_ms": "TTFT that slack prefills aim at for requests that state none (default 3000)",
    "prefill_headroom": "slack: while one request more would leave the tightest running TPOT SLO less than "
    "this factor of headroom, a prompt waits until its TTFT aim comes near (default 1.1; 0 = never wait)",
}
_INTEGERS = {"budget", "max_depth", "max_width", "prefill_interval"}
_NUMBERS = {"baseline_ms", "prefill_patience_ms", "prefill_headroom"}


def register() -> None:
    hook("sglang.srt.server_args.ServerArgs.add_cli_args", _add_flags, HookType.AFTER)
    hook("sglang.srt.server_args.ServerArgs.from_cli_args", _export_flags, HookType.BEFORE)


def _add_flags(_: Any, parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("AdaServe", "with --speculative-algorithm ADASERVE")
    for field in dataclasses.fields(AdaServeConfig):
        kind: Any = int if field.name in _INTEGERS else float if field.name in _NUMBERS else str
        flag = "--adaserve-" + field.name.replace("_", "-")
        group.add_argument(
            flag, dest="adaserve_" + field.name, type=kind, default=None, help=_HELP[field.name]
        )


def _export_flags(cls: Any, args: argparse.Namespace) -> None:
    given = {
        f.name: value
        for f in dataclasses.fields(AdaServeConfig)
        if (value := getattr(args, "adaserve_" + f.name, None)) is not None
    }
    if given:
        dataclasses.replace(AdaServeConfig.load(), **given).export()
