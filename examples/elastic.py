"""Train LeNet where machines may be lost and join: torchrun goes on with those that are there.

On each of one to three machines (or in three shells, which is what the test does):

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:3 --nproc-per-node 1 --max-restarts 3 --rdzv-id digits --rdzv-backend c10d \
        --rdzv-endpoint node1:29400 examples/elastic.py --folder /shared/digits

A lost rank is `PeerLost` on the others, whose processes end. torchrun starts them again as one rank
less, and a newcomer makes it start them again as one more. All of them go on from the newest
checkpoint that every rank can read, with the mean of what the old ranks owed (their residuals), and
share the same minibatches. The machine of --rdzv-endpoint has to stay.
"""

import argparse
import datetime
import os

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.checkpoint import Checkpoints

BATCH = 60  # of all ranks, so that any number up to six can share it
TIMEOUT_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LeNet on a changing number of machines.")
    parser.add_argument("--folder", required=True, help="checkpoints, seen by all machines")
    parser.add_argument("--codec", default="ternary", help="ternary, onebit, block4 ... (ternary)")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0, help="of weights and minibatches")
    args = parser.parse_args()

    torch.set_num_threads(1)
    # torch's own collectives are not waited for longer than gradcomp's
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    state = gradcomp.ddp.register(model, args.codec, optimizer=optimizer, timeout_s=TIMEOUT_S)
    everything = {"model": model.module, "optimizer": optimizer, "scheduler": scheduler}
    checkpoints = Checkpoints(args.folder, state, timeout_s=TIMEOUT_S, **everything)

    begin = checkpoints.load() or 0
    if rank == 0:
        print(f"step {begin}: {world} ranks", flush=True)
    data = load_digits()
    for step in range(begin, args.steps):
        draw = torch.Generator().manual_seed(1000 * args.seed + step)
        chosen = torch.randint(len(data.train_labels), (BATCH,), generator=draw)[rank::world]
        optimizer.zero_grad()
        cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % args.save_every == 0:
            checkpoints.save(step + 1)
    if rank == 0:
        with torch.no_grad():
            scores = model.module.eval()(data.test_images)
        right = (scores.argmax(dim=1) == data.test_labels).float().mean()
        attempts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"test accuracy {100 * right:.2f} %, {attempts} restarts", flush=True)
    state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
