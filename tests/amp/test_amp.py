"""Dynamic loss scaling: growth rules, verdicts, and steps that leave everything as it was."""

import copy
import io
import itertools
import json
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from _ranks import run_local
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import (
    GradcompError,
    GradientAverager,
    Identity,
    OneBit,
    PeerLost,
    PeerMismatch,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.amp import DynamicLossScaler, DynamicLossScalingUpdater
from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.exchange.agree import gather

INF, NAN = math.inf, math.nan
REDUCED = 1e-6  # relative: sums in float32, in an order that the library chooses
HALVES = [torch.float32, torch.bfloat16, torch.float16]
WIDE = {"min_scale": 2.0**-126, "max_scale": 2.0**126}


def stepped(scaler, optimizer):
    """Scale a loss and step; return whether the step was skipped."""
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return scaler.last_step_skipped


def verdict(scaler, *values, dtype=torch.float32):
    """Make one step with these gradients; return whether it was skipped."""
    stepped(scaler, with_gradients(*(torch.tensor(v).to(dtype) for v in values)))
    scaler.update()
    return scaler.last_step_skipped


def with_gradients(*grads):
    """Return an optimizer whose parameters have these gradients."""
    parameters = [
        nn.Parameter(torch.zeros_like(g) if g is not None else torch.zeros(1)) for g in grads
    ]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return torch.optim.SGD(parameters, lr=0.0)


def gradient(optimizer, number=0):
    return optimizer.param_groups[0]["params"][number].grad


def scales(scaler, bad):
    """Return the scale after every step of a sequence of verdicts."""
    found = []
    for overflow in bad:
        assert verdict(scaler, INF if overflow else 1.0) == overflow
        found.append(scaler.get_scale())
    return found


def raw(tensors):
    return [t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def snapshot(model, optimizer, state=None):
    """Return every bit of parameters, optimizer state and residuals, these in units of the plain
    gradient.
    """
    kept = optimizer.state_dict()["state"]
    numbers = {(k, name): v for k, entry in kept.items() for name, v in entry.items()}
    tensors = {k: raw([v])[0] if isinstance(v, torch.Tensor) else v for k, v in numbers.items()}
    plane = (
        state.state_dict()
        if state is not None
        else {"residual": {}, "owner_residual": {}, "loss_scale": 1.0}
    )
    tensors_kept = [*plane["residual"].values(), *plane["owner_residual"].values()]
    # before the first encoding there are none, which is zero
    residuals = raw(t / plane["loss_scale"] for t in tensors_kept if t.any())
    return raw(model.parameters()), tensors, residuals


# ---- how the scale moves --------------------------------------------------------------------


def nnabla(bad, scale, factor, interval):
    """The seed's pseudo code."""
    counter, found = 0, []
    for overflow in bad:
        if overflow:
            scale /= factor
            counter = 0
        else:
            if counter > interval:
                scale *= factor
                counter = 0
            counter += 1
        found.append(scale)
    return found


def torchs(bad, scale, factor, interval):
    """What torch.amp.GradScaler.update calls."""
    now, tracker = torch.full((), scale), torch.zeros((), dtype=torch.int32)
    found = []
    for overflow in bad:
        torch._amp_update_scale_(
            now, tracker, torch.full((), float(overflow)), factor, 1.0 / factor, interval
        )
        found.append(now.item())
    return found


REFERENCES = {"nnabla": nnabla, "torch": torchs}


@pytest.mark.parametrize("rule", REFERENCES)
@given(
    bad=st.lists(st.sampled_from([False, False, False, True]), max_size=30),
    scale=st.sampled_from([8.0, 1.0, 0.3, 65536.0, 1e-3]),
    factor=st.sampled_from([2.0, 4.0, 3.0, 1.5, 1.1, 10.0, 2]),
    interval=st.integers(1, 5),
)
def test_scale_sequence_is_the_references(rule, bad, scale, factor, interval):
    scaler = DynamicLossScaler(scale, factor, interval, rule=rule, **WIDE)
    assert scales(scaler, bad) == REFERENCES[rule](bad, scale, factor, interval)


@pytest.mark.parametrize(
    ("rule", "growths"), [("nnabla", [2002, 4003, 6004]), ("torch", [2000, 4000, 6000])]
)
def test_growth_of_the_defaults(rule, growths):
    """NNabla counts after it compares: first growth on good update N + 2, then every N + 1."""
    found = scales(DynamicLossScaler(rule=rule), [False] * 6100)
    assert found[0] == 8.0
    assert [
        n for n, (a, b) in enumerate(itertools.pairwise([8.0, *found]), 1) if b == 2 * a
    ] == growths
    assert found[-1] == 64.0


BOUNDS = [
    # options, verdicts, scales
    ({"scale": 4.0, "min_scale": 1.0}, [True] * 4, [2.0, 1.0, 1.0, 1.0]),
    ({"scale": 4.0, "min_scale": 3.0}, [True] * 2, [3.0, 3.0]),
    ({"scale": 4.0, "min_scale": 4.0}, [True], [4.0]),
    ({"scale": 4.0, "max_scale": 8.0, "rule": "torch"}, [False] * 3, [8.0, 8.0, 8.0]),
    ({"scale": 4.0, "max_scale": 5.0, "rule": "torch"}, [False, False, True], [5.0, 5.0, 2.5]),
    ({"scale": 4.0, "max_scale": 4.0}, [False] * 4, [4.0] * 4),
    ({"scale": 2.0**-24}, [True], [2.0**-24]),
    ({"scale": 2.0**24, "rule": "torch"}, [False], [2.0**24]),
    ({"scale": 0.1, "min_scale": 0.1, "rule": "torch"}, [True], [torch.tensor(0.1).item()]),
]


@pytest.mark.parametrize(("options", "bad", "expected"), BOUNDS)
def test_scale_keeps_within_its_bounds(options, bad, expected):
    assert scales(DynamicLossScaler(interval=1, **options), bad) == expected


# ---- what counts as overflow ----------------------------------------------------------------


VERDICTS = [
    ("inf", [[1.0, INF]], True),
    ("-inf", [[-INF, 1.0]], True),
    ("nan", [[1.0, NAN]], True),
    ("in the last of several", [[1.0] * 40, [2.0], [0.0] * 33 + [NAN]], True),
    ("zero", [[0.0, -0.0]], False),
    ("nothing but an empty one", [[]], False),
    ("an empty one and inf", [[], [INF]], True),
    ("a scalar", [NAN], True),
    ("a finite scalar", [1.0], False),
]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("values", "overflow"), [v[1:] for v in VERDICTS], ids=[v[0] for v in VERDICTS]
)
def test_verdict(values, overflow, dtype):
    assert verdict(DynamicLossScaler(), *values, dtype=dtype) == overflow


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_finite_values_are_no_overflow(dtype):
    """A norm of these would be Inf."""
    largest = torch.finfo(dtype).max
    optimizer = with_gradients(
        torch.full((1000,), largest, dtype=dtype), torch.full((3,), -largest, dtype=dtype)
    )
    assert not stepped(DynamicLossScaler(), optimizer)
    assert torch.equal(gradient(optimizer), torch.full((1000,), largest / 8, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("scale", "overflow"), [(1.0, False), (0.5, True), (0.25, True)])
def test_unscaling_that_overflows_is_one(dtype, scale, overflow):
    """A scale below 1 makes finite gradients larger; torch's GradScaler lets the Inf through to
    the optimizer.
    """
    assert verdict(DynamicLossScaler(scale), [1.0, torch.finfo(dtype).max], dtype=dtype) == overflow


def test_no_gradients_at_all_are_no_overflow():
    optimizer = with_gradients(None, None)
    assert not stepped(DynamicLossScaler(), optimizer) and gradient(optimizer) is None


@pytest.mark.parametrize(
    ("values", "overflow", "summed"),
    [
        ([1.0, 2.0], False, [3.0]),
        ([1.0, NAN], True, None),
        ([3e38, 3e38], True, None),
        ([3e38, -3e38], False, [0.0]),
    ],
)
def test_sparse_gradients_count_with_their_duplicates_added(values, overflow, summed):
    weight = nn.Parameter(torch.zeros(4))
    weight.grad = torch.sparse_coo_tensor([[2, 2]], values, (4,), check_invariants=True)
    assert stepped(DynamicLossScaler(), torch.optim.SGD([weight], lr=0.0)) == overflow
    assert summed is None or weight.grad._values().tolist() == [s / 8 for s in summed]


LAYOUTS = {
    "transposed": lambda: torch.arange(1.0, 25.0).reshape(4, 6).t(),
    "channels last": lambda: (
        torch.arange(1.0, 25.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    ),
    "strided": lambda: torch.arange(1.0, 25.0)[::2],
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_are_not_contiguous(make, bad):
    grad = make()
    wanted = grad / 8
    if bad:
        grad[(-1,) * grad.ndim] = INF
    optimizer, scaler = with_gradients(grad), DynamicLossScaler()
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert scaler.last_step_skipped == bad and (bad or torch.equal(gradient(optimizer), wanted))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scale", [8.0, 3.0, 1.0, 0.125, 1e-3])
def test_unscaling_multiplies_once_and_rounds_once(dtype, scale):
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1)).to(dtype)
    optimizer, scaler = with_gradients(values.clone()), DynamicLossScaler(scale)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    inverse = torch.tensor(1 / scale, dtype=torch.float32).double()
    assert torch.equal(gradient(optimizer), (values.double() * inverse).float().to(dtype))


# ---- order of calls -------------------------------------------------------------------------


def ready():
    scaler = DynamicLossScaler()
    scaler.scale(torch.ones(()))
    return scaler, with_gradients(torch.full((3,), 8.0))


def test_unscaled_once_and_stepped_once():
    scaler, optimizer = ready()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="once is enough"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert gradient(optimizer).tolist() == [1.0] * 3
    for again in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match=r"scaler.update\(\)"):
            again(optimizer)
    scaler.update()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match=r"scale\(loss\)\.backward"):
            call(optimizer)
    assert gradient(optimizer).tolist() == [1.0] * 3


