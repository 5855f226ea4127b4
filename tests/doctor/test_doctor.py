"""The doctor: real ranks under every launcher, over a slow link, with one that is silent, and
what it says of each.
"""

import contextlib
import io
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gradcomp.launch.ports import free_port

import gradcomp
from gradcomp.bench.train import hosts
from gradcomp.doctor import advise, card, judge, pairs, report, session
from gradcomp.doctor.__main__ import main
from gradcomp.doctor.interfaces import Interface, gloo_takes, interfaces
from gradcomp.doctor.options import agreed, build_parser, parse
from gradcomp.doctor.timeouts import Timeouts
from gradcomp.plan.links import Link, Node

WHY = hosts.unavailable()
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def environment(**more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return (
        {k: v for k, v in os.environ.items() if k not in names}
        | QUIET
        | {k: str(v) for k, v in more.items()}
    )


class Machine:
    """A process that has imported the doctor and forks ranks that run it.

    Args:
        folder: for what they print.
        prefix: what it runs under, such as a namespace.
    """

    def __init__(self, folder, prefix=()):
        command = [*prefix, sys.executable, str(Path(__file__).with_name("_doctor.py"))]
        self.folder, self.started = folder, []
        self.process = subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, told):
        self.process.stdin.write(json.dumps(told) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, rank, world_size, port, *options, first="", address="127.0.0.1", **variables):
        """Start a rank; `first` is a program that makes it otherwise than others are."""
        given = {
            "RANK": rank,
            "WORLD_SIZE": world_size,
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            **variables,
        }
        files = [str(self.folder / f"{len(self.started)}.{what}") for what in ("out", "err")]
        pid = self.ask([options, {k: str(v) for k, v in given.items()}, first, *files])
        self.started.append(pid)
        return self, pid, *files

    def close(self):
        for pid in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def end(one):
    """Return (status, standard output, standard error) of a rank that was started."""
    machine, pid, out, err = one
    return machine.ask(pid), Path(out).read_text(), Path(err).read_text()


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    made = Machine(tmp_path_factory.mktemp("doctor"))
    yield made
    made.close()


def wrongs(found, topic=None):
    return [
        f["text"]
        for f in found["findings"]
        if f["level"] == "wrong" and topic in (None, f["topic"])
    ]


# ---- under launchers


def check_two_ranks(found, over):
    assert found["over"] == over and found["world_size"] == len(found["ranks"]) == 2
    assert found["status"] == 0 and wrongs(found) == []
    (pair,) = found["pairs"]
    assert pair["ranks"] == [0, 1] and not pair["failed"]
    assert (
        1e-6 < pair["latency_s"] < 0.2
        and 1e5 < pair["bits_per_s"] < 1e13
        and pair["nbytes"] >= 1 << 16
    )
    seen = found["lost_peer"]["seen"]["0"]
    assert found["lost_peer"]["lost"] == 1 and set(seen) == {"silent"}
    assert seen["silent"]["error"] == "PeerLost"
    assert judge.PATIENCE_S <= seen["silent"]["seconds"] < judge.PATIENCE_S + judge.LATE_S
    advice = found["recommendation"]
    assert advice["link"]["bits_per_s"] == pair["bits_per_s"] and advice["link"]["nodes"] == 2
    assert found["seconds"] < 60


