r"""Train a byte GPT on ranks that exchange only now and then: local steps, packed pseudo-gradients
(DiLoCo).

    torchrun --nproc-per-node 2 examples/diloco_gpt.py
    torchrun --nproc-per-node 2 examples/diloco_gpt.py --text book.txt --codec terngrad \
        --sync-every 30 --fragments 3 --delay 5

Two machines, one command on each (or `python -m gradcomp.launch -n 2 -H one,two
examples/diloco_gpt.py --mpi` on the first):

    torchrun --nnodes 2 --node-rank 0 --master-addr one --master-port 29500 examples/diloco_gpt.py
    torchrun --nnodes 2 --node-rank 1 --master-addr one --master-port 29500 examples/diloco_gpt.py

With ``--checkpoint DIR`` every rank saves where it is after each report, and the same command goes
on from there, bit for bit.
"""

import argparse
import gzip
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import gradcomp
from gradcomp.bench.models import ByteGPT

LENGTH, HELD_OUT = 129, 20  # bytes of a sample and its next one; one part in twenty is held out


def text_of(file: Path | None) -> torch.Tensor:
    """Return the bytes of a file, plain or .gz; of Python's own library where none is given."""
    if file is None:
        data = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    else:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sample(text: torch.Tensor, count: int, draw: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH + 1, (count, 1), generator=draw)
    return text[starts + torch.arange(LENGTH)].long()


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a byte GPT with local steps and packed exchanges."
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="plain or .gz (default: Python's own library)",
    )
    parser.add_argument(
        "--codec",
        default="terngrad",
        choices=["identity", "ternary", "terngrad", "block2", "block4", "onebit"],
    )
    parser.add_argument(
        "--sync-every", type=int, default=30, metavar="H", help="steps between exchanges (30)"
    )
    parser.add_argument(
        "--fragments", type=int, default=1, help="parts of the model that take turns (1)"
    )
    parser.add_argument(
        "--delay", type=int, default=0, help="steps that go on during an exchange (0)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=60, help="steps whose gradients are averaged first (60)"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank's step (8)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--mpi", action="store_true", help="over MPI instead of torch.distributed")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here, go on from here")
    args = parser.parse_args()

    if not args.mpi:
        dist.init_process_group("gloo")
    comm = gradcomp.comm.MpiCommunicator() if args.mpi else gradcomp.comm.TorchCommunicator()
    rank = comm.rank
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    )
    text = text_of(args.text)
    train, held_out = text[len(text) // HELD_OUT :], text[: len(text) // HELD_OUT]
    if len(held_out) < LENGTH:
        parser.error(
            f"{args.text or 'the library'} has {len(text)} bytes: a text of at least"
            f" {HELD_OUT * LENGTH} is needed"
        )
    torch.manual_seed(0)  # the same weights on every rank
    model = ByteGPT()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    draw = torch.Generator().manual_seed(1 + rank)  # data of its own on every rank

    local = gradcomp.DiLoCo(
        model,
        optimizer,
        args.codec,
        comm=comm,
        sync_every=args.sync_every,
        fragments=args.fragments,
        fragment_sync_delay=args.delay,
        warmup_steps=args.warm_up,
    )
    if rank == 0:
        print(local.describe(), flush=True)
    file = args.checkpoint / f"rank{rank}.pt" if args.checkpoint else None
    if file is not None and file.exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        draw.set_state(saved["draw"])
        local.load_state_dict(saved["local"])
    local.check_replicas()  # all ranks have found their files, of the same step, or none has

    begun, report_every = local.inner_steps, max(1, args.steps // 10)
    while local.inner_steps < args.steps:
        done = local.inner_steps / args.steps
        for group in optimizer.param_groups:
            group["lr"] = (
                args.lr * min(1.0, 20 * done + 0.02) * (0.55 + 0.45 * math.cos(math.pi * done))
            )
        optimizer.zero_grad()
        loss_of(model, sample(train, args.batch, draw)).backward()
        local.average_gradients()  # until --warm-up; after it nothing
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        local.step()
        if local.inner_steps % report_every == 0:
            if rank == 0:
                with torch.no_grad():
                    loss = loss_of(model, sample(held_out, 64, torch.Generator().manual_seed(0)))
                sent = (local.stats.bytes_sent + local.start_stats.bytes_sent) / 1e6
                print(
                    f"step {local.inner_steps}: held-out loss {loss:.3f} nats a byte, {sent:.1f} MB"
                    " sent",
                    flush=True,
                )
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "draw": draw.get_state(),
                }
                torch.save(state | {"local": local.state_dict()}, file.with_suffix(".new"))
                file.with_suffix(".new").replace(file)

    local.restore()  # every rank holds what was agreed on last
    local.check_replicas()
    if rank == 0:
        ring = (
            8 * sum(p.numel() for p in model.parameters()) * (comm.world_size - 1) / comm.world_size
        )
        sent = local.stats.bytes_sent + local.start_stats.bytes_sent
        steps = local.inner_steps - begun
        print(
            f"{steps * ring / max(1, sent):.0f} times fewer bytes than fp32 in each of {steps}"
            " steps; replicas are equal",
            flush=True,
        )
    local.close()
    if not args.mpi:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
