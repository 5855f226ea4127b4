"""Checkpoints of the parameter server: bit for bit continuation with any number of servers, and
files that are refused.
"""

import base64
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
from _serving import caught, meet, noise, run, same_bits

import gradcomp
from gradcomp import OneBit, TernGrad
from gradcomp.codecs import RngKey
from gradcomp.comm import LocalCommunicator
from gradcomp.errors import PeerMismatch
from gradcomp.server import serve
from gradcomp.server.spec import make_spec
from gradcomp.server.state import FORMAT, State, pack_state, parse_state, read_states, write_states

NUMEL = 300
ONEBIT = OneBit(group=20)


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
        gradient = noise(NUMEL, step, index)
        codes = (gradient[:75].abs() * 100).to(torch.uint8).view(5, 15) & 0x55
        payload = ONEBIT.encode(gradient, residual=residual, key=RngKey(step=step))
        for key, value in (("packed", payload), ("raw", codes)):
            client.push_parameter(key, value)
            out.append(client.pull_parameter(key, "decode_average", compressed=True))
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
def test_a_restored_server_goes_on_bit_for_bit(over, tmp_path, servers, shard_nbytes):
    """Values, 1-bit residuals and the draws of raw codes, under another number of servers, whole
    keys and cut ones.
    """
    path, shards = tmp_path / "state", {"shard_nbytes": shard_nbytes}
    whole = run(train, 0, 6, None, **shards)[0]
    before = run(train, 0, 3, str(path), servers=2, over=over, **shards)[0]
    options = {"servers": servers, **shards}
    after = run(train, 3, 6, None, checkpoint=str(path), over=over, **options)[0]
    for uncut, first, second in zip(whole, before, after, strict=True):
        assert all(same_bits(a, b) for a, b in zip(uncut, [*first, *second], strict=True))
    fresh = run(train, 3, 6, None, **options)[0]
    differ = [not torch.equal(a, b) for a, b in zip(fresh[0], after[0], strict=True)]
    assert differ[:3] == [True, True, True]  # each kind of state shows
    assert list(tmp_path.iterdir()) == [path]


VECTORS = Path(__file__).parents[1] / "vectors"
THIS = VECTORS / f"states-{'.'.join(gradcomp.__version__.split('.')[:2])}.json"
FILES = sorted({*VECTORS.glob("states-*.json"), THIS})


