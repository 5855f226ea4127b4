"""The parameter server: exact results of every reduce method, rounds, asynchronous keys."""

import inspect
import os
import re
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from _forks import python
from _kinds import check_kinds
from _ranks import output_of, run_local
from _serving import CUT, WHOLE, caught, flipped, meet, noise, push_payloads, run, same_bits
from reference import codec as reference

import gradcomp
from gradcomp import OneBit, Ternary, TernGrad
from gradcomp.codecs import EntropyCoded, RngKey
from gradcomp.errors import CorruptPayload, PeerMismatch
from gradcomp.payload import wire
from gradcomp.server import ParameterClient, Pending, ServerStats, messages, serve

ROOT = Path(__file__).parents[2]
NAN, INF = float("nan"), float("inf")

# ---- reduce methods ------------------------------------------------------------------------------


def reduce_all(client, index, values):
    """Push every value, the last worker first; return what each pull gives."""
    workers, out = len(values[0][2]), []
    for key, method, pushed in values:
        client.init_parameter(key, pushed[index].shape)
        for turn in reversed(range(workers)):
            if turn == index:
                client.push_parameter(key, pushed[index])
            meet(client, "turn")
        out.append(client.pull_parameter(key, method))
    return out


KEYS = ["a", "bb", "layer/3.weight", "ключ"]
REDUCED = [  # workers, servers, shape, options of the clients
    *((2, 1, (7, 3), WHOLE), (1, 1, (1,), WHOLE), (3, [0], (7, 3), WHOLE), (2, 2, (), WHOLE)),
    *((1, [1, 3, 0], (1,), WHOLE), (4, 1, (7, 3), WHOLE), (3, 2, (0,), WHOLE)),
    *((4, 3, (7, 3), WHOLE), (2, 2, (20, 50), CUT), (3, 1, (65,), CUT)),
]


@pytest.mark.parametrize(("workers", "servers", "shape", "options"), REDUCED)
def test_values_are_reduced_in_rank_order(over, workers, servers, shape, options):
    """Bit for bit, although they arrive the other way round; a NaN is the maximum."""
    numel = int(np.prod(shape))
    values = [
        (key, method, [noise(numel, key, method, k).view(shape) for k in range(workers)])
        for key in KEYS
        for method in ("max", "sum", "mean")
    ]
    special = [[NAN, -INF], [INF, -3.0], [1.0, 1e-45], [2.0, -2.0]][:workers]
    values.append(("special", "max", [torch.tensor(v) for v in special]))
    options = {"workers": workers, "servers": servers, "over": over} | options
    for got in run(reduce_all, values, **options)[0]:
        for (_, method, pushed), pulled in zip(values, got, strict=True):
            pushed = [value.numpy() for value in pushed]
            total = pushed[0].copy()
            for value in pushed[1:]:
                total = np.maximum(total, value) if method == "max" else total + value
            if method == "mean":
                total = reference.float_average([v.ravel() for v in pushed]).reshape(shape)
            assert np.array_equal(pulled.numpy(), total, equal_nan=True)


# ---- packed gradients ----------------------------------------------------------------------------


def terngrad_step(client, index, numel, codec):
    """Return the average by the protocol of 2017: agree on the largest |g|, push codes, pull
    their average.
    """
    gradient = noise(numel, "g", index)
    ternary = TernGrad(clip_sigma=None, seed=5)
    client.init_parameter("max_abs_grad", [1], "float32")
    client.push_parameter("max_abs_grad", float(gradient.abs().max()))
    scale = client.pull_parameter("max_abs_grad", "max")
    client.init_parameter("grad", [ternary.payload_nbytes(numel)], "uint8", codec=codec)
    payload = ternary.encode(gradient, scale=scale, key=RngKey(5, index, 7, 3))
    client.push_parameter("grad", payload)
    return client.pull_parameter("grad", "decode_average"), ternary.decode(payload)


