"""TernGrad codes: sign(x) with probability |x| / S, else 0, in two bits.

Implements Wen, Xu, Yan, Wu, Wang, Chen, Li 2017, "TernGrad", equations 3-5, with gradient clipping
(equation 9: at clip_sigma standard deviations) and scaler sharing (section 3.2). Deviations: if the
mean of a group exceeds its standard deviation (equation 9 assumes values around zero), the bound
grows by the difference, so that groups of equal elements keep their values; scales may be per row
or block; the owner's second encoding never clips, because means of ternary values are sparse and
their standard deviation does not indicate outliers.
"""

from __future__ import annotations

import itertools
import math
import warnings

import torch
from torch import Tensor

from gradcomp.codecs.base import Codec
from gradcomp.codecs.checks import check_group, check_second_phase, resolve_group
from gradcomp.codecs.lanes import Lanes
from gradcomp.kernels import Code, Kernels, host
from gradcomp.payload.form import HEADER_NBYTES, TERNARY
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.rng import RngKey, check_uint32

SAME_DRAWS = (
    "TernGrad.encode without key= draws the same random numbers at every call and on every rank:"
    " what is rounded up once is rounded up always, and the error of an average does not fall with"
    " the number of payloads. Pass key=gradcomp.codecs.RngKey(seed=..., rank=..., step=...,"
    " parameter=...)"
)
# the second encoding without a key draws the random numbers of the first again, and warns
_encodings_without_key = itertools.count()


class TernGrad(Codec):
    """TernGrad: 2 bits per value, unbiased, no residuals.

    Args:
        clip_sigma: clip at this many standard deviations before scaling (TernGrad: 2.5), or farther
            out if a group's mean exceeds its standard deviation; None: no clipping, so that
            decoded values are unbiased for the gradient itself.
        scale: "shared": all ranks use the largest scale of any rank, so that sums of codes are
            integers and can be sent exactly; this needs one small collective. "own": each rank uses
            its own scale: less variance, no extra collective.
        group: elements with one scale: "tensor" (layer-wise), "row", or a block of n elements.
        second_phase: second phase of a reduce_scatter: "exact" (integer sums), "requantize",
            "block2", "block4", "block8" (means in evenly spaced levels, with residuals of the
            owner; the bits do not depend on the number of ranks), "bf16", "fp32". None: with a
            shared scale, "exact" up to 7 ranks, whose sums need at most 4 bits, and "block4" from 8
            ranks on; else "requantize".
        seed: seed of the random numbers, uint32, the same on every rank.

    Raises:
        ValueError: an option is out of its range, or "exact" with own scales.
    """

    form = TERNARY
    name = "terngrad"
    can_share_scale = True
    measures = True
    reach = 1.0

    def __init__(
        self,
        *,
        clip_sigma: float | None = 2.5,
        scale: str = "shared",
        group: str | int = "tensor",
        second_phase: str | None = None,
        seed: int = 0,
    ) -> None:
        number = isinstance(clip_sigma, (int, float)) and not isinstance(clip_sigma, bool)
        if clip_sigma is not None and not (number and math.isfinite(clip_sigma) and clip_sigma > 0):
            raise ValueError(f"clip_sigma must be None or a positive number, got {clip_sigma!r}")
        if scale not in ("shared", "own"):
            raise ValueError(f'scale must be "shared" or "own", got {scale!r}')
        check_group(group, ("tensor", "row"))
        second_phase = check_second_phase(second_phase)
        if second_phase == "exact" and scale == "own":
            raise ValueError(
                'second_phase="exact" needs scale="shared", got "own": codes of different scales'
                " have no integer sum"
            )
        self.clip_sigma = None if clip_sigma is None else float(clip_sigma)
        self.scale = scale
        self.group = group
        self.second_phase = second_phase
        self.seed = check_uint32("seed", seed)
        self.shares_scale = scale == "shared"

    def of_groups(
        self,
        group_numel: int,
        *,
        shares_scale: bool = False,
    ) -> Codec:
        scale = "shared" if shares_scale else "own"
        return type(self)(clip_sigma=None, scale=scale, group=group_numel, seed=self.seed)

    def options(self) -> dict[str, object]:
        return {
            "clip_sigma": self.clip_sigma,
            "scale": self.scale,
            "group": self.group,
            "second_phase": self.second_phase,
            "seed": self.seed,
        }

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return resolve_group(self.group, shape)

    def sum_form(self, world_size: int) -> Lanes | None:
        return Lanes(world_size) if self.shares_scale else None

    def requantizer(self) -> Codec:
        return type(self)(clip_sigma=None, scale="own", group=self.group, seed=self.seed)

    def encode(
        self,
        x: Tensor,
        *,
        residual: Tensor | None = None,
        scale: float | Tensor | None = None,
        key: RngKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if residual is not None:
            raise ValueError(
                "terngrad takes no residual: its codes are unbiased and error feedback makes the"
                " residual grow (64 to 105 times the gradient after 200 steps); use OneBit for"
                " error feedback"
            )
        if key is None:
            key = RngKey(seed=self.seed)
            if next(_encodings_without_key) == 1:
                warnings.warn(SAME_DRAWS, stacklevel=2)
        return super().encode(x, scale=scale, key=key, out=out)

    @property
    def code(self) -> Code:
        return Code(self.form.kernel, shared=self.shares_scale)

    def scratch(
        self, kernels: Kernels, layout: PayloadLayout, free: Tensor | None = None
    ) -> Tensor:
        return kernels.scratch(layout.groups, free)

    def measure(
        self,
        kernels: Kernels,
        values: Tensor,
        layout: PayloadLayout,
        scratch: Tensor | None,
        scales: Tensor,
    ) -> bool:
        blocks = scratch if scratch is not None else self.scratch(kernels, layout)
        return kernels.scales(values, layout.packed, layout.groups, self.clip_sigma, blocks, scales)

    def place_scales(self, layout: PayloadLayout, scales: Tensor, payload: Tensor) -> None:
        host.copy_bytes(payload, HEADER_NBYTES, scales, 4 * layout.scale_count)

    def check_scale(self, scale: float | Tensor, group_count: int) -> Tensor:
        given = torch.as_tensor(scale, dtype=torch.float32, device="cpu").reshape(-1)
        given = given.expand(group_count) if given.numel() == 1 else given
        if given.numel() != group_count:
            raise ValueError(f"scale has {given.numel()} values for {group_count} groups")
        if not bool((torch.isfinite(given) & (given >= 0)).all()):
            raise ValueError(f"scale must be finite and not negative, got {scale!r}")
        # -0.0 becomes 0.0; adding 0.0 instead would flush denormals if the thread does so
        return given.abs().contiguous()
