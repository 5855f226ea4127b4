"""Compile the Triton kernels for a processor that need not be there, and print what is in them.

Usage: python _compile.py cuda 90 32 (or hip gfx942 64)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradcomp.kernels.cuda import elementwise, kernels, programs, streams
from gradcomp.kernels.cuda.plan import CHUNK

F, D, H, I, L, B = "*fp32", "*fp64", "*i16", "*i32", "*i64", "*u8"
OF_TABLE = {"chunks": L, "segments": L}
ROUNDED = {
    "values": F,
    "old": F,
    "new": F,
    "decay": "fp32",
    "KEEPS": False,
    "COUNTS": False,
    "HAS_OLD": True,
    "HAS_NEW": True,
    "FROM": 0,
}
ENCODE = {**ROUNDED, **OF_TABLE, "scales": F, "codes": B, "zero": "fp32", "E": CHUNK}
SUMS = {"sums": D, "counts": I, "count": "i32"}
SCALES = {**SUMS, "numels": L, "step": D, "zero": "fp32", "most": "fp32", "mean0": "fp32"} | {
    "mean1": "fp32",
    "scales": F,
    "flag": I,
    "B": kernels.SPANS,
    "HAS_MEANS": False,
}
DECODE = {**OF_TABLE, "payloads": B, "stride": "i32", "read": H, "total": "i32"} | {
    "count": "i32",
    "scales": "i32",
    "codes": "i32",
    "out": F,
    "factor": "fp32",
    "zero": "fp32",
    "flag": I,
    "OUT": 0,
    "E": CHUNK,
}
EACH = {"values": F, "count": "i32", "flag": I, "E": kernels.NUMEL}
TABLES = {"octave": D, "costs": I, "pair_costs": I, "symbols": I, "tops": I}
# kernel, and its arguments: pointers and numbers by their types, others by their values
KERNELS = {
    "sums of blocks": (
        programs.add_blocks,
        {**SUMS, "values": F, "old": F, "blocks": L, "FROM": 0, "KIND": programs.CLASSES}
        | {"HAS_OLD": True, "B": kernels.BLOCKS},
    ),
    "sums of groups": (
        programs.add_in_order,
        {**SUMS, "parts": "i32", "spans": L, "most": "i32", "into_sums": D, "into_counts": I}
        | {"B": kernels.SPANS},
    ),
    "scales": (programs.measure_scales, {**SCALES, "KIND": programs.NEAREST, "OF_SQUARES": True}),
    "scales of levels": (
        programs.measure_scales,
        {**SCALES, "KIND": programs.LEVELS, "OF_SQUARES": False},
    ),
    "means": (programs.measure_scales, {**SCALES, "KIND": programs.SIGNS, "OF_SQUARES": False}),
    "ternary": (
        programs.encode_codes,
        {**ENCODE, "KIND": programs.NEAREST, "BITS": 2, "PADDING": 1},
    ),
    "1 bit": (programs.encode_codes, {**ENCODE, "KIND": programs.SIGNS, "BITS": 1, "PADDING": 0}),
    "8 bits": (programs.encode_codes, {**ENCODE, "KIND": programs.LEVELS, "BITS": 8, "PADDING": 0}),
    "TernGrad": (
        programs.draw_codes,
        {**OF_TABLE, "values": F, "scales": F, "codes": B, "words": L, "flag": I, "FROM": 0}
        | {"E": CHUNK},
    ),
    "values": (
        programs.encode_values,
        {**OF_TABLE, "values": F, "codes": B, "flag": I, "FROM": 0, "WIDE": False, "E": CHUNK},
    ),
    "moments of blocks": (
        programs.add_blocks,
        {**SUMS, "values": H, "blocks": L, "FROM": 2, "KIND": programs.MOMENTS}
        | {"HAS_OLD": False, "B": kernels.BLOCKS},
    ),
    "1 bit, bf16": (
        programs.encode_codes,
        {**ENCODE, "values": H, "kept": F, "dropped": D, "KEEPS": True, "COUNTS": True}
        | {"FROM": 1, "KIND": programs.SIGNS, "BITS": 1, "PADDING": 0},
    ),
    "fp32 values": (
        programs.encode_values,
        {**OF_TABLE, "values": H, "codes": B, "flag": I, "FROM": 2, "WIDE": True, "E": CHUNK},
    ),
    "average of fp32": (programs.decode_average, {**DECODE, "KIND": programs.PLAIN, "BITS": 32}),
    "average of bf16": (
        programs.decode_average,
        {**DECODE, "out": H, "OUT": 1, "KIND": programs.PLAIN, "BITS": 16},
    ),
    "average of 1 bit": (
        programs.decode_average,
        {**DECODE, "out": H, "OUT": 2, "KIND": programs.SIGNS, "BITS": 1},
    ),
    "average of 8 bits": (programs.decode_average, {**DECODE, "KIND": programs.LEVELS, "BITS": 8}),
    "average of TernGrad": (
        programs.decode_average,
        {**DECODE, "KIND": programs.SHARED, "BITS": 2},
    ),
    "average of ternary": (
        programs.decode_average,
        {**DECODE, "KIND": programs.TERNARY, "BITS": 2},
    ),
    "average of sums": (programs.decode_average, {**DECODE, "KIND": programs.LANE_SUMS, "BITS": 4}),
    "average of streams": (
        programs.decode_average,
        {**DECODE, "KIND": programs.ENTROPY, "BITS": 0},
    ),
    "streams": (
        streams.encode_streams,
        {**ROUNDED, **SUMS, **TABLES, "streams": L, "scales": F, "words": I, "flag": I},
    ),
    "codes of streams": (
        streams.read_streams,
        {"payloads": B, "stride": "i32", "streams": L, "count": "i32", "payload_count": "i32"}
        | {"read": H, "total": "i32", "decode": I, "B": kernels.CHAINS},
    ),
    "divide": (
        elementwise.divide_values,
        {**EACH, "residual": F, "moments": F, "floor": "fp32", "units": F, "out": F}
        | {"HAS_RESIDUAL": True},
    ),
    "factor": (elementwise.scale_values, {**EACH, "factor": "fp32"}),
    "find special": (elementwise.find_special, {**EACH, "values": I}),
    "multiply": (elementwise.multiply_values, {**EACH, "units": F}),
    "follow": (
        elementwise.follow_squares,
        {**EACH, "inverse": "fp32", "before": F, "keep": "fp32", "gain": "fp32", "after": F}
        | {"HAS_BEFORE": True},
    ),
}


def compiled(name, target):
    function, given = KERNELS[name]
    types, constants = {}, {}
    for argument in function.arg_names:
        value = given.get(argument)
        is_type = isinstance(value, str)
        types[argument] = value if is_type else "constexpr"
        if not is_type:
            constants[argument] = getattr(value, "value", value)
    source = ASTSource(fn=function, signature=types, constexprs=constants)
    warps = {"streams": kernels.STREAM_WARPS, "codes of streams": 1}.get(name, 4)
    options = kernels.LAUNCH | {"num_warps": warps}
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
            found |= {"opcodes": sorted(set(opcodes)), **resources(asm["cubin"])}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
