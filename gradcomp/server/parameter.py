"""One key on its server: what has been pushed, who waits, and what they get."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gradcomp.errors import PeerMismatch
from gradcomp.server.messages import Message
from gradcomp.server.spec import Spec
from gradcomp.server.state import State


@dataclass(frozen=True)
class Answer:
    """What a waiting pull gets: a body, or an error."""

    rank: int
    request: int
    result: Tensor | Exception


@dataclass(frozen=True)
class Mismatch:
    """Two clients that use one key with different settings."""

    field: str
    first_rank: int
    first: object
    other_rank: int
    other: object

    def seen_by(self, rank: int) -> PeerMismatch:
        """Return the error as a rank sees it: the other side is the one that differs."""
        if rank == self.other_rank:
            return PeerMismatch(self.field, self.first_rank, self.other, self.first, first=None)
        return PeerMismatch(self.field, self.other_rank, self.first, self.other, first=None)


class Parameter(ABC):
    """One key.

    A key whose clients turn out to have different settings is broken for good: every request gets
    `PeerMismatch`.

    Args:
        key: its name.
        spec: as its first client has it.
        first_rank: that client.
        workers: every rank that is no server.

    Attributes:
        steps: rounds, or pushes to an asynchronous key, before this server began: of the checkpoint
            that it read.
    """

    def __init__(self, key: str, spec: Spec, first_rank: int, workers: Sequence[int]) -> None:
        self.key, self.spec, self.workers = key, spec, tuple(workers)
        self._first_rank = first_rank
        self._broken: Mismatch | None = None
        self._restored = False
        self.steps = 0

    def join(self, rank: int, spec: Spec) -> None:
        """Take a further client that wants the key to be like `spec`.

        Raises:
            PeerMismatch: it is otherwise.
        """
        if (
            self._restored
        ):  # initial values count no more, so any will do; but the same at all clients
            self._restored = False
            self.spec = replace(self.spec, value_crc=spec.value_crc)
        field = self.spec.difference(spec)
        if field is not None and self._broken is None:
            mine, theirs = self.spec.settings()[field], spec.settings()[field]
            self._broken = Mismatch(field, self._first_rank, mine, rank, theirs)
        self.check(rank)

    def check(self, rank: int) -> None:
        """Raise PeerMismatch if the key is broken."""
        if self._broken is not None:
            raise self._broken.seen_by(rank)

    def check_size(self, value: Tensor) -> None:
        """Raise ValueError unless a pushed value has the bytes of this key."""
        if value.numel() != self.spec.nbytes:
            shape, nbytes = self.spec.shape, self.spec.nbytes
            raise ValueError(
                f"key {self.key!r} takes {nbytes} bytes (shape {shape}), got {value.numel()}"
            )

    def state(self) -> State:
        """Return what a checkpoint has to hold.

        Raises:
            ValueError: a round is under way that would be lost.
        """
        return State(self.steps, self.spec)

    def restore(self, state: State) -> None:
        """Take over what a checkpoint holds; nobody has used this parameter yet."""
        self.steps = state.steps
        self._restored = True

    @abstractmethod
    def push(self, rank: int, value: Tensor) -> int:
        """Take a value, ``(nbytes,)`` uint8, of a worker; return its staleness."""

    @abstractmethod
    def pull(self, rank: int, message: Message) -> None:
        """Note that a worker waits; `settle` answers it."""

    @abstractmethod
    def settle(self) -> list[Answer]:
        """Return the answers that can be given now."""

    def lose(self, rank: int, why: str) -> None:
        """Note that a worker pushes no more."""

    def cancel(self, rank: int) -> str:
        """Forget that a worker waits; return what it waited for."""
        return ""


class Agreement(Parameter):
    """What the clients agree on about a key that is cut into shards; the shards are parameters
    of their own.
    """

    def push(self, rank: int, value: Tensor) -> int:
        raise ValueError(f"key {self.key!r} is cut into shards of {self.spec.shard_numel} elements")

    def pull(self, rank: int, message: Message) -> None:
        self.push(rank, message.data())

    def settle(self) -> list[Answer]:
        return []
