"""Memory for whole modules, used again: torch asks for new tensors in every step, whose pages
the system then makes one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradcomp.comm import torch_private


class Reused:
    """Flat tensors that are handed out again once nobody holds them or a view of them: as many
    as there are at a time, of each size.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, int]]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return ``(numel,)``, whatever is in it."""
        made = self._made.setdefault((numel, dtype, device), [])
        for tensor, idle in made:
            if torch_private.storage_uses(tensor) <= idle:
                return tensor.view(-1)
        tensor = torch.empty(numel, dtype=dtype, device=device)
        uses = torch_private.storage_uses(tensor)
        if uses:
            made.append((tensor, uses))
        return tensor.view(-1)
