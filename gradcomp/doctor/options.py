"""Command line of the doctor."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradcomp.arguments import Parser, check_number, count, counts, to_write
from gradcomp.plan.accuracy import TOLERANCES, check_optimizer
from gradcomp.plan.links import parse_seconds

SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}
PARAMETERS = "a number of parameters such as 25000000, 25e6 or 25M"
EPILOG = """\
examples:
  this machine alone, and how to start it on several ranks:
    python -m gradcomp.doctor
  as you would start your training:
    torchrun --nnodes 2 --nproc-per-node 4 ... -m gradcomp.doctor
  under MPI:
    python -m gradcomp.launch -n 4 -m gradcomp.doctor
    srun -n 8 python -m gradcomp.doctor --parameters 1.3e9 --compute 0.8 --optimizer adamw
  for a script:
    python -m gradcomp.launch -n 4 -m gradcomp.doctor --json -
  a run that seems to hang, from another shell on its machine:
    python -m gradcomp.doctor --attach 4242,4243

Start it exactly as you start your training: the same launcher, the same variables, the same hosts.
Rank 0 prints. The exit status is 0 if all is well, 1 if something is wrong (every such line
begins with "wrong"), 2 for a command line that is not understood. Notes do not change it.
"""


def _number(
    what: str, low: float, high: float, ends: str = "[]", read: Callable[[str], float] = float
) -> Callable[[str], float]:
    """Return an argparse `type` that reads numbers in bounds; `what` is for the message."""

    def parse(text: str) -> float:
        try:
            return check_number(what, read(text), low, high, ends)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None

    return parse


def _duration(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError:
        return float(text)


def _count(text: str) -> float:
    scale = SUFFIXES.get(text[-1:].lower(), 1.0)
    return scale * float(text[:-1] if scale > 1 else text)


def _json(text: str) -> str | Path:
    return text if text == "-" else to_write(text)


def _optimizer(text: str) -> str:
    try:
        return check_optimizer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


# Groups of options: a title, then lines with name, placeholder (none for a switch) and help.
OPTIONS = """\
how it checks
--seconds S: longest time for all checks once all ranks have come, in seconds (default: 10)
--wait S: longest wait for ranks to come, in seconds; those that do not are named (default: 20)
--over {{auto,gloo,mpi}}: transport to check: gloo, mpi, or auto, which is MPI if an MPI started
    these ranks and gloo otherwise (default: auto)
--json FILE: write every number to this file, or to the standard output (-) in place of the text
--plain: use no colours, even on a terminal
--attach PIDS: check nothing; print what running ranks of this machine wait for, and how long: their
    process numbers, a list such as 4242,4243; Linux only (default: check)

your training, for the recommendation
--parameters N: number of parameters of your model, such as 124e6 or 124M (default: 25e6)
--compute SECONDS: seconds of forward and backward of a step on one rank (default: 0.1)
--optimizer NAME: optimizer of your training, such as adamw or sgd; codecs that lose accuracy under
    it are not recommended (default: adamw)
--tolerance NATS: largest loss over fp32 that is accepted, in nats (default: {nats})
--every H: also consider exchanges after H local steps (gradcomp.DiLoCo) (default: exchange at
    every step)

the timeouts that your script sets
--timeout S: timeout_s that your script gives to register or to the communicator, in seconds
    (default: that of the library)
--torch-timeout S: timeout that your script gives to init_process_group, in seconds (default: that
    of torch, 1800)
"""
TYPES: dict[str, Callable[[str], Any]] = {
    "S": _number("a number of seconds above 0, at most 1e6", 0.0, 1e6, "(]"),
    "FILE": _json,
    "N": _number(PARAMETERS, 1.0, 1e12, read=_count),
    "SECONDS": _number("a number of seconds from 0 to 1e6", 0.0, 1e6, read=_duration),
    "NAME": _optimizer,
    "NATS": _number("a loss in nats of at least 0", 0.0, 1e6),
    "H": count,
    "PIDS": counts,
}  # by placeholder; other values are strings


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the doctor's command line."""
    parser = Parser(
        prog="python -m gradcomp.doctor",
        description="Find out what is wrong with these ranks, their machines and their network, in"
        " ten seconds, and what to do about it.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_groups(OPTIONS.format(**TOLERANCES), TYPES)
    parser.set_defaults(
        seconds=10.0, wait=20.0, over="auto", parameters=25e6, compute=0.1, optimizer="adamw"
    )
    return parser


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; an invalid option ends the program with status 2."""
    return build_parser().parse_args(argv)


def agreed(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that must be the same on every rank."""
    return {name: value for name, value in vars(options).items() if name not in ("json", "plain")}
