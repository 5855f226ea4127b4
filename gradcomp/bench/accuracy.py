"""What compression costs in accuracy: methods x optimizers x workloads, against fp32 and bf16, with
several seeds.

N ranks share a core and talk over loopback, so nothing but the time differs from a cluster. With
--link they are hosts with a link of this rate, so that the guard of auto finds a network that is
worth compressing for. Every tensor is compressed, however small, unless a method says otherwise.
Every finished run is a line of a file; a program that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradcomp.arguments import count
from gradcomp.bench import plots
from gradcomp.bench.about import save_json, table
from gradcomp.bench.hosts import Hosts, NoHosts
from gradcomp.bench.methods import DEFAULT, GRAMMAR, parse
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.options import Option, command_line
from gradcomp.bench.ranks import Place, RankFailed
from gradcomp.bench.sweep import Result, append, finished, key_of, run_all
from gradcomp.bench.trainer import Task
from gradcomp.bench.workloads import WORKLOADS, Workload, find
from gradcomp.plan.links import parse_link

CASE = ("workload", "optimizer", "workers", "steps")  # methods are compared within these fields
WITHIN = 0.05  # largest accepted loss of local steps, in nats or points
POINTS = 20  # tests per run, the points of its curve
EPILOG = f"""{GRAMMAR}
examples:
  python -m gradcomp.bench accuracy --data DIR --workloads gpt-1m --optimizers adamw --seeds 3
  python -m gradcomp.bench accuracy --data DIR --methods fp32 terngrad onebit --factors 0.5 1 2
"""


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    batch = "samples of a worker's minibatch (default: those of the workload)"
    link = "rate of the workers' links, as for bench train; one training at a time"
    within = "print the longest local steps (every=H) that cost less, in nats or points"
    options: dict[str, Option] = {
        "workloads": (["gpt-1m"], WORKLOADS, "models and data to train"),
        "optimizers": (["adamw"], OPTIMIZERS, "optimizers to train with"),
        "methods": (list(DEFAULT), "METHOD", "ways of exchanging gradients, listed below"),
        "workers": ([4], "N", "numbers of workers that average their gradients", count),
        "steps": (count, "N", "optimizer steps of each training (default: those of the workload)"),
        "batch": (count, "N", batch),
        "factors": ([1.0], "X", "factors of the workload's rate, which is a usual one for fp32"),
        "within": (WITHIN, "X", within),
        "link": (str, "RATE", f"{link} (default: loopback)"),
        "out": (Path("accuracy"), "DIR", "folder for runs.jsonl, accuracy.json, accuracy.png"),
    }
    out = command_line("accuracy", __doc__, EPILOG, options, ("seeds", "jobs"))
    text = "folder with prose.txt.gz, fashion-mnist/ and cifar10_jpeg.npz"
    out.add_argument("--data", type=Path, required=True, metavar="DIR", help=text)
    return out.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench accuracy` with these arguments; return the exit status."""
    args = read_options(argv)
    steps, batch = args.steps or 0, args.batch or 0
    tasks = [
        Task(workload, optimizer, method, workers, steps, factor, seed, batch)
        for seed in range(args.seeds)
        for workload, optimizer, workers, method, factor in itertools.product(
            args.workloads, args.optimizers, args.workers, args.methods, args.factors
        )
    ]
    given = {key: value for key, value in vars(args).items() if key not in ("data", "out", "jobs")}
    file = args.out / "accuracy.json"
    return run_and_show("accuracy", tasks, args.data, file, args.jobs, given, args.link)


