"""Self-check of a device's kernels against the CPU's, once before they are used."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradcomp.kernels.interface import Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native.kernels import NativeKernels
from gradcomp.kernels.rules import RULE, Flag, Kind
from gradcomp.kernels.tables import Groups, Table

logger = logging.getLogger("gradcomp")

NUMELS = 5_001, 4_200  # elements of two parameters
GROUP, STREAM, LARGE = 700, 4096, 300_000
GAP = 40_000  # bytes of a payload per parameter
RANKS = 3
CODES = {
    "TernGrad": Code("ternary", shared=False),
    "Ternary": Code("ternary", "nearest", shared=False, step=1.8, decay=0.25),
    "OneBit": Code("onebit", decay=1.0),
    "OneBit of signs": Code("onebit", means=(-1.0, 1.0), decay=0.25),
    "Block(2)": Code("block", bits=2, decay=0.25),
    "Block(4)": Code("block", bits=4, decay=0.25),
    "Block(8)": Code("block", bits=8, decay=0.25),
    "EntropyCoded": Code("entropy", stream_nbytes=644, decay=0.25),
    "fp32": Code("values", dtype=torch.float32),
    "bf16": Code("values", dtype=torch.bfloat16),
}
OTHERS = (
    "sums of large groups",
    "sums of codes",
    "scales",
    "second moments",
    "updates of weights",
    "split weights",
)
SUMS = Code("lanes", world_size=RANKS, bits=3)
# updates from payloads: their rules, and codes whose sums of squares are added in other parts
DECODING = Kind.SGD, Kind.ADAGRAD, Kind.ADAMW, Kind.MOMENTS, Kind.SQUARES
PACKED = Code("block", bits=4, decay=1.0), Code("entropy", stream_nbytes=644, decay=1.0)
refusals: dict[torch.device, str] = {}  # why a device's kernels are not used, although asked for


def checked(device: torch.device, make: Callable[[torch.device], Kernels]) -> Kernels | None:
    """Return the kernel set that `make` returns for a device if its results are those of the CPU's.
    Else log a warning with the reason, and return None: gradients are then copied to host memory.
    """
    try:
        made = make(device)
        wrong = ", ".join(differing(made))
        reason = wrong and f"these kernels differ from the CPU's: {wrong}"
    except Exception as error:  # noqa: BLE001 - a compiler's, a driver's
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        logger.info("gradcomp: gradients are encoded on %s", device)
        return made
    refuse(device, reason)
    return None


def refuse(device: torch.device, reason: str) -> None:
    """Log why the kernels of a device are not used, and keep it in `refusals`."""
    refusals[device] = reason
    logger.warning(
        "gradcomp: gradients on %s are copied to the host and encoded there, although"
        " GRADCOMP_CUDA_KERNELS=1: %s",
        device,
        reason,
    )


def differing(kernels: Kernels) -> Iterator[str]:
    """Yield the names of codes and other operations whose results differ from the CPU's."""
    native, draws = NativeKernels(), torch.Generator().manual_seed(7)
    # values over 40 powers of ten, with denormals and zeros
    x = torch.randn(sum(NUMELS) + 16, generator=draws)
    x *= 10.0 ** torch.randint(-20, 20, x.shape, generator=draws)
    x[::50], x[1::50] = 0, x[1::50] * 1e-25
    ordinary, residual = (torch.randn(len(x), generator=draws) for _ in range(2))
    special = ordinary.clone()
    special[4_000], special[6_500] = torch.inf, torch.nan
    for name, code in CODES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for values in (x, ordinary, special):
                inputs = values.clamp(-60_000, 60_000).to(dtype) if dtype.itemsize == 2 else values
                results = [_results(each, code, inputs, residual) for each in (kernels, native)]
                if results[0] != results[1]:
                    yield f"{name} of {dtype}".replace("torch.", "")
                    break
    large = torch.randn(LARGE, generator=draws)
    is_equal = (
        _of_one_group(kernels, large) == _of_one_group(native, large),
        _sums(kernels, residual) == _sums(native, residual),
        all(_measured(kernels, each) == _measured(native, each) for each in (x, special)),
        _moments(kernels, x, residual) == _moments(native, x, residual),
        all(_updated(kernels, kind, x) == _updated(native, kind, x) for kind in Kind)
        and all(
            _updated(kernels, kind, x, code) == _updated(native, kind, x, code)
            for kind in DECODING
            for code in PACKED
        ),
        all(_split(kernels, x, nearest) == _split(native, x, nearest) for nearest in (False, True)),
    )
    yield from (name for name, equal in zip(OTHERS, is_equal, strict=True) if not equal)


