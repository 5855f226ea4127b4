"""The parameter server refuses by name: clients that disagree, payloads and messages that are
damaged, wrong arguments.
"""

import re
import struct
import threading

import pytest
import torch
from _serving import as_tensor, caught, flipped, meet, run
from hypothesis import given
from hypothesis import strategies as st
from reference import payload as ref_payload

from gradcomp import OneBit, Ternary, TernGrad
from gradcomp.codecs import EntropyCoded, RngKey
from gradcomp.comm import LocalCommunicator
from gradcomp.comm.local import Sent
from gradcomp.errors import (
    CorruptPayload,
    GradcompError,
    NativeError,
    PeerLost,
    PeerMismatch,
    UnsupportedTensor,
)
from gradcomp.server import ParameterClient, loop, messages, serve
from gradcomp.server.messages import Kind, Message
from gradcomp.server.spec import make_spec, pack_spec, parse_spec

# ---- what clients must agree on ------------------------------------------------------------------

CODEC = TernGrad(clip_sigma=None)
ASYNCHRONOUS = {"asynchronous": True, "learning_rate": 0.5, "value": torch.zeros(64)}
TERNGRADS = [{"codec": TernGrad(seed=seed)} for seed in (1, 2)]
ENTROPIES = [{"codec": EntropyCoded(bits)} for bits in (2.2, 2.3)]
STEPS = [{"codec": Ternary(step=step)} for step in (1.8, 2.0)]
DECAYS = [{"codec": OneBit(residual_decay=decay)} for decay in (1, 0.25)]
RATES = [ASYNCHRONOUS, {**ASYNCHRONOUS, "learning_rate": 0.25}]
VALUES = [ASYNCHRONOUS, {**ASYNCHRONOUS, "value": torch.ones(64)}]
IN_SHARDS = {"shard_nbytes": 128}  # of 32 elements
DIFFERENCES = [  # the field, what two clients ask for, and the options of both
    ("shape", ([4], "float32", {}), ([2, 2], "float32", {}), {}),
    ("shape", ([64], "float32", {}), ([65], "float32", {}), IN_SHARDS),
    ("dtype", ([64], "float32", {}), ([64], "uint8", {}), {}),
    ("codec", ([64], "uint8", {"codec": "onebit"}), ([64], "uint8", {"codec": "terngrad"}), {}),
    ("codec", ([64], "uint8", {}), ([64], "uint8", {"codec": "terngrad"}), {}),
    ("codec", *(([64], "uint8", codec) for codec in TERNGRADS), {}),
    ("codec", *(([64], "uint8", codec) for codec in ENTROPIES), {}),
    ("codec", *(([64], "uint8", codec) for codec in STEPS), {}),
    ("codec", *(([64], "uint8", codec) for codec in DECAYS), {}),
    ("asynchronous", ([64], "float32", ASYNCHRONOUS), ([64], "float32", {}), {}),
    ("learning_rate", *(([64], "float32", rate) for rate in RATES), {}),
    # of a key that is cut the weights might be a mixture; else the first client's values count
    ("value", *(([64], "float32", value) for value in VALUES), IN_SHARDS),
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


@pytest.mark.parametrize(("field", "here", "there", "size"), DIFFERENCES)
def test_different_settings_are_a_mismatch_at_both_sides(field, here, there, size):
    first, second = run(init_otherwise, [here, there], servers=2, **size)[0]
    assert first[0] is None
    assert isinstance(first[2], PeerMismatch) and (first[2].field, first[2].rank) == (field, 1)
    for error in (first[1], second[0], second[1]):
        assert isinstance(error, PeerMismatch) and error.field == field
    assert second[0].rank == 0 and second[0].expected == first[2].got
    shown = [str(options.get("codec", "as the payloads say")) for _, _, options in (here, there)]
    if field == "codec" and "Ternary" in shown[0]:
        assert all(text in str(first[2]) for text in shown)
    assert not re.search(r"\b\d{9,}\b", str(first[2]))  # a hash
    assert isinstance(second[2], ValueError)  # it never had the key
    assert first[3] == second[3] == 2.0


def push_unlike(client, index, payloads, codec):
    client.init_parameter("x", [payloads[index].numel()], "uint8", codec=codec)
    push = caught(client.push_parameter, "x", payloads[index])
    meet(client)
    return push, caught(client.pull_parameter, "x", "decode_average")


def encoded(dtype=torch.float32, scale=1.0, **key):
    return CODEC.encode(torch.ones(8, dtype=dtype), scale=scale, key=RngKey(**key))


UNLIKE = {
    "step": [encoded(step=k) for k in (0, 1)],
    "stream": [encoded(stream=k) for k in (0, 1)],
    "dtype": [encoded(), encoded(dtype=torch.float16)],
    "scale": [encoded(), encoded(scale=2.0)],
    # 1 scale and 8 bytes of codes, 2 scales and 4: as many bytes, otherwise divided
    "codec": [kind(group="tensor").encode(torch.ones(32)) for kind in (TernGrad, OneBit)],
}


@pytest.mark.parametrize("field", UNLIKE)
def test_payloads_of_one_round_must_be_alike(field):
    payloads = UNLIKE[field]
    assert payloads[0].numel() == payloads[1].numel()
    codec = CODEC if field == "scale" else None
    results = run(push_unlike, payloads, codec)[0]
    assert sum(push is not None for push, _ in results) == 1
    for rank, (push, pull) in enumerate(results):
        assert isinstance(pull, PeerMismatch) and (pull.field, pull.rank) == (field, 1 - rank)
        assert push is None or (isinstance(push, PeerMismatch) and push.field == field)


# ---- payloads that do not decode -----------------------------------------------------------------


def resealed(at, data):
    """Return the good payload with other bytes at a place, under a right checksum."""
    out = bytearray(GOOD.numpy().tobytes())
    out[at : at + len(data)] = data
    crc = ref_payload.crc32c(bytes(out[32:]), ref_payload.crc32c(bytes(out[:28])))
    out[28:32] = struct.pack("<I", crc)
    return as_tensor(out)


GOOD = CODEC.encode(torch.linspace(-1, 1, 32), scale=1.0)
DAMAGED = [  # the check that fails, and the payload
    ("crc", flipped(GOOD)),
    ("magic", torch.zeros_like(GOOD)),
    ("magic", torch.arange(GOOD.numel()).to(torch.uint8)),
    ("version", resealed(4, b"\x01")),
    ("codec", resealed(5, b"\x09")),
    ("codec", resealed(5, b"\x04")),
    ("codec", resealed(5, b"\x03")),
    ("dtype", resealed(6, b"\x07")),
    ("flags", resealed(7, b"\x80")),
    ("segmented", resealed(7, b"\x02" + GOOD.numpy().tobytes()[8:12] + bytes(4))),
    ("truncated", resealed(8, struct.pack("<I", 2**32 - 1))),
    ("trailing", resealed(8, struct.pack("<I", 4))),
    ("group_numel", resealed(12, bytes(4))),
    ("scale_count", resealed(16, struct.pack("<I", 2**31))),
    ("scale", resealed(32, struct.pack("<f", float("nan")))),
    ("scale", resealed(32, struct.pack("<f", -1.0))),
    ("code", resealed(36, b"\xff")),
]
DAMAGE = [(check, damaged, {}) for check, damaged in DAMAGED]
DAMAGE += [(check, damaged, {"shard_nbytes": 32}) for check, damaged in DAMAGED[-3:]]  # 4 shards


def push_damaged(client, index, damaged):
    client.init_parameter("x", [GOOD.numel()], "uint8", codec=CODEC)
    client.init_parameter("y", [1])
    push = caught(client.push_parameter, "x", damaged if index == 1 else GOOD)
    pull = caught(client.pull_parameter, "x", "decode_average")
    client.push_parameter("y", 1.0)
    other = float(client.pull_parameter("y", "sum"))
    client.push_parameter("x", GOOD)
    return push, pull, other, client.pull_parameter("x", "decode_average")


@pytest.mark.parametrize(
    ("check", "damaged", "size"), DAMAGE, ids=[f"{n}-{row[0]}" for n, row in enumerate(DAMAGE)]
)
def test_a_payload_that_does_not_decode_fails_its_round_only(over, check, damaged, size):
    results = run(push_damaged, damaged, servers=2, over=over, **size)[0]
    for rank, (push, pull, other, after) in enumerate(results):
        assert isinstance(pull, CorruptPayload) and pull.check == check and "rank 1" in str(pull)
        assert (push is None) == (rank != 1) and other == 2.0
        assert torch.equal(after, CODEC.decode(GOOD))
    assert isinstance(results[1][0], CorruptPayload) and results[1][0].check == check


# ---- wrong arguments -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client():
    """A client with keys "f", "u", "a", "cut"; what it raises at once, it raises by itself."""
    here, there = LocalCommunicator.group(2)
    server = threading.Thread(target=serve, args=(there, 1))
    server.start()
    with ParameterClient(here, 1, timeout_s=20) as client:
        client.init_parameter("f", [2])
        client.init_parameter("u", [4], "uint8")
        client.init_parameter("a", [2], **AT_ONCE, value=torch.zeros(2))
        client.init_parameter("cut", [1 << 24], "uint8")
        yield client
    server.join(20)


RAW = {"dtype": "uint8", "scale_key": "f"}
AT_ONCE = {"asynchronous": True, "learning_rate": 0.5}
WRONG = [  # the call, and what its error says
    ("init_parameter", ("", [1]), {}, "key"),
    ("init_parameter", ("k" * 256, [1]), {}, "key"),
    ("init_parameter", ("\ud800", [1]), {}, "key"),
    ("init_parameter", (3, [1]), {}, "3"),
    ("init_parameter", ("k", [1], "float64"), {}, "float64"),
    ("init_parameter", ("k", [-1]), {}, "-1"),
    ("init_parameter", ("k", [1.5]), {}, "1.5"),
    ("init_parameter", ("k", [1] * 9), {}, "8 dimensions"),
    ("init_parameter", ("k", [2**40]), {}, str(2**40)),
    ("init_parameter", ("k", [2**63]), {}, str(2**63)),
    ("init_parameter", ("k", [1]), {"codec": "terngrad"}, "uint8"),
    ("init_parameter", ("k", [1], "uint8"), {"codec": "zip"}, "zip"),
    ("init_parameter", ("k", [99], "uint8"), {"codec": OneBit(rotate=True)}, "cannot be used"),
    ("init_parameter", ("k", [99], "uint8"), {"codec": type("Own", (OneBit,), {})()}, "not Own"),
    ("init_parameter", ("k", [1]), {"asynchronous": True}, "learning_rate"),
    ("init_parameter", ("k", [1]), {"learning_rate": 0.5}, "0.5"),
    ("init_parameter", ("k", [1]), {"asynchronous": True, "learning_rate": float("nan")}, "nan"),
    ("init_parameter", ("k", [1]), AT_ONCE, "value"),
    ("init_parameter", ("k", [1]), {"value": torch.zeros(1)}, "value"),
    ("init_parameter", ("k", [1]), {**AT_ONCE, "value": torch.zeros(2)}, "(2,)"),
    ("init_parameter", ("k", [1]), {**AT_ONCE, "asynchronous": 1}, "1"),
    ("init_parameter", ("k", [1]), {**AT_ONCE, "value": torch.tensor([float("nan")])}, "NaN"),
    ("init_parameter", ("k", [2, 2]), RAW, "one element"),
    ("init_parameter", ("k", [2, 2]), {**RAW, "scale_key": "nobody"}, "nobody"),
    ("init_parameter", ("k", [2, 2]), {**RAW, "dtype": "float32"}, "float32"),
    ("init_parameter", ("k", [2, 2]), {**RAW, "codec": "terngrad"}, "uint8"),
    ("init_parameter", ("k", [2, 2], "uint8"), {"type": "float32"}, "differ"),
    ("push_parameter", ("nobody", 1.0), {}, "nobody"),
    ("push_parameter", ("f", torch.zeros(3)), {}, "(3,)"),
    ("push_parameter", ("f", 1.0), {}, "()"),
    ("push_parameter", ("f", torch.zeros(2, dtype=torch.float64)), {}, "float64"),
    ("push_parameter", ("u", torch.zeros(4)), {}, "float32"),
    ("push_parameter", ("u", [1, 2, 3, 300]), {}, "300"),
    ("push_parameter", ("f", "text"), {}, "text"),
    ("push_parameter", ("f", torch.zeros(2)), {"wait": 1}, "1"),
    ("pull_parameter", ("nobody", "sum"), {}, "nobody"),
    ("pull_parameter", ("f", "median"), {}, "median"),
    ("pull_parameter", ("f",), {}, "None"),
    ("pull_parameter", ("f", "decode_average"), {}, "decode_average"),
    ("pull_parameter", ("u", "sum"), {}, "sum"),
    ("pull_parameter", ("f", "sum"), {"compressed": True}, "compressed"),
    ("pull_parameter", ("cut", "decode_average"), {}, "first payload"),
    ("pull_parameter", ("u", "decode_average"), {"compressed": 1}, "1"),
    ("pull_parameter", ("a", "sum"), {}, "asynchronous"),
    ("pull_parameter", ("a",), {"compressed": True}, "asynchronous"),
    ("pull_parameter", ("u", "decode_average"), {"wait": 1}, "1"),
]


@pytest.mark.parametrize(("method", "args", "options", "word"), WRONG)
def test_wrong_arguments_name_the_value_and_send_nothing(client, method, args, options, word):
    before = client.bytes_sent
    with pytest.raises(ValueError) as error:
        getattr(client, method)(*args, **options)
    assert word in str(error.value) and client.bytes_sent == before


def test_tensors_elsewhere_are_unsupported(client):
    for tensor, word in ((torch.zeros(4)[::2], "contiguous"), (torch.zeros(2).to_sparse(), "spar")):
        with pytest.raises(UnsupportedTensor, match=word):
            client.push_parameter("f", tensor)


SERVERS = [0, 3, -1, True, None, "1", [], [0, 0], [3], [-1], [0, 1, 2], [1.0], 1.5, {2}]
WRONG_SIDES = [  # the call, the rank, servers, an option, and what the error says
    *((ParameterClient, 0, s, {}, ("servers", repr(s))) for s in SERVERS),
    (serve, 0, [2], {}, ("rank 0 is not a server",)),
    (ParameterClient, 2, [2], {}, ("rank 2 is a server",)),
    (serve, 2, [2], {"timeout_s": 0}, ("timeout_s", "0")),
    *(
        (ParameterClient, 0, 1, {name: value}, (name, repr(value)))
        for name, values in {
            "shard_nbytes": [0, 31, -1, 2**30 + 1, 1.5e6, True, None, "1"],
            "timeout_s": [0, -1, "x", float("nan")],
        }.items()
        for value in values
    ),
]


@pytest.mark.parametrize(("call", "rank", "servers", "options", "words"), WRONG_SIDES)
def test_clients_and_servers_refuse_wrong_places_and_options(call, rank, servers, options, words):
    error = caught(call, LocalCommunicator.group(3)[rank], servers, **options)
    assert isinstance(error, ValueError) and all(word in str(error) for word in words)


def test_keys_are_spread_by_a_pinned_hash_and_shards_in_turns():
    names = [f"layer{n}.weight" for n in range(300)]
    homes = [messages.server_of(name, (4, 5, 6)) for name in names]
    assert all(70 < homes.count(rank) < 130 for rank in (4, 5, 6))
    pinned = {"max_abs_grad": 1, "op_id_grads": 1, "ключ": 2}
    assert {key: messages.server_of(key, (0, 1, 2)) for key in pinned} == pinned
    assert messages.server_ranks(2, 5) == (3, 4) and messages.server_ranks((2, 0), 3) == (2, 0)
    homes = [messages.server_of("embedding", (4, 5, 6), shard) for shard in range(1, 301)]
    assert [homes.count(rank) for rank in (4, 5, 6)] == [100] * 3
    assert messages.server_of("embedding", (4, 5, 6)) == homes[0]


def use_closed(client, index):
    client.init_parameter("x", [1])
    client.close()
    client.close()
    return caught(client.push_parameter, "x", 1.0)


def test_a_closed_client_says_so(over):
    (error, _), (stats,) = run(use_closed, over=over)
    assert isinstance(error, RuntimeError) and "closed" in str(error)
    assert stats.lost == [] and stats.errors == 0


# ---- what reaches the server past the client's checks --------------------------------------------

DIGEST = messages.servers_digest((2,), 3)


def lost(detail):
    return PeerLost("pull", -1, 1.5, detail)


def request(kind, key="", body=b"", servers=DIGEST, **fields):
    return messages.pack(Message(kind, 7, servers, key, **fields, body=as_tensor(body)))


def random_bytes(count):
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count,), generator=generator).to(torch.uint8)


