"""The memory of one bucket's exchange, which is used again at every step."""

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
    """One slice.

    Attributes:
        plan: what travels.
        first: phase in which ranks' gradients travel.
        owned: (reduce_scatter) what this rank averages.
        second: (reduce_scatter) phase in which averages travel; None: with a later slice, or not
            at all.
        flagged: some rank's values in this slice, or in one before it, are not finite.
    """

    plan: Slice
    first: Phase
    owned: Owned | None = None
    second: Phase | None = None
    flagged: bool = False

    @property
    def averages(self) -> Phase | None:
        """The phase whose payloads averages are made of; None: that of a later slice."""
        return self.first if self.owned is None else self.second


class Buffers:
    """A bucket's buffers.

    Args:
        plan: where every byte goes.
        kernels: of the bucket's device.
        comm, stats: of the phases.
        dtype, module: numbers in headers.

    Attributes:
        local: uint8: the whole bucket, encoded.
        scales, scratch: for statistics, which are done before anything arrives.
        shard: ``(n,)`` float32: means that this rank owns.
        slices: in order.
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
        arriving = [one.messages[plan.rank if plan.scatters else 0] for one in plan.slices]
        nbytes = [n * layout.nbytes for layout in arriving]
        recv = host.empty(sum(nbytes))
        self.scratch = plan.codec.scratch(kernels, plan.local, free=recv)
        self.slices = []
        for one, layout, part in zip(plan.slices, arriving, torch.split(recv, nbytes), strict=True):
            first = Phase(
                FIRST,
                comm,
                stats,
                self.local,
                one.messages,
                part,
                [layout] * n,
                plan.codec.validate_packed,
                whole=plan.local,
                dtype=dtype,
                module=module,
            )
            here = SliceBuffers(one, first)
            if plan.scatters:
                # once the last slice has been decoded, all that has arrived may be overwritten
                here.owned = self._owned(one, first, recv if one is plan.slices[-1] else part)
                here.second = self._second(one, here.owned) if one.second else None
            self.slices.append(here)

    def _owned(self, one: Slice, first: Phase, free: Tensor) -> Owned:
        """Return what a slice needs at its owner.

        Args:
            free: uint8 memory that statistics of second payloads may use.
        """
        plan, layout = self._plan, one.own_second
        assert one.own_first is not None  # every slice of a reduce_scatter has it
        groups = layout.group_count if layout is not None and layout.scale_count else 0
        return Owned(
            MixedPayloads(first.tensors, plan.codec.code, torch.float32, one.own_first),
            one.own_first,
            one.own_first if layout is None else layout,
            self.shard,
            host.empty(one.second_nbytes).zero_(),
            host.empty(groups, torch.float32),
            plan.second_phase.scratch(self._kernels, layout, free) if layout is not None else None,
        )

    def _second(self, one: Slice, owned: Owned) -> Phase:
        plan, n = self._plan, self._plan.world_size
        return Phase(
            SECOND,
            self._comm,
            self._stats,
            owned.payload,
            [owned.second],
            host.empty(n * one.second_nbytes),
            one.second,
            plan.second_phase.validate,
            stride=one.second_nbytes,
            module=self._module,
        )
