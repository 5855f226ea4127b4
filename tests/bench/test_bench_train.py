"""``python -m gradcomp.bench train``: hosts that are made and removed, methods that fail and
hang, the table.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _forks import python
from _held import settled
from _ranks import is_alive, mpi_environment, mpi_python, output_of

from gradcomp.bench import hosts, trainer, workloads
from gradcomp.bench.step_table import crossings, middle_rows, row_of, table_of
from gradcomp.bench.train import main
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
NUMEL = 600_064 // 1024 * 1024  # of random:600000
OVER = "--hosts 0" if WHY else "--hosts 2 --link 200mbit"
RANDOM = "--workload random:5000 --steps 5"


def command_of(words, start=None):
    """Return a bench's command, which begins with `start`; None: with a fork."""
    return [*(start or python()), "-m", "gradcomp.bench", "train", *words.split()]


def rows_of(folder, command, status, **variables):
    """Return what was printed, the case and its rows of a bench that writes out.json."""
    environment = mpi_environment() | {"PYTHONPATH": f"{folder}:{ROOT}"} | variables
    done = output_of(*command, "--json", "out.json", cwd=folder, env=environment, timeout=500)
    assert done.returncode == status, done.stderr
    (case,) = json.loads((folder / "out.json").read_text())["cases"]
    return done.stdout, case, {row["method"]: row for row in case["rows"]}


def namespaces(part=""):
    """Return the names of the namespaces of benches that contain `part`."""
    listed = output_of("ip", "netns", "list")
    return [name for name in listed.stdout.split() if hosts.PREFIX in name and part in name]


def left_behind():
    """Return the namespaces of benches that have ended; other tests may be at work beside this
    one, and sweep up one of their own.
    """

    def found():
        pids = {name: name.removeprefix(f"{hosts.PREFIX}-").split("-")[0] for name in namespaces()}
        return {name for name, pid in pids.items() if not Path("/proc", pid).exists()}

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
    words = f"{OVER} --workload random:600000 --steps 8 --hang 15 --methods {' '.join(names)}"
    printed, _, rows = rows_of(tmp_path, command_of(words), status=1)
    assert list(rows) == ["none", "noop", *names]
    assert "the hook fell over" in rows["hooks:crashes"]["failed"]
    assert "not with this model" in rows["hooks:refuses"]["failed"]
    assert rows["hooks:hangs"]["failed"].startswith("hung after ")
    assert all(word in printed for word in ("hung after", "fp32 / it", "failed", "planner"))
    for name, bits in (("fp32", 32), ("bf16", 16), ("terngrad", 2)):
        if name not in names:
            continue
        row = rows[name]
        assert "failed" not in row and row["p95_seconds"] >= row["seconds"] > 0
        assert row["exposed_seconds"] == pytest.approx(row["seconds"] - rows["noop"]["seconds"])
        cpu = max(0.0, row["cpu_seconds"] - rows["noop"]["cpu_seconds"])
        assert row["exchange_cpu_seconds"] == pytest.approx(cpu)
        if not WHY:
            assert row["sent_nbytes"] == pytest.approx(NUMEL * bits / 8, rel=0.12)
            if bits >= 16:  # the link is as slow as it was asked to be, but for what passes at once
                assert row["seconds"] > 0.8 * row["sent_nbytes"] / 25e6
    local = rows["terngrad:every=5"]  # one sync in the five steps that count
    assert local["seconds"] > 0 and local["phases"]["encode"] > 0 and local["predicted_seconds"] > 0
    if not WHY:
        assert local["sent_nbytes"] < 0.5 * rows["terngrad"]["sent_nbytes"]
    if "fsdp2:terngrad" in names:
        # half of the weights, gathered before forward and before backward, and half of the codes
        sharded = rows["fsdp2:terngrad"]
        assert sharded["phases"]["encode"] > 0 and sharded["predicted_seconds"] is None
        assert WHY or sharded["sent_nbytes"] == pytest.approx(NUMEL * 4 + NUMEL / 8, rel=0.12)
    assert rows["fp32"]["predicted_seconds"] > 0 and 0 <= rows["terngrad"]["hidden_share"] <= 1
    assert WHY or left_behind() == []


