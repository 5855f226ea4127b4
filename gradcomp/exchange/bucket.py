"""One bucket at a time, averaged by an all_gather, or by a reduce_scatter and an all_gather.

`BucketExchange` runs each slice of a `BucketPlan` in four steps (measure, encode, own, finish),
each of which waits for at most one collective and starts at most one, on a channel of its own. The
pipeline runs the steps of many slices and buckets overlapped, a thread for each of the four; what a
step of a later slice needs of an earlier one's was done by the same thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
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
from gradcomp.exchange.rotation import Rotation
from gradcomp.exchange.second import Owned
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import Job, LocalTransform, OwnerTransform, Stage
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.units import Units
from gradcomp.kernels import CPU, NO_RESIDUALS, Kernels, Residuals, host
from gradcomp.kernels.tables import DTYPES
from gradcomp.memory.store import StateStore
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND, RngKey


class BucketExchange:
    """The buffers of one bucket's exchange, used again at every step, and its four steps.

    Args:
        plan: where every byte goes.
        comm: moves the bytes.
        dtype: of the bucket.
        stats: counts bytes and seconds.
        state: residuals, a transform and second moments, as far as this exchange uses them. Values
            in fp32 are not encoded in units of second moments, which only observe them.
        seed: of the random numbers.
        draw_rank: rank of the random numbers; the communicator's by default.
        timeout_s: longest wait for a peer.
        keeps_packed: leave averages packed where none can overflow.
        observes: whether second moments take in these averages, which needs whole tensors.
        probe: samples what is encoded, now and then.
        device: of the bucket.
        module: number of the FSDP module, for headers; 0 elsewhere.
    """

    def __init__(
        self,
        plan: BucketPlan,
        comm: Communicator,
        dtype: torch.dtype,
        stats: Stats,
        *,
        state: StateStore | None = None,
        seed: int = 0,
        draw_rank: int | None = None,
        timeout_s: float = 300.0,
        keeps_packed: bool = False,
        observes: bool = True,
        probe: Probe | None = None,
        device: torch.device = CPU,
        module: int = 0,
    ) -> None:
        self.plan, self.comm, self.stats, self.timeout_s = plan, comm, stats, timeout_s
        self.state, self._probe = state or StateStore(), probe
        self._draws = seed, plan.rank if draw_rank is None else draw_rank
        self._kernels = kernels.of(device)
        self._buffers = Buffers(plan, self._kernels, comm, stats, DTYPES[dtype], module)
        self._stages = _stages(plan, self._kernels, dtype, seed, self.state, observes)
        self._packs = keeps_packed and not any(stage.needs_averages for stage in self._stages)
        # averages of the last step, where they are kept packed, and where those of any step arrive
        self.averages: Averages | None = None
        arriving = [one.averages for one in self._buffers.slices if one.averages is not None]
        decoded = torch.float32 if any(stage.takes_residuals for stage in self._stages) else dtype
        self._arriving = Averages(self._kernels, plan, arriving, decoded)

    # ---- one step --------------------------------------------------------------------------------

    @property
    def shard(self) -> Tensor:
        """Means that this rank owns, ``(n,)`` float32."""
        return self._buffers.shard

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite, as far as this rank knows
        yet.
        """
        job = self._job
        return job.arrived_bad or job.owned_bad or job.averages_bad

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice, in order."""
        steps = self.measure, self.encode, self.own, self.finish
        count = len(self._buffers.slices)
        return tuple(tuple(partial(step, n) for step in steps) for n in range(count))

    def begin(self, buffer: Tensor, step: int, bucket: int, *, flagged: bool = False) -> None:
        """Take the bucket to average: ``(numel,)`` of the exchange's dtype, overwritten by
        `finish`.

        With `flagged` its values do not count, and every rank is to learn that.
        """
        self._job = Job(buffer, step % 2**32, bucket, None, buffer, buffer, unencodable=flagged)
        self.averages = None
        self.stats.add_bytes(self.plan.sent_nbytes, self.plan.received_nbytes)

    def measure(self, number: int = 0) -> None:
        """Run the stages, measure the scales and, where ranks share them, start the round that
        finds the largest: all of it with the first slice.
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
            job.scale_round = self.comm.start_max(scales, Channel.SCALE)

    def encode(self, number: int = 0) -> None:
        """Encode a slice, start its first phase; with the first slice, wait for the scales."""
        job, slices = self._job, self._buffers.slices
        here = slices[number]
        if not number:
            self._place_scales()
        with self.stats.timed("encode"):
            sampled = self._probe is not None and self._probe.due(job.step)
            if not sampled:
                self._encode(here.plan.encoded, last=here is slices[-1])
            elif not number:  # the whole bucket, before averages of a slice replace gradients
                self._encode(self.plan.local, last=True)
            here.first.seal(job.step, job.number, nonfinite=job.unencodable)
        here.first.start()

    def own(self, number: int = 0) -> None:
        """Wait for a slice's first phase; as owner, average and encode again, start the second
        phase.
        """
        here = self._receive(number)
        # every rank has seen the same flags, so all of them skip it
        if here.owned is None or here.flagged:
            return
        with self.stats.timed("owner"):
            self._job.owned_bad |= self._average(here, here.owned)
            if here.second is not None:
                self._job.owned_bad |= self._encode_owned(number, here.owned)
        if here.second is not None:
            self._publish(here.second)

    def forget(self) -> None:
        """Let go of the bucket that `encode` has read, where averages stay in `shard`."""
        self._job.bucket = self._job.values = self._job.target = self.shard

    def average_shard(self, out: Tensor | None = None) -> None:
        """Wait for the first phase and average what this rank owns (for an exchange among owners,
        in one slice).

        The averages are written to `shard`, or, where they stay, to `out`, ``(n,)`` float32 as
        `shard` is.
        """
        here = self._receive(0)
        if here.flagged or here.owned is None:
            return
        owned = here.owned if out is None else replace(here.owned, shard=out)
        with self.stats.timed("owner"):
            self._job.owned_bad = self._average(here, owned)
            if self.plan.stays:
                for stage in self._stages:
                    stage.after_owned_average(owned.shard)

    def publish_shard(self, *, flagged: bool) -> None:
        """Encode what is now in `shard`, start the second phase (which a flagged first phase does
        without).
        """
        here = self._buffers.slices[0]
        if here.flagged or here.owned is None or here.second is None:
            return
        with self.stats.timed("owner"):
            self._job.owned_bad = self._encode_owned(0, here.owned) or flagged
        self._publish(here.second)

    def finish(self, number: int = 0) -> None:
        """Wait for a slice's second phase and write its averages into the bucket, or with the
        last slice keep them packed in `averages`.
        """
        job, here = self._job, self._buffers.slices[number]
        last = here is self._buffers.slices[-1]
        second = here.second if not here.flagged else None
        if second is not None:
            second.wait(self.timeout_s)
        with self.stats.timed("decode"):
            job.averages_bad |= here.flagged
            if second is not None:
                job.averages_bad |= second.accept()
            if not job.averages_bad and here.averages is not None:
                self._decode(here, last=last)
        if last and self.flagged:
            job.bucket.fill_(float("nan"))
            self.stats.nonfinite_buckets += 1

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""
        if self.averages is not None:
            self.averages.decode(self._job.bucket)
            self.averages = None

    def commit(self) -> None:
        """Make the residuals and states that this step has written current."""
        self._job.commit()

    # ---- parts -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        job, own = self._job, self._buffers
        if own.scratch is not None:
            with self.stats.timed("statistics"):
                job.unencodable |= self.plan.codec.measure(
                    self._kernels, job.values, self.plan.local, own.scratch, own.scales
                )

    def _place_scales(self) -> None:
        """Write the scales of the whole bucket to its payload: those that this rank measures, or
        the largest of all ranks.
        """
        job, scales = self._job, self._buffers.scales
        if self.plan.shares_scale:
            begun, work, job.scale_round = time.perf_counter(), job.scale_round, None
            if work is not None:
                with peers_answer("scale_round", job.number):
                    work.wait(self.timeout_s)
            self.stats.add_seconds("scale_round", time.perf_counter() - begun)
            # some rank's values were not
            job.unencodable |= not host.are_finite(scales)
        else:
            self._measure()
        with self.stats.timed("encode"):
            self.plan.codec.place_scales(self.plan.local, scales, self._buffers.local)

    def _encode(self, rows: Rows | PayloadLayout, *, last: bool) -> None:
        """Encode rows of the bucket; with the last ones, bring residuals to units of the
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
            self._probe.take(
                self._kernels,
                self.plan.codec,
                self.plan.slots,
                self.plan.local,
                local,
                job.step,
                encoded=job.values,
                gradient=job.target,
                units=job.units,
                residual=residuals.new,
            )

    def _receive(self, number: int) -> SliceBuffers:
        """Wait for a slice's first phase and check it."""
        job, here = self._job, self._buffers.slices[number]
        here.first.wait(self.timeout_s)
        with self.stats.timed("owner"):
            job.arrived_bad |= here.first.accept()
            if self.plan.shares_scale and not job.arrived_bad:
                here.first.check_shared_scales()
        here.flagged = job.arrived_bad
        return here

    def _average(self, here: SliceBuffers, owned: Owned) -> bool:
        """Average what this rank owns of a slice; return True if an average is not finite."""
        bad = self.plan.second_phase.average(self._kernels, owned)
        if bad:
            here.first.refuse_unflagged()
        return bad

    def _encode_owned(self, number: int, owned: Owned) -> bool:
        """Write the body of a second payload; return True if a value is not finite."""
        job, kept, bad = self._job, self.state.owner_residuals, False
        if kept is not None:
            job.owner_residuals = kept.tensors(self.plan.owned_compressed)
            job.written[kept] = self.plan.owned_compressed
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
        """Start a second phase; the verdict is taken from all owners' headers."""
        job = self._job
        second.seal(job.step, job.number, nonfinite=job.owned_bad)
        second.start()

    def _residuals(self, planes: tuple[Tensor, Tensor] | None) -> Residuals:
        """Return the planes that a codec reads and writes; none to read where a stage has added
        residuals already.
        """
        if planes is None:
            return NO_RESIDUALS
        added = any(stage.takes_residuals for stage in self._stages)
        return Residuals(None if added else planes[0], planes[1], self.stats.add_dropped)

    def _decode(self, here: SliceBuffers, *, last: bool) -> None:
        """Write the averages of a slice; those that may stay packed all at once, with the last."""
        job = self._job
        if self._packs:
            if last and self._arriving.are_safe():
                self.averages = self._arriving
            elif last:
                job.averages_bad |= self._arriving.decode(job.bucket)
            return
        out = next((s.averages for s in self._stages if s.averages is not None), job.bucket)
        job.averages_bad |= self._arriving.decode(out, here.averages)
        for stage in reversed(self._stages) if last else ():
            if not job.averages_bad:
                job.averages_bad |= stage.after_decode(job)

    def _key(self, stream: int) -> RngKey:
        return RngKey(*self._draws, step=self._job.step, stream=stream)


def _stages(
    plan: BucketPlan,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int,
    state: StateStore,
    observes: bool,
) -> list[Stage]:
    """Return the stages of one bucket layout, in the order in which values pass them."""
    stages: list[Stage] = []
    transform, moments = state.transform, state.moments
    if transform is not None and transform.transform.place == "local":
        stages.append(LocalTransform(transform, plan.slots))
    elif transform is not None:
        owned = plan.own_second.pieces
        stages.append(OwnerTransform(transform, [(p.slot.index, p.data, p.numel) for p in owned]))
    if plan.codec.rotates:
        stages.append(Rotation(plan, kernels, dtype, seed))
    elif moments is not None:
        encodes = not isinstance(plan.codec, Identity)
        stages.append(Units(plan, kernels, moments, dtype, encodes=encodes, observes=observes))
    return stages
