"""What a search for the minibatch size has found."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizeTrial:
    """One size that was tried.

    Attributes:
        minibatch: samples of all ranks together.
        criterion: mean training loss over the trial and the ranks; NaN if any loss was NaN or Inf.
        lr_factor: what learning rates were multiplied by.
        steps: of the rank that made most.
        seconds: of the slowest rank.
    """

    minibatch: int
    criterion: float
    lr_factor: float
    steps: int
    seconds: float


@dataclass(frozen=True)
class BatchSizeChoice:
    """What `find_batch_size` returns.

    Attributes:
        minibatch: the choice, samples of all ranks together.
        trials: all of them, by rising minibatch.
        margin: as it was asked for.
    """

    minibatch: int
    trials: tuple[BatchSizeTrial, ...]
    margin: float

    @property
    def trial(self) -> BatchSizeTrial:
        """The trial of the choice."""
        return next(t for t in self.trials if t.minibatch == self.minibatch)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's heading and rows as text; the chosen one is marked."""
        finite = [t.criterion for t in self.trials if math.isfinite(t.criterion)]
        best = min(finite, default=math.nan)
        rows: list[tuple[str, ...]] = [
            ("", "minibatch", "criterion", "of best", "lr factor", "steps", "seconds")
        ]
        for t in self.trials:
            more = (
                f"{100 * (t.criterion - best) / abs(best):+.2f} %"
                if best and math.isfinite(t.criterion)
                else "-"
            )
            mark = "*" if t.minibatch == self.minibatch else ""
            rows.append(
                (
                    mark,
                    str(t.minibatch),
                    f"{t.criterion:.6g}",
                    more,
                    f"{t.lr_factor:.3f}",
                    str(t.steps),
                    f"{t.seconds:.1f}",
                )
            )
        return rows

    def __str__(self) -> str:
        """Return the table."""
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(
            [
                *lines,
                (
                    f"minibatch {self.minibatch}: the largest within {100 * self.margin:g} % of the"
                    " best"
                ),
            ]
        )
