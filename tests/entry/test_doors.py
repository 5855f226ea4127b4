"""What the doors refuse, survive and leave behind: failed steps, foreign communicators, copies,
Join, frozen layers.
"""

import contextlib
import copy
import io
import pickle
import re
import time
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from _held import descriptors, steady
from _ranks import run_local
from _saved import parts_of
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
import gradcomp.onebit_sgd
from gradcomp import (
    GradcompError,
    GradientAverager,
    Identity,
    OneBit,
    PeerLost,
    PeerMismatch,
    UnsupportedTensor,
)
from gradcomp.allreduce import Feedback
from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.exchange.agree import EXCHANGE_FIELDS, NBYTES, agree
from gradcomp.optim import SplitSGD, split_parameters


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 4))


MODEL, OTHER = small_model(), small_model(1)  # threads share torch's global generator


def backward(model, step=0):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(8, 32, generator=generator).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()


def all_nan(model):
    return all(bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None)


# ---- a failed step leaves NaN --------------------------------------------------------------------


def fails_under_ddp(fused, view):
    """Rank 1 is a step ahead, so the second backward fails everywhere."""
    model = copy.deepcopy(MODEL)
    optimizer = SplitSGD(split_parameters(model), lr=0.1) if fused else None
    model = DDP(model, gradient_as_bucket_view=view, bucket_cap_mb=0.005)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=20, optimizer=optimizer)
    backward(model)
    finite = fused or not all_nan(model)
    state._engine.step += dist.get_rank()
    with pytest.raises(PeerMismatch, match="step"):
        backward(model)
    poisoned = all_nan(model) and all(p.grad is not None for p in model.parameters())
    with pytest.raises(PeerMismatch, match="step"):  # and the next forward says it again
        backward(model)
    state.close()
    return finite, poisoned, all_nan(model)


@pytest.mark.parametrize(("fused", "view"), [(False, False), (False, True), (True, False)])
def test_a_failed_backward_leaves_no_local_gradient(gloo, fused, view):
    assert gloo(2, fails_under_ddp, fused, view) == [(True, True, True)] * 2


def fails_in_averager(comm, way):
    model = copy.deepcopy(MODEL)
    averager = GradientAverager(
        model, "onebit", comm=comm, min_numel=0, timeout_s=20, bucket_cap_mb=0.005
    )
    with contextlib.closing(averager):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        getattr(averager, way)()
        averager.flush()
        averager._engine.step += comm.rank
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(GradcompError):
            getattr(averager, way)()
            averager.flush()
        return all_nan(model)


@pytest.mark.parametrize("way", ["average", "average_delayed"])
def test_a_failed_average_leaves_no_local_gradient(way):
    assert run_local(2, fails_in_averager, way) == [True, True]


@pytest.mark.parametrize("way", ["average", "average_delayed"])
def test_a_refused_gradient_leaves_no_local_gradient(way):
    """All ranks refuse alike before anything is sent: a step that is taken nevertheless must not
    be one of each rank's own.
    """
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)])
    averager = GradientAverager(
        layers.named_parameters(), Identity(), comm=LocalCommunicator.group(2)[0], min_numel=0
    )
    (layers[1](torch.tensor([1])) @ layers[0].weight).sum().backward()
    with pytest.raises(UnsupportedTensor, match="sparse"):
        getattr(averager, way)()
    assert (
        all_nan(layers) and layers[0].weight.grad is not None and layers[1].weight.grad is not None
    )


def interrupted_average(comm):
    model = copy.deepcopy(MODEL)
    averager = GradientAverager(model, Identity(), comm=comm, min_numel=0, bucket_cap_mb=0.005)
    with contextlib.closing(averager):
        second, found = averager._buckets[1], []
        for fails in (True, False):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1.0 + comm.rank)
            if fails:
                second.load = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
                with pytest.raises(KeyboardInterrupt):
                    averager.average()
                found.append(all_nan(model))
                del second.load
            else:
                averager.average()
        return [*found, all(bool((p.grad == 1.5).all()) for p in model.parameters()), averager.step]


def test_an_interrupted_average_can_be_tried_again():
    """A step that was left open is waited for before the next one begins."""
    assert run_local(2, interrupted_average) == [[True, True, 1]] * 2


