"""codec x communicator -> average: all_gather, and reduce_scatter + all_gather, one bucket at a
time.

`BucketExchange` owns the buffers of a `BucketPlan` and runs each of its slices in four steps
(measure, encode, own, finish), each of which waits for at most one collective and starts at most
one, on a channel of its own. The pipeline runs the steps of many slices and buckets overlapped, a
thread for each of the four; what a step of a later slice needs of an earlier one's was done by the
same thread.
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
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import peers_answer
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.divided import Divided
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.rotated import Rotated
from gradcomp.exchange.second import Owned
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.traffic import Memory, Second, Traffic
from gradcomp.kernels import CPU, NO_RESIDUALS, Residuals, native
from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import Transforming
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND, RngKey


class BucketExchange:
    """The buffers of one bucket's exchange, used again at every step, and its four steps.

    Args:
        plan: where every byte goes.
        comm: moves the bytes.
        dtype: of the bucket.
        stats: counts bytes and seconds.
        feedback, owner_feedback: residuals of the ranks' own gradients and of the owner's means
            (error feedback only).
        seed: of the random numbers.
        draw_rank: rank of the random numbers; the communicator's by default.
        timeout_s: longest wait for a peer.
        keeps_packed: leave averages packed where none can overflow.
        transform: changes this rank's gradients, or the means that it owns.
        probe: looks at what is encoded, now and then.
        moments: by whose roots values are divided before they are encoded; those of fp32 values are
            only taken in.
        observes: whether the moments take in these averages, which needs whole tensors.
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
        feedback: Feedback | None = None,
        owner_feedback: Feedback | None = None,
        seed: int = 0,
        draw_rank: int | None = None,
        timeout_s: float = 300.0,
        keeps_packed: bool = False,
        transform: Transforming | None = None,
        moments: SecondMoments | None = None,
        observes: bool = True,
        probe: Probe | None = None,
        device: torch.device = CPU,
        module: int = 0,
    ) -> None:
        place = transform.transform.place if transform is not None else ""
        self._local_transform = transform if place == "local" else None
        self._owner_transform = transform if place == "owner" else None
        self._spans = [(s.index, s.offset, s.numel) for s in plan.slots]
        self.averages: Averages | None = None
        self._keeps_packed = keeps_packed
        self._probe = probe
        self.plan, self.comm, self.stats = plan, comm, stats
        self.feedback, self.owner_feedback = feedback, owner_feedback
        self._seed, self.timeout_s = seed, timeout_s
        self._draw_rank = plan.rank if draw_rank is None else draw_rank
        self._dtype, self._module = native.DTYPES[dtype], module << wire.MODULE_SHIFT
        self._compressed = [s.index for s in plan.slots if s.compressed]
        self._kernels = kernels.of(device)
        memory = Memory(plan, self._kernels)
        self._local, self._scales, self._scratch = memory.local, memory.scales, memory.scratch
        self.shard, self._traffic = memory.shard, memory.slices
        if plan.scatters:
            self._owned_packed = [p.slot.index for p in plan.own_second.pieces if p.slot.compressed]
            self._owned_spans = [(p.slot.index, p.data, p.numel) for p in plan.own_second.pieces]
        units = Divided(plan, moments, dtype) if moments is not None else None
        self._observed = units if observes else None  # what takes averages in
        self._divided: Divided | Rotated | None = (
            None if isinstance(plan.codec, Identity) else units
        )
        if plan.codec.rotates:
            self._divided = Rotated(plan, self._kernels, dtype, seed)
        decoded = torch.float32 if self._divided is not None else dtype
        self._bringing = [t for t in self._traffic if t.brings is not None]  # averages
        self._received = Averages(
            self._kernels, plan, [t.brings for t in self._bringing if t.brings is not None], decoded
        )

    # ---- one step --------------------------------------------------------------------------------

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite, as far as this rank knows
        yet.
        """
        return self._flagged

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice, in order."""
        return tuple(
            (
                partial(self.measure, n),
                partial(self.encode, n),
                partial(self.own, n),
                partial(self.finish, n),
            )
            for n in range(len(self._traffic))
        )

    def begin(self, buffer: Tensor, step: int, bucket: int, *, flagged: bool = False) -> None:
        """Take the bucket to average: ``(numel,)`` of the exchange's dtype, overwritten by
        `finish`.

        With `flagged` its values do not count, and every rank is to learn that.
        """
        self._buffer = self._values = buffer
        self._step, self._bucket = step % 2**32, bucket
        self._nonfinite = flagged  # here, in what has been encoded
        self._received_nonfinite = False  # on any rank, in the slices that have arrived
        self._own_bad = False  # an average here, or a code of one
        self._bad = False  # on any rank, for any reason
        self._scale_round: Work | None = None
        self._flagged = False
        self.averages = None
        self.stats.add_bytes(self.plan.sent_nbytes, self.plan.received_nbytes)

    def measure(self, number: int = 0) -> None:
        """Measure the scales and, where ranks share them, start the round that finds the
        largest: all of it with the first slice.
        """
        if number:
            return
        if self._local_transform is not None:
            with self.stats.timed("encode"):
                self._nonfinite |= self._local_transform.run(self._buffer, self._spans)
        if self._divided is not None:
            with self.stats.timed("encode"):
                residual = self.feedback.tensors(self._compressed)[0] if self.feedback else None
                self._values = self._divided.divide(self._buffer, residual, self._step)
        if self.plan.shares_scale:
            self._measure()
            self._scale_round = self.comm.start_max(self._scales.view(torch.int32), Channel.SCALE)

    def encode(self, number: int = 0) -> None:
        """Encode a slice, start its first phase; with the first slice, wait for the scales."""
        plan, here = self.plan, self._traffic[number]
        if not number:
            self._settle_scales()
        with self.stats.timed("encode"):
            sampled = self._probe is not None and self._probe.due(self._step)
            if not sampled:
                self._encode(here.plan.encoded, last=here is self._traffic[-1])
            elif (
                not number
            ):  # a sample looks at the whole bucket, before averages of a slice replace gradients
                self._encode(plan.local, last=True)
            here.nonfinite = self._nonfinite
            here.outbox.seal(self._kernels, partial(self._first_header, here))
        send, recv, nbytes = here.outbox.send, here.first.memory, here.outbox.nbytes
        if plan.scatters:
            mine = [nbytes[plan.rank]] * plan.world_size
            here.work = self.comm.start_all_to_all(send, nbytes, recv, mine, Channel.FIRST)
        else:
            here.work = self.comm.start_all_gather(send, recv, Channel.FIRST)

    def own(self, number: int = 0) -> None:
        """Wait for a slice's first phase; as owner, average and encode again, start the second
        phase.
        """
        here = self._traffic[number]
        self.receive(number)
        # every rank has seen the same flags, so all of them skip it
        if here.second is None or here.flagged:
            return
        with self.stats.timed("owner"):
            self._own_bad |= self._average(here, here.second.owned)
            if here.second.inbox is not None:
                if self._owner_transform is not None:  # goes with whole second phases
                    self._own_bad |= self._owner_transform.run(self.shard, self._owned_spans)
                self._own_bad |= self._encode_owned(number, here.second)
        if here.second.inbox is not None:
            self._publish(here, here.second)

    def forget(self) -> None:
        """Let go of the bucket that `encode` has read, where averages stay in `shard`."""
        self._buffer = self._values = self.shard

    def average_shard(self, out: Tensor | None = None) -> None:
        """Wait for the first phase and average what this rank owns (for an exchange among owners,
        in one slice).

        The averages come to stand in `shard`, or, where they stay, in `out`, ``(n,)`` float32 as
        `shard` is.
        """
        self.receive()
        here = self._traffic[0]
        if not here.flagged and here.second is not None:
            owned = here.second.owned if out is None else replace(here.second.owned, shard=out)
            with self.stats.timed("owner"):
                self._flagged = self._average(here, owned)
                if self.plan.stays and isinstance(self._divided, Rotated):
                    self._divided.multiply_owned(owned.shard)

    def publish_shard(self, *, flagged: bool) -> None:
        """Encode what now stands in `shard`, start the second phase (which a flagged first phase
        does without).
        """
        here = self._traffic[0]
        if here.flagged or here.second is None:
            return
        with self.stats.timed("owner"):
            self._own_bad = self._encode_owned(0, here.second) or flagged
        self._publish(here, here.second)

    def receive(self, number: int = 0) -> None:
        """Wait for a slice's first phase and check it; `flagged` tells whether any rank's bucket
        was.
        """
        here = self._traffic[number]
        self._wait("first_phase", here)
        with self.stats.timed("owner"):
            self._received_nonfinite |= here.nonfinite
            self._received_nonfinite |= here.first.accept(
                partial(self._first_header, here), self._bucket
            )
            if self.plan.shares_scale and not self._received_nonfinite:
                here.first.check_shared_scales()
        here.flagged = self._received_nonfinite
        self._flagged |= here.flagged

    def finish(self, number: int = 0) -> None:
        """Wait for a slice's second phase and write its averages into the bucket, or with the
        last slice keep them packed in `averages`.
        """
        here = self._traffic[number]
        second = here.second.inbox if here.second is not None and not here.flagged else None
        if second is not None:
            self._wait("second_phase", here)
        with self.stats.timed("decode"):
            self._bad |= here.flagged
            if here.second is not None and second is not None:
                self._bad |= second.accept(partial(self._second_header, here), self._bucket)
                self._bad |= here.second.bad
            self._take(here)
        if here is self._traffic[-1]:
            self._flagged = self._bad
            if self._flagged:
                self._buffer.fill_(float("nan"))
                self.stats.nonfinite_buckets += 1

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""
        if self.averages is not None:
            self.averages.decode(self._buffer)
            self.averages = None

    def commit(self) -> None:
        """Make the residuals that this step wrote current."""
        if self.feedback:
            self.feedback.commit(self._compressed)
        if self.owner_feedback and self.plan.scatters:
            self.owner_feedback.commit(self._owned_packed)
        if self._local_transform is not None:
            self._local_transform.planes.commit(s.index for s in self.plan.slots)
        if self._owner_transform is not None:
            self._owner_transform.planes.commit(index for index, _, _ in self._owned_spans)
        if self._observed is not None:
            self._observed.commit()

    # ---- parts -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._scratch is not None:
            with self.stats.timed("statistics"):
                self._nonfinite |= self.plan.codec.measure(
                    self._kernels, self._values, self.plan.local, self._scratch, self._scales
                )

    def _settle_scales(self) -> None:
        """Write the scales of the whole bucket to its payload: those that this rank measures, or
        the largest of all ranks.
        """
        if self.plan.shares_scale:
            begun, work = time.perf_counter(), self._scale_round
            self._scale_round = None
            if work is not None:
                with peers_answer("scale_round", self._bucket):
                    work.wait(self.timeout_s)
            self.stats.add_seconds("scale_round", time.perf_counter() - begun)
            # some rank's values were not
            self._nonfinite |= not self._kernels.are_finite(self._scales)
        else:
            self._measure()
        with self.stats.timed("encode"):
            self.plan.codec.place_scales(self._kernels, self.plan.local, self._scales, self._local)

    def _encode(self, rows: Rows | PayloadLayout, *, last: bool) -> None:
        """Encode rows of the bucket; with the last ones, bring residuals to units of the
        gradient and take a sample if one is due.
        """
        residuals = self._residuals(self.feedback, self._compressed)
        self._nonfinite |= self.plan.codec.encode_body(
            self._kernels, self._values, rows, self._local, self._key(STREAM_FIRST), residuals
        )
        if not last:
            return
        residual = residuals[1]
        if self._divided is not None:
            self._divided.leave(residual)
        if self._probe is not None and self._probe.due(self._step) and not self._nonfinite:
            gradient, units = (
                self._divided.probed(self._buffer)
                if self._divided is not None
                else (self._buffer, None)
            )
            self._probe.take(
                self._kernels,
                self.plan.codec,
                self.plan.local,
                self._local,
                self._step,
                encoded=self._values,
                gradient=gradient,
                units=units,
                residual=residual,
            )

    def _average(self, here: Traffic, owned: Owned) -> bool:
        """Average what this rank owns of a slice; True: an average is not finite."""
        bad = self.plan.second_phase.average(self._kernels, owned)
        if bad:
            refuse_unflagged(here.first.tensors, here.first.layouts, f", bucket {self._bucket}")
        return bad

    def _encode_owned(self, number: int, second: Second) -> bool:
        """Write the body of a second payload; True: a value is not finite."""
        residuals = self._residuals(self.owner_feedback, self._owned_packed)
        if self._divided is not None:
            kept = (
                self.owner_feedback.tensors(self._owned_packed)[0] if self.owner_feedback else None
            )
            self._divided.divide_owned(number, self.shard, kept)
        bad = self.plan.second_phase.encode(
            self._kernels, second.owned, self._key(STREAM_SECOND), residuals
        )
        if self._divided is not None:
            self._divided.leave(residuals[1], owned=number)
        return bad

    def _residuals(self, feedback: Feedback | None, indices: list[int]) -> Residuals:
        """Return the planes that a codec reads and writes; what is divided has its residuals in
        it already.
        """
        if not feedback:
            return NO_RESIDUALS
        old, new = feedback.tensors(indices)
        return Residuals(old if self._divided is None else None, new, self.stats.add_dropped)

    def _take(self, here: Traffic) -> None:
        """Take in the averages that a slice brings; those that may stay packed all at once, with
        the last.
        """
        last = here is self._traffic[-1]
        packs = self._keeps_packed and self._observed is None and self._divided is None
        if self._bad or here.brings is None:
            return
        if not packs:
            self._decode(self._bringing.index(here))
        elif last and self._received.are_safe():
            self.averages = self._received
        elif last:
            for number in range(len(self._bringing)):
                self._decode(number)
        if last and not packs and not self._bad:
            self._observe()

    def _decode(self, number: int) -> None:
        """Write averages into the bucket, or where those in units of second moments go."""
        out = self._buffer
        if self._divided is not None and self._divided.averages is not None:
            out = self._divided.averages
        if self._received.decode_slice(number, out):
            self._received.refuse_unflagged(number, f", bucket {self._bucket}")
            self._bad = True

    def _observe(self) -> None:
        """Bring the whole bucket's averages to units of the gradient, and show them to the
        second moments.
        """
        if self._divided is not None:
            self._bad |= self._divided.multiply(self._buffer)
        if self._observed is not None and not self._bad:
            self._bad |= self._observed.observe(self._buffer, self._step)

    def _publish(self, here: Traffic, second: Second) -> None:
        """Seal a second payload and start its phase; the verdict is taken from all owners'
        headers.
        """
        owned, recv = second.owned, second.inbox
        assert recv is not None
        second.bad = self._own_bad
        wire.seal(
            owned.payload.numpy()[: owned.second.nbytes],
            self._second_header(here, owned.second, nonfinite=second.bad),
        )
        here.work = self.comm.start_all_gather(owned.payload, recv.memory, Channel.SECOND)

    def _first_header(self, here: Traffic, layout: PayloadLayout) -> wire.Header:
        return self._header(layout, self._dtype, STREAM_FIRST, here.nonfinite)

    def _second_header(
        self, here: Traffic, layout: PayloadLayout, *, nonfinite: bool = False
    ) -> wire.Header:
        return self._header(layout, 0, STREAM_SECOND, nonfinite)

    def _header(
        self, layout: PayloadLayout, dtype: int, stream: int, nonfinite: bool
    ) -> wire.Header:
        flags = nonfinite * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED
        stream |= self._module
        return wire.Header(
            layout.form.code, dtype, flags, layout.numel, 0, layout.scale_count, self._step, stream
        )

    def _key(self, stream: int) -> RngKey:
        return RngKey(seed=self._seed, rank=self._draw_rank, step=self._step, stream=stream)

    def _wait(self, phase: str, here: Traffic) -> None:
        work, here.work = here.work, None
        begun = time.perf_counter()
        if work is not None:
            with peers_answer(phase, self._bucket):
                work.wait(self.timeout_s)
        self.stats.add_seconds(phase, time.perf_counter() - begun)
