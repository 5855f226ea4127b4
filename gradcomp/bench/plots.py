"""Plots of all benchmarks: curves and bars, in matplotlib's default colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib.figure import Figure

Panel = tuple[str, Callable[[Any], None], float]  # title, function of a figure, height in inches
WIDTH, HEIGHT = 11.0, 4.0  # size of a panel, in inches


def lines(
    ax: Any, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], **settings: Any
) -> None:
    """Draw one curve for each entry of `series`: name in the legend, and x and y values."""
    for number, (name, (positions, values)) in enumerate(series.items()):
        style = ("-", "--", ":")[number // 10 % 3]  # ten colours
        ax.plot(positions, values, style, marker=".", label=name)
    ax.set(**settings)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def bars(ax: Any, rows: Mapping[str, Mapping[str, float]], xlabel: str) -> None:
    """Draw a stacked horizontal bar for each row, the first at the top, from its named parts."""
    places, starts = np.arange(len(rows)), np.zeros(len(rows))
    for part in dict.fromkeys(part for row in rows.values() for part in row):
        lengths = np.array([row.get(part, 0.0) for row in rows.values()])
        ax.barh(places, lengths, 0.8, left=starts, label=part)
        starts += lengths
    ax.set_yticks(places, list(rows))
    ax.use_sticky_edges = False  # otherwise the longest bar may end at the frame
    ax.set(xlim=(0, None), xlabel=xlabel, ylim=(len(rows) - 0.5, -0.5))
    ax.legend(fontsize=7)


def write(file: Path | IO[bytes], panels: Sequence[Panel], **options: Any) -> None:
    """Write panels below each other; a path's suffix determines the format, a stream gets PNG."""
    heights = [height + 0.3 for _, _, height in panels]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, (title, draw, _) in zip(parts, panels, strict=True):
        part.suptitle(title)
        draw(part)
    figure.savefig(file, dpi=100, **options)
