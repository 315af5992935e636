"""Triton's interpreter without what it does over and over.

Before each kernel, and at each call of a function inside of one, it looks through all names of Triton's
language for those that it puts its own functions in the place of: a fourth of the time of attention's test.
"""

from __future__ import annotations

import inspect
from typing import Any


def quicken(interpreter: Any) -> None:
    """``interpreter``: the module ``triton.runtime.interpreter``."""
    is_builtin, names = interpreter.tl.core.is_builtin, dict[Any, list[str]]()

    def patch(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if is_builtin(member)]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch
