"""Whether saved states are those of a model's local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradcomp.local.fragment import Fragment

STATE_VERSION = 1


def check(states: Sequence[dict[str, Any]], kind: str, start_step: int, fragments: Sequence[Fragment]) -> None:
    """Raise ValueError unless states, of one rank or of all, are of this class, start and fragments."""
    if not states:
        raise ValueError("no states")
    for one in states:
        if one.get("version") != STATE_VERSION or len(one["fragments"]) != len(fragments):
            raise ValueError(
                f"a state of version {one.get('version')} with {len(one.get('fragments', ()))} fragments; "
                f"here: version {STATE_VERSION}, {len(fragments)} fragments"
            )
        for name, mine in (("kind", kind), ("start_step", start_step)):
            if one[name] != mine:
                raise ValueError(f"the state has {name} {one[name]!r}, this has {mine!r}")
        for fragment, theirs in zip(fragments, one["fragments"], strict=True):
            fragment.check(theirs)
