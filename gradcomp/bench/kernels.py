"""The kernels that `bench codec` times: how to run each one, and how to see that its result is
the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp import Block, OneBit, RngKey, Ternary, TernGrad
from gradcomp.codecs import KINDS, Codec, Identity
from gradcomp.kernels import HOST, NO_RESIDUALS, Payloads, Residuals, native
from gradcomp.kernels.tables import BLOCK
from gradcomp.payload.form import lanes_form
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.reference import codec as ref

KEY = RngKey(seed=1, rank=1, step=5)
GROUP = 512  # of 1-bit and blocks; ternary has one group, as its default is
CHECKED = 1 << 17  # elements of each result that are compared with the reference


@dataclass
class Case:
    """One kernel: how to run it, and how to see that its result is right."""

    name: str
    run: Callable[[], object]
    check: Callable[[], bool]


def cases(numel: int, dtype: torch.dtype) -> list[Case]:
    """Return the kernels for tensors of `numel` elements of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator).to(dtype)
    code, n = native.DTYPES[dtype], min(numel, CHECKED)
    plain = x[:n].view(torch.uint16).numpy() if dtype == torch.bfloat16 else x[:n].numpy()
    scale, piece = np.float32(2.5), ref.Piece(n, numel)
    out: list[Case] = []

    def add(
        name: str, run: Callable[[], object], got: Callable[[], Any], wanted: Callable[[], Any]
    ) -> None:
        out.append(Case(name, run, lambda: got().tobytes() == wanted().tobytes()))

    def payloads(codec: Codec, count: int) -> tuple[PayloadLayout, list[Tensor]]:
        layout = _layout(codec, numel)
        made = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(count)]
        if layout.form.code == TernGrad.form.code:
            for number, payload in enumerate(made):
                one = torch.tensor([float(scale)])
                codec.place_scales(HOST, layout, one, payload)
                key = RngKey(seed=1, rank=number, step=5)
                codec.encode_body(HOST, x, layout, payload, key)
        return layout, made

    ternary = TernGrad(clip_sigma=None)
    layout, sent = payloads(ternary, 4)
    target, fp32 = torch.empty(layout.nbytes, dtype=torch.uint8), torch.empty(numel, dtype=dtype)
    target[: 32 + 4] = sent[0][: 32 + 4]
    scales, blocks, clipping = torch.empty(1), ternary.scratch(HOST, layout), TernGrad()
    key = RngKey(seed=1, rank=0, step=5)

    def codes(rank: int) -> NDArray[np.uint8]:
        return ref.ternary_encode(plain, np.array([scale]), piece, ref.Key(1, rank, 5))

    def decoded(shared: bool, count: int) -> Any:
        average = ref.ternary_sum_decode(
            [codes(r) for r in range(count)], [np.array([scale])] * count, piece, shared
        )
        return ref.from_float32(average, code)

    def head() -> Any:
        return (fp32[:n].view(torch.uint16) if dtype == torch.bfloat16 else fp32[:n]).numpy()

    add(
        "terngrad encode",
        lambda: ternary.encode_body(HOST, x, layout, target, key),
        lambda: target.numpy()[36 : 36 + n // 4],
        lambda: codes(0)[: n // 4],
    )
    add(
        "absmax + moments",
        lambda: clipping.measure(HOST, x, layout, blocks, scales),
        lambda: blocks.numpy().view(BLOCK)[: n // 512],
        lambda: ref.block_sums(plain, ref.Piece(n, numel))[: n // 512],
    )
    for count, shared in ((1, True), (4, True), (4, False)):
        source = Payloads(sent[:count], "ternary", dtype, shared=shared)
        add(
            f"terngrad decode {count}" + (" shared" if shared else " own") * (count > 1),
            lambda p=source: HOST.sum_decode(p, layout.packed, fp32),  # type: ignore[misc]
            head,
            lambda c=count, s=shared: decoded(s, c),  # type: ignore[misc]
        )
    lanes = PayloadLayout(lanes_form(4), layout.pieces)
    summed = torch.zeros(lanes.nbytes, dtype=torch.uint8)
    summed[32:36] = sent[0][32:36]
    bits, together = lanes.form.bits, ternary.payloads(sent, dtype)
    sums = Payloads([summed], "lanes", dtype, world_size=4, lane_bits=bits)
    add(
        "ternary sum to lanes 4",
        lambda: HOST.sum_lanes(together, layout.packed, lanes.packed, bits, summed),
        lambda: summed.numpy()[36 : 36 + n * bits // 8],
        lambda: ref.sum_lanes([codes(r) for r in range(4)], n)[: n * bits // 8],
    )
    add(
        "lanes decode",
        lambda: HOST.sum_decode(sums, lanes.packed, fp32),
        head,
        lambda: decoded(True, 4),
    )
    onebit = OneBit(group=GROUP)
    one, old, new = (
        _layout(onebit, numel),
        torch.randn(numel, generator=generator),
        torch.zeros(numel),
    )
    bit = torch.zeros(one.nbytes, dtype=torch.uint8)
    bits_of_one = onebit.payloads([bit], dtype)
    encoded = ref.onebit_encode(plain, ref.Piece(n, GROUP), old[:n].numpy())
    add(
        "onebit encode",
        lambda: onebit.encode_body(HOST, x, one, bit, KEY, Residuals(old, new)),
        lambda: new[: n // GROUP * GROUP].numpy(),
        lambda: encoded[2][: n // GROUP * GROUP],
    )
    kept, sealed = old.clone(), torch.zeros(one.nbytes, dtype=torch.uint8)
    add(  # all that a step of one tensor costs: the residual in place, a header, a checksum
        "onebit encode, one tensor",
        lambda: onebit.encode(x, residual=kept, key=KEY, out=sealed),
        lambda: _encoded_again(onebit, x, old, kept, sealed),
        lambda: encoded[2][: n // GROUP * GROUP],
    )
    add(
        "onebit decode 1",
        lambda: HOST.sum_decode(bits_of_one, one.packed, fp32),
        lambda: head()[: n // GROUP * GROUP],
        lambda: ref.from_float32(
            ref.onebit_decode(encoded[1], encoded[0], ref.Piece(n, GROUP)), code
        )[: n // GROUP * GROUP],
    )
    identity, same = Identity(), _layout(Identity(), numel)
    values = torch.zeros(same.nbytes, dtype=torch.uint8)
    add(
        "values encode",
        lambda: identity.encode_body(HOST, x, same, values, KEY),
        lambda: values.numpy()[32 : 32 + 4 * n],
        lambda: ref.to_float32(plain),
    )
    for kind in KINDS:
        if kind.name not in (ternary.name, onebit.name, identity.name):
            out.extend(_cases_of(_grouped(kind), x))
    for codec in (OneBit(group=GROUP), Block(2, group=GROUP), Ternary(group=GROUP)):
        encode = _cases_of(codec.with_decay(0.25), x)[0]
        out.append(Case(f"{encode.name}, decay", encode.run, encode.check))
    crc = np.zeros(4, np.uint8)

    def checksum() -> None:
        crc[:] = np.frombuffer(np.uint32(native.crc32c(target.numpy())).tobytes(), np.uint8)

    short = np.frombuffer(b"123456789", np.uint8)
    out.append(Case("crc32c of a payload", checksum, lambda: native.crc32c(short) == 0xE3069283))
    return out


def _cases_of(codec: Codec, x: Tensor) -> list[Case]:
    """Return encode and decode of a codec; what the portable tier makes is the reference."""
    layout, key = _layout(codec, x.numel()), KEY
    payload, out = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.empty_like(x)
    residuals = NO_RESIDUALS
    if codec.error_feedback:
        old = torch.randn(x.numel(), generator=torch.Generator().manual_seed(1))
        residuals = Residuals(old, torch.zeros(x.numel()), lambda dropped: None)
    if codec.measures:
        scales = torch.empty(layout.group_count)
        codec.measure(HOST, x, layout, codec.scratch(HOST, layout), scales)
        codec.place_scales(HOST, layout, scales, payload)
    source = codec.payloads([payload], x.dtype)

    def encode() -> bool:
        return codec.encode_body(HOST, x, layout, payload, key, residuals)

    def decode() -> bool:
        return HOST.sum_decode(source, layout.packed, out)

    def same(run: Callable[[], bool], result: Tensor) -> bool:
        found, tier = result.clone(), native.tier()
        native.select_tier(native.tiers()[0])
        run()
        native.select_tier(tier)
        return torch.equal(found.view(torch.uint8), result.view(torch.uint8))

    encode()
    return [
        Case(f"{codec.name} encode", encode, lambda: same(encode, payload)),
        Case(f"{codec.name} decode 1", decode, lambda: same(decode, out)),
    ]


def _grouped(codec: Codec) -> Codec:
    """Return a codec whose groups are rows with groups as long as a usual row: one tensor has no
    rows.
    """
    if isinstance(codec, Ternary):
        return Ternary(group=GROUP)
    return Block(codec.bits, group=GROUP) if isinstance(codec, Block) else codec


def _encoded_again(codec: Codec, x: Tensor, old: Tensor, residual: Tensor, payload: Tensor) -> Any:
    """Encode from the residual `old`, which timing has moved on, and return what is left over."""
    codec.encode(x, residual=residual.copy_(old), key=KEY, out=payload)
    n = min(x.numel(), CHECKED)
    return residual[: n // GROUP * GROUP].numpy()


def _layout(codec: Codec, numel: int) -> PayloadLayout:
    slot = Slot(0, numel, codec.group_numel((numel,)), True, 0)
    return PayloadLayout(
        codec.form, whole_pieces([slot]), segmented=False, whole_groups=codec.whole_groups
    )
