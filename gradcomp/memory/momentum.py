"""Momentum in place of gradients, for optimizers that expect compression: 1-bit Adam and its
relatives.

Adam is not linear in gradients, because it divides by the root of their squares; its momentum is.
So once the divisor stands still a rank may send ``beta * m + (1 - beta) * g``, what its gradient
makes of the momentum m that all ranks share, and the average of what they send is the next m (Tang
et al. 2021, algorithm 1).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from gradcomp.comm import torch_private
from gradcomp.errors import GradcompError
from gradcomp.memory.transform import CHUNK_NUMEL, Transform, Transforming


class MomentumSource(Protocol):
    """An optimizer whose momentum travels.

    Attributes:
        arrived: parameters in whose ``p.grad`` the last exchange leaves an average of momenta, not
            of gradients. Written here.
    """

    arrived: set[Tensor] | None

    def momentum_of(self, parameter: Tensor) -> tuple[Tensor, float] | None:
        """Return a parameter's momentum, float32 with its shape and strides, and its beta; None
        if it has none here.
        """

    def betas(self) -> list[float]:
        """Return every beta of a momentum, sorted."""

    def wants_gradients(self, step: int) -> bool:
        """Whether gradients are averaged as they are at this exchange, in fp32: in a warm-up,
        where the divisor moves.
        """


class Momentum(Transform):
    """Sends momenta where the optimizer expects them, and fp32 gradients at the steps when it wants
    these.

    Args:
        source: the optimizer; its own momentum is read and never written.
        settings: what must be the same on every rank, for messages and checkpoints.
        packs_warm_up: gradients are wanted at the first steps only.
    """

    place = "local"

    def __init__(
        self, source: MomentumSource, settings: Mapping[str, object], *, packs_warm_up: bool = False
    ) -> None:
        self._source, self._settings, self.packs_warm_up = source, dict(settings), packs_warm_up

    def pauses(self, step: int) -> bool:
        return self._source.wants_gradients(step)

    def apply(self, values: Tensor, old: Tensor, new: Tensor) -> None:
        """Not called: there is no state but the optimizer's, which `SharedMomentum.run` reads."""
        raise NotImplementedError

    def options(self) -> Mapping[str, object]:
        return self._settings

    def compared(self) -> str:
        return f"{self!r}, betas {self._source.betas()}"

    def keep(self, numels: Mapping[int, int], tensors: Mapping[int, Tensor]) -> Transforming:
        return SharedMomentum(self, self._source, numels, tensors)


class SharedMomentum(Transforming):
    """`Transforming` whose states are the optimizer's momentum: nothing is kept here, nothing is
    saved.

    Args:
        transform: to which it belongs.
        source: the optimizer.
        numels: elements of the parameters, by position.
        tensors: the parameters themselves.
    """

    def __init__(
        self,
        transform: Transform,
        source: MomentumSource,
        numels: Mapping[int, int],
        tensors: Mapping[int, Tensor],
    ) -> None:
        super().__init__(transform, numels)  # planes that are never written take no memory
        self._source, self._tensors, self._own = source, tensors, set(tensors.values())
        # the gradients of the last exchange
        self._exchanged: dict[Tensor, weakref.ref[Tensor]] = {}
        for tensor in self._own:
            if tensor.is_leaf and tensor.requires_grad:
                check = _adds_up_no_momentum(weakref.ref(tensor), weakref.ref(source))
                tensor.register_hook(check)  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """No momentum of these parameters has arrived yet; those of another model that the
        optimizer trains may have.

        Raises:
            GradcompError: momenta that the exchange before has left in ``p.grad`` are still there.
        """
        arrived = self._source.arrived or set()
        for tensor, before in self._exchanged.items():
            if tensor in arrived and tensor.grad is not None and tensor.grad is before():
                _refuse_momentum(tensor.grad)
        self._exchanged = {t: weakref.ref(t.grad) for t in self._own if t.grad is not None}
        self._source.arrived = arrived - self._own

    def share_of(self, index: int) -> float:
        """Return 1 - beta: what a gradient counts in a momentum, so does what was left out of
        one.
        """
        found = self._source.momentum_of(self._tensors[index])
        return 1.0 if found is None else 1.0 - found[1]

    def run(self, values: Tensor, spans: Iterable[tuple[int, int, int]]) -> bool:
        """Replace gradients by momenta; return True when one is not finite."""
        arrived = self._source.arrived
        assert arrived is not None
        bad = False
        for index, first, numel in spans:
            found = self._source.momentum_of(self._tensors[index])
            if found is None:
                continue
            arrived.add(self._tensors[index])
            momentum, beta = found
            # as gradients lie in buckets
            flat = momentum.as_strided((numel,), (1,), momentum.storage_offset())
            for at in range(0, numel, CHUNK_NUMEL):
                end = min(at + CHUNK_NUMEL, numel)
                bad |= self._mix(values[first + at : first + end], flat[at:end], beta)
        return bad

    def _mix(self, chunk: Tensor, momentum: Tensor, beta: float) -> bool:
        x = chunk if chunk.dtype == torch.float32 else chunk.float()
        x.mul_((1.0 - beta) / self.scale)
        x.add_(momentum * beta)  # with alpha=beta torch rounds once where it can
        if self.scale != 1.0:
            x.mul_(self.scale)
        if x is not chunk:
            chunk.copy_(x)
        return not bool(torch.isfinite(chunk).all())


def _refuse_momentum(grad: Tensor) -> None:
    if bool(grad.any()):
        raise GradcompError(
            "p.grad holds the momentum of the exchange before, which no step has taken, and would"
            " be exchanged once more as if it were a gradient: call optimizer.step() after each"
            " exchange, or zero_grad() to leave a step out; to accumulate gradients, exchange after"
            " the last backward alone (no_sync)"
        )


def _adds_up_no_momentum(
    tensor: weakref.ref[Tensor], source: weakref.ref[MomentumSource]
) -> Callable[[Tensor], None]:
    """Return a hook that raises GradcompError before a backward adds a gradient to a momentum in
    ``p.grad``.
    """

    def check(gradient: Tensor) -> None:
        p, optimizer = tensor(), source()
        if p is None or optimizer is None or not optimizer.arrived or p not in optimizer.arrived:
            return
        if not torch_private.accumulates(p):
            return
        if p.grad is not None:
            _refuse_momentum(p.grad)
        optimizer.arrived.discard(p)  # it was dropped; what comes is a gradient

    return check
