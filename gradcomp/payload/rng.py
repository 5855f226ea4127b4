"""Names the random draws of one encoding: (seed, rank, step, parameter, stream) -> Philox4x32-10
key and counter.

Draws are a pure function of these five numbers and of the element, never of threads, tiers, buckets
or transports. The generator itself lives in C and, to be read, in tests/reference/codec.py.

References: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

STREAM_FIRST = 0  # a rank's own gradient
STREAM_SECOND = 1  # the owner's mean, drawn independently of the first phase
STREAM_SERVER = 2
STREAM_INNER = 3
STREAM_ROTATION = 4  # signs of a rotation's first round, the same on all ranks; 5 of its second
STREAM_OWNED = 6  # the same of the rotation that owners turn means by; 7 of its second


@dataclass(frozen=True, slots=True)
class RngKey:
    """Which random numbers an encoding draws.

    Args:
        seed: experiment seed, uint32, the same on every rank.
        rank: rank that encodes, uint32.
        step: training step, uint32 (a step counter wraps modulo 2**32 before it gets here).
        parameter: position of the parameter in ``named_parameters()``, uint32.
        stream: 0 first phase, 1 second phase, 2 server, 3 inner, 4 to 7 rotations; below 2**31.
        first: element of the parameter with which the encoded tensor begins, where it is a shard of
            one: a multiple of 8 and of its scale group.

    Raises:
        ValueError: a number that is not an integer in its range.
    """

    seed: int = 0
    rank: int = 0
    step: int = 0
    parameter: int = 0
    stream: int = STREAM_FIRST
    first: int = 0

    def __post_init__(self) -> None:
        numbers = (self.seed, self.rank, self.step, self.parameter, self.stream, self.first)
        if {*map(type, numbers)} == {int} and min(numbers) >= 0 and max(numbers) < 2**31:
            return
        for name in ("seed", "rank", "step", "parameter", "first"):
            check_uint32(name, getattr(self, name))
        if check_uint32("stream", self.stream) >= 2**31:
            raise ValueError(f"stream must be below 2**31, got {self.stream}")

    def with_stream(self, stream: int) -> RngKey:
        """Return this key with another stream."""
        return replace(self, stream=stream)


def check_uint32(name: str, value: object) -> int:
    """Return `value` if it is an integer in [0, 2**32), else raise ValueError naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{name} must be an integer in [0, 2**32), got {value!r}")
    return value
