"""`gradcomp.fsdp.register`: shards against the reference, wrappings, accumulation, dtypes, bad
days. Most tests are what every rank does.
"""

import contextlib
import copy
import hashlib
import math
import os
import re
import time
import tracemalloc
from dataclasses import astuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _expected import average
from _kinds import check_kinds
from _models import bits
from _ranks import RankFailed, each_rank, run_local, warnings_of
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
from gradcomp import Block, CorruptPayload, Identity, OneBit, PeerMismatch, Ternary, TernGrad
from gradcomp.comm import torch_private
from gradcomp.exchange.bucket import ExchangeOptions
from gradcomp.exchange.gather import BufferPool, ShardGather
from gradcomp.exchange.sizing import Strategy, choose
from gradcomp.exchange.stats import Stats
from gradcomp.fsdp.reduce import ReduceScatter
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
check_kinds(CODECS, without=("block8", "entropy"))
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


def loss_of(model, step, rank=None, everything=True, dtype=torch.float32):
    """Return the loss of this rank's minibatch, or of another's."""
    seed = 100 * step + (dist.get_rank() if rank is None else rank)
    x = torch.randint(-2, 3, (8, 40), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x, everything).square().mean()


def noise(step, rank=None):
    """Return a minibatch of 40 features of this rank, or of another."""
    seed = 10 * step + (dist.get_rank() if rank is None else rank)
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))


def wrap(model, finely=True, **options):
    for module in model.children() if finely else []:
        fully_shard(module, **options)
    return fully_shard(model, **options)


def mesh_of(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def registered(model, codec, **options):
    return gradcomp.fsdp.register(model, codec, **{"min_numel": MIN_NUMEL} | options)


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


def shards_of(model):
    """Return this rank's part of every gradient by name."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: grad.to_local().numpy().copy() for name, grad in found.items()}


def same(got, wanted):
    """Assert that shards are the same bits as those of the same names."""
    for name, shard in got.items():
        assert shard.shape == wanted[name].shape, name
        assert shard.tobytes() == wanted[name].tobytes(), name


def chunk_of(array, world, rank):
    rows = -(-len(array) // world)
    return array[rank * rows : (rank + 1) * rows]


class Expected:
    """This rank's shards from the reference: every chunk is a tensor of its own.

    `rank`, `world`: place and number of the ranks that share. `ranks`: whose random numbers are
    drawn.
    """

    def __init__(self, codec, rank=None, world=None, ranks=None):
        self.codec, self.ranks, self.residuals = codec, ranks, {}
        self.rank = dist.get_rank() if rank is None else rank
        self.world = world or dist.get_world_size()

    def __call__(self, step, grads=None):
        out, world = {}, self.world
        grads = grads or gradients(step, world)
        for number, name in enumerate(sorted(grads)):
            chunks = [chunk_of(g, world, self.rank) for g in grads[name]]
            whole, flat = grads[name][0], [c.reshape(-1) for c in chunks]
            if not flat[0].size or whole.size < MIN_NUMEL:
                mean = ref.float_average(flat) if flat[0].size else flat[0]
            else:
                mean, self.residuals[name], _ = average(
                    flat,
                    self.codec,
                    Strategy("all_gather"),  # one phase
                    step=step,
                    parameter=number * world + self.rank,
                    shape=whole.shape,
                    residuals=self.residuals.get(name),
                    ranks=self.ranks,
                )
            out[name] = mean.reshape(chunks[0].shape)
        return out


def trained(codec, steps, finely=True, wrapping=None, bad=None, **settings):
    """Return the shards of every step's gradients, what `describe` says, and bytes sent."""
    model, out = wrap(fresh(), finely, **(wrapping or {})), []
    with registered(model, codec, **settings) as state:
        for step in range(steps):
            model.zero_grad()
            loss = loss_of(model, step)
            (loss * math.inf if bad == (dist.get_rank(), step) else loss).backward()
            out.append(shards_of(model))
        return out, state.describe(), state.stats.bytes_sent


def run(model, steps):
    """Return this rank's part of the gradients after these steps."""
    for step in steps:
        model.zero_grad()
        loss_of(model, step).backward()
    return [p.grad.to_local().clone() for p in model.parameters() if p.requires_grad]


# ---- what is computed ----------------------------------------------------------------------------


def test_gradients_of_this_model_are_exact():
    """So that bits may be compared: with normal values, float32 sums differ from float64 ones in
    thousands of places.
    """
    for step, rank in np.ndindex(3, 4):
        model, exact = fresh(), fresh().double()
        loss_of(model, step, rank).backward()
        loss_of(exact, step, rank, dtype=torch.float64).backward()
        for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
            assert torch.equal(p.grad.double(), q.grad), name


@pytest.mark.parametrize("finely", [True, False], ids=["fine", "whole"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CODECS)
@each_rank()
def test_shards_are_the_references(name, world, finely):
    """Whatever the wrapping: what a chunk becomes depends on parameter, rank and step alone."""
    expected = Expected(CODECS[name])
    found, said, _ = trained(CODECS[name], 3, finely)
    for step, shards in enumerate(found):
        same(shards, expected(step))
    assert "5 of 8 parameters of" in said and f"over {world} ranks" in said


@each_rank(2)
def test_a_warm_up_is_averaged_in_fp32_first():
    """Its gradients leave no residuals, and its steps count for what comes after it."""
    found, said, _ = trained(OneBit(), 4, warmup_steps=2)
    plain, expected = Expected(Identity()), Expected(OneBit())
    for step, shards in enumerate(found):
        same(shards, (plain if step < 2 else expected)(step))
    assert "from step 2 on (Identity(" in said


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
    ],
)
@each_rank(2)
def test_options_of_fully_shard(options):
    expected = Expected(TernGrad(seed=3))
    for step, shards in enumerate(trained(TernGrad(seed=3), 2, wrapping=options)[0]):
        same(shards, expected(step))


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@each_rank(2)
def test_gradients_in_half_precision(dtype, most):
    """float16 is a sum for FSDP, of gradients that it has divided before."""
    model = wrap(fresh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    with registered(model, Identity(), min_numel=0) as state:
        loss_of(model, 0).backward()
        assert state.plain == 0
    for name, got in shards_of(model).items():
        mean = np.mean(gradients(0, 2)[name], 0)
        wanted = chunk_of(mean, 2, dist.get_rank())
        assert np.abs(got - wanted).max(initial=0) < most * np.abs(mean).max(initial=1e-30)


@each_rank(2)
def test_a_value_that_is_not_finite_leaves_residuals_alone():
    """They are as if there had been no step between; averages are in test_conformance.py."""
    found, expected = trained(OneBit(), 3, bad=(1, 1))[0], Expected(OneBit())
    for step in (0, 2):
        same(found[step], expected(step))


@each_rank(2)
def test_gradients_that_accumulate_are_exchanged_once():
    model = wrap(fresh())
    with registered(model, TernGrad(seed=3)) as state:
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)
            loss_of(model, micro).backward()
        assert state.stats.steps == 4  # modules
    same(shards_of(model), Expected(TernGrad(seed=3))(0, gradients(0, 2, count=3)))


