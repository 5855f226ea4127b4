"""What entry points refuse, survive and leave behind: failed steps, foreign communicators, copies,
Join, frozen layers.
"""

import contextlib
import copy
import pickle
import re
import time
import warnings
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _held import descriptors, steady
from _models import MODEL, averager_of, bits, filled, minibatch, small_model
from _ranks import each_rank, mismatch, one_rank, run_local
from _saved import parts_of, saved_and_loaded
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import _MixedPrecision
from torch.profiler import profile

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
import gradcomp.onebit_sgd
from gradcomp import (
    Advanced,
    GradcompError,
    GradientAverager,
    Identity,
    OneBit,
    PeerLost,
    PeerMismatch,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.allreduce import Feedback
from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.comm.base import Channel
from gradcomp.exchange.agree import EXCHANGE_FIELDS, NBYTES, agree, gather
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.optim import SplitSGD, split_parameters

OTHER = small_model(seed=1)
SMALL = {"bucket_cap_mb": 0.005}
each_way = pytest.mark.parametrize("way", ["average", "average_delayed"])


def registered(codec="onebit", model=None, ddp=None, **options):
    """Return a copy of the model in DDP, and its state."""
    model = DDP(copy.deepcopy(MODEL) if model is None else model, **(ddp or {}))
    return model, gradcomp.ddp.register(model, codec, timeout_s=20, **options)


def backward(model, step=0):
    p = next(model.parameters())
    x, _ = minibatch(step, dist.get_rank(), p.dtype, p.shape[1])
    model(x).square().mean().backward()


def all_nan(model):
    return all(bool(p.grad.isnan().all()) for p in model.parameters() if p.grad is not None)


# ---- a failed step leaves NaN --------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "view"), [(False, False), (False, True), (True, False)])
@each_rank(2)
def test_a_failed_backward_leaves_no_local_gradient(fused, view):
    """Rank 1 is a step ahead, so the second backward fails everywhere."""
    model = copy.deepcopy(MODEL)
    optimizer = SplitSGD(split_parameters(model), lr=0.1) if fused else None
    wrapping = SMALL | {"gradient_as_bucket_view": view}
    model, state = registered(model=model, ddp=wrapping, min_numel=0, optimizer=optimizer)
    backward(model)
    assert fused or not all_nan(model)
    state._engine.step += dist.get_rank()
    for _ in range(2):  # the next forward says it again
        with pytest.raises(PeerMismatch, match="step"):
            backward(model)
        assert all_nan(model) and all(p.grad is not None for p in model.parameters())
    state.close()


@each_way
@each_rank(2, "local")
def test_a_failed_average_leaves_no_local_gradient(comm, way):
    model, averager = averager_of(comm, "onebit", min_numel=0, **SMALL)
    with contextlib.closing(averager):
        filled(model, 1.0)
        getattr(averager, way)()
        averager.flush()
        averager._engine.step += comm.rank
        filled(model, 1.0)
        with pytest.raises(GradcompError):
            getattr(averager, way)()
            averager.flush()
        assert all_nan(model)


@each_way
def test_a_refused_gradient_leaves_no_local_gradient(way):
    """All ranks refuse alike before anything is sent: a step that is taken nevertheless must not
    be one of each rank's own.
    """
    layers = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(4, 2, sparse=True)])
    comm = LocalCommunicator.group(2)[0]
    averager = GradientAverager(layers.named_parameters(), Identity(), comm=comm, min_numel=0)
    (layers[1](torch.tensor([1])) @ layers[0].weight).sum().backward()
    with pytest.raises(UnsupportedTensor, match="sparse"):
        getattr(averager, way)()
    assert all_nan(layers) and all(layer.weight.grad is not None for layer in layers)


