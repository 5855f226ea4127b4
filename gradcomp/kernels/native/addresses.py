"""Tensors -> the pointers that C takes. The one place where addresses are taken; callers keep
the memory alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gradcomp.kernels.native.library import ffi


def bytes_of(tensor: Tensor) -> Any:
    """Return a tensor as ``uint8_t *``."""
    return ffi.cast("uint8_t *", tensor.data_ptr())


def values_of(tensor: Tensor) -> Any:
    """Return a tensor as ``void *``."""
    return ffi.cast("void *", tensor.data_ptr())


def floats_of(tensor: Tensor | None) -> Any:
    """Return a tensor as ``float *``, NULL for None."""
    return ffi.NULL if tensor is None else ffi.cast("float *", tensor.data_ptr())


def words_of(tensor: Tensor, kind: str) -> Any:
    """Return a tensor as a pointer to ``uint16_t`` or ``uint32_t``."""
    return ffi.cast(f"{kind} *", tensor.data_ptr())


def numbers_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return addresses as numbers, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def payload_pointers(tensors: Sequence[Tensor]) -> Any:
    """Return ``const uint8_t *[]``; it must be kept while C reads it."""
    return ffi.new("const uint8_t *[]", [bytes_of(tensor) for tensor in tensors])
