"""Methods of exchanging gradients, and the collectives of every bucket on one rank, with exact
bytes.

Bytes come from `gradcomp.plan.nbytes.collective_bytes` and include headers, scales and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradcomp.arguments import check_integer
from gradcomp.codecs import KINDS, Codec, EntropyCoded, Identity
from gradcomp.comm.rounds import ring_bytes, rounds_of
from gradcomp.exchange.sizing import Strategy, choose
from gradcomp.payload.form import removal
from gradcomp.payload.parameters import Parameter
from gradcomp.payload.pieces import ByElements
from gradcomp.plan.nbytes import collective_bytes, ddp_buckets

FP32_NBYTES = 4

# ---- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalSteps:
    """Local steps between exchanges of pseudo-gradients (`gradcomp.DiLoCo`).

    Attributes:
        every: H, inner steps per exchange of the whole model.
        fragments: number of parts of the model that are exchanged in turn.
        delay: inner steps that run while a fragment is exchanged.

    Raises:
        ValueError: a number is out of its range.
    """

    every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            check_integer(name, getattr(self, name), least)
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
    """Codec and exchange of one row of the planner's tables.

    Attributes:
        name: name in tables.
        codec: codec of the gradients; None: DDP's own ring all_reduce.
        exchange: "all_reduce", "all_gather", "reduce_scatter" or "hierarchical".
        second_phase: second phase of a reduce_scatter; "" for other exchanges.
        value_nbytes: bytes per value in an all_reduce.
        local: local steps between exchanges; None: gradients are exchanged at every step.
        precondition: whether the time of ``precondition=True`` is included.
    """

    name: str
    codec: Codec | None
    exchange: str
    second_phase: str = ""
    value_nbytes: int = FP32_NBYTES
    local: LocalSteps | None = None
    precondition: bool = False

    @property
    def kind(self) -> str:
        """The first word of the name: "fp32", "bf16", or the `label` of the codec."""
        return self.name.split()[0]

    @property
    def compresses(self) -> bool:
        """Whether a codec other than `Identity` encodes the gradients."""
        return self.codec is not None and not isinstance(self.codec, Identity)

    @property
    def keeps_loss(self) -> bool:
        """Whether gradients are exchanged at every step, in fp32 or bf16."""
        return not self.compresses and self.local is None

    @property
    def each_step(self) -> Method:
        """The same exchange at every step."""
        if self.local is None:
            return self
        return replace(self, name=self.name.removesuffix(f" {self.local}"), local=None)

    def after(self, local: LocalSteps) -> Method:
        """Return the same exchange after local steps; without a codec it becomes `IDENTITY`."""
        plain = self.each_step if self.codec is not None else IDENTITY
        return replace(plain, name=f"{plain.name} {local}", local=local)


def label(codec: Codec) -> str:
    """Return a codec's name, with the bits of an `EntropyCoded` if they are not the default."""
    if isinstance(codec, EntropyCoded) and codec.bits != EntropyCoded().bits:
        return f"{codec.name}:bits={codec.bits:g}"
    return codec.name


def _exchanges(codec: Codec) -> list[Method]:
    name = label(codec)
    found = [Method(f"{name} all_gather", codec, "all_gather")]
    if codec.sum_form(1) is None:
        return [*found, Method(f"{name} reduce_scatter", codec, "reduce_scatter", "requantize")]
    for phase in ("exact", "block4", "requantize"):
        with_phase = codec.with_second_phase(phase)
        found.append(Method(f"{name} {phase}", with_phase, "reduce_scatter", phase))
    return found


_CODECS = (
    *(kind for kind in KINDS if not isinstance(kind, Identity)),
    EntropyCoded(1.25),
    EntropyCoded(3.2),
)
METHODS = (
    Method("fp32", None, "all_reduce"),
    Method("bf16", None, "all_reduce", value_nbytes=2),
    *(method for codec in _CODECS for method in _exchanges(codec)),
)
HIERARCHICAL = tuple(  # for nodes of several ranks
    Method(f"{label(codec)} hierarchical", codec, "hierarchical") for codec in _CODECS
)
IDENTITY = Method("identity", Identity(), "reduce_scatter", "requantize")  # the library's fp32


def find_method(name: str) -> Method:
    """Return the method with this name; ValueError if there is none."""
    known = {method.name: method for method in (*METHODS, *HIERARCHICAL, IDENTITY)}
    if name not in known:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(known)}{removal(name)}")
    return known[name]


def between(method: Method, nodes: int) -> Method:
    """Return the method that is used between nodes: for a hierarchical method its codec's default
    exchange (`IDENTITY` on one node), otherwise the method itself.
    """
    if method.exchange != "hierarchical" or method.codec is None:
        return method
    if nodes == 1:
        return IDENTITY
    strategy = choose(method.codec, nodes)
    wanted = method.kind, strategy.exchange, strategy.second_phase
    found = next(m for m in METHODS if (m.kind, m.exchange, m.second_phase) == wanted)
    return replace(found, precondition=method.precondition)


