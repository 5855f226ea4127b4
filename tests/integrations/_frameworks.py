"""What the tests of all frameworks have in common: a model, its data, a plain DDP run of it, ranks
as a launcher makes them.
"""

import contextlib
import os
import subprocess
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp

ROWS, BATCH = 48, 4  # samples, and a rank's share of a minibatch


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 1))


def loader(rank, world, **options):
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(ROWS, 40, generator=draw), torch.randn(ROWS, 1, generator=draw)
    )
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, **options))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def split(model):
    return gradcomp.optim.SplitSGD(gradcomp.optim.split_parameters(model), lr=0.1, momentum=0.9)


def loss_of(model, x, y):
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def same(model, wanted):
    """Whether a model, or a list of tensors, has these bits."""
    values = model.parameters() if isinstance(model, nn.Module) else model
    return all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))


def plain(data, codec, optimizer_of=sgd, epochs=2, accumulate=1, clip=None, fused=False):
    """Return the weights of a torch loop with `gradcomp.ddp.register`, and its state."""
    model = net()
    optimizer = optimizer_of(model)
    model = DistributedDataParallel(model)
    options = {"optimizer": optimizer} if fused else {}
    state = gradcomp.ddp.register(model, codec, **options)
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)
        for number, batch in enumerate(data):
            last = (number + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model, *batch) / accumulate).backward()
            if last:
                state.materialize_gradients()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    state.close()
    dist.barrier()
    return weights_of(model), state


def forget():
    """Let accelerate look for its ranks again: it keeps what it found for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def launched(**more):
    """Let a framework find the ranks that are there already, as a launcher would have made them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, **more}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name in place:
            os.environ.pop(name, None)


@contextlib.contextmanager
def said():
    """Yield a list that has gradcomp's warnings afterwards."""
    ours = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield ours
    ours += [str(one.message) for one in caught if "gradcomp" in str(one.message)]


def become_a_run_of_one():
    """Make a default group of this rank alone."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run(*command, timeout_s=240, **more):
    """Return what a program has printed; `more` are environment variables."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout
