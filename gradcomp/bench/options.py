"""Command lines of the benchmarks: options as rows of tables, and the common options."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gradcomp.arguments import Parser, count, to_write


def at_least(least: int) -> Callable[[str], int]:
    """Return a `type` for argparse that parses integers of at least `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        return int(text)

    return read


# default (or, without one, the parser of a value), metavar (or the choices), help without the
# default, and the parser of a value if it is not the default's type
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
    """Return the parser of ``python -m gradcomp.bench NAME``.

    The default of a row decides the kind of option. A list: the option accepts several values.
    False: a switch. A type or function that parses a value: no default, None if it is not given.
    `common` names rows of `COMMON` to add.
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
