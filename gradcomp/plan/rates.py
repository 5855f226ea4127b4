"""CPU seconds of every pipeline stage: a few rates a method, measured by running the library's own
exchange.

A stage's seconds are fixed + per_payload * N + per_value * (values that pass) + per_owned_value *
(values the rank owns):

=============  ==========================  ================================
==============================
stage          statistics, encode          owner                             decode
=============  ==========================  ================================
==============================
all_gather     the bucket's                those of N - 1 payloads: checks   those of N payloads
reduce_scatter the bucket's                those owned, of N payloads        the bucket's
=============  ==========================  ================================
==============================
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm.base import Channel, Communicator, Counts, Work
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import HOST
from gradcomp.memory.residuals import Feedback
from gradcomp.optim import SplitSGD
from gradcomp.payload.ownership import ByElements
from gradcomp.payload.pieces import Slot
from gradcomp.plan.costs import METHODS, Method, find_method

STAGES = ("statistics", "encode", "owner", "decode")
CAST_STAGES = ("cast", "uncast")
OUTER = (  # a method of its own: what an exchange after local steps takes beside that of its codec
    "outer step"
)
SIZES = (1 << 13, 1 << 20)  # elements
WORLD_SIZES = (2, 8)
REPEATS = 5


@dataclass(frozen=True)
class StageRate:
    """Seconds of one stage; see the table at the head of this file."""

    fixed_s: float = 0.0
    per_payload_s: float = 0.0
    per_value_s: float = 0.0
    per_owned_value_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not 0 <= value < math.inf
            ):
                raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")

    def seconds(self, features: Sequence[float]) -> float:
        """Return the seconds for (1, N, values that pass, values owned)."""
        return sum(
            rate * count
            for rate, count in zip(
                (self.fixed_s, self.per_payload_s, self.per_value_s, self.per_owned_value_s),
                features,
                strict=True,
            )
        )


@dataclass(frozen=True)
class Rates:
    """CPU seconds of the stages of every method.

    Attributes:
        stages: by method name, then by stage; a method that is missing costs as another way of its
            codec does, or nothing.
    """

    stages: Mapping[str, Mapping[str, StageRate]] = field(default_factory=dict)

    def stage_seconds(
        self, method: Method, world_size: int, numel: int, owned: int
    ) -> tuple[float, ...]:
        """Return the seconds of every stage of one bucket.

        Args:
            method: how it is exchanged.
            world_size: N.
            numel: values of the bucket.
            owned: values of it that the rank owns.
        """
        mine = self.stages.get(method.name) or self._alike(method)
        names = STAGES if method.codec is not None else CAST_STAGES
        return tuple(
            mine.get(n, StageRate()).seconds(_features(method, n, world_size, numel, owned))
            for n in names
        )

    def outer_seconds(self, numel: int) -> float:
        """Return the seconds of forming so many values' pseudo-gradients and of applying their
        average.
        """
        return (
            self.stages.get(OUTER, {})
            .get("apply", StageRate())
            .seconds((1.0, 0.0, float(numel), 0.0))
        )

    def _alike(self, method: Method) -> Mapping[str, StageRate]:
        """Return the rates of another way of the same codec: those of files older than a method."""
        kind = method.codec.name if method.codec is not None else None
        alike = [
            m
            for m in METHODS
            if m.codec is not None and m.codec.name == kind and m.exchange == method.exchange
        ]
        return next((self.stages[m.name] for m in alike if m.name in self.stages), {})

    @staticmethod
    def median(repeated: Sequence[Rates]) -> Rates:
        """Return the median of every rate of several measurements of the same methods."""
        first = repeated[0].stages
        return Rates(
            {
                method: {
                    stage: StageRate(
                        **{
                            name: statistics.median(
                                getattr(one.stages[method][stage], name) for one in repeated
                            )
                            for name in asdict(rate)
                        }
                    )
                    for stage, rate in stages.items()
                }
                for method, stages in first.items()
            }
        )

    def to_dict(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return plain dictionaries, for JSON."""
        return {
            m: {s: asdict(rate) for s, rate in stages.items()} for m, stages in self.stages.items()
        }

    @staticmethod
    def from_dict(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Rates:
        """Return what `to_dict` has made plain."""
        return Rates(
            {m: {s: StageRate(**rate) for s, rate in stages.items()} for m, stages in found.items()}
        )

    @staticmethod
    def load(path: Path) -> Rates:
        """Read what ``python -m gradcomp.plan --json`` wrote, or `to_dict` as JSON.

        Raises:
            OSError: the file cannot be read.
            ValueError: it does not hold rates, or those of a method or stage that is not known.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found = found.get("rates", found)
            for method, stages in found.items():
                names = (
                    ("apply",)
                    if method == OUTER
                    else STAGES
                    if find_method(method).codec is not None
                    else CAST_STAGES
                )
                if unknown := set(stages) - set(names):
                    raise ValueError(
                        f"{method} has no stage {min(unknown)!r}, only {', '.join(names)}"
                    )
            return Rates.from_dict(found)
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} does not hold rates: {error}") from None


FREE = Rates()


def _features(method: Method, stage: str, n: int, numel: int, owned: int) -> tuple[float, ...]:
    passing = float(numel)
    if stage == "owner":
        passing = float((n - 1) * numel) if method.exchange == "all_gather" else float(n * owned)
    elif stage == "decode" and method.exchange == "all_gather":
        passing = float(n * numel)
    return (
        1.0,
        0.0 if stage in ("statistics", *CAST_STAGES) else float(n),
        passing,
        float(owned) * (stage == "owner"),
    )


def calibrate(
    methods: Sequence[Method] = METHODS,
    *,
    sizes: Sequence[int] = SIZES,
    world_sizes: Sequence[int] = WORLD_SIZES,
    repeats: int = REPEATS,
    before: Callable[[], None] = lambda: None,
) -> Rates:
    """Return rates measured here, now, on as many threads as torch has: about a second for all
    methods.

    Every exchange runs for real, with peers that send what this rank sends and without a network.

    Args:
        methods: to measure.
        sizes: elements of a bucket, multiples of 512, so that all ranks own alike pieces.
        world_sizes: ranks, powers of two up to 64.
        repeats: a median is taken of.
        before: called before every measurement (a barrier, so that ranks of one machine measure at
            once).

    Raises:
        ValueError: a size or a number of ranks that does not share out evenly.
    """
    for name, unit, values in (("sizes", 512, sizes), ("world_sizes", 2, world_sizes)):
        if not values or any(v < unit or v % unit for v in values):
            raise ValueError(f"{name} must be multiples of {unit}, got {values!r}")
    if any(64 % n for n in world_sizes):
        raise ValueError(f"world_sizes must be powers of two up to 64, got {world_sizes!r}")
    out: dict[str, dict[str, StageRate]] = {}
    if any(method.local is not None for method in methods):
        out[OUTER] = {"apply": _outer_rate(sizes, repeats)}
    for method in {m.each_step.name: m.each_step for m in methods}.values():
        if method.codec is None:
            if method.value_nbytes < 4:
                out[method.name] = _cast_rates(sizes, repeats)
            continue
        points: dict[str, list[tuple[tuple[float, ...], float]]] = {stage: [] for stage in STAGES}
        for n in world_sizes:
            for numel in sizes:
                before()
                seconds = _run_exchange(method, method.codec, numel, n, repeats)
                owned = (
                    ByElements(n).numel(numel, 0) if method.exchange == "reduce_scatter" else numel
                )
                for stage in STAGES:
                    points[stage].append(
                        (_features(method, stage, n, numel, owned), seconds[stage])
                    )
        out[method.name] = {stage: _fit(found) for stage, found in points.items()}
    return Rates(out)


def _run_exchange(
    method: Method, codec: Codec, numel: int, n: int, repeats: int
) -> dict[str, float]:
    """Return the median seconds of every stage of one exchange of rank 0."""
    strategy = Strategy(method.exchange, method.second_phase)
    group = max(1, numel // 64) if codec.whole_groups else numel
    slot = Slot(0, numel, group, True, 0)
    plan = BucketPlan(codec, [slot], strategy, n, 0, {0: 0})
    stats, values = Stats(), torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    kept = {"feedback": Feedback({0: numel})} if codec.error_feedback else {}
    if owners_feed_back(strategy.second_phase, codec):
        kept["owner_feedback"] = Feedback({0: ByElements(n).numel(numel, 0)})
    exchange = BucketExchange(plan, _Echo(n), torch.float32, stats, **kept)  # type: ignore[arg-type]
    buffer, seen = torch.empty_like(values), []
    for step in range(repeats + 1):
        buffer.copy_(values)
        stats.reset()
        exchange.begin(buffer, step, 0)
        for stage in exchange.slices[0]:
            stage()
        exchange.commit()
        seen.append(dict(stats.seconds))
    return {s: statistics.median(one[s] for one in seen[1:]) for s in STAGES}


def _cast_rates(sizes: Sequence[int], repeats: int) -> dict[str, StageRate]:
    """Return what rounding to bf16 (divided, as for a mean) and widening back takes."""
    rounding: list[tuple[tuple[float, ...], float]] = []
    widening: list[tuple[tuple[float, ...], float]] = []
    for numel in sizes:
        values = torch.randn(numel)
        half = values.bfloat16()
        actions: list[tuple[list[Any], Callable[[], Tensor]]] = [
            (rounding, lambda v=values: v.bfloat16().div_(2)),  # type: ignore[misc]
            (widening, lambda v=values, h=half: v.copy_(h)),  # type: ignore[misc]
        ]
        for found, action in actions:
            seconds = []
            for _ in range(repeats + 1):
                begun = time.perf_counter()
                action()
                seconds.append(time.perf_counter() - begun)
            found.append(((1.0, 0.0, float(numel), 0.0), statistics.median(seconds[1:])))
    return {"cast": _fit(rounding), "uncast": _fit(widening)}


def _outer_rate(sizes: Sequence[int], repeats: int) -> StageRate:
    """Return what it takes to form pseudo-gradients, to copy them into buckets and back, and to
    apply them with Nesterov momentum.
    """
    points: list[tuple[tuple[float, ...], float]] = []
    for numel in sizes:
        weight, bucket, seconds = torch.randn(numel), torch.empty(numel), []
        anchor = torch.nn.Parameter(weight.clone())
        optimizer = SplitSGD([anchor], lr=0.7, momentum=0.9, nesterov=True)  # as `DiLoCo` has it
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            with torch.no_grad():
                anchor.grad = anchor - weight
                bucket.copy_(anchor.grad)
                anchor.grad.copy_(bucket)
                HOST.are_finite(anchor.grad)
                optimizer.step()
                weight.copy_(anchor)
            seconds.append(time.perf_counter() - begun)
        points.append(((1.0, 0.0, float(numel), 0.0), statistics.median(seconds[1:])))
    return _fit(points)


def _fit(points: Sequence[tuple[tuple[float, ...], float]]) -> StageRate:
    """Return the rates with the least relative squares, none of them negative (columns are
    dropped until that is so).
    """
    rows = np.array([features for features, _ in points])
    seconds = np.array([max(s, 1e-9) for _, s in points])
    kept = [c for c in range(rows.shape[1]) if rows[:, c].any()]
    while kept:
        scaled = rows[:, kept] / seconds[:, None]
        norms = np.linalg.norm(scaled, axis=0)
        found = np.linalg.lstsq(scaled / norms, np.ones(len(points)), rcond=1e-9)[0] / norms
        if (found >= 0).all():
            rates = [0.0] * rows.shape[1]
            for column, rate in zip(kept, found.tolist(), strict=True):
                rates[column] = rate
            return StageRate(*rates)
        kept.pop(int(np.argmin(found * norms)))
    return StageRate()


class _Echo(Communicator):
    """N - 1 peers that send what this rank sends."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        return _Done()

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        recv.view(self.world_size, -1).copy_(send[: send_nbytes[0]])
        return _Done()

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        recv.view(self.world_size, -1).copy_(send)
        return _Done()

    def close(self) -> None:
        return


class _Done(Work):
    def wait(self, timeout_s: float) -> None:
        return
