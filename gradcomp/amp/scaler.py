"""The loss scale: how it moves, what counts as overflow, how ranks agree on it."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradcomp.amp.arguments import check_count, is_number
from gradcomp.amp.gradients import gradients, unscale
from gradcomp.comm.base import Communicator
from gradcomp.engine.options import MAX_TIMEOUT_S
from gradcomp.errors import PeerMismatch
from gradcomp.exchange.agree import gather

STATE_VERSION = 1
RULES = ("nnabla", "torch")
SMALLEST, LARGEST = (
    2.0**-126,
    2.0**126,
)  # a scale in here and its reciprocal are normal float32 numbers
_RECORD = struct.Struct("<iqd")  # verdict, counter, scale

_Outputs = TypeVar("_Outputs")


class DynamicLossScaler:
    """Scales losses, checks and unscales gradients, leaves out steps that overflowed, adapts the
    scale.

    It takes the place of `torch.amp.GradScaler` in the usual loop, and of a `grad_scaler` for
    gradcomp::

        scaler = gradcomp.amp.DynamicLossScaler()
        state = gradcomp.ddp.register(model, "onebit", grad_scaler=scaler)
        ...
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Good and bad steps move the scale so:

    - ``rule="nnabla"``: an overflow divides it by `factor`. A good step multiplies it by `factor`
      when more than `interval` good steps have been counted: at good step ``interval + 2`` after
      the start or an overflow, then every ``interval + 1``.
    - ``rule="torch"``: as `torch.amp.GradScaler` with ``growth_factor=factor, backoff_factor=1 /
      factor``, bit for bit, the scale rounded to float32: growth after every `interval` good steps
      in a row.

    Ranks must come to the same verdict. They do where all see the same averaged gradients, as after
    gradcomp or DDP, which turn one rank's NaN or Inf into everyone's. Where ranks update different
    parameters pass `comm`: the verdict is then an integer flag gathered from all ranks, once for
    each optimizer and step.

    Args:
        scale: the first loss scale, positive.
        factor: by which the scale grows and shrinks, above 1; a power of two makes scaling exact.
        interval: good steps between growths, at least 1.
        rule: "nnabla" or "torch".
        min_scale, max_scale: the scale stays within; between 2^-126 and 2^126.
        comm: ranks that decide together. Not closed with the scaler.
        timeout_s: seconds after which a silent peer is given up.

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
        if not is_number(factor) or not 1 < factor < math.inf:
            raise ValueError(f"factor must be a finite number above 1, got {factor!r}")
        check_count("interval", interval, 1)
        low = _in_range("min_scale", min_scale, SMALLEST, LARGEST)
        high = _in_range("max_scale", max_scale, low, LARGEST)
        now = _in_range("scale", scale, low, high)
        if comm is not None and not isinstance(comm, Communicator):
            raise ValueError(f"comm must be a gradcomp communicator, got {type(comm).__name__}")
        if not is_number(timeout_s) or not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ValueError(
                f"timeout_s must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}, got"
                f" {timeout_s!r}"
            )
        self._rule, self._factor, self._interval = rule, float(factor), interval
        if rule == "torch":
            low, high, now = (_float32(value) for value in (low, high, now))
        self._min, self._max, self._scale, self._counter = low, high, now, 0
        self._comm, self._timeout_s = comm, timeout_s
        self._skipped = False
        self.forget_step()

    def __repr__(self) -> str:
        return (
            f"<DynamicLossScaler scale={self._scale:g}, {self._rule}, {self._counter} counted of"
            f" {self._interval}>"
        )

    # ---- a step
    # ----------------------------------------------------------------------------------------------

    def scale(self, outputs: _Outputs) -> _Outputs:
        """Return a loss, or a list or tuple of losses, multiplied by the scale; in the loss's
        dtype.

        Raises:
            TypeError: anything else.
        """
        if isinstance(outputs, Tensor):
            self._scaled = True
            return outputs * self._scale  # type: ignore[return-value]
        if isinstance(outputs, (list, tuple)):
            return type(outputs)(self.scale(output) for output in outputs)
        raise TypeError(
            f"scale takes a tensor, or a list or tuple of them, got {type(outputs).__name__}"
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale, in place, and check them; `step` does
        it if you do not.

        Call it to clip: after the backward passes (and `GradientAverager.average`), before `step`.
        With `comm`, collective.

        Every value is multiplied by float32(1 / scale) and rounded once to the gradient's dtype:
        exact for a power of two, unless the result is subnormal. Gradients may be of any floating
        dtype, sparse ones are coalesced first. NaN and Inf count as overflow, before and after; the
        largest finite value does not.

        Raises:
            RuntimeError: nothing was scaled in this step, or these gradients are unscaled already.
            GradcompError: gradients that are still packed.
            UnsupportedTensor: a gradient in a compressed sparse layout.
            PeerMismatch, PeerLost: with `comm`: ranks with different scales or counters, a silent
                rank.
        """
        self._check_open(optimizer)
        if optimizer in self._overflowed:
            raise RuntimeError(
                "unscale_() has been called for this optimizer in this step: once is enough"
            )
        grads = list(gradients(optimizer))
        self._overflowed[optimizer] = (
            True  # until the ranks have agreed: if that fails, nothing may step
        )
        self._overflowed[optimizer] = self._agree(unscale(grads, 1.0 / self._scale))

    def step(self, optimizer: Optimizer) -> Any:
        """Call ``optimizer.step()`` with unscaled gradients; after an overflow call nothing, so
        that nothing changes.

        Returns:
            What the optimizer returns; None for a step left out.

        Raises:
            RuntimeError: nothing was scaled in this step, or this optimizer has stepped already.
            GradcompError: as `unscale_`.
        """
        self._check_open(optimizer)
        if optimizer not in self._overflowed:
            self.unscale_(optimizer)
        self._stepped.add(optimizer)
        self._skipped = self._overflowed[optimizer]
        return None if self._skipped else optimizer.step()

    def update(self) -> None:
        """End the step: adapt the scale to what the checks of all optimizers found.

        Raises:
            RuntimeError: no gradient was checked since the last `update`.
        """
        if not self._overflowed:
            raise RuntimeError(
                "update() without unscale_() or step() before it: there is no verdict to go by"
            )
        self._adapt(any(self._overflowed.values()))
        self.forget_step()

    def overflowed(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients that `unscale_` checked for this optimizer held NaN or Inf
        on any rank.

        Raises:
            RuntimeError: they have not been checked in this step.
        """
        if optimizer not in self._overflowed:
            raise RuntimeError(
                "overflowed() before unscale_(): there is no verdict for this optimizer in this"
                " step"
            )
        return self._overflowed[optimizer]

    def forget_step(self) -> None:
        """Begin the step anew: what was scaled and checked since the last `update` counts no
        more.
        """
        self._scaled = False
        self._overflowed: dict[Optimizer, bool] = {}  # those unscaled in this step
        self._stepped: set[Optimizer] = set()

    def get_scale(self) -> float:
        """Return the scale that the next loss is multiplied by."""
        return self._scale

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last `step` left its optimizer alone because of an overflow."""
        return self._skipped

    # ---- checkpoints
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on with the same scales: numbers and strings only. Take it
        after `update`.
        """
        return {
            "version": STATE_VERSION,
            "rule": self._rule,
            "scale": self._scale,
            "factor": self._factor,
            "interval": self._interval,
            "min_scale": self._min,
            "max_scale": self._max,
            "counter": self._counter,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take scale, counter, rule and bounds from a `state_dict`, and forget a step that is under
        way.

        Raises:
            ValueError: not such a state; nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"a state is a dictionary, got {type(state).__name__}")  # noqa: TRY004
        odd = state.keys() ^ self.state_dict().keys()
        if odd:
            raise ValueError(
                f"this is no state of a DynamicLossScaler: {min(odd, key=str)!r} is missing or"
                " unknown"
            )
        if state["version"] != STATE_VERSION:
            raise ValueError(
                f"this state has version {state['version']!r}, {STATE_VERSION} expected"
            )
        scale, factor, interval, counter = (
            state[key] for key in ("scale", "factor", "interval", "counter")
        )
        bounds = {key: state[key] for key in ("min_scale", "max_scale")}
        other = DynamicLossScaler(scale, factor, interval, rule=state["rule"], **bounds)
        check_count("counter", counter, 0)
        if counter > (interval + 1 if other._rule == "nnabla" else interval - 1):
            raise ValueError(
                f"this state has counter {counter!r}, beyond its interval {interval!r}"
            )
        for name in ("_rule", "_factor", "_interval", "_min", "_max", "_scale"):
            setattr(self, name, getattr(other, name))
        self._counter, self._skipped = counter, False
        self.forget_step()

    # ---- parts
    # ----------------------------------------------------------------------------------------------

    def _check_open(self, optimizer: Optimizer) -> None:
        if not self._scaled:
            raise RuntimeError(
                "no loss was scaled in this step: call scaler.scale(loss).backward() first"
            )
        if optimizer in self._stepped:
            raise RuntimeError(
                "this optimizer has stepped already: call scaler.update() at the end of each step"
            )

    def _agree(self, overflowed: bool) -> bool:
        """Return whether any rank's gradients overflowed."""
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
        """Move scale and counter by one good or bad step."""
        if self._rule == "nnabla":
            if overflowed:
                self._set_scale(self._scale / self._factor)
                self._counter = 0
            else:
                if self._counter > self._interval:
                    self._set_scale(self._scale * self._factor)
                    self._counter = 0
                self._counter += 1
        elif overflowed:
            self._set_scale(_float32(self._scale * (1.0 / self._factor)))
            self._counter = 0
        else:
            self._counter += 1
            if self._counter == self._interval:
                self._set_scale(_float32(self._scale * self._factor))
                self._counter = 0

    def _set_scale(self, scale: float) -> None:
        self._scale = min(max(scale, self._min), self._max)


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not is_number(value) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")
    return float(value)


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
