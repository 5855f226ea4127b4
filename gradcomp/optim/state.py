"""Checks of a state dict, of a split optimizer or of torch's, before a split optimizer loads it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradcomp.optim.split import ROUNDINGS

CHECKSUM = "top_checksum"
TORCHS_OPTIONS = {"amsgrad", "capturable", "decoupled_weight_decay", "differentiable"}
TORCHS_OPTIONS |= {"foreach", "fused"}
# Options that identify the optimizer of a state dict; other unknown options are kept as the user's.
SGDS_OPTIONS = {"momentum", "dampening", "nesterov"}
OWN_OPTIONS = {"betas", "variant", "lr_decay", "initial_accumulator_value"} | SGDS_OPTIONS


class Load(NamedTuple):
    """The state to load for one parameter."""

    parameter: Tensor
    tensors: dict[str, Tensor]
    checksum: int | None


def check_saved(optimizer: Any, saved: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Load]]:
    """Check a state dict; return each group's options and each parameter's state to load."""
    if not {"state", "param_groups"} <= saved.keys():
        raise ValueError("this is no optimizer's state: it has no 'state' and 'param_groups'")
    sizes, wanted = (
        [len(g["params"]) for g in groups]
        for groups in (saved["param_groups"], optimizer.param_groups)
    )
    if sizes != wanted:
        raise ValueError(f"this state has groups of {sizes} parameters, the optimizer {wanted}")
    groups, loads = [], []
    pairs = zip(optimizer.param_groups, saved["param_groups"], strict=True)
    for where, (mine, group) in enumerate(pairs):
        options = _check_group(optimizer, f"group {where} of this state", mine, group)
        groups.append(options)
        own = "rounding" in group
        for p, index in zip(mine["params"], group["params"], strict=True):
            state = dict(saved["state"].get(index, {}))
            loads.append(_check_tensors(optimizer, p, state, mine | options, is_own=own))
    return groups, loads


def _check_group(
    optimizer: Any, name: str, mine: dict[str, Any], group: dict[str, Any]
) -> dict[str, Any]:
    """Check a saved group and return its options."""
    options = {k: deepcopy(v) for k, v in group.items() if k not in {"params", *TORCHS_OPTIONS}}
    missing = [k for k in optimizer.defaults if k not in group]
    if missing:
        raise ValueError(f"{name} has no {missing[0]!r}: it is from another optimizer")
    foreign = sorted((OWN_OPTIONS & group.keys()) - optimizer.defaults.keys() - mine.keys())
    if group.get("decoupled_weight_decay", True) is False:
        foreign.append("decoupled_weight_decay=False")
    if foreign:
        raise ValueError(f"{name} has {foreign[0]}: it is from another optimizer")
    if options.get("rounding", ROUNDINGS[0]) not in ROUNDINGS:
        raise ValueError(f"{name} has rounding {options['rounding']!r}")
    if group.get("amsgrad"):
        raise ValueError(f"{name} was trained with amsgrad=True, which is not here")
    optimizer.check_options(mine | options)
    return options


def _check_tensors(
    optimizer: Any, p: Tensor, state: dict[str, Any], group: dict[str, Any], *, is_own: bool
) -> Load:
    """Check a parameter's saved state, for a group with these options; return what to load."""
    expected = state.pop(CHECKSUM, None)
    moments = optimizer.wanted_moments(group)
    state = {k: v for k, v in state.items() if v is not None}
    if is_own and not state and not p.requires_grad:
        return Load(p, {}, None)  # distributed checkpoints leave frozen parameters out
    if not is_own:  # torch saves no trail, no momentum before the first step, no step for SGD
        if not state:
            state = {m: optimizer.new_moment(p, m, group) for m in moments} | {"step": 0}
        state.setdefault("step", 1)
    step = float(torch.as_tensor(state.get("step", 0)))
    wanted = {"step", *moments} | ({"trail"} if is_own and p.dtype == torch.bfloat16 else set())
    missing, unknown = wanted - state.keys(), state.keys() - wanted - set(optimizer.moments)
    if missing or unknown:
        what = f"has no {min(missing)!r}" if missing else f"has {min(unknown)!r}"
        raise ValueError(
            f"the state of {optimizer.name_of(p)} {what}: it is truncated, or of another optimizer"
            " or dtype"
        )
    tensors = {}
    for key, value in state.items():
        tensor = torch.as_tensor(value)
        shape = torch.Size(()) if key == "step" else p.shape
        kind = torch.int16 if key == "trail" else torch.float32
        if tensor.shape != shape or (key == "trail") != (tensor.dtype == torch.int16):
            raise ValueError(
                f"{key!r} of {optimizer.name_of(p)} is {tensor.dtype} {tuple(tensor.shape)} in this"
                f" state, {kind} {tuple(shape)} expected: it is of another model"
            )
        tensors[key] = tensor.to(kind)
    if step < 0 or step != int(step):
        raise ValueError(f"'step' of {optimizer.name_of(p)} is {step} in this state")
    return Load(p, tensors, None if expected is None else int(expected))
