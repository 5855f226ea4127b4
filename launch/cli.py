"""Command line of the launcher: parse it, prepare the ranks' variables, run the ranks, read their
records, and exit with the status of the rank that failed first.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from gradcomp.arguments import Parser, count

from . import mpirun
from .bootstrap import pid_namespace
from .mpirun import LaunchError, parse_hosts, read_hostfile
from .ports import free_port
from .supervise import is_dead, supervise
from .variables import first_node

NAME = "gradcomp.launch"
USAGE = "python -m gradcomp.launch -n RANKS [options] (SCRIPT | -m MODULE) [ARG ...]"
BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
NO_FOLDER = "-"
KILLED = "killed"  # file with the ranks whose watchers died first, and when that was noticed
# Open MPI (5, 4) names its session folder by process id only. A folder that a killed mpirun left in
# /tmp makes a later run fail with "PMIx server's listener thread failed to start".
SESSION_BASE = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")
BAD_USE = 2
EPILOG = """
examples:
  python -m gradcomp.launch -n 4 train.py --epochs 3      four ranks here, under the MPI there is
  python -m gradcomp.launch -n 4 -m package.train         the same for a module
  python -m gradcomp.launch -n 4 --torch train.py         under torchrun, without MPI
  python -m gradcomp.launch -n 8 -H node1:4,node2:4 train.py
  python -m gradcomp.launch -n 8 --hostfile hosts train.py
  python -m gradcomp.launch -n 4 --dry-run train.py       print the command and do nothing

Every rank has RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as
under torchrun. MASTER_ADDR and MASTER_PORT that are set already are kept. With more ranks than
cores here, OMP_NUM_THREADS is 1 unless it is set.

The exit status is that of the rank that failed first (128 + n after signal n). Its traceback is
printed last, and then one line with its rank, pid, host and error. Ctrl-C and SIGTERM end every
rank, with status 130 and 143; a second one at once. 2 means a wrong command line.

GRADCOMP_MPIRUN names the mpirun to use; otherwise it is the one beside this Python, then the
first on PATH.
"""


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (--help lists the options)")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; all words after the program are arguments of the program."""
    about = "Start a program as several ranks under an MPI or torchrun, and see them to their end."
    parser = _Parser(
        prog=f"python -m {NAME}", usage=USAGE, description=about, epilog=EPILOG, allow_abbrev=False
    )
    add, text = parser.add_argument, "number of ranks to start (required)"
    add("-n", dest="ranks", metavar="RANKS", type=count, required=True, help=text)
    add("-m", dest="module", action="store_true", help="run the program as a module, as python -m")
    where, text = parser.add_mutually_exclusive_group(), "where to start ranks, with how many there"
    text += " if you like: node1:4,node2:4 (default: this host)"
    parser.set_defaults(hosts=[])
    where.add_argument("-H", "--host", dest="hosts", metavar="A,B:4", type=parse_hosts, help=text)
    text = "file with one host a line: NAME, NAME:4 or NAME slots=4 (default: this host)"
    where.add_argument("--hostfile", dest="hosts", metavar="FILE", type=read_hostfile, help=text)
    text = "what each rank is bound to; none leaves torch's threads free (default: %(default)s)"
    add("--bind", choices=("none", "core", "socket"), default="none", help=text)
    add("--torch", action="store_true", help="use torchrun, on this host only, instead of an MPI")
    text = "seconds until ranks that do not end after a failure or a signal are killed"
    text += " (default: %(default)g)"
    add("--grace", metavar="SECONDS", type=_seconds, default=5.0, help=text)
    add("--dry-run", action="store_true", help="print the variables and the command; run nothing")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher and return the exit status."""
    try:
        options = build_parser().parse_args(arguments)
        program = _program(options)
        given = {key: text for key, text in os.environ.items() if not mpirun.STALE.fullmatch(key)}
        added = _added(options, given)
        command = _command(options, given | added)
    except LaunchError as error:
        _say(str(error))
        return BAD_USE
    if options.dry_run:
        shown = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        print(*shown, shlex.join([*command, NO_FOLDER, *program]))
        return 0
    folder = Path(tempfile.mkdtemp(prefix="gradcomp-launch-"))
    try:
        status, number = supervise(
            [*command, str(folder), *program],
            dict.fromkeys(SESSION_BASE, str(folder)) | given | added,
            grace_s=options.grace,
            has_failed=lambda: is_ending(folder),
        )
        if number:
            _say(f"stopped by {_signal_name(number)}; every process has ended")
            return 128 + number
        return _verdict(folder, status, Path(command[0]).name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr, flush=True)


def _program(options: argparse.Namespace) -> list[str]:
    """Return the program as arguments of the bootstrap, or raise LaunchError if it is missing."""
    words: list[str] = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not words:
        raise LaunchError(f"no program given: {USAGE}")
    if options.module:
        top = words[0].partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            raise LaunchError(f"module not found: {words[0]}")
        return ["-m", *words]
    if not Path(words[0]).exists():
        raise LaunchError(f"script not found: {words[0]}")
    return words


def _added(options: argparse.Namespace, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the command in addition to the `given` ones."""
    address = given.get("MASTER_ADDR") or _first_host(options, given)
    port = given.get("MASTER_PORT")
    if port and _is_taken(address, port):
        raise LaunchError(
            f"MASTER_PORT={port} is in use on {address}, perhaps by another job: set another, or"
            " unset it and a free one is taken"
        )
    added = {"MASTER_ADDR": address, "MASTER_PORT": port or str(free_port())}
    cores = len(os.sched_getaffinity(0))
    if not options.hosts and "OMP_NUM_THREADS" not in given and options.ranks > cores:
        added["OMP_NUM_THREADS"] = "1"
        _say(f"OMP_NUM_THREADS=1: {options.ranks} ranks on {cores} cores; set it to change that")
    return added


