"""What one step updates: parameters with their gradients and rules, and the C kernel's calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp import kernels
from gradcomp.kernels.rules import NO_RULE, RULE, TARGET, Kind
from gradcomp.kernels.tables import CHUNK_NUMEL, Table
from gradcomp.optim.split import ROUNDINGS

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(slots=True, eq=False)
class Entry:
    """One parameter in one step: its gradient, or where its packed gradient is."""

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    gradient: Tensor | None = None
    packed: Any = None  # `gradcomp.optim.fused.FusedGradients`
    position: int = 0  # in `packed`
    step: int = 0  # number of this step for this parameter, from 1
    is_first: bool = False  # its state has not seen a gradient yet


def make_rules(
    kind: Kind, entries: Sequence[Entry], numbers: Callable[[Entry], dict[str, float]]
) -> NDArray[Any]:
    """Return ``(len(entries),)`` of `rules.RULE`; `numbers` returns the fields of an entry's rule,
    and is called once for all entries that have group, step and is_first in common.
    """
    known: dict[tuple[int, int, bool], dict[str, float]] = {}
    rows = []
    for entry in entries:
        place = id(entry.group), entry.step, entry.is_first
        if place not in known:
            known[place] = numbers(entry)
        rows.append(known[place])
    rules = np.zeros(len(entries), RULE)
    rules["kind"] = kind
    rules["rounding"] = [ROUNDINGS.index(entry.group["rounding"]) for entry in entries]
    for name in rows[0]:
        rules[name] = [row[name] for row in rows]
    return rules


@lru_cache(maxsize=16)
def whole_rows(numels: tuple[int, ...]) -> Table:
    """Return rows over whole parameters, cut at CHUNK_NUMEL whatever the number of threads."""
    rows = [
        (0, 0, 0, 0, 0, first, min(CHUNK_NUMEL, numel - first), numel, place)
        for place, numel in enumerate(numels)
        for first in range(0, numel, CHUNK_NUMEL)
    ]
    return Table(rows)


def run_rules(
    entries: Sequence[Entry], rules: NDArray[Any], moments: Sequence[str], *, gradients: bool = True
) -> NDArray[np.float64]:
    """Run one rule for each entry; packed gradients come from their payloads.

    Args:
        rules: ``(len(entries),)`` of `rules.RULE`.
        moments: names of the state; the first two are state0 and state1 of the rules.
        gradients: False for rules that read none.

    Returns:
        ``(len(entries), 2)``: norms, for rules that compute them, else zeros.
    """
    kernel_set = kernels.of(entries[0].parameter.device)
    targets = kernel_set.targets(
        weight=[e.parameter for e in entries],
        trail=[e.state.get("trail") for e in entries],
        gradient=[e.gradient for e in entries],
        **{f"state{k}": [e.state.get(m) for e in entries] for k, m in enumerate(moments[:2])},
    )
    sources = {id(e.packed): e.packed for e in entries if gradients and e.packed is not None}
    direct = targets.copy()
    if sources:
        direct["rule"][[k for k, e in enumerate(entries) if e.packed is not None]] = NO_RULE
    table = whole_rows(tuple(e.parameter.numel() for e in entries))
    norms = np.zeros(2 * len(table))
    if not gradients or any(e.packed is None for e in entries):
        kernel_set.update(table, direct, rules, norms=norms)
    for packed in sources.values():
        mine = [k for k, e in enumerate(entries) if e.packed is packed]
        by_position = np.zeros(packed.parameter_count, TARGET)
        by_position["rule"] = NO_RULE
        by_position[[entries[k].position for k in mine]] = targets[mine]
        packed.update(by_position, rules)
    totals = np.zeros((len(entries), 2))
    for row, pair in zip(table.rows["parameter"], norms.reshape(-1, 2), strict=True):
        totals[row] += pair  # in order
    return np.sqrt(totals)
