"""The parameter server when ranks die, fall silent or take no replies: named errors in bounded
time.
"""

import contextlib
import queue
import threading
import time
from unittest import mock

import pytest
import torch
from _ranks import run_local
from _serving import Wrapped, caught, meet, run, wrapped

from gradcomp.comm import LocalCommunicator
from gradcomp.comm.local import Sent
from gradcomp.errors import GradcompError, PeerLost
from gradcomp.server import ParameterClient, serve

# ---- ranks that die or are silent (communicators of threads: a closed one is a dead rank) --------


class Fault:
    """What goes wrong with whom, in the middle of a round; ranks 0 and 1 watch, rank 2 strikes."""

    def __init__(self, who, how):
        self.who, self.how = who, how
        self.together = threading.Barrier(3)
        self.struck, self.down, self.over = (threading.Event() for _ in range(3))


class Faulty(Wrapped):
    """A server's communicator that dies or falls silent when it is struck."""

    fault: Fault

    def receive(self, *args, **options):
        if not self.fault.struck.is_set():
            return super().receive(*args, **options)
        if self.fault.how == "dies":
            self.abort()
        self.fault.down.set()
        self.fault.over.wait(40)
        raise KeyError


def lose(comm, fault):
    """Return what each call gives to a worker that is left, and the seconds of all of them."""
    if comm.rank == 3:
        with contextlib.suppress(KeyError):
            return serve(Faulty(comm, fault=fault), 1, timeout_s=20)
        return None
    client, meet = ParameterClient(comm, 1, timeout_s=20), fault.together.wait
    for key in ("done", "half", "untouched"):
        client.init_parameter(key, [1])
    at_once = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(1)}
    client.init_parameter(f"own {comm.rank}", [1], **at_once)
    client.push_parameter("done", 1.0)
    client.pull_parameter("done", "sum")
    meet(20)
    if comm.rank == 2 and fault.who == "server":
        fault.struck.set()
        assert fault.down.wait(20)
    meet(20)
    if comm.rank == 2:
        meet(20)  # the others have pushed "half"
        if fault.how == "closes":
            client.close()
        if fault.who == "worker" and fault.how != "is silent":
            comm.abort()
        meet(20)
        fault.over.set()
        return client.close()
    if fault.how == "is silent":
        client._requests.timeout_s = 0.4
    begun = time.monotonic()
    found = [outcome(client.push_parameter, "half", 1.0)]
    meet(20)
    found += [outcome(client.pull_parameter, "half", "sum") for _ in range(2)]
    found += [outcome(client.push_parameter, key, 1.0) for key in ("half", "untouched")]
    found.append(outcome(client.pull_parameter, "done", "sum"))
    found.append(outcome(client.push_parameter, f"own {comm.rank}", 1.0))
    waited = time.monotonic() - begun
    meet(20)
    client.close()
    return found, waited


def outcome(call, *args):
    try:
        return float(call(*args))
    except PeerLost as error:
        return error