def test_update_needs_a_verdict():
    scaler, _ = ready()
    with pytest.raises(RuntimeError, match="verdict"):
        scaler.update()
    assert scaler.state_dict()["counter"] == 0


@pytest.mark.parametrize("strides", [(0, 0), (5, 0)])
def test_packed_gradients_are_refused_before_any_is_unscaled(strides):
    packed = torch.tensor(NAN).as_strided((1, 5), strides)
    scaler, optimizer = DynamicLossScaler(), with_gradients(torch.full((2,), 8.0), packed)
    with pytest.raises(GradcompError, match="materialize_gradients"):
        stepped(scaler, optimizer)
    assert gradient(optimizer).tolist() == [8.0, 8.0] and not scaler.last_step_skipped
    optimizer.param_groups[0]["params"][1].grad = torch.full((1, 5), 8.0)
    scaler.step(optimizer)
    assert gradient(optimizer, 1).tolist() == [[1.0] * 5]


def test_a_single_element_is_not_packed():
    optimizer = with_gradients(torch.tensor(8.0).expand(1, 1).clone())
    optimizer.param_groups[0]["params"][0].grad = torch.tensor(8.0).expand(1, 1)
    stepped(DynamicLossScaler(), optimizer)
    assert gradient(optimizer).tolist() == [[1.0]]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_gradients_are_refused():
    scaler, optimizer = ready()
    weight = nn.Parameter(torch.eye(2).to_sparse_csr())
    weight.grad = torch.eye(2).to_sparse_csr()
    optimizer.add_param_group({"params": [weight]})
    with pytest.raises(UnsupportedTensor, match="sparse_csr"):
        scaler.step(optimizer)


