"""What Triton compiles a kernel for, and whether it can: for scripts that run without its interpreter."""

from __future__ import annotations

import inspect
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)


def kind_of(kernel: Any, *arguments: Any) -> Any:
    """What a call with these is compiled for: another kind is compiled anew."""
    signature = inspect.signature(kernel.fn)
    return create_function_from_signature(signature, kernel.params, make_backend(HOPPER))(*arguments)[1]


def compiles(kernel: Any, kind: Any) -> bool:
    """Whether it does for compute capability 9.0."""
    of = dict(zip(kernel.arg_names, kind, strict=False))
    fixed = {name: value for name, (type_, value) in of.items() if type_ == "constexpr"}
    source = ASTSource(kernel, {name: type_ for name, (type_, _) in of.items()}, fixed)
    return bool(compile(source, HOPPER).asm["cubin"])
