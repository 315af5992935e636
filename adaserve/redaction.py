"""Hides secrets in command lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
"""Settings whose values are hidden."""

HIDDEN = "<redacted>"

OTHER = "--ssl-keyfile"
"""A flag of SGLang's that looks like one of these, cut short. The command line takes what is cut short,
too."""


def without_secrets(argv: Sequence[str]) -> Iterator[str]:
    """The words of a command line, with secrets hidden."""
    flags = ["--" + name.replace("_", "-") for name in SECRETS]
    is_value = False
    for argument in argv:
        name, joined, _ = argument.partition("=")
        is_flag = len(name) > 2 and name != OTHER and any(flag.startswith(name) for flag in flags)
        if is_value:
            yield HIDDEN
        elif is_flag and joined:
            yield f"{name}={HIDDEN}"
        else:
            yield argument
        is_value = is_flag and not joined and not is_value
