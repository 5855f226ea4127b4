"""Checks of arguments of codecs: tensors, scale groups, second phases."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels import check_device
from gradcomp.kernels.tables import DTYPES, MAX_NUMEL

# other names of "fp32" and "bf16"
_DTYPE_NAMES: dict[object, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
}
SECOND_PHASES = ("exact", "requantize", "block2", "block4", "block8", "bf16", "fp32")


def check_memory(
    tensor: Tensor, name: str, *, contiguous: bool = True, on_host: bool = False
) -> None:
    """Raise UnsupportedTensor unless `tensor` is dense and on a supported device.

    Args:
        tensor, name: the tensor, and its name for messages.
        contiguous: also require a contiguous tensor that is no negative view.
        on_host: also require host memory, for payloads, which are on the CPU for every device.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedTensor(f"{name} is {tensor.layout}; gradcomp takes dense tensors")
    check_device(tensor.device, name)
    if on_host and tensor.device.type != "cpu":
        raise UnsupportedTensor(f"{name} is on {tensor.device}: payloads are on the CPU")
    if contiguous and tensor.is_neg():
        raise UnsupportedTensor(
            f"{name} is a negative view (its memory holds the opposite); call .resolve_neg() first"
        )
    if contiguous and not tensor.is_contiguous():
        raise UnsupportedTensor(
            f"{name} is not contiguous (strides {tensor.stride()}); call .contiguous() first"
        )


def check_tensor(tensor: Tensor, name: str, *, contiguous: bool = True) -> None:
    """Raise UnsupportedTensor unless a codec can encode `tensor`; if not `contiguous`, a contiguous
    copy of it.
    """
    check_memory(tensor, name, contiguous=contiguous)
    if tensor.dtype not in DTYPES:
        raise UnsupportedTensor(
            f"{name} is {tensor.dtype}; gradcomp takes float32, bfloat16 and float16"
        )
    if tensor.numel() > MAX_NUMEL:
        raise UnsupportedTensor(
            f"{name} has {tensor.numel()} elements; a payload holds at most {MAX_NUMEL}"
        )


def check_payload_out(out: Tensor, nbytes: int) -> None:
    """Raise UnsupportedTensor or ValueError unless `out` can store a payload of `nbytes` bytes."""
    check_memory(out, "out", on_host=True)
    if out.dtype != torch.uint8 or out.dim() != 1:
        raise UnsupportedTensor(f"out must be 1-D uint8, got {out.dim()}-D {out.dtype}")
    if out.numel() != nbytes:
        raise ValueError(f"out holds {out.numel()} bytes, the payload {nbytes}")


def check_alone(codec: Any) -> None:
    """Raise ValueError for a codec that works in exchanges only, because it rotates values."""
    if codec.rotates:
        raise ValueError(
            f"{codec!r}: exchanges rotate what it encodes, so it encodes and decodes no tensor by"
            " itself, and cannot be used with the server"
        )


def check_group(group: object, names: tuple[str, ...]) -> None:
    """Raise ValueError unless `group` is one of `names` or a block size."""
    if isinstance(group, bool) or not (
        group in names or (isinstance(group, int) and 1 <= group < 2**32)
    ):
        raise ValueError(
            f"group must be one of {names} or a block of 1 to 2**32 - 1 elements, got {group!r}"
        )


def resolve_group(group: str | int, shape: tuple[int, ...]) -> int:
    """Return the elements of one scale group of a parameter: all for "tensor", all but the first
    dimension for "row", or the size of a block.
    """
    if isinstance(group, int):
        return group
    numel = int(np.prod(shape, dtype=np.int64)) if shape else 1
    if group == "row" and len(shape) > 1 and shape[0]:
        return max(1, numel // shape[0])
    return max(1, numel)


def dtype_name(given: object) -> Any:
    """Return "fp32" or "bf16" for their other names, "float32", "bfloat16" and torch's dtypes; all
    else unchanged.
    """
    return _DTYPE_NAMES.get(given, given) if isinstance(given, (str, torch.dtype)) else given


def check_second_phase(second_phase: object) -> str | None:
    """Return a second phase by the name in `SECOND_PHASES`, or None for None.

    Raises:
        ValueError: an unknown name.
    """
    name = dtype_name(second_phase)
    if name is not None and name not in SECOND_PHASES:
        raise ValueError(
            f"second_phase must be None or one of {SECOND_PHASES}, got {second_phase!r}"
        )
    return None if name is None else str(name)
