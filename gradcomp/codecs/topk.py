"""The largest 1/64 of every block of 4,096 values, 2 bits each, with error feedback: for exchanges
that are rare.

Of each block the values of largest magnitude are kept. Where they stand is Rice coded, a byte each
whatever the gradient, so that a payload's size is known beforehand; how large they are is one of
two magnitudes of their scale group of 32,768 values, the means of those above and of those not
above the group's mean. All else is left for the next exchange (Stich et al. 2018, "Sparsified SGD
with memory"; Aji and Heafield 2017). 81 bytes for 4,096 values.

Deviations from a global top-k: it is of blocks, so that threads, buckets and shards change no bit,
and magnitudes are two.
"""

from __future__ import annotations

from torch import Tensor

from gradcomp.codecs.base import Codec
from gradcomp.kernels import Kernels, Residuals
from gradcomp.payload.form import TOPK
from gradcomp.payload.layout import PayloadLayout, Rows
from gradcomp.payload.rng import RngKey


class TopK(Codec):
    """The largest 1/64 of every block: 0.158 bits a value, scales included. Every rank gets every
    payload ("all_gather").

    For exchanges every so many steps (`gradcomp.DiLoCo`), and many of them: what is left out waits
    for its turn. With 23 syncs a small GPT lost 0.50 nats where ternary lost none (one seed;
    docs/explanation/accuracy.md).

    Args:
        error_feedback: carry what is left out into the next exchange. Without it 63 of 64 values
            are lost; False is for experiments.

    Raises:
        ValueError: an option out of its range.
    """

    form = TOPK
    whole_groups = True
    gathers_only = True

    def __init__(self, *, error_feedback: bool = True) -> None:
        if error_feedback not in (True, False):
            raise ValueError(f"error_feedback must be True or False, got {error_feedback!r}")
        self.error_feedback = bool(error_feedback)

    def of_groups(
        self,
        group_numel: int,
        *,
        shares_scale: bool = False,
        error_feedback: bool = True,
        seed: int = 0,
    ) -> Codec:
        return type(self)(error_feedback=error_feedback)

    def options(self) -> dict[str, object]:
        return {"error_feedback": self.error_feedback}

    def group_numel(self, shape: tuple[int, ...]) -> int:
        return self.form.group_numel or 1

    def resolved_second_phase(self, world_size: int, *, transformed: bool = False) -> str:
        return ""

    def with_second_phase(self, name: str) -> Codec:
        raise ValueError(
            f"{self!r} has no second phase, got {name!r}: its payloads are gathered by all ranks"
        )

    def encode_packed(
        self,
        kernels: Kernels,
        values: Tensor,
        layout: PayloadLayout | Rows,
        payload: Tensor,
        key: RngKey,
        residuals: Residuals,
        kept: Tensor | None = None,
    ) -> bool:
        return kernels.encode(
            self.form.kernel, values, layout.packed, payload, residuals=residuals, kept=kept
        )