@pytest.mark.parametrize("vectors", FILES, ids=[file.stem for file in FILES])
def test_the_file_of_a_version_is_read_and_none_of_its_bits_is_lost(vectors, tmp_path, request):
    """As tests/entry/test_compatibility.py, which says how files of versions are written."""
    path, rows = tmp_path / "state", json.loads(vectors.read_text())
    if request.config.getoption("--write-golden") and vectors == THIS:
        run(train, 0, 3, str(path), servers=2, shard_nbytes=256)
        rows["parameter server"] = base64.b64encode(path.read_bytes()).decode()
        lines = (f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        vectors.write_text("{" + ",\n".join(lines) + "}\n")
    path.write_bytes(base64.b64decode(rows["parameter server"]))
    states = list(read_states(path, everything))
    assert {key for key, _, _ in states} == {"meet", "packed", "raw", "weight"}
    again = tmp_path / "again"
    write_states(again, ((key, shard, pack_state(state)) for key, shard, state in states))
    members = [zipfile.ZipFile(file) for file in (path, again)]
    first, second = ({name: one.read(name) for name in one.namelist()} for one in members)
    assert first == second
    after = run(train, 3, 6, None, checkpoint=str(path), servers=1, shard_nbytes=256)[0]
    fresh = run(train, 3, 6, None, servers=1, shard_nbytes=256)[0]
    assert not torch.equal(after[0][2], fresh[0][2])  # its values count


def save_too_early(client, index, path):
    client.init_parameter("p", [ONEBIT.payload_nbytes(NUMEL, NUMEL // 20)], "uint8", codec=ONEBIT)
    payload = ONEBIT.encode(noise(NUMEL, index), residual=torch.zeros(NUMEL))
    client.push_parameter("p", payload)
    client.pull_parameter("p", "decode_average", compressed=True)
    if index == 0:
        client.push_parameter("p", payload)
    meet(client)
    errors = [caught(client.save, p) for p in (path, path / "missing")] if index == 1 else None
    meet(client)
    if index == 1:
        client.push_parameter("p", payload)
    client.pull_parameter("p", "decode_average", compressed=True)
    meet(client)
    if index == 0:
        client.save(path)
    return errors


def test_a_round_under_way_is_not_lost_silently(tmp_path):
    """A failed save, this or one that cannot be written, leaves the older file."""
    path = tmp_path / "state"
    path.write_text("older")
    early, unwritten = run(save_too_early, path)[0][1]
    assert type(early) is ValueError and "'p'" in str(early) and "[1]" in str(early)
    assert isinstance(unwritten, OSError)
    assert [key for key, _, _ in read_states(path, everything)] == ["meet", "p"]
    assert list(tmp_path.iterdir()) == [path]


def use_otherwise(client, index):
    weight = {"asynchronous": True, "learning_rate": -0.1, "value": torch.zeros(NUMEL + 1)}
    errors = [
        caught(client.init_parameter, "weight", [NUMEL + 1], **weight),
        caught(client.init_parameter, "packed", [80], "uint8", codec="terngrad"),
    ]
    codec = TernGrad(clip_sigma=None)
    client.init_parameter("new", [codec.payload_nbytes(8)], "uint8", codec=codec)
    client.push_parameter("new", codec.encode(torch.ones(8), scale=1.0, key=RngKey(rank=index)))
    return errors, client.pull_parameter("new", "decode_average").tolist()


def test_keys_must_be_as_they_were_and_new_ones_may_join(tmp_path):
    path = tmp_path / "state"
    run(train, 0, 1, path)
    (first, second), _ = run(use_otherwise, checkpoint=path)
    assert first[1] == second[1] == [1.0] * 8
    for errors in zip(first[0], second[0], strict=True):
        assert all(isinstance(error, PeerMismatch) for error in errors)
        assert 2 in {error.rank for error in errors}  # the server's: the checkpoint came first


def damaged(data):
    """Yield (name, bytes) of files that are not a checkpoint, or not all of one."""
    yield "empty", b""
    yield "foreign", bytes(200)
    yield "foreign archive", archive(b"", {"0/x": b""})
    yield "longer", data + bytes(4)
    yield "version", data.replace(b"version 3", b"version 4")
    yield "other records", archive(FORMAT % 1, {"0/wort": b"", "0/last": b""})
    for at in (1, 16, 60, len(data) // 2, len(data) - 1):
        yield f"cut at {at}", data[:at]
    for name, member, record in (
        *((f"record of {n} bytes", "0/x", RECORD[:n]) for n in (8, 15, 20, len(RECORD) - 1)),
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
VALUE = State(3, SPEC, torch.ones(2))
RECORD = pack_state(VALUE).numpy().tobytes()


def everything(key, shard):
    return True


def test_damaged_files_are_refused_whole(tmp_path):
    path = tmp_path / "state"
    residual = State(0, make_spec((8,), "uint8", None), None, torch.ones(2))
    states = [("a/ключ\0", 0, VALUE), ("last", 0, residual)]
    assert str(parse_state(pack_state(VALUE))) == str(VALUE)
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


REFUSED = [  # bytes of the file, None for no file; the error and what it says
    (b"GCPSTATE" + bytes(100), ValueError, ("format 1", "with the gradcomp that wrote it")),
    (
        archive(b"gradcomp parameter server, version 2, 1 records", {"0/x": RECORD}),
        ValueError,
        ("format 2", "with the gradcomp that wrote it"),
    ),
    (b"PK", ValueError, ("checkpoint",)),
    (None, FileNotFoundError, ()),
]


@pytest.mark.parametrize(
    ("data", "kind", "words"), REFUSED, ids=["format 1", "format 2", "no archive", "no file"]
)
def test_a_file_that_is_refused_ends_the_server(tmp_path, data, kind, words):
    path, here = tmp_path / "state", LocalCommunicator.group(2)[1]
    if data is not None:
        path.write_bytes(data)
    error = caught(serve, here, 1, checkpoint=path, timeout_s=0.1)
    assert type(error) is kind and all(word in str(error) for word in words)
