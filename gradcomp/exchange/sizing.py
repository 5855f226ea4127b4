"""The strategy of an exchange, and the plan of one bucket: layouts and sizes of all its payloads.

A `BucketPlan` is computed from sizes alone, for one bucket layout, rank and world size.
`gradcomp.exchange.bucket` runs by it, and `gradcomp.exchange.stats` counts its bytes.
`gradcomp.plan.nbytes` computes the same sums without layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.codecs import Codec
from gradcomp.comm.rounds import ring_bytes
from gradcomp.exchange.second import second_phase
from gradcomp.exchange.slices import WHOLE, Slice, Slicing, cut, cuts_groups, rows_of
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import ByElements, Ownership, Piece, Slot, whole_pieces

EXCHANGES = ("auto", "all_gather", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Strategy:
    """The collectives that average a bucket.

    Attributes:
        exchange: "all_gather" or "reduce_scatter".
        second_phase: (reduce_scatter) name of the second phase.
        node_size: (hierarchical) ranks of a node, which average in fp32 first; otherwise 1.
    """

    exchange: str
    second_phase: str = ""
    node_size: int = 1

    def __str__(self) -> str:
        whole = f"{self.exchange} ({self.second_phase})" if self.second_phase else self.exchange
        return f"hierarchical, nodes of {self.node_size}, {whole}" if self.node_size > 1 else whole


def choose(
    codec: Codec, world_size: int, exchange: str = "auto", *, owner_transform: bool = False
) -> Strategy:
    """Return the strategy for an exchange; "auto" chooses the one with fewer bits per element.

    The result depends on the arguments alone, so all buckets and ranks get the same strategy.

    Args:
        codec: codec of the gradients.
        world_size: number of ranks.
        exchange: one of `EXCHANGES`.
        owner_transform: whether owners transform means, which needs a reduce_scatter.

    Raises:
        ValueError: an unknown exchange, or one that does not support an owner transform.
    """
    if exchange not in EXCHANGES:
        raise ValueError(f"exchange must be one of {EXCHANGES}, got {exchange!r}")
    second = codec.resolved_second_phase(world_size, transformed=owner_transform)
    if owner_transform and exchange == "all_gather":
        raise ValueError(
            "an owner transform needs exchange='auto' or 'reduce_scatter', got 'all_gather'"
        )
    if owner_transform and second == "exact":
        raise ValueError(
            "second_phase='exact' sends integer sums, which an owner transform does not make:"
            f" {codec!r}"
        )
    bits = second_phase(second, codec, world_size).form.bits
    gather = (world_size - 1) * codec.form.bits
    scatter = (world_size - 1) * (codec.form.bits + bits) / world_size
    if exchange == "all_gather" or (
        exchange == "auto" and gather <= scatter and not owner_transform
    ):
        return Strategy("all_gather")
    return Strategy("reduce_scatter", second)


def replaced(strategy: Strategy, codec: Codec, world_size: int) -> Strategy:
    """Return the strategy of another codec in the exchanges of a strategy: residuals need the same
    exchange.
    """
    return choose(codec, world_size, strategy.exchange if codec.error_feedback else "auto")


class BucketPlan:
    """The layouts and sizes of all payloads in one bucket's exchange, for one rank.

    Args:
        codec: codec of the first phase.
        slots: parameters of the bucket, with their offsets in it and in the residual planes.
        strategy: strategy of the exchange.
        world_size, rank: number of ranks, and this rank.
        owner_residuals: offset of each owned parameter in the owner's residual planes, by parameter
            position.
        ownership: (reduce_scatter) assigns pieces to owners; `ByElements` when None.
        slicing: how the bucket is cut into slices; by default it is one slice.
        stays: (reduce_scatter) means stay with their owners; there is no second phase.

    Attributes:
        local: layout of this rank's payload of the whole bucket.
        slices: layouts of every slice, in the order in which they are sent.
        own_second: (reduce_scatter) layout of all owned pieces, with offsets in the shard.
        second_phase: (reduce_scatter) the second phase.
        shard_numel: (reduce_scatter) elements of this rank's shard.
        sent_nbytes, received_nbytes: bytes to and from other ranks in one step.
        compressed: positions of the compressed parameters.
        owned_compressed: (reduce_scatter) those of which this rank owns a piece.
    """

    def __init__(
        self,
        codec: Codec,
        slots: Sequence[Slot],
        strategy: Strategy,
        world_size: int,
        rank: int,
        owner_residuals: dict[int, int] | None = None,
        ownership: Ownership | None = None,
        slicing: Slicing = WHOLE,
        *,
        stays: bool = False,
    ) -> None:
        self.codec, self.slots, self.strategy, self.stays = codec, list(slots), strategy, stays
        self.world_size, self.rank = world_size, rank
        self.compressed = [s.index for s in self.slots if s.compressed]
        count = slicing.count(sum(s.numel for s in self.slots), world_size)
        if self.scatters:
            ownership = ownership or ByElements(world_size)
            owned = [ownership.pieces(self.slots, k) for k in range(world_size)]
        else:
            owned = [whole_pieces(self.slots)]
        parts = [self._cut(pieces, count) for pieces in owned]
        self.local = PayloadLayout(
            codec.form, self._encoded(parts), whole_groups=codec.whole_groups
        )
        self.sent_nbytes = self.received_nbytes = (
            ring_bytes(self.local.group_count, world_size) * self.shares_scale
        )
        if self.scatters:
            self._scatter(owned, parts, owner_residuals or {}, whole_second=slicing.whole_second)
        else:
            self._gather(parts[0])
        others = world_size - 1
        for one in self.slices:
            if self.scatters:
                self.sent_nbytes += (
                    sum(m.nbytes for m in one.messages)
                    - one.messages[rank].nbytes
                    + others * one.second_nbytes
                )
                self.received_nbytes += others * (one.messages[rank].nbytes + one.second_nbytes)
            else:
                self.sent_nbytes += others * one.messages[0].nbytes
                self.received_nbytes += others * one.messages[0].nbytes

    @property
    def numel(self) -> int:
        """Number of elements of the bucket."""
        return self.local.numel

    @property
    def scatters(self) -> bool:
        """Whether the exchange is a reduce_scatter."""
        return self.strategy.exchange == "reduce_scatter"

    @property
    def shares_scale(self) -> bool:
        """Whether ranks agree on scales before they encode."""
        return self.codec.shares_scale and self.local.group_count > 0

    def _cut(self, pieces: Sequence[Piece], count: int) -> list[list[Piece]]:
        return cut(pieces, count, whole_groups=not self.codec.form.cuts)

    def _encoded(self, parts: list[list[list[Piece]]]) -> list[Piece]:
        """Return the pieces that this rank encodes: whole parameters if codes can be cut, otherwise
        the pieces of every message.
        """
        if self.codec.form.cuts:
            return whole_pieces(self.slots)
        return [piece for slices in parts for one in slices for piece in one]

    def _gather(self, parts: list[list[Piece]]) -> None:
        if len(parts) == 1:
            self.slices = [Slice(self.local, [self.local])]
            return
        encoded = rows_of(self.local, parts)
        self.slices = [
            Slice(r, [PayloadLayout(self.codec.form, p)])
            for r, p in zip(encoded, parts, strict=True)
        ]

    def _scatter(
        self,
        owned: list[list[Piece]],
        parts: list[list[list[Piece]]],
        owner_residuals: dict[int, int],
        *,
        whole_second: bool,
    ) -> None:
        form, count = self.codec.form, len(parts[0])
        self.second_phase = second_phase(self.strategy.second_phase, self.codec, self.world_size)
        residuals = [owner_residuals.get(p.slot.index, 0) for p in owned[self.rank]]
        shard = self.second_phase.shard(owned[self.rank], residuals)
        self.shard_numel = shard.numel
        self.own_second = self._second(shard.pieces, own=True)
        self.owned_compressed = [p.slot.index for p in shard.pieces if p.slot.compressed]
        own_runs = self._cut(shard.pieces, count)
        flat = [[p for one in parts for p in one[j]] for j in range(count)]
        encoded = rows_of(self.local, flat) if count > 1 else [self.local]
        whole = (
            count == 1
            or whole_second
            or (self.second_phase.measures_groups and any(cuts_groups(one) for one in parts))
        )
        self.slices = []
        for j in range(count):
            messages = [PayloadLayout(form, one[j]) for one in parts]
            first = PayloadLayout(form, own_runs[j])
            if not whole:
                second = [self._second(one[j]) for one in parts]
                self.slices.append(
                    Slice(encoded[j], messages, second, first, self._second(own_runs[j], own=True))
                )
            else:
                last = j == count - 1
                second = (
                    [self._second(pieces) for pieces in owned] if last and not self.stays else []
                )
                self.slices.append(
                    Slice(encoded[j], messages, second, first, self.own_second if last else None)
                )

    def _second(self, pieces: Sequence[Piece], *, own: bool = False) -> PayloadLayout:
        return PayloadLayout(
            self.second_phase.form, pieces, whole_groups=own and self.second_phase.whole_groups
        )
