"""What the programs of `updates` read beside values: ranges of elements, and a record per parameter
with its addresses and the numbers of its rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels.rules import NO_RULE, RULE, TARGET, Kind
from gradcomp.kernels.tables import Table

NUMEL = 1024  # elements per program of `update_values`
STEPS = 8  # elements of a lane that `add_squares` loads before it adds them
ROWS = 2  # rows per program of `add_squares`, which is one warp
RUN = 2048  # elements of payloads whose sums of squares are added in order (GC_UPDATE_NUMEL)
PASSES = {Kind.LAMB_START: (Kind.MOMENTS, Kind.LAMB_NORMS)}  # kinds that are two launches
SUMS = (Kind.LAMB_START, Kind.LAMB_NORMS, Kind.SQUARES)  # kinds that write norms
WITHOUT_GRADIENT = (Kind.LAMB_NORMS, Kind.LAMB_APPLY)

ADDRESSES = (TARGET.names or ())[:5]
INTEGERS = "dtype", "kind", "flags", "rounding"
NUMBERS = [name for name in RULE.names or () if RULE[name] == np.float32]
RECORD = np.dtype(
    [(name, "<u8") for name in ADDRESSES]
    + [(name, "<u4") for name in INTEGERS]
    + [(name, "<f4") for name in NUMBERS]
    + [("reserved", "<u4")]
)
COLUMNS = 4  # of a range of elements: parameter, first, first of its gradient, elements


class Ranges(NamedTuple):
    """Ranges of elements of a table, the parts that they are cut from, and these parts' rows.

    Attributes:
        there: ``(number, COLUMNS)`` int64 on the device.
        number: number of ranges.
        part: part of each range, ``(number,)``.
        row: row of each part, ``(parts,)``.
    """

    there: Tensor
    number: int
    part: NDArray[np.int64]
    row: NDArray[np.int64]

    def totals(self, sums: NDArray[np.float64], rows: int) -> NDArray[np.float64]:
        """Return the sums of rows, ``(rows, 2)``: ranges are added in order, then parts. A NaN is
        canonical.

        Args:
            sums: ``(2, number)``, of the ranges.
        """
        parts, out = np.zeros((len(self.row), 2)), np.zeros((rows, 2))
        np.add.at(parts, self.part, sums.T)
        np.add.at(out, self.row, parts)
        out[np.isnan(out)] = np.nan
        return out


def ranges_of(
    table: Table,
    largest: int,
    device: torch.device,
    gradients: NDArray[Any] | None = None,
    part_numel: int = 0,
) -> Ranges:
    """Return ranges of at most `largest` elements.

    Args:
        gradients: ``(len(table),)``, first element of each row in the memory of its gradient; None:
            the gradient has the elements of the parameter.
        part_numel: parts of rows end at multiples of this number of elements of the parameter; 0:
            every row is one part.
    """
    start, numel = (table.rows[name].astype(np.int64) for name in ("start", "numel"))
    size = part_numel or int(numel.max(initial=1))
    row, ahead, part_numels = _cut(numel, size, start % size if part_numel else 0 * start)
    part, further, numels = _cut(part_numels, largest, 0 * part_numels)
    further += ahead[part]
    row_of_range = row[part]
    columns = [
        table.rows["parameter"].astype(np.int64)[row_of_range],
        start[row_of_range] + further,
        (start if gradients is None else gradients)[row_of_range] + further,
        numels,
    ]
    there = torch.from_numpy(np.stack(columns, 1)).to(device)
    return Ranges(there, len(part), part, row)


def _cut(
    numel: NDArray[np.int64], size: int, skipped: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return owner, first element and number of elements of every piece; pieces end at multiples
    of `size` elements, of which the owner lacks the first `skipped`.
    """
    pieces = np.where(numel > 0, -(-(skipped + numel) // size), 0)
    owner = np.repeat(np.arange(len(numel)), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = np.maximum(number * size - skipped[owner], 0)
    last = np.minimum((number + 1) * size - skipped[owner], numel[owner])
    return owner, first, last - first


def records_of(targets: NDArray[Any], rules: NDArray[Any]) -> NDArray[Any]:
    """Return a `RECORD` per target; those without a rule have the kind NO_RULE."""
    out = np.zeros(len(targets), RECORD)
    out["kind"] = NO_RULE
    ruled = targets["rule"] != NO_RULE
    given, rule = targets[ruled], rules[targets["rule"][ruled]]
    for name in ADDRESSES:
        out[name][ruled] = given[name]
    out["dtype"][ruled] = given["gradient_dtype"]
    for name in RULE.names or ():
        out[name][ruled] = rule[name]
    return out


def passes_of(kinds: NDArray[Any]) -> list[Kind]:
    """Return the kinds of the launches that targets of some kinds need, in their order."""
    given = [Kind(kind) for kind in np.unique(kinds) if kind != NO_RULE]
    return sorted({one for kind in given for one in PASSES.get(kind, (kind,))})
