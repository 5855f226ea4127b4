"""Keys on the server's side: pushes, waiting pulls, and reductions of rounds.

References:
    Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD), for asynchronous keys.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.kernels import CPU, of
from gradcomp.payload import wire
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.rng import STREAM_SERVER, RngKey
from gradcomp.server.messages import Message
from gradcomp.server.spec import Spec, parse_payload
from gradcomp.server.state import State

OPEN_ROUNDS = 2  # most rounds that not every worker has pushed
# header fields that are equal in all payloads of a key
SETTINGS = ("codec", "dtype", "numel", "group_numel", "scale_count", "stream")


@dataclass
class _Round:
    """One push of every worker."""

    pushes: dict[int, Tensor] = field(default_factory=dict)  # by rank, until they are reduced
    asked: tuple[int, str | None, bool] | None = None  # rank and arguments of the first pull
    result: Tensor | Exception | None = None  # result of every worker's pull


class StoredParameter:
    """A synchronous key, or one shard of it. Round r consists of the r-th push of every worker, and
    its pulls wait for all of these pushes.

    A cut key also has a `StoredParameter` for its settings, which clients compare, and that nobody
    pushes to.

    At most two rounds are open. The newest complete round is kept until the slowest worker has
    pushed a later one. The first shard of a cut key decides whether a push is accepted. The other
    shards accept one more round, since the slowest worker's push may not have reached them yet.

    If clients have different settings, the key is broken permanently, and every request raises
    `PeerMismatch`. `spec` has the settings of the first client, on rank `first_rank`.
    """

    def __init__(self, key: str, spec: Spec, first_rank: int, workers: Sequence[int]) -> None:
        self.key, self.spec, self.workers = key, spec, tuple(workers)
        self.steps = 0  # rounds, or pushes to an asynchronous key, in the checkpoint
        self._first_rank, self._restored = first_rank, False
        self._broken: dict[int | None, PeerMismatch] = {}  # by rank; None: any other rank
        self._count = dict.fromkeys(self.workers, 0)  # pushes by rank
        self._waiting: list[tuple[int, int, int]] = []  # pulls: rank, round, request number
        self._rounds: dict[int, _Round] = {}
        self._lost: dict[int, str] = {}
        self._residual: Tensor | None = None  # of encoded averages, (numel,) float32
        self._first_header: tuple[int, wire.Header] | None = None

    def join(self, rank: int, spec: Spec) -> None:
        """Add another client; PeerMismatch if it uses the key with different settings."""
        if self._restored:  # values come from the checkpoint; clients need only agree
            self._restored = False
            self.spec = replace(self.spec, value_crc=spec.value_crc, value_text=spec.value_text)
        theirs = spec.settings()
        for name, mine in self.spec.settings().items():
            self._compare(name, self._first_rank, mine, rank, theirs[name])
        self.check(rank)

    def check(self, rank: int) -> None:
        """Raise PeerMismatch if the key is broken."""
        mismatch = self._mismatch(rank)
        if mismatch is not None:
            raise mismatch

    def push(self, rank: int, value: Tensor) -> int:
        """Add a value, ``(nbytes,)`` uint8, of a worker to its next round; return its staleness.

        If the payload is invalid, all pulls of the round raise the same error.
        """
        self._check_size(value)
        number, slowest = self._count[rank] + 1, min(self._count.values())
        lost = self._lost_in(number)
        if lost is not None:
            raise lost
        if number > slowest + OPEN_ROUNDS + (self.spec.shard_numel > 0 and self.spec.first > 0):
            raise ValueError(
                f"push {number} of key {self.key!r} is beyond {OPEN_ROUNDS} open rounds: ranks"
                f" {self._behind(slowest + 1)} have pushed {slowest}"
            )
        self._count[rank] = number
        now = self._rounds.setdefault(number, _Round())
        try:
            self._admit(rank, value, now)
        except Exception as error:  # noqa: BLE001 - every worker's pull raises it
            now.result = error
            if isinstance(error, CorruptPayload):
                where = f"{error.detail} (from rank {rank}, key {self.key!r}, round {number})"
                now.result = CorruptPayload(error.check, where)
            raise now.result from None
        finally:  # delete rounds that no worker can pull any more
            slowest = min(self._count.values())
            self._rounds = {n: kept for n, kept in self._rounds.items() if n >= slowest}
        self.check(rank)
        now.pushes[rank] = value
        return 0

    def pull(self, rank: int, message: Message) -> None:
        """Queue a pull of a worker; `answers` returns its result once it is available."""
        self.spec.check_method(self.key, message.method, message.compressed)
        number = self._count[rank]
        if not number:
            raise ValueError(f"rank {rank} pulls key {self.key!r} before its first push")
        now = self._rounds[number]
        now.asked = now.asked or (rank, message.method, message.compressed)
        first, method, compressed = now.asked
        self._compare("reduce_method", first, method, rank, message.method)
        self._compare("compressed", first, compressed, rank, message.compressed)
        self.check(rank)
        self._waiting.append((rank, number, message.request))

    def answers(self) -> list[tuple[int, int, Tensor | Exception]]:
        """Remove and return the pulls that are complete: (rank, request number, body or error)."""
        answers, waiting = [], []
        for rank, number, request in self._waiting:
            result = self._mismatch(rank) or self._result(number)
            if result is None:
                waiting.append((rank, number, request))
            else:
                answers.append((rank, request, result))
        self._waiting = waiting
        return answers

    def lose(self, rank: int, why: str) -> None:
        """Mark a worker as lost or closed, and drop its pulls."""
        self._waiting = [pull for pull in self._waiting if pull[0] != rank]
        self._lost[rank] = why

    def cancel(self, rank: int) -> str:
        """Drop a worker's pulls of the oldest round it waits for; return the reason of the wait."""
        waits = [number for waiting, number, _ in self._waiting if waiting == rank]
        number = min(waits, default=self._count[rank])
        self._waiting = [pull for pull in self._waiting if pull[:2] != (rank, number)]
        missing = [] if self.spec.asynchronous else self._behind(number)
        if not missing:
            return f"the reply to the pull of key {self.key!r} is late"
        return f"no push from ranks {missing} in round {number} of key {self.key!r}"

    def state(self) -> State:
        """Return the state for a checkpoint; ValueError if a round in progress would be lost."""
        slowest, newest = min(self._count.values()), max(self._count.values())
        under_way = slowest < newest or (newest and self._rounds[newest].result is None)
        if self._residual is not None and under_way:
            raise ValueError(
                f"key {self.key!r} has a round under way ({slowest} pushes of ranks"
                f" {self._behind(slowest + 1)}): save when every worker has pulled its last round"
            )
        return State(self.steps + slowest, self.spec, None, self._residual)

    def restore(self, state: State) -> None:
        """Load steps and residual of a checkpoint. No client may have used this parameter yet."""
        self.steps, self._residual, self._restored = state.steps, state.residual, True

    # ---- parts ----

    def _compare(self, name: str, first: int, mine: object, rank: int, theirs: object) -> None:
        """Break the key if a setting differs between two ranks; `check` then raises."""
        if mine != theirs and not self._broken:
            self._broken = {
                rank: PeerMismatch(name, first, theirs, mine, first=None),
                None: PeerMismatch(name, rank, mine, theirs, first=None),
            }

    def _mismatch(self, rank: int) -> PeerMismatch | None:
        return self._broken.get(rank) or self._broken.get(None)

    def _check_size(self, value: Tensor) -> None:
        """Raise ValueError unless a pushed value has the size of this key or shard."""
        if self.spec.agrees_only or value.numel() != self.spec.nbytes:
            raise ValueError(
                f"key {self.key!r} takes {self.spec.nbytes} bytes (shape {self.spec.shape}), got"
                f" {value.numel()}"
            )

    def _behind(self, number: int) -> list[int]:
        """Return the ranks that have not pushed a round."""
        return [rank for rank, count in self._count.items() if count < number]

    def _lost_in(self, number: int) -> PeerLost | None:
        """Return the error of a round that a lost worker has not pushed; None if there is none."""
        gone = [f"rank {r} {self._lost[r]}" for r in self._behind(number) if r in self._lost]
        where = f"round {number} of key {self.key!r} cannot be completed: {', '.join(gone)}"
        return PeerLost("pull", -1, 0.0, where) if gone else None

    def _admit(self, rank: int, value: Tensor, now: _Round) -> None:
        """Check a payload, and compare it with the first one of the key and of the round."""
        if self.spec.dtype == "float32":
            return
        header = admit_payload(self.spec, value)
        self._first_header = self._first_header or (rank, header)
        first_rank, first = self._first_header
        for name in SETTINGS:
            self._compare(name, first_rank, getattr(first, name), rank, getattr(header, name))
        for other_rank, other in list(now.pushes.items())[:1]:
            before = wire.parse(other.numpy())
            self._compare("step", other_rank, before.step, rank, header.step)
            finite = not (before.nonfinite or header.nonfinite)
            if self.spec.shares_scale and finite and not self._broken:
                mine, theirs = _scales(other), _scales(value)
                if not np.array_equal(mine, theirs):
                    at = int(np.argmax(mine != theirs))
                    here, there = (
                        f"{scales.view('<f4')[at].item()!r} as scale {at}"
                        for scales in (mine, theirs)
                    )
                    self._compare("scale", other_rank, here, rank, there)

    def _result(self, number: int) -> Tensor | Exception | None:
        """Return the result of a round; None if it is not complete."""
        now = self._rounds[number]
        if now.result is None:
            if self._behind(number):
                return self._lost_in(number)
            try:
                now.result = self._reduce(now)
            except Exception as error:  # noqa: BLE001 - every worker's pull raises it
                now.result = error
            now.pushes.clear()
        return now.result

    def _reduce(self, now: _Round) -> Tensor:
        pushes = [now.pushes[rank] for rank in self.workers]
        _, method, compressed = now.asked or (0, None, False)
        if self.spec.dtype == "float32":
            values = [push.view(torch.float32) for push in pushes]
            return reduce_values(values, method or "sum").view(torch.uint8)
        mean = average_payloads(self.spec, pushes)
        return self._encode(mean, pushes[0]) if compressed else mean.view(torch.uint8)

    def _encode(self, mean: Tensor, payload: Tensor) -> Tensor:
        """Encode an average as `payload` was; draws use the CRC-32 of the key as parameter."""
        header, codec, _ = parse_payload(self.spec, payload)
        if codec.error_feedback and self._residual is None:
            self._residual = torch.zeros_like(mean)
        parameter = zlib.crc32(self.key.encode())
        draws = RngKey(codec.seed, 0, header.step, parameter, STREAM_SERVER, self.spec.first)
        return codec.encode(mean, residual=self._residual, key=draws)


