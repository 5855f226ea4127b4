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
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import numpy as np
from torch import Tensor

from gradcomp.comm.base import Channel
from gradcomp.errors import PeerLost

T = TypeVar("T")

SPIN_S = 0.0005  # poll without sleeping for so long
MAX_PAUSE_S = (
    0.0002  # longest sleep between two polls: large messages move on only while somebody polls
)
MAIN_THREAD_ONLY = (
    "MPI was initialised for calls from the main thread only, which overlapped exchanges cannot"
    " keep to: set mpi4py.rc.thread_level = 'serialized' (or 'multiple') before mpi4py.MPI is"
    " imported"
)
OFFERS = 16  # free channels that a rank tells the others of: ranks may have freed different ones
LEAVING = -1
REASON_NBYTES = 300
_WORD = struct.Struct("<i")
# for mpirun to pass on what a rank has printed, which MPICH's drops when the job is aborted
FORWARD_S = 0.3
LEAVE_S = (
    30.0  # at the end of a program that lost a peer, longest wait for the others to end as well
)


# ---- who may call MPI ----------------------------------------------------------------------------

_one_thread: ThreadPoolExecutor | None = None
_one_thread_lock = threading.Lock()
_here = threading.local()


def _call_directly(function: Callable[[], T]) -> T:
    return function()


def _call_on_one_thread(function: Callable[[], T]) -> T:
    global _one_thread
    if getattr(_here, "calls_mpi", False):
        return function()
    with _one_thread_lock:
        if _one_thread is None:
            _one_thread = ThreadPoolExecutor(
                1, "gradcomp-mpi", initializer=lambda: setattr(_here, "calls_mpi", True)
            )
    return _one_thread.submit(function).result()


def call_on_main_thread(function: Callable[[], T]) -> T:
    """Call MPI that was initialised for the main thread only.

    Raises:
        RuntimeError: from any other thread.
    """
    if not sys.modules["mpi4py.MPI"].Is_thread_main():
        raise RuntimeError(MAIN_THREAD_ONLY)
    return function()


def caller(mpi: Any) -> Callable[[Callable[[], T]], T]:
    """Return how MPI may be called: from any thread, from one of ours, or from the main one."""
    level = mpi.Query_thread()
    if level == mpi.THREAD_MULTIPLE:
        return _call_directly
    return _call_on_one_thread if level == mpi.THREAD_SERIALIZED else call_on_main_thread


# ---- channels ------------------------------------------------------------------------------------


@dataclass(eq=False)
class Arriving:
    """A message that has been matched and is on its way."""

    sender: int
    message: Tensor
    request: Any
    done: bool = False


@dataclass(eq=False)
class Channels:
    """The duplicated communicators of one `MpiCommunicator`, and what is known of its peers."""

    by_channel: dict[Channel, Any]
    point: Any  # messages from rank to rank
    news: Any  # "I give up"
    serial: int  # number of its making, the same on every rank
    # peers that have given up: for whose sake, and why
    gone: dict[int, tuple[int, str]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)  # peers that have come to their end
    broken: bool = False
    uses: int = 0  # how many MpiCommunicators have had these channels; tells their messages apart
    # requests with what MPI reads or writes
    pending: dict[int, tuple[Any, object]] = field(default_factory=dict)
    arriving: list[Arriving] = field(default_factory=list)  # messages that have been matched
    said: list[Any] = field(default_factory=list)


@dataclass(eq=False)
class Parent:
    """What is kept with an MPI communicator: channels that are free, and how many were made."""

    free: list[Channels] = field(default_factory=list)
    # by communicators that nobody closed; a finalizer adds them
    dropped: list[Channels] = field(default_factory=list)
    made: int = 0
    subsets: dict[tuple[int, ...], Any] = field(default_factory=dict)
    # some rank did not take part in making channels: what it does now would match the wrong call
    spoiled: bool = False


_keyval: int | None = None
free_lock = threading.Lock()


def kept_with(mpi: Any, comm: Any) -> Parent:
    """Return what is kept with an MPI communicator; it goes when the communicator goes."""
    global _keyval
    if _keyval is None:
        _keyval = mpi.Comm.Create_keyval()
    parent = comm.Get_attr(_keyval)
    if parent is None:
        parent = Parent()
        comm.Set_attr(_keyval, parent)
    return parent  # type: ignore[no-any-return]


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