@pytest.mark.parametrize("codec", [None, TernGrad(clip_sigma=None, seed=5)])
@pytest.mark.parametrize(
    ("numel", "size"), [(1000, WHOLE), (1, WHOLE), (7, WHOLE), (70_001, WHOLE), (1000, CUT)]
)
@pytest.mark.parametrize("workers", [2, 1, 3, 4])
def test_terngrad_step_equals_all_reduce_bit_for_bit(over, workers, numel, size, codec):
    """A scale that the workers share is the scale of every shard."""
    got, _ = run(terngrad_step, numel, codec, workers=workers, servers=2, over=over, **size)
    options = {"key": 3, "step": 7}

    def reduced(comm, exchange):
        gradient, codec = noise(numel, "g", comm.rank), TernGrad(clip_sigma=None, seed=5)
        return gradcomp.all_reduce(gradient, codec, comm=comm, exchange=exchange, **options)

    for exchange in ("all_gather", "reduce_scatter"):
        wanted = got[0][1] if workers == 1 else run_local(workers, reduced, exchange)[0]
        assert all(same_bits(average, wanted) for average, _ in got)
    assert bool((got[0][0] != 0).any())


def gradient_of(numel, number, index):
    """Worker 1's gradient of round 2 has an Inf."""
    gradient = noise(numel, number, index)
    if (number, index) == (2, 1):
        gradient[7] = INF
    return gradient


def encode_rounds(codec, numel, workers, rounds):
    """Return payloads[round][worker], with each worker's own residual where the codec takes one."""
    residuals = [torch.zeros(numel) if codec.error_feedback else None for _ in range(workers)]
    return [
        [
            codec.encode(
                gradient_of(numel, r, k), residual=residuals[k], key=RngKey(codec.seed, k, r, 2)
            )
            for k in range(workers)
        ]
        for r in range(rounds)
    ]


AVERAGED = [TernGrad(scale="own", seed=9), OneBit(group=100), Ternary(group=100)]
AVERAGED += [gradcomp.Identity(), EntropyCoded(1), EntropyCoded(2.2)]
check_kinds(AVERAGED, without=("block2", "block4", "block8", "bfloat16"))


@pytest.mark.parametrize("size", [WHOLE, CUT])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("codec", AVERAGED, ids=str)
def test_payloads_average_as_an_exchange_does(codec, given, size):
    """Whether or not the key knows the codec; one NaN is everybody's, and every shard's, for one
    round.
    """
    numel, rounds = 999 if codec.form.cuts else 9_001, 3
    payloads = encode_rounds(codec, numel, 3, rounds)
    got, _ = run(push_payloads, codec if given else None, payloads, workers=3, servers=2, **size)

    def exchange(comm):
        options = {"exchange": "all_gather"}
        if codec.error_feedback:
            options["feedback"] = gradcomp.allreduce.Feedback({2: numel})
        return [
            gradcomp.all_reduce(
                gradient_of(numel, r, comm.rank), codec, comm=comm, key=2, step=r, **options
            )
            for r in range(rounds)
        ]

    wanted = run_local(3, exchange)[0]
    assert [bool(torch.isnan(w).all()) for w in wanted] == [False, False, True]
    for pulled in got:
        for mine, theirs in zip(pulled, wanted, strict=True):
            assert np.array_equal(mine.numpy(), theirs.numpy(), equal_nan=True)


def test_equal_scales_count_as_shared_only_without_a_codec():
    """Own scales that happen to be equal keep the arithmetic of own scales when the key has its
    codec.
    """
    own = TernGrad(scale="own", clip_sigma=None)
    payloads = [[own.encode(noise(500, k), scale=0.3, key=RngKey(0, k)) for k in range(3)]]
    headers_only = run(push_payloads, None, payloads, workers=3)[0][0][0]
    as_own = run(push_payloads, own, payloads, workers=3)[0][0][0]
    decoded = [own.decode(p).numpy() for p in payloads[0]]
    total = sum(value / np.float32(0.3) for value in decoded).round()
    shared = np.float32(np.float32(0.3) / np.float32(3)) * total.astype(np.float32)
    assert np.array_equal(headers_only.numpy(), shared)
    assert np.array_equal(as_own.numpy(), reference.float_average(decoded))
    assert not torch.equal(headers_only, as_own)


