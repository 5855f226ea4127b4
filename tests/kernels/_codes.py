"""The codes of the kernel tests: what the reference makes of each, how kernel sets and C are called
for it, and what is drawn at random.

A new code is a row in `FAMILIES`, and a branch of `encoded`, `decoded` and `call_encode` where it
differs from the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from _shadow import ShadowKernels
from _tables import (
    ARRAY_DTYPES,
    KINDS,
    SPECIAL,
    TIER_NAMES,
    TIERS,
    Piece,
    Table,
    canonical,
    ffi,
    guarded,
    lib,
    pointer,
    pointers,
    tier,
    values,
)
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from reference import codec as ref
from reference import entropy
from reference.payload import FED_BACK

from gradcomp import kernels
from gradcomp.kernels import tables
from gradcomp.kernels.native import NativeKernels

NULL = ffi.NULL
KEY = ref.Key()
WORLDS = [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 1000, 16384, 32767]


# ---- the codes -----------------------------------------------------------------------------------
class Code(NamedTuple):
    """A way to write values.

    Attributes:
        name: of the kernels: ``gc_NAME_encode``.
        bits, per_group: of an element; scales of a group.
        top: the largest code that an encoder writes.
        forbidden: a code that fits into the bits and that no encoder writes; -1: there is none.
        option: what its kernels take to tell codes of one name apart.
    """

    name: str
    bits: int
    per_group: int
    top: int = 0
    forbidden: int = -1
    option: tuple[float, ...] = ()

    @property
    def decoder(self) -> str:
        return "ternary" if self.name == "nearest" else self.name

    @property
    def feeds_back(self) -> bool:
        return self.name in ("onebit", "block", "nearest", "entropy")

    @property
    def stream_nbytes(self) -> int:
        return int(self.option[0]) if self.name == "entropy" else 0


def lanes(world: int) -> Code:
    bits = ref.lane_bits(world)
    above = 2 * world + 1
    return Code("lanes", bits, 1, 2 * world, above if above < 1 << bits else -1, (world, bits))


TERNARY, ONEBIT = Code("ternary", 2, 1, 2, 3), Code("onebit", 1, 2, 1)
NEAREST = [Code("nearest", 2, 1, 2, 3, (step,)) for step in (1.8, 0.3, 1e30)]
BLOCKS = [
    Code("block", 2, 1, 3, -1, (2,)),
    Code("block", 4, 1, 14, 15, (4,)),
    Code("block", 8, 1, 254, 255, (8,)),
]
ENTROPY = [Code("entropy", 0, 1, option=(nbytes,)) for nbytes in (1126, 512, 819, 2048)]
VALUES = [Code("values", 32, 0, option=(ref.F32,)), Code("values", 16, 0, option=(ref.BF16,))]
FAMILIES = {
    "ternary": [TERNARY],
    "nearest": NEAREST,
    "onebit": [ONEBIT],
    "block": BLOCKS,
    "entropy": ENTROPY,
    "values": VALUES,
    "lanes": [lanes(world) for world in WORLDS],
}


def code_of(family: str, rng: np.random.Generator) -> Code:
    return FAMILIES[family][int(rng.integers(len(FAMILIES[family])))]


@np.errstate(all="ignore")
def encoded(
    code: Code,
    x: Any,
    piece: ref.Piece,
    *,
    scales: Any,
    key: ref.Key,
    before: Any,
    means: Any,
    decay: float,
) -> tuple[Any, Any, Any, bool]:
    """Return what the reference writes: scales, codes, new residual, whether a value is not
    finite. `scales`, `key`: given to ternary codes; the rest to codes with error feedback.
    """
    seen = ref.to_float32(x) if before is None else ref.to_float32(x) + before
    left = seen
    if code.name == "ternary":
        codes = ref.ternary_encode(x, scales, piece, key)
    elif code.feeds_back:
        encode_codes, _ = FED_BACK[code.name]
        option = means if code.name == "onebit" else code.option[0]
        scales, codes, left = encode_codes(x, piece, option, before, decay)
    else:
        narrow = ref.from_float32(seen, int(code.option[0]))
        codes, seen = np.frombuffer(narrow.tobytes(), np.uint8), ref.to_float32(narrow)
    return canonical(scales).ravel(), codes, canonical(left), not np.isfinite(seen).all()


def decoded(code: Code, codes: Any, scales: Any, piece: ref.Piece) -> Any:
    """Return what the reference decodes of one payload whose values are added as floats."""
    if code.feeds_back:
        _, decode_codes = FED_BACK[code.name]
        return decode_codes(codes, scales, piece, *(code.option or (None,)))
    return ref.to_float32(codes.copy().view(ARRAY_DTYPES[code.option[0]]))


def average(code: Code, codes: list[Any], scales: list[Any], piece: ref.Piece, shared: bool) -> Any:
    """Return what the reference decodes of several payloads."""
    if code.decoder == "ternary":
        return ref.ternary_sum_decode(codes, scales, piece, shared)
    if code.name == "lanes":
        return ref.lanes_decode(codes[0], scales[0], piece, int(code.option[0]))
    pairs = zip(codes, scales, strict=True)
    return ref.float_average([decoded(code, one, scale, piece) for one, scale in pairs])


# ---- calls ---------------------------------------------------------------------------------------
def flag() -> Any:
    return ffi.new("uint32_t *")


def check(status: int) -> None:
    assert ffi.string(lib.gc_status_name(status)) == b"GC_OK"


def c_key(key: ref.Key) -> Any:
    return ffi.new("gc_rng_key *", (key.seed, key.rank, key.step, key.stream))[0]


def call_encode(
    code: Code,
    source: Any,
    dtype: int,
    rows: Any,
    count: int,
    payload: Any,
    seen: Any,
    *,
    planes: tuple[Any, Any, Any] = (NULL, NULL, NULL),
    decay: float = 1.0,
    dropped: Any = NULL,
    means: Any = None,
    key: ref.Key = KEY,
) -> int:
    """Call an encoder and return its status; `planes` are those of old, new and kept residuals."""
    more: tuple[Any, ...] = code.option
    if code.feeds_back:
        more = (*more, *planes, decay, dropped)
    if code.name == "onebit":
        more = (*more, NULL if means is None else ffi.new("float[2]", means))
    last = (c_key(key), seen) if code.name == "ternary" else (seen,)
    function = getattr(lib, f"gc_{code.name}_encode")
    return int(function(source, dtype, rows, count, *more, payload, *last))


def call_decode(
    code: Code,
    payloads: Any,
    payload_count: int,
    rows: Any,
    count: int,
    out: Any,
    dtype: int,
    flags: int,
    seen: Any,
    shared: bool = False,
) -> int:
    """Call a decoder and return its status."""
    last = rows, count, out, dtype, flags, seen
    if code.name == "lanes":
        return int(lib.gc_lanes_decode(payloads[0], *code.option, *last))
    option = (shared,) if code.decoder == "ternary" else code.option
    function = getattr(lib, f"gc_{code.decoder}_sum_decode")
    return int(function(payloads, payload_count, *option, *last))


def call_validate(code: Code, payload: Any, rows: Any, count: int) -> int:
    """Call a validator and return its status."""
    option = () if code.decoder == "ternary" else code.option
    return int(getattr(lib, f"gc_{code.decoder}_validate")(payload, *option, rows, count))


def sum_lanes(payloads: list[Any], source: Table, target: Table, code: Code) -> Any:
    """Return a payload of the sums of ternary codes."""
    out = guarded(target.payload_nbytes)
    rows = source.pointer, target.pointer, len(source.pieces), code.option[1]
    into = pointer(out, "uint8_t *")
    check(lib.gc_ternary_sum_lanes(pointers(payloads), len(payloads), *rows, into))
    return out


# ---- kernel sets ---------------------------------------------------------------------------------
class Row(NamedTuple):
    """A kernel set that tests run.

    Attributes:
        name: of the row.
        kernels: the set.
        tier: of the CPU meanwhile.
        part: tests of many cases run one in so many, where copies to the set's memory and back
            take longer than all else.
    """

    name: str
    kernels: kernels.Kernels
    tier: int
    part: int = 1

    def __str__(self) -> str:
        return self.name


def sets() -> list[Row]:
    """Return the kernel sets that this process tests: the Triton kernels alone where
    GRADCOMP_TRITON is "cuda", on a GPU, or "interpreted", by Triton's interpreter.
    """
    triton = os.environ.get("GRADCOMP_TRITON")
    if triton is None:
        cpu = kernels.of(kernels.CPU)
        tiers = [Row(f"cpu {TIER_NAMES[number]}", cpu, number) for number in TIERS]
        return [*tiers, Row("shadow", ShadowKernels(), TIERS[-1], part=10)]
    from gradcomp.kernels.cuda import TritonKernels

    device = torch.device("cpu" if triton == "interpreted" else "cuda:0")
    return [Row(f"triton {triton}", TritonKernels(device), TIERS[-1], part=10)]


SETS = sets()
# kernels that run in the calling thread, or on a device; the interpreter's are NumPy's operations,
# in the thread's floating-point environment and one payload at a time
COMPILED = [row for row in SETS if row.name != "triton interpreted"]


@contextmanager
def running(row: Row) -> Iterator[kernels.Kernels]:
    """Run on a kernel set, whose values are all in its memory."""
    with tier(row.tier):
        yield row.kernels
    assert not getattr(row.kernels, "counts", {}).get("host values")


def tensor(array: Any) -> torch.Tensor:
    """Return the memory of an array as a tensor; uint16 is bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@contextmanager
