"""Messages from rank to rank over every communicator: order, any source, sizes, and peers that
go.
"""

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from _held import descriptors
from _ranks import run_local

from gradcomp import PeerLost
from gradcomp.comm import RankGone, addresses, handshake
from gradcomp.comm.mailbox import Mailbox


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
        works.append(
            comm.start_send(message.sum(dtype=torch.int64).view(1).view(torch.uint8), sender)
        )
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
    return 0.2 < took < 20, int(comm.receive(20, max_nbytes=1)[1])


def test_silence_is_a_timeout_and_can_be_waited_out(over):
    assert over(2, silence) == [(True, 1)] * 2


def one_goes(comm):
    """Rank 2 gives up: the others are told once, and go on with each other. Each ends only when
    both have been told.
    """
    comm.all_gather_bytes(b"begin", 20)
    if comm.rank == 2:
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 0).wait(20)
        comm.start_send(torch.zeros(1, dtype=torch.uint8), 1).wait(20)
        comm.abort()
        return None
    assert comm.receive(20, 2, max_nbytes=1)[0] == 2
    word = torch.ones(1, dtype=torch.uint8)
    comm.start_send(word, 1 - comm.rank).wait(20)
    heard = []
    # two words of the other, the second of which says that it was told, and the end of rank 2
    while len(heard) < 3:
        try:
            heard.append(comm.receive(10, max_nbytes=1)[0])
        except RankGone as error:
            heard.append(f"gone {error.rank}")
            comm.start_send(word, 1 - comm.rank).wait(20)
    with pytest.raises(RankGone):
        comm.receive(5, 2, max_nbytes=1)
    with pytest.raises(RankGone):
        for _ in range(100):  # what was sent before the news has come is lost
            comm.start_send(torch.zeros(1, dtype=torch.uint8), 2).wait(5)
    return sorted(map(str, heard))


def test_a_rank_that_gives_up_is_told_once_and_the_others_go_on(over):
    assert over(3, one_goes)[:2] == [["1", "1", "gone 2"], ["0", "0", "gone 2"]]


def in_pieces(comm):
    """Rank 0 waits in slices far shorter than the message takes; a short one of another rank
    gets through meanwhile.
    """
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


# ---- a mailbox: who may connect ------------------------------------------------------------------


@contextlib.contextmanager
def nothing_left():
    """Fail unless threads and file descriptors of before are all that is left soon afterwards."""

    def open_now():
        return descriptors(), {t.name for t in threading.enumerate()}

    def left():
        now = open_now()
        # what an earlier test left may have gone meanwhile
        return (now[0] - before[0], now[1] - before[1])

    before = open_now()
    yield
    deadline = time.monotonic() + 20
    while (left()[0] > 0 or left()[1]) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert left()[0] <= 0 and not left()[1]


def boxes(comm, work, change=lambda rank, cards: cards, timeout_s=20.0):
    """Return work(mailbox, cards) of a rank; `change` sees, and may replace, the cards that it
    gets.
    """
    seen = []

    def share(card):
        seen.append(change(comm.rank, [json.loads(c) for c in comm.all_gather_bytes(card, 20)]))
        return [json.dumps(c).encode() for c in seen[-1]]

    box = Mailbox(comm.rank, comm.world_size, share, timeout_s)
    try:
        return work(box, seen[-1])
    finally:
        comm.all_gather_bytes(b"end", 20)
        box.close()


def greetings(box, cards):
    if box._post.rank:
        box.start_send(torch.tensor([box._post.rank], dtype=torch.uint8), 0).wait(20)
        return cards[0]["address"]
    return sorted(int(box.receive(20, None, 1)[1]) for _ in range(box._post.world_size - 1))


@pytest.mark.parametrize(
    ("interface", "address"), [("", "127.0.0.1"), ("lo", "127.0.0.1"), ("6", "::1")]
)
def test_ranks_of_one_host_listen_on_the_loopback_only(monkeypatch, interface, address):
    if interface == "6":
        if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
            pytest.skip("no IPv6 here")
        monkeypatch.setattr(addresses, "LOOPBACKS", ("::1",))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "" if interface == "6" else interface)
    with nothing_left():
        assert run_local(3, boxes, greetings) == [[1, 2], address, address]


