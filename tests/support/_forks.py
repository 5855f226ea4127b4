"""Processes forked from one that has imported torch and gradcomp, which takes ten seconds.

All workers of a run have one server an environment (.venv, .venv-mpich, .venv-openmpi): the first
call of `start` starts it, and it ends when the pytest that it was started for does.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Listener, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

IMPORTED = [
    "torch._dynamo",
    "sklearn.datasets",
    "hypothesis.strategies",
    "gradcomp.ddp",
    "gradcomp.doctor.session",
    "gradcomp.onebit_sgd",
    "_ranks",
]
VARIABLE = "GRADCOMP_TEST_FORKS"  # a folder: where the server listens, its process, a lock
PATIENCE_S = 300  # until the server has imported
from_here = False  # whether forks are this process's own, with what was changed in it


def start(function, *args, imports=(), path=None):
    """Run function(*args) in a new process, which imports the function by name; return its id.

    Its parent imports the modules `imports` first, and keeps them for later ones. Where it finds
    modules is this process's path, or `path`; an empty one is its parent's.
    """
    key = bytes(multiprocessing.current_process().authkey)  # tensors that are sent back ask for it
    path = sys.path if path is None else path
    request = pickle.dumps((key, path, os.getcwd(), pickle.dumps((function, args))))
    if from_here:
        return os.fork() or run(request)
    with Client(address()) as server:
        server.send((imports, request))
        return server.recv()


def state_of(pid):
    """Return Linux's letter for what a process does, "Z" for one that has ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(pid):
    """Whether a process has not ended; one that nobody has waited for yet has."""
    return state_of(pid) != "Z"


def kill(pid):
    """End a fork and wait until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    while is_alive(pid):
        time.sleep(0.005)


def run(request):
    """Be the fork that was asked for; does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        key, path, folder, call = pickle.loads(request)
        sys.path[:] = path or sys.path
        multiprocessing.current_process().authkey = key
        os.chdir(folder)
        function, args = pickle.loads(call)
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Fork:
    """A program in a fork: it begins with everything imported, and ends as any other.

    Args:
        words: what stands behind "python": a script, "-m" and a module, or "-c" and a text, and
            arguments.
        streams: {the program's descriptor: the one that it is here}.
        environment: its variables; None: those of the server.
    """

    def __init__(self, words, streams, environment=None):
        self.returncode = None
        with (
            tempfile.TemporaryDirectory(prefix="gradcomp-test-") as folder,
            Listener(f"{folder}/holder") as listener,
        ):
            path = None if environment is None else []
            given = (list(map(str, words)), list(streams), environment)
            start(hold, listener.address, *given, path=path)
            self._holder = listener.accept()
        for stream in streams.values():
            send_handle(self._holder, stream, None)
        self.pid = self._holder.recv()

    def wait(self, timeout=None):
        """Return the exit status, negative for a signal."""
        if self.returncode is None:
            if not self._holder.poll(timeout):
                raise subprocess.TimeoutExpired("a program in a fork", timeout)
            self.returncode = self._holder.recv()
        return self.returncode

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        if self.returncode is None and not self._holder.poll():
            self.send_signal(signal.SIGKILL)


class Program(Fork):
    """A script in a fork, with what tests use of `subprocess.Popen`."""

    def __init__(self, *words):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the program
        reads, writes = os.pipe()
        super().__init__(words, {1: writes, 2: self._errors.fileno()})
        os.close(writes)
        self.stdout = os.fdopen(reads)

    def communicate(self, timeout=None):
        """Return what it printed, to stdout and stderr, when it has ended."""
        out = []
        reader = threading.Thread(target=lambda: out.append(self.stdout.read()), daemon=True)
        reader.start()
        self.wait(timeout)
        reader.join()
        self._errors.seek(0)
        return out[0], self._errors.read()


