"""What a beam search in the C kernels reads and writes (adaserve/engine/cpu/csrc/beam.h)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from adaserve.engine.device import Search

MAX_WIDTH = 16
"""Beams that the kernel's stack buffers hold."""


@dataclass(frozen=True, slots=True)
class BeamArrays:
    """Beams of ``a`` rows, ``width`` wide and ``depth`` deep, in step-major order; w = 1 + width * depth.

    The arrays must be contiguous and of just these types: C takes their addresses.
    """

    width: int
    depth: int
    base: np.ndarray  # int64 [a]: cached tokens, which is the root's position
    kv_indptr: np.ndarray  # int32 [a + 1]
    kv_indices: np.ndarray  # int32 [sum]: per row the prefix, then the window of w slots
    columns: np.ndarray  # int32 [width * depth]: window column of each node
    scale: np.ndarray  # float32 [a]: of the rows' transforms (noise.py)
    spread: np.ndarray  # float32 [a]
    keys: np.ndarray  # uint64 [a]
    tokens: np.ndarray  # out, int64 [a, width * depth]
    parents: np.ndarray  # out, int64, the parent's index in its row or -1 for the root
    logprobs: np.ndarray  # out, float64, of whole paths
    visible: np.ndarray  # out, bool [a, width * depth, w], False at first

    @staticmethod
    def of(search: Search, kv_indptr: np.ndarray, kv_slots: np.ndarray) -> BeamArrays:
        """What one search needs. ``kv_indptr`` [a + 1]; ``kv_slots``: int32, the field ``kv_indices``."""
        shape, a = search.shape, len(search.base)
        return BeamArrays(
            width=shape.beams[0],
            depth=len(shape.beams),
            base=search.base,
            kv_indptr=kv_indptr.astype(np.int32),
            kv_indices=kv_slots,
            columns=shape.columns.astype(np.int32),
            scale=search.scale,
            spread=search.spread,
            keys=search.keys,
            tokens=np.zeros((a, shape.nodes), np.int64),
            parents=np.full((a, shape.nodes), -1, np.int64),
            logprobs=np.zeros((a, shape.nodes)),
            visible=np.zeros((a, shape.nodes, shape.width), np.bool_),
        )