@pytest.mark.parametrize("steps", [0, 1])
@each_way
@each_rank(2, "local")
def test_a_gradient_that_one_rank_refuses_is_told_to_the_others(comm, way, steps):
    """They waited for the whole timeout, in their first step and in later ones."""
    model, averager = averager_of(comm, Identity())
    weight = next(model.parameters())

    def average(refused=False):
        filled(model, 1.0 + comm.rank)
        if refused:
            weight.grad = weight.grad.to_sparse()
        getattr(averager, way)()
        averager.flush()

    with contextlib.closing(averager):
        for _ in range(steps):
            average()
        error, said = PeerLost, "rank 1 gave up because of UnsupportedTensor: the gradient of"
        if comm.rank == 1:
            error, said = UnsupportedTensor, "the gradient of '.*weight' is torch.sparse_coo"
        for again in (False, True):
            with pytest.raises(error, match=said):
                average(refused=comm.rank == 1 and not again)
            assert all_nan(model)
        averager.reset()
        average()
        assert averager.step == steps + 1
        assert all(bool((p.grad == 1.5).all()) for p in model.parameters())


@each_rank(2, "local")
def test_an_interrupted_average_can_be_tried_again(comm):
    """A step that was left open is waited for before the next one begins."""
    model, averager = averager_of(comm, Identity(), min_numel=0, **SMALL)
    with contextlib.closing(averager):
        second = averager._buckets[1]
        second.load = lambda: (_ for _ in ()).throw(KeyboardInterrupt)
        filled(model, 1.0 + comm.rank)
        with pytest.raises(KeyboardInterrupt):
            averager.average()
        assert all_nan(model)
        del second.load
        filled(model, 1.0 + comm.rank)
        averager.average()
        assert all(bool((p.grad == 1.5).all()) for p in model.parameters()) and averager.step == 1


@each_rank(2)
def test_what_to_do_after_an_exception_of_ones_own():
    """In the middle of backward on every rank: DDP is made anew, the state goes on."""
    options = {"ddp": SMALL, "min_numel": 0, "atomic_steps": True}
    module = copy.deepcopy(MODEL)
    model, state = registered(model=module, **options)
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
    assert saved["step"] == before["step"]
    for name, tensor in parts_of(saved)["residual"].items():
        assert torch.equal(tensor, parts_of(before)["residual"][name])
    state.close()
    del model
    model, state = registered(model=module, **options)
    state.load_state_dict(saved)
    model.zero_grad()
    backward(model, 1)
    assert not all_nan(model) and state.check_replicas() == (0, 1)
    state.close()


# ---- the ranks that were meant -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["alone", "reversed"])
@each_rank(2)
def test_a_communicator_of_other_ranks_is_refused(kind):
    model = DDP(copy.deepcopy(MODEL))
    comm = one_rank() if kind == "alone" else LocalCommunicator.group(2)[1 - dist.get_rank()]
    said = r"other ranks than the process group: .*\(here a LocalCommunicator\)"
    with pytest.raises(ValueError, match=said):
        gradcomp.ddp.register(model, "terngrad", comm=comm)
    backward(model)
    assert not model._forward_pre_hooks, "no hook was left behind"


@each_rank(2)
def test_an_averager_that_is_alone_says_so():
    said = "LocalCommunicator has 1 rank, torch.distributed has 2: gradients are not averaged"
    with pytest.warns(UserWarning, match=said):
        averager_of(one_rank())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        averager_of(LocalCommunicator.group(2)[0])[1].close()


@each_way
@each_rank(3, "local")
def test_unequal_initial_parameters_are_named(comm, way):
    model, averager = averager_of(comm, model=OTHER if comm.rank == 2 else MODEL, min_numel=0)
    with contextlib.closing(averager):
        filled(model, 1.0)
        for _ in range(2):
            with pytest.raises(PeerMismatch) as caught:
                getattr(averager, way)()
        assert (caught.value.field, caught.value.rank) == ("parameter 0.weight", 2)
        assert all_nan(model)


def test_an_averager_takes_a_model():
    named = [n for n, _ in MODEL.named_parameters()]
    _, averager = averager_of(one_rank())
    assert [name for name, _ in averager._engine.named] == named
    for wrong, said in ((MODEL.parameters(), "Parameter"), ([1], "int"), ([("a",)], "tuple")):
        with pytest.raises(TypeError, match=f"named_parameters.*{said}"):
            GradientAverager(wrong, "onebit", comm=one_rank())


