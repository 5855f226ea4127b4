"""A model's parameters as an exchange sees them: how each gradient travels, and which ones share
a bucket.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gradcomp.payload.form import Form

MIN_NUMEL = 1024  # by default tensors with fewer elements, and vectors of any size, travel as fp32
# a name, a pattern, a preset, or a function of name and shape
Exempts = str | Callable[[str, tuple[int, ...]], bool]
# What libraries call these layers, as a whole component of a parameter's name: norm1, ln_f,
# LayerNorm, bn2; wte, tok_embeddings, position; lm_head, classifier, fc.
PRESETS = {
    "norm": re.compile(r"\w*norm\w*|ln|ln_\w+|bn\d*", re.IGNORECASE),
    "embedding": re.compile(r"\w*embed\w*|w[tp]e|position\w*", re.IGNORECASE),
    "head": re.compile(r"(\w+_)?head|classifier|fc", re.IGNORECASE),
}
THIN_GROUP_NUMEL = 16  # elements of a group under which a scale costs two bits a value or more


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model: position in ``named_parameters()``, name, shape, and how its
    gradient travels.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    numel: int
    group_numel: int
    compressed: bool


def describe_parameters(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    group_numel: Callable[[tuple[int, ...]], int],
    min_numel: int | None,
    exclude: Sequence[Exempts],
) -> list[Parameter]:
    """Return how each parameter travels: compressed, or as fp32 if it is small, a vector or
    excluded.

    Args:
        shapes: (name, shape) pairs in the order of ``named_parameters()``.
        group_numel: elements of a scale group of a parameter of some shape.
        min_numel: smaller tensors travel as fp32; None: those below `MIN_NUMEL`, and all vectors.
        exclude: of tensors that travel as fp32: names, shell patterns, keys of `PRESETS`, functions
            of name and shape.

    Raises:
        ValueError: an `exclude` entry that matches no parameter.
    """
    out, unused = [], list(exclude)
    least, vectors = (MIN_NUMEL, False) if min_numel is None else (min_numel, True)
    for index, (name, shape) in enumerate(shapes):
        hits = [e for e in exclude if _exempts(e, name, shape)]
        unused = [e for e in unused if e not in hits]
        numel = int(np.prod(shape, dtype=np.int64))
        compressed = numel >= least and (vectors or len(shape) > 1) and not hits
        out.append(Parameter(index, name, shape, numel, group_numel(shape), compressed))
    if unused:
        example = f"; names look like {out[0].name!r}" if out else ""
        raise ValueError(f"exclude={unused[0]!r} matches no parameter{example}")
    return out


def _exempts(entry: Exempts, name: str, shape: tuple[int, ...]) -> bool:
    if not isinstance(entry, str):
        return bool(entry(name, shape))
    preset = PRESETS.get(entry)
    if preset is not None and any(preset.fullmatch(part) for part in name.split(".")):
        return True
    return entry == name or fnmatch.fnmatchcase(name, entry)


def warn_of_thin_groups(parameters: Iterable[Parameter], form: Form) -> None:
    """Warn once of parameters whose scales cost more than their codes.

    Args:
        parameters: as `describe_parameters` returns them.
        form: of the codec, which has chosen the groups.
    """
    thin = [
        p for p in parameters if p.compressed and p.group_numel < min(THIN_GROUP_NUMEL, p.numel)
    ]
    if not (thin and form.scales_per_group):
        return
    worst = min(thin, key=lambda p: p.group_numel)
    bits = form.bits + 32 * form.scales_per_group / worst.group_numel
    warnings.warn(
        f"{len(thin)} of the compressed tensors have scale groups of fewer than {THIN_GROUP_NUMEL}"
        f" elements: {worst.name!r} has {worst.group_numel} and costs {bits:.1f} bits a value; use"
        " group='tensor', a larger group= or exclude= for it",
        stacklevel=6,  # the caller of GradientAverager
    )


def assign_buckets(
    nbytes: Sequence[int], cap_nbytes: int, first_cap_nbytes: int | None = None
) -> list[list[int]]:
    """Share tensors out over buckets, last tensor first, as torch's reducer does once it has seen a
    backward.

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
