"""Train LeNet with Lightning and compressed gradients.

    python examples/lightning_digits.py --devices 2
    torchrun --nproc-per-node 2 examples/lightning_digits.py --devices 2 --codec onebit

The line that names `CompressedDDPStrategy` is all that a Lightning script has to add.
``--checkpoint FILE`` saves at the end and goes on from there when the same command runs again with
more epochs, bit for bit.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.integrations.lightning import CompressedDDPStrategy


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = LeNet()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet with Lightning and compressed gradients.")
    parser.add_argument("--codec", default="ternary", help="ternary, onebit, block4 ... (ternary)")
    parser.add_argument("--devices", type=int, default=2, help="processes (2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FILE", help="save here, go on from here"
    )
    args = parser.parse_args()

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.devices))
    lightning.seed_everything(0, verbose=False)  # the same weights whoever starts the ranks
    data = load_digits()
    train = TensorDataset(data.train_images, data.train_labels)
    loader = DataLoader(train, 64 // args.devices, shuffle=True, drop_last=True)
    strategy = CompressedDDPStrategy(args.codec)  # <- the added line
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=strategy,
        max_epochs=args.epochs,
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    trainer.fit(
        model,
        loader,
        ckpt_path=args.checkpoint if args.checkpoint and args.checkpoint.exists() else None,
    )
    if args.checkpoint:
        trainer.save_checkpoint(args.checkpoint)
    if trainer.is_global_zero:
        with torch.no_grad():
            scores = torch.cat([model.net(some) for some in data.test_images.split(500)])
        right = (scores.argmax(dim=1) == data.test_labels).float().mean()
        stats = strategy.compression.stats
        print(
            f"test accuracy {100 * right:.2f} %, {stats.compression_ratio:.1f} times fewer bytes"
            " than fp32",
            flush=True,
        )


if __name__ == "__main__":
    main()
