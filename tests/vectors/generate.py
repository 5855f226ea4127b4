"""Write the frozen payloads beside this file: ``python tests/vectors/generate.py``.

`tests/reference` computes them. They are frozen: a change of a byte is a change of the wire format
(docs/reference/wire-format.md) or of the random draws, and belongs in one commit with the document
and the changelog. `build` returns what a file must hold; tests compare it with the file.

Numbers are JSON integers. Arrays and payloads are hex strings of their little-endian bytes. Long
float outputs are kept as the CRC-32C of their bytes. `input` names an entry of `inputs`, `first`
and `numel` cut it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from reference import codec as ref
from reference import payload as ref_payload

HERE = Path(__file__).parent
NAMES = ("rng", "crc32c", "ternary", "nearest", "onebit", "block", "entropy", "identity", "lanes")
# around the sizes at which a byte, a vector loop, a superblock of draws or a block of sums ends
LENGTHS = (
    *(0, 1, 3, 4, 5),
    *(n + d for n in (8, 16, 32, 64, 128, 512) for d in (-1, 0, 1)),
    *(1000, 1025),
)
KEY = {"seed": 1, "rank": 2, "step": 3, "parameter": 4, "stream": 0}
KEY_FIELDS = ("seed", "rank", "step", "parameter", "stream")
ZERO_KEY = dict.fromkeys(KEY_FIELDS, 0)
KEYS = (
    ZERO_KEY,
    {**dict.fromkeys(KEY_FIELDS, 0xFFFFFFFF), "stream": 0x7FFFFFFF},
    *({**ZERO_KEY, field: 1} for field in ("rank", "seed", "step", "parameter", "stream")),
)
Case = dict[str, Any]


def hexed(array: Any) -> str:
    """Return the little-endian bytes of an array as hex."""
    return str(np.ascontiguousarray(array).tobytes().hex())


def crc(array: Any) -> int:
    """Return the CRC-32C of an array's bytes."""
    return ref_payload.crc32c(np.ascontiguousarray(array).tobytes())