@pytest.mark.parametrize("finely", [True, False])
@each_rank(2)
def test_parameters_without_gradients(finely):
    """A module all of whose parameters have none exchanges nothing; one that lacks some goes
    torch's way, and says so once.
    """
    model = wrap(fresh(), finely)
    with registered(model, TernGrad()) as state, warnings_of("torch sends it uncompressed") as said:
        for step in range(2):
            loss_of(model, step, everything=False).backward()
        assert state.plain == (0 if finely else 2)
    assert len(said) == (not finely)
    assert model.first.weight.grad.to_local().any() and model.unused.weight.grad is None


@pytest.mark.parametrize("assign", [False, True])
@each_rank(2)
def test_parameters_that_are_frozen_on_the_way(assign):
    """And thawed again: the others' gradients are those of their own numbers. Loading may put other
    parameters in their place.
    """
    model, expected = wrap(fresh(), False), Expected(TernGrad(seed=3))
    with registered(model, TernGrad(seed=3)) as state:
        same_weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(same_weights, assign=assign)
        for step, frozen in enumerate((False, True, False)):
            model.second.weight.requires_grad_(not frozen)
            run(model, [step])
            assert ("second.weight" in shards_of(model)) != frozen
            same(shards_of(model), expected(step))
        assert state.plain == 0


def bytes_of(codec, **settings):
    """Return the stats of gradients and of weights of one layer's step."""
    model = fully_shard(nn.Linear(1024, 512, bias=False))
    with gradcomp.fsdp.register(model, codec, **settings) as state:
        with torch.set_grad_enabled("weights" not in settings):
            out = model(torch.randn(4, 1024))
        if out.requires_grad:
            out.sum().backward()
        return state.stats, state.weights_stats


@each_rank(2)
def test_what_is_sent():
    """One phase of 2 bits, where gloo's own reduce-scatter sends a ring all_reduce in fp32; a
    packed warm-up as packed; weights as they are packed.
    """
    packed = {"warmup_steps": 2, "warmup_codec": Block(4)}
    for codec, settings, sent in (
        (TernGrad(), {}, 2),
        (Identity("bf16"), {}, 16),
        (Identity(), {}, 32),
        (OneBit(), {"warmup_steps": 2}, 32),
        (OneBit(), packed, 4),
    ):
        stats, _ = bytes_of(codec, **settings)
        assert stats.bytes_sent == pytest.approx(1024 * 512 / 2 * sent / 8, rel=0.012)
        assert stats.baseline_bytes == 1024 * 512 * 4
    for weights, sent in (("block8", 8), ("block4", 4), ("bfloat16", 16)):
        _, stats = bytes_of("terngrad", weights=weights)
        assert stats.bytes_sent == pytest.approx(1024 * 512 / 2 * sent / 8, rel=0.012)
        assert stats.compression_ratio == pytest.approx(32 / sent, rel=0.012)


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("terngrad", {}),
        ("onebit", {}),
        (Block(2), {"residuals": "bf16"}),
        ("onebit", {"warmup_steps": 3, "warmup_codec": Block(4)}),
        ("terngrad", {"warmup_steps": 1, "warmup_codec": "onebit"}),
    ],
    ids=str,
)
@each_rank(2)
def test_a_resumed_run_is_the_same_run_in_another_wrapping(codec, settings, tmp_path):
    """From a state, from a checkpoint of torch's, by `load`."""
    options = {"min_numel": 0, **settings}
    model, folder = wrap(fresh()), str(tmp_path)
    with registered(model, codec, **options) as state:
        run(model, range(2))
        saved = copy.deepcopy(state.state_dict())
        dcp.save({"model": model.state_dict(), "gradcomp": state}, checkpoint_id=folder)
        whole = run(model, range(2, 4))
    model(torch.zeros(1, 40)).sum().backward()  # torch's own again
    for load in (
        lambda state, _: state.load_state_dict(saved),
        lambda state, weights: dcp.load(
            {"model": weights, "gradcomp": state}, checkpoint_id=folder
        ),
        lambda state, _: state.load(folder),
    ):
        model = wrap(fresh(), False)
        with registered(model, codec, **options) as state:
            load(state, model.state_dict())
            assert bits(run(model, range(2, 4))) == bits(whole)


def partly_frozen(frozen):
    """Return the model, its first weight frozen if `frozen`."""
    model = fresh()
    model.first.weight.requires_grad_(not frozen)
    return model


def steps_of(state):
    return [step for _, step in state["extra"]["steps"]]


def saved_by(folder, frozen=False):
    """Return the state after two steps, and save all ranks' in a folder."""
    model = wrap(partly_frozen(frozen))
    with registered(model, "onebit") as state:
        run(model, range(2))
        dcp.save({"gradcomp": state}, checkpoint_id=folder)
        return state.state_dict()


def ways_to_load(folder, states):
    """Yield functions that load a state of two ranks into one of another number of them."""

    def load_all(state):
        world = dist.get_world_size()
        said = f"values of rank . are missing: the run had 2 ranks, this one has {world}"
        with pytest.raises(ValueError, match=said):
            state.load_state_dict(states[0])
        state.load_state_dict(states)

    return load_all, lambda state: state.load(folder)


def goes_on_with(folder, states):
    """Return the residuals of all names after loading, by both ways."""
    out = []
    for load in ways_to_load(folder, states):
        with registered(wrap(fresh(), False), "onebit") as state:
            load(state)
            after = state.state_dict()
            out.append(parts_of(after)["residual"])
            assert steps_of(after) == [2] * 8
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
                assert torch.equal(tensor, ((one + two) / 2).float()) and tensor.any(), name


def goes_on_alone(folder, states, frozen):
    """Return how far the first gradients after loading are from exact ones, by name, by both
    ways; and the state of a run of one rank.
    """
    out, exact = [], {name: grads[0] for name, grads in gradients(2, 1).items()}
    for load in ways_to_load(folder, states):
        model = wrap(partly_frozen(frozen), False)
        with registered(model, "onebit") as state:
            single = state.state_dict()
            load(state)
            # what is not paid yet is saved, too
            state.load_state_dict(copy.deepcopy(state.state_dict()))
            run(model, [2])
            out.append({name: got - exact[name] for name, got in shards_of(model).items()})
            assert not parts_of(state.state_dict())["residual"]
            run(model, [2])
            same(shards_of(model), exact)
    return out, single


def takes(single):
    model = wrap(fresh(), False)
    with registered(model, "onebit") as state:
        run(model, range(2))
        state.load_state_dict(single)
        after = state.state_dict()
        assert steps_of(after) == [0] * 8
        assert [t.any().item() for t in parts_of(after)["residual"].values()] == [False] * 5


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
            none = torch.zeros(got.shape)
            owed = sum(one.get(name, none).double() for one in residuals) / 2
            assert np.allclose(got, owed.numpy(), atol=1e-6), name
    assert max(np.abs(got).max() for got in ways[0].values()) > 0.01
    gloo(2, takes, single)


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