def goes_on_after_an_exception():
    """The user's exception on every rank, in the middle of backward: DDP is made anew, the state
    goes on.
    """
    module = copy.deepcopy(MODEL)
    model = DDP(module, bucket_cap_mb=0.005)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=20, atomic_steps=True)
    backward(model)
    before = state.state_dict()
    handle = module[0].weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backward(model)
    handle.remove()
    # DDP's, with any hook or none
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        backward(model)
    state.discard_step()
    saved = state.state_dict()
    same = saved["step"] == before["step"] and all(
        torch.equal(t, parts_of(before)["residual"][n])
        for n, t in parts_of(saved)["residual"].items()
    )
    state.close()
    del model
    model = DDP(module, bucket_cap_mb=0.005)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=20, atomic_steps=True)
    state.load_state_dict(saved)
    model.zero_grad()
    backward(model, 1)
    asked = state.check_replicas()
    state.close()
    return same, not all_nan(model), asked


def test_what_to_do_after_an_exception_of_ones_own(gloo):
    assert gloo(2, goes_on_after_an_exception) == [(True, True, (0, 1))] * 2


# ---- the ranks that were meant -------------------------------------------------------------------


def foreign_communicator(kind):
    model = DDP(copy.deepcopy(MODEL))
    rank = dist.get_rank()
    comm = (
        LocalCommunicator.group(1)[0] if kind == "alone" else LocalCommunicator.group(2)[1 - rank]
    )
    with pytest.raises(ValueError, match="other ranks than the process group") as caught:
        gradcomp.ddp.register(model, "terngrad", comm=comm)
    backward(model)  # no hook was left behind
    return "LocalCommunicator" in str(caught.value), len(model._forward_pre_hooks)


@pytest.mark.parametrize("kind", ["alone", "reversed"])
def test_a_communicator_of_other_ranks_is_refused(gloo, kind):
    assert gloo(2, foreign_communicator, kind) == [(True, 0)] * 2


def averages_alone():
    with pytest.warns(
        UserWarning,
        match="averages over 1 rank, LocalCommunicator says, where torch.distributed has 2",
    ):
        GradientAverager(copy.deepcopy(MODEL), "terngrad", comm=LocalCommunicator.group(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientAverager(
            copy.deepcopy(MODEL), "terngrad", comm=LocalCommunicator.group(2)[0]
        ).close()


def test_an_averager_that_is_alone_says_so(gloo):
    gloo(2, averages_alone)


def unequal(comm, way):
    model = copy.deepcopy(OTHER if comm.rank == 2 else MODEL)
    averager = GradientAverager(model, "terngrad", comm=comm, min_numel=0, timeout_s=20)
    with contextlib.closing(averager):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(2):
            with pytest.raises(PeerMismatch) as caught:
                getattr(averager, way)()
        return caught.value.field, caught.value.rank, all_nan(model)


@pytest.mark.parametrize("way", ["average", "average_delayed"])
def test_unequal_initial_parameters_are_named(way):
    assert run_local(3, unequal, way) == [("parameter 0.weight", 2, True)] * 3


def test_an_averager_takes_a_model():
    named = [n for n, _ in MODEL.named_parameters()]
    comm = LocalCommunicator.group(1)[0]
    assert [name for name, _ in GradientAverager(MODEL, "onebit", comm=comm)._engine.named] == named
    for wrong, said in ((MODEL.parameters(), "Parameter"), ([1], "int"), ([("a",)], "tuple")):
        with pytest.raises(TypeError, match=f"named_parameters.*{said}"):
            GradientAverager(wrong, "onebit", comm=comm)


# ---- what all_reduce keeps -----------------------------------------------------------------------


def keys_differ(comm):
    gradcomp.all_reduce(torch.ones(64), Identity(), comm=comm, key=comm.rank, timeout_s=20)


def test_ranks_with_other_keys_are_told():
    """Other keys draw other random numbers."""
    with pytest.raises(PeerMismatch, match="layout"):
        run_local(2, keys_differ)


def test_steps_that_would_repeat_draws_are_refused():
    comm = LocalCommunicator.group(1)[0]
    gradcomp.all_reduce(torch.ones(4), "terngrad", comm=comm, step=2**32 - 1)
    for step in (2**32, -1, True, 1.0):
        with pytest.raises(ValueError, match="step must be"):
            gradcomp.all_reduce(torch.ones(4), "terngrad", comm=comm, step=step)


def many_shapes(comm):
    """Residuals of a tensor that comes back after its buffers were dropped go on where they
    stood.
    """
    feedback, kept = Feedback({0: 64}), []
    ours = torch.linspace(-1 + comm.rank, 1, 64)
    out = [gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=feedback)]
    for numel in range(1, 40):
        gradcomp.all_reduce(torch.full((numel,), 1.0), Identity(), comm=comm)
        if comm.rank:  # one rank's residuals come and go: buffers are its own affair
            gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=Feedback({0: 64}))
        else:
            gradcomp.all_reduce(
                ours.clone(), OneBit(), comm=comm, feedback=(spare := Feedback({0: 64}))
            )
            kept.append(weakref.ref(spare))
    spare = None
    out.append(gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=feedback))
    call = comm.kept["all_reduce", 0]
    sizes = len(call.exchanges), [alive for alive in kept if alive() is not None]
    gradcomp.allreduce.forget_buffers(comm)
    freed, step = len(call.exchanges), call.step
    out.append(gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=feedback))
    return sizes, freed, step, torch.stack(out)


