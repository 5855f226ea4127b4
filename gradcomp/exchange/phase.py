"""One collective of an exchange: the payloads that a rank sends and receives.

A phase handles bytes, not values. It cuts an encoded bucket into messages, writes their headers,
starts the collective and waits for it. Then it checks that every received payload is complete, of
this step and layout, and encoded with the shared scales.
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
    """Constants of the first or the second phase.

    Attributes:
        name: name in statistics and errors.
        channel: channel of the collective.
        stream: number of the random stream, in headers.
    """

    name: str
    channel: Channel
    stream: int


FIRST = Kind("first_phase", Channel.FIRST, STREAM_FIRST)
SECOND = Kind("second_phase", Channel.SECOND, STREAM_SECOND)


class Phase:
    """The payloads of all ranks in one collective. Every step reuses their buffers.

    Args:
        kind: `FIRST` or `SECOND`.
        comm: communicator.
        stats: counts the seconds of waiting.
        send: ``(n,)`` uint8: the payloads that this rank sends, concatenated.
        outgoing: layouts of these payloads: one for all ranks (all_gather), or one per rank
            (all_to_all).
        recv: ``(world_size * stride,)`` uint8 receive buffer.
        incoming: layout of the payload from every rank.
        validate: raises CorruptPayload for a payload body that no encoder writes.
        whole: layout of `send` if it is one payload that is cut into the `outgoing` messages.
        stride: bytes from one rank's payload in `recv` to the next; by default the size of the
            first payload.
        dtype: number of the values' dtype in headers; 0: none.
        module: number of the FSDP module in headers; 0 without FSDP.

    Attributes:
        tensors: the payload from every rank, ``(nbytes,)`` uint8 views of `recv`.
        layouts: their layouts.
        recv, stride: the arguments.
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
        bytes_sent[ends[-1] :] = 0  # messages depend on the values alone, padding included
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
        """Write the headers of all messages, after cutting the payload into them if necessary.

        Args:
            step: training step, modulo 2**32.
            bucket: number of the bucket, for errors.
            nonfinite: set the non-finite flag, since a value on this rank is not finite.
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
        """Wait for the collective.

        Raises:
            PeerLost: a rank is gone, or did not send for `timeout_s` seconds.
        """
        work, self._work = self._work, None
        assert work is not None  # it was started
        begun = time.perf_counter()
        with peers_answer(self._kind.name, self._bucket):
            work.wait(timeout_s)
        self._stats.add_seconds(self._kind.name, time.perf_counter() - begun)

    def accept(self) -> bool:
        """Check the payloads of all other ranks; return True if the values of any rank, this one
        included, are flagged as non-finite.

        Raises:
            CorruptPayload: bytes that no encoder writes; the message has the rank.
            PeerMismatch: a header of another step, codec or layout.
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
        """Raise PeerMismatch unless the payloads of all ranks have the same scales. Sums of codes
        with different scales would be meaningless.
        """
        scales = [
            payload.numpy()[HEADER_NBYTES : HEADER_NBYTES + 4 * layout.scale_count]
            for payload, layout in zip(self.tensors, self.layouts, strict=True)
        ]
        first = scales[0].tobytes()
        for rank, peer_scales in enumerate(scales):
            if peer_scales.tobytes() != first:
                expected, got = scales[0].view("<f4"), peer_scales.view("<f4")
                at = int((scales[0].view("<u4") != peer_scales.view("<u4")).argmax())
                raise PeerMismatch(
                    "scale", rank, f"{expected[at]:.9g} as number {at}", f"{got[at]:.9g}"
                )

    def refuse_unflagged(self, where: str = "") -> None:
        """Raise CorruptPayload if a payload without the non-finite flag makes the averages
        non-finite; `where` is for the message, by default the bucket's number.
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
        """Raise PeerMismatch unless a header, except for its flags, equals the one that this rank
        would have written for that payload.
        """
        wanted = self._header(self.layouts[rank])
        if header == wanted:
            return
        for field in _COMPARED:
            expected, got = getattr(wanted, field), getattr(header, field)
            if expected != got:
                raise PeerMismatch(field, rank, expected, got, first=self._comm.rank)
