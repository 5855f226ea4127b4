"""What every rank must hold alike, and how ranks compare it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradcomp.comm.base import Channel
from gradcomp.engine.buckets import Source
from gradcomp.engine.layouts import Layouts
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import (
    EXCHANGE_FIELDS,
    NBYTES,
    Named,
    Shown,
    agree,
    agree_on_tensors,
    codec_fields,
    digests,
)
from gradcomp.exchange.stats import Stats


class Replicas:
    """Compares parameters, second moments and what an entry point adds, over the ranks.

    Args:
        sources: the tensors, in the same order on every rank.
        layouts: how they travel, and over which communicator.
        timeout_s: longest wait for a peer, in seconds.
        stats: counts bytes.

    Attributes:
        more: returns what else must be the same on every rank, (name, value) pairs.
        watched: the first bucket of every step compares whether a state was loaded, and after a
            load a digest of what every rank must hold alike.
    """

    def __init__(
        self, sources: Sequence[Source], layouts: Layouts, timeout_s: float, stats: Stats
    ) -> None:
        self._sources, self._layouts = sources, layouts
        self._timeout_s, self._stats = timeout_s, stats
        self.more: Callable[[], Named] = list
        self.watched, self._loaded = layouts.store.moments is not None, False

    def compare_next(self, *, wanted: bool = True) -> None:
        """Have the next exchange compare a digest of what every rank must hold alike, if replicas
        are `watched`; or not, if that is not `wanted`.
        """
        self._loaded = wanted

    def first_bucket(self, step: int) -> tuple[dict[str, object], Named]:
        """Return what the first bucket of a step compares: by field, and the state that "state" is
        a digest of.

        That is empty unless it may have changed otherwise than by steps: hashing it at every step
        would take too long.
        """
        if not self.watched:
            return {}, ()
        named = self._named() if self._loaded else []
        text = f"{'a' if self._loaded else 'no'} state loaded since the last exchange"
        values = {
            "step": step,
            "loaded": Shown(int(self._loaded), text),
            "state": digests(named),
        }
        return values, named

    def agree(self, values: dict[str, object], named: Named, bucket: int) -> None:
        """Compare fields, among them "state", a digest of `named`; where that differs, find out
        which of `named` does. Called with the communicator claimed.

        Raises:
            PeerMismatch: a field of the fingerprint, or a name of `named`.
            PeerLost: a rank did not answer.
        """
        comm = self._layouts.comm
        self._stats.setup_bytes += (comm.world_size - 1) * NBYTES
        found: PeerMismatch | None = None
        try:
            agree(comm, values, self._timeout_s, fields=EXCHANGE_FIELDS, bucket=bucket)
        except PeerMismatch as error:
            found = error
        if found is not None:
            # which all ranks see, so all of them look for the first difference
            if found.field == "state":
                self._compare(named, "fingerprint", Channel.SCALE)
            raise found
        if "loaded" in values:
            self._loaded = False

    def agree_on(self, values: dict[str, object], named: Named = ()) -> None:
        """As `agree`, between steps. Collective."""
        with self._layouts.comm:
            self.agree(values | {"state": digests(named)}, named, -1)

    def check(self) -> None:
        """Compare a hash of all tensors and of second moments, and `more`. Collective.

        Raises:
            PeerMismatch: "layout"; "parameter <name>", "second moment of <name>" or a name of
                `more`, and the first rank that differs from rank 0.
            PeerLost: a rank did not answer.
        """
        self._compare(self._named(), "check_replicas", Channel.CONTROL)

    def compare_sources(self, called: str) -> None:
        """Compare codec, exchange and the bits of trained tensors, as nobody has broadcast them.
        Collective.

        Args:
            called: what every rank has to call, for messages.

        Raises:
            PeerMismatch: a field of the fingerprint, "layout" or "parameter <name>".
            PeerLost: a rank did not answer.
        """
        layouts = self._layouts
        sources = [source for source in self._sources if source.trained]
        settings = {**codec_fields(layouts.codec), "exchange": layouts.strategy.exchange}
        with layouts.comm:
            agree_on_tensors(
                layouts.comm,
                [(f"parameter {source.name}", source.like) for source in sources],
                self._timeout_s,
                called=called,
                phase="fingerprint",
                settings=settings,
                shards=[source.shard for source in sources],
            )
        self._stats.setup_bytes += (layouts.comm.world_size - 1) * NBYTES

    def _named(self) -> Named:
        """Return (name, value) of what every rank must hold alike."""
        # of the sources as they are: torch may have swapped the tensors since
        named: list[tuple[str, object]] = [
            (f"parameter {source.name}", source.like) for source in self._sources
        ]
        named += self.more()
        moments = self._layouts.store.moments
        if moments is not None:
            states = moments.planes.state(self._layouts.names)
            named += [(f"second moment of {name}", tensor) for name, tensor in states.items()]
        return named

    def _compare(self, named: Named, phase: str, channel: Channel) -> None:
        agree_on_tensors(
            self._layouts.comm,
            named,
            self._timeout_s,
            called="check_replicas()",
            phase=phase,
            channel=channel,
        )
