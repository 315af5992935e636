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


FLAGS = ["--" + name.replace("_", "-") for name in SECRETS]
GIVEN = re.compile(rf"((?:{'|'.join(FLAGS)})[= ])('[^']*'|\"[^\"]*\"|\S+)")


def hidden_in(text: str) -> str:
    """A text that may hold flags for a server, such as ``--api-key k --host h``, with secrets hidden."""
    return GIVEN.sub(rf"\1{HIDDEN}", text)


def without_secrets(argv: Sequence[str]) -> Iterator[str]:
    """The words of a command line, with secrets hidden."""
    is_value = False
    for argument in argv:
        name, joined, _ = argument.partition("=")
        is_flag = len(name) > 2 and name != OTHER and any(flag.startswith(name) for flag in FLAGS)
        if is_value:
            yield HIDDEN
        elif is_flag and joined:
            yield f"{name}={HIDDEN}"
        else:
            yield hidden_in(argument)
        is_value = is_flag and not joined and not is_value
