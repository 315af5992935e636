"""Muon for the matrices, AdamW for the rest: the quickest known way to a small model on little compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaserve.pair.model import Block

_NEWTON_SCHULZ = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
                  (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012))  # fmt: skip


def orthogonalized(gradient: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, by five Newton-Schulz steps on the smaller Gram matrix."""
    wide = gradient.shape[0] <= gradient.shape[1]
    x = gradient if wide else gradient.T
    x = x / (x.norm() * 1.01 + 1e-7)
    for a, b, c in _NEWTON_SCHULZ:
        gram = x @ x.T
        x = a * x + torch.addmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized update scaled by the matrix' shape, decoupled weight decay.

    `parts` gives the row counts of matrices that are fused in one parameter (queries, keys, values; gate,
    up): each is its own linear map and is orthogonalized alone.
    """

    def __init__(self, params: list[tuple[nn.Parameter, list[int]]], *, lr: float) -> None:
        self.parts = {id(p): parts for p, parts in params}
        super().__init__([p for p, _ in params], {"lr": lr, "momentum": 0.95, "weight_decay": 0.05})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                for weight, piece in zip(
                    p.split(self.parts[id(p)]), update.split(self.parts[id(p)]), strict=True
                ):
                    scale = max(1.0, piece.shape[0] / piece.shape[1]) ** 0.5
                    weight.add_(orthogonalized(piece), alpha=-group["lr"] * scale)


def make_optimizers(model: nn.Module, *, matrix_lr: float, vector_lr: float) -> list[torch.optim.Optimizer]:
    """For whatever of ``model`` is trained: Muon for matrices between hidden states, AdamW for norms and for
    what reads or writes tokens."""
    fused: dict[int, list[int]] = {}
    for block in (m for m in model.modules() if isinstance(m, Block)):
        for name, parts in block.parts.items():
            fused[id(block.get_submodule(name).weight)] = parts
    matrices: list[tuple[nn.Parameter, list[int]]] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if p.ndim == 2 and not name.startswith(("embed", "lm_head")):
            matrices.append((p, fused.get(id(p), [p.shape[0]])))
        else:
            others.append(p)
    return [
        Muon(matrices, lr=matrix_lr),
        torch.optim.AdamW(others, lr=vector_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
