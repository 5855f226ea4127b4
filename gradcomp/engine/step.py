"""The engine of the DDP hook and GradientAverager: averages buckets in a pipeline, step by step.

A step averages buckets, and then commits the residuals and other state that they have written. Only
the thread that waits for the step commits, after all buckets have succeeded.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from gradcomp.codecs import Codec, Identity, TernGrad, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Channel, Communicator, Lease
from gradcomp.comm.rounds import ring_bytes
from gradcomp.engine import state
from gradcomp.engine.buckets import Gradient, Source
from gradcomp.engine.guard import Guard
from gradcomp.engine.layouts import Layouts, Members
from gradcomp.engine.optimizers import name_of
from gradcomp.engine.options import Options
from gradcomp.engine.rate import LongerSteps, divides_by_squares, gains, shortening
from gradcomp.engine.replicas import Replicas
from gradcomp.engine.watch import Growth
from gradcomp.errors import GradcompError, PeerMismatch, peers_answer
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.bucket import Exchange
from gradcomp.exchange.pipeline import InlinePipeline, Pipeline, Task
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry
from gradcomp.kernels.staging import join, on_stream
from gradcomp.memory.saved import STEPS

logger = logging.getLogger("gradcomp")

_OUTCOME = struct.Struct("<Qd")  # step, loss scale


class Step:
    """A step opened by `Engine.begin`: `submit` each bucket, then `seal`, then `finish`.

    A step that is never finished commits nothing; the next `Engine.begin` waits for its buckets.
    The engine has no reference to it: the caller keeps it as long as it needs packed averages.

    Attributes:
        number: number of the training step, for random numbers and headers.
        buckets: (exchange, members) of every bucket, in the order of submission.
        started, ended: `time.perf_counter` in seconds when the first bucket was submitted, and when
            the latest bucket ended.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self.number = engine, engine.step
        self.buckets: list[tuple[Exchange, Members]] = []
        self.started = self.ended = 0.0
        self._numel, self._sealed = 0, False
        self._devices: set[torch.device] = set()

    def submit(
        self,
        buffer: Tensor,
        members: Members,
        done: Callable[[Exception | None], None] | None = None,
    ) -> None:
        """Average one bucket in place.

        Args:
            buffer: ``(numel,)`` float32, bfloat16 or float16, contiguous.
            members: (position of the tensor, first element in the buffer) pairs in buffer order.
            done: called when the buffer has the average, or NaN after a failure. Its argument is
                None, or an error if the device has failed. (On an accelerator, work that `done`
                queues on the current stream runs after the average.)

        Raises:
            GradcompError, ValueError: as in `Layouts.exchange`; the step fails then.
        """
        with self._engine.failing(Exception):
            self._submit(buffer, members, done)

    def _submit(
        self, buffer: Tensor, members: Members, done: Callable[[Exception | None], None] | None
    ) -> None:
        check_tensor(buffer, "the bucket")
        engine, bucket = self._engine, len(self.buckets)
        exchange, new = engine.layouts.exchange(buffer, members, self.number, bucket)
        shared, named = (
            engine.replicas.first_bucket(self.number, is_new=new is not None)
            if bucket == 0
            else ({}, ())
        )
        compared = (new or {}) | shared
        self.buckets.append((exchange, members))
        if bucket == 0:
            self.started = time.perf_counter()
        exchange.begin(buffer, self.number, bucket)
        slices = exchange.slices
        self._numel += buffer.numel()
        self._devices.add(buffer.device)

        def first() -> None:
            if compared and engine.comm.world_size > 1:
                engine.replicas.agree(compared, named, bucket)
            slices[0][0]()

        def end(error: BaseException | None) -> None:
            self.ended = time.perf_counter()
            try:
                with on_stream(buffer.device):
                    if error is not None:
                        buffer.fill_(float("nan"))
                    if done is not None:
                        done(None)
            except Exception as failure:  # noqa: BLE001 - DDP waits for `done`, and raises it
                if done is not None:
                    done(failure)
                if engine.error is None:
                    engine.fail(failure)

        tasks = [Task(steps) for steps in slices]
        tasks[0].stages = (first, *slices[0][1:])
        tasks[-1].done = end
        engine.pipeline.submit(*tasks)

    def seal(self) -> None:
        """Mark the step as complete: every bucket has been submitted.

        With `Options.is_atomic`, the round in which ranks agree on the outcome is queued.
        """
        engine = self._engine
        if (
            self._sealed
            or not self.buckets
            or not engine.options.is_atomic
            or engine.comm.world_size == 1
        ):
            return
        self._sealed = True
        idle = [lambda: None] * (engine.layouts.route.stage_count - 1)
        engine.pipeline.submit(Task((*idle, self._agree_on_outcome)))

    def finish(self) -> None:
        """Wait for every bucket, commit their residuals and states, and count the step.

        Raises:
            GradcompError: a bucket failed; every later step raises this error too.
        """
        engine, begun = self._engine, time.perf_counter()
        self.seal()
        try:
            engine.wait()
        finally:
            for device in self._devices:
                join(device)
        exchanges = [exchange for exchange, _ in self.buckets]
        stats = engine.stats
        if exchanges:
            stats.add_seconds("hidden", max(0.0, min(begun, self.ended) - self.started))
            stats.add_seconds("exposed", max(0.0, self.ended - begun))
            engine.layouts.forget_all_but(exchanges)
        engine.look_at(self.number)
        if not engine.options.is_atomic or not any(e.flagged for e in exchanges):
            for exchange in exchanges:
                if not exchange.flagged:
                    exchange.commit()
        stats.baseline_bytes += ring_bytes(self._numel, engine.comm.world_size)
        engine.is_open = False
        engine.comm.release()
        engine.step += 1
        if engine._longer is not None:
            engine._longer.steps = engine.step
        stats.steps += 1
        for report in engine.reports:
            report.step(engine.step)

    def packed(self) -> list[tuple[Averages, Members]]:
        """Return the averages that are still packed, with the members of their buckets."""
        return [
            (exchange.averages, members)
            for exchange, members in self.buckets
            if exchange.averages is not None
        ]

    def unpack(self) -> None:
        """Decode averages that are still packed into their buckets."""
        for exchange, _ in self.buckets:
            exchange.unpack()

    def _agree_on_outcome(self) -> None:
        """Wait until every rank has averaged every bucket of this step. Collective.

        A rank whose step failed does not make this call, so no rank returns from it. It runs in the
        last stage of the pipeline, after the buckets, when no other collective is in progress on
        the channel of second phases.

        Raises:
            PeerMismatch: "step" or "loss_scale" differ.
            PeerLost: "outcome"; a rank did not finish the step.
        """
        engine = self._engine
        outcome = _OUTCOME.pack(self.number, engine.store.loss_scale)
        with peers_answer("outcome"):  # nothing else is ever gathered on this channel
            gathered = engine.comm.all_gather_bytes(outcome, engine.timeout_s, Channel.SECOND)
        outcomes = [_OUTCOME.unpack(data) for data in gathered]
        for number, field in enumerate(("step", "loss_scale")):
            for rank, values in enumerate(outcomes):
                if values[number] != outcomes[0][number]:
                    raise PeerMismatch(field, rank, outcomes[0][number], values[number])
        nbytes = (engine.comm.world_size - 1) * _OUTCOME.size
        engine.stats.add_bytes(nbytes, nbytes)


