"""The one format of saved states, for every entry point: written, checked, and brought to other
numbers of ranks. ::

    {"format": 2, "origin": {"kind": "gradients", "codec": ...},    # what the next run must have
     "world_size": 4, "step": 7, "loss_scale": 1.0,
     "replicated": {"tensors": 1, "second_moment": {name: Tensor}}, # the same on all ranks
     "ranks": {"3": {"tensors": 2, "residual": {name: Tensor}}},    # by rank
     "extra": {...}}                                                # the entry point's own

A list of several ranks' states and one state with the "ranks" of all of them are the same, so files
of all ranks can be merged. "extra" may hold further states of this format. "tensors" counts those
beside it: a state that has lost some is refused. Everything is checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcomp.payload.form import removal
from gradcomp.payload.pieces import ByElements

FORMAT = 2
STEPS = 2**32  # what random numbers and headers can count
KEYS = ("format", "origin", "world_size", "step", "loss_scale", "replicated")

Parts = Mapping[str, Mapping[str, Tensor]]  # by part, "residual" say, and name


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
    """Return the state of one rank.

    Args:
        origin: texts and numbers that a run must have, too, to go on from this state.
        rank, world_size: whose state it is.
        step: the next one.
        own: tensors of this rank.
        loss_scale: of the gradients that residuals belong to.
        replicated: tensors that are the same on all ranks.
        extra: what else is the same on all ranks, and other states.
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
    """What the ranks of one run have saved, as one state.

    Args:
        head: the state without "ranks".
        ranks: whose values there are.
        read: returns the values of one of them, when they are needed.

    Attributes:
        origin, world_size, step, loss_scale, replicated, extra: as of `write`.
        ranks: as given.

    Raises:
        ValueError: not such a state.
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
        """Return a state, or the list of several ranks' states, as one."""
        states = list(given) if isinstance(given, (list, tuple)) else [given]
        if not states:
            raise ValueError("no states: one of every rank of the old run is needed")
        for one in states:
            _check_format(one)
        state: Any = states[0] if len(states) == 1 else _merged(states, "")
        check_mapping(state, "this state", ("ranks",))
        ranks = state["ranks"]
        check_mapping(ranks, "'ranks' of this state")
        head = {key: value for key, value in state.items() if key != "ranks"}
        return cls(head, ranks, ranks.__getitem__)

    def check_origin(self, wanted: Mapping[str, object]) -> None:
        """Raise ValueError unless the state has this origin."""
        for key in [*wanted, *self.origin]:
            saved, mine = self.origin.get(key), wanted.get(key)
            if type(saved) is type(mine) and saved == mine:
                continue
            if key == "memory_order":
                raise ValueError(
                    f"this state has residuals in memory order {saved}, this model {mine}: give it"
                    " the memory format (channels_last, say) that it had"
                )
            raise ValueError(f"this state has {key} {saved!r}, {mine!r} expected{removal(saved)}")

    def of_ranks(self, rank: int, world_size: int) -> Iterator[Parts]:
        """Return what one of `world_size` ranks goes on from: its own tensors, or those of every
        rank where the number of ranks has changed. They are read one after another.

        Raises:
            ValueError: one of these ranks is missing.
        """
        old = self.world_size
        wanted = range(rank, rank + 1) if old == world_size else range(old)
        missing = next((one for one in wanted if str(one) not in self.ranks), None)
        if missing is not None:
            found = ", ".join(sorted(self.ranks)) or "none"
            raise ValueError(
                f"values of rank {missing} are missing: the run had {old} ranks, this one has"
                f" {world_size}, and the state has rank {found}; give load_state_dict a list of the"
                " states of all ranks, one of every rank of one run"
            )
        return (_parts(self._read(str(one)), f"rank {one}") for one in wanted)


# ---- checks --------------------------------------------------------------------------------------