HUGE = torch.full((37, 40), 1e39, dtype=torch.float64)
NO_STEPS = "steps must be pairs of name and step, each name once"
OF_FIRST = "residual of 'first.weight'"
# what is made of a good state, and what loading it says; test_memory.py has what all states share
REFUSED_STATES = [
    (lambda *_: {"version": 2, "steps": 3}, "another version of gradcomp wrote this state"),
    (with_values(extra=3), "'extra' of this state is a dictionary, got 3"),
    (with_values(origin={"kind": "gradients"}), "kind 'gradients', 'fsdp' expected"),
    (
        lambda good, _: {**good, "origin": {**good["origin"], "codec": "TernGrad()"}},
        "this state has codec 'TernGrad",
    ),
    *(
        (with_step(step), rf"step {step} of 'few.bias', an integer of at least 0 and below 2.32")
        for step in (-1, 1.5, 2**70, True)
    ),
    (with_steps(lambda steps: [[7, 0], *steps]), "other parameters: unexpected key 7"),
    (with_steps(lambda steps: [*steps, steps[0]]), NO_STEPS),
    (with_steps(lambda _: 3), f"{NO_STEPS}: 3"),
    (with_steps(lambda steps: steps[1:]), "other parameters: missing key 'few.bias'"),
    (with_weight(torch.full((37, 40), math.nan)), f"{OF_FIRST} has values that are not finite"),
    (with_weight(HUGE), f"{OF_FIRST} must be .37, 40. torch.float32 or .* torch.float64 on cpu"),
    (with_weight(HUGE.to(torch.complex64)), f"{OF_FIRST} .* got .* torch.complex64"),
    (with_weight(HUGE.long()), f"{OF_FIRST} .* got .* torch.int64"),
    (with_weight(HUGE.float().to("meta")), f"{OF_FIRST} .* got .* torch.float32 on meta"),
    (with_weight(HUGE.float().to_sparse()), f"{OF_FIRST} must be .37, 40. .* got tensor.indices"),
    (with_weight([0.0]), f"{OF_FIRST} must be .37, 40. .* got .0.0."),
    (with_residuals(lambda r: dict(list(r.items())[1:])), "rank . .* has 4 tensors of 5"),
    (
        with_residuals(lambda r: {name + "x": tensor for name, tensor in r.items()}),
        "residuals do not fit this model and codec",
    ),
    (with_residuals(lambda _: 3), "residual of rank . in this state is a dictionary, got 3"),
    (with_values(ranks={}), "values of rank . are missing: .* and the state has rank none"),
    (
        with_values(world_size=10**6),
        "values of rank . are missing: the run had 1000000 ranks, this one has 2",
    ),
    (
        lambda good, rank: [with_step(1)(good, rank), {**good, "ranks": {}}],
        "not of one run: extra.steps.0.1 is 1 and 0",
    ),
]


@pytest.mark.parametrize("residuals", ["fp32", "bf16"])
@each_rank(2)
def test_states_that_are_refused(residuals):
    """float64 residuals of 1e39 became Inf, and every later gradient NaN; 10**9 ranks took 3 GB
    and a minute.
    """
    with registered(wrap(fresh()), "onebit", residuals=residuals) as state:
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
            with pytest.raises(ValueError, match=f"{OF_FIRST} .* not finite in torch.bfloat16"):
                state.load_state_dict(with_weight(largest)(good, rank))


# ---- meshes --------------------------------------------------------------------------------------


@each_rank(4)
def test_replicas_average_shards_as_torch_does():
    """HSDP: packed where parameters are sharded; the all_reduce between replicas is torch's."""
    codec, grads = TernGrad(seed=3), gradients(0, 4)
    model = fully_shard(fresh(), mesh=mesh_of("replicate", "shard"))
    with registered(model, codec):
        loss_of(model, 0).backward()
    sides = []
    for ranks in ([0, 1], [2, 3]):
        of_side = {name: [arrays[r] for r in ranks] for name, arrays in grads.items()}
        sides.append(Expected(codec, dist.get_rank() % 2, 2, ranks)(0, of_side))
    for name, shard in shards_of(model).items():
        wanted = (sides[0][name] + sides[1][name]) / 2
        assert np.allclose(shard, wanted, rtol=1e-6, atol=1e-9), name


@each_rank(4)
def test_replicas_draw_random_numbers_of_their_own():
    """Ternary's noise averages out over all ranks: both replicas drew the same numbers, and it
    was twice as large. All ranks have the same data.
    """
    found = []
    for mesh in ({}, {"mesh": mesh_of("replicate", "shard")}):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(128, 128, bias=False), **mesh)
        x, grads = torch.randn(16, 128), []
        for opened in (registered(model, TernGrad(clip_sigma=None)), contextlib.nullcontext()):
            with opened:
                model.zero_grad()
                model(x).square().mean().backward()
                grads.append(model.weight.grad.full_tensor())
        noisy, exact = grads
        found.append(((noisy - exact).square().sum() / exact.square().sum()).item())
    flat, replicated = found
    assert replicated == pytest.approx(flat, rel=0.1) and flat > 0.1


def between_nodes(codec, by):
    """Return the shards of two steps of two nodes of two ranks: plain FSDP2 inside, gradients of
    shards averaged between, by the training loop or by a hook.
    """
    mesh, out = mesh_of("node", "shard"), []
    model = wrap(fresh(), mesh=mesh["shard"])
    if by == "averager":
        comm = gradcomp.comm.TorchCommunicator(mesh["node"].get_group())
        opened = averager = gradcomp.GradientAverager(model, codec, comm=comm, min_numel=MIN_NUMEL)
    else:
        opened = ReplicaAverage(model, mesh["node"].get_group(), codec, min_numel=MIN_NUMEL)
        averager = opened.averager
    with opened:
        for step in range(2):
            model.zero_grad()
            model.set_requires_gradient_sync(False)  # twice half of it: averaged once
            (loss_of(model, step) / 2).backward()
            model.set_requires_gradient_sync(True)
            (loss_of(model, step) / 2).backward()
            if by == "averager":
                averager.average()
            out.append(shards_of(model))
        assert averager.stats.steps == 2
    model.zero_grad()
    loss_of(model, 0).backward()
    assert averager.stats.steps == 2  # closed
    return out


