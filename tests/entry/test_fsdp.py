"""`gradcomp.fsdp.register`: shards against the reference, wrappings, accumulation, dtypes, bad
days.
"""

import contextlib
import copy
import hashlib
import math
import os
import re
import time
import tracemalloc
import warnings
from dataclasses import astuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _expected import average
from _ranks import RankFailed, run_local
from _saved import parts_of
from reference import codec as ref
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import gradcomp
from gradcomp import Block, Identity, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.comm import torch_private
from gradcomp.exchange.gather import BufferPool, ShardGather
from gradcomp.exchange.sizing import Strategy, choose
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.reduce import ReduceScatter
from gradcomp.integrations import torchtitan
from gradcomp.integrations.torchtitan import ReplicaAverage
from gradcomp.payload.pieces import Slot

CODECS = {
    "terngrad": TernGrad(seed=3),
    "terngrad-own": TernGrad(scale="own"),
    "ternary": Ternary(residual_decay=0.25),
    "ternary-forgets": Ternary(error_feedback=False),
    "identity": Identity(),
    "bf16": Identity("bf16"),
    "onebit": OneBit(),
    "block2": Block(2),
    "block4-16": Block(4, group=16),
}
MIN_NUMEL = 60
REDUCED = 1e-6  # relative: sums in float32, in an order that the library chooses


class Net(nn.Module):
    """Rows that two and three ranks cannot share evenly, a vector that is packed, one that is not,
    fewer rows than ranks.

    Weights of `fresh` are multiples of 1/4 and inputs whole numbers, so every sum of a first
    forward and backward is exact (at most 21 bits): gradients are the same bits however weights lie
    in memory, which for a library's matmul they need not be.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(40, 37)
        self.second = nn.Linear(37, 64)
        self.few = nn.Linear(64, 1)
        self.unused = nn.Linear(3, 30)

    def forward(self, x, everything=True):
        hidden = nn.functional.hardtanh(self.first(x))
        out = self.few(nn.functional.hardtanh(self.second(hidden)))
        return out + self.unused(x[:, :3]).sum(1, keepdim=True) if everything else out


def fresh():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-1, 2, p.shape) / 4)
    return model


def loss_of(model, step, rank, everything=True, dtype=torch.float32):
    x = torch.randint(
        -2, 3, (8, 40), generator=torch.Generator().manual_seed(100 * step + rank)
    ).to(dtype)
    return model(x, everything).square().mean()


def wrap(model, finely, **options):
    for module in model.children() if finely else []:
        fully_shard(module, **options)
    return fully_shard(model, **options)


def gradients(step, world, count=1):
    """Return by name every rank's gradients, of a whole model, summed over `count` minibatches."""
    out = {}
    for rank in range(world):
        model = fresh()
        for n in range(count):
            loss_of(model, step + n, rank).backward()
        for name, p in model.named_parameters():
            out.setdefault(name, []).append(p.grad.numpy().copy())
    return out


@pytest.mark.parametrize("step", range(3))
def test_gradients_of_this_model_are_exact(step):
    """So that bits may be compared: with normal values, float32 sums differ from float64 ones in
    thousands of places.
    """
    for rank in range(4):
        model, exact = fresh(), fresh().double()
        loss_of(model, step, rank).backward()
        loss_of(exact, step, rank, dtype=torch.float64).backward()
        for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert torch.equal(p.grad.double(), q.grad), name


def chunk_of(array, world, rank):
    rows = -(-len(array) // world)
    return array[rank * rows : (rank + 1) * rows]


def expected(codec, grads, step, world, rank, residuals=None, ranks=None):
    """Return this rank's shards from the reference: every chunk is a tensor of its own.

    residuals: of all ranks, by name, renewed. ranks: whose random numbers are drawn.
    """
    out, residuals = {}, {} if residuals is None else residuals
    for number, name in enumerate(sorted(grads)):
        chunks = [chunk_of(g, world, rank) for g in grads[name]]
        whole = grads[name][0]
        flat = [c.reshape(-1) for c in chunks]
        if not flat[0].size or whole.size < MIN_NUMEL:
            mean = ref.float_average(flat) if flat[0].size else flat[0]
        else:
            strategy = Strategy("all_gather")  # one phase
            old = residuals.get((name, rank))
            mean, residuals[name, rank], _ = average(
                flat,
                codec,
                strategy,
                step=step,
                parameter=number * world + rank,
                shape=whole.shape,
                residuals=old,
                ranks=ranks,
            )
        out[name] = mean.reshape(chunks[0].shape)
    return out


def trained(codec, steps, finely, wrapping=None, settings=None, bad=None):
    """Return the shards of every step's gradients, what `describe` and `stats` say."""
    model = wrap(fresh(), finely, **(wrapping or {}))
    rank = dist.get_rank()
    with gradcomp.fsdp.register(model, codec, min_numel=MIN_NUMEL, **(settings or {})) as state:
        out = []
        for step in range(steps):
            model.zero_grad()
            loss = loss_of(model, step, rank)
            (loss * math.inf if bad == (rank, step) else loss).backward()
            out.append(
                {name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()}
            )
        return out, state.describe(), state.stats.bytes_sent, state.stats.steps


@pytest.mark.parametrize("finely", [True, False], ids=["fine", "whole"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CODECS)
def test_shards_are_the_references(gloo, name, world, finely):
    """Whatever the wrapping: what a chunk becomes depends on parameter, rank and step alone."""
    results, residuals = gloo(world, trained, CODECS[name], 3, finely), {}
    for step in range(3):
        grads = gradients(step, world)
        for rank, (got, *_) in enumerate(results):
            for key, wanted in expected(CODECS[name], grads, step, world, rank, residuals).items():
                assert (
                    got[step][key].shape == wanted.shape
                    and got[step][key].tobytes() == wanted.tobytes()
                ), (key, step, rank)
    assert "5 of 8 parameters of" in results[0][1] and f"over {world} ranks" in results[0][1]


def test_a_warm_up_is_averaged_in_fp32_first(gloo):
    """Its gradients leave no residuals, and its steps count for what comes after it."""
    codec, world, residuals = OneBit(), 2, {}
    results = gloo(world, trained, codec, 4, True, None, {"warmup_steps": 2})
    plain = gloo(world, trained, Identity(), 2, True)
    for rank, ((got, said, *_), (wanted, *_)) in enumerate(zip(results, plain, strict=True)):
        for step in range(2):
            assert all(got[step][k].tobytes() == v.tobytes() for k, v in wanted[step].items())
        assert "from step 2 on (Identity(" in said
    for step in (2, 3):
        grads = gradients(step, world)
        for rank, (got, *_) in enumerate(results):
            for key, wanted in expected(codec, grads, step, world, rank, residuals).items():
                assert got[step][key].tobytes() == wanted.tobytes(), (key, step, rank)


def test_a_packed_warm_up_sends_less(gloo):
    fp32, packed = (
        gloo(2, trained, OneBit(), 2, True, None, {"warmup_steps": 2, **more})[0][2]
        for more in ({}, {"warmup_codec": Block(4)})
    )
    assert packed < fp32 / 4


def sent(codec):
    model = fully_shard(nn.Linear(1024, 512, bias=False))
    with gradcomp.fsdp.register(model, codec) as state:
        model(torch.randn(4, 1024)).sum().backward()
        return state.stats.bytes_sent, state.stats.baseline_bytes


def test_what_is_sent(gloo):
    """One phase of 2 bits, where gloo's own reduce-scatter sends a ring all_reduce in fp32."""
    for codec, bits in ((TernGrad(), 2), (Identity("bf16"), 16), (Identity(), 32)):
        for bytes_sent, baseline in gloo(2, sent, codec):
            assert bytes_sent == pytest.approx(1024 * 512 / 2 * bits / 8, rel=0.003)
            assert baseline == 1024 * 512 * 4


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    ],
)
def test_options_of_fully_shard(gloo, options):
    plain, other = (gloo(2, trained, TernGrad(seed=3), 2, True, o) for o in ({}, options))
    for (a, *_), (b, *_) in zip(plain, other, strict=True):
        assert all(
            x[name].tobytes() == y[name].tobytes() for x, y in zip(a, b, strict=True) for name in x
        )


