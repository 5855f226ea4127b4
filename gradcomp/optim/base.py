"""Base class of the split optimizers: state made by the constructor, exact checkpoints, and steps
in one C kernel.

A step checks every gradient first, and raises before it changes anything. Then the optimizer writes
one rule per parameter, and `run_rules` runs the rules in the kernel.
"""

from __future__ import annotations

import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradcomp.errors import GradcompError, UnsupportedTensor
from gradcomp.kernels.rules import Kind
from gradcomp.optim.entries import GRADIENT_DTYPES, Entry, make_rules, run_rules
from gradcomp.optim.placeholder import Placeholder
from gradcomp.optim.split import (
    SplitParameters,
    adopt,
    check_free,
    check_parameter,
    check_rounding,
    join,
    new_state,
    new_trail,
    wait,
    waiting_trails,
    write_split,
)
from gradcomp.optim.state import CHECKSUM, check_saved
from gradcomp.optim.tracking import Tracking, check_moved

# torch wraps a class's `step` in the first constructor call; two threads would wrap it twice, and
# hooks would run twice
_first = threading.Lock()


class SplitOptimizer(torch.optim.Optimizer):
    """Base class of the split optimizers; use one of its subclasses.

    bf16 parameters are tops, and their trails are in ``state[p]["trail"]``. fp32 parameters have no
    trail. The constructor makes all state, and a step that raises changes nothing.
    """

    kind: ClassVar[Kind]
    ranges: ClassVar[dict[str, Callable[[str, Any], None]]]  # check(name, value) of each option
    moments: ClassVar[tuple[str, ...]] = ()  # names of fp32 state, in the order of gc_target
    takes_sparse: ClassVar[bool] = False
    takes_packed: bool = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._families: list[SplitParameters] = []  # whose trails were adopted
        self._tracking = Tracking()
        self._packed: list[Any] = []  # `gradcomp.optim.fused.FusedGradients` objects
        self._is_made = False
        self.check_options(defaults)
        with _first:
            super().__init__(params, defaults)
        adopt(self, self._parameters())
        self._is_made = True

    # ---- what an optimizer defines ----------------------------------------------------------

    @abstractmethod
    def numbers(self, entry: Entry) -> dict[str, float]:
        """Return the fields of an entry's rule, which depend on its group, step and is_first."""

    def check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError for hyperparameters out of their range."""
        for name, check in self.ranges.items():
            check(name, group[name])

    def wanted_moments(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the names of the fp32 state that a group needs."""
        return self.moments

    def rules(self, entries: Sequence[Entry]) -> NDArray[Any]:
        """Return the rule of each entry."""
        return make_rules(self.kind, entries, self.numbers)

    def run(self, entries: Sequence[Entry]) -> None:
        """Update the parameters of `entries`; `Entry.step` counts this step already."""
        run_rules(entries, self.rules(entries), self.moments)

    # ---- torch.optim.Optimizer --------------------------------------------------------------

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled or copied optimizer; attributes that are not saved start anew."""
        super().__setstate__(state)
        new = {"_families": [], "_tracking": Tracking(), "_packed": [], "_is_made": True}
        self.__dict__ = new | self.__dict__
        adopt(self, self._parameters())

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tracking": self._tracking}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch, and adopt the trails of its split parameters. Nothing
        is changed if this raises.

        Raises:
            TypeError: the parameters are a set.
            UnsupportedTensor: a parameter with an unsupported dtype, device or layout.
            ValueError: an option out of its range, a parameter listed twice, a trail that belongs
                to another optimizer, or parameters split with different roundings.
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
        group = {"rounding": "truncate", **self.defaults, **param_group, "params": members}
        self.check_options(group)
        check_rounding(group["rounding"])
        waiting = [waiting_trails.get(p) for p in tensors if isinstance(p, nn.Parameter)]
        roundings = {found.family.rounding for found in waiting if found}
        if len(roundings) > 1:
            raise ValueError(
                f"one group holds parameters split with rounding {sorted(roundings)}: make a group"
                " for each"
            )
        super().add_param_group(param_group | {"params": members})
        self.__dict__.pop("_places", None)
        added = self.param_groups[-1]
        added["rounding"] = roundings.pop() if roundings else group["rounding"]
        for p in added["params"]:
            self._begin(p, added)
        if self._is_made:  # the constructor adopts after all groups, since each may be refused
            adopt(self, added["params"])

    def _begin(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        """Create a parameter's state, and record the trail that waits for it."""
        state = self.state[p]
        state["step"] = torch.zeros((), device="cpu")
        self._tracking.begin(p)
        if p.dtype == torch.bfloat16:
            found = waiting_trails.get(p)
            if found is None:
                state["trail"] = new_trail(p)
            else:
                # the model may have been moved since split_parameters
                moved = found.trail.device != p.device
                state["trail"] = new_trail(p).copy_(found.trail) if moved else found.trail
                self._tracking.expect(p, found.checksum, "it was changed after split_parameters")
                if found.family not in self._families:
                    self._families.append(found.family)
            state[CHECKSUM] = torch.zeros((), dtype=torch.int64)  # only state_dict writes it
        self._complete(p, group)

    def _complete(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Create the fp32 state that a parameter lacks; return whether any was missing."""
        missing = [name for name in self.wanted_moments(group) if name not in self.state[p]]
        for name in missing:
            self.state[p][name] = self.new_moment(p, name, group)
        return bool(missing)

    def new_moment(self, p: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        """Return new fp32 state for a parameter, in its shape, with the value before step 1."""
        value = group.get("initial_accumulator_value", 0.0)
        return new_state(p, torch.float32, 2 + self.moments.index(name), float(value))

    @torch._disable_dynamo  # type: ignore[attr-defined]  # it cannot trace a C kernel
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. `torch.compile` does not trace this method.
        Nothing is changed if it raises one of these errors.

        Args:
            closure: recomputes the loss and the gradients, and returns the loss; called first.

        Returns:
            The value that `closure` returned, or None without `closure`.

        Raises:
            UnsupportedTensor: a sparse gradient that this optimizer cannot apply; a dtype other
                than float32 and bfloat16; a gradient on another device than its parameter.
            ValueError: a gradient whose shape is not its parameter's; a parameter that was replaced
                or moved, or no longer matches its trail; trails that no optimizer has adopted.
            GradcompError: a placeholder that was written to, or whose packed gradient is gone.
        """
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
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        entries = [self._entry(p, group) for p, group in pairs if p.grad is not None]
        if not entries:
            return loss
        steps = [entry.state["step"] for entry in entries]
        for entry, done in zip(entries, torch.stack(steps).tolist(), strict=True):
            entry.step = int(done) + 1
            entry.is_first = self._complete(entry.parameter, entry.group) or entry.step == 1
        dense = [e for e in entries if e.gradient is not None or e.packed is not None]
        if dense:
            self.run(dense)
        for entry in entries:
            if entry.gradient is None and entry.packed is None:
                self._run_sparse(entry)
        torch._foreach_add_(steps, 1)
        self._tracking.stepped(entry.parameter for entry in entries)
        return loss

    def _entry(self, p: nn.Parameter, group: dict[str, Any]) -> Entry:
        """Check a parameter and its gradient; return their entry, without a sparse gradient."""
        gradient, name = p.grad, self.name_of(p)
        assert gradient is not None
        entry = Entry(p, group, self.state[p])
        check_moved(p, entry.state, ("trail", *self.moments), name)
        self._tracking.check(p, entry.state.get("trail"), name)
        for packed in self._packed:
            position = packed.position(p)
            if position is not None:
                packed.check(p)
                entry.packed, entry.position = packed, position
                return entry
        is_dense = gradient.layout == torch.strided
        if not is_dense:
            self._check_sparse(gradient, entry, name)
        elif gradient.dtype not in GRADIENT_DTYPES or gradient.device != p.device:
            raise UnsupportedTensor(
                f"the gradient of {name} is {gradient.dtype} on {gradient.device}; float32 or"
                " bfloat16"
            )
        if gradient.shape != p.shape:
            raise ValueError(
                f"the gradient of {name} has shape {tuple(gradient.shape)}, the parameter"
                f" {tuple(p.shape)}"
            )
        if isinstance(gradient, Placeholder):
            raise GradcompError(
                f"the packed gradient of {name} is gone: it was left from a backward before, or"
                " from one that failed, or from a step that failed"
            )
        if is_dense:
            gradient = gradient.resolve_neg()
            if gradient.stride() != p.stride():
                gradient = torch.empty_like(p, dtype=gradient.dtype).copy_(gradient)
            entry.gradient = gradient.detach()
        return entry

    def _check_sparse(self, gradient: Tensor, entry: Entry, name: str) -> None:
        """Raise UnsupportedTensor unless this optimizer can apply a sparse gradient exactly."""
        takes = self.takes_sparse and gradient.layout == torch.sparse_coo
        reason = None
        if not takes or gradient.sparse_dim() != 1:
            kind = type(self).__name__
            reason = f"{kind} does not take it (Embedding(sparse=False) makes dense ones)"
        elif entry.group.get("momentum", 0) or float(entry.group["weight_decay"]):
            reason = "momentum and weight decay change weights that it does not name"
        elif gradient.dtype not in GRADIENT_DTYPES or not entry.parameter.is_contiguous():
            reason = f"it is {gradient.dtype}, or the parameter is not contiguous"
        if reason:
            raise UnsupportedTensor(
                f"the gradient of {name} is sparse ({gradient.layout}): {reason}"
            )

    def _run_sparse(self, entry: Entry) -> None:
        """Update the rows at a sparse gradient's indices as a dense update would."""
        p, state = entry.parameter, entry.state
        assert p.grad is not None
        gradient = p.grad.float().coalesce()  # cast first: it sums duplicate rows
        index, values = gradient.indices()[0], gradient.values().contiguous()
        if not values.numel():
            return
        kept = [name for name in ("trail", *self.moments) if name in state]
        rows = {name: state[name][index].contiguous() for name in kept}
        part = nn.Parameter(p.detach()[index].contiguous(), requires_grad=False)
        own = Entry(part, entry.group, rows | {"step": state["step"]}, values)
        own.step, own.is_first = entry.step, entry.is_first
        self.run([own])
        p.detach().index_copy_(0, index, part.detach())
        for name in kept:
            state[name].index_copy_(0, index, rows[name])

    def name_of(self, p: Tensor) -> str:
        """Return the name of a parameter in error messages."""
        return self._places[p][1] if p in self._places else "a parameter"

    @cached_property
    def _places(self) -> dict[Tensor, tuple[dict[str, Any], str]]:
        """The group and the name in error messages of every parameter."""
        found = {}
        for where, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for place, p in enumerate(group["params"]):
                name = f"{names[place]!r}" if names else f"{place} of group {where}"
                found[p] = group, f"parameter {name}"
        return found

    def _parameters(self) -> Iterator[nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    # ---- trails -----------------------------------------------------------------------------

    def trail(self, parameter: Tensor) -> Tensor | None:
        """Return a parameter's trail, int16 in its shape; None if it is fp32 or not in this
        optimizer.
        """
        return self.state[parameter].get("trail") if parameter in self.state else None

    def rounding(self, parameter: Tensor) -> str:
        """Return how the top of a parameter is made: "truncate" or "nearest".

        Raises:
            ValueError: this optimizer does not have the parameter.
        """
        if parameter not in self._places:
            raise ValueError("this optimizer does not have that parameter")
        return str(self._places[parameter][0]["rounding"])

    def fp32(self, parameter: Tensor) -> Tensor:
        """Return a parameter joined with its trail, a new float32 tensor of its shape.

        Raises:
            ValueError: the trail belongs to other weights.
        """
        trail = self.trail(parameter)
        if trail is None:
            return parameter.detach().clone()
        self._tracking.check(parameter, trail, "the parameter")
        return join(parameter.detach(), trail, rounding=self.rounding(parameter))

    @torch.no_grad()
    def set_fp32(self, parameter: Tensor, weight: Tensor) -> None:
        """Set a parameter and its trail to an fp32 weight.

        Raises:
            ValueError: the weight has another shape; the parameter was moved away from its trail.
        """
        if weight.shape != parameter.shape:
            theirs, mine = tuple(weight.shape), tuple(parameter.shape)
            raise ValueError(f"the weight has shape {theirs}, the parameter {mine}")
        trail = self.trail(parameter)
        source = torch.empty_like(parameter, dtype=torch.float32).copy_(weight)
        if trail is None:
            parameter.copy_(source)
            return
        check_moved(parameter, self.state[parameter], ["trail"], "the parameter")
        write_split(source, self.rounding(parameter), parameter, trail)
        torch.autograd.graph.increment_version(parameter)
        self._tracking.trust(parameter)

    def zero_trails(self) -> None:
        """Accept the current bf16 weights, and set all trails to zero.

        Call it after other code has changed the weights, for instance loaded or averaged them.
        """
        self.keep_trails()
        for p in self._parameters():
            if "trail" in self.state[p]:
                self.state[p]["trail"].zero_()

    def keep_trails(self) -> None:
        """Accept the current weights as those of the last step, and keep all trails.

        Call it after code that swaps weights in place and restores the old ones (weight averages,
        pruning trials).
        """
        for p in self._parameters():
            self._tracking.trust(p)

    def release(self) -> None:
        """Release the trails for the next optimizer; this one has no parameters afterwards."""
        for p in self._parameters():
            trail = self.state[p].get("trail")
            if trail is not None:
                wait(p, trail, self._tracking.checksum(p), self.rounding(p))
        for group in self.param_groups:
            group["params"] = []
        self.state.clear()
        self.__dict__.pop("_places", None)

    # ---- packed gradients -------------------------------------------------------------------

    def attach_packed(self, packed: Any) -> None:
        """Read gradients from `packed`, too, while `p.grad` is a placeholder."""
        self._packed.append(packed)

    def detach_packed(self, packed: Any) -> None:
        """Undo `attach_packed`."""
        self._packed = [p for p in self._packed if p is not packed]

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with the checksum of its top beside every trail."""
        saved = super().state_dict()
        for index, p in enumerate(self._parameters()):
            state = saved["state"].get(index, {})
            if "trail" in state:
                checksum = torch.tensor(self._tracking.checksum(p))
                saved["state"][index] = state | {CHECKSUM: checksum}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict bit for bit into the existing tensors; torch's method would cast trails
        and moments to bf16.

        The state dict of torch's optimizer of the same name can be loaded, too; trails then keep
        their values. Load the model's weights as well, before or after: the next step compares them
        with the checksums of the trails. Frozen parameters without a trail in a distributed
        checkpoint get a zero trail and cause a warning.

        Raises:
            ValueError: a state dict of another optimizer, with other groups or shapes, or
                incomplete; nothing is changed then.
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
        others = {k: v for k, v in state_dict["state"].items() if k not in indices}
        self.state.update(deepcopy(others))  # state that hooks have added
        without: list[str] = []
        with torch.no_grad():
            for p, tensors, wanted in loads:
                state = self.state[p]
                for name, tensor in tensors.items():
                    if name not in state:  # the saved options turn momentum on
                        state[name] = self.new_moment(p, name, {})
                    state[name].copy_(tensor)
                for name in set(self.moments) - tensors.keys() if tensors else ():
                    state.pop(name, None)
                if wanted is not None:
                    story = "it was not loaded from the checkpoint that the optimizer was loaded"
                    self._tracking.expect(p, wanted, f"{story} from")
                elif "trail" in tensors or "trail" not in state:
                    self._tracking.trust(p)
                elif tensors or self._tracking.fits(p):  # state of torch's optimizer
                    story = "this checkpoint has no trail of it, and its weights are others"
                    self._tracking.expect(p, self._tracking.checksum(p), story)
                else:
                    without.append(self.name_of(p))
                    state["trail"].zero_()
                    self._tracking.trust(p)
        if without:
            warnings.warn(
                f"distributed checkpoints have no trails of frozen parameters: {', '.join(without)}"
                " are taken as they stand in bf16",
                stacklevel=2,
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)
