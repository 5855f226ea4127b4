"""The parameter server's raw codes, calls that are not waited for, and failures of the server
itself.
"""

import threading
import time

import numpy as np
import pytest
import torch
from _ranks import run_local
from _serving import Wrapped, caught, meet, noise, play, same_bits

import gradcomp
from gradcomp import TernGrad
from gradcomp.errors import CorruptPayload, GradcompError, PeerMismatch
from gradcomp.server import ParameterClient, Pending, calls, parameters, reduce, serve

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
    for pulled, average in over(3, play, 1, seed_calls, scale_key)[:2]:
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


@pytest.mark.parametrize("workers", [1, 3])
def test_raw_codes_average_by_their_integer_sum(workers):
    """fl(fl(S / N) * sum of codes), S the largest of all workers' scales."""
    for got in run_local(workers + 1, play, 1, push_raw, 3)[:workers]:
        for number, average in enumerate(got):
            total = sum(random_codes(number, k) - 1 for k in range(workers)).astype(np.float32)
            scale = np.float32(float(number + workers - 1) / 7)
            assert np.array_equal(average.numpy(), np.float32(scale / np.float32(workers)) * total)


def push_raw_wrongly(client, index):
    client.init_parameter("scale", [1])
    client.init_parameter("codes", [2, 2], "uint8", scale_key="scale")
    early = caught(client.push_parameter, "codes", [[1, 1], [1, 1]])
    client.push_parameter("scale", float("nan") if index else 1.0)
    client.pull_parameter("scale", "max")
    client.push_parameter("codes", [[1, 1], [1, 1]])
    flagged = client.pull_parameter("codes", "decode_average")
    client.push_parameter("scale", -1.0)
    client.pull_parameter("scale", "max")
    negative = caught(client.push_parameter, "codes", [[1, 1], [1, 1]])
    client.push_parameter("scale", 2.0)
    client.pull_parameter("scale", "max")
    code = caught(client.push_parameter, "codes", [[1, 1], [1, 3 if index else 1]])
    pull = caught(client.pull_parameter, "codes", "decode_average")
    client.push_parameter("codes", [[2, 1], [1, 1]])
    return (
        early,
        flagged,
        negative,
        code,
        pull,
        client.pull_parameter("codes", "decode_average", compressed=True),
    )


def test_raw_codes_that_are_none_and_scales_that_are_none():
    for index, (early, flagged, negative, code, pull, after) in enumerate(
        run_local(3, play, 1, push_raw_wrongly)[:2]
    ):
        assert isinstance(early, ValueError) and "'scale'" in str(early) and "max" in str(early)
        assert flagged.shape == (2, 8) and bool(torch.isnan(flagged).all())
        assert isinstance(negative, ValueError) and "-1.0" in str(negative)
        assert (
            (code is None) == (index == 0)
            and isinstance(pull, CorruptPayload)
            and pull.check == "code"
        )
        decoded = TernGrad().decode(after)
        assert (
            decoded.numel() == 16
            and set(decoded.abs().tolist()) <= {0.0, 2.0}
            and decoded[0] == 2.0
        )


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


def test_calls_keep_their_order_and_give_what_waiting_calls_give(over):
    for got in over(3, play, 1, push_ahead)[:2]:
        wanted = [noise(1000, name, 0) + noise(1000, name, 1) for name in ("a", "b", "second")]
        assert all(same_bits(g, w) for g, w in zip(got, wanted, strict=True))


def many_pulls(client, index):
    """More replies than a server starts for one client at a time, asked for before any is taken."""
    keys = [f"k{n}" for n in range(40)]
    for key in keys:
        client.init_parameter(key, [50_000])
    for key in keys:
        client.push_parameter(key, torch.full((50_000,), float(len(key))), wait=False)
    calls = [client.pull_parameter(key, "sum", wait=False) for key in keys]
    return all(
        bool((call.wait() == 2.0 * len(key)).all()) for key, call in zip(keys, calls, strict=True)
    )


def test_many_calls_may_be_under_way(over):
    *fine, stats = over(3, play, 1, many_pulls)
    assert fine == [True, True] and stats.errors == 0 and stats.lost == []


def pull_more(client, index, second):
    """Worker 0 pulls again while its pull waits for worker 1's push."""
    large = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(100_000)}
    client.init_parameter("large", [100_000], **large)
    client.init_parameter("x", [1])
    if index == 0:
        client.push_parameter("x", 1.0)
        waiting = client.pull_parameter("x", "sum", wait=False)
        time.sleep(0.05)  # the thread receives, and expects one value
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
    assert run_local(3, play, 1, pull_more, second)[0] == ([3.0], wanted)


def fail_later(client, index):
    client.init_parameter("x", [1])
    client.push_parameter("x", 1.0)
    call = client.pull_parameter("x", ("sum", "max")[index], wait=False)
    meet(client)
    return caught(call.wait), caught(call.wait)


