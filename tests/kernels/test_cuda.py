"""Triton kernels without a GPU: under Triton's interpreter they write what the CPU's set writes;
compiled for NVIDIA's processors, they round every operation as C does.

``make test-triton`` runs this, as CI does; ``make test-triton-long`` runs all of
`test_kernel_sets.py` on them under the interpreter, and ``make test-cuda`` on a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
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
from _ranks import each_rank, run_local
from _saved import bits_of
from _tables import ARRAY_DTYPES, KINDS, Piece, guarded, same_bytes, values
from reference import codec as ref
from torch import nn

import gradcomp.ddp
from gradcomp import EntropyCoded, OneBit, Ternary, kernels
from gradcomp.bench import codec as codec_bench
from gradcomp.codecs import KINDS as CODECS
from gradcomp.kernels import Payloads, check
from gradcomp.kernels.cuda import kernels as cuda_kernels
from gradcomp.kernels.rules import NO_RULE, RULE, Kind
from gradcomp.kernels.tables import TORCH_DTYPES, Table
from gradcomp.optim import SplitAdamW, split_parameters
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

NATIVE = kernels.of(kernels.CPU)
ENCODED = [TERNARY, *NEAREST[:2], ONEBIT, *BLOCKS, *VALUES, ENTROPY[0]]
DECODED = [TERNARY, ONEBIT, *BLOCKS, *VALUES, lanes(4), lanes(300), ENTROPY[1]]
DRAWS = 3  # tables of each code, one a dtype
PRECISE = {"add", "sub", "mul", "div", "sqrt"}  # what has a rounding; all are ".rn"
# what an update does to one value: fused multiply-adds; loads and stores of 32 and of 16 bits. A
# weight is loaded as fp32 or as two halves, a gradient as fp32 or as a half.
UPDATES = {
    "SGD": (4, {"ld32": 3, "ld16": 3, "st32": 2, "st16": 2}),
    "ADAGRAD": (2, {"ld32": 3, "ld16": 3, "st32": 2, "st16": 2}),
    "ADAMW": (2, {"ld32": 4, "ld16": 3, "st32": 3, "st16": 2}),
    "MOMENTS": (2, {"ld32": 3, "ld16": 1, "st32": 2}),
    "LAMB_APPLY": (2, {"ld32": 3, "ld16": 2, "st32": 1, "st16": 2}),
    "LAMB_NORMS": (1, {"ld32": 3, "ld16": 2}),
    "SQUARES": (0, {"ld32": 1, "ld16": 1}),
    "split": (0, {"ld32": 1, "st16": 2}),
    "join": (0, {"ld16": 2, "st32": 1}),
}
PER_THREAD = 8  # values
SUMS = Kind.LAMB_START, Kind.LAMB_NORMS, Kind.SQUARES  # take the interpreter seconds
FIELDS = 15  # numbers of 32 bits that a program reads beside values, at most
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


@pytest.mark.parametrize(
    "name",  # the interpreter takes half a minute for streams
    [pytest.param(n, marks=pytest.mark.long) if n == "EntropyCoded" else n for n in check.CODES],
)
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
        monkeypatch.setattr(cuda_kernels, "pinned", lambda n: sparse(tmp_path, n, torch.uint8))
    same_bytes(found[1], found[0], 0)


def copies(tensors):
    return {name: None if t is None else t.clone() for name, t in tensors.items()}


SPECIAL = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-45, 3e38], np.float32)


def some_values(rng, numel, dtype=torch.float32, *, special=True):
    """Return ordinary values, and any bits and special values among them."""
    drawn = values("normal", numel, ref.F32, rng) * np.exp2(rng.integers(-12, 12, numel), dtype="f")
    if special:
        drawn[1::4] = values("bits", numel, ref.F32, rng)[1::4]
        drawn[2::7] = rng.choice(SPECIAL, len(drawn[2::7]))
    return torch.from_numpy(drawn).to(dtype)


def parameter_of(number, numel, special, rng):
    """Return the tensors of a parameter, with elements behind them that must stay as they are."""
    draw = functools.partial(some_values, rng, numel + 9, special=special)
    weight, state0, state1 = draw(), draw(), draw().abs()
    tensors = {"weight": weight, "trail": None, "state0": state0, "state1": state1}
    if number % 3:
        bits = weight.view(torch.int32)
        tensors["weight"] = (bits >> 16).to(torch.int16).view(torch.bfloat16)
        tensors["trail"] = bits.to(torch.int16)
    return tensors | {"gradient": draw(TORCH_DTYPES[number % 2])}


def rule_of(kind, number, rng):
    """Return a rule; those of neighbours have the two values that C tells apart."""
    made = np.zeros((), RULE)
    made["kind"], made["flags"], made["rounding"] = kind, rng.integers(16), number // 4
    choices = {
        "weight_decay": (0, 0.1),
        "momentum": (0, 0.9),
        "decay": (1, 0.9),
        "keep": (0.1, 0.7),
    }
    for name in RULE.names[3:]:
        made[name] = choices.get(name, (0.3, 0.7))[(number + number // 2) % 2]
    return made


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@np.errstate(all="ignore")
def test_interpreted_kernels_update_as_c(kind, interpreted):
    """Weights, trails, states and sums, of every dtype and storage: rules of one kind and, in the
    same call, of another; one parameter has no rule.
    """
    rng = np.random.default_rng(int(kind))
    lengths = [150, 1, 0, 33, 17, 140] if kind in SUMS else [1050, 1, 0, 33, 17, 300]
    special = [kind not in SUMS or k in (1, 4) for k in range(len(lengths))]  # a NaN hides a sum
    parameters = [parameter_of(k, n, special[k], rng) for k, n in enumerate(lengths)]
    rules = np.array([rule_of(kind, k, rng) for k in range(len(lengths))])
    rules[1] = rule_of(Kind((kind + 3) % len(Kind)), 1, rng)
    cuts = [sorted({0, 8 * int(rng.integers(1 + n // 8)), n}) for n in lengths]
    table = Table(
        [
            (0, 0, 0, 0, 0, a, b - a, max(1, n), k)
            for k, (n, cut) in enumerate(zip(lengths, cuts, strict=True))
            for a, b in itertools.pairwise(cut if n else [0, 0])
        ]
    )
    found = []
    for kernel_set in (NATIVE, interpreted):
        mine = [copies(tensors) for tensors in parameters]
        names = parameters[0]
        targets = kernel_set.targets(**{name: [each[name] for each in mine] for name in names})
        targets["rule"][3] = NO_RULE
        norms = np.full(2 * len(table), 0.5)
        assert not kernel_set.update(table, targets, rules, norms=norms)
        found.append(bits_of([mine, torch.from_numpy(norms)]))
    assert found[0] == found[1]
    assert found[0] != bits_of(
        [parameters, torch.full((2 * len(table),), 0.5, dtype=torch.float64)]
    )


@pytest.mark.parametrize("kind", [Kind.ADAMW, Kind.SQUARES], ids=lambda kind: kind.name)
@np.errstate(all="ignore")
def test_interpreted_kernels_update_from_payloads_as_c(kind, interpreted):
    """Sums of squares are those of runs of 2,048 elements; the flag says that one is not finite."""
    rng, numel, codec = np.random.default_rng(0), 2_100, OneBit()
    pieces = whole_pieces([Slot(1, numel, codec.group_numel((numel,)), True, 0)])
    table = PayloadLayout(codec.form, pieces, segmented=False).packed
    payloads = [codec.encode(some_values(rng, numel, special=False)) for _ in range(2)]
    rules, parameter = rule_of(kind, 1, rng)[None], parameter_of(1, numel, False, rng)
    for nan in (False, True):
        if nan:
            scales = int(table.rows["scales"][0])
            payloads[1][scales : scales + 4] = torch.tensor([torch.nan]).view(torch.uint8)
        found = []
        for kernel_set in (NATIVE, interpreted):
            mine = copies(parameter) | {"gradient": None}
            targets = kernel_set.targets(**{name: [None, each] for name, each in mine.items()})
            targets["rule"] = [NO_RULE, 0]
            norms, source = np.zeros(2 * len(table)), Payloads(payloads, codec.code, torch.bfloat16)
            seen = kernel_set.update(table, targets, rules, source, norms)
            assert seen is nan
            mine["gradient"] = torch.from_numpy(norms)
            found.append(bits_of([one for one in mine.values() if one is not None]))
        assert found[0] == found[1]


@pytest.mark.parametrize("nearest", [False, True])
def test_interpreted_kernels_split_and_join_as_c(nearest, interpreted):
    rng = np.random.default_rng(0)
    for numel in (0, 1, 1024, 2047):
        weights = some_values(rng, numel)
        found = []
        for kernel_set in (NATIVE, interpreted):
            top, trail = (
                torch.zeros(numel + 1, dtype=torch.bfloat16),
                torch.zeros(numel + 1).short(),
            )
            back = torch.zeros(numel + 1)
            kernel_set.split(weights, top[:numel], trail[:numel], nearest=nearest)
            kernel_set.join(top[:numel], trail[:numel], back[:numel], nearest=nearest)
            found.append(bits_of([top, trail, back]))
        assert found[0] == found[1]


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


def fused_steps():
    """Return weights, trails, moments and residuals after two steps of DDP, one of them clipped."""
    torch.manual_seed(0)
    model, draws = nn.Linear(12, 5), torch.Generator().manual_seed(dist.get_rank())
    optimizer = SplitAdamW(split_parameters(model), lr=0.1)
    model = nn.parallel.DistributedDataParallel(model)
    options = {"min_numel": 0, "optimizer": optimizer, "timeout_s": 300}
    with gradcomp.ddp.register(model, "onebit", **options) as state:
        assert state.describe().endswith("from payloads to weights")
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(3, 12, generator=draws).bfloat16()
            model(x).float().square().sum().backward()
            if step:
                state.clip_grad_norm_(0.1)
            optimizer.step()
        return bits_of([list(model.parameters()), optimizer.state_dict(), state.state_dict()])


@each_rank(2)
@np.errstate(all="ignore")
def test_interpreted_kernels_update_from_the_payloads_of_ddp():
    from gradcomp.kernels.cuda import TritonKernels

    found = []
    for kernel_set in (NATIVE, TritonKernels(kernels.CPU)):
        before = kernels.install("cpu", lambda _, made=kernel_set: made)
        try:
            found.append(fused_steps())
        finally:
            kernels.install("cpu", before)
    assert found[0] == found[1]


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
    monkeypatch.setattr(check, "DECODING", (Kind.ADAMW,))  # of streams and sums: above
    monkeypatch.setattr(check, "PACKED", check.PACKED[:1])
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
    """No fused multiply-add but where C has one, no approximate division or root, no flushed
    denormals; registers are enough, and updates read and write each value once.
    """
    found = compiled("cuda", architecture, "32")
    assert len(found) >= 37
    for kernel in found:
        for opcode in kernel["opcodes"]:
            name, *rest = opcode.split(".")
            fuses = opcode in ("fma.rn.f32", "fma.rn.f32x2") and kernel["fused"]
            assert name in PRECISE | CHOICES or fuses, (kernel["name"], opcode)
            assert "rn" in rest or name in CHOICES, (kernel["name"], opcode)
            assert not {"ftz", "approx", "full"} & set(rest), (kernel["name"], opcode)
        assert kernel["local"] == 0 and kernel["stack"] <= 16, kernel
        fused, moved = UPDATES.get(kernel["name"], (0, {}))
        assert kernel["fused"] == PER_THREAD * fused, kernel
        for width, count in moved.items() if kernel["name"] in UPDATES else ():
            beside = kernel["moved"][width] - PER_THREAD * count
            assert 0 <= beside <= (FIELDS if width == "ld32" else 0), kernel
    opcodes = {kernel["name"]: set(kernel["opcodes"]) for kernel in found}
    assert {"div.rn.f32", "sqrt.rn.f32"} <= opcodes["divide"]
    assert {"div.rn.f64", "sqrt.rn.f64"} <= opcodes["scales"] & opcodes["streams"]
    assert {"div.rn.f32", "sqrt.rn.f32"} <= opcodes["ADAMW"] & opcodes["LAMB_NORMS"]
    assert "div.rn.f32" in opcodes["8 bits"] & opcodes["TernGrad"] & opcodes["average of sums"]


@pytest.mark.long
def test_kernels_compile_for_amd():
    """gfx942: compiled, never run."""
    assert len(compiled("hip", "gfx942", "64")) >= 37
