"""Updates straight from payloads: what stands between a DDP hook and a split optimizer that it
feeds.

After a backward `p.grad` is a placeholder, NaN in every element and without memory of its own, so
that whatever looks at local gradients (clipping, a scaler) sees NaN and whatever writes to them
raises, except that gradients may be zeroed. `optimizer.step()` asks here for the averages, which
are still packed, and applies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.engine import replicas
from gradcomp.engine.layouts import Members
from gradcomp.engine.step import Engine
from gradcomp.errors import GradcompError, PeerMismatch
from gradcomp.exchange.agree import HIDDEN
from gradcomp.exchange.averages import Averages
from gradcomp.optim import SplitOptimizer
from gradcomp.optim.placeholder import Placeholder
from gradcomp.payload.order import storage_view


def why_not_fused(optimizer: Any, engine: Engine, *, has_scaler: bool) -> str:
    """Return why an optimizer takes its gradients from `p.grad` and not from payloads; "" if it
    takes them from payloads.
    """
    if not isinstance(optimizer, SplitOptimizer):
        return f"{type(optimizer).__name__} is no split optimizer"
    if engine.comm.world_size == 1:
        return "world size 1"
    if has_scaler:
        return "a grad_scaler needs the gradients"
    if not optimizer.takes_packed:
        return f"{type(optimizer).__name__} with these options needs the gradients twice"
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in engine.named if p.requires_grad and p not in trained]
    if left:
        return f"{left[0]!r} is not in the optimizer"
    return ""


def replicated(optimizer: SplitOptimizer, engine: Engine) -> list[tuple[str, object]]:
    """Return the optimizer's state tensors of the model's parameters, which every rank must hold
    alike.
    """
    return [
        (f"{key} of {name}", value)
        for name, p in engine.named
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor)
    ]


def agree_on_optimizer(optimizer: SplitOptimizer, engine: Engine, not_fused: str) -> None:
    """Raise PeerMismatch ("optimizer") on every rank unless class, fusing and state are the same
    on all. Collective.
    """
    named, kind = replicated(optimizer, engine), type(optimizer).__name__
    word = f"{kind}, {f'not fused: {not_fused}' if not_fused else 'fused'}"
    try:
        engine.agree_on(
            {"optimizer": word}, optimizer=(kind, not_fused, replicas.digests(v for _, v in named))
        )
    except PeerMismatch as found:
        if found.field != "optimizer" or not str(found.got).endswith(HIDDEN):
            raise
        try:  # the state differs, or what of it there is
            with engine.comm:
                replicas.compare(
                    engine.comm, named, engine.timeout_s, called="register", phase="fingerprint"
                )
        except PeerMismatch as it:
            texts = [f"{it.field}: {value}" for value in (it.expected, it.got)]
            raise PeerMismatch("optimizer", it.rank, texts[0], texts[1]) from None
        raise


class FusedGradients:
    """The packed averages of the last backward, as `gradcomp.optim.PackedGradients`.

    Args:
        engine: keeps averages packed (`Layouts.keeps_packed`).
        optimizer: asks for them in its steps.
    """

    def __init__(self, engine: Engine, optimizer: SplitOptimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self.parameter_count = len(engine.named)
        self._placeholders: dict[Tensor, tuple[Placeholder, int]] = {}  # and their positions
        self._adds_up = False  # to gradients that were there before the last forward pass
        optimizer.attach_packed(self)

    def place(self) -> None:
        """Put placeholders where DDP has put local gradients; averages that are not packed stay
        in `p.grad`.
        """
        for _, members in self._kept():
            for position, _ in members:
                p = self._engine.named[position][1]
                if p.grad is not None and p.numel():
                    self._placeholders[p] = Placeholder.stand_for(p), position

    def drop(self) -> None:
        """Forget the last backward: its payloads are about to be overwritten."""
        self._placeholders = {}

    def fail(self) -> None:
        """Leave no local gradient after an exchange that failed: a step raises then."""
        self._placeholders = {}
        for _, p in self._engine.named:
            if p.grad is not None and p.numel():
                Placeholder.stand_for(p)

    def before_forward(self) -> None:
        """Before a forward pass that a backward will follow: gradients that it may add to must
        be there.
        """
        self.materialize()
        self._adds_up = any(p.grad is not None for _, p in self._engine.named)

    def must_unpack(self, *, finds_unused: bool) -> bool:
        """Whether this backward's averages must be written: DDP leaves gradients of unused
        parameters as they were, and nobody can tell afterwards which these are.
        """
        return finds_unused and self._adds_up

    def position(self, parameter: Tensor) -> int | None:
        placeholder, position = self._placeholders.get(parameter, (None, 0))
        return position if placeholder is not None and parameter.grad is placeholder else None

    def check(self, parameter: Tensor) -> None:
        placeholder, position = self._placeholders[parameter]
        if not placeholder.intact:
            raise GradcompError(
                f"the gradient of {self._engine.named[position][0]!r} was written to while it was"
                " still packed: call materialize_gradients() of gradcomp's state before you scale,"
                " clip or mask gradients; to zero a whole one needs no call"
            )

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        for averages, _ in self._kept():
            averages.update(targets, rules)

    def materialize(self) -> None:
        """Replace every placeholder that is still there by the averaged gradient.

        Raises:
            GradcompError: a placeholder was written to; nothing is replaced then.
        """
        for p in self._placeholders:
            if self.position(p) is not None:
                self.check(p)
        for averages, members in self._kept():
            named = [(self._engine.named[position][1], offset) for position, offset in members]
            waiting = [(p, offset) for p, offset in named if self.position(p) is not None]
            if not waiting:
                continue
            flat = torch.empty(
                sum(p.numel() for p, _ in named), dtype=self._placeholders[waiting[0][0]][0].dtype
            )
            averages.decode(flat)
            for p, offset in waiting:
                p.grad = storage_view(flat[offset : offset + p.numel()], p)
                del self._placeholders[p]

    def close(self) -> None:
        """Leave the optimizer."""
        self._placeholders = {}
        self._optimizer.detach_packed(self)

    def _kept(self) -> Iterator[tuple[Averages, Members]]:
        for exchange, members in self._engine.submitted:
            if exchange.averages is not None:
                yield exchange.averages, members
