"""Raw 2-bit codes: what a trainer has packed itself, four values a byte and nothing else, as
payloads the server averages.

The bytes are those of ternary payloads without header and scale: element i in bits 2 * (i % 4) of
byte i // 4, 00 for -1, 01 for 0, 10 for +1. The scale, one number, is the maximum that all workers
have pulled of another key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradcomp.codecs import TernGrad
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES

CODES_A_BYTE = 8 // TernGrad.form.bits
_START = HEADER_NBYTES + 4 * TernGrad.form.scales_per_group  # of the codes in a payload


class RawCodes:
    """Turns raw codes of one shape into payloads.

    Args:
        shape: of the bytes.
        scale_key: key whose maximum is the scale; None: 1.

    Attributes:
        codec: of the payloads.
        payload_shape: of the payloads.
        shape: of the values: four times the last dimension of the bytes.

    Raises:
        ValueError: more codes than a payload holds.
    """

    codec = TernGrad(clip_sigma=None, scale="shared")

    def __init__(self, shape: tuple[int, ...], scale_key: str | None) -> None:
        self.scale_key = scale_key
        self.shape = (*shape[:-1], CODES_A_BYTE * (shape[-1] if shape else 1))
        self._numel = math.prod(self.shape)
        if self._numel >= 2**32:
            raise ValueError(
                f"shape {shape!r} holds {self._numel} codes; a payload holds fewer than 2**32"
            )
        self.payload_shape = (self.codec.payload_nbytes(self._numel),)

    def payload(self, codes: Tensor, scale: float, step: int) -> Tensor:
        """Return a payload, ``(nbytes,)`` uint8; it is flagged as non-finite if the scale is.

        Args:
            codes: bytes, uint8, contiguous.
            scale: what code +1 stands for.
            step: of the payload's header.
        """
        nonfinite = not math.isfinite(scale)
        payload = torch.zeros(self.payload_shape, dtype=torch.uint8)
        if self._numel:
            payload[HEADER_NBYTES:_START].view(torch.float32)[0] = 0.0 if nonfinite else scale
            payload[_START:] = codes.view(-1)
        flags, scales = nonfinite * wire.FLAG_NONFINITE, int(self._numel > 0)
        group_numel = max(1, self._numel)
        wire.seal(
            payload.numpy(),
            wire.Header(
                TernGrad.form.code, 0, flags, self._numel, group_numel, scales, step % 2**32, 0
            ),
        )
        return payload
