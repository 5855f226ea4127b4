"""The gloo groups of one TorchCommunicator, and the collectives in progress on them.

The groups are not registered with torch.distributed. Their names therefore do not depend on how
many groups a rank has created, and deleting one closes its sockets and ends its threads
immediately. A group with a collective in progress is kept alive instead, since deleting it would
block until the timeout of the collective.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from gradcomp.comm.base import (
    Channel,
    RankGone,
    RankSilent,
    Work,
    described,
    first_line,
    gave_up,
    is_because_of,
    log_wait,
    lost_rank,
    name_waiting,
)
from gradcomp.comm.peers import describe, find_lost, here, silent, this_process
from gradcomp.comm.store import Look, Lost, Notes, meet
from gradcomp.comm.torch_private import make_gloo, store_below, store_is_gone
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.waits import current

SLICE_S = 0.5  # longest wait between two checks whether this rank or a peer has given up
LOOK_S = 1.0  # longest wait for the store in such a check
NOTE_S = 2.0  # a wait longer than this is announced to peers in a note
GRACE_S = 0.1  # messages that a peer sent before it gave up may still arrive
CONNECT_S = 60.0  # longest wait for a connection between ranks that have met
# pauses between probes for the rank that broke a connection: a process that exits closes its
# sockets one by one, and may close its connections before its listening socket; the last pause is
# for a rank whose wait has timed out, which breaks its connections and then asks who waits
ENDING_S = (0.05, 0.2, 0.5, 1.5)
NAMED_S = 1.5  # time in which a rank that waits on other groups may name the lost rank
OWN_DESCRIPTORS = 4  # file descriptors of a gloo group besides one socket for each peer
DATA = (Channel.SCALE, Channel.FIRST, Channel.SECOND)

# reason of the first failure in a job, and the peer that was lost, by default process group
_failed: weakref.WeakKeyDictionary[Any, tuple[str, Lost | None]] = weakref.WeakKeyDictionary()
# gloo groups kept alive because of collectives in progress, and these collectives
_stuck: list[tuple[list[Any], set[_GlooWork]]] = []
_open: weakref.WeakSet[Groups] = weakref.WeakSet()  # all that this process has made


class Groups:
    """The gloo groups of a communicator, one for each channel, connected when it is first used.

    The first use of a channel of exchanges connects the groups of all three.

    Args:
        store: store used by these ranks only.
        rank: of this process among them.
        numbers: of all of them in the job, by which errors and notes name them.
        timeout_s: timeout of a collective in gloo, and of a connection, in seconds.
        job: returns the default process group that the ranks belong to; None if there is none. A
            failure on some groups of a job is the reason that others report when they are closed.
        one_host: whether all ranks are on this host.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        numbers: Sequence[int],
        timeout_s: float,
        job: Callable[[], Any],
        *,
        one_host: bool,
    ) -> None:
        self._store, self._timeout_s, self._one_host = store, timeout_s, one_host
        self._rank, self._numbers, self._world_size = rank, numbers, len(numbers)
        self._made: dict[Channel, Any] = {}
        self._cards: list[bytes] = []  # of all ranks, for `find_lost`
        self._lock = threading.Lock()
        self._job = job
        self.notes = Notes(store, rank, numbers)
        self.pending: set[_GlooWork] = set()
        self.broken = ""  # why these groups have failed; "" if they have not
        self._lost: Lost | None = None  # the lost rank because of which they have failed
        self.closed = False
        _open.add(self)

    def start(self, channel: Channel, begin: Callable[..., Any], *args: object) -> Work:
        """Start a collective by ``begin(group, *args)``, and keep `args`, its buffers, alive until
        it is complete. RuntimeError if closed, ConnectionError if this rank has given up.
        """
        if self.closed:
            raise RuntimeError("this communicator is closed")
        if self.broken:
            raise ConnectionError(f"this rank has given up: {self.broken}")
        group = self._made.get(channel) or self.connect(channel)
        try:
            return _GlooWork(begin(group, *args), self, args)
        except RuntimeError as error:
            raise ConnectionError(_broke(error)) from error

    def follow(self, work: Any, group: Any) -> Work:
        """Return the `Work` of a collective of torch on its own `group` of these ranks."""
        return _TorchsWork(work, self, group)

    def lose(self, reason: str, lost: Lost | None = None) -> None:
        """Mark these groups as failed, and record the first reason for them and the job.

        `lost` is the lost rank; None: this rank fails by itself.
        """
        if not self.broken:
            self.broken, self._lost = reason, lost
        job = self._job()
        if job is not None:
            _failed.setdefault(job, (self.broken, self._lost))

    def find_ending(self, look: Look) -> ConnectionError | None:
        """Find a lost rank as `find_lost` does; wait for one whose process is just ending."""
        lost = self.find_lost(look)
        for pause_s in ENDING_S:
            if lost is None:
                time.sleep(pause_s)
                lost = self.find_lost(look)
        return lost

    def find_lost(self, look: Look) -> ConnectionError | None:
        """Probe for a lost rank, return its error, and leave a note for peers; None if unknown.

        `look` reads notes, and is called after the probe: a rank that gives up because of another
        leaves a note before it ends.
        """
        found = find_lost(self._cards, self._rank)
        gone = look(LOOK_S)
        if gone is not None:
            return lost_rank(*gone)
        if found is None:
            return None
        rank, what = self._numbers[found[0]], found[1]
        if store_is_gone(self._store) and self._world_size > 2:
            what += "; the ranks' store was lost with it, so another rank may have ended before"
        self.notes.blame(rank, what)
        return RankGone(rank, what=what)

    def find_silent(self, timeout_s: float) -> Exception | None:
        """Ask for the rank because of which a wait of `timeout_s` timed out; None if unknown."""
        rank = self.notes.find_silent(self.answer)
        gone = self.notes.look(LOOK_S)  # of a rank that has asked before
        deadline = time.monotonic() + NAMED_S
        while rank is None and gone is None and time.monotonic() < deadline:
            self.answer()
            time.sleep(0.1)
            gone = self.notes.look(LOOK_S)
        if gone is not None:
            return lost_rank(*gone)
        if rank is None:
            return None
        return RankSilent(self._numbers[rank], silent(self._cards[rank], timeout_s))

    def answer(self) -> None:
        """Read the notes of all other groups of this process, which answers who asks there: a rank
        that waits in one of them is not the one that others wait for.
        """
        for groups in list(_open):
            if groups is not self and not groups.closed and groups._world_size > 1:
                groups.notes.look(0.0)

    def watch(self) -> None:
        """Announce the current wait of this thread in a note if it is long, and log it once."""
        wait = current()
        if wait is not None and wait.seconds() > NOTE_S:
            if not wait.noted:
                wait.noted = True
                self.notes.wait_for(wait.what)
            log_wait(self._numbers[self._rank], self._whom)

    def _whom(self) -> str:
        """Describe whom a long wait is for: a lost rank, or those without a note of waiting."""
        found = find_lost(self._cards, self._rank)
        if found is not None:
            return describe((self._numbers[found[0]], found[1]))
        waits = self.notes.who_waits(LOOK_S)
        others = [number for number in self._numbers if number != self._numbers[self._rank]]
        return "" if waits is None else name_waiting(others, waits)

    def give_up(self, reason: str) -> None:
        """End every wait on these groups within a second, on this rank and, by a note, on peers."""
        if not self.closed:
            self.lose(reason or "abort() was called")
            if self._world_size > 1:
                self._tell(reason)

    def close(self) -> None:
        """Close sockets and end threads. A second call has no effect."""
        if not self.closed and self._world_size > 1:
            self._leave_note()
        with self._lock:
            self.closed, made = True, list(self._made.values())
            self._made.clear()
        pending = {work for work in list(self.pending) if not work.is_done()}
        self.pending.clear()
        _sweep()
        if pending:
            # leaked on purpose, also at interpreter exit: deleting a group waits for its timeout
            for group in made:
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
            _stuck.append((made, pending))

    def leave_to_parent(self) -> None:
        """Close these groups in a forked child, without notifying peers."""
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        # leaked on purpose: deleting a group waits for its threads, which a child does not have
        parents = self._made, self.pending, self._store
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(parents))
        self._made, self.pending, self.closed = {}, set(), True

    def drop(self) -> None:
        """Close groups that nobody closed; give up first if the program ends by an exception."""
        died = getattr(sys, "last_value", None)  # an uncaught exception
        if died is not None and not self.closed:
            self.give_up(f"{type(died).__name__}: {died}".removesuffix(": "))
        self.close()

    def _leave_note(self) -> None:
        """Leave a note why this rank closes, since peers see only a closed connection."""
        failed = self.broken or self._failed_before()[0]
        if not failed and any(not work.is_done() for work in list(self.pending)):
            failed = "a close() with collectives under way"
        if failed:
            self._tell(failed)
        else:
            self.notes.close()

    def _tell(self, reason: str) -> None:
        """Leave a note that this rank gives up, which names it only if it fails by itself."""
        before = self._failed_before()[1]  # on other groups of the job
        if self._lost is not None:
            self.notes.blame(*self._lost)
        elif before is None or not is_because_of(before[1], reason):
            self.notes.give_up(reason)
        elif before[0] is None:
            own = self._numbers[self._rank]
            self.notes.blame(None, f"rank {own} {this_process()} {gave_up(reason)}")
        else:
            self.notes.blame(*before)

    def _failed_before(self) -> tuple[str, Lost | None]:
        """Return the reason of the job's first failure, "" if none, and the lost peer, if any."""
        job = self._job()
        return ("", None) if job is None else _failed.get(job, ("", None))

    def connect(self, channel: Channel) -> Any:
        """Return the gloo group of a channel. The first call connects it (collective, PeerLost)."""
        with self._lock, peers_answer("setup"):
            if channel not in self._made:
                try:
                    self._connect(DATA if channel in DATA else (channel,))
                except ConnectionError as error:
                    self.lose(str(error), described(error))
                    raise
            return self._made[channel]

    def _connect(self, channels: tuple[Channel, ...]) -> None:
        _check_descriptors(len(channels), self._world_size)
        if channels is not DATA:  # for DATA, the ranks have just met
            what, look = "begun to agree on anything", self.notes.look_for_cause
            self._meet("meeting", b"", self._timeout_s, what, look)
        for channel in channels:
            prefix = store_below(self._store, channel.name.lower())
            ranks = self._rank, self._world_size
            try:
                self._made[channel] = make_gloo(prefix, *ranks, CONNECT_S, self._timeout_s)
            except RuntimeError as error:
                raise ConnectionError(
                    f"rank {self._numbers[self._rank]} could not connect with all the others: one"
                    " has ended, or a firewall or GLOO_SOCKET_IFNAME keeps them apart"
                    f" [{first_line(error)}]"
                ) from error
        # wait for all: others would take a rank that closes before they connect for a failure
        name, card, look = f"connected {channels[0]:d}", here(self._one_host), self.notes.look
        self._cards = self._meet(name, card, CONNECT_S, "connected", look)
        job = self._job()
        if job is not None:  # all ranks are connected, so an earlier failure is over
            _failed.pop(job, None)

    def _meet(
        self, prefix: str, mine: bytes, timeout_s: float, what: str, look: Look
    ) -> list[bytes]:
        store = store_below(self._store, prefix)
        return meet(store, self._rank, self._numbers, mine, timeout_s, what, look)