# ---- what all_reduce keeps -----------------------------------------------------------------------


def test_steps_that_would_repeat_draws_are_refused():
    comm = one_rank()
    gradcomp.all_reduce(torch.ones(4), "terngrad", comm=comm, step=2**32 - 1)
    for step in (2**32, -1, True, 1.0):
        with pytest.raises(ValueError, match="step must be"):
            gradcomp.all_reduce(torch.ones(4), "terngrad", comm=comm, step=step)


@each_rank(2, "local")
def test_all_reduce_keeps_a_bounded_number_of_buffers_and_no_residuals(comm):
    """Residuals of a tensor that comes back after its buffers were dropped go on where they
    stood.
    """
    ours = torch.linspace(-1 + comm.rank, 1, 64)

    def averaged(kept):
        return gradcomp.all_reduce(ours.clone(), OneBit(), comm=comm, feedback=kept)

    plain, feedback, dropped = Feedback({0: 64}), Feedback({0: 64}), []
    wanted = [averaged(plain) for _ in range(3)]
    found = [averaged(feedback)]
    for numel in range(1, 40):
        gradcomp.all_reduce(torch.ones(numel), Identity(), comm=comm)
        spare = Feedback({0: 64})  # residuals come and go
        averaged(spare)
        dropped.append(weakref.ref(spare))
    del spare
    found.append(averaged(feedback))
    call = comm.kept["all_reduce", 0]
    assert len(call.exchanges) == 16 and not any(one() for one in dropped)
    gradcomp.allreduce.forget_buffers(comm)
    assert not call.exchanges and call.step == 5 + 2 * 39
    found.append(averaged(feedback))
    assert bits(found) == bits(wanted)


@each_rank(2)
def test_all_reduce_has_a_new_communicator_after_a_failure():
    """Without `comm` every later call failed, and there was nothing to duplicate."""

    def averaged(value, **options):
        return gradcomp.all_reduce(torch.full((64,), value), Identity(), **options).tolist()

    rank = dist.get_rank()
    assert averaged(float(rank)) == [0.5] * 64
    disturbed = mock.patch.object(gradcomp.allreduce, "run_stages", side_effect=OSError("a bug"))
    with disturbed if rank == 1 else contextlib.nullcontext(), pytest.raises(Exception) as caught:
        averaged(1.0, timeout_s=20)
    assert caught.type is (OSError if rank == 1 else PeerLost)
    gradcomp.allreduce.forget_buffers()  # not collective: it makes none
    assert averaged(float(rank)) == [0.5] * 64


# ---- copies, pickles -----------------------------------------------------------------------------


@each_rank(2)
def test_a_registered_model_can_be_pickled():
    """What comes of it runs, and trains once it is registered."""
    model, state = registered(min_numel=0)
    backward(model)
    twin = saved_and_loaded(model, weights_only=False)
    assert bits(twin) == bits(model)
    twin(torch.ones(1, 64))
    with gradcomp.ddp.register(twin, Identity(), min_numel=0) as again:
        backward(twin)
        assert again.step == 1
    state.close()


@each_rank(1)
def test_the_state_of_a_copy_says_what_it_is():
    _, state = registered()
    methods = "state_dict", "discard_step", "check_replicas", "materialize_gradients", "describe"
    for twin in (copy.deepcopy(state), copy.copy(state), pickle.loads(pickle.dumps(state))):
        for use in (
            *(lambda name=name: getattr(twin, name)() for name in methods),  # noqa: B023
            lambda: twin.stats,  # noqa: B023
            lambda: twin.step,  # noqa: B023
            lambda: twin.load_state_dict({}),  # noqa: B023
        ):
            with pytest.raises(GradcompError, match="copy of a model"):
                use()
        twin.close()
        assert repr(twin) == "<CompressionState of a copy: off>"
    state.close()


# ---- what DDP is told to do beside ---------------------------------------------------------------


@each_rank(1)
def test_who_has_taken_the_hook_is_named():
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


