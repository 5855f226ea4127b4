"""What every codec offers: one-tensor `encode` and `decode`, and the steps of an exchange, each on
a whole payload of many pieces: `measure` (statistics, if the codec has any), `encode_body`, and
`decode_body` on what the ranks sent.
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

from gradcomp.codecs.checks import check_alone, check_memory, check_payload_room, check_tensor
from gradcomp.codecs.lanes import Lanes
from gradcomp.codecs.magnitude import refuse_unflagged
from gradcomp.errors import CorruptPayload, UnsupportedTensor
from gradcomp.kernels import CPU, NO_RESIDUALS, Code, Kernels, Payloads, Residuals, home, host, of
from gradcomp.kernels.tables import DTYPES, MAX_NUMEL
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form, form_name
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.payload.rng import RngKey

# of an integer sum; wider ones cost more than "block4", which loses no accuracy that could be
# measured
MOST_EXACT_BITS = 4
PLAIN_CODE = Code(PLAIN.kernel, dtype=torch.float32)


class Codec(ABC):
    """A way to write gradients in few bits.

    Attributes:
        form: how its codes stand in a payload.
        name: what `gradcomp.codecs.resolve` knows it by: its form's name, or its own where codecs
            share a form.
        shares_scale: the ranks agree on one scale per group before they encode (a scale round).
        error_feedback: encoding takes and returns residuals.
        seed: of the random numbers, for codecs that draw some.
        whole_groups: a scale group must be encoded in one go.
        measures: scales are measured before codes are written.
        second_phase: of a reduce_scatter; None: see `resolved_second_phase`.
        reach: values beyond so many scales of their group are clipped; None: nothing is.
        most: largest scale that is written.
        decay: what residuals keep of what codes leave out, from one step to the next; 1: all.
        rotates: exchanges rotate values at random before they encode them, and averages back; such
            codecs have no residuals.
        can_share_scale: there is a form of this codec with `shares_scale`.
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
        """How kernels write and read its values."""

    @property
    def decay(self) -> float:
        return 1.0

    def of_groups(
        self,
        group_numel: int,
        *,
        shares_scale: bool = False,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> Codec:
        """Return the codec of this form that decodes payloads of such groups and encodes their
        averages again, never clipping.

        Args:
            group_numel: elements of a scale group.
            shares_scale: whether all payloads have one scale a group.
            error_feedback, seed: as of the codec, where it has them.
        """
        return self

    def with_form(self, form: Form) -> Self:
        """Return the same codec for payloads of `form`, which has its number."""
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
            x: any shape, float32, bfloat16 or float16, contiguous; from an accelerator it is copied
                to the host.
            residual: ``(x.numel(),)`` or `x`'s shape, float32, contiguous; what earlier encodings
                left over. Replaced in place by what this one leaves over, times the decay, or left
                as it was if its sum with `x` is not finite. Error-feedback codecs only.
            scale: the scale to use instead of measuring one: a number, or ``(groups,)`` float32.
                TernGrad only.
            key: which random numbers to draw. By default all zeros but for the codec's own seed:
                the same numbers at every call, of which `TernGrad` warns at the second one.
            out: ``(payload_nbytes,)`` uint8, contiguous, CPU, written in place; allocated when
                None.

        Returns:
            ``(payload_nbytes,)`` uint8: header, scales, codes (docs/reference/wire-format.md).

        Raises:
            UnsupportedTensor: dtype, device or layout of `x`, `residual` or `out`.
            ValueError: a residual or scale that this codec does not take, or of the wrong size or
                value; `out` of another size.
        """
        check_alone(self)
        check_tensor(x, "x")
        if home(x.device) != x.device:
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
        check_payload_room(payload, layout.nbytes)
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
            out: ``(numel,)`` float32, contiguous, written in place; allocated when None, in host
                memory.
            layout: of a segmented payload.

        Returns:
            ``(numel,)`` float32, flat; all NaN when the encoder saw NaN or Inf.

        Raises:
            CorruptPayload: names the check that failed.
            UnsupportedTensor: `payload` or `out` of another kind.
            ValueError: `out` of another size.
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
        here = out if home(out.device) == out.device else of(CPU).empty(size)
        if self.decode_body(of(here.device), [payload], layout, here):
            refuse_unflagged([payload], [layout])
        return out if here is out else out.copy_(here)

    def payload_nbytes(self, numel: int, groups: int = 1) -> int:
        """Return the bytes of a payload of `numel` elements in `groups` scale groups, header
        included.
        """
        if numel < 0 or groups < 0:
            raise ValueError(f"numel and groups must not be negative, got {numel} and {groups}")
        scales = 4 * self.form.scales_per_group * groups if numel else 0
        return HEADER_NBYTES + scales + self.form.code_nbytes(0, numel)

    # ---- for an exchange ----
    @abstractmethod
    def options(self) -> dict[str, object]:
        """Return every option that ranks must agree on."""

    @abstractmethod
    def group_numel(self, shape: tuple[int, ...]) -> int:
        """Return the elements of one scale group of a parameter of that shape, at least 1."""

    def sum_form(self, world_size: int) -> Lanes | None:
        """Return how integer sums of `world_size` ranks' codes are written; None where codes
        have none.
        """
        return None

    def resolved_second_phase(self, world_size: int, *, transformed: bool = False) -> str:
        """Return the second phase that a reduce_scatter of this codec among `world_size` ranks
        uses.

        `transformed`: of means that are no sums.
        """
        if self.second_phase:
            return self.second_phase
        sums = None if transformed else self.sum_form(world_size)
        if sums is None:
            return "requantize"
        return "exact" if sums.form.bits <= MOST_EXACT_BITS else "block4"

    def with_second_phase(self, name: str) -> Codec:
        """Return the same codec with another second phase."""
        out = copy.copy(self)
        out.second_phase = name
        return out

    def requantizer(self) -> Codec:
        """Return the codec that writes the owner's means in a "requantize" second phase."""
        return self

    def scratch(
        self, kernels: Kernels, layout: PayloadLayout, free: Tensor | None = None
    ) -> Tensor | None:
        """Return the memory that `measure` needs, to be kept and passed at every step.

        Args:
            kernels: of the values' device.
            layout: of the payload whose scales are measured.
            free: uint8 memory that nobody uses while `measure` runs, taken if it is large enough.
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
        """Write one float32 scale a group to `scales`; return True when a value is not finite."""
        return False

    def place_scales(self, layout: PayloadLayout, scales: Tensor, payload: Tensor) -> None:
        """Copy measured or agreed scales to where they stand in a payload."""

    def check_scale(self, scale: float | Tensor, group_count: int) -> Tensor:
        """Return a passed-in scale as ``(group_count,)`` float32."""
        raise ValueError(f"{self.name} takes no scale, got {scale!r}")

    def validate_packed(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for scales and codes that an encoder does not write."""
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
        """Write the codes of all pieces of `values` into a payload; True: a value is not finite.

        Args:
            kernels: of the values' device.
            values: float32, bfloat16 or float16, flat, as `layout` describes it.
            layout: where everything stands; `Rows`: what of it to encode.
            payload: uint8, whole; measured scales stand in it.
            key: which random numbers to draw.
            residuals: planes to read and to write, `NO_RESIDUALS` for none; both may be one plane.
            kept: a plane like the first, which receives what that held.
        """
        draws = (key.seed, key.rank, key.step, key.stream)
        packed = kernels.encode(
            self.code, values, layout.packed, payload, key=draws, residuals=residuals, kept=kept
        )
        return encode_plain(kernels, values, layout, payload) or packed

    def decode_body(
        self, kernels: Kernels, tensors: Sequence[Tensor], layout: PayloadLayout, out: Tensor
    ) -> bool:
        """Write the average over payloads of all pieces to `out`. True: a value written is not
        finite.
        """
        return MixedPayloads(tensors, self.code, out.dtype, layout).decode(kernels, out)

    def header(
        self, layout: PayloadLayout, dtype: int, nonfinite: bool, step: int, stream: int
    ) -> wire.Header:
        """Return the header of a payload of `layout`."""
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
        """Raise CorruptPayload unless a header describes a payload of `layout` by this codec."""
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
        """Return the layout that an unsegmented header implies; allocates nothing by the numbers
        it reads.
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
    """Write the fp32 pieces of `values` into a payload; True: one is not finite."""
    return kernels.encode(PLAIN_CODE, values, layout.plain, payload)


class MixedPayloads:
    """Payloads with compressed and fp32 pieces, of which averages are made.

    Args:
        tensors: ``(nbytes,)`` uint8 each, in the order in which their values are added; kept as
            long as this object.
        code: of the compressed pieces.
        dtype: to which averages are rounded.
        rows: where the pieces stand, the same in every payload.

    Attributes:
        parts: the compressed pieces and the fp32 ones, each with the rows to decode.
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
        """Write averages to `out`, ``(n,)`` of the dtype given; return True if one is not finite.

        Args:
            kernels: of the device of `out`.
            written: as of `Kernels.sum_decode`.
        """
        bad = False
        for payloads, table in self.parts:
            bad |= kernels.sum_decode(payloads, table, out, written)
        return bad


@lru_cache(maxsize=32)
def _layout_of_one(form: Form, slot: Slot, whole_groups: bool) -> PayloadLayout:
    """Return the layout of an unsegmented payload; making the tables of a large one costs what
    encoding a small one does.
    """
    return PayloadLayout(form, whole_pieces([slot]), segmented=False, whole_groups=whole_groups)


_spare = threading.local()


def _spare_plane(kernels: Kernels, numel: int) -> Tensor:
    """Return float32 memory of this thread's, used again and grown: pages of a fresh plane cost
    more than encoding into it.
    """
    planes: dict[Kernels, Tensor] = _spare.__dict__.setdefault("planes", {})
    if kernels not in planes or planes[kernels].numel() < numel:
        planes[kernels] = kernels.empty(numel)
    return planes[kernels][:numel]
