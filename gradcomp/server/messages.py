"""What clients and servers write to each other: a fixed header, a key, raw bytes. No pickle, and
nothing is allocated by a number that was read.

::

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
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import CorruptPayload, GradcompError, NativeError, PeerLost, PeerMismatch
from gradcomp.payload.pieces import round_up

MAGIC = 0x53504347  # "GCPS"
VERSION = 2
METHODS = ("max", "sum", "mean", "decode_average")
MAX_KEY_NBYTES = 255
MAX_MESSAGE_NBYTES = 2**31 - 1  # what one MPI call can count
_HEADER = struct.Struct("<IBBBBIIII")
_ALIGNMENT = 8  # of the body, so that fp32 values can be viewed where they stand
_COMPRESSED = 0x80  # bit of the method byte


class Kind(IntEnum):
    """What a message is: six requests, two replies."""

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
    """One message.

    Attributes:
        kind: what it asks or answers.
        request: number of the request, chosen by the client and repeated in the reply; 0 when it
            could not be read.
        servers: `servers_digest` of the sender.
        key: of the parameter, at most 255 bytes of UTF-8; empty in CLOSE and in replies.
        method: reduce method of a PULL.
        compressed: a PULL asks for a payload.
        shard: number of the key's shard, 0 for a key that is not cut, or for the agreement on one
            that is.
        body: ``(n,)`` uint8.
    """

    kind: Kind
    request: int = 0
    servers: int = 0
    key: str = ""
    method: str | None = None
    compressed: bool = False
    shard: int = 0
    body: Tensor | None = None

    def data(self) -> Tensor:
        """Return the body, empty if there is none."""
        return self.body if self.body is not None else torch.empty(0, dtype=torch.uint8)


def pack(message: Message) -> Tensor:
    """Return a message as ``(nbytes,)`` uint8."""
    key, body = message.key.encode(), message.data()
    start = _HEADER.size + round_up(len(key), _ALIGNMENT)
    out = torch.zeros(start + body.numel(), dtype=torch.uint8)
    method = 0 if message.method is None else METHODS.index(message.method) + 1
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        message.kind,
        len(key),
        method | (_COMPRESSED if message.compressed else 0),
        message.request,
        message.servers,
        message.shard,
        body.numel(),
    )
    out.numpy()[: _HEADER.size + len(key)] = np.frombuffer(fields + key, np.uint8)
    out[start:] = body
    return out


def parse(message: Tensor) -> Message:
    """Return the message that some bytes are; its body is a view of them.

    Raises:
        CorruptPayload: "message": they are none, whatever they are.
    """
    view: NDArray[np.uint8] = message.numpy()
    if view.size < _HEADER.size:
        raise _corrupt(f"{view.size} bytes, a header alone has {_HEADER.size}")
    magic, version, kind, key_nbytes, method, request, servers, shard, body_nbytes = _HEADER.unpack(
        view[: _HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise _corrupt(f"{magic:#010x} is not {MAGIC:#010x}")
    if version != VERSION:
        raise _corrupt(f"version {version}, this gradcomp speaks {VERSION}")
    if kind not in iter(Kind):
        raise _corrupt(f"unknown kind {kind}")
    start = _HEADER.size + round_up(key_nbytes, _ALIGNMENT)
    if view.size != start + body_nbytes:
        raise _corrupt(f"{view.size} bytes, the header says {start + body_nbytes}")
    if view[_HEADER.size + key_nbytes : start].any():
        raise _corrupt("the padding of the key is not zero")
    try:
        key = view[_HEADER.size : _HEADER.size + key_nbytes].tobytes().decode()
    except UnicodeDecodeError as error:
        raise _corrupt(f"the key is not UTF-8: {error}") from None
    number = method & ~_COMPRESSED
    if number > len(METHODS):
        raise _corrupt(f"unknown reduce method {number}")
    name = METHODS[number - 1] if number else None
    return Message(
        Kind(kind), request, servers, key, name, bool(method & _COMPRESSED), shard, message[start:]
    )


def request_number(message: Tensor) -> int:
    """Return the number of a request that may not be one; 0 if it is too short to have a number."""
    if message.numel() < _HEADER.size:
        return 0
    return int(_HEADER.unpack(message[: _HEADER.size].numpy().tobytes())[5])


# ---- errors on the wire
# --------------------------------------------------------------------------------------------


def pack_error(error: Exception) -> Tensor:
    """Return the body of an ERROR reply: JSON, the name of the class and the arguments that make
    it again.
    """
    if isinstance(error, PeerMismatch):
        fields: list[object] = [
            error.field,
            error.rank,
            _plain(error.expected),
            _plain(error.got),
            error.first,
        ]
    elif isinstance(error, CorruptPayload):
        fields = [error.check, error.detail]
    elif isinstance(error, PeerLost):
        fields = [error.detail]
    elif is_foreseen(error):
        fields = [str(error)]
    else:
        fields = [f"the server failed with {type(error).__name__}: {error!s:.1000}"]
    known = next(
        (
            k.__name__
            for k in (PeerMismatch, CorruptPayload, PeerLost, ValueError)
            if isinstance(error, k)
        ),
        "",
    )
    text = json.dumps({"error": known or "GradcompError", "fields": fields})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def is_foreseen(error: Exception) -> bool:
    """Whether an error tells what is wrong with a request, and not that a server lacks memory or
    has a bug.
    """
    return isinstance(error, (GradcompError, ValueError)) and not isinstance(error, NativeError)


def parse_error(body: Tensor, phase: str, waited_s: float) -> Exception:
    """Return the exception that an ERROR reply stands for.

    Args:
        body: of the reply.
        phase, waited_s: of the request, for PeerLost.
    """
    try:
        found = json.loads(body.numpy().tobytes().decode())
        name, fields = str(found["error"]), list(found["fields"])
        if name == "PeerMismatch":
            field, rank, expected, got, first = fields
            return PeerMismatch(
                str(field), int(rank), expected, got, first=None if first is None else int(first)
            )
        if name == "CorruptPayload":
            check, detail = fields
            return CorruptPayload(str(check), str(detail))
        (text,) = fields
        if name == "PeerLost":
            return PeerLost(phase, -1, waited_s, str(text))
        return ValueError(str(text)) if name == "ValueError" else GradcompError(str(text))
    except (ValueError, KeyError, TypeError, RecursionError):
        return _corrupt("an error reply that cannot be read")


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str)) else str(value)


def _corrupt(detail: str) -> CorruptPayload:
    return CorruptPayload("message", f"no message of a parameter server: {detail}")


# ---- who serves what
# -----------------------------------------------------------------------------------------------


def server_ranks(servers: int | Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the ranks that serve.

    Args:
        servers: their ranks, or how many: the last ranks then.
        world_size: ranks in all.

    Raises:
        ValueError: ranks that are not distinct or do not exist, no server, or no worker left.
    """
    if isinstance(servers, int) and not isinstance(servers, bool):
        if not 1 <= servers < world_size:
            raise ValueError(
                f"servers must leave a worker: between 1 and {world_size - 1} of {world_size}, got"
                f" {servers}"
            )
        return tuple(range(world_size - servers, world_size))
    if not isinstance(servers, Sequence) or isinstance(servers, (str, bytes)):
        raise ValueError(f"servers must be a number or a sequence of ranks, got {servers!r}")  # noqa: TRY004
    ranks = tuple(servers)
    if any(isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < world_size for r in ranks):
        raise ValueError(f"servers must be ranks in [0, {world_size}), got {servers!r}")
    if not ranks or len(set(ranks)) < len(ranks):
        raise ValueError(f"servers must be distinct ranks, at least one, got {servers!r}")
    if len(ranks) == world_size:
        raise ValueError(f"servers={servers!r} leaves no worker of {world_size} ranks")
    return ranks


def servers_digest(servers: Sequence[int], world_size: int) -> int:
    """Return 32 bits that tell whether two ranks mean the same servers."""
    text = repr((world_size, tuple(servers))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


def home_of(key: str, servers: Sequence[int], shard: int = 0) -> int:
    """Return the rank that serves a key, by a hash that is the same in every process; shards go
    round from there.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return servers[(int.from_bytes(digest, "little") + max(0, shard - 1)) % len(servers)]
