"""Run one function on several ranks: threads over LocalCommunicator, or warm processes over gloo."""

import multiprocessing
import os
import tempfile
import threading
import time
import traceback

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


class RankPool:
    """Processes that run one function after another, each time in a fresh gloo group."""

    def __init__(self, world_size):
        context = multiprocessing.get_context("spawn")
        self.world_size = world_size
        self.directory = tempfile.TemporaryDirectory(prefix="gradcomp-test-")
        self.pipes, self.processes = [], []
        self.calls = 0
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(there, rank, world_size), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def alive(self):
        return all(p.is_alive() for p in self.processes)

    def run(self, function, *args, timeout_s=120):
        """Return function(*args) of every rank; raise RankFailed with the first rank's traceback."""
        self.calls += 1
        store = os.path.join(self.directory.name, f"store{self.calls}")
        for pipe in self.pipes:
            pipe.send((store, function, args))
        results, deadline = [], time.monotonic() + timeout_s
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.close()
                raise RankFailed(f"rank {rank} gave no result within {timeout_s} s")
            results.append(pipe.recv())
        failed = [r for r in results if isinstance(r, Failure)]
        if failed:
            raise RankFailed("\n".join(f.text for f in failed))
        return results

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.directory.cleanup()


class Failure:
    def __init__(self, text):
        self.text = text


def serve(pipe, rank, world_size):
    """Run what comes down the pipe until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            store, function, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            try:
                result = function(*args)
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = Failure(f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(result)
