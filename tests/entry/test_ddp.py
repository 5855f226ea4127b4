"""The DDP hook over real gloo processes: each function below runs on every rank."""

import re
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from _saved import parts_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradcomp
import gradcomp.ddp
from gradcomp import Identity, OneBit, PeerMismatch, TernGrad, UnsupportedTensor


def small_model(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(dtype)


def batch(step, rank, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 64, generator=generator).to(dtype), torch.randint(
        10, (8,), generator=generator
    )


def train(model, optimizer, steps, first=0, dtype=torch.float32):
    for step in range(first, first + steps):
        x, y = batch(step, dist.get_rank(), dtype)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()


def bits(model):
    return b"".join(
        p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for p in model.parameters()
    )


def trained(codec, steps=4, register=True, ddp=None, dtype=torch.float32, **options):
    model = DDP(small_model(dtype), **(ddp or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = gradcomp.ddp.register(model, codec, min_numel=0, **options) if register else None
    train(model, optimizer, steps, dtype=dtype)
    if state is not None:
        state.check_replicas()
        state.close()
    return bits(model)


# ---- what is computed ----------------------------------------------------------------------------


def identity_and_plain():
    return trained(Identity(), exchange="all_gather"), trained(None, register=False)


def with_and_without_slices():
    return [
        [
            trained(codec, advanced=gradcomp.Advanced(slice_numel=numel), exchange=exchange)
            for numel in (None, 256)
        ]
        for codec in (TernGrad(), OneBit())
        for exchange in ("all_gather", "reduce_scatter")
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_slices_change_no_bit_of_the_weights(ranks, world):
    """Promise 2, over real processes and DDP's pipeline."""
    results = ranks(world, with_and_without_slices)
    assert all(sliced == whole for rank in results for whole, sliced in rank)
    assert all(rank == results[0] for rank in results)


def test_identity_equals_no_hook_bit_for_bit(ranks):
    for with_hook, without in ranks(2, identity_and_plain):
        assert with_hook == without


CODECS = {
    "terngrad": TernGrad(),
    "own": TernGrad(scale="own"),
    "requantize": TernGrad(second_phase="requantize"),
    "onebit": OneBit(),
}


def bucket_sizes(name, exchange):
    return [
        trained(
            CODECS[name],
            exchange=exchange,
            ddp={"bucket_cap_mb": cap, "gradient_as_bucket_view": view},
        )
        for cap, view in ((0.01, False), (25, False), (0.01, True))
    ]


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", CODECS)
def test_bucket_layout_changes_no_bit(ranks, name, exchange):
    """Promise 2: runs with bucket_cap_mb 0.01 and 25, and with gradients as bucket views, are
    the same run.
    """
    results = ranks(3, bucket_sizes, name, exchange)
    assert len({run for rank in results for run in rank}) == 1


def modes():
    runs = [trained(OneBit()), trained(OneBit(), ddp={"static_graph": True})]
    return [*runs, trained(OneBit(), ddp={"find_unused_parameters": True})]


def test_static_graph_and_find_unused_parameters(ranks):
    results = ranks(2, modes)
    assert len({run for rank in results for run in rank}) == 1


def by_hand():
    model = DDP(small_model())
    state = gradcomp.ddp.CompressionState(model, "terngrad", min_numel=0)
    model.register_comm_hook(state, gradcomp.ddp.compression_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 4)
    state.close()
    return bits(model), trained("terngrad")


def test_plain_register_comm_hook_is_the_same(ranks):
    for one, other in ranks(2, by_hand):
        assert one == other


def accumulate():
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, Identity(), min_numel=0)
    plain = DDP(small_model())
    for m in (model, plain):
        with m.no_sync():
            nn.functional.cross_entropy(
                m(batch(0, dist.get_rank())[0]), batch(0, dist.get_rank())[1]
            ).backward()
        nn.functional.cross_entropy(
            m(batch(1, dist.get_rank())[0]), batch(1, dist.get_rank())[1]
        ).backward()
    same = all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters()))
    steps = state.stats.steps
    state.close()
    return same, steps


def test_no_sync_accumulates_and_skips_the_hook(ranks):
    assert ranks(2, accumulate) == [(True, 1)] * 2


def half(name):
    dtype = getattr(torch, name)
    return (
        trained(TernGrad(), dtype=dtype),
        trained(OneBit(), dtype=dtype),
        trained(Identity(), dtype=dtype),
    )


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision_parameters(ranks, name):
    first, second = ranks(2, half, name)
    assert first == second


def several_models():
    """Two models in one backward, each with a state of its own, against the same models alone."""
    results = []
    for together in (True, False):
        models = [DDP(small_model(seed=s)) for s in (1, 2)]
        states = [
            gradcomp.ddp.register(m, c, min_numel=0) for m, c in zip(models, (TernGrad(), OneBit()))
        ]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for step in range(3):
            x, y = batch(step, dist.get_rank())
            losses = [nn.functional.cross_entropy(m(x), y) for m in models]
            if together:
                sum(losses).backward()
            else:
                for loss in losses:
                    loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append([bits(m) for m in models])
        for state in states:
            state.close()
    return results


def test_several_models_in_one_backward(ranks):
    for together, alone in ranks(2, several_models):
        assert together == alone


def mesh_rows():
    """A 2x2 mesh, compression along the data-parallel dimension: each row must average over its
    own two ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "data"))
    group = mesh["data"].get_group()
    model = DDP(nn.Linear(64, 64, bias=False), process_group=group)
    with torch.no_grad():
        model.module.weight.zero_()
    state = gradcomp.ddp.register(model, Identity(), min_numel=0)
    rank = dist.get_rank()
    model(torch.full((1, 64), float(10 ** (rank)))).sum().backward()
    state.close()
    return model.module.weight.grad[0, 0].item()


def test_two_by_two_device_mesh(ranks):
    assert ranks(4, mesh_rows) == [5.5, 5.5, 550.0, 550.0]


class Stack(nn.Module):
    """40 layers of 64x64 whose gradients are known: each weight's is that rank's constant."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(64, 64)) for _ in range(40)])

    def forward(self, x):
        return sum((w * x).sum() * (i + 1) for i, w in enumerate(self.weights))


def many_buckets(name, steps):
    model = DDP(Stack(), bucket_cap_mb=0.01)
    codec = TernGrad(clip_sigma=None) if name == "terngrad" else OneBit()
    state = gradcomp.ddp.register(model, codec, min_numel=0)
    wrong = 0
    for step in range(steps):
        model.zero_grad()
        model(torch.tensor(float((dist.get_rank() + 1) * (1 + step % 3)))).backward()
        for i, weight in enumerate(model.module.weights):
            if name == "terngrad":
                # shared scale 4 c: rank r's code is 1 with probability (r + 1) / 4; sums are of c *
                # k
                quantum = torch.tensor(4.0 * (1 + step % 3) * (i + 1)) / 4
                levels = weight.grad / quantum
                wrong += (
                    not torch.equal(levels, levels.round())
                    or not 1 <= levels.min() <= levels.max() <= 4
                )
                wrong += abs(levels.mean().item() - 2.5) > 0.1
            else:  # constant gradients decode exactly: both phases lossless
                wrong += not torch.equal(
                    weight.grad, torch.full((64, 64), 2.5 * (1 + step % 3) * (i + 1))
                )
    buckets = len(state._step.buckets)
    state.close()
    return wrong, buckets


@pytest.mark.parametrize("steps", [25, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["onebit", "terngrad"])
def test_forty_layers_in_small_buckets(ranks, name, steps):
    """Chained collectives in Future.then hang here; FIFO stages do not, and every value is the
    exact expectation.
    """
    for wrong, buckets in ranks(4, many_buckets, name, steps):
        assert wrong == 0
        assert buckets == 40


# ---- steps, checkpoints, scalers -----------------------------------------------------------------


def exclusion():
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, TernGrad(), min_numel=1000, exclude=("4.*", "0.weight"))
    plain = DDP(small_model())
    for m in (model, plain):
        x, y = batch(0, dist.get_rank())
        nn.functional.cross_entropy(m(x), y).backward()
    out = {
        name: torch.equal(p.grad, q.grad)
        for (name, p), q in zip(model.module.named_parameters(), plain.parameters())
    }
    text = state.describe()
    state.close()
    try:
        gradcomp.ddp.register(DDP(small_model()), TernGrad(), exclude=("nothing.*",))
    except ValueError as error:
        return out, text, str(error)
    return out, text, ""


def test_exclude_and_min_numel_travel_as_fp32(ranks):
    for equal, text, error in ranks(2, exclusion):
        assert [n for n, e in equal.items() if not e] == ["2.weight"]
        assert "on 1 tensors (8,192 values)" in text and "fp32 for 5" in text
        assert "nothing.*" in error


def scale_follows():
    """Residuals live in loss-scaled units: halving the scale halves them, and nothing is lost."""
    model = DDP(nn.Linear(64, 64, bias=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = gradcomp.ddp.register(
        model, OneBit(), min_numel=0, grad_scaler=scaler, exchange="all_gather"
    )

    def backward():
        model.zero_grad()
        generator = torch.Generator().manual_seed(dist.get_rank())
        scaler.scale(model(torch.randn(4, 64, generator=generator)).square().sum()).backward()

    backward()
    before = parts_of(state.state_dict())["residual"]["weight"].clone()
    scaler.update(new_scale=2.0)
    state._engine.begin()
    after = state._engine.store.residuals.current(0).clone()
    state.close()
    return torch.equal(after, before / 4)


def test_residuals_follow_the_loss_scale(ranks):
    assert ranks(2, scale_follows) == [True, True]


class Checkpointed(nn.Module):
    """Reentrant activation checkpointing: each layer's backward is a graph task of its own
    inside the outer one.
    """

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.reentrant = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True) if self.reentrant else layer(x)
        return x


def checkpointing():
    out = []
    for reentrant, cap in ((True, 0.01), (True, 25), (False, 25)):
        model = DDP(Checkpointed(reentrant), bucket_cap_mb=cap)
        state = gradcomp.ddp.register(model, TernGrad(), min_numel=0)
        for step in range(3):
            model.zero_grad()
            x, _ = batch(step, dist.get_rank())
            model(x.requires_grad_()).square().sum().backward()
        out.append((state.step, b"".join(p.grad.numpy().tobytes() for p in model.parameters())))
        state.close()
    return out


def test_reentrant_checkpointing_is_one_step_a_backward(ranks):
    for runs in ranks(2, checkpointing):
        assert {step for step, _ in runs} == {3}
        assert len({grads for _, grads in runs}) == 1


def close_in_any_order():
    models = [DDP(small_model()) for _ in range(2)]
    states = [gradcomp.ddp.register(m, "terngrad", timeout_s=20) for m in models]
    for state in states if dist.get_rank() == 0 else reversed(states):
        state.close()
    models = [DDP(small_model()) for _ in range(2)]
    states = [
        gradcomp.ddp.register(m, c, timeout_s=20) for m, c in zip(models, ("terngrad", "onebit"))
    ]
    for model in models:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    for state in states:
        state.close()
    return [bits(m) for m in models]


def test_states_may_be_closed_in_any_order(ranks):
    first, second = ranks(2, close_in_any_order)
    assert first == second


def frozen_between():
    model = DDP(small_model(), find_unused_parameters=True)
    model.module[2].requires_grad_(False)
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0)
    try:
        model(batch(0, 0)[0]).sum().backward()
    except gradcomp.GradcompError as error:
        return "2.weight" in str(error) or "2.bias" in str(error)
    finally:
        state.close()


def test_a_parameter_frozen_after_ddp_was_made_is_named(ranks):
    assert ranks(2, frozen_between) == [True, True]


def scaler_dropped():
    """A state saved under a loss scale of 1024, resumed without a scaler: residuals come back in
    plain units.
    """
    model = DDP(nn.Linear(64, 64, bias=False))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    state = gradcomp.ddp.register(
        model, OneBit(), min_numel=0, grad_scaler=scaler, exchange="all_gather"
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    scaler.scale(model(torch.randn(4, 64, generator=generator)).square().sum()).backward()
    saved = state.state_dict()
    state.close()
    state = gradcomp.ddp.register(
        DDP(nn.Linear(64, 64, bias=False)), OneBit(), min_numel=0, exchange="all_gather"
    )
    state.load_state_dict(saved)
    loaded = parts_of(state.state_dict())["residual"]["weight"]
    broken = {k: v for k, v in saved.items() if k != "step"}
    with pytest.raises(ValueError, match="step"):
        state.load_state_dict(broken)
    state.close()
    return torch.equal(loaded, parts_of(saved)["residual"]["weight"] / 1024)


def test_resume_without_the_scaler(ranks):
    assert ranks(2, scaler_dropped) == [True, True]


def twice():
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, "terngrad")
    try:
        gradcomp.ddp.register(model, "onebit")
    except ValueError as error:
        message = str(error)
    hooks = len(model._forward_pre_hooks)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    state.close()
    return "this model is registered with gradcomp already: DDP keeps" in message, hooks


def test_registering_twice_is_refused_and_leaves_the_first(ranks):
    assert ranks(2, twice) == [(True, 1)] * 2


def twice_over_a_communicator_of_ones_own():
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, "terngrad")
    comm = gradcomp.comm.TorchCommunicator()
    with pytest.raises(ValueError, match="in a new DistributedDataParallel"):
        gradcomp.ddp.register(model, "onebit", comm=comm)
    tensor = gradcomp.all_reduce(torch.full((4,), float(comm.rank)), gradcomp.Identity(), comm=comm)
    comm.close()
    state.close()
    return tensor.tolist()