def test_two_optimizers_one_overflows():
    """The other one steps; the scale falls once."""
    scaler, good = ready()
    bad = with_gradients(torch.full((3,), NAN))
    scaler.step(bad)
    assert scaler.last_step_skipped
    scaler.step(good)
    assert not scaler.last_step_skipped and gradient(good).tolist() == [1.0] * 3
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_step_returns_what_the_optimizer_returns():
    scaler, optimizer = ready()
    optimizer.step = lambda: "stepped"
    assert scaler.step(optimizer) == "stepped"


def test_scale_takes_tensors_in_lists_and_tuples():
    scaler, one = DynamicLossScaler(), torch.ones((), dtype=torch.float16)
    a, (b, c) = scaler.scale([one, (one, 2 * one)])
    assert (a.item(), b.item(), c.item()) == (8.0, 8.0, 16.0) and a.dtype == torch.float16
    for nonsense in (1.0, None, {"loss": one}):
        with pytest.raises(TypeError, match=type(nonsense).__name__):
            scaler.scale(nonsense)


# ---- wrong arguments ------------------------------------------------------------------------


def wrong(table):
    """Return (name, value) of every value of a table."""
    return [(name, value) for name, values in table.items() for value in values]


WRONG = {
    "scale": (0.0, -8.0, NAN, INF, True, "8", None, 2.0**25, 2.0**-25),
    "factor": (1.0, 0.5, -2.0, NAN, INF, True, "2", None, 10**400),
    "interval": (0, -1, 2**31, 2000.0, True, "2000", None),
    "rule": ("NNabla", "", None, 3),
    "min_scale": (0.0, -1.0, NAN, INF, True, 2.0**-127),
    "max_scale": (0.0, 2.0**-25, NAN, INF, True, 2.0**127),
    "timeout_s": (0.0, -1.0, NAN, INF, True, "300"),
    "comm": (3,),
}


@pytest.mark.parametrize(("name", "value"), wrong(WRONG))
def test_wrong_arguments_of_the_scaler(name, value):
    shown = "int" if name == "comm" else repr(value)
    with pytest.raises(ValueError, match=name) as caught:
        DynamicLossScaler(**{name: value})
    assert shown in str(caught.value)


@pytest.mark.parametrize("bound", [{"min_scale": 9.0}, {"max_scale": 7.0}], ids=repr)
def test_the_first_scale_is_within_the_bounds(bound):
    with pytest.raises(ValueError, match=r"scale must be a number from .* got 8\.0"):
        DynamicLossScaler(**bound)


WRONG_UPDATER = {
    "optimizer": (None, 3),
    "loss_fn": (None, 3),
    "data_feeder": (iter([1]),),
    "scaler": (torch.amp.GradScaler("cpu"),),
    "accumulate": (0, -1, 2.0, True, None),
    "weight_decay": (-0.1, NAN, INF, True, "0.1"),
    "clip": (1.0,),
    "on_overflow": ("ignore", None, 3),
    "max_retries": (-1, 1.5, True, None),
    "model": (nn.Linear(1, 1),),
    "compression": (3,),
}