@pytest.mark.long
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
def test_codecs_over_mpi_between_hosts(tmp_path, flavour):
    """mpiexec starts a rank on every host, and what it moves is on the interfaces: not in the
    memory that all of them share.
    """
    words = f"--over mpi {OVER} --workload random:600000 --steps 6 --methods terngrad"
    _, _, rows = rows_of(tmp_path, command_of(words, python(mpi_python(flavour))), status=0)
    assert list(rows) == ["none", "noop", "terngrad"]
    ternary = rows["terngrad"]
    assert ternary["phases"]["encode"] > 0 and ternary["predicted_seconds"] > 0
    assert ternary["sent_nbytes"] == pytest.approx(NUMEL / 4, rel=0.12)


@pytest.mark.long
def test_a_launched_job_measures_its_own_ranks(tmp_path):
    """Real machines: every rank starts its own processes, rank 0 has the table and the file."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"]
    command = command_of("--workload random:50000 --steps 6 --rounds 2 --methods terngrad")
    command[1:1] = torchrun
    printed, case, rows = rows_of(tmp_path, command, status=0, GLOO_SOCKET_IFNAME="lo")
    assert (case["ranks"], case["link"]) == (2, "as it is")
    assert list(rows) == ["none", "noop", "terngrad"]
    assert rows["terngrad"]["sent_nbytes"] > 0 and printed.count("step, ms") == 1
    assert len(rows["terngrad"]["exposed_rounds"]) == 2


@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_hosts_come_and_go():
    """Namespaces of this process while they are needed; what a killed bench has left is removed."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"{hosts.PREFIX}-{gone.pid}-host0"], check=True)
    with hosts.Hosts(3, Link(1e8)) as three:
        assert len(namespaces(f"-{os.getpid()}-")) == 4 and not namespaces(f"-{gone.pid}-")
        assert output_of(*three.command(0), "cat", "/sys/class/net/eth0/mtu").stdout == "1500\n"
        assert len({three.address(n) for n in range(300)}) == 300
    assert not namespaces(f"-{os.getpid()}-")
    with pytest.raises(ValueError, match="tc refuses a link of"):
        hosts.Hosts(2, Link(1e-3)).__enter__()
    assert not namespaces(f"-{os.getpid()}-")


