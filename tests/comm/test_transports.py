"""What every transport must do, written once: a new transport adds one row to the `over` fixture
(tests/conftest.py).
"""

import re
import threading
import time

import pytest
import torch
from _ranks import each_rank, run_local

import gradcomp
from gradcomp.comm import Channel, Communicator, LinkCommunicator, LocalCommunicator, RankGone

WAIT_S = 20


def filled(nbytes, value):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def send(comm, to, nbytes=1, value=0):
    comm.start_send(filled(nbytes, value), to).wait(WAIT_S)


def end(comm):
    """Wait for all ranks: where messages go over TCP, a rank that closes is a rank that is gone."""
    comm.all_gather_bytes(b"end", WAIT_S)


# ---- collectives ---------------------------------------------------------------------------------


def collectives(comm, n):
    """Every operation on a channel of its own, all under way at once, started in an order that
    differs between ranks.
    """
    me, ranks = comm.rank, range(comm.world_size)

    def values(rank):  # the largest comes from another rank at each place
        return (torch.arange(n, dtype=torch.int32) * 7 + 11 * rank) % 13 - 6

    def run(sender, to):  # of 0 to 2n + 2 bytes
        return filled(n * (sender + 2 * to) % (2 * n + 3), 16 * sender + to)

    largest, everyone = values(me), torch.empty(n * len(ranks), dtype=torch.uint8)
    out, into = [run(me, to) for to in ranks], [run(sender, me) for sender in ranks]
    received = torch.empty(sum(map(len, into)), dtype=torch.uint8)
    starts = [
        lambda: comm.start_max(largest, Channel.SCALE),
        lambda: comm.start_all_to_all(
            torch.cat(out), [*map(len, out)], received, [*map(len, into)], Channel.FIRST
        ),
        lambda: comm.start_all_gather(filled(n, me), everyone, Channel.SECOND),
    ]
    works = [starts[(me + k) % 3]() for k in range(3)]
    assert comm.all_gather_bytes(b"%d" % me, WAIT_S) == [b"%d" % rank for rank in ranks]
    for work in reversed(works):
        work.wait(WAIT_S)
        assert work.is_done()
    assert torch.equal(largest, torch.stack([values(rank) for rank in ranks]).amax(0))
    assert torch.equal(received, torch.cat(into))
    assert torch.equal(everyone, torch.cat([filled(n, rank) for rank in ranks]))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [0, 1, 7, 5001])
def test_collectives_of_any_length(over, world, n):
    over(world, collectives, n)


def many_collectives_are_under_way_at_once(comm):
    """Far more collectives are under way than any exchange starts; they end in any order."""
    works = []
    for number in range(60):
        recv = filled(comm.world_size, 0)
        send = filled(1, 4 * number + comm.rank)
        works.append((comm.start_all_gather(send, recv, Channel(number % 3)), recv, number))
    for work, recv, number in reversed(works):
        work.wait(WAIT_S)
        assert recv.tolist() == [4 * number + rank for rank in range(comm.world_size)]


def other_communicators(comm):
    """A duplicate and a subset have channels of their own: what is under way on one does not move
    the others; closing one closes no other.
    """
    other = comm.duplicate(timeout_s=30)
    recvs = [torch.zeros(3, dtype=torch.uint8) for _ in range(2)]
    order = [(comm, 0), (other, 1)] if comm.rank else [(other, 1), (comm, 0)]
    works = [
        c.start_all_gather(filled(1, comm.rank + 10 * k), recvs[k], Channel.FIRST) for c, k in order
    ]
    for work in works:
        work.wait(WAIT_S)
    assert [r.tolist() for r in recvs] == [[0, 1, 2], [10, 11, 12]] and other.timeout_s == 30
    other.all_gather_bytes(b"x", WAIT_S)
    for _ in range(2):
        other.close()
    with pytest.raises((RuntimeError, ConnectionError), match="closed"):
        other.all_gather_bytes(b"x", WAIT_S, Channel.FIRST)
    if comm.rank != 1:
        pair = comm.subset([2, 0], WAIT_S)  # in this order
        assert pair.rank == (comm.rank == 0)
        assert pair.all_gather_bytes(b"%d" % comm.rank, WAIT_S, Channel.FIRST) == [b"2", b"0"]
        pair.close()
    assert len({*comm.all_gather_bytes(comm.identity(WAIT_S), WAIT_S)}) == 1
    return comm.identity(WAIT_S)


