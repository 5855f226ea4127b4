"""torch.distributed (gloo) as a communicator: one gloo group a channel, and whose ranks a
communicator has.

Making one is a meeting of its ranks in the store of the default group, which is bounded, names who
is missing and agrees on the timeout. The groups (`gradcomp.comm.gloo`) belong to the communicator
and end with it: nothing is left to be used again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import secrets
import struct
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradcomp.comm import torch_private as private
from gradcomp.comm.addresses import host_identity
from gradcomp.comm.base import Channel, Communicator, Counts, Message, Work, first_line
from gradcomp.comm.gloo import Groups
from gradcomp.comm.local import LocalCommunicator
from gradcomp.comm.mailbox import Mailbox
from gradcomp.comm.store import meet, setup_timeout_s, wait_until_read
from gradcomp.errors import PeerMismatch, peers_answer

logger = logging.getLogger("gradcomp")

PATIENCE = 2.0  # a process group that waits so many times longer than gradcomp is worth a warning
# timeout_s, what makes the keys of this communicator its own (stores outlive groups), the host
_CARD = struct.Struct("<d8s16s")
# rank, world size, whether the communicator is made of the process group
_RANK = struct.Struct("<IIB")


class _Home:
    """A store in which ranks meet, each set of them again and again.

    Args:
        store: of these ranks.
        rank: of this process in it.
        job: see `gradcomp.comm.gloo.Groups`.
    """

    def __init__(self, store: Any, rank: int, job: Callable[[], Any]) -> None:
        self._store, self.rank, self.job = store, rank, job
        self._meetings: Counter[Any] = Counter()

    def meeting(self, members: tuple[int, ...], what: str) -> Any:
        """Return where `members` meet, for the k-th time for this purpose."""
        self._meetings[members, what] += 1
        key = f"{'_'.join(map(str, members))}/{what}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        prefix = f"gradcomp/{digest}/{self._meetings[members, what]}"
        return private.store_below(self._store, prefix)


_homes: weakref.WeakKeyDictionary[Any, _Home] = weakref.WeakKeyDictionary()  # by default group


def _default_home() -> _Home:
    world = dist.group.WORLD
    home = _homes.get(world)
    if home is None:
        home = _homes[world] = _Home(private.default_store(), dist.get_rank(), weakref.ref(world))
    return home


@functools.cache  # once
def _warn(ours_s: float, theirs_s: float) -> None:
    logger.warning(
        "gradcomp: a lost peer ends gradcomp's waits after %g s, but torch's own (broadcast of"
        " buffers, rebuilding of buckets) after %g s:"
        " init_process_group(timeout=timedelta(seconds=%g)) makes them alike",
        ours_s,
        theirs_s,
        ours_s,
    )


class TorchCommunicator(Communicator):
    """The ranks of a torch.distributed process group, over gloo groups of their own.

    Making one is a collective call of all its ranks, and so is the first use of its control
    channel, which connects only then. A communicator that is dropped without `close` gives
    everything back, too. Two ranks need not close in the same order, or at all.

    A rank that gives up or closes, or whose program ends, says so in the process group's store;
    waits of its peers then end within about a second in PeerLost with rank and reason. Torch's own
    collectives (buffers, bucket rebuilds) wait as long as ``init_process_group(timeout=...)`` says;
    a warning says so where that is far longer than `timeout_s`.

    After a failure ranks look which process has ended, is stopped or cannot be reached
    (`gradcomp.comm.peers`), and PeerLost names it.

    On N ranks it takes 3 (N + 3) file descriptors, N + 3 more with the control channel, and about
    twice that under ``exchange="hierarchical"``. ``ulimit -n 1024`` lasts to 300 ranks or so;
    GradcompError says how many are missing.

    Args:
        process_group: the ranks to speak with; the default group when None.
        timeout_s: seconds after which a collective that a peer does not answer fails, the same on
            every rank; as long as torch's own collectives on the process group wait, when None.

    Attributes:
        members: their ranks in the default group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in `process_group`.
        PeerLost: another rank did not make its communicator in time (GRADCOMP_SETUP_TIMEOUT_S).
        PeerMismatch: another `timeout_s` on some rank.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float | None = None
    ) -> None:
        if not is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call"
                " torch.distributed.init_process_group('gloo') first, for instance in a script"
                " started by torchrun"
            )
        parent = process_group if process_group is not None else dist.group.WORLD
        if parent is None or dist.get_rank(parent) < 0:
            raise ValueError("this process is not a member of the process group")
        own_s = private.group_timeout_s(parent)
        members = tuple(dist.get_process_group_ranks(parent))
        self._join(_default_home(), members, own_s if timeout_s is None else timeout_s)
        if self.rank == 0 < self.world_size - 1 and own_s > PATIENCE * self.timeout_s:
            _warn(self.timeout_s, own_s)

    @classmethod
    def over(cls, store: Any, rank: int, world_size: int, *, timeout_s: float) -> TorchCommunicator:
        """Return the communicator of all ranks that call this with a store of their own, which no
        default process group has to know of.

        Args:
            store: `torch.distributed.Store` in which these ranks, and no others, meet.
            rank, world_size: of this process among them.
            timeout_s: as above.

        Raises:
            PeerLost, PeerMismatch: as above.
        """
        home = _Home(store, rank, lambda: None)
        return cls._of(home, tuple(range(world_size)), timeout_s)

    def _join(self, home: _Home, members: tuple[int, ...], timeout_s: float) -> None:
        """Become the communicator of `members` with the others that do."""
        self._home, self.members, self.timeout_s = home, members, timeout_s
        self.rank, self.world_size = members.index(home.rank), len(members)
        self._mailbox: Mailbox | None = None
        self._connecting = threading.Lock()  # of the mailbox: one thread may send, another receive
        store = home.meeting(members, "communicator")
        what, seconds = "called register, or made its communicator", setup_timeout_s(timeout_s)
        host = hashlib.blake2b(host_identity().encode(), digest_size=16).digest()
        mine = _CARD.pack(timeout_s, secrets.token_bytes(8), host)
        everyone = meet(store, self.rank, self.world_size, mine, seconds, what)
        timeouts_s, _, hosts = zip(*map(_CARD.unpack, everyone), strict=True)
        for rank, theirs_s in enumerate(timeouts_s):
            if theirs_s != timeouts_s[0]:
                wait_until_read(store)
                raise PeerMismatch("timeout_s", rank, timeouts_s[0], theirs_s)
        prefix = hashlib.blake2b(b"".join(everyone), digest_size=16).hexdigest()
        inner = private.store_below(store, prefix)
        one_host = len(set(hosts)) == 1
        self._groups = Groups(
            inner, self.rank, self.world_size, timeout_s, home.job, one_host=one_host
        )
        self._end = weakref.finalize(self, self._groups.drop)
        if self.world_size > 1:
            self._groups.connect(Channel.FIRST)

    @classmethod
    def _of(cls, home: _Home, members: tuple[int, ...], timeout_s: float) -> TorchCommunicator:
        comm = object.__new__(cls)
        comm._join(home, members, timeout_s)
        return comm

    def _start_max(self, values: Tensor, channel: Channel) -> Work:
        return self._groups.start(channel, private.start_max, values)

    def _start_all_to_all(
        self, send: Tensor, send_nbytes: Counts, recv: Tensor, recv_nbytes: Counts, channel: Channel
    ) -> Work:
        counts = list(recv_nbytes), list(send_nbytes)
        return self._groups.start(channel, private.start_all_to_all, recv, send, counts)

    def _start_all_gather(self, send: Tensor, recv: Tensor, channel: Channel) -> Work:
        return self._groups.start(channel, private.start_all_gather, recv, send)

    def subset(self, ranks: Sequence[int], timeout_s: float) -> TorchCommunicator:
        members = tuple(self.members[rank] for rank in ranks)
        return TorchCommunicator._of(self._home, members, timeout_s)

    def start_send(self, message: Tensor, to: int) -> Work:
        """As `Communicator.start_send`; the first message connects all ranks (collective)."""
        self.check_peer(to)
        return self._mail().start_send(message, to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        """As `Communicator.receive`; the first message connects all ranks (collective)."""
        return self._mail().receive(timeout_s, source, max_nbytes)

    def abort(self, reason: str = "") -> None:
        """End every wait on this communicator, here and on peers, within about a second."""
        self._groups.give_up(reason)
        if self._mailbox is not None:
            self._mailbox.close()

    def close(self) -> None:
        """Give sockets and threads back."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._end.detach()
        self._groups.close()

    def _mail(self) -> Mailbox:
        with self._connecting:
            if self._mailbox is None:
                share = functools.partial(self.all_gather_bytes, timeout_s=self.timeout_s)
                self._mailbox = Mailbox(self.rank, self.world_size, share, self.timeout_s)
            return self._mailbox


# ---- torch.distributed, for modules that do not import it ----------------------------------------


def open_store(host: str, port: int, *, serves: bool, timeout_s: float) -> Any:
    """Return the store at MASTER_ADDR and MASTER_PORT, in which ranks can meet before anything else
    connects them; where this process `serves`, others find it there.

    Raises:
        ConnectionError: the port is taken, or nothing answers for `timeout_s`.
    """
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, serves, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise ConnectionError(first_line(error)) from error


def open_group(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Make torch.distributed's default group over gloo, of the ranks that call this."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


_default: tuple[Any, TorchCommunicator] | None = None


def is_initialized() -> bool:
    """Whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_size() -> int:
    """Return the number of ranks of torch.distributed's default process group, 1 without one."""
    return dist.get_world_size() if is_initialized() else 1


def group_rank() -> int:
    """Return this process's rank in torch.distributed's default process group, 0 without one."""
    return dist.get_rank() if is_initialized() else 0


def read_checkpoint(
    checkpoint_id: str, wanted: Callable[[str], bool], prefix: str
) -> dict[str, Any]:
    """Return what a folder of `torch.distributed.checkpoint` has under the keys that are wanted,
    here alone and not as a collective; ValueError if it has no checkpoint.

    `prefix` is left out of the keys; the word after it is that of a dictionary where others follow.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        known = FileSystemReader(checkpoint_id).read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ValueError(
            f"{checkpoint_id} is no checkpoint of torch.distributed.checkpoint: {error}"
        ) from None
    out: dict[str, Any] = {}
    for key, one in known.items():
        if wanted(key):
            out[key] = None
            if isinstance(one, TensorStorageMetadata):
                out[key] = torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
    load(out, checkpoint_id=checkpoint_id, no_dist=True)
    nested: dict[str, Any] = {}
    for key, value in out.items():
        first, _, rest = key.removeprefix(prefix).partition(".")
        inside = nested.setdefault(first, {}) if rest else nested
        inside[rest or first] = value
    return nested


def default_communicator() -> TorchCommunicator:
    """Return the communicator over the default group, made at the first call, a collective one."""
    global _default
    world = dist.group.WORLD if dist.is_initialized() else None
    if _default is None or _default[0] is not world or world is None:
        _default = (world, TorchCommunicator())
    return _default[1]


def default_or_alone() -> Communicator:
    """Return `default_communicator()`, or one of a single rank without torch.distributed."""
    return default_communicator() if is_initialized() else LocalCommunicator.group(1)[0]


def reduce_scatter(
    output: Tensor, given: Tensor, process_group: dist.ProcessGroup, op: Any
) -> None:
    """Write this rank's part ``(k,)`` of what `op` makes of all ranks' ``(N * k,)``."""
    dist.reduce_scatter_tensor(output, given, op=op, group=process_group)


def all_gather(output: Tensor, given: Tensor, process_group: dist.ProcessGroup) -> None:
    """Write all ranks' ``(k,)`` to ``(N * k,)``, as torch does."""
    dist.all_gather_into_tensor(output, given, group=process_group)


def gather_object(mine: Any) -> list[Any] | None:
    """Return the objects of all ranks on rank 0, None on the others, as torch does."""
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone


def divisor(op: Any, world_size: int) -> int | None:
    """Return what an operation of torch is to be divided by for a mean; None if it makes no sum."""
    return {dist.ReduceOp.AVG: 1, dist.ReduceOp.SUM: world_size}.get(getattr(op, "op", op))


def same_ranks(
    comm: Communicator, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
) -> None:
    """Raise ValueError, on every rank, unless `comm` has the ranks of a process group (the default
    one when None), numbered alike; PeerLost if a rank did not call this.

    Collective over the process group. It meets in the store and does not use the group itself. It
    waits for `timeout_s`, at most for GRADCOMP_SETUP_TIMEOUT_S.
    """
    parent = process_group if process_group is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(parent))
    native = (
        isinstance(comm, TorchCommunicator)
        and comm.members == members
        and comm._home is _default_home()
    )
    here, seconds = members.index(dist.get_rank()), setup_timeout_s(timeout_s)
    kind = type(comm).__name__

    def gather(mine: bytes, what: str) -> tuple[Any, list[bytes]]:
        store = _default_home().meeting(members, what)
        return store, meet(store, here, len(members), mine, seconds, what)

    card = _RANK.pack(comm.rank, comm.world_size, native)
    store, cards = gather(card, "registered this model")
    everyone = [_RANK.unpack(theirs) for theirs in cards]
    for rank, (theirs, size, _) in enumerate(everyone):
        if (theirs, size) != (rank, len(members)):
            wait_until_read(store)
            raise ValueError(
                f"comm has other ranks than the process group: rank {rank} of {len(members)} of the"
                f" process group is rank {theirs} of {size} of the communicator (here a {kind});"
                " leave comm out, or start the script with the launcher of that communicator"
                " (mpirun for MpiCommunicator)"
            )
    if all(made_of_it for _, _, made_of_it in everyone):
        return
    with peers_answer("setup"):
        identity = comm.identity(timeout_s)
    store, identities = gather(identity, "compared its communicator")
    if len(set(identities)) > 1:
        wait_until_read(store)
        raise ValueError(
            f"comm (here a {kind}) has ranks that the process group does not have: give it the same"
            " ranks"
        )
