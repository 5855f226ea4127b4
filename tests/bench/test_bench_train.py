"""``python -m gradcomp.bench train``: hosts that are made and removed, methods that fail and
hang, the table.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from _ranks import is_alive, mpi_environment, mpi_python

from gradcomp import Block
from gradcomp.bench import methods, workloads
from gradcomp.bench.methods import parse
from gradcomp.bench.train import hosts, main, rank, run
from gradcomp.bench.train.predict import planned
from gradcomp.bench.train.report import crossings, row_of, table_of
from gradcomp.bench.train.run import cores_of
from gradcomp.plan.costs import LocalSteps
from gradcomp.plan.links import Link

# "" where this machine lets us make hosts; elsewhere the bench is to say this, and nothing else
# happens
WHY = hosts.unavailable()
HOOKS = """
import multiprocessing
import torch

def crashes(model):
    # as a DataLoader with workers does
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    assert child.exitcode == 0
    def hook(state, bucket):
        raise RuntimeError("the hook fell over")
    model.register_comm_hook(None, hook)

def hangs(model):
    def hook(state, bucket):
        return torch.futures.Future()
    model.register_comm_hook(None, hook)

def refuses(model):
    raise ValueError("not with this model")
"""
ROOT = Path(__file__).parents[2]


def bench(*words, cwd, timeout=500, python=sys.executable):
    environment = mpi_environment() | {"PYTHONPATH": f"{cwd}:{ROOT}"}
    command = [python, "-m", "gradcomp.bench", "train", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def namespaces():
    return [
        name
        for name in subprocess.run(
            ["ip", "netns", "list"], capture_output=True, text=True, check=False
        ).stdout.split()
        if hosts.PREFIX in name
    ]


def left_behind():
    """Return the namespaces of benches that have ended; other tests may be at work beside this
    one, and sweep up one of their own.
    """

    def found():
        return {
            name
            for name in namespaces()
            if not Path("/proc", name.removeprefix(f"{hosts.PREFIX}-").split("-")[0]).exists()
        }

    left, deadline = found(), time.monotonic() + 30
    while left and time.monotonic() < deadline:
        time.sleep(0.2)
        left &= found()
    return sorted(left)


SOME = ["fp32", "terngrad", "hooks:crashes", "hooks:hangs", "hooks:refuses", "terngrad:every=5"]


@pytest.mark.slow
@pytest.mark.timeout(600)  # a minute where nobody else computes
@pytest.mark.parametrize(
    "names",
    [
        SOME,
        pytest.param([*SOME, "bf16", "onebit:double", "fsdp2:terngrad"], marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_methods_side_by_side_those_that_fail_included(tmp_path, names):
    """Over hosts where they can be made: bytes on the interface are those that gradcomp counts,
    and what TCP adds.
    """
    (tmp_path / "hooks.py").write_text(HOOKS)
    where = ["--hosts", "0"] if WHY else ["--hosts", "2", "--link", "200mbit"]
    done = bench(
        *where,
        "--workload",
        "random:600000",
        "--steps",
        "8",
        "--hang",
        "15",
        "--json",
        "out.json",
        "--methods",
        *names,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    rows = {row["method"]: row for row in case["rows"]}
    assert list(rows) == ["none", "noop", *names]
    assert (
        "the hook fell over" in rows["hooks:crashes"]["failed"]
        and "not with this model" in rows["hooks:refuses"]["failed"]
    )
    assert rows["hooks:hangs"]["failed"].startswith("hung after ")
    assert all(word in done.stdout for word in ("hung after", "fp32 / it", "failed", "planner"))
    numel = 600_064 // 1024 * 1024
    for name, bits in (("fp32", 32), ("bf16", 16), ("terngrad", 2)):
        if name not in names:
            continue
        row = rows[name]
        assert "failed" not in row and row["p95_seconds"] >= row["seconds"] > 0
        assert row["exposed_seconds"] == pytest.approx(row["seconds"] - rows["noop"]["seconds"])
        assert row["exchange_cpu_seconds"] == pytest.approx(
            max(0.0, row["cpu_seconds"] - rows["noop"]["cpu_seconds"])
        )
        if not WHY:
            assert row["sent_nbytes"] == pytest.approx(numel * bits / 8, rel=0.12)
            if bits >= 16:  # the link is as slow as it was asked to be, but for what passes at once
                assert row["seconds"] > 0.8 * row["sent_nbytes"] / 25e6
    local = rows["terngrad:every=5"]  # one sync in the five steps that count
    assert local["seconds"] > 0 and local["phases"]["encode"] > 0 and local["predicted_seconds"] > 0
    if not WHY:
        assert local["sent_nbytes"] < 0.5 * rows["terngrad"]["sent_nbytes"]
    if "fsdp2:terngrad" in names:
        # half of them, gathered before forward and before backward
        sharded, weights = (rows["fsdp2:terngrad"], numel * 4)
        assert sharded["phases"]["encode"] > 0 and sharded["predicted_seconds"] is None
        # and half of the gradients' codes
        assert WHY or sharded["sent_nbytes"] == pytest.approx(weights + numel / 8, rel=0.12)
    assert rows["fp32"]["predicted_seconds"] > 0 and 0 <= rows["terngrad"]["hidden_share"] <= 1
    assert WHY or left_behind() == []


def test_hosts_come_and_go():
    """Namespaces of this process while they are needed, and what a killed bench has left is
    removed.
    """
    if WHY:
        with pytest.raises(hosts.NoHosts, match="--hosts 0"):
            hosts.Hosts(2, Link(1e9)).__enter__()
        return
    gone = subprocess.Popen(["true"])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"{hosts.PREFIX}-{gone.pid}-host0"], check=True)
    with hosts.Hosts(3, Link(1e8)) as three:
        here = [name for name in namespaces() if f"-{os.getpid()}-" in name]
        assert len(here) == 4 and not any(f"-{gone.pid}-" in name for name in namespaces())
        pinged = subprocess.run(
            [
                *three.command(0),
                sys.executable,
                "-c",
                "print(open('/sys/class/net/eth0/mtu').read())",
            ],
            capture_output=True,
            check=True,
        )
        assert int(pinged.stdout) == 1500
        assert len({three.address(n) for n in range(300)}) == 300
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


def test_a_rate_that_tc_refuses_is_said_and_leaves_nothing():
    if WHY:
        assert "--hosts 0" in WHY
        return
    with pytest.raises(ValueError, match="tc refuses a link of"):
        hosts.Hosts(2, Link(1e-3)).__enter__()
    assert not [name for name in namespaces() if f"-{os.getpid()}-" in name]


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["mpich", pytest.param("openmpi", marks=pytest.mark.long)])
def test_codecs_over_mpi_between_hosts(tmp_path, flavour):
    """mpiexec starts a rank on every host, and what it moves is on the interfaces: not in the
    memory that all of them share.
    """
    where = ["--hosts", "0"] if WHY else ["--hosts", "2", "--link", "200mbit"]
    words = [
        "--over",
        "mpi",
        *where,
        "--workload",
        "random:600000",
        "--steps",
        "6",
        "--methods",
        "terngrad",
        "--json",
        "out.json",
    ]
    done = bench(*words, cwd=tmp_path, python=mpi_python(flavour))
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    ternary = case["rows"][2]
    assert [row["method"] for row in case["rows"]] == ["none", "noop", "terngrad"] and ternary[
        "phases"
    ]["encode"] > 0
    assert (
        ternary["sent_nbytes"] == pytest.approx(600_064 // 1024 * 1024 / 4, rel=0.12)
        and ternary["predicted_seconds"] > 0
    )


def test_without_an_mpi_or_under_a_launcher_there_are_no_ranks_over_mpi(capsys, monkeypatch):
    assert main(["--over", "mpi", "--hosts", "0", "--workload", "random:5000", "--steps", "5"]) == 2
    # which this interpreter has not
    assert "--over mpi needs mpi4py and an MPI: pip install" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("GRADCOMP_MPIRUN", "/bin/true")
    assert (
        main(
            [
                "--over",
                "mpi",
                *(["--hosts", "0"] if WHY else []),
                "--workload",
                "random:5000",
                "--steps",
                "5",
            ]
        )
        == 2
    )
    assert (
        WHY
        or "knows MPICH and Open MPI from 5 on, not /bin/true (unknown 0)"
        in capsys.readouterr().err
    )
    # which main sets, so that they are what they were afterwards
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert main(["--over", "mpi", "--workload", "random:5000", "--steps", "5"]) == 2
    assert "without a launcher" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flavour", "number"),
    [
        ("", signal.SIGINT),
        ("", signal.SIGTERM),
        ("mpich", signal.SIGINT),
        ("openmpi", signal.SIGTERM),
    ],
)
def test_an_interrupted_bench_removes_everything(tmp_path, flavour, number):
    """Ctrl-C or an end from outside while ranks train: no namespaces, no processes."""
    where = ["--hosts", "0"] if WHY else ["--hosts", "2", "--link", "1mbit"]
    python = mpi_python(flavour) if flavour else sys.executable
    command = [
        python,
        "-m",
        "gradcomp.bench",
        "train",
        *where,
        "--workload",
        "random:4000000",
        "--steps",
        "500",
        "--methods",
        "fp32",
    ]
    command += ["--over", "mpi"] if flavour else []
    mark = f"{tmp_path}:{ROOT}"
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=mpi_environment() | {"PYTHONPATH": mark},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    deadline = time.monotonic() + 180
    while len(ranks_of(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.0)
    found = ranks_of(mark)
    assert len(found) >= 2, "no ranks have begun"
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode in (130, -number, 128 + number)
    deadline = time.monotonic() + 20
    # mpiexec is waited for, not what it has started
    while any(map(is_alive, found)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in found if is_alive(pid)]
    assert WHY or not [name for name in namespaces() if f"-{process.pid}-" in name]


def ranks_of(mark):
    """Return the processes that are, start or watch ranks, and have `mark` as their PYTHONPATH."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words, variables = (
                    (folder / "cmdline").read_bytes(),
                    (folder / "environ").read_bytes(),
                )
            except OSError:
                continue
            if b"gradcomp.bench.train.rank" in words and mark.encode() in variables:
                found.append(int(folder.name))
    return found


