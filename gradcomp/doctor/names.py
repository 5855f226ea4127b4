"""How long it takes to learn the name of an address: torch asks for it whenever a process first
connects to another (pytorch#159007).

A name server that does not answer costs 10 s there, at each start of each rank, before any timeout
of training has begun.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Lookup:
    """The name of a host's address, asked for in a thread, since nothing bounds the wait."""

    def __init__(self, host: str) -> None:
        self._begun, self._took_s = time.monotonic(), None  # type: float, float | None
        threading.Thread(
            target=self._ask, args=(host,), name="gradcomp-lookup", daemon=True
        ).start()

    def _ask(self, host: str) -> None:
        with contextlib.suppress(
            OSError, UnicodeError
        ):  # the second of a host's name that cannot be one
            address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
            socket.getnameinfo((f"::ffff:{address}", 0), 0)
            # in the form in which torch asks: what /etc/hosts says of the other counts for
            # nothing
        self._took_s = time.monotonic() - self._begun

    @property
    def seconds(self) -> float:
        """What it took, or has taken so far."""
        return time.monotonic() - self._begun if self._took_s is None else self._took_s
