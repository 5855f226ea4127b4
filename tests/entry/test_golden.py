"""Every byte that is exchanged, every average, weight and state, as recorded in golden.json: what
must not move when the code behind it does. Gradients are given, not computed, so that no digest
depends on BLAS.

After a change of bytes that is meant (and stands in CHANGELOG under "Wire format"):
``python -m pytest tests/entry/test_golden.py -p no:xdist --write-golden``.
"""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _averaging import Scale
from _golden import Recorder, bytes_of, digest_of, tensors_in
from _kinds import check_kinds
from _ranks import run_local
from _shadow import shadowed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import Advanced, Block, EntropyCoded, GradientAverager, OneBit, Ternary, TernGrad
from gradcomp.allreduce import Feedback
from gradcomp.onebit_sgd import AggregateAdagrad, LocalAdagrad
from gradcomp.optim import SplitAdamW, SplitSGD, split_parameters

GOLDEN = Path(__file__).parents[1] / "vectors" / "golden.json"
STEPS = 4
SHAPES = {"w": (40, 33), "b": (5,), "v": (1111,), "one": (1,), "rows": (7, 129)}
LIMITS = {"min_numel": 6, "timeout_s": 20}
NODES = {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 1], [2, 3]])}


def gradient(shape, step, rank, tag, dtype=torch.float32):
    """Return values in (-1, 1), most of them small, the same bits on every machine."""
    generator = torch.Generator().manual_seed(7919 * step + 31 * rank + 1013 * tag)
    drawn = torch.randint(-(1 << 15) + 1, 1 << 15, shape, generator=generator) / (1 << 15)
    return (drawn * drawn * drawn).to(dtype)


class Given(nn.Module):
    """Parameters whose gradients are what `forward` is given."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        for tag, (name, shape) in enumerate(SHAPES.items()):
            setattr(self, name, nn.Parameter(gradient(shape, 0, 0, 50 + tag, dtype)))

    def forward(self, step, rank, bad=False):
        loss = self.v.sum() * float("nan") if bad else 0.0
        for tag, name in enumerate(SHAPES):
            p = getattr(self, name)
            loss = loss + (p * gradient(SHAPES[name], step, rank, tag, p.dtype)).float().sum()
        return loss

    def fill(self, step, rank, scale=1):
        """Give every parameter its gradient."""
        for tag, (name, shape) in enumerate(SHAPES.items()):
            p = getattr(self, name)
            p.grad = gradient(shape, step, rank, tag, p.dtype) * scale


class Blocks(nn.Module):
    """Two of them, for FSDP2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Given(), Given()
        self.extra = nn.Parameter(torch.ones(33))

    def forward(self, step, rank, bad=False):
        mine = (self.extra * gradient((33,), step, rank, 30)).sum()
        return self.first(step, rank, bad) + self.second(step, rank + 100) + mine


def outcome(averages, weights, state, stats=None):
    """Return digests of what one rank has in the end, and what it has counted."""
    counted = {} if stats is None else {"sent": stats.bytes_sent, "bad": stats.nonfinite_buckets}
    return counted | {
        "averages": digest_of(*averages),
        "weights": digest_of(*map(bytes_of, weights)),
        "state": digest_of(*tensors_in(state)),
    }


# ---- trainings: one rank of each -----------------------------------------------------------------


def averager(
    comm,
    codec,
    *,
    dtype=torch.float32,
    bad=None,
    discard=None,
    delayed=False,
    resumes=None,
    flushes=False,
    **options,
):
    """`bad`: tensor and element where rank 1 has a NaN in step 2. `discard`, `resumes`: a step.
    `flushes`: what the last `flush` hands back counts.
    """
    model = Given(dtype)
    optimizer = options.get("optimizer")
    if optimizer is not None:
        options["optimizer"] = optimizer = optimizer(model.parameters())
    scaler = options["grad_scaler"] = Scale(8.0) if options.pop("scaled", False) else None
    run = GradientAverager(model, codec, comm=comm, **LIMITS | options)
    averages = []
    for step in range(STEPS):
        if step == resumes:
            state, comm = run.state_dict(), comm.duplicate()
            run.close()
            run = GradientAverager(model, codec, comm=comm, **LIMITS | options)
            run.load_state_dict(state)
        if scaler:
            scaler.value = [8.0, 4.0, 4.0, 16.0][step]
        model.fill(step, comm.rank, scaler.value if scaler else 1)
        if bad is not None and (comm.rank, step) == (1, 2):
            getattr(model, bad[0]).grad.view(-1)[bad[1]] = float("nan")
        run.average_delayed() if delayed else run.average()
        averages += [bytes_of(p.grad) for p in model.parameters() if p.grad is not None]
        if discard == step:
            run.discard_step()
        if optimizer is not None:
            optimizer.step()
    if delayed:
        run.flush()
    if flushes:
        averages += [bytes_of(p.grad) for p in model.parameters()]
    state = run.state_dict()
    run.close()
    return outcome(averages, model.parameters(), state, run.stats)