def _first_host(options: argparse.Namespace, given: Mapping[str, str]) -> str:
    """Return the name or address of rank 0's host, valid on all ranks."""
    if options.hosts:
        return str(options.hosts[0].partition(":")[0])
    nodes = given.get("SLURM_JOB_NODELIST")
    if nodes and given.get("SLURM_JOB_NUM_NODES", "1") != "1" and not options.torch:
        return first_node(nodes)  # the MPI starts ranks on all nodes of the allocation
    return "127.0.0.1"


def _is_taken(address: str, port: str) -> bool:
    """Return whether a process of this host listens there; False if that cannot be determined."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, int(port)), family=family).close()
    except (OSError, ValueError, OverflowError) as error:  # the ranks report an invalid port
        return getattr(error, "errno", None) == errno.EADDRINUSE
    return False


def _command(options: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Return the command line that starts the ranks, up to the bootstrap's own arguments."""
    if options.torch:
        if options.hosts or options.bind != "none":
            wrong = "leave out -H, --hostfile and --bind"
            raise LaunchError(f"--torch starts ranks on this host and binds none: {wrong}")
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
        meet = ["--master-addr", environ["MASTER_ADDR"], "--master-port", environ["MASTER_PORT"]]
        return [sys.executable, *start, *meet, str(BOOTSTRAP)]
    mpi = mpirun.identify(mpirun.find(sys.executable, environ), environ)
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError("mpi4py is not installed; install it with: pip install 'gradcomp[mpi]'")
    as_root = os.geteuid() == 0
    if as_root and mpi.flavour == "openmpi":
        risk = "which advises against it outside containers"
        _say(f"you are root: passing --allow-run-as-root to Open MPI, {risk}")
    forward = sorted(name for name in environ if mpirun.FORWARDED.fullmatch(name))
    start = mpirun.command(
        mpi, options.ranks, hosts=options.hosts, bind=options.bind, as_root=as_root, forward=forward
    )
    return [*start, sys.executable, "-m", "mpi4py", str(BOOTSTRAP)]


class Ended(NamedTuple):
    """Record of a rank's end. `status` is an exit status as in a shell: 128 + n after signal n."""

    rank: int
    host: str
    pid: int
    time_ns: int
    status: int
    signal: int
    traceback: str = ""


