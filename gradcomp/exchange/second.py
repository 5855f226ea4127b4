"""Second phases of a reduce_scatter: how owners average their pieces, and encode and validate
second payloads.

"exact" sends integer sums of codes; all others send means, encoded by a codec. The strategy
("auto") and the planner take the bits per element from the form of a second phase.
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
    """The pieces that a rank owns in a slice, with the buffers of its second payload.

    Attributes:
        payloads: first payloads of all ranks for these pieces.
        first, second: layouts of the owned pieces in first payloads and in the second payload; both
            have offsets in `shard`.
        shard: ``(n,)`` float32 means.
        payload: ``(nbytes,)`` uint8 second payload, header included.
        scales: ``(groups,)`` float32, for codecs that measure scales.
        scratch: memory for measuring scales, or None.
    """

    payloads: MixedPayloads
    first: PayloadLayout
    second: PayloadLayout
    shard: Tensor
    payload: Tensor
    scales: Tensor
    scratch: Tensor | None


class SecondPhase(ABC):
    """How owners average and encode their means for the other ranks.

    Attributes:
        form, code: form and kernel code of the compressed pieces in the second payload.
        whole_groups: whether a scale group must be encoded in one call.
        measures_groups: whether each scale group of the means has a scale.
    """

    form: Form
    code: Code
    whole_groups = False
    measures_groups = False

    def shard(self, pieces: Sequence[Piece], residuals: Sequence[int]) -> Shard:
        """Return the owned pieces of a bucket with their offsets in the shard and in the owner's
        residual planes. `residuals`: the offset of each piece's parameter in these planes.
        """
        return shard_pieces(pieces, residuals)

    def scratch(self, kernels: Kernels, layout: PayloadLayout, free: Tensor) -> Tensor | None:
        """Return memory for measuring the scales of `layout`, or None if there are none to measure.
        It is a part of `free` if that is large enough.
        """
        return None

    @abstractmethod
    def average(self, kernels: Kernels, owned: Owned) -> bool:
        """Average the owned pieces, into the shard or the second payload; return True if an average
        is not finite.
        """

    @abstractmethod
    def encode(self, kernels: Kernels, owned: Owned, key: RngKey, residuals: Residuals) -> bool:
        """Encode the body of the second payload; return True if a value is not finite."""

    @abstractmethod
    def validate(self, payload: Tensor, layout: PayloadLayout) -> None:
        """Raise CorruptPayload for a payload body that `encode` cannot have written."""


class Exact(SecondPhase):
    """Integer sums of codes with shared scales. They are exact; sums of compressed pieces go
    straight to the second payload, without the shard.
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
    """Means encoded by a codec."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.form, self.code = codec, codec.form, codec.code
        self.whole_groups = codec.whole_groups
        self.measures_groups = codec.form.scales_per_group > 0

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
    # scale groups are those of the first phase, which slots define
    "block2": lambda codec: Block(2, residual_decay=codec.decay),
    "block4": lambda codec: Block(4, residual_decay=codec.decay),
    "block8": lambda codec: Block(8, residual_decay=codec.decay),
    "bf16": lambda _: Identity("bf16"),
    "fp32": lambda _: Identity(),
}


def codec_of(name: str, codec: Codec) -> Codec:
    """Return the codec of means in a second phase with this name, except "exact". `codec` is that
    of the first phase.
    """
    return _CODECS[name](codec)


def owners_feed_back(name: str, codec: Codec) -> bool:
    """Whether owners have residuals in a second phase, by its name ("": no second phase)."""
    return bool(name) and name != "exact" and codec_of(name, codec).error_feedback


def second_phase(name: str, codec: Codec, world_size: int) -> SecondPhase:
    """Return a second phase by its name.

    Args:
        name: "exact", "requantize", or a codec of means such as "block4".
        codec: codec of the first phase.
        world_size: number of ranks.

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
