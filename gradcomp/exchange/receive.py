"""What a rank accepts from its peers in one phase: whole, of this step and layout, and encoded
with the common scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from gradcomp.errors import CorruptPayload, PeerMismatch
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.layout import PayloadLayout

_COMPARED = ("module", "codec", "dtype", "numel", "group_numel", "scale_count", "step", "stream")


class Inbox:
    """The payloads of all ranks in one phase of one exchange, where they arrive at every step.

    Args:
        memory: ``(world_size * stride,)`` uint8, what the collective fills.
        stride: bytes from one rank's payload to the next one's.
        layouts: of every rank's payload.
        rank: this one; its own payload is not checked.
        validate: raises CorruptPayload for the body of a payload that no encoder wrote.

    Attributes:
        memory, stride: as they were given.
        tensors: every rank's payload, views of it.
        layouts: theirs.
    """

    def __init__(
        self,
        memory: Tensor,
        stride: int,
        layouts: Sequence[PayloadLayout],
        rank: int,
        validate: Callable[[Tensor, PayloadLayout], None],
    ) -> None:
        self.memory, self.stride, self.layouts = memory, stride, list(layouts)
        self.tensors = [
            memory[k * stride : k * stride + one.nbytes] for k, one in enumerate(layouts)
        ]
        self._validate = validate
        self._views = [tensor.numpy() for tensor in self.tensors]
        self._scales = [
            view[HEADER_NBYTES : HEADER_NBYTES + 4 * one.scale_count]
            for view, one in zip(self._views, layouts, strict=True)
        ]
        self._rank, self._peers = rank, [k for k in range(len(self.layouts)) if k != rank]

    def accept(self, wanted: Callable[[PayloadLayout], wire.Header], bucket: int) -> bool:
        """Check every peer's payload; return True when the values of some peer were not finite.

        Args:
            wanted: the header that this rank would have written of a layout; flags do not count.
            bucket: number, for messages.

        Raises:
            CorruptPayload: bytes that no encoder wrote, and whose they are.
            PeerMismatch: a header of something else.
        """
        nonfinite = False
        for rank in self._peers:
            try:
                header = wire.parse(self._views[rank])
                _check_header(header, rank, wanted(self.layouts[rank]), self._rank)
                if not header.nonfinite:
                    self._validate(self.tensors[rank], self.layouts[rank])
            except CorruptPayload as error:
                raise CorruptPayload(
                    error.check, f"{error.detail} (from rank {rank}, bucket {bucket})"
                ) from None
            nonfinite |= header.nonfinite
        return nonfinite

    def check_shared_scales(self) -> None:
        """Raise PeerMismatch unless all ranks encoded with the scales they agreed on: sums of
        codes mean nothing else.
        """
        first = self._scales[0].tobytes()
        for rank, scales in enumerate(self._scales):
            theirs = scales.tobytes()
            if theirs != first:
                mine, other = self._scales[0].view("<f4"), scales.view("<f4")
                at = int((self._scales[0].view("<u4") != scales.view("<u4")).argmax())
                raise PeerMismatch(
                    "scale", rank, f"{mine[at]:.9g} as number {at}", f"{other[at]:.9g}"
                )


def _check_header(header: wire.Header, rank: int, wanted: wire.Header, own_rank: int) -> None:
    """Raise PeerMismatch unless a peer's header is the one that this rank would have written,
    flags aside.
    """
    if header == wanted:
        return
    for field in _COMPARED:
        expected, got = getattr(wanted, field), getattr(header, field)
        if expected != got:
            raise PeerMismatch(field, rank, expected, got, first=own_rank)
