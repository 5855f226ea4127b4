"""Every framework that owns the training loop, asked the same questions. A new one is a class in
`_frameworks.FRAMEWORKS`.
"""

import importlib
import inspect
import re
import shutil
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _frameworks import FRAMEWORKS, become_a_run_of_one, forget, plain, run, same, sgd, split
from _ranks import each_rank, program

from gradcomp import GradcompError
from gradcomp.engine import guard
from gradcomp.files import write_saved
from gradcomp.integrations import checkpoints

EXAMPLES = Path(__file__).parents[2] / "examples"
OLD_PYTHON = pytest.mark.skipif(sys.version_info < (3, 11), reason="Transformers needs Python 3.11")
pytestmark = pytest.mark.extras


def row(name, *values):
    return pytest.param(name, *values, marks=[OLD_PYTHON] * (name.startswith("transformers")))


every_framework = pytest.mark.parametrize("name", [row(name) for name in FRAMEWORKS])


@every_framework
@pytest.mark.parametrize(
    ("codec", "optimizer_of", "accumulate"),
    [("terngrad", sgd, 1), ("onebit", sgd, 3), ("onebit", split, 1)],
)
@each_rank(2)
def test_weights_are_those_of_plain_ddp(tmp_path, name, codec, optimizer_of, accumulate):
    framework = FRAMEWORKS[name]
    fused = framework.fused and optimizer_of is split
    given = "auto" if fused else codec, optimizer_of, accumulate, 0.5
    more = {"optimizer_of": optimizer_of, "accumulate": accumulate, "clip": 0.5}
    with mock.patch.object(guard, "perf_counter", return_value=0.0):  # which decides by seconds
        wanted, theirs = plain(*given, fused=fused)
        found = framework.fit(given[0], 2, str(tmp_path), **more)
    assert found.state.stats.bytes_sent == theirs.stats.bytes_sent > 0
    assert same(found.weights, wanted)
    assert fused == ("straight from payloads" in found.state.describe())


@every_framework
@each_rank(2)
def test_a_run_resumes_bit_for_bit(tmp_path, name):
    framework, rank = FRAMEWORKS[name], dist.get_rank()
    wanted = framework.fit("onebit", 4, f"{tmp_path}/whole").weights
    half, bare = framework.fit("onebit", 2, f"{tmp_path}/half").saved, Path(tmp_path, "bare")
    dist.barrier()  # every rank writes its own file
    found = framework.fit("onebit", 4, f"{tmp_path}/resumed", half)
    assert same(found.weights, wanted) and not found.warned
    assert found.state.step == 24 and found.state.stats.steps == 12  # 6 steps an epoch
    with pytest.raises(ValueError, match=f"does not fit.*OneBit.*{framework.remedy}"):
        framework.fit("block4", 4, f"{tmp_path}/other", half)
    if rank == 0:
        (shutil.copytree if half.is_dir() else shutil.copy)(half, bare)
        framework.strip(bare)
    dist.barrier()
    other = framework.fit("onebit", 4, f"{tmp_path}/bare-resumed", bare)
    assert not same(other.weights, wanted), "residuals do not matter here"
    says = "has no gradcomp state: residuals begin at zero, and the warm-up"
    assert says in other.warned[0] if rank == 0 else not other.warned
    become_a_run_of_one()  # the same checkpoint, each rank for itself
    state = framework.fit("onebit", 3, f"{tmp_path}/{rank}", half).state
    assert state.step == 12 + state.stats.steps > 12


@pytest.mark.parametrize(
    "where",
    [
        "lightning.CompressedDDPStrategy",
        row("transformers.Compressed"),
        "ray.register",
        "torchtitan.ReplicaAverage",
    ],
)
def test_the_codec_is_chosen_by_the_optimizer_unless_one_is_named(where):
    """It was "ternary" or "onebit", whatever the optimizer, AdamW above all."""
    module, name = where.split(".")
    entry = getattr(importlib.import_module(f"gradcomp.integrations.{module}"), name)
    assert inspect.signature(entry).parameters["codec"].default == "auto"


