"""Measure what `ManagedAverager` adds to a training step of torchft in which no group is lost: two
replica groups on this machine, three kinds of steps in turn, with the same codec and gradients.

    python tests/integrations/torchft_cost.py [--blocks 7] [--steps 30] [--json FILE]

managed: `ManagedAverager.average` between torchft's zero_grad and step.
by hand: `GradientAverager.average` over a fixed group in its place. Lost groups would end the run.
without: the same without a manager.

Each step computes for 100 ms. So managed less by hand is what gradcomp adds, and by hand less
without is what torchft adds: a quorum and a vote.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from gradcomp.launch.ports import free_port
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft._torchft import LighthouseServer

import gradcomp
from gradcomp.bench.about import about
from gradcomp.integrations.torchft import ManagedAverager

STEP_S = 0.1
KINDS = ("managed", "by hand", "without")
TIMEOUT = datetime.timedelta(seconds=60)


class Kind:
    """A model of four million parameters, and how its gradients are averaged."""

    def __init__(self, kind: str, group: int, address: str, codec: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        self._inner: Any = torch.optim.SGD(self.model.parameters(), 0.01)
        self._manager = None if kind == "without" else self._manage(group, address)
        wrapped = None if self._manager is None else Optimizer(self._manager, self._inner)
        self._optimizer = wrapped or self._inner
        self._averager = (
            ManagedAverager(self._manager, self.model, codec, optimizer=self._inner)
            if kind == "managed"
            else gradcomp.GradientAverager(self.model, codec, optimizer=self._inner)
        )
        torch.manual_seed(group)
        self._gradients = [torch.randn_like(p) for p in self.model.parameters()]
        self._work = torch.randn(256, 256)

    def _manage(self, group: int, address: str) -> Manager:
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

        def load(state: dict[str, Any]) -> None:
            self.model.load_state_dict(state["model"])

        return Manager(
            pg=ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=load,
            state_dict=lambda: {"model": self.model.state_dict()},
            min_replica_size=2,
            replica_id=f"group_{group}",
            lighthouse_addr=address,
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
        )

    def step(self) -> float:
        """Make one step and return its seconds."""
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        while time.perf_counter() - begun < STEP_S:
            self._work @ self._work
        for p, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            p.grad = gradient.clone()
        self._averager.average()
        self._optimizer.step()
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the averager's and the manager's threads."""
        self._averager.close()
        if self._manager is not None:
            self._manager.shutdown(wait=False)


def measure(
    group: int, args: argparse.Namespace, addresses: list[str], port: int, out: Any
) -> None:
    """Measure all kinds in turn, as one of two groups; put the medians of all blocks into `out`."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=group, world_size=2, timeout=TIMEOUT
    )
    kinds = {
        kind: Kind(kind, group, address, args.codec)
        for kind, address in zip(KINDS, addresses, strict=True)
    }
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(-1, args.blocks):
        for kind in KINDS if number % 2 else reversed(KINDS):
            dist.barrier()
            seconds = [kinds[kind].step() for _ in range(args.steps)]
            if number >= 0:
                found[kind].append(statistics.median(seconds))
    same = [p for kind in kinds.values() for p in kind.model.parameters()]
    for p in same:
        first = p.detach().clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, p), "the groups have trained apart"
    if group == 0:
        out.put(found)
    dist.barrier()
    for one in kinds.values():
        one.close()
    dist.destroy_process_group()


def main() -> None:
    """Start a lighthouse for each manager and two groups, and print the differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codec", default="ternary", help="the codec (default: ternary)")
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each kind (default: 7)")
    parser.add_argument("--steps", type=int, default=30, help="steps of a block (default: 30)")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args()
    servers = [LighthouseServer(bind="[::]:0", min_replicas=2) for _ in KINDS[:2]]
    addresses = [*(server.address() for server in servers), ""]
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(measure, (args, addresses, free_port(), queue), nprocs=2)
    found = queue.get()
    for server in servers:
        server.shutdown()
    ms = {kind: [round(1e3 * s, 3) for s in found[kind]] for kind in KINDS}
    print(", ".join(f"{kind} {statistics.median(ms[kind]):.1f} ms" for kind in KINDS))
    for more, less in itertools.pairwise(KINDS):
        apart = sorted(a - b for a, b in zip(ms[more], ms[less], strict=True))
        middle = statistics.median(apart)
        print(
            f"{more} less {less}: {middle:.2f} ms ({apart[0]:.2f} to {apart[-1]:.2f}),"
            f" {100 * middle / (1e3 * STEP_S):.2f} % of a step that computes for 100 ms"
        )
    if args.json:
        args.json.write_text(json.dumps({**about(), "codec": args.codec, "step_ms": ms}) + "\n")


if __name__ == "__main__":
    main()
