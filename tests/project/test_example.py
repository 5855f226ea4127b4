"""The examples train, under torchrun and under both MPIs, and gradcomp is few lines of them."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from _forks import python
from _ranks import mpi_environment, mpi_python, output_of, program

from gradcomp.bench.models import LeNet

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_mnist.py"
MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"  # not part of the repository


EXAMPLE_ROWS = [
    ("terngrad", 15.0),
    *(pytest.param(*row, marks=pytest.mark.long) for row in [("onebit", 28.0), ("none", None)]),
]


def test_gradcomp_is_one_added_line():
    lines = EXAMPLE.read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80
    assert sum("gradcomp.ddp.register(" in line for line in lines) == 1


def test_each_command_has_a_line_of_its_own():
    flags = re.MULTILINE
    for script in EXAMPLE.parent.glob("*.py"):
        docstring = script.read_text(encoding="utf-8").split('"""')[1]
        joined = re.search(r"^    .*\.py .*(torchrun|python -m|mpirun) .*$", docstring, flags)
        assert joined is None, (script, joined)


def under_torchrun(script, ranks, *options):
    torchrun = [*python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, ranks, EXAMPLE.with_name(script), *options]
    done = output_of(*command, timeout=600, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(("codec", "least_ratio"), EXAMPLE_ROWS)
def test_the_example_trains(torchrun, codec, least_ratio):
    out = torchrun(EXAMPLE.name, 2, "--codec", codec, "--epochs", "2")
    assert len(accuracies(out)) == 2 and accuracies(out)[-1] > 80.0, out
    ratios = ratios_of(out)
    assert len(ratios) == (least_ratio is not None), out
    assert all(ratio > least_ratio for ratio in ratios), out


def ratios_of(text):
    return [float(ratio) for ratio in re.findall(r"([\d.]+) times fewer bytes", text)]


def accuracies(text):
    return [float(a) for a in re.findall(r"test accuracy ([\d.]+) %", text)]


@pytest.fixture(params=["warm", pytest.param("launched", marks=pytest.mark.long)])
def torchrun(request, gloo):
    """Return run(script, ranks, *options): what an example prints, in warm ranks or under
    torchrun.
    """

    def warm(script, ranks, *options):
        return "".join(gloo(ranks, program, str(EXAMPLE.with_name(script)), *options))

    return warm if request.param == "warm" else under_torchrun


@pytest.mark.long  # tests/launch/test_slurm.py trains it under MPICH in every run
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
@pytest.mark.parametrize("launched", [False, True])
@pytest.mark.parametrize("codec", ["terngrad", "onebit", "fp32"])
def test_mpi_example_trains_on_four_ranks(pools, flavour, codec, launched):
    options = ["--codec", codec, "--epochs", "3"]
    out = example_over_mpi(pools, flavour, launched, 4, "mpi_train.py", *options)
    assert len(accuracies(out)) == 3 and accuracies(out)[-1] > 70.0, out  # 10 is chance
    (ratio,) = ratios_of(out)
    least, most = {"terngrad": (10, 11), "onebit": (29, 31), "fp32": (0.99, 1.01)}[codec]
    assert least < ratio < most and "fewer bytes than fp32; replicas are equal" in out, out


def example_over_mpi(pools, flavour, launched, ranks, script, *options):
    """Return what an example prints, under the launcher or in warm ranks."""
    if not launched:
        return "".join(pools(flavour, ranks, program, str(EXAMPLE.with_name(script)), *options))
    start = [mpi_python(flavour), "-m", "gradcomp.launch", "-n", ranks]
    command = [*start, EXAMPLE.with_name(script), *options]
    done = output_of(*command, timeout=240, env=mpi_environment())
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_mpi_example_does_not_use_torch_distributed():
    text = EXAMPLE.with_name("mpi_train.py").read_text(encoding="utf-8")
    assert "torch.distributed" not in text.split('"""')[2] and len(text.splitlines()) < 90


@pytest.mark.parametrize("flavour", ["mpich", pytest.param("openmpi", marks=pytest.mark.long)])
@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_parameter_server_example_trains_over_mpi(pools, flavour, launched):
    out = example_over_mpi(pools, flavour, launched, 3, "parameter_server.py", "--steps", "15")
    assert "equals gradcomp.all_reduce bit for bit" in out, out


@pytest.mark.parametrize("weights", ["split", pytest.param("bf16", marks=pytest.mark.long)])
def test_the_split_sgd_example_trains_and_saves_fp32(torchrun, weights, tmp_path):
    options = ["--epochs", "1", "--weights", weights, "--save", tmp_path / "weights.pt"]
    out = torchrun("split_sgd_ddp.py", 2, *options)
    assert len(accuracies(out)) == 1 and accuracies(out)[-1] > 40.0, out  # 10 is chance
    assert ("updates go straight from payloads to weights" in out) == (weights == "split"), out
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    dtype = torch.float32 if weights == "split" else torch.bfloat16
    assert {value.dtype for value in state.values()} == {dtype}
    LeNet().load_state_dict(state)


def losses(text):
    return [float(a) for a in re.findall(r"held-out loss ([\d.]+) nats", text)]


def test_the_local_steps_example_trains_and_knows_where_it_was(torchrun, tmp_path):
    (tmp_path / "text").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 2000)
    options = ["--text", tmp_path / "text", "--warm-up", "4", "--sync-every", "3", "--batch", "2"]
    folder = ["--checkpoint", tmp_path / "saved"]
    whole = torchrun("diloco_gpt.py", 2, *options, "--steps", "20", *folder)
    assert len(losses(whole)) == 10 and losses(whole)[-1] < 3.2, whole  # 5.5 is chance
    # 4 of 20 steps in fp32, and of 16 syncs 5 in a sixteenth
    says = "5 times fewer bytes than fp32 in each of 20 steps; replicas are equal"
    assert re.search(rf"(?<!\d){says}", whole), whole
    out = torchrun("diloco_gpt.py", 2, *options, "--steps", "20", *folder)  # nothing is left to do
    assert losses(out) == [] and "in each of 0 steps; replicas are equal" in out


