"""Under a real Slurm of two nodes: the variables it sets, training over gloo and both MPIs by
launch/slurm.sbatch, the doctor, a task that dies.
"""

import json
import sys
from pathlib import Path

import _slurm
import pytest
from _ranks import mpi_python

ROOT = Path(__file__).resolve().parents[2]
WHY = _slurm.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(WHY), reason=WHY),
    pytest.mark.xdist_group("slurm"),
]

TRAIN = """
import json, os, signal, sys, torch
from torch.nn.parallel import DistributedDataParallel
import gradcomp
from gradcomp.launch import export_environment
found = export_environment()
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 64))
state = gradcomp.ddp.register(model, "onebit", timeout_s=30)
for step in range(3):
    if len(sys.argv) > 1 and step == 2 and found["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)  # as one that needs too much memory
    model(torch.randn(8, 64)).square().mean().backward()
state.check_replicas()
print(json.dumps([found, os.uname().nodename, state.stats.compression_ratio]), flush=True)
state.close()
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with _slurm.slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        (cluster.folder / "train.py").write_text(TRAIN)
        yield cluster


def test_srun_starts_ranks_that_find_each_other(slurm):
    ended = slurm.run("srun", "-N2", "-n2", sys.executable, slurm.folder / "train.py")
    assert ended.returncode == 0, ended.stderr
    told = sorted(
        (json.loads(line) for line in ended.stdout.splitlines()), key=lambda one: one[0]["RANK"]
    )
    (first, here, ratio), (second, there, _) = told
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    assert [first[name] for name in names] == ["0", "2", "0", "1"]
    assert [second[name] for name in names] == ["1", "2", "0", "1"]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"] == "node0"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert here != there and ratio > 12


def test_a_task_that_is_killed_ends_the_step(slurm):
    srun = "srun", "-N2", "-n2", "--kill-on-bad-exit=1"
    ended = slurm.run(*srun, sys.executable, slurm.folder / "train.py", "killed")
    assert ended.returncode != 0 and "task 1: Killed" in ended.stderr
    assert not ended.stdout  # nobody has trained to the end


@pytest.mark.parametrize(
    ("flavour", "pmi"), [("mpich", "pmi2"), pytest.param("openmpi", "pmix", marks=pytest.mark.long)]
)
def test_the_batch_script_trains_over_mpi(slurm, flavour, pmi):
    python, out = mpi_python(flavour), slurm.folder / f"{flavour}.out"
    smaller = ["--ntasks-per-node=1", "--cpus-per-task=1", f"--output={out}"]
    script = [ROOT / "examples/mpi_train.py", "--codec", "onebit", "--epochs", "1"]
    state = slurm.batch(*smaller, ROOT / "launch/slurm.sbatch", *script, MPI=pmi, PYTHON=python)
    assert state == "COMPLETED", out.read_text()
    assert "times fewer bytes than fp32; replicas are equal" in out.read_text()
    assert "over 2 ranks" in out.read_text()


def test_the_doctor_under_srun(slurm):
    ended = slurm.run("srun", "-N2", "-n2", sys.executable, "-m", "gradcomp.doctor", "--json", "-")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = json.loads(ended.stdout)
    assert found["status"] == 0 and found["measured"] and found["world_size"] == 2
    assert [one["starter"] for one in found["ranks"]] == ["srun", "srun"]
    assert {name for one in found["ranks"] for name in one["gloo"]["names"]} == {"eth0"}
    assert all(one["error"] == "PeerLost" for one in found["lost_peer"]["seen"]["0"].values())
