"""The parameter server: exact results, and a named error for everything that can go wrong."""

import inspect
import os
import pickle
import re
import struct
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from _ranks import run_local, with_communicator
from hypothesis import given, settings
from hypothesis import strategies as st

import gradcomp
from gradcomp import OneBit, RngKey, Ternary
from gradcomp.comm import LocalCommunicator, Work
from gradcomp.errors import CorruptPayload, NativeError, PeerLost, PeerMismatch, UnsupportedTensor
from gradcomp.payload import wire
from gradcomp.reference import codec as reference
from gradcomp.reference import payload as ref_payload
from gradcomp.server import ParameterClient, ServerStats, loop, messages, serve
from gradcomp.server.messages import Kind, Message
from gradcomp.server.spec import make_spec, pack_spec, parse_spec

ROOT = Path(__file__).parents[1]


@pytest.fixture(params=["local", "gloo", "mpich", "openmpi"])
def over(request, pools):
    """Return run(world_size, function, *args) with function(comm, *args), over each transport in turn."""
    if request.param == "local":
        return run_local

    def run(world_size, function, *args):
        if world_size > 4:  # more processes than the other tests keep warm would show nothing more
            return run_local(world_size, function, *args)
        given = pickle.dumps(args)  # here and not in the pipe, where torch would share memory instead
        results = pools(request.param, world_size, with_communicator, request.param, unpacked, function, given)
        return [pickle.loads(r) for r in results]

    return run


def unpacked(comm, function, given):
    return pickle.dumps(function(comm, *pickle.loads(given)))


def play(comm, servers, body, *args, timeout_s=20.0):
    """Serve, or return body(client, index of the worker, *args)."""
    serving = messages.server_ranks(servers, comm.world_size)
    if comm.rank in serving:
        return serve(comm, servers, timeout_s=30.0)
    index = [r for r in range(comm.world_size) if r not in serving].index(comm.rank)
    with ParameterClient(comm, servers, timeout_s=timeout_s) as client:
        return body(client, index, *args)


def caught(call, *args, **options):
    """Return what `call` raises, or None."""
    try:
        call(*args, **options)
    except Exception as error:
        return error
    return None


def meet(client, key="meet"):
    """Wait for all workers."""
    client.init_parameter(key, [1])
    client.push_parameter(key, 1.0)
    return int(client.pull_parameter(key, "sum"))


def noise(numel, *seed):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)


def same_bits(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


# ---- reduce methods ------------------------------------------------------------------------------------------------


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
    ("workers", "servers"), [(1, 1), (2, 1), (3, [0]), (2, 2), (1, [1, 3, 0]), (4, 1), (3, 2), (4, 3)]
)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (0,), ()])
def test_values_are_reduced_in_rank_order(over, workers, servers, shape):
    names, rounds = ["a", "bb", "layer/3.weight", "ключ"], 4
    count = servers if isinstance(servers, int) else len(servers)
    results = over(workers + count, play, servers, reduce_all, names, shape, rounds)
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


def test_rank_order_is_visible():
    """The sums above could come out otherwise: in another order these values give other bits."""
    values = [np.float32(1e8), np.float32(1.0), np.float32(-1e8)]
    assert (values[0] + values[1]) + values[2] != (values[0] + values[2]) + values[1]


def add_large(client, index):
    client.init_parameter("x", [1])
    for _ in range(index):
        time.sleep(0.05)
    client.push_parameter("x", [1e8, 1.0, -1e8][2 - index])  # rank order -1e8, 1, 1e8; order of arrival too
    return float(client.pull_parameter("x", "sum"))


def test_sum_has_the_bits_of_rank_order(over):
    assert over(4, play, 1, add_large)[:3] == [float((np.float32(-1e8) + np.float32(1)) + np.float32(1e8))] * 3


def push_special(client, index, values):
    client.init_parameter("x", [2])
    client.push_parameter("x", torch.tensor(values[index]))
    return client.pull_parameter("x", "max")


def test_max_propagates_nan_and_is_exact(over):
    nan, inf = float("nan"), float("inf")
    for values in ([[nan, -inf], [1.0, 2.0], [inf, 1e-45]], [[1.0, -3.0], [nan, -inf], [inf, -2.0]]):
        for got in over(4, play, 1, push_special, values)[:3]:
            assert torch.isnan(got[0])
            assert got[1] == max(v[1] for v in values)


# ---- packed gradients ----------------------------------------------------------------------------------------------


def terngrad_step(client, index, numel, seed, step, parameter, codec):
    """Return the average by the seed's protocol: agree on the largest |g|, push codes, pull their average."""
    gradient = noise(numel, "g", index)
    ternary = Ternary(clip_sigma=None, seed=seed)
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
@pytest.mark.parametrize("codec", [None, Ternary(clip_sigma=None, seed=5)])
def test_terngrad_step_equals_all_reduce_bit_for_bit(over, workers, numel, codec):
    got = over(workers + 1, play, 1, terngrad_step, numel, 5, 7, 3, codec)[:-1]
    grads = [noise(numel, "g", k) for k in range(workers)]
    for exchange in ("all_gather", "reduce_scatter"):
        wanted = run_local(
            workers,
            lambda c, e=exchange: all_reduced(c, grads, Ternary(clip_sigma=None, seed=5), key=3, step=7, exchange=e),
        )
        assert all(same_bits(g, wanted[0]) for g in got)
    assert bool((got[0] != 0).any())


def test_terngrad_step_of_one_worker_is_its_own_code(over):
    got = over(2, play, 1, terngrad_step, 100, 0, 0, 0, None)[0]
    gradient = noise(100, "g", 0)
    ternary = Ternary(clip_sigma=None)
    assert same_bits(got, ternary.decode(ternary.encode(gradient, scale=float(gradient.abs().max()))))


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


