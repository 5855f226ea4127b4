"""codec x communicator -> average: all_gather, and reduce_scatter + all_gather, one bucket at a time.

`BucketExchange` owns the buffers of a `BucketPlan` and runs it in four steps (measure, encode, own, finish), each of which
waits for at most one collective and starts at most one, on a channel of its own. The pipeline runs the steps of many
buckets overlapped; `run_stages` runs them one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import native
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import Transforming
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, lanes_form
from gradcomp.payload.layout import PayloadLayout, message_copies
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND, RngKey

LANES = lanes_form(1).code


class Exchange(Protocol):
    """What averages one bucket layout, step after step: `begin`, every stage in order, then `commit` unless flagged.

    Then the average stands in the bucket, or it is in `averages` until the next `begin` or `unpack`.
    """

    timeout_s: float

    @property
    def flagged(self) -> bool: ...

    @property
    def averages(self) -> Averages | None: ...

    @property
    def stages(self) -> tuple[Callable[[], None], ...]: ...

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None: ...

    def unpack(self) -> None: ...

    def commit(self) -> None: ...


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
    ) -> None:
        place = transform.transform.place if transform is not None else ""
        self._local_transform = transform if place == "local" else None
        self._owner_transform = transform if place == "owner" else None
        self._spans = [(s.index, s.offset, s.numel) for s in plan.slots]
        self.averages: Averages | None = None
        self._keeps_packed = keeps_packed
        self.plan, self.comm, self.stats = plan, comm, stats
        self.feedback, self.owner_feedback = feedback, owner_feedback
        self._seed, self.timeout_s = seed, timeout_s
        self._draw_rank = plan.rank if draw_rank is None else draw_rank
        self._dtype = native.DTYPES[dtype]
        self._compressed = [s.index for s in plan.slots if s.compressed]
        n, received = plan.world_size, plan.messages[plan.rank].nbytes if plan.scatters else plan.local.nbytes
        self._local = torch.empty(plan.local.nbytes, dtype=torch.uint8)
        self._recv = torch.empty(n * received, dtype=torch.uint8)
        self._scratch = plan.codec.scratch(plan.local, room=self._recv)  # statistics are done before anything arrives
        self._scales = torch.empty(plan.local.group_count if self._scratch is not None else 0)
        if not plan.scatters:
            return
        offsets = [sum(plan.send_nbytes[:k]) for k in range(n)]
        self._send = torch.empty(sum(plan.send_nbytes), dtype=torch.uint8)
        self._messages = [self._send.numpy()[o : o + b] for o, b in zip(offsets, plan.send_nbytes, strict=True)]
        self._copies = message_copies(plan.local, plan.messages, offsets)
        self.shard = torch.empty(plan.shard_numel)
        self._second_scales = torch.empty(plan.own_second.group_count if plan.own_second.scale_count else 0)
        # what arrived has been decoded before the second scales are measured
        self._second_scratch = None if plan.exact else plan.second_codec.scratch(plan.own_second, room=self._recv)
        self._second_send = torch.zeros(plan.second_nbytes, dtype=torch.uint8)
        self._second_recv = torch.empty(n * plan.second_nbytes, dtype=torch.uint8)

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
        self._buffer, self._step, self._bucket = buffer, step % 2**32, bucket
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
        if self.plan.shares_scale:
            self._measure()
            self._work = self.comm.start_max(self._scales.view(torch.int32), Channel.SCALE)

    def encode(self) -> None:
        """Wait for the scales, encode the bucket, start the first phase."""
        plan = self.plan
        if plan.shares_scale:
            self._wait("scale_round")
            scales = self._scales
            self._nonfinite |= not native.scales_are_finite(scales.data_ptr(), scales.numel())  # some rank's values were not
        else:
            self._measure()
        with self.stats.timed("encode"):
            old, new = self.feedback.addresses(self._compressed) if self.feedback else (0, 0)
            local, key = self._local.data_ptr(), self._key(STREAM_FIRST)
            plan.codec.place_scales(plan.local, self._scales.data_ptr(), local)
            bad = plan.codec.encode_body(self._buffer.data_ptr(), self._dtype, plan.local, local, key, old, new)
            self._nonfinite |= bad
            if plan.scatters:
                native.copy(self._send.data_ptr(), local, self._copies)
                for layout, message in zip(plan.messages, self._messages, strict=True):
                    wire.seal(message, self._header(plan.codec, layout, STREAM_FIRST))
            else:
                wire.seal(self._local.numpy(), self._header(plan.codec, plan.local, STREAM_FIRST))
        if plan.scatters:
            mine = [plan.send_nbytes[plan.rank]] * plan.world_size
            self._work = self.comm.start_all_to_all(self._send, plan.send_nbytes, self._recv, mine, Channel.FIRST)
        else:
            self._work = self.comm.start_all_gather(self._local, self._recv, Channel.FIRST)

    def own(self) -> None:
        """Wait for the first phase; as owner, average and encode again, start the second phase."""
        self.receive()
        if self.plan.scatters and not self._flagged:  # every rank has seen the same flags, so all of them skip it
            with self.stats.timed("owner"):
                if self.plan.exact:
                    bad = self._average_exact()
                else:
                    bad = self._average()
                    bad |= self._transform_average()
                    bad |= self._encode_average()
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
            bad = self._encode_average()
        self._publish(bad or flagged)

    def _publish(self, bad: bool) -> None:
        """Seal the second payload and start the second phase; the verdict is taken from all owners' headers."""
        plan, self._own_bad = self.plan, bad
        payload = self._second_send.numpy()[: plan.own_second.nbytes]
        wire.seal(payload, self._header(plan.second_codec, plan.own_second, STREAM_SECOND, nonfinite=bad))
        self._work = self.comm.start_all_gather(self._second_send, self._second_recv, Channel.SECOND)

    def receive(self) -> None:
        """Wait for the first phase and check it; `flagged` tells whether any rank's bucket was."""
        self._wait("first_phase")
        with self.stats.timed("owner"):
            plan = self.plan
            layout = plan.messages[plan.rank] if plan.scatters else plan.local
            own = self._messages[plan.rank].ctypes.data if plan.scatters else self._local.data_ptr()
            self._payloads = self._check_all(plan.codec, self._recv, layout.nbytes, [layout] * plan.world_size, own)
        self._flagged = self._nonfinite

    def finish(self) -> None:
        """Wait for the second phase and write the average into the bucket, or keep it packed in `averages`."""
        plan, out = self.plan, self._buffer.data_ptr()
        overflow = False
        if plan.scatters and not self._nonfinite:
            self._wait("second_phase")
        with self.stats.timed("decode"):
            if plan.scatters and not self._nonfinite:
                own, stride = self._second_send.data_ptr(), plan.second_nbytes
                self._payloads = self._check_all(plan.second_codec, self._second_recv, stride, plan.second, own)
                self._nonfinite |= self._own_bad
            averages = Averages(plan, self._payloads, self._dtype)
            if self._nonfinite:
                self._buffer.fill_(float("nan"))
            elif self._keeps_packed and averages.are_safe():
                self.averages = averages
            else:
                overflow = averages.decode(out)
                if overflow:
                    averages.refuse_unflagged(f", bucket {self._bucket}")
        self._flagged = self._nonfinite or overflow
        if self._flagged:
            self.stats.nonfinite_buckets += 1

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""
        if self.averages is not None:
            self.averages.decode(self._buffer.data_ptr())
            self.averages = None

    def commit(self) -> None:
        """Make the residuals that this step wrote current."""
        if self.feedback:
            self.feedback.commit(self._compressed)
        if self.owner_feedback and self.plan.scatters:
            self.owner_feedback.commit([p.slot.index for p in self.plan.own_second.pieces if p.slot.compressed])
        if self._local_transform is not None:
            self._local_transform.planes.commit(s.index for s in self.plan.slots)
        if self._owner_transform is not None:
            self._owner_transform.planes.commit(p.slot.index for p in self.plan.own_second.pieces)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._scratch is not None:
            with self.stats.timed("statistics"):
                self._nonfinite |= self.plan.codec.measure(
                    self._buffer.data_ptr(), self._dtype, self.plan.local, self._scratch, self._scales.data_ptr()
                )

    def _average_exact(self) -> bool:
        """Write the integer sums of the owned pieces, and the averages of the fp32 ones, as second payload."""
        plan, out = self.plan, self._second_send.data_ptr()
        first, second = plan.own_first, plan.own_second
        native.copy_bytes(out + HEADER_NBYTES, self._payloads[0] + HEADER_NBYTES, 4 * second.scale_count)
        native.ternary_sum_lanes(self._payloads, first.packed, second.packed, second.form.bits, out)
        shard = self.shard.data_ptr()
        bad = native.sum_decode(native.Payloads(self._payloads, "values", 0), first.plain, shard)
        native.values_encode(shard, 0, second.plain, 0, out)
        return self._refuse_unflagged(bad)

    def _average(self) -> bool:
        """Average the owned pieces in fp32 into the shard."""
        bad = self.plan.codec.decode_body(self._payloads, self.plan.own_first, self.shard.data_ptr(), 0)
        return self._refuse_unflagged(bad)

    def _refuse_unflagged(self, bad: bool) -> bool:
        """Raise CorruptPayload if the owned means are not finite because a payload is not; return `bad` otherwise."""
        if bad:
            refuse_unflagged(self._payloads, [self.plan.own_first] * len(self._payloads), f", bucket {self._bucket}")
        return bad

    def _transform_average(self) -> bool:
        """Let the owner's transform, where there is one, change the shard."""
        if self._owner_transform is None:
            return False
        pieces = self.plan.own_second.pieces
        return self._owner_transform.run(self.shard, [(p.slot.index, p.data, p.numel) for p in pieces])

    def _encode_average(self) -> bool:
        """Encode the shard as second payload."""
        plan, out, shard = self.plan, self._second_send.data_ptr(), self.shard.data_ptr()
        second, codec = plan.own_second, plan.second_codec
        if second.scale_count:
            codec.measure(shard, 0, second, self._second_scratch, self._second_scales.data_ptr())
            codec.place_scales(second, self._second_scales.data_ptr(), out)
        owned = [p.slot.index for p in second.pieces if p.slot.compressed]
        old, new = self.owner_feedback.addresses(owned) if self.owner_feedback else (0, 0)
        return codec.encode_body(shard, 0, second, out, self._key(STREAM_SECOND), old, new)

    def _check_all(
        self, codec: Codec, recv: Tensor, stride: int, layouts: Sequence[PayloadLayout], own: int
    ) -> list[int]:
        """Check every peer's payload and take over its verdict; return the payloads' addresses, this rank's at `own`."""
        view, base, payloads = recv.numpy(), recv.data_ptr(), []
        stream = STREAM_SECOND if recv is not self._recv else STREAM_FIRST
        for rank, layout in enumerate(layouts):
            if rank == self.plan.rank:
                payloads.append(own)
                continue
            at = rank * stride
            try:
                header = wire.parse(view[at : at + layout.nbytes])
                self._check_peer(header, rank, self._header(codec, layout, stream))
                if not header.nonfinite:
                    self._validate(codec, base + at, layout)
            except CorruptPayload as error:
                raise CorruptPayload(error.check, f"{error.detail} (from rank {rank}, bucket {self._bucket})") from None
            self._nonfinite |= header.nonfinite
            payloads.append(base + at)
        if self.plan.shares_scale and stream == STREAM_FIRST and not self._nonfinite:
            self._check_shared_scales(view, stride, layouts[0])
        return payloads

    def _check_shared_scales(self, view: NDArray[np.uint8], stride: int, layout: PayloadLayout) -> None:
        """Raise PeerMismatch unless all ranks encoded with the scales they agreed on: sums of codes mean nothing else."""
        first, last = HEADER_NBYTES, HEADER_NBYTES + 4 * layout.scale_count
        scales = [view[at + first : at + last].tobytes() for at in range(0, view.size, stride)]
        for rank, theirs in enumerate(scales):
            if theirs != scales[0]:
                raise PeerMismatch("scale", rank, scales[0][:16].hex(), theirs[:16].hex())

    def _check_peer(self, header: wire.Header, rank: int, wanted: wire.Header) -> None:
        """Raise PeerMismatch unless a peer's header is the one that this rank would have written, flags aside."""
        if header == wanted:
            return
        for field in ("codec", "dtype", "numel", "group_numel", "scale_count", "step", "stream"):
            expected, got = getattr(wanted, field), getattr(header, field)
            if expected != got:
                raise PeerMismatch(field, rank, expected, got)

    def _validate(self, codec: Codec, payload: int, layout: PayloadLayout) -> None:
        if layout.form.code != LANES:
            codec.validate_body(payload, layout)
            return
        native.scales_validate(payload + HEADER_NBYTES, layout.scale_count, non_negative=True)
        native.lanes_validate(payload, self.plan.world_size, layout.form.bits, layout.packed)

    def _header(self, codec: Codec, layout: PayloadLayout, stream: int, *, nonfinite: bool = False) -> wire.Header:
        dtype = self._dtype if stream == STREAM_FIRST else 0
        flags = (self._nonfinite or nonfinite) * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED
        return wire.Header(layout.form.code, dtype, flags, layout.numel, 0, layout.scale_count, self._step, stream)

    def _key(self, stream: int) -> RngKey:
        return RngKey(seed=self._seed, rank=self._draw_rank, step=self._step, stream=stream)

    def _wait(self, phase: str) -> None:
        work, self._work = self._work, None
        begun = time.perf_counter()
        try:
            if work is not None:
                work.wait(self.timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise PeerLost(phase, self._bucket, time.perf_counter() - begun, str(error)) from error
        self.stats.add_seconds(phase, time.perf_counter() - begun)


def run_stages(exchange: Exchange, buffer: Tensor, step: int) -> None:
    """Average one bucket here and now, and commit its residuals if every value was finite."""
    exchange.begin(buffer, step, 0)
    for stage in exchange.stages:
        stage()
    if not exchange.flagged:
        exchange.commit()
