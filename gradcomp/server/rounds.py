"""A synchronous key: round r is each worker's r-th push, and is reduced once all have pushed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradcomp.errors import CorruptPayload, PeerLost
from gradcomp.payload import wire
from gradcomp.server.messages import Message
from gradcomp.server.parameter import Answer, Mismatch, Parameter
from gradcomp.server.reduce import SETTINGS, PackedReducer, reduce_values, scale_bytes
from gradcomp.server.spec import Spec
from gradcomp.server.state import State

OPEN_ROUNDS = 2  # that not every worker has pushed


@dataclass
class _Round:
    """One push of every worker.

    Attributes:
        pushes: by rank; dropped once they are reduced.
        asked: (rank, reduce method, compressed) of the first pull.
        waiting: request numbers of the pulls that have no answer yet, by rank.
        error: of a payload that does not decode, or of a server that failed; every worker's pull
            gets it.
        result: of the reduction.
    """

    pushes: dict[int, Tensor] = field(default_factory=dict)
    asked: tuple[int, str | None, bool] | None = None
    waiting: dict[int, int] = field(default_factory=dict)
    error: Exception | None = None
    result: Tensor | None = None


class SynchronousParameter(Parameter):
    """A key whose pulls wait for every worker's push.

    At most two rounds are open, and the newest complete one is kept until the slowest worker has
    left it behind. The first shard of a key that is cut decides; a push that it has taken reaches
    the other shards, where the slowest worker's may still be on its way, so they take one more.
    """

    def __init__(self, key: str, spec: Spec, first_rank: int, workers: Sequence[int]) -> None:
        super().__init__(key, spec, first_rank, workers)
        self._count = dict.fromkeys(self.workers, 0)  # pushes by rank
        self._rounds: dict[int, _Round] = {}
        self._lost: dict[int, str] = {}
        self._packed = PackedReducer(spec, key) if spec.dtype == "uint8" else None
        self._first_header: tuple[int, wire.Header] | None = None

    def push(self, rank: int, value: Tensor) -> int:
        number, slowest = self._count[rank] + 1, min(self._count.values())
        lost = self._lost_in(number)
        if lost:
            raise lost
        if number > slowest + OPEN_ROUNDS + (self.spec.shard_numel > 0 and self.spec.first > 0):
            late = [r for r, count in self._count.items() if count == slowest]
            raise ValueError(
                f"push {number} of key {self.key!r} is beyond {OPEN_ROUNDS} open rounds: ranks"
                f" {late} have pushed {slowest}"
            )
        self.check_size(value)
        self._count[rank] = number
        now = self._rounds.setdefault(number, _Round())
        try:
            self._admit(rank, value, now)
        except CorruptPayload as error:
            where = f"{error.detail} (from rank {rank}, key {self.key!r}, round {number})"
            now.error = CorruptPayload(error.check, where)
            raise now.error from None
        except Exception as error:
            now.error = error
            raise
        finally:
            self._drop()
        self.check(rank)
        now.pushes[rank] = value
        return 0

    def pull(self, rank: int, message: Message) -> None:
        self.spec.check_method(self.key, message.method, message.compressed)
        if not self._count[rank]:
            raise ValueError(f"rank {rank} pulls key {self.key!r} before its first push")
        now = self._rounds[self._count[rank]]
        if now.asked is None:
            now.asked = (rank, message.method, message.compressed)
        first, method, compressed = now.asked
        if method != message.method:
            self._broken = Mismatch("reduce_method", first, method, rank, message.method)
        elif compressed != message.compressed:
            self._broken = Mismatch("compressed", first, compressed, rank, message.compressed)
        self.check(rank)
        now.waiting[rank] = message.request

    def settle(self) -> list[Answer]:
        answers = []
        for number, now in self._rounds.items():
            for rank, request in list(now.waiting.items()):
                result = self._answer(rank, number, now)
                if result is not None:
                    answers.append(Answer(rank, request, result))
                    del now.waiting[rank]
        return answers

    def lose(self, rank: int, why: str) -> None:
        self._lost[rank] = why
        for now in self._rounds.values():
            now.waiting.pop(rank, None)

    def cancel(self, rank: int) -> str:
        number = self._count[rank]
        if number in self._rounds:
            self._rounds[number].waiting.pop(rank, None)
        missing = [r for r, count in self._count.items() if count < number]
        return f"no push from ranks {missing} in round {number} of key {self.key!r}"

    def state(self) -> State:
        residual = self._packed.residual if self._packed is not None else None
        if residual is not None:
            slowest = min(self._count.values())
            missing = [rank for rank, count in self._count.items() if count == slowest]
            last = self._rounds.get(max(self._count.values()))
            if len(missing) < len(self._count) or (
                last is not None and last.result is None and last.error is None
            ):
                raise ValueError(
                    f"key {self.key!r} has a round under way ({slowest} pushes of ranks {missing}):"
                    " save when every worker has pulled its last round"
                )
        return State(self.steps + min(self._count.values()), self.spec, None, residual)

    def restore(self, state: State) -> None:
        super().restore(state)
        if self._packed is not None:
            self._packed.residual = state.residual

    # ---- parts
    # ----------------------------------------------------------------------------------------------

    def _admit(self, rank: int, value: Tensor, now: _Round) -> None:
        """Check a payload, and compare it with the key's first one and the round's."""
        if self._packed is None:
            return
        header = self._packed.admit(value)
        if self._first_header is None:
            self._first_header = (rank, header)
        first_rank, first = self._first_header
        for name in SETTINGS:
            if getattr(header, name) != getattr(first, name):
                self._broken = Mismatch(
                    name, first_rank, getattr(first, name), rank, getattr(header, name)
                )
                return
        for other_rank, other in now.pushes.items():
            before = wire.parse(other.numpy())
            if before.step != header.step:
                self._broken = Mismatch("step", other_rank, before.step, rank, header.step)
            elif self.spec.shares_scale and not (before.nonfinite or header.nonfinite):
                here, there = scale_bytes(value), scale_bytes(other)
                if here != there:
                    self._broken = Mismatch(
                        "scale", other_rank, there[:16].hex(), rank, here[:16].hex()
                    )
            return

    def _drop(self) -> None:
        """Forget the rounds that nobody can pull any more."""
        slowest = min(self._count.values())
        for number in [n for n in self._rounds if n < slowest]:
            del self._rounds[number]

    def _lost_in(self, number: int) -> PeerLost | None:
        """Return the error of a round that a lost worker has not pushed."""
        gone = [f"rank {r} {why}" for r, why in self._lost.items() if self._count[r] < number]
        where = f"round {number} of key {self.key!r} cannot be completed: {', '.join(gone)}"
        return PeerLost("pull", -1, 0.0, where) if gone else None

    def _answer(self, rank: int, number: int, now: _Round) -> Tensor | Exception | None:
        if self._broken is not None:
            return self._broken.seen_by(rank)
        if now.error is not None:
            return now.error
        if all(count >= number for count in self._count.values()):
            if now.result is None:
                try:
                    now.result = self._reduce(now)
                except Exception as error:  # noqa: BLE001 - no memory, say: all workers get the same, now and later
                    now.error = error
                now.pushes.clear()
            return now.error or now.result
        return self._lost_in(number)

    def _reduce(self, now: _Round) -> Tensor:
        pushes = [now.pushes[rank] for rank in self.workers]
        _, method, compressed = now.asked or (0, None, False)
        if self._packed is None:
            return reduce_values([p.view(torch.float32) for p in pushes], method or "sum").view(
                torch.uint8
            )
        mean = self._packed.average(pushes)
        if not compressed:
            return mean.view(torch.uint8)
        return self._packed.encode(mean, wire.parse(pushes[0].numpy()))
