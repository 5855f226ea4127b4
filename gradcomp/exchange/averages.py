"""The averages of one bucket as they arrive: checked payloads, which are decoded into a tensor
or applied to weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.codecs.base import plain_payloads
from gradcomp.codecs.magnitude import magnitude, refuse_unflagged
from gradcomp.exchange.receive import Inbox
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import Kernels, Payloads
from gradcomp.kernels.tables import Table
from gradcomp.payload.layout import joined_tables

# A sum below this cannot overflow: rounding at each of up to 32767 additions makes it larger by
# less than 1.002, and both float32 and bfloat16 reach almost 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """What an exchange receives of one bucket; made once, good for every step.

    Args:
        kernels: of the bucket's device.
        plan: of the exchange.
        inboxes: of every slice that brings averages: every rank's payload of it, which are added
            up, or every owner's, which are decoded in one go. Whoever keeps the object must keep
            their memory as it is.
        dtype: of the bucket.
    """

    def __init__(
        self, kernels: Kernels, plan: BucketPlan, inboxes: Sequence[Inbox], dtype: torch.dtype
    ) -> None:
        self._kernels, self._inboxes = kernels, inboxes
        self._added, self._dtype, self._numel = not plan.scatters, dtype, plan.numel
        self._parts = [self._payloads(plan, inbox) for inbox in inboxes]

    def _payloads(self, plan: BucketPlan, inbox: Inbox) -> tuple[tuple[Payloads, Table], ...]:
        payloads: Callable[[Sequence[Tensor], torch.dtype], Payloads]
        if self._added:
            sources, tables = inbox.tensors, (inbox.layouts[0].packed, inbox.layouts[0].plain)
            payloads = plan.codec.payloads
        else:
            sources, tables = [inbox.memory], joined_tables(inbox.layouts, inbox.stride)
            payloads = plan.second_phase.payloads
        return (payloads(sources, self._dtype), tables[0]), (
            plain_payloads(sources, self._dtype),
            tables[1],
        )

    def decode(self, out: Tensor) -> bool:
        """Write the averages to `out`, in bucket order; True: one of them is not finite."""
        bad = False
        for number in range(len(self._parts)):
            bad |= self.decode_slice(number, out)
        return bad

    def decode_slice(self, number: int, out: Tensor) -> bool:
        """Write those of one slice."""
        bad = False
        for payloads, table in self._parts[number]:
            bad |= self._kernels.sum_decode(payloads, table, out, self._numel)
        return bad

    def refuse_unflagged(self, number: int, where: str) -> None:
        """Raise CorruptPayload if averages of a slice are not finite because a payload is not,
        though its flag says it is.
        """
        refuse_unflagged(self._inboxes[number].tensors, self._inboxes[number].layouts, where)

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights: `Kernels.update` with
        targets by parameter.
        """
        for part in self._parts:
            for payloads, table in part:
                self._kernels.update(table, targets, rules, payloads)

    def are_safe(self) -> bool:
        """Tell, from scales and plain values alone, that averages are finite and their sums
        cannot overflow the bucket's dtype.
        """
        if self._dtype == torch.float16:
            return False
        for inbox in self._inboxes:
            found = [
                magnitude(tensor, layout)
                for tensor, layout in zip(inbox.tensors, inbox.layouts, strict=True)
            ]
            if not (sum(found) < SAFE_SUM if self._added else all(one < SAFE_SUM for one in found)):
                return False
        return True
