"""Weight updates, from gradient tensors or straight from payloads; splitting and joining of weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradcomp.kernels.native.kernels import Payloads, payload_pointers
from gradcomp.kernels.native.library import check, ffi, lib
from gradcomp.kernels.native.threads import run
from gradcomp.kernels.tables import Table

_SOURCES = {name: number for number, name in enumerate(("tensors", "ternary", "onebit", "values", "lanes"))}


def update(
    table: Table,
    targets: NDArray[Any],
    rules: NDArray[Any],
    payloads: Payloads | None = None,
    norms: NDArray[np.float64] | None = None,
) -> bool:
    """Update weights in place, from gradient tensors or straight from payloads; True: an average is not finite.

    Args:
        table: which elements of which parameters.
        targets: `rules.TARGET`, by the parameter numbers of the table.
        rules: `rules.RULE`, by the rule numbers of the targets.
        norms: ``(2 * len(table),)``, what rules that add up write, two a row.
    """
    flag, gradients = ffi.new("uint32_t *"), ffi.new("gc_gradients *")
    if payloads is not None:
        pointers = payload_pointers(payloads.addresses)
        gradients.payloads, gradients.payload_count = pointers, len(payloads.addresses)
        setattr(gradients, "from", _SOURCES[payloads.source])
        gradients.dtype, gradients.shared = payloads.dtype, payloads.shared
        gradients.value_dtype, gradients.world_size = payloads.value_dtype, payloads.world_size
        gradients.lane_bits = payloads.lane_bits
    target, rule = ffi.cast("const gc_target *", targets.ctypes.data), ffi.cast("const gc_rule *", rules.ctypes.data)
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


def split(weights: int, numel: int, nearest: bool, top: int, trail: int) -> None:
    """Split fp32 numbers into bf16 tops and 16-bit trails."""
    bits, high, low = ffi.cast("uint32_t *", weights), ffi.cast("uint16_t *", top), ffi.cast("uint16_t *", trail)
    check(lib.gc_split(bits, numel, nearest, high, low), "gc_split")


def join(top: int, trail: int, numel: int, nearest: bool, weights: int) -> None:
    """Join bf16 tops and 16-bit trails to the fp32 numbers they were split from."""
    bits, high, low = ffi.cast("uint32_t *", weights), ffi.cast("uint16_t *", top), ffi.cast("uint16_t *", trail)
    check(lib.gc_join(high, low, numel, nearest, bits), "gc_join")