@pytest.mark.parametrize("given", [True, False])
def test_own_scales_average_as_an_exchange_does(over, given):
    codec = Ternary(scale="own", seed=9)
    payloads = encode_rounds(codec, 999, 3, 3)
    got = over(4, play, 1, push_payloads, codec, codec if given else None, payloads)[:3]
    for r in range(3):
        grads = [noise(999, r, k) for k in range(3)]
        wanted = run_local(3, lambda c, g=grads, s=r: all_reduced(c, g, codec, key=2, step=s, exchange="all_gather"))
        assert all(same_bits(g[r], wanted[0]) for g in got)


def test_equal_scales_count_as_shared_only_without_a_codec(over):
    """Own scales that happen to be equal keep the arithmetic of own scales when the key has its codec."""
    own = Ternary(scale="own", clip_sigma=None)
    payloads = [[own.encode(noise(500, k), scale=0.3, key=RngKey(0, k)) for k in range(3)]]
    headers_only = over(4, play, 1, push_payloads, own, None, payloads)[0][0]
    as_own = over(4, play, 1, push_payloads, own, own, payloads)[0][0]
    total = sum(own.decode(p) / np.float32(0.3) for p in payloads[0]).round().numpy()
    assert np.array_equal(headers_only.numpy(), np.float32(np.float32(0.3) / np.float32(3)) * total.astype(np.float32))
    assert np.array_equal(as_own.numpy(), reference.float_average([own.decode(p).numpy() for p in payloads[0]]))
    assert not torch.equal(headers_only, as_own)


@pytest.mark.parametrize("given", [True, False])
def test_onebit_averages_as_an_exchange_does(over, given):
    codec, rounds = OneBit(group=100), 4
    payloads = encode_rounds(codec, 999, 3, rounds)
    got = over(4, play, 1, push_payloads, codec, codec if given else None, payloads)[:3]

    def exchange(comm):
        feedback = gradcomp.Feedback({2: 999})
        return [
            gradcomp.all_reduce(noise(999, r, comm.rank), codec, comm, key=2, feedback=feedback, exchange="all_gather")
            for r in range(rounds)
        ]

    wanted = run_local(3, exchange)[0]
    assert all(same_bits(g[r], wanted[r]) for g in got for r in range(rounds))


def test_identity_payloads_average_like_values(over):
    codec = gradcomp.Identity()
    payloads = encode_rounds(codec, 33, 3, 1)
    got = over(4, play, 1, push_payloads, codec, codec, payloads)[:3]
    wanted = reference.float_average([noise(33, 0, k).numpy() for k in range(3)])
    assert all(np.array_equal(g[0].numpy(), wanted) for g in got)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("codec", [Ternary(seed=4, group=64), Ternary(scale="own", seed=4)])
def test_compressed_ternary_is_the_mean_encoded_again(over, servers, codec):
    """The same bytes on every worker and with any number of servers, drawn from stream 2."""
    payloads = encode_rounds(Ternary(scale="own", seed=4, group=codec.group), 999, 2, 2)
    own = Ternary(scale="own", seed=4, group=codec.group)
    got = over(2 + servers, play, servers, push_compressed, codec, own, payloads)[:2]
    for r in range(2):
        mean = torch.from_numpy(reference.float_average([own.decode(p).numpy() for p in payloads[r]]))
        key = RngKey(4, 0, r, zlib.crc32(b"p"), 2)
        wanted = own.requantizer().encode(mean, key=key)
        assert all(same_bits(g[r], wanted) for g in got)
        assert wire.parse(got[0][r].numpy()).stream == 2
        assert codec.decode(got[0][r]).shape == (999,)


def test_the_server_keeps_what_1_bit_leaves_over(over):
    """mean + old residual = decoded + new residual at every round: nothing is lost, and a NaN leaves no trace."""
    codec, rounds, numel = OneBit(group=50), 6, 333
    payloads = encode_rounds(codec, numel, 2, rounds)
    payloads[2][1] = codec.encode(torch.full((numel,), float("nan")), key=RngKey(0, 1, 2, 2))
    got = over(3, play, 1, push_compressed, codec, codec, payloads)[:2]
    residual = torch.zeros(numel)
    for r in range(rounds):
        if r == 2:
            assert all(bool(torch.isnan(codec.decode(g[r])).all()) for g in got)
            continue
        mean = torch.from_numpy(reference.float_average([codec.decode(p).numpy() for p in payloads[r]]))
        before = residual.clone()
        wanted = codec.encode(mean, residual=residual)
        assert all(torch.equal(codec.decode(g[r]), codec.decode(wanted)) for g in got)
        assert torch.equal(residual, (mean + before) - codec.decode(got[0][r]))
    assert bool(residual.any())


def test_without_error_feedback_the_server_keeps_nothing(over):
    codec = OneBit(group=50, error_feedback=False)
    payloads = encode_rounds(codec, 100, 2, 3)
    got = over(3, play, 1, push_compressed, codec, codec, payloads)[0]
    for r in range(3):
        mean = torch.from_numpy(reference.float_average([codec.decode(p).numpy() for p in payloads[r]]))
        assert torch.equal(codec.decode(got[r]), codec.decode(codec.encode(mean)))


def test_one_nan_is_everybodys_nan_for_one_round(over):
    codec = Ternary(clip_sigma=None)
    payloads = [[codec.encode(noise(50, k), scale=2.0, key=RngKey(0, k)) for k in range(3)] for _ in range(3)]
    bad = noise(50, 1)
    bad[7] = float("inf")
    payloads[1][1] = codec.encode(bad)
    for got in over(4, play, 1, push_payloads, codec, codec, payloads)[:3]:
        assert [bool(torch.isnan(g).all()) for g in got] == [False, True, False]
        assert bool(torch.isfinite(got[2]).all())


# ---- rounds --------------------------------------------------------------------------------------------------------


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
        first.append(float(client.pull_parameter("x", "sum")))  # round 1, although rank 0 is past it
        first.append(float(client.pull_parameter("x", "sum")))  # again
    meet(client)
    if index == 0:
        client.push_parameter("x", 1000.0)  # rounds 2 and 3 are open now
        first.append(caught(client.push_parameter, "x", 1.0))
    else:
        time.sleep(0.3)
        client.push_parameter("x", 20.0)
        first.append(float(client.pull_parameter("x", "sum")))
        client.push_parameter("x", 2000.0)
    return [*first, float(client.pull_parameter("x", "sum"))]


