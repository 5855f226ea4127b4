"""Train with several methods of exchange over links of a given rate: what a step takes, what is
sent, what it learns.

With --hosts N the ranks run on N hosts that are made on this machine, network namespaces with
shaped links (root, iproute2), each on its share of the cores. With --hosts 0 they talk over
loopback, where nothing is slow. Under a launcher (gradcomp.launch, torchrun, mpirun, srun) the
ranks are those that it has started, on real machines with their own links. A method that hangs or
crashes is a row that says so; the others finish.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import signal
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradcomp.arguments import Parser
from gradcomp.bench import workloads
from gradcomp.bench.about import save_json
from gradcomp.bench.methods import DEFAULT, FSDP2, METHODS, NONE, NOOP, PRESETS, parse
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.options import add_option
from gradcomp.bench.train.hosts import INTERFACE, Hosts, NoHosts
from gradcomp.bench.train.mpi import Mpiexec
from gradcomp.bench.train.predict import largest_bucket, predict
from gradcomp.bench.train.rank import Task
from gradcomp.bench.train.report import crossings, row_of, table_of
from gradcomp.bench.train.run import Place, all_cores, cores_of, measure, run_method
from gradcomp.bench.workloads import Workload
from gradcomp.plan.links import Link, parse_link
from gradcomp.plan.rates import Rates
from gradcomp.plan.workload import Transport

GRAMMAR = f"""
methods: {", ".join(name for name in METHODS if name not in (NONE, NOOP))}, {FSDP2},
  module:factory (registers a hook of your own with a DDP model); codecs with options after a
  colon: onebit:exempt=ends,start_step=100
  exempt={"|".join(PRESETS)}   tensors that travel in fp32 (ends: vectors, embeddings, head)
  min_numel=N, slice_numel=N   smallest tensor that is compressed; values of a slice
  start_step=N                 fp32 before that step
  start=METHOD                 ... or that
  second=PHASE                 what owners of means send: exact, requantize, block2, block4, block8,
                               bf16, fp32
  precondition                 gradients in units of their second moments
  momentum=frozen|renewed      momenta travel: 1-bit Adam (LAMB), 0/1 Adam; start_step is their
                               warm-up
  exchange=all_gather|reduce_scatter
  rotate                       of values rotated at random, unbiased and without residuals (onebit)
  decay=X                      what residuals keep from step to step: residual_decay (ternary,
                               onebit, block)
  step=X, group=row|tensor|N   scale in root mean squares (ternary); what shares a scale
  feedback=off                 what codes leave out is forgotten (onebit, block)
  double                       half minibatches in turns (gradcomp.onebit_sgd.DoubleBuffer)
  every=H                      local steps (gradcomp.DiLoCo), with fragments=K, delay=D, alpha=A,
                               outer_lr=X, outer_momentum=X
  {FSDP2}:CODEC[,weights=CODEC[,keep]]   fully_shard in place of DDP, weights packed, too, and kept
                               for backward
"""
EPILOG = f"""{GRAMMAR}
workloads: {", ".join(workloads.WORKLOADS)}, random:N (N values without a task)

columns: step, p95     milliseconds of the slowest rank, median and 95th percentile
         exposed       what of it a step of noop does not take: DDP with a hook that averages
                       nothing (of local steps and fsdp2, which are without DDP: a step of none)
         / bound       exposed, over the larger of what the exchange computes and what the link
                       needs for the bytes
         planner       what gradcomp.plan expects, and how far off that is
         sent          bytes on the interface (--hosts) or counted by gradcomp, a step and rank
         CPU           of rank 0, exchange included
         hidden        share of the exchange that backward hides

examples:
  python -m gradcomp.bench train --hosts 2 --link 1gbit --workload mlp
  python -m gradcomp.bench train --hosts 4 --link 100mbit --workload gpt-1m --data DIR \\
    --steps 200 --target 2.5
  # where does it stop paying?
  python -m gradcomp.bench train --hosts 2 4 --link 100mbit 1gbit 10gbit none \\
    --methods fp32 terngrad onebit
  # real machines, their own links
  python -m gradcomp.launch -n 4 --hostfile hosts -m gradcomp.bench train --workload mlp
  python -m gradcomp.bench train --hosts 0 --workload lenet --data DIR \\
    --methods fp32 terngrad powersgd4
