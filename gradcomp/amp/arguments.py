"""Checks of arguments that scaler and updater share."""

from __future__ import annotations


def is_number(value: object) -> bool:
    """Whether `value` is an int or a float, NaN and Inf among them; a bool is neither, nor an
    int that no float holds.
    """
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**1000
    return isinstance(value, float)


def check_count(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is an integer from `least` to 2^31 - 1."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(
            f"{name} must be an integer of at least {least} (below 2^31), got {value!r}"
        )
