"""Plain values as a codec: fp32 for tests and debugging, bf16 for the second phase of an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from gradcomp.codecs.base import Codec
from gradcomp.kernels import Kernels, Payloads, Residuals
from gradcomp.payload.form import BFLOAT16, PLAIN
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import RngKey


class Identity(Codec):
    """The values themselves as fp32: averaging over it equals plain averaging in rank order, bit for bit.

    It runs the whole machinery (layouts, messages, both phases) without loss, for tests and debugging.
    """

    form = PLAIN
    second_phase = "fp32"
    _value_dtype: ClassVar[torch.dtype] = torch.float32

    def options(self) -> dict[str, object]:
        return {}

    def group_numel(self, shape: tuple[int, ...]) -> int:
        numel = 1
        for size in shape:
            numel *= size
        return max(1, numel)

    def encode_packed(
        self,
        kernels: Kernels,
        values: Tensor,
        layout: PayloadLayout,
        payload: Tensor,
        key: RngKey,
        residuals: Residuals,
        kept: Tensor | None = None,
    ) -> bool:
        return kernels.encode(self.form.kernel, values, layout.packed, payload, value_dtype=self._value_dtype)

    def payloads(self, tensors: Sequence[Tensor], dtype: torch.dtype) -> Payloads:
        return Payloads(tensors, self.form.kernel, dtype, value_dtype=self._value_dtype)

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Accept any value: NaN and Inf are what they are."""


class Bfloat16Values(Identity):
    """Values rounded to bfloat16 (nearest even): the "bf16" second phase."""

    form = BFLOAT16
    _value_dtype = torch.bfloat16
