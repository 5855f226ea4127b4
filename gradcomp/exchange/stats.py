"""Counters of bytes and seconds per phase. They are always on and cost a few additions a bucket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gradcomp.comm.torch_private import stage_range

WORK_PHASES = ("statistics", "encode", "owner", "decode")
COUNTERS = (
    "steps",
    "bytes_sent",
    "bytes_received",
    "baseline_bytes",
    "setup_bytes",
    "nonfinite_buckets",
    "dropped_residual",
)
OVERLAP = ("hidden", "exposed")
PHASES = ("statistics", "scale_round", "encode", "first_phase", "owner", "second_phase", "decode")


@dataclass
class Stats:
    """Cost of gradient exchange since the start (or the last `reset`).

    Attributes:
        steps: backward passes whose gradients were exchanged.
        bytes_sent, bytes_received: bytes to and from other ranks, with headers, scales and padding;
            without messages to itself.
        baseline_bytes: bytes an fp32 ring all_reduce would have sent: 2 (N - 1) / N * 4 * numel.
        setup_bytes: bytes of fingerprints (once per bucket layout, and in every step with state
            that must be equal on all ranks), not in `bytes_sent`.
        inside_nodes: (hierarchical) `Stats` of the fp32 exchange inside nodes, whose bytes are not
            in `bytes_sent`.
        nonfinite_buckets: buckets with NaN or Inf on some rank, or whose average overflowed.
        dropped_residual: sum of the magnitudes that a ``residual_decay`` between 0 and 1 has
            removed from this rank's residuals and from those that it has as an owner. In units of
            the encoded values (with ``precondition``, units of second moments). 0 without error
            feedback, which keeps no residuals.
        seconds: seconds per phase, summed over buckets. "statistics": measuring scales;
            "scale_round", "first_phase", "second_phase": waiting for ranks; "encode": encoding,
            cutting messages, checksums; "owner": checking received payloads, and in a
            reduce_scatter averaging and encoding the owned pieces; "decode": checking and decoding
            into the bucket. The time from the first to the last bucket is split into "exposed",
            while backward waited, and "hidden", while it did not.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    baseline_bytes: int = 0
    setup_bytes: int = 0
    nonfinite_buckets: int = 0
    dropped_residual: float = 0.0
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*PHASES, *OVERLAP), 0.0)
    )
    _inside_nodes: Stats | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def inside_nodes(self) -> Stats:
        """Cost of the fp32 exchange inside nodes."""
        with self._lock:
            if self._inside_nodes is None:
                self._inside_nodes = Stats()
            return self._inside_nodes

    @property
    def compression_ratio(self) -> float:
        """baseline_bytes / bytes_sent; 1.0 when nothing had to be sent."""
        return self.baseline_bytes / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def codec_seconds(self) -> float:
        """Seconds of the phases in which this rank computed and did not wait for other ranks."""
        return sum(self.seconds[phase] for phase in WORK_PHASES)

    def add_bytes(self, sent: int, received: int) -> None:
        """Add the bytes of a collective."""
        with self._lock:
            self.bytes_sent += sent
            self.bytes_received += received

    def add_seconds(self, phase: str, seconds: float) -> None:
        """Add seconds to one phase."""
        with self._lock:
            self.seconds[phase] += seconds

    def add_dropped(self, magnitude: float) -> None:
        """Add to `dropped_residual`."""
        with self._lock:
            self.dropped_residual += magnitude

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Context manager that adds its block's seconds to one phase and marks the block in a
        profile of its thread.
        """
        with stage_range(f"gradcomp::{phase}"):
            begun = time.perf_counter()
            try:
                yield
            finally:
                self.add_seconds(phase, time.perf_counter() - begun)

    @staticmethod
    def total(parts: Iterable[Stats]) -> Stats:
        """Return a new `Stats` with the sums of several."""
        out = Stats()
        for part in parts:
            for name in COUNTERS:
                setattr(out, name, getattr(out, name) + getattr(part, name))
            for phase, seconds in part.seconds.items():
                out.seconds[phase] += seconds
            if part._inside_nodes is not None:
                out._inside_nodes = Stats.total([out.inside_nodes, part.inside_nodes])
        return out

    def reset(self) -> None:
        """Set all counters to zero."""
        with self._lock:
            for name in COUNTERS:
                setattr(self, name, type(getattr(self, name))(0))
            self.seconds.update(dict.fromkeys(self.seconds, 0.0))
        if self._inside_nodes is not None:
            self._inside_nodes.reset()
