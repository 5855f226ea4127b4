"""A client's requests that are under way: each is one message, and one reply that finds its way by
number.

Whoever waits for a reply receives; while calls are under way that nobody waits for, a thread
receives in its place.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from gradcomp.comm.base import Communicator, RankGone, Work
from gradcomp.errors import CorruptPayload, PeerLost
from gradcomp.server.messages import Kind, Message, pack, parse, parse_error, servers_digest

T = TypeVar("T")

GRACE_S = 5.0  # for the server to say what a pull has waited for
CLOSE_S = 5.0  # for the farewell to leave
SLICE_S = 0.1  # longest time in which the receiving thread does not see that it should end
_ROOM_NBYTES = 1 << 16  # of a reply, beside its values: header, or an error


@dataclass(eq=False)
class Request:
    """One message to a server.

    Attributes:
        number: repeated by the reply.
        server: rank that is asked.
        kind, key, shard: what, and of which shard of which key.
        room_nbytes: the most that the reply's values may take.
        begun: when it was sent, by the monotonic clock.
        sent: its way; None before it has begun.
        reply: what came; None: nothing yet.
    """

    number: int
    server: int
    kind: Kind
    key: str
    shard: int
    room_nbytes: int
    begun: float
    sent: Work | None = None
    reply: Message | Exception | None = None

    @property
    def phase(self) -> str:
        return self.kind.name.lower()


class Requests:
    """Sends requests and receives replies, for one thread.

    Args:
        comm: the ranks.
        servers: those that serve.
        timeout_s: seconds after which a server that does not answer is given up.

    Attributes:
        bytes_sent, bytes_received: of messages, headers included.
    """

    def __init__(self, comm: Communicator, servers: Sequence[int], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = 0
        self._comm, self._servers = comm, tuple(servers)
        self._digest = servers_digest(servers, comm.world_size)
        self._number = secrets.randbelow(
            2**31
        )  # a late reply to an earlier client of this rank matches nothing
        self._changed = threading.Condition()
        self._open: dict[int, Request] = {}
        self._gone: dict[int, str] = {}  # servers that are; the transport tells once
        self._receiver: threading.Thread | None = None
        self._closed = False

    def send(self, server: int, message: Message, room_nbytes: int) -> Request:
        """Begin to send a message (its `request` and `servers` are filled in here).

        Raises:
            RuntimeError: the client is closed.
            PeerLost: the server is gone.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        with self._changed:
            self._number = self._number % (2**32 - 1) + 1
            now = time.monotonic()
            request = Request(
                self._number, server, message.kind, message.key, message.shard, room_nbytes, now
            )
            if server in self._gone:
                raise PeerLost(request.phase, -1, 0.0, self._gone[server])
            self._open[request.number] = request
            self._changed.notify_all()
        raw = self._numbered(message, request.number)
        try:
            request.sent = self._comm.start_send(raw, server)
        except ConnectionError as error:
            self.drop(request)
            raise PeerLost(
                request.phase, -1, time.monotonic() - request.begun, f"server {error}"
            ) from error
        except BaseException:
            self.drop(request)
            raise
        self.bytes_sent += raw.numel()
        return request

    def check_overlap(self) -> None:
        """Raise RuntimeError where no other thread than the caller's can receive."""
        self._comm.check_overlap()

    def overlap(self) -> None:
        """Have a thread receive replies for as long as some are missing and no older than the
        timeout.
        """
        with self._changed:
            if self._receiver is None and self._open:
                self._receiver = threading.Thread(
                    target=self._receive_all, name="gradcomp-replies", daemon=True
                )
                self._receiver.start()

    def wait(self, request: Request, deadline: float) -> Message:
        """Return the reply to a request, or raise what the server says, or that it says nothing
        until `deadline`.
        """
        try:
            if request.sent is not None and request.reply is None:
                request.sent.wait(max(0.0, deadline - time.monotonic()))
        except ConnectionError as error:
            waited = time.monotonic() - request.begun
            self.drop(request)
            raise PeerLost(request.phase, -1, waited, f"server {error}") from error
        except TimeoutError as error:
            waited = time.monotonic() - request.begun
            self.drop(request)
            raise PeerLost(
                request.phase, -1, waited, f"server rank {request.server} takes no message"
            ) from error
        reply = self._reply_to([request], deadline)
        if reply is None:
            reply = self._late(request)
        if isinstance(reply, Exception):
            raise reply
        if reply.kind == Kind.ERROR:
            raise parse_error(reply.data(), request.phase, time.monotonic() - request.begun)
        return reply

    def drop(self, request: Request) -> None:
        """Forget a request; a reply that comes nevertheless is nobody's."""
        with self._changed:
            self._open.pop(request.number, None)

    def close(self) -> None:
        """Tell the servers that this worker has done; whoever still waits for a reply gets
        RuntimeError.
        """
        if self._closed:
            return
        self._closed = True
        self._fail(RuntimeError("this client is closed"))
        if self._receiver is not None:
            self._receiver.join(CLOSE_S)
        farewell = self._numbered(Message(Kind.CLOSE), self._number % (2**32 - 1) + 1)
        for server in self._servers:
            with contextlib.suppress(TimeoutError, ConnectionError):
                self._comm.start_send(farewell, server).wait(min(CLOSE_S, self.timeout_s))

    # ---- parts
    # ----------------------------------------------------------------------------------------------

    def _numbered(self, message: Message, number: int) -> Tensor:
        return pack(replace(message, request=number, servers=self._digest))

    def _reply_to(self, requests: Sequence[Request], deadline: float) -> Message | Exception | None:
        """Return the first reply to one of some requests, None if there is none until
        `deadline`.
        """
        while True:
            with self._changed:
                found = next((r.reply for r in requests if r.reply is not None), None)
                left = deadline - time.monotonic()
                if found is not None or left <= 0:
                    return found
                if self._receiver is not None:
                    self._changed.wait(left)
                    continue
            self._receive(left)

    def _late(self, request: Request) -> Message | Exception:
        """Ask what a pull waits for and return PeerLost that says so; the reply itself may still
        come instead.
        """
        detail, cancel = f"server rank {request.server} is silent", None
        if request.kind == Kind.PULL:
            with contextlib.suppress(PeerLost):
                cancel = self.send(
                    request.server, Message(Kind.CANCEL, key=request.key, shard=request.shard), 0
                )
                until = time.monotonic() + min(GRACE_S, self.timeout_s)
                reply = self._reply_to([request, cancel], until)
                if request.reply is not None or isinstance(reply, Exception):
                    return request.reply or reply  # type: ignore[return-value]
                if reply is not None and reply.kind == Kind.ERROR:
                    return reply
                if reply is not None:
                    detail = reply.data().numpy().tobytes().decode(errors="replace")
        for given_up in (request, cancel):
            if given_up is not None:
                self.drop(given_up)
        return PeerLost(request.phase, -1, time.monotonic() - request.begun, detail)

    def _receive_all(self) -> None:
        """Receive until no reply is missing that may still come."""
        try:
            while True:
                with self._changed:
                    since = time.monotonic() - self.timeout_s
                    if self._closed or all(r.begun < since for r in self._open.values()):
                        return
                self._receive(SLICE_S)
        except Exception as error:  # noqa: BLE001 - told to those who wait
            self._fail(error)
        finally:
            with self._changed:
                self._receiver = None
                self._changed.notify_all()

    def _receive(self, timeout_s: float) -> None:
        """Receive one message, if one comes in time, and give it to the request that it answers."""
        with self._changed:
            room = max((r.room_nbytes for r in self._open.values()), default=0)
        try:
            sender, raw = self._comm.receive(timeout_s, max_nbytes=room + _ROOM_NBYTES)
        except TimeoutError:
            return
        except RankGone as error:
            if error.rank in self._servers:
                with self._changed:
                    self._gone[error.rank] = f"server {error}"
                self._fail(None, error.rank)
            return
        except ValueError as error:
            self._fail(CorruptPayload("message", f"a reply is too long: {error}"))
            return
        self.bytes_received += raw.numel()
        if sender in self._servers:
            self._give(sender, raw)

    def _give(self, server: int, raw: Tensor) -> None:
        try:
            message = parse(raw)
        except CorruptPayload as error:
            return self._fail(error, server)
        if message.kind not in (Kind.OK, Kind.ERROR):
            return None
        with self._changed:
            number = message.request
            if not number:  # the server could not read the number: that was its oldest request
                number = next((r.number for r in self._open.values() if r.server == server), 0)
            request = self._open.get(number)
            if request is not None and request.server == server:
                del self._open[number]
                request.reply = message
                self._changed.notify_all()
        return None

    def _fail(self, error: Exception | None, server: int | None = None) -> None:
        """End all open requests (of one server); None: it is gone."""
        with self._changed:
            for request in [r for r in self._open.values() if server in (None, r.server)]:
                del self._open[request.number]
                waited = time.monotonic() - request.begun
                request.reply = error or PeerLost(
                    request.phase, -1, waited, self._gone[request.server]
                )
            self._changed.notify_all()