def test_ranks_of_several_hosts_listen_where_the_host_name_leads(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "master")
    routes = {"here": ["127.0.1.1", "203.0.113.7"], "master": []}
    monkeypatch.setattr(addresses.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(
        addresses.socket,
        "getaddrinfo",
        lambda host, port, type: [(0, 0, 0, "", (a, 0)) for a in routes[host]],
    )
    with pytest.raises(
        OSError, match=r"'here' resolves to no address.*203.0.113.7: .*set GLOO_SOCKET_IFNAME"
    ):
        addresses.listen(False, 1)  # not 0.0.0.0, and not the loopback, where nobody would come
    monkeypatch.setattr(addresses, "_is_public", lambda address: True)
    with addresses.listen(False, 1) as listener:
        assert listener.getsockname()[0] == "127.0.1.1"


def test_an_interface_that_is_not_there_is_told_to_all_ranks(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with nothing_left():
        for error in run_local(2, caught):
            assert (
                "rank 0 cannot listen" in error
                and "GLOO_SOCKET_IFNAME=none7: no such interface" in error
            )


def caught(comm, change=lambda rank, cards: cards, patience_s=20.0):
    """Return what a rank is told; the last one fails at once, the others when their patience
    ends.
    """
    with pytest.raises(PeerLost) as error:
        boxes(
            comm,
            lambda box, cards: None,
            change,
            20.0 if comm.rank == comm.world_size - 1 else patience_s,
        )
    return str(error.value)


def another_key(rank, cards):
    return [c | {"key": "00" * 32} if rank and "key" in c else c for c in cards]


def another_rank(rank, cards):
    """Rank 2 is told that rank 1 is where rank 0 is, and the other way round."""
    return [cards[1], cards[0], *cards[2:]] if rank == 2 and "port" in cards[0] else cards


@pytest.mark.parametrize(("world", "change"), [(2, another_key), (3, another_rank)])
def test_a_rank_that_proves_nothing_is_refused(world, change):
    with nothing_left():
        *others, last = run_local(world, caught, change, 3.0)
        assert "somebody else answers there, not rank" in last
        assert all(f"no connection with ranks [{world - 1}]" in error for error in others)


def among_strangers(comm):
    """Before rank 1 connects to rank 0, three strangers do: silent, asking for a proof, sending
    what is no greeting.
    """
    strangers = []

    def change(rank, cards):
        if rank == 1 and "port" in cards[0]:
            there = cards[0]["address"], cards[0]["port"]
            strangers.extend(socket.create_connection(there, 20) for _ in range(3))
            strangers[1].sendall(handshake.MAGIC + (1).to_bytes(4, "little") + bytes(16))
            strangers[2].sendall(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        return cards

    begun = time.monotonic()
    found = boxes(comm, greetings, change)
    took = time.monotonic() - begun
    for stranger in strangers:
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):  # an end, not a timeout
                pass
        stranger.close()
    return found, took < 9  # the silent one may stay for 10 s


def test_strangers_neither_get_in_nor_hold_up_the_ranks(caplog):
    """A silent one was a CancelledError with its traceback in asyncio's log."""
    with nothing_left():
        (got, soon), (_, soon_too) = run_local(2, among_strangers)
        assert got == [1] and soon and soon_too
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]


async def relayed(change):
    """Return what connector and listener say when `change` alters what the listener answers."""
    key, ends = bytes(range(32)), asyncio.Queue()

    async def serve(reader, writer):
        try:
            await ends.put(await handshake.answer(reader, writer, key, 0, 2))
        except Exception as error:
            await ends.put(error)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        heard = await change(reader, writer, key)
    finally:
        writer.close()
        server.close()
    return heard, await asyncio.wait_for(ends.get(), 5)


def test_both_ends_prove_themselves_and_no_proof_serves_twice():
    async def honest(reader, writer, key):
        await handshake.greet(reader, writer, key, 1, 0)

    async def mirror(reader, writer, key):
        writer.write(handshake.MAGIC + (1).to_bytes(4, "little") + bytes(16))
        answer = await reader.readexactly(48)
        writer.write(answer[16:])
        return key in answer

    async def wrong_key(reader, writer, key):
        with pytest.raises(handshake.Stranger):
            await handshake.greet(reader, writer, bytes(32), 1, 0)

    async def wrong_rank(reader, writer, key):
        with pytest.raises(handshake.Stranger):
            await handshake.greet(reader, writer, key, 1, 3)

    async def no_greeting(reader, writer, key):
        writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")

    assert asyncio.run(relayed(honest)) == (None, 1)
    for stranger in (mirror, wrong_key, wrong_rank, no_greeting):
        heard, end = asyncio.run(relayed(stranger))
        assert not heard and isinstance(end, (handshake.Stranger, asyncio.IncompleteReadError)), (
            stranger
        )
    assert isinstance(asyncio.run(relayed(mirror))[1], handshake.Stranger)


def test_a_mailbox_that_is_dropped_ends_its_thread():
    with nothing_left():
        box = Mailbox(0, 1, lambda card: [card], 5)
        del box
