"""Which rank is lost: processes that work, are busy, stopped, ended, or cannot be reached."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import _forks
import pytest

from gradcomp.comm import peers
from gradcomp.comm.base import CLOSED

CHILD = """
import sys, time
from gradcomp.comm.peers import here
print(here(True).decode(), flush=True)
while sys.argv[1:]:  # never lets another thread run
    pass
time.sleep(600)
"""


@pytest.fixture
def start():
    """Return start(*words), which starts a process and returns it and what it tells its peers."""
    started = []

    def start(*words):
        started.append(_forks.Program("-c", CHILD, *words))
        return started[-1], started[-1].stdout.readline().encode()

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_the_security_page_says_how_many_connections_wait():
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text(encoding="utf-8")
    assert f"At most {peers.BACKLOG:,} connections wait" in page


def stop(process):
    process.send_signal(signal.SIGSTOP)
    while _forks.state_of(process.pid) != "T":
        time.sleep(0.005)


def test_the_lost_rank_is_named(start):
    mine = peers.here(True)
    (_, busy), (stopped, second), (ended, third) = start("busy"), start(), start()
    everyone = [mine, busy, second, third]
    assert peers.find_lost(everyone, 0) is None
    ended.kill()
    ended.wait()
    text = f"(pid {ended.pid} on {os.uname().nodename}) has ended: killed, out of memory, or by"
    assert peers.find_lost(everyone, 0) == (3, f"{text} itself; read its output")
    assert peers.find_lost([third, *everyone[:3]], 1)[0] == 0, "whichever rank it is"
    stop(stopped)  # rank 3 may have given up because of it
    rank, what = peers.find_lost(everyone, 0)
    assert rank == 2 and what.endswith("is stopped (SIGSTOP, or a debugger)")
    stopped.send_signal(signal.SIGCONT)


def test_no_rank_is_named_where_several_may_be(start):
    pairs = [start(), start()]
    for process, _ in pairs:
        process.kill()
        process.wait()
    assert peers.find_lost([peers.here(True), *(card for _, card in pairs)], 0) is None


@pytest.fixture
def nobody():
    """Return an address whose host does not answer, as one without power: a socket that has more
    connections waiting than it takes.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        time.sleep(0.1)
        yield server.getsockname()


def test_a_host_that_does_not_answer(nobody, monkeypatch):
    monkeypatch.setattr(peers, "PATIENCE_S", 0.3)
    away = json.dumps([nobody, 7, "away", "elsewhere"]).encode()
    begun = time.monotonic()
    found = peers.find_lost([peers.here(True), away, peers.here(True)], 0)
    assert found == (1, "(pid 7 on away) cannot be reached") and time.monotonic() - begun < 10
    assert peers.find_lost([peers.here(True), away, away], 0) is None, "it may be this host"


def test_without_file_descriptors_nobody_is_named(start):
    (ended, card), mine = start(), peers.here(True)
    ended.kill()
    ended.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        assert peers.find_lost([mine, card], 0) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert peers.find_lost([mine, card], 0)[0] == 1


def test_a_process_that_many_peers_have_looked_at_can_still_be_reached(monkeypatch):
    """A rank that waited at a full queue of looks was said to be unreachable."""
    own = peers._listens(socket.create_server(("127.0.0.1", 0), backlog=1))
    monkeypatch.setattr(peers, "_socket", lambda one_host: own)
    card = peers.here(True)
    for _ in range(8):
        assert peers.find_lost([card, card], 0) is None
    own.close()


def test_a_communicator_that_is_closed_is_named_and_not_one_of_several():
    first, second = (peers.make_socket(True) for _ in range(2))
    everyone = [peers.here(True), peers.here(True, first), peers.here(True, second)]
    assert peers.find_lost(everyone, 0) is None
    second.close()
    rank, what = peers.find_lost(everyone, 0)
    assert rank == 2 and what == f"(pid {os.getpid()} on {os.uname().nodename}) {CLOSED}"
    first.close()
    assert peers.find_lost(everyone, 0) is None


def test_a_fork_does_not_keep_a_communicator_open():
    own = peers.make_socket(True)
    card = peers.here(True, own)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"forked")
        time.sleep(30)
        os._exit(0)
    try:
        os.read(reads, 6)
        own.close()
        assert peers.find_lost([peers.here(True), card], 0)[0] == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_without_an_address_is_not_named():
    card = json.dumps([None, 2**22 + 1, "host", peers._identity()]).encode()
    assert peers.find_lost([peers.here(True), card], 0) is None


def test_a_fork_does_not_answer_for_its_parent():
    """Workers of a DataLoader may outlive a rank that was killed."""
    forks = CHILD.replace("time.sleep(600)", "import os; os.fork() or input()")
    command = [sys.executable, "-c", forks]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        card = parent.stdout.readline()
        parent.kill()
        parent.wait()
        assert peers.find_lost([peers.here(True), card], 0)[0] == 1
        # the child ends with its input