@pytest.mark.parametrize(("name", "value"), wrong(WRONG_UPDATER))
def test_wrong_arguments_of_the_updater(name, value):
    arguments = {"optimizer": with_gradients(None), "loss_fn": torch.sum, "data_feeder": dict}
    DynamicLossScalingUpdater(**arguments)
    with pytest.raises(ValueError, match=f"{name} must be .* got ") as caught:
        DynamicLossScalingUpdater(**{**arguments, name: value})
    plain = isinstance(value, (int, float, str, type(None)))
    assert str(caught.value).endswith(repr(value) if plain else type(value).__name__)


def test_compression_must_follow_this_scaler():
    net, scaler = nn.Linear(4, 4), DynamicLossScaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for other in (None, DynamicLossScaler(), torch.amp.GradScaler("cpu")):
        comm = LocalCommunicator.group(1)[0]
        averager = GradientAverager(net.named_parameters(), "onebit", comm, grad_scaler=other)
        with pytest.raises(ValueError, match="grad_scaler=scaler"):
            DynamicLossScalingUpdater(
                optimizer, torch.sum, dict, scaler=scaler, compression=averager
            )
        averager.close()


# ---- checkpoints ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", REFERENCES)
@pytest.mark.parametrize("split", range(9))
def test_a_loaded_state_goes_on_as_the_saved_one(rule, split):
    bad = [True, False, False, False, False, True, False, False, False]
    first = DynamicLossScaler(0.3, 3.0, 2, rule=rule, **WIDE)
    whole = scales(first, bad)
    begun = DynamicLossScaler(0.3, 3.0, 2, rule=rule, **WIDE)
    before = scales(begun, bad[:split])
    saved = io.BytesIO()
    torch.save(json.loads(json.dumps(begun.state_dict())), saved)
    saved.seek(0)
    resumed = DynamicLossScaler()
    resumed.load_state_dict(torch.load(saved, weights_only=True))
    assert before + scales(resumed, bad[split:]) == whole
    assert resumed.state_dict() == first.state_dict()


GOOD = DynamicLossScaler().state_dict()
NONSENSE = [
    *(
        {name: value}
        for name, value in wrong(
            {
                "scale": (0.0, -1.0, NAN, INF, True, "8", None, torch.ones(()), 2.0**25),
                "factor": (1.0, NAN, None),
                "interval": (0, 2.5, None, True),
                "counter": (-1, 2002, 1.0, True, None),
                "rule": ("other", None),
                "min_scale": (9.0,),
                "max_scale": (3.0,),
                "version": (2, None),
                "unknown": (1,),
            }
        )
    ),
    {"rule": "torch", "counter": 2000},
]
STATES = [
    *(
        (repr(change), {**GOOD, **change}, "scale" if "scale" in str(change) else [*change][-1])
        for change in NONSENSE
    ),
    *((f"no {key}", {k: v for k, v in GOOD.items() if k != key}, key) for key in GOOD),
    *((repr(s), s, "state") for s in (None, 3, [("scale", 8.0)])),
    ("torch's", torch.amp.GradScaler("cpu").state_dict(), "state"),
]


@pytest.mark.parametrize(
    ("state", "text"), [s[1:] for s in STATES], ids=[name for name, _, _ in STATES]
)
def test_states_that_make_no_sense_change_nothing(state, text):
    scaler = DynamicLossScaler()
    scales(scaler, [False, False, True, False])
    before = scaler.state_dict()
    DynamicLossScaler().load_state_dict(before)
    with pytest.raises(ValueError, match=text):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def test_loading_forgets_the_step_under_way():
    scaler, optimizer = ready()
    scaler.unscale_(optimizer)
    scaler.load_state_dict(DynamicLossScaler().state_dict())
    with pytest.raises(RuntimeError, match="no loss was scaled"):
        scaler.step(optimizer)


# ---- training -------------------------------------------------------------------------------


def small_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)


NET = small_net()  # threads share torch's global generator


def batches(rank=0, bad=(), dtype=torch.float32):
    """Yield training batches for ever; those numbered in `bad` hold Inf. Good ones are the same
    whatever is in `bad`.
    """
    drawn = itertools.count()
    for number in itertools.count():
        poison = number in bad
        generator = torch.Generator().manual_seed(1000 * (0 if poison else next(drawn)) + rank)
        x = torch.randn(8, 16, generator=generator)
        if poison:
            x[0, 0] = INF
        yield x.to(dtype), torch.randint(8, (8,), generator=generator)


def loss_of(net):
    return lambda batch: nn.functional.cross_entropy(net(batch[0]).float(), batch[1])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    # on its own it loses step 0
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
WHEN = {"at step 0": {0}, "in the middle": {3}, "repeatedly": {0, 2, 3, 4, 6}}