def test_two_rounds_may_be_open_and_a_pull_is_of_the_last_push(over):
    ahead, behind, stats = over(3, play, 1, run_ahead)
    assert isinstance(ahead[0], ValueError) and "push 3" in str(ahead[0]) and "[1]" in str(ahead[0])
    assert isinstance(ahead[1], ValueError) and "push 4" in str(ahead[1])
    assert ahead[2] == 3000.0
    assert behind == [3.0, 3.0, 30.0, 3000.0]
    assert stats.errors == 2 and stats.pushes == 3 + 3 + 4


def disagree(client, index, pulls):
    client.init_parameter("x", [1])
    client.init_parameter("y", [1])
    client.push_parameter("x", 1.0)
    meet(client)  # every push is in before the first pull
    got = [caught(client.pull_parameter, "x", pulls[index])]
    meet(client)
    got += [caught(client.pull_parameter, "x", pulls[index]), caught(client.push_parameter, "x", 1.0)]
    client.push_parameter("y", 1.0)
    return got, float(client.pull_parameter("y", "mean"))


def test_differing_reduce_methods_are_an_error_for_all(over):
    for got, other in over(4, play, 1, disagree, ["sum", "max", "sum"])[:3]:
        assert other == 1.0
        assert all(isinstance(e, PeerMismatch) and e.field == "reduce_method" for e in got[1:])
        assert {got[1].expected, got[1].got} == {"sum", "max"}


def disagree_waiting(client, index):
    """Rank 0 waits for rank 2's push when rank 1 pulls otherwise; nobody closes before rank 0 should know."""
    client.init_parameter("x", [1])
    meet(client)
    if index == 2:
        time.sleep(3)
        return 0.0, caught(client.push_parameter, "x", 1.0)
    client.push_parameter("x", 1.0)
    time.sleep(0.2 * index)
    begun = time.monotonic()
    error = caught(client.pull_parameter, "x", ("sum", "mean")[index])
    waited = time.monotonic() - begun
    time.sleep(3)
    return waited, error


def test_a_waiting_pull_hears_of_another_method_at_once(over):
    results = over(4, play, 1, disagree_waiting)[:3]
    assert all(waited < 2 for waited, _ in results)
    assert [(type(e), e.field, e.rank, e.expected, e.got) for _, e in results] == [
        (PeerMismatch, "reduce_method", 1, "sum", "mean"),
        (PeerMismatch, "reduce_method", 0, "mean", "sum"),
        (PeerMismatch, "reduce_method", 1, "sum", "mean"),
    ]


def disagree_compressed(client, index):
    codec = Ternary(clip_sigma=None)
    client.init_parameter("x", [codec.payload_nbytes(8)], "uint8")
    client.push_parameter("x", codec.encode(torch.ones(8), scale=1.0))
    caught(client.pull_parameter, "x", "decode_average", compressed=bool(index))
    meet(client)
    return caught(client.pull_parameter, "x", "decode_average", compressed=bool(index))


def test_compressed_on_one_side_only_is_an_error_for_all(over):
    for error in over(3, play, 1, disagree_compressed)[:2]:
        assert isinstance(error, PeerMismatch) and error.field == "compressed"


# ---- what clients must agree on ------------------------------------------------------------------------------------

CODEC = Ternary(clip_sigma=None)
ASYNCHRONOUS = {"asynchronous": True, "learning_rate": 0.5, "value": torch.zeros(64)}
DIFFERENCES = [
    ("shape", ([4], "float32", {}), ([2, 2], "float32", {})),
    ("dtype", ([64], "float32", {}), ([64], "uint8", {})),
    ("codec", ([64], "uint8", {"codec": "onebit"}), ([64], "uint8", {"codec": "ternary"})),
    ("codec", ([64], "uint8", {}), ([64], "uint8", {"codec": "ternary"})),
    ("codec_options", ([64], "uint8", {"codec": Ternary(seed=1)}), ([64], "uint8", {"codec": Ternary(seed=2)})),
    ("asynchronous", ([64], "float32", ASYNCHRONOUS), ([64], "float32", {})),
    ("learning_rate", ([64], "float32", ASYNCHRONOUS), ([64], "float32", {**ASYNCHRONOUS, "learning_rate": 0.25})),
]


def init_otherwise(client, index, settings):
    shape, dtype, options = settings[index]
    client.init_parameter("good", [1])
    if index == 1:
        meet(client)
    init = caught(client.init_parameter, "x", shape, dtype, **options)
    if index == 0:
        again = caught(client.init_parameter, "x", shape, dtype, **options)  # twice alike is fine
        assert again is None
        meet(client)
    meet(client, "meet again")
    use = caught(client.init_parameter, "x", shape, dtype, **options)
    push = caught(client.push_parameter, "x", torch.zeros(shape, dtype=getattr(torch, dtype)))
    client.push_parameter("good", 2.0)
    return init, use, push, float(client.pull_parameter("good", "mean"))


@pytest.mark.parametrize(("field", "here", "there"), DIFFERENCES)
def test_different_settings_are_a_mismatch_at_both_sides(over, field, here, there):
    first, second, _ = over(3, play, 1, init_otherwise, [here, there])
    assert first[0] is None
    assert isinstance(first[2], PeerMismatch) and (first[2].field, first[2].rank) == (field, 1)
    for error in (first[1], second[0], second[1]):
        assert isinstance(error, PeerMismatch) and error.field == field
    assert second[0].rank == 0 and second[0].expected == first[2].got
    assert isinstance(second[2], ValueError)  # it never had the key
    assert first[3] == second[3] == 2.0


def push_unlike(client, index, payloads, codec):
    client.init_parameter("x", [payloads[index].numel()], "uint8", codec=codec)
    push = caught(client.push_parameter, "x", payloads[index])
    meet(client)
    return push, caught(client.pull_parameter, "x", "decode_average")