def three_times(comm):
    feedback, ours = Feedback({0: 64}), torch.linspace(-1 + comm.rank, 1, 64)
    return torch.stack(
        [
            gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=feedback)
            for _ in range(3)
        ]
    )


def test_all_reduce_keeps_a_bounded_number_of_buffers_and_no_residuals():
    wanted = run_local(2, three_times)
    for rank, (sizes, freed, step, out) in enumerate(run_local(2, many_shapes)):
        assert sizes == (16, []) and freed == 0 and step == 2 + 2 * 39
        assert torch.equal(out, wanted[rank])


# ---- copies, pickles -----------------------------------------------------------------------------


def saved():
    model = DDP(copy.deepcopy(MODEL))
    state = gradcomp.ddp.register(model, "onebit", min_numel=0)
    backward(model)
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    twin = torch.load(memory, weights_only=False)
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    twin(torch.ones(1, 32))  # runs
    # and trains, once it is registered
    again = gradcomp.ddp.register(twin, Identity(), min_numel=0)
    backward(twin)
    steps = again.step
    again.close()
    state.close()
    return same, steps


def test_a_registered_model_can_be_pickled(gloo):
    assert gloo(2, saved) == [(True, 1)] * 2


def detached():
    state = gradcomp.ddp.register(DDP(copy.deepcopy(MODEL)), "onebit")
    silent = []
    for twin in (copy.deepcopy(state), copy.copy(state), pickle.loads(pickle.dumps(state))):
        for name in (
            "state_dict",
            "discard_step",
            "check_replicas",
            "materialize_gradients",
            "describe",
        ):
            with pytest.raises(GradcompError, match="copy of a model"):
                getattr(twin, name)()
        for name in ("stats", "step"):
            with pytest.raises(GradcompError, match="copy of a model"):
                getattr(twin, name)
        with pytest.raises(GradcompError, match="copy of a model"):
            twin.load_state_dict({})
        twin.close()
        silent.append(repr(twin))
    state.close()
    return silent


def test_the_state_of_a_copy_says_what_it_is(gloo):
    assert gloo(1, detached) == [["<CompressionState of a copy: off>"] * 3]


# ---- what DDP is told to do beside ---------------------------------------------------------------


def hook_is_taken():
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torch.nn.parallel.distributed import _MixedPrecision

    precision = _MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    try:
        mixed = DDP(copy.deepcopy(MODEL), mixed_precision=precision)
    except RuntimeError:  # a CUDA build of torch on a machine without a driver
        mixed = DDP(copy.deepcopy(MODEL))
        mixed.mixed_precision = precision
    with pytest.raises(ValueError, match="mixed_precision"):
        gradcomp.ddp.register(mixed, "terngrad")
    module = copy.deepcopy(MODEL)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="optimizers in backward"):
        gradcomp.ddp.register(DDP(module), "terngrad")


def test_who_has_taken_the_hook_is_named(gloo):
    gloo(1, hook_is_taken)


def joins():
    model = DDP(copy.deepcopy(MODEL))
    state = gradcomp.ddp.register(model, "terngrad", timeout_s=20)
    with (
        pytest.raises(GradcompError, match="divide_by_"),
        Join([model], divide_by_initial_world_size=False),
    ):
        backward(model)
    state.close()


def test_join_over_the_ranks_that_are_left_is_refused(gloo):
    gloo(2, joins)


def unfrozen():
    module = copy.deepcopy(MODEL)
    module[2].requires_grad_(False)
    model = DDP(module)
    state = gradcomp.ddp.register(model, "terngrad")
    backward(model)
    module[2].requires_grad_(True)
    with torch.no_grad():
        model(torch.ones(1, 32))  # not trained
    with pytest.raises(GradcompError, match=r"'2\.weight' was frozen"):
        backward(model)
    state.close()


