"""The embedded pair: a small target and draft that ship with the package, and the tools that made them."""
