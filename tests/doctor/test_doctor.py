"""The doctor: real ranks under every launcher, over a slow link, with one that is silent, and
what it says of each.
"""

import contextlib
import fnmatch
import io
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import _forks
import pytest
import torch
from _hosted import HostedKernels
from _ranks import each_rank, mpi_python, output_of
from gradcomp.launch.ports import free_port

import gradcomp
from gradcomp import kernels
from gradcomp.bench import hosts
from gradcomp.doctor import accelerator, advise, card, judge, pairs, report, session
from gradcomp.doctor.__main__ import main
from gradcomp.doctor.interfaces import Interface, gloo_takes, interfaces
from gradcomp.doctor.options import agreed, build_parser, parse
from gradcomp.kernels import check
from gradcomp.kernels.native import NativeKernels
from gradcomp.plan import cli
from gradcomp.plan.links import Link, Node
from gradcomp.plan.rates import COPIES
from gradcomp.plan.step import Setting

WHY = hosts.unavailable()
ROOT_ONLY = pytest.mark.skipif(bool(WHY), reason=WHY)
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SCRIPT = Path(__file__).with_name("_rank.py")
PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment():
    return {k: v for k, v in os.environ.items() if k not in PLACE} | QUIET


@pytest.fixture
def start():
    """Return start(rank, world size, port, *options): a rank that runs the doctor, under the words
    of `prefix`, such as a namespace, or forked; `first` makes it otherwise than others are.
    """
    started = []

    def start(
        rank, world_size, port, *options, prefix=(), first="", address="127.0.0.1", **variables
    ):
        given = QUIET | {"RANK": rank, "WORLD_SIZE": world_size, **variables}
        given |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        words = [json.dumps({k: str(v) for k, v in given.items()}), first, *options]
        if prefix:
            command = [*prefix, sys.executable, SCRIPT, *words]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            one = subprocess.Popen(command, env=environment(), **pipes)
        else:
            one = _forks.Program(SCRIPT, *words)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


def end(one):
    """Return (status, standard output, standard error) of a rank that was started."""
    out, err = one.communicate(timeout=90)
    return one.returncode, out, err


def wrongs(found):
    return [f["text"] for f in found["findings"] if f["level"] == "wrong"]


# ---- under launchers


LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    "mpich": ("gradcomp.launch", "-n", "2"),
    "openmpi": ("gradcomp.launch", "-n", "2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    ["torchrun", *(pytest.param(mpi, marks=pytest.mark.long) for mpi in ("mpich", "openmpi"))],
)
def test_two_ranks_under_a_launcher(launcher, tmp_path):
    python = sys.executable if launcher == "torchrun" else mpi_python(launcher)
    doctor = "-m", "gradcomp.doctor", "--seconds", "30", "--json", tmp_path / "found.json"
    command = *_forks.python(python), "-m", *LAUNCHERS[launcher], *doctor
    out = output_of(*command, env=environment(), timeout=100)
    assert out.returncode == 0, out.stdout + out.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    over = "gloo" if launcher == "torchrun" else "mpi"
    assert found["over"] == over and found["world_size"] == len(found["ranks"]) == 2
    assert found["status"] == 0 and wrongs(found) == [] and found["seconds"] < 60
    (pair,) = found["pairs"]
    assert pair["ranks"] == [0, 1] and not pair["failed"] and pair["nbytes"] >= 1 << 16
    assert 1e-6 < pair["latency_s"] < 0.2 and 1e5 < pair["bits_per_s"] < 1e13
    assert found["lost_peer"]["lost"] == 1 and set(found["lost_peer"]["seen"]["0"]) == {"silent"}
    silent = found["lost_peer"]["seen"]["0"]["silent"]
    assert silent["error"] == "PeerLost"
    assert judge.PATIENCE_S <= silent["seconds"] < judge.PATIENCE_S + judge.LATE_S
    advice = found["recommendation"]
    assert advice["link"]["bits_per_s"] == pair["bits_per_s"] and advice["link"]["nodes"] == 2
    for words in ("gloo takes lo (loopback", "rank 1 fell silent: PeerLost", "Nothing wrong"):
        assert words in out.stdout
    assert out.stdout.count("recommended") == 1  # rank 0 alone prints
    if over == "gloo":
        assert "2 of 2, started by torchrun, bytes over gloo" in out.stdout
    else:
        library = {"mpich": "MPICH", "openmpi": "Open MPI"}[launcher]
        assert library in found["ranks"][1]["versions"]["MPI"]
        assert "MpiCommunicator" in advise.in_code(advice, "mpi") or advice["codec"] is None


