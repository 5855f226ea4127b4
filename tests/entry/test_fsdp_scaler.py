"""`grad_scaler` of `gradcomp.fsdp.register`: residuals have no scale, and skipped steps none."""

import math

import pytest
import torch
import torch.distributed as dist
from _kinds import check_kinds
from _ranks import each_rank
from _saved import parts_of
from test_fsdp import (
    MIN_NUMEL,
    Expected,
    fresh,
    loss_of,
    mesh_of,
    registered,
    run,
    same,
    shards_of,
    wrap,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from gradcomp import Block, EntropyCoded, GradcompError, OneBit, PeerMismatch, Ternary
from gradcomp.memory.saved import write

CODECS = [
    OneBit(),
    Ternary(residual_decay=0.25),
    Block(4),
    EntropyCoded(2.0, residual_decay=0.25),
    Ternary(error_feedback=False),
]
check_kinds(CODECS, without=("terngrad", "block2", "block8", "identity", "bfloat16"))


class Scaler:
    """Scales that are given, one for each backward pass."""

    def __init__(self, *scales):
        self.scales = list(scales)

    def get_scale(self):
        return self.scales[0]


def scaled(state, model, scaler, step, loss=loss_of):
    """Return this rank's shards of one step, without the scale."""
    model.zero_grad()
    scale = scaler.get_scale()
    (loss(model, step) * scale).backward()
    scaler.scales.pop(0)
    return {name: shard / scale for name, shard in shards_of(model).items()}


def overflows(model, step):
    """Return a loss whose gradient becomes infinite behind the first module, on rank 1: the modules
    that backward comes to before are exchanged, and are finite.
    """

    def infinite(module, inputs, output):
        if dist.get_rank() == 1:
            output.register_hook(lambda grad: grad * math.inf)

    with model.first.register_forward_hook(infinite):
        return loss_of(model, step)


def residuals_of(state):
    return {
        name: tensor.clone() for name, tensor in parts_of(state.state_dict())["residual"].items()
    }


def equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("residuals", ["fp32", "bf16"])
@each_rank(2)
def test_a_scale_changes_neither_shards_nor_residuals(codec, residuals):
    """Powers of two: every bit is the same, also after the scale has changed."""
    model, plain = wrap(fresh()), wrap(fresh())
    scaler = Scaler(2.0**16, 2.0**16, 2.0**10, 0.5, 2.0**12)
    with (
        registered(model, codec, residuals=residuals, grad_scaler=scaler) as state,
        registered(plain, codec, residuals=residuals) as unscaled,
    ):
        for step in range(5):
            run(plain, [step])
            same(scaled(state, model, scaler, step), shards_of(plain))
            equal(residuals_of(state), residuals_of(unscaled))
        nbytes = [one._residuals.nbytes for one in (state, unscaled)]
        assert nbytes == ([2 * nbytes[1], nbytes[1]] if codec.error_feedback else [0, 0])


@each_rank(2)
def test_a_step_that_overflows_leaves_every_residual_alone():
    """Also those of modules that were averaged before the one that overflows."""
    model, expected = wrap(fresh()), Expected(OneBit())
    scaler = Scaler(*[1024.0] * 2, *[512.0] * 2)
    with registered(model, OneBit(), grad_scaler=scaler) as state:
        same(scaled(state, model, scaler, 0), expected(0))
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        before = residuals_of(state)
        found = scaled(state, model, scaler, 1, overflows)
        assert not all(math.isfinite(shard.sum()) for shard in found.values())
        assert math.isfinite(found["second.weight"].sum()), "it was averaged before"
        equal(residuals_of(state), before)
        for step in (2, 3):
            same(scaled(state, model, scaler, step), expected(step))


class Weight(nn.Module):
    """A weight whose gradient is the input, and one that has a gradient only if it is asked for."""

    def __init__(self):
        super().__init__()
        self.weight, self.second = (nn.Parameter(torch.ones(32, 32)) for _ in range(2))

    def forward(self, gradient, second=False):
        return (self.weight * gradient + (self.second if second else 0)).sum()


def noise_of(step, factor=1.0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return factor * torch.randn(32, 32, generator=generator)


def after_a_step(state, model, *inputs):
    """Return the residuals after a step that an optimizer has applied."""
    model(*inputs).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.zero_grad()
    left = residuals_of(state)
    assert left["weight"].any()
    return left


@each_rank(2)
def test_an_average_that_overflows_float16_undoes_the_step():
    """Payloads are finite, and so is every rank's gradient: nothing is flagged."""
    model = fully_shard(Weight(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with registered(model, Ternary(residual_decay=0.25), grad_scaler=Scaler(1.0)) as state:
        before = after_a_step(state, model, noise_of(0), True)
        model(noise_of(1).sign() * 6e4, True).backward()  # levels of 1.8 times as much
        assert not model.weight.grad.to_local().isfinite().all()
        assert state.stats.nonfinite_buckets == 0
        equal(residuals_of(state), before)


@pytest.mark.filterwarnings("ignore:the gradient of an FSDP module lacks")
@each_rank(2)
def test_a_module_that_torch_reduces_undoes_the_others():
    """It lacks a gradient, so the others go uncompressed: among them an infinite one."""
    model = nn.ModuleList([fully_shard(Weight()), fully_shard(Weight())])
    with registered(model, OneBit(), grad_scaler=Scaler(1.0)) as state:
        both = lambda gradient: sum(one(gradient, True) for one in model)
        both(noise_of(0)).backward()
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        before = residuals_of(state)
        factor = math.inf if dist.get_rank() else 1.0
        (model[0](noise_of(1), True) + model[1](noise_of(1, factor))).backward()
        assert state.plain == 1 and model[0].weight.grad.to_local().isfinite().all()
        equal(residuals_of(state), before)


@pytest.mark.parametrize("bad", [0, 1, None])
@each_rank(2)
def test_every_exchange_since_the_last_step_is_undone(bad):
    """Gradients of two backward passes, the first, the second or none of them with an overflow."""
    model = fully_shard(Weight())
    with registered(model, OneBit(), grad_scaler=Scaler(1.0)) as state:
        before = after_a_step(state, model, noise_of(0), True)
        for number in range(2):
            factor = math.inf if dist.get_rank() and number == bad else 1.0
            model(noise_of(1 + number, factor), True).backward()
        if bad is None:
            assert not torch.equal(residuals_of(state)["weight"], before["weight"])
            state.discard_step()
        equal(residuals_of(state), before)


@each_rank(4)
def test_replicas_of_a_shard_undo_the_same_step():
    """The overflow is in one shard group; the other one has it from torch's all-reduce."""
    model = wrap(fresh(), mesh=mesh_of("replica", "shard"))
    with registered(model, OneBit(), grad_scaler=Scaler(1.0)) as state:
        run(model, [0])
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        before = residuals_of(state)
        model.zero_grad()
        overflows(model, 1).backward()  # on rank 1, of the first group
        assert state.stats.nonfinite_buckets == (1 if dist.get_rank() < 2 else 0)
        equal(residuals_of(state), before)


@each_rank(2)
def test_what_an_optimizer_has_applied_is_not_undone():
    model = fully_shard(Weight())
    with registered(model, OneBit(), grad_scaler=Scaler(1.0)) as state:
        left = after_a_step(state, model, noise_of(0), True)
        model.set_requires_gradient_sync(False)
        model(noise_of(1, math.inf), True).backward()  # exchanges nothing
        state.discard_step()
        equal(residuals_of(state), left)


@each_rank(2)
def test_blocks_that_are_recomputed_one_by_one_are_undone_together():
    """Reentrant checkpoints run a backward pass for each block, the first block's last."""
    torch.manual_seed(0)
    model = nn.ModuleList([fully_shard(nn.Linear(32, 32, bias=False)) for _ in range(3)])

    def backward(step, bad=False):
        x = noise_of(step).requires_grad_()
        for number, block in enumerate(model):
            x = checkpoint(block, x, use_reentrant=True)
            if bad and number == 0:
                x.register_hook(lambda grad: grad * math.inf)
        x.sum().backward()

    with registered(model, OneBit(), grad_scaler=Scaler(1.0)) as state:
        backward(0)
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        before = residuals_of(state)
        backward(1, bad=dist.get_rank() == 1)
        assert model[2].weight.grad.to_local().isfinite().all()
        assert not model[0].weight.grad.to_local().isfinite().all()
        equal(residuals_of(state), before)


@each_rank(2)
def test_a_step_can_be_discarded():
    model, expected = wrap(fresh()), Expected(OneBit())
    scaler = Scaler(*[2.0] * 4)
    with registered(model, OneBit(), grad_scaler=scaler) as state:
        same(scaled(state, model, scaler, 0), expected(0))
        torch.optim.SGD(model.parameters(), lr=0.0).step()
        before = residuals_of(state)
        scaled(state, model, scaler, 1)
        state.discard_step()
        state.discard_step()  # the second time nothing is left to undo
        equal(residuals_of(state), before)
        same(scaled(state, model, scaler, 2), expected(2))
    for codec, said in (
        (OneBit(), "keeps one copy of residuals"),
        (Ternary(error_feedback=False), ""),
    ):
        with registered(model, codec) as state:
            run(model, [0])
            if said:
                with pytest.raises(GradcompError, match=said):
                    state.discard_step()
            else:
                state.discard_step()


@pytest.mark.parametrize("codec", [OneBit(), Ternary(error_feedback=False)], ids=repr)
@each_rank(2)
def test_ranks_with_other_scales_are_an_error(codec):
    model, scaler = wrap(fresh()), Scaler(2.0 if dist.get_rank() else 4.0)
    with registered(model, codec, grad_scaler=scaler) as state:
        before = residuals_of(state)
        with pytest.raises(PeerMismatch, match="loss_scale.*4.0.*2.0"):
            scaled(state, model, scaler, 0)
        equal(residuals_of(state), before)
        assert all(p.grad.to_local().isnan().all() for p in model.parameters())


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0])
@each_rank(2)
def test_a_scale_that_scales_nothing_is_an_error(scale):
    model = wrap(fresh())
    state = registered(model, OneBit(), grad_scaler=Scaler(scale))
    with state, pytest.raises(GradcompError, match="the grad_scaler's scale is"):
        loss_of(model, 0).backward()


@each_rank(2)
def test_a_state_has_no_scale():
    """What was saved with a scaler goes on without one, and the other way round."""
    model, scaler, expected = wrap(fresh()), Scaler(64.0, 64.0), Expected(OneBit())
    with registered(model, OneBit(), grad_scaler=scaler) as state:
        same(scaled(state, model, scaler, 0), expected(0))
        saved = state.state_dict()
    with registered(model, OneBit()) as state:
        state.load_state_dict(saved)
        run(model, [1])
        same(shards_of(model), expected(1))
        saved = state.state_dict()
    scaler = Scaler(8.0)
    with registered(model, OneBit(), grad_scaler=scaler) as state:
        state.load_state_dict(saved)
        same(scaled(state, model, scaler, 2), expected(2))


@each_rank(1)
def test_a_single_rank_adds_what_others_left_with_its_scale():
    model, plain, scaler = wrap(fresh()), wrap(fresh()), Scaler(4.0)
    with (
        registered(model, OneBit(), grad_scaler=scaler) as state,
        registered(plain, OneBit()) as unscaled,
    ):
        shapes = {name: p.shape for name, p in fresh().named_parameters()}
        steps = [[name, 1] for name in sorted(shapes)]
        left = {name: torch.ones(s) for name, s in shapes.items() if s.numel() >= MIN_NUMEL}
        states = [
            write(state._origin(), rank, 2, 1, {"residual": left}, steps=steps) for rank in range(2)
        ]
        for one in (state, unscaled):
            one.load_state_dict(states)
        for step in range(2):
            run(plain, [step])
            scaler.scales.append(2.0)
            same(scaled(state, model, scaler, step), shards_of(plain))


@each_rank(2)
def test_torchs_scaler_skips_on_all_ranks():
    """A bad batch on one rank: the run ends with the weights of one that never had it."""

    def ended(batches):
        torch.manual_seed(0)
        model = wrap(fresh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=100)
        with registered(model, OneBit(), grad_scaler=scaler):
            for number in batches:
                optimizer.zero_grad()
                loss = (overflows if number < 0 else loss_of)(model, abs(number))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return [p.to_local().detach().clone() for p in model.parameters()], scaler.get_scale()

    weights, scale = ended([0, -1, 2])
    wanted, before = ended([0, 2])
    assert (scale, before) == (2.0**11, 2.0**12)
    assert all(torch.equal(one, other) for one, other in zip(weights, wanted, strict=True))
