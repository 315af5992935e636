"""Operators of the simulated device: the CPU's, on the same memory.

Every operator that torch has for CUDA is replaced by one that calls the CPU's on aliases of its tensors. In
a capture it is also kept with the graph, whose launch calls it again. What a GPU would refuse is refused:
tensors of two devices, waiting in a capture. Triton's kernels run in its interpreter.
"""

import ast
import atexit
import ctypes
import inspect
import os
import re
import sys
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

runtime = ctypes.CDLL("libcudart.so.13")
runtime.sim_is_capturing.argtypes = [ctypes.c_void_p]
runtime.sim_keep.argtypes = [ctypes.c_void_p, ctypes.c_long]
runtime.sim_count.argtypes = [ctypes.c_char_p]
runtime.sim_wait.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
runtime.sim_touch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_char_p]
runtime.sim_promise.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long]
runtime.sim_is_pinned.argtypes = [ctypes.c_void_p]
runtime.sim_promise.restype = runtime.sim_oldest_promise.restype = ctypes.c_long

REPORT_ENV = "SIMULATED_GPU_REPORT"
"""Where every process writes what it counted: a path, to which its number is added."""

OWN = {"record_stream", "resize_", "is_set_to", "set_", "is_pinned", "_pin_memory", "copy_"}
"""Operators on a tensor's memory, not on what it holds; and copies, which have their own."""
OWN_PREFIXES = ("empty", "_nested", "_efficient", "_flash", "_scaled_dot", "cudnn", "_cudnn", "miopen")
INDEXING = {"index", "index_put_", "_index_put_impl_", "_unsafe_index", "index_put", "_unsafe_index_put"}
"""Operators that also take indices, and a number that is put there, from the host."""
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
         "equal", "is_nonzero", "repeat_interleave", "bincount"}  # fmt: skip
"""Operators that give the host a value, or have an output of a size that depends on one."""

_calls: list[Callable[[], None]] = []
_libraries: list[Any] = []
_held: list[tuple[int, Any]] = []


@ctypes.CFUNCTYPE(None, ctypes.c_long)
def _call(number: int) -> None:
    try:
        _calls[number]()
    except BaseException:
        traceback.print_exc()
        os._exit(70)


runtime.sim_set_python(_call)


def alias(t: Any) -> Any:
    """A CPU tensor over the memory of a CUDA tensor."""
    import torch

    if t.numel() == 0:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype)
    memory = t.untyped_storage()
    there = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("cpu"), memory.nbytes()
    )
    return torch.empty(0, dtype=t.dtype).set_(there, t.storage_offset(), t.size(), t.stride())


def _stream() -> int:
    import torch

    return torch._C._cuda_getCurrentRawStream(0)


def _caller() -> str:
    """Where in AdaServe or SGLang the host is."""
    frame = sys._getframe(1)
    while frame.f_back and not re.search(
        r"/(adaserve|sglang|patches|scheduler|probe)/", frame.f_code.co_filename
    ):
        frame = frame.f_back
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno}"


def _touch(t: Any, writes: bool, name: str) -> None:
    """Tells that the current stream reads or writes a CUDA tensor: all from its first to its last byte."""
    if t.numel():
        size = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        runtime.sim_touch(_stream(), t.data_ptr(), size * t.element_size(), writes, name.encode())


def _keep(call: Callable[[], None]) -> None:
    _calls.append(call)
    runtime.sim_keep(_stream(), len(_calls) - 1)


