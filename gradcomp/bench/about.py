"""Tables for a terminal, and result files that start with the machine and versions."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from gradcomp.files import replaced
from gradcomp.version import __version__


def about() -> dict[str, object]:
    """Return the first fields of a results file: "gradcomp" (its version), "date" and "machine"."""
    processor = platform.processor()
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE):
            processor = found[1]
    machine = {
        "processor": processor,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    today = datetime.date.today().isoformat()
    return {"gradcomp": __version__, "date": today, "machine": machine}


def save_json(file: Path | None, **found: Any) -> None:
    """Write `about` and the fields `found` to `file` as JSON, atomically; None writes nothing."""
    if file is None:
        return
    text = json.dumps({**about(), **found}, indent=1, allow_nan=False) + "\n"
    if file.exists() and not file.is_file():  # a device or a pipe, such as /dev/null
        file.write_text(text, encoding="utf-8")
        return
    with replaced(file.resolve()) as out:  # a symbolic link is kept
        out.write(text.encode())


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, **settings: Any
) -> Table:
    """Return a table for a terminal; a short row leaves its last columns empty.

    Columns after the first `left` are right-aligned, and their figures are never cut.
    """
    out = Table(box=box.SIMPLE_HEAD, **settings)
    for number, head in enumerate(heads):
        figures = number >= left
        out.add_column(
            head, justify="right" if figures else "left", no_wrap=figures, overflow="fold"
        )
    for row in rows:
        out.add_row(*row)
    return out
