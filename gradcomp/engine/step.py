"""What a DDP hook and a GradientAverager share: buckets go through a pipeline, a step of them at a
time.

An engine opens a step, which averages buckets and commits what they left in memory: in one place,
on the thread that waits for the step, and only when every bucket of it ended well.
"""

from __future__ import annotations

import logging
import math
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.codecs import Codec, TernGrad, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Channel, Communicator, Lease
from gradcomp.comm.rounds import ring_bytes
from gradcomp.engine import state
from gradcomp.engine.buckets import Gradient, Source
from gradcomp.engine.guard import Guard
from gradcomp.engine.layouts import Layouts, Members
from gradcomp.engine.options import Options
from gradcomp.engine.rate import LongerSteps, divides_by_squares, gains, shortening, unwrapped
from gradcomp.engine.replicas import Replicas
from gradcomp.engine.watch import Growth
from gradcomp.errors import GradcompError, PeerMismatch, peers_answer
from gradcomp.exchange.averages import Averages
from gradcomp.exchange.pipeline import InlinePipeline, Pipeline, Task
from gradcomp.exchange.routes import Exchange
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry
from gradcomp.kernels.staging import join, on_stream
from gradcomp.memory.saved import STEPS

logger = logging.getLogger("gradcomp")

_OUTCOME = struct.Struct("<Qd")  # step, loss scale


