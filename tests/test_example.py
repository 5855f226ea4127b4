"""The example trains under torchrun, and gradcomp is one line of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "ddp_mnist.py"


def test_gradcomp_is_one_added_line():
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert sum("gradcomp.ddp.register(" in line for line in lines) == 1


@pytest.mark.parametrize(("codec", "least_ratio"), [("ternary", 15.0), ("onebit", 28.0), ("none", None)])
def test_example_trains_under_torchrun(codec, least_ratio):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLE), "--codec", codec, "--epochs", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    accuracies = [float(a) for a in re.findall(r"epoch \d: test accuracy ([\d.]+) %", done.stdout)]
    assert len(accuracies) == 3 and accuracies[-1] > 80.0, done.stdout
    ratios = [float(r) for r in re.findall(r"([\d.]+) times fewer bytes", done.stdout)]
    assert (ratios == []) if least_ratio is None else (len(ratios) == 1 and ratios[0] > least_ratio), done.stdout
