"""What is known of a codec under an optimizer, from docs/explanation/accuracy.md, said where it is chosen."""

from __future__ import annotations

from typing import Any

from gradcomp.codecs import Codec
from gradcomp.engine.options import Options

# Loss over fp32's of a byte GPT of 0.87 M parameters under AdamW, 4 ranks: codec -> what it was.
LOSSES = {
    "onebit": "0.41 nats over fp32's 2.05 after 600 steps",
    "block2": "0.09 nats over fp32's 1.34 after 2,000 steps",
}


def divides_by_second_moments(optimizer: Any) -> bool:
    """Whether an optimizer is Adam or a relative of it, by the names of its classes."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(word in name for name in names for word in ("adam", "lamb"))


def warning_of(codec: Codec, options: Options, optimizer: Any) -> str | None:
    """Return what is to be said of a codec that is known to lose with the optimizer at hand, or None."""
    found = LOSSES.get(codec.name)
    if found is None or options.precondition is not None or not divides_by_second_moments(optimizer):
        return None
    more = " and start_step= a sixth of the steps" if codec.name == "onebit" and not options.start_step else ""
    return (
        f"{codec!r} under {type(optimizer).__name__} without precondition=True: a byte GPT lost {found}. "
        f"precondition=True{more} keeps most of it; Block(4) keeps all (docs/explanation/accuracy.md)"
    )
