"""What a collective costs: bytes that a rank sends, and messages that follow each other."""

from __future__ import annotations


def ring_bytes(numel: int, world_size: int) -> int:
    """Return the bytes that one rank sends in an fp32 ring all_reduce: 2 (N - 1) / N * 4 *
    numel, rounded up.
    """
    return -(-2 * (world_size - 1) * 4 * numel // world_size)


def max_rounds(world_size: int) -> int:
    """Return how many messages follow each other in a ring all_reduce."""
    return 2 * (world_size - 1)


def all_to_all_rounds(world_size: int) -> int:
    """Return how many messages follow each other in an all_to_all: every pair exchanges at once."""
    return min(1, world_size - 1)


def all_gather_rounds(world_size: int) -> int:
    """Return how many messages follow each other in a ring all_gather, as gloo has it."""
    return world_size - 1
