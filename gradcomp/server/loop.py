"""The server: one loop that receives requests, and replies without ever waiting for one client."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcomp.comm.base import Communicator, RankGone
from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.server.asynchronous import AsynchronousParameter
from gradcomp.server.messages import (
    MAX_MESSAGE_NBYTES,
    Kind,
    Message,
    home_of,
    is_foreseen,
    pack,
    pack_error,
    parse,
    request_number,
    server_ranks,
    servers_digest,
)
from gradcomp.server.parameter import Agreement, Parameter
from gradcomp.server.replies import Replies, Untaken
from gradcomp.server.rounds import SynchronousParameter
from gradcomp.server.spec import Spec, parse_spec
from gradcomp.server.state import pack_state, read_states

SLICE_S = 0.2  # longest wait for a message in which nothing else is looked after
BUSY_SLICE_S = 0.001  # the same while replies wait for earlier ones to leave
MAX_RECEIVE_FAILURES = 10  # in a row, a slice apart; the transport itself is broken then

logger = logging.getLogger("gradcomp")


@dataclass
class ServerStats:
    """What a server has done.

    Attributes:
        pushes, pulls: requests carried out; a pull counts when it is answered.
        errors: replies that were errors.
        failures: requests that failed through no fault of a client (no memory, a bug); the log has
            their tracebacks.
        unread: messages that could not be answered: too long, or from another server.
        bytes_received, bytes_sent: message headers included.
        asynchronous_pushes: of `pushes`, those to asynchronous keys.
        staleness_sum, staleness_max: over these: pushes of other workers that the pusher had not
            seen.
        lost: ranks that were gone before they had closed.
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
        """Mean staleness of asynchronous pushes; 0.0 without any."""
        return self.staleness_sum / self.asynchronous_pushes if self.asynchronous_pushes else 0.0


