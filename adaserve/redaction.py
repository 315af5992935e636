"""Hides secrets in command lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Settings whose values are hidden."""

HIDDEN = "<redacted>"

OTHER = "--ssl-keyfile"
"""A flag of SGLang's that looks like one of these, cut short."""

_FLAGS = ["--" + name.replace("_", "-") for name in SECRETS]
_CUT_SHORT = {flag[:n] for flag in _FLAGS for n in range(3, len(flag) + 1)} - {OTHER}
"""SGLang's command line takes them, too."""
_INSIDE = re.compile(
    rf"(?<![\w-])(?!\A--api=)((?:{'|'.join(sorted(_CUT_SHORT))})[= ])('[^']*'|\"[^\"]*\"|\S+)"
)
"""Such a flag with its value, in a word that holds several for a server. ``--api=chat`` is one of ours."""


def without_secrets(argv: Sequence[str], cut_short: bool = True) -> Iterator[str]:
    """The words of a command line, with secrets hidden; also in a word that holds flags for a server, such as
    ``"--api-key k --host h"``. ``cut_short``: whether the command takes flags that are."""
    flags, is_value = _CUT_SHORT if cut_short else _FLAGS, False
    for argument in argv:
        name, joined, _ = argument.partition("=")
        is_flag = name in flags
        if is_value:
            yield HIDDEN
        elif is_flag and joined:
            yield f"{name}={HIDDEN}"
        else:
            yield _INSIDE.sub(rf"\1{HIDDEN}", argument)
        is_value = is_flag and not joined and not is_value
