"""Pictures of results: where a step's time goes, and what is learnt, over seconds or steps; as
SVG for the page or as a file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Rows = Sequence[dict[str, Any]]
Draw = Callable[[Any, Rows], None]
PHASES = {  # of `Stats.seconds`, by what they are
    "statistics": "#b3cde3",
    "encode": "#6497b1",
    "owner": "#005b96",
    "decode": "#03396c",
    "scale_round": "#fdd0a2",
    "first_phase": "#fd8d3c",
    "second_phase": "#d94801",
}
WAITING = ("scale_round", "first_phase", "second_phase")
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gradcomp",
    "font.family": "sans-serif",
    "font.size": 9,
}
WIDTH = 11.0
HEIGHT = 4.0


def has_steps(rows: Rows) -> bool:
    """Return whether `draw_steps` has something to draw."""
    return any(row["method"] == "none" for row in rows) and len(rows) > 1


def height_of(rows: Rows) -> float:
    """Return the height of a picture of bars, in inches."""
    return 1.2 + 0.36 * len(rows)


def svg(draw: Draw, rows: Rows, height: float = HEIGHT) -> str:
    """Return a picture for the page."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure, rows)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def write_png(panels: Sequence[tuple[str, Draw, Rows, float]], file: Path) -> None:
    """Write pictures below one another.

    Args:
        panels: (title, how to draw, rows, height in inches).
        file: to write.
    """
    with matplotlib.rc_context(SETTINGS):
        heights = [height + 0.3 for _, _, _, height in panels]
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        FigureCanvasAgg(figure)
        parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)
        for part, (title, draw, rows, _) in zip(parts[:, 0], panels, strict=True):
            part.suptitle(title)
            draw(part, rows)
        figure.savefig(file, dpi=100, metadata={"Software": None})


def draw_steps(figure: Any, rows: Rows) -> None:
    """Bars of computing, of DDP's copies and of what the exchange adds; beside them what codecs
    and waiting take, overlapped or not.
    """
    seconds = {row["method"]: row["seconds"] for row in rows}
    alone_ms = 1e3 * seconds["none"]
    copies_ms = max(0.0, 1e3 * seconds.get("noop", 0.0) - alone_ms)
    left, right = figure.subplots(1, 2, sharey=True)
    names = [row["method"] for row in rows][::-1]
    steps = [1e3 * row["seconds"] for row in rows][::-1]
    copies = [
        0.0 if name == "none" else min(copies_ms, max(0.0, step - alone_ms))
        for name, step in zip(names, steps, strict=True)
    ]
    exposed = [
        max(0.0, step - alone_ms - copied) for step, copied in zip(steps, copies, strict=True)
    ]
    left.barh(
        names, [min(alone_ms, step) for step in steps], color="#cccccc", label="the step alone"
    )
    left.barh(names, copies, left=alone_ms, color="#999999", label="DDP's copies")
    starts = [alone_ms + copied for copied in copies]
    left.barh(
        names,
        exposed,
        left=starts,
        color=[f"C{n % 10}" for n in range(len(rows))][::-1],
        label="exposed",
    )
    for axes in (left, right):
        axes.use_sticky_edges = False  # or the longest bar would end at the frame
        axes.margins(x=0.03)
    left.set_xlabel(
        "milliseconds a step: alone (light),\nDDP's copies (dark), exposed exchange (colours)"
    )
    starts = [0.0] * len(rows)
    for phase, color in PHASES.items():
        lengths = [1e3 * row["phases"].get(phase, 0.0) for row in rows][::-1]
        right.barh(
            names,
            lengths,
            left=starts,
            color=color,
            label=f"{phase}{' (waiting)' if phase in WAITING else ''}",
        )
        starts = [a + b for a, b in zip(starts, lengths, strict=True)]
    for axes in (left, right):
        axes.set_xlim(left=0)
    right.set_xlabel("milliseconds in codecs and waiting,\nslices and buckets overlap")
    right.legend(fontsize=7, loc="best")


def draw_times(figure: Any, rows: Rows) -> None:
    """Curves of the measure over seconds of training."""
    axes = figure.subplots()
    for number, row in enumerate(rows):  # in the colours of the bars
        if row["curve"]:
            times, values = ([point[place] for point in row["curve"]] for place in (1, 2))
            axes.plot(times, values, marker=".", color=f"C{number % 10}", label=row["method"])
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("measure")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_curves(figure: Any, rows: Rows) -> None:
    """Curves of the measure over steps."""
    axes = figure.subplots()
    for row in rows:
        if row["curve"]:
            axes.plot(
                [point[0] for point in row["curve"]],
                [point[-1] for point in row["curve"]],
                label=f"{row['method']} x {row['factor']:g}",
            )
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
