"""The buffers of one bucket's exchange, allocated once and reused at every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradcomp.codecs.base import MixedPayloads
from gradcomp.comm.base import Communicator
from gradcomp.exchange.phase import FIRST, SECOND, Phase
from gradcomp.exchange.second import Owned
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.slices import Slice
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import Kernels, host


@dataclass(eq=False)
class SliceBuffers:
    """The phases and buffers of one slice.

    Attributes:
        plan: layouts of the slice.
        first: first phase, which sends gradients.
        owned: (reduce_scatter) pieces that this rank averages.
        second: (reduce_scatter) second phase, which sends means; None if a later slice sends them,
            or no slice does.
        flagged: a value of some rank in this slice, or in an earlier one, is not finite.
    """

    plan: Slice
    first: Phase
    owned: Owned | None = None
    second: Phase | None = None
    flagged: bool = False

    @property
    def averages(self) -> Phase | None:
        """The phase that receives the averages; None if a later slice does."""
        return self.first if self.owned is None else self.second


class Buffers:
    """The buffers of one bucket.

    Args:
        plan: layout of every payload.
        kernels: kernel set of the bucket's device.
        comm, stats: communicator and counters of the phases.
        dtype, module: numbers of the bucket's dtype and of the FSDP module, for headers.

    Attributes:
        local: ``(plan.local.nbytes,)`` uint8: payload of the whole bucket.
        scales: ``(groups,)`` float32 scales; empty if the codec does not measure any.
        scratch: memory for measuring scales, or None. It may share memory with the receive buffer,
            which is free until the first phase starts.
        shard: ``(shard_numel,)`` float32: means that this rank owns.
        slices: buffers of every slice, in order.
    """

    def __init__(
        self,
        plan: BucketPlan,
        kernels: Kernels,
        comm: Communicator,
        stats: Stats,
        dtype: int,
        module: int,
    ) -> None:
        self._plan, self._kernels, self._comm, self._stats = plan, kernels, comm, stats
        self._module, n = module, plan.world_size
        self.local = host.empty(plan.local.nbytes)
        groups = plan.local.group_count if plan.codec.measures else 0
        self.scales = host.empty(groups, torch.float32)
        self.shard = kernels.empty(plan.shard_numel if plan.scatters else 0)
        incoming = [
            plan_slice.messages[plan.rank if plan.scatters else 0] for plan_slice in plan.slices
        ]
        nbytes = [n * layout.nbytes for layout in incoming]
        recv = host.empty(sum(nbytes))
        self.scratch = plan.codec.scratch(kernels, plan.local, free=recv)
        self.slices = []
        for plan_slice, layout, part in zip(
            plan.slices, incoming, torch.split(recv, nbytes), strict=True
        ):
            first = Phase(
                FIRST,
                comm,
                stats,
                self.local,
                plan_slice.messages,
                part,
                [layout] * n,
                plan.codec.validate_packed,
                whole=plan.local,
                dtype=dtype,
                module=module,
            )
            buffers = SliceBuffers(plan_slice, first)
            if plan.scatters:
                # the last slice is averaged last: then the whole receive buffer may be overwritten
                buffers.owned = self._owned(
                    plan_slice, first, recv if plan_slice is plan.slices[-1] else part
                )
                buffers.second = (
                    self._second(plan_slice, buffers.owned) if plan_slice.second else None
                )
            self.slices.append(buffers)

    def _owned(self, plan_slice: Slice, first: Phase, free: Tensor) -> Owned:
        """Return the owned pieces of a slice, with buffers for their means and second payload.

        Args:
            plan_slice: the slice.
            first: its first phase.
            free: ``(n,)`` uint8 memory that may serve to measure scales of the second payload.
        """
        plan, layout = self._plan, plan_slice.own_second
        assert plan_slice.own_first is not None  # set in every slice of a reduce_scatter
        groups = layout.group_count if layout is not None and layout.scale_count else 0
        return Owned(
            MixedPayloads(first.tensors, plan.codec.code, torch.float32, plan_slice.own_first),
            plan_slice.own_first,
            plan_slice.own_first if layout is None else layout,
            self.shard,
            host.empty(plan_slice.second_nbytes).zero_(),
            host.empty(groups, torch.float32),
            plan.second_phase.scratch(self._kernels, layout, free) if layout is not None else None,
        )

    def _second(self, plan_slice: Slice, owned: Owned) -> Phase:
        plan, n = self._plan, self._plan.world_size
        return Phase(
            SECOND,
            self._comm,
            self._stats,
            owned.payload,
            [owned.second],
            host.empty(n * plan_slice.second_nbytes),
            plan_slice.second,
            plan.second_phase.validate,
            stride=plan_slice.second_nbytes,
            module=self._module,
        )
