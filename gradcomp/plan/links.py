"""Links between nodes, and how people write them: "1gbit", "0.1ms", "10gbe"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from gradcomp.arguments import suggestion

RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NAMED = {
    "wan": (100e6, 10e-3),
    "1gbe": (1e9, 0.1e-3),
    "10gbe": (10e9, 50e-6),
    "25gbe": (25e9, 20e-6),
    "100gbe": (100e9, 10e-6),
    "infiniband": (200e9, 2e-6),
}
UNDERSTOOD = (
    f"rates like 100mbit, 2.5gbit (units {', '.join(RATE_UNITS)}), inf, or the names"
    f" {', '.join(NAMED)}"
)
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"


@dataclass(frozen=True)
class Link:
    """The full-duplex link of every node.

    Attributes:
        bits_per_s: in each direction; ``math.inf`` for latency alone.
        latency_s: seconds that a message is under way, whatever its size.

    Raises:
        ValueError: a rate that is not positive, or a latency that is negative or not finite.
    """

    bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bits_per_s > 0:
            raise ValueError(f"bits_per_s must be positive, got {self.bits_per_s!r}")
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(f"latency_s must be at least 0 and finite, got {self.latency_s!r}")

    def __str__(self) -> str:
        latency = format_seconds(self.latency_s).replace(".00 ", " ").replace(".0 ", " ")
        return f"{format_rate(self.bits_per_s)}, {latency}"


@dataclass(frozen=True)
class Node:
    """What shares one link: a node's ranks, and what joins them.

    Attributes:
        ranks: of every node, one after the other in the order of ranks.
        inside: what each of them sends over to ranks of its own node (shared memory, loopback,
            NVLink).

    Raises:
        ValueError: not an integer of at least 1.
    """

    ranks: int = 1
    inside: Link = Link(math.inf)

    def __post_init__(self) -> None:
        if isinstance(self.ranks, bool) or not isinstance(self.ranks, int) or self.ranks < 1:
            raise ValueError(
                f"ranks of a node must be an integer of at least 1, got {self.ranks!r}"
            )


def parse_link(text: str, latency: str | None = None) -> Link:
    """Return the link that is written as a rate or a name ("1gbit", "10gbe"), its latency by itself
    ("0.1ms").

    Without `latency` a named link has its own and a rate has none.

    Raises:
        ValueError: not understood; the message says what is.
    """
    name = _plain(text)
    if name in NAMED:
        rate, own = NAMED[name]
    else:
        try:
            rate, own = parse_rate(text), 0.0
        except ValueError as error:
            raise ValueError(f"{error}{suggestion(name, NAMED)}") from None
    return Link(rate, own if latency is None else parse_seconds(latency))


def parse_rate(text: str) -> float:
    """Return bits a second, of "1gbit", "100 Mbit/s" or "inf".

    Raises:
        ValueError: not understood, or not positive.
    """
    plain = re.sub(r"(/s|ps)$", "", _plain(text))
    if plain == "inf":
        return math.inf
    found = re.fullmatch(rf"{_NUMBER}([kmgt]?)(bits?|b)?", plain)
    if found is None or (not found[2] and not found[3]) or not 0 < float(found[1]) < math.inf:
        raise ValueError(f"link {text!r} is not understood; {UNDERSTOOD} are")
    return float(found[1]) * RATE_UNITS[f"{found[2]}bit"]


def parse_seconds(text: str) -> float:
    """Return seconds, of "0.1ms", "50us" or "0".

    Raises:
        ValueError: not understood.
    """
    found = re.fullmatch(rf"{_NUMBER}(s|ms|us|µs|ns)?", _plain(text))
    if (
        found is None
        or (found[2] is None and float(found[1]) != 0)
        or not math.isfinite(float(found[1]))
    ):
        raise ValueError(
            f"time {text!r} is not understood; times like 0.1ms, 50us, 2s (units s, ms, us, ns) are"
        )
    return float(found[1]) * TIME_UNITS[(found[2] or "s").replace("µ", "u")]


def format_rate(bits_per_s: float) -> str:
    """Return a rate with three digits, as "1 Gbit/s"."""
    if math.isinf(bits_per_s):
        return "an infinitely fast link"
    unit, prefix = next(
        ((u, p) for u, p in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if bits_per_s >= u),
        (1, ""),
    )
    return f"{bits_per_s / unit:.3g} {prefix}bit/s"


def format_rates(least: float, most: float) -> str:
    """Return a range of rates, as "50 to 98 Gbit/s"; one rate where both ends are written alike."""
    ends = format_rate(least), format_rate(most)
    if ends[0] == ends[1]:
        return ends[0]
    number, unit = ends[0].split(" ", 1)
    return f"{number if ends[1].endswith(' ' + unit) else ends[0]} to {ends[1]}"


def format_seconds(seconds: float) -> str:
    """Return a time with three digits, as "12.3 ms"."""
    if seconds == 0:
        return "0 s"
    unit, name = next(((u, n) for n, u in TIME_UNITS.items() if seconds >= u), (1e-9, "ns"))
    digits = 0 if seconds / unit >= 100 else 1 if seconds / unit >= 10 else 2
    return f"{seconds / unit:.{digits}f} {name}"


def _plain(text: str) -> str:
    return re.sub(r"\s", "", text.lower())
