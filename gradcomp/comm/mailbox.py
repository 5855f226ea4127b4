"""Point-to-point messages over TCP, for transports whose own receive cannot be cancelled (gloo).

Every rank listens, sends its address to the others, and connects to all lower ranks. One asyncio
loop in a daemon thread moves the bytes. A message is its length (u64, little-endian) followed by
its bytes. The bytes are read only after `receive` has allocated memory for them.

Both ends of a connection authenticate by a shared key that is never sent::

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
import concurrent.futures
import contextlib
import functools
import hmac
import json
import logging
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.comm import base
from gradcomp.comm.addresses import host_identity, listen
from gradcomp.errors import peers_answer

logger = logging.getLogger("gradcomp")

CARD_NBYTES = 1024  # padded JSON by which a rank describes itself
MAGIC = b"gcmail2\0"
KEY_NBYTES = 32
NONCE_NBYTES = 16
PROOF_NBYTES = 32
PART_NBYTES = 1 << 20
SPARE_CONNECTIONS = 16  # length of the listen queue beyond one connection for each rank
CLOSE_S = 3.0  # longest wait in `close` for peers to receive pending messages
CONNECT_S = 10.0  # longest wait for a connection
HANDSHAKE_S = 10.0  # longest wait for the proof of an incoming connection
_LENGTH = struct.Struct("<Q")
_HELLO = struct.Struct(f"<{len(MAGIC)}sI{NONCE_NBYTES}s")
_BROKEN = (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError)

Share = Callable[[bytes], Sequence[bytes]]


@dataclass(eq=False)
class _Incoming:
    """A message whose length has arrived."""

    sender: int
    nbytes: int
    memory: asyncio.Future[memoryview | None]  # destination of its bytes; None drops them
    message: Tensor | None = None  # the same memory, (nbytes,) uint8, after `receive` accepted it
    arrived: bool = False  # complete


class _Peer(NamedTuple):
    """The connection with a rank."""

    writer: asyncio.StreamWriter
    lock: asyncio.Lock  # held while a message is being sent
    reading: asyncio.Task[None]


class _Sending(base.Work):
    def __init__(self, future: concurrent.futures.Future[None], to: int) -> None:
        self._future, self._to = future, to

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float) -> None:
        try:
            self._future.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise TimeoutError(f"rank {self._to} takes no message") from None
        except (OSError, concurrent.futures.CancelledError) as error:
            raise base.RankGone(self._to, str(error)) from error


class Mailbox:
    """Point-to-point messages between all ranks. The constructor is collective.

    `share` is an all_gather of bytes of equal length.

    Raises:
        PeerLost: phase "setup"; a rank cannot be reached, or fails to authenticate.
    """

    def __init__(self, rank: int, world_size: int, share: Share, timeout_s: float) -> None:
        # the loop refers to this and not to the Mailbox, so that the Mailbox can be collected
        self._post = _Post(rank, world_size)
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="gradcomp-messages", daemon=True)
        thread.start()
        # runs at interpreter exit at the latest
        self._end = weakref.finalize(self, _stop, loop, thread, self._post.peers)
        try:
            with peers_answer("setup", called="start_send or receive"):
                self._meet(share, timeout_s)
        except BaseException:
            self.close()
            raise

    def start_send(self, message: Tensor, to: int) -> base.Work:
        """Start to send `message`, ``(n,)`` uint8; RankGone if rank `to` is gone."""
        if to in self._post.gone:
            raise base.RankGone(to)
        sending = asyncio.run_coroutine_threadsafe(self._post.send(message, to), self._loop)
        return _Sending(sending, to)

    def receive(self, timeout_s: float, source: int | None, max_nbytes: int) -> base.Message:
        """As `Communicator.receive`."""
        deadline, post = time.monotonic() + timeout_s, self._post
        with post.changed:
            while True:
                for found in [i for i in post.incoming if source in (None, i.sender)]:
                    message = self._accept(found, max_nbytes)
                    if found.arrived:
                        post.incoming.remove(found)
                        return found.sender, message
                base.report_gone(post.gone, post.reported, source)
                left = deadline - time.monotonic()
                if left <= 0:  # accepted messages continue to arrive, for a later call
                    raise base.no_message(source)
                post.changed.wait(left)

    def _accept(self, found: _Incoming, max_nbytes: int) -> Tensor:
        """Return the tensor that receives the bytes of a message, allocated at the first call;
        ValueError for a message above `max_nbytes`, which is dropped.
        """
        if found.nbytes > max_nbytes:
            self._post.incoming.remove(found)
            if found.message is None:
                self._loop.call_soon_threadsafe(found.memory.set_result, None)
            raise base.too_long(found.sender, found.nbytes, max_nbytes)
        if found.message is None:
            found.message = torch.empty(found.nbytes, dtype=torch.uint8, device="cpu")
            self._loop.call_soon_threadsafe(found.memory.set_result, found.message.numpy().data)
        return found.message

    def close(self) -> None:
        """Close every connection, which peers detect. A second call has no effect."""
        self._end()

    def _meet(self, share: Share, timeout_s: float) -> None:
        """Connect all pairs of ranks, authenticated by a random key of rank 0. Collective."""

        def share_card(card: dict[str, Any]) -> list[dict[str, Any]]:
            padded = json.dumps(card).encode().ljust(CARD_NBYTES)
            return [json.loads(data) for data in share(padded)]

        post = self._post
        first = share_card({"host": host_identity(), "key": secrets.token_hex(KEY_NBYTES)})
        one_host = len({card["host"] for card in first}) == 1
        with contextlib.ExitStack() as stack:
            try:
                listener = listen(one_host, post.world_size + SPARE_CONNECTIONS)
                stack.enter_context(listener)
                card = dict(zip(("address", "port"), listener.getsockname(), strict=False))
            except OSError as error:
                card = {"error": str(error).encode("ascii", "replace").decode()[:800]}
            cards = share_card(card)
            for rank, theirs in enumerate(cards):
                if why := theirs.get("error"):
                    raise ConnectionError(f"rank {rank} cannot listen for messages: {why}")
            joining = post.join(listener, cards, bytes.fromhex(first[0]["key"]), timeout_s)
            try:
                asyncio.run_coroutine_threadsafe(joining, self._loop).result()
            except asyncio.TimeoutError:
                missing = sorted(set(range(post.world_size)) - {post.rank, *post.peers})
                raise TimeoutError(f"no connection with ranks {missing}") from None


class _Post:
    """Connections and messages of a Mailbox. `changed` guards `incoming`, `gone` and `reported`;
    only the loop uses the rest.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.changed = threading.Condition()
        self.incoming: list[_Incoming] = []
        self.gone: set[int] = set()
        self.reported: set[int] = set()  # ranks for which `receive` has raised RankGone
        self.peers: dict[int, _Peer] = {}
        self._strangers: set[asyncio.Task[None]] = set()  # connections being authenticated
        self._complete = asyncio.Event()

    # ---- connecting ------------------------------------------------------------------------------

    async def join(
        self, listener: socket.socket, cards: Sequence[dict[str, Any]], key: bytes, timeout_s: float
    ) -> None:
        """Connect this rank with all others, and close connections that were not authenticated.

        Raises asyncio.TimeoutError after `timeout_s`, ConnectionError if a rank cannot be reached.
        """
        serving = functools.partial(self._answer, key)
        server = await asyncio.start_server(serving, sock=listener, limit=PART_NBYTES)
        if self.world_size == 1:
            self._complete.set()
        below = range(self.rank)
        tasks = [asyncio.ensure_future(self._greet(peer, cards[peer], key)) for peer in below]
        try:
            await asyncio.wait_for(asyncio.gather(self._complete.wait(), *tasks), timeout_s)
        finally:
            server.close()
            for task in [*tasks, *self._strangers]:
                task.cancel()

    async def _greet(self, peer: int, card: dict[str, Any], key: bytes) -> None:
        """Connect to a lower rank."""
        address, port = str(card["address"]), int(card["port"])
        writer = None
        try:
            opening = asyncio.open_connection(address, port, limit=PART_NBYTES)
            reader, writer = await asyncio.wait_for(opening, CONNECT_S)
            await greet(reader, writer, key, self.rank, peer)
            self._take(peer, reader, writer)
        except _BROKEN as error:
            raise ConnectionError(
                f"rank {peer} cannot be reached at {address} port {port}:"
                f" {error or type(error).__name__}"
            ) from error
        finally:
            if writer is not None and peer not in self.peers:
                writer.transport.abort()

    async def _answer(
        self, key: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Accept the connection of a higher rank."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.add(task)
        try:
            proof = answer(reader, writer, key, self.rank, self.world_size)
            peer = await asyncio.wait_for(proof, HANDSHAKE_S)
            if peer in self.peers:
                raise Stranger(f"a second rank {peer}")
            self._take(peer, reader, writer)
        # cancelled once all ranks are connected; asyncio logs a task that ends with CancelledError
        except (*_BROKEN, asyncio.CancelledError) as error:
            why = str(error) or type(error).__name__
            logger.debug("gradcomp: rank %d sent a connection away: %s", self.rank, why)
        finally:
            self._strangers.discard(task)
            if all(writer is not known.writer for known in self.peers.values()):
                writer.transport.abort()

    def _take(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # so that drain() returns only when the caller may reuse its memory
        writer.transport.set_write_buffer_limits(0)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reading = asyncio.ensure_future(self._read(peer, reader))
        self.peers[peer] = _Peer(writer, asyncio.Lock(), reading)
        if len(self.peers) == self.world_size - 1:
            self._complete.set()

    # ---- messages --------------------------------------------------------------------------------

    async def send(self, message: Tensor, to: int) -> None:
        """Send a message, and return when the caller may reuse its memory."""
        writer, lock, _ = self.peers[to]
        async with lock:
            writer.write(_LENGTH.pack(message.numel()))
            writer.write(message.numpy().data)
            await writer.drain()

    async def _read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Read the messages of a peer, one at a time, each after memory for it is allocated."""
        try:
            while True:
                (nbytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                found = _Incoming(peer, nbytes, asyncio.get_running_loop().create_future())
                with self.changed:
                    self.incoming.append(found)
                    self.changed.notify_all()
                memory, at = await found.memory, 0
                while at < nbytes:
                    part = await reader.read(min(PART_NBYTES, nbytes - at))
                    if not part:
                        raise asyncio.IncompleteReadError(b"", nbytes - at)
                    if memory is not None:
                        memory[at : at + len(part)] = part
                    at += len(part)
                with self.changed:
                    found.arrived = True
                    self.changed.notify_all()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:  # also if it was cancelled, or failed for lack of memory
            with self.changed:
                self.incoming = [i for i in self.incoming if i.sender != peer or i.arrived]
                self.gone.add(peer)
                self.changed.notify_all()


# ---- the loop, which must not hold a Mailbox -----------------------------------------------------


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, peers: dict[int, _Peer]
) -> None:
    """Flush pending messages, close every connection, and end the loop."""

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        sending = tasks - {peer.reading for peer in peers.values()}
        if sending:
            await asyncio.wait(sending, timeout=CLOSE_S)
        closing = [asyncio.ensure_future(_close(peer.writer)) for peer in peers.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.call_soon(loop.stop)  # after callbacks that the cancelled tasks have scheduled

    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(end(), loop)
        # a finalizer may run in any thread, also in this one
        if threading.current_thread() is not thread:
            thread.join(3 * CLOSE_S)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


# ---- authentication ------------------------------------------------------------------------------


class Stranger(ConnectionError):
    """The process at the other end of a connection is not the expected rank."""


async def greet(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, rank: int, peer: int
) -> None:
    """Authenticate as connector `rank` with listener `peer`; Stranger if its proof is wrong."""
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
    """Authenticate as listener `rank`; return the connector's rank, or raise Stranger."""
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
