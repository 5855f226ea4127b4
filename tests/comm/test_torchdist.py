"""What is torch.distributed's and gloo's own: whose ranks a communicator has, what its groups hold,
and what is said of ranks that leave.
"""

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _held import descriptors, settled, steady
from _ranks import each_rank, logged

import gradcomp
from gradcomp.comm import Channel, LocalCommunicator, TorchCommunicator, torchdist
from gradcomp.comm.base import RankGone
from gradcomp.comm.gloo import _GlooWork
from gradcomp.comm.torch_private import group_timeout_s
from gradcomp.comm.torchdist import same_ranks
from gradcomp.errors import PeerLost

# ---- whose ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("alone", "rank 0 of 2 .* is rank 0 of 1 of the communicator .here a LocalCommunicator.;"),
        ("numbered otherwise", "rank 0 of 2 of the process group is rank 1 of 2"),
        ("of another job", "has ranks that the process group does not have"),
        ("the same", ""),
        ("of another transport", ""),
    ],
)
@each_rank(2)
def test_the_ranks_of_a_communicator_are_those_of_the_process_group(how, wanted):
    rank = dist.get_rank()
    if how == "alone":  # as an MpiCommunicator in a script that torchrun started
        comm = LocalCommunicator.group(1)[0]
    else:
        comm = TorchCommunicator(timeout_s=20)
    if how == "numbered otherwise":
        comm.rank = 1 - rank
    if how == "of another job":
        comm.kept["identity"] = bytes([rank]) * 16
    if how in ("of another job", "of another transport"):
        comm.members = ()
    with pytest.raises(ValueError, match=wanted) if wanted else contextlib.nullcontext():
        same_ranks(comm, timeout_s=20)


# ---- making and closing --------------------------------------------------------------------------


def only_rank_0():
    if dist.get_rank() == 0:
        # without a bucket: it was 'of bucket -1'
        wanted = "^lost a peer in setup after 0.*rank 1 has not called register, or made its comm"
        with pytest.raises(PeerLost, match=wanted):
            TorchCommunicator(timeout_s=0.1)


def everyone():
    return TorchCommunicator(timeout_s=20).world_size


def test_who_has_not_registered_is_named_and_is_met_in_the_next_process_group(gloo):
    gloo(2, only_rank_0)
    assert gloo(2, everyone) == [2, 2]


@pytest.mark.parametrize("close", [True, False])
@each_rank(2)
def test_a_communicator_gives_its_sockets_back_with_or_without_close(close):
    TorchCommunicator(timeout_s=20).close()  # opens the socket that this process keeps
    before, threads = steady(descriptors), threading.active_count()
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
    assert before < data < control  # control connects when it is first used
    assert settled(descriptors, before) <= before and threading.active_count() <= threads


@each_rank(2)
def test_too_few_descriptors_are_said_before_anything_is_opened():
    TorchCommunicator(timeout_s=20).close()  # opens the socket that this process keeps
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, needed = steady(descriptors), 3 * (1 + 4)
    refusal = rf"3 gloo groups of 2 ranks need {needed} .*ulimit -n 65536"
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + needed - 1, hard))
    try:
        with pytest.raises(gradcomp.GradcompError, match=refusal):
            TorchCommunicator(timeout_s=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    comm = TorchCommunicator(timeout_s=20)
    assert descriptors() - before == needed
    comm.close()


@each_rank(2)
def test_a_rank_that_forgets_to_close_holds_nobody_up():
    """A rank that has closed and one that forgot to make their next communicator together."""
    first = TorchCommunicator(timeout_s=20)
    first.all_gather_bytes(b"x", 20, Channel.FIRST)
    if dist.get_rank() == 0:
        first.close()
    second = TorchCommunicator(timeout_s=20)
    assert second.all_gather_bytes(b"%d" % second.rank, 20, Channel.FIRST) == [b"0", b"1"]


@each_rank(2)
def test_a_child_that_drops_a_communicator_leaves_it_to_its_parent():
    """It waited for ever, for threads that only the parent has: a worker of a DataLoader hung."""
    comm = TorchCommunicator(timeout_s=60)
    comm.all_gather_bytes(b"x", 60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        del comm
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert comm.all_gather_bytes(b"%d" % comm.rank, 60) == [b"0", b"1"]


# ---- timeouts ------------------------------------------------------------------------------------


@each_rank(2)
def test_the_timeout_is_the_process_groups_own():
    weight = torch.nn.Parameter(torch.zeros(40, 40))
    state = gradcomp.ddp.register(
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), "terngrad"
    )
    averager = gradcomp.GradientAverager([("w", weight)], "terngrad", min_numel=0)
    for found in (TorchCommunicator(), state._engine, averager._engine):
        assert found.timeout_s == group_timeout_s(dist.group.WORLD) == 1800
    state.close()
    averager.close()


def warned(timeout_s):
    torchdist._warn.cache_clear()
    with logged() as found:
        for _ in range(2):
            TorchCommunicator(timeout_s=timeout_s)
    return found


def test_a_process_group_that_waits_far_longer_is_warned_of_once(gloo):
    first, other = gloo(2, warned, 30)
    assert len(first) == 1 and other == []
    assert "torch's own" in first[0] and "after 1800 s: init_process_group(timeout=" in first[0]
    assert gloo(2, warned, 1000) == gloo(2, warned, None) == [[], []]


# ---- ranks that leave ----------------------------------------------------------------------------


@each_rank(2)
def test_waits_end_soon_when_this_rank_gives_up():
    """Rank 0 is aborted by another of its threads while it waits, and then closes."""
    comm, why = TorchCommunicator(timeout_s=40), "this rank has given up"
    if comm.rank == 0:
        recv = torch.zeros(2, dtype=torch.uint8)
        works = [comm.start_all_gather(recv[:1], recv, c) for c in (Channel.FIRST, Channel.SECOND)]
        begun = time.monotonic()
        threading.Timer(0.1, comm.abort, ["another stage failed"]).start()
        for work in works:
            with pytest.raises(ConnectionError, match=f"{why}: another stage failed"):
                work.wait(30)
        with pytest.raises(ConnectionError, match=why):
            comm.start_all_gather(recv[:1], recv, Channel.SCALE)
        comm.close()  # with collectives under way
        assert time.monotonic() - begun < 10
    dist.barrier()


@each_rank(2)
def test_a_thread_that_sends_and_one_that_receives_share_a_mailbox():
    """Each made one at first, and waited for what came to the other's: no message from any rank."""
    comm = TorchCommunicator(timeout_s=20)
    with ThreadPoolExecutor(1) as other:
        received = other.submit(comm.receive, 20, max_nbytes=1)
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 1 - comm.rank).wait(20)
        sender, _ = received.result()
    comm.all_gather_bytes(b"end", 20)
    comm.close()
    assert sender == 1 - comm.rank


