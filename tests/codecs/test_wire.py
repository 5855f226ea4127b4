"""Promise 7: hostile bytes give values or a named error, never a crash, and never an allocation
by a number read.
"""

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import payload as ref_payload

from gradcomp import (
    Block,
    CorruptPayload,
    Identity,
    OneBit,
    RngKey,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.kernels import HOST
from gradcomp.payload import wire
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

CODECS = {
    "terngrad": TernGrad(group=10),
    "onebit": OneBit(group=10),
    "block2": Block(2, group=10),
    "block4": Block(4, group=10),
    "block8": Block(8),
    "identity": Identity(),
    "bf16": Identity("bf16"),
}


def payload(name, numel=37):
    torch.manual_seed(0)
    return CODECS[name].encode(torch.randn(numel), key=RngKey(step=3))


def resealed(data, original=None, **fields):
    """Return the payload with header fields changed and a checksum that is right again."""
    header = wire.parse((data if original is None else original).numpy())
    values = {f: getattr(header, f) for f in header._fields} | {
        k: v for k, v in fields.items() if k in header._fields
    }
    out = data.clone()
    wire.seal(out.numpy(), wire.Header(**values))
    raw = out.numpy()
    for name, at, form in (("magic", 0, "<I"), ("version", 4, "<B")):
        if name in fields:
            raw[at : at + struct.calcsize(form)] = np.frombuffer(
                struct.pack(form, fields[name]), np.uint8
            )
            crc = ref_payload.crc32c(raw[:28].tobytes() + raw[32:].tobytes())
            raw[28:32] = np.frombuffer(struct.pack("<I", crc), np.uint8)
    return out


@pytest.mark.parametrize("name", CODECS)
def test_every_flipped_bit_is_refused(name):
    good = payload(name)
    for position in range(8 * good.numel()):
        bad = good.clone()
        bad[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptPayload):
            CODECS[name].decode(bad)


@pytest.mark.parametrize("name", CODECS)
def test_every_truncation_and_extension_is_refused(name):
    good = payload(name)
    for length in range(good.numel()):
        with pytest.raises(CorruptPayload):
            CODECS[name].decode(good[:length].clone())
    for extra in (1, 4, 100):
        with pytest.raises(CorruptPayload):
            CODECS[name].decode(torch.cat([good, torch.zeros(extra, dtype=torch.uint8)]))


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"magic": 0x12345678}, "magic"),
        ({"version": 1}, "version"),
        ({"version": 3}, "version"),
        ({"codec": 3}, "codec"),
        ({"codec": 77}, "codec"),
        ({"dtype": 3}, "dtype"),
        ({"flags": 4}, "flags"),
        ({"flags": 2}, "group_numel"),
        ({"flags": 2, "group_numel": 0}, "segmented"),
        ({"group_numel": 0}, "group_numel"),
        ({"stream": 2**31}, "stream"),
        ({"numel": 41}, "scale_count"),
        ({"numel": 2**32 - 1}, "truncated"),
        ({"group_numel": 5}, "scale_count"),
        ({"group_numel": 2**32 - 1}, "scale_count"),
        ({"scale_count": 5}, "scale_count"),
        ({"scale_count": 2**32 - 1}, "scale_count"),
    ],
)
def test_lying_headers_with_a_right_checksum(fields, check):
    with pytest.raises(CorruptPayload) as error:
        CODECS["terngrad"].decode(resealed(payload("terngrad"), **fields))
    assert error.value.check in check.split("|")


def test_group_numel_of_payloads_without_groups():
    for name in ("identity", "terngrad"):
        data = payload(name, 0 if name == "terngrad" else 37)
        with pytest.raises(CorruptPayload, match="group_numel"):
            CODECS[name].decode(resealed(data, group_numel=5))


def test_lying_numel_allocates_nothing():
    lie = resealed(payload("terngrad"), numel=2**32 - 1)
    tracemalloc.start()
    before = torch.ones(1)
    with pytest.raises(CorruptPayload):
        CODECS["terngrad"].decode(lie)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    assert before.item() == 1


