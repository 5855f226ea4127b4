"""Measure what checks on the hot path cost: DDP steps with them and without, in turn.

    torchrun --nproc-per-node 2 tests/comm/faults/cost.py [--blocks 7] [--steps 30] [--json FILE]

Without: no CRC-32C of messages, no comparison of headers, no validation of payload bodies and
shared scales, no table of waits, no look at the notes of peers during a wait, no check of who has
claimed a channel, of new parameters and of a failed pipeline before each forward.

The bad day is not measured: a rank is named after the step has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import gradcomp
from gradcomp.bench.about import about
from gradcomp.comm.base import Communicator
from gradcomp.comm.gloo import _GlooWork, _patience
from gradcomp.engine.watch import Newcomers
from gradcomp.exchange import bucket, phase
from gradcomp.exchange.phase import Phase
from gradcomp.payload import wire

CODECS = ("ternary", "entropy:bits=1.25", "onebit")
STEP_MS = 100.0
WIDTH, BATCH = 2048, 32


def net() -> nn.Module:
    """Return an MLP of 25 million parameters."""
    torch.manual_seed(0)
    sizes = (784, *[WIDTH] * 7, 10)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _flagged(self: Phase) -> bool:
    """Phase.accept without checks."""
    own = self._comm.rank
    bad = self._nonfinite
    for rank, payload in enumerate(self.tensors):
        if rank != own:
            bad |= bool(int(payload[7]) & wire.FLAG_NONFINITE)
    return bad


def _seal(payload: wire.Bytes, header: wire.Header) -> None:
    fields = wire._FIELDS.pack(wire.MAGIC, wire.VERSION, *header)
    payload[: wire._FIELDS.size] = wire.np.frombuffer(fields, wire.np.uint8)


def _wait(self: _GlooWork, timeout_s: float) -> None:
    self._work.wait(_patience(timeout_s))
    self._groups.pending.discard(self)


@contextlib.contextmanager
def no_checks():
    """Context manager in which the checks above are left out. Both ranks must be in it."""

    def nothing(*_, **__):
        return None

    with contextlib.ExitStack() as stack:
        for owner, name, without in (
            (Phase, "accept", _flagged),
            (Phase, "check_shared_scales", nothing),
            (wire, "seal", _seal),
            (phase, "peers_answer", lambda *_: contextlib.nullcontext()),
            (bucket, "peers_answer", lambda *_: contextlib.nullcontext()),
            (_GlooWork, "wait", _wait),
            (Communicator, "_check_claim", nothing),
            (Newcomers, "refuse", nothing),
        ):
            stack.enter_context(mock.patch.object(owner, name, without))
        yield


def measure(codec: str, blocks: int, steps: int) -> dict[str, list[float]]:
    """Return the median seconds of a step in each block, with checks and without."""
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    state = gradcomp.ddp.register(model, codec, optimizer=optimizer)
    torch.manual_seed(1 + dist.get_rank())
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))

    def step() -> float:
        begun = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        return time.perf_counter() - begun

    def block(count: int) -> float:
        dist.barrier()
        return statistics.median(step() for _ in range(count))

    found: dict[str, list[float]] = {"with": [], "without": []}
    block(5)
    for number in range(blocks):
        for name in sorted(found, reverse=bool(number % 2)):
            with no_checks() if name == "without" else contextlib.nullcontext():
                found[name].append(block(steps))
    state.close()
    return found


def main() -> None:
    """Measure every codec and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each kind (default: 7)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a block (default: 30)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for codec in CODECS:
        of = measure(codec, args.blocks, args.steps)
        pairs = zip(of["with"], of["without"], strict=True)
        cost_ms = sorted(1e3 * (a - b) for a, b in pairs)
        found[codec] = {k: [round(1e3 * s, 3) for s in of[k]] for k in of}
        if dist.get_rank() == 0:
            with_ms, without_ms = (1e3 * statistics.median(of[k]) for k in ("with", "without"))
            middle = statistics.median(cost_ms)
            print(
                f"{codec}: {with_ms:.1f} ms a step with checks, {without_ms:.1f} without;"
                f" difference {middle:.2f} ms ({cost_ms[0]:.2f} to {cost_ms[-1]:.2f}):"
                f" {100 * middle / STEP_MS:.2f} % of a {STEP_MS:g} ms step",
                flush=True,
            )
    if dist.get_rank() == 0 and args.json:
        args.json.write_text(json.dumps({**about(), "step_ms": found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
