"""Validation of local steps' state dicts. Everything is checked before anything is loaded."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradcomp.memory.saved import Saved, check_mapping, check_step, check_tensors
from gradcomp.optim import SplitOptimizer
from gradcomp.optim.state import check_saved

if TYPE_CHECKING:
    from gradcomp.local.inner import Turns

KEYS = ("sync_every", "round", "done", "fragments", "under_way", "gradients")
FACTORED = {"row_var", "col_var"}  # what Adafactor keeps of a matrix instead of its "variance"
FRAGMENT_KEYS = ("anchors", "averages", "outer", "averager", "syncs")


def check(
    saved: Saved,
    warmup_steps: int,
    turns: Turns,
    fragments: Sequence[Callable[[Any], None]],
    *,
    has_gradients: bool,
) -> None:
    """Raise ValueError unless a state is valid and local steps can continue from it.

    Args:
        saved: state of the same class and `warmup_steps`. States of averagers are not checked.
        warmup_steps, turns: of the local steps that load the state.
        fragments: for each of their fragments, the function that checks its state.
        has_gradients: whether they still average gradients, in the warm-up.
    """
    check_mapping(saved.extra, "'extra' of this state", KEYS)
    numbers = {name: saved.extra[name] for name in ("sync_every", "round", "done")}
    for name, number in numbers.items():
        check_step(number, name)
    length = turns.length(numbers["round"])
    if numbers["sync_every"] != length:
        raise ValueError(
            f"the state has sync_every {numbers['sync_every']} in round {numbers['round']}, this"
            f" has {length}: local steps go on with the H that they had"
        )
    if numbers["done"] >= length:
        raise ValueError(
            f"the state has done {numbers['done']}, less than sync_every ({length}) expected"
        )
    begun, gradients = saved.step >= warmup_steps, saved.extra["gradients"]
    if begun and gradients is not None:
        raise ValueError(
            f"the state has gradients of the warm-up, but step {saved.step} of warmup_steps"
            f" {warmup_steps}"
        )
    if not begun:
        check_mapping(gradients, "gradients of this state")
        if not has_gradients:
            raise ValueError(
                "the state is of the warm-up, where gradients are averaged; this is beyond it:"
                " make it anew"
            )
    fragment_states = saved.extra["fragments"]
    count = (
        len(fragment_states)
        if isinstance(fragment_states, (list, tuple))
        else repr(fragment_states)
    )
    if count != len(fragments):
        raise ValueError(f"the state has {count} fragments, this has {len(fragments)}")
    for check_one, state in zip(fragments, fragment_states, strict=True):
        check_one(state)
    latest = saved.step + turns.length(0)  # a delay is shorter than the first round
    _check_under_way(saved.extra["under_way"], saved.step, latest, fragment_states)


def check_fragment(state: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless a fragment's state has anchors of these names and shapes, and
    averages of the same or none. Averages may be NaN or Inf: they raise NotFinite when they are
    due.
    """
    check_mapping(state, "a fragment of this state", FRAGMENT_KEYS)
    check_step(state["syncs"], "syncs")
    check_tensors(state["anchors"], shapes, "anchor")
    if not isinstance(state["averages"], Mapping) or state["averages"]:
        check_tensors(state["averages"], shapes, "average", finite=False)


def _check_under_way(under_way: Any, now: int, latest: int, fragments: Sequence[Any]) -> None:
    """Raise ValueError unless the fragments in progress are exactly those with averages."""
    if not isinstance(under_way, (list, tuple)) or not all(
        isinstance(entry, (list, tuple))
        and len(entry) == 2
        and all(type(number) is int for number in entry)
        and entry[0] in range(len(fragments))
        and now < entry[1] <= latest
        for entry in under_way
    ):
        raise ValueError(
            f"the state has under_way {under_way!r}, pairs of a fragment (below {len(fragments)})"
            f" and an inner step after {now} (at most {latest}) expected"
        )
    numbers = sorted(number for number, _ in under_way)
    averaged = [number for number, entry in enumerate(fragments) if entry["averages"]]
    if numbers != averaged:
        raise ValueError(
            f"the state has under_way {under_way!r}, but averages of fragments {averaged}: each of"
            " them once expected"
        )


