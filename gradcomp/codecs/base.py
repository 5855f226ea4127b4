"""Base class of all codecs: `encode` and `decode` for one tensor, and the steps of an exchange.

The steps of an exchange work on a whole payload of many pieces: `measure` (scales, if the codec
measures them first), `encode_body`, and `decode_body` on the payloads of all ranks.
"""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from gradcomp.codecs.checks import check_alone, check_memory, check_payload_out, check_tensor
from gradcomp.codecs.lanes import Lanes
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.errors import CorruptPayload, UnsupportedTensor
from gradcomp.kernels import (
    CPU,
    NO_RESIDUALS,
    Code,
    Kernels,
    Payloads,
    Residuals,
    encoding_device,
    host,
    of,
)
from gradcomp.kernels.tables import DTYPES, MAX_NUMEL
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form, form_name
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.payload.rng import RngKey

# bits of an integer sum; wider sums need more bytes than "block4", which loses no measurable
# accuracy
MOST_EXACT_BITS = 4
PLAIN_CODE = Code(PLAIN.kernel, dtype=torch.float32)


class Codec(ABC):
    """Encodes gradients with few bits per value, and decodes them.

    Attributes:
        form: form of its codes in a payload.
        name: name for `gradcomp.codecs.resolve`: that of the form, or its own if codecs share a
            form.
        shares_scale: whether ranks agree on one scale per group before they encode (a scale round).
        error_feedback: whether encoding reads and writes residuals.
        seed: seed of the random numbers, for codecs that draw some.
        whole_groups: whether one kernel call must encode a whole scale group.
        measures: whether scales are measured before codes are written.
        second_phase: second phase of a reduce_scatter; None: see `resolved_second_phase`.
        reach: values beyond this many scales of their group are clipped; None: no clipping.
        most: largest scale that is written.
        decay: factor on the encoding error that becomes the next step's residual; 1: all is kept.
        rotates: whether exchanges apply a random rotation before encoding, and the inverse to the
            averages; such codecs have no residuals.
        can_share_scale: whether the codec has a variant with `shares_scale`.
    """

    form: Form
    can_share_scale: ClassVar[bool] = False
    measures: ClassVar[bool] = False
    second_phase: str | None = None
    reach: float | None = None
    most: float = math.inf
    shares_scale: bool = False
    error_feedback: bool = False
    rotates: bool = False
    seed: int = 0
    whole_groups: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.form.name

    @property
    @abstractmethod
    def code(self) -> Code:
        """Description of the codes for kernels."""

    @property
    def decay(self) -> float:
        return 1.0

    def of_groups(
        self,
        group_numel: int,
        *,
        shares_scale: bool = False,
    ) -> Codec:
        """Return this codec with groups of `group_numel` elements, to decode payloads with such
        groups and to encode their averages again, without clipping.

        Args:
            group_numel: elements of a scale group.
            shares_scale: whether all payloads have the same scales.
        """
        return self

    def with_form(self, form: Form) -> Self:
        """Return a copy of this codec for payloads of `form`, a form with the same number."""
        out = copy.copy(self)
        out.form = form
        return out

    # ---- for one tensor ----
    def encode(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        scale: float | Tensor | None = None,
        key: RngKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Encode one tensor into a whole payload.

        Args:
            x: any shape, float32, bfloat16 or float16, contiguous. If there are no kernels for its
                device, it is copied to the host.
            residual: ``(x.numel(),)`` or `x`'s shape, float32, contiguous, on the device of `x`:
                error of earlier encodings, which is added to `x`. Overwritten by the error of this
                encoding times the decay, or unchanged if the sum is not finite. Error-feedback
                codecs only.
            scale: scale to use instead of measuring one: a number, or ``(groups,)`` float32.
                TernGrad only.
            key: key of the random numbers. Default: all zeros except for the codec's own seed, so
                every call draws the same numbers; `TernGrad` warns at the second call.
            out: ``(payload_nbytes,)`` uint8, contiguous, CPU, written in place; allocated if None.

        Returns:
            ``(payload_nbytes,)`` uint8, CPU: header, scales, codes
            (docs/reference/wire-format.md).

        Raises:
            UnsupportedTensor: dtype, device or layout of `x`, `residual` or `out` is not supported.
            ValueError: this codec accepts no residual or scale, or it has the wrong size or value;
                `out` has the wrong size.
        """
        check_alone(self)
        check_tensor(x, "x")
        if encoding_device(x.device) != x.device:
            plane = None if residual is None else residual.cpu()
            payload = self.encode(x.cpu(), residual=plane, scale=scale, key=key, out=out)
            if residual is not None and plane is not None:
                residual.copy_(plane)
            return payload
        key = key if key is not None else RngKey()
        group_numel = self.group_numel(tuple(x.shape)) if x.numel() else 1
        slot = Slot(key.parameter, x.numel(), group_numel, True, 0, start=key.first)
        layout = _layout_of_one(self.form, slot, self.whole_groups)
        payload = host.empty(layout.nbytes) if out is None else out
        check_payload_out(payload, layout.nbytes)
        kernels, nonfinite = of(x.device), False
        if scale is not None:
            given = self.check_scale(scale, layout.group_count)
            self.place_scales(layout, given, payload)
        elif self.measures and layout.group_count:
            scales = host.empty(layout.group_count, torch.float32)
            nonfinite = self.measure(kernels, x, layout, self.scratch(kernels, layout), scales)
            self.place_scales(layout, scales, payload)
        residuals, kept = NO_RESIDUALS, None
        if residual is not None:
            self._check_residual(residual, x)
            residuals, kept = Residuals(residual, residual), _spare_plane(kernels, x.numel())
        nonfinite |= self.encode_body(kernels, x, layout, payload, key, residuals, kept)
        if residual is not None and kept is not None and nonfinite:
            residual.view(-1).copy_(kept)
        header = self.header(layout, DTYPES[x.dtype], nonfinite, key.step, key.stream)
        wire.seal(payload.numpy(), header)
        return payload

    def decode(
        self, payload: Tensor, *, out: Tensor | None = None, layout: PayloadLayout | None = None
    ) -> Tensor:
        """Decode a payload that this codec wrote.

        Args:
            payload: ``(nbytes,)`` uint8, contiguous, CPU; any bytes are safe.
            out: ``(numel,)`` float32, contiguous, written in place; allocated on the CPU if None.
            layout: layout of a segmented payload.

        Returns:
            ``(numel,)`` float32; all NaN if the encoder's input had NaN or Inf.

        Raises:
            CorruptPayload: a check failed; the error names it.
            UnsupportedTensor: dtype, device or layout of `payload` or `out` is not supported.
            ValueError: `out` has the wrong size.
        """
        check_alone(self)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise UnsupportedTensor(
                f"payload must be 1-D uint8, got {payload.dim()}-D {payload.dtype}"
            )
        check_memory(payload, "payload", on_host=True)
        view = payload.numpy()
        header = wire.parse(view)
        if header.segmented:
            if layout is None:
                raise CorruptPayload("segmented", "a segmented payload needs its layout=")
        elif layout is None:
            layout = self._layout_of(header, view.size)
        self.check_header(header, layout, view.size)
        size = max((p.data + p.numel for p in layout.pieces), default=0)
        if out is None:
            out = of(CPU).empty(size)
        else:
            check_memory(out, "out")
            if out.dtype != torch.float32:
                raise UnsupportedTensor(f"out must be float32, got {out.dtype}")
            if out.numel() != size:
                raise ValueError(f"out holds {out.numel()} elements, the payload {size}")
        if header.nonfinite:
            return out.fill_(float("nan"))
        self.validate_packed(payload, layout)
        here = out if encoding_device(out.device) == out.device else of(CPU).empty(size)
        if self.decode_body(of(here.device), [payload], layout, here):
            refuse_unflagged([payload], [layout])
        return out if here is out else out.copy_(here)

    def payload_nbytes(self, numel: int, groups: int = 1) -> int:
        """Return the number of bytes of a payload of `numel` elements in `groups` scale groups,
        header included.
        """
        if numel < 0 or groups < 0:
            raise ValueError(f"numel and groups must not be negative, got {numel} and {groups}")
        scales = 4 * self.form.scales_per_group * groups if numel else 0
        return HEADER_NBYTES + scales + self.form.code_nbytes(0, numel)

    # ---- for an exchange ----
    @abstractmethod
    def options(self) -> dict[str, object]:
        """Return all options that must be equal on every rank, by name."""

    @abstractmethod
    def group_numel(self, shape: tuple[int, ...]) -> int:
        """Return the elements per scale group of a parameter of this shape, at least 1."""

    def sum_form(self, world_size: int) -> Lanes | None:
        """Return the encoder of integer sums of the codes of `world_size` ranks; None if codes have
        no integer sums.
        """
        return None

    def resolved_second_phase(self, world_size: int, *, transformed: bool = False) -> str:
        """Return the second phase of a reduce_scatter with this codec across `world_size` ranks.

        Args:
            world_size: number of ranks.
            transformed: whether owners transform means, which are then no longer sums of codes.
        """
        if self.second_phase:
            return self.second_phase
        sums = None if transformed else self.sum_form(world_size)
        if sums is None:
            return "requantize"
        return "exact" if sums.form.bits <= MOST_EXACT_BITS else "block4"

    def with_second_phase(self, name: str) -> Codec:
        """Return a copy of this codec with another second phase."""
        out = copy.copy(self)
        out.second_phase = name
        return out

    def requantizer(self) -> Codec:
        """Return the codec of the owner's means in a "requantize" second phase."""
        return self

    def scratch(
        self, kernels: Kernels, layout: PayloadLayout, free: Tensor | None = None
    ) -> Tensor | None:
        """Return memory for `measure`, which the caller keeps for all steps; None if not needed.

        Args:
            kernels: kernel set of the values' device.
            layout: layout of the payload whose scales are measured.
            free: uint8 memory that is unused while `measure` runs; it is used if large enough.
        """
        return None

    def measure(
        self,
        kernels: Kernels,
        values: Tensor,
        layout: PayloadLayout,
        scratch: Tensor | None,
        scales: Tensor,
    ) -> bool:
        """Write one float32 scale per group to `scales`; return True if a value is not finite."""
        return False

    def place_scales(self, layout: PayloadLayout, scales: Tensor, payload: Tensor) -> None:
        """Copy measured or agreed scales to their place in a payload."""

    def check_scale(self, scale: float | Tensor, group_count: int) -> Tensor:
        """Return a scale from the caller as ``(group_count,)`` float32; ValueError if invalid."""
        raise ValueError(f"{self.name} takes no scale, got {scale!r}")

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for scales or codes that no encoder writes."""
        host.validate_scales(
            payload,
            HEADER_NBYTES,
            layout.scale_count,
            non_negative=not self.form.signed_scales,
            most=self.most,
        )
        host.validate(payload, self.code, layout.packed)

    def encode_body(
        self,
        kernels: Kernels,
        values: Tensor,
        layout: PayloadLayout | Rows,
        payload: Tensor,
        key: RngKey,
        residuals: Residuals = NO_RESIDUALS,
        kept: Tensor | None = None,
    ) -> bool:
        """Encode all pieces of `values` into a payload; return True if a value is not finite.

        Args:
            kernels: kernel set of the values' device.
            values: flat float32, bfloat16 or float16, as described by `layout`.
            layout: layout of the payload, or the `Rows` of it to encode.
            payload: uint8, the whole payload; measured scales are already in it.
            key: key of the random numbers.
            residuals: planes to read and to write, which may be the same; `NO_RESIDUALS` for none.
            kept: a plane that receives a copy of the old residuals.
        """
        draws = (key.seed, key.rank, key.step, key.stream)
        packed = kernels.encode(
            self.code, values, layout.packed, payload, key=draws, residuals=residuals, kept=kept
        )
        return encode_plain(kernels, values, layout, payload) or packed

    def decode_body(
        self, kernels: Kernels, tensors: Sequence[Tensor], layout: PayloadLayout, out: Tensor
    ) -> bool:
        """Write the averages of all pieces over all payloads to `out`; return True if one is not
        finite.
        """
        return MixedPayloads(tensors, self.code, out.dtype, layout).decode(kernels, out)

    def header(
        self, layout: PayloadLayout, dtype: int, nonfinite: bool, step: int, stream: int
    ) -> wire.Header:
        """Return the header of a payload with this layout."""
        flags = nonfinite * wire.FLAG_NONFINITE | layout.segmented * wire.FLAG_SEGMENTED
        return wire.Header(
            self.form.code,
            dtype,
            flags,
            layout.numel,
            layout.group_numel,
            layout.scale_count,
            step,
            stream,
        )

    def check_header(self, header: wire.Header, layout: PayloadLayout, nbytes: int) -> None:
        """Raise CorruptPayload unless a header describes a payload of this codec and layout."""
        if header.codec != self.form.code:
            raise CorruptPayload(
                "codec", f"a {form_name(header.codec)} payload, this is {self.form.name}"
            )
        if header.segmented != layout.segmented:
            raise CorruptPayload(
                "segmented", f"segmented = {header.segmented}, expected {layout.segmented}"
            )
        for field in ("numel", "group_numel", "scale_count"):
            got, wanted = getattr(header, field), getattr(layout, field)
            if got != wanted:
                raise CorruptPayload(field, f"the header says {got}, expected {wanted}")
        if nbytes != layout.nbytes:
            check = "truncated" if nbytes < layout.nbytes else "trailing"
            raise CorruptPayload(check, f"{nbytes} bytes, expected {layout.nbytes}")

    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self.options().items())
        return f"{type(self).__name__}({inner})"

    def _layout_of(self, header: wire.Header, nbytes: int) -> PayloadLayout:
        """Return the layout that an unsegmented header implies. Numbers in the header are checked
        before any allocation depends on them.
        """
        if nbytes < HEADER_NBYTES + self.form.code_nbytes(0, header.numel):
            raise CorruptPayload("truncated", f"{nbytes} bytes cannot hold {header.numel} elements")
        if header.numel > MAX_NUMEL:
            raise CorruptPayload(
                "numel", f"the header says {header.numel}, a payload holds at most {MAX_NUMEL}"
            )
        whole = not self.form.scales_per_group or not header.numel
        wanted = max(header.numel, 1) if whole else self.form.group_numel or header.group_numel
        if header.group_numel != wanted:
            raise CorruptPayload(
                "group_numel", f"the header says {header.group_numel}, {wanted} expected"
            )
        slot = Slot(0, header.numel, header.group_numel, True, 0)
        groups = -(-header.numel // header.group_numel)
        if header.scale_count != groups * self.form.scales_per_group:
            wanted = groups * self.form.scales_per_group
            raise CorruptPayload(
                "scale_count", f"the header says {header.scale_count}, its groups need {wanted}"
            )
        return PayloadLayout(self.form, whole_pieces([slot]), segmented=False)

    def _check_residual(self, residual: Tensor, x: Tensor) -> None:
        if not self.error_feedback:
            raise ValueError(f"{self!r} takes no residual")
        check_memory(residual, "residual")
        if residual.dtype != torch.float32:
            raise UnsupportedTensor(f"residual must be float32, got {residual.dtype}")
        if residual.device != x.device:
            raise UnsupportedTensor(f"residual is on {residual.device}, the tensor on {x.device}")
        if residual.numel() != x.numel():
            raise ValueError(f"residual holds {residual.numel()} elements, the tensor {x.numel()}")


def encode_plain(
    kernels: Kernels, values: Tensor, layout: PayloadLayout | Rows, payload: Tensor
) -> bool:
    """Encode the fp32 pieces of `values` into a payload; return True if a value is not finite."""
    return kernels.encode(PLAIN_CODE, values, layout.plain, payload)


class MixedPayloads:
    """Payloads with compressed and fp32 pieces, to be averaged.

    Args:
        tensors: ``(nbytes,)`` uint8 payloads, in the order of summation; this object has references
            to them.
        code: code of the compressed pieces.
        dtype: dtype to which averages are rounded.
        rows: segment tables of the pieces, the same for every payload.

    Attributes:
        parts: (payloads, rows to decode) of the compressed pieces, and of the fp32 pieces.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        code: Code,
        dtype: torch.dtype,
        rows: PayloadLayout | Rows,
    ) -> None:
        self.parts = (
            (Payloads(tensors, code, dtype), rows.packed),
            (Payloads(tensors, PLAIN_CODE, dtype), rows.plain),
        )

    def decode(self, kernels: Kernels, out: Tensor, written: int = 0) -> bool:
        """Write averages to `out`, ``(n,)`` of `dtype`; return True if one is not finite.

        Args:
            kernels: kernel set of the device of `out`.
            out: buffer for the averages, overwritten.
            written: as in `Kernels.sum_decode`.
        """
        bad = False
        for payloads, table in self.parts:
            bad |= kernels.sum_decode(payloads, table, out, written)
        return bad


@lru_cache(maxsize=32)
def _layout_of_one(form: Form, slot: Slot, whole_groups: bool) -> PayloadLayout:
    """Return the layout of an unsegmented payload. It is cached, because building the tables of a
    large payload takes as long as encoding a small one.
    """
    return PayloadLayout(form, whole_pieces([slot]), segmented=False, whole_groups=whole_groups)


_spare = threading.local()


def _spare_plane(kernels: Kernels, numel: int) -> Tensor:
    """Return ``(numel,)`` float32 memory of this thread, which later calls use again: touching the
    pages of a new plane takes longer than encoding into it.
    """
    planes: dict[Kernels, Tensor] = _spare.__dict__.setdefault("planes", {})
    if kernels not in planes or planes[kernels].numel() < numel:
        planes[kernels] = kernels.empty(numel)
    return planes[kernels][:numel]
