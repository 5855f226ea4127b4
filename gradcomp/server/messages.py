"""Messages between clients and servers: a fixed header, a key and a body of raw bytes.

There is no pickle, and no allocation is sized by a number from a message::

    byte 0        4         5      6            7        8         12
         +--------+---------+------+------------+--------+---------+
         | magic  | version | kind | key_nbytes | method | request |
         +--------+---------+------+------------+--------+---------+
    byte 12        16      20           24        24 + key, padded to 8
         +---------+-------+------------+---------+------+
         | servers | shard | body_nbytes| key     | body |
         +---------+-------+------------+---------+------+
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from gradcomp.errors import CorruptPayload, GradcompError, NativeError, PeerLost, PeerMismatch
from gradcomp.payload.pieces import round_up

MAGIC, VERSION = 0x53504347, 3  # "GCPS"
METHODS = ("max", "sum", "mean", "decode_average")
MAX_KEY_NBYTES = 255
MAX_MESSAGE_NBYTES = 2**31 - 1  # the largest count of an MPI call
EMPTY = torch.empty(0, dtype=torch.uint8)
_HEADER = struct.Struct("<IBBBBIIII")
_ALIGNMENT = 8  # of the body, in bytes, so that its fp32 values can be viewed in place
_COMPRESSED = 0x80  # bit of the method byte
_ERRORS = {kind.__name__: kind for kind in (PeerMismatch, CorruptPayload, PeerLost, ValueError)}


class Kind(IntEnum):
    """Kind of a message: six requests and two replies (OK, ERROR)."""

    INIT = 1
    PUSH = 2
    PULL = 3
    CANCEL = 4
    CLOSE = 5
    OK = 6
    ERROR = 7
    STATE = 8


@dataclass(frozen=True)
class Message:
    kind: Kind
    request: int = 0  # number of the request, repeated in its reply; 0 if it could not be read
    servers: int = 0  # `servers_digest` of the sender
    key: str = ""  # empty in CLOSE, in replies, and in a STATE request for all keys
    method: str | None = None  # reduce method of a PULL
    compressed: bool = False  # whether a PULL requests a payload
    shard: int = 0  # 0 for a key that is not cut, and for the settings of a cut key
    body: Tensor = EMPTY  # (n,) uint8


def as_bytes(data: bytes) -> Tensor:
    """Return a copy of `data` as ``(n,)`` uint8."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def pack(message: Message) -> Tensor:
    """Return a message as ``(nbytes,)`` uint8."""
    key, body = message.key.encode(), message.body
    method = 0 if message.method is None else METHODS.index(message.method) + 1
    method |= _COMPRESSED * message.compressed
    numbers = message.request, message.servers, message.shard, body.numel()
    head = _HEADER.pack(MAGIC, VERSION, message.kind, len(key), method, *numbers) + key
    return torch.cat([as_bytes(head.ljust(round_up(len(head), _ALIGNMENT), b"\0")), body])


def parse(message: Tensor) -> Message:
    """Parse a message, ``(nbytes,)`` uint8. The body of the result is a view of it.

    Raises:
        CorruptPayload: check "message"; the bytes are not a valid message.
    """
    raw: bytes = message[: _HEADER.size].numpy().tobytes()
    if len(raw) < _HEADER.size:
        raise _corrupt(f"{len(raw)} bytes, a header alone has {_HEADER.size}")
    magic, version, kind, key_nbytes, method, request, servers, shard, nbytes = _HEADER.unpack(raw)
    start = _HEADER.size + round_up(key_nbytes, _ALIGNMENT)
    key, number = message[_HEADER.size : start].numpy().tobytes(), method & ~_COMPRESSED
    for is_wrong, detail in (
        (magic != MAGIC, f"{magic:#010x} is not {MAGIC:#010x}"),
        (version != VERSION, f"version {version}, this gradcomp speaks {VERSION}"),
        (kind not in iter(Kind), f"unknown kind {kind}"),
        (message.numel() != start + nbytes, f"{message.numel()} bytes, not {start + nbytes}"),
        (any(key[key_nbytes:]), "the padding of the key is not zero"),
        (number > len(METHODS), f"unknown reduce method {number}"),
    ):
        if is_wrong:
            raise _corrupt(detail)
    try:
        name = key[:key_nbytes].decode()
    except UnicodeDecodeError as error:
        raise _corrupt(f"the key is not UTF-8: {error}") from None
    reduce_method = METHODS[number - 1] if number else None
    compressed = bool(method & _COMPRESSED)
    body = message[start:]
    return Message(Kind(kind), request, servers, name, reduce_method, compressed, shard, body)