def grown():
    model = DDP(copy.deepcopy(MODEL))
    state = gradcomp.ddp.register(model, "terngrad")
    backward(model)
    model.module.append(nn.Identity())
    backward(model)
    model.module.append(nn.Linear(4, 4))
    with torch.no_grad():
        model(torch.ones(1, 32))  # not trained
    for _ in range(2):
        with pytest.raises(GradcompError, match=r"'5\.weight' has come"):
            backward(model)
    model.module[5].requires_grad_(False)
    backward(model)
    state.close()


def test_a_layer_that_comes_after_wrapping_is_named(gloo):
    gloo(2, grown)


def test_a_layer_that_comes_after_its_averager_is_named():
    net = copy.deepcopy(MODEL)
    averager = GradientAverager(net, "terngrad", comm=LocalCommunicator.group(1)[0])
    averager.average()
    net[0].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(GradcompError, match=r"'0\.extra' has come"):
        averager.average()


def test_a_layer_unfrozen_after_wrapping_is_named(gloo):
    gloo(2, unfrozen)


def profiled():
    model = DDP(copy.deepcopy(MODEL), bucket_cap_mb=0.005)
    state = gradcomp.ddp.register(model, OneBit(), min_numel=0)
    backward(model)
    with profile() as prof:
        backward(model)
    shown = {e.key: e.count for e in prof.key_averages() if e.key.startswith("gradcomp::")}
    everywhere = {}
    with contextlib.suppress(ImportError, TypeError):
        from torch._C._profiler import _ExperimentalConfig

        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as prof:
            backward(model)
        everywhere = {e.key for e in prof.key_averages() if e.key.startswith("gradcomp::")}
    name, buckets = model._get_ddp_logging_data()["comm_hook"], len(state._step.buckets)
    state.close()
    return (
        shown["gradcomp::bucket"] == buckets,
        {"gradcomp::encode", "gradcomp::decode"} <= everywhere,
        name,
    )


def test_profiles_and_logs_name_gradcomp(gloo):
    for counted, stages, name in gloo(2, profiled):
        assert counted and stages and name.startswith("gradcomp.ddp.compression_hook: OneBit(")


def torch_loses_a_peer(steps):
    """Rank 0 leaves: rank 1 waits for it in torch's own broadcasts, of rebuilt buckets or of
    buffers.
    """
    model = DDP(nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8)))
    state = gradcomp.ddp.register(model, "terngrad", min_numel=0, timeout_s=20)
    for _ in range(steps):
        backward(model)
    if dist.get_rank() == 0:
        state.close()
        del model, state
        dist.destroy_process_group()
        return None
    with pytest.raises(RuntimeError) as first:
        backward(model)
    with pytest.raises(PeerLost, match="torch's own collectives") as caught:
        backward(model)
    state.close()
    words = (  # it was gloo's text alone
        "in torch's own collectives after 0.0 s: a rank, or the network to it, was lost while DDP "
    )
    return caught.value.__cause__ is first.value and words in str(caught.value)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_peer_that_torch_has_lost_is_lost(gloo, steps):
    assert gloo(2, torch_loses_a_peer, steps) == [None, True]


# ---- what has not come to be leaves nothing behind -----------------------------------------------


def refused_registration(given):
    """torch refuses the hook when everything else has been made: nodes have communicators of
    their own by then.
    """
    model = DDP(copy.deepcopy(MODEL))
    comm = TorchCommunicator() if given else None
    before = steady(descriptors)

    def refuse(*_):
        raise RuntimeError("no hook")

    model.register_comm_hook = refuse
    options = {
        "exchange": "hierarchical",
        "advanced": gradcomp.Advanced(nodes=[[0, 1], [2, 3]]),
        "timeout_s": 20,
    }
    # its traceback keeps alive what was made
    with pytest.raises(RuntimeError, match="no hook") as caught:
        gradcomp.ddp.register(model, "terngrad", comm=comm, **options)
    left = max(0, descriptors() - before), len(model._forward_pre_hooks), len(model._forward_hooks)
    del model.register_comm_hook
    # a communicator that was given works on
    state = gradcomp.ddp.register(model, "terngrad", comm=comm, **options)
    backward(model)
    state.close()
    return left, str(caught.value)