def take_channels(
    mpi: Any, comm: Any, timeout_s: float, call: Callable[[Callable[[], Any]], Any]
) -> Channels:
    """Return channels that are free on every rank, or make some. Collective over `comm`.

    Raises:
        PeerLost: a rank did not take part within `timeout_s`, now or earlier.
    """
    parent = kept_with(mpi, comm)
    if parent.spoiled:
        raise PeerLost(
            "setup", -1, 0.0, "an earlier MpiCommunicator here was not made on every rank"
        )
    with free_lock:
        while parent.dropped:
            give_back(parent, parent.dropped.pop(), call)
        offered = sorted(channels.serial for channels in parent.free)[-OFFERS:]
    mine, everyone = np.zeros(OFFERS, np.int64), np.zeros((comm.Get_size(), OFFERS), np.int64)
    mine[: len(offered)] = offered
    _wait_all(
        mpi,
        parent,
        [call(lambda: comm.Iallgather(mine, everyone))],
        [mine, everyone],
        timeout_s,
        call,
    )
    common = set(offered).intersection(*everyone.tolist())
    if common:
        with free_lock:
            free = next(channels for channels in parent.free if channels.serial == max(common))
            parent.free.remove(free)
        free.uses += 1
        return free
    copies = call(lambda: [comm.Idup() for _ in range(len(Channel) + 2)])
    _wait_all(mpi, parent, [request for _, request in copies], copies, timeout_s, call)
    comms = [copy for copy, _ in copies]
    for copy in comms:
        copy.Set_errhandler(mpi.ERRORS_RETURN)
    parent.made += 1
    channels = Channels(dict(zip(Channel, comms, strict=False)), comms[-2], comms[-1], parent.made)
    _made.append(channels)
    return channels


def give_back(parent: Parent, channels: Channels, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Have channels that nobody uses any more serve again, unless something on them has not
    ended. Holds `free_lock`.
    """
    left = [kept for kept in channels.pending.values() if not call(kept[0].Test)]
    left += [
        (a.request, a.message) for a in channels.arriving if not (a.done or call(a.request.Test))
    ]
    channels.pending.clear()
    channels.arriving.clear()
    if left:
        unanswered.append(left)
    elif not channels.broken and not channels.gone:
        parent.free.append(channels)


def make_subset(
    mpi: Any,
    comm: Any,
    members: Sequence[int],
    timeout_s: float,
    call: Callable[[Callable[[], Any]], Any],
) -> Any:
    """Return an MPI communicator of some ranks, which have met. Collective over these.

    MPI has no call for this that does not block: should a rank end just now, the thread that waits
    is left behind where threads may call MPI.

    Raises:
        PeerLost: a rank did not take part within `timeout_s`.
    """
    group = comm.Get_group().Incl(list(members))

    def make() -> Any:
        return comm.Create_group(group, members[0])

    if call is not _call_directly:
        return call(make)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(make()), name="gradcomp-subset", daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    if not found:
        unanswered.append(thread)
        kept_with(mpi, comm).spoiled = True
        raise PeerLost(
            "setup", -1, timeout_s, f"not every rank of {list(members)} made its communicator"
        )
    return found[0]


def _wait_all(
    mpi: Any,
    parent: Parent,
    requests: list[Any],
    kept: object,
    timeout_s: float,
    call: Callable[[Callable[[], Any]], Any],
) -> None:
    """Wait for what every rank has to take part in."""
    begun, pause = time.monotonic(), Pause()
    while not call(lambda: mpi.Request.Testall(requests)):
        if time.monotonic() - begun > timeout_s:
            unanswered.append((requests, kept))
            parent.spoiled = True
            raise PeerLost(
                "setup", -1, time.monotonic() - begun, "not every rank made its MpiCommunicator"
            )
        pause()


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
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is None or mpi.Is_finalized():
        return
    for channels in _made:
        read_news(mpi, channels, _call_directly)
    trouble = [channels for channels in _made if channels.broken or channels.gone]
    for channels in trouble:
        tell(mpi, channels, LEAVING)
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
            read_news(mpi, channels, _call_directly)
        pause()
    end_job(mpi)


def end_job(mpi: Any) -> NoReturn:
    """End every rank of the job by MPI_Abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(FORWARD_S)
    mpi.COMM_WORLD.Abort(1)
    time.sleep(5)  # MPICH's returns, and the process is ended a little later
    os._exit(1)


def read_news(mpi: Any, channels: Channels, call: Callable[[Callable[[], Any]], Any]) -> None:
    """Take note of the peers that have given up."""
    status = mpi.Status()
    while (found := call(lambda: channels.news.Improbe(status=status))) is not None:
        note = np.zeros(status.Get_count(mpi.BYTE), np.uint8)
        call(lambda found=found, note=note: found.Recv([note, mpi.BYTE]))  # type: ignore[misc]
        (word,) = _WORD.unpack_from(note.data)
        if word == LEAVING:
            channels.left.add(status.Get_source())
        else:
            channels.gone[status.Get_source()] = (
                word,
                note[_WORD.size :].tobytes().decode(errors="replace"),
            )


def tell(mpi: Any, channels: Channels, word: int, reason: str = "") -> None:
    """Send every peer the rank for whose sake this one gives up, and why, or LEAVING."""
    note = np.frombuffer(_WORD.pack(word) + reason.encode()[:REASON_NBYTES], np.uint8)
    others = [rank for rank in range(channels.news.Get_size()) if rank != channels.news.Get_rank()]
    channels.said += [note, *(channels.news.Isend([note, mpi.BYTE], rank) for rank in others)]
