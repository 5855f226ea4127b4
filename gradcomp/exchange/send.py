"""What a rank sends in the first phase: its bucket as one payload, or parts of that payload, one
message each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gradcomp.kernels import Kernels
from gradcomp.kernels.tables import CopyTable
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout, message_copies


class Outbox:
    """The memory of what a slice of a bucket sends, used again at every step.

    Args:
        layout: of the whole bucket's payload.
        local: ``(layout.nbytes,)`` uint8: that payload.
        messages: what is sent of it; `layout` itself is not copied.

    Attributes:
        send: ``(n,)`` uint8, what travels: `local`, or all messages one after the other.
        nbytes: of each message.
    """

    def __init__(
        self, layout: PayloadLayout, local: Tensor, messages: Sequence[PayloadLayout]
    ) -> None:
        self._local, self.send = local, local
        self._copies: CopyTable | None = None
        self.nbytes = [one.nbytes for one in messages]
        firsts = [0, *accumulate(self.nbytes[:-1])]
        if messages[0] is not layout:
            self.send = torch.empty(sum(self.nbytes), dtype=torch.uint8)
            self._copies = message_copies(layout, messages, firsts)
        whole = self.send.numpy()
        self._sealed = [
            (whole[f : f + one.nbytes], one) for f, one in zip(firsts, messages, strict=True)
        ]

    def seal(self, kernels: Kernels, header: Callable[[PayloadLayout], wire.Header]) -> None:
        """Cut what stands encoded in the payload into messages, where there are any, and write
        their headers.
        """
        if self._copies is not None:
            kernels.copy(self.send, self._local, self._copies)
        for message, layout in self._sealed:
            wire.seal(message, header(layout))