def in_half(dtype):
    """Return the relative distance of averaged shards from fp32 averages, at the largest, in a
    reduce-scatter of `dtype`.
    """
    policy = MixedPrecisionPolicy(reduce_dtype=dtype)
    model, rank, world = (
        wrap(fresh(), True, mp_policy=policy),
        dist.get_rank(),
        dist.get_world_size(),
    )
    with gradcomp.fsdp.register(model, Identity(), min_numel=0) as state:
        loss_of(model, 0, rank).backward()
        assert state.plain == 0
    worst = 0.0
    for name, arrays in gradients(0, world).items():
        wanted = chunk_of(np.mean(arrays, 0), world, rank)
        got = dict(model.named_parameters())[name].grad.to_local().numpy()
        worst = max([worst, *np.abs(got - wanted).ravel() / np.abs(wanted).max(initial=1e-30)])
    return worst


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
def test_gradients_in_half_precision(gloo, dtype, most):
    """float16 is a sum for FSDP, of gradients that it has divided before."""
    assert all(worst < most for worst in gloo(2, in_half, dtype))


def test_a_value_that_is_not_finite_leaves_residuals_alone(gloo):
    """They are as if there had been no step between; averages are in test_conformance.py."""
    residuals, found = {}, gloo(2, trained, OneBit(), 3, True, None, None, (1, 1))
    for step in (0, 2):
        for rank, (got, *_) in enumerate(found):
            wanted = expected(OneBit(), gradients(step, 2), step, 2, rank, residuals)
            assert all(got[step][name].tobytes() == wanted[name].tobytes() for name in wanted)


def accumulated():
    model, rank = wrap(fresh(), True), dist.get_rank()
    with gradcomp.fsdp.register(model, TernGrad(seed=3), min_numel=MIN_NUMEL) as state:
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss_of(model, micro, rank).backward()
        return {
            name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()
        }, state.stats.steps


def test_gradients_that_accumulate_are_exchanged_once(gloo):
    grads = gradients(0, 2, count=3)
    for rank, (got, steps) in enumerate(gloo(2, accumulated)):
        assert steps == 4  # modules
        assert all(
            got[name].tobytes() == w.tobytes()
            for name, w in expected(TernGrad(seed=3), grads, 0, 2, rank).items()
        )


