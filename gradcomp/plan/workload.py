"""Inputs and result of a simulation: workload, stragglers, transport, and seconds of a step."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gradcomp.plan.costs import Bucket
from gradcomp.plan.links import Node
from gradcomp.plan.nodes import exact

ALONE = Node()
MAX_NUMEL = 1 << 50  # its product with 4096 ranks still fits an int64
MAX_JITTER = 10.0
QUANTILES, LIKELY = 64, 8  # quantiles of the slowest node's time, and the means taken of them
DRAWN, DRAWN_HALVES = 12, 16  # with double buffering: simulated nodes of a kind, and half steps


@dataclass(frozen=True)
class Workload:
    """Model, minibatch and computing times of a training.

    Attributes:
        parameters: (name, shape) of every parameter, in the order of ``named_parameters()``.
        minibatch: samples per step over all ranks together.
        t_frame: seconds of forward and backward of one sample on one rank.
        t_update: seconds of a model update; every rank spends them.
        t_post: seconds of post-processing a gradient, divided over the ranks.
        flops: forward FLOPs of each parameter, by which backward's time is divided over the
            buckets; None or all zero: by the number of values.
        forward_share: share of `t_frame` spent in forward; a third by default, since backward
            computes two products for each product of forward.
        bucket_cap_mb: DDP's option, in MiB; None is DDP's default.
        weak: `minibatch` counts the samples of each rank, so more ranks compute more samples.
        overlaps: buckets are exchanged during backward (DDP); False: after backward
            (`GradientAverager`).

    Raises:
        TypeError: an attribute is not a number.
        ValueError: a number is out of its range; the message has its name and value.
    """

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    minibatch: float
    t_frame: float
    t_update: float = 0.0
    t_post: float = 0.0
    flops: tuple[float, ...] | None = None
    forward_share: float = 1 / 3
    bucket_cap_mb: float | None = None
    weak: bool = False
    overlaps: bool = True

    def __post_init__(self) -> None:
        if not self.parameters:
            raise ValueError("parameters must name at least one tensor, got none")
        if self.numel > MAX_NUMEL:
            raise ValueError(f"parameters must hold at most {MAX_NUMEL} values, got {self.numel}")
        exact("minibatch", self.minibatch, positive=True)
        for name in ("t_frame", "t_update", "t_post"):
            exact(name, getattr(self, name))
        if exact("forward_share", self.forward_share) > 1:
            raise ValueError(f"forward_share must be in [0, 1], got {self.forward_share!r}")
        if self.flops is not None and len(self.flops) != len(self.parameters):
            entries = f"one entry per parameter ({len(self.parameters)})"
            raise ValueError(f"flops must have {entries}, got {len(self.flops)}")
        for value in self.flops or ():
            exact("flops", value)
        if self.bucket_cap_mb is not None:
            exact("bucket_cap_mb", self.bucket_cap_mb, positive=True)

    @property
    def numel(self) -> int:
        """Number of values of all parameters."""
        return sum(math.prod(shape) for _, shape in self.parameters)

    def samples(self, ranks: int) -> float:
        """Return the samples per step on one rank: at least one, and not rounded."""
        return self.minibatch if self.weak else max(1.0, self.minibatch / ranks)

    def shares(self, buckets: Sequence[Bucket]) -> list[float]:
        """Return each bucket's share of backward, from when the bucket before it was ready."""
        weights: Sequence[float] = [float(math.prod(shape)) for _, shape in self.parameters]
        if self.flops is not None and any(self.flops):
            weights = self.flops
        total = sum(weights)
        if not total:
            return [1 / len(buckets)] * len(buckets)
        return [sum(weights[i] for i in bucket.parameters) / total for bucket in buckets]


