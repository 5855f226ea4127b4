"""Parameters that come to a model after it was registered: no bucket holds their gradients, every
rank trains them apart.

Nobody walks through the model at every step for that: torch says when any module or parameter is
registered anywhere in the process, and only a model that is used after that is looked through
again.
"""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn
from torch.nn.modules import module as modules

from gradcomp.errors import GradcompError

_count = itertools.count(1)
_registered = 0  # how many modules and parameters were registered since the first model was watched
_watching = False


def _note(*_: Any) -> None:
    global _registered
    _registered = next(_count)


def _watch() -> None:
    global _watching
    if not _watching:
        _watching = True
        modules.register_module_module_registration_hook(_note)
        modules.register_module_parameter_registration_hook(_note)


class Newcomers:
    """Finds trainable parameters of `model` that it did not have when this was made."""

    def __init__(self, model: nn.Module) -> None:
        _watch()
        self._model = model
        # kept: ids are used again
        self._known = {id(parameter): parameter for parameter in model.parameters()}
        self._seen = _registered

    def refuse(self) -> None:
        """Raise GradcompError if there is one; next to nothing where no module has changed since
        the last call.
        """
        if self._seen == _registered:
            return
        seen = _registered
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise GradcompError(
                    f"parameter {name!r} has come to the model later: no bucket holds its gradient,"
                    " and every rank would train it apart; build the model first, then wrap it,"
                    " and register it or make its averager"
                )
        self._seen = seen