def failures(folder: Path) -> list[Ended]:
    """Return the records of ranks that did not end with status 0, by time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("ended.*")]
    records = [Ended(**json.loads(text)) for text in texts]
    return sorted((one for one in records if one.status), key=lambda record: record.time_ns)


def first_failure(folder: Path) -> Ended | None:
    """Return the record of the rank that failed first, or None if none failed by itself: after a
    failure the MPI stops the other ranks, by SIGTERM.
    """
    stopped = {
        _rank_of(path): json.loads(path.read_text(encoding="utf-8"))["time_ns"]
        for path in folder.glob("stopped.*")
    }
    for one in failures(folder):
        if one.signal == signal.SIGKILL or one.time_ns < stopped.get(one.rank, one.time_ns + 1):
            return one
    return None


def is_ending(folder: Path) -> bool:
    """Return whether a rank has failed, or the process that watched it was killed; note which ranks
    these were at first, and when. MPICH's mpirun does not end while a process that such a rank
    started is left.
    """
    note = folder / KILLED
    if not note.exists() and (lost := [*filter(_is_unwatched, folder.glob("started.*"))]):
        found = {"ranks": sorted(map(_rank_of, lost)), "time_ns": time.time_ns()}
        with contextlib.suppress(OSError):  # a full disk must not end ranks that run
            note.write_text(json.dumps(found), encoding="utf-8")
    return note.exists() or bool(failures(folder))


def _rank_of(record: Path) -> int:
    return int(record.suffix[1:])


def _is_unwatched(started: Path) -> bool:
    """Return whether a rank's watcher was killed. Otherwise it writes a record before it ends."""
    watcher = _watcher(started)
    return bool(watcher) and is_dead(watcher) and not started.with_stem("ended").exists()


@functools.cache
def _watcher(started: Path) -> int:
    """Return the id of the process that watches a rank; 0 if it cannot be seen from here."""
    record = json.loads(started.read_text(encoding="utf-8"))
    host, namespace = record["host"], record["namespace"]
    is_here = namespace and (host, namespace) == (socket.gethostname(), pid_namespace())
    return int(record["watcher"]) if is_here else 0


def _signal_name(number: int) -> str:
    """Return number and name of a signal as text, such as ``signal 9 (SIGKILL)``."""
    names = {known.value: f" ({known.name})" for known in signal.Signals}
    return f"signal {number}{names.get(number, '')}"


def _verdict(folder: Path, status: int, starter: str) -> int:
    """Print the first failure's traceback and, in the last line, why the ranks ended; return the
    exit status.
    """
    failure, note, lost = first_failure(folder), folder / KILLED, []
    with contextlib.suppress(OSError, ValueError):  # there is none, or the disk was full
        noted = json.loads(note.read_text(encoding="utf-8"))
        lost = noted["ranks"]  # others may have been killed because of these
        if failure and noted["time_ns"] < failure.time_ns:
            failure = None
    if failure is not None:
        killed = f"killed by {_signal_name(failure.signal)}, " if failure.signal else ""
        sys.stderr.write(failure.traceback)
        lines = failure.traceback.strip().splitlines()
        frames = [number for number, line in enumerate(lines) if line.startswith("  ")]
        error = "".join(lines[max(frames, default=-1) + 1 :][:1])  # its first line
        _say(
            f"rank {failure.rank} (pid {failure.pid} on {failure.host}) failed first: {killed}exit"
            f" status {failure.status}{f': {error}' if error else ''}"
        )
        return failure.status
    started, ended, stopped = (
        set(map(_rank_of, folder.glob(f"{kind}.*"))) for kind in ("started", "ended", "stopped")
    )
    lost = lost or sorted(started - ended - stopped)
    if not status and (others := failures(folder)):
        status = others[0].status
    if status and lost:
        # MPICH returns a signal's number without 128. Other numbers are statuses (of MPI_Abort):
        # only this signal ends a rank's first process before it has written a record.
        status += 128 if status == signal.SIGKILL else 0
        why = f"ranks {lost} were killed before they could say why"
    else:
        why = "no rank of this host failed: see its messages above"
    if status:
        _say(f"{starter} ended with status {status}; {why}")
    return status
