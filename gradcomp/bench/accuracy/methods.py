"""How gradients are averaged: the rows of the table, and how the command line says them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradcomp.codecs import Block, Codec, Identity, OneBit, Ternary, TernGrad, TopK

PRESETS: dict[
    str, Callable[[str, nn.Parameter], bool]
] = {  # what travels in fp32, as patterns of names and of shapes
    "none": lambda name, parameter: False,
    "vectors": lambda name, parameter: parameter.ndim < 2,
    "ends": (
        lambda name, parameter: (
            parameter.ndim < 2 or name.startswith(("embedding", "position", "head", "stem"))
        )
    ),
}


@dataclass(frozen=True)
class Method:
    """One way to average.

    Attributes:
        name: for tables.
        codec: what packs gradients; None for a plain all_reduce in `dtype`.
        dtype: of a plain all_reduce.
        exempt: which tensors travel in fp32: a key of `PRESETS`.
        options: of `gradcomp.GradientAverager`.
        momentum: "" for gradients that travel; "frozen" or "renewed" for momenta, of a variance as
            1-bit Adam's or as 0/1 Adam's, with a warm-up of `start_step` (until then the variance
            is renewed).
        feedback: whether residuals are kept; otherwise every step forgets what its codes have left
            out.
        local: of `gradcomp.DiLoCo`, and ``outer_lr`` and ``outer_momentum``: weights' changes are
            averaged now and then; empty: gradients are, every step.
    """

    name: str
    codec: Codec | None = None
    dtype: torch.dtype = torch.float32
    exempt: str = "none"
    options: dict[str, Any] = field(default_factory=dict)
    momentum: str = ""
    feedback: bool = True
    local: dict[str, Any] = field(default_factory=dict)

    def options_for(self, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, Any]:
        """Return the options for these parameters; without an exemption every tensor is
        compressed, however small.
        """
        exempt = PRESETS[self.exempt]
        options = {
            name: value
            for name, value in self.options.items()
            if name != "start_step" or not self.momentum
        }
        return {
            "min_numel": 0,
            "exclude": [n for n, p in named if exempt(n, p)],
            "timeout_s": 600.0,
        } | options


CODEC = {
    "step": "step",
    "decay": "residual_decay",
    "group": "group",
}  # options of codecs, by what the command line calls them
LOCAL = {
    "every": int,
    "fragments": int,
    "delay": int,
    "alpha": float,
    "outer_lr": float,
    "outer_momentum": float,
}

METHODS: dict[str, Callable[[], Method]] = {
    "fp32": lambda: Method("fp32", Identity()),
    "bf16": lambda: Method("bf16", None, torch.bfloat16),
    "ternary": lambda: Method("ternary", Ternary()),
    "terngrad": lambda: Method("terngrad", TernGrad()),
    "terngrad-requantize": lambda: Method(
        "terngrad-requantize", TernGrad(scale="own", second_phase="requantize")
    ),
    "onebit": lambda: Method("onebit", OneBit()),
    "block2": lambda: Method("block2", Block(2)),
    "block4": lambda: Method("block4", Block(4)),
    "block8": lambda: Method("block8", Block(8)),
    "topk": lambda: Method("topk", TopK()),
}


def parse(text: str) -> Method:
    """Return the method that the command line names: ``onebit``,
    ``onebit:exempt=ends,start_step=100``, ``block2:precondition``.

    Raises:
        ValueError: no such method, preset or option.
    """
    name, _, rest = text.partition(":")
    if name not in METHODS:
        raise ValueError(f"no method named {name!r}; there are {', '.join(METHODS)}")
    method = METHODS[name]()
    options, exempt, momentum, codec, feedback = (
        dict(method.options),
        method.exempt,
        "",
        method.codec,
        True,
    )
    local: dict[str, Any] = {}
    for word in filter(None, rest.split(",")):
        key, _, value = word.partition("=")
        if key == "exempt":
            if value not in PRESETS:
                raise ValueError(f"exempt must be one of {', '.join(PRESETS)}, got {value!r}")
            exempt = value
        elif key in ("start_step", "min_numel", "slice_numel"):
            options[key] = int(value)
        elif key == "exchange":
            options[key] = value
        elif key == "second":
            if codec is None or codec.gathers_only:
                raise ValueError(
                    f"{name} has no second phase: it is"
                    f" {'no codec' if codec is None else 'gathered by all ranks'}"
                )
            codec = type(codec)(**codec.options() | {"second_phase": value})
        elif key in CODEC:
            given = {} if codec is None else codec.options()
            if codec is None or CODEC[key] not in given:
                raise ValueError(f"{text}: {name} has no {key}=")
            number = key != "group" or value.isdecimal()
            codec = type(codec)(
                **given
                | {CODEC[key]: (int if key == "group" else float)(value) if number else value}
            )
        elif key == "start":
            options["start_codec"] = parse(value).codec
            if options["start_codec"] is None:
                raise ValueError(f"{text}: a warm start is packed by a codec, {value} is none")
        elif key == "rotate":
            if not isinstance(codec, OneBit):
                raise ValueError(f"{text}: rotate is for onebit")
            codec = OneBit(rotate=True, second_phase=codec.second_phase)
        elif key == "precondition":
            options[key] = True
        elif key == "momentum":
            momentum = value or "frozen"
            if momentum not in ("frozen", "renewed"):
                raise ValueError(f"momentum must be frozen or renewed, got {value!r}")
        elif key in LOCAL:
            local[key] = LOCAL[key](value)
        elif key == "feedback":
            if value != "off" or codec is None or not codec.error_feedback:
                raise ValueError(f"{text}: feedback=off is for codecs that have feedback")
            feedback = False
        else:
            known = (
                "exempt, start_step, start, second, rotate, step, decay, group, min_numel,"
                " slice_numel, exchange, precondition, momentum, feedback, "
            )
            known += ", ".join(LOCAL)
            raise ValueError(f"unknown option {key!r} of {name}: {known}")
    if "start_codec" in options and not options.get("start_step"):
        raise ValueError(f"{text}: start= packs the steps before start_step=N")
    if momentum and (codec is None or not options.get("start_step")):
        raise ValueError(f"{text}: momentum needs a codec and a warm-up, start_step=N")
    if momentum == "renewed" and "start_codec" in options:
        raise ValueError(
            f"{text}: gradients and momenta take turns in a renewed warm-up, so start= cannot"
            " pack it"
        )
    if not feedback and (momentum or options.get("precondition")):
        raise ValueError(
            f"{text}: a step that is forgotten has neither momentum nor second moments"
        )
    if local and (codec is None or "every" not in local or momentum or not feedback):
        raise ValueError(
            f"{text}: local steps need a codec and every=H, and go with neither momentum nor"
            " feedback=off"
        )
    return Method(text, codec, method.dtype, exempt, options, momentum, feedback, local)
