"""What an MpiCommunicator is made of: duplicated communicators, who may call MPI, patience, and how
a program ends.

Waits poll, so that a silent peer ends in an error and not in a hang: first spinning, since an
answer over shared memory is near, then sleeping, since peers may need the core. A rank that gives
up says so on a communicator of its own, which every wait looks at. Channels are kept, as an
attribute of the MPI communicator they were made from, for the next MpiCommunicator: freeing them is
collective, and ranks may close theirs, or drop them, at different times.
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
from gradcomp.comm.base import Channel, lost_in_setup

T = TypeVar("T")

SPIN_S = 0.0005  # poll without sleeping for so long
# longest sleep between two polls: large messages move on only while a thread polls
MAX_PAUSE_S = 0.0002
MAIN_THREAD_ONLY = (
    "MPI was initialised for calls from the main thread only, which overlapped exchanges cannot"
    " keep to: set mpi4py.rc.thread_level = 'serialized' (or 'multiple') before mpi4py.MPI is"
    " imported"
)
OFFERS = 16  # free channels that a rank tells the others of: ranks may have freed different ones
TAGS = 32767  # for messages; every MPI has one more
LEAVING = -1
REASON_NBYTES = 300
CARD_NBYTES = 512  # of what peers know of a rank
_WORD = struct.Struct("<i")
# for mpirun to pass on what a rank has printed, which MPICH's drops when the job is aborted
FORWARD_S = 0.3
# at the end of a program that lost a peer, longest wait for the others to end as well
LEAVE_S = 30.0


# ---- who may call MPI ----------------------------------------------------------------------------

_here = threading.local()
# its thread starts when it is first needed
_one_thread = ThreadPoolExecutor(1, "gradcomp-mpi", lambda: setattr(_here, "calls_mpi", True))


def mpi() -> Any:
    """Return mpi4py's MPI module, if it is imported, else None."""
    return sys.modules.get("mpi4py.MPI")


@functools.cache
def thread_level() -> str:
    """Return from where MPI may be called: "multiple" (any thread), "serialized" (one thread of
    ours), or "main" (the main thread).
    """
    levels = {mpi().THREAD_MULTIPLE: "multiple", mpi().THREAD_SERIALIZED: "serialized"}
    return levels.get(mpi().Query_thread(), "main")


def call(function: Callable[[], T]) -> T:
    """Call MPI in the thread that may; RuntimeError if only the main one may and this is not it."""
    level = thread_level()
    if level == "serialized" and not getattr(_here, "calls_mpi", False):
        return _one_thread.submit(function).result()
    if level == "main" and not mpi().Is_thread_main():
        raise RuntimeError(MAIN_THREAD_ONLY)
    return function()


class Pause:
    """Spins for a while, then sleeps ever longer."""

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
    """A message that has been matched and is on its way."""

    sender: int
    message: Tensor
    request: Any


@dataclass(eq=False)
class Channels:
    """The duplicated communicators of one `MpiCommunicator`, and what is known of its peers."""

    by_channel: dict[Channel, Any]
    point: Any  # messages from rank to rank
    news: Any  # "I give up"
    serial: int  # number of its making, the same on every rank
    # peers that have given up: the rank that was lost, and what is said of it; several threads
    # write it, so what iterates takes a copy
    gone: dict[int, tuple[int, str]] = field(default_factory=dict)
    lost: tuple[int, str] | None = None  # the same, found by this rank itself
    cards: list[bytes] = field(default_factory=list)  # of all ranks, for `peers.find_lost`
    listening: socket.socket | None = None  # open until this communicator is closed
    left: set[int] = field(default_factory=set)  # peers that have come to their end
    broken: bool = False
    uses: int = 0  # how many MpiCommunicators have had these channels; tells their messages apart
    pending: dict[int, tuple[Any, object]] = field(default_factory=dict)  # requests and buffers
    arriving: list[Arriving] = field(default_factory=list)  # messages that have been matched
    sent: list[Any] = field(default_factory=list)  # news and their requests

    @property
    def tag(self) -> int:
        return self.uses % TAGS

    def read_news(self) -> None:
        """Take note of the peers that have given up or come to their end."""
        status, byte = mpi().Status(), mpi().BYTE
        while (found := call(lambda: self.news.Improbe(status=status))) is not None:
            note = np.zeros(status.Get_count(byte), np.uint8)
            call(functools.partial(found.Recv, [note, byte]))
            (word,) = _WORD.unpack_from(note.data)
            if word == LEAVING:
                self.left.add(status.Get_source())
            else:
                what = note[_WORD.size :].tobytes().decode(errors="replace")
                self.gone[status.Get_source()] = (word, what)

    def find_lost(self) -> tuple[int, str] | None:
        """Return a rank that is not at work any more, and what is known of it."""
        return peers.find_lost(self.cards, self.news.Get_rank())

    def send_news(self, word: int, what: str = "") -> None:
        """Send every peer the rank that was lost, and what is said of it, or LEAVING."""
        note = np.frombuffer(_WORD.pack(word) + what.encode()[:REASON_NBYTES], np.uint8)
        others = [rank for rank in range(self.news.Get_size()) if rank != self.news.Get_rank()]
        self.sent += [note, *(self.news.Isend([note, mpi().BYTE], rank) for rank in others)]

    def match(self) -> None:
        """Begin to receive what peers have sent. A message that is too long comes as well:
        truncating one that has been matched corrupts Open MPI's memory.
        """
        status, byte, source = mpi().Status(), mpi().BYTE, mpi().ANY_SOURCE
        while (found := call(lambda: self.point.Improbe(source, self.tag, status))) is not None:
            message = torch.empty(status.Get_count(byte), dtype=torch.uint8, device="cpu")
            request = call(functools.partial(found.Irecv, [message.numpy(), byte]))
            self.arriving.append(Arriving(status.Get_source(), message, request))

    def arrived(self, source: int | None) -> Arriving | None:
        """Return the first message that is here, in the order in which each rank sent its own."""
        waiting: set[int] = set()
        for number, found in enumerate(self.arriving):
            asked = found.sender not in waiting and source in (None, found.sender)
            if call(found.request.Test) and asked:
                return self.arriving.pop(number)
            waiting.add(found.sender)
        return None

    def forget(self) -> list[Any]:
        """Forget requests and messages; return those that have not ended."""
        known = [*self.pending.values(), *((a.request, a.message) for a in self.arriving)]
        self.pending.clear()
        self.arriving.clear()
        return [kept for kept in known if not call(kept[0].Test)]


