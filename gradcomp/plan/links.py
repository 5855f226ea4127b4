"""Links between nodes, and their notation: "1gbit", "0.1ms", "10gbe"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradcomp.arguments import check_integer, suggestion
from gradcomp.plan.nodes import exact

RATE_UNITS = {"Tbit": 1e12, "Gbit": 1e9, "Mbit": 1e6, "kbit": 1e3, "bit": 1.0}
TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
NAMED = {  # bits per second, seconds of latency
    "wan": (100e6, 10e-3),
    "1gbe": (1e9, 0.1e-3),
    "10gbe": (10e9, 50e-6),
    "25gbe": (25e9, 20e-6),
    "100gbe": (100e9, 10e-6),
    "infiniband": (200e9, 2e-6),
}
_NUMBER = r"(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)"


@dataclass(frozen=True)
class Link:
    """Full-duplex link of every node.

    Attributes:
        bits_per_s: bits per second in each direction; ``math.inf``: only the latency counts.
        latency_s: seconds from sending to receiving a message, besides its transmission time.

    Raises:
        TypeError: the latency is not a number.
        ValueError: the rate is not positive, or the latency is negative or not finite.
    """

    bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bits_per_s > 0:
            raise ValueError(f"bits_per_s must be positive, got {self.bits_per_s!r}")
        exact("latency_s", self.latency_s)

    def __str__(self) -> str:
        latency = format_seconds(self.latency_s).replace(".00 ", " ").replace(".0 ", " ")
        return f"{format_rate(self.bits_per_s)}, {latency}"


@dataclass(frozen=True)
class Node:
    """Ranks that share one link.

    Attributes:
        ranks: number of ranks on every node; consecutive ranks are on one node.
        inside: link of each rank to the ranks of its own node (shared memory, loopback, NVLink).

    Raises:
        ValueError: `ranks` is not an integer of at least 1.
    """

    ranks: int = 1
    inside: Link = Link(math.inf)

    def __post_init__(self) -> None:
        check_integer("ranks of a node", self.ranks, 1)


def parse_link(text: str, latency: str | None = None) -> Link:
    """Return the link for a rate or a name ("1gbit", "10gbe") and a latency ("0.1ms"). Without
    `latency`, a named link has its own latency and a rate has none.

    Raises:
        ValueError: the text is not valid; the message lists what is.
    """
    name = _plain(text)
    try:
        rate, own = NAMED[name] if name in NAMED else (parse_rate(text), 0.0)
    except ValueError as error:
        raise ValueError(f"{error}{suggestion(name, NAMED)}") from None
    return Link(rate, own if latency is None else parse_seconds(latency))


def parse_rate(text: str) -> float:
    """Return the bits per second of "1gbit", "100 Mbit/s" or "inf"; ValueError for others and 0."""
    plain = re.sub(r"(/s|ps)$", "", _plain(text))
    if plain == "inf":
        return math.inf
    found = re.fullmatch(rf"{_NUMBER}([kmgt]?)(bits?|b)?", plain)
    if found is None or not (found[2] or found[3]) or not 0 < float(found[1]) < math.inf:
        raise ValueError(
            f"link {text!r} is not understood; write a rate like 100mbit or 2.5gbit (units"
            f" {', '.join(RATE_UNITS)}), inf, or a name out of {', '.join(NAMED)}"
        )
    units = {unit.lower(): bits for unit, bits in RATE_UNITS.items()}
    return float(found[1]) * units[f"{found[2]}bit"]


def parse_seconds(text: str) -> float:
    """Return the seconds of a text such as "0.1ms", "50us" or "0"; other texts are a ValueError."""
    found = re.fullmatch(rf"{_NUMBER}(s|ms|us|µs|ns)?", _plain(text))
    number = float(found[1]) if found else math.inf
    if found is None or not math.isfinite(number) or (found[2] is None and number != 0):
        raise ValueError(
            f"time {text!r} is not understood; write a time like 0.1ms, 50us or 2s (units s, ms,"
            " us, ns)"
        )
    return number * TIME_UNITS[(found[2] or "s").replace("µ", "u")]


def format_rate(bits_per_s: float) -> str:
    """Return a rate as text with three digits, such as "1 Gbit/s"."""
    if math.isinf(bits_per_s):
        return "an infinitely fast link"
    name, unit = next((i for i in RATE_UNITS.items() if bits_per_s >= i[1]), ("bit", 1.0))
    return f"{bits_per_s / unit:.3g} {name}/s"


def format_rates(least: float, most: float) -> str:
    """Return a range of rates such as "50 to 98 Gbit/s", or one rate if both ends read the same."""
    return _range(format_rate(least), format_rate(most))


def format_times(seconds: Sequence[float]) -> str:
    """Return the least and the largest time as text such as "12.3 to 14.0 ms"."""
    return _range(format_seconds(min(seconds)), format_seconds(max(seconds)))


def _range(first: str, last: str) -> str:
    number, unit = first.split(" ", 1)
    return last if first == last else f"{number if last.endswith(f' {unit}') else first} to {last}"


def format_seconds(seconds: float) -> str:
    """Return a time as text with three digits, such as "12.3 ms"."""
    if seconds == 0:
        return "0 s"
    name, unit = next((i for i in TIME_UNITS.items() if seconds >= i[1]), ("ns", 1e-9))
    digits = 0 if seconds / unit >= 100 else 1 if seconds / unit >= 10 else 2
    return f"{seconds / unit:.{digits}f} {name}"


def _plain(text: str) -> str:
    return re.sub(r"\s", "", text.lower())