SPEC = pack_spec(make_spec((1,), "float32", None))
REFUSED = [  # what no client sends, and its error: before the first push
    (ValueError, request(Kind.PUSH, "unknown", bytes(3))),
    (ValueError, request(Kind.PULL, "unknown", method="sum")),
    (ValueError, request(Kind.CANCEL, "unknown")),
    (ValueError, request(Kind.PULL, "f", method="sum")),
    (ValueError, request(Kind.PUSH, "f", bytes(3))),
    (ValueError, request(Kind.INIT, "", SPEC)),
    (CorruptPayload, request(Kind.INIT, "new", bytes(3))),
    (CorruptPayload, request(Kind.OK)),
    (PeerMismatch, request(Kind.PUSH, "f", bytes(8), servers=DIGEST ^ 1)),
    (CorruptPayload, bytes(24)),
    (CorruptPayload, request(Kind.PUSH, "f", bytes(8))[:-1]),
    (CorruptPayload, request(Kind.PUSH, "f", bytes(8))[:20]),
    *((CorruptPayload, random_bytes(count)) for count in (0, 1, 23, 24, 25, 300)),
]
REFUSED_LATER = [  # after it
    (ValueError, request(Kind.PULL, "f")),
    (ValueError, request(Kind.PULL, "f", method="decode_average")),
    (ValueError, request(Kind.PULL, "f", method="sum", compressed=True)),
    (ValueError, request(Kind.PULL, "u", method="max")),
]


