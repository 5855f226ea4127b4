"""What every codec owes, on every tier: payloads and residuals of the NumPy reference,
conservation, frozen vectors, refusals, memory and threads. A new codec is a row of `ROWS`, rows of
`FAULTS`, and a file of frozen vectors where it writes bytes of its own.
"""

import concurrent.futures.thread
import json
import math
import struct
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _expected import fed_back
from _tables import KINDS, LENGTHS, LONG, TIERS, canonical, same_bytes, tier, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import codec as ref
from reference import payload as ref_payload

from gradcomp import Block, CorruptPayload, Identity, OneBit, Ternary, TernGrad, UnsupportedTensor
from gradcomp.codecs import KINDS as CODECS
from gradcomp.codecs import EntropyCoded, RngKey
from gradcomp.kernels import native

VECTORS = Path(__file__).parents[1] / "vectors"
TORCH_DTYPES = {ref.F32: torch.float32, ref.BF16: torch.bfloat16, ref.F16: torch.float16}
GUARD = 0xA5
KEY = RngKey(seed=5, rank=2, step=9, parameter=4, stream=1)


# ---- the codecs ----------------------------------------------------------------------------------
# How a codec is made for scale groups of so many elements.
ROWS = {
    "terngrad": TernGrad,
    "terngrad, own scales, not clipped": partial(TernGrad, scale="own", clip_sigma=None),
    "ternary": Ternary,
    "ternary, decay": partial(Ternary, step=3.0, residual_decay=0.25),
    "onebit": OneBit,
    "onebit, signs, decay": partial(OneBit, values="sign", residual_decay=0.3),
    "block2": partial(Block, 2),
    "block4": partial(Block, 4),
    "block8, decay": partial(Block, 8, residual_decay=0.25),
    "entropy": lambda group: EntropyCoded(2.2),
    "entropy, 1 bit": lambda group: EntropyCoded(1),
    "entropy, 4 bits, decay": lambda group: EntropyCoded(4, residual_decay=0.25),
    "identity": lambda group: Identity(),
    "bf16": lambda group: Identity("bf16"),
}
rows = pytest.mark.parametrize("name", ROWS)
FEEDBACK = [name for name, make in ROWS.items() if make(group=8).error_feedback]
feedback_rows = pytest.mark.parametrize("name", FEEDBACK)


def test_every_codec_has_a_row():
    assert {codec.name for codec in CODECS} == {make(group=8).name for make in ROWS.values()}


def reference_of(codec, x, residual, group, key):
    """Return the payload and the new residual that the reference writes for a codec."""
    if codec.name in ("identity", "bfloat16"):
        return ref_payload.encode_values(x, codec.form.code, key), None
    if codec.name == "terngrad":
        scales = ref.ternary_scales(x, ref.Piece(len(x), group), codec.clip_sigma or -1.0)
        return ref_payload.encode_ternary(x, scales, group, key), None
    kind, option = fed_back(codec)
    return ref_payload.encode_fed_back(kind, x, residual, group, key, option, codec.decay)


def as_tensor(x):
    """Return a source array of the reference as a tensor of its memory."""
    tensor = torch.from_numpy(x)
    return tensor.view(torch.bfloat16) if x.dtype == np.uint16 else tensor


def made(name, numel=37):
    """Return a codec with groups of 10 elements and a payload of it."""
    codec = ROWS[name](group=10)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    return codec, codec.encode(x, key=KEY)


