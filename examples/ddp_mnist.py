"""Train LeNet with DistributedDataParallel and compressed gradients.

    torchrun --nproc-per-node 2 examples/ddp_mnist.py --codec ternary
    torchrun --nproc-per-node 2 examples/ddp_mnist.py --codec onebit --data path/to/mnist

The line that says `gradcomp.ddp.register` is all that a script with DistributedDataParallel has to
add.
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train LeNet under torchrun with compressed gradients."
    )
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
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = load(args.data)
    train = TensorDataset(data.train_images, data.train_labels)
    sampler = DistributedSampler(train, seed=0, drop_last=True)
    loader = DataLoader(train, batch_size=64 // world_size, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    state = None
    if args.codec != "none":
        state = gradcomp.ddp.register(model, args.codec)  # <- the added line

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        if rank == 0:
            with torch.no_grad():
                scores = torch.cat([model.module(some) for some in data.test_images.split(500)])
            right = (scores.argmax(dim=1) == data.test_labels).float().mean()
            sent = f", {state.stats.bytes_sent / 1e6:.1f} MB sent" if state else ""
            print(f"epoch {epoch + 1}: test accuracy {100 * right:.2f} %{sent}", flush=True)

    if state:
        if rank == 0:
            print(f"{state.stats.compression_ratio:.1f} times fewer bytes than fp32", flush=True)
        state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