def test_a_rank_whose_status_is_lost_with_its_server_is_ended_all_the_same():
    rank = subprocess.Popen(["sleep", "100"], start_new_session=True)
    run._end([SimpleNamespace(pid=rank.pid, poll=lambda: run.LOST, wait=lambda timeout_s: None)])
    assert rank.wait(20) < 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "ternery"], "no method named 'ternery'"),
        (["--methods", "onebit:prec"], "unknown option 'prec'"),
        (["--methods", "onebit:momentum,double,start_step=3"], "do not wait for half a minibatch"),
        (["--methods", "json:nothing"], "json:nothing: module 'json' has no attribute 'nothing'"),
        (["--workload", "lenett"], "no workload named 'lenett'"),
        (["--workload", "random:5"], "at least 1024"),
        (["--workload", "gpt-1m", "--data", "/nonexistent"], "no prose.txt"),
        (["--link", "fast"], "a rate like 100mbit"),
        (["--hosts", "1"], "--hosts takes 0 or numbers of at least 2"),
        (["--hosts", "0", "2"], "--hosts takes 0 or numbers of at least 2"),
        (["--steps", "3"], "--steps at least 5"),
        (["--batch", "0"], "--batch and --points take at least 1"),
        (["--points", "0"], "--batch and --points take at least 1"),
        (["--workload", "mlp", "--optimizer", "muon", "--hosts", "0"], "mlp has no rate for muon"),
    ],
)
def test_wrong_words_are_one_sentence(words, said, capsys):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    assert main(words) == 2
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before
    error = capsys.readouterr().err
    assert said in error and error.startswith("gradcomp.bench train: ")


