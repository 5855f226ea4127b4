"""Read what the ranks left in the launcher's private folder, and say who failed first."""

from __future__ import annotations

import json
import signal
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How one rank ended. `status` is that of a shell: 128 + n after signal n."""

    rank: int
    host: str
    pid: int
    time_ns: int
    status: int
    signal: int
    traceback: str = ""

    def sentence(self) -> str:
        """Say how it ended, in one line."""
        who = f"rank {self.rank} (pid {self.pid} on {self.host})"
        if self.signal:
            return (
                f"{who} failed first: killed by {signal_name(self.signal)}, exit status"
                f" {self.status}"
            )
        return f"{who} failed first: exit status {self.status}"


def signal_name(number: int) -> str:
    """Return ``signal 9 (SIGKILL)``."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def ended(folder: Path) -> list[Ended]:
    """Return the ends on record, in order of time."""
    found = [
        Ended(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("ended.*")
    ]
    return sorted(found, key=lambda record: record.time_ns)


def first_failure(folder: Path) -> Ended | None:
    """Return the end of the rank that failed first, or None."""
    return next((record for record in ended(folder) if record.status), None)


def started(folder: Path) -> set[int]:
    """Return the ranks whose program was started."""
    return {int(path.suffix[1:]) for path in folder.glob("started.*")}


def segments(folder: Path) -> set[tuple[str, int]]:
    """Return path and inode of the shared memory that ranks of this host have noted."""
    noted = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("segments.*")]
    here = socket.gethostname()
    return {
        (path, inode)
        for record in noted
        if record["host"] == here
        for path, inode in record["files"]
    }
