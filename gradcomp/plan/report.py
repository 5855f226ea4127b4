"""Output of the planner: tables, plot and JSON."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from gradcomp.plan.accuracy import FAMILIES, Measured
from gradcomp.plan.costs import FP32_NBYTES, Method, label
from gradcomp.plan.links import format_rates, format_seconds, format_times
from gradcomp.plan.models import Model
from gradcomp.plan.predict import Prediction

FLOOR_S = 1e-6
SAMPLE = 1_000_000  # values
SHORT = {FAMILIES["adam"]: "AdamW", FAMILIES["sgd"]: "SGD"}  # column heads: measured optimizers


def print_prediction(console: Console, model: Model, found: Prediction) -> None:
    """Print the assumptions, the tables, the measured accuracy losses and the recommendation."""
    setting, work, node = found.setting, found.setting.workload, found.setting.node
    scaling = f"a {'node' if node.ranks == 1 else 'rank'}" if work.weak else "over all nodes"
    link = "collectives as measured" if setting.as_measured else f"link {setting.link}"
    inside = f"; {node.ranks} ranks a node, {node.inside} inside" if node.ranks > 1 else ""
    halves = "; double buffering" if setting.double_buffering else ""
    lines = [
        f"{model.name}: {work.numel:,} parameters, {work.minibatch:g} samples a step {scaling}",
        f"computing {format_seconds(work.t_frame)} a sample ({model.sample})",
        f"update {format_seconds(work.t_update)}; {link}{inside}{halves}",
    ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)
    for table in (seconds_table(found), fastest_table(found)):
        console.print()
        # widen the console if needed: cells are never cut
        whole = console.measure(table, options=console.options.update(width=10_000)).maximum
        Console(file=console.file, width=max(console.width, whole)).print(table)
    console.print()
    for line in (*accuracy_lines(found), *spread_lines(found), *crossing_lines(found)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"[bold]{found.sentence}[/bold]", highlight=False, soft_wrap=True)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], names: int) -> Table:
    """Return a table of right-aligned numbers; column `names` contains left-aligned names."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    for place, head in enumerate(heads):
        side: Any = "left" if place == names else "right"
        table.add_column(head, justify=side, vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def seconds_table(found: Prediction) -> Table:
    """Return the table of losses and seconds by method and nodes; the fastest are in bold."""
    costs = {method: found.tolerance.costs(method) for method in found.methods}
    heads, mixed = [""], set()  # columns in nats and in points, whose cells name their unit
    for name in found.tolerance.columns:
        units = {row.training.unit for cost in costs.values() if (row := cost[name]) is not None}
        mixed |= {name} if len(units) > 1 else set()
        heads.append("\n".join(("loss,", SHORT.get(name, name), *([] if name in mixed else units))))
    seconds = {(m, n): found.simulated(m, n).seconds for m in found.methods for n in found.counts}
    lines = []
    for method, cost in costs.items():
        cells = [_loss(method, row, with_unit=name in mixed) for name, row in cost.items()]
        for n in found.counts:
            least = n > 1 and seconds[method, n] == min(seconds[m, n] for m in found.methods)
            cells.append(f"{'[bold green]' if least else ''}{format_seconds(seconds[method, n])}")
        lines.append([method.name, *cells])
    return _table("a step takes, by nodes", [*heads, *map(str, found.counts)], lines, 0)


def _loss(method: Method, row: Measured | None, *, with_unit: bool) -> str:
    if row is None:
        return "0" if method.codec is None and method.value_nbytes == FP32_NBYTES else "-"
    figure = f"{row.figure} {row.training.unit}" if with_unit else row.figure
    return figure if row.counts else f"({figure})"


def fastest_table(found: Prediction) -> Table:
    """Return the table of the fastest method's time, split into its parts, by number of nodes."""
    waits, lines = found.setting.stragglers.any, []
    for n in found.counts:
        method = found.fastest(n)
        result = found.simulated(method, n)
        cells = [str(n), method.name, format_seconds(result.compute_seconds)]
        cells += [format_seconds(result.straggler_seconds)] if waits else []
        exposed = result.exposed_seconds
        cells += [format_seconds(exposed if exposed > FLOOR_S else 0), f"{result.hidden_share:.0%}"]
        cells += [f"{result.sent_nbytes / 1e6:.3g} MB", f"{found.setting.ratio(result):.1f}x"]
        if n == 1:  # nothing is exchanged
            cells[1], cells[-3:] = "", [""] * 3
        lines.append(cells)
    some = "that may be recommended " if len(found.candidates) < len(found.methods) else ""
    heads = f"nodes method compute {'waits ' * waits}exposed hidden sent ratio".split()
    return _table(f"where the time of the fastest {some}goes", heads, lines, 1)


def accuracy_lines(found: Prediction) -> list[str]:
    """Return one line for each training: its measured losses and the options that they need."""
    lines: dict[str, dict[str, None]] = {}
    for method in found.methods:
        for cost in found.tolerance.costs(method).values():
            if cost is not None:
                but = f" (decides nothing: {cost.doubt})" if cost.doubt else ""
                listed = lines.setdefault(str(cost.training), {})
                listed[f"{label(cost.codec)} {cost.price}{but}"] = None
    known = [f"Loss over fp32 of {where}: {', '.join(costs)}." for where, costs in lines.items()]
    if not all(method.keeps_loss for method in found.methods):
        known.append(
            '"-" was not measured; a loss is that of one model, not of yours'
            " (docs/explanation/accuracy.md)."
        )
    return known


def spread_lines(found: Prediction) -> list[str]:
    """Return a line on the spread of repeated timings of the codecs, or no line without repeats."""
    method = next((m for m in (found.method, *found.candidates) if m.compresses), None)
    if method is None or len(found.repeated) < 2:
        return []
    ranks = max(2, found.best.ranks)
    owned = SAMPLE if method.exchange == "all_gather" else SAMPLE // ranks
    each = [sum(one.stage_seconds(method, ranks, SAMPLE, owned)) for one in found.repeated]
    takes = f"{method.name} takes {format_times(each)} a million values"
    return [f"Codecs were timed {len(each)} times here: {takes}."]


def crossing_lines(found: Prediction) -> list[str]:
    """Return one line for each crossing, and one for the rate at which compression stops paying."""
    text = "From {} nodes {} is the fastest, before it {}."
    lines = [text.format(c.nodes, c.after, c.before) for c in found.crossings]
    if found.break_even_range is not None:
        rates = format_rates(*found.break_even_range)
        lines.append(f"On {found.nodes} nodes fp32 is within 5 % of the best from {rates} on.")
    return lines


def plot(model: Model, found: Prediction, path: Path) -> None:
    """Draw seconds per step over nodes by method, and crossings; the suffix is the format."""
    plots = importlib.import_module("gradcomp.bench.plots")  # a higher layer: no import at the top
    counts, methods, setting = found.counts, found.methods, found.setting
    series = {m.name: (counts, [found.simulated(m, n).seconds for n in counts]) for m in methods}
    computing = [found.simulated(methods[0], n).compute_seconds for n in counts]
    series["computing"] = counts, computing

    def draw(figure: Any) -> None:
        ax = figure.subplots()
        plots.lines(ax, series, xscale="log", yscale="log", xlabel="nodes", ylabel="seconds a step")
        ax.set_xticks(counts, counts, minor=False)
        ax.set_xticks([], minor=True)
        ax.yaxis.set_major_formatter(lambda seconds, _: format_seconds(seconds))
        for crossing in found.crossings:
            ax.axvline(crossing.nodes, color="#888888", linewidth=0.9, linestyle=":")
            label = f" from {crossing.nodes}: {crossing.after}"
            ax.text(crossing.nodes, ax.get_ylim()[1], label, fontsize=8, rotation=90, va="top")

    halves = ", double buffering" if setting.double_buffering else ""
    plots.write(path, [(f"{model.name}, {setting.link} latency{halves}", draw, 4.8)])


def to_dict(model: Model, found: Prediction) -> dict[str, Any]:
    """Return every number of a prediction for JSON; infinite numbers become the string "inf"."""
    setting, work = found.setting, found.setting.workload
    asked = ("numel", "minibatch", "weak", "t_frame", "t_update", "t_post")
    answers = ("permitted", "nodes", "speedup", "break_even_bits_per_s", "break_even_range")
    numbers = {
        "model": model.name,
        **{name: getattr(work, name) for name in asked},
        **asdict(setting.link),
        "ranks_per_node": setting.node.ranks,
        "inside_bits_per_s": setting.node.inside.bits_per_s,
        "stragglers": asdict(setting.stragglers),
        "optimizer": found.tolerance.optimizer,
        "tolerances": found.tolerance.limits,
        "losses": {method.name: _losses(found, method) for method in found.methods},
        "rows": [{"method": row.method.name, **asdict(row.result)} for row in found.rows],
        "crossings": [asdict(crossing) for crossing in found.crossings],
        "crossing_lines": crossing_lines(found),
        "method": found.method.name,
        **{name: getattr(found, name) for name in answers},
        "optimal_nodes": found.optimal_nodes,
        "recommendation": found.sentence,
        "rates": found.rates.to_dict(),
        "rates_repeated": [one.to_dict() for one in found.repeated],
    }
    plain: dict[str, Any] = json.loads(json.dumps(numbers), parse_constant=lambda _: "inf")
    return plain


def _losses(found: Prediction, method: Method) -> dict[str, Any]:
    """Return a method's accuracy losses by optimizer, as dictionaries; None: not measured."""
    return {
        name: row
        and {
            "loss": row.loss,
            "unit": row.training.unit,
            "bits": row.bits,
            "precondition": row.precondition,
            "every": row.every,
            "start": row.start,
            "warmup_codec": row.warmup_codec.name if row.warmup_codec is not None else None,
            "measured": str(row.training),
            "seeds": row.training.seeds,
        }
        for name, row in found.tolerance.costs(method).items()
    }
