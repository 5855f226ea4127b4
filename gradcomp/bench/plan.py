"""python -m gradcomp.plan: does compression pay, on how many nodes, for one's own model, network and machine.

Nothing is sent and nothing is trained unless --measure or --validate is given: seconds are those of
`gradcomp.plan.simulate`, bytes those of the exchange's own sizing, CPU seconds of the codecs are measured here in a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from gradcomp.arguments import Parser, suggestion
from gradcomp.bench.cluster import measure_here
from gradcomp.bench.cluster_validate import GOAL, describe
from gradcomp.bench.cluster_validate import validate as compare
from gradcomp.bench.plan_question import Question, parse_stragglers
from gradcomp.bench.plan_report import plot, print_prediction, to_dict
from gradcomp.bench.ranks import RANK_ERRORS
from gradcomp.plan.accuracy import TOLERANCES
from gradcomp.plan.costs import METHODS, LocalSteps, Method
from gradcomp.plan.links import Node, parse_link, parse_seconds
from gradcomp.plan.models import find_model, load_shapes
from gradcomp.plan.predict import Prediction, predict, to_calibrate, ways
from gradcomp.plan.rates import OUTER, Rates, calibrate
from gradcomp.plan.simulate import MAX_NODES
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.workload import ALONE, Stragglers, Workload

BACKWARD_AND_FORWARD = 3  # forwards that a forward and a backward cost
FLOPS = 10e12
CORES = 2.0
REPEATS = 3  # measurements of the codecs
UPDATE_S = 2e-10  # a value: five passes over fp32 memory (SGD with momentum) at 100 GB/s

DESCRIPTION = """\
Seconds of a training step over node counts for fp32, bf16, ternary and 1-bit gradients, and whether to compress.

