"""quality(): what codes make of gradients, sampled while training, against the same worked out
by hand.
"""

import math
from dataclasses import astuple

import pytest
import torch
from _averaging import Run
from _ranks import each_rank, logged, run_local

from gradcomp import Block, EntropyCoded, OneBit, Precondition, TernGrad
from gradcomp.exchange.quality import Quality, Sample, Sums

REDUCED = 1e-9  # relative: sums in float64, in an order that the library chooses
SHAPES = {"a.weight": (20, 50), "b.weight": (30, 40), "bias": (7,)}


def gradient(name, shape, step, rank):
    generator = torch.Generator().manual_seed(97 * step + 7 * rank + len(name))
    return torch.randn(shape, generator=generator) * (1.0 if name == "a.weight" else 0.01)


def run(comm, codec=None, steps=0, **options):
    """Return averages of so many steps."""
    options = {"min_numel": 100, "quality_every": 1, "gradient": gradient, **options}
    made = Run(comm, codec or Block(2), SHAPES, **options)
    made.steps(steps)
    return made


def quality_of(*args, **options):
    return run(*args, **options).averager.quality()


def norm(x):
    return math.sqrt(math.fsum(x.double().square().tolist()))


def cosine(a, b):
    return float(torch.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0))


@pytest.mark.parametrize(
    "codec",
    [Block(2), Block(4), OneBit(), OneBit(residual_decay=0.25), EntropyCoded(2.2)],
    ids=lambda c: f"{c.name}-{c.decay:g}",
)
@each_rank(2, "local")
def test_a_codec_with_residuals(comm, codec):
    mine = run(comm, codec, 2)
    old = {name: tensor.clone() for name, tensor in mine.parts()["residual"].items()}
    mine.step(2)
    new, rows = mine.parts()["residual"], mine.averager.quality().rows
    assert list(rows) == ["a.weight", "b.weight"]  # a vector of 7 travels as it is
    for name, row in rows.items():
        g = gradient(name, SHAPES[name], 2, comm.rank).flatten()
        x = g + old[name]
        left_out = new[name] / codec.decay
        assert (row.step, row.numel) == (2, g.numel())
        assert row.error == pytest.approx(float(left_out.norm() / x.norm()), rel=1e-4)
        assert row.cosine == pytest.approx(cosine(x - left_out, g), rel=1e-4)
        assert row.residual == pytest.approx(float(new[name].norm() / g.norm()), rel=1e-4)
        if codec.name in ("onebit", "entropy"):  # which clip nothing
            assert math.isnan(row.clipped)
        elif codec.name == "block4":
            assert row.clipped == 0
        else:
            rows_of = x.view(SHAPES[name])
            limits = 2 * 0.9957 * rows_of.square().mean(1, keepdim=True).sqrt()
            share = float((rows_of.abs() > limits).float().mean())
            assert row.clipped == pytest.approx(share, abs=0.003) and 0.01 < row.clipped < 0.1


@each_rank(2, "local")
def test_a_codec_without_residuals(comm):
    for name, row in quality_of(comm, TernGrad(scale="own", seed=5), 1).rows.items():
        g = gradient(name, SHAPES[name], 0, comm.rank).flatten()
        assert row.residual == 0 and 0.3 < row.cosine < 0.8
        share = float((g.abs() > 2.5 * g.std(unbiased=False)).float().mean())
        assert row.clipped == pytest.approx(share, abs=1e-6)


@each_rank(2, "local")
def test_preconditioned_gradients_are_compared_in_their_own_units(comm):
    """The first step has units of 1, so it is as without; later ones decode to gradients,
    whatever the units are.
    """
    plain, first, later = (
        quality_of(comm.duplicate(60.0), Block(8), steps, precondition=units).rows
        for steps, units in ((1, None), (1, True), (40, Precondition()))
    )
    assert list(plain) == list(first)
    for a, b in zip(plain.values(), first.values(), strict=True):
        assert astuple(a) == pytest.approx(astuple(b), rel=REDUCED)
    for row in later.values():
        assert row.cosine > 0.999 and row.error < 0.02 and row.residual < 0.02


def test_sums_are_float64_wherever_the_values_lie():
    """float32 sums gave cosines of 0.9999850 and 0.9999862 for one gradient at two addresses."""
    memory, n = torch.empty(1_000_016), 1_000_000
    q = 1 + 0.01 * torch.randn(n, generator=torch.Generator().manual_seed(3))
    g = q + 0.005 * torch.randn(n, generator=torch.Generator().manual_seed(4))
    error = norm(g - q) / norm(g)
    exact = {"cosine": cosine(g, q), "error": error, "residual": error}
    for offset in range(16):
        placed = memory[offset : offset + n].copy_(g)
        sums = Sums()
        sums.add(placed, placed, q, torch.ones(n), g - q)
        found = sums.measured("w", 0, keeps=True, clips=False)
        assert {name: getattr(found, name) for name in exact} == pytest.approx(exact, rel=REDUCED)


@each_rank(2, "local")
def test_samples_are_taken_at_multiples_and_zero_is_none(comm):
    fourth, hundredth, none = (quality_of(comm, steps=6, quality_every=k) for k in (4, 100, 0))
    assert {row.step for row in fourth.rows.values()} == {4}
    assert {row.step for row in hundredth.rows.values()} == {0}
    assert none.rows == {} and none.worst() == [] and str(none).startswith("no sample yet")


@each_rank(2, "local")
def test_a_bucket_with_nan_is_not_sampled(comm):
    mine = run(comm, steps=1)
    mine.step(1, math.nan)
    assert {row.step for row in mine.averager.quality().rows.values()} == {0}


@each_rank(2, "local")
def test_bfloat16_gradients(comm):
    for row in quality_of(comm, Block(8), 2, dtype=torch.bfloat16).rows.values():
        assert row.cosine > 0.999


def test_residuals_that_grow_without_bound_are_named_once():
    """Signs of -1 and 1 cannot carry gradients of 5: what is left grows by 4 a step."""

    def work(comm):
        fives = {"gradient": lambda name, shape, step, rank: torch.full(shape, 5.0)}
        options = {"quality_every": 5, "exchange": "all_gather", **fives}
        mine = Run(comm, OneBit(values="sign"), {"too.large": (4, 500)}, **options)
        mine.steps(60)
        assert mine.averager.quality().rows["too.large"].residual > 40
        run(comm.duplicate(60.0), OneBit(), 60, quality_every=3)  # those stay, and nothing is said

    with logged("grow") as said:
        run_local(2, work)
    assert len(said) == 2  # one a rank
    for text in said:
        assert "'too.large'" in text and "grow without bound" in text
        assert "exclude='too.large'" in text


def test_a_table_has_no_nan():
    """1 bit has no share of clipped values: it printed nan%."""
    lines = str(run_local(2, quality_of, OneBit(), 2)[0]).splitlines()
    assert all(line.split()[-1] == "-" for line in lines[1:]) and len(lines) > 1
    assert len({len(line) for line in lines}) == 1
    text = str(Quality({"w": Sample("w", 1, 4, math.nan, 0.5, math.nan, 0.25)}))
    assert "nan" not in "\n".join(lines) + text and "25.00%" in text


def test_a_table_and_a_picture(tmp_path):
    quality = run_local(2, quality_of, Block(2), 2)[0]
    head, *lines = str(quality).splitlines()
    assert head.split() == ["parameter", "step", "cosine", "error", "residual", "clipped"]
    assert [line.split()[0] for line in lines] == [row.name for row in quality.worst()]
    assert quality.worst(1)[0].cosine == min(row.cosine for row in quality.rows.values())
    quality.plot(tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
