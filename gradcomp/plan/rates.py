"""CPU seconds of every pipeline stage, as a few rates per method that are measured with the
library's own exchange.

A stage takes fixed + per_payload * N + per_value * (processed values) + per_owned_value * (values
the rank owns) seconds. Processed values, by exchange and stage:

==============  ===================  =====================  ==================
stage           statistics, encode   owner                  decode
==============  ===================  =====================  ==================
all_gather      the bucket's         of N - 1 payloads      of N payloads
reduce_scatter  the bucket's         owned, of N payloads   the bucket's
==============  ===================  =====================  ==================
"""

from __future__ import annotations

import json
import statistics
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm.base import Channel, Communicator, Counts, Work
from gradcomp.comm.local import Sent
from gradcomp.exchange.bucket import BucketExchange, ExchangeOptions
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.staged import for_device
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, encoding_device, of
from gradcomp.kernels.staging import Staged, wait_for
from gradcomp.memory.moments import Precondition, SecondMoments
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore
from gradcomp.optim import SplitSGD
from gradcomp.payload.pieces import ByElements, Slot, round_up
from gradcomp.plan.costs import FP32_NBYTES, METHODS, Method, find_method
from gradcomp.plan.nodes import exact

STAGES = ("statistics", "encode", "owner", "decode")
CAST_STAGES = ("cast", "uncast")
# Entries besides the methods. With the single stage "apply": additional seconds of exchanges after
# local steps, and of ``precondition=True``.
OUTER, PRECONDITION = "outer step", "precondition"
# Entry of buckets on an accelerator that the CPU encodes: copies to the host before, and back after
# the exchange. Missing: gradients are in host memory, or the accelerator encodes them, and the
# seconds of its stages include the copies of packed bytes.
COPIES, COPY_STAGES = "copies", ("to host", "to device")
APART = {OUTER: ("apply",), PRECONDITION: ("apply",), COPIES: COPY_STAGES}
SIZES = (1 << 13, 1 << 20)  # elements
COPIED = (1 << 13, 25 * 2**20 // 4)  # elements of a copy; the last are those of a DDP bucket
WORLD_SIZES = (2, 8)
REPEATS = 5

FORMAT = 2  # of rates in files; 1, which was not written: "ternary" was TernGrad

Features = tuple[float, float, float, float]  # 1, N, processed values, owned values


@dataclass(frozen=True)
class StageRate:
    """Rates of one stage, in seconds; see the table in the module's docstring."""

    fixed_s: float = 0.0
    per_payload_s: float = 0.0
    per_value_s: float = 0.0
    per_owned_value_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            exact(name, value)

    def seconds(self, features: Features) -> float:
        """Return the seconds for (1, N, processed values, owned values)."""
        rates = (self.fixed_s, self.per_payload_s, self.per_value_s, self.per_owned_value_s)
        return sum(rate * count for rate, count in zip(rates, features, strict=True))


FREE_STAGE = StageRate()


@dataclass(frozen=True)
class Rates:
    """CPU seconds of the stages of every method.

    Attributes:
        stages: rates by method name, then by stage; a missing method takes no time.
    """

    stages: Mapping[str, Mapping[str, StageRate]] = field(default_factory=dict)

    def stage_seconds(
        self, method: Method, world_size: int, numel: int, owned: int
    ) -> tuple[float, ...]:
        """Return the seconds of every stage of a bucket, of which the rank owns `owned` values."""
        rates = self.stages.get(method.name, {})
        seconds = [
            rates.get(stage, FREE_STAGE).seconds(_features(method, stage, world_size, numel, owned))
            for stage in _stages_of(method)
        ]
        if method.precondition:
            seconds[STAGES.index("encode")] += self._apply_seconds(PRECONDITION, numel)
        return tuple(seconds)

    def outer_seconds(self, numel: int) -> float:
        """Return the seconds of computing `numel` pseudo-gradients and applying their average."""
        return self._apply_seconds(OUTER, numel)

    def copy_seconds(self, numel: int) -> tuple[float, float]:
        """Return the seconds of copying a bucket of `numel` values to the host, and back."""
        here, back = (self._apply_seconds(COPIES, numel, stage) for stage in COPY_STAGES)
        return here, back

    def _apply_seconds(self, name: str, numel: int, stage: str = "apply") -> float:
        return self.stages.get(name, {}).get(stage, FREE_STAGE).seconds(per_value(numel))

    @staticmethod
    def median(repeated: Sequence[Rates]) -> Rates:
        """Return the median of every rate over repeated measurements of the same methods."""
        out: dict[str, dict[str, StageRate]] = {m: {} for m in repeated[0].stages}
        for method, stage in ((m, s) for m, stages in repeated[0].stages.items() for s in stages):
            found = (astuple(one.stages[method][stage]) for one in repeated)
            out[method][stage] = StageRate(*map(statistics.median, zip(*found, strict=True)))
        return Rates(out)

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as dictionaries for JSON (method, stage, field), and their "format"."""
        stages = {m: {s: asdict(r) for s, r in v.items()} for m, v in self.stages.items()}
        return {"format": FORMAT, **stages}

    @staticmethod
    def load(path: Path) -> Rates:
        """Read rates from a file of ``python -m gradcomp.plan --json`` or ``python -m
        gradcomp.doctor --json``, or from JSON of `to_dict`.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file does not contain rates, names an unknown method or stage, or is of
                an earlier version, which called TernGrad "ternary".
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            found = dict(found.get("rates", found))
            _check_format(found.pop("format", 1), found)
            for method, stages in found.items():
                names = APART.get(method) or _stages_of(find_method(method))
                for unknown in sorted(set(stages) - set(names)):
                    raise ValueError(f"{method} has no stage {unknown!r}, only {', '.join(names)}")
            return Rates({m: {s: StageRate(**r) for s, r in v.items()} for m, v in found.items()})
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} does not hold rates: {error}") from None


