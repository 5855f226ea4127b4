"""What a DDP hook and a GradientAverager share: named parameters -> buckets -> pipeline, with steps and checkpoints.

An engine knows the parameters by position, keeps one `Exchange` for every bucket layout it has seen, agrees with
the peers on each layout before the first byte of it moves (the fingerprint), and commits or rolls back residuals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradcomp.codecs import Codec, Identity, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Channel, Communicator
from gradcomp.comm.rounds import ring_bytes
from gradcomp.engine import replicas
from gradcomp.engine.agree import agree, gather
from gradcomp.engine.options import Options
from gradcomp.errors import GradcompError
from gradcomp.exchange.interface import Exchange
from gradcomp.exchange.pipeline import Pipeline, Task
from gradcomp.exchange.routes import make_route
from gradcomp.exchange.stats import Stats
from gradcomp.memory.parts import Memory, check_origin, read_numbers
from gradcomp.memory.reshard import reshard
from gradcomp.memory.residuals import Feedback
from gradcomp.memory.transform import keep_states
from gradcomp.payload import fingerprint, wire
from gradcomp.payload.layout import layout_digest
from gradcomp.payload.order import storage_order, storage_shape
from gradcomp.payload.parameters import describe_parameters, warn_of_thin_groups
from gradcomp.payload.pieces import Slot

STATE_VERSION = 1
Members = tuple[tuple[int, int], ...]  # (position of a parameter, its first element in the bucket), in bucket order


class Engine:
    """Averages the gradients of one set of named parameters.

    Args:
        named: (name, parameter) pairs in the order of ``named_parameters()``, the same on every rank.
        codec: codec or name.
        comm: moves the bytes; closed with the engine.
        options: see `Options`.

    Attributes:
        keeps_packed: leave averages packed in the exchanges (`submitted`) where that is safe. To be set before the first
            bucket.
        orders: `storage_order` of the parameters whose elements do not lie row-major, by position.
        shards: which part of a sharded parameter this rank holds, by position; it must be the same on every rank.
        timeout_s: longest wait for a peer, in seconds.
        submitted: exchange and members of every bucket of the last step.
        replicated: returns what else must be the same on every rank, (name, tensor) pairs for `check_replicas`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        codec: Codec | str,
        comm: Communicator,
        options: Options,
    ) -> None:
        if not named:
            raise ValueError("there are no parameters to average")
        self.codec, self.comm, self.options = resolve(codec), comm, options
        self.timeout_s = comm.timeout_s if options.timeout_s is None else options.timeout_s
        comm.check_overlap()
        for name, parameter in named:
            if parameter.requires_grad:
                check_tensor(parameter.detach(), f"parameter {name!r}", contiguous=False)
        self.named = list(named)
        shapes = [(name, storage_shape(p)) for name, p in named]
        self.orders = {i: order for i, (_, p) in enumerate(named) if (order := storage_order(p.shape, p.stride()))}
        self.parameters = describe_parameters(shapes, self.codec.group_numel, options.min_numel, options.exclude)
        warn_of_thin_groups(self.parameters, self.codec.form)
        self.stats = Stats()
        self.step = self._step_numel = 0
        self._loss_scale, self._scale = options.loss_scale, 1.0
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}
        self._open = self._layouts_changed = self.keeps_packed = False
        self.shards: Mapping[int, object] = {}
        self.submitted: list[tuple[Exchange, Members]] = []
        self.replicated: Callable[[], list[tuple[str, Tensor]]] = list
        self._first_submit = self._last_done = 0.0
        self._plain = Identity()
        transform = options.transform
        self.route = make_route(self.codec, comm, options.exchange, options.nodes, self.timeout_s, transform)
        self.strategy = self.route.strategy
        self.pipeline = Pipeline(self.route.stage_count, on_failure=self.route.abort)
        trained = {p.index: p.numel for p in self.parameters if named[p.index][1].requires_grad}
        states = keep_states(transform, trained, self.route.owner_numel)
        self.memory = Memory(*self._make_feedback(), states)

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step: take over the loss scale, forget what `discard_step` could undo."""
        if self.pipeline.error is not None:
            raise self.pipeline.error
        if self._open:  # the backward before was abandoned by an exception of the user's
            self.pipeline.wait()
        self._open, self.submitted, self._step_numel = True, [], 0
        self.memory.begin_step()
        if self._loss_scale is not None:
            scale = float(self._loss_scale())
            if scale != self._scale:
                self._rescale(scale)

    def submit(self, buffer: Tensor, members: Members, done: Callable[[], None]) -> None:
        """Average one bucket in place.

        Args:
            buffer: ``(numel,)`` float32, bfloat16 or float16, contiguous, CPU.
            members: (position of the parameter, first element in the buffer) pairs in buffer order.
            done: called when the average stands in the buffer, or NaN after a failure.
        """
        check_tensor(buffer, "the bucket")
        number = len(self.submitted)
        exchange, new = self._exchange(buffer, members)
        self.submitted.append((exchange, members))
        if number == 0:
            self._first_submit = time.perf_counter()
        exchange.begin(buffer, self.step, number)
        stages = exchange.stages
        self._step_numel += buffer.numel()

        def first() -> None:
            if new is not None and self.comm.world_size > 1:
                self._agree(new, number, Channel.SCALE)
            stages[0]()

        def last() -> None:
            stages[-1]()
            if not self.options.whole_steps and not exchange.flagged and self.pipeline.error is None:
                exchange.commit()

        def end(error: BaseException | None) -> None:
            self._last_done = time.perf_counter()
            if error is not None:
                buffer.fill_(float("nan"))
            done()

        steps = (first, *stages[1:-1], last) if len(stages) > 1 else (last,)
        task = Task(steps, end)
        if self.comm.world_size > 1:
            self.pipeline.submit(task)
        else:
            self.pipeline.run(task)

    def finish_step(self) -> None:
        """Wait for every bucket of the step, commit residuals, count the step.

        Raises:
            GradcompError: what went wrong in any bucket, on this call and on every later one.
        """
        begun = time.perf_counter()
        self.pipeline.wait()
        if self.submitted:
            self.stats.add_seconds("hidden", max(0.0, min(begun, self._last_done) - self._first_submit))
            self._forget_old_layouts()
        exchanges = [exchange for exchange, _ in self.submitted]
        if self.options.whole_steps and not any(e.flagged for e in exchanges):
            for exchange in exchanges:
                exchange.commit()
        self._open = False
        self.stats.baseline_bytes += ring_bytes(self._step_numel, self.comm.world_size)
        self.step += 1
        self.stats.steps += 1

    def discard_step(self) -> None:
        """Give back what was remembered before the last step: for code that throws the step's gradients away."""
        self.memory.discard()

    def follows(self, scale: Callable[[], float]) -> bool:
        """Whether residuals are kept in units of this scale."""
        return self._loss_scale == scale

    # ---- checkpoints, checks ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on bit for bit: tensors, numbers and strings only.

        After a failure (a lost peer) it is the state before the step that failed.
        """
        if self.pipeline.error is None:
            self.pipeline.wait()
        elif self._open:
            self.discard_step()
        return {
            **self._origin(),
            "step": self.step,
            "loss_scale": self._scale,
            **self.memory.state(self._names()),
        }

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Go on where `state_dict` of the same rank, world size, codec and transform was taken.

        With the states of all ranks of a run, also of another world size: see `gradcomp.memory.reshard`.

        Raises:
            ValueError: a state of another version, rank, world size, codec or model; nothing is changed then.
        """
        state = self.accept(state)
        self.pipeline.wait()
        self.memory.load(state, self._names())
        self.step, self._scale = read_numbers(state)
        if self.memory.transform is not None:
            self.memory.transform.scale = self._scale
        if self._loss_scale is None and self._scale != 1.0:
            self._rescale(1.0)  # saved under a loss scaler, resumed without one

    def accept(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's own state out of what `load_state_dict` is given; ValueError unless it can be loaded."""
        if isinstance(state, Sequence):
            state = self._reshard(state)
        check_origin(state, self._origin())
        self.memory.check(state, self._names())
        return state

    def check_replicas(self) -> None:
        """Compare a hash of all parameters, and of `replicated`, over the ranks.

        Raises:
            PeerMismatch: field "parameter <name>" and the first rank whose bits differ from rank 0's.
            PeerLost: a rank did not answer.
        """
        self.pipeline.wait()
        named = [(f"parameter {name}", tensor) for name, tensor in self.named] + self.replicated()
        everyone = gather(
            self.comm, replicas.digests(t for _, t in named), "check_replicas", -1, self.timeout_s
        )
        replicas.compare([name for name, _ in named], everyone)

    def describe(self) -> str:
        """Return one line that says what is on."""
        packed = [p for p in self.parameters if p.compressed and self.named[p.index][1].requires_grad]
        plain = [p for p in self.parameters if not p.compressed and self.named[p.index][1].requires_grad]
        transform = f"; {self.options.transform!r} on {self._place()}" if self.options.transform else ""
        if self.comm.world_size == 1:
            return f"gradcomp: {self.codec!r} is off: world size 1, gradients pass through{transform}"
        if not self.route.packs:
            return f"gradcomp: {self.codec!r} is off: all {self.comm.world_size} ranks are on one node and average in fp32"
        ratio = self.expected_ratio()
        start = f", from step {self.options.start_step} on" if self.options.start_step else ""
        return (
            f"gradcomp: {self.codec!r} on {len(packed)} tensors ({sum(p.numel for p in packed):,} values), "
            f"fp32 for {len(plain)} ({sum(p.numel for p in plain):,} values), "
            f"{self.strategy} over {self.comm.world_size} ranks{start}; "
            f"expected {ratio:.1f}x fewer bytes than an fp32 ring{transform}"
        )

    def expected_ratio(self) -> float:
        """Return baseline bytes / bytes sent, as the exchange's own sizing has it, all parameters in one bucket."""
        members, offset = [], 0
        for p in self.parameters:
            if self.named[p.index][1].requires_grad:
                members.append((p.index, offset))
                offset += p.numel
        plan = self._plan(self._slots(tuple(members)), self.codec)
        return ring_bytes(offset, self.comm.world_size) / plan.sent_nbytes if plan.sent_nbytes else 1.0

    def close(self) -> None:
        """Stop the threads and give the communicator back. Closing twice is harmless."""
        if self.pipeline.error is not None or self._open:
            self.route.abort()  # collectives may be under way that no peer will answer
        self.pipeline.close()
        self.route.close()
        self.comm.close()

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _rescale(self, scale: float) -> None:
        """Bring residuals to the units of gradients that carry `scale`."""
        self.memory.rescale(self._scale, scale)
        self._scale = scale

    def _origin(self) -> dict[str, Any]:
        """Return what must be equal for a state to be this engine's."""
        return {
            "version": STATE_VERSION,
            "codec": repr(self.codec),
            "transform": repr(self.options.transform),
            "strategy": str(self.strategy),
            "nodes": repr(self.route.nodes),
            "memory_order": repr({self.parameters[i].name: order for i, order in self.orders.items()} or None),
            "rank": self.comm.rank,
            "world_size": self.comm.world_size,
        }

    def _reshard(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's own state out of those of all ranks, brought to this number of ranks where it differs."""
        if self.options.exchange == "hierarchical":
            raise ValueError("a hierarchical exchange resumes with the state of its own rank, not with a list")
        place = self.options.transform.place if self.options.transform is not None else ""
        owns = self.memory.owner_feedback is not None
        new = reshard(states, self.comm.rank, self.comm.world_size, owns_means=owns, place=place)
        if len(states) != self.comm.world_size:
            new.update(strategy=str(self.strategy), nodes=repr(self.route.nodes))
        return new

    def _names(self) -> dict[int, str]:
        return {p.index: p.name for p in self.parameters}

    def _place(self) -> str:
        transform = self.options.transform
        return "the aggregate" if transform is not None and transform.place == "owner" else "each rank's gradients"

    def _make_feedback(self) -> tuple[Feedback | None, Feedback | None]:
        if not self.codec.error_feedback or self.comm.world_size == 1:
            return None, None
        share = self.route.residual_numel
        numels = {p.index: share(p.numel) for p in self.parameters if p.compressed and self.named[p.index][1].requires_grad}
        feedback = Feedback(numels)
        if self.strategy.second_phase != "requantize":
            return feedback, None
        return feedback, feedback.owned(self.route.owner_numel)

    def _slots(self, members: Members) -> list[Slot]:
        slots = []
        for index, offset in members:
            p = self.parameters[index]
            feedback, transform = self.memory.feedback, self.memory.transform
            new = feedback is not None and p.compressed and not feedback.knows(index)
            if new or (transform is not None and not transform.planes.knows(index)):
                raise GradcompError(
                    f"parameter {p.name!r} was frozen when gradcomp was registered; register after unfreezing"
                )
            residual = feedback.offset(index) if feedback is not None and p.compressed else 0
            slots.append(Slot(index, p.numel, p.group_numel, p.compressed, offset, residual))
        return slots

    def _plan(self, slots: list[Slot], codec: Codec) -> Any:
        own = self.memory.owner_feedback
        offsets = {s.index: own.offset(s.index) for s in slots if s.compressed} if own else None
        return self.route.plan(slots, codec, offsets)

    def _exchange(self, buffer: Tensor, members: Members) -> tuple[Exchange, list[int] | None]:
        """Return the exchange of a bucket, and the fingerprint to agree on if its layout is new."""
        plain = self.step < self.options.start_step
        place = (members, buffer.dtype, plain)
        if place in self._exchanges:
            return self._exchanges[place], None
        slots = self._slots(members)
        if sum(s.numel for s in slots) != buffer.numel():
            raise ValueError(
                f"the bucket holds {buffer.numel()} elements, its parameters {sum(s.numel for s in slots)}"
            )
        codec = self._plain if plain else self.codec
        self._layouts_changed = True
        self._exchanges[place] = self.route.exchange(
            self._plan(slots, codec),
            buffer.dtype,
            self.stats,
            feedback=None if plain else self.memory.feedback,
            owner_feedback=None if plain else self.memory.owner_feedback,
            transform=None if plain else self.memory.transform,
            seed=codec.seed,
            timeout_s=self.timeout_s,
            keeps_packed=self.keeps_packed,
            device=buffer.device,
        )
        return self._exchanges[place], self._fingerprint(slots, buffer)

    def _forget_old_layouts(self) -> None:
        """Free the buffers of layouts that a bucket rebuild has replaced."""
        if self._layouts_changed:
            self._exchanges = {k: e for k, e in self._exchanges.items() if any(e is s for s, _ in self.submitted)}
            self._layouts_changed = False

    def _fingerprint(self, slots: list[Slot], buffer: Tensor) -> list[int]:
        shapes, orders = [self.parameters[s.index].shape for s in slots], [self.orders.get(s.index) for s in slots]
        shards = list(zip(shapes, orders, (self.shards.get(s.index) for s in slots), strict=True))
        return fingerprint.record(
            wire_version=wire.VERSION,
            codec=self.codec.name,
            codec_options=self.codec.options(),
            exchange=(self.strategy.exchange, self.strategy.node_size),
            second_phase=self.strategy.second_phase,
            dtype=buffer.dtype,
            numel=buffer.numel(),
            layout=layout_digest(slots, str(buffer.dtype), shards),
            step=self.step,
            world_size=self.comm.world_size,
            parameter_count=len(self.parameters),
            bucket=len(self.submitted),
            **self.options.compared(),
        )

    def agree_on(self, **values: object) -> None:
        """Raise PeerMismatch on every rank unless these fields of the fingerprint are the same on all. Collective."""
        self._agree(fingerprint.record(wire_version=wire.VERSION, **values), -1, Channel.CONTROL)

    def _agree(self, mine: list[int], bucket: int, channel: Channel) -> None:
        self.stats.setup_bytes += agree(self.comm, mine, bucket, self.timeout_s, channel)