@pytest.mark.parametrize("given", [True, False])
def test_a_registration_that_torch_refuses_leaves_nothing_behind(gloo, given):
    assert gloo(4, refused_registration, given) == [((0, 0, 0), "no hook")] * 4


# ---- ranks that do different things --------------------------------------------------------------


def does_something_else(comm, what):
    if comm.rank == 1:
        return
    if what == "all_reduce":
        gradcomp.all_reduce(torch.ones(8), "terngrad", comm=comm, timeout_s=0.2)
    averager = GradientAverager(copy.deepcopy(MODEL), "terngrad", comm=comm, timeout_s=0.2)
    getattr(averager, what)()


@pytest.mark.parametrize(
    ("what", "called"),
    [
        ("all_reduce", r"all_reduce\(key=0\)"),
        ("check_replicas", r"check_replicas\(\)"),
        ("average", r"average\(\)"),
    ],
)
def test_a_call_that_the_other_ranks_do_not_make_is_named(what, called):
    with pytest.raises(PeerLost, match=f"every rank has to call {called}"):
        run_local(2, does_something_else, what)


def told(call):
    """Return what a rank is told of a mismatch."""
    try:
        call()
    except PeerMismatch as error:
        return error.field, error.rank, str(error)
    return None


def other_calls(what):
    rank, model = dist.get_rank(), copy.deepcopy(MODEL)
    comm = TorchCommunicator(timeout_s=20) if what != "compress" else None
    shards = fully_shard(copy.deepcopy(MODEL)) if what == "compress" else None
    if what == "check_replicas":
        model = model if rank else model[:3]
        averager = GradientAverager(model, "terngrad", comm=comm)
        return told(averager.check_replicas)
    if what == "all_reduce":
        for key, numel in enumerate((100, 70_000)):
            gradcomp.all_reduce(torch.ones(numel), "terngrad", comm=comm, key=key)
        key, numel = ((0, 100), (1, 70_000))[rank]
        return told(lambda: gradcomp.all_reduce(torch.ones(numel), "terngrad", comm=comm, key=key))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 0:
        return told(
            lambda: gradcomp.DiLoCo(
                model, optimizer, "terngrad", comm=comm, sync_every=4, timeout_s=20
            )
        )
    if what == "average":
        return told(GradientAverager(model, "terngrad", comm=comm).average)
    return told(lambda: gradcomp.fsdp.register(shards, "terngrad", timeout_s=20))


@pytest.mark.parametrize(
    ("what", "field", "said"),
    [
        (
            "check_replicas",
            "layout",
            (
                r"rank 0 has .*2.bias \(32,\) float32, rank 1 has .*; parameter 3.weight \(4, 32\)"
                r" float32"
            ),
        ),
        (
            "all_reduce",
            "numel",
            r"rank 0 has 100 values \(key=0, .*rank 1 has 70000 values \(key=1, ",
        ),
        ("average", "call", r"rank 0 has DiLoCo, rank 1 has average\(\)"),
        ("compress", "call", r"rank 0 has DiLoCo, rank 1 has gradcomp.fsdp.register"),
    ],
)
def test_ranks_that_do_other_things_are_told_and_live(gloo, what, field, said):
    """gloo ended the process of the rank that had less to send (SIGABRT): the others got
    PeerLost.
    """
    for found in gloo(2, other_calls, what):
        assert found is not None and found[:2] == (field, 1) and re.search(said, found[2]), found


def test_two_agreements_that_meet_are_told():
    def check(comm):
        averager = GradientAverager(copy.deepcopy(MODEL), "terngrad", comm=comm, timeout_s=20)
        if comm.rank:
            return told(averager.check_replicas)[0]
        net = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        search = {
            "model": net,
            "optimizer": optimizer,
            "samples": 100,
            "current": 8,
            "comm": comm,
            "timeout_s": 20,
        }
        return told(
            lambda: gradcomp.onebit_sgd.find_batch_size(lambda size, samples: [], **search)
        )[0]

    assert run_local(2, check) == ["call", "call"]


