"""A port for the ranks of a job to meet at, on this host."""

from __future__ import annotations

import contextlib
import random
import socket

from .variables import FIRST_PORT, PORTS


def free_port() -> int:
    """Return a port that no process uses, of those that Linux does not hand out by itself: it stays
    free until a process asks for it by number.

    Raises:
        OSError: 100 ports that were tried are in use.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + PORTS), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError(f"of 100 ports between {FIRST_PORT} and {FIRST_PORT + PORTS} none is free")
