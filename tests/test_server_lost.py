"""The parameter server when ranks die, fall silent or take no replies: named errors in bounded
time.
"""

import queue
import threading
import time

import pytest
import torch
from _ranks import run_local
from _serving import Done, as_tensor, caught, meet, play

from gradcomp.comm import LocalCommunicator, Work
from gradcomp.errors import PeerLost
from gradcomp.server import ParameterClient, messages, serve
from gradcomp.server.messages import Kind, Message

# ---- ranks that die or are silent (communicators of threads: a closed one is a dead rank)
# ----------------------------


def worker_dies(comm, farewell, pushed):
    if comm.rank == 3:
        return serve(comm, 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=20)
    for key in ("done", "half", "untouched"):
        client.init_parameter(key, [1])
    client.push_parameter("done", 1.0)
    client.pull_parameter("done", "sum")
    if comm.rank == 2:
        for _ in range(2):
            pushed.acquire(timeout=20)
        if farewell:
            client.close()
        comm.abort()
        return None
    begun = time.monotonic()
    client.push_parameter("half", 1.0)
    pushed.release()
    pull = caught(client.pull_parameter, "half", "sum")
    waited = time.monotonic() - begun
    again = caught(client.pull_parameter, "half", "sum")
    push = caught(client.push_parameter, "half", 1.0)
    new = caught(client.push_parameter, "untouched", 1.0)
    done = float(client.pull_parameter("done", "sum"))
    client.close()
    return waited, [pull, again, push, new], done


@pytest.mark.parametrize("farewell", [False, True])
def test_a_worker_that_goes_in_the_middle_of_a_round(farewell):
    first, second, _, stats = run_local(
        4, worker_dies, farewell, threading.Semaphore(0), timeout_s=40
    )
    for waited, errors, done in (first, second):
        assert waited < 15
        for error in errors:
            assert isinstance(error, PeerLost) and "rank 2" in str(error), error
        assert [e.phase for e in errors] == ["pull", "pull", "push", "push"]
        assert done == 3.0
    assert stats.lost == ([] if farewell else [2])


def server_dies(comm, how, both):
    if comm.rank == 2:
        for _ in range(3):  # two inits and one push
            rank, raw = comm.receive(20, max_nbytes=1000)
            comm.start_send(
                messages.pack(
                    Message(Kind.OK, messages.request_number(raw), 0, body=as_tensor(bytes(8)))
                ),
                rank,
            )
        if how == "dies":
            comm.abort()
        return None
    client = ParameterClient(comm, 1, timeout_s=20.0)
    client.init_parameter("x", [1])
    both.wait(20)
    client._requests.timeout_s = 0.4
    begun, error = time.monotonic(), None
    while error is None:
        error = caught(client.push_parameter, "x", 1.0) or caught(client.pull_parameter, "x", "sum")
    waited = time.monotonic() - begun
    again = caught(client.pull_parameter, "x", "sum")
    client.close()
    return waited, error, again


@pytest.mark.parametrize("how", ["dies", "falls silent"])
@pytest.mark.slow
def test_a_server_that_is_lost_is_told_in_bounded_time(how):
    for waited, error, again in run_local(3, server_dies, how, threading.Barrier(2), timeout_s=40)[
        :2
    ]:
        assert waited < 15
        for e in (error, again):
            assert (
                isinstance(e, PeerLost)
                and "server" in str(e)
                and e.phase in ("push", "pull")
                and e.bucket == -1
            )


def late_worker(client, index):
    client.init_parameter("x", [1])
    if index == 1:
        meet(client)  # when the other has given it up
        client.push_parameter("x", 2.0)
        return client.pull_parameter("x", "sum")
    client.push_parameter("x", 1.0)
    pull = client._ask(Kind.PULL, "x", 0, None, "sum")
    error = caught(client._requests.wait, pull, time.monotonic() + 0.4)
    meet(client)
    return error, float(client.pull_parameter("x", "sum")), float(client.pull_parameter("x", "sum"))


def test_a_silent_worker_is_named_and_may_still_come(over):
    (error, *after), late, _ = over(3, play, 1, late_worker)
    assert isinstance(error, PeerLost) and error.phase == "pull" and 0.4 <= error.waited_s < 15
    assert "ranks [1]" in str(error) and "'x'" in str(error)
    assert after == [3.0, 3.0] and float(late) == 3.0


class Slow(LocalCommunicator):
    """A server's communicator that keeps one reply back: it leaves when somebody calls what is
    in `held`.
    """

    def __init__(self, comm, held=None):
        self.__dict__.update(comm.__dict__)
        self.replies, self.held = 0, held

    def start_send(self, message, to):
        self.replies += 1
        if self.replies == 2:
            late = message.clone()
            self.held.put(lambda: LocalCommunicator.start_send(self, late, to))
            return Done()
        return super().start_send(message, to)


def slow_server(comm, held):
    if comm.rank == 1:
        return serve(Slow(comm, held), 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=20.0)
    client.init_parameter("x", [1])
    client._requests.timeout_s = 0.3
    error = caught(client.push_parameter, "x", 1.0)
    client._requests.timeout_s = 20.0
    held.get(timeout=20)()  # the old reply is there now
    value = float(client.pull_parameter("x", "sum"))
    client.close()
    return error, value


def test_a_late_reply_is_not_taken_for_another():
    error, value = run_local(2, slow_server, queue.SimpleQueue(), timeout_s=60)[0]
    assert isinstance(error, PeerLost) and error.phase == "push" and "silent" in str(error)
    assert value == 1.0


class Stuck(Slow):
    """A server's communicator whose messages to rank 0 never arrive, as those to a stopped
    process.
    """

    def start_send(self, message, to):
        return Never() if to == 0 else LocalCommunicator.start_send(self, message, to)


class Never(Work):
    def is_done(self):
        return False

    def wait(self, timeout_s):
        time.sleep(min(timeout_s, 15.0))
        raise TimeoutError


def stuck_client(comm):
    if comm.rank == 2:
        return serve(Stuck(comm), 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=0.3 if comm.rank == 0 else 20.0)
    error = caught(client.init_parameter, "x", [1])
    if comm.rank == 1:
        client.init_parameter("a", [1], asynchronous=True, learning_rate=1.0, value=torch.zeros(1))
        for _ in range(20):
            client.push_parameter("a", 1.0)
        error = float(client.pull_parameter("a"))
    client.close()
    return error


def test_a_stuck_client_does_not_block_the_others():
    begun = time.monotonic()
    stuck, other, _ = run_local(3, stuck_client, timeout_s=30)
    assert isinstance(stuck, PeerLost) and other == 20.0 and time.monotonic() - begun < 18


def never_close(comm):
    if comm.rank == 2:
        return caught(serve, comm, 1, timeout_s=2.0)
    client = ParameterClient(comm, 1, timeout_s=20)
    client.init_parameter("x", [1])
    if comm.rank == 0:
        client.close()
    return None


def test_a_server_gives_up_silent_workers():
    error = run_local(3, never_close, timeout_s=30)[2]
    assert isinstance(error, PeerLost) and error.phase == "serve" and "[1]" in str(error)
