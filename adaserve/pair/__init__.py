"""The embedded pair: a small target and draft that ship with the package, and the tools that made them."""

from adaserve.pair.widen import ensure_embedded_pair

__all__ = ["ensure_embedded_pair"]