@each_rank(2)
def test_the_codec_of_replicas_is_chosen_by_the_optimizer():
    """There was no way to name it, and 1 bit was the default, under AdamW too."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = wrap(fresh(), mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters())
    group = mesh["replica"].get_group()
    with ReplicaAverage(model, group, optimizer=optimizer) as replicas:
        said = replicas.averager.describe()
        assert "auto: EntropyCoded(1.25) with precondition=True for AdamW" in said
        loss_of(model, 0).backward()
        assert replicas.averager.stats.steps == 1
    with ReplicaAverage(model, group) as replicas:
        assert replicas.averager.describe().startswith("gradcomp: Block(bits=8")


@each_rank(4)
def test_replicas_of_shards_are_checkpointed_apart(tmp_path):
    """torch.distributed.checkpoint kept the residuals of one shard for all."""
    mesh = mesh_of("node", "shard")
    model = wrap(fresh(), mesh=mesh["shard"])
    with ReplicaAverage(model, mesh["node"].get_group(), "onebit", min_numel=1) as replicas:
        for step in range(2):
            model.zero_grad()
            loss_of(model, step).backward()
        before = replicas.state_dict()
        dcp.save({"gradcomp": replicas}, checkpoint_id=str(tmp_path))
        loss_of(model, 2).backward()
        dcp.load({"gradcomp": replicas}, checkpoint_id=str(tmp_path))
        after = replicas.state_dict()
        (mine,) = before
        assert list(after) == [f"shard {dist.get_rank() % 2} of 2"] == [mine]
        pairs = (parts_of(state[mine])["residual"] for state in (before, after))
        residuals, loaded = pairs
        assert residuals.keys() == loaded.keys() and len(residuals) > 2
        assert all(torch.equal(residuals[name], loaded[name]) for name in residuals)
        with pytest.raises(ValueError, match=f"this rank has {mine}, the state shard 7 of 9"):
            replicas.load_state_dict({"shard 7 of 9": before[mine]})


@pytest.mark.parametrize("by", ["averager", "hook"])
@each_rank(4)
def test_packed_between_nodes_and_plain_inside(by):
    """`GradientAverager` takes shards as they are: with no loss it gives the mean over all four
    ranks, with 1 bit residuals of shards.
    """
    place, residuals, owners = dist.get_rank() % 2, {}, {}
    exact, packed = (between_nodes(codec, by) for codec in (Identity(), OneBit()))
    for step in range(2):
        for name, arrays in gradients(step, 4).items():
            wanted = chunk_of(np.mean(arrays, 0), 2, place)
            assert np.allclose(exact[step][name], wanted, rtol=1e-5, atol=1e-8), name
            inside = [np.mean(arrays[2 * n : 2 * n + 2], 0) for n in range(2)]
            chunks = [chunk_of(a, 2, place).reshape(-1) for a in inside]
            if arrays[0].ndim < 2 or chunks[0].size < MIN_NUMEL:
                continue
            mean, residuals[name], owners[name] = average(
                chunks,
                OneBit(),
                choose(OneBit(), 2),
                step=step,
                parameter=0,
                shape=arrays[0].shape,
                residuals=residuals.get(name),
                owner_residuals=owners.get(name),
            )
            got = packed[step][name]
            assert np.allclose(got, mean.reshape(got.shape), rtol=1e-4, atol=1e-7), (name, step)


def beside_tensor_parallelism(codec):
    """Return the shards of two steps of two layers, rows of the one and columns of the other."""
    torch.manual_seed(0)
    mesh, out = mesh_of("data", "tensor"), []
    layers = nn.Linear(40, 64, bias=False), nn.Tanh(), nn.Linear(64, 40, bias=False)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(*layers), mesh["tensor"], plan)
    fully_shard(model[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    with gradcomp.fsdp.register(model, codec) if codec else contextlib.nullcontext() as state:
        for _ in range(2):
            model.zero_grad()
            model(noise(0, mesh["data"].get_local_rank())).square().mean().backward()
            out += [p.grad.to_local().numpy().copy() for p in model.parameters()]
        if codec == "onebit":
            saved = state.state_dict()
            state.load_state_dict(saved)
            said = "tensor parallelism do not fit 4: resume with as many"
            with pytest.raises(ValueError, match=said):
                state.load_state_dict({**saved, "world_size": 8})
    return out


@each_rank(4)
def test_beside_tensor_parallelism_a_ranks_part_is_a_tensor_of_its_own():
    plain = beside_tensor_parallelism(None)
    for codec in (Identity(), TernGrad(), "onebit"):
        for a, b in zip(beside_tensor_parallelism(codec), plain, strict=True):
            assert a.shape == b.shape == ((16, 40) if a.shape[1] == 40 else (20, 32))
            if isinstance(codec, Identity):
                assert np.allclose(a, b, rtol=1e-5, atol=1e-8)
            else:
                assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.5
            if isinstance(codec, TernGrad):
                assert len(np.unique(np.abs(a))) <= 3  # 0, half a scale, a scale


# ---- what is refused -----------------------------------------------------------------------------

# codec, options, and what is said
REFUSED_OPTIONS = [
    (Block(4), {"residuals": "fp8"}, "ValueError: residuals must be one of .*fp32.*, got 'fp8'"),
    (
        "onebit",
        {"weights": "terngrad"},
        "ValueError: weights='terngrad': .* gathered as 'block8'.*weights have no error feedback",
    ),
    ("onebit", {"weights": Block(2)}, "ValueError: weights=Block.bits=2.*are gathered as 'block8'"),
    (
        "onebit",
        {"keep_weights": True},
        "ValueError: keep_weights=True keeps .*: say how they are p",
    ),
    (
        "terngrad",
        {"precondition": True},
        "TypeError: gradcomp.fsdp.register does not support 'precondition': each rank keeps",
    ),
    (
        "terngrad",
        {"slice_numel": 64},
        "TypeError: gradcomp.fsdp.register does not support 'slice_numel': each rank keeps",
    ),
    (
        "terngrad",
        {"warmup_codec": "onebit"},
        "ValueError: warmup_codec=OneBit.* requires warmup_steps > 0, got 0",
    ),
    (
        "terngrad",
        {"comm": 1},
        "TypeError: gradcomp.fsdp.register .* 'comm': .*group of each module",
    ),
    ("terngrad", {"optimizer": 1}, "TypeError: .* does not support 'optimizer': .*residual_decay="),
    ("terngrad", {"exclude": "nothing"}, "ValueError: exclude='nothing' matches no parameter"),
]
# the call, and what it says
REFUSED_CALLS = [
    (
        lambda _: gradcomp.fsdp.register(fresh(), "terngrad"),
        "TypeError: no module of this model is wrapped by .*fully_shard; for DDP",
    ),
    (
        lambda model: gradcomp.fsdp.register(model.parameters(), "terngrad"),
        "TypeError: model must be a torch.nn.Module, got generator",
    ),
    (
        lambda _: ReplicaAverage([fresh()], None),
        "TypeError: no module of .*fully_shard; without it there is gradcomp.GradientAverager",
    ),
    (
        lambda _: gradcomp.fsdp.register(
            FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))
        ),
        "TypeError: .*DataParallel is FSDP1: wrap with torch.distributed.fsdp.fully_shard",
    ),
    *(
        (lambda model, c=codec, o=options: gradcomp.fsdp.register(model, c, **o), said)
        for codec, options, said in REFUSED_OPTIONS
    ),
]


@each_rank(2)
def test_what_is_refused():
    model = wrap(fresh())
    for call, said in REFUSED_CALLS:
        with pytest.raises((TypeError, ValueError)) as caught:
            call(model)
        assert re.search(said, f"{caught.type.__name__}: {caught.value}"), caught.value
    loss_of(model, 0, 0).backward()  # torch's own still
    with gradcomp.fsdp.register(model, "onebit") as first:
        for again in (model, model.second):
            said = r"has been called for this model .* codec OneBit.*: close\(\) the state"
            with pytest.raises(ValueError, match=said):
                gradcomp.fsdp.register(again, "terngrad")
        loss_of(model, 0, 0).backward()
        assert first.stats.steps > 0, "the first one goes on"
    gradcomp.fsdp.register(model, "terngrad").close()
    model = fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
    with pytest.raises(gradcomp.errors.UnsupportedTensor, match="'0.weight' of an Embedding"):
        gradcomp.fsdp.register(model, "terngrad")


@each_rank(2)
def test_a_model_that_is_sharded_too_late_is_named():
    model = nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
    fully_shard(model[0])
    with gradcomp.fsdp.register(model, "terngrad"):
        fully_shard(model[1])
        fully_shard(model)
        said = r"fully_shard came after gradcomp.fsdp.register for 1 modules \(FSDPLinear"
        with pytest.raises(gradcomp.GradcompError, match=said):
            model(torch.ones(1, 4)).sum().backward()


def opened_for(model, entry, replicas):
    if entry == "replicas":
        return ReplicaAverage(model, replicas.get_group(), "terngrad")
    return gradcomp.fsdp.register(model, "terngrad")


each_entry = pytest.mark.parametrize("entry", ["replicas", "register"])


@each_rank(2)
def test_gradients_that_are_reduced_outside_of_backward_are_an_error():
    """As by schedules of torch.distributed.pipelining: "another all-reduce hook", gradcomp said."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = wrap(fresh(), mesh=mesh["shard"])
    with ReplicaAverage(model, mesh["replica"].get_group(), "onebit"):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        loss_of(model, 0).backward()
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        for state in fully_shard.state(model)._state_ctx.all_states:
            for group in getattr(state, "_fsdp_param_groups", [state._fsdp_param_group]):
                with pytest.raises(
                    gradcomp.GradcompError, match="outside of a backward pass.*call"
                ):
                    group.post_backward()


