"""All-gather of a sharded tensor in encoded form, for FSDP2's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradcomp import kernels
from gradcomp.codecs import Codec
from gradcomp.codecs.base import MixedPayloads
from gradcomp.comm.base import Communicator
from gradcomp.exchange.bucket import ExchangeOptions
from gradcomp.exchange.phase import SECOND, Phase
from gradcomp.kernels import host
from gradcomp.kernels.tables import DTYPES
from gradcomp.payload.layout import PayloadLayout, joined_rows
from gradcomp.payload.pieces import Piece, Slot, whole_pieces
from gradcomp.payload.rng import STREAM_SECOND, RngKey


class BufferPool:
    """A pool of reusable buffers; it grows to the number that is in use at the same time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, nbytes: int, allocate: Callable[[int], Tensor] = host.empty) -> Tensor:
        """Return the smallest free buffer of at least `nbytes` bytes, ``(n,)`` uint8, or one of
        `allocate` if none is large enough.
        """
        self._free.sort(key=Tensor.numel)
        for n, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(n)
        if self._free:
            self._free.pop(0)  # free the smallest buffer; the new one replaces it
        return allocate(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(buffer)


class ShardGather:
    """All-gather of a flat sharded tensor, as payloads of a codec. Every rank decodes every
    payload, its own included, so that all ranks get the same bits.

    Args:
        codec: a codec without residuals and without scales that `measure` computes.
        slots: for each rank the slots of its shard, with offsets in the whole tensor.
        first: offset of this rank's shard in the whole tensor, in elements.
        comm: communicator.
        pool: lends the buffers of payloads.
        options: dtype and device of the values, `stats`, `timeout_s` and `module`.
    """

    def __init__(
        self,
        codec: Codec,
        slots: Sequence[Sequence[Slot]],
        first: int,
        comm: Communicator,
        pool: BufferPool,
        options: ExchangeOptions,
    ) -> None:
        self._codec, self._comm, self._stats, self._pool = codec, comm, options.stats, pool
        self._options, self._kernels = options, kernels.of(options.device)
        self._layouts = [
            PayloadLayout(codec.form, whole_pieces(one), whole_groups=codec.whole_groups)
            for one in slots
        ]
        own_pieces = [
            Piece(p.slot, p.start, p.numel, p.data - first, 0)
            for p in whole_pieces(slots[comm.rank])
        ]
        self._own = PayloadLayout(codec.form, own_pieces, whole_groups=codec.whole_groups)
        self._stride = max(layout.nbytes for layout in self._layouts)
        self._rows = joined_rows(self._layouts, self._stride)
        self._pending: tuple[Phase, Tensor] | None = None  # with its buffer from the pool

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in one gather."""
        return (self._comm.world_size - 1) * self._stride

    def start(self, values: Tensor, step: int) -> None:
        """Encode this rank's shard and start the gather. A gather that is still in progress is
        waited for first, and its result is dropped.

        Args:
            values: ``(k,)`` values of this rank's shard.
            step: training step, for random numbers and headers.
        """
        if self._pending is not None:
            self._pool.give(self._wait()[1])
        buffer = self._pool.take((self._comm.world_size + 1) * self._stride)
        phase = Phase(
            SECOND,
            self._comm,
            self._stats,
            buffer[: self._stride],
            [self._own],
            self._arriving(buffer),
            self._layouts,
            self._codec.validate_packed,
            stride=self._stride,
            dtype=DTYPES[self._options.dtype],
            module=self._options.module,
        )
        with self._stats.timed("encode"):
            draws = RngKey(self._codec.seed, self._comm.rank, step % 2**32, stream=STREAM_SECOND)
            bad = self._codec.encode_body(self._kernels, values, self._own, buffer, draws)
            phase.seal(step % 2**32, 0, nonfinite=bad)
        phase.start()
        self._pending = phase, buffer
        self._stats.add_bytes(self.sent_nbytes, self.sent_nbytes)

    def finish(self, out: Tensor, *, keep: bool = False) -> Tensor | None:
        """Wait for all payloads and decode them.

        Args:
            out: ``(n,)``: the whole tensor, all NaN if a value of any rank is not finite.
            keep: keep the payloads for one call of `again`.

        Returns:
            The payloads if `keep` is set and all values are finite, otherwise None.
        """
        phase, buffer = self._wait()
        with self._stats.timed("decode"):
            bad = phase.accept()
            if bad:
                self._stats.nonfinite_buckets += 1
            elif self._decode(buffer, out):
                phase.refuse_unflagged("weights")
                bad = True  # values overflow the dtype
            if bad:
                out.fill_(float("nan"))
        if keep and not bad:
            return buffer
        self._pool.give(buffer)
        return None

    def again(self, buffer: Tensor, out: Tensor) -> None:
        """Decode payloads that `finish` has kept into `out`, and return them to the pool."""
        with self._stats.timed("decode"):
            self._decode(buffer, out)
        self._pool.give(buffer)

    def _decode(self, buffer: Tensor, out: Tensor) -> bool:
        payloads = MixedPayloads(
            [self._arriving(buffer)], self._codec.code, self._options.dtype, self._rows
        )
        return payloads.decode(self._kernels, out, out.numel())

    def _arriving(self, buffer: Tensor) -> Tensor:
        return buffer[self._stride : (self._comm.world_size + 1) * self._stride]

    def _wait(self) -> tuple[Phase, Tensor]:
        pending, self._pending = self._pending, None
        assert pending is not None  # `start` was called
        pending[0].wait(self._options.timeout_s)
        return pending
