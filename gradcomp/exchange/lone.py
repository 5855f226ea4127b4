"""One rank: nothing travels, but a transform still runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.interface import Exchange
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import Transforming
from gradcomp.payload.pieces import Slot


class LoneRoute:
    """One rank: nothing travels."""

    stage_count = 1
    nodes: tuple[tuple[int, ...], ...] = ()
    packs = True

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def residual_numel(self, numel: int) -> int:
        return numel

    def owner_numel(self, residual_numel: int) -> int:
        return residual_numel

    def plan(
        self, slots: Sequence[Slot], codec: Codec, owner_residuals: dict[int, int] | None
    ) -> BucketPlan:
        return BucketPlan(codec, slots, Strategy("all_gather"), 1, 0)

    def exchange(
        self, plan: BucketPlan, dtype: torch.dtype, stats: Stats, **options: Any
    ) -> Exchange:
        return LoneExchange(plan.slots, stats, options.get("transform"), options.get("feedback"))

    def abort(self, reason: str = "") -> None:
        return

    def close(self) -> None:
        return


class LoneExchange:
    """A bucket of one rank: its average is itself, with what ranks of an earlier run still owed
    it, transformed.
    """

    timeout_s = 0.0
    flagged = False
    averages: Averages | None = None

    def __init__(
        self,
        slots: Sequence[Slot],
        stats: Stats,
        transform: Transforming | None,
        feedback: Feedback | None,
    ) -> None:
        self._spans, self._stats, self._transform = (
            [(s.index, s.offset, s.numel) for s in slots],
            stats,
            transform,
        )
        self._feedback = feedback
        known = feedback.knows if feedback is not None else lambda index: False
        self._owed = [
            (s.index, s.offset, s.numel) for s in slots if s.compressed and known(s.index)
        ]
        self._paid: list[int] = []

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The only step."""
        return ((self._apply,),)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket."""
        self._buffer = buffer

    def unpack(self) -> None:
        """Nothing is ever packed."""

    def commit(self) -> None:
        """Make the residuals and states that this step wrote current."""
        if self._feedback is not None:
            self._feedback.commit(self._paid)
        if self._transform is not None:
            self._transform.planes.commit(index for index, _, _ in self._spans)

    def _apply(self) -> None:
        self.flagged, self._paid = False, []
        local = self._transform is not None and self._transform.transform.place == "local"
        if local:  # residuals are of what a local transform sends
            self._run()
        if self._feedback is not None and self._feedback.begun:
            for index, offset, numel in self._owed:
                self.flagged |= self._feedback.pay(index, self._buffer[offset : offset + numel])
                self._paid.append(index)
        if not local:
            self._run()
        if self.flagged:
            self._buffer.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1

    def _run(self) -> None:
        if self._transform is not None:
            self.flagged |= self._transform.run(self._buffer, self._spans)
