"""Command-line parsing for gradcomp's programs, with errors of one line and suggestions for
misspelled words. Also checks of numeric arguments.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

SIMILAR, VERY_SIMILAR = 0.6, 0.8  # least similarity ratios, from 0 to 1


def to_write(text: str) -> Path:
    """Return a path to which a file can be written; a `type` of argparse. So a wrong path is an
    error before a measurement starts.
    """
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text}: there is no such folder, or nothing can be written there"
        )
    return path


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar known word, and a second one if it is very
    similar; "" if no word is similar.
    """
    asked = word.lower()
    likeness = {
        candidate: difflib.SequenceMatcher(None, asked, candidate.lower()).ratio()
        for candidate in known
    }

    def rank(candidate: str) -> float:  # prefer words with the same beginning
        return likeness[candidate] + 0.2 * len(
            os.path.commonprefix([asked, candidate.lower()])
        ) / max(1, len(asked))

    near = sorted(
        (candidate for candidate in likeness if likeness[candidate] >= SIMILAR),
        key=rank,
        reverse=True,
    )
    chosen = [
        candidate
        for place, candidate in enumerate(near[:2])
        if place == 0 or likeness[candidate] >= VERY_SIMILAR
    ]
    return f"; did you mean {' or '.join(chosen)}?" if chosen else ""


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ValueError unless an argument is an integer from `least` to `most`."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    number: Any = value
    if not is_integer or not least <= number <= (number if most is None else most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}")


def check_number(
    name: str, value: Any, low: float = 0.0, high: float = math.inf, ends: str = "[)"
) -> float:
    """Return an argument as a float.

    Args:
        name: name of the argument, for the message.
        value: the argument.
        low, high: its bounds.
        ends: which bounds are included: "[]", "[)", "(]" or "()".

    Raises:
        ValueError: it is not a finite number within the bounds.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and abs(value) <= sys.float_info.max:
        is_above = value >= low if ends[0] == "[" else value > low
        if is_above and (value <= high if ends[1] == "]" else value < high):
            return float(value)
    above = f"{'of at least' if ends[0] == '[' else 'above'} {low:g}" if low > -math.inf else ""
    below = f"{'at most' if ends[1] == ']' else 'below'} {high:g}" if high < math.inf else ""
    bounds = " and ".join(filter(None, (above, below)))
    raise ValueError(f"{name} must be a finite number {bounds}".rstrip() + f", got {value!r}")


def count(text: str) -> int:
    """Return a positive integer, a `type` of argparse.

    Raises:
        argparse.ArgumentTypeError: the text is not a positive integer.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def counts(text: str) -> list[int]:
    """Return the positive integers of "1,2,4", a `type` of argparse."""
    return [count(part) for part in text.split(",")]


def words(*known: str) -> Callable[[str], list[str]]:
    """Return a `type` of argparse that reads lists such as "a,b" of known words."""

    def read(text: str) -> list[str]:
        names = [word.strip() for word in text.split(",") if word.strip()]
        unknown = next((word for word in names if word not in known), "")
        if unknown or not names:
            choices = f"choose from {', '.join(known)}{suggestion(unknown, known)}"
            raise argparse.ArgumentTypeError(f"unknown name {unknown!r}; {choices}")
        return names

    return read


class _Help(argparse.HelpFormatter):
    """A formatter that keeps the line breaks of multi-line descriptions and wraps the others."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" not in text.strip():
            return super()._fill_text(text, width, indent)
        return "".join(indent + line for line in text.splitlines(keepends=True))


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line instead of the whole usage."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Help} | settings)

    def add_groups(self, text: str, types: Mapping[str, Callable[[str], Any]]) -> None:
        """Add groups of options from a text. The default of every option is None, unless
        `set_defaults` changes it.

        Args:
            text: groups, separated by empty lines: a title, then lines such as
                ``--wait S: longest wait``. An option without a value is a switch; a value such as
                ``{auto,mpi}`` lists the choices.
            types: `type` of argparse by name of the value (``S`` above); by default `str`.
        """
        for described in text.split("\n\n"):
            title, *options = re.split(r"\n(?=--)", described)
            group = self.add_argument_group(title)
            for option in options:
                head, words = option.split(": ", 1)
                name, _, value = head.partition(" ")
                settings: dict[str, Any] = {"metavar": value, "type": types.get(value, str)}
                if value.startswith("{"):
                    settings["choices"] = value[1:-1].split(",")
                elif not value:
                    settings = {"action": "store_true", "default": None}
                group.add_argument(name, help=" ".join(words.split()), **settings)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Return the parsed arguments; exit with status 2 if an argument is unknown."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            word = next((r for r in rest if r.startswith("-")), rest[0]).partition("=")[0]
            what = "option" if word.startswith("-") else "argument"
            self.error(f"unknown {what} {word}{suggestion(word, self._option_string_actions)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print the message in one line and exit with status 2."""
        self.exit(2, f"{self.prog}: {message} (--help lists all options)\n")
