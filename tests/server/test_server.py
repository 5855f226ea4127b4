"""The parameter server: exact results of every reduce method, rounds, asynchronous keys."""

import inspect
import os
import re
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from _ranks import run_local
from _serving import caught, flipped, meet, noise, play, same_bits
from reference import codec as reference

import gradcomp
from gradcomp import OneBit, RngKey, Ternary, TernGrad
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.payload import wire
from gradcomp.server import ParameterClient, Pending, ServerStats, messages, serve

ROOT = Path(__file__).parents[2]

# ---- reduce methods ------------------------------------------------------------------------------


def reduce_all(client, index, names, shape, rounds):
    out = {}
    for name in names:
        client.init_parameter(name, shape)
    for number in range(rounds):
        for name in names:
            client.push_parameter(name, noise(int(np.prod(shape)), name, number, index).view(shape))
            method = ("max", "sum", "mean")[(number + len(name)) % 3]
            out[name, number] = method, client.pull_parameter(name, method)
    return out


@pytest.mark.parametrize(
    ("workers", "servers"),
    [(1, 1), (2, 1), (3, [0]), (2, 2), (1, [1, 3, 0]), (4, 1), (3, 2), (4, 3)],
)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (0,), ()])
def test_values_are_reduced_in_rank_order(workers, servers, shape):
    check_reductions(run_local, workers, servers, shape)


def test_values_are_reduced_over_every_transport(over):
    check_reductions(over, 2, 1, (7, 3))


def check_reductions(run, workers, servers, shape):
    names, rounds = ["a", "bb", "layer/3.weight", "ключ"], 4
    count = servers if isinstance(servers, int) else len(servers)
    results = run(workers + count, play, servers, reduce_all, names, shape, rounds)
    results = [r for r in results if not isinstance(r, ServerStats)]
    assert len(results) == workers
    numel = int(np.prod(shape))
    for (name, number), (method, _) in results[0].items():
        pushed = [noise(numel, name, number, k).numpy() for k in range(workers)]
        total = pushed[0].copy()
        for value in pushed[1:]:
            total = np.maximum(total, value) if method == "max" else total + value
        wanted = reference.float_average(pushed) if method == "mean" else total
        for result in results:
            assert result[name, number][1].shape == shape
            assert np.array_equal(result[name, number][1].numpy().ravel(), wanted)


def add_large(client, index):
    """Worker 1's value comes last; added in order of arrival the sum would be 1.0."""
    client.init_parameter("x", [1])
    if index == 1:
        meet(client)
    client.push_parameter("x", [-1e8, 1.0, 1e8][index])
    if index != 1:
        meet(client)
    return float(client.pull_parameter("x", "sum"))


def test_sum_has_the_bits_of_rank_order():
    assert run_local(4, play, 1, add_large)[:3] == [0.0] * 3


def push_special(client, index, values):
    client.init_parameter("x", [2])
    client.push_parameter("x", torch.tensor(values[index]))
    return client.pull_parameter("x", "max")


def test_max_propagates_nan_and_is_exact():
    nan, inf = float("nan"), float("inf")
    for values in (
        [[nan, -inf], [1.0, 2.0], [inf, 1e-45]],
        [[1.0, -3.0], [nan, -inf], [inf, -2.0]],
    ):
        for got in run_local(4, play, 1, push_special, values)[:3]:
            assert torch.isnan(got[0])
            assert got[1] == max(v[1] for v in values)


# ---- packed gradients ----------------------------------------------------------------------------


def terngrad_step(client, index, numel, seed, step, parameter, codec):
    """Return the average by the seed's protocol: agree on the largest |g|, push codes, pull
    their average.
    """
    gradient = noise(numel, "g", index)
    ternary = TernGrad(clip_sigma=None, seed=seed)
    client.init_parameter("max_abs_grad", [1], "float32")
    client.push_parameter("max_abs_grad", float(gradient.abs().max()) if numel else 0.0)
    scale = client.pull_parameter("max_abs_grad", "max")
    client.init_parameter("grad", [ternary.payload_nbytes(numel)], "uint8", codec=codec)
    payload = ternary.encode(gradient, scale=scale, key=RngKey(seed, index, step, parameter))
    client.push_parameter("grad", payload)
    return client.pull_parameter("grad", "decode_average")


def all_reduced(comm, grads, codec, **options):
    return gradcomp.all_reduce(grads[comm.rank].clone(), codec, comm, **options)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 7, 1000, 70_001])
@pytest.mark.parametrize("codec", [None, TernGrad(clip_sigma=None, seed=5)])
def test_terngrad_step_equals_all_reduce_bit_for_bit(workers, numel, codec):
    check_terngrad_step(run_local, workers, numel, codec)


