"""The worker's side of a parameter server."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from gradcomp.codecs import Codec, resolve
from gradcomp.codecs.checks import check_alone
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import MAX_TIMEOUT_S
from gradcomp.errors import CorruptPayload
from gradcomp.server.arguments import as_tensor, check_initial, check_key, dtype_name
from gradcomp.server.keys import ClientKey
from gradcomp.server.messages import (
    MAX_MESSAGE_NBYTES,
    METHODS,
    Kind,
    Message,
    home_of,
    server_ranks,
)
from gradcomp.server.raw import RawCodes
from gradcomp.server.requests import Call, Pending, Request, Requests, T
from gradcomp.server.shards import DEFAULT_SHARD_NBYTES, check_shard_nbytes
from gradcomp.server.spec import Spec, make_spec
from gradcomp.server.state import StateFile, steps_of, with_steps

if TYPE_CHECKING:
    from typing_extensions import Self


class ParameterClient:
    """Pushes to and pulls from the servers; one on every worker rank, used by one thread.

    A call returns when the server has answered it; with ``wait=False`` a push or pull returns a
    `Pending` at once, and the worker computes on while the bytes travel. Calls reach a server in
    the order in which they were made. A context manager that closes itself.

    Args:
        comm: its messages from rank to rank are the client's alone; collectives may go on beside.
            Not closed.
        servers: ranks of the servers, or how many: the last ranks then. The same on every rank.
        timeout_s: seconds after which a server, or the other workers, are given up.
        shard_nbytes: keys of more float32 values than fill so many bytes are cut into shards of
            about that size, which live on different servers; between 32 bytes and 1 GiB, the same
            on every worker.

    Attributes:
        bytes_sent, bytes_received: of messages, headers included.
        staleness: of the last push to an asynchronous key, see `push_parameter`.

    Raises:
        ValueError: `servers` that do not exist or leave no worker, or are this rank; `timeout_s` or
            `shard_nbytes` out of range.
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
            raise ValueError(
                f"timeout_s must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}, got"
                f" {timeout_s!r}"
            )
        self._requests = Requests(comm, self._servers, timeout_s)
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
                ``(codec.payload_nbytes(numel, groups),)``. Any other than a flat shape makes a
                uint8 key one of raw codes.
            dtype: "float32" (the default), or "uint8" for packed gradients: payloads of a codec, or
                raw 2-bit codes.
            type: another word for `dtype`.
            codec: of the payloads. None: as their headers say; scales that are byte-equal in all
                payloads of a round then count as shared, and the server draws with seed 0.
            asynchronous: apply every push at once instead of in rounds.
            learning_rate: asynchronous keys only: parameter += learning_rate * pushed value, so a
                negative one descends along pushed gradients.
            value: asynchronous keys only: initial values, float32; of `shape`, or for packed
                gradients of the tensor that they are gradients of. Those of the client that comes
                first count.
            scale_key: makes this a key of raw codes: four values a byte, the first in the lowest
                bits, ``00`` for -1, ``01`` for 0, ``10`` for +1, and nothing else; pulled, they are
                times what this client has last pulled of `scale_key`, a float32 key of one element,
                with "max". None: times 1.

        Raises:
            ValueError: an argument out of its range, or arguments that do not go together.
            UnsupportedTensor: `value` on another device, sparse, or not contiguous.
            PeerMismatch: another client has made the key otherwise; the key is broken for all.
            PeerLost: the server is gone or silent.
        """
        check_key(key)
        resolved = None if codec is None else resolve(codec)
        if resolved is not None:
            check_alone(resolved)
        name = _one_dtype(dtype, type)
        given = make_spec(tuple(shape), name, resolved, asynchronous, learning_rate)
        raw = self._raw_codes(given, resolved, scale_key)
        spec = given
        if raw is not None:
            spec = make_spec(raw.payload_shape, name, raw.codec, asynchronous, learning_rate)
        check_initial(spec, value)
        known = ClientKey(
            key,
            given,
            spec,
            raw,
            raw.codec if raw is not None else resolved,
            value,
            self._shard_numel,
        )
        requests = [self._ask(Kind.INIT, key, shard, body) for shard, body in known.settings(value)]
        known.steps = Call(self._requests, requests, lambda replies: _number_in(replies[0])).wait()
        self._keys[key] = known

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[True] = True) -> int: ...

    @overload
    def push_parameter(self, key: str, value: Any, *, wait: Literal[False]) -> Pending[int]: ...

    def push_parameter(self, key: str, value: Any, *, wait: bool = True) -> int | Pending[int]:
        """Push a value: into this worker's next round, or at once into an asynchronous key.

        Args:
            key: initialised by this client.
            value: a tensor of the key's shape and dtype, contiguous, CPU; or numbers that make one
                (one number will do for a key of one element). It is copied: the caller may change
                it at once.
            wait: False: return a `Pending` at once; its `wait` returns or raises what this call
                would.

        Returns:
            The staleness of a push to an asynchronous key, pushes of other workers that were
            applied between this worker's last pull of the key (its making, before the first pull)
            and this push. 0 for other keys.

        Raises:
            ValueError: unknown key, wrong shape or dtype, more than two open rounds, NaN or Inf for
                an asynchronous key.
            UnsupportedTensor: another device, sparse, or not contiguous.
            CorruptPayload: a payload that does not decode; every worker's pull of the round fails
                as well.
            PeerMismatch: other clients use the key with other settings; it is broken for all.
            PeerLost: the server is gone or silent, or a worker that the round needs is.
            GradcompError: the server failed, for want of memory, say; every worker's pull of the
                round fails as well.
            RuntimeError: the client is closed; ``wait=False`` where MPI is called from the main
                thread only.
        """
        known = self._known(key, wait)
        body = as_tensor(known.given, key, value)
        if known.raw is not None:
            body = known.raw.payload(body, self._scale(key, known.raw), known.steps + known.pushes)
        made, parts = known.cut(body.reshape(-1).view(torch.uint8))
        requests = [self._ask(Kind.INIT, key, shard, settings) for shard, settings in made]
        if known.is_cut:  # so that this client hears if others use the key otherwise
            requests += [
                self._ask(Kind.INIT, key, shard, settings)
                for shard, settings in known.settings(None)[:1]
            ]
        if known.is_cut and known.may_be_early:  # the first shard decides whether the push is taken
            shard, part = parts.pop(0)
            gate = self._ask(Kind.PUSH, key, shard, part, room_nbytes=8)
            Call(self._requests, [*requests, gate], lambda replies: None).wait()
            requests.clear()
        before = len(requests)
        requests += [self._ask(Kind.PUSH, key, shard, part, room_nbytes=8) for shard, part in parts]
        known.pushes += 1

        def failed(error: Exception) -> None:
            if isinstance(error, ValueError) and not isinstance(error, CorruptPayload):
                known.pushes -= 1  # the server has not counted it

        def finish(replies: list[Message]) -> int:
            staleness = max((_number_in(reply) for reply in replies[before:]), default=0)
            if known.spec.asynchronous:
                self.staleness = staleness
            return staleness

        return self._started(Call(self._requests, requests, finish, failed), wait)

    @overload
    def pull_parameter(
        self,
        key: str,
        reduce_method: str | None = None,
        *,
        compressed: bool = False,
        wait: Literal[True] = True,
    ) -> Tensor: ...

    @overload
    def pull_parameter(
        self,
        key: str,
        reduce_method: str | None = None,
        *,
        compressed: bool = False,
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
            ValueError: unknown key or reduce method, one that does not suit the key, or no push
                before.
            CorruptPayload: a worker's payload of the round does not decode.
            PeerMismatch: clients use the key with different settings, or pull a round in different
                ways.
            PeerLost: a worker is gone before it has pushed the round, or silent; or the server is.
            GradcompError, RuntimeError: as `push_parameter`.
        """
        known = self._known(key, wait)
        if reduce_method is not None and reduce_method not in METHODS:
            raise ValueError(f"reduce_method must be one of {METHODS}, got {reduce_method!r}")
        if compressed is not True and compressed is not False:
            raise ValueError(f"compressed must be True or False, got {compressed!r}")
        known.spec.check_method(key, reduce_method, compressed)
        rooms, number = known.rooms(compressed), known.pushes
        requests = [
            self._ask(Kind.PULL, key, shard, None, reduce_method, compressed, room_nbytes=room)
            for shard, room in zip(known.shards(), rooms, strict=True)
        ]

        def finish(replies: list[Message]) -> Tensor:
            pulled = known.join(replies, compressed)
            known.complete = max(known.complete, number)
            if reduce_method == "max":
                known.maximum = pulled
            return pulled

        return self._started(Call(self._requests, requests, finish), wait)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the servers remember into a file, from which `serve` can go on: all keys and
        settings, values of asynchronous keys, what averages that are pulled compressed have left
        over, numbers of rounds.

        One worker calls this while the others push nothing: before all push to a float32 key to
        meet, say. Values are gathered key by key and pass through this worker; the file appears
        when it is complete, in the place of an older one.

        Args:
            path: of the file; its folder exists.

        Raises:
            ValueError: a round is under way whose residual would be lost.
            OSError: the file cannot be written.
            PeerMismatch: a key is broken.
            PeerLost: a server is gone or silent.
        """
        held = [self._held_by(server) for server in self._servers]
        names = sorted(
            {name for names in held for name in names}, key=lambda name: (name[0], -name[1])
        )
        steps: dict[str, int] = {}
        with StateFile(path, len(names)) as file:
            for key, shard in names:
                request = self._ask(Kind.STATE, key, shard, room_nbytes=MAX_MESSAGE_NBYTES)
                record = Call(self._requests, [request], lambda replies: replies[0].data()).wait()
                steps[key] = max(steps_of(record), steps.get(key, 0))
                if steps[key] > steps_of(
                    record
                ):  # of what is agreed on about shards, which have counted
                    record = with_steps(record, steps[key])
                file.add(key, shard, record)

    def close(self) -> None:
        """Tell the servers that this worker has done; closing twice is harmless. The communicator
        stays open.

        What was pushed still arrives; a `Pending` that nobody has waited for raises RuntimeError.
        """
        self._requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- parts
    # ----------------------------------------------------------------------------------------------

    def _known(self, key: str, wait: bool = True) -> ClientKey:
        """Return what is known of a key that a call uses."""
        if wait is not True and wait is not False:
            raise ValueError(f"wait must be True or False, got {wait!r}")
        if not wait:
            self._requests.check_overlap()
        check_key(key)
        if key not in self._keys:
            raise ValueError(
                f"unknown key {key!r}; this client has initialised {sorted(self._keys)}"
            )
        return self._keys[key]

    def _raw_codes(
        self, given: Spec, codec: Codec | None, scale_key: str | None
    ) -> RawCodes | None:
        """Return what wraps the codes of a key that holds raw ones, else None."""
        if scale_key is None and (
            given.dtype != "uint8" or codec is not None or len(given.shape) == 1
        ):
            return None
        if given.dtype != "uint8" or codec is not None:
            raise ValueError(
                f'scale_key={scale_key!r} is for raw codes: dtype="uint8" and no codec, got'
                f" {given.dtype}"
            )
        if scale_key is not None:
            scale = self._known(scale_key)
            if scale.spec.dtype != "float32" or scale.spec.numel != 1 or scale.spec.asynchronous:
                raise ValueError(
                    f"scale_key={scale_key!r} must be a synchronous float32 key of one element"
                )
        return RawCodes(given.shape, scale_key)

    def _scale(self, key: str, raw: RawCodes) -> float:
        """Return what code +1 of a key of raw codes stands for."""
        if raw.scale_key is None:
            return 1.0
        maximum = self._keys[raw.scale_key].maximum
        if maximum is None:
            raise ValueError(
                f'pull {raw.scale_key!r} with "max" before the first push of key {key!r}, which it'
                " scales"
            )
        scale = float(maximum)
        if scale < 0:
            raise ValueError(
                f"key {raw.scale_key!r} scales {key!r} and must not be negative, it is {scale}"
            )
        return scale

    def _ask(
        self,
        kind: Kind,
        key: str,
        shard: int = 0,
        body: Tensor | None = None,
        method: str | None = None,
        compressed: bool = False,
        *,
        room_nbytes: int = 0,
    ) -> Request:
        """Begin to ask the server of a shard."""
        message = Message(
            kind, key=key, method=method, compressed=compressed, shard=shard, body=body
        )
        return self._requests.send(home_of(key, self._servers, shard), message, room_nbytes)

    def _held_by(self, server: int) -> list[tuple[str, int]]:
        """Return the keys and shards that a server has."""
        request = self._requests.send(server, Message(Kind.STATE), MAX_MESSAGE_NBYTES)
        reply = Call(self._requests, [request], lambda replies: replies[0].data()).wait()
        try:
            return [
                (str(key), int(shard))
                for key, shard in json.loads(reply.numpy().tobytes().decode())
            ]
        except (ValueError, TypeError) as error:
            raise CorruptPayload(
                "message", f"server rank {server} names no keys: {error}"
            ) from None

    def _started(self, pending: Pending[T], wait: bool) -> T | Pending[T]:
        """Return what a call has to return: its result, or the call itself while replies are
        received beside.
        """
        if wait:
            return pending.wait()
        self._requests.overlap()
        return pending


def _number_in(reply: Message) -> int:
    body = reply.data()
    if body.numel() != 8:
        raise CorruptPayload("message", f"a reply has {body.numel()} bytes, 8 expected")
    return int.from_bytes(body.numpy().tobytes(), "little")


def _one_dtype(dtype: str | torch.dtype | None, other: str | torch.dtype | None) -> str:
    """Return the name of a dtype that may have been given by either of two words."""
    if dtype is not None and other is not None and dtype_name(dtype) != dtype_name(other):
        raise ValueError(
            f"dtype={dtype!r} and type={other!r} are two words for one thing; give one"
        )
    return dtype_name(dtype if dtype is not None else other if other is not None else "float32")
