"""Segment tables, guarded memory, values and tiers for the kernel tests; everything is drawn
from one random seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from reference import codec as ref
from reference import entropy

from gradcomp import _gc

ffi, lib = _gc.ffi, _gc.lib
TIERS = [t for t in range(lib.gc_tier_count()) if lib.gc_tier_supported(t)]
TIER_NAMES = {t: ffi.string(lib.gc_tier_name(t)).decode() for t in TIERS}
GUARD = 0xA5  # what memory that must not be written holds
ARRAY_DTYPES = {ref.F32: np.float32, ref.BF16: np.uint16, ref.F16: np.float16}
SEGMENT = np.dtype(
    [(name, "<u8") for name in ("data", "residual", "codes", "scales", "block")]
    + [(name, "<u4") for name in ("start", "numel", "group_numel", "parameter")]
)
# Around the sizes at which a vector loop, a byte, a Philox superblock, a block sum or a stage ends.
LENGTHS = [*range(6), *(n + d for n in (8, 16, 32, 64, 128, 256, 512) for d in (-1, 0, 1))]
LONG = [1023, 1024, 1025, 2000, 4095, 4096, 4097, 5000, 8200]
GROUPS = [1, 5, 8, 25, 64, 512, 4096, 5000]
# fmt: off
SPECIAL = np.array(
    [
        0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0xBF800000, 0x3F7FFFFF,
        0x3F800001, 0x7F7FFFFF, 0xFF7FFFFF, 0x477FE000, 0x477FF000, 0x38800000, 0x387FFFFF,
        0x33000000, 0x3F808000, 0x3F818000, 0x7F7F8000,
    ],
    np.uint32,
).view(np.float32)
KINDS = [
    "normal", "normal", "tiny", "huge", "zeros", "sparse", "constant", "special", "nonfinite",
    "bits",
]
# fmt: on


class Piece(NamedTuple):
    """A piece of a parameter, as `reference.Piece`, and which parameter."""

    start: int
    numel: int
    group_numel: int
    parameter: int

    @property
    def ref(self) -> ref.Piece:
        return ref.Piece(self.numel, self.group_numel, self.start)


@st.composite
def pieces(draw: Any, lengths: Sequence[int] = (*LENGTHS, *LONG), most: int = 4) -> list[Piece]:
    """Draw one to `most` pieces; one long one at most, so that an example stays quick."""
    out: list[Piece] = []
    for _ in range(draw(st.integers(1, most))):
        numel = draw(st.sampled_from(lengths) if not out else st.sampled_from(LENGTHS))
        last = (2**32 - 1 - numel) // 8
        start = 8 * draw(
            st.sampled_from([0, 0, 1, 3, 64, 625]) | st.integers(0, 300) | st.just(last)
        )
        whole = min(2**32 - 1, max(1, start + numel))
        group = draw(st.sampled_from([*GROUPS, whole, whole]) | st.integers(1, 70))
        out.append(Piece(start, numel, group, draw(st.sampled_from([0, 1, 7, 2**32 - 1]))))
    return out


class Table:
    """Segments of pieces that lie in a tensor, a plane and a payload in any order, with gaps
    between them.

    `bits` and `scales_per_group` are those of a code, `stream_nbytes` where it is entropy-coded.
    Attributes: `rows` for C; the sizes that hold all of them.
    """

    def __init__(
        self,
        parts: Sequence[Piece],
        bits: int,
        scales_per_group: int,
        rng: np.random.Generator,
        stream_nbytes: int = 0,
    ) -> None:
        self.pieces = list(parts)
        self.bits, self.per_group, self.stream_nbytes = bits, scales_per_group, stream_nbytes
        self.rows = np.zeros(len(parts), SEGMENT)
        self.tensor_numel = self.plane_numel = self.block_count = 0
        self.payload_nbytes = 32
        for i in rng.permutation(len(parts)):
            piece, row = parts[i], self.rows[i]
            groups = piece.ref.groups()
            row["start"], row["numel"], row["group_numel"], row["parameter"] = piece
            row["data"] = self.tensor_numel + rng.integers(0, 4)
            row["residual"] = self.plane_numel + rng.integers(0, 4)
            row["block"] = self.block_count + rng.integers(0, 2)
            row["scales"] = self.payload_nbytes + rng.integers(0, 4)
            row["codes"] = row["scales"] + 4 * scales_per_group * len(groups) + rng.integers(0, 4)
            self.tensor_numel = int(row["data"]) + piece.numel
            self.plane_numel = int(row["residual"]) + piece.numel
            self.block_count = int(row["block"]) + sum(
                -(-(g.stop - g.start) // 512) for g in groups
            )
            self.payload_nbytes = int(row["codes"]) + self.code_nbytes(i)

    @property
    def pointer(self) -> Any:
        return ffi.cast("const gc_segment *", self.rows.ctypes.data)

    def code_nbytes(self, i: int) -> int:
        if self.stream_nbytes:
            return entropy.code_nbytes(self.pieces[i].ref, self.stream_nbytes)
        return -(-self.pieces[i].numel * self.bits // 8)

    def _slice(self, field: str, i: int, count: int) -> slice:
        first = int(self.rows[field][i])
        return slice(first, first + count)

    def data(self, i: int) -> slice:
        return self._slice("data", i, self.pieces[i].numel)

    def plane(self, i: int) -> slice:
        return self._slice("residual", i, self.pieces[i].numel)

    def codes(self, i: int) -> slice:
        return self._slice("codes", i, self.code_nbytes(i))

    def scales(self, i: int) -> slice:
        return self._slice("scales", i, 4 * self.per_group * len(self.pieces[i].ref.groups()))

    def put_scales(self, payload: Any, i: int, scales: Any) -> None:
        payload[self.scales(i)] = np.frombuffer(np.asarray(scales, "<f4").tobytes(), np.uint8)

    def get_scales(self, payload: Any, i: int) -> Any:
        return np.frombuffer(payload[self.scales(i)].tobytes(), "<f4")


def guarded(numel: int, dtype: Any = np.uint8, misalign: int = 0) -> Any:
    """Return `numel` guard-filled elements that start `misalign` elements into their memory,
    with guards behind.
    """
    size = np.dtype(dtype).itemsize
    rest = np.full((numel + misalign) * size + 64, GUARD, np.uint8)[misalign * size :]
    return rest[: len(rest) // size * size].view(dtype)


def pointer(array: Any, ctype: str = "void *") -> Any:
    return ffi.cast(ctype, array.ctypes.data)


def pointers(payloads: Sequence[Any]) -> Any:
    return ffi.new("const uint8_t *[]", [pointer(p, "const uint8_t *") for p in payloads])


def values(kind: str, numel: int, dtype: int, rng: np.random.Generator) -> Any:
    """Return a source array of `dtype`."""
    if kind == "bits":
        words = rng.integers(0, 2**32, numel, np.uint32)
        return (
            words.view(np.float32)
            if dtype == ref.F32
            else words.astype(np.uint16).view(ARRAY_DTYPES[dtype])
        )
    x = rng.standard_normal(numel)
    if kind == "tiny":
        x *= 10.0 ** rng.integers(-45, -36, numel) if dtype != ref.F16 else 2.0**-20
    elif kind == "huge":
        x *= 1e38 if dtype != ref.F16 else 2e4
    elif kind == "zeros":
        x = np.where(x > 0, 0.0, -0.0)
    elif kind == "sparse":
        x = np.where(rng.random(numel) < 0.02, x, 0.0)
    elif kind == "constant":
        x[:] = 0.1
    with np.errstate(all="ignore"):
        f = x.astype(np.float32)
        if kind == "special":
            f = rng.choice(SPECIAL, numel).astype(np.float32)
        if kind == "nonfinite" and numel:
            f[rng.integers(0, numel, 1 + numel // 50)] = rng.choice(
                np.float32([np.inf, -np.inf, np.nan])
            )
        elif dtype == ref.F16:
            f = np.clip(f, -65504, 65504)
        elif dtype == ref.BF16:
            f = np.clip(f, np.float32(-3.3895314e38), np.float32(3.3895314e38))
        return ref.from_float32(f, dtype)


def canonical(x: Any) -> Any:
    """Return float32 values with every NaN the canonical one, as kernels write results."""
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32)


@contextmanager
def tier(number: int) -> Iterator[None]:
    """Run on a tier; the one before comes back."""
    before = lib.gc_tier_current()
    assert lib.gc_tier_select(number) == lib.GC_OK
    try:
        yield
    finally:
        lib.gc_tier_select(before)


@contextmanager
def flushing(flushes: bool) -> Iterator[None]:
    """Set whether this thread flushes denormals to zero."""
    assert torch.set_flush_denormal(flushes)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def same_bytes(got: Any, want: Any, number: int) -> None:
    """Assert that two arrays are the same bytes, and say where they are not."""
    a, b = np.ascontiguousarray(got), np.ascontiguousarray(want)
    if a.tobytes() != b.tobytes():
        unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}.get(a.itemsize, np.uint8)
        left, right = a.view(unsigned).ravel(), b.view(unsigned).ravel()
        at = np.flatnonzero(left != right)
        first = [(int(i), hex(left[i]), hex(right[i])) for i in at[:5]]
        raise AssertionError(
            f"tier {TIER_NAMES[number]}: {len(at)} differ, (index, got, want) {first}"
        )