def _lowered(x: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """``x`` with aliases for CUDA tensors, which are added to ``pairs``."""
    import torch

    if isinstance(x, torch.Tensor):
        if x.device.type == "cuda":
            pairs.append((alias(x), x))
            return pairs[-1][0]
        return x
    if isinstance(x, (list, tuple)):
        return type(x)(_lowered(i, pairs) for i in x)
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return None if isinstance(x, torch.Generator) else x


def _raised(x: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """What an operator gave, on the device: an argument it wrote to, or a copy in new memory."""
    import torch

    if isinstance(x, torch.Tensor):
        for low, high in pairs:
            if x is low:
                return high
        there = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
        alias(there).copy_(x)
        return there
    return type(x)(_raised(i, pairs) for i in x) if isinstance(x, (list, tuple)) else x


def _tensors(x: Any) -> Iterator[Any]:
    import torch

    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for i in x:
            yield from _tensors(i)


def simulate(
    name: str,
    function: Any,
    args: Any,
    kwargs: Any,
    outs: tuple[str, ...] = (),
    written: Collection[int | str] | None = None,
) -> Any:
    """``function`` on aliases of its arguments. ``outs``: those that are written to and may have to grow.
    ``written``: places and names of all that are written to; None = any may be."""
    import torch

    pairs: list[tuple[Any, Any]] = []
    lowered = [_lowered(x, pairs) for x in args]
    named = {key: _lowered(x, pairs) for key, x in kwargs.items()}
    on_host = any(t.dim() and t.device.type == "cpu" for t in _tensors([*args, *kwargs.values()]))
    if pairs and on_host and name not in INDEXING:
        raise RuntimeError(f"expected all tensors on one device, but {name} got cuda:0 and cpu")
    grown = {key: torch.empty(0, dtype=kwargs[key].dtype) for key in outs if kwargs[key].numel() == 0}
    captured = bool(runtime.sim_is_capturing(_stream()))
    if name in WAITS or (name in INDEXING and _index_waits(args)):
        if captured:
            raise RuntimeError(f"{name} waits, and cannot be captured")
        runtime.sim_wait(_stream(), f"in {name}, {_caller()}".encode())
    elif not captured:
        runtime.sim_count(f"launch {name}".encode())
    output = function(*lowered, **{**named, **grown})
    for key, made in grown.items():
        kwargs[key].resize_(made.shape)
        named[key] = alias(kwargs[key]).copy_(made)
        pairs += [(made, kwargs[key]), (named[key], kwargs[key])]
    there = _raised(output, pairs)
    for place, argument in (*enumerate(args), *kwargs.items()):
        for t in _tensors(argument):
            if t.device.type == "cuda":
                _touch(t, written is None or place in written, name)
    for t in _tensors(there):
        if not any(t is high for _, high in pairs):
            _touch(t, True, name)
    if captured:
        lows = [low for low, _ in pairs]
        fresh = [alias(t) for t in _tensors(there) if not any(t is high for _, high in pairs)]

        def again() -> None:
            outputs = _tensors(function(*lowered, **named))
            new = [t for t in outputs if not any(t is low for low in lows)]
            for home, value in zip(fresh, new, strict=True):
                home.copy_(value)

        _keep(again)
    return there


def _index_waits(args: Any) -> bool:
    """Whether indexing sends something from the host first, or looks for the true entries of a mask. A number
    that a mask places is given to a kernel as it is."""
    by_mask = any(str(t.dtype) in ("torch.bool", "torch.uint8") for t in _tensors(args[1]))
    sent = [t for t in _tensors(args[1:]) if t.device.type == "cpu"]
    is_number = bool(sent) and not any(t.dim() for t in sent)
    return not is_number if by_mask else bool(sent)


def _copy(to: Any, source: Any, non_blocking: bool = False) -> Any:
    if to.device == source.device:
        return simulate("copy_", lambda a, b: a.copy_(b), (to, source), {}, written=(0,))
    is_upload = to.device.type == "cuda"
    host, way = (source, "to the device") if is_upload else (to, "to the host")
    low_to, low_source = (alias(to), source) if is_upload else (to, alias(source))
    is_pinned = host.numel() == 0 or bool(runtime.sim_is_pinned(host.data_ptr()))
    # What goes to the device from other memory is kept aside first, and needs no waiting either.
    is_queued = non_blocking and (is_pinned or is_upload)
    _touch(to if is_upload else source, is_upload, f"copy {way}")
    if runtime.sim_is_capturing(_stream()):
        if not (is_queued and is_pinned):
            raise RuntimeError(f"a copy {way} that waits cannot be captured")
        low_to.copy_(low_source)
        _keep(lambda: low_to.copy_(low_source))
    elif not is_queued:
        runtime.sim_wait(_stream(), f"for a copy {way}, {_caller()}".encode())
        low_to.copy_(low_source)
    else:
        runtime.sim_count(f"launch copy {way}".encode())
        low_to.copy_(low_source)
        if is_pinned and to.is_contiguous() and source.is_contiguous() and to.dtype == source.dtype:
            size = to.numel() * to.element_size()
            # torch keeps freed pinned memory until the copies from it are over.
            _held.append((runtime.sim_promise(low_to.data_ptr(), low_source.data_ptr(), size), host))
            while _held and _held[0][0] < runtime.sim_oldest_promise():
                _held.pop(0)
    return to


def _kernel(op: Any, outs: tuple[str, ...] = ()) -> Callable[..., Any]:
    import torch

    name = op._schema.name.removeprefix("aten::")
    arguments = op._schema.arguments
    places = [str(a.type) == "Tensor" for a in arguments]
    writes = [bool(a.alias_info and a.alias_info.is_write) for a in arguments]
    written = {*(i for i, w in enumerate(writes) if w),
               *(a.name for a, w in zip(arguments, writes, strict=True) if w)}  # fmt: skip

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # A number in a tensor's place comes unwrapped.
        args = tuple(torch.tensor(x) if place and isinstance(x, (bool, int, float)) else x
                     for x, place in zip(args, places, strict=False))  # fmt: skip
        return simulate(name, op, args, kwargs, outs, written)

    return kernel


def after_torch(torch: Any) -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    aten = torch.ops.aten
    with _Quiet():
        for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
            namespace, _, short = full.partition("::")
            name, _, overload = short.partition(".")
            op = getattr(getattr(aten, name, None), overload or "default", None)
            if namespace != "aten" or op is None or name in OWN or name.startswith(OWN_PREFIXES):
                continue
            arguments = op._schema.arguments
            if any(a.alias_info and not a.alias_info.is_write for a in arguments):
                continue  # a view
            outs = tuple(a.name for a in arguments if a.kwarg_only and a.alias_info)
            library.impl(short, _kernel(op, outs), "CUDA")
        library.impl("copy_", _copy, "CUDA")
        whole = aten.scaled_dot_product_attention.default
        library.impl("scaled_dot_product_attention", _kernel(whole), "CUDA")
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        kind.synchronize = _named_wait(kind.synchronize)
    if os.environ.get(REPORT_ENV):
        atexit.register(_report)
        threading.Thread(target=_report_often, daemon=True).start()


def _named_wait(wait: Callable[[Any], None]) -> Callable[[Any], None]:
    """The runtime counts the wait; this says whose it is."""

    def synchronize(self: Any) -> None:
        runtime.sim_count(f"synchronize, {_caller()}".encode())
        wait(self)

    return synchronize


class _Quiet:
    """Without torch's warning for each kernel that is replaced; they come from C++."""

    def __enter__(self) -> None:
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        self._kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)

    def __exit__(self, *_: object) -> None:
        os.dup2(self._kept, 2)
        os.close(self._kept)


def after_triton(interpreter: Any) -> None:
    from quick_interpreter import quicken

    quicken(interpreter)
    inner = interpreter.InterpretedFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def on_aliases(*args: Any, **kwargs: Any) -> None:
            inner(self, *args, grid=grid, warmup=False, **kwargs)

        if not warmup:
            names = list(inspect.signature(self.fn).parameters)
            written = {place for place, name in enumerate(names) if name in _stored(self.fn)}
            # Where none is found, addresses are loaded, and anything may be written to.
            simulate(f"triton {self.fn.__name__}", on_aliases, args, kwargs, written=written or None)

    interpreter.InterpretedFunction.run = run


@cache
def _stored(kernel: Any) -> frozenset[str]:
    """Parameters of a Triton kernel that it writes to: those in the address of a store, or in what that was
    worked out from. What helpers are given counts as written."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel)))
    from_names: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in set().union(*map(_names, targets)):
                from_names.setdefault(name, set()).update(_names(node.value))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", "")
            if name == "store" or name.startswith("atomic_"):
                found |= _names(node.args[0])
            elif isinstance(node.func, ast.Name):
                found |= set().union(*map(_names, node.args))
    while new := set().union(*(from_names.get(name, set()) for name in found)) - found:
        found |= new
    return frozenset(found)


def _names(expression: ast.expr) -> set[str]:
    """In an expression, apart from what is loaded."""
    if isinstance(expression, ast.Call) and getattr(expression.func, "attr", "") == "load":
        return set()
    if isinstance(expression, ast.Name):
        return {expression.id}
    return set().union(*map(_names, ast.iter_child_nodes(expression)))


def after_kv_writes(module: Any) -> None:
    """SGLang's own fallback writes KV with torch's operators; the kernel is compiled with nvcc."""
    module.can_use_store_cache = lambda *_, **__: False


def after_breakable(module: Any) -> None:
    """SGLang asks CUDA's own bindings, which are linked with another runtime."""
    module._is_stream_capturing = lambda stream: bool(runtime.sim_is_capturing(stream.cuda_stream))


def after_graphs(module: Any) -> None:
    """Nothing is compiled or chosen in a second run."""
    module.WARM_UPS = 1


def after_attention(module: Any) -> None:
    """The interpreter takes a second for each layer; tests of the kernel itself use it."""
    module.attend_fused = _attend


def _attend(q: Any, keys: Any, values: Any, slots: Any, tiles: Any, window: Any, scores: Any, *_: Any) -> Any:
    """``attend_fused`` of plain scores, by its definition."""
    import torch

    assert scores.are_plain

    def attend(
        out: Any, q: Any, keys: Any, values: Any, slots: Any, tiles: Any, ends: Any, seen: Any
    ) -> None:
        group, width = q.shape[1] // keys.shape[1], seen.shape[-1]
        for start, row, rows, first, length, _ in tiles.tolist():
            if row or not length:  # the first tile of a request stands for all
                continue
            tokens = slice(start, start + rows // group)
            chosen = slots[first : first + length].long()
            k, v = (x[chosen].float().repeat_interleave(group, 1) for x in (keys, values))
            products = torch.einsum("qhd,khd->hqk", q[tokens].float(), k) * scores.scaling
            hidden = ~seen.flatten(0, 1)[tokens] & (ends.flatten()[tokens] >= 0)[:, None]
            most = min(width, length)
            hides = torch.zeros(rows // group, length, dtype=torch.bool)
            hides[:, length - most :] = hidden[:, width - most :]
            weights = products.masked_fill(hides, float("-inf")).softmax(-1).nan_to_num(0.0)
            out[tokens] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    simulate("attention", attend, (out, q, keys, values, slots, tiles, *window), {}, written=(0,))
    return out


def _counts() -> bytes:
    text = ctypes.create_string_buffer(1 << 20)
    runtime.sim_report(text, len(text))
    return text.value


def counted(kind: str) -> int:
    """How often something whose name begins with ``kind`` has happened in this process."""
    lines = (line.split("\t") for line in _counts().decode().splitlines())
    return sum(int(count) for count, what in lines if what.startswith(kind))


def _report() -> None:
    path = Path(f"{os.environ[REPORT_ENV]}.{os.getpid()}")
    new = Path(f"{path}.new")
    new.write_bytes(_counts())
    new.replace(path)


def _report_often() -> None:
    while True:
        time.sleep(0.2)
        _report()
