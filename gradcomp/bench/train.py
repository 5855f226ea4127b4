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
import importlib
import math
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from gradcomp.arguments import count, to_write
from gradcomp.bench import workloads
from gradcomp.bench.about import save_json
from gradcomp.bench.device import CPU, backend_of, find_device
from gradcomp.bench.hosts import INTERFACE, Hosts, NoHosts
from gradcomp.bench.measure import measure_methods
from gradcomp.bench.methods import DEFAULT, GRAMMAR, NONE, NOOP, parse
from gradcomp.bench.mpi import Mpiexec
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.options import at_least, command_line
from gradcomp.bench.predict import predict, shapes_of
from gradcomp.bench.ranks import Place, RankFailed, all_cores, cores_of, run
from gradcomp.bench.step_table import crossings, link_of, middle_rows, row_of, table_of
from gradcomp.bench.sweep import Result, run_all
from gradcomp.bench.trainer import Task
from gradcomp.bench.workloads import Workload
from gradcomp.plan.advice import AUTO
from gradcomp.plan.costs import find_method, plan_buckets
from gradcomp.plan.links import Link, parse_link
from gradcomp.plan.rates import Rates
from gradcomp.plan.workload import Transport

EPILOG = f"""{GRAMMAR}
workloads: {", ".join(workloads.WORKLOADS)}, random:N (N values without a task)

columns: step, p95     milliseconds of the slowest rank, median and 95th percentile
         exposed       what the exchange adds to a step: step less that of noop, DDP with a hook
                       that averages nothing (local steps and fsdp2: less that of none); with
                       --rounds, too, the least and the most of a round
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
  # two ranks that share one GPU, and a link of 1 Gbit/s between them
  python -m gradcomp.bench train --device cuda --hosts 2 --link 1gbit
"""

PAYLOAD_SHARE = 1448 / 1514  # payload share of a shaped link's rate, which counts TCP's headers