"""


@dataclass
class Case:
    """One number of ranks and one link, and the rows that were measured there.

    Attributes:
        ranks, link: as they say; "loopback" and "as it is" are links, too.
        latency_s: that could be made; None where no hosts were.
        over: what codecs' bytes went through.
        rows: of methods.
    """

    ranks: int
    link: str
    latency_s: float | None = None
    over: str = "gloo"
    rows: list[dict[str, Any]] = field(default_factory=list)


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    out = Parser(
        prog="python -m gradcomp.bench train",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "--hosts",
        type=int,
        nargs="+",
        default=[2],
        metavar="N",
        help=(
            "numbers of hosts to make on this machine, measured in turn; 0 stands for loopback "
            "(default: 2)"
        ),
    )
    out.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="ranks to start with --hosts 0 (default: %(default)s)",
    )
    out.add_argument(
        "--link",
        nargs="+",
        default=["1gbit"],
        metavar="RATE",
        help=(
            "rates of the link of every host, measured in turn: 100mbit, 1gbit, 10gbit, or none "
            "for no limit (default: 1gbit)"
        ),
    )
    out.add_argument(
        "--over",
        choices=("gloo", "mpi"),
        default="gloo",
        help=(
            "transport of compressed bytes: gloo, or the MPI of mpi4py, whose mpiexec then "
            "starts the ranks (default: %(default)s)"
        ),
    )
    out.add_argument(
        "--latency",
        metavar="TIME",
        help="latency of every link, such as 1ms, where the kernel has netem (default: none added)",
    )
    out.add_argument(
        "--workload",
        default="mlp",
        metavar="NAME",
        help="model and data to train, listed below (default: %(default)s)",
    )
    out.add_argument(
        "--data",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder with prose.txt.gz, fashion-mnist/ and cifar10_jpeg.npz (default: this one)",
    )
    out.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="optimizer to train with (default: sgd for images and mlp, adamw for text)",
    )
    out.add_argument(
        "--methods",
        nargs="+",
        default=list(DEFAULT),
        metavar="METHOD",
        help=f"ways of exchanging gradients, listed below (default: {' '.join(DEFAULT)})",
    )
    out.add_argument(
        "--steps",
        type=int,
        default=30,
        metavar="N",
        help="optimizer steps of each training (default: %(default)s)",
    )
    out.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="samples in the minibatch of each rank (default: those of the workload)",
    )
    out.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of weights and data (default: %(default)s)",
    )
    out.add_argument(
        "--curve",
        action="store_true",
        help="test now and then and at the end, and show accuracy or loss in the table",
    )
    out.add_argument(
        "--points",
        type=int,
        default=10,
        metavar="N",
        help=(
            "tests during a training with --curve or --target, the last one at the end "
            "(default: %(default)s)"
        ),
    )
    out.add_argument(
        "--target",
        type=float,
        metavar="X",
        help="accuracy or loss for which the seconds until it is reached are shown (default: none)",
    )
    out.add_argument(
        "--hang",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of silence after which a method counts as hung (default: %(default)g)",
    )
    text = "write every number to this file, each row as soon as it is measured"
    add_option(out, "json", help=text)
    return out


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench train` with these words; return the exit status: 1 where a
    method failed.
    """
    args = parser().parse_args(argv)
    launch = importlib.import_module("gradcomp.launch")
    job = launch.environment()
    launched = int(job["WORLD_SIZE"])
    if launched > 1:
        launch.export_environment()  # for the processes that each rank starts
    before = signal.signal(signal.SIGTERM, _stop)  # hosts are removed on the way out
    try:
        links = [parse_link("inf" if one == "none" else one, args.latency) for one in args.link]
        _check(args)
        for name in args.methods:
            parse(name)
        workload = workloads.find(args.workload, args.data, args.batch)
        optimizer = args.optimizer or ("sgd" if workload.name in workloads.SGD else "adamw")
        if optimizer not in workload.settings.rates:
            raise ValueError(
                f"{args.workload} has no rate for {optimizer}; it has"
                f" {', '.join(workload.settings.rates)}"
            )
        cases: list[Case] = []
        grid: list[tuple[int, str, Link | None]]
        if launched > 1 and args.over == "mpi":
            raise ValueError(
                "--over mpi starts ranks itself: run it without a launcher, with --hosts N or"
                " --hosts 0"
            )
        if launched > 1:
            grid = [(launched, "as it is", None)]
        elif args.hosts == [0]:
            grid = [(args.ranks, "loopback", None)]
        else:
            grid = [
                (count, name, link)
                for count in args.hosts
                for name, link in zip(args.link, links, strict=True)
            ]
        for count, name, link in grid:
            cases.append(Case(count, name, over=args.over))
            with contextlib.ExitStack() as made:
                hosts = made.enter_context(Hosts(count, link)) if link is not None else None
                mpi = made.enter_context(Mpiexec(hosts)) if args.over == "mpi" else None
                here = Link(math.inf)
                if hosts is not None and link is not None:
                    cases[-1].latency_s = hosts.latency_s
                    here = Link(link.bits_per_s, hosts.latency_s)  # as far as it could be made
                _run_case(args, workload, optimizer, cases, Place(hosts, mpi), here, launched > 1)
    except (NoHosts, ValueError, FileNotFoundError) as error:
        print(f"gradcomp.bench train: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    if int(job["RANK"]) == 0:
        _show(args, workload, cases)
    return 1 if any(row.get("failed") for case in cases for row in case.rows) else 0


def _check(args: argparse.Namespace) -> None:
    hosts_are_right = args.hosts == [0] or min(args.hosts) >= 2
    if not hosts_are_right or args.ranks < 2 or args.steps < 5 or not args.hang > 0:
        raise ValueError(
            "--hosts takes 0 or numbers of at least 2, --ranks at least 2, --steps at least 5,"
            " --hang more than 0"
        )
    if (args.batch is not None and args.batch < 1) or args.points < 1:
        raise ValueError("--batch and --points take at least 1")


def _show(args: argparse.Namespace, workload: Workload, cases: list[Case]) -> None:
    console = Console()
    measure = workload.measure if args.curve or args.target is not None else ""
    have = len(all_cores())
    for case in cases:
        here = case.latency_s is not None or case.link == "loopback"
        where = f"{case.ranks} {'ranks' if case.latency_s is None else 'hosts'}, {case.link}"
        if case.latency_s is not None and args.latency:
            where += (
                f", {args.latency}" if case.latency_s else " (no latency: this kernel has no netem)"
            )
        where += ", over MPI" if case.over == "mpi" else ""
        if here and case.ranks > have:
            where += (
                f"; they share {have} cores, so computing and codecs take longer than on hosts of"
                " their own"
            )
        console.print(
            f"{args.workload}, {args.steps} steps, {where}", highlight=False, soft_wrap=True
        )
        table = table_of(case.rows, measure, args.target)
        # a narrow terminal wraps lines rather than cut figures
        whole = Console(width=10_000).measure(table).maximum
        Console(width=max(console.width, whole)).print(table, highlight=False)
        for row in case.rows:
            if row.get("failed"):
                console.print(
                    f"{row['method']}: {row['failed']}",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )
    for line in crossings([(case.ranks, case.link, case.rows) for case in cases]):
        console.print(line, highlight=False, soft_wrap=True)


def _run_case(
    args: argparse.Namespace,
    workload: Workload,
    optimizer: str,
    cases: list[Case],
    place: Place,
    link: Link,
    launched: bool,
) -> None:
    """Run every method in one place; rows are written as they come."""
    ranks, rows = cases[-1].ranks, cases[-1].rows
    names = list(dict.fromkeys([NONE, NOOP, *args.methods]))
    curve = (args.curve or args.target is not None) and bool(workload.measure)
    # an exchange: results and row
    without: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    mine = int(os.environ["RANK"]) if launched else None
    with Progress(*columns, console=Console(stderr=True), disable=bool(mine)) as progress:
        bar = progress.add_task("codecs' speed", total=len(names) * args.steps)
        cores = [all_cores() if launched else cores_of(rank, ranks) for rank in range(ranks)]
        largest = largest_bucket(workload.model(), ranks)
        rates, transport = (
            (Rates(), Transport())
            if launched
            else measure(args.methods, largest, ranks, args.hang, place.mpi)
        )
        for number, name in enumerate(names):
            progress.update(bar, description=name, completed=number * args.steps)
            tasks = [
                Task(
                    name,
                    args.workload,
                    str(args.data),
                    optimizer,
                    args.steps,
                    args.seed,
                    args.batch,
                    args.points if curve and name not in (NONE, NOOP) else 0,
                    cores[rank],
                    INTERFACE if place.hosts is not None else "",
                )
                for rank in range(ranks)
            ]

            def on_step(step: int, first: int = number * args.steps) -> None:
                progress.update(bar, completed=first + step)

            here = Place(rank=mine, shift=1 + number) if launched else place
            found = run_method(tasks, here, args.hang, on_step)
            if found.failed:
                rows.append({"method": name, "failed": found.failed})
            elif found.results:
                alone, base = without.get(NONE if parse(name).without_ddp else NOOP, ([], None))
                knows = alone and not launched
                over_mpi = place.mpi is not None
                guess = (
                    predict(
                        name,
                        workload.model(),
                        alone,
                        link,
                        rates,
                        transport,
                        len(cores[0]),
                        ranks,
                        over_mpi=over_mpi,
                    )
                    if knows
                    else None
                )
                lower = workload.lower_is_better
                rows.append(
                    row_of(
                        name,
                        found.results,
                        base,
                        guess,
                        args.target,
                        lower=lower,
                        bits_per_s=link.bits_per_s,
                    )
                )
                if name in (NONE, NOOP):
                    without[name] = found.results, rows[-1]
            if args.json is not None and not mine:
                _write(args, cases)
        progress.update(bar, completed=len(names) * args.steps, description="done")


def _write(args: argparse.Namespace, cases: list[Case]) -> None:
    """Write what there is so far."""
    given = {name: value for name, value in vars(args).items() if name not in ("json", "data")}
    found = [asdict(case) for case in cases]
    save_json(args.json, benchmark="train", arguments=given, cases=found)


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)
