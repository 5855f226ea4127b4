"""Inner steps: the parameters and optimizers that take part, access to fp32 weights, and the
schedule of fragments.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.arguments import check_integer
from gradcomp.engine.optimizers import check_optimizers, listed
from gradcomp.engine.watch import Mine, before_any_step, weakly
from gradcomp.errors import GradcompError, UnsupportedTensor

COUNTED = 16  # the count of inner steps is checked after so many calls of DiLoCo.step
SyncEvery = int | Callable[[int], int]


Named = list[tuple[str, nn.Parameter]]


def trained_parameters(model: nn.Module) -> Named:
    """Return the trained parameters of a plain module with their names.

    Raises:
        TypeError: a DDP model, or not a module.
        UnsupportedTensor: a parameter that is not float32, bfloat16 or float16.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            "DDP averages gradients every step: pass the module that it wraps, model.module"
        )
    named = _trained(model)
    for name, p in named:
        if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UnsupportedTensor(
                f"{name} is {p.dtype}: anchors are fp32, of float32, bfloat16 or float16"
            )
    return named


def check_trained(model: nn.Module, named: Named, called: str) -> None:
    """Raise ValueError if the model trains parameters that are not in `named`; `called` is the name
    of the class that syncs.
    """
    known = dict(named)
    for name, p in _trained(model):
        if known.get(name) is not p:
            what = "was replaced" if name in known else "was not trained, or not there"
            raise ValueError(
                f"{name} {what} when this {called} was made, and is in no sync: make it anew"
            )


def _trained(model: nn.Module) -> Named:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


