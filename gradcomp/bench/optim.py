"""python -m gradcomp.bench optim: seconds a step and bytes a weight of the split optimizers, beside
torch's in one run.

Every contender holds its own weights, gradients and state of `numel` elements; split ones bf16
weights, trails and bf16 gradients, torch's fp32. In each repetition all of one optimizer's
contenders take a step in turn; medians and medians of the repetitions' ratios are shown. Memory is
what weights, state and gradients occupy, in bytes a weight. Three steps of every split optimizer
are compared with the portable tier's before it is timed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp import RngKey
from gradcomp.arguments import Parser
from gradcomp.bench import timing
from gradcomp.bench.timing import MEMCPY_NBYTES, Verdict, memcpy_of, seconds, using
from gradcomp.codecs import TernGrad
from gradcomp.kernels import HOST, native
from gradcomp.optim import SplitAdagrad, SplitAdamW, SplitLAMB, SplitSGD, split, split_parameters
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

LR, CHECK_NUMEL = 0.01, 70_001
LAMB_TENSORS = 64  # LAMB goes through each tensor twice, so the size of the tensors may matter

OURS: dict[str, Callable[[Any], Any]] = {
    "SGD": partial(SplitSGD, lr=LR),
    "SGD momentum": partial(SplitSGD, lr=LR, momentum=0.9),
    "Adagrad": partial(SplitAdagrad, lr=LR),
    "AdamW": partial(SplitAdamW, lr=LR),
    "LAMB": partial(SplitLAMB, lr=LR),
}
TORCHS: dict[str, Callable[..., Any]] = {
    "SGD": partial(torch.optim.SGD, lr=LR),
    "SGD momentum": partial(torch.optim.SGD, lr=LR, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=LR),
    "AdamW": partial(torch.optim.AdamW, lr=LR),
}
# (optimizer, beside what, bytes a weight that each reads and writes). Split weights and trails are
# read and written, bf16 gradients read: 10 bytes, and 8 for every fp32 state. torch's fused kernels
# take 12 and 8; its foreach ones go through memory once for every operation. LAMB needs the norm
# of its update before it can update: it reads weights and both moments once more.
# --check: the ratio of the times may be MARGIN times the ratio of the bytes.
MARGIN = 1.5
MOVES = [
    ("SGD", "torch foreach fp32", 10, 12),
    ("SGD", "memcpy", 10, MEMCPY_NBYTES),
    ("SGD momentum", "torch foreach fp32", 18, 32),
    ("Adagrad", "torch fused fp32", 18, 20),
    ("AdamW", "torch fused fp32", 26, 28),
    (f"LAMB, {LAMB_TENSORS} tensors", "split AdamW", 38, 26),
    ("LAMB, 1 tensor", "split AdamW", 38, 26),
]
SGD_NBYTES = 4.01  # at most this memory a weight: trails begin up to 4 KB into theirs


@dataclass
class Row:
    """One contender: medians of milliseconds a step and of memcpys of the fp32 weights, and bytes a
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


@dataclass
class Contender:
    """Something that takes steps, and the tensors that it needs."""

    name: str
    step: Callable[[], object]
    weights: Sequence[Tensor]
    state: Sequence[Tensor]
    gradients: Sequence[Tensor]

    def nbytes(self, numel: int) -> tuple[float, float, float]:
        """Return the bytes a weight of weights, state and gradients."""

        def of(tensors: Sequence[Tensor]) -> float:
            return sum(t.untyped_storage().nbytes() for t in tensors) / numel

        return of(self.weights), of(self.state), of(self.gradients)


def state_of(optimizer: Any, params: Any) -> list[Tensor]:
    """Return the tensors of an optimizer's state that are as large as the weights."""
    items = [item for p in params for item in optimizer.state[p].items()]
    return [v for k, v in items if k not in ("trail", "step") and isinstance(v, Tensor)]


