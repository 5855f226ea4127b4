"""Ctrl-C ends ``python -m gradcomp.bench`` and ``python -m gradcomp.plan`` with one line and status
130, without a traceback.

Python imports a program's package before it runs the program. That takes seconds if torch is
imported, too, so these packages call `begin` first.
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
    """Let Ctrl-C end the process at once while one of these programs is being imported; in other
    processes do nothing.
    """
    if sys.argv[:1] != ["-m"]:  # no program, or its imports are done
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
    # Ctrl-C raises KeyboardInterrupt again, so that the program can clean up
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        status: int = main(argv)
    except KeyboardInterrupt:
        status = _report()
    return status


def leave(status: int) -> NoReturn:
    """Exit with a status. After Ctrl-C, skip the garbage collection of torch's objects, which takes
    seconds on a busy machine.
    """
    if status == STATUS:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)


def _report() -> int:
    """Print "interrupted" to stderr; return the exit status."""
    os.write(2, b"interrupted\n")
    return STATUS


def _end(*_: Any) -> None:
    os._exit(_report())
