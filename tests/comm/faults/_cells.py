"""A rank of a training run in which the last rank has a fault in one phase of step 3; started by
test_matrix.py.

Usage: _cells.py PORT RANK WORLD PHASE FAULT TIMEOUT_S FOLDER. Rank 0 hosts the store, as without
torchrun. RANK "mpi": started by mpirun, and gradients go by MPI. Who hears of a lost rank prints
it, and lets the error end the program.
"""

import functools
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import files
from gradcomp.checkpoint import Checkpoints
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.phase import Phase
from gradcomp.local.fragment import Fragment

STEP, STEPS = 3, 6


def stop_raising():
    raise LookupError("no more data")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": stop_raising,
    "exits": lambda: sys.exit(3),
    "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    "out of memory": lambda: torch.empty(2**50),
}


def be_cut_off():
    """Wait until the test has taken this host's link down."""
    print("cut", flush=True)
    time.sleep(2)


LINKS = {"cut off": be_cut_off}
# by phase: what it begins with, or (with a name) what is under way when it has begun
PLACES = {
    "forward": (nn.Linear, "forward"),
    "encode": (BucketExchange, "_encode"),
    "first phase": (Phase, "start", "first_phase"),
    "reduce": (BucketExchange, "_average"),
    "second phase": (Phase, "start", "second_phase"),
    "decode": (BucketExchange, "_decode"),
    "optimizer": (torch.optim.SGD, "step"),
    "checkpoint": (files, "_sync"),
    "outer step": (Fragment, "apply"),
}


class Strike:
    """Has a fault in a phase, once, when it is `armed`."""

    def __init__(self, phase, fault):
        self._fault, self.armed = (FAULTS | LINKS)[fault], False
        owner, name, *under_way = PLACES[phase]
        before = getattr(owner, name)

        @functools.wraps(before)
        def wrapped(*args, **named):
            mine = self.armed and (not under_way or args[0]._kind.name == under_way[0])
            if mine and not under_way:
                self.now()
            out = before(*args, **named)
            if mine and under_way:
                self.now()
            return out

        setattr(owner, name, wrapped)

    def now(self):
        self.armed = False
        self._fault()


def join(port, rank, world, timeout=None):
    """Make the default process group, whose store rank 0 hosts; return rank and communicator."""
    torch.set_num_threads(1)
    comm = gradcomp.comm.MpiCommunicator() if rank == "mpi" else None
    rank = comm.rank if comm else int(rank)
    host = os.environ.get("STORE_HOST", "127.0.0.1")
    store = dist.TCPStore(
        host, port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    return rank, comm


def main(port, rank, world, phase, fault, timeout_s, folder):
    rank, comm = join(port, rank, world, timedelta(seconds=timeout_s))
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    model = DDP(net, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"comm": comm, "timeout_s": timeout_s}
    if phase == "outer step":
        model = net
        state = gradcomp.DiLoCo(model, optimizer, "ternary", sync_every=1, min_numel=0, **options)
    else:
        state = gradcomp.ddp.register(
            model, "onebit", min_numel=0, exchange="reduce_scatter", **options
        )
        checkpoints = Checkpoints(folder, state, timeout_s=timeout_s, model=net)
    strike = Strike(phase, fault)
    for step in range(STEPS):
        strike.armed = step == STEP and rank == world - 1
        begun = time.monotonic()
        try:
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if phase == "outer step":
                state.step()
            elif phase == "checkpoint":
                checkpoints.save(step)
        except (gradcomp.PeerLost, OSError) as error:  # OSError: a rank could not save
            took = f"{time.monotonic() - begun:.1f}"
            print(f"{type(error).__name__} step={step} seconds={took} {error}", flush=True)
            raise
    print("finished", flush=True)


if __name__ == "__main__":
    place, number, size, *cell, seconds, saved = sys.argv[1:]
    main(int(place), number, int(size), *cell, float(seconds), saved)
