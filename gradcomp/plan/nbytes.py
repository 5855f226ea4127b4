"""Bytes that exchanges send, vectorized over thousands of ranks: the same sums as
`gradcomp.exchange.sizing.BucketPlan`, without building its layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gradcomp.codecs import Codec
from gradcomp.comm.rounds import ring_bytes
from gradcomp.exchange.second import second_phase
from gradcomp.exchange.sizing import Strategy, choose
from gradcomp.exchange.slices import Slicing, slice_bounds
from gradcomp.payload.form import HEADER_NBYTES, PLAIN, Form
from gradcomp.payload.parameters import Exempts, Parameter, assign_buckets, describe_parameters
from gradcomp.payload.pieces import ByElements

# DDP's default caps: a small first bucket starts the first exchange early
DDP_BUCKET_NBYTES = (1 << 20, 25 << 20)


@dataclass(frozen=True, slots=True)
class CollectiveBytes:
    """Bytes of one bucket's exchange on one rank, headers, scales and padding included."""

    scale: int  # sent, and as many received, by the ring of shared scales
    first: int  # sent in the first phase, the only one of an all_gather
    first_received: int
    second: int = 0  # sent, and as many received, in the second phase
    slices: int = 1
    whole_second: bool = False  # the second phase is not sliced and follows the last slice


def collective_bytes(
    codec: Codec,
    strategy: Strategy,
    parameters: Sequence[Parameter],
    world_size: int,
    rank: int = 0,
    slicing: Slicing | None = None,
) -> CollectiveBytes:
    """Return one bucket's bytes on a rank, equal to its `BucketPlan`'s but fast for many ranks."""
    slicing, others, form = slicing or Slicing(), world_size - 1, codec.form
    groups = sum(-(-p.numel // p.group_numel) for p in parameters if p.compressed)
    scale = ring_bytes(groups, world_size) if codec.shares_scale and groups else 0
    count = slicing.count(sum(p.numel for p in parameters), world_size)
    gathers = strategy.exchange == "all_gather"
    ownership = ByElements(1 if gathers else world_size)
    starts = np.stack([ownership.starts(p.numel) for p in parameters])
    sizes = [p.group_numel if p.compressed else 1 for p in parameters]
    bounds = slice_bounds(starts[:, :-1], starts[:, 1:], sizes, count, whole_groups=not form.cuts)
    first = sliced_nbytes(parameters, bounds, form).sum(axis=0)
    if gathers:
        sent = others * int(first[0])
        return CollectiveBytes(scale, sent, sent, slices=count)
    phase = second_phase(strategy.second_phase, codec, world_size)
    inside = (bounds > bounds[:, :1]) & (bounds < bounds[:, -1:])
    cuts_groups = (inside & (bounds % np.reshape(sizes, (-1, 1, 1)) > 0)).any()
    whole = slicing.whole_second or (phase.measures_groups and bool(cuts_groups))
    if whole:
        bounds = bounds[:, [0, -1]]
    second = int(sliced_nbytes(parameters, bounds, phase.form).max(axis=1).sum())
    mine = int(first[rank])
    sent = int(first.sum()) - mine
    return CollectiveBytes(scale, sent, others * mine, others * second, count, whole and count > 1)


def ddp_buckets(
    codec: Codec,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    min_numel: int | None = None,
    exclude: Sequence[Exempts] = (),
    bucket_cap_mb: float | None = None,
    value_nbytes: int = 4,
) -> list[list[Parameter]]:
    """Return the parameters of every bucket as DDP rebuilds them after its first step, if gradients
    become ready from the last tensor to the first. Arguments are those of `predict_bytes`;
    `value_nbytes` is the size of a parameter's value.
    """
    parameters = describe_parameters(shapes, codec.group_numel, min_numel, exclude)
    first, cap = DDP_BUCKET_NBYTES if bucket_cap_mb is None else (int(bucket_cap_mb * 2**20),) * 2
    members = assign_buckets([p.numel * value_nbytes for p in parameters], cap, first)
    return [[parameters[i] for i in bucket] for bucket in members]


@dataclass(frozen=True, slots=True)
class ByteCount:
    """Bytes of a training step on one rank; `baseline` is sent by an fp32 ring all_reduce."""

    sent: int
    received: int
    baseline: int


def predict_bytes(
    codec: Codec,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    world_size: int,
    *,
    exchange: str = "auto",
    min_numel: int | None = None,
    exclude: Sequence[Exempts] = (),
    bucket_cap_mb: float | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    owner_transform: bool = False,
) -> ByteCount:
    """Return the exact bytes of one step of DDP, computed from the exchange's own sizing without
    any communication.

    Args:
        codec: codec with its options.
        shapes: (name, shape) of every trained parameter, in the order of ``named_parameters()``.
        world_size, rank: number of ranks, and the rank whose bytes are counted.
        exchange, min_numel, exclude: as in `gradcomp.ddp.register`.
        bucket_cap_mb: DDP's option, in MiB; None is DDP's default, 1 MiB for the first bucket and
            25 MiB for the others.
        dtype: dtype of the parameters.
        owner_transform: whether owners transform the means.
    """
    buckets = ddp_buckets(codec, shapes, min_numel, exclude, bucket_cap_mb, dtype.itemsize)
    strategy = choose(codec, world_size, exchange, owner_transform=owner_transform)
    slicing = Slicing(whole_second=owner_transform)
    found = [
        collective_bytes(codec, strategy, bucket, world_size, rank, slicing)
        for bucket in buckets
        if world_size > 1
    ]
    shared = sum(one.scale + one.second for one in found)
    sent = shared + sum(one.first for one in found)
    received = shared + sum(one.first_received for one in found)
    numel = sum(p.numel for bucket in buckets for p in bucket)
    return ByteCount(sent, received, ring_bytes(numel, world_size))


# ---- payloads, as arrays over ranks --------------------------------------------------------------


def sliced_nbytes(
    parameters: Sequence[Parameter], bounds: NDArray[np.int64], form: Form
) -> NDArray[np.int64]:
    """Return the payload bytes of each slice of each rank's part, headers included, `(slices,
    ranks)`. `bounds`, `(parameters, slices + 1, ranks)`, are first elements of slices and the end.
    """
    total: NDArray[np.int64] = np.full_like(bounds[0, 1:], HEADER_NBYTES)
    for p, cuts in zip(parameters, bounds, strict=True):
        first, last = cuts[:-1], cuts[1:]
        groups = np.where(last > first, (last - 1) // p.group_numel - first // p.group_numel + 1, 0)
        mine = form if p.compressed else PLAIN
        total += mine.code_nbytes(first, last) + mine.scale_nbytes(groups)
    return total
