"""What each way of exchanging gradients costs a rank: the collectives of every bucket, to the byte,
and its CPU work.

Bytes are those of `gradcomp.exchange.sizing.collective_bytes`: headers, scales and padding count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradcomp.codecs import KINDS, Codec
from gradcomp.codecs.identity import Identity
from gradcomp.comm.rounds import all_gather_rounds, all_to_all_rounds, max_rounds, ring_bytes
from gradcomp.exchange.sizing import Strategy, choose, collective_bytes, ddp_buckets
from gradcomp.payload.form import removal
from gradcomp.payload.ownership import ByElements
from gradcomp.payload.parameters import Exempts, Parameter

FP32_NBYTES = 4


@dataclass(frozen=True)
class LocalSteps:
    """Local steps between exchanges of what they have changed (`gradcomp.DiLoCo`).

    Attributes:
        every: H, inner steps from one exchange to the next.
        fragments: parts of the model that take turns.
        delay: inner steps that go on while a fragment is exchanged.

    Raises:
        ValueError: a number out of its range.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.fragments > self.every or self.delay >= self.every:
            raise ValueError(
                f"{self.fragments} fragments and a delay of {self.delay} do not go into"
                f" {self.every} steps"
            )

    def __str__(self) -> str:
        parts = f" in {self.fragments} parts" if self.fragments > 1 else ""
        return f"every {self.every}{parts}{f', {self.delay} late' if self.delay else ''}"


@dataclass(frozen=True)
class Method:
    """A codec and how it is exchanged.

    Attributes:
        name: for tables.
        codec: None for DDP's own ring all_reduce.
        exchange: "all_reduce", "all_gather", "reduce_scatter" or "hierarchical".
        second_phase: of a reduce_scatter.
        value_nbytes: of a value in an all_reduce.
        local: steps between exchanges; None: gradients are exchanged at every step.
    """

    name: str
    codec: Codec | None
    exchange: str
    second_phase: str = ""
    value_nbytes: int = FP32_NBYTES
    local: LocalSteps | None = None

    @property
    def compresses(self) -> bool:
        """Whether a codec of this library makes the payloads."""
        return self.codec is not None and not isinstance(self.codec, Identity)

    @property
    def keeps_loss(self) -> bool:
        """Whether it is what everyone does: an exchange every step, in fp32 or bf16."""
        return not self.compresses and self.local is None

    @property
    def each_step(self) -> Method:
        """The same exchange at every step."""
        return (
            self
            if self.local is None
            else replace(self, name=self.name.removesuffix(f" {self.local}"), local=None)
        )

    def after(self, local: LocalSteps) -> Method:
        """Return the same exchange after local steps; DDP's is the library's fp32 one then."""
        plain = self.each_step if self.codec is not None else IDENTITY
        return replace(plain, name=f"{plain.name} {local}", local=local)


def _ways(codec: Codec) -> list[Method]:
    """Return the ways of exchanging a codec with its default options: gathered, and scattered
    with each lossless or like phase.
    """
    phases = ("exact", "block4", "requantize") if codec.sum_form(1) is not None else ("requantize",)
    gathered = Method(f"{codec.name} all_gather", codec, "all_gather")
    if len(phases) == 1:
        return [gathered, Method(f"{codec.name} reduce_scatter", codec, "reduce_scatter", *phases)]
    return [
        gathered,
        *(
            Method(f"{codec.name} {p}", codec.with_second_phase(p), "reduce_scatter", p)
            for p in phases
        ),
    ]


METHODS = (
    Method("fp32", None, "all_reduce"),
    Method("bf16", None, "all_reduce", value_nbytes=2),
    *(way for kind in KINDS if not isinstance(kind, Identity) for way in _ways(kind)),
)
HIERARCHICAL = tuple(
    Method(f"{kind.name} hierarchical", kind, "hierarchical")
    for kind in KINDS
    if not isinstance(kind, Identity)
)  # for nodes of several ranks
# fp32 through the library, for validation
IDENTITY = Method("identity", Identity(), "reduce_scatter", "requantize")


