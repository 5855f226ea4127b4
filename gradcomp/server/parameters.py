"""Keys on their server: what has been pushed, who waits for what, and what they get.

References:
    Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD), for asynchronous keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradcomp.errors import CorruptPayload, PeerLost, PeerMismatch
from gradcomp.payload import wire
from gradcomp.server.messages import Message
from gradcomp.server.reduce import SETTINGS, PackedReducer, reduce_values, scale_bytes
from gradcomp.server.spec import Spec
from gradcomp.server.state import State

OPEN_ROUNDS = 2  # that not every worker has pushed


class Parameter:
    """A key that has settings and no values: what clients agree on about a key that is cut, whose
    shards are parameters of their own.

    A key whose clients turn out to have different settings is broken for good: every request gets
    `PeerMismatch`.

    Args:
        key: its name.
        spec: its settings, as its first client has them.
        first_rank: that client.
        workers: every rank that does not serve.

    Attributes:
        steps: rounds, or pushes to an asynchronous key, before this server began: of the checkpoint
            that it read.
    """

    def __init__(self, key: str, spec: Spec, first_rank: int, workers: Sequence[int]) -> None:
        self.key, self.spec, self.workers, self.steps = key, spec, tuple(workers), 0
        self._first_rank, self._restored = first_rank, False
        self._broken: dict[int | None, PeerMismatch] = {}  # by rank; None: any other rank
        self._waiting: list[tuple[int, int, int]] = []  # pulls: rank, round, request
        self._packed = PackedReducer(spec, key) if spec.dtype == "uint8" else None

    def join(self, rank: int, spec: Spec) -> None:
        """Accept a further client that has the key with the settings `spec`.

        Raises:
            PeerMismatch: they differ.
        """
        if self._restored:  # a checkpoint's values count, so the clients' ones need only be alike
            self._restored = False
            self.spec = replace(self.spec, value_crc=spec.value_crc)
        theirs = spec.settings()
        for name, mine in self.spec.settings().items():
            if mine != theirs[name] and not self._broken:
                self._differ(name, self._first_rank, mine, rank, theirs[name])
        self.check(rank)

    def check(self, rank: int) -> None:
        """Raise PeerMismatch if the key is broken."""
        if self._broken:
            raise self._mismatch(rank)

    def push(self, rank: int, value: Tensor) -> int:
        """Accept a value, ``(nbytes,)`` uint8, of a worker; return its staleness."""
        raise ValueError(f"key {self.key!r} is cut into shards of {self.spec.shard_numel} elements")

    def pull(self, rank: int, message: Message) -> None:
        """Note that a worker waits; `settle` answers it."""
        self.push(rank, message.data())

    def settle(self) -> list[tuple[int, int, Tensor | Exception]]:
        """Return what can be answered now: (rank, request, body or error)."""
        answers, waiting = [], []
        for rank, number, request in self._waiting:
            result = self._mismatch(rank) if self._broken else self._answer(number)
            if result is None:
                waiting.append((rank, number, request))
            else:
                answers.append((rank, request, result))
        self._waiting = waiting
        return answers

    def lose(self, rank: int, why: str) -> None:
        """Note that a worker pushes no more."""
        self._waiting = [pull for pull in self._waiting if pull[0] != rank]

    def cancel(self, rank: int) -> str:
        """Forget the oldest round that a worker waits for, and return what it waited for."""
        return ""

    def state(self) -> State:
        """Return what a checkpoint has to hold.

        Raises:
            ValueError: a round is under way that would be lost.
        """
        return State(self.steps, self.spec)

    def restore(self, state: State) -> None:
        """Take over what a checkpoint holds; nobody has used this parameter yet."""
        self.steps, self._restored = state.steps, True
        if self._packed is not None:
            self._packed.residual = state.residual

    # ---- parts ----

    def _answer(self, number: int) -> Tensor | Exception | None:
        """Return what a pull of a round gets; None: not yet."""
        raise NotImplementedError

    def _differ(self, name: str, first: int, mine: object, rank: int, theirs: object) -> None:
        """Break the key: rank `first` has `mine` where `rank` has `theirs`."""
        self._broken = {
            rank: PeerMismatch(name, first, theirs, mine, first=None),
            None: PeerMismatch(name, rank, mine, theirs, first=None),
        }

    def _mismatch(self, rank: int) -> PeerMismatch:
        return self._broken.get(rank) or self._broken[None]

    def _check_size(self, value: Tensor) -> None:
        """Raise ValueError unless a pushed value has the bytes of this key."""
        if value.numel() != self.spec.nbytes:
            raise ValueError(
                f"key {self.key!r} takes {self.spec.nbytes} bytes (shape {self.spec.shape}), got"
                f" {value.numel()}"
            )


class AsynchronousParameter(Parameter):
    """A key with a value: parameter = fl(parameter + fl(learning_rate * pushed value)), in order of
    arrival; pulls never wait.

    Args:
        value: initial values, ``(numel,)`` float32; copied.
    """

    def __init__(
        self, key: str, spec: Spec, first_rank: int, workers: Sequence[int], value: Tensor
    ) -> None:
        super().__init__(key, spec, first_rank, workers)
        self._value = value.clone()
        self._pushes = dict.fromkeys(self.workers, 0)
        self._seen = dict.fromkeys(self.workers, 0)  # pushes of others, in a worker's last pull

    def push(self, rank: int, value: Tensor) -> int:
        self._check_size(value)
        if self._packed is None:
            step = value.view(torch.float32)
        else:
            header, numel = self._packed.admit(value), self._value.numel()
            if header.numel != numel:
                raise ValueError(
                    f"key {self.key!r} has {numel} elements, the payload of rank {rank}"
                    f" {header.numel}"
                )
            step = self._packed.average([value])
        if not bool(torch.isfinite(step).all()):
            raise ValueError(
                f"a push of rank {rank} to key {self.key!r} holds NaN or Inf; it was not applied"
            )
        self._value += step * self.spec.learning_rate
        self._pushes[rank] += 1
        return self._others(rank) - self._seen[rank]

    def pull(self, rank: int, message: Message) -> None:
        self.spec.check_method(self.key, message.method, message.compressed)
        self._seen[rank] = self._others(rank)
        self._waiting.append((rank, 0, message.request))

    def state(self) -> State:
        return State(self.steps + sum(self._pushes.values()), self.spec, self._value)

    def _answer(self, number: int) -> Tensor:
        return self._value.view(torch.uint8)

    def _others(self, rank: int) -> int:
        """Return how many pushes of other workers have been applied."""
        return sum(self._pushes.values()) - self._pushes[rank]


@dataclass
class _Round:
    """One push of every worker.

    Attributes:
        pushes: by rank; dropped once they are reduced.
        asked: (rank, reduce method, compressed) of the first pull.
        result: of the reduction; or an error, such as that of a payload that does not decode, which
            every worker's pull gets.
    """

    pushes: dict[int, Tensor] = field(default_factory=dict)
    asked: tuple[int, str | None, bool] | None = None
    result: Tensor | Exception | None = None


class SynchronousParameter(Parameter):
    """A key whose pulls wait for every worker's push: round r is each worker's r-th push.

    At most two rounds are open, and the newest complete one is kept until the slowest worker has
    left it behind. The first shard of a key that is cut decides; a push that it has accepted
    reaches the other shards, where the slowest worker's may still be on its way, so they accept one
    more.
    """

    def __init__(self, key: str, spec: Spec, first_rank: int, workers: Sequence[int]) -> None:
        super().__init__(key, spec, first_rank, workers)
        self._count = dict.fromkeys(self.workers, 0)  # pushes by rank
        self._rounds: dict[int, _Round] = {}
        self._lost: dict[int, str] = {}
        self._first_header: tuple[int, wire.Header] | None = None

    def push(self, rank: int, value: Tensor) -> int:
        number, slowest = self._count[rank] + 1, min(self._count.values())
        lost = self._lost_in(number)
        if lost is not None:
            raise lost
        if number > slowest + OPEN_ROUNDS + (self.spec.shard_numel > 0 and self.spec.first > 0):
            raise ValueError(
                f"push {number} of key {self.key!r} is beyond {OPEN_ROUNDS} open rounds: ranks"
                f" {self._behind(slowest + 1)} have pushed {slowest}"
            )
        self._check_size(value)
        self._count[rank] = number
        now = self._rounds.setdefault(number, _Round())
        try:
            self._admit(rank, value, now)
        except CorruptPayload as error:
            where = f"{error.detail} (from rank {rank}, key {self.key!r}, round {number})"
            now.result = CorruptPayload(error.check, where)
            raise now.result from None
        except Exception as error:
            now.result = error
            raise
        finally:  # forget the rounds that nobody can pull any more
            slowest = min(self._count.values())
            self._rounds = {n: kept for n, kept in self._rounds.items() if n >= slowest}
        self.check(rank)
        now.pushes[rank] = value
        return 0

    def pull(self, rank: int, message: Message) -> None:
        self.spec.check_method(self.key, message.method, message.compressed)
        number = self._count[rank]
        if not number:
            raise ValueError(f"rank {rank} pulls key {self.key!r} before its first push")
        now = self._rounds[number]
        now.asked = now.asked or (rank, message.method, message.compressed)
        first, method, compressed = now.asked
        if method != message.method:
            self._differ("reduce_method", first, method, rank, message.method)
        elif compressed != message.compressed:
            self._differ("compressed", first, compressed, rank, message.compressed)
        self.check(rank)
        self._waiting.append((rank, number, message.request))

    def lose(self, rank: int, why: str) -> None:
        super().lose(rank, why)
        self._lost[rank] = why

    def cancel(self, rank: int) -> str:
        waits = [number for waiting, number, _ in self._waiting if waiting == rank]
        number = min(waits, default=self._count[rank])
        self._waiting = [pull for pull in self._waiting if pull[:2] != (rank, number)]
        missing = self._behind(number)
        return f"no push from ranks {missing} in round {number} of key {self.key!r}"

    def state(self) -> State:
        residual = self._packed.residual if self._packed is not None else None
        slowest, newest = min(self._count.values()), max(self._count.values())
        under_way = slowest < newest or (newest and self._rounds[newest].result is None)
        if residual is not None and under_way:
            raise ValueError(
                f"key {self.key!r} has a round under way ({slowest} pushes of ranks"
                f" {self._behind(slowest + 1)}): save when every worker has pulled its last round"
            )
        return State(self.steps + slowest, self.spec, None, residual)

    # ---- parts ----

    def _behind(self, number: int) -> list[int]:
        """Return the ranks that have not pushed a round."""
        return [rank for rank, count in self._count.items() if count < number]

    def _admit(self, rank: int, value: Tensor, now: _Round) -> None:
        """Check a payload, and compare it with the key's first one and the round's."""
        if self._packed is None:
            return
        header = self._packed.admit(value)
        self._first_header = self._first_header or (rank, header)
        first_rank, first = self._first_header
        for name in SETTINGS:
            mine, theirs = getattr(first, name), getattr(header, name)
            if mine != theirs:
                return self._differ(name, first_rank, mine, rank, theirs)
        for other_rank, other in list(now.pushes.items())[:1]:
            before = wire.parse(other.numpy())
            here, there = scale_bytes(value), scale_bytes(other)
            shared = self.spec.shares_scale and not (before.nonfinite or header.nonfinite)
            if before.step != header.step:
                self._differ("step", other_rank, before.step, rank, header.step)
            elif shared and here != there:
                self._differ("scale", other_rank, there[:16].hex(), rank, here[:16].hex())
        return None

    def _lost_in(self, number: int) -> PeerLost | None:
        """Return the error of a round that a lost worker has not pushed."""
        gone = [f"rank {r} {self._lost[r]}" for r in self._behind(number) if r in self._lost]
        where = f"round {number} of key {self.key!r} cannot be completed: {', '.join(gone)}"
        return PeerLost("pull", -1, 0.0, where) if gone else None

    def _answer(self, number: int) -> Tensor | Exception | None:
        now = self._rounds[number]
        if now.result is None:
            if self._behind(number):
                return self._lost_in(number)
            try:
                now.result = self._reduce(now)
            except Exception as error:  # noqa: BLE001 - every worker gets it, now and later
                now.result = error
            now.pushes.clear()
        return now.result

    def _reduce(self, now: _Round) -> Tensor:
        pushes = [now.pushes[rank] for rank in self.workers]
        _, method, compressed = now.asked or (0, None, False)
        if self._packed is None:
            values = [push.view(torch.float32) for push in pushes]
            return reduce_values(values, method or "sum").view(torch.uint8)
        mean = self._packed.average(pushes)
        if not compressed:
            return mean.view(torch.uint8)
        return self._packed.encode(mean, wire.parse(pushes[0].numpy()))
