"""python -m gradcomp.bench optim: seconds a step and bytes a weight of the split optimizers, beside
torch's in one run.

Every contender holds its own weights, gradients and state of `numel` elements; split ones bf16
weights, trails and bf16 gradients, torch's fp32. In each repetition all of one optimizer's
contenders take a step in turn; medians and medians of the repetitions' ratios are shown. Memory is
what weights, state and gradients occupy, in bytes a weight. A step of every split optimizer is
compared with `gradcomp.reference.optim` before it is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradcomp.arguments import Parser
from gradcomp.bench.codec import Memcpy, seconds, threads
from gradcomp.codecs import TernGrad
from gradcomp.kernels import HOST
from gradcomp.optim import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    join,
    split,
    split_parameters,
)
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.reference import optim as reference

LR = 0.01
LAMB_TENSORS = (
    64  # tensors that the weights are shared over for LAMB, which goes through each of them twice
)
CHECK_NUMEL = 70_001

OURS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: SplitSGD(p, lr=LR),
    "SGD momentum": lambda p: SplitSGD(p, lr=LR, momentum=0.9),
    "Adagrad": lambda p: SplitAdagrad(p, lr=LR),
    "AdamW": lambda p: SplitAdamW(p, lr=LR),
    "LAMB": lambda p: SplitLAMB(p, lr=LR),
}
TORCHS: dict[str, Callable[..., Any]] = {
    "SGD": lambda p, **kind: torch.optim.SGD(p, lr=LR, **kind),
    "SGD momentum": lambda p, **kind: torch.optim.SGD(p, lr=LR, momentum=0.9, **kind),
    "Adagrad": lambda p, **kind: torch.optim.Adagrad(p, lr=LR, **kind),
    "AdamW": lambda p, **kind: torch.optim.AdamW(p, lr=LR, **kind),
}
# (optimizer, beside what, at most this many times its time, aim)
LIMITS = [
    ("SGD", "torch foreach fp32", 0.95, None),
    ("SGD", "memcpy", 1.8, 1.4),
    ("SGD momentum", "torch foreach fp32", 0.8, None),
    ("Adagrad", "torch fused fp32", 1.0, None),
    ("AdamW", "torch fused fp32", 1.0, None),
    (f"LAMB, {LAMB_TENSORS} tensors", "split AdamW", 1.6, None),
    ("LAMB, 1 tensor", "split AdamW", 1.6, None),
]


@dataclass
class Row:
    """One contender: median milliseconds a step, times memcpy of the fp32 buffer, bytes a
    weight.
    """

    optimizer: str
    contender: str
    ms: float
    memcpys: float
    weight_bytes: float
    state_bytes: float
    gradient_bytes: float
    ratio: float  # time of the first contender of this optimizer over this one's


class Contender:
    """Something that takes steps: a name, what to call, and the tensors that it needs."""

    def __init__(
        self,
        name: str,
        step: Callable[[], object],
        weights: Any,
        state: Any,
        gradients: Any,
        kept: Any = None,
    ) -> None:
        self.name, self.step, self._kept = name, step, kept  # what `step` knows by address alone
        self.nbytes = [_nbytes(tensors) for tensors in (weights, state, gradients)]


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


def ours(make: Callable[[Any], Any], numel: int, tensors: int) -> Contender:
    """A split optimizer with bf16 gradients."""
    holder = nn.ParameterList([torch.randn(numel // tensors) for _ in range(tensors)])
    optimizer = make(split_parameters(holder))
    for p in holder:
        p.grad = torch.randn(p.numel()).bfloat16()
    trails = [optimizer.trail(p) for p in holder]
    state = [v for p in holder for k, v in optimizer.state[p].items() if k not in ("trail", "step")]
    return Contender("split", optimizer.step, [*holder, *trails], state, [p.grad for p in holder])


def theirs(make: Callable[..., Any], numel: int, tensors: int, kind: str) -> Contender:
    """torch's, in fp32."""
    params = [nn.Parameter(torch.randn(numel // tensors)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.randn(p.numel())
    optimizer = make(params, **{kind: True})
    optimizer.step()  # its state is made now
    state = [
        v
        for p in params
        for k, v in optimizer.state[p].items()
        if isinstance(v, Tensor) and k != "step"
    ]
    return Contender(f"torch {kind} fp32", optimizer.step, params, state, [p.grad for p in params])


def unfused(numel: int) -> Contender:
    """The four lines of Split SGD in torch operations, one after the other."""
    top, trail = split(torch.randn(numel))
    gradient = torch.randn(numel).bfloat16()

    def step() -> None:
        w = (top.view(torch.int16).to(torch.int32) << 16 | trail.to(torch.int32) & 0xFFFF).view(
            torch.float32
        )
        w.add_(gradient.float(), alpha=-LR)
        bits = w.view(torch.int32)
        top.view(torch.int16).copy_(bits >> 16)
        trail.copy_(bits)

    return Contender("the seed's four lines", step, [top, trail], [], [gradient])


def from_payloads(numel: int) -> list[Contender]:
    """A step from two ternary payloads: decoded first, and straight."""
    codec, slot = TernGrad(scale="own"), Slot(0, numel, numel, True, 0)
    layout = PayloadLayout(codec.form, whole_pieces([slot]), segmented=False)
    payloads = [codec.encode(torch.randn(numel)) for _ in range(2)]
    source = codec.payloads(payloads, torch.bfloat16)
    out = []
    for straight in (False, True):
        holder = nn.ParameterList([torch.randn(numel)])
        optimizer = SplitSGD(split_parameters(holder), lr=LR)
        p, gradient = holder[0], torch.zeros(0 if straight else numel, dtype=torch.bfloat16)

        class Packed:
            parameter_count = 1

            def position(self, parameter: Tensor) -> int:
                return 0

            def check(self, parameter: Tensor) -> None: ...

            def update(self, targets: Any, rules: Any) -> None:
                HOST.update(layout.packed, targets, rules, source)

        def step(
            optimizer: Any = optimizer, gradient: Tensor = gradient, straight: bool = straight
        ) -> None:
            if not straight:
                HOST.sum_decode(source, layout.packed, gradient)
            optimizer.step()

        if straight:
            optimizer.attach_packed(Packed())
            p.grad = torch.full((), float("nan")).bfloat16().expand(numel)
        else:
            p.grad = gradient
        name = "2 payloads, straight" if straight else "2 payloads, decoded first"
        trails = [optimizer.trail(p)]
        out.append(
            Contender(name, step, [p, *trails], [], [] if straight else [gradient], payloads)
        )
    return out


def verify() -> None:
    """Compare three steps of every split optimizer with the reference; SystemExit where one
    differs.
    """
    betas = {"lr": LR, "betas": (0.9, 0.999), "weight_decay": 0.01}
    steps: dict[str, Callable[..., Any]] = {
        "SGD": lambda w, g, m, v, t: (reference.sgd(w, g, m, lr=LR, first=t == 1)[0], m, v),
        "SGD momentum": lambda w, g, m, v, t: (
            *reference.sgd(w, g, m, lr=LR, momentum=0.9, first=t == 1),
            v,
        ),
        "Adagrad": lambda w, g, m, v, t: (
            *reference.adagrad(w, g, m, t, lr=LR, lr_decay=0.0, weight_decay=0.0, eps=1e-10),
            v,
        ),
        "AdamW": lambda w, g, m, v, t: reference.adamw(w, g, m, v, t, eps=1e-8, **betas),  # type: ignore[arg-type]
        "LAMB": lambda w, g, m, v, t: reference.lamb(w, g, m, v, t, eps=1e-6, **betas),  # type: ignore[arg-type]
    }
    for name, make in OURS.items():
        holder = nn.ParameterList([torch.randn(CHECK_NUMEL)])
        w, m, v = (
            holder[0].detach().numpy().copy(),
            np.zeros(CHECK_NUMEL, np.float32),
            np.zeros(CHECK_NUMEL, np.float32),
        )
        optimizer = make(split_parameters(holder))
        for t in (1, 2, 3):
            holder[0].grad = torch.randn(CHECK_NUMEL).bfloat16()
            optimizer.step()
            w, m, v = steps[name](w, holder[0].grad.float().numpy(), m, v, t)
        if optimizer.fp32(holder[0]).numpy().tobytes() != w.tobytes():
            raise SystemExit(f"split {name} differs from the reference")
    top, trail = split(torch.randn(CHECK_NUMEL))
    if join(top, trail).numel() != CHECK_NUMEL:
        raise SystemExit("split and join differ")


def contend(
    name: str, contenders: list[Contender], numel: int, memcpy: Memcpy, repetitions: int
) -> list[Row]:
    """Let contenders step in turn; return their rows, the first one's ratios to each among them."""
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    copies = []
    for repetition in range(repetitions + 1):
        copy = seconds(memcpy)
        for contender in contenders:
            taken = seconds(contender.step)
            if repetition:
                times[contender.name].append(taken)
        if repetition:
            copies.append(copy)
    rows, first = [], times[contenders[0].name]
    for c in contenders:
        memcpys = statistics.median(t / copy for t, copy in zip(times[c.name], copies, strict=True))
        weights, state, gradients = (n / numel for n in c.nbytes)
        ratio = statistics.median(a / b for a, b in zip(first, times[c.name], strict=True))
        ms = 1e3 * statistics.median(times[c.name])
        rows.append(Row(name, c.name, ms, memcpys, weights, state, gradients, ratio))
    return rows


def measure(
    numel: int, count: int, repetitions: int
) -> tuple[list[Row], dict[tuple[str, str], float]]:
    """Measure everything; return rows and the ratios that `LIMITS` names."""
    from rich.progress import Progress

    rows: list[Row] = []
    ratios: dict[tuple[str, str], float] = {}
    memcpy = Memcpy(numel)
    with threads(count), Progress(transient=True) as progress:
        work = progress.add_task("", total=len(TORCHS) + 3)
        for name, make in TORCHS.items():
            progress.update(work, description=name)
            contenders = [
                ours(OURS[name], numel, 1),
                *(theirs(make, numel, 1, k) for k in ("foreach", "fused")),
            ]
            if name == "SGD":
                contenders.append(unfused(numel))
            found = contend(name, contenders, numel, memcpy, repetitions)
            ratios[name, "memcpy"] = found[0].memcpys
            ratios |= {(name, row.contender): row.ratio for row in found[1:]}
            rows += found
            progress.advance(work)
        for tensors in (LAMB_TENSORS, 1):
            name = f"LAMB, {tensors} tensor{'s' * (tensors > 1)}"
            progress.update(work, description=name)
            pair = [ours(OURS["LAMB"], numel, tensors), ours(OURS["AdamW"], numel, tensors)]
            pair[1].name = "split AdamW"
            found = contend(name, pair, numel, memcpy, repetitions)
            ratios[name, "split AdamW"] = found[1].ratio
            rows += found
            progress.advance(work)
        progress.update(work, description="from payloads")
        rows += contend("SGD from payloads", from_payloads(numel), numel, memcpy, repetitions)
        progress.advance(work)
    return rows, ratios


def show(rows: list[Row], numel: int, count: int) -> None:
    """Print the measurements."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{numel:,} weights, {count} thread(s): one step, and bytes a weight")
    for name in ("optimizer", "", "ms", "x memcpy", "weights", "state", "gradient", "sum"):
        table.add_column(name, justify="left" if name in ("optimizer", "") else "right")
    last = ""
    for r in rows:
        parts = (r.weight_bytes, r.state_bytes, r.gradient_bytes)
        table.add_row(
            r.optimizer if r.optimizer != last else "",
            r.contender,
            f"{r.ms:.1f}",
            f"{r.memcpys:.2f}",
            *(f"{b:.1f}" for b in (*parts, sum(parts))),
        )
        last = r.optimizer
    Console().print(table)


def verdicts(rows: list[Row], ratios: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """Judge every requirement."""
    out = []
    for name, beside, limit, aim in LIMITS:
        found = ratios[name, beside]
        what = f"split {name} / {beside}, at most"
        out.append(
            {"what": what, "measured": found, "limit": limit, "aim": aim, "pass": found <= limit}
        )
    memory = next(
        r.weight_bytes + r.state_bytes
        for r in rows
        if r.optimizer == "SGD" and r.contender == "split"
    )
    out.append(
        {
            "what": "bytes a weight, SGD",
            "measured": memory,
            "limit": 4.01,
            "aim": 4,
            "pass": memory <= 4.01,
        }
    )
    return out


def show_verdicts(results: list[dict[str, Any]]) -> None:
    """Print the outcome of every requirement."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Requirements (one thread, 64 Mi weights)")
    for name in ("requirement", "measured", "limit", "aim", ""):
        table.add_column(name, justify="left" if name == "requirement" else "right")
    for v in results:
        mark = "[green]pass[/]" if v["pass"] else "[red]FAIL[/]"
        table.add_row(
            v["what"],
            f"{v['measured']:.2f}",
            f"{v['limit']:g}",
            f"{v['aim']:g}" if v["aim"] else "",
            mark,
        )
    Console().print(table)


def plot(rows: list[Row], path: Path) -> None:
    """Draw milliseconds and bytes of every contender as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [f"{r.optimizer}: {r.contender}" for r in rows]
    colours = [
        "tab:blue" if r.contender == "split" or "straight" in r.contender else "lightgrey"
        for r in rows
    ]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 6), sharey=True, layout="constrained"
    )
    left.bar_label(
        left.barh(names, [r.ms for r in rows], color=colours), fmt="%.1f", padding=3, fontsize=8
    )
    left.set_xlabel("milliseconds a step")
    at = [0.0] * len(rows)
    for part, shade in (
        ("weight_bytes", "tab:blue"),
        ("state_bytes", "tab:cyan"),
        ("gradient_bytes", "lightgrey"),
    ):
        widths = [float(getattr(r, part)) for r in rows]
        right.barh(names, widths, left=at, color=shade, label=part.split("_")[0])
        at = [a + w for a, w in zip(at, widths, strict=True)]
    right.set_xlabel("bytes a weight")
    right.legend()
    left.invert_yaxis()
    figure.savefig(path, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        prog="python -m gradcomp.bench optim",
        description=(
            "Time a step of every split optimizer beside torch's in the same run, and count bytes a"
            " weight."
        ),
        epilog=(
            "--check measures what gradcomp promises: 64 Mi weights, 1 thread, 5 GB of memory.\n\n"
            "example:\n  python -m gradcomp.bench optim --numel 4194304 --threads 2"
        ),
    )
    parser.add_argument(
        "--numel",
        type=int,
        default=1 << 26,
        help="weights of the model (default: 67108864)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="threads of torch and of the kernels (default: %(default)s)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=9,
        help="repetitions of each step, of which the median is shown (default: %(default)s)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="print pass or FAIL of what gradcomp promises; the exit status is 1 when one fails",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the measurements to this file",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the measurements into this file (PNG, SVG or PDF)",
    )
    args = parser.parse_args(argv)
    if args.numel < LAMB_TENSORS or args.threads < 1 or args.repeat < 1:
        parser.error(f"numel must be at least {LAMB_TENSORS}, threads and repetitions at least 1")
    if args.check:
        args.numel, args.threads = 1 << 26, 1
    args.numel -= args.numel % LAMB_TENSORS
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = parse(argv)
    verify()
    rows, ratios = measure(args.numel, args.threads, args.repeat)
    show(rows, args.numel, args.threads)
    results = verdicts(rows, ratios) if args.check else []
    if results:
        show_verdicts(results)
    if args.json:
        found = {
            "numel": args.numel,
            "threads": args.threads,
            "rows": [asdict(r) for r in rows],
            "check": results,
        }
        args.json.write_text(json.dumps(found, indent=2))
    if args.plot:
        plot(rows, args.plot)
    return 0 if all(v["pass"] for v in results) else 1
