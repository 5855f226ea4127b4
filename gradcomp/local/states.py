"""Whether saved states are those of a model's local steps: everything is checked before anything
is written.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from gradcomp.engine.state import Accepted
from gradcomp.memory.saved import STEPS
from gradcomp.optim import SplitOptimizer
from gradcomp.optim.state import check_saved

if TYPE_CHECKING:
    from gradcomp.averager import GradientAverager
    from gradcomp.local.inner import Turns

STATE_VERSION = 2
KEYS = (
    "kind",
    "warmup_steps",
    "inner_steps",
    "sync_every",
    "round",
    "done",
    "fragments",
    "under_way",
    "gradients",
)
FRAGMENT_KEYS = ("anchors", "averages", "outer", "averager", "syncs")


class Checks(Protocol):
    """A fragment that has to go on from a state."""

    def check(self, state: Any) -> None:
        """Raise ValueError unless a state is one of this fragment."""


def check(
    states: Sequence[Any],
    kind: str,
    warmup_steps: int,
    turns: Turns,
    fragments: Sequence[Checks],
    *,
    has_gradients: bool,
) -> None:
    """Raise ValueError unless these can be the states of one rank, or of all ranks of a run, and
    nothing in them is odd.

    Args:
        kind, warmup_steps, turns, fragments: of the local steps that are to go on.
        has_gradients: whether they still average gradients, in the warm-up.
    """
    if not states:
        raise ValueError("no states: a list of those of all ranks is needed")
    for one in states:
        _check_head(one, kind, warmup_steps, len(fragments))
        _check_length(one, turns.length(one["round"]))
        for fragment, theirs in zip(fragments, one["fragments"], strict=True):
            fragment.check(theirs)
        _check_averages(one)
        for key in ("inner_steps", "round", "done"):
            if one[key] != states[0][key]:
                raise ValueError(
                    f"these states are not of one run: {key} is {states[0][key]} and {one[key]}"
                )
    if states[0]["gradients"] is not None and not has_gradients:
        raise ValueError(
            "the state is of the warm-up, where gradients are averaged; this is beyond it:"
            " make it anew"
        )


def accept(averager: GradientAverager, everyone: list[Any], *, single: bool) -> Accepted:
    """Return what an averager is to go on from, of the states of all ranks or a single one.

    Raises:
        ValueError: it cannot be loaded.
        GradcompError: an exchange has failed: `reset` comes first.
    """
    averager._engine.wait()
    return averager._engine.accept(everyone[0] if single else everyone)


def _check_head(state: Any, kind: str, warmup_steps: int, fragments: int) -> None:
    """Raise ValueError unless what a state says beside its fragments can be of this class, start
    and number of fragments.
    """
    _check_mapping(state, "a state of local steps", ())
    given = state.get("fragments", ())
    count = len(given) if isinstance(given, (list, tuple)) else repr(given)
    if state.get("version") != STATE_VERSION or count != fragments:
        raise ValueError(
            f"a state of version {state.get('version')!r} with {count} fragments; here: version"
            f" {STATE_VERSION}, {fragments} fragments"
        )
    _check_mapping(state, "this state", KEYS)
    for name, mine in (("kind", kind), ("warmup_steps", warmup_steps)):
        if type(state[name]) is not type(mine) or state[name] != mine:
            raise ValueError(f"the state has {name} {state[name]!r}, this has {mine!r}")
    for name in ("inner_steps", "sync_every", "round", "done"):
        check_integer(state[name], name)
    begun, gradients = state["inner_steps"] >= warmup_steps, state["gradients"]
    if begun and gradients is not None:
        raise ValueError(
            f"the state has gradients of the warm-up, but inner_steps {state['inner_steps']} of"
            f" warmup_steps {warmup_steps}"
        )
    if not begun:
        _check_mapping(gradients, "gradients of this state", ())
    _check_under_way(state, fragments)


def _check_length(state: Mapping[str, Any], length: int) -> None:
    """Raise ValueError unless a state's round has `length` inner steps, and less than that are
    done.
    """
    if state["sync_every"] != length:
        raise ValueError(
            f"the state has sync_every {state['sync_every']} in round {state['round']}, this has"
            f" {length}: local steps go on with the H that they had"
        )
    if state["done"] >= length:
        raise ValueError(
            f"the state has done {state['done']}, less than sync_every ({length}) expected"
        )


def _check_averages(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless every fragment that is under way has its averages, once. Fragments
    have been checked.
    """
    given = state["under_way"]
    numbers = [number for number, _ in given]
    for number in numbers:
        if numbers.count(number) > 1 or not state["fragments"][number]["averages"]:
            raise ValueError(
                f"the state has under_way {given!r}, but fragment {number} twice or without"
                " averages"
            )
    for number, fragment in enumerate(state["fragments"]):
        if fragment["averages"] and number not in numbers:
            raise ValueError(
                f"the state has averages of fragment {number}, which is not under way ({given!r})"
            )