def check_mapping(value: object, what: str, keys: Sequence[str] = ()) -> None:
    """Raise ValueError unless a value is a dictionary with these keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is a dictionary, got {value!r:.80}")  # noqa: TRY004
    missing = [key for key in keys if key not in value]
    if missing:
        raise ValueError(f"{what} has no {missing[0]!r}: it is not from gradcomp's state_dict()")


def check_step(step: object, name: str = "step", of: str = "") -> None:
    """Raise ValueError unless a value can count steps, `of` a parameter, say."""
    if type(step) is not int or not 0 <= step < STEPS:
        raise ValueError(
            f"this state has {name} {step!r}{of}, an integer of at least 0 and below 2^32 expected"
        )


def check_tensors(
    state: Any,
    shapes: Mapping[str, Sequence[int]],
    what: str,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    stored: torch.dtype = torch.float32,
) -> None:
    """Raise ValueError unless a state has a tensor for each name.

    Args:
        state: by name.
        shapes: which tensors are expected.
        what: they are, for messages.
        dtypes: which they may have.
        stored: dtype in which they are kept, and must be finite.
    """
    check_mapping(state, f"the {what}s by name")
    if state.keys() != shapes.keys():
        odd = min(state.keys() ^ shapes.keys(), key=str)
        raise ValueError(f"{what}s do not fit this model and codec: {odd!r} is on one side only")
    for name, shape in shapes.items():
        tensor = state[name]
        is_dense = isinstance(tensor, Tensor) and tensor.layout == torch.strided
        fits = is_dense and tensor.shape == torch.Size(shape) and tensor.dtype in dtypes
        if not fits or tensor.is_meta:
            wanted = f"{tuple(shape)} {' or '.join(map(str, dtypes))}"
            got = f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}" if is_dense else tensor
            raise ValueError(f"the {what} of {name!r} must be {wanted}, got {got!s:.100}")
        if not bool(torch.isfinite(tensor.to(stored)).all()):
            raise ValueError(f"the {what} of {name!r} has values that are not finite in {stored}")


def _check_format(state: Any) -> None:
    check_mapping(state, "a state")
    if "version" not in state:
        check_mapping(state, "this state", ("format",))
    found = state.get("format")
    if type(found) is not int or found != FORMAT:
        raise ValueError(
            f"another version of gradcomp wrote this state (format {found!r}, {FORMAT} expected):"
            " go on with that version, or leave the state out and begin with residuals of zero"
        )


def _counted(parts: Parts) -> dict[str, Any]:
    return {"tensors": sum(map(len, parts.values())), **parts}


def _parts(given: Any, what: str) -> dict[str, Mapping[str, Tensor]]:
    """Return parts without their count, which must be right."""
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
    """Return what several ranks have saved in one place as one, "ranks" of states united.

    Raises:
        ValueError: something else is not the same on all of them, or a rank is there twice.
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
    """Return the means of several ranks' tensors, float64; they have the same names and shapes."""
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
    """Return the parts of one of `world_size` ranks, made from those of all ranks of a run.

    Each new rank gets the mean of the old ranks' residuals: what they have left out of averages so
    far. Owners' residuals, and states of an owner's transform, are joined and cut anew; where new
    ranks keep no owner's residuals these are added to everyone's. States of a local transform
    become their mean. A single rank adds its residuals to its next gradients.

    Args:
        old: by rank, ``(numel,)`` float32 tensors.
        rank, world_size: of the new run.
        numels: of this model's whole tensors, by part and name.
        owns_means: whether the new ranks keep owners' residuals.
        place: of the transform whose states are to be brought over, "" without one.

    Raises:
        ValueError: tensors that are not those of this model.
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
        """Return what this rank owns of whole tensors."""
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
    """Return one part of all ranks by name: side by side what each has `owned`, or the mean; empty
    if it is so on all ranks.
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
        raise ValueError(f"{part} in this state is of some ranks only")
    if True not in begun:
        return {}
    if owned:
        return {n: torch.cat([tensors[n] for tensors in each if tensors]) for n in numels[part]}
    return {name: tensor.float() for name, tensor in mean_by_name(each).items()}
