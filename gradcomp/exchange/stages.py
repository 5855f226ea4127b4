"""What the values of a bucket go through before they are encoded, and after they are decoded.

An exchange runs a list of stages: transforms first, then units of second moments or a rotation. A
stage sees values, never messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
        residuals, owner_residuals: planes to read and to write; None: codecs leave none.
        values: ``(n,)``, what is encoded: the bucket, or float32 memory of a stage.
        target: ``(n,)``, what decoded values times `units` should be, for `gradcomp.quality`.
        units: ``(n,)`` float32, in which values are encoded; None: 1.
        scale_round: the collective that finds the largest scales.
        unencodable: a value here is not finite, in what has been encoded so far.
        arrived_bad: on some rank, in the slices that have arrived.
        owned_bad: an average here, or the code of one.
        averages_bad: on any rank, for any reason, in the slices that have been decoded.
        written: planes that hold new values, and of which parameters.
    """

    bucket: Tensor
    step: int
    number: int
    residuals: tuple[Tensor, Tensor] | None
    values: Tensor
    target: Tensor
    owner_residuals: tuple[Tensor, Tensor] | None = None
    units: Tensor | None = None
    scale_round: Work | None = None
    unencodable: bool = False
    arrived_bad: bool = False
    owned_bad: bool = False
    averages_bad: bool = False
    written: dict[Planes, list[int]] = field(default_factory=dict)

    def commit(self) -> None:
        """Make the values that this step has written current."""
        for planes, indices in self.written.items():
            planes.commit(indices)


class Stage:
    """One stage of one bucket layout. Its methods do nothing; a stage overrides what it needs.

    A stage that writes planes enters them in `Job.written`.

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

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
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
        job.written[self._transform.planes] = [index for index, _, _ in self._spans]
        return self._transform.run(job.bucket, self._spans)


class OwnerTransform(Stage):
    """A transform of the means that a rank owns, which go through it in one piece.

    Args:
        transform: with its states.
        spans: (position of the parameter, first element in the shard, elements) of what is owned.
    """

    def __init__(self, transform: Transforming, spans: Iterable[tuple[int, int, int]]) -> None:
        self._transform, self._spans = transform, list(spans)

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        job.written[self._transform.planes] = [index for index, _, _ in self._spans]
        return self._transform.run(shard, self._spans)


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

    def before_encode(self, job: Job) -> bool:
        """Add residuals in place; what rounding to the bucket's dtype leaves out is the residual
        after this step.
        """
        if not self._residuals.begun:
            return False
        job.written[self._residuals] = [slot.index for slot in self._slots]
        bad = False
        for slot in self._slots:
            values = job.bucket[slot.offset : slot.offset + slot.numel]
            old, new = self._residuals.pair(slot.index)
            torch.add(values, old, out=new)
            values.copy_(new)
            new.sub_(values)
            bad |= not bool(torch.isfinite(values).all())
        return bad
