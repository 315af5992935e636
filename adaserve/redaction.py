"""Hides secrets in command lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Settings whose values are hidden."""

HIDDEN = "<redacted>"

OTHER = "--ssl-keyfile"
"""A flag of SGLang's that looks like one of these, cut short. The command line takes what is cut short,
too."""

_FLAGS = ["--" + name.replace("_", "-") for name in SECRETS]
_INSIDE = re.compile(rf"((?:{'|'.join(_FLAGS)})[= ])('[^']*'|\"[^\"]*\"|\S+)")
"""Such a flag with its value, in a word that holds several."""


def without_secrets(argv: Sequence[str], cut_short: bool = True) -> Iterator[str]:
    """The words of a command line, with secrets hidden; also in a word that holds flags for a server, such as
    ``"--api-key k --host h"``. ``cut_short``: whether the command takes flags that are."""
    is_value = False
    for argument in argv:
        name, joined, _ = argument.partition("=")
        is_flag = name in _FLAGS
        if cut_short and len(name) > 2 and name != OTHER:
            is_flag = any(flag.startswith(name) for flag in _FLAGS)
        if is_value:
            yield HIDDEN
        elif is_flag and joined:
            yield f"{name}={HIDDEN}"
        else:
            yield _INSIDE.sub(rf"\1{HIDDEN}", argument)
        is_value = is_flag and not joined and not is_value
