"""The slow link: the same bytes, later; a rank that starts late delays its peers once."""

import sys
import threading
import time

import pytest
import torch
from _held import settled
from _ranks import each_rank, output_of

from gradcomp.comm import Channel, LinkCommunicator, LocalCommunicator

pytestmark = pytest.mark.timed

NBYTES, BITS_PER_S = 10_000, 1e6  # 80 ms
FIRST, SECOND = Channel.FIRST, Channel.SECOND


def one_rank(world=2, **options):
    return LinkCommunicator(LocalCommunicator.group(world)[0], **options)


def start(comm, channel, nbytes=10, value=0):
    """Begin to gather; return the work and where the bytes go."""
    send = torch.full((nbytes,), value, dtype=torch.uint8)
    recv = torch.empty(comm.world_size * nbytes, dtype=torch.uint8)
    return comm.start_all_gather(send, recv, channel), recv


@pytest.mark.parametrize(
    ("world", "late_s", "latency_s", "channels", "wanted"),
    [
        (2, 0, 0.0, [FIRST], [0.08]),
        (3, 0, 0.05, [FIRST], [0.26]),
        (2, 0.3, 0.0, [FIRST], [0.38]),  # rank 1 is late: its peer is delayed once
        (2, 0, 0.0, [FIRST, SECOND], [0.08, 0.16]),  # channels share the link
    ],
)
@each_rank(by="local")
def test_collectives_take_as_long_as_their_link(comm, world, late_s, latency_s, channels, wanted):
    """`wanted` are the seconds until each of some collectives, started at once, has ended."""
    link = LinkCommunicator(comm, bits_per_s=BITS_PER_S, latency_s=latency_s)
    begun = time.monotonic()
    time.sleep(late_s * comm.rank)
    under_way = [start(link, c, NBYTES, comm.rank + 10 * k) for k, c in enumerate(channels)]
    for (work, _), least in zip(under_way, wanted, strict=True):
        work.wait(30)
        assert least <= time.monotonic() - begun < least + 0.5
    for number, (_, recv) in enumerate(under_way):
        found = recv.view(world, NBYTES).unique(dim=1).flatten().tolist()
        assert found == [10 * number + rank for rank in range(world)]
    link.close()


@each_rank(2, "local")
def test_messages_go_over_the_link(comm):
    """A message takes as long as its bytes."""
    link, begun = LinkCommunicator(comm, bits_per_s=BITS_PER_S), time.monotonic()
    if comm.rank:
        link.start_send(torch.zeros(NBYTES, dtype=torch.uint8), 0).wait(20)
    else:
        sender, message = link.receive(20, max_nbytes=NBYTES)
        assert sender == 1 and message.numel() == NBYTES and time.monotonic() - begun >= 0.08


@each_rank(4, "local")
def test_a_link_slows_what_leaves_the_node(comm):
    """Two nodes of two ranks: what stays on a node takes no time, what crosses goes over the one
    link of the rank.
    """
    link = LinkCommunicator(comm, bits_per_s=1e5)  # 1,000 bytes: 80 ms
    home, seconds = comm.rank // 2, []
    inside = link.node_subset([2 * home, 2 * home + 1], 20)
    across = link.subset([comm.rank % 2, comm.rank % 2 + 2], 20)
    for comms, nbytes in (
        ([inside], 1_000_000),
        ([across], 1000),
        ([across, across.duplicate()], 1000),
    ):
        begun = time.monotonic()
        for work, _ in [start(c, FIRST, nbytes) for c in comms]:
            work.wait(20)
        seconds.append(time.monotonic() - begun)
    assert seconds[0] < 15  # 80 s over the link
    assert seconds[1] >= 0.08 and seconds[2] >= 0.16


def test_a_silent_peer_times_out():
    for bits_per_s, why in ((1e9, "no answer"), (1.0, "not sent"), (5e-324, "not sent")):
        work, _ = start(one_rank(bits_per_s=bits_per_s), FIRST)
        with pytest.raises(TimeoutError, match=why):
            work.wait(0.2)
        assert bits_per_s > 1 or not work.is_done()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_closing_ends_what_is_under_way(end):
    link = one_rank(bits_per_s=1.0)
    works = [start(link, channel)[0] for channel in (FIRST, FIRST, SECOND)]
    threading.Timer(0.2, getattr(link, end)).start()
    begun = time.monotonic()
    for work in works:
        with pytest.raises(ConnectionError, match="closed"):
            work.wait(60)
        assert work.is_done()
    assert time.monotonic() - begun < 30
    with pytest.raises(ConnectionError, match="closed"):
        start(link, FIRST)
    link.close()


def test_a_link_that_is_dropped_ends_its_threads():
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile

    def own():
        return len(set(threading.enumerate()) - before)

    link = one_rank(1, bits_per_s=1e9)
    assert link.all_gather_bytes(b"x", 5) == [b"x"]
    assert own() == 1
    del link
    assert settled(own, 0) == 0


def test_no_process_waits_for_a_slow_link():
    code = """if True:
        import torch
        from gradcomp.comm import Channel, LinkCommunicator, LocalCommunicator
        link = LinkCommunicator(LocalCommunicator.group(2)[0], bits_per_s=0.1)
        try:
            link.all_gather_bytes(b"x", 0.1)
        except TimeoutError:
            print("not sent")
    """
    done = output_of(sys.executable, "-c", code)
    assert done.stdout == "not sent\n", done.stderr


def test_what_the_communicator_beneath_refuses_is_raised_where_one_waits(monkeypatch):
    def refuse(*_):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(LocalCommunicator, "_start_all_gather", refuse)
    work, _ = start(one_rank(bits_per_s=1e9), FIRST)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            work.wait(10)
    assert work.is_done()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"bits_per_s": 0}, ValueError),
        ({"bits_per_s": -1e9}, ValueError),
        ({"bits_per_s": float("nan")}, ValueError),
        ({"bits_per_s": "10mbit"}, TypeError),
        ({"bits_per_s": 1e9, "latency_s": -1}, ValueError),
        ({"bits_per_s": 1e9, "latency_s": float("inf")}, ValueError),
        ({"bits_per_s": 1e9, "latency_s": True}, TypeError),
    ],
)
def test_links_that_cannot_be(options, kind):
    with pytest.raises(kind, match=[*options][-1]):
        one_rank(**options)
    with pytest.raises(TypeError, match="must be a communicator"):
        LinkCommunicator("gloo", bits_per_s=1e9)