IN_GROUPS = [OneBit(group=50), Ternary(group=50), OneBit(group=50, error_feedback=False)]
IN_GROUPS += [Ternary(group=50, step=2.5), Ternary(group=50, error_feedback=False)]
IN_GROUPS += [Ternary(group=50, residual_decay=0.25), OneBit(group=50, residual_decay=0.5)]
IN_GROUPS += [gradcomp.Block(4, group=50, residual_decay=0.25), OneBit(group=50, values="sign")]
IN_GROUPS += [TernGrad(scale="own", seed=4, group=20), gradcomp.Identity()]
ENCODED_AGAIN = [(codec, size) for codec in IN_GROUPS for size in (WHOLE, CUT)]
ENCODED_AGAIN += [(EntropyCoded(bits), CUT) for bits in (1, 2.2, 4)]
ENCODED_AGAIN += [(EntropyCoded(1.7), WHOLE), (EntropyCoded(2, error_feedback=False), CUT)]
ENCODED_AGAIN += [(TernGrad(scale="own", seed=4), WHOLE)]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("codec", "size"), ENCODED_AGAIN)
def test_averages_are_encoded_again_and_nothing_is_lost(over, codec, size, servers):
    """The same bytes on every worker, with any number of servers, in one piece or in shards (whose
    draws and residuals are those of their elements), drawn from stream 2. The new residual is
    decay * (mean + old residual - decoded), and a NaN leaves no trace.
    """
    numel, rounds = 333 if codec.form.cuts else 5_000, 5
    payloads = encode_rounds(codec, numel, 2, rounds)
    got, _ = run(push_payloads, codec, payloads, True, servers=servers, over=over, **size)
    residual = torch.zeros(numel) if codec.error_feedback else None
    decay = codec.options().get("residual_decay", 1.0)
    for r in range(rounds):
        assert same_bits(got[0][r], got[1][r])
        decoded = codec.decode(got[0][r])
        if r == 2:
            assert bool(torch.isnan(decoded).all())
            continue
        mean = torch.from_numpy(
            reference.float_average([codec.decode(p).numpy() for p in payloads[r]])
        )
        before = None if residual is None else residual.clone()
        key = RngKey(codec.seed, 0, r, zlib.crc32(b"p"), 2)
        wanted = codec.requantizer().encode(mean, residual=residual, key=key)
        assert same_bits(got[0][r], wanted) and wire.parse(wanted.numpy()).stream == 2
        assert residual is None or torch.equal(residual, decay * ((mean + before) - decoded))
    assert residual is None or bool(residual.any())


# ---- rounds --------------------------------------------------------------------------------------


def run_ahead(client, index):
    client.init_parameter("x", [1])
    found = []
    if index == 0:
        client.push_parameter("x", 1.0)
        client.push_parameter("x", 10.0)
        found.append(caught(client.push_parameter, "x", 100.0))
    meet(client)
    if index == 1:
        client.push_parameter("x", 2.0)
        # round 1, although rank 0 is past it, and again
        found += [float(client.pull_parameter("x", "sum")) for _ in range(2)]
    meet(client)
    if index == 0:
        client.push_parameter("x", 1000.0)  # rounds 2 and 3 are open now
        found.append(caught(client.push_parameter, "x", 1.0))
    meet(client)
    if index == 1:
        client.push_parameter("x", 20.0)
        found.append(float(client.pull_parameter("x", "sum")))
        client.push_parameter("x", 2000.0)
    assert client.bytes_sent > 0 and client.bytes_received > 0
    return [*found, float(client.pull_parameter("x", "sum"))]


def test_two_rounds_may_be_open_and_a_pull_is_of_the_last_push(over):
    (ahead, behind), (stats,) = run(run_ahead, over=over)
    for error, words in zip(ahead, (("push 3", "[1]", "have pushed 0"), ("push 4",)), strict=False):
        assert isinstance(error, ValueError) and all(word in str(error) for word in words)
    assert ahead[2] == 3000.0 and behind == [3.0, 3.0, 30.0, 3000.0]
    assert (stats.errors, stats.pushes, stats.pulls) == (2, 3 + 3 + 6, 1 + 4 + 6)
    assert (stats.unread, stats.lost, stats.staleness_mean) == (0, [], 0.0)
    assert stats.bytes_received > 0 and stats.bytes_sent > 0


