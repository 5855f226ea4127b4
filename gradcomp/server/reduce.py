"""Reduction of the values of one round: maxima and sums of fp32, averages of packed gradients."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.errors import CorruptPayload
from gradcomp.kernels import HOST
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, form_name
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import STREAM_SERVER, RngKey
from gradcomp.server.spec import Spec, codec_of

# of a header, the same in all payloads of a key
SETTINGS = ("codec", "dtype", "numel", "group_numel", "scale_count", "stream")


def reduce_values(values: Sequence[Tensor], method: str) -> Tensor:
    """Return the elementwise max, sum or mean of float32 tensors, added in the order given, rounded
    after every step.

    A NaN in any value is a NaN in the maximum. The mean is the sum times fl(1 / N).
    """
    out = values[0].clone()
    for value in values[1:]:
        out = torch.maximum(out, value) if method == "max" else out.add_(value)
    return out.mul_(float(np.float32(1) / np.float32(len(values)))) if method == "mean" else out


class PackedReducer:
    """Averages the payloads of one key, and encodes averages again.

    Args:
        spec: of the key.
        key: its name; it takes the place of the parameter's position in random numbers.

    Attributes:
        residual: what averages that were encoded again have left out; None: nothing yet.
    """

    def __init__(self, spec: Spec, key: str) -> None:
        self._spec = spec
        self._parameter = zlib.crc32(key.encode())
        self._layout: PayloadLayout | None = None
        self.residual: Tensor | None = None

    def admit(self, payload: Tensor) -> wire.Header:
        """Check a payload whole and return its header.

        Raises:
            CorruptPayload: as `Codec.decode`.
        """
        header, codec, layout = parse_payload(self._spec, payload)
        if not header.nonfinite:
            codec.validate_packed(payload, layout)
        return header

    def average(self, payloads: Sequence[Tensor]) -> Tensor:
        """Return the average of admitted payloads with like headers, ``(numel,)`` float32.

        With a shared scale it is fl(fl(S / N) * sum of codes), else decoded values are added in the
        order given and multiplied by fl(1 / N): what an exchange makes of the same payloads, bit
        for bit. NaN if any payload is flagged.
        """
        headers = [wire.parse(payload.numpy()) for payload in payloads]
        codec = codec_of(self._spec, headers[0])
        layout = codec._layout_of(headers[0], payloads[0].numel())
        out = torch.empty(headers[0].numel)
        if any(header.nonfinite for header in headers):
            return out.fill_(float("nan"))
        if codec.can_share_scale and self.shares_scale(payloads):
            codec = codec_of(self._spec, headers[0], shares_scale=True)
        codec.decode_body(HOST, payloads, layout, out)
        return out

    def shares_scale(self, payloads: Sequence[Tensor]) -> bool:
        """Return whether the payloads have one scale: as the key's codec says, or, if it has none,
        whether all scales are equal.
        """
        if self._spec.codec:
            return self._spec.shares_scale
        scales = [scale_bytes(payload) for payload in payloads]
        return all(other == scales[0] for other in scales)

    def encode(self, mean: Tensor, header: wire.Header) -> Tensor:
        """Encode an average as its payloads were; an error-feedback codec adds what it leaves out
        to the next one.
        """
        codec = codec_of(self._spec, header)
        seed, first = self._spec.seed, self._spec.first
        key = RngKey(seed, 0, header.step, self._parameter, STREAM_SERVER, first)
        if codec.error_feedback and self.residual is None:
            self.residual = torch.zeros(mean.numel())
        return codec.encode(mean, residual=self.residual if codec.error_feedback else None, key=key)


def parse_payload(spec: Spec, payload: Tensor) -> tuple[wire.Header, Codec, PayloadLayout]:
    """Return header, codec and layout of a payload that is complete, whatever its codes are.

    Raises:
        CorruptPayload: as `Codec.decode`, but for scales and codes.
    """
    view = payload.numpy()
    header = wire.parse(view)
    if header.segmented:
        raise CorruptPayload("segmented", "a server takes payloads of one tensor")
    if spec.codec not in (0, header.codec):
        got, wanted = form_name(header.codec), form_name(spec.codec)
        raise CorruptPayload("codec", f"a {got} payload, the key takes {wanted}")
    codec = codec_of(spec, header)
    layout = codec._layout_of(header, view.size)
    codec.check_header(header, layout, view.size)
    return header, codec, layout


def scale_bytes(payload: Tensor) -> bytes:
    """Return the scales of an admitted payload as they are in it."""
    view = payload.numpy()
    return view[HEADER_NBYTES : HEADER_NBYTES + 4 * wire.parse(view).scale_count].tobytes()