@pytest.mark.parametrize("name", [row(name) for name in FRAMEWORKS if name != "lightning"])
@each_rank(2)
def test_a_rank_s_file_that_is_missing_or_broken(tmp_path, name):
    framework, rank = FRAMEWORKS[name], dist.get_rank()
    half = framework.fit("onebit", 2, str(tmp_path)).saved
    dist.barrier()
    files = [half / f"gradcomp-{rank}-of-2.pt" for rank in range(2)]
    assert sorted(half.glob("gradcomp*")) == files
    dist.barrier()
    if rank == 1:
        files[1].unlink()
    dist.barrier()
    warned = framework.fit("onebit", 3, f"{tmp_path}/missing", half).warned
    assert "ranks [1] have no gradcomp-*.pt in" in warned[0]
    if rank == 0:
        files[1].write_bytes(b"cut off")
    dist.barrier()
    with pytest.raises(ValueError, match="rank 1 cannot read its gradcomp-\\*.pt in"):
        framework.fit("onebit", 3, f"{tmp_path}/broken", half)


@pytest.mark.parametrize("name", [row(name) for name in FRAMEWORKS if name != "lightning"])
@each_rank(2)
def test_a_rank_that_cannot_write_its_file_is_named_on_all(tmp_path, name):
    """The others went on, and waited for it in the framework's next collective."""
    disk = {"wraps": write_saved}
    says = r"ranks \[1\] could not write their gradcomp-\*\.pt to .*: see there"
    if dist.get_rank() == 1:
        disk, says = {"side_effect": OSError(28, "No space left on device")}, "No space left"
    with (
        mock.patch.object(checkpoints, "write_saved", **disk),
        pytest.raises(OSError, match=says),
    ):
        FRAMEWORKS[name].fit("onebit", 1, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "how", "why"),
    [row(name, *past) for name, one in FRAMEWORKS.items() for past in one.past],
)
@each_rank(2)
def test_a_step_without_the_hook_is_an_error(tmp_path, name, how, why):
    with pytest.raises(GradcompError, match=f"registered but not called in this step: .*{why}"):
        FRAMEWORKS[name].fit("terngrad", 1, str(tmp_path), how=how)


@every_framework
@each_rank(2)
def test_one_rank_trains_and_says_that_nothing_is_compressed(tmp_path, name):
    framework, rank = FRAMEWORKS[name], dist.get_rank()
    framework.become_alone()
    warned = framework.fit("terngrad", 1, f"{tmp_path}/{rank}").warned
    assert any(framework.alone in one for one in warned), warned


def example(*arguments):
    forget()
    try:
        return program(*arguments)
    finally:
        forget()


SMALL = "--save-every 5 --batch 2 --layers 1"


@pytest.mark.parametrize(
    ("name", "options", "says", "steps"),
    [
        row("accelerate_digits", ["--epochs 1 --codec onebit --checkpoint"] * 2, "30.3 times", 42),
        row(
            "accelerate_digits",
            ["--epochs 1 --sync-every 7 --checkpoint"] * 2,
            "15.*[36] syncs",
            42,
        ),
        row(
            "lightning_digits",
            [f"--epochs {n} --codec onebit --checkpoint" for n in (1, 2)],
            r"(29|3\d)\.\d+ times fewer",
            42,
        ),
        row(
            "transformers_gpt",
            [f"--steps {n} {SMALL} --output" for n in (5, 10)],
            # two of ten steps are timed with Ternary
            r"(5 steps: loss \d\.\d+, 2\d|10 steps: loss \d\.\d+, 1\d)\.\d times fewer bytes",
            10,
        ),
    ],
)
def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path, name, options, says, steps):
    saved = tmp_path / "saved"
    for given in options:
        arguments = *given.split(), str(saved)
        out = "".join(gloo(2, example, str(EXAMPLES / f"{name}.py"), *arguments))
        assert re.search(says, out.splitlines()[-1]), out
    accuracy = re.search(r"test accuracy ([\d.]+) %", out)
    assert float(accuracy[1]) > 60 if accuracy else "gpt" in name, out  # 10 is chance
    if saved.is_file():
        kept = torch.load(saved, weights_only=True)["gradcomp"]
    else:
        kept = [torch.load(one, weights_only=True) for one in saved.rglob("gradcomp-1-of-2.pt")]
    done = [one.get("local", one)["step"] for one in kept]
    assert max(done) == steps


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("accelerate", "-m torch.distributed.run --standalone --nproc-per-node 2"),
        ("lightning", ""),  # it starts the ranks itself
    ],
)
def test_the_example_runs_under_its_launcher(name, launcher):
    example = EXAMPLES / f"{name}_digits.py"
    out = run(*launcher.split(), example, "--epochs", 2)
    assert re.search(r"15\.[78] times fewer bytes", out), out