def check_outer(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless a state fits this outer optimizer and all its values are finite."""
    check_mapping(state, "the outer optimizer's state", ("state", "param_groups"))
    groups, where = state["param_groups"], "of the outer optimizer's state"
    _check_list(groups, f"param_groups {where}")
    for number, group in enumerate(groups):
        check_mapping(group, f"group {number} {where}", ("params",))
        _check_list(group["params"], f"params of group {number} {where}")
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in groups]
    if found != wanted:
        raise ValueError(
            f"the outer optimizer's state has groups of {found} parameters, this has {wanted}"
        )
    for number, (group, own_group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(group, own_group, optimizer.defaults, f"group {number} {where}")
    indices = [index for group in groups for index in group["params"]]
    if sorted(map(repr, indices)) != sorted(map(repr, range(len(indices)))):
        raise ValueError(
            f"the outer optimizer's state has params {indices}, {list(range(len(indices)))}"
            " expected"
        )
    own_anchors = [p for group in optimizer.param_groups for p in group["params"]]
    anchors = dict(zip(indices, own_anchors, strict=True))
    check_mapping(state["state"], "'state' of the outer optimizer", ())
    for index, values in state["state"].items():
        if type(index) is not int or index not in anchors:
            raise ValueError(
                f"the outer optimizer's state is of parameter {index!r}, which it does not have"
            )
        check_mapping(values, f"the outer optimizer's state of parameter {index}", ())
        for name, value in values.items():
            _check_value(value, name, index, anchors[index], optimizer)
    saved = [(anchors[index], values) for index, values in state["state"].items()]
    kept = [_names(*one) for one in (*saved, *optimizer.state.items()) if one[1]]
    for names in kept:
        if names != kept[-1]:
            odd = min(names ^ kept[-1], key=str)
            raise ValueError(
                f"the outer optimizer's state has {odd!r} of some parameters only, or of another"
                " optimizer"
            )
    _try(state, optimizer)


def _check_list(value: object, what: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{what} is a list, got {value!r:.80}")  # noqa: TRY004


def _try(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer refuses a state; the optimizer is not changed."""
    try:
        if isinstance(optimizer, SplitOptimizer):
            check_saved(optimizer, dict(state))
            return
        trial = object.__new__(type(optimizer))
        trial.__dict__.update(vars(optimizer))  # loading replaces its groups and state
        trial.load_state_dict(copy.deepcopy(dict(state)))
    except Exception as error:
        raise ValueError(
            f"the outer optimizer refuses its state: {error} ({type(error).__name__})"
        ) from error


def _check_options(
    given: Mapping[str, Any], own_group: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> None:
    for name, value in own_group.items():
        if name not in given and name in defaults:
            raise ValueError(f"{where} has no {name!r}: it is of another optimizer")
        if name not in given:  # added by others, such as a scheduler's initial_lr
            continue
        own_numbers = _numbers(value)
        if own_numbers is not None and name != "params":
            found = _numbers(given[name])
            fits = found is not None and len(found) == len(own_numbers)
            if not fits or not all(map(math.isfinite, found or ())):
                raise ValueError(
                    f"{where} has {name} {given[name]!r}, as many finite numbers as in {value!r}"
                    " expected"
                )
        elif (value is None or isinstance(value, bool)) and not (
            given[name] is None or isinstance(given[name], bool)
        ):
            raise ValueError(f"{where} has {name} {given[name]!r}, expected {value!r}")


def _numbers(value: object) -> list[float] | None:
    """Return the numbers in a hyperparameter; None if it is not numeric."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    values = [one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in values]
    plain = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)
    return [float(one) for one in values] if plain else None


def _names(anchor: Tensor, values: Mapping[str, Any]) -> set[str]:
    """Return the names of a parameter's values, which are the same for matrices and vectors."""
    names = set(values)
    return names - FACTORED | {"variance"} if FACTORED <= names and anchor.dim() > 1 else names


def _check_value(
    value: object, name: object, index: int, anchor: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    where = f"the outer optimizer's {name} of parameter {index}"
    if isinstance(value, Tensor):
        own_value = optimizer.state.get(anchor, {}).get(name)
        shape = value.shape  # not known for an optimizer that is not torch's
        if isinstance(own_value, Tensor):
            shape = own_value.shape
        elif type(optimizer).__module__.startswith("torch.optim"):
            whole = anchor.shape
            factors = {"row_var": (*whole[:-1], 1), "col_var": (*whole[:-2], 1, *whole[-1:])}
            shape = torch.Size(factors.get(str(name), whole))
        if value.dim() and value.shape != shape:
            raise ValueError(f"{where} has shape {tuple(value.shape)}, {tuple(shape)} expected")
        is_readable = value.layout == torch.strided and not value.is_meta
        if value.is_complex() or value.dtype == torch.bool or not is_readable:
            raise ValueError(f"{where} is {value.dtype} ({value.layout}, {value.device})")
    elif value is not None and _numbers(value) is None and not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.80}, a tensor or a number expected")
    numbers = value if isinstance(value, Tensor) else torch.tensor(_numbers(value) or [])
    if not bool(torch.isfinite(numbers.float()).all()):
        raise ValueError(f"{where} holds NaN or Inf, or what is Inf in float32")
