"""Comparison of replicated state: tensors and options that must be equal on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradcomp.comm.base import Channel
from gradcomp.engine.buckets import Source
from gradcomp.engine.guard import Guard
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
    """Compares the replicated state across ranks: parameters, second moments, the guard and `more`.

    Args:
        sources: the tensors, in the same order on every rank.
        layouts: the exchanges of the tensors, with their communicator.
        timeout_s: longest wait for a peer, in seconds.
        stats: counts bytes.
        guard: the guard of ``codec="auto"``, if there is one.

    Attributes:
        more: function that returns (name, value) pairs of the entry point that must also be equal
            on every rank.
        watched: whether the first bucket of every step compares `is_due`, and if it is set also a
            digest of the replicated state.
        is_due: whether the next exchange compares the replicated state, if its first bucket
            compares anything (`first_bucket`); set it after a load.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        layouts: Layouts,
        timeout_s: float,
        stats: Stats,
        guard: Guard | None,
    ) -> None:
        self._sources, self._layouts, self._guard = sources, layouts, guard
        self._timeout_s, self._stats = timeout_s, stats
        self.more: Callable[[], Named] = list
        self.watched, self.is_due = layouts.store.moments is not None, False

    def first_bucket(self, step: int, *, is_new: bool) -> tuple[dict[str, object], Named]:
        """Return the fields that the first bucket of a step compares, and the replicated state that
        field "state" is a digest of. `is_new`: whether ranks compare the bucket's layout anyway.
        Without `watched` the state is compared only then, so that no other step has a round trip
        more; with a guard also in any step after a load.

        The state is empty unless `is_due`: hashing it at every step would take too long. With
        neither `watched` nor a guard it has no frozen parameters.
        """
        has_guard = self._guard is not None
        compares = self.watched or is_new or (has_guard and self.is_due)
        if not compares:  # a load in a running job: peers that have not loaded compare nothing
            self.is_due = False
        if not compares or self._layouts.comm.world_size == 1:
            return {}, ()
        due = self.is_due
        named = self.named(frozen=self.watched or has_guard) if due else []

        def text() -> str:
            guard = "" if self._guard is None else f" (guard: {self._guard.describe()})"
            return f"{'a' if due else 'no'} state loaded since the last exchange{guard}"

        return {"step": step, "loaded": Shown(int(due), text), "state": digests(named)}, named

    def agree(self, values: dict[str, object], named: Named, bucket: int) -> None:
        """Compare fields across ranks; if "state" differs, find the entry of `named` that differs.
        Collective; the caller has claimed the communicator.

        Args:
            values: values by field; field "state" is a digest of `named`.
            named, bucket: the replicated state; number of the bucket, -1 between steps.

        Raises:
            PeerMismatch: a field of the fingerprint, or a name of `named`.
            PeerLost: a rank did not answer.
        """
        comm = self._layouts.comm
        self._stats.setup_bytes += (comm.world_size - 1) * NBYTES
        mismatch: PeerMismatch | None = None
        try:
            agree(comm, values, self._timeout_s, fields=EXCHANGE_FIELDS, bucket=bucket)
        except PeerMismatch as error:
            mismatch = error
        if mismatch is not None:
            # all ranks see the mismatch, so all of them join the search for the first difference
            if mismatch.field == "state":
                self._compare(named, "fingerprint", Channel.SCALE)
            raise mismatch
        if "loaded" in values:
            self.is_due = False

    def agree_on(self, values: dict[str, object], named: Named = ()) -> None:
        """Compare fields and `named` as `agree` does, between steps. Collective."""
        with self._layouts.comm:
            self.agree(values | {"state": digests(named)}, named, -1)

    def check(self) -> None:
        """Compare hashes of all tensors, of second moments, the guard and `more`. Collective.

        Raises:
            PeerMismatch: "layout"; "parameter <name>", "second moment of <name>", "guard" or
                a name of `more`, with the first rank that differs from rank 0.
            PeerLost: a rank did not answer.
        """
        self._compare(self.named(), "check_replicas", Channel.CONTROL)

    def compare_sources(self, called: str) -> None:
        """Compare codec, exchange and the bits of the trained tensors, for entry points that do not
        broadcast them. Collective.

        Args:
            called: the call that every rank must make, for messages.

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

    def named(self, *, frozen: bool = True) -> Named:
        """Return (name, value) pairs of the replicated state, with or without `frozen` tensors."""
        guard = "none" if self._guard is None else self._guard.describe()
        named: list[tuple[str, object]] = [("guard", guard)]
        # read `like` again: torch may have swapped the tensors
        named += [(f"parameter {s.name}", s.like) for s in self._sources if frozen or s.trained]
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
