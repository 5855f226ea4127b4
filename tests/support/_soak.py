"""What a process holds over a long run (`make soak`): memory, threads and open files stay as they
are. SOAK_STEPS and SOAK_REGISTRATIONS change how long.
"""

import gc
import os
import re
from pathlib import Path

from _held import descriptors

STEPS = int(os.environ.get("SOAK_STEPS", "20000"))
REGISTRATIONS = int(os.environ.get("SOAK_REGISTRATIONS", "1000"))
SAMPLES = 10  # the first two are of a run that still fills its caches
WAIT_S = 7200
GROWTH_MB = 4.0  # that is no leak: 20,000 steps that lose 1 kB each would take 20


def held():
    """Return what this process holds: MB of memory, threads, open files."""
    gc.collect()
    memory = int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
    return memory, len(os.listdir("/proc/self/task")), descriptors()


def due(step, steps):
    """Say whether a sample is due after this step."""
    return (step + 1) % (steps // SAMPLES) == 0


def flat(samples, mb=GROWTH_MB, threads=2, files=2):
    """Raise unless what a process held in all but the first samples is the same."""
    assert len(samples) > SAMPLES // 2
    memory, tasks, opened = zip(*samples[2:], strict=True)
    assert max(memory) - memory[0] < mb, memory
    assert max(tasks) <= min(tasks) + threads and max(opened) <= min(opened) + files, samples