def _table(group: int) -> Table:
    """Return a table of two segments at unaligned offsets; the second begins inside a group."""
    first, second = NUMELS
    return Table(
        [
            (3, 1, 501, 101, 0, 0, first, group, 3),
            (first + 6, first + 3, GAP + 601, GAP + 102, 0, 1_000, second, group, 4),
        ]
    )


def _payload() -> Tensor:
    """Return memory for the payload of `_table`, with scales of 2 for TernGrad."""
    payload = torch.zeros(2 * GAP, dtype=torch.uint8)
    for first in (101, GAP + 102):
        payload[first : first + 32] = torch.full((8,), 2.0).view(torch.uint8)
    return payload


def _results(kernels: Kernels, code: Code, x: Tensor, residual: Tensor) -> list[Any]:
    """Return flags and bytes of payloads, planes and averages, with and without residuals, for one
    payload and for several.
    """
    table = _table(STREAM if code.kernel == "entropy" else GROUP)
    values, out = _to_device(kernels, x), kernels.empty(len(x), x.dtype).zero_()
    results: list[Any] = []
    for feeds_back in (False, True):
        payload = _payload()
        counted: list[float] = []
        old, new, kept = (_to_device(kernels, residual) for _ in range(3))
        residuals, backup = Residuals(), None
        if feeds_back and code.decay is not None:
            residuals, backup = Residuals(old, new, counted.append), kept
        flag = kernels.encode(
            code, values, table, payload, key=(1, 2, 3, 4), residuals=residuals, kept=backup
        )
        results += [bool(flag), len(counted), *map(_bytes, (payload, new, kept))]
        shares = [code.shared] if code.shared is None else [False, True]
        for count in (1, RANKS):
            for shared in shares:
                source = Code(code.kernel, dtype=code.dtype, bits=code.bits, shared=shared,
                              stream_nbytes=code.stream_nbytes)  # fmt: skip
                flag = kernels.sum_decode(Payloads([payload] * count, source, x.dtype), table, out)
                results += [bool(flag), _bytes(out)]
    return results


def _of_one_group(kernels: Kernels, x: Tensor) -> list[bytes]:
    """Return the payload and the residual of a large group, whose blocks are summed in several
    runs. The residual overwrites the old one.
    """
    table, payload = (
        Table([(0, 0, 8, 0, 0, 0, LARGE, LARGE, 0)]),
        torch.zeros(LARGE, dtype=torch.uint8),
    )
    plane = _to_device(kernels, x.flip(0))
    code = Code("onebit", decay=1.0)
    kernels.encode(code, _to_device(kernels, x), table, payload, residuals=Residuals(plane, plane))
    return [_bytes(payload), _bytes(plane)]


def _sums(kernels: Kernels, x: Tensor) -> bytes:
    """Return averages decoded from sums of the codes of `RANKS` ranks."""
    draws = torch.Generator().manual_seed(8)
    payload, out = _payload(), kernels.empty(len(x)).zero_()
    numbers = torch.randint(0, 2 * RANKS + 1, (2, 8, 1_000), generator=draws)
    words = (numbers << 3 * torch.arange(8)[:, None]).sum(1)  # eight 3-bit numbers in three bytes
    for first, row in zip((501, GAP + 601), words, strict=True):
        payload[first : first + 3_000] = (
            row.to(torch.int32).view(torch.uint8).view(-1, 4)[:, :3].reshape(-1)
        )
    kernels.sum_decode(Payloads([payload], SUMS, torch.float32), _table(GROUP), out)
    return _bytes(out)