@pytest.mark.parametrize(
    ("field", "codec", "make"),
    [
        ("step", None, lambda k: CODEC.encode(torch.ones(8), scale=1.0, key=RngKey(step=k))),
        ("stream", None, lambda k: CODEC.encode(torch.ones(8), scale=1.0, key=RngKey(stream=k))),
        ("dtype", None, lambda k: CODEC.encode(torch.ones(8, dtype=[torch.float32, torch.float16][k]), scale=1.0)),
        ("scale", CODEC, lambda k: CODEC.encode(torch.ones(8), scale=1.0 + k)),
        # 5 + 2 scales and 1 byte of codes against 3 + 5: as many bytes, otherwise divided
        (
            "codec",
            None,
            lambda k: [Ternary(group=4), OneBit(group="tensor")][k].encode(torch.ones(16 if k == 0 else 96)),
        ),
    ],
)
def test_payloads_of_one_round_must_be_alike(over, field, codec, make):
    payloads = [make(0), make(1)]
    if field == "codec":  # pad neither: choose sizes that are equal
        payloads = [Ternary(group="tensor").encode(torch.ones(32)), OneBit(group="tensor").encode(torch.ones(32))]
        assert payloads[0].numel() == payloads[1].numel()
    results = over(3, play, 1, push_unlike, payloads, codec)[:2]
    assert sum(push is not None for push, _ in results) == 1
    for rank, (push, pull) in enumerate(results):
        assert isinstance(pull, PeerMismatch) and (pull.field, pull.rank) == (field, 1 - rank)
        assert push is None or (isinstance(push, PeerMismatch) and push.field == field)


# ---- payloads that do not decode -----------------------------------------------------------------------------------


def resealed(payload, change):
    """Return a copy whose header and body `change` has changed, under a right checksum."""
    out = payload.clone()
    change(out.numpy())
    crc = ref_payload.crc32c(out.numpy()[32:].tobytes(), ref_payload.crc32c(out.numpy()[:28].tobytes()))
    out.numpy()[28:32] = np.frombuffer(struct.pack("<I", crc), np.uint8)
    return out


def put(at, data):
    def change(view):
        view[at : at + len(data)] = np.frombuffer(data, np.uint8)

    return change


def flipped(payload):
    out = payload.clone()
    out[-1] ^= 1
    return out


GOOD = CODEC.encode(torch.linspace(-1, 1, 32), scale=1.0)
DAMAGE = [
    ("crc", flipped(GOOD)),
    ("magic", torch.zeros_like(GOOD)),
    ("magic", torch.arange(GOOD.numel()).to(torch.uint8)),
    ("version", resealed(GOOD, put(4, b"\x02"))),
    ("codec", resealed(GOOD, put(5, b"\x09"))),
    ("codec", resealed(GOOD, put(5, b"\x04"))),
    ("codec", resealed(GOOD, put(5, b"\x03"))),
    ("dtype", resealed(GOOD, put(6, b"\x07"))),
    ("flags", resealed(GOOD, put(7, b"\x80"))),
    ("segmented", resealed(GOOD, lambda v: (put(7, b"\x02")(v), put(12, bytes(4))(v)))),
    ("truncated", resealed(GOOD, put(8, struct.pack("<I", 2**32 - 1)))),
    ("trailing", resealed(GOOD, put(8, struct.pack("<I", 4)))),
    ("group_numel", resealed(GOOD, put(12, bytes(4)))),
    ("scale_count", resealed(GOOD, put(16, struct.pack("<I", 2**31)))),
    ("scale", resealed(GOOD, put(32, struct.pack("<f", float("nan"))))),
    ("scale", resealed(GOOD, put(32, struct.pack("<f", -1.0)))),
    ("code", resealed(GOOD, put(36, b"\xff"))),
]


def push_damaged(client, index, damaged):
    client.init_parameter("x", [GOOD.numel()], "uint8", codec=CODEC)
    client.init_parameter("y", [1])
    push = caught(client.push_parameter, "x", damaged if index == 1 else GOOD)
    pull = caught(client.pull_parameter, "x", "decode_average")
    client.push_parameter("y", 1.0)
    other = float(client.pull_parameter("y", "sum"))
    client.push_parameter("x", GOOD)
    return push, pull, other, client.pull_parameter("x", "decode_average")


@pytest.mark.parametrize(("check", "damaged"), DAMAGE, ids=[f"{n}-{c}" for n, (c, _) in enumerate(DAMAGE)])
def test_a_payload_that_does_not_decode_fails_its_round_only(over, check, damaged):
    results = over(4, play, 1, push_damaged, damaged)[:3]
    for rank, (push, pull, other, after) in enumerate(results):
        assert isinstance(pull, CorruptPayload) and pull.check == check and "rank 1" in str(pull)
        assert (push is None) == (rank != 1)
        assert other == 3.0
        assert torch.equal(after, CODEC.decode(GOOD))
    assert isinstance(results[1][0], CorruptPayload) and results[1][0].check == check


# ---- wrong arguments -----------------------------------------------------------------------------------------------


def lone_client(**options):
    """Return a client whose server never answers: what it raises at once, it raises by itself."""
    group = LocalCommunicator.group(2)
    client = ParameterClient(group[0], 1, timeout_s=0.1, **options)
    client._keys["f"] = (make_spec((2,), "float32", None, False, None), (2,))
    client._keys["u"] = (make_spec((4,), "uint8", None, False, None), (4,))
    client._keys["a"] = (make_spec((2,), "float32", None, True, 0.1), (2,))
    return client


