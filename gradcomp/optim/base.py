"""What all split optimizers share: state that exists from the start, exact checkpoints, and steps through one C kernel.

A step first looks at every gradient and raises before anything is changed. Then each optimizer writes one rule for each
parameter, and `run_rules` has the kernel do the arithmetic.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradcomp.errors import GradcompError, UnsupportedTensor
from gradcomp.optim.checkpoint import CHECKSUM, check_saved
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry, PackedGradients, count
from gradcomp.optim.options import number
from gradcomp.optim.split import (
    SplitParameters,
    _split,
    adopt,
    check_parameter,
    checksum,
    join,
    new_trail,
    waiting_rounding,
)


class SplitOptimizer(torch.optim.Optimizer):
    """Base of the split optimizers; not to be used itself.

    bf16 parameters are tops whose trails are in ``state[p]["trail"]``; fp32 parameters are updated as they are. All state
    is made by the constructor, and a step that is not taken changes nothing.
    """

    moments: ClassVar[tuple[str, ...]] = ()  # names of fp32 state, in the order of gc_target
    takes_sparse: ClassVar[bool] = False
    takes_packed: bool = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._families: list[SplitParameters] = []  # of which trails were adopted
        self._expected: dict[Tensor, tuple[int, str]] = {}  # checksums of tops that trails from elsewhere belong to
        self._places: dict[Tensor, int] = {}
        self._packed: list[PackedGradients] = []
        self.check_options(defaults)
        super().__init__(params, defaults)

    # ---- what an optimizer says --------------------------------------------------------------------------------------

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

    # ---- torch.optim.Optimizer ---------------------------------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what pickling, copying and loading keep; the rest is found again as it is needed."""
        super().__setstate__(state)
        for name, empty in (("_families", []), ("_expected", {}), ("_places", {}), ("_packed", [])):
            if name not in self.__dict__:
                setattr(self, name, empty)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own; as in torch, and the trails of split parameters are adopted.

        Raises:
            UnsupportedTensor: a parameter of another dtype, device or layout; nothing is changed then.
            ValueError: an option out of its range, or parameters split with different roundings in one group.
        """
        params = param_group.get("params", ())
        members = [params] if isinstance(params, Tensor) else list(params)
        tensors = [p[1] if isinstance(p, tuple) else p for p in members]
        for place, p in enumerate(tensors):
            if isinstance(p, Tensor):
                check_parameter(p, f"parameter {place} of the group")
        group = {**self.defaults, **param_group, "params": members}
        self.check_options(group)
        roundings = {r for p in tensors if isinstance(p, nn.Parameter) for r in [waiting_rounding(p)] if r}
        if len(roundings) > 1:
            raise ValueError(
                f"one group holds parameters split with rounding {sorted(roundings)}: make a group for each"
            )
        super().add_param_group(param_group | {"params": members})
        added = self.param_groups[-1]
        added["rounding"] = roundings.pop() if roundings else added.get("rounding", "truncate")
        for p in added["params"]:
            self._begin(p, added)

    def _begin(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Make a parameter's state."""
        state = self.state[p]
        state["step"] = torch.zeros(())
        if p.dtype == torch.bfloat16:
            adopted = adopt(p)
            if adopted is None:
                state["trail"] = new_trail(p, len(self.state))
            else:
                state["trail"], wanted, family = adopted
                self._expected[p] = wanted, "it was changed after split_parameters"
                if family not in self._families:
                    self._families.append(family)
        for name in self.wanted_moments(group):
            state[name] = self._new_moment(p, name, group)

    def _new_moment(self, p: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        return torch.full_like(p, self.initial_moment(name, group), dtype=torch.float32, requires_grad=False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero gradients, as in torch; placeholders of packed gradients are dropped in either case."""
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            if p.grad is not None and self._packed_of(p)[0] is not None:
                p.grad = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step for every parameter that has a gradient.

        Args:
            closure: computes the loss and gradients again, and returns the loss.

        Returns:
            What `closure` returned, else None.

        Raises:
            UnsupportedTensor: a gradient that is sparse, or of a dtype other than float32 and bfloat16.
            ValueError: a gradient of another shape; parameters that were replaced or do not belong to their trails;
                trails that no optimizer adopted.
            GradcompError: placeholders whose packed gradients are gone.
            In all of these nothing has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for family in self._families:
            if family.waiting:
                raise ValueError(
                    f"no optimizer has the parameters {family.waiting[:3]} that split_parameters split: "
                    "pass all of them to optimizers before the first step"
                )
        self._families = []
        entries, sparse = self._entries()
        for entry in entries:
            self._complete(entry)
        if entries:
            count(entries)
            self.run(entries)
        for entry in sparse:
            self._run_sparse(entry)
        torch.autograd.graph.increment_version([e.parameter for e in (*entries, *sparse)])
        return loss

    def _entries(self) -> tuple[list[Entry], list[Entry]]:
        """Return what has a dense and what has a sparse gradient, all of it checked."""
        entries, sparse = [], []
        for where, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                name = self._name(group, where, place)
                entry = Entry(p, group, self.state[p])
                self._check_place(p, name)
                packed, position = self._packed_of(p)
                if packed is not None:
                    packed.check(p)
                    entry.packed, entry.position = packed, position
                elif p.grad.layout == torch.strided:
                    entry.gradient = self._check_gradient(p, name)
                else:
                    self._check_sparse(p, group, name)
                    sparse.append(entry)
                    continue
                entries.append(entry)
        return entries, sparse

    def _name(self, group: dict[str, Any], where: int, place: int) -> str:
        names = group.get("param_names")
        return f"parameter {names[place]!r}" if names else f"parameter {place} of group {where}"

    def _check_place(self, p: nn.Parameter, name: str) -> None:
        """Raise ValueError unless this is the parameter, in dtype, shape and memory, that the state was made for."""
        trail = self.state[p].get("trail")
        if (trail is None) != (p.dtype == torch.float32) or (trail is not None and trail.shape != p.shape):
            raise ValueError(f"{name} is now {p.dtype} {tuple(p.shape)}: it was replaced after the optimizer was made")
        if p in self._expected:
            wanted, story = self._expected[p]
            if checksum(p) != wanted:
                raise ValueError(
                    f"the trail of {name} belongs to other weights: {story}. Load model and optimizer from one "
                    "checkpoint, split after loading and with equal seeds on all ranks, or call zero_trails()"
                )
            del self._expected[p]
        if self._places.setdefault(p, p.data_ptr()) != p.data_ptr():
            raise ValueError(
                f"{name} was replaced after the last step (its memory is another), its trail belongs to the old values: "
                "make a new optimizer, load a checkpoint, or call zero_trails()"
            )

    def _check_gradient(self, p: nn.Parameter, name: str) -> Tensor:
        gradient = p.grad
        assert gradient is not None
        if gradient.dtype not in GRADIENT_DTYPES or gradient.device != p.device:
            raise UnsupportedTensor(
                f"the gradient of {name} is {gradient.dtype} on {gradient.device}; float32 or bfloat16"
            )
        if gradient.shape != p.shape:
            raise ValueError(f"the gradient of {name} has shape {tuple(gradient.shape)}, it {tuple(p.shape)}")
        if gradient.stride() != p.stride():
            if gradient.numel() > 1 and not any(gradient.stride()) and bool(torch.isnan(gradient.flatten()[0])):
                raise GradcompError(f"the packed gradient of {name} is gone: it was left from a backward before")
            gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
        return gradient.detach()

    def _check_sparse(self, p: nn.Parameter, group: dict[str, Any], name: str) -> None:
        gradient = p.grad
        assert gradient is not None
        reason = None
        if not self.takes_sparse or gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1:
            reason = f"{type(self).__name__} does not take it (Embedding(sparse=False) makes dense ones)"
        elif group.get("momentum", 0) or number(group["weight_decay"]):
            reason = "momentum and weight decay change weights that it does not name"
        elif gradient.dtype not in GRADIENT_DTYPES or not p.is_contiguous():
            reason = f"it is {gradient.dtype}, or the parameter is not contiguous"
        if reason:
            raise UnsupportedTensor(f"the gradient of {name} is sparse ({gradient.layout}): {reason}")
        if gradient.shape != p.shape:
            raise ValueError(f"the gradient of {name} has shape {tuple(gradient.shape)}, it {tuple(p.shape)}")

    def _complete(self, entry: Entry) -> None:
        """Make state that an option that was changed asks for."""
        for name in self.wanted_moments(entry.group):
            if name not in entry.state:
                entry.state[name] = self._new_moment(entry.parameter, name, entry.group)
                entry.is_first = True

    def _run_sparse(self, entry: Entry) -> None:
        """Update the rows that a sparse gradient names, and their trails, exactly as a dense update would."""
        p, state = entry.parameter, entry.state
        assert p.grad is not None
        gradient = p.grad.coalesce()
        index, values = gradient.indices()[0], gradient.values().contiguous()
        count([entry])
        if not values.numel():
            return
        rows = Entry(
            nn.Parameter(p.detach()[index].contiguous(), requires_grad=False), entry.group, {"step": state["step"]}
        )
        kept = [name for name in ("trail", *self.moments) if name in state]
        for name in kept:
            rows.state[name] = state[name][index].contiguous()
        rows.gradient, rows.step, rows.is_first = values, entry.step, entry.is_first
        self.run([rows])
        p.detach().index_copy_(0, index, rows.parameter.detach())
        for name in kept:
            state[name].index_copy_(0, index, rows.state[name])

    # ---- trails ------------------------------------------------------------------------------------------------------

    def trail(self, parameter: Tensor) -> Tensor | None:
        """Return the trail of a parameter, int16 in its shape; None for fp32 and for parameters of other optimizers."""
        return self.state[parameter].get("trail") if parameter in self.state else None

    def rounding(self, parameter: Tensor) -> str:
        """Return how the top of a parameter is made: "truncate" or "nearest"."""
        for group in self.param_groups:
            if any(p is parameter for p in group["params"]):
                return str(group["rounding"])
        raise ValueError("this optimizer does not have that parameter")

    def fp32(self, parameter: Tensor) -> Tensor:
        """Return the fp32 weight that a parameter stands for, as a new tensor."""
        trail = self.trail(parameter)
        if trail is None:
            return parameter.detach().clone()
        return join(parameter.detach(), trail, rounding=self.rounding(parameter))

    @torch.no_grad()
    def set_fp32(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter to an fp32 weight of its shape, trail included."""
        if weight.shape != parameter.shape:
            raise ValueError(f"the weight has shape {tuple(weight.shape)}, the parameter {tuple(parameter.shape)}")
        trail = self.trail(parameter)
        source = torch.empty_like(parameter, dtype=torch.float32).copy_(weight)
        if trail is None:
            parameter.copy_(source)
            return
        _split(source, self.rounding(parameter), parameter, trail)
        torch.autograd.graph.increment_version(parameter)
        self._expected.pop(parameter, None)
        self._places[parameter] = parameter.data_ptr()

    def zero_trails(self) -> None:
        """Take the weights as they now stand in bf16: all trails become zero.

        For parameters that were changed by other means than this optimizer (loaded, replaced, averaged).
        """
        for p, state in self.state.items():
            if "trail" in state:
                state["trail"].zero_()
                self._expected.pop(p, None)
            self._places[p] = p.data_ptr()

    # ---- packed gradients --------------------------------------------------------------------------------------------

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

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all state, as in torch; beside every trail stands a checksum of the top that it belongs to."""
        saved = super().state_dict()
        params = list(chain.from_iterable(group["params"] for group in self.param_groups))
        for index, state in saved["state"].items():
            if "trail" in state:
                saved["state"][index] = state | {CHECKSUM: torch.tensor(checksum(params[index]))}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state exactly, into the tensors that are there; torch's own would cast trails and moments to bf16.

        State of torch's optimizer of the same name is taken as well (its weights' trails stay as they are). The model's
        weights are to be loaded too, before or after: the next step checks that they are those the trails belong to.

        Raises:
            ValueError: state of another optimizer, of other groups or shapes, or of which a part is missing; nothing is
                changed then.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        groups, loads = check_saved(self, state_dict)
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update(saved)
        with torch.no_grad():
            for p, tensors, wanted in loads:
                state = self.state[p]
                for name, tensor in tensors.items():
                    if name not in state:  # momentum that the saved options turn on
                        state[name] = self._new_moment(p, name, {**self.defaults})
                    state[name].copy_(tensor)
                if wanted is not None:
                    self._expected[p] = (
                        wanted,
                        "it was not loaded from the checkpoint that the optimizer was loaded from",
                    )
                self._places[p] = p.data_ptr()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
