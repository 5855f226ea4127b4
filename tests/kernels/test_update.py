"""Updates, splits and joins of every kernel set, and in torch operations, against the NumPy
reference, bit for bit; SGD against torch as well. What C refuses is in
`tests/native/test_update.c`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pytest
import torch
from _codes import COMPILED, SETS, Row, on, running
from _tables import ARRAY_DTYPES, GUARD, TIERS, guarded, same_bytes, values
from reference import codec as ref
from reference import optim

from gradcomp import Block, EntropyCoded, Identity, OneBit, TernGrad
from gradcomp.errors import NativeError
from gradcomp.kernels import CPU, Code, Payloads, native, of
from gradcomp.kernels import weights as torch_weights
from gradcomp.kernels.rules import NO_RULE, RULE, TARGET, Flag, Kind
from gradcomp.kernels.tables import CHUNK_NUMEL, SEGMENT, Table
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces
from gradcomp.payload.rng import RngKey

KERNELS = of(CPU)
LENGTHS = [1, 2, 7, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257, 5000]
BETAS, EPS, LR = (0.9, 0.95), 1e-8, 0.013
STORED = ["fp32", optim.TRUNCATE, optim.NEAREST]


class InTorch(torch_weights.TorchWeights):
    """What weights of an accelerator are updated by, on the CPU."""

    def empty(self, numel, dtype):
        return torch.empty(numel, dtype=dtype)


@pytest.fixture(params=[*SETS, Row("torch", InTorch(CPU), TIERS[-1])], ids=str)
def any_row(request):
    """Return the row of the kernel set, or of torch operations, that the test runs on."""
    with running(request.param):
        yield request.param


def rule(kind, rounding, **numbers):
    """One row of gc_rule."""
    row = np.zeros(1, RULE)
    row["kind"], row["rounding"] = kind, rounding == optim.NEAREST
    for name, value in numbers.items():
        row[name] = value
    return row


def adam_rule(kind, rounding, step, betas, weight_decay, **numbers):
    root = (1 - betas[1] ** step) ** 0.5
    adamw = kind == Kind.ADAMW
    return rule(
        kind,
        rounding,
        keep=1 - betas[0],
        keep2=1 - betas[1],
        beta2=betas[1],
        bias1=root / (1 - betas[0] ** step),
        bias2=root,
        eps=EPS if adamw else EPS * root,
        decay=1 - LR * weight_decay,
        weight_decay=weight_decay,
        **numbers,
    )


def segments(numel, cuts=()):
    """Rows over one parameter of `numel` elements, cut at the given multiples of 8."""
    bounds = [0, *[c for c in cuts if c < numel], numel]
    rows = [(0, 0, 0, 0, 0, a, b - a, max(1, numel), 0) for a, b in itertools.pairwise(bounds)]
    return Table(rows)


class Weights:
    """A weight vector in memory as an update sees it, its state, and guards around all of it."""

    def __init__(self, w, stored, misalign, states=2):
        self.stored, n = stored, len(w)
        self.arrays = []

        def place(content, dtype):
            memory = guarded(n, dtype, misalign)
            memory[:n] = content
            self.arrays.append((memory, n))
            return memory

        if stored == "fp32":
            self.weight, self.trail = place(w, np.float32), None
        else:
            top, trail = optim.split(w, stored)
            self.weight, self.trail = place(top, np.uint16), place(trail, np.uint16)
        self.state = [place(np.zeros(n), np.float32) for _ in range(states)]

    @contextmanager
    def targets(self, kernels, g, position=0):
        """Yield the targets of an update, of which these weights are the one at `position`."""
        names = "weight", "trail", "gradient", "state0", "state1"
        arrays = self.weight, self.trail, g, *self.state
        with on(kernels, *arrays) as tensors:
            given = dict(zip(names, tensors, strict=False))
            found = kernels.targets(**{name: [None] * position + [t] for name, t in given.items()})
            found["rule"] = 0
            yield found

    def read(self, n):
        if self.stored == "fp32":
            return self.weight[:n].copy()
        return optim.join(self.weight[:n].copy(), self.trail[:n].copy(), self.stored)

    def check_guards(self):
        for memory, n in self.arrays:
            assert (memory[n:].view(np.uint8) == GUARD).all(), "written past the end"


def step(weights, g, row, table, norms=None, kernels=KERNELS, **more):
    """Update weights by a kernel set; `more` as of `Kernels.update`. Returns what that does."""
    with weights.targets(kernels, g) as targets:
        return kernels.update(table, targets, row, norms=norms, **more)


def data(n, dtype, seed, kind="normal"):
    rng = np.random.default_rng([n, dtype, seed])
    w = values(kind, n, ref.F32, rng)
    gradients = [values(kind, n, dtype, rng) for _ in range(4)]
    return w, gradients, rng


SGD_OPTIONS = [
    {},
    {"weight_decay": 0.01},
    {"maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    {"momentum": 0.85, "nesterov": True},
    {"momentum": 0.85, "nesterov": True, "weight_decay": 0.02, "maximize": True},
]


def sgd_rule(rounding, first, *, momentum=0.0, dampening=0.0, weight_decay=0.0, **flags):
    bits = first * Flag.FIRST
    for name, given in flags.items():
        bits |= given * Flag[name.upper()]
    numbers = {"momentum": momentum, "keep": 1 - dampening, "weight_decay": weight_decay}
    return rule(Kind.SGD, rounding, flags=bits, step_size=-LR, **numbers)


class Optimizer(NamedTuple):
    """A row of `test_steps`: what the reference and what C is given at step t, from 1."""

    name: str
    step: Callable  # (w, g, states, t) -> (w, states)
    row: Callable  # (stored, t) -> rule
    states: tuple[float, ...]  # what they begin with
    cuts: tuple[int, ...]  # segments


def sgd(options):
    def steps(w, g, states, t):
        w, buffer = optim.sgd(w, g, *states, lr=LR, first=t == 1, **options)
        return w, [buffer]

    def row(stored, t):
        return sgd_rule(stored, t == 1, **options)

    return Optimizer(f"sgd {options}", steps, row, (0.0,), (8, 24, 64, 104))


def adagrad(weight_decay):
    options = {"weight_decay": weight_decay, "eps": 1e-3}

    def steps(w, g, states, t):
        w, total = optim.adagrad(w, g, *states, t, lr=LR, lr_decay=0.05, **options)
        return w, [total]

    def row(stored, t):
        return rule(Kind.ADAGRAD, stored, step_size=-LR / (1 + (t - 1) * 0.05), **options)

    return Optimizer(f"adagrad {weight_decay}", steps, row, (0.5,), (16, 40))


def adamw(weight_decay, betas):
    def steps(w, g, states, t):
        options = {"lr": LR, "betas": betas, "weight_decay": weight_decay, "eps": EPS}
        w, *states = optim.adamw(w, g, *states, t, **options)
        return w, states

    def row(stored, t):
        size = -LR / (1 - betas[0] ** t)
        return adam_rule(Kind.ADAMW, stored, t, betas, weight_decay, step_size=size)

    return Optimizer(f"adamw {weight_decay} {betas}", steps, row, (0.0, 0.0), (8, 240))


def prescaled(one):
    """The same, of gradients times 0.7."""

    def steps(w, g, states, t):
        with np.errstate(all="ignore"):
            return one.step(w, g * np.float32(0.7), states, t)

    def row(stored, t):
        made = one.row(stored, t)
        made["flags"] |= np.uint32(Flag.PRESCALE)
        made["prescale"] = 0.7
        return made

    return one._replace(name=f"{one.name}, prescaled", step=steps, row=row)


OPTIMIZERS = [
    *map(sgd, SGD_OPTIONS),
    *map(adagrad, (0.0, 0.1)),
    *itertools.starmap(adamw, itertools.product((0.0, 0.1), (BETAS, (0.3, 0.6)))),
    *map(prescaled, [*map(sgd, SGD_OPTIONS[::3]), adagrad(0.1), adamw(0.1, BETAS)]),
]


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [ref.F32, ref.BF16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)
def test_steps(any_row, stored, dtype, optimizer):
    kinds, first = ("normal", "tiny", "special"), OPTIMIZERS.index(optimizer) + STORED.index(stored)
    cases = [(n, kinds[(first + k) % 3]) for k, n in enumerate(LENGTHS)]  # other ones in other rows
    for n, kind in cases[:: any_row.part]:
        w, gradients, rng = data(n, dtype, len(optimizer.states), kind)
        states = [np.full(n, value, np.float32) for value in optimizer.states]
        weights = Weights(w, stored, int(rng.integers(0, 8)))
        for memory, state in zip(weights.state, states, strict=False):
            memory[:n] = state
        for t, g in enumerate(gradients, 1):
            given, table = g.copy(), segments(n, optimizer.cuts)
            w, states = optimizer.step(w, ref.to_float32(g), states, t)
            step(weights, given, optimizer.row(stored, t), table, kernels=any_row.kernels)
            same_bytes(weights.read(n), w, any_row.tier)
            for memory, state in zip(weights.state, states, strict=False):
                same_bytes(memory[:n], state, any_row.tier)
            assert given.tobytes() == g.tobytes(), "the gradient was written to"
        weights.check_guards()


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_equals_torch(options):
    assert torch.backends.cpu.get_cpu_capability().startswith("AVX")  # whose SGD rounds as ours
    for n in (*range(1, 40), *LENGTHS[7:-1]):
        w, gradients, _ = data(n, ref.BF16, 1)
        p = torch.nn.Parameter(torch.from_numpy(w.copy()))
        optimizer = torch.optim.SGD([p], lr=LR, foreach=False, **options)
        weights = Weights(w, optim.TRUNCATE, n % 8)
        for t, g in enumerate(gradients):
            p.grad = torch.from_numpy(ref.to_float32(g))
            optimizer.step()
            step(weights, g, sgd_rule(optim.TRUNCATE, t == 0, **options), segments(n))
            assert weights.read(n).tobytes() == p.detach().numpy().tobytes(), (n, t)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", [ref.F32, ref.BF16])
@pytest.mark.parametrize("fused", [True, False])
def test_lamb(any_row, stored, dtype, fused):
    """`fused`: moments and norms in one pass, or moments from segments of any cut and norms in a
    pass of their own.
    """
    cases = list(itertools.product([*LENGTHS, 70000], [0.1, 0.0]))
    for n, weight_decay in cases[:: any_row.part]:
        w, gradients, rng = data(n, dtype, 4)
        m, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        whole = segments(n, (1 << 16,))
        weights = Weights(w, stored, int(rng.integers(0, 8)))
        for t, g in enumerate(gradients[: 2 if n > 10000 else 4], 1):
            options = {"lr": LR, "betas": BETAS, "weight_decay": weight_decay, "eps": EPS}
            w, m, v = optim.lamb(w, ref.to_float32(g), m, v, t, prescale=0.7, **options)
            scaled = {"prescale": 0.7, "flags": Flag.PRESCALE}
            made = adam_rule(Kind.LAMB_START, stored, t, BETAS, weight_decay, **scaled)
            norms = np.full(2 * len(whole), np.nan)
            if not fused:
                made["kind"] = Kind.MOMENTS
                step(weights, g, made, segments(n, (8, 16, 120)), kernels=any_row.kernels)
                made["kind"] = Kind.LAMB_NORMS
            step(weights, g, made, whole, norms, any_row.kernels)
            above, under = (float(np.sqrt(sum(norms[k::2], 0.0))) for k in (0, 1))
            made["kind"] = Kind.LAMB_APPLY
            made["step_size"] = -LR * (above / under if above > 0 and under > 0 else 1.0)
            step(weights, None, made, segments(n, (24,)), kernels=any_row.kernels)
            same_bytes(weights.read(n), w, any_row.tier)
            same_bytes(weights.state[0][:n], m, any_row.tier)
            same_bytes(weights.state[1][:n], v, any_row.tier)
        weights.check_guards()


def test_squares(any_row):
    cases = list(itertools.product([*LENGTHS, 70000], [ref.F32, ref.BF16]))
    for n, dtype in cases[:: any_row.part]:
        _, gradients, _ = data(n, dtype, 5)
        table, norms = segments(n, (1 << 16,)), np.zeros(2 * -(-n // (1 << 16)))
        weights = Weights(np.zeros(n, "f"), "fp32", 0)
        step(weights, gradients[0], rule(Kind.SQUARES, ""), table, norms, any_row.kernels)
        assert float(np.sqrt(sum(norms[::2], 0.0))) == optim.norm(ref.to_float32(gradients[0]))
        assert not norms[1::2].any()


def test_fma_in_torch_rounds_once():
    """Sums nearer to the middle of two float32 numbers than float64 can tell, and any numbers."""
    odd, near = 1 + 2.0**-23, 2.0**-24 * (1 - 2.0**-23)  # odd * near = 2^-24 * (1 - 2^-46)
    for scale, sign, c in itertools.product((2.0**-100, 1.0, 2.0**100), (1, -1), (odd, -odd)):
        found = torch_weights.fma(
            *(torch.tensor([x]) for x in (odd, sign * near * scale, c * scale))
        )
        assert found.item() == c * scale
    drawn = np.random.default_rng(0).integers(0, 1 << 32, (3, 100_000), np.uint32).view("f")
    found = torch_weights.quiet(torch_weights.fma(*map(torch.from_numpy, drawn)))
    assert found.numpy().tobytes() == optim.quiet(optim.fma(*drawn)).tobytes()


@pytest.mark.parametrize("is_in_order", [True, False])
def test_sums_in_torch_have_the_order_of_c(is_in_order, monkeypatch):
    """On a device whose cumsum adds in another order, it is not used."""
    assert torch_weights._cumsum_is_in_order(CPU)
    monkeypatch.setattr(torch_weights, "_cumsum_is_in_order", lambda _: is_in_order)
    if not is_in_order:
        monkeypatch.setattr(torch.Tensor, "cumsum", None, raising=False)
    n = 2 * CHUNK_NUMEL + 77
    w, g = np.random.default_rng(0).standard_normal((2, n)).astype("f")
    table = Table(
        [(0, 0, 0, 0, 0, a, min(CHUNK_NUMEL, n - a), n, 0) for a in range(0, n, CHUNK_NUMEL)]
    )
    assert [span.rows for span in torch_weights.spans_of(table)] == [3]
    row, norms = adam_rule(Kind.LAMB_START, "", 1, BETAS, 0.1), np.zeros((2, 6))
    for kernels, found in zip((KERNELS, InTorch(CPU)), norms, strict=True):
        step(Weights(w, optim.NEAREST, 3), g, row, table, found, kernels)
    assert norms.all() and norms[0].tobytes() == norms[1].tobytes()


def test_rows_are_joined_where_they_go_on():
    chunk, most = CHUNK_NUMEL, torch_weights.SPAN_NUMEL // CHUNK_NUMEL
    rows = [(a * chunk, chunk, 0) for a in range(most + 1)]  # as many as one operation takes, and 1
    rows += [(0, 0, 1), (0, 100, 2), (100, 100, 2), (200, 5, 2), (300, 16, 2), (316, 16, 2)]
    rows += [(332, 32, 2), (0, 64, 3), (64, 64, 3), (128, 3, 3), (131, 3, 3)]
    table = Table([(0, 0, 0, 0, 0, a, n, max(n, 1), p) for a, n, p in rows])
    spans = [tuple(span)[:5] for span in torch_weights.spans_of(table)]
    first = most + 2
    assert spans == [
        (0, 0, most * chunk, 0, most),
        (0, most * chunk, chunk, most, 1),
        *[(2, a, n, first + k, 1) for k, (a, n) in enumerate([(0, 100), (100, 100), (200, 5)])],
        (2, 300, 32, first + 3, 2),
        (2, 332, 32, first + 5, 1),
        (3, 0, 131, first + 6, 3),
        (3, 131, 3, first + 9, 1),
    ]


@pytest.mark.parametrize(
    ("codec", "group", "decoded_numel"),  # elements that are decoded at a time
    [(TernGrad(scale="own"), 9_600, 2048), (EntropyCoded(2.2), 4096, 4096)],
    ids=["terngrad", "entropy"],
)
def test_squares_of_payloads_are_those_of_their_average(codec, group, decoded_numel, row):
    n = 70_003 if row in COMPILED else 9_003
    layout = layout_of(codec, Slot(0, n, group, True, 0))
    generator = torch.Generator().manual_seed(0)
    codec = codec.of_groups(group)
    payloads = [
        codec.encode(torch.randn(n, generator=generator), key=RngKey(rank=rank))
        for rank in range(3)
    ]
    decoded, wanted = np.empty(n, np.float32), []
    norms = np.full(2 * len(layout.packed), np.nan)
    with on(row.kernels, decoded) as (out,):
        codec.decode_body(row.kernels, payloads, layout, out)
    source = Payloads(payloads, codec.code, torch.float32)
    row.kernels.update(
        layout.packed, np.zeros(1, TARGET), rule(Kind.SQUARES, ""), source, norms=norms
    )
    for start, numel in layout.packed.rows[["start", "numel"]].tolist():
        values = decoded[start : start + numel]
        parts = [values[i : i + decoded_numel] for i in range(0, numel, decoded_numel)]
        sums = [[optim.squares(part[i : i + 2048]) for i in range(0, len(part), 2048)]
                for part in parts]  # fmt: skip
        wanted.append(sum((sum(one, 0.0) for one in sums), 0.0))
    assert norms[::2].tolist() == wanted
    assert len(wanted) > 1 or row not in COMPILED
    assert not norms[1::2].any()


@pytest.mark.parametrize("kind", [k for k in Kind if k != Kind.SQUARES])
def test_no_number_depends_on_threads(kind, monkeypatch):
    monkeypatch.setattr(native.threads, "THREAD_NUMEL", 1 << 16)
    n, found = 300_000, []
    w, g = np.random.default_rng(0).standard_normal((2, n)).astype("f")
    table = segments(n, range(1 << 16, n, 1 << 16))
    sizes = {"step_size": -LR, "momentum": 0.9 * (kind == Kind.SGD)}
    row = adam_rule(kind, optim.NEAREST, 1, BETAS, 0.1, **sizes)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weights, norms = Weights(w, optim.NEAREST, 1), np.zeros(2 * len(table))
            for state in weights.state:
                state[:n] = np.abs(w)
            step(weights, ref.from_float32(g, ref.BF16), row, table, norms)
            arrays = weights.read(n), norms, *weights.state
            found.append([array.tobytes() for array in arrays])
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


# ---- straight from payloads ----------------------------------------------------------------------


# packed gradients of one parameter: codec, payloads
PAYLOADS = {
    "terngrad own": (TernGrad(scale="own", group="tensor"), 3),
    "terngrad row": (TernGrad(scale="own", group="row"), 2),
    "onebit": (OneBit(group="row"), 4),
    "block 2": (Block(2), 3),
    "block 4": (Block(4, group=100), 2),
    "entropy": (EntropyCoded(2.2), 3),
    "entropy, one": (EntropyCoded(1), 1),
    "values": (Identity(), 2),
    "bf16": (Identity("bf16"), 2),
}


def layout_of(codec, slot):
    """Return the layout of one whole parameter."""
    options = {"segmented": False, "whole_groups": codec.whole_groups}
    return PayloadLayout(codec.form, whole_pieces([slot]), **options)


@pytest.mark.parametrize("dtype", [ref.F32, ref.BF16])
@pytest.mark.parametrize("name", PAYLOADS)
def test_updates_from_payloads_equal_decode_then_update(row, dtype, name):
    codec, count = PAYLOADS[name]
    for shape in [(1,), (5, 3), (40, 129), (3, 7000)][: 4 if row in COMPILED else 2]:
        n = int(np.prod(shape))
        generator = torch.Generator().manual_seed(n)
        layout = layout_of(codec, Slot(1, n, codec.group_numel(shape), True, 0))
        payloads = [codec.encode(torch.randn(shape, generator=generator)) for _ in range(count)]
        w = torch.randn(n, generator=generator).numpy()
        for kind in (Kind.SGD, Kind.ADAMW, Kind.MOMENTS):
            sizes = {"step_size": -LR, "momentum": 0.9 * (kind == Kind.SGD)}
            made = adam_rule(kind, optim.TRUNCATE, 1, BETAS, 0.1, **sizes)
            unfused, fused = Weights(w, optim.TRUNCATE, 0), Weights(w, optim.TRUNCATE, 0)
            g = np.empty(n, ARRAY_DTYPES[dtype])
            with on(row.kernels, g) as (decoded,):
                codec.decode_body(row.kernels, payloads, layout, decoded)
            step(unfused, g, made, segments(n), kernels=row.kernels)
            source = Payloads(payloads, codec.code, decoded.dtype)
            with fused.targets(row.kernels, None, position=1) as targets:
                bad = row.kernels.update(layout.packed, targets, made, source)
            assert not bad
            same_bytes(fused.read(n), unfused.read(n), row.tier)
            same_bytes(fused.state[0][:n], unfused.state[0][:n], row.tier)
            assert (fused.read(n) != w).any() or kind == Kind.MOMENTS


def test_averages_that_are_not_finite_are_told(row):
    x = torch.full((10,), 3.4e38)
    layout = layout_of(Identity(), Slot(0, 10, 10, True, 0))
    payload = Identity().encode(x)
    weights = Weights(np.zeros(10, "f"), optim.TRUNCATE, 0)
    for dtype, bad in ((torch.float32, False), (torch.bfloat16, True)):  # rounds to Inf as bf16
        source = Payloads([payload], Code("values", dtype=torch.float32), dtype)
        made = rule(Kind.SGD, "", step_size=0.0)
        told = step(weights, None, made, layout.packed, kernels=row.kernels, payloads=source)
        assert told is bad


# ---- what is passed over -------------------------------------------------------------------------


def test_parameters_without_a_rule_are_passed_over():
    w = np.ones(20, np.float32)
    one, two = Weights(w, "fp32", 0), Weights(w, "fp32", 0)
    rows = [(0, 0, 0, 0, 0, 0, 20, 20, k) for k in (0, 1)]
    with one.targets(KERNELS, w) as first, two.targets(KERNELS, w) as second:
        targets = np.concatenate([first, second])
        targets["rule"][0] = NO_RULE
        KERNELS.update(Table(rows), targets, rule(Kind.SGD, "", step_size=-1.0))
    assert (one.read(20) == 1).all()
    assert (two.read(20) == 0).all()


def test_an_update_refuses_and_does_nothing_as_c_does():
    with pytest.raises(NativeError, match="GC_INVALID_ARGUMENT"):
        KERNELS.update(segments(20), np.zeros(1, TARGET), np.zeros(1, RULE))
    KERNELS.update(Table([]), np.zeros(0, TARGET), np.zeros(0, RULE))
    KERNELS.update(segments(0), np.zeros(1, TARGET), np.zeros(0, RULE))
    assert SEGMENT.itemsize == 56
    assert (RULE.itemsize, TARGET.itemsize) == (56, 48)


def test_kinds_and_flags_are_those_of_the_header():
    for enum in (Kind, Flag):
        for member in enum:
            assert getattr(native.lib, f"GC_{member.name}") == member


# ---- storage -------------------------------------------------------------------------------------


def round_trip(bits, rounding, kernels):
    n = len(bits)
    top, trail, back = np.empty(n, np.uint16), np.empty(n, np.uint16), np.empty(n, np.uint32)
    nearest = rounding == optim.NEAREST
    with on(kernels, bits, top, trail) as (given, high, low):
        kernels.split(given, high, low, nearest=nearest)
    with on(kernels, top, trail, back) as (high, low, joined):
        kernels.join(high, low, joined, nearest=nearest)
    return top, trail, back


def check_patterns(bits, kernels=KERNELS):
    w = bits.view(np.float32)
    top, trail, back = round_trip(bits, optim.TRUNCATE, kernels)
    assert (back == bits).all()
    assert (top == bits >> 16).all()
    assert (trail == (bits & 0xFFFF)).all()
    top, trail, back = round_trip(bits, optim.NEAREST, kernels)
    signalling = np.isnan(w) & ((bits & 0x00400000) == 0)
    assert (back == np.where(signalling, bits | 0x00400000, bits)).all()
    even = torch.from_numpy(w.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
    ties = (bits & 0xFFFF) == 0x8000
    assert (top == even)[~ties & ~np.isnan(w)].all()
    assert (np.abs(top.astype(np.int32) - even.astype(np.int32))[ties & ~np.isnan(w)] <= 1).all()
    assert np.isnan((top.astype(np.uint32) << 16).view(np.float32)[np.isnan(w)]).all()
    return int((top != even)[~np.isnan(w)].sum())


def test_split_and_join_lose_nothing_sample(any_row):
    rng, product = np.random.default_rng(0), itertools.product
    fields = product((0, 1), (0, 1, 127, 254, 255), range(0, 1 << 23, 4097))
    corners = [sign << 31 | exponent << 23 | mantissa for sign, exponent, mantissa in fields]
    lows = (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    edges = [high << 16 | low for high, low in product(range(0, 1 << 16, 97), lows)]
    special = np.float32(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38]
    )
    everything = [*corners, *edges, 0x7F800001, 0xFFBFFFFF, *special.view(np.uint32).tolist()]
    drawn = rng.integers(0, 1 << 32, (1 << 18) // any_row.part, np.uint32)
    check_patterns(np.concatenate([np.array(everything, np.uint32), drawn]), any_row.kernels)


@pytest.mark.long
def test_split_and_join_lose_nothing_all_patterns():
    differ = sum(
        check_patterns(np.arange(first, first + (1 << 24), dtype=np.uint64).astype(np.uint32))
        for first in range(0, 1 << 32, 1 << 24)
    )
    assert differ == 32640  # exact ties that half-to-even rounds down
