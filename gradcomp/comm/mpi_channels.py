"""Parts of an MpiCommunicator: duplicated MPI communicators, the thread that calls MPI, polling,
and the exit of a program that lost a peer.

Waits poll, so that a silent peer causes an error and not a hang. They spin first, since answers
over shared memory arrive quickly, and then sleep, since peers may need the core. A rank that gives
up sends a notification on a separate MPI communicator, which every wait checks. Channels are never
freed but cached for the next MpiCommunicator, in an attribute of the MPI communicator they were
duplicated from: freeing is collective, and ranks may close or drop theirs at different times.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import struct
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradcomp.comm import peers
from gradcomp.comm.addresses import host_identity
from gradcomp.comm.base import Channel, given_up_on, is_because_of, lost_in_setup
from gradcomp.errors import PeerMismatch
from gradcomp.waits import current

T = TypeVar("T")

SPIN_S = 0.0005  # time to poll without sleeping
# longest sleep between two polls: large messages make progress only while a thread polls
MAX_PAUSE_S = 0.0002
MAIN_THREAD_ONLY = (
    "MPI was initialised for calls from the main thread only, which overlapped exchanges cannot"
    " keep to: set mpi4py.rc.thread_level = 'serialized' (or 'multiple') before mpi4py.MPI is"
    " imported"
)
OFFERS = 16  # free channels that a rank offers to the others, whose free channels may differ
TAGS = 32767  # tags for messages; every MPI has at least one more
LEAVING, ASKS, WAITS, UNKNOWN = -1, -2, -3, -4  # in a notification, in place of the lost rank
ANSWER_S = 1.0  # time in which ranks that wait answer `Channels.who_waits`
REASON_NBYTES = 300
CARD_NBYTES = 512  # padded result of `peers.here`
_WORD = struct.Struct("<i")
# time for mpirun to forward the output of a rank; that of MPICH drops it when the job is aborted
FORWARD_S = 0.3
# longest wait for the other ranks to exit, at the exit of a program that lost a peer
LEAVE_S = 30.0


# ---- who may call MPI ----------------------------------------------------------------------------

_here = threading.local()
# the thread starts at the first call
_one_thread = ThreadPoolExecutor(1, "gradcomp-mpi", lambda: setattr(_here, "calls_mpi", True))


def mpi() -> Any:
    """Return the MPI module of mpi4py; None if it has not been imported."""
    return sys.modules.get("mpi4py.MPI")


@functools.cache
def thread_level() -> str:
    """Return which threads may call MPI: "multiple" (any), "serialized" (the one thread that `call`
    uses), or "main" (the main thread).
    """
    levels = {mpi().THREAD_MULTIPLE: "multiple", mpi().THREAD_SERIALIZED: "serialized"}
    return levels.get(mpi().Query_thread(), "main")


def call(function: Callable[[], T]) -> T:
    """Call `function` in a thread that may call MPI; RuntimeError if only the main thread may."""
    level = thread_level()
    if level == "serialized" and not getattr(_here, "calls_mpi", False):
        return _one_thread.submit(function).result()
    if level == "main" and not mpi().Is_thread_main():
        raise RuntimeError(MAIN_THREAD_ONLY)
    return function()


class Pause:
    """Pause between two polls: yields for `SPIN_S`, then sleeps up to `MAX_PAUSE_S`."""

    def __init__(self) -> None:
        self._spin_until = time.monotonic() + SPIN_S
        self._sleep_s = 0.00002

    def __call__(self) -> None:
        if time.monotonic() < self._spin_until:
            os.sched_yield()
        else:
            time.sleep(self._sleep_s)
            self._sleep_s = min(2 * self._sleep_s, MAX_PAUSE_S)


# ---- channels ------------------------------------------------------------------------------------


class Arriving(NamedTuple):
    """A message whose receive has been started."""

    sender: int
    message: Tensor
    request: Any


@dataclass(eq=False)
class Channels:
    """The duplicated MPI communicators of one `MpiCommunicator`, and the known state of peers."""

    by_channel: dict[Channel, Any]
    point: Any  # MPI communicator for point-to-point messages
    news: Any  # MPI communicator for notifications: a rank gave up, is about to exit, or waits
    serial: int  # number of these channels, equal on every rank
    numbers: Sequence[int]  # of all ranks in the job, by which errors and notifications name them
    # by peer that has given up: the lost rank (None: not known) and its description; several
    # threads write this, so iterate over a copy
    gone: dict[int, tuple[int | None, str]] = field(default_factory=dict)
    lost: tuple[int | None, str] | None = None  # the same, as far as this rank itself has found out
    waits: dict[int, str] = field(default_factory=dict)  # answers to `who_waits`
    asking: threading.Lock = field(default_factory=threading.Lock)  # held by `who_waits`
    cards: list[bytes] = field(default_factory=list)  # of all ranks, for `peers.find_lost`
    listening: socket.socket | None = None  # open until the MpiCommunicator is closed
    left: set[int] = field(default_factory=set)  # peers that are about to exit
    broken: bool = False  # this rank has given up
    dropped: bool = False  # their `MpiCommunicator` is gone, and was not closed
    uses: int = 0  # how often these channels were reused; separates messages by tag
    pending: dict[int, tuple[Any, object]] = field(default_factory=dict)  # requests and buffers
    arriving: list[Arriving] = field(default_factory=list)  # messages being received
    sent: list[Any] = field(default_factory=list)  # notifications and their requests

    @property
    def tag(self) -> int:
        return self.uses % TAGS

    @property
    def number(self) -> int:
        rank: int = self.news.Get_rank()
        return self.numbers[rank]

    def read_news(self) -> None:
        """Receive pending notifications, update `gone`, `left` and `waits`, and answer others."""
        status, byte = mpi().Status(), mpi().BYTE
        while (found := call(lambda: self.news.Improbe(status=status))) is not None:
            note = np.zeros(status.Get_count(byte), np.uint8)
            call(functools.partial(found.Recv, [note, byte]))
            (word,), sender = _WORD.unpack_from(note.data), status.Get_source()
            what = note[_WORD.size :].tobytes().decode(errors="replace")
            if word == LEAVING:
                self.left.add(sender)
            elif word == ASKS:
                wait = current()
                mine = "" if wait is None else wait.what
                call(functools.partial(self.send_news, WAITS, mine, [sender]))
            elif word == WAITS:
                self.waits[sender] = what
            elif word == self.number:
                self.gone[sender] = given_up_on(word, what)
            else:
                self.gone[sender] = (None if word == UNKNOWN else word, what)

    def who_waits(self) -> dict[int, str]:
        """Ask all ranks whether they wait, and return what those wait for that answer in time."""
        with self.asking:
            self.waits = {}
            call(functools.partial(self.send_news, ASKS))
            pause, deadline = Pause(), time.monotonic() + ANSWER_S
            while len(self.waits) < self.news.Get_size() - 1 and time.monotonic() < deadline:
                read_all_news()
                pause()
            return self.waits.copy()

    def lost_elsewhere(self, reason: str) -> tuple[int | None, str] | None:
        """Return what was lost on other channels of this process, if that may be the `reason` for
        which it gives up: a known rank first.
        """
        others = [one for one in list(_in_use) if one is not self and not one.dropped]
        losses = (lost for one in others for lost in (one.lost, *one.gone.copy().values()))
        found = [lost for lost in losses if lost and is_because_of(lost[1], reason)]
        return min(found, key=lambda lost: lost[0] is None, default=None)

    def find_lost(self) -> tuple[int, str] | None:
        """Return a lost rank and its description, as `peers.find_lost`."""
        found = peers.find_lost(self.cards, self.news.Get_rank())
        return None if found is None else (self.numbers[found[0]], found[1])

    def send_news(self, word: int, what: str = "", to: Sequence[int] | None = None) -> None:
        """Send `to` (None: every peer) the lost rank, or a word in its place, and a text."""
        note = np.frombuffer(_WORD.pack(word) + what.encode()[:REASON_NBYTES], np.uint8)
        others = [rank for rank in range(self.news.Get_size()) if rank != self.news.Get_rank()]
        ranks = others if to is None else to
        self.sent += [note, *(self.news.Isend([note, mpi().BYTE], rank) for rank in ranks)]

    def match(self) -> None:
        """Start to receive all messages that peers have sent, also those above the caller's limit:
        truncating a matched message corrupts the memory of Open MPI.
        """
        status, byte, source = mpi().Status(), mpi().BYTE, mpi().ANY_SOURCE
        while (found := call(lambda: self.point.Improbe(source, self.tag, status))) is not None:
            message = torch.empty(status.Get_count(byte), dtype=torch.uint8, device="cpu")
            request = call(functools.partial(found.Irecv, [message.numpy(), byte]))
            self.arriving.append(Arriving(status.Get_source(), message, request))

    def arrived(self, source: int | None) -> Arriving | None:
        """Return and remove the first message that has arrived; each rank's stay in order."""
        waiting: set[int] = set()
        for number, found in enumerate(self.arriving):
            asked = found.sender not in waiting and source in (None, found.sender)
            if call(found.request.Test) and asked:
                return self.arriving.pop(number)
            waiting.add(found.sender)
        return None

    def forget(self) -> list[Any]:
        """Clear requests and messages; return those that are incomplete, with their buffers."""
        known = [*self.pending.values(), *((a.request, a.message) for a in self.arriving)]
        self.pending.clear()
        self.arriving.clear()
        return [kept for kept in known if not call(kept[0].Test)]