@each_rank(2)
def test_join_over_the_ranks_that_are_left_is_refused():
    model, state = registered()
    wrong = Join([model], divide_by_initial_world_size=False)
    with pytest.raises(GradcompError, match="divide_by_"), wrong:
        backward(model)
    state.close()


@each_rank(2)
def test_layers_that_change_after_ddp_was_made_are_named():
    module = copy.deepcopy(MODEL)
    module[2].requires_grad_(False)
    model, state = registered(model=module)
    backward(model)
    model.module.append(nn.Identity())  # nothing to average
    backward(model)
    module[2].requires_grad_(True)
    with torch.no_grad():
        model(torch.ones(1, 64))  # not trained
    with pytest.raises(GradcompError, match=r"'2\.weight' was frozen"):
        backward(model)
    state.close()
    model, state = registered()
    model.module.append(nn.Linear(10, 4))
    with torch.no_grad():
        model(torch.ones(1, 64))
    for _ in range(2):
        with pytest.raises(GradcompError, match=r"'5\.weight' has come"):
            backward(model)
    model.module[5].requires_grad_(False)
    backward(model)
    state.close()
    model = DDP(copy.deepcopy(MODEL), find_unused_parameters=True)
    model.module[2].requires_grad_(False)
    with (
        gradcomp.ddp.register(model, OneBit(), min_numel=0),
        pytest.raises(GradcompError, match=r"2\.(weight|bias)"),
    ):
        backward(model)


def test_a_layer_that_comes_after_its_averager_is_named():
    net, averager = averager_of(one_rank())
    averager.average()
    net[0].extra = nn.Parameter(torch.zeros(3))
    with pytest.raises(GradcompError, match=r"'0\.extra' has come"):
        averager.average()


@each_rank(2)
def test_profiles_and_logs_name_gradcomp():
    model, state = registered(ddp=SMALL, min_numel=0)
    backward(model)
    with profile() as prof:
        backward(model)
    shown = {e.key: e.count for e in prof.key_averages()}
    assert shown["gradcomp::bucket"] == len(state._step.buckets)
    with contextlib.suppress(ImportError, TypeError):
        from torch._C._profiler import _ExperimentalConfig

        with profile(experimental_config=_ExperimentalConfig(profile_all_threads=True)) as prof:
            backward(model)
    assert {"gradcomp::encode", "gradcomp::decode"} <= {e.key for e in prof.key_averages()}
    name = model._get_ddp_logging_data()["comm_hook"]
    assert name.startswith("gradcomp.ddp.compression_hook: OneBit(")
    state.close()


@pytest.mark.parametrize("steps", [1, 2])
@each_rank(2)
def test_a_peer_that_torch_has_lost_is_lost(steps):
    """Rank 0 leaves: rank 1 waits for it in torch's own broadcasts, of rebuilt buckets or of
    buffers. It was gloo's text alone; then a text without the rank.
    """
    layers = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8))
    model, state = registered(model=layers, min_numel=0)
    for _ in range(steps):
        backward(model)
    if dist.get_rank() == 0:
        state.close()
        del model, state
        dist.destroy_process_group()
        return
    with pytest.raises(RuntimeError) as first:
        backward(model)
    said = r"in torch's own collectives after 0.0 s: rank 0 \(pid \d+ on \S+\) closed"
    said += r" .* \[while DDP broadcast"
    with pytest.raises(PeerLost, match=said) as caught:
        backward(model)
    state.close()
    assert caught.value.__cause__ is first.value and caught.value.rank == 0


@pytest.mark.parametrize("given", [True, False])
@each_rank(4)
def test_a_registration_that_torch_refuses_leaves_nothing_behind(given):
    """torch refuses the hook when everything else has been made: nodes have communicators of
    their own by then. A communicator that was given works on.
    """
    model = DDP(copy.deepcopy(MODEL))
    TorchCommunicator(timeout_s=20).close()  # opens the socket that this process keeps
    comm = TorchCommunicator() if given else None
    before = steady(descriptors)
    nodes = {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 1], [2, 3]])}
    options = {"comm": comm, "timeout_s": 20, **nodes}
    model.register_comm_hook = lambda *_: 1 / 0
    # its traceback keeps alive what was made
    with pytest.raises(ZeroDivisionError) as caught:
        gradcomp.ddp.register(model, "terngrad", **options)
    assert descriptors() <= before and not model._forward_pre_hooks and not model._forward_hooks
    del model.register_comm_hook, caught
    with gradcomp.ddp.register(model, "terngrad", **options):
        backward(model)