class _GlooWork(Work):
    _on_own_group = True

    def __init__(self, work: Any, groups: Groups, buffers: object) -> None:
        self._work, self._groups = work, groups
        self._buffers = buffers  # kept alive until the collective is complete
        groups.pending.add(self)

    def is_done(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._work.wait(_patience(min(left, SLICE_S)))
            except RuntimeError as error:
                # it may have completed just after the wait timed out; then its own result counts
                if self._work.is_completed():
                    self._check_result(timeout_s)
                    return
                self._look(error, timeout_s, ended=False, last=left <= SLICE_S)
                self._groups.watch()
            else:
                self._end()
                return

    def _end(self) -> None:
        self._groups.pending.discard(self)
        wait = current()
        if wait is not None and wait.noted:
            self._groups.notes.wait_for("")

    def _check_result(self, timeout_s: float) -> None:
        """Return if a completed collective succeeded; raise its error otherwise."""
        try:
            self._work.wait(_patience(SLICE_S))
        except RuntimeError as error:
            self._look(error, timeout_s, ended=True, last=True)
        self._end()

    def _look(self, error: RuntimeError, timeout_s: float, *, ended: bool, last: bool) -> None:
        """Return if the wait should continue after `error`; raise the cause otherwise.

        `ended`: the collective is complete. `last`: the whole wait of `timeout_s` is over.
        """
        groups, text = self._groups, first_line(error)
        late = "imed out" in text or "imeout" in text
        ended = ended or not late
        # a rank that closes these groups does not break torch's connections
        hears_close = not late or (last and not self._on_own_group)
        look = groups.notes.look_for_cause if hears_close else groups.notes.look
        groups.answer()
        gone = look(LOOK_S)
        if gone is not None:
            # data that the peer sent before may complete the collective; the next wait returns it
            if not ended and self._ends_yet():
                return
            peer_gone = lost_rank(gone[0], gone[1] if late else f"{gone[1]} [{text}]")
            groups.lose(str(peer_gone), gone)
            raise peer_gone from error
        if groups.broken and not ended:
            raise ConnectionError(f"this rank has given up: {groups.broken}") from error
        if ended or last:
            lost: Exception | None
            if late:
                lost = groups.find_lost(look) or groups.find_silent(timeout_s)
                lost = lost or TimeoutError(_silent(error, timeout_s))
            else:
                lost = groups.find_ending(look) or ConnectionError(_broke(error))
            groups.lose(str(lost), described(lost))
            raise lost from error

    def _ends_yet(self) -> bool:
        """Return whether the collective completes within GRACE_S, as it may after a pause."""
        with contextlib.suppress(RuntimeError):
            self._work.wait(_patience(GRACE_S))
        return self.is_done()


class _TorchsWork(_GlooWork):
    """A collective on a group of torch, which `Groups.close` does not delete."""

    _on_own_group = False

    def wait(self, timeout_s: float) -> None:
        try:
            super().wait(timeout_s)
        except BaseException:
            if not self.is_done():  # leaked on purpose, as in `Groups.close`
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._buffers))
            raise


