"""A rank of `gradcomp.bench.train` as a new process, on a host, forked from one that has
imported torch: that takes a rank of its own seconds.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from gradcomp.bench.ranks import become_rank, warm_context
from gradcomp.bench.train import rank

CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000
NAMESPACES = "/var/run/netns"  # where `ip netns add` leaves them


class Forked:
    """A process that runs ``rank.main([word])``, the leader of a session of its own.

    Args:
        word: what it is to do.
        variables: its environment.
        host: the namespace that is its host, "" for this one.

    Attributes:
        pid: of the process.
        stdout, stderr: what it says.
    """

    def __init__(self, word: str, variables: Mapping[str, str], host: str = "") -> None:
        warm = warm_context(rank.__name__)
        (out, its_out), (err, its_err) = warm.Pipe(duplex=False), warm.Pipe(duplex=False)
        self._process = warm.Process(
            target=_begin, args=(word, dict(variables), host, its_out, its_err), daemon=True
        )
        self._process.start()
        self.pid: int = self._process.pid
        for end in (its_out, its_err):
            end.close()
        self.stdout, self.stderr = _reader(out), _reader(err)

    def poll(self) -> int | None:
        """Return its exit status, minus the signal that ended it; None while it runs."""
        status: int | None = self._process.exitcode
        return status

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, so long at most."""
        self._process.join(timeout_s)


def _reader(end: Any) -> TextIO:
    with end:
        return os.fdopen(os.dup(end.fileno()), encoding="utf-8", errors="replace")


def _begin(word: str, variables: Mapping[str, str], host: str, out: Any, err: Any) -> None:
    os.setsid()
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    multiprocessing.current_process().daemon = False  # a hook may start processes of its own
    if host:
        _enter(host)
    become_rank(variables)
    sys.exit(rank.main([word]))


def _enter(host: str) -> None:
    """Move this process, which has no other thread yet, to a host and give it that host's name."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"{NAMESPACES}/{host}", encoding="ascii") as there:
        failed = libc.setns(there.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter {host}")
    socket.sethostname(host)
