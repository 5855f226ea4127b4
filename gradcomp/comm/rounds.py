"""Cost of a collective: bytes sent by a rank, and consecutive messages (rounds)."""

from __future__ import annotations


def ring_bytes(numel: int, world_size: int) -> int:
    """Return the bytes that a rank sends in an fp32 ring all_reduce, 2 (N - 1) / N * 4 * numel,
    rounded up.
    """
    return -(-2 * (world_size - 1) * 4 * numel // world_size)


def rounds_of(kind: str, world_size: int) -> int:
    """Return the rounds of an "all_gather" (a ring, as gloo's), an "all_to_all" (all pairs at
    once), or a ring all_reduce: "max", "all_reduce" or "all_reduce_bf16".
    """
    others = world_size - 1
    rings = dict.fromkeys(("max", "all_reduce", "all_reduce_bf16"), 2 * others)
    return {"all_gather": others, "all_to_all": min(1, others), **rings}[kind]
