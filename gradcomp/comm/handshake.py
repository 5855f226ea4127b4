"""Mutual authentication of two ranks over a new connection, by a shared key that is never sent.

    connector -> listener    magic, rank of the connector (u32), its nonce
    listener -> connector    nonce of the listener,
                             HMAC-SHA256(key, "listener" + both ranks + both nonces)
    connector -> listener    HMAC-SHA256(key, "connector" + both ranks + both nonces)

Integers are little-endian. Both proofs contain the ranks, so a wrong rank of the same job is also
rejected. They contain the roles, so one proof cannot be replayed as the other. Later data on the
connection is neither encrypted nor authenticated.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import struct

MAGIC = b"gcmail2\0"
NONCE_NBYTES = 16
PROOF_NBYTES = 32
_HELLO = struct.Struct(f"<{len(MAGIC)}sI{NONCE_NBYTES}s")


class Stranger(ConnectionError):
    """The process at the other end of a connection is not the expected rank."""


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, rank: int, peer: int
) -> None:
    """Authenticate as connector `rank`, after the listener has proved that it is rank `peer`.

    Raises Stranger if the proof of the listener is wrong.
    """
    mine = secrets.token_bytes(NONCE_NBYTES)
    writer.write(_HELLO.pack(MAGIC, rank, mine))
    theirs = await reader.readexactly(NONCE_NBYTES)
    proof = await reader.readexactly(PROOF_NBYTES)
    if not hmac.compare_digest(proof, _proof(key, b"listener", rank, peer, mine, theirs)):
        raise Stranger(f"another process answers there, not rank {peer} of this job")
    writer.write(_proof(key, b"connector", rank, peer, mine, theirs))


async def answer(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    key: bytes,
    rank: int,
    world_size: int,
) -> int:
    """Authenticate as listener `rank`, and return the rank of the connector, which is above it.

    Raises Stranger if the first message or the proof of the connector is wrong.
    """
    magic, peer, theirs = _HELLO.unpack(await reader.readexactly(_HELLO.size))
    if magic != MAGIC or not rank < peer < world_size:
        raise Stranger(f"no rank above {rank}")
    mine = secrets.token_bytes(NONCE_NBYTES)
    writer.write(mine + _proof(key, b"listener", peer, rank, theirs, mine))
    proof = await reader.readexactly(PROOF_NBYTES)
    if not hmac.compare_digest(proof, _proof(key, b"connector", peer, rank, theirs, mine)):
        raise Stranger(f"not rank {peer} of this job")
    return int(peer)


def _proof(
    key: bytes, role: bytes, connector: int, listener: int, first: bytes, second: bytes
) -> bytes:
    return hmac.digest(
        key, role + struct.pack("<II", connector, listener) + first + second, "sha256"
    )
