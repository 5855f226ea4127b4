"""Checkpoints of the parameter server: bit for bit continuation with any number of servers, and
files that are refused.
"""

import io
import zipfile

import _serving
import pytest
import torch
from _ranks import run_local
from _serving import caught, meet, noise, same_bits

from gradcomp import OneBit, RngKey, TernGrad
from gradcomp.comm import LocalCommunicator
from gradcomp.errors import CorruptPayload, PeerMismatch
from gradcomp.server import serve
from gradcomp.server.spec import make_spec
from gradcomp.server.state import (
    FORMAT,
    State,
    pack_state,
    parse_state,
    read_states,
    write_states,
)

WORKERS, NUMEL = 2, 300
ONEBIT = OneBit(group=20)


def run(body, *args, over=run_local, **options):
    return _serving.run(body, *args, over=over, **options)[0]


def train(client, index, first, last, path):
    """Return what every pull gives from step `first` to `last`; worker 0 saves at the end."""
    size = ONEBIT.payload_nbytes(NUMEL, NUMEL // 20)
    client.init_parameter("packed", [size], "uint8", codec=ONEBIT)
    client.init_parameter("raw", [5, 15], "uint8")
    start = noise(NUMEL, "start") * (first + 1)  # which does not count when a checkpoint is there
    client.init_parameter("weight", [NUMEL], asynchronous=True, learning_rate=-0.1, value=start)
    out = []
    for step in range(first, last):
        # a worker's own, which its own checkpoint would hold
        residual = noise(NUMEL, "residual", step, index)
        client.push_parameter(
            "packed",
            ONEBIT.encode(noise(NUMEL, step, index), residual=residual, key=RngKey(step=step)),
        )
        out.append(client.pull_parameter("packed", "decode_average", compressed=True))
        client.push_parameter(
            "raw", (noise(75, step, index).abs() * 100).to(torch.uint8).view(5, 15) & 0x55
        )
        out.append(client.pull_parameter("raw", "decode_average", compressed=True))
        if index == 0:
            client.push_parameter("weight", noise(NUMEL, "step", step))
        meet(client)
        out.append(client.pull_parameter("weight"))
        meet(client)
    if path is not None and index == 0:
        client.save(path)
    meet(client)
    return out


@pytest.mark.parametrize("shard_nbytes", [1 << 20, 256])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_restored_server_goes_on_bit_for_bit(tmp_path, servers, shard_nbytes):
    """Values, 1-bit residuals and the draws of raw codes, under another number of servers, whole
    keys and cut ones.
    """
    whole = run(train, 0, 6, None, shard_nbytes=shard_nbytes)
    path = tmp_path / "state"
    before = run(train, 0, 3, path, servers=2, shard_nbytes=shard_nbytes)
    after = run(train, 3, 6, None, servers=servers, checkpoint=path, shard_nbytes=shard_nbytes)
    for uncut, first, second in zip(whole, before, after, strict=True):
        assert all(same_bits(a, b) for a, b in zip(uncut, [*first, *second], strict=True))
    fresh = run(train, 3, 6, None, servers=servers, shard_nbytes=shard_nbytes)
    differ = [not torch.equal(a, b) for a, b in zip(fresh[0], after[0], strict=True)]
    assert differ[:3] == [True, True, True]  # each kind of state shows
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_over_every_transport(over, tmp_path):
    path = str(tmp_path / "state")
    before = run(train, 0, 2, path, over=over)
    after = run(train, 2, 3, None, checkpoint=path, over=over)
    whole = run(train, 0, 3, None)
    assert all(same_bits(a, b) for a, b in zip(whole[0], before[0] + after[0], strict=True))


def save_too_early(client, index, path):
    client.init_parameter("p", [ONEBIT.payload_nbytes(NUMEL, NUMEL // 20)], "uint8", codec=ONEBIT)
    payload = ONEBIT.encode(noise(NUMEL, index), residual=torch.zeros(NUMEL))
    client.push_parameter("p", payload)
    client.pull_parameter("p", "decode_average", compressed=True)
    if index == 0:
        client.push_parameter("p", payload)
    meet(client)
    error = caught(client.save, path) if index == 1 else None
    meet(client)
    if index == 1:
        client.push_parameter("p", payload)
    client.pull_parameter("p", "decode_average", compressed=True)
    meet(client)
    if index == 0:
        client.save(path)
    return error


def test_a_round_under_way_is_not_lost_silently(tmp_path):
    path = tmp_path / "state"
    path.write_text("older")
    error = run(save_too_early, path)[1]
    assert type(error) is ValueError and "'p'" in str(error) and "[1]" in str(error)
    assert [key for key, _, _ in read_states(path, everything)] == ["meet", "p"]
    assert list(tmp_path.iterdir()) == [path]


def init_otherwise(client, index):
    weight = {"asynchronous": True, "learning_rate": -0.1, "value": torch.zeros(NUMEL + 1)}
    error = caught(client.init_parameter, "weight", [NUMEL + 1], **weight)
    return error, caught(client.init_parameter, "packed", [80], "uint8", codec="terngrad")


def test_keys_must_be_as_they_were(tmp_path):
    path = tmp_path / "state"
    run(train, 0, 1, path)
    for errors in zip(*run(init_otherwise, checkpoint=path), strict=True):
        assert all(isinstance(error, PeerMismatch) for error in errors)
        # the server's: the checkpoint came first
        assert WORKERS in {error.rank for error in errors}


def damaged(data):
    """Yield (name, bytes) of files that are not a checkpoint, or not all of one."""
    yield "empty", b""
    yield "foreign", bytes(200)
    yield "foreign archive", archive(b"", {"0/x": b""})
    yield "longer", data + bytes(4)
    yield "version", data.replace(b"version 2", b"version 3")
    yield "other records", archive(FORMAT % 1, {"0/wort": b"", "0/last": b""})
    for at in (1, 16, 60, len(data) // 2, len(data) - 1):
        yield f"cut at {at}", data[:at]
    for name, member, record in (
        ("short record", "0/x", bytes(8)),
        ("settings", "0/x", RECORD[:16] + b"\x09" + RECORD[17:]),
        ("shard of a whole key", "1/x", RECORD),
        ("key that is not text", "0/%FF", RECORD),
        ("shard that is not a number", "x", RECORD),
    ):
        yield name, archive(FORMAT % 1, {member: record})


def archive(comment, members):
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as made:
            for name, data in members.items():
                made.writestr(name, data)
            made.comment = comment
        return file.getvalue()


SPEC = make_spec((2,), "float32", None, True, 0.5)
RECORD = pack_state(State(3, SPEC, torch.ones(2))).numpy().tobytes()


def everything(key, shard):
    return True


def test_damaged_files_are_refused_whole(tmp_path):
    path = tmp_path / "state"
    packed = make_spec((8,), "uint8", None, False, None)
    states = [
        ("a/ключ\0", 0, State(3, SPEC, torch.ones(2))),
        ("last", 0, State(0, packed, None, torch.ones(2))),
    ]
    write_states(path, [(key, shard, pack_state(state)) for key, shard, state in states])
    whole = path.read_bytes()
    assert [found[:2] for found in read_states(path, everything)] == [s[:2] for s in states]
    for name, data in damaged(whole):
        path.write_bytes(data)
        error = caught(read_states, path, everything)
        assert type(error) is ValueError and str(path) in str(error), (name, error)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            found = read_states(path, everything)
        except ValueError:
            continue  # else the byte says nothing: a date, or a system that wrote the file
        for (*name, state), (*wanted, kept) in zip(found, states, strict=True):
            assert name == wanted and str(state) == str(kept), at


def test_a_file_of_format_1_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(b"GCPSTATE" + bytes(100))
    error = caught(serve, LocalCommunicator.group(2)[1], 1, checkpoint=path)
    assert type(error) is ValueError and "format 1" in str(error)
    assert "with the gradcomp that wrote it" in str(error)


def test_a_file_that_is_refused_ends_the_server(tmp_path):
    path, here = tmp_path / "state", LocalCommunicator.group(2)[1]
    path.write_bytes(b"PK")
    error = caught(serve, here, 1, checkpoint=path, timeout_s=0.1)
    assert type(error) is ValueError and "checkpoint" in str(error)
    missing = caught(serve, here, 1, checkpoint=tmp_path / "none")
    assert isinstance(missing, FileNotFoundError)


def test_an_error_while_saving_leaves_the_older_file(tmp_path):
    path = tmp_path / "state"
    path.write_text("older")
    records = (pytest.fail(name) for name in ["while saving"])
    with pytest.raises(pytest.fail.Exception):
        write_states(path, records)
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]


def test_records_say_what_was_put_in():
    spec = make_spec((2, 3), "float32", None, True, 0.25)
    record = pack_state(State(7, spec, torch.arange(6.0)))
    found = parse_state(record)
    assert (found.steps, found.spec, found.residual) == (7, spec, None)
    assert torch.equal(found.value, torch.arange(6.0))
    for bad in (record[:15], record[:20], record[:-1]):
        assert isinstance(caught(parse_state, bad), (ValueError, CorruptPayload))


def read_only(client, index, path):
    client.init_parameter("w", [2], asynchronous=True, learning_rate=1.0, value=torch.ones(2))
    meet(client)
    return caught(client.save, path) if index == 0 else None


def test_a_file_that_cannot_be_written(tmp_path):
    assert isinstance(run(read_only, tmp_path / "missing" / "state")[0], FileNotFoundError)


def use_ternary(client, index):
    codec = TernGrad(clip_sigma=None)
    client.init_parameter("t", [codec.payload_nbytes(8)], "uint8", codec=codec)
    client.push_parameter("t", codec.encode(torch.ones(8), scale=1.0, key=RngKey(rank=index)))
    return client.pull_parameter("t", "decode_average").tolist()


def test_new_keys_may_join_restored_ones(tmp_path):
    path = tmp_path / "state"
    run(train, 0, 1, path)
    assert run(use_ternary, checkpoint=path) == [[1.0] * 8] * 2
