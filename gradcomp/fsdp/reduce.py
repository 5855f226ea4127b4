"""The reduce-scatter of one FSDP module: what a rank has of a chunk goes packed to the chunk's
owner, who averages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradcomp.codecs import Codec
from gradcomp.comm import torch_private
from gradcomp.comm.torchdist import TorchCommunicator, group_rank
from gradcomp.errors import GradcompError, peers_answer
from gradcomp.exchange.bucket import BucketExchange
from gradcomp.exchange.sizing import BucketPlan, Strategy
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.parts import Part, number_of, slots_of
from gradcomp.fsdp.residuals import ModuleResiduals
from gradcomp.kernels.tables import DTYPES
from gradcomp.memory.store import StateStore
from gradcomp.payload.pieces import BySlots

IN_FLIGHT = 2  # modules whose averages are on their way at a time


class ReduceScatter:
    """Averages of one FSDP module's gradients, a chunk a rank.

    Args:
        module, name, parts: see below.
        codecs: of the gradients, in the warm-up and after it.
        warmup_steps: the first so many reduce-scatters belong to the warm-up.
        comm: the ranks that share the module out.
        stats: counts bytes and seconds.
        residuals: of the module, for codecs that leave some.

    Attributes:
        module: as torch has it.
        name: of the module, for messages.
        parts: its parameters, in the order in which their gradients stand.
        steps: reduce-scatters so far.
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
        residuals: ModuleResiduals | None = None,
    ) -> None:
        self.module, self.name, self.parts, self.steps = module, name, list(parts), 0
        self._codecs, self._warmup_steps = codecs, warmup_steps
        self._comm, self._stats, self._residuals = comm, stats, residuals
        self._exchanges: dict[tuple[object, ...], BucketExchange] = {}
        self._pending: tuple[BucketExchange, Tensor, int] | None = None
        self._failed: GradcompError | None = None

    def fits(self, numel: int) -> bool:
        """Whether so many values are the gradients of all trained parameters of the module."""
        return numel == self._comm.world_size * sum(part.padded_numel for part in self._trained())

    def start(self, output: Tensor, given: Tensor, factor: int) -> None:
        """Encode ``(N * k,)`` gradients and send them; `finish` writes `factor` times the averages
        of this rank's chunks to ``(k,)``.

        Until then these are NaN: torch puts them into ``.grad`` at once, and whatever ends the
        backward pass may keep `finish` from being called.
        """
        output.fill_(float("nan"))
        if self._failed is not None:
            raise self._failed
        exchange = self._exchange(given.dtype, given.device, self._trained())
        exchange.begin(given, self.steps, 0)
        try:
            with peers_answer("first_phase", 0):
                exchange.measure()
                exchange.encode()
        except GradcompError as error:
            self._fail(error)
            raise
        exchange.forget()
        self._pending = exchange, output, factor
        self.steps += 1
        self._stats.steps += 1
        self._stats.baseline_bytes += 2 * (given.numel() - output.numel()) * given.element_size()

    def finish(self) -> None:
        """Wait for what the other ranks have sent, and average; NaN if some rank's gradients
        have NaN or Inf.
        """
        if self._pending is None:
            return
        (exchange, output, factor), self._pending = self._pending, None
        first = output.numel() * self._comm.rank
        places = sorted(
            (piece.slot.offset - first, piece.data, piece.numel)
            for piece in exchange.plan.own_second.pieces
        )
        as_they_are = (output.dtype, output.device) == (
            torch.float32,
            exchange.shard.device,
        ) and all(there == here for there, here, _ in places)
        try:
            exchange.average_shard(output if as_they_are else None)
        except GradcompError as error:
            self._fail(error)
            raise
        if exchange.flagged:
            output.fill_(float("nan"))
            self._stats.nonfinite_buckets += 1
            self._discard()
            return
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

    def abandon(self, error: GradcompError) -> None:
        """Do not wait for what is under way, and raise `error` from now on."""
        if self._pending is not None:
            self._pending = None
            self._fail(error)

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

    def _fail(self, error: GradcompError) -> None:
        self._failed = error
        self._discard()
        self._exchanges.clear()  # collectives under way keep their connections, and their buffers

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
                device=device,
                module=number_of(self.parts),
                draw_rank=group_rank(),  # replicas of a shard draw other numbers
                state=StateStore(self._residuals if codec.error_feedback else None),
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


class InFlight:
    """Modules whose averages are on their way, in order.

    Args:
        stats: counts the seconds that are waited for them.
    """

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._modules: deque[ReduceScatter] = deque()

    def __len__(self) -> int:
        return len(self._modules)

    def start(self, module: ReduceScatter, output: Tensor, given: Tensor, factor: int) -> None:
        """Start the reduce-scatter of a module, and wait for as many of those before it as
        `IN_FLIGHT` asks for; for this one, too, if torch reads `output` at once.
        """
        self.finish(all_but=0 if module in self._modules else IN_FLIGHT - 1)
        module.start(output, given, factor)
        self._modules.append(module)
        if factor != 1 or not module.comes_late(given.dtype):
            self.finish()

    def finish(self, all_but: int = 0) -> None:
        """Wait for averages, but for those of the last `all_but` modules; after an error `abandon`
        them.
        """
        if len(self._modules) <= all_but:
            return
        begun = time.perf_counter()
        try:
            while len(self._modules) > all_but:
                self._modules.popleft().finish()
        except GradcompError as error:
            self.abandon(error)
            raise
        self._stats.add_seconds("exposed", time.perf_counter() - begun)

    def abandon(self, error: GradcompError) -> None:
        """Wait for nothing any more: all modules under way raise `error` from now on."""
        while self._modules:
            self._modules.popleft().abandon(error)
