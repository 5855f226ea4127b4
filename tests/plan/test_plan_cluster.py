"""Measuring ranks at hand: the fits, a whole measurement over gloo, the program under --measure."""

import json
import os
import subprocess
import sys

import pytest
from _ranks import run_local

from gradcomp import PeerMismatch
from gradcomp.bench import cluster
from gradcomp.bench.train.predict import planned
from gradcomp.plan import Rates, Transport, calibrate, find_model
from gradcomp.plan.costs import plan_buckets

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("alpha", "beta", "seconds"),
    [
        (1e-4, 1e-9, None),
        (0.0, 1e-9, None),
        (1e-4, 0.0, None),
        (0.0, 2e-9, [1e-6, 1e-4, 1e-3, 1e-2]),  # faster than in proportion: alpha would be negative
    ],
)
def test_alpha_and_beta_are_found(alpha, beta, seconds):
    sizes = [1e3, 1e5, 1e6, 1e7]
    found = cluster.fit_alpha_beta(sizes, seconds or [alpha + beta * s for s in sizes])
    assert found == (
        pytest.approx(alpha, abs=1e-12),
        pytest.approx(beta, abs=1e-15, rel=0 if seconds is None else 1),
    )


@pytest.mark.parametrize(
    ("name", "world_size", "exchange", "second_phase"),
    [
        ("fp32", 2, "all_gather", ""),
        ("fp32", 4, "reduce_scatter", "fp32"),
        ("terngrad", 4, "reduce_scatter", "exact"),
        ("onebit", 2, "all_gather", ""),
    ],
)
def test_methods_are_what_auto_takes(name, world_size, exchange, second_phase):
    method = planned(name, world_size, over_mpi=name == "fp32")
    assert method.exchange == exchange and (
        exchange == "all_gather" or method.second_phase == second_phase
    )
    assert plan_buckets(method, find_model("lenet").parameters, world_size)


def measured(t_frame=1e-3):
    return cluster.Measured(
        2, 64, t_frame, 0.4, 2e-3, 4e-3, Rates(), Transport({"all_gather": 1e-3}, {}), 1.0
    )


def test_a_measurement_becomes_a_workload():
    lenet, other = find_model("lenet"), find_model("resnet50")
    work = measured().workload(lenet)
    assert (work.minibatch, work.t_frame, work.t_update, work.overlaps) == (
        128,
        pytest.approx(1e-3),
        pytest.approx(2e-3),
        True,
    )
    larger = measured().workload(other, minibatch=8)
    assert larger.minibatch == 8 and larger.t_post == 0
    assert larger.t_frame == pytest.approx(1e-3 * other.forward_flops / lenet.forward_flops)
    assert larger.t_update == pytest.approx(2e-3 * other.numel / lenet.numel)


def told(comm):
    """Rank 1 tells what a pickle would run, and then lies about its length."""
    exact = cluster.gather(comm, {"s": [0.1 + comm.rank, 5e-324]})
    caught = []
    for own in (
        b"cos\nsystem\n(S'exit 3'\ntR.",
        b"[" * 100_000,
        b"x" * (cluster.GATHER_NBYTES + 1),
    ):
        value = Raw(own) if comm.rank else {}
        try:
            cluster.gather(comm, value)
        except PeerMismatch as error:
            caught.append((error.rank, error.expected))
    return exact, caught


class Raw:
    """A value whose JSON is `data`."""

    def __init__(self, data):
        self.data = data


def test_ranks_exchange_numbers_not_programs(monkeypatch):
    dumps = json.dumps
    monkeypatch.setattr(
        cluster.json, "dumps", lambda v: v.data.decode() if isinstance(v, Raw) else dumps(v)
    )
    for exact, caught in run_local(2, told):
        assert exact == [{"s": [0.1, 5e-324]}, {"s": [1.1, 5e-324]}]
        assert caught == [(1, "JSON"), (1, "JSON"), (1, f"at most {cluster.GATHER_NBYTES} bytes")]


def test_sizes_that_do_not_share_out_are_refused():
    with pytest.raises(ValueError, match=r"sizes must be multiples of 512, got \(100,\)"):
        calibrate(sizes=(100,))
    with pytest.raises(ValueError, match="world_sizes must be powers of two"):
        calibrate(world_sizes=(6,))


def measure_quickly(rank, emit):
    cluster.COMPUTE_STEPS, cluster.MESSAGE_REPEATS, cluster.MESSAGE_NBYTES, cluster.SIZES = (
        2,
        2,
        (4096, 65536),
        (512, 262_144),  # so many that codecs take longer than calls do, a busy machine's too
    )
    comm = cluster.TorchCommunicator(timeout_s=60)
    methods = [planned("terngrad", 2)]
    found = cluster.measure(comm, methods)
    everyone = cluster.gather(comm, repr(found))
    comm.close()
    if rank == 0:
        emit((everyone, found))


@pytest.mark.timed  # of a fit to seconds that somebody else has taken part of, nothing may be left
def test_all_ranks_measure_the_same():
    results = []
    cluster.run_ranks(2, measure_quickly, on_message=results.append)
    ((everyone, found),) = results
    assert everyone[0] == everyone[1] and found.ranks == 2
    assert set(found.transport.alpha_s) == set(cluster.KINDS)
    assert found.t_frame > 0 and 0 < found.forward_share < 1
    assert found.rates.stages["terngrad all_gather"]["encode"].per_value_s > 0


def test_the_program_measures_with_ranks_of_its_own(tmp_path):
    command = [
        sys.executable,
        "-m",
        "gradcomp.plan",
        "--measure",
        "--ranks",
        "2",
        "--json",
        str(tmp_path / "plan.json"),
    ]
    out = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert out.returncode == 0, out.stderr
    assert "2 ranks at once" in out.stdout and "all_to_all: " in out.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert {r["nodes"] for r in found["rows"]} == {1, 2}
    assert found["model"] == "LeNet" and found["minibatch"] == 128
    assert "AdaGrad" in out.stdout and "(--post-time)" in out.stdout


def test_measuring_without_ranks_says_how_to_get_some():
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "gradcomp.plan", "--measure"]
    out = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=100, env=alone
    )
    assert out.returncode == 2
    assert "--ranks 2 starts some here" in out.stderr and out.stderr.count("\n") == 1
