"""What a rank sends in the first phase: its bucket as one payload, or that payload cut into a message for each owner."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import Kernels
from gradcomp.kernels.tables import CopyTable
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout, message_copies


class Outbox:
    """The memory of a bucket's own payload, used again at every step.

    Args:
        plan: where every byte goes.

    Attributes:
        local: ``(plan.local.nbytes,)`` uint8: the whole bucket, encoded.
        send: what travels: `local`, or all messages one after the other.
    """

    def __init__(self, plan: BucketPlan) -> None:
        self.local = torch.empty(plan.local.nbytes, dtype=torch.uint8)
        self.send = self.local
        self._copies: CopyTable | None = None
        layouts, firsts = [plan.local], [0]
        if plan.scatters:
            layouts, firsts = plan.messages, [0, *accumulate(plan.send_nbytes[:-1])]
            self.send = torch.empty(sum(plan.send_nbytes), dtype=torch.uint8)
            self._copies = message_copies(plan.local, plan.messages, firsts)
        whole = self.send.numpy()
        self._sealed = [(whole[f : f + one.nbytes], one) for f, one in zip(firsts, layouts, strict=True)]

    def seal(self, kernels: Kernels, header: Callable[[PayloadLayout], wire.Header]) -> None:
        """Cut what stands encoded in `local` into messages, where there are any, and write their headers."""
        if self._copies is not None:
            kernels.copy(self.send, self.local, self._copies)
        for message, layout in self._sealed:
            wire.seal(message, header(layout))
