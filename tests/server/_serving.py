"""What the tests of the parameter server share: ranks that play servers and workers."""

import zlib

import torch
from _ranks import run_local

from gradcomp.comm import LocalCommunicator
from gradcomp.server import ParameterClient, messages, serve

WHOLE, CUT = {"shard_nbytes": 1 << 20}, {"shard_nbytes": 256}  # options of a client


def run(body, *args, workers=2, servers=1, over=run_local, checkpoint=None, **options):
    """Return what `body(client, index of the worker, *args)` gives each worker, and the counters
    of each server.

    `servers` is a number or the ranks; further options are the client's.
    """
    count = servers if isinstance(servers, int) else len(servers)
    found = over(workers + count, play, servers, checkpoint, options, body, *args)
    serving = messages.server_ranks(servers, workers + count)
    return (
        [value for rank, value in enumerate(found) if rank not in serving],
        [found[rank] for rank in serving],
    )


def play(comm, servers, checkpoint, options, body, *args):
    """Serve, or work."""
    serving = messages.server_ranks(servers, comm.world_size)
    if comm.rank in serving:
        return serve(comm, servers, timeout_s=30.0, checkpoint=checkpoint)
    index = [r for r in range(comm.world_size) if r not in serving].index(comm.rank)
    with ParameterClient(comm, servers, **{"timeout_s": 60.0} | options) as client:
        return body(client, index, *args)


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


def push_payloads(client, index, codec, payloads, compressed=False):
    """Push one payload a round; return what each pull gives."""
    client.init_parameter("p", [payloads[0][index].numel()], "uint8", codec=codec)
    out = []
    for round_payloads in payloads:
        client.push_parameter("p", round_payloads[index])
        out.append(client.pull_parameter("p", "decode_average", compressed=compressed))
    return out


def noise(numel, *seed):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    exponents = torch.randint(-3, 4, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * 10.0**exponents


def same_bits(a, b):
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def flipped(payload):
    out = payload.clone()
    out[-1] ^= 1
    return out


def as_tensor(data):
    return torch.tensor(list(data), dtype=torch.uint8)


class Wrapped(LocalCommunicator):
    """The same rank of a local group, whose subclass does something differently."""

    def __init__(self, comm, **attributes):
        self.__dict__.update(comm.__dict__ | attributes)


def wrapped(rank, kind, **attributes):
    """Return an `over` of `run`: local ranks, one of which has a communicator of that kind."""

    def over(world_size, function, *args):
        def body(comm):
            comm = kind(comm, **attributes) if comm.rank == rank else comm
            return function(comm, *args)

        return run_local(world_size, body)

    return over
