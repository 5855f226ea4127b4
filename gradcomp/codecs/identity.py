"""Plain values as a codec: fp32, for tests and debugging, or bf16, half the bytes."""

from __future__ import annotations

import torch

from gradcomp.codecs.base import Codec
from gradcomp.kernels import Code
from gradcomp.payload.form import BFLOAT16, PLAIN

_DTYPES = {"fp32": (PLAIN, torch.float32), "bf16": (BFLOAT16, torch.bfloat16)}


class Identity(Codec):
    """The values themselves, as fp32 or as bf16.

    With fp32, averaging equals plain averaging in rank order, bit for bit: the whole machinery
    (layouts, messages, both phases) without loss, for tests and debugging. With bf16 values are
    rounded to nearest even before they are sent and once more where they were averaged (in fp32):
    half the bytes, over transports whose own all_reduce has no bf16, too. With bf16 gradients it is
    not DDP's own average to the bit: sums are fp32 and rounded once here, where DDP adds in bf16 (3
    ranks: up to 21 ulp apart).

    Args:
        dtype: "fp32" or "bf16".

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: str = "fp32") -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {tuple(_DTYPES)}, got {dtype!r}")
        self.dtype = self.second_phase = dtype
        self.form = _DTYPES[dtype][0]

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