def test_a_duplicate_and_a_subset_have_channels_of_their_own(over):
    first, second = over(3, other_communicators), over(3, other_communicators)
    assert len({*first}) == len({*second}) == 1 and first[0] != second[0]


@each_rank(3, "over")
def test_a_rank_that_is_silent_or_gives_up(comm):
    """Rank 1 is silent on a duplicate, and gives up on this one: the others hear of it long before
    their patience ends. What it said was lost: peers waited for their whole timeout.
    """
    other, last = (comm.duplicate(timeout_s=30) for _ in range(2))
    if comm.rank == 1:
        for source in (0, 2):
            comm.receive(60, source, max_nbytes=1)
        comm.abort("UnsupportedTensor: the gradient of 'w' is sparse")
        last.all_gather_bytes(b"end", 60)
        return
    recvs = [filled(3, 0) for _ in range(3)]
    with pytest.raises((TimeoutError, RankGone), match="answer") as late:
        other.start_all_gather(filled(1, 0), recvs[0], Channel.FIRST).wait(0.3)
    named = type(comm).__name__ in ("TorchCommunicator", "MpiCommunicator")
    assert getattr(late.value, "rank", None) == (1 if named else None)
    works = [
        comm.start_all_gather(filled(1, 0), recvs[c], c) for c in (Channel.FIRST, Channel.SECOND)
    ]
    send(comm, 1)
    begun, found = time.monotonic(), set()
    for work in works:
        with pytest.raises(RankGone) as error:
            work.wait(60)
        found.add((error.value.rank, str(error.value)))
    seconds = time.monotonic() - begun
    last.all_gather_bytes(b"end", 60)
    ((rank, said),) = found
    why = "gave up because of UnsupportedTensor: the gradient of 'w' is sparse"
    process = "" if isinstance(comm, LocalCommunicator) else r"\(pid \d+ on \S+\) "
    assert rank == 1 and re.fullmatch(f"rank 1 {process}{why}", said) and seconds < 25


def a_collective_tells_whether_it_is_done(comm):
    """Rank 0 sees that its collective is done, without waiting, once rank 1 has started its own."""
    recv = filled(2, 9)
    if comm.rank:
        comm.receive(WAIT_S, 0, max_nbytes=1)
        comm.start_all_gather(filled(1, 1), recv, Channel.FIRST).wait(WAIT_S)
    else:
        work = comm.start_all_gather(filled(1, 0), recv, Channel.FIRST)
        assert not work.is_done()
        send(comm, 1)
        deadline = time.monotonic() + WAIT_S
        while not work.is_done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert work.is_done()
        work.wait(WAIT_S)
    end(comm)
    return recv.tolist()


# ---- who holds the channels ----------------------------------------------------------------------


def layers(rank):
    torch.manual_seed(rank)
    found = [(f"layer{i}", torch.nn.Parameter(torch.zeros(40, 40))) for i in range(3)]
    for _, p in found:
        p.grad = torch.randn(40, 40)
    return found


def a_second_user_is_refused_at_once(comm):
    """all_reduce while an exchange that average_delayed() began is under way."""
    averager = gradcomp.GradientAverager(
        layers(comm.rank), "terngrad", comm=comm, bucket_cap_mb=0.01, min_numel=0
    )
    averager.average_delayed()
    x, y = (torch.full((64,), float(comm.rank)) for _ in range(2))
    begun = time.monotonic()
    refusal = r"all_reduce\(key=7\).*the averaging of 3.*duplicate\(\)"
    with pytest.raises(gradcomp.GradcompError, match=refusal):
        gradcomp.all_reduce(x, gradcomp.Identity(), comm=comm, key=7, timeout_s=20)
    with pytest.raises(gradcomp.GradcompError, match="a collective cannot start"):
        comm.all_gather_bytes(b"x", WAIT_S, Channel.FIRST)
    at_once = time.monotonic() - begun
    end(comm)  # control is free
    other = comm.duplicate()
    gradcomp.all_reduce(x, gradcomp.Identity(), comm=other, key=7, timeout_s=20)
    averager.flush()
    gradcomp.all_reduce(y, gradcomp.Identity(), comm=comm, key=7, timeout_s=20)
    averager.close()
    other.close()
    return at_once < 15, x[0].item(), y[0].item()


