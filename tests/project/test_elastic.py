"""examples/elastic.py: a rank is killed in the middle, and another one joins; training goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import pytest
from _ranks import output_of
from gradcomp.launch.ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

EXAMPLE = Path(__file__).parents[2] / "examples/elastic.py"
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"


@contextlib.contextmanager
def agents(folder, seed, port):
    """Yield start(), which starts torchrun as on one more machine, and what was started."""
    started = []
    environ = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}

    def start():
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:3"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-id", "digits"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        quick = f"{QUICK},is_host={int(not started)}"  # by name, on machines of their own
        command += ["--rdzv-conf", quick, EXAMPLE, "--folder", folder, "--seed", str(seed)]
        output = open(folder.with_name(f"{folder.name}.{len(started)}"), "w")  # noqa: SIM115
        options = {"env": os.environ | environ, "stdout": output, "start_new_session": True}
        started.append(subprocess.Popen(command, stderr=subprocess.STDOUT, **options))

    try:
        yield start, started
    finally:
        for one in started:
            kill(one)


def kill(agent):
    """Kill torchrun and its rank, as a machine that goes."""
    found = output_of("ps", "-o", "pid=", "--ppid", agent.pid)
    for pid in [*map(int, found.stdout.split()), agent.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    agent.wait()


def wait_for(step, folder, agent):
    deadline = time.monotonic() + 300
    while not (folder / f"step-{step:012d}" / "shared.pt").exists():
        assert agent.poll() is None and time.monotonic() < deadline, said(folder)
        time.sleep(0.05)


def said(folder):
    return "".join(one.read_text() for one in sorted(folder.parent.glob(f"{folder.name}.*")))


def train(folder, seed, *, disturbed):
    """Return the accuracy, and the (step, ranks) at which ranks began."""
    with agents(folder, seed, free_port()) as (start, started):
        for _ in range(3):
            start()
        if disturbed:
            wait_for(80, folder, started[0])
            kill(started[2])
            wait_for(160, folder, started[0])
            start()
        started[0].wait(600)
        text = said(folder)
    begun = [(int(s), int(n)) for s, n in re.findall(r"step (\d+): (\d+) ranks", text)]
    (accuracy,) = re.findall(r"test accuracy ([\d.]+) %", text) or pytest.fail(text)
    return float(accuracy), begun


def test_a_lost_and_a_new_rank_cost_no_accuracy(tmp_path):
    whole = [train(tmp_path / f"whole{seed}", seed, disturbed=False) for seed in range(3)]
    parts = [train(tmp_path / f"parts{seed}", seed, disturbed=True) for seed in range(3)]
    print(whole, parts)
    assert all(begun == [(0, 3)] for _, begun in whole)
    for _, begun in parts:
        steps, ranks = zip(*begun, strict=True)
        assert ranks[:2] == (3, 2) and set(ranks) <= {2, 3} and 60 <= steps[1] <= 120
    undisturbed = [accuracy for accuracy, _ in whole]
    spread = max(stdev(undisturbed), 0.5)  # one image of 450 is 0.22 %
    assert mean(accuracy for accuracy, _ in parts) > mean(undisturbed) - spread
