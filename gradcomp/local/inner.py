"""Inner steps: the parameters and optimizers that take part, weights as these keep them, and when
a fragment is due.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.engine.buckets import check_optimizer
from gradcomp.engine.watch import Mine, before_any_step
from gradcomp.errors import GradcompError, UnsupportedTensor

COUNTED = 16  # calls of DiLoCo.step that are compared with steps at a time
SyncEvery = int | Callable[[int], int]


class Trained:
    """A model's trained parameters as they are now, which later ones are compared with.

    Args:
        model: a plain module.

    Attributes:
        named: (name, parameter).

    Raises:
        TypeError: a DDP model, or no module.
        UnsupportedTensor: a parameter that is not float32, bfloat16 or float16.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "DDP averages gradients every step: pass the module that it wraps, model.module"
            )
        self._model = model
        self.named = self._now()
        for name, p in self.named:
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UnsupportedTensor(
                    f"{name} is {p.dtype}: anchors are fp32, of float32, bfloat16 or float16"
                )
        self._known = {name: id(p) for name, p in self.named}

    def _now(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def check(self, called: str) -> None:
        """Raise ValueError if the model trains parameters that take no part in the syncs of what
        is `called` so.
        """
        for name, p in self._now():
            if self._known.get(name) != id(p):
                what = "was replaced" if name in self._known else "was not trained, or not there"
                raise ValueError(
                    f"{name} {what} when this {called} was made, and is in no sync: make it anew"
                )


class Inner:
    """The optimizer of a model's inner steps, or several that share its parameters out, as Muon and
    AdamW do.

    Args:
        given: one optimizer or a sequence of them.
        parameters: of the model.

    Attributes:
        steps: that all of them have made since `watch`, in any order.

    Raises:
        ValueError: no optimizer, one twice, or one that updates none of the parameters.
    """

    def __init__(
        self,
        given: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        parameters: Iterable[Tensor],
    ) -> None:
        self._optimizers = list(given) if isinstance(given, Sequence) else [given]
        known = list(parameters)
        self._mine = Mine(known)
        if len({id(one) for one in self._optimizers}) < max(1, len(self._optimizers)):
            raise ValueError(
                f"inner_optimizer must be an optimizer or several different ones, got {given!r}"
            )
        for one in self._optimizers:
            check_optimizer(one, known)
        self._stepped: set[int] = set()
        self._inside: Any = None
        self._then: Callable[[], None] | None = None
        self._hooked = [
            found for one in self._optimizers if (found := _with_hooks(one)) is not None
        ]
        self._is_counted = len(self._hooked) == len(self._optimizers)
        self._calls = self._before_calls = self.steps = 0
        self._is_warned = False
        self.weights = Weights(self._optimizers)

    def before_step(self, call: Callable[..., None]) -> list[Any]:
        """Have `call` called before every step of each, with its arguments; return what removes
        that.
        """
        return [one.register_step_pre_hook(call) for one in self._hooked]

    def watch(self) -> list[Any]:
        """Count steps, and raise before one of another optimizer on these parameters; return
        what ends that.
        """
        if not self._is_counted:
            return []
        hooks = [one.register_step_pre_hook(self._begins) for one in self._hooked]
        hooks += [one.register_step_post_hook(self._ended) for one in self._hooked]
        return [*hooks, before_any_step(self._mine, self._refuse)]

    @property
    def then(self) -> Callable[[], None] | None:
        """What is called after each step of all."""
        return self._then

    @then.setter
    def then(self, call: Callable[[], None] | None) -> None:
        if call is not None and not self._is_counted:
            kinds = ", ".join(
                sorted({type(one).__name__ for one in self._optimizers if _with_hooks(one) is None})
            )
            raise TypeError(
                f"steps of {kinds} cannot be counted, since it takes no hooks: call step() after"
                " each of them, without a with block"
            )
        self._then = call

    def count_call(self, name: str) -> None:
        """Count a call of ``name.step()``; warn once if there are about twice as many calls as
        inner steps.
        """
        self._calls, self._inside = self._calls + 1, None  # a step that raised has not ended
        if self._calls < COUNTED or not self._is_counted:
            return
        made, self._before_calls = self.steps - self._before_calls, self.steps
        if 2 * made <= COUNTED and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"{name}.step() was called {COUNTED} times while the inner optimizer stepped {made}"
                " times: call it after optimizer.step() and not after every minibatch, or H counts"
                " minibatches, and syncs fall between those whose gradients add up",
                stacklevel=3,
            )
        self._calls = 0

    def _begins(self, optimizer: Any, *_: Any) -> None:
        self._inside = optimizer

    def _ended(self, optimizer: Any, *_: Any) -> None:
        self._inside = None
        self._stepped.add(id(optimizer))
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self.steps += 1
            if self._then is not None:
                self._then()

    def _refuse(self, optimizer: Any, *_: Any) -> None:
        # one inside of ours is a part of it
        if self._inside is None and not any(_is_around(optimizer, one) for one in self._hooked):
            raise GradcompError(
                f"a step of an optimizer that local steps do not know ({type(optimizer).__name__})"
                " on their parameters: it would not be counted, nor are split weights its own."
                " Make DiLoCo anew with the optimizer that trains, and load the old one's"
                " state_dict(); or close() it, if it is over"
            )