@dataclass(eq=False)
class Parent:
    """What is kept with an MPI communicator, for the main thread: channels that are free, and how
    many were made.
    """

    free: list[Channels] = field(default_factory=list)
    dropped: list[Channels] = field(default_factory=list)  # by finalizers: nobody closed theirs
    made: int = 0
    subsets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    # some rank did not take part in making channels: what it does now would match the wrong call
    spoiled: bool = False

    def take_channels(self, comm: Any, timeout_s: float) -> Channels:
        """Return channels that are free on every rank, or make some. Collective over `comm`."""
        if self.spoiled:
            why = "an earlier MpiCommunicator here was not made on every rank"
            raise lost_in_setup(time.monotonic(), why)
        while self.dropped:
            self.give_back(self.dropped.pop())
        offered = sorted(channels.serial for channels in self.free)[-OFFERS:]
        host = zlib.crc32(host_identity().encode())
        padded = [*offered, *[0] * (OFFERS - len(offered)), host]
        everyone = self._gather(comm, np.array(padded, np.int64), timeout_s)
        one_host = len({*everyone[:, OFFERS].tolist()}) == 1
        common = set(offered).intersection(*everyone[:, :OFFERS].tolist())
        if common:
            channels = next(channels for channels in self.free if channels.serial == max(common))
            self.free.remove(channels)
            channels.uses += 1
        else:
            channels = self._make(comm, timeout_s)
        channels.lost, channels.listening = None, peers.make_socket(one_host)
        card = peers.here(one_host, channels.listening).ljust(CARD_NBYTES)
        cards = self._gather(comm, np.frombuffer(card, np.uint8), timeout_s)
        channels.cards = [row.tobytes() for row in cards]
        return channels

    def _make(self, comm: Any, timeout_s: float) -> Channels:
        """Return new channels. Collective over `comm`."""
        copies = call(lambda: [comm.Idup() for _ in range(len(Channel) + 2)])
        self._wait([request for _, request in copies], copies, timeout_s)
        comms = [copy for copy, _ in copies]
        for copy in comms:
            copy.Set_errhandler(mpi().ERRORS_RETURN)
        self.made += 1
        by_channel = dict(zip(Channel, comms, strict=False))
        channels = Channels(by_channel, comms[-2], comms[-1], self.made)
        _made.append(channels)
        return channels

    def give_back(self, channels: Channels) -> None:
        """Let channels serve again unless something on them has not ended."""
        if channels.listening is not None and not channels.broken:
            channels.listening.close()
        if left := channels.forget():
            unanswered.append(left)
        elif not channels.broken and not channels.gone:
            self.free.append(channels)

    def make_subset(self, comm: Any, members: Sequence[int], timeout_s: float) -> Any:
        """Return an MPI communicator of some ranks, which have met. Collective over these: PeerLost
        if one did not take part within `timeout_s`.

        MPI has no call for this that does not block: should a rank end just now, the thread that
        waits is left behind where threads may call MPI.
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
        """Return the arrays of all ranks, one a row."""
        everyone = np.zeros((comm.Get_size(), len(mine)), mine.dtype)
        self._wait([call(lambda: comm.Iallgather(mine, everyone))], [mine, everyone], timeout_s)
        return everyone

    def _wait(self, requests: list[Any], kept: object, timeout_s: float) -> None:
        """Wait for what every rank has to take part in."""
        begun, pause = time.monotonic(), Pause()
        while not call(lambda: mpi().Request.Testall(requests)):
            if time.monotonic() - begun > timeout_s:
                unanswered.append((requests, kept))
                self.spoiled = True
                raise lost_in_setup(begun, "not every rank made its MpiCommunicator")
            pause()


_keyval: int | None = None


def kept_with(comm: Any) -> Parent:
    """Return what is kept with an MPI communicator; it goes when the communicator goes."""
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
# what no peer will complete, with its buffers: MPI may use them until the process ends
unanswered: list[Any] = []


@atexit.register
def _leave() -> None:
    """After a lost peer, end the job instead of waiting in MPI_Finalize, once the other ranks are
    at their end, too.

    A rank that has heard of trouble says when it is; one that has not (it may be in MPI_Finalize
    already) says nothing, so the wait ends after LEAVE_S.
    """
    if mpi() is None or mpi().Is_finalized():
        return
    _here.calls_mpi = True  # the thread of ours has ended
    for channels in _made:
        channels.read_news()
        if channels.listening is not None and not channels.broken:
            channels.listening.close()  # others may wait for this rank, which waits in MPI_Finalize
    trouble = [channels for channels in _made if channels.broken or channels.gone]
    for channels in trouble:
        channels.send_news(LEAVING)
        unanswered.extend(kept for kept in channels.pending.values() if not kept[0].Test())
    if not unanswered:
        return
    # of an exception that nobody caught: others are not to go on without this rank
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
    time.sleep(5)  # MPICH's returns, and the process is ended a little later
    os._exit(1)