def without_some(finely):
    model, rank = wrap(fresh(), finely), dist.get_rank()
    with (
        gradcomp.fsdp.register(model, TernGrad(), min_numel=MIN_NUMEL) as state,
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        for step in range(2):
            loss_of(model, step, rank, everything=False).backward()
        count = sum("travels as torch sends it" in str(one.message) for one in said)
        return (
            state.plain,
            count,
            model.first.weight.grad.to_local().abs().sum().item(),
            model.unused.weight.grad,
        )


def test_parameters_without_gradients(gloo):
    """A module all of whose parameters have none exchanges nothing; one that lacks some goes
    torch's way, and says so once.
    """
    for plain, said, size, none in gloo(2, without_some, True):
        assert (plain, said, none) == (0, 0, None) and size > 0
    for plain, said, size, none in gloo(2, without_some, False):
        assert (plain, said, none) == (2, 1, None) and size > 0


def with_frozen():
    """Parameters are frozen after the first step, and thawed again: the others' gradients are
    those of their own numbers.
    """
    out, rank = [], dist.get_rank()
    model = wrap(fresh(), False)
    with gradcomp.fsdp.register(model, TernGrad(seed=3), min_numel=MIN_NUMEL) as state:
        for step, frozen in enumerate((False, True, False)):
            model.second.weight.requires_grad_(not frozen)
            model.zero_grad()
            loss_of(model, step, rank).backward()
            out.append(
                {
                    name: p.grad.to_local().numpy().copy()
                    for name, p in model.named_parameters()
                    if p.grad is not None
                }
            )
        return out, state.plain


def test_parameters_that_are_frozen_on_the_way(gloo):
    for rank, (got, plain) in enumerate(gloo(2, with_frozen)):
        assert plain == 0 and "second.weight" not in got[1]
        for step, shards in enumerate(got):
            wanted = expected(TernGrad(seed=3), gradients(step, 2), step, 2, rank)
            assert all(
                shard.tobytes() == wanted[name].tobytes() for name, shard in shards.items()
            ), step


def run(model, steps):
    for step in steps:
        model.zero_grad()
        loss_of(model, step, dist.get_rank()).backward()
    return [p.grad.to_local().clone() for p in model.parameters() if p.requires_grad]


def resumed(codec, residuals, folder, settings):
    """Return whether a run goes on as if it had not stopped: from a state, from a checkpoint of
    torch's, in another wrapping.
    """
    options = {"residuals": residuals, "min_numel": 0, **settings}
    model = wrap(fresh(), True)
    with gradcomp.fsdp.register(model, codec, **options) as state:
        run(model, range(2))
        saved = copy.deepcopy(state.state_dict())
        dcp.save({"model": model.state_dict(), "gradcomp": state}, checkpoint_id=folder)
        whole = run(model, range(2, 4))
    model(torch.zeros(1, 40)).sum().backward()  # torch's own again
    out = []
    for load in (
        lambda state, _: state.load_state_dict(saved),
        lambda state, model: dcp.load(
            {"model": model.state_dict(), "gradcomp": state}, checkpoint_id=folder
        ),
        lambda state, _: state.load(folder),
    ):
        model = wrap(fresh(), False)
        with gradcomp.fsdp.register(model, codec, **options) as state:
            load(state, model)
            later = run(model, range(2, 4))
            out.append(all(torch.equal(a, b) for a, b in zip(whole, later, strict=True)))
    return out


@pytest.mark.parametrize(
    ("codec", "residuals", "settings"),
    [
        ("terngrad", "fp32", {}),
        ("onebit", "fp32", {}),
        (Block(2), "bf16", {}),
        ("onebit", "fp32", {"warmup_steps": 3, "warmup_codec": Block(4)}),
        ("terngrad", "fp32", {"warmup_steps": 1, "warmup_codec": "onebit"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_same_run_in_another_wrapping(
    gloo, codec, residuals, settings, tmp_path
):
    assert gloo(2, resumed, codec, residuals, str(tmp_path), settings) == [[True] * 3] * 2


def partly_frozen(frozen):
    """Return the model, its first weight frozen if `frozen`."""
    model = fresh()
    model.first.weight.requires_grad_(not frozen)
    return model


def steps_of(state):
    return [step for _, step in state["extra"]["steps"]]


def saved_by(folder, frozen=False):
    model = wrap(partly_frozen(frozen), True)
    with gradcomp.fsdp.register(model, "onebit", min_numel=MIN_NUMEL) as state:
        run(model, range(2))
        dcp.save({"gradcomp": state}, checkpoint_id=folder)
        return state.state_dict()


def goes_on_with(folder, states):
    """Return the residuals of all names after loading, by both ways; what a single state says."""
    out = []
    for load in (lambda state: state.load(folder), lambda state: state.load_state_dict(states)):
        model = wrap(fresh(), False)
        with gradcomp.fsdp.register(model, "onebit", min_numel=MIN_NUMEL) as state:
            load(state)
            after = state.state_dict()
            out.append(parts_of(after)["residual"])
            assert steps_of(after) == [2] * 8
            with pytest.raises(
                ValueError,
                match="values of rank . are missing: the run had 2 ranks, this one has 3",
            ):
                state.load_state_dict(states[0])
    return out


def test_what_other_ranks_owed_is_owed_by_more_of_them(gloo, tmp_path):
    """Each of the new ranks has the mean of the old ones' residuals, so the sum over ranks /
    their number is what it was.
    """
    states = gloo(2, saved_by, str(tmp_path))
    for ways in gloo(3, goes_on_with, str(tmp_path), states):
        for got in ways:
            assert len(got) == 5
            for name, tensor in got.items():
                one, two = (parts_of(state)["residual"][name].double() for state in states)
                wanted = ((one + two) / 2).float()
                assert torch.equal(tensor, wanted) and tensor.abs().sum() > 0, name


def goes_on_alone(folder, states, frozen):
    """Return how far the first gradients after loading are from exact ones, by name, by both
    ways; and the state of a run of one rank.
    """
    out, exact = [], {name: grads[0] for name, grads in gradients(2, 1).items()}
    for load in (lambda state: state.load(folder), lambda state: state.load_state_dict(states)):
        model = wrap(partly_frozen(frozen), False)
        with gradcomp.fsdp.register(model, "onebit", min_numel=MIN_NUMEL) as state:
            single = state.state_dict()
            with pytest.raises(
                ValueError,
                match="values of rank 1 are missing: the run had 2 ranks, this one has 1",
            ):
                state.load_state_dict(states[0])
            load(state)
            # what is not paid yet is saved, too
            state.load_state_dict(copy.deepcopy(state.state_dict()))
            run(model, [2])
            trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
            out.append(
                {name: p.grad.to_local().numpy() - exact[name] for name, p in trained.items()}
            )
            assert not parts_of(state.state_dict())["residual"]
            run(model, [2])
            for name, p in trained.items():
                assert np.array_equal(p.grad.to_local().numpy(), exact[name]), name
    return out, single


def takes(single):
    model = wrap(fresh(), False)
    with gradcomp.fsdp.register(model, "onebit", min_numel=MIN_NUMEL) as state:
        run(model, range(2))
        state.load_state_dict(single)
        after = state.state_dict()
        return steps_of(after), [t.any().item() for t in parts_of(after)["residual"].values()]


@pytest.mark.parametrize("frozen", [False, True])
def test_what_several_ranks_owed_is_paid_by_one(gloo, tmp_path, frozen):
    """It was dropped without a word (0.19 to 0.30 of the largest gradient); several ranks go on
    from a run of one, too.
    """
    states = gloo(2, saved_by, str(tmp_path), frozen)
    ((ways, single),) = gloo(1, goes_on_alone, str(tmp_path), states, frozen)
    residuals = [parts_of(one)["residual"] for one in states]
    for paid in ways:
        for name, got in paid.items():
            wanted = (
                sum(one[name].double() for one in residuals) / 2
                if name in residuals[0]
                else torch.zeros(got.shape)
            )
            assert np.allclose(got, wanted.numpy(), atol=1e-6), name
    assert max(np.abs(got).max() for got in ways[0].values()) > 0.01
    assert gloo(2, takes, single) == [([0] * 8, [False] * 5)] * 2


def with_residuals(change):
    return lambda good, rank: {
        **good,
        "ranks": {rank: {"tensors": 5, "residual": change(parts_of(good)["residual"])}},
    }


def with_weight(value):
    """Return a function that puts another residual of `first.weight` into a state."""
    return with_residuals(lambda residual: {**residual, "first.weight": value})


def with_steps(change):
    return lambda good, rank: {**good, "extra": {"steps": change(good["extra"]["steps"])}}


def with_step(step):
    return with_steps(lambda steps: [["few.bias", step], *steps[1:]])


def with_values(**values):
    return lambda good, rank: {**good, **values}


def with_codec(good, rank):
    return {**good, "origin": {**good["origin"], "codec": "TernGrad()"}}


HUGE = torch.full((37, 40), 1e39, dtype=torch.float64)
# what is made of a good state, and what loading it says
REFUSED_STATES = [
    (lambda *_: {"version": 2, "steps": 3}, "another version of gradcomp wrote this state"),
    (lambda *_: 7, "a state is a dictionary, got 7"),
    (with_values(extra=3), "'extra' of this state is a dictionary, got 3"),
    (with_values(origin={"kind": "gradients"}), "kind 'gradients', 'fsdp' expected"),
    (with_codec, "this state has codec 'TernGrad"),
    (with_step(-1), "step -1 of 'few.bias', an integer of at least 0 and below 2.32"),
    (with_step(1.5), "step 1.5 of 'few.bias', an integer"),
    (with_step(2**70), f"step {2**70} of 'few.bias', an integer"),
    (with_step(True), "step True of 'few.bias', an integer"),
    (
        with_steps(lambda steps: [[7, 0], *steps]),
        "other parameters: 7 is on one side only",
    ),
    (
        with_steps(lambda steps: [*steps, steps[0]]),
        "steps must be pairs of name and step, each name once",
    ),
    (with_steps(lambda _: 3), "steps must be pairs of name and step, each name once: 3"),
    (with_steps(lambda steps: steps[1:]), "other parameters: 'few.bias' is on one side only"),
    (
        with_weight(torch.full((37, 40), math.nan)),
        "residual of 'first.weight' has values that are not finite in torch.",
    ),
    (
        with_weight(HUGE),
        "residual of 'first.weight' must be .37, 40. torch.float32 or .* torch.float64 on cpu",
    ),
    (with_weight(HUGE.to(torch.complex64)), "residual of 'first.weight' .* got .* torch.complex64"),
    (with_weight(torch.zeros(37, 40).long()), "residual of 'first.weight' .* got .* torch.int64"),
    (
        with_weight(torch.zeros(37, 40, device="meta")),
        "residual of 'first.weight' .* got .* torch.float32 on meta",
    ),
    (
        with_weight(torch.zeros(37, 40).to_sparse()),
        "residual of 'first.weight' must be .37, 40. .* got tensor.indices",
    ),
    (with_weight([0.0]), "residual of 'first.weight' must be .37, 40. .* got .0.0."),
    (with_residuals(lambda r: dict(list(r.items())[1:])), "rank . .* has 4 tensors of 5"),
    (
        with_residuals(lambda r: {name + "x": tensor for name, tensor in r.items()}),
        "residuals do not fit this model and codec",
    ),
    (with_residuals(lambda _: 3), "residual of rank . in this state is a dictionary, got 3"),
    (lambda good, rank: {**good, "ranks": {rank: 3}}, "rank . in this state is a dictionary"),
    (with_values(ranks={}), "values of rank . are missing: .* and the state has rank none"),
    (
        with_values(world_size=10**6),
        "values of rank . are missing: the run had 1000000 ranks, this one has 2",
    ),
    *(
        (with_values(world_size=size), f"world_size {size}, a positive integer expected")
        for size in (0, 2.0, True)
    ),
    (lambda *_: [], "one of every rank"),
    (
        lambda good, rank: [good, {**good, "world_size": 3}],
        "not of one run: world_size is 2 and 3",
    ),
    (
        lambda good, rank: [with_step(1)(good, rank), {**good, "ranks": {}}],
        "not of one run: extra.steps.0.1 is 1 and 0",
    ),
    (lambda good, rank: [good, good], "these states have rank . twice"),
]


def misloaded(residuals):
    model = wrap(fresh(), True)
    with gradcomp.fsdp.register(model, "onebit", min_numel=MIN_NUMEL, residuals=residuals) as state:
        good, rank = state.state_dict(), str(dist.get_rank())
        tracemalloc.start()
        for make, said in REFUSED_STATES:
            with pytest.raises(ValueError, match=said):
                state.load_state_dict(make(good, rank))
        assert tracemalloc.get_traced_memory()[1] < 2e6
        tracemalloc.stop()
        with pytest.raises(ValueError, match="is no checkpoint of torch.distributed.checkpoint"):
            state.load("/nowhere")
        after = state.state_dict()
        assert steps_of(after) == [0] * 8
        assert not any(t.any() for t in parts_of(after)["residual"].values())
        if residuals == "bf16":
            largest = torch.full((37, 40), torch.finfo(torch.float32).max)
            said = "residual of 'first.weight' has values that are not finite in torch.bfloat16"
            with pytest.raises(ValueError, match=said):
                state.load_state_dict(with_weight(largest)(good, rank))


@pytest.mark.parametrize("residuals", ["fp32", "bf16"])
def test_states_that_are_refused(gloo, residuals):
    """float64 residuals of 1e39 became Inf, and every later gradient NaN; 10**9 ranks took 3 GB
    and a minute.
    """
    gloo(2, misloaded, residuals)


def in_two_dimensions():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rank = fully_shard(fresh(), mesh=mesh), dist.get_rank()
    with gradcomp.fsdp.register(model, TernGrad(seed=3), min_numel=MIN_NUMEL):
        loss_of(model, 0, rank).backward()
        return {name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()}


def test_replicas_average_shards_as_torch_does(gloo):
    """HSDP: packed where parameters are sharded; the all_reduce between replicas is torch's."""
    grads, results = gradients(0, 4), gloo(4, in_two_dimensions)
    for rank, got in enumerate(results):
        place = rank % 2
        sides = [
            expected(
                TernGrad(seed=3),
                {k: v[2 * r : 2 * r + 2] for k, v in grads.items()},
                0,
                2,
                place,
                ranks=[2 * r, 2 * r + 1],
            )
            for r in range(2)
        ]
        for name, shard in got.items():
            assert np.allclose(
                shard, (sides[0][name] + sides[1][name]) / 2, rtol=1e-6, atol=1e-9
            ), (rank, name)


def squared_error(replicas):
    """Return the squared error of a ternary average of four ranks with the same data, over the
    gradient's square.
    """
    torch.manual_seed(0)
    mesh = (
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if replicas else None
    )
    model = fully_shard(nn.Linear(128, 128, bias=False), **({"mesh": mesh} if mesh else {}))
    x = torch.randn(16, 128)
    with gradcomp.fsdp.register(model, TernGrad(clip_sigma=None)) as state:
        model(x).square().mean().backward()
        noisy = model.weight.grad.full_tensor()
        assert state.plain == 0
    model.zero_grad()
    model(x).square().mean().backward()
    exact = model.weight.grad.full_tensor()
    return ((noisy - exact).square().sum() / exact.square().sum()).item()


def test_replicas_draw_random_numbers_of_their_own(gloo):
    """Ternary's noise averages out over all ranks: both replicas drew the same numbers, and it
    was twice as large.
    """
    flat, replicated = (gloo(4, squared_error, replicas)[0] for replicas in (False, True))
    assert replicated == pytest.approx(flat, rel=0.1)


def between_nodes(codec):
    """Two nodes of two ranks: plain FSDP2 inside, gradients of shards averaged between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model, rank = wrap(fresh(), True, mesh=mesh["shard"]), dist.get_rank()
    comm = gradcomp.comm.TorchCommunicator(mesh["node"].get_group())
    out = []
    with gradcomp.GradientAverager(model, codec, comm=comm, min_numel=MIN_NUMEL) as averager:
        for step in range(2):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            averager.average()
            out.append(
                {name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()}
            )
    return out


def between_nodes_by_a_hook(codec, staged):
    """The same, and nothing in the loop: `staged` as gradients of a GPU are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    model, rank = wrap(fresh(), True, mesh=mesh["shard"]), dist.get_rank()
    out = []
    with (
        mock.patch.object(torchtitan, "_on_the_host", return_value=not staged),
        ReplicaAverage(model, mesh["node"].get_group(), codec, min_numel=MIN_NUMEL) as replicas,
    ):
        for step in range(2):
            model.zero_grad()
            model.set_requires_gradient_sync(False)  # twice half of it: averaged once
            (loss_of(model, step, rank) / 2).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model, step, rank) / 2).backward()
            out.append(
                {name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()}
            )
        assert replicas.averager.stats.steps == 2
    model.zero_grad()
    loss_of(model, 0, rank).backward()
    assert replicas.averager.stats.steps == 2  # closed
    return out


@pytest.mark.parametrize(
    "by",
    [(between_nodes,), (between_nodes_by_a_hook, False), (between_nodes_by_a_hook, True)],
    ids=["averager", "hook", "staged"],
)
def test_packed_between_nodes_and_plain_inside(gloo, by):
    """`GradientAverager` takes shards as they are: with no loss it gives the mean over all four
    ranks, with 1 bit residuals of shards.
    """
    between, *how = by
    for rank, got in enumerate(gloo(4, between, Identity(), *how)):
        for step, shards in enumerate(got):
            for name, arrays in gradients(step, 4).items():
                assert np.allclose(
                    shards[name], chunk_of(np.mean(arrays, 0), 2, rank % 2), rtol=1e-5, atol=1e-8
                ), name
    residuals, owners = {}, {}
    results = gloo(4, between, OneBit(), *how)
    for step in range(2):
        inside = {
            name: [np.mean(arrays[2 * n : 2 * n + 2], 0) for n in range(2)]
            for name, arrays in gradients(step, 4).items()
        }
        for shard in range(2):
            for name, arrays in inside.items():
                chunks = [chunk_of(a, 2, shard).reshape(-1) for a in arrays]
                if arrays[0].ndim < 2 or chunks[0].size < MIN_NUMEL or arrays[0].size < MIN_NUMEL:
                    continue
                mean, residuals[name, shard], owners[name, shard] = average(
                    chunks,
                    OneBit(),
                    choose(OneBit(), 2),
                    step=step,
                    parameter=0,
                    shape=arrays[0].shape,
                    residuals=residuals.get((name, shard)),
                    owner_residuals=owners.get((name, shard)),
                )
                for node in range(2):
                    got = results[2 * node + shard][step][name]
                    assert np.allclose(got, mean.reshape(got.shape), rtol=1e-4, atol=1e-7), (
                        name,
                        step,
                    )


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(40, 64, bias=False)
        self.down = nn.Linear(64, 40, bias=False)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def beside_tensor_parallelism(codec):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(
        Rows(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    fully_shard(model.up, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    out = []
    x = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(7))[
        mesh["data"].get_local_rank()
    ]
    with gradcomp.fsdp.register(model, codec) if codec else contextlib.nullcontext() as state:
        for _ in range(2):
            model.zero_grad()
            model(x).square().mean().backward()
            out.append([p.grad.to_local().numpy().copy() for p in model.parameters()])
        if codec == "onebit":
            saved = state.state_dict()
            state.load_state_dict(saved)
            with pytest.raises(
                ValueError, match="tensor parallelism do not fit 4: resume with as many"
            ):
                state.load_state_dict({**saved, "world_size": 8})
    return out


def test_beside_tensor_parallelism_a_ranks_part_is_a_tensor_of_its_own(gloo):
    plain = gloo(4, beside_tensor_parallelism, None)
    for codec in (Identity(), TernGrad(), "onebit"):
        for got, wanted in zip(gloo(4, beside_tensor_parallelism, codec), plain, strict=True):
            for step in range(2):
                for a, b in zip(got[step], wanted[step], strict=True):
                    assert a.shape == b.shape == ((16, 40) if a.shape[1] == 40 else (20, 32))
                    if isinstance(codec, Identity):
                        assert np.allclose(a, b, rtol=1e-5, atol=1e-8)
                    else:
                        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.5
                    if isinstance(codec, TernGrad):
                        assert len(np.unique(np.abs(a))) <= 3  # 0, half a scale, a scale


# the call, and what it says
REFUSED_CALLS = [
    (
        lambda model: gradcomp.fsdp.register(model, Block(4), residuals="fp8"),
        "ValueError: residuals must be one of .*fp32.*, got 'fp8'",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, weights="terngrad"),
        "ValueError: weights='terngrad': weights are gathered as 'block8'",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, weights=Block(2)),
        "ValueError: weights=Block.bits=2.*are gathered as 'block8'",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, keep_weights=True),
        "ValueError: keep_weights=True keeps packed weights: say how they are packed",
    ),
    (
        lambda model: gradcomp.fsdp.register(fresh(), "terngrad"),
        "TypeError: no module of this model is wrapped by .*fully_shard; for DDP",
    ),
    (
        lambda model: gradcomp.fsdp.register(model.parameters(), "terngrad"),
        "TypeError: model must be a torch.nn.Module, got generator",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad", precondition=True),
        "TypeError: register has no option 'precondition': FSDP2 leaves averages as shards",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad", slice_numel=64),
        "TypeError: register has no option 'slice_numel': FSDP2 leaves averages as shards",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad", warmup_codec="onebit"),
        "ValueError: warmup_codec=OneBit.* packs the first warmup_steps steps, and warmup_steps is",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad", warmup_steps=dist.get_rank()),
        "PeerMismatch: .*warmup_steps",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad", exclude="nothing"),
        "ValueError: exclude='nothing' matches no parameter",
    ),
    (
        lambda model: gradcomp.fsdp.register(model, "terngrad" if dist.get_rank() else Identity()),
        "PeerMismatch: .*codec",
    ),
    (
        lambda model: ReplicaAverage([fresh()], None),
        (
            "TypeError: no module of this model is wrapped by .*fully_shard; without it there is"
            " gradcomp.GradientAverager"
        ),
    ),
]


def refusals():
    model = wrap(fresh(), True)
    for call, said in REFUSED_CALLS:
        with pytest.raises((TypeError, ValueError, PeerMismatch)) as caught:
            call(model)
        assert re.search(said, f"{caught.type.__name__}: {caught.value}"), caught.value
    loss_of(model, 0, 0).backward()  # torch's own still
    with gradcomp.fsdp.register(model, "onebit") as first:
        for again in (model, model.second):
            with pytest.raises(
                ValueError,
                match=r"has been called for this model .* codec OneBit.*: close\(\) the state",
            ):
                gradcomp.fsdp.register(again, "terngrad")
        loss_of(model, 0, 0).backward()
        assert first.stats.steps > 0, "the first one goes on"
    gradcomp.fsdp.register(model, "terngrad").close()


def test_what_is_refused(gloo):
    gloo(2, refusals)


def misused():
    inner = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
    fully_shard(inner[0])
    said = []
    with gradcomp.fsdp.register(inner, "terngrad"):
        fully_shard(inner[1])
        fully_shard(inner)
        try:
            inner(torch.ones(1, 4)).sum().backward()
        except gradcomp.GradcompError as error:
            said.append(str(error))
    try:
        gradcomp.fsdp.register(
            FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        )
    except TypeError as error:
        said.append(str(error))
    return said


def test_models_that_are_sharded_too_late_or_by_fsdp1(gloo):
    for late, first in gloo(2, misused):
        assert "fully_shard came after gradcomp.fsdp.register for 1 modules (FSDPLinear" in late
        assert (
            "FullyShardedDataParallel is FSDP1: wrap with torch.distributed.fsdp.fully_shard"
            in first
        )


def dropped(door):
    """A training loop in which somebody takes the door away after a step."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = wrap(fresh(), True, **({"mesh": mesh["shard"]} if door == "replicas" else {}))
    optimizer, told = torch.optim.SGD(model.parameters(), lr=0.1), []
    opened = (
        ReplicaAverage(model, mesh["replica"].get_group())
        if door == "replicas"
        else gradcomp.fsdp.register(model, "terngrad")
    )
    del opened  # who registers in a function keeps nothing
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step, dist.get_rank()).backward()
            before = model.first.weight.to_local().clone()
            try:
                optimizer.step()
            except gradcomp.GradcompError as error:
                told.append((step, str(error), torch.equal(before, model.first.weight.to_local())))
            if step == 1:
                for module in model.modules():
                    if isinstance(module, FSDPModule) and door == "replicas":
                        module.set_all_reduce_hook(lambda shard: None)
                    elif isinstance(module, FSDPModule):
                        torch_private.reduce_scatter_as_before(module)
    return told, [str(one.message) for one in warned if "not called" in str(one.message)]


@pytest.mark.parametrize("door", ["replicas", "compress"])
def test_a_hook_that_somebody_replaces_is_found(gloo, door):
    """Replicas would train apart: an error before the step. Gradients that torch reduces after
    all are right: one warning.
    """
    for told, warned in gloo(2, dropped, door):
        if door == "replicas":
            assert [(step, unchanged) for step, _, unchanged in told] == [
                (2, True),
                (3, True),
            ] and not warned
            assert (
                "not called in this step" in told[0][1] and "Make ReplicaAverage last" in told[0][1]
            )
        else:
            assert not told and len(warned) == 1 and "call register last" in warned[0]


def stateful(door):
    """Return what a model made on meta says in three steps that follow the making of its
    optimizer's state.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=mesh["shard" if door == "replicas" else "replica"])
    if door == "compress":
        opened = gradcomp.fsdp.register(model, "terngrad")
        model.to_empty(device="cpu")
    else:
        model.to_empty(device="cpu")
        for layer in model:
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)
        opened = ReplicaAverage(model, mesh["replica"].get_group(), "terngrad")
    with opened, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        nn.init.constant_(model[0].weight, 0.1)
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in warned if "not called" in str(one.message)]


