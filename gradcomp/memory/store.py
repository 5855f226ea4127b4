"""The state of one rank by parameter: residuals, owner's residuals, states of a transform, second
moments. All parts commit, roll back and are saved together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradcomp.kernels import CPU, encoding_device
from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.planes import Planes
from gradcomp.memory.saved import Parts
from gradcomp.memory.transform import Transforming
from gradcomp.payload.pieces import ByElements

PARTS = ("residual", "owner_residual", "transform_state", "second_moment")


class StateStore:
    """The planes of one model.

    Args:
        residuals: error of the codes of this rank's gradients, in units of the loss-scaled
            gradient; None without error feedback.
        owner_residuals: error of the codes of the means that this rank owns, or None.
        transform: a transform with its states, or None.
        moments: second moments of the averages, equal on every rank, or None.

    Attributes:
        residuals, owner_residuals, transform, moments: the arguments.
        loss_scale: loss scale of the residuals.
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
        """Make earlier commits final: `discard` no longer rolls them back."""
        for planes in self._planes().values():
            planes.begin_step()

    def discard(self) -> None:
        """Roll back every commit since `begin_step`."""
        for planes in self._planes().values():
            planes.discard()

    def free_unused(self) -> None:
        """Free the memory of this rank's residuals if all of them are 0."""
        if self.residuals is not None:
            self.residuals.free_unused()

    def rescale(self, factor: float) -> None:
        """Multiply every residual by `factor`, in place, after the loss scale has changed by it."""
        for planes in (self.residuals, self.owner_residuals):
            if planes is not None:
                planes.rescale(factor)

    def change_loss_scale(self, loss_scale: float) -> None:
        """Rescale residuals to gradients with a new loss scale."""
        self.rescale(loss_scale / self.loss_scale)
        self._set_loss_scale(loss_scale)

    def state(self, names: Mapping[int, str]) -> dict[str, dict[str, Tensor]]:
        """Return copies of all values by part and parameter name; parts are empty before the first
        step.
        """
        planes = self._planes()
        return {part: planes[part].state(names) if part in planes else {} for part in PARTS}

    def check(self, state: Parts, names: Mapping[int, str]) -> None:
        """Raise ValueError if a state does not fit this model, or is invalid for the transform."""
        for part, planes in self._planes().items():
            planes.check(state.get(part, {}), names)
        if self.transform is not None:
            self.transform.check(state.get("transform_state", {}))

    def load(self, state: Parts, names: Mapping[int, str], loss_scale: float) -> None:
        """Load a state that `check` accepts, whose residuals have this loss scale."""
        for part, planes in self._planes().items():
            planes.load(state.get(part, {}), names)
        self._set_loss_scale(loss_scale)

    def _set_loss_scale(self, loss_scale: float) -> None:
        self.loss_scale = loss_scale
        if self.transform is not None:
            self.transform.scale = loss_scale

    def _planes(self) -> dict[str, Planes]:
        """Return the planes in use, by their part in a state dict."""
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
        numels: number of elements of each tensor, by its key.
        device: device of the tensors.

    Attributes:
        device: device of the residuals, on which the tensors are encoded.
    """

    residuals: Planes

    def __init__(self, numels: Mapping[int, int], device: torch.device = CPU) -> None:
        self.device = encoding_device(device)
        super().__init__(Planes(numels, device=self.device))
        self._ranks = 0, 1  # rank and number of ranks that `owner_residuals` are for

    def owned(self, rank: int, world_size: int) -> Planes:
        """Return the residuals of the means that this rank owns, which the first call creates.

        Those of other ranks are added to `residuals` first, so a `Feedback` may be used with
        another number of ranks.
        """
        ranks = rank, world_size
        if self.owner_residuals is not None and self._ranks != ranks:
            fold_owned(self.residuals, self.owner_residuals, *self._ranks, world_size)
            self.owner_residuals = None
        if self.owner_residuals is None:
            share = ByElements(world_size)
            numels = {key: share.numel(n, rank) for key, n in self.residuals.numels.items()}
            self.owner_residuals, self._ranks = Planes(numels, device=self.device), ranks
        return self.owner_residuals

    def residual(self, key: int) -> Tensor:
        """Return a view of a tensor's current residual, ``(numel,)`` float32."""
        return self.residuals.current(key)


def fold_owned(
    residuals: Planes, owned: Planes, rank: int, world_size: int, new_world_size: int
) -> None:
    """Add residuals of the means that a rank owned to those of its gradients, times the new number
    of ranks, because a mean divides by it. So no sum is lost.

    Args:
        residuals, owned: residuals of the gradients and of the means, for the same tensors.
        rank, world_size: the rank and the number of ranks that `owned` is for.
        new_world_size: number of ranks from now on.
    """
    if not owned.begun:
        return
    shares = ByElements(world_size)
    for index, numel in owned.numels.items():
        first, _ = shares.bounds(residuals.numels[index], rank)
        part = residuals.current(index)[first : first + numel]
        part.add_(owned.current(index), alpha=new_world_size)
