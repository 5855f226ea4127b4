"""Large keys are cut into shards over several servers: the same bits as whole keys, and as
careful.
"""

from dataclasses import replace

import _serving
import pytest
import torch
from _kinds import check_kinds
from _ranks import run_local
from _serving import CUT, caught, meet, noise, play, push_payloads, same_bits

from gradcomp import Identity, OneBit, Ternary, TernGrad
from gradcomp.codecs import EntropyCoded, RngKey
from gradcomp.errors import CorruptPayload
from gradcomp.payload import wire
from gradcomp.payload.form import PLAIN, TERNARY
from gradcomp.server import keys, messages
from gradcomp.server.parameters import StoredParameter
from gradcomp.server.shards import DEFAULT_SHARD_NBYTES, MAX_SHARDS, Shards, check_shard_nbytes
from gradcomp.server.spec import make_spec

NUMEL = 1000


def run(body, *args, **options):
    return _serving.run(body, *args, **{"servers": 2} | CUT | options)


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
    assert [first for first, _ in bounds] == [0, *(last for _, last in bounds[:-1])]
    assert bounds[-1][1] == numel
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
        for first, last in bounds:
            nbytes = max(4 * (last - first), shards.nbytes(first, last))
            assert nbytes < messages.MAX_MESSAGE_NBYTES and first % 8 == 0
    with pytest.raises(ValueError, match="raise shard_nbytes"):
        Shards.of(limit * MAX_SHARDS + 1, limit, PLAIN)
    with pytest.raises(ValueError, match="smaller groups"):
        Shards.of(2**32 - 1, limit, TERNARY, 2**30)


CODECS = [
    TernGrad(),
    TernGrad(group=64),
    TernGrad(group=20),
    Ternary(),
    Ternary(group=64),
    Ternary(group=20),
    OneBit(group=56),
    OneBit(group="tensor"),
    EntropyCoded(2.2),
    EntropyCoded(1),
]
check_kinds(CODECS, without=("block2", "block4", "block8", "identity", "bfloat16"))


@pytest.mark.parametrize("codec", [*CODECS, Identity()], ids=str)
@pytest.mark.parametrize("numel", [999, 1000, 64, 65, 4096, 9001])
def test_a_payload_that_was_cut_and_joined_decodes_to_the_same(codec, numel):
    payload = codec.encode(noise(numel, "cut"), key=RngKey(step=3))
    header = wire.parse(payload.numpy())
    shards = Shards.of(numel, 64, codec.form, header.group_numel)
    parts = shards.cut(payload)
    decoded = torch.cat([codec.decode(part) for part in parts])
    assert len(parts) == shards.count and same_bits(decoded, codec.decode(payload))
    assert [part.numel() for part in parts] == [shards.nbytes(*b) for b in shards.bounds()]
    joined = shards.join(parts)
    assert same_bits(codec.decode(joined), decoded) and wire.parse(joined.numpy()).step == 3
    if header.group_numel < numel or len(parts) == 1:
        assert torch.equal(joined, payload)
    if len(parts) > 1:
        with pytest.raises(CorruptPayload):
            shards.join([*parts[:-1], codec.encode(torch.zeros(1))])


def test_a_scale_group_that_is_cut_is_packed_again_shard_by_shard():
    """Unbiased each with its own scale; the same bytes with any number of servers."""
    shared = TernGrad(clip_sigma=None, seed=5)
    scale = max(noise(NUMEL, k).abs().max() for k in range(2))
    payloads = [[shared.encode(noise(NUMEL, k), scale=scale, key=RngKey(5, k)) for k in range(2)]]
    mean = run(push_payloads, shared, payloads)[0][0][0]
    first, second = (run(push_payloads, shared, payloads, True, servers=n)[0] for n in (1, 3))
    assert torch.equal(first[0][0], first[1][0]) and torch.equal(first[0][0], second[0][0])
    header, decoded = wire.parse(first[0][0].numpy()), TernGrad().decode(first[0][0])
    assert (header.numel, header.group_numel, header.scale_count) == (NUMEL, 64, 16)
    for begin in range(0, NUMEL, 64):
        scale = mean[begin : begin + 64].abs().max()
        assert set(decoded[begin : begin + 64].abs().tolist()) <= {0.0, float(scale)}


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
    assert [p.unique().tolist() for p in behind] == [[3.0], [30.0], [3000.0]]
    assert same_bits(ahead, behind[-1])


def push_code_11(client, index):
    """Worker 0's third push, before any pull, has a code that no value has, in its first shard."""
    good, bad = (torch.full((4, 64), 0b10101010, dtype=torch.uint8) for _ in range(2))
    bad[0, 0] = 255
    client.init_parameter("k", [4, 64], "uint8")
    for _ in range(2):
        client.push_parameter("k", good)
    meet(client)
    error = caught(client.push_parameter, "k", bad if index == 0 else good)
    meet(client)
    failed = caught(client.pull_parameter, "k", "decode_average")
    client.push_parameter("k", torch.full((4, 64), 0b01010101, dtype=torch.uint8))  # zeros
    return type(error), type(failed), client.pull_parameter("k", "decode_average").unique().tolist()


def test_a_push_that_the_first_shard_cannot_decode_fails_in_all_of_them():
    """The other shards were one push behind ever after."""
    (first, second), *_ = run(push_code_11, servers=1)
    assert first == (CorruptPayload, CorruptPayload, [0.0])
    assert second == (type(None), CorruptPayload, [0.0])


def test_later_shards_take_a_push_that_the_first_has_taken():
    """Where the slowest worker's push has reached the first shard, and not yet the others."""
    spec = replace(make_spec((NUMEL,), "float32", None), shard_numel=64, part_nbytes=256)
    for first, taken in ((0, 2), (64, 3)):
        shard = StoredParameter("x", replace(spec, first=first), 0, [0, 1])
        for _ in range(taken):
            assert shard.push(0, torch.zeros(256, dtype=torch.uint8)) == 0
        error = caught(shard.push, 0, torch.zeros(256, dtype=torch.uint8))
        assert type(error) is ValueError and f"push {taken + 1}" in str(error)


def init_alone(client, index):
    return caught(client.init_parameter, "x", [NUMEL])


def test_another_shard_nbytes_is_a_mismatch():
    def over(comm):
        return play(comm, 1, None, {"shard_nbytes": 256 << comm.rank}, init_alone)

    # of one client or, where the first shards come in turns, of both
    errors = run_local(3, over)[:2]
    assert {e.field for e in errors if e is not None} == {"shard_numel"}


def test_a_payload_key_too_large_to_be_whole_needs_its_codec(monkeypatch):
    monkeypatch.setattr(keys, "MAX_NBYTES", 4 * NUMEL)
    spec = make_spec((132,), "uint8", None, True, 1.0)
    with pytest.raises(ValueError, match="codec="):
        keys.ClientKey("w", spec, None, torch.zeros(NUMEL + 1), 64)


def push_fp32(client, index):
    codec, value = Identity(), torch.zeros(NUMEL)
    options = {"codec": codec, "asynchronous": True, "learning_rate": 0.5, "value": value}
    client.init_parameter("w", [codec.payload_nbytes(NUMEL)], "uint8", **options)
    client.push_parameter("w", codec.encode(torch.ones(NUMEL)))
    return client.pull_parameter("w").unique().tolist()


def test_an_asynchronous_key_of_fp32_payloads_is_cut_as_its_payloads_are():
    """It was cut as one scale group, and its payloads, which have no scales, in another way: every
    push was a ValueError.
    """
    assert run(push_fp32, workers=1)[0] == [[0.5]]