def test_a_lease_is_claimed_once_and_given_back():
    comm = LocalCommunicator.group(1)[0]
    first, second = comm.lease("the first"), comm.lease("the second")
    for _ in range(2):
        first.claim()
    refusal = "the second cannot start .* while the first has"
    with pytest.raises(gradcomp.GradcompError, match=refusal):
        second.claim()
    second.release()
    with pytest.raises(gradcomp.GradcompError), second:
        pass
    first.release()
    with second:
        with pytest.raises(gradcomp.GradcompError):
            first.claim()
        with pytest.raises(gradcomp.GradcompError, match="a collective cannot start"):
            first.all_gather_bytes(b"x", 5, Channel.SCALE)
        second.all_gather_bytes(b"x", 5, Channel.SCALE)
    first.claim()
    del first  # a user that is gone holds nothing
    second.claim()


def test_of_users_that_claim_at_once_one_is_lucky():
    comm, claimed, refused = LocalCommunicator.group(1)[0], [], []
    barrier = threading.Barrier(8)

    def claim(rank):
        lease = comm.lease(f"user {rank.rank}")
        barrier.wait()
        try:
            lease.claim()
            claimed.append(lease)
        except gradcomp.GradcompError as error:
            refused.append(str(error))

    run_local(8, claim)
    assert len(claimed) == 1 and len(refused) == 7
    assert all(f"while {claimed[0].user} has an exchange" in text for text in refused)


def test_a_transport_that_goes_round_the_claims_is_refused():
    """A subclass that was written for `start_max` itself would have been called without a check."""
    with pytest.raises(TypeError, match=r"Mine must define _start_max\(\) instead of start_max"):
        type("Mine", (Communicator,), {"start_max": lambda self, values, channel: None})


# ---- messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4])
@each_rank(by="over")
def test_messages_arrive_whole_and_in_order_from_any_rank(comm, world):
    """Every rank sends rank 0 a message of each size; rank 0 sends the sum of its bytes back."""
    sizes = [0, 1, 7, 100_000, 5_000_001, 3]
    if comm.rank:
        for size in sizes:
            send(comm, 0, size, comm.rank)
        sums = [int(comm.receive(20, 0, max_nbytes=8)[1].view(torch.int64)) for _ in sizes]
        assert sums == [comm.rank * size for size in sizes]
    else:
        found, works = {rank: [] for rank in range(1, world)}, []
        for _ in range((world - 1) * len(sizes)):
            sender, message = comm.receive(20, max_nbytes=max(sizes))
            found[sender].append(message.numel())
            total = message.sum(dtype=torch.int64).view(1).view(torch.uint8)
            works.append(comm.start_send(total, sender))
        for work in works:
            work.wait(WAIT_S)
        assert found == {rank: sizes for rank in range(1, world)}
    end(comm)


def a_source_can_be_chosen(comm):
    """Rank 0 asks for rank 2's message first, though rank 1's came before it."""
    if comm.rank == 1:
        for to in (2, 0):
            send(comm, to, value=1)
    if comm.rank == 2:
        comm.receive(20, 1, max_nbytes=1)
        time.sleep(0.3)
        send(comm, 0, value=2)
    found = [comm.receive(20, source, max_nbytes=1) for source in (2, 1) if comm.rank == 0]
    end(comm)
    return [(sender, int(message)) for sender, message in found]


def a_message_that_is_too_long_is_dropped(comm):
    """And the next one arrives; none goes to a rank that does not exist."""
    for to in (comm.rank, -1, comm.world_size):
        with pytest.raises(ValueError, match=f"cannot send to rank {to}"):
            send(comm, to)
    if comm.rank:
        for size in (100, 5_000_000, 10):
            send(comm, 0, size)
        comm.receive(20, 0, max_nbytes=0)
        return None
    for limit in (99, 4_999_999):
        with pytest.raises(ValueError, match=f"rank 1 sent .* at most {limit}"):
            comm.receive(20, max_nbytes=limit)
    sender, message = comm.receive(20, max_nbytes=10)
    send(comm, 1, 0)
    return sender, message.numel()


def silence_is_a_timeout_and_can_be_waited_out(comm):
    send(comm, 1 - comm.rank)
    comm.receive(20, max_nbytes=1)
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="no message from any rank"):
        comm.receive(0.3, max_nbytes=1)
    took = time.monotonic() - begun
    end(comm)
    send(comm, 1 - comm.rank, value=1)
    return 0.2 < took < 20, int(comm.receive(20, max_nbytes=1)[1])


