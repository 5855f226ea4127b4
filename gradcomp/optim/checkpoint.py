"""What a saved state must be before a split optimizer takes it over: its own, or that of torch's
optimizer of the name.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from gradcomp.optim.interface import Updates
from gradcomp.optim.options import number
from gradcomp.optim.split import ROUNDINGS

CHECKSUM = "top_checksum"
COUNTED_AT = "counted_at"
TORCHS_OPTIONS = {
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "decoupled_weight_decay",
    "amsgrad",
}
# state of optimizers that derive from one: the one that they derive from goes on without it
DERIVED = {"variance_steps", "floored_at", "coefficient", "factor", "fresh_sq"}
# options that say which optimizer wrote a state; others that are unknown here are the user's own
# and are kept
OWN_OPTIONS = {
    "betas",
    "variant",
    "lr_decay",
    "initial_accumulator_value",
    "momentum",
    "dampening",
    "nesterov",
}


def check_saved(
    optimizer: Updates, saved: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, dict[str, Tensor], int | None]]]:
    """Return what to load: options of every group, and tensors and checksum of every parameter."""
    if not {"state", "param_groups"} <= saved.keys():
        raise ValueError("this is no optimizer's state: it has no 'state' and 'param_groups'")
    theirs = saved["param_groups"]
    sizes, wanted = (
        [len(g["params"]) for g in theirs],
        [len(g["params"]) for g in optimizer.param_groups],
    )
    if sizes != wanted:
        raise ValueError(f"this state has groups of {sizes} parameters, the optimizer {wanted}")
    groups, loads = [], []
    for where, (mine, group) in enumerate(zip(optimizer.param_groups, theirs, strict=True)):
        options = {k: deepcopy(v) for k, v in group.items() if k not in {"params", *TORCHS_OPTIONS}}
        missing = [k for k in optimizer.defaults if k not in group]
        if missing:
            raise ValueError(
                f"group {where} of this state has no {missing[0]!r}: it is from another optimizer"
            )
        foreign = sorted((OWN_OPTIONS & group.keys()) - optimizer.defaults.keys() - mine.keys())
        if foreign or group.get("decoupled_weight_decay", True) is False:
            which = foreign[0] if foreign else "decoupled_weight_decay=False"
            raise ValueError(
                f"group {where} of this state has {which}: it is from another optimizer"
            )
        if options.get("rounding", ROUNDINGS[0]) not in ROUNDINGS:
            raise ValueError(f"group {where} of this state has rounding {options['rounding']!r}")
        if group.get("amsgrad"):
            raise ValueError(
                f"group {where} of this state was trained with amsgrad=True, which is not here"
            )
        optimizer.check_options(mine | options)
        groups.append(options)
        is_own = "rounding" in group
        for place, (p, index) in enumerate(zip(mine["params"], group["params"], strict=True)):
            name = optimizer.name_of(mine, where, place)
            loads.append(
                _check_tensors(
                    optimizer, p, name, dict(saved["state"].get(index, {})), mine | options, is_own
                )
            )
    return groups, loads


def _check_tensors(
    optimizer: Updates,
    p: Tensor,
    name: str,
    state: dict[str, Any],
    group: dict[str, Any],
    is_own: bool,
) -> tuple[Tensor, dict[str, Tensor], int | None]:
    expected = state.pop(CHECKSUM, None)
    moments = optimizer.wanted_moments(group)
    state = {k: v for k, v in state.items() if v is not None}
    if (
        is_own and not state and not p.requires_grad
    ):  # distributed checkpoints leave frozen parameters out
        return p, {}, None
    if not is_own:  # torch's: no trail, no momentum before the first step, SGD without step
        if not state:
            state = {m: optimizer.new_moment(p, m, group) for m in moments} | {"step": 0}
        state.setdefault("step", 1)
    step = float(torch.as_tensor(state.get("step", 0)))
    if (
        float(torch.as_tensor(state.pop(COUNTED_AT, step))) != step
    ):  # torch's optimizer has gone on and kept what it did not know
        state = {
            name: value
            for name, value in state.items()
            if name not in DERIVED or name in optimizer.moments
        }
    if "variance_steps" in state and "variance_steps" not in optimizer.counters:
        state["exp_avg_sq"] = seen_by_all_steps(
            state["exp_avg_sq"], group, float(state["variance_steps"]), step
        )
    if not state.keys() & set(optimizer.counters):
        found = {
            name: optimizer.taken_over(name, p, torch.tensor(step))
            for name in (*optimizer.counters, *moments)
        }
        state = {name: value for name, value in found.items() if value is not None} | state
    kept = {*optimizer.counters, *optimizer.moments}
    state = {name: value for name, value in state.items() if name in kept or name not in DERIVED}
    scalars = {"step", *optimizer.counters}
    wanted = {*scalars, *moments} | ({"trail"} if is_own and p.dtype == torch.bfloat16 else set())
    unknown = state.keys() - wanted - set(optimizer.moments)
    if wanted - state.keys() or unknown:
        what = (
            f"has no {min(wanted - state.keys())!r}"
            if wanted - state.keys()
            else f"has {min(unknown)!r}"
        )
        raise ValueError(
            f"the state of {name} {what}: it is truncated, or of another optimizer or dtype"
        )
    tensors = {}
    for key, value in state.items():
        tensor = torch.as_tensor(value)
        shape = torch.Size(()) if key in scalars else p.shape
        kind = torch.int16 if key == "trail" else torch.float32
        if tensor.shape != shape or (key == "trail") != (tensor.dtype == torch.int16):
            raise ValueError(
                f"{key!r} of {name} is {tensor.dtype} {tuple(tensor.shape)} in this state, {kind}"
                f" {tuple(shape)} expected: it is of another model"
            )
        tensors[key] = tensor.to(kind)
    if int(tensors["step"]) < 0 or float(tensors["step"]) != int(tensors["step"]):
        raise ValueError(f"'step' of {name} is {float(tensors['step'])} in this state")
    return p, tensors, None if expected is None else int(expected)


def seen_by_all_steps(variance: Tensor, group: dict[str, Any], seen: float, step: float) -> Tensor:
    """Return Adam's second moment as it would be after `step` steps, from one that stood still
    after `seen` of them.

    Adam divides it by 1 - beta2 ** step, and what has stood still is to be divided by 1 - beta2 **
    seen.
    """
    beta2 = number(group["betas"][1])
    factor = (1 - beta2**step) / (1 - beta2**seen) if 0 < seen < step else 1.0
    return (variance * factor).nan_to_num(posinf=0.0)