def on(kernel_set: kernels.Kernels, *arrays: Any) -> Iterator[list[Any]]:
    """Yield tensors with the values of arrays in memory of a kernel set, as far from multiples of
    64 bytes as the arrays begin; afterwards the arrays have what is there then.

    None for None; an array that is given twice is one tensor. The CPU's set works on the arrays
    themselves.
    """
    if isinstance(kernel_set, NativeKernels):
        yield [None if array is None else tensor(array) for array in arrays]
        return
    made = {}
    for array in arrays:
        if array is not None and id(array) not in made:
            values, first = tensor(array), array.ctypes.data % 64 // array.itemsize
            memory = kernel_set.empty(first + len(array), values.dtype)
            made[id(array)] = values, memory[first:].copy_(values)
    yield [None if array is None else made[id(array)][1] for array in arrays]
    for values, there in made.values():
        values.copy_(there)


def rows_of(table: Table) -> tables.Table:
    return tables.Table(table.rows)


def code_for(code: Code, **more: Any) -> kernels.Code:
    """Return what a kernel set is given for a code."""
    found: dict[str, Any] = {
        "values": lambda: {"dtype": tables.TORCH_DTYPES[int(code.option[0])]},
        "block": lambda: {"bits": code.bits},
        "lanes": lambda: {"world_size": int(code.option[0]), "bits": code.bits},
        "nearest": lambda: {"encoder": "nearest", "step": code.option[0]},
        "entropy": lambda: {"stream_nbytes": code.stream_nbytes},
    }.get(code.name, dict)()
    return kernels.Code(code.decoder, **found, **more)


