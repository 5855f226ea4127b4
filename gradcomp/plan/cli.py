"""Command line of ``python -m gradcomp.plan``: does compression pay, and on how many nodes, for a
given model, network and machine.

Without --measure nothing is sent or trained: seconds come from `gradcomp.plan.simulate`, bytes from
the exchange's own sizing, and the CPU seconds of the codecs from a measurement of three seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gradcomp.arguments import Parser, suggestion
from gradcomp.payload.form import removal
from gradcomp.plan.accuracy import TOLERANCES
from gradcomp.plan.costs import METHODS, LocalSteps, Method, between
from gradcomp.plan.links import Node, format_seconds, format_times, parse_link, parse_seconds
from gradcomp.plan.models import Model, find_model, load_shapes
from gradcomp.plan.nodes import exact
from gradcomp.plan.predict import Prediction, Tolerance, to_calibrate, ways
from gradcomp.plan.rates import OUTER, PRECONDITION, Rates, calibrate
from gradcomp.plan.report import plot, print_prediction, to_dict
from gradcomp.plan.step import MAX_NODES, Setting
from gradcomp.plan.workload import Stragglers, Workload

PROGRAM = "python -m gradcomp.plan"
BACKWARD_AND_FORWARD = 3  # cost of forward and backward together, in forward passes
REPEATS = 3  # measurements of the codecs
UPDATE_S = 2e-10  # per value: five passes over fp32 memory (SGD with momentum) at 100 GB/s
DESCRIPTION = """\
Seconds of a training step over node counts for fp32, bf16, ternary and 1-bit gradients, and
whether to compress.

Times are written like 0.1ms or 50us, rates like 100mbit or 10gbit; named links have a latency of
their own (wan, 1gbe, 10gbe, 25gbe, 100gbe, infiniband).
"""
EXAMPLES = """\
examples (docs/howto/plan.md has more):
  VGG-16 on machines that compute 10 TFLOP/s, 1 Gbit/s Ethernet:
    python -m gradcomp.plan --model vgg16 --link 1gbit --latency 0.1ms --nodes 1:64

  your own model, with times that you measured on one node, trained with AdamW; jitter of 5 %,
  and a tenth of the nodes twice as slow:
    python -m gradcomp.plan --shapes shapes.json --frame-time 12ms --update-time 30ms \\
      --optimizer adamw --link 10gbe --nodes 2,4,8 --jitter 0.05 --stragglers 0.1:2

  machines in different buildings: 30 local steps, then an exchange that may be 5 steps late
    python -m gradcomp.plan --model gpt2 --link 100mbit --latency 10ms --nodes 2:8 \\
      --codec fp32,terngrad --every 30 --delay 5

  what this machine can do, with 2 ranks that measure at once:
    python -m gradcomp.plan --measure --ranks 2
"""
# Groups of options: a title, then lines with name, placeholder (none for a switch) and help.
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
--rates FILE: file with the CPU seconds of the codecs, written by --json here or by that of
    gradcomp.doctor, which includes copies to and from an accelerator (default: measured here, three
    times)

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
}  # by placeholder; other values are strings
DEFAULTS = {
    "model": "resnet50",
    "minibatch": 256.0,
    "flops": 10e12,
    "link": "1gbe",
    "inside": "inf",
    "nodes": "1:64",
    "ranks_per_node": 1,
    "cores": 2.0,
    "jitter": 0.0,
    "stragglers": "0:1",
    "fragments": 1,
    "delay": 0,
}
DEFAULTS_OF_MEASURE = {"model": "lenet", "link": "inf"}
APART = (  # two options that exclude each other, and the reason
    ("--model", "--shapes", ""),
    ("--frame-time", "--flops", ""),
    ("--every", "--double-buffering", ": with local steps no halves are exchanged"),
    ("--measure", "--flops", ": it measures the time; give --frame-time to replace that"),
)
TOGETHER = (  # an option, the option that it needs, and a remedy
    ("--tolerance", "--optimizer", ""),
    ("--tolerance-points", "--optimizer", ""),
    ("--fragments", "--every", ""),
    ("--delay", "--every", ""),
    ("--ranks", "--measure", ", which starts them; to predict that many ranks give --nodes"),
)
GONE = {
    "--seed": "has no effect: the slowest of N nodes is computed, not drawn; leave it out",
    "--bucket-cap-mb": "is gone: set bucket_cap_mb of gradcomp.plan.Workload in Python",
    "--validate": "is gone: python -m gradcomp.bench train compares predicted and measured steps",
    "--adagrad": "is gone: --measure prints the seconds of AdaGrad; give them as --post-time",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the planner's command line."""
    parser = Parser(prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES)
    codecs = ", ".join(dict.fromkeys(m.kind for m in METHODS))
    parser.add_groups(OPTIONS.format(codecs=codecs, **TOLERANCES), TYPES)
    for name in GONE:
        parser.add_argument(name, nargs="?", const=True, help=argparse.SUPPRESS)
    return parser


