"""How two ranks prove to each other over a new connection who they are, without sending the key
that both have.

    connector -> listener    magic, rank of the connector (u32), its nonce
    listener -> connector    nonce of the listener,
                             HMAC-SHA256(key, "listener" + both ranks + both nonces)
    connector -> listener    HMAC-SHA256(key, "connector" + both ranks + both nonces)

Integers are little-endian. The ranks stand in both proofs, so another rank of the same job is a
stranger, too; the roles do, so no proof serves as the other one. What follows on the connection is
neither encrypted nor authenticated.
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
    """Whoever is at the other end is not who it should be."""


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, rank: int, peer: int
) -> None:
    """Prove that this is `rank`, once the other end has proved that it is `peer`, else Stranger."""
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
    """Prove that this is `rank`, and return which rank above it the other end is, else Stranger."""
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
