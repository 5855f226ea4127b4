"""One colour for each way of exchanging gradients, the same in every picture."""

from __future__ import annotations

from itertools import cycle, islice

from gradcomp.plan.costs import METHODS

_CHOSEN = {
    "fp32": "#444444",
    "bf16": "#999999",
    "terngrad all_gather": "#56b4e9",
    "terngrad exact": "#009e73",
    "terngrad requantize": "#0072b2",
    "terngrad own requantize": "#cc79a7",
    "onebit all_gather": "#e69f00",
    "onebit reduce_scatter": "#d55e00",
}
_REST = ("#882255", "#117733", "#332288", "#999933", "#aa4499", "#661100")


def color_of(name: str) -> str:
    """Return the colour of a method of `gradcomp.plan.METHODS` (or of a name that a benchmark
    adds to them).
    """
    others = [method.name for method in METHODS if method.name not in _CHOSEN]
    colors = _CHOSEN | dict(zip(others, islice(cycle(_REST), len(others)), strict=True))
    return colors.get(name, "#000000")