ECHO = """
import socket
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 7777))
print("ready", flush=True)
while True:
    own.sendto(*own.recvfrom(2000))
"""
ASK = """
import json, socket, sys, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.settimeout(0.2)
seconds = []
for number in range(200):
    begin = time.monotonic()
    own.sendto(b"%d" % number, (sys.argv[1], 7777))
    try:
        while own.recv(100) != b"%d" % number:
            pass
        seconds.append(time.monotonic() - begin)
    except TimeoutError:
        pass
print(json.dumps(seconds))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
@pytest.mark.parametrize("by", ["this kernel's means", "a relay"])
def test_packets_of_hosts_are_late_and_lost(by, monkeypatch):
    if by == "a relay":
        monkeypatch.setattr(hosts.Hosts, "_has_netem", lambda self: False)
    with hosts.Hosts(2, Link(1e8, 5e-3), loss=0.05) as two:
        echo = [*two.command(0), sys.executable, "-c", ECHO]
        with subprocess.Popen(echo, stdout=subprocess.PIPE, text=True) as answering:
            assert answering.stdout.readline() == "ready\n"
            asked = output_of(*two.command(1), sys.executable, "-c", ASK, two.address(0))
            answering.kill()
        seconds = json.loads(asked.stdout)
    assert min(seconds) > 0.01 and 150 < len(seconds) < 200  # 180 of 200 come back, on average
    assert not namespaces(f"-{os.getpid()}-")


def test_without_netem_or_tun_the_bench_says_what_to_do(monkeypatch, capsys):
    def denied(name):
        raise PermissionError("not permitted")

    monkeypatch.setattr(hosts.Hosts, "_has_netem", lambda self: False)
    monkeypatch.setattr(hosts.relay, "open_tun", denied)
    if not WHY:
        assert main(f"--latency 1ms --methods fp32 {RANDOM}".split()) == 2
        said = "need a kernel with netem, or /dev/net/tun (not permitted): allow one of them, or"
        assert said in capsys.readouterr().err
        assert not namespaces(f"-{os.getpid()}-")
    assert main(f"--loss 100 {RANDOM}".split()) == 2
    assert "--loss must be a percentage from 0 to less than 100, got 100" in capsys.readouterr().err


def test_where_there_can_be_no_hosts_the_bench_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--methods", "fp32"]) == 2
    assert "run as root, or measure on loopback with --hosts 0" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "ip, tc, unshare not found: install iproute2 and util-linux" in hosts.unavailable()


def test_without_an_mpi_or_under_a_launcher_there_are_no_ranks_over_mpi(capsys, monkeypatch):
    assert main(f"--over mpi --hosts 0 {RANDOM}".split()) == 2
    # which this interpreter has not
    assert "--over mpi needs mpi4py and an MPI: pip install" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setenv("GRADCOMP_MPIRUN", "/bin/true")
    if not WHY:
        assert main(f"--over mpi {RANDOM}".split()) == 2
        said = "knows MPICH and Open MPI from 5 on, not /bin/true (unknown 0)"
        assert said in capsys.readouterr().err
    # which main sets, so that they are what they were afterwards
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert main(f"--over mpi {RANDOM}".split()) == 2
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
    where = "--hosts 0" if WHY else "--hosts 2 --link 1mbit"
    over = "--over mpi" if flavour else ""
    words = f"{where} {over} --workload random:4000000 --steps 500 --methods fp32"
    mark = f"{tmp_path}:{ROOT}"
    process = subprocess.Popen(
        command_of(words, [mpi_python(flavour) if flavour else sys.executable]),
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
    # mpiexec is waited for, not what it has started
    assert settled(lambda: sum(map(is_alive, found)), 0) == 0
    assert WHY or not namespaces(f"-{process.pid}-")


def ranks_of(mark):
    """Return the processes that are, start or watch ranks, and have `mark` as their PYTHONPATH."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
                variables = (folder / "environ").read_bytes()
            except OSError:
                continue
            if b"gradcomp.bench.ranks" in words and mark.encode() in variables:
                found.append(int(folder.name))
    return found


