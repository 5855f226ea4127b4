"""Compile the Triton kernels for a processor that need not be there, and print what is in them.

Usage: python _compile.py cuda 90 32 (or hip gfx942 64)
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradcomp.kernels.cuda import elementwise, kernels, launch, programs, records, streams, updates
from gradcomp.kernels.cuda.plan import CHUNK
from gradcomp.kernels.rules import Kind

F, D, H, I, L, B = "*fp32", "*fp64", "*i16", "*i32", "*i64", "*u8"


def typed(kind, names):
    return dict.fromkeys(names.split(), kind)


TABLE = typed(L, "chunks segments") | {"codes": B, "flag": I, "E": CHUNK}
ROUNDED = typed(F, "values old new") | {"decay": "fp32", "KEEPS": False, "COUNTS": False}
ROUNDED |= {"HAS_OLD": True, "HAS_NEW": True, "FROM": 0}
ENCODE = {**TABLE, **ROUNDED, "scales": F, "zero": "fp32"}
SUMS = {"sums": D, "counts": I, "count": "i32"}
BLOCKS = {**SUMS, "blocks": L, "B": kernels.BLOCKS}
SCALES = {**SUMS, "numels": L, "step": D, "scales": F, "flag": I, "B": kernels.SPANS}
SCALES |= typed("fp32", "zero most mean0 mean1") | {"HAS_MEANS": False, "OF_SQUARES": False}
PAYLOADS = {"payloads": B, "read": H} | typed("i32", "stride total count")
DECODE = {**TABLE, **PAYLOADS, "out": F, "OUT": 0}
DECODE |= typed("i32", "scales codes") | typed("fp32", "factor zero")
STREAMS = ROUNDED | SUMS | typed(I, "costs pair_costs symbols tops words flag")
WEIGHTS = {"weights": I, "top": H, "trail": H, "nearest": "i32", "count": "i32", "E": launch.NUMEL}
UPDATE = {"ranges": L, "records": B, "E": records.NUMEL, "count": "i32", "sums": D}
UPDATE |= {"B": records.ROWS, "STEPS": records.STEPS}
EACH = {"values": F, "count": "i32", "flag": I, "E": launch.NUMEL}

SIGNS, LEVELS, NEAREST = programs.SIGNS, programs.LEVELS, programs.NEAREST
# kernel, and its arguments, those that it shares with others first: pointers and numbers by their
# types, others by their values
KERNELS = {
    "sums of blocks": (
        programs.add_blocks,
        BLOCKS,
        {"values": F, "old": F, "FROM": 0, "KIND": programs.CLASSES, "HAS_OLD": True},
    ),
    "moments of blocks": (
        programs.add_blocks,
        BLOCKS,
        {"values": H, "FROM": 2, "KIND": programs.MOMENTS, "HAS_OLD": False},
    ),
    "sums of groups": (
        programs.add_in_order,
        SUMS,
        typed("i32", "parts most")
        | {"spans": L, "into_sums": D, "into_counts": I}
        | {"B": kernels.SPANS},
    ),
    "scales": (programs.measure_scales, SCALES, {"KIND": NEAREST, "OF_SQUARES": True}),
    "scales of levels": (programs.measure_scales, SCALES, {"KIND": LEVELS}),
    "means": (programs.measure_scales, SCALES, {"KIND": SIGNS}),
    "ternary": (programs.encode_codes, ENCODE, {"KIND": NEAREST, "BITS": 2, "PADDING": 1}),
    "1 bit": (programs.encode_codes, ENCODE, {"KIND": SIGNS, "BITS": 1, "PADDING": 0}),
    "1 bit, bf16": (
        programs.encode_codes,
        ENCODE | {"KIND": SIGNS, "BITS": 1, "PADDING": 0},
        {"values": H, "kept": F, "dropped": D, "KEEPS": True, "COUNTS": True, "FROM": 1},
    ),
    "8 bits": (programs.encode_codes, ENCODE, {"KIND": LEVELS, "BITS": 8, "PADDING": 0}),
    "TernGrad": (programs.draw_codes, TABLE, typed(F, "values scales") | {"words": L, "FROM": 0}),
    "values": (programs.encode_values, TABLE, {"values": F, "FROM": 0, "WIDE": False}),
    "fp32 values": (programs.encode_values, TABLE, {"values": H, "FROM": 2, "WIDE": True}),
    "average of fp32": (programs.decode_average, DECODE, {"KIND": programs.PLAIN, "BITS": 32}),
    "average of bf16": (
        programs.decode_average,
        DECODE,
        {"out": H, "OUT": 1, "KIND": programs.PLAIN, "BITS": 16},
    ),
    "average of 1 bit": (
        programs.decode_average,
        DECODE,
        {"out": H, "OUT": 2, "KIND": SIGNS, "BITS": 1},
    ),
    "average of 8 bits": (programs.decode_average, DECODE, {"KIND": LEVELS, "BITS": 8}),
    "average of TernGrad": (programs.decode_average, DECODE, {"KIND": programs.SHARED, "BITS": 2}),
    "average of ternary": (programs.decode_average, DECODE, {"KIND": programs.TERNARY, "BITS": 2}),
    "average of sums": (programs.decode_average, DECODE, {"KIND": programs.LANE_SUMS, "BITS": 4}),
    "average of streams": (programs.decode_average, DECODE, {"KIND": programs.ENTROPY, "BITS": 0}),
    "streams": (streams.encode_streams, STREAMS, {"octave": D, "streams": L, "scales": F}),
    "codes of streams": (
        streams.read_streams,
        PAYLOADS,
        {"streams": L, "payload_count": "i32", "decode": I, "B": kernels.CHAINS},
    ),
    "divide": (
        elementwise.divide_values,
        EACH,
        typed(F, "residual moments units out") | {"floor": "fp32", "HAS_RESIDUAL": True},
    ),
    "factor": (elementwise.scale_values, EACH, {"factor": "fp32"}),
    "find special": (elementwise.find_special, EACH, {"values": I}),
    "multiply": (elementwise.multiply_values, EACH, {"units": F}),
    "follow": (
        elementwise.follow_squares,
        EACH,
        typed(F, "before after") | typed("fp32", "inverse keep gain") | {"HAS_BEFORE": True},
    ),
    "split": (updates.split_values, WEIGHTS, {}),
    "join": (updates.join_values, WEIGHTS, {}),
    **{
        kind.name: (updates.update_values, UPDATE, {"KIND": int(kind)})
        for kind in Kind
        if kind not in records.SUMS
    },
    "LAMB_NORMS": (updates.add_squares, UPDATE, {"KIND": int(Kind.LAMB_NORMS)}),
    "SQUARES": (updates.add_squares, UPDATE, {"KIND": int(Kind.SQUARES)}),
}
WARPS = {"streams": kernels.STREAM_WARPS, "codes of streams": 1, "LAMB_NORMS": 1, "SQUARES": 1}


def compiled(name, target):
    function, shared, own = KERNELS[name]
    given = shared | own
    types, constants = {}, {}
    for argument in function.arg_names:
        value = given.get(argument)
        is_type = isinstance(value, str)
        types[argument] = value if is_type else "constexpr"
        if not is_type:
            constants[argument] = getattr(value, "value", value)
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    options = launch.LAUNCH | {"num_warps": WARPS.get(name, 4)}
    return triton.compile(source, target=target, options=options)


def resources(cubin):
    """Return bytes of local memory and stack that a thread has, and its registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


def main(backend, architecture, width):
    version = int(architecture) if backend == "cuda" else architecture
    target = GPUTarget(backend, version, int(width))
    for name in KERNELS:
        asm = compiled(name, target).asm
        found = {"name": name}
        if backend == "cuda":
            # opcodes of everything that computes with floating-point numbers
            opcodes = re.findall(r"\s((?:[a-z]+\d?\.)+(?:f32|f64)\S*)\s", asm["ptx"])
            # sm_100 has instructions for two values
            fused = opcodes.count("fma.rn.f32") + 2 * opcodes.count("fma.rn.f32x2")
            accesses = re.findall(r"\s(ld|st)\.global\S*\.[bfu](\d+)\s", asm["ptx"])
            moved = Counter(way + bits for way, bits in accesses)  # "ld32": instructions
            found |= {"opcodes": sorted(set(opcodes)), "fused": fused, "moved": moved}
            found |= resources(asm["cubin"])
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