HASH = re.compile(r"\d{12,}|[0-9a-f]{16,}")


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (("terngrad", "onebit"), "codec", ("TernGrad(clip_sigma=2.5,", "OneBit(group='row',")),
        (
            (gradcomp.TernGrad(seed=1), gradcomp.TernGrad(seed=2)),
            "codec_options",
            ("seed=1", "seed=2"),
        ),
        (
            ({}, {"precondition": True}),
            "precondition",
            ("None", "Precondition(beta=0.95, floor=0.01)"),
        ),
        (
            ({"warmup_steps": 3}, {"warmup_steps": 3, "warmup_codec": "block4"}),
            "warmup_steps",
            ("3", '(3, "Block(bits=4'),
        ),
        (({"min_numel": 5}, {}), "min_numel", ("5", "None")),
        (
            ({"exclude": "0.bias"}, {"exclude": ("*.bias", "0.weight")}),
            "exclude",
            ("['0.bias']", "['*.bias', '0.weight']"),
        ),
        (
            ({}, {"advanced": gradcomp.Advanced(slice_numel=1 << 22)}),
            "slice_numel",
            ("None", "4194304"),
        ),
        (
            (
                {
                    "advanced": gradcomp.Advanced(
                        transform=gradcomp.onebit_sgd.AggregateAdagrad(eps=1e-5)
                    )
                },
                {
                    "advanced": gradcomp.Advanced(
                        transform=gradcomp.onebit_sgd.AggregateAdagrad(eps=1e-6)
                    )
                },
            ),
            "transform",
            ("AggregateAdagrad(eps=1e-05", "AggregateAdagrad(eps=1e-06"),
        ),
        (({"atomic_steps": True}, {}), "atomic_steps", ("1", "0")),
        (
            ({"exchange": "all_gather"}, {"exchange": "reduce_scatter"}),
            "exchange",
            ("all_gather", "reduce_scatter"),
        ),
    ],
)
def test_a_mismatch_shows_what_each_rank_has(options, field, words):
    """It printed hashes: "17896042909800916847 there, 6098816465478212926 expected"."""

    def average(comm):
        given = options[comm.rank]
        codec, changes = ("terngrad", given) if isinstance(given, dict) else (given, {})
        averager = GradientAverager(copy.deepcopy(MODEL), codec, comm=comm, timeout_s=20, **changes)
        try:
            return told(averager.average)
        finally:
            averager.close()

    for found, rank, text in run_local(2, average):
        assert (found, rank) == (field, 1)
        first, _, second = text.removeprefix(f"{field}: rank 0 has ").partition(", rank 1 has ")
        assert first.startswith(words[0]) or words[0] in first
        assert words[1] in second and not HASH.search(text), text


@pytest.mark.parametrize("what", ["buckets", "model"])
def test_a_mismatch_of_buckets_shows_their_tensors(what):
    """Without DDP's own checks of the model."""

    def buckets(comm):
        options = {"bucket_cap_mb": 25, "timeout_s": 20}
        model = copy.deepcopy(MODEL)
        if comm.rank and what == "buckets":
            options["bucket_cap_mb"] = 0.001
        elif comm.rank:
            model = model[:3]
        return told(GradientAverager(model, "terngrad", comm=comm, **options).average)

    for field, _, text in run_local(2, buckets):
        assert field == "numel" and not HASH.search(text), text
        assert "rank 0 has 4324 values in 3.bias (4,), 3.weight (4, 32), " in text, text


def test_long_values_are_cut_to_where_they_differ():
    def check(comm):
        value = "same, " * 100 + ("here", "there")[comm.rank] + ", tail" * 100
        with pytest.raises(PeerMismatch) as caught:
            agree(comm, {"value": value}, 20, called="check")
        return caught.value.expected, caught.value.got

    for first, second in run_local(2, check):
        assert max(len(first), len(second)) < 220 and "here" in first and "there" in second


def test_words_that_do_not_come_leave_the_mismatch():
    """A rank that sends its record and no words is a mismatch all the same, after `WORDS_S` at
    most.
    """

    def check(comm):
        def silent(data, timeout_s, channel):
            if len(data) > NBYTES:
                raise TimeoutError
            return LocalCommunicator.all_gather_bytes(comm, data, timeout_s, channel)

        if comm.rank:
            comm.all_gather_bytes = silent
        values, begun = {"codec": f"codec of rank {comm.rank}"}, time.monotonic()
        found = told(lambda: agree(comm, values, 0.5, fields=EXCHANGE_FIELDS))
        return found, time.monotonic() - begun < 8

    for rank, (found, soon) in enumerate(run_local(2, check)):
        texts = ["something else"] * 2
        texts[rank] = f"codec of rank {rank}"
        assert found[:2] == ("codec", 1) and soon
        assert f"rank 0 has {texts[0]}, rank 1 has {texts[1]}" in found[2]
