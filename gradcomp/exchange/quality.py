"""Quality of compression during training: error, cosine and residual of every parameter, sampled
every so many steps.

A rank measures its own gradients only; nothing is sent. A sample compares three tensors of the
exchange: the gradient, the encoded values (gradient + residual, in units of second moments with
`precondition`), and the decoded values.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradcomp.exchange.sizing import BucketPlan
from gradcomp.exchange.stages import Job
from gradcomp.kernels import Kernels, Payloads
from gradcomp.payload.form import HEADER_NBYTES
from gradcomp.payload.pieces import whole_pieces

GROWING = 4  # growing residuals in so many consecutive samples count as divergence
GROWTH = 1.2  # least growth factor from one sample to the next
LARGE = 10.0  # least residual / gradient that counts as divergence


@dataclass(frozen=True)
class Sample:
    """One parameter at one step, on this rank.

    Attributes:
        name: name of the parameter.
        step: step of the sample.
        numel: number of elements.
        error: norm of (encoded values - decoded values) / norm of the encoded values.
        cosine: cosine of the decoded and the exact gradient; NaN if one of them is zero.
        residual: norm of the new residual / norm of the gradient; 0 without error feedback, NaN if
            the gradient is zero.
        clipped: fraction of values beyond the outermost level of their scale group; NaN for codecs
            without one.
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
        rows: samples by parameter name, in the order of ``named_parameters()``.
    """

    def __init__(self, rows: Mapping[str, Sample]) -> None:
        self.rows = dict(rows)

    def worst(self, count: int = 10) -> list[Sample]:
        """Return the samples with the lowest cosine, at most `count`, lowest first."""
        known = [row for row in self.rows.values() if not math.isnan(row.cosine)]
        return sorted(known, key=lambda row: (row.cosine, row.name))[:count]

    def __str__(self) -> str:
        """Return the ten worst samples as a table; "-" stands for NaN, such as `clipped` of a 1-bit
        codec.
        """
        rows = self.worst()
        if not rows:
            return "no sample yet: one is taken every `quality_every` steps"
        wide = max(len("parameter"), *(len(row.name) for row in rows))
        lines = [
            (
                f"{'parameter':{wide}}  {'step':>6}  {'cosine':>7}  {'error':>7}  {'residual':>8} "
                f" {'clipped':>7}"
            )
        ]
        for row in rows:
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
        """Plot cosine, error and residual of the ten worst samples.

        Args:
            file: path of the image; its suffix chooses PNG, SVG or PDF.

        Raises:
            ImportError: matplotlib is not installed (``pip install gradcomp[bench]``).
        """
        from matplotlib.figure import Figure

        rows = self.worst()[::-1]
        figure = Figure(figsize=(10, 1.5 + 0.3 * len(rows)), layout="constrained")
        titles = (
            ("cosine", "cosine of decoded and exact"),
            ("error", "error / encoded"),
            ("residual", "residual / gradient"),
        )
        for number, (name, title) in enumerate(titles):
            axes = figure.add_subplot(1, 3, number + 1)
            axes.barh(
                [row.name for row in rows], [getattr(row, name) for row in rows], color="#0072b2"
            )
            axes.set_title(title, fontsize=10)
            axes.grid(axis="x", alpha=0.3)
            axes.tick_params(labelleft=number == 0, labelsize=8)
        figure.savefig(str(file), dpi=150)


class Probe:
    """Samples the quality of one model's exchanges. Threads of the pipeline may use it.

    Args:
        every: sample the steps that are multiples of this number; 0: none.
        names: parameter names by position; positions with the same name are one parameter.
    """

    def __init__(self, every: int, names: Mapping[int, str]) -> None:
        self._every, self._names = every, names
        self._rows: dict[str, Sample] = {}
        self._growing: dict[str, int] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def due(self, step: int) -> bool:
        """Whether to sample this step."""
        return self._every > 0 and step % self._every == 0

    def take(
        self, kernels: Kernels, plan: BucketPlan, payload: Tensor, job: Job, residual: Tensor | None
    ) -> None:
        """Measure one bucket that this rank has encoded.

        Args:
            kernels: kernel set of the bucket's device.
            plan, payload: plan and bytes of the bucket's payload.
            job: the bucket; its values are without residuals that the codec itself has added.
            residual: float32 residual plane after this step; None without error feedback.
        """
        codec, layout, gradient, units = plan.codec, plan.local, job.target, job.units
        decoded, reach = kernels.empty(gradient.numel()).zero_(), codec.reach
        scales = (
            payload[HEADER_NBYTES : HEADER_NBYTES + 4 * layout.scale_count]
            .clone()
            .view(torch.float32)
        )
        kernels.sum_decode(Payloads([payload], codec.code, torch.float32), layout.packed, decoded)
        sizes, first = torch.from_numpy(layout.group_numels.astype(np.int64)), 0
        sums: dict[str, Sums] = {}
        for piece in whole_pieces(plan.slots):
            if not (piece.slot.compressed and piece.numel):
                continue
            span, groups = (
                slice(piece.data, piece.data + piece.numel),
                slice(first, first + piece.group_count),
            )
            first = groups.stop
            left = (
                residual[piece.residual : piece.residual + piece.numel]
                if residual is not None
                else None
            )
            unit = units[span] if units is not None else None
            x = job.values[span].float()
            if left is not None and unit is None:  # the codec has added residuals: reconstruct x
                x = decoded[span] + left / codec.decay
            totals = sums.setdefault(self._names[piece.slot.index], Sums())
            totals.add(gradient[span].float(), x, decoded[span], unit, left)
            if reach is not None:  # such codecs have one scale a group, and do not cut pieces
                limits = (scales[groups] * reach).repeat_interleave(sizes[groups])
                totals.clipped += int(torch.count_nonzero(x.abs() > limits.to(x.device)))
        for name, totals in sums.items():
            row = totals.measured(
                name, job.step, keeps=residual is not None, clips=reach is not None
            )
            self._enter(row)

    def report(self) -> Quality:
        """Return the latest sample of every parameter."""
        with self._lock:
            return Quality({n: self._rows[n] for n in self._names.values() if n in self._rows})

    def error(self) -> float:
        """Return the root mean square of all parameters' latest errors, weighted by elements. Inf
        once residuals grow without bound, NaN without a sample.
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
        """Drop all samples, when another codec is used from now on."""
        with self._lock:
            self._rows, self._growing, self._warned = {}, {}, set()

    def _enter(self, row: Sample) -> None:
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
    """Sums over the elements of one parameter in a sample, in float64: the sixth digit of float32
    sums depends on memory alignment.

    Attributes:
        gradient, encoded, error, decoded, residual: sums of squares.
        product: dot product of the decoded and the exact gradient.
        clipped, numel: numbers of elements.
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
        """Add elements to the sums.

        Args:
            g: ``(n,)`` float32 gradient.
            x: ``(n,)`` float32 encoded values.
            q: ``(n,)`` float32 decoded values.
            unit: ``(n,)`` float32; the decoded gradient is ``q * unit``. None: 1.
            left: ``(n,)`` float32 residuals after this step, or None.
        """
        decoded = q if unit is None else q * unit
        self.gradient += _square(g)
        self.encoded += _square(x)
        self.error += _square(x - q)
        self.decoded += _square(decoded)
        self.residual += 0.0 if left is None else _square(left)
        self.product += float(torch.dot(decoded.double(), g.double()))
        self.numel += g.numel()

    def measured(self, name: str, step: int, *, keeps: bool, clips: bool) -> Sample:
        """Return the sample of a parameter, of a codec that has residuals (`keeps`) and an
        outermost level (`clips`).
        """
        sizes = math.sqrt(self.gradient) * math.sqrt(self.decoded)
        unknown = math.nan if keeps else 0.0
        return Sample(
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