# ---- bytes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Collective:
    """Messages and bytes of one collective of a bucket on one rank."""

    kind: str  # "max", "all_to_all", "all_gather", "all_reduce" or "all_reduce_bf16"
    nbytes: int  # that the rank sends
    rounds: int  # consecutive messages; each adds the latency of the link
    leaving_nbytes: int  # that all ranks of the node together send over the node's link
    staying_nbytes: int = 0  # that the rank sends to other ranks of its node

    @staticmethod
    def of(kind: str, nbytes: int, ranks: int, node_ranks: int = 1) -> Collective:
        """Return a collective: an all_to_all sends to each rank directly, the others are rings."""
        rounds = rounds_of(kind, ranks)
        if kind == "all_to_all":
            leaving = nbytes * (ranks - node_ranks) // max(1, ranks - 1)
            return Collective(kind, nbytes, rounds, node_ranks * leaving, nbytes - leaving)
        leaving, staying = nbytes * (ranks > node_ranks), nbytes * (node_ranks > 1)
        return Collective(kind, nbytes, rounds, leaving, staying)

    def part(self, count: int) -> Collective:
        """Return the collective of one of `count` equal slices."""
        leaving, staying = self.leaving_nbytes // count, self.staying_nbytes // count
        return Collective(self.kind, self.nbytes // count, self.rounds, leaving, staying)


@dataclass(frozen=True)
class Bucket:
    """Exchange of one bucket on one rank. Buckets with equal exchanges are equal."""

    parameters: tuple[int, ...] = field(compare=False)  # indices in ``named_parameters()``
    numel: int
    owned_numel: int  # that the rank owns in a reduce_scatter; `numel` in other exchanges
    # collective that each stage but the last starts at its end; None: none
    collectives: tuple[Collective | None, ...]
    slices: int = 1
    whole_second: bool = False  # the second phase is not sliced and follows the last slice
    between: Bucket | None = None  # exchange with other nodes; hierarchical only

    @property
    def leaving_nbytes(self) -> int:
        """Bytes that the rank's node sends over its link for this bucket in one step."""
        return sum(c.leaving_nbytes for c in self.collectives if c is not None)


def plan_buckets(
    method: Method,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    bucket_cap_mb: float | None = None,
    node_ranks: int = 1,
) -> list[Bucket]:
    """Return the exchange of every bucket on rank 0, in the order in which backward completes them.

    `shapes`, `world_size` and `bucket_cap_mb` are as in `gradcomp.plan.nbytes.predict_bytes`;
    `node_ranks` must divide `world_size`.
    """
    planned: dict[tuple[tuple[int, int, bool], ...], Bucket] = {}
    out = []
    for parameters in ddp_buckets(method.codec or Identity(), shapes, bucket_cap_mb=bucket_cap_mb):
        key = tuple((p.numel, p.group_numel, p.compressed) for p in parameters)
        if key not in planned:  # large models have many equal buckets
            planned[key] = _plan_bucket(method, parameters, world_size, node_ranks)
        out.append(replace(planned[key], parameters=tuple(p.index for p in parameters)))
    return out


def _plan_bucket(method: Method, parameters: list[Parameter], n: int, node_ranks: int) -> Bucket:
    indices, numel = tuple(p.index for p in parameters), sum(p.numel for p in parameters)
    if method.exchange == "hierarchical":
        if 1 < node_ranks < n:
            return _plan_hierarchical(method, parameters, n // node_ranks, node_ranks)
        method = between(method, n // node_ranks)
    if method.codec is None:
        nbytes = ring_bytes(numel, n) * method.value_nbytes // FP32_NBYTES
        # CPUs add bf16 more slowly than fp32
        kind = "all_reduce" if method.value_nbytes == FP32_NBYTES else "all_reduce_bf16"
        return Bucket(indices, numel, numel, (Collective.of(kind, nbytes, n, node_ranks),))
    strategy = Strategy(method.exchange, method.second_phase)
    found = collective_bytes(method.codec, strategy, parameters, n)
    scale = Collective.of("max", found.scale, n, node_ranks) if found.scale else None
    if method.exchange == "all_gather":
        gathered = Collective.of("all_gather", found.first, n, node_ranks)
        return Bucket(indices, numel, numel, (scale, gathered, None), found.slices)
    owned = sum(ByElements(n).numel(p.numel, 0) for p in parameters)
    first = Collective.of("all_to_all", found.first, n, node_ranks)
    second = Collective.of("all_gather", found.second, n, node_ranks)
    collectives = (scale, first, second)
    return Bucket(indices, numel, owned, collectives, found.slices, found.whole_second)


def _plan_hierarchical(
    method: Method, parameters: list[Parameter], nodes: int, node_ranks: int
) -> Bucket:
    """Return a hierarchical exchange: plain fp32 inside nodes, the codec's default between them."""
    share, numel = ByElements(node_ranks), sum(p.numel for p in parameters)
    owned = [replace(p, numel=share.numel(p.numel, 0)) for p in parameters]
    packed = _plan_bucket(between(method, nodes), owned, nodes, 1)
    across = tuple(
        c and replace(c, leaving_nbytes=node_ranks * c.nbytes) for c in packed.collectives
    )
    mine = FP32_NBYTES * packed.numel
    scattered = Collective.of("all_to_all", FP32_NBYTES * numel - mine, node_ranks, node_ranks)
    gathered = Collective.of("all_gather", (node_ranks - 1) * mine, node_ranks, node_ranks)
    return replace(
        packed,
        numel=numel,
        owned_numel=packed.numel,
        collectives=(scattered, *across, None, gathered),
        between=replace(packed, collectives=across),
    )
