"""The loss scale: its growth rules, the check for overflow, and the agreement between ranks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.arguments import check_integer, check_number
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import MAX_TIMEOUT_S
from gradcomp.errors import GradcompError, PeerMismatch, UnsupportedTensor
from gradcomp.exchange.agree import gather

STATE_VERSION = 1
RULES = ("nnabla", "torch")
SMALLEST, LARGEST = 2.0**-126, 2.0**126  # normal float32 numbers, with their reciprocals
MOST = 2**31 - 1  # largest count
_RECORD = struct.Struct("<iqd")  # overflowed, counter, scale

_Outputs = TypeVar("_Outputs")


class DynamicLossScaler:
    """Loss scaler that unscales and checks gradients, skips overflowed steps and adapts its scale.

    It has the interface of `torch.amp.GradScaler`; pass it as ``grad_scaler=`` to gradcomp, too.
    A step without overflow is a good step. Growth rules:

    - ``rule="nnabla"``: an overflow divides the scale by `factor`. Good step ``interval + 2`` after
      the start or an overflow multiplies it by `factor`, then every ``interval + 1`` good steps do.
    - ``rule="torch"``: as `torch.amp.GradScaler` with ``growth_factor=factor, backoff_factor=1 /
      factor``, bit for bit in float32: it grows after every `interval` good steps in a row.

    All ranks must detect the same overflows. They do if all have the same averaged gradients, as
    after gradcomp or DDP. If ranks update different parameters, pass `comm`: one collective per
    optimizer and step then gathers the results of all ranks.

    Args:
        scale: the first loss scale, positive.
        factor: factor of growth and shrinkage, above 1; scaling by a power of two is exact.
        interval: good steps between growths, at least 1.
        rule: "nnabla" or "torch".
        min_scale, max_scale: bounds of the scale, between 2^-126 and 2^126.
        comm: communicator of the ranks that decide together; never closed here.
        timeout_s: seconds to wait for another rank before PeerLost.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(
        self,
        scale: float = 8.0,
        factor: float = 2.0,
        interval: int = 2000,
        *,
        rule: str = "nnabla",
        min_scale: float = 2.0**-24,
        max_scale: float = 2.0**24,
        comm: Communicator | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if rule not in RULES:
            raise ValueError(f"rule must be one of {RULES}, got {rule!r}")
        check_integer("interval", interval, 1, MOST)
        if comm is not None and not isinstance(comm, Communicator):
            raise ValueError(f"comm must be a gradcomp communicator, got {type(comm).__name__}")
        self._rule, self._interval, self._counter, self._comm = rule, interval, 0, comm
        self._timeout_s = check_number("timeout_s", timeout_s, high=MAX_TIMEOUT_S, ends="(]")
        self._factor = check_number("factor", factor, low=1.0, ends="()")
        low = check_number("min_scale", min_scale, SMALLEST, LARGEST, "[]")
        high = check_number("max_scale", max_scale, low, LARGEST, "[]")
        bounded = low, high, check_number("scale", scale, low, high, "[]")
        self._min, self._max, self._scale = map(_float32, bounded) if rule == "torch" else bounded
        self._skipped = False
        self.forget_step()

    def __repr__(self) -> str:
        counted = f"{self._counter} counted of {self._interval}"
        return f"<DynamicLossScaler scale={self._scale:g}, {self._rule}, {counted}>"

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Multiply a loss, or each loss in a list or tuple, by the scale, in the loss's dtype.

        Raises:
            TypeError: a value that is neither a tensor nor a list or tuple of tensors.
        """
        if isinstance(outputs, Tensor):
            self._scaled = True
            return outputs * self._scale  # type: ignore[return-value]
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        got = type(outputs).__name__
        raise TypeError(f"scale takes a tensor, or a list or tuple of them, got {got}")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale in place, and check them for overflow:
        a value that is NaN or Inf, before or after. Collective with `comm`.

        Call it before clipping, after the backward passes and `GradientAverager.average`; otherwise
        `step` calls it. Every value, of any floating dtype, is multiplied by float32(1 / scale) and
        rounded once. This is exact for a power of two, unless the result is subnormal. Sparse
        gradients are coalesced.

        Raises:
            RuntimeError: no loss was scaled in this step; these gradients are unscaled already, or
                the optimizer has stepped.
            GradcompError: gradients are still packed.
            UnsupportedTensor: a gradient in a compressed sparse layout.
            PeerMismatch: the scales or counters of the ranks of `comm` differ.
            PeerLost: a rank of `comm` did not answer.
        """
        self._check_open(optimizer)
        if optimizer in self._overflowed:
            raise RuntimeError("unscale_() was called for this optimizer already: once is enough")
        grads = list(_gradients(optimizer))
        self._overflowed[optimizer] = True  # nothing may step unless the ranks have agreed
        self._overflowed[optimizer] = self._agree(_unscale(grads, 1.0 / self._scale))

    def step(self, optimizer: Optimizer) -> Any:
        """Call ``optimizer.step()`` with unscaled gradients, or skip it after an overflow.

        Returns:
            The value that ``optimizer.step()`` returns; None for a skipped step.

        Raises:
            RuntimeError: no loss was scaled in this step, or this optimizer has stepped already.
            GradcompError: as for `unscale_`.
        """
        self._check_open(optimizer)
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(optimizer)
        self._skipped = self._overflowed[optimizer]
        return None if self._skipped else optimizer.step()

    def update(self) -> None:
        """End the step: adapt the scale to whether any optimizer's gradients overflowed.

        Raises:
            RuntimeError: no gradient was checked since the last `update`.
        """
        if not self._overflowed:
            raise RuntimeError("update() has no verdict: call unscale_() or step() before it")
        self._adapt(any(self._overflowed.values()))
        self.forget_step()

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether `unscale_` found NaN or Inf for this optimizer, on any rank.

        Raises:
            RuntimeError: this optimizer's gradients have not been checked in this step.
        """
        if optimizer not in self._overflowed:
            text = "overflowed() has no verdict for this optimizer in this step"
            raise RuntimeError(f"{text}: call unscale_() first")
        return self._overflowed[optimizer]

    def forget_step(self) -> None:
        """Start the step again: forget all scaling and checks since the last `update`."""
        self._scaled = False
        self._overflowed: dict[Optimizer, bool] = {}  # of optimizers unscaled in this step
        self._stepped: set[Optimizer] = set()

    def get_scale(self) -> float:
        """Return the current scale, by which the next loss is multiplied."""
        return self._scale

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last `step` skipped its optimizer because of an overflow."""
        return self._skipped

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict of numbers and strings, to resume with the same scales. Call this
        after `update`.
        """
        return {
            "version": STATE_VERSION,
            "rule": self._rule,
            "scale": self._scale,
            "factor": self._factor,
            "min_scale": self._min,
            "max_scale": self._max,
            "interval": self._interval,
            "counter": self._counter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load scale, factor, counter, interval, rule and bounds; forget a step that has begun.

        Raises:
            ValueError: `state` is not a state dict of this class; nothing is changed then.
        """
        odd = state.keys() ^ self.state_dict().keys() if isinstance(state, Mapping) else {"version"}
        if odd:
            what = f"{min(odd, key=str)!r} is missing or unknown"
            raise ValueError(f"no state of a DynamicLossScaler: {what}")
        if state["version"] != STATE_VERSION:
            text = f"this state has version {state['version']!r}, {STATE_VERSION} expected"
            raise ValueError(text)
        given = {name: value for name, value in state.items() if name not in ("version", "counter")}
        other = DynamicLossScaler(**given, comm=self._comm, timeout_s=self._timeout_s)
        beyond = 1 if other._rule == "nnabla" else -1
        check_integer("counter of this state", state["counter"], 0, other._interval + beyond)
        other._counter = state["counter"]
        self.__dict__.update(other.__dict__)

    # ---- parts ----

    def _check_open(self, optimizer: Optimizer) -> None:
        if not self._scaled:
            text = "no loss was scaled in this step"
            raise RuntimeError(f"{text}: call scaler.scale(loss).backward()")
        if optimizer in self._stepped:
            raise RuntimeError("this optimizer has stepped already: call scaler.update() after it")

    def _agree(self, overflowed: bool) -> bool:
        """Return whether any rank's gradients overflowed; collective with a communicator."""
        comm = self._comm
        if comm is None or comm.world_size == 1:
            return overflowed
        mine = _RECORD.pack(overflowed, self._counter, self._scale)
        found = gather(comm, mine, "verdict", self._timeout_s, called="scaler.step()")
        everyone = [_RECORD.unpack(data) for data in found]
        for at, field in ((2, "loss_scale"), (1, "loss_scale_counter")):
            for rank, theirs in enumerate(everyone):
                if theirs[at] != everyone[0][at]:
                    raise PeerMismatch(field, rank, everyone[0][at], theirs[at])
        return any(verdict for verdict, *_ in everyone)

    def _adapt(self, overflowed: bool) -> None:
        """Update scale and counter for one good or overflowed step."""
        good, counter = not overflowed, self._counter
        if self._rule == "nnabla":
            grows = good and counter > self._interval  # compared before this step is counted
            now = self._scale * self._factor if grows else self._scale / self._factor
            self._counter = (0 if grows else counter) + 1 if good else 0
        else:
            grows = good and counter + 1 == self._interval
            now = _float32(self._scale * (self._factor if grows else 1.0 / self._factor))
            self._counter = counter + 1 if good and not grows else 0
        if grows or overflowed:
            self._scale = min(max(now, self._min), self._max)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the values of every gradient of an optimizer; coalesce sparse ones first, in place.

    Raises:
        UnsupportedTensor: a gradient in a compressed sparse layout.
        GradcompError: a gradient that is still packed.
    """
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        grad = parameter.grad
        if grad is None:
            continue
        if grad.layout is torch.sparse_coo:  # the sum of finite duplicates may overflow
            grad = parameter.grad = grad.coalesce()
            grad = grad._values()
        if grad.layout is not torch.strided:
            raise UnsupportedTensor(f"gradient is {grad.layout}: not supported by the loss scaler")
        strides = (s for s, n in zip(grad.stride(), grad.shape, strict=True) if n > 1)
        if grad.numel() > 1 and not any(strides):
            raise GradcompError(
                "gradients are still packed: call state.materialize_gradients() before unscaling"
            )
        yield grad


@torch.no_grad()
def _unscale(grads: Iterable[Tensor], factor: float) -> bool:
    """Multiply tensors by a factor in place; return whether any value is NaN or Inf, before or
    after.

    The kernel of torch's GradScaler checks and multiplies in one pass. It checks each value that it
    reads (a norm would overflow), so results need a second pass if the factor is above 1.
    """
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        places.setdefault((grad.device, grad.dtype), []).append(grad)
    flags = []
    for (device, _), tensors in places.items():
        flags.append(torch.zeros((), device=device))
        for multiplier in (factor, 1.0) if factor > 1 else (factor,):
            on_device = torch.tensor(multiplier, dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, flags[-1], on_device)
    return any(bool(flag) for flag in flags)


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
