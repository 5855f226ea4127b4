"""The planner's tables and its picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradcomp.bench.palette import color_of
from gradcomp.bench.plan_question import Question
from gradcomp.comm.rounds import ring_bytes
from gradcomp.plan.links import format_rate, format_seconds
from gradcomp.plan.predict import TIE, Prediction, Row

FLOOR_S = 1e-6


def print_prediction(console: Console, question: Question, found: Prediction) -> None:
    """Print what was assumed, seconds of every method, the fastest in detail, crossings and the recommendation."""
    work = question.workload
    scaling = "a node" if work.weak else "over all nodes"
    link = (
        "collectives as measured"
        if question.transport and math.isinf(question.link.bits_per_s)
        else f"link {question.link}"
    )
    lines = [
        f"{question.model.name}: {work.numel:,} parameters, {work.minibatch:g} samples a step {scaling}",
        f"computing {format_seconds(work.t_frame)} a sample ({question.model.sample})",
        f"update {format_seconds(work.t_update)}; {link}{'; double buffering' if question.double_buffering else ''}",
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for table in (seconds_table(found), fastest_table(question, found)):
        console.print()
        console.print(table)
    console.print()
    for line in crossing_lines(found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"[bold]{found.sentence}[/bold]", highlight=False, soft_wrap=True)


def seconds_table(found: Prediction) -> Table:
    """Return seconds a step by nodes and method, the fastest in bold."""
    table = Table(title="a step takes", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    table.add_column("nodes", justify="right", no_wrap=True)
    methods = list(dict.fromkeys(row.method.name for row in found.rows))
    for method in methods:
        table.add_column(method.replace(" ", "\n").replace("_", "_\n"), justify="right", no_wrap=True)
    for nodes, rows in _by_nodes(found).items():
        least = min(row.result.seconds for row in rows)
        cells = [format_seconds(row.result.seconds) for row in rows]
        table.add_row(
            str(nodes),
            *(
                f"[bold green]{cell}[/bold green]" if row.result.seconds == least and nodes > 1 else cell
                for cell, row in zip(cells, rows, strict=True)
            ),
        )
    return table


def fastest_table(question: Question, found: Prediction) -> Table:
    """Return where the time of the fastest method goes, by nodes."""
    waits = question.stragglers.any
    table = Table(
        title="where the time of the fastest goes",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    columns = ["nodes", "method", "compute", *(["waits"] if waits else []), "exposed", "hidden", "sent", "ratio"]
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for nodes, rows in _by_nodes(found).items():
        least = min(row.result.seconds for row in rows)
        row = next(row for row in rows if row.result.seconds <= (1 + TIE) * least)
        result = row.result
        halves = 2 if question.double_buffering else 1
        ratio = ring_bytes(question.workload.numel, nodes) * halves / result.sent_nbytes if result.sent_nbytes else 1.0
        table.add_row(
            str(nodes),
            row.method.name if nodes > 1 else "",
            format_seconds(result.compute_seconds),
            *([format_seconds(result.straggler_seconds)] if waits else []),
            format_seconds(result.exposed_seconds if result.exposed_seconds > FLOOR_S else 0),
            f"{result.hidden_share:.0%}" if nodes > 1 else "",
            f"{result.sent_nbytes / 1e6:.3g} MB" if nodes > 1 else "",
            f"{ratio:.1f}x" if nodes > 1 else "",
        )
    return table


def crossing_lines(found: Prediction) -> list[str]:
    """Return the crossings and the rate at which compression stops paying, a line each."""
    lines = [f"From {c.nodes} nodes {c.after} is the fastest, before it {c.before}." for c in found.crossings]
    even = found.break_even_bits_per_s
    if even is not None and 0 < even < float("inf"):
        lines.append(f"On {found.nodes} nodes fp32 is within 5 % of the best from {format_rate(even)} on.")
    return lines


def plot(question: Question, found: Prediction, path: Path) -> None:
    """Draw seconds a step over nodes, one line a method, crossings marked; the suffix of `path` decides the format."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(7.6, 4.8), dpi=140, layout="constrained")
    axes: Any = figure.subplots()
    rows_by_nodes = _by_nodes(found)
    counts = list(rows_by_nodes)
    for number, method in enumerate(dict.fromkeys(row.method.name for row in found.rows)):
        seconds = [rows[number].result.seconds for rows in rows_by_nodes.values()]
        chosen = method == found.method.name
        axes.plot(counts, seconds, "-" if chosen else "--" if "all_gather" in method else "-", color=color_of(method),
                  marker="o", markersize=4 if chosen else 3, linewidth=2.6 if chosen else 1.5, label=method,
                  zorder=3 if chosen else 2)  # fmt: skip
    computing = [rows[0].result.compute_seconds for rows in rows_by_nodes.values()]
    axes.fill_between(
        counts, computing, min(computing) / 2, color="#000000", alpha=0.06, linewidth=0, label="computing"
    )
    highest = axes.get_ylim()[1]
    axes.set(
        xscale="log", yscale="log", xlabel="nodes", ylabel="seconds a step", ylim=(min(computing) * 0.8, highest * 2)
    )
    for number, crossing in enumerate(found.crossings):
        axes.axvline(crossing.nodes, color="#888888", linewidth=0.9, linestyle=":", zorder=1)
        axes.annotate(
            f"from {crossing.nodes}: {crossing.after}",
            (crossing.nodes, 0.985 - 0.05 * number),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            color=color_of(crossing.after),
            va="top",
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8},
        )
    axes.xaxis.set_major_locator(FixedLocator(counts if len(counts) <= 14 else counts[:: -(-len(counts) // 14)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    halves = ", double buffering" if question.double_buffering else ""
    axes.set_title(f"{question.model.name}, {question.link} latency{halves}", fontsize=11, loc="left")
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
    figure.savefig(path)


def _by_nodes(found: Prediction) -> dict[int, list[Row]]:
    out: dict[int, list[Row]] = {}
    for row in found.rows:
        out.setdefault(row.result.nodes, []).append(row)
    return out
