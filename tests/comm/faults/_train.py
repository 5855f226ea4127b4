"""A rank of a training run that dies or freezes in the middle; started by test_faults.py.

Usage: _train.py STORE RANK WORLD FAULT TIMEOUT_S. The last rank does FAULT ("die" or "freeze")
inside step 3's backward; the others print what they caught and after how many seconds, and let it
end them. RANK "mpi": started by mpirun, and gradients go by MPI.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp


def main(store, rank, world, fault, timeout_s):
    torch.set_num_threads(1)
    comm = gradcomp.comm.MpiCommunicator() if rank == "mpi" else None
    rank = comm.rank if comm else int(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    model = DDP(nn.Sequential(*[nn.Linear(64, 64) for _ in range(10)]), bucket_cap_mb=0.01)
    codec = "onebit" if fault == "die" else "terngrad"
    state = gradcomp.ddp.register(model, codec, comm=comm, min_numel=0, timeout_s=timeout_s)
    step = 0

    def strike(grad):
        if step == 3 and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL if fault == "die" else signal.SIGSTOP)

    model.module[4].weight.register_hook(strike)
    for step in range(6):
        begun = time.monotonic()
        try:
            model(torch.randn(4, 64)).sum().backward()
        except gradcomp.PeerLost as error:
            print(f"time={time.time():.1f}", flush=True)
            print(
                f"PeerLost step={step} phase={error.phase} seconds={time.monotonic() - begun:.1f}",
                flush=True,
            )
            try:
                model(torch.randn(4, 64))
            except gradcomp.PeerLost:
                print("again", flush=True)
            print("saved", state.state_dict()["step"], flush=True)
            raise
    print("finished", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
