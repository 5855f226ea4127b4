"""Whether tensors hold the same bits on every rank: digests to exchange, and the first difference found in them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradcomp.errors import PeerMismatch

DIGEST_NBYTES = 16


def digests(tensors: Iterable[Tensor]) -> bytes:
    """Return DIGEST_NBYTES for each tensor, of the bytes of its elements in order."""
    out = b""
    for tensor in tensors:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        out += hashlib.blake2b(raw.data, digest_size=DIGEST_NBYTES).digest()
    return out


def compare(names: Sequence[str], everyone: Sequence[bytes]) -> None:
    """Raise PeerMismatch, with a name and the first rank whose digest differs from rank 0's, if one does."""
    for rank, theirs in enumerate(everyone):
        for number, name in enumerate(names):
            part = slice(DIGEST_NBYTES * number, DIGEST_NBYTES * (number + 1))
            if theirs[part] != everyone[0][part]:
                raise PeerMismatch(name, rank, everyone[0][part].hex(), theirs[part].hex())
