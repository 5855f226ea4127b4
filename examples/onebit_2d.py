"""Train LeNet on 2 x 2 ranks: tensor-parallel layers on one dimension of a mesh, packed gradients
on the other.

    torchrun --nproc-per-node 4 examples/onebit_2d.py
    torchrun --nproc-per-node 4 examples/onebit_2d.py --codec ternary --data DIR --epochs 1

Ranks of one row of the mesh ("tp") share the two large layers: each holds half of their weights and
computes half of their outputs, on the same images (torch's tensor parallelism). Ranks of one column
("dp") hold the same halves and see different images: their gradients are averaged at 1 bit a value,
shard by shard.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp
from gradcomp.bench.data import load
from gradcomp.bench.models import LeNet
from gradcomp.comm import TorchCommunicator


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train LeNet under torchrun, tensor-parallel by data-parallel."
    )
    parser.add_argument(
        "--codec",
        default="onebit",
        choices=["onebit", "ternary", "terngrad"],
        help="terngrad needs a smaller learning rate than the others",
    )
    parser.add_argument(
        "--tensor-parallel", type=int, default=2, metavar="N", help="ranks that share a layer (2)"
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of MNIST's IDX files (default: scikit-learn's digits)",
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if "RANK" not in os.environ:
        parser.error(
            "start it with several ranks: torchrun --nproc-per-node 4 examples/onebit_2d.py"
        )
    dist.init_process_group("gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % args.tensor_parallel:
        parser.error(f"{world_size} ranks cannot be rows of {args.tensor_parallel}")
    shape = (world_size // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))

    torch.manual_seed(args.seed)  # the same weights everywhere, before they are cut
    model = LeNet()
    parallelize_module(model, mesh["tp"], {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    comm = TorchCommunicator(mesh["dp"].get_group())
    averager = gradcomp.GradientAverager(model.named_parameters(), args.codec, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    if dist.get_rank() == 0:
        print(averager.describe(), flush=True)

    data = load(args.data)
    train = TensorDataset(data.train_images, data.train_labels)
    sampler = DistributedSampler(
        train, shape[0], mesh["dp"].get_local_rank(), seed=args.seed, drop_last=True
    )
    loader = DataLoader(train, batch_size=64 // shape[0], sampler=sampler, drop_last=True)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            averager.average()
            optimizer.step()
        with torch.no_grad():  # every rank: its layers are needed
            scores = torch.cat([model(some) for some in data.test_images.split(500)])
        if dist.get_rank() == 0:
            right = (scores.argmax(dim=1) == data.test_labels).float().mean()
            print(f"epoch {epoch + 1}: test accuracy {100 * right:.2f} %", flush=True)
    averager.check_replicas()  # of every shard, over its column
    if dist.get_rank() == 0:
        print(f"{averager.stats.compression_ratio:.1f} times fewer bytes than fp32", flush=True)
    averager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
