"""python -m gradcomp.plan: does compression pay, on how many nodes, for one's own model, network
and machine.

Nothing is sent and nothing is trained without --measure: seconds are those of
`gradcomp.plan.simulate`, bytes those of the exchange's own sizing, and the CPU seconds of the
codecs are measured here in three seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from gradcomp.arguments import Parser, suggestion
from gradcomp.payload.form import removal
from gradcomp.plan.accuracy import TOLERANCES
from gradcomp.plan.costs import METHODS, LocalSteps, Method
from gradcomp.plan.links import Node, format_seconds, parse_link, parse_seconds
from gradcomp.plan.models import find_model, load_shapes
from gradcomp.plan.predict import Prediction, predict, to_calibrate, ways
from gradcomp.plan.rates import OUTER, Rates, calibrate
from gradcomp.plan.report import Question, plot, print_prediction, to_dict
from gradcomp.plan.step import MAX_NODES
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.workload import ALONE, Stragglers, Workload

PROGRAM = "python -m gradcomp.plan"
BACKWARD_AND_FORWARD = 3  # forwards that a forward and a backward cost
FLOPS = 10e12
CORES = 2.0
REPEATS = 3  # measurements of the codecs
UPDATE_S = 2e-10  # a value: five passes over fp32 memory (SGD with momentum) at 100 GB/s
DESCRIPTION = """\
Seconds of a training step over node counts for fp32, bf16, ternary and 1-bit gradients, and
whether to compress.

Times are written like 0.1ms or 50us, rates like 100mbit or 10gbit; named links have a latency of
their own (wan, 1gbe, 10gbe, 25gbe, 100gbe, infiniband).
"""
EXAMPLES = """\
examples:
  VGG-16 on machines that compute 10 TFLOP/s, 1 Gbit/s Ethernet:
    python -m gradcomp.plan --model vgg16 --link 1gbit --latency 0.1ms --nodes 1:64

  the same with a measured 12 ms a sample and 30 ms an update (time your own training step on one
  node for these):
    python -m gradcomp.plan --model vgg16 --link 1gbe --nodes 1:64 --frame-time 12ms \\
      --update-time 30ms

  your own model, from [[name, [dimensions]], ...]; a tenth of the nodes twice as slow, 5 % of
  jitter:
    python -m gradcomp.plan --shapes shapes.json --link 10gbe --nodes 2,4,8 --jitter 0.05 \\
      --stragglers 0.1:2

  only 1-bit against fp32, exchanged in halves as Seide et al. did, with a picture:
    python -m gradcomp.plan --model bert --link 10gbe --nodes 1:256 --codec fp32,onebit \\
      --double-buffering --plot plan.png

  recommend only what keeps within 0.02 nats of fp32 under AdamW, as far as that was measured:
    python -m gradcomp.plan --model gpt2 --link 1gbe --nodes 1:16 --optimizer adamw

  nodes of 8 ranks that share a link of 25 Gbit/s: is averaging inside nodes first worth it?
    python -m gradcomp.plan --model bert --link 25gbe --nodes 1:16 --ranks-per-node 8 \\
      --inside 100gbit

  machines in different buildings: 30 local steps, then an exchange that may be 5 steps late
    python -m gradcomp.plan --model gpt2 --link 100mbit --latency 10ms --nodes 2:8 \\
      --codec fp32,terngrad --every 30 --delay 5

  what this machine can do, with 2 ranks that measure at once:
    python -m gradcomp.plan --measure --ranks 2
"""
# Groups of options: name and placeholder (none for a switch), then the help.
OPTIONS = """\
what is trained
--model NAME: published model: LeNet, ResNet-50, VGG-16, BERT-base or GPT-2 small (default:
    resnet50)
--shapes FILE.json: file with the shapes of your own model, in place of --model: [[name,
    [dimensions]], ...]
--minibatch SAMPLES: samples of a step over all nodes (default: 256)
--weak: take --minibatch as the samples of each rank (weak scaling)
--frame-time TIME: time of forward and backward of one sample on one rank, such as 12ms (default:
    computed from --flops)
--flops F: floating-point operations per second that a rank sustains, in place of --frame-time
    (default: 1e13)
--update-time TIME: time of one optimizer step, such as 30ms (default: 0.2 ns per value of the
    model)
