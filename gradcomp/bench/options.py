"""Command lines of the benchmarks: one row an option, and those that several have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradcomp.arguments import Parser, count, to_write


def at_least(least: int) -> Callable[[str], int]:
    """Return a `type` of argparse that reads integers of at least so much."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return read


# default (or only what reads a value), metavar (or the choices), help without the default, and what
# reads a value where that is not the default's type
Option = tuple[Any, ...]
COMMON: dict[str, Option] = {
    "seeds": (3, "N", "trainings per method, with seeds 0 to N - 1", count),
    "jobs": (os.cpu_count() or 1, "N", "trainings at a time, each on one core", count),
    "repeat": (9, "N", "repetitions of each measurement; shown is the median", count),
    "check": (False, "", "judge the limits: print pass or FAIL; exit with status 1 if one fails"),
    "json": (to_write, "FILE", "write the measurements to this file"),
    "plot": (to_write, "FILE", "draw the measurements into this file (PNG, SVG or PDF)"),
}


def command_line(
    name: str,
    description: str | None,
    epilog: str,
    options: Mapping[str, Option],
    common: Iterable[str] = (),
) -> Parser:
    """Return what reads the words after ``python -m gradcomp.bench NAME``.

    A list as default makes an option that takes several values. False makes a switch. A type or a
    function that reads a value in place of a default makes an option that may be missing (None):
    its help says what that means.

    Args:
        name: of the benchmark.
        description, epilog: for the help, before and after the options.
        options: rows, by name without dashes.
        common: names of rows of `COMMON`.
    """
    parser = Parser(prog=f"python -m gradcomp.bench {name}", description=description, epilog=epilog)
    rows = {**options, **{shared: COMMON[shared] for shared in common}}
    for option, (default, values, text, *reader) in rows.items():
        settings: dict[str, Any] = {"help": text}
        if default is False:
            settings["action"] = "store_true"
        elif callable(default):
            settings["type"] = default
        else:
            many = default if isinstance(default, list) else [default]
            settings |= {"nargs": "+"} if many is default else {}
            settings |= {"type": reader[0] if reader else type(many[0]), "default": default}
            shown = (f"{one:g}" if isinstance(one, float) else str(one) for one in many)
            settings["help"] += f" (default: {' '.join(shown)})"
        if values:
            settings |= {"metavar": values} if isinstance(values, str) else {"choices": values}
        parser.add_argument(f"--{option}", **settings)
    return parser
