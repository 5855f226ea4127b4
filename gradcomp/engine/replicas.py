"""Whether tensors hold the same bits on every rank: digests to exchange, and the first difference found in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gradcomp.comm.base import Channel, Communicator
from gradcomp.engine.agree import agree, gather
from gradcomp.engine.buckets import Source
from gradcomp.errors import PeerMismatch
from gradcomp.payload import fingerprint, wire

DIGEST_NBYTES = 16


def digests(tensors: Iterable[Tensor]) -> bytes:
    """Return DIGEST_NBYTES for each tensor, of the bytes of its elements in order."""
    out = b""
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        out += hashlib.blake2b(raw.data, digest_size=DIGEST_NBYTES).digest()
    return out


def compare_first(comm: Communicator, sources: Sequence[Source], settings: Mapping[str, object], timeout_s: float) -> int:
    """Compare what every rank must hold alike before anything is averaged. Collective; the caller has claimed the channels.

    Ranks whose tensors are not even of the same names, shapes and shards are left to the first bucket's fingerprint, which
    knows more words for that.

    Args:
        settings: fields of the fingerprint that must not differ either.

    Returns:
        the bytes that this rank sent.

    Raises:
        PeerMismatch: "parameter NAME", and the first rank whose bits differ from rank 0's; a field of `settings`.
        PeerLost: a rank did not answer.
    """
    likes = [source.like for source in sources]
    mine = digests(likes)
    layout = [(s.name, tuple(t.shape), str(t.dtype), s.shard) for s, t in zip(sources, likes, strict=True)]
    words = fingerprint.record(
        wire_version=wire.VERSION, numel="parameters", layout=layout, bucket=(mine,), world_size=comm.world_size, **settings
    )
    try:
        agree(comm, words, -1, timeout_s, called="average()")
    except PeerMismatch as found:
        if found.field == "bucket":  # the last field, so everything else is alike
            names = [f"parameter {source.name}" for source in sources]
            compare(names, gather(comm, mine, "fingerprint", -1, timeout_s, Channel.SCALE))
        if found.field != "layout":
            raise
    return (comm.world_size - 1) * fingerprint.NBYTES


def compare(names: Sequence[str], everyone: Sequence[bytes]) -> None:
    """Raise PeerMismatch, with a name and the first rank whose digest differs from rank 0's, if one does."""
    for rank, theirs in enumerate(everyone):
        for number, name in enumerate(names):
            part = slice(DIGEST_NBYTES * number, DIGEST_NBYTES * (number + 1))
            if theirs[part] != everyone[0][part]:
                raise PeerMismatch(name, rank, everyone[0][part].hex(), theirs[part].hex())