@pytest.mark.slow
def test_under_torchrun(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "gradcomp.doctor",
        "--seconds",
        "30",
    ]
    out = subprocess.run(
        [*command, "--json", tmp_path / "found.json"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    check_two_ranks(found, "gloo")
    assert found["ranks"][0]["starter"] == "torchrun"
    for words in (
        "2 of 2, started by torchrun, bytes over gloo",
        "gloo takes lo (loopback",
        "rank 1 fell silent: PeerLost",
        "Nothing wrong",
    ):
        assert words in out.stdout
    assert out.stdout.count("recommended") == 1  # rank 0 alone prints


@pytest.mark.slow
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
def test_under_mpi(flavour):
    python = Path(f"{sys.prefix}-{flavour}", "bin", "python")
    if not python.exists():
        pytest.skip(f"{python} is missing: make mpi")
    command = [
        python,
        "-m",
        "gradcomp.launch",
        "-n",
        "2",
        "-m",
        "gradcomp.doctor",
        "--json",
        "-",
        "--seconds",
        "30",
    ]
    out = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert out.returncode == 0, out.stdout + out.stderr
    found = json.loads(out.stdout)
    check_two_ranks(found, "mpi")
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[flavour] in found["ranks"][1]["versions"][
        "MPI"
    ]
    assert (
        "MpiCommunicator" in advise.in_code(found["recommendation"], "mpi")
        or found["recommendation"]["codec"] is None
    )


def test_alone_it_looks_at_the_machine_and_says_how_to_start_ranks(capsys, caplog, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    caplog.set_level(logging.WARNING, "gradcomp")  # main sets another one
    crowded = any(found.level == "wrong" for found in judge.judge_cores([card.card(0, {}, None)]))
    assert main(["--plain"]) == int(crowded)
    text = capsys.readouterr().out
    for words in (
        "alone on",
        "torchrun --standalone",
        "python -m gradcomp.launch -n 2",
        "srun -n 4",
        f"torch {torch.__version__}",
        " tier",
    ):
        assert words in text
    assert "start several ranks" in text


def test_variables_of_srun_are_understood(monkeypatch):
    step = {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[07-08]",
        "SLURM_NODEID": "1",
    }
    task = {
        "SLURM_PROCID": "2",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    me = session.Me.find("auto", step | task)
    assert (me.rank, me.world_size, me.over, me.address) == (2, 4, "gloo", ("node07", 12573))
    assert session.Me.find("auto", {}).world_size == 1
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        session.Me.find("auto", {"RANK": "1", "WORLD_SIZE": "2"})
    for name in card.STARTERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert card.starter() == "srun"


def test_mpi_without_an_address_examines_rank_0_and_says_what_it_skipped(monkeypatch):
    given = {"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    world = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 4)
    monkeypatch.setattr(session, "load", lambda: SimpleNamespace(COMM_WORLD=world))
    monkeypatch.setattr(session, "describe_mpi", lambda: "an MPI")
    me = session.Me.find("mpi", given)
    found = session.examine(me, parse([]))
    assert (found["over"], found["world_size"], found["measured"]) == ("mpi", 4, False)
    (skipped,) = [f for f in found["findings"] if f["topic"] == "ranks"]
    assert "only rank 0 was examined" in skipped["text"] and skipped["level"] == "note"
    assert "set MASTER_ADDR and MASTER_PORT" in skipped["do"]
    assert "1 of 4" in plain(found) and "not measured" in plain(found)
    assert session.examine(session.Me(1, 4, "mpi", "an MPI"), parse([])) is None


# ---- over a slow link


@pytest.mark.timed
@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_a_link_between_hosts_is_measured_and_loopback_is_an_error(tmp_path):
    with hosts.Hosts(2, Link(1e8)) as two, contextlib.ExitStack() as closing:
        there = []
        for number in range(2):
            (tmp_path / str(number)).mkdir()
            there.append(Machine(tmp_path / str(number), two.command(number)))
            closing.callback(there[-1].close)

        def run(interface, port):
            given = {"address": two.address(0), "GLOO_SOCKET_IFNAME": interface}
            ranks = [
                there[k].start(k, 2, port, "--json", "-", "--seconds", "8", **given)
                for k in range(2)
            ]
            first, second = [end(rank) for rank in ranks]
            assert (second[0], second[1]) == (0, ""), second
            return first[0], json.loads(first[1])

        status, found = run("eth0", 29500)
        loop_status, loop = run("lo", 29501)
    assert status == 0 and wrongs(found) == []
    (pair,) = found["pairs"]
    assert 0.7e8 < pair["bits_per_s"] < 1.3e8 and 0.3e8 < pair["both_bits_per_s"] < 1.3e8
    assert len({one["identity"] for one in found["ranks"]}) == 2 and all(
        one["gloo"]["names"] == ["eth0"] for one in found["ranks"]
    )
    advice = found["recommendation"]
    assert advice["codec"] == "Block(4)" and advice["speedup"] > 3 and advice["exposed_s"] > 0.5
    # a veth says 10 Gbit/s
    assert any("pairs between hosts have" in f["text"] for f in found["findings"])
    assert loop_status == 1 and not loop["measured"] and loop["recommendation"] is None
    (text,) = wrongs(loop)
    assert "ranks 0 and 1: gloo takes lo, the loopback, which leads to no other host" in text
    assert loop["findings"][0]["do"] == "GLOO_SOCKET_IFNAME=eth0"


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_a_name_server_that_does_not_answer_is_said_and_hinders_nothing(tmp_path):
    """torch asks it for the name of every first connection, for longer than the members of a probe
    take to meet.
    """
    with hosts.Hosts(2, Link(1e9)) as two, contextlib.ExitStack() as closing:
        there = []
        for number in range(2):
            name = two.command(number)[3]
            own = Path("/etc/netns") / name
            own.mkdir(parents=True)
            closing.callback(shutil.rmtree, own)
            # an address of nobody
            (own / "resolv.conf").write_text("nameserver 192.0.2.1\noptions timeout:3 attempts:1\n")
            (own / "nsswitch.conf").write_text("hosts: files dns\n")
            subprocess.run(
                ["ip", "-n", name, "route", "add", "default", "via", two.address(1 - number)],
                check=True,
            )
            (tmp_path / str(number)).mkdir()
            there.append(Machine(tmp_path / str(number), two.command(number)))
            closing.callback(there[-1].close)
        given = {
            "address": two.address(0),
            "GLOO_SOCKET_IFNAME": "eth0",
            "first": "from gradcomp.doctor import session; session.SETUP_S = 2.5",
        }
        ranks = [there[k].start(k, 2, 29500, "--json", "-", **given) for k in range(2)]
        (status, text, _), (other, *_) = [end(rank) for rank in ranks]
    found = json.loads(text)
    assert (status, other, wrongs(found)) == (0, 0, [])
    assert set(found["lost_peer"]["seen"]["0"]) == {"silent"}
    (said,) = [f for f in found["findings"] if "looked up" in f["text"]]
    seconds = re.match(
        r"ranks 0 and 1: the name of an address is looked up for ([\d.]+)", said["text"]
    )
    assert seconds and float(seconds[1]) >= 2.9, said
    assert "/etc/resolv.conf" in said["do"]


# ---- ranks that are silent, or otherwise


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(machine):
    port, empty = free_port(), free_port()
    patient = """
import time
from gradcomp.doctor import session
meet = session.Me.meet
def meets(self, wait_s):
    words, deadline = meet(self, wait_s), time.monotonic() + 60
    # then it has come in time
    while not words.has(2, "card") and time.monotonic() < deadline:
        time.sleep(0.01)
    return words
session.Me.meet = meets
"""
    ranks = [
        machine.start(0, 4, port, "--wait", "2", first=patient),
        machine.start(2, 4, port, "--wait", "30"),
    ]
    lone = machine.start(1, 2, empty, "--wait", "2")
    (status, text, _), (other, *_) = [end(rank) for rank in ranks]
    assert (status, other) == (1, 0)
    assert (
        "wrong: ranks 1 and 3 did not answer within 2 s" in text
        and "what is wrong above comes first" in text
    )
    status, _, said = end(lone)
    assert status == 1 and "rank 1 does not reach rank 0 at 127.0.0.1" in said


@pytest.mark.slow
def test_a_rank_that_stops_before_it_has_come_is_named(machine):
    stops = (
        "import os, signal; from gradcomp.doctor import session; session.card = lambda *args:"
        " os.kill(os.getpid(), signal.SIGSTOP)"
    )
    options, port = ["--json", "-", "--wait", "3"], free_port()
    first, _ = machine.start(0, 2, port, *options), machine.start(1, 2, port, *options, first=stops)
    status, text, _ = end(first)
    found = json.loads(text)
    assert (status, found["silent"], wrongs(found)) == (
        1,
        [1],
        ["rank 1 did not answer within 3 s"],
    )


@pytest.mark.slow
def test_a_rank_that_stops_leaves_the_others_to_be_measured(machine):
    stops = (
        "import os, signal; from gradcomp.doctor import session; session.measure_all ="
        " lambda *args: os.kill(os.getpid(), signal.SIGSTOP)"
    )
    port = free_port()
    patient = (  # rank 2 waits for rank 1 first
        "from gradcomp.doctor import session; session.PAIRS_SHARE = 0.9"
    )
    ranks = [
        machine.start(
            k, 3, port, "--json", "-", "--seconds", "7", first=stops if k == 1 else patient
        )
        for k in range(3)
    ]
    status, text, _ = end(ranks[0])
    found = json.loads(text)
    assert (status, found["silent"], wrongs(found)) == (
        1,
        [1],
        ["rank 1 fell silent while measuring"],
    )
    assert [p["ranks"] for p in found["pairs"] if not p["failed"]] == [[0, 2]]
    assert found["recommendation"] is not None and end(ranks[2])[0] == 0
    assert found["lost_peer"]["skipped"] == "rank 1 did not answer" and found["seconds"] < 30


@pytest.mark.slow
def test_ranks_that_gloo_does_not_connect(machine):
    """One rank never comes to connect, as behind a firewall: nobody waits longer than for that,
    and it is said.
    """
    never = (
        "import time; from gradcomp.doctor import session; session.CONNECT_S = 2.0;"
        " session.open_group = lambda *args: time.sleep(3)"
    )
    patient, port = "from gradcomp.doctor import session; session.CONNECT_S = 2.0", free_port()
    ranks = [machine.start(k, 2, port, "--plain", first=never if k else patient) for k in range(2)]
    status, text, _ = end(ranks[0])
    assert (
        status == 1
        and "wrong: rank 0 is not connected to all others after" in text
        and "a firewall between the hosts" in text
    )


@pytest.mark.slow
def test_a_port_that_is_taken(machine):
    with socket.create_server(("127.0.0.1", 0)) as server:
        status, _, text = end(machine.start(0, 2, server.getsockname()[1], "--wait", "2"))
    assert (
        status == 1
        and "rank 0 cannot serve the ranks' store at 127.0.0.1" in text
        and "Is the port free?" in text
    )


@pytest.mark.slow
def test_a_rank_with_another_version_and_other_arguments_is_named(machine):
    other = "import gradcomp.doctor.card as card; card.__version__ = '0.0.9'"
    options, port = ["--json", "-", "--seconds", "2"], free_port()
    ranks = [
        machine.start(0, 2, port, *options),
        machine.start(1, 2, port, *options, "--compute", "3", first=other),
    ]
    (status, text, _), (there, *_) = [end(rank) for rank in ranks]
    assert (status, there) == (1, 0)
    found = json.loads(text)
    assert wrongs(found, "versions") == [
        f"gradcomp differs: {gradcomp.__version__} on rank 0, 0.0.9 on rank 1",
        "--compute differs: 0.1 on rank 0, 3.0 on rank 1; rank 0's was taken",
    ]
    assert found["recommendation"] is not None  # what can be measured is
    assert found["lost_peer"]["skipped"] == "there was no time left for it (--seconds gives more)"


@pytest.mark.slow
def test_another_doctor_is_named_and_not_spoken_to(machine):
    port = free_port()
    ranks = [
        machine.start(
            k, 2, port, first="import gradcomp.doctor.card as card; card.PROTOCOL = 7" * k
        )
        for k in range(2)
    ]
    (status, text, _), (there, *_) = [end(rank) for rank in ranks]
    assert (status, there) == (1, 0) and "wrong: rank 1 has another doctor" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nope0", "there is no interface 'nope0' here"),
        ("^lo", "NCCL's way to leave interfaces out"),
    ],
)
def test_an_interface_that_is_not_there(machine, name, says):
    port = free_port()
    ranks = [machine.start(rank, 2, port, GLOO_SOCKET_IFNAME=name) for rank in range(2)]
    (status, text, _), (other, *_) = [end(rank) for rank in ranks]
    assert (status, other) == (1, 0)
    assert (
        "wrong: ranks 0 and 1: gloo cannot start" in text
        and says in text
        and "-> GLOO_SOCKET_IFNAME=" in text
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY), reason=WHY)
def test_no_network_at_all(tmp_path):
    """In a namespace whose loopback is down nothing reaches anything; alone it is said, and of
    several ranks each says so.
    """
    bare = Machine(tmp_path, ["unshare", "--net"])
    try:
        alone, one = bare.start(0, 1, 29500), bare.start(1, 2, 29500, "--wait", "2")
        status, text, _ = end(alone)
        assert status == 1 and "gloo cannot start: lo is down; these could be taken: none" in text
        status, _, said = end(one)
        assert status == 1 and "rank 1 does not reach rank 0" in said
    finally:
        bare.close()


def test_bad_usage(capsys, tmp_path):
    for words, says in [
        (["--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--seconds", "nan"], "'nan' is not"),
        (["--parameters", "lots"], "'lots' is not a number of parameters such as"),
        (["--parameters", ""], "'' is not a number of parameters"),
        (["--compute", "-1"], "'-1' is not a number of seconds"),
        (["--every", "0"], "'0' is not a number of steps"),
        (["--optimizer", "no name"], "optimizer must be a name such as adamw"),
        (["--tolerance", "-1"], "'-1' is not a loss in nats"),
        (["--over", "nccl"], "invalid choice: 'nccl'"),
        (["--json", str(tmp_path / "none" / "file")], "there is no such folder"),
        (["surprise"], "unknown argument surprise"),
    ]:
        with pytest.raises(SystemExit) as ended:
            parse(words)
        assert ended.value.code == 2
        assert says in capsys.readouterr().err, words
    found = parse(["--parameters", "1.3B", "--compute", "20ms"])
    assert found.parameters == 1.3e9 and found.compute == 0.02
    assert set(agreed(found)) == set(vars(found)) - {"json", "plain"}
    assert (
        "exit status is 0 if all is well, 1 if something is wrong" in build_parser().format_help()
    )


# ---- pairs


def measure(comm):
    """Measure a pair of ranks that think differently of the time that is left."""
    pairs.SILENT_S = 60.0
    return pairs.measure_pair(comm, (3, 7), (0.02, 0.2)[comm.rank])


def test_a_pair_measures_the_same_on_both_sides(over):
    first, second = over(2, measure)
    assert first == second
    assert first.latency_s > 0 and first.bits_per_s > 1e5 and first.nbytes >= pairs.FIRST_NBYTES


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 8])
def test_rounds_have_every_pair_once_and_every_rank_once_a_round(world_size):
    found = pairs.rounds(world_size)
    everyone = [pair for one in found for pair in one]
    assert sorted(everyone) == [(i, j) for i in range(world_size) for j in range(i + 1, world_size)]
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in found)
    assert len(found) == world_size - 1 + world_size % 2


