"""Large keys are cut into shards over several servers: the same bits as whole keys, and as
careful.
"""

import math
from dataclasses import replace

import _serving
import numpy as np
import pytest
import torch
from _ranks import run_local
from _serving import caught, flipped, meet, noise, play, same_bits

import gradcomp
from gradcomp import Identity, OneBit, RngKey, TernGrad
from gradcomp.errors import CorruptPayload, PeerMismatch
from gradcomp.payload import wire
from gradcomp.payload.form import FORMS, PLAIN, TERNARY
from gradcomp.server import messages
from gradcomp.server.keys import ClientKey
from gradcomp.server.parameters import SynchronousParameter
from gradcomp.server.shards import DEFAULT_SHARD_NBYTES, MAX_SHARDS, Shards, check_shard_nbytes
from gradcomp.server.spec import make_spec

NUMEL = 1000


def run(body, *args, servers=2, shard_nbytes=256, over=run_local):
    return _serving.run(body, *args, servers=servers, shard_nbytes=shard_nbytes, over=over)


# ---- how a key is cut ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "limit", "group", "unit"),
    [
        (1000, 64, 1000, 64),  # one group for the whole key: cut anywhere
        (1000, 64, 5000, 64),
        (1000, 64, 16, 64),
        (1000, 64, 20, 40),  # whole groups that begin on a byte of codes
        (1000, 64, 7, 56),
        (1000, 64, 100, 200),  # larger groups: a shard each, or of several that end on a byte
        (1000, 64, 1, 64),
        (50, 64, 50, 50),
        (1001, 8, 1001, 8),
    ],
)
def test_shards_are_whole_scale_groups_and_begin_on_a_byte(numel, limit, group, unit):
    shards = Shards.of(numel, limit, TERNARY, group)
    bounds = list(shards.bounds())
    assert shards.unit == unit and shards.count == len(bounds) == -(-numel // unit)
    assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])] and bounds[-1][
        1
    ] == numel
    for first, _ in bounds:
        assert first % 8 == 0 and (group >= numel or first % group == 0)


