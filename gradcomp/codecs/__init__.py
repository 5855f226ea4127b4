"""Codecs: encode arrays to payloads and decode payloads. They know no ranks, buckets or futures.

A codec is immutable once it is in use; one object may be used by several models. A name can be
passed instead of a codec: "ternary", "terngrad", "onebit", "block2", "block4", "block8", "entropy",
"bfloat16" or "identity", each with its default options.
"""

from __future__ import annotations

from gradcomp.arguments import suggestion
from gradcomp.codecs.base import Codec
from gradcomp.codecs.block import Block
from gradcomp.codecs.entropy import EntropyCoded
from gradcomp.codecs.identity import Identity
from gradcomp.codecs.onebit import OneBit
from gradcomp.codecs.ternary import Ternary
from gradcomp.codecs.terngrad import TernGrad
from gradcomp.payload.form import removal
from gradcomp.payload.rng import RngKey

# Every codec with its default options. The first codec of a form decodes payloads of that form if
# only the payload's header is known.
KINDS: tuple[Codec, ...] = (
    TernGrad(),
    Ternary(),
    OneBit(),
    Block(2),
    Block(4),
    Block(8),
    EntropyCoded(),
    Identity(),
    Identity("bf16"),
)
_BY_NAME = {kind.name: kind for kind in KINDS}
_BY_NAME["bf16"] = _BY_NAME["bfloat16"]


def resolve(codec: Codec | str) -> Codec:
    """Return `codec`, or the codec of that name with its default options.

    Raises:
        ValueError: the name is unknown.
        TypeError: `codec` is neither a codec nor a name.
    """
    if isinstance(codec, Codec):
        return codec
    if isinstance(codec, str):
        if codec not in _BY_NAME:
            hint = (
                ' ("auto" is for register, GradientAverager and DiLoCo, which know the optimizer)'
                if codec == "auto"
                else removal(codec) or suggestion(codec, _BY_NAME)
            )
            raise ValueError(f"unknown codec {codec!r}; known names are {sorted(_BY_NAME)}{hint}")
        return _BY_NAME[codec]
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise TypeError(f"codec is the class {codec.__name__}: write {codec.__name__}()")
    raise TypeError(f"codec must be a gradcomp codec or a name, got {type(codec).__name__}")


def __getattr__(name: str) -> object:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{removal(name)}")


__all__ = [
    "KINDS",
    "Block",
    "Codec",
    "EntropyCoded",
    "Identity",
    "OneBit",
    "RngKey",
    "TernGrad",
    "Ternary",
    "resolve",
]