def _measured(kernels: Kernels, x: Tensor) -> list[Any]:
    """Return TernGrad's scales."""
    numel = NUMELS[0]
    numels = np.full(-(-numel // GROUP), GROUP)
    numels[-1] = numel % GROUP
    edges = np.concatenate([[0], np.cumsum(-(-numels // 512))])
    groups = Groups(edges.astype(np.uint64), numels.astype(np.uint32))
    out, table = torch.empty(len(numels)), Table([(0, 0, 0, 0, 0, 0, numel, GROUP, 0)])
    flag = kernels.scales(_to_device(kernels, x), table, groups, 2.5, kernels.scratch(groups), out)
    return [bool(flag), _bytes(out)]


def _moments(kernels: Kernels, x: Tensor, residual: Tensor) -> list[Any]:
    """Return units, quotients, products, updated moments, and flags."""
    values, added, squares = (_to_device(kernels, each) for each in (x, residual, x.abs()))
    units, out, after = (kernels.empty(len(x)) for _ in range(3))
    results: list[Any] = [kernels.are_finite(values)]
    for left_out, before in ((added, squares), (None, None)):
        kernels.divide(values, left_out, squares, 1e-8, units, out)
        results.append(bool(kernels.follow(values, 0.7, before, 0.95, 0.05, after)))
        results += map(_bytes, (units, out, after))
    results.append(bool(kernels.multiply(values, units)))
    kernels.rescale(added, 0.3)
    return [*results, _bytes(values), _bytes(added)]


def _updated(kernels: Kernels, kind: Kind, x: Tensor, code: Code | None = None) -> list[Any]:
    """Return weights, states and sums after an update of an fp32 and of a split parameter, from
    payloads of `code` or from gradients.
    """
    numel, rules = NUMELS[1] + 1_000, np.zeros(2, RULE)
    for name in RULE.names or ():
        rules[name] = 0.7
    rules["kind"], rules["flags"], rules["rounding"] = kind, [0, Flag.PRESCALE | Flag.NESTEROV], 1
    rows = [(0, 0, 0, 0, 0, first, 1_000, numel, k) for k in range(2) for first in (0, 1_000)]
    table, payloads = Table(rows), None
    if code is not None:
        table = _table(STREAM if code.kernel == "entropy" else GROUP)
        table.rows["parameter"] -= 3
        payload = _payload()
        NativeKernels().encode(code, x, table, payload)
        payloads = Payloads([payload] * RANKS, code, torch.bfloat16)
    given = _to_device(kernels, x[:numel]), _to_device(kernels, x[:numel])
    top, trail = (kernels.empty(numel, dtype).zero_() for dtype in (torch.bfloat16, torch.int16))
    kernels.split(given[0], top, trail, nearest=True)
    states = [[_to_device(kernels, x.abs()[:numel]) for _ in range(2)] for _ in range(2)]
    gradients = [_to_device(kernels, x.flip(0)[:numel].to(t)) for t in (torch.bfloat16, x.dtype)]
    targets = kernels.targets(
        weight=[given[1], top], trail=[None, trail], gradient=gradients, state0=states[0],
        state1=states[1],
    )  # fmt: skip
    norms = np.zeros(2 * len(table))
    kernels.update(table, targets, rules, payloads, norms)
    return [norms.tobytes(), *map(_bytes, (given[1], top, trail, *states[0], *states[1]))]


def _split(kernels: Kernels, x: Tensor, nearest: bool) -> list[bytes]:
    """Return tops and trails, and the weights that are joined from them."""
    weights = _to_device(kernels, x)
    top, trail = (kernels.empty(len(x), dtype).zero_() for dtype in (torch.bfloat16, torch.int16))
    kernels.split(weights, top, trail, nearest=nearest)
    kernels.join(top, trail, weights.zero_(), nearest=nearest)
    return [*map(_bytes, (top, trail, weights))]


def _to_device(kernels: Kernels, values: Tensor) -> Tensor:
    return kernels.empty(values.numel(), values.dtype).copy_(values)


def _bytes(values: Tensor) -> bytes:
    return values.cpu().view(torch.uint8).numpy().tobytes()
