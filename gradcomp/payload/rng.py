"""Keys of the random numbers of one encoding: (seed, rank, step, parameter, stream) select the key
and counter of Philox4x32-10.

Random numbers are a pure function of these five numbers and of the element, never of threads,
tiers, buckets or transports. The generator is implemented in C; tests/reference/codec.py has a
readable version.

References: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from dataclasses import dataclass

STREAM_FIRST = 0  # a rank's own gradient
STREAM_SECOND = 1  # the owner's mean, independent of the first phase
STREAM_SERVER = 2
STREAM_INNER = 3
STREAM_ROTATION = 4  # signs in a rotation's first round, the same on all ranks; 5: second round
STREAM_OWNED = 6  # signs in the first round of the rotation of owners' means; 7: second round


@dataclass(frozen=True, slots=True)
class RngKey:
    """The key of the random numbers that an encoding draws.

    Args:
        seed: seed of the experiment, uint32, the same on every rank.
        rank: rank that encodes, uint32.
        step: training step, uint32 (the caller wraps a step counter modulo 2**32).
        parameter: position of the parameter in ``named_parameters()``, uint32.
        stream: 0 first phase, 1 second phase, 2 server, 3 inner, 4 to 7 rotations; below 2**31.
        first: first element of the encoded tensor within the parameter, if it is a shard of it: a
            multiple of 8 and of its scale group.

    Raises:
        ValueError: a number is not an integer in its range.
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


def check_uint32(name: str, value: object) -> int:
    """Return `value` if it is an integer in [0, 2**32), else raise ValueError naming it."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"{name} must be an integer in [0, 2**32), got {value!r}")
    return value
