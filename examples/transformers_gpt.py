r"""Train a small GPT-2 with Transformers' Trainer and compressed gradients.

    torchrun --nproc-per-node 2 examples/transformers_gpt.py
    torchrun --nproc-per-node 2 examples/transformers_gpt.py --model gpt2 --text notes.txt \
        --output out --save-every 50

`CompressedTrainer` in place of `Trainer` is all that a script has to change. Without ``--model``
weights are random, and tokens are bytes. The same command with more ``--steps`` goes on from the
last checkpoint, bit for bit.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from gradcomp.integrations.transformers import CompressedTrainer

LENGTH = 128  # tokens of a sample


def tokens_of(file: Path | None, tokenizer: str | None) -> torch.Tensor:
    """Return the tokens of a text, of a few files of Python's own library where none is given."""
    files = [file] if file else sorted(Path(os.__file__).parent.glob("*.py"))[:20]
    data = b"".join(path.read_bytes() for path in files)
    if tokenizer is None:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return AutoTokenizer.from_pretrained(tokenizer)(
        data.decode(errors="replace"), return_tensors="pt"
    ).input_ids[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small GPT-2 with Transformers and compressed gradients."
    )
    parser.add_argument(
        "--model",
        help="a model to fine-tune, by name or folder (default: random weights, on bytes)",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="default: Python's own library")
    parser.add_argument(
        "--codec",
        default="auto",
        help="ternary, onebit, block4 ... (auto: by the optimizer, AdamW)",
    )
    parser.add_argument("--layers", type=int, default=4, help="of the random model (4)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank's step (8)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="checkpoints; goes on from the last one there",
    )
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    args = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=args.layers,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = (
        AutoModelForCausalLM.from_pretrained(args.model) if args.model else GPT2LMHeadModel(config)
    )
    tokens = tokens_of(args.text, args.model)
    data = [
        {"input_ids": some, "labels": some}
        for some in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=str(args.output or folder),
            use_cpu=True,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            logging_steps=args.steps,
            save_strategy="steps" if args.output else "no",
            save_steps=args.save_every,
            save_total_limit=2,
        )
        # <- the changed line
        trainer = CompressedTrainer(model, arguments, train_dataset=data, codec=args.codec)
        last = get_last_checkpoint(args.output) if args.output and args.output.is_dir() else None
        loss = trainer.train(resume_from_checkpoint=last).training_loss
    ratio = trainer.compression.stats.compression_ratio if trainer.compression else 1.0
    if trainer.is_world_process_zero():
        print(
            f"{trainer.state.global_step} steps: loss {loss:.3f}, {ratio:.1f} times fewer bytes"
            " than fp32",
            flush=True,
        )


if __name__ == "__main__":
    main()
