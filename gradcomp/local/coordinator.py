"""The coordinator of `gradcomp.local.ElasticDiLoCo`: decides which sites take part in a sync, and
whether the sync counts.

A site connects for each of its syncs. Every message is one line of JSON::

    site -> coordinator    arrive: id, name, syncs that its anchors have, settings
    coordinator -> site    plan: which sites take part, which of them need newer anchors
                           (now the sites exchange among themselves)
    site -> coordinator    vote: whether this site has the averages
    coordinator -> site    verdict: whether the sync counts

A sync counts if every site that takes part votes for it. All decisions are made in one thread of
one process, so sites cannot come to different ones. Every sync has a random key; a site names those
that are in its anchors when it arrives. So equal anchors are known by the key of their last sync,
and a site that voted but never learned the verdict learns it from the others.

While connected, both sides send a sign of life every few seconds; who is silent is lost. A site
whose connection breaks connects again and repeats its last message; recent verdicts are kept for
that. The coordinator writes no file: when it is started again, it learns from the next arrivals how
far the run is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import secrets
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gradcomp.arguments import check_integer
from gradcomp.comm.base import first_line
from gradcomp.memory.saved import STEPS

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("gradcomp")

VERSION = 1  # of the messages
PORT = 29400
# arguments of `Coordinator`: old name -> new name
RENAMED = {"patience_s": "sync_timeout_s", "give_up_s": "min_sites_timeout_s"}
LINE_NBYTES = 16 << 20  # longest message
ALIVE_S = 2.0  # from one sign of life to the next
SILENT_S = 20.0  # who says nothing for so long is lost
NOTE_S = 10.0  # longer waits are logged
TICK_S = 0.1
KEPT = 64  # verdicts that are kept, and syncs that a site names
KNOWN = 1000  # sites of which the coordinator knows how far they are
TRIES = 3  # syncs in a row that fail because of one site, before it is sent away
POLICIES = ("add", "drop")


@dataclass(frozen=True)
class Arrival:
    """What a site says when it arrives.

    Attributes:
        site: random id of the site.
        name: its name, for ranks and messages.
        syncs: number of syncs in its anchors.
        synced: keys of the latest of them; empty: it has no anchors yet.
        pending: key of a sync that it voted for without learning the verdict; "": none.
        size: number of sites of its last sync.
        trained: whether it has trained since then.
        late: what becomes of its change if the others have newer anchors: "add" or "drop".
        heal: whether it distrusts its anchors and takes those of rank 0.
        compare: whether it wants replicated state to be compared in this sync.
        settings: texts that must be equal on all sites.
        at: `time.monotonic` of the coordinator, in seconds.
    """

    site: str
    name: str
    syncs: int
    synced: list[str]
    pending: str
    size: int
    trained: bool
    late: str
    heal: bool
    compare: bool
    settings: dict[str, str]
    at: float = field(default_factory=time.monotonic)

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Arrival:
        """Return an arrival from a message; ValueError if it is not one."""
        names = [name for name in cls.__dataclass_fields__ if name != "at"]
        values: dict[str, Any] = {name: message.get(name) for name in names}
        kinds = {"syncs": int, "size": int, "synced": list, "settings": dict}
        kinds |= dict.fromkeys(("trained", "heal", "compare"), bool)
        for name, value in values.items():
            if type(value) is not kinds.get(name, str):
                raise ValueError(f"an arrival with {name} {value!r:.80}")
        texts = [*values["synced"], *values["settings"].values()]
        if (
            not all(type(text) is str for text in texts)
            or values["late"] not in POLICIES
            or len(values["synced"]) > KEPT
            or not 0 <= values["syncs"] < STEPS
            or not 0 <= values["size"] < STEPS
        ):
            raise ValueError("an arrival with values out of range")
        return cls(**values)

    def lacks(self, first: Arrival) -> bool:
        """Whether this site needs the anchors of rank 0."""
        return self.heal or self.synced[-1:] != first.synced[-1:] or not first.synced


class Vote(NamedTuple):
    """A vote for a sync, or against it.

    Attributes:
        why: why this site does not have the averages; "": it has them.
        lost: rank of the site that it lost, if it knows.
        syncs: number of syncs that its anchors will have if the sync counts.
        writer: its connection.
    """

    why: str
    lost: int | None
    syncs: int
    writer: asyncio.StreamWriter


class _Closed(Exception):
    """The coordinator was closed."""


class _Sync:
    """A sync whose votes are being collected.

    Attributes:
        votes: votes of sites that have voted.
        gone: sites that disconnected before they voted.
    """

    def __init__(self, key: str, members: list[tuple[asyncio.StreamWriter, Arrival]]) -> None:
        self.key = key
        self.sites = {arrival.site: arrival.name for _, arrival in members}
        self.connections = {writer: arrival.site for writer, arrival in members}
        self.votes: dict[str, Vote] = {}
        self.gone: set[str] = set()


class Coordinator:
    """Serves sites of `gradcomp.local.ElasticDiLoCo`, in a thread, until `close`.

    Use ``python -m gradcomp.local`` on a machine that stays up. A sync begins when the sites that
    took part in the last one are there, or `sync_timeout_s` after the first of them has come.

    Args:
        host: address to listen at; "": all interfaces.
        port: port to listen at; 0: a free one.
        store_port: port of the store in which sites find each other's addresses, on all interfaces;
            None: the next one after `port`; 0: a free one.
        sites: number of sites for which the first sync waits, at most for `sync_timeout_s`.
        min_sites: smallest number of sites for a sync.
        sync_timeout_s: how long a sync waits for a silent site, in seconds.
        min_sites_timeout_s: how long it waits for `min_sites`, in seconds, before sites get
            PeerLost; and for a site with the newest anchors, before the run continues from older
            ones.

    Attributes:
        port: the port that it listens at.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of its range.
        OSError: a port is taken.
    """

    def __init__(
        self,
        host: str = "",
        port: int = PORT,
        *,
        store_port: int | None = None,
        sites: int = 1,
        min_sites: int = 1,
        sync_timeout_s: float = 60.0,
        min_sites_timeout_s: float = 3600.0,
        **others: Any,
    ) -> None:
        from gradcomp.comm.torchdist import open_store

        for name in others:
            now = f": it is called {RENAMED[name]!r}" if name in RENAMED else ""
            raise TypeError(f"there is no option {name!r}{now}")
        check_integer("sites", sites, 1)
        check_integer("min_sites", min_sites, 1)
        if not 0 < sync_timeout_s <= min_sites_timeout_s:
            raise ValueError(
                "sync_timeout_s must be positive and at most min_sites_timeout_s"
                f" ({min_sites_timeout_s!r}), got {sync_timeout_s!r}"
            )
        self._state = _State(max(sites, min_sites), min_sites, sync_timeout_s, min_sites_timeout_s)
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, dualstack_ipv6=both)
        self.port = int(listener.getsockname()[1])
        # sites find each other's addresses there, as ranks do in torchrun's store
        if store_port is None:
            store_port = port and port + 1
        try:
            self._state.store = open_store("localhost", store_port, serves=True, timeout_s=SILENT_S)
        except ConnectionError as error:
            listener.close()
            raise OSError(f"the store cannot listen at port {store_port}: {error}") from error
        self._thread = threading.Thread(
            target=asyncio.run,
            args=(self._state.serve(listener),),
            name="gradcomp-sites",
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, _stop, self._state, self._thread)

    def wait(self) -> None:
        """Wait until `close` is called in another thread, or a signal handler raises."""
        while self._thread.is_alive():
            self._thread.join(1.0)

    def close(self) -> None:
        """Stop; sites that are connected get an error. Closing twice is harmless."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _stop(state: _State, thread: threading.Thread) -> None:
    state.is_closed = True
    thread.join()
    state.store = None


