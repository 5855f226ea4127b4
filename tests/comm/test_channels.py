"""Who may use which channel when; and whether the ranks of a communicator are those that were
meant.
"""

import gc
import logging
import resource
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _held import descriptors, settled, steady
from _ranks import run_local
from gradcomp.launch.ports import free_port

import gradcomp
from gradcomp.comm import Channel, LinkCommunicator, LocalCommunicator, TorchCommunicator, torchdist
from gradcomp.comm.base import RankGone
from gradcomp.comm.gloo import _GlooWork
from gradcomp.comm.meeting import Notes, meet, setup_timeout_s
from gradcomp.comm.torch_private import group_timeout_s
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

    threads = [
        threading.Thread(target=work, args=item, daemon=True) for item in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


# ---- meetings ------------------------------------------------------------------------------------


def test_a_meeting_gives_everyone_the_records_in_rank_order():
    store = dist.HashStore()
    found = at_once(*(lambda r=r: meet(store, r, 3, b"%d" % r, 20, "come") for r in range(3)))
    assert found == [[b"0", b"1", b"2"]] * 3


def test_a_meeting_leaves_nothing_behind():
    """So the ranks of a process group that is made again over the same store do not find answers
    of before.
    """
    store = dist.HashStore()
    for word in (b"first", b"second"):
        assert (
            at_once(*(lambda r=r, word=word: meet(store, r, 2, word, 20, "come") for r in range(2)))
            == [[word] * 2] * 2
        )
    assert store.num_keys() == 0


def only_rank_0():
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost):
            TorchCommunicator(timeout_s=0.1)


def everyone():
    return TorchCommunicator(timeout_s=20).world_size


def test_a_rank_that_made_fewer_communicators_is_met_in_the_next_process_group(gloo):
    gloo(2, only_rank_0)
    assert gloo(2, everyone) == [2, 2]


def test_a_meeting_names_who_is_missing_and_who_comes_later_fails_at_once():
    store = dist.HashStore()

    def first_to_give_up():
        while not store.check(["rank2"]):
            time.sleep(0.001)
        return meet(store, 0, 4, b"", 0.2, "called register")

    waiting = at_once(first_to_give_up, lambda: meet(store, 2, 4, b"", 20, "called register"))
    for error in waiting:
        assert isinstance(error, PeerLost) and error.phase == "setup"
        assert error.detail == "ranks 1, 3 have not called register"
    begun = time.monotonic()
    (late,) = at_once(lambda: meet(store, 3, 4, b"", 20, "called register"))
    assert isinstance(late, PeerLost) and "rank 1 has not called register" in str(late)
    (last,) = at_once(lambda: meet(store, 1, 4, b"", 20, "called register"))
    assert isinstance(last, PeerLost) and "gave up waiting before this rank came" in str(last)
    assert time.monotonic() - begun < 15


def test_a_store_that_does_not_answer_is_a_lost_peer():
    class Gone:
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer\nat TCPStore.cpp")

    with pytest.raises(
        PeerLost, match="store does not answer: .*; read its output .Connection reset by peer.$"
    ):
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
    assert notes[0].look(5) == (1, "gave up because of out of memory") == notes[2].look(5)
    assert notes[1].look(5) is None


def test_a_store_that_blocks_holds_nobody_up():
    class Blocked:
        calls = 0

        def check(self, keys):
            Blocked.calls += 1
            answers.wait(60)

        def add(self, key, value):
            raise RuntimeError("gone")

    notes, answers = Notes(Blocked(), 0), threading.Event()
    begun = time.monotonic()
    assert notes.look(0.05) is None and notes.look(0.05) is None
    notes.tell("anything")
    assert time.monotonic() - begun < 20
    assert Blocked.calls == 1
    answers.set()


# ---- whose ranks ---------------------------------------------------------------------------------


def compare(how):
    rank = dist.get_rank()
    if how == "alone":  # as an MpiCommunicator in a script that torchrun started
        comm = LocalCommunicator.group(1)[0]
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
        same_ranks(comm, timeout_s=20)
    except (ValueError, PeerLost) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (
            "alone",
            (
                "rank 0 of 2 of the process group is rank 0 of 1 of the communicator (here a"
                " LocalCommunicator)"
            ),
        ),
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


