"""Requests of a client: each is one message to a server, and a future that its reply completes.

The thread that holds the lock `Requests._receiving` receives replies: the caller while it waits, or
a background thread while calls with ``wait=False`` are in progress. There is no background thread
if MPI may be called from its main thread only.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Generic, TypeVar

from gradcomp.comm.base import Communicator, RankGone, Work
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.server.messages import EMPTY, Kind, Message, pack, parse, parse_error, servers_digest

T = TypeVar("T")

GRACE_S = 5.0  # longest wait for a server to report the cause of a late pull
CLOSE_S = 5.0  # longest wait for a CLOSE message to be sent
SLICE_S = 0.1  # longest time until the receiving thread notices a change
_HEAD_NBYTES = 1 << 16  # allowance for the header of a reply, or for an error


class Request(Future[Message]):
    """One message to a server; its result is the reply, its exception the error in the reply."""

    sent: Work  # the transfer of the message

    def __init__(self, number: int, server: int, message: Message) -> None:
        super().__init__()
        self.number, self.server, self.asked = number, server, replace(message, body=EMPTY)
        self._begun = time.monotonic()

    def lost(self, detail: str) -> PeerLost:
        """Return the error of a request without a reply."""
        waited_s = time.monotonic() - self._begun
        return PeerLost(self.asked.kind.name.lower(), -1, waited_s, detail)


class Requests:
    """Sends requests and receives replies, for one calling thread.

    `max_reply_nbytes` is the longest body of a reply that is accepted. Raise it before an earlier
    request to the same server than the one with the long reply, so that the receiving thread uses
    the new limit when that reply arrives.
    """

    def __init__(self, comm: Communicator, servers: Sequence[int], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.bytes_sent = self.bytes_received = self.max_reply_nbytes = 0
        self._comm, self._servers = comm, tuple(servers)
        self._digest = servers_digest(servers, comm.world_size)
        self._number = secrets.randbelow(2**31)  # late replies to an earlier client match nothing
        self._sending: list[Work] = []  # messages on their way
        self._receiving = threading.Lock()
        self._lock = threading.Lock()  # guards everything below
        self._open: dict[int, Request] = {}
        self._gone: dict[int, str] = {}  # lost servers, which the transport reports only once
        self._receiver: threading.Thread | None = None
        self._until = 0.0  # time (`time.monotonic`) at which the receiving thread ends
        self._closed = False

    def send(self, server: int, message: Message) -> Request:
        """Number a message and start to send it; PeerLost if the server is gone."""
        if self._closed:
            raise RuntimeError("this client is closed")
        number = self._number = self._number % (2**32 - 1) + 1
        raw = pack(replace(message, request=number, servers=self._digest))
        request = Request(number, server, message)
        # MPI keeps a message until it is asked whether the message has been sent
        self._sending = [work for work in self._sending if not work.is_done()]
        with self._lock:
            if server in self._gone:
                raise request.lost(self._gone[server])
            self._open[number] = request
            self._until = time.monotonic() + self.timeout_s
        try:
            request.sent = self._comm.start_send(raw, server)
        except BaseException as error:
            self.drop(request)
            if isinstance(error, ConnectionError):
                raise request.lost(f"server {error}") from error
            raise
        self._sending.append(request.sent)
        self.bytes_sent += raw.numel()
        return request

    def overlap(self) -> None:
        """Start a thread that receives replies until all have arrived or timed out."""
        with self._lock:
            if self._receiver is None and self._open:
                run, name = self._receive_all, "gradcomp-replies"
                self._receiver = threading.Thread(target=run, name=name, daemon=True)
                self._receiver.start()

    def wait(self, request: Request, deadline: float) -> Message:
        """Return the reply to a request; raise the server's error, or PeerLost at `deadline`."""
        try:
            if not request.done():
                request.sent.wait(max(0.0, deadline - time.monotonic()))
        except ConnectionError as error:
            self._fail(f"server {error}", [request])
        except TimeoutError:
            self._fail(f"server rank {request.server} takes no message", [request])
        self._receive_any([request], deadline)
        if not request.done():
            self._fail(self._reason(request), [request])
        return request.result()

    def drop(self, request: Request) -> bool:
        """Forget a request, so that its reply is ignored; return whether it was open."""
        with self._lock:
            return self._open.pop(request.number, None) is not None

    def close(self) -> None:
        """Notify the servers; open requests raise RuntimeError."""
        if self._closed:
            return
        self._closed = True
        self._fail(RuntimeError("this client is closed"), self._asked())
        receiver = self._receiver
        if receiver is not None:
            receiver.join(CLOSE_S)
        farewell = pack(Message(Kind.CLOSE, self._number % (2**32 - 1) + 1, self._digest))
        for server in self._servers:
            with contextlib.suppress(TimeoutError, ConnectionError, PeerLost):
                self._comm.start_send(farewell, server).wait(min(CLOSE_S, self.timeout_s))

    # ---- parts ----

    def _asked(self, server: int | None = None) -> list[Request]:
        """Return the open requests, or only those to `server`, the oldest first."""
        with self._lock:
            return [r for r in self._open.values() if server in (None, r.server)]

    def _receive_any(self, requests: Sequence[Request], deadline: float) -> None:
        """Receive replies until one of `requests` is done, or until `deadline`."""
        while not any(request.done() for request in requests):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            if not self._receiving.acquire(blocking=False):  # the background thread receives
                wait_for(requests, min(left, SLICE_S), FIRST_COMPLETED)
                continue
            try:
                self._receive_one(left)
            finally:
                self._receiving.release()

    def _receive_all(self) -> None:
        """Receive replies in the background thread until none is expected any more."""
        with self._receiving:
            while True:
                with self._lock:
                    if self._closed or not self._open or time.monotonic() > self._until:
                        self._receiver = None
                        return
                try:
                    self._receive_one(SLICE_S)
                except Exception as error:  # noqa: BLE001 - raised in `wait`
                    self._fail(error, self._asked())

    def _receive_one(self, timeout_s: float) -> None:
        """Receive at most one message, and complete the request that it replies to."""
        try:
            sender, raw = self._comm.receive(
                timeout_s, max_nbytes=self.max_reply_nbytes + _HEAD_NBYTES
            )
        except TimeoutError:
            return
        except RankGone as error:
            if error.rank in self._servers:
                with self._lock:
                    self._gone[error.rank] = f"server {error}"
                self._fail(f"server {error}", self._asked(error.rank))
            return
        except ValueError as error:
            text = f"a reply is too long: {error}"
            self._fail(CorruptPayload("message", text), self._asked())
            return
        self.bytes_received += raw.numel()
        asked = self._asked(sender)
        try:
            reply = parse(raw)
        except CorruptPayload as error:
            self._fail(error, asked)
            return
        # 0: the server could not read the number, so this replies to the oldest request
        request = next((r for r in asked if reply.request in (0, r.number)), None)
        if request is None or reply.kind not in (Kind.OK, Kind.ERROR) or not self.drop(request):
            return
        if reply.kind == Kind.OK:
            request.set_result(reply)
            return
        failure = parse_error(reply.body, request.lost)
        if isinstance(failure, PeerMismatch) and failure.field == "servers":
            mine = list(self._servers)
            failure = PeerMismatch("servers", failure.rank, mine, failure.got, first=None)
        request.set_exception(failure)

    def _fail(self, error: Exception | str, requests: Sequence[Request]) -> None:
        """Complete open requests with an error; a string is the detail of a PeerLost."""
        for request in requests:
            if self.drop(request):
                request.set_exception(request.lost(error) if isinstance(error, str) else error)

    def _reason(self, request: Request) -> str:
        """Return why a request is late; for a pull, ask the server, which may still reply to it."""
        silent = f"server rank {request.server} is silent"
        if request.asked.kind != Kind.PULL:
            return silent
        try:
            asked = Message(Kind.CANCEL, key=request.asked.key, shard=request.asked.shard)
            cancel = self.send(request.server, asked)
            self._receive_any([request, cancel], time.monotonic() + min(GRACE_S, self.timeout_s))
            if cancel.done():
                return cancel.result().body.numpy().tobytes().decode(errors="replace")
        except Exception as error:  # noqa: BLE001 - raised as the pull's
            if not isinstance(error, PeerLost):
                self._fail(error, [request])
            return silent
        self.drop(cancel)
        return silent


class Pending(Generic[T]):
    """A push or pull in progress, returned by `ParameterClient` for ``wait=False``."""

    def __init__(
        self,
        requests: Requests,
        parts: Sequence[Request],
        finish: Callable[[list[Message]], T],
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._requests, self._parts = requests, list(parts)
        self._finish, self._failed = finish, failed
        self._outcome: Future[T] = Future()

    def done(self) -> bool:
        """Return whether `wait` would return or raise immediately."""
        return all(part.done() for part in self._parts)

    def wait(self) -> T:
        """Wait for the result of the call and return it. Later calls return or raise the same.

        Raises:
            PeerLost: no reply within the client's `timeout_s`, counted from the first `wait`.
            Exception: as `ParameterClient.push_parameter` or `ParameterClient.pull_parameter`.
        """
        if not self._outcome.done():
            deadline = time.monotonic() + self._requests.timeout_s
            try:
                replies = [self._requests.wait(part, deadline) for part in self._parts]
                self._outcome.set_result(self._finish(replies))
            except Exception as error:  # noqa: BLE001 - raised below
                self._failed(error)
                self._outcome.set_exception(error)
            for part in self._parts:
                self._requests.drop(part)
            self._parts.clear()
        return self._outcome.result()
