"""Parameters of a model: which gradients are compressed, and which share a bucket."""

from __future__ import annotations

import fnmatch
import math
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gradcomp.payload.form import Form

MIN_NUMEL = 1024  # default: smaller tensors, and vectors of any size, are sent as fp32
# a name, a pattern, a preset, or a function of name and shape
Exempts = str | Callable[[str, tuple[int, ...]], bool]
# Names of these layers in common libraries; they match a whole component of a parameter's name:
# norm1, ln_f, LayerNorm, bn2; wte, tok_embeddings, position; lm_head, classifier, fc.
PRESETS = {
    "norm": re.compile(r"\w*norm\w*|ln|ln_\w+|bn\d*", re.IGNORECASE),
    "embedding": re.compile(r"\w*embed\w*|w[tp]e|position\w*", re.IGNORECASE),
    "head": re.compile(r"(\w+_)?head|classifier|fc", re.IGNORECASE),
}
THIN_GROUP_NUMEL = 16  # in groups with fewer elements a scale costs more than two bits per value


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a model.

    Attributes:
        index: position in ``named_parameters()``.
        name, shape, numel: as in the model.
        group_numel: elements of one scale group.
        compressed: whether its gradient is compressed; if not, it is sent as fp32.
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
    """Return the parameters, each marked as compressed, or as fp32 if small, a vector or excluded.

    Args:
        shapes: (name, shape) pairs in the order of ``named_parameters()``.
        group_numel: maps a parameter's shape to the elements of its scale groups.
        min_numel: smaller tensors are sent as fp32; None: those below `MIN_NUMEL`, and all vectors.
        exclude: tensors that are sent as fp32: names, shell patterns, keys of `PRESETS`, or
            functions of name and shape.

    Raises:
        ValueError: an `exclude` entry matches no parameter.
    """
    out, unused = [], list(exclude)
    least, vectors = (MIN_NUMEL, False) if min_numel is None else (min_numel, True)
    for index, (name, shape) in enumerate(shapes):
        hits = [e for e in exclude if _exempts(e, name, shape)]
        unused = [e for e in unused if e not in hits]
        numel = math.prod(shape)
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
    """Warn once if scale groups of compressed parameters are so small that scales cost too much.

    Args:
        parameters: result of `describe_parameters`.
        form: form of the codec that has chosen the groups.
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
    """Assign tensors to buckets, last tensor first, as DDP's reducer does after the first backward.

    Args:
        nbytes: bytes of each tensor, in the order of the forward pass.
        cap_nbytes: a bucket is closed when it has at least this many bytes.
        first_cap_nbytes: the same for the first bucket (DDP: 1 MiB); `cap_nbytes` if None.

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
