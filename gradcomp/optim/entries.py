"""The entries of a step (parameters with gradients), their rules, and the calls of the C kernel."""

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
from gradcomp.kernels.rules import NO_RULE, RULE, Kind
from gradcomp.kernels.tables import CHUNK_NUMEL, Table
from gradcomp.optim.split import ROUNDINGS

GRADIENT_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(slots=True, eq=False)
class Entry:
    """One parameter in one step, with its gradient or the position of its packed gradient."""

    parameter: Tensor
    group: dict[str, Any]
    state: dict[str, Any]
    gradient: Tensor | None = None
    packed: Any = None  # `gradcomp.optim.fused.FusedGradients`
    position: int = 0  # of the parameter in `packed`
    step: int = 0  # number of this step for this parameter, from 1
    is_first: bool = False  # whether this is the first update of its state


def make_rules(
    kind: Kind, entries: Sequence[Entry], numbers: Callable[[Entry], dict[str, float]]
) -> NDArray[Any]:
    """Return the rules of `entries`, ``(len(entries),)`` of `rules.RULE`.

    `numbers` returns the fields of an entry's rule. It is called once for all entries with the same
    group, step and is_first.
    """
    fields: dict[tuple[int, int, bool], dict[str, float]] = {}
    rows = []
    for entry in entries:
        key = id(entry.group), entry.step, entry.is_first
        if key not in fields:
            fields[key] = numbers(entry)
        rows.append(fields[key])
    rules = np.zeros(len(entries), RULE)
    rules["kind"] = kind
    rules["rounding"] = [ROUNDINGS.index(entry.group["rounding"]) for entry in entries]
    for name in rows[0]:
        rules[name] = [row[name] for row in rows]
    return rules


@lru_cache(maxsize=16)
def whole_rows(numels: tuple[int, ...]) -> Table:
    """Return the rows of whole parameters, cut at CHUNK_NUMEL for any number of threads."""
    rows = [
        (0, 0, 0, 0, 0, first, min(CHUNK_NUMEL, numel - first), numel, place)
        for place, numel in enumerate(numels)
        for first in range(0, numel, CHUNK_NUMEL)
    ]
    return Table(rows)


def run_rules(
    entries: Sequence[Entry], rules: NDArray[Any], moments: Sequence[str], *, gradients: bool = True
) -> NDArray[np.float64]:
    """Run the rule of each entry on its device, which reads packed gradients from their payloads.

    `moments` are names of state, the first two for state0 and state1; rules without `gradients`
    read none. Return the norms, ``(len(entries), 2)`` float64, zeros for rules that compute none.
    """
    devices = {entry.parameter.device for entry in entries}
    if len(devices) > 1:
        found = np.zeros((len(entries), 2))
        for device in devices:
            mine = [k for k, e in enumerate(entries) if e.parameter.device == device]
            part = [entries[k] for k in mine]
            found[mine] = run_rules(part, rules[mine], moments, gradients=gradients)
        return found
    kernel_set = kernels.of_weights(devices.pop())
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
        by_position = np.zeros(packed.parameter_count, targets.dtype)
        by_position["rule"] = NO_RULE
        by_position[[entries[k].position for k in mine]] = targets[mine]
        packed.update(by_position, rules)
    totals = np.zeros((len(entries), 2))
    for row, pair in zip(table.rows["parameter"], norms.reshape(-1, 2), strict=True):
        totals[row] += pair  # summed in row order
    return np.sqrt(totals)
