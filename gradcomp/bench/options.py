"""Options that several benchmarks have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {
    "seeds": {
        "type": int,
        "default": 3,
        "metavar": "N",
        "help": "trainings per method, with seeds 0 to N - 1 (default: %(default)s)",
    },
    "jobs": {
        "type": int,
        "default": os.cpu_count() or 1,
        "metavar": "N",
        "help": "trainings at a time, each on one core (default: the cores of this machine)",
    },
    "out": {"type": Path, "metavar": "DIR"},
    "json": {"type": Path, "metavar": "FILE", "help": "write the measurements to this file"},
    "plot": {
        "type": Path,
        "metavar": "FILE",
        "help": "draw the measurements into this file (PNG, SVG or PDF)",
    },
}


def add_option(parser: argparse.ArgumentParser, name: str, **changes: Any) -> None:
    """Add the option ``--name`` of `OPTIONS` to a parser.

    Args:
        parser: of the benchmark.
        name: a key of `OPTIONS`.
        **changes: arguments of `add_argument` that differ for this benchmark.
    """
    parser.add_argument(f"--{name}", **OPTIONS[name] | changes)