WRONG = [
    ("init_parameter", ("", [1]), {}, "key"),
    ("init_parameter", ("k" * 256, [1]), {}, "key"),
    ("init_parameter", ("\ud800", [1]), {}, "key"),
    ("init_parameter", (3, [1]), {}, "3"),
    ("init_parameter", ("k", [1], "float64"), {}, "float64"),
    ("init_parameter", ("k", [-1]), {}, "-1"),
    ("init_parameter", ("k", [1.5]), {}, "1.5"),
    ("init_parameter", ("k", [1] * 9), {}, "8 dimensions"),
    ("init_parameter", ("k", [2**40]), {}, str(2**40)),
    ("init_parameter", ("k", [1]), {"codec": "ternary"}, "uint8"),
    ("init_parameter", ("k", [1], "uint8"), {"codec": "zip"}, "zip"),
    ("init_parameter", ("k", [1]), {"asynchronous": True}, "learning_rate"),
    ("init_parameter", ("k", [1]), {"learning_rate": 0.5}, "0.5"),
    ("init_parameter", ("k", [1]), {"asynchronous": True, "learning_rate": float("nan")}, "nan"),
    ("init_parameter", ("k", [1]), {"asynchronous": True, "learning_rate": 0.5}, "value"),
    ("init_parameter", ("k", [1]), {"value": torch.zeros(1)}, "value"),
    ("init_parameter", ("k", [1]), {"asynchronous": True, "learning_rate": 0.5, "value": torch.zeros(2)}, "(2,)"),
    ("init_parameter", ("k", [1]), {"asynchronous": 1, "learning_rate": 0.5}, "1"),
    ("push_parameter", ("nobody", 1.0), {}, "nobody"),
    ("push_parameter", ("f", torch.zeros(3)), {}, "(3,)"),
    ("push_parameter", ("f", 1.0), {}, "()"),
    ("push_parameter", ("f", torch.zeros(2, dtype=torch.float64)), {}, "float64"),
    ("push_parameter", ("u", torch.zeros(4)), {}, "float32"),
    ("push_parameter", ("u", [1, 2, 3, 300]), {}, "300"),
    ("push_parameter", ("f", "text"), {}, "text"),
    ("pull_parameter", ("nobody", "sum"), {}, "nobody"),
    ("pull_parameter", ("f", "median"), {}, "median"),
    ("pull_parameter", ("f",), {}, "None"),
    ("pull_parameter", ("f", "decode_average"), {}, "decode_average"),
    ("pull_parameter", ("u", "sum"), {}, "sum"),
    ("pull_parameter", ("f", "sum"), {"compressed": True}, "compressed"),
    ("pull_parameter", ("u", "decode_average"), {"compressed": 1}, "1"),
    ("pull_parameter", ("a", "sum"), {}, "asynchronous"),
    ("pull_parameter", ("a",), {"compressed": True}, "asynchronous"),
]


@pytest.mark.parametrize(("method", "args", "options", "word"), WRONG)
def test_wrong_arguments_name_the_value(method, args, options, word):
    with pytest.raises(ValueError) as caught_error:
        getattr(lone_client(), method)(*args, **options)
    assert word in str(caught_error.value)


def test_tensors_elsewhere_are_unsupported():
    with pytest.raises(UnsupportedTensor, match="contiguous"):
        lone_client().push_parameter("f", torch.zeros(4)[::2])
    with pytest.raises(UnsupportedTensor, match="sparse"):
        lone_client().push_parameter("f", torch.zeros(2).to_sparse())


@pytest.mark.parametrize("servers", [0, 3, -1, True, None, "1", [], [0, 0], [3], [-1], [0, 1, 2], [1.0], 1.5])
def test_servers_must_exist_and_leave_a_worker(servers):
    with pytest.raises(ValueError) as error:
        messages.server_ranks(servers, 3)
    assert repr(servers) in str(error.value)


def test_servers_by_number_are_the_last_ranks():
    assert messages.server_ranks(2, 5) == (3, 4) and messages.server_ranks((2, 0), 3) == (2, 0)


def test_each_side_stays_on_its_ranks():
    group = LocalCommunicator.group(2)
    with pytest.raises(ValueError, match="rank 0 is no server"):
        serve(group[0], [1])
    with pytest.raises(ValueError, match="rank 1 is a server"):
        ParameterClient(group[1], [1])
    for timeout_s in (0, -1, "x", float("nan")):
        with pytest.raises(ValueError, match="timeout_s"):
            ParameterClient(group[0], [1], timeout_s=timeout_s)
    with pytest.raises(ValueError, match="timeout_s"):
        serve(group[1], [1], timeout_s=0)


def test_keys_are_spread_by_a_pinned_hash():
    names = [f"layer{n}.weight" for n in range(300)]
    homes = [messages.home_of(name, (4, 5, 6)) for name in names]
    assert all(70 < homes.count(rank) < 130 for rank in (4, 5, 6))
    assert [messages.home_of(k, (0, 1, 2)) for k in ("max_abs_grad", "op_id_grads", "ключ")] == [1, 1, 2]


def use_closed(client, index):
    client.init_parameter("x", [1])
    client.close()
    client.close()
    return caught(client.push_parameter, "x", 1.0)


def test_a_closed_client_says_so(over):
    error, stats = over(2, play, 1, use_closed)
    assert isinstance(error, RuntimeError) and "closed" in str(error)
    assert stats.lost == [] and stats.errors == 0


# ---- what reaches the server past the client's checks --------------------------------------------------------------


def ask_raw(client, kind, key="f", method=None, compressed=False, body=None):
    return client._ask(kind, key, body, room_nbytes=64, method=method, compressed=compressed)


def send_wrong(client, index):
    client.init_parameter("f", [2])
    client.init_parameter("u", [GOOD.numel()], "uint8")
    short = torch.zeros(3, dtype=torch.uint8)
    errors = [
        caught(ask_raw, client, Kind.PUSH, key="unknown", body=short),
        caught(ask_raw, client, Kind.PULL, key="unknown", method="sum"),
        caught(ask_raw, client, Kind.CANCEL, key="unknown"),
        caught(ask_raw, client, Kind.PULL, method="sum"),  # before the first push
        caught(ask_raw, client, Kind.PUSH, body=short),
        caught(ask_raw, client, Kind.INIT, key="", body=pack_spec(make_spec((1,), "float32", None, False, None), None)),
    ]
    client.push_parameter("f", torch.ones(2))
    client.push_parameter("u", GOOD)
    errors += [
        caught(ask_raw, client, Kind.PULL, method=None),
        caught(ask_raw, client, Kind.PULL, method="decode_average"),
        caught(ask_raw, client, Kind.PULL, method="sum", compressed=True),
        caught(ask_raw, client, Kind.PULL, key="u", method="max"),
    ]
    corrupt = [
        caught(ask_raw, client, Kind.INIT, key="new", body=short),
        caught(ask_raw, client, Kind.OK),
    ]
    client._digest ^= 1
    mismatch = caught(client.push_parameter, "f", torch.ones(2))
    client._digest ^= 1
    return errors, corrupt, mismatch, client.pull_parameter("f", "sum")


