"""The format of state dicts of all entry points: writing, checking, resharding to another number of
ranks. ::

    {"format": 2, "origin": {"kind": "gradients", "codec": ...},    # must be equal in the next run
     "world_size": 4, "step": 7, "loss_scale": 1.0,
     "replicated": {"tensors": 1, "second_moment": {name: Tensor}}, # the same on all ranks
     "ranks": {"3": {"tensors": 2, "residual": {name: Tensor}}},    # by rank
     "extra": {...}}                                                # the entry point's own

A list of the states of several ranks is equivalent to one state with the "ranks" of all of them, so
files of all ranks can be merged. "extra" may contain further states of this format. "tensors" is
the number of tensors beside it: a state in which some are missing is refused. Everything is checked
before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.payload.form import removal
from gradcomp.payload.pieces import ByElements

FORMAT = 2
STEPS = 2**32  # step numbers are below this: random numbers and headers have 32 bits for them
KEYS = ("format", "origin", "world_size", "step", "loss_scale", "replicated")

Parts = Mapping[str, Mapping[str, Tensor]]  # tensors by part, e.g. "residual", and name


def write(
    origin: Mapping[str, object],
    rank: int,
    world_size: int,
    step: int,
    own: Parts,
    *,
    loss_scale: float = 1.0,
    replicated: Parts | None = None,
    **extra: object,
) -> dict[str, Any]:
    """Return the state dict of one rank.

    Args:
        origin: settings, texts and numbers, that must be equal in the run that loads the state.
        rank, world_size: the rank whose state it is, and the number of ranks.
        step: number of the next step.
        own: tensors of this rank.
        loss_scale: loss scale of the residuals.
        replicated: tensors that are the same on all ranks.
        extra: other values that are the same on all ranks, and other states.
    """
    state = {
        "format": FORMAT,
        "origin": dict(origin),
        "world_size": world_size,
        "step": step,
        "loss_scale": loss_scale,
        "replicated": _counted(replicated or {}),
        "ranks": {str(rank): _counted(own)},
    }
    return state | {"extra": extra} if extra else state


class Saved:
    """The checked state of one run, merged from the states of its ranks.

    Args:
        head: the state without "ranks".
        ranks: the ranks whose values were saved, as decimal strings.
        read: returns the values of one of `ranks`; called when they are needed.

    Attributes:
        origin, world_size, step, loss_scale, replicated, extra: as in `write`.
        ranks: as given.

    Raises:
        ValueError: `head` or `ranks` are not those of a state of this format.
    """

    def __init__(
        self, head: Mapping[str, Any], ranks: Collection[str], read: Callable[[str], Any]
    ) -> None:
        _check_format(head)
        check_mapping(head, "this state", KEYS)
        self.origin, self.world_size = head["origin"], head["world_size"]
        self.step, self.loss_scale = head["step"], head["loss_scale"]
        self.replicated = _parts(head["replicated"], "what is replicated")
        self.extra, self.ranks, self._read = head.get("extra", {}), ranks, read
        check_mapping(self.origin, "'origin' of this state")
        check_mapping(self.extra, "'extra' of this state")
        if type(self.world_size) is not int or self.world_size < 1:
            raise ValueError(
                f"this state has world_size {self.world_size!r}, a positive integer expected"
            )
        check_step(self.step)
        if type(self.loss_scale) is not float or not 0 < self.loss_scale < float("inf"):
            raise ValueError(
                f"this state has loss_scale {self.loss_scale!r}, a positive number expected"
            )
        for rank in ranks:
            if not isinstance(rank, str) or not rank.isdecimal() or int(rank) >= self.world_size:
                raise ValueError(f"this state has a rank {rank!r} of {self.world_size} ranks")

    @classmethod
    def of(cls, given: Any) -> Saved:
        """Return a state dict, or a list of the state dicts of several ranks, as one state.

        Raises:
            ValueError: a state has another format, or the states are not from one run.
        """
        states = list(given) if isinstance(given, (list, tuple)) else [given]
        if not states:
            raise ValueError("no states: one of every rank of the old run is needed")
        for each in states:
            _check_format(each)
        state: Any = states[0] if len(states) == 1 else _merged(states, "")
        check_mapping(state, "this state", ("ranks",))
        ranks = state["ranks"]
        check_mapping(ranks, "'ranks' of this state")
        head = {key: value for key, value in state.items() if key != "ranks"}
        return cls(head, ranks, ranks.__getitem__)

    def check_origin(self, wanted: Mapping[str, object]) -> None:
        """Raise ValueError unless the origin of the state equals `wanted`."""
        for key in [*wanted, *self.origin]:
            saved, ours = self.origin.get(key), wanted.get(key)
            if type(saved) is type(ours) and saved == ours:
                continue
            if key == "memory_order":
                raise ValueError(
                    f"this state has residuals in memory order {saved}, this model {ours}: give it"
                    " the memory format (channels_last, say) that it had"
                )
            raise ValueError(f"this state has {key} {saved!r}, {ours!r} expected{removal(saved)}")

    def of_ranks(self, rank: int, world_size: int) -> Iterator[Parts]:
        """Return the tensors from which one of `world_size` ranks resumes: its own tensors, or
        those of every old rank if the number of ranks has changed. They are read one by one.

        Raises:
            ValueError: the values of one of these ranks are missing.
        """
        old = self.world_size
        wanted = range(rank, rank + 1) if old == world_size else range(old)
        missing = next((number for number in wanted if str(number) not in self.ranks), None)
        if missing is not None:
            found = ", ".join(sorted(self.ranks)) or "none"
            raise ValueError(
                f"values of rank {missing} are missing: the run had {old} ranks, this one has"
                f" {world_size}, and the state has rank {found}; give load_state_dict a list of the"
                " states of all ranks, one of every rank of one run"
            )
        return (_parts(self._read(str(number)), f"rank {number}") for number in wanted)


# ---- checks --------------------------------------------------------------------------------------


def check_mapping(value: object, what: str, keys: Sequence[str] = ()) -> None:
    """Raise ValueError unless a value, `what` in messages, is a mapping with these keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a dictionary, got {value!r:.80}")  # noqa: TRY004
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"{what} has no {missing[0]!r}: it is not from gradcomp's state_dict()")


