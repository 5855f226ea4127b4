"""Dynamic loss scaling: growth rules, verdicts, and steps that leave everything as it was."""

import copy
import itertools
import json
import math
import time

import pytest
import torch
import torch.distributed as dist
from _ranks import each_rank, run_local
from _saved import bits_of, parts_of
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
from gradcomp.comm import LocalCommunicator
from gradcomp.exchange.agree import gather

INF, NAN = math.inf, math.nan
HALVES = [torch.float32, torch.bfloat16, torch.float16]
TORCH = torch.amp.GradScaler("cpu")
WIDE = {"min_scale": 2.0**-126, "max_scale": 2.0**126}


def stepped(scaler, optimizer):
    """Scale a loss and step; return whether the step was skipped."""
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    return scaler.last_step_skipped


def with_gradients(*grads):
    """Return an optimizer whose parameters have these gradients."""
    likes = [torch.zeros(1) if g is None else torch.zeros(g.shape, dtype=g.dtype) for g in grads]
    parameters = [nn.Parameter(like) for like in likes]
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return torch.optim.SGD(parameters, lr=0.0)


def gradient(optimizer, number=0):
    return optimizer.param_groups[0]["params"][number].grad


def scales(scaler, bad):
    """Return the scale after every step of a sequence of verdicts."""
    found = []
    for overflow in bad:
        optimizer = with_gradients(torch.tensor(INF if overflow else 1.0))
        assert stepped(scaler, optimizer) == overflow
        scaler.update()
        found.append(scaler.get_scale())
    return found


def snapshot(model, optimizer, state):
    """Return every bit of parameters, optimizer state and residuals, these in units of the plain
    gradient.
    """
    kept = [list(model.parameters()), optimizer.state_dict()["state"]]
    if state is not None:
        saved = state.state_dict()
        planes = [parts_of(saved)[name] for name in ("residual", "owner_residual")]
        # before the first encoding there are none, which is zero
        residuals = [tensor for plane in planes for tensor in plane.values() if tensor.any()]
        kept.append([residual / saved["loss_scale"] for residual in residuals])
    return bits_of(kept)


# ---- how the scale moves --------------------------------------------------------------------


def nnabla(bad, scale, factor, interval):
    """The proposal's pseudo code."""
    counter, found = 0, []
    for overflow in bad:
        if not overflow and counter > interval:
            scale, counter = scale * factor, 0
        counter = 0 if overflow else counter + 1
        found.append(scale := scale / factor if overflow else scale)
    return found


def torchs(bad, scale, factor, interval):
    """What torch.amp.GradScaler.update calls."""
    now, tracker, found = torch.full((), scale), torch.zeros((), dtype=torch.int32), []
    for overflow in bad:
        flag = torch.full((), float(overflow))
        torch._amp_update_scale_(now, tracker, flag, factor, 1.0 / factor, interval)
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
    assert [found.index(scale) + 1 for scale in (16.0, 32.0, 64.0)] == growths
    assert found[0] == 8.0 and found[-1] == 64.0


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


def drawn(numel=1001):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).tolist()


CASES = [  # the scale, gradients by the largest value of their dtype, and whether they overflow
    ("inf", 8.0, lambda top: [[1.0, INF]], True),
    ("-inf", 8.0, lambda top: [[-INF, 1.0]], True),
    ("nan", 8.0, lambda top: [[1.0, NAN]], True),
    ("in the last of several", 8.0, lambda top: [[1.0] * 40, [2.0], [0.0] * 33 + [NAN]], True),
    ("zero", 8.0, lambda top: [[0.0, -0.0]], False),
    ("none", 8.0, lambda top: [None, None], False),
    ("nothing but an empty one", 8.0, lambda top: [[]], False),
    ("an empty one and inf", 8.0, lambda top: [[], [INF]], True),
    ("a scalar", 8.0, lambda top: [NAN], True),
    ("a finite scalar", 8.0, lambda top: [1.0], False),
    ("finite, and a norm would not be", 8.0, lambda top: [[top] * 1000, [-top] * 3], False),
    # a scale below 1 makes gradients larger; torch's GradScaler lets the Inf through
    ("as large", 1.0, lambda top: [[1.0, top]], False),
    ("too large when unscaled", 0.5, lambda top: [[1.0, top]], True),
    ("much too large when unscaled", 0.25, lambda top: [[1.0, top]], True),
    *(("random", scale, lambda top: [drawn()], False) for scale in (8.0, 3.0, 1.0, 0.125, 1e-3)),
]


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=str)
@pytest.mark.parametrize(("scale", "make", "overflow"), [c[1:] for c in CASES], ids=range(19))
def test_verdict_and_unscaled_values(scale, make, overflow, dtype):
    """Each value is multiplied once, by float32(1 / scale), and rounded once."""
    values = make(torch.finfo(dtype).max)
    grads = [None if v is None else torch.tensor(v, dtype=torch.float64).to(dtype) for v in values]
    optimizer, scaler = with_gradients(*grads), DynamicLossScaler(scale)
    inverse = torch.tensor(1 / scale, dtype=torch.float32).double()
    wanted = [None if g is None else (g.double() * inverse).to(dtype) for g in grads]
    assert stepped(scaler, optimizer) == overflow
    for number, grad in enumerate(wanted if not overflow else []):
        found = gradient(optimizer, number)
        assert found is grad is None or torch.equal(found, grad)