def hold(address, words, numbers, environment):
    """Fork a program, tell who asked its id, and later its exit status; end it where who asked has
    ended.
    """
    with Client(address) as asks:
        streams = {number: recv_handle(asks) for number in numbers}
        pid = os.fork()
        if pid == 0:
            be_program(words, streams, environment)
        for stream in streams.values():
            os.close(stream)  # a pipe's end is seen when the program closes it
        asks.send(pid)
        if asks in wait([asks, os.pidfd_open(pid)]):
            os.kill(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            asks.send(status)


def be_program(words, streams, environment):
    """Run a program and end as the interpreter does; does not return."""
    free = 1 + max(*streams, *streams.values(), 255)
    apart = {number: fcntl.fcntl(stream, fcntl.F_DUPFD, free) for number, stream in streams.items()}
    os.closerange(3, free)
    for number, stream in apart.items():
        os.dup2(stream, number)
        os.close(stream)
    if environment is not None:
        kept = {"PYTHON_EXEC": os.environ["PYTHON_EXEC"]}
        os.environ.clear()
        os.environ |= kept | environment
        if "OMP_NUM_THREADS" in environment:  # is read when torch is loaded
            sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
        sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    while words[0].startswith("-") and words[0] not in ("-c", "-m"):
        sys.stdout.reconfigure(write_through=words[0] == "-u")
        del words[: 1 + (words[0] in ("-X", "-W"))]  # the interpreter's options
    first, *rest = sys.argv = words
    if first == "-c":
        folder, text = "", rest[0]
        del words[1]
    elif first == "-m":
        folder, text = os.getcwd(), f"import runpy; runpy._run_module_as_main({rest[0]!r})"
        del words[0]
    else:
        folder = os.path.dirname(os.path.realpath(first))
        text = f"import runpy; runpy.run_path({first!r}, None, '__main__')"
    sys.path.insert(0, folder)
    # which ends the process at sys.exit, and keeps other exceptions where the interpreter does
    failed = ctypes.pythonapi.PyRun_SimpleString(text.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def python(executable=sys.executable):
    """Return the start of a command that runs a program as `executable` does, in a fork.

    Not for tests of what an import does or of variables that torch or gradcomp read at import.
    """
    if from_here:
        return [str(executable)]
    address(executable)  # starts the server: one that a test's program started would be its child
    return python_words(executable)


def python_words(executable):
    return [str(executable), "-IS", __file__, "program"]


HANDED_ON = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT")


def stand_for(words):
    """Be the process that whoever starts a program sees, and end as that does; does not return."""
    if VARIABLE not in os.environ:  # the server has ended, or the program may not know it
        os.execv(sys.executable, [sys.executable, *words])
    names = os.listdir("/proc/self/fd")
    numbers = sorted(int(name) for name in names if os.path.exists(f"/proc/self/fd/{name}"))
    fork = Fork(words, dict(zip(numbers, numbers, strict=True)), dict(os.environ))
    for name in HANDED_ON:
        signal.signal(signal.Signals["SIG" + name], lambda number, _: fork.send_signal(number))
    for number in numbers[3:]:
        os.close(number)  # its ends are the program's
    status = fork.wait()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def address(executable=sys.executable):
    """Return where the server of that interpreter's environment listens, which by then it does."""
    listens = Path(os.environ[VARIABLE], Path(executable).parents[1].name)
    with open(f"{listens}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listens.exists():
            words = ["server", str(listens), os.environ[VARIABLE + "_OF"]]
            server = subprocess.Popen([executable, __file__, *words], start_new_session=True)
            Path(f"{listens}.pid").write_text(str(server.pid))
            deadline = time.monotonic() + PATIENCE_S
            while not listens.exists():
                assert server.poll() is None, "the server of forks cannot import"
                assert time.monotonic() < deadline, (
                    f"the server of forks has not imported within {PATIENCE_S} s"
                )
                time.sleep(0.02)
    return str(listens)


@contextlib.contextmanager
def available():
    """Let `start` work here and in processes started from here; end their forks afterwards."""
    if VARIABLE in os.environ:  # an xdist worker, or pytest in a fork
        yield
        return
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as folder:
        os.environ |= {VARIABLE: folder, VARIABLE + "_OF": str(os.getpid())}
        try:
            yield
        finally:
            for server in Path(folder).glob("*.pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(int(server.read_text()), signal.SIGKILL)
            for name in (VARIABLE, VARIABLE + "_OF"):
                del os.environ[name]


def load(names):
    """Import modules that are not loaded yet; one that is not installed the fork will miss."""
    new = [name for name in names if name not in sys.modules]
    importlib.invalidate_caches()
    for name in new:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    if new:
        gc.collect()
        gc.freeze()  # what is imported need not be looked through by every gc.collect() of a fork


def serve(listens, owner):
    """Fork for whoever asks, until the process `owner` ends."""
    load(IMPORTED)
    # what torch prints of compile times imports tabulate at every fork's end, 0.2 s
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)
    alike = Path(f"{listens}.python")
    alike.write_text(f'#!/bin/sh\nexec {shlex.join(python_words(sys.executable))} "$@"\n')
    alike.chmod(0o755)
    multiprocessing.set_executable(str(alike))
    os.environ["PYTHON_EXEC"] = str(alike)  # what torchrun starts
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with Listener(listens + ".starting", backlog=16) as listener:
        listener._listener._socket.settimeout(1)
        os.rename(listens + ".starting", listens)
        while is_alive(owner):
            # nobody asks, or whoever did has died
            with contextlib.suppress(EOFError, OSError), listener.accept() as asks:
                imports, request = asks.recv()
                load(imports)
                pid = os.fork()
                if pid == 0:
                    run(request)
                asks.send(pid)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import _forks  # what forks import is this module, not __main__

    if sys.argv[1] == "server":
        _forks.serve(sys.argv[2], int(sys.argv[3]))
    else:
        _forks.stand_for(sys.argv[2:])
