"""What every rank runs: set the variables, run the user's program in a child, record how it ended.

Run by path, ``python -m mpi4py .../bootstrap.py FOLDER (SCRIPT | -m MODULE) [ARG ...]``, so that a
rank does not import gradcomp, and torch with it, unless its program does. The process that the MPI
started only watches: it alone learns of a kill -9 or an ``os._exit`` at once and exactly, where
mpirun's own status is the OR of all ranks' (MPICH) or one of them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import runpy
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any

FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
PR_SET_PDEATHSIG = 1
MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")
MPI = "mpi4py.MPI"  # whose import initialises the MPI


class Recorder:
    """Writes a rank's ``started`` and ``ended`` records into the launcher's folder, where that
    exists on this host.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = Path(folder) if _is_private(folder) else None
        self.rank = rank
        self.owner = os.getpid()

    def write(self, kind: str, *, replace: bool = True, **fields: object) -> None:
        """Write one record whole or not at all; a rank without a record must still run."""
        if self.folder is None:
            return
        path = self.folder / f"{kind}.{self.rank}"
        if not replace and path.exists():
            return
        identity = {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": self.owner,
            "time_ns": time.time_ns(),
        }
        partial = self.folder / f".{kind}.{self.rank}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(identity | fields), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            print(f"gradcomp.launch: rank {self.rank} left no record: {error}", file=sys.stderr)


class SegmentsNoted(importlib.abc.MetaPathFinder):
    """Writes down, once, what shared memory this rank has mapped when its MPI is there: its next
    line may be its last.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.asks = self.is_done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return mpi4py's own spec with a loader that takes the note at its end; leave other
        modules to others.
        """
        if fullname != MPI or self.asks or self.is_done:
            return None
        self.asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.asks = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_note(module: Any) -> None:
                execute(module)
                self.is_done = True
                if module.Is_initialized():
                    self.note()
                else:  # mpi4py.rc.initialize = False
                    module.Init, module.Init_thread = (
                        self.noting(module.Init),
                        self.noting(module.Init_thread),
                    )

            spec.loader.exec_module = execute_and_note  # type: ignore[method-assign]
        return spec

    def noting(self, initialize: Callable[..., object]) -> Callable[..., object]:
        """Return a function that initialises, and takes the note."""

        @functools.wraps(initialize)
        def initialize_and_note(*arguments: object, **named: object) -> object:
            result = initialize(*arguments, **named)
            self.note()
            return result

        return initialize_and_note

    def note(self) -> None:
        """Take the note."""
        mapped_by = runpy.run_path(str(Path(__file__).with_name("segments.py")))["mapped_by"]
        self.recorder.write("segments", files=sorted(mapped_by(os.getpid())))


def _is_private(folder: str) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    )


def main() -> None:
    """Split into the watching parent and the child that runs the program."""
    folder, program = sys.argv[1], sys.argv[2:]
    variables: Mapping[str, str] = runpy.run_path(str(Path(__file__).with_name("variables.py")))[
        "environment"
    ]()
    os.environ.update(variables)
    recorder = Recorder(folder, int(variables["RANK"]))
    libc = ctypes.CDLL(None)
    watcher = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    child = os.fork()
    if child:
        watch(child, recorder)
    os.setpgid(
        0, 0
    )  # a signal to the whole group would reach the program twice: directly and forwarded
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != watcher:
            os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    recorder.owner = os.getpid()
    recorder.write("started")
    sys.meta_path.insert(0, SegmentsNoted(recorder))
    run(program, recorder)


def watch(child: int, recorder: Recorder) -> None:
    """Forward signals to the child, record its end unless it has done so itself, and end the
    same way.
    """

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    recorder.owner = child
    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(
        signal.SIG_BLOCK, FORWARDED
    )  # before the process id is given back; the MPI may be quick
    _, raw = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(raw)
    recorder.write(
        "ended", replace=False, status=code if code >= 0 else 128 - code, signal=max(0, -code)
    )
    if code:
        _kill_group(child)
    if code < 0:
        _die_of(-code)
    os._exit(code)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _die_of(number: int) -> None:
    """End by a signal, without a second core file, so that the MPI reports the rank's own end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def run(program: list[str], recorder: Recorder) -> None:
    """Run the program as ``__main__``; a failure is on record before anything else can go wrong."""
    try:
        _execute(program)
    except SystemExit as stop:
        status = exit_status(stop.code)
        if status and os.getpid() == recorder.owner:
            text = "" if isinstance(stop.code, int) else f"{stop.code}\n"
            recorder.write("ended", status=status, signal=0, traceback=text)
        raise
    except BaseException as error:
        if os.getpid() != recorder.owner:  # a fork of the program's own
            raise
        error.__traceback__ = user_frames(error.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        recorder.write(
            "ended", status=status, signal=0, traceback="".join(traceback.format_exception(error))
        )
        sys.excepthook(type(error), error, error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = (
            type(error),
            error,
            error.__traceback__,
        )  # as Python does
        raise SystemExit(status) from None  # python -m mpi4py turns a status into MPI_Abort


def _execute(program: list[str]) -> None:
    here = os.path.realpath(os.path.dirname(__file__))
    is_module = program[0] == "-m"
    sys.argv[:] = program[1:] if is_module else program
    if os.path.realpath(sys.path[0]) == here:
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program[0]))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


def exit_status(code: object) -> int:
    """Return what Python makes of ``SystemExit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that lead to the user's program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in MACHINERY:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
