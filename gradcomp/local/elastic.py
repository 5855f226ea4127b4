"""`ElasticDiLoCo`: local steps at sites that come and go."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradcomp.codecs import Codec
from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.local import LocalCommunicator
from gradcomp.engine.options import Advanced, SiteOptions, takes
from gradcomp.errors import (
    CorruptPayload,
    GradcompError,
    NotFinite,
    PeerLost,
    PeerMismatch,
    peers_answer,
)
from gradcomp.local.client import Client
from gradcomp.local.coordinator import KEPT, POLICIES
from gradcomp.local.inner import SyncEvery
from gradcomp.local.outer import Outer
from gradcomp.local.steps import DiLoCo
from gradcomp.memory.saved import Saved
from gradcomp.payload.wire import VERSION as WIRE_VERSION

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("gradcomp")

TIMEOUT_S = 60.0
RETRY_S = 900.0  # how long a site that has joined tries to reach the coordinator
PART_NBYTES = 16 << 20  # of a state that is sent
MOST_SITES = 4096  # of a state
ATTEMPTS = 20  # failed attempts at one sync, after which a site raises the last error


class ElasticDiLoCo(DiLoCo):
    """`DiLoCo` whose ranks are sites that come and go: a sync leaves out sites that are silent, and
    takes them back when they come again. No process is started again.

    ::

        # once, on a machine that stays up: python -m gradcomp.local --sites 3
        diloco = gradcomp.local.ElasticDiLoCo(
            model, optimizer, "terngrad", coordinator="10.9.0.1:29400", sync_every=100)

    A coordinator (`gradcomp.local.Coordinator`) decides which sites take part in a sync and whether
    it counts; the sites exchange among themselves, over connections that they make for each sync.
    A sync that fails because a site is lost changes nothing, and is made again without it.

    The constructor waits for the next sync, and takes anchors and the outer optimizer's state of
    the other sites: a new site needs no checkpoint, and models need not be equal at the start. A
    site is one process. Sites may have different `sync_every`.

    Args:
        model, inner_optimizer, codec, outer_optimizer: see `gradcomp.DiLoCo`.
        coordinator: "HOST:PORT" of the coordinator.
        sync_every: inner steps between two syncs of this site.
        name: name of this site in messages; sites are ranked by it. None: host and process id.
        late: what becomes of the change of this site's weights if it missed a sync: "add" it to the
            next one, or "drop" it.
        common, advanced: see `gradcomp.ddp.register`. `timeout_s` is 60 when None.

    Attributes:
        late_added, late_dropped: number of late changes that were added and dropped.
        members: names of the sites of the last sync that counted, in rank order.

    Raises:
        PeerMismatch: this site has other settings or another model than the run, which goes on.
        PeerLost: the coordinator does not answer, or too few sites came.
        ValueError, TypeError: see `gradcomp.DiLoCo`.
    """

    @takes(SiteOptions, others="the number of sites changes, and sites average nothing but syncs")
    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        codec: Codec | str,
        *,
        coordinator: str,
        sync_every: SyncEvery,
        outer_optimizer: Outer | None = None,
        name: str | None = None,
        late: str = "add",
        advanced: Advanced | None = None,
        **common: Unpack[SiteOptions],
    ) -> None:
        if late not in POLICIES:
            raise ValueError(f"late must be one of {POLICIES}, got {late!r}")
        if common.get("exchange") == "hierarchical" or (advanced or Advanced()).nodes is not None:
            raise ValueError("a hierarchical exchange needs the same ranks in every sync")
        if common.get("timeout_s") is None:
            common["timeout_s"] = TIMEOUT_S
        if name is not None and not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r}")
        self._settings: dict[str, str] = {}
        self._late = late
        self._site = secrets.token_hex(8)
        self._name = name if name is not None else f"{socket.gethostname()}:{os.getpid()}"
        self._coordinator = coordinator
        self._is_closed = self._distrusts = False
        self._synced: list[str] = []  # keys of the latest syncs in the anchors
        # key of a sync that this site voted for, until it knows the verdict, and whether residuals
        # can be rolled back to before it
        self._pending, self._can_undo = "", False
        self.late_added = self.late_dropped = 0
        self.members: list[str] = []
        self._client().close()  # checks the address
        super().__init__(
            model,
            inner_optimizer,
            codec,
            sync_every=sync_every,
            outer_optimizer=outer_optimizer,
            comm=LocalCommunicator.group(1)[0],
            advanced=advanced,
            **common,
        )
        self._fragment = self._fragments[0]
        self._engine = self._fragment.averager._engine
        self._settings |= self._compared()
        try:
            self._meet(trained=False)
        except BaseException:
            self.close()
            raise

    def _compare_settings(self, settings: Mapping[str, object]) -> None:
        """Keep the settings, which the coordinator compares."""
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self._named]
        values = {**settings, "parameters": shapes, "timeout_s": self._timeout_s}
        self._settings = {name: str(value) for name, value in values.items()}

    def _compared(self) -> dict[str, str]:
        """Return what ranks compare before an exchange, so that a site that differs is refused
        before it takes part in one.
        """
        options, orders = self._engine.options, self._engine.orders
        values: dict[str, object] = {
            "exchange": options.exchange,
            "options": sorted(options.compared().items()),
            "memory_order": {self._named[i][0]: order for i, order in orders.items()},
            "wire version": WIRE_VERSION,
        }
        return {name: str(value) for name, value in values.items()}

    # ---- a sync ----------------------------------------------------------------------------------

    def _sync(self, number: int) -> None:
        self._meet(trained=True)
        for report in self._reports:
            report.step(self.inner_steps)

    def _meet(self, *, trained: bool) -> None:
        """Take part in syncs until one counts.

        Args:
            trained: whether this site has a change of the weights to send.
        """
        if self._is_closed:
            raise GradcompError(f"this {type(self).__name__} is closed")
        engine, fragment = self._engine, self._fragment
        joins, errors = not self._synced, list[GradcompError]()
        with contextlib.closing(self._client()) as client:
            while len(errors) < ATTEMPTS:
                plan = client.arrive(self._arrival(trained))
                if plan["counted"]:  # remember it until this site has the anchors with its change
                    self._can_undo = False
                    self._fragment.drop()
                else:
                    self._resolve_pending(counts=False)
                trained = trained and not plan["counted"]
                comm, error, why, is_sent = None, None, "", bool(plan["trained"])
                syncs = plan["syncs"] + is_sent
                try:
                    comm = self._connect(client.host, plan)
                    engine.move(comm)
                    trained = self._take_anchors(plan, trained)
                    if is_sent:
                        self._pending, self._can_undo = plan["sync"], True
                        share = len(plan["names"]) / plan["trained"]  # a mean of those that trained
                        fragment.send(due=None, progress="", share=share)
                        syncs -= not fragment.is_finite()  # every site raises NotFinite
                except BaseException as failure:
                    if comm is not None:
                        comm.abort(str(failure) or type(failure).__name__)  # nobody waits for this
                    if not isinstance(failure, (PeerLost, PeerMismatch, CorruptPayload)):
                        raise
                    error, why = failure, str(failure)
                lost = getattr(error, "rank", None)
                try:
                    counts, why = client.vote(plan["sync"], self._site, syncs, why, lost)
                finally:
                    engine.comm.close()
                if not counts:
                    if self._can_undo:
                        self._resolve_pending(counts=False)
                    logger.warning("gradcomp: %s: a sync does not count: %s", self._name, why)
                    errors.append(error or PeerLost("sync", -1, 0.0, why))
                    if isinstance(error, PeerMismatch) and plan["rank"]:
                        if self._distrusts and joins:
                            raise error
                        self._distrusts = True  # take the anchors of rank 0
                    continue
                # an outer optimizer that raises leaves anchors that nobody should take
                self.members, self._distrusts = plan["names"], True
                if syncs > plan["syncs"]:
                    fragment.apply(0.0)
                self._synced = [*plan["synced"], plan["sync"]][-KEPT:]
                self._distrusts = False
                self._resolve_pending(counts=True)
                if is_sent and syncs == plan["syncs"]:
                    if joins:  # weights of others are not finite: wait for their next sync
                        continue
                    raise NotFinite(fragment.not_finite())
                return
        raise errors[-1]

    def _arrival(self, trained: bool) -> dict[str, object]:
        return {
            "site": self._site,
            "name": self._name,
            "syncs": self._fragment.syncs,
            "synced": self._synced,
            "pending": self._pending,
            "size": len(self.members),
            "trained": trained,
            "late": self._late,
            "heal": self._distrusts,
            "compare": self._engine.replicas.is_due,
            "settings": self._settings,
        }

    def _resolve_pending(self, *, counts: bool) -> None:
        """Keep or roll back the residuals of a sync whose verdict was not known, if there is one.

        If that sync counted without this site's anchors, its change is in those of the others.
        """
        if self._can_undo and not counts:
            self._engine.discard_step()
        self._pending, self._can_undo = "", False
        self._fragment.drop()

    def _connect(self, host: str, plan: Mapping[str, Any]) -> Communicator:
        """Return a communicator of the sites of a plan."""
        from gradcomp.comm.torch_private import store_below
        from gradcomp.comm.torchdist import TorchCommunicator, open_store

        world_size, timeout_s = len(plan["names"]), self._timeout_s
        if world_size == 1:
            return LocalCommunicator.group(1)[0]
        with peers_answer("setup"):
            store = open_store(host, plan["store_port"], serves=False, timeout_s=timeout_s)
        place = store_below(store, plan["sync"])
        return TorchCommunicator.over(place, plan["rank"], world_size, timeout_s=timeout_s)

    def _take_anchors(self, plan: Mapping[str, Any], trained: bool) -> bool:
        """Let the sites that are behind take the anchors of rank 0; return whether this site still
        has a change of the weights to send.
        """
        engine, fragment, rank, behind = self._engine, self._fragment, plan["rank"], plan["behind"]
        engine.step = plan["syncs"]
        engine.replicas.is_due = bool(plan["compare"])
        if not behind:
            return trained
        data = _packed(fragment.shared_state()) if rank == 0 else b""
        with peers_answer("anchors"):
            data = _from_first(engine.comm, data, behind, self._timeout_s)
        if rank not in behind:
            return trained
        keeps = trained and self._late == "add"
        fragment.take_shared(_unpacked(data), keeps_change=keeps)
        self.late_added += keeps
        self.late_dropped += trained and not keeps
        self._synced, self._distrusts, self._starts_at_anchors = plan["synced"], False, False
        self._pending = ""
        return keeps

    def _client(self) -> Client:
        return Client(self._coordinator, RETRY_S if self._synced else TIMEOUT_S)

    # ---- what ranks that stay do together --------------------------------------------------------

    def reset(self) -> None:
        """Do nothing: the next sync makes new connections anyway."""

    def check_replicas(self) -> None:
        """Have the next sync compare replicated state; see `gradcomp.DiLoCo.check_replicas`."""
        for fragment in self._fragments:  # also in the constructor, before `_engine` is set
            fragment.averager._engine.replicas.is_due = True

    def state_dict(self) -> dict[str, Any]:
        """See `gradcomp.DiLoCo.state_dict`."""
        state = super().state_dict()
        state["extra"] |= {"synced": list(self._synced), "pending": self._pending}
        return state

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of this site, to continue a run that has ended at all sites. If
        other sites are further, this site takes their anchors at its next sync. Raises ValueError
        as `gradcomp.DiLoCo.load_state_dict`.
        """
        extra, engine = Saved.of(state).extra, self._engine
        synced, pending = extra.get("synced"), extra.get("pending")
        if not isinstance(synced, list) or not all(type(k) is str for k in [*synced, pending]):
            raise ValueError(f"this state has synced {synced!r:.80} and pending {pending!r:.80}")
        fragments = extra.get("fragments")
        saved = fragments[0] if isinstance(fragments, (list, tuple)) and fragments else {}
        inside = Saved.of(saved.get("averager") if isinstance(saved, Mapping) else None)
        # residuals of means belong to the owner's rank in the last sync
        rank, size = int(next(iter(inside.ranks), 0)), inside.world_size
        if size > MOST_SITES:
            raise ValueError(f"this state is of {size} sites, at most {MOST_SITES} expected")
        before, old = engine.state_dict(), (engine.comm.rank, engine.comm.world_size)
        engine.move(LocalCommunicator.group(size)[rank])
        try:
            super().load_state_dict(state)
        except BaseException:
            engine.move(LocalCommunicator.group(old[1])[old[0]])
            engine.load_state_dict(before)
            raise
        self._synced, self._pending, self._can_undo = synced[-KEPT:], pending, False

    def describe(self) -> str:
        """Return one line of text: H, the sites of the last sync, and the exchange."""
        return f"{super().describe()}; sites {', '.join(self.members)}"

    def close(self) -> None:
        """Leave: the others do not wait for this site any more. Closing twice is harmless."""
        if self._synced and not self._is_closed:
            with contextlib.closing(self._client()) as client:
                client.leave(self._site)
        self._is_closed = True
        super().close()


