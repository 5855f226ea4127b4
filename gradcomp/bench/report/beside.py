"""The rows of a file of results as CSV, and its picture as PNG, for who reads neither JSON nor
HTML.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradcomp.bench.report import pictures


def write_beside(file: Path) -> None:
    """Write NAME.csv and NAME.png beside a NAME.json that the page shows."""
    found = json.loads(file.read_text(encoding="utf-8"))
    cases = _train_cases(found) if "cases" in found else _accuracy_cases(found)
    rows = [about | row for _, about, rows in cases for row in rows]
    _write_csv(rows, file.with_suffix(".csv"))
    panels = []
    for title, _, here in cases:
        good = [row for row in here if not row.get("failed")]
        if "cases" in found and pictures.has_steps(good):
            panels.append((title, pictures.draw_steps, good, pictures.height_of(good)))
        if any(row["curve"] for row in good):
            panels.append(
                (
                    title,
                    pictures.draw_times if "cases" in found else pictures.draw_curves,
                    good,
                    pictures.HEIGHT,
                )
            )
    if panels:
        pictures.write_png(panels, file.with_suffix(".png"))


def _train_cases(found: dict[str, Any]) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    workload = found["arguments"]["workload"]
    return [
        (
            (
                f"{workload}, {case['ranks']} ranks,"
                f" {case['link']}{', over MPI' if case.get('over') == 'mpi' else ''}"
            ),
            {"workload": workload, "ranks": case["ranks"], "link": case["link"]},
            case["rows"],
        )
        for case in found["cases"]
    ]


def _accuracy_cases(
    found: dict[str, Any],
) -> list[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cases.setdefault(
            f"{row['workload']} under {row['optimizer']}, {row['workers']} workers,"
            f" {row['steps']:,} steps",
            [],
        ).append(row)
    return [(title, {}, rows) for title, rows in cases.items()]


def _write_csv(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write rows without their curves; phases get columns of their own, what a row lacks is
    empty.
    """
    flat = []
    for row in rows:
        phases = {f"{name}_seconds": seconds for name, seconds in (row.get("phases") or {}).items()}
        flat.append(
            {name: value for name, value in row.items() if name not in ("curve", "phases")} | phases
        )
    heads = list(dict.fromkeys(name for row in flat for name in row))
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
