"""What a rank keeps from step to step, by parameter: residuals, the owner's residuals, states of a
transform, second moments.

All of it commits, rolls back and is saved together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradcomp.kernels import CPU, home
from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.planes import Planes
from gradcomp.memory.saved import Parts
from gradcomp.memory.transform import Transforming

PARTS = ("residual", "owner_residual", "transform_state", "second_moment")


class StateStore:
    """The planes of one model.

    Args:
        residuals: what codes have left out of this rank's gradients, in units of the loss-scaled
            gradient.
        owner_residuals: the same of the means that this rank owns.
        transform: a transform and its states.
        moments: second moments of the averages, which are the same on every rank.

    Attributes:
        residuals, owner_residuals, transform, moments: as given; None: there are none.
        loss_scale: of the gradients that residuals belong to.
    """

    def __init__(
        self,
        residuals: Planes | None = None,
        owner_residuals: Planes | None = None,
        transform: Transforming | None = None,
        moments: SecondMoments | None = None,
    ) -> None:
        self.residuals, self.owner_residuals = residuals, owner_residuals
        self.transform, self.moments = transform, moments
        self.loss_scale = 1.0

    def begin_step(self) -> None:
        """Forget what `discard` could undo."""
        for planes in self._planes().values():
            planes.begin_step()

    def discard(self) -> None:
        """Undo every commit since `begin_step`."""
        for planes in self._planes().values():
            planes.discard()

    def free_unused(self) -> None:
        """Free the memory of residuals that are all 0."""
        if self.residuals is not None:
            self.residuals.free_unused()

    def rescale(self, factor: float) -> None:
        """Multiply every residual by `factor`: the loss scale has changed by it."""
        for planes in self._residuals():
            planes.rescale(factor)

    def change_loss_scale(self, loss_scale: float) -> None:
        """Bring residuals to the units of gradients that carry `loss_scale`."""
        self.rescale(loss_scale / self.loss_scale)
        self._set_loss_scale(loss_scale)

    def state(self, names: Mapping[int, str]) -> dict[str, dict[str, Tensor]]:
        """Return copies of everything, by part and name; empty parts before the first step."""
        planes = self._planes()
        return {part: planes[part].state(names) if part in planes else {} for part in PARTS}

    def check(self, state: Parts, names: Mapping[int, str]) -> None:
        """Raise ValueError for a checkpoint that does not fit this model, or that the transform
        cannot have made.
        """
        for part, planes in self._planes().items():
            planes.check(state.get(part, {}), names)
        if self.transform is not None:
            self.transform.check(state.get("transform_state", {}))

    def load(self, state: Parts, names: Mapping[int, str], loss_scale: float) -> None:
        """Take everything from a checkpoint that `check` accepts, of gradients that carried
        `loss_scale`.
        """
        for part, planes in self._planes().items():
            planes.load(state.get(part, {}), names)
        self._set_loss_scale(loss_scale)

    def _set_loss_scale(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        if self.transform is not None:
            self.transform.scale = loss_scale

    def _residuals(self) -> list[Planes]:
        return [one for one in (self.residuals, self.owner_residuals) if one is not None]

    def _planes(self) -> dict[str, Planes]:
        """Return the planes that there are, by their names in a checkpoint."""
        planes = (
            self.residuals,
            self.owner_residuals,
            self.transform.planes if self.transform is not None else None,
            self.moments.planes if self.moments is not None else None,
        )
        return {part: one for part, one in zip(PARTS, planes, strict=True) if one is not None}


class Feedback(StateStore):
    """Residuals of a set of tensors, for `all_reduce`.

    Args:
        numels: elements of each tensor, by its key.
        device: of the tensors.

    Attributes:
        device: of the residuals, where these tensors are encoded then.
    """

    residuals: Planes

    def __init__(self, numels: Mapping[int, int], device: torch.device = CPU) -> None:
        self.device = home(device)
        super().__init__(Planes(numels, device=self.device))

    def owned(self, share: Callable[[int], int]) -> Planes:
        """Return the residuals of the owner's means of these tensors, made at the first call.

        Args:
            share: elements that this rank owns of a tensor of so many.
        """
        if self.owner_residuals is None:
            numels = {key: share(numel) for key, numel in self.residuals.numels.items()}
            self.owner_residuals = Planes(numels, device=self.device)
        return self.owner_residuals

    def residual(self, key: int) -> Tensor:
        """Return a view of a tensor's current residual, ``(numel,)`` float32."""
        return self.residuals.current(key)