def test_terngrad_step_over_every_transport(over):
    check_terngrad_step(over, 2, 1000, None)


def check_terngrad_step(run, workers, numel, codec):
    got = run(workers + 1, play, 1, terngrad_step, numel, 5, 7, 3, codec)[:-1]
    grads = [noise(numel, "g", k) for k in range(workers)]
    for exchange in ("all_gather", "reduce_scatter"):
        wanted = run_local(
            workers,
            lambda c, e=exchange: all_reduced(
                c, grads, TernGrad(clip_sigma=None, seed=5), key=3, step=7, exchange=e
            ),
        )
        assert all(same_bits(g, wanted[0]) for g in got)
    assert bool((got[0] != 0).any())


def test_terngrad_step_of_one_worker_is_its_own_code():
    got = run_local(2, play, 1, terngrad_step, 100, 0, 0, 0, None)[0]
    gradient = noise(100, "g", 0)
    ternary = TernGrad(clip_sigma=None)
    assert same_bits(
        got, ternary.decode(ternary.encode(gradient, scale=float(gradient.abs().max())))
    )


def push_payloads(client, index, codec, given, payloads, *, compressed=False, key="p"):
    """Push one payload a round; return what each pull gives."""
    client.init_parameter(key, [payloads[0][index].numel()], "uint8", codec=given)
    out = []
    for round_payloads in payloads:
        client.push_parameter(key, round_payloads[index])
        out.append(client.pull_parameter(key, "decode_average", compressed=compressed))
    return out


def push_compressed(client, index, codec, given, payloads, key="p"):
    return push_payloads(client, index, codec, given, payloads, compressed=True, key=key)


def encode_rounds(codec, numel, workers, rounds):
    """Return payloads[round][worker], with each worker's own residual where the codec takes one."""
    residuals = [torch.zeros(numel) if codec.error_feedback else None for _ in range(workers)]
    return [
        [
            codec.encode(noise(numel, r, k), residual=residuals[k], key=RngKey(codec.seed, k, r, 2))
            for k in range(workers)
        ]
        for r in range(rounds)
    ]


AVERAGED = [
    (TernGrad(scale="own", seed=9), 999),
    (OneBit(group=100), 999),
    (Ternary(group=100), 999),
    (gradcomp.Identity(), 33),
]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("codec", "numel"), AVERAGED)
def test_payloads_average_as_an_exchange_does(codec, numel, given):
    """Whether or not the key knows the codec."""
    rounds = 4
    payloads = encode_rounds(codec, numel, 3, rounds)
    got = run_local(4, play, 1, push_payloads, codec, codec if given else None, payloads)[:3]

    def exchange(comm):
        options = {"exchange": "all_gather"}
        if codec.error_feedback:
            options["feedback"] = gradcomp.Feedback({2: numel})
        gradients = [noise(numel, r, comm.rank) for r in range(rounds)]
        return [
            gradcomp.all_reduce(gradient, codec, comm, key=2, step=r, **options)
            for r, gradient in enumerate(gradients)
        ]

    wanted = run_local(3, exchange)[0]
    assert all(same_bits(g[r], wanted[r]) for g in got for r in range(rounds))


def test_equal_scales_count_as_shared_only_without_a_codec():
    """Own scales that happen to be equal keep the arithmetic of own scales when the key has its
    codec.
    """
    own = TernGrad(scale="own", clip_sigma=None)
    payloads = [[own.encode(noise(500, k), scale=0.3, key=RngKey(0, k)) for k in range(3)]]
    headers_only = run_local(4, play, 1, push_payloads, own, None, payloads)[0][0]
    as_own = run_local(4, play, 1, push_payloads, own, own, payloads)[0][0]
    total = sum(own.decode(p) / np.float32(0.3) for p in payloads[0]).round().numpy()
    assert np.array_equal(
        headers_only.numpy(), np.float32(np.float32(0.3) / np.float32(3)) * total.astype(np.float32)
    )
    assert np.array_equal(
        as_own.numpy(), reference.float_average([own.decode(p).numpy() for p in payloads[0]])
    )
    assert not torch.equal(headers_only, as_own)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("codec", [TernGrad(seed=4, group=64), TernGrad(scale="own", seed=4)])