def test_the_arithmetic_of_huge_keys():
    """8 GiB of float32, and a payload of 2^32 - 1 elements, in messages that MPI can count;
    nothing is allocated.
    """
    limit = check_shard_nbytes(DEFAULT_SHARD_NBYTES)
    for numel, form in ((2**31, PLAIN), (2**32 - 1, TERNARY)):
        shards = Shards.of(numel, limit, form, numel)
        bounds = list(shards.bounds())
        assert bounds[-1][1] == numel and len(bounds) == -(-numel // limit)
        assert all(
            4 * (last - first) < messages.MAX_MESSAGE_NBYTES and first % 8 == 0
            for first, last in bounds
        )
        assert (
            max(shards.nbytes(first, last) for first, last in bounds) < messages.MAX_MESSAGE_NBYTES
        )
    with pytest.raises(ValueError, match="raise shard_nbytes"):
        Shards.of(limit * MAX_SHARDS + 1, limit, PLAIN)
    with pytest.raises(ValueError, match="smaller groups"):
        Shards.of(2**32 - 1, limit, TERNARY, 2**30)


def test_shards_go_round_the_servers():
    homes = [messages.home_of("embedding", (4, 5, 6), shard) for shard in range(1, 301)]
    assert [homes.count(rank) for rank in (4, 5, 6)] == [100] * 3
    assert messages.home_of("embedding", (4, 5, 6)) == homes[0]


CUT = [TernGrad(), TernGrad(group=64), TernGrad(group=20), OneBit(group=56), OneBit(group="tensor")]


@pytest.mark.parametrize("codec", [*CUT, Identity()])
@pytest.mark.parametrize("numel", [999, 1000, 64, 65])
def test_a_payload_that_was_cut_and_joined_decodes_to_the_same(codec, numel):
    payload = codec.encode(noise(numel, "cut"), key=RngKey(step=3))
    header = wire.parse(payload.numpy())
    shards = Shards.of(
        numel, 64, FORMS[header.codec], header.group_numel if codec.form.scales_per_group else 1
    )
    parts = shards.cut(payload)
    decoded = torch.cat([codec.decode(part) for part in parts])
    assert len(parts) == shards.count and same_bits(decoded, codec.decode(payload))
    assert [part.numel() for part in parts] == [
        shards.nbytes(*bounds) for bounds in shards.bounds()
    ]
    joined = shards.join(parts)
    assert same_bits(codec.decode(joined), decoded) and wire.parse(joined.numpy()).step == 3
    if header.group_numel < numel or len(parts) == 1:
        assert torch.equal(joined, payload)
    if len(parts) > 1:
        with pytest.raises(CorruptPayload):
            shards.join([*parts[:-1], codec.encode(torch.zeros(1))])


# ---- whole keys and cut keys: the same bits ------------------------------------------------------


def reduce_values(client, index):
    client.init_parameter("x", (20, 50))
    out = []
    for number, method in enumerate(("sum", "max", "mean")):
        client.push_parameter("x", noise(NUMEL, number, index).view(20, 50))
        out.append(client.pull_parameter("x", method))
    return out


def test_values_of_a_cut_key_have_the_bits_of_a_whole_one(over):
    whole, _ = run(reduce_values, shard_nbytes=4096)
    for got in run(reduce_values, servers=1, over=over)[0]:
        assert all(
            a.shape == (20, 50) and same_bits(a, b) for a, b in zip(got, whole[0], strict=True)
        )


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_the_servers_share_the_work(servers):
    clients, stats = run(reduce_values, servers=servers)
    whole, _ = run(reduce_values, shard_nbytes=4096)
    assert all(same_bits(a, b) for got in clients for a, b in zip(got, whole[0], strict=True))
    pushes = [s.pushes for s in stats]
    assert sum(pushes) == 2 * 3 * math.ceil(4 * NUMEL / 256) and min(pushes) > 0.8 * max(pushes)


def average_payloads(client, index, codec, named, compressed, numel=NUMEL):
    residual = torch.zeros(numel) if codec.error_feedback else None
    out = []
    for step in range(3):
        payload = codec.encode(
            noise(numel, step, index), residual=residual, key=RngKey(codec.seed, index, step, 2)
        )
        client.init_parameter("p", payload.shape, "uint8", codec=codec if named else None)
        client.push_parameter("p", payload)
        out.append(client.pull_parameter("p", "decode_average", compressed=compressed))
    return out


CODECS = [TernGrad(scale="own", group=20, seed=3), OneBit(group=56), Identity()]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("codec", CODECS)
def test_packed_averages_of_a_cut_key_have_the_bits_of_a_whole_one(codec, named, compressed):
    """Packed again as well: the draws and residuals of a shard are those of its elements in the
    whole key.
    """
    whole, _ = run(average_payloads, codec, named, compressed, shard_nbytes=1 << 20)
    cut, stats = run(average_payloads, codec, named, compressed)
    for got in cut:
        assert all(same_bits(a, b) for a, b in zip(got, whole[0], strict=True))
    assert sum(s.pushes for s in stats) > 2 * 3 * 10


def average_shared(client, index, compressed):
    codec = TernGrad(clip_sigma=None, seed=5)
    client.init_parameter("scale", [1])
    gradient = noise(NUMEL, "shared", index)
    client.push_parameter("scale", float(gradient.abs().max()))
    scale = client.pull_parameter("scale", "max")
    payload = codec.encode(gradient, scale=scale, key=RngKey(5, index, 0, 0))
    client.init_parameter("p", payload.shape, "uint8", codec=codec)
    client.push_parameter("p", payload)
    return client.pull_parameter("p", "decode_average", compressed=compressed)


def test_one_shared_scale_over_all_shards_equals_all_reduce():
    cut, _ = run(average_shared, False)
    grads = [noise(NUMEL, "shared", k) for k in range(2)]
    codec = TernGrad(clip_sigma=None, seed=5)
    wanted = run_local(
        2, lambda c: gradcomp.all_reduce(grads[c.rank].clone(), codec, c, key=0, step=0)
    )
    assert all(same_bits(got, wanted[0]) for got in cut)


def test_a_scale_group_that_is_cut_is_packed_again_shard_by_shard():
    """Unbiased each with its own scale; the same bytes with any number of servers."""
    mean = run(average_shared, False)[0][0]
    first, second = (run(average_shared, True, servers=n)[0] for n in (1, 3))
    assert torch.equal(first[0], first[1]) and torch.equal(first[0], second[0])
    header, decoded = wire.parse(first[0].numpy()), TernGrad().decode(first[0])
    assert (header.numel, header.group_numel, header.scale_count) == (NUMEL, 64, 16)
    for begin in range(0, NUMEL, 64):
        scale = mean[begin : begin + 64].abs().max()
        assert set(decoded[begin : begin + 64].abs().tolist()) <= {0.0, float(scale)}


def average_nan(client, index):
    codec = TernGrad(clip_sigma=None, scale="own", group=20)
    gradient = noise(NUMEL, index)
    if index:
        gradient[777] = float("nan")
    payload = codec.encode(gradient, key=RngKey(rank=index))
    client.init_parameter("p", payload.shape, "uint8", codec=codec)
    client.push_parameter("p", payload)
    return client.pull_parameter("p", "decode_average")


def test_one_nan_is_every_shard_s_nan():
    for average in run(average_nan)[0]:
        assert average.shape == (NUMEL,) and bool(torch.isnan(average).all())


def push_raw(client, index):
    codes = torch.from_numpy(np.random.default_rng(index).integers(0, 3, (10, 25, 4)))
    packed = (codes * torch.tensor([1, 4, 16, 64])).sum(dim=2).to(torch.uint8)
    client.init_parameter("codes", [10, 25], "uint8")
    client.push_parameter("codes", packed)
    return client.pull_parameter("codes", "decode_average"), (codes - 1).reshape(10, 100)


def test_raw_codes_are_cut_as_well():
    (got, here), (_, there) = run(push_raw)[0]
    assert torch.equal(got, (here + there).float() * 0.5)


# ---- asynchronous keys ---------------------------------------------------------------------------


def descend(client, index, packed):
    start = noise(NUMEL, "start").view(25, 40)
    codec = TernGrad(group=20)
    options = {"asynchronous": True, "learning_rate": -0.5, "value": start}
    payload = codec.encode(noise(NUMEL, "step"), key=RngKey())
    if packed:
        client.init_parameter("w", payload.shape, "uint8", codec=codec, **options)
    else:
        client.init_parameter("w", (25, 40), **options)
    meet(client)
    if index == 0:
        client.push_parameter("w", payload if packed else codec.decode(payload).view(25, 40))
    meet(client)
    bad = noise(NUMEL, "bad")
    bad[-1] = float("nan")
    refused = caught(client.push_parameter, "w", codec.encode(bad) if packed else bad.view(25, 40))
    staleness = client.push_parameter("w", payload) if packed and index == 1 else None
    meet(client)
    return refused, staleness, client.pull_parameter("w")


@pytest.mark.parametrize("packed", [False, True])
def test_asynchronous_keys_are_cut_and_nan_leaves_no_trace_in_any_shard(packed):
    codec = TernGrad(group=20)
    step = codec.decode(codec.encode(noise(NUMEL, "step"), key=RngKey())).view(25, 40) * -0.5
    wanted = noise(NUMEL, "start").view(25, 40) + step
    wanted = wanted + step if packed else wanted
    for index, (refused, staleness, value) in enumerate(run(descend, packed)[0]):
        assert type(refused) is ValueError and "NaN" in str(refused)
        assert same_bits(value, wanted)
        assert staleness == (1 if packed and index else None)


def start_unlike(client, index):
    value = torch.full((NUMEL,), float(index))
    options = {"asynchronous": True, "learning_rate": 1.0, "value": value}
    if index:
        meet(client)
    error = caught(client.init_parameter, "w", [NUMEL], **options)
    if not index:
        meet(client)
    return error


def test_initial_values_of_a_cut_key_must_be_alike():
    """Part by part the first client's would count, and the weights might be a mixture."""
    first, second = run(start_unlike)[0]
    assert first is None and isinstance(second, PeerMismatch) and second.field == "value"


# ---- what goes wrong -----------------------------------------------------------------------------


def run_ahead(client, index):
    """Worker 0's third push may find worker 1's first one in some shards only: it tries again as
    a user would.
    """
    client.init_parameter("x", [NUMEL])
    value, pulled = torch.ones(NUMEL), []
    if index:
        meet(client)
        for factor in (2, 20, 2000):
            client.push_parameter("x", factor * value)
            pulled.append(client.pull_parameter("x", "sum"))
        return pulled
    client.push_parameter("x", value)
    client.push_parameter("x", 10 * value)
    error = caught(client.push_parameter, "x", 100 * value)
    meet(client)
    while isinstance(caught(client.push_parameter, "x", 1000 * value), ValueError):
        pass
    return error, client.pull_parameter("x", "sum")


def test_a_worker_too_far_ahead_is_refused_by_all_shards_or_none():
    (error, ahead), behind = run(run_ahead)[0]
    assert type(error) is ValueError and "push 3" in str(error)
    assert [float(p[0]) for p in behind] == [3.0, 30.0, 3000.0] and all(
        bool((p == p[0]).all()) for p in behind
    )
    assert same_bits(ahead, behind[-1])


def test_later_shards_take_a_push_that_the_first_has_taken():
    """Where the slowest worker's push has reached the first shard, and not yet the others."""
    spec = replace(
        make_spec((NUMEL,), "float32", None, False, None), shard_numel=64, part_nbytes=256
    )
    for first, taken in ((0, 2), (64, 3)):
        shard = SynchronousParameter("x", replace(spec, first=first), 0, [0, 1])
        for _ in range(taken):
            assert shard.push(0, torch.zeros(256, dtype=torch.uint8)) == 0
        error = caught(shard.push, 0, torch.zeros(256, dtype=torch.uint8))
        assert type(error) is ValueError and f"push {taken + 1}" in str(error)


def damage(client, index, damaged):
    codec = TernGrad(clip_sigma=None, scale="own", group=20)
    good = codec.encode(torch.ones(NUMEL), scale=1.0)
    client.init_parameter("p", good.shape, "uint8", codec=codec)
    early = caught(client.pull_parameter, "p", "decode_average")
    bad = flipped(good) if damaged == "crc" else good.clone()
    if damaged == "code":
        bad[-1] = 0xFF
        wire.seal(bad.numpy(), wire.parse(good.numpy()))
    push = caught(client.push_parameter, "p", bad if index else good)
    if damaged == "crc" and index:
        client.push_parameter("p", good)  # nothing had been sent
    pull = caught(client.pull_parameter, "p", "decode_average")
    client.push_parameter("p", good)
    return early, push, pull, client.pull_parameter("p", "decode_average")


@pytest.mark.parametrize("damaged", ["crc", "code"])
def test_payloads_that_do_not_decode(damaged):
    for index, (early, push, pull, after) in enumerate(run(damage, damaged)[0]):
        assert type(early) is ValueError and "first payload" in str(early)
        assert (push is None) == (index == 0)
        assert push is None or (isinstance(push, CorruptPayload) and push.check == damaged)
        assert (
            pull is None
            if damaged == "crc"
            else (isinstance(pull, CorruptPayload) and pull.check == "code")
        )
        assert torch.equal(after, torch.ones(NUMEL))


def init_unlike(client, index):
    if index:
        meet(client)
    error = caught(client.init_parameter, "x", [NUMEL + index])
    if not index:
        meet(client)
    meet(client, "again")
    return error, caught(client.push_parameter, "x", torch.ones(NUMEL))


def test_clients_that_cut_otherwise_are_told():
    (first, push), (second, _) = run(init_unlike)[0]
    assert first is None
    assert isinstance(second, PeerMismatch) and second.field == "shape"
    assert isinstance(push, PeerMismatch) and push.field == "shape"


def unlike_shard_nbytes(comm):
    return play(comm, 1, init, shard_nbytes=256 << comm.rank)


def init(client, index):
    return caught(client.init_parameter, "x", [NUMEL])


def test_another_shard_nbytes_is_a_mismatch():
    # of one client or, where the first shards come in turns, of both
    errors = run_local(3, unlike_shard_nbytes)[:2]
    assert {e.field for e in errors if e is not None} == {"shard_numel"}


def test_a_payload_key_too_large_to_be_whole_needs_its_codec():
    spec = make_spec((2**27 + 36,), "uint8", None, True, 1.0)
    with pytest.raises(ValueError, match="codec="):
        ClientKey("w", spec, spec, None, None, torch.empty(1).expand(2**29), 2**28)


def overlap(client, index):
    client.init_parameter("x", [NUMEL])
    out = []
    for step in range(3):
        push = client.push_parameter("x", torch.full((NUMEL,), float(step)), wait=False)
        pull = client.pull_parameter("x", "sum", wait=False)
        push.wait()
        out.append(pull.wait())
    return out


def test_calls_on_cut_keys_need_not_be_waited_for():
    for got in run(overlap)[0]:
        assert all(bool((value == 2.0 * step).all()) for step, value in enumerate(got))