def test_the_server_checks_for_itself(over):
    for errors, corrupt, mismatch, after in over(3, play, 1, send_wrong)[:2]:
        assert [type(e) for e in errors] == [ValueError] * len(errors)
        assert [type(e) for e in corrupt] == [CorruptPayload] * 2
        assert isinstance(mismatch, PeerMismatch) and (mismatch.field, mismatch.rank) == ("servers", 2)
        assert torch.equal(after, torch.full((2,), 2.0))


def send_garbage(client, index):
    client.init_parameter("x", [1])
    replies = []
    if index == 0:
        generator = torch.Generator().manual_seed(1)
        push = messages.pack(Message(Kind.PUSH, 7, client._digest, "x", body=torch.zeros(4, dtype=torch.uint8)))
        garbage = [torch.empty(0, dtype=torch.uint8), torch.zeros(24, dtype=torch.uint8), push[:-1], push[:20]]
        garbage += [torch.randint(0, 256, (n,), generator=generator).to(torch.uint8) for n in (1, 23, 24, 25, 300)]
        for data in garbage:
            client._comm.start_send(data, client._servers[0]).wait(5)
            _, raw = client._comm.receive(5, client._servers[0], max_nbytes=10_000)
            reply = messages.parse(raw)
            replies.append((reply.kind, messages.parse_error(reply.data(), "push", 0.0)))
    client.push_parameter("x", 1.0)
    return replies, float(client.pull_parameter("x", "sum"))


def test_hostile_bytes_get_an_error_reply_and_the_server_lives(over):
    first, second, stats = over(3, play, 1, send_garbage)
    assert first[1] == second[1] == 2.0
    assert len(first[0]) == 9 == stats.errors
    for kind, error in first[0]:
        assert kind == Kind.ERROR and isinstance(error, CorruptPayload) and error.check == "message"


def send_too_much(client, index):
    if index == 0:
        client._comm.start_send(torch.zeros(2000, dtype=torch.uint8), client._servers[0]).wait(5)
    return meet(client)


def test_a_message_that_is_too_long_is_dropped(monkeypatch):
    monkeypatch.setattr(loop, "MAX_MESSAGE_NBYTES", 1000)
    *met, stats = run_local(3, play, 1, send_too_much)
    assert met == [2, 2] and stats.unread == 1


HEADERS = st.tuples(
    st.sampled_from([messages.MAGIC, 0, 2**32 - 1]),
    st.sampled_from([1, 0, 255]),
    st.integers(0, 9),
    st.integers(0, 255),
    st.integers(0, 255),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.one_of(st.integers(0, 80), st.integers(0, 2**64 - 1)),
).map(lambda fields: struct.pack("<IBBBBIIQ", *fields))


@st.composite
def almost_messages(draw):
    """Bytes that look like messages, with true lengths more often than not."""
    kind, key = draw(st.sampled_from(list(Kind))), draw(st.sampled_from(["x", "u", "new", "y" * 9, ""]))
    spec = struct.pack(
        "<BBBBIQd",
        *(draw(st.integers(0, n)) for n in (2, 9, 5, 8)),
        0,
        0,
        draw(st.sampled_from([0.0, 0.5, float("nan"), 1e300])),
    )
    dims = b"".join(
        struct.pack("<Q", draw(st.sampled_from([0, 1, 2, 2**20, 2**63]))) for _ in range(draw(st.integers(0, 9)))
    )
    values = [b"", bytes(4), bytes(8), spec, spec + dims, GOOD.numpy().tobytes(), spec + dims + bytes(4)]
    body = draw(st.one_of(st.binary(max_size=60), st.sampled_from(values)))
    method = draw(st.sampled_from([None, *messages.METHODS]))
    data = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else None
    raw = bytearray(
        messages.pack(
            Message(
                kind,
                draw(st.integers(0, 9)),
                draw(st.sampled_from([DIGEST, DIGEST, 3])),
                key,
                method,
                draw(st.booleans()),
                data,
            )
        )
        .numpy()
        .tobytes()
    )
    for _ in range(draw(st.integers(0, 2))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


DIGEST = messages.servers_digest((2,), 3)


class Mailbox:
    """A communicator that keeps what a server sends."""

    rank, world_size = 2, 3

    def __init__(self):
        self.sent = []

    def start_send(self, message, to):
        self.sent.append((to, message))
        return Done()


class Done(Work):
    def is_done(self):
        return True

    def wait(self, timeout_s):
        return


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.tuples(HEADERS, st.binary(max_size=90)).map(b"".join), almost_messages()))
def test_any_bytes_parse_or_are_refused_by_name(data):
    try:
        message = messages.parse(as_tensor(data))
    except CorruptPayload as error:
        assert error.check == "message"
        return
    assert messages.pack(message).numpy().tobytes() == data
    try:
        spec, value = parse_spec(message.data())
    except CorruptPayload:
        return
    assert torch.equal(pack_spec(spec, value), message.data())


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), almost_messages()), min_size=1, max_size=12))
def test_a_server_survives_any_sequence_of_requests(requests):
    box = Mailbox()
    server = loop._Server(box, (2,))
    for key, dtype, shape in (("x", "float32", (1,)), ("u", "uint8", (GOOD.numel(),))):
        for rank in (0, 1):
            body = pack_spec(make_spec(shape, dtype, None, False, None), None)
            server._handle(rank, messages.pack(Message(Kind.INIT, 1, DIGEST, key, body=body)))
    for rank, raw in requests:
        before = len(box.sent)
        server._handle(rank, as_tensor(raw))
        for to, reply in box.sent[before:]:
            found = messages.parse(reply)
            assert to in (0, 1) and found.kind in (Kind.OK, Kind.ERROR)
            if found.kind == Kind.ERROR:
                error = messages.parse_error(found.data(), "push", 0.0)
                assert isinstance(error, (CorruptPayload, PeerMismatch, PeerLost, ValueError))