# ---- who holds the channels ----------------------------------------------------------------------


def layers(rank):
    torch.manual_seed(rank)
    found = [(f"layer{i}", torch.nn.Parameter(torch.zeros(40, 40))) for i in range(3)]
    for _, p in found:
        p.grad = torch.randn(40, 40)
    return found


def two_users(comm):
    """Reproduction 2 of the findings: all_reduce while an exchange that rotate() began is under
    way.
    """
    averager = gradcomp.GradientAverager(
        layers(comm.rank), "terngrad", comm, bucket_cap_mb=0.01, min_numel=0
    )
    averager.rotate()
    x = torch.full((64,), float(comm.rank))
    begun = time.monotonic()
    with pytest.raises(
        gradcomp.GradcompError, match=r"all_reduce\(key=7\).*the averaging of 3.*duplicate\(\)"
    ):
        gradcomp.all_reduce(x, gradcomp.Identity(), comm, key=7, timeout_s=20)
    with pytest.raises(gradcomp.GradcompError, match="a collective cannot start"):
        comm.start_all_gather(
            torch.zeros(1, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), Channel.FIRST
        )
    at_once = time.monotonic() - begun
    words = comm.all_gather_bytes(b"%d" % comm.rank, 20)  # control is free
    other = comm.duplicate()
    gradcomp.all_reduce(x, gradcomp.Identity(), other, key=7, timeout_s=20)
    averager.flush()
    y = gradcomp.all_reduce(
        torch.full((64,), float(comm.rank)), gradcomp.Identity(), comm, key=7, timeout_s=20
    )
    averager.close()
    other.close()
    return at_once, words, x[0].item(), y[0].item()


def test_a_second_user_of_a_communicator_is_refused_at_once(over):
    for at_once, *rest in over(2, two_users):
        assert rest == [[b"0", b"1"], 0.5, 0.5]
        assert at_once < 15


def test_a_lease_is_claimed_once_and_given_back():
    comm = LocalCommunicator.group(1)[0]
    first, second = comm.lease("the first"), comm.lease("the second")
    for _ in range(2):
        first.claim()
    with pytest.raises(
        gradcomp.GradcompError, match="the second cannot start .* while the first has"
    ):
        second.claim()
    second.release()
    with pytest.raises(gradcomp.GradcompError), second:
        pass
    first.release()
    with second:
        with pytest.raises(gradcomp.GradcompError):
            first.claim()
        second.all_gather_bytes(b"x", 5, Channel.SCALE)
    first.claim()
    del first  # a user that is gone holds nothing
    second.claim()


def duplicates(comm):
    """A duplicate has channels of its own: what is under way on one does not move the other."""
    other = comm.duplicate(timeout_s=30)
    sends = [torch.tensor([comm.rank + 10 * k], dtype=torch.uint8) for k in range(2)]
    recvs = [torch.zeros(2, dtype=torch.uint8) for _ in range(2)]
    order = [(comm, 0), (other, 1)] if comm.rank else [(other, 1), (comm, 0)]
    works = [c.start_all_gather(sends[k], recvs[k], Channel.FIRST) for c, k in order]
    for work in works:
        work.wait(20)
    comm.all_gather_bytes(b"x", 20)
    other.close()
    return (
        other.timeout_s,
        [r.tolist() for r in recvs],
        comm.all_gather_bytes(b"%d" % comm.rank, 20, Channel.FIRST),
    )


def test_a_duplicate_has_channels_of_its_own(over):
    assert over(2, duplicates)[0][1:] == ([[0, 1], [10, 11]], [b"0", b"1"])


# ---- gloo groups ---------------------------------------------------------------------------------


def made_and_dropped(close):
    """Return descriptors and gradcomp's threads before, with one communicator, and after four
    that came and went.
    """
    before = steady(descriptors), threading.active_count()
    for _ in range(4):
        comm = TorchCommunicator(timeout_s=20)
        with comm.lease("the test") as lease:
            lease.all_gather_bytes(b"x", 20, Channel.FIRST)
        data = descriptors()
        comm.all_gather_bytes(b"x", 20)
        control = descriptors()
        comm.kept["itself"] = comm.lease("a cycle")
        if close:
            comm.close()
        del comm, lease
        gc.collect()
    return before, data, control, (settled(descriptors, before[0]), threading.active_count())


