"""Messages between ranks through a store of torch.distributed, without collectives: a silent rank
is identified by its number and blocks no other rank. Every message has a key and is sent once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from gradcomp.comm.base import first_line

LONGEST_PAUSE_S = 0.02


class Words:
    """Channel for JSON messages between ranks. Every method raises ConnectionError if the store of
    torch.distributed does not answer.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self.rank = store, rank

    def post(self, to: int, key: str, data: object) -> None:
        """Send `data` to rank `to` without waiting for it."""
        self._ask("set", f"{key}/{self.rank}/{to}", json.dumps(data))

    def has(self, source: int, key: str) -> bool:
        """Return whether rank `source` has sent a message with this key to this rank."""
        return bool(self._ask("check", [f"{key}/{source}/{self.rank}"]))

    def collect(self, sources: Iterable[int], key: str, timeout_s: float) -> dict[int, Any]:
        """Return the messages of `sources` by rank; wait for them up to `timeout_s` seconds."""
        found: dict[int, Any] = {}
        missing, deadline, pause = set(sources), time.monotonic() + timeout_s, 0.0005
        while True:
            for rank in [rank for rank in sorted(missing) if self.has(rank, key)]:
                found[rank] = json.loads(self._ask("get", f"{key}/{rank}/{self.rank}"))
                missing.remove(rank)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._store, method)(*arguments)
        except RuntimeError as error:
            raise ConnectionError(
                f"the ranks' store does not answer: {first_line(error)}"
            ) from error
