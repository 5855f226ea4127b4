"""Train with several methods of exchange over links of a given rate: what a step takes, what is sent, what it learns.

With --hosts N the ranks run on N hosts that are made on this machine, network namespaces with shaped links (root, iproute2),
each on its share of the cores. With --hosts 0 they talk over loopback, where nothing is slow. A method that hangs or crashes is
a row that says so; the others finish.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gradcomp.bench.accuracy.optimizers import OPTIMIZERS
from gradcomp.bench.accuracy.workloads import Workload
from gradcomp.bench.train import methods, workloads
from gradcomp.bench.train.hosts import INTERFACE, Hosts, NoHosts
from gradcomp.bench.train.methods import NONE, NOOP
from gradcomp.bench.train.predict import predict
from gradcomp.bench.train.rank import Task
from gradcomp.bench.train.report import row_of, table_of
from gradcomp.bench.train.run import cores_of, measure, run_method
from gradcomp.plan.links import Link, parse_link

EPILOG = f"""
methods: {", ".join(m for m in methods.OTHERS if m not in (NONE, NOOP))}; codecs as of `bench accuracy` (ternary, onebit, block2, block4, block8,
  block2:precondition, ...); module:factory, a function that registers a hook of your own with a DDP model
workloads: {", ".join(workloads.WORKLOADS)}, random:N (N values without a task)

columns: step, p95     milliseconds of the slowest rank, median and 95th percentile
         exposed       what of it the same step without an exchange does not take
         planner       what gradcomp.plan expects, and how far off that is
         sent          bytes on the interface (--hosts) or counted by gradcomp, a step and rank
         CPU           of rank 0, exchange included; hidden: share of the exchange that backward hides