class Untaken(Done):
    def is_done(self):
        return False


def test_a_client_that_takes_no_replies_is_ended_and_costs_no_more_memory():
    box = Mailbox()
    box.start_send = lambda message, to: box.sent.append((to, message)) or (Untaken() if to == 0 else Done())
    server = loop._Server(box, (2,))
    for rank in (0, 1):
        for number in range(50):
            server._handle(rank, messages.pack(Message(Kind.PULL, number, DIGEST, "unknown")))
    assert [to for to, _ in box.sent].count(0) == loop.MAX_UNTAKEN and [to for to, _ in box.sent].count(1) == 50
    assert server._open == {1}


@pytest.mark.parametrize("shape", [(2**63, 2**63), (2**32,), (2**31,)])
def test_no_memory_is_taken_by_a_number_that_was_read(shape):
    body = pack_spec(make_spec((1,), "float32", None, False, None), None).numpy().tobytes()
    body = body[:1] + bytes([len(shape)]) + body[2:24] + struct.pack(f"<{len(shape)}Q", *shape)
    with pytest.raises(CorruptPayload):
        parse_spec(as_tensor(body))


@pytest.mark.parametrize(
    "error",
    [
        PeerMismatch("shape", 2, "(1,)", "(2,)"),
        CorruptPayload("crc", "stored 1, the bytes give 2"),
        ValueError("key 'ключ'"),
        PeerLost("pull", -1, 1.5, "rank 1 is gone"),
    ],
)
def test_errors_travel_as_themselves(error):
    again = messages.parse_error(messages.pack_error(error), "pull", 1.5)
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"error": "PeerMismatch", "fields": [1]}', b'{"error": 1}', b"\xff", b"[" * 100_000]
)
def test_an_error_that_cannot_be_read_is_still_an_error(body):
    found = messages.parse_error(as_tensor(body), "pull", 0.0)
    assert isinstance(found, CorruptPayload) and found.check == "message"


def test_other_errors_travel_as_value_errors():
    found = messages.parse_error(messages.pack_error(NativeError("GC_X", "f")), "pull", 0.0)
    assert type(found) is ValueError and "GC_X" in str(found)


# ---- ranks that die or are silent (communicators of threads: a closed one is a dead rank) ----------------------------


def worker_dies(comm, farewell):
    if comm.rank == 3:
        return serve(comm, 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=20)
    for key in ("done", "half", "untouched"):
        client.init_parameter(key, [1])
    client.push_parameter("done", 1.0)
    client.pull_parameter("done", "sum")
    if comm.rank == 2:
        time.sleep(0.5)
        if farewell:
            client.close()
        comm.abort()
        return None
    begun = time.monotonic()
    client.push_parameter("half", 1.0)
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
    first, second, _, stats = run_local(4, worker_dies, farewell, timeout_s=40)
    for waited, errors, done in (first, second):
        assert waited < 10
        for error in errors:
            assert isinstance(error, PeerLost) and "rank 2" in str(error), error
        assert [e.phase for e in errors] == ["pull", "pull", "push", "push"]
        assert done == 3.0
    assert stats.lost == ([] if farewell else [2])


def server_dies(comm, how):
    if comm.rank == 2:
        for _ in range(3):  # two inits and one push
            rank, raw = comm.receive(10, max_nbytes=1000)
            comm.start_send(
                messages.pack(Message(Kind.OK, messages.request_number(raw), 0, body=as_tensor(bytes(8)))), rank
            )
        if how == "dies":
            comm.abort()
        else:
            time.sleep(4)
        return None
    client = ParameterClient(comm, 1, timeout_s=1.0)
    client.init_parameter("x", [1])
    begun, error = time.monotonic(), None
    while error is None:
        error = caught(client.push_parameter, "x", 1.0) or caught(client.pull_parameter, "x", "sum")
    waited = time.monotonic() - begun
    again = caught(client.pull_parameter, "x", "sum")
    client.close()
    return waited, error, again


@pytest.mark.parametrize("how", ["dies", "falls silent"])
def test_a_server_that_is_lost_is_told_in_bounded_time(how):
    for waited, error, again in run_local(3, server_dies, how, timeout_s=40)[:2]:
        assert waited < 4
        for e in (error, again):
            assert isinstance(e, PeerLost) and "server" in str(e) and e.phase in ("push", "pull") and e.bucket == -1


def late_worker(client, index):
    client.init_parameter("x", [1])
    if index == 1:
        time.sleep(1.5)
        client.push_parameter("x", 2.0)
        return client.pull_parameter("x", "sum")
    client._timeout_s = 0.4
    client.push_parameter("x", 1.0)
    error = caught(client.pull_parameter, "x", "sum")
    client._timeout_s = 20.0
    return error, float(client.pull_parameter("x", "sum")), float(client.pull_parameter("x", "sum"))


def test_a_silent_worker_is_named_and_may_still_come(over):
    (error, *after), late, _ = over(3, play, 1, late_worker)
    assert isinstance(error, PeerLost) and error.phase == "pull" and 0.4 <= error.waited_s < 5
    assert "ranks [1]" in str(error) and "'x'" in str(error)
    assert after == [3.0, 3.0] and float(late) == 3.0


class Slow(LocalCommunicator):
    """A server's communicator that delays one reply past the client's patience."""

    def __init__(self, comm):
        self.__dict__.update(comm.__dict__)
        self.replies = 0

    def start_send(self, message, to):
        self.replies += 1
        if self.replies == 2:
            late = message.clone()
            threading.Timer(0.8, lambda: LocalCommunicator.start_send(self, late, to)).start()
            return Done()
        return super().start_send(message, to)


def slow_server(comm):
    if comm.rank == 1:
        return serve(Slow(comm), 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=0.5)
    client.init_parameter("x", [1])
    error = caught(client.push_parameter, "x", 1.0)
    time.sleep(0.6)  # the old reply is there now
    value = float(client.pull_parameter("x", "sum"))
    client.close()
    return error, value


