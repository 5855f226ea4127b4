"""Routes: an exchange over all ranks (flat), for a single rank, or with fp32 inside nodes and a
codec between nodes (hierarchical).

A route has the communicators. It determines how many residuals a rank has, and creates the exchange
of each bucket layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradcomp.codecs import Codec, Identity
from gradcomp.comm.base import Communicator
from gradcomp.exchange.bucket import BucketExchange, Exchange, ExchangeOptions, Steps
from gradcomp.exchange.nodes import HierarchicalExchange, find_nodes, join_nodes
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose, replaced
from gradcomp.exchange.slices import WHOLE, Slicing
from gradcomp.exchange.stages import AddResiduals, Job, LocalTransform, Stage
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore
from gradcomp.memory.transform import Transform
from gradcomp.payload.pieces import ByElements, Slot


class Route(ABC):
    """The communicators and the strategy that exchange buckets with one codec.

    Attributes:
        strategy: strategy of the exchange.
        stage_count: number of steps of a slice, in every exchange.
        nodes: (hierarchical) the ranks of every node.
        packs: False if all values are sent in fp32, whatever the codec.
    """

    strategy: Strategy
    stage_count = 4
    nodes: tuple[tuple[int, ...], ...] = ()
    packs = True
    _comms: tuple[Communicator, ...] = ()

    def residual_numel(self, numel: int) -> int:
        """Return how many residuals this rank has of a tensor of `numel` elements."""
        return numel

    @abstractmethod
    def owner_numel(self, residual_numel: int) -> int:
        """Return how many of these residuals belong to elements that this rank owns."""

    @abstractmethod
    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        """Return the bytes that this rank sends per step for a bucket (hierarchical: to other
        nodes).
        """

    @abstractmethod
    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> Exchange:
        """Return the exchange of one bucket layout, with its buffers.

        Args:
            slots: slots of the bucket's parameters.
            codec: codec of the route, or of the warm-up.
            options: see `ExchangeOptions`.
        """

    def abort(self, reason: str = "") -> None:
        """Notify the other ranks that this rank has stopped, with the reason."""
        for comm in self._comms:
            comm.abort(reason)

    def close(self) -> None:
        """Close the communicators that the route has created."""


def make_route(
    codec: Codec,
    comm: Communicator,
    exchange: str,
    nodes: Sequence[Sequence[int]] | None = None,
    timeout_s: float = 300.0,
    transform: Transform | None = None,
    slice_numel: int | None = None,
) -> Route:
    """Return the route for a codec and a communicator. Collective if `exchange` is "hierarchical".

    Args:
        codec: codec of the gradients.
        comm: communicator of all ranks.
        exchange, nodes, transform, slice_numel: checked values, see `gradcomp.engine.options`.
        timeout_s: longest wait for a rank, in seconds.

    Raises:
        ValueError: nodes of unequal sizes, or a transform that the exchange does not support.
        PeerMismatch: (hierarchical) a rank has other nodes, or another codec or exchange.
        PeerLost: a rank did not answer.
    """
    if exchange == "hierarchical":
        slicing = Slicing(slice_numel)
        found_nodes = find_nodes(comm, nodes, timeout_s, codec)
        if len(found_nodes) == 1:  # a single node: everything is sent in fp32
            return _fp32_route(comm, slicing)
        if len(found_nodes) == comm.world_size:
            return FlatRoute(comm, codec, choose(codec, comm.world_size), slicing)
        return HierarchicalRoute(
            comm, codec, found_nodes, *join_nodes(comm, found_nodes, timeout_s), slicing
        )
    owns = transform is not None and transform.place == "owner"
    strategy = choose(codec, comm.world_size, exchange, owner_transform=owns)
    if comm.world_size == 1:
        return SingleRankRoute(strategy)
    return FlatRoute(comm, codec, strategy, Slicing(slice_numel, whole_second=owns))


def run_stages(exchange: Exchange, buffer: Tensor, step: int) -> None:
    """Average one bucket on the calling thread; commit its residuals if all values are finite."""
    exchange.begin(buffer, step, 0)
    slices = exchange.slices
    count = len(slices[0])
    # the collectives of a slice run while the next slice is encoded
    for wave in range(len(slices) + count - 1):
        for stage in range(count):
            if 0 <= wave - stage < len(slices):
                slices[wave - stage][stage]()
    if not exchange.flagged:
        exchange.commit()


# ---- flat ----------------------------------------------------------------------------------------


class FlatRoute(Route):
    """A route on which every rank exchanges with all others.

    Args:
        comm: communicator.
        codec: codec of the gradients.
        strategy: strategy for that codec.
        slicing: how buckets are cut into slices.
        packs: False to replace the codecs given to `plan` and `exchange` by `codec`, without
            residuals.
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
        self._comm, self._comms, self._codec, self._slicing = comm, (comm,), codec, slicing
        self.strategy, self.packs = strategy, packs

    def owner_numel(self, residual_numel: int) -> int:
        return ByElements(self._comm.world_size).numel(residual_numel, self._comm.rank)

    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        return self.plan(slots, codec).sent_nbytes

    def plan(
        self, slots: list[Slot], codec: Codec, owner_residuals: Planes | None = None
    ) -> BucketPlan:
        """Return the plan of a bucket; see `exchange`. `owner_residuals` are for their offsets."""
        world_size, strategy, slicing = self._comm.world_size, self.strategy, self._slicing
        if not self.packs:
            codec = self._codec
        elif codec is not self._codec:
            strategy = replaced(strategy, codec, world_size)
            slicing = replace(slicing, whole_second=False)  # it runs without the owner's transform
        offsets = (
            {s.index: owner_residuals.offset(s.index) for s in slots if s.compressed}
            if owner_residuals is not None
            else None
        )
        return BucketPlan(
            codec, slots, strategy, world_size, self._comm.rank, offsets, slicing=slicing
        )

    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> BucketExchange:
        if not self.packs:
            state = StateStore(transform=options.state.transform, moments=options.state.moments)
            options = replace(options, state=state)
        plan = self.plan(slots, codec, options.state.owner_residuals)
        return BucketExchange(plan, self._comm, options)