def ours(name: str, numel: int, tensors: int = 1) -> Contender:
    """Return a split optimizer with bf16 gradients."""
    holder = nn.ParameterList([torch.randn(numel // tensors) for _ in range(tensors)])
    optimizer = OURS[name](split_parameters(holder))
    for p in holder:
        p.grad = torch.randn(p.numel()).bfloat16()
    weights = [*holder, *(optimizer.trail(p) for p in holder)]
    state, gradients = state_of(optimizer, holder), [p.grad for p in holder]
    return Contender("split", optimizer.step, weights, state, gradients)


def theirs(name: str, numel: int, kind: str) -> Contender:
    """Return torch's, in fp32."""
    p = nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel)
    optimizer = TORCHS[name]([p], **{kind: True})
    optimizer.step()  # its state is made now
    step, state = optimizer.step, state_of(optimizer, [p])
    return Contender(f"torch {kind} fp32", step, [p], state, [p.grad])


def unfused(numel: int) -> Contender:
    """Return the four lines of Split SGD in torch operations, one after the other."""
    top, trail = split(torch.randn(numel))
    gradient = torch.randn(numel).bfloat16()

    def step() -> None:
        bits = top.view(torch.int16).to(torch.int32) << 16 | trail.to(torch.int32) & 0xFFFF
        bits.view(torch.float32).add_(gradient.float(), alpha=-LR)
        top.view(torch.int16).copy_(bits >> 16)
        trail.copy_(bits)

    return Contender("the seed's four lines", step, [top, trail], [], [gradient])


def from_payloads(numel: int) -> list[Contender]:
    """Return a step from two ternary payloads: decoded first, and straight."""
    codec, slot = TernGrad(scale="own"), Slot(0, numel, numel, True, 0)
    packed = PayloadLayout(codec.form, whole_pieces([slot]), segmented=False).packed
    payloads = [codec.encode(torch.randn(numel), key=RngKey(rank=rank)) for rank in range(2)]
    source, plain = codec.payloads(payloads, torch.bfloat16), ours("SGD", numel)

    def decode_and_step() -> None:
        HOST.sum_decode(source, packed, plain.gradients[0])
        plain.step()

    holder = nn.ParameterList([torch.randn(numel)])
    optimizer = SplitSGD(split_parameters(holder), lr=LR)
    holder[0].grad = torch.full((), float("nan")).bfloat16().expand(numel)
    gradients: Any = SimpleNamespace(
        parameter_count=1,
        position=lambda parameter: 0,
        check=lambda parameter: None,
        update=lambda targets, rules: HOST.update(packed, targets, rules, source),
    )
    optimizer.attach_packed(gradients)
    weights = [holder[0], optimizer.trail(holder[0])]
    return [
        replace(plain, name="2 payloads, decoded first", step=decode_and_step),
        Contender("2 payloads, straight", optimizer.step, weights, [], []),
    ]


def verify() -> None:
    """Compare three steps of every split optimizer with the portable tier's.

    Raises:
        SystemExit: an optimizer's weights differ.
    """
    for name, make in OURS.items():
        start, found = torch.randn(CHECK_NUMEL), []
        gradients = [torch.randn(CHECK_NUMEL).bfloat16() for _ in range(3)]
        for kernels in (native.tier(), native.tiers()[0]):
            holder = nn.ParameterList([start.clone()])
            with using(kernels):
                optimizer = make(split_parameters(holder))
                for gradient in gradients:
                    holder[0].grad = gradient
                    optimizer.step()
                found.append(optimizer.fp32(holder[0]).view(torch.int32))
        if not torch.equal(*found):
            raise SystemExit(f"split {name} differs from the portable tier")


def contests(numel: int) -> Iterator[tuple[str, list[Contender]]]:
    """Yield each optimizer's contenders."""
    for name in TORCHS:
        torchs = [theirs(name, numel, kind) for kind in ("foreach", "fused")]
        yield name, [ours(name, numel), *torchs, *([unfused(numel)] if name == "SGD" else [])]
    for count in (LAMB_TENSORS, 1):
        adamw = replace(ours("AdamW", numel, count), name="split AdamW")
        name = f"LAMB, {count} tensor{'s' * (count > 1)}"
        yield name, [ours("LAMB", numel, count), adamw]
    yield "SGD from payloads", from_payloads(numel)


def measure(numel: int, threads: int, repetitions: int) -> list[Row]:
    """Let the contenders of each optimizer step in turn, after one step of each to warm up."""
    from rich.progress import track

    rows, memcpy = [], memcpy_of(numel)
    work = track(contests(numel), "optimizers", total=len(TORCHS) + 3, transient=True)
    with using(native.tier(), threads):
        for name, contenders in work:
            steps = [memcpy, *(c.step for c in contenders)]
            turns = [[seconds(step) for step in steps] for _ in range(repetitions + 1)][1:]
            for number, c in enumerate(contenders, 1):
                ms = 1e3 * statistics.median(turn[number] for turn in turns)
                memcpys = statistics.median(turn[number] / turn[0] for turn in turns)
                ratio = statistics.median(turn[1] / turn[number] for turn in turns)
                rows.append(Row(name, c.name, ms, memcpys, *c.nbytes(numel), ratio=ratio))
            del c, steps, contenders[:]  # the next ones need the memory
    return rows


def show(rows: list[Row], numel: int, count: int) -> None:
    """Print the measurements."""
    texts: list[tuple[str, ...]] = []
    for r in rows:
        parts = (r.weight_bytes, r.state_bytes, r.gradient_bytes)
        name = "" if any(r.optimizer == text[0] for text in texts) else r.optimizer
        nbytes = [f"{part:.1f}" for part in (*parts, sum(parts))]
        texts.append((name, r.contender, f"{r.ms:.1f}", f"{r.memcpys:.2f}", *nbytes))
    columns = ["ms", "x memcpy", "weights", "state", "gradient", "sum"]
    title = f"{numel:,} weights, {count} thread(s): one step, and bytes a weight"
    timing.table(title, ["optimizer", ""], columns, texts)


def verdicts(rows: list[Row]) -> list[Verdict]:
    """Judge every requirement."""
    found = {(r.optimizer, r.contender): r for r in rows}
    out = []
    for name, beside, moved, other in MOVES:
        split = found[name, "split"]
        ratio = split.memcpys if beside == "memcpy" else found[name, beside].ratio
        out.append(Verdict(f"split {name} / {beside}", ratio, MARGIN * moved / other))
    memory = found["SGD", "split"].weight_bytes + found["SGD", "split"].state_bytes
    return [*out, Verdict("bytes a weight, SGD", memory, SGD_NBYTES)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = Parser(
        prog="python -m gradcomp.bench optim",
        description=(
            "Time a step of every split optimizer beside torch's in the same run, and count bytes a"
            " weight."
        ),
        epilog=(
            "--check takes 64 Mi weights, 1 thread and 5 GB of memory.\n\n"
            "example:\n  python -m gradcomp.bench optim --numel 4194304 --threads 2"
        ),
    )
    text = "weights of the model (default: %(default)s)"
    parser.add_argument("--numel", type=int, default=1 << 26, help=text)
    text = "threads of torch and of the kernels (default: %(default)s)"
    parser.add_argument("--threads", type=int, default=1, help=text)
    timing.add_options(parser)
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
    rows = measure(args.numel, args.threads, args.repeat)
    show(rows, args.numel, args.threads)
    if args.plot:
        from gradcomp.bench import plots

        named = {f"{r.optimizer}: {r.contender}": r for r in rows}
        ms = {name: {"one step": r.ms} for name, r in named.items()}
        nbytes = {
            name: {part: getattr(r, f"{part}_bytes") for part in ("weight", "state", "gradient")}
            for name, r in named.items()
        }

        def draw(figure: Any) -> None:
            left, right = figure.subplots(1, 2)
            plots.bars(left, ms, xlabel="milliseconds")
            plots.bars(right, nbytes, xlabel="bytes a weight", yticklabels=[])

        plots.write(args.plot, [(f"{args.numel:,} weights", draw, 0.3 * len(named) + 1)])
    found = {"numel": args.numel, "threads": args.threads, "rows": [asdict(r) for r in rows]}
    return timing.finish(args, found, verdicts(rows) if args.check else [])
