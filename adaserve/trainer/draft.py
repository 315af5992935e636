"""The trainer's copy of a draft: any causal language model of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from adaserve.trainer.records import Record

File = NDArray[np.uint8]
"""A safetensors file in memory."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
"""By their names in safetensors files: those of weights, and of what a head has beside them."""
UNKNOWN = -1e4
"""The logit of tokens that a draft does not know: finite, and never the best."""


def spread(known: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """[n, k] logits of the tokens ``ids`` [k] -> [n, vocabulary]; of all others ``UNKNOWN``."""
    return known.new_full((len(known), vocabulary), UNKNOWN).index_copy(1, ids, known)


class DraftCopy:
    """Master weights in fp32 on a device; what is handed out is on the host, rounded to the checkpoint's own
    dtypes."""

    def __init__(
        self,
        folder: str,
        device: str = "cpu",
        vocabulary: int | None = None,
        known: NDArray[np.int64] | None = None,
    ) -> None:
        """``folder``: as transformers takes it. ``known``: ids of the tokens that the draft is served with,
        if they are not all of the target's ``vocabulary``. Raises what transformers raises for it."""
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        self.model.eval()  # drafts are small: no dropout
        self.dtypes = {name: t.dtype for name, t in self._tensors().items()}
        self.model.to(device, torch.float32)
        self._known = None if known is None else torch.from_numpy(known).to(device)
        self._vocabulary = vocabulary

    def _tensors(self) -> dict[str, Tensor]:
        """By the checkpoint's names; what is tied stands there once."""
        tensors: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors[name] = tensor
        return tensors

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def manifest(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype as it is stored, shape)."""
        return {
            name: (str(self.dtypes[name]).removeprefix("torch."), tuple(t.shape))
            for name, t in self._tensors().items()
        }

    def state(self) -> dict[str, Tensor]:
        """Copies, rounded as they are stored: what is served is what was judged."""
        return {n: t.detach().to("cpu", self.dtypes[n], copy=True) for n, t in self._tensors().items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def logits(self, records: Sequence[Record]) -> list[Tensor]:
        """fp32 [n, vocab] for every record: the draft's logits at the record's positions, over the target's
        vocabulary."""
        longest = max(r.start + len(r) for r in records)
        tokens = torch.zeros(len(records), longest, dtype=torch.int64)
        for row, record in enumerate(records):
            end = record.start + len(record)
            tokens[row, :end] = torch.from_numpy(record.tokens[:end].astype("int64"))
        tokens.clamp_(max=self.model.get_input_embeddings().num_embeddings - 1)  # as served: its last one

        def of_records(_: nn.Module, hidden: tuple[Tensor]) -> Tensor:
            spans = [hidden[0][row, r.start : r.start + len(r)] for row, r in enumerate(records)]
            return torch.cat(spans)[None]

        # The model's own forward, since some scale or bound what their output matrix gives; but that takes
        # long, so only for the records' positions. Rows are padded behind their ends, which a causal model
        # does not see: no mask is needed.
        with self.model.get_output_embeddings().register_forward_pre_hook(of_records):
            logits: Tensor = self.model(input_ids=tokens.to(self.model.device), use_cache=False).logits[0]
        if self._known is not None:
            assert self._vocabulary is not None
            logits = spread(logits[:, self._known], self._known, self._vocabulary)
        return list(logits.split([len(r) for r in records]))

    def unrolled(self, records: Sequence[Record]) -> list[list[Tensor]]:
        """``logits`` of every step that is trained: of one, since a model reads tokens and no guesses."""
        return [self.logits(records)]


def shapes_of(folder: str) -> dict[str, tuple[int, ...]]:
    """What a ``DraftCopy`` would hand out, by name, without its weights. Raises what transformers raises."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """A safetensors file."""
    return save({name: tensor.contiguous() for name, tensor in state.items()}, {"format": "pt"})


def checked(file: bytes | File, manifest: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in the memory of an array. Raises ValueError, with the reason, for
    what cannot be served."""
    try:
        tensors = _read(np.frombuffer(file, np.uint8).copy() if isinstance(file, bytes) else file)
    except Exception as error:  # whatever a damaged file leads to
        raise ValueError(f"it cannot be read: {error}") from error
    if tensors.keys() != manifest.keys():
        raise ValueError(f"it has other tensors: {sorted(tensors.keys() ^ manifest.keys())[:3]}")
    for name, tensor in tensors.items():
        dtype, shape = manifest[name]
        if tensor.dtype != getattr(torch, dtype) or tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {tuple(shape)}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has values that are not finite")
    return tensors


def _read(file: File) -> dict[str, Tensor]:
    """``safetensors.torch.load`` copies everything, and no other thread runs meanwhile: this copies nothing.

    A file is the length of its header in 8 bytes, the header, and the values of all tensors.
    """
    start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    header = json.loads(file[8:start].tobytes())
    header.pop("__metadata__", None)
    values = torch.from_numpy(file)[start:]
    return {
        name: values[slice(*of["data_offsets"])].view(_DTYPES[of["dtype"]]).view(of["shape"])
        for name, of in header.items()
    }