def test_when_time_runs_out_it_is_said():
    found = example(pairs_not_measured=5, seconds=12.5)
    text = plain(found)
    assert (
        "5 pairs were not measured: the time ran out" in text
        and "12.5 s, longer than the 10 s of --seconds" in text
    )


# ---- what is said of it


def rank(number, **more):
    """Return what a rank tells of itself."""
    lo = Interface("lo", "loopback", True, None, ("127.0.0.1",))
    eth = Interface("eth0", "ethernet", True, 1000, (f"10.0.0.{number + 1}",))
    given = {
        "rank": number,
        "host": f"n{number}",
        "identity": f"n{number}",
        "starter": "torchrun",
        "protocol": card.PROTOCOL,
        "versions": {"gradcomp": "1", "torch": "2", "python": "3"},
        "tier": "avx2",
        "tiers": ["portable", "avx2"],
        "cores": [0, 1, 2, 3],
        "quota": None,
        "threads": 4,
        "interfaces": [lo._asdict(), eth._asdict()],
        "gloo": {"variable": "eth0", "names": ["eth0"], "why": "", "problem": ""},
        "options": agreed(parse([])),
    }
    return given | more


def pair(first, second, rate, *, latency_s=1e-4, number=0, failed=""):
    return pairs.Pair((first, second), latency_s, rate, rate / 2, 1 << 20, number, failed)._asdict()


