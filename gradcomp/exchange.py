"""codec x communicator -> average: all_gather, and reduce_scatter + all_gather, one bucket at a time.

`BucketPlan` is arithmetic: which bytes go where, for one bucket layout, rank and world size. `BucketExchange` owns the
buffers of a plan and runs it in four steps (measure, encode, own, finish), each of which waits for at most one collective
and starts at most one, on a channel of its own. The pipeline runs the steps of many buckets overlapped; `run` runs them
one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp import _native, wire
from gradcomp.codecs import Codec
from gradcomp.codecs.identity import Bfloat16Values, Identity
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.feedback import Feedback
from gradcomp.layout import (
    HEADER_NBYTES,
    CopyTable,
    PayloadLayout,
    Slot,
    assign_buckets,
    describe_parameters,
    lanes_form,
    owned_pieces,
    shard_bounds,
    shard_pieces,
    whole_pieces,
)
from gradcomp.rng import STREAM_FIRST, STREAM_SECOND, RngKey
from gradcomp.stats import Stats, ring_bytes

DDP_BUCKET_NBYTES = (1 << 20, 25 << 20)  # DDP's default caps: a small first bucket starts the first exchange early
EXCHANGES = ("auto", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Strategy:
    """How averages are made: the exchange, and the second phase of a reduce_scatter ("" for an all_gather)."""

    exchange: str
    second_phase: str = ""

    def __str__(self) -> str:
        return f"{self.exchange} ({self.second_phase})" if self.second_phase else self.exchange


def choose(codec: Codec, world_size: int, exchange: str = "auto") -> Strategy:
    """Return the strategy that `exchange` names; "auto" takes the fewer bits sent per element.

    It is a function of codec and world size alone, so that it cannot differ between buckets or ranks.

    Raises:
        ValueError: an unknown exchange.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    second = codec.resolved_second_phase()
    bits = {"exact": lanes_form(world_size).bits, "requantize": codec.form.bits, "bf16": 16, "fp32": 32}[second]
    gather = (world_size - 1) * codec.form.bits
    scatter = (world_size - 1) * (codec.form.bits + bits) / world_size
    if exchange == "all_gather" or (exchange == "auto" and gather <= scatter):
        return Strategy("all_gather")
    return Strategy("reduce_scatter", second)


class BucketPlan:
    """Where every byte of one bucket's exchange goes, for one rank.

    Args:
        codec: writes the first phase.
        slots: the parameters of the bucket, with their offsets in it and in the residual planes.
        strategy, world_size, rank: as they say.
        owner_residuals: offset of each owned parameter in the owner's residual planes, by parameter position.

    Attributes:
        local: layout of the whole bucket as this rank encodes it.
        messages: (reduce_scatter) layout of the message to each rank.
        second: (reduce_scatter) layout of each owner's second payload, in bucket coordinates.
        sent_nbytes, received_nbytes: bytes to and from other ranks in one step.
    """

    def __init__(
        self,
        codec: Codec,
        slots: Sequence[Slot],
        strategy: Strategy,
        world_size: int,
        rank: int,
        owner_residuals: dict[int, int] | None = None,
    ) -> None:
        self.codec, self.slots, self.strategy = codec, list(slots), strategy
        self.world_size, self.rank = world_size, rank
        self.numel = sum(s.numel for s in self.slots)
        self.scatters = strategy.exchange == "reduce_scatter"
        self.local = PayloadLayout(codec.form, whole_pieces(self.slots), whole_groups=codec.whole_groups)
        self.shares_scale = codec.shares_scale and self.local.group_count > 0
        others = world_size - 1
        self.sent_nbytes = self.received_nbytes = ring_bytes(self.local.group_count, world_size) * self.shares_scale
        if not self.scatters:
            self.sent_nbytes += others * self.local.nbytes
            self.received_nbytes += others * self.local.nbytes
            return
        owned = [owned_pieces(self.slots, world_size, k) for k in range(world_size)]
        self.messages = [PayloadLayout(codec.form, pieces) for pieces in owned]
        self.send_nbytes = [m.nbytes for m in self.messages]
        self.exact = strategy.second_phase == "exact"
        self.second_codec: Codec = {
            "exact": codec,
            "requantize": codec.requantizer(),
            "bf16": Bfloat16Values(),
            "fp32": Identity(),
        }[strategy.second_phase]
        form = lanes_form(world_size) if self.exact else self.second_codec.form
        self.second = [PayloadLayout(form, pieces) for pieces in owned]
        self.second_nbytes = max(s.nbytes for s in self.second)
        residuals = [(owner_residuals or {}).get(p.slot.index, 0) for p in owned[rank]]
        shard = shard_pieces(owned[rank], residuals, plain_only=self.exact)
        self.own_first = PayloadLayout(codec.form, shard)
        self.own_second = PayloadLayout(form, shard, whole_groups=self.second_codec.whole_groups)
        kept = [p for p in shard if not (self.exact and p.slot.compressed)]
        self.shard_numel = max((p.data + p.numel for p in kept), default=0)
        self.sent_nbytes += sum(self.send_nbytes) - self.send_nbytes[rank] + others * self.second_nbytes
        self.received_nbytes += others * (self.messages[rank].nbytes + self.second_nbytes)


