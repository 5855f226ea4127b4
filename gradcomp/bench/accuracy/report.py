"""The table, the JSON and the curves of `bench accuracy`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gradcomp.bench import plots
from gradcomp.bench.about import table
from gradcomp.bench.accuracy.run import Job
from gradcomp.bench.workloads import Workload

WITHIN = 0.05  # nats or points that local steps may cost

Results = Mapping[Job, Mapping[str, Any]]


def summarize(results: Results) -> list[dict[str, Any]]:
    """Return a row for every combination but the seed: mean and deviation of the measure, bits,
    differences.

    The differences are of means, to fp32 and to bf16 with the same workload, optimizer, number of
    workers and steps; each at its factor of 1, the rate of fp32.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for job, result in results.items():
        groups.setdefault(
            (job.workload, job.optimizer, job.workers, job.steps, job.method, job.factor), []
        ).append(result)
    rows = []
    for (workload, optimizer, workers, steps, method, factor), runs in groups.items():
        ended = [float(r["measure"]) for r in runs if r["measure"] is not None]
        rows.append(
            {
                "workload": workload,
                "optimizer": optimizer,
                "workers": workers,
                "steps": steps,
                "method": method,
                "factor": factor,
                "bits": runs[0]["bits"],
                "seeds": len(runs),
                "diverged": len(runs) - len(ended),
                "mean": statistics.fmean(ended) if ended else None,
                "deviation": statistics.stdev(ended) if len(ended) > 1 else None,
                "curve": _mean_curve(runs),
            }
        )
    by_case = {(*_case(row), row["method"]): row["mean"] for row in rows if row["factor"] == 1.0}
    for row in rows:
        for base in ("fp32", "bf16"):
            other = by_case.get((*_case(row), base))
            row[f"to_{base}"] = (
                None if other is None or row["mean"] is None else row["mean"] - other
            )
    return rows


def _case(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["workload"], row["optimizer"], row["workers"], row["steps"]


def _mean_curve(runs: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    curves = [run["curve"] for run in runs]
    length = min(map(len, curves))
    return [(curves[0][i][0], statistics.fmean(c[i][2] for c in curves)) for i in range(length)]


def tables(
    rows: Sequence[dict[str, Any]], measures: Mapping[str, str]
) -> list[tuple[str, list[dict[str, Any]], Table]]:
    """Return a title, rows and a table for every workload, optimizer, number of workers and of
    steps.

    Args:
        rows: from `summarize`.
        measures: what is measured of a workload, for the titles.
    """
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(_case(row), []).append(row)
    out = []
    for (workload, optimizer, workers, steps), here in cases.items():
        title = f"{workload} under {optimizer}, {workers} workers, {steps} steps"
        title += f": {measures[workload]}" if workload in measures else ""
        heads = ("method", "rate", "bits", "mean", "±", "to fp32", "to bf16", "seeds")
        out.append((title, here, table(heads, map(_cells, here))))
    return out


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    kinds = {"mean": "#.4g", "deviation": "#.2g", "to_fp32": "+.3f", "to_bf16": "+.3f"}
    figures = ("-" if row[key] is None else f"{row[key]:{kind}}" for key, kind in kinds.items())
    seeds = str(row["seeds"]) + (f", {row['diverged']} diverged" if row["diverged"] else "")
    bits = "-" if row["bits"] is None else f"{row['bits']:.2f}"
    return row["method"], f"x {row['factor']:g}", bits, *figures, seeds


def draw_curves(rows: Sequence[Mapping[str, Any]], figure: Any) -> None:
    """Draw the mean curves of one table over steps."""
    curves = {}
    for row in (row for row in rows if row["curve"]):
        label = row["method"] + ("" if row["factor"] == 1.0 else f", rate x {row['factor']:g}")
        label += "" if row["bits"] is None else f" ({row['bits']:.1f} bits)"
        curves[label] = (
            [point[0] for point in row["curve"]],
            [point[-1] for point in row["curve"]],
        )
    ax = figure.subplots()
    plots.lines(ax, curves, xlabel="step", ylabel="measure")
    ends = [values[-1] for _, values in curves.values()]
    if all(values[0] > values[-1] for _, values in curves.values()):  # a loss; ends matter
        ax.set_ylim(min(ends) - 0.05, max(ends) + 0.6)


def longest(
    rows: Sequence[Mapping[str, Any]], workloads: Mapping[str, Workload], within: float
) -> list[str]:
    """Return, of methods that differ in ``every=H`` alone, a line each: the largest H that costs
    at most `within` to fp32 every step.
    """
    families: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in rows:
        found = re.search(r"\bevery=(\d+)", row["method"])
        if found is None or row["to_fp32"] is None or row["diverged"]:
            continue
        family = (*_case(row), row["factor"], row["method"].replace(found[0], "every=H"))
        families.setdefault(family, {})[int(found[1])] = row["to_fp32"] * (
            1 if workloads[row["workload"]].lower_is_better else -1
        )
    lines = []
    for (workload, optimizer, workers, steps, _, method), costs in families.items():
        near = max((h for h, cost in costs.items() if cost <= within), default=None)
        told = ", ".join(f"{h} costs {cost:.3f}" for h, cost in sorted(costs.items()))
        lines.append(
            f"{method}, {workload} under {optimizer}, {workers} workers, {steps} steps: largest H"
            f" within {within:g} of fp32 every step: {near or 'none'} ({told})"
        )
    return lines
