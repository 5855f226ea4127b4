"""How averages travel between ranks: a route for all ranks alike (flat), for one rank, and for
fp32 inside nodes with packed values between them (hierarchical).

A route knows the communicators. It says how many residuals a rank keeps, and makes the exchange of
a bucket layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gradcomp.codecs import Codec, Identity
from gradcomp.comm.base import Communicator
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.nodes import HierarchicalExchange, find_nodes, join_nodes
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose
from gradcomp.exchange.slices import WHOLE, Slicing
from gradcomp.exchange.stages import AddResiduals, Job, LocalTransform, Stage
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore
from gradcomp.memory.transform import Transform
from gradcomp.payload.pieces import ByElements, Slot


class Exchange(Protocol):
    """What averages one bucket layout, step after step: `begin`, the steps of every slice in order,
    then `commit` unless flagged.

    Then the average stands in the bucket, or it is in `averages` until the next `begin` or
    `unpack`.
    """

    @property
    def flagged(self) -> bool:
        """Whether some rank's bucket, or the average, is not finite; final after the last
        slice's last step.
        """

    @property
    def averages(self) -> Averages | None:
        """The averages, where they are kept packed; their memory is the exchange's until the
        next `begin`.
        """

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The steps of every slice of the bucket, as many for each. A step runs after the one
        before it of its slice, and after its like of the slice before; it waits for at most one
        collective and starts at most one, on a channel of its own.

        Raises (each of them): PeerLost, PeerMismatch, CorruptPayload.
        """

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket to average.

        Args:
            buffer: ``(numel,)`` of the exchange's dtype and device, contiguous, overwritten by the
                average (NaN if flagged).
            step: of training, for random numbers and headers.
            bucket: its number, for messages of errors.
        """

    def unpack(self) -> None:
        """Write averages that are kept packed into the bucket after all."""

    def commit(self) -> None:
        """Make residuals and states that this step wrote current. Not of a flagged bucket."""


@dataclass(frozen=True)
class ExchangeOptions:
    """What an exchange uses besides its plan and communicator; fields as of `BucketExchange`."""

    dtype: torch.dtype
    stats: Stats
    state: StateStore
    seed: int = 0
    draw_rank: int | None = None
    timeout_s: float = 300.0
    keeps_packed: bool = False
    observes: bool = True
    probe: Probe | None = None
    device: torch.device = CPU


class Route(ABC):
    """How buckets travel: communicators and strategy of one codec.

    Attributes:
        strategy: how averages are made.
        stage_count: steps of a slice, in every exchange.
        nodes: the ranks of every node, where nodes average in fp32 first.
        packs: False: everything travels in fp32, whatever the codec.
    """

    strategy: Strategy
    stage_count = 4
    nodes: tuple[tuple[int, ...], ...] = ()
    packs = True

    def residual_numel(self, numel: int) -> int:
        """Return how many residuals this rank keeps of a tensor of `numel` elements."""
        return numel

    @abstractmethod
    def owner_numel(self, residual_numel: int) -> int:
        """Return how many of those this rank owns in a second phase."""

    @abstractmethod
    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        """Return the bytes that this rank sends for a bucket in one step; of a hierarchical route,
        to other nodes.
        """

    @abstractmethod
    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> Exchange:
        """Return an exchange of one bucket layout, with its buffers.

        Args:
            slots: the parameters of the bucket.
            codec: the route's own, or that of a warm start.
            options: see `ExchangeOptions`.
        """

    def abort(self, reason: str = "") -> None:
        """Notify the peers that this rank has stopped, and why."""

    def close(self) -> None:
        """Close the communicators that the route has made."""


def make_route(
    codec: Codec,
    comm: Communicator,
    exchange: str,
    nodes: Sequence[Sequence[int]] | None = None,
    timeout_s: float = 300.0,
    transform: Transform | None = None,
    slice_numel: int | None = None,
) -> Route:
    """Return how `codec` travels over `comm`. Collective for ``exchange="hierarchical"``.

    Args:
        exchange, nodes, transform, slice_numel: checked, see `gradcomp.engine.options`.
        timeout_s: longest wait for a peer, in seconds.

    Raises:
        ValueError: nodes of unequal sizes, a transform that the exchange cannot carry.
        PeerMismatch: (hierarchical) other nodes or another codec or exchange on some rank.
        PeerLost: a rank did not answer.
    """
    if exchange == "hierarchical":
        slicing = Slicing(slice_numel)
        found = find_nodes(comm, nodes, timeout_s, codec)
        if len(found) == 1:  # nothing leaves the node, so nothing is packed
            return _fp32_route(comm, slicing)
        if len(found) == comm.world_size:
            return FlatRoute(comm, codec, choose(codec, comm.world_size), slicing)
        return HierarchicalRoute(comm, codec, found, *join_nodes(comm, found, timeout_s), slicing)
    owns = transform is not None and transform.place == "owner"
    strategy = choose(codec, comm.world_size, exchange, owner_transform=owns)
    if comm.world_size == 1:
        return SingleRankRoute(strategy)
    return FlatRoute(comm, codec, strategy, Slicing(slice_numel, whole_second=owns))


def run_stages(exchange: Exchange, buffer: Tensor, step: int) -> None:
    """Average one bucket here and now, and commit its residuals if every value was finite."""
    exchange.begin(buffer, step, 0)
    slices = exchange.slices
    count = len(slices[0])
    # what a slice has started runs while the one behind it is encoded
    for wave in range(len(slices) + count - 1):
        for stage in range(count):
            if 0 <= wave - stage < len(slices):
                slices[wave - stage][stage]()
    if not exchange.flagged:
        exchange.commit()


# ---- flat ----------------------------------------------------------------------------------------


class FlatRoute(Route):
    """Every rank exchanges with every other one.

    Args:
        comm: moves the bytes.
        codec: packs values.
        strategy: of that codec.
        slicing: how buckets are cut.
        packs: False: `codec` is used in place of every other one, without residuals.
    """

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        strategy: Strategy,
        slicing: Slicing,
        *,
        packs: bool = True,
    ) -> None:
        self._comm, self._codec, self._slicing = comm, codec, slicing
        self.strategy, self.packs = strategy, packs

    def owner_numel(self, residual_numel: int) -> int:
        return ByElements(self._comm.world_size).numel(residual_numel, self._comm.rank)

    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        return self.plan(slots, codec).sent_nbytes

    def plan(
        self, slots: list[Slot], codec: Codec, owner_residuals: Planes | None = None
    ) -> BucketPlan:
        """Return where every byte of a bucket goes."""
        world_size, strategy = self._comm.world_size, self.strategy
        if not self.packs:
            codec = self._codec
        elif codec is not self._codec:
            # a warm start whose owners may keep residuals travels as what follows it
            strategy = choose(
                codec, world_size, strategy.exchange if codec.error_feedback else "auto"
            )
        offsets = (
            {s.index: owner_residuals.offset(s.index) for s in slots if s.compressed}
            if owner_residuals is not None
            else None
        )
        return BucketPlan(
            codec, slots, strategy, world_size, self._comm.rank, offsets, slicing=self._slicing
        )

    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> BucketExchange:
        if not self.packs:
            state = StateStore(transform=options.state.transform, moments=options.state.moments)
            options = replace(options, state=state)
        plan = self.plan(slots, codec, options.state.owner_residuals)
        return BucketExchange(plan, self._comm, **vars(options))

    def abort(self, reason: str = "") -> None:
        self._comm.abort(reason)


def _fp32_route(comm: Communicator, slicing: Slicing) -> FlatRoute:
    """Return the route of ranks of one node."""
    plain = Identity()
    strategy = choose(plain, comm.world_size, "reduce_scatter")
    return FlatRoute(comm, plain, strategy, slicing, packs=False)


# ---- one rank ------------------------------------------------------------------------------------


class SingleRankRoute(Route):
    """One rank: nothing travels."""

    stage_count = 1

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def owner_numel(self, residual_numel: int) -> int:
        return residual_numel

    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        return 0

    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> Exchange:
        return SingleRankExchange(slots, options)


class SingleRankExchange:
    """A bucket of one rank: its average is the bucket itself plus the residuals that a run of
    several ranks has left, transformed.

    Attributes:
        is_idle: buckets are left as they are.
    """

    averages: Averages | None = None

    def __init__(self, slots: list[Slot], options: ExchangeOptions) -> None:
        self._stats, transform = options.stats, options.state.transform
        self._stages: list[Stage] = []
        if transform is not None:
            self._stages.append(LocalTransform(transform, slots))
        if options.state.residuals is not None:
            self._stages.append(AddResiduals(options.state.residuals, slots))
        # residuals are of what a local transform sends, and part of the mean that an owner changes
        if transform is not None and transform.transform.place == "owner":
            self._stages.reverse()
        self.flagged, self.is_idle = False, not self._stages

    @property
    def slices(self) -> tuple[tuple[Callable[[], None], ...], ...]:
        """The only step."""
        return ((self._apply,),)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        """Take the bucket."""
        self._job = Job(buffer, step, bucket, None, buffer, buffer)

    def unpack(self) -> None:
        """Averages are never packed."""

    def commit(self) -> None:
        """Make the residuals and states that this step wrote current."""
        self._job.commit()

    def _apply(self) -> None:
        bad = [stage.before_encode(self._job) for stage in self._stages]
        self.flagged = any(bad)
        if self.flagged:
            self._job.bucket.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1


# ---- hierarchical --------------------------------------------------------------------------------


class HierarchicalRoute(Route):
    """fp32 inside nodes, packed between them: a rank exchanges only what it owns of its node's
    mean.

    Args:
        comm: all ranks.
        codec: packs what goes to other nodes.
        nodes: the ranks of every node.
        inside: the ranks of this node. Closed with this.
        across: the ranks that have this rank's position on their nodes. Closed with this.
        slicing: how buckets are cut between nodes.
    """

    stage_count = 6

    def __init__(
        self,
        comm: Communicator,
        codec: Codec,
        nodes: tuple[tuple[int, ...], ...],
        inside: Communicator,
        across: Communicator,
        slicing: Slicing,
    ) -> None:
        self._comm, self._node_comms, self.nodes = comm, (inside, across), nodes
        self._inside = _fp32_route(inside, WHOLE)
        strategy = choose(codec, across.world_size)
        self._across = FlatRoute(across, codec, strategy, slicing)
        self.strategy = replace(strategy, node_size=inside.world_size)

    def residual_numel(self, numel: int) -> int:
        return self._inside.owner_numel(numel)

    def owner_numel(self, residual_numel: int) -> int:
        return self._across.owner_numel(residual_numel)

    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        shards = _shards(self._inside.plan(slots, codec))
        return self._across.sent_nbytes(shards, codec)

    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> Exchange:
        inside = self._inside.exchange(
            slots, codec, replace(options, stats=options.stats.inside_nodes, probe=None)
        )
        # second moments take in averages of whole tensors, which the exchange inside has
        options = replace(
            options,
            dtype=torch.float32,
            keeps_packed=False,
            draw_rank=self._comm.rank,
            observes=False,
        )
        across = self._across.exchange(_shards(inside.plan), codec, options)
        return HierarchicalExchange(inside, across)

    def abort(self, reason: str = "") -> None:
        for comm in (self._comm, *self._node_comms):
            comm.abort(reason)

    def close(self) -> None:
        for comm in self._node_comms:
            comm.close()


def _shards(plan: BucketPlan) -> list[Slot]:
    """Return what this rank owns of a bucket, as a bucket to exchange with other nodes."""
    return [
        replace(p.slot, numel=p.numel, offset=p.data, start=p.start) for p in plan.own_second.pieces
    ]