def with_interface(number, *some, variable="", names=("eth0",)):
    return rank(
        number,
        interfaces=[i._asdict() for i in some],
        gloo={"variable": variable, "names": names, "why": "", "problem": ""},
    )


def said(findings, level="wrong"):
    return [f"{f.text} -> {f.do}" for f in findings if f.level == level]


def test_versions_that_differ():
    assert list(judge.judge_versions([rank(0), rank(1)])) == []
    other = rank(2, versions={"gradcomp": "1", "torch": "2.1", "python": "3.9"}, tier="portable")
    found = list(judge.judge_versions([rank(0), rank(1), other]))
    assert said(found) == [
        "torch differs: 2 on ranks 0 and 1, 2.1 on rank 2 -> install the same on every host"
    ]
    assert any("python differs" in text for text in said(found, "note"))
    assert any("rank 2: the avx2 tier is switched off" in text for text in said(found, "note"))


def test_the_faster_interface_is_named():
    slow, fast = (
        Interface("eth1", "ethernet", True, 1000, ("10.0.0.1",)),
        Interface("ib0", "infiniband", True, 100000, ("10.1.0.1",)),
    )
    cards = [with_interface(k, slow, fast, names=("eth1",)) for k in range(2)]
    found = said(judge.judge_network(cards, "gloo"))
    assert (
        "ranks 0 and 1: gloo takes eth1 (1 Gbit/s) although ib0 (100 Gbit/s) is up ->"
        " GLOO_SOCKET_IFNAME=ib0, if it leads to the other ranks" in found
    )
    assert said(judge.judge_network(cards, "mpi")) == []
    down = Interface("ib0", "infiniband", False, 100000, ("10.1.0.1",))
    alike = Interface("eth2", "ethernet", True, 1500, ("10.2.0.1",))
    cards = [
        with_interface(
            k,
            Interface("eth1", "ethernet", True, 1000, (f"10.0.0.{k}",)),
            down,
            alike,
            names=("eth1",),
        )
        for k in range(2)
    ]
    assert said(judge.judge_network(cards, "gloo")) == []


