"""A rank that torchrun starts again after a failure, and that goes on from its checkpoint; started
by test_faults.py.

Usage: _restart.py FOLDER. Rank 1 raises once, after STOP steps; each rank writes a hash of its
weights into the folder at the end. Restarted ranks come up one after the other, so that an address
that a dead one has left in the store is found.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp.ddp

STEPS, STOP = 8, 4


def train(folder, stop):
    """Return a hash of the weights after STEPS steps, continuing from a checkpoint; raise
    LookupError before step `stop`.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=20)
    path, step = Path(folder, f"checkpoint{rank}.pt"), 0
    if path.exists():
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        state.load_state_dict(saved["gradcomp"])  # residuals of this rank
        step = saved["step"]
    while step < STEPS:
        if step == stop:
            raise LookupError("once")
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 32)).pow(2).sum().backward()
        optimizer.step()
        step += 1
        saved = {"model": model.module.state_dict(), "gradcomp": state.state_dict(), "step": step}
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    state.close()
    return hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()


def main(folder):
    torch.set_num_threads(1)
    rank, again = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    time.sleep(0.5 * rank * min(again, 1))
    dist.init_process_group("gloo")
    found = train(folder, STOP if rank == 1 and not again else None)
    Path(folder, f"end.{rank}").write_text(f"{again} {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
