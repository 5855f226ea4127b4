"""Time a step of every split optimizer beside torch's in the same run, and count bytes a weight.

Every contender holds its own weights, gradients and state of `numel` elements; split ones bf16
weights, trails and bf16 gradients, torch's fp32. In each repetition all of one optimizer's
contenders take a step in turn; medians and medians of the repetitions' ratios are shown. Memory is
what weights, state and gradients occupy, in bytes a weight. Three steps of every split optimizer
are compared with the portable tier's before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from gradcomp.arguments import count
from gradcomp.bench import timing
from gradcomp.bench.about import table
from gradcomp.bench.options import command_line
from gradcomp.bench.timing import MEMCPY_NBYTES, Verdict, memcpy_of, turns, using
from gradcomp.codecs import RngKey, TernGrad
from gradcomp.kernels import CPU, Payloads, native, of
from gradcomp.optim import SplitAdagrad, SplitAdamW, SplitLAMB, SplitSGD, split, split_parameters
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

Row = dict[str, Any]  # result of one contender, as in the JSON file
PARTS = "weight_bytes", "state_bytes", "gradient_bytes"
LR, CHECK_NUMEL = 0.01, 70_001
LAMB_TENSORS = 64  # LAMB reads each tensor twice, so its time may depend on the tensors' size

OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, float]]] = {  # split, torch's, their options
    "SGD": (SplitSGD, torch.optim.SGD, {"lr": LR}),
    "SGD momentum": (SplitSGD, torch.optim.SGD, {"lr": LR, "momentum": 0.9}),
    "Adagrad": (SplitAdagrad, torch.optim.Adagrad, {"lr": LR}),
    "AdamW": (SplitAdamW, torch.optim.AdamW, {"lr": LR}),
    "LAMB": (SplitLAMB, None, {"lr": LR}),
}
# (optimizer, compared with, bytes per weight that each reads and writes). A split optimizer reads
# and writes weights and trails and reads bf16 gradients: 10 bytes, and 8 for every fp32 state.
# torch's fused kernels move 12 and 8; its foreach kernels pass over memory once for each operation.
# LAMB needs the norm of its update first, so it reads weights and both moments once more.
# --check: the ratio of the times may be at most MARGIN times the ratio of the bytes.
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
SGD_NBYTES = 4.01  # most bytes per weight: trails start up to 4 KB into their memory


@dataclass
class Contender:
    """Optimizer step to time, and the tensors that it uses."""

    name: str
    step: Callable[[], object]
    weights: Sequence[Tensor]
    state: Sequence[Tensor]
    gradients: Sequence[Tensor]


def contender(name: str, optimizer: Any) -> Contender:
    """Return an optimizer as a contender; it must have created its state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [item for p in parameters for item in optimizer.state[p].items()]
    trails = [value for name, value in kept if name == "trail"]
    state = [v for k, v in kept if k not in ("trail", "step") and isinstance(v, Tensor)]
    gradients = [p.grad for p in parameters]
    return Contender(name, optimizer.step, [*parameters, *trails], state, gradients)


def split_optimizer(name: str, weights: Sequence[Tensor]) -> tuple[nn.ParameterList, Any]:
    """Return split parameters with the values of these fp32 weights, and their optimizer."""
    kind, _, options = OPTIMIZERS[name]
    holder = nn.ParameterList(weights)
    return holder, kind(split_parameters(holder), **options)


