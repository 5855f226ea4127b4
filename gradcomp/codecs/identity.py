"""Uncompressed values as a codec: fp32, for tests and debugging, or bf16, with half the bytes."""

from __future__ import annotations

import torch

from gradcomp.codecs.base import Codec
from gradcomp.codecs.checks import dtype_name
from gradcomp.kernels import Code
from gradcomp.payload.form import BFLOAT16, PLAIN

_DTYPES = {"fp32": (PLAIN, torch.float32), "bf16": (BFLOAT16, torch.bfloat16)}


class Identity(Codec):
    """Values without codes, as fp32 or bf16.

    With fp32, averages equal plain averages in rank order, bit for bit. Use it to test layouts,
    messages and both phases without loss. With bf16, values are rounded to nearest even before they
    are sent, averaged in fp32, and rounded again. This halves the bytes, also on transports whose
    all_reduce does not support bf16. For bf16 gradients the result differs from DDP's average: sums
    are fp32 and rounded once here, while DDP adds in bf16 (3 ranks: up to 21 ulp apart).

    Args:
        dtype: dtype of the values in payloads: "fp32" or "float32", "bf16" or "bfloat16", or
            torch's.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: str | torch.dtype = "fp32") -> None:
        name = dtype_name(dtype)
        if name not in _DTYPES:
            raise ValueError(f"dtype must be one of {tuple(_DTYPES)}, got {dtype!r}")
        self.dtype = self.second_phase = str(name)
        self.form = _DTYPES[self.dtype][0]

    def options(self) -> dict[str, object]:
        return {} if self.dtype == "fp32" else {"dtype": self.dtype}

    def group_numel(self, shape: tuple[int, ...]) -> int:
        numel = 1
        for size in shape:
            numel *= size
        return max(1, numel)

    @property
    def code(self) -> Code:
        return Code(self.form.kernel, dtype=_DTYPES[self.dtype][1])