def run(optimizer_name, bad, steps, dtype=torch.float32):
    """Train by hand; return every bit at the end, and whether each skipped step changed none."""
    net = copy.deepcopy(NET).to(dtype)
    optimizer, scaler = OPTIMIZERS[optimizer_name](net.parameters()), DynamicLossScaler(1024.0)
    called, feeder, unchanged = [], batches(bad=bad, dtype=dtype), []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for number in range(steps):
        before = snapshot(net, optimizer)
        optimizer.zero_grad()
        scaler.scale(loss_of(net)(next(feeder))).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.last_step_skipped == (number in bad)
        unchanged += [snapshot(net, optimizer) == before] if number in bad else []
    assert len(called) == steps - len(bad)
    return snapshot(net, optimizer), unchanged, scaler.get_scale()


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name, bad):
    """The run is, bit for bit, the one that never saw the bad batches."""
    end, unchanged, scale = run(name, bad, 8)
    assert unchanged == [True] * len(bad) and scale == 1024.0 / 2 ** len(bad)
    assert end == run(name, set(), 8 - len(bad))[0]


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
def test_torch_rule_is_torchs_grad_scaler_bit_for_bit(bad):
    def trained(scaler):
        net, feeder = copy.deepcopy(NET), batches(bad=bad)
        optimizer, log = OPTIMIZERS["adamw"](net.parameters()), []
        for _ in range(9):
            optimizer.zero_grad()
            scaler.scale(loss_of(net)(next(feeder))).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            log.append(scaler.get_scale())
        return log, snapshot(net, optimizer)

    theirs = torch.amp.GradScaler(
        "cpu", 300.0, growth_factor=3.0, backoff_factor=1 / 3, growth_interval=2
    )
    ours = DynamicLossScaler(300.0, 3.0, 2, rule="torch")
    log, end = trained(ours)
    assert (log, end) == trained(theirs) and len(set(log)) > 2


@pytest.mark.parametrize(("scale", "matters"), [(1.0, False), (1024.0, True)])
def test_float16_gradients_that_vanish_without_a_scale(scale, matters):
    """The gradient of the activation is 2e-8, below half of float16's smallest number; that of
    the weight is 4e-5.
    """
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), DynamicLossScaler(scale)
    loss = (weight * 2000.0).float().sum() * 2e-8
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    wanted = torch.full((4,), 4e-5 if matters else 0.0, dtype=torch.float16)
    assert torch.allclose(weight.grad, wanted, rtol=0.02, atol=0)


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="gradients of another dtype need torch 2.10"
)
def test_float32_gradients_of_float16_parameters_do_not_vanish_when_unscaled():
    def unscaled(grad_dtype):
        weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
        weight.grad_dtype = grad_dtype
        optimizer, scaler = torch.optim.SGD([weight], lr=1.0), DynamicLossScaler(1024.0)
        scaler.scale((weight * 1.0).float().sum() * 2e-8).backward()
        scaler.step(optimizer)
        return weight.grad

    assert unscaled(torch.float16).tolist() == [0.0] * 4
    assert torch.allclose(unscaled(torch.float32), torch.full((4,), 2e-8), rtol=0.01, atol=0)


# ---- the updater ----------------------------------------------------------------------------


def updater_of(net, optimizer, feeder, **options):
    """Return an updater, of scale 1024 unless said otherwise."""
    options = {"scaler": DynamicLossScaler(1024.0)} | options
    return DynamicLossScalingUpdater(optimizer, loss_of(net), feeder.__next__, **options)


def test_updater_equals_the_loop_by_hand():
    net = copy.deepcopy(NET)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    updater = updater_of(net, optimizer, batches(bad={2}), on_overflow="skip")
    for _ in range(6):
        updater.update()
    assert snapshot(net, optimizer) == run("sgd", {2}, 6)[0]