def send_refused(client, index):
    def ask(raw):
        """Return the error that the server answers."""
        client._comm.start_send(as_tensor(raw), 2).wait(60)
        _, raw = client._comm.receive(60, 2, max_nbytes=10_000)
        reply = messages.parse(raw)
        assert reply.kind == Kind.ERROR
        return messages.parse_error(reply.body, lost)

    client.init_parameter("f", [2])
    client.init_parameter("u", [GOOD.numel()], "uint8")
    errors = [ask(raw) for _, raw in REFUSED]
    client.push_parameter("f", torch.ones(2))
    client.push_parameter("u", GOOD)
    errors += [ask(raw) for _, raw in REFUSED_LATER]
    return errors, client.pull_parameter("f", "sum").tolist()


def test_hostile_requests_get_an_error_reply_and_the_server_lives(over):
    clients, (stats,) = run(send_refused, over=over)
    for errors, after in clients:
        assert list(map(type, errors)) == [kind for kind, _ in REFUSED + REFUSED_LATER]
        assert {e.check for e in errors if isinstance(e, CorruptPayload)} == {"message"}
        assert {(e.field, e.rank) for e in errors if type(e) is PeerMismatch} == {("servers", 2)}
        assert after == [2.0, 2.0]
    assert stats.errors == 2 * len(REFUSED + REFUSED_LATER) and stats.pushes == 4