def check_step(step: object, name: str = "step", of: str = "") -> None:
    """Raise ValueError unless a value is a step number; `name` and `of` are for messages."""
    if type(step) is not int or not 0 <= step < STEPS:
        raise ValueError(
            f"this state has {name} {step!r}{of}, an integer of at least 0 and below 2^32 expected"
        )


def odd_key(state: Collection[Any], own: Collection[Any]) -> str:
    """Return text for messages that names the first key of only one of two collections: "missing
    key" if the state lacks it.
    """
    key = min(set(state) ^ set(own), key=str)
    return f"{'unexpected' if key in state else 'missing'} key {key!r}"


def check_tensors(
    state: Any,
    shapes: Mapping[str, Sequence[int]],
    what: str,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    stored: torch.dtype = torch.float32,
    *,
    finite: bool = True,
) -> None:
    """Raise ValueError unless a state has exactly the expected tensors, with finite values unless
    `finite` is False.

    Args:
        state: tensors by name.
        shapes: expected shapes by name.
        what: name of the tensors, for messages.
        dtypes: allowed dtypes.
        stored: dtype in which the values are kept, and in which they must be finite.
    """
    check_mapping(state, f"the {what}s by name")
    if state.keys() != shapes.keys():
        raise ValueError(f"{what}s do not fit this model and codec: {odd_key(state, shapes)}")
    for name, shape in shapes.items():
        tensor = state[name]
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        fits = is_dense and tensor.shape == torch.Size(shape) and tensor.dtype in dtypes
        if not fits or tensor.is_meta:
            wanted = f"{tuple(shape)} {' or '.join(map(str, dtypes))}"
            got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" if is_dense else tensor
            raise ValueError(f"the {what} of {name!r} must be {wanted}, got {got!s:.100}")
        if finite and not bool(torch.isfinite(tensor.to(stored)).all()):
            raise ValueError(f"the {what} of {name!r} has values that are not finite in {stored}")


def _check_format(state: Any) -> None:
    check_mapping(state, "a state")
    if "version" not in state:
        check_mapping(state, "this state", ("format",))
    found = state.get("format")
    if type(found) is not int or found != FORMAT:
        old = ", convert it (docs/reference/compatibility.md)" if "version" in state else ""
        raise ValueError(
            f"another version of gradcomp wrote this state (format {found!r}, {FORMAT} expected):"
            f" go on with that version{old}, or leave the state out and begin with residuals of"
            " zero"
        )


def _counted(parts: Parts) -> dict[str, Any]:
    return {"tensors": sum(map(len, parts.values())), **parts}


def _parts(given: Any, what: str) -> dict[str, Mapping[str, Tensor]]:
    """Return parts without their count; ValueError if the count is wrong."""
    check_mapping(given, f"{what} in this state", ("tensors",))
    parts = {part: values for part, values in given.items() if part != "tensors"}
    for part, values in parts.items():
        check_mapping(values, f"{part} of {what} in this state")
    found, count = sum(map(len, parts.values())), given["tensors"]
    if type(count) is not int or found != count:
        raise ValueError(
            f"{what} in this state has {found} tensors of {count!r}: save the whole state_dict() of"
            " each rank, and load all of it"
        )
    return parts


# ---- several ranks -------------------------------------------------------------------------------


