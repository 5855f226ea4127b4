"""Magnitude of a payload: bounds the averages of payloads, and finds NaN or Inf in a payload whose
non-finite flag is not set.
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
    """Return an upper bound of |decoded values|, from a payload's scales and uncompressed values;
    NaN or Inf if one of these is.

    Args:
        payload: ``(layout.nbytes,)`` uint8, with checked header and scales.
        layout: layout of the payload.
    """
    largest = 0.0
    for values, reach in _numbers(payload.numpy(), layout):
        bound = float(np.abs(values).max(initial=0.0)) * reach
        if math.isnan(bound):
            return bound
        largest = max(largest, bound)
    return largest


def _numbers(
    data: NDArray[np.uint8], layout: PayloadLayout
) -> Iterator[tuple[NDArray[np.float32], float]]:
    """Yield (float32 array, reach) of every piece: its scales, or its values if it has no scales.
    |Decoded values| are at most `reach` times the array's largest magnitude.
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
    """Raise CorruptPayload if a payload has a value that is not finite: a correct sender sets the
    non-finite flag.

    This reads every byte, so it is called only after a decoder has written a non-finite value.

    Args:
        payloads: payloads without the flag, one per rank.
        layouts: their layouts.
        where: text that follows the rank in the message.
    """
    for rank, (payload, layout) in enumerate(zip(payloads, layouts, strict=True)):
        if not math.isfinite(magnitude(payload, layout)):
            sender = f" (from rank {rank}{where})" if where else ""
            raise CorruptPayload(
                "value", f"NaN or Inf in a payload without the non-finite flag{sender}"
            )