def send_too_much(client, index):
    if index == 0:
        client._comm.start_send(torch.zeros(2000, dtype=torch.uint8), 2).wait(60)
    return meet(client)


def test_a_message_that_is_too_long_is_dropped(monkeypatch):
    monkeypatch.setattr(loop, "MAX_MESSAGE_NBYTES", 1000)
    met, (stats,) = run(send_too_much)
    assert met == [2, 2] and stats.unread == 1


@st.composite
def almost_messages(draw):
    """Bytes that look like messages, with true lengths more often than not."""

    def one(*values):
        return draw(st.sampled_from(values))

    small = [draw(st.integers(0, n)) for n in (2, 9, 5, 8)]
    rate, shard = one(0.0, 0.5, float("nan"), 1e300), [one(0, 0, 4, 2**63) for _ in range(3)]
    spec = struct.pack("<BBBBIIQdQQQ", *small, 0, one(0, 1), 0, rate, *shard)
    dims = [one(0, 1, 2, 2**20, 2**63) for _ in range(one(*range(10)))]
    whole = spec + struct.pack(f"<{len(dims)}Q", *dims)
    bodies = (b"", bytes(4), bytes(8), spec, whole, GOOD.numpy().tobytes(), whole + bytes(4))
    body = draw(st.one_of(st.binary(max_size=60), st.sampled_from(bodies)))
    message = Message(
        kind=one(*Kind),
        request=draw(st.integers(0, 9)),
        servers=one(DIGEST, DIGEST, 3),
        key=one("x", "u", "new", "y" * 9, ""),
        method=one(None, *messages.METHODS),
        compressed=draw(st.booleans()),
        shard=one(0, 0, 1, 7),
        body=as_tensor(body),
    )
    raw = bytearray(messages.pack(message).numpy().tobytes())
    for _ in range(draw(st.integers(0, 2))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw)


