"""The exchange of one bucket: an all_gather, or a reduce_scatter followed by an all_gather.

`BucketExchange` runs each slice of a `BucketPlan` in four steps: measure, encode, own, finish. A
step waits for at most one collective and starts at most one, on a channel of its own. The pipeline
has one thread per step and overlaps slices and buckets. A step may use results of the same step for
earlier slices, since the same thread has computed them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.codecs import Identity
from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import peers_answer
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.buffers import Buffers, SliceBuffers
from gradcomp.exchange.phase import Phase
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.second import Owned
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import Job, LocalTransform, OwnerTransform, Rotation, Stage, Units
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, NO_RESIDUALS, Kernels, Residuals, host
from gradcomp.kernels.tables import DTYPES
from gradcomp.memory.store import StateStore
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND, RngKey

Steps = tuple[Callable[[], None], ...]  # of one slice


class Exchange(ABC):
    """The exchange of one bucket layout. In each training step call `begin`, then all steps of
    every slice in order, then `commit` unless `flagged`.

    After that the averages are in the bucket, or in `averages` until the next `begin` or `unpack`.

    Attributes:
        is_idle: whether buckets stay unchanged.
    """

    is_idle = False

    @property
    @abstractmethod
    def flagged(self) -> bool:
        """Whether a rank's bucket or the average is not finite; final after the last step of the
        last slice.
        """

    @property
    def averages(self) -> Averages | None:
        """The averages if they are kept packed, otherwise None. They refer to buffers of the
        exchange, which are valid until the next `begin`.
        """
        return None

    @property
    @abstractmethod
    def slices(self) -> tuple[Steps, ...]:
        """The steps of every slice; all slices have the same number. A step must run after the
        previous step of its slice, and after the same step of the previous slice. It waits for at
        most one collective and starts at most one, on a channel of its own.

        Each step may raise PeerLost, PeerMismatch or CorruptPayload.
        """

    @abstractmethod
    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Set the bucket to average in this step.

        Args:
            buffer: ``(numel,)`` of the exchange's dtype and device, contiguous; overwritten by the
                average (NaN if flagged).
            step: training step, for random numbers and headers.
            bucket: number of the bucket in the step, for error messages.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit the residuals and states of this step. Not for a flagged bucket."""

    def unpack(self) -> None:
        """Decode packed averages into the bucket, if there are any."""


@dataclass(frozen=True)
class ExchangeOptions:
    """Options of an exchange that do not change its payloads' sizes.

    Attributes:
        dtype: dtype of the bucket.
        stats: counts bytes and seconds.
        state: residuals, a transform and second moments, each None if not used. With fp32 payloads
            second moments are updated, but values are not divided by them.
        seed: seed of the random numbers.
        draw_rank: rank in the key of the random numbers; the communicator's rank by default.
        timeout_s: longest wait for a rank, in seconds.
        keeps_packed: keep averages packed if none of them can overflow.
        observes: update second moments from these averages; needs whole tensors.
        probe: samples the quality of codes every so many steps.
        device: device of the bucket.
        module: number of the FSDP module in headers; 0 without FSDP.
    """

    dtype: torch.dtype
    stats: Stats
    state: StateStore = field(default_factory=StateStore)
    seed: int = 0
    draw_rank: int | None = None
    timeout_s: float = 300.0
    keeps_packed: bool = False
    observes: bool = True
    probe: Probe | None = None
    device: torch.device = CPU
    module: int = 0


