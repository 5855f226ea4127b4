"""Every fault in every phase of a step, over every transport: each survivor ends by PeerLost, or in
a save that failed by OSError, soon, and it names the rank that was lost and no survivor.

docs/explanation/reliability.md says what comes of it. With GRADCOMP_FAULTS=FILE in the environment
each cell that passes adds what survivors said to FILE, from which docs/figures.py makes that page's
table.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import time

import pytest
from _cells import CLOSES, CLOSING, FAULTS, GATHER, PLACES, SERVED
from _ranks import mpi_environment, mpi_python, output_of
from gradcomp.launch.ports import free_port
from test_faults import HERE, TIMEOUT_S, started

from gradcomp.bench import hosts
from gradcomp.plan.links import Link

LONG = pytest.mark.long
pytestmark = pytest.mark.slow
WORLD, LAST = 3, 2
CELLS = [(phase, fault) for phase in PLACES for fault in FAULTS]
CELLS += [(phase, CLOSES) for phase in CLOSING]
OVER_MPI = [cell for cell in CELLS if cell[0] != GATHER]
# cells of CI; `make test-long` has the others
SHORT = {
    ("decode", "frozen"),
    ("optimizer", "raises"),
    ("checkpoint", "killed"),
    ("outer step", "exits"),
    (GATHER, "frozen"),
}
# what survivors say of the last rank
RANK_2 = r"rank 2 \(pid \d+ on \S+\) "
SAID = {
    "killed": f"{RANK_2}has ended",
    "frozen": f"{RANK_2}is stopped",
    "raises": f"{RANK_2}(gave up because of LookupError: no more data|{{ended}})|{{unsaved}}",
    "exits": f"{RANK_2}(gave up because of SystemExit|{{ended}})",
    "interrupted": f"{RANK_2}(gave up because of KeyboardInterrupt|{{ended}})",
    "out of memory": rf"{RANK_2}(gave up because of \w+Error.*memory|{{ended}})|{{unsaved}}",
    CLOSES: f"{RANK_2}closed its communicator",
}
SAID_OF_SERVER = dict.fromkeys(SAID, "server rank 2 is gone") | {
    "frozen": "server rank 2 is silent"
}
SAID_OF_WORKER = dict.fromkeys(SAID, r"'x' cannot be completed: rank 2 is gone") | {
    "frozen": r"no push from ranks \[2\]",
    CLOSES: "'x' cannot be completed: rank 2 has closed its client",
}
BY_PHASE = {"server's round": SAID_OF_SERVER, "worker's push": SAID_OF_WORKER}


def look_at(phase, fault, out, errors):
    """Raise unless a survivor has said who was lost, soon; return the error's class and words."""
    found = re.search(r"(PeerLost|OSError) step=[34] seconds=([\d.]+) (.*)", out)
    assert found, out + errors
    kind, seconds, words = found.groups()
    assert float(seconds) < TIMEOUT_S + 5, out
    said = BY_PHASE.get(phase, SAID)[fault].replace("{ended}", "closed|has ended")
    said = said.replace("{unsaved}", r"ranks \[2\] could not write their files of step 3")
    assert re.search(said, words), words
    assert not re.search(r"rank [01] (?!waits)", words), words
    return f"{kind}: {words}"


def look_at_server(fault, out, errors):
    """Raise unless a server knows the worker that was lost, and no other one."""
    lost = {"frozen": r"no request from ranks \[2\]", CLOSES: r"served, lost \[\]"}
    assert re.search(lost.get(fault, r"served, lost \[2\]"), out), out + errors