def _check_descriptors(groups: int, world_size: int) -> None:
    """Raise GradcompError if this process cannot open enough sockets for `groups` gloo groups."""
    needed = groups * (world_size - 1 + OWN_DESCRIPTORS)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError:  # no Linux
        return
    if limit != resource.RLIM_INFINITY and needed > limit - opened:
        raise GradcompError(
            f"{groups} gloo groups of {world_size} ranks need {needed} file descriptors; this"
            f" process has {opened} open and may have {limit}: raise the limit on every rank, for"
            f" instance ulimit -n {max(65536, 2 * (opened + needed))}"
        )


def _patience(seconds: float) -> timedelta:
    """Return a timedelta rounded up to whole milliseconds, which torch would round down."""
    return timedelta(milliseconds=max(1, math.ceil(1e3 * seconds)))


def _broke(error: BaseException) -> str:
    return (
        "the connection with another rank broke (which rank ended first is not known): read the"
        f" output of the other ranks [{first_line(error)}]"
    )


def _silent(error: BaseException, timeout_s: float) -> str:
    return (
        f"another rank did not answer within {timeout_s:g} s (which one is not known): it is stuck,"
        " frozen, or waits in another collective; raise timeout_s if it is slow for a good reason"
        f" [{first_line(error)}]"
    )


def _sweep() -> None:
    """Delete kept groups whose collectives have completed."""
    for kept in list(_stuck):
        made, works = kept
        if all(work.is_done() for work in works):
            with contextlib.suppress(ValueError):  # another thread has just done so
                _stuck.remove(kept)
                for group in made:
                    ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))


def _leave_to_parent() -> None:
    for groups in list(_open):
        groups.leave_to_parent()
    _stuck.clear()  # does not delete the groups, since `close` has added a reference


os.register_at_fork(after_in_child=_leave_to_parent)