def _fp32_route(comm: Communicator, slicing: Slicing) -> FlatRoute:
    """Return the fp32 route inside one node."""
    plain = Identity()
    strategy = choose(plain, comm.world_size, "reduce_scatter")
    return FlatRoute(comm, plain, strategy, slicing, packs=False)


# ---- one rank ------------------------------------------------------------------------------------


class SingleRankRoute(Route):
    """The route of a single rank, which sends nothing."""

    stage_count = 1

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def owner_numel(self, residual_numel: int) -> int:
        return residual_numel

    def sent_nbytes(self, slots: list[Slot], codec: Codec) -> int:
        return 0

    def exchange(self, slots: list[Slot], codec: Codec, options: ExchangeOptions) -> Exchange:
        return SingleRankExchange(slots, options)


class SingleRankExchange(Exchange):
    """The exchange of a single rank: applies the transform, and adds residuals that were loaded
    from a run of several ranks.
    """

    def __init__(self, slots: list[Slot], options: ExchangeOptions) -> None:
        self._stats, transform = options.stats, options.state.transform
        self._stages: list[Stage] = []
        if transform is not None:
            self._stages.append(LocalTransform(transform, slots))
        if options.state.residuals is not None:
            self._stages.append(AddResiduals(options.state.residuals, slots))
        # residuals belong after a local transform, but before an owner's transform of the mean
        if transform is not None and transform.transform.place == "owner":
            self._stages.reverse()
        self.is_idle = not self._stages

    @property
    def flagged(self) -> bool:
        return self._job.unencodable

    @property
    def slices(self) -> tuple[Steps, ...]:
        return ((self._apply,),)

    def begin(self, buffer: Tensor, step: int, bucket: int) -> None:
        self._job = Job(buffer, step, bucket)

    def commit(self) -> None:
        self._job.commit()

    def _apply(self) -> None:
        bad = [stage.before_encode(self._job) for stage in self._stages]
        self._job.unencodable = any(bad)
        if self.flagged:
            self._job.bucket.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1


# ---- hierarchical --------------------------------------------------------------------------------


class HierarchicalRoute(Route):
    """A route with fp32 inside nodes and a codec between nodes. A rank exchanges with other nodes
    only its shard of the node's mean.

    Args:
        comm: communicator of all ranks.
        codec: codec between nodes.
        nodes: the ranks of every node.
        inside: communicator of this node. Closed with the route.
        across: communicator of the ranks with this rank's position on their nodes. Closed with the
            route.
        slicing: how buckets are cut into slices between nodes.
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
        self._comms, self.nodes = (comm, inside, across), nodes
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
        # second moments are updated from whole tensors, which only the exchange inside has
        options = replace(
            options,
            dtype=torch.float32,
            keeps_packed=False,
            draw_rank=self._comms[0].rank,
            observes=False,
        )
        across = self._across.exchange(_shards(inside.plan), codec, options)
        return HierarchicalExchange(inside, across)

    def close(self) -> None:
        for comm in self._comms[1:]:
            comm.close()


def _shards(plan: BucketPlan) -> list[Slot]:
    """Return the slots of this rank's shard of a bucket, for the exchange across nodes."""
    return [
        replace(p.slot, numel=p.numel, offset=p.data, start=p.start) for p in plan.own_second.pieces
    ]