@pytest.mark.parametrize("door", ["replicas", "compress"])
def test_a_step_that_makes_an_optimizers_state_is_none_and_meta_models_come_to_life(gloo, door):
    for warned in gloo(2, stateful, door):
        assert not warned


def as_forward_sees_them(model):
    """Return by name the weights that forward and backward work with."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.unshard()
    out = {name: p.detach().float().clone().numpy() for name, p in model.named_parameters()}
    for module in modules:
        module.reshard()
    return out


def with_packed_weights(finely, weights, policy, prefetched):
    model, rank = fresh(), dist.get_rank()
    whole = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    model = wrap(model, finely, **({"mp_policy": policy} if policy else {}))
    with gradcomp.fsdp.register(
        model, TernGrad(seed=3), weights=weights, min_numel=MIN_NUMEL
    ) as state:
        if prefetched:
            model.first.set_modules_to_forward_prefetch([model.second])
            model.second.set_modules_to_forward_prefetch([model.few, model.unused])
        seen, losses, grads = as_forward_sees_them(model), [], []
        for step in range(2):
            model.zero_grad()
            loss = loss_of(model, step, 0)  # the same images everywhere: so is the loss
            loss.backward()
            losses.append(loss.item())
            grads.append(
                {name: p.grad.to_local().numpy().copy() for name, p in model.named_parameters()}
            )
        kept = {name: p.detach().to_local().numpy().copy() for name, p in model.named_parameters()}
        sent = (
            state.weights_stats.bytes_sent,
            state.weights_stats.steps,
            state.plain,
            state.describe(),
        )
    return whole, seen, losses, grads, kept, sent, rank


@pytest.mark.parametrize("finely", [True, False], ids=["fine", "whole"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("weights", ["block8", "block4", Block(8, group=16), "bfloat16"], ids=str)
def test_weights_are_gathered_as_codes(gloo, weights, world, finely):
    """Forward sees what the reference makes of every rank's chunk, the same on all ranks; shards
    stay exact.
    """
    codec = gradcomp.codecs.resolve(weights)
    if isinstance(codec, Block):
        codec = Block(codec.bits, group=codec.group, error_feedback=False)

    def decoded(chunk, shape):
        return average(
            [chunk.reshape(-1)], codec, Strategy("all_gather"), step=0, parameter=0, shape=shape
        )[0].reshape(chunk.shape)

    results = gloo(world, with_packed_weights, finely, weights, None, False)
    for whole, seen, losses, _, kept, sent, rank in results:
        assert (
            losses == pytest.approx(results[0][2], rel=REDUCED)
            and sent[2] == 0
            and "weights gathered as" in sent[3]
        )
        for name, before in whole.items():
            assert kept[name].tobytes() == chunk_of(before, world, rank).tobytes(), name
            chunks = [chunk_of(before, world, r) for r in range(world)]
            if before.size >= MIN_NUMEL:
                chunks = [decoded(c, before.shape) if c.size else c for c in chunks]
            assert seen[name].tobytes() == np.concatenate(chunks).tobytes(), name


def test_weights_that_arrive_early_are_the_same(gloo):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for one in (None, policy):
        plain, early = (
            gloo(2, with_packed_weights, True, "block8", one, prefetched)
            for prefetched in (False, True)
        )
        for a, b in zip(plain, early, strict=True):
            assert a[2] == b[2] and a[5][:3] == b[5][:3]
            assert all(
                x[name].tobytes() == y[name].tobytes()
                for x, y in zip(a[3], b[3], strict=True)
                for name in x
            )


def bytes_of_weights(weights):
    model = fully_shard(nn.Linear(1024, 512, bias=False))
    with gradcomp.fsdp.register(model, "terngrad", weights=weights) as state:
        with torch.no_grad():
            model(torch.randn(4, 1024))
        return state.weights_stats.bytes_sent, state.weights_stats.compression_ratio


def test_what_weights_send(gloo):
    for weights, bits in (("block8", 8), ("block4", 4), ("bfloat16", 16)):
        for nbytes, ratio in gloo(2, bytes_of_weights, weights):
            assert nbytes == pytest.approx(1024 * 512 / 2 * bits / 8, rel=0.012)
            assert ratio == pytest.approx(32 / bits, rel=0.012)


def with_a_weight_that_is_nan():
    model, rank = wrap(fresh(), True), dist.get_rank()
    with (
        gradcomp.fsdp.register(model, "terngrad", weights="block8", min_numel=0) as state,
        torch.no_grad(),
    ):
        if rank == 1:
            model.first.weight.to_local()[0, 0] = math.nan
        bad = model(torch.ones(1, 40)).isnan().all().item()
        if rank == 1:
            model.first.weight.to_local()[0, 0] = 0.5
        return (
            bad,
            model(torch.ones(1, 40)).isfinite().all().item(),
            state.weights_stats.nonfinite_buckets,
        )


def test_a_weight_that_is_not_finite_is_seen_by_every_rank(gloo):
    assert gloo(2, with_a_weight_that_is_nan) == [(True, True, 1)] * 2


class Twice(nn.Module):
    """A module that one backward pass goes through twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(40, 40)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


