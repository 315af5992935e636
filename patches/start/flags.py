"""``--adaserve-*`` flags for ``sglang.launch_server``.

Why: SGLang builds its parser from a closed dataclass. The values reach child processes through the
environment (adaserve.config), which they inherit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

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
    parser.error = partial(_refuse, parser.error, parser)  # type: ignore[method-assign]
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


def _refuse(refuse: Callable[[str], NoReturn], parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Ends with ``message``, and with the flags that were probably meant."""
    flags = {flag: flag for flag in parser._option_string_actions}
    for name in AdaServeConfig.model_fields:  # as `adaserve serve` calls many of them
        short = "--" + name.replace("_", "-")
        flags.setdefault(short, short.replace("--", "--adaserve-", 1))
    wrong = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    near = [flags[found] for word in wrong for found in get_close_matches(word, flags, 1, 0.8)]
    if message.startswith("unrecognized arguments:") and near:
        message += f" (did you mean {', '.join(near)}?)"
    refuse(message)


def _without_none(annotation: Any) -> Any:
    kinds = get_args(annotation)
    return next(k for k in kinds if k is not NoneType) if NoneType in kinds else annotation


def _export_flags(cls: Any, args: argparse.Namespace) -> None:
    flags = {name: getattr(args, "adaserve_" + name, None) for name in AdaServeConfig.model_fields}
    given = {name: value for name, value in flags.items() if value is not None}
    if given:
        AdaServeConfig.load().changed(**given).export()
