"""What a user can ask of running compression, whoever runs it: statistics, checkpoints,
roll-back, checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gradcomp.engine.step import Engine
from gradcomp.exchange.quality import Quality
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry

if TYPE_CHECKING:
    from typing_extensions import Self


class Controls:
    """Base of `gradcomp.ddp.CompressionState` and `gradcomp.GradientAverager`; a context manager,
    which closes.

    What is dropped without `close` gives its threads and buffers back, too.
    """

    _engine: Engine

    @property
    def stats(self) -> Stats:
        """Bytes and seconds so far."""
        return self._engine.stats

    def quality(self) -> Quality:
        """Return what codes have made of this rank's gradients at the latest sample: one every
        `Options.quality_every` steps.
        """
        return self._engine.layouts.probe.report()

    def log_to(self, target: Any, *, every: int = 10, prefix: str = "gradcomp") -> None:
        """Report bytes, ratio, exposed and hidden seconds, and quality where there is a new sample,
        every so many steps.

        Args:
            target: a TensorBoard ``SummaryWriter``, a `logging.Logger`, a text stream
                (`sys.stderr`: a progress line), an object with ``log(values, step=step)``, or a
                function of (values by name, step). On this rank alone.
            every: steps from one report to the next.
            prefix: of names: "gradcomp/bytes_sent_per_step".

        Raises:
            TypeError: a target of another kind.
            ValueError: `every` below 1.
        """
        self._engine.reports.append(
            Telemetry(target, lambda: self.stats, self.quality, every, prefix)
        )

    @property
    def step(self) -> int:
        """Number of the next step whose gradients are exchanged."""
        return self._engine.step

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume bit for bit: step, loss scale, residuals by
        parameter name.

        Save one file a rank; ``torch.load(..., weights_only=True)`` reads it. After a failure it is
        the state of before the step that failed.
        """
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Resume from a `state_dict` of the same rank, world size, codec and model; ValueError for
        any other.

        With another number of ranks, from a list of the states of all ranks of the old run: the new
        ranks get the mean of their residuals, and states of a transform are shared out anew.
        """
        self._engine.load_state_dict(state)

    def discard_step(self) -> None:
        """Roll residuals back to before the last step: call it when you throw its gradients
        away.
        """
        self._engine.discard_step()

    def reset(self) -> None:
        """Go on after a failure, from before the step that failed. Collective: every rank calls it.

        What caused the failure must be over. Gradients are NaN then, and averages that waited to be
        handed back are gone: the loop goes on with the next batch. Bytes move over a duplicate of
        the communicator, the one before is closed.

        Raises:
            PeerLost: a rank did not call this.
            PeerMismatch: "step"; the failure has left ranks at different steps: load a checkpoint
                on all of them.
        """
        self._engine.reset()

    def check_replicas(self) -> tuple[int, ...]:
        """Compare the parameters' bits over all ranks; PeerMismatch names the first tensor and rank
        that differ.

        Returns:
            the ranks that were asked, this one among them.
        """
        self._engine.check_replicas()
        return tuple(range(self._engine.comm.world_size))

    def follows(self, scale: Callable[[], float]) -> bool:
        """Whether residuals are kept in units of this loss scale, say ``scaler.get_scale``."""
        return self._engine.follows(scale)

    def describe(self) -> str:
        """Return one line: what is compressed, what is not, the exchange, the expected ratio."""
        return self._engine.describe()

    def close(self) -> None:
        """Stop the threads and close the communicator; an exchange under way ends. Closing twice
        is harmless.
        """
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