class Mailbox:
    """A communicator that keeps what a server sends."""

    rank, world_size = 2, 3

    def __init__(self, *works):
        self.sent, self.works = [], works or (Sent, Sent)

    def start_send(self, message, to):
        self.sent.append((to, message))
        return self.works[to]()


@pytest.mark.parametrize("place", [3, -1])
def test_padding_of_settings_is_zero(place):
    body = pack_spec(make_spec((4,), "uint8", Ternary()))  # whose text ends within a word
    parse_spec(body)
    body[place] = 1
    with pytest.raises(CorruptPayload, match="padding is not 0"):
        parse_spec(body)


@given(st.one_of(st.binary(max_size=200), almost_messages()))
def test_any_bytes_parse_or_are_refused_by_name(data):
    try:
        message = messages.parse(as_tensor(data))
    except CorruptPayload as error:
        assert error.check == "message"
        return
    assert messages.pack(message).numpy().tobytes() == data
    try:
        spec, value = parse_spec(message.body)
    except CorruptPayload:
        return
    assert torch.equal(pack_spec(spec, value), message.body)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 1), almost_messages()), min_size=1, max_size=12))
def test_a_server_survives_any_sequence_of_requests(requests):
    box = Mailbox()
    server = loop._Server(box, (2,))
    for key, dtype, shape in (("x", "float32", (1,)), ("u", "uint8", (GOOD.numel(),))):
        for rank in (0, 1):
            body = pack_spec(make_spec(shape, dtype, None))
            server._handle(rank, messages.pack(Message(Kind.INIT, 1, DIGEST, key, body=body)))
    for rank, raw in requests:
        before = len(box.sent)
        server._handle(rank, as_tensor(raw))
        for to, reply in box.sent[before:]:
            found = messages.parse(reply)
            assert to in (0, 1) and found.kind in (Kind.OK, Kind.ERROR)
            if found.kind == Kind.ERROR:
                error = messages.parse_error(found.body, lost)
                assert isinstance(error, (CorruptPayload, PeerMismatch, PeerLost, ValueError))


