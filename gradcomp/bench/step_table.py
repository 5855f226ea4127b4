"""Table of ``bench train``: one row for each method, compared with a step without an exchange.

"Without an exchange" is DDP with a hook that averages nothing (row `NOOP`), because every row
includes DDP's copies into buckets and back.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from rich.table import Table

from gradcomp.bench import plots
from gradcomp.bench.about import table
from gradcomp.bench.methods import NONE, NOOP
from gradcomp.exchange.stats import OVERLAP

WAITING = ("scale_round", "first_phase", "second_phase")
PHASES = ("statistics", "encode", "owner", "decode", *WAITING)  # keys of `Stats.seconds`


def row_of(
    method: str,
    results: Sequence[dict[str, Any]],
    base: dict[str, Any] | None,
    predicted_s: float | None,
    target: float | None,
    *,
    lower: bool,
    bits_per_s: float = math.inf,
) -> dict[str, Any]:
    """Return a method's row from the results of all ranks: seconds of the slowest rank, as medians
    over steps (means if not every step has an exchange), and bytes of the rank that sends most.

    ``exchange_cpu_seconds`` is rank 0's CPU time of the exchange (codec, reduction, TCP in the
    kernel). ``bound_seconds`` is the larger of that and the link's time for the bytes: the smallest
    exposed time of an exchange that overlaps both completely, on a host with no idle cores. `base`
    is the row of a step without an exchange. `predicted_s`, the planner's seconds, and `target`, a
    measure to reach, may be None, too.
    """
    first = results[0]
    middle = statistics.fmean if first.get("rare") else statistics.median
    each = sorted(max(step) for step in zip(*(one["seconds"] for one in results), strict=True))
    seconds, cpu, phases = middle(each), middle(first["cpu_seconds"]), first["phases"]
    busy = sum(taken for name, taken in phases.items() if name not in OVERLAP)
    sent = [one["sent_nbytes"] for one in results if one["sent_nbytes"] is not None]
    sent_nbytes = max(sent, default=None)
    reached = [
        at
        for _, at, measure in first["curve"]
        if target is not None and (measure <= target if lower else measure >= target)
    ]
    exposed = exchange_cpu = bound = None
    if base is not None:
        exposed, exchange_cpu = seconds - base["seconds"], max(0.0, cpu - base["cpu_seconds"])
        bound = max(exchange_cpu, 8 * (sent_nbytes or 0) / bits_per_s)
    return {
        "method": method,
        "seconds": seconds,
        "p95_seconds": each[min(len(each) - 1, int(0.95 * len(each)))],
        "exposed_seconds": exposed,
        "bound_seconds": bound,
        "predicted_seconds": predicted_s,
        "sent_nbytes": sent_nbytes,
        "cpu_seconds": cpu,
        "exchange_cpu_seconds": exchange_cpu,
        "phases": phases,
        "hidden_share": min(1.0, phases.get("hidden", 0.0) / busy) if busy else None,
        "peak_nbytes": max(one["peak_nbytes"] for one in results),
        "measure": first.get("measure"),
        "curve": first["curve"],
        "target_seconds": reached[0] if reached else None,
        "described": first.get("described", ""),
    }


def middle_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each method: the one with the median exposed seconds (of two in the middle
    the smaller), with those of all its rows in ``exposed_rounds``, ascending; or one that failed.
    """
    out = []
    for method in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == method]
        row = next((row for row in own if row.get("failed")), None)
        if row is None:
            alone = own[0]["exposed_seconds"] is None
            own.sort(key=itemgetter("seconds" if alone else "exposed_seconds"))
            exposed = [] if alone else [one["exposed_seconds"] for one in own]
            row = own[(len(own) - 1) // 2] | {"exposed_rounds": exposed}
        out.append(row)
    return out


Row = Mapping[str, Any]
Cell = Callable[[Row, Row], str]


def _figure(field: str, factor: float, form: str, unit: str = "") -> Cell:
    """Return a function that formats a field of a row, "" for None."""
    return lambda row, _: "" if row[field] is None else f"{row[field] * factor:{form}}{unit}"


# head of every column and the function of its cells, of a row and fp32's row (empty if it failed)
COLUMNS: dict[str, Cell] = {
    "step, ms": _figure("seconds", 1e3, ".1f"),
    "p95": _figure("p95_seconds", 1e3, ".1f"),
    "exposed, ms": lambda row, _: _exposed(row),
    "fp32 / it": lambda row, fp32: _ratio(fp32.get("exposed_seconds"), row["exposed_seconds"]),
    "/ bound": lambda row, fp32: _ratio(row["exposed_seconds"], row.get("bound_seconds"), ".2f"),
    "planner": lambda row, fp32: _apart(row["predicted_seconds"], row["seconds"]),
    "sent, MB": _figure("sent_nbytes", 1e-6, ".3f"),
    "fp32's / it": lambda row, fp32: _ratio(fp32.get("sent_nbytes"), row["sent_nbytes"]),
    "CPU, ms": _figure("cpu_seconds", 1e3, ".1f"),
    "hidden": _figure("hidden_share", 100, ".0f", " %"),
    "peak, MB": _figure("peak_nbytes", 1e-6, ".0f"),
}
WITHOUT_EXCHANGE = ("step, ms", "p95", "CPU, ms", "hidden", "peak, MB")  # columns of NONE and NOOP


def table_of(rows: Sequence[Row], measure: str, target: float | None) -> Table:
    """Return a table of rows from `row_of`, or ``{"method": ..., "failed": ...}``; ratios are to
    fp32. `measure` heads the measure's column; "" and a `target` of None leave a column out.
    """
    good = [row for row in rows if not row.get("failed")]
    fp32: Row = next((row for row in good if row["method"] == "fp32"), {})
    columns = dict(COLUMNS)
    if measure:
        columns[measure] = _figure("measure", 1, ".4g")
    if target is not None:
        columns[f"s to {target:g}"] = _figure("target_seconds", 1, ".1f")
    cells = []
    for row in rows:
        shown = WITHOUT_EXCHANGE if row["method"] in (NONE, NOOP) else columns
        figures = ["failed"]
        if not row.get("failed"):
            figures = [cell(row, fp32) if head in shown else "" for head, cell in columns.items()]
        cells.append([row["method"], *figures])
    return table(["method", *columns], cells)


def link_of(case: Mapping[str, Any]) -> str:
    """Return the link of a case of ``bench train`` as text, with the transport if it is MPI."""
    text = str(case["link"])
    text += f", {1e3 * case['latency_s']:g} ms" if case["latency_s"] else ""
    text += f", {100 * case['loss']:g} % of packets lost" if case.get("loss") else ""
    return text + (", over MPI" if case.get("over") == "mpi" else "")


def crossings(cases: Sequence[tuple[int, str, Sequence[Row]]]) -> list[str]:
    """Return a line for each method and number of ranks: the slowest link where it does not pay."""
    out = []
    for ranks in dict.fromkeys(ranks for ranks, _, _ in cases):
        here = [
            (link, {row["method"]: row["seconds"] for row in rows if not row.get("failed")})
            for count, link, rows in cases
            if count == ranks
        ]
        here = [(link, seconds) for link, seconds in here if "fp32" in seconds]
        here.sort(key=lambda one: -one[1]["fp32"])
        names = dict.fromkeys(name for _, seconds in here for name in seconds)
        for name in names if len(here) > 1 else ():
            if name in (NONE, NOOP, "fp32"):
                continue
            known = {link: s["fp32"] / s[name] for link, s in here if name in s}
            lost = next((link for link, gain in known.items() if gain <= 1), None)
            gains = ", ".join(f"{gain:.2f}x at {link}" for link, gain in known.items())
            verdict = f"pays until {lost}" if lost else "pays on all of them"
            out.append(f"{ranks} ranks, {name}: {verdict} (whole step: {gains})")
    return out


def draw_steps(rows: Sequence[Row], figure: Any) -> None:
    """Draw the parts of each step's time, and of codecs and waiting; `rows` has that of `NONE`."""
    seconds = {row["method"]: row["seconds"] for row in rows}
    alone, copies = seconds[NONE], max(0.0, seconds.get(NOOP, 0.0) - seconds[NONE])
    steps, phases = {}, {}
    for row in rows:
        name, more = row["method"], max(0.0, row["seconds"] - alone)
        copied = 0.0 if name == NONE else min(copies, more)
        steps[name] = {
            "step alone": 1e3 * min(alone, row["seconds"]),
            "DDP's copies": 1e3 * copied,
            "exposed exchange": 1e3 * (more - copied),
        }
        phases[name] = {
            f"{phase}{' (waiting)' * (phase in WAITING)}": 1e3 * row["phases"].get(phase, 0.0)
            for phase in PHASES
        }
    left, right = figure.subplots(1, 2, sharey=True)
    plots.bars(left, steps, "milliseconds per step")
    plots.bars(right, phases, "milliseconds in codecs and waiting;\nslices and buckets overlap")


def draw_times(rows: Sequence[Row], figure: Any) -> None:
    """Draw the measure over the seconds of training, one curve for each method."""
    curves = {
        row["method"]: ([at for _, at, _ in row["curve"]], [value for *_, value in row["curve"]])
        for row in rows
        if row["curve"]
    }
    plots.lines(figure.subplots(), curves, xlabel="seconds of training", ylabel="measure")


def _exposed(row: Row) -> str:
    if row["exposed_seconds"] is None:
        return ""
    rounds = [1e3 * seconds for seconds in row.get("exposed_rounds", [])]
    between = f" ({rounds[0]:.0f} to {rounds[-1]:.0f})" if len(rounds) > 1 else ""
    return f"{1e3 * row['exposed_seconds']:.1f}{between}"


def _ratio(base: float | None, value: float | None, form: str = ".1f") -> str:
    return "" if not base or not value or min(base, value) <= 0 else f"{base / value:{form}}x"


def _apart(predicted: float | None, measured: float) -> str:
    return "" if predicted is None else f"{1e3 * predicted:.0f} ({predicted / measured - 1:+.0%})"
