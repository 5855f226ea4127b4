"""A rank of a training run that loses a peer at step 3; started by test_faults.py.

Usage: _train.py PORT RANK WORLD HOW TIMEOUT_S. Rank 0 hosts the store, as without torchrun. RANK
"mpi": started by mpirun, and gradients go by MPI. Who prints PeerLost lets it end the program. HOW:

- "die", "freeze": the last rank is killed or stopped inside the backward pass;
- "return", "close", or a fault of _cells.py: rank 1 ends before the step: its program returns, or
  closes its state and lives on, or has the fault;
- "stuck": rank 1 sleeps before the step;
- "nodes": the last of four ranks does, of two nodes with two ranks each, so that the others wait
  for it on three communicators: its node's, the other node's and that of both nodes;
- "elsewhere": as "freeze", and no rank sees the processes of another, as if all had other hosts;
- "buffers": the model has a BatchNorm, and rank 1 is killed before the step, so that the others may
  lose it in torch's own broadcast;
- "host": rank 0 is stopped before the step, and the others end by themselves, slowly.
"""

import os
import sys
import time

import torch
from _cells import FAULTS, STEP, STEPS, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp.comm import peers


class Slow:
    """An object that is deleted while the interpreter finalizes, and takes its time."""

    def __del__(self, print=print, sleep=time.sleep):
        print("finalizing", flush=True)
        sleep(3)


def main(port, rank, world, how, timeout_s):
    rank, comm = join(port, rank, world)
    if how == "host" and rank:
        sys.modules["slow"] = Slow()
    if how == "elsewhere":
        peers._identity = lambda: str(os.getpid())
    layers = [nn.Linear(64, 64) for _ in range(10)]
    if how == "buffers":
        layers.append(nn.BatchNorm1d(64))
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.01)
    freezes = how in ("freeze", "elsewhere")
    codec = "terngrad" if freezes else "onebit"
    options = {"comm": comm, "min_numel": 0, "timeout_s": timeout_s}
    sleeper = 1
    if how == "nodes":
        sleeper = world - 1
        nodes = gradcomp.Advanced(nodes=((0, 1), (2, 3)))
        options |= {"exchange": "hierarchical", "advanced": nodes}
    state = gradcomp.ddp.register(model, codec, **options)
    step = 0

    def strike(grad):
        if step == STEP and rank == world - 1 and (freezes or how == "die"):
            FAULTS["frozen" if freezes else "killed"]()

    model.module[4].weight.register_hook(strike)
    for step in range(STEPS):
        if step == STEP and (rank, how) == (0, "host"):
            FAULTS["frozen"]()
        if step == STEP and rank == sleeper and how in ("stuck", "nodes"):
            time.sleep(600)
        if step == STEP and rank == 1 and how in ("return", "close", "buffers", *FAULTS):
            if how == "buffers":
                FAULTS["killed"]()
            elif how == "close":
                state.close()
                time.sleep(30)
            elif how != "return":
                FAULTS[how]()
            return
        begun = time.monotonic()
        try:
            try:
                model(torch.randn(4, 64)).sum().backward()
            except RuntimeError as error:
                if isinstance(error, gradcomp.PeerLost):
                    raise
                model(torch.randn(4, 64))  # torch has lost the rank; the next forward says which
        except gradcomp.PeerLost as error:
            print(f"time={time.time():.1f}", flush=True)
            took = f"{time.monotonic() - begun:.1f}"
            print(f"PeerLost step={step} seconds={took} {error}", flush=True)
            print("lost", error.rank, flush=True)
            try:
                model(torch.randn(4, 64))
            except gradcomp.PeerLost:
                print("again", flush=True)
            print("saved", state.state_dict()["step"], flush=True)
            raise
    print("finished", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