def a_rank_that_gives_up_is_reported_once(comm):
    """Rank 2 gives up: the others hear of it once, and go on with each other. Each ends only when
    both have heard.
    """
    comm.all_gather_bytes(b"begin", 20)
    if comm.rank == 2:
        for to in (0, 1):
            send(comm, to)
        comm.abort()
        return None
    assert comm.receive(20, 2, max_nbytes=1)[0] == 2
    other = 1 - comm.rank
    send(comm, other)
    heard = []
    # two messages of the other, the second of which says that it has heard, and the end of rank 2
    while len(heard) < 3:
        try:
            heard.append(str(comm.receive(10, max_nbytes=1)[0]))
        except RankGone as error:
            heard.append(f"gone {error.rank}")
            send(comm, other)
    with pytest.raises(RankGone):
        comm.receive(5, 2, max_nbytes=1)
    with pytest.raises(RankGone):
        for _ in range(100):  # what was sent before the news has come is lost
            comm.start_send(filled(1, 0), 2).wait(5)
    return sorted(heard)


def a_long_message_takes_many_short_waits(comm):
    """Rank 0 waits in slices far shorter than the message takes; a short one of another rank
    gets through meanwhile.
    """
    got = {}
    if comm.rank:
        size = 60_000_000 if comm.rank == 1 else 5
        comm.start_send(filled(size, comm.rank), 0).wait(60)
    while comm.rank == 0 and len(got) < 2:
        try:
            sender, message = comm.receive(0.0005, max_nbytes=60_000_000)
            got[sender] = (message.numel(), bool((message == sender).all()))
        except TimeoutError:
            continue
    comm.all_gather_bytes(b"end", 60)
    return got


def what_nobody_received_stays_behind(comm):
    """And does not reach the next communicator."""
    other, found = 1 - comm.rank, []
    for value, extra in ((0, comm.rank), (7, False)):
        inner = comm.subset([0, 1], WAIT_S)
        send(inner, other, 2, value)
        found.append(inner.receive(20, max_nbytes=10)[1].tolist())
        if extra:
            send(inner, other, 3, 1)
        end(inner)
        inner.close()
    return found


LONG = {1: (60_000_000, True), 2: (5, True)}
BODIES = [  # the number of ranks, what they do, and what each returns
    (3, many_collectives_are_under_way_at_once, [None] * 3),
    (2, a_collective_tells_whether_it_is_done, [[0, 1]] * 2),
    (2, a_second_user_is_refused_at_once, [(True, 0.5, 0.5)] * 2),
    (3, a_source_can_be_chosen, [[(2, 2), (1, 1)], [], []]),
    (2, a_message_that_is_too_long_is_dropped, [(1, 10), None]),
    (2, silence_is_a_timeout_and_can_be_waited_out, [(True, 1)] * 2),
    (3, a_rank_that_gives_up_is_reported_once, [["1", "1", "gone 2"], ["0", "0", "gone 2"], None]),
    (3, a_long_message_takes_many_short_waits, [LONG, {}, {}]),
    (2, what_nobody_received_stays_behind, [[[0, 0], [7, 7]]] * 2),
]


@pytest.mark.every_row
@pytest.mark.parametrize(
    ("world", "body", "wanted"), BODIES, ids=lambda x: getattr(x, "__name__", None)
)
def test_on_every_transport(over, world, body, wanted):
    assert over(world, body) == wanted


def linked(comm, function, *args):
    return function(LinkCommunicator(comm, bits_per_s=1e12), *args)


@pytest.mark.parametrize(("world", "body", "wanted"), [(3, collectives, [None] * 3), *BODIES[:2]])
def test_a_link_does_what_the_communicator_beneath_does(world, body, wanted):
    """`LinkCommunicator` over threads raised NotImplementedError in `Work.is_done`."""
    more = (7,) if body is collectives else ()
    assert run_local(world, linked, body, *more) == wanted


# ---- threads alone -------------------------------------------------------------------------------


def test_a_local_group_has_at_least_one_rank():
    with pytest.raises(ValueError, match="world_size must be at least 1, got 0"):
        LocalCommunicator.group(0)


@each_rank(2, "local")
def test_unlike_collectives_of_threads_are_refused(comm):
    """Ranks that start other collectives, or send other lengths, hear of it."""
    if comm.rank:
        works = [comm.start_max(torch.zeros(2, dtype=torch.int32), Channel.FIRST)]
    else:
        works = [comm.start_all_gather(filled(1, 0), filled(2, 0), Channel.FIRST)]
    n = 1 + comm.rank
    works.append(comm.start_all_gather(filled(n, 0), filled(2 * n, 0), Channel.SECOND))
    for work, why in zip(works, ("different collectives", "bytes, .* expected"), strict=True):
        with pytest.raises(ConnectionError, match=why):
            work.wait(WAIT_S)
