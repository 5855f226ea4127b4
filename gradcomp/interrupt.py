"""Ctrl-C ends ``python -m gradcomp.bench`` and ``python -m gradcomp.plan`` with one line and status
130, without a traceback.

Python imports a program's package before the program's own first line. That takes seconds where
torch is imported, too, so `begin` is the first thing that these packages do.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from typing import Any, NoReturn

STATUS = 130  # what shells report for a program that Ctrl-C ended
_PROGRAMS = ("gradcomp.bench", "gradcomp.plan")


def begin() -> None:
    """Let Ctrl-C end the process at once if it is one of these programs and still imports; else
    change nothing.
    """
    if sys.argv[:1] != ["-m"]:  # Python has found the program's file, or there is none
        return
    words = sys.orig_argv
    named = "-m" in words and words[words.index("-m") + 1] in _PROGRAMS
    if named and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def run(program: str, module: str, argv: list[str]) -> int:
    """Import the module of a program and return the exit status of its ``main(argv)``: 2 if a
    library that it needs is not installed, 130 after Ctrl-C.
    """
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "gradcomp":
            raise
        print(f"{program} needs {error.name}: pip install 'gradcomp[bench]'", file=sys.stderr)
        return 2
    # from here on there may be something to clean up
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status: int = main(argv)
    except KeyboardInterrupt:
        status = _report()
    return status


def leave(status: int) -> NoReturn:
    """End the program, after Ctrl-C without collecting torch's objects, which takes seconds on a
    busy machine.
    """
    if status == STATUS:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)


def _report() -> int:
    """Print that the program was interrupted; return its exit status."""
    os.write(2, b"interrupted\n")
    return STATUS


def _end(*_: Any) -> None:
    os._exit(_report())
