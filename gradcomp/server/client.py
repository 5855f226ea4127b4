"""The worker's side of a parameter server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.codecs.checks import check_alone
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import MAX_TIMEOUT_S
from gradcomp.errors import CorruptPayload
from gradcomp.server.calls import Pending, Request, Requests, T
from gradcomp.server.keys import ClientKey, RawCodes
from gradcomp.server.messages import (
    EMPTY,
    MAX_KEY_NBYTES,
    MAX_MESSAGE_NBYTES,
    Kind,
    Message,
    home_of,
    server_ranks,
)
from gradcomp.server.shards import DEFAULT_SHARD_NBYTES, check_shard_nbytes
from gradcomp.server.spec import DTYPES, Spec, make_spec
from gradcomp.server.state import pack_state, parse_state, write_states

if TYPE_CHECKING:
    from typing_extensions import Self


class ParameterClient:
    """Pushes to and pulls from the servers; one on every worker rank, used by one thread.

    A call returns when the server has answered it; with ``wait=False`` a push or pull returns a
    `Pending` at once. Calls reach a server in the order in which they were made. A context manager
    that closes itself.

    Args:
        comm: only the client may send and receive messages on it; collectives may run beside.
            Not closed.
        servers: ranks of the servers, or how many of the last ranks. The same on every rank.
        timeout_s: seconds after which a server, or the other workers, are given up.
        shard_nbytes: a key with more bytes of float32 values is cut into shards of about that size,
            which live on different servers; between 32 bytes and 1 GiB, the same on every worker.

    Attributes:
        bytes_sent, bytes_received: of messages, headers included.
        staleness: of the last push to an asynchronous key, see `push_parameter`.

    Raises:
        ValueError: `servers` that do not exist, leave no worker, or include this rank; `timeout_s`
            or `shard_nbytes` out of range.
    """

    def __init__(
        self,
        comm: Communicator,
        servers: int | Sequence[int],
        *,
        timeout_s: float = 300.0,
        shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    ) -> None:
        self._servers = server_ranks(servers, comm.world_size)
        if comm.rank in self._servers:
            raise ValueError(f"rank {comm.rank} is a server: servers={servers!r}")
        if not isinstance(timeout_s, (int, float)) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            rule = f"a positive number of seconds, at most {MAX_TIMEOUT_S:g}"
            raise ValueError(f"timeout_s must be {rule}, got {timeout_s!r}")
        self._comm, self._requests = comm, Requests(comm, self._servers, timeout_s)
        self._shard_numel = check_shard_nbytes(shard_nbytes)
        self._keys: dict[str, ClientKey] = {}
        self.staleness = 0

    @property
    def bytes_sent(self) -> int:
        return self._requests.bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._requests.bytes_received

    def init_parameter(
        self,
        key: str,
        shape: Sequence[int],
        dtype: str | torch.dtype | None = None,
        *,
        type: str | torch.dtype | None = None,
        codec: Codec | str | None = None,
        asynchronous: bool = False,
        learning_rate: float | None = None,
        value: Tensor | None = None,
        scale_key: str | None = None,
    ) -> None:
        """Make a key, or join the clients that have made it; every client that uses a key calls
        this first.

        Args:
            key: its name, 1 to 255 bytes of UTF-8.
            shape: of what is pushed, at most 8 dimensions; for payloads
                ``(codec.payload_nbytes(numel, groups),)``. A uint8 key with any other than a flat
                shape holds raw codes.
            dtype: "float32" (the default), or "uint8" for packed gradients: payloads of a codec, or
                raw 2-bit codes.
            type: another name for `dtype`.
            codec: of the payloads. None: as their headers say; scales that are byte-equal in all
                payloads of a round then count as shared, and the server draws with seed 0.
            asynchronous: apply every push at once instead of in rounds.
            learning_rate: asynchronous keys only: parameter += learning_rate * pushed value, so a
                negative one descends along pushed gradients.
            value: asynchronous keys only: initial values, float32; of `shape`, or for packed
                gradients of the tensor that they are gradients of. Those of the first client
                count.
            scale_key: makes this a key of raw codes: four values a byte, the first in the lowest
                bits, ``00`` for -1, ``01`` for 0, ``10`` for +1, and nothing else. A pull
                multiplies them by what this client has last pulled of `scale_key`, a float32 key of
                one element, with "max". None: by 1.

        Raises:
            TypeError: `shape` or `value` of another type.
            ValueError: an argument out of its range, or arguments that exclude each other.
            UnsupportedTensor: `value` sparse, or not contiguous.
            PeerMismatch: another client has made the key with other settings; the key is broken for
                all.
            PeerLost: the server is gone or silent.
        """
        _check_key(key)
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"value must be a tensor, got {value.__class__.__name__}")
        if not isinstance(shape, Iterable):
            raise TypeError(f"shape must be a sequence of integers, got {shape!r}")
        resolved = None if codec is None else resolve(codec)
        if resolved is not None:
            check_alone(resolved)
        if None not in (dtype, type) and _dtype_name(dtype) != _dtype_name(type):
            raise ValueError(f"dtype={dtype!r} and type={type!r} differ; give one of them")
        name = _dtype_name(dtype if dtype is not None else type)
        given = spec = make_spec(tuple(shape), name, resolved, asynchronous, learning_rate)
        raw = self._raw_codes(given, resolved, scale_key)
        if raw is not None:
            resolved = raw.codec
            spec = make_spec(raw.payload_shape, name, resolved, asynchronous, learning_rate)
        known = ClientKey(key, given, spec, raw, resolved, value, self._shard_numel)
        self._accept_replies_to(known)
        asked = [self._ask(Kind.INIT, key, shard, body) for shard, body in known.settings(value)]
        known.steps = _number_in(self._replies(asked)[0])
        before = self._keys.get(key)
        if before is None or not before.is_made_like(known):
            self._keys[key] = known  # else rounds of this client go on

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[True] = ...) -> int: ...

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[False]) -> Pending[int]: ...

    def push_parameter(self, key: str, value: Any, *, wait: bool = True) -> int | Pending[int]:
        """Push a value: into this worker's next round, or at once into an asynchronous key.

        Args:
            key: initialised by this client.
            value: a tensor of the key's shape and dtype, contiguous; or numbers that make one
                (one number is enough for a key of one element). It is copied: the caller may change
                it at once.
            wait: False: return a `Pending` at once; its `wait` returns or raises what this call
                would.

        Returns:
            The staleness of a push to an asynchronous key: pushes of other workers that were
            applied between this worker's last pull of the key (its making, before the first pull)
            and this push. 0 for other keys.

        Raises:
            ValueError: unknown key, wrong shape or dtype, more than two open rounds, NaN or Inf for
                an asynchronous key.
            UnsupportedTensor: sparse, or not contiguous.
            CorruptPayload: a payload that does not decode; every worker's pull of the round fails
                as well.
            PeerMismatch: other clients use the key with other settings; it is broken for all.
            PeerLost: the server is gone or silent, or a worker that the round needs is.
            GradcompError: the server failed, for example for lack of memory; every worker's pull of
                the round fails as well.
            RuntimeError: the client is closed; ``wait=False`` where MPI allows only its main
                thread.
        """
        known = self._known(key, wait)
        made, parts = known.pushed(known.body(value))
        if made:
            self._accept_replies_to(known)
        asked = [self._ask(Kind.INIT, key, shard, settings) for shard, settings in made]
        if known.is_cut and known.may_be_early:  # the first shard decides whether the push is early
            self._replies([*asked, self._ask(Kind.PUSH, key, *parts.pop(0))])
            asked = []
        asked += [self._ask(Kind.PUSH, key, *part) for part in parts]
        known.pushes += 1

        def failed(error: Exception) -> None:
            if isinstance(error, ValueError) and not isinstance(error, CorruptPayload):
                known.pushes -= 1  # the server has not counted it

        def finish(replies: list[Message]) -> int:
            pushes = replies[len(replies) - len(parts) :]
            staleness = max(map(_number_in, pushes), default=0)
            if known.spec.asynchronous:
                self.staleness = staleness
            return staleness

        return self._started(Pending(self._requests, asked, finish, failed), wait)

    @overload
    def pull_parameter(
        self,
        key: str,
        reduce_method: str | None = ...,
        *,
        compressed: bool = ...,
        wait: Literal[True] = ...,
    ) -> Tensor: ...

    @overload
    def pull_parameter(
        self,
        key: str,
        reduce_method: str | None = ...,
        *,
        compressed: bool = ...,
        wait: Literal[False],
    ) -> Pending[Tensor]: ...

    def pull_parameter(
        self,
        key: str,
        reduce_method: str | None = None,
        *,
        compressed: bool = False,
        wait: bool = True,
    ) -> Tensor | Pending[Tensor]:
        """Pull what the server makes of the round of this worker's last push, once all workers have
        pushed it.

        Args:
            key: initialised by this client.
            reduce_method: "max", "sum", "mean", or for packed gradients "decode_average"; the same
                at every client of a round. None for asynchronous keys, whose current value comes at
                once.
            compressed: return the average of packed gradients as a payload again, for
                `Codec.decode`.
            wait: False: return a `Pending` at once, for the round of the last push before this
                call.

        Returns:
            float32 of the key's shape; for payloads ``(numel,)`` float32, for raw codes of the
            key's shape with four times the last dimension, for both ``(nbytes,)`` uint8 if
            `compressed`; for asynchronous keys of the shape of the initial values.

        Raises:
            ValueError: unknown key or reduce method, one that the key does not take, or no push
                before.
            CorruptPayload: a worker's payload of the round does not decode.
            PeerMismatch: clients use the key with different settings, or pull a round in different
                ways.
            PeerLost: a worker is gone before it has pushed the round, or silent; or the server is.
            GradcompError, RuntimeError: as `push_parameter`.
        """
        known = self._known(key, wait)
        if compressed is not True and compressed is not False:
            raise ValueError(f"compressed must be True or False, got {compressed!r}")
        known.spec.check_method(key, reduce_method, compressed)
        number = known.pushes
        how: dict[str, Any] = {"method": reduce_method, "compressed": compressed}
        asked = [self._ask(Kind.PULL, key, shard, **how) for shard in known.shards()]

        def finish(replies: list[Message]) -> Tensor:
            pulled = known.join(replies, compressed)
            known.complete = max(known.complete, number)
            if reduce_method == "max":
                known.maximum = pulled
            return pulled

        return self._started(Pending(self._requests, asked, finish), wait)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the servers remember into a file, from which `serve` can go on: all keys and
        settings, values of asynchronous keys, residuals of averages that are pulled compressed,
        numbers of rounds.

        One worker calls this while the others push nothing: for example before all of them push to
        a float32 key and pull it. Values are gathered key by key and pass through this worker; the
        file appears when it is complete, in the place of an older one.

        Args:
            path: of the file; its folder exists.

        Raises:
            ValueError: a round is under way whose residual would be lost.
            OSError: the file cannot be written.
            PeerMismatch: a key is broken.
            PeerLost: a server is gone or silent.
        """
        max_reply_nbytes = self._requests.max_reply_nbytes
        self._requests.max_reply_nbytes = MAX_MESSAGE_NBYTES
        try:
            write_states(path, self._records())
        finally:
            self._requests.max_reply_nbytes = max_reply_nbytes

    def close(self) -> None:
        """Notify the servers that this worker is done; closing twice is harmless. The communicator
        stays open.

        What was pushed still arrives; a `Pending` that nobody has waited for raises RuntimeError.
        """
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- parts ----

    def _known(self, key: str, wait: bool = True) -> ClientKey:
        """Return what is known of a key that a call uses."""
        if wait is not True and wait is not False:
            raise ValueError(f"wait must be True or False, got {wait!r}")
        if not wait:
            self._comm.check_overlap()
        _check_key(key)
        if key not in self._keys:
            known = sorted(self._keys)
            raise ValueError(f"unknown key {key!r}; this client has initialised {known}")
        return self._keys[key]

    def _raw_codes(
        self, given: Spec, codec: Codec | None, scale_key: str | None
    ) -> RawCodes | None:
        """Return what makes payloads of raw codes, or None for a key that holds none."""
        packed = given.dtype == "uint8" and codec is None
        if scale_key is None:
            return RawCodes(given.shape, None) if packed and len(given.shape) != 1 else None
        scale = self._known(scale_key)
        spec = scale.spec
        if not packed or spec.dtype != "float32" or spec.numel != 1 or spec.asynchronous:
            raise ValueError(
                f"scale_key={scale_key!r} must be a synchronous float32 key of one element, for raw"
                f' codes: dtype="uint8" and no codec, got {given.dtype} and {codec!r}'
            )
        return RawCodes(given.shape, scale)

    def _accept_replies_to(self, known: ClientKey) -> None:
        """Accept the longest reply to a pull of a key, before the key is made."""
        self._requests.max_reply_nbytes = max(self._requests.max_reply_nbytes, known.reply_nbytes())

    def _ask(
        self, kind: Kind, key: str, shard: int = 0, body: Tensor = EMPTY, **how: Any
    ) -> Request:
        """Begin to ask the server of a shard."""
        message = Message(kind, key=key, shard=shard, body=body, **how)
        return self._requests.send(home_of(key, self._servers, shard), message)

    def _started(self, pending: Pending[T], wait: bool) -> T | Pending[T]:
        """Return the result of a call; or the call itself, while a thread receives its replies."""
        if wait:
            return pending.wait()
        self._requests.overlap()
        return pending

    def _replies(self, asked: Sequence[Request]) -> list[Message]:
        return Pending(self._requests, asked, list).wait()

    def _records(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (key, shard, record); settings of a cut key come last, with its shards' steps."""
        names = set()
        for server in self._servers:
            (reply,) = self._replies([self._requests.send(server, Message(Kind.STATE))])
            try:
                names |= {(str(k), int(n)) for k, n in json.loads(reply.body.numpy().tobytes())}
            except (ValueError, TypeError) as error:
                text = f"server rank {server} sent no list of keys: {error}"
                raise CorruptPayload("message", text) from None
        steps: dict[str, int] = {}
        for key, shard in sorted(names, key=lambda name: (name[0], -name[1])):
            (reply,) = self._replies([self._ask(Kind.STATE, key, shard)])
            state = parse_state(reply.body)
            steps[key] = max(state.steps, steps.get(key, 0))
            yield key, shard, pack_state(state._replace(steps=steps[key]))


def _check_key(key: object) -> None:
    """Raise ValueError unless `key` can be the name of a key."""
    try:
        fits = isinstance(key, str) and 1 <= len(key.encode()) <= MAX_KEY_NBYTES
    except UnicodeEncodeError:
        fits = False
    if not fits:
        rule = f"a string of 1 to {MAX_KEY_NBYTES} bytes in UTF-8"
        raise ValueError(f"key must be {rule}, got {key!r}")


def _dtype_name(dtype: str | torch.dtype | None) -> str:
    """Return the name of a dtype, which may be one; the default for None."""
    wanted = "float32" if dtype is None else dtype
    return next((name for name, known in DTYPES.items() if known == wanted), str(wanted))


def _number_in(reply: Message) -> int:
    body = reply.body
    if body.numel() != 8:
        raise CorruptPayload("message", f"a reply has {body.numel()} bytes, 8 expected")
    return int.from_bytes(body.numpy().tobytes(), "little")