def test_help_names_methods_and_workloads(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    names = (*workloads.WORKLOADS, "powersgd4", "random:N", "module:factory")
    assert all(name in shown for name in names)
    assert sum(p.numel() for p in workloads.find("mlp", Path()).model().parameters()) == 25_214_986
    for numel in (1024, 600_000, 2_500_000):
        found = sum(p.numel() for p in workloads.random(numel).parameters())
        assert numel - 1024 < found <= numel


CURVE = [(1, 3.0, 2.6), (2, 6.0, 2.4), (3, 9.0, 2.5)]


def result(seconds, sent, curve=()):
    return {
        "seconds": seconds,
        "cpu_seconds": [0.5],
        "sent_nbytes": sent,
        "peak_nbytes": 7,
        "phases": {"encode": 0.2, "hidden": 0.1},
        "curve": list(curve),
        "measure": 2.0,
    }


def test_rows_are_of_the_slowest_rank_and_the_first_to_reach_a_target():
    noop = {"seconds": 1.5, "cpu_seconds": 0.2}
    ranks = [result([1.0, 4.0, 2.0], 10.0, CURVE), result([2.0, 1.0, 3.0], 30.0)]
    row = row_of("x", ranks, noop, 3.3, 2.5, lower=True, bits_per_s=300.0)
    expected = {
        "seconds": 3.0,
        "p95_seconds": 4.0,
        "exposed_seconds": 1.5,
        "sent_nbytes": 30.0,
        "target_seconds": 6.0,
        "hidden_share": 0.5,
        "exchange_cpu_seconds": pytest.approx(0.3),
        "bound_seconds": pytest.approx(0.8),  # 240 bits on the wire
    }
    assert {name: row[name] for name in expected} == expected
    unshaped = row_of("x", [result([1.0], 1.0)], noop, None, None, lower=True)
    assert unshaped["bound_seconds"] == pytest.approx(0.3)
    higher = row_of("x", [result([1.0], 1.0, CURVE)], None, None, 2.5, lower=False)
    assert (higher["target_seconds"], higher["exposed_seconds"]) == (3.0, None)
    failed = {"method": "y", "failed": "hung after 3 s"}
    table = table_of([row | {"method": "noop"}, row | {"method": "fp32"}, row, failed], "loss", 2.5)
    cells = [list(column.cells) for column in table.columns]
    assert len(cells) == 14 and [column[3] for column in cells[:3]] == ["y", "failed", ""]
    assert cells[7][:3] == ["", "0.000", "0.000"] and cells[12] == ["", "2", "2", ""]


def test_the_round_in_the_middle_stands_for_all():
    def rows(noop, fp32):
        exposed = {"noop": (noop, None), "fp32": (fp32, fp32 - noop)}
        one = row_of("x", [result([1.0], 1.0)], None, None, None, lower=True)
        return [
            one | {"method": name, "seconds": seconds, "exposed_seconds": more}
            for name, (seconds, more) in exposed.items()
        ]

    rounds = [rows(1.0, 4.0), rows(2.0, 3.0), rows(3.0, 5.0)]  # 3, 1 and 2 exposed
    noop, fp32 = middle_rows([row for same in rounds for row in same])
    assert (noop["seconds"], noop["exposed_rounds"]) == (2.0, [])
    assert (fp32["seconds"], fp32["exposed_rounds"]) == (5.0, [1.0, 2.0, 3.0])
    table = table_of([noop, fp32], "", None)
    assert list(table.columns[3].cells) == ["", "2000.0 (1000 to 3000)"]
    assert [row["seconds"] for row in middle_rows(rounds[0] + rounds[1])] == [1.0, 3.0]
    failed = {"method": "fp32", "failed": "hung"}
    assert middle_rows([*rounds[0], failed])[1] == failed


def test_where_a_method_stops_paying_is_said():
    def rows(fp32, ternary, onebit=None):
        seconds = {"none": 0.1, "fp32": fp32, "terngrad": ternary}
        last = {"seconds": onebit} if onebit else {"failed": "hung"}
        found = [{"method": name, "seconds": value} for name, value in seconds.items()]
        return [*found, {"method": "onebit", **last}]

    cases = [
        (2, "none", rows(1.0, 1.25, 0.5)),
        (2, "1gbit", rows(2.0, 1.0, 1.0)),
        (2, "100mbit", rows(9.0, 3.0)),
        (4, "1gbit", rows(1.0, 1.0)),
    ]
    gains = "3.00x at 100mbit, 2.00x at 1gbit, 0.80x at none"
    assert crossings(cases) == [
        f"2 ranks, terngrad: pays until none (whole step: {gains})",
        "2 ranks, onebit: pays on all of them (whole step: 2.00x at 1gbit, 2.00x at none)",
    ]
    assert crossings(cases[:1]) == []


def train_and_count(task):
    """Return what was measured, and the number of signs of life."""
    said = []
    return trainer.train(said.append, task), len(said)


def test_gradients_are_clipped_alike_on_all_ranks(gloo, tmp_path):
    (tmp_path / "prose.txt").write_bytes(bytes(range(97, 123)) * (25 * (1 << 15) // 26))
    method = "onebit:precondition,warmup_steps=2"
    task = trainer.Task(
        "gpt-1m", "adamw", method, 2, 5, batch=1, data=str(tmp_path), points=1, cores=(0,)
    )
    (first, signs), (second, fewer) = gloo(2, train_and_count, task)
    assert first["measure"] == second["measure"] > 0 and len(first["seconds"]) == 2
    assert signs > fewer, "a test may take longer than ranks may be silent"


def test_a_run_that_diverges_at_once_has_a_result(gloo):
    """Before steps were counted it ended in a KeyError."""
    task = trainer.Task("lenet-noise", "sgd", "onebit", 2, 6, 1e12, batch=2, stops=True, cores=(0,))
    (first, _), (second, _) = gloo(2, train_and_count, task)
    assert first["steps_done"] == second["steps_done"] <= 3 and "measure" not in first