def find_method(name: str) -> Method:
    """Return a method by its name.

    Raises:
        ValueError: no such method.
    """
    for method in (*METHODS, *HIERARCHICAL, IDENTITY):
        if method.name == name:
            return method
    raise ValueError(
        f"unknown method {name!r}; there are {', '.join(m.name for m in (*METHODS, *HIERARCHICAL))}"
        f"{removal(name)}"
    )


def between(method: Method, nodes: int) -> Method:
    """Return how a method travels between nodes: itself, or if it is hierarchical the codec's
    own exchange for so many.
    """
    if method.exchange != "hierarchical" or method.codec is None:
        return method
    if nodes == 1:
        return IDENTITY
    strategy, name = choose(method.codec, nodes), method.codec.name
    alike = [m for m in METHODS if m.codec is not None and m.codec.name == name]
    return next(
        m
        for m in alike
        if (m.exchange, m.second_phase) == (strategy.exchange, strategy.second_phase)
    )


@dataclass(frozen=True)
class Collective:
    """One collective of a bucket, as a rank sees it.

    Attributes:
        kind: "max", "all_to_all", "all_gather", "all_reduce" or "all_reduce_bf16".
        nbytes: that the rank sends.
        rounds: messages that follow each other.
        leaving_nbytes: that its node sends over the node's link, for all of its ranks.
        staying_nbytes: that the rank sends to ranks of its own node.
    """

    kind: str
    nbytes: int
    rounds: int
    leaving_nbytes: int
    staying_nbytes: int = 0

    @staticmethod
    def of(kind: str, nbytes: int, ranks: int, node_ranks: int = 1) -> Collective:
        """Return a collective of ranks in the order of nodes: pairs of ranks (all_to_all), or a
        ring, in which one rank of a node sends to the next.
        """
        if kind != "all_to_all":
            rounds = all_gather_rounds(ranks) if kind == "all_gather" else max_rounds(ranks)
            return Collective(
                kind,
                nbytes,
                rounds,
                nbytes if ranks > node_ranks else 0,
                nbytes if node_ranks > 1 else 0,
            )
        leaving = nbytes * (ranks - node_ranks) // max(1, ranks - 1)
        return Collective(
            kind, nbytes, all_to_all_rounds(ranks), node_ranks * leaving, nbytes - leaving
        )

    def of_each(self, ranks: int) -> Collective:
        """Return it as one that each of a node's ranks has with the ranks at its place on other
        nodes.
        """
        return replace(self, leaving_nbytes=ranks * self.nbytes)

    def part(self, count: int) -> Collective:
        """Return it as one of so many slices has it."""
        sizes = (
            self.nbytes // count,
            self.rounds,
            self.leaving_nbytes // count,
            self.staying_nbytes // count,
        )
        return Collective(self.kind, *sizes)


@dataclass(frozen=True)
class Bucket:
    """One bucket's exchange on one rank.

    Attributes:
        parameters: positions in ``named_parameters()``.
        numel: values.
        owned_numel: values that the rank owns in a reduce_scatter.
        collectives: what each stage but the last starts at its end, None where it starts nothing.
        slices: in which it goes.
        whole_second: its second phase goes in one piece behind the last of them.
        between: (hierarchical) what a rank exchanges with other nodes.
    """

    parameters: tuple[int, ...]
    numel: int
    owned_numel: int
    collectives: tuple[Collective | None, ...]
    slices: int = 1
    whole_second: bool = False
    between: Bucket | None = None

    @property
    def sent_nbytes(self) -> int:
        """Bytes that the rank sends for this bucket in one step."""
        return sum(c.nbytes for c in self.collectives if c is not None)

    @property
    def leaving_nbytes(self) -> int:
        """Bytes that the rank's node sends over its link for this bucket in one step."""
        return sum(c.leaving_nbytes for c in self.collectives if c is not None)