def test_update_returns_the_plain_mean_loss():
    net, feeder = copy.deepcopy(NET), batches()
    wanted = sum(loss_of(net)(next(feeder)).item() for _ in range(2)) / 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = updater_of(net, optimizer, batches(), accumulate=2).update()
    assert found == pytest.approx(wanted, rel=REDUCED)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_accumulated_batches_equal_one_big_batch(dtype):
    """Small integers and powers of two: every sum is exact, so the bits are equal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (16, 8), generator=generator).to(dtype)
    ends = []
    for accumulate in (1, 2, 4):
        weight = nn.Parameter(torch.ones(8, dtype=dtype))
        feeder = iter(x.split(16 // accumulate))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        DynamicLossScalingUpdater(
            optimizer, lambda b, w=weight: (b @ w).mean(), feeder.__next__, accumulate=accumulate
        ).update()
        ends.append(weight.detach().clone())
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])
    assert torch.equal(ends[0].double(), 1 - 0.5 * x.double().mean(0))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_decay_after_unscaling_is_that_of_sgd(name):
    """Decay added to the scaled gradient would be 1024 times too small."""
    ends = []
    for here, there in ((0.1, 0.0), (0.0, 0.1), (None, 0.0)):
        net = copy.deepcopy(NET)
        kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.Adam}
        optimizer = kinds[name](net.parameters(), lr=0.01, weight_decay=there, foreach=False)
        updater = updater_of(net, optimizer, batches(), weight_decay=here)
        for _ in range(4):
            updater.update()
        ends.append(raw(net.parameters()))
    assert ends[0] == ends[1] != ends[2]


def test_clip_sees_good_unscaled_gradients_before_the_decay():
    net, seen = copy.deepcopy(NET), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)

    def clip():
        seen.append([p.grad.clone() for p in net.parameters()])

    updater_of(net, optimizer, batches(bad={0}), clip=clip, weight_decay=0.5).update()
    net.zero_grad()
    plain = torch.autograd.grad(loss_of(net)(next(batches())), list(net.parameters()))
    assert len(seen) == 1 and raw(seen[0]) == raw(plain)


def test_decay_of_a_sparse_gradient_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    updater = DynamicLossScalingUpdater(
        optimizer, lambda b: table(b).sum(), lambda: torch.tensor([1, 1]), weight_decay=0.1
    )
    with pytest.raises(UnsupportedTensor, match="sparse"):
        updater.update()


def counted(feeder, drawn):
    """Yield what a feeder does, and append it to a list."""
    for one in feeder:
        drawn.append(one)
        yield one


def test_a_retry_draws_new_data_at_once():
    net, drawn = copy.deepcopy(NET), []
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    updater = updater_of(net, optimizer, counted(batches(bad={1, 2, 4}), drawn))
    log, scaler = [], updater.scaler
    for _ in range(3):
        loss = updater.update()
        log.append((len(drawn), scaler.get_scale(), math.isfinite(loss), scaler.last_step_skipped))
    assert log == [(1, 1024.0, True, False), (4, 256.0, True, False), (6, 128.0, True, False)]
    assert snapshot(net, optimizer) == run("sgd", set(), 3)[0]


def test_skip_returns_and_tells():
    net, feeder = copy.deepcopy(NET), batches(bad={1})
    updater = updater_of(net, torch.optim.SGD(net.parameters(), lr=0.1), feeder, on_overflow="skip")
    log = [(math.isfinite(updater.update()), updater.scaler.last_step_skipped) for _ in range(3)]
    assert log == [(True, False), (False, True), (True, False)]


@pytest.mark.parametrize(
    ("retries", "overflows", "fails"),
    [(100, 100, False), (100, 101, True), (0, 1, True), (0, 0, False)],
)
def test_a_hundred_retries_and_then_an_error(retries, overflows, fails):
    net, drawn = copy.deepcopy(NET), []
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    feeder, options = counted(batches(bad=set(range(overflows))), drawn), {"max_retries": retries}
    updater = updater_of(net, optimizer, feeder, scaler=DynamicLossScaler(), **options)
    before = snapshot(net, optimizer)
    if fails:
        with pytest.raises(GradcompError, match=f"{overflows} times in a row, the loss scale is"):
            updater.update()
        assert snapshot(net, optimizer) == before and len(drawn) == overflows
    updater.update()  # goes on with what comes next
    assert snapshot(net, optimizer) != before
    assert updater.scaler.get_scale() == max(2.0**-24, 8 / 2.0**overflows)


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0, None], ids=repr)
def test_a_loss_is_one_element(loss):
    updater = DynamicLossScalingUpdater(with_gradients(None), lambda _: loss, dict)
    with pytest.raises(ValueError, match="one element"):
        updater.update()


def test_the_end_of_the_data_comes_out_as_itself():
    net = copy.deepcopy(NET)
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    updater = updater_of(net, optimizer, itertools.islice(batches(), 3), accumulate=2)
    updater.update()
    before = snapshot(net, optimizer)
    with pytest.raises(StopIteration):
        updater.update()
    assert snapshot(net, optimizer) == before


def test_a_resumed_training_is_the_uninterrupted_one():
    def begin(feeder):
        net = copy.deepcopy(NET)
        optimizer, scaler = OPTIMIZERS["adamw"](net.parameters()), DynamicLossScaler(1024.0, 2.0, 2)
        return net, optimizer, updater_of(net, optimizer, feeder, scaler=scaler)

    net, optimizer, updater = begin(batches(bad={1, 5}))
    whole = [updater.update() for _ in range(8)]
    feeder = batches(bad={1, 5})
    net_a, optimizer_a, first = begin(feeder)
    parts = [first.update() for _ in range(4)]
    net_b, optimizer_b, second = begin(feeder)
    net_b.load_state_dict(net_a.state_dict())
    optimizer_b.load_state_dict(optimizer_a.state_dict())
    second.scaler.load_state_dict(first.scaler.state_dict())
    parts += [second.update() for _ in range(4)]
    assert parts == whole and second.scaler.state_dict() == updater.scaler.state_dict()
    assert snapshot(net_b, optimizer_b) == snapshot(net, optimizer)


# ---- several ranks --------------------------------------------------------------------------


def averaged(comm, codec, exchange, dtype, bad, steps):
    """Train with a GradientAverager; `bad` batches are rank 1's. Return the bits and whether
    skipped steps changed none.
    """
    net = copy.deepcopy(NET).to(dtype)
    optimizer, scaler = OPTIMIZERS["sgd"](net.parameters()), DynamicLossScaler(1024.0)
    options = {"min_numel": 0, "exchange": exchange, "grad_scaler": scaler, "timeout_s": 30}
    averager = GradientAverager(net.named_parameters(), codec, comm, **options)
    feeder = batches(comm.rank, bad, dtype) if comm.rank else without_poison(bad, dtype)
    options = {"scaler": scaler, "compression": averager, "on_overflow": "skip"}
    updater = updater_of(net, optimizer, feeder, **options)
    unchanged, log = [], []
    for _ in range(steps):
        before = snapshot(net, optimizer, averager)
        updater.update()
        log.append((scaler.last_step_skipped, scaler.get_scale()))
        if scaler.last_step_skipped:
            unchanged.append(snapshot(net, optimizer, averager) == before)
    averager.check_replicas()
    kept = {k: averager.state_dict()[k] for k in ("residual", "owner_residual")}
    return log, unchanged, raw(net.parameters()), kept


AVERAGED = [
    (TernGrad(), "reduce_scatter"),
    (TernGrad(scale="own"), "all_gather"),
    (OneBit(), "all_gather"),
    (OneBit(), "reduce_scatter"),
    (Identity(), "auto"),
]


def without_poison(bad, dtype):
    """Yield rank 0's batches: good ones, also where the other rank's is not."""
    good, other = batches(0, (), dtype), (torch.ones(8, 16).to(dtype), torch.zeros(8).long())
    for number in itertools.count():
        yield other if number in bad else next(good)


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("codec", "exchange"), AVERAGED, ids=repr)
def test_an_overflow_on_one_rank_is_everyones(codec, exchange, dtype, bad):
    results = run_local(2, averaged, codec, exchange, dtype, bad, 8)
    expected = [(n in bad, 1024.0 / 2 ** sum(b <= n for b in bad)) for n in range(8)]
    for log, unchanged, _, _ in results:
        assert log == expected and unchanged == [True] * len(bad)
    # float16 rounds tiny values; ternary draws by step
    if dtype != torch.float16 and not isinstance(codec, TernGrad):
        clean = run_local(2, averaged, codec, exchange, dtype, set(), 8 - len(bad))
        for mine, theirs in zip(results, clean, strict=True):
            assert mine[2] == theirs[2]
            factor = 2.0 ** len(bad)
            for key, residuals in mine[3].items():
                for name, residual in residuals.items():
                    assert torch.equal(residual * factor, theirs[3][key][name])
    if isinstance(codec, OneBit):
        kept = results[0][3]
        assert all(r.any() for r in kept["residual"].values())
        assert any(r.any() for r in kept["owner_residual"].values()) == (
            exchange == "reduce_scatter"
        )


def unscaled_too_far(comm):
    """Finite averages whose unscaling overflows: the exchange has committed residuals by then."""
    weight = nn.Parameter(torch.zeros(64))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), DynamicLossScaler(2.0**-10)
    options = {"min_numel": 0, "grad_scaler": scaler}
    averager = GradientAverager([("weight", weight)], "onebit", comm, **options)
    pushes = iter([1.0, 1e36, 1.0])
    ramp = torch.linspace(1.0, 2.0, 64)

    def loss(batch):
        return (weight * ramp * batch * 1024).sum()

    options = {"scaler": scaler, "compression": averager, "on_overflow": "skip"}
    updater = DynamicLossScalingUpdater(optimizer, loss, pushes.__next__, **options)
    updater.update()
    net = nn.ParameterList([weight])
    before = snapshot(net, optimizer, averager)
    updater.update()
    same = snapshot(net, optimizer, averager) == before
    skipped = scaler.last_step_skipped
    updater.update()
    return skipped, same, averager.stats.nonfinite_buckets, scaler.last_step_skipped


def test_residuals_of_a_step_that_overflows_in_unscaling_are_given_back():
    assert run_local(2, unscaled_too_far) == [(True, True, 0, False)] * 2


def parallel(comm, bad):
    """Each rank has parameters of its own: only the scaler's communicator tells of the others."""
    scaler = DynamicLossScaler(comm=comm, timeout_s=30)
    log = []
    for step in range(4):
        optimizer = with_gradients(torch.full((3,), NAN if (comm.rank, step) in bad else 1.0))
        if comm.rank == 2 and step == 3:
            optimizer = with_gradients(None)  # a rank without gradients has a say all the same
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        log.append((scaler.last_step_skipped, scaler.get_scale()))
    return log