def _merged(values: Sequence[Any], where: str) -> Any:
    """Merge the values that several ranks have saved at one place: "ranks" of states are united,
    other values must be equal.

    Raises:
        ValueError: other values differ, or a rank occurs twice.
    """
    first = values[0]
    if all(isinstance(value, Mapping) and value.keys() == first.keys() for value in values):
        out = {}
        for key in first:
            merge = _united if key == "ranks" and "format" in first else _merged
            out[key] = merge([value[key] for value in values], f"{where}.{key}".lstrip("."))
        return out
    if all(isinstance(value, (list, tuple)) and len(value) == len(first) for value in values):
        each = enumerate(zip(*values, strict=True))
        return type(first)(_merged(items, f"{where}.{n}") for n, items in each)
    for value in values[1:]:
        if not _same(first, value):
            found = f"is {first!r} and {value!r}" if not isinstance(first, Tensor) else "differs"
            raise ValueError(f"these states are not of one run: {where} {found:.100}")
    return first


def _united(values: Sequence[Any], where: str) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for value in values:
        check_mapping(value, f"{where} in these states")
        twice = out.keys() & value.keys()
        if twice:
            raise ValueError(
                f"these states have rank {min(twice, key=str)} twice: one of every rank is needed"
            )
        out |= value
    return out


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.device == other.device and not one.is_meta
        return alike and one.layout == other.layout and torch.equal(one, other)
    nested = isinstance(one, (Mapping, list, tuple))
    return type(one) is type(other) and not nested and bool(one == other)


def mean_by_name(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the means of the tensors of several ranks, float64, by name. Each rank has the same
    names and shapes.
    """
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, tensor in state.items():
            if name in total:
                total[name].add_(tensor)
            else:
                total[name] = tensor.to(torch.float64, copy=True)
    return {name: tensor.div_(count) for name, tensor in total.items()}


def reshard(
    old: Sequence[Parts],
    rank: int,
    world_size: int,
    numels: Mapping[str, Mapping[str, int]],
    *,
    owns_means: bool,
    place: str,
) -> dict[str, dict[str, Tensor]]:
    """Return the parts of one of `world_size` new ranks, from those of all ranks of the old run.

    Each new rank gets the mean of the old ranks' residuals, because that is the error of the
    averages so far. Owners' residuals, and states of a transform with place "owner", are
    concatenated and split again. If the new ranks keep no owners' residuals, these are added to the
    residuals of every rank. States of a local transform are replaced by their mean. A single rank
    adds its residuals to its next gradients.

    Args:
        old: the parts of every old rank, ``(numel,)`` float32 tensors.
        rank, world_size: rank and number of ranks of the new run.
        numels: number of elements of this model's whole tensors, by part and name.
        owns_means: whether the new ranks keep owners' residuals.
        place: place of the transform whose states are resharded, "" without one.

    Raises:
        ValueError: the tensors do not fit this model.
    """
    residual = _whole(old, "residual", numels, owned=False)
    owner_residual = _whole(old, "owner_residual", numels, owned=True)
    if not owns_means:
        for name, tensor in owner_residual.items():
            residual[name] = residual[name] + tensor if name in residual else tensor
        owner_residual = {}
    states = _whole(old, "transform_state", numels, owned=place == "owner")
    owner = ByElements(world_size)

    def share(whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the elements of whole tensors that this rank owns."""
        bounds = {name: owner.bounds(tensor.numel(), rank) for name, tensor in whole.items()}
        return {name: whole[name][first:last].clone() for name, (first, last) in bounds.items()}

    return {
        "residual": residual,
        "owner_residual": share(owner_residual),
        "transform_state": share(states) if place == "owner" else states,
    }


def _whole(
    old: Sequence[Parts], part: str, numels: Mapping[str, Mapping[str, int]], *, owned: bool
) -> dict[str, Tensor]:
    """Return the whole tensors of one part by name: the concatenation of the ranks' tensors if they
    are `owned`, else their mean. Empty if the part is empty on all ranks.
    """
    owner, each = ByElements(len(old)), [parts.get(part, {}) for parts in old]
    begun = set()
    for rank, tensors in enumerate(each):
        shapes = {
            name: (owner.numel(numel, rank) if owned else numel,)
            for name, numel in numels[part].items()
        }
        if tensors:
            check_tensors(tensors, shapes, part)
        if any(numel for (numel,) in shapes.values()):  # a rank may own nothing
            begun.add(bool(tensors))
    if begun == {False, True}:
        raise ValueError(f"only some ranks' states have {part}")
    if True not in begun:
        return {}
    if owned:
        return {n: torch.cat([tensors[n] for tensors in each if tensors]) for n in numels[part]}
    return {name: tensor.float() for name, tensor in mean_by_name(each).items()}
