"""1 bit of rotated values: exchanges against the reference, unbiased, and what is refused."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import run_local
from _saved import parts_of
from reference import codec as ref
from reference import rotation
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp import OneBit
from gradcomp._gc import ffi, lib
from gradcomp.payload.pieces import ByElements
from gradcomp.payload.rng import STREAM_OWNED, STREAM_ROTATION

CODEC = OneBit(rotate=True)


def test_c_refuses():
    memory = ffi.new("float[8]")
    key = ffi.new("gc_rng_key *")[0]
    assert lib.gc_rotate(memory, 8, 0, 0, 0, key, 0) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_rotate(ffi.NULL, 8, 4, 0, 0, key, 0) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_rotate(memory, 8, 4, 0xFFFFFFFF, 0, key, 0) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_unbias(memory, 8, 0, 0) == lib.GC_INVALID_ARGUMENT
    assert lib.gc_rotate(ffi.NULL, 0, 4, 0, 0, key, 0) == lib.GC_OK


# ---- exchanges -----------------------------------------------------------------------------------


def coded(x, group, first):
    out = np.empty_like(x)
    for run in rotation.runs(len(x), group, first):
        values = x[run]
        means = ref_means(values)
        out[run] = np.where(values > 0, means[0], means[1]).astype(np.float32)
    return out


def ref_means(values):
    positive = values > 0
    return [
        np.float32(values[c].astype(np.float64).mean()) if c.any() else np.float32(0)
        for c in (positive, ~positive)
    ]


def expected(arrays, group, step, parameter, second):
    """Return the average of one parameter, to rounding."""
    key, world = ref.Key(0, 0, step, parameter, STREAM_ROTATION), len(arrays)
    codes = [
        coded(rotation.unbias(rotation.rotate(a, group, 0, key), group, 0), group, 0)
        for a in arrays
    ]
    mean = np.mean(codes, 0, dtype=np.float64).astype(np.float32)
    if second:
        for rank in range(world):
            first, last = ByElements(world).bounds(mean.size, rank)
            if last > first:
                own = key._replace(stream=STREAM_OWNED)
                turned = rotation.rotate(mean[first:last], group, first, own)
                mean[first:last] = rotation.rotate(
                    coded(rotation.unbias(turned, group, first), group, first),
                    group,
                    first,
                    own,
                    back=True,
                )
    return rotation.rotate(mean, group, 0, key, back=True)


def averaged(comm, arrays, exchange, slice_numel, dtype):
    model = [
        ("w", nn.Parameter(torch.zeros(arrays[0].shape, dtype=dtype))),
        ("b", nn.Parameter(torch.zeros(5, dtype=dtype))),
    ]
    averager = gradcomp.GradientAverager(
        model,
        CODEC,
        comm=comm,
        exchange=exchange,
        advanced=gradcomp.Advanced(slice_numel=slice_numel, quality_every=1),
    )
    out = []
    for step in range(2):
        model[0][1].grad = torch.from_numpy(arrays[comm.rank] * (step + 1)).to(dtype)
        model[1][1].grad = torch.full((5,), float(comm.rank), dtype=dtype)
        averager.average()
        out.append(
            (model[0][1].grad.float().numpy().copy(), model[1][1].grad.float().numpy().copy())
        )
    cosine = averager.quality().rows["w"].cosine
    averager.close()
    return out, cosine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("world", "shape", "slice_numel"),
    [(2, (40, 96), None), (3, (24, 300), None), (4, (128, 128), 4096)],
)
def test_averages_are_the_references(world, shape, slice_numel, exchange, dtype):
    rng = np.random.default_rng(world)
    arrays = [
        torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtype).float().numpy()
        for _ in range(world)
    ]
    results = run_local(world, lambda comm: averaged(comm, arrays, exchange, slice_numel, dtype))
    tolerance = (
        {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    )
    for (out, cosine), step in ((r, s) for r in results for s in range(2)):
        given = [(a * (step + 1)).astype(np.float32).reshape(-1) for a in arrays]
        if dtype != torch.float32:
            given = [torch.from_numpy(g).to(dtype).float().numpy() for g in given]
        wanted = expected(given, shape[1], step, 0, exchange == "reduce_scatter")
        assert np.allclose(out[step][0].reshape(-1), wanted, **tolerance)
        assert np.allclose(out[step][1], np.mean(range(world)), rtol=0.01)
        assert 0.7 < cosine < 0.9  # sqrt(2 / pi)
        assert out[step][0].tobytes() == results[0][0][step][0].tobytes()


def over_many_steps(comm, steps):
    """Return the mean of averages of the same gradients, and the exact one; a few large values
    among small ones.
    """
    rng = np.random.default_rng(comm.rank)
    mine = torch.from_numpy(
        (rng.standard_normal((8, 128)) * np.where(np.arange(128) % 32 == 0, 10, 1)).astype(
            np.float32
        )
    )
    out = {}
    for rotates in (True, False):
        p = nn.Parameter(torch.zeros(8, 128))
        averager = gradcomp.GradientAverager(
            [("w", p)],
            OneBit(rotate=rotates, error_feedback=False),
            comm=comm.duplicate(60.0),
            exchange="reduce_scatter",
            min_numel=0,
        )
        total = torch.zeros(8, 128)
        for _ in range(steps):
            p.grad = mine.clone()
            averager.average()
            total += p.grad
        averager.close()
        out[rotates] = total / steps
    exact = gradcomp.all_reduce(mine.clone(), "identity", comm=comm)
    return [float((out[rotates] - exact).norm() / exact.norm()) for rotates in (True, False)]


def test_averages_are_unbiased():
    """The mean of many rotations comes ever closer to the exact average, which signs of the
    values themselves never do.
    """
    few, many = (run_local(4, lambda comm, n=n: over_many_steps(comm, n))[0] for n in (10, 160))
    assert many[0] < 0.4 * few[0] < 0.2 and many[0] < 0.1, (few, many)
    assert many[1] > 0.5 and few[1] == pytest.approx(many[1])


def sharded():
    torch.manual_seed(0)
    model = nn.Linear(128, 64, bias=False)
    exact = nn.Linear(128, 64, bias=False)
    exact.load_state_dict(model.state_dict())
    model = fully_shard(model)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(dist.get_rank()))
    total = 0
    with gradcomp.fsdp.register(model, CODEC) as state:
        for _ in range(60):
            model.zero_grad()
            model(x).square().mean().backward()
            total += model.weight.grad.to_local() / 60
        assert not parts_of(state.state_dict())["residual"]
    exact(x).square().mean().backward()
    dist.all_reduce(exact.weight.grad)
    wanted = exact.weight.grad.chunk(2)[dist.get_rank()] / 2
    return float((total - wanted).norm() / wanted.norm())


def test_shards_are_turned_back(gloo):
    assert all(error < 0.15 for error in gloo(2, sharded))


def test_what_is_refused():
    with pytest.raises(ValueError, match="rotate=True is unbiased by itself"):
        OneBit(rotate=True, error_feedback=True)
    with pytest.raises(ValueError, match="rotate=True is unbiased by itself"):
        OneBit(rotate=True, values="sign")
    with pytest.raises(ValueError, match="rotate must be True or False"):
        OneBit(rotate="yes")
    for call in (
        lambda: CODEC.encode(torch.ones(64)),
        lambda: CODEC.decode(torch.zeros(64, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match="exchanges rotate what it encodes"):
            call()
    assert (
        "rotate=True" in repr(CODEC)
        and not CODEC.error_feedback
        and OneBit().error_feedback
        and "rotate" not in repr(OneBit())
    )
    assert repr(OneBit(rotate=True)) != repr(OneBit(error_feedback=False))
    p = [("w", nn.Parameter(torch.zeros(64, 64)))]

    def refused(comm, **options):
        with pytest.raises(ValueError, match="rotate") as error:
            gradcomp.GradientAverager(p, CODEC, comm=comm, **options)
        return str(error.value)

    assert "precondition" in run_local(2, lambda comm: refused(comm, precondition=True))[0]
    assert (
        "owner"
        in run_local(
            2,
            lambda comm: refused(
                comm,
                advanced=gradcomp.Advanced(
                    transform=gradcomp.onebit_sgd.AggregateAdagrad(eps=1e-8)
                ),
            ),
        )[0]
    )


def between_and_inside_nodes(comm, nodes, steps):
    rng = np.random.default_rng(comm.rank)
    mine = torch.from_numpy(rng.standard_normal((24, 128)).astype(np.float32))
    p = nn.Parameter(torch.zeros(24, 128))
    averager = gradcomp.GradientAverager(
        [("w", p)],
        CODEC,
        comm=comm.duplicate(60.0),
        exchange="hierarchical",
        advanced=gradcomp.Advanced(nodes=nodes),
        min_numel=0,
    )
    total = torch.zeros(24, 128)
    for _ in range(steps):
        p.grad = mine.clone()
        averager.average()
        total += p.grad / steps
    averager.close()
    exact = gradcomp.all_reduce(mine.clone(), "identity", comm=comm)
    return float((total - exact).norm() / exact.norm()), total.numpy().tobytes()


def test_between_nodes_averages_are_unbiased_too():
    few, many = (
        run_local(4, between_and_inside_nodes, [(0, 1), (2, 3)], steps) for steps in (8, 128)
    )
    assert len({bits for _, bits in many}) == 1
    assert many[0][0] < 0.4 * few[0][0] and many[0][0] < 0.12, (few[0][0], many[0][0])