def test_a_late_reply_is_not_taken_for_another():
    error, value = run_local(2, slow_server, timeout_s=30)[0]
    assert isinstance(error, PeerLost) and error.phase == "push" and "silent" in str(error)
    assert value == 1.0


class Stuck(Slow):
    """A server's communicator whose messages to rank 0 never arrive, as those to a stopped process."""

    def start_send(self, message, to):
        return Never() if to == 0 else LocalCommunicator.start_send(self, message, to)


class Never(Work):
    def wait(self, timeout_s):
        time.sleep(min(timeout_s, 0.1))
        raise TimeoutError


def stuck_client(comm):
    if comm.rank == 2:
        return serve(Stuck(comm), 1, timeout_s=20)
    client = ParameterClient(comm, 1, timeout_s=1.0 if comm.rank == 0 else 10.0)
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
    assert isinstance(stuck, PeerLost) and other == 20.0 and time.monotonic() - begun < 10


def never_close(comm):
    if comm.rank == 2:
        return caught(serve, comm, 1, timeout_s=0.5)
    client = ParameterClient(comm, 1, timeout_s=5)
    client.init_parameter("x", [1])
    if comm.rank == 0:
        client.close()
    time.sleep(1.5)
    return None


def test_a_server_gives_up_silent_workers():
    error = run_local(3, never_close, timeout_s=30)[2]
    assert isinstance(error, PeerLost) and error.phase == "serve" and "[1]" in str(error)


# ---- asynchronous keys ---------------------------------------------------------------------------------------------


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
        for push in (np.array([[0.3, -0.7]], np.float32) * np.float32(turn + 1), np.ones((1, 2), np.float32)):
            wanted = wanted + push * np.float32(-0.1)
    assert one.shape == (1, 2) and same_bits(one, two) and np.array_equal(one.numpy(), wanted)
    assert torch.equal(first[0], torch.tensor([[1.0, 2.0]]))
    assert bool((second[0] < first[0])[0, 0])  # the second worker sees the first one's pushes at once
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


def test_a_push_returns_its_staleness_and_nan_leaves_no_trace(over):
    for index, (stale, synchronous, bad, value) in enumerate(over(3, play, 1, push_returns)[:2]):
        assert stale == index and synchronous == 0 and value == 2.0
        assert isinstance(bad, ValueError) and "NaN" in str(bad)


def descend_packed(client, index):
    codec = Ternary(clip_sigma=None)
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


def test_asynchronous_packed_gradients(over):
    codec = Ternary(clip_sigma=None)
    steps = [codec.decode(codec.encode(noise(32, k), key=RngKey(rank=k))).view(4, 8) for k in range(2)]
    orders = [(torch.ones(4, 8) + a * -0.5) + b * -0.5 for a, b in (steps, steps[::-1])]
    for wrong, got in over(3, play, 1, descend_packed)[:2]:
        assert any(torch.equal(got, order) for order in orders)
        assert isinstance(wrong[0], CorruptPayload) and wrong[0].check == "crc"
        assert isinstance(wrong[1], ValueError) and "31" in str(wrong[1])


def lone_worker(client, index):
    client.init_parameter("w", [1], asynchronous=True, learning_rate=1.0, value=torch.zeros(1))
    if index == 1:
        client._comm.abort()
        return None
    time.sleep(0.5)
    client.push_parameter("w", 1.0)
    return float(client.pull_parameter("w"))


def test_asynchronous_keys_do_not_need_the_others():
    assert run_local(3, play, 1, lone_worker, timeout_s=30)[0] == 1.0


# ---- the rest of the house -----------------------------------------------------------------------------------------


def test_the_server_counts(over):
    stats = over(3, play, 1, add_large_twice)[2]
    assert (stats.pushes, stats.pulls, stats.errors, stats.unread, stats.lost) == (4, 4, 0, 0, [])
    assert stats.bytes_received > 0 and stats.bytes_sent > 0 and stats.staleness_mean == 0.0


def add_large_twice(client, index):
    client.init_parameter("x", [1])
    for _ in range(2):
        client.push_parameter("x", 1.0)
        client.pull_parameter("x", "sum")
    assert client.bytes_sent > 0 and client.bytes_received > 0


def test_the_seed_s_calls_work_as_written(over):
    assert over(2, play, 1, seed_calls)[0] == 0.5


def seed_calls(client, index):
    client.init_parameter(key="max_abs_grad", shape=[1], dtype="float32")
    client.push_parameter(key="max_abs_grad", value=0.5)
    client.init_parameter(key="op_id_grads", shape=[2, 2], dtype="uint8")
    error = caught(client.push_parameter, key="op_id_grads", value=[[1, 5], [8, 2]])
    assert isinstance(error, CorruptPayload) and error.check == "truncated"  # bytes, but of no payload
    return float(client.pull_parameter(key="max_abs_grad", reduce_method="max"))


def test_documentation_names_every_argument_member_and_phase():
    text = (
        (ROOT / "docs/reference/api.md").read_text(encoding="utf-8").split("## Parameter server")[1].split("\n## ")[0]
    )
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text))))
    for value in (serve, ParameterClient.__init__, *(getattr(ParameterClient, n) for n in CLIENT_METHODS)):
        assert set(inspect.signature(value).parameters) - {"self"} <= words, value
    assert {*CLIENT_METHODS, *vars(ServerStats()), "staleness_mean", *messages.METHODS} <= words
    errors = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    for word in ("`init`", "`push`", "`pull`", "`serve`", "`message`", "`reduce_method`", "`compressed`", "`servers`"):
        assert word in errors, word


CLIENT_METHODS = [n for n, v in vars(ParameterClient).items() if inspect.isfunction(v) and not n.startswith("_")]


@pytest.mark.slow
def test_the_example_trains_and_equals_all_reduce():
    command = [sys.executable, str(ROOT / "examples/parameter_server.py"), "--local", "2", "--steps", "40"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equals gradcomp.all_reduce bit for bit" in done.stdout
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", done.stdout)[1])
    assert accuracy > 50.0, done.stdout