Times are written like 0.1ms or 50us, rates like 100mbit or 10gbit; named links have a latency of their own
(wan, 1gbe, 10gbe, 25gbe, 100gbe, infiniband).
"""
EXAMPLES = """\
examples:
  VGG-16 on machines that compute 10 TFLOP/s, 1 Gbit/s Ethernet:
    python -m gradcomp.plan --model vgg16 --link 1gbit --latency 0.1ms --nodes 1:64

  the same with a measured 12 ms a sample and 30 ms an update (time your own training step on one node for these):
    python -m gradcomp.plan --model vgg16 --link 1gbe --nodes 1:64 --frame-time 12ms --update-time 30ms

  one's own model, from [[name, [dimensions]], ...]; a tenth of the nodes twice as slow, 5 % of jitter:
    python -m gradcomp.plan --shapes shapes.json --link 10gbe --nodes 2,4,8 --jitter 0.05 --stragglers 0.1:2

  only 1-bit against fp32, exchanged in halves as Seide et al. did, with a picture:
    python -m gradcomp.plan --model bert --link 10gbe --nodes 1:256 --codec fp32,onebit --double-buffering --plot plan.png

  recommended is only what keeps within 0.02 nats of fp32 under AdamW, as far as that was measured:
    python -m gradcomp.plan --model gpt2 --link 1gbe --nodes 1:16 --optimizer adamw

  nodes of 8 ranks that share a link of 25 Gbit/s: is averaging inside nodes first worth it?
    python -m gradcomp.plan --model bert --link 25gbe --nodes 1:16 --ranks-per-node 8 --inside 100gbit

  machines in different buildings: 30 steps on one's own, then an exchange that may be 5 steps late
    python -m gradcomp.plan --model gpt2 --link 100mbit --latency 10ms --nodes 2:8 --codec fp32,terngrad --every 30 --delay 5

  what this machine can do, with 2 ranks that measure at once; and how far predictions are off:
    python -m gradcomp.plan --measure --ranks 2
    python -m gradcomp.plan --validate
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the planner."""
    parser = Parser(
        prog="python -m gradcomp.plan",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model", metavar="NAME", help="LeNet, ResNet-50, VGG-16, BERT-base, GPT-2 small (default: resnet50)"
    )
    what.add_argument("--shapes", type=Path, metavar="FILE.json", help="one's own model: [[name, [dimensions]], ...]")
    what.add_argument("--minibatch", type=float, metavar="N", help="samples a step, all nodes (default: 256)")
    what.add_argument("--weak", action="store_true", help="--minibatch is each rank's (weak scaling)")
    what.add_argument("--frame-time", metavar="TIME", help="forward and backward of a sample on one rank")
    what.add_argument("--flops", type=float, metavar="F", help="instead: FLOP/s that a rank sustains (default: 1e13)")
    what.add_argument("--update-time", metavar="TIME", help="of a model update (default: 0.2 ns a value)")
    what.add_argument(
        "--post-time", metavar="TIME", help="of work on gradients that nodes share, such as AdaGrad (default: 0)"
    )
    what.add_argument(
        "--optimizer",
        metavar="NAME",
        help="adamw, sgd, lamb, ...: leave out codecs that were measured to lose accuracy under it, or were not measured "
        "(default: seconds alone decide, losses are shown)",
    )
    what.add_argument(
        "--by-seconds",
        action="store_true",
        help="without --optimizer, recommend the fastest codec, whatever accuracy it loses (--codec does the same for the "
        "codecs it names); by default only what is safe for every optimizer is recommended",
    )
    what.add_argument(
        "--tolerance", type=float, metavar="NATS", help=f"the most that may be lost (default: {TOLERANCES['nats']})"
    )
    what.add_argument(
        "--tolerance-points",
        type=float,
        metavar="POINTS",
        help=f"where test accuracy was measured, as under SGD (default: {TOLERANCES['points']})",
    )
    what.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="DDP's option (default: DDP's, 1 and then 25)")
    where = parser.add_argument_group("where")
    where.add_argument("--link", metavar="RATE", help="of every node, or a name (default: 1gbe)")
    where.add_argument("--latency", metavar="TIME", help="of a message (default: a named link's, else 0)")
    where.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="L", help="that share a node's link; then hierarchical exchanges are in the table (1)"
    )
    where.add_argument("--inside", metavar="RATE", help="of a rank to others of its node (default: takes no time)")
    where.add_argument("--nodes", metavar="A:B", help="doubling from A to B (default: 1:64); A:B:STEP; or a list 2,4,6")
    where.add_argument("--cores", type=float, help="of a rank; below 2 codecs share backward's (default: 2, or measured)")
    where.add_argument(
        "--jitter", type=float, default=0.0, metavar="SIGMA", help="of a node's computing time, lognormal"
    )
    where.add_argument("--stragglers", metavar="SHARE:FACTOR", help="0.1:2: a tenth of the nodes takes twice as long")
    where.add_argument("--seed", type=int, default=0, help="of the jitter (default: 0)")
    how = parser.add_argument_group("how gradients are exchanged")
    how.add_argument("--codec", metavar="A,B", help=f"of {', '.join(dict.fromkeys(m.name.split()[0] for m in METHODS))} (default: all)")
    how.add_argument("--every", type=int, metavar="H", help="also after H steps on one's own (gradcomp.DiLoCo); a step is then an H-th of both")
    how.add_argument("--fragments", type=int, default=1, metavar="K", help="with --every: parts of the model that take turns (1)")
    how.add_argument("--delay", type=int, default=0, metavar="D", help="with --every: steps that go on while a part is exchanged (0)")
    how.add_argument("--exchange", metavar="A,B", help="of all_reduce, all_gather, reduce_scatter, hierarchical (default: all)")
    how.add_argument(
        "--double-buffering", action="store_true", help="exchange half a minibatch while computing the other"
    )
    how.add_argument(
        "--rates", type=Path, metavar="FILE", help="CPU seconds of codecs, from --json; default: measured here"
    )
    out = parser.add_argument_group("what is written")
    out.add_argument("--json", type=Path, metavar="FILE", help="every number")
    out.add_argument("--plot", type=Path, metavar="FILE", help="seconds a step over nodes (PNG, SVG or PDF)")
    cluster = parser.add_argument_group("on the cluster at hand")
    cluster.add_argument(
        "--measure", action="store_true", help="take times, codec rates and links from the ranks at hand"
    )
    cluster.add_argument(
        "--adagrad", action="store_true", help="with --measure: owners apply AdaGrad, its measured time is --post-time"
    )
    cluster.add_argument("--validate", action="store_true", help="compare predicted with measured steps, here")
    cluster.add_argument("--ranks", type=int, metavar="N", help="start N ranks on this machine for --measure")
    return parser


def understand(args: argparse.Namespace) -> Question:
    """Return what the command line asks.

    Raises:
        ValueError, OSError: what is wrong with it, in one sentence.
    """
    if args.model is not None and args.shapes is not None:
        raise ValueError("--model and --shapes exclude each other")
    if args.frame_time is not None and args.flops is not None:
        raise ValueError("--frame-time and --flops exclude each other")
    model = (
        load_shapes(args.shapes)
        if args.shapes is not None
        else find_model(args.model or ("lenet" if args.measure else "resnet50"))
    )
    flops = FLOPS if args.flops is None else args.flops
    if not 0 < flops < math.inf:
        raise ValueError(f"--flops must be positive and finite, got {flops!r}")
    t_frame = parse_seconds(args.frame_time) if args.frame_time else BACKWARD_AND_FORWARD * model.forward_flops / flops
    workload = Workload(
        model.parameters,
        256 if args.minibatch is None else args.minibatch,
        t_frame,
        t_update=parse_seconds(args.update_time) if args.update_time else UPDATE_S * model.numel,
        t_post=parse_seconds(args.post_time or "0"),
        flops=model.flops,
        bucket_cap_mb=args.bucket_cap_mb,
        weak=args.weak,
    )
    rates = None if args.rates is None else Rates.load(args.rates)
    if rates is not None and args.every is not None and OUTER not in rates.stages:
        raise ValueError(f"--rates {args.rates} says nothing of {OUTER!r}, as files from before --every: leave it out, and they are measured here")
    cores = CORES if args.cores is None else args.cores
    if not 0 < cores < math.inf:
        raise ValueError(f"--cores must be positive and finite, got {cores!r}")
    share, factor = parse_stragglers(args.stragglers)
    limits = {"nats": args.tolerance, "points": args.tolerance_points}
    for option, limit in (("--tolerance", args.tolerance), ("--tolerance-points", args.tolerance_points)):
        if limit is not None and args.optimizer is None:
            raise ValueError(f"{option} goes with --optimizer, got {limit!r} without one")
    if args.inside is not None and args.ranks_per_node == 1:
        raise ValueError("--inside goes with --ranks-per-node of at least 2")
    node = Node(args.ranks_per_node, parse_link(args.inside or "inf"))
    return Question(
        model,
        workload,
        parse_link(args.link or ("inf" if args.measure else "1gbe"), args.latency),
        parse_nodes(args.nodes or "1:64"),
        _with_local(args, choose_methods(args.codec, args.exchange, node)),
        Stragglers(args.jitter, share, factor, args.seed),
        rates,
        cores,
        args.double_buffering,
        tolerance=Tolerance(args.optimizer, {unit: limit for unit, limit in limits.items() if limit is not None}),
        node=node,
        by_seconds=args.by_seconds or args.codec is not None,
    )


def parse_nodes(text: str) -> list[int]:
    """Return the node counts of "1:64" (doubling, the end included), "2:10:2" or "2,4,6".

    Raises:
        ValueError: not understood, or a count outside 1 to 4096.
    """
    try:
        if ":" in text:
            first, last, *step = (int(part) for part in text.split(":"))
            if len(step) > 1 or (step and step[0] < 1) or not 1 <= first <= last <= MAX_NODES:
                raise ValueError
            if step:
                return [*range(first, last + 1, step[0])]
            return sorted({last, *(first << k for k in range(13) if first << k <= last)})
        found = sorted({int(part) for part in text.split(",")})
        if not 1 <= found[0] <= found[-1] <= MAX_NODES:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--nodes {text!r} is not understood; 1:64 (doubling), 2:10:2 (steps of 2) and 2,4,6 are, from 1 to {MAX_NODES}"
        ) from None
    return found


def choose_methods(codecs: str | None, exchanges: str | None, node: Node = ALONE) -> list[Method]:
    """Return the methods of some codecs and exchanges on such nodes.

    Raises:
        ValueError: an unknown name, or nothing left.
    """
    all_of_them = ways(node)
    known = [dict.fromkeys(m.name.split()[0] for m in all_of_them), dict.fromkeys(m.exchange for m in all_of_them)]
    wanted = [list(k) if text is None else text.split(",") for text, k in zip((codecs, exchanges), known, strict=True)]
    for option, names, some in zip(("--codec", "--exchange"), wanted, known, strict=True):
        for name in names:
            if name == "hierarchical" and name not in some:
                raise ValueError("--exchange hierarchical needs --ranks-per-node of at least 2")
            if name not in some:
                raise ValueError(f"{option} {name!r} is unknown; there are {', '.join(some)}{suggestion(name, some)}")
    found = [m for m in all_of_them if m.name.split()[0] in wanted[0] and m.exchange in wanted[1]]
    if not found:
        raise ValueError(f"no method has both --codec {codecs} and --exchange {exchanges}")
    return found


def _with_local(args: argparse.Namespace, chosen: list[Method]) -> list[Method]:
    """Return the methods, and the same after local steps if these are asked for; those of bf16 are fp32's."""
    if args.every is None:
        if args.fragments != 1 or args.delay:
            raise ValueError("--fragments and --delay go with --every")
        return chosen
    if args.double_buffering:
        raise ValueError("--every and --double-buffering exclude each other: with local steps no halves are exchanged")
    local = LocalSteps(args.every, args.fragments, args.delay)
    return [*chosen, *{one.name: one for one in (method.after(local) for method in chosen)}.values()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.question = understand(args)
        if args.ranks is not None and (args.ranks < 2 or not args.measure):
            raise ValueError(f"--ranks must be at least 2 and goes with --measure, got {args.ranks}")
        if args.measure and args.validate:
            raise ValueError("--measure and --validate exclude each other")
        if args.measure and args.flops is not None:
            raise ValueError("--measure takes forward and backward's time; to replace it give --frame-time, not --flops")
        if args.adagrad and not args.measure:
            raise ValueError("--adagrad needs --measure; without it give AdaGrad's time as --post-time")
    except (ValueError, OverflowError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    return args


def main(argv: list[str]) -> int:
    """Run the planner; return 0, or 2 for a command line that cannot be understood."""
    args = parse(argv)
    console = Console()
    if args.validate:
        return validate(args, console)
    if args.measure:
        try:
            args.question = measured(args, console)
        except (ValueError, *RANK_ERRORS) as error:
            print(f"python -m gradcomp.plan: {error}", file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        if args.question is None:
            return 0
    try:
        return report(args, answer(args.question), console)
    except (ValueError, OverflowError, OSError) as error:
        print(f"python -m gradcomp.plan: {error}", file=sys.stderr)
        return 2


def measured(args: argparse.Namespace, console: Console) -> Question | None:
    """Measure the ranks at hand; return the question with what was found, on rank 0.

    Raises:
        ValueError: no ranks at hand.
        torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException: a rank did not end well.
    """
    found = measure_here(args.ranks)
    if args.ranks is None and os.environ.get("RANK", "0") != "0":
        return None
    for line in describe(found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    question: Question = args.question
    minibatch = found.batch if args.weak and args.minibatch is None else args.minibatch
    workload = found.workload(question.model, minibatch=minibatch, adagrad=args.adagrad)
    given = {"t_frame": args.frame_time, "t_update": args.update_time, "t_post": args.post_time}
    times: dict[str, Any] = {name: parse_seconds(text) for name, text in given.items() if text}
    return replace(
        question,
        workload=replace(workload, weak=args.weak, bucket_cap_mb=args.bucket_cap_mb, **times),
        nodes=question.nodes if args.nodes else [1, found.ranks],
        rates=question.rates or found.rates,
        cores=found.cores if args.cores is None else args.cores,
        transport=found.transport,
    )


def validate(args: argparse.Namespace, console: Console) -> int:
    """Compare predicted with measured steps on this machine; return 1 when one is off by more than the goal."""
    rows = compare(console)
    if args.json is not None:
        found = [{**asdict(row), "error": row.error} for row in rows]
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(any(abs(row.error) > GOAL for row in rows))


def answer(question: Question) -> Prediction:
    """Return the prediction, with a progress bar where it takes long."""
    rates = question.rates
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring codecs" if rates is None else "simulating", total=1.0)
        repeated: list[Rates] = []
        if rates is None:
            torch.set_num_threads(1)
            wanted = to_calibrate(question.methods, question.nodes, question.node)
            repeated = [calibrate(wanted) for _ in range(REPEATS)]
            rates = Rates.median(repeated)
            bar.update(task, description="simulating")
        return predict(
            question.workload,
            question.link,
            question.nodes,
            node=question.node,
            methods=question.methods,
            rates=rates,
            cores=question.cores,
            double_buffering=question.double_buffering,
            stragglers=question.stragglers,
            transport=question.transport,
            progress=lambda share: bar.update(task, completed=share),
            optimizer=question.tolerance.optimizer,
            tolerances=question.tolerance.limits,
            by_seconds=question.by_seconds,
            repeated=repeated,
        )


def report(args: argparse.Namespace, found: Prediction, console: Console) -> int:
    """Print the prediction and write the files that were asked for."""
    question: Question = args.question
    print_prediction(console, question, found)
    if args.json is not None:
        args.json.write_text(json.dumps(to_dict(question, found), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        try:
            plot(question, found, args.plot)
        except ModuleNotFoundError as error:
            print(f"python -m gradcomp.plan --plot needs {error.name}: pip install 'gradcomp[bench]'", file=sys.stderr)
            return 2
    return 0