def body(name, change):
    """Return a payload whose body was changed, with a checksum that is right again."""
    data = payload(name)
    original = data.clone()
    change(data.numpy())
    return resealed(data, original)


def set_last(value):
    def change(raw):
        raw[-1] = value

    return change


def set_scale(value):
    def change(raw):
        raw[32:36] = np.frombuffer(struct.pack("<f", value), np.uint8)

    return change


@pytest.mark.parametrize(
    ("name", "change", "check"),
    [
        ("terngrad", set_last(0b01010111), "code"),  # element 36 is 11
        ("terngrad", set_last(0b01010000), "padding"),  # -1, then 00 as padding
        ("onebit", set_last(0b11100000), "padding"),  # 37 elements leave 3 bits
        ("block2", set_last(0b11000000), "padding"),
        ("block4", set_last(0b00001111), "code"),  # element 36 is 15
        ("block4", set_last(0b00010111), "padding"),
        ("block8", set_last(0xFF), "code"),
        ("block8", set_scale(-1.0), "scale"),
        ("terngrad", set_scale(float("nan")), "scale"),
        ("terngrad", set_scale(float("inf")), "scale"),
        ("terngrad", set_scale(-1.0), "scale"),
        ("onebit", set_scale(float("inf")), "scale"),
    ],
)
def test_codes_and_scales_that_no_encoder_writes(name, change, check):
    with pytest.raises(CorruptPayload) as error:
        CODECS[name].decode(body(name, change))
    assert error.value.check == check


@pytest.mark.parametrize(("name", "top"), [("block2", 3), ("block4", 14), ("block8", 254)])
def test_scales_of_blocks_above_the_largest_that_an_encoder_writes(name, top):
    """Some of them decoded to Inf, without the flag that says so."""
    most = np.finfo(np.float32).max / np.float32(top)
    assert CODECS[name].decode(body(name, set_scale(most))).isfinite().all()
    assert ref_payload.unpack_payload(body(name, set_scale(most)).numpy().tobytes())
    extreme = CODECS[name].encode(torch.tensor([3e38, -3e38, 1.0]))
    assert CODECS[name].decode(extreme).isfinite().all(), "and what it writes is taken"
    for value in (np.nextafter(most, np.float32(np.inf)), np.finfo(np.float32).max):
        bad = body(name, set_scale(value))
        with pytest.raises(CorruptPayload) as error:
            CODECS[name].decode(bad)
        assert error.value.check == "scale"
        with pytest.raises(ValueError, match="^scale: "):
            ref_payload.unpack_payload(bad.numpy().tobytes())


@given(data=st.binary(max_size=300), name=st.sampled_from(sorted(CODECS)))
def test_any_bytes_are_safe(data, name):
    tensor = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
    with pytest.raises(CorruptPayload):
        CODECS[name].decode(tensor)


@given(
    name=st.sampled_from(sorted(CODECS)),
    fields=st.fixed_dictionaries(
        {},
        optional={
            "codec": st.integers(0, 255),
            "dtype": st.integers(0, 255),
            "flags": st.integers(0, 255),
            "numel": st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1)),
            "group_numel": st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1)),
            "scale_count": st.one_of(st.integers(0, 100), st.integers(0, 2**32 - 1)),
            "step": st.integers(0, 2**32 - 1),
            "stream": st.integers(0, 2**32 - 1),
        },
    ),
    tail=st.binary(max_size=60),
    cut=st.integers(0, 60),
)
def test_any_header_with_a_right_checksum_is_safe(name, fields, tail, cut):
    """Whatever a well-summed payload claims, decode returns numel values or names the check."""
    whole = payload(name)
    kept = whole[: max(32, whole.numel() - cut)]
    extra = (
        torch.frombuffer(bytearray(tail), dtype=torch.uint8)
        if tail
        else torch.empty(0, dtype=torch.uint8)
    )
    lie = torch.cat([kept, extra])
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
    codec.place_scales(HOST, layout, scale, data)
    codec.encode_body(HOST, x, layout, data, RngKey())
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
