"""Messages from rank to rank over every communicator: order, any source, sizes, and peers that go."""

import time

import pytest
import torch

from gradcomp.comm import RankGone


def ping(comm, sizes):
    """Every rank sends rank 0 a message of each size; rank 0 sends the sum of its bytes back."""
    if comm.rank:
        for size in sizes:
            comm.start_send(torch.full((size,), comm.rank, dtype=torch.uint8), 0).wait(20)
        answers = [comm.receive(20, 0, max_nbytes=8) for _ in sizes]
        comm.all_gather_bytes(b"end", 20)  # over TCP a rank that closes is a rank that has gone
        return [int(a.view(torch.int64)) for _, a in answers]
    got = {rank: [] for rank in range(1, comm.world_size)}
    works = []
    for _ in range((comm.world_size - 1) * len(sizes)):
        sender, message = comm.receive(20, max_nbytes=max(sizes))
        got[sender].append(message.numel())
        works.append(comm.start_send(message.sum(dtype=torch.int64).view(1).view(torch.uint8), sender))
    for work in works:
        work.wait(20)
    comm.all_gather_bytes(b"end", 20)
    return got


@pytest.mark.parametrize("world", [2, 4])
def test_messages_arrive_whole_and_in_order_from_any_rank(over, world):
    sizes = [0, 1, 7, 100_000, 5_000_001, 3]
    got, *answers = over(world, ping, sizes)
    assert got == {rank: sizes for rank in range(1, world)}
    assert answers == [[rank * size for size in sizes] for rank in range(1, world)]


def from_one(comm):
    """Rank 0 asks for rank 2's message first, though rank 1's came before it."""
    if comm.rank == 1:
        comm.start_send(torch.tensor([1], dtype=torch.uint8), 2).wait(20)
        comm.start_send(torch.tensor([1], dtype=torch.uint8), 0).wait(20)
    if comm.rank == 2:
        comm.receive(20, 1, max_nbytes=1)
        time.sleep(0.3)
        comm.start_send(torch.tensor([2], dtype=torch.uint8), 0).wait(20)
    order = []
    if comm.rank == 0:
        for source in (2, 1):
            sender, message = comm.receive(20, source, max_nbytes=1)
            order.append((sender, int(message)))
    comm.all_gather_bytes(b"end", 20)
    return order


def test_a_source_can_be_chosen(over):
    assert over(3, from_one)[0] == [(2, 2), (1, 1)]


def too_long(comm):
    if comm.rank:
        for size in (100, 5_000_000, 10):
            comm.start_send(torch.zeros(size, dtype=torch.uint8), 0).wait(20)
        comm.receive(20, 0, max_nbytes=0)
        return None
    refused = []
    for limit in (99, 4_999_999):
        with pytest.raises(ValueError, match=f"at most {limit}") as error:
            comm.receive(20, max_nbytes=limit)
        refused.append("rank 1" in str(error.value))
    sender, message = comm.receive(20, max_nbytes=10)
    comm.start_send(torch.zeros(0, dtype=torch.uint8), 1).wait(20)
    return refused, sender, message.numel()


def test_a_message_that_is_too_long_is_dropped_and_the_next_one_arrives(over):
    assert over(2, too_long)[0] == ([True, True], 1, 10)


def silence(comm):
    comm.start_send(torch.zeros(1, dtype=torch.uint8), 1 - comm.rank).wait(20)
    comm.receive(20, max_nbytes=1)
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        comm.receive(0.3, max_nbytes=1)
    took = time.monotonic() - begun
    comm.all_gather_bytes(b"end", 20)
    comm.start_send(torch.ones(1, dtype=torch.uint8), 1 - comm.rank).wait(20)
    return 0.2 < took < 2, int(comm.receive(20, max_nbytes=1)[1])


def test_silence_is_a_timeout_and_can_be_waited_out(over):
    assert over(2, silence) == [(True, 1)] * 2


def one_goes(comm):
    """Rank 2 gives up: the others are told once, and go on with each other."""
    comm.all_gather_bytes(b"begin", 20)
    if comm.rank == 2:
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 0).wait(20)
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 1).wait(20)
        comm.abort()
        return None
    assert comm.receive(20, 2, max_nbytes=1)[0] == 2
    comm.start_send(torch.ones(1, dtype=torch.uint8), 1 - comm.rank).wait(20)
    heard = []
    while len(heard) < 2:  # the other's word, and the end of rank 2
        try:
            heard.append(comm.receive(10, max_nbytes=1)[0])
        except RankGone as error:
            heard.append(f"gone {error.rank}")
    with pytest.raises(RankGone):
        comm.receive(5, 2, max_nbytes=1)
    with pytest.raises(RankGone):
        for _ in range(100):  # what was sent before the news has come is lost
            comm.start_send(torch.zeros(1, dtype=torch.uint8), 2).wait(5)
    return sorted(map(str, heard))


def test_a_rank_that_gives_up_is_told_once_and_the_others_go_on(over):
    assert over(3, one_goes)[:2] == [["1", "gone 2"], ["0", "gone 2"]]


def in_pieces(comm):
    """Rank 0 waits in slices far shorter than the message takes; a short one of another rank gets through meanwhile."""
    if comm.rank:
        size = 60_000_000 if comm.rank == 1 else 5
        comm.start_send(torch.full((size,), comm.rank, dtype=torch.uint8), 0).wait(60)
        comm.all_gather_bytes(b"end", 60)
        return None
    got, slices = {}, 0
    while len(got) < 2:
        try:
            sender, message = comm.receive(0.0005, max_nbytes=60_000_000)
            got[sender] = (message.numel(), bool((message == sender).all()))
        except TimeoutError:
            slices += 1
    comm.all_gather_bytes(b"end", 60)
    return got


def test_a_long_message_arrives_over_many_short_waits(over):
    assert over(3, in_pieces)[0] == {1: (60_000_000, True), 2: (5, True)}


def leave_one_behind(comm):
    """A message that nobody receives does not reach the next communicator."""
    other = 1 - comm.rank
    first = comm.subset([0, 1], 20)
    first.start_send(torch.zeros(1, dtype=torch.uint8), other).wait(20)
    first.receive(20, max_nbytes=1)
    if comm.rank:
        first.start_send(torch.ones(3, dtype=torch.uint8), 0).wait(20)
    first.all_gather_bytes(b"sent", 20)
    first.close()
    second = comm.subset([0, 1], 20)
    second.start_send(torch.full((2,), 7, dtype=torch.uint8), other).wait(20)
    found = second.receive(20, max_nbytes=10)[1].tolist()
    second.all_gather_bytes(b"end", 20)
    second.close()
    return found


def test_what_nobody_received_does_not_reach_the_next_communicator(over):
    assert over(2, leave_one_behind) == [[7, 7]] * 2


def nowhere(comm):
    refused = []
    for to in (comm.rank, -1, comm.world_size):
        with pytest.raises(ValueError, match="cannot send to rank") as error:
            comm.start_send(torch.zeros(1, dtype=torch.uint8), to)
        refused.append(str(to) in str(error.value))
    return refused


def test_a_message_to_nowhere_is_refused(over):
    assert over(2, nowhere) == [[True] * 3] * 2