def request_number(message: Tensor) -> int:
    """Return the number of a request that may be corrupt; 0 if it is shorter than a header."""
    if message.numel() < _HEADER.size:
        return 0
    return int(_HEADER.unpack(message[: _HEADER.size].numpy().tobytes())[5])


def pack_error(error: Exception) -> Tensor:
    """Return the body of an ERROR reply: JSON with the class name and arguments of `error`."""
    name = next((n for n, kind in _ERRORS.items() if isinstance(error, kind)), "GradcompError")
    fields: Sequence[object] = [str(error)]
    if isinstance(error, (PeerMismatch, CorruptPayload)):
        fields = error.__reduce__()[1]
    elif isinstance(error, PeerLost):
        fields = [error.detail]
    elif not is_expected(error):
        fields = [f"the server failed with {type(error).__name__}: {error!s:.1000}"]
    return as_bytes(json.dumps({"error": name, "fields": fields}, default=str).encode())


def is_expected(error: Exception) -> bool:
    """Return whether an error reports an invalid request and not a failure of the server."""
    return isinstance(error, (GradcompError, ValueError)) and not isinstance(error, NativeError)


def parse_error(body: Tensor, lost: Callable[[str], PeerLost]) -> Exception:
    """Return the exception in the body of an ERROR reply; `lost` makes a PeerLost of a detail."""
    try:
        found = json.loads(body.numpy().tobytes().decode())
        kind: Callable[..., Exception] = _ERRORS.get(str(found["error"]), GradcompError)
        return (lost if kind is PeerLost else kind)(*found["fields"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return _corrupt("an error reply that cannot be read")


def _corrupt(detail: str) -> CorruptPayload:
    return CorruptPayload("message", f"not a message of a parameter server: {detail}")


def server_ranks(servers: int | Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the servers' ranks; `servers` may be the number of last ranks that serve.

    Raises:
        ValueError: the ranks do not exist, are not distinct, or leave no worker.
    """
    ranks: Sequence[int] = ()
    if isinstance(servers, int) and not isinstance(servers, bool):
        ranks = range(world_size - servers, world_size)
    elif isinstance(servers, Sequence) and not isinstance(servers, (str, bytes)):
        ranks = servers
    exist = all(type(rank) is int and 0 <= rank < world_size for rank in ranks)
    if not exist or not 0 < len(set(ranks)) == len(ranks) < world_size:
        raise ValueError(
            f"servers must be how many of the last ranks serve, or a sequence of distinct ranks in"
            f" [0, {world_size}), and leave at least one worker; got {servers!r}"
        )
    return tuple(ranks)


def servers_digest(servers: Sequence[int], world_size: int) -> int:
    """Return a 32-bit hash of world size and servers, by which ranks compare them."""
    return _hash(repr((world_size, tuple(servers))), 4)


def server_of(key: str, servers: Sequence[int], shard: int = 0) -> int:
    """Return a shard's server: by a hash of the key, consecutive shards on consecutive servers."""
    return servers[(_hash(key, 8) + max(0, shard - 1)) % len(servers)]


def _hash(text: str, nbytes: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=nbytes).digest()
    return int.from_bytes(digest, "little")
