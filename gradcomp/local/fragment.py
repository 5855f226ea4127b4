"""A fragment of a model: its anchors, which are the weights after the last sync, and the exchange
of how each rank has changed them since.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from gradcomp.averager import GradientAverager
from gradcomp.codecs import Codec
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import Options
from gradcomp.errors import NotFinite
from gradcomp.kernels import of
from gradcomp.local.inner import Weights
from gradcomp.local.outer import Outer
from gradcomp.local.states import check_fragment, check_outer
from gradcomp.memory.saved import check_mapping


class Fragment:
    """Parameters of a model with their anchors, and the exchange of pseudo-gradients
    (anchor - parameter).

    Args:
        named: (name, parameter) pairs, all trained.
        weights: reads and writes the parameters in fp32.
        codec: codec of the pseudo-gradients.
        comm: communicator of all ranks; closed with the fragment.
        options: options of the exchange.
        outer: creates the optimizer of the anchors.

    Attributes:
        anchors: (name, anchor) pairs; float32 on the CPU.
        averager: exchanges pseudo-gradients.
        optimizer: the optimizer of the anchors.
        syncs: number of syncs that were applied.
        progress: text of the local steps' progress, compared over the ranks in every exchange.
        due: inner step after which the averages of a delayed exchange are applied; None without
            an exchange under way.
        held: averages have been received and are in the anchors' ``grad``.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        weights: Weights,
        codec: Codec,
        comm: Communicator,
        options: Options,
        outer: Outer,
    ) -> None:
        self._named, self._weights = list(named), weights
        self.anchors = [(name, nn.Parameter(weights.read(p).clone())) for name, p in named]
        self._pairs = [(p, a) for (_, p), (_, a) in zip(named, self.anchors, strict=True)]
        self.averager = GradientAverager(self.anchors, codec, comm=comm, **vars(options))
        self.optimizer = outer([anchor for _, anchor in self.anchors])
        self.syncs, self.progress = 0, ""
        self.due: int | None = None
        self.held = False
        me = weakref.ref(self)
        engine = self.averager._engine
        engine.replicas.more = lambda: mine.replicated() if (mine := me()) is not None else []
        engine.replicas.watched = True

    # ---- a sync ----------------------------------------------------------------------------------

    def replicated(self) -> list[tuple[str, object]]:
        """Return (name, value) pairs that must be equal on all ranks, besides the anchors."""
        named: list[tuple[str, object]] = [("progress", self.progress), ("syncs", self.syncs)]
        for number, group in enumerate(self.optimizer.param_groups):
            options = {key: group[key] for key in sorted(group) if key != "params"}
            named.append((f"options of outer group {number}", options))
        for name, anchor in self.anchors:
            state = self.optimizer.state.get(anchor, {})
            named += [(f"outer {key} of {name}", value) for key, value in sorted(state.items())]
            if self.held and anchor.grad is not None:
                named.append((f"average of {name}", anchor.grad))
        return named

    def send(self, *, due: int | None, progress: str, share: float = 1.0) -> None:
        """Compute pseudo-gradients and average them, or start to.

        Args:
            due, progress: see the attributes; with `due` None wait for the averages.
            share: factor of the pseudo-gradients.

        Raises:
            ValueError: a parameter has another shape than at the last sync, or is no longer
                trained; nothing was sent.
            PeerMismatch, PeerLost, CorruptPayload: see `gradcomp.GradientAverager.average`.
        """
        for (name, parameter), (_, anchor) in zip(self._named, self.anchors, strict=True):
            if parameter.requires_grad and parameter.shape == anchor.shape:
                continue
            shape = tuple(parameter.shape)
            now = f"has shape {shape}" if parameter.requires_grad else "is not trained"
            raise ValueError(
                f"{name} {now}; at the last sync it was trained with shape {tuple(anchor.shape)}"
            )
        self.progress = progress
        for parameter, anchor in self._pairs:
            anchor.grad = self._change(parameter, anchor)
            if share != 1.0:
                anchor.grad.mul_(share)
        if due is None:
            self.averager.average()
        else:
            self.averager.average_delayed()
        self.due, self.held = due, due is None

    @torch.no_grad()
    def _change(self, parameter: Tensor, anchor: Tensor) -> Tensor:
        """Return the change since the last sync, anchor - parameter, float32 on the CPU."""
        return self._weights.written(parameter, anchor) - self._weights.read(parameter)

    def arrive(self) -> None:
        """Wait for the averages of an exchange in progress, if there is one."""
        if self.due is not None and not self.held:
            try:
                self.held = self.averager.flush()
            except Exception:  # after Ctrl-C it is still under way: wait again
                self.drop()
                raise

    def apply(self, alpha: float) -> None:
        """Update the anchors with the averages, and set parameters to alpha * parameter + (1 -
        alpha) * anchor. Waits for the averages.

        Raises:
            NotFinite: a pseudo-gradient of some rank is not finite; anchors, outer state and
                residuals are unchanged.
            PeerMismatch, PeerLost, CorruptPayload: of the exchange.
        """
        self.arrive()
        if not self.is_finite():
            self.drop()
            raise NotFinite(self.not_finite())
        try:
            self.optimizer.step()
        finally:
            self.drop()
        self.syncs += 1
        # after 1, 2, 4, ... syncs compare anchors: options that are not compared show up there
        if self.syncs & (self.syncs - 1) == 0:
            self.averager._engine.replicas.is_due = True
        self.restore(alpha)

    def is_finite(self) -> bool:
        """Whether all averages are there, and finite."""
        grads = [anchor.grad for _, anchor in self.anchors]
        return all(grad is not None and of(grad.device).are_finite(grad) for grad in grads)

    def not_finite(self) -> list[str]:
        """Return the names of this rank's parameters that are not finite."""
        return [name for name, p in self._named if not torch.isfinite(self._weights.read(p)).all()]

    def drop(self) -> None:
        """Free pseudo-gradients, and averages that were received."""
        self.due, self.held = None, False
        for _, anchor in self.anchors:
            anchor.grad = None

    @torch.no_grad()
    def restore(self, alpha: float = 0.0) -> None:
        """Set parameters to alpha * parameter + (1 - alpha) * anchor."""
        for parameter, anchor in self._pairs:
            weight = anchor.detach()
            if alpha:
                weight = torch.lerp(weight, self._weights.read(parameter), alpha)
            self._weights.write(parameter, weight)

    @torch.no_grad()
    def is_at_anchors(self) -> bool:
        """Whether the parameters are bitwise equal to the anchors, in their dtype."""
        return all(
            torch.equal(self._weights.read(p), self._weights.written(p, anchor))
            for p, anchor in self._pairs
        )

    @torch.no_grad()
    def anchor_here(self) -> None:
        """Set the anchors to the parameters, which must be equal on all ranks."""
        for parameter, anchor in self._pairs:
            anchor.copy_(self._weights.read(parameter))

    # ---- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return this rank's state, for a bitwise equal continuation. No exchange may be in
        progress.
        """
        arrived = self.anchors if self.due is not None else []
        return {
            **self._replicated_state(),
            "averages": {name: a.grad.clone() for name, a in arrived if a.grad is not None},
            "averager": self.averager.state_dict(),
        }

    def _replicated_state(self) -> dict[str, Any]:
        return {
            "anchors": {name: anchor.detach().clone() for name, anchor in self.anchors},
            "outer": copy.deepcopy(self.optimizer.state_dict()),
            "syncs": self.syncs,
        }

    def shared_state(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks, for a rank that comes or was away."""
        return {**self._replicated_state(), "moments": self.averager._engine.shared_state()}

    @torch.no_grad()
    def take_shared(self, state: Any, *, keeps_change: bool) -> None:
        """Load another rank's `shared_state`, and set the parameters to the new anchors, plus this
        rank's change since its last sync if `keeps_change`. Residuals of this rank stay.

        Raises:
            ValueError: the state does not fit.
        """
        check_mapping(state, "another site's state", ("moments",))
        whole = {**state, "averages": {}, "averager": None}
        self.check(whole)
        changes = [self._change(p, anchor) for p, anchor in self._pairs]
        self.averager._engine.take_shared(state["moments"], keeps_residuals=True)
        self.load(whole)
        for (parameter, anchor), change in zip(self._pairs, changes, strict=True):
            weight = anchor.detach()
            self._weights.write(parameter, weight - change if keeps_change else weight)

    def check(self, state: Any) -> None:
        """Raise ValueError unless a state fits these parameters and this outer optimizer, and is
        finite.
        """
        check_fragment(state, {name: anchor.shape for name, anchor in self.anchors})
        check_outer(state["outer"], self.optimizer)

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load a state that `check` has accepted; the averager's part must be loaded before, and
        `due` set afterwards if there are averages.
        """
        for name, anchor in self.anchors:
            anchor.copy_(state["anchors"][name])
            average = state["averages"].get(name)
            anchor.grad = None if average is None else average.to(anchor.device, copy=True)
        self.optimizer.load_state_dict(copy.deepcopy(state["outer"]))
        self.due, self.held = None, bool(state["averages"])
        self.syncs = state["syncs"]


def cut(numels: Iterable[int], fragments: int) -> list[range]:
    """Cut consecutive tensors into fragments of similar size; return the positions of each.

    Raises:
        ValueError: more fragments than tensors.
    """
    sizes = list(numels)
    if fragments > len(sizes):
        raise ValueError(
            f"{fragments} fragments of {len(sizes)} tensors: a fragment has at least one"
        )
    before = [0, *accumulate(sizes)]  # elements before each tensor, and in all of them
    out, start = [], 0
    for left in reversed(range(fragments)):  # fragments after this one
        goal = before[-1] * (fragments - left) / fragments
        end = start + 1
        while end < len(sizes) - left and (not left or before[end] + sizes[end] / 2 <= goal):
            end += 1
        out.append(range(start, end))
        start = end
    return out