def test_a_bridge_and_an_address_that_two_hosts_have():
    docker = Interface("docker0", "bridge", True, None, ("172.17.0.1",))
    eth = Interface("eth0", "ethernet", True, None, ("10.0.0.1",))
    found = said(
        judge.judge_network(
            [with_interface(k, docker, eth, names=("docker0",)) for k in range(2)], "gloo"
        )
    )
    assert any(
        "ranks 0 and 1: gloo takes docker0, a bridge of containers" in text
        and "GLOO_SOCKET_IFNAME=eth0" in text
        for text in found
    )
    assert any("2 hosts have the address 172.17.0.1" in text for text in found)
    one_host = [with_interface(k, docker, names=("docker0",)) | {"identity": "n"} for k in range(2)]
    assert said(judge.judge_network(one_host, "gloo")) == []


@pytest.mark.parametrize(
    ("variable", "names", "problem"),
    [
        ("eth0", ("eth0",), ""),
        ("eth0,eth0", ("eth0", "eth0"), ""),
        ("eth9", (), "there is no interface 'eth9' here; these could be taken: lo, eth0"),
        ("^lo,docker0", (), "NCCL's way"),
        ("eth1", (), "eth1 is down"),
        ("eth2", (), "eth2 has no address"),
    ],
)
def test_what_gloo_takes(variable, names, problem):
    there = [
        Interface("lo", "loopback", True, None, ("127.0.0.1",)),
        Interface("eth0", "ethernet", True, None, ("10.0.0.1",)),
        Interface("eth1", "ethernet", False, None, ("10.0.1.1",)),
        Interface("eth2", "ethernet", True, None, ()),
    ]
    found = gloo_takes(there, variable)
    assert (
        found.names == names and problem in found.problem and bool(problem) == bool(found.problem)
    )