def held(comm, codec, steps=range(STEPS), states=None, **options):
    """Return the averages of some steps, and the state after them."""
    model = Given()
    run = GradientAverager(model, codec, comm=comm, **LIMITS | options)
    if states:
        run.load_state_dict(states)
    averages = []
    for step in steps:
        model.fill(step, comm.rank)
        run.average()
        averages += [bytes_of(p.grad) for p in model.parameters()]
    state = run.state_dict()
    run.close()
    return averages, state


def resharded(comm, codec, **options):
    """The states of three ranks go on with two."""
    states = [state for _, state in run_local(3, partial(held, codec=codec, **options))]
    averages, state = held(comm, codec, range(STEPS, STEPS + 2), states, **options)
    return outcome(averages, [], state)


def all_reduce(comm, codec, *, feedback=True, exchange="auto", first=None):
    """`first`: number of the first step; counted by `gradcomp.all_reduce` without it."""
    kept = Feedback({0: 40 * 33, 1: 1111}) if feedback else None
    averages = []
    for step in range(STEPS):
        for key, name in enumerate(("w", "v")):
            values = gradient(SHAPES[name], step, comm.rank, key)
            options = {"feedback": kept, "exchange": exchange, "timeout_s": 20}
            options["step"] = None if first is None else first + 3 * step
            averages.append(
                bytes_of(gradcomp.all_reduce(values, codec, comm=comm, key=key, **options))
            )
    return outcome(averages, [], [kept.residual(key) for key in (0, 1)] if kept else [])


def local_steps(
    comm, codec, *, kind=gradcomp.DiLoCo, sync_every=2, bad=None, resumes=None, **options
):
    """`bad`: a step whose gradient has a NaN on rank 1. `resumes`: a step."""

    def begin(comm):
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        run = kind(model, optimizer, codec, comm=comm, sync_every=sync_every, **LIMITS | options)
        return model, optimizer, run

    model, optimizer, run = begin(comm)
    for step in range(3 * sync_every + 1):
        if step == resumes:
            weights, state, again = model.state_dict(), run.state_dict(), comm.duplicate()
            run.close()
            model, optimizer, run = begin(again)
            model.load_state_dict(weights)
            run.load_state_dict(state)
        model.fill(step, comm.rank)
        if (comm.rank, step) == (1, bad):
            model.v.grad[7] = float("nan")
        optimizer.step()
        try:
            run.step()
        except gradcomp.NotFinite:
            run.restore()
    weights, state = [p.detach().clone() for p in model.parameters()], run.state_dict()
    run.close()
    return outcome([], weights, state)


def ddp(
    codec, *, optimizer=None, dtype=torch.float32, bucket_cap_mb=25.0, materializes=False, **options
):
    """`materializes`: gradients of a fused update are unpacked first, in every second step."""
    model = Given(dtype)
    if optimizer is not None:
        split_parameters(model)
        options["optimizer"] = optimizer = optimizer(model.parameters())
    wrapped = DDP(model, bucket_cap_mb=bucket_cap_mb)
    run = gradcomp.ddp.register(wrapped, codec, **LIMITS | options)
    averages = []
    for step in range(STEPS):
        wrapped.zero_grad()
        wrapped(step, dist.get_rank()).backward()
        if materializes and step % 2:
            run.materialize_gradients()
        if optimizer is None or (materializes and step % 2):
            averages += [bytes_of(p.grad) for p in model.parameters()]
        if optimizer is not None:
            optimizer.step()
    state = run.state_dict()
    run.close()
    return outcome(averages, list(model.parameters()), state, run.stats)