def test_where_there_can_be_no_hosts_the_bench_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--methods", "fp32"]) == 2
    assert "run as root, or measure on loopback with --hosts 0" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "ip, tc, unshare not found: install iproute2 and util-linux" in hosts.unavailable()


def test_every_method_and_workload_of_the_help_is_one(capsys):
    for name in (
        *methods.OTHERS,
        "terngrad",
        "block2:precondition",
        "terngrad:second=block4",
        "onebit:double,start_step=2",
        "json:dumps",
        "fsdp2",
        "fsdp2:bf16",
        "fsdp2:onebit,weights=block8",
        "fsdp2:onebit,weights=block8,keep",
    ):
        parse(name)
    for name in (
        "fsdp2:",
        "fsdp2:ternery",
        "fsdp2:terngrad,weights=onebit",
        "fsdp2,weights=block8",
        "fsdp2:terngrad,keep",
    ):
        with pytest.raises(ValueError, match="fsdp2|ternery"):
            parse(name)
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(
        name in shown for name in (*workloads.WORKLOADS, "powersgd4", "random:N", "module:factory")
    )
    assert sum(p.numel() for p in workloads.find("mlp", Path()).model().parameters()) == 25_214_986
    for numel in (1024, 600_000, 2_500_000):
        found = sum(p.numel() for p in workloads.random(numel).parameters())
        assert numel - 1024 < found <= numel


