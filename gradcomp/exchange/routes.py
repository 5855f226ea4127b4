"""How averages travel between these ranks: all alike (flat), or fp32 inside nodes and packed
between them.

A route knows the communicators; it says how large a rank's residuals are, plans a bucket and makes
its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gradcomp.codecs import Codec, Identity
from gradcomp.comm.base import Communicator
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.interface import Exchange
from gradcomp.exchange.lone import LoneRoute
from gradcomp.exchange.nodes import Nodes, find_nodes, join_nodes
from gradcomp.exchange.sizing import EXCHANGES, BucketPlan, Strategy, choose
from gradcomp.exchange.slices import Slicing
from gradcomp.exchange.stats import Stats
from gradcomp.memory.transform import Transform
from gradcomp.payload.ownership import ByElements
from gradcomp.payload.pieces import Slot


class Route(Protocol):
    """Communicators and strategy of one codec."""

    strategy: Strategy
    stage_count: int  # of every exchange it makes
    nodes: tuple[tuple[int, ...], ...]  # ranks node by node, where they average in fp32 first
    packs: bool  # False: everything travels in fp32

    def residual_numel(self, numel: int) -> int:
        """Return how many residuals this rank keeps of a tensor of so many elements."""

    def owner_numel(self, residual_numel: int) -> int:
        """Return how many of those this rank owns in a second phase."""

    def plan(
        self, slots: Sequence[Slot], codec: Codec, owner_residuals: dict[int, int] | None
    ) -> Any:
        """Return the plan of a bucket."""

    def exchange(self, plan: Any, dtype: torch.dtype, stats: Stats, **options: Any) -> Exchange:
        """Return the buffers that exchange buckets of a plan; `options` as of `BucketExchange`."""

    def abort(self, reason: str = "") -> None:
        """Tell the peers that this rank takes part no more, and why."""

    def close(self) -> None:
        """Close what the route has made."""


def make_route(
    codec: Codec,
    comm: Communicator,
    exchange: str,
    nodes: Sequence[Sequence[int]] | None = None,
    timeout_s: float = 300.0,
    transform: Transform | None = None,
    slice_numel: int | None = None,
) -> Route:
    """Return how `codec` travels over `comm`, large buckets in slices. Collective for
    ``exchange="hierarchical"``.

    Raises:
        ValueError: an unknown exchange, `nodes` without "hierarchical", nodes of unequal sizes, a
            transform that the exchange cannot carry.
        PeerMismatch: (hierarchical) other nodes or another codec or exchange on some rank.
        PeerLost: a rank did not answer.
    """
    if exchange != "hierarchical":
        if nodes is not None:
            raise ValueError(f"nodes= needs exchange='hierarchical', got exchange={exchange!r}")
        if exchange not in EXCHANGES:
            raise ValueError(
                f"exchange must be one of {(*EXCHANGES, 'hierarchical')}, got {exchange!r}"
            )
        owns = transform is not None and transform.place == "owner"
        strategy = choose(codec, comm.world_size, exchange, owner_transform=owns)
        slicing = Slicing(slice_numel, whole_second=owns)
        return (
            FlatRoute(comm, codec, strategy, slicing)
            if comm.world_size > 1
            else LoneRoute(strategy)
        )
    if transform is not None:
        raise ValueError(
            "a transform needs exchange='auto', 'all_gather' or 'reduce_scatter', got"
            " 'hierarchical'"
        )
    found, slicing = find_nodes(comm, nodes, timeout_s, codec), Slicing(slice_numel)
    if len(found) == 1:  # nothing leaves the node, so nothing is packed
        carrier = Identity()
        return FlatRoute(
            comm, codec, choose(carrier, comm.world_size, "reduce_scatter"), slicing, carrier
        )
    if len(found) == comm.world_size:
        return FlatRoute(comm, codec, choose(codec, comm.world_size), slicing)
    return NodeRoute(comm, codec, join_nodes(comm, found, timeout_s), slicing)


def _as(codec: Codec, strategy: Strategy) -> str:
    """Return how the codec of a warm start travels: as what follows it, if owners of means may
    keep residuals in between.
    """
    return strategy.exchange if codec.error_feedback else "auto"


class FlatRoute:
    """Every rank exchanges with every other one; what `carrier` encodes, if one is given,
    instead of the codec.
    """

    stage_count = 4
    nodes: tuple[tuple[int, ...], ...] = ()

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        strategy: Strategy,
        slicing: Slicing,
        carrier: Codec | None = None,
    ) -> None:
        self._comm, self._codec, self._slicing, self._carrier = comm, codec, slicing, carrier
        self.packs = carrier is None
        self.strategy = strategy

    def residual_numel(self, numel: int) -> int:
        return numel

    def owner_numel(self, residual_numel: int) -> int:
        return ByElements(self._comm.world_size).numel(residual_numel, self._comm.rank)

    def plan(
        self, slots: Sequence[Slot], codec: Codec, owner_residuals: dict[int, int] | None
    ) -> BucketPlan:
        world, rank = self._comm.world_size, self._comm.rank
        if self._carrier is not None:
            return BucketPlan(
                self._carrier, slots, self.strategy, world, rank, slicing=self._slicing
            )
        strategy = (
            self.strategy
            if codec is self._codec
            else choose(codec, world, _as(codec, self.strategy))
        )
        return BucketPlan(
            codec, slots, strategy, world, rank, owner_residuals, slicing=self._slicing
        )

    def exchange(
        self, plan: BucketPlan, dtype: torch.dtype, stats: Stats, **options: Any
    ) -> Exchange:
        if self._carrier is not None:
            options |= {"feedback": None, "owner_feedback": None}
        return BucketExchange(plan, self._comm, dtype, stats, **options)

    def abort(self, reason: str = "") -> None:
        self._comm.abort(reason)

    def close(self) -> None:
        return


@dataclass(frozen=True)
class NodePlan:
    """Plans of the exchange inside a node, in fp32, and of the owners' exchange across nodes."""

    inside: BucketPlan
    across: BucketPlan

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends to other nodes."""
        return self.across.sent_nbytes


class NodeRoute:
    """fp32 inside nodes, packed between them: a rank exchanges only what it owns of its node's
    mean.
    """

    stage_count = 6
    packs = True

    def __init__(self, comm: Communicator, codec: Codec, nodes: Nodes, slicing: Slicing) -> None:
        self._comm, self._codec, self._nodes, self._slicing = comm, codec, nodes, slicing
        across = choose(codec, nodes.across.world_size)
        self.nodes = nodes.ranks
        self.strategy = Strategy(across.exchange, across.second_phase, nodes.inside.world_size)

    def residual_numel(self, numel: int) -> int:
        return ByElements(self._nodes.inside.world_size).numel(numel, self._nodes.inside.rank)

    def owner_numel(self, residual_numel: int) -> int:
        return ByElements(self._nodes.across.world_size).numel(
            residual_numel, self._nodes.across.rank
        )

    def plan(
        self, slots: Sequence[Slot], codec: Codec, owner_residuals: dict[int, int] | None
    ) -> NodePlan:
        inside, across = self._nodes.inside, self._nodes.across
        plain = Identity()
        first = BucketPlan(
            plain,
            slots,
            choose(plain, inside.world_size, "reduce_scatter"),
            inside.world_size,
            inside.rank,
        )
        shards = [
            Slot(
                p.slot.index,
                p.numel,
                p.slot.group_numel,
                p.slot.compressed,
                p.data,
                p.slot.residual,
                p.start,
            )
            for p in first.own_second.pieces
        ]
        strategy = choose(
            codec, across.world_size, "auto" if codec is self._codec else _as(codec, self.strategy)
        )
        second = BucketPlan(
            codec,
            shards,
            strategy,
            across.world_size,
            across.rank,
            owner_residuals,
            slicing=self._slicing,
        )
        return NodePlan(first, second)

    def exchange(
        self, plan: NodePlan, dtype: torch.dtype, stats: Stats, **options: Any
    ) -> Exchange:
        last = {"keeps_packed": options.pop("keeps_packed", False)}
        last |= {
            name: options[name] for name in ("timeout_s", "device", "moments") if name in options
        }
        inside = BucketExchange(plan.inside, self._nodes.inside, dtype, stats.inside_nodes, **last)
        # averages of shards: the exchange inside has them whole
        options |= {"draw_rank": self._comm.rank, "observes": False}
        return NodeExchange(
            inside, BucketExchange(plan.across, self._nodes.across, torch.float32, stats, **options)
        )

    def abort(self, reason: str = "") -> None:
        self._comm.abort(reason)
        self._nodes.abort(reason)

    def close(self) -> None:
        self._nodes.close()


def _nothing() -> None:
    """A step of a slice in which nothing is left to do."""


class NodeExchange:
    """One bucket's exchange inside the node and, between its two phases, that of the owned means
    across nodes.
    """

    def __init__(self, inside: BucketExchange, across: BucketExchange) -> None:
        self._inside, self._across = inside, across

    @property
    def timeout_s(self) -> float:
        """Longest wait for a peer."""
        return self._across.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._inside.timeout_s = self._across.timeout_s = seconds

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite."""
        return self._inside.flagged

    @property
    def averages(self) -> Averages | None:
        """The averages, where they are kept packed."""
        return self._inside.averages

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice that goes across nodes; the exchange inside begins with the
        first and ends with the last.
        """
        across = self._across.slices
        steps = []
        for number, (_, encode, own, finish) in enumerate(across):
            begins = (_nothing, _nothing) if number else (self._inside.encode, self._hand_over)
            ends = (
                (finish, _nothing)
                if number < len(across) - 1
                else (partial(self._take_back, finish), self._inside.finish)
            )
            steps.append((*begins, encode, own, *ends))
        return tuple(steps)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket to average."""
        self._step, self._bucket = step, bucket
        self._inside.begin(buffer, step, bucket)

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""
        self._inside.unpack()

    def commit(self) -> None:
        """Make the residuals and moments that this step wrote current."""
        self._across.commit()
        self._inside.commit()

    def _hand_over(self) -> None:
        self._inside.average_shard()
        self._across.begin(
            self._inside.shard, self._step, self._bucket, flagged=self._inside.flagged
        )
        self._across.measure()

    def _take_back(self, finish: Callable[[], None]) -> None:
        """Every node learns of a value that is not finite; on the node where it arose nobody
        waits for a second phase.
        """
        finish()
        self._inside.publish_shard(flagged=self._across.flagged)