--post-time TIME: time of work on gradients that ranks share, such as AdaGrad (default: 0)
--optimizer NAME: optimizer of the training, such as adamw, sgd or lamb, or other: codecs that lost
    accuracy under it, or were not measured under it, are not recommended (default: none; only
    codecs that are safe for every optimizer are recommended)
--by-seconds: without --optimizer, recommend the fastest codec, whatever accuracy it loses; --codec
    does the same for the codecs that it names
--tolerance NATS: largest loss over fp32 that is accepted, in nats, with --optimizer (default:
    {nats})
--tolerance-points POINTS: largest loss of test accuracy that is accepted, in points, where accuracy
    was measured, as under SGD (default: {points})

where
--link RATE: rate of the link of every node, such as 100mbit or 10gbit, or the name of a link: wan,
    1gbe, 10gbe, 25gbe, 100gbe, infiniband (default: 1gbe)
--latency TIME: time that a message takes, whatever its size, such as 0.1ms (default: that of a
    named link, else 0)
--ranks-per-node L: ranks that share the link of a node; above 1 hierarchical exchanges are
    compared, too (default: 1)
--inside RATE: rate between ranks of one node, such as 100gbit (default: infinite)
--nodes A:B: numbers of nodes to compare: A:B doubles from A to B, A:B:STEP adds STEP, 2,4,6 is a
    list (default: 1:64)
--cores CORES: cores of a rank; with fewer than 2, codecs take time from the backward pass (default:
    2, or as measured)
--jitter SIGMA: standard deviation of the logarithm of the computing time of a node (default: 0)
--stragglers SHARE:FACTOR: share of slow nodes and how much longer they compute: 0.1:2 is a tenth of
    the nodes at half speed (default: none)

how gradients are exchanged
--codec A,B: codecs to compare, out of {codecs}; one of them may then be recommended although it
    loses accuracy (default: all)
--every H: compare exchanges after H local steps, too (gradcomp.DiLoCo); a step is then one H-th of
    H steps and one exchange (default: exchange at every step)
--fragments K: with --every, number of parts of the model that are exchanged in turn (default: 1)
--delay D: with --every, steps that go on while a part is exchanged (default: 0)
--exchange A,B: exchanges to compare, out of all_reduce, all_gather, reduce_scatter and hierarchical
    (default: all)
--double-buffering: exchange one half of a minibatch while the other half is computed
--rates FILE: file with the CPU seconds of the codecs, written by --json (default: measured here,
    three times)

what is written
--json FILE: write every number to this file
--plot FILE: draw seconds per step against nodes into this file (PNG, SVG or PDF)

