"""The kernels that `bench codec` times: how each is run, what it writes, and what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gradcomp import Block, OneBit, Ternary, TernGrad
from gradcomp.bench.timing import using
from gradcomp.codecs import KINDS, Codec, RngKey
from gradcomp.codecs.lanes import Lanes
from gradcomp.kernels import CPU, NO_RESIDUALS, Code, Payloads, Residuals, host, native, of
from gradcomp.payload.form import lanes_form
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

KERNELS = of(CPU)
KEY = RngKey(seed=1, rank=1, step=5)
GROUP = 512  # a usual row, for the codecs whose groups are rows: one flat tensor has none


@dataclass
class Case:
    """One kernel: `run` writes `results`, and reads and writes `nbytes` of memory an element."""

    name: str
    run: Callable[[], object]
    nbytes: float
    results: list[Tensor]
    restart: Callable[[], object] = lambda: None  # undoes what a run changes for the next one

    def is_right(self) -> bool:
        """Whether this tier writes the bytes that the portable one writes."""
        self.restart()
        self.run()
        found = [result.clone() for result in self.results]
        with using(native.tiers()[0]):
            self.restart()
            self.run()
        pairs = zip(found, self.results, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def cases(numel: int, dtype: torch.dtype) -> list[Case]:
    """Return the kernels for tensors of `numel` elements of `dtype`."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = _ternary_cases(x)
    for kind in KINDS:
        found += _cases_of(_grouped(kind), x)
    found.append(_one_tensor(x))
    for codec in (OneBit(group=GROUP), Block(2, group=GROUP), Ternary(group=GROUP)):
        encode = _cases_of(codec.with_decay(0.25), x)[0]
        encode.name += ", decay"
        found.append(encode)
    return found


def _cases_of(codec: Codec, x: Tensor) -> list[Case]:
    """Return encode and decode of one payload of a codec."""
    layout, out = _layout(codec, x.numel()), torch.empty_like(x)
    payload, residuals = torch.zeros(layout.nbytes, dtype=torch.uint8), NO_RESIDUALS
    moved, written = x.element_size() + layout.nbytes / x.numel(), [payload]
    if codec.error_feedback:
        new = torch.zeros(x.numel())
        residuals = Residuals(_residual(x), new, lambda dropped: None)
        written.append(new)
    _place_scales(codec, layout, x, payload)
    encode = partial(codec.encode_body, KERNELS, x, layout, payload, KEY, residuals)
    source = Payloads([payload], codec.code, x.dtype)
    decode = partial(KERNELS.sum_decode, source, layout.packed, out)
    encode()
    return [
        Case(f"{codec.name} encode", encode, moved + 8 * codec.error_feedback, written),
        Case(f"{codec.name} decode 1", decode, moved, [out]),
    ]


def _ternary_cases(x: Tensor) -> list[Case]:
    """Return the kernels that TernGrad has for scales, for payloads of four ranks, and for sums."""
    codec, size = TernGrad(clip_sigma=None), x.element_size()
    layout, out = _layout(codec, x.numel()), torch.empty_like(x)
    blocks, scales = codec.scratch(KERNELS, layout), torch.empty(1)
    sent = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(4)]
    for rank, payload in enumerate(sent):
        _place_scales(codec, layout, x, payload)
        codec.encode_body(KERNELS, x, layout, payload, RngKey(seed=1, rank=rank, step=5))
    shared = Payloads(sent, Code("ternary", shared=True), x.dtype)
    own = Payloads(sent, Code("ternary", shared=False), x.dtype)
    lanes, code = PayloadLayout(lanes_form(4), layout.pieces), Lanes(4).code
    bits, summed = lanes.form.bits, torch.zeros(lanes.nbytes, dtype=torch.uint8)
    _place_scales(codec, layout, x, summed)
    sums = Payloads([summed], code, x.dtype)
    measure = partial(TernGrad().measure, KERNELS, x, layout, blocks, scales)
    add = partial(host.sum_lanes, shared.tensors, layout.packed, lanes.packed, code, summed)
    add()
    crc, raw = torch.zeros(1, dtype=torch.int64), sent[0].numpy()
    found = [
        Case("absmax + moments", measure, size, [blocks, scales]),
        Case("ternary sum to lanes 4", add, 1 + bits / 8, [summed]),
        Case("crc32c of a payload", lambda: crc.fill_(host.crc32c(raw)), 0.25, [crc]),
    ]
    for name, source, packed, moved in (
        ("terngrad decode 4 shared", shared, layout.packed, 1),
        ("terngrad decode 4 own", own, layout.packed, 1),
        ("lanes decode", sums, lanes.packed, bits / 8),
    ):
        decode = partial(KERNELS.sum_decode, source, packed, out)
        found.append(Case(name, decode, size + moved, [out]))
    return found


def _one_tensor(x: Tensor) -> Case:
    """Return what one call of a user costs: header, checksum, the residual replaced in place."""
    codec, old = OneBit(group=GROUP), _residual(x)
    kept, payload = old.clone(), torch.zeros(_layout(codec, x.numel()).nbytes, dtype=torch.uint8)
    run = partial(codec.encode, x, residual=kept, key=KEY, out=payload)
    moved = x.element_size() + payload.numel() / x.numel() + 12  # reads, saves, writes the residual
    return Case("onebit encode, one tensor", run, moved, [payload, kept], lambda: kept.copy_(old))


def _residual(x: Tensor) -> Tensor:
    return torch.randn(x.numel(), generator=torch.Generator().manual_seed(1))


def _place_scales(codec: Codec, layout: PayloadLayout, x: Tensor, payload: Tensor) -> None:
    """Write the scales of codes into a payload where the codec measures them before it encodes."""
    if codec.measures:
        scales = torch.empty(layout.group_count)
        codec.measure(KERNELS, x, layout, codec.scratch(KERNELS, layout), scales)
        codec.place_scales(layout, scales, payload)


def _grouped(codec: Codec) -> Codec:
    """Return the codec with groups of `GROUP` if its groups are rows, with one scale otherwise."""
    if isinstance(codec, Block):
        return Block(codec.bits, group=GROUP)
    if isinstance(codec, TernGrad):
        return TernGrad(clip_sigma=None)
    return type(codec)(group=GROUP) if isinstance(codec, OneBit | Ternary) else codec


def _layout(codec: Codec, numel: int) -> PayloadLayout:
    slot = Slot(0, numel, codec.group_numel((numel,)), True, 0)
    pieces, whole = whole_pieces([slot]), codec.whole_groups
    return PayloadLayout(codec.form, pieces, segmented=False, whole_groups=whole)
