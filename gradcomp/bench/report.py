"""Show the JSON files of bench train and bench accuracy in a folder as one page: tables, where the
time of a step goes, bytes, and curves.

The page is HTML that contains its pictures and needs no network. A file that cannot be shown is
named at the end with the reason: not written by these benchmarks, or cut off while it was written.
"""

from __future__ import annotations

import argparse
import base64
import csv
import io
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from gradcomp.arguments import to_write
from gradcomp.bench import plots
from gradcomp.bench.accuracy import panels_of, tables
from gradcomp.bench.methods import NONE
from gradcomp.bench.options import Option, command_line
from gradcomp.bench.step_table import draw_steps, draw_times, link_of, table_of

PAGE = (
    "<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>gradcomp: results</title>"
    "</head><body>\n{}</body></html>\n"
)
PICTURE = '<p><img src="data:image/png;base64,{}" style="max-width: 100%"></p>\n'
WIDTH = 1000  # characters, so that no table of the page is cut


class Section(NamedTuple):
    """Part of the page: one table of a file, with notes and plots."""

    title: str
    table: Table
    notes: list[str]  # lines below the table
    rows: list[dict[str, Any]]  # for CSV
    panels: list[plots.Panel]  # plots


def read_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    page = "page to write; Markdown, with tables only, if it ends in .md"
    page += " (default: FOLDER/report.html)"
    beside = "also write the rows of each file as NAME.csv and its pictures as NAME.png"
    options: dict[str, Option] = {"out": (to_write, "FILE", page), "beside": (False, "", beside)}
    epilog = """example:
  python -m gradcomp.bench train --link 100mbit 1gbit --json results/mlp.json
  python -m gradcomp.bench report results
"""
    out = command_line("report", __doc__, epilog, options)
    text = "folder with JSON files of bench train and bench accuracy"
    out.add_argument("folder", type=Path, metavar="FOLDER", help=text)
    return out.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the benchmark; return 1 if no file could be shown, 2 if there is none."""
    args = read_options(argv)
    files = sorted(args.folder.glob("*.json")) if args.folder.is_dir() else []
    if not files:
        why = f"no .json files in {args.folder}: write some with --json of bench train"
        print(f"gradcomp.bench report: {why}", file=sys.stderr)
        return 2
    out = args.out or args.folder / "report.html"
    text, shown, skipped = page(files, markdown=out.suffix == ".md", beside=args.beside)
    out.write_text(text, encoding="utf-8")
    for name, why in skipped:
        print(f"left out {name}: {why}", file=sys.stderr)
    print(f"wrote {out}: {shown} of {len(files)} files")
    return 0 if shown else 1


def page(
    files: Sequence[Path], *, markdown: bool = False, beside: bool = False
) -> tuple[str, int, list[tuple[str, str]]]:
    """Return the page (HTML, or Markdown if `markdown`), the number of files that it shows, and
    (name, reason) for each other file. `beside` writes a CSV and a PNG file next to each file.
    """
    parts: list[str] = []
    skipped: list[tuple[str, str]] = []
    for file in files:
        try:
            sections = sections_of(json.loads(file.read_text(encoding="utf-8")))
            picture = io.BytesIO()
            if panels := [panel for section in sections for panel in section.panels]:
                plots.write(picture, panels, metadata={"Software": None})
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
            skipped.append((file.name, str(error) or type(error).__name__))
            continue
        parts.append(_text(file.stem, sections, markdown=markdown))
        if panels and not markdown:
            parts[-1] += PICTURE.format(base64.b64encode(picture.getvalue()).decode())
        if beside:
            _write_csv([row for section in sections for row in section.rows], file)
            if panels:
                file.with_suffix(".png").write_bytes(picture.getvalue())
    if skipped:
        left = [Section(f"left out {name}", Table(), [why], [], []) for name, why in skipped]
        parts.append(_text("Left out", left, markdown=markdown))
    text = "".join(parts)
    return text if markdown else PAGE.format(text), len(files) - len(skipped), skipped


def _text(head: str, sections: Sequence[Section], *, markdown: bool) -> str:
    """Return the tables and notes of a file under its heading, as HTML or Markdown."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), markup=False, highlight=False, emoji=False
    )
    marks = ("## ", "### ") if markdown else ("", "")
    console.print(f"{marks[0]}{head}", style="bold underline")
    for section in sections:
        console.print(f"\n{marks[1]}{section.title}\n", style="bold")
        if markdown:
            section.table.box = box.MARKDOWN
        if section.table.columns:
            console.print(section.table)
        for note in section.notes:
            console.print(note, soft_wrap=True)
    if markdown:
        return console.export_text() + "\n"
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>\n")


def _write_csv(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write rows to NAME.csv, without their curves and with a column for each phase."""
    flat = []
    for row in rows:
        phases = {f"{name}_seconds": seconds for name, seconds in (row.get("phases") or {}).items()}
        plain = {name: row[name] for name in row if name not in ("curve", "phases")}
        flat.append(plain | phases)
    heads = list(dict.fromkeys(name for row in flat for name in row))
    with file.with_suffix(".csv").open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, heads, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def sections_of(found: Any) -> list[Section]:
    """Return the sections of a file's content; ValueError for other files."""
    if isinstance(found, dict):
        if found.get("benchmark") == "train" and "cases" in found:
            return [_train(found, case) for case in found["cases"]]
        if found.get("rows") and "bits" in found["rows"][0]:
            cases = tables(found["rows"], found.get("measures", {}))
            return [
                Section(title, table, [], rows, panels_of(title, rows))
                for title, rows, table in cases
            ]
    raise ValueError("not a result of bench train or bench accuracy, or one of an older version")


def _train(found: dict[str, Any], case: dict[str, Any]) -> Section:
    machine, given, rows = found["machine"], found["arguments"], case["rows"]
    title = f"{given['workload']}, {given['steps']} steps, {case['ranks']} ranks, {link_of(case)}"
    good = [row for row in rows if not row.get("failed")]
    panels: list[plots.Panel] = []
    if any(row["curve"] for row in good):
        panels.append((title, partial(draw_times, good), plots.HEIGHT))
    if len(good) > 1 and any(row["method"] == NONE for row in good):
        panels.insert(0, (title, partial(draw_steps, good), 1.2 + 0.36 * len(good)))
    measure = "measure" if any(row.get("measure") is not None for row in rows) else ""
    notes = [f"{row['method']}: {row['failed']}" for row in rows if row.get("failed")]
    notes.append(f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}")
    about = {"workload": given["workload"], "ranks": case["ranks"], "link": case["link"]}
    table = table_of(rows, measure, given.get("target"))
    return Section(title, table, notes, [about | row for row in rows], panels)
