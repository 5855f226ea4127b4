"""Who may use which channel when; and whether the ranks of a communicator are those that were meant."""

import threading
import time

import pytest
import torch.distributed as dist
from _ranks import run_local

from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.comm.meeting import Notes, meet, setup_timeout_s
from gradcomp.comm.torchdist import same_ranks
from gradcomp.errors import PeerLost


def at_once(*functions):
    """Call every function in a thread of its own; return what they returned or raised."""
    results = [None] * len(functions)

    def work(number, function):
        try:
            results[number] = function()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


# ---- meetings --------------------------------------------------------------------------------------------------------


def test_a_meeting_gives_everyone_the_records_in_rank_order():
    store = dist.HashStore()
    found = at_once(*(lambda r=r: meet(store, r, 3, b"%d" % r, 20, "come") for r in range(3)))
    assert found == [[b"0", b"1", b"2"]] * 3


def test_a_meeting_names_who_is_missing_and_who_comes_later_fails_at_once():
    store = dist.HashStore()
    waiting = at_once(*(lambda r=r: meet(store, r, 4, b"", 0.2, "called register") for r in (0, 2)))
    for error in waiting:
        assert isinstance(error, PeerLost) and error.phase == "setup"
        assert error.detail == "ranks 1, 3 have not called register"
    begun = time.monotonic()
    (late,) = at_once(lambda: meet(store, 3, 4, b"", 20, "called register"))
    assert isinstance(late, PeerLost) and "rank 1 has not called register" in str(late)
    (last,) = at_once(lambda: meet(store, 1, 4, b"", 20, "called register"))
    assert isinstance(last, PeerLost) and "gave up waiting before this rank came" in str(last)
    assert time.monotonic() - begun < 5


def test_a_store_that_does_not_answer_is_a_lost_peer():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer\nat TCPStore.cpp")

    with pytest.raises(PeerLost, match="store does not answer: Connection reset by peer$"):
        meet(Gone(), 0, 2, b"", 1, "come")


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan"])
def test_the_setup_timeout_is_a_positive_number(text, monkeypatch):
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", text)
    with pytest.raises(ValueError, match=f"GRADCOMP_SETUP_TIMEOUT_S.*{text}"):
        setup_timeout_s(300)


def test_the_setup_timeout_is_bounded(monkeypatch):
    monkeypatch.delenv("GRADCOMP_SETUP_TIMEOUT_S", raising=False)
    assert (setup_timeout_s(1800), setup_timeout_s(5)) == (60, 5)
    monkeypatch.setenv("GRADCOMP_SETUP_TIMEOUT_S", "600")
    assert (setup_timeout_s(1800), setup_timeout_s(5)) == (600, 5)


def test_the_first_note_stays():
    store = dist.HashStore()
    notes = [Notes(store, rank) for rank in range(3)]
    assert notes[0].look(5) is None
    notes[1].tell("out of memory")
    notes[2].tell("lost rank 1")
    assert notes[0].look(5) == (1, "out of memory") == notes[2].look(5)
    assert notes[1].look(5) is None


def test_a_store_that_blocks_holds_nobody_up():
    class Blocked:
        calls = 0

        def check(self, keys):
            Blocked.calls += 1
            time.sleep(1.0)

        def add(self, key, value):
            raise RuntimeError("gone")

    notes = Notes(Blocked(), 0)
    begun = time.monotonic()
    assert notes.look(0.05) is None and notes.look(0.05) is None
    notes.tell("anything")
    assert time.monotonic() - begun < 0.8
    assert Blocked.calls == 1


# ---- whose ranks -----------------------------------------------------------------------------------------------------


def compare(how):
    rank = dist.get_rank()
    if how == "alone":  # as an MpiCommunicator in a script that torchrun started
        comm = LocalCommunicator.group(1)[0]
    elif how == "one of them alone":
        comm = TorchCommunicator(timeout_s=20) if rank == 0 else LocalCommunicator.group(2)[1]
    elif how == "numbered otherwise":
        comm = TorchCommunicator(timeout_s=20)
        comm.rank = 1 - rank
    else:
        comm = TorchCommunicator(timeout_s=20)
        if how == "of another job":
            comm.members = ()
            comm.kept["identity"] = bytes([rank]) * 16
        elif how == "in other clothes":
            comm.members = ()
    try:
        same_ranks(comm, timeout_s=0.5 if how == "one of them alone" else 20)
    except (ValueError, PeerLost) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("alone", "rank 0 of 2 of the process group is rank 0 of 1 of the communicator (here a LocalCommunicator)"),
        ("numbered otherwise", "rank 0 of 2 of the process group is rank 1 of 2"),
        ("of another job", "has ranks that the process group does not have"),
        ("the same", None),
        ("in other clothes", None),
    ],
)
def test_the_ranks_of_a_communicator_are_those_of_the_process_group(how, wanted, gloo):
    for found in gloo(2, compare, how):
        if wanted is None:
            assert found is None
        else:
            assert found[0] == "ValueError" and wanted in found[1]


def test_the_ranks_of_a_communicator_have_one_identity():
    def draw(comm):
        return [comm.identity(20) for _ in range(2)]

    first, second = run_local(3, draw), run_local(3, draw)
    assert len({one for found in first for one in found}) == 1
    assert first[0] != second[0]


def control(comm):
    return comm.all_gather_bytes(b"%d" % comm.rank, 20)


def test_control_has_a_channel_of_its_own(over):
    assert over(2, control) == [[b"0", b"1"]] * 2