class AsynchronousParameter(StoredParameter):
    """An asynchronous key, with a current value. Pulls do not wait, and lost workers are ignored.

    A push sets value = fl(value + fl(learning_rate * pushed value)), in order of arrival.
    """

    def __init__(
        self, key: str, spec: Spec, first_rank: int, workers: Sequence[int], value: Tensor
    ) -> None:
        super().__init__(key, spec, first_rank, workers)
        self._value = value.clone()
        self._seen = dict.fromkeys(self.workers, 0)  # pushes of others before a worker's last pull

    def push(self, rank: int, value: Tensor) -> int:
        self._check_size(value)
        if self.spec.dtype == "float32":
            step = value.view(torch.float32)
        else:
            pushed, numel = admit_payload(self.spec, value).numel, self._value.numel()
            if pushed != numel:
                text = f"key {self.key!r} has {numel} elements, the payload of rank {rank} {pushed}"
                raise ValueError(text)
            step = average_payloads(self.spec, [value])
        if not bool(torch.isfinite(step).all()):
            raise ValueError(
                f"a push of rank {rank} to key {self.key!r} holds NaN or Inf; it was not applied"
            )
        new = self._value + step * self.spec.learning_rate
        if not bool(torch.isfinite(new).all()):
            raise ValueError(
                f"a push of rank {rank} to key {self.key!r} makes values too large for float32; it"
                " was not applied"
            )
        self._value = new
        self._count[rank] += 1
        return self._others(rank) - self._seen[rank]

    def pull(self, rank: int, message: Message) -> None:
        self.spec.check_method(self.key, message.method, message.compressed)
        self._seen[rank] = self._others(rank)
        self._waiting.append((rank, 0, message.request))

    def state(self) -> State:
        return State(self.steps + sum(self._count.values()), self.spec, self._value)

    def _result(self, number: int) -> Tensor:
        return self._value.view(torch.uint8)

    def _others(self, rank: int) -> int:
        """Return the number of applied pushes of workers other than `rank`."""
        return sum(self._count.values()) - self._count[rank]