FREE = Rates()


def _check_format(made: object, methods: Iterable[str]) -> None:
    old = next((name for name in methods if name.startswith("ternary ")), "")
    if made == 1 and old:
        raise ValueError(
            f"an earlier version wrote it, which called TernGrad 'ternary': {old!r} is"
            f" {old.replace('ternary', 'terngrad')!r} now. Measure the rates again"
        )
    if made not in (1, FORMAT):
        raise ValueError(f"format {made!r}, expected {FORMAT}")


def _stages_of(method: Method) -> tuple[str, ...]:
    return STAGES if method.codec is not None else CAST_STAGES


def _features(method: Method, stage: str, n: int, numel: int, owned: int) -> Features:
    payloads = 0 if stage in ("statistics", *CAST_STAGES) else n
    gathers, passing = method.exchange == "all_gather", numel
    if stage == "owner":
        passing = (n - 1) * numel if gathers else n * owned
    elif stage == "decode" and gathers:
        passing = n * numel
    return 1.0, float(payloads), float(passing), float(owned) * (stage == "owner")


def per_value(numel: int) -> Features:
    """Return the features of a stage that takes fixed + per_value * numel seconds."""
    return 1.0, 0.0, float(numel), 0.0


# ---- measuring -----------------------------------------------------------------------------------


def calibrate(
    methods: Sequence[Method] = METHODS,
    *,
    sizes: Sequence[int] = SIZES,
    world_sizes: Sequence[int] = WORLD_SIZES,
    repeats: int = REPEATS,
    before: Callable[[], None] = lambda: None,
    device: torch.device = CPU,
) -> Rates:
    """Measure the rates of methods in this process, with torch's number of threads. Takes about a
    second for all methods.

    Runs the real exchange without a network: the messages of all peers are copies of this rank's.

    Args:
        methods: methods to measure.
        sizes: elements of a bucket, multiples of 512, so that all ranks own equally many.
        world_sizes: numbers of ranks, powers of two from 2 to 64.
        repeats: number of measurements, of which the median is used.
        before: called before each measurement, for example a barrier, so that the ranks of one
            machine measure at the same time.
        device: device of the gradients. An accelerator's own kernels are timed if they are used,
            else the CPU's, and copies to and from the accelerator. Casts of ``bf16`` and outer
            steps are timed on the CPU.

    Raises:
        ValueError: a size or a number of ranks does not fulfil these conditions.
    """
    for name, unit, values in (("sizes", 512, sizes), ("world_sizes", 2, world_sizes)):
        if not values or any(v < unit or v % unit for v in values):
            raise ValueError(f"{name} must be multiples of {unit}, got {values!r}")
    if any(64 % n for n in world_sizes):
        raise ValueError(f"world_sizes must be powers of two up to 64, got {world_sizes!r}")

    def rate(
        make: Callable[[int], Callable[[], object]], sizes: Sequence[int] = sizes
    ) -> StageRate:
        seconds = {
            numel: timeit.repeat(make(numel), number=1, repeat=repeats + 1) for numel in sizes
        }
        return fit([(per_value(n), statistics.median(one[1:])) for n, one in seconds.items()])

    encodes_on = encoding_device(device)
    out: dict[str, dict[str, StageRate]] = {}
    if encodes_on != device:
        out[COPIES] = {
            stage: rate(partial(copying, device, stage), COPIED) for stage in COPY_STAGES
        }
    if any(method.local is not None for method in methods):
        out[OUTER] = {"apply": rate(_outer_step)}
    if any(method.compresses for method in methods):
        out[PRECONDITION] = {"apply": rate(partial(_preconditioning, encodes_on))}
    for method in {m.each_step.name: m.each_step for m in methods}.values():
        if method.codec is None:
            if method.value_nbytes < FP32_NBYTES:
                out[method.name] = {"cast": rate(_rounding), "uncast": rate(_widening)}
            continue
        points: dict[str, list[tuple[Features, float]]] = {stage: [] for stage in STAGES}
        for n in world_sizes:
            for size in sizes:
                before()
                # a multiple for all ranks: the peers' messages are copies of this rank's
                numel = round_up(size, n * max(1, method.codec.form.group_numel))
                seconds = _run_exchange(method, method.codec, numel, n, repeats, encodes_on)
                scatters = method.exchange == "reduce_scatter"
                owned = ByElements(n).numel(numel, 0) if scatters else numel
                for stage, found in points.items():
                    found.append((_features(method, stage, n, numel, owned), seconds[stage]))
        out[method.name] = {stage: fit(found) for stage, found in points.items()}
    return Rates(out)


