"""A rank of a training run in which the last rank has a fault in one phase of step 3; started by
test_matrix.py.

Usage: _cells.py PORT RANK WORLD PHASE FAULT TIMEOUT_S FOLDER. Rank 0 hosts the store, as without
torchrun. RANK "mpi": started by mpirun, and gradients go by MPI. Who hears of a lost rank prints
it, and lets the error end the program. In the phases `SERVED` a rank is a parameter server and the
others are its workers; in `GATHER` FSDP2 trains, and torch gathers its weights.
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
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import files
from gradcomp.checkpoint import Checkpoints
from gradcomp.comm import TorchCommunicator
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.phase import Phase
from gradcomp.local.fragment import Fragment
from gradcomp.server import ParameterClient, loop, serve

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
CLOSES = "closes"  # what it trains with, and lives on


def be_cut_off():
    """Wait until the test has taken this host's link down."""
    print("cut", flush=True)
    time.sleep(2)


LINKS = {"cut off": be_cut_off}
GATHER = "gather of weights"
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
    GATHER: (TorchCommunicator, "follow"),
    "server's round": (loop._Server, "_handle"),
    "worker's push": (ParameterClient, "push_parameter"),
}
SERVED = {"server's round": 2, "worker's push": 0}  # which rank serves
# where a program may close: not in stages of an exchange (other threads run them) nor in a save
CLOSING = ("forward", "optimizer", "outer step", GATHER, "worker's push")


class Strike:
    """Has a fault in a phase, once, when it is `armed` and the phase has begun `after` times."""

    def __init__(self, phase, fault, close):
        def closes():
            close()
            time.sleep(60)

        self._fault, self.armed, self.after = (FAULTS | LINKS | {CLOSES: closes})[fault], False, 0
        owner, name, *under_way = PLACES[phase]
        before = getattr(owner, name)

        @functools.wraps(before)
        def wrapped(*args, **named):
            mine = self.armed and (not under_way or args[0]._kind.name == under_way[0])
            if mine and self.after:
                self.after, mine = self.after - 1, False
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


def trained(comm, phase, timeout_s, folder):
    """Return a function of a step of training, and one that closes what averages gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
    sharded = phase == GATHER
    model = fully_shard(net) if sharded else DDP(net, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"comm": comm, "timeout_s": timeout_s}
    if phase == "outer step":
        model = net
        state = gradcomp.DiLoCo(model, optimizer, "ternary", sync_every=1, min_numel=0, **options)
    elif sharded:
        state = gradcomp.fsdp.register(model, "onebit", min_numel=0, timeout_s=timeout_s)
    else:
        state = gradcomp.ddp.register(
            model, "onebit", min_numel=0, exchange="reduce_scatter", **options
        )
        checkpoints = Checkpoints(folder, state, timeout_s=timeout_s, model=net)

    def take(step):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if phase == "outer step":
            state.step()
        elif phase == "checkpoint":
            checkpoints.save(step)

    return take, state.close


def served(comm, phase, timeout_s):
    """Return a function of a worker's round, and one that closes its client; or of all that a
    server does.
    """
    comm, server = comm or gradcomp.comm.TorchCommunicator(timeout_s=20), SERVED[phase]
    if comm.rank == server:

        def all_rounds(step):
            if step == STEP:
                stats = serve(comm, [server], timeout_s=2 * timeout_s)
                print(f"served, lost {stats.lost}", flush=True)

        return all_rounds, comm.close
    client = ParameterClient(comm, [server], timeout_s=timeout_s)
    client.init_parameter("x", (4,))

    def take(step):
        client.push_parameter("x", torch.ones(4))
        assert client.pull_parameter("x", "sum").tolist() == [2.0] * 4

    return take, client.close


def main(port, rank, world, phase, fault, timeout_s, folder):
    torchs = None if phase == GATHER else timedelta(seconds=timeout_s)  # 30 minutes
    rank, comm = join(port, rank, world, torchs)
    if phase in SERVED:
        take, close = served(comm, phase, timeout_s)
    else:
        take, close = trained(comm, phase, timeout_s, folder)
    strike = Strike(phase, fault, close)
    if phase == "server's round":
        # settings, a push and a pull of each round, a push: both workers are in step 3 then
        strike.after = (world - 1) * (2 + 2 * STEP)
    for step in range(STEPS):
        strike.armed = step == STEP and rank == world - 1
        begun = time.monotonic()
        try:
            take(step)
        except (gradcomp.PeerLost, OSError) as error:  # OSError: a rank could not save
            took = f"{time.monotonic() - begun:.1f}"
            print(f"{type(error).__name__} step={step} seconds={took} {error}", flush=True)
            if phase in SERVED:
                close()
            raise
    if phase in SERVED:
        close()
    print("finished", flush=True)


if __name__ == "__main__":
    place, number, size, *cell, seconds, saved = sys.argv[1:]
    main(int(place), number, int(size), *cell, float(seconds), saved)
