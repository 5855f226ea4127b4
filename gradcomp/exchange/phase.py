"""One collective of an exchange: the payloads that a rank sends and those that it receives.

A phase knows bytes, not values: it cuts an encoded bucket into messages, seals them, starts the
collective, waits for it, and accepts what has arrived if it is whole, of this step and layout, and
encoded with the common scales.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.errors import CorruptPayload, PeerMismatch, peers_answer
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import host
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.layout import PayloadLayout, message_copies
from gradcomp.payload.rng import STREAM_FIRST, STREAM_SECOND

_COMPARED = ("module", "codec", "dtype", "numel", "group_numel", "scale_count", "step", "stream")
_Validate = Callable[[Tensor, PayloadLayout], None]


@dataclass(frozen=True)
class Kind:
    """What tells the two phases of an exchange apart.

    Attributes:
        name: in statistics and errors.
        channel: of the collective.
        stream: number in headers.
    """

    name: str
    channel: Channel
    stream: int


FIRST = Kind("first_phase", Channel.FIRST, STREAM_FIRST)
SECOND = Kind("second_phase", Channel.SECOND, STREAM_SECOND)


class Phase:
    """The payloads of all ranks in one collective; their memory is used again at every step.

    Args:
        kind: `FIRST` or `SECOND`.
        comm: moves the bytes.
        stats: counts the seconds of waiting.
        send: uint8, what this rank sends: its payloads, one after the other.
        outgoing: layouts of these: one payload that goes to every rank (all_gather), or one for
            each (all_to_all).
        whole: layout of `send`, where it is one payload and `outgoing` are parts of it.
        recv: ``(world_size * stride,)`` uint8, what the collective fills.
        incoming: layout of every rank's payload.
        stride: bytes from one rank's payload in `recv` to the next one's; by default the size of
            the first.
        validate: raises CorruptPayload for the body of a payload that no encoder writes.
        dtype: number of the values' dtype, for headers; 0: none.
        module: number of the FSDP module, for headers; 0 elsewhere.

    Attributes:
        tensors: every rank's payload, views of `recv`.
        layouts: theirs.
        recv, stride: as given.
    """

    def __init__(
        self,
        kind: Kind,
        comm: Communicator,
        stats: Stats,
        send: Tensor,
        outgoing: Sequence[PayloadLayout],
        recv: Tensor,
        incoming: Sequence[PayloadLayout],
        validate: _Validate,
        *,
        whole: PayloadLayout | None = None,
        stride: int | None = None,
        dtype: int = 0,
        module: int = 0,
    ) -> None:
        self._kind, self._comm, self._stats, self._validate = kind, comm, stats, validate
        stream = kind.stream | module << wire.MODULE_SHIFT
        self._origin = wire.Header(0, dtype, wire.FLAG_SEGMENTED, 0, 0, 0, 0, stream)
        self.recv = recv
        ends = list(accumulate(one.nbytes for one in outgoing))
        self._send, self._cut = send, None
        if whole is not None and outgoing[0] is not whole:
            self._send = host.empty(ends[-1])
            self._cut = send, message_copies(whole, outgoing, [0, *ends[:-1]])
        bytes_sent = self._send.numpy()
        bytes_sent[ends[-1] :] = 0  # what is sent depends on the values alone
        self._messages = [
            (bytes_sent[end - one.nbytes : end], one)
            for end, one in zip(ends, outgoing, strict=True)
        ]
        self.stride, self.layouts = stride or incoming[0].nbytes, list(incoming)
        self.tensors = [
            recv[k * self.stride : k * self.stride + one.nbytes] for k, one in enumerate(incoming)
        ]
        self._bucket, self._nonfinite = 0, False
        self._work: Work | None = None

    def seal(self, step: int, bucket: int, *, nonfinite: bool) -> None:
        """Cut the payload into messages, where these are parts of it, and write their headers.

        Args:
            step: of training, modulo 2**32.
            bucket: number, for errors.
            nonfinite: the values encoded here are not finite, which every rank is to learn.
        """
        self._origin = self._origin._replace(step=step)
        self._bucket, self._nonfinite = bucket, nonfinite
        if self._cut is not None:
            host.copy(self._send, *self._cut)
        for message, layout in self._messages:
            wire.seal(message, self._header(layout, nonfinite=nonfinite))

    def start(self) -> None:
        """Start the collective."""
        comm, channel = self._comm, self._kind.channel
        with peers_answer(self._kind.name, self._bucket):
            if len(self._messages) == 1:
                self._work = comm.start_all_gather(self._send, self.recv, channel)
            else:
                sent = [one.nbytes for _, one in self._messages]
                received = [one.nbytes for one in self.layouts]
                self._work = comm.start_all_to_all(self._send, sent, self.recv, received, channel)

    def wait(self, timeout_s: float) -> None:
        """Wait until every rank's payload has arrived.

        Raises:
            PeerLost: a rank is gone, or silent for `timeout_s` seconds.
        """
        work, self._work = self._work, None
        assert work is not None  # it was started
        begun = time.perf_counter()
        with peers_answer(self._kind.name, self._bucket):
            work.wait(timeout_s)
        self._stats.add_seconds(self._kind.name, time.perf_counter() - begun)

    def accept(self) -> bool:
        """Check every peer's payload; return True when the values of some rank, this one
        included, are not finite.

        Raises:
            CorruptPayload: bytes that no encoder writes, and from which rank.
            PeerMismatch: a header of something else.
        """
        nonfinite, own = self._nonfinite, self._comm.rank
        for rank, (payload, layout) in enumerate(zip(self.tensors, self.layouts, strict=True)):
            if rank == own:
                continue
            try:
                header = wire.parse(payload.numpy())
                self._check_header(header, rank)
                if not header.nonfinite:
                    self._validate(payload, layout)
            except CorruptPayload as error:
                where = f"(from rank {rank}, bucket {self._bucket})"
                raise CorruptPayload(error.check, f"{error.detail} {where}") from None
            nonfinite |= header.nonfinite
        return nonfinite

    def check_shared_scales(self) -> None:
        """Raise PeerMismatch unless all ranks have encoded with the scales they agreed on:
        otherwise sums of codes mean nothing.
        """
        scales = [
            payload.numpy()[HEADER_NBYTES : HEADER_NBYTES + 4 * layout.scale_count]
            for payload, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        first = scales[0].tobytes()
        for rank, theirs in enumerate(scales):
            if theirs.tobytes() != first:
                mine, other = scales[0].view("<f4"), theirs.view("<f4")
                at = int((scales[0].view("<u4") != theirs.view("<u4")).argmax())
                raise PeerMismatch(
                    "scale", rank, f"{mine[at]:.9g} as number {at}", f"{other[at]:.9g}"
                )

    def refuse_unflagged(self, where: str = "") -> None:
        """Raise CorruptPayload if averages of these payloads are not finite because of a payload
        without the non-finite flag.

        Args:
            where: for the message, in place of the bucket's number.
        """
        refuse_unflagged(self.tensors, self.layouts, f", {where or f'bucket {self._bucket}'}")

    def _header(self, layout: PayloadLayout, *, nonfinite: bool = False) -> wire.Header:
        return self._origin._replace(
            codec=layout.form.code,
            flags=nonfinite * wire.FLAG_NONFINITE | wire.FLAG_SEGMENTED,
            numel=layout.numel,
            scale_count=layout.scale_count,
        )

    def _check_header(self, header: wire.Header, rank: int) -> None:
        """Raise PeerMismatch unless a peer's header is the one that this rank would have written,
        flags aside.
        """
        wanted = self._header(self.layouts[rank])
        if header == wanted:
            return
        for field in _COMPARED:
            expected, got = getattr(wanted, field), getattr(header, field)
            if expected != got:
                raise PeerMismatch(field, rank, expected, got, first=self._comm.rank)