def test_compressed_ternary_is_the_mean_encoded_again(servers, codec):
    """The same bytes on every worker and with any number of servers, drawn from stream 2."""
    payloads = encode_rounds(TernGrad(scale="own", seed=4, group=codec.group), 999, 2, 2)
    own = TernGrad(scale="own", seed=4, group=codec.group)
    got = run_local(2 + servers, play, servers, push_compressed, codec, own, payloads)[:2]
    for r in range(2):
        mean = torch.from_numpy(
            reference.float_average([own.decode(p).numpy() for p in payloads[r]])
        )
        key = RngKey(4, 0, r, zlib.crc32(b"p"), 2)
        wanted = own.requantizer().encode(mean, key=key)
        assert all(same_bits(g[r], wanted) for g in got)
        assert wire.parse(got[0][r].numpy()).stream == 2
        assert codec.decode(got[0][r]).shape == (999,)


@pytest.mark.parametrize("codec", [OneBit(group=50), Ternary(group=50)], ids=["onebit", "ternary"])
def test_the_server_keeps_what_codes_leave_over(over, codec):
    """mean + old residual = decoded + new residual at every round: nothing is lost, and a NaN
    leaves no trace.
    """
    rounds, numel = 6, 333
    payloads = encode_rounds(codec, numel, 2, rounds)
    payloads[2][1] = codec.encode(torch.full((numel,), float("nan")), key=RngKey(0, 1, 2, 2))
    got = over(3, play, 1, push_compressed, codec, codec, payloads)[:2]
    residual = torch.zeros(numel)
    for r in range(rounds):
        if r == 2:
            assert all(bool(torch.isnan(codec.decode(g[r])).all()) for g in got)
            continue
        mean = torch.from_numpy(
            reference.float_average([codec.decode(p).numpy() for p in payloads[r]])
        )
        before = residual.clone()
        wanted = codec.encode(mean, residual=residual)
        assert all(torch.equal(codec.decode(g[r]), codec.decode(wanted)) for g in got)
        assert torch.equal(residual, (mean + before) - codec.decode(got[0][r]))
    assert bool(residual.any())


def test_without_error_feedback_the_server_keeps_nothing():
    codec = OneBit(group=50, error_feedback=False)
    payloads = encode_rounds(codec, 100, 2, 3)
    got = run_local(3, play, 1, push_compressed, codec, codec, payloads)[0]
    for r in range(3):
        mean = torch.from_numpy(
            reference.float_average([codec.decode(p).numpy() for p in payloads[r]])
        )
        assert torch.equal(codec.decode(got[r]), codec.decode(codec.encode(mean)))


def test_one_nan_is_everybodys_nan_for_one_round():
    codec = TernGrad(clip_sigma=None)
    payloads = [
        [codec.encode(noise(50, k), scale=2.0, key=RngKey(0, k)) for k in range(3)]
        for _ in range(3)
    ]
    bad = noise(50, 1)
    bad[7] = float("inf")
    payloads[1][1] = codec.encode(bad)
    for got in run_local(4, play, 1, push_payloads, codec, codec, payloads)[:3]:
        assert [bool(torch.isnan(g).all()) for g in got] == [False, True, False]
        assert bool(torch.isfinite(got[2]).all())


# ---- rounds --------------------------------------------------------------------------------------


def run_ahead(client, index):
    client.init_parameter("x", [1])
    first = []
    if index == 0:
        client.push_parameter("x", 1.0)
        client.push_parameter("x", 10.0)
        first.append(caught(client.push_parameter, "x", 100.0))
    meet(client)
    if index == 1:
        client.push_parameter("x", 2.0)
        # round 1, although rank 0 is past it
        first.append(float(client.pull_parameter("x", "sum")))
        first.append(float(client.pull_parameter("x", "sum")))  # again
    meet(client)
    if index == 0:
        client.push_parameter("x", 1000.0)  # rounds 2 and 3 are open now
        first.append(caught(client.push_parameter, "x", 1.0))
        meet(client)
    else:
        meet(client)
        client.push_parameter("x", 20.0)
        first.append(float(client.pull_parameter("x", "sum")))
        client.push_parameter("x", 2000.0)
    return [*first, float(client.pull_parameter("x", "sum"))]


def test_two_rounds_may_be_open_and_a_pull_is_of_the_last_push(over):
    ahead, behind, stats = over(3, play, 1, run_ahead)
    assert isinstance(ahead[0], ValueError)
    assert all(word in str(ahead[0]) for word in ("push 3", "[1]", "have pushed 0"))
    assert isinstance(ahead[1], ValueError) and "push 4" in str(ahead[1])
    assert ahead[2] == 3000.0
    assert behind == [3.0, 3.0, 30.0, 3000.0]
    assert stats.errors == 2 and stats.pushes == 3 + 3 + 6