def record(transport, phase, fault, said):
    """Add what survivors said, without process ids, hosts and times, to the file of a run."""
    file = os.environ.get("GRADCOMP_FAULTS")
    if file:
        changing = r"lost a peer in .*? after [\d.]+ s: | \(pid \d+ on \S+\)"
        same = [re.sub(changing, "", one) for one in said]
        first = {re.split(r"[,;]|:? [\[(](?!\d)", one)[0][:80] for one in same}
        row = {"transport": transport, "phase": phase, "fault": fault, "said": sorted(first)}
        with open(file, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


@pytest.mark.parametrize(
    ("phase", "fault"),
    [
        pytest.param(phase, fault, marks=[LONG] * ((phase, fault) not in SHORT))
        for phase, fault in CELLS
    ],
)
def test_over_gloo(tmp_path, phase, fault):
    more, said = (phase, fault, TIMEOUT_S, tmp_path / "saved"), []
    with started("_cells.py", free_port(), WORLD, *more, world=WORLD) as ranks:
        for rank in range(LAST):
            try:
                out, errors = ranks[rank].communicate(timeout=60)
            except subprocess.TimeoutExpired:
                pytest.fail(f"rank {rank} hangs")
            if SERVED.get(phase) == rank:
                look_at_server(fault, out, errors)
                assert ranks[rank].returncode == (fault == "frozen"), errors
                continue
            said.append(look_at(phase, fault, out, errors))
            assert ranks[rank].returncode == 1, errors
    record("gloo", phase, fault, said)


FIRST = r"gradcomp\.launch: rank 2 \(pid \d+ on \S+\) failed first: "
# what the launcher says at the end; over MPI it ends the survivors of a rank that has ended
LAST_LINE = {
    "killed": "killed by signal 9",
    "raises": "exit status 1",
    "exits": "exit status [13]",
    "interrupted": "(exit status (130|1)|killed by signal 2)",
    "out of memory": "exit status 1",
}


@LONG
@pytest.mark.every_row
@pytest.mark.parametrize("flavour", ["mpich", "openmpi"])
@pytest.mark.parametrize(("phase", "fault"), OVER_MPI)
def test_over_mpi(tmp_path, phase, fault, flavour):
    command = [mpi_python(flavour), "-m", "gradcomp.launch", "-n", WORLD, "--grace", 20]
    program = [HERE / "_cells.py", free_port(), "mpi", WORLD, phase, fault, TIMEOUT_S]
    done = output_of(*command, *program, tmp_path / "saved", env=mpi_environment())
    assert done.returncode not in (0, 124), done
    line = done.stderr.strip().splitlines()[-1]
    last = fault in LAST_LINE and re.match(FIRST + LAST_LINE[fault], line)
    if last:
        record(flavour, phase, fault, [last[0].replace("gradcomp.launch", "launcher")])
        return  # in a checkpoint, where ranks meet over gloo, survivors may be the first to say it
    said = [line for line in done.stdout.splitlines() if line.startswith(("PeerLost", "OSError"))]
    woken = ": no answer from a peer|rank 1 has closed its client"  # what the one that woke says
    said = [line for line in said if not re.search(woken, line)]
    assert said, done
    record(flavour, phase, fault, [look_at(phase, fault, line, done.stderr) for line in said])


@contextlib.contextmanager
def on_hosts(count, link, *cell):
    """Yield hosts and a rank on each of them, when the last one waits for a change of its link."""
    with hosts.Hosts(count, link) as made, contextlib.ExitStack() as closing:
        environment = os.environ | {
            "STORE_HOST": made.address(0),
            "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
            "OMP_NUM_THREADS": "1",
        }
        ranks = []
        for rank in range(count):
            words = [HERE / "_cells.py", 29555, rank, count, *cell]
            words = [*made.command(rank), sys.executable, *words]
            ranks.append(
                subprocess.Popen(
                    [str(word) for word in words],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            closing.callback(ranks[-1].kill)
        assert ranks[-1].stdout.readline() == "cut\n"
        yield made, ranks


@LONG
@pytest.mark.parametrize("phase", ["forward", "encode", "reduce", "decode", "outer step"])
def test_a_host_whose_link_is_cut(tmp_path, phase):
    """The last of three hosts: it hears of it, too, but not of whom."""
    cell = phase, "cut off", TIMEOUT_S, tmp_path / "saved"
    said = []
    with on_hosts(WORLD, Link(math.inf), *cell) as (three, ranks):
        name = three.namespace(LAST)
        subprocess.run(["ip", "-n", name, "link", "set", hosts.INTERFACE, "down"], check=True)
        for rank in (0, 1):
            out, errors = ranks[rank].communicate(timeout=60)
            found = re.search(r"PeerLost step=[34] seconds=([\d.]+) (.*)", out)
            assert found and float(found[1]) < 2 + TIMEOUT_S + 5, out + errors
            assert re.search(r"rank 2 \(pid \d+ on \S+\) cannot be reached", found[2]), found[2]
            assert ranks[rank].returncode == 1
            said.append(f"PeerLost: {found[2]}")
        out, errors = ranks[LAST].communicate(timeout=60)
        assert "PeerLost" in out, out + errors
    record("gloo", phase, "cut off", said)


def test_the_page_has_every_cell():
    page = HERE.parents[2] / "docs/explanation/reliability.md"
    text = " ".join(page.read_text(encoding="utf-8").split())
    gloo, mpi = len(CELLS), 2 * len(OVER_MPI)
    assert f"({gloo} cells over gloo, {mpi} over MPICH and Open MPI," in text
    assert all(phase in text for phase in PLACES)


@LONG
@pytest.mark.parametrize("phase", ["forward", "reduce", "outer step"])
def test_a_link_that_slows_down_to_a_hundredth_slows_training_down(tmp_path, phase):
    """Every message arrives in time, so nothing is said to be lost."""
    with on_hosts(WORLD, Link(4e6), phase, "cut off", 60, tmp_path / "saved") as (three, ranks):
        counter = f"/sys/class/net/{hosts.INTERFACE}/statistics/tx_bytes"
        sent = [*three.command(LAST), "cat", counter]
        before, begun = int(output_of(*sent).stdout), time.monotonic()
        slow = (
            f"tc -n {three.namespace(LAST)} qdisc change dev {hosts.INTERFACE} root handle 1: tbf"
        )
        subprocess.run(f"{slow} rate 40kbit burst 2kb latency 5s".split(), check=True)
        for rank in ranks:
            out, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0 and out.endswith("finished\n"), out + errors
        seconds = 8 * (int(output_of(*sent).stdout) - before) / 40e3
        assert time.monotonic() - begun > 0.8 * seconds > 2, seconds
    record("gloo", phase, "slow link", ["training goes on"])