@pytest.mark.parametrize("close", [True, False])
def test_a_communicator_gives_its_sockets_back_with_or_without_close(close, gloo):
    for before, data, control, after in gloo(2, made_and_dropped, close):
        assert before[0] < data < control  # control connects when it is first used
        assert after[0] <= before[0] and after[1] <= before[1]


def few_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, needed = steady(descriptors), 3 * (1 + 4)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + needed - 1, hard))
    try:
        with pytest.raises(
            gradcomp.GradcompError,
            match=rf"3 gloo groups of 2 ranks need {needed} .*ulimit -n 65536",
        ):
            TorchCommunicator(timeout_s=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    comm = TorchCommunicator(timeout_s=20)
    opened = descriptors() - before
    comm.close()
    return opened == needed


def test_too_few_descriptors_are_said_before_anything_is_opened(gloo):
    assert gloo(2, few_descriptors) == [True, True]


def forgotten_close():
    """Finding 8: a rank that has closed and one that forgot to make their next communicator
    together.
    """
    first = TorchCommunicator(timeout_s=20)
    first.all_gather_bytes(b"x", 20, Channel.FIRST)
    if dist.get_rank() == 0:
        first.close()
    second = TorchCommunicator(timeout_s=20)
    return second.all_gather_bytes(b"%d" % second.rank, 20, Channel.FIRST)


def test_a_rank_that_forgets_to_close_holds_nobody_up(gloo):
    assert gloo(2, forgotten_close) == [[b"0", b"1"]] * 2


def other_timeouts():
    try:
        TorchCommunicator(timeout_s=20 + dist.get_rank())
    except gradcomp.PeerMismatch as error:
        return error.field, error.rank, error.expected, error.got


def test_another_timeout_on_some_rank_is_a_mismatch_on_every_rank(gloo):
    assert gloo(2, other_timeouts) == [("timeout_s", 1, 20.0, 21.0)] * 2


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
    print(error.field, flush=True)
os._exit(0)  # with the store
"""


@pytest.mark.slow
def test_a_mismatch_is_told_before_the_store_goes():
    """The rank that hosts the store left with it as soon as it knew: PeerLost on the other one."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LEAVES, str(rank), str(port)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    assert [process.communicate(timeout=90)[0] for process in ranks] == ["timeout_s\n"] * 2


def own_timeout():
    state = gradcomp.ddp.register(
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), "terngrad"
    )
    averager = gradcomp.GradientAverager(layers(0), "terngrad", min_numel=0)
    found = {TorchCommunicator().timeout_s, state._engine.timeout_s, averager._engine.timeout_s}
    state.close()
    averager.close()
    return found, group_timeout_s(dist.group.WORLD)


def test_the_timeout_is_the_process_groups_own(gloo):
    for ours, theirs in gloo(2, own_timeout):
        assert ours == {theirs} == {1800}


def not_everyone():
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 has given up
    begun = time.monotonic()
    try:
        TorchCommunicator(timeout_s=0.2 if dist.get_rank() == 0 else 60)
    except PeerLost as error:
        return str(error), time.monotonic() - begun
    finally:
        if dist.get_rank() == 0:
            dist.barrier()


def test_who_has_not_registered_is_named(gloo):
    (first, _), (second, seconds) = gloo(2, not_everyone)
    assert first.startswith("lost a peer in setup after 0."), (
        "without a bucket: it was 'of bucket -1'"
    )
    assert first.endswith("rank 1 has not called register, or made its communicator")
    assert second.endswith("rank 0 gave up waiting before this rank came")
    assert seconds < 10  # at once, on a busy machine too


