"""1 bit of rotated values: exchanges against the reference, unbiased, and what is refused."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _averaging import Run
from _ranks import each_rank, run_local
from _saved import parts_of
from reference import codec as ref
from reference import rotation
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp import OneBit
from gradcomp._gc import ffi, lib
from gradcomp.onebit_sgd import AggregateAdagrad
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


def coded(x, group, first, key):
    """Return what 1-bit codes make of rotated values: the means of their classes."""
    x = rotation.unbias(rotation.rotate(x, group, first, key), group, first)
    out = np.zeros_like(x)
    for run in rotation.runs(len(x), group, first):
        for above in (True, False):
            member = (x[run] > 0) == above
            if member.any():
                out[run][member] = x[run][member].astype(np.float64).mean()
    return out


def expected(arrays, group, step, second):
    """Return the average of one parameter, to rounding."""
    key = ref.Key(step=step, stream=STREAM_ROTATION)
    mean = np.mean([coded(a, group, 0, key) for a in arrays], 0, dtype=np.float64)
    mean = mean.astype(np.float32)
    for rank in range(len(arrays) if second else 0):
        first, last = ByElements(len(arrays)).bounds(mean.size, rank)
        own = key._replace(stream=STREAM_OWNED)
        owned = coded(mean[first:last], group, first, own)
        mean[first:last] = rotation.rotate(owned, group, first, own, back=True)
    return rotation.rotate(mean, group, 0, key, back=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("world", "shape", "slice_numel"),
    [(2, (40, 96), None), (3, (24, 300), None), (4, (64, 128), 4096)],
)
@each_rank(by="local")
def test_averages_are_the_references(comm, world, shape, slice_numel, exchange, dtype):
    options = {"exchange": exchange, "slice_numel": slice_numel, "quality_every": 1}
    shapes = {"w": shape, "b": (5,)}
    mine, found = Run(comm, CODEC, shapes, dtype=dtype, min_numel=None, **options), []
    exact = dtype == torch.float32
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if exact else {"rtol": 0.02, "atol": 0.02}
    for step in range(2):
        given = {
            name: [mine.gradient(name, of, step, r).to(dtype).float() for r in range(world)]
            for name, of in shapes.items()
        }
        got = mine.step(step)
        if comm.rank == 0:  # the others have the same
            arrays = [g.numpy().ravel() for g in given["w"]]
            wanted = expected(arrays, shape[1], step, exchange == "reduce_scatter")
            assert np.allclose(got["w"].float().numpy().ravel(), wanted, **tolerance)
        plain = (sum(given["b"]) / world).to(dtype)
        assert torch.allclose(got["b"], plain, rtol=0.01, atol=0.01)
        found.append(got["w"].float().numpy().tobytes())
    assert 0.7 < mine.averager.quality().rows["w"].cosine < 0.9  # sqrt(2 / pi)
    mine.averager.close()
    return found


def spiky(name, shape, step, rank):
    """Return a few large values among small ones, the same in every step."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, generator=generator) * torch.tensor([10.0] + 31 * [1.0]).repeat(4)


def error_of_mean(comm, codec, steps, **options):
    """Return how far the mean of averages of the same gradients is from the exact average."""
    shape = (8, 128)
    mine = Run(comm.duplicate(60.0), codec, {"w": shape}, gradient=spiky, **options)
    mean = sum(averages["w"] for averages in mine.steps(steps)) / steps
    mine.averager.close()
    exact = sum(spiky("w", shape, 0, rank) for rank in range(comm.world_size)) / comm.world_size
    return float((mean - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "options",
    [{"exchange": "reduce_scatter"}, {"exchange": "hierarchical", "nodes": [(0, 1), (2, 3)]}],
    ids=["owners", "nodes"],
)
def test_averages_are_unbiased(options):
    """The mean of many rotations comes ever closer to the exact average, which signs of the
    values themselves never do.
    """
    signs, mean = OneBit(error_feedback=False), partial(error_of_mean, **options)
    few, many, biased = (
        run_local(4, mean, codec, steps)[0]
        for codec, steps in ((CODEC, 8), (CODEC, 128), (signs, 2))
    )
    assert many < 0.4 * few < 0.25 and many < 0.11 and biased > 0.3, (few, many, biased)


@each_rank(2)
def test_shards_are_turned_back():
    torch.manual_seed(0)
    model, exact, total = nn.Linear(128, 64, bias=False), nn.Linear(128, 64, bias=False), 0
    exact.load_state_dict(model.state_dict())
    model = fully_shard(model)
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(dist.get_rank()))
    with gradcomp.fsdp.register(model, CODEC) as state:
        for _ in range(60):
            model.zero_grad()
            model(x).square().mean().backward()
            total += model.weight.grad.to_local() / 60
        assert not parts_of(state.state_dict())["residual"]
    exact(x).square().mean().backward()
    dist.all_reduce(exact.weight.grad)
    wanted = exact.weight.grad.chunk(2)[dist.get_rank()] / 2
    assert (total - wanted).norm() < 0.15 * wanted.norm()


def test_what_is_refused():
    for options, said in (
        ({"rotate": True, "error_feedback": True}, "rotate=True is unbiased by itself"),
        ({"rotate": True, "values": "sign"}, "rotate=True is unbiased by itself"),
        ({"rotate": "yes"}, "rotate must be True or False"),
    ):
        with pytest.raises(ValueError, match=said):
            OneBit(**options)
    for call, given in (
        (CODEC.encode, torch.ones(64)),
        (CODEC.decode, torch.zeros(64, dtype=torch.uint8)),
    ):
        with pytest.raises(ValueError, match="exchanges rotate what it encodes"):
            call(given)
    assert "rotate=True" in repr(CODEC) and "rotate" not in repr(OneBit())
    assert not CODEC.error_feedback and OneBit().error_feedback
    for options, said in (
        ({"precondition": True}, "precondition=True"),
        ({"transform": AggregateAdagrad(eps=1e-8)}, "AggregateAdagrad.*, with place='owner',"),
    ):
        with pytest.raises(ValueError, match=f"{said} cannot be combined with rotate=True"):
            run_local(2, lambda comm, o=options: Run(comm, CODEC, {"w": (64, 64)}, **o))
