"""The worker's side of a parameter server."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.comm.base import Communicator, RankGone
from gradcomp.engine.options import MAX_TIMEOUT_S
from gradcomp.errors import CorruptPayload, PeerLost
from gradcomp.server.arguments import as_tensor, check_initial, check_key, dtype_name
from gradcomp.server.messages import (
    METHODS,
    Kind,
    Message,
    home_of,
    pack,
    parse,
    parse_error,
    server_ranks,
    servers_digest,
)
from gradcomp.server.spec import Spec, make_spec, pack_spec

if TYPE_CHECKING:
    from typing_extensions import Self

GRACE_S = 5.0  # for the server to say what a pull has waited for
CLOSE_S = 5.0  # for the farewell to leave
_ROOM_NBYTES = 1 << 16  # of a reply, beside its values: header, or an error


class ParameterClient:
    """Pushes to and pulls from the servers; one on every worker rank, used by one thread.

    Every call is one request, answered before it returns. A context manager that closes itself.

    Args:
        comm: its messages from rank to rank are the client's alone; collectives may go on beside. Not closed.
        servers: ranks of the servers, or how many: the last ranks then. The same on every rank.
        timeout_s: seconds after which a server, or the other workers, are given up.

    Attributes:
        bytes_sent, bytes_received: of messages, headers included.
        staleness: of the last push to an asynchronous key, see `push_parameter`.

    Raises:
        ValueError: `servers` that do not exist or leave no worker, or are this rank; `timeout_s` out of its range.
    """

    def __init__(self, comm: Communicator, servers: int | Sequence[int], *, timeout_s: float = 300.0) -> None:
        self._servers = server_ranks(servers, comm.world_size)
        if comm.rank in self._servers:
            raise ValueError(f"rank {comm.rank} is a server: servers={servers!r}")
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(f"timeout_s must be a number of seconds, at most {MAX_TIMEOUT_S:g}, got {timeout_s!r}")
        self._comm = comm
        self._timeout_s = timeout_s
        self._digest = servers_digest(self._servers, comm.world_size)
        self._keys: dict[str, tuple[Spec, tuple[int, ...]]] = {}  # with the shape of an uncompressed pull
        self._requests = secrets.randbelow(2**31)  # a late reply to an earlier client of this rank matches nothing
        self._closed = False
        self.bytes_sent = 0
        self.bytes_received = 0
        self.staleness = 0

    def init_parameter(
        self,
        key: str,
        shape: Sequence[int],
        dtype: str | torch.dtype = "float32",
        *,
        codec: Codec | str | None = None,
        asynchronous: bool = False,
        learning_rate: float | None = None,
        value: Tensor | None = None,
    ) -> None:
        """Make a key, or join the clients that have made it; every client that uses a key calls this first.

        Args:
            key: its name, 1 to 255 bytes of UTF-8.
            shape: of what is pushed, at most 8 dimensions; for packed gradients the bytes of a payload:
                ``(codec.payload_nbytes(numel, groups),)``.
            dtype: "float32", or "uint8" for packed gradients.
            codec: of the payloads. None: as their headers say; scales that are byte-equal in all payloads of a round
                then count as shared, and the server draws with seed 0.
            asynchronous: apply every push at once instead of in rounds.
            learning_rate: asynchronous keys only: parameter += learning_rate * pushed value, so a negative one descends
                along pushed gradients.
            value: asynchronous keys only: initial values, float32; of `shape`, or for packed gradients of the tensor that
                they are gradients of. Those of the client that comes first count.

        Raises:
            ValueError: an argument out of its range, or arguments that do not go together.
            UnsupportedTensor: `value` on another device, sparse, or not contiguous.
            PeerMismatch: another client has made the key otherwise; the key is broken for all.
            PeerLost: the server is gone or silent.
        """
        check_key(key)
        resolved = None if codec is None else resolve(codec)
        spec = make_spec(tuple(shape), dtype_name(dtype), resolved, asynchronous, learning_rate)
        check_initial(spec, value)
        self._ask(Kind.INIT, key, pack_spec(spec, value), room_nbytes=0)
        self._keys[key] = (spec, spec.shape if value is None else tuple(value.shape))

    def push_parameter(self, key: str, value: Any) -> int:
        """Push a value: into this worker's next round, or at once into an asynchronous key.

        Args:
            key: initialised by this client.
            value: a tensor of the key's shape and dtype, contiguous, CPU; or numbers that make one (one number will do for
                a key of one element).

        Returns:
            The staleness of a push to an asynchronous key: pushes of other workers that were applied between this worker's
            last pull of the key (its making, before the first pull) and this push. 0 for other keys.

        Raises:
            ValueError: unknown key, wrong shape or dtype, more than two open rounds, NaN or Inf for an asynchronous key.
            UnsupportedTensor: another device, sparse, or not contiguous.
            CorruptPayload: a payload that does not decode; every worker's pull of the round fails as well.
            PeerMismatch: other clients use the key with other settings; it is broken for all.
            PeerLost: the server is gone or silent, or a worker that the round needs is.
        """
        spec, _ = self._spec(key)
        body = as_tensor(spec, key, value).reshape(-1).view(torch.uint8)
        reply = self._ask(Kind.PUSH, key, body, room_nbytes=8)
        if reply.numel() != 8:
            raise CorruptPayload("message", f"the reply to a push has {reply.numel()} bytes, 8 expected")
        staleness = int.from_bytes(reply.numpy().tobytes(), "little")
        if spec.asynchronous:
            self.staleness = staleness
        return staleness

    def pull_parameter(self, key: str, reduce_method: str | None = None, *, compressed: bool = False) -> Tensor:
        """Pull what the server makes of the round of this worker's last push, once all workers have pushed it.

        Args:
            key: initialised by this client.
            reduce_method: "max", "sum", "mean", or for packed gradients "decode_average"; the same at every client of a
                round. None for asynchronous keys, whose current value comes at once.
            compressed: return the average of packed gradients as a payload again, for `Codec.decode`.

        Returns:
            float32 of the key's shape; for packed gradients ``(numel,)`` float32, or ``(nbytes,)`` uint8 if `compressed`;
            for asynchronous keys of the shape of the initial values.

        Raises:
            ValueError: unknown key or reduce method, one that does not suit the key, or no push before.
            CorruptPayload: a worker's payload of the round does not decode.
            PeerMismatch: clients use the key with different settings, or pull a round in different ways.
            PeerLost: a worker is gone before it has pushed the round, or silent; or the server is.
        """
        spec, shape = self._spec(key)
        if reduce_method is not None and reduce_method not in METHODS:
            raise ValueError(f"reduce_method must be one of {METHODS}, got {reduce_method!r}")
        if compressed is not True and compressed is not False:
            raise ValueError(f"compressed must be True or False, got {compressed!r}")
        spec.check_method(key, reduce_method, compressed)
        room = 32 * spec.nbytes if spec.dtype == "uint8" else spec.nbytes  # 1-bit codes grow 32 times
        if spec.asynchronous:
            room = 4 * math.prod(shape)
        reply = self._ask(Kind.PULL, key, None, room_nbytes=room, method=reduce_method, compressed=compressed)
        if compressed:
            return reply.clone()
        if (
            reply.numel() % 4
            or (spec.dtype == "float32" or spec.asynchronous)
            and reply.numel() != 4 * math.prod(shape)
        ):
            raise CorruptPayload("message", f"the reply to a pull of {key!r} has {reply.numel()} bytes")
        values = reply.view(torch.float32).clone()
        return values if spec.dtype == "uint8" and not spec.asynchronous else values.view(shape)

    def close(self) -> None:
        """Tell the servers that this worker has done; closing twice is harmless. The communicator stays open."""
        if self._closed:
            return
        self._closed = True
        message = pack(Message(Kind.CLOSE, self._requests + 1, self._digest))
        for server in self._servers:
            with contextlib.suppress(TimeoutError, ConnectionError):
                self._comm.start_send(message, server).wait(min(CLOSE_S, self._timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _spec(self, key: str) -> tuple[Spec, tuple[int, ...]]:
        check_key(key)
        if key not in self._keys:
            raise ValueError(f"unknown key {key!r}; this client has initialised {sorted(self._keys)}")
        return self._keys[key]

    def _ask(
        self,
        kind: Kind,
        key: str,
        body: Tensor | None,
        *,
        room_nbytes: int,
        method: str | None = None,
        compressed: bool = False,
    ) -> Tensor:
        """Send a request and return the body of its reply, or raise what the server says."""
        server, begun = home_of(key, self._servers), time.monotonic()
        phase = kind.name.lower()
        request = self._send(server, kind, key, body, method, compressed)
        try:
            message = self._reply_to((request,), server, begun + self._timeout_s, phase, room_nbytes)
        except TimeoutError:
            message = None
        if message is None:
            message = self._late(server, key, request, begun, phase, room_nbytes)
        if message.kind == Kind.ERROR:
            raise parse_error(message.data(), phase, time.monotonic() - begun)
        return message.data()

    def _late(self, server: int, key: str, request: int, begun: float, phase: str, room_nbytes: int) -> Message:
        """Ask what a pull waits for and raise PeerLost that says so; the reply itself may still come instead."""
        detail = f"server rank {server} is silent"
        if phase == "pull":
            with contextlib.suppress(TimeoutError):
                cancel = self._send(server, Kind.CANCEL, key, None)
                until = time.monotonic() + min(GRACE_S, self._timeout_s)
                message = self._reply_to((request, cancel), server, until, phase, room_nbytes)
                if message.request == request or message.kind == Kind.ERROR:
                    return message
                detail = message.data().numpy().tobytes().decode(errors="replace")
        raise PeerLost(phase, -1, time.monotonic() - begun, detail)

    def _send(
        self,
        server: int,
        kind: Kind,
        key: str,
        body: Tensor | None,
        method: str | None = None,
        compressed: bool = False,
    ) -> int:
        """Send a request; return its number."""
        if self._closed:
            raise RuntimeError("this client is closed")
        self._requests = self._requests % (2**32 - 1) + 1
        message = pack(Message(kind, self._requests, self._digest, key, method, compressed, body))
        begun = time.monotonic()
        try:
            self._comm.start_send(message, server).wait(self._timeout_s)
        except ConnectionError as error:
            raise PeerLost(kind.name.lower(), -1, time.monotonic() - begun, f"server {error}") from error
        except TimeoutError as error:
            detail = f"server rank {server} takes no message"
            raise PeerLost(kind.name.lower(), -1, time.monotonic() - begun, detail) from error
        self.bytes_sent += message.numel()
        return self._requests

    def _reply_to(
        self, requests: tuple[int, ...], server: int, deadline: float, phase: str, room_nbytes: int
    ) -> Message:
        """Return the reply to one of some requests; replies to requests that were given up are dropped."""
        while True:
            begun = time.monotonic()
            left = max(0.0, deadline - begun)
            try:
                _, raw = self._comm.receive(left, server, max_nbytes=room_nbytes + _ROOM_NBYTES)
            except RankGone as error:
                raise PeerLost(phase, -1, time.monotonic() - begun, f"server {error}") from error
            except ValueError as error:
                raise CorruptPayload("message", f"a reply is too long: {error}") from error
            self.bytes_received += raw.numel()
            message = parse(raw)
            if message.request in (0, *requests) and message.kind in (Kind.OK, Kind.ERROR):
                return message