def waits(how):
    """Rank 0 waits for rank 1, which fails by itself; or is aborted by another of its threads."""
    comm = TorchCommunicator(timeout_s=40)
    if comm.rank == 1:
        if how == "tells":
            comm.abort("UnsupportedTensor: the gradient of 'w' is sparse")
        dist.barrier()
        return None
    recv = torch.zeros(2, dtype=torch.uint8)
    works = [comm.start_all_gather(recv[:1], recv, c) for c in (Channel.FIRST, Channel.SECOND)]
    begun, found = time.monotonic(), []
    if how == "aborts":
        threading.Timer(0.1, comm.abort, ["another stage failed"]).start()
    for work in works:
        with pytest.raises(ConnectionError) as error:
            work.wait(30)
        found.append((type(error.value).__name__, str(error.value)))
    seconds = time.monotonic() - begun
    with pytest.raises(ConnectionError, match="this rank has given up"):
        comm.start_all_gather(recv[:1], recv, Channel.SCALE)
    begun = time.monotonic()
    comm.close()  # with collectives under way
    closed_s = time.monotonic() - begun
    dist.barrier()
    return found, seconds, closed_s


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        (
            "tells",
            (
                "RankGone",
                "rank 1 gave up because of UnsupportedTensor: the gradient of 'w' is sparse",
            ),
        ),
        ("aborts", ("ConnectionError", "this rank has given up: another stage failed")),
    ],
)
def test_waits_end_soon_when_a_rank_gives_up(how, wanted, gloo):
    """Here and on the peers, long before the timeout."""
    found, seconds, closed_s = gloo(2, waits, how)[0]
    assert found == [wanted] * 2
    assert seconds < 10 and closed_s < 10


def refuse(*_):
    raise ValueError("a codec of the user's")


def fails_alone():
    """A bucket that one rank cannot take: its peer learns who and why."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones(64, 64)
    averager = gradcomp.GradientAverager(
        [("w", parameter)], gradcomp.TernGrad(), timeout_s=60, min_numel=0
    )
    averager.average()
    if dist.get_rank() == 1:
        averager._engine.codec.encode_body = refuse
    begun = time.monotonic()
    try:
        averager.average()
    except (PeerLost, ValueError) as error:
        found = type(error).__name__, str(error), time.monotonic() - begun
    dist.barrier()  # before the sockets close, which a peer might see first
    averager.close()
    return found


def test_a_rank_that_fails_alone_tells_its_peers_who_and_why(gloo):
    (kind, text, seconds), own = gloo(2, fails_alone)
    assert own[:2] == ("ValueError", "a codec of the user's")
    assert kind == "PeerLost" and text.endswith(
        "rank 1 gave up because of ValueError: a codec of the user's"
    )
    assert seconds < 30


def test_a_link_that_is_dropped_ends_its_threads():
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile

    def own():
        return len(set(threading.enumerate()) - before)

    link = LinkCommunicator(LocalCommunicator.group(1)[0], bits_per_s=1e9)
    assert link.all_gather_bytes(b"x", 5) == [b"x"]
    assert own() == 1
    del link
    assert settled(own, 0) == 0


def slow_outside(comm):
    """Two nodes of two ranks: what stays on a node takes no time, what crosses goes over the one
    link of the rank.
    """
    link = LinkCommunicator(comm, bits_per_s=1e5)  # 1,000 bytes: 80 ms
    home = comm.rank // 2
    inside = link.node_subset([2 * home, 2 * home + 1], 20)
    across = link.subset([comm.rank % 2, comm.rank % 2 + 2], 20)
    seconds = []
    for one, nbytes in ((inside, 1_000_000), (across, 1000)):
        begun = time.monotonic()
        one.all_gather_bytes(bytes(nbytes), 20)
        seconds.append(time.monotonic() - begun)
    send, recv = torch.zeros(1000, dtype=torch.uint8), torch.zeros(2000, dtype=torch.uint8)
    begun = time.monotonic()
    works = [
        c.start_all_gather(send, recv.clone(), Channel.FIRST) for c in (across, across.duplicate())
    ]
    for work in works:
        work.wait(20)
    return *seconds, time.monotonic() - begun


def test_a_link_slows_what_leaves_the_node():
    for inside, across, two in run_local(4, slow_outside):
        assert inside < 15  # 80 s over the link
        assert 0.08 <= across
        assert 0.16 <= two


def warned(timeout_s):
    torchdist._warn.cache_clear()
    found, handler = [], logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("gradcomp").addHandler(handler)
    try:
        for _ in range(2):
            TorchCommunicator(timeout_s=timeout_s)
    finally:
        logging.getLogger("gradcomp").removeHandler(handler)
    return found


def test_a_process_group_that_waits_far_longer_is_warned_of_once(gloo):
    first, other = gloo(2, warned, 30)
    assert (
        len(first) == 1
        and "torch's own" in first[0]
        and "after 1800 s: init_process_group(timeout=" in first[0]
    )
    assert other == []
    assert gloo(2, warned, 1000) == gloo(2, warned, None) == [[], []]


class Ending:
    """A collective of torch's whose waits end as they are told to."""

    def __init__(self, *ends, completed):
        self._ends, self._completed = list(ends), list(completed)

    def wait(self, timeout):
        end = self._ends.pop(0)
        if end:
            raise RuntimeError(end)

    def is_completed(self):
        return self._completed.pop(0)


