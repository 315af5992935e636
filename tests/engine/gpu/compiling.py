"""What Triton compiles a kernel for, and whether it can: for scripts that run without its interpreter."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile, make_backend
from triton.runtime.jit import create_function_from_signature

HOPPER = GPUTarget("cuda", 90, 32)


def kind_of(kernel: Any, *arguments: Any) -> Any:
    """What a call with these is compiled for: another kind is compiled anew."""
    signature = inspect.signature(kernel.fn)
    return create_function_from_signature(signature, kernel.params, make_backend(HOPPER))(*arguments)[1]


def compiled(kernel: Any, kind: Any, **options: int) -> Any:
    """For compute capability 9.0; its ``asm`` is by name. ``options``: num_warps and num_stages."""
    of = dict(zip(kernel.arg_names, kind, strict=False))
    fixed = {name: value for name, (type_, value) in of.items() if type_ == "constexpr"}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, (type_, known) in enumerate(of.values())
        if type_ != "constexpr" and "D" in str(known)
    }
    source = ASTSource(kernel, {name: type_ for name, (type_, _) in of.items()}, fixed, aligned)
    return compile(source, HOPPER, options=options)


def compiles_once(kernel: Any, *cases: Sequence[Any]) -> bool:
    """Whether it compiles, and what comes of it serves all cases: the arguments of calls."""
    first, *others = (kind_of(kernel, *case) for case in cases)
    return others == [first] * len(others) and bool(compiled(kernel, first).asm["cubin"])


def spilled_bytes(kernel: Any, kind: Any, **options: int) -> int:
    """What the threads of a program write to memory for want of registers, and read again."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(compiled(kernel, kind, **options).asm["ptx"])
        file.flush()
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
