"""The parameter server's raw codes, calls that are not waited for, and failures of the server
itself.
"""

import threading
import time

import numpy as np
import pytest
import torch
from _serving import CUT, WHOLE, Wrapped, caught, meet, noise, run, same_bits, wrapped

from gradcomp import TernGrad
from gradcomp.comm import Work
from gradcomp.errors import CorruptPayload, GradcompError, PeerMismatch
from gradcomp.server import Pending, calls, parameters

# ---- raw codes -----------------------------------------------------------------------------------


def seed_calls(client, index, scale_key):
    """The calls of the proposal of 2017, its section 5 (which pushes "op_id_grad" into
    "op_id_grads": a slip).
    """
    client.init_parameter(key="max_abs_grad", shape=[1], type="float32")
    client.push_parameter(key="max_abs_grad", value=0.5)
    scale = client.pull_parameter(key="max_abs_grad", reduce_method="max")
    client.init_parameter(key="op_id_grads", shape=[2, 2], type="uint8", **scale_key)
    client.push_parameter(key="op_id_grads", value=[[1, 5], [8, 2]])
    return scale, client.pull_parameter(key="op_id_grads", reduce_method="decode_average")


# 00 is -1, 01 is 0, 10 is 1
SEED_CODES = [[0, -1, -1, -1, 0, 0, -1, -1], [-1, 1, -1, -1, 1, -1, -1, -1]]


@pytest.mark.parametrize(("scale_key", "scale"), [({"scale_key": "max_abs_grad"}, 0.5), ({}, 1.0)])
def test_the_seed_s_calls_work_as_written(over, scale_key, scale):
    for pulled, average in run(seed_calls, scale_key, over=over)[0]:
        assert pulled.tolist() == [0.5]
        assert same_bits(average, torch.tensor(SEED_CODES) * scale)


def push_raw(client, index, rounds):
    """Return the averages of raw codes, each round under its own scale."""
    client.init_parameter("scale", [1])
    client.init_parameter("codes", [3, 5], "uint8", scale_key="scale")
    out = []
    for number in range(rounds):
        client.push_parameter("scale", float(number + index) / 7)
        client.pull_parameter("scale", "max")
        codes = random_codes(number, index)
        packed = (codes.reshape(-1, 4) * np.array([1, 4, 16, 64])).sum(axis=1).astype(np.uint8)
        client.push_parameter("codes", torch.from_numpy(packed).view(3, 5))
        out.append(client.pull_parameter("codes", "decode_average"))
    return out


def random_codes(number, index):
    return np.random.default_rng([number, index]).integers(0, 3, (3, 20))


@pytest.mark.parametrize("size", [WHOLE, {"shard_nbytes": 32}])
@pytest.mark.parametrize("workers", [1, 3])
def test_raw_codes_average_by_their_integer_sum(workers, size):
    """fl(fl(S / N) * sum of codes), S the largest of all workers' scales."""
    for got in run(push_raw, 3, workers=workers, servers=2, **size)[0]:
        for number, average in enumerate(got):
            total = sum(random_codes(number, k) - 1 for k in range(workers)).astype(np.float32)
            scale = np.float32(float(number + workers - 1) / 7)
            assert np.array_equal(average.numpy(), np.float32(scale / np.float32(workers)) * total)


def push_raw_wrongly(client, index):
    def push_scaled(scale, last):
        client.push_parameter("scale", scale)
        client.pull_parameter("scale", "max")
        return caught(client.push_parameter, "codes", [[2, 1], [1, last]])

    client.init_parameter("scale", [1])
    client.init_parameter("codes", [2, 2], "uint8", scale_key="scale")
    early = caught(client.push_parameter, "codes", [[1, 1], [1, 1]])
    push_scaled(float("nan") if index else 1.0, 1)
    flagged = client.pull_parameter("codes", "decode_average")
    negative = push_scaled(-1.0, 1)
    code = push_scaled(2.0, 3 if index else 1)
    pull = caught(client.pull_parameter, "codes", "decode_average")
    push_scaled(2.0, 1)
    after = client.pull_parameter("codes", "decode_average", compressed=True)
    return [early, negative, code, pull], flagged, TernGrad().decode(after)


def test_wrong_raw_codes_and_scales():
    """A code 11, and scales that have not been pulled, are negative or NaN."""
    for index, (errors, flagged, decoded) in enumerate(run(push_raw_wrongly)[0]):
        early, negative, code, pull = errors
        assert isinstance(early, ValueError) and "'scale'" in str(early) and "max" in str(early)
        assert isinstance(negative, ValueError) and "-1.0" in str(negative)
        assert (code is None) == (index == 0)
        assert isinstance(pull, CorruptPayload) and pull.check == "code"
        assert flagged.shape == (2, 8) and bool(torch.isnan(flagged).all())
        assert decoded.numel() == 16 and decoded[0] == 2.0
        assert set(decoded.abs().tolist()) <= {0.0, 2.0}


# ---- calls that are not waited for ---------------------------------------------------------------


