"""Stages: changes to the values of a bucket before encoding and after decoding.

An exchange runs a list of stages: transforms first, then division by second moments or a rotation.
A stage handles values, not messages.
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
    """The state of one bucket in one step.

    Attributes:
        bucket: ``(n,)`` of the exchange's dtype: gradients, replaced by averages.
        step: training step, modulo 2**32.
        number: number of the bucket, for errors.
        residuals, owner_residuals: float32 planes to read and to write; None without residuals.
        values: ``(n,)`` values to encode: the bucket, or a float32 buffer of a stage.
        target: ``(n,)`` values that decoded values times `units` should equal, for the probe.
        units: ``(n,)`` float32 units of the encoded values; None: 1.
        scale_round: the collective that finds the largest scales.
        unencodable: a value of this rank, in what it has encoded so far, is not finite.
        arrived_bad: a value of any rank, in the slices received so far, is not finite.
        owned_bad: an average that this rank owns, or its encoding, is not finite.
        averages_bad: any rank's value or average, in the slices decoded so far, is not finite.
        written: positions of the parameters with new values, by planes.
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
        """Commit the values that this step has written to planes."""
        for planes, indices in self.written.items():
            planes.commit(indices)


class Stage:
    """A stage of one bucket layout. Its methods do nothing by default.

    A stage that writes to planes must enter them in `Job.written`.

    Attributes:
        takes_residuals: the stage adds residuals to the values, so the codec must not.
        needs_averages: the stage changes or observes averages, so they cannot stay packed.
        averages: ``(n,)`` float32 buffer for decoded averages; None: the bucket.
    """

    takes_residuals = False
    needs_averages = False
    averages: Tensor | None = None

    def before_encode(self, job: Job) -> bool:
        """Change the gradients in place, or set `Job.values`; return True if one is not finite."""
        return False

    def after_encode(self, residual: Tensor) -> None:
        """Convert new residuals of the bucket to units of the gradient, in place."""

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Change this rank's means of slice `number` in place; return True if one is not finite."""
        return False

    def after_owner_encode(self, number: int, residual: Tensor) -> None:
        """Convert new residuals of these means to units of the gradient, in place."""

    def after_owned_average(self, shard: Tensor) -> None:
        """Change, in place, means that stay with their owner."""

    def after_decode(self, job: Job) -> bool:
        """Change or observe averages and write them to the bucket; return True if one is not
        finite.
        """
        return False


class LocalTransform(Stage):
    """A stage that transforms this rank's gradients.

    Args:
        transform: the transform and its states.
        slots: slots of the bucket.
    """

    def __init__(self, transform: Transforming, slots: Iterable[Slot]) -> None:
        self._transform = transform
        self._spans = [(s.index, s.offset, s.numel) for s in slots]

    def before_encode(self, job: Job) -> bool:
        job.written[self._transform.planes] = [index for index, _, _ in self._spans]
        return self._transform.run(job.bucket, self._spans)


class OwnerTransform(Stage):
    """A stage that transforms all means that this rank owns, in one call.

    Args:
        transform: the transform and its states.
        spans: (position of the parameter, first element in the shard, elements) of owned pieces.
    """

    def __init__(self, transform: Transforming, spans: Iterable[tuple[int, int, int]]) -> None:
        self._transform, self._spans = transform, list(spans)

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        job.written[self._transform.planes] = [index for index, _, _ in self._spans]
        return self._transform.run(shard, self._spans)


class AddResiduals(Stage):
    """A stage of a single rank that adds residuals loaded from a run of several ranks.

    Args:
        residuals: residuals of the compressed parameters.
        slots: slots of the bucket.
    """

    def __init__(self, residuals: Planes, slots: Iterable[Slot]) -> None:
        self._residuals = residuals
        self._slots = [s for s in slots if s.compressed and residuals.knows(s.index)]

    def before_encode(self, job: Job) -> bool:
        """Add residuals in place. The rounding error in the bucket's dtype becomes the residual of
        the next step.
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