def refuse(*_):
    raise ValueError("a codec of the user's")


@each_rank(2)
def test_a_rank_that_fails_alone_tells_its_peers_who_and_why():
    """A bucket that one rank cannot take."""
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones(64, 64)
    averager = gradcomp.GradientAverager(
        [("w", parameter)], gradcomp.TernGrad(), timeout_s=60, min_numel=0
    )
    averager.average()
    if dist.get_rank() == 1:
        averager._engine.codec.encode_body = refuse
    begun = time.monotonic()
    why = "a codec of the user's"
    if dist.get_rank() == 0:
        kind, why = PeerLost, rf"rank 1 \(pid \d+ on \S+\) gave up because of ValueError: {why}$"
    else:
        kind, why = ValueError, f"^{why}$"
    with pytest.raises(kind, match=why):
        averager.average()
    assert time.monotonic() - begun < 30
    dist.barrier()  # before the sockets close, which a peer might see first
    averager.close()


CLOSED = r"rank 1 \(pid \d+ on \S+\) closed its communicator"


@pytest.mark.parametrize(
    ("channel", "kind", "said"),
    [
        (Channel.FIRST, RankGone, rf"{CLOSED}.* \[.*onnection.*\]$"),  # gloo's own words come last
        (Channel.CONTROL, PeerLost, CLOSED),
    ],
)
@each_rank(2)
def test_a_rank_that_closes_is_named_to_its_peers(channel, kind, said):
    """Rank 1 closes while rank 0 waits for it, and stays alive: nothing but its note tells rank
    0 who has left.

    It was gloo's "Connection closed by peer" alone, without a number; where the ranks had yet to
    connect the channel, peers waited for their whole timeout.
    """
    comm = TorchCommunicator(timeout_s=40)
    if comm.rank == 1:
        comm.close()
    else:
        begun = time.monotonic()
        with pytest.raises(kind, match=said):
            comm.all_gather_bytes(b"x", 30, channel)
        assert time.monotonic() - begun < 20
    dist.barrier()


class Ending:
    """A collective of torch's whose waits end as the table says."""

    def __init__(self, *ends, completed):
        self._ends, self._completed = list(ends), list(completed)

    def wait(self, timeout):
        end = self._ends.pop(0)
        if end:
            raise RuntimeError(end)

    def is_completed(self):
        return self._completed.pop(0)


GONE = 1, "a codec of the user's"
LATE, BROKEN, OWN = "Operation timed out!", "Connection closed by peer", "Timed out waiting 30000ms"


@pytest.mark.parametrize(
    ("ends", "completed", "raised", "gone"),
    [
        ([LATE, "", ""], [False, True], None, GONE),  # the other sent all, then gave up
        ([LATE, *[BROKEN] * 3], [False, True, True], RankGone, GONE),
        ([LATE] * 2, [False, False], RankGone, GONE),
        ([LATE, ""], [False], None, None),  # still under way, then done
        # done between the end of its wait and the look at it: nothing is wrong
        ([LATE, ""], [True], None, None),
        ([LATE, LATE, ""], [False, True], None, None),
        ([BROKEN, BROKEN], [True], ConnectionError, None),
        ([LATE, BROKEN], [True], ConnectionError, None),
        ([OWN, OWN], [True], TimeoutError, None),  # gloo's own timeout
        ([BROKEN], [False], ConnectionError, None),
    ],
)
def test_a_collective_that_ends_just_after_a_wait_did_is_no_failure(ends, completed, raised, gone):
    notes = SimpleNamespace(look=lambda seconds: gone, look_for_cause=lambda seconds: gone)
    lost = []
    groups = SimpleNamespace(
        answer=lambda: None,
        pending=set(),
        broken="",
        notes=notes,
        lose=lambda *words: lost.append(words),
        find_lost=lambda look: None,
        find_silent=lambda seconds: None,
        find_ending=lambda look: None,
        watch=lambda: None,
    )
    work = _GlooWork(Ending(*ends, completed=completed), groups, ())
    if raised is None:
        work.wait(60.0)
        assert not groups.pending and not lost
    else:
        with pytest.raises(raised):
            work.wait(60.0)
        assert lost
