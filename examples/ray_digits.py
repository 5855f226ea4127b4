"""Train LeNet with Ray Train and compressed gradients.

    python examples/ray_digits.py --workers 2
    python examples/ray_digits.py --workers 2 --codec onebit --checkpoint DIR

The line that calls `register` is all that a Ray Train script has to add. ``--checkpoint DIR`` keeps
what is reported after every epoch, and goes on from the last one when the same command runs again
with more epochs; so does Ray by itself after a failure.
"""

import argparse
import os
import tempfile
from pathlib import Path

import ray
import ray.train.torch
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradcomp.bench.data import load_digits
from gradcomp.bench.models import LeNet
from gradcomp.integrations import ray as packed


def train(config: dict) -> None:
    """Train as one of the workers."""
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    data = load_digits()
    model = ray.train.torch.prepare_model(LeNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    state = packed.register(model, config["codec"], optimizer=optimizer)  # <- the added line
    samples = TensorDataset(data.train_images, data.train_labels)
    workers = ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(samples, 64 // workers, shuffle=True, drop_last=True)
    )
    begun = 0
    checkpoint = ray.train.get_checkpoint() or (
        ray.train.Checkpoint(config["from"]) if config["from"] else None
    )
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/train.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            begun = saved["epochs"]
            packed.load(state, folder)
    for epoch in range(begun, config["epochs"]):
        if workers > 1:
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            net = getattr(model, "module", model)
            scores = torch.cat([net(some) for some in data.test_images.split(500)])
        right = (scores.argmax(dim=1) == data.test_labels).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            if ray.train.get_context().get_world_rank() == 0:
                told = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "epochs": epoch + 1,
                }
                torch.save(told, f"{folder}/train.pt")
            packed.save(state, folder)  # every worker's
            ratio = state.stats.compression_ratio if state else 1.0
            metrics = {"accuracy": 100 * right, "ratio": ratio, "epoch": epoch + 1}
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description="LeNet with Ray Train and compressed gradients.")
    parser.add_argument("--codec", default="ternary", help="ternary, onebit, block4 ... (ternary)")
    parser.add_argument("--workers", type=int, default=2, help="processes (2)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="keep checkpoints here, go on from the last",
    )
    args = parser.parse_args()

    ray.init(include_dashboard=False, logging_level="warning")
    forgotten = tempfile.TemporaryDirectory()
    kept = (args.checkpoint or Path(forgotten.name)).resolve()
    last = kept / "last"
    config = {
        "codec": args.codec,
        "epochs": args.epochs,
        "from": str(last.resolve()) if last.exists() else None,
        "threads": max(1, (os.cpu_count() or 1) // args.workers),
    }
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            storage_path=str(kept), checkpoint_config=ray.train.CheckpointConfig(num_to_keep=1)
        ),
    )
    result = trainer.fit()
    if result.checkpoint is None:
        print(f"nothing to do: {args.checkpoint} is of {args.epochs} epochs or more")
        return
    last.unlink(missing_ok=True)
    last.symlink_to(result.checkpoint.path)
    print(f"epoch {result.metrics['epoch']}: test accuracy {result.metrics['accuracy']:.2f} %")
    print(f"{result.metrics['ratio']:.1f} times fewer bytes than fp32")
    forgotten.cleanup()


if __name__ == "__main__":
    main()
