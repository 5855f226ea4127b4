"""The DDP hook over real processes: each test is what every rank does."""

import re
import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _kinds import check_kinds
from _models import bits, loss_of, minibatch, sgd, small_model, train
from _ranks import each_rank, mismatch
from _saved import parts_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import GradcompError, Identity, OneBit, PeerMismatch, TernGrad, UnsupportedTensor


def trained(codec, ddp=None, dtype=torch.float32, **options):
    """Return the weights after four steps, with DDP's own averages where `codec` is None."""
    model = DDP(small_model(dtype), **(ddp or {}))
    optimizer = sgd(model)
    state = codec and gradcomp.ddp.register(model, codec, min_numel=0, **options)
    train(model, optimizer, dist.get_rank(), range(4))
    if state:
        state.check_replicas()
        state.close()
    return bits(model)


def raised(kind, call, *args):
    """Return the error of this kind that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args)
    return caught.value


# ---- what is computed ----------------------------------------------------------------------------


@each_rank(2, "ranks")
def test_identity_equals_no_hook_bit_for_bit():
    assert trained(Identity(), exchange="all_gather") == trained(None)


CODECS = {
    "terngrad": TernGrad(),
    "own": TernGrad(scale="own"),
    "requantize": TernGrad(second_phase="requantize"),
    "onebit": OneBit(),
}
check_kinds(
    CODECS, without=("ternary", "block2", "block4", "block8", "entropy", "identity", "bfloat16")
)
LAYOUTS = [{"bucket_cap_mb": 0.01}, {}, {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True}]


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", CODECS)
@each_rank(3, "ranks")
def test_bucket_layout_changes_no_bit(name, exchange):
    """Promises 2 and 3: whatever the buckets, it is the same run on every rank."""
    runs = {trained(CODECS[name], layout, exchange=exchange) for layout in LAYOUTS}
    assert len(runs) == 1
    return runs


@each_rank(2)
def test_other_modes_of_ddp_and_a_hook_registered_by_hand_are_the_same_run():
    model = DDP(small_model())
    state = gradcomp.ddp.CompressionState(model, "onebit", min_numel=0)
    model.register_comm_hook(state, gradcomp.ddp.compression_hook)
    train(model, sgd(model), dist.get_rank(), range(4))
    state.close()
    modes = {}, {"static_graph": True}, {"find_unused_parameters": True}
    runs = {bits(model), *(trained(OneBit(), mode) for mode in modes)}
    assert len(runs) == 1
    return runs


class Mixed(nn.Module):
    """A layer of each of so many dtypes: as many buckets in the first step of a static graph."""

    def __init__(self, count):
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float16)[:count]
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for dtype in dtypes)

    def forward(self, x):
        return sum(layer(x.to(layer.weight.dtype)).float().sum() for layer in self.layers)


@pytest.mark.parametrize("count", [1, 2, 3])
@each_rank(2)
def test_a_first_step_of_a_static_graph_that_cannot_begin_is_an_error(count):
    """DDP gives each of its buckets the index 0 then, and says of none that it is the last."""
    model = DDP(Mixed(count), static_graph=True)
    with gradcomp.ddp.register(model, OneBit(), min_numel=0) as state:
        with (
            mock.patch.object(state._engine, "begin", side_effect=GradcompError("no step")),
            pytest.raises(GradcompError, match="no step"),
        ):
            model(torch.ones(1, 64)).backward()
        assert all(p.grad.isnan().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_rank(2)
def test_half_precision_parameters(dtype):
    return [trained(codec, dtype=dtype) for codec in (TernGrad(), OneBit(), Identity())]


@each_rank(2)
def test_no_sync_accumulates_and_skips_the_hook():
    model, plain = DDP(small_model()), DDP(small_model())
    with gradcomp.ddp.register(model, Identity(), min_numel=0) as state:
        for m in (model, plain):
            with m.no_sync():
                loss_of(m, 0, dist.get_rank()).backward()
            loss_of(m, 1, dist.get_rank()).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        assert state.stats.steps == 1


@each_rank(2, "ranks")
def test_several_models_in_one_backward():
    """Each with a state of its own, against the same models alone."""
    results = []
    for together in (True, False):
        models = [DDP(small_model(seed=s)) for s in (1, 2)]
        states = [
            gradcomp.ddp.register(m, c, min_numel=0)
            for m, c in zip(models, (TernGrad(), OneBit()), strict=True)
        ]
        for step in range(3):
            losses = [loss_of(m, step, dist.get_rank()) for m in models]
            for loss in [sum(losses)] if together else losses:
                loss.backward()
            for m in models:
                torch.optim.SGD(m.parameters(), lr=0.1).step()
                m.zero_grad()
        results.append([bits(m) for m in models])
        for state in states:
            state.close()
    assert results[0] == results[1]


@each_rank(4, "ranks")
def test_rows_of_a_device_mesh_average_over_their_own_ranks():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    model = DDP(nn.Linear(64, 64, bias=False), process_group=mesh["data"].get_group())
    with gradcomp.ddp.register(model, Identity(), min_numel=0):
        model(torch.full((1, 64), float(10 ** dist.get_rank()))).sum().backward()
    wanted = 5.5 if dist.get_rank() < 2 else 550.0
    assert model.module.weight.grad[0, 0].item() == wanted


class Stack(nn.Module):
    """40 layers of 64x64 whose gradients are known: each weight's is that rank's constant."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(40)])

    def forward(self, x):
        return sum((w * x).sum() * (i + 1) for i, w in enumerate(self.weights))