def plan_buckets(
    method: Method,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    *,
    min_numel: int | None = None,
    exclude: Sequence[Exempts] = (),
    bucket_cap_mb: float | None = None,
    rank: int = 0,
    node_ranks: int = 1,
) -> list[Bucket]:
    """Return every bucket's exchange, in the order in which backward makes them ready.

    Args:
        method: codec and exchange.
        shapes: (name, shape) of every trained parameter, in the order of ``named_parameters()``.
        world_size, rank: as they say.
        min_numel, exclude: as in `gradcomp.ddp.register`.
        bucket_cap_mb: DDP's option (MiB); None is DDP's default, 1 MiB for the first bucket and 25
            for the others.
        node_ranks: ranks of a node, which share its link; they divide `world_size`.

    Raises:
        ValueError: a cap that is not positive, or an `exclude` entry that matches no name.
    """
    if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
    codec = method.codec or Identity()
    return [
        _plan_bucket(method, bucket, world_size, rank, node_ranks)
        for bucket in ddp_buckets(codec, shapes, min_numel, exclude, bucket_cap_mb)
    ]


def _plan_bucket(
    method: Method, parameters: list[Parameter], n: int, rank: int, node_ranks: int
) -> Bucket:
    numel = sum(p.numel for p in parameters)
    indices = tuple(p.index for p in parameters)
    if method.codec is None:
        nbytes = ring_bytes(numel, n) * method.value_nbytes // FP32_NBYTES
        # whose sums take longer on CPUs
        kind = "all_reduce" if method.value_nbytes == FP32_NBYTES else "all_reduce_bf16"
        return Bucket(indices, numel, numel, (Collective.of(kind, nbytes, n, node_ranks),))
    if method.exchange == "hierarchical":
        if 1 < node_ranks < n:
            return _plan_hierarchical(method, parameters, n // node_ranks, rank, node_ranks)
        return _plan_bucket(between(method, n // node_ranks), parameters, n, rank, node_ranks)
    strategy = Strategy(method.exchange, method.second_phase)
    found = collective_bytes(method.codec, strategy, parameters, n, rank)
    scale = Collective.of("max", found.scale, n, node_ranks) if found.scale else None
    if method.exchange == "all_gather":
        gathered = Collective.of("all_gather", found.first, n, node_ranks)
        return Bucket(indices, numel, numel, (scale, gathered, None), found.slices)
    owned = sum(ByElements(n).numel(p.numel, rank) for p in parameters)
    first = Collective.of("all_to_all", found.first, n, node_ranks)
    second = Collective.of("all_gather", found.second, n, node_ranks)
    collectives = (scale, first, second)
    return Bucket(indices, numel, owned, collectives, found.slices, found.whole_second)


def _plan_hierarchical(
    method: Method, parameters: list[Parameter], nodes: int, rank: int, node_ranks: int
) -> Bucket:
    """Return fp32 shares inside nodes, without headers, and between them the codec's own exchange
    of what the rank owns, whose scale groups are counted from the beginning of its share.
    """
    node, place = divmod(rank, node_ranks)
    numel = sum(p.numel for p in parameters)
    share = ByElements(node_ranks)
    owned = [replace(p, numel=share.numel(p.numel, place)) for p in parameters]
    packed = _plan_bucket(between(method, nodes), owned, nodes, node, 1)
    packed = replace(
        packed, collectives=tuple(c and c.of_each(node_ranks) for c in packed.collectives)
    )
    mine = FP32_NBYTES * packed.numel
    return replace(
        packed,
        numel=numel,
        owned_numel=packed.numel,
        collectives=(
            Collective.of("all_to_all", FP32_NBYTES * numel - mine, node_ranks, node_ranks),
            *packed.collectives,
            None,
            Collective.of("all_gather", (node_ranks - 1) * mine, node_ranks, node_ranks),
        ),
        between=packed,
    )
