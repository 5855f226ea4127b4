"""Which rank of a group has ended, is stopped, or cannot be reached, once a collective has failed.

Every process has a socket that listens. Connecting to it is up to the kernel: it answers for a
process that computes, sleeps or is stopped, and refuses at once where the process has ended. So no
thread has to run, and a busy rank is not taken for a lost one. Connections are accepted only to
make room for more, when the process itself looks for a lost rank.
A communicator without a store for its notes has such a socket, too (`make_socket`), which is closed
with it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import select
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradcomp.comm.addresses import host_identity, listen, listen_at
from gradcomp.comm.base import CLOSED

PATIENCE_S = 1.0  # longest wait for a peer's kernel
BACKLOG = 4096  # probes that may wait to be accepted; Linux does not answer more


class Peer(NamedTuple):
    """Where a rank can be found.

    Attributes:
        address: (host, port) of its socket; None: it has none.
        pid, host: of the process.
        identity: the same for processes that see each other's numbers in /proc.
        port: of its communicator's own socket; None: it has no socket.
    """

    address: tuple[str, int] | None
    pid: int
    host: str
    identity: str
    port: int | None = None

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def here(one_host: bool, own: socket.socket | None = None) -> bytes:
    """Return what `find_lost` of the other ranks has to know of this process.

    Args:
        one_host: all ranks are on this host.
        own: socket of its communicator, from `make_socket`.
    """
    try:
        address: Any = _socket(one_host).getsockname()[:2]
    except OSError:  # no address at which peers could find it: it is never named
        address = None
    port = None if own is None else own.getsockname()[1]
    return json.dumps([address, os.getpid(), socket.gethostname(), _identity(), port]).encode()


def make_socket(one_host: bool) -> socket.socket | None:
    """Return a socket to close with a communicator; None: there is no address for it."""
    try:
        # this process's own socket has the address, which is looked up once
        made = listen_at(_socket(one_host).getsockname()[0], BACKLOG)
    except OSError:
        return None
    return _listens(made)


def find_lost(cards: Sequence[bytes], rank: int) -> tuple[int, str] | None:
    """Return one rank that is not at work, and what is known of it; None: all are, or there are
    several between which this cannot decide.

    Args:
        cards: what `here` has returned on every rank.
        rank: of this process.
    """
    _make_room()
    peers = {n: Peer(*json.loads(card)) for n, card in enumerate(cards) if n != rank}
    try:
        refused, silent = _probe({n: p.address for n, p in peers.items() if p.address is not None})
        ports = {n: (p.address[0], p.port) for n, p in peers.items() if p.address and p.port}
        closed = _probe(ports)[0] - refused
    except OSError:  # no more file descriptors
        return None
    stopped = {n for n, p in peers.items() if p.identity == _identity() and _is_stopped(p.pid)}
    # a rank that has ended may be one that gave up because of a stopped one
    for found, what in (
        (stopped, "is stopped (SIGSTOP, or a debugger)"),
        (refused, "has ended: killed, out of memory, or by itself; read its output"),
        (silent, "cannot be reached"),
        (closed, CLOSED),
    ):
        if found:
            lost = min(found)
            return (lost, f"({peers[lost]}) {what}") if len(found) == 1 else None
    return None


def describe(found: tuple[int, str]) -> str:
    """Return what `find_lost` has returned as words that follow "waits for"."""
    return f"rank {found[0]} {found[1].replace(') ', '), which ', 1)}"


# this process's sockets, by id
_open: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()


def _listens(made: socket.socket) -> socket.socket:
    """Return a socket of this process, which a child closes."""
    made.setblocking(False)
    _open[id(made)] = made
    return made


def _sockets() -> list[socket.socket]:
    found = (reference() for reference in _open.valuerefs())  # whatever other threads make now
    return [made for made in found if made is not None]


def _make_room() -> None:
    """Accept the probes that wait at this process's sockets: where too many do, the next one gets
    no answer, as if the host were down.
    """
    for made in _sockets():
        with contextlib.suppress(OSError):  # no more, or it is closed
            while True:
                made.accept()[0].close()


@functools.cache
def _socket(one_host: bool) -> socket.socket:
    """Return this process's socket, open as long as the process is."""
    return _listens(listen(one_host, BACKLOG))


def _forget() -> None:
    """Close the sockets in a child, which would keep them open after the end of this process."""
    for made in _sockets():
        made.close()
    _socket.cache_clear()


os.register_at_fork(after_in_child=_forget)


def _identity() -> str:
    try:
        return f"{host_identity()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def _probe(addresses: Mapping[int, Sequence[Any]]) -> tuple[set[int], set[int]]:
    """Return the ranks whose hosts refuse a connection, and those that nobody answers for."""
    status = dict.fromkeys(addresses, errno.EINPROGRESS)
    with contextlib.ExitStack() as stack:
        poll, deadline, waiting = select.poll(), time.monotonic() + PATIENCE_S, {}
        for rank, (host, port) in addresses.items():
            kind = socket.AF_INET6 if ":" in host else socket.AF_INET
            one = stack.enter_context(socket.socket(kind))
            one.setblocking(False)
            status[rank] = one.connect_ex((host, port))
            if status[rank] == errno.EINPROGRESS:
                waiting[one.fileno()] = rank, one
                poll.register(one, select.POLLOUT)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for number, _ in poll.poll(1e3 * left):
                rank, one = waiting.pop(number)
                poll.unregister(one)
                status[rank] = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    refused = {rank for rank, found in status.items() if found == errno.ECONNREFUSED}
    return refused, {rank for rank, found in status.items() if found} - refused