def twice(hooked):
    torch.manual_seed(0)
    model = Twice()
    fully_shard(model.inner)
    fully_shard(model)
    seen = []
    if hooked:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    with gradcomp.fsdp.register(model, Identity(), min_numel=0):
        for step in range(2):  # gradients add up
            model(
                torch.randn(
                    8, 40, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())
                )
            ).square().mean().backward()
        out = [p.grad.to_local().numpy().copy() for p in model.parameters()]
    return out, [bool(one.abs().sum() > 0 and one.isfinite().all()) for one in seen]


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_averages_that_somebody_reads_during_backward_are_there_in_time(gloo, hooked):
    """Gradients that add up, and hooks that read them, get averages at once; others when the
    backward pass is over.
    """
    torch.manual_seed(0)
    model = Twice()
    for step in range(2):
        for rank in range(2):
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            (model(x).square().mean() / 2).backward()
    for rank, (got, seen) in enumerate(gloo(2, twice, hooked)):
        assert all(seen) and bool(seen) == hooked
        for array, p in zip(got, model.parameters(), strict=True):
            assert np.allclose(array, chunk_of(p.grad.numpy(), 2, rank), rtol=1e-4, atol=1e-7)


class Blocks(nn.Module):
    """Three layers, which `recompute` calls once more in backward."""

    def __init__(self, recompute=None):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.recompute = recompute

    def forward(self, x):
        for layer in self.layers:
            x = (
                layer(x).tanh()
                if self.recompute is None
                else checkpoint(lambda x, own=layer: own(x).tanh(), x, use_reentrant=self.recompute)
            )
        return x


