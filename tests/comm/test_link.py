"""The slow link: the same bytes, later; a rank that starts late delays its peers once."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from _ranks import run_local

import gradcomp
from gradcomp.comm import Channel, LinkCommunicator, LocalCommunicator

pytestmark = pytest.mark.timed

NBYTES, BITS_PER_S = 10_000, 1e6  # 80 ms


def gather(comm, late_s, latency_s):
    link = LinkCommunicator(comm, bits_per_s=BITS_PER_S, latency_s=latency_s)
    send = torch.full((NBYTES,), comm.rank, dtype=torch.uint8)
    recv = torch.empty(comm.world_size * NBYTES, dtype=torch.uint8)
    begun = time.monotonic()
    time.sleep(late_s[comm.rank])
    link.start_all_gather(send, recv, Channel.FIRST).wait(30)
    link.close()
    return (
        time.monotonic() - begun,
        recv.view(comm.world_size, NBYTES).unique(dim=1).flatten().tolist(),
    )


@pytest.mark.parametrize(("world", "latency_s"), [(2, 0.0), (3, 0.05)])
def test_a_collective_takes_as_long_as_its_link(world, latency_s):
    wanted = (world - 1) * (8 * NBYTES / BITS_PER_S + latency_s)
    for seconds, ranks in run_local(world, gather, [0.0] * world, latency_s):
        assert ranks == list(range(world))
        assert wanted <= seconds < wanted + 0.5


def test_a_late_rank_delays_its_peers_once():
    times = run_local(2, gather, [0.0, 0.3], 0.0)
    for seconds, _ in times:
        assert 0.38 <= seconds < 0.9


def two_at_once(comm):
    link = LinkCommunicator(comm, bits_per_s=BITS_PER_S)
    tensors = [torch.full((NBYTES,), comm.rank + 10 * i, dtype=torch.uint8) for i in range(2)]
    recvs = [torch.empty(2 * NBYTES, dtype=torch.uint8) for _ in range(2)]
    begun = time.monotonic()
    works = [
        link.start_all_gather(t, r, c)
        for t, r, c in zip(tensors, recvs, (Channel.FIRST, Channel.SECOND), strict=True)
    ]
    works[0].wait(30)
    first = time.monotonic() - begun
    works[1].wait(30)
    link.close()
    return first, time.monotonic() - begun, [r[-1].item() for r in recvs]


def test_two_channels_share_the_link():
    for first, second, last in run_local(2, two_at_once):
        assert 0.08 <= first < 0.16 <= second < 0.6
        assert last == [1, 11]


def average(comm, slow):
    link = LinkCommunicator(comm, bits_per_s=1e8, latency_s=1e-4) if slow else comm
    x = torch.randn(5000, generator=torch.Generator().manual_seed(comm.rank))
    gradcomp.all_reduce(x, gradcomp.TernGrad(), link)
    return x


def test_averages_are_those_of_the_communicator_beneath():
    assert torch.equal(run_local(3, average, True)[0], run_local(3, average, False)[0])


def test_a_silent_peer_times_out():
    comms = LocalCommunicator.group(2)
    recv = torch.empty(20, dtype=torch.uint8)
    work = LinkCommunicator(comms[0], bits_per_s=1e9).start_all_gather(
        recv[:10], recv, Channel.FIRST
    )
    with pytest.raises(TimeoutError):
        work.wait(0.2)
    for bits_per_s in (1.0, 5e-324):
        work = LinkCommunicator(comms[0], bits_per_s=bits_per_s).start_all_gather(
            recv[:10], recv, Channel.SECOND
        )
        with pytest.raises(TimeoutError, match="not sent"):
            work.wait(0.1)
        assert not work.is_done()


@pytest.mark.parametrize("end", ["close", "abort"])
def test_closing_ends_what_is_under_way(end):
    link = LinkCommunicator(LocalCommunicator.group(2)[0], bits_per_s=1.0)
    recv = torch.empty(20, dtype=torch.uint8)
    works = [
        link.start_all_gather(recv[:10], recv, channel)
        for channel in (Channel.FIRST, Channel.FIRST, Channel.SECOND)
    ]
    threading.Timer(0.2, getattr(link, end)).start()
    begun = time.monotonic()
    for work in works:
        with pytest.raises(ConnectionError, match="closed"):
            work.wait(60)
        assert work.is_done()
    assert time.monotonic() - begun < 30
    with pytest.raises(ConnectionError, match="closed"):
        link.start_all_gather(recv[:10], recv, Channel.FIRST)
    link.close()


def test_no_process_waits_for_a_slow_link():
    code = """if True:
        import torch
        from gradcomp.comm import Channel, LinkCommunicator, LocalCommunicator
        comm = LocalCommunicator.group(2)[0]
        recv = torch.empty(20, dtype=torch.uint8)
        link = LinkCommunicator(comm, bits_per_s=0.1)
        work = link.start_all_gather(recv[:10], recv, Channel.FIRST)
        try:
            work.wait(0.1)
        except TimeoutError:
            print("not sent")
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "not sent\n", done.stderr


def test_what_the_communicator_beneath_refuses_is_told_to_who_waits(monkeypatch):
    comm = LocalCommunicator.group(2)[0]

    def refuse(*_):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(comm, "start_all_gather", refuse)
    recv = torch.empty(20, dtype=torch.uint8)
    work = LinkCommunicator(comm, bits_per_s=1e9).start_all_gather(recv[:10], recv, Channel.FIRST)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="connection reset"):
            work.wait(10)
    assert work.is_done()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits_per_s": 0}, "bits_per_s"),
        ({"bits_per_s": -1e9}, "bits_per_s"),
        ({"bits_per_s": float("nan")}, "bits_per_s"),
        ({"bits_per_s": 1e9, "latency_s": -1}, "latency_s"),
        ({"bits_per_s": 1e9, "latency_s": float("inf")}, "latency_s"),
    ],
)
def test_links_that_cannot_be(options, text):
    with pytest.raises(ValueError, match=text):
        LinkCommunicator(LocalCommunicator.group(1)[0], **options)
