"""Who owns residuals: what codes have left out of the gradients so far, in units of the
(loss-scaled) gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.memory.planes import Planes


class Feedback(Planes):
    """Residuals of a set of tensors.

    Args:
        numels: elements of each tensor's residual, by the parameter's position.
    """

    def __init__(self, numels: Mapping[int, int]) -> None:
        super().__init__(numels)
        self._owned: Feedback | None = None

    def owned(self, share: Callable[[int], int]) -> Feedback:
        """Return the residuals of the owner's means that belong to these, made at the first call
        and kept.

        They follow this object's `begin_step`, `discard` and `rescale`.

        Args:
            share: elements that this rank owns of a tensor of so many.
        """
        if self._owned is None:
            self._owned = Feedback(
                {index: share(span.numel) for index, span in self._spans.items()}
            )
        return self._owned

    def begin_step(self) -> None:
        super().begin_step()
        if self._owned is not None:
            self._owned.begin_step()

    def discard(self) -> None:
        super().discard()
        if self._owned is not None:
            self._owned.discard()

    def rescale(self, factor: float) -> None:
        """Multiply every residual by `factor`: the loss scale changed."""
        for plane in self._planes or ():
            kernels.of(plane.device).rescale(plane, factor)
        if self._owned is not None:
            self._owned.rescale(factor)

    def share(self, factor: Callable[[int], float]) -> None:
        """Multiply every parameter's residuals, the owner's too, by its factor."""
        for planes in (self, self._owned):
            if planes is not None and planes.begun:
                for index in planes._spans:
                    planes.pair(index)[0].mul_(factor(index))

    def pay(self, index: int, values: Tensor) -> bool:
        """Add a parameter's residual to its values in place, for who sends nothing; return True if
        one is not finite.

        What is left out by rounding to the dtype of `values`, ``(numel,)``, is the residual after
        this step.
        """
        old, new = self.pair(index)
        torch.add(values, old, out=new)
        values.copy_(new)
        new.sub_(values)
        return not bool(torch.isfinite(values).all())

    def residual(self, index: int) -> Tensor:
        """Return a view of a parameter's current residual, ``(numel,)`` float32."""
        return self.pair(index)[0]
