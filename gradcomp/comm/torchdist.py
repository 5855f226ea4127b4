"""torch.distributed (gloo) as a communicator: one process group a channel.

The groups are made with `use_local_synchronization=True`: without it, groups made by each data-parallel row of a mesh
gave wrong sums. Every communicator has groups of its own: two pipelines on one group would start their collectives in an
order that differs between ranks. A closed communicator's groups are kept for the next one on the same parent group, since
torch cannot make a group again under the name of a destroyed one (it connects to stale addresses and hangs).
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator, Work
from gradcomp.comm.mailbox import Mailbox
from gradcomp.comm.meeting import meet, setup_timeout_s
from gradcomp.comm.torch_private import store_at
from gradcomp.errors import PeerLost


@dataclass(eq=False)
class _Groups:
    """One process group a channel, and whether a collective on them has failed."""

    by_channel: dict[Channel, dist.ProcessGroup]
    timeout_s: float
    serial: int  # number of its making, the same on every rank
    broken: bool = False


_SLICE_S = 1.0  # longest wait that does not look whether another collective of the same communicator has failed

_free: weakref.WeakKeyDictionary[Any, list[_Groups]] = weakref.WeakKeyDictionary()  # by parent group
_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many, by parent group
_subsets: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()  # by parent group
_free_lock = threading.Lock()


def _take(parent: dist.ProcessGroup, timeout_s: float) -> _Groups:
    """Return groups that are free, or make them (a collective call)."""
    with _free_lock:
        free = _free.setdefault(parent, [])
        fitting = [groups for groups in free if groups.timeout_s == timeout_s]
        if fitting:  # the oldest, not the first to be closed: ranks may close in different orders
            oldest = min(fitting, key=lambda groups: groups.serial)
            free.remove(oldest)
            return oldest
        _made[parent] = serial = _made.get(parent, 0) + 1
    ranks = dist.get_process_group_ranks(parent)
    begun = time.monotonic()
    try:
        return _make(ranks, timeout_s, serial)
    except RuntimeError as error:
        waited, text = time.monotonic() - begun, str(error).splitlines()[0]
        raise PeerLost("setup", -1, waited, f"not every rank registered gradcomp: {text}") from error


def _make(ranks: list[int], timeout_s: float, serial: int) -> _Groups:
    return _Groups(
        {
            channel: dist.new_group(
                ranks,
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc=f"gradcomp {channel.name.lower()}",
            )
            for channel in Channel
        },
        timeout_s,
        serial,
    )


class _TorchWork(Work):
    def __init__(self, work: Any, groups: _Groups, buffers: tuple[Tensor, ...]) -> None:
        self._work, self._groups = work, groups
        self._buffers = buffers  # the collective reads and writes them until it is done

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                self._work.wait(timedelta(seconds=max(0.001, min(left, _SLICE_S))))
                return
            except RuntimeError as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                late = "imed out" in text or "imeout" in text
                if late and left > _SLICE_S and not self._work.is_completed() and not self._groups.broken:
                    continue
                self._groups.broken = True
                raise (TimeoutError if late else ConnectionError)(text) from error


class TorchCommunicator(Communicator):
    """The ranks of a torch.distributed process group, over gloo groups of their own.

    Args:
        process_group: the ranks to speak with; the default group when None.
        timeout_s: seconds after which a collective that a peer does not answer fails.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in `process_group`.
        PeerLost: another rank did not make its communicator within `timeout_s`.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group('gloo') first, "
                "for instance in a script started by torchrun"
            )
        parent = process_group if process_group is not None else dist.group.WORLD
        self.rank = dist.get_rank(parent)
        if parent is None or self.rank < 0:
            raise ValueError("this process is not a member of the process group")
        self.world_size = dist.get_world_size(parent)
        self._parent = parent
        self.timeout_s = timeout_s
        self.members = tuple(dist.get_process_group_ranks(parent))  # their ranks in the default group
        self._mailbox: Mailbox | None = None
        self._groups: _Groups | None = _take(parent, timeout_s)

    def start_max(self, values: Tensor, channel: Channel) -> Work:
        groups, group = self._channel(channel)
        work = dist.all_reduce(values, dist.ReduceOp.MAX, group=group, async_op=True)
        return _TorchWork(work, groups, (values,))

    def start_all_to_all(
        self, send: Tensor, send_nbytes: Sequence[int], recv: Tensor, recv_nbytes: Sequence[int], channel: Channel
    ) -> Work:
        groups, group = self._channel(channel)
        work = dist.all_to_all_single(recv, send, list(recv_nbytes), list(send_nbytes), group=group, async_op=True)
        return _TorchWork(work, groups, (send, recv))

    def start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        groups, group = self._channel(channel)
        return _TorchWork(dist.all_gather_single(recv, send, group=group, async_op=True), groups, (send, recv))

    def subset(self, ranks: Sequence[int], timeout_s: float) -> TorchCommunicator:
        with _free_lock:
            made = _subsets.setdefault(self._parent, {})
        members = tuple(ranks)
        if members not in made:
            whole = dist.get_process_group_ranks(self._parent)
            made[members] = dist.new_group(
                [whole[rank] for rank in members],
                backend="gloo",
                timeout=timedelta(seconds=timeout_s),
                use_local_synchronization=True,
                group_desc="gradcomp subset",
            )
        return TorchCommunicator(made[members], timeout_s=timeout_s)

    def start_send(self, message: Tensor, to: int) -> Work:
        """As `Communicator.start_send`; the first message, sent or received, connects all ranks (a collective call)."""
        self.check_peer(to)
        return self._mail().start_send(message, to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> tuple[int, Tensor]:
        """As `Communicator.receive`; the first message, sent or received, connects all ranks (a collective call)."""
        return self._mail().receive(timeout_s, source, max_nbytes)

    def abort(self) -> None:
        """End every wait on these groups within a second; gloo has no word for telling the peers, messages have."""
        if self._groups is not None:
            self._groups.broken = True
        if self._mailbox is not None:
            self._mailbox.close()

    def close(self) -> None:
        """Give the channels back for the next communicator on the same process group."""
        if self._mailbox is not None:
            self._mailbox.close()
        groups, self._groups = self._groups, None
        if groups is not None and not groups.broken:
            with _free_lock:
                _free.setdefault(self._parent, []).append(groups)

    def _mail(self) -> Mailbox:
        if self._mailbox is None:
            begun = time.monotonic()
            try:
                self._mailbox = Mailbox(
                    self.rank,
                    self.world_size,
                    lambda card: self.all_gather_bytes(card, self.timeout_s),
                    self.timeout_s,
                )
            except (TimeoutError, ConnectionError) as error:
                raise PeerLost("setup", -1, time.monotonic() - begun, f"not every rank takes part: {error}") from error
        return self._mailbox

    def _channel(self, channel: Channel) -> tuple[_Groups, dist.ProcessGroup]:
        if self._groups is None:
            raise RuntimeError("this communicator is closed")
        return self._groups, self._groups.by_channel[channel]


_default: tuple[Any, TorchCommunicator] | None = None


def default_communicator() -> TorchCommunicator:
    """Return the communicator over the default process group, made at the first call (a collective one) and kept.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """
    global _default
    world = dist.group.WORLD if dist.is_initialized() else None
    if _default is None or _default[0] is not world or world is None:
        _default = (world, TorchCommunicator())
    return _default[1]


_RANK = struct.Struct("<IIB")  # rank, world size, whether the communicator is made of the process group
_lives = itertools.count()
_places: weakref.WeakKeyDictionary[Any, tuple[int, Counter[Any]]] = weakref.WeakKeyDictionary()  # by default group


def _meet(members: tuple[int, ...], mine: bytes, timeout_s: float, what: str) -> list[bytes]:
    """Meet the ranks `members` of the default group: each rank's k-th meeting of these members for this purpose."""
    life, places = _places.setdefault(dist.group.WORLD, (next(_lives), Counter()))  # stores may outlive their groups
    places[members, what] += 1
    name = "_".join(map(str, members))
    digest = hashlib.blake2b(f"{name}/{what}".encode(), digest_size=16).hexdigest()
    store = store_at(f"gradcomp/{life}/{digest}/{places[members, what]}")
    return meet(store, members.index(dist.get_rank()), len(members), mine, timeout_s, what)


def same_ranks(comm: Communicator, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0) -> None:
    """Raise ValueError, on every rank, unless `comm` has the ranks of a process group, numbered alike.

    Collective over the process group. It meets in the store and does not use the group itself.

    Args:
        comm: any communicator.
        process_group: the default group when None.
        timeout_s: seconds to wait for the other ranks; at most those of GRADCOMP_SETUP_TIMEOUT_S.

    Raises:
        ValueError: another rank or number of ranks in `comm`, on any rank; or ranks of another job.
        PeerLost: a rank did not call this.
    """
    parent = process_group if process_group is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(parent))
    native = isinstance(comm, TorchCommunicator) and comm.members == members
    seconds, kind = setup_timeout_s(timeout_s), type(comm).__name__
    mine = _RANK.pack(comm.rank, comm.world_size, native)
    everyone = [_RANK.unpack(r) for r in _meet(members, mine, seconds, "registered this model")]
    for rank, (theirs, size, _) in enumerate(everyone):
        if (theirs, size) != (rank, len(members)):
            raise ValueError(
                f"comm has other ranks than the process group: rank {rank} of {len(members)} of the process group is "
                f"rank {theirs} of {size} of the communicator (here a {kind}); leave comm out, or start the script with "
                "the launcher of that communicator (mpirun for MpiCommunicator)"
            )
    if all(made_of_it for _, _, made_of_it in everyone):
        return
    begun = time.monotonic()
    try:
        identity = comm.identity(timeout_s)
    except (TimeoutError, ConnectionError) as error:
        raise PeerLost("setup", -1, time.monotonic() - begun, str(error)) from error
    if len(set(_meet(members, identity, seconds, "compared its communicator"))) > 1:
        raise ValueError(f"comm (here a {kind}) has ranks that the process group does not have: give it the same ranks")