def _with_hooks(optimizer: Any) -> Any:
    """Return what an optimizer's hooks are registered on: itself, or what a wrapper that is not
    one of torch's has inside; None: nothing.
    """
    if hasattr(optimizer, "_optimizer_step_pre_hooks"):
        return optimizer
    return next(
        (one for one in vars(optimizer).values() if hasattr(one, "_optimizer_step_pre_hooks")), None
    )


def _is_around(optimizer: Any, one: Any) -> bool:
    """Tell whether a step of `optimizer` is one of `one`: it is that, shares its hooks as a
    framework's wrapper does, or has it inside as SAM has.
    """
    return (
        optimizer is one
        or getattr(optimizer, "_optimizer_step_pre_hooks", None) is one._optimizer_step_pre_hooks
        or any(value is one for value in vars(optimizer).values())
    )


class Weights:
    """A model's weights in fp32, whatever keeps them: plain tensors on any device, or an optimizer
    that keeps the lower halves.

    Args:
        optimizers: of the inner steps.
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
        """Return the fp32 weight on the CPU; it may be the parameter's own memory."""
        keeper = self._keepers.get(id(parameter))
        weight = parameter.detach() if keeper is None else keeper.fp32(parameter)
        if weight.is_cuda:  # memory that a GPU writes to by itself
            weight = torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)
        return weight.to("cpu", torch.float32)

    def written(self, parameter: Tensor, weight: Tensor) -> Tensor:
        """Return what `write` makes of an fp32 weight, in fp32: rounded as the parameter is. The
        anchor's own bits below that are no change.
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
    """Counts inner steps and returns the fragments that are due: in rounds of H inner steps every
    fragment is exchanged once.

    Fragment k of K begins its exchange ceil((k + 1) H / K) steps into a round, so that turns lie H
    / K apart and the last one ends the round.

    Args:
        sync_every: H, inner steps of a round; or a function of the round's number that returns it.
        fragments: K.

    Attributes:
        round: number of the round.
        done: inner steps of it that are done.

    Raises:
        ValueError: no positive integer, or fewer steps than fragments.
    """

    def __init__(self, sync_every: SyncEvery, fragments: int) -> None:
        if isinstance(fragments, bool) or not isinstance(fragments, int) or fragments < 1:
            raise ValueError(f"fragments must be an integer of at least 1, got {fragments!r}")
        self._sync_every, self.fragments = sync_every, fragments
        self.round = self.done = 0
        self.length(0)

    def length(self, number: int) -> int:
        """Return H of a round.

        Raises:
            ValueError: the function returned no integer of at least the number of fragments.
        """
        found = self._sync_every(number) if callable(self._sync_every) else self._sync_every
        if isinstance(found, bool) or not isinstance(found, int) or found < 1:
            raise ValueError(
                f"sync_every must be a number of inner steps, at least 1, got {found!r} for round"
                f" {number}"
            )
        if found < self.fragments:
            raise ValueError(
                f"sync_every is {found} in round {number}: {self.fragments} fragments need as many"
                " steps to take turns"
            )
        return found

    def take(self) -> list[int]:
        """Count an inner step; return the fragments whose turn it is then."""
        length = self.length(self.round)
        self.done += 1
        due = [
            k for k in range(self.fragments) if self.done == -(-(k + 1) * length // self.fragments)
        ]
        if self.done >= length:
            self.round, self.done = self.round + 1, 0
        return due
