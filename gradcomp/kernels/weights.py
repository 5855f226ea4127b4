"""Splitting, joining and updating of weights in torch operations, for devices without a kernel set.

The results are those of the CPU's kernels, bit for bit (gradcomp.h says what an update does). torch
does not promise how a device rounds fused operations, quotients and roots, or in which order it
adds. So products and sums are single float32 operations, and everything else goes through float64
and is rounded once, to float32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.errors import UnsupportedTensor
from gradcomp.kernels.interface import Payloads, WeightKernels
from gradcomp.kernels.rules import NO_RULE, RULE, Flag, Kind
from gradcomp.kernels.tables import CHUNK_NUMEL, Table

LANES = 16  # GC_SUM_LANES: partial sums of a row's squares
SPAN_NUMEL = 16 * CHUNK_NUMEL  # elements per operation: its float64 tensors take 8 MB each
FIELDS = ("weight", "trail", "gradient", "state0", "state1")
NUMBERS = [name for name in RULE.names or () if RULE[name] == np.float32]
TARGET = np.dtype([(name, "O") for name in FIELDS] + [("rule", "<u4")])


class Span(NamedTuple):
    """Neighbouring rows of one parameter, which are updated together.

    Attributes:
        parameter, start, numel: the elements.
        first_row, rows: the rows of the table; all but the last have `row_numel` elements.
        row_numel: a multiple of LANES, unless there is one row.
    """

    parameter: int
    start: int
    numel: int
    first_row: int
    rows: int
    row_numel: int

    def joined(self, row: int, start: int, numel: int, parameter: int) -> Span | None:
        """Return the span with another row behind it, or None if they do not go together."""
        size = self.row_numel
        if (row, parameter) != (self.first_row + self.rows, self.parameter) or size % LANES:
            return None
        total = self.rows * size + numel
        if start != self.start + self.rows * size or numel > size or total > SPAN_NUMEL:
            return None
        return self._replace(numel=total, rows=self.rows + 1)


def spans_of(table: Table) -> list[Span]:
    """Return the rows of a table as spans."""
    spans: list[Span] = []
    columns = table.rows[["start", "numel", "parameter"]].tolist()
    for row, (start, numel, parameter) in enumerate(columns):
        joined = spans[-1].joined(row, start, numel, parameter) if spans else None
        if joined is not None:
            spans[-1] = joined
        elif numel:
            spans.append(Span(parameter, start, numel, row, 1, numel))
    return spans


class TorchWeights(WeightKernels):
    """Operations on weights of one device; `WeightKernels` documents the methods.

    Args:
        device: device of all tensors; it must have float64.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def split(self, weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
        bits = weights.detach().view(torch.int32)
        high = bits >> 16
        if nearest:
            is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
            high = torch.where(is_nan, high | 0x40, high + (bits >> 15 & 1))
        top.detach().view(torch.int16).copy_(high)
        trail.view(torch.int16).copy_(bits)  # keeps the last 16 bits

    def join(self, top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
        high, low = top.detach().view(torch.int16).int(), trail.view(torch.int16).int() & 0xFFFF
        if nearest:
            is_nan = (high & 0x7FFF) > 0x7F80
            high = torch.where(is_nan, high, high - (low >> 15))
        weights.view(torch.int32).copy_(high << 16 | low)

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        out = np.empty(max(map(len, tensors.values())), TARGET)  # of None
        for name, values in tensors.items():
            for place, tensor in enumerate(values):
                if tensor is not None:
                    out[name][place] = tensor.detach().as_strided((tensor.numel(),), (1,))
        out["rule"] = np.arange(len(out))
        return out

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[Any] | None = None,
    ) -> bool:
        if payloads is not None:
            raise UnsupportedTensor(f"weights on {self.device} are not updated from payloads yet")
        if "torch" not in table.prepared:
            table.prepared["torch"] = spans_of(table)
        columns = np.stack([rules[name] for name in NUMBERS], axis=1)
        numbers = torch.from_numpy(columns).to(self.device)  # one copy for all rules
        sums = []
        for span in table.prepared["torch"]:
            target = targets[span.parameter]
            if target["rule"] != NO_RULE:
                rule = rules[target["rule"]]
                own = dict(zip(NUMBERS, numbers[int(target["rule"])].unbind(), strict=True))
                added = _Update(self, rule, own, target, span).run()
                if added is not None:
                    sums.append((span, added))
        if norms is not None and sums:
            found = torch.cat([added for _, added in sums], 1).cpu().numpy()
            found[np.isnan(found)] = np.nan  # C has one NaN
            first = 0
            for span, _ in sums:
                rows = norms.reshape(-1, 2)[span.first_row :][: span.rows]
                rows[:] = found[:, first : first + span.rows].T
                first += span.rows
        return False


class _Update:
    """One rule on one span. `numbers` are those of `rule` on the device."""

    def __init__(
        self,
        weights: TorchWeights,
        rule: np.void,
        numbers: dict[str, Tensor],
        target: np.void,
        span: Span,
    ) -> None:
        self._weights, self._rule, self._numbers, self._span = weights, rule, numbers, span
        elements = slice(span.start, span.start + span.numel)
        given: list[Any] = [None if target[f] is None else target[f][elements] for f in FIELDS]
        self._weight, self._trail, self._given, self._state0, self._state1 = given

    def run(self) -> Tensor | None:
        """Apply the rule; return sums of squares, ``(2, rows)`` float64, or None."""
        kind, n = int(self._rule["kind"]), self._numbers
        if kind == Kind.SQUARES:
            g = self._gradient()
            return self._squares(g, torch.zeros_like(g))
        if kind == Kind.SGD:
            self._sgd()
        elif kind == Kind.ADAGRAD:
            w, g = self._load(), self._gradient()
            if self._rule["weight_decay"] != 0:
                g = fma(n["weight_decay"], w, g)
            total = fma(g, g, self._state0)
            self._state0.copy_(quiet(total))
            self._store(w + quotient(n["step_size"] * g, root(total) + n["eps"]))
        elif kind == Kind.ADAMW:
            w = self._load()
            if self._rule["decay"] != 1:
                w = w * n["decay"]
            self._moments()
            below = quotient(root(self._state1), n["bias2"]) + n["eps"]
            self._store(w + quotient(n["step_size"] * self._state0, below))
        elif kind == Kind.LAMB_APPLY:
            w = self._load()
            self._store(fma(n["step_size"], self._direction(w), w))
        else:
            if kind != Kind.LAMB_NORMS:
                self._moments()
            if kind != Kind.MOMENTS:
                w = self._load()
                return self._squares(w, self._direction(w))
        return None

    def _sgd(self) -> None:
        rule, n = self._rule, self._numbers
        w, g = self._load(), self._gradient()
        if rule["weight_decay"] != 0:
            g = fma(n["weight_decay"], w, g)
        if rule["momentum"] != 0:
            buffer = g
            if not rule["flags"] & Flag.FIRST:
                buffer = fma(n["keep"], g, n["momentum"] * self._state0)
            self._state0.copy_(quiet(buffer))
            g = fma(n["momentum"], buffer, g) if rule["flags"] & Flag.NESTEROV else buffer
        self._store(fma(n["step_size"], g, w))

    def _moments(self) -> None:
        n, g, first, second = self._numbers, self._gradient(), self._state0, self._state1
        change = g - first
        if self._rule["keep"] < 0.5:
            first.copy_(quiet(fma(n["keep"], change, first)))
        else:
            first.copy_(quiet(fma(n["keep"] - 1, change, g)))
        second.copy_(quiet(fma(n["keep2"] * g, g, second * n["beta2"])))

    def _direction(self, w: Tensor) -> Tensor:
        """Return LAMB's u."""
        n = self._numbers
        u = quotient(n["bias1"] * self._state0, root(self._state1) + n["eps"])
        return fma(n["weight_decay"], w, u) if self._rule["weight_decay"] != 0 else u

    def _gradient(self) -> Tensor:
        g: Tensor = self._given.float()
        if self._rule["flags"] & Flag.MAXIMIZE:
            g = -g
        return g * self._numbers["prescale"] if self._rule["flags"] & Flag.PRESCALE else g

    def _load(self) -> Tensor:
        w: Tensor = self._weight
        if self._trail is not None:
            w = torch.empty_like(w, dtype=torch.float32)
            self._weights.join(self._weight, self._trail, w, nearest=self._rule["rounding"] == 1)
        return w

    def _store(self, w: Tensor) -> None:
        w = quiet(w)
        if self._trail is None:
            self._weight.copy_(w)
        else:
            nearest = self._rule["rounding"] == 1
            self._weights.split(w, self._weight, self._trail, nearest=nearest)

    def _squares(self, *values: Tensor) -> Tensor:
        """Return the sum of squares of each row, ``(len(values), rows)`` float64, in C's order:
        element i is added to lane i % LANES, then lanes j and j + 8, 4, 2, 1.
        """
        span, wide = self._span, torch.stack(values).double()
        row_numel = span.row_numel + -span.row_numel % LANES
        padding = span.rows * row_numel - span.numel
        squares = torch.nn.functional.pad(wide * wide, (0, padding))
        lanes = sum_in_order(squares.view(len(values), span.rows, -1, LANES))
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
        return lanes[..., 0]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32 tensors, rounded once to float32.

    The product is exact in float64. The sum is rounded to odd there, after which rounding to
    float32 is the only one that counts (Boldo and Melquiond 2008, "Emulation of FMA and correctly
    rounded sums").
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_inexact = total.isfinite() & (error != 0)
    is_above = is_inexact & ((error > 0) != (total > 0))  # total is farther from 0 than the sum
    bits = (total.view(torch.int64) - is_above.long()) | is_inexact.long()
    return bits.view(torch.float64).float()


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b of float32 tensors, rounded once: float64 has more than twice the digits, so
    rounding there changes no result.
    """
    return (a.double() / b.double()).float()


def root(x: Tensor) -> Tensor:
    """Return the square root of a float32 tensor, rounded once, as `quotient`."""
    return x.double().sqrt().float()


def quiet(x: Tensor) -> Tensor:
    """Return x with every NaN as 0x7FC00000, as C stores it."""
    return x.masked_fill(x.isnan(), math.nan)


def sum_in_order(values: Tensor) -> Tensor:
    """Return the sums of a float64 tensor over its last dimension but one, added one after the
    other.
    """
    if _cumsum_is_in_order(values.device):
        return values.cumsum(-2)[..., -1, :]
    return functools.reduce(torch.add, values.unbind(-2))


@functools.cache
def _cumsum_is_in_order(device: torch.device) -> bool:
    """Return whether torch's cumsum adds one after the other on a device. It does on the CPU and
    where each thread of a GPU adds one column, but torch does not promise it.
    """
    draws = torch.Generator("cpu").manual_seed(0)
    values = torch.rand(2, 3, 1000, LANES, dtype=torch.float64, generator=draws, device="cpu")
    expected = functools.reduce(torch.add, values.unbind(-2))
    return torch.equal(values.to(device).cumsum(-2)[..., -1, :].cpu(), expected)
