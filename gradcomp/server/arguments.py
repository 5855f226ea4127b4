"""What a client's caller may pass, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradcomp.codecs.checks import check_memory
from gradcomp.server.messages import MAX_KEY_NBYTES
from gradcomp.server.spec import DTYPES, Spec


def dtype_name(dtype: str | torch.dtype) -> str:
    """Return the name of a dtype that may be one."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype))


def check_key(key: str) -> None:
    """Raise ValueError unless `key` can be the name of a parameter."""
    if (
        not isinstance(key, str)
        or not 1 <= len(key.encode(errors="surrogatepass")) <= MAX_KEY_NBYTES
    ):
        raise ValueError(
            f"key must be a string of 1 to {MAX_KEY_NBYTES} bytes in UTF-8, got {key!r}"
        )
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"key {key!r} cannot be written in UTF-8") from error


def check_initial(spec: Spec, value: Tensor | None) -> None:
    """Raise unless initial values are there exactly for an asynchronous key, and such as it
    needs.
    """
    if spec.asynchronous != (value is not None):
        given = None if value is None else tuple(value.shape)
        raise ValueError(
            f"value goes with asynchronous=True, got {given} with asynchronous={spec.asynchronous}"
        )
    if value is None:
        return
    check_memory(value, "value")
    if value.dtype != torch.float32 or (
        spec.dtype == "float32" and tuple(value.shape) != spec.shape
    ):
        raise ValueError(
            f"value must be float32 of the key's shape {spec.shape}, got {value.dtype}"
            f" {tuple(value.shape)}"
        )
    if not bool(torch.isfinite(value).all()):
        raise ValueError("value holds NaN or Inf")


def as_tensor(spec: Spec, key: str, value: Any) -> Tensor:
    """Return a pushed value as a tensor of a key's shape and dtype.

    Raises:
        ValueError: it is not one.
    """
    dtype = DTYPES[spec.dtype]
    if not isinstance(value, Tensor):
        try:
            numbers = torch.as_tensor(value)
            value = numbers.to(dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"value of key {key!r} must be a tensor or numbers, got {value!r}"
            ) from error
        if not value.dim() and spec.numel == 1:
            value = value.view(spec.shape)
        if dtype == torch.uint8 and not torch.equal(numbers, value.to(numbers.dtype)):
            raise ValueError(f"value of key {key!r} must be bytes, got {numbers.tolist()!r:.100}")
    check_memory(value, "value")
    if value.dtype != dtype or tuple(value.shape) != spec.shape:
        raise ValueError(
            f"key {key!r} takes {dtype} of shape {spec.shape}, got {value.dtype} of shape"
            f" {tuple(value.shape)}"
        )
    tensor: Tensor = value.detach()
    return tensor
