"""Bytes of payloads as arrays over ranks: what a plan of layouts would say, for thousands of
ranks at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form
from gradcomp.payload.ownership import Ownership
from gradcomp.payload.parameters import Parameter


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


@lru_cache(maxsize=4096)
def _piece_nbytes(
    numel: int, group_numel: int, form: Form, ownership: Ownership
) -> NDArray[np.int64]:
    """Return the bytes of scales and codes of each rank's piece of one parameter."""
    starts = owner_starts(numel, ownership)
    first, last = starts[:-1], starts[1:]
    groups = np.where(last > first, (last - 1) // group_numel - first // group_numel + 1, 0)
    return form.code_nbytes(first, last) + form.scale_nbytes(groups)
