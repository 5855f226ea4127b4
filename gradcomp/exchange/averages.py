"""The averages of one bucket as they arrive: checked payloads, which are decoded into a tensor or applied to weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from gradcomp.codecs.magnitude import magnitude, refuse_unflagged
from gradcomp.exchange.sizing import BucketPlan
from gradcomp.kernels import native
from gradcomp.payload.layout import PayloadLayout

# A sum below this cannot overflow: rounding at each of up to 32767 additions makes it larger by less than 1.002, and both
# float32 and bfloat16 reach almost 2**128.
SAFE_SUM = 2.0**127


class Averages:
    """What an exchange has received of one bucket.

    Args:
        plan: of the exchange.
        payloads: addresses of every rank's payload (all_gather) or of every owner's (reduce_scatter). Whoever keeps the
            object must keep their memory as it is.
        dtype: of the bucket, as `native.DTYPES` numbers it.
    """

    def __init__(self, plan: BucketPlan, payloads: Sequence[int], dtype: int) -> None:
        self._plan, self._payloads, self._dtype = plan, list(payloads), dtype

    def decode(self, out: int) -> bool:
        """Write the averages to address `out`, in bucket order; True: one of them is not finite."""
        bad = False
        for addresses, layout in self._parts():
            bad |= native.sum_decode(self._packed(addresses, layout), layout.packed, out)
            bad |= native.sum_decode(self._plain(addresses), layout.plain, out)
        return bad

    def refuse_unflagged(self, where: str) -> None:
        """Raise CorruptPayload if averages are not finite because a payload is not, though its flag says it is."""
        layouts = self._plan.second if self._plan.scatters else [self._plan.local] * len(self._payloads)
        refuse_unflagged(self._payloads, layouts, where)

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Apply the averages, rounded to the bucket's dtype, to weights: `native.update` with targets by parameter."""
        for addresses, layout in self._parts():
            native.update(layout.packed, targets, rules, self._packed(addresses, layout))
            native.update(layout.plain, targets, rules, self._plain(addresses))

    def are_safe(self) -> bool:
        """Tell, from scales and plain values alone, that averages are finite and their sums cannot overflow the bucket's dtype."""
        return self._dtype != 2 and all(
            sum(magnitude(address, layout) for address in addresses) < SAFE_SUM for addresses, layout in self._parts()
        )

    def _parts(self) -> Iterator[tuple[list[int], PayloadLayout]]:
        if self._plan.scatters:
            yield from (([p], layout) for p, layout in zip(self._payloads, self._plan.second, strict=True))
        else:
            yield self._payloads, self._plan.local

    def _plain(self, addresses: list[int]) -> native.Payloads:
        return native.Payloads(addresses, "values", self._dtype)

    def _packed(self, addresses: list[int], layout: PayloadLayout) -> native.Payloads:
        plan = self._plan
        if plan.scatters and plan.exact:
            world, bits = plan.world_size, layout.form.bits
            return native.Payloads(addresses, "lanes", self._dtype, world_size=world, lane_bits=bits)
        codec = plan.second_codec if plan.scatters else plan.codec
        return codec.payloads(addresses, self._dtype)
