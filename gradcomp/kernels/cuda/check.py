"""Whether a device's kernels write what the CPU's write: asked once, before they are used."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.cuda.kernels import TritonKernels
from gradcomp.kernels.interface import Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native.kernels import NativeKernels
from gradcomp.kernels.tables import Groups, Table

logger = logging.getLogger("gradcomp")

NUMEL, GROUP, STREAM = 9_001, 700, 4096
CODES = {
    "TernGrad": Code("ternary", shared=False),
    "Ternary": Code("ternary", "nearest", shared=False, step=1.8, decay=0.25),
    "OneBit": Code("onebit", decay=1.0),
    "Block(2)": Code("block", bits=2, decay=0.25),
    "Block(4)": Code("block", bits=4, decay=0.25),
    "Block(8)": Code("block", bits=8, decay=0.25),
    "EntropyCoded": Code("entropy", stream_nbytes=644, decay=0.25),
    "fp32": Code("values", dtype=torch.float32),
    "bf16": Code("values", dtype=torch.bfloat16),
}


def checked(device: torch.device) -> Kernels | None:
    """Return the kernel set of a GPU; None, and a warning that names why, where it cannot be used:
    gradients are copied to host memory then.
    """
    try:
        made = TritonKernels(device)
        wrong = ", ".join(differing(made))
        reason = wrong and f"these kernels differ from the CPU's: {wrong}"
    except Exception as error:  # noqa: BLE001 - a compiler's, a driver's
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        logger.info("gradcomp: gradients are encoded on %s", device)
        return made
    logger.warning(
        "gradcomp: gradients on %s are copied to the host and encoded there, although"
        " GRADCOMP_CUDA_KERNELS=1: %s",
        device,
        reason,
    )
    return None


def differing(kernels: Kernels) -> Iterator[str]:
    """Yield the codes, and other operations, whose results are not the CPU's to the last bit."""
    generator = torch.Generator().manual_seed(7)
    # from denormals to 2^60, some of them 0
    x = torch.randn(NUMEL, generator=generator) ** 9
    x[::50], x[1::50] = 0, x[1::50] * 2.0**-140
    residual = torch.randn(NUMEL, generator=generator)
    native = NativeKernels()
    for name, code in CODES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = x.to(dtype).nan_to_num_()
            if _results(kernels, code, values, residual) != _results(
                native, code, values, residual
            ):
                yield f"{name} of {dtype}".replace("torch.", "")
    if _measured(kernels, x) != _measured(native, x):
        yield "scales"
    if _moments(kernels, x, residual) != _moments(native, x, residual):
        yield "second moments"


def _results(kernels: Kernels, code: Code, x: Tensor, residual: Tensor) -> list[bytes]:
    """Return the bytes of a payload, of the new residual, and of an average of three payloads."""
    group = STREAM if code.kernel == "entropy" else GROUP
    scales = 8 * (NUMEL // GROUP + 1)
    table = Table([(0, 0, scales, 0, 0, 0, NUMEL, group, 3)])
    payload = torch.zeros(scales + 4 * NUMEL, dtype=torch.uint8)
    payload[: 4 * (NUMEL // GROUP + 1)].view(torch.float32).fill_(2.0)  # which TernGrad is given
    old, new = (_there(kernels, residual) for _ in range(2))
    values = _there(kernels, x)
    given = Residuals() if code.decay is None else Residuals(old, new)
    kernels.encode(code, values, table, payload, key=(1, 2, 3, 4), residuals=given)
    out = kernels.empty(NUMEL, x.dtype)
    kernels.sum_decode(Payloads([payload] * 3, code, x.dtype), table, out)
    return [_bytes(one) for one in (payload, new, out)]


def _measured(kernels: Kernels, x: Tensor) -> bytes:
    """Return TernGrad's scales."""
    numels = np.full(-(-NUMEL // GROUP), GROUP)
    numels[-1] = NUMEL % GROUP
    counts = -(-numels // 512)
    edges = np.concatenate([[0], np.cumsum(counts)])
    groups = Groups(edges.astype(np.uint64), numels.astype(np.uint32))
    out, table = torch.empty(len(numels)), Table([(0, 0, 0, 0, 0, 0, NUMEL, GROUP, 0)])
    kernels.scales(_there(kernels, x), table, groups, 2.5, kernels.scratch(groups), out)
    return _bytes(out)


def _moments(kernels: Kernels, x: Tensor, residual: Tensor) -> list[bytes]:
    """Return units, quotients, products and the moments that follow."""
    values, added, squares = (_there(kernels, one) for one in (x, residual, x.abs()))
    units, out, after = (kernels.empty(NUMEL) for _ in range(3))
    kernels.divide(values, added, squares, 1e-8, units, out)
    kernels.follow(values, 0.7, squares, 0.95, 0.05, after)
    kernels.multiply(values, units)
    kernels.rescale(added, 0.3)
    return [_bytes(one) for one in (units, out, after, values, added)]


def _there(kernels: Kernels, values: Tensor) -> Tensor:
    return kernels.empty(values.numel(), values.dtype).copy_(values)


def _bytes(values: Tensor) -> bytes:
    return values.cpu().view(torch.uint8).numpy().tobytes()
