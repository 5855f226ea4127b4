"""The reduce-scatter of one FSDP module: every rank sends encoded gradients of a chunk to the
chunk's owner, who averages them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator, group_rank
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.exchange.bucket import BucketExchange, ExchangeOptions
from gradcomp.exchange.pipeline import Task
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.parts import Part, number_of, slots_of
from gradcomp.fsdp.residuals import ModuleResiduals
from gradcomp.kernels import empty, encoding_device
from gradcomp.kernels.staging import Shared, Staged, follow, join, on_stream
from gradcomp.kernels.tables import DTYPES
from gradcomp.memory.store import StateStore
from gradcomp.payload.pieces import BySlots

IN_FLIGHT = 2  # modules with a reduce-scatter in progress at the same time, at most


class ReduceScatter:
    """Compressed reduce-scatter of one FSDP module's gradients.

    Args:
        module, name, parts: see below.
        codecs: codec of the warm-up, and codec after it.
        warmup_steps: number of reduce-scatters in the warm-up.
        comm: communicator of the ranks that share the module.
        stats: counts bytes and seconds.
        probe: samples the quality of codes after the warm-up.
        staged: host buffers for gradients on an accelerator, in use until `encode` returns.
        residuals: residuals of the module; None if no codec has error feedback.

    Attributes:
        module: the FSDP module.
        name: name of the module, for messages.
        parts: its parameters, in the order of their gradients.
        steps: reduce-scatters so far.
        is_under_way: whether a reduce-scatter is in progress.
    """

    def __init__(
        self,
        module: object,
        name: str,
        parts: Sequence[Part],
        codecs: tuple[Codec, Codec],
        warmup_steps: int,
        comm: TorchCommunicator,
        stats: Stats,
        probe: Probe,
        staged: Shared,
        residuals: ModuleResiduals | None = None,
    ) -> None:
        self.module, self.name, self.parts, self.steps = module, name, list(parts), 0
        self._codecs, self._warmup_steps = codecs, warmup_steps
        self._comm, self._stats, self._probe, self._residuals = comm, stats, probe, residuals
        self._staged = staged
        self._exchanges: dict[tuple[object, ...], BucketExchange] = {}
        self.is_under_way = False

    def fits(self, numel: int) -> bool:
        """Whether `numel` values can be the gradients of all trained parameters of the module."""
        return numel == self._comm.world_size * sum(part.padded_numel for part in self._trained())

    def start(self, output: Tensor, grads: Tensor, factor: int) -> Task:
        """Start the reduce-scatter of this module's gradients; return the task that completes it.

        `output` is filled with NaN until `finish` writes it: torch puts it into ``.grad`` at once,
        and `finish` may never run if the backward pass fails.

        Args:
            output: ``(k,)``: averages of this rank's chunks, times `factor`.
            grads: ``(N * k,)`` float32, bfloat16 or float16 gradients.
            factor: factor of the averages.
        """
        output.fill_(float("nan"))
        exchange = self._exchange(grads.dtype, grads.device, self._trained())
        staged = None if encoding_device(grads.device) == grads.device else self._staged.like(grads)
        follow(grads.device)
        exchange.begin(grads if staged is None else staged.fetch(grads), self.steps, 0)
        self._stats.baseline_bytes += 2 * (grads.numel() - output.numel()) * grads.element_size()
        self.is_under_way = True
        encode = partial(self.encode, exchange, staged, grads.device)
        finish = partial(self.finish, exchange, output, factor)
        # between encode and finish the pipeline encodes the next module
        return Task((encode, *[lambda: None] * (IN_FLIGHT - 1), finish), self._end)

    def encode(self, exchange: BucketExchange, staged: Staged | None, device: torch.device) -> None:
        """Encode gradients and start to send them."""
        if staged is not None:
            staged.wait()
        with peers_answer("first_phase", 0), on_stream(device):
            exchange.measure()
            exchange.encode()
        exchange.forget()
        self.steps += 1
        self._stats.steps += 1

    def finish(self, exchange: BucketExchange, output: Tensor, factor: int) -> None:
        """Wait for the payloads of the other ranks and write averages to `output`; NaN if some
        rank's gradients have NaN or Inf. Commit residuals, or discard them if flagged.
        """
        begun = time.perf_counter()
        first = output.numel() * self._comm.rank
        places = sorted(
            (piece.slot.offset - first, piece.data, piece.numel)
            for piece in exchange.plan.own_second.pieces
        )
        # whether averages can be computed in `output`
        as_they_are = output.dtype == torch.float32 and output.device == exchange.shard.device
        as_they_are = as_they_are and all(there == here for there, here, _ in places)
        with on_stream(output.device):
            exchange.average_shard(output if as_they_are else None)
            if exchange.flagged:
                output.fill_(float("nan"))
                self._stats.nonfinite_buckets += 1
                self._discard()
            else:
                exchange.commit()
                filled = 0
                for there, here, numel in places:
                    output[filled:there].zero_()  # padding of chunks
                    if not as_they_are:
                        output[there : there + numel].copy_(exchange.shard[here : here + numel])
                    filled = there + numel
                output[filled:].zero_()
                if factor != 1:
                    output.mul_(factor)
        join(output.device)
        self._stats.add_seconds("exposed", time.perf_counter() - begun)

    def _discard(self) -> None:
        """Discard the residuals of this step."""
        if self._residuals is not None:
            self._residuals.discard()

    def _end(self, error: BaseException | None) -> None:
        self.is_under_way = False
        if error is not None:
            self._discard()
            # collectives in progress may still write to the buffers: do not reuse them
            self._exchanges.clear()

    def _trained(self) -> list[Part]:
        return [part for part in self.parts if part.sharded.requires_grad]

    def _exchange(
        self, dtype: torch.dtype, device: torch.device, trained: Sequence[Part]
    ) -> BucketExchange:
        if dtype not in DTYPES:
            raise GradcompError(
                f"gradients of {dtype} are not packed; float32, bfloat16 and float16 are"
            )
        codec = self._codecs[self.steps >= self._warmup_steps]
        kind = codec, dtype, device, tuple(part.parameter.index for part in trained)
        if kind not in self._exchanges:
            if self.steps == self._warmup_steps:
                self._exchanges.clear()  # free the buffers of the warm-up
            world = self._comm.world_size
            plan = BucketPlan(
                codec,
                list(chain.from_iterable(slots_of(trained, world, self._residuals))),
                Strategy("reduce_scatter", "fp32"),
                world,
                self._comm.rank,
                ownership=BySlots(world),
                stays=True,
            )
            options = ExchangeOptions(
                dtype,
                self._stats,
                StateStore(self._residuals if codec.error_feedback else None),
                seed=codec.seed,
                draw_rank=group_rank(),  # replicas of a shard need different random numbers
                timeout_s=self._comm.timeout_s,
                probe=self._probe if self.steps >= self._warmup_steps else None,
                device=encoding_device(device),
                module=number_of(self.parts),
            )
            self._exchanges[kind] = BucketExchange(plan, self._comm, options)
        return self._exchanges[kind]


def allocator(
    reused: torch_private.ReusedTensors, module: ReduceScatter | None = None
) -> torch_private.Allocate:
    """Return an allocator that reuses host memory; torch itself reuses accelerator memory. For a
    `module` only its unsharded gradients: shards become a parameter's ``.grad``.
    """

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        reuses = device.type == "cpu" and (module is None or module.fits(numel))
        return (reused.take if reuses else empty)(numel, dtype, device)

    return allocate
