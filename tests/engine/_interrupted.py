"""One of two gloo ranks: rank 0 ends while an exchange is under way, rank 1 while nothing is."""

import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp


def main(rank, store, how):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = nn.Linear(64, 64)
    if how == "rotate":
        averager = gradcomp.GradientAverager(model.named_parameters(), "onebit", timeout_s=60)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
    else:
        model = DistributedDataParallel(model)
        # it lives as long as the program
        state = gradcomp.ddp.register(model, "terngrad", timeout_s=60)  # noqa: F841

    def step():
        averager.average_delayed() if how == "rotate" else model(torch.ones(2, 64)).sum().backward()

    for _ in range(3):
        step()
    if how == "rotate":
        averager.flush()
    dist.barrier()
    if rank == 1:
        sys.stdin.readline()
        print(time.time(), flush=True)
        sys.exit(4)
    print(time.time(), flush=True)
    if how == "interrupt":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    step()  # the other rank does not answer
    sys.exit(3)


main(int(sys.argv[1]), *sys.argv[2:])