examples:
  python -m gradcomp.bench train --hosts 2 --link 1gbit --workload mlp
  python -m gradcomp.bench train --hosts 4 --link 100mbit --workload gpt-1m --data DIR --steps 200 --target 2.5
  python -m gradcomp.bench train --hosts 0 --workload lenet --data DIR --methods fp32 ternary powersgd4
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    out = argparse.ArgumentParser(
        prog="python -m gradcomp.bench train",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument("--hosts", type=int, default=2, metavar="N", help="to make on this machine (2); 0: loopback, --ranks of them")
    out.add_argument("--ranks", type=int, default=2, metavar="N", help="with --hosts 0 (2)")
    out.add_argument("--link", default="1gbit", metavar="RATE", help="of every host: 100mbit, 1gbit, 10gbit, or none (1gbit)")
    out.add_argument("--latency", metavar="TIME", help="of a link, such as 1ms; where the kernel has netem")
    out.add_argument("--workload", default="mlp", metavar="NAME", help="see below (mlp)")
    out.add_argument("--data", type=Path, default=Path(), metavar="DIR", help="folder with prose.txt.gz, fashion-mnist/, cifar10_jpeg.npz")
    out.add_argument("--optimizer", choices=OPTIMIZERS, help="(sgd for images and mlp, adamw for text)")
    out.add_argument("--methods", nargs="+", default=list(methods.DEFAULT), metavar="METHOD", help="see below (%(default)s)")
    out.add_argument("--steps", type=int, default=30, metavar="N", help="of a run (30)")
    out.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and data (0)")
    out.add_argument("--curve", action="store_true", help="test ten times, and at the end: accuracy or loss in the table")
    out.add_argument("--target", type=float, metavar="X", help="accuracy or loss whose time is wanted; with --curve's tests")
    out.add_argument("--hang", type=float, default=60.0, metavar="S", help="silence after which a method counts as hung (60)")
    out.add_argument("--json", type=Path, metavar="FILE", help="write every number, a row as soon as it is there")
    return out


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench train` with these words; return the exit status: 1 where a method failed."""
    args = parser().parse_args(argv)
    try:
        link = _link(args)
        for name in args.methods:
            methods.check(name)
        workload = workloads.find(args.workload, args.data)
    except (ValueError, FileNotFoundError) as error:
        print(f"gradcomp.bench train: {error}", file=sys.stderr)
        return 2
    ranks = args.hosts or args.ranks
    signal.signal(signal.SIGTERM, _stop)  # hosts are removed on the way out
    hosts = Hosts(args.hosts, link) if args.hosts else None
    console = Console()
    try:
        with hosts or contextlib.nullcontext():
            rows = _run_all(args, workload, hosts, link, ranks)
    except (NoHosts, ValueError) as error:
        print(f"gradcomp.bench train: {error}", file=sys.stderr)
        return 2
    have = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    where = f"{ranks} hosts, {args.link}" if hosts is not None else f"{ranks} ranks over loopback"
    if hosts is not None and args.latency:
        where += f", {args.latency}" if hosts.latency_s else " (no latency: this kernel has no netem)"
    shared = f"; {ranks} ranks share {have} cores, so computing and codecs take longer than on hosts of their own" * (ranks > have)
    console.print(f"{args.workload}, {args.steps} steps, {where}{shared}", highlight=False)
    measure = workload.measure if args.curve or args.target is not None else ""
    table = table_of(rows, measure, args.target)
    whole = Console(width=10_000).measure(table).maximum  # a narrow terminal wraps lines rather than cut figures
    Console(width=max(console.width, whole)).print(table, highlight=False)
    for row in rows:
        if row.get("failed"):
            console.print(f"{row['method']}: {row['failed']}", highlight=False, markup=False, soft_wrap=True)
    return 1 if any(row.get("failed") for row in rows) else 0


def _run_all(args: argparse.Namespace, workload: Workload, hosts: Hosts | None, link: Link, ranks: int) -> list[dict[str, Any]]:
    names = list(dict.fromkeys([NONE, NOOP, *args.methods]))
    optimizer = args.optimizer or workloads.OPTIMIZER.get(args.workload, "sgd" if args.workload.startswith("random") else "adamw")
    if optimizer not in workload.settings.rates:
        raise ValueError(f"{args.workload} has no rate for {optimizer}; it has {', '.join(workload.settings.rates)}")
    curve = (args.curve or args.target is not None) and bool(workload.measure)
    rows: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    none_s: float | None = None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("codecs' speed", total=len(names) * args.steps)
        cores = len(cores_of(0, ranks))
        rates, transport = measure(args.methods, ranks, args.hang)
        for number, name in enumerate(names):
            progress.update(bar, description=name, completed=number * args.steps)
            tasks = [
                Task(
                    name, args.workload, str(args.data), optimizer, args.steps, args.seed, curve and name not in (NONE, NOOP),
                    cores_of(rank, ranks), INTERFACE if hosts is not None else "",
                )
                for rank in range(ranks)
            ]  # fmt: skip
            found = run_method(
                tasks, hosts, args.hang, lambda step, first=number * args.steps: progress.update(bar, completed=first + step)  # type: ignore[misc]
            )
            if found.failed:
                rows.append({"method": name, "failed": found.failed})
            else:
                alone = found.results if name == NOOP else alone
                guess = predict(name, workload.model(), alone, link, rates, transport, cores, ranks) if alone else None
                rows.append(row_of(name, found.results, none_s, guess, args.target, lower=workload.lower_is_better))
                none_s = rows[-1]["seconds"] if name == NONE else none_s
            if args.json is not None:
                _write(args, rows, ranks, hosts)
        progress.update(bar, completed=len(names) * args.steps, description="done")
    return rows


def _link(args: argparse.Namespace) -> Link:
    if args.hosts < 0 or args.hosts == 1 or args.ranks < 2 or args.steps < 5 or not args.hang > 0:
        raise ValueError("--hosts takes 0 or at least 2, --ranks at least 2, --steps at least 5, --hang more than 0")
    return parse_link("inf" if args.link == "none" else args.link, args.latency)


def _write(args: argparse.Namespace, rows: list[dict[str, Any]], ranks: int, hosts: Hosts | None) -> None:
    """Write what there is so far; the file is always whole."""
    what = {name: value for name, value in vars(args).items() if name not in ("json", "data")}
    made = {
        "benchmark": "train",
        "arguments": what,
        "ranks": ranks,
        "latency_s": hosts.latency_s if hosts is not None else None,
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
    }
    text = json.dumps(made, indent=1, allow_nan=False, default=str)
    beside = args.json.with_name(args.json.name + ".new")
    beside.write_text(text + "\n", encoding="utf-8")
    beside.replace(args.json)


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)