on the cluster at hand
--measure: measure computing, codecs and links on the ranks at hand, and use these figures
--ranks N: with --measure, start N ranks on this machine (default: use those of the launcher)
"""
TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("SAMPLES", "F", "NATS", "POINTS", "CORES", "SIGMA"), float),
    **dict.fromkeys(("L", "H", "K", "D", "N"), int),
    **dict.fromkeys(("FILE", "FILE.json"), Path),
}  # by placeholder; all others are texts
DEFAULTS = {"ranks_per_node": 1, "jitter": 0.0, "fragments": 1, "delay": 0}
GONE = {
    "--seed": "has no effect: the slowest of N nodes is computed, not drawn; leave it out",
    "--bucket-cap-mb": "is gone: set bucket_cap_mb of gradcomp.plan.Workload in Python",
    "--validate": "is gone: python -m gradcomp.bench train compares predicted and measured steps",
    "--adagrad": "is gone: --measure prints the seconds of AdaGrad; give them as --post-time",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of the planner."""
    parser = Parser(
        prog=PROGRAM,
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    codecs = ", ".join(dict.fromkeys(m.name.split()[0] for m in METHODS))
    for text in OPTIONS.format(codecs=codecs, **TOLERANCES).split("\n\n"):
        title, *options = re.split(r"\n(?=--)", text)
        group = parser.add_argument_group(title)
        for option in options:
            head, words = option.split(": ", 1)
            name, *value = head.split(" ")
            settings: dict[str, Any] = {"action": "store_true"}
            if value:
                settings = {"metavar": value[0], "type": TYPES.get(value[0], str)}
            group.add_argument(name, help=" ".join(words.split()), **settings)
    for name in GONE:
        parser.add_argument(name, nargs="?", const=True, help=argparse.SUPPRESS)
    parser.set_defaults(**DEFAULTS)
    return parser


def understand(args: argparse.Namespace) -> Question:
    """Return what the command line asks.

    Raises:
        ValueError, OSError: what is wrong with it, in one sentence.
    """
    for name, why in GONE.items():
        if getattr(args, name[2:].replace("-", "_")) is not None:
            raise ValueError(f"{name} {why}")
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


def parse_stragglers(text: str | None) -> tuple[float, float]:
    """Return (share, factor) of "0.1:2".

    Raises:
        ValueError: not understood.
    """
    if text is None:
        return 0.0, 1.0
    try:
        share, factor = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(
            f"--stragglers {text!r} is not understood; SHARE:FACTOR as in 0.1:2 is"
        ) from None
    return share, factor


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
                    f" {', '.join(some)}{removal(name) or suggestion(name, some)}"
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
        if args.measure and args.flops is not None:
            raise ValueError(
                "--measure takes forward and backward's time; to replace it give --frame-time, not"
                " --flops"
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
    if args.measure:
        try:
            args.question = measured(args, console)
        except (ValueError, ProcessExitedException, ProcessRaisedException) as error:
            print(f"{PROGRAM}: {error}", file=sys.stderr)
            return 2 if isinstance(error, ValueError) else 1
        if args.question is None:
            return 0
    try:
        return report(args, answer(args.question), console)
    except (ValueError, OverflowError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def measured(args: argparse.Namespace, console: Console) -> Question | None:
    """Measure the ranks at hand; return the question with what was found, on rank 0.

    Raises:
        ValueError: no ranks at hand.
        torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException:
            a rank did not end well.
    """
    found = importlib.import_module("gradcomp.bench.cluster").measure_here(args.ranks)
    if args.ranks is None and os.environ.get("RANK", "0") != "0":
        return None
    for line in _measurement(found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    question: Question = args.question
    minibatch = found.batch if args.weak and args.minibatch is None else args.minibatch
    workload = found.workload(question.model, minibatch=minibatch)
    given = {"t_frame": args.frame_time, "t_update": args.update_time, "t_post": args.post_time}
    times: dict[str, Any] = {name: parse_seconds(text) for name, text in given.items() if text}
    return replace(
        question,
        workload=replace(workload, weak=args.weak, **times),
        nodes=question.nodes if args.nodes else [1, found.ranks],
        rates=question.rates or found.rates,
        cores=found.cores if args.cores is None else args.cores,
        transport=found.transport,
    )


def answer(question: Question) -> Prediction:
    """Return the prediction, with a note on stderr while it takes."""
    rates, repeated = question.rates, list[Rates]()
    status = Console(stderr=True).status("measuring codecs" if rates is None else "predicting")
    with status:
        if rates is None:
            torch.set_num_threads(1)
            wanted = to_calibrate(question.methods, question.nodes, question.node)
            repeated = [calibrate(wanted) for _ in range(REPEATS)]
            rates = Rates.median(repeated)
            status.update("predicting")
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
                f"{PROGRAM} --plot needs {error.name}: pip install 'gradcomp[bench]'",
                file=sys.stderr,
            )
            return 2
    return 0


def _measurement(found: Any) -> list[str]:
    """Return what the ranks at hand can do (`gradcomp.bench.cluster.Measured`), a line each."""
    ranks = f"{found.ranks} ranks at once, {found.cores:g} cores each"
    lenet = (
        f"LeNet: {format_seconds(found.t_frame)} a sample ({found.forward_share:.0%} of it forward)"
    )
    post = f"AdaGrad {format_seconds(found.t_post)} over all ranks together (--post-time)"
    lines = [
        f"{ranks}, {found.batch} samples a rank and step",
        f"{lenet}, update {format_seconds(found.t_update)}, {post}",
    ]
    for kind, alpha in found.transport.alpha_s.items():
        beta = found.transport.beta_s[kind]
        rate = "no time a byte" if beta == 0 else f"{1e-9 / beta:.3g} GB/s"
        lines.append(f"{kind}: {format_seconds(alpha)} and {rate}")
    return lines
