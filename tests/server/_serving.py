"""What the tests of the parameter server share: ranks that play servers and workers."""

import zlib

import torch
from _ranks import run_local

from gradcomp.comm import LocalCommunicator, Work
from gradcomp.server import ParameterClient, messages, serve


def play(comm, servers, body, *args, checkpoint=None, **options):
    """Serve, or return body(client, index of the worker, *args)."""
    serving = messages.server_ranks(servers, comm.world_size)
    if comm.rank in serving:
        return serve(comm, servers, timeout_s=30.0, checkpoint=checkpoint)
    index = [r for r in range(comm.world_size) if r not in serving].index(comm.rank)
    with ParameterClient(comm, servers, **{"timeout_s": 60.0} | options) as client:
        return body(client, index, *args)


def run(body, *args, workers=2, servers=1, over=run_local, **options):
    """Return what the workers return, and the servers' counters."""
    found = over(workers + servers, _play, servers, options, body, *args)
    return found[:workers], found[workers:]


def _play(comm, servers, options, *args):
    return play(comm, servers, *args, **options)


def caught(call, *args, **options):
    """Return what `call` raises, or None."""
    try:
        call(*args, **options)
    except Exception as error:
        return error
    return None


def meet(client, key="meet"):
    """Wait for all workers."""
    client.init_parameter(key, [1])
    client.push_parameter(key, 1.0)
    return int(client.pull_parameter(key, "sum"))


def noise(numel, *seed):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (numel,), generator=generator
    )


def same_bits(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))
    )


def flipped(payload):
    out = payload.clone()
    out[-1] ^= 1
    return out


def as_tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


class Done(Work):
    """A message that has left."""

    def is_done(self):
        return True

    def wait(self, timeout_s):
        return


class Wrapped(LocalCommunicator):
    """The same rank of a local group, whose subclass does something differently."""

    def __init__(self, comm, **attributes):
        self.__dict__.update(comm.__dict__ | attributes)