@each_entry
@each_rank(2)
def test_a_hook_that_somebody_replaces_is_found(entry):
    """Replicas would train apart: an error before the step. Gradients that torch reduces after
    all are right: one warning.
    """
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    model = wrap(fresh(), **({"mesh": mesh["shard"]} if entry == "replicas" else {}))
    optimizer, raised = torch.optim.SGD(model.parameters(), lr=0.1), []
    opened_for(model, entry, mesh["replica"])  # who registers in a function keeps nothing
    with warnings_of("not called") as warned:
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            before = model.first.weight.to_local().clone()
            try:
                optimizer.step()
            except gradcomp.GradcompError as error:
                raised.append((step, str(error)))
                assert torch.equal(before, model.first.weight.to_local())
            for module in model.modules() if step == 1 else ():
                if isinstance(module, FSDPModule) and entry == "replicas":
                    module.set_all_reduce_hook(lambda shard: None)
                elif isinstance(module, FSDPModule):
                    torch_private.reduce_scatter_as_before(module)
    if entry == "replicas":
        assert [step for step, _ in raised] == [2, 3] and not warned
        assert re.search("not called in this step.*Make ReplicaAverage last", raised[0][1])
    else:
        said = "FSDP2 used its own uncompressed reduce-scatter, .*: call register last"
        assert not raised and len(warned) == 1 and re.search(said, warned[0])


@each_entry
@each_rank(2)
def test_a_step_that_makes_an_optimizers_state_is_none_and_meta_models_come_to_life(entry):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard"))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fully_shard(model, mesh=mesh["shard" if entry == "replicas" else "replica"])
    opened = None if entry == "replicas" else opened_for(model, entry, None)
    model.to_empty(device="cpu")
    for layer in model:
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    with opened or opened_for(model, entry, mesh["replica"]), warnings_of("not called") as warned:
        optimizer = torch.optim.AdamW(model.parameters())
        get_optimizer_state_dict(model, optimizer)
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not warned


# ---- packed weights ------------------------------------------------------------------------------


def as_forward_sees_them(model):
    """Return by name the weights that forward and backward work with."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    for module in modules:
        module.unshard()
    out = {name: p.detach().float().clone().numpy() for name, p in model.named_parameters()}
    for module in modules:
        module.reshard()
    return out


@pytest.mark.parametrize("finely", [True, False], ids=["fine", "whole"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("weights", ["block8", "block4", Block(8, group=16), "bfloat16"], ids=str)
@each_rank()
def test_weights_are_gathered_as_codes(weights, world, finely):
    """Forward sees what the reference makes of every rank's chunk, the same on all ranks; shards
    stay exact.
    """
    codec = gradcomp.codecs.resolve(weights)
    if isinstance(codec, Block):
        codec = Block(codec.bits, group=codec.group, error_feedback=False)

    def decoded(chunk, shape):
        one_phase = Strategy("all_gather")
        if not chunk.size or np.prod(shape) < MIN_NUMEL:
            return chunk
        return average([chunk.reshape(-1)], codec, one_phase, shape=shape)[0].reshape(chunk.shape)

    plain = fresh()
    whole = {name: p.detach().numpy().copy() for name, p in plain.named_parameters()}
    model = wrap(plain, finely)
    with registered(model, TernGrad(seed=3), weights=weights) as state:
        seen = as_forward_sees_them(model)
        loss_of(model, 0).backward()
        assert state.plain == 0 and "weights gathered as" in state.describe()
    for name, p in model.named_parameters():
        chunks = [chunk_of(whole[name], world, r) for r in range(world)]
        assert p.to_local().detach().numpy().tobytes() == chunks[dist.get_rank()].tobytes(), name
        wanted = np.concatenate([decoded(c, whole[name].shape) for c in chunks])
        assert seen[name].tobytes() == wanted.tobytes(), name
    return hashlib.sha256(b"".join(seen[name].tobytes() for name in seen)).digest()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@each_rank(2)
def test_weights_that_arrive_early_are_the_same(dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    found = []
    for early in (False, True):
        model = wrap(fresh(), mp_policy=policy)
        with registered(model, TernGrad(seed=3), weights="block8") as state:
            if early:
                model.first.set_modules_to_forward_prefetch([model.second])
                model.second.set_modules_to_forward_prefetch([model.few, model.unused])
            steps = [bits(run(model, [step])) for step in range(2)]
            sent = state.weights_stats
            found.append((steps, sent.bytes_sent, sent.steps, state.plain))
    assert found[0] == found[1]


class Twice(nn.Module):
    """A module that one backward pass goes through twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(40, 40)

    def forward(self, x):
        return self.inner(self.inner(x).tanh())


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@each_rank(2)
def test_averages_that_somebody_reads_during_backward_are_there_in_time(hooked):
    """Gradients that add up, and hooks that read them, get averages at once; others when the
    backward pass is over.
    """
    torch.manual_seed(0)
    model, plain, seen = Twice(), Twice(), []
    plain.load_state_dict(model.state_dict())
    wrap(model)
    for p in model.parameters() if hooked else ():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().clone()))
    with registered(model, Identity(), min_numel=0):
        for step in range(2):  # gradients add up
            model(noise(step)).square().mean().backward()
            for rank in range(2):
                (plain(noise(step, rank)).square().mean() / 2).backward()
    assert all(one.any() and one.isfinite().all() for one in seen) and bool(seen) == hooked
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        wanted = chunk_of(q.grad, 2, dist.get_rank())
        assert torch.allclose(p.grad.to_local(), wanted, rtol=1e-4, atol=1e-7)


