"""An all_gather of values of which every rank holds a part, packed: FSDP2's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.codecs import Codec
from gradcomp.codecs.base import MixedPayloads
from gradcomp.comm.base import Communicator
from gradcomp.exchange.phase import SECOND, Phase
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, host
from gradcomp.kernels.tables import DTYPES
from gradcomp.payload.layout import PayloadLayout, joined_rows
from gradcomp.payload.pieces import Piece, Slot, whole_pieces
from gradcomp.payload.rng import STREAM_SECOND, RngKey


class BufferPool:
    """Memory for what is under way, used again: as many buffers as are needed at a time."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, nbytes: int, allocate: Callable[[int], Tensor] = host.empty) -> Tensor:
        """Return ``(nbytes,)`` uint8 or more of it: the smallest buffer that is large enough.

        Args:
            allocate: makes so many bytes where there is none; by default for payloads.
        """
        self._free.sort(key=Tensor.numel)
        for n, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(n)
        if self._free:
            self._free.pop(0)  # too small: replaced by what is made now
        return allocate(nbytes)

    def give(self, buffer: Tensor) -> None:
        """Take memory back."""
        self._free.append(buffer)


class ShardGather:
    """Flat values of which every rank holds a part, gathered by all as payloads of a codec. Every
    rank decodes every payload, including its own.

    Args:
        codec: without residuals, and without statistics that are measured beforehand.
        slots: what each rank holds, with its places in the whole.
        first: this rank's values begin there in the whole.
        comm: moves the bytes.
        stats: counts bytes and seconds.
        pool: lends the memory for payloads.
        dtype, device: of the values.
        timeout_s: longest wait for a peer.
        module: number of the FSDP module, for headers.
    """

    def __init__(
        self,
        codec: Codec,
        slots: Sequence[Sequence[Slot]],
        first: int,
        comm: Communicator,
        stats: Stats,
        pool: BufferPool,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        timeout_s: float = 300.0,
        module: int = 0,
    ) -> None:
        self._codec, self._comm, self._stats, self._pool = codec, comm, stats, pool
        self._timeout_s, self._dtype, self._kernels = timeout_s, dtype, kernels.of(device)
        self._module = module
        self._layouts = [
            PayloadLayout(codec.form, whole_pieces(one), whole_groups=codec.whole_groups)
            for one in slots
        ]
        mine = [
            Piece(p.slot, p.start, p.numel, p.data - first, 0)
            for p in whole_pieces(slots[comm.rank])
        ]
        self._own = PayloadLayout(codec.form, mine, whole_groups=codec.whole_groups)
        self._stride = max(layout.nbytes for layout in self._layouts)
        self._rows = joined_rows(self._layouts, self._stride)
        self._pending: tuple[Phase, Tensor] | None = None  # with its memory

    @property
    def sent_nbytes(self) -> int:
        """Bytes to other ranks in one gather."""
        return (self._comm.world_size - 1) * self._stride

    def start(self, values: Tensor, step: int) -> None:
        """Encode this rank's ``(k,)`` values and begin to gather; what is still under way is
        waited for and dropped.
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
            dtype=DTYPES[self._dtype],
            module=self._module,
        )
        with self._stats.timed("encode"):
            draws = RngKey(self._codec.seed, self._comm.rank, step % 2**32, stream=STREAM_SECOND)
            bad = self._codec.encode_body(self._kernels, values, self._own, buffer, draws)
            phase.seal(step % 2**32, 0, nonfinite=bad)
        phase.start()
        self._pending = phase, buffer
        self._stats.add_bytes(self.sent_nbytes, self.sent_nbytes)

    def finish(self, out: Tensor, *, keep: bool = False) -> Tensor | None:
        """Wait for all payloads and write the whole to ``(n,)``; NaN if some rank's values are not
        finite.

        Returns:
            With `keep` the payloads, for one more `again`; None without, and where some value is
            not finite.
        """
        phase, buffer = self._wait()
        with self._stats.timed("decode"):
            bad = phase.accept()
            if bad:
                self._stats.nonfinite_buckets += 1
            elif self._decode(buffer, out):
                phase.refuse_unflagged("weights")
                bad = True  # values that the dtype cannot hold
            if bad:
                out.fill_(float("nan"))
        if keep and not bad:
            return buffer
        self._pool.give(buffer)
        return None

    def again(self, buffer: Tensor, out: Tensor) -> None:
        """Write the whole once more, from payloads that `finish` has kept."""
        with self._stats.timed("decode"):
            self._decode(buffer, out)
        self._pool.give(buffer)

    def _decode(self, buffer: Tensor, out: Tensor) -> bool:
        payloads = MixedPayloads(
            [self._arriving(buffer)], self._codec.code, self._dtype, self._rows
        )
        return payloads.decode(self._kernels, out, out.numel())

    def _arriving(self, buffer: Tensor) -> Tensor:
        return buffer[self._stride : (self._comm.world_size + 1) * self._stride]

    def _wait(self) -> tuple[Phase, Tensor]:
        pending, self._pending = self._pending, None
        assert pending is not None  # `start` was called
        pending[0].wait(self._timeout_s)
        return pending
