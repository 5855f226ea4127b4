"""Train LeNet over MPI with compressed gradients; torch.distributed is not used at all.

    python -m gradcomp.launch -n 4 examples/mpi_train.py --codec ternary
    mpirun -n 4 python -m mpi4py examples/mpi_train.py --codec onebit --data path/to/mnist

What a plain training script has to add: a communicator, a `GradientAverager`, and one call of
`average()` a step.
"""

import argparse
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp
from gradcomp.bench.data import load
from gradcomp.bench.models import LeNet


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train LeNet under mpirun with compressed gradients."
    )
    parser.add_argument(
        "--codec",
        default="ternary",
        choices=["fp32", "ternary", "terngrad", "onebit"],
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

    comm = gradcomp.comm.MpiCommunicator()
    torch.manual_seed(0)  # replicas start alike
    torch.set_num_threads(1)
    data = load(args.data)
    train = TensorDataset(data.train_images, data.train_labels)
    sampler = DistributedSampler(train, comm.world_size, comm.rank, seed=0, drop_last=True)
    loader = DataLoader(train, batch_size=64 // comm.world_size, sampler=sampler, drop_last=True)

    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    codec = gradcomp.Identity() if args.codec == "fp32" else args.codec
    averager = gradcomp.GradientAverager(model.named_parameters(), codec, comm=comm)
    if comm.rank == 0:
        print(averager.describe(), flush=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            averager.average()
            optimizer.step()
        if comm.rank == 0:
            with torch.no_grad():
                scores = torch.cat([model(some) for some in data.test_images.split(500)])
            right = (scores.argmax(dim=1) == data.test_labels).float().mean()
            sent = averager.stats.bytes_sent / 1e6
            print(
                f"epoch {epoch + 1}: test accuracy {100 * right:.2f} %, {sent:.1f} MB sent",
                flush=True,
            )

    averager.check_replicas()  # every rank holds the same weights, bit for bit
    if comm.rank == 0:
        ratio = averager.stats.compression_ratio
        print(f"{ratio:.1f} times fewer bytes than fp32; replicas are equal", flush=True)
    averager.close()


if __name__ == "__main__":
    main()