def _from_first(comm: Communicator, data: bytes, to: Sequence[int], timeout_s: float) -> bytes:
    """Return rank 0's `data` on the ranks in `to`, and b"" on others. Collective."""
    sizes = comm.all_gather_bytes(len(data).to_bytes(8, "little"), timeout_s)
    size = int.from_bytes(sizes[0], "little")
    out = bytearray()
    for start in range(0, size, PART_NBYTES):
        nbytes = min(PART_NBYTES, size - start)
        part = torch.frombuffer(bytearray(data[start : start + nbytes] or b"\0"), dtype=torch.uint8)
        send = part.repeat(len(to)) if comm.rank == 0 else part[:0]
        recv = torch.empty(nbytes if comm.rank in to else 0, dtype=torch.uint8, device="cpu")
        counts = [nbytes * (comm.rank == 0 and r in to) for r in range(comm.world_size)]
        given = [nbytes * (comm.rank in to and r == 0) for r in range(comm.world_size)]
        comm.start_all_to_all(send, counts, recv, given, Channel.CONTROL).wait(timeout_s)
        comm.all_gather_bytes(b"\0", timeout_s)  # so that no rank waits for more than a part
        out += recv.numpy().tobytes()
    return bytes(out)


def _packed(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(dict(state), file)
    return file.getvalue()


def _unpacked(data: bytes) -> Any:
    """Return a state from `_packed`; CorruptPayload if it is damaged."""
    try:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception as error:
        raise CorruptPayload("message", f"another site's state cannot be read: {error}") from error
