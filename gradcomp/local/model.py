"""The parameters of a model that take part in syncs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradcomp.errors import UnsupportedTensor


class Trained:
    """A model's trained parameters as they are now, which later ones are compared with.

    Args:
        model: a plain module.

    Attributes:
        named: (name, parameter).

    Raises:
        TypeError: a DDP model, or no module.
        UnsupportedTensor: a parameter that is not float32, bfloat16 or float16.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if isinstance(model, DistributedDataParallel):
            raise TypeError(
                "DDP averages gradients every step: pass the module that it wraps, model.module"
            )
        self._model = model
        self.named = self._now()
        for name, p in self.named:
            if p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise UnsupportedTensor(
                    f"{name} is {p.dtype}: anchors are fp32, of float32, bfloat16 or float16"
                )
        self._known = {name: id(p) for name, p in self.named}

    def _now(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def check(self, called: str) -> None:
        """Raise ValueError if the model trains parameters that take no part in the syncs of what
        is `called` so.
        """
        for name, p in self._now():
            if self._known.get(name) != id(p):
                what = "was replaced" if name in self._known else "was not trained, or not there"
                raise ValueError(
                    f"{name} {what} when this {called} was made, and is in no sync: make it anew"
                )
