"""Second phases of a reduce_scatter: what owners make of the pieces they own, and how it is
written, checked and read.

"exact" sends integer sums of codes; the others send means, encoded by a codec. A phase knows its
form, so it is also what the strategy ("auto") and the planner count bits by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gradcomp.codecs import Block, Codec
from gradcomp.codecs.base import MixedPayloads, encode_plain
from gradcomp.codecs.identity import Identity
from gradcomp.codecs.lanes import Lanes
from gradcomp.kernels import Code, Kernels, Residuals
from gradcomp.payload.form import Form
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Piece, Shard, shard_pieces
from gradcomp.payload.rng import RngKey


@dataclass(eq=False)
class Owned:
    """What a rank owns in a second phase, and the memory that it makes it in.

    Attributes:
        payloads: the messages of all ranks.
        first, second: where the owned pieces stand in these and in the second payload; both in
            coordinates of `shard`.
        shard: ``(n,)`` float32: means.
        payload: ``(nbytes,)`` uint8: the second payload, header included.
        scales, scratch: for the statistics of codecs that measure.
    """

    payloads: MixedPayloads
    first: PayloadLayout
    second: PayloadLayout
    shard: Tensor
    payload: Tensor
    scales: Tensor
    scratch: Tensor | None


class SecondPhase(ABC):
    """One way to send what owners have averaged.

    Attributes:
        form, code: of the compressed pieces in the second payload.
        whole_groups: a scale group must be encoded in one go.
        error_feedback: owners keep what their codes leave out of the means.
        measures_groups: each scale group of means has a scale of its own.
    """

    form: Form
    code: Code
    whole_groups = False
    measures_groups = False
    error_feedback = False

    def shard(self, pieces: Sequence[Piece], residuals: Sequence[int]) -> Shard:
        """Return the owned pieces as they lie in the shard, with their places in the owner's
        residual planes.
        """
        return shard_pieces(pieces, residuals)

    def scratch(self, kernels: Kernels, layout: PayloadLayout, free: Tensor) -> Tensor | None:
        """Return the memory that the statistics of `layout` need, in `free` if it is large
        enough.
        """
        return None

    @abstractmethod
    def average(self, kernels: Kernels, owned: Owned) -> bool:
        """Average what this rank owns, in its shard or payload; True: an average is not finite."""

    @abstractmethod
    def encode(self, kernels: Kernels, owned: Owned, key: RngKey, residuals: Residuals) -> bool:
        """Write the second payload's body; True: a value is not finite."""

    @abstractmethod
    def validate(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for what `encode` does not write."""


class Exact(SecondPhase):
    """Integer sums of codes that share a scale: nothing is lost, and compressed means never
    stand in the shard.
    """

    def __init__(self, sums: Lanes) -> None:
        self._sums, self.form, self.code = sums, sums.form, sums.code

    def shard(self, pieces: Sequence[Piece], residuals: Sequence[int]) -> Shard:
        return shard_pieces(pieces, residuals, plain_only=True)

    def average(self, kernels: Kernels, owned: Owned) -> bool:
        (packed, _), (plain, rows) = owned.payloads.parts
        self._sums.add(packed, owned.first, owned.second, owned.payload)
        return kernels.sum_decode(plain, rows, owned.shard)

    def encode(self, kernels: Kernels, owned: Owned, key: RngKey, residuals: Residuals) -> bool:
        return encode_plain(kernels, owned.shard, owned.second, owned.payload)

    def validate(self, payload: Tensor, layout: PayloadLayout) -> None:
        self._sums.validate_packed(payload, layout)


class Encoded(SecondPhase):
    """Means, encoded by a codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.form, self.code = codec, codec.form, codec.code
        self.whole_groups = codec.whole_groups
        self.measures_groups = codec.form.scales_per_group > 0
        self.error_feedback = codec.error_feedback

    def scratch(self, kernels: Kernels, layout: PayloadLayout, free: Tensor) -> Tensor | None:
        return self._codec.scratch(kernels, layout, free)

    def average(self, kernels: Kernels, owned: Owned) -> bool:
        return owned.payloads.decode(kernels, owned.shard)

    def encode(self, kernels: Kernels, owned: Owned, key: RngKey, residuals: Residuals) -> bool:
        codec, layout = self._codec, owned.second
        if codec.measures and layout.scale_count:
            codec.measure(kernels, owned.shard, layout, owned.scratch, owned.scales)
            codec.place_scales(layout, owned.scales, owned.payload)
        return codec.encode_body(kernels, owned.shard, layout, owned.payload, key, residuals)

    def validate(self, payload: Tensor, layout: PayloadLayout) -> None:
        self._codec.validate_packed(payload, layout)


_CODECS: dict[str, Callable[[Codec], Codec]] = {
    "requantize": lambda codec: codec.requantizer(),
    # groups are the first phase's: layouts have them from slots
    "block2": lambda codec: Block(2, residual_decay=codec.decay),
    "block4": lambda codec: Block(4, residual_decay=codec.decay),
    "block8": lambda codec: Block(8, residual_decay=codec.decay),
    "bf16": lambda _: Identity("bf16"),
    "fp32": lambda _: Identity(),
}


def codec_of(name: str, codec: Codec) -> Codec:
    """Return what encodes means in the second phase of that name, which is not "exact"."""
    return _CODECS[name](codec)


def owners_feed_back(name: str, codec: Codec) -> bool:
    """Whether owners keep residuals in the second phase of that name ("" for none)."""
    return bool(name) and name != "exact" and codec_of(name, codec).error_feedback


def second_phase(name: str, codec: Codec, world_size: int) -> SecondPhase:
    """Return the second phase of that name for a codec's first one.

    Raises:
        ValueError: "exact" for a codec whose codes have no integer sums; an unknown name.
    """
    if name in _CODECS:
        return Encoded(codec_of(name, codec))
    if name != "exact":
        raise ValueError(f"second_phase must be one of {('exact', *_CODECS)}, got {name!r}")
    sums = codec.sum_form(world_size)
    if sums is None:
        raise ValueError(f'second_phase="exact" needs codes with integer sums, {codec!r} has none')
    return Exact(sums)
