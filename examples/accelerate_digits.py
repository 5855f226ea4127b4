"""Train LeNet with accelerate and compressed gradients, or with local steps.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py
    torchrun --nproc-per-node 2 examples/accelerate_digits.py --codec onebit --checkpoint DIR
    torchrun --nproc-per-node 2 examples/accelerate_digits.py --sync-every 10

The line that calls `register` is all that an accelerate script has to add; with local steps the
model stays out of `prepare`, and `local_steps` takes its place. ``--checkpoint DIR`` saves at the
end and goes on from there when the same command runs again.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.integrations.accelerate import local_steps, register


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet with accelerate and compressed gradients.")
    parser.add_argument("--codec", default="ternary", help="ternary, onebit, block4 ... (ternary)")
    parser.add_argument(
        "--sync-every", type=int, metavar="H", help="local steps: exchange every H steps only"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, go on from here")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // accelerator.num_processes))
    torch.manual_seed(0)
    data = load_digits()
    train = TensorDataset(data.train_images, data.train_labels)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(train, 64 // accelerator.num_processes, shuffle=True, drop_last=True)
    if args.sync_every:
        optimizer, loader = accelerator.prepare(optimizer, loader)
        state = local_steps(accelerator, model, optimizer, args.codec, sync_every=args.sync_every)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        state = register(accelerator, model, args.codec)  # <- the added line
    if args.checkpoint and args.checkpoint.exists():
        accelerator.load_state(str(args.checkpoint))

    with state or contextlib.nullcontext():  # None for one process
        for epoch in range(args.epochs):
            for images, labels in loader:
                accelerator.backward(cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                net = accelerator.unwrap_model(model)
                scores = torch.cat([net(some) for some in data.test_images.split(500)])
            right = (scores.argmax(dim=1) == data.test_labels).float().mean()
            accelerator.print(f"epoch {epoch + 1}: test accuracy {100 * right:.2f} %", flush=True)
        if args.checkpoint:
            accelerator.save_state(str(args.checkpoint))
    if state:
        syncs = f" in each of {state.syncs} syncs" if args.sync_every else ""
        accelerator.print(
            f"{state.stats.compression_ratio:.1f} times fewer bytes than fp32{syncs}", flush=True
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
