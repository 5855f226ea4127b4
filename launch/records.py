"""Read the ranks' records in the launcher's private folder, and find the rank that failed first."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import NamedTuple


class Ended(NamedTuple):
    """Record of a rank's end. `status` is an exit status as in a shell: 128 + n after signal n."""

    rank: int
    host: str
    pid: int
    time_ns: int
    status: int
    signal: int
    traceback: str = ""

    def sentence(self) -> str:
        """Return a sentence on how the rank ended."""
        killed = f"killed by {signal_name(self.signal)}, " if self.signal else ""
        return (
            f"rank {self.rank} (pid {self.pid} on {self.host}) failed first: {killed}exit status"
            f" {self.status}"
        )


def signal_name(number: int) -> str:
    """Return number and name of a signal as text, such as ``signal 9 (SIGKILL)``."""
    names = {known.value: f" ({known.name})" for known in signal.Signals}
    return f"signal {number}{names.get(number, '')}"


def ended(folder: Path) -> list[Ended]:
    """Return the records of all ranks that ended, ordered by time."""
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("ended.*")]
    return sorted((Ended(**json.loads(text)) for text in texts), key=lambda one: one.time_ns)


def first_failure(folder: Path) -> Ended | None:
    """Return the record of the rank that failed first, or None if none failed."""
    return next((record for record in ended(folder) if record.status), None)


def started(folder: Path) -> set[int]:
    """Return the ranks whose program was started."""
    return {int(path.suffix[1:]) for path in folder.glob("started.*")}