def test_alone_it_looks_at_the_machine_and_says_how_to_start_ranks(capsys, caplog, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    caplog.set_level(logging.WARNING, "gradcomp")  # main sets another one
    crowded = any(
        level == "wrong" for level, *_ in judge._cores({"ranks": [card.card(0, {}, None)]})
    )
    assert main(["--plain"]) == int(crowded)
    text = capsys.readouterr().out
    launchers = "torchrun --standalone", "python -m gradcomp.launch -n 2", "srun -n 4"
    seen = "alone on", f"torch {torch.__version__}", " tier", "start several ranks"
    assert [words for words in (*launchers, *seen) if words not in text] == []


def test_variables_of_srun_are_understood(monkeypatch):
    step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[07-08]"}
    task = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    me = session.Me.find("auto", step | task | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
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


@pytest.fixture
def between_hosts(start):
    """Return run(interface): the status and what the doctor finds on two hosts."""

    def run(interface):
        with hosts.Hosts(2, Link(1e8)) as two:
            given = {"address": two.address(0), "GLOO_SOCKET_IFNAME": interface}
            options = 29500, "--json", "-", "--seconds", "8"
            ranks = [start(k, 2, *options, prefix=two.command(k), **given) for k in range(2)]
            first, second = [end(rank) for rank in ranks]
        assert (second[0], second[1]) == (0, ""), second
        return first[0], json.loads(first[1])

    return run


@pytest.mark.slow
@ROOT_ONLY
def test_loopback_between_hosts_is_an_error(between_hosts):
    status, loop = between_hosts("lo")
    assert status == 1 and not loop["measured"] and loop["recommendation"] is None
    (text,) = wrongs(loop)
    assert "ranks 0 and 1: gloo takes lo, the loopback, which leads to no other host" in text
    (do,) = (one["do"] for one in loop["findings"] if one["text"] == text)
    assert do == "GLOO_SOCKET_IFNAME=eth0"


@pytest.mark.timed
@pytest.mark.slow
@ROOT_ONLY
def test_a_link_between_hosts_is_measured(between_hosts):
    status, found = between_hosts("eth0")
    assert status == 0 and wrongs(found) == []
    (pair,) = found["pairs"]
    assert 0.7e8 < pair["bits_per_s"] < 1.3e8 and 0.3e8 < pair["both_bits_per_s"] < 1.3e8
    assert len({one["identity"] for one in found["ranks"]}) == 2 and all(
        one["gloo"]["names"] == ["eth0"] for one in found["ranks"]
    )
    advice = found["recommendation"]
    assert advice["codec"] in ("EntropyCoded(1.25)", "Ternary()")  # portable kernels: as fast
    assert advice["speedup"] > 6 and advice["exposed_s"] > 0.1
    # a veth says 10 Gbit/s
    assert any("pairs between hosts have" in f["text"] for f in found["findings"])


@pytest.mark.slow
@ROOT_ONLY
def test_a_name_server_that_does_not_answer_is_said_and_hinders_nothing(start):
    """torch asks it for the name of every first connection, for longer than the members of a probe
    take to meet.
    """
    with hosts.Hosts(2, Link(1e9)) as two, contextlib.ExitStack() as closing:
        for number in range(2):
            name = two.command(number)[3]
            own = Path("/etc/netns") / name
            own.mkdir(parents=True)
            closing.callback(shutil.rmtree, own)
            # an address of nobody
            (own / "resolv.conf").write_text("nameserver 192.0.2.1\noptions timeout:3 attempts:1\n")
            (own / "nsswitch.conf").write_text("hosts: files dns\n")
            way = ["route", "add", "default", "via", two.address(1 - number)]
            subprocess.run(["ip", "-n", name, *way], check=True)
        given = {"address": two.address(0), "GLOO_SOCKET_IFNAME": "eth0"}
        given["first"] = "from gradcomp.doctor import session; session.SETUP_S = 2.5"
        ranks = [start(k, 2, 29500, "--json", "-", prefix=two.command(k), **given) for k in (0, 1)]
        (status, text, _), (other, *_) = [end(rank) for rank in ranks]
    found = json.loads(text)
    assert (status, other, wrongs(found)) == (0, 0, [])
    assert set(found["lost_peer"]["seen"]["0"]) == {"silent"}
    (said,) = [f for f in found["findings"] if "looked up" in f["text"]]
    asked = r"ranks 0 and 1: the name of an address is looked up for ([\d.]+)"
    assert float(re.match(asked, said["text"])[1]) >= 2.9, said
    assert "/etc/resolv.conf" in said["do"]


# ---- ranks that are silent, or otherwise


COMES = """
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
IMPORTS = "import os, signal, time; from gradcomp.doctor import card, session; "
STOPS = "lambda *args: os.kill(os.getpid(), signal.SIGSTOP)"
IMPATIENT = f"{IMPORTS}session.CONNECT_S = 2.0; "
LONGER = f"{IMPORTS}session.PAIRS_SHARE = 0.9"  # rank 2 waits for rank 1 first
NO_INTERFACE = "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'nope0'"
WAITS, SHORT = ("--wait", "3"), ("--seconds", "7")
# what is wrong: {rank: (what makes it otherwise, *options)}, ranks that end, good pairs
SCENES = {
    "ranks 1 and 3 did not answer within 2 s": (
        {0: (COMES, "--wait", "2"), 2: ("", "--wait", "30")},
        (0, 2),
        [],
    ),
    "rank 1 did not answer within 3 s": (
        {0: ("", *WAITS), 1: (f"{IMPORTS}session.card = {STOPS}", *WAITS)},
        (0,),
        [],
    ),
    "rank 1 fell silent while measuring": (
        {
            0: (LONGER, *SHORT),
            1: (f"{IMPORTS}session.measure_all = {STOPS}", *SHORT),
            2: (LONGER, *SHORT),
        },
        (0, 2),
        [[0, 2]],
    ),
    # as behind a firewall
    "rank 0 is not connected to all others after": (
        {0: (IMPATIENT,), 1: (f"{IMPATIENT}session.open_group = lambda *_: time.sleep(3)",)},
        (0,),
        [],
    ),
    f"gradcomp differs: {gradcomp.__version__} on rank 0, 0.0.9 on rank 1": (
        {0: ("", "--seconds", "2"), 1: (f"{IMPORTS}card.__version__ = '0.0.9'", "--seconds", "2")},
        (0, 1),
        [[0, 1]],
    ),
    "--compute differs: 0.1 on rank 0, 3.0 on rank 1; rank 0's was taken": (
        {0: ("",), 1: ("", "--compute", "3")},
        (0, 1),
        [[0, 1]],
    ),
    "rank 1 has another doctor": ({0: ("",), 1: (f"{IMPORTS}card.PROTOCOL = 7",)}, (0, 1), []),
    "ranks 0 and 1: gloo cannot start: there is no interface 'nope0' here": (
        dict.fromkeys((0, 1), (NO_INTERFACE,)),
        (0, 1),
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", SCENES)
def test_what_is_wrong_with_ranks(start, wrong):
    """A rank that is silent is named, and all that can be measured without it is."""
    programs, ends, good = SCENES[wrong]
    port, world_size = free_port(), 4 if "ranks 1 and 3" in wrong else len(programs)
    started = {
        rank: start(rank, world_size, port, "--json", "-", *options, first=first)
        for rank, (first, *options) in programs.items()
    }
    ended = {rank: end(started[rank]) for rank in ends}
    assert {rank: one[0] for rank, one in ended.items()} == dict.fromkeys(ends, 0) | {0: 1}
    found = json.loads(ended[0][1])
    (text,) = [one for one in wrongs(found) if not one.startswith("--wait differs")]
    assert text.startswith(wrong) and found["seconds"] < 40
    silent = re.match("ranks? (.*) (did not answer|fell silent)", wrong)
    assert found["silent"] == (list(map(int, silent[1].split(" and "))) if silent else [])
    assert [p["ranks"] for p in found["pairs"] if not p["failed"]] == good
    assert (found["recommendation"] is not None) == bool(good)
    if "fell silent" in wrong:
        assert found["lost_peer"]["skipped"] == "rank 1 did not answer"
    if "gradcomp differs" in wrong:
        assert "no time left for it (--seconds" in found["lost_peer"]["skipped"]


@pytest.mark.slow
def test_ranks_that_do_not_meet(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        status, _, text = end(start(0, 2, server.getsockname()[1], "--wait", "2"))
    assert status == 1 and "Is the port free?" in text
    assert "rank 0 cannot serve the ranks' store at 127.0.0.1" in text
    status, _, text = end(start(1, 2, free_port(), "--wait", "2"))
    assert status == 1 and "rank 1 does not reach rank 0 at 127.0.0.1" in text


@pytest.mark.slow
@ROOT_ONLY
def test_no_network_at_all(start):
    """In a namespace whose loopback is down nothing reaches anything; alone it is said, and of
    several ranks each says so.
    """
    bare = {"prefix": ["unshare", "--net"]}
    alone, one = start(0, 1, 29500, **bare), start(1, 2, 29500, "--wait", "2", **bare)
    status, text, _ = end(alone)
    assert status == 1 and "gloo cannot start: lo is down; these could be taken: none" in text
    status, _, said = end(one)
    assert status == 1 and "rank 1 does not reach rank 0" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--seconds", "nan"], "'nan' is not"),
        (["--parameters", "lots"], "'lots' is not a number of parameters such as"),
        (["--parameters", ""], "'' is not a number of parameters"),
        (["--compute", "-1"], "'-1' is not a number of seconds"),
        (["--every", "0"], "'0' is not a positive integer"),
        (["--optimizer", "no name"], "optimizer must be a name such as adamw"),
        (["--tolerance", "-1"], "'-1' is not a loss in nats"),
        (["--over", "nccl"], "invalid choice: 'nccl'"),
        (["--json", "/nowhere/file"], "there is no such folder"),
        (["surprise"], "unknown argument surprise"),
    ],
)
def test_a_wrong_command_line_is_refused(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_a_command_line():
    found = parse(["--parameters", "1.3B", "--compute", "20ms"])
    assert found.parameters == 1.3e9 and found.compute == 0.02
    assert set(agreed(found)) == set(vars(found)) - {"json", "plain"}
    says = "exit status is 0 if all is well, 1 if something is wrong"
    assert says in build_parser().format_help()


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


# ---- what is said of it


LO = Interface("lo", "loopback", True, None, ("127.0.0.1",))


def ethernet(name, mbit, *addresses, kind="ethernet", up=True):
    return Interface(name, kind, up, mbit, addresses)


def rank(number, *there, names=("eth0",), **more):
    """Return the card of a rank with these interfaces, of which gloo takes `names`."""
    there = there or (LO, ethernet("eth0", 1000, f"10.0.0.{number + 1}"))
    return {
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
        "interfaces": [one._asdict() for one in there],
        "gloo": {"variable": "eth0", "names": names, "why": "as it is", "problem": ""},
        "options": agreed(parse([])),
        **more,
    }


def pair(first, second, rate, *, number=0, failed=""):
    return pairs.Pair((first, second), 1e-4, rate, rate / 2, 1 << 20, number, failed)._asdict()


def limits(ours=300, torch=300, job=None, apart=0, problem=""):
    named = {"setup_s": 60, "gradcomp_s": ours, "torch_s": torch, "job_s": job}
    return {"timeouts": named | {"apart_s": apart, "setup_problem": problem, "order": "setup 60 s"}}


def probe(**silent):
    return {"lost_peer": {"seen": {"0": {"silent": silent}}, "skipped": "", "lost": 1}}


def example(**more):
    """Return what rank 0 has found, as `session.examine` does, with some of it otherwise."""
    found = {
        "over": "gloo",
        "ranks": [rank(0), rank(1)],
        "world_size": 2,
        "silent": [],
        "not_connected": "",
        "pairs": [pair(0, 1, 1e9)],
        "pairs_not_measured": 0,
        "measured": True,
        "seconds": 3.0,
        "budget_s": 10.0,
        "recommendation": None,
    }
    found |= limits() | probe(error="PeerLost", seconds=1.0) | more
    found["world_size"] = more.get("world_size", len(found["ranks"]))
    said = judge.findings(found)
    return {"findings": said, "status": int(any(f["level"] == "wrong" for f in said))} | found


def both(*there, **more):
    return [rank(k, *there, **more) for k in range(2)]


def on_one(count, threads=1, **more):
    return [rank(k, identity="n", host="n", threads=threads, **more) for k in range(count)]


DEVICE = {
    "device": "cuda:0",
    "name": "NVIDIA H200",
    "driver": "570.86.15",
    "platform": "CUDA 12.8",
    "to_host_bytes_per_s": 5.2e10,
    "to_device_bytes_per_s": 5.4e10,
    "triton": "Triton 3.9.0",
    "encodes_on": "host",
    "self_check": "not run",
    "refused": "",
    "failed": "",
}
ENCODES = DEVICE | {"encodes_on": "device", "self_check": "passed"}
OLD_TRITON = DEVICE | {"refused": "Triton 2.0 is too old, 3.9 is needed"}
LOST_DEVICE = {key: DEVICE[key] for key in ("device", "name", "driver", "platform")}
LOST_DEVICE |= {"failed": "CUDA error: out of memory"}
IB = ethernet("ib0", 100000, "10.1.0.1", kind="infiniband")
DOCKER = ethernet("docker0", None, "172.17.0.1", kind="bridge")
ETH = ethernet("eth0", None, "10.0.0.1")
OLD = {"versions": {"gradcomp": "1", "torch": "2.1", "python": "3.9"}, "tier": "portable"}
BOUND = [rank(k, identity="n", threads=1, cores=c) for k, c in enumerate([[0], [0], [1], [2, 3]])]
FOUR = [rank(k) for k in range(4)]
PAIRS = [pair(0, 1, 1e9), pair(0, 2, 1e9), pair(1, 2, 1e9), pair(0, 3, 1e8)]
PAIRS += [pair(1, 3, 1e9, failed="rank 1: refused")]
FAR = pair(0, 1, 1e9) | {"latency_s": 0.02}
SLOW_PAIR = "wrong: ranks 0 and 3: 100 Mbit/s, where pairs between hosts have 1 Gbit/s -> *"
NOT_NOTICED = "wrong: rank 0 did not get an error for a lost peer in time (silent: {} s) -> *"


def slow(*others):
    """Return what two ranks are whose gloo takes eth1, of 1 Gbit/s."""
    eth1 = [ethernet("eth1", 1000, f"10.0.0.{k}") for k in range(2)]
    return [rank(k, eth1[k], *others, names=("eth1",)) for k in range(2)]


# what was found otherwise (a list: the ranks), and patterns of all findings
FINDINGS = [
    ({}, []),
    (
        [rank(0), rank(1), rank(2, **OLD)],
        [
            "wrong: torch differs: 2 on ranks 0 and 1, 2.1 on rank 2 -> install the same on *",
            "note: python differs: *",
            "note: rank 2: the avx2 tier is switched off -> unset GRADCOMP_DISABLE_CPU_FEATURES",
            "note: tiers differ: avx2 on ranks 0 and 1, portable on rank 2; *",
        ],
    ),
    (both(tier="portable", tiers=["portable"]), ["note: ranks 0 and 1: plain C kernels, *"]),
    # it said that the avx2 tier of both is switched off
    (
        [rank(0, tier="portable"), rank(1, tier="portable", tiers=["portable"])],
        [
            "note: rank 0: the avx2 tier is switched off -> unset GRADCOMP_DISABLE_CPU_FEATURES",
            "note: rank 1: plain C kernels, *",
        ],
    ),
    ([rank(0), rank(1, starter="srun")], ["wrong: * launchers: torchrun on rank 0, srun on *"]),
    ([rank(0, accelerator=DEVICE), rank(1, accelerator=ENCODES)], []),
    (
        [rank(0, accelerator=OLD_TRITON), rank(1, accelerator=LOST_DEVICE)],
        [
            "note: rank 0: GRADCOMP_CUDA_KERNELS=1, and * Triton 2.0 is too old, * -> *",
            "wrong: rank 1: NVIDIA H200 (cuda:0) fails: CUDA error: out of memory -> *nvidia-smi*",
        ],
    ),
    (slow(IB), ["wrong: *: gloo takes eth1 (1 Gbit/s) although ib0 (100 Gbit/s) * -> *=ib0,*"]),
    ({"ranks": slow(IB), "over": "mpi"}, ["note: ranks 0 and 1: gloo takes eth1 *; an MPI *"]),
    (slow(IB._replace(is_up=False), ethernet("eth2", 1500, "10.2.0.1")), []),
    (both(LO, ETH, names=("lo",)), ["wrong: *: gloo takes lo, the loopback, * -> *_IFNAME=eth0"]),
    (
        both(DOCKER, ETH, names=("docker0",)),
        [
            "wrong: ranks 0 and 1: gloo takes docker0, a bridge of containers * -> *_IFNAME=eth0",
            "wrong: 2 hosts have the address 172.17.0.1: it leads from each of them to itself -> *",
        ],
    ),
    (both(DOCKER, names=("docker0",), identity="n", threads=1), []),  # all of one host
    ([rank(0, lookup_s=1.5), rank(1, lookup_s=0.5)], ["note: rank 0: the name * for 1.50 s, *"]),
    (
        {"ranks": FOUR, "pairs": PAIRS},
        ["wrong: ranks 1 and 3 do not reach each other: rank 1: refused -> *", SLOW_PAIR],
    ),
    (
        {"ranks": FOUR, "pairs": PAIRS, "silent": [3]},
        ["wrong: rank 3 fell silent while measuring -> look at what the process does*", SLOW_PAIR],
    ),
    ({"pairs": [pair(0, 1, 9e7)]}, ["note: * have 90 Mbit/s * that say 1 Gbit/s -> *"]),
    (
        {"pairs": [FAR], "ranks": [rank(0, congestion="cubic"), rank(1, congestion="bbr")]},
        ["note: messages between hosts take 20.0 ms, and TCP uses cubic on rank 0 -> if *=bbr on*"],
    ),
    ({"pairs": [FAR], "ranks": both(congestion="bbr")}, []),
    ({"ranks": both(congestion="cubic")}, []),
    (on_one(2, threads=4), ["wrong: * on n: 8 threads of torch on 4 * -> OMP_NUM_THREADS=2, or *"]),
    ({"ranks": [rank(0, quota=1.0)], "pairs": []}, ["wrong: here: 4 threads of torch on 1 *"]),
    (on_one(5), ["note: ranks 0-4 on n: 5 ranks on 4 cores -> fewer ranks*"]),
    (BOUND, ["wrong: ranks 0 and 1 are bound to the same 1 of 4 cores -> *--bind-to"]),
    (limits(torch=100), ["wrong: torch gives up after 100 s, before gradcomp after 300 s: *"]),
    (limits(torch=1800), ["note: gradcomp gives a peer up after 300 s, torch's own * 1800 s -> *"]),
    (limits(torch=None), []),
    (limits(apart=45), ["wrong: the ranks came 45 s apart, and wait 60 s * -> *_S=180, *"]),
    (limits(ours=1800, torch=1800), ["note: a peer that falls silent * up after 1800 s -> *"]),
    (limits(job=100), ["note: the job ends in 100 s, before a silent peer *"]),
    (limits(ours=0.15, torch=0.15), ["wrong: a step computes for 0.1 s, * -> timeout_s=1 in *"]),
    (limits(problem="a bad value"), ["wrong: a bad value -> unset GRADCOMP_SETUP_TIMEOUT_S"]),
    (probe(error="", seconds=1), [NOT_NOTICED.format("no error after 1.0")]),
    (probe(error="OSError", seconds=1), [NOT_NOTICED.format("OSError after 1.0")]),
    (probe(error="PeerLost", seconds=60), [NOT_NOTICED.format("PeerLost after 60.0")]),
    (
        {"lost_peer": {"seen": {"0": {"failed": "ConnectionError: refused"}}}},
        ["wrong: the probe did not come to its end on rank 0: ConnectionError: refused -> *"],
    ),
]


@pytest.mark.parametrize(("more", "expected"), FINDINGS)
def test_findings(more, expected, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    found = example(**{"ranks": more} if isinstance(more, list) else more)["findings"]
    found = [f"{f['level']}: {f['text']} -> {f['do']}" for f in found]
    assert len(found) == len(expected) and all(map(fnmatch.fnmatchcase, found, expected)), found


def test_timeouts_here(monkeypatch):
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", "30")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100))
    found = card.timeouts("gloo", None, None, 1.0)
    assert (found["setup_s"], found["gradcomp_s"], found["torch_s"]) == (30, 1800, 1800)
    assert 90 < found["job_s"] <= 100 and found["order"].startswith("setup 30 s, gradcomp 1800 s,")
    over_mpi = card.timeouts("mpi", None, None, 0)
    assert (over_mpi["gradcomp_s"], over_mpi["torch_s"]) == (300, None)
    assert card.timeouts("gloo", 20, 40, 0)["setup_s"] == 20
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", "soon")
    assert "must be a number of seconds" in card.timeouts("gloo", None, None, 0)["setup_problem"]


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
def test_what_gloo_takes(variable, names, problem, monkeypatch):
    down = ethernet("eth1", None, "10.0.1.1", up=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", variable)
    found = gloo_takes([LO, ETH, down, ethernet("eth2", None)])
    assert found.names == names and problem in found.problem
    assert bool(problem) == bool(found.problem)


@pytest.mark.parametrize(
    ("addresses", "name"),
    [
        (["10.0.0.1"], "eth0"),
        (["127.0.1.1"], "lo"),
        (["10.9.9.9"], "lo"),
        ([], "lo"),
        (["10.9.9.9", "10.0.0.1"], "eth0"),
    ],
)
def test_without_the_variable_gloo_goes_by_the_host_name(addresses, name, monkeypatch):
    monkeypatch.setattr("gradcomp.doctor.interfaces._resolve", lambda host: addresses)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert gloo_takes([LO, ETH]).names == (name,)


def test_interfaces_of_this_machine():
    found = {one.name: one for one in interfaces()}
    assert found["lo"].kind == "loopback" and not found["lo"].carries
    assert set(found) == {name for _, name in socket.if_nameindex()}


def test_quota_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "CGROUP", tmp_path)
    assert card.cpu_quota() is None
    for limit, cores in (("max 100000", None), ("150000 100000", 1.5)):
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert card.cpu_quota() == cores


def test_who_takes_part_in_a_probe():
    assert session.members_of(["a", "a"]) == [0, 1]
    assert session.members_of(["a"] * 8) == [0, 1, 2]
    assert session.members_of(["a", "a", "b", "b"]) == [0, 2]
    assert session.members_of(["a", "b", "c", "d"]) == [0, 1, 2]


# ---- accelerators


@each_rank(1, "lazy")
def test_an_accelerator_is_named_and_its_copies_are_measured():
    found = accelerator.accelerator(3)
    assert (found["device"], found["name"]) == ("lazy:1", "device for tests")
    assert found.keys() == DEVICE.keys() and found["driver"] == accelerator.driver()
    assert min(found["to_host_bytes_per_s"], found["to_device_bytes_per_s"]) > 1e6
    assert (found["encodes_on"], found["self_check"], found["failed"]) == ("host", "not run", "")
    try:
        before = kernels.install("lazy", HostedKernels)
        found = accelerator.accelerator(0)
        assert (found["encodes_on"], found["self_check"]) == ("device", "passed")
        kernels.install("lazy", lambda device: check.checked(device, NativeKernels))
        found = accelerator.accelerator(0)
        assert found["encodes_on"] == "host" and "NativeKernels" in found["refused"]
        assert found["self_check"] == (
            "not run" if "not installed" in found["triton"] else "failed"
        )
        full = mock.Mock(side_effect=torch.OutOfMemoryError("no memory left\nand more"))
        with mock.patch.object(accelerator, "copying", full):
            assert accelerator.accelerator(0)["failed"] == "no memory left"
    finally:
        kernels.install("lazy", before)
        check.refusals.clear()


@each_rank(1, "lazy")
def test_rates_of_the_report_are_those_of_its_accelerator():
    """And the planner takes them."""
    cards = [card.card(number, agreed(parse([])), None) for number in range(2)]
    me, seen = (
        session.Me(0, 2, "gloo"),
        {0: {"pairs": [pair(0, 1, 1e9)], "probe": {}, "failed": ""}},
    )
    found = session._conclude(cards, parse(["--seconds", "60"]), me, time.monotonic(), seen, 0.0)
    assert found["recommendation"]["rates_measured"]
    assert min(one["per_value_s"] for one in found["rates"][COPIES].values()) > 0
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "doctor.json")).write_text(json.dumps(found))
        plans = ["--model", "lenet", "--nodes", "2,4", "--every", "30", "--rates", str(file)]
        assert cli.main([*plans, "--optimizer", "adamw", "--json", str(Path(folder, "out"))]) == 0
        planned = json.loads(Path(folder, "out").read_text())
    assert planned["rates"] == found["rates"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023\n",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release\nGCC 12",
            "570.86.15",
        ),
        ("something else\n", ""),
        (None, ""),
    ],
)
def test_the_driver_is_named(text, version, tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "DRIVER", tmp_path / "version")
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert accelerator.driver() == version


def test_without_an_accelerator_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert accelerator.accelerator(0) is None and card.card(0, {}, None)["accelerator"] is None


# ---- the recommendation


INSIDE = [pair(0, 1, 8e9), pair(2, 3, 8e9)]
# in round 1 each node has 9e8 bit/s, in round 2 4e8
BETWEEN = [pair(0, 2, 5e8, number=1), pair(1, 3, 4e8, number=1)]
BETWEEN += [pair(0, 3, 2e8, number=2), pair(1, 2, 2e8, number=2)]
SLOWEST = [pair(0, 1, 1e9), pair(0, 2, 1e8, number=1), pair(1, 2, 2e8, number=2)]


@pytest.mark.parametrize(
    ("hosts", "some", "rate", "node", "nodes"),
    [
        ("aabb", [*INSIDE, *BETWEEN], 9e8, Node(2, Link(8e9, 1e-4)), 2),
        ("aa", [pair(0, 1, 8e9)], 8e9, Node(), 2),
        # hosts that are not alike
        ("aab", [pair(0, 1, 8e9), pair(0, 2, 1e9), pair(1, 2, 1e9)], 1e9, Node(), 3),
        ("abc", SLOWEST, 2e8, Node(), 3),  # of the slowest node, at its best
    ],
)
def test_the_link_of_a_node_is_what_its_ranks_have_together(hosts, some, rate, node, nodes):
    link, *rest = advise.link_of(list(hosts), some)
    assert (link.bits_per_s, rest) == (rate, [node, nodes])


def test_there_is_no_link_if_nothing_was_measured():
    assert advise.link_of(["a", "b"], [pair(0, 1, 0, failed="refused")]) is None


def recommend(*words, rate=1e8, latency_s=1e-4, left_s=0.0):
    options = vars(parse(list(words)))
    return advise.recommend(Link(rate, latency_s), Node(), 2, options, 2.0, left_s)[0]


SGD = 'ddp.register(model, EntropyCoded(1.25), exchange="all_gather", optimizer=optimizer)'
ENTROPY = f"{SGD.removesuffix(')')}, precondition=True)"


@pytest.mark.parametrize(
    ("words", "rate", "method", "code"),
    [
        ([], 1e8, "entropy:bits=1.25 all_gather", ENTROPY),
        (["--parameters", "1e5"], 1e11, "fp32", ""),
        (["--optimizer", "sgd"], 1e8, "entropy:bits=1.25 all_gather", SGD),
        (["--every", "30", "--tolerance", "0.04"], 1e10, "every 30", "sync_every=30"),
    ],
)
def test_the_planner_recommends(words, rate, method, code):
    found = recommend(*words, rate=rate, latency_s=2.0 if "--every" in words else 1e-4)
    assert method in found["method"] and code in advise.in_code(found, "gloo")
    assert not found["rates_measured"] and (found["speedup"] > 1.05) == bool(code)
    json.dumps(found)


def test_bf16_over_mpi_is_not_the_hook_of_torch():
    found = recommend() | {"method": "bf16", "codec": None}
    assert advise.in_code(found, "gloo").endswith("bf16_compress_hook)")
    assert 'register(model, "bf16"' in (line := advise.in_code(found, "mpi"))
    assert "comm=MpiCommunicator()" in line


def test_steps_of_a_large_model_are_extrapolated(monkeypatch):
    """Minutes of CPU for whole ones were more than the doctor's limit for a rank that is stuck."""
    lengths, schedule, ways = [], Setting.schedule, advise.ways

    def recorded(self, slices, *args):
        lengths.append(len(slices))
        return schedule(self, slices, *args)

    monkeypatch.setattr(Setting, "schedule", recorded)
    monkeypatch.setattr(advise, "ways", lambda node: [next(m for m in ways(node) if m.compresses)])
    assert recommend("--parameters", "7e10")["step_s"] > 100
    assert 0 < max(lengths) < 7e10 / 25e6 / 2  # buckets of at most 25 MB


def test_codecs_are_measured_where_there_is_time():
    assert recommend("--parameters", "1e6", left_s=10.0)["rates_measured"]


# ---- the report


def plain(found):
    out = io.StringIO()
    report.show(found, out)
    return out.getvalue()


MANY = [pair(i, j, 1e9 + i) for i in range(9) for j in range(i + 1, 9)]
REPORTED = """
accelerator   NVIDIA H200 (cuda:0), driver 570.86.15, torch for CUDA 12.8, Triton 3.9.0; gradients \
are copied to the host and encoded there
              rank 0: copies of 25 MiB: 52 GB/s to the host, 54 GB/s to the accelerator
              rank 1: copies of 25 MiB: 52 GB/s to the host"""
LATE = {"pairs_not_measured": 5, "seconds": 12.5}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, "ranks 0 and 1: 100 us, 1 Gbit/s, both ways at once 500 Mbit/s each"),
        ({}, "rank 1 fell silent: PeerLost on the others after 1.0 s, with a timeout of 1 s"),
        ({}, "without a measured link: what is wrong above comes first"),
        ({"recommendation": recommend(rate=1e9)}, "exchange="),
        ({}, "\naccelerator   none\nnetwork "),
        (
            {"ranks": both(accelerator=DEVICE)},
            REPORTED,
        ),
        ({"ranks": both(accelerator=ENCODES)}, "by its own kernels, which passed the self-check\n"),
        (
            {"ranks": [rank(0, accelerator=LOST_DEVICE)], "pairs": []},
            "torch for CUDA 12.8: cannot be used\n              wrong: rank 0: NVIDIA H200 (",
        ),
        ({"pairs": [pair(0, 1, 9e7)]}, " Gbit/s\n                -> something between the hosts"),
        (limits(torch=100), "1 thing wrong, 0 notes; 3.0 s."),
        ({"pairs": MANY, "ranks": [rank(k) for k in range(9)]}, "36 pairs: 1 Gbit/s to"),
        ({"lost_peer": {"seen": {}, "skipped": "no time", "lost": None}}, "not tried: no time"),
        (LATE, "5 pairs were not measured: the time ran out"),
        (LATE, "12.5 s, longer than the 10 s of --seconds"),
    ],
)
def test_the_report(more, says):
    assert says in plain(example(**more))


def test_colours_of_the_report():
    found, terminal = example(**limits(torch=100)), io.StringIO()
    terminal.isatty = lambda: True
    report.show(found, terminal)
    assert "\x1b[1;31mwrong: torch gives up after 100 s" in terminal.getvalue()
    assert re.sub(r"\x1b\[[\d;]+m", "", terminal.getvalue()) == plain(found)
    terminal.seek(0)
    report.show(found, terminal, plain=True)
    assert terminal.getvalue().startswith(plain(found))


def test_entries_of_both_ends_are_one():
    merged = session._merged(
        [pair(0, 1, 0, failed="rank 0: late"), pair(0, 1, 1e9), pair(1, 2, 1e9), pair(1, 2, 1e9)]
    )
    assert [(p["ranks"], p["failed"]) for p in merged] == [((0, 1), ""), ((1, 2), "")]


@pytest.mark.parametrize("host", ["a..b", "x" * 70])
def test_a_name_that_cannot_be_one_ends_the_look_up(host, monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    seconds, deadline = card.start_lookup(host), time.monotonic() + 60
    while seconds() != seconds() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not failed and seconds() == seconds()