def disagree(client, index, codec, pulls):
    """Push, and pull in different ways; return the errors, and what another key gives."""
    value = torch.ones(8) if codec is None else codec.encode(torch.ones(8), scale=1.0)
    client.init_parameter("x", value.shape, str(value.dtype).split(".")[1])
    client.init_parameter("y", [1])
    client.push_parameter("x", value)
    meet(client)  # every push is in before the first pull
    caught(client.pull_parameter, "x", **pulls[index])
    meet(client)
    pull = caught(client.pull_parameter, "x", **pulls[index])
    push = caught(client.push_parameter, "x", value)
    client.push_parameter("y", 1.0)
    return [pull, push], float(client.pull_parameter("y", "mean"))


METHODS = [{"reduce_method": name} for name in ("sum", "max", "sum")]
FORMS = [{"reduce_method": "decode_average", "compressed": form} for form in (False, True, False)]


@pytest.mark.parametrize(
    ("field", "codec", "pulls"),
    [("reduce_method", None, METHODS), ("compressed", TernGrad(clip_sigma=None), FORMS)],
)
def test_pulls_that_differ_are_an_error_for_all(field, codec, pulls):
    for errors, other in run_local(4, play, 1, disagree, codec, pulls)[:3]:
        assert other == 1.0
        for error in errors:
            assert isinstance(error, PeerMismatch) and error.field == field
            assert {error.expected, error.got} == {pull[field] for pull in pulls}


def disagree_waiting(client, index):
    """Worker 0 waits for worker 2's push when worker 1 pulls otherwise; nobody closes before
    worker 0 knows.
    """
    client.init_parameter("x", [1])
    meet(client)
    if index == 2:
        meet(client, "worker 0 waits")
        meet(client, "all know")
        return 0.0, caught(client.push_parameter, "x", 1.0)
    client.push_parameter("x", 1.0)
    if index == 1:
        meet(client, "worker 0 waits")
    begun = time.monotonic()
    pull = client.pull_parameter("x", ("sum", "mean")[index], wait=False)
    if index == 0:
        meet(client, "worker 0 waits")
    error = caught(pull.wait)
    waited = time.monotonic() - begun
    meet(client, "all know")
    return waited, error


def test_a_waiting_pull_hears_of_another_method_at_once():
    results = run_local(4, play, 1, disagree_waiting)[:3]
    assert all(waited < 15 for waited, _ in results)
    assert [(type(e), e.field, e.rank, e.expected, e.got) for _, e in results] == [
        (PeerMismatch, "reduce_method", 1, "sum", "mean"),
        (PeerMismatch, "reduce_method", 0, "mean", "sum"),
        (PeerMismatch, "reduce_method", 1, "sum", "mean"),
    ]


# ---- asynchronous keys ---------------------------------------------------------------------------


def descend(client, index):
    """Two workers take turns, kept in order by a synchronous key."""
    start = torch.tensor([[1.0, 2.0]])
    client.init_parameter("w", [1, 2], asynchronous=True, learning_rate=-0.1, value=start)
    seen = []
    for turn in range(4):
        if turn % 2 == index:
            if turn < 2:
                seen.append(client.pull_parameter("w"))
            client.push_parameter("w", torch.tensor([[0.3, -0.7]]) * (turn + 1))
            client.push_parameter("w", torch.tensor([[1.0, 1.0]]))
            seen.append(client.staleness)
        meet(client, f"turn {turn}")
    return seen, client.pull_parameter("w")


def test_asynchronous_pushes_are_applied_at_once_and_staleness_is_counted(over):
    (first, one), (second, two), stats = over(3, play, 1, descend)
    wanted = np.array([[1.0, 2.0]], np.float32)
    for turn in range(4):
        for push in (
            np.array([[0.3, -0.7]], np.float32) * np.float32(turn + 1),
            np.ones((1, 2), np.float32),
        ):
            wanted = wanted + push * np.float32(-0.1)
    assert one.shape == (1, 2) and same_bits(one, two) and np.array_equal(one.numpy(), wanted)
    assert torch.equal(first[0], torch.tensor([[1.0, 2.0]]))
    # the second worker sees the first one's pushes at once
    assert bool((second[0] < first[0])[0, 0])
    assert first[1:] == [0, 2] and second[1:] == [0, 2]
    assert (stats.asynchronous_pushes, stats.staleness_sum, stats.staleness_max) == (8, 8, 2)
    assert stats.staleness_mean == 1.0