class Blocks(nn.Module):
    """Three layers, which `recompute` calls once more in backward."""

    def __init__(self, recompute=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))
        self.recompute = recompute
        for layer in self.layers:
            fully_shard(layer, **options)
        fully_shard(self)

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
    model, grads = Blocks(recompute, reshard_after_forward=reshard), []
    options = {"weights": "block8", "keep_weights": keep, "min_numel": 0}
    with registered(model, Identity(), **options) as state:
        assert (", which backward takes from forward" in state.describe()) == keep
        for step in range(2):
            model.zero_grad()
            x = noise(step).requires_grad_()
            loss = model(x).square().mean()
            changes = between in ("looked at", "changed")
            shards = [p.to_local() for p in model.parameters()] if changes else []
            before = [shard.detach().clone() for shard in shards]
            for shard in shards:
                shard.data.mul_(1.5)
            if between == "looked at":  # an average of weights is
                with torch.no_grad():
                    model(x)
                for shard, old in zip(shards, before, strict=True):
                    shard.data.copy_(old)
            loss.backward()
            grads.append(bits(p.grad.to_local() for p in model.parameters()))
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
@each_rank(2)
def test_backward_decodes_what_forward_has_gathered(recompute):
    """Half of the gathers, and to the bit what comes of weights that are never given away."""
    kept, twice = (with_kept_weights(keep, recompute) for keep in (True, False))
    never = with_kept_weights(True, recompute, reshard=False)
    # Block(8) rounds to the nearest: no draw tells forward from backward. torch calls the same
    # operators, with the same values and strides.
    assert kept[0] == never[0] == twice[0]
    if recompute:
        # nothing says in a reentrant forward that there will be a backward: each gathers for itself
        assert kept[1:] == twice[1:]
    else:
        assert (kept[1], twice[1], never[1]) == (2 * 3, 4 * 3, 2 * 3)
        assert 2 * kept[2] == twice[2] and kept[3] == twice[3]


@pytest.mark.parametrize("between", ["looked at", "changed"])
@each_rank(2)
def test_gradients_are_of_the_weights_that_forward_has_used(between):
    """Whatever happens to shards before backward; who gathers them meanwhile without gradients
    has them gathered once more.
    """
    usual, other = (with_kept_weights(True, between=what) for what in ("", between))
    twice = with_kept_weights(False, between=between)
    assert other[0][0] == usual[0][0]
    assert other[1] + (2 * 3 if between == "changed" else 0) == twice[1]
    assert (other[0][1] == usual[0][1]) == (between == "looked at")


@each_rank(2)
def test_weights_kept_by_a_forward_without_backward_are_not_the_next_steps():
    """A reentrant checkpoint's forward gathers for itself; its backward took the weights of the
    evaluation before it.
    """
    kept, never = (with_kept_weights(keep, True, "evaluated") for keep in (True, False))
    assert kept[0] == never[0]


@pytest.mark.parametrize("keeps", [False, True])
@each_rank(2)
def test_a_weight_that_is_not_finite_is_seen_by_every_rank(keeps):
    """It is not kept, and a closed state gathers nothing."""
    model = wrap(fresh(), reshard_after_forward=True)
    options = {"weights": "block8", "keep_weights": keeps, "min_numel": 0}
    with registered(model, "terngrad", **options) as state:
        for value in (math.nan, 0.5):
            if dist.get_rank() == 1:
                model.first.weight.to_local().data[0, 0] = value
            model.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            grad = model.second.weight.grad.to_local()
            assert (loss.isnan() and grad.isnan().all()) == math.isnan(value)
            assert (loss.isfinite() and grad.isfinite().all()) == (not math.isnan(value))
        assert state.weights_stats.nonfinite_buckets == 2  # gathered for backward again
    gathered = state.weights_stats.steps
    loss_of(model, 0).backward()  # as torch does it
    assert state.weights_stats.steps == gathered


# ---- ranks that differ, or are lost --------------------------------------------------------------