def ours(name: str, numel: int, tensors: int = 1, label: str = "split") -> Contender:
    """Return a split optimizer with bf16 gradients as a contender."""
    weights = [torch.randn(numel // tensors) for _ in range(tensors)]
    holder, optimizer = split_optimizer(name, weights)
    for p in holder:
        p.grad = torch.randn(p.numel()).bfloat16()
    return contender(label, optimizer)


def theirs(name: str, numel: int, kind: str) -> Contender:
    """Return torch's fp32 optimizer as a contender; `kind` is "foreach" or "fused"."""
    _, make, options = OPTIMIZERS[name]
    p = nn.Parameter(torch.randn(numel))
    p.grad = torch.randn(numel)
    optimizer = make([p], **options, **{kind: True})
    optimizer.step()  # creates the state
    return contender(f"torch {kind} fp32", optimizer)


def unfused(numel: int) -> Contender:
    """Return Split SGD in torch operations, one after the other, as a contender."""
    top, trail = split(torch.randn(numel))
    gradient = torch.randn(numel).bfloat16()

    def step() -> None:
        bits = top.view(torch.int16).to(torch.int32) << 16 | trail.to(torch.int32) & 0xFFFF
        bits.view(torch.float32).add_(gradient.float(), alpha=-LR)
        top.view(torch.int16).copy_(bits >> 16)
        trail.copy_(bits)

    return Contender("the seed's four lines", step, [top, trail], [], [gradient])


def from_payloads(numel: int) -> list[Contender]:
    """Return two updates from two ternary payloads: decoded first, and fused."""
    codec, slot = TernGrad(scale="own"), Slot(0, numel, numel, True, 0)
    packed = PayloadLayout(codec.form, whole_pieces([slot]), segmented=False).packed
    payloads = [codec.encode(torch.randn(numel), key=RngKey(rank=rank)) for rank in range(2)]
    source, plain = Payloads(payloads, codec.code, torch.bfloat16), ours("SGD", numel)

    def decode_and_step() -> None:
        of(CPU).sum_decode(source, packed, plain.gradients[0])
        plain.step()

    holder, optimizer = split_optimizer("SGD", [torch.randn(numel)])
    holder[0].grad = torch.full((), float("nan")).bfloat16().expand(numel)
    gradients: Any = SimpleNamespace(
        parameter_count=1,
        position=lambda parameter: 0,
        check=lambda parameter: None,
        update=lambda targets, rules: of(CPU).update(packed, targets, rules, source),
    )
    optimizer.attach_packed(gradients)
    decoded = replace(plain, name="2 payloads, decoded first", step=decode_and_step)
    return [decoded, contender("2 payloads, straight", optimizer)]


def verify() -> None:
    """Exit if three steps of a split optimizer differ from those of the portable tier."""
    for name in OPTIMIZERS:
        start, found = torch.randn(CHECK_NUMEL), []
        gradients = [torch.randn(CHECK_NUMEL).bfloat16() for _ in range(3)]
        for tier in (native.tier(), native.tiers()[0]):
            with using(tier):
                holder, optimizer = split_optimizer(name, [start.clone()])
                for gradient in gradients:
                    holder[0].grad = gradient
                    optimizer.step()
                found.append(optimizer.fp32(holder[0]).view(torch.int32))
        if not torch.equal(*found):
            raise SystemExit(f"split {name} differs from the portable tier")


def contests(numel: int) -> Iterator[tuple[str, list[Contender]]]:
    """Yield each optimizer's name and contenders."""
    for name, (_, torchs, _) in OPTIMIZERS.items():
        if torchs is not None:
            others = [theirs(name, numel, kind) for kind in ("foreach", "fused")]
            yield name, [ours(name, numel), *others, *([unfused(numel)] if name == "SGD" else [])]
    for tensors in (LAMB_TENSORS, 1):
        name = f"LAMB, {tensors} tensor{'s' * (tensors > 1)}"
        yield name, [ours("LAMB", numel, tensors), ours("AdamW", numel, tensors, "split AdamW")]
    yield "SGD from payloads", from_payloads(numel)


def measure(numel: int, threads: int, repetitions: int) -> list[Row]:
    """Time each optimizer's contenders in turn, after one step of each as warm-up.

    Return a row for each contender: bytes per weight, and medians of milliseconds per step, of the
    time in memcpys of the fp32 weights, and of the first contender's time over its own.
    """
    rows, memcpy = [], memcpy_of(numel)
    work = track(contests(numel), "optimizers", total=len(OPTIMIZERS) + 2, transient=True)
    with using(native.tier(), threads):
        for name, contenders in work:
            taken = turns([memcpy, *(c.step for c in contenders)], repetitions)
            ms = 1e3 * np.median(taken, axis=0)
            memcpys, ratios = np.median(taken / taken[:, :1], axis=0), taken[:, 1:2] / taken
            for number, c in enumerate(contenders, 1):
                row: Row = {"optimizer": name, "contender": c.name, "ms": float(ms[number])}
                row["memcpys"] = float(memcpys[number])
                for part, tensors in zip(PARTS, (c.weights, c.state, c.gradients), strict=True):
                    row[part] = sum(t.untyped_storage().nbytes() for t in tensors) / numel
                row["ratio"] = float(np.median(ratios[:, number]))
                rows.append(row)
            del c, contenders[:]  # the next ones need the memory
    return rows


def verdicts(rows: list[Row]) -> list[Verdict]:
    """Return the verdict on every requirement."""
    found = {(row["optimizer"], row["contender"]): row for row in rows}
    out = []
    for name, beside, moved, other in MOVES:
        split = found[name, "split"]
        ratio = split["memcpys"] if beside == "memcpy" else found[name, beside]["ratio"]
        out.append(Verdict(f"split {name} / {beside}", ratio, MARGIN * moved / other))
    memory = found["SGD", "split"]["weight_bytes"] + found["SGD", "split"]["state_bytes"]
    return [*out, Verdict("bytes a weight, SGD", memory, SGD_NBYTES)]


def read_options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    options = {
        "numel": (1 << 26, "", "weights of the model", count),
        "threads": (1, "", "threads of torch and of the kernels", count),
    }
    epilog = """--check takes 64 Mi weights, 1 thread and 5 GB of memory.

example:
  python -m gradcomp.bench optim --numel 4194304 --threads 2
"""
    parser = command_line("optim", __doc__, epilog, options, timing.OPTIONS)
    args = parser.parse_args(argv)
    if args.numel < LAMB_TENSORS:
        parser.error(f"--numel must be at least {LAMB_TENSORS}, got {args.numel}")
    if args.check:
        args.numel, args.threads = 1 << 26, 1
    args.numel -= args.numel % LAMB_TENSORS
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; return the exit status."""
    args = read_options(argv)
    verify()
    rows = measure(args.numel, args.threads, args.repeat)
    texts: list[tuple[str, ...]] = []
    for row in rows:
        parts = [row[part] for part in PARTS]
        name = "" if any(row["optimizer"] == text[0] for text in texts) else row["optimizer"]
        nbytes = [f"{part:.1f}" for part in (*parts, sum(parts))]
        texts.append((name, row["contender"], f"{row['ms']:.1f}", f"{row['memcpys']:.2f}", *nbytes))
    heads = ["optimizer", "", "ms", "x memcpy", "weights", "state", "gradient", "sum"]
    title = f"{args.numel:,} weights, {args.threads} thread(s): one step, and bytes a weight"
    Console().print(table(heads, texts, left=2, title=title))
    judged = verdicts(rows) if args.check else []
    return timing.finish(args, judged, numel=args.numel, threads=args.threads, rows=rows)
