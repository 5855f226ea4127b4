"""Cost of a collective: bytes sent by a rank, and consecutive messages (rounds)."""

from __future__ import annotations


def ring_bytes(numel: int, world_size: int) -> int:
    """Return the bytes that a rank sends in an fp32 ring all_reduce, 2 (N - 1) / N * 4 * numel."""
    return -(-2 * (world_size - 1) * 4 * numel // world_size)


def max_rounds(world_size: int) -> int:
    """Return the number of rounds of a ring all_reduce."""
    return 2 * (world_size - 1)


def all_to_all_rounds(world_size: int) -> int:
    """Return the number of rounds of an all_to_all, in which all pairs exchange concurrently."""
    return min(1, world_size - 1)


def all_gather_rounds(world_size: int) -> int:
    """Return the number of rounds of a ring all_gather, the algorithm of gloo."""
    return world_size - 1
