"""N ranks in one process: each rank is a thread with its own communicator, sharing memory under one
lock.

For tests at world sizes that no test machine has processes for, and for trying out codecs without a
cluster.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gradcomp.comm.base import (
    Channel,
    Communicator,
    RankGone,
    Work,
    gave_up,
    no_message,
    tell_gone,
    too_long,
)


@dataclass
class _Slot:
    """One collective under way: what each rank gave, and how many have fetched their result."""

    given: dict[int, list[Tensor]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    fetched: int = 0


class _Board:
    """Where the ranks of one group meet."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.slots: dict[tuple[Channel, int], _Slot] = {}
        self.gone: dict[int, str] = {}  # why a rank takes part no more
        self.subsets: dict[tuple[tuple[int, ...], int], _Board] = {}
        self.mail: dict[int, deque[tuple[int, Tensor]]] = {
            rank: deque() for rank in range(world_size)
        }


class _LocalWork(Work):
    def __init__(
        self, board: _Board, slot_key: tuple[Channel, int], fetch: Callable[[_Slot], None]
    ) -> None:
        self._board, self._slot_key, self._fetch = board, slot_key, fetch

    def wait(self, timeout_s: float) -> None:
        board, deadline = self._board, time.monotonic() + timeout_s
        with board.changed:
            slot = board.slots[self._slot_key]
            while len(slot.given) < board.world_size:
                missing = sorted(set(range(board.world_size)) - slot.given.keys())
                lost = [rank for rank in missing if rank in board.gone]
                if lost:
                    raise _gone(lost[0], board.gone[lost[0]])
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no word from ranks {missing}")
                board.changed.wait(left)
            if len(slot.kinds) > 1:
                raise ConnectionError(f"ranks started different collectives: {sorted(slot.kinds)}")
            self._fetch(slot)
            slot.fetched += 1
            if slot.fetched == board.world_size:
                del board.slots[self._slot_key]


def _gone(rank: int, reason: str) -> RankGone:
    return RankGone(rank, what=gave_up(reason)) if reason else RankGone(rank)


class _Sent(Work):
    def wait(self, timeout_s: float) -> None:
        return

    def is_done(self) -> bool:
        return True


class LocalCommunicator(Communicator):
    """One rank of a group inside this process; make them all at once with `group`."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board = board
        self.rank = rank
        self.world_size = board.world_size
        self._started = dict.fromkeys(Channel, 0)
        self._subsets: Counter[tuple[int, ...]] = Counter()
        self._told: set[int] = set()  # ranks whose end `receive` has reported

    @classmethod
    def group(cls, world_size: int) -> list[LocalCommunicator]:
        """Return the communicators of `world_size` ranks, one for each thread that plays a rank.

        Raises:
            ValueError: `world_size` below 1.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        board = _Board(world_size)
        return [cls(board, rank) for rank in range(world_size)]

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        def fetch(slot: _Slot) -> None:
            stack = [given[0].numpy() for given in slot.given.values()]
            np.maximum.reduce(stack, out=values.numpy())

        return self._start("max", [values.clone()], channel, fetch)

    def start_all_to_all(
        self,
        send: Tensor,
        send_nbytes: Sequence[int],
        recv: Tensor,
        recv_nbytes: Sequence[int],
        channel: Channel,
    ) -> Work:
        def fetch(slot: _Slot) -> None:
            runs = [slot.given[k][self.rank] for k in range(self.world_size)]
            sizes = [run.numel() for run in runs]
            if sizes != list(recv_nbytes):
                raise ConnectionError(f"ranks sent {sizes} bytes, {list(recv_nbytes)} expected")
            torch.cat(runs, out=recv)

        runs = list(torch.split(send.clone(), list(send_nbytes)))
        return self._start("all_to_all", runs, channel, fetch)

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        def fetch(slot: _Slot) -> None:
            runs = [slot.given[k][0] for k in range(self.world_size)]
            if any(run.numel() != send.numel() for run in runs):
                raise ConnectionError(
                    f"ranks sent {[r.numel() for r in runs]} bytes, {send.numel()} expected"
                )
            torch.cat(runs, out=recv)

        return self._start("all_gather", [send.clone()], channel, fetch)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> LocalCommunicator:
        members, board = tuple(ranks), self._board
        with board.changed:
            self._subsets[members] += 1  # a rank's k-th of these meets the others' k-th
            slot_key = members, self._subsets[members]
            return LocalCommunicator(
                board.subsets.setdefault(slot_key, _Board(len(members))), members.index(self.rank)
            )

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        with self._board.changed:
            if to in self._board.gone:
                raise _gone(to, self._board.gone[to])
            self._board.mail[to].append((self.rank, message.clone()))
            self._board.changed.notify_all()
        return _Sent()

    def receive(
        self, timeout_s: float, source: int | None = None, *, max_nbytes: int
    ) -> tuple[int, Tensor]:
        board, deadline = self._board, time.monotonic() + timeout_s
        with board.changed:
            while True:
                mail = board.mail[self.rank]
                for number, (sender, message) in enumerate(mail):
                    if source in (None, sender):
                        del mail[number]
                        if message.numel() > max_nbytes:
                            raise too_long(sender, message.numel(), max_nbytes)
                        return sender, message
                tell_gone(board.gone.keys() - {self.rank}, self._told, source)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise no_message(source)
                board.changed.wait(left)

    def abort(self, reason: str = "") -> None:
        """Make every wait of the other ranks for this one end in ConnectionError."""
        with self._board.changed:
            self._board.gone.setdefault(self.rank, reason)
            self._board.changed.notify_all()

    def close(self) -> None:
        """Leave the group; peers that wait for this rank are told."""
        self.abort()

    def _start(
        self, kind: str, data: list[Tensor], channel: Channel, fetch: Callable[[_Slot], None]
    ) -> Work:
        with self._board.changed:
            slot_key = (channel, self._started[channel])
            self._started[channel] += 1
            slot = self._board.slots.setdefault(slot_key, _Slot())
            slot.given[self.rank] = data
            slot.kinds.add(kind)
            self._board.changed.notify_all()
        return _LocalWork(self._board, slot_key, fetch)
