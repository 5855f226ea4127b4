"""Detection of a rank that has ended, is stopped, or cannot be reached, after a failed collective.

Every process has a listening socket, to which other ranks connect as a probe. The kernel accepts
the connection for a process that computes, sleeps or is stopped, and refuses it immediately after
the process has ended. So no thread is needed, and a busy rank is not mistaken for a lost one. A
process accepts probes only to make room in its queue, when it probes others itself.
A communicator without a store for notes has its own socket (`make_socket`), which is closed with
it.
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

PATIENCE_S = 1.0  # longest wait for an answer of a peer's kernel
BACKLOG = 4096  # length of the queue of probes; Linux does not answer further ones


class Peer(NamedTuple):
    """Process and sockets of a rank."""

    address: tuple[str, int] | None  # of the process's listening socket; None: it has none
    pid: int
    host: str
    identity: str  # equal for processes that see each other's process IDs in /proc
    port: int | None = None  # of the communicator's own socket; None: it has none

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


def this_process() -> str:
    """Return "(pid 4711 on node-b)" of this process, as descriptions of a lost rank begin."""
    return f"(pid {os.getpid()} on {socket.gethostname()})"


def here(one_host: bool, own: socket.socket | None = None) -> bytes:
    """Return the `Peer` of this process as JSON, for `find_lost` on other ranks.

    Args:
        one_host: whether all ranks are on this host.
        own: the communicator's own socket, from `make_socket`.
    """
    try:
        address: Any = _socket(one_host).getsockname()[:2]
    except OSError:  # no address that peers can reach, so this process is never reported as lost
        address = None
    port = None if own is None else own.getsockname()[1]
    return json.dumps([address, os.getpid(), socket.gethostname(), _identity(), port]).encode()


def make_socket(one_host: bool) -> socket.socket | None:
    """Return a listening socket for one communicator; None if there is no address for it."""
    try:
        # the address of the process's socket, which is determined once
        made = listen_at(_socket(one_host).getsockname()[0], BACKLOG)
    except OSError:
        return None
    return _listens(made)


def find_lost(cards: Sequence[bytes], rank: int) -> tuple[int, str] | None:
    """Return (rank, description) of a lost rank; None if none or no single one is found.

    `cards` are the results of `here` on all ranks, in rank order.
    """
    _drain_probes()
    peers = {n: Peer(*json.loads(card)) for n, card in enumerate(cards) if n != rank}
    try:
        refused, silent = _probe({n: p.address for n, p in peers.items() if p.address is not None})
        ports = {n: (p.address[0], p.port) for n, p in peers.items() if p.address and p.port}
        closed = _probe(ports)[0] - refused
    except OSError:  # no more file descriptors
        return None
    stopped = {n for n, p in peers.items() if p.identity == _identity() and _is_stopped(p.pid)}
    # in this order, since a rank may have ended because it gave up on a stopped rank
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


def silent(card: bytes, timeout_s: float) -> str:
    """Return the description of the only rank that does not wait, after a wait of `timeout_s`."""
    return (
        f"({Peer(*json.loads(card))}) did not answer for {timeout_s:g} s: it computes, reads data,"
        " or is stuck or frozen, while all other ranks wait; raise timeout_s if it is slow for a"
        " good reason"
    )


def describe(found: tuple[int, str]) -> str:
    """Return a result of `find_lost` as text that can follow "waits for"."""
    return f"rank {found[0]} {found[1].replace(') ', '), which ', 1)}"


# sockets of this process, by id
_open: weakref.WeakValueDictionary[int, socket.socket] = weakref.WeakValueDictionary()


def _listens(made: socket.socket) -> socket.socket:
    """Make a socket non-blocking, register it to be closed in forked children, and return it."""
    made.setblocking(False)
    _open[id(made)] = made
    return made


def _sockets() -> list[socket.socket]:
    # valuerefs() returns a copy, so other threads may add sockets meanwhile
    found = (reference() for reference in _open.valuerefs())
    return [made for made in found if made is not None]


def _drain_probes() -> None:
    """Accept and close the queued probes: a full queue answers none, as if the host were down."""
    for made in _sockets():
        with contextlib.suppress(OSError):  # the queue is empty, or the socket is closed
            while True:
                made.accept()[0].close()


@functools.cache
def _socket(one_host: bool) -> socket.socket:
    """Return the listening socket of this process, which stays open until the process ends."""
    return _listens(listen(one_host, BACKLOG))


def _forget() -> None:
    """Close the sockets in a forked child, which would keep them open after the parent ends."""
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
    """Return the ranks that refuse a connection, and the ranks that do not answer."""
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
