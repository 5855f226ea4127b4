"""Long runs of every entry point: memory, threads, file descriptors and residuals stay as they are.

`make soak` runs it; SOAK_STEPS and SOAK_REGISTRATIONS change how long.
"""

import gc
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_conformance import ENTRIES

pytestmark = [pytest.mark.long, pytest.mark.soak]

STEPS = int(os.environ.get("SOAK_STEPS", "20000"))
REGISTRATIONS = int(os.environ.get("SOAK_REGISTRATIONS", "1000"))
SAMPLES = 10  # the first two are of a run that still fills its caches
GROWTH_MB = 4.0  # that is no leak: 20,000 steps that lose 1 kB each would take 20


def held(run=None):
    """Return what this process holds: MB of memory, threads, descriptors, norm of residuals."""
    gc.collect()
    memory = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    threads, files = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return memory, threads, files, residual_norm(run) if run else 0.0


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
    run, samples = entry(codec), []
    for step in range(steps):
        run.step(step)
        if (step + 1) % (steps // SAMPLES) == 0:
            samples.append(held(run))
    run.close()
    return samples


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["onebit", "entropy"])
@pytest.mark.parametrize("name", ENTRIES)
def test_nothing_grows_over_steps(gloo, name, codec):
    for samples in gloo(2, trained, ENTRIES[name], codec, STEPS, timeout_s=3600):
        memory, threads, files, norms = zip(*samples[2:], strict=True)
        assert max(memory) - memory[0] < GROWTH_MB, memory
        assert max(threads) <= min(threads) + 2 and max(files) <= min(files) + 2, (threads, files)
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
        if (number + 1) % (count // SAMPLES) == 0:
            dist.barrier()
            samples.append(held())
    return samples


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ENTRIES)
def test_nothing_grows_over_registrations(gloo, name):
    for samples in gloo(2, registered, ENTRIES[name], REGISTRATIONS, timeout_s=3600):
        memory, threads, files, _ = zip(*samples[2:], strict=True)
        assert max(memory) - memory[0] < 2 * GROWTH_MB, memory
        assert max(threads) <= min(threads) + 4 and max(files) <= min(files) + 8, (threads, files)