def disagree(client, index, codec, pulls):
    """Worker 0's pull waits for worker 2's push when worker 1 pulls otherwise."""
    value = torch.ones(8) if codec is None else codec.encode(torch.ones(8), scale=1.0)
    client.init_parameter("x", value.shape, str(value.dtype).split(".")[1])
    if index < 2:
        client.push_parameter("x", value)
    meet(client)
    pull = None
    if index == 0:
        pull = client.pull_parameter("x", **pulls[0], wait=False)
    meet(client)
    begun = time.monotonic()
    if index == 1:
        pull = client.pull_parameter("x", **pulls[1], wait=False)
    waited = caught(pull.wait) if pull is not None else None
    seconds = time.monotonic() - begun
    meet(client)
    use = caught(client.push_parameter, "x", value)
    meet(client)
    return waited, use, seconds


METHODS = [{"reduce_method": name} for name in ("sum", "max")]
FORMS = [{"reduce_method": "decode_average", "compressed": form} for form in (False, True)]


@pytest.mark.parametrize(
    ("field", "codec", "pulls"),
    [("reduce_method", None, METHODS), ("compressed", TernGrad(clip_sigma=None), FORMS)],
)
def test_pulls_that_differ_are_an_error_for_all_at_once(field, codec, pulls):
    here, there = (pull[field] for pull in pulls)
    first, second, third = run(disagree, codec, pulls, workers=3)[0]
    seen = {0: (1, here, there), 1: (0, there, here), 2: (1, here, there)}
    for index, (pull, use, seconds) in enumerate((first, second, third)):
        assert seconds < 15 and (pull is None) == (index == 2)
        for error in (use,) if pull is None else (pull, use):
            assert isinstance(error, PeerMismatch) and error.field == field
            assert (error.rank, error.expected, error.got) == seen[index]


# ---- asynchronous keys ---------------------------------------------------------------------------


START = torch.linspace(1, 2, 32).view(4, 8)
STEP = torch.linspace(-0.7, 0.3, 32).view(4, 8)


def descend(client, index):
    """Two workers take turns, kept in order by a synchronous key."""
    client.init_parameter("w", [4, 8], asynchronous=True, learning_rate=-0.1, value=START)
    seen, wrong = [], torch.ones(4, 8)
    wrong[-1, -1] = NAN
    for turn in range(4):
        if turn % 2 == index:
            if turn < 2:
                seen.append(client.pull_parameter("w"))
            stale = client.push_parameter("w", STEP * (turn + 1))
            bad = caught(client.push_parameter, "w", wrong)
            assert type(bad) is ValueError and "NaN" in str(bad)
            assert client.push_parameter("w", torch.ones(4, 8)) == stale
            seen.append(client.staleness)
        meet(client, f"turn {turn}")
    return seen, client.pull_parameter("w")


SHARDS = [(1, {}), (4, {"shard_nbytes": 32})]  # of 32 elements


@pytest.mark.parametrize(("shards", "options"), SHARDS)
def test_asynchronous_pushes_are_applied_at_once_and_staleness_is_counted(over, shards, options):
    """A NaN leaves no trace in any shard."""
    ((first, one), (second, two)), (stats,) = run(descend, over=over, **options)
    wanted = START.numpy()
    for turn in range(4):
        for push in (STEP.numpy() * np.float32(turn + 1), np.float32(1)):
            wanted = wanted + push * np.float32(-0.1)
    assert one.shape == (4, 8) and same_bits(one, two) and np.array_equal(one.numpy(), wanted)
    assert torch.equal(first[0], START)
    # the second worker sees the first one's pushes at once
    assert not torch.equal(second[0], START)
    assert first[1:] == [0, 2] and second[1:] == [0, 2]
    counted = (stats.asynchronous_pushes, stats.staleness_sum, stats.staleness_max)
    assert counted == (8 * shards, 8 * shards, 2) and stats.staleness_mean == 1.0


def descend_packed(client, index):
    codec = TernGrad(clip_sigma=None)
    options = {"asynchronous": True, "learning_rate": -0.5, "value": START}
    client.init_parameter("w", [codec.payload_nbytes(32)], "uint8", codec=codec, **options)
    payload, infinite = codec.encode(noise(32, index), key=RngKey(rank=index)), torch.ones(32)
    infinite[-1] = INF
    client.push_parameter("w", payload)
    wrong = [flipped(payload), codec.encode(torch.ones(31), scale=1.0), codec.encode(infinite)]
    errors = [caught(client.push_parameter, "w", value) for value in wrong]
    meet(client)
    return errors, client.pull_parameter("w")