# ---- reductions ----------------------------------------------------------------------------------


def reduce_values(values: Sequence[Tensor], method: str) -> Tensor:
    """Return the elementwise max, sum or mean of float32 tensors.

    Values are added in the given order, and rounded after every addition. The mean is the sum times
    fl(1 / N). A NaN in any value gives a NaN in the maximum.
    """
    out = values[0].clone()
    for value in values[1:]:
        out = torch.maximum(out, value) if method == "max" else out.add_(value)
    return out.mul_(float(np.float32(1) / np.float32(len(values)))) if method == "mean" else out


def admit_payload(spec: Spec, payload: Tensor) -> wire.Header:
    """Validate a payload completely and return its header; CorruptPayload as `Codec.decode`."""
    header, codec, layout = parse_payload(spec, payload)
    if not header.nonfinite:
        codec.validate_packed(payload, layout)
    return header


def average_payloads(spec: Spec, payloads: Sequence[Tensor]) -> Tensor:
    """Return the average of admitted payloads with equal `SETTINGS`, ``(numel,)`` float32.

    With a shared scale S, the average is fl(fl(S / N) * sum of codes). Otherwise decoded values are
    added in the given order and multiplied by fl(1 / N). Both equal the result of an exchange of
    the same payloads bit for bit. For a key without a codec, byte-equal scales count as shared. All
    elements are NaN if any payload is flagged as non-finite.
    """
    header, codec, layout = parse_payload(spec, payloads[0])
    out = of(CPU).empty(header.numel)
    if any(wire.parse(payload.numpy()).nonfinite for payload in payloads):
        return out.fill_(float("nan"))
    if codec.can_share_scale:
        shared = spec.shares_scale
        if spec.codec is None:
            shared = len({_scales(payload).tobytes() for payload in payloads}) == 1
        codec = codec.of_groups(header.group_numel, shares_scale=shared)
    codec.decode_body(of(CPU), payloads, layout, out)
    return out


def _scales(payload: Tensor) -> NDArray[np.uint32]:
    """Return the bits of the scales of an admitted payload, ``(scale_count,)``."""
    view = payload.numpy()
    return view[HEADER_NBYTES : HEADER_NBYTES + 4 * wire.parse(view).scale_count].view("<u4")