class Inner:
    """The optimizers of a model's inner steps: one, or several for different parameters, such as
    Muon and AdamW.

    Args:
        given: one optimizer or a sequence of optimizers.
        parameters: trained parameters of the model.

    Attributes:
        optimizers: the optimizers as a list.
        steps: inner steps since `watch`; all optimizers stepping once, in any order, is one step.
        then: function that is called after each inner step, or None; see `call_after_steps`.
        weights: fp32 access to the parameters.

    Raises:
        TypeError: no optimizer, or something else in its place.
        ValueError: an optimizer twice, or one that updates none of the parameters.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        parameters: Iterable[Tensor],
    ) -> None:
        self.optimizers = listed([] if given is None else given)
        known = list(parameters)
        self._mine = Mine(known)
        check_optimizers(self.optimizers, known)
        self._stepped: set[int] = set()
        self._inside: Any = None
        self.then: Callable[[], None] | None = None
        hooked = [(one, _with_hooks(one)) for one in self.optimizers]
        self._hooked = [found for _, found in hooked if found is not None]
        self._without_hooks = {type(one).__name__ for one, found in hooked if found is None}
        self._calls = self._before_calls = self.steps = 0
        self._is_warned = False
        self.weights = Weights(self.optimizers)

    def before_step(self, call: Callable[..., None]) -> list[Any]:
        """Call `call`, a bound method, with the step's arguments before every step of each
        optimizer, as long as its object is alive; return the hook handles.
        """
        return [one.register_step_pre_hook(weakly(call)) for one in self._hooked]

    def watch(self) -> list[Any]:
        """Count steps, and raise before a step of any other optimizer on these parameters. Returns
        the hook handles; nothing is counted if an optimizer takes no hooks.
        """
        if self._without_hooks:
            return []
        hooks = [one.register_step_pre_hook(self._begins) for one in self._hooked]
        hooks += [one.register_step_post_hook(self._ended) for one in self._hooked]
        return [*hooks, before_any_step(self._mine, self._refuse)]

    def call_after_steps(self, then: Callable[[], None]) -> None:
        """Call `then` after each inner step; TypeError if an optimizer takes no hooks."""
        if self._without_hooks:
            kinds = ", ".join(sorted(self._without_hooks))
            raise TypeError(
                f"steps of {kinds} cannot be counted, since it takes no hooks: call step() after"
                " each of them, without a with block"
            )
        self.then = then

    def count_call(self, name: str) -> None:
        """Count a call of ``name.step()``; warn once if there are twice as many calls as inner
        steps, or more.
        """
        self._calls, self._inside = self._calls + 1, None  # `_ended` does not run if a step raises
        if self._calls < COUNTED or self._without_hooks:
            return
        made, self._before_calls = self.steps - self._before_calls, self.steps
        if 2 * made <= COUNTED and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"{name}.step() was called {COUNTED} times while the inner optimizer stepped {made}"
                " times: call it after optimizer.step() and not after every minibatch; otherwise"
                " sync_every counts minibatches, and a sync can fall inside gradient accumulation",
                stacklevel=3,
            )
        self._calls = 0

    def _begins(self, optimizer: Any, *_: Any) -> None:
        self._inside = optimizer

    def _ended(self, optimizer: Any, *_: Any) -> None:
        self._inside = None
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self.optimizers):
            self._stepped.clear()
            self.steps += 1
            if self.then is not None:
                self.then()

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        # an optimizer may step another one inside its own step
        if self._inside is None and not any(_is_around(optimizer, one) for one in self._hooked):
            raise GradcompError(
                f"optimizer {type(optimizer).__name__} was not passed to DiLoCo but updates its"
                " parameters: make a new DiLoCo with it, and load the old one's state_dict(); or"
                " close() DiLoCo, if its training has ended"
            )


def _with_hooks(optimizer: Any) -> Any:
    """Return the object on which an optimizer's hooks are registered: the optimizer, or the one
    inside a wrapper without hooks; None if there is none.
    """
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    return next(
        (one for one in vars(optimizer).values() if hasattr(one, "_optimizer_step_pre_hooks")), None
    )


def _is_around(optimizer: Any, one: Any) -> bool:
    """Whether a step of `optimizer` is a step of `one`: it is the same object, shares its hooks
    like a framework's wrapper, or has it as an attribute like SAM.
    """
    return (
        optimizer is one
        or getattr(optimizer, "_optimizer_step_pre_hooks", None) is one._optimizer_step_pre_hooks
        or any(value is one for value in vars(optimizer).values())
    )


class Weights:
    """Access to a model's weights in fp32: plain tensors on any device, or split weights, whose
    lower halves are in an optimizer.

    Args:
        optimizers: optimizers of the inner steps.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._keepers = {
            id(p): one
            for one in optimizers
            if hasattr(one, "fp32") and hasattr(one, "set_fp32")
            for group in one.param_groups
            for p in group["params"]
        }

    def read(self, parameter: Tensor) -> Tensor:
        """Return the float32 weight on the CPU; it may share the parameter's memory."""
        keeper = self._keepers.get(id(parameter))
        weight = parameter.detach() if keeper is None else keeper.fp32(parameter)
        if weight.is_cuda:  # pinned memory, to which the GPU copies directly
            weight = torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)
        return weight.to("cpu", torch.float32)

    def written(self, parameter: Tensor, weight: Tensor) -> Tensor:
        """Return an fp32 weight as `read` returns it after `write`: rounded to the parameter's
        dtype. So bits that the anchor has below that precision are not taken for a change.
        """
        return weight if id(parameter) in self._keepers else weight.to(parameter.dtype).float()

    @torch.no_grad()
    def write(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter to an fp32 weight."""
        keeper = self._keepers.get(id(parameter))
        if keeper is None:
            parameter.copy_(weight)
        else:
            keeper.set_fp32(parameter, weight.to(parameter.device))


class Turns:
    """The schedule of fragments: in a round of H inner steps each fragment is exchanged once.

    The exchange of fragment k of K starts after ceil((k + 1) H / K) steps of a round. So exchanges
    are H / K steps apart, and the last one ends the round.

    Args:
        sync_every: H, inner steps of a round; or a function of the round's number that returns H.
        fragments: K, the number of fragments.

    Attributes:
        round: number of the current round.
        done: inner steps so far in this round.

    Raises:
        ValueError: not a positive integer, or fewer steps than fragments.
    """

    def __init__(self, sync_every: SyncEvery, fragments: int) -> None:
        check_integer("fragments", fragments, 1)
        self._sync_every, self.fragments = sync_every, fragments
        self.round = self.done = 0
        self.length(0)

    def length(self, number: int) -> int:
        """Return H of round `number`.

        Raises:
            ValueError: H is not an integer, or less than the number of fragments.
        """
        length = self._sync_every(number) if callable(self._sync_every) else self._sync_every
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(
                f"sync_every must be a number of inner steps, at least 1, got {length!r} for round"
                f" {number}"
            )
        if length < self.fragments:
            raise ValueError(
                f"sync_every is {length} in round {number}: {self.fragments} fragments need as many"
                " steps to take turns"
            )
        return length

    def take(self) -> list[int]:
        """Count an inner step; return the numbers of the fragments that are due after it."""
        length = self.length(self.round)
        self.done += 1
        due = [
            k for k in range(self.fragments) if self.done == -(-(k + 1) * length // self.fragments)
        ]
        if self.done >= length:
            self.round, self.done = self.round + 1, 0
        return due
