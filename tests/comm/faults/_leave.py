"""A rank whose peers leave; started by test_faults.py. Rank 0 hosts the store, as without torchrun.

Usage: _leave.py PORT RANK WORLD HOW. "returns": rank 1's program ends after two steps. "raises": by
an exception. "dies": it is killed. "freezes": rank 0 stops, and the others end by themselves,
slowly.
"""

import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gradcomp

TIMEOUT_S = 3.0


class Slow:
    """An object that is deleted while the interpreter finalizes, and takes its time."""

    def __del__(self, print=print, sleep=time.sleep):
        print("finalizing", flush=True)
        sleep(3)


def main(port, rank, world, how):
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    averager = gradcomp.GradientAverager(
        model, "onebit", min_numel=0, timeout_s=TIMEOUT_S if how == "freezes" else 60
    )
    if how == "freezes" and rank:
        sys.modules["slow"] = Slow()
    for step in range(4):
        if step == 2:
            if how == "freezes" and rank == 0:
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "dies" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raises" and rank == 1:
                raise LookupError("no more data")
            if how == "returns" and rank == 1:
                return
        model.zero_grad()
        model(torch.randn(4, 64)).sum().backward()
        begun = time.monotonic()
        try:
            averager.average()
        except gradcomp.PeerLost as error:
            print(f"seconds={time.monotonic() - begun:.2f} {error}", flush=True)
            raise


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
