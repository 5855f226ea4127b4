"""Communicators for ranks that are threads of one process and share memory under one lock.

They are meant for tests at large world sizes and for trying out codecs without a cluster.
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

from gradcomp.comm import base
from gradcomp.comm.base import Channel, Communicator, Counts, Message, RankGone, Work


@dataclass
class _Slot:
    """One collective in progress: the input of each rank, and how many ranks have the result."""

    given: dict[int, list[Tensor]] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    fetched: int = 0


class _Board:
    """Shared state of the ranks of one group, guarded by `changed`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.slots: dict[tuple[Channel, int], _Slot] = {}
        self.gone: dict[int, str] = {}  # ranks that were closed or aborted, and the reason
        self.subsets: dict[tuple[tuple[int, ...], int], _Board] = {}
        self.mail: list[deque[Message]] = [deque() for _ in range(world_size)]

    def lost(self, rank: int) -> RankGone:
        reason = self.gone[rank]
        return RankGone(rank, what=base.gave_up(reason)) if reason else RankGone(rank)


class _LocalWork(Work):
    def __init__(
        self, board: _Board, key: tuple[Channel, int], fetch: Callable[[_Slot], None]
    ) -> None:
        self._board, self._key, self._fetch = board, key, fetch
        self._slot = board.slots[key]

    def _missing(self) -> list[int]:
        """Return the ranks that have not started the collective."""
        return [rank for rank in range(self._board.world_size) if rank not in self._slot.given]

    def is_done(self) -> bool:
        with self._board.changed:
            missing = self._missing()
            return not missing or any(rank in self._board.gone for rank in missing)

    def wait(self, timeout_s: float) -> None:
        board, slot, deadline = self._board, self._slot, time.monotonic() + timeout_s
        with board.changed:
            while missing := self._missing():
                for rank in missing:
                    if rank in board.gone:
                        raise board.lost(rank)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no answer from ranks {missing}")
                board.changed.wait(left)
            if len(slot.kinds) > 1:
                raise ConnectionError(f"ranks started different collectives: {sorted(slot.kinds)}")
            self._fetch(slot)
            slot.fetched += 1
            if slot.fetched == board.world_size:
                del board.slots[self._key]


class Sent(Work):
    """A message or collective that is complete."""

    def wait(self, timeout_s: float) -> None:
        return

    def is_done(self) -> bool:
        return True


class LocalCommunicator(Communicator):
    """One rank of a group of threads in this process. `group` creates all ranks of a group."""

    def __init__(self, board: _Board, rank: int) -> None:
        self._board, self.rank, self.world_size = board, rank, board.world_size
        self._started = dict.fromkeys(Channel, 0)
        self._subsets: Counter[tuple[int, ...]] = Counter()
        self._reported: set[int] = set()  # ranks for which `receive` has raised RankGone

    @classmethod
    def group(cls, world_size: int) -> list[LocalCommunicator]:
        """Return the communicators of a new group, in rank order, for one thread each.

        Raises:
            ValueError: `world_size` is below 1.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        board = _Board(world_size)
        return [cls(board, rank) for rank in range(world_size)]

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        def fetch(slot: _Slot) -> None:
            stack = [given[0].numpy() for given in slot.given.values()]
            np.maximum.reduce(stack, out=values.numpy())

        return self._start("max", [values.clone()], channel, fetch)

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        runs = list(torch.split(send.clone(), list(send_nbytes)))
        return self._start("all_to_all", runs, channel, self._join(self.rank, recv, recv_nbytes))

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        nbytes = [send.numel()] * self.world_size
        return self._start("all_gather", [send.clone()], channel, self._join(0, recv, nbytes))

    def _join(self, number: int, recv: Tensor, nbytes: Counts) -> Callable[[_Slot], None]:
        """Return a function that concatenates slice `number` of every rank's input into `recv`."""

        def fetch(slot: _Slot) -> None:
            runs = [slot.given[rank][number] for rank in range(self.world_size)]
            sizes = [run.numel() for run in runs]
            if sizes != list(nbytes):
                raise ConnectionError(f"ranks sent {sizes} bytes, {list(nbytes)} expected")
            torch.cat(runs, out=recv)

        return fetch

    def _start(
        self, kind: str, data: list[Tensor], channel: Channel, fetch: Callable[[_Slot], None]
    ) -> Work:
        with self._board.changed:
            if self.rank in self._board.gone:
                raise ConnectionError("this communicator is closed, or has been aborted")
            key = (channel, self._started[channel])
            self._started[channel] += 1
            slot = self._board.slots.setdefault(key, _Slot())
            slot.given[self.rank] = data
            slot.kinds.add(kind)
            self._board.changed.notify_all()
            return _LocalWork(self._board, key, fetch)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> LocalCommunicator:
        members, board = tuple(ranks), self._board
        with board.changed:
            self._subsets[members] += 1  # the k-th call for `members` is matched on all ranks
            key = members, self._subsets[members]
            inner = board.subsets.setdefault(key, _Board(len(members)))
        comm = LocalCommunicator(inner, members.index(self.rank))
        comm.timeout_s = timeout_s
        return comm

    def start_send(self, message: Tensor, to: int) -> Work:
        self.check_peer(to)
        with self._board.changed:
            if to in self._board.gone:
                raise self._board.lost(to)
            self._board.mail[to].append((self.rank, message.clone()))
            self._board.changed.notify_all()
        return Sent()

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        board, deadline = self._board, time.monotonic() + timeout_s
        with board.changed:
            while True:
                mail = board.mail[self.rank]
                for number, (sender, message) in enumerate(mail):
                    if source in (None, sender):
                        del mail[number]
                        if message.numel() > max_nbytes:
                            raise base.too_long(sender, message.numel(), max_nbytes)
                        return sender, message
                base.report_gone(board.gone.keys() - {self.rank}, self._reported, source)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise base.no_message(source)
                board.changed.wait(left)

    def abort(self, reason: str = "") -> None:
        """Make every wait of other ranks for this rank raise ConnectionError."""
        with self._board.changed:
            self._board.gone.setdefault(self.rank, reason)
            self._board.changed.notify_all()

    def close(self) -> None:
        """Leave the group; waits of other ranks for this rank raise ConnectionError."""
        self.abort()
