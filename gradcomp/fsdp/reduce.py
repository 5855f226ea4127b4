"""The reduce-scatter of one FSDP module: what a rank has of a chunk goes packed to the chunk's
owner, who averages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator, group_rank
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.pipeline import Task
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.parts import Part, number_of, slots_of
from gradcomp.fsdp.residuals import ModuleResiduals
from gradcomp.kernels import home
from gradcomp.kernels.staging import Shared, Staged, follow, join, on_stream
from gradcomp.kernels.tables import DTYPES
from gradcomp.memory.store import StateStore
from gradcomp.payload.pieces import BySlots

IN_FLIGHT = 2  # modules whose averages are on their way between calls, at most


class ReduceScatter:
    """Averages of one FSDP module's gradients, a chunk a rank.

    Args:
        module, name, parts: see below.
        codecs: of the gradients, in the warm-up and after it.
        warmup_steps: the first so many reduce-scatters belong to the warm-up.
        comm: the ranks that share the module out.
        stats: counts bytes and seconds.
        probe: samples what codes make of gradients, after the warm-up.
        staged: host memory for gradients on an accelerator, needed until `encode` returns.
        residuals: of the module, for codecs that leave some.

    Attributes:
        module: as torch has it.
        name: of the module, for messages.
        parts: its parameters, in the order in which their gradients stand.
        steps: reduce-scatters so far.
        is_under_way: gradients have been taken that are not averaged yet.
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
        """Whether so many values are the gradients of all trained parameters of the module."""
        return numel == self._comm.world_size * sum(part.padded_numel for part in self._trained())

    def start(self, output: Tensor, given: Tensor, factor: int) -> Task:
        """Take ``(N * k,)`` gradients; return what averages them and writes `factor` times the
        averages of this rank's chunks to ``(k,)``.

        Until then these are NaN: torch puts them into ``.grad`` at once, and whatever ends the
        backward pass may keep `finish` from being called.
        """
        output.fill_(float("nan"))
        exchange = self._exchange(given.dtype, given.device, self._trained())
        staged = None if home(given.device) == given.device else self._staged.like(given)
        follow(given.device)
        exchange.begin(given if staged is None else staged.fetch(given), self.steps, 0)
        self._stats.baseline_bytes += 2 * (given.numel() - output.numel()) * given.element_size()
        self.is_under_way = True
        encode = partial(self.encode, exchange, staged, given.device)
        finish = partial(self.finish, exchange, output, factor)
        # nothing is done with a module while it travels and the next one is encoded
        return Task((encode, *[lambda: None] * (IN_FLIGHT - 1), finish), self._end)

    def encode(self, exchange: BucketExchange, staged: Staged | None, device: torch.device) -> None:
        """Encode gradients and send them."""
        if staged is not None:
            staged.wait()
        with peers_answer("first_phase", 0), on_stream(device):
            exchange.measure()
            exchange.encode()
        exchange.forget()
        self.steps += 1
        self._stats.steps += 1

    def finish(self, exchange: BucketExchange, output: Tensor, factor: int) -> None:
        """Wait for what the other ranks have sent, and average; NaN if some rank's gradients
        have NaN or Inf.
        """
        begun = time.perf_counter()
        first = output.numel() * self._comm.rank
        places = sorted(
            (piece.slot.offset - first, piece.data, piece.numel)
            for piece in exchange.plan.own_second.pieces
        )
        as_they_are = (output.dtype, output.device) == (
            torch.float32,
            exchange.shard.device,
        ) and all(there == here for there, here, _ in places)
        with on_stream(output.device):
            exchange.average_shard(output if as_they_are else None)
            self._store(exchange, output, factor, places, as_they_are=as_they_are)
        join(output.device)
        self._stats.add_seconds("exposed", time.perf_counter() - begun)

    def _store(
        self,
        exchange: BucketExchange,
        output: Tensor,
        factor: int,
        places: Sequence[tuple[int, int, int]],
        *,
        as_they_are: bool,
    ) -> None:
        """Write averages to `output`, where they do not stand there already."""
        if exchange.flagged:
            output.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1
            self._discard()
        else:
            exchange.commit()
            filled = 0
            for there, here, numel in places:
                output[filled:there].zero_()  # what chunks are padded with
                if not as_they_are:
                    output[there : there + numel].copy_(exchange.shard[here : here + numel])
                filled = there + numel
            output[filled:].zero_()
            if factor != 1:
                output.mul_(factor)

    def comes_late(self, dtype: torch.dtype) -> bool:
        """Whether torch leaves what `finish` writes alone until the backward pass is over."""
        return torch_private.leaves_shards_alone(self.module, dtype)

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return those whose gradients are averaged, sharded as ``model.parameters()`` has them."""
        return [part.sharded for part in self._trained()]

    def _discard(self) -> None:
        """Leave residuals as they were before the step."""
        if self._residuals is not None:
            self._residuals.discard()

    def _end(self, error: BaseException | None) -> None:
        self.is_under_way = False
        if error is not None:
            self._discard()
            # collectives under way keep their connections, and their buffers
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
        kind = codec, dtype, device, tuple(part.number for part in trained)
        if kind not in self._exchanges:
            if self.steps == self._warmup_steps:
                self._exchanges.clear()  # those of the warm-up
            self._exchanges[kind] = BucketExchange(
                self._plan(codec, trained),
                self._comm,
                dtype,
                self._stats,
                seed=codec.seed,
                timeout_s=self._comm.timeout_s,
                device=home(device),
                module=number_of(self.parts),
                draw_rank=group_rank(),  # replicas of a shard draw other numbers
                state=StateStore(self._residuals if codec.error_feedback else None),
                probe=self._probe if self.steps >= self._warmup_steps else None,
            )
        return self._exchanges[kind]

    def _plan(self, codec: Codec, trained: Sequence[Part]) -> BucketPlan:
        world = self._comm.world_size
        slots = [slot for one in slots_of(trained, world, self._residuals) for slot in one]
        strategy = Strategy("reduce_scatter", "fp32")
        return BucketPlan(
            codec,
            slots,
            strategy,
            world,
            self._comm.rank,
            ownership=BySlots(world),
            stays=True,
        )
