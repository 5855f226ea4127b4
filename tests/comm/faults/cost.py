"""Measure what checks on the hot path cost: DDP steps with them and without, in turn.

    torchrun --nproc-per-node 2 tests/comm/faults/cost.py [--blocks 7] [--steps 30] [--json FILE]

Without: no CRC-32C of messages, no comparison of headers, no validation of payload bodies and
shared scales, no table of waits, no look at the notes of peers during a wait, no check of who has
claimed a channel, and of new parameters before each forward.

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

CODECS = gradcomp.Ternary(), gradcomp.EntropyCoded(1.25), gradcomp.OneBit()
STEP_MS = 100.0
WIDTH, BATCH = 1024, 8


def net() -> nn.Module:
    """Return an MLP of seven million parameters."""
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


def measure(codec: gradcomp.Codec, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return for each pair of blocks what checks add to a step, in ms, and the median step."""
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

    def block(count: int) -> tuple[float, float]:
        dist.barrier()
        begun = time.process_time()
        step_s = statistics.median(step() for _ in range(count))
        return 1e3 * step_s, 1e3 * (time.process_time() - begun) / count

    found: dict[str, list[float]] = {"step": [], "time": [], "cpu": []}
    block(5)
    for number in range(args.blocks):
        took = {}
        for checks in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if checks else no_checks():
                took[checks] = block(args.steps)
        found["step"].append(took[True][0])
        found["time"].append(took[True][0] - took[False][0])
        found["cpu"].append(took[True][1] - took[False][1])
    state.close()
    return found


def main() -> None:
    """Measure every codec and print a line for each on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each kind (default: 7)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a block (default: 30)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {codec.name: measure(codec, args) for codec in CODECS}
    if dist.get_rank() == 0:
        for name, of in found.items():
            more, least, most = spread(of["time"])
            share = f"{more / STEP_MS:.2%} of {STEP_MS:g} ms"
            cpu, *cpu_range = spread(of["cpu"])
            print(
                f"{name}: a step takes {statistics.median(of['step']):.1f} ms, checks {more:.2f}"
                f" of it ({least:.2f} to {most:.2f}), {share}; of its CPU time {cpu:.2f}"
                f" ({cpu_range[0]:.2f} to {cpu_range[1]:.2f})"
            )
        if args.json:
            args.json.write_text(json.dumps({**about(), "ms": found}) + "\n")
    dist.destroy_process_group()


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, least and largest value."""
    return statistics.median(values), min(values), max(values)


if __name__ == "__main__":
    main()
