"""Plain values as a codec: fp32 for tests and debugging, bf16 for the second phase of an exchange."""

from __future__ import annotations

from collections.abc import Sequence

from gradcomp.codecs.base import Codec
from gradcomp.kernels import native
from gradcomp.payload.form import BFLOAT16, PLAIN
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import RngKey


class Identity(Codec):
    """The values themselves as fp32: averaging over it equals plain averaging in rank order, bit for bit.

    It runs the whole machinery (layouts, messages, both phases) without loss, for tests and debugging.
    """

    form = PLAIN
    _value_dtype = 0

    def options(self) -> dict[str, object]:
        return {}

    def group_numel(self, shape: tuple[int, ...]) -> int:
        numel = 1
        for size in shape:
            numel *= size
        return max(1, numel)

    def encode_packed(
        self, src: int, dtype: int, layout: PayloadLayout, payload: int, key: RngKey, old: int, new: int
    ) -> bool:
        return native.values_encode(src, dtype, layout.packed, self._value_dtype, payload)

    def payloads(self, addresses: Sequence[int], dtype: int) -> native.Payloads:
        return native.Payloads(addresses, "values", dtype, value_dtype=self._value_dtype)

    def validate_packed(self, payload: int, layout: PayloadLayout) -> None:
        """Accept any value: NaN and Inf are what they are."""


class Bfloat16Values(Identity):
    """Values rounded to bfloat16 (nearest even): the "bf16" second phase."""

    form = BFLOAT16
    _value_dtype = 1