ALL = ["push", "pull", "pull", "push", "push", "pull", "push"]
ROUND = [0.0, "pull", "pull", "push", "push", 3.0, 0.0]
LOST = [  # whose fault, what the error says, each call's result or phase, who is lost
    ("worker", "dies", "rank 2", ROUND, [2]),
    ("worker", "closes", "rank 2", ROUND, []),
    ("worker", "is silent", "ranks [2]", [0.0, "pull", "pull", 0.0, 0.0, 3.0, 0.0], []),
    pytest.param("server", "dies", "server", ALL, None, marks=pytest.mark.slow),
    pytest.param("server", "is silent", "server", ALL, None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("who", "how", "word", "outcomes", "lost"), LOST)
def test_a_lost_peer_is_named_in_bounded_time(who, how, word, outcomes, lost):
    """Complete rounds and asynchronous keys do not need it."""
    first, second, _, stats = run_local(4, lose, Fault(who, how), timeout_s=60)
    for found, waited in (first, second):
        assert waited < 15
        assert [getattr(value, "phase", value) for value in found] == outcomes
        for error in (value for value in found if isinstance(value, PeerLost)):
            assert word in str(error) and error.bucket == -1
    assert who == "server" or stats.lost == lost


def late_worker(client, index):
    client.init_parameter("x", [1])
    if index == 1:
        meet(client)  # when the other has given it up
        client.push_parameter("x", 2.0)
        return client.pull_parameter("x", "sum")
    client.push_parameter("x", 1.0)
    client._requests.timeout_s = 0.4
    error = caught(client.pull_parameter, "x", "sum")
    client._requests.timeout_s = 60.0
    meet(client)
    return error, *[float(client.pull_parameter("x", "sum")) for _ in range(2)]


def test_a_silent_worker_is_named_and_may_still_come(over):
    (error, *after), late = run(late_worker, over=over)[0]
    assert isinstance(error, PeerLost) and error.phase == "pull" and 0.4 <= error.waited_s < 15
    assert "ranks [1]" in str(error) and "'x'" in str(error)
    assert after == [3.0, 3.0] and float(late) == 3.0


class Slow(Wrapped):
    """A server's communicator that keeps reply `number` back: it leaves when somebody calls what
    is in `held`.
    """

    replies, number, held = 0, 0, None

    def start_send(self, message, to):
        self.replies += 1
        if self.replies == self.number:
            late = message.clone()
            self.held.put(lambda: LocalCommunicator.start_send(self, late, to))
            return Sent()
        return super().start_send(message, to)


def use_slow(client, index, held):
    client.init_parameter("x", [1])
    client._requests.timeout_s = 0.3
    error = caught(client.push_parameter, "x", 1.0)
    client._requests.timeout_s = 20.0
    held.get(timeout=20)()  # the old reply is there now
    return error, float(client.pull_parameter("x", "sum"))


def test_a_late_reply_is_not_taken_for_another():
    held = queue.SimpleQueue()
    slow = wrapped(1, Slow, number=2, held=held)
    ((error, value),), _ = run(use_slow, held, workers=1, over=slow)
    assert isinstance(error, PeerLost) and error.phase == "push" and "silent" in str(error)
    assert value == 1.0


def push_in_part(client, index):
    """Lose the reply of the first shard of a push for which the others wait."""
    client.init_parameter("x", [100])
    for _ in range(2):
        client.push_parameter("x", torch.ones(100))
    client._requests.timeout_s = 0.3
    error = caught(client.push_parameter, "x", torch.ones(100))
    client._requests.timeout_s = 20.0
    calls = (client.push_parameter, torch.ones(100)), (client.pull_parameter, "sum")
    return error, [caught(call, "x", given) for call, given in calls]


def test_a_key_of_which_some_shards_may_have_a_push_is_refused():
    """Its later rounds would mix pushes of different steps."""
    slow = wrapped(1, Slow, number=11, held=queue.SimpleQueue())
    ((error, refused),), _ = run(push_in_part, workers=1, over=slow, shard_nbytes=256)
    assert isinstance(error, PeerLost) and error.phase == "push"
    for after in refused:
        assert type(after) is GradcompError and "some of its shards" in str(after)
        assert "restart" in str(after)


def save_slowly(client, index, held, path):
    """Save a key that is longer than all keys of this client, and get its record late."""
    large = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(100_000)}
    other = ParameterClient(client._comm, client._servers)
    other.init_parameter("large", [100_000], **large)
    client._requests.timeout_s = 0.3
    error = caught(client.save, path)
    client._requests.timeout_s = 20.0
    held.get(timeout=20)()
    return error, caught(client.init_parameter, "x", [1])


def test_the_late_record_of_a_save_is_ignored(tmp_path):
    """It was "a reply is too long" in the next call."""
    held = queue.SimpleQueue()
    slow = wrapped(1, Slow, number=3, held=held)
    ((error, after),), _ = run(save_slowly, held, tmp_path / "state", workers=1, over=slow)
    assert isinstance(error, PeerLost) and error.phase == "state" and after is None


def test_an_error_of_the_caller_is_not_hidden_by_a_server_that_never_came():
    """Over gloo the first message, here that of `close`, makes connections together."""
    worker, _ = LocalCommunicator.group(2)
    lost = PeerLost("setup", 1, 1.0, "it did not come")
    with (
        mock.patch.object(worker, "start_send", side_effect=lost),
        pytest.raises(ZeroDivisionError),
        ParameterClient(worker, 1, timeout_s=1),
    ):
        raise ZeroDivisionError


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