def _run_exchange(
    method: Method, codec: Codec, numel: int, n: int, repeats: int, device: torch.device
) -> dict[str, float]:
    """Return the median seconds of every stage of one bucket's exchange on rank 0."""
    strategy = Strategy(method.exchange, method.second_phase)
    group = codec.form.group_numel or (max(1, numel // 64) if codec.whole_groups else numel)
    plan = BucketPlan(codec, [Slot(0, numel, group, True, 0)], strategy, n, 0, {0: 0})
    stats, values = Stats(), torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3
    values = values.to(device)
    state = StateStore(Planes({0: numel}, device=device) if codec.error_feedback else None)
    if owners_feed_back(strategy.second_phase, codec):
        state.owner_residuals = Planes({0: ByElements(n).numel(numel, 0)}, device=device)
    buffer, seen = torch.empty_like(values), []
    options = ExchangeOptions(torch.float32, stats, state, device=device)
    exchange = for_device(BucketExchange(plan, _Echo(n), options), buffer, device)
    for step in range(repeats + 1):
        buffer.copy_(values)
        stats.reset()
        exchange.begin(buffer, step, 0)
        for stage in exchange.slices[0]:
            stage()
        exchange.commit()
        seen.append(dict(stats.seconds))
    return {s: statistics.median(one[s] for one in seen[1:]) for s in STAGES}


def _rounding(numel: int) -> Callable[[], Tensor]:
    values = torch.randn(numel)
    return lambda: values.bfloat16().div_(2)


def _widening(numel: int) -> Callable[[], Tensor]:
    values, half = torch.empty(numel), torch.randn(numel).bfloat16()
    return lambda: values.copy_(half)


def copying(device: torch.device, stage: str, numel: int) -> Callable[[], None]:
    """Return a function that copies `numel` float32 values from an accelerator to page-locked host
    memory, or back, and waits for that; `stage` is one of `COPY_STAGES`.
    """
    values = torch.zeros(numel, device=device)
    staged = Staged(values)

    def copy() -> None:
        if stage == COPY_STAGES[0]:
            staged.fetch(values)
            staged.wait()
        else:
            staged.give(values)
            wait_for(device)

    return copy


def _preconditioning(device: torch.device, numel: int) -> Callable[[], None]:
    """Return a function with the work of ``precondition=True`` on `numel` values."""
    moments = SecondMoments(Precondition(), {0: numel}, device)
    slot = Slot(0, numel, numel, True, 0)
    values, residual = torch.randn(numel).to(device), torch.randn(numel).to(device)
    units, out, spare = (torch.empty_like(values) for _ in range(3))
    moments.observe([slot], values, 0)
    moments.planes.commit([0])

    def step() -> None:
        moments.divide(slot, values, residual, units, out)
        torch.mul(residual, units, out=spare)
        out.mul_(units)
        moments.observe([slot], out, 1)
        wait_for(device)

    return step


def _outer_step(numel: int) -> Callable[[], None]:
    """Return a function with the work of a `DiLoCo` sync besides the exchange."""
    weight, bucket = torch.randn(numel), torch.empty(numel)
    anchor = torch.nn.Parameter(weight.clone())
    optimizer = SplitSGD([anchor], lr=0.7, momentum=0.9, nesterov=True)

    @torch.no_grad()
    def step() -> None:
        anchor.grad = anchor - weight
        bucket.copy_(anchor.grad)
        anchor.grad.copy_(bucket)
        of(CPU).are_finite(anchor.grad)
        optimizer.step()
        weight.copy_(anchor)

    return step


def fit(points: Sequence[tuple[Features, float]]) -> StageRate:
    """Return the rates, none negative, with the least sum of squared relative errors."""
    rows = np.array([features for features, _ in points])
    seconds = np.array([max(s, 1e-9) for _, s in points])
    kept = [c for c in range(rows.shape[1]) if rows[:, c].any()]
    while kept:
        scaled = rows[:, kept] / seconds[:, None]
        norms = np.linalg.norm(scaled, axis=0)
        found = np.linalg.lstsq(scaled / norms, np.ones(len(points)), rcond=1e-9)[0] / norms
        if (found >= 0).all():
            rates = dict(zip(kept, found.tolist(), strict=True))
            return StageRate(*(rates.get(column, 0.0) for column in range(rows.shape[1])))
        kept.pop(int(np.argmin(found * norms)))
    return StageRate()


class _Echo(Communicator):
    """Communicator of rank 0 whose N - 1 peers send copies of this rank's messages."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        return Sent()

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        recv.view(self.world_size, -1).copy_(send[: send_nbytes[0]])
        return Sent()

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        recv.view(self.world_size, -1).copy_(send)
        return Sent()

    def close(self) -> None:
        return
