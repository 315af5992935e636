"""FlashInfer's kernels that the checked servers use, compiled side by side.

Left alone, each is compiled when a server first calls it, one after the other; those of SGLang's prefills on
a Hopper GPU take minutes. ``python -m adaserve.bench.gpu_check.flashinfer_kernels --out FOLDER`` needs nvcc
and no GPU; FlashInfer finds the results below its own folder ``data/aot``, and compiles nothing then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from adaserve.bench.gpu_check.toolkit import toolkit
from adaserve.host.cache import cache_folder

SERVED_DIMS, COMPARED_DIMS = (64,), (64, 128)
"""Head sizes of the embedded pair, small and large; and of Llama 3.1 8B, whose attention is compared."""


def specs(hopper: bool, every: bool = True) -> list[Any]:
    """FlashInfer's build specifications. ``hopper``: SGLang's own prefills use other kernels there.
    ``every``: also for bf16, and for heads that are only compared."""
    from flashinfer.jit.attention.modules import (
        _gen_batch_prefill_primary_module,
        gen_batch_decode_module,
        gen_batch_prefill_module,
    )
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.norm import gen_norm_module
    from flashinfer.jit.quantization import gen_quantization_module

    def attention(make: Any, dtype: torch.dtype, dim: int, *first: Any, last: int = 0) -> Any:
        # No rotary angles, no sliding window, no soft cap.
        return make(*first, dtype, dtype, dtype, torch.int32, dim, dim, 0, False, False, *[False] * last)

    # SGLang's own speculation packs its masks with the last one.
    found = [gen_norm_module(), gen_cascade_module(), gen_quantization_module()]
    for dtype in (torch.float16, torch.bfloat16) if every else (torch.float16,):
        for dim in COMPARED_DIMS if every else SERVED_DIMS:
            found.append(attention(_gen_batch_prefill_primary_module, dtype, dim, "fa2", last=1))
        for dim in SERVED_DIMS:
            found.append(attention(gen_batch_decode_module, dtype, dim))
            if hopper:
                found.append(attention(gen_batch_prefill_module, dtype, dim, "fa3", last=1))
    return found


def compile_all(wanted: Iterable[Any]) -> float:
    """Seconds that it took; what is there takes none. Raises RuntimeError with the compiler's words."""
    from flashinfer.jit.core import build_jit_specs

    start_s = time.perf_counter()
    build_jit_specs(list(wanted))
    return time.perf_counter() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for NAME/NAME.so")
    out = parser.parse_args().out
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    made = toolkit(cache_folder() / "cuda")  # a path that stays, or ninja would compile it all again
    if made.missing:
        parser.error(f"cannot compile: no {', '.join(made.missing)} on this host")
    os.environ["CUDA_HOME"] = str(made.home)
    wanted = specs(hopper=True, every=False)
    seconds = compile_all(wanted)
    for spec in wanted:
        (out / spec.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.get_library_path(), out / spec.name / f"{spec.name}.so")
    print(f"{len(wanted)} modules in {seconds:.0f} s")


if __name__ == "__main__":
    main()