class Pending(ABC, Generic[T]):
    """A call that is under way, as `ParameterClient` returns it for ``wait=False``."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""

    @abstractmethod
    def wait(self) -> T:
        """Return what the call returns, or raise what it raises; waiting again gives the same.

        Raises:
            PeerLost: nothing for the client's `timeout_s`, counted from here.
        """


class Call(Pending[T]):
    """A call made of requests.

    Args:
        requests: sends them.
        parts: the requests.
        finish: makes the result of their replies.
        failed: told of the error, if that is how the call ends.
    """

    def __init__(
        self,
        requests: Requests,
        parts: Sequence[Request],
        finish: Callable[[list[Message]], T],
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._requests, self._parts, self._finish, self._failed = (
            requests,
            list(parts),
            finish,
            failed,
        )
        self._result: list[T] = []
        self._error: Exception | None = None

    def done(self) -> bool:
        return all(part.reply is not None for part in self._parts)

    def wait(self) -> T:
        if self._error is None and not self._result:
            deadline = time.monotonic() + self._requests.timeout_s
            try:
                self._result.append(
                    self._finish([self._requests.wait(part, deadline) for part in self._parts])
                )
            except Exception as error:  # noqa: BLE001 - raised below
                self._error = error
                self._failed(error)
            for part in self._parts:
                self._requests.drop(part)
            self._parts.clear()
        if self._error is not None:
            raise self._error
        return self._result[0]
