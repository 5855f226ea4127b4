"""Methods by name: what is read, what is refused, how the planner has it, and what trains so."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradcomp import Block
from gradcomp.bench import methods, trainer
from gradcomp.bench.methods import parse, wrap
from gradcomp.bench.models import ByteGPT
from gradcomp.bench.optimizers import OPTIMIZERS
from gradcomp.bench.predict import planned
from gradcomp.bench.workloads import Settings
from gradcomp.comm import LocalCommunicator
from gradcomp.plan.costs import LocalSteps, plan_buckets
from gradcomp.plan.models import find_model


@pytest.mark.parametrize(
    "name",
    [
        *(name for name, method in methods.METHODS.items() if method.codec is None),
        "terngrad",
        "auto",
        "auto:guard=off,min_numel=5",
        "auto:every=3",
        "fsdp2:auto",
        "block2:precondition",
        "ternary:step=1.5,decay=0.25,group=128",
        "onebit:rotate,exchange=all_gather,min_numel=5,slice_numel=512",
        "onebit:double,warmup_steps=2",
        "json:dumps",
        "fsdp2",
        "fsdp2:bf16",
        "fsdp2:onebit,weights=block8",
        "fsdp2:onebit,weights=block8,keep",
    ],
)
def test_a_method_is_read(name):
    assert parse(name).name == name


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("twobit", "no method named 'twobit'; did you mean onebit? there are none, noop, fp32"),
        ("json:nothing", "module 'json' has no attribute 'nothing'"),
        ("json:__name__", "is not a function"),
        ("onebit:x=1", "unknown option 'x' of onebit: exempt, warmup_steps"),
        ("onebit:exempt=all", "exempt: must be one of none, vectors, ends"),
        ("terngrad:step=2", "step: terngrad has no such option"),
        ("terngrad:feedback=off", "for codecs that have"),
        ("onebit:feedback=no", "feedback: must be one of off"),
        ("block2:rotate", "rotate: block2 has no such option"),
        ("onebit:precondition=1", "precondition: takes no value, got '1'"),
        ("bf16:second=block4", "second: bf16 has no such option"),
        ("onebit:second=exact", "integer sums"),
        ("onebit:start=bf16,warmup_steps=3", "bf16 is not one"),
        ("onebit:start=auto,warmup_steps=3", "auto is not one"),
        ("auto:step=2", "auto has no such option"),
        ("auto:feedback=off", "for codecs that have"),
        ("auto:guard=1", "guard: must be one of off"),
        ("onebit:start=block4", "warmup_steps=N"),
        ("onebit:momentum,warmup_steps=3", "unknown option 'momentum' of onebit: it is gone"),
        ("onebit:precondition,feedback=off", "forgotten"),
        ("onebit:double,feedback=off", "double buffering has neither"),
        ("onebit:double,every=3", "double buffering has neither"),
        ("onebit:fragments=2", "every=H"),
        ("onebit:every=3,feedback=off", "exclude feedback=off"),
        ("bf16:every=3", "need a codec"),
        ("none:every=3", "need a codec"),
        ("terngrad:every=x", "invalid literal"),
        ("terngrad:every=3,alpha=x", "could not convert"),
        ("fp16:min_numel=3", "fp16 takes no options but those of local steps"),
        ("powersgd1:decay=0.5", "powersgd1 has no such option"),
        ("powersgd1:exempt=vectors", "powersgd1 takes no options but warmup_steps"),
        ("powersgd1:warmup_steps=1", "at least 2 steps in fp32"),
        ("fsdp2:powersgd1", "FSDP2 takes"),
        ("fsdp2:", "no method named ''"),
        ("fsdp2:fp16", "FSDP2 takes"),
        ("topk", "TopK was removed"),
        ("fsdp2:ternery", "ternery"),
        ("fsdp2:terngrad,keep", "no method named 'terngrad,keep'"),
        ("fsdp2:terngrad,weights=onebit", "fsdp2:terngrad,weights=onebit"),
        ("fsdp2,weights=block8", "fsdp2,weights=block8"),
        ("fsdp2:terngrad:precondition", "under FSDP2 a codec takes"),
        ("fsdp2:onebit:every=3", "under FSDP2 a codec takes"),
        ("diloco:onebit:30,delay=5", "now: onebit:every=30,delay=5"),
        (
            "diloco:terngrad:3,warmup_steps=9,warmup_codec=block4",
            "every=3,warmup_steps=9,start=block4",
        ),
        ("diloco", "now: CODEC:every=H"),
    ],
)
def test_a_wrong_method_is_refused(name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(name)


def test_options_reach_the_codec_and_the_entry_point():
    method = parse(
        "onebit:every=30,fragments=2,delay=5,outer_momentum=0.5,warmup_steps=9,start=block4"
    )
    assert method.local == {
        "sync_every": 30,
        "fragments": 2,
        "fragment_sync_delay": 5,
        "outer_momentum": 0.5,
    }
    assert method.options["warmup_steps"] == 9
    assert repr(method.options["warmup_codec"]) == repr(Block(4))
    assert parse("terngrad:second=block4").codec.second_phase == "block4"
    assert parse("ternary:step=1.5,group=128").codec.options() | {"step": 1.5, "group": 128} == (
        parse("ternary:step=1.5,group=128").codec.options()
    )
    named = list(ByteGPT(8, 1, 1, 4).named_parameters())
    assert parse("onebit").options_for(named) == {}
    ends = parse("onebit:exempt=ends,warmup_steps=3").options_for(named)
    assert {"head.weight", "embedding.weight", "norm.bias"} <= set(ends["exclude"])
    assert "blocks.0.up.weight" not in ends["exclude"] and ends["warmup_steps"] == 3


@pytest.mark.parametrize(
    ("name", "world_size", "over_mpi", "exchange", "second_phase"),
    [
        ("fp32", 2, True, "all_gather", ""),
        ("fp32", 4, True, "reduce_scatter", "fp32"),
        ("terngrad", 2, False, "all_gather", ""),
        ("terngrad", 4, False, "reduce_scatter", "exact"),
        ("terngrad", 8, False, "reduce_scatter", "block4"),
        ("onebit", 2, False, "all_gather", ""),
        ("onebit:exchange=all_gather", 8, False, "all_gather", ""),
        ("terngrad:every=30,fragments=2,delay=5", 8, False, "reduce_scatter", "block4"),
    ],
)
def test_the_planner_knows_the_method_as_it_travels(
    name, world_size, over_mpi, exchange, second_phase
):
    method = planned(name, world_size, over_mpi=over_mpi)
    assert method.exchange == exchange
    assert exchange == "all_gather" or method.second_phase == second_phase
    assert method.local == (LocalSteps(30, 2, 5) if "every" in name else None)
    assert plan_buckets(method, find_model("lenet").parameters, world_size)


@pytest.mark.parametrize(
    "name",
    [
        "powersgd1",
        "auto",
        "block2:precondition",
        "onebit:double",
        "terngrad:every=30,warmup_steps=9",
    ],
)
def test_the_planner_does_not_know(name):
    assert planned(name, 2) is None


KINDS = (
    "none",
    "onebit",
    "auto",
    "ternary:every=2",
    "onebit:double",
    "fsdp2",
    "fsdp2:onebit,weights=block8",
)


def trained(name):
    """Return the loss of a byte GPT before and after three steps with a method."""
    torch.manual_seed(0)
    model = ByteGPT(16, 2, 2, 8)
    ready = wrap(model, parse(name), lambda m: OPTIMIZERS["adamw"](m, 0.02), min_numel=0)
    x = torch.arange(64).view(8, 8) + torch.distributed.get_rank()
    workload = SimpleNamespace(
        loss=lambda model, x: nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()),
        settings=Settings(1, 8, None, 0.0, {}),
    )
    with torch.no_grad():
        before = workload.loss(ready.model, x).item()
    for _ in range(3):
        trainer._step(ready, workload, model, x)
    with torch.no_grad():
        after = workload.loss(ready.model, x).item()
    if hasattr(ready.state, "close"):
        ready.state.close()
    return before, after


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_method_trains(gloo, name):
    for before, after in gloo(2, trained, name):
        assert after < before - 0.3, (before, after)


def test_what_muon_trains_is_the_hidden_matrices(monkeypatch):
    model = ByteGPT(16, 2, 2, 8)
    muon, adamw = OPTIMIZERS["muon"](model, 0.02)
    names = {id(p): name for name, p in model.named_parameters()}
    found = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert found == {
        n for n, p in model.named_parameters() if n.startswith("blocks") and p.ndim == 2
    }
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert rest == set(names.values()) - found
    assert adamw.param_groups[0]["lr"] == 0.002
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"torch .* has no Muon: 2\.9 or newer does"):
        OPTIMIZERS["muon"](model, 0.02)


def test_fsdp2_and_mpi_are_not_one_method():
    (comm,) = LocalCommunicator.group(1)
    with pytest.raises(ValueError, match="fsdp2: FSDP2 moves bytes over torch's process group"):
        wrap(nn.Linear(4, 4), parse("fsdp2"), lambda m: [], comm)


def averages(name):
    """Return whether later averages of the same gradients equal the first."""
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(8, 64)
    torch.manual_seed(0)
    workload = SimpleNamespace(
        loss=lambda model, x: model(x)[:, :2].sum(), settings=Settings(1, 8, None, 0.0, {})
    )
    model = nn.Linear(64, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0)]
    ready = wrap(model, parse(name), lambda m: optimizers, min_numel=0)
    grads = []
    for _ in range(3):
        trainer._step(ready, workload, model, x)
        grads.append(model.weight.grad.clone())
    ready.state.close()
    return [torch.equal(grads[0], other) for other in grads[1:]]


@pytest.mark.parametrize(("name", "same"), [("onebit", False), ("onebit:feedback=off", True)])
def test_without_feedback_every_step_is_a_first_one(gloo, name, same):
    """The same gradients give the same average again, which residuals would change."""
    assert gloo(2, averages, name) == [[same, same]] * 2


def rounded():
    model = nn.Linear(1, 1, bias=False)
    ready = wrap(model, parse("bf16"), lambda m: [torch.optim.SGD(m.parameters(), lr=0.0)])
    x = torch.tensor([[1.0 + 2**-9], [3.0]])[torch.distributed.get_rank()]
    (ready.model(torch.ones(1, 1)) * 0 + model.weight * x).sum().backward()
    return model.weight.grad.item(), trainer._total_nbytes(ready, 1, 2)


def test_bf16_rounds_before_and_after_the_sum(gloo):
    assert gloo(2, rounded) == [(2.0, 2)] * 2
