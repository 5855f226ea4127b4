"""What an exchange needs of a transport: three collectives, started without waiting, on separate channels.

A channel is an ordered lane of its own (a process group, a duplicated MPI communicator): collectives of one channel start
in the same order on every rank, collectives of different channels may overtake each other. One pipeline stage uses one
channel, which is why overlapped exchanges cannot deadlock (docs/explanation/overlap.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor


class Channel(IntEnum):
    """One ordered lane for each collective of an exchange."""

    SCALE = 0
    FIRST = 1
    SECOND = 2


class Work(ABC):
    """A collective that has been started."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Block until the result stands in the receive buffer.

        Raises:
            TimeoutError: nothing after `timeout_s` seconds.
            ConnectionError: a peer is gone.
        """


class Communicator(ABC):
    """A fixed set of ranks that exchange bytes.

    Buffers are contiguous CPU tensors; the caller leaves them alone until `Work.wait` returns. Every rank must start the
    same collectives in the same order on each channel.

    Attributes:
        rank: number of this process in the set.
        world_size: number of processes in the set.
    """

    rank: int
    world_size: int

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

    def abort(self) -> None:
        """Tell the peers, where the transport can, that this rank will not take part any more."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the communicator holds. Closing twice is harmless."""

    def all_gather_bytes(self, data: bytes, timeout_s: float, channel: Channel = Channel.SCALE) -> list[bytes]:
        """Return every rank's `data` (of the same length everywhere), waiting for it."""
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        recv = torch.empty(self.world_size * len(data), dtype=torch.uint8)
        self.start_all_gather(send, recv, channel).wait(timeout_s)
        whole = recv.numpy().tobytes()
        return [whole[i : i + len(data)] for i in range(0, len(whole), len(data))]
