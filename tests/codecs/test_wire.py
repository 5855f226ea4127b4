"""Promise 7: hostile bytes give values or a named error, never a crash, and never an allocation
by a number read.
"""

import tracemalloc

import pytest
import torch
from _kinds import check_kinds
from hypothesis import given
from hypothesis import strategies as st

from gradcomp import Block, CorruptPayload, Identity, OneBit, TernGrad, UnsupportedTensor
from gradcomp.codecs import EntropyCoded, RngKey
from gradcomp.kernels import CPU, of
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

CODECS = {
    "terngrad": TernGrad(group=10),
    "onebit": OneBit(group=10),
    "block2": Block(2, group=10),
    "block4": Block(4, group=10),
    "block8": Block(8),
    "entropy": EntropyCoded(2.2),
    "identity": Identity(),
    "bf16": Identity("bf16"),
}
check_kinds(CODECS, without=("ternary",))


WORDS = st.integers(0, 2**32 - 1)


def payload(name, numel=37):
    torch.manual_seed(0)
    return CODECS[name].encode(torch.randn(numel), key=RngKey(step=3))


@pytest.mark.parametrize(
    ("name", "lies"),
    [
        ("terngrad", {"numel": 2**32 - 1}),
        ("entropy", {"numel": 2**32 - 1}),
        ("identity", {"numel": 2**32 - 4096, "group_numel": 2**32 - 4096}),
    ],
)
def test_lying_numel_allocates_nothing(name, lies):
    lie = payload(name)
    wire.seal(lie.numpy(), wire.parse(lie.numpy())._replace(**lies))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayload, match="truncated"):
            CODECS[name].decode(lie)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(data=st.binary(max_size=300), name=st.sampled_from(sorted(CODECS)))
def test_any_bytes_are_safe(data, name):
    with pytest.raises(CorruptPayload):
        CODECS[name].decode(torch.tensor(list(data), dtype=torch.uint8))


@given(
    name=st.sampled_from(sorted(CODECS)),
    fields=st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("codec", "dtype", "flags"), st.integers(0, 255)),
            **dict.fromkeys(("numel", "group_numel", "scale_count"), st.integers(0, 100) | WORDS),
            **dict.fromkeys(("step", "stream"), WORDS),
        },
    ),
    tail=st.binary(max_size=60),
    cut=st.integers(0, 60),
)
def test_any_header_with_a_right_checksum_is_safe(name, fields, tail, cut):
    """Whatever a well-summed payload claims, decode returns numel values or names the check."""
    whole = payload(name)
    kept = whole[: max(32, whole.numel() - cut)]
    lie = torch.cat([kept, torch.tensor(list(tail), dtype=torch.uint8)])
    values = {f: getattr(wire.parse(whole.numpy()), f) for f in wire.Header._fields} | fields
    wire.seal(lie.numpy(), wire.Header(**values))
    try:
        assert CODECS[name].decode(lie).numel() == values["numel"]
    except CorruptPayload as error:
        assert error.check


def test_segmented_payloads_need_their_layout():
    slots = [Slot(0, 50, 50, True, 0), Slot(1, 20, 20, False, 50)]
    codec = TernGrad()
    layout = PayloadLayout(codec.form, whole_pieces(slots))
    x, data = torch.randn(70), torch.zeros(layout.nbytes, dtype=torch.uint8)
    scale = torch.tensor([2.0])
    codec.place_scales(layout, scale, data)
    codec.encode_body(of(CPU), x, layout, data, RngKey())
    wire.seal(data.numpy(), codec.header(layout, 0, False, 0, 0))
    with pytest.raises(CorruptPayload, match="layout="):
        codec.decode(data)
    out = codec.decode(data, layout=layout)
    assert torch.equal(out[50:], x[50:])
    assert set(out[:50].tolist()) <= {-2.0, 0.0, 2.0}
    with pytest.raises(CorruptPayload):
        codec.decode(payload("terngrad"), layout=layout)


@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(40),
        torch.zeros(4, 10, dtype=torch.uint8),
        torch.zeros(80, dtype=torch.uint8)[::2],
    ],
)
def test_payloads_that_are_no_bytes(bad):
    with pytest.raises(UnsupportedTensor):
        TernGrad().decode(bad)
