"""The kernel set of the CPU: C kernels called through cffi.

C functions are found by the name of a code: ``gc_NAME_encode(src, dtype, rows, count, [value_dtype,
code_bits or step,] [residuals, kept, decay, dropped,] [means,] payload, [key,] flag)``,
``gc_NAME_sum_decode(payloads, payload_count, [option,] rows, count, out, dtype, flags, flag)``. A
new code needs no function here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.interface import NO_RESIDUALS, Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native.library import address, check, ffi, lib, pointer, pointers_of
from gradcomp.kernels.native.threads import run, run_elements
from gradcomp.kernels.rules import TARGET
from gradcomp.kernels.tables import BLOCK, DTYPES, Groups, Table

# larger outputs do not fit into a last-level cache, so their stores bypass it
CACHE_NBYTES = 32 << 20
_TENSORS = ffi.new("gc_gradients *", {"from": lib.GC_FROM_TENSORS})


def entropy_tables() -> dict[str, NDArray[Any]]:
    """Return the tables of entropy-coded streams (gc_entropy_tables_of), by name."""
    count = lib.GC_TABLE_COUNT
    shapes = {
        "symbols": (count, 256),
        "decode": (count, 2048),
        "costs": (9, count),
        "pair_costs": (count, 9, 16),
        "tops": (count,),
    }
    out: dict[str, NDArray[Any]] = {key: np.empty(shape, np.int32) for key, shape in shapes.items()}
    out["octave"] = np.empty(32)
    words = [ffi.from_buffer("uint32_t[]", out[name]) for name in shapes]
    lib.gc_entropy_tables_of(*words, ffi.from_buffer("double[]", out["octave"]))
    return out


class NativeKernels(Kernels):
    """Operations on tensors in host memory; `Kernels` documents the methods.

    Kernels run without the GIL. A call over a segment table runs on at most
    ``torch.get_num_threads()`` threads; the distribution of rows changes no bit of the result. No
    thread is started before the first large call.
    """

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    # ---- statistics ------------------------------------------------------------------------------

    def scratch(self, groups: Groups, free: Tensor | None = None) -> Tensor:
        nbytes = int(groups.blocks[-1]) * BLOCK.itemsize
        if free is not None and free.numel() >= nbytes:
            return free[:nbytes]
        return self.empty(nbytes, torch.uint8)

    def scales(
        self,
        values: Tensor,
        table: Table,
        groups: Groups,
        clip_sigma: float | None,
        scratch: Tensor,
        out: Tensor,
    ) -> bool:
        if not table.count:
            return False
        flag = ffi.new("uint32_t *")
        blocks = pointer(scratch, "gc_block")
        source, dtype = pointer(values, "void"), DTYPES[values.dtype]
        run(
            "gc_block_sums",
            table,
            lambda rows, count, _: lib.gc_block_sums(source, dtype, rows, count, blocks, flag),
        )
        self.ternary_scales(scratch, groups, clip_sigma, out)
        return bool(flag[0])

    def ternary_scales(
        self, blocks: Tensor, groups: Groups, clip_sigma: float | None, out: Tensor
    ) -> None:
        """Write the scales of groups from their block sums, as part of `scales`."""
        status = lib.gc_ternary_scales(
            pointer(blocks, "gc_block"),
            ffi.from_buffer("uint64_t[]", groups.blocks),
            ffi.from_buffer("uint32_t[]", groups.numels),
            len(groups.numels),
            -1.0 if clip_sigma is None else clip_sigma,
            pointer(out),
        )
        check(status, "gc_ternary_scales")

    # ---- encoding --------------------------------------------------------------------------------

    def encode(
        self,
        code: Code,
        values: Tensor,
        table: Table,
        payload: Tensor,
        *,
        key: tuple[int, int, int, int] | None = None,
        residuals: Residuals = NO_RESIDUALS,
        kept: Tensor | None = None,
    ) -> bool:
        if not table.count:
            return False
        flag, source, dtype = ffi.new("uint32_t *"), pointer(values, "void"), DTYPES[values.dtype]
        encoder = code.encoder or code.kernel
        name = f"gc_{encoder}_encode"
        function = getattr(lib, name)
        head = options_of(code.dtype, code.bits, code.step, code.stream_nbytes)
        tail: tuple[Any, ...] = (pointer(payload, "uint8_t"), flag)
        if encoder == "ternary":
            tail = (tail[0], ffi.new("gc_rng_key *", key)[0], flag)
        if encoder == "onebit":
            tail = (ffi.NULL if code.means is None else ffi.new("float[2]", code.means), *tail)
        dropped = None  # one number per row
        if code.decay is not None:
            counts = residuals.counted is not None and residuals.new is not None and code.decay < 1
            dropped = ffi.new("double[]", table.count) if counts else None
            head += (
                pointer(residuals.old),
                pointer(residuals.new),
                pointer(kept),
                code.decay,
            )

        def call(rows: Any, count: int, first: int) -> int:
            into = () if code.decay is None else (ffi.NULL if dropped is None else dropped + first,)
            return int(function(source, dtype, rows, count, *head, *into, *tail))

        run(name, table, call)
        if dropped is not None and residuals.counted is not None and not flag[0]:
            residuals.counted(float(np.frombuffer(ffi.buffer(dropped), np.float64).sum()))
        return bool(flag[0])

    # ---- averages --------------------------------------------------------------------------------

    def sum_decode(self, payloads: Payloads, table: Table, out: Tensor, written: int = 0) -> bool:
        if not table.count:
            return False
        name, decode, head, dtype, *_ = _prepare(payloads)
        flag, target = ffi.new("uint32_t *"), pointer(out, "void")
        nbytes = max(table.numel, written) * out.element_size()
        flags = lib.GC_STREAM if nbytes > CACHE_NBYTES else 0
        run(
            name,
            table,
            lambda rows, count, _: decode(*head, rows, count, target, dtype, flags, flag),
        )
        return bool(flag[0])

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[np.float64] | None = None,
    ) -> bool:
        flag = ffi.new("uint32_t *")
        gradients = _TENSORS if payloads is None else _prepare(payloads).gradients
        target = ffi.cast("const gc_target *", targets.ctypes.data)
        rule = ffi.cast("const gc_rule *", rules.ctypes.data)
        sums = ffi.cast("double *", norms.ctypes.data) if norms is not None else ffi.NULL
        run(
            "gc_update",
            table,
            lambda rows, count, first: lib.gc_update(
                gradients,
                rows,
                count,
                target,
                len(targets),
                rule,
                len(rules),
                sums + 2 * first if norms is not None else sums,
                flag,
            ),
        )
        return bool(flag[0])

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        out = np.zeros(max(map(len, tensors.values())), TARGET)
        for name, values in tensors.items():
            out[name] = [address(tensor) for tensor in values]
        out["gradient_dtype"] = [
            0 if g is None else DTYPES[g.dtype] for g in tensors.get("gradient", [None] * len(out))
        ]
        out["rule"] = np.arange(len(out))
        return out

    def are_finite(self, values: Tensor) -> bool:
        status = lib.gc_scales_validate(pointer(values, "uint8_t"), values.numel(), False)
        return bool(status == lib.GC_OK)

    # ---- units of second moments -----------------------------------------------------------------

    def divide(
        self,
        values: Tensor,
        residual: Tensor | None,
        moments: Tensor,
        floor: float,
        units: Tensor,
        out: Tensor,
    ) -> None:
        source, added, squares = pointer(values), pointer(residual), pointer(moments)
        into, quotients = pointer(units), pointer(out)

        def call(first: int, count: int) -> int:
            start = added + first if residual is not None else added
            head = source + first, start, squares + first, floor, count
            return int(lib.gc_moments_divide(*head, into + first, quotients + first))

        run_elements("gc_moments_divide", values.numel(), call)

    def multiply(self, values: Tensor, units: Tensor) -> bool:
        flag, into, factors = ffi.new("uint32_t *"), pointer(values), pointer(units)

        def call(first: int, count: int) -> int:
            return int(lib.gc_moments_multiply(into + first, factors + first, count, flag))

        run_elements("gc_moments_multiply", values.numel(), call)
        return bool(flag[0])

    def follow(
        self,
        values: Tensor,
        inverse: float,
        before: Tensor | None,
        keep: float,
        gain: float,
        after: Tensor,
    ) -> bool:
        flag, source = ffi.new("uint32_t *"), pointer(values)
        old, new = pointer(before), pointer(after)

        def call(first: int, count: int) -> int:
            start = old + first if before is not None else old
            head = source + first, inverse, start, keep, gain, count
            return int(lib.gc_moments_follow(*head, new + first, flag))

        run_elements("gc_moments_follow", values.numel(), call)
        return bool(flag[0])

    # ---- rotation --------------------------------------------------------------------------------

    def rotate(
        self,
        values: Tensor,
        group_numel: int,
        first: int,
        parameter: int,
        key: tuple[int, int, int, int],
        *,
        back: bool = False,
    ) -> None:
        drawn = ffi.new("gc_rng_key *", key)[0]
        check(
            lib.gc_rotate(
                pointer(values), values.numel(), group_numel, first, parameter, drawn, back
            ),
            "gc_rotate",
        )

    def unbias(self, values: Tensor, group_numel: int, first: int) -> None:
        check(lib.gc_unbias(pointer(values), values.numel(), group_numel, first), "gc_unbias")

    # ---- residuals and weights -------------------------------------------------------------------

    def rescale(self, plane: Tensor, factor: float) -> None:
        check(lib.gc_rescale(pointer(plane), plane.numel(), factor), "gc_rescale")

    def split(self, weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
        bits = pointer(weights, "uint32_t")
        high, low = pointer(top, "uint16_t"), pointer(trail, "uint16_t")
        check(lib.gc_split(bits, weights.numel(), nearest, high, low), "gc_split")

    def join(self, top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
        bits = pointer(weights, "uint32_t")
        high, low = pointer(top, "uint16_t"), pointer(trail, "uint16_t")
        check(lib.gc_join(high, low, top.numel(), nearest, bits), "gc_join")


def options_of(*options: Any) -> tuple[Any, ...]:
    """Return the options that are not None as arguments for C."""
    given = (option for option in options if option is not None)
    return tuple(DTYPES[each] if isinstance(each, torch.dtype) else each for each in given)


class _Prepared(NamedTuple):
    """Payloads as arguments for C: the decoder with its first arguments, and the gradients for an
    update.
    """

    name: str
    decode: Any
    head: tuple[Any, ...]
    dtype: int
    gradients: Any
    pointers: Any  # keeps what `head` and `gradients` point to


def _prepare(payloads: Payloads) -> _Prepared:
    """Return payloads as arguments for C, cached at the first call."""
    cached: _Prepared | None = payloads.prepared.get("native")
    if cached is not None:
        return cached
    pointers, count = pointers_of(payloads.tensors), len(payloads.tensors)
    code, source = payloads.code, ffi.new("gc_gradients *")
    source.payloads, source.payload_count = pointers, count
    setattr(source, "from", getattr(lib, f"GC_FROM_{code.kernel.upper()}"))
    source.dtype, source.shared = DTYPES[payloads.dtype], code.shared or 0
    head: tuple[Any, ...] = (
        pointers,
        count,
        *options_of(code.shared, code.dtype, code.bits, code.stream_nbytes),
    )
    name = f"gc_{code.kernel}_sum_decode"
    if code.dtype is not None:
        source.value_dtype = DTYPES[code.dtype]
    if code.kernel == "block":
        source.code_bits = code.bits
    if code.stream_nbytes is not None:
        source.stream_nbytes = code.stream_nbytes
    if code.kernel == "lanes":
        source.world_size, source.lane_bits = code.world_size, code.bits
        name, head = "gc_lanes_decode", (pointers[0], code.world_size, code.bits)
    payloads.prepared["native"] = prepared = _Prepared(
        name, getattr(lib, name), head, source.dtype, source, pointers
    )
    return prepared
