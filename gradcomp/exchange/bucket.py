"""codec x communicator -> average: all_gather, and reduce_scatter + all_gather, one bucket at a time.

`BucketExchange` owns the buffers of a `BucketPlan` and runs it in four steps (measure, encode, own, finish), each of which
waits for at most one collective and starts at most one, on a channel of its own. The pipeline runs the steps of many
buckets overlapped; `run_stages` runs them one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.codecs import Identity
from gradcomp.codecs.base import plain_payloads
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import peers_answer
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.divided import Divided
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.receive import Inbox
from gradcomp.exchange.second import Owned
from gradcomp.exchange.send import Outbox
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, NO_RESIDUALS, Residuals, native
from gradcomp.memory.moments import SecondMoments
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import Transforming
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND, RngKey


class BucketExchange:
    """The buffers of one bucket's exchange, used again at every step, and its four steps.

    Args:
        plan: where every byte goes.
        comm: moves the bytes.
        dtype: of the bucket.
        stats: counts bytes and seconds.
        feedback, owner_feedback: residuals of the ranks' own gradients and of the owner's means (error feedback only).
        seed: of the random numbers.
        draw_rank: rank of the random numbers; the communicator's by default.
        timeout_s: longest wait for a peer.
        keeps_packed: leave averages packed where none can overflow.
        transform: changes this rank's gradients, or the means that it owns.
        probe: looks at what is encoded, now and then.
        moments: by whose roots values are divided before they are encoded; those of fp32 values are only taken in.
        device: of the bucket.
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
        probe: Probe | None = None,
        device: torch.device = CPU,
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
        self._dtype = native.DTYPES[dtype]
        self._compressed = [s.index for s in plan.slots if s.compressed]
        self._kernels = kernels.of(device)
        self._make_first()
        if plan.scatters:
            self._make_second()
        units = Divided(plan, moments, dtype) if moments is not None else None
        self._observed = units  # what takes averages in
        self._divided = None if isinstance(plan.codec, Identity) else units
        decoded = torch.float32 if self._divided is not None else dtype
        self._received = Averages(self._kernels, plan, self._second if plan.scatters else self._first, decoded)

    def _make_first(self) -> None:
        """Make the memory of the first phase: what is sent, what arrives."""
        plan, n = self.plan, self.plan.world_size
        self._outbox = Outbox(plan)
        arriving = plan.messages[plan.rank] if plan.scatters else plan.local
        self._recv = torch.empty(n * arriving.nbytes, dtype=torch.uint8)
        self._first = Inbox(self._recv, arriving.nbytes, [arriving] * n, plan.rank, plan.codec.validate_packed)
        # statistics are done before anything arrives
        self._scratch = plan.codec.scratch(self._kernels, plan.local, room=self._recv)
        self._scales = torch.empty(plan.local.group_count if plan.codec.measures else 0)

    def _make_second(self) -> None:
        """Make the memory of the second phase: what this rank owns, and what owners send."""
        plan, n = self.plan, self.plan.world_size
        self.shard = torch.empty(plan.shard_numel)
        self._second_send = torch.zeros(plan.second_nbytes, dtype=torch.uint8)
        self._second_recv = torch.empty(n * plan.second_nbytes, dtype=torch.uint8)
        self._second = Inbox(
            self._second_recv, plan.second_nbytes, plan.second, plan.rank, plan.second_phase.validate
        )
        arrived = self._first.tensors
        self._owned = Owned(
            plan.own_first,
            plan.own_second,
            plan.codec.payloads(arrived, torch.float32),
            plain_payloads(arrived, torch.float32),
            self.shard,
            self._second_send,
            torch.empty(plan.own_second.group_count if plan.own_second.scale_count else 0),
            # what arrived has been decoded before the second scales are measured
            plan.second_phase.scratch(self._kernels, plan.own_second, self._recv),
        )
        self._second_sealed = self._second_send.numpy()[: plan.own_second.nbytes]
        self._owned_packed = [p.slot.index for p in plan.own_second.pieces if p.slot.compressed]
        self._owned_spans = [(p.slot.index, p.data, p.numel) for p in plan.own_second.pieces]

    # ---- one step --------------------------------------------------------------------------------------------------

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite, as far as this rank knows yet."""
        return self._flagged

    @property
    def stages(self) -> tuple[Callable[[], None], ...]:
        """The steps, in order."""
        return (self.measure, self.encode, self.own, self.finish)

    def begin(self, buffer: Tensor, step: int, bucket: int, *, flagged: bool = False) -> None:
        """Take the bucket to average: ``(numel,)`` of the exchange's dtype, overwritten by `finish`.

        With `flagged` its values do not count, and every rank is to learn that.
        """
        self._buffer = self._values = buffer
        self._step, self._bucket = step % 2**32, bucket
        self._nonfinite = flagged  # on any rank
        self._work: Work | None = None
        self._flagged = False
        self.averages = None
        self.stats.add_bytes(self.plan.sent_nbytes, self.plan.received_nbytes)

    def measure(self) -> None:
        """Measure the scales and, where ranks share them, start the round that finds the largest."""
        if self._local_transform is not None:
            with self.stats.timed("encode"):
                self._nonfinite |= self._local_transform.run(self._buffer, self._spans)
        if self._divided is not None:
            with self.stats.timed("encode"):
                residual = self.feedback.tensors(self._compressed)[0] if self.feedback else None
                self._values = self._divided.divide(self._buffer, residual)
        if self.plan.shares_scale:
            self._measure()
            self._work = self.comm.start_max(self._scales.view(torch.int32), Channel.SCALE)

    def encode(self) -> None:
        """Wait for the scales, encode the bucket, start the first phase."""
        plan, local = self.plan, self._outbox.local
        if plan.shares_scale:
            self._wait("scale_round")
            self._nonfinite |= not self._kernels.are_finite(self._scales)  # some rank's values were not
        else:
            self._measure()
        with self.stats.timed("encode"):
            residuals = self._residuals(self.feedback, self._compressed)
            plan.codec.place_scales(self._kernels, plan.local, self._scales, local)
            self._nonfinite |= plan.codec.encode_body(
                self._kernels, self._values, plan.local, local, self._key(STREAM_FIRST), residuals
            )
            if self._divided is not None:
                self._divided.leave(residuals[1])
            if self._probe is not None and self._probe.due(self._step) and not self._nonfinite:
                units = self._divided.units if self._divided is not None else None
                self._probe.take(
                    self._kernels, plan.codec, plan.local, local, self._step,
                    encoded=self._values, gradient=self._buffer, units=units, residual=residuals[1],
                )  # fmt: skip
            self._outbox.seal(self._kernels, self._first_header)
        if plan.scatters:
            mine = [plan.send_nbytes[plan.rank]] * plan.world_size
            self._work = self.comm.start_all_to_all(self._outbox.send, plan.send_nbytes, self._recv, mine, Channel.FIRST)
        else:
            self._work = self.comm.start_all_gather(local, self._recv, Channel.FIRST)

    def own(self) -> None:
        """Wait for the first phase; as owner, average and encode again, start the second phase."""
        self.receive()
        if self.plan.scatters and not self._flagged:  # every rank has seen the same flags, so all of them skip it
            with self.stats.timed("owner"):
                bad = self._average()
                if self._owner_transform is not None:
                    bad |= self._owner_transform.run(self.shard, self._owned_spans)
                bad |= self._encode_owned()
            self._publish(bad)

    def average_shard(self) -> None:
        """Wait for the first phase and average in `shard` what this rank owns (for an exchange among owners)."""
        self.receive()
        if not self._flagged:
            with self.stats.timed("owner"):
                self._flagged = self._average()

    def publish_shard(self, *, flagged: bool) -> None:
        """Encode what now stands in `shard`, start the second phase (which a flagged first phase does without)."""
        if self._nonfinite:
            return
        with self.stats.timed("owner"):
            bad = self._encode_owned()
        self._publish(bad or flagged)

    def receive(self) -> None:
        """Wait for the first phase and check it; `flagged` tells whether any rank's bucket was."""
        self._wait("first_phase")
        with self.stats.timed("owner"):
            self._nonfinite |= self._first.accept(self._first_header, self._bucket)
            if self.plan.shares_scale and not self._nonfinite:
                self._first.check_shared_scales()
        self._flagged = self._nonfinite

    def finish(self) -> None:
        """Wait for the second phase and write the average into the bucket, or keep it packed in `averages`."""
        overflow, second = False, self.plan.scatters and not self._nonfinite
        if second:
            self._wait("second_phase")
        with self.stats.timed("decode"):
            if second:
                self._nonfinite |= self._second.accept(self._second_header, self._bucket)
                self._nonfinite |= self._own_bad
            if self._nonfinite:
                self._buffer.fill_(float("nan"))
            elif self._keeps_packed and self._observed is None and self._received.are_safe():
                self.averages = self._received
            else:
                overflow = self._decode()
        self._flagged = self._nonfinite or overflow
        if self._flagged:
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

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._scratch is not None:
            with self.stats.timed("statistics"):
                self._nonfinite |= self.plan.codec.measure(
                    self._kernels, self._values, self.plan.local, self._scratch, self._scales
                )

    def _average(self) -> bool:
        """Average what this rank owns; True: an average is not finite."""
        bad = self.plan.second_phase.average(self._kernels, self._owned)
        if bad:
            refuse_unflagged(self._first.tensors, self._first.layouts, f", bucket {self._bucket}")
        return bad

    def _encode_owned(self) -> bool:
        """Write the body of the second payload; True: a value is not finite."""
        residuals = self._residuals(self.owner_feedback, self._owned_packed)
        if self._divided is not None and self.owner_feedback:
            self._divided.divide_owned(self.shard, self.owner_feedback.tensors(self._owned_packed)[0])
        bad = self.plan.second_phase.encode(self._kernels, self._owned, self._key(STREAM_SECOND), residuals)
        if self._divided is not None:
            self._divided.leave(residuals[1], owned=True)
        return bad

    def _residuals(self, feedback: Feedback | None, indices: list[int]) -> Residuals:
        """Return the planes that a codec reads and writes; what is divided has its residuals in it already."""
        if not feedback:
            return NO_RESIDUALS
        old, new = feedback.tensors(indices)
        return (old, new) if self._divided is None else (None, new)

    def _decode(self) -> bool:
        """Write the average into the bucket; True: a value is not finite."""
        out = self._buffer
        if self._divided is not None and self._divided.averages is not None:
            out = self._divided.averages
        bad = self._received.decode(out)
        if bad:
            self._received.refuse_unflagged(f", bucket {self._bucket}")
            return True
        if self._divided is not None:
            return self._divided.multiply(self._buffer, self._step)
        return self._observed is not None and self._observed.observe(self._buffer, self._step)

    def _publish(self, bad: bool) -> None:
        """Seal the second payload and start the second phase; the verdict is taken from all owners' headers."""
        self._own_bad = bad
        wire.seal(self._second_sealed, self._second_header(self.plan.own_second, nonfinite=bad))
        self._work = self.comm.start_all_gather(self._second_send, self._second_recv, Channel.SECOND)

    def _first_header(self, layout: PayloadLayout) -> wire.Header:
        return self._header(layout, self._dtype, STREAM_FIRST, self._nonfinite)

    def _second_header(self, layout: PayloadLayout, *, nonfinite: bool = False) -> wire.Header:
        return self._header(layout, 0, STREAM_SECOND, self._nonfinite or nonfinite)

    def _header(self, layout: PayloadLayout, dtype: int, stream: int, nonfinite: bool) -> wire.Header:
        flags = nonfinite * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED
        return wire.Header(layout.form.code, dtype, flags, layout.numel, 0, layout.scale_count, self._step, stream)

    def _key(self, stream: int) -> RngKey:
        return RngKey(seed=self._seed, rank=self._draw_rank, step=self._step, stream=stream)

    def _wait(self, phase: str) -> None:
        work, self._work = self._work, None
        begun = time.perf_counter()
        if work is not None:
            with peers_answer(phase, self._bucket):
                work.wait(self.timeout_s)
        self.stats.add_seconds(phase, time.perf_counter() - begun)
