"""What is torch.distributed's and gloo's own: whose ranks a communicator has, what its groups hold,
and what is said of ranks that leave.
"""

import gc
import os
import re
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
from _ranks import logged

import gradcomp
from gradcomp.comm import Channel, LocalCommunicator, TorchCommunicator, torchdist
from gradcomp.comm.base import RankGone
from gradcomp.comm.gloo import _GlooWork
from gradcomp.comm.torch_private import group_timeout_s
from gradcomp.comm.torchdist import same_ranks
from gradcomp.errors import PeerLost

# ---- whose ranks ---------------------------------------------------------------------------------


def compare(how):
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
    try:
        same_ranks(comm, timeout_s=20)
    except (ValueError, PeerLost) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
def test_the_ranks_of_a_communicator_are_those_of_the_process_group(how, wanted, gloo):
    for found in gloo(2, compare, how):
        assert found.startswith("ValueError") == bool(wanted) and re.search(wanted, found)


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


def too_few_descriptors_are_said_before_anything_is_opened():
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
    opened = descriptors() - before
    comm.close()
    return opened == needed


def a_rank_that_forgets_to_close_holds_nobody_up():
    """A rank that has closed and one that forgot to make their next communicator together."""
    first = TorchCommunicator(timeout_s=20)
    first.all_gather_bytes(b"x", 20, Channel.FIRST)
    if dist.get_rank() == 0:
        first.close()
    second = TorchCommunicator(timeout_s=20)
    return second.all_gather_bytes(b"%d" % second.rank, 20, Channel.FIRST)


def a_child_that_drops_a_communicator_leaves_it_to_its_parent():
    """It waited for ever, for threads that only the parent has: a worker of a DataLoader hung."""
    comm = TorchCommunicator(timeout_s=60)
    comm.all_gather_bytes(b"x", 60)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        del comm
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return status, comm.all_gather_bytes(b"%d" % comm.rank, 60)


# ---- timeouts ------------------------------------------------------------------------------------


def the_timeout_is_the_process_groups_own():
    weight = torch.nn.Parameter(torch.zeros(40, 40))
    state = gradcomp.ddp.register(
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)), "terngrad"
    )
    averager = gradcomp.GradientAverager([("w", weight)], "terngrad", min_numel=0)
    found = {TorchCommunicator().timeout_s, state._engine.timeout_s, averager._engine.timeout_s}
    state.close()
    averager.close()
    return found, group_timeout_s(dist.group.WORLD)


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


def waits_end_soon_when_this_rank_gives_up():
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


def a_thread_that_sends_and_one_that_receives_share_a_mailbox():
    """Each made one at first, and waited for what came to the other's: no message from any rank."""
    comm = TorchCommunicator(timeout_s=20)
    with ThreadPoolExecutor(1) as other:
        received = other.submit(comm.receive, 20, max_nbytes=1)
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 1 - comm.rank).wait(20)
        sender, _ = received.result()
    comm.all_gather_bytes(b"end", 20)
    comm.close()
    return sender == 1 - comm.rank


BODIES = [  # what each of two ranks does and returns
    (too_few_descriptors_are_said_before_anything_is_opened, True),
    (a_rank_that_forgets_to_close_holds_nobody_up, [b"0", b"1"]),
    (a_child_that_drops_a_communicator_leaves_it_to_its_parent, (0, [b"0", b"1"])),
    (the_timeout_is_the_process_groups_own, ({1800}, 1800)),
    (waits_end_soon_when_this_rank_gives_up, None),
    (a_thread_that_sends_and_one_that_receives_share_a_mailbox, True),
]


@pytest.mark.parametrize(("body", "wanted"), BODIES, ids=[body.__name__ for body, _ in BODIES])
def test_of_two_ranks(body, wanted, gloo):
    assert gloo(2, body) == [wanted] * 2


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
    with pytest.raises((PeerLost, ValueError)) as error:
        averager.average()
    found = type(error.value).__name__, str(error.value), time.monotonic() - begun
    dist.barrier()  # before the sockets close, which a peer might see first
    averager.close()
    return found


def test_a_rank_that_fails_alone_tells_its_peers_who_and_why(gloo):
    (kind, text, seconds), own = gloo(2, fails_alone)
    assert own[:2] == ("ValueError", "a codec of the user's")
    assert kind == "PeerLost" and seconds < 30
    assert text.endswith("rank 1 gave up because of ValueError: a codec of the user's")


def closes(channel):
    """Rank 1 closes while rank 0 waits for it, and stays alive: nothing but its note tells rank
    0 who has left.
    """
    comm, found = TorchCommunicator(timeout_s=40), None
    begun = time.monotonic()
    if comm.rank == 1:
        comm.close()
    else:
        with pytest.raises((RankGone, PeerLost)) as error:
            comm.all_gather_bytes(b"x", 30, channel)
        found = type(error.value), str(error.value), time.monotonic() - begun
    dist.barrier()
    return found


@pytest.mark.parametrize("channel", [Channel.FIRST, Channel.CONTROL])
def test_a_rank_that_closes_is_named_to_its_peers(channel, gloo):
    """It was gloo's "Connection closed by peer" alone, without a number; where the ranks had yet to
    connect the channel, peers waited for their whole timeout.
    """
    kind, text, seconds = gloo(2, closes, channel)[0]
    assert "rank 1 closed its communicator" in text and seconds < 20, text
    assert kind == (RankGone if channel is Channel.FIRST else PeerLost)
    if channel is Channel.FIRST:  # gloo's own words come last
        assert text.endswith("]") and "onnection" in text.partition(" [")[2], text


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
        pending=set(),
        broken="",
        notes=notes,
        lose=lost.append,
        find_lost=lambda: None,
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
