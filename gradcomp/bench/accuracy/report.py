"""The table, the JSON and the curves of `bench accuracy`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

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
    rows: Sequence[Mapping[str, Any]], workloads: Mapping[str, Workload]
) -> list[tuple[str, Table]]:
    """Return a title and a table for every workload, optimizer, number of workers and of steps."""
    out: dict[tuple[Any, ...], Table] = {}
    for row in rows:
        case = _case(row)
        workload = case[0]
        if case not in out:
            out[case] = Table(box=box.SIMPLE)
            for column in ("method", "rate", "bits", "mean", "±", "to fp32", "to bf16", "seeds"):
                out[case].add_column(
                    column,
                    justify="left" if column == "method" else "right",
                    no_wrap=column != "method",
                    overflow="fold",
                )
        places = 3 if workloads[workload].lower_is_better else 2
        cells = [_cell(row[key], places) for key in ("mean", "deviation")]
        signed = [_cell(row[key], places, sign="+") for key in ("to_fp32", "to_bf16")]
        seeds = str(row["seeds"]) + (f", {row['diverged']} diverged" if row["diverged"] else "")
        out[case].add_row(
            row["method"], f"x {row['factor']:g}", f"{row['bits']:.2f}", *cells, *signed, seeds
        )
    titles = [f"{case[0]} under {case[1]}, {case[2]} workers, {case[3]} steps: " for case in out]
    return [
        (t + workloads[case[0]].measure, table)
        for t, (case, table) in zip(titles, out.items(), strict=True)
    ]


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


def _cell(value: float | None, places: int, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.{places}f}"


def plot(rows: Sequence[Mapping[str, Any]], workloads: Mapping[str, Workload], file: Path) -> None:
    """Draw the mean curves, one panel for every table."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(_case(row) for row in rows))
    figure, axes = pyplot.subplots(
        len(cases), 1, figsize=(9, 4.5 * len(cases)), squeeze=False, layout="constrained"
    )
    for axis, case in zip(axes[:, 0], cases, strict=True):
        shown = [row for row in rows if _case(row) == case and row["curve"]]
        for row in shown:
            label = row["method"] + ("" if row["factor"] == 1.0 else f", rate x {row['factor']:g}")
            axis.plot(*zip(*row["curve"]), label=f"{label} ({row['bits']:.1f} bits)")
        axis.set_title(f"{case[0]} under {case[1]}, {case[2]} workers")
        axis.set_xlabel("step")
        axis.set_ylabel(workloads[case[0]].measure)
        ends = [row["curve"][-1][1] for row in shown]
        if ends and workloads[case[0]].lower_is_better:
            axis.set_ylim(min(ends) - 0.05, max(ends) + 0.6)
        axis.legend(fontsize="small")
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
