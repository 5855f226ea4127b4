"""Options of the benchmarks: one row each, and those that several benchmarks have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# default (or only its type), metavar (or the choices), help without the default
Option = tuple[Any, str | Iterable[str], str]
COMMON: dict[str, Option] = {
    "seeds": (3, "N", "trainings per method, with seeds 0 to N - 1"),
    "jobs": (os.cpu_count() or 1, "N", "trainings at a time, each on one core"),
    "json": (Path, "FILE", "write the measurements to this file"),
    "plot": (Path, "FILE", "draw the measurements into this file (PNG, SVG or PDF)"),
}


def add_options(
    parser: argparse.ArgumentParser, options: Mapping[str, Option], common: Iterable[str] = ()
) -> None:
    """Add options to a parser, and after them those of `COMMON` that are named.

    A list as default makes an option that takes several values. False makes a switch. A type in
    place of a default makes an option that may be missing (None): its help says what that means.

    Args:
        parser: of the benchmark.
        options: default, metavar or choices, and help of each, by name without dashes.
        common: names of rows of `COMMON`.
    """
    rows = {**options, **{name: COMMON[name] for name in common}}
    for name, (default, values, text) in rows.items():
        settings: dict[str, Any] = {"help": text}
        if default is False:
            settings["action"] = "store_true"
        elif isinstance(default, type):
            settings["type"] = default
        else:
            many = default if isinstance(default, list) else [default]
            settings |= {"nargs": "+"} if many is default else {}
            settings |= {"type": type(many[0]), "default": default}
            shown = (f"{one:g}" if isinstance(one, float) else str(one) for one in many)
            settings["help"] += f" (default: {' '.join(shown)})"
        if values:
            settings |= {"metavar": values} if isinstance(values, str) else {"choices": values}
        parser.add_argument(f"--{name}", **settings)