def check_integer(value: object, name: str) -> None:
    """Raise ValueError unless a value is an integer that can count steps."""
    if type(value) is not int or not 0 <= value < STEPS:
        raise ValueError(
            f"the state has {name} {value!r}, an integer of at least 0 and below 2^32 expected"
        )


def check_fragment(state: Any, shapes: Mapping[str, torch.Size]) -> None:
    """Raise ValueError unless a fragment's state has anchors, and averages if any, of these
    names and shapes.
    """
    _check_mapping(state, "a fragment of this state", FRAGMENT_KEYS)
    check_integer(state["syncs"], "syncs")
    _check_tensors(state["anchors"], "anchor", shapes)
    _check_mapping(state["averages"], "averages of a fragment", ())
    if state["averages"]:
        _check_tensors(state["averages"], "average", shapes)


def check_outer(state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless an outer optimizer's state is one of this optimizer, and finite."""
    _check_mapping(state, "the outer optimizer's state", ("state", "param_groups"))
    groups = state["param_groups"]
    if not isinstance(groups, (list, tuple)):
        raise ValueError(  # noqa: TRY004
            f"the outer optimizer's state has param_groups {groups!r}, a list expected"
        )
    wanted = [len(group["params"]) for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        _check_mapping(group, f"group {number} of the outer optimizer's state", ("params",))
        if not isinstance(group["params"], (list, tuple)):
            raise ValueError(  # noqa: TRY004
                f"group {number} of the outer optimizer's state has params {group['params']!r}"
            )
    found = [len(group["params"]) for group in groups]
    if found != wanted:
        raise ValueError(
            f"the outer optimizer's state has groups of {found} parameters, this has {wanted}"
        )
    for number, (group, mine) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        _check_options(
            group, mine, optimizer.defaults, f"group {number} of the outer optimizer's state"
        )
    indices = [index for group in groups for index in group["params"]]
    if sorted(map(repr, indices)) != sorted(map(repr, range(len(indices)))):
        raise ValueError(
            f"the outer optimizer's state has params {indices}, {list(range(len(indices)))}"
            " expected"
        )
    anchors = dict(
        zip(indices, (p for group in optimizer.param_groups for p in group["params"]), strict=True)
    )
    _check_mapping(state["state"], "'state' of the outer optimizer", ())
    for index, values in state["state"].items():
        if type(index) is not int or index not in anchors:
            raise ValueError(
                f"the outer optimizer's state is of parameter {index!r}, which it does not have"
            )
        _check_mapping(values, f"the outer optimizer's state of parameter {index}", ())
        for name, value in values.items():
            _check_value(value, name, index, anchors[index], optimizer)
    kept = [one for one in (*state["state"].values(), *optimizer.state.values()) if one]
    for one in kept:
        if one.keys() != kept[-1].keys():
            odd = min(one.keys() ^ kept[-1].keys(), key=str)
            raise ValueError(
                f"the outer optimizer's state has {odd!r} of some parameters only, or of another"
                " optimizer"
            )
    _try(state, optimizer)


def _try(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimizer refuses a state; it is not changed."""
    try:
        if isinstance(optimizer, SplitOptimizer):
            check_saved(optimizer, dict(state))
            return
        trial = object.__new__(type(optimizer))
        trial.__dict__.update(vars(optimizer))  # loading gives it groups and state of its own
        trial.load_state_dict(copy.deepcopy(dict(state)))
    except Exception as error:
        raise ValueError(
            f"the outer optimizer refuses its state: {error} ({type(error).__name__})"
        ) from error


def _check_options(
    given: Mapping[str, Any], mine: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> None:
    for name, value in mine.items():
        if name not in given and name in defaults:
            raise ValueError(f"{where} has no {name!r}: it is of another optimizer")
        if name not in given:  # what somebody else has put there, such as a scheduler's initial_lr
            continue
        if _numbers(value) is not None and name != "params":
            found = _numbers(given[name])
            if (
                found is None
                or len(found) != len(_numbers(value) or ())
                or not all(map(math.isfinite, found))
            ):
                raise ValueError(
                    f"{where} has {name} {given[name]!r}, as many finite numbers as in {value!r}"
                    " expected"
                )
        elif (value is None or isinstance(value, bool)) and not (
            given[name] is None or isinstance(given[name], bool)
        ):
            raise ValueError(f"{where} has {name} {given[name]!r}, {value!r} here")


def _numbers(value: object) -> list[float] | None:
    """Return the numbers of a hyperparameter; None for one that is none."""
    values: list[Any] = list(value) if isinstance(value, (list, tuple)) else [value]
    values = [one.item() if isinstance(one, Tensor) and one.numel() == 1 else one for one in values]
    plain = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)
    return [float(one) for one in values] if plain else None


def _check_value(
    value: object, name: object, index: int, anchor: Tensor, optimizer: torch.optim.Optimizer
) -> None:
    where = f"the outer optimizer's {name} of parameter {index}"
    if isinstance(value, Tensor):
        mine = optimizer.state.get(anchor, {}).get(name)
        shapes = [anchor.shape] if type(optimizer).__module__.startswith("torch.optim") else []
        shapes = [mine.shape] if isinstance(mine, Tensor) else shapes
        if value.dim() and shapes and value.shape != shapes[0]:
            raise ValueError(f"{where} has shape {tuple(value.shape)}, {tuple(shapes[0])} expected")
        if value.is_complex() or value.dtype == torch.bool or not _is_readable(value):
            raise ValueError(f"{where} is {value.dtype} ({_form(value)})")
    elif value is not None and _numbers(value) is None and not isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.80}, a tensor or a number expected")
    numbers = value if isinstance(value, Tensor) else torch.tensor(_numbers(value) or [])
    if not bool(torch.isfinite(numbers.float()).all()):
        raise ValueError(f"{where} holds NaN or Inf, or what is Inf in float32")


def _is_readable(value: Tensor) -> bool:
    """Whether a tensor has an element in memory for each index."""
    return value.layout == torch.strided and value.device.type != "meta"


def _form(value: Tensor) -> str:
    return f"{str(value.layout).removeprefix('torch.')}, {value.device}"


def _check_tensors(given: object, what: str, shapes: Mapping[str, torch.Size]) -> None:
    _check_mapping(given, f"{what}s of a fragment", ())
    assert isinstance(given, Mapping)
    odd = sorted(given.keys() ^ shapes.keys(), key=str)
    if odd:
        raise ValueError(
            f"the state is of other parameters or another number of fragments: {odd[0]!r} is on one"
            " side only"
        )
    for name, shape in shapes.items():
        value = given[name]
        if (
            not isinstance(value, Tensor)
            or value.dtype != torch.float32
            or value.shape != shape
            or not _is_readable(value)
        ):
            got = (
                f"{tuple(value.shape)} {value.dtype} ({_form(value)})"
                if isinstance(value, Tensor)
                else repr(value)
            )
            raise ValueError(
                f"the {what} of {name!r} is {got} in this state, {tuple(shape)} torch.float32"
                " expected"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"the {what} of {name!r} holds NaN or Inf in this state")


def _check_under_way(state: Mapping[str, Any], fragments: int) -> None:
    given, now = state["under_way"], state["inner_steps"]
    known = range(fragments)
    latest = now + state["sync_every"]
    if not isinstance(given, (list, tuple)) or not all(
        isinstance(one, (list, tuple))
        and len(one) == 2
        and all(type(number) is int for number in one)
        and one[0] in known
        and now < one[1] <= latest
        for one in given
    ):
        raise ValueError(
            f"the state has under_way {given!r}, pairs of a fragment (below {fragments}) and an"
            f" inner step after {now} (at most {latest}) expected"
        )


def _check_mapping(value: object, what: str, keys: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a dictionary, got {value!r:.80}")  # noqa: TRY004
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"{what} has no {missing[0]!r}")