# ---- ranks that do different things --------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "called"),
    [
        ("all_reduce", r"all_reduce\(key=0\)"),
        ("check_replicas", r"check_replicas\(\)"),
        ("average", r"average\(\)"),
    ],
)
@each_rank(2, "local")
def test_a_call_that_the_other_ranks_do_not_make_is_named(comm, what, called):
    if comm.rank == 1:
        return
    with pytest.raises(PeerLost, match=f"every rank has to call {called}"):
        if what == "all_reduce":
            gradcomp.all_reduce(torch.ones(8), "terngrad", comm=comm, timeout_s=0.2)
        getattr(averager_of(comm, timeout_s=0.2)[1], what)()
    comm.abort()


def other_calls(what, rank):
    """Do what only this rank does."""
    comm = TorchCommunicator(timeout_s=20) if what != "register" else None
    shards = fully_shard(copy.deepcopy(MODEL)) if what == "register" else None
    options = {"comm": comm, "timeout_s": 20}
    if what == "check_replicas":
        averager_of(comm, model=MODEL if rank else MODEL[:3])[1].check_replicas()
    elif what == "all_reduce":
        for key, numel in enumerate((100, 70_000)):
            gradcomp.all_reduce(torch.ones(numel), "terngrad", key=key, **options)
        numel = (100, 70_000)[rank]
        gradcomp.all_reduce(torch.ones(numel), "terngrad", key=rank, **options)
    elif rank == 0:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gradcomp.DiLoCo(model, optimizer, "terngrad", sync_every=4, **options)
    elif what == "average":
        averager_of(comm)[1].average()
    else:
        gradcomp.fsdp.register(shards, "terngrad", timeout_s=20)


@pytest.mark.parametrize(
    ("what", "field", "said"),
    [
        (
            "check_replicas",
            "layout",
            r"rank 0 has .*2.bias \(64,\) float32, rank 1 has .*; parameter 4.weight \(10, 64\) fl",
        ),
        ("all_reduce", "numel", r"rank 0 has 100 values \(key=0, .*1 has 70000 values \(key=1, "),
        ("average", "call", r"rank 0 has DiLoCo, rank 1 has average\(\)"),
        ("register", "call", r"rank 0 has DiLoCo, rank 1 has gradcomp.fsdp.register"),
    ],
)
@each_rank(2)
def test_ranks_that_do_other_things_are_told_and_live(what, field, said):
    """gloo ended the process of the rank that had less to send (SIGABRT): the others got
    PeerLost.
    """
    found, text = mismatch(lambda: other_calls(what, dist.get_rank()))
    assert found == field and re.search(said, text), text


UNNAMED = "another call, which its message does not name"


@pytest.mark.parametrize(
    "calls",
    [
        ("find_batch_size", "check_replicas()"),
        ("the guard", "check_replicas()"),
        ("the guard", "an exchange of gradients"),
        ("the guard", "a verdict"),
        # its data leaves no room for a name
        ("compare", UNNAMED),
    ],
)
@each_rank(2, "local")
def test_two_calls_that_meet_are_named(comm, calls):
    """The text of all but the first was "another call"."""
    net, averager = averager_of(comm)
    search = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "comm": comm}
    search |= {"samples": 100, "current": 8, "timeout_s": 20}
    find = gradcomp.onebit_sgd.find_batch_size
    control = {"channel": Channel.CONTROL}
    make = {
        "find_batch_size": lambda: find(lambda size, samples: [], **search),
        "check_replicas()": averager.check_replicas,
        "the guard": lambda: gather(comm, b"1", "guard", 20, called="the guard"),
        "a verdict": lambda: gather(comm, b"2", "verdict", 20, called="a verdict"),
        "an exchange of gradients": lambda: agree(comm, {}, 20, fields=EXCHANGE_FIELDS, **control),
        "compare": lambda: agree(comm, {"a": 1}, 20, called="compare", **control),
        UNNAMED: lambda: gather(comm, b"x" * (NBYTES - 8), "parts", 20, called=UNNAMED),
    }
    with pytest.raises(PeerMismatch) as caught:
        make[calls[comm.rank]]()
    words = [f"rank {rank} has {call}" for rank, call in enumerate(calls)]
    assert caught.value.field == "call" and all(w in str(caught.value) for w in words), caught.value