class _State:
    """What the coordinator knows; used in its thread only.

    Attributes:
        is_closed: whether `serve` is to end, within TICK_S; set by another thread.
        store: the store in which sites find each other's addresses.
        known: number of syncs in the anchors of each site that has not left.
        expected: the sites that the next sync waits for, and their names.
        arrived: sites that wait for a sync, by connection.
        heard: when each connection last said something.
        blamed: number of syncs in a row that failed because of a site.
    """

    def __init__(
        self, sites: int, min_sites: int, sync_timeout_s: float, min_sites_timeout_s: float
    ) -> None:
        self._sites, self._min_sites = sites, min_sites
        self._sync_timeout_s, self._min_sites_timeout_s = sync_timeout_s, min_sites_timeout_s
        self.is_closed = False
        self.store: Any = None
        self.known: dict[str, int] = {}
        self.expected: dict[str, str] = {}
        self.arrived: dict[asyncio.StreamWriter, Arrival] = {}
        self.heard: dict[asyncio.StreamWriter, float] = {}
        self.blamed = Counter[str]()
        # settings of the run, and number of the last sync that was decided here
        self._settings: dict[str, str] | None = None
        self._decided = -1
        self._run, self._count = secrets.token_hex(8), 0
        self._sync: _Sync | None = None
        self._verdicts: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Event()
        self._last_alive, self._noted = 0.0, ""

    async def serve(self, listener: socket.socket) -> None:
        """Serve sites until `is_closed`; `asyncio.run` then ends their connections."""
        server = await asyncio.start_server(self._talk, sock=listener, limit=LINE_NBYTES)
        try:
            with contextlib.suppress(_Closed):
                while True:
                    await self._vote_on(await self._gather())
        finally:
            # Connections that were accepted just now begin first: asyncio leaves those open whose
            # server is closed meanwhile, and whose task is cancelled before it has begun.
            asyncio.get_running_loop().remove_reader(listener)
            await asyncio.sleep(TICK_S)
            server.close()

    @property
    def newest(self) -> int:
        """Number of syncs of the newest anchors; -1: unknown, or none yet."""
        return max(self.known.values(), default=-1)

    # ---- connections -----------------------------------------------------------------------------

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard[writer] = time.monotonic()
        try:
            while line := await reader.readline():
                self.heard[writer] = time.monotonic()
                self._take(json.loads(line), writer)
        except (OSError, asyncio.CancelledError):
            pass
        except Exception as error:  # noqa: BLE001 - whatever was sent, the coordinator goes on
            logger.warning("gradcomp: not a message of a site: %s", first_line(error)[:200])
            _send(writer, kind="error", error="message", why=first_line(error)[:200])
        finally:
            self.arrived.pop(writer, None)
            self.heard.pop(writer, None)
            sync = self._sync
            if sync is not None and (site := sync.connections.get(writer)) is not None:
                sync.gone |= {site} - set(sync.votes)
            self._changed.set()
            writer.close()

    def _take(self, message: Any, writer: asyncio.StreamWriter) -> None:
        """Note what a site says; ValueError if it is not a message of this version."""
        kind, version = message["kind"], message["version"]
        if version != VERSION:
            raise ValueError(f"messages of version {version!r:.20}; here {VERSION}")
        if kind == "alive":
            return
        site = message["site"]
        if type(site) is not str:
            raise ValueError(f"a message of site {site!r:.40}")
        if kind == "arrive":
            for other, one in list(self.arrived.items()):
                if one.site == site:  # its older connection is broken
                    del self.arrived[other]
            arrival = self.arrived[writer] = Arrival.read(message)
            self.known.pop(site, None)
            if arrival.synced:
                self.known[site] = arrival.syncs
        elif kind == "leave":
            self.expected.pop(site, None)
            self.known.pop(site, None)
            if not self.known:  # the run is over
                self._settings, self._decided = None, -1
        elif kind == "vote":
            key, syncs, lost = str(message["sync"]), message["syncs"], message["lost"]
            if type(syncs) is not int or not 0 <= syncs < STEPS:
                raise ValueError(f"a vote with syncs {syncs!r:.40}")
            vote = Vote(str(message["why"]), lost if type(lost) is int else None, syncs, writer)
            if self._sync is not None and key == self._sync.key and site in self._sync.sites:
                self._sync.votes[site] = vote
                self._sync.connections[writer] = site
            else:
                unknown = {"counts": False, "why": "the coordinator does not know this sync"}
                _send(writer, kind="verdict", **self._verdicts.get(key, unknown))
        else:
            raise ValueError(f"a message of kind {kind!r:.40}")
        self._changed.set()

    async def _pause(self, *waiting: asyncio.StreamWriter) -> None:
        """Wait until something changes, at most for TICK_S; show waiting sites a sign of life."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), TICK_S)
        self._changed.clear()
        if self.is_closed:
            raise _Closed
        now = time.monotonic()
        for writer, heard in self.heard.items():
            if now - heard > SILENT_S:  # frozen, or its machine has lost its power
                writer.transport.abort()
        if now - self._last_alive > ALIVE_S:
            self._last_alive = now
            for writer in (*self.arrived, *waiting):
                _send(writer, kind="alive")

    # ---- a sync ----------------------------------------------------------------------------------

    async def _gather(self) -> list[tuple[asyncio.StreamWriter, Arrival]]:
        """Wait for the sites of the next sync; return them in rank order, newest anchors first."""
        while True:
            self._refuse()
            waits_for = self._missing()
            begun = min((one.at for one in self.arrived.values()), default=math.inf)
            if time.monotonic() - begun > NOTE_S and waits_for != self._noted:
                self._noted = waits_for
                logger.info("waiting for %s", waits_for)
            if not waits_for:
                self._noted = ""
                members = sorted(
                    self.arrived.items(), key=lambda one: (-one[1].syncs, one[1].name, one[1].site)
                )
                self.arrived.clear()
                return members
            await self._pause()

    def _refuse(self) -> None:
        """Send an error to sites with other settings than the run, or that have waited too long."""
        first = max(self.arrived.values(), key=lambda one: (one.syncs, -one.at), default=None)
        if first is None:
            return
        ours, now = self._settings, time.monotonic()
        if ours is None or first.syncs > self._decided:  # of a run from before this program
            ours = first.settings
        is_short = len(self.arrived) < self._min_sites
        for writer, arrival in list(self.arrived.items()):
            for name in [*ours, *arrival.settings]:
                if ours.get(name) != arrival.settings.get(name):
                    here, there = ours.get(name, ""), arrival.settings.get(name, "")
                    answer = {"error": "mismatch", "field": name, "run": here, "site": there}
                    self._send_away(writer, f"it has another {name}", answer)
                    break
            else:
                why, waited_s = "", now - arrival.at
                if is_short and waited_s > self._min_sites_timeout_s:
                    why = f"{len(self.arrived)} of at least {self._min_sites} sites have come"
                elif not arrival.synced and self.known and waited_s > self._min_sites_timeout_s:
                    why = "no site with anchors has come"
                elif self.blamed[arrival.site] >= TRIES:
                    why = f"the other sites have lost this one in {TRIES} syncs in a row"
                if why:
                    self._send_away(writer, why, {"error": "lost", "why": why})

    def _send_away(self, writer: asyncio.StreamWriter, why: str, answer: dict[str, str]) -> None:
        arrival = self.arrived.pop(writer)
        logger.warning("gradcomp: site %s is sent away: %s", arrival.name, why)
        _send(writer, kind="error", **answer)
        self.expected.pop(arrival.site, None)
        self.known.pop(arrival.site, None)

    def _missing(self) -> str:
        """Return what the next sync waits for; "": nothing."""
        arrivals, now = list(self.arrived.values()), time.monotonic()
        if not arrivals or len(arrivals) < self._min_sites:
            return f"{self._min_sites} sites"
        # if all with the newest anchors are gone, the run goes on from older ones in the end
        patient = [
            one.at for one in arrivals if one.synced and now - one.at > self._min_sites_timeout_s
        ]
        current = [one.at for one in arrivals if not self.known or one.syncs >= self.newest]
        if not current:
            return "" if patient else f"a site with the anchors of sync {self.newest}"
        if now - min(current) > self._sync_timeout_s:
            return ""
        missing = self.expected.keys() - {one.site for one in arrivals}
        if missing:
            return ", ".join(self.expected[site] for site in missing)
        size = max(self._sites, *(one.size for one in arrivals))  # after a restart of this program
        return f"{size} sites" if not self.expected and len(arrivals) < size else ""

    async def _vote_on(self, members: list[tuple[asyncio.StreamWriter, Arrival]]) -> None:
        """Send the sites their plan, collect their votes, and decide."""
        self._count += 1
        key = f"{self._run}/{self._count}"
        first, names = members[0][1], [one.name for _, one in members]
        sync = self._sync = _Sync(key, members)
        behind = [rank for rank, (_, one) in enumerate(members) if rank and one.lacks(first)]
        # what a site sent in a pending sync that counted must not be sent again
        counted = [one.pending != "" and one.pending in first.synced for _, one in members]
        takes_part = [
            one.trained and not was_counted and (rank not in behind or one.late == "add")
            for (rank, (_, one)), was_counted in zip(enumerate(members), counted, strict=True)
        ]
        plan: dict[str, Any] = {
            "sync": key,
            "names": names,
            "syncs": first.syncs,
            "synced": first.synced,
            "behind": behind,
            "trained": sum(takes_part),
            "compare": bool(behind) or any(one.compare for _, one in members),
            "store_port": self.store.port,
        }
        late = ", ".join(names[rank] for rank in behind)
        logger.info(
            "%s: %s%s",
            f"sync {first.syncs + 1}" if plan["trained"] else "anchors",
            ", ".join(names),
            f" ({late}: takes the anchors of {names[0]})" if late else "",
        )
        for rank, (writer, _) in enumerate(members):
            _send(writer, kind="plan", rank=rank, counted=counted[rank], **plan)
        why = await self._collect(sync)
        self._verdicts[key] = {"counts": not why, "why": why}
        if len(self._verdicts) > KEPT:
            del self._verdicts[next(iter(self._verdicts))]
        self._sync = None
        if not why:
            newest = max(vote.syncs for vote in sync.votes.values())
            # sites that have more are gone: this sync waited for them long enough
            self.known = {site: n for site, n in self.known.items() if n < newest}
            self.known |= dict.fromkeys(sync.sites, newest)
            for site in list(self.known)[:-KNOWN]:
                del self.known[site]
            self._settings, self._decided = first.settings, newest
            self.blamed.clear()
        else:
            logger.warning("gradcomp: a sync does not count and is made again: %s", why)
            self._blame(sync, behind)
        self.expected = {s: name for s, name in sync.sites.items() if s not in sync.gone}
        for vote in sync.votes.values():
            _send(vote.writer, kind="verdict", counts=not why, why=why)
        for name in self.store.list_keys():  # of earlier syncs; sites still close this one
            if not name.startswith(key):
                self.store.delete_key(name)

    async def _collect(self, sync: _Sync) -> str:
        """Wait until every site has voted or is gone; return why the sync does not count, or "".

        Sites that fail do not come back before those that still wait for them.
        """
        while True:
            absent = [site for site in sync.sites if site not in sync.votes]
            if sync.gone >= set(absent):
                break
            await self._pause(*(vote.writer for vote in sync.votes.values()))
        against = [f"{sync.sites[s]}: {vote.why}" for s, vote in sync.votes.items() if vote.why]
        lost = ", ".join(sync.sites[site] for site in absent)
        return "; ".join([f"lost {lost}"] * bool(absent) + against)

    def _blame(self, sync: _Sync, behind: list[int]) -> None:
        """Note whose fault a failed sync was, unless that is rank 0: those that others have lost,
        or else those that failed while they took anchors.
        """
        sites = list(sync.sites)
        named = {vote.lost for vote in sync.votes.values()} & set(range(len(sites)))
        failed = {rank for rank in behind if (vote := sync.votes.get(sites[rank])) and vote.why}
        self.blamed.update(sites[rank] for rank in (named or failed) if rank)


def _send(writer: asyncio.StreamWriter, **message: Any) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        writer.write(json.dumps(message).encode() + b"\n")
