"""Weight updates, from gradient tensors or straight from payloads; splitting and joining of
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.interface import Payloads
from gradcomp.kernels.native.addresses import numbers_of, words_of
from gradcomp.kernels.native.kernels import prepare
from gradcomp.kernels.native.library import check, ffi, lib
from gradcomp.kernels.native.threads import run
from gradcomp.kernels.rules import TARGET
from gradcomp.kernels.tables import DTYPES, Table

_TENSORS = ffi.new("gc_gradients *", {"from": lib.GC_FROM_TENSORS})


def update(
    table: Table,
    targets: NDArray[Any],
    rules: NDArray[Any],
    payloads: Payloads | None = None,
    norms: NDArray[np.float64] | None = None,
) -> bool:
    """See `Kernels.update`."""
    flag, gradients = (
        ffi.new("uint32_t *"),
        (_TENSORS if payloads is None else prepare(payloads).gradients),
    )
    target, rule = (
        ffi.cast("const gc_target *", targets.ctypes.data),
        ffi.cast("const gc_rule *", rules.ctypes.data),
    )
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


def targets(**tensors: Sequence[Tensor | None]) -> NDArray[Any]:
    """See `Kernels.targets`."""
    out = np.zeros(max(map(len, tensors.values())), TARGET)
    for name, values in tensors.items():
        out[name] = numbers_of(values)
    out["gradient_dtype"] = [
        0 if g is None else DTYPES[g.dtype] for g in tensors.get("gradient", [None] * len(out))
    ]
    out["rule"] = np.arange(len(out))
    return out


def split(weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
    """See `Kernels.split`."""
    bits, high, low = (
        words_of(weights, "uint32_t"),
        words_of(top, "uint16_t"),
        words_of(trail, "uint16_t"),
    )
    check(lib.gc_split(bits, weights.numel(), nearest, high, low), "gc_split")


def join(top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
    """See `Kernels.join`."""
    bits, high, low = (
        words_of(weights, "uint32_t"),
        words_of(top, "uint16_t"),
        words_of(trail, "uint16_t"),
    )
    check(lib.gc_join(high, low, top.numel(), nearest, bits), "gc_join")
