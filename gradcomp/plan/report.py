"""The planner's tables, its picture and its JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradcomp.comm.rounds import ring_bytes
from gradcomp.plan.accuracy import FAMILIES, Measured
from gradcomp.plan.costs import FP32_NBYTES, Method
from gradcomp.plan.links import Link, Node, format_rates, format_seconds
from gradcomp.plan.models import Model
from gradcomp.plan.predict import TIE, Prediction, Row
from gradcomp.plan.rates import Rates
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.workload import ALONE, Stragglers, Transport, Workload

FLOOR_S = 1e-6
SAMPLE = 1_000_000  # values
SHORT = {FAMILIES["adam"]: "AdamW", FAMILIES["sgd"]: "SGD"}  # heads of columns: what was measured


@dataclass(frozen=True)
class Question:
    """A command line, understood."""

    model: Model
    workload: Workload
    link: Link
    nodes: list[int]
    methods: list[Method]
    stragglers: Stragglers
    rates: Rates | None
    cores: float
    double_buffering: bool
    transport: Transport | None = None
    tolerance: Tolerance = field(default_factory=Tolerance)
    node: Node = ALONE
    by_seconds: bool = False


def print_prediction(console: Console, question: Question, found: Prediction) -> None:
    """Print what was assumed, seconds of every method, the fastest in detail, crossings and the
    recommendation.
    """
    work = question.workload
    one = "node" if question.node.ranks == 1 else "rank"
    scaling = f"a {one}" if work.weak else "over all nodes"
    shared = (
        f"; {question.node.ranks} ranks a node, {question.node.inside} inside"
        if question.node.ranks > 1
        else ""
    )
    link = (
        "collectives as measured"
        if question.transport and math.isinf(question.link.bits_per_s)
        else f"link {question.link}"
    )
    lines = [
        (
            f"{question.model.name}: {work.numel:,} parameters, {work.minibatch:g} samples a step"
            f" {scaling}"
        ),
        f"computing {format_seconds(work.t_frame)} a sample ({question.model.sample})",
        (
            f"update {format_seconds(work.t_update)};"
            f" {link}{shared}{'; double buffering' if question.double_buffering else ''}"
        ),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    for table in (seconds_table(found), fastest_table(question, found)):
        console.print()
        # cells are never cut
        whole = console.measure(table, options=console.options.update(width=10_000)).maximum
        Console(file=console.file, width=max(console.width, whole)).print(table)
    console.print()
    for line in (*accuracy_lines(found), *spread_lines(found), *crossing_lines(found)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"[bold]{found.sentence}[/bold]", highlight=False, soft_wrap=True)


def seconds_table(found: Prediction) -> Table:
    """Return what is lost in accuracy and seconds a step by method and nodes, of every number of
    nodes the fastest in bold.
    """
    table = _table("a step takes, by nodes")
    table.add_column("", no_wrap=True)
    costs = [found.tolerance.costs(row.method) for row in found.rows]
    mixed = set()  # columns in nats and in points, whose cells name their unit
    for name in found.tolerance.columns:
        units = {row.training.unit for cost in costs if (row := cost[name]) is not None}
        mixed |= {name} if len(units) > 1 else set()
        table.add_column(
            "\n".join(("loss,", SHORT.get(name, name), *([] if len(units) > 1 else units))),
            justify="right",
            no_wrap=True,
        )
    by_nodes = _by_nodes(found)
    for nodes in by_nodes:
        table.add_column(str(nodes), justify="right", vertical="bottom", no_wrap=True)
    least = {nodes: min(row.result.seconds for row in rows) for nodes, rows in by_nodes.items()}
    for rows in zip(*by_nodes.values(), strict=True):
        method = rows[0].method
        cells = []
        for row in rows:
            cell, nodes = format_seconds(row.result.seconds), row.result.nodes
            cells.append(
                f"[bold green]{cell}[/bold green]"
                if row.result.seconds == least[nodes] and nodes > 1
                else cell
            )
        table.add_row(
            method.name,
            *(
                _cost(method, row, name in mixed)
                for name, row in found.tolerance.costs(method).items()
            ),
            *cells,
        )
    return table


def _table(title: str) -> Table:
    return Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )


def accuracy_lines(found: Prediction) -> list[str]:
    """Return where the losses were measured, and what options they need: a line each training."""
    lines: dict[str, dict[str, None]] = {}
    for row in found.rows:
        for cost in found.tolerance.costs(row.method).values():
            if cost is not None:
                how = f" with {cost.given()}" if cost.given() else ""
                but = f" (decides nothing: {cost.doubt})" if cost.doubt else ""
                lines.setdefault(str(cost.training), {})[
                    f"{cost.codec.name} {cost.cost}{how}{but}"
                ] = None
    known = [
        f"Loss over fp32 of {training}: {', '.join(costs)}." for training, costs in lines.items()
    ]
    if not all(row.method.keeps_loss for row in found.rows):
        known.append(
            '"-" was not measured; a loss is that of one model, not of yours'
            " (docs/explanation/accuracy.md)."
        )
    return known


def _cost(method: Method, row: Measured | None, with_unit: bool) -> str:
    if row is None:
        return "0" if method.codec is None and method.value_nbytes == FP32_NBYTES else "-"
    figure = f"{row.figure} {row.training.unit}" if with_unit else row.figure
    return figure if row.counts else f"({figure})"


def fastest_table(question: Question, found: Prediction) -> Table:
    """Return where the time of the fastest method goes, by nodes."""
    waits = question.stragglers.any
    some = len(found.permitted) < len(_methods(found))
    table = _table(
        f"where the time of the fastest {'that may be recommended ' if some else ''}goes"
    )
    shown = f"nodes method compute {'waits ' * waits}exposed hidden sent ratio"
    for name in shown.split():
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for nodes, everything in _by_nodes(found).items():
        rows = [row for row in everything if row.method.name in found.permitted]
        least = min(row.seconds for row in rows)
        row = next(row for row in rows if row.seconds <= (1 + TIE) * least)
        result = row.result
        halves = 2 if question.double_buffering else 1
        ratio = (
            ring_bytes(question.workload.numel, result.ranks) * halves / result.sent_nbytes
            if result.sent_nbytes
            else 1.0
        )
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


def spread_lines(found: Prediction) -> list[str]:
    """Return how far measurements of the codecs' CPU time differ, a line; none where they were
    not repeated.
    """
    chosen = [
        row.method
        for row in found.rows
        if row.method.name in found.permitted and row.method.compresses
    ]
    method = found.method if found.method.compresses else next(iter(chosen), None)
    if method is None or len(found.repeated) < 2:
        return []
    ranks = max(2, next(row.result.ranks for row in found.rows if row.result.nodes == found.nodes))
    owned = SAMPLE if method.exchange == "all_gather" else SAMPLE // ranks
    each = [sum(one.stage_seconds(method, ranks, SAMPLE, owned)) for one in found.repeated]
    least, most = format_seconds(min(each)), format_seconds(max(each))
    return [
        (
            f"Codecs were timed {len(each)} times here: {method.name} takes {least} to {most} a"
            " million values."
        )
    ]


def crossing_lines(found: Prediction) -> list[str]:
    """Return the crossings and the rate at which compression stops paying, a line each."""
    lines = [
        f"From {c.nodes} nodes {c.after} is the fastest, before it {c.before}."
        for c in found.crossings
    ]
    if found.break_even_range is not None:
        lines.append(
            f"On {found.nodes} nodes fp32 is within 5 % of the best from"
            f" {format_rates(*found.break_even_range)} on."
        )
    return lines


def plot(question: Question, found: Prediction, path: Path) -> None:
    """Draw seconds a step over nodes, one line a method, crossings marked; the suffix of `path`
    decides the format.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    figure = Figure(figsize=(7.6, 4.8), dpi=140, layout="constrained")
    axes: Any = figure.subplots()
    rows_by_nodes = _by_nodes(found)
    counts = list(rows_by_nodes)
    axes.set_prop_cycle(color=matplotlib.color_sequences["tab20"])
    colors = {}
    for number, method in enumerate(_methods(found)):
        seconds = [rows[number].result.seconds for rows in rows_by_nodes.values()]
        chosen = method == found.method.name
        style = "o--" if "all_gather" in method and not chosen else "o-"
        width, place = (2.6, 3) if chosen else (1.5, 2)
        (line,) = axes.plot(
            counts, seconds, style, markersize=3, linewidth=width, label=method, zorder=place
        )
        colors[method] = line.get_color()
    computing = [rows[0].result.compute_seconds for rows in rows_by_nodes.values()]
    axes.fill_between(
        counts, computing, min(computing) / 2, color="black", alpha=0.06, label="computing"
    )
    highest = axes.get_ylim()[1]
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="nodes",
        ylabel="seconds a step",
        ylim=(min(computing) * 0.8, highest * 2),
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
            color=colors[crossing.after],
            va="top",
            bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8},
        )
    axes.xaxis.set_major_locator(
        FixedLocator(counts if len(counts) <= 14 else counts[:: -(-len(counts) // 14)])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    halves = ", double buffering" if question.double_buffering else ""
    axes.set_title(
        f"{question.model.name}, {question.link} latency{halves}", fontsize=11, loc="left"
    )
    figure.legend(loc="outside right center", frameon=False, fontsize=8.5)
    figure.savefig(path)


def to_dict(question: Question, found: Prediction) -> dict[str, Any]:
    """Return every number of a prediction; what is infinite as the string "inf"."""
    work = question.workload
    return {
        "model": question.model.name,
        "numel": work.numel,
        "minibatch": work.minibatch,
        "weak": work.weak,
        "t_frame": work.t_frame,
        "t_update": work.t_update,
        "t_post": work.t_post,
        "bits_per_s": _finite(question.link.bits_per_s),
        "latency_s": question.link.latency_s,
        "ranks_per_node": question.node.ranks,
        "inside_bits_per_s": _finite(question.node.inside.bits_per_s),
        "stragglers": asdict(question.stragglers),
        "optimizer": found.tolerance.optimizer,
        "tolerances": dict(found.tolerance.limits),
        "losses": {row.method.name: _losses(found, row.method) for row in found.rows},
        "permitted": list(found.permitted),
        "rows": [{"method": row.method.name, **asdict(row.result)} for row in found.rows],
        "crossings": [asdict(c) for c in found.crossings],
        "crossing_lines": crossing_lines(found),
        "method": found.method.name,
        "nodes": found.nodes,
        "speedup": found.speedup,
        "break_even_bits_per_s": _finite(found.break_even_bits_per_s),
        "break_even_range": (
            found.break_even_range and [_finite(rate) for rate in found.break_even_range]
        ),
        "optimal_nodes": _finite(found.optimal_nodes),
        "recommendation": found.sentence,
        "rates": found.rates.to_dict(),
        "rates_repeated": [one.to_dict() for one in found.repeated],
    }


def _losses(found: Prediction, method: Method) -> dict[str, Any]:
    """Return what a method costs in accuracy, by optimizer; None: not measured."""
    return {
        name: (
            row
            and {
                "loss": row.loss,
                "unit": row.training.unit,
                "bits": row.bits,
                "precondition": row.precondition,
                "every": row.every,
                "start": row.start,
                "start_codec": row.start_codec.name if row.start_codec is not None else None,
                "measured": str(row.training),
                "seeds": row.training.seeds,
            }
        )
        for name, row in found.tolerance.costs(method).items()
    }


def _finite(value: float | None) -> float | str | None:
    return "inf" if value is not None and math.isinf(value) else value


def _by_nodes(found: Prediction) -> dict[int, list[Row]]:
    out: dict[int, list[Row]] = {}
    for row in found.rows:
        out.setdefault(row.result.nodes, []).append(row)
    return out


def _methods(found: Prediction) -> list[str]:
    return list(dict.fromkeys(row.method.name for row in found.rows))
