"""``bench train --device``: on the device for tests, which is refused where there is none."""

import json
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _ranks import each_rank, mpi_environment, output_of
from _ranks import test_folders as folders_of_tests
from torch import nn

from gradcomp.bench import device, hosts, trainer, workloads
from gradcomp.bench.measure import measure_methods
from gradcomp.bench.train import main

WHY = hosts.unavailable()
OVER = "--hosts 0" if WHY else "--hosts 2 --link 1gbit"
# a group takes tensors of both, as gloo does for CUDA; the server of the ranks imports the device,
# so that its forks have it
PROGRAM = """
import sys
import _lazy
import torch.distributed as dist
from gradcomp.bench import ranks
from gradcomp.bench.measure import measure_methods
from gradcomp.bench.train import main
dist.Backend.default_device_backend_map["lazy"] = "_lazy_shared"
ranks.IMPORTED.append("_lazy")
sys.exit(main(sys.argv[1:]))
"""
METHODS = ["fp32", "onebit", "terngrad:every=2", "fsdp2:terngrad"]


def toy(folder, name):
    """Return images for a model without convolutions, which the device for tests does not have."""
    draws = torch.Generator().manual_seed(5)
    x, y = torch.randn(300, 1, 8, 8, generator=draws), torch.arange(300) % 10
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 65), nn.ReLU(), nn.Linear(65, 10))
    return workloads.Images(name, workloads.LENET, model, (x, y), (x, y))


def join(kind):
    """Make torch's default group that of a rank of `bench train`."""
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    dist.destroy_process_group()
    given = {"store": dist.PrefixStore("bench", store), "rank": rank, "world_size": 2}
    with mock.patch.dict(dist.Backend.default_device_backend_map, lazy="_lazy_shared"):
        dist.init_process_group(device.backend_of(kind), **given)


def trained(kind, method, points=1):
    """Return what each rank's training gives."""
    join(kind)
    task = trainer.Task("toy", "sgd", method, 2, 5, batch=4, points=points, device=kind)
    with mock.patch.dict(workloads.WORKLOADS, toy=toy):
        return trainer.train(lambda message: None, task)


@pytest.mark.parametrize("method", METHODS)
def test_ranks_train_on_a_device_as_on_the_cpu(lazy, gloo, method):
    """Its kernels are the CPU's, so accuracies are equal."""
    there, here = lazy(2, trained, "lazy", method), gloo(2, trained, "cpu", method)
    assert [one["device"] for one in (*there, *here)] == ["device for tests"] * 2 + ["cpu"] * 2
    assert there[0]["curve"][0][2] == here[0]["curve"][0][2] > 0
    assert there[0]["total_nbytes"] == here[0]["total_nbytes"]
    if method == "onebit":
        assert "lazy tensors are copied to the host" in there[0]["described"]


def test_fsdp2_trains_on_the_cpu_of_a_machine_with_an_accelerator(lazy, gloo):
    """torch takes the accelerator, unless it is given a mesh of the CPU."""
    there, here = (run(2, trained, "cpu", "fsdp2:terngrad") for run in (lazy, gloo))
    assert there[0]["curve"][0][2] == here[0]["curve"][0][2] and there[0]["device"] == "cpu"


@each_rank(1, "lazy")
def test_text_is_tested_where_the_model_is():
    draws = torch.Generator().manual_seed(3)
    text = torch.randint(256, (32, workloads.BLOCK), generator=draws, dtype=torch.uint8)
    model = nn.Sequential(nn.Embedding(256, 5), nn.Linear(5, 256))
    workload = workloads.Text("text", workloads.LENET, lambda: model, text[:1], text[:1])
    found = [workload.test(model.to(kind), quick=True) for kind in ("cpu", "lazy")]
    assert found[0] == found[1] > 0


@each_rank(2, "lazy")
def test_the_planner_is_given_copies_and_transport_of_the_device():
    join("lazy")
    found = []
    measure_methods(found.append, ["fp32", "onebit"], 1 << 16, "gloo", "lazy")
    if dist.get_rank() == 0:
        _, (rates, transport) = found
        assert min(rates.copy_seconds(1 << 20)) > 0 and transport.beta_s["all_reduce"] >= 0


@each_rank(2, "lazy")
def test_seconds_are_read_when_the_device_has_finished():
    """The clock is read four times a step, and never while the current stream has work left."""
    clock, waiting, working = time.perf_counter, [], []

    def read():
        if sys._getframe(1).f_code.co_name == "_now":
            waiting.append(not torch.accelerator.current_stream().query())
        return clock()

    def update(*given):
        done = real(*given)
        working.append(not torch.accelerator.current_stream().query())
        return done

    real = trainer._update
    with (
        mock.patch.object(trainer.time, "perf_counter", read),
        mock.patch.object(trainer, "_update", update),
    ):
        trained("lazy", "onebit", points=0)
    assert len(waiting) == 4 * len(working) and not any(waiting)
    assert all(working)  # else this shows nothing


@pytest.mark.slow
def test_ranks_share_a_device_over_links(lazy, tmp_path):
    """The whole program, over hosts where they can be made."""
    words = f"{OVER} --device auto --workload random:50000 --optimizer sgd --steps 6".split()
    command = [sys.executable, "-c", PROGRAM, *words, "--methods", "fp32", "onebit"]
    environment = mpi_environment() | folders_of_tests()
    out = output_of(*command, "--json", "out.json", cwd=tmp_path, env=environment, timeout=500)
    assert out.returncode == 0, out.stdout + out.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    (case,) = found["cases"]
    assert found["arguments"]["device"] == "lazy" and case["device"] == "device for tests"
    assert ", on device for tests" in out.stdout
    rows = {row["method"]: row for row in case["rows"]}
    assert list(rows) == ["none", "noop", "fp32", "onebit"]
    assert not any("failed" in row for row in rows.values())
    assert "copied to the host" in rows["onebit"]["described"]
    assert rows["onebit"]["predicted_seconds"] > 0


def test_a_device_that_is_not_there_is_refused(capsys):
    assert main(["--hosts", "0", "--device", "tpu"]) == 2
    said = capsys.readouterr().err
    assert f"--device tpu: torch {torch.__version__} finds" in said
    assert "install a torch that is built for tpu" in said and "take --device cpu or auto" in said


def test_a_device_without_collectives_is_refused():
    mps = mock.Mock(return_value=torch.device("mps"))
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", mps),
        pytest.raises(ValueError, match="no backend here for tensors on mps.*take --device cpu"),
    ):
        device.find_device("auto")
    assert [device.backend_of(kind) for kind in ("cpu", "cuda", "xpu")] == [
        "gloo",
        "gloo",
        "cpu:gloo,xpu:xccl",
    ]