def encode(
    kernel_set: kernels.Kernels,
    code: Code,
    table: Table,
    source: Any,
    payload: Any,
    *,
    planes: tuple[Any, Any, Any] = (None, None, None),
    decay: float = 1.0,
    means: Any = None,
    key: ref.Key = KEY,
) -> bool:
    """Encode a table; return whether a value was not finite. `planes` are those of old, new and
    kept residuals.
    """
    more = {"decay": decay, "means": means} if code.feeds_back else {}
    with on(kernel_set, source, *planes) as (given, old, new, kept):
        return kernel_set.encode(
            code_for(code, **more),
            given,
            rows_of(table),
            tensor(payload),
            key=(key.seed, key.rank, key.step, key.stream),
            residuals=kernels.Residuals(old, new),
            kept=kept,
        )


def decode(
    kernel_set: kernels.Kernels,
    code: Code,
    table: Table,
    payloads: list[Any],
    out: Any,
    *,
    streams: bool = False,
    shared: bool = False,
) -> bool:
    """Decode the average of payloads; return whether a value is not finite. `streams`: as where
    outputs are larger than a cache.
    """
    more = {"shared": shared} if code.decoder == "ternary" else {}
    tensors = [tensor(one) for one in payloads]
    with on(kernel_set, out) as (into,):
        source = kernels.Payloads(tensors, code_for(code, **more), into.dtype)
        return kernel_set.sum_decode(source, rows_of(table), into, (1 << 26) * streams)