@dataclass
class Case:
    """Measured rows for one number of ranks and one link."""

    ranks: int
    link: str  # name of the link; "loopback" without hosts, "as it is" under a launcher
    device: str = ""  # name of rank 0's device, "" before a training has ended
    latency_s: float | None = None  # of the link between hosts; None without hosts
    loss: float = 0.0  # share of packets that are lost
    over: str = "gloo"  # transport of compressed bytes
    rows: list[dict[str, Any]] = field(default_factory=list)


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    hosts = "numbers of hosts to make on this machine, measured in turn; 0 stands for loopback"
    link = "rates of every host's link, measured in turn: 100mbit, 1gbit, or none for no limit"
    over = "transport of compressed bytes: gloo, or the MPI of mpi4py, whose mpiexec starts ranks"
    latency = "latency of every link, such as 20ms, by netem or in user space (default: none added)"
    loss = "share of packets that are lost on the way, in percent"
    data = "folder with prose.txt.gz, fashion-mnist/ and cifar10_jpeg.npz"
    optimizer = "optimizer to train with (default: sgd for images and mlp, adamw for text)"
    points = "tests during a training with --curve or --target, the last one at the end"
    device = "device that has model and minibatches: cpu, auto (this machine's accelerator, or the"
    device += " CPU without one), or an accelerator such as cuda; ranks take its devices in turn"
    rounds = "trainings with each method, in turn; each row shows the one in the middle"
    target = "accuracy or loss for which the seconds until it is reached are shown (default: none)"
    json = "write every number to this file, each row as soon as it is measured"
    options = {
        "hosts": ([2], "N", hosts),
        "ranks": (2, "N", "ranks to start with --hosts 0", at_least(2)),
        "link": (["1gbit"], "RATE", link),
        "over": ("gloo", ("gloo", "mpi"), over),
        "device": (CPU, "DEVICE", device),
        "latency": (str, "TIME", latency),
        "loss": (0.0, "PERCENT", loss),
        "workload": ("mlp", "NAME", "model and data to train, listed below"),
        "data": (Path(), "DIR", data),
        "optimizer": (str, OPTIMIZERS, optimizer),
        "methods": (list(DEFAULT), "METHOD", "ways of exchanging gradients, listed below"),
        "steps": (30, "N", "optimizer steps of each training", at_least(5)),
        "rounds": (1, "N", rounds, count),
        "batch": (count, "N", "samples of a rank's minibatch (default: those of the workload)"),
        "seed": (0, "N", "seed of weights and data"),
        "curve": (False, "", "test now and then and at the end, and show accuracy or loss"),
        "points": (10, "N", points, count),
        "target": (float, "X", target),
        "hang": (60.0, "S", "seconds of silence after which a method counts as hung"),
        "json": (to_write, "FILE", json),
    }
    return command_line("train", __doc__, EPILOG, options).parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 if a method failed, 2 if the run is impossible."""
    args = read_options(argv)
    launch = importlib.import_module("gradcomp.launch")
    job = launch.environment()
    launched = int(job["WORLD_SIZE"]) if int(job["WORLD_SIZE"]) > 1 else 0
    if launched:
        launch.export_environment()  # for the processes that each rank starts
    # turn SIGTERM into SystemExit, so that the hosts are removed
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    cases: list[Case] = []
    try:
        _check(args, launched)
        args.device = find_device(args.device)
        workload = workloads.find(args.workload, args.data, args.batch or 0)
        args.optimizer = args.optimizer or next(iter(workload.settings.rates))
        for case, link in _cases(args, launched):
            workload.check(args.optimizer, case.ranks)
            cases.append(case)
            with ExitStack() as made:
                hosts = made.enter_context(Hosts(case.ranks, link, case.loss)) if link else None
                mpi = made.enter_context(Mpiexec(hosts)) if args.over == "mpi" else None
                place = Place(case.ranks, hosts, mpi, bool(launched))
                place = replace(place, backend=backend_of(args.device))
                _run_case(args, workload, cases, place)
    except (NoHosts, ValueError, OSError) as error:
        print(f"gradcomp.bench train: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    if int(job["RANK"]) == 0:
        _show(args, workload, cases)
    return 1 if any(row.get("failed") for case in cases for row in case.rows) else 0


def _check(args: argparse.Namespace, launched: int) -> None:
    for name in args.methods:
        parse(name)
    if args.hosts != [0] and min(args.hosts) < 2:
        given = " ".join(map(str, args.hosts))
        raise ValueError(f"--hosts takes 0 or numbers of at least 2, got {given}")
    if not 0 <= args.loss < 100:
        raise ValueError(f"--loss must be a percentage from 0 to less than 100, got {args.loss:g}")
    if not args.hang > 0:
        raise ValueError(f"--hang must be more than 0, got {args.hang:g}")
    if launched and args.over == "mpi":
        raise ValueError(
            "--over mpi starts ranks itself: run it without a launcher, with --hosts N or --hosts 0"
        )


def _cases(args: argparse.Namespace, launched: int) -> list[tuple[Case, Link | None]]:
    """Return the cases to measure, each with the link of its hosts (None: without hosts)."""
    links = [(one, parse_link("inf" if one == "none" else one, args.latency)) for one in args.link]
    if launched:
        return [(Case(launched, "as it is"), None)]
    if args.hosts == [0]:
        return [(Case(args.ranks, "loopback", over=args.over), None)]
    return [
        (Case(count, name, "", link.latency_s, args.loss / 100, args.over), link)
        for count in args.hosts
        for name, link in links
    ]


def _run_case(
    args: argparse.Namespace, workload: Workload, cases: list[Case], place: Place
) -> None:
    """Run every method in one place, `args.rounds` times in turn; write the file after each row."""
    ranks, hosts = place.ranks, place.hosts
    rows: list[dict[str, Any]] = []
    link = Link(math.inf) if hosts is None else hosts.link
    payload = replace(link, bits_per_s=link.bits_per_s * PAYLOAD_SHARE)
    common = Task(
        args.workload,
        args.optimizer,
        NONE,
        ranks,
        args.steps,
        seed=args.seed,
        batch=args.batch or 0,
        data=str(args.data),
        interface="" if hosts is None else INTERFACE,
        over=args.over,
        device=args.device,
    )
    tested = (args.curve or args.target is not None) and bool(workload.measure)
    tasks = [common, replace(common, method=NOOP)]
    for name in dict.fromkeys(args.methods):
        if name not in (NONE, NOOP):
            tasks.append(replace(common, method=name, points=args.points if tested else 0))
    speed: dict[str, Any] = {} if place.launched else _measure(args, workload.model(), place)
    # results and row of `NONE` and `NOOP`, the steps without an exchange
    without: dict[str, tuple[list[Result], Result]] = {}
    failed: dict[Task, str] = {}
    tasks = [replace(task, round=number) for number in range(args.rounds) for task in tasks]
    for task, results, _ in run_all(tasks, place=place, hang_s=args.hang, failed=failed):
        name = task.method
        if task in failed:
            rows.append({"method": name, "failed": failed[task]})
        elif results:
            cases[-1].device = results[0]["device"]
            alone, base = without.get(NONE if parse(name).without_ddp else NOOP, ([], None))
            guess = None
            if alone and not place.launched:
                guess = predict(name, alone, workload.model(), payload, ranks=ranks, **speed)
            how: dict[str, Any] = {"lower": workload.lower_is_better, "bits_per_s": link.bits_per_s}
            rows.append(row_of(name, results, base, guess, args.target, **how))
            if name in (NONE, NOOP):
                without[name] = results, rows[-1]
        cases[-1].rows = middle_rows(rows)
        if not place.launched or os.environ["RANK"] == "0":
            given = {key: v for key, v in vars(args).items() if key not in ("json", "data")}
            found = [asdict(case) for case in cases]
            save_json(args.json, benchmark="train", arguments=given, cases=found)


def _measure(args: argparse.Namespace, model: nn.Module, place: Place) -> dict[str, Any]:
    """Return arguments of `predict`: rates and transport (measured over loopback), and cores."""
    found: list[Any] = []
    buckets = plan_buckets(find_method("fp32"), shapes_of(model), place.ranks)
    largest, here = max(bucket.numel for bucket in buckets), replace(place, hosts=None)
    words = args.methods, largest, args.over, args.device
    with suppress(RankFailed):
        run(here, measure_methods, *words, on_message=found.append, hang_s=args.hang)
    rates, transport = next(filter(None, found), (Rates(), Transport()))
    cores, over_mpi = len(cores_of(0, place.ranks)), args.over == "mpi"
    return {"rates": rates, "transport": transport, "cores": cores, "over_mpi": over_mpi}


def _show(args: argparse.Namespace, workload: Workload, cases: list[Case]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    measure = workload.measure if args.curve or args.target is not None else ""
    for case in cases:
        console.print(f"{args.workload}, {args.steps} steps, {_where(case)}")
        table = table_of(case.rows, measure, args.target)
        # widen the console if needed: lines wrap in a narrow terminal, but figures are not cut
        whole = Console(width=10_000).measure(table).maximum
        Console(width=max(console.width, whole)).print(table, highlight=False)
        for row in case.rows:
            if row.get("failed"):
                console.print(f"{row['method']}: {row['failed']}")
            elif row["method"].partition(":")[0] == AUTO:
                console.print(f"{row['method']}: {row['described']}")
    for line in crossings([(case.ranks, case.link, case.rows) for case in cases]):
        console.print(line)


def _where(case: Case) -> str:
    """Return the ranks and the link of a case as text."""
    hosts, have = case.latency_s is not None, len(all_cores())
    where = f"{case.ranks} {'hosts' if hosts else 'ranks'}, {link_of(asdict(case))}"
    where += f", on {case.device}" if case.device not in ("", CPU) else ""
    if (hosts or case.link == "loopback") and case.ranks > have:
        where += f"; they share {have} cores, so computing and codecs take longer than on hosts of"
        where += " their own"
    return where
