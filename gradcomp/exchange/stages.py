"""Stages: changes to the values of a bucket before encoding and after decoding.

An exchange runs a list of stages: transforms first, then division by second moments or a rotation.
A stage handles values, not messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcomp.comm.base import Work
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import Kernels
from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.planes import Planes
from gradcomp.memory.transform import Transforming
from gradcomp.payload.pieces import Slot
from gradcomp.payload.rng import STREAM_OWNED, STREAM_ROTATION


@dataclass(eq=False)
class Job:
    """The state of one bucket in one step.

    Attributes:
        bucket: ``(n,)`` of the exchange's dtype: gradients, replaced by averages.
        step: training step, modulo 2**32.
        number: number of the bucket, for errors.
        unencodable: a value of this rank, in what it has encoded so far, is not finite.
        values: ``(n,)`` values to encode: the bucket, or a float32 buffer of a stage.
        target: ``(n,)`` values that decoded values times `units` should equal, for the probe.
        units: ``(n,)`` float32 units of the encoded values; None: 1.
        residuals, owner_residuals: float32 planes to read and to write; None without residuals.
        scale_round: the collective that finds the largest scales.
        arrived_bad: a value of any rank, in the slices received so far, is not finite.
        owned_bad: an average that this rank owns, or its encoding, is not finite.
        averages_bad: any rank's value or average, in the slices decoded so far, is not finite.
        written: positions of the parameters with new values, by planes.
    """

    bucket: Tensor
    step: int
    number: int
    unencodable: bool = False
    values: Tensor = field(init=False)
    target: Tensor = field(init=False)
    units: Tensor | None = None
    residuals: tuple[Tensor, Tensor] | None = None
    owner_residuals: tuple[Tensor, Tensor] | None = None
    scale_round: Work | None = None
    arrived_bad: bool = False
    owned_bad: bool = False
    averages_bad: bool = False
    written: dict[Planes, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = self.target = self.bucket

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


class Units(Stage):
    """A stage that encodes (gradient + residual) / d, where d are the roots of second moments
    (`gradcomp.memory.moments`), multiplies averages by d, and updates the moments from them.

    Residuals stay in units of the gradient: the error of the codes is multiplied by d. So a change
    of loss scale, checkpoint or number of ranks affects residuals as without this stage, whatever d
    becomes.

    Args:
        plan: plan of the exchange.
        kernels: kernel set of the bucket's device.
        moments: second moments of the compressed tensors.
        dtype: dtype of the bucket.
        encodes: whether to encode in units; False for fp32 payloads.
        observes: whether to update second moments from these averages; needs whole tensors.
    """

    def __init__(
        self,
        plan: BucketPlan,
        kernels: Kernels,
        moments: SecondMoments,
        dtype: torch.dtype,
        *,
        encodes: bool,
        observes: bool,
    ) -> None:
        self._kernels, self._moments, self._slots = kernels, moments, plan.slots
        self._encodes, self._observes = encodes, observes
        self.takes_residuals, self.needs_averages = encodes, encodes or observes
        # shards need not be adjacent, and the memory between them is undefined
        self._runs = _runs(plan.slots)
        numel = self._runs[-1].stop if self._runs and encodes else 0
        self._units, self._values = kernels.empty(numel).fill_(1.0), kernels.empty(numel)
        if encodes and dtype != torch.float32:
            self.averages = kernels.empty(numel)
        self._first = [
            (s.offset, s.residual, s.offset, s.numel) for s in plan.slots if s.compressed
        ]
        self._owned = [
            [
                (p.data, p.residual, p.slot.offset + p.start - p.slot.start, p.numel)
                for p in (one.own_second.pieces if one.own_second is not None else [])
                if p.slot.compressed
            ]
            for one in plan.slices
        ]

    def before_encode(self, job: Job) -> bool:
        """Set `Job.values` to (gradient + residual) / d in float32; uncompressed parameters are
        copied.
        """
        if not self._encodes:
            return False
        values = job.bucket if job.bucket.dtype == torch.float32 else job.bucket.float()
        residual = job.residuals[0] if job.residuals is not None else None
        for slot in self._slots:
            if slot.compressed and slot.numel:
                self._moments.divide(slot, values, residual, self._units, self._values)
            else:
                span = slice(slot.offset, slot.offset + slot.numel)
                self._values[span] = values[span]
        job.values, job.units = self._values, self._units
        return False

    def after_encode(self, residual: Tensor) -> None:
        self._multiply(residual, self._first)

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Add residual / d to the means, which are in units of second moments."""
        if job.owner_residuals is not None and self._encodes:
            residual = job.owner_residuals[0]
            for at, residual_start, first, numel in self._owned[number]:
                shard[at : at + numel].add_(
                    residual[residual_start : residual_start + numel]
                    / self._units[first : first + numel]
                )
        return False

    def after_owner_encode(self, number: int, residual: Tensor) -> None:
        self._multiply(residual, self._owned[number])

    def after_decode(self, job: Job) -> bool:
        bad = self._write(job.bucket) if self._encodes else False
        if self._observes and not bad:
            bad = self._moments.observe(self._slots, job.bucket, job.step)
            job.written[self._moments.planes] = [s.index for s in self._slots if s.compressed]
        return bad

    def _multiply(self, residual: Tensor, pieces: Sequence[tuple[int, int, int, int]]) -> None:
        for _, residual_start, first, numel in pieces if self._encodes else ():
            units = self._units[first : first + numel]
            self._kernels.multiply(residual[residual_start : residual_start + numel], units)

    def _write(self, bucket: Tensor) -> bool:
        """Multiply averages by their units and write them to the bucket; return True if one is not
        finite.
        """
        values = bucket if self.averages is None else self.averages
        bad = False
        for run in self._runs:
            bad |= self._kernels.multiply(values[run], self._units[run])
            if values is not bucket:
                bucket[run].copy_(values[run])
                bad |= not self._kernels.are_finite(bucket[run].float())
        return bad


