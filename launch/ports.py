"""A port for the ranks of a job to meet at, on this host."""

from __future__ import annotations

import random
import socket

from .variables import FIRST_PORT, PORTS


def free_port() -> int:
    """Return a port that nobody has, out of those that Linux hands out to nobody by itself: it is
    free until it is asked for by number.

    Raises:
        OSError: of 100 of them none is free.
    """
    for port in random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + PORTS), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"of 100 ports between {FIRST_PORT} and {FIRST_PORT + PORTS} none is free")