def fsdp(
    codec,
    *,
    frozen="",
    bad=False,
    dtype=None,
    replicas=False,
    accumulates=False,
    states=None,
    saves=False,
    **options,
):
    """`replicas`: two of two ranks each. `accumulates`: gradients of every second step only are
    sent. `states`: what the run goes on from. `saves`: return the state.
    """
    model = Blocks()
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or frozen not in name)
    sharded = {"mp_policy": MixedPrecisionPolicy(dtype, dtype)}
    if replicas:
        sharded["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for module in (model.first, model.second, model):
        fully_shard(module, **sharded)
    run = gradcomp.fsdp.register(model, codec, **LIMITS | options)
    if states:
        run.load_state_dict(states)
    averages, begun = [], STEPS if states else 0
    for step in range(begun, begun + STEPS):
        if not accumulates or step % 2 == 0:
            model.zero_grad()
        model.set_requires_gradient_sync(not accumulates or step % 2 == 1)
        rank = dist.get_rank()
        model(step, rank, bad and (rank, step) == (1, 2)).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        if trained[0].grad is None:  # not sent yet
            continue
        averages += [bytes_of(p.grad) for p in trained]
        with torch.no_grad():
            for p in trained:
                p.sub_(p.grad, alpha=0.125)
    state = run.state_dict()
    run.close()
    return state if saves else outcome(averages, list(model.parameters()), state)


# ---- rows: (training, number of ranks, codec, options) -------------------------------------------

CODECS = {
    "identity": "identity",
    "bfloat16": "bfloat16",
    "ternary": Ternary(residual_decay=1.0),
    "ternary decays": Ternary(residual_decay=0.25),
    "ternary tensor": Ternary(group="tensor", residual_decay=0.5),
    "ternary forgets": Ternary(error_feedback=False),
    "terngrad": TernGrad(),
    "terngrad own": TernGrad(scale="own"),
    "terngrad rows": TernGrad(group="row"),
    "terngrad requantize": TernGrad(second_phase="requantize"),
    "terngrad bf16": TernGrad(second_phase="bf16"),
    "terngrad fp32": TernGrad(second_phase="fp32"),
    "onebit": OneBit(residual_decay=1.0),
    "onebit decays": OneBit(residual_decay=0.25),
    "onebit 33": OneBit(group=33, residual_decay=1.0),
    "onebit rotated": OneBit(rotate=True, residual_decay=1.0),
    "block2": Block(2, residual_decay=1.0),
    "block4": Block(4, residual_decay=1.0),
    "block4 decays": Block(4, residual_decay=0.5),
    "block8": Block(8, residual_decay=1.0),
    "entropy": EntropyCoded(2.2, residual_decay=1.0),
    "entropy 1.25": EntropyCoded(1.25, residual_decay=0.25),
}
check_kinds(CODECS)
EXCHANGES = ("all_gather", "reduce_scatter")
FEW = ("ternary decays", "terngrad", "onebit", "block4", "entropy")
GATHERS_ONLY = {"terngrad own", "onebit rotated"}
SCATTERS_ONLY = {"terngrad requantize", "terngrad bf16", "terngrad fp32"}
SLICED = {"advanced": Advanced(slice_numel=1024)}
ADAGRAD = {"advanced": Advanced(transform=AggregateAdagrad())}
LOCAL_ADAGRAD = {"advanced": Advanced(transform=LocalAdagrad())}
SLICED_ADAGRAD = {"advanced": Advanced(transform=AggregateAdagrad(), slice_numel=1024)}
UNITS, SCALED = {"precondition": True}, {"scaled": True}
DELAY = {"fragments": 2, "fragment_sync_delay": 1, "sync_every": 4}
SGD, ADAMW = partial(SplitSGD, lr=0.125), partial(SplitAdamW, lr=0.01)
ROWS = {}


def row(name, training, world_size, codec, **options):
    assert name not in ROWS
    ROWS[name] = training, world_size, codec, options


for codec, made in CODECS.items():
    for exchange in EXCHANGES:
        if codec not in (GATHERS_ONLY if exchange == "reduce_scatter" else SCATTERS_ONLY):
            row(f"{codec}, {exchange}", averager, 3, made, exchange=exchange)
for codec in FEW:
    made = CODECS[codec]
    row(f"{codec}, one rank", averager, 1, made)
    row(f"{codec}, 8 ranks", averager, 8, made, exchange="reduce_scatter")
    row(f"{codec}, bf16", averager, 2, made, dtype=torch.bfloat16)
    row(f"{codec}, fp16", averager, 3, made, dtype=torch.float16, exchange="reduce_scatter")
    row(f"{codec}, slices", averager, 3, made, exchange="reduce_scatter", **SLICED)
    row(f"{codec}, nodes", averager, 4, made, **NODES)
    row(f"{codec}, delayed", averager, 2, made, delayed=True)
    row(f"{codec}, all_reduce", all_reduce, 3, made, feedback=codec != "terngrad")
    row(f"{codec}, local steps", local_steps, 3, made)
    row(f"{codec}, ddp", ddp, 3, made)
    row(f"{codec}, fsdp", fsdp, 2, made)
for name in ("all_gather", "reduce_scatter"):
    way = {"exchange": name}
    row(f"precondition, {name}", averager, 3, Ternary(), **UNITS, **way)
    row(f"precondition, slices, {name}", averager, 3, Block(2), **UNITS, **SLICED, **way)
    row(f"warm start, {name}", averager, 3, OneBit(), warmup_steps=2, **way)
    row(f"local adagrad, {name}", averager, 3, OneBit(), **LOCAL_ADAGRAD, **way)
    row(f"buckets, {name}", averager, 3, Ternary(), bucket_cap_mb=0.004, **way)
    row(f"resharded, {name}", resharded, 2, OneBit(), **way)
    row(f"precondition, loss scale, {name}", averager, 3, Block(2), **UNITS, **SCALED, **way)
    row(f"precondition, adagrad, {name}", averager, 3, OneBit(), **LOCAL_ADAGRAD, **UNITS, **way)
rotated = OneBit(rotate=True)
row("rotated, owners", averager, 3, rotated, exchange="reduce_scatter", **SLICED)
row("rotated, bf16", averager, 3, rotated, exchange="reduce_scatter", dtype=torch.bfloat16)
row("rotated, fsdp", fsdp, 2, rotated)
row("rotated, local steps", local_steps, 2, rotated, fragments=2)
row("precondition, discarded", averager, 3, Ternary(), **UNITS, discard=2)
row("precondition, not finite", averager, 3, Ternary(), **UNITS, bad=("v", 7), **SLICED)
row("adagrad, not finite", averager, 3, OneBit(), bad=("v", 7), **ADAGRAD)
row("adagrad, slices", averager, 3, OneBit(), **SLICED_ADAGRAD)
row("adagrad, loss scale", averager, 3, OneBit(), **SCALED, **ADAGRAD)
row("precondition, bf16", averager, 3, Ternary(), **UNITS, dtype=torch.bfloat16)
row("precondition, nodes", averager, 4, Block(2), **UNITS, **NODES)
row("warm start, packed", averager, 3, OneBit(), warmup_steps=2, warmup_codec=Block(4))
row("aggregate adagrad", averager, 3, OneBit(), **ADAGRAD)
row("not finite, first slice", averager, 3, Ternary(), bad=("w", 3), **SLICED)
row("not finite, last slice", averager, 3, OneBit(), bad=("v", 1100), **SLICED)
row("not finite, excluded tensor", averager, 2, Ternary(), bad=("b", 2))
row("not finite, atomic_steps", averager, 2, Ternary(), bad=("v", 7), atomic_steps=True)
row("discarded", averager, 3, OneBit(), discard=2)
row("loss scale", averager, 3, OneBit(), **SCALED)
row("local adagrad, loss scale", averager, 3, OneBit(), **SCALED, **LOCAL_ADAGRAD)
row("local adagrad, not finite", averager, 3, OneBit(), bad=("v", 7), **LOCAL_ADAGRAD)
row("terngrad, resumed", averager, 3, TernGrad(), resumes=2)
row("loss scale, resumed", averager, 3, OneBit(), **SCALED, resumes=3)
row("delayed, flushed", averager, 2, OneBit(), delayed=True, flushes=True)
row("local steps, fragments", local_steps, 2, Ternary(), fragments=2)
row("local steps, fragments, delay", local_steps, 2, OneBit(), **DELAY)
row("local steps, owners", local_steps, 3, OneBit(), shard_outer=True)
row("local steps, warm start", local_steps, 2, OneBit(), warmup_steps=2, warmup_codec=Ternary())
row("local steps, fragments, draws", local_steps, 2, TernGrad(), fragments=2)
row("local steps, precondition", local_steps, 2, Block(2), **UNITS)
row("local steps, not finite", local_steps, 2, OneBit(), bad=3)
row("local steps, resumed", local_steps, 2, OneBit(), **DELAY, resumes=6)
row("all_reduce, own steps", all_reduce, 3, TernGrad(), feedback=False, first=7)
row("all_reduce, own scales", all_reduce, 3, TernGrad(scale="own"), feedback=False)
row("local sgd", local_steps, 2, Ternary(), kind=gradcomp.LocalSGD)
row("ddp, buckets", ddp, 2, Ternary(), bucket_cap_mb=0.004)
row("ddp, precondition", ddp, 2, Ternary(), **UNITS, exchange="reduce_scatter")
row("ddp, nodes", ddp, 4, OneBit(), **NODES)
row("ddp, fused sgd", ddp, 2, Ternary(), optimizer=partial(SplitSGD, lr=0.125, momentum=0.5))
row("ddp, fused adamw", ddp, 3, TernGrad(), optimizer=ADAMW)
row("ddp, fused, nodes", ddp, 4, OneBit(), optimizer=SGD, **NODES)
row("ddp, fused and materialized", ddp, 2, OneBit(), optimizer=SGD, materializes=True)
row("ddp, fused, entropy", ddp, 3, EntropyCoded(2.2), optimizer=ADAMW)
row("local steps, fragments, entropy", local_steps, 2, EntropyCoded(1.25), fragments=2)
row("precondition, entropy", averager, 3, EntropyCoded(2.2), **UNITS, **SLICED)
row("fsdp, bf16", fsdp, 2, Ternary(), dtype=torch.bfloat16)
row("fsdp, not finite", fsdp, 2, OneBit(), bad=True)
row("fsdp, 3 ranks", fsdp, 3, OneBit())
row("fsdp, frozen", fsdp, 2, TernGrad(), frozen="first.v")
row("fsdp, bf16 residuals", fsdp, 2, OneBit(), residuals="bf16")
row("fsdp, weights", fsdp, 2, Ternary(error_feedback=False), weights="block8")
row("fsdp, kept weights", fsdp, 3, TernGrad(), weights="block4", keep_weights=True)
row("fsdp, replicas", fsdp, 4, OneBit(), replicas=True)
row("fsdp, accumulated", fsdp, 2, OneBit(), accumulates=True)
row("fsdp, resumed", fsdp, 2, TernGrad(), saved_by=2)
row("fsdp, 3 ranks go on as 2", fsdp, 2, OneBit(), saved_by=3)
row("fsdp, 3 ranks go on as 1", fsdp, 1, OneBit(), saved_by=3)

# rows that run on the shadow set as well: together they see all that is done with values
ON_SHADOW = [
    "ternary decays, ddp",
    "ddp, precondition",
    "ddp, fused sgd",
    "fsdp, 3 ranks",
    "fsdp, bf16 residuals",
    "fsdp, weights",
    "local steps, fragments, delay",
    "local steps, owners",
    "precondition, adagrad, reduce_scatter",
    "rotated, bf16",
    "loss scale",
    "block4, nodes",
    "onebit, all_reduce",
    "ddp, fused, entropy",
    "entropy, nodes",
]


def recorded(training, *args, **options):
    """Return what this process sends, and what its rank ends with."""
    torch.set_num_threads(1)
    with Recorder() as recorder:
        ends = training(*args, **options)
    return recorder.found(), ends


def recorded_on_shadow(training, *args, **options):
    """The same with values in memory that nothing but their kernel set and torch can read."""
    with shadowed() as kernel_set:
        found = recorded(training, *args, **options)
    work = args[-1] if training is run_local else partial(training, **options)
    # which give kernels tensors of the user, too: a tensor to average, weights
    with_own = work.func in (all_reduce, local_steps) or "optimizer" in work.keywords
    assert kernel_set.counts["kernels"] and (with_own or not kernel_set.counts["host values"])
    return found


def train(gloo, training, world_size, codec, options, *, recorded=recorded):
    options = dict(options)
    if saved_by := options.pop("saved_by", 0):
        options["states"] = gloo(saved_by, partial(fsdp, codec, saves=True, **options))
    if training in (ddp, fsdp):
        found = gloo(world_size, partial(recorded, training, codec, **options))
        messages, ends = sorted(one for sent, _ in found for one in sent), [one for _, one in found]
    else:
        work = partial(training, codec=codec, **options)
        messages, ends = recorded(run_local, world_size, work)
    return {
        "messages": len(messages),
        "bytes": sum(nbytes for _, nbytes in messages),
        "digest": digest_of(messages),
        "ranks": ends,
    }


@pytest.mark.parametrize("name", ROWS)
def test_nothing_that_is_sent_or_computed_has_changed(gloo, name, request):
    found = train(gloo, *ROWS[name])
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if request.config.getoption("--write-golden"):
        golden = {one: golden[one] for one in ROWS if one in golden} | {name: found}
        text = ",\n".join(f"{json.dumps(one)}: {json.dumps(golden[one])}" for one in sorted(golden))
        GOLDEN.write_text(f"{{\n{text}\n}}\n")
    assert found == golden[name]


@pytest.mark.parametrize("name", ON_SHADOW)
def test_a_kernel_set_whose_values_cannot_be_read_computes_the_same(gloo, name):
    """Nothing above kernel sets takes values for memory of the host."""
    golden = json.loads(GOLDEN.read_text())[name]
    assert train(gloo, *ROWS[name], recorded=recorded_on_shadow) == golden


def test_the_file_has_the_rows_of_this_table():
    assert sorted(json.loads(GOLDEN.read_text())) == sorted(ROWS)
