"""Which state packs what an FSDP module sends: one at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping
from typing import Any

from torch import nn

_owners: MutableMapping[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def claim(modules: Iterable[Any], state: Any) -> None:
    """Note that `state` packs what these modules send.

    Raises:
        ValueError: another state does, for one of them; nothing is noted then.
    """
    found = list(modules)
    for module in found:
        owner = _owners[module]() if module in _owners else None
        if owner is not None:
            raise ValueError(
                f"gradcomp.fsdp.register has been called for this model ({type(module).__name__})"
                f" before, with codec {owner.codec!r}: close() the state that it returned first"
            )
    for module in found:
        _owners[module] = weakref.ref(state)


def release(state: Any) -> None:
    """Forget what `claim` has noted for a state."""
    for module in [module for module, owner in _owners.items() if owner() is state]:
        del _owners[module]