def test_a_refused_registration_leaves_the_callers_communicator_open(ranks):
    assert ranks(2, twice_over_a_communicator_of_ones_own) == [[0.5] * 4] * 2


def conservation():
    """Promise 5 through bucket rebuilds: the sum of gradients = the sum of what was decoded +
    what is left over.
    """
    model = DDP(small_model(), bucket_cap_mb=0.01)
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0, exchange="all_gather")
    total = {
        n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.module.named_parameters()
    }
    decoded = {
        n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.module.named_parameters()
    }
    plain = small_model()
    for step in range(5):
        x, y = batch(step, dist.get_rank())
        model.zero_grad()
        plain.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        nn.functional.cross_entropy(model(x), y).backward()
        for (n, p), q in zip(model.module.named_parameters(), plain.parameters()):
            total[n] += q.grad
            decoded[n] += p.grad
    worst = 0.0
    left = parts_of(state.state_dict())["residual"]
    for n, gradients in total.items():
        sums = torch.stack([gradients.flatten(), left[n].double()])
        dist.all_reduce(sums)
        mean_grad, mean_left = sums / dist.get_world_size()
        gap = (mean_grad - decoded[n].flatten() - mean_left).abs().max() / mean_grad.abs().max()
        worst = max(worst, gap.item())
    state.close()
    return worst