def counted(*shape):
    return torch.arange(1.0, 1.0 + math.prod(shape)).reshape(shape)


def sparse(*values):
    return torch.sparse_coo_tensor([[2] * len(values)], values, (4,), check_invariants=True)


LAYOUTS = {  # gradients, and their unscaled values; None: an overflow
    "transposed": (lambda: counted(4, 6).t(), counted(4, 6).t() / 8),
    "channels last": (lambda: last(counted(2, 3, 2, 2)), counted(2, 3, 2, 2) / 8),
    "a single element, expanded": (lambda: torch.tensor(8.0).expand(1, 1), torch.ones(1, 1)),
    "strided": (lambda: counted(24)[::2], counted(24)[::2] / 8),
    "transposed, bad": (lambda: torch.full((4, 6), INF).t(), None),
    "strided, bad": (lambda: torch.tensor([1.0, 2.0, NAN])[::2], None),
    "duplicates": (lambda: sparse(1.0, 2.0), torch.tensor([0.0, 0.0, 3.0 / 8, 0.0])),
    "duplicates, bad": (lambda: sparse(1.0, NAN), None),
    "duplicates whose sum overflows": (lambda: sparse(3e38, 3e38), None),
    "duplicates that cancel out": (lambda: sparse(3e38, -3e38), torch.zeros(4)),
}


def last(values):
    return values.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(("make", "wanted"), LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_of_other_layouts(make, wanted):
    optimizer = with_gradients(make())
    assert stepped(DynamicLossScaler(), optimizer) == (wanted is None)
    assert wanted is None or torch.equal(gradient(optimizer).to_dense(), wanted)


# ---- order of calls -------------------------------------------------------------------------


def ready():
    scaler = DynamicLossScaler()
    scaler.scale(torch.ones(()))
    return scaler, with_gradients(torch.full((3,), 8.0))


ORDERS = [  # calls after `scale`; the last one raises this
    ("unscale_ unscale_", "once is enough"),
    ("unscale_ step step", r"scaler.update\(\)"),
    ("step unscale_", r"scaler.update\(\)"),
    ("step update step", r"scale\(loss\)\.backward"),
    ("step update unscale_", r"scale\(loss\)\.backward"),
    ("unscale_ load step", "no loss was scaled"),
    ("update", "verdict"),
    ("overflowed", "verdict"),
]


@pytest.mark.parametrize(("calls", "text"), ORDERS)
def test_unscaled_once_and_stepped_once(calls, text):
    scaler, optimizer = ready()
    made = {
        "update": scaler.update,
        "load": lambda: scaler.load_state_dict(DynamicLossScaler().state_dict()),
    }
    *before, last = (made.get(c, lambda c=c: getattr(scaler, c)(optimizer)) for c in calls.split())
    for call in before:
        call()
    kept = gradient(optimizer).tolist()
    assert kept == [1.0 if before else 8.0] * 3
    with pytest.raises(RuntimeError, match=text):
        last()
    assert gradient(optimizer).tolist() == kept
    assert scaler.state_dict()["counter"] == ("update" in calls.split()[:-1])


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("grad", "kind", "text"),
    [
        (torch.tensor(NAN).as_strided((1, 5), (0, 0)), GradcompError, "materialize_gradients"),
        (torch.tensor(NAN).as_strided((1, 5), (5, 0)), GradcompError, "materialize_gradients"),
        (torch.eye(2).to_sparse_csr(), UnsupportedTensor, "sparse_csr"),
    ],
)
def test_packed_and_compressed_sparse_gradients_are_refused_before_any_is_unscaled(
    grad, kind, text
):
    scaler, optimizer = ready()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros_like(grad))]})
    parameter = optimizer.param_groups[1]["params"][0]
    parameter.grad = grad
    with pytest.raises(kind, match=text):
        scaler.step(optimizer)
    assert gradient(optimizer).tolist() == [8.0] * 3 and not scaler.last_step_skipped
    parameter.grad = None
    scaler.step(optimizer)
    assert gradient(optimizer).tolist() == [1.0] * 3


