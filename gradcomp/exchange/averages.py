"""The averages of one bucket as they arrive: checked payloads, which are decoded into a tensor or applied to weights."""

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
from gradcomp.payload.layout import joined_tables

# A sum below this cannot overflow: rounding at each of up to 32767 additions makes it larger by less than 1.002, and both
# float32 and bfloat16 reach almost 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """What an exchange receives of one bucket; made once, good for every step.

    Args:
        kernels: of the bucket's device.
        plan: of the exchange.
        inbox: every rank's payload of the whole bucket, which are added up, or every owner's of its pieces, which are decoded
            in one go. Whoever keeps the object must keep their memory as it is.
        dtype: of the bucket.
    """

    def __init__(self, kernels: Kernels, plan: BucketPlan, inbox: Inbox, dtype: torch.dtype) -> None:
        self._kernels, self._inbox = kernels, inbox
        self._added, self._dtype = not plan.scatters, dtype
        payloads: Callable[[Sequence[Tensor], torch.dtype], Payloads]
        if self._added:
            sources, tables = inbox.tensors, (plan.local.packed, plan.local.plain)
            payloads = plan.codec.payloads
        else:
            sources, tables = [inbox.memory], joined_tables(plan.second, plan.second_nbytes)
            payloads = plan.second_phase.payloads
        self._parts = ((payloads(sources, dtype), tables[0]), (plain_payloads(sources, dtype), tables[1]))

    def decode(self, out: Tensor) -> bool:
        """Write the averages to `out`, in bucket order; True: one of them is not finite."""
        bad = False
        for payloads, table in self._parts:
            bad |= self._kernels.sum_decode(payloads, table, out)
        return bad

    def refuse_unflagged(self, where: str) -> None:
        """Raise CorruptPayload if averages are not finite because a payload is not, though its flag says it is."""
        refuse_unflagged(self._inbox.tensors, self._inbox.layouts, where)

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights: `Kernels.update` with targets by parameter."""
        for payloads, table in self._parts:
            self._kernels.update(table, targets, rules, payloads)

    def are_safe(self) -> bool:
        """Tell, from scales and plain values alone, that averages are finite and their sums cannot overflow the bucket's dtype."""
        if self._dtype == torch.float16:
            return False
        found = [magnitude(tensor, layout) for tensor, layout in zip(self._inbox.tensors, self._inbox.layouts, strict=True)]
        return sum(found) < SAFE_SUM if self._added else all(one < SAFE_SUM for one in found)