@pytest.mark.parametrize(("shards", "options"), SHARDS)
def test_asynchronous_packed_gradients(shards, options):
    codec = TernGrad(clip_sigma=None)
    steps = [
        codec.decode(codec.encode(noise(32, k), key=RngKey(rank=k))).view(4, 8) for k in range(2)
    ]
    orders = [(START + a * -0.5) + b * -0.5 for a, b in (steps, steps[::-1])]
    found, (stats,) = run(descend_packed, **options)
    assert stats.asynchronous_pushes == 2 * shards
    for (damaged, shorter, infinite), got in found:
        # a row is a shard where the key is cut, and every shard has an order of its own
        one, other = ((order == got).all(dim=1) for order in orders)
        assert bool((one | other).all()) and (shards > 1 or bool(one.all() or other.all()))
        assert isinstance(damaged, CorruptPayload) and damaged.check == "crc"
        assert isinstance(shorter, ValueError) and "31" in str(shorter)
        assert type(infinite) is ValueError and "NaN" in str(infinite)


# ---- the rest ------------------------------------------------------------------------------------


def test_documentation_names_every_argument_member_and_phase():
    methods = [n for n, v in vars(ParameterClient).items() if inspect.isfunction(v) and n[0] != "_"]
    members = [getattr(ParameterClient, name) for name in methods] + [Pending.done, Pending.wait]
    described = (serve, ParameterClient, ServerStats, Pending, *members)
    text = "\n".join(inspect.getdoc(value) for value in described)
    words = set(re.findall(r"\w+", text)) | set(dir(ServerStats))
    for value in (serve, ParameterClient.__init__, *members):
        assert set(inspect.signature(value).parameters) - {"self"} <= words, value
    assert {*vars(ServerStats()), *messages.METHODS} <= words
    errors = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    phases = ["init", "push", "pull", "serve"]
    for word in [*phases, "message", "reduce_method", "compressed", "servers"]:
        assert f"`{word}`" in errors, word


@pytest.mark.slow
def test_the_example_trains_and_equals_all_reduce():
    command = [*python(), ROOT / "examples/parameter_server.py", "--local", 2, "--steps", 40]
    done = output_of(*command, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equals gradcomp.all_reduce bit for bit" in done.stdout
    accuracy = float(re.search(r"test accuracy ([\d.]+) %", done.stdout)[1])
    assert accuracy > 50.0, done.stdout


def keys_made_again(client, index):
    found = []
    client.init_parameter("s", [1])
    client.init_parameter("g", [2, 1], "uint8", scale_key="s")
    for scale in (0.5, 2.0):
        if index == 0:
            client.init_parameter("s", [1])
            client.init_parameter("g", [2, 1], "uint8", scale_key="s")
        client.push_parameter("s", scale)
        client.pull_parameter("s", "max")
        client.push_parameter("g", [[0b10101010]] * 2)
        found += client.pull_parameter("g", "decode_average")[0].tolist()
    return found


def test_a_key_that_is_made_again_goes_on():
    """Its rounds began anew on this client, and codes kept the scale of before."""
    assert run(keys_made_again)[0] == [[0.5] * 4 + [2.0] * 4] * 2


def test_a_push_that_makes_an_asynchronous_key_infinite_is_refused():
    def pushes(client, index):
        client.init_parameter("w", [2], value=torch.zeros(2), asynchronous=True, learning_rate=10.0)
        with pytest.raises(ValueError, match="values too large for float32; it was not applied"):
            client.push_parameter("w", torch.full((2,), 3e38))
        client.push_parameter("w", torch.ones(2))
        return client.pull_parameter("w").tolist()

    assert run(pushes, workers=1)[0] == [[10.0, 10.0]]


def test_a_shape_or_value_of_another_kind_is_named():
    def makes(client, index):
        for given, said in (
            ({"shape": 5}, "shape must be a sequence of integers, got 5"),
            ({"shape": [2], "value": [0.0, 0.0]}, "value must be a tensor, got list"),
        ):
            with pytest.raises(TypeError, match=said):
                client.init_parameter("a", **given)

    run(makes, workers=1)
