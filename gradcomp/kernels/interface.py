"""The protocol of kernel sets, through which all other code calls compiled code.

A kernel set works on the values of one device type (buckets, shards, residual planes, weights).
Payloads, scales and tables are in host memory for every device. Every set gives the same bits.
Tensors are dense. Only a kernel set uses their addresses: callers access values through a set or
through torch operations. `gradcomp.kernels.of` returns the set of a device.
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
        old, new: float32 planes to read and to write, which may be the same; or None.
        counted: called with the sum of the magnitudes that a decay has dropped, or None.
    """

    old: Tensor | None = None
    new: Tensor | None = None
    counted: Callable[[float], None] | None = None


NO_RESIDUALS = Residuals()


@dataclass(frozen=True, slots=True)
class Code:
    """Description of the codes of a codec for kernels. Fields that a kernel does not use are None.

    Attributes:
        kernel: kernel of the form (`gradcomp.payload.form.Form.kernel`), which decodes and checks.
        encoder: kernel that encodes, if it has another name; "": the same as `kernel`.
        dtype: (values) float32 or bfloat16.
        bits: (block, lanes) bits per code.
        shared: (ternary) whether all averaged payloads have the scales of the first.
        world_size: (lanes: sums in one payload) number of ranks in a sum.
        step: (nearest) scale as a multiple of the root mean square.
        means: (onebit) values of the two codes; None: the means of their classes.
        stream_nbytes: (entropy) bytes of a whole stream, including its scale.
        decay: factor on the encoding error that becomes the new residual, in [0, 1]; None: no
            residuals.
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
    """Payloads of one code to be averaged, in the order of summation.

    Attributes:
        tensors: ``(nbytes,)`` uint8 payloads in host memory.
        code: code of all payloads.
        dtype: dtype to which averages are rounded.
        prepared: data that kernel sets cache at their first call, by the name of the set.
    """

    tensors: Sequence[Tensor]
    code: Code
    dtype: torch.dtype
    prepared: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


class WeightKernels(Protocol):
    """Operations on the weights of one device."""

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[Any] | None = None,
    ) -> bool:
        """Update weights in place; return True if an average is not finite.

        Args:
            table: the elements of each parameter to update.
            targets: result of `targets`, indexed by the parameter numbers of the table.
            rules: array of `rules.RULE`, indexed by the rule numbers of the targets.
            payloads: payloads to decode gradients from; None: use the targets' gradient tensors.
                A set may also decode, and report, averages of parameters without a rule.
            norms: ``(2 * len(table),)`` float64, overwritten by rules that compute sums, two per
                row.
        """

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        """Return the targets of an update, an array with one row per parameter; parameter k uses
        rule k (field "rule"). The caller must keep the tensors as long as the array, which may have
        their addresses (`rules.TARGET`). Rows may be copied to another array of the same dtype.

        Args:
            tensors: lists by field (weight, trail, gradient, state0, state1); None for a parameter
                without the field.
        """

    def split(self, weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
        """Split float32 numbers into bfloat16 tops and 16-bit trails, which are overwritten."""

    def join(self, top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
        """Join bfloat16 tops and 16-bit trails to float32 `weights`; the inverse of `split`."""


class Kernels(WeightKernels, Protocol):
    """The kernel set of one device."""

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialized ``(numel,)`` tensor for values. All memory for values is
        allocated by this method.
        """

    # ---- statistics ------------------------------------------------------------------------------

    def scratch(self, groups: Groups, free: Tensor | None = None) -> Tensor:
        """Return uint8 scratch memory for `scales`. If the set works on host memory and `free`, an
        unused uint8 tensor, is large enough, the result is a view of it.
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
        """Write min(absolute maximum, clip_sigma * standard deviation) of every group to `out`;
        return True if a value is not finite.

        Args:
            values: float32, bfloat16 or float16.
            table, groups: the rows and groups of `values`.
            clip_sigma: number of standard deviations; None: use the absolute maximum.
            scratch: result of `scratch`.
            out: ``(groups,)`` float32, host memory, overwritten.
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
        """Encode the rows of `table` of `values` into `payload`; return True if a value is not
        finite.

        Args:
            code: description of the codes.
            values: float32, bfloat16 or float16.
            table: the rows, with their offsets in the values, planes and payload.
            payload: uint8, host memory. Scales measured by `scales` are already in it; other
                kernels write their own scales.
            key: (seed, rank, step, stream), for kernels that draw random numbers.
            residuals: planes for codes with a decay.
            kept: a plane that receives a copy of the old residuals.
        """

    # ---- averages --------------------------------------------------------------------------------

    def sum_decode(self, payloads: Payloads, table: Table, out: Tensor, written: int = 0) -> bool:
        """Write averages to `out`, of the payloads' dtype; return True if one is not finite.

        Args:
            payloads: the payloads to average.
            table: the rows to decode.
            out: buffer for the averages, overwritten.
            written: number of elements that this and similar calls write before any is read, if
                larger than that of `table`: large outputs bypass the CPU's cache.
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
        """Write units = sqrt(moments) + floor and out = (values + residual) / units. All tensors
        are ``(n,)`` float32 and must not overlap.
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
        """Write after = gain * (values * inverse)^2 + keep * before, with 1 for `before` if it is
        None; return True if a result is not finite.
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
        """Rotate every scale group of ``(n,)`` float32 in place, window by window: flip signs at
        random, then transform.

        Args:
            values: the values, overwritten.
            group_numel: elements of a scale group.
            first: first element of the values within the parameter.
            parameter: position of the parameter, for the random signs.
            key: (seed, rank, step, stream) of the random signs.
            back: apply the inverse rotation.
        """

    def unbias(self, values: Tensor, group_numel: int, first: int) -> None:
        """Scale every group of ``(n,)`` float32 in place, so that its 1-bit codes are unbiased
        under random rotations.
        """

    # ---- residuals -------------------------------------------------------------------------------

    def rescale(self, plane: Tensor, factor: float) -> None:
        """Multiply a residual plane by `factor`, in place."""
