"""What a kernel set offers: the one protocol between everything above and compiled code.

A kernel set works on the values of one kind of device (buckets, shards, residual planes, weights).
Payloads, scales and tables are host memory whatever the device. Every set gives the same bits.
Tensors are dense; a set takes their addresses, its callers take none. `gradcomp.kernels.of` returns
the set of a device.

Callers touch values through a set, or through torch operations; nothing else reads their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.tables import Groups, Table


class Residuals(NamedTuple):
    """Residuals of an encoding.

    Attributes:
        old, new: planes to read and to write, float32; both may be one plane.
        counted: is called with the sum of the magnitudes that a decay dropped; None: nobody counts.
    """

    old: Tensor | None = None
    new: Tensor | None = None
    counted: Callable[[float], None] | None = None


NO_RESIDUALS = Residuals()


@dataclass(frozen=True, slots=True)
class Code:
    """How kernels write and read the values of one form: what they need to know of a codec.

    Attributes:
        kernel: of the form (`gradcomp.payload.form.Form.kernel`): reads codes and checks them.
        encoder: the kernel that writes them, where several do; "": the same.
        dtype: (values) float32 or bfloat16.
        bits: (block, lanes) of a code.
        shared: (ternary) whether payloads that are averaged have the scales of the first.
        world_size: (lanes: sums in one payload) ranks in a sum.
        step: (nearest) what a scale is in root mean squares.
        means: (onebit) what the two codes stand for; None: the means of their classes.
        stream_nbytes: (entropy) bytes of a whole stream, its scale included.
        decay: what new residuals keep of what codes leave out, in [0, 1]; None: no residuals.
    """

    kernel: str
    encoder: str = ""
    dtype: torch.dtype | None = None
    bits: int | None = None
    shared: bool | None = None
    world_size: int | None = None
    step: float | None = None
    means: tuple[float, float] | None = None
    stream_nbytes: int | None = None
    decay: float | None = None


@dataclass(eq=False)
class Payloads:
    """Payloads of one code, in the order in which they are added, and how their average is made.

    Attributes:
        tensors: ``(nbytes,)`` uint8 each, host memory; kept as long as this object.
        code: of all of them.
        dtype: that averages are rounded to.
        prepared: what kernel sets make of them at their first call, by the set's name.
    """

    tensors: Sequence[Tensor]
    code: Code
    dtype: torch.dtype
    prepared: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


class Kernels(Protocol):
    """The kernels of one device."""

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``(numel,)`` memory for values, with anything in it: nobody else allocates any."""

    # ---- statistics ------------------------------------------------------------------------------

    def scratch(self, groups: Groups, free: Tensor | None = None) -> Tensor:
        """Return memory for `scales`, uint8; in `free`, host memory of uint8 that nobody uses
        meanwhile, if the set works on host memory and it is large enough.
        """

    def scales(
        self,
        values: Tensor,
        table: Table,
        groups: Groups,
        clip_sigma: float | None,
        scratch: Tensor,
        out: Tensor,
    ) -> bool:
        """Measure min(absolute maximum, clip_sigma * standard deviation) of every group; True: a
        value is not finite.

        Args:
            values: float32, bfloat16 or float16, whose groups `table` and `groups` describe.
            clip_sigma: None: the absolute maximum.
            scratch: from `scratch`.
            out: ``(groups,)`` float32, host memory, written.
        """

    # ---- encoding --------------------------------------------------------------------------------

    def encode(
        self,
        code: Code,
        values: Tensor,
        table: Table,
        payload: Tensor,
        *,
        key: tuple[int, int, int, int] | None = None,
        residuals: Residuals = NO_RESIDUALS,
        kept: Tensor | None = None,
    ) -> bool:
        """Write the codes of `values` where `table` says; True: a value is not finite.

        Args:
            code: how.
            values: float32, bfloat16 or float16.
            payload: uint8; measured scales stand in it, and kernels that measure themselves write
                theirs.
            key: (seed, rank, step, stream), for kernels that draw random numbers.
            residuals: for codes with a decay.
            kept: a plane like the first, which receives what that held.
        """

    # ---- averages --------------------------------------------------------------------------------

    def sum_decode(self, payloads: Payloads, table: Table, out: Tensor, written: int = 0) -> bool:
        """Write averages to `out`, of the payloads' dtype; True: one that was written is not
        finite.

        `written`: elements that calls like this write before any is read, where these are more than
        the table's.
        """

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[Any] | None = None,
    ) -> bool:
        """Update weights in place, from gradient tensors or straight from payloads; True: an
        average is not finite.

        Args:
            table: which elements of which parameters.
            targets: from `targets`, by the parameter numbers of the table.
            rules: `rules.RULE`, by the rule numbers of the targets.
            norms: ``(2 * len(table),)`` float64, what rules that add up write, two a row.
        """

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        """Return `rules.TARGET` of parameters, rule k for the k-th; whoever keeps it keeps the
        tensors.

        Args:
            tensors: lists by field (weight, trail, gradient, state0, state1), None where a
                parameter has none.
        """

    def are_finite(self, values: Tensor) -> bool:
        """Return whether all float32 values are finite."""

    # ---- units of second moments -----------------------------------------------------------------

    def divide(
        self,
        values: Tensor,
        residual: Tensor | None,
        moments: Tensor,
        floor: float,
        units: Tensor,
        out: Tensor,
    ) -> None:
        """Write units = sqrt(moments) + floor and out = (values + residual) / units; ``(n,)``
        float32 that do not overlap.
        """

    def multiply(self, values: Tensor, units: Tensor) -> bool:
        """Multiply values by units in place; return True if a product is not finite."""

    def follow(
        self,
        values: Tensor,
        inverse: float,
        before: Tensor | None,
        keep: float,
        gain: float,
        after: Tensor,
    ) -> bool:
        """Write after = gain * (values * inverse)^2 + keep * before, 1 where that is None;
        return True if one is not finite.
        """

    # ---- rotation --------------------------------------------------------------------------------

    def rotate(
        self,
        values: Tensor,
        group_numel: int,
        first: int,
        parameter: int,
        key: tuple[int, int, int, int],
        *,
        back: bool = False,
    ) -> None:
        """Flip signs at random and transform every scale group's run of ``(n,)`` float32 in place,
        window by window; or undo that.

        Args:
            first: element of the parameter with which the values begin.
            key: seed, rank, step and stream of the random signs.
        """

    def unbias(self, values: Tensor, group_numel: int, first: int) -> None:
        """Multiply every run of ``(n,)`` float32 in place by what makes 1-bit codes of it
        unbiased under random rotations.
        """

    # ---- residuals and weights -------------------------------------------------------------------

    def rescale(self, plane: Tensor, factor: float) -> None:
        """Multiply a residual plane by `factor`, in place."""

    def split(self, weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
        """Split float32 numbers into bfloat16 tops and 16-bit trails."""

    def join(self, top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
        """Join bfloat16 tops and 16-bit trails to the float32 numbers they were split from."""
