"""Train LeNet in bf16 with fp32 accuracy: split weights, packed gradients, updates straight from
the packed averages.

    torchrun --nproc-per-node 2 examples/split_sgd_ddp.py
    torchrun --nproc-per-node 2 examples/split_sgd_ddp.py --weights bf16 --data path/to/mnist

The model holds bf16 weights and computes with them. The 16 bits that do not fit are the optimizer's
trails, so that each update is an fp32 one; it is made straight from the ternary payloads that the
ranks exchange. ``--weights bf16`` is the same without trails, and ``--weights fp32`` plain fp32
training, for comparison.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp.ddp
from gradcomp.bench.data import load
from gradcomp.bench.models import LeNet
from gradcomp.optim import SplitSGD, fp32_state_dict, split_parameters


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train LeNet under torchrun with split weights and packed gradients."
    )
    parser.add_argument("--weights", default="split", choices=["split", "bf16", "fp32"])
    parser.add_argument(
        "--codec",
        default="ternary",
        choices=["none", "ternary", "terngrad", "onebit"],
        help="terngrad needs a smaller learning rate than the others",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of MNIST's IDX files (default: scikit-learn's digits)",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the weights as an fp32 checkpoint"
    )
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)  # the same on every rank: trails are not broadcast
    data = load(args.data)
    train = TensorDataset(data.train_images, data.train_labels)
    sampler = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler, drop_last=True)

    net = LeNet()
    options = {"lr": args.lr, "momentum": args.momentum, "weight_decay": 5e-4}
    if args.weights == "split":
        optimizer = SplitSGD(split_parameters(net), **options)  # before DDP
    else:
        net = net.bfloat16() if args.weights == "bf16" else net
        optimizer = torch.optim.SGD(net.parameters(), **options)
    dtype = next(net.parameters()).dtype
    model = DistributedDataParallel(net)
    state = None
    if args.codec != "none":
        state = gradcomp.ddp.register(model, args.codec, optimizer=optimizer)
        if rank == 0:
            print(state.describe(), flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images.to(dtype)).float(), labels).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                scores = torch.cat(
                    [net(some.to(dtype)).float() for some in data.test_images.split(500)]
                )
            right = (scores.argmax(dim=1) == data.test_labels).float().mean()
            print(f"epoch {epoch + 1}: test accuracy {100 * right:.2f} %", flush=True)

    if rank == 0 and args.save:
        torch.save(
            fp32_state_dict(net, optimizer) if args.weights == "split" else net.state_dict(),
            args.save,
        )
    if state:
        state.check_replicas()  # trails included
        if rank == 0:
            print(f"{state.stats.compression_ratio:.1f} times fewer bytes than fp32", flush=True)
        state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