def with_kept_weights(keep, recompute=None, between="", reshard=None):
    """Train two steps; `between` forward and backward something happens to the weights. Return
    gradients, gathers, bytes.
    """
    torch.manual_seed(0)
    model, rank, grads = Blocks(recompute), dist.get_rank(), []
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    with gradcomp.fsdp.register(
        model, Identity(), weights="block8", keep_weights=keep, min_numel=0
    ) as state:
        assert (", which backward takes from forward" in state.describe()) == keep
        for step in range(2):
            model.zero_grad()
            x = torch.randn(
                8, 40, generator=torch.Generator().manual_seed(10 * step + rank)
            ).requires_grad_()
            loss = model(x).square().mean()
            if between in ("looked at", "changed"):
                shards = [p.to_local() for p in model.parameters()]
                before = [shard.detach().clone() for shard in shards]
                for shard in shards:
                    shard.data.mul_(1.5)
                if between == "looked at":  # an average of weights is
                    with torch.no_grad():
                        model(x)
                    for shard, old in zip(shards, before, strict=True):
                        shard.data.copy_(old)
            loss.backward()
            grads.append([p.grad.to_local().numpy().tobytes() for p in model.parameters()])
            # backward and step: with gradients on, no checkpoints, and no backward
            if between == "evaluated":
                model.recompute = None
                model(x)
                model.recompute = recompute
            with torch.no_grad():
                for p in model.parameters():
                    p.to_local().sub_(p.grad.to_local(), alpha=0.1)
        sent = state.weights_stats
        return grads, sent.steps, sent.bytes_sent, sent.baseline_bytes


@pytest.mark.parametrize("recompute", [None, False, True], ids=["plain", "recomputed", "reentrant"])
def test_backward_decodes_what_forward_has_gathered(gloo, recompute):
    """Half of the gathers, and to the bit what comes of weights that are never given away."""
    cases = (True, None), (False, None), (True, False)  # kept?, given away after forward?
    kept, twice, never = (
        gloo(2, with_kept_weights, keep, recompute, "", reshard) for keep, reshard in cases
    )
    for one, other, whole in zip(kept, twice, never, strict=True):
        # Block(8) rounds to the nearest: no draw tells forward from backward
        assert one[0] == whole[0] == other[0]
        # nothing says in a reentrant forward that there will be a backward: each gathers for itself
        if recompute:
            assert one[1:] == other[1:]
        else:
            assert (
                (one[1], other[1], whole[1]) == (2 * 3, 4 * 3, 2 * 3)
                and 2 * one[2] == other[2]
                and one[3] == other[3]
            )


@pytest.mark.parametrize("between", ["looked at", "changed"])
def test_gradients_are_of_the_weights_that_forward_has_used(gloo, between):
    """Whatever happens to shards before backward; who gathers them meanwhile without gradients
    has them gathered once more.
    """
    cases = (True, ""), (True, between), (False, between)
    for usual, other, twice in zip(
        *(gloo(2, with_kept_weights, keep, None, then) for keep, then in cases), strict=True
    ):
        assert (
            other[0][0] == usual[0][0]
            and other[1] + (2 * 3 if between == "changed" else 0) == twice[1]
        )
        assert (other[0][1] == usual[0][1]) == (between == "looked at")


def test_weights_kept_by_a_forward_without_backward_are_not_the_next_steps(gloo):
    """A reentrant checkpoint's forward gathers for itself; its backward took the weights of the
    evaluation before it.
    """
    kept, never = (gloo(2, with_kept_weights, keep, True, "evaluated") for keep in (True, False))
    for one, other in zip(kept, never, strict=True):
        assert one[0] == other[0]


def with_a_weight_that_is_nan_kept():
    model, rank = wrap(fresh(), True, reshard_after_forward=True), dist.get_rank()
    with gradcomp.fsdp.register(
        model, "terngrad", weights="block8", keep_weights=True, min_numel=0
    ) as state:
        if rank == 1:
            model.first.weight.to_local().data[0, 0] = math.nan
        loss_of(model, 0, rank).backward()
        bad = bool(model.second.weight.grad.to_local().isnan().all())
        if rank == 1:
            model.first.weight.to_local().data[0, 0] = 0.5
        model.zero_grad()
        loss_of(model, 0, rank).backward()
        good = bool(model.second.weight.grad.to_local().isfinite().all())
    gathered = state.weights_stats.steps
    model.zero_grad()
    loss_of(model, 0, rank).backward()  # as torch does it
    return bad, good, state.weights_stats.steps - gathered


def test_weights_that_are_not_finite_are_not_kept_and_a_closed_state_gathers_nothing(gloo):
    assert gloo(2, with_a_weight_that_is_nan_kept) == [(True, True, 0)] * 2


