"""Messages from rank to rank over TCP, for transports whose own cannot be given up (a gloo receive
cannot be interrupted).

Every rank listens, tells the others where, and connects to the ranks below it; both ends prove who
they are. One asyncio loop in a daemon thread moves the bytes. A message is its length (u64,
little-endian) and its bytes; the bytes are read only when `receive` has memory for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
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
from gradcomp.comm.handshake import Stranger, answer, greet
from gradcomp.errors import peers_answer

logger = logging.getLogger("gradcomp")

CARD_NBYTES = 1024  # what a rank tells about itself, padded
KEY_NBYTES = 32
PART_NBYTES = 1 << 20
SPARE_CONNECTIONS = 16  # that may wait beside those of the ranks
CLOSE_S = 3.0  # longest wait for peers to take what was sent to them
CONNECT_S = 10.0  # longest wait for a connection
HANDSHAKE_S = 10.0  # longest wait for a stranger's proof
_LENGTH = struct.Struct("<Q")
_BROKEN = (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError)

Share = Callable[[bytes], Sequence[bytes]]


@dataclass(eq=False)
class _Incoming:
    """A message whose length has arrived: `memory` decides where its bytes go, None drops them."""

    sender: int
    nbytes: int
    memory: asyncio.Future[memoryview | None]
    message: Tensor | None = None  # once it has been accepted
    arrived: bool = False


class _Peer(NamedTuple):
    """A rank that is connected."""

    writer: asyncio.StreamWriter
    lock: asyncio.Lock  # of the message that is being sent
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
    """Sends messages to the other ranks and receives theirs.

    Every rank must be connected within `timeout_s`: PeerLost for one that cannot be reached, or is
    not who it should be. `share`, a collective call, gives this rank's bytes (of one length) to all
    ranks and returns everyone's.
    """

    def __init__(self, rank: int, world_size: int, share: Share, timeout_s: float) -> None:
        # what the loop holds; so that this goes when its user drops it
        self._post = _Post(rank, world_size)
        loop = self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(loop,), name="gradcomp-messages", daemon=True)
        thread.start()
        # at the latest when the interpreter ends
        self._end = weakref.finalize(self, _stop, loop, thread, self._post.peers)
        try:
            with peers_answer("setup", called="start_send or receive"):
                self._meet(share, timeout_s)
        except BaseException:
            self.close()
            raise

    def start_send(self, message: Tensor, to: int) -> base.Work:
        """Begin to send ``(n,)`` uint8."""
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
                if left <= 0:  # what is on its way goes on arriving, for a later call
                    raise base.no_message(source)
                post.changed.wait(left)

    def _accept(self, found: _Incoming, max_nbytes: int) -> Tensor:
        """Return where the bytes of a message come; ValueError for one that is dropped."""
        if found.message is not None:
            return found.message
        if found.nbytes > max_nbytes:
            self._post.incoming.remove(found)
            self._loop.call_soon_threadsafe(found.memory.set_result, None)
            raise base.too_long(found.sender, found.nbytes, max_nbytes)
        found.message = torch.empty(found.nbytes, dtype=torch.uint8, device="cpu")
        self._loop.call_soon_threadsafe(found.memory.set_result, found.message.numpy().data)
        return found.message

    def close(self) -> None:
        """Close every connection, which peers notice. Closing twice is harmless."""
        self._end()

    def _meet(self, share: Share, timeout_s: float) -> None:
        """Connect every two ranks, by the key of rank 0."""

        def tell(card: dict[str, Any]) -> list[dict[str, Any]]:
            padded = json.dumps(card).encode().ljust(CARD_NBYTES)
            return [json.loads(data) for data in share(padded)]

        post = self._post
        first = tell({"host": host_identity(), "key": secrets.token_hex(KEY_NBYTES)})
        one_host = len({card["host"] for card in first}) == 1
        with contextlib.ExitStack() as stack:
            try:
                listener = listen(one_host, post.world_size + SPARE_CONNECTIONS)
                stack.enter_context(listener)
                card = dict(zip(("address", "port"), listener.getsockname(), strict=False))
            except OSError as error:
                card = {"error": str(error).encode("ascii", "replace").decode()[:800]}
            cards = tell(card)
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
    """Connections and messages; all but `changed` and what it guards belongs to the loop."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.changed = threading.Condition()
        self.incoming: list[_Incoming] = []
        self.gone: set[int] = set()
        self.reported: set[int] = set()  # ranks whose end `receive` has reported
        self.peers: dict[int, _Peer] = {}
        self._strangers: set[asyncio.Task[None]] = set()  # that have not proved who they are
        self._complete = asyncio.Event()

    # ---- connecting ------------------------------------------------------------------------------

    async def join(
        self, listener: socket.socket, cards: Sequence[dict[str, Any]], key: bytes, timeout_s: float
    ) -> None:
        """Return when every two ranks are connected; close what has led to nothing.

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
        """Connect to a rank below."""
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
        """Take the connection of a rank above."""
        task = asyncio.current_task()
        assert task is not None
        self._strangers.add(task)
        try:
            proof = answer(reader, writer, key, self.rank, self.world_size)
            peer = await asyncio.wait_for(proof, HANDSHAKE_S)
            if peer in self.peers:
                raise Stranger(f"a second rank {peer}")
            self._take(peer, reader, writer)
        # cancelled when all ranks are here; asyncio would log a page for a task that ends by it
        except (*_BROKEN, asyncio.CancelledError) as error:
            why = str(error) or type(error).__name__
            logger.debug("gradcomp: rank %d sent a connection away: %s", self.rank, why)
        finally:
            self._strangers.discard(task)
            if all(writer is not known.writer for known in self.peers.values()):
                writer.transport.abort()

    def _take(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # so that drain() means: the caller's memory is free
        writer.transport.set_write_buffer_limits(0)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reading = asyncio.ensure_future(self._read(peer, reader))
        self.peers[peer] = _Peer(writer, asyncio.Lock(), reading)
        if len(self.peers) == self.world_size - 1:
            self._complete.set()

    # ---- messages --------------------------------------------------------------------------------

    async def send(self, message: Tensor, to: int) -> None:
        """Send a message; return when its memory is free."""
        writer, lock, _ = self.peers[to]
        async with lock:
            writer.write(_LENGTH.pack(message.numel()))
            writer.write(message.numpy().data)
            await writer.drain()

    async def _read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Read every message of a peer, one at a time, once there is memory for it."""
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
    """Deliver what has been sent, close every connection, end the loop."""

    async def end() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        closing = [asyncio.ensure_future(_close(peer.writer)) for peer in peers.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        loop.call_soon(loop.stop)  # after what the cancelled tasks have begun to close

    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(end(), loop)
        # a finalizer runs wherever the garbage collector does
        if threading.current_thread() is not thread:
            thread.join(2 * CLOSE_S)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
