"""Messages from rank to rank over TCP, for transports whose own cannot be given up (a gloo receive cannot be interrupted).

Every rank listens, tells the others where, and connects to the ranks below it. One asyncio loop in a daemon thread moves
the bytes. A message is its length (u64, little-endian) and its bytes; the bytes are read only when `receive` has room.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradcomp.comm.base import RankGone, Work, no_message, tell_gone, too_long
from gradcomp.errors import PeerLost

CARD_NBYTES = 1024  # what a rank tells about itself, padded
KEY_NBYTES = 16
PART_NBYTES = 1 << 20
CLOSE_S = 3.0  # longest wait for peers to take what was sent to them
CONNECT_S = 10.0  # longest wait for one address
_LENGTH = struct.Struct("<Q")
_HELLO = struct.Struct(f"<{KEY_NBYTES}sI")


@dataclass(eq=False)
class _Incoming:
    """A message whose length has arrived: `room` decides where its bytes go, None drops them."""

    sender: int
    nbytes: int
    room: asyncio.Future[memoryview | None]
    message: Tensor | None = None  # once it has been accepted
    arrived: bool = False


class _Sending(Work):
    def __init__(self, future: concurrent.futures.Future[None], to: int, message: Tensor) -> None:
        self._future, self._to = future, to
        self._message = message  # read until it is sent

    def is_done(self) -> bool:
        return self._future.done()

    def wait(self, timeout_s: float) -> None:
        try:
            self._future.result(timeout_s)
        except (TimeoutError, concurrent.futures.TimeoutError):
            raise TimeoutError(f"rank {self._to} takes no message") from None
        except (OSError, concurrent.futures.CancelledError) as error:
            raise RankGone(self._to, str(error)) from error


def _own_addresses() -> list[str]:
    """Return where peers may reach this host, the likeliest first."""
    found = []
    master = os.environ.get("MASTER_ADDR")
    for name in [master] if master else []:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((name, 9))  # sends nothing; tells which interface leads there
                found.append(probe.getsockname()[0])
        except OSError:
            pass
    try:
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    except OSError:
        pass
    return list(dict.fromkeys([*found, "127.0.0.1"]))


class Mailbox:
    """Sends messages to the other ranks and receives theirs.

    Args:
        rank, world_size: as they say.
        share: gives this rank's bytes (of one length) to all ranks and returns everyone's; a collective call.
        timeout_s: seconds within which every rank must be connected.

    Raises:
        PeerLost: a rank could not be reached.
    """

    def __init__(self, rank: int, world_size: int, share: Callable[[bytes], Sequence[bytes]], timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._changed = threading.Condition()
        self._incoming: list[_Incoming] = []
        self._gone: set[int] = set()
        self._told: set[int] = set()  # ranks whose end `receive` has reported
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._key = secrets.token_bytes(KEY_NBYTES)
        self._key_known = threading.Event()  # that is, the key of rank 0, which all use
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gradcomp-messages", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(
            self, _stop, self._loop, self._thread, self._peers
        )  # at the latest when the interpreter ends
        try:
            self._meet(share, timeout_s)
        except BaseException:
            self.close()
            raise

    def start_send(self, message: Tensor, to: int) -> Work:
        """Begin to send ``(n,)`` uint8."""
        if to in self._gone:
            raise RankGone(to)
        return _Sending(asyncio.run_coroutine_threadsafe(self._send(message, to), self._loop), to, message)

    def receive(self, timeout_s: float, source: int | None, max_nbytes: int) -> tuple[int, Tensor]:
        """As `Communicator.receive`."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for found in [i for i in self._incoming if source in (None, i.sender)]:
                    self._accept(found, max_nbytes)
                    if found.arrived and found.message is not None:
                        self._incoming.remove(found)
                        return found.sender, found.message
                tell_gone(self._gone, self._told, source)
                left = deadline - time.monotonic()
                if left <= 0:  # what is on its way goes on arriving, for a later call
                    raise no_message(source)
                self._changed.wait(left)

    def _accept(self, found: _Incoming, max_nbytes: int) -> None:
        """Let the bytes of a message come, or drop them."""
        if found.message is not None:
            return
        if found.nbytes > max_nbytes:
            self._incoming.remove(found)
            self._loop.call_soon_threadsafe(found.room.set_result, None)
            raise too_long(found.sender, found.nbytes, max_nbytes)
        found.message = torch.empty(found.nbytes, dtype=torch.uint8)
        self._loop.call_soon_threadsafe(found.room.set_result, found.message.numpy().data)

    def close(self) -> None:
        """Close every connection; peers are told by that. Closing twice is harmless."""
        self._key_known.set()
        self._end()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _meet(self, share: Callable[[bytes], Sequence[bytes]], timeout_s: float) -> None:
        """Connect every two ranks."""
        server, port = self._do(self._listen())
        card = {"key": self._key.hex(), "port": port, "host": socket.gethostname(), "addresses": _own_addresses()[:8]}
        cards = [json.loads(c) for c in share(json.dumps(card).encode().ljust(CARD_NBYTES))]
        self._key = bytes.fromhex(cards[0]["key"])
        self._key_known.set()
        begun = time.monotonic()
        for peer in range(self.rank):
            self._do(self._connect(peer, cards[peer], timeout_s))
        others = set(range(self.world_size)) - {self.rank}
        with self._changed:
            if not self._changed.wait_for(lambda: others == self._peers.keys(), timeout_s):
                missing = sorted(others - self._peers.keys())
                raise PeerLost("setup", -1, time.monotonic() - begun, f"no connection from ranks {missing}")
        self._loop.call_soon_threadsafe(server.close)

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _listen(self) -> tuple[asyncio.Server, int]:
        server = await asyncio.start_server(self._greeted, "0.0.0.0", 0, limit=PART_NBYTES)
        return server, server.sockets[0].getsockname()[1]

    async def _connect(self, peer: int, card: dict[str, Any], timeout_s: float) -> None:
        """Reach a rank at one of its addresses; the loopback counts only on the same host."""
        same_host = card["host"] == socket.gethostname()
        addresses = [a for a in card["addresses"] if same_host or not a.startswith("127.")]
        failures = []
        for address in addresses:
            try:
                opening = asyncio.open_connection(address, int(card["port"]), limit=PART_NBYTES)
                reader, writer = await asyncio.wait_for(opening, min(CONNECT_S, timeout_s))
                writer.write(_HELLO.pack(self._key, self.rank))
                if hmac.compare_digest(await asyncio.wait_for(reader.readexactly(KEY_NBYTES), CONNECT_S), self._key):
                    self._greet(peer, reader, writer)
                    return
                failures.append(f"{address}: somebody else answers")
            except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError) as error:
                failures.append(f"{address}: {error or type(error).__name__}")
        raise PeerLost("setup", -1, 0.0, f"rank {peer} cannot be reached ({'; '.join(failures)})")

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection of a rank above, which proves itself by the key of this group."""
        try:
            key, peer = _HELLO.unpack(await asyncio.wait_for(reader.readexactly(_HELLO.size), CONNECT_S))
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError):
            return writer.close()
        await self._loop.run_in_executor(None, self._key_known.wait, 60)
        if not hmac.compare_digest(key, self._key) or not self.rank < peer < self.world_size or peer in self._peers:
            return writer.close()
        writer.write(self._key)
        return self._greet(peer, reader, writer)

    def _greet(self, peer: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(0)  # so that drain() means: the caller's memory is free
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._peers[peer], self._locks[peer] = writer, asyncio.Lock()
            self._changed.notify_all()
        self._loop.create_task(self._read(peer, reader))

    async def _send(self, message: Tensor, to: int) -> None:
        writer = self._peers[to]
        async with self._locks[to]:
            writer.write(_LENGTH.pack(message.numel()))
            writer.write(message.numpy().data)
            await writer.drain()

    async def _read(self, peer: int, reader: asyncio.StreamReader) -> None:
        """Read every message of a peer, one at a time, once there is room for it."""
        try:
            while True:
                (nbytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                found = _Incoming(peer, nbytes, self._loop.create_future())
                with self._changed:
                    self._incoming.append(found)
                    self._changed.notify_all()
                await self._fill(reader, nbytes, await found.room)
                with self._changed:
                    found.arrived = True
                    self._changed.notify_all()
        except (OSError, asyncio.IncompleteReadError):
            with self._changed:
                self._incoming = [i for i in self._incoming if i.sender != peer or i.arrived]
            self._lose(peer)

    async def _fill(self, reader: asyncio.StreamReader, nbytes: int, room: memoryview | None) -> None:
        at = 0
        while at < nbytes:
            part = await reader.read(min(PART_NBYTES, nbytes - at))
            if not part:
                raise asyncio.IncompleteReadError(b"", nbytes - at)
            if room is not None:
                room[at : at + len(part)] = part
            at += len(part)

    def _lose(self, peer: int) -> None:
        with self._changed:
            self._gone.add(peer)
            self._changed.notify_all()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, peers: dict[int, asyncio.StreamWriter]) -> None:
    """Deliver what has been sent, close every connection, end the loop."""

    async def end() -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        closing = [asyncio.ensure_future(_close(writer)) for writer in peers.values()]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    if thread.is_alive():
        with contextlib.suppress(TimeoutError, concurrent.futures.TimeoutError):
            asyncio.run_coroutine_threadsafe(end(), loop).result(2 * CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(CLOSE_S)
    if not thread.is_alive():
        loop.close()


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