def serve(
    comm: Communicator,
    servers: int | Sequence[int],
    *,
    timeout_s: float | None = 3600.0,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ServerStats:
    """Serve parameters on this rank until every client has closed or is gone.

    Called on every server rank; all other ranks of `comm` are workers, each with one
    `ParameterClient`.

    Args:
        comm: its messages from rank to rank are the server's alone while it runs.
        servers: ranks of the servers, or how many: the last ranks then. The same on every rank.
        timeout_s: seconds without any message after which the clients are given up; None: wait for
            ever.
        checkpoint: a file of `ParameterClient.save` to go on from; the same on every server, of
            which there may be another number than when it was written. Its values count, not the
            initial ones that clients give.

    Returns:
        Counters of what was done.

    Raises:
        ValueError: `servers` that do not exist, leave no worker, or are not this rank; `timeout_s`
            out of its range; a file that is no checkpoint, or not all of one.
        OSError: `checkpoint` cannot be read.
        PeerLost: no message from any client for `timeout_s`; names the ranks that have not closed.
    """
    ranks = server_ranks(servers, comm.world_size)
    if comm.rank not in ranks:
        raise ValueError(
            f"rank {comm.rank} is no server: servers={servers!r} of {comm.world_size} ranks"
        )
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive or None, got {timeout_s!r}")
    server = _Server(comm, ranks)
    if checkpoint is not None:
        server.restore(checkpoint)
    return server.run(timeout_s)


class _Server:
    """State of one server.

    Attributes:
        stats: counters.
    """

    def __init__(self, comm: Communicator, servers: Sequence[int]) -> None:
        self._comm, self._servers = comm, tuple(servers)
        self._workers = [rank for rank in range(comm.world_size) if rank not in servers]
        self._open = set(self._workers)
        self._ended: dict[int, str] = {}
        self._digest = servers_digest(servers, comm.world_size)
        self._parameters: dict[tuple[str, int], Parameter] = {}  # by key and shard
        self._replies = Replies(comm)
        self._last_failure: Exception | None = None
        self.stats = ServerStats()

    def run(self, timeout_s: float | None) -> ServerStats:
        heard, failures = time.monotonic(), 0
        while self._open:
            try:
                slice_s = BUSY_SLICE_S if self._replies.any_waits() else SLICE_S
                rank, message = self._comm.receive(slice_s, max_nbytes=MAX_MESSAGE_NBYTES)
                failures = 0
            except TimeoutError:
                silent_s = time.monotonic() - heard
                if timeout_s is not None and silent_s > timeout_s:
                    detail = f"no request from ranks {sorted(self._open)}, which have not closed"
                    raise PeerLost("serve", -1, silent_s, detail) from None
            except RankGone as error:
                self._end(error.rank, "is gone")
            except ValueError:
                self.stats.unread += 1
            except (
                MemoryError,
                RuntimeError,
            ) as error:  # the message waits, or is lost and its client waits in vain
                failures += 1
                if failures == MAX_RECEIVE_FAILURES:
                    raise
                self._note_failure("receive", error)
                time.sleep(SLICE_S)
            else:
                heard = time.monotonic()
                self.stats.bytes_received += message.numel()
                self._handle(rank, message)
            if self._replies.any_waits():
                for rank in list(self._open):
                    self._send(rank)
        self._comm.kept["server replies"] = self._replies.started  # that nobody waits for any more
        self.stats.bytes_sent = self._replies.nbytes
        return self.stats

    def _handle(self, rank: int, raw: Tensor) -> None:
        """Carry out one request; whatever is wrong with it is told to its sender."""
        if rank not in self._workers:
            self.stats.unread += 1
            return
        try:
            message = parse(raw)
            self._check_sender(rank, message)
            if message.kind == Kind.CLOSE:
                self._end(rank, "has closed its client")
            elif message.kind == Kind.INIT:
                self._init(rank, message)
            elif message.kind == Kind.STATE:
                self._state(rank, message)
            else:
                self._use(rank, message)
        except Exception as error:  # noqa: BLE001 - one request fails, whatever it is
            self._note_failure(f"carry out a request of rank {rank}", error)
            self._reply(rank, request_number(raw), error)
            self._settle()

    def _check_sender(self, rank: int, message: Message) -> None:
        if rank not in self._open:
            raise ValueError(f"the client of rank {rank} is closed")
        if message.servers != self._digest:
            raise PeerMismatch(
                "servers", self._comm.rank, message.servers, self._digest, first=None
            )
        if message.kind in (Kind.OK, Kind.ERROR):
            raise CorruptPayload("message", f"no request: {message.kind.name}")

    def _init(self, rank: int, message: Message) -> None:
        spec, value = parse_spec(message.data())
        if not message.key:
            raise ValueError("a key must not be empty")
        if bool(message.shard) != bool(spec.part_nbytes):
            raise CorruptPayload("message", f"shard {message.shard} of {spec.part_nbytes} bytes")
        shard = message.key, message.shard
        if shard in self._parameters:
            self._parameters[shard].join(rank, spec)
        else:
            self._parameters[shard] = self._make(rank, message.key, spec, value)
        self._reply(rank, message.request, _number(self._parameters[shard].steps))

    def _make(self, rank: int, key: str, spec: Spec, value: Tensor | None) -> Parameter:
        """Return a new parameter."""
        parameter: Parameter
        if value is not None:
            return AsynchronousParameter(key, spec, rank, self._workers, value)
        if spec.agrees_only:
            return Agreement(key, spec, rank, self._workers)
        parameter = SynchronousParameter(key, spec, rank, self._workers)
        for ended, why in self._ended.items():
            parameter.lose(ended, why)
        return parameter

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Make the parameters of a checkpoint that live on this server."""
        for key, shard, state in read_states(
            path, lambda k, s: home_of(k, self._servers, s) == self._comm.rank
        ):
            parameter = self._make(self._comm.rank, key, state.spec, state.value)
            parameter.restore(state)
            self._parameters[key, shard] = parameter

    def _state(self, rank: int, message: Message) -> None:
        """Tell a client what there is to save, or the state of one key or shard."""
        if not message.key:
            names = json.dumps(list(self._parameters))
            return self._reply(rank, message.request, _bytes(names.encode()))
        parameter = self._parameter(message)
        parameter.check(rank)
        return self._reply(rank, message.request, pack_state(parameter.state()))

    def _parameter(self, message: Message) -> Parameter:
        parameter = self._parameters.get((message.key, message.shard))
        if parameter is None:
            raise ValueError(f"unknown key {message.key!r}; call init_parameter first")
        return parameter

    def _use(self, rank: int, message: Message) -> None:
        """Push to, pull from, or stop waiting for a key."""
        parameter = self._parameter(message)
        parameter.check(rank)
        if message.kind == Kind.PUSH:
            self._count_push(parameter, parameter.push(rank, message.data()), rank, message.request)
        elif message.kind == Kind.PULL:
            parameter.pull(rank, message)
        else:
            self._reply(rank, message.request, _bytes(parameter.cancel(rank).encode()))
        self._settle(parameter)

    def _count_push(self, parameter: Parameter, staleness: int, rank: int, request: int) -> None:
        stats = self.stats
        stats.pushes += 1
        if parameter.spec.asynchronous:
            stats.asynchronous_pushes += 1
            stats.staleness_sum += staleness
            stats.staleness_max = max(stats.staleness_max, staleness)
        self._reply(rank, request, _number(staleness))

    def _end(self, rank: int, why: str) -> None:
        """Note that a worker asks no more; those who wait for its pushes are told."""
        if rank not in self._open:
            return
        self._open.remove(rank)
        self._ended[rank] = why
        self._replies.forget(rank)
        if why == "is gone":
            self.stats.lost.append(rank)
        for parameter in self._parameters.values():
            parameter.lose(rank, why)
        self._settle()

    def _settle(self, only: Parameter | None = None) -> None:
        """Answer every pull that can be answered now, of one key or of all."""
        for parameter in list(self._parameters.values()) if only is None else [only]:
            for answer in parameter.settle():
                if isinstance(answer.result, Exception):
                    self._note_failure(f"reduce key {parameter.key!r}", answer.result)
                else:
                    self.stats.pulls += 1
                self._reply(answer.rank, answer.request, answer.result)

    def _reply(self, rank: int, request: int, result: Tensor | Exception | None) -> None:
        """Answer a request."""
        self.stats.errors += isinstance(result, Exception)
        self._send(rank, lambda: self._packed(request, result))

    def _send(self, rank: int, write: Callable[[], Tensor] | None = None) -> None:
        """Send a reply, or what waits of earlier ones; a client that cannot be answered is
        ended.
        """
        try:
            if write is None:
                self._replies.advance(rank)
            else:
                self._replies.put(rank, write)
        except Untaken:
            self._end(rank, "takes no replies")
        except Exception as error:  # noqa: BLE001
            self._note_failure(f"answer rank {rank}", error)
            self._end(rank, "cannot be answered")
        if rank not in self._open:
            self._replies.forget(rank)

    def _packed(self, request: int, result: Tensor | Exception | None) -> Tensor:
        """Return a reply; an error if there is no memory for what it should be."""
        if not isinstance(result, Exception):
            try:
                return pack(Message(Kind.OK, request, self._digest, body=result))
            except Exception as error:  # noqa: BLE001
                self._note_failure("write a reply", error)
                self.stats.errors += 1
                result = error
        return pack(Message(Kind.ERROR, request, self._digest, body=pack_error(result)))

    def _note_failure(self, what: str, error: Exception) -> None:
        """Count and log an exception, once, unless it only tells what is wrong with a request."""
        if is_foreseen(error) or error is self._last_failure:
            return
        self._last_failure = error
        self.stats.failures += 1
        logger.error("gradcomp: server rank %d could not %s", self._comm.rank, what, exc_info=error)


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _number(value: int) -> Tensor:
    return _bytes(value.to_bytes(8, "little"))
