"""Reduction of the pushes of a round: max, sum and mean of fp32, averages of payloads."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels import CPU, of
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.rng import STREAM_SERVER, RngKey
from gradcomp.server.spec import Spec, codec_of, parse_payload

# header fields that are equal in all payloads of a key
SETTINGS = ("codec", "dtype", "numel", "group_numel", "scale_count", "stream")


def reduce_values(values: Sequence[Tensor], method: str) -> Tensor:
    """Return the elementwise max, sum or mean of float32 tensors.

    Values are added in the given order, and rounded after every addition. The mean is the sum times
    fl(1 / N). A NaN in any value gives a NaN in the maximum.
    """
    out = values[0].clone()
    for value in values[1:]:
        out = torch.maximum(out, value) if method == "max" else out.add_(value)
    return out.mul_(float(np.float32(1) / np.float32(len(values)))) if method == "mean" else out


def admit_payload(spec: Spec, payload: Tensor) -> wire.Header:
    """Validate a payload completely and return its header; CorruptPayload as `Codec.decode`."""
    header, codec, layout = parse_payload(spec, payload)
    if not header.nonfinite:
        codec.validate_packed(payload, layout)
    return header


def average_payloads(spec: Spec, payloads: Sequence[Tensor]) -> Tensor:
    """Return the average of admitted payloads with equal `SETTINGS`, ``(numel,)`` float32.

    With a shared scale S, the average is fl(fl(S / N) * sum of codes). Otherwise decoded values are
    added in the given order and multiplied by fl(1 / N). Both equal the result of an exchange of
    the same payloads bit for bit. For a key without a codec, byte-equal scales count as shared. All
    elements are NaN if any payload is flagged as non-finite.
    """
    headers = [wire.parse(payload.numpy()) for payload in payloads]
    nbytes = payloads[0].numel()
    codec = codec_of(spec, headers[0], nbytes)
    layout = codec._layout_of(headers[0], nbytes)
    out = of(CPU).empty(headers[0].numel)
    if any(header.nonfinite for header in headers):
        return out.fill_(float("nan"))
    if codec.can_share_scale:
        shared = (
            spec.shares_scale
            if spec.codec is not None
            else len(set(map(scale_bytes, payloads))) == 1
        )
        codec = codec_of(spec, headers[0], nbytes, shares_scale=shared)
    codec.decode_body(of(CPU), payloads, layout, out)
    return out


def encode_average(
    spec: Spec, key: str, mean: Tensor, payload: Tensor, residual: Tensor | None
) -> Tensor:
    """Encode an average of payloads and return its payload, ``(nbytes,)`` uint8.

    Args:
        spec: settings of the key.
        key: name of the key; its CRC-32 is used as the parameter number in random draws.
        mean: the average, ``(numel,)`` float32.
        payload: one of the averaged payloads, whose codec and step are used.
        residual: residual of earlier averages, ``(numel,)`` float32, updated in place; or None.
    """
    header, parameter = wire.parse(payload.numpy()), zlib.crc32(key.encode())
    codec = codec_of(spec, header, payload.numel())
    draws = RngKey(codec.seed, 0, header.step, parameter, STREAM_SERVER, spec.first)
    return codec.encode(mean, residual=residual, key=draws)


def scale_bytes(payload: Tensor) -> bytes:
    """Return the bytes of the scales of an admitted payload."""
    view = payload.numpy()
    return view[HEADER_NBYTES : HEADER_NBYTES + 4 * wire.parse(view).scale_count].tobytes()
