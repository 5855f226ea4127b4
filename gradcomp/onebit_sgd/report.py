"""What double buffering has hidden, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OverlapReport:
    """Seconds of one rank's training with a `DoubleBuffer`, summed since it was made.

    Attributes:
        whole_steps: whether a whole minibatch was exchanged behind the next, not a half behind the
            other.
        minibatches: steps taken.
        exchanges: exchanges finished.
        exchange_s: seconds from an exchange's first bucket to its last.
        waited_s: the part of it for which this rank was blocked.
        codec_s: the part of it in which codecs worked, on a core of their own or on one that
            computing would have had.
        update_s: seconds in ``optimizer.step()`` and in copying gradients to buckets and back: what
            an update costs, however small its half.
        compute_s: seconds in forward and backward.
    """

    whole_steps: bool
    minibatches: int
    exchanges: int
    exchange_s: float
    waited_s: float
    codec_s: float
    update_s: float
    compute_s: float

    @property
    def hidden(self) -> float:
        """The share of the exchanges' time that computing hid, 0 to 1; 0 where nothing was
        exchanged.
        """
        return max(0.0, 1.0 - self.waited_s / self.exchange_s) if self.exchange_s > 0 else 0.0

    @property
    def saved_s(self) -> float:
        """Seconds saved for each minibatch against exchanging once, after its backward; negative
        where it costs.

        With halves a minibatch has a second exchange and a second update: T_comm - T_upd - 2
        T_wait. With whole steps T_comm - T_wait. An exchange of a half is as long as one of the
        whole: it has as many values. As if no core were free, codecs' time is not hidden but taken
        from computing: less 2 T_codec, or T_codec. That halves may compute less efficiently than a
        whole is not in it.
        """
        return self._saved(1.0)

    @property
    def saved_with_free_cores_s(self) -> float:
        """The same where codecs have cores that computing leaves free."""
        return self._saved(0.0)

    def _saved(self, codec_share: float) -> float:
        if not self.exchanges:
            return 0.0
        seconds = (self.exchange_s, self.update_s, self.waited_s, codec_share * self.codec_s)
        comm, upd, wait, codec = (s / self.exchanges for s in seconds)
        return comm - wait - codec if self.whole_steps else comm - upd - 2 * wait - 2 * codec

    @property
    def pays(self) -> bool:
        """Whether a minibatch is faster than without double buffering, also where no core is free
        for codecs; not whether stale weights train as well.
        """
        return self.saved_s > 0

    def __str__(self) -> str:
        """Return one sentence."""
        if not self.exchanges:
            return "nothing was exchanged yet"
        if not self.exchange_s:
            return "double buffering does not pay here: nothing was exchanged"
        comm, upd, wait = (
            s / self.exchanges for s in (self.exchange_s, self.update_s, self.waited_s)
        )
        hidden = (
            f"hidden {100 * self.hidden:.0f} % of {_duration(self.exchange_s)} in {self.exchanges}"
            " exchanges"
        )
        if self.pays:
            condition = (
                ""
                if self.whole_steps
                else " if halves compute as fast as a whole (compare() tells)"
            )
            return f"{hidden}; saves {_duration(self.saved_s)} a minibatch{condition}"
        if self.saved_with_free_cores_s > 0:
            codec = _duration(self.codec_s / self.exchanges)
            return (
                f"{hidden}; does not pay unless cores are free for the codecs, which take {codec}"
                " of each"
            )
        why = f"double buffering does not pay here: an exchange takes {_duration(comm)}, "
        if self.whole_steps:
            return f"{why}and a step waits for {_duration(wait)} of it ({hidden})"
        if comm < upd:
            return f"{why}an update {_duration(upd)} (T_comm < T_upd; {hidden})"
        return (
            f"{why}a minibatch has two of them, waits {_duration(2 * wait)} for them and updates"
            f" twice ({hidden})"
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
