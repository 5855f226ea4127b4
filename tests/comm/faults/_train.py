"""A rank of a training run that loses a peer at step 3; started by test_faults.py.

Usage: _train.py PORT RANK WORLD HOW TIMEOUT_S. Rank 0 hosts the store, as without torchrun. RANK
"mpi": started by mpirun, and gradients go by MPI. Who prints PeerLost lets it end the program. HOW:

- "die", "freeze": the last rank is killed or stopped inside the backward pass;
- "return", "raise", "exit", "interrupt", "memory", "killed", "close": rank 1 ends before the step:
  its program returns, raises, calls sys.exit, gets Ctrl-C, runs out of memory or is killed, or it
  closes its state and lives on;
- "host": rank 0 is stopped before the step, and the others end by themselves, slowly.
"""

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

STEP = 3


class Slow:
    """An object that is deleted while the interpreter finalizes, and takes its time."""

    def __del__(self, print=print, sleep=time.sleep):
        print("finalizing", flush=True)
        sleep(3)


def send_self(number):
    os.kill(os.getpid(), number)


def run_out(state):
    raise LookupError("no more data")


def close(state):
    state.close()
    time.sleep(30)


ENDS = {
    "return": lambda state: None,
    "raise": run_out,
    "exit": lambda state: sys.exit(3),
    "interrupt": lambda state: send_self(signal.SIGINT),
    "memory": lambda state: torch.empty(2**50),
    "killed": lambda state: send_self(signal.SIGKILL),
    "close": close,
}


def main(port, rank, world, how, timeout_s):
    torch.set_num_threads(1)
    comm = gradcomp.comm.MpiCommunicator() if rank == "mpi" else None
    rank = comm.rank if comm else int(rank)
    store = dist.TCPStore(
        "127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if how == "host" and rank:
        sys.modules["slow"] = Slow()
    model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]), bucket_cap_mb=0.01)
    codec = "terngrad" if how == "freeze" else "onebit"
    state = gradcomp.ddp.register(model, codec, comm=comm, min_numel=0, timeout_s=timeout_s)
    step = 0

    def strike(grad):
        if step == STEP and rank == world - 1 and how in ("die", "freeze"):
            send_self(signal.SIGKILL if how == "die" else signal.SIGSTOP)

    model.module[4].weight.register_hook(strike)
    for step in range(6):
        if step == STEP and (rank, how) == (0, "host"):
            send_self(signal.SIGSTOP)
        if step == STEP and rank == 1 and how in ENDS:
            ENDS[how](state)
            return
        begun = time.monotonic()
        try:
            model(torch.randn(4, 64)).sum().backward()
        except gradcomp.PeerLost as error:
            print(f"time={time.time():.1f}", flush=True)
            took = f"{time.monotonic() - begun:.1f}"
            print(f"PeerLost step={step} seconds={took} {error}", flush=True)
            try:
                model(torch.randn(4, 64))
            except gradcomp.PeerLost:
                print("again", flush=True)
            print("saved", state.state_dict()["step"], flush=True)
            raise
    print("finished", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
