"""What all split optimizers share: state that exists from the start, exact checkpoints, and steps
through one C kernel.

A step first looks at every gradient and raises before anything is changed. Then each optimizer
writes one rule for each parameter, and `run_rules` has the kernel do the arithmetic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcomp.errors import GradcompError, UnsupportedTensor
from gradcomp.optim.checkpoint import CHECKSUM, check_saved
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry, PackedGradients, count, number_steps
from gradcomp.optim.placeholder import Placeholder
from gradcomp.optim.sparse import check_sparse, run_sparse
from gradcomp.optim.split import (
    SplitParameters,
    adopt,
    check_free,
    check_parameter,
    check_rounding,
    new_state,
    new_trail,
    waiting_rounding,
    waiting_trail,
)
from gradcomp.optim.tracking import Tracking
from gradcomp.optim.trails import TrailKeeper

LOADED = "it was not loaded from the checkpoint that the optimizer was loaded from"


_steps: list[Callable[[Any, Any], Any]] = []  # `SplitOptimizer._take_step`, kept from Dynamo


def _prepare_steps() -> None:
    """Keep steps from Dynamo, which cannot trace a C kernel; not at import, since it takes a
    second to import Dynamo.
    """
    if not _steps:
        _steps.append(torch.compiler.disable(SplitOptimizer._take_step))  # type: ignore[no-untyped-call]


class SplitOptimizer(TrailKeeper):
    """Base of the split optimizers; not to be used itself.

    bf16 parameters are tops whose trails are in ``state[p]["trail"]``; fp32 parameters are updated
    as they are. All state is made by the constructor, and a step that is not taken changes nothing.
    """

    moments: ClassVar[tuple[str, ...]] = ()  # names of fp32 state, in the order of gc_target
    counters: ClassVar[tuple[str, ...]] = ()  # names of single numbers kept beside "step"
    takes_sparse: ClassVar[bool] = False
    takes_packed: bool = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._families: list[SplitParameters] = []  # of which trails were adopted
        self._tracking = Tracking()
        self._packed: list[PackedGradients] = []
        self._adopting: list[nn.Parameter] | None = []
        self.check_options(defaults)
        super().__init__(params, defaults)
        _prepare_steps()
        adopted, self._adopting = self._adopting, None
        adopt(self, adopted)

    # ---- what an optimizer says
    # --------------------------------------------------------------------------------------

    @abstractmethod
    def check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError for hyperparameters out of their range."""

    @abstractmethod
    def run(self, entries: Sequence[Entry]) -> None:
        """Update the parameters; their steps have been counted."""

    def wanted_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the fp32 state that a group needs."""
        return self.moments

    def initial_moment(self, name: str, group: dict[str, Any]) -> float:
        """Return the value that state starts from."""
        return 0.0

    def amend(self, entries: Sequence[Entry], rules: NDArray[Any]) -> None:
        """Change the rules of a step: for what derives from an optimizer."""

    def taken_over(self, name: str, p: Tensor, step: Tensor) -> Tensor | None:
        """Return state for a parameter that comes from the optimizer that this one derives from,
        after `step` steps.

        Args:
            name: of a counter (one element) or a moment that the state is without.

        Returns:
            None: a state without it is refused.
        """
        return None

    # ---- torch.optim.Optimizer
    # ---------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what pickling, copying and loading keep; the rest is found again as it is
        needed.
        """
        super().__setstate__(state)
        _prepare_steps()
        for name, empty in (
            ("_families", []),
            ("_tracking", Tracking()),
            ("_packed", []),
            ("_adopting", None),
        ):
            if name not in self.__dict__:
                setattr(self, name, empty)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tracking": self._tracking}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; as in torch, and the trails of split parameters
        are adopted.

        Raises:
            UnsupportedTensor: a parameter of another dtype, device or layout; nothing is changed
                then.
            ValueError: an option out of its range, or parameters split with different roundings in
                one group.
        """
        params = param_group.get("params", ())
        if isinstance(params, (set, frozenset)):
            raise TypeError(
                "parameters must come in an order that is the same in every run: a list, not a set"
            )
        members = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in members]
        for place, p in enumerate(tensors):
            if isinstance(p, Tensor):
                check_parameter(p, f"parameter {place} of the group")
                check_free(p, f"parameter {place} of the group")
        if len({id(p) for p in tensors}) < len(tensors):
            raise ValueError("a group holds the same parameter twice: it would be updated twice")
        group = {**self.defaults, **param_group, "params": members}
        self.check_options(group)
        check_rounding(group.get("rounding", "truncate"))
        roundings = {
            r for p in tensors if isinstance(p, nn.Parameter) for r in [waiting_rounding(p)] if r
        }
        if len(roundings) > 1:
            raise ValueError(
                f"one group holds parameters split with rounding {sorted(roundings)}: make a group"
                " for each"
            )
        super().add_param_group(param_group | {"params": members})
        added = self.param_groups[-1]
        added["rounding"] = roundings.pop() if roundings else added.get("rounding", "truncate")
        for p in added["params"]:
            self._begin(p, added)
        if self._adopting is None:
            adopt(self, added["params"])
        else:  # a later group may still be refused, and then nobody has adopted anything
            self._adopting += added["params"]

    def _begin(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Make a parameter's state."""
        state = self.state[p]
        for name in ("step", *self.counters):
            state[name] = torch.zeros(())
        self._tracking.begin(p)
        if p.dtype == torch.bfloat16:
            found = waiting_trail(p)
            if found is None:
                state["trail"] = new_trail(p)
            else:
                state["trail"], wanted, family = found
                self._tracking.expect(p, wanted, "it was changed after split_parameters")
                if family not in self._families:
                    self._families.append(family)
            state[CHECKSUM] = torch.zeros((), dtype=torch.int64)  # written by state_dict alone
        for name in self.wanted_moments(group):
            state[name] = self.new_moment(p, name, group)

    def new_moment(self, p: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        """Return fp32 state of a parameter before its first step."""
        return new_state(
            p, torch.float32, 2 + self.moments.index(name), self.initial_moment(name, group)
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient; `torch.compile` runs it as it is.

        Args:
            closure: computes the loss and gradients again, and returns the loss.

        Returns:
            What `closure` returned, else None.

        Raises:
            UnsupportedTensor: a gradient that is sparse, or of a dtype other than float32 and
                bfloat16.
            ValueError: a gradient of another shape; parameters that were replaced or do not belong
                to their trails; trails that no optimizer adopted.
            GradcompError: placeholders whose packed gradients are gone.
            In all of these nothing has been changed.
        """
        return _steps[0](self, closure)

    @torch.no_grad()
    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for family in self._families:
            if family.waiting:
                raise ValueError(
                    f"no optimizer has the parameters {family.waiting[:3]} that split_parameters"
                    " split: pass all of them to optimizers before the first step"
                )
        self._families = []
        entries, sparse = self._entries()
        for entry in entries:
            self._complete(entry)
        number_steps([*entries, *sparse])
        if entries:
            self.run(entries)
        for entry in sparse:
            run_sparse(self, entry)
        count([*entries, *sparse])
        self._tracking.stepped(e.parameter for e in (*entries, *sparse))
        return loss

    def _entries(self) -> tuple[list[Entry], list[Entry]]:
        """Return what has a dense and what has a sparse gradient, all of it checked."""
        entries, sparse = [], []
        for where, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                name = self.name_of(group, where, place)
                entry = Entry(p, group, self.state[p])
                self._tracking.check(p, entry.state.get("trail"), name)
                packed, position = self._packed_of(p)
                if packed is not None:
                    packed.check(p)
                    entry.packed, entry.position = packed, position
                elif p.grad.layout == torch.strided:
                    entry.gradient = self._check_gradient(p, name)
                else:
                    check_sparse(self, p, group, name)
                    sparse.append(entry)
                    continue
                entries.append(entry)
        return entries, sparse

    def name_of(self, group: dict[str, Any], where: int, place: int) -> str:
        """Return what a message calls a parameter."""
        names = group.get("param_names")
        return f"parameter {names[place]!r}" if names else f"parameter {place} of group {where}"

    def _check_gradient(self, p: nn.Parameter, name: str) -> Tensor:
        gradient = p.grad
        assert gradient is not None
        if gradient.dtype not in GRADIENT_DTYPES or gradient.device != p.device:
            raise UnsupportedTensor(
                f"the gradient of {name} is {gradient.dtype} on {gradient.device}; float32 or"
                " bfloat16"
            )
        if gradient.shape != p.shape:
            raise ValueError(
                f"the gradient of {name} has shape {tuple(gradient.shape)}, it {tuple(p.shape)}"
            )
        if isinstance(gradient, Placeholder):
            raise GradcompError(
                f"the packed gradient of {name} is gone: it was left from a backward before, or"
                " from one that failed"
            )
        if gradient.is_neg():
            gradient = gradient.resolve_neg()
        if gradient.stride() != p.stride():
            gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
        return gradient.detach()

    def _complete(self, entry: Entry) -> None:
        """Make state that an option that was changed asks for."""
        for name in self.wanted_moments(entry.group):
            if name not in entry.state:
                entry.state[name] = self.new_moment(entry.parameter, name, entry.group)
                entry.is_first = True

    # ---- packed gradients
    # --------------------------------------------------------------------------------------------

    def attach_packed(self, packed: PackedGradients) -> None:
        """Take gradients from there as well; `gradcomp.ddp.register` calls it."""
        self._packed.append(packed)

    def detach_packed(self, packed: PackedGradients) -> None:
        """The opposite of `attach_packed`."""
        self._packed = [p for p in self._packed if p is not packed]

    def _packed_of(self, p: Tensor) -> tuple[PackedGradients | None, int]:
        for packed in self._packed:
            position = packed.position(p)
            if position is not None:
                return packed, position
        return None, 0

    # ---- checkpoints
    # ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state, as in torch; beside every trail stands a checksum of the top that it
        belongs to.
        """
        saved = super().state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for index, state in saved["state"].items():
            if isinstance(state, dict) and "trail" in state:  # hooks may add what they like
                saved["state"][index] = state | {
                    CHECKSUM: torch.tensor(self._tracking.checksum(params[index]))
                }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state exactly, into the tensors that are there; torch's own would cast trails and
        moments to bf16.

        State of torch's optimizer of the same name is taken as well (its weights' trails stay as
        they are). The model's weights are to be loaded too, before or after: the next step checks
        that they are those the trails belong to.

        Raises:
            ValueError: state of another optimizer, of other groups or shapes, or of which a part is
                missing; nothing is changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        groups, loads = check_saved(self, state_dict)
        for group, saved in zip(self.param_groups, groups, strict=True):
            kept = {k: group[k] for k in ("params", "rounding", "param_names") if k in group}
            group.clear()
            group.update(kept | saved)
        indices = {index for group in state_dict["param_groups"] for index in group["params"]}
        self.state.update(
            {k: deepcopy(v) for k, v in state_dict["state"].items() if k not in indices}
        )
        with torch.no_grad():
            for p, tensors, wanted in loads:
                state = self.state[p]
                for name, tensor in tensors.items():
                    if name not in state:  # momentum that the saved options turn on
                        state[name] = self.new_moment(p, name, {**self.defaults})
                    state[name].copy_(tensor)
                for name in set(self.moments) - tensors.keys() if tensors else ():
                    state.pop(name, None)
                if wanted is not None:
                    self._tracking.expect(p, wanted, LOADED)
                elif "trail" in tensors:
                    self._tracking.trust(p)
                else:
                    self._tracking.begin(p)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
