"""Methods that all entry points share: statistics, checkpoints, roll-back, checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradcomp.engine.step import Engine
from gradcomp.engine.watch import Mine, before_any_step
from gradcomp.exchange.quality import Quality
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry

if TYPE_CHECKING:
    from typing_extensions import Self


class Controls:
    """Base of `gradcomp.ddp.CompressionState` and `gradcomp.GradientAverager`; a context manager
    that closes on exit.

    Threads and buffers are also freed if the object is garbage-collected without `close`.
    """

    _engine: Engine

    def _watch_steps(self, parameters: Iterable[Tensor]) -> None:
        """Make an exchange final when an optimizer applies its averages to these parameters."""
        self._trained = Mine(parameters)  # the watcher has weak references
        before_any_step(self._trained, self._before_step)

    def _before_step(self, *_: Any) -> None:
        self._engine.keep_step()

    @property
    def stats(self) -> Stats:
        """Bytes sent and received, and seconds spent, so far."""
        return self._engine.stats

    def quality(self) -> Quality:
        """Return the latest sample of the error that codes make in this rank's gradients, taken
        every `Advanced.quality_every` steps.
        """
        return self._engine.layouts.probe.report()

    def log_to(self, target: Any, *, every: int = 10, prefix: str = "gradcomp") -> None:
        """Report statistics of this rank at regular intervals: bytes, ratio, exposed and hidden
        seconds, and quality if there is a new sample.

        Args:
            target: a TensorBoard ``SummaryWriter``, a `logging.Logger`, a text stream
                (`sys.stderr`: a progress line), an object with ``log(values, step=step)``, or a
                function of (values by name, step).
            every: number of steps between two reports.
            prefix: prefix of the reported names, as in "gradcomp/bytes_sent_per_step".

        Raises:
            TypeError: `target` is of another type.
            ValueError: `every` is below 1.
        """
        self._engine.reports.append(
            Telemetry(target, lambda: self.stats, self.quality, every, prefix)
        )

    @property
    def step(self) -> int:
        """Number of the next step whose gradients are exchanged."""
        return self._engine.step

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, to resume bit for bit: step, loss scale, residuals by name.

        Save one file per rank; ``torch.load(..., weights_only=True)`` reads it. After a failure,
        the state is the one before the failed step.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Resume from a `state_dict` of the same rank, world size, codec and model.

        To resume with another number of ranks, pass a list of the states of all ranks of the old
        run. The new ranks get the mean of the old residuals, and states of a transform are sharded
        again.

        Raises:
            ValueError: the state does not fit this rank, world size, codec or model.
        """
        self._engine.load_state_dict(state)

    def discard_step(self) -> None:
        """Roll back residuals to before the last exchange. Call this when you discard its averages.

        Does nothing if an optimizer has stepped since then.
        """
        self._engine.discard_step()

    def reset(self) -> None:
        """Resume after a failure, from the state before the failed step. Collective: every rank
        must call it.

        The cause of the failure must be fixed first. Gradients are NaN after a failure, and delayed
        averages that were not returned yet are lost, so continue with the next batch. The
        communicator is closed and replaced by a duplicate.

        Raises:
            PeerLost: a rank did not call this.
            PeerMismatch: "step"; ranks are at different steps after the failure. Load a checkpoint
                on all of them, then call this again.
        """
        self._engine.reset()

    def check_replicas(self) -> tuple[int, ...]:
        """Compare the bits of the parameters across all ranks. Collective.

        Returns:
            The ranks that were compared, this one included.

        Raises:
            PeerMismatch: ranks differ; it names the first tensor and rank that differ.
            PeerLost: a rank did not answer.
        """
        self._engine.check_replicas()
        return tuple(range(self._engine.comm.world_size))

    def follows(self, scale: Callable[[], float]) -> bool:
        """Return whether residuals are in units of this loss scale, e.g. ``scaler.get_scale``."""
        return self._engine.follows(scale)

    def describe(self) -> str:
        """Return one line of text: compressed tensors, exchange, expected compression ratio."""
        return self._engine.describe()

    def close(self) -> None:
        """Stop the threads and close the communicator; an exchange in progress is aborted. Closing
        twice has no effect.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