class Engine:
    """Averages one set of named tensors.

    A step commits residuals and states of transforms after all its buckets have succeeded on this
    rank; a failed step leaves them unchanged. By default, a rank may fail in the last bucket after
    its peers have finished theirs. The peers are then one step ahead, and detect this at their next
    step; states saved on both sides do not fit together, and loading them is refused. With
    `Options.is_atomic`, a round of a few bytes after the last bucket makes a step count on all
    ranks or on none. Only a rank that loses its connection during that round may differ.

    Args:
        sources: the tensors, in the same order on every rank.
        codec: codec or name of a codec.
        comm: communicator, closed with the engine.
        options: see `Options`.
        chosen: text for `describe` on how codec and options were chosen.
        guarded: whether a `Guard` may switch the run to another codec.
        faster: (guarded) a faster codec to try.

    Attributes:
        named: (name, tensor) of every source; the tensors are the same on every rank.
        orders: see `Layouts`.
        timeout_s: longest wait for a peer, in seconds.
        step: number of the next step, or of the step that is open.
        is_open: whether a step has begun and is not finished.
        reports: called after every step.
        origin: settings of the entry point in its state dicts, its kind first.
        replicas: compares the state that must be equal on every rank.
    """

    pipeline: Pipeline
    is_open: bool

    def __init__(
        self,
        sources: Sequence[Source],
        codec: Codec | str,
        comm: Communicator,
        options: Options,
        chosen: str = "",
        *,
        guarded: bool = False,
        faster: Codec | None = None,
    ) -> None:
        if not sources:
            raise ValueError("there are no parameters to average")
        if not any(source.trained for source in sources):
            raise ValueError(
                f"none of the {len(sources)} parameters ({sources[0].name!r} ...) is trained"
                " (requires_grad is False): there are no gradients to average; unfreeze before"
                " this call"
            )
        comm.check_overlap()
        self.sources, self.options, self._chosen = list(sources), options, chosen
        self.comm = self._lease(comm)
        self.named = [(source.name, source.like) for source in sources]
        self.timeout_s = comm.timeout_s if options.timeout_s is None else options.timeout_s
        self.stats = Stats()
        self.layouts = Layouts(
            sources, resolve(codec), self.comm, options, self.timeout_s, self.stats
        )
        self.codec, self.store = self.layouts.codec, self.layouts.store
        self.guard = (
            Guard(self.codec, options.warmup_steps, self.layouts.probe, faster)
            if guarded and comm.world_size > 1
            else None
        )
        self.replicas = Replicas(self.sources, self.layouts, self.timeout_s, self.stats, self.guard)
        self.orders = self.layouts.orders
        noisy = self._noisy_weights()
        self._growth = Growth((lambda: noisy) if noisy else None)
        self.step = 0
        self._longer: LongerSteps | None = None
        self.reports: list[Telemetry] = []
        self.origin: dict[str, object] = {"kind": "gradients"}
        self._start()

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self) -> Step:
        """Open a step, apply the current loss scale to the residuals, and make the previous step
        final (`keep_step`). Only one step is open at a time.

        Raises:
            GradcompError: an earlier step failed, the loss scale is not a positive finite number,
                or the step number is too large.
        """
        self.pipeline.check()
        if self.is_open:  # an exception in user code has abandoned the previous step
            self.wait()
        if self.step >= STEPS:
            raise GradcompError(
                f"step {self.step}: random numbers and headers count steps below 2^32"
            )
        self.comm.claim()
        self.is_open = True
        self._growth.look(self.step)
        self.store.begin_step()
        if self.comm.world_size == 1:
            self.store.free_unused()
        if self.guard is not None:
            self.layouts.fallback = self.guard.fallback(self.step)
        scale = self.options.loss_scale()
        if scale is not None and scale != self.store.loss_scale:
            self.store.change_loss_scale(scale)
        return Step(self)

    def look_at(self, step: int) -> None:
        """Let the guard, if there is one, check a finished step; no exchange may be in progress."""
        if self.guard is None:
            return
        with self.failing():
            reason = self.guard.look(step, self.comm, self.timeout_s)
        if reason is None:
            return
        self._correct_rate()
        if self.comm.rank == 0:
            codec = self.guard.codec
            first = next(n for n in count(step + 1) if self.guard.fallback(n) is codec)
            sent = codec.dtype if isinstance(codec, Identity) else repr(codec)
            logger.warning("from step %d on gradients are sent as %s: %s", first, sent, reason)

    def scale_lr_of(self, optimizers: Sequence[Any]) -> None:
        """Correct learning rates if options say so (`gradcomp.engine.rate`).

        Raises:
            ValueError: ``scale_lr=True``, and noise shortens the steps of no optimizer.
        """
        scales = self.options.advanced.scale_lr
        shortens = [one for one in optimizers if divides_by_squares(one)]
        if scales and not shortens:
            raise ValueError(
                "scale_lr=True needs optimizer=, one that divides by the root of squares (Adam,"
                f" AdamW, RMSprop, SplitAdamW), got {name_of(optimizers) or None}"
            )
        wanted = gains(self.codec) if scales is None else scales
        if self._longer is not None:  # made for an earlier communicator
            self._longer.close()
            self._longer, self.layouts.lr_factor = None, 1.0
        if not (shortens and wanted and self.options.precondition and self.layouts.compresses):
            return
        factor = self.layouts.lr_factor = shortening(self.codec, self.layouts.strategy)
        if factor != 1.0:
            self._longer = LongerSteps(shortens, factor, self.options.warmup_steps)

    # ---- failures --------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """The first error, or the error of a closed engine; None while the engine works."""
        return self.pipeline.error

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.pipeline.closed

    def fail(self, error: BaseException) -> None:
        """Fail this step and all later steps with an error; only the first error is kept."""
        self.pipeline.fail(error)

    @contextlib.contextmanager
    def failing(self, kind: type[BaseException] = GradcompError) -> Iterator[None]:
        """Context manager that calls `fail`, which notifies the other ranks, for an error of a kind
        in its block.
        """
        try:
            yield
        except kind as error:
            self.fail(error)
            raise

    def wait(self) -> None:
        """Wait for every bucket that was submitted; raise `error`, if there is one."""
        self.pipeline.wait()

    def drain(self) -> None:
        """Wait until no exchange writes to the state, also after a failure."""
        if self.error is None:
            self.wait()
        else:
            self.pipeline.rest()

    def keep_step(self) -> None:
        """Make the last step final: `discard_step` can no longer roll it back. Does nothing while a
        step is open.
        """
        if not self.is_open:
            self.store.begin_step()

    def discard_step(self) -> None:
        """Roll back residuals and states to before the last step."""
        self.store.discard()

    def reset(self) -> None:
        """See `Controls.reset`. Every rank must call it, even if its own step succeeded."""
        self._leave(self.comm.duplicate(self.timeout_s))
        self.layouts.take(self.comm)
        self._start()
        with self.failing(BaseException):
            self.replicas.agree_on({"step": self.step})

    def move(self, comm: Communicator) -> None:
        """Resume with a communicator of other ranks, from the state before a failed step. Each rank
        keeps its residuals (`Layouts.move`); the old communicator is closed.

        New ranks need the second moments and the step of the others (`take_shared`).
        """
        self._leave(comm)
        self.layouts.move(self.comm)
        self._start()

    def _leave(self, comm: Communicator) -> None:
        """Stop the pipeline, and replace the communicator."""
        self.pipeline.close()
        self.layouts.route.close()
        before, self.comm = self.comm, self._lease(comm)
        before.close()
        self.store.begin_step()

    def _noisy_weights(self) -> list[Tensor]:
        """Return the weights to check for growth: compressed ones, on rank 0, with `TernGrad`."""
        packed = {p.index for p in self.layouts.parameters if p.compressed} & self.layouts.trained
        watched = (
            self.comm.rank == 0 and self.comm.world_size > 1 and isinstance(self.codec, TernGrad)
        )
        return [
            s.like
            for i, s in enumerate(self.sources)
            if watched and i in packed and isinstance(s, Gradient)
        ]

    def follows(self, scale: Callable[[], float]) -> bool:
        """Return whether residuals are in units of this loss scale."""
        scaler = self.options.grad_scaler
        return scaler is not None and scaler.get_scale == scale

    # ---- checkpoints, checks ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """See `Controls.state_dict`; the state has tensors, numbers and strings only."""
        self.drain()
        guard = {} if self.guard is None else {"guard": self.guard.state()}
        return state.write(self.layouts, self.origin, self.step, **guard)

    def load_state_dict(self, given: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """See `Controls.load_state_dict`; after an error nothing is changed."""
        self.take(self.accept(given))

    def accept(self, given: dict[str, Any] | Sequence[dict[str, Any]]) -> state.Accepted:
        """Check a saved state (ValueError if it does not fit), and return it as `take` needs it."""
        return state.accept(self.layouts, self.origin, given)

    def take(self, accepted: state.Accepted) -> None:
        """Wait for exchanges in progress, then resume from a state that `accept` has returned.
        After a failure, steps raise its error until `reset`.
        """
        self.drain()
        self.store.load(accepted.parts, self.layouts.names, accepted.loss_scale)
        self.step = accepted.step
        if self.guard is not None:
            self.guard.load(accepted.guard, self.step)
            self._correct_rate()
        self.replicas.is_due = True
        if self.options.grad_scaler is None and accepted.loss_scale != 1.0:
            self.store.change_loss_scale(1.0)  # saved under a loss scaler, resumed without one

    def shared_state(self) -> dict[str, Tensor]:
        """Return copies of the second moments, which are equal on every rank, by parameter name;
        empty without `precondition`.
        """
        moments = self.store.moments
        return {} if moments is None else moments.planes.state(self.layouts.names)

    def take_shared(self, moments: Mapping[str, Tensor], *, keeps_residuals: bool) -> None:
        """Load another rank's `shared_state`; reset residuals to 0 unless `keeps_residuals`.

        Raises:
            ValueError: the state does not fit this engine.
        """
        store, names = self.store, self.layouts.names
        if store.moments is not None:
            store.moments.planes.check(moments, names)
            store.moments.planes.load(moments, names)
        elif moments:
            raise ValueError("the other ranks have precondition=True, this one has not")
        if store.residuals is not None and not keeps_residuals:
            store.residuals.replace({})

    def check_replicas(self) -> None:
        """Wait for exchanges in progress, then compare tensors as `Replicas.check` does."""
        self.wait()
        self.replicas.check()

    def compare_sources(self, called: str) -> None:
        """Compare tensors as `Replicas.compare_sources` does; later calls raise the same error."""
        with self.failing():
            self.replicas.compare_sources(called)

    def describe(self) -> str:
        """Return one line of text: exchange, choice of the codec, correction of learning rates."""
        parts = [self.layouts.describe(), self._chosen]
        if self.guard is not None and self.guard.level:
            parts.append(f"now {self.guard.codec!r}")
        parts.append("" if self._longer is None else self._longer.describe())
        return "; ".join(filter(None, parts))

    def close(self, *, keep_comm: bool = False) -> None:
        """Stop the threads, and close the communicator, or only release it if `keep_comm`. Closing
        twice has no effect.
        """
        if (
            self.stats.steps
            and not self.layouts.compressed
            and self.comm.world_size > 1
            and self.comm.rank == 0
        ):
            logger.warning(
                "nothing was compressed: %s exchanges, and all of them belong to the warm-up"
                " (warmup_steps=%s)",
                self.stats.steps,
                self.options.warmup_steps,
            )
        if self._longer is not None:
            self._longer.close()
        if self.error is not None or self.is_open:
            self.layouts.route.abort()  # collectives may be in progress that no peer will join
        self.pipeline.close()
        self.layouts.route.close()
        if keep_comm:
            self.comm.release()
        else:
            self.comm.close()

    # ---- parts -----------------------------------------------------------------------------------

    def _correct_rate(self) -> None:
        """Correct the learning rate for the codec that the guard has decided for."""
        if self._longer is not None and self.guard is not None:
            codec = self.guard.codec
            self._longer.coded = shortening(codec, self.layouts.strategy_of(codec))

    def _lease(self, comm: Communicator) -> Lease:
        return comm.lease(
            f"the averaging of {len(self.sources)} parameters ({self.sources[0].name!r} ...)"
        )

    def _start(self) -> None:
        """Make a pipeline for the current route, with no step open."""
        route = self.layouts.route
        self.is_open = False
        self.pipeline = (
            Pipeline(route.stage_count, on_failure=route.abort)
            if self.comm.world_size > 1
            else InlinePipeline()
        )