# ---- inputs --------------------------------------------------------------------------------------
DTYPES = [ref.F32, ref.BF16, ref.F16]
SEEDS = st.integers(0, 2**32 - 1)
WORDS = st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1]) | SEEDS
COUNTS = st.sampled_from([1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33])

kernel_settings = settings(database=None, suppress_health_check=list(HealthCheck))


def tensor_of(table: Table, kind: str, dtype: int, rng: np.random.Generator) -> Any:
    """Return a source tensor that starts anywhere in memory."""
    tensor = guarded(table.tensor_numel, ARRAY_DTYPES[dtype], int(rng.integers(0, 8)))
    for i in range(len(table.pieces)):
        tensor[table.data(i)] = values(kind, table.pieces[i].numel, dtype, rng)
    return tensor


def random_codes(
    code: Code, numel: int, rng: np.random.Generator, piece: ref.Piece | None = None
) -> Any:
    """Return packed codes that an encoder could have written; of streams, which are those of
    `piece`, any bytes but for tables that do not exist.
    """
    if code.name == "entropy":
        return random_streams(piece or ref.Piece(numel, entropy.STREAM_NUMEL), code, rng)
    if code.name == "values":
        x = values(str(rng.choice(KINDS)), numel, int(code.option[0]), rng)
        return np.frombuffer(x.tobytes(), np.uint8)
    return ref.pack_bits(rng.integers(0, code.top + 1, numel), code.bits, padding_of(code))


def random_streams(piece: ref.Piece, code: Code, rng: np.random.Generator) -> Any:
    """Return streams of random bits, some of which are mostly 0, or mostly escape symbols."""
    streams = [np.zeros(0, np.uint8)]
    for group in piece.groups():
        nbytes = entropy.stream_code_nbytes(group.stop - group.start, code.stream_nbytes)
        one = np.packbits(rng.random((nbytes, 8)) < rng.choice([0.5, 0.5, 0.05, 0.95]), axis=1)
        one[0] = rng.integers(0, 16)
        streams.append(one.ravel())
    return np.concatenate(streams)


def padding_of(code: Code) -> int:
    return int(code.decoder == "ternary")


def random_scales(count: int, rng: np.random.Generator, *, signed: bool) -> Any:
    scales = np.where(
        rng.random(count) < 0.2, rng.choice(np.abs(SPECIAL), count), rng.random(count) * 3
    )
    return (scales * rng.choice([-1, 1], count) if signed else scales).astype(np.float32)


def random_payload(code: Code, table: Table, rng: np.random.Generator) -> Any:
    payload = guarded(table.payload_nbytes, misalign=int(rng.integers(0, 8)))
    for i, piece in enumerate(table.pieces):
        payload[table.codes(i)] = random_codes(code, piece.numel, rng, piece.ref)
        count = table.per_group * len(piece.ref.groups())
        signed = code.name in ("onebit", "block")
        table.put_scales(payload, i, random_scales(count, rng, signed=signed))
    return payload


def table_of(code: Code, parts: list[Piece], seed: int | np.random.Generator = 0) -> Table:
    """Return a table of pieces, whose groups are the streams of a code that has them."""
    if code.stream_nbytes:
        parts = [piece._replace(group_numel=entropy.STREAM_NUMEL) for piece in parts]
    rng = np.random.default_rng(seed)
    return Table(parts, code.bits, code.per_group, rng, code.stream_nbytes)


def one_piece(
    code: Code, x: Any, *, start: int = 0, group: int = 0, parameter: int = 0
) -> tuple[Table, Any]:
    """Return a table of one piece (one group unless said), and a source tensor that holds it."""
    table = table_of(code, [Piece(start, len(x), group or len(x), parameter)])
    tensor = guarded(table.tensor_numel, x.dtype)
    tensor[table.data(0)] = x
    return table, tensor
