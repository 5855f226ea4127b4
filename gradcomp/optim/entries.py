"""One step's parameters, gradients and rules, and the calls of the C kernel that take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcomp import kernels
from gradcomp.kernels.rules import NO_RULE, RULE, TARGET, Kind
from gradcomp.kernels.tables import CHUNK_NUMEL, Table
from gradcomp.optim.split import ROUNDINGS

GRADIENT_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class PackedGradients(Protocol):
    """Averaged gradients that exist only as payloads; `p.grad` is a placeholder meanwhile."""

    parameter_count: int  # of the model whose positions `position` gives

    def position(self, parameter: Tensor) -> int | None:
        """Return the position of a parameter whose placeholder is still in place, None for any
        other.
        """

    def check(self, parameter: Tensor) -> None:
        """Raise GradcompError if a placeholder was written to."""

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Run `Kernels.update` on every payload, targets by position."""


class Entry:
    """One parameter in one step: its gradient, or where its packed gradient is."""

    __slots__ = (
        "gradient",
        "group",
        "is_first",
        "packed",
        "parameter",
        "position",
        "state",
        "step",
    )

    def __init__(
        self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        self.parameter, self.group, self.state = parameter, group, state
        self.gradient: Tensor | None = None
        self.packed: PackedGradients | None = None
        self.position = 0
        self.step = 0  # number of this step for this parameter, from 1
        self.is_first = False  # its state has not seen a gradient yet


def number_steps(entries: Sequence[Entry]) -> None:
    """Tell every entry which step of its parameter this is."""
    if entries:
        for entry, steps in zip(
            entries, torch.stack([e.state["step"] for e in entries]).tolist(), strict=True
        ):
            entry.step = int(steps) + 1
            entry.is_first |= entry.step == 1


def count(entries: Sequence[Entry]) -> None:
    """Count the step that every entry has taken."""
    if entries:
        torch._foreach_add_([entry.state["step"] for entry in entries], 1)


Numbers = Callable[[dict[str, Any], int, bool], dict[str, float]]


def make_rules(kind: Kind, entries: Sequence[Entry], numbers: Numbers) -> NDArray[Any]:
    """Return ``(len(entries),)`` of `rules.RULE`.

    Args:
        numbers: numbers(group, step, is_first): the fields of the rule, for entries that have these
            in common.
    """
    known: dict[tuple[int, int, bool], dict[str, float]] = {}
    rows = []
    for entry in entries:
        place = id(entry.group), entry.step, entry.is_first
        if place not in known:
            known[place] = numbers(entry.group, entry.step, entry.is_first)
        rows.append(known[place])
    rules = np.zeros(len(entries), RULE)
    rules["kind"] = kind
    rules["rounding"] = [ROUNDINGS.index(entry.group["rounding"]) for entry in entries]
    for name in rows[0]:
        rules[name] = [row[name] for row in rows]
    return rules


@lru_cache(maxsize=16)
def whole_rows(numels: tuple[int, ...]) -> Table:
    """Return rows over whole parameters, cut at multiples of CHUNK_NUMEL whatever the threads:
    sums depend on it.
    """
    rows = [
        (0, 0, 0, 0, 0, first, min(CHUNK_NUMEL, numel - first), numel, place)
        for place, numel in enumerate(numels)
        for first in range(0, numel, CHUNK_NUMEL)
    ]
    return Table(rows)


def run_rules(
    entries: Sequence[Entry],
    rules: NDArray[Any],
    moments: Sequence[str],
    *,
    gradients: bool = True,
) -> NDArray[np.float64]:
    """Run one rule an entry.

    Args:
        rules: ``(len(entries),)`` of `rules.RULE`.
        moments: names of the state that rules know as state0 and state1.
        gradients: False for rules that read none; packed ones come from their payloads.

    Returns:
        ``(len(entries), 2)``: the norms that rules which add up found, an entry's rows added in
        order; else zeros.
    """
    kernel_set = kernels.of(entries[0].parameter.device)
    targets = kernel_set.targets(
        weight=[e.parameter for e in entries],
        trail=[e.state.get("trail") for e in entries],
        gradient=[e.gradient for e in entries],
        **{f"state{k}": [e.state.get(m) for e in entries] for k, m in enumerate(moments)},
    )
    direct = targets.copy()
    if gradients:
        direct["rule"][[k for k, e in enumerate(entries) if e.packed is not None]] = NO_RULE
    table = whole_rows(tuple(e.parameter.numel() for e in entries))
    norms = np.zeros(2 * len(table))
    if not gradients or any(e.packed is None for e in entries):
        kernel_set.update(table, direct, rules, norms=norms)
    for packed in {
        id(e.packed): e.packed for e in entries if gradients and e.packed is not None
    }.values():
        mine = [k for k, e in enumerate(entries) if e.packed is packed]
        by_position = np.zeros(packed.parameter_count, TARGET)
        by_position["rule"] = NO_RULE
        by_position[[entries[k].position for k in mine]] = targets[mine]
        packed.update(by_position, rules)
    totals = np.zeros((len(entries), 2))
    for row, pair in zip(table.rows["parameter"], norms.reshape(-1, 2), strict=True):
        totals[row] += pair
    return np.sqrt(totals)