def test_two_optimizers_one_overflows():
    """The other one steps, and returns what it returns; the scale falls once."""
    scaler, good = ready()
    bad = with_gradients(torch.full((3,), NAN))
    scaler.step(bad)
    assert scaler.last_step_skipped
    good.step = lambda: "stepped"
    assert scaler.step(good) == "stepped"
    assert not scaler.last_step_skipped and gradient(good).tolist() == [1.0] * 3
    scaler.update()
    assert scaler.get_scale() == 4.0


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
BEYOND = [{"min_scale": 9.0}, {"max_scale": 7.0}]  # the first scale


WRONG_UPDATER = {
    "optimizer": (None, 3),
    "loss_fn": (None, 3),
    "data_feeder": (iter([1]),),
    "scaler": (TORCH,),
    "accumulate": (0, -1, 2.0, True, None),
    "weight_decay": (-0.1, NAN, INF, True, "0.1"),
    "clip": (1.0,),
    "on_overflow": ("ignore", None, 3),
    "max_retries": (-1, 1.5, True, None),
    "model": (nn.Linear(1, 1),),
    "compression": (3,),
}


ARGUMENTS = {"optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))]), "loss_fn": torch.sum}
ARGUMENTS["data_feeder"] = dict
REFUSED = [
    *((DynamicLossScaler, {name: value}, name, value) for name, value in wrong(WRONG)),
    *((DynamicLossScaler, bound, "scale", 8.0) for bound in BEYOND),
    *(
        (DynamicLossScalingUpdater, {**ARGUMENTS, name: value}, name, value)
        for name, value in wrong(WRONG_UPDATER)
    ),
]


@pytest.mark.parametrize(("kind", "options", "name", "value"), REFUSED)
def test_wrong_arguments_name_the_value(kind, options, name, value):
    DynamicLossScalingUpdater(**ARGUMENTS)
    with pytest.raises(ValueError, match=f"{name} must be .*, got ") as caught:
        kind(**options)
    assert str(caught.value).endswith((repr(value), f"got {type(value).__name__}"))


def test_compression_must_follow_this_scaler():
    net, scaler = nn.Linear(4, 4), DynamicLossScaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for other in (None, DynamicLossScaler(), TORCH):
        comm = LocalCommunicator.group(1)[0]
        averager = GradientAverager(net.named_parameters(), "onebit", comm=comm, grad_scaler=other)
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
    first, begun = (DynamicLossScaler(0.3, 3.0, 2, rule=rule, **WIDE) for _ in range(2))
    whole, before = scales(first, bad), scales(begun, bad[:split])
    resumed = DynamicLossScaler()
    resumed.load_state_dict(json.loads(json.dumps(begun.state_dict())))
    assert before + scales(resumed, bad[split:]) == whole
    assert resumed.state_dict() == first.state_dict()


GOOD = DynamicLossScaler().state_dict()
NONSENSE = {
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
STATES = [
    *(({**GOOD, k: v}, "scale" if "scale" in k else k) for k, v in wrong(NONSENSE)),
    ({**GOOD, "rule": "torch", "counter": 2000}, "counter"),
    *(({k: v for k, v in GOOD.items() if k != key}, key) for key in GOOD),
    *((state, "state") for state in (None, 3, [("scale", 8.0)], TORCH.state_dict())),
]


@pytest.mark.parametrize(("state", "text"), STATES, ids=range(len(STATES)))
def test_states_that_make_no_sense_change_nothing(state, text):
    scaler = DynamicLossScaler()
    scales(scaler, [False, False, True, False])
    before = scaler.state_dict()
    DynamicLossScaler().load_state_dict(before)
    with pytest.raises(ValueError, match=text):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


# ---- training -------------------------------------------------------------------------------


def small_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).to(dtype)


NET = small_net()  # threads share torch's global generator
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    # on its own it loses step 0
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
WHEN = {"at step 0": {0}, "in the middle": {3}, "repeatedly": {0, 2, 3, 4, 6}}


def batches(rank=0, bad=(), dtype=torch.float32, other=False):
    """Yield training batches for ever. Those numbered in `bad` hold Inf, or, with `other`, finite
    values where another rank's hold Inf. Good ones are the same whatever is in `bad`.
    """
    drawn = itertools.count()
    for number in itertools.count():
        if number in bad and other:
            yield torch.ones(8, 16).to(dtype), torch.zeros(8).long()
            continue
        seed = 0 if number in bad else next(drawn)
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        x = torch.randn(8, 16, generator=generator)
        if number in bad:
            x[0, 0] = INF
        yield x.to(dtype), torch.randint(8, (8,), generator=generator)


def loss_of(net):
    return lambda batch: nn.functional.cross_entropy(net(batch[0]).float(), batch[1])


class Training:
    """A small net that an updater trains; scale 1024, on_overflow "skip" unless said otherwise.

    Attributes:
        drawn: the batches that the updater has drawn.
    """

    def __init__(self, optimizer="sgd", bad=(), *, net=None, feeder=None, scaler=None, **options):
        self.net = copy.deepcopy(NET) if net is None else net
        self.optimizer = OPTIMIZERS.get(optimizer, optimizer)(self.net.parameters())
        self.scaler = DynamicLossScaler(1024.0) if scaler is None else scaler
        self.feeder, self.drawn = batches(bad=bad) if feeder is None else feeder, []
        self.updater = DynamicLossScalingUpdater(
            self.optimizer,
            loss_of(self.net),
            self.draw,
            **{"scaler": self.scaler, "on_overflow": "skip"} | options,
        )

    def draw(self):
        self.drawn.append(next(self.feeder))
        return self.drawn[-1]

    def step(self, scaler=None, clip=lambda: None):
        """Make a step by hand."""
        scaler = scaler or self.scaler
        self.optimizer.zero_grad()
        scaler.scale(loss_of(self.net)(self.draw())).backward()
        scaler.unscale_(self.optimizer)
        clip()
        scaler.step(self.optimizer)
        scaler.update()

    def bits(self, state=None):
        return snapshot(self.net, self.optimizer, state)


def trained(optimizer, steps):
    """Return the bits of a run without bad batches."""
    run = Training(optimizer)
    for _ in range(steps):
        run.step()
    return run.bits()


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_nothing(name, bad):
    """The run is, bit for bit, the one without the bad batches; so is the updater's."""
    run, updated, called = Training(name, bad), Training(name, bad), []
    run.optimizer.register_step_pre_hook(lambda *_: called.append(1))
    for number in range(8):
        before = run.bits()
        run.step()
        loss = updated.updater.update()
        skipped = {t.scaler.last_step_skipped for t in (run, updated)}
        assert skipped == {number in bad} == {not math.isfinite(loss)}
        assert number not in bad or run.bits() == before
    assert len(called) == 8 - len(bad) and run.scaler.get_scale() == 1024.0 / 2 ** len(bad)
    assert run.bits() == updated.bits() == trained(name, 8 - len(bad))


@pytest.mark.parametrize("bad", WHEN.values(), ids=WHEN)
def test_torch_rule_is_torchs_grad_scaler_bit_for_bit(bad):
    def log_of(scaler):
        run, log = Training("adamw", bad), []
        for _ in range(9):
            run.step(scaler, lambda: nn.utils.clip_grad_norm_(run.net.parameters(), 0.5))
            log.append(scaler.get_scale())
        return log, run.bits()

    options = {"growth_factor": 3.0, "backoff_factor": 1 / 3, "growth_interval": 2}
    ours = log_of(DynamicLossScaler(300.0, 3.0, 2, rule="torch"))
    assert ours == log_of(torch.amp.GradScaler("cpu", 300.0, **options)) and len(set(ours[0])) > 2


KEPT = pytest.param(
    *(1024.0, torch.float32, 2e-8),
    marks=pytest.mark.skipif(
        not hasattr(torch.Tensor, "grad_dtype"), reason="gradients of another dtype: torch 2.10"
    ),
)


@pytest.mark.parametrize(
    ("scale", "dtype", "wanted"), [(1.0, None, 0.0), (1024.0, None, 4e-5 / 2000), KEPT]
)
def test_float16_gradients_that_vanish_without_a_scale(scale, dtype, wanted):
    """The gradient of the activation is 2e-8, below half of float16's smallest number; that of
    the weight is 4e-5. Unscaled, 2e-8 vanishes again, but in float32.
    """
    weight, factor = nn.Parameter(torch.ones(4, dtype=torch.float16)), 2000.0 if not dtype else 1.0
    if dtype is not None:
        weight.grad_dtype = dtype
    optimizer, scaler = torch.optim.SGD([weight], lr=0.0), DynamicLossScaler(scale)
    scaler.scale((weight * factor).float().sum() * 2e-8).backward()
    scaler.step(optimizer)
    assert torch.allclose(weight.grad.float(), torch.full((4,), wanted * factor), rtol=0.02, atol=0)


# ---- the updater ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_accumulated_batches_equal_one_big_batch(dtype):
    """Small integers and powers of two: every sum is exact, so the bits are equal."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (16, 8), generator=generator).to(dtype)
    for accumulate in (1, 2, 4):
        weight = nn.Parameter(torch.ones(8, dtype=dtype))
        feeder = iter(x.split(16 // accumulate))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        loss = DynamicLossScalingUpdater(
            optimizer, lambda b, w=weight: (b @ w).mean(), feeder.__next__, accumulate=accumulate
        ).update()
        assert loss == x.double().sum(1).mean().item()
        assert torch.equal(weight.detach().double(), 1 - 0.5 * x.double().mean(0))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_decay_after_unscaling_is_that_of_sgd(kind):
    """Decay added to the scaled gradient would be 1024 times too small."""
    ends = []
    for here, there in ((0.1, 0.0), (0.0, 0.1), (None, 0.0)):
        options = {"lr": 0.01, "weight_decay": there, "foreach": False}
        run = Training(lambda p, o=options: kind(p, **o), weight_decay=here)
        for _ in range(4):
            run.updater.update()
        ends.append(bits_of(list(run.net.parameters())))
    assert ends[0] == ends[1] != ends[2]


def test_decay_of_a_sparse_gradient_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    updater = DynamicLossScalingUpdater(
        optimizer, lambda b: table(b).sum(), lambda: torch.tensor([1, 1]), weight_decay=0.1
    )
    with pytest.raises(UnsupportedTensor, match="sparse"):
        updater.update()


def test_clip_sees_good_unscaled_gradients_before_the_decay():
    seen = []
    net = copy.deepcopy(NET)
    options = {"weight_decay": 0.5, "on_overflow": "retry", "net": net}
    options["clip"] = lambda: seen.append(bits_of([p.grad for p in net.parameters()]))
    Training(lambda p: torch.optim.SGD(p, lr=0.0), {0}, **options).updater.update()
    net.zero_grad()
    plain = list(torch.autograd.grad(loss_of(net)(next(batches())), list(net.parameters())))
    assert seen == [bits_of(plain)]


def test_a_retry_draws_new_data_at_once():
    run, log = Training(bad={1, 2, 4}, on_overflow="retry"), []
    for _ in range(3):
        loss = run.updater.update()
        log.append((len(run.drawn), run.scaler.get_scale(), math.isfinite(loss)))
    assert log == [(1, 1024.0, True), (4, 256.0, True), (6, 128.0, True)]
    assert run.bits() == trained("sgd", 3)


@pytest.mark.parametrize(
    ("retries", "overflows", "fails"),
    [(100, 100, False), (100, 101, True), (0, 1, True), (0, 0, False)],
)
def test_a_hundred_retries_and_then_an_error(retries, overflows, fails):
    options = {"scaler": DynamicLossScaler(), "max_retries": retries, "on_overflow": "retry"}
    run = Training(bad=set(range(overflows)), **options)
    before = run.bits()
    if fails:
        with pytest.raises(GradcompError, match=f"{overflows} times in a row, the loss scale is"):
            run.updater.update()
        assert run.bits() == before and len(run.drawn) == overflows
    run.updater.update()  # goes on with what comes next
    assert run.bits() != before
    assert run.scaler.get_scale() == max(2.0**-24, 8 / 2.0**overflows)


@pytest.mark.parametrize("loss", [torch.ones(2), 1.0, None], ids=repr)
def test_a_loss_is_one_element(loss):
    updater = DynamicLossScalingUpdater(with_gradients(None), lambda _: loss, dict)
    with pytest.raises(ValueError, match="one element"):
        updater.update()


def test_the_end_of_the_data_comes_out_as_itself():
    run = Training(feeder=itertools.islice(batches(), 3), accumulate=2)
    run.updater.update()
    before = run.bits()
    with pytest.raises(StopIteration):
        run.updater.update()
    assert run.bits() == before


# ---- several ranks --------------------------------------------------------------------------


def averaged(comm, codec, exchange, dtype, bad, steps):
    """Train with a GradientAverager; `bad` batches are rank 1's. Return the bits and whether
    skipped steps changed none.
    """
    net, scaler = copy.deepcopy(NET).to(dtype), DynamicLossScaler(1024.0)
    options = {"min_numel": 0, "exchange": exchange, "grad_scaler": scaler, "timeout_s": 30}
    averager = GradientAverager(net.named_parameters(), codec, comm=comm, **options)
    feeder = batches(comm.rank, bad, dtype, other=not comm.rank)
    run = Training(net=net, feeder=feeder, scaler=scaler, compression=averager)
    unchanged, log = [], []
    for _ in range(steps):
        before = run.bits(averager)
        run.updater.update()
        log.append((scaler.last_step_skipped, scaler.get_scale()))
        unchanged += [run.bits(averager) == before] if scaler.last_step_skipped else []
    averager.check_replicas()
    kept = parts_of(averager.state_dict())
    return log, unchanged, bits_of(list(net.parameters())), kept


AVERAGED = [
    (TernGrad(), "reduce_scatter"),
    (TernGrad(scale="own"), "all_gather"),
    (OneBit(), "all_gather"),
    (OneBit(), "reduce_scatter"),
    (Identity(), "auto"),
]


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
            for key, residuals in mine[3].items():
                for name, residual in residuals.items():
                    assert torch.equal(residual * 2.0 ** len(bad), theirs[3][key][name])
    if isinstance(codec, OneBit):
        own, owner = (results[0][3][k].values() for k in ("residual", "owner_residual"))
        assert all(r.any() for r in own)
        assert any(r.any() for r in owner) == (exchange == "reduce_scatter")


@each_rank(2, "local")
def test_residuals_of_a_step_that_overflows_in_unscaling_are_given_back(comm):
    """Finite averages whose unscaling overflows: the exchange has committed residuals by then."""
    net, scaler = nn.ParameterList([torch.zeros(64)]), DynamicLossScaler(2.0**-10)
    options = {"min_numel": 0, "grad_scaler": scaler}
    averager = GradientAverager(net.named_parameters(), "onebit", comm=comm, **options)
    optimizer, pushes = torch.optim.SGD(net.parameters(), lr=0.1), iter([1.0, 1e36, 1.0])

    def loss(batch):
        return (net[0] * torch.linspace(1.0, 2.0, 64) * batch * 1024).sum()

    options = {"scaler": scaler, "compression": averager, "on_overflow": "skip"}
    updater = DynamicLossScalingUpdater(optimizer, loss, pushes.__next__, **options)
    updater.update()
    before = snapshot(net, optimizer, averager)
    updater.update()
    assert scaler.last_step_skipped and averager.stats.nonfinite_buckets == 0
    assert snapshot(net, optimizer, averager) == before
    updater.update()
    assert not scaler.last_step_skipped


@pytest.mark.parametrize("bad", [{(0, 0)}, {(2, 1)}, {(1, 0), (2, 0), (1, 3)}, set()], ids=repr)
@each_rank(3, "over")
def test_one_verdict_over_a_communicator(comm, bad):
    """Each rank has parameters of its own: only the scaler's communicator tells of the others."""
    scaler, steps = DynamicLossScaler(comm=comm, timeout_s=30), {step for _, step in bad}
    for step in range(4):
        optimizer = with_gradients(torch.full((3,), NAN if (comm.rank, step) in bad else 1.0))
        if comm.rank == 2 and step == 3:
            optimizer = with_gradients(None)  # a rank without gradients has a say all the same
        assert stepped(scaler, optimizer) == (step in steps)
        scaler.update()
        assert scaler.get_scale() == 8.0 / 2 ** sum(s <= step for s in steps)


def disagree(comm, what):
    """Rank 1 has another scale or counter, calls something else, or nothing."""
    options = {"scale": 4.0} if what == "loss_scale" and comm.rank == 1 else {}
    options["timeout_s"] = 0.2 if what == "silent" else 30
    scaler = DynamicLossScaler(comm=comm, **options)
    if what == "loss_scale_counter" and comm.rank == 1:
        scaler.load_state_dict({**scaler.state_dict(), "counter": 1})
    optimizer = with_gradients(torch.full((3,), 8.0))
    scaler.scale(torch.ones(()))
    if what == "call" and comm.rank == 1:
        with pytest.raises(PeerMismatch, match="call: rank 1 has most"):
            gather(comm, bytes(24), "most", 30, called="most()")
        return
    with pytest.raises(PeerLost if what == "silent" else PeerMismatch) as caught:
        scaler.unscale_(optimizer)
    error = caught.value
    assert error.phase == "verdict" if what == "silent" else (error.field, error.rank) == (what, 1)
    assert scaler.step(optimizer) is None  # whoever goes on all the same does not step
    assert scaler.last_step_skipped


@pytest.mark.parametrize("what", ["loss_scale", "loss_scale_counter", "call"])
def test_ranks_that_differ_are_told(over, what):
    over(2, disagree, what)


def test_a_silent_rank_is_peer_lost():
    comm, begun = LocalCommunicator.group(2)[0], time.monotonic()
    disagree(comm, "silent")
    assert 0.1 < time.monotonic() - begun < 5


# ---- DistributedDataParallel ----------------------------------------------------------------

SCALERS = {
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=1024.0),
    "nnabla": lambda: DynamicLossScaler(1024.0),
    "torch rule": lambda: DynamicLossScaler(1024.0, rule="torch"),
}


