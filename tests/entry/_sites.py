"""One site of `gradcomp.local.ElasticDiLoCo` in a process of its own, with a fault at a given sync.

Its argument is JSON. It prints a line for each sync, and ends after `syncs` of them when `until`
sites are there.
"""

import json
import os
import signal
import sys
import time

import torch
from _models import sgd, train
from torch import nn

from gradcomp.comm.base import Channel
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.local import ElasticDiLoCo, client

SIGNALS = {"die": signal.SIGKILL, "freeze": signal.SIGSTOP}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5))


class Fault:
    """Ends or stops this process in a phase of a sync: "before", "first", "second" or "vote"."""

    def __init__(self, does, phase):
        self._does, self._phase, self.is_due = does, phase, False
        self._wrap(TorchCommunicator, "_start_all_to_all", "first")
        self._wrap(TorchCommunicator, "_start_all_gather", "second")
        self._wrap(client.Client, "vote", "vote")

    def _wrap(self, kind, name, phase):
        call = getattr(kind, name)

        def wrapped(*args, **more):
            if phase != "second" or args[-1] is Channel.SECOND:
                self.now(phase)
            return call(*args, **more)

        setattr(kind, name, wrapped)

    def now(self, phase):
        if self.is_due and phase == self._phase:
            self.is_due = False
            print(self._does, flush=True)
            os.kill(os.getpid(), SIGNALS[self._does])


def main(name, *, address, out, syncs=6, until=3, fault=("", ""), at=2, late="add", pause_s=0.1):
    torch.set_num_threads(1)
    client.ALIVE_S = 0.2
    model = net()
    optimizer = sgd(model)
    happens = Fault(*fault)
    local = ElasticDiLoCo(
        model,
        optimizer,
        "onebit",
        coordinator=address,
        name=name,
        sync_every=2,
        late=late,
        min_numel=0,
        timeout_s=3.0,
    )
    print("joined", local.syncs, flush=True)
    while local.syncs < syncs or len(local.members) < until:
        happens.is_due = local.syncs == at and bool(fault[0])
        happens.now("before")
        for _ in range(2):
            train(model, optimizer, ord(name[0]), [local.inner_steps], features=40, classes=5)
            time.sleep(pause_s)
            local.step()
        print("sync", local.syncs, ",".join(local.members), flush=True)
    torch.save(local._fragments[0].shared_state(), out)
    print("done", json.dumps([local.late_added, local.late_dropped]), flush=True)
    local.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