class Step:
    """What `Engine.begin` opens: buckets are submitted, the step is sealed behind the last one,
    and `finish` waits for them.

    A step that is never finished commits nothing; the next `Engine.begin` waits for its buckets.
    An engine does not hold its step: who has begun it does, as long as packed averages are needed.

    Attributes:
        number: of training, for random numbers and headers.
        buckets: exchange and members of every bucket, in the order in which they were submitted.
        started, ended: when the first bucket was submitted and the latest one ended, seconds of
            `time.perf_counter`.
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
            done: called when the average stands in the buffer, or NaN after a failure; with an
                error if the device has failed. (On an accelerator what the current stream is given
                then comes after the average.)
        """
        try:
            self._submit(buffer, members, done)
        except Exception as error:
            self._engine.fail(error)  # peers hear of it
            raise

    def _submit(
        self, buffer: Tensor, members: Members, done: Callable[[Exception | None], None] | None
    ) -> None:
        check_tensor(buffer, "the bucket")
        engine, bucket = self._engine, len(self.buckets)
        exchange, new = engine.layouts.exchange(buffer, members, self.number, bucket)
        shared, named = engine.replicas.first_bucket(self.number) if bucket == 0 else ({}, ())
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
            except Exception as failure:  # noqa: BLE001 - DDP waits, and raises it
                if done is not None:
                    done(failure)
                if engine.error is None:
                    engine.fail(failure)

        tasks = [Task(steps, _nothing) for steps in slices]
        tasks[0].stages = (first, *slices[0][1:])
        tasks[-1].done = end
        engine.pipeline.submit(*tasks)

    def seal(self) -> None:
        """Take note that the step has all its buckets: where steps count as a whole, the round
        that says so may start.
        """
        engine = self._engine
        if (
            self._sealed
            or not self.buckets
            or not engine.options.whole_steps
            or engine.comm.world_size == 1
        ):
            return
        self._sealed = True
        idle = [lambda: None] * (engine.layouts.route.stage_count - 1)
        engine.pipeline.submit(Task((*idle, self._agree_on_outcome), _nothing))

    def finish(self) -> None:
        """Wait for every bucket, commit what they left in memory, count the step.

        Raises:
            GradcompError: what went wrong in any bucket, on this call and for every later step.
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
        if not engine.options.whole_steps or not any(e.flagged for e in exchanges):
            for exchange in exchanges:
                if not exchange.flagged:
                    exchange.commit()
        stats.baseline_bytes += ring_bytes(self._numel, engine.comm.world_size)
        engine.look_at(self.number)
        engine.is_open = False
        engine.comm.release()
        engine.step += 1
        stats.steps += 1
        for report in engine.reports:
            report.step(engine.step)

    def packed(self) -> list[tuple[Averages, Members]]:
        """Return the averages that are still packed, and whose they are."""
        return [
            (exchange.averages, members)
            for exchange, members in self.buckets
            if exchange.averages is not None
        ]

    def unpack(self) -> None:
        """Write averages that are still packed into their buckets."""
        for exchange, _ in self.buckets:
            exchange.unpack()

    def _agree_on_outcome(self) -> None:
        """Return once every rank has averaged every bucket of this step.

        A rank whose step failed does not get here, so no rank gets past here. It runs in the last
        stage of the pipeline, behind the buckets, when nothing else is under way on the channel of
        second phases.

        Raises:
            PeerMismatch: "step" or "loss_scale" differ.
            PeerLost: "outcome"; a rank did not finish the step.
        """
        engine = self._engine
        mine = _OUTCOME.pack(self.number, engine.store.loss_scale)
        with peers_answer("outcome"):  # nothing else is ever gathered on this channel
            found = engine.comm.all_gather_bytes(mine, engine.timeout_s, Channel.SECOND)
        everyone = [_OUTCOME.unpack(data) for data in found]
        for number, field in enumerate(("step", "loss_scale")):
            for rank, theirs in enumerate(everyone):
                if theirs[number] != everyone[0][number]:
                    raise PeerMismatch(field, rank, everyone[0][number], theirs[number])
        nbytes = (engine.comm.world_size - 1) * _OUTCOME.size
        engine.stats.add_bytes(nbytes, nbytes)


class Engine:
    """Averages one set of named tensors.

    A step commits residuals and states of transforms when all its buckets ended without an error on
    this rank; what failed leaves them as they were before the step. Without more, a rank may fail
    in the last bucket after its peers have ended theirs: they are then a step ahead of it, which
    they hear at their next step, and states saved on both sides do not go together (loading them
    says so). With `Options.whole_steps` a round of a few bytes after the last bucket makes a
    step count on all ranks or on none; only a rank that is cut off within that round may differ
    from the others.

    Args:
        sources: the tensors, in the same order on every rank.
        codec: codec or name.
        comm: moves the bytes; closed with the engine.
        options: see `Options`.
        chosen: what is to be said of how codec and options were chosen.
        guarded: whether a `Guard` may take the run to a safer codec.

    Attributes:
        named: (name, tensor) of every source: what is the same on every rank.
        orders: see `Layouts`.
        timeout_s: longest wait for a peer, in seconds.
        step: number of the next step, or of the one that is open.
        is_open: a step has begun and was not finished.
        reports: get every step that has ended.
        origin: what the entry point's states say of it, its kind first.
        replicas: compares what every rank must hold alike.
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
        self.replicas = Replicas(self.sources, self.layouts, self.timeout_s, self.stats)
        self.orders = self.layouts.orders
        self._growth = Growth(self._noisy_weights())
        self.guard = (
            Guard(self.codec, options.warmup_steps, self.layouts.probe)
            if guarded and comm.world_size > 1
            else None
        )
        self.step = 0
        self._longer: LongerSteps | None = None
        self._rate = ""  # what it does, for `describe`
        self.reports: list[Telemetry] = []
        self.origin: dict[str, object] = {"kind": "gradients"}
        self._start()

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self) -> Step:
        """Open a step: take over the loss scale, forget what `discard_step` could undo. Only one
        step is open at a time.

        Raises:
            GradcompError: of an earlier step; a loss scale that gradients cannot carry; too many
                steps.
        """
        if self.error is not None:
            raise self.error
        if self.is_open:  # the step before was abandoned by an exception of the user's
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
        if self._longer is not None:
            self._longer.steps = self.step + 1
            self._longer.off = self.guard is not None and self.guard.level > 0
        if self.options.loss_scale is not None:
            scale = float(self.options.loss_scale())
            if not 0 < scale < math.inf:
                raise GradcompError(
                    f"the grad_scaler's scale is {scale}: it has overflowed or decayed to nothing,"
                    " so gradients carry nothing; look for NaN in the loss, or take a scaler with"
                    " bounds (gradcomp.amp.DynamicLossScaler)"
                )
            if scale != self.store.loss_scale:
                self.store.change_loss_scale(scale)
        return Step(self)

    def look_at(self, step: int) -> None:
        """Have the guard look at a step that has ended; nothing is under way."""
        if self.guard is None:
            return
        try:
            why = self.guard.look(step, self.comm, self.timeout_s)
        except GradcompError as error:
            self.fail(error)
            raise
        if why is not None and self.comm.rank == 0:
            codec = self.guard.fallback(step + 1)
            logger.warning("from step %d on gradients travel by %r: %s", step + 1, codec, why)

    def scale_lr_of(self, optimizer: Any) -> None:
        """Keep the length of the optimizer's steps, if the options say so (`gradcomp.engine.rate`).

        Raises:
            ValueError: ``scale_lr=True`` without an optimizer whose steps noise shortens.
        """
        options = self.options
        shortens = optimizer is not None and divides_by_squares(optimizer)
        if options.scale_lr and not shortens:
            raise ValueError(
                "scale_lr=True needs optimizer=, one that divides by the root of squares (Adam,"
                f" AdamW, RMSprop, SplitAdamW), got {type(optimizer).__name__}"
            )
        wanted = options.precondition is not None and options.scale_lr is not False
        if self._longer is not None:  # of other ranks
            self._longer.close()
            self._longer, self._rate, self.layouts.lr_factor = None, "", 1.0
        if not (shortens and wanted and self.layouts.compresses):
            return
        if options.scale_lr is None and not gains(self.codec):
            return
        factor = self.layouts.lr_factor = shortening(self.codec, self.layouts.strategy)
        if factor != 1.0:
            stepping = unwrapped(optimizer)
            self._longer = LongerSteps(stepping, factor, options.warmup_steps)
            self._rate = f"learning rate of {type(stepping).__name__} x {factor:.3g} in steps"

    # ---- failures --------------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """What went wrong first, or that this is closed; None as long as it works."""
        return self.pipeline.error

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.pipeline.closed

    def fail(self, error: BaseException) -> None:
        """End the step under way, and refuse later ones, with this error; the first error stays."""
        self.pipeline.fail(error)

    def wait(self) -> None:
        """Wait for every bucket that was submitted; raise `error`, if there is one."""
        self.pipeline.wait()

    def discard_step(self) -> None:
        """Give back what was remembered before the last step: for code that throws the step's
        gradients away.
        """
        self.store.discard()

    def reset(self) -> None:
        """Go on after a failure, from before the step that failed. Collective: every rank calls it,
        whatever it has seen.

        Bytes move over a duplicate of the communicator from now on; the one before is closed.

        Raises:
            PeerLost: a rank did not call this.
            PeerMismatch: "step"; the failure has left ranks at different steps (see above): all
                load a checkpoint.
        """
        self._leave(self.comm.duplicate(self.timeout_s))
        self.layouts.take(self.comm)
        self._start()
        try:
            self.replicas.agree_on({"step": self.step})
        except BaseException as error:
            self.fail(error)
            raise

    def move(self, comm: Communicator) -> None:
        """Go on among other ranks, from before a step that has failed. Each rank keeps its
        residuals (`Layouts.move`); the communicator before is closed.

        Ranks that come must have the same second moments and step as the others (`take_shared`).
        """
        self._leave(comm)
        self.layouts.move(self.comm)
        self._start()

    def _leave(self, comm: Communicator) -> None:
        """Stop what is under way, and take another communicator."""
        self.pipeline.close()
        self.layouts.route.close()
        before, self.comm = self.comm, self._lease(comm)
        before.close()
        self.store.begin_step()

    def _noisy_weights(self) -> list[Tensor]:
        """Return the weights that this rank watches while unbiased noise is added to their
        gradients.
        """
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
        """Whether residuals are kept in units of this scale."""
        return self.options.loss_scale == scale

    # ---- checkpoints, checks ---------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on bit for bit: tensors, numbers and strings only.

        After a failure (a lost peer) it is the state before the step that failed.
        """
        if self.error is None:
            self.wait()
        else:
            self.pipeline.rest()
        guard = {} if self.guard is None else {"guard": self.guard.state()}
        return state.write(self.layouts, self.origin, self.step, **guard)

    def load_state_dict(self, given: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` of the same rank, world size, codec and transform was taken.

        With the states of all ranks of a run, also of another world size: see
        `gradcomp.memory.saved.reshard`.

        Raises:
            ValueError: a state of another format, rank, world size, codec or model; nothing is
                changed then.
        """
        self.take(self.accept(given))

    def accept(self, given: dict[str, Any] | Sequence[dict[str, Any]]) -> state.Accepted:
        """Return what `take` is to go on from; ValueError unless it can. Nothing is changed."""
        return state.accept(self.layouts, self.origin, given)

    def take(self, accepted: state.Accepted) -> None:
        """Go on from what `accept` has returned, after waiting for what is under way."""
        self.wait()
        self.store.load(accepted.parts, self.layouts.names, accepted.loss_scale)
        self.step = accepted.step
        if self.guard is not None:
            self.guard.load(accepted.guard, self.step)
        self.replicas.compare_next()
        if self.options.loss_scale is None and accepted.loss_scale != 1.0:
            self.store.change_loss_scale(1.0)  # saved under a loss scaler, resumed without one

    def shared_state(self) -> dict[str, Tensor]:
        """Return copies of what every rank must hold alike beside the tensors: second moments, by
        name.
        """
        moments = self.store.moments
        return {} if moments is None else moments.planes.state(self.layouts.names)

    def take_shared(self, moments: Mapping[str, Tensor], *, keeps_residuals: bool) -> None:
        """Go on from another rank's `shared_state`; ValueError if it does not fit."""
        store, names = self.store, self.layouts.names
        if store.moments is not None:
            store.moments.planes.check(moments, names)
            store.moments.planes.load(moments, names)
        elif moments:
            raise ValueError("the other ranks have precondition=True, this one has not")
        if store.residuals is not None and not keeps_residuals:
            store.residuals.replace({})

    def check_replicas(self) -> None:
        """As `Replicas.check`, after waiting for what is under way."""
        self.wait()
        self.replicas.check()

    def compare_sources(self, called: str) -> None:
        """As `Replicas.compare_sources`; what differs is raised on this call and on every later
        one, but for names and shapes: the first bucket's record says more about those.
        """
        try:
            self.replicas.compare_sources(called)
        except GradcompError as error:
            if not isinstance(error, PeerMismatch) or error.field != "layout":
                self.fail(error)
                raise

    def describe(self) -> str:
        """Return one line that says what is on."""
        return "; ".join(filter(None, (self.layouts.describe(), self._chosen, self._rate)))

    def close(self, *, keep_comm: bool = False) -> None:
        """Stop the threads and give the communicator back, unless it is kept. Closing twice is
        harmless.
        """
        if (
            self.stats.steps
            and not self.layouts.compressed
            and self.comm.world_size > 1
            and self.comm.rank == 0
        ):
            logger.warning(
                "nothing was compressed: %s exchanges, and all of them belong to the warm start"
                " (warmup_steps=%s)",
                self.stats.steps,
                self.options.warmup_steps,
            )
        if self._longer is not None:
            self._longer.close()
        if self.error is not None or self.is_open:
            self.layouts.route.abort()  # collectives may be under way that no peer will answer
        self.pipeline.close()
        self.layouts.route.close()
        if keep_comm:
            self.comm.release()
        else:
            self.comm.close()

    # ---- parts -----------------------------------------------------------------------------------

    def _lease(self, comm: Communicator) -> Lease:
        return comm.lease(
            f"the averaging of {len(self.sources)} parameters ({self.sources[0].name!r} ...)"
        )

    def _start(self) -> None:
        """Make a pipeline for the route as it is; no step is open."""
        route = self.layouts.route
        self.is_open = False
        self.pipeline = (
            Pipeline(route.stage_count, on_failure=route.abort)
            if self.comm.world_size > 1
            else InlinePipeline()
        )


def _nothing(error: BaseException | None) -> None:
    """Do nothing after a slice that others follow: the last one reports how its bucket ended."""
