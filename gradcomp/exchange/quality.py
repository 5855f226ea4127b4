"""What codes make of gradients, measured while training: errors, directions, residuals, by
parameter, every so many steps.

A rank looks at its own gradients alone; nothing is sent and nothing waits. What is measured is what
the exchange has: the gradient, what was encoded (gradient + residual, in units of moments where it
is preconditioned), what its codes decode to.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.kernels import Kernels, Payloads
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

GROWING = 4  # samples in a row in which residuals have grown, before that is called a divergence
GROWTH = 1.2  # from one of them to the next
LARGE = 10.0  # residual over gradient; below this nothing is called a divergence


@dataclass(frozen=True)
class Measured:
    """One parameter at one step, on this rank.

    Attributes:
        name: of the parameter.
        step: of the sample.
        numel: elements.
        error: norm of what the codes leave out / norm of what is encoded.
        cosine: between the decoded and the exact gradient; NaN where one of them is zero.
        residual: norm of the new residual / norm of the gradient; 0 without error feedback, NaN for
            a gradient of zero.
        clipped: share of values beyond the outermost level of their group; NaN for codecs that have
            none.
    """

    name: str
    step: int
    numel: int
    error: float
    cosine: float
    residual: float
    clipped: float


class Quality:
    """The latest sample of every compressed parameter.

    Attributes:
        rows: by name, in the order of ``named_parameters()``.
    """

    def __init__(self, rows: Mapping[str, Measured]) -> None:
        self.rows = dict(rows)

    def worst(self, count: int = 10) -> list[Measured]:
        """Return the parameters whose decoded gradient points elsewhere most, worst first."""
        known = [row for row in self.rows.values() if not math.isnan(row.cosine)]
        return sorted(known, key=lambda row: (row.cosine, row.name))[:count]

    def __str__(self) -> str:
        """Return the ten worst as a table; "-" is a number that there is not, as `clipped` of 1
        bit.
        """
        found = self.worst()
        if not found:
            return "no sample yet: one is taken every `quality_every` steps"
        wide = max(len("parameter"), *(len(row.name) for row in found))
        lines = [
            (
                f"{'parameter':{wide}}  {'step':>6}  {'cosine':>7}  {'error':>7}  {'residual':>8} "
                f" {'clipped':>7}"
            )
        ]
        for row in found:
            columns = (
                (row.cosine, "7.3f"),
                (row.error, "7.3f"),
                (row.residual, "8.2f"),
                (row.clipped, "7.2%"),
            )
            numbers = [
                f"{'-':>{form[0]}}" if math.isnan(value) else f"{value:{form}}"
                for value, form in columns
            ]
            lines.append(f"{row.name:{wide}}  {row.step:6}  {'  '.join(numbers)}")
        return "\n".join(lines)

    def plot(self, file: str | Path) -> None:
        """Draw the ten worst: cosine, error and residual (PNG, SVG or PDF, by the name).

        Raises:
            ImportError: matplotlib is not installed (``pip install gradcomp[bench]``).
        """
        from matplotlib.figure import Figure

        found = self.worst()[::-1]
        figure = Figure(figsize=(10, 1.5 + 0.3 * len(found)), layout="constrained")
        titles = (
            ("cosine", "cosine of decoded and exact"),
            ("error", "error / encoded"),
            ("residual", "residual / gradient"),
        )
        for number, (name, title) in enumerate(titles):
            axes = figure.add_subplot(1, 3, number + 1)
            axes.barh(
                [row.name for row in found], [getattr(row, name) for row in found], color="#0072b2"
            )
            axes.set_title(title, fontsize=10)
            axes.grid(axis="x", alpha=0.3)
            axes.tick_params(labelleft=number == 0, labelsize=8)
        figure.savefig(str(file), dpi=150)


class Probe:
    """Takes the samples of one model.

    Args:
        every: a sample at each step that is a multiple of it; 0: none.
        names: of the parameters, by position; all positions of one name are one parameter.
    """

    def __init__(self, every: int, names: Mapping[int, str]) -> None:
        self._every, self._names = every, names
        self._rows: dict[str, Measured] = {}
        self._growing: dict[str, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def due(self, step: int) -> bool:
        """Whether this step is to be sampled."""
        return self._every > 0 and step % self._every == 0

    def take(
        self,
        kernels: Kernels,
        codec: Codec,
        slots: Sequence[Slot],
        layout: PayloadLayout,
        payload: Tensor,
        step: int,
        *,
        encoded: Tensor,
        gradient: Tensor,
        units: Tensor | None,
        residual: Tensor | None,
    ) -> None:
        """Measure one bucket that this rank has encoded.

        Args:
            slots: the parameters of the bucket.
            layout, payload: of the whole bucket.
            encoded: ``(n,)``, what was encoded but for residuals that the codec has added itself.
            gradient: ``(n,)``.
            units: ``(n,)``, by which decoded values are multiplied; None: 1.
            residual: the plane after this step.
        """
        decoded, reach = kernels.empty(gradient.numel()).zero_(), codec.reach
        scales = (
            payload[HEADER_NBYTES : HEADER_NBYTES + 4 * layout.scale_count]
            .clone()
            .view(torch.float32)
        )
        kernels.sum_decode(Payloads([payload], codec.code, torch.float32), layout.packed, decoded)
        sizes, first = torch.from_numpy(layout.group_numels.astype(np.int64)), 0
        sums: dict[str, Sums] = {}
        for piece in whole_pieces(slots):
            if not (piece.slot.compressed and piece.numel):
                continue
            at, groups = (
                slice(piece.data, piece.data + piece.numel),
                slice(first, first + piece.group_count),
            )
            first = groups.stop
            left = (
                residual[piece.residual : piece.residual + piece.numel]
                if residual is not None
                else None
            )
            unit = units[at] if units is not None else None
            x = encoded[at].float()
            if left is not None and unit is None:  # the codec itself has added residuals
                x = decoded[at] + left / codec.decay
            one = sums.setdefault(self._names[piece.slot.index], Sums())
            one.add(gradient[at].float(), x, decoded[at], unit, left)
            if reach is not None:  # such codecs have one scale a group, and do not cut pieces
                limits = (scales[groups] * reach).repeat_interleave(sizes[groups])
                one.clipped += int(torch.count_nonzero(x.abs() > limits.to(x.device)))
        for name, one in sums.items():
            row = one.measured(name, step, keeps=residual is not None, clips=reach is not None)
            self._enter(row)

    def report(self) -> Quality:
        """Return the latest samples."""
        with self._lock:
            return Quality({n: self._rows[n] for n in self._names.values() if n in self._rows})

    def error(self) -> float:
        """Return the error of the latest samples over all parameters (root mean square, by
        elements): Inf once residuals grow without bound, NaN without a sample.
        """
        with self._lock:
            rows, warned = list(self._rows.values()), bool(self._warned)
        if warned:
            return math.inf
        numel = sum(row.numel for row in rows)
        return (
            math.sqrt(sum(row.numel * row.error**2 for row in rows) / numel) if numel else math.nan
        )

    def forget(self) -> None:
        """Drop all samples: they are of a codec that is no longer used."""
        with self._lock:
            self._rows, self._growing, self._warned = {}, {}, set()

    def _enter(self, row: Measured) -> None:
        name = row.name
        with self._lock:
            before = self._rows.get(name)
            self._rows[name] = row
            grows = before is not None and row.residual > GROWTH * before.residual
            self._growing[name] = self._growing.get(name, 0) + 1 if grows else 0
            if self._growing[name] < GROWING or row.residual < LARGE or name in self._warned:
                return
            self._warned.add(name)
        logging.getLogger("gradcomp").warning(
            "residuals of parameter %r grow without bound: %.1f times its gradient at step %d, more"
            " in each of the last %d samples. Its codes cannot carry its gradients: a smaller"
            " group=, more bits, or exclude=%r",
            row.name,
            row.residual,
            row.step,
            GROWING,
            row.name,
        )


@dataclass
class Sums:
    """What a sample adds up of one parameter, in float64: float32 sums differ in their sixth digit
    with the alignment of the memory.

    Attributes:
        gradient, encoded, error, decoded, residual: squares.
        product: of the decoded and the exact gradient.
        clipped, numel: elements.
    """

    gradient: float = 0.0
    encoded: float = 0.0
    error: float = 0.0
    decoded: float = 0.0
    residual: float = 0.0
    product: float = 0.0
    clipped: int = 0
    numel: int = 0

    def add(
        self, g: Tensor, x: Tensor, q: Tensor, unit: Tensor | None, left: Tensor | None
    ) -> None:
        """Add some elements.

        Args:
            g, x: ``(n,)`` of the gradient and of what was encoded.
            q: ``(n,)``, decoded x; times `unit`, where there is one, the decoded gradient.
            left: ``(n,)``, residuals of the next step.
        """
        decoded = q if unit is None else q * unit
        self.gradient += _square(g)
        self.encoded += _square(x)
        self.error += _square(x - q)
        self.decoded += _square(decoded)
        self.residual += 0.0 if left is None else _square(left)
        self.product += float(torch.dot(decoded.double(), g.double()))
        self.numel += g.numel()

    def measured(self, name: str, step: int, *, keeps: bool, clips: bool) -> Measured:
        """Return the row of a parameter.

        Args:
            name, step: see `Measured`.
            keeps, clips: whether its codec has residuals, and an outermost level.
        """
        sizes = math.sqrt(self.gradient) * math.sqrt(self.decoded)
        unknown = math.nan if keeps else 0.0
        return Measured(
            name,
            step,
            self.numel,
            error=math.sqrt(self.error / self.encoded) if self.encoded else 0.0,
            cosine=self.product / sizes if sizes else math.nan,
            residual=math.sqrt(self.residual / self.gradient) if self.gradient else unknown,
            clipped=self.clipped / self.numel if clips else math.nan,
        )


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
