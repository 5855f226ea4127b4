"""Bytes of payloads as arrays over ranks: what a plan of layouts would say, for thousands of
ranks at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form
from gradcomp.payload.parameters import Parameter
from gradcomp.payload.pieces import Ownership

UNIT_NUMEL = 64  # slices are cut at multiples of it where they can be


def owned_nbytes(
    parameters: Iterable[Parameter], form: Form, ownership: Ownership
) -> NDArray[np.int64]:
    """Return the bytes of a payload of what each rank owns of parameters, header included:
    ``(world_size,)``.
    """
    total = np.full(ownership.world_size, HEADER_NBYTES, np.int64)
    alike = itertools.groupby(sorted((p.numel, p.group_numel, p.compressed) for p in parameters))
    for (numel, group_numel, compressed), same in alike:
        total += len(list(same)) * _piece_nbytes(
            numel, group_numel, form if compressed else PLAIN, ownership
        )
    return total


@lru_cache(maxsize=4096)
def owner_starts(numel: int, ownership: Ownership) -> NDArray[np.int64]:
    """Return `Ownership.starts` of a parameter, kept between calls."""
    return ownership.starts(numel)


def slice_bounds(
    parameters: Sequence[Parameter], ownership: Ownership, count: int
) -> list[NDArray[np.int64]]:
    """Return where `gradcomp.exchange.slices.cut` cuts what each rank owns of each parameter, with
    both ends: ``(count + 1, world_size)`` each.

    Args:
        parameters: of a bucket, one after the other.
        ownership: who owns what.
        count: of slices.
    """
    starts = [owner_starts(p.numel, ownership) for p in parameters]
    total = sum((one[1:] - one[:-1] for one in starts), np.zeros(ownership.world_size, np.int64))
    bounds = total * np.arange(count + 1)[:, None] // count
    before, out = np.zeros_like(total), []
    for p, one in zip(parameters, starts, strict=True):
        first, last = one[:-1], one[1:]
        group = p.group_numel if p.compressed else 1
        large, small = math.lcm(UNIT_NUMEL, group), math.lcm(8, group)
        unit = np.where(
            large * count <= total, large, np.where(small * count <= total, small, UNIT_NUMEL)
        )
        at = first + bounds - before
        out.append(np.where(at >= last, last, np.maximum(at // unit * unit, first)))
        out[-1][0] = first
        before = before + last - first
    return out


def sliced_nbytes(
    parameters: Sequence[Parameter], bounds: Sequence[NDArray[np.int64]], form: Form
) -> NDArray[np.int64]:
    """Return the bytes of each slice of what each rank owns, headers included: ``(count,
    world_size)``.
    """
    total = np.full_like(bounds[0][1:], HEADER_NBYTES)
    for p, cuts in zip(parameters, bounds, strict=True):
        total += _nbytes(cuts[:-1], cuts[1:], p.group_numel, form if p.compressed else PLAIN)
    return total


@lru_cache(maxsize=4096)
def _piece_nbytes(
    numel: int, group_numel: int, form: Form, ownership: Ownership
) -> NDArray[np.int64]:
    """Return the bytes of scales and codes of each rank's piece of one parameter."""
    starts = owner_starts(numel, ownership)
    return _nbytes(starts[:-1], starts[1:], group_numel, form)


def _nbytes(
    first: NDArray[np.int64], last: NDArray[np.int64], group_numel: int, form: Form
) -> NDArray[np.int64]:
    groups = np.where(last > first, (last - 1) // group_numel - first // group_numel + 1, 0)
    return form.code_nbytes(first, last) + form.scale_nbytes(groups)
