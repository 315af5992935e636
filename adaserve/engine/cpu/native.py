"""The forward in the C kernels: one call per forward, plain pointers, no copies."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from adaserve.engine.cpu.beam_arrays import BeamArrays
from adaserve.engine.cpu.linear import STORAGE_DTYPES, Storage, exact_storage
from adaserve.engine.cpu.noise import NativeTransform
from adaserve.engine.cpu.params import Before, Capture, Inputs, LayerWeights, ModelConfig, ModelWeights
from adaserve.engine.cpu.torch_forward import all_tokens
from adaserve.engine.logits.logit_transform import LogitTransform
from adaserve.errors import UnsupportedError

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INT8 = 3
_NAMES = ("fp32", "fp16", "bf16", "int8")

# Results of a forward, as in csrc/check.h.
_NO_MEMORY = -1
_OUTSIDE = {
    -2: "a token id lies outside the vocabulary",
    -3: "a position lies beyond the table of rotary angles",
    -4: "a token's slot lies outside the KV pool",
    -5: "a cached key's slot lies outside the KV pool",
    -6: "the spans of queries or keys, or the mask, do not fit the batch",
    -7: "the beams' arrays do not fit together",
    -8: "hidden states are missing where a head needs them, are given to a model that is none, or are asked "
    "of a layer that the model does not have",
}

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int32


class _MatrixSource(ctypes.Structure):
    _fields_ = (
        ("weight", _Pointer),
        ("bias", _Pointer),
        ("columns", _Int),
        ("depth", _Int),
        ("type", _Int),
    )


class _LayerSource(ctypes.Structure):
    _fields_ = (
        *((name, _MatrixSource) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _Pointer) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "hidden_norm")),
    )


class _ModelSource(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "rotary_dim")),
        *((name, _Int) for name in ("vocab", "layers", "threads", "embed_type", "positions")),
        ("norm_eps", ctypes.c_float),
        ("qk_norm_eps", ctypes.c_float),
        *((name, _Pointer) for name in ("embed", "cos_sin", "final_norm", "token_ids")),
        ("layer", ctypes.POINTER(_LayerSource)),
        ("lm_head", _MatrixSource),
        ("project", _MatrixSource),
        ("token_norm", _Pointer),
        ("hidden_norm", _Pointer),
        ("norm_output", _Int),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in ("tokens", "requests", "masked", "kv_type")),
        *((name, _Pointer) for name in ("ids", "positions", "slots", "qo_indptr", "kv_indptr", "kv_indices")),
        ("mask", _Pointer),
        ("k_pools", _Pointer),
        ("v_pools", _Pointer),
        ("slot_stride", ctypes.c_int64),
        *((name, _Pointer) for name in ("hidden", "before", "before_rows")),
        *((name, ctypes.c_int64) for name in ("befores", "before_type")),
        *((name, _Pointer) for name in ("captured", "capture")),
        ("captures", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("keys", "mask_cells", "pool_slots")),
    )


class _Beam(ctypes.Structure):
    _fields_ = (
        *((name, _Int) for name in ("rows", "width", "depth", "window")),
        *((name, _Pointer) for name in ("base", "kv_indptr", "kv_indices", "columns")),
        *((name, _Pointer) for name in ("scale", "spread", "keys")),
        *((name, _Pointer) for name in ("tokens", "parents", "logprobs", "visible", "keep")),
        ("held", ctypes.c_int64),
    )


_Keep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


class NativeBackend:
    """Holds a packed copy of the matrices; norms, embedding and rotary table stay where they are."""

    def __init__(
        self, kernels: ctypes.CDLL, weights: ModelWeights, config: ModelConfig, storage: Storage
    ) -> None:
        self._kernels = _declare(kernels)
        self._config = config
        self._kept: list[torch.Tensor] = []  # what C reads for as long as the model lives
        self._batch = _Batch()
        self._batch_pointer = ctypes.addressof(self._batch)
        self._pools = (_Pointer * (2 * len(weights.layers)))()
        self._batch.k_pools = ctypes.addressof(self._pools)
        self._batch.v_pools = self._batch.k_pools + len(weights.layers) * ctypes.sizeof(_Pointer)
        self._head_rows = weights.lm_head.shape[0]
        self._token_ids = None if weights.token_ids is None else weights.token_ids.long().contiguous()
        handle = self._load(weights, storage)
        if not handle:
            raise MemoryError("no memory for the packed weights; serve a smaller model")
        self._model = _Pointer(handle)
        weakref.finalize(self, kernels.ada_model_free, self._model)

    def forward(
        self,
        inputs: Inputs,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        capture: Capture | None = None,
    ) -> torch.Tensor:
        hidden = torch.empty(inputs.tokens.numel(), self._config.hidden_size)
        if inputs.tokens.numel():
            self._describe(inputs, k_buffers, v_buffers)
            self._batch.hidden = hidden.data_ptr()
            if capture is not None:
                self._hand_out(capture)
            self._check(self._kernels.ada_forward(self._model, self._batch_pointer, torch.get_num_threads()))
        return hidden

    def beam_search(
        self,
        inputs: Inputs,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        beams: BeamArrays,
        keep: Callable[[int], bool] | None,
    ) -> int:
        """`forward` of tokens that end in the rows' roots, then up to `beams.depth` levels of candidates
        below them, all in one call. Fills in the arrays of `beams`; returns the levels that were made.
        `keep`: (levels so far) -> whether another one is worth its time."""
        self._describe(inputs, k_buffers, v_buffers)
        failures: list[BaseException] = []

        def asked(step: int) -> int:
            try:
                return int(keep is not None and keep(step))
            except BaseException as error:  # C cannot raise it
                failures.append(error)
                return 0

        callback = _Keep(asked) if keep is not None else None
        b = beams
        arrays = (b.base, b.kv_indptr, b.kv_indices, b.columns, b.scale, b.spread, b.keys)
        outputs = (b.tokens, b.parents, b.logprobs, b.visible)
        search = _Beam(
            len(b.base), b.width, b.depth, 1 + b.width * b.depth,
            *map(_address, (*arrays, *outputs)),
            None if callback is None else ctypes.cast(callback, _Pointer),
            len(b.kv_indices),
        )  # fmt: skip
        pointers = (self._batch_pointer, ctypes.addressof(search))
        steps: int = self._kernels.ada_beam_search(self._model, *pointers, torch.get_num_threads())
        if failures:
            raise failures[0]
        self._check(min(steps, 0))
        return steps

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty(hidden.shape[0], self._head_rows)
        self._read_rows(self._kernels.ada_logits, hidden, out.data_ptr())
        return all_tokens(out, self._token_ids, self._config.vocab_size)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        self._read_rows(self._kernels.ada_argmax, hidden, tokens.data_ptr())
        return tokens

    def topk_logprobs(
        self, hidden: torch.Tensor, transform: LogitTransform, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, native = hidden.shape[0], NativeTransform(transform)
        logprobs, tokens = torch.empty(rows, width), torch.empty(rows, width, dtype=torch.int64)
        found = logprobs.data_ptr(), tokens.data_ptr()
        self._read_rows(self._kernels.ada_top_logprobs, hidden, native, width, *found)
        return logprobs, tokens

    def _read_rows(self, kernel: Callable[..., int], hidden: torch.Tensor, *more: object) -> None:
        """Calls a kernel that reads hidden states, if there are any."""
        hidden = hidden.float().contiguous()
        if rows := hidden.shape[0]:
            self._check(kernel(self._model, hidden.data_ptr(), rows, *more, torch.get_num_threads()))

    def _check(self, code: int) -> None:
        if code == _NO_MEMORY:
            raise MemoryError("no memory for this forward; make the prefill chunks smaller")
        if code:
            raise IndexError(f"a forward was refused, nothing was computed: {_OUTSIDE[code]}")

    def _describe(
        self, inputs: Inputs, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor]
    ) -> None:
        """Fills in the batch; the caller keeps the tensors alive while C reads them."""
        b, plan, mask = self._batch, inputs.plan, inputs.plan.custom_mask
        each = (inputs.tokens, inputs.positions, inputs.slots)
        ids, positions, slots = (t.numel() for t in each)  # len(t) is a slow way to ask
        if not ids == positions == slots:
            raise ValueError("a forward needs one token id, one position and one slot for each token")
        b.tokens, b.requests, b.masked = ids, plan.num_requests, plan.masked
        b.ids, b.positions, b.slots = (t.data_ptr() for t in each)
        b.qo_indptr, b.kv_indptr = plan.qo_indptr.data_ptr(), plan.kv_indptr.data_ptr()
        b.kv_indices = plan.kv_indices.data_ptr()
        b.mask = None if mask is None else mask.data_ptr()
        b.keys, b.mask_cells = plan.kv_indices.numel(), 0 if mask is None else mask.numel()
        b.captures = 0
        self._take_in(inputs.before)
        self._set_pools(k_buffers, v_buffers)

    def _take_in(self, before: Before | None) -> None:
        b = self._batch
        if before is None:
            b.before = None
            return
        states, rows = before.states, before.rows
        if states.dtype not in _TYPES or states.shape[1:] != (self._config.hidden_size,):
            raise ValueError(f"a head does not take in states of {states.dtype}, {tuple(states.shape)}")
        if not states.is_contiguous() or (rows is not None and not _is_list(rows, b.tokens)):
            raise ValueError("a head takes in contiguous states, and one row of them for each token")
        b.before, b.befores, b.before_type = states.data_ptr(), states.shape[0], _TYPES[states.dtype]
        b.before_rows = None if rows is None else rows.data_ptr()

    def _hand_out(self, capture: Capture) -> None:
        b = self._batch
        b.captures, b.capture = capture.layers.numel(), capture.layers.data_ptr()
        b.captured = capture.states.data_ptr()

    def _set_pools(self, k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor]) -> None:
        first, head_dim = k_buffers[0], self._config.head_dim
        if first.dtype not in _TYPES or first.stride()[1:] != (head_dim, 1):
            raise UnsupportedError(
                f"a KV pool of {first.dtype} with strides {first.stride()} is not covered: serve with "
                "--kv-cache-dtype auto or bf16 and the NHD layout"
            )
        b, count = self._batch, len(k_buffers)
        # Addresses are read anew each time: SGLang may move its pools (memory saver, resizing).
        for i, (k, v) in enumerate(zip(k_buffers, v_buffers, strict=True)):
            self._pools[i], self._pools[count + i] = k.data_ptr(), v.data_ptr()
        b.kv_type, b.slot_stride, b.pool_slots = _TYPES[first.dtype], first.stride(0), first.shape[0]

    # ---- loading ----

    def _load(self, weights: ModelWeights, storage: Storage) -> int | None:
        c = self._config
        packing: list[torch.Tensor] = []  # read while the model is created, dropped afterwards
        layers = (_LayerSource * len(weights.layers))()
        for target, layer in zip(layers, weights.layers, strict=True):
            self._describe_layer(target, layer, storage, packing)
        embed = weights.embed.detach().contiguous()
        self._kept.append(embed)
        ids = self._token_ids
        source = _ModelSource(
            c.hidden_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim, c.rotary_dim,
            c.vocab_size, len(weights.layers), torch.get_num_threads(), _TYPES[embed.dtype],
            len(weights.cos_sin), c.norm_eps, c.qk_norm_eps, embed.data_ptr(), self._keep(weights.cos_sin),
            self._keep(weights.final_norm), None if ids is None else ids.data_ptr(), layers,
            _matrix(weights.lm_head, None, storage, packing),
        )  # fmt: skip
        source.norm_output = weights.norm_output
        if (stage := weights.stage) is not None:
            source.project = _matrix(stage.project, None, storage, packing)
            source.token_norm = self._keep(stage.token_norm)
            source.hidden_norm = self._keep(stage.hidden_norm)
        matrices = [m for layer in layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self.stored = "+".join(sorted({_NAMES[m.type] for m in (*matrices, source.lm_head)}))
        return self._kernels.ada_model_create(ctypes.addressof(source))

    def _describe_layer(
        self, target: _LayerSource, layer: LayerWeights, storage: Storage, packing: list[torch.Tensor]
    ) -> None:
        target.qkv = _matrix(layer.qkv, layer.qkv_bias, storage, packing)
        target.o = _matrix(layer.o, layer.o_bias, storage, packing)
        target.gate_up = _matrix(layer.gate_up, None, storage, packing)
        target.down = _matrix(layer.down, None, storage, packing)
        target.input_norm, target.post_norm = self._keep(layer.input_norm), self._keep(layer.post_norm)
        target.q_norm, target.k_norm = self._keep(layer.q_norm), self._keep(layer.k_norm)
        target.hidden_norm = self._keep(layer.hidden_norm)

    def _keep(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _matrix(
    weight: torch.Tensor, bias: torch.Tensor | None, storage: Storage, packing: list[torch.Tensor]
) -> _MatrixSource:
    int8 = storage == "int8"
    dtype = torch.float32 if int8 else STORAGE_DTYPES[exact_storage(weight) if storage == "auto" else storage]
    stored = weight.detach().to(dtype).contiguous()
    packing.append(stored)
    bias_pointer = None
    if bias is not None:
        wide = bias.detach().float().contiguous()
        packing.append(wide)
        bias_pointer = wide.data_ptr()
    return _MatrixSource(stored.data_ptr(), bias_pointer, *stored.shape, _INT8 if int8 else _TYPES[dtype])


def _is_list(tensor: torch.Tensor, length: int) -> bool:
    return tensor.dtype == torch.int64 and tensor.shape == (length,) and tensor.is_contiguous()


def _address(array: np.ndarray) -> int | None:
    """Of a writable array; a third of the time that ``array.ctypes.data`` takes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data)) if array.size else None


def _declare(kernels: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    kernels.ada_model_create.argtypes, kernels.ada_model_create.restype = [pointer], pointer
    kernels.ada_model_free.argtypes, kernels.ada_model_free.restype = [pointer], None
    kernels.ada_forward.argtypes = [pointer, pointer, number]
    kernels.ada_beam_search.argtypes = [pointer, pointer, pointer, number]
    kernels.ada_logits.argtypes = [pointer, pointer, number, pointer, number]
    kernels.ada_argmax.argtypes = [pointer, pointer, number, pointer, number]
    kernels.ada_top_logprobs.argtypes = [pointer, pointer, number, pointer, number, pointer, pointer, number]
    return kernels