def test_an_old_spelling_of_local_steps_names_the_new_one():
    for old, new in (
        ("diloco:onebit:30,fragments=2,delay=5", "onebit:every=30,fragments=2,delay=5"),
        ("diloco:terngrad:3,start_step=9,start_codec=block4", "every=3,start_step=9,start=block4"),
        ("diloco", "CODEC:every=H"),
    ):
        with pytest.raises(ValueError, match=f"now: .*{re.escape(new)}"):
            parse(old)
    method = parse("onebit:every=30,fragments=2,delay=5,start_step=100,start=block4")
    assert method.local == {"every": 30, "fragments": 2, "delay": 5}
    assert method.options["start_step"] == 100
    assert repr(method.options["start_codec"]) == repr(Block(4))
    for name in ("terngrad:every=x", "terngrad:every=3,alpha=x", "bf16:every=3", "none:every=3"):
        with pytest.raises(ValueError):
            parse(name)


def test_the_planner_knows_the_method_as_it_travels():
    assert (
        str(planned("terngrad", 2).exchange) == "all_gather"
        and planned("terngrad", 8).second_phase == "block4"
    )
    assert planned("onebit:exchange=all_gather", 8).exchange == "all_gather"
    local = planned("terngrad:every=30,fragments=2,delay=5", 8)
    assert local.local == LocalSteps(30, 2, 5) and (local.exchange, local.second_phase) == (
        "reduce_scatter",
        "block4",
    )
    assert planned("terngrad:every=30,start_step=9", 2) is None  # two kinds of steps
    assert (
        planned("powersgd1", 2)
        is planned("block2:precondition", 2)
        is planned("onebit:double", 2)
        is None
    )


def test_rows_are_of_the_slowest_rank_and_the_first_to_reach_a_target():
    def result(seconds, sent, curve=()):
        return {
            "seconds": seconds,
            "cpu_seconds": [0.5],
            "sent_nbytes": sent,
            "counted_nbytes": None,
            "peak_nbytes": 7,
            "phases": {"encode": 0.2, "hidden": 0.1},
            "curve": list(curve),
            "measure": 2.0,
        }

    curve = [(1, 3.0, 2.6), (2, 6.0, 2.4), (3, 9.0, 2.5)]
    noop = {"seconds": 1.5, "cpu_seconds": 0.2}
    row = row_of(
        "x",
        [result([1.0, 4.0, 2.0], 10.0, curve), result([2.0, 1.0, 3.0], 30.0)],
        noop,
        3.3,
        2.5,
        lower=True,
        bits_per_s=300.0,
    )
    assert (row["seconds"], row["p95_seconds"], row["exposed_seconds"], row["sent_nbytes"]) == (
        3.0,
        4.0,
        1.5,
        30.0,
    )
    assert (row["target_seconds"], row["hidden_share"]) == (6.0, 0.5)
    assert (row["exchange_cpu_seconds"], row["bound_seconds"]) == (
        pytest.approx(0.3),
        pytest.approx(0.8),
    )  # 240 bits on the wire
    assert row_of("x", [result([1.0], 1.0)], noop, None, None, lower=True)[
        "bound_seconds"
    ] == pytest.approx(0.3)
    higher = row_of("x", [result([1.0], 1.0, curve)], None, None, 2.5, lower=False)
    assert (higher["target_seconds"], higher["exposed_seconds"]) == (3.0, None)
    table = table_of(
        [row | {"method": "fp32"}, row, {"method": "y", "failed": "hung after 3 s"}], "loss", 2.5
    )
    assert table.row_count == 3 and len(table.columns) == 14