class BucketExchange(Exchange):
    """The exchange of one bucket over a communicator: its four steps, and buffers that every step
    reuses.

    Args:
        plan: layout of every payload.
        comm: communicator.
        options: see `ExchangeOptions`.

    Attributes:
        plan, comm, stats, state, timeout_s: the arguments and fields of the options.
    """

    def __init__(self, plan: BucketPlan, comm: Communicator, options: ExchangeOptions) -> None:
        self.plan, self.comm, self.stats = plan, comm, options.stats
        self.state, self.timeout_s, self._probe = options.state, options.timeout_s, options.probe
        draw_rank = plan.rank if options.draw_rank is None else options.draw_rank
        self._draws, dtype = (options.seed, draw_rank), options.dtype
        self._kernels = kernels.of(options.device)
        self._buffers = Buffers(
            plan, self._kernels, comm, self.stats, DTYPES[dtype], options.module
        )
        self._stages = _stages(plan, self._kernels, options)
        self._packs = options.keeps_packed and not any(s.needs_averages for s in self._stages)
        self._packed: Averages | None = None  # `_arriving`, if they are kept packed
        arriving = [one.averages for one in self._buffers.slices if one.averages is not None]
        decoded = torch.float32 if any(stage.takes_residuals for stage in self._stages) else dtype
        self._arriving = Averages(self._kernels, plan, arriving, decoded)

    # ---- one step --------------------------------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """Means that this rank owns: ``(shard_numel,)`` float32."""
        return self._buffers.shard

    @property
    def flagged(self) -> bool:
        job = self._job
        return job.arrived_bad or job.owned_bad or job.averages_bad

    @property
    def averages(self) -> Averages | None:
        return self._packed

    @property
    def slices(self) -> tuple[Steps, ...]:
        steps = self.measure, self.encode, self.own, self.finish
        count = len(self._buffers.slices)
        return tuple(tuple(partial(step, n) for step in steps) for n in range(count))

    def begin(self, buffer: Tensor, step: int, bucket: int, *, flagged: bool = False) -> None:
        """See `Exchange.begin`; `flagged`: treat the values as non-finite, and flag them to all
        ranks.
        """
        self._job = Job(buffer, step % 2**32, bucket, unencodable=flagged)
        self._packed = None
        self.stats.add_bytes(self.plan.sent_nbytes, self.plan.received_nbytes)

    def end(self) -> None:
        """Drop the references to the bucket and to planes, where others own them."""
        del self._job

    def measure(self, number: int = 0) -> None:
        """Run the stages; if ranks share scales, measure them and start the collective that finds
        the largest ones. Runs once per bucket, with its first slice.
        """
        if number:
            return
        job = self._job
        residuals = self.state.residuals
        if residuals is not None:
            job.residuals = residuals.tensors(self.plan.compressed)
            job.written[residuals] = self.plan.compressed
        for stage in self._stages:
            with self.stats.timed("encode"):
                job.unencodable |= stage.before_encode(job)
        if self.plan.shares_scale:
            self._measure()
            scales = self._buffers.scales.view(torch.int32)
            with peers_answer("scale_round", job.number):
                job.scale_round = self.comm.start_max(scales, Channel.SCALE)

    def encode(self, number: int = 0) -> None:
        """Encode a slice and start its first phase. The first slice places the scales, too."""
        job, slices = self._job, self._buffers.slices
        buffers = slices[number]
        if not number:
            self._place_scales()
        with self.stats.timed("encode"):
            sampled = self._probe is not None and self._probe.due(job.step)
            if not sampled:
                self._encode(buffers.plan.encoded, last=buffers is slices[-1])
            elif not number:  # encode the whole bucket before averages overwrite its gradients
                self._encode(self.plan.local, last=True)
            buffers.first.seal(job.step, job.number, nonfinite=job.unencodable)
        buffers.first.start()

    def own(self, number: int = 0) -> None:
        """Wait for a slice's first phase. In a reduce_scatter, average the owned pieces, encode
        the means and start the second phase.
        """
        buffers = self._receive(number)
        # every rank has received the same flags, so all ranks skip the second phase
        if buffers.owned is None or buffers.flagged:
            return
        with self.stats.timed("owner"):
            self._job.owned_bad |= self._average(buffers, buffers.owned)
            if buffers.second is not None:
                self._job.owned_bad |= self._encode_owned(number, buffers.owned)
        if buffers.second is not None:
            self._publish(buffers.second)

    def forget(self) -> None:
        """Drop the references to the bucket after `encode`; only where means stay in `shard`."""
        self._job.bucket = self._job.values = self._job.target = self.shard

    def average_shard(self, out: Tensor | None = None) -> None:
        """Wait for the first phase and average the owned pieces, but start no second phase. Only
        for plans of one slice.

        Args:
            out: ``(shard_numel,)`` float32, written in place of `shard`; only for plans that keep
                means with their owners.
        """
        buffers = self._receive(0)
        if buffers.flagged or buffers.owned is None:
            return
        owned = buffers.owned if out is None else replace(buffers.owned, shard=out)
        with self.stats.timed("owner"):
            self._job.owned_bad = self._average(buffers, owned)
            if self.plan.stays:
                for stage in self._stages:
                    stage.after_owned_average(owned.shard)

    def publish_shard(self, *, flagged: bool) -> None:
        """Encode the values in `shard` and start the second phase, unless the first phase was
        flagged. With `flagged` the second payload is flagged as non-finite.
        """
        buffers = self._buffers.slices[0]
        if buffers.flagged or buffers.owned is None or buffers.second is None:
            return
        with self.stats.timed("owner"):
            self._job.owned_bad = self._encode_owned(0, buffers.owned) or flagged
        self._publish(buffers.second)

    def finish(self, number: int = 0) -> None:
        """Wait for a slice's second phase and write its averages into the bucket. Averages that
        stay packed are kept in `averages`, with the last slice. A flagged bucket becomes NaN.
        """
        job, buffers = self._job, self._buffers.slices[number]
        last = buffers is self._buffers.slices[-1]
        second = buffers.second if not buffers.flagged else None
        if second is not None:
            second.wait(self.timeout_s)
        with self.stats.timed("decode"):
            job.averages_bad |= buffers.flagged
            if second is not None:
                job.averages_bad |= second.accept()
            if not job.averages_bad and buffers.averages is not None:
                self._decode(buffers, last=last)
        if last and self.flagged:
            job.bucket.fill_(float("nan"))
            self.stats.nonfinite_buckets += 1

    def unpack(self) -> None:
        if self._packed is not None:
            self._packed.decode(self._job.bucket)
            self._packed = None

    def commit(self) -> None:
        self._job.commit()

    # ---- parts -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        job, buffers = self._job, self._buffers
        if buffers.scratch is not None:
            with self.stats.timed("statistics"):
                job.unencodable |= self.plan.codec.measure(
                    self._kernels, job.values, self.plan.local, buffers.scratch, buffers.scales
                )

    def _place_scales(self) -> None:
        """Write the scales of the whole bucket to its payload: this rank's, which are measured
        here, or the largest over all ranks, which are waited for.
        """
        job, scales = self._job, self._buffers.scales
        if self.plan.shares_scale:
            begun, work, job.scale_round = time.perf_counter(), job.scale_round, None
            if work is not None:
                with peers_answer("scale_round", job.number):
                    work.wait(self.timeout_s)
            self.stats.add_seconds("scale_round", time.perf_counter() - begun)
            # a shared scale is not finite if a value on any rank is not
            job.unencodable |= not host.are_finite(scales)
        else:
            self._measure()
        with self.stats.timed("encode"):
            self.plan.codec.place_scales(self.plan.local, scales, self._buffers.local)

    def _encode(self, rows: Rows | PayloadLayout, *, last: bool) -> None:
        """Encode rows of the bucket. After the last ones, convert residuals to units of the
        gradient and take a sample if one is due.
        """
        job, local = self._job, self._buffers.local
        residuals = self._residuals(job.residuals)
        job.unencodable |= self.plan.codec.encode_body(
            self._kernels, job.values, rows, local, self._key(STREAM_FIRST), residuals
        )
        if not last:
            return
        if residuals.new is not None:
            for stage in self._stages:
                stage.after_encode(residuals.new)
        if self._probe is not None and self._probe.due(job.step) and not job.unencodable:
            self._probe.take(self._kernels, self.plan, local, job, residuals.new)

    def _receive(self, number: int) -> SliceBuffers:
        """Wait for a slice's first phase, check its payloads and return its buffers."""
        job, buffers = self._job, self._buffers.slices[number]
        buffers.first.wait(self.timeout_s)
        with self.stats.timed("owner"):
            job.arrived_bad |= buffers.first.accept()
            if self.plan.shares_scale and not job.arrived_bad:
                buffers.first.check_shared_scales()
        buffers.flagged = job.arrived_bad
        return buffers

    def _average(self, buffers: SliceBuffers, owned: Owned) -> bool:
        """Average this rank's pieces of a slice; return True if an average is not finite."""
        bad = self.plan.second_phase.average(self._kernels, owned)
        if bad:
            buffers.first.refuse_unflagged()
        return bad

    def _encode_owned(self, number: int, owned: Owned) -> bool:
        """Encode the body of a slice's second payload; return True if a value is not finite."""
        job, planes, bad = self._job, self.state.owner_residuals, False
        if planes is not None:
            job.owner_residuals = planes.tensors(self.plan.owned_compressed)
            job.written[planes] = self.plan.owned_compressed
        for stage in self._stages:
            bad |= stage.before_owner_encode(job, number, self.shard)
        residuals = self._residuals(job.owner_residuals)
        bad |= self.plan.second_phase.encode(
            self._kernels, owned, self._key(STREAM_SECOND), residuals
        )
        if residuals.new is not None:
            for stage in self._stages:
                stage.after_owner_encode(number, residuals.new)
        return bad

    def _publish(self, second: Phase) -> None:
        """Seal and start a second phase; its header flags non-finite means to all ranks."""
        job = self._job
        second.seal(job.step, job.number, nonfinite=job.owned_bad)
        second.start()

    def _residuals(self, planes: tuple[Tensor, Tensor] | None) -> Residuals:
        """Return the planes that the codec reads and writes. It reads none if a stage has already
        added residuals to the values.
        """
        if planes is None:
            return NO_RESIDUALS
        added = any(stage.takes_residuals for stage in self._stages)
        return Residuals(None if added else planes[0], planes[1], self.stats.add_dropped)

    def _decode(self, buffers: SliceBuffers, *, last: bool) -> None:
        """Decode the averages of a slice. If averages may stay packed, all slices are handled with
        the last one: kept packed, or decoded if one could overflow.
        """
        job = self._job
        if self._packs:
            if last and self._arriving.are_safe():
                self._packed = self._arriving
            elif last:
                job.averages_bad |= self._arriving.decode(job.bucket)
            return
        out = next((s.averages for s in self._stages if s.averages is not None), job.bucket)
        job.averages_bad |= self._arriving.decode(out, buffers.averages)
        for stage in reversed(self._stages) if last else ():
            if not job.averages_bad:
                job.averages_bad |= stage.after_decode(job)

    def _key(self, stream: int) -> RngKey:
        return RngKey(*self._draws, step=self._job.step, stream=stream)


def _stages(plan: BucketPlan, kernels: Kernels, options: ExchangeOptions) -> list[Stage]:
    """Return the stages of one bucket layout, in the order in which they run."""
    stages: list[Stage] = []
    transform, moments = options.state.transform, options.state.moments
    if transform is not None and transform.transform.place == "local":
        stages.append(LocalTransform(transform, plan.slots))
    elif transform is not None:
        owned = plan.own_second.pieces
        stages.append(OwnerTransform(transform, [(p.slot.index, p.data, p.numel) for p in owned]))
    if plan.codec.rotates:
        stages.append(Rotation(plan, kernels, options.dtype, options.seed))
    elif moments is not None:
        encodes = not isinstance(plan.codec, Identity)
        stages.append(
            Units(plan, kernels, moments, options.dtype, encodes=encodes, observes=options.observes)
        )
    return stages
