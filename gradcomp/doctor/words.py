"""Words from one rank to another through a store of torch.distributed. They need no collective: a
silent rank is known by its number, and no rank waits for it. Every word has a key and is sent once.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

LONGEST_PAUSE_S = 0.02


class Words:
    """What JSON can hold, from rank to rank.

    Args:
        store: that all ranks share.
        rank: of this process.

    Raises (every method): ConnectionError: the store does not answer.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self.rank = store, rank

    def post(self, to: int, key: str, data: object) -> None:
        """Leave `data` for rank `to`, without waiting."""
        with _answers():
            self._store.set(f"{key}/{self.rank}/{to}", json.dumps(data))

    def has(self, source: int, key: str) -> bool:
        """Whether rank `source` has left a word for this one."""
        with _answers():
            return bool(self._store.check([f"{key}/{source}/{self.rank}"]))

    def collect(self, sources: Iterable[int], key: str, timeout_s: float) -> dict[int, Any]:
        """Return what ranks have left for this one, by rank; after `timeout_s` without those
        that have left nothing.
        """
        found: dict[int, Any] = {}
        missing, deadline, pause = set(sources), time.monotonic() + timeout_s, 0.0005
        while True:
            for rank in [rank for rank in sorted(missing) if self.has(rank, key)]:
                with _answers():
                    found[rank] = json.loads(self._store.get(f"{key}/{rank}/{self.rank}"))
                missing.remove(rank)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)


@contextlib.contextmanager
def _answers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        text = f"the ranks' store does not answer: {str(error).splitlines()[0]}"
        raise ConnectionError(text) from error
