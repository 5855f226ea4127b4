"""Triton kernels without a GPU: under Triton's interpreter they write what the CPU's set writes;
compiled for NVIDIA's processors, they round every operation as C does.

``make test-triton`` runs this, as CI does; ``make test-triton-long`` runs all of
`test_kernel_sets.py` on them under the interpreter, and ``make test-cuda`` on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _averaging import Run
from _codes import (
    BLOCKS,
    ENTROPY,
    KEY,
    NEAREST,
    ONEBIT,
    TERNARY,
    VALUES,
    decode,
    encode,
    lanes,
    random_payload,
    table_of,
    tensor_of,
)
from _far import FAR, at_place, sparse
from _ranks import run_local
from _saved import bits_of
from _tables import ARRAY_DTYPES, KINDS, Piece, guarded, same_bytes, values
from reference import codec as ref

from gradcomp import EntropyCoded, Ternary, kernels
from gradcomp.bench import codec as codec_bench
from gradcomp.codecs import KINDS as CODECS
from gradcomp.kernels import check
from gradcomp.kernels.cuda import kernels as cuda_kernels

NATIVE = kernels.of(kernels.CPU)
ENCODED = [TERNARY, *NEAREST[:2], ONEBIT, *BLOCKS, *VALUES, ENTROPY[0]]
DECODED = [TERNARY, ONEBIT, *BLOCKS, *VALUES, lanes(4), lanes(300), ENTROPY[1]]
DRAWS = 3  # tables of each code, one a dtype
PRECISE = {"add", "sub", "mul", "div", "sqrt"}  # what has a rounding; all are ".rn"
CHOICES = {"setp", "selp", "min", "max", "neg", "abs", "cvt", "mov"}


@pytest.fixture(scope="module")
def interpreted():
    """Return the set, whose kernels are interpreted on tensors in host memory."""
    from gradcomp.kernels.cuda import TritonKernels, programs

    assert type(programs.canonical).__name__ == "InterpretedFunction"
    return TritonKernels(kernels.CPU)


def drawn(code, rng):
    """Return a table of a few pieces."""
    pieces = [
        Piece(8 * int(rng.integers(0, 9)), int(rng.integers(0, 700)), int(rng.integers(1, 300)), n)
        for n in range(rng.integers(1, 4))
    ]
    return table_of(code, pieces, rng)


@pytest.mark.parametrize("code", ENCODED, ids=lambda code: f"{code.name} {code.option}")
@np.errstate(all="ignore")
def test_interpreted_kernels_encode_as_c(code, interpreted):
    """Payload, flag, new and kept residuals, of every dtype and kind of values."""
    rng = np.random.default_rng(ENCODED.index(code))
    for draw in range(DRAWS):
        table, dtype = drawn(code, rng), draw % 3
        source = tensor_of(table, str(rng.choice(KINDS)), dtype, rng)
        old = values(["normal", "special", "huge"][draw % 3], table.plane_numel, ref.F32, rng)
        in_place, decay = bool(rng.integers(0, 2)), float(rng.choice([1.0, 0.25, 1e-30]))
        means = (-0.0, 3e38) if code == ONEBIT and draw % 2 else None
        scales = np.abs(values("normal", table.payload_nbytes, ref.F32, rng))
        found = []
        for kernel_set in (NATIVE, interpreted):
            payload = guarded(table.payload_nbytes)
            first, new, kept = (guarded(table.plane_numel, np.float32) for _ in range(3))
            first[: len(old)] = old
            for i in range(len(table.pieces) * (code == TERNARY)):
                table.put_scales(payload, i, scales[: len(table.pieces[i].ref.groups())])
            planes = (first, first if in_place else new, kept) if code.feeds_back else (None,) * 3
            options = {"planes": planes, "decay": decay, "means": means, "key": KEY}
            seen = encode(kernel_set, code, table, source, payload, **options)
            found.append((payload, first, new, kept, np.array([bool(seen)])))
        for want, got in zip(*found, strict=True):
            same_bytes(got, want, 0)


@pytest.mark.parametrize("code", DECODED, ids=lambda code: f"{code.name} {code.option}")
@np.errstate(all="ignore")
def test_interpreted_kernels_average_as_c(code, interpreted):
    rng = np.random.default_rng(DECODED.index(code))
    for draw in range(DRAWS):
        table, count = drawn(code, rng), int(rng.choice([1, 2, 5]))
        payloads = [random_payload(code, table, rng) for _ in range(count)]
        found = []
        for kernel_set in (NATIVE, interpreted):
            out = guarded(table.tensor_numel, ARRAY_DTYPES[draw % 3])
            seen = decode(kernel_set, code, table, payloads, out, shared=draw % 2 == 0)
            found.append((out, np.array([bool(seen)])))
        for want, got in zip(*found, strict=True):
            same_bytes(got, want, 0)


@pytest.mark.parametrize("name", check.CODES)
@np.errstate(all="ignore")
def test_offsets_have_64_bits(name, interpreted, tmp_path):
    """Of values, residuals and payloads. The interpreter adds as wide as a GPU does."""
    far, near = (at_place(interpreted, name, place, tmp_path) for place in (FAR, 0))
    assert far == near


@pytest.mark.parametrize("code", [TERNARY, NEAREST[0], ENTROPY[1]], ids=lambda code: code.name)
@np.errstate(all="ignore")
def test_payloads_on_the_device_may_begin_2_to_the_31_bytes_apart(
    code, interpreted, tmp_path, monkeypatch
):
    rng = np.random.default_rng(4)
    table, found = drawn(code, rng), []
    payloads = [random_payload(code, table, rng) for _ in range(3)]
    plan_of = interpreted._plan

    def spread(*given):
        plan = plan_of(*given)
        plan.packed = plan.packed._replace(nbytes=FAR)
        return plan

    for plan in (plan_of, spread):
        monkeypatch.setattr(interpreted, "_plan", plan)
        out = guarded(table.tensor_numel, np.float32)
        decode(interpreted, code, table, payloads, out, shared=True)
        found.append(out)
        monkeypatch.setattr(cuda_kernels, "_pinned", lambda n: sparse(tmp_path, n, torch.uint8))
    same_bytes(found[1], found[0], 0)


def averages(comm, codec):
    """Return the averages of two steps of a rank, in units of second moments."""
    mine = Run(comm, codec, {"w": (6, 20), "b": (6,)}, precondition=True, timeout_s=300)
    found = mine.steps(2)
    mine.averager.close()
    return bits_of(found)


@pytest.mark.parametrize(
    "codec", [Ternary(), EntropyCoded(1.25)], ids=lambda codec: type(codec).__name__
)
@np.errstate(all="ignore")
def test_interpreted_kernels_train_as_c(codec, interpreted):
    """Nothing above a kernel set knows which one it is."""
    want = run_local(2, averages, codec)
    before = kernels.install("cpu", lambda _: interpreted)
    try:
        got = run_local(2, averages, codec)
    finally:
        kernels.install("cpu", before)
    assert got == want


@np.errstate(all="ignore")
def test_the_benchmark_compares_results_before_it_times(interpreted, monkeypatch):
    monkeypatch.setattr(codec_bench, "measure", lambda *_: {"ratio": 1.0})
    args = argparse.Namespace(sizes=[130], dtypes=["float32", "bfloat16"], repeat=1)
    rows = codec_bench.run_on_device(args, interpreted, kernels.CPU)
    assert len(rows) == 2 * 2 * len(CODECS)
    monkeypatch.setattr(interpreted, "sum_decode", lambda *_: False)
    with pytest.raises(SystemExit, match="decode 1 on cpu differs from the CPU's"):
        codec_bench.run_on_device(args, interpreted, kernels.CPU)


@np.errstate(all="ignore")
def test_the_self_check_passes(interpreted, monkeypatch, caplog):
    monkeypatch.setattr(check, "CODES", {"bf16": check.CODES["bf16"]})
    monkeypatch.setattr(check, "LARGE", 3_000)
    assert check.checked(kernels.CPU, lambda device: interpreted) is interpreted
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


@functools.cache
def compiled(*target: str) -> list[dict[str, object]]:
    """Return what `_compile.py` finds."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("_compile.py")
    command = [sys.executable, str(script), *target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "architecture",
    ["90", *(pytest.param(other, marks=pytest.mark.long) for other in ("80", "100"))],
)
def test_compiled_kernels_round_every_operation(architecture):
    """No fused multiply-add, no approximate division or root, no flushed denormals; registers are
    enough.
    """
    found = compiled("cuda", architecture, "32")
    assert len(found) >= 28
    for kernel in found:
        for opcode in kernel["opcodes"]:
            name, *rest = opcode.split(".")
            assert name in PRECISE | CHOICES, (kernel["name"], opcode)
            assert "rn" in rest or name in CHOICES, (kernel["name"], opcode)
            assert not {"ftz", "approx", "full"} & set(rest), (kernel["name"], opcode)
        assert kernel["local"] == 0 and kernel["stack"] <= 16, kernel
    opcodes = {kernel["name"]: set(kernel["opcodes"]) for kernel in found}
    assert {"div.rn.f32", "sqrt.rn.f32"} <= opcodes["divide"]
    assert {"div.rn.f64", "sqrt.rn.f64"} <= opcodes["scales"] & opcodes["streams"]
    assert "div.rn.f32" in opcodes["8 bits"] & opcodes["TernGrad"] & opcodes["average of sums"]


@pytest.mark.long
def test_kernels_compile_for_amd():
    """gfx942: compiled, never run."""
    assert len(compiled("hip", "gfx942", "64")) >= 28