@dataclass(eq=False)
class Parent:
    """State stored with an MPI communicator and used by the main thread: its free channels, its
    subsets, and the number of channels made.
    """

    free: list[Channels] = field(default_factory=list)
    dropped: list[Channels] = field(default_factory=list)  # of communicators never closed
    made: int = 0
    subsets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    # a rank missed a collective setup call, so its next call would be matched with the wrong one
    spoiled: bool = False

    def drop(self, channels: Channels) -> None:
        """Keep channels for `give_back`; calls no MPI, since a finalizer calls this."""
        channels.dropped = True
        self.dropped.append(channels)

    def take_channels(self, comm: Any, timeout_s: float) -> Channels:
        """Return channels that are free on every rank, or new ones. Collective over `comm`;
        PeerLost if a rank did not take part in time, now or earlier, PeerMismatch if ranks have
        different `timeout_s`.
        """
        if self.spoiled:
            why = "an earlier MpiCommunicator here was not made on every rank"
            raise lost_in_setup(time.monotonic(), why)
        while self.dropped:
            self.give_back(self.dropped.pop())
        offered = sorted(channels.serial for channels in self.free)[-OFFERS:]
        host = zlib.crc32(host_identity().encode())
        own = mpi().COMM_WORLD.Get_rank()
        padded = [*offered, *[0] * (OFFERS - len(offered)), host, own, round(1e3 * timeout_s)]
        everyone = self._gather(comm, np.array(padded, np.int64), timeout_s)
        first_ms, *others_ms = everyone[:, OFFERS + 2].tolist()
        for rank, theirs_ms in enumerate(others_ms, 1):
            if theirs_ms != first_ms:
                raise PeerMismatch("timeout_s", rank, first_ms / 1e3, theirs_ms / 1e3)
        one_host = len({*everyone[:, OFFERS].tolist()}) == 1
        common = set(offered).intersection(*everyone[:, :OFFERS].tolist())
        if common:
            channels = next(channels for channels in self.free if channels.serial == max(common))
            self.free.remove(channels)
            channels.uses += 1
        else:
            numbers = everyone[:, OFFERS + 1].tolist()
            if len({*numbers}) < len(numbers):  # ranks of several jobs (MPI_Comm_spawn)
                numbers = [*range(len(numbers))]
            channels = self._make(comm, timeout_s, numbers)
        channels.dropped = False
        channels.lost, channels.listening = None, peers.make_socket(one_host)
        card = peers.here(one_host, channels.listening).ljust(CARD_NBYTES)
        cards = self._gather(comm, np.frombuffer(card, np.uint8), timeout_s)
        channels.cards = [row.tobytes() for row in cards]
        _in_use.add(channels)
        return channels

    def _make(self, comm: Any, timeout_s: float, numbers: Sequence[int]) -> Channels:
        """Return new channels. Collective over `comm`."""
        copies = call(lambda: [comm.Idup() for _ in range(len(Channel) + 2)])
        self._wait([request for _, request in copies], copies, timeout_s)
        comms = [copy for copy, _ in copies]
        for copy in comms:
            copy.Set_errhandler(mpi().ERRORS_RETURN)
        self.made += 1
        by_channel = dict(zip(Channel, comms, strict=False))
        channels = Channels(by_channel, comms[-2], comms[-1], self.made, numbers)
        _made.append(channels)
        return channels

    def give_back(self, channels: Channels) -> None:
        """Add channels to the free ones, unless they failed or have incomplete requests."""
        _in_use.discard(channels)
        if channels.listening is not None and not channels.broken:
            channels.listening.close()
        if left := channels.forget():
            unanswered.append(left)
        elif not channels.broken and not channels.gone:
            self.free.append(channels)

    def make_subset(self, comm: Any, members: Sequence[int], timeout_s: float) -> Any:
        """Return an MPI communicator of `members`, which have met before. Collective over these.

        The MPI call blocks. If threads may call MPI, it runs in a thread, which is abandoned after
        `timeout_s` seconds with a PeerLost.
        """
        group = comm.Get_group().Incl(list(members))
        make = functools.partial(comm.Create_group, group, members[0])
        if thread_level() != "multiple":
            return call(make)
        begun, found = time.monotonic(), []
        thread = threading.Thread(
            target=lambda: found.append(make()), name="gradcomp-subset", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        if not found:
            unanswered.append(thread)
            self.spoiled = True
            why = f"not every rank of {list(members)} made its communicator"
            raise lost_in_setup(begun, why)
        return found[0]

    def _gather(
        self, comm: Any, mine: np.ndarray[Any, Any], timeout_s: float
    ) -> np.ndarray[Any, Any]:
        """Return the arrays of all ranks, ``(world_size, len(mine))``. Collective over `comm`."""
        everyone = np.zeros((comm.Get_size(), len(mine)), mine.dtype)
        self._wait([call(lambda: comm.Iallgather(mine, everyone))], [mine, everyone], timeout_s)
        return everyone

    def _wait(self, requests: list[Any], kept: object, timeout_s: float) -> None:
        """Wait for requests of collectives, with buffers `kept`; PeerLost after `timeout_s`."""
        begun, pause = time.monotonic(), Pause()
        while not call(lambda: mpi().Request.Testall(requests)):
            if time.monotonic() - begun > timeout_s:
                unanswered.append((requests, kept))
                self.spoiled = True
                raise lost_in_setup(begun, "not every rank made its MpiCommunicator")
            pause()


_keyval: int | None = None


def read_all_news() -> None:
    """Read the news of all channels in use by this process, which answers who asks there: a rank
    that waits on one of them is not the one that others wait for.
    """
    for channels in list(_in_use):
        channels.read_news()


def kept_with(comm: Any) -> Parent:
    """Return the `Parent` of an MPI communicator, which lives as long as the communicator."""
    global _keyval
    if _keyval is None:
        _keyval = mpi().Comm.Create_keyval()
    parent = comm.Get_attr(_keyval)
    if parent is None:
        parent = Parent()
        comm.Set_attr(_keyval, parent)
    return parent  # type: ignore[no-any-return]


# ---- the end of a program that lost a peer -------------------------------------------------------

_made: list[Channels] = []
_in_use: weakref.WeakSet[Channels] = weakref.WeakSet()
# requests that will never complete, with their buffers, which MPI may use until the process exits
unanswered: list[Any] = []


@atexit.register
def _leave() -> None:
    """After a lost peer, wait for the other ranks to exit and end the job without MPI_Finalize.

    Ranks that know of the failure notify the others when they exit. A rank that does not know of it
    (it may already be in MPI_Finalize) sends nothing, so the wait is limited to LEAVE_S.
    """
    if mpi() is None or mpi().Is_finalized():
        return
    _here.calls_mpi = True  # the thread of `_one_thread` has ended
    for channels in _made:
        channels.read_news()
        if channels.listening is not None and not channels.broken:
            # lets others see that this rank is gone while it waits in MPI_Finalize
            channels.listening.close()
    trouble = [channels for channels in _made if channels.broken or channels.gone]
    for channels in trouble:
        channels.send_news(LEAVING)
        unanswered.extend(kept for kept in channels.pending.values() if not kept[0].Test())
    if not unanswered:
        return
    # after an uncaught exception, do not let other ranks continue without this one
    died = hasattr(sys, "last_value")
    pause, deadline = Pause(), time.monotonic() + (0 if died else LEAVE_S)
    while (
        any(len(channels.left) < channels.news.Get_size() - 1 for channels in trouble)
        and time.monotonic() < deadline
    ):
        for channels in trouble:
            channels.read_news()
        pause()
    end_job()


def end_job() -> NoReturn:
    """End every rank of the job by MPI_Abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    mpi().COMM_WORLD.Abort(1)
    time.sleep(5)  # MPI_Abort of MPICH returns, and the process is killed a little later
    os._exit(1)