class Untaken(Sent):
    """A message to a client that is stuck."""

    taken = False

    def is_done(self):
        return self.taken

    def wait(self, timeout_s):
        raise AssertionError("the other clients would wait as well")


def test_a_client_that_takes_no_replies_is_ended_and_costs_no_more_memory(monkeypatch):
    """Its replies wait for earlier ones, and leave in order when these have."""
    monkeypatch.setattr(loop, "MAX_WAITING", 10)
    box = Mailbox(Untaken, Sent)
    server = loop._Server(box, (2,))

    def ask(numbers):
        for number in numbers:
            for rank in (0, 1):
                raw = messages.pack(Message(Kind.PULL, number, DIGEST, "unknown"))
                server._handle(rank, raw)
        return [messages.parse(message).request for to, message in box.sent if to == 0]

    most = loop.MAX_UNTAKEN
    assert ask(range(most + 5)) == list(range(most))
    for work in server._untaken[0][:3]:
        work.taken = True
    assert ask([most + 5]) == list(range(most + 3))
    assert ask(range(most + 6, 50)) == list(range(most + 3))
    assert [to for to, _ in box.sent].count(1) == 50
    assert server._open == {1} and not any(server._waiting.values())


@pytest.mark.parametrize("shape", [(2**63, 2**63), (2**32,), (2**31,)])
def test_no_memory_is_taken_by_a_number_that_was_read(shape):
    body = pack_spec(make_spec((1,), "float32", None)).numpy().tobytes()
    body = body[:1] + bytes([len(shape)]) + body[2:48] + struct.pack(f"<{len(shape)}Q", *shape)
    with pytest.raises(CorruptPayload):
        parse_spec(as_tensor(body))


