"""A model's parameters as an exchange sees them: how each gradient travels, and which ones share a bucket."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.payload.form import Form

THIN_GROUP_NUMEL = 16  # elements of a group under which a scale costs two bits a value or more


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model: position in ``named_parameters()``, name, shape, and how its gradient travels."""

    index: int
    name: str
    shape: tuple[int, ...]
    numel: int
    group_numel: int
    compressed: bool


def describe_parameters(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    group_numel: Callable[[tuple[int, ...]], int],
    min_numel: int,
    exclude: Sequence[str],
) -> list[Parameter]:
    """Return how each parameter travels: compressed, or as fp32 if it is small or excluded.

    Args:
        shapes: (name, shape) pairs in the order of ``named_parameters()``.
        group_numel: elements of a scale group of a parameter of some shape.
        min_numel: smaller tensors travel as fp32.
        exclude: names or shell patterns of tensors that travel as fp32.

    Raises:
        ValueError: an `exclude` entry that matches no name.
    """
    out, unused = [], set(exclude)
    for index, (name, shape) in enumerate(shapes):
        hits = {e for e in exclude if e == name or fnmatch.fnmatchcase(name, e)}
        unused -= hits
        numel = int(np.prod(shape, dtype=np.int64))
        out.append(Parameter(index, name, shape, numel, group_numel(shape), numel >= min_numel and not hits))
    if unused:
        example = f"; names look like {out[0].name!r}" if out else ""
        raise ValueError(f"exclude={min(unused)!r} matches no parameter name{example}")
    return out


def warn_of_thin_groups(parameters: Iterable[Parameter], form: Form) -> None:
    """Warn once of parameters whose scales cost more than their codes.

    Args:
        parameters: as `describe_parameters` returns them.
        form: of the codec, which has chosen the groups.
    """
    thin = [p for p in parameters if p.compressed and p.group_numel < min(THIN_GROUP_NUMEL, p.numel)]
    if not (thin and form.scales_per_group):
        return
    worst = min(thin, key=lambda p: p.group_numel)
    bits = form.bits + 32 * form.scales_per_group / worst.group_numel
    warnings.warn(
        f"{len(thin)} of the compressed tensors have scale groups of fewer than {THIN_GROUP_NUMEL} elements: {worst.name!r} "
        f"has {worst.group_numel} and costs {bits:.1f} bits a value; use group='tensor', a larger group= or exclude= for it",
        stacklevel=5,
    )


def assign_buckets(nbytes: Sequence[int], cap_nbytes: int, first_cap_nbytes: int | None = None) -> list[list[int]]:
    """Share tensors out over buckets, last tensor first, as torch's reducer does once it has seen a backward.

    Args:
        nbytes: of each tensor, in the order of the forward pass.
        cap_nbytes: a bucket that has reached this is closed.
        first_cap_nbytes: the same for the first bucket (DDP: 1 MiB); `cap_nbytes` when None.

    Returns:
        Positions of the tensors, bucket by bucket.
    """
    cap = cap_nbytes if first_cap_nbytes is None else first_cap_nbytes
    buckets: list[list[int]] = []
    members: list[int] = []
    size = 0
    for index in reversed(range(len(nbytes))):
        members.append(index)
        size += nbytes[index]
        if size >= cap:
            buckets.append(members)
            members, size, cap = [], 0, cap_nbytes
    return [*buckets, members] if members else buckets