class Either(nn.Module):
    """Two layers of one shape, the second one first where a rank says so."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x, swapped):
        first, second = (self.right, self.left) if swapped else (self.left, self.right)
        return second(first(x).tanh())


def in_another_order(codec, weights, trains):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = wrap(Either(), True)
    with gradcomp.fsdp.register(model, codec, weights=weights, min_numel=0, timeout_s=20) as state:
        model(torch.randn(8, 40), False).square().mean().backward()
        draws = state.stats.steps
        try:
            with torch.set_grad_enabled(trains):
                loss = model(torch.randn(8, 40), rank == 2).square().mean()
            if trains:
                loss.backward()
        except PeerMismatch as error:
            return draws, error.field, error.rank, str(error)
        return draws, [p.grad.to_local().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("codec", "weights", "trains"),
    [
        ("terngrad", None, True),
        ("onebit", None, True),
        ("onebit", "block8", True),
        ("onebit", "block8", False),
    ],
)
def test_modules_of_one_shape_in_another_order_are_refused_on_every_rank(
    gloo, codec, weights, trains
):
    """Payloads did not say whose they were: a rank averaged gradients (or took weights) of one
    module for another's, without an error.
    """
    for rank, (draws, *got) in enumerate(gloo(3, in_another_order, codec, weights, trains)):
        assert draws == 2
        assert len(got) == 3, "averaged"
        field, peer, said = got
        assert field == "module" and peer == (0 if rank == 2 else 2)
        assert re.search(
            r"module: rank \d has (left, rank \d has right|right, rank \d has left);", said
        ), said


def going_on_alone(codec, weights):
    """Rank 1 leaves after a forward; return what rank 0 catches in its backward and in what it
    tries afterwards.
    """
    rank, said = dist.get_rank(), []
    model = wrap(Either(), True, reshard_after_forward=weights is not None)
    state = gradcomp.fsdp.register(model, codec, weights=weights, min_numel=0, timeout_s=20)
    model.left.set_modules_to_backward_prefetch([model.left])  # gathers nothing by torch later on
    out = model(torch.randn(8, 40), False)
    if rank == 1:
        state.close()
        dist.barrier()  # torch's own group stays
        return said

    def tries():
        yield lambda: out.square().mean().backward()
        if weights is None:  # the scale round fails before the layer's whole weights are given away
            yield (
                lambda: (
                    model.left(torch.randn(8, 40, requires_grad=True)).square().mean().backward()
                )
            )
        else:
            yield lambda: model(torch.randn(8, 40), False)
            yield lambda: model(torch.randn(8, 40), False)
            yield lambda: model.right(torch.randn(8, 40))

    for attempt in tries():
        try:
            attempt()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    state.close()
    return said


@pytest.mark.parametrize(("codec", "weights"), [("onebit", "block8"), ("terngrad", None)])
def test_after_a_lost_rank_every_exchange_raises_peer_lost(gloo, codec, weights):
    """A raw ConnectionError came out of what had not failed before, so that ``except PeerLost``
    missed it.
    """
    said, _ = gloo(2, going_on_alone, codec, weights)
    assert len(said) == (4 if weights else 2) and all(
        one.startswith("PeerLost: lost a peer in ") for one in said
    ), said


def lost_in_backward(folder, weights):
    """Rank 2 dies in backward between the reduce-scatters of the last layer and of the one before
    it.

    The others save what they caught and their gradients, before and after a step.
    """
    rank = dist.get_rank()
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for layer in model.layers:  # none is gathered for backward before its turn
        layer.set_modules_to_backward_prefetch([layer])
    state = gradcomp.fsdp.register(model, OneBit(), weights=weights, min_numel=0, timeout_s=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def die(_):
        time.sleep(0.5)  # what it has begun to send arrives
        os._exit(1)

    if rank == 2:
        model.layers[1].register_forward_hook(
            lambda module, args, out: out.register_hook(die) and None
        )
    raised = None
    try:
        model(torch.randn(8, 40)).square().mean().backward()
    except (RuntimeError, gradcomp.GradcompError) as error:
        raised = type(error).__name__

    def found():
        return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]

    before = found()
    optimizer.step()
    torch.save((raised, before, found()), f"{folder}/{rank}")
    state.close()


@pytest.mark.parametrize("weights", ["block8", None])
def test_a_rank_lost_in_backward_leaves_nan_or_nothing(gloo, tmp_path, weights):
    """Uninitialised memory stayed in ``.grad`` (mean sizes of 1e33), and the optimizer applied it.

    Without `weights` torch's own all_gather raises its RuntimeError, and nobody finishes what is
    under way. Averages of modules that were complete are replaced at the optimizer's step.
    """
    with pytest.raises(RankFailed, match="rank 2 gave no result"):
        gloo(3, lost_in_backward, str(tmp_path), weights)
    for rank in range(2):
        got, before, after = torch.load(tmp_path / str(rank))
        # or it died before it had sent all
        assert got == "PeerLost" or (got == "RuntimeError" and weights is None)
        assert all(grad is None or grad.isnan().all() for grad in after), after
        unfinished = before if got == "PeerLost" else before[:4]
        assert all(grad is None or grad.isnan().all() for grad in unfinished), before
        assert sum(grad is not None for grad in after) >= 2


def gathered_bytes(comm, fill, bad):
    """Return the payloads of both ranks after a gather whose buffer had `fill` in every byte
    before.
    """
    codec, numels = Block(8, error_feedback=False), (190, 77)
    slots = [[Slot(rank, numel, 10, True, 190 * rank)] for rank, numel in enumerate(numels)]
    pool = BufferPool()
    pool.give(torch.full((4096,), fill, dtype=torch.uint8))
    gather = ShardGather(codec, slots, 190 * comm.rank, comm, Stats(), pool, timeout_s=20)
    values = torch.randn(numels[comm.rank], generator=torch.Generator().manual_seed(comm.rank))
    if bad:
        values[5] = math.nan
    gather.start(values, 3)
    gather.finish(torch.empty(267))
    (room,) = pool._free
    nbytes = gather.sent_nbytes
    return room[nbytes : 3 * nbytes].tolist()


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nan"])
def test_bytes_of_weights_do_not_depend_on_the_memory_used(bad):
    """The shorter chunk's message ended in whatever the buffer had held: other values of this
    process.
    """
    (first, _), (second, _) = (run_local(2, gathered_bytes, fill, bad) for fill in (0xA5, 0x00))
    assert first == second and len(first) > 2 * 190


def test_memory_is_used_again_when_nobody_holds_a_part_of_it(monkeypatch):
    def allocate(numel, dtype, device):
        return torch.empty(numel, dtype=dtype, device=device)

    reused, like = torch_private.ReusedTensors(allocate), (torch.float32, torch.device("cpu"))
    first = reused.take(100, *like)
    at, part = first.data_ptr(), first[20:30].view(2, 5)
    del first
    second = reused.take(100, *like)
    assert second.data_ptr() != at
    del part
    assert reused.take(100, *like).data_ptr() == at and reused.take(101, *like).numel() == 101
    # a torch that does not tell: new memory always
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    blind = torch_private.ReusedTensors(allocate)
    held = [blind.take(100, *like) for _ in range(3)]
    del held[0]
    assert blind.take(100, *like).data_ptr() not in {one.data_ptr() for one in held}


# ---- several modules in flight -------------------------------------------------------------------


def shards_of(model):
    return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]


def in_steps(state, model):
    return [run(model, [step]) for step in range(3)]


def adding_up(state, model):
    """The first half of every second gradient stays with its rank."""
    out = []
    for micro in range(4):
        model.set_requires_gradient_sync(micro % 2 == 1)
        loss_of(model, micro, dist.get_rank()).backward()
        out += shards_of(model) if micro % 2 else []
    return out


def with_some_frozen(state, model):
    out = []
    for step, frozen in enumerate((False, True, False)):
        model.second.weight.requires_grad_(not frozen)
        out += run(model, [step])
    return out


def not_finite_in_one_module(state, model):
    out = []
    for step in range(3):
        model.zero_grad()
        factor = math.inf if (dist.get_rank(), step) == (1, 1) else 0.0
        loss = loss_of(model, step, dist.get_rank())
        loss = loss + model.unused(torch.ones(1, 3)).sum() * factor
        loss.backward()
        out += shards_of(model)
        assert [bool(one.isnan().any()) for one in out[-8:]] == [False] * 6 + [step == 1] * 2
    return out


def without_all_gradients(state, model):
    """The module `unused` has none."""
    out = []
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, dist.get_rank(), everything=step == 1).backward()
        out += shards_of(model)
    return out


def ends_with_an_error(model, step):
    """Raise at the end of a backward pass, while averages are under way; torch does not go on after
    an error in the middle of one.
    """

    def end():
        raise RuntimeError("ended")

    def ask(*_):
        torch_private.after_backward(end)

    handle = model.few.register_forward_hook(
        lambda module, args, out: out.register_hook(ask) and None
    )
    model.zero_grad()
    with pytest.raises(RuntimeError, match="ended"):
        loss_of(model, step, dist.get_rank()).backward()
    handle.remove()


def after_an_error(state, model):
    out = run(model, [0])
    ends_with_an_error(model, 1)
    assert any(grad.isnan().all() for grad in shards_of(model))
    return out + run(model, [2]) + run(model, [3])


def in_flight(count, scenario, codec, wrapping, replicas=False):
    """Return gradients, residuals and steps, and how many modules were under way at most."""
    if replicas:
        wrapping["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, under_way, most = wrap(fresh(), True, **wrapping), [], 0
    encode, finish = ReduceScatter.encode, ReduceScatter.finish

    def encodes(self, *args):
        nonlocal most
        encode(self, *args)
        under_way.append(self)
        most = max(most, len(under_way))

    def finishes(self, *args):
        under_way.remove(self)
        finish(self, *args)

    with (
        mock.patch("gradcomp.fsdp.reduce.IN_FLIGHT", count),
        mock.patch.object(ReduceScatter, "encode", encodes),
        mock.patch.object(ReduceScatter, "finish", finishes),
        gradcomp.fsdp.register(model, codec, min_numel=MIN_NUMEL) as state,
    ):
        found = scenario(state, model)
        saved = state.state_dict()
        return digest_of(found, parts_of(saved)["residual"], steps_of(saved)), most


def digest_of(*values):
    """Return the bytes of all tensors of nested values, everything else as text."""
    out = []
    for value in values:
        if isinstance(value, torch.Tensor):
            out.append(value.numpy().tobytes())
        elif isinstance(value, (dict, list, tuple)):
            out += [
                digest_of(one) for one in (value.values() if isinstance(value, dict) else value)
            ]
        else:
            out.append(str(value).encode())
    return hashlib.sha256(b"/".join(out)).digest()


HALF = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
# what happens, codec, options of `fully_shard` or "replicas", modules under way at most
SCENARIOS = [
    (in_steps, OneBit(), {}, 2),
    (in_steps, OneBit(rotate=True), {}, 2),
    (in_steps, Ternary(), {}, 2),
    (in_steps, OneBit(), HALF, 1),
    (in_steps, OneBit(), "replicas", 1),
    (adding_up, OneBit(), {}, 2),
    (adding_up, Block(4), "replicas", 1),
    (with_some_frozen, OneBit(), {}, 2),
    (not_finite_in_one_module, OneBit(), {}, 2),
    (without_all_gradients, OneBit(), {}, 2),
    (after_an_error, OneBit(), {}, 2),
]


@pytest.mark.parametrize(("scenario", "codec", "wrapping", "most"), SCENARIOS)
def test_modules_in_flight_change_no_gradient_and_no_residual(
    gloo, scenario, codec, wrapping, most
):
    """Planes were shared: the residuals of a module that had gone out were those of the next."""
    replicas = wrapping == "replicas"
    world = 4 if replicas else 2
    wrapping = {} if replicas else wrapping
    one, two = (
        gloo(world, in_flight, count, scenario, codec, wrapping, replicas) for count in (1, 2)
    )
    assert [found for found, _ in one] == [found for found, _ in two]
    assert [(a, b) for (_, a), (_, b) in zip(one, two, strict=True)] == [(1, most)] * world


def in_another_order_everywhere(count):
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, out = wrap(Either(), True), []
    with (
        mock.patch("gradcomp.fsdp.reduce.IN_FLIGHT", count),
        gradcomp.fsdp.register(model, OneBit(), min_numel=0) as state,
    ):
        for step in range(4):
            model.zero_grad()
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x, step % 2 == 1).square().mean().backward()
            out += shards_of(model)
        return digest_of(out, parts_of(state.state_dict())["residual"])


def test_modules_may_come_in_another_order_on_every_rank(gloo):
    assert gloo(2, in_another_order_everywhere, 1) == gloo(2, in_another_order_everywhere, 2)


def loaded_after_an_error(fails):
    model = wrap(fresh(), True)
    with gradcomp.fsdp.register(model, OneBit(), min_numel=MIN_NUMEL) as state:
        run(model, range(2))
        saved = copy.deepcopy(state.state_dict())
        if fails:
            ends_with_an_error(model, 2)
            state.load_state_dict(saved)
        out = run(model, [2, 3])
        assert all(grad.isfinite().all() for grad in out)
        return digest_of(out, parts_of(state.state_dict())["residual"])


def test_a_state_that_is_loaded_after_an_error_is_not_written_over(gloo):
    """Residuals of the modules under way came into force when they arrived, in the next backward
    pass.
    """
    assert gloo(2, loaded_after_an_error, True) == gloo(2, loaded_after_an_error, False)


def lost_with_two_under_way():
    """Rank 1 leaves after the gradients of the last of three layers; return what rank 0 catches
    then, and in a backward pass of each layer, and whether it is left with a gradient.
    """
    rank, said = dist.get_rank(), []
    torch.manual_seed(0)
    model = Blocks()
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model)
    model.set_reshard_after_backward(False)  # nothing is gathered again
    state = gradcomp.fsdp.register(model, OneBit(), min_numel=0, timeout_s=20)

    def leave(_):
        time.sleep(0.5)  # what it has begun to send arrives
        state.close()
        raise RuntimeError("left")

    if rank == 1:
        model.layers[1].register_forward_hook(
            lambda module, args, out: out.register_hook(leave) and None
        )
    x = torch.randn(8, 40, requires_grad=True)
    for part in (model, *model.layers):
        try:
            part(x).square().mean().backward()
        except (RuntimeError, gradcomp.GradcompError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if rank == 1:
            break
    left = any(bool(p.isfinite().any()) for p in shards_of(model) if p is not None)
    dist.barrier()
    state.close()
    return said, left


def test_a_closed_state_ends_all_modules_under_way(gloo):
    """Its peer waited for timeout_s: averages under way kept the connections."""
    said, left = gloo(2, lost_with_two_under_way)[0]
    assert len(said) == 4 and not left
    assert all(re.search("PeerLost: lost a peer in .* rank 1 closed", one) for one in said), said


def sampled():
    """Return what quality() says after one step, and the same from gradient and residual."""
    plain, model = fresh(), wrap(fresh(), True)
    loss_of(plain, 0, dist.get_rank()).backward()
    with gradcomp.fsdp.register(model, OneBit(), min_numel=MIN_NUMEL) as state:
        assert not state.quality().rows
        run(model, [0])
        residuals = parts_of(state.state_dict())["residual"]
        wanted = {}
        for name, p in plain.named_parameters():
            if name in residuals:
                g, left = p.grad.flatten().double(), residuals[name].flatten().double()
                error = float(left.norm() / g.norm())
                cosine = float(torch.cosine_similarity(g - left, g, dim=0))
                wanted[name] = (name, 0, g.numel(), error, cosine, error)
        return {name: astuple(row)[:-1] for name, row in state.quality().rows.items()}, wanted


def test_quality_is_of_whole_parameters(gloo):
    for found, wanted in gloo(2, sampled):
        assert list(found) == list(wanted) and len(found) > 2
        for name, row in found.items():
            assert row == pytest.approx(wanted[name], rel=1e-4), name