# ---- bytes, values, residuals --------------------------------------------------------------------
@rows
@settings(database=None, suppress_health_check=list(HealthCheck))
@given(
    numel=st.sampled_from([*LENGTHS, *LONG]) | st.integers(0, 3000),
    group=st.sampled_from(["tensor", 1, 5, 8, 64, 512]) | st.integers(1, 700),
    dtype=st.sampled_from(list(TORCH_DTYPES)),
    kind=st.sampled_from([kind for kind in KINDS if kind != "bits"]),
    residual_kind=st.sampled_from([None, "normal", "normal", "zeros", "huge", "nonfinite"]),
    seed=st.integers(0, 2**32 - 1),
)
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
def test_payloads_and_residuals_are_the_references(
    name, numel, group, dtype, kind, residual_kind, seed
):
    """The new residual is fl(decay * fl(fl(g + r) - q))."""
    codec, rng = ROWS[name](group=group), np.random.default_rng(seed)
    x, old = values(kind, numel, dtype, rng), None
    if codec.error_feedback and residual_kind:
        old = values(residual_kind, numel, ref.F32, rng)
    size = codec.group_numel((numel,))
    words = KEY.seed, KEY.rank, KEY.step, KEY.parameter, KEY.stream
    want, want_left = reference_of(codec, x, old, size, ref.Key(*words))
    flagged = ref_payload.unpack_payload(want)[0].flags
    for number in TIERS:
        residual = None if old is None else old.copy()
        with tier(number):
            given_residual = None if residual is None else torch.from_numpy(residual)
            payload = codec.encode(as_tensor(x), residual=given_residual, key=KEY)
            decoded = codec.decode(payload).numpy()
        assert payload.numel() == codec.payload_nbytes(numel, math.ceil(numel / size))
        if flagged:  # what stands in the body is unspecified
            same_bytes(payload.numpy()[:28], np.frombuffer(want[:28], np.uint8), number)
            assert np.isnan(decoded).all() and len(decoded) == numel
            assert residual is None or residual.tobytes() == old.tobytes()
            continue
        same_bytes(payload.numpy(), np.frombuffer(want, np.uint8), number)
        same_bytes(decoded, ref_payload.decode(want), number)
        if residual is not None:
            same_bytes(residual, canonical(want_left), number)
            lost = (ref.to_float32(x) + old) - decoded
            same_bytes(residual, np.float32(codec.decay) * lost, number)


def frozen_codec(file, case):
    """Return the codec that writes a frozen payload."""
    group, decay = case.get("group_numel"), case.get("decay", 1.0)
    if file == "ternary":
        sigma = case.get("clip_sigma", -1.0)
        return TernGrad(group=group, clip_sigma=sigma if sigma > 0 else None)
    if file == "nearest":
        return Ternary(step=case["step"], group=group, residual_decay=decay)
    if file == "onebit":
        kind = "sign" if "means" in case else "means"
        return OneBit(group=group, values=kind, residual_decay=decay)
    if file == "block":
        return Block(ref_payload.BLOCKS[case["codec"]], group=group, residual_decay=decay)
    if file == "entropy":
        return EntropyCoded(case["nbytes"] / 512, residual_decay=decay)
    return Identity("fp32" if case["codec"] == ref_payload.IDENTITY else "bf16")


@pytest.mark.parametrize("file", ["ternary", "nearest", "onebit", "block", "entropy", "identity"])
def test_frozen_payloads(tier, file):
    content = json.loads((VECTORS / f"{file}.json").read_text())
    inputs = {
        name: np.frombuffer(bytes.fromhex(entry["data"]), entry["dtype"])
        for name, entry in content["inputs"].items()
    }
    for case in content["payloads"]:
        numel, codec = case["numel"], frozen_codec(file, case)
        x, more = inputs[case["input"]][case["first"] : case["first"] + numel].copy(), {}
        if case.get("residual"):
            more["residual"] = torch.from_numpy(inputs[case["residual"]][:numel].copy())
        if "scales" in case and numel:
            scales = np.frombuffer(bytes.fromhex(case["scales"]), "<f4").copy()
            more["scale"] = torch.from_numpy(scales)
        payload = codec.encode(as_tensor(x), key=RngKey(**case["key"]), **more)
        assert payload.numpy().tobytes().hex() == case["payload"], case
        if payload[7]:  # not finite
            continue
        decoded = codec.decode(payload).numpy()
        assert ref_payload.crc32c(decoded.tobytes()) == case["decoded_crc"]
        if "residual" in more:
            left = more["residual"].numpy().tobytes()
            assert ref_payload.crc32c(left) == case["residual_crc"]


@pytest.mark.parametrize("name", [name for name in FEEDBACK if not name.startswith("entropy")])
def test_rows_without_gradient_stay_exact(name):
    codec = ROWS[name](group="row")
    gradient, residual = torch.randn(4, 32), torch.randn(4, 32)
    gradient[2] = 0
    old = residual.clone()
    decoded = codec.decode(codec.encode(gradient, residual=residual.view(-1))).view(4, 32)
    assert torch.equal(decoded[2], torch.zeros(32))
    assert torch.equal(residual[2], np.float32(codec.decay) * old[2])
    assert not torch.equal(residual[1], old[1])