@pytest.mark.parametrize(
    ("addresses", "names"),
    [
        (["10.0.0.1"], ("eth0",)),
        (["127.0.1.1"], ("lo",)),
        (["10.9.9.9"], ("lo",)),
        ([], ("lo",)),
        (["10.9.9.9", "10.0.0.1"], ("eth0",)),
    ],
)
def test_without_the_variable_gloo_goes_by_the_host_name(addresses, names, monkeypatch):
    there = [
        Interface("lo", "loopback", True, None, ("127.0.0.1",)),
        Interface("eth0", "ethernet", True, None, ("10.0.0.1",)),
    ]
    monkeypatch.setattr("gradcomp.doctor.interfaces._resolve", lambda host: addresses)
    assert gloo_takes(there, "").names == names


def test_interfaces_of_this_machine():
    found = {one.name: one for one in interfaces()}
    assert found["lo"].kind == "loopback" and not found["lo"].carries
    assert set(found) == {name for _, name in socket.if_nameindex()}


def test_pairs_that_are_slow_or_lost():
    cards = [rank(k) for k in range(4)]
    some = [
        pair(0, 1, 1e9),
        pair(0, 2, 1e9),
        pair(1, 2, 1e9),
        pair(0, 3, 1e8),
        pair(1, 3, 1e9, failed="rank 1: refused"),
    ]
    found = said(judge.judge_pairs(cards, some, []))
    assert len(found) == 2
    assert found[0].startswith("ranks 1 and 3 do not reach each other: rank 1: refused")
    assert found[1].startswith("ranks 0 and 3: 100 Mbit/s, where pairs between hosts have 1 Gbit/s")
    assert len(said(judge.judge_pairs(cards, some, [3]))) == 1  # that rank is named elsewhere
    slow = said(judge.judge_pairs(cards, [pair(0, 1, 9e7)], []), "note")
    assert slow[0].startswith(
        "pairs between hosts have 90 Mbit/s over interfaces that say 1 Gbit/s"
    )