@dataclass(frozen=True)
class Stragglers:
    """Differences in computing time between nodes.

    Attributes:
        jitter: standard deviation of the logarithm of a node's computing time in a step; the mean
            computing time does not depend on it.
        slow_share: share of the nodes that are always slower, rounded to whole nodes.
        slow_factor: computing time of a slow node relative to the others, at least 1.

    Raises:
        ValueError: a jitter outside [0, 10], a share outside [0, 1], a factor below 1.
    """

    jitter: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MAX_JITTER:
            raise ValueError(f"jitter must be in [0, {MAX_JITTER:.0f}], got {self.jitter!r}")
        if not 0 <= self.slow_share <= 1:
            raise ValueError(f"slow_share must be in [0, 1], got {self.slow_share!r}")
        if not 1 <= self.slow_factor < math.inf:
            raise ValueError(f"slow_factor must be at least 1 and finite, got {self.slow_factor!r}")

    @property
    def any(self) -> bool:
        """Whether nodes differ at all."""
        return self.jitter > 0 or (self.slow_share > 0 and self.slow_factor > 1)

    def mean(self, nodes: int) -> float:
        """Return the mean computing time over all nodes, relative to that of a fast node."""
        return 1 + (self.slow_factor - 1) * round(self.slow_share * nodes) / nodes

    def factors(
        self, nodes: int, *, double_buffering: bool = False
    ) -> tuple[list[list[float]], list[int]]:
        """Return factors of the computing time, ``[half step][node]``, and the number of nodes that
        each simulated node stands for.

        Without double buffering only the slowest node is simulated, in equally likely steps: the
        slowest of n lognormal times is below x with the n-th power of the probability of one.
        """
        slow = round(self.slow_share * nodes)
        groups = [(n, f) for n, f in ((slow, self.slow_factor), (nodes - slow, 1.0)) if n]
        if not self.jitter:
            groups = groups if double_buffering else groups[:1]
            same = [[factor for _, factor in groups]] * (4 if double_buffering else 1)
            return same, [n for n, _ in groups]
        if double_buffering:
            drawn, shuffled = [], random.Random(0)  # noqa: S311 - a shuffle
            for factor in (f for n, f in groups for _ in range(min(n, DRAWN))):
                times = self._likely(DRAWN_HALVES, 1)
                shuffled.shuffle(times)
                drawn.append([factor * one / statistics.fmean(times) for one in times])
            # repeat the last two halves at the front: a run starts in the state that they leave
            halves = [list(one) for one in zip(*(node[-2:] + node for node in drawn), strict=True)]
            return halves, [1] * len(drawn)
        each = [[f * one for one in self._likely(QUANTILES, n)] for n, f in groups]
        found = sorted(max(pair) for pair in itertools.product(*each))
        part = len(found) // LIKELY
        parts = [found[k * part : (k + 1) * part] for k in range(LIKELY)]
        return [[statistics.fmean(one)] for one in parts], [nodes]

    def _likely(self, count: int, nodes: int) -> list[float]:
        """Return `count` equally likely factors of the slowest of `nodes` nodes."""
        normal = statistics.NormalDist(0.0, self.jitter)
        shares = [((k + 0.5) / count) ** (1 / nodes) for k in range(count)]
        return [math.exp(normal.inv_cdf(share) - self.jitter**2 / 2) for share in shares]


EVEN = Stragglers()


@dataclass(frozen=True)
class Transport:
    """Measured seconds that a transport adds to each kind of collective, on top of the link.

    Attributes:
        alpha_s: seconds per collective, by kind.
        beta_s: seconds per byte sent, by kind.
    """

    alpha_s: dict[str, float] = field(default_factory=dict)
    beta_s: dict[str, float] = field(default_factory=dict)

    def parts(self, kind: str, nbytes: int) -> tuple[float, float]:
        """Return the seconds that one collective waits, and those in which it moves and adds bytes.
        A bf16 all_reduce that was not measured is assumed to take as long as one of fp32.
        """
        kind = kind if kind in self.beta_s else kind.removesuffix("_bf16")
        return self.alpha_s.get(kind, 0.0), self.beta_s.get(kind, 0.0) * nbytes

    @staticmethod
    def median(repeated: Sequence[Transport]) -> Transport:
        """Return the medians over repeated measurements of the same kinds of collectives."""
        many = ([one.alpha_s for one in repeated], [one.beta_s for one in repeated])
        return Transport(
            *({kind: statistics.median(one[kind] for one in m) for kind in m[0]} for m in many)
        )


@dataclass(frozen=True)
class Simulation:
    """Simulated time of a step. Seconds are means over nodes and steps, and `seconds` is the sum of
    `compute_seconds`, `straggler_seconds` and `exposed_seconds`.

    Attributes:
        nodes: number of nodes.
        seconds: seconds per step.
        compute_seconds: forward, backward and update of a node.
        straggler_seconds: wait for the computation of the slowest node.
        exposed_seconds: exchange, codecs included, that is not hidden by computation.
        exchange_seconds: time from the first bucket being ready to the last being decoded, per
            step, on the slowest node.
        hidden_share: share of `exchange_seconds` that is hidden by computation.
        sent_nbytes: bytes that a node sends over its link in a step.
        ranks: number of ranks over all nodes.
    """

    nodes: int
    seconds: float
    compute_seconds: float
    straggler_seconds: float
    exposed_seconds: float
    exchange_seconds: float
    hidden_share: float
    sent_nbytes: int
    ranks: int