def test_nothing_is_lost_through_bucket_rebuilds(ranks):
    assert max(ranks(2, conservation)) < 1e-5


class Half(nn.Module):
    """Two branches of which each rank uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, right):
        return (self.right if right else self.left)(x)


def unused():
    model = DDP(Half(), find_unused_parameters=True)
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0)
    for step in range(4):
        model.zero_grad()
        x, _ = batch(step, dist.get_rank())
        model(x, dist.get_rank() == 1 and step < 2).square().sum().backward()
    left = parts_of(state.state_dict())["residual"]
    state.close()
    return {
        n: bool((r != 0).any()) for n, r in left.items()
    }, model.module.never.weight.grad is None


def test_unused_parameters_lose_nothing(ranks):
    """A tensor that no rank uses keeps p.grad None; one that a rank does not use leaves no
    residual there.
    """
    (zero, never0), (one, never1) = ranks(2, unused)
    assert never0 and never1
    assert not zero["never.weight"] and not one["never.weight"]
    assert zero["left.weight"] and not zero["right.weight"]
    assert one["right.weight"]


def joined():
    """Uneven data under join(): the rank that is done plays along with zero gradients."""
    from torch.distributed.algorithms.join import Join

    model = DDP(small_model())
    state = gradcomp.ddp.register(model, TernGrad(), min_numel=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(3 if dist.get_rank() == 0 else 5):
            optimizer.zero_grad()
            x, y = batch(step, dist.get_rank())
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    steps = state.step
    state.close()
    return steps


def test_join_with_uneven_inputs(ranks):
    assert ranks(2, joined) == [5, 5]


def drift():
    model = DDP(small_model())
    state = gradcomp.ddp.register(model, "terngrad")
    state.check_replicas()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.module[2].bias[5] += 1e-3
    try:
        state.check_replicas()
    except PeerMismatch as error:
        return error.field, error.rank
    finally:
        state.close()


def test_check_replicas_names_tensor_and_rank(ranks):
    assert ranks(2, drift) == [("parameter 2.bias", 1)] * 2


# ---- errors --------------------------------------------------------------------------------------


def mismatch():
    model = DDP(small_model())
    codec = "onebit" if dist.get_rank() == 1 else "terngrad"
    state = gradcomp.ddp.register(model, codec, timeout_s=20)
    errors = []
    for _ in range(2):
        try:
            model(batch(0, 0)[0]).sum().backward()
            errors.append(None)
        except PeerMismatch as error:
            errors.append((error.field, error.rank))
    state.close()
    return errors


def test_ranks_with_other_settings_get_peer_mismatch(ranks):
    """Out of .backward() on every rank, and again out of the next forward."""
    assert ranks(2, mismatch) == [[("codec", 1)] * 2] * 2


REFUSED = {
    "no DDP": (
        lambda model: gradcomp.ddp.register(small_model(), "terngrad"),
        "TypeError: .*Sequential; for a model without DDP use",
    ),
    "FSDP2": (
        lambda model: gradcomp.ddp.register(fully_shard(small_model()), "terngrad"),
        "TypeError: .*for FSDP2 use gradcomp.fsdp.register$",
    ),
    "a class": (
        lambda model: gradcomp.ddp.register(model, OneBit),
        r"TypeError: codec is the class OneBit: write OneBit\(\)$",
    ),
    "another hook": (
        lambda model: gradcomp.ddp.register(hooked(), "terngrad"),
        "ValueError: another communication hook is registered on this model: DDP keeps",
    ),
    "codec": (
        lambda model: gradcomp.ddp.register(model, "quaternary"),
        "ValueError: .*quaternary",
    ),
    "an option": (
        lambda model: gradcomp.ddp.register(model, "terngrad", timeout_s=0),
        r"ValueError: .*a positive number of seconds, at most 1e\+06, got 0",
    ),
    "float64": (
        lambda model: gradcomp.ddp.register(DDP(small_model(torch.float64)), "terngrad"),
        "UnsupportedTensor: .*float64",
    ),
    "another model's optimizer": (
        lambda model: gradcomp.ddp.register(
            model,
            "terngrad",
            optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1),
        ),
        "ValueError: ",
    ),
}


def hooked():
    model = DDP(small_model())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    return model


def refused(name):
    try:
        REFUSED[name][0](DDP(small_model()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments(ranks, name):
    """Every wrong option is refused with its value in tests/engine/test_engine.py."""
    (said,) = ranks(1, refused, name)
    assert re.match(REFUSED[name][1], said), said


def sparse():
    model, told = DDP(nn.Sequential(nn.Embedding(100, 16, sparse=True))), []
    # a flag that is set when the model was registered is seen at its gradient
    for late in (False, True):
        model.module[0].sparse = not late
        try:
            state = gradcomp.ddp.register(model, "terngrad")
            model.module[0].sparse = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model(torch.tensor([1, 2])).sum().backward()
        except Exception as error:
            told.append((type(error).__name__, str(error)))
    state.close()
    return told


def only_one_registers():
    model = DDP(small_model())
    if dist.get_rank() == 1:
        dist.barrier()
        return "phase=setup"
    begun = time.monotonic()
    try:
        gradcomp.ddp.register(model, "terngrad", timeout_s=1)
    except gradcomp.PeerLost as error:
        return f"phase={error.phase}" if time.monotonic() - begun < 20 else "late"
    finally:
        dist.barrier()
    return "nothing raised"


def test_a_rank_that_does_not_register(ranks):
    assert ranks(2, only_one_registers) == ["phase=setup"] * 2


def test_sparse_gradients_are_refused_by_name(ranks):
    """At once, and in backward: it was "the bucket is torch.sparse_coo", in backward alone."""
    at_once = (
        "parameter '0.weight' of an Embedding(sparse=True) gets sparse gradients: make the layer"
        " with sparse=False"
    )
    later = (
        "the gradient of '0.weight' is torch.sparse_coo, and gradcomp takes dense ones: make the"
        " layer with sparse=False"
    )
    assert (
        ranks(2, sparse)
        == [[(UnsupportedTensor.__name__, at_once), (UnsupportedTensor.__name__, later)]] * 2
    )
