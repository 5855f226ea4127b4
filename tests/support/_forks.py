"""Processes forked from one that has imported torch and gradcomp, which takes ten seconds.

All workers of a run have one server: the first call of `start` starts it, and it ends when the
pytest that it was started for does.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Listener
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


def start(function, *args, imports=()):
    """Run function(*args) in a new process, which imports the function by name; return its id.

    Its parent imports the modules `imports` first, and keeps them for later ones.
    """
    key = bytes(multiprocessing.current_process().authkey)  # tensors that are sent back ask for it
    request = pickle.dumps((key, sys.path, os.getcwd(), pickle.dumps((function, args))))
    if from_here:
        return os.fork() or run(request)
    with Client(address()) as server:
        server.send((imports, request))
        return server.recv()


def is_alive(pid):
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


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
        key, sys.path[:], folder, call = pickle.loads(request)
        multiprocessing.current_process().authkey = key
        os.chdir(folder)
        function, args = pickle.loads(call)
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


class Program:
    """A Python program in a fork, with what tests use of `subprocess.Popen`; it begins with
    everything imported, and ends as any other.
    """

    def __init__(self, script, *words):
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the program
        self.returncode = None
        reads, writes = os.pipe()
        with (
            tempfile.TemporaryDirectory(prefix="gradcomp-test-") as folder,
            Listener(f"{folder}/holder") as listener,
        ):
            start(hold, listener.address, str(script), [str(word) for word in words])
            self._holder = listener.accept()
        for stream in (writes, self._errors.fileno()):
            send_handle(self._holder, stream, None)
        self.pid = self._holder.recv()
        os.close(writes)
        self.stdout = os.fdopen(reads)

    def wait(self, timeout=None):
        """Return the exit status, negative for a signal."""
        if self.returncode is None:
            if not self._holder.poll(timeout):
                raise subprocess.TimeoutExpired("a program in a fork", timeout)
            self.returncode = self._holder.recv()
        return self.returncode

    def communicate(self, timeout=None):
        """Return what it printed, to stdout and stderr, when it has ended."""
        out = []
        reader = threading.Thread(target=lambda: out.append(self.stdout.read()), daemon=True)
        reader.start()
        self.wait(timeout)
        reader.join()
        self._errors.seek(0)
        return out[0], self._errors.read()

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill(self):
        if self.returncode is None and not self._holder.poll():
            self.send_signal(signal.SIGKILL)


def hold(address, script, words):
    """Fork a program, tell who asked its id, and later its exit status."""
    with Client(address) as asks:
        streams = [recv_handle(asks) for _ in range(2)]
        pid = os.fork()
        if pid == 0:
            be_program(streams, script, words)
        asks.send(pid)
        asks.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def be_program(streams, script, words):
    """Run a script and end as the interpreter does; does not return."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream, number)
    sys.argv, text = [script, *words], f"import runpy; runpy.run_path({script!r}, None, '__main__')"
    # which ends the process at sys.exit, and keeps other exceptions where the interpreter does
    failed = ctypes.pythonapi.PyRun_SimpleString(text.encode())
    ctypes.pythonapi.Py_Exit(1 if failed else 0)


def address():
    """Return where the server listens, which by then it does."""
    folder = Path(os.environ[VARIABLE])
    listens = folder / "server"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listens.exists():
            command = [sys.executable, __file__, str(listens), os.environ[VARIABLE + "_OF"]]
            server = subprocess.Popen(command, start_new_session=True)
            (folder / "pid").write_text(str(server.pid))
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
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                os.killpg(int(Path(folder, "pid").read_text()), signal.SIGKILL)
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

    _forks.serve(sys.argv[1], int(sys.argv[2]))