@pytest.mark.parametrize("bad", [{(0, 0)}, {(2, 1)}, {(1, 0), (2, 0), (1, 3)}, set()], ids=repr)
def test_one_verdict_over_a_communicator(over, bad):
    steps = {step for _, step in bad}
    expected = [(n in steps, 8.0 / 2 ** sum(s <= n for s in steps)) for n in range(4)]
    assert over(3, parallel, bad) == [expected] * 3


def disagree(comm, what):
    options = {"scale": 4.0} if what == "loss_scale" and comm.rank == 1 else {}
    scaler = DynamicLossScaler(comm=comm, timeout_s=30, **options)
    if what == "loss_scale_counter" and comm.rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "counter": 1})
    optimizer = with_gradients(torch.full((3,), 8.0))
    scaler.scale(torch.ones(()))
    if what == "call" and comm.rank == 1:
        with pytest.raises(PeerMismatch, match="call: rank 1 has most"):
            gather(comm, bytes(24), "most", 30, called="most()")
        return None
    try:
        scaler.unscale_(optimizer)
    except PeerMismatch as error:
        scaler.step(optimizer)  # whoever goes on all the same does not step
        return error.field, error.rank, scaler.last_step_skipped
    return "agreed"


@pytest.mark.parametrize("what", ["loss_scale", "loss_scale_counter", "call"])
def test_ranks_that_differ_are_told(what):
    expected = (what, 1, True)
    assert run_local(2, disagree, what) == [expected, None if what == "call" else expected]


