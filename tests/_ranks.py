"""Run one function on several ranks: threads over LocalCommunicator, or warm processes over gloo or MPI."""

import contextlib
import gc
import io
import multiprocessing
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
from gradcomp.launch.ports import free_port

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

    threads = [threading.Thread(target=work, args=(c,), daemon=True) for c in LocalCommunicator.group(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.1, deadline - time.monotonic()))
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0][1]
    return results


class Pool:
    """Processes that run one function after another; `pipes` and `processes` are set by the subclass."""

    spoiled = False  # MPI collectives are under way that no peer will answer

    def alive(self):
        """Return whether the processes can run another function."""
        return not self.spoiled and all(
            p.poll() is None if hasattr(p, "poll") else p.is_alive() for p in self.processes
        )

    def run(self, function, *args, timeout_s=120):
        """Return function(*args) of every rank; raise RankFailed with the tracebacks of those that raised."""
        self.calls += 1
        for pipe in self.pipes:
            pipe.send((self.calls, function, args))
        results, deadline = [], time.monotonic() + timeout_s
        for rank, pipe in enumerate(self.pipes):
            try:
                answered = pipe.poll(max(0.0, deadline - time.monotonic()))
                result, spoiled = pipe.recv() if answered else (None, False)
                results.append(result)
                self.spoiled |= spoiled
            except (EOFError, ConnectionError):
                answered = False
            if not answered:
                self.close()
                raise RankFailed(f"rank {rank} gave no result within {timeout_s} s, or died")
        failed = [r for r in results if isinstance(r, Failure)]
        if failed:
            raise RankFailed("\n".join(f.text for f in failed))
        return results

    def release(self):
        """Let the processes end by themselves; `close` waits for that."""
        for pipe in self.pipes:
            pipe.close()

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait() if hasattr(process, "wait") else process.join()
        self.directory.cleanup()


class RankPool(Pool):
    """Processes that run each function in a fresh gloo group, forked from one that has imported what takes seconds."""

    def __init__(self, world_size):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch._dynamo", "sklearn.datasets", "gradcomp.ddp", "gradcomp.onebit_sgd", "_ranks"]
        )
        self.directory = tempfile.TemporaryDirectory(prefix="gradcomp-test-")
        self.pipes, self.processes, self.calls = [], [], 0
        for rank in range(world_size):
            here, there = context.Pipe()
            args = (there, rank, world_size, self.directory.name)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)


class MpiPool(Pool):
    """Ranks of one MPI job; each function runs with torch.distributed over gloo beside MPI."""

    def __init__(self, flavour, world_size):
        self.directory = tempfile.TemporaryDirectory(prefix="gradcomp-test-")
        address, key = os.path.join(self.directory.name, "pool"), os.urandom(16)
        here = os.path.dirname(os.path.abspath(__file__))
        command = [*mpirun(flavour, world_size), os.path.join(here, "_mpi_serve.py"), address, key.hex()]
        with Listener(address, authkey=key) as listener:
            self.processes, self.calls = [subprocess.Popen(command, env=mpi_environment())], 0
            listener._listener._socket.settimeout(200)  # two imports of torch a core
            try:
                pipes = [listener.accept() for _ in range(world_size)]
            except BaseException:
                self.processes[0].terminate()
                raise
        self.pipes = [pipe for _, pipe in sorted((pipe.recv(), pipe) for pipe in pipes)]

    def close(self):
        """Let the ranks finish, so that MPI removes its shared memory; ranks that cannot are killed."""
        self.release()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[0].wait(0 if self.spoiled else 10)
        self.processes[0].terminate()  # mpirun ends its ranks, which a killed one would leave behind
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.processes[0].wait(5)
        super().close()


def mpi_python(flavour):
    """Return the interpreter of the environment that `make mpi` made for "mpich" or "openmpi"; skip without it."""
    python = Path(f"{sys.prefix}-{flavour}", "bin", "python")
    if not python.exists():
        pytest.skip(f"no environment with {flavour}: make mpi")
    return str(python)


def mpirun(flavour, world_size):
    """Return the start of the command that runs a script on that many ranks."""
    python = mpi_python(flavour)
    options = ["--oversubscribe", "--bind-to", "none"] if flavour == "openmpi" else ["-bind-to", "none"]
    return [str(Path(python).with_name("mpirun")), *options, "-n", str(world_size), python]


def is_alive(pid):
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_sessions = tempfile.TemporaryDirectory(prefix="gradcomp-test-")  # where Open MPI keeps files of jobs, killed ones too


def mpi_environment():
    return {
        **os.environ,
        "PRTE_MCA_prte_local_tmpdir_base": _sessions.name,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }


class Failure:
    def __init__(self, text):
        self.text = text


def serve(pipe, rank, world_size, directory):
    """Run what comes down the pipe until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what torch has imported need not be looked through by every gc.collect()
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # a rank that is done at once would leave while others still connect
    while True:
        try:
            call, function, args = pipe.recv()
        except EOFError:
            return
        try:
            store = os.path.join(directory, f"store{call}")
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            try:
                result = function(*args)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException:
            result = Failure(f"rank {rank}:\n{traceback.format_exc()}")
        mpi = sys.modules.get("gradcomp.comm.channels")
        pipe.send((result, bool(mpi and mpi.unanswered)))


def program(path, *arguments):
    """Run a script in this warm rank as torchrun or mpirun would start it; return what it printed."""
    import torch.distributed as dist

    rank, world, port = dist.get_rank(), dist.get_world_size(), [None]
    if rank == 0:
        port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port[0]}
    place["OMP_NUM_THREADS"] = 1
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    before, sys.argv, printed = sys.argv, [path, *map(str, arguments)], io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
        for name in (*place, "MASTER_ADDR"):
            os.environ.pop(name, None)  # Lightning takes some away
    return printed.getvalue()


def with_communicator(kind, function, *args):
    """Return function(comm, *args) over a communicator of that kind."""
    from gradcomp import comm

    communicator = (comm.TorchCommunicator if kind == "gloo" else comm.MpiCommunicator)(timeout_s=60)
    try:
        return function(communicator, *args)
    finally:
        communicator.close()


def unpacked(comm, function, given):
    """Return function(comm, *args), pickled here for the way back, as `given` was for the way there."""
    return pickle.dumps(function(comm, *pickle.loads(given)))


def with_mpi_beneath(function, *args):
    """Return function(*args) where `gradcomp.ddp.register` takes MPI by itself, as it would take gloo."""
    from gradcomp import ddp

    before, ddp.TorchCommunicator = ddp.TorchCommunicator, mpi_like
    try:
        return function(*args)
    finally:
        ddp.TorchCommunicator = before


_subsets = {}


def mpi_like(process_group=None, *, timeout_s=None):
    """Return an MpiCommunicator of the ranks of a process group."""
    import torch.distributed as dist
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    members = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    if len(members) == MPI.COMM_WORLD.Get_size():  # no collective call: a test may be about a rank that makes none
        _subsets[members] = MPI.COMM_WORLD
    if members not in _subsets:
        group = MPI.COMM_WORLD.Get_group().Incl(members)
        _subsets[members] = MPI.COMM_WORLD.Create_group(group)
    return MpiCommunicator(_subsets[members], timeout_s=timeout_s or 300.0)