class Either(nn.Module):
    """Two layers of one shape, the second one first where a rank says so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(40, 40), nn.Linear(40, 40)

    def forward(self, x, swapped):
        first, second = (self.right, self.left) if swapped else (self.left, self.right)
        return second(first(x).tanh())


@pytest.mark.parametrize(
    ("codec", "weights", "trains"),
    [
        ("terngrad", None, True),
        ("onebit", None, True),
        ("onebit", "block8", True),
        ("onebit", "block8", False),
    ],
)
@each_rank(3)
def test_modules_of_one_shape_in_another_order_are_refused_on_every_rank(codec, weights, trains):
    """Payloads did not say whose they were: a rank averaged gradients (or took weights) of one
    module for another's, without an error.
    """
    rank, model = dist.get_rank(), wrap(Either())
    with registered(model, codec, weights=weights, min_numel=0, timeout_s=20) as state:
        model(noise(0), False).square().mean().backward()
        assert state.stats.steps == 2
        with pytest.raises(PeerMismatch) as caught, torch.set_grad_enabled(trains):
            loss = model(noise(1), rank == 2).square().mean()
            if trains:
                loss.backward()
    error = caught.value
    assert (error.field, error.rank) == ("module", 0 if rank == 2 else 2)
    said = r"module: rank \d has (left, rank \d has right|right, rank \d has left);"
    assert re.search(said, str(error)), error


@pytest.mark.parametrize(("codec", "weights"), [("onebit", "block8"), ("terngrad", None)])
@each_rank(2)
def test_after_a_lost_rank_every_exchange_raises_peer_lost(codec, weights):
    """A raw ConnectionError came out of what had not failed before, so that ``except PeerLost``
    missed it. Rank 1 leaves after a forward.
    """
    model = wrap(Either(), reshard_after_forward=weights is not None)
    state = registered(model, codec, weights=weights, min_numel=0, timeout_s=20)
    model.left.set_modules_to_backward_prefetch([model.left])  # gathers nothing by torch later on
    out, x = model(noise(0), False), noise(1)
    tries = [lambda: out.square().mean().backward()]
    tries += [lambda: model(x, False), lambda: model(x, False), lambda: model.right(x)]
    if dist.get_rank() == 1:
        state.close()
        tries.clear()
    for attempt in tries:
        with pytest.raises(gradcomp.PeerLost, match="lost a peer in "):
            attempt()
    dist.barrier()  # torch's own group stays
    state.close()


@pytest.mark.parametrize("where", ["forward", "backward"])
@each_rank(2)
def test_torchs_gather_of_weights_names_a_rank_that_has_closed(where):
    """It waited as long as the process group, and then raised RuntimeError without a rank."""
    model, store = wrap(fresh()), torch_private.default_store()
    state = registered(model, TernGrad(), timeout_s=60)
    loss = loss_of(model, 0)
    if dist.get_rank() == 1:
        state.close()
        store.wait(["heard"])
        return
    for comm in state._comms.values():
        comm.timeout_s = 2.0
    said = r"in torch's own collectives after .* s: rank 1 \(pid \d+ on .*\) closed"
    with pytest.raises(gradcomp.PeerLost, match=said) as lost:
        loss_of(model, 1) if where == "forward" else loss.backward()
    assert lost.value.rank == 1 and 2 <= lost.value.waited_s < 7
    with pytest.raises(gradcomp.PeerLost, match=said):
        loss_of(model, 1).backward()
    assert all(np.isnan(shard).all() for shard in shards_of(model).values())
    store.set("heard", b"")
    state.close()


def lost_midway(folder, weights, where):
    """Rank 2 dies in forward before the last layer; or in backward, between the reduce-scatters of
    the last layer and of the one before it, which are torch's own where it is "plain".

    The others save what they caught and their gradients, before and after a step.
    """
    rank, model = dist.get_rank(), Blocks(reshard_after_forward=where != "plain")
    for layer in model.layers:  # none is gathered for backward before its turn
        layer.set_modules_to_backward_prefetch([layer])
        if where == "plain":  # its bias has no gradient
            layer.forward = lambda x, own=layer: nn.functional.linear(x, own.weight)
    state = registered(model, OneBit(), weights=weights, min_numel=0, timeout_s=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def die(_):
        time.sleep(0.5)  # what it has begun to send arrives
        os._exit(1)

    if rank == 2:
        model.layers[1].register_forward_hook(
            lambda module, args, out: (
                die(out) if where == "forward" else out.register_hook(die) and None
            )
        )
    raised, steps = None, state.state_dict()["extra"]["steps"]
    try:
        model(torch.randn(8, 40)).square().mean().backward()
    except (RuntimeError, gradcomp.GradcompError) as error:
        raised = type(error).__name__, getattr(error, "rank", None), str(error)

    def found():
        return [None if p.grad is None else p.grad.to_local().clone() for p in model.parameters()]

    before = found()
    optimizer.step()
    assert state.state_dict()["extra"]["steps"] == steps
    torch.save((raised, before, found()), f"{folder}/{rank}")
    state.close()


@pytest.mark.parametrize(
    ("weights", "where"),
    [("block8", "backward"), (None, "backward"), (None, "forward"), (None, "plain")],
)
def test_a_lost_rank_is_named_and_leaves_nan_or_nothing(gloo, tmp_path, weights, where):
    """Uninitialised memory stayed in ``.grad`` (mean sizes of 1e33), and the optimizer applied it.
    Of torch's own collectives it was RuntimeError, without a rank.
    """
    with pytest.raises(RankFailed, match="rank 2 gave no result"):
        gloo(3, lost_midway, str(tmp_path), weights, where)
    for rank in range(2):
        (got, lost, text), before, after = torch.load(tmp_path / str(rank))
        assert (got, lost) == ("PeerLost", 2), text
        assert where == "backward" or "torch's own collectives" in text, text
        assert re.search(r"rank 2 \(pid \d+ on \S+\) has ended", text), text
        for grads in (before, after):
            assert all(grad is None or grad.isnan().all() for grad in grads), grads
            least = {"forward": 0, "plain": 1, "backward": 2}[where]
            assert sum(grad is not None for grad in grads) >= least


@each_rank(2)
def test_an_error_in_backward_leaves_nan_to_the_optimizer():
    """It applied the averages of modules that were complete."""
    model, x = Blocks(), torch.randn(8, 40, requires_grad=True)
    x.register_hook(lambda _: 1 / 0)  # after three reduce-scatters, of which two are under way
    with registered(model, OneBit(), min_numel=0, timeout_s=60):
        with pytest.raises(ZeroDivisionError):
            model(x).square().mean().backward()
        nans = [np.isnan(shard).all() for shard in shards_of(model).values()]
        assert sum(nans) == 4 and len(nans) == 6
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        assert all(np.isnan(shard).all() for shard in shards_of(model).values())


# ---- memory --------------------------------------------------------------------------------------


def gathered_bytes(comm, fill, bad):
    """Return the payloads of both ranks after a gather whose buffer had `fill` in every byte
    before.
    """
    codec, numels = Block(8, error_feedback=False), (190, 77)
    slots = [[Slot(rank, numel, 10, True, 190 * rank)] for rank, numel in enumerate(numels)]
    pool = BufferPool()
    pool.give(torch.full((4096,), fill, dtype=torch.uint8))
    options = ExchangeOptions(torch.float32, Stats(), timeout_s=20)
    gather = ShardGather(codec, slots, 190 * comm.rank, comm, pool, options)
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


def in_steps(model):
    for step in range(3):
        run(model, [step])
        yield shards_of(model)


def adding_up(model):
    """The first half of every second gradient stays with its rank."""
    for micro in range(4):
        model.set_requires_gradient_sync(micro % 2 == 1)
        loss_of(model, micro).backward()
        if micro % 2:
            yield shards_of(model)


def with_some_frozen(model):
    for step, frozen in enumerate((False, True, False)):
        model.second.weight.requires_grad_(not frozen)
        run(model, [step])
        yield shards_of(model)


def not_finite_in_one_module(model):
    for step in range(3):
        model.zero_grad()
        factor = math.inf if (dist.get_rank(), step) == (1, 1) else 0.0
        (loss_of(model, step) + model.unused(torch.ones(1, 3)).sum() * factor).backward()
        for name, shard in shards_of(model).items():
            assert np.isnan(shard).any() == (step == 1 and name.startswith("unused"))
        yield shards_of(model)


def without_all_gradients(model):
    """The module `unused` has none."""
    for step in range(3):
        model.zero_grad()
        loss_of(model, step, everything=step == 1).backward()
        yield shards_of(model)


def ends_with_an_error(model, step):
    """Raise at the end of a backward pass, while averages are under way; torch does not go on after
    an error in the middle of one.
    """
    handle = model.few.register_forward_hook(
        lambda module, args, out: (
            out.register_hook(lambda _: torch_private.after_backward(lambda: 1 / 0) and None)
            and None
        )
    )
    model.zero_grad()
    with pytest.raises(ZeroDivisionError):
        loss_of(model, step).backward()
    handle.remove()


def after_an_error(model):
    for step in range(4):
        if step == 1:
            ends_with_an_error(model, 1)
            assert any(np.isnan(shard).all() for shard in shards_of(model).values())
        else:
            run(model, [step])
            yield shards_of(model)


def swapping(model):
    for step in range(4):
        model.zero_grad()
        model(noise(step), step % 2 == 1).square().mean().backward()
        yield shards_of(model)


@contextlib.contextmanager
def counted():
    """Yield a list that grows with the number of modules under way."""
    under_way, counts = [], [0]
    encode, finish = ReduceScatter.encode, ReduceScatter.finish

    def encodes(self, *args):
        encode(self, *args)
        under_way.append(self)
        counts.append(len(under_way))

    def finishes(self, *args):
        under_way.remove(self)
        finish(self, *args)

    with (
        mock.patch.object(ReduceScatter, "encode", encodes),
        mock.patch.object(ReduceScatter, "finish", finishes),
    ):
        yield counts


HALF = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
# what happens, codec, options of `fully_shard`, modules under way at most, ranks (4: two replicas)
SCENARIOS = [
    (in_steps, OneBit(), {}, 2, 2),
    (in_steps, OneBit(rotate=True), {}, 2, 2),
    (in_steps, Ternary(), {}, 2, 2),
    (in_steps, OneBit(), HALF, 1, 2),
    (in_steps, OneBit(), {}, 1, 4),
    (adding_up, OneBit(), {}, 2, 2),
    (adding_up, Block(4), {}, 1, 4),
    (with_some_frozen, OneBit(), {}, 2, 2),
    (not_finite_in_one_module, OneBit(), {}, 2, 2),
    (without_all_gradients, OneBit(), {}, 2, 2),
    (after_an_error, OneBit(), {}, 2, 2),
    (swapping, OneBit(), {}, 2, 2),
]


@pytest.mark.parametrize(("scenario", "codec", "wrapping", "most", "world"), SCENARIOS)
@each_rank()
def test_modules_in_flight_change_no_gradient_and_no_residual(
    scenario, codec, wrapping, most, world
):
    """Planes were shared: the residuals of a module that had gone out were those of the next."""
    if world == 4:
        wrapping = wrapping | {"mesh": mesh_of("replicate", "shard")}
    found = []
    for count in (1, 2):
        model = wrap(Either() if scenario is swapping else fresh(), **wrapping)
        with (
            mock.patch("gradcomp.fsdp.reduce.IN_FLIGHT", count),
            counted() as counts,
            registered(model, codec) as state,
        ):
            shards = [shard for step in scenario(model) for shard in step.values()]
            saved = state.state_dict()
        assert max(counts) == (1 if count == 1 else most)
        residuals = parts_of(saved)["residual"]
        shards = [shard.tobytes() for shard in shards]
        found.append((shards, list(residuals), bits(residuals.values()), steps_of(saved)))
    assert found[0] == found[1]


@each_rank(2)
def test_a_state_that_is_loaded_after_an_error_is_not_written_over():
    """Residuals of the modules under way came into force when they arrived, in the next backward
    pass.
    """
    found = []
    for fails in (False, True):
        model = wrap(fresh())
        with registered(model, OneBit()) as state:
            run(model, range(2))
            saved = copy.deepcopy(state.state_dict())
            if fails:
                ends_with_an_error(model, 2)
                ahead = copy.deepcopy(saved)
                ahead["extra"]["steps"] = [[n, k + 5] for n, k in ahead["extra"]["steps"]]
                state.load_state_dict(ahead)
                with pytest.raises(ZeroDivisionError), state._poisoned_on_failure():
                    _ = 1 / 0  # in a later forward, say
                assert state.state_dict()["extra"]["steps"] == ahead["extra"]["steps"]
                state.load_state_dict(saved)
            grads = run(model, [2, 3])
            assert all(grad.isfinite().all() for grad in grads)
            found.append(bits([*grads, *parts_of(state.state_dict())["residual"].values()]))
    assert found[0] == found[1]


@each_rank(2)
def test_an_exchange_that_fails_on_one_rank_is_told_to_the_others():
    """They waited for the whole timeout, or until the process of that rank had ended."""
    model, rank, x = Blocks(reshard_after_forward=False), dist.get_rank(), torch.randn(8, 40)
    model.set_reshard_after_backward(False)  # torch gathers nothing again
    with registered(model, OneBit(), min_numel=0, timeout_s=60) as state:
        model(x).square().mean().backward()
        for reduce in state._reduces if rank == 1 else ():
            reduce.finish = mock.Mock(side_effect=CorruptPayload("crc", "made up"))
        with pytest.raises(CorruptPayload if rank == 1 else gradcomp.PeerLost, match="made up"):
            model(x).square().mean().backward()
        assert all(np.isnan(shard).all() for shard in shards_of(model).values())
        dist.barrier()  # nobody closes before


@each_rank(2)
def test_a_closed_state_ends_all_modules_under_way():
    """Its peer waited for timeout_s: averages under way kept the connections. Rank 1 leaves after
    the gradients of the last of three layers; rank 0 tries each layer then.
    """
    model = Blocks(reshard_after_forward=False)
    model.set_reshard_after_backward(False)  # nothing is gathered again
    state = registered(model, OneBit(), min_numel=0, timeout_s=20)

    def leave(_):
        time.sleep(0.5)  # what it has begun to send arrives
        state.close()
        raise RuntimeError("left")

    x = torch.randn(8, 40, requires_grad=True)
    if dist.get_rank() == 1:
        model.layers[1].register_forward_hook(
            lambda module, args, out: out.register_hook(leave) and None
        )
        with pytest.raises(RuntimeError, match="left"):
            model(x).square().mean().backward()
    for part in (model, *model.layers) if dist.get_rank() == 0 else ():
        with pytest.raises(gradcomp.PeerLost, match=r"lost a peer in .* rank 1 \(pid .*\) closed"):
            part(x).square().mean().backward()
        assert all(np.isnan(shard).all() for shard in shards_of(model).values())
    dist.barrier()
    state.close()


@each_rank(2)
def test_quality_is_of_whole_parameters():
    """As worked out from gradient and residual."""
    plain, model = fresh(), wrap(fresh())
    loss_of(plain, 0).backward()
    with registered(model, OneBit()) as state:
        assert not state.quality().rows
        run(model, [0])
        residuals, rows = parts_of(state.state_dict())["residual"], state.quality().rows
    wanted = {}
    for name, p in plain.named_parameters():
        if name in residuals:
            g, left = p.grad.flatten().double(), residuals[name].flatten().double()
            error, cosine = float(left.norm() / g.norm()), torch.cosine_similarity(g - left, g, 0)
            wanted[name] = (name, 0, g.numel(), error, float(cosine), error)
    assert list(rows) == list(wanted) and len(rows) > 2
    for name, row in rows.items():
        assert astuple(row)[:-1] == pytest.approx(wanted[name], rel=1e-4), name
