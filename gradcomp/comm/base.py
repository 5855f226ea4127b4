"""What an exchange needs of a transport: three collectives, started without waiting, on separate channels; for a
parameter server also messages from one rank to another.

A channel is an ordered lane of its own (a process group, a duplicated MPI communicator): collectives of one channel start
in the same order on every rank, collectives of different channels may overtake each other. One pipeline stage uses one
channel, which is why overlapped exchanges cannot deadlock (docs/explanation/overlap.md).
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Channel(IntEnum):
    """One ordered lane for each collective of an exchange, and one for all that ranks agree on beside exchanges."""

    SCALE = 0
    FIRST = 1
    SECOND = 2
    CONTROL = 3


class RankGone(ConnectionError):
    """A peer that will not send or receive any more.

    Attributes:
        rank: which one.
    """

    def __init__(self, rank: int, detail: str = "") -> None:
        super().__init__(f"rank {rank} is gone{f': {detail}' if detail else ''}")
        self.rank = rank


def tell_gone(gone: Collection[int], told: set[int], source: int | None) -> None:
    """Raise RankGone for `source`, or, where that is None, for a rank in `gone` that is not in `told` yet, once."""
    if source is not None and source in gone:
        raise RankGone(source)
    news = set(gone) - told if source is None else set()
    if news:
        told.add(min(news))
        raise RankGone(min(news))


def no_message(source: int | None) -> TimeoutError:
    """Return what `Communicator.receive` raises after its timeout."""
    return TimeoutError(f"no message from {'any rank' if source is None else f'rank {source}'}")


def too_long(sender: int, nbytes: int, max_nbytes: int) -> ValueError:
    """Return what `Communicator.receive` raises for a message that was dropped."""
    return ValueError(f"rank {sender} sent {nbytes} bytes, at most {max_nbytes} expected")


class Work(ABC):
    """A collective, or a message, that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block until the result stands in the receive buffer.

        Raises:
            TimeoutError: nothing after `timeout_s` seconds.
            ConnectionError: a peer is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return at once, without waiting and without ending anything."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell")


class Communicator(ABC):
    """A fixed set of ranks that exchange bytes.

    Buffers are contiguous CPU tensors; the caller leaves them alone until `Work.wait` returns. Every rank must start the
    same collectives in the same order on each channel.

    Attributes:
        rank: number of this process in the set.
        world_size: number of processes in the set.
        timeout_s: seconds that its users wait for a peer unless they are told otherwise.
    """

    rank: int
    world_size: int
    timeout_s: float = 300.0

    def check_overlap(self) -> None:
        """Raise RuntimeError where this rank cannot start collectives from several threads."""

    @property
    def kept(self) -> dict[Any, Any]:
        """What callers keep with this communicator (buffers, step counters); it goes when the communicator goes."""
        return self.__dict__.setdefault("_kept", {})  # type: ignore[no-any-return]

    @abstractmethod
    def start_max(self, values: Tensor, channel: Channel) -> Work:
        """Begin to replace `values`, ``(n,)`` int32, by the elementwise maximum over all ranks."""

    @abstractmethod
    def start_all_to_all(
        self, send: Tensor, send_nbytes: Sequence[int], recv: Tensor, recv_nbytes: Sequence[int], channel: Channel
    ) -> Work:
        """Begin to send rank k the k-th run of `send` (uint8) and to receive its run for this rank into `recv`."""

    @abstractmethod
    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        """Begin to gather `send`, ``(n,)`` uint8, of all ranks into `recv`, ``(world_size * n,)``."""

    def check_peer(self, to: int) -> None:
        """Raise ValueError unless `to` is another rank."""
        if not 0 <= to < self.world_size or to == self.rank:
            raise ValueError(f"rank {self.rank} of {self.world_size} cannot send to rank {to}")

    def subset(self, ranks: Sequence[int], timeout_s: float) -> Communicator:
        """Return a communicator of `ranks`, this one among them, numbered in that order. Collective among them."""
        raise NotImplementedError(f"{type(self).__name__} makes no communicators of some of its ranks")

    def start_send(self, message: Tensor, to: int) -> Work:
        """Begin to send `message`, ``(n,)`` uint8, to rank `to`; messages of one pair of ranks arrive in order."""
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> tuple[int, Tensor]:
        """Wait for a message from rank `source`, or from any rank: return (its sender, the message, ``(n,)`` uint8).

        Raises:
            TimeoutError: nothing after `timeout_s` seconds; a later call may still receive.
            RankGone: a sender is gone (with any source: told once for each); the others can still be heard.
            ValueError: a message of more than `max_nbytes`; it is dropped unread.
        """
        raise NotImplementedError(f"{type(self).__name__} sends no messages from rank to rank")

    def abort(self) -> None:
        """Tell the peers, where the transport can, that this rank will not take part any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds. Closing twice is harmless."""

    def all_gather_bytes(self, data: bytes, timeout_s: float, channel: Channel = Channel.CONTROL) -> list[bytes]:
        """Return every rank's `data` (of the same length everywhere), waiting for it."""
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        recv = torch.empty(self.world_size * len(data), dtype=torch.uint8)
        self.start_all_gather(send, recv, channel).wait(timeout_s)
        whole = recv.numpy().tobytes()
        return [whole[i : i + len(data)] for i in range(0, len(whole), len(data))]

    def identity(self, timeout_s: float) -> bytes:
        """Return 16 bytes that the ranks of this communicator, and no others, have in common. Collective at first.

        Raises:
            TimeoutError, ConnectionError: as `Work.wait`.
        """
        if "identity" not in self.kept:
            drawn = self.all_gather_bytes(secrets.token_bytes(16), timeout_s)
            self.kept["identity"] = hashlib.blake2b(b"".join(drawn), digest_size=16).digest()
        return bytes(self.kept["identity"])
