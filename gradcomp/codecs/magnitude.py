"""The largest number in a payload: it bounds what payloads average to, and finds the NaN that no
flag announced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import CorruptPayload
from gradcomp.payload.layout import PayloadLayout


def magnitude(payload: Tensor, layout: PayloadLayout) -> float:
    """Return a bound of decoded values, from a payload's scales and plain values; NaN or Inf if one
    of these is.

    Args:
        payload: ``(layout.nbytes,)`` uint8, whose header and scales have been checked.
        layout: of the payload.
    """
    largest = 0.0
    for values, reach in _numbers(payload.numpy(), layout):
        found = float(np.abs(values).max(initial=0.0)) * reach
        if math.isnan(found):
            return found
        largest = max(largest, found)
    return largest


def _numbers(
    data: NDArray[np.uint8], layout: PayloadLayout
) -> Iterator[tuple[NDArray[np.float32], float]]:
    """Yield the scales, or else the values, of every piece as float32, and how many times these
    decoded values reach.
    """
    for piece, scales, codes in zip(
        layout.pieces, layout.scale_offsets, layout.code_offsets, strict=True
    ):
        form = layout.form_of(piece)
        if form.scales_per_group:
            yield (
                data[scales : scales + 4 * form.scales_per_group * piece.group_count].view("<f4"),
                form.reach,
            )
        elif form.bits == 32:
            yield data[codes : codes + 4 * piece.numel].view("<f4"), 1.0
        else:
            halves = data[codes : codes + 2 * piece.numel].view("<u2").astype(np.uint32)
            yield (halves << 16).view(np.float32), 1.0


def refuse_unflagged(
    payloads: Sequence[Tensor], layouts: Sequence[PayloadLayout], where: str = ""
) -> None:
    """Raise CorruptPayload if a payload holds a value that is not finite: its sender would have set
    the non-finite flag.

    A decoder finds such a value in what it writes, so this looks at every byte only where that has
    happened already.

    Args:
        payloads: without the flag, one a rank.
        layouts: theirs.
        where: appended to the rank in the message.
    """
    for rank, (payload, layout) in enumerate(zip(payloads, layouts, strict=True)):
        if not math.isfinite(magnitude(payload, layout)):
            sender = f" (from rank {rank}{where})" if where else ""
            raise CorruptPayload(
                "value", f"NaN or Inf in a payload without the non-finite flag{sender}"
            )