def test_cores():
    on_one = [rank(k, identity="n", host="n") for k in range(2)]
    assert said(judge.judge_cores(on_one)) == [
        (
            "ranks 0 and 1 on n: 8 threads of torch on 4 cores take the cores from each other ->"
            " OMP_NUM_THREADS=2, or torch.set_num_threads(2)"
        )
    ]
    assert list(judge.judge_cores([rank(0), rank(1)])) == []
    assert said(judge.judge_cores([rank(0, quota=1.0)])) != []  # a container that grants one core
    many = [rank(k, identity="n", threads=1) for k in range(5)]
    assert (
        said(judge.judge_cores(many)) == []
        and "5 ranks on 4 cores" in said(judge.judge_cores(many), "note")[0]
    )
    tied = [rank(k, identity="n", threads=1, cores=[k // 2]) for k in range(3)] + [
        rank(3, identity="n", threads=1, cores=[2, 3])
    ]
    assert said(judge.judge_cores(tied))[0].startswith(
        "ranks 0 and 1 are bound to the same 1 of 4 cores"
    )


def test_quota_of_a_container(tmp_path):
    assert card.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert card.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert card.cpu_quota(tmp_path) == 1.5


@pytest.mark.parametrize(
    ("given", "level", "says"),
    [
        (Timeouts(60, 300, 300, None, 0), None, ""),
        (
            Timeouts(60, 300, 100, None, 0),
            "wrong",
            "torch gives up after 100 s, before gradcomp after 300 s",
        ),
        (
            Timeouts(60, 300, 1800, None, 0),
            "note",
            "gradcomp gives a peer up after 300 s, torch's own",
        ),
        (Timeouts(60, 300, 300, None, 45), "wrong", "the ranks came 45 s apart, and wait 60 s"),
        (Timeouts(60, 1800, 1800, None, 0), "note", "is given up after 1800 s"),
        (Timeouts(60, 300, 300, 100, 0), "note", "the job ends in 100 s"),
        (Timeouts(10, 15, 15, None, 0), "wrong", "a step computes for 10 s"),
        (
            Timeouts(300, 300, 300, None, 0, "GRADCOMP_SETUP_TIMEOUT_S must be"),
            "wrong",
            "GRADCOMP_SETUP_TIMEOUT_S must be",
        ),
    ],
)
def test_the_order_of_timeouts(given, level, says):
    found = list(given.findings(10.0))
    assert [(one.level, says in one.text) for one in found] == (
        [] if level is None else [(level, True)]
    )


def test_timeouts_here(monkeypatch):
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", "30")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    found = Timeouts.here("gloo", None, None, 1.0)
    assert (found.setup_s, found.gradcomp_s, found.torch_s) == (
        30,
        1800,
        1800,
    ) and 90 < found.job_s <= 100
    assert (
        Timeouts.here("mpi", None, None, 0).gradcomp_s == 300
        and Timeouts.here("gloo", 20, 40, 0).setup_s == 20
    )
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", "soon")
    assert "must be a number of seconds" in Timeouts.here("gloo", None, None, 0).setup_problem


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        ({"silent": {"error": "PeerLost", "seconds": 1.2}}, ""),
        ({"silent": {"error": "", "seconds": 1.0}}, "did not get an error for a lost peer in time"),
        ({"silent": {"error": "RuntimeError", "seconds": 1.0}}, "(silent: RuntimeError after 1.0"),
        ({"silent": {"error": "PeerLost", "seconds": 60.0}}, "(silent: PeerLost after 60.0 s)"),
        ({"failed": "ConnectionError: refused"}, "on rank 0: ConnectionError: refused"),
    ],
)
def test_a_lost_peer_that_is_not_noticed_is_wrong(seen, says):
    found = said(judge.judge_probe({"seen": {"0": seen}}))
    assert [says in text for text in found] == [True] * bool(says)


def test_who_takes_part_in_a_probe():
    assert session.members_of(["a", "a"]) == [0, 1]
    assert session.members_of(["a"] * 8) == [0, 1, 2]
    assert session.members_of(["a", "a", "b", "b"]) == [0, 2]
    assert session.members_of(["a", "b", "c", "d"]) == [0, 1, 2]


# ---- the recommendation


def test_the_link_of_a_node_is_what_its_ranks_have_together():
    two_by_two = ["a", "a", "b", "b"]
    some = [
        pair(0, 1, 8e9),
        pair(2, 3, 8e9),
        pair(0, 2, 5e8, number=1),
        pair(1, 3, 4e8, number=1),
        pair(0, 3, 2e8, number=2),
        pair(1, 2, 2e8, number=2),
    ]
    link, node, nodes = advise.link_of(two_by_two, some)
    assert (link.bits_per_s, node, nodes) == (9e8, Node(2, Link(8e9, 1e-4)), 2)
    link, node, nodes = advise.link_of(["a", "a"], [pair(0, 1, 8e9)])
    assert (link.bits_per_s, node.ranks, nodes) == (8e9, 1, 2)
    link, node, nodes = advise.link_of(
        ["a", "a", "b"], [pair(0, 1, 8e9), pair(0, 2, 1e9), pair(1, 2, 1e9)]
    )
    assert (link.bits_per_s, node.ranks, nodes) == (1e9, 1, 3)  # hosts that are not alike
    link, _, nodes = advise.link_of(
        ["a", "b", "c"], [pair(0, 1, 1e9), pair(0, 2, 1e8, number=1), pair(1, 2, 2e8, number=2)]
    )
    assert (link.bits_per_s, nodes) == (2e8, 3)  # of the slowest node, at its best
    assert advise.link_of(["a", "b"], [pair(0, 1, 0, failed="refused")]) is None


