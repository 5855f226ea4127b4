"""Fused updates: a split optimizer decodes the payloads of a DDP hook in its own step.

After a backward pass `p.grad` is a placeholder, NaN in every element and with the memory of one.
Code that reads gradients (a scaler, torch's clipping) gets NaN. Code that writes to them raises,
except that gradients may be zeroed. `optimizer.step()` reads the packed averages from
`FusedGradients`, and multiplies them by the factor of `FusedGradients.clip`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradcomp import kernels
from gradcomp.engine.layouts import Members
from gradcomp.engine.optimizers import name_of
from gradcomp.engine.step import Engine
from gradcomp.errors import GradcompError, PeerMismatch
from gradcomp.exchange.agree import Named
from gradcomp.exchange.averages import Averages
from gradcomp.kernels.rules import NO_RULE, RULE, Flag, Kind
from gradcomp.optim import SplitOptimizer
from gradcomp.optim.entries import whole_rows
from gradcomp.optim.placeholder import Placeholder
from gradcomp.payload.order import storage_view

CLIP_EPS = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def why_not_fused(optimizers: Sequence[Any], engine: Engine, *, has_scaler: bool) -> str:
    """Return why optimizers cannot read gradients from payloads; "" if one can, or without any."""
    if not optimizers:
        return ""
    if len(optimizers) > 1:
        return f"{name_of(optimizers)} are several optimizers"
    (optimizer,) = optimizers
    if not isinstance(optimizer, SplitOptimizer):
        return f"{type(optimizer).__name__} is no split optimizer"
    if engine.comm.world_size == 1:
        return "world size 1"
    if has_scaler:
        return "a grad_scaler needs the gradients"
    if not optimizer.takes_packed:
        return f"{type(optimizer).__name__} with these options needs the gradients twice"
    trained = {p for group in optimizer.param_groups for p in group["params"]}
    device = engine.layouts.device
    if any(p.requires_grad and p.device != device for _, p in engine.named):
        return "the weights are on an accelerator"
    left = [name for name, p in engine.named if p.requires_grad and p not in trained]
    return f"{left[0]!r} is not in the optimizer" if left else ""


def replicated(optimizers: Sequence[SplitOptimizer], engine: Engine) -> Named:
    """Return (name, tensor) pairs of optimizer state, which must be equal on all ranks."""
    return [
        (f"{key} of {name}", value)
        for optimizer in optimizers
        for name, p in engine.named
        if p in optimizer.state
        for key, value in optimizer.state[p].items()
        if isinstance(value, Tensor)
    ]


def agree_on_optimizers(
    optimizers: Sequence[SplitOptimizer], engine: Engine, not_fused: str
) -> None:
    """Raise PeerMismatch on every rank if optimizers or `not_fused` differ. Collective."""
    kind = name_of(optimizers)
    text = f"{kind}, {f'not fused: {not_fused}' if not_fused else 'fused'}"
    try:
        engine.replicas.agree_on({"optimizer": text}, replicated(optimizers, engine))
    except PeerMismatch as found:
        if found.field in ("wire_version", "call", "optimizer"):
            raise
        # the values of the state differ, or the names of its tensors
        expected, got = f"{found.field}: {found.expected}", f"{found.field}: {found.got}"
        raise PeerMismatch("optimizer", found.rank, expected, got, found.first) from None


class FusedGradients:
    """Packed averages of the last backward pass, while `p.grad` is a placeholder."""

    def __init__(self, engine: Engine, optimizer: SplitOptimizer) -> None:
        self._engine, self._optimizer = engine, optimizer
        self.parameter_count = len(engine.named)
        self._packed: Sequence[tuple[Averages, Members]] = []
        self._placeholders: dict[Tensor, tuple[Placeholder, int]] = {}  # with positions
        self._factor = 1.0  # clipping factor of the packed averages
        self._adds_up = False  # whether gradients existed before the last forward pass
        optimizer.attach_packed(self)

    def place(self, packed: Sequence[tuple[Averages, Members]]) -> None:
        """Replace local gradients in `p.grad` by placeholders for their packed averages."""
        self._packed = packed
        for _, members in packed:
            for position, _ in members:
                p = self._engine.named[position][1]
                if p.grad is not None and p.numel():
                    self._placeholders[p] = Placeholder.stand_for(p), position

    def drop(self) -> None:
        """Forget the averages of the last backward pass: their payloads will be overwritten."""
        self._packed, self._placeholders, self._factor = [], {}, 1.0

    def fail(self) -> None:
        """Replace all local gradients by placeholders after a failed exchange: a step raises."""
        self.drop()
        for _, p in self._engine.named:
            if p.grad is not None and p.numel():
                Placeholder.stand_for(p)

    def before_forward(self) -> None:
        """Unpack all packed gradients, since the coming backward pass may add to them."""
        self.materialize()
        self._adds_up = any(p.grad is not None for _, p in self._engine.named)

    def must_unpack(self, *, finds_unused: bool) -> bool:
        """Return whether to unpack now: unused parameters keep gradients, unknown later."""
        return finds_unused and self._adds_up

    def position(self, parameter: Tensor) -> int | None:
        """Return a parameter's position in the model, or None unless `grad` is its placeholder."""
        placeholder, position = self._placeholders.get(parameter, (None, 0))
        return position if placeholder is not None and parameter.grad is placeholder else None

    def check(self, parameter: Tensor) -> None:
        """Raise GradcompError if a parameter's placeholder was written to."""
        placeholder, position = self._placeholders[parameter]
        if not placeholder.intact:
            raise GradcompError(
                f"the gradient of {self._engine.named[position][0]!r} was written to while it was"
                " still packed: call materialize_gradients() of gradcomp's state before you scale"
                " or mask gradients, and its clip_grad_norm_() to clip them; to zero a whole one"
                " needs no call"
            )

    def update(self, targets: NDArray[Any], rules: NDArray[Any]) -> None:
        """Run `Kernels.update` on every payload; a target's index is the parameter's position.

        After an error (out of memory) the averages are gone: another step would apply some twice.
        """
        if self._factor != 1.0:
            rules = rules.copy()
            scaled = (rules["flags"] & Flag.PRESCALE) > 0
            rules["prescale"] = np.where(scaled, rules["prescale"], 1.0) * self._factor
            rules["flags"] |= np.uint32(Flag.PRESCALE)
        try:
            for averages, _ in self._packed:
                averages.update(targets, rules)
        except BaseException:
            self.drop()
            raise

    def clip(self, max_norm: float, *, error_if_nonfinite: bool = False) -> float:
        """Clip all gradients to `max_norm`; return their L2 norm before that, rounded to float32.

        Packed gradients are multiplied when the optimizer reads them, others in place. The
        library's kernels compute the norm from payloads and averages, so that it is the same on
        every rank, to the last bit.

        Raises:
            GradcompError: a placeholder was written to.
            RuntimeError: the norm is NaN or Inf and `error_if_nonfinite` is True.
        """
        kernel_set, rules = kernels.of(self._engine.layouts.device), np.zeros(1, RULE)
        targets = kernel_set.targets(gradient=[None] * self.parameter_count)
        targets["rule"], rules["kind"] = NO_RULE, Kind.SQUARES
        written: list[Tensor] = []
        for _, p in self._engine.named:
            position = self.position(p)
            if position is not None:
                self.check(p)
                targets[position]["rule"] = 0
            elif p.grad is not None and p.numel():
                written.append(p.grad)
        packed = math.fsum(averages.squares(targets, rules) for averages, _ in self._packed)
        squares = packed * self._factor**2 + _squares(written, rules)
        norm = float(np.float32(math.sqrt(squares)))
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm}: they are not clipped")
        factor = max_norm / (norm + CLIP_EPS)
        if not factor >= 1.0:  # a NaN factor is applied, as in torch
            self._factor *= factor
            for gradient in written:
                gradient.mul_(factor)
        return norm

    def materialize(self) -> None:
        """Replace all placeholders by averaged gradients.

        Raises:
            GradcompError: a placeholder was written to; none is replaced then.
        """
        for p in self._placeholders:
            if self.position(p) is not None:
                self.check(p)
        for averages, members in self._packed:
            named = [(self._engine.named[position][1], offset) for position, offset in members]
            waiting = [(p, offset) for p, offset in named if self.position(p) is not None]
            if not waiting:
                continue
            placeholder, _ = self._placeholders[waiting[0][0]]
            numel = sum(p.numel() for p, _ in named)
            flat = kernels.of(placeholder.device).empty(numel, placeholder.dtype)
            averages.decode(flat)
            if self._factor != 1.0:
                flat.mul_(self._factor)
            for p, offset in waiting:
                p.grad = storage_view(flat[offset : offset + p.numel()], p)
                del self._placeholders[p]
        self._factor = 1.0

    def close(self) -> None:
        """Forget the averages and detach from the optimizer."""
        self.drop()
        self._optimizer.detach_packed(self)


def _squares(gradients: Sequence[Tensor], rules: NDArray[Any]) -> float:
    """Return the sum of squares of float32 or bfloat16 tensors; `rules` has `Kind.SQUARES`."""
    if not gradients:
        return 0.0
    dense = [gradient.contiguous() for gradient in gradients]
    kernel_set = kernels.of(dense[0].device)
    targets = kernel_set.targets(gradient=dense)
    targets["rule"] = 0
    table = whole_rows(tuple(gradient.numel() for gradient in dense))
    norms = np.zeros(2 * len(table))
    kernel_set.update(table, targets, rules, norms=norms)
    return math.fsum(norms)
