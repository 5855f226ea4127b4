"""Meetings and notes of ranks in a store."""

import contextlib
import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from _forks import python
from _ranks import run_local
from gradcomp.launch.ports import free_port

from gradcomp.comm.gloo import Groups
from gradcomp.comm.store import Notes, meet, setup_timeout_s
from gradcomp.errors import PeerLost


def at_once(*functions):
    """Call every function in a thread of its own; return what they returned or raised."""

    def call(comm):
        try:
            return functions[comm.rank]()
        except Exception as error:
            return error

    return run_local(len(functions), call, timeout_s=30)


def test_a_meeting_gives_everyone_the_records_and_leaves_nothing_behind():
    """So the ranks of a process group that is made again over the same store do not find answers
    of before.
    """
    store = dist.HashStore()
    for records in ([b"0", b"1", b"2"], [b"3", b"4", b"5"]):
        ranks = [
            lambda r=r, mine=mine: meet(store, r, range(3), mine, 20, "")
            for r, mine in enumerate(records)
        ]
        assert at_once(*ranks) == [records] * 3
    assert store.num_keys() == 0


def test_a_meeting_names_who_is_missing_and_who_comes_later_fails_at_once():
    store = dist.HashStore()

    def first_to_give_up():
        while not store.check(["rank2"]):
            time.sleep(0.001)
        return meet(store, 0, range(4), b"", 0.2, "called register")

    waiting = at_once(
        first_to_give_up, lambda: meet(store, 2, range(4), b"", 20, "called register")
    )
    for error in waiting:
        assert isinstance(error, PeerLost) and error.phase == "setup"
        assert error.detail == "ranks 1, 3 have not called register"
    begun = time.monotonic()
    (late,) = at_once(lambda: meet(store, 3, range(4), b"", 20, "called register"))
    assert isinstance(late, PeerLost) and "rank 1 has not called register" in str(late)
    (last,) = at_once(lambda: meet(store, 1, range(4), b"", 20, "called register"))
    assert isinstance(last, PeerLost) and "gave up waiting before this rank came" in str(last)
    assert time.monotonic() - begun < 15


def test_a_store_that_does_not_answer_is_a_lost_peer():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer\nat TCPStore.cpp")

    with pytest.raises(
        PeerLost, match="store does not answer: .*; read its output .Connection reset by peer.$"
    ):
        meet(Gone(), 0, range(2), b"", 1, "come")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(None, (60, 5)), ("600", (600, 5)), *((bad, None) for bad in ("0", "-1", "soon", "nan"))],
)
def test_the_setup_timeout_is_a_positive_number_and_bounded(text, wanted, monkeypatch):
    monkeypatch.delenv("GRADCOMP_SETUP_TIMEOUT_S", raising=False)
    if text is not None:
        monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", text)
    if wanted is None:
        with pytest.raises(ValueError, match=f"GRADCOMP_SETUP_TIMEOUT_S.*{text}"):
            setup_timeout_s(300)
    else:
        assert (setup_timeout_s(1800), setup_timeout_s(5)) == wanted


def test_the_first_note_stays():
    store = dist.HashStore()
    notes = [Notes(store, rank, range(3)) for rank in range(3)]
    assert notes[0].look(5) is None
    notes[1].give_up("out of memory")
    notes[2].give_up("lost rank 1")
    what = f"(pid {os.getpid()} on {os.uname().nodename}) gave up because of out of memory"
    assert notes[0].look(5) == (1, what) == notes[2].look(5)
    assert notes[1].look(5) is None


@contextlib.contextmanager
def waiting(*notes):
    """Context manager in which ranks wait: they look for notes again and again."""
    ended = threading.Event()

    def wait(one):
        while not ended.wait(0.1):
            one.look(1)

    with ThreadPoolExecutor(len(notes)) as threads:
        for one in notes:
            threads.submit(wait, one)
        yield
        ended.set()


@pytest.mark.parametrize(
    ("waits", "found"),
    [
        ([1, 2], 3),  # frozen, stuck or computing
        ([1, 2, 3], None),  # ranks wait for each other
        ([1], None),  # it may be 2 or 3
    ],
)
def test_the_only_rank_that_does_not_wait_is_found(waits, found, monkeypatch):
    """Notes of waiting do not tell: rank 3 left one before it was frozen, rank 1 none yet."""
    monkeypatch.setattr("gradcomp.comm.store.ANSWER_S", 3.0)
    store = dist.HashStore()
    notes = [Notes(store, rank, range(4)) for rank in range(4)]
    notes[3].wait_for("first_phase of bucket 0")
    with waiting(*(notes[rank] for rank in waits)):
        assert notes[0].find_silent(lambda: None) == found