@feedback_rows
@pytest.mark.parametrize("value", [3.3e38, float("nan"), float("inf")])
def test_sums_that_are_not_finite_take_nothing_from_residuals(tier, name, value):
    """`x` is finite, its sum with the residual is not: the payload is flagged, and no group
    loses what it did not send.
    """
    codec = ROWS[name](group=100)
    x, residual = torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))
    x[2500], residual[2500] = 3.3e38, value
    before = residual.clone()
    assert torch.isnan(codec.decode(codec.encode(x, residual=residual))).all()
    assert residual.numpy().tobytes() == before.numpy().tobytes()
    residual[2500] = 0.0
    assert not torch.isnan(codec.decode(codec.encode(torch.ones(3000), residual=residual))).any()


def hard_values(numel, rng):
    """Return {kind: function} that makes values that are hard to fit into a stream: few or many
    large ones, all alike, other ones where the step is searched for than elsewhere.
    """
    normal, place = rng.standard_normal(numel), np.arange(numel)
    return {
        "Student-t, 1 degree": lambda: rng.standard_t(1, numel),
        "Student-t, 2 degrees": lambda: rng.standard_t(2, numel) * 1e-6,
        "log-normal": lambda: np.exp(3 * normal) * rng.choice([-1, 1], numel),
        "sparse": lambda: np.where(rng.random(numel) < rng.choice([0.003, 0.03, 0.3]), normal, 0),
        "one huge": lambda: np.where(place == numel // 2, 1e6, normal * 1e-3),
        "one huge, a period": lambda: np.where(place % 64 == 7, -1e30, normal),
        "one at the end": lambda: np.where(place == numel - 1, 1.0, 0.0),
        "loud outside the sample": lambda: np.where(place % 512 < 128, 1e-9, 1.0) * normal,
        "loud inside the sample": lambda: np.where(place % 512 < 128, 1e9, 1.0) * normal,
        "constant": lambda: np.full(numel, -0.1),
        "alternating": lambda: np.where(place % 2, 1.0, -1.0),
        "alternating with 0": lambda: np.where(place % 2, 1.0, 0.0),
        "pairs that escape": lambda: np.where(place % 2, 30.0, -1.0) * (1 + 0.01 * normal),
        "uniform": lambda: rng.uniform(-1, 1, numel),
        "denormal": lambda: normal * 1e-40,
        "smallest scale": lambda: normal * 2.0**-122,
        "near the largest step": lambda: normal * 1e33,
        "largest numbers": lambda: rng.choice([-1, 1], numel) * np.finfo(np.float32).max,
    }


@pytest.mark.parametrize("bits", [1, 1.25, 2.2, 4])
@pytest.mark.parametrize("kind", hard_values(1, np.random.default_rng(0)))
def test_hard_values_fit_their_stream(kind, bits):
    """Payloads and residuals are the reference's, into memory that held something else; what a
    stream does not send stays in the residual.
    """
    codec, rng = EntropyCoded(bits), np.random.default_rng(len(kind))
    for numel in (*range(1, 18), 31, 32, 33, 63, 64, 100, 777, 4095, 4096, 4097, 8192):
        x, key = hard_values(numel, rng)[kind]().astype(np.float32), ref.Key()
        nbytes = codec.form.stream_nbytes
        want, want_left = ref_payload.encode_fed_back("entropy", x, None, 4096, key, nbytes)
        decoded = ref_payload.decode(want)
        assert np.isfinite(decoded).all()
        for number in TIERS:
            residual = torch.zeros(numel)
            out = torch.full((len(want),), GUARD, dtype=torch.uint8)
            with tier(number):
                codec.encode(torch.from_numpy(x), residual=residual, out=out)
                got = codec.decode(out)
            same_bytes(out.numpy(), np.frombuffer(want, np.uint8), number)
            same_bytes(residual.numpy(), want_left, number)
            same_bytes(got.numpy(), decoded, number)
            assert torch.equal(torch.from_numpy(x) - got, residual)


# ---- refusals ------------------------------------------------------------------------------------
def refused(codec, payload, check=None):
    """Assert that codec and reference refuse a payload, under a name of `check` if given."""
    with pytest.raises(CorruptPayload) as error:
        codec.decode(payload)
    with pytest.raises(ValueError, match="^[a-z_]+: ") as other:
        ref_payload.decode(payload.numpy().tobytes())
    if check:
        assert {error.value.check, str(other.value).partition(":")[0]} <= set(check.split())


@rows
def test_every_flipped_bit_is_refused(name):
    codec, good = made(name)
    for position in range(8 * good.numel()):
        bad = good.clone()
        bad[position // 8] ^= 1 << position % 8
        refused(codec, bad)


@rows
def test_every_truncation_and_extension_is_refused(name):
    codec, good = made(name)
    for length in range(good.numel()):
        refused(codec, good[:length].clone())
    for extra in (1, 4, 100):
        refused(codec, torch.cat([good, torch.zeros(extra, dtype=torch.uint8)]))


def u32(*numbers):
    return struct.pack(f"<{len(numbers)}I", *numbers)


def f32(value):
    return struct.pack("<f", value)


# 37 elements in groups of 10; bytes put at an offset, then the right checksum. Scales begin at byte
# 32: 4 of them, 8 in 1-bit payloads, 1 where codes are entropy-coded.
FAULTS = [
    ("magic", "terngrad", 0, b"PMCG"),
    ("version", "terngrad", 4, b"\x01"),
    ("version", "terngrad", 4, b"\x03"),
    ("codec", "terngrad", 5, b"\x00"),
    ("codec", "terngrad", 5, b"\x09"),  # reserved
    ("codec", "terngrad", 5, b"\x4d"),
    ("dtype", "terngrad", 6, b"\x03"),
    ("flags", "terngrad", 7, b"\x04"),
    ("flags", "terngrad", 7, b"\x80"),
    ("group_numel", "terngrad", 7, b"\x02"),  # segmented with a regular group
    ("group_numel", "terngrad", 12, u32(0)),  # irregular, but not segmented
    ("group_numel", "identity", 12, u32(5)),
    ("group_numel", "bf16", 12, u32(38)),
    ("segmented", "terngrad", 7, b"\x02" + u32(37, 0)),
    ("stream", "terngrad", 24, u32(2**31)),
    ("numel truncated", "identity", 8, u32(2**32 - 4095, 2**32 - 4095)),
    ("truncated numel", "terngrad", 8, u32(2**32 - 1)),
    ("truncated", "terngrad", 8, u32(45, 12)),
    ("truncated", "identity", 8, u32(2**32 - 4096, 2**32 - 4096)),
    ("trailing", "terngrad", 8, u32(36)),
    ("scale_count", "terngrad", 8, u32(41)),
    ("scale_count", "terngrad", 12, u32(5)),
    ("scale_count", "terngrad", 12, u32(2**32 - 1)),
    ("scale_count", "terngrad", 16, u32(5)),
    ("scale_count", "terngrad", 16, u32(2**32 - 1)),
    ("scale_count", "onebit", 16, u32(4)),
    ("scale_count", "identity", 16, u32(1)),
    *(("scale", "terngrad", 32, f32(value)) for value in (-1.0, -0.0, math.nan, math.inf)),
    ("scale", "block8, decay", 32, f32(-1.0)),
    ("scale", "onebit", 60, f32(math.inf)),
    ("code", "terngrad", 48, b"\xff"),
    ("code", "terngrad", 57, b"\x57"),  # element 36
    ("code", "block4", 66, b"\x0f"),
    ("code", "block8, decay", 84, b"\xff"),
    ("padding", "terngrad", 57, b"\x50"),  # -1, then 00 as padding
    ("padding", "onebit", 68, b"\xe0"),  # 37 elements leave 3 bits
    ("padding", "block2", 57, b"\xc0"),
    ("padding", "block4", 66, b"\x17"),
    ("group_numel", "entropy", 12, u32(37)),
    ("group_numel", "entropy", 12, u32(10, 4)),
    ("scale_count", "entropy", 16, u32(2)),
    ("trailing", "entropy", 8, u32(1)),
    ("truncated", "entropy", 8, u32(300)),
    ("truncated numel", "entropy", 8, u32(2**32 - 1)),
    *(("scale", "entropy", 32, f32(value)) for value in (-1.0, 1.1e34, math.nan, math.inf)),
    ("code", "entropy", 36, b"\x10"),
    ("code", "entropy, 4 bits, decay", 36, b"\xff"),
    ("value", "identity", 32, f32(math.nan)),
    ("value", "bf16", 34, b"\x80\x7f"),
]


def patched(payload, offset, patch):
    """Return a payload with other bytes at an offset, and with the right checksum."""
    raw = bytearray(payload.numpy().tobytes())
    raw[offset : offset + len(patch)] = patch
    raw[28:32] = u32(ref_payload.crc32c(bytes(raw[32:]), ref_payload.crc32c(bytes(raw[:28]))))
    return torch.frombuffer(raw, dtype=torch.uint8)


@pytest.mark.parametrize(("check", "name", "offset", "patch"), FAULTS)
def test_every_fault_with_a_right_checksum_has_its_name(check, name, offset, patch):
    codec, payload = made(name)
    refused(codec, patched(payload, offset, patch), check)


def test_every_rejection_is_documented():
    document = (VECTORS.parents[1] / "docs/reference/wire-format.md").read_text()
    for check in {fault[0].split()[0] for fault in FAULTS} | {"crc", "lane", "step"}:
        assert f"| `{check}` |" in document


@pytest.mark.parametrize(("bits", "top"), [(2, 3), (4, 14), (8, 254)])
def test_scales_of_blocks_above_the_largest_that_an_encoder_writes(bits, top):
    """Some of them decoded to Inf, without the flag that says so."""
    codec, payload = Block(bits, group=10), Block(bits, group=10).encode(torch.ones(37))
    most = np.finfo(np.float32).max / np.float32(top)
    largest = patched(payload, 32, f32(most))
    assert codec.decode(largest).isfinite().all()
    assert ref_payload.unpack_payload(largest.numpy().tobytes())
    extreme = codec.encode(torch.tensor([3e38, -3e38, 1.0]))
    assert codec.decode(extreme).isfinite().all(), "and what it writes is taken"
    for value in (np.nextafter(most, np.float32(np.inf)), np.finfo(np.float32).max):
        refused(codec, patched(payload, 32, f32(value)), "scale")


# ---- memory and threads --------------------------------------------------------------------------
@rows
def test_encode_into_memory_of_the_callers(name):
    codec, x = ROWS[name](group=64), torch.randn(1000)
    wanted = codec.encode(x, key=KEY)
    out = torch.full((wanted.numel() + 16,), GUARD, dtype=torch.uint8)
    room = out[8:-8]
    got = codec.encode(x, key=KEY, out=room)
    assert got.data_ptr() == room.data_ptr() and torch.equal(room, wanted)
    assert (out[:8] == GUARD).all() and (out[-8:] == GUARD).all()
    with pytest.raises(ValueError, match=str(room.numel() + 1)):
        codec.encode(x, key=KEY, out=out[: room.numel() + 1])
    for bad in (torch.zeros(room.numel()), room.view(1, -1), out[::2]):
        with pytest.raises(UnsupportedTensor, match="out"):
            codec.encode(x, key=KEY, out=bad)


@pytest.mark.parametrize("group", [512, 100_003, "tensor"])
@rows
def test_threads_change_no_bit(name, group, monkeypatch):
    monkeypatch.setattr(native.threads, "THREAD_NUMEL", 1 << 16)
    codec, found = ROWS[name](group=group), []
    x, residual = torch.randn(2, 340_005, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            kept = residual.clone() if codec.error_feedback else None
            payload = codec.encode(x, residual=kept, key=KEY)
            found.append((payload, codec.decode(payload), residual if kept is None else kept))
    finally:
        torch.set_num_threads(before)
    for one in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(one, found[0], strict=True))


def test_large_tensors_are_encoded_while_the_interpreter_ends(monkeypatch):
    """As a function of atexit may: thread pools take no work any more, and this raised that."""
    monkeypatch.setattr(native.threads, "THREAD_NUMEL", 1 << 16)
    codec, x, found = OneBit(group=512), torch.randn(340_005), []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for ends in (False, True):
            monkeypatch.setattr(concurrent.futures.thread, "_shutdown", ends)
            residual = torch.ones(340_005)
            found.append((codec.encode(x, residual=residual, key=KEY), residual))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