def push_ahead(client, index):
    for key in ("a", "b"):
        client.init_parameter(key, [1000])
    pushes = [client.push_parameter(key, noise(1000, key, index), wait=False) for key in ("a", "b")]
    pulls = [client.pull_parameter(key, "sum", wait=False) for key in ("a", "b")]
    second = client.push_parameter("a", noise(1000, "second", index), wait=False)
    again = client.pull_parameter("a", "sum")  # a call that waits, among others that do not
    assert all(isinstance(call, Pending) for call in (*pushes, *pulls, second))
    results = [call.wait() for call in reversed(pulls)]
    assert pulls[0].done() and pulls[0].wait() is results[1]
    assert [call.wait() for call in (*pushes, second)] == [0, 0, 0]
    return [*reversed(results), again]


@pytest.mark.parametrize(("servers", "size"), [(1, WHOLE), (3, CUT)])
def test_calls_keep_their_order_and_give_what_waiting_calls_give(over, servers, size):
    """And the servers share the shards of cut keys."""
    clients, stats = run(push_ahead, servers=servers, over=over, **size)
    pushes = [s.pushes for s in stats]
    assert sum(pushes) == 2 * 3 * (1 if size is WHOLE else 16) and min(pushes) > 0.8 * max(pushes)
    for got in clients:
        wanted = [noise(1000, name, 0) + noise(1000, name, 1) for name in ("a", "b", "second")]
        assert all(same_bits(g, w) for g, w in zip(got, wanted, strict=True))


def many_pulls(client, index):
    """More replies than a server starts for one client at a time, asked for before any is taken."""
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        client.init_parameter(key, [50_000])
    for key in keys:
        client.push_parameter(key, torch.full((50_000,), float(len(key))), wait=False)
    pulls = [client.pull_parameter(key, "sum", wait=False) for key in keys]
    return all(
        bool((pull.wait() == 2.0 * len(k)).all()) for k, pull in zip(keys, pulls, strict=True)
    )


def test_many_calls_may_be_under_way(over):
    fine, (stats,) = run(many_pulls, over=over)
    assert fine == [True, True] and stats.errors == 0 and stats.lost == []


def pull_more(client, index, second):
    """Worker 0 makes another key and pulls it while its pull waits for worker 1's push."""
    large = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(100_000)}
    client.init_parameter("x", [1])
    if index == 0:
        client.push_parameter("x", 1.0)
        waiting = client.pull_parameter("x", "sum", wait=False)
        time.sleep(0.05)  # the thread receives, and expects one value
    client.init_parameter("large", [100_000], **large)
    if index == 0:
        found = client.pull_parameter(*second, wait=False)
    meet(client)
    if index == 1:
        return client.push_parameter("x", 2.0)
    return waiting.wait().tolist(), found.wait().tolist()


@pytest.mark.parametrize(
    ("second", "wanted"), [(("large",), [0.0] * 100_000), (("x", "sum"), [3.0])]
)
def test_a_second_pull_of_any_length_may_wait_beside_the_first(second, wanted):
    """The first one's reply was the longest that the thread took; of two pulls of one round the
    first was never answered.
    """
    assert run(pull_more, second)[0][0] == ([3.0], wanted)


def fail_later(client, index):
    client.init_parameter("x", [1])
    client.push_parameter("x", 1.0)
    meet(client)
    call = client.pull_parameter("x", ("sum", "max")[index], wait=False)
    meet(client)
    return caught(call.wait), caught(call.wait)


def test_errors_come_out_of_wait_and_again():
    found = run(fail_later)[0]
    assert all(again is first for first, again in found)
    errors = [first for first, _ in found if first is not None]
    assert errors and all(isinstance(error, PeerMismatch) for error in errors)


def leave_calls(client, index):
    client.init_parameter("x", [1])
    push = client.push_parameter("x", 1.0, wait=False)
    waiting = client.pull_parameter("x", "sum", wait=False) if index == 0 else None
    if index == 1:
        return None
    client.close()
    return caught(push.wait), caught(waiting.wait)


def test_closing_ends_calls_that_nobody_waits_for(monkeypatch):
    monkeypatch.setattr(calls, "CLOSE_S", 60.0)
    begun = time.monotonic()
    ((push, pull), _), (stats,) = run(leave_calls)
    assert push is None or isinstance(push, RuntimeError)
    assert pull is None or isinstance(pull, RuntimeError)
    assert stats.pushes == 2 and time.monotonic() - begun < 20


class Held(Wrapped):
    """A server's communicator whose messages lie unread until it is let go."""

    let_go: threading.Event

    def receive(self, *args, **options):
        found = super().receive(*args, **options)
        assert self.let_go.wait(60)
        return found


def step_beside_a_held_server(client, index, let_go):
    """Compute while a push and its pull are under way, and go on to compute when they have come,
    without waiting for either.
    """
    client.init_parameter("g", [4])
    sums = []
    for step in range(3):
        let_go.clear()
        push = client.push_parameter("g", torch.full((4,), float(step)), wait=False)
        pull = client.pull_parameter("g", "sum", wait=False)
        before = push.done() or pull.done()
        let_go.set()
        deadline = time.monotonic() + 60
        while not (push.done() and pull.done()) and time.monotonic() < deadline:
            time.sleep(0.001)  # the next step's forward and backward
        sums.append((before, push.done() and pull.done(), pull.wait().tolist()))
    return sums