def test_a_rank_on_which_others_gave_up_hears_of_it_and_is_not_called_lost():
    store = dist.HashStore()
    notes = [Notes(store, rank, range(3)) for rank in range(3)]
    notes[0].blame(2, "did not answer")
    assert notes[1].look(5) == (2, "did not answer")
    assert notes[2].look(5) == (None, "other ranks gave up on this one: rank 2 did not answer")


@pytest.mark.parametrize("same", [True, False])
def test_a_rank_that_gave_up_because_of_a_peer_is_not_blamed_for_it(same):
    """Peers that wait for it, on these groups or on others of the job, raised with its number."""
    store, job = dist.HashStore(), threading.Event()  # an object with weak references
    first, second = (
        Groups(dist.PrefixStore(name, store), 1, range(3), 5, lambda: job, one_host=True)
        for name in "ab"
    )
    first.lose("nobody answers", (None, "nobody answers"))
    (first if same else second).give_up("PeerLost: nobody answers")
    rank, what = Notes(dist.PrefixStore("a" if same else "b", store), 0, range(3)).look(5)
    assert rank is None
    assert what == "nobody answers" if same else re.match(r"rank 1 \(pid .*: nobody answers", what)


def test_a_rank_ends_when_all_survivors_know_who_was_lost(monkeypatch):
    """The store may be in its process. Rank 2 was lost; it would not know."""
    monkeypatch.setattr("gradcomp.comm.store.WRITE_S", 1.0)
    monkeypatch.setattr("gradcomp.comm.store._informed", informed := [])

    def seconds(notes):
        begun = time.monotonic()
        notes.wait_until_known()
        return time.monotonic() - begun

    store = dist.HashStore()
    notes = [Notes(store, rank, range(3)) for rank in range(3)]
    notes[0].blame(2, "has ended")
    assert seconds(notes[0]) >= 1
    waits = threading.Thread(target=notes[0].wait_until_known)
    waits.start()
    assert notes[1].look(5) == (2, "has ended")
    waits.join(10)
    assert not waits.is_alive() and seconds(notes[1]) < 1
    assert informed == notes[:2]
    gone = [Notes(store, rank, range(2)) for rank in range(2)]
    gone[1].close()  # at the end of a program: nobody waits
    assert informed == notes[:2]


def test_a_probe_does_not_blame_a_rank_that_gave_up_because_of_another(monkeypatch):
    """It had not, when this rank looked for notes, but has ended when it probes."""
    store = dist.HashStore()
    one, other = (Groups(store, rank, range(3), 5, lambda: None, one_host=True) for rank in (0, 1))
    monkeypatch.setattr("gradcomp.comm.gloo.find_lost", lambda cards, rank: (0, "has ended"))
    assert other.notes.look_for_cause(5) is None
    one.notes.blame(2, "is stopped")
    lost = other.find_lost(other.notes.look_for_cause)
    assert (lost.rank, "is stopped" in str(lost)) == (2, True)


def test_a_store_that_blocks_holds_nobody_up():
    class Blocked:
        calls = 0

        def check(self, keys):
            Blocked.calls += 1
            answers.wait(60)

        def add(self, key, value):
            raise RuntimeError("gone")

    notes, answers = Notes(Blocked(), 0, range(3)), threading.Event()
    begun = time.monotonic()
    assert notes.look(0.05) is None and notes.look(0.05) is None
    notes.give_up("anything")
    assert time.monotonic() - begun < 20
    assert Blocked.calls == 1
    answers.set()


LEAVES = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from gradcomp import PeerMismatch
from gradcomp.comm import TorchCommunicator

rank = int(sys.argv[1])
store = dist.TCPStore(
    "127.0.0.1", int(sys.argv[2]), None, rank == 0, timedelta(seconds=60), wait_for_workers=False
)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
if rank == 0:
    time.sleep(1)  # the other one waits, and looks every 50 ms
try:
    TorchCommunicator(timeout_s=20 + rank)
except PeerMismatch as error:
    print(error.field, error.rank, error.expected, error.got, flush=True)
os._exit(0)  # with the store
"""


@pytest.mark.slow
def test_a_mismatch_is_read_before_the_store_goes():
    """The rank that hosts the store left with it as soon as it knew: PeerLost on the other one."""
    command = [*python(), "-c", LEAVES]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*command, rank, port], stdout=subprocess.PIPE, text=True) for rank in "01"
    ]
    assert [process.communicate(timeout=90)[0] for process in ranks] == [
        "timeout_s 1 20.0 21.0\n"
    ] * 2
