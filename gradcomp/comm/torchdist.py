"""A communicator over torch.distributed, with one gloo group for each channel.

To create one, its ranks meet in the store of the default process group. The meeting has a timeout,
names missing ranks, and checks that all ranks use the same `timeout_s`. The gloo groups
(`gradcomp.comm.gloo`) belong to the communicator and are closed with it.
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

OF_TORCH = "torch's own collectives"  # `PeerLost.phase` where torch itself has lost a rank
PATIENCE = 2.0  # warn if the process group's timeout is longer than gradcomp's by this factor
# timeout_s; random bytes for a unique key prefix, since stores outlive groups; hash of the host
_CARD = struct.Struct("<d8s16s")
# rank, world size, whether the communicator was made from the process group
_RANK = struct.Struct("<IIB")


class _Rendezvous:
    """A store in which sets of ranks meet, any number of times; `job` is that of `Groups`."""

    def __init__(self, store: Any, rank: int, job: Callable[[], Any]) -> None:
        self._store, self.rank, self.job = store, rank, job
        self._meetings: Counter[Any] = Counter()

    def meeting(self, members: tuple[int, ...], what: str) -> Any:
        """Return a new store for the next meeting of `members` for the purpose `what`."""
        self._meetings[members, what] += 1
        key = f"{'_'.join(map(str, members))}/{what}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        prefix = f"gradcomp/{digest}/{self._meetings[members, what]}"
        return private.store_below(self._store, prefix)


# by default group
_by_group: weakref.WeakKeyDictionary[Any, _Rendezvous] = weakref.WeakKeyDictionary()


def _default_rendezvous() -> _Rendezvous:
    world = dist.group.WORLD
    rendezvous = _by_group.get(world)
    if rendezvous is None:
        rendezvous = _by_group[world] = _Rendezvous(
            private.default_store(), dist.get_rank(), weakref.ref(world)
        )
    return rendezvous


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
    """A communicator of the ranks of a torch.distributed process group, over its own gloo groups.

    The constructor is collective over these ranks. So is the first use of the control channel,
    which connects it. A communicator that is garbage collected without `close` also releases its
    resources. Ranks may close their communicators in any order, or not at all.

    A rank that gives up, closes its communicator or ends its program leaves a note in the store of
    the process group. Waits of its peers then raise PeerLost, with the rank and the reason, within
    about a second. Collectives of torch itself (buffers, bucket rebuilds) use the timeout of
    ``init_process_group(timeout=...)``; a warning is logged if it is much longer than `timeout_s`.

    After a failure, ranks probe which process has ended, is stopped or cannot be reached
    (`gradcomp.comm.peers`), and PeerLost names that rank.

    On N ranks a communicator uses 3 (N + 3) file descriptors, N + 3 more with the control channel,
    and about twice as many with ``exchange="hierarchical"``. ``ulimit -n 1024`` is enough for about
    300 ranks. Above the limit, GradcompError reports how many are needed.

    Args:
        process_group: process group of the ranks; None: the default group.
        timeout_s: timeout of a wait for a peer, in seconds, equal on every rank; None: the timeout
            of torch's own collectives on the process group.

    Attributes:
        members: ranks of this communicator in the default group, in rank order.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not in `process_group`.
        PeerLost: another rank did not create its communicator in time (GRADCOMP_SETUP_TIMEOUT_S).
        PeerMismatch: ranks have different `timeout_s`.
        GradcompError: too few file descriptors.
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
        self._join(_default_rendezvous(), members, own_s if timeout_s is None else timeout_s)
        if self.rank == 0 < self.world_size - 1 and own_s > PATIENCE * self.timeout_s:
            _warn(self.timeout_s, own_s)

    @classmethod
    def over(cls, store: Any, rank: int, world_size: int, *, timeout_s: float) -> TorchCommunicator:
        """Return a communicator of all ranks that share `store`. Needs no default process group.

        Args:
            store: `torch.distributed.Store` used by these ranks only.
            rank, world_size: rank of this process, and number of ranks.
            timeout_s: as for the constructor.

        Raises:
            PeerLost, PeerMismatch, GradcompError: as for the constructor.
        """
        rendezvous = _Rendezvous(store, rank, lambda: None)
        return cls._of(rendezvous, tuple(range(world_size)), timeout_s)

    def _join(self, rendezvous: _Rendezvous, members: tuple[int, ...], timeout_s: float) -> None:
        """Initialise this communicator. Collective over `members`, ranks in `rendezvous`."""
        self._rendezvous, self.members, self.timeout_s = rendezvous, members, timeout_s
        self.rank, self.world_size = members.index(rendezvous.rank), len(members)
        self._mailbox: Mailbox | None = None
        # for creating the mailbox, since one thread may send while another receives
        self._connecting = threading.Lock()
        store = rendezvous.meeting(members, "communicator")
        what, seconds = "called register, or made its communicator", setup_timeout_s(timeout_s)
        host = hashlib.blake2b(host_identity().encode(), digest_size=16).digest()
        mine = _CARD.pack(timeout_s, secrets.token_bytes(8), host)
        everyone = meet(store, self.rank, members, mine, seconds, what)
        timeouts_s, _, hosts = zip(*map(_CARD.unpack, everyone), strict=True)
        for rank, theirs_s in enumerate(timeouts_s):
            if theirs_s != timeouts_s[0]:
                wait_until_read(store)
                raise PeerMismatch("timeout_s", rank, timeouts_s[0], theirs_s)
        prefix = hashlib.blake2b(b"".join(everyone), digest_size=16).hexdigest()
        inner = private.store_below(store, prefix)
        one_host = len(set(hosts)) == 1
        self._groups = Groups(
            inner, self.rank, members, timeout_s, rendezvous.job, one_host=one_host
        )
        self._end = weakref.finalize(self, self._groups.drop)
        if self.world_size > 1:
            self._groups.connect(Channel.FIRST)

    @classmethod
    def _of(
        cls, rendezvous: _Rendezvous, members: tuple[int, ...], timeout_s: float
    ) -> TorchCommunicator:
        comm = object.__new__(cls)
        comm._join(rendezvous, members, timeout_s)
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

    def follow(self, start: Callable[[], Any], group: Any) -> Callable[[], None]:
        """Start a collective of torch itself, and return a function that waits for it.

        A rank that gives up ends the wait, as in collectives of this communicator. gloo waits for a
        reduce-scatter without looking, until the timeout of the process group.

        Args:
            start: starts it and returns torch's handle.
            group: its process group, of these ranks.

        Raises:
            PeerLost: (the returned function) not complete after `timeout_s` or the group's own
                timeout, or a rank is lost.
        """
        work = self._groups.follow(start(), group)

        def finish() -> None:
            with peers_answer(OF_TORCH):
                work.wait(min(self.timeout_s, private.group_timeout_s(group)))

        return finish

    def subset(self, ranks: Sequence[int], timeout_s: float) -> TorchCommunicator:
        members = tuple(self.members[rank] for rank in ranks)
        return TorchCommunicator._of(self._rendezvous, members, timeout_s)

    def start_send(self, message: Tensor, to: int) -> Work:
        """As `Communicator.start_send`. The first message connects all ranks (collective)."""
        self.check_peer(to)
        return self._mail().start_send(message, to)

    def receive(self, timeout_s: float, source: int | None = None, *, max_nbytes: int) -> Message:
        """As `Communicator.receive`. The first message connects all ranks (collective)."""
        return self._mail().receive(timeout_s, source, max_nbytes)

    def abort(self, reason: str = "") -> None:
        """End every wait on this communicator, on this rank and its peers, in about a second."""
        self._groups.give_up(reason)
        if self._mailbox is not None:
            self._mailbox.close()

    def find_lost(self) -> ConnectionError | None:
        return self._groups.find_ending(self._groups.notes.look_for_cause)

    def close(self) -> None:
        """Close sockets and end threads."""
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
    """Return the TCPStore at MASTER_ADDR and MASTER_PORT, in which ranks can meet before any other
    connection exists. The process with `serves` hosts it.

    Raises:
        ConnectionError: the port is taken, or the host does not answer within `timeout_s`.
    """
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, serves, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        raise ConnectionError(first_line(error)) from error


