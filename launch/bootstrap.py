"""Program of every rank: set the variables, run the user's program in a child process, and record
how it ended.

Run by path, ``python -m mpi4py .../bootstrap.py FOLDER (SCRIPT | -m MODULE) [ARG ...]``, so that a
rank imports gradcomp, and with it torch, only if its program does. The process that the MPI started
only watches the child, so it notices a kill -9 or an ``os._exit`` at once and knows the exact
status. mpirun returns the OR of all ranks' statuses (MPICH) or the status of one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from pathlib import Path
from typing import NoReturn

WATCHED = {signal.SIGCHLD, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT}
WATCHED |= {signal.SIGUSR1, signal.SIGUSR2}
PR_SET_PDEATHSIG = 1
MACHINERY = (__file__, runpy.__file__, "<frozen runpy>")


class Recorder:
    """Writer of a rank's records: "started", "stopped" (by the MPI, which ends every rank after a
    failure) and "ended"; none if this host lacks the folder.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.folder = Path(folder) if _is_private(folder) else None
        self.rank = rank
        self.owner = os.getpid()

    def write(self, kind: str, *, replace: bool = True, **fields: object) -> None:
        """Write one record atomically; a failure is only printed, so that the rank still runs."""
        if self.folder is None:
            return
        path = self.folder / f"{kind}.{self.rank}"
        if path.exists() and not replace:
            return
        fields |= {"rank": self.rank, "host": socket.gethostname(), "pid": self.owner}
        partial = self.folder / f".{path.name}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(fields | {"time_ns": time.time_ns()}), encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            print(f"gradcomp.launch: rank {self.rank} left no record: {error}", file=sys.stderr)
            if kind == "ended":  # a rank that started and left none counts as killed
                with contextlib.suppress(OSError):
                    (self.folder / f"started.{self.rank}").unlink(missing_ok=True)


def _is_private(folder: str) -> bool:
    try:
        found = os.stat(folder)
    except OSError:
        return False
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & 0o077


def pid_namespace() -> str:
    """Return a name of the namespace of this process's id, or "" if it is unknown."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def main() -> None:
    """Fork: the parent watches the child, and the child runs the program."""
    folder, program = sys.argv[1], sys.argv[2:]
    variables = runpy.run_path(str(Path(__file__).with_name("variables.py")))["environment"]()
    os.environ.update(variables)
    recorder = Recorder(folder, int(variables["RANK"]))
    libc, watcher = ctypes.CDLL(None), os.getpid()
    # a process that inherits an ignored SIGCHLD receives none
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    child = os.fork()
    if child:
        watch(child, recorder)
    os.setpgid(0, 0)  # else a signal to the group would arrive twice: directly and forwarded
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != watcher:
        os._exit(128 + signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    recorder.owner = os.getpid()
    recorder.write("started", watcher=watcher, namespace=pid_namespace())
    run(program, recorder)


def watch(child: int, recorder: Recorder) -> NoReturn:
    """Forward signals to the child, record its end unless the child did, and end the same way. The
    signals stay blocked, so none can end this process before it has written the record.
    """
    recorder.owner = child
    while True:
        received = signal.sigwaitinfo(WATCHED)
        ended, raw = os.waitpid(child, os.WNOHANG)  # it may have ended before another signal, too
        if ended:
            break
        if received.si_signo != signal.SIGCHLD:
            if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
                recorder.write("stopped", replace=False)
            os.kill(child, received.si_signo)
    code = os.waitstatus_to_exitcode(raw)
    status = code if code >= 0 else 128 - code
    recorder.write("ended", replace=False, status=status, signal=max(0, -code))
    if code:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    if code < 0:  # the MPI reports the signal: end by the same one, without a second core file
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(status)


def run(program: list[str], recorder: Recorder) -> None:
    """Run the program as ``__main__``, and record a failure before anything else can fail."""
    try:
        _execute(program)
    except BaseException as error:
        if os.getpid() != recorder.owner:  # a process forked by the program
            raise
        if isinstance(error, SystemExit):
            code = error.code  # as in Python: None is status 0, other objects are printed, 1
            status, text = (code & 0xFF, "") if isinstance(code, int) else (1, f"{code}\n")
            if code is not None and status:
                recorder.write("ended", status=status, signal=0, traceback=text)
            raise
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in MACHINERY:
            trace = trace.tb_next
        error.__traceback__ = trace
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        text = "".join(traceback.format_exception(error))
        recorder.write("ended", status=status, signal=0, traceback=text)
        sys.excepthook(type(error), error, trace)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        raise SystemExit(status) from None  # python -m mpi4py turns a status into MPI_Abort


def _execute(program: list[str]) -> None:
    is_module = program[0] == "-m"
    sys.argv[:] = program[1:] if is_module else program
    if os.path.realpath(sys.path[0]) == os.path.realpath(os.path.dirname(__file__)):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(program[0]))
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
