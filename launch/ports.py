"""Free port on this host for the rendezvous of a job's ranks."""

from __future__ import annotations

import contextlib
import random
import socket

from .variables import FIRST_PORT, PORTS


def free_port() -> int:
    """Return a port that no process uses. It is below the range that Linux assigns by itself, so it
    stays free unless a process binds it by number.

    Raises:
        OSError: 100 ports were tried, and all are in use.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + PORTS), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"of 100 ports between {FIRST_PORT} and {FIRST_PORT + PORTS} none is free")