@pytest.mark.extras
def test_the_lora_example_trains_adapters_in_two_bits(torchrun):
    options = ["--codec", "ternary", "--group", "128", "--precondition", "--base-steps", "4"]
    out = torchrun("lora_gpt.py", 2, *options, "--steps", "12", "--lr", "0.01")
    loss, ratio = re.search(r"held-out loss ([\d.]+), ([\d.]+) times fewer", out).groups()
    assert float(loss) < 5.3 and ratio == "14.2", out  # 5.5 is chance


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
def test_the_local_steps_example_trains_over_mpi(pools, flavour):
    options = ["--mpi", "--steps", "10", "--warm-up", "2", "--sync-every", "4"]
    out = example_over_mpi(pools, flavour, False, 2, "diloco_gpt.py", *options)
    assert len(losses(out)) == 10 and "replicas are equal" in out, out


def test_the_mesh_example_trains_on_two_by_two_ranks(torchrun):
    out = torchrun("onebit_2d.py", 4, "--epochs", "1")
    assert accuracies(out)[-1] > 40.0 and "over 2 ranks" in out, out  # 10 is chance
    (ratio,) = ratios_of(out)
    assert 29 < ratio < 31, out


def test_the_1bit_sgd_example_prints_its_table(torchrun, tmp_path):
    file = tmp_path / "table.json"
    options = ["--epochs", "2", "--seeds", "1", "--rows", "2", "6", "--search-samples", "256"]
    out = torchrun("onebit_sgd.py", 2, *options, "--json", str(file))
    assert "minibatch search" in out
    halves, searched = (runs[0] for runs in json.loads(file.read_text()).values())
    assert all(r["accuracy"] > 40.0 for r in (halves, searched)), out
    # LeNet in fp32 sends 5,024,400
    assert halves["nbytes"] < 5_024_400 / 15 and 0 < halves["hidden"] < 1, out
    assert searched["minibatch"] >= halves["minibatch"] == 64, out


def accuracy_of(weights, seed, *options):
    codec = ["--codec", "none"] if weights == "fp32" else []
    given = "--weights", weights, "--seed", seed, *options, *codec
    return accuracies(under_torchrun("split_sgd_ddp.py", 2, *given))[-1]


def mean_accuracies(*options):
    names = ("fp32", "split", "bf16")
    return {w: sum(accuracy_of(w, seed, *options) for seed in range(3)) / 3 for w in names}


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "margin"),
    [
        pytest.param(["--epochs", "10"], 1.0, id="digits"),
        pytest.param(["--epochs", "1", "--data", str(MNIST)], 0.5, id="mnist"),
    ],
)
def test_split_weights_and_ternary_gradients_train_as_fp32_does(options, margin):
    if "--data" in options and not MNIST.is_dir():
        pytest.skip(f"needs MNIST in {MNIST}")
    means = mean_accuracies(*options)
    assert means["split"] >= means["fp32"] - margin, means


@pytest.mark.long
def test_small_updates_are_lost_in_plain_bf16_and_not_in_split_weights():
    means = mean_accuracies("--epochs", "20", "--lr", "0.003", "--momentum", "0")
    assert means["split"] >= means["fp32"] - 3, means
    assert means["bf16"] <= means["split"] - 15, means
