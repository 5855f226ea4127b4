"""`DiLoCo` and `LocalSGD`: count inner steps, and exchange fragments of the model on schedule."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradcomp.averager import GradientAverager, torch_communicator
from gradcomp.codecs import Codec, Identity
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import Advanced, LocalOptions, Options, takes
from gradcomp.engine.watch import remove
from gradcomp.errors import GradcompError
from gradcomp.exchange.agree import agree
from gradcomp.exchange.stats import Stats
from gradcomp.exchange.telemetry import Telemetry
from gradcomp.local.fragment import Fragment, cut
from gradcomp.local.inner import Inner, SyncEvery, Turns, check_trained, trained_parameters
from gradcomp.local.outer import Outer, at_owners, mean, nesterov, options_of
from gradcomp.local.states import check
from gradcomp.memory.saved import Saved, write

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

logger = logging.getLogger("gradcomp")
AGREED_ROUNDS = 64  # rounds of a `sync_every` function that ranks compare


class DiLoCo:
    """Every rank trains on its own for H steps. Then the changes of the weights are compressed and
    averaged, and an outer optimizer applies the average.

    ::

        diloco = gradcomp.DiLoCo(model, optimizer, "terngrad", sync_every=30)
        for x, y in loader:
            loss_of(model, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()

    The anchor of a parameter is its fp32 value after the last sync. Ranks average pseudo-gradients,
    anchor - parameter, like gradients, with residuals, and on the CPU whatever the model's device.
    All ranks decode the same bytes, so anchors and outer state are bitwise equal on all ranks;
    after a sync without delay the parameters are, too. Buffers (running statistics) are not
    averaged. In a ``with`` block the inner optimizer's steps are counted automatically: do not call
    `step` there.

    Args:
        model: a plain module on any device, equal on all ranks. If DDP averages its gradients
            inside a node, use ``exchange="hierarchical"``: one exchange per node.
        inner_optimizer: the optimizer of its parameters, or several for different parameters (Muon
            and AdamW), which must all step to make one inner step. Split optimizers keep trails.
        codec: codec or name. "auto" chooses by the inner optimizer among codecs measured with local
            steps, under Adam `OneBit(rotate=True)`; `Block(8)` under others. 1 bit with residuals
            lost 0.25 nats where "terngrad" lost 0.03 (a small GPT, H = 30 after a tenth of the
            steps averaged in fp32; docs/explanation/accuracy.md, "Local steps").
        sync_every: H, inner steps from one sync of a parameter to the next; or a function of the
            round's number that returns H. It is called for the first 64 rounds at construction, so
            that ranks can compare the results.
        outer_optimizer: creates the optimizer of the anchors. None: SGD with learning rate 0.7 and
            Nesterov momentum 0.9; for fewer than a few hundred syncs try 1.0 and 0.8.
        fragments: number of parts of the model that sync in turn, H / fragments steps apart
            (streaming).
        fragment_sync_delay: inner steps during the exchange of a fragment; less than H.
        fragment_update_alpha: weight of a rank's own parameters when delayed averages are applied.
        shard_outer: shard the outer momentum: every rank has 1/N of it, for the elements that it
            owns, and sends the compressed outer step. Needs outer SGD with a constant learning rate
            and ``exchange="reduce_scatter"``.
        comm: communicator; torch.distributed's default group when None. Closed with this object.
        common, advanced: see `gradcomp.ddp.register`; without `transform` and
            ``scale_lr=True``. During the first `warmup_steps` inner steps `average_gradients`
            averages gradients at every step, in fp32 or with `warmup_codec`.

    Attributes:
        inner_steps: number of inner steps so far.

    Raises:
        TypeError: a DDP model, not a module, or no optimizer.
        ValueError: an option out of its range; an optimizer of other parameters.
        PeerMismatch: a rank has other settings.
        PeerLost: a rank did not answer.
    """

    own_weights = True  # tells `Checkpoints` that ranks have different weights between syncs

    @takes(
        LocalOptions, others="it sends changes of weights, not gradients, and every sync is atomic"
    )
    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        codec: Codec | str,
        *,
        sync_every: SyncEvery,
        outer_optimizer: Outer | None = None,
        fragments: int = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.5,
        shard_outer: bool = False,
        comm: Communicator | None = None,
        advanced: Advanced | None = None,
        **common: Unpack[LocalOptions],
    ) -> None:
        from gradcomp.plan.advice import resolve_local

        self._model, self._named = model, trained_parameters(model)
        named = self._named
        options = Options(**common, advanced=advanced)  # type: ignore[arg-type]
        if options.advanced.transform is not None:
            raise ValueError(
                f"transform={options.advanced.transform!r} is for gradients, but local steps send"
                " changes of weights"
            )
        if options.advanced.scale_lr:
            raise ValueError(
                "scale_lr=True is for gradients of every step: codes of changes of weights do not"
                " shorten the inner optimizer's steps"
            )
        self._turns = Turns(sync_every, fragments)
        delay, alpha = fragment_sync_delay, fragment_update_alpha
        if (
            isinstance(delay, bool)
            or not isinstance(delay, int)
            or not 0 <= delay < self._turns.length(0)
        ):
            raise ValueError(
                "fragment_sync_delay must be an integer of at least 0 and less than sync_every, got"
                f" {delay!r}"
            )
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
            raise ValueError(f"fragment_update_alpha must be in [0, 1], got {alpha!r}")
        if shard_outer and options.exchange not in ("auto", "reduce_scatter"):
            raise ValueError(
                "shard_outer needs exchange='auto' or 'reduce_scatter', whose means have owners,"
                f" got {options.exchange!r}"
            )
        self._inner = Inner(inner_optimizer, [p for _, p in named])
        parts = cut([p.numel() for _, p in named], fragments)
        self._warmup_steps, self._delay, self._alpha = options.warmup_steps, delay, alpha
        self._comm = comm if comm is not None else torch_communicator(options.timeout_s)
        codec, self._chosen = resolve_local(codec, self._inner.optimizers, self._comm.world_size)
        self._timeout_s = options.timeout_s or self._comm.timeout_s
        self._fragments: list[Fragment] = []
        self._gradients: GradientAverager | None = None
        self._start_stats = Stats()
        self._hooks: list[Any] = []
        weakref.finalize(self, remove, self._hooks)
        self._reports: list[Telemetry] = []
        self._averaged, self.inner_steps = False, 0
        # without a warm-up the first inner step must start from the anchors
        self._starts_at_anchors = not options.warmup_steps
        outer, transform = outer_optimizer or self._default_outer, None
        try:
            outer_words = options_of(outer([nn.Parameter(torch.zeros(1, device="cpu"))]))
            if shard_outer:
                transform, outer = at_owners(outer, len(named))
            settings = {
                "fragment_sync_delay": delay,
                "fragment_update_alpha": alpha,
                "codec": codec,
                "warmup_steps": options.compared()["warmup_steps"],
                "outer_optimizer": repr(outer_words),
                "shard_outer": shard_outer,
            }
            self._compare_settings(settings)
            plain = replace(options, warmup_steps=0, warmup_codec=None, atomic_steps=True)
            of_changes = replace(plain, advanced=replace(plain.advanced, transform=transform))
            for part in parts:
                self._fragments.append(
                    Fragment(
                        named[part.start : part.stop],
                        self._inner.weights,
                        codec,
                        self._comm.duplicate(self._timeout_s),
                        of_changes,
                        outer,
                    )
                )
            self.check_replicas()
            self._hooks += self._inner.watch()
            self._hooks += self._inner.before_step(self._before_inner_step)
            if self._warmup_steps:
                plain = replace(plain, precondition=None)
                first = options.warmup_codec or Identity()
                self._gradients = GradientAverager(
                    named, first, comm=self._comm.duplicate(self._timeout_s), **vars(plain)
                )
            if self._chosen and self._comm.rank == 0:
                logger.info(self.describe())
        except BaseException:
            self.close()
            raise

    _default_outer = staticmethod(nesterov)

    # ---- training --------------------------------------------------------------------------------

    def step(self) -> None:
        """Count an inner step and sync the fragments that are due. Call it after the inner
        optimizer's ``step()``. Collective if a fragment is due.

        Raises:
            NotFinite: a pseudo-gradient of some rank is NaN or Inf. Raised on every rank; nothing
                of that fragment was committed.
            PeerMismatch, PeerLost, CorruptPayload: the exchange failed; nothing was committed.
            ValueError: a parameter was replaced, reshaped, frozen or unfrozen.
            GradcompError: called in a ``with`` block, where steps are counted automatically.
        """
        if self._inner.then is not None:
            raise GradcompError(
                "step() in a with block, where the inner optimizer's steps count by themselves"
            )
        self._inner.count_call(type(self).__name__)
        self._count()

    def average_gradients(self) -> None:
        """Average gradients over the ranks during `warmup_steps`; after them do nothing.

        Call it after backward and before code that reads gradients, such as clipping. Otherwise the
        inner optimizer's ``step()`` calls it.
        """
        if self._gradients is not None:
            self._gradients.average()
            self._averaged, self._averaged_at = True, self._inner.steps

    def _before_inner_step(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Average gradients in the warm-up. Raise GradcompError if the weights differ from the
        anchors before the first inner step: that would be averaged like a result of training.
        """
        if self._starts_at_anchors and not all(f.is_at_anchors() for f in self._fragments):
            raise GradcompError(
                f"weights were changed after this {type(self).__name__} was made, from a checkpoint"
                " perhaps: make it when they are there"
            )
        self._starts_at_anchors = False
        # a step since then used up the averages: torch.distributed.checkpoint makes one of its own
        if self._gradients is None or self._averaged and self._averaged_at == self._inner.steps:
            return
        if kwargs.get("closure") is not None or len(args) > 1:
            raise GradcompError(
                "step(closure) during warmup_steps: gradients that the closure makes would not be"
                " averaged"
            )
        self.average_gradients()

    def _count(self) -> None:
        self.inner_steps += 1
        self._averaged = False
        if self.inner_steps <= self._warmup_steps:
            if self.inner_steps == self._warmup_steps:
                self._end_warmup()
            return
        for number, at in self._under_way():
            if at <= self.inner_steps:
                self._apply(number)
        turns = self._turns.take()
        if turns:
            check_trained(self._model, self._named, type(self).__name__)
        for number in turns:
            self._sync(number)

    def _under_way(self) -> list[tuple[int, int]]:
        """Return the exchanges under way in the order in which they began: number of the fragment,
        and inner step after which its averages are applied.
        """
        numbered = [(n, f.due) for n, f in enumerate(self._fragments) if f.due is not None]
        return sorted(numbered, key=lambda one: one[1])

    def _sync(self, number: int) -> None:
        """Average the changes of a fragment, and apply the averages unless they are delayed."""
        fragment = self._fragments[number]
        if fragment.due is not None:  # `sync_every` has become shorter than the delay
            self._apply(number)
        due = self.inner_steps + self._delay if self._delay else None
        fragment.send(due=due, progress=self._progress())
        if due is None:
            self._apply(number)

    def _apply(self, number: int) -> None:
        self._fragments[number].apply(self._alpha if self._delay else 0.0)
        for report in self._reports if number == len(self._fragments) - 1 else []:
            report.step(self.inner_steps)

    def _end_warmup(self) -> None:
        """End the warm-up: set the anchors to the weights, which are equal on all ranks, and close
        the gradient averager.
        """
        for fragment in self._fragments:
            fragment.anchor_here()
        if self._gradients is not None:
            self._start_stats = self.start_stats
            self._gradients.close()
            self._gradients = None
        self.check_replicas()  # finds, for example, a rank that has skipped a step

    def restore(self) -> None:
        """Reset parameters to the anchors, for example after `NotFinite`. Waits for exchanges in
        progress.

        During `warmup_steps`, when all ranks have the same weights, this does nothing.
        """
        if self._gradients is not None:
            return
        for fragment in self._fragments:
            fragment.arrive()
            fragment.restore()

    def reset(self) -> None:
        """Continue after a failed exchange, from the state before it. Collective; see
        `gradcomp.GradientAverager.reset`.

        Averages that were received are kept, and applied on schedule.
        """
        self._wait()
        for averager in self._averagers():
            averager.reset()

    def _wait(self) -> None:
        """Wait for exchanges in progress; forget those that fail."""
        for fragment in self._fragments:
            with contextlib.suppress(GradcompError):
                fragment.arrive()

    # ---- reports ---------------------------------------------------------------------------------

    @property
    def syncs(self) -> int:
        """Syncs of the whole model so far: the smallest number of syncs of any fragment."""
        return min(fragment.syncs for fragment in self._fragments)

    @property
    def stats(self) -> Stats:
        """Bytes and seconds of all syncs so far; a step is the sync of one fragment."""
        return Stats.total([fragment.averager.stats for fragment in self._fragments])

    @property
    def start_stats(self) -> Stats:
        """Bytes and seconds of averaging gradients during `warmup_steps`; not part of `stats`."""
        return self._gradients.stats if self._gradients is not None else self._start_stats

    def log_to(self, target: Any, *, every: int = 1, prefix: str = "gradcomp") -> None:
        """Report syncs to `target`; see `gradcomp.ddp.CompressionState.log_to`. `every` counts
        syncs of the last fragment.
        """
        self._reports.append(
            Telemetry(
                target, lambda: self.stats, self._fragments[-1].averager.quality, every, prefix
            )
        )

    def describe(self) -> str:
        """Return one line of text: H, warm-up, fragments, delay, the exchange, and what "auto" has
        chosen.
        """
        turns = f", {len(self._fragments)} fragments in turns" if len(self._fragments) > 1 else ""
        late = f", {self._delay} steps late (alpha {self._alpha:g})" if self._delay else ""
        warmup = (
            f" after {self._warmup_steps} steps of averaged gradients" if self._warmup_steps else ""
        )
        chosen = f"; {self._chosen}" if self._chosen else ""
        name, length = type(self).__name__, self._turns.length(self._turns.round)
        return (
            f"{name} every {length} inner steps{warmup}{turns}{late}:"
            f" {self._fragments[0].averager.describe()}{chosen}"
        )

    def check_replicas(self) -> None:
        """Compare all replicated state over the ranks. Collective; waits for exchanges in progress.

        Replicated are anchors, the outer optimizer's state and options, averages that are not
        applied yet, second moments of `precondition`, and the number of the inner step.

        Raises:
            PeerMismatch: names the first value that differs.
            PeerLost: a rank did not answer.
        """
        self._wait()
        for fragment in self._fragments:
            fragment.progress = self._progress()
            fragment.averager.check_replicas()

    # ---- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for a bitwise equal continuation together with its model and
        inner optimizer. It may be called between syncs.

        Waits for exchanges in progress. Anchors and outer state are equal on all ranks, residuals
        are not.
        """
        self._wait()
        if self._gradients is not None:
            for fragment in self._fragments:
                fragment.anchor_here()
        return write(
            self._origin(),
            self._comm.rank,
            self._comm.world_size,
            self.inner_steps,
            {},
            sync_every=self._turns.length(self._turns.round),
            round=self._turns.round,
            done=self._turns.done,
            fragments=[fragment.state() for fragment in self._fragments],
            under_way=[list(one) for one in self._under_way()],
            gradients=self._gradients.state_dict() if self._gradients is not None else None,
        )

    def load_state_dict(self, state: dict[str, Any] | Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of this rank, or a list of the state dicts of all ranks of a run,
        which may have had another number of ranks.

        A list sets the parameters to the anchors, since ranks' own steps cannot be assigned to
        other ranks. At most the inner steps since the last sync are lost.

        All ranks must load states of the same run: the next sync compares replicated values.

        Raises:
            ValueError: a state of another model, number of fragments, `sync_every`, codec, or (one
                state) rank; or an invalid value. Nothing is changed then.
        """
        saved = Saved.of(state)
        saved.check_origin(self._origin())
        list(saved.of_ranks(self._comm.rank, self._comm.world_size))  # averagers have the tensors
        has_gradients, extra = self._gradients is not None, saved.extra
        checks = [fragment.check for fragment in self._fragments]
        check(saved, self._warmup_steps, self._turns, checks, has_gradients=has_gradients)
        given = [one["averager"] for one in extra["fragments"]]
        if extra["gradients"] is not None:
            given.append(extra["gradients"])
        averagers = self._averagers()[: len(given)]
        for averager in averagers:
            averager._engine.drain()
        accepted = [a._engine.accept(one) for a, one in zip(averagers, given, strict=True)]
        for averager, one in zip(averagers, accepted, strict=True):  # all checks have passed
            averager._take(one)
        of_all_ranks = isinstance(state, (list, tuple)) or len(saved.ranks) > 1
        for fragment, one in zip(self._fragments, extra["fragments"], strict=True):
            fragment.load(one)
            if of_all_ranks:
                fragment.restore()
        if self._gradients is not None and extra["gradients"] is None:
            self._gradients.close()
            self._gradients = None
        self.inner_steps, self._starts_at_anchors, self._averaged = saved.step, False, False
        self._turns.round, self._turns.done = extra["round"], extra["done"]
        for number, at in extra["under_way"]:
            self._fragments[number].due = at

    def _origin(self) -> dict[str, object]:
        return {"kind": type(self).__name__, "warmup_steps": self._warmup_steps}

    # ---- parts -----------------------------------------------------------------------------------

    def _compare_settings(self, settings: Mapping[str, object]) -> None:
        """Compare the schedule, settings and parameters over the ranks. Collective.

        Args:
            settings: values to compare besides schedule and parameters, by name.

        Raises:
            PeerMismatch: names the first value that differs.
            PeerLost: a rank did not answer.
        """
        lengths = [self._turns.length(number) for number in range(AGREED_ROUNDS)]
        values = {
            "sync_every": lengths[0] if len(set(lengths)) == 1 else lengths,
            "fragments": self._turns.fragments,
            **settings,
            "parameters": [(name, tuple(p.shape), p.dtype) for name, p in self._named],
        }
        kind = type(self).__name__
        with self._comm.lease(kind) as lease:
            agree(lease, values, self._timeout_s, called=kind, phase="setup")

    def _averagers(self) -> list[GradientAverager]:
        """Return the averagers of all fragments, and in the warm-up also that of gradients."""
        averagers = [fragment.averager for fragment in self._fragments]
        return averagers if self._gradients is None else [*averagers, self._gradients]

    def _progress(self) -> str:
        waiting = ", ".join(f"fragment {n} until step {at}" for n, at in self._under_way())
        return (
            f"inner step {self.inner_steps}, {self._turns.done} of round {self._turns.round}, under"
            f" way: {waiting or 'nothing'}"
        )

    def close(self) -> None:
        """Stop the threads and close the communicators; closing twice is harmless."""
        remove(self._hooks)
        for averager in self._averagers():
            averager.close()
        self._comm.close()

    def __enter__(self) -> Self:
        """Count the inner optimizer's steps automatically from now on."""
        self._inner.call_after_steps(self._count)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close. Without an error, wait for exchanges in progress first, so that `state_dict` has
        their averages.
        """
        if kind is None:
            self._wait()
        self.close()


class LocalSGD(DiLoCo):
    """Every rank trains on its own for H steps; then parameters are averaged over the ranks.

    `DiLoCo` with an outer optimizer that sets the anchors to the mean; for arguments see there.
    """

    _default_outer = staticmethod(mean)