def run_and_show(
    benchmark: str,
    tasks: Sequence[Task],
    data: Path,
    file: Path,
    processes: int,
    arguments: dict[str, Any],
    link: str | None = None,
) -> int:
    """Run the tasks that are not yet in ``runs.jsonl`` beside `file`, `processes` at a time; print
    tables, write `file` (JSON) and its plot (PNG).

    Tasks with 0 steps have as many as their workload; `arguments` are for the JSON file; `link` is
    the rate of links between hosts. Return the exit status: 1 a rank failed, 2 an impossible task.
    """
    lines = file.parent / "runs.jsonl"
    try:
        names = dict.fromkeys(task.workload for task in tasks)
        workloads = {name: find(name, data) for name in names}
        crcs = {name: workload.data_crc() for name, workload in workloads.items()}
        runs = [
            _completed(task, workloads[task.workload], data, crcs[task.workload], link or "")
            for task in tasks
        ]
        runs = [*dict.fromkeys(runs)]
        results = finished(lines, runs)
        file.parent.mkdir(parents=True, exist_ok=True)
        left = [task for task in runs if task not in results]
        for task, ranks, seconds in _run(left, processes, link):
            results[task] = _line(task, ranks[0], seconds)
            append(lines, results[task])
    except (NoHosts, ValueError, OSError, RankFailed) as error:
        print(f"gradcomp.bench {benchmark}: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankFailed) else 2
    rows = summarize([results[task] for task in runs])
    measures = {name: workload.measure for name, workload in workloads.items()}
    save_json(file, benchmark="accuracy", arguments=arguments, measures=measures, rows=rows)
    console, found = Console(), tables(rows, measures)
    panels = [panel for title, here, _ in found for panel in panels_of(title, here)]
    if panels:
        plots.write(file.with_suffix(".png"), panels)
    for title, _, shown in found:
        console.print(title, shown, sep="\n", highlight=False)
    for line in longest(rows, workloads, arguments.get("within", WITHIN)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"wrote {file}" + (f", {file.with_suffix('.png')}" if panels else ""))
    return 0


def _run(
    tasks: Sequence[Task], processes: int, link: str | None
) -> Iterator[tuple[Task, list[Result], float]]:
    """Run tasks over loopback, or in turn on hosts with links of a rate."""
    if link is None:
        yield from run_all(tasks, processes, spread=False)
        return
    for ranks in sorted({task.workers for task in tasks}):
        with Hosts(ranks, parse_link(link)) as hosts:
            own = [task for task in tasks if task.workers == ranks]
            yield from run_all(own, place=Place(ranks, hosts))


def _completed(task: Task, workload: Workload, data: Path, crc: str, link: str) -> Task:
    """Return a task with the settings of this benchmark; an impossible one is a ValueError."""
    workload.check(task.optimizer, task.workers)
    parse(task.method)
    steps = task.steps or workload.settings.steps
    task = replace(task, steps=steps, data=str(data), data_crc=crc, link=link)
    return replace(task, points=min(POINTS, steps), min_numel=0, stops=True)


def _line(task: Task, first: Result, seconds: float) -> Result:
    """Return the line of ``runs.jsonl`` for a run, from the result of rank 0."""
    sent = first["total_nbytes"]
    values = first["parameters"] * first["steps_done"] * 2 * (task.workers - 1) / task.workers
    return {
        **key_of(task),
        "measure": first.get("measure"),
        "curve": first["curve"],
        "sent_nbytes": sent,
        "bits": 8 * sent / values if sent is not None and values else None,
        "seconds": seconds,
        "described": first.get("described", ""),
    }


def summarize(results: Sequence[Result]) -> list[Result]:
    """Return one row for all seeds of each combination: mean and deviation of the measure, bits,
    and differences to fp32 and bf16.

    Differences are between means of runs with the same workload, optimizer, number of workers and
    steps; fp32 and bf16 have factor 1, fp32's usual learning rate.
    """
    rows: list[Result] = []
    for _, runs in grouped(results, (*CASE, "method", "factor")):
        ended = [float(run["measure"]) for run in runs if run["measure"] is not None]
        points = zip(*(run["curve"] for run in runs), strict=False)  # diverged runs are shorter
        rows.append(
            {
                **{name: runs[0][name] for name in (*CASE, "method", "factor", "bits")},
                "seeds": len(runs),
                "diverged": len(runs) - len(ended),
                "mean": statistics.fmean(ended) if ended else None,
                "deviation": statistics.stdev(ended) if len(ended) > 1 else None,
                "curve": [(at[0][0], statistics.fmean(run[2] for run in at)) for at in points],
            }
        )
    for _, here in grouped(rows, CASE):
        usual = {row["method"]: row["mean"] for row in here if row["factor"] == 1.0}
        for row, base in itertools.product(here, ("fp32", "bf16")):
            mean, other = row["mean"], usual.get(base)
            row[f"to_{base}"] = None if other is None or mean is None else mean - other
    return rows


def grouped(
    rows: Sequence[Result], names: Sequence[str]
) -> Iterable[tuple[tuple[Any, ...], list[Result]]]:
    """Return the rows grouped by their values of `names`: pairs of values and rows."""
    out: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        out.setdefault(tuple(row[name] for name in names), []).append(row)
    return out.items()


def tables(
    rows: Sequence[Result], measures: Mapping[str, str]
) -> list[tuple[str, list[Result], Table]]:
    """Return title, rows of `summarize` and table for each case; `measures` is by workload."""
    heads = ("method", "rate", "bits", "mean", "±", "to fp32", "to bf16", "seeds")
    out = []
    for (workload, optimizer, workers, steps), here in grouped(rows, CASE):
        title = f"{workload} under {optimizer}, {workers} workers, {steps} steps"
        title += f": {measures[workload]}" if workload in measures else ""
        out.append((title, here, table(heads, map(_cells, here))))
    return out


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = {"bits": ".2f", "mean": "#.4g", "deviation": "#.2g", "to_fp32": "+.3f"}
    kinds["to_bf16"] = kinds["to_fp32"]
    figures = ("-" if row[key] is None else f"{row[key]:{kind}}" for key, kind in kinds.items())
    seeds = str(row["seeds"]) + (f", {row['diverged']} diverged" if row["diverged"] else "")
    return row["method"], f"x {row['factor']:g}", *figures, seeds


def panels_of(title: str, rows: Sequence[Result]) -> list[plots.Panel]:
    """Return the plots of one table: the measure over bits sent, and the curves."""
    counted = [row for row in rows if row["bits"] and row["mean"] is not None]
    panels: list[plots.Panel] = []
    if len({row["bits"] for row in counted}) > 1:
        panels.append((title, partial(draw_bits, counted), plots.HEIGHT))
    if any(row["curve"] for row in rows):
        panels.append((title, partial(draw_curves, rows), plots.HEIGHT))
    return panels


def draw_bits(rows: Sequence[Mapping[str, Any]], figure: Any) -> None:
    """Draw mean and deviation of one table's measure over the bits sent per value."""
    ax = figure.subplots()
    for number, row in enumerate(sorted(rows, key=lambda row: row["bits"])):
        ax.errorbar(
            row["bits"],
            row["mean"],
            row["deviation"],
            fmt="os^D"[number // 10 % 4],  # ten colours
            capsize=3,
            label=label_of(row),
        )
    base = next((row["mean"] for row in rows if (row["method"], row["factor"]) == ("fp32", 1.0)), 0)
    if base:
        ax.axhline(base, color="gray", linewidth=0.8, linestyle="--")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set(xlabel="bits per value and phase", ylabel="measure")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def label_of(row: Mapping[str, Any]) -> str:
    """Return a row's name in a plot: its ``label``, if the file has one, or its method."""
    rate = "" if row["factor"] == 1.0 else f", rate x {row['factor']:g}"
    bits = "" if row["bits"] is None else f" ({row['bits']:.1f} bits)"
    return f"{row.get('label', row['method'])}{rate}{bits}"


def draw_curves(rows: Sequence[Mapping[str, Any]], figure: Any) -> None:
    """Draw the mean curve of every row of one table over steps."""
    curves = {}
    for row in (row for row in rows if row["curve"]):
        curves[label_of(row)] = (
            [point[0] for point in row["curve"]],
            [point[-1] for point in row["curve"]],
        )
    ax = figure.subplots()
    plots.lines(ax, curves, xlabel="step", ylabel="measure")
    ends = [values[-1] for _, values in curves.values()]
    if all(values[0] > values[-1] for _, values in curves.values()):  # a loss: show the ends
        ax.set_ylim(min(ends) - 0.05, max(ends) + 0.6)


def longest(
    rows: Sequence[Mapping[str, Any]], workloads: Mapping[str, Workload], within: float
) -> list[str]:
    """Return lines on the largest H of ``every=H`` that loses at most `within` against fp32."""
    local = []
    for row in rows:
        found = re.search(r"\bevery=(\d+)", row["method"])
        if found is not None and row["to_fp32"] is not None and not row["diverged"]:
            cost = row["to_fp32"] * (1 if workloads[row["workload"]].lower_is_better else -1)
            method = row["method"].replace(found[0], "every=H")
            local.append({**row, "method": method, "every": int(found[1]), "cost": cost})
    lines = []
    for case, family in grouped(local, (*CASE, "factor", "method")):
        workload, optimizer, workers, steps, _, method = case
        costs = {row["every"]: row["cost"] for row in family}
        near = max((h for h, cost in costs.items() if cost <= within), default="none")
        listed = ", ".join(f"{h} costs {cost:.3f}" for h, cost in sorted(costs.items()))
        lines.append(
            f"{method}, {workload} under {optimizer}, {workers} workers, {steps} steps: largest H"
            f" within {within:g} of fp32 every step: {near} ({listed})"
        )
    return lines