def test_a_silent_rank_is_peer_lost():
    comm = LocalCommunicator.group(2)[0]
    scaler = DynamicLossScaler(comm=comm, timeout_s=0.2)
    optimizer = with_gradients(torch.full((3,), 8.0))
    scaler.scale(torch.ones(()))
    with pytest.raises(PeerLost) as caught:
        scaler.unscale_(optimizer)
    assert caught.value.phase == "verdict" and 0.1 < caught.value.waited_s < 5
    assert scaler.step(optimizer) is None and scaler.last_step_skipped


# ---- DistributedDataParallel ----------------------------------------------------------------

SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "nnabla": lambda: DynamicLossScaler(1024.0),
    "torch rule": lambda: DynamicLossScaler(1024.0, rule="torch"),
}


def by_hand(scaler_name, codec, bad, dtype):
    """The usual loop under DDP; rank 1 overflows at the steps in `bad`."""
    net = DDP(small_net(dtype))
    optimizer, scaler = OPTIMIZERS["sgd"](net.parameters()), SCALERS[scaler_name]()
    state = gradcomp.ddp.register(net, codec, min_numel=0, grad_scaler=scaler)
    feeder = batches(1, bad, dtype) if dist.get_rank() else without_poison(bad, dtype)
    log, unchanged = [], []
    for step in range(7):
        before = snapshot(net, optimizer, state)
        optimizer.zero_grad()
        scaler.scale(loss_of(net)(next(feeder))).backward()
        scaler.step(optimizer)
        scaler.update()
        log.append(scaler.get_scale())
        now = snapshot(net, optimizer, state)
        same = [a == b for a, b in zip(now, before, strict=True)]
        unchanged.append((same[0], same[1], codec == "terngrad" or same[2]))
    state.check_replicas()
    state.close()
    return log, unchanged, raw(net.parameters())


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("codec", ["terngrad", "onebit"])
@pytest.mark.parametrize("scaler", SCALERS)
def test_overflows_under_ddp_leave_everything_alone(gloo, scaler, codec, bad):
    for log, unchanged, _ in gloo(2, by_hand, scaler, codec, bad, torch.float32):
        assert log == [1024.0 / 2 ** sum(b <= n for b in bad) for n in range(7)]
        kept = codec == "terngrad"
        assert unchanged == [(True,) * 3 if n in bad else (False, False, kept) for n in range(7)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_under_ddp(gloo, dtype):
    for log, unchanged, _ in gloo(2, by_hand, "nnabla", "onebit", {0, 3}, dtype):
        assert log == [512.0] * 3 + [256.0] * 4
        assert unchanged == [(True,) * 3 if n in (0, 3) else (False,) * 3 for n in range(7)]


def accumulated(codec, accumulate):
    """The updater under DDP, one overflow in the first of the accumulated batches."""
    net = DDP(small_net())
    optimizer, scaler = OPTIMIZERS["sgd"](net.parameters()), DynamicLossScaler(1024.0)
    state = gradcomp.ddp.register(net, codec, min_numel=0, grad_scaler=scaler)
    options = {"scaler": scaler, "accumulate": accumulate, "compression": state}
    try:
        updater_of(net, optimizer, batches(), **options)
        refused = False
    except ValueError as error:
        refused = "no_sync" in str(error)
    bad = {accumulate} if dist.get_rank() else set()
    feeder = batches(1, bad) if bad else without_poison({accumulate}, torch.float32)
    updater = updater_of(net, optimizer, feeder, model=net, **options)
    scale = []
    for _ in range(3):
        updater.update()
        scale.append(scaler.get_scale())
    state.check_replicas()
    exchanged = state.stats.steps
    state.close()
    return refused, scale, exchanged


@pytest.mark.parametrize("accumulate", [1, 3])
def test_updater_under_ddp_exchanges_once_an_attempt(gloo, accumulate):
    for refused, scale, exchanged in gloo(2, accumulated, "onebit", accumulate):
        assert scale == [1024.0, 512.0, 512.0] and exchanged == 4 and refused == (accumulate > 1)


def verdicts_over_gloo():
    comm = TorchCommunicator(timeout_s=30)
    try:
        return disagree(comm, "loss_scale")
    finally:
        comm.close()


def test_scales_that_differ_over_gloo(gloo):
    assert gloo(2, verdicts_over_gloo) == [("loss_scale", 1, True)] * 2


@pytest.mark.slow
def test_amp_is_loaded_when_it_is_first_used():
    script = "import sys, gradcomp; print('gradcomp.amp' in sys.modules); "
    script += "print(gradcomp.amp.DynamicLossScaler().get_scale())"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "8.0"]