@pytest.mark.parametrize("steps", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("codec", [OneBit(), TernGrad(clip_sigma=None)], ids=lambda c: c.name)
@each_rank(4, "ranks")
def test_forty_layers_in_small_buckets(codec, steps):
    """Chained collectives in Future.then hang here; FIFO stages do not, and every value is the
    exact expectation.
    """
    model = DDP(Stack(), bucket_cap_mb=0.01)
    state = gradcomp.ddp.register(model, codec, min_numel=0)
    for step in range(steps):
        model.zero_grad()
        factor = 1 + step % 3
        model(torch.tensor(float((dist.get_rank() + 1) * factor))).backward()
        for i, weight in enumerate(model.module.weights, 1):
            # the shared scale is 4 units: rank r's code is 1 with probability (r + 1) / 4
            levels = weight.grad / (factor * i)
            if codec.name == "terngrad":
                assert torch.equal(levels, levels.round())
                assert 1 <= levels.min() <= levels.max() <= 4
                assert levels.mean().item() == pytest.approx(2.5, abs=0.1)
            else:  # constant gradients decode exactly: both phases lossless
                assert (weight.grad == 2.5 * factor * i).all()
    assert len(state._step.buckets) == 40
    state.close()


# ---- steps, checkpoints, scalers -----------------------------------------------------------------


@each_rank(2)
def test_exclude_and_min_numel_travel_as_fp32():
    model, plain = DDP(small_model()), DDP(small_model())
    options = {"min_numel": 1000, "exclude": ("4.*", "0.weight")}
    with gradcomp.ddp.register(model, TernGrad(), **options) as state:
        for m in (model, plain):
            loss_of(m, 0, dist.get_rank()).backward()
        pairs = zip(model.module.named_parameters(), plain.parameters(), strict=True)
        assert [n for (n, p), q in pairs if not torch.equal(p.grad, q.grad)] == ["2.weight"]
        text = state.describe()
        assert "on 1 tensors (8,192 values)" in text and "fp32 for 5" in text
    with pytest.raises(ValueError, match="nothing"):
        gradcomp.ddp.register(DDP(small_model()), TernGrad(), exclude=("nothing.*",))


def scaled(scale):
    """Return a state of 1 bit after a backward pass under a loss scaler, and the scaler."""
    model = DDP(nn.Linear(64, 64, bias=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    options = {"min_numel": 0, "exchange": "all_gather"}
    state = gradcomp.ddp.register(model, OneBit(), grad_scaler=scaler, **options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    scaler.scale(model(torch.randn(4, 64, generator=generator)).square().sum()).backward()
    return state, scaler


@each_rank(2)
def test_residuals_follow_the_loss_scale():
    """They are in loss-scaled units: halving the scale halves them, and nothing is lost."""
    state, scaler = scaled(8.0)
    before = parts_of(state.state_dict())["residual"]["weight"].clone()
    scaler.update(new_scale=2.0)
    state._engine.begin()
    assert torch.equal(state._engine.store.residuals.current(0), before / 4)
    state.close()


@each_rank(2)
def test_a_step_that_an_optimizer_applied_is_final():
    """A backward pass under no_sync() exchanges nothing: discarding it must not undo the exchange
    before it, whose averages are in the weights.
    """
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0)
    optimizer, other = sgd(model), torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    def residual():
        return {n: r.tolist() for n, r in parts_of(state.state_dict())["residual"].items()}

    train(model, optimizer, dist.get_rank(), range(2))
    before = residual()
    loss_of(model, 2, dist.get_rank()).backward()
    changed = residual()
    other.step()  # has none of the model's parameters
    state.discard_step()
    assert residual() == before != changed
    loss_of(model, 3, dist.get_rank()).backward()
    optimizer.step()
    applied = residual()
    with model.no_sync():
        loss_of(model, 4, dist.get_rank()).backward()
    state.discard_step()
    assert residual() == applied != before
    state.close()


@each_rank(2)
def test_resume_without_the_scaler():
    """Residuals of a state that was saved under a scale of 1024 come back in plain units."""
    state, _ = scaled(1024.0)
    saved = state.state_dict()
    state.close()
    options = {"min_numel": 0, "exchange": "all_gather"}
    model = DDP(nn.Linear(64, 64, bias=False))
    with gradcomp.ddp.register(model, OneBit(), **options) as state:
        state.load_state_dict(saved)
        loaded = parts_of(state.state_dict())["residual"]["weight"]
        assert torch.equal(loaded, parts_of(saved)["residual"]["weight"] / 1024)


@each_rank(2, "ranks")
def test_states_may_be_closed_in_any_order():
    models = [DDP(small_model()) for _ in range(2)]
    states = [gradcomp.ddp.register(m, "terngrad", timeout_s=20) for m in models]
    for state in states if dist.get_rank() == 0 else reversed(states):
        state.close()
    return trained("terngrad"), trained("onebit")


@each_rank(2)
def test_a_model_that_is_registered_is_refused_and_goes_on():
    """A communicator that came with the refused registration stays open."""
    model = DDP(small_model())
    with gradcomp.ddp.register(model, "terngrad"):
        comm = gradcomp.comm.TorchCommunicator()
        for options in ({}, {"comm": comm}):
            said = raised(ValueError, lambda o=options: gradcomp.ddp.register(model, "onebit", **o))
            assert "this model is registered with gradcomp already: DDP keeps" in str(said)
            assert "in a new DistributedDataParallel" in str(said)
        assert len(model._forward_pre_hooks) == 1
        given = torch.full((4,), float(comm.rank))
        assert gradcomp.all_reduce(given, Identity(), comm=comm).tolist() == [0.5] * 4
        comm.close()
        train(model, sgd(model), dist.get_rank(), range(2))


@each_rank(2)
def test_nothing_is_lost_through_bucket_rebuilds():
    """Promise 5: the sum of gradients is the sum of what was decoded and what is left over."""
    model, plain = DDP(small_model(), bucket_cap_mb=0.01), small_model()
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0, exchange="all_gather")
    for step in range(5):  # gradients add up
        for p in model.parameters():
            p.sums, p.grad = getattr(p, "sums", 0), None
        for m in (plain, model):
            loss_of(m, step, dist.get_rank()).backward()
        for p in model.parameters():
            p.sums = p.sums + p.grad.double()
    left = parts_of(state.state_dict())["residual"]
    for (n, p), q in zip(model.module.named_parameters(), plain.parameters(), strict=True):
        sums = torch.stack([q.grad.flatten().double(), left[n].double()])
        dist.all_reduce(sums)
        given, kept = sums / dist.get_world_size()
        assert (given - p.sums.flatten() - kept).abs().max() < 1e-5 * given.abs().max()
    state.close()


class Branches(nn.Module):
    """Of the first two a rank uses one, the last nobody."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, right):
        return (self.right if right else self.left)(x)


@each_rank(2)
def test_unused_parameters_lose_nothing():
    """A tensor that no rank uses keeps p.grad None; one that a rank does not use leaves no
    residual there.
    """
    rank, model = dist.get_rank(), DDP(Branches(), find_unused_parameters=True)
    with gradcomp.ddp.register(model, OneBit(), min_numel=0) as state:
        for step in range(4):
            model.zero_grad()
            model(minibatch(step, rank)[0], rank == 1 and step < 2).square().sum().backward()
        left = parts_of(state.state_dict())["residual"]
    used = {name: bool((left[f"{name}.weight"] != 0).any()) for name in ("left", "right", "never")}
    assert used == {"left": True, "right": rank == 1, "never": False}
    assert model.module.never.weight.grad is None


@each_rank(2)
def test_join_with_uneven_inputs():
    """The rank that is done plays along with zero gradients."""
    model = DDP(small_model())
    with gradcomp.ddp.register(model, TernGrad(), min_numel=0) as state:
        with Join([model]):
            train(model, sgd(model), dist.get_rank(), range(5 if dist.get_rank() else 3))
        assert state.step == 5


@each_rank(2, "ranks")
def test_check_replicas_names_tensor_and_rank():
    model = DDP(small_model())
    with gradcomp.ddp.register(model, "terngrad") as state:
        state.check_replicas()
        with torch.no_grad():
            model.module[2].bias[5] += 1e-3 * dist.get_rank()
        error = raised(PeerMismatch, state.check_replicas)
        assert (error.field, error.rank) == ("parameter 2.bias", 1)


@pytest.mark.parametrize("apart", ["0.weight", "0.bias", "buffer", "nothing"])
@each_rank(2, "ranks")
def test_weights_that_are_loaded_by_hand_are_compared(apart):
    """Where ranks compare a bucket's layout anyway, with no message more: training went on with
    other weights on each rank. Frozen parameters and buffers may be a rank's own.
    """
    found, saved = [], ({}, {})
    for loads in (False, True):
        model = small_model()
        model.register_buffer("buffer", torch.zeros(3))
        model[0].bias.requires_grad_(False)
        model = DDP(model, broadcast_buffers=False)
        with gradcomp.ddp.register(model, "onebit", timeout_s=20) as state:
            if loads:
                weights, compression = saved
                weights = {name: values.clone() for name, values in weights.items()}
                if apart in weights:
                    weights[apart].view(-1)[1] += 1e-3 * dist.get_rank()
                model.module.load_state_dict(weights)
                state.load_state_dict(compression)
            if loads and apart == "0.weight":
                backward = loss_of(model, 0, dist.get_rank()).backward
                error = raised(PeerMismatch, backward)
                assert (error.field, error.rank) == ("parameter 0.weight", 1)
                return
            train(model, sgd(model), dist.get_rank(), range(2))
            found.append((state.stats.setup_bytes, state.step))
            saved = model.module.state_dict(), state.state_dict()
    assert found == [(found[0][0], 2), (found[0][0], 4)]


@each_rank(2, "ranks")
def test_a_rank_that_loads_alone_in_a_running_job_makes_no_other_wait():
    """Nothing is compared then, also not where the next bucket layout is new."""
    model = DDP(small_model())
    with gradcomp.ddp.register(model, "onebit", warmup_steps=5, timeout_s=20) as state:
        for step in range(8):
            train(model, sgd(model), dist.get_rank(), range(step, step + 1))
            if step == 3 and dist.get_rank():
                state.load_state_dict(state.state_dict())
        state.check_replicas()


# ---- errors --------------------------------------------------------------------------------------


@each_rank(2, "ranks")
def test_ranks_with_other_settings_get_peer_mismatch():
    """Out of .backward() on every rank, and again out of the next forward."""
    model = DDP(small_model())
    with gradcomp.ddp.register(model, ["terngrad", "onebit"][dist.get_rank()], timeout_s=20):
        for _ in range(2):
            assert mismatch(lambda: loss_of(model, 0, 0).backward())[0] == "codec"


def hooked():
    model = DDP(small_model())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


# what makes the model instead of DDP, codec, options, what is said
OTHER_WEIGHTS = [nn.Parameter(torch.zeros(1))]
REFUSED = {
    "no DDP": (small_model, "onebit", {}, "TypeError: .*Sequential; for a model without DDP use"),
    "FSDP2": (
        lambda: fully_shard(small_model()),
        "onebit",
        {},
        "TypeError: .*for FSDP2 use gradcomp.fsdp.register$",
    ),
    "a class": (None, OneBit, {}, r"TypeError: codec is the class OneBit: write OneBit\(\)$"),
    "another hook": (
        hooked,
        "terngrad",
        {},
        "ValueError: another communication hook is registered on this model: DDP keeps",
    ),
    "codec": (None, "quaternary", {}, "ValueError: .*quaternary"),
    "an option": (
        None,
        "terngrad",
        {"timeout_s": 0},
        r"ValueError: .*a positive number of seconds, at most 1e\+06, got 0",
    ),
    "float64": (lambda: DDP(small_model(torch.float64)), "onebit", {}, "UnsupportedTensor: .*loat"),
    "compiled": (
        lambda: torch.compile(DDP(small_model()), backend="eager"),
        "terngrad",
        {},
        "TypeError: .*got a compiled one; register on the DistributedDataParallel inside",
    ),
    "another model's optimizer": (
        None,
        "terngrad",
        {"optimizer": torch.optim.SGD(OTHER_WEIGHTS, lr=1)},
        "ValueError: ",
    ),
}


@each_rank(1)
def test_wrong_arguments():
    """Every wrong option is refused with its value in tests/engine/test_options.py."""
    for make, codec, options, said in REFUSED.values():
        model = make() if make else DDP(small_model())
        with pytest.raises(Exception) as caught:
            gradcomp.ddp.register(model, codec, **options)
        error = caught.value
        assert re.match(said, f"{type(error).__name__}: {error}"), error


@each_rank(2, "ranks")
def test_a_rank_that_does_not_register():
    if dist.get_rank() == 0:
        begun, model = time.monotonic(), DDP(small_model())
        error = raised(
            gradcomp.PeerLost, lambda: gradcomp.ddp.register(model, "terngrad", timeout_s=1)
        )
        assert error.phase == "setup" and time.monotonic() - begun < 20
    else:
        DDP(small_model())
    dist.barrier()


@each_rank(2)
def test_sparse_gradients_are_refused_by_name():
    """At once, and in backward where the flag is set later: it was "the bucket is
    torch.sparse_coo", in backward alone.
    """
    model = DDP(nn.Sequential(nn.Embedding(100, 16, sparse=True)))
    with pytest.raises(UnsupportedTensor, match=r"parameter '0.weight' of an Embedding\(sparse=T"):
        gradcomp.ddp.register(model, "terngrad")
    model.module[0].sparse = False
    with gradcomp.ddp.register(model, "terngrad"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.module[0].sparse = True
        said = "the gradient of '0.weight' is torch.sparse_coo, .*: make the layer with sparse=Fals"
        with pytest.raises(UnsupportedTensor, match=said):
            model(torch.tensor([1, 2])).sum().backward()


@each_rank(2)
def test_an_error_that_is_being_handled_is_not_of_this_forward():
    """A user's "timed out" was taken for a lost peer where the next forward ran in its handler."""
    model = DDP(small_model())
    with gradcomp.ddp.register(model, "terngrad", min_numel=0) as state:
        try:
            raise RuntimeError("DataLoader timed out after 5 seconds")
        except RuntimeError:
            loss_of(model, 0, dist.get_rank()).backward()
        assert state.step == 1
        loss_of(model, 1, dist.get_rank()).backward()


@each_rank(2)
def test_parameters_that_ddp_ignores_are_each_rank_s_own():
    """They were compared over the ranks: such a run could not be resumed."""
    net = small_model()
    with torch.no_grad():
        net[0].bias.add_(dist.get_rank())
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    model = DDP(net)
    with gradcomp.ddp.register(model, "onebit", precondition=True, min_numel=0) as state:
        loss_of(model, 0, dist.get_rank()).backward()
        state.load_state_dict(state.state_dict())
        loss_of(model, 1, dist.get_rank()).backward()
        state.check_replicas()
        assert "0.bias" not in parts_of(state.state_dict())["residual"]
