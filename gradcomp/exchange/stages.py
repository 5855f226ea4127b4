"""What the values of a bucket go through before they are encoded, and after they are decoded.

An exchange runs a list of stages: transforms first, then units of second moments or a rotation. A
stage sees values, never messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.comm.base import Work
from gradcomp.memory.planes import Planes
from gradcomp.memory.transform import Transforming
from gradcomp.payload.pieces import Slot


@dataclass(eq=False)
class Job:
    """One bucket in one step.

    Attributes:
        bucket: ``(n,)`` of the exchange's dtype: gradients, which averages replace.
        step: of training, modulo 2**32.
        number: of the bucket, for errors.
        residuals: planes to read and to write; None: the codec leaves none.
        values: ``(n,)``, what is encoded: the bucket, or float32 memory of a stage.
        target: ``(n,)``, what decoded values times `units` should be, for `gradcomp.quality`.
        units: ``(n,)`` float32, in which values are encoded; None: 1.
        scale_round: the collective that finds the largest scales.
        unencodable: a value here is not finite, in what has been encoded so far.
        arrived_bad: on some rank, in the slices that have arrived.
        owned_bad: an average here, or the code of one.
        averages_bad: on any rank, for any reason, in the slices that have been decoded.
    """

    bucket: Tensor
    step: int
    number: int
    residuals: tuple[Tensor, Tensor] | None
    values: Tensor
    target: Tensor
    units: Tensor | None = None
    scale_round: Work | None = None
    unencodable: bool = False
    arrived_bad: bool = False
    owned_bad: bool = False
    averages_bad: bool = False


class Stage:
    """One stage of one bucket layout. Its methods do nothing; a stage overrides what it needs.

    Attributes:
        takes_residuals: the stage adds residuals to the values, so that encoding must not.
        needs_averages: averages are changed or observed, so that they cannot stay packed.
        averages: ``(n,)`` float32, where averages are decoded to; None: the bucket.
    """

    takes_residuals = False
    needs_averages = False
    averages: Tensor | None = None

    def before_encode(self, job: Job) -> bool:
        """Change the gradients in place, or set `Job.values`; return True if one is not finite."""
        return False

    def after_encode(self, residual: Tensor) -> None:
        """Bring what codes have left out of the bucket to units of the gradient, in place."""

    def before_owner_encode(self, number: int, shard: Tensor, residual: Tensor | None) -> bool:
        """Change the means that this rank owns of a slice, in place; return True if one is not
        finite.
        """
        return False

    def after_owner_encode(self, number: int, residual: Tensor) -> None:
        """Bring what codes have left out of these means to units of the gradient, in place."""

    def after_owned_average(self, shard: Tensor) -> None:
        """Change means that stay with this rank, in place."""

    def after_decode(self, job: Job) -> bool:
        """Change or observe the averages, and write them to the bucket; return True if one is not
        finite.
        """
        return False

    def commit(self) -> None:
        """Make the state that this step has written current."""


class LocalTransform(Stage):
    """A transform of this rank's gradients.

    Args:
        transform: with its states.
        slots: of the bucket.
    """

    def __init__(self, transform: Transforming, slots: Iterable[Slot]) -> None:
        self._transform = transform
        self._spans = [(s.index, s.offset, s.numel) for s in slots]

    def before_encode(self, job: Job) -> bool:
        return self._transform.run(job.bucket, self._spans)

    def commit(self) -> None:
        self._transform.planes.commit(index for index, _, _ in self._spans)


class OwnerTransform(Stage):
    """A transform of the means that a rank owns, which go through it in one piece.

    Args:
        transform: with its states.
        spans: (position of the parameter, first element in the shard, elements) of what is owned.
    """

    def __init__(self, transform: Transforming, spans: Iterable[tuple[int, int, int]]) -> None:
        self._transform, self._spans = transform, list(spans)

    def before_owner_encode(self, number: int, shard: Tensor, residual: Tensor | None) -> bool:
        return self._transform.run(shard, self._spans)

    def commit(self) -> None:
        self._transform.planes.commit(index for index, _, _ in self._spans)


class AddResiduals(Stage):
    """Adds residuals to the gradients of a rank that sends nothing: a run of several ranks has
    left them.

    Args:
        residuals: of the compressed parameters.
        slots: of the bucket.
    """

    def __init__(self, residuals: Planes, slots: Iterable[Slot]) -> None:
        self._residuals = residuals
        self._slots = [s for s in slots if s.compressed and residuals.knows(s.index)]
        self._added: list[int] = []  # positions of the parameters

    def before_encode(self, job: Job) -> bool:
        """Add residuals in place; what rounding to the bucket's dtype leaves out is the residual
        after this step.
        """
        self._added, bad = [], False
        for slot in self._slots if self._residuals.begun else ():
            values = job.bucket[slot.offset : slot.offset + slot.numel]
            old, new = self._residuals.pair(slot.index)
            torch.add(values, old, out=new)
            values.copy_(new)
            new.sub_(values)
            bad |= not bool(torch.isfinite(values).all())
            self._added.append(slot.index)
        return bad

    def commit(self) -> None:
        self._residuals.commit(self._added)