def test_a_worker_computes_while_its_calls_are_under_way():
    let_go = threading.Event()
    let_go.set()
    over = wrapped(1, Held, let_go=let_go)
    (steps,), _ = run(step_beside_a_held_server, let_go, workers=1, over=over)
    assert steps == [(False, True, [float(step)] * 4) for step in range(3)]


class Asked(Work):
    """A message that, as MPI's, is kept until it is asked whether it has been sent."""

    kept = True

    def wait(self, timeout_s):
        self.kept = False

    def is_done(self):
        self.kept = False
        return True


class Keeping(Wrapped):
    def start_send(self, message, to):
        super().start_send(message, to)
        self.works.append(Asked())
        return self.works[-1]


def wait_for_pulls_only(client, index):
    client.init_parameter("x", [1])
    for step in range(3):
        client.push_parameter("x", float(step), wait=False)
        pull = client.pull_parameter("x", "sum", wait=False)
        while not pull.done():
            time.sleep(0.001)
        pull.wait()


def test_messages_that_nobody_waits_for_are_released():
    """Over MPI a client kept every message that it had sent with ``wait=False``."""
    works = []
    run(wait_for_pulls_only, workers=1, over=wrapped(0, Keeping, works=works))
    assert len(works) == 8 and [work.kept for work in works[:-2]] == [False] * 6


class MainThreadOnly(Wrapped):
    """As MPI under THREAD_FUNNELED."""

    def check_overlap(self):
        raise RuntimeError("main thread only")


def on_the_main_thread(client, index):
    client.init_parameter("x", [1])
    error = caught(client.push_parameter, "x", 1.0, wait=False)
    client.push_parameter("x", 1.0)
    return error, client.pull_parameter("x", "sum").item()


def test_where_threads_may_not_receive_only_waiting_calls_work():
    over = wrapped(0, MainThreadOnly)
    ((error, value),), (stats,) = run(on_the_main_thread, workers=1, over=over)
    assert isinstance(error, RuntimeError) and "main thread" in str(error)
    assert value == 1.0 and stats.pushes == 1


# ---- a server that fails -------------------------------------------------------------------------


def fail_once(monkeypatch, name, error):
    """Let the next call of a function of the server raise `error`."""
    kept, left = getattr(parameters, name), [error]

    def failing(*args):
        if left:
            raise left.pop()
        return kept(*args)

    monkeypatch.setattr(parameters, name, failing)


def use_failing(client, index, key, method):
    codec = TernGrad(clip_sigma=None)
    packed = {"codec": codec} | ({} if method else AT_ONCE)
    client.init_parameter("float", [4])
    client.init_parameter("packed", [codec.payload_nbytes(4)], "uint8", **packed)
    values = {"float": torch.ones(4), "packed": codec.encode(torch.ones(4), scale=1.0)}
    errors = [caught(client.push_parameter, key, values[key])]
    if method:
        errors += [caught(client.pull_parameter, key, method) for _ in range(2)]
        meet(client)
        client.push_parameter(key, values[key])
    meet(client)
    return errors, client.pull_parameter(key, method).tolist()


AT_ONCE = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(4)}
FAILURES = [  # of a function; the key and how it is pulled; errors of pushes and pulls
    ("reduce_values", "float", "mean", RuntimeError("not enough memory: 8 GB"), 0, 4),
    ("average_payloads", "packed", "decode_average", MemoryError("no room"), 0, 4),
    ("admit_payload", "packed", "decode_average", RuntimeError("a bug"), 1, 4),
    ("average_payloads", "packed", None, MemoryError("no room"), 1, 0),
]


@pytest.mark.parametrize(("name", "key", "method", "error", "pushes", "pulls"), FAILURES)
def test_an_unexpected_failure_fails_its_round_and_nothing_else(
    monkeypatch, name, key, method, error, pushes, pulls
):
    """Of an asynchronous key it fails the push alone."""
    fail_once(monkeypatch, name, error)
    clients, (stats,) = run(use_failing, key, method)
    found = [errors[0] for errors, _ in clients if errors[0] is not None]
    pulled = [e for errors, _ in clients for e in errors[1:]]
    assert (len(found), len(pulled)) == (pushes, pulls)
    for e in found + pulled:
        assert type(e) is GradcompError
        assert str(error) in str(e) and type(error).__name__ in str(e)
    assert [after for _, after in clients] == [[1.0] * 4] * 2
    assert stats.failures == 1 and stats.lost == []


class Forgetful(Wrapped):
    """A server's communicator that lacks memory for one message."""

    failures = 1

    def receive(self, *args, **options):
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().receive(*args, **options)


def test_a_failure_to_receive_does_not_end_the_server():
    met, (stats,) = run(lambda client, index: meet(client), over=wrapped(2, Forgetful))
    assert met == [2, 2] and stats.failures == 1