ADAGRADS = tuple({"advanced": Advanced(transform=AggregateAdagrad(eps=e))} for e in (1e-5, 1e-6))


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (("terngrad", "onebit"), "codec", ("TernGrad(clip_sigma=2.5,", "OneBit(group='row',")),
        ((TernGrad(seed=1), TernGrad(seed=2)), "codec_options", ("seed=1", "seed=2")),
        (({}, {"precondition": True}), "precondition", ("None", "Precondition(beta=0.95, floor=")),
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
        (({}, {"advanced": Advanced(slice_numel=1 << 22)}), "slice_numel", ("None", "4194304")),
        (ADAGRADS, "transform", ("AggregateAdagrad(eps=1e-05", "AggregateAdagrad(eps=1e-06")),
        (({"atomic_steps": True}, {}), "atomic_steps", ("1", "0")),
        (
            ({"exchange": "all_gather"}, {"exchange": "reduce_scatter"}),
            "exchange",
            ("all_gather", "reduce_scatter"),
        ),
    ],
)
@each_rank(2, "local")
def test_a_mismatch_shows_what_each_rank_has(comm, options, field, words):
    """It printed hashes: "17896042909800916847 there, 6098816465478212926 expected"."""
    given = options[comm.rank]
    codec, changes = ("terngrad", given) if isinstance(given, dict) else (given, {})
    _, averager = averager_of(comm, codec, **changes)
    with contextlib.closing(averager):
        found, text = mismatch(averager.average)
    assert found == field
    first, _, second = text.removeprefix(f"{field}: rank 0 has ").partition(", rank 1 has ")
    assert words[0] in first and words[1] in second, text


@pytest.mark.parametrize(
    ("what", "field", "shown"),
    [
        ("buckets", "numel", "rank 0 has 17226 values in 4.bias (10,), 4.weight (10, 64), "),
        ("model", "layout", "parameter 4.bias (10,) float32, rank 1 has "),
    ],
)
@each_rank(2, "local")
def test_a_mismatch_of_buckets_shows_their_tensors(comm, what, field, shown):
    """Without DDP's own checks of the model."""
    model = MODEL[:3] if comm.rank and what == "model" else MODEL
    cap = 0.001 if comm.rank and what == "buckets" else 25
    found, text = mismatch(averager_of(comm, model=model, bucket_cap_mb=cap)[1].average)
    assert found == field
    assert shown in text, text


@each_rank(2, "local")
def test_long_values_are_cut_to_where_they_differ(comm):
    value = "same, " * 100 + ("here", "there")[comm.rank] + ", tail" * 100
    with pytest.raises(PeerMismatch) as caught:
        agree(comm, {"value": value}, 20, called="check")
    first, second = caught.value.expected, caught.value.got
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
        found = mismatch(lambda: agree(comm, values, 0.5, fields=EXCHANGE_FIELDS))
        assert time.monotonic() - begun < 8
        return found

    for rank, (field, text) in enumerate(run_local(2, check)):
        texts = ["another value, which did not arrive as text (no answer from ranks [1])"] * 2
        texts[0] = texts[0].replace("no answer from ranks [1]", "TimeoutError")
        texts[rank] = f"codec of rank {rank}"
        assert field == "codec" and f"rank 0 has {texts[0]}, rank 1 has {texts[1]}" in text
