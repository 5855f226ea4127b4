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
from gradcomp.errors import CorruptPayload, GradcompError, PeerLost, PeerMismatch, peers_answer
from gradcomp.local.coordinator import POLICIES, Client
from gradcomp.local.inner import SyncEvery
from gradcomp.local.outer import Outer
from gradcomp.local.steps import DiLoCo
from gradcomp.memory.saved import Saved

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("gradcomp")

TIMEOUT_S = 60.0
RETRY_S = 900.0  # how long a site that has joined tries to reach the coordinator
PART_NBYTES = 16 << 20  # of a state that is sent
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
        self._settings: dict[str, str] = {}
        self._late = late
        self._site = secrets.token_hex(8)
        self._name = name if name is not None else f"{socket.gethostname()}:{os.getpid()}"
        self._coordinator, self._has_anchors = coordinator, False
        self._client().close()  # checks the address
        self.late_added = self.late_dropped = 0
        self.members: list[str] = []
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
        self._settings["options"] = repr(sorted(self._engine.options.compared().items()))
        try:
            self._meet(trained=False)
        except BaseException:
            self.close()
            raise

    def _compare_settings(self, settings: Mapping[str, object]) -> None:
        """Keep the settings, which the coordinator compares."""
        shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in self._trained.named]
        values = {**settings, "parameters": shapes, "timeout_s": self._timeout_s}
        self._settings = {name: str(value) for name, value in values.items()}

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
        engine, fragment = self._engine, self._fragment
        errors: list[GradcompError] = []
        with contextlib.closing(self._client()) as client:
            while True:
                if len(errors) == ATTEMPTS:
                    raise errors[-1]
                replicas = engine.replicas
                plan = client.arrive(
                    {
                        "site": self._site,
                        "name": self._name,
                        "syncs": fragment.syncs if self._has_anchors else -1,
                        "trained": trained,
                        "late": self._late,
                        "compare": replicas.is_due,
                        "settings": self._settings,
                    }
                )
                error, counts, is_sent = None, False, False
                syncs = plan["syncs"] + bool(plan["trained"])
                try:
                    engine.move(self._connect(client.host, plan))
                    trained = self._take_anchors(plan, trained)
                    is_sent = plan["trained"] > 0 and self._send(plan)
                    why = ""
                    if is_sent and not fragment.is_finite():
                        syncs -= 1  # every site raises NotFinite
                except (PeerLost, PeerMismatch, CorruptPayload) as failure:
                    error, why = failure, str(failure)
                    engine.comm.abort(why)  # so that nobody waits for this site
                except BaseException as failure:
                    engine.comm.abort(type(failure).__name__)
                    raise
                try:
                    lost = getattr(error, "rank", None)
                    counts, why = client.vote(plan["sync"], self._site, syncs, why, lost)
                finally:
                    if not counts and is_sent:
                        engine.discard_step()
                        fragment.drop()
                    engine.comm.close()
                if counts:
                    break
                logger.warning("gradcomp: %s: a sync does not count: %s", self._name, why)
                errors.append(error or PeerLost("sync", -1, 0.0, why))
                if isinstance(error, PeerMismatch):
                    if sum(isinstance(one, PeerMismatch) for one in errors) > 1:
                        raise error
                    self._has_anchors &= plan["rank"] == 0  # else take those of rank 0
        self.members, self._has_anchors = plan["names"], True
        if is_sent:
            fragment.apply(0.0)

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
        engine.replicas.compare_next(wanted=plan["compare"])
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
        self._has_anchors, self._starts_at_anchors = True, False
        return keeps

    def _send(self, plan: Mapping[str, Any]) -> bool:
        """Average the changes of the weights of the sites that have trained."""
        share = len(plan["names"]) / plan["trained"]
        self._fragment.send(wait=True, progress="", share=share)
        return True

    def _client(self) -> Client:
        return Client(self._coordinator, RETRY_S if self._has_anchors else TIMEOUT_S)

    # ---- what ranks that stay do together --------------------------------------------------------

    def reset(self) -> None:
        """Do nothing: the next sync makes new connections anyway."""

    def check_replicas(self) -> None:
        """Have the next sync compare replicated state; see `gradcomp.DiLoCo.check_replicas`."""
        for fragment in self._fragments:
            fragment.averager._engine.replicas.compare_next()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of this site, to continue a run that has ended at all sites. If
        other sites are further, this site takes their anchors at its next sync. Raises ValueError
        as `gradcomp.DiLoCo.load_state_dict`.
        """
        fragments = Saved.of(state).extra.get("fragments")
        saved = fragments[0] if isinstance(fragments, (list, tuple)) and fragments else {}
        inside = Saved.of(saved.get("averager") if isinstance(saved, Mapping) else None)
        rank = int(next(iter(inside.ranks), 0))
        # residuals of means belong to the owner's rank in the last sync
        self._engine.move(LocalCommunicator.group(inside.world_size)[rank])
        super().load_state_dict(state)
        self._has_anchors = True

    def describe(self) -> str:
        """Return one line of text: H, the sites of the last sync, and the exchange."""
        return f"{super().describe()}; sites {', '.join(self.members)}"

    def close(self) -> None:
        """Leave: the others do not wait for this site any more. Closing twice is harmless."""
        if self._has_anchors:
            self._has_anchors = False
            with contextlib.closing(self._client()) as client:
                client.leave(self._site)
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
