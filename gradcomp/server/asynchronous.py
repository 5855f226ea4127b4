"""An asynchronous key: every push is applied at once, pulls never wait.

References:
    Dean et al. 2012, "Large scale distributed deep networks" (Downpour SGD).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradcomp.server.messages import Message
from gradcomp.server.parameter import Answer, Parameter
from gradcomp.server.reduce import PackedReducer
from gradcomp.server.spec import Spec
from gradcomp.server.state import State


class AsynchronousParameter(Parameter):
    """A key with a value: parameter = fl(parameter + fl(learning_rate * pushed value)), in order of
    arrival.

    Args:
        value: initial values, ``(numel,)`` float32; copied.
    """

    def __init__(
        self, key: str, spec: Spec, first_rank: int, workers: Sequence[int], value: Tensor
    ) -> None:
        super().__init__(key, spec, first_rank, workers)
        self._value = value.clone()
        self._packed = PackedReducer(spec, key) if spec.dtype == "uint8" else None
        self._applied = 0
        self._own = dict.fromkeys(self.workers, 0)
        self._seen = dict.fromkeys(
            self.workers, 0
        )  # pushes of others that a worker's last pull held
        self._waiting: dict[int, int] = {}

    def push(self, rank: int, value: Tensor) -> int:
        self.check_size(value)
        if self._packed is not None:
            header = self._packed.admit(value)
            if header.numel != self._value.numel():
                numel = self._value.numel()
                raise ValueError(
                    f"key {self.key!r} has {numel} elements, the payload of rank {rank}"
                    f" {header.numel}"
                )
            step = self._packed.average([value])
        else:
            step = value.view(torch.float32)
        if not bool(torch.isfinite(step).all()):
            raise ValueError(
                f"a push of rank {rank} to key {self.key!r} holds NaN or Inf; it was not applied"
            )
        self._value += step * self.spec.learning_rate
        staleness = self._others(rank) - self._seen[rank]
        self._applied += 1
        self._own[rank] += 1
        return staleness

    def pull(self, rank: int, message: Message) -> None:
        self.spec.check_method(self.key, message.method, message.compressed)
        self._seen[rank] = self._others(rank)
        self._waiting[rank] = message.request

    def settle(self) -> list[Answer]:
        answers = [
            Answer(rank, request, self._value.view(torch.uint8))
            for rank, request in self._waiting.items()
        ]
        self._waiting.clear()
        return answers

    def state(self) -> State:
        return State(self.steps + self._applied, self.spec, self._value)

    def _others(self, rank: int) -> int:
        """Return how many pushes of other workers have been applied."""
        return self._applied - self._own[rank]