UNDER_DDP = [
    *((s, c, bad, torch.float32) for s in SCALERS for c in ("terngrad", "onebit") for bad in WHEN),
    *(("nnabla", "onebit", "repeatedly", dtype) for dtype in HALVES[1:]),
]


@pytest.mark.parametrize(("scaler", "codec", "when", "dtype"), UNDER_DDP)
@each_rank(2)
def test_overflows_under_ddp_leave_everything_alone(scaler, codec, when, dtype):
    """The usual loop; rank 1 overflows at some steps."""
    net, scaler, rank, bad = DDP(small_net(dtype)), SCALERS[scaler](), dist.get_rank(), WHEN[when]
    state = gradcomp.ddp.register(net, codec, min_numel=0, grad_scaler=scaler)
    run = Training(net=net, feeder=batches(rank, bad, dtype, other=not rank))
    for step in range(7):
        before = run.bits(state)
        run.step(scaler)
        assert scaler.get_scale() == 1024.0 / 2 ** sum(b <= step for b in bad)
        same = [a == b for a, b in zip(run.bits(state), before, strict=True)]
        # "terngrad" has no residuals
        assert same == ([True] * 3 if step in bad else [False, False, codec == "terngrad"])
    state.check_replicas()
    state.close()


@pytest.mark.parametrize("accumulate", [1, 3])
@each_rank(2)
def test_updater_under_ddp_exchanges_once_an_attempt(accumulate):
    """One overflow in the first of the accumulated batches."""
    net, scaler, rank = DDP(small_net()), DynamicLossScaler(1024.0), dist.get_rank()
    state = gradcomp.ddp.register(net, "onebit", min_numel=0, grad_scaler=scaler)
    options = {"scaler": scaler, "accumulate": accumulate, "compression": state, "net": net}
    options["feeder"] = batches(rank, {accumulate}, other=not rank)
    if accumulate > 1:
        with pytest.raises(ValueError, match="no_sync"):
            Training(**options)
    run = Training(model=net, on_overflow="retry", **options)
    for scale in (1024.0, 512.0, 512.0):
        run.updater.update()
        assert scaler.get_scale() == scale
    state.check_replicas()
    assert state.stats.steps == 4
    state.close()