def understand(args: argparse.Namespace, found: Any = None) -> tuple[Model, Prediction]:
    """Return the model and the prediction that a command line asks for. `found`, measured on the
    ranks at hand (`gradcomp.bench.measure.Measurement`), replaces the defaults.

    Raises:
        ValueError: the command line is not valid; the message says why in one sentence.
        OSError: a file of --shapes or --rates cannot be read.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    for name in options.keys() & GONE:
        raise ValueError(f"{name} {GONE[name]}")
    for name, other, why in APART:
        if options.keys() >= {name, other}:
            raise ValueError(f"{name} and {other} exclude each other{why}")
    for name, other, remedy in TOGETHER:
        if name in options and other not in options:
            raise ValueError(f"{name} needs {other}{remedy}")
    if options.get("--ranks", 2) < 2:
        raise ValueError(f"--ranks must be at least 2, got {args.ranks}")
    defaults = DEFAULTS | (DEFAULTS_OF_MEASURE if args.measure else {})
    asked = argparse.Namespace(**vars(args) | defaults | given)
    if args.inside is not None and asked.ranks_per_node == 1:
        raise ValueError("--inside needs --ranks-per-node of at least 2")
    for name in ("flops", "cores"):
        exact(f"--{name}", getattr(asked, name), positive=True)
    model = load_shapes(args.shapes) if args.shapes is not None else find_model(asked.model)
    if found is None:
        computed = BACKWARD_AND_FORWARD * model.forward_flops / asked.flops
        updating = UPDATE_S * model.numel
        work = Workload(model.parameters, asked.minibatch, computed, updating, flops=model.flops)
    else:
        of_rank = args.weak and args.minibatch is None
        work = found.workload(model, found.batch if of_rank else args.minibatch)
    times: dict[str, Any] = {}
    for name in ("frame", "update", "post"):
        if text := getattr(args, f"{name}_time"):
            times[f"t_{name}"] = parse_seconds(text)
    rates = None if args.rates is None else Rates.load(args.rates)
    node = Node(asked.ranks_per_node, parse_link(asked.inside))
    setting = Setting(
        replace(work, weak=bool(args.weak), **times),
        parse_link(asked.link, args.latency),
        node,
        cores=found.cores if found is not None and args.cores is None else asked.cores,
        double_buffering=bool(args.double_buffering),
        stragglers=Stragglers(asked.jitter, *parse_stragglers(asked.stragglers)),
        transport=None if found is None else found.transport,
    )
    methods = choose_methods(args.codec, args.exchange, node)
    if args.every is not None:
        local = LocalSteps(args.every, asked.fragments, asked.delay)
        late = [method.after(local) for method in methods]
        methods += {m.name: m for m in late}.values()  # fp32 and bf16 give the same method
    limits = {"nats": args.tolerance, "points": args.tolerance_points}
    tolerance = Tolerance(
        args.optimizer,
        {unit: limit for unit, limit in limits.items() if limit is not None},
        by_seconds=bool(args.by_seconds) or args.codec is not None,
    )
    nodes = parse_nodes(asked.nodes)
    if rates is not None:
        flat = [between(method.each_step, n) for method in methods for n in nodes]
        wanted = {method.name for method in flat if method.compresses}
        wanted |= {OUTER} if args.every is not None else set()
        if any(tolerance.as_measured(method).precondition for method in methods):
            wanted.add(PRECONDITION)
        for name in sorted(wanted - rates.stages.keys()):
            raise ValueError(
                f"--rates {args.rates} has no rates of {name!r}: leave it out, and they are"
                " measured here"
            )
    repeated: tuple[Rates, ...] = ()
    if found is not None:
        nodes = nodes if args.nodes else [1, found.ranks]
        repeated = found.repeated if rates is None else ()
        rates = rates or found.rates
    setting = replace(setting, rates=rates or Rates())
    transports = () if found is None else found.transports
    question = Prediction(setting, tuple(methods), tuple(nodes), tolerance, repeated, transports)
    return model, question


def parse_nodes(text: str) -> list[int]:
    """Return the numbers of nodes of "1:64" (doubling, end included), "2:10:2" or "2,4,6"."""
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
            f"--nodes {text!r} is not understood; write 1:64 (doubling), 2:10:2 (steps of 2) or"
            f" 2,4,6, from 1 to {MAX_NODES}"
        ) from None
    return found


def parse_stragglers(text: str) -> tuple[float, float]:
    """Return share and factor of a text such as "0.1:2"."""
    try:
        share, factor = (float(part) for part in text.split(":"))
    except ValueError:
        raise ValueError(
            f"--stragglers {text!r} is not understood; write SHARE:FACTOR as in 0.1:2"
        ) from None
    return share, factor


def choose_methods(codecs: str | None, exchanges: str | None, node: Node) -> list[Method]:
    """Return the methods on these nodes with one of `codecs` and one of `exchanges`, both
    comma-separated names (None: all). An unknown name, or no such method, is a ValueError.
    """
    methods = ways(node)
    found = list(methods)
    asked = (("--codec", "kind", codecs), ("--exchange", "exchange", exchanges))
    for option, attribute, text in asked:
        known = dict.fromkeys(getattr(m, attribute) for m in methods)
        wanted = [*known] if text is None else text.split(",")
        for name in wanted:
            if name == "hierarchical" and name not in known:
                raise ValueError(f"{option} hierarchical needs --ranks-per-node of at least 2")
            if name not in known:
                names = f"{', '.join(known)}{removal(name) or suggestion(name, known)}"
                raise ValueError(f"{option} {name!r} is unknown; there are {names}")
        found = [m for m in found if getattr(m, attribute) in wanted]
    if not found:
        raise ValueError(f"no method has both --codec {codecs} and --exchange {exchanges}")
    return found


def main(argv: list[str]) -> int:
    """Run the planner; return 0, 1 if a rank failed, or 2 if the command line is not valid."""
    args, console = build_parser().parse_args(argv), Console()
    try:
        model, question = understand(args)
        if args.measure:
            found = importlib.import_module("gradcomp.bench.measure").measure_here(args.ranks)
            if args.ranks is None and os.environ.get("RANK", "0") != "0":
                return 0  # rank 0 answers
            console.print(*_measurement(found), "", sep="\n", highlight=False, soft_wrap=True)
            model, question = understand(args, found)
        answer = predicted(question, calibrates=not (args.rates or args.measure))
        print_prediction(console, model, answer)
        if args.json is not None:
            text = json.dumps(to_dict(model, answer), indent=2)
            args.json.write_text(f"{text}\n", encoding="utf-8")
        if args.plot is not None:
            plot(model, answer, args.plot)
    except OSError as error:
        return _refuse(f": {error.filename}: {error.strerror}" if error.filename else f": {error}")
    except (ValueError, OverflowError) as error:
        return _refuse(f": {error}")
    except ModuleNotFoundError as error:
        return _refuse(f" needs {error.name}: pip install 'gradcomp[bench]'")
    except multiprocessing.ProcessError as error:  # a rank of --measure failed
        _refuse(f": {error}")
        return 1
    return 0


def _refuse(text: str) -> int:
    print(f"{PROGRAM}{text}", file=sys.stderr)
    return 2


def _measurement(found: Any) -> list[str]:
    """Return lines on a measurement; with each figure of repeated ones its range."""
    update, post = format_seconds(found.t_update), format_seconds(found.t_post)
    frame = _with_range(found.t_frame, found.frames)
    ranks = f"{found.ranks} ranks at once, {found.cores:g} cores each"
    lenet = f"LeNet: {frame} a sample ({found.forward_share:.0%} of it forward), update {update}"
    lines = [
        f"{ranks}, {found.batch} samples a rank and step",
        f"{lenet}, AdaGrad {post} over all ranks together (--post-time)",
    ]
    for kind, alpha in found.transport.alpha_s.items():
        alphas = [one.alpha_s[kind] for one in found.transports]
        betas = [found.transport.beta_s[kind], *(one.beta_s[kind] for one in found.transports)]
        rate, *rates = (1e-9 / beta if beta else math.inf for beta in betas)
        text = "no time a byte" if rate == math.inf else f"{rate:.3g} GB/s"
        text += f" ({min(rates):.3g} to {max(rates):.3g})" if rates else ""
        lines.append(f"{kind}: {_with_range(alpha, alphas)} and {text}")
    return lines


def _with_range(seconds: float, repeated: Sequence[float]) -> str:
    """Return a time, with the range of its repeated measurements if there were any."""
    return format_seconds(seconds) + (f" ({format_times(repeated)})" if repeated else "")


def predicted(question: Prediction, *, calibrates: bool) -> Prediction:
    """Compute a prediction, after measuring the codecs if `calibrates`; show a status line."""
    setting = question.setting
    with Console(stderr=True).status("predicting") as status:
        if calibrates:
            status.update("measuring codecs")
            torch.set_num_threads(1)
            wanted = to_calibrate(question.methods, question.counts, setting.node)
            repeated = tuple(calibrate(wanted) for _ in range(REPEATS))
            setting = replace(setting, rates=Rates.median(repeated))
            question = replace(question, setting=setting, repeated=repeated)
            status.update("predicting")
        question.sentence  # noqa: B018  computes nearly everything
        return question
