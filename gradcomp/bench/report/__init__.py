"""One HTML page of the JSON files that benchmarks have left in a folder: tables, where a step's
time goes, bytes, curves over time.

The page needs nothing else: pictures are in it. A file that is no result of `bench train` or `bench
accuracy`, or was cut off while it was written, is named at the end with the reason, and the others
are shown.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradcomp.arguments import Parser
from gradcomp.bench.report import pictures
from gradcomp.bench.report.beside import write_beside
from gradcomp.bench.train.report import cells_of, number

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid #8886; } h3 { margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .55rem; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #8883; }
th:first-child, td:first-child { text-align: left; } .note { color: #888; font-size: .9rem; }
figure { margin: 1.5rem 0; background: #fff; border-radius: 6px; overflow-x: auto; }
figure svg { width: 100%; min-width: 44rem; height: auto; display: block; }
.failed { color: #c0392b; text-align: left; }
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    out = Parser(
        prog="python -m gradcomp.bench report",
        description=__doc__,
        epilog=(
            "example:\n  python -m gradcomp.bench train --link 100mbit 1gbit --json"
            " results/mlp.json && python -m gradcomp.bench report results"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="folder with JSON files of bench train and bench accuracy",
    )
    out.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write the page to (default: FOLDER/report.html)",
    )
    out.add_argument(
        "--beside",
        action="store_true",
        help="also write the rows of each file as NAME.csv and its picture as NAME.png",
    )
    return out


def main(argv: list[str]) -> int:
    """Run `python -m gradcomp.bench report` with these words; return the exit status: 1 if
    nothing could be shown.
    """
    args = parser().parse_args(argv)
    files = sorted(args.folder.glob("*.json")) if args.folder.is_dir() else []
    if not files:
        print(
            f"gradcomp.bench report: no .json files in {args.folder}: write some with --json of"
            " bench train",
            file=sys.stderr,
        )
        return 2
    text, shown, skipped = page(files)
    if args.beside:
        for file in files:
            if file.name not in dict(skipped):
                write_beside(file)
    out = args.out or args.folder / "report.html"
    out.write_text(text, encoding="utf-8")
    for name, why in skipped:
        print(f"left out {name}: {why}", file=sys.stderr)
    print(f"wrote {out}: {shown} of {len(files)} files")
    return 0 if shown else 1


def page(files: Sequence[Path]) -> tuple[str, int, list[tuple[str, str]]]:
    """Return the page, how many files it shows, and (name, why not) of the others."""
    parts: list[str] = []
    skipped: list[tuple[str, str]] = []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            section = _section_of(found)(found)
            parts.append(f"<h2>{html.escape(file.stem)}</h2>\n{section}")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
            skipped.append((file.name, str(error) or type(error).__name__))
    left = "".join(f"<li>{html.escape(name)}: {html.escape(why)}</li>" for name, why in skipped)
    left = f"<h2>Left out</h2><ul>{left}</ul>" if left else ""
    head = (
        '<meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width"><title>gradcomp</title><style>{STYLE}</style>'
    )
    body = "\n".join(parts)
    return (
        (
            f"<!doctype html><html lang=en><head>{head}</head><body><h1>gradcomp:"
            f" results</h1>\n{body}{left}</body></html>\n"
        ),
        len(parts),
        skipped,
    )


def _section_of(found: Any) -> Callable[[Any], str]:
    if not isinstance(found, dict):
        raise ValueError("not a result of a benchmark")  # noqa: TRY004 - a file's content
    if found.get("benchmark") == "train" and "cases" in found:
        return _train
    if "rows" in found and found["rows"] and "bits" in found["rows"][0]:
        return _accuracy
    raise ValueError("not a result of bench train or bench accuracy, or one of an older version")


# ---- bench train
# --------------------------------------------------------------------------------------------------


def _train(found: dict[str, Any]) -> str:
    machine, given = found["machine"], found["arguments"]
    about = (
        f"{given['workload']}, {given['steps']} steps; {machine['processor']}, {machine['cores']}"
        f" cores, torch {machine['torch']}"
    )
    out = [f'<p class="note">{html.escape(about)}</p>']
    for case in found["cases"]:
        delay = f", {1e3 * case['latency_s']:g} ms" if case["latency_s"] else ""
        over = ", over MPI" if case.get("over") == "mpi" else ""
        out.append(f"<h3>{case['ranks']} ranks, {html.escape(case['link'])}{delay}{over}</h3>")
        good = [row for row in case["rows"] if not row.get("failed")]
        out.append(_train_table(case["rows"]))
        if pictures.has_steps(good):
            out.append(pictures.svg(pictures.draw_steps, good, pictures.height_of(good)))
        if any(row["curve"] for row in good):
            out.append(pictures.svg(pictures.draw_times, good))
    return "\n".join(out)


def _train_table(rows: Sequence[dict[str, Any]]) -> str:
    measure = "measure" if any(row.get("measure") is not None for row in rows) else ""
    target = "s to target" if any(row.get("target_seconds") is not None for row in rows) else ""
    heads, body = cells_of(rows, measure, target)
    why = {row["method"]: row["failed"] for row in rows if row.get("failed")}
    told = {
        name: f'<td class="failed" colspan="{len(heads) - 1}">{html.escape(text)}</td>'
        for name, text in why.items()
    }
    return _table(
        heads,
        [
            [name, told[name]] if name in told else [name, *[f"<td>{c}</td>" for c in cells]]
            for name, cells in body
        ],
    )


# ---- bench accuracy
# --------------------------------------------------------------------------------------------------


def _accuracy(found: dict[str, Any]) -> str:
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in found["rows"]:
        cases.setdefault(
            (row["workload"], row["optimizer"], row["workers"], row["steps"]), []
        ).append(row)
    out = []
    for (workload, optimizer, workers, steps), rows in cases.items():
        out.append(
            f"<h3>{html.escape(workload)} under {html.escape(optimizer)}, {workers} workers,"
            f" {steps:,} steps</h3>"
        )
        heads = ["method", "rate x", "bits", "seeds", "mean", "deviation", "to fp32", "to bf16"]
        body = []
        for row in rows:
            cells = [f"{row['factor']:g}", number(row["bits"], 1, ".1f"), str(row["seeds"])]
            cells += [number(row[name], 1, ".4g") for name in ("mean", "deviation")]
            cells += [number(row[name], 1, "+.4f") for name in ("to_fp32", "to_bf16")]
            body.append([row["method"], *[f"<td>{cell}</td>" for cell in cells]])
        out.append(_table(heads, body))
        if any(row["curve"] for row in rows):
            out.append(pictures.svg(pictures.draw_curves, rows))
    return "\n".join(out)


# ---- parts
# --------------------------------------------------------------------------------------------------


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(cells)}</tr>\n" for name, *cells in body
    )
    return (
        "<div"
        f' class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{rows}</tbody></table></div>'
    )