class Rotation(Stage):
    """A stage that applies a random rotation to a bucket before encoding, and inverts it on
    averages.

    1-bit codes of rotated values are unbiased with a suitable scale (tests/reference/rotation.py),
    and their error is noise of similar size across a scale group. So there are no residuals. All
    ranks use the same rotation in a step, so rotated values can be averaged. Owners rotate means a
    second time before they encode them in 1 bit.

    Args:
        plan: plan of the exchange.
        kernels: kernel set of the bucket's device.
        dtype: dtype of the bucket.
        seed: seed of the random signs.
    """

    takes_residuals = True  # codecs that rotate have no residuals
    needs_averages = True

    def __init__(self, plan: BucketPlan, kernels: Kernels, dtype: torch.dtype, seed: int) -> None:
        self._plan, self._kernels, self._seed, self._step = plan, kernels, seed, 0
        numel = max((s.offset + s.numel for s in plan.slots), default=0)
        self._slots = [s for s in plan.slots if s.numel]
        self._values = kernels.empty(numel)
        self.averages = None if dtype == torch.float32 else kernels.empty(numel)
        self._requantizes = plan.scatters and plan.strategy.second_phase == "requantize"
        owned = (
            [layout for one in plan.slices for layout in one.second] if self._requantizes else []
        )
        self._pieces = [
            p for layout in owned for p in layout.pieces if p.slot.compressed and p.numel
        ]

    def before_encode(self, job: Job) -> bool:
        """Set `Job.values` to a float32 copy of the bucket with compressed parameters rotated."""
        self._step = job.step
        for slot in self._slots:
            values = self._values[slot.offset : slot.offset + slot.numel]
            values.copy_(job.bucket[slot.offset : slot.offset + slot.numel])
            if slot.compressed:
                self._rotate(values, slot, slot.start, STREAM_ROTATION)
                self._kernels.unbias(values, slot.group_numel, slot.start)
        job.values = job.target = self._values
        return False

    def before_owner_encode(self, job: Job, number: int, shard: Tensor) -> bool:
        """Rotate owned means a second time if they are encoded in 1 bit. Means of a few ranks'
        codes take few distinct values, whose 1-bit codes would be biased.
        """
        owned = self._plan.slices[number].own_second
        for p in owned.pieces if self._requantizes and owned is not None else []:
            if p.slot.compressed:
                values = shard[p.data : p.data + p.numel]
                self._rotate(values, p.slot, p.start, STREAM_OWNED)
                self._kernels.unbias(values, p.slot.group_numel, p.start)
        return False

    def after_owned_average(self, shard: Tensor) -> None:
        for p in self._plan.own_second.pieces:
            if p.slot.compressed:
                values = shard[p.data : p.data + p.numel]
                self._rotate(values, p.slot, p.start, STREAM_ROTATION, back=True)

    def after_decode(self, job: Job) -> bool:
        bad, averages = False, job.bucket if self.averages is None else self.averages
        for p in self._pieces:
            values = averages[p.data : p.data + p.numel]
            self._rotate(values, p.slot, p.start, STREAM_OWNED, back=True)
        for slot in self._slots:
            place = slice(slot.offset, slot.offset + slot.numel)
            values = averages[place]
            if slot.compressed:
                self._rotate(values, slot, slot.start, STREAM_ROTATION, back=True)
                bad |= not self._kernels.are_finite(values)
            if self.averages is not None:
                job.bucket[place].copy_(values)
                bad |= not self._kernels.are_finite(job.bucket[place].float())
        return bad

    def _rotate(
        self, values: Tensor, slot: Slot, first: int, stream: int, *, back: bool = False
    ) -> None:
        key = self._seed, 0, self._step, stream
        self._kernels.rotate(values, slot.group_numel, first, slot.index, key, back=back)


def _runs(slots: Sequence[Slot]) -> list[slice]:
    """Return the ranges of the slots in the bucket, with adjacent ones merged."""
    runs: list[slice] = []
    for slot in slots:
        first, last = slot.offset, slot.offset + slot.numel
        if runs and runs[-1].stop == first:
            runs[-1] = slice(runs[-1].start, last)
        else:
            runs.append(slice(first, last))
    return runs
