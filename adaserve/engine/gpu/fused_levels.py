"""The levels of a beam search on a GPU: each grows in one kernel, unless the shape branches."""

from __future__ import annotations

from torch import Tensor

from adaserve.engine.beam_levels import Levels


class FusedLevels(Levels):
    """A GPU's parts on a CPU grow them as CPU hosts do."""

    def grow(self, step: int, logprob: Tensor, token: Tensor) -> None:
        if not self.found.is_cuda or self.shape.is_branching:
            return super().grow(step, logprob, token)
        from adaserve.engine.gpu.grow_kernel import grow_fused

        before, now, children = self.level(step - 1), self.level(step), self.children(step)
        return grow_fused(self.found, self.visible, logprob, token, before, now, children)
