"""The averages of one bucket as they arrive: checked payloads, which are decoded into a tensor or applied to weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.codecs.base import plain_payloads
from gradcomp.codecs.magnitude import magnitude, refuse_unflagged
from gradcomp.kernels import Kernels, Payloads
from gradcomp.kernels.tables import Table
from gradcomp.payload.layout import PayloadLayout

# A sum below this cannot overflow: rounding at each of up to 32767 additions makes it larger by less than 1.002, and both
# float32 and bfloat16 reach almost 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """What an exchange receives of one bucket; made once, good for every step.

    Args:
        kernels: of the bucket's device.
        tensors: the payloads: every rank's of the whole bucket, which are added up, or every owner's of its pieces.
        layouts: theirs.
        added: whether payloads are added up; they have one layout then.
        tables: where the compressed and the fp32 pieces stand: in each payload, or, where they are not added up, in `whole`.
        whole: the memory that all owners' payloads stand in.
        payloads: returns how compressed pieces are averaged (`Codec.payloads`, `SecondPhase.payloads`).
        dtype: of the bucket.
    """

    def __init__(
        self,
        kernels: Kernels,
        tensors: Sequence[Tensor],
        layouts: Sequence[PayloadLayout],
        *,
        added: bool,
        tables: tuple[Table, Table],
        whole: Tensor,
        payloads: Callable[[Sequence[Tensor], torch.dtype], Payloads],
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._tensors, self._layouts = kernels, tensors, layouts
        self._added, self._dtype = added, dtype
        sources = tensors if added else [whole]
        self._parts = ((payloads(sources, dtype), tables[0]), (plain_payloads(sources, dtype), tables[1]))

    def decode(self, out: Tensor) -> bool:
        """Write the averages to `out`, in bucket order; True: one of them is not finite."""
        bad = False
        for payloads, table in self._parts:
            bad |= self._kernels.sum_decode(payloads, table, out)
        return bad

    def refuse_unflagged(self, where: str) -> None:
        """Raise CorruptPayload if averages are not finite because a payload is not, though its flag says it is."""
        refuse_unflagged(self._tensors, self._layouts, where)

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights: `Kernels.update` with targets by parameter."""
        for payloads, table in self._parts:
            self._kernels.update(table, targets, rules, payloads)

    def are_safe(self) -> bool:
        """Tell, from scales and plain values alone, that averages are finite and their sums cannot overflow the bucket's dtype."""
        if self._dtype == torch.float16:
            return False
        found = [magnitude(tensor, layout) for tensor, layout in zip(self._tensors, self._layouts, strict=True)]
        return sum(found) < SAFE_SUM if self._added else all(one < SAFE_SUM for one in found)
