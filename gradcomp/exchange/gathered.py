"""An all_gather of values that ranks hold parts of, packed: what a second phase does with
averages, by itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from gradcomp import kernels
from gradcomp.codecs import Codec
from gradcomp.codecs.base import plain_payloads
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import peers_answer
from gradcomp.exchange.receive import Inbox
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, native
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout, joined_tables
from gradcomp.payload.pieces import Piece, Slot, whole_pieces
from gradcomp.payload.rng import STREAM_SECOND, RngKey


class Rooms:
    """Memory for gathers that are under way, used again by whoever comes next: as many rooms as
    there are at a time.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """Return ``(nbytes,)`` uint8 or more of it."""
        for n, room in enumerate(self._free):
            if room.numel() >= nbytes:
                return self._free.pop(n)
        if self._free:
            self._free.pop()  # too small: replaced by what is made now
        return torch.empty(nbytes, dtype=torch.uint8)

    def give(self, room: Tensor) -> None:
        """Take memory back."""
        self._free.append(room)


class Gathered:
    """Flat values of which every rank holds a run, gathered by all as payloads of a codec. Every
    rank decodes every payload, its own, too.

    Args:
        codec: takes no residuals and measures nothing beforehand.
        slots: what each rank holds, with its places in the whole.
        first: this rank's values begin there in the whole.
        comm, stats, timeout_s: as they say.
        dtype, device: of the values.
        rooms: where payloads stand meanwhile.
        module: number of the FSDP module, for headers.
    """

    def __init__(
        self,
        codec: Codec,
        slots: Sequence[Sequence[Slot]],
        first: int,
        comm: Communicator,
        stats: Stats,
        rooms: Rooms,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        timeout_s: float = 300.0,
        module: int = 0,
    ) -> None:
        self._codec, self._comm, self._stats, self._rooms = codec, comm, stats, rooms
        self._timeout_s, self._dtype, self._kernels = timeout_s, dtype, kernels.of(device)
        self._stream = STREAM_SECOND | module << wire.MODULE_SHIFT
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
        self._tables = joined_tables(self._layouts, self._stride)
        self._work: Work | None = None
        self._room: Tensor | None = None

    @property
    def sent_nbytes(self) -> int:
        """Bytes to other ranks in one gather."""
        return (self._comm.world_size - 1) * self._stride

    def start(self, values: Tensor, step: int) -> None:
        """Encode this rank's ``(k,)`` values and begin to gather; what is still under way is
        waited for and dropped.
        """
        if self._work is not None:
            self._rooms.give(self._wait())
        self._step = step % 2**32
        room = self._rooms.take((self._comm.world_size + 1) * self._stride)
        self._room, send = room, room[: self._stride]
        with self._stats.timed("encode"):
            key = RngKey(
                seed=self._codec.seed, rank=self._comm.rank, step=self._step, stream=STREAM_SECOND
            )
            self._bad = self._codec.encode_body(self._kernels, values, self._own, send, key)
            wire.seal(
                send.numpy()[: self._own.nbytes], self._header(self._own, nonfinite=self._bad)
            )
            send[self._own.nbytes :].zero_()  # what goes out depends on the values alone
        with peers_answer("second_phase", 0):
            self._work = self._comm.start_all_gather(send, self._arriving(room), Channel.SECOND)
        self._stats.add_bytes(self.sent_nbytes, self.sent_nbytes)

    def finish(self, out: Tensor, *, keep: bool = False) -> Tensor | None:
        """Wait for all payloads and write the whole to ``(n,)``; NaN if some rank's values are not
        finite.

        Returns:
            With `keep` the payloads, for one more `again`; None without, and where some value is
            not finite.
        """
        room = self._wait()
        with self._stats.timed("decode"):
            finite = self._decode(self._arriving(room), out)
        if keep and finite:
            return room
        self._rooms.give(room)
        return None

    def again(self, room: Tensor, out: Tensor) -> None:
        """Write the whole once more, from payloads that `finish` has kept."""
        with self._stats.timed("decode"):
            self._sum(self._arriving(room), out)
        self._rooms.give(room)

    def _decode(self, arrived: Tensor, out: Tensor) -> bool:
        """Return whether all values are finite."""
        inbox = Inbox(
            arrived, self._stride, self._layouts, self._comm.rank, self._codec.validate_packed
        )
        bad = inbox.accept(partial(self._header, nonfinite=False), 0) or self._bad
        if bad:
            self._stats.nonfinite_buckets += 1
        elif self._sum(arrived, out):
            refuse_unflagged(inbox.tensors, inbox.layouts, ", weights")
            bad = True  # values that the dtype cannot hold
        if bad:
            out.fill_(float("nan"))
        return not bad

    def _sum(self, arrived: Tensor, out: Tensor) -> bool:
        bad = self._kernels.sum_decode(
            self._codec.payloads([arrived], self._dtype), self._tables[0], out, out.numel()
        )
        return bad | self._kernels.sum_decode(
            plain_payloads([arrived], self._dtype), self._tables[1], out, out.numel()
        )

    def _arriving(self, room: Tensor) -> Tensor:
        return room[self._stride : (self._comm.world_size + 1) * self._stride]

    def _wait(self) -> Tensor:
        work, room = self._work, self._room
        assert work is not None and room is not None  # `start` was called
        self._work = self._room = None
        begun = time.perf_counter()
        with peers_answer("second_phase", 0):
            work.wait(self._timeout_s)
        self._stats.add_seconds("second_phase", time.perf_counter() - begun)
        return room

    def _header(self, layout: PayloadLayout, *, nonfinite: bool) -> wire.Header:
        flags = nonfinite * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED
        dtype = native.DTYPES[self._dtype]
        return wire.Header(
            layout.form.code,
            dtype,
            flags,
            layout.numel,
            0,
            layout.scale_count,
            self._step,
            self._stream,
        )