GONE = 1, "a codec of the user's"


@pytest.mark.parametrize(
    ("ends", "completed", "raised", "gone"),
    [
        # the other sent all, then gave up
        (["Operation timed out!", "", ""], [False, True], None, GONE),
        (
            ["Operation timed out!", *["Connection closed by peer"] * 3],
            [False, True, True],
            RankGone,
            GONE,
        ),
        (["Operation timed out!"] * 2, [False, False], RankGone, GONE),
        (["Operation timed out!", ""], [False], None, None),  # still under way, then done
        # done between the end of its wait and the look at it: nothing is wrong
        (["Operation timed out!", ""], [True], None, None),
        (["Operation timed out!", "Operation timed out!", ""], [False, True], None, None),
        (["Connection closed by peer", "Connection closed by peer"], [True], ConnectionError, None),
        (["Operation timed out!", "Connection closed by peer"], [True], ConnectionError, None),
        # gloo's own timeout
        (["Timed out waiting 30000ms", "Timed out waiting 30000ms"], [True], TimeoutError, None),
        (["Connection closed by peer"], [False], ConnectionError, None),
    ],
)
def test_a_collective_that_ends_just_after_a_wait_did_is_no_failure(ends, completed, raised, gone):
    notes, lost = (
        SimpleNamespace(look=lambda seconds: gone, look_for_cause=lambda seconds: gone),
        [],
    )
    groups = SimpleNamespace(pending=set(), broken="", notes=notes, lose=lost.append)
    work = _GlooWork(Ending(*ends, completed=completed), groups, ())
    if raised is None:
        work.wait(60.0)
        assert not groups.pending and not lost
    else:
        with pytest.raises(raised):
            work.wait(60.0)
        assert lost


def closes():
    """Rank 1 closes while rank 0 waits for it, and stays alive: nothing but its word tells rank
    0 who has left.
    """
    comm = TorchCommunicator(timeout_s=40)
    if comm.rank == 1:
        comm.close()
        found = None
    else:
        with pytest.raises(RankGone) as error:
            comm.all_gather_bytes(b"x", 30, Channel.FIRST)
        found = error.value.rank, str(error.value)
    dist.barrier()
    return found


def closes_before_a_channel():
    """As `closes`, where the ranks have yet to connect the channel."""
    comm = TorchCommunicator(timeout_s=40)
    if comm.rank == 1:
        comm.close()
        found = None
    else:
        begun = time.monotonic()
        with pytest.raises(PeerLost) as error:
            comm.all_gather_bytes(b"x", 30, Channel.CONTROL)
        found = str(error.value), time.monotonic() - begun
    dist.barrier()
    return found


def test_a_rank_that_closes_before_a_channel_is_connected_is_named_soon(gloo):
    """Its peers waited for the whole timeout."""
    text, seconds = gloo(2, closes_before_a_channel)[0]
    assert "rank 1 closed its communicator" in text and seconds < 20


def test_a_rank_that_closes_is_named_to_its_peers(gloo):
    """It was gloo's "Connection closed by peer" alone, without a number."""
    rank, text = gloo(2, closes)[0]
    assert rank == 1 and text.startswith("rank 1 closed its communicator"), text
    assert text.endswith("]") and "onnection" in text.partition(" [")[2], (
        "gloo's own words come last"
    )
