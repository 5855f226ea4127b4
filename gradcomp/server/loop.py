"""The server loop, which receives requests, sends replies and never waits for a single client."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gradcomp.comm.base import Communicator, RankGone, Work
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.server.messages import (
    MAX_MESSAGE_NBYTES,
    Kind,
    Message,
    as_bytes,
    is_expected,
    pack,
    pack_error,
    parse,
    request_number,
    server_of,
    server_ranks,
    servers_digest,
)
from gradcomp.server.parameters import AsynchronousParameter, StoredParameter
from gradcomp.server.spec import Spec, parse_spec
from gradcomp.server.state import pack_state, read_states

SLICE_S = 0.2  # longest wait for a message
BUSY_SLICE_S = 0.001  # longest wait while replies are queued
MAX_RECEIVE_FAILURES = 10  # consecutive ones, after which the transport counts as broken
MAX_UNTAKEN = 8  # replies to one client that are being sent
MAX_WAITING = 1024  # queued replies to one client; with more, the client is dropped

logger = logging.getLogger("gradcomp")
_Result = Tensor | Exception


@dataclass
class ServerStats:
    """Counters of a server.

    Attributes:
        pushes, pulls: requests that succeeded; a pull is counted when its reply is sent.
        errors: replies that were errors.
        failures: requests that failed because of the server (no memory, a bug); their tracebacks
            are in the log.
        unread: messages without a reply, because they were too long or from another server.
        bytes_received, bytes_sent: bytes of messages, including headers.
        asynchronous_pushes: pushes to asynchronous keys, also counted in `pushes`.
        staleness_sum, staleness_max: sum and maximum of the staleness of asynchronous pushes, see
            `ParameterClient.push_parameter`.
        lost: ranks that were lost before they closed their client.
    """

    pushes: int = 0
    pulls: int = 0
    errors: int = 0
    failures: int = 0
    unread: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    asynchronous_pushes: int = 0
    staleness_sum: int = 0
    staleness_max: int = 0
    lost: list[int] = field(default_factory=list)

    @property
    def staleness_mean(self) -> float:
        """Mean staleness of asynchronous pushes; 0.0 if there are none."""
        return self.staleness_sum / self.asynchronous_pushes if self.asynchronous_pushes else 0.0


def serve(
    comm: Communicator,
    servers: int | Sequence[int],
    *,
    timeout_s: float | None = 3600.0,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ServerStats:
    """Serve parameters on this rank until every client has closed or is gone.

    Call this on every server rank. All other ranks of `comm` are workers, each with one
    `ParameterClient`.

    Args:
        comm: communicator. No other code may send or receive messages on it while this runs.
        servers: ranks of the servers, or the number of last ranks that serve; equal on every rank.
        timeout_s: timeout without a message from any client, in seconds; None: no timeout.
        checkpoint: file of `ParameterClient.save` to resume from; equal on every server. The number
            of servers may differ from that at `save`. Values in the checkpoint take precedence over
            initial values of clients.

    Returns:
        Counters of this server.

    Raises:
        ValueError: `servers` do not exist, leave no worker, or do not include this rank;
            `timeout_s` is not positive; `checkpoint` is not a checkpoint, is damaged, or has an
            older format.
        OSError: `checkpoint` cannot be read.
        PeerLost: no message for `timeout_s`; the error names the ranks that have not closed.
    """
    ranks = server_ranks(servers, comm.world_size)
    if comm.rank not in ranks:
        given = f"servers={servers!r} of {comm.world_size} ranks"
        raise ValueError(f"rank {comm.rank} is not a server: {given}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive or None, got {timeout_s!r}")
    server = _Server(comm, ranks)
    if checkpoint is not None:
        server.restore(checkpoint)
    return server.run(timeout_s)


class _Server:
    """State and loop of one server."""

    def __init__(self, comm: Communicator, servers: Sequence[int]) -> None:
        self._comm, self._servers, self.stats = comm, tuple(servers), ServerStats()
        self._workers = [rank for rank in range(comm.world_size) if rank not in servers]
        self._open = set(self._workers)
        self._ended: dict[int, str] = {}
        self._digest = servers_digest(servers, comm.world_size)
        self._parameters: dict[tuple[str, int], StoredParameter] = {}  # by key and shard
        # by rank: queued replies (request number and result), and replies that are being sent
        self._waiting = {rank: deque[tuple[int, _Result]]() for rank in self._workers}
        self._untaken: dict[int, list[Work]] = {rank: [] for rank in self._workers}
        self._last_failure: Exception | None = None

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore the parameters of a checkpoint that this server owns."""
        servers, rank = self._servers, self._comm.rank
        for key, shard, state in read_states(path, lambda k, s: server_of(k, servers, s) == rank):
            self._make(rank, key, shard, state.spec, state.value).restore(state)

    def run(self, timeout_s: float | None) -> ServerStats:
        last_message, failures = time.monotonic(), 0
        while self._open:
            try:
                slice_s = BUSY_SLICE_S if any(self._waiting.values()) else SLICE_S
                rank, message = self._comm.receive(slice_s, max_nbytes=MAX_MESSAGE_NBYTES)
                failures = 0
            except TimeoutError:
                silent_s = time.monotonic() - last_message
                if timeout_s is not None and silent_s > timeout_s:
                    detail = f"no request from ranks {sorted(self._open)}, which have not closed"
                    raise PeerLost("serve", -1, silent_s, detail) from None
            except RankGone as error:
                self._end(error.rank, "is gone")
            except ValueError:
                self.stats.unread += 1
            except (MemoryError, RuntimeError) as error:  # the message may be lost, or still come
                failures += 1
                if failures == MAX_RECEIVE_FAILURES:
                    raise
                self._note_failure("receive", error)
                time.sleep(SLICE_S)
            else:
                last_message = time.monotonic()
                self.stats.bytes_received += message.numel()
                self._handle(rank, message)
            for rank in self._open & {r for r, replies in self._waiting.items() if replies}:
                self._send(rank)
        self._comm.kept["server replies"] = self._untaken  # keeps replies alive while they are sent
        return self.stats

    def _handle(self, rank: int, raw: Tensor) -> None:
        """Process one request. Any exception is sent to its client as an error reply."""
        if rank not in self._workers:
            self.stats.unread += 1
            return
        result: _Result | None
        key = ("", 0)
        try:
            message = parse(raw)
            key = message.key, message.shard
            result = self._carry_out(rank, message)
        except Exception as error:  # noqa: BLE001 - fails this request only
            self._note_failure(f"carry out a request of rank {rank}", error)
            result = error
        if result is not None:
            self._reply(rank, request_number(raw), result)
        if key in self._parameters:
            self._answer(self._parameters[key])

    def _carry_out(self, rank: int, message: Message) -> Tensor | None:
        """Process a request and return the body of its reply; None if there is no reply (yet)."""
        kind = message.kind
        if rank not in self._open:
            raise ValueError(f"the client of rank {rank} is closed")
        if message.servers != self._digest:
            mine = list(self._servers)  # the client knows its own
            raise PeerMismatch("servers", self._comm.rank, "other ranks", mine, first=None)
        if kind in (Kind.OK, Kind.ERROR):
            raise CorruptPayload("message", f"not a request: {kind.name}")
        if kind == Kind.CLOSE:
            self._end(rank, "has closed its client")
            return None
        if kind == Kind.STATE and not message.key:
            return as_bytes(json.dumps(list(self._parameters)).encode())
        parameter = self._parameters.get((message.key, message.shard))
        if kind == Kind.INIT:
            return _number(self._init(rank, message, parameter))
        if parameter is None:
            raise ValueError(f"unknown key {message.key!r}; call init_parameter first")
        parameter.check(rank)
        if kind == Kind.PULL:
            parameter.pull(rank, message)
            return None
        if kind == Kind.STATE:
            return pack_state(parameter.state())
        if kind == Kind.CANCEL:
            return as_bytes(parameter.cancel(rank).encode())
        staleness, stats = parameter.push(rank, message.body), self.stats
        stats.pushes += 1
        stats.asynchronous_pushes += parameter.spec.asynchronous
        stats.staleness_sum += staleness
        stats.staleness_max = max(stats.staleness_max, staleness)
        return _number(staleness)

    def _init(self, rank: int, message: Message, parameter: StoredParameter | None) -> int:
        """Create a parameter, or let a client join it, and return its number of steps."""
        spec, value = parse_spec(message.body)
        if not message.key:
            raise ValueError("a key must not be empty")
        if bool(message.shard) != bool(spec.part_nbytes):
            raise CorruptPayload("message", f"shard {message.shard} of {spec.part_nbytes} bytes")
        if parameter is None:
            return self._make(rank, message.key, message.shard, spec, value).steps
        parameter.join(rank, spec)
        return parameter.steps

    def _make(
        self, rank: int, key: str, shard: int, spec: Spec, value: Tensor | None
    ) -> StoredParameter:
        """Create a parameter, add it to this server and return it."""
        parameter = StoredParameter(key, spec, rank, self._workers)
        if value is not None:
            parameter = AsynchronousParameter(key, spec, rank, self._workers, value)
        for ended, why in self._ended.items():
            parameter.lose(ended, why)
        self._parameters[key, shard] = parameter
        return parameter

    def _end(self, rank: int, why: str) -> None:
        """Mark a worker as ended; pulls that wait for its pushes get an error reply."""
        if rank not in self._open:
            return
        self._open.remove(rank)
        self._ended[rank] = why
        self._waiting[rank].clear()
        if why == "is gone":
            self.stats.lost.append(rank)
        for parameter in self._parameters.values():
            parameter.lose(rank, why)
            self._answer(parameter)

    def _answer(self, parameter: StoredParameter) -> None:
        """Reply to every pull of a parameter whose result is available."""
        for rank, request, result in parameter.answers():
            self.stats.pulls += not isinstance(result, Exception)
            self._note_failure(f"reduce key {parameter.key!r}", result)
            self._reply(rank, request, result)

    def _reply(self, rank: int, request: int, result: _Result) -> None:
        """Queue a reply behind earlier ones; drop a client whose queue is full."""
        self.stats.errors += isinstance(result, Exception)
        if len(self._waiting[rank]) >= MAX_WAITING:
            self._end(rank, "takes no replies")
        else:
            self._waiting[rank].append((request, result))
            self._send(rank)

    def _send(self, rank: int) -> None:
        """Start to send queued replies to a client, at most MAX_UNTAKEN; drop it if that fails."""
        waiting = self._waiting[rank]
        try:
            untaken = self._untaken[rank] = [w for w in self._untaken[rank] if not w.is_done()]
            while waiting and len(untaken) < MAX_UNTAKEN:
                message = self._packed(*waiting.popleft())
                untaken.append(self._comm.start_send(message, rank))
                self.stats.bytes_sent += message.numel()
        except ConnectionError:  # the client is gone; `receive` will raise RankGone
            waiting.clear()
        except Exception as error:  # noqa: BLE001 - continue to serve other clients
            self._note_failure(f"answer rank {rank}", error)
            self._end(rank, "cannot be answered")
        if rank not in self._open:
            waiting.clear()

    def _packed(self, request: int, result: _Result) -> Tensor:
        """Return a reply as a message; an error reply if packing the result fails."""
        if not isinstance(result, Exception):
            try:
                return pack(Message(Kind.OK, request, self._digest, body=result))
            except Exception as error:  # noqa: BLE001
                self._note_failure("write a reply", error)
                self.stats.errors += 1
                result = error
        return pack(Message(Kind.ERROR, request, self._digest, body=pack_error(result)))

    def _note_failure(self, what: str, error: _Result) -> None:
        """Count and log an exception once, unless it only reports an invalid request."""
        if isinstance(error, Tensor) or is_expected(error) or error is self._last_failure:
            return
        self._last_failure = error
        self.stats.failures += 1
        logger.error("gradcomp: server rank %d could not %s", self._comm.rank, what, exc_info=error)


def _number(value: int) -> Tensor:
    return as_bytes(value.to_bytes(8, "little"))
