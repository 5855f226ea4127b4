"""Periodic reports of an exchange's cost and quality: to TensorBoard, a logger, the console or a
function.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from gradcomp.exchange.quality import Quality
from gradcomp.exchange.stats import Stats

logger = logging.getLogger("gradcomp")
Write = Callable[[Mapping[str, float], int], object]


class Telemetry:
    """Periodic reports of one model's exchanges. Each covers the steps since the previous one.

    Args:
        target: a TensorBoard ``SummaryWriter``; a `logging.Logger`; a text stream such as
            `sys.stderr`, which on a terminal gets one line that is overwritten; an object with
            ``log(values, step=step)``, such as a Weights & Biases run; or a function of (values by
            name, step).
        stats: returns the current counters.
        quality: returns the latest samples; None without samples.
        every: steps between reports.
        prefix: prefix of the names.

    Raises:
        TypeError: `target` is of another kind.
        ValueError: `every` is below 1.
    """

    def __init__(
        self,
        target: Any,
        stats: Callable[[], Stats],
        quality: Callable[[], Quality] | None,
        every: int = 10,
        prefix: str = "gradcomp",
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a number of steps, at least 1, got {every!r}")
        self._write = _writer(target)
        self._stats, self._quality, self._every, self._prefix = stats, quality, every, prefix
        self._sampled = -1
        self._steps_since, self._failed = 0, False
        self._forget()

    def step(self, step: int) -> None:
        """Count a step; report if `every` steps have passed. If the target raises, log a warning
        and stop reporting.
        """
        self._steps_since += 1
        if self._steps_since >= self._every and not self._failed:
            named = {f"{self._prefix}/{name}": value for name, value in self.values().items()}
            try:
                self._write(named, step)
            except Exception:  # a failed report must not fail the step, which other ranks count
                logger.warning(
                    "gradcomp: the target of log_to failed, and gets no more reports", exc_info=True
                )
                self._failed = True
            self._steps_since = 0
            self._forget()

    def values(self) -> dict[str, float]:
        """Return the values that a report would contain now, by name without prefix."""
        now, before = self._stats(), self._before
        if now.steps < before.steps:  # the counters were reset
            before = Stats()
        steps = max(1, now.steps - before.steps)
        sent, baseline = (
            now.bytes_sent - before.bytes_sent,
            now.baseline_bytes - before.baseline_bytes,
        )
        out = {
            "bytes_sent_per_step": sent / steps,
            "bytes_received_per_step": (now.bytes_received - before.bytes_received) / steps,
            "compression_ratio": baseline / sent if sent else 1.0,
            "codec_seconds_per_step": (now.codec_seconds - before.codec_seconds) / steps,
            "exposed_seconds_per_step": (
                (now.seconds["exposed"] - before.seconds["exposed"]) / steps
            ),
            "hidden_seconds_per_step": (now.seconds["hidden"] - before.seconds["hidden"]) / steps,
            "nonfinite_buckets": float(now.nonfinite_buckets - before.nonfinite_buckets),
            "steps_per_second": steps / max(1e-9, time.perf_counter() - self._begun),
        }
        return out | self._sample()

    def _sample(self) -> dict[str, float]:
        """Return mean and worst values of the latest sample, or nothing if it was reported."""
        rows = list(self._quality().rows.values()) if self._quality is not None else []
        latest = max((row.step for row in rows), default=-1)
        if latest == self._sampled:
            return {}
        self._sampled = latest
        out = {}
        for name, worst in (("cosine", min), ("error", max), ("residual", max), ("clipped", max)):
            known = [value for row in rows if not math.isnan(value := getattr(row, name))]
            if known:
                out[f"quality/{name}_mean"] = sum(known) / len(known)
                out[f"quality/{name}_worst"] = worst(known)
        return out

    def _forget(self) -> None:
        self._before, self._begun = Stats.total([self._stats()]), time.perf_counter()


def _writer(target: Any) -> Write:
    """Return a function that writes a report to a target."""
    if hasattr(target, "add_scalar"):

        def to_writer(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                target.add_scalar(name, value, step)

        return to_writer
    if isinstance(target, logging.Logger):
        return lambda values, step: target.info("%s", line_of(values, step))
    if hasattr(target, "write"):
        return _to_stream(target)
    if callable(getattr(target, "log", None)):
        return lambda values, step: target.log(dict(values), step=step)
    if callable(target):
        return lambda values, step: target(dict(values), step)
    raise TypeError(
        "log_to takes a SummaryWriter, a logging.Logger, a text stream, an object with log(values,"
        f" step=...) or a function of (values, step), got {type(target).__name__}"
    )


def _to_stream(stream: Any) -> Write:
    over = bool(getattr(stream, "isatty", lambda: False)())

    def write(values: Mapping[str, float], step: int) -> None:
        stream.write(f"\r\x1b[K{line_of(values, step)}" if over else f"{line_of(values, step)}\n")
        stream.flush()

    return write


def line_of(values: Mapping[str, float], step: int) -> str:
    """Return a report as one line of text."""
    one = "/steps_per_second"
    prefix = next(name for name in values if name.endswith(one)).removesuffix(one)
    short = {name.removeprefix(f"{prefix}/"): value for name, value in values.items()}
    columns = [
        f"{prefix}: step {step}",
        f"{short['steps_per_second']:.3g} steps/s",
        f"{short['bytes_sent_per_step'] / 1e6:.3g} MB sent a step",
        f"{short['compression_ratio']:.1f}x fewer",
        f"exposed {1e3 * short['exposed_seconds_per_step']:.1f} ms",
        f"hidden {1e3 * short['hidden_seconds_per_step']:.1f} ms",
    ]
    if "quality/cosine_mean" in short:
        columns.append(
            f"cosine {short['quality/cosine_mean']:.2f} (worst {short['quality/cosine_worst']:.2f})"
        )
    if short["nonfinite_buckets"]:
        columns.append(f"{short['nonfinite_buckets']:.0f} buckets not finite")
    return ", ".join(columns)
