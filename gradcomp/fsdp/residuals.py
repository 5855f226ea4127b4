"""What codes have left out of a rank's gradients: as large as these, so kept in one plane, which
may be of 16 bits.

An exchange reads and writes float32 planes. Modules under way borrow a pair each: it is filled from
what is kept before a module's gradients are encoded, and written back when every rank has them.
Until then what is kept stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.exchange.gather import BufferPool
from gradcomp.fsdp.parts import Part
from gradcomp.memory.planes import Planes

FLOAT_NBYTES = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Kept:
    """Residuals of all parameters of a model whose gradients are packed with feedback, as long as
    the run lasts.

    Args:
        dtype: "fp32" or "bf16".

    Attributes:
        dtype: as given.
        pool: memory for the planes of modules under way.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: str) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"residuals must be one of {sorted(DTYPES)}, got {dtype!r}")
        self.dtype, self._dtype = dtype, DTYPES[dtype]
        self.pool = BufferPool()
        self._known: dict[str, tuple[Part, Tensor]] = {}

    def add(self, parts: Iterable[Part]) -> None:
        """Keep residuals of those parameters that are compressed from now on, zero at first."""
        for part in parts:
            if part.parameter.compressed:
                rows = torch.zeros(len(part.chunks), part.padded_numel, dtype=self._dtype)
                self._known[part.parameter.name] = part, rows

    def of(self, part: Part) -> Tensor:
        """Return those of a parameter, a row for every rank's chunk, padded."""
        return self._known[part.parameter.name][1]

    @property
    def nbytes(self) -> int:
        """Of everything that is kept."""
        return sum(kept.nbytes for _, kept in self._known.values())

    def state(self) -> dict[str, Tensor]:
        """Return copies by name, each of its parameter's shape."""
        return {name: part.joined(kept).clone() for name, (part, kept) in self._known.items()}

    def load(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Take the mean of several ranks' residuals, by name and of the parameters' shapes, zero of
        none; nothing is taken from some that do not fit.

        Raises:
            ValueError: other parameters, shapes or dtypes, or a value that is not finite.
        """
        total: dict[str, Tensor] = {}
        count = 0
        for state in states:
            self._check(state)
            count += 1
            for name, given in state.items():
                total[name] = given.double() if name not in total else total[name].add_(given)
        for name, (part, kept) in self._known.items():
            if not count:
                kept.zero_()
                continue
            for row, chunk in zip(kept, part.split(total[name] / count), strict=True):
                row[: chunk.numel()].copy_(chunk.reshape(-1))

    def _check(self, state: Mapping[str, Tensor]) -> None:
        if state.keys() != self._known.keys():
            odd = min(state.keys() ^ self._known.keys(), key=str)
            raise ValueError(
                f"residuals do not fit this model and codec: {odd!r} is on one side only"
            )
        for name, (part, _) in self._known.items():
            given, shape = state[name], torch.Size(part.parameter.shape)
            if (
                not isinstance(given, Tensor)
                or given.layout != torch.strided
                or given.shape != shape
            ):
                raise ValueError(
                    f"the residual of {name!r} must be a tensor of {tuple(shape)}, got {given!r}"[
                        :200
                    ]
                )
            if given.dtype not in DTYPES.values() or given.is_meta:
                raise ValueError(
                    f"the residual of {name!r} is {given.dtype} on {given.device}; float32 or"
                    " bfloat16 expected"
                )
            if not bool(torch.isfinite(given.to(self._dtype)).all()):
                raise ValueError(
                    f"the residual of {name!r} has values that are not finite in {self._dtype}"
                )


class Carried(Planes):
    """The residuals of one module's gradients, as an exchange sees them.

    Args:
        parts: of the module, as their gradients stand.
        kept: where they are between steps.
    """

    def __init__(self, parts: Sequence[Part], kept: Kept) -> None:
        super().__init__({})
        self._kept = kept
        self._buffer: Tensor | None = None  # both planes, while a step is under way
        self._rows = len(parts[0].chunks)
        self._each = sum(part.padded_numel for part in parts)
        self._places = []
        offset = 0
        for part in parts:
            if part.parameter.compressed:
                self._places.append((part, offset))
            offset += part.padded_numel

    def tensors(self, indices: Iterable[int]) -> tuple[Tensor, Tensor]:
        if self._buffer is None:
            self._buffer = self._kept.pool.take(2 * FLOAT_NBYTES * self._rows * self._each)
        old, new = self._pair(self._buffer)
        for part, offset in self._places:
            self._cut(old, part, offset).copy_(self._kept.of(part))
        return old, new

    def commit(self, indices: Iterable[int]) -> None:
        if self._buffer is None:  # discarded
            return
        _, new = self._pair(self._buffer)
        for part, offset in self._places:
            self._kept.of(part).copy_(self._cut(new, part, offset))
        self.discard()

    def discard(self) -> None:
        """Leave what is kept as it is, whatever the step under way has written."""
        if self._buffer is not None:
            self._kept.pool.give(self._buffer)
            self._buffer = None

    def _pair(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        numel = self._rows * self._each
        old, new = buffer.view(torch.float32)[: 2 * numel].view(2, numel)
        return old, new

    def _cut(self, plane: Tensor, part: Part, offset: int) -> Tensor:
        return plane.view(self._rows, self._each)[:, offset : offset + part.padded_numel]