def open_group(store: Any, rank: int, world_size: int, timeout_s: float) -> None:
    """Initialise torch.distributed's default process group over gloo. Collective."""
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )


_default: tuple[Any, TorchCommunicator] | None = None


def is_initialized() -> bool:
    """Return whether torch.distributed has a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_size() -> int:
    """Return the world size of torch.distributed's default process group, 1 without one."""
    return dist.get_world_size() if is_initialized() else 1


def group_rank() -> int:
    """Return this process's rank in torch.distributed's default process group, 0 without one."""
    return dist.get_rank() if is_initialized() else 0


def read_checkpoint(
    checkpoint_id: str, wanted: Callable[[str], bool], prefix: str
) -> dict[str, Any]:
    """Return the `wanted` keys of a `torch.distributed.checkpoint` folder. Not collective.

    `prefix` is removed from the keys. A remaining key "a.b" becomes entry "b" of a dictionary "a".
    Raises ValueError if the folder has no checkpoint.
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


def made_default() -> TorchCommunicator | None:
    """Return what `default_communicator` has made; None: nothing, or it has failed."""
    if _default is None or not is_initialized() or _default[0] is not dist.group.WORLD:
        return None
    return None if _default[1]._groups.broken else _default[1]


def default_communicator() -> TorchCommunicator:
    """Return the communicator over the default group. The first call, and the first one after a
    failure, make it (collective).
    """
    global _default
    made = made_default()
    if made is None:
        made = TorchCommunicator()
        _default = (dist.group.WORLD, made)
    return made


def default_or_alone() -> Communicator:
    """Return `default_communicator()`, or a communicator of one rank without torch.distributed."""
    return default_communicator() if is_initialized() else LocalCommunicator.group(1)[0]


def reduce_scatter(
    comm: TorchCommunicator, output: Tensor, given: Tensor, group: dist.ProcessGroup, op: Any
) -> None:
    """Reduce-scatter `given`, ``(N * k,)``, by `op` into `output`, ``(k,)``, as torch does.
    Raises PeerLost as `TorchCommunicator.follow`, whose ranks `group` has.
    """
    _by_torch(comm, dist.reduce_scatter_tensor, output, given, group=group, op=op)


def all_gather(
    comm: TorchCommunicator, output: Tensor, given: Tensor, group: dist.ProcessGroup
) -> None:
    """All-gather `given`, ``(k,)``, into `output`, ``(N * k,)``, as `reduce_scatter`."""
    _by_torch(comm, dist.all_gather_into_tensor, output, given, group=group)


def _by_torch(
    comm: TorchCommunicator, collective: Any, output: Tensor, given: Tensor, **how: Any
) -> None:
    if given.is_cpu:
        start = functools.partial(collective, output, given, **how, async_op=True)
        comm.follow(start, how["group"])()
    else:
        collective(output, given, **how)


def divisor(op: Any, world_size: int) -> int | None:
    """Return what turns a reduce op's result into a mean: 1 (AVG), `world_size` (SUM) or None."""
    return {dist.ReduceOp.AVG: 1, dist.ReduceOp.SUM: world_size}.get(getattr(op, "op", op))


def same_ranks(
    comm: Communicator, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0
) -> None:
    """Check that `comm` has the same ranks as a process group, in the same order.

    Collective over `process_group` (None: the default group), but uses only the store and not the
    group. Each wait is bounded by `timeout_s` and by GRADCOMP_SETUP_TIMEOUT_S, in seconds.

    Raises:
        ValueError: on every rank, if the ranks differ.
        PeerLost: a rank did not call this in time.
    """
    parent = process_group if process_group is not None else dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(parent))
    native = (
        isinstance(comm, TorchCommunicator)
        and comm.members == members
        and comm._rendezvous is _default_rendezvous()
    )
    here, seconds = members.index(dist.get_rank()), setup_timeout_s(timeout_s)
    kind = type(comm).__name__

    def gather(mine: bytes, what: str) -> tuple[Any, list[bytes]]:
        store = _default_rendezvous().meeting(members, what)
        return store, meet(store, here, members, mine, seconds, what)

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