def options(*words):
    return vars(parse(list(words)))


@pytest.mark.parametrize(
    ("words", "rate", "method", "code"),
    [
        (
            [],
            1e8,
            "block4 all_gather",
            'ddp.register(model, Block(4), exchange="all_gather", optimizer=optimizer)',
        ),
        (["--parameters", "1e5"], 1e11, "fp32", ""),
        (
            ["--optimizer", "sgd"],
            1e8,
            "block4 all_gather",
            'ddp.register(model, Block(4), exchange="all_gather", optimizer=optimizer)',
        ),
        (["--every", "30", "--tolerance", "0.04"], 1e10, "every 30", "sync_every=30"),
    ],
)
def test_the_planner_recommends(words, rate, method, code):
    latency_s = 2.0 if "--every" in words else 1e-4
    found = advise.recommend(Link(rate, latency_s), Node(), 2, options(*words), 2.0, 0.0)
    assert method in found["method"] and code in advise.in_code(found, "gloo")
    assert not found["rates_measured"] and (found["speedup"] > 1.05) == bool(code)
    json.dumps(found)


def test_codecs_are_measured_where_there_is_time():
    assert advise.recommend(Link(1e8, 1e-4), Node(), 2, options("--parameters", "1e6"), 2.0, 10.0)[
        "rates_measured"
    ]


# ---- the report


def example(**more):
    cards = [rank(k) for k in range(2)]
    found = {
        "over": "gloo",
        "ranks": cards,
        "world_size": 2,
        "silent": [],
        "pairs": [pair(0, 1, 1e9)],
        "pairs_not_measured": 0,
        "measured": True,
        "timeouts": {"order": "setup 60 s"},
        "seconds": 3.0,
        "budget_s": 10.0,
        "status": 1,
        "lost_peer": {
            "seen": {"0": {"silent": {"error": "PeerLost", "seconds": 1.0}}},
            "skipped": "",
            "lost": 1,
        },
        "recommendation": advise.recommend(Link(1e9, 1e-4), Node(), 2, options(), 2.0, 0.0),
        "findings": [judge.wrong("link", "it is slow", "mend [it]")._asdict()],
    }
    return found | more


def plain(found):
    out = io.StringIO()
    report.show(found, out)
    return out.getvalue()


def test_the_report():
    text = plain(example())
    assert (
        "ranks 0 and 1: 100 us, 1 Gbit/s, both ways at once 500 Mbit/s each" in text
        and "wrong: it is slow\n                -> mend [it]\n" in text
    )
    assert "1 thing wrong, 0 notes; 3.0 s." in text
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    report.show(example(), terminal)
    assert "\x1b[1;31mwrong: it is slow\x1b[0m" in terminal.getvalue()
    assert re.sub(r"\x1b\[[\d;]+m", "", terminal.getvalue()) == text
    terminal.seek(0)
    report.show(example(), terminal, plain=True)
    assert terminal.getvalue().startswith(text)
    many = [pair(i, j, 1e9 + i) for i in range(9) for j in range(i + 1, 9)]
    assert "36 pairs: 1 Gbit/s to" in plain(example(pairs=many))
    probe_skipped = {"seen": {}, "skipped": "there was no time left for it", "lost": None}
    assert "not tried: there was no time left for it" in plain(example(lost_peer=probe_skipped))


def test_entries_of_both_ends_are_one():
    merged = session._merged(
        [pair(0, 1, 0, failed="rank 0: late"), pair(0, 1, 1e9), pair(1, 2, 1e9), pair(1, 2, 1e9)]
    )
    assert [(p["ranks"], p["failed"]) for p in merged] == [((0, 1), ""), ((1, 2), "")]


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_that_cannot_be_one_ends_the_look_up(host, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    lookup = card.Lookup(host)
    for _ in range(1200):
        if lookup._took_s is not None:
            break
        time.sleep(0.05)
    assert not failed and lookup.seconds == lookup._took_s
