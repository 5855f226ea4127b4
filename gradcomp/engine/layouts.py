"""The exchanges of one model, one per bucket layout, and the fields that ranks compare before the
first exchange of a layout.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from gradcomp.codecs import Codec, Identity, resolve
from gradcomp.codecs.checks import check_tensor
from gradcomp.comm.base import Lease
from gradcomp.comm.rounds import ring_bytes
from gradcomp.engine.buckets import Source
from gradcomp.engine.options import Options, check_rotation
from gradcomp.errors import GradcompError, UnsupportedTensor
from gradcomp.exchange.agree import Shown, codec_fields
from gradcomp.exchange.bucket import Exchange, ExchangeOptions
from gradcomp.exchange.quality import Probe
from gradcomp.exchange.routes import Route, make_route
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import Strategy, replaced
from gradcomp.exchange.staged import for_device
from gradcomp.exchange.stats import Stats
from gradcomp.kernels import CPU, device_of
from gradcomp.memory.moments import Precondition, SecondMoments
from gradcomp.memory.planes import Planes
from gradcomp.memory.store import StateStore, fold_owned
from gradcomp.memory.transform import Transforming
from gradcomp.payload.order import storage_order, storage_shape
from gradcomp.payload.parameters import describe_parameters, warn_of_thin_groups
from gradcomp.payload.pieces import Slot

# (position of a tensor, its first element in the bucket) pairs, in bucket order
Members = tuple[tuple[int, int], ...]


class Layouts:
    """The tensors of a model, their state, and an exchange for every bucket layout so far.

    Args:
        sources: the tensors, in the same order on every rank.
        codec: the codec of compressed tensors.
        comm: communicator of the ranks.
        options: see `Options`.
        timeout_s: longest wait for a peer, in seconds.
        stats: counts bytes and seconds.

    Attributes:
        parameters: how each tensor is sent: compressed or as fp32.
        trained: positions of the tensors that are averaged.
        orders: `storage_order` of the tensors whose memory is not row-major, by position.
        shards: description of this rank's shard of a sharded tensor (`Source.shard`), by position.
        route: the route over `comm`: flat, of a single rank, or hierarchical.
        store: residuals, states of transforms and second moments, by position.
        device: where buckets are encoded and averaged: the device of all tensors, if they have one
            and it has a kernel set, else the CPU.
        probe: samples the error that codes make in gradients.
        keeps_packed: leave averages packed in exchanges where that is safe. Set this before the
            first bucket.
        fallback: codec that replaces `codec` (`gradcomp.engine.guard`), or None.
        lr_factor: factor on the learning rate (`gradcomp.engine.rate`), the same on every rank.
        compressed: whether any bucket has been compressed so far.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        codec: Codec,
        comm: Lease,
        options: Options,
        timeout_s: float,
        stats: Stats,
    ) -> None:
        check_rotation(codec, options)
        self.codec, self.options, self._timeout_s, self._stats = codec, options, timeout_s, stats
        likes = [source.like for source in sources]
        self.trained = frozenset(i for i, source in enumerate(sources) if source.trained)
        for index in sorted(self.trained):
            check_tensor(
                likes[index].detach(), f"parameter {sources[index].name!r}", contiguous=False
            )
        shapes = [
            (source.name, storage_shape(like)) for source, like in zip(sources, likes, strict=True)
        ]
        self.orders = {
            i: order
            for i, like in enumerate(likes)
            if (order := storage_order(like.shape, like.stride()))
        }
        self.shards = {i: source.shard for i, source in enumerate(sources)}
        self.parameters = describe_parameters(
            shapes, codec.group_numel, options.min_numel, options.exempts
        )
        warn_of_thin_groups(self.parameters, codec.form)
        # a copy, since one codec may be given for both: exchanges of the warm-up are others
        self._plain = copy.copy(resolve(options.warmup_codec or Identity()))
        self.probe = Probe(options.advanced.quality_every, self.names)
        self.keeps_packed = self.compressed = False
        self.fallback: Codec | None = None
        self.lr_factor = 1.0
        self.take(comm)
        tensors = {index: likes[index] for index in sorted(self.trained)}
        self.device = device_of(tensors.values())
        self._staged = sorted(
            {t.device.type for t in tensors.values() if t.device not in (self.device, CPU)}
        )
        try:
            transform, states, moments = options.advanced.transform, None, None
            if transform is not None:
                numels = {i: t.numel() for i, t in tensors.items()}
                if transform.place == "owner":
                    numels = {i: self.route.owner_numel(numel) for i, numel in numels.items()}
                states = Transforming(transform, numels, self.device)
            if isinstance(options.precondition, Precondition):
                moments = SecondMoments(options.precondition, self._packed, self.device)
            residuals = self._make_residuals()
            self.store = StateStore(*residuals, states, moments)
        except BaseException:
            self.route.close()
            raise

    def take(self, comm: Lease) -> None:
        """Use `comm` from now on, with new exchanges. Collective for a hierarchical exchange."""
        options = self.options
        self.route: Route = make_route(
            self.codec,
            comm,
            options.exchange,
            options.advanced.nodes,
            self._timeout_s,
            options.advanced.transform,
            options.advanced.slice_numel,
        )
        self.strategy = self.route.strategy
        self.comm = comm
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}
        self._changed = False

    def move(self, comm: Lease) -> None:
        """Use `comm`, a communicator of other ranks, from now on; residuals are kept.

        Residuals of the means that this rank owned are added to the residuals of its gradients
        (`fold_owned`), or dropped if the codec has no error feedback. With the same rank and number
        of ranks, this rank owns the same means as before, and nothing changes.
        """
        if (comm.rank, comm.world_size) == (self.comm.rank, self.comm.world_size):
            self.take(comm)
            return
        store, before = self.store, (self.comm.rank, self.comm.world_size)
        owned = store.owner_residuals
        self.take(comm)
        residuals, store.owner_residuals = self._make_residuals()
        own = store.residuals = residuals if store.residuals is None else store.residuals
        if owned is not None and own is not None and self.codec.error_feedback:
            fold_owned(own, owned, *before, comm.world_size)

    def strategy_of(self, codec: Codec) -> Strategy:
        """Return the strategy of the exchanges with a codec, which may be another than `codec`."""
        if codec is self.codec:
            return self.strategy
        return replaced(self.strategy, codec, len(self.route.nodes) or self.comm.world_size)

    @property
    def names(self) -> dict[int, str]:
        """Names of the tensors by position."""
        return {p.index: p.name for p in self.parameters}

    def exchange(
        self, buffer: Tensor, members: Members, step: int, bucket: int
    ) -> tuple[Exchange, dict[str, object] | None]:
        """Return the exchange of a bucket, and the fields that ranks must compare if its layout is
        new, else None.

        Args:
            buffer: ``(numel,)`` float32, bfloat16 or float16, contiguous.
            members: see `Members`.
            step: number of the step, which decides the codec.
            bucket: number of the bucket in the step.

        Raises:
            GradcompError: a tensor was frozen when this object was made.
            UnsupportedTensor: the bucket is on another device than its residuals.
            ValueError: the size of the bucket is not that of its tensors.
        """
        codec = self._codec_of(step)
        plain = codec is not self.codec
        kind = (members, buffer.dtype, buffer.device, codec)
        if kind in self._exchanges:
            return self._exchanges[kind], None
        if self.device not in (CPU, buffer.device):
            raise UnsupportedTensor(
                f"the bucket is on {buffer.device}, and its residuals on {self.device}: move the"
                " model before it is registered"
            )
        slots = self._slots(members, codec)
        if sum(s.numel for s in slots) != buffer.numel():
            raise ValueError(
                f"the bucket holds {buffer.numel()} elements, its parameters"
                f" {sum(s.numel for s in slots)}"
            )
        store = self.store
        self.compressed |= not isinstance(codec, Identity) or codec is self.codec
        self._changed = True
        options = ExchangeOptions(
            buffer.dtype,
            self._stats,
            StateStore(
                store.residuals if codec.error_feedback else None,
                store.owner_residuals if codec.error_feedback or codec is self.codec else None,
                None if plain else store.transform,
                store.moments,
            ),
            probe=None if self.options.is_plain(step) else self.probe,
            seed=codec.seed,
            timeout_s=self._timeout_s,
            keeps_packed=self.keeps_packed and buffer.device == self.device,
            device=self.device,
        )
        exchange = self.route.exchange(slots, codec, options)
        if not exchange.is_idle:
            exchange = for_device(exchange, buffer, self.device)
        self._exchanges[kind] = exchange
        return exchange, self._compared(slots, buffer, step, bucket)

    def _codec_of(self, step: int) -> Codec:
        """Return the codec of the exchanges of a step."""
        if self.options.is_plain(step):
            return self._plain
        return self.codec if self.fallback is None else self.fallback

    def forget_all_but(self, used: Iterable[Exchange]) -> None:
        """After a step with new layouts, free the exchanges that it did not use: a bucket rebuild
        has replaced their layouts.
        """
        if self._changed:
            kept = list(used)
            self._exchanges = {
                k: e for k, e in self._exchanges.items() if any(e is other for other in kept)
            }
            self._changed = False

    def describe(self) -> str:
        """Return one line for logs: which tensors are compressed, the strategy, the expected
        compression ratio.
        """
        options, codec, world = self.options, self.codec, self.comm.world_size
        changes = "".join(f"; {kind} tensors are copied to the host" for kind in self._staged)
        transform = options.advanced.transform
        if transform is not None:
            at_owners = transform.place == "owner"
            place = "the aggregate" if at_owners else "each rank's gradients"
            changes += f"; {transform!r} on {place}"
        if options.precondition is not None:
            changes += f"; {options.precondition!r}"
        if world == 1:
            return f"gradcomp: {codec!r} is off: world size 1, gradients pass through{changes}"
        if not self.route.packs:
            return (
                f"gradcomp: {codec!r} is off: all {world} ranks are on one node and average in fp32"
            )
        start = f", from step {options.warmup_steps} on" if options.warmup_steps else ""
        if options.warmup_steps and options.warmup_codec:
            start += f" ({options.warmup_codec!r} before it)"
        trained = [p for p in self.parameters if p.index in self.trained]
        packed, plain = (
            [p.numel for p in trained if p.compressed is kind] for kind in (True, False)
        )
        return (
            f"gradcomp: {codec!r} on {len(packed)} tensors ({sum(packed):,} values), fp32 for"
            f" {len(plain)} ({sum(plain):,} values), {self.strategy} over {world} ranks{start};"
            f" expected {self.expected_ratio():.1f}x fewer bytes than an fp32 ring{changes}"
        )

    def expected_ratio(self) -> float:
        """Return bytes of an fp32 ring / bytes sent, computed for all tensors in one bucket."""
        members, offset = [], 0
        for p in self.parameters:
            if p.index in self.trained:
                members.append((p.index, offset))
                offset += p.numel
        sent_nbytes = self.route.sent_nbytes(self._slots(tuple(members), self.codec), self.codec)
        return ring_bytes(offset, self.comm.world_size) / sent_nbytes if sent_nbytes else 1.0

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def compresses(self) -> bool:
        """Whether any tensor is sent by the codec."""
        return self.comm.world_size > 1 and self.route.packs and bool(self._packed)

    @property
    def _packed(self) -> dict[int, int]:
        """Number of elements of each trained tensor that is compressed, by position."""
        return {
            p.index: p.numel for p in self.parameters if p.compressed and p.index in self.trained
        }

    def _make_residuals(self) -> tuple[Planes | None, Planes | None]:
        """Return the residuals of this rank's gradients, and of the means that it owns."""
        owner = self.comm.world_size > 1 and owners_feed_back(
            self.strategy.second_phase, self.codec
        )
        if not (self.codec.error_feedback or self._plain.error_feedback or owner):
            return None, None
        numels = {i: self.route.residual_numel(numel) for i, numel in self._packed.items()}
        owned = {index: self.route.owner_numel(numel) for index, numel in numels.items()}
        # planes allocate memory at the first write, which a codec without residuals never does
        residuals = Planes(numels, device=self.device)
        return residuals, Planes(owned, device=self.device) if owner else None

    def _slots(self, members: Members, codec: Codec) -> list[Slot]:
        slots, transform = [], self.store.transform
        # a single rank sends nothing, so it makes no residuals
        residuals = self.store.residuals if self.comm.world_size > 1 else None
        for index, offset in members:
            p = self.parameters[index]
            new = residuals is not None and p.compressed and not residuals.knows(index)
            if new or (transform is not None and not transform.planes.knows(index)):
                raise GradcompError(
                    f"parameter {p.name!r} was frozen when gradcomp was registered; register after"
                    " unfreezing"
                )
            residual = residuals.offset(index) if residuals is not None and p.compressed else 0
            group = codec.group_numel(p.shape)
            slots.append(Slot(index, p.numel, group, p.compressed, offset, residual))
        return slots

    def _compared(
        self, slots: list[Slot], buffer: Tensor, step: int, bucket: int
    ) -> dict[str, object]:
        """Return the fields of a bucket that ranks compare."""
        layout = [
            (s.index, self.parameters[s.index].shape, s.group_numel, s.compressed, s.offset)
            + (self.orders.get(s.index), self.shards.get(s.index))
            for s in slots
        ]
        scaled: dict[str, object] = {}
        if self.lr_factor != 1.0:
            units = self.options.precondition, self.lr_factor
            text = f"{units[0]}, learning rate x {units[1]:g} (scale_lr)"
            scaled = {"precondition": Shown(units, text)}
        return {
            **codec_fields(self.codec),
            "exchange": Shown(
                (self.strategy.exchange, self.strategy.node_size), str(self.strategy)
            ),
            "second_phase": self.strategy.second_phase,
            "dtype": buffer.dtype,
            "numel": Shown(buffer.numel(), lambda: self._describe_size(slots)),
            "layout": Shown(layout, lambda: "; ".join(map(self._describe, slots))),
            "step": step,
            "world_size": self.comm.world_size,
            "parameter_count": len(self.parameters),
            "bucket": bucket,
            **self.options.compared(),
            **scaled,
        }

    def _describe(self, slot: Slot) -> str:
        """Return a text that describes a tensor's place and form in a bucket."""
        name, shape = self.parameters[slot.index].name, self.parameters[slot.index].shape
        packed = f"scale groups of {slot.group_numel}" if slot.compressed else "fp32"
        order, shard = self.orders.get(slot.index), self.shards.get(slot.index)
        more = (f", memory order {order}" if order else "") + (f", shard {shard}" if shard else "")
        return f"{name} {tuple(shape)} from {slot.offset}, {packed}{more}"

    def _describe_size(self, slots: list[Slot]) -> str:
        tensors = [self.parameters[s.index] for s in slots]
        names = ", ".join(f"{p.name} {tuple(p.shape)}" for p in tensors)
        return f"{sum(p.numel for p in tensors)} values in {names}"
