"""A mailbox: where ranks listen, who may connect, and what is left afterwards."""

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
from gradcomp.comm import RankGone, addresses, mailbox
from gradcomp.comm.mailbox import Mailbox
from gradcomp.errors import peers_answer

WEB = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"  # no greeting
RANK_1 = mailbox.MAGIC + (1).to_bytes(4, "little") + bytes(16)


@contextlib.contextmanager
def nothing_left():
    """Fail unless threads and file descriptors of before are all that is left soon afterwards."""

    def open_now():
        return descriptors(), {t.name for t in threading.enumerate()}

    def is_clean():  # what an earlier test left may have gone meanwhile
        now = open_now()
        return now[0] <= before[0] and now[1] <= before[1]

    with peers_answer("setup"):
        pass  # a process's first wait opens the page that `doctor --attach` reads
    before = open_now()
    yield
    deadline = time.monotonic() + 20
    while not is_clean() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert is_clean()


def boxes(comm, work, change=lambda rank, cards: cards, timeout_s=20.0):
    """Return work(rank, mailbox, cards); `change` sees, and may replace, the cards that a rank
    gets.
    """
    seen = []

    def share(card):
        seen.append(change(comm.rank, [json.loads(c) for c in comm.all_gather_bytes(card, 20)]))
        return [json.dumps(c).encode() for c in seen[-1]]

    box = Mailbox(comm.rank, comm.world_size, share, timeout_s)
    try:
        return work(comm, box, seen[-1])
    finally:
        comm.all_gather_bytes(b"end", 20)
        box.close()


def greetings(comm, box, cards):
    if comm.rank:
        box.start_send(torch.tensor([comm.rank], dtype=torch.uint8), 0).wait(20)
        return cards[0]["address"]
    return sorted(int(box.receive(20, None, 1)[1]) for _ in range(comm.world_size - 1))


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


def test_the_address_on_the_way_to_the_master_is_that_of_a_route(monkeypatch):
    assert not list(addresses._on_the_way_to("127.0.0.1"))  # which other hosts cannot use
    monkeypatch.setattr(addresses, "_is_public", lambda address: True)
    assert list(addresses._on_the_way_to("127.0.0.1")) == ["127.0.0.1"]
    assert not list(addresses._on_the_way_to("no-such-host.invalid"))


SENT = [16 << 20, 16 << 20, 16 << 20, 3]  # above what sockets hold, below what takes CLOSE_S


def closes_at_once(comm, box, cards):
    """Rank 0 closes while its messages wait for a rank that is late."""
    if comm.rank == 0:
        for size in SENT:
            box.start_send(torch.zeros(size, dtype=torch.uint8), 1)
        box.close()
        return None
    time.sleep(0.5)
    return [box.receive(20, None, max_nbytes=1 << 30)[1].numel() for _ in SENT]


def test_messages_that_wait_arrive_where_their_sender_closes():
    assert run_local(2, boxes, closes_at_once)[1] == SENT


def takes_less_than_before(comm, box, cards):
    """Rank 0 starts to receive a message, then takes only shorter ones."""
    if comm.rank:
        for size in (100, 7):
            box.start_send(torch.zeros(size, dtype=torch.uint8), 0).wait(20)
        return None
    while not box._post.incoming:
        time.sleep(0.01)
    with pytest.raises(TimeoutError):  # accepted, but not there yet
        box.receive(0, 1, 100)
    with pytest.raises(ValueError, match="rank 1 sent 100 bytes, at most 99 expected"):
        box.receive(20, 1, 99)
    return box.receive(20, 1, 99)[1].numel()


def test_the_limit_of_the_call_that_returns_a_message_counts():
    """A message that an earlier call with a larger limit had accepted was returned."""
    with nothing_left():
        assert run_local(2, boxes, takes_less_than_before) == [7, None]


def closes_while_messages_wait(comm, box, cards):
    """Rank 0 closes while a message waits that it has not accepted."""
    peer = 1 - comm.rank
    if comm.rank:
        box.start_send(torch.zeros(7, dtype=torch.uint8), 0).wait(20)
        return
    while not box._post.incoming:
        time.sleep(0.01)
    box.close()
    for call in (lambda: box.receive(20, peer, 7), lambda: box.start_send(torch.zeros(1), peer)):
        with pytest.raises(RankGone):
            call()


def test_a_mailbox_that_is_closed_says_so():
    """Where a message had not been received, it was "Event loop is closed"."""
    with nothing_left():
        run_local(2, boxes, closes_while_messages_wait)


# ---- ranks that do not get in --------------------------------------------------------------------


def refused(comm, change=lambda rank, cards: cards, patience_s=20.0):
    """Return the error of a rank; the last one fails at once, the others when their patience
    ends.
    """
    is_last = comm.rank == comm.world_size - 1
    with pytest.raises(PeerLost) as error:
        boxes(comm, greetings, change, 20.0 if is_last else patience_s)
    return str(error.value)


def test_an_interface_that_is_not_there_is_reported_on_all_ranks(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with nothing_left():
        for error in run_local(2, refused):
            assert "rank 0 cannot listen" in error
            assert "GLOO_SOCKET_IFNAME=none7: no such interface" in error


def another_key(rank, cards):
    return [c | {"key": "00" * 32} if rank and "key" in c else c for c in cards]


def another_rank(rank, cards):
    """Rank 2 reads that rank 1 is where rank 0 is, and the other way round."""
    return [cards[1], cards[0], *cards[2:]] if rank == 2 and "port" in cards[0] else cards


@pytest.mark.parametrize(("world", "change"), [(2, another_key), (3, another_rank)])
def test_a_rank_that_proves_nothing_is_refused(world, change):
    with nothing_left():
        *others, last = run_local(world, refused, change, 3.0)
        assert "another process answers there, not rank" in last
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
            strangers[1].sendall(RANK_1)
            strangers[2].sendall(WEB)
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
            await ends.put(await mailbox.answer(reader, writer, key, 0, 2))
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
        await mailbox.greet(reader, writer, key, 1, 0)

    async def mirror(reader, writer, key):
        writer.write(RANK_1)
        answer = await reader.readexactly(48)
        writer.write(answer[16:])
        return key in answer

    assert asyncio.run(relayed(honest)) == (None, 1)
    heard, end = asyncio.run(relayed(mirror))
    assert heard is False and isinstance(end, mailbox.Stranger)


def test_a_mailbox_that_is_dropped_ends_its_thread():
    with nothing_left():
        box = Mailbox(0, 1, lambda card: [card], 5)
        del box
