"""Adapt a byte GPT to another text with LoRA (PyPI ``peft``); the adapters' gradients are sent
compressed.

    torchrun --nproc-per-node 2 examples/lora_gpt.py --text prose.txt.gz
    torchrun --nproc-per-node 2 examples/lora_gpt.py --text prose.txt.gz --codec ternary --group 128

The GPT learns the text first (600 steps, kept in --base for the next run), then its adapters learn
Python's own library.
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp.bench.models import ByteGPT

LENGTH, TRAINED = 129, 0.9  # bytes of a sample and its next one; the rest is held out
CODECS = {"ternary": gradcomp.Ternary, "onebit": gradcomp.OneBit, "block4": gradcomp.Block}


def text_of(file):
    """Return the bytes of a file, plain or .gz; of Python's own library where none is given."""
    if file is not None:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    else:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        data = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sample(text, count, seed, first=0.0, last=1.0):
    draw = torch.Generator().manual_seed(seed)
    bounds = int(len(text) * first), int(len(text) * last) - LENGTH
    starts = torch.randint(*bounds, (count,), generator=draw)
    return torch.stack([text[start : start + LENGTH].long() for start in starts])


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model, optimizer, text, seed, steps, count, warmup=0):
    rate = optimizer.param_groups[0]["lr"]
    for step in range(steps):
        if warmup:
            optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / warmup, 1 - step / steps)
        optimizer.zero_grad()
        drawn = seed * 1000003 + step * 17 + dist.get_rank()
        loss_of(model, sample(text, count, drawn, last=TRAINED)).backward()
        optimizer.step()


def main():
    parser = argparse.ArgumentParser(description="LoRA of a byte GPT with packed gradients.")
    parser.add_argument("--text", type=Path, help="text to learn first, plain or .gz")
    parser.add_argument("--base", type=Path, help="file that keeps the GPT that learned it")
    parser.add_argument("--codec", default="none", help="none, auto, bfloat16, terngrad, ...")
    parser.add_argument("--group", help="values that share a scale, or row (default: the codec's)")
    parser.add_argument("--precondition", action="store_true", help="in units of second moments")
    parser.add_argument("--lr", type=float, default=3e-3, help="of AdamW on the adapters")
    parser.add_argument("--steps", type=int, default=200, help="of the adapters")
    parser.add_argument("--base-steps", type=int, default=600, help="of the GPT before that")
    parser.add_argument("--seed", type=int, default=0, help="of the adapters and their data")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    gpt = ByteGPT()
    if args.base is not None and args.base.exists():
        gpt.load_state_dict(torch.load(args.base))
    else:
        optimizer = torch.optim.AdamW(gpt.parameters(), lr=2e-3)
        train(DDP(gpt), optimizer, text_of(args.text), 0, args.base_steps, 16, warmup=50)
        if args.base is not None and dist.get_rank() == 0:
            torch.save(gpt.state_dict(), args.base)

    torch.manual_seed(args.seed)
    layers = ["qkv", "out", "up", "down"]
    model = DDP(get_peft_model(gpt, LoraConfig(r=8, lora_alpha=16, target_modules=layers)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr)
    state, code = None, text_of(None)
    if args.codec != "none":
        group = int(args.group) if args.group and args.group.isdecimal() else args.group
        codec = CODECS[args.codec](group=group) if group else args.codec
        options = {"precondition": True} if args.precondition else {}
        state = gradcomp.ddp.register(model, codec, optimizer=optimizer, **options)
    train(model, optimizer, code, args.seed + 1, args.steps, 8)
    with torch.no_grad():
        held = sample(code, 256, 7, first=TRAINED)
        loss = sum(loss_of(model, part).item() for part in held.split(32)) / 8
    if dist.get_rank() == 0:
        ratio = f", {state.stats.compression_ratio:.1f} times fewer bytes" if state else ""
        print(f"held-out loss {loss:.4f}{ratio}")
    if state:
        state.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
