"""What codecs with one measured scale a group have in common: a statistics pass before the
codes, scales that are given.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.codecs.base import Codec
from gradcomp.kernels import Kernels
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.layout import PayloadLayout


class ScaledCodec(Codec):
    """A codec whose codes are fractions of a scale: a group's absolute maximum, clipped.

    Attributes:
        clip_sigma: clip at this many standard deviations; None: do not clip.
    """

    measures = True
    clip_sigma: float | None = None

    def scratch(
        self, kernels: Kernels, layout: PayloadLayout, room: Tensor | None = None
    ) -> Tensor:
        return kernels.scratch(layout.groups, room)

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

    def place_scales(
        self, kernels: Kernels, layout: PayloadLayout, scales: Tensor, payload: Tensor
    ) -> None:
        kernels.copy_bytes(payload, HEADER_NBYTES, scales, 4 * layout.scale_count)

    def check_scale(self, scale: float | Tensor, group_count: int) -> Tensor:
        given = torch.as_tensor(scale, dtype=torch.float32).reshape(-1)
        given = given.expand(group_count) if given.numel() == 1 else given
        if given.numel() != group_count:
            raise ValueError(f"scale has {given.numel()} values for {group_count} groups")
        if not bool((torch.isfinite(given) & (given >= 0)).all()):
            raise ValueError(f"scale must be finite and not negative, got {scale!r}")
        # -0.0 becomes 0.0; a sum would flush what is denormal where the thread flushes
        return given.abs().contiguous()
