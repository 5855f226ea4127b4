"""Encode and average at places beyond 2^31, in memory of which only some pages exist."""

import numpy as np
import torch

from gradcomp import kernels
from gradcomp.kernels import check
from gradcomp.kernels.tables import Table

FAR, ROOM = 2**31 + 5, 40_000


def sparse(folder, numel, dtype):
    """Return ``(numel,)`` zeros in host memory, of which only pages that are written exist."""
    path = folder / f"{len(list(folder.iterdir()))}"
    memory = np.memmap(path, np.uint8, "w+", shape=(numel * dtype.itemsize,))
    return torch.from_numpy(memory).view(dtype)


def at_place(kernel_set, name, place, folder):
    """Return the bytes that a code of `check.CODES` makes of the same values from element and byte
    `place` on: payload, new and kept residuals, averages.
    """
    code, draws = check.CODES[name], torch.Generator().manual_seed(2)
    group = 4096 if name == "EntropyCoded" else 700
    table = Table([(place + 3, place + 1, place + 501, place + 101, 0, 0, 5_001, group, 3)])
    has_memory = getattr(kernel_set, "device", kernels.CPU) != kernels.CPU

    def memory(dtype=torch.float32):
        if has_memory:
            return kernel_set.empty(place + ROOM, dtype)
        return sparse(folder, place + ROOM, dtype)

    values, out = memory(torch.bfloat16), memory(torch.bfloat16)
    old, new, kept = memory(), memory(), memory()
    for one in (values, out, old, new, kept):
        one[place:] = torch.randn(ROOM, generator=draws)
    payload = sparse(folder, place + ROOM, torch.uint8)
    payload[place + 101 : place + 133] = torch.full((8,), 2.0).view(torch.uint8)  # for TernGrad
    before = [one[place:].cpu().clone() for one in (payload, out)]
    feeds_back = code.decay is not None
    given = {"residuals": kernels.Residuals(old, new), "kept": kept} if feeds_back else {}
    flag = kernel_set.encode(code, values, table, payload, key=(1, 2, 3, 4), **given)
    source = kernels.Code(
        code.kernel,
        dtype=code.dtype,
        bits=code.bits,
        shared=code.shared,
        stream_nbytes=code.stream_nbytes,
    )
    payloads = kernels.Payloads([payload, payload], source, torch.bfloat16)
    flag |= kernel_set.sum_decode(payloads, table, out)
    after = [one[place:].cpu() for one in (payload, out, new, kept)]
    assert not flag and not any(map(torch.equal, before, after))
    return [one.view(torch.uint8).numpy().tobytes() for one in after]
