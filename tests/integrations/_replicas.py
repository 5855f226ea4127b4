"""One rank of a replica group under torchft, which trains a small model with a
`ManagedAverager` and has faults at given steps.

Its argument is JSON; it prints a line a step, and what happened at the end: after `steps` steps,
when `until` groups are there.
"""

import datetime
import faulthandler
import json
import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from _soak import held
from torch import nn
from torch.nn.functional import mse_loss
from torchft import Manager, Optimizer, ProcessGroupGloo

import gradcomp
from gradcomp.comm.base import Channel
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.integrations.torchft import DiLoCo, ManagedAverager

faulthandler.register(signal.SIGUSR1)
BATCH = 12
ADAM = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}
CODECS = {"other": gradcomp.OneBit(), "terngrad": gradcomp.TernGrad(seed=1)}


def net(width=64):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 1))


class Faults:
    """What is to happen to this rank, {"step": what}, each once."""

    def __init__(self, faults, manager):
        self._faults = {int(step): what for step, what in faults.items()}
        self._manager, self._at = manager, ""
        starts = {"first": "_start_all_to_all", "second": "_start_all_gather"}
        for phase, name in starts.items():
            setattr(TorchCommunicator, name, self._wrap(phase, getattr(TorchCommunicator, name)))

    def now(self):
        """Let happen what happens before an exchange; the rest waits for its phase."""
        due = [step for step in self._faults if step <= self._manager.current_step()]
        self._at = self._faults.pop(due[0]) if due else ""
        if self._at == "refuse":
            self._manager.report_error(RuntimeError("this group does not want this step"))
        elif self._at in ("die", "freeze"):
            self._end()

    def _end(self):
        print(self._at, flush=True)
        os.kill(os.getpid(), signal.SIGSTOP if self._at == "freeze" else signal.SIGKILL)
        self._at = ""

    def _wrap(self, phase, start):
        def started(comm, *args):
            does, _, when = self._at.partition(" ")
            if when == phase and (phase == "first" or args[-1] is Channel.SECOND):
                if does == "break":
                    self._at = ""
                    raise ConnectionError("the network is gone, a test says")
                work = start(comm, *args)
                self._at = does
                self._end()
                return work
            return start(comm, *args)

        return started


def main(
    group,
    *,
    lighthouse,
    rank=0,
    ranks=1,
    port=0,
    faults=(),
    codec="ternary",
    optimizer="adam",
    least=1,
    sync=False,
    timeout_s=20.0,
    out="",
    steps=16,
    options=(),
    until=1,
    fragments=0,
    quorum_s=20.0,
    gate="",
    name="",
    state=(),
    width=64,
    retries=0,
    called=None,
    sample_every=0,
):
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    logging.getLogger("gradcomp").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("gradcomp").setLevel(logging.WARNING)
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    model = net(width)
    inner = ADAM[optimizer](model.parameters(), lr=0.01)
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore("localhost", port, is_master=rank == 0, wait_for_workers=False)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=least,
        use_async_quorum=not sync,
        replica_id=f"group_{group if called is None else called}",
        store_addr="localhost",
        store_port=store.port,
        rank=rank,
        world_size=ranks,
        quorum_retries=retries,
        timeout=timeout,
        quorum_timeout=datetime.timedelta(seconds=quorum_s),
        connect_timeout=timeout,
    )
    happens = Faults(dict(faults), manager)
    codec, options = CODECS.get(codec, codec), {"min_numel": 0, **dict(options)}
    if fragments:
        cut = [model] if fragments == 1 else [model[0], model[2]]
        outer = [torch.optim.SGD(f.parameters(), 0.7, 0.9, nesterov=True) for f in cut]
        averager = DiLoCo(
            manager,
            cut,
            inner,
            outer,
            sync_every=4 * fragments,
            codec=codec,
            options=options,
            fragment_sync_delay=fragments - 1,
        )
    else:
        averager = ManagedAverager(manager, model, codec, optimizer=inner, name=name, **options)
        if state:
            averager.load_state_dict([torch.load(file) for file in state])
    print("ready", flush=True)
    while gate and not os.path.exists(gate):  # the others are not ready
        time.sleep(0.01)
    loop = train_rarely if fragments else train
    parts = manager, model, inner, averager, happens
    ended = loop(*parts, rank=rank, steps=steps, least=until, sample_every=sample_every)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = {"model": weights, "inner": inner.state_dict()["state"]}
    if fragments:
        outer = [f._outer_optimizer.state_dict()["state"] for f in averager._fragments]
        kept = [f.original_parameters for f in averager._fragments]
        found = {"model": flat(kept), "inner": dict(enumerate(map(flat, outer)))}
    else:
        found["moments"] = averager._engine.shared_state()
        torch.save(averager.state_dict(), f"{out}.state")
    torch.save(found, out)
    print("done", json.dumps(ended), flush=True)
    averager.close()
    manager.shutdown(wait=False)


def flat(nested):
    """Return tensors by the way to them."""
    if isinstance(nested, torch.Tensor):
        return {"": nested}
    items = nested.items() if isinstance(nested, dict) else enumerate(nested)
    return {f"{key}.{way}": t for key, one in items for way, t in flat(one).items()}


def said(step, groups, sample_every):
    """Print the number of a step and of its groups, or every so often what this process holds."""
    if not sample_every:
        print("step", step, "groups", groups, flush=True)
    elif step % sample_every == 0:
        print("held", json.dumps(held()), flush=True)


def batch_of(rank, number, mine, count):
    draw = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(BATCH, 40, generator=draw)[mine::count]
    return x, x.sum(1, keepdim=True).sin()


def train(manager, model, inner, averager, happens, *, rank, steps, least, sample_every):
    managed, lost, groups = Optimizer(manager, inner), [], []
    count = 0
    while (step := manager.current_step()) < steps or count < least:
        managed.zero_grad()
        mine, count = manager.participating_rank() or 0, max(1, manager.num_participants())
        at = manager.current_step()
        x, y = batch_of(rank, at, mine, count)
        mse_loss(model(x), y).backward()
        happens.now()
        averager.average()
        managed.step()
        if manager.current_step() > at:
            groups.append(count)
            said(at, count, sample_every)
        elif at == step:
            lost.append(at)
    return {"lost": lost, "groups": groups}


def train_rarely(manager, model, inner, diloco, happens, *, rank, steps, least, sample_every):
    lost, groups, number = [], [], 0
    with diloco:
        while (step := manager.current_step()) < steps or groups[-1:] < [least]:
            number += 1
            x, y = batch_of(rank, number, 0, 1)
            inner.zero_grad()
            mse_loss(model(x), y).backward()
            if diloco._local_step == diloco._sync_every - diloco._fragment_sync_delay - 1:
                happens.now()
            inner.step()
            if diloco._local_step == 0:
                at = manager.current_step()
                lost += [step] * (at == step)
                if at > step:
                    groups.append(manager.num_participants())
                    said(step, groups[-1], sample_every)
    return {"lost": lost, "groups": groups}


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