def unreadable(body):
    what = "not a message of a parameter server: an error reply that cannot be read"
    return as_tensor(body), CorruptPayload("message", what)


def own(error):
    what = f"{type(error).__name__}: {error!s}"
    return error, GradcompError(f"the server failed with {what}")


TRAVEL = [  # what a server raises, or a body, and what its client raises
    *(
        (error, error)
        for error in (
            PeerMismatch("shape", 2, "(1,)", "(2,)"),
            PeerMismatch("shape", 2, "(1,)", "(2,)", first=None),
            CorruptPayload("crc", "stored 1, the bytes give 2"),
            ValueError("key 'ключ'"),
            PeerLost("pull", -1, 1.5, "rank 1 is gone"),
        )
    ),
    *map(own, (NativeError("GC_X", "f"), RuntimeError("not enough memory"), MemoryError("none"))),
    *map(unreadable, (b"", b"{", b"[]", b'{"error": 1}', b"\xff", b"[" * 100_000)),
    unreadable(b'{"error": "PeerMismatch", "fields": [1]}'),
]


@pytest.mark.parametrize(("raised", "wanted"), TRAVEL, ids=range(len(TRAVEL)))
def test_errors_travel_as_themselves_or_say_what_they_are(raised, wanted):
    body = messages.pack_error(raised) if isinstance(raised, Exception) else raised
    found = messages.parse_error(body, lost)
    assert type(found) is type(wanted) and vars(found) == vars(wanted)
    assert str(wanted) in str(found)
