"""The memory of one bucket's exchange, slice by slice, and what is known of each slice while it
is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.codecs.base import plain_payloads
from gradcomp.comm.base import Work
from gradcomp.exchange.receive import Inbox
from gradcomp.exchange.second import Owned
from gradcomp.exchange.send import Outbox
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.slices import Slice
from gradcomp.kernels import Kernels


@dataclass(eq=False)
class Second:
    """A slice at its owner.

    Attributes:
        owned: what the second payload is made of.
        inbox: where those of all owners arrive; None: with a later slice.
        bad: what this rank has sent is not finite.
    """

    owned: Owned
    inbox: Inbox | None
    bad: bool = False


@dataclass(eq=False)
class Traffic:
    """A slice on its way.

    Attributes:
        plan: what travels.
        outbox, first: what is sent and what arrives in the first phase.
        second: of a reduce_scatter.
        work: the collective that is waited for next.
        nonfinite: here, in this slice or one before it.
        flagged: the same on any rank.
    """

    plan: Slice
    outbox: Outbox
    first: Inbox
    second: Second | None
    work: Work | None = None
    nonfinite: bool = False
    flagged: bool = False

    @property
    def brings(self) -> Inbox | None:
        """Where averages come from, if this slice brings any."""
        return self.first if self.second is None else self.second.inbox


class Memory:
    """What a bucket's exchange uses at every step.

    Args:
        plan: where every byte goes.
        kernels: of the bucket's device.

    Attributes:
        local: uint8: the whole bucket, encoded.
        scales, scratch: for statistics, which are done before anything arrives.
        shard: ``(n,)`` float32: means that this rank owns.
        slices: in order.
    """

    def __init__(self, plan: BucketPlan, kernels: Kernels) -> None:
        self._plan, self._kernels, n = plan, kernels, plan.world_size
        self.local = torch.empty(plan.local.nbytes, dtype=torch.uint8)
        self.scales = torch.empty(plan.local.group_count if plan.codec.measures else 0)
        self.shard = torch.empty(plan.shard_numel if plan.scatters else 0)
        arriving = [one.messages[plan.rank if plan.scatters else 0] for one in plan.slices]
        nbytes = [n * layout.nbytes for layout in arriving]
        recv = torch.empty(sum(nbytes), dtype=torch.uint8)
        self.scratch = plan.codec.scratch(kernels, plan.local, room=recv)
        self.slices = []
        for one, layout, part in zip(plan.slices, arriving, torch.split(recv, nbytes), strict=True):
            first = Inbox(part, layout.nbytes, [layout] * n, plan.rank, plan.codec.validate_packed)
            # with the last slice all has arrived and been decoded
            room = recv if one is plan.slices[-1] else part
            second = self._second(one, first.tensors, room) if plan.scatters else None
            self.slices.append(
                Traffic(one, Outbox(plan.local, self.local, one.messages), first, second)
            )

    def _second(self, one: Slice, arrived: list[Tensor], room: Tensor) -> Second:
        """Return what a slice needs at its owner; `room` is free once what arrived has been
        decoded.
        """
        plan, layout = self._plan, one.own_second
        assert one.own_first is not None  # every slice of a reduce_scatter has
        send = torch.zeros(one.second_nbytes, dtype=torch.uint8)
        recv = torch.empty(plan.world_size * one.second_nbytes, dtype=torch.uint8)
        owned = Owned(
            one.own_first,
            one.own_first if layout is None else layout,
            plan.codec.payloads(arrived, torch.float32),
            plain_payloads(arrived, torch.float32),
            self.shard,
            send,
            torch.empty(layout.group_count if layout is not None and layout.scale_count else 0),
            plan.second_phase.scratch(self._kernels, layout, room) if layout is not None else None,
        )
        inbox = (
            Inbox(recv, one.second_nbytes, one.second, plan.rank, plan.second_phase.validate)
            if one.second
            else None
        )
        return Second(owned, inbox)
