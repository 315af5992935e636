"""``--adaserve-*`` flags for ``sglang.launch_server``.

Why: SGLang builds its parser from a closed dataclass. The values reach child processes through the
environment (adaserve.config), which they inherit.
"""

from __future__ import annotations

import argparse
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from sglang.srt.plugins.hook_registry import HookType

from adaserve.config import AdaServeConfig
from adaserve.patches import hook


def register() -> None:
    hook("sglang.srt.server_args.ServerArgs.add_cli_args", add_flags, HookType.AFTER, always=True)
    hook("sglang.srt.server_args.ServerArgs.from_cli_args", _export_flags, HookType.BEFORE, always=True)


def add_flags(_: Any, parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting. Those that are not given are None."""
    # A wrong flag would be answered with a usage of hundreds of lines.
    parser.usage = "%(prog)s [options]; --help lists them"
    group = parser.add_argument_group("AdaServe", "with --speculative-algorithm ADASERVE")
    for name, field in AdaServeConfig.model_fields.items():
        kind = _without_none(field.annotation)
        usual, more = "", dict[str, Any](action="store_true", default=None)
        if kind is not bool:
            usual = "" if field.default is None else f" (default: {field.default})"
            choices = get_args(kind) if get_origin(kind) is Literal else None
            more = {"type": kind if kind in (int, float) else str, "choices": choices}
        group.add_argument(
            "--adaserve-" + name.replace("_", "-"),
            dest="adaserve_" + name,
            help=(field.description or "").replace("%", "%%") + usual,
            **more,
        )


def _without_none(annotation: Any) -> Any:
    kinds = get_args(annotation)
    return next(k for k in kinds if k is not NoneType) if NoneType in kinds else annotation


def _export_flags(cls: Any, args: argparse.Namespace) -> None:
    flags = {name: getattr(args, "adaserve_" + name, None) for name in AdaServeConfig.model_fields}
    given = {name: value for name, value in flags.items() if value is not None}
    if given:
        AdaServeConfig.load().changed(**given).export()