def owned_numel(numel: int, world_size: int, rank: int) -> int:
    """Return how many elements of a parameter `rank` owns."""
    first, last = shard_bounds(numel, world_size, rank)
    return last - first


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes of one training step on one rank: sent and received, and what an fp32 ring all_reduce would have sent."""

    sent: int
    received: int
    baseline: int


def predict_bytes(
    codec: Codec,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    *,
    exchange: str = "auto",
    min_numel: int = 1024,
    exclude: Sequence[str] = (),
    bucket_cap_mb: float | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
) -> ByteCount:
    """Return the bytes that one step of DDP will cost, from the exchange's own sizing and without communication.

    Args:
        codec: with its options.
        shapes: (name, shape) of every trained parameter, in the order of ``named_parameters()``.
        world_size, rank: as they say.
        exchange, min_numel, exclude: as in `gradcomp.ddp.register`.
        bucket_cap_mb: DDP's option (MiB); None is DDP's default, 1 MiB for the first bucket and 25 for the others. Buckets
            are cut as DDP cuts them after its first step, if gradients come last tensor first.
        dtype: of the parameters.
    """
    parameters = describe_parameters(shapes, codec.group_numel, min_numel, exclude)
    strategy = choose(codec, world_size, exchange)
    sizes = [p.numel * dtype.itemsize for p in parameters]
    sent = received = 0
    first, cap = DDP_BUCKET_NBYTES if bucket_cap_mb is None else (int(bucket_cap_mb * 2**20),) * 2
    for bucket in assign_buckets(sizes, cap, first):
        slots, offset = [], 0
        for p in (parameters[i] for i in bucket):
            slots.append(Slot(p.index, p.numel, p.group_numel, p.compressed, offset))
            offset += p.numel
        if world_size > 1:
            plan = BucketPlan(codec, slots, strategy, world_size, rank)
            sent, received = sent + plan.sent_nbytes, received + plan.received_nbytes
    return ByteCount(sent, received, ring_bytes(sum(p.numel for p in parameters), world_size))


class BucketExchange:
    """The buffers of one bucket's exchange, used again at every step, and its four steps.

    Args:
        plan: where every byte goes.
        comm: moves the bytes.
        dtype: of the bucket.
        stats: counts bytes and seconds.
        feedback, owner_feedback: residuals of the ranks' own gradients and of the owner's means (error feedback only).
        seed: of the random numbers.
        timeout_s: longest wait for a peer.
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
        timeout_s: float = 300.0,
    ) -> None:
        self.plan, self.comm, self.stats = plan, comm, stats
        self.feedback, self.owner_feedback = feedback, owner_feedback
        self._seed, self._timeout_s = seed, timeout_s
        self._dtype = _native.DTYPES[dtype]
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
        self._copies = CopyTable(plan.local, plan.messages, offsets)
        self._shard = torch.empty(plan.shard_numel)
        self._second_scales = torch.empty(plan.own_second.group_count if plan.own_second.scale_count else 0)
        # what arrived has been decoded before the second scales are measured
        self._second_scratch = None if plan.exact else plan.second_codec.scratch(plan.own_second, room=self._recv)
        self._second_send = torch.zeros(plan.second_nbytes, dtype=torch.uint8)
        self._second_recv = torch.empty(n * plan.second_nbytes, dtype=torch.uint8)

    # ---- one step --------------------------------------------------------------------------------------------------

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket to average: ``(numel,)`` of the exchange's dtype, overwritten by `finish`."""
        self._buffer, self._step, self._bucket = buffer, step % 2**32, bucket
        self._nonfinite = False  # on any rank
        self._work: Work | None = None
        self.flagged = False
        self.stats.add_bytes(self.plan.sent_nbytes, self.plan.received_nbytes)

    def measure(self) -> None:
        """Measure the scales and, where ranks share them, start the round that finds the largest."""
        if self.plan.shares_scale:
            self._measure()
            self._work = self.comm.start_max(self._scales.view(torch.int32), Channel.SCALE)

    def encode(self) -> None:
        """Wait for the scales, encode the bucket, start the first phase."""
        plan = self.plan
        if plan.shares_scale:
            self._wait("scale_round")
            self._nonfinite |= not bool(torch.isfinite(self._scales).all())  # some rank's values were not
        else:
            self._measure()
        with self._timed("encode"):
            old, new = self.feedback.addresses(self._compressed) if self.feedback else (0, 0)
            local, key = self._local.data_ptr(), self._key(STREAM_FIRST)
            plan.codec.place_scales(plan.local, self._scales.data_ptr(), local)
            bad = plan.codec.encode_body(self._buffer.data_ptr(), self._dtype, plan.local, local, key, old, new)
            self._nonfinite |= bad
            if plan.scatters:
                _native.copy(self._send.data_ptr(), local, self._copies)
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
        plan = self.plan
        self._wait("first_phase")
        with self._timed("owner"):
            layout = plan.messages[plan.rank] if plan.scatters else plan.local
            self._payloads = self._check_all(plan.codec, self._recv, layout.nbytes, [layout] * plan.world_size)
            if self._nonfinite or not plan.scatters:
                return  # every rank has seen the same flags, so all of them skip the second phase
            bad = self._average_exact() if plan.exact else self._average_again()
            self._nonfinite |= bad
            payload = self._second_send.numpy()[: plan.own_second.nbytes]
            wire.seal(payload, self._header(plan.second_codec, plan.own_second, STREAM_SECOND))
            self._nonfinite = False  # the verdict is taken from all owners' headers, this one's included
        self._work = self.comm.start_all_gather(self._second_send, self._second_recv, Channel.SECOND)

    def finish(self) -> None:
        """Wait for the second phase and write the average into the bucket; keep the new residuals unless told not to."""
        plan, out = self.plan, self._buffer.data_ptr()
        overflow = False
        if plan.scatters and not self._nonfinite:
            self._wait("second_phase")
        with self._timed("decode"):
            if plan.scatters and not self._nonfinite:
                payloads = self._check_all(plan.second_codec, self._second_recv, plan.second_nbytes, plan.second)
                if not self._nonfinite:
                    for layout, payload in zip(plan.second, payloads, strict=True):
                        overflow |= self._decode_second(payload, layout, out)
            elif not self._nonfinite:
                overflow = plan.codec.decode_body(self._payloads, plan.local, out, self._dtype)
            if self._nonfinite:
                self._buffer.fill_(float("nan"))
        self.flagged = self._nonfinite or overflow
        if self.flagged:
            self.stats.nonfinite_buckets += 1

    def commit(self) -> None:
        """Make the residuals that this step wrote current."""
        if self.feedback:
            self.feedback.commit(self._compressed)
        if self.owner_feedback and self.plan.scatters:
            self.owner_feedback.commit([p.slot.index for p in self.plan.own_second.pieces if p.slot.compressed])

    def run(self, buffer: Tensor, step: int) -> None:
        """Average one bucket here and now, and commit its residuals if every value was finite."""
        self.begin(buffer, step, 0)
        for stage in (self.measure, self.encode, self.own, self.finish):
            stage()
        if not self.flagged:
            self.commit()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        if self._scratch is not None:
            with self._timed("statistics"):
                self._nonfinite |= self.plan.codec.measure(
                    self._buffer.data_ptr(), self._dtype, self.plan.local, self._scratch, self._scales.data_ptr()
                )

    def _average_exact(self) -> bool:
        """Write the integer sums of the owned pieces, and the averages of the fp32 ones, as second payload."""
        plan, out = self.plan, self._second_send.data_ptr()
        first, second = plan.own_first, plan.own_second
        _native.copy_bytes(out + HEADER_NBYTES, self._payloads[0] + HEADER_NBYTES, 4 * second.scale_count)
        _native.ternary_sum_lanes(self._payloads, first.packed, second.packed, second.form.bits, out)
        shard = self._shard.data_ptr()
        bad = _native.values_sum_decode(self._payloads, 0, first.plain, shard, 0)
        _native.values_encode(shard, 0, second.plain, 0, out)
        return bad

    def _average_again(self) -> bool:
        """Average the owned pieces in fp32 and encode the means as second payload."""
        plan, out, shard = self.plan, self._second_send.data_ptr(), self._shard.data_ptr()
        bad = plan.codec.decode_body(self._payloads, plan.own_first, shard, 0)
        second, codec = plan.own_second, plan.second_codec
        if second.scale_count:
            codec.measure(shard, 0, second, self._second_scratch, self._second_scales.data_ptr())
            codec.place_scales(second, self._second_scales.data_ptr(), out)
        owned = [p.slot.index for p in second.pieces if p.slot.compressed]
        old, new = self.owner_feedback.addresses(owned) if self.owner_feedback else (0, 0)
        return codec.encode_body(shard, 0, second, out, self._key(STREAM_SECOND), old, new) or bad

    def _decode_second(self, payload: int, layout: PayloadLayout, out: int) -> bool:
        plan = self.plan
        if not plan.exact:
            return plan.second_codec.decode_body([payload], layout, out, self._dtype)
        bits, n = layout.form.bits, plan.world_size
        bad = _native.lanes_decode(payload, n, bits, layout.packed, out, self._dtype)
        return _native.values_sum_decode([payload], 0, layout.plain, out, self._dtype) or bad

    def _check_all(self, codec: Codec, recv: Tensor, stride: int, layouts: Sequence[PayloadLayout]) -> list[int]:
        """Check the payload of every rank and take over its verdict; return the payloads' addresses."""
        view, base, payloads = recv.numpy(), recv.data_ptr(), []
        stream = STREAM_SECOND if recv is not self._recv else STREAM_FIRST
        for rank, layout in enumerate(layouts):
            at = rank * stride
            try:
                header = wire.parse(view[at : at + layout.nbytes])
                self._check_peer(header, rank, codec, layout, stream)
                if not header.nonfinite:
                    self._validate(codec, base + at, layout)
            except CorruptPayload as error:
                raise CorruptPayload(error.check, f"{error.detail} (from rank {rank}, bucket {self._bucket})") from None
            self._nonfinite |= header.nonfinite
            payloads.append(base + at)
        return payloads

    def _check_peer(self, header: wire.Header, rank: int, codec: Codec, layout: PayloadLayout, stream: int) -> None:
        """Raise PeerMismatch unless a peer's header is the one that this rank would have written."""
        wanted = self._header(codec, layout, stream)
        for field in ("codec", "dtype", "numel", "group_numel", "scale_count", "step", "stream"):
            expected, got = getattr(wanted, field), getattr(header, field)
            if expected != got:
                raise PeerMismatch(field, rank, expected, got)

    def _validate(self, codec: Codec, payload: int, layout: PayloadLayout) -> None:
        if layout.form.code != lanes_form(1).code:
            codec.validate_body(payload, layout)
            return
        _native.scales_validate(payload + HEADER_NBYTES, layout.scale_count, non_negative=True)
        _native.lanes_validate(payload, self.plan.world_size, layout.form.bits, layout.packed)

    def _header(self, codec: Codec, layout: PayloadLayout, stream: int) -> wire.Header:
        dtype = self._dtype if stream == STREAM_FIRST else 0
        flags = self._nonfinite * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED
        return wire.Header(layout.form.code, dtype, flags, layout.numel, 0, layout.scale_count, self._step, stream)

    def _key(self, stream: int) -> RngKey:
        return RngKey(seed=self._seed, rank=self.plan.rank, step=self._step, stream=stream)

    def _wait(self, phase: str) -> None:
        work, self._work = self._work, None
        begun = time.perf_counter()
        try:
            if work is not None:
                work.wait(self._timeout_s)
        except (TimeoutError, ConnectionError) as error:
            raise PeerLost(phase, self._bucket, time.perf_counter() - begun, str(error)) from error
        self.stats.add_seconds(phase, time.perf_counter() - begun)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.stats.add_seconds(phase, time.perf_counter() - begun)