def test_the_rank_that_failed_first_is_named_and_not_those_that_lost_it():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:34478"
    assert (
        run._why({0: lost, 1: "PeerLost: rank 2 is gone", 2: "ValueError: x"})
        == "rank 2: ValueError: x"
    )
    assert run._why({1: lost, 3: "PeerLost: y"}) == f"rank 1: {lost}"


def test_where_a_method_stops_paying_is_said():
    def rows(fp32, ternary, onebit=None):
        out = [
            {"method": "none", "seconds": 0.1},
            {"method": "fp32", "seconds": fp32},
            {"method": "terngrad", "seconds": ternary},
        ]
        return [
            *out,
            (
                {"method": "onebit", "seconds": onebit}
                if onebit
                else {"method": "onebit", "failed": "hung"}
            ),
        ]

    cases = [
        (2, "none", rows(1.0, 1.25, 0.5)),
        (2, "1gbit", rows(2.0, 1.0, 1.0)),
        (2, "100mbit", rows(9.0, 3.0)),
        (4, "1gbit", rows(1.0, 1.0)),
    ]
    assert crossings(cases) == [
        (
            "2 ranks, terngrad: pays until none (whole step: 3.00x at 100mbit, 2.00x at 1gbit,"
            " 0.80x at none)"
        ),
        "2 ranks, onebit: pays on all of them (whole step: 2.00x at 1gbit, 2.00x at none)",
    ]
    assert crossings(cases[:1]) == []


@pytest.mark.long
def test_a_launched_job_measures_its_own_ranks(tmp_path):
    """Real machines: every rank starts its own processes, rank 0 has the table and the file."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "-m",
        "gradcomp.bench",
        "train",
    ]
    words = [
        "--workload",
        "random:50000",
        "--steps",
        "6",
        "--methods",
        "terngrad",
        "--json",
        "out.json",
    ]
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (case,) = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert (case["ranks"], case["link"], [row["method"] for row in case["rows"]]) == (
        2,
        "as it is",
        ["none", "noop", "terngrad"],
    )
    assert case["rows"][2]["sent_nbytes"] > 0 and done.stdout.count("step, ms") == 1


def test_momenta_that_travel_are_clipped_as_others_are(gloo, tmp_path):
    (tmp_path / "prose.txt").write_bytes(bytes(range(97, 123)) * (25 * (1 << 15) // 26))
    task = rank.Task(
        "onebit:momentum,start_step=2", "gpt-1m", str(tmp_path), "adamw", 5, 0, 1, 1, (0,), ""
    )
    first, second = gloo(2, rank.train, task)
    assert (
        first["measure"] == second["measure"]
        and first["measure"] > 0
        and len(first["seconds"]) == 2
    )


def test_a_test_that_takes_long_is_no_silence(capsys, monkeypatch):
    monkeypatch.setattr(rank, "TELL_S", 0.01)
    with rank._heard():
        told, deadline = "", time.monotonic() + 60
        while told.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
            told += capsys.readouterr().out
    told += capsys.readouterr().out
    assert told == told.count("\n") * f"{rank.MARK}{{}}\n" and told.count("\n") >= 2
    time.sleep(0.1)
    assert capsys.readouterr().out == ""


def test_cores_are_shared_out():
    have = sorted(os.sched_getaffinity(0))
    assert [c for n in range(2) for c in cores_of(n, 2)][: len(have)] == have[
        : len(have) // 2 * 2
    ] or len(have) == 1
    assert all(len(cores_of(n, 99)) == 1 for n in range(99))