def test_errors_come_out_of_wait():
    for first, again in run_local(3, play, 1, fail_later)[:2]:
        assert first is None or (isinstance(first, PeerMismatch) and first.field == "reduce_method")
        assert again is first
    assert any(first for first, _ in run_local(3, play, 1, fail_later)[:2])


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
    (push, pull), _, stats = run_local(3, play, 1, leave_calls)
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


def step_over_a_held_server(comm, let_go):
    """Compute while a push and its pull are under way, and go on to compute when they have come,
    without waiting for either.
    """
    if comm.rank == 1:
        return serve(Held(comm, let_go=let_go), 1, timeout_s=60)
    with ParameterClient(comm, 1, timeout_s=60) as client:
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
    steps, _ = run_local(2, step_over_a_held_server, let_go)
    assert steps == [(False, True, [float(step)] * 4) for step in range(3)]


class MainThreadOnly(Wrapped):
    """As MPI under THREAD_FUNNELED."""

    def check_overlap(self):
        raise RuntimeError("main thread only")


def on_the_main_thread(comm):
    if comm.rank == 1:
        return serve(comm, 1, timeout_s=20)
    with ParameterClient(MainThreadOnly(comm), 1) as client:
        client.init_parameter("x", [1])
        error = caught(client.push_parameter, "x", 1.0, wait=False)
        client.push_parameter("x", 1.0)
        return error, client.pull_parameter("x", "sum").item()


def test_where_threads_may_not_receive_only_waiting_calls_work():
    (error, value), stats = run_local(2, on_the_main_thread)
    assert isinstance(error, RuntimeError) and "main thread" in str(error)
    assert value == 1.0 and stats.pushes == 1


# ---- a server that fails -------------------------------------------------------------------------


def fail_once(monkeypatch, owner, name, error):
    """Let the next call of a function raise `error`."""
    kept, left = getattr(owner, name), [error]

    def failing(*args):
        if left:
            raise left.pop()
        return kept(*args)

    monkeypatch.setattr(owner, name, failing)


def use_failing(client, index, key, method):
    codec = TernGrad(clip_sigma=None)
    client.init_parameter("float", [4])
    client.init_parameter("packed", [codec.payload_nbytes(4)], "uint8", codec=codec)
    values = {"float": torch.ones(4), "packed": codec.encode(torch.ones(4), scale=1.0)}
    push = caught(client.push_parameter, key, values[key])
    pulls = [caught(client.pull_parameter, key, method) for _ in range(2)]
    meet(client)
    client.push_parameter(key, values[key])
    return push, pulls, client.pull_parameter(key, method).tolist()


@pytest.mark.parametrize(
    ("owner", "name", "key", "method", "error"),
    [
        (parameters, "reduce_values", "float", "mean", RuntimeError("not enough memory: 8 GB")),
        (reduce.PackedReducer, "average", "packed", "decode_average", MemoryError("no room")),
        (reduce.PackedReducer, "admit", "packed", "decode_average", RuntimeError("a bug")),
    ],
)
def test_an_unexpected_failure_fails_its_round_and_nothing_else(
    monkeypatch, owner, name, key, method, error
):
    fail_once(monkeypatch, owner, name, error)
    *clients, stats = run_local(3, play, 1, use_failing, key, method)
    assert sum(push is not None for push, _, _ in clients) == (name == "admit")
    for _, pulls, after in clients:
        for found in pulls:
            assert (
                type(found) is GradcompError
                and str(error) in str(found)
                and type(error).__name__ in str(found)
            )
        assert after == [1.0] * 4
    assert stats.failures == 1 and stats.lost == []


class Forgetful(Wrapped):
    """A server's communicator that lacks memory for one message."""

    failures = 1

    def receive(self, *args, **options):
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().receive(*args, **options)


def serve_forgetful(comm):
    if comm.rank == 2:
        return serve(Forgetful(comm), 1, timeout_s=20)
    with ParameterClient(comm, 1, timeout_s=20) as client:
        return meet(client)


def test_a_failure_to_receive_does_not_end_the_server():
    *met, stats = run_local(3, serve_forgetful)
    assert met == [2, 2] and stats.failures == 1


def test_a_failed_asynchronous_push_leaves_no_trace(monkeypatch):
    fail_once(monkeypatch, reduce.PackedReducer, "average", MemoryError("no room"))
    error, value = run_local(2, play, 1, push_asynchronous)[0]
    assert type(error) is GradcompError and "MemoryError" in str(error)
    assert value == [1.0] * 4


def push_asynchronous(client, index):
    codec = gradcomp.Identity()
    options = {"asynchronous": True, "learning_rate": 1.0, "value": torch.zeros(4)}
    client.init_parameter("w", [codec.payload_nbytes(4)], "uint8", codec=codec, **options)
    error = caught(client.push_parameter, "w", codec.encode(torch.ones(4)))
    client.push_parameter("w", codec.encode(torch.ones(4)))
    return error, client.pull_parameter("w").tolist()
