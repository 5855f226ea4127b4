"""Words from one rank to another that need no collective: who is silent is known by name, and
nobody waits for others.

`gradcomp.doctor` speaks by them before it trusts anything else of a transport. Every word has a
key, and is sent once.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np

from gradcomp.comm import mpi as over_mpi
from gradcomp.comm.channels import FORWARD_S, end_job

LONGEST_PAUSE_S = 0.02


class Notices(ABC):
    """Words between the ranks of a job.

    Attributes:
        rank, world_size: as they say.
    """

    rank: int
    world_size: int

    @abstractmethod
    def post(self, to: int, key: str, data: bytes) -> None:
        """Leave `data` for rank `to`, without waiting.

        Raises:
            ConnectionError: nothing can be left any more.
        """

    @abstractmethod
    def look(self, source: int, key: str) -> bytes | None:
        """Return what rank `source` has left for this one, None if it is not there yet.

        Raises:
            ConnectionError: as `post`.
        """

    def take(self, source: int, key: str, timeout_s: float) -> bytes | None:
        """Return what rank `source` has left for this one, waiting for it; None after
        `timeout_s`.
        """
        return self.collect([source], key, timeout_s).get(source)

    def collect(self, sources: Iterable[int], key: str, timeout_s: float) -> dict[int, bytes]:
        """Return what ranks have left for this one, by rank; after `timeout_s` without those
        that have not.
        """
        found: dict[int, bytes] = {}
        missing, deadline, pause = list(sources), time.monotonic() + timeout_s, 0.0005
        while True:
            for rank in list(missing):
                data = self.look(rank, key)
                if data is not None:
                    found[rank] = data
                    missing.remove(rank)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)

    def end(self, *, at_once: bool) -> None:
        """Let the process end; `at_once`: although some rank is silent, which an MPI would wait
        for.
        """


class StoreNotices(Notices):
    """Words by way of a store of torch.distributed."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size

    def post(self, to: int, key: str, data: bytes) -> None:
        with _answers():
            self._store.set(f"{key}/{self.rank}/{to}", data)

    def look(self, source: int, key: str) -> bytes | None:
        name = f"{key}/{source}/{self.rank}"
        with _answers():
            return bytes(self._store.get(name)) if self._store.check([name]) else None


@contextlib.contextmanager
def _answers() -> Any:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(
            f"the ranks' store does not answer: {str(error).splitlines()[0]}"
        ) from error


class MpiNotices(Notices):
    """Words by MPI's own messages, beside whatever communicators there are.

    Raises:
        ImportError, RuntimeError: there is no MPI here.
        ValueError: MPI sees this process alone, but something else has started it as one of
            several.
    """

    def __init__(self) -> None:
        self._mpi = over_mpi.load()
        self._comm = self._mpi.COMM_WORLD
        self.rank, self.world_size = self._comm.Get_rank(), self._comm.Get_size()
        self._sent: list[Any] = []

    def post(self, to: int, key: str, data: bytes) -> None:
        note = np.frombuffer(data, np.uint8)
        self._sent += [note, self._comm.Isend([note, self._mpi.BYTE], to, _tag(key))]

    def look(self, source: int, key: str) -> bytes | None:
        status = self._mpi.Status()
        found = self._comm.Improbe(source, _tag(key), status)
        if found is None:
            return None
        note = np.zeros(status.Get_count(self._mpi.BYTE), np.uint8)
        found.Recv([note, self._mpi.BYTE])
        return note.tobytes()

    def end(self, *, at_once: bool) -> None:
        if at_once:
            time.sleep(FORWARD_S)
            end_job(self._mpi)


def _tag(key: str) -> int:
    return zlib.crc32(key.encode()) % over_mpi.TAGS