def make_inputs() -> dict[str, Any]:
    """Return the arrays that cases are cut from; drawn from Philox, so that they depend on no
    library's generator.
    """
    words = ref.philox4x32_10(np.array([(i, 0, 0, 0) for i in range(1030)]), (2026, 1)).astype(
        np.float64
    )
    spread = words.sum(axis=1) / 2**32 - 2.0  # about normal, deviation 0.58
    normal = spread.astype(np.float32)
    normal[[7, 40, 600]] = np.float32(-0.0)
    # fmt: off
    special = np.array(
        [
            0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754944e-38, 3.4028235e38,
            -3.4028235e38, 1e-30, -1e-20, 65504.0, 65520.0, -65536.0, 0.33333334, 1.00390625,
            1.01171875, 2.9802322e-08, 5.9604645e-08, 6.1e-05, 1e38,
        ],
        np.float32,
    )
    # fmt: on
    long = np.resize(normal[:1000], 4100) * np.resize(np.float32([1, 0.25, 4]), 4100)
    return {
        "normal_f32": normal,
        "normal_bf16": ref.from_float32(normal, ref.BF16),
        "normal_f16": normal.astype(np.float16),
        "residual_f32": np.roll(normal, 311) * np.float32(0.37),
        "special_f32": special,
        "zero_f32": np.where(np.arange(64) % 3 == 0, -0.0, 0.0).astype(np.float32),
        "blocks_f32": np.where(np.arange(200) // 25 % 2 == 0, 0.0, normal[:200]).astype(np.float32),
        "streams_f16": long.astype(np.float16),
        "with_inf_f32": np.where(np.arange(70) == 69, -np.inf, normal[:70]).astype(np.float32),
        "with_nan_f16": np.where(np.arange(70) == 3, np.nan, normal[:70]).astype(np.float16),
    }


INPUTS = make_inputs()


def take(case: Case) -> Any:
    """Return the array that a case encodes."""
    return INPUTS[case["input"]][case["first"] : case["first"] + case["numel"]]


def key_of(case: Case) -> ref.Key:
    """Return the random key of a case."""
    return ref.Key(**case["key"])


def cut(name: str, first: int = 0, numel: int | None = None, **more: Any) -> Case:
    """Return the beginning of a case."""
    return {
        "input": name,
        "first": first,
        "numel": len(INPUTS[name]) - first if numel is None else numel,
        **more,
    }


def residual_of(case: Case) -> Any:
    """Return the residual that a case begins with, None for none."""
    return None if case["residual"] is None else INPUTS[case["residual"]][: case["numel"]]


def with_feedback(kind: str, cases: list[Case], option_of: Callable[[Case], Any]) -> Case:
    """Encode cases with codes of `FED_BACK`, of which `option_of` returns the option."""
    for case in cases:
        of = take(case), residual_of(case), case["group_numel"], key_of(case)
        more = option_of(case), case.get("decay", 1.0)
        payload, left = ref_payload.encode_fed_back(kind, *of, *more)
        decoded = ref_payload.decode(payload)
        case.update(payload=payload.hex(), residual_crc=crc(left), decoded_crc=crc(decoded))
    return {"payloads": cases}


# ---- one builder a file --------------------------------------------------------------------------
def build_rng() -> Case:
    counters = [(0,) * 4, *map(tuple, np.eye(4, dtype=int).tolist()), (0xFFFFFFFF,) * 4]
    blocks = [
        {"counter": c, "key": k}
        for c in counters
        for k in ((0, 0), (1, 0), (0, 1), (0xFFFFFFFF, 0xFFFFFFFF))
    ]
    for case in blocks:
        case["words"] = [int(w) for w in ref.philox4x32_10(np.array(case["counter"]), case["key"])]
    draws: list[Case] = []
    for key, (start, numel) in itertools.product(KEYS, ((0, 130), (2**32 - 72, 71))):
        elements = np.arange(start, start + numel)
        draws.append({"key": key, "start": start, "numel": numel})
        draws[-1]["draws"] = hexed(ref.ternary_draws(elements, ref.Key(**key)).astype("<u2"))
        draws[-1]["deep"] = hexed(ref.deep_draws(elements, ref.Key(**key)))
    return {"blocks": blocks, "draws": draws}


def build_crc32c() -> Case:
    data = [bytes((i * 7 + 3) % 256 for i in range(n)) for n in LENGTHS]
    data += [b"123456789", bytes(32), b"\xff" * 32, bytes(range(32)), bytes(range(31, -1, -1))]
    return {"cases": [{"data": d.hex(), "crc": ref_payload.crc32c(d)} for d in data]}


SOURCES = ("normal_f32", "normal_bf16", "normal_f16")
CORNERS = ("special_f32", "zero_f32", "blocks_f32")
RESIDUALS = (None, "residual_f32")


def build_ternary() -> Case:
    clipped = {"clip_sigma": 2.5, "key": KEY}
    cases = [cut("normal_f32", 0, n, group_numel=max(n, 1), **clipped) for n in LENGTHS]
    for name, n, group in itertools.product(SOURCES, (65, 513, 1030), (8, 25, 512)):
        cases.append(cut(name, 0, n, group_numel=group, **clipped))
    for name, sigma in itertools.product(SOURCES[1:], (2.5, 1.0, -1.0)):
        cases.append(cut(name, 1, 129, group_numel=129, clip_sigma=sigma, key=KEY))
    cases += [cut("normal_f32", 0, 100, group_numel=100, clip_sigma=2.5, key=key) for key in KEYS]
    for group, sigma in itertools.product((1, 5, 22), (-1.0, 2.5)):
        cases.append(cut("special_f32", group_numel=group, clip_sigma=sigma, key=KEY))
    for name in CORNERS[1:]:
        cases.append(cut(name, group_numel=25, clip_sigma=-1.0, key=KEY))
    for name in ("with_inf_f32", "with_nan_f16"):
        cases.append(cut(name, group_numel=64, **clipped))
    given = (0, 1, 0x00400000, 0x3F000000, 0x3E99999A, 0x42C80000, 0x7F7FFFFF)  # scales
    inputs = (("normal_f32", 200), ("special_f32", 8), ("normal_f16", 97))
    for bits, (name, group) in itertools.product(given, inputs):
        case = cut(name, 0, min(200, len(INPUTS[name])), group_numel=group, key=KEY)
        count = -(-case["numel"] // group)
        cases.append({**case, "scales": hexed(np.full(count, bits, "<u4"))})
    for case in cases:
        x, group = take(case), case["group_numel"]
        if "scales" in case:
            scales = np.frombuffer(bytes.fromhex(case["scales"]), "<f4")
        else:
            scales = ref.ternary_scales(x, ref.Piece(len(x), group), case["clip_sigma"])
        payload = ref_payload.encode_ternary(x, scales, group, key_of(case))
        case.update(payload=payload.hex(), decoded_crc=crc(ref_payload.decode(payload)))
    starts = ((8, 130, 64), (600, 100, 200), (4000, 96, 32), (2**32 - 136, 135, 1000), (24, 17, 25))
    pieces = [
        cut("normal_f32", 5, n, start=start, group_numel=group, key=KEY)
        for start, n, group in starts
    ]
    for case in pieces:
        piece = ref.Piece(case["numel"], case["group_numel"], case["start"])
        scales = np.array([1.5, 0.75, 2.0, 0.0], np.float32)[: len(piece.groups())]
        codes = ref.ternary_encode(take(case), scales, piece, key_of(case))
        case.update(scales=hexed(scales), codes=hexed(codes))
    return {"payloads": cases, "pieces": pieces}


def build_onebit() -> Case:
    cases = [
        cut("normal_f32", 0, n, group_numel=max(n, 1), residual=residual, key=KEY)
        for n, residual in itertools.product(LENGTHS, RESIDUALS)
    ]
    owed: Case = {"residual": "residual_f32", "key": KEY}
    for name, n, group in itertools.product(SOURCES, (65, 513, 1030), (8, 25, 512)):
        cases.append(cut(name, 0, n, group_numel=group, **owed))
    for name, group, residual in itertools.product(CORNERS, (1, 5, 25), RESIDUALS):
        cases.append(cut(name, group_numel=group, residual=residual, key=KEY))
    signs = zip((*SOURCES, "zero_f32"), (65, 513, 97, 25), (8, 512, 25, 5), strict=True)
    cases += [cut(name, 0, n, group_numel=g, **owed, means=[-1, 1]) for name, n, g in signs]
    decayed = (("normal_f32", 129, 25), ("normal_bf16", 97, 97), ("blocks_f32", 200, 25))
    cases += [cut(name, 0, n, group_numel=g, **owed, decay=0.25) for name, n, g in decayed]
    return with_feedback("onebit", cases, lambda case: case.get("means"))


def build_nearest() -> Case:
    """Ternary codes rounded to the nearest level."""
    owed: Case = {"residual": "residual_f32", "key": KEY}
    cases = [
        cut("normal_f32", 0, n, group_numel=max(n, 1), **owed, step=1.8, decay=0.25)
        for n in LENGTHS[:19]
    ]
    lengths = zip(SOURCES, (515, 65, 200), strict=True)
    for (name, n), group, step in itertools.product(lengths, (25, 512), (1.8, 3.0)):
        cases.append(cut(name, 0, n, group_numel=group, **owed, step=step, decay=1.0))
    for name, residual, step in itertools.product(CORNERS, RESIDUALS, (1.8, 1e30)):
        cases.append(cut(name, group_numel=7, residual=residual, key=KEY, step=step, decay=0.25))
    return with_feedback("nearest", cases, lambda case: case["step"])


def build_block() -> Case:
    owed: Case = {"residual": "residual_f32", "key": KEY}
    cases: list[Case] = []
    for codec, n in itertools.product(ref_payload.BLOCKS, LENGTHS[:19]):
        cases.append(cut("normal_f32", 0, n, codec=codec, group_numel=max(n, 1), **owed))
    for codec, group in itertools.product(ref_payload.BLOCKS, (7, 25, 512)):
        for name, n in zip(SOURCES, (1030, 65, 200), strict=True):
            cases.append(cut(name, 0, n, codec=codec, group_numel=group, **owed))
        for name, residual in itertools.product(CORNERS, RESIDUALS):
            cases.append(cut(name, codec=codec, group_numel=group, residual=residual, key=KEY))
    decayed = (("normal_f32", 129), ("blocks_f32", 200))
    for codec, (name, n) in itertools.product(ref_payload.BLOCKS, decayed):
        cases.append(cut(name, 0, n, codec=codec, group_numel=25, **owed, decay=0.25))
    return with_feedback("block", cases, lambda case: ref_payload.BLOCKS[case["codec"]])


def build_entropy() -> Case:
    more: Case = {"residual": "residual_f32", "key": KEY, "group_numel": 4096}
    cases = [cut("normal_f32", 0, n, nbytes=1126, **more) for n in LENGTHS[:14]]
    for (name, n), nbytes in itertools.product(
        zip(SOURCES, (1030, 65, 200), strict=True), (512, 640, 1638, 2048)
    ):
        cases.append(cut(name, 0, n, nbytes=nbytes, **more))
    for name, nbytes, residual in itertools.product(CORNERS, (512, 1126), RESIDUALS):
        cases.append(cut(name, nbytes=nbytes, **{**more, "residual": residual}))
    for name, n in (("normal_f32", 129), ("blocks_f32", 200)):
        cases.append(cut(name, 0, n, nbytes=1126, **more, decay=0.25))
    cases += [cut("streams_f16", nbytes=n, **{**more, "residual": None}) for n in (512, 1126, 2048)]
    return with_feedback("entropy", cases, lambda case: case["nbytes"])


def build_identity() -> Case:
    kinds = ref_payload.IDENTITY, ref_payload.BF16_VALUES
    cases = [
        cut("normal_f32", 0, n, codec=codec, key=KEY)
        for n, codec in itertools.product(LENGTHS[:16], kinds)
    ]
    for name, codec in itertools.product(SOURCES[1:], kinds):
        cases += [cut(name, 2, n, codec=codec, key=KEY) for n in (1, 9, 65)]
    cases += [cut("special_f32", codec=codec, key=KEY) for codec in kinds]
    cases += [cut("with_inf_f32", 60, 10, codec=codec, key=KEY) for codec in kinds]
    for case in cases:
        payload = ref_payload.encode_values(take(case), case["codec"], key_of(case))
        case.update(payload=payload.hex(), decoded_crc=crc(ref_payload.decode(payload)))
    return {"payloads": cases}


def build_lanes() -> Case:
    shapes = [(world, n) for world in (1, 2, 3, 4, 7, 8) for n in (0, 1, 5, 8, 9, 65, 130)]
    shapes += [(world, n) for world in (31, 32, 63, 64, 127, 128) for n in (3, 17)]
    cases: list[Case] = []
    for world, n in shapes:
        scales = ref.ternary_scales(INPUTS["normal_f32"][:n], ref.Piece(n, 64), -1.0)
        keys = [ref.Key(rank=rank, step=9, seed=5) for rank in range(world)]
        parts = [
            ref_payload.encode_ternary(INPUTS["normal_f32"][k.rank :][:n], scales, 64, k)
            for k in keys
        ]
        payload = ref_payload.encode_lanes(parts, ref.Key(step=9, stream=1))
        codes = b"".join(part[32 + 4 * len(scales) :] for part in parts)
        cases.append({"world_size": world, "numel": n, "group_numel": 64, "scales": hexed(scales)})
        cases[-1].update(
            codes=codes.hex(),
            payload=payload.hex(),
            decoded=hexed(ref_payload.decode(payload, world)),
        )
    return {"payloads": cases}


def build(name: str) -> Case:
    """Return what `NAME.json` holds, as JSON reads it back."""
    content = globals()[f"build_{name}"]()
    used = {
        case[field]
        for case in content.get("payloads", [])
        for field in ("input", "residual")
        if case.get(field)
    }
    used |= {case["input"] for case in content.get("pieces", [])}
    inputs = {n: {"dtype": a.dtype.name, "data": hexed(a)} for n, a in INPUTS.items() if n in used}
    about = (
        f"frozen vectors of wire format {ref_payload.VERSION}; tests/vectors/generate.py says how"
        " to read them"
    )
    result: Case = json.loads(json.dumps({"about": about, "inputs": inputs, **content}))
    return result


def main() -> None:
    """Write every file: one case a line."""
    for name in NAMES:
        lines = json.dumps(build(name)).replace(", {", ",\n{").replace("[{", "[\n{")
        (HERE / f"{name}.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
