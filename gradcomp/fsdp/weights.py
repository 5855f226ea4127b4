"""The all_gather of one FSDP module's weights in encoded form.

With `keep_weights` backward decodes the payloads that the last forward has gathered. That is
correct even if weights have changed since: gradients refer to the weights that forward has used. A
later forward without gradients drops the payloads. All ranks decide alike, since they run the same
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradcomp.codecs import Block, Codec, Identity, resolve
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.exchange.bucket import ExchangeOptions
from gradcomp.exchange.gather import BufferPool, ShardGather
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.parts import Part, number_of, slots_of
from gradcomp.kernels import encoding_device
from gradcomp.kernels.tables import DTYPES

Result = TypeVar("Result")


def weights_codec(given: Codec | str) -> Codec:
    """Return the codec of weights, without error feedback: errors of weights do not add up over
    steps.

    Raises:
        ValueError: fewer than 4 bits, or a codec for gradients only.
    """
    codec = resolve(given)
    if isinstance(codec, Block) and codec.bits >= 4:
        return Block(codec.bits, group=codec.group, error_feedback=False)
    if isinstance(codec, Identity):
        return codec
    raise ValueError(
        f"weights={given!r}: weights are gathered as 'block8', 'block4', 'bfloat16' or Block(8,"
        " group=...); other codecs are not supported: weights have no error feedback"
    )


class Forward:
    """Tracks whether the current forward pass, or else the last one, has gradients enabled."""

    def __init__(self) -> None:
        self.with_gradients = False

    def watch(self, module: Any) -> Any:
        """Track the forward passes of `module` by a hook that runs before its weights are gathered;
        return the hook handle.
        """
        look = torch.compiler.disable(self._look)  # type: ignore[no-untyped-call]
        return module.register_forward_pre_hook(look, prepend=True)

    def _look(self, *_: object) -> None:
        self.with_gradients = torch.is_grad_enabled()


class AllGather:
    """Compressed all-gather of one FSDP module's weights.

    Args:
        module: the FSDP module.
        parts: its parameters.
        codec: codec of the weights.
        comm: communicator of the ranks that share the module.
        stats: counts bytes and seconds.
        pool: lends the buffers of payloads.
        forward: tells which forward passes have gradients; None: payloads are not kept.

    Attributes:
        module: the FSDP module.
        count: gathers so far.
    """

    def __init__(
        self,
        module: object,
        parts: Sequence[Part],
        codec: Codec,
        comm: TorchCommunicator,
        stats: Stats,
        pool: BufferPool,
        forward: Forward | None = None,
    ) -> None:
        self.module, self.count = module, 0
        self._forward = forward
        self._kept: tuple[ShardGather, Tensor] | None = None
        self._parts, self._codec, self._comm = list(parts), codec, comm
        self._stats, self._pool = stats, pool
        self._each = sum(part.padded_numel for part in parts)
        self._gathers: dict[tuple[torch.dtype, torch.device], ShardGather] = {}

    def fits(self, shard: Tensor, ranks: int) -> bool:
        """Whether `shard` can be this rank's chunks of all parameters of the module, and `ranks`
        is the number of ranks that share it.
        """
        return (
            ranks == self._comm.world_size and shard.numel() == self._each and shard.dtype in DTYPES
        )

    def start(self, output: Tensor, shard: Tensor) -> Callable[[], None]:
        """Encode this rank's chunks and start the gather; return a function that completes it.

        Args:
            output: ``(N * k,)``, the chunks of all ranks, written by the returned function.
            shard: ``(k,)`` weights of this rank's chunks.
        """
        there = encoding_device(shard.device)
        gather = self._gather(shard.dtype, there)
        self._stats.baseline_bytes += (output.numel() - shard.numel()) * shard.element_size()
        in_backward = torch_private.graph_task() >= 0
        if in_backward and self._kept is not None and self._kept[0] is gather:
            buffer, self._kept = self._kept[1], None
            return lambda: self._write(partial(gather.again, buffer), output)
        keep = not in_backward and self._forward is not None and self._forward.with_gradients
        keep = keep and torch_private.reshards_after_forward(self.module)
        # drop the payloads of an earlier forward: this one's backward must not use them
        if not keep and self._kept is not None:
            self._pool.give(self._kept[1])
            self._kept = None
        gather.start(shard.to(there), self.count)
        self.count += 1
        self._stats.steps += 1
        return lambda: self._finish(gather, output, keep)

    def _finish(self, gather: ShardGather, output: Tensor, keep: bool) -> None:
        buffer = self._write(partial(gather.finish, keep=keep), output)
        if keep and self._kept is not None:
            self._pool.give(self._kept[1])
        if keep:
            self._kept = None if buffer is None else (gather, buffer)

    def _gather(self, dtype: torch.dtype, device: torch.device) -> ShardGather:
        kind = dtype, device
        if kind not in self._gathers:
            comm, module = self._comm, number_of(self._parts)
            slots, first = slots_of(self._parts, comm.world_size), comm.rank * self._each
            options = ExchangeOptions(
                dtype, self._stats, timeout_s=comm.timeout_s, device=device, module=module
            )
            self._gathers[kind] = ShardGather(self._codec, slots, first, comm, self._pool, options)
        return self._gathers[kind]

    @staticmethod
    def _write(call: Callable[[Tensor], Result], output: Tensor) -> Result:
        """Call a function that writes to `output`; if the kernels run on the host, let it write to
        a host tensor and copy that.
        """
        if encoding_device(output.device) == output.device:
            return call(output)
        host_output = torch.empty_like(output, device=encoding_device(output.device))
        result = call(host_output)
        output.copy_(host_output)
        return result
