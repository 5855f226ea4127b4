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
from gradcomp.errors import CorruptPayload, GradcompError, PeerLost
from gradcomp.server.calls import Pending, Request, Requests, T
from gradcomp.server.keys import ClientKey, RawCodes, check_initial
from gradcomp.server.messages import (
    EMPTY,
    MAX_KEY_NBYTES,
    MAX_MESSAGE_NBYTES,
    Kind,
    Message,
    server_of,
    server_ranks,
)
from gradcomp.server.shards import DEFAULT_SHARD_NBYTES, check_shard_nbytes
from gradcomp.server.spec import DTYPES, Spec, make_spec
from gradcomp.server.state import pack_state, parse_state, write_states

if TYPE_CHECKING:
    from typing_extensions import Self


class ParameterClient:
    """Client of a parameter server. Every worker rank has one, which one thread uses.

    A call returns after the server has replied. With ``wait=False``, a push or pull returns a
    `Pending` immediately. Calls reach a server in the order in which they were made. The client is
    a context manager, which closes it at exit.

    Args:
        comm: communicator. While the client is open, no other code may send or receive messages on
            it; collectives may run concurrently. The client does not close it.
        servers: ranks of the servers, or the number of last ranks that serve; equal on every rank.
        timeout_s: timeout of a wait for a server or for other workers, in seconds.
        shard_nbytes: size of a shard, in bytes of float32 values, between 32 bytes and 1 GiB; equal
            on every worker. A larger key is cut into shards, which are spread over the servers.

    Attributes:
        bytes_sent, bytes_received: bytes of messages, including headers.
        staleness: staleness of the last push to an asynchronous key, see `push_parameter`.

    Raises:
        ValueError: `servers` do not exist, leave no worker, or include this rank; `timeout_s` or
            `shard_nbytes` is out of range.
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
        """Create a key, or join the clients that have created it.

        Every client must call this before it pushes to or pulls from the key.

        Args:
            key: name of the key, 1 to 255 bytes of UTF-8.
            shape: shape of pushed values, at most 8 dimensions; for payloads
                ``(codec.payload_nbytes(numel, groups),)``. A uint8 key without a codec whose shape
                does not have exactly one dimension holds raw codes.
            dtype: "float32" (the default), or "uint8" for compressed gradients: payloads of a codec
                or raw 2-bit codes.
            type: another name for `dtype`.
            codec: codec of the payloads. None: the codec in their headers; scales that are
                byte-equal in all payloads of a round count as shared, and the server uses seed 0.
            asynchronous: apply every push immediately instead of in rounds.
            learning_rate: asynchronous keys only. The server adds learning_rate * pushed value, so
                use a negative one for gradient descent.
            value: asynchronous keys only. Initial values, float32, contiguous, of `shape`; for
                compressed gradients, of the shape of the parameter. The values of the first client
                are used.
            scale_key: makes this a key of raw codes: four values per byte, the first in the lowest
                bits, ``00`` for -1, ``01`` for 0, ``10`` for +1, and nothing else. Their scale is
                the result of this client's last pull of `scale_key`, a float32 key of one element,
                with "max". None: their scale is 1.

        Raises:
            TypeError: `shape` or `value` has the wrong type.
            ValueError: an argument is out of range, or arguments exclude each other.
            UnsupportedTensor: `value` is sparse or not contiguous.
            PeerMismatch: another client uses the key with different settings; the key is then
                broken for all clients.
            PeerLost: the server is gone or does not reply.
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
        spec = make_spec(tuple(shape), name, resolved, asynchronous, learning_rate)
        raw = self._raw_codes(spec, scale_key)
        if raw is not None:
            spec = make_spec(raw.payload_shape, name, raw.codec, asynchronous, learning_rate)
        start = check_initial(spec, value)
        known = ClientKey(key, spec, raw, start, self._shard_numel)
        self._accept_replies_to(known)
        asked = [self._ask(Kind.INIT, key, shard, body) for shard, body in known.settings(start)]
        known.steps = _number_in(self._replies(asked)[0])
        before = self._keys.get(key)
        if before is None or not before.is_made_like(known):
            self._keys[key] = known  # otherwise keep the round numbers of this client

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[True] = ...) -> int: ...

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[False]) -> Pending[int]: ...

    def push_parameter(self, key: str, value: Any, *, wait: bool = True) -> int | Pending[int]:
        """Push a value to this worker's next round of a key, or to an asynchronous key.

        Args:
            key: a key that this client has initialised.
            value: contiguous tensor of the key's shape and dtype, on any device; or numbers of that
                shape (a key of one element also accepts a single number). It is copied, so the
                caller may change it after this call.
            wait: False: return a `Pending` immediately, whose `wait` returns or raises what this
                call would.

        Returns:
            The staleness of a push to an asynchronous key: the number of pushes of other workers
            applied since this worker's last pull of the key, or since the key was created if there
            was no pull. 0 for other keys.

        Raises:
            ValueError: unknown key, wrong shape or dtype, more than two open rounds, or NaN or Inf
                in a push to an asynchronous key.
            UnsupportedTensor: `value` is sparse or not contiguous.
            CorruptPayload: the payload cannot be decoded; every worker's pull of the round also
                fails.
            PeerMismatch: clients use the key with different settings; it is broken for all clients.
            PeerLost: the server, or a worker that the round needs, is gone or does not reply.
            GradcompError: the server failed, for example for lack of memory; every worker's pull of
                the round also fails. Or an earlier push of the key was lost after some of its
                shards may have got it.
            RuntimeError: the client is closed; or ``wait=False`` while MPI may be called from its
                main thread only.
        """
        known = self._known(key, wait)
        made, parts = known.pushed(known.body(value))
        if made:
            self._accept_replies_to(known)
        asked = [self._ask(Kind.INIT, key, shard, settings) for shard, settings in made]
        if known.is_cut and known.may_be_early:  # the first shard decides whether the push is early
            try:
                self._replies([*asked, self._ask(Kind.PUSH, key, *parts.pop(0))])
            except PeerLost as error:  # the first shard may have counted it, the others have not
                known.lost = error
                raise
            except GradcompError:  # counted by the first shard: the others count it, too
                try:
                    self._replies([self._ask(Kind.PUSH, key, *part) for part in parts])
                except GradcompError as error:
                    known.lost = error if isinstance(error, PeerLost) else known.lost
                known.pushes += 1
                raise
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
        """Pull the reduction of the round of this worker's last push, once all workers have pushed.

        Args:
            key: a key that this client has initialised.
            reduce_method: "max", "sum", "mean", or "decode_average" for compressed gradients; equal
                on all clients of a round. None for asynchronous keys, which return their current
                value without waiting for pushes.
            compressed: encode the average of compressed gradients again, and return the payload,
                for `Codec.decode`.
            wait: False: return a `Pending` immediately, for the round of the last push before this
                call.

        Returns:
            float32 tensor of the key's shape. For payloads, ``(numel,)`` float32; for raw codes,
            float32 of the key's shape with four times the last dimension; for both, ``(nbytes,)``
            uint8 if `compressed`. For asynchronous keys, float32 of the shape of the initial
            values.

        Raises:
            ValueError: unknown key, unknown or unsupported reduce method, or no push before.
            CorruptPayload: a worker's payload of the round cannot be decoded.
            PeerMismatch: clients use the key with different settings, or pull a round with
                different arguments.
            PeerLost: the server, or a worker that has not pushed the round, is gone or does not
                reply.
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
        """Write the state of all servers to a checkpoint, from which `serve` can resume.

        The state is all keys and their settings, values of asynchronous keys, residuals of averages
        that are pulled compressed, and round numbers.

        One worker calls this while the others do not push, for example before all workers push to a
        float32 key and pull it as a barrier. Values are fetched key by key through this worker. The
        file replaces an older one only when it is complete.

        Args:
            path: path of the file, in an existing folder.

        Raises:
            ValueError: a round is in progress, so its residual would be lost.
            OSError: the file cannot be written.
            PeerMismatch: a key is broken.
            PeerLost: a server is gone or does not reply.
        """
        before = self._requests.max_reply_nbytes
        self._requests.max_reply_nbytes = MAX_MESSAGE_NBYTES
        write_states(path, self._records())
        self._requests.max_reply_nbytes = before  # not after an error: a long reply may come late

    def close(self) -> None:
        """Notify the servers that this worker is done. A second call has no effect.

        Earlier pushes still arrive. A `Pending` that is not complete raises RuntimeError. The
        communicator stays open.
        """
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- parts ----

    def _known(self, key: str, wait: bool = True) -> ClientKey:
        """Return an initialised key, after checking `key` and `wait`."""
        if wait is not True and wait is not False:
            raise ValueError(f"wait must be True or False, got {wait!r}")
        if not wait:
            self._comm.check_overlap()
        _check_key(key)
        if key not in self._keys:
            known = sorted(self._keys)
            raise ValueError(f"unknown key {key!r}; this client has initialised {known}")
        if self._keys[key].lost is not None:
            raise GradcompError(
                f"a push to key {key!r} may have reached some of its shards only"
                f" ({self._keys[key].lost}): restart servers and workers from a checkpoint"
            )
        return self._keys[key]

    def _raw_codes(self, given: Spec, scale_key: str | None) -> RawCodes | None:
        """Return the converter from raw codes to payloads; None for a key without raw codes."""
        packed = given.dtype == "uint8" and given.codec is None
        if scale_key is None:
            return RawCodes(given.shape, None) if packed and len(given.shape) != 1 else None
        scale = self._known(scale_key)
        spec = scale.spec
        if not packed or spec.dtype != "float32" or spec.numel != 1 or spec.asynchronous:
            raise ValueError(
                f"scale_key={scale_key!r} must be a synchronous float32 key of one element, for raw"
                f' codes: dtype="uint8" and no codec, got {given.dtype} and {given.codec!r}'
            )
        return RawCodes(given.shape, scale)

    def _accept_replies_to(self, known: ClientKey) -> None:
        """Raise the limit of replies to the longest reply to a pull of a key."""
        self._requests.max_reply_nbytes = max(self._requests.max_reply_nbytes, known.reply_nbytes())

    def _ask(
        self, kind: Kind, key: str, shard: int = 0, body: Tensor = EMPTY, **how: Any
    ) -> Request:
        """Start a request to the server of a shard."""
        message = Message(kind, key=key, shard=shard, body=body, **how)
        return self._requests.send(server_of(key, self._servers, shard), message)

    def _started(self, pending: Pending[T], wait: bool) -> T | Pending[T]:
        """Return the result of a call; or `pending`, and let a thread receive its replies."""
        if wait:
            return pending.wait()
        self._requests.overlap()
        return pending

    def _replies(self, asked: Sequence[Request]) -> list[Message]:
        return Pending(self._requests, asked, list).wait()

    def _records(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (key, shard, record); a cut key's settings come last, with its shards' steps."""
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
    """Return the name of a dtype, given by name or as a torch dtype; the default for None."""
    wanted = "float32" if dtype is None else dtype
    return next((name for name, known in DTYPES.items() if known == wanted), str(wanted))


def _number_in(reply: Message) -> int:
    body = reply.body
    if body.numel() != 8:
        raise CorruptPayload("message", f"a reply has {body.numel()} bytes, 8 expected")
    return int.from_bytes(body.numpy().tobytes(), "little")
