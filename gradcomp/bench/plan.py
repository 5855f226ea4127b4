"""python -m gradcomp.plan: does compression pay, on how many nodes, for one's own model, network
and machine.

Nothing is sent and nothing is trained unless --measure or --validate is given: seconds are those of
`gradcomp.plan.simulate`, bytes those of the exchange's own sizing, CPU seconds of the codecs are
measured here in a second.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from gradcomp.arguments import suggestion
from gradcomp.bench.cluster import measure_here
from gradcomp.bench.cluster_validate import GOAL, describe
from gradcomp.bench.cluster_validate import validate as compare
from gradcomp.bench.plan_options import build_parser
from gradcomp.bench.plan_question import Question, parse_stragglers
from gradcomp.bench.plan_report import plot, print_prediction, to_dict
from gradcomp.bench.ranks import RANK_ERRORS
from gradcomp.plan.costs import LocalSteps, Method
from gradcomp.plan.links import Node, parse_link, parse_seconds
from gradcomp.plan.models import find_model, load_shapes
from gradcomp.plan.predict import Prediction, predict, to_calibrate, ways
from gradcomp.plan.rates import OUTER, Rates, calibrate
from gradcomp.plan.step import MAX_NODES
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.workload import ALONE, Stragglers, Workload

BACKWARD_AND_FORWARD = 3  # forwards that a forward and a backward cost
FLOPS = 10e12
CORES = 2.0
REPEATS = 3  # measurements of the codecs
UPDATE_S = 2e-10  # a value: five passes over fp32 memory (SGD with momentum) at 100 GB/s


def understand(args: argparse.Namespace) -> Question:
    """Return what the command line asks.

    Raises:
        ValueError, OSError: what is wrong with it, in one sentence.
    """
    if args.seed is not None:
        raise ValueError(
            "--seed has no effect: the slowest of N nodes is computed, not drawn; leave it out"
        )
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
    t_frame = (
        parse_seconds(args.frame_time)
        if args.frame_time
        else BACKWARD_AND_FORWARD * model.forward_flops / flops
    )
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
        raise ValueError(
            f"--rates {args.rates} says nothing of {OUTER!r}, as files from before --every: leave"
            " it out, and they are measured here"
        )
    cores = CORES if args.cores is None else args.cores
    if not 0 < cores < math.inf:
        raise ValueError(f"--cores must be positive and finite, got {cores!r}")
    share, factor = parse_stragglers(args.stragglers)
    limits = {"nats": args.tolerance, "points": args.tolerance_points}
    for option, limit in (
        ("--tolerance", args.tolerance),
        ("--tolerance-points", args.tolerance_points),
    ):
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
        Stragglers(args.jitter, share, factor),
        rates,
        cores,
        args.double_buffering,
        tolerance=Tolerance(
            args.optimizer, {unit: limit for unit, limit in limits.items() if limit is not None}
        ),
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
            f"--nodes {text!r} is not understood; 1:64 (doubling), 2:10:2 (steps of 2) and 2,4,6"
            f" are, from 1 to {MAX_NODES}"
        ) from None
    return found


def choose_methods(codecs: str | None, exchanges: str | None, node: Node = ALONE) -> list[Method]:
    """Return the methods of some codecs and exchanges on such nodes.

    Raises:
        ValueError: an unknown name, or nothing left.
    """
    all_of_them = ways(node)
    known = [
        dict.fromkeys(m.name.split()[0] for m in all_of_them),
        dict.fromkeys(m.exchange for m in all_of_them),
    ]
    wanted = [
        list(k) if text is None else text.split(",")
        for text, k in zip((codecs, exchanges), known, strict=True)
    ]
    for option, names, some in zip(("--codec", "--exchange"), wanted, known, strict=True):
        for name in names:
            if name == "hierarchical" and name not in some:
                raise ValueError("--exchange hierarchical needs --ranks-per-node of at least 2")
            if name not in some:
                raise ValueError(
                    f"{option} {name!r} is unknown; there are"
                    f" {', '.join(some)}{suggestion(name, some)}"
                )
    found = [m for m in all_of_them if m.name.split()[0] in wanted[0] and m.exchange in wanted[1]]
    if not found:
        raise ValueError(f"no method has both --codec {codecs} and --exchange {exchanges}")
    return found


def _with_local(args: argparse.Namespace, chosen: list[Method]) -> list[Method]:
    """Return the methods, and the same after local steps if these are asked for; those of bf16
    are fp32's.
    """
    if args.every is None:
        if args.fragments != 1 or args.delay:
            raise ValueError("--fragments and --delay go with --every")
        return chosen
    if args.double_buffering:
        raise ValueError(
            "--every and --double-buffering exclude each other: with local steps no halves are"
            " exchanged"
        )
    local = LocalSteps(args.every, args.fragments, args.delay)
    return [
        *chosen,
        *{one.name: one for one in (method.after(local) for method in chosen)}.values(),
    ]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        args.question = understand(args)
        if args.ranks is not None and not args.measure:
            raise ValueError(
                "--ranks needs --measure, which starts them; for predictions of so many ranks say"
                " --nodes"
            )
        if args.ranks is not None and args.ranks < 2:
            raise ValueError(f"--ranks must be at least 2, got {args.ranks}")
        if args.measure and args.validate:
            raise ValueError("--measure and --validate exclude each other")
        if args.measure and args.flops is not None:
            raise ValueError(
                "--measure takes forward and backward's time; to replace it give --frame-time, not"
                " --flops"
            )
        if args.adagrad and not args.measure:
            raise ValueError(
                "--adagrad needs --measure; without it give AdaGrad's time as --post-time"
            )
    except (ValueError, OverflowError, OSError) as error:
        print(f"{parser.prog}: {_said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    return args


def _said(error: Exception) -> str:
    """Return what is wrong, of a file with its name first."""
    return (
        f"{error.filename}: {error.strerror}"
        if isinstance(error, OSError) and error.filename
        else str(error)
    )


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
        torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException:
            a rank did not end well.
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
    """Compare predicted with measured steps on this machine; return 1 when one is off by more
    than the goal.
    """
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
        args.json.write_text(
            json.dumps(to_dict(question, found), indent=2) + "\n", encoding="utf-8"
        )
    if args.plot is not None:
        try:
            plot(question, found, args.plot)
        except ModuleNotFoundError as error:
            print(
                f"python -m gradcomp.plan --plot needs {error.name}: pip install 'gradcomp[bench]'",
                file=sys.stderr,
            )
            return 2
    return 0