def push_returns(client, index):
    client.init_parameter("w", [1], asynchronous=True, learning_rate=1.0, value=torch.zeros(1))
    client.init_parameter("s", [1])
    if index == 0:
        client.push_parameter("w", 1.0)
    meet(client)
    stale = client.push_parameter("w", 1.0) if index == 1 else 0
    bad = caught(client.push_parameter, "w", float("nan"))
    meet(client)
    return stale, client.push_parameter("s", 1.0), bad, float(client.pull_parameter("w"))


def test_a_push_returns_its_staleness_and_nan_leaves_no_trace():
    for index, (stale, synchronous, bad, value) in enumerate(
        run_local(3, play, 1, push_returns)[:2]
    ):
        assert stale == index and synchronous == 0 and value == 2.0
        assert isinstance(bad, ValueError) and "NaN" in str(bad)


def descend_packed(client, index):
    codec = TernGrad(clip_sigma=None)
    start = torch.ones(4, 8)
    options = {"asynchronous": True, "learning_rate": -0.5, "value": start}
    client.init_parameter("w", [codec.payload_nbytes(32)], "uint8", codec=codec, **options)
    payload = codec.encode(noise(32, index), key=RngKey(rank=index))
    client.push_parameter("w", payload)
    other = codec.encode(torch.ones(28), scale=1.0)
    assert other.numel() == payload.numel() - 1
    wrong = [
        caught(client.push_parameter, "w", flipped(payload)),
        caught(client.push_parameter, "w", codec.encode(torch.ones(31), scale=1.0)),
    ]
    meet(client)
    return wrong, client.pull_parameter("w")


def test_asynchronous_packed_gradients():
    codec = TernGrad(clip_sigma=None)
    steps = [
        codec.decode(codec.encode(noise(32, k), key=RngKey(rank=k))).view(4, 8) for k in range(2)
    ]
    orders = [(torch.ones(4, 8) + a * -0.5) + b * -0.5 for a, b in (steps, steps[::-1])]
    for wrong, got in run_local(3, play, 1, descend_packed)[:2]:
        assert any(torch.equal(got, order) for order in orders)
        assert isinstance(wrong[0], CorruptPayload) and wrong[0].check == "crc"
        assert isinstance(wrong[1], ValueError) and "31" in str(wrong[1])


def lone_worker(client, index):
    client.init_parameter("w", [1], asynchronous=True, learning_rate=1.0, value=torch.zeros(1))
    meet(client)
    if index == 1:
        client._requests._comm.abort()
        return None
    assert isinstance(caught(meet, client, "lost"), PeerLost)  # so the server has heard of it
    client.push_parameter("w", 1.0)
    return float(client.pull_parameter("w"))


def test_asynchronous_keys_do_not_need_the_others():
    assert run_local(3, play, 1, lone_worker, timeout_s=30)[0] == 1.0


# ---- the rest ------------------------------------------------------------------------------------


def test_the_server_counts():
    stats = run_local(3, play, 1, add_large_twice)[2]
    assert (stats.pushes, stats.pulls, stats.errors, stats.unread, stats.lost) == (4, 4, 0, 0, [])
    assert stats.bytes_received > 0 and stats.bytes_sent > 0 and stats.staleness_mean == 0.0


def add_large_twice(client, index):
    client.init_parameter("x", [1])
    for _ in range(2):
        client.push_parameter("x", 1.0)
        client.pull_parameter("x", "sum")
    assert client.bytes_sent > 0 and client.bytes_received > 0


def test_documentation_names_every_argument_member_and_phase():
    described = (serve, ParameterClient, ServerStats, Pending)
    members = [getattr(ParameterClient, n) for n in CLIENT_METHODS]
    text = "\n".join(inspect.getdoc(v) for v in (*described, *members, *PENDING))
    words = set(re.findall(r"\w+", text)) | set(dir(ServerStats))
    for value in (serve, ParameterClient.__init__, *members, *PENDING):
        assert set(inspect.signature(value).parameters) - {"self"} <= words, value
    assert {*vars(ServerStats()), *messages.METHODS} <= words
    errors = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    phases = ["init", "push", "pull", "serve"]
    for word in [*phases, "message", "reduce_method", "compressed", "servers"]:
        assert f"`{word}`" in errors, word


PENDING = (Pending.done, Pending.wait)
CLIENT_METHODS = [
    n for n, v in vars(ParameterClient).items() if inspect.isfunction(v) and not n.startswith("_")
]


@pytest.mark.slow
def test_the_example_trains_and_equals_all_reduce():
    program = str(ROOT / "examples/parameter_server.py")
    command = [sys.executable, program, "--local", "2", "--steps", "40"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equals gradcomp.all_reduce bit for bit" in done.stdout
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", done.stdout)[1])
    assert accuracy > 50.0, done.stdout
