"""Whether ranks hold the same bits: what is compared, and the first difference named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator
from gradcomp.errors import PeerMismatch, peers_answer
from gradcomp.exchange.agree import agree
from gradcomp.payload import wire
from gradcomp.payload.fingerprint import Record, Words

DIGEST_NBYTES = 16
# name, and a tensor or a value that its repr tells from others
Named = Sequence[tuple[str, object]]


def digests(values: Iterable[object]) -> bytes:
    """Return DIGEST_NBYTES for each value: of a tensor of the bytes of its elements in order,
    else of its repr.
    """
    out = b""
    for value in values:
        if isinstance(value, Tensor):
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        else:
            raw = np.frombuffer(repr(value).encode(), np.uint8)
        out += hashlib.blake2b(raw.data, digest_size=DIGEST_NBYTES).digest()
    return out


def compare(
    comm: Communicator,
    named: Named,
    timeout_s: float,
    *,
    called: str,
    phase: str,
    channel: Channel = Channel.SCALE,
    settings: Mapping[str, object] | None = None,
    words: Words | None = None,
    shards: Sequence[object] = (),
) -> int:
    """Raise PeerMismatch unless ranks hold the same names, shapes and bits. Collective.

    One record goes round first, so that ranks with other tensors, or in another call, are a
    mismatch; digests of each tensor follow only where the record shows that bits differ.

    Args:
        called: what every rank has to call.
        phase: for the message when a rank does not answer.
        channel: SCALE for who has claimed the channels of exchanges, else CONTROL.
        settings: what must not differ either, by name.
        words: what a message says of settings whose values say less.
        shards: which part of each value a rank holds, where it holds a part.

    Returns:
        the bytes that this rank sent.

    Raises:
        PeerMismatch: a field of `settings`; "layout"; the name of the first value that differs from
            rank 0's.
        PeerLost: a rank did not answer.
    """
    mine = digests(value for _, value in named)
    layout = "; ".join(f"{name} {_kind(value)}" for name, value in named)
    layout += f"; shards {list(shards)}" if any(shard is not None for shard in shards) else ""
    values = {"wire_version": wire.VERSION, **(settings or {}), "layout": layout, "bits": mine}
    record = Record(values, words, call=called)
    try:
        agree(comm, record, timeout_s, phase=phase, channel=channel, called=called)
        return (comm.world_size - 1) * len(record.packed)
    except PeerMismatch as found:
        if found.field != "bits":
            raise
    # names and shapes are alike: as many bytes on every rank
    with peers_answer(phase, called=called):
        everyone = comm.all_gather_bytes(mine, timeout_s, channel)
    name, value, digest = next(
        (*named[n], mine[part])
        for n in range(len(named))
        for part in [slice(DIGEST_NBYTES * n, DIGEST_NBYTES * (n + 1))]
        if len({theirs[part] for theirs in everyone}) > 1
    )
    last = Record(
        {"wire_version": wire.VERSION, name: digest}, {name: lambda: describe(value)}, call=called
    )
    agree(comm, last, timeout_s, phase=phase, channel=channel, called=called)
    raise AssertionError(f"digests of {name} differ and are alike")


def describe(value: object) -> str:
    """Return a text that tells a value from others, for messages."""
    if not isinstance(value, Tensor):
        return repr(value)
    flat = value.detach().cpu().double().reshape(-1)
    total = f"sum {float(flat.sum())!r}" if flat.numel() else "no elements"
    return f"{_kind(value)}, {total}, first values {flat[:3].tolist()}"


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__
