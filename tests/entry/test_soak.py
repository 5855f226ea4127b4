"""Long runs of every entry point, of the parameter server and of sites (`make soak`): memory,
threads, open files and residuals stay as they are.
"""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from _elastic import H
from _elastic import steps as sites_steps
from _soak import GROWTH_MB, REGISTRATIONS, STEPS, WAIT_S, due, flat, held
from test_conformance import ENTRIES, Averager

from gradcomp import Advanced, OneBit
from gradcomp.comm import TorchCommunicator
from gradcomp.server import ParameterClient, serve

pytestmark = [pytest.mark.long, pytest.mark.soak, pytest.mark.timeout(WAIT_S)]


class Hierarchical(Averager):
    """Two nodes of two ranks."""

    def open(self, codec, **options):
        options |= {"exchange": "hierarchical", "advanced": Advanced(nodes=((0, 1), (2, 3)))}
        return super().open(codec, **options)


RUNS = {name: (2, entry) for name, entry in ENTRIES.items()} | {"hierarchical": (4, Hierarchical)}


def residual_norm(run):
    if not run.resumes:
        kept = [feedback.residual(key) for key, feedback in enumerate(run.feedback)]
    else:
        (state,) = run.opened.state_dict()["ranks"].values()
        kept = [
            one for kind, tensors in state.items() if "residual" in kind for one in tensors.values()
        ]
    return float(sum(torch.as_tensor(one).square().sum() for one in kept)) ** 0.5


def trained(entry, codec, steps):
    run, samples, norms = entry(codec), [], []
    for step in range(steps):
        run.step(step)
        if due(step, steps):
            samples.append(held())
            norms.append(residual_norm(run))
    run.close()
    return samples, norms


@pytest.mark.parametrize("codec", ["onebit", "entropy"])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_grows_over_steps(gloo, name, codec):
    world, entry = RUNS[name]
    for samples, norms in gloo(world, trained, entry, codec, STEPS, timeout_s=WAIT_S):
        flat(samples)
        norms = norms[2:]
        half = len(norms) // 2
        assert max(norms[half:]) < 2 * max(*norms[:half], 1e-3), norms


def registered(entry, count):
    samples = []
    for number in range(count):
        run = entry(["onebit", "entropy", "terngrad"][number % 3])
        for step in range(2 * entry.sync_every):
            run.step(step)
        if number % 2 or not run.resumes:
            run.close()  # else it is only dropped
        del run
        if due(number, count):
            dist.barrier()
            samples.append(held())
    return samples


@pytest.mark.parametrize("name", RUNS)
def test_nothing_grows_over_registrations(gloo, name):
    world, entry = RUNS[name]
    communicators = 3 if name == "hierarchical" else 1  # each keeps some kB, a part of it torch's
    for samples in gloo(world, registered, entry, REGISTRATIONS, timeout_s=WAIT_S):
        flat(samples, communicators * 2 * GROWTH_MB, 4, 8)


def served(rounds):
    """Serve as rank 2, or push and pull values and payloads."""
    comm, samples, codec = TorchCommunicator(timeout_s=60), [], OneBit()
    if comm.rank == 2:
        work = threading.Thread(target=partial(serve, comm, [2], timeout_s=60))
        work.start()
        for step in range(rounds):
            if due(step, rounds):
                dist.barrier()
                samples.append(held())
        work.join()
        return samples
    values = torch.randn(64, 40)
    payload = codec.encode(values)
    with ParameterClient(comm, [2], timeout_s=60) as client:
        client.init_parameter("values", values.shape)
        client.init_parameter("payloads", payload.shape, "uint8", codec=codec)
        for step in range(rounds):
            client.push_parameter("values", values)
            client.push_parameter("payloads", payload)
            client.pull_parameter("values", "mean")
            client.pull_parameter("payloads", "decode_average")
            if due(step, rounds):
                dist.barrier()
                samples.append(held())
    return samples


def test_nothing_grows_over_rounds_of_a_server(gloo):
    for samples in gloo(3, served, STEPS, timeout_s=WAIT_S):
        flat(samples)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("codec", ["onebit", "entropy"])
def test_nothing_grows_over_syncs_of_sites(run, codec):
    sites, samples, both = run(sites=2), [], threading.Barrier(2)

    def site(name):
        with sites.joined(name, codec=codec) as (model, optimizer, local):
            for step in range(STEPS):
                sites_steps(model, optimizer, local, [step], "ab".index(name))
                if due(step, STEPS):
                    both.wait()
                    if name == "a":
                        samples.append(held())
                    both.wait()

    sites.each("ab", site, wait_s=WAIT_S)
    flat(samples, mb=STEPS / H * 4 / 1024)  # each sync makes a communicator, which keeps some kB
