"""The compiled library: exceptions for status codes, pointers of tensors, and the tier of kernels
in use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

from torch import Tensor

try:
    from gradcomp._gc import ffi, lib
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error}: the kernels of this source folder are not compiled. Run `pip install -e .` in"
        " the folder that has setup.py, or start Python elsewhere, where the installed package is"
        " found.",
        name=error.name,
    ) from None
from gradcomp.errors import CorruptPayload, NativeError

__all__ = [
    "DISABLE_VARIABLE",
    "TIER_FEATURES",
    "address",
    "check",
    "ffi",
    "lib",
    "pointer",
    "pointers_of",
    "select_tier",
    "tier",
    "tiers",
]

DISABLE_VARIABLE = "GRADCOMP_DISABLE_CPU_FEATURES"
# CPU features that each tier of dispatch.c needs
_AVX2 = frozenset({"avx2", "bmi2", "fma", "f16c", "sse4.2"})
TIER_FEATURES: dict[str, frozenset[str]] = {
    "portable": frozenset(),
    "avx2": _AVX2,
    "avx512": _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "neon": frozenset({"neon"}),
}

_CHECKS = {
    "GC_FORBIDDEN_CODE": (
        "code",
        "one that no encoder writes: ternary 11, 15 of 4 bits, 255 of 8, an entropy table above 15",
    ),
    "GC_BAD_PADDING": ("padding", "padding bits are not what the format pins"),
    "GC_LANE_RANGE": ("lane", "an integer lane above 2 * world_size"),
    "GC_BAD_SCALE": ("scale", "a scale that is not finite, or negative"),
}


def check(status: int, function: str) -> None:
    """Raise the exception for a status code, unless it is GC_OK; only this function raises them.

    Raises:
        CorruptPayload: a check of a payload failed.
        NativeError: any other status.
    """
    if status == lib.GC_OK:
        return
    name = ffi.string(lib.gc_status_name(status)).decode()
    if name in _CHECKS:
        raise CorruptPayload(*_CHECKS[name])
    raise NativeError(name, function)


def address(tensor: Tensor | None) -> int:
    """Return the address of a tensor's memory, 0 for None; only this function reads addresses."""
    return 0 if tensor is None else tensor.data_ptr()


def pointer(tensor: Tensor | None, kind: str = "float") -> Any:
    """Return a C pointer of type `kind` to a tensor's memory, NULL for None; the caller must keep
    the tensor as long as the pointer.
    """
    return ffi.cast(_pointer_type(kind), address(tensor))


@functools.cache  # parsing the name of a type takes longer than the cast
def _pointer_type(kind: str) -> Any:
    return ffi.typeof(f"{kind} *")


def pointers_of(payloads: Sequence[Tensor]) -> Any:
    """Return ``const uint8_t *[]``; the caller must keep the tensors as long as the result."""
    return ffi.new("const uint8_t *[]", [pointer(payload, "uint8_t") for payload in payloads])


def tiers() -> list[str]:
    """Return the names of the tiers that this build and this CPU can run, slowest first."""
    return [_tier_name(t) for t in range(lib.gc_tier_count()) if lib.gc_tier_supported(t)]


def tier() -> str:
    """Return the name of the tier in use."""
    return _tier_name(lib.gc_tier_current())


def select_tier(name: str) -> None:
    """Use another tier from now on. Do not call this while kernels run.

    Raises:
        ValueError: the name is unknown, or this machine does not support the tier.
    """
    for number in range(lib.gc_tier_count()):
        if _tier_name(number) == name and lib.gc_tier_supported(number):
            check(lib.gc_tier_select(number), "gc_tier_select")
            return
    raise ValueError(f"unknown or unsupported tier {name!r}; this machine has {tiers()}")


def _tier_name(number: int) -> str:
    return str(ffi.string(lib.gc_tier_name(number)).decode())


def _select_from_environment(value: str) -> None:
    """Use the fastest tier that needs none of the comma-separated CPU features in `value`."""
    off = {word.strip().lower() for word in value.split(",") if word.strip()}
    known = frozenset[str]().union(*TIER_FEATURES.values())
    if off - known:
        raise ValueError(
            f"{DISABLE_VARIABLE}={value!r}: unknown feature {min(off - known)!r}, known are"
            f" {sorted(known)}"
        )
    select_tier([name for name in tiers() if not TIER_FEATURES[name] & off][-1])


_select_from_environment(os.environ.get(DISABLE_VARIABLE, ""))
