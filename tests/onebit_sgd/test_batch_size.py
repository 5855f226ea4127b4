"""The search for the minibatch size: every bit comes back, NaN never wins, every rank chooses
alike.
"""

import copy
import gc
import math
import random

import numpy as np
import pytest
import torch
from _ranks import each_rank
from _saved import bits_of, parts_of
from torch import nn

import gradcomp
from gradcomp import GradcompError, GradientAverager, OneBit, PeerLost, PeerMismatch
from gradcomp.onebit_sgd import BatchSizeChoice, BatchSizeTrial, DoubleBuffer, find_batch_size
from gradcomp.onebit_sgd.batch_size import candidates


def make_model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Dropout(0.2), nn.Linear(40, 3))
    net.register_buffer("scratch", torch.zeros(3), persistent=False)
    return net


MODEL = make_model()
DATA = torch.randn(4096, 12, generator=torch.Generator().manual_seed(1))
TARGETS = (DATA @ torch.randn(12, 3, generator=torch.Generator().manual_seed(2))).argmax(1)


def fresh_model():
    torch.set_num_threads(1)  # it counts for the calling thread: ranks may be threads
    return copy.deepcopy(MODEL)


def quiet_search(train, net, optimizer, **options):
    """Search without a line a trial, and leave learning rates alone unless told otherwise."""
    options = {"current": 64, "samples": 512, "per_sample_lr": False, "progress": False, **options}
    return find_batch_size(train, model=net, optimizer=optimizer, **options)


def test_a_rate_that_groups_share_as_a_tensor_is_scaled_once():
    found = {}
    for kind in (float, torch.tensor):
        net, tried = nn.Linear(4, 4), []
        groups = [{"params": [net.weight]}, {"params": [net.bias]}]
        optimizer = torch.optim.SGD(groups, lr=kind(0.01))

        def train(minibatch, samples, tried=tried, optimizer=optimizer):
            tried.append([round(float(group["lr"]), 6) for group in optimizer.param_groups])
            yield from [torch.tensor(1.0)] * (samples // minibatch)

        choice = quiet_search(train, net, optimizer, per_sample_lr=True)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        assert rates == pytest.approx([0.01 * choice.trial.lr_factor] * 2)
        found[kind] = tried
    assert found[float] == found[torch.tensor] and len({rate for rate, _ in found[float]}) > 1


def everything(net, optimizer, *others, generators=True):
    held = [dict(net.named_parameters()), dict(net.named_buffers())]
    held += [[m.training for m in net.modules()], [id(p) for p in net.parameters()]]
    held += [optimizer.state_dict(), *(o.state_dict() for o in others)]
    if generators:
        held += [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    return bits_of(held)


def messy(net, optimizer, average=lambda: None, share=1, rank=0):
    """Return a `train` that changes whatever there is to change."""

    def train(minibatch, samples):
        own = minibatch // share
        for start in range(0, samples - minibatch + 1, minibatch):  # as many steps on every rank
            first = start + rank * own
            net.zero_grad()
            inputs = DATA[first : first + own].to(net[0].weight.dtype)
            loss = nn.functional.cross_entropy(net(inputs).float(), TARGETS[first : first + own])
            loss.backward()
            average()
            optimizer.step()
            random.random(), np.random.rand()
            net.scratch.add_(1)
            yield loss
        net.scratch = net.scratch * 2  # a new tensor in the old one's place
        net.register_buffer("another", torch.ones(1))
        net.eval()

    return train


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
    # whose state torch's own load_state_dict would cast
    "fp32 state of bf16": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_is_rolled_back(name, stepped):
    net = fresh_model()
    optimizer = OPTIMIZERS[name](net.parameters())
    if name == "fp32 state of bf16":
        net.bfloat16()
    train = messy(net, optimizer)
    if stepped:
        for _ in train(512, 1024):
            pass
        net.train()
        net[2].eval()
    before = everything(net, optimizer)
    seen = []

    def watched(minibatch, samples):
        seen.append((minibatch, samples, everything(net, optimizer)[:4]))
        yield from train(minibatch, samples)
        assert everything(net, optimizer) != before

    choice = quiet_search(watched, net, optimizer, samples=1024, current=128)
    assert everything(net, optimizer) == before
    assert all(p.grad is None for p in net.parameters())
    assert [s[0] for s in seen] == [64, 128, 192, 256] and {s[1] for s in seen} == {1024}
    assert all(s[2] == before[:4] for s in seen)
    assert [t.steps for t in choice.trials] == [16, 8, 5, 4]
    assert [t.lr_factor for t in choice.trials] == [1.0] * 4


@pytest.mark.parametrize("kind", ["averager", "buffer"])
@each_rank(2, "over")
def test_residuals_are_rolled_back_and_all_ranks_choose_alike(comm, kind):
    """Search in the middle of a run with residuals."""
    net = fresh_model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    options = {"comm": comm, "min_numel": 0, "timeout_s": 30}
    if kind == "averager":
        state = GradientAverager(net.named_parameters(), OneBit(), **options)
        train = messy(net, optimizer, state.average, comm.world_size, comm.rank)
    else:
        state = DoubleBuffer(net, optimizer, OneBit(), **options)

        def train(minibatch, samples):
            own = minibatch // comm.world_size
            for start in range(0, samples - minibatch + 1, minibatch):
                first = start + comm.rank * own
                x, y = DATA[first : first + own], TARGETS[first : first + own]
                yield state.step(lambda x, y: nn.functional.cross_entropy(net(x), y), x, y)

    def everything_now():
        if kind == "buffer":
            state.drain()
        return everything(net, optimizer, state, generators=False)  # threads share generators

    list(train(128, 512))
    net.train()
    before = everything_now()
    assert any(v.abs().sum() > 0 for v in parts_of(state.state_dict())["residual"].values())
    options = {"state": [state], "comm": comm, "samples": 1024, "current": 128, "timeout_s": 30}
    choice = quiet_search(train, net, optimizer, **options)
    assert everything_now() == before
    list(train(choice.minibatch, 512))
    state.check_replicas()
    assert len({trial.criterion for trial in choice.trials}) == 4
    return choice


def goes_on(name, searched, wrapped=False, fused=False):
    """Train split weights, in DDP with 1-bit residuals or not, and return everything; with searches
    before the first step and in the middle, or without.
    """
    net = nn.Sequential(
        *(m for m in fresh_model() if not isinstance(m, (nn.BatchNorm1d, nn.Dropout)))
    )
    weights, model, own, state = gradcomp.optim.split_parameters(net), net, slice(None), []
    if wrapped:
        model = nn.parallel.DistributedDataParallel(net)
        own = slice(torch.distributed.get_rank(), None, torch.distributed.get_world_size())
    more = {"momentum": 0.9} if name == "SplitSGD" else {}
    optimizer = getattr(gradcomp.optim, name)(weights, lr=0.05, **more)
    if wrapped:
        options = {"optimizer": optimizer if fused else None, "min_numel": 0, "timeout_s": 30}
        state.append(gradcomp.ddp.register(model, OneBit(), **options))

    def train(minibatch, samples):
        for first in range(0, samples, minibatch):
            x, y = (t[first : first + minibatch][own] for t in (DATA, TARGETS))
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
            loss.backward()
            optimizer.step()
            yield loss

    for _ in range(2):
        if searched:
            quiet_search(train, model, optimizer, state=state, timeout_s=30)
        list(train(64, 256))
    held = everything(net, optimizer, *state, generators=False)
    for one in state:
        one.close()
    del held[3]  # which tensors they are
    return held


@pytest.mark.parametrize("name", ["SplitSGD", "SplitAdamW", "SplitAdagrad", "SplitLAMB"])
def test_a_run_of_split_weights_goes_on_as_if_nothing_had_been_tried(name):
    assert goes_on(name, True) == goes_on(name, False)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_a_ddp_run_goes_on_as_if_nothing_had_been_tried(gloo, fused):
    with_it, without = (gloo(2, goes_on, "SplitSGD", s, True, fused) for s in (True, False))
    assert with_it == without
    assert with_it[0][0] == with_it[1][0]


# ---- the choice ----------------------------------------------------------------------------------


def search(losses, comm=None, **options):
    """Search with given losses: {minibatch: losses of its steps}."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"samples": 10_000, "current": 256, "per_sample_lr": True, "comm": comm, **options}
    return quiet_search(lambda size, samples: losses[size], net, optimizer, **options), optimizer


SIZES = [128, 192, 256, 384, 512]


@pytest.mark.parametrize(
    ("criteria", "margin", "wanted"),
    [
        ([1.0, 1.0, 1.0, 1.0, 1.0], 0.01, 512),
        ([1.0, 1.0, 1.0, 1.009, 1.011], 0.01, 384),
        ([1.0, 1.1, 1.2, 1.0099, 1.5], 0.01, 384),
        ([1.0, 1.1, 1.2, 1.3, 1.5], 0.0, 128),
        ([1.2, 1.1, 1.0, 1.04, 1.06], 0.05, 384),
        ([1.0, 1.0, 1.0, 1.0, math.nan], 0.01, 384),
        ([math.nan, math.inf, 3.0, math.nan, -math.inf], 0.01, 256),
        ([-1.0, -1.0, -1.0, -0.995, -0.98], 0.01, 384),
        ([0.0, 0.0, 0.1, 0.2, 0.3], 0.01, 192),
    ],
)
def test_the_largest_within_the_margin_wins_and_nan_never(criteria, margin, wanted):
    """On one rank, without a process group."""
    losses = {s: [c, c] for s, c in zip(SIZES, criteria, strict=True)}
    choice, optimizer = search(losses, margin=margin)
    assert choice.minibatch == choice.trial.minibatch == wanted
    assert [t.minibatch for t in choice.trials] == SIZES
    assert [t.lr_factor for t in choice.trials] == [0.5, 0.75, 1.0, 1.5, 2.0]
    assert optimizer.param_groups[0]["lr"] == 0.1 * wanted / 256
    lines = str(choice).splitlines()
    assert len(lines) == 7 and f"minibatch {wanted}: the largest" in lines[-1]
    assert [int(line.split()[1]) for line in lines if line.startswith("*")] == [wanted]


@each_rank(2, "local")
def test_criteria_are_means_of_steps_then_of_ranks_and_nan_on_one_rank_is_nan_on_all(comm):
    losses = {s: [1.0, 2.0, 6.0] if comm.rank == 0 else [torch.tensor(5.0)] for s in SIZES}
    losses[192] = [2.0, math.nan if comm.rank == 1 else 2.0]
    choice, _ = search({size: iter(some) for size, some in losses.items()}, comm)
    assert [t.steps for t in choice.trials] == [3, 2, 3, 3, 3] and choice.minibatch == 512
    assert repr([t.criterion for t in choice.trials]) == "[4.0, nan, 4.0, 4.0, 4.0]"


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        ((256, 1, None, None, 64, 2**0.5, 2.0), SIZES),
        ((256, 3, None, None, 64, 2**0.5, 2.0), [192, 384]),
        ((256, 1, 200, 300, 64, 2**0.5, 2.0), [256]),
        ((64, 1, None, None, 64, 2**0.5, 2.0), [64, 128]),
        ((1024, 2, None, None, 64, 2.0, 4.0), [256, 512, 1024, 2048, 4096]),
        ((100, 1, None, None, 64, 2**0.5, 1.5), [100, 128]),
        ((96, 5, None, None, 1, 2**0.5, 2.0), [50, 70, 95, 135, 190]),
    ],
)
def test_candidates(arguments, sizes):
    assert candidates(*arguments) == sizes


def test_learning_rates_per_sample_stay():
    """Groups' rates during trials, and after: times minibatch / current."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": [net.weight], "lr": 0.3}, {"params": [net.bias], "lr": torch.tensor(0.5)}],
        lr=1.0,
    )
    held, seen = optimizer.param_groups[1]["lr"], {}

    def train(minibatch, samples):
        seen[minibatch] = [float(g["lr"]) for g in optimizer.param_groups]
        optimizer.param_groups[0]["lr"] = 77.0  # a schedule inside the trial
        return [float(minibatch > 384)] * 2

    for per_sample, factor in ((False, 1.0), (True, 1.5)):
        choice = quiet_search(
            train, net, optimizer, samples=10_000, current=256, per_sample_lr=per_sample
        )
        assert choice.minibatch == 384
        for size, rates in seen.items():
            scale = size / 256 if per_sample else 1.0
            assert rates == [0.3 * scale, 0.5 * scale]
        assert [float(g["lr"]) for g in optimizer.param_groups] == [0.3 * factor, 0.5 * factor]
        assert optimizer.param_groups[1]["lr"] is held


# ---- errors --------------------------------------------------------------------------------------


def test_an_exception_in_a_trial_rolls_back_and_is_raised():
    net = fresh_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    before, ended = everything(net, optimizer), []

    def train(minibatch, samples):
        try:
            for number, loss in enumerate(messy(net, optimizer)(minibatch, samples)):
                if minibatch == 192 and number == 3:
                    raise ZeroDivisionError("of the user's")
                yield loss
        finally:
            net.scratch.fill_(5)
            ended.append(minibatch)

    with pytest.raises(ZeroDivisionError, match="of the user's"):
        quiet_search(train, net, optimizer, samples=1024, current=128)
    assert everything(net, optimizer) == before
    assert ended == [64, 128, 192]

    def wordy(minibatch, samples):
        try:
            for _ in messy(net, optimizer)(minibatch, samples):
                yield "a lot"
        finally:
            net.scratch.fill_(7)

    with pytest.raises(ValueError, match="a lot"):
        quiet_search(wordy, net, optimizer, samples=1024, current=128)
    gc.collect()  # a generator that is only forgotten cleans up now
    assert everything(net, optimizer) == before


@each_rank(2, "local")
def test_a_rank_whose_train_raises_is_peer_lost_on_the_others(comm):
    if comm.rank == 0:
        with pytest.raises(KeyError):
            search({}, comm, timeout_s=20)
        comm.abort()
    else:
        with pytest.raises(PeerLost, match="batch_size"):
            search({s: [1.0] for s in SIZES}, comm, timeout_s=20)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 1023}, r"samples=1023 .* 512, take 1024"),
        ({"samples": 0}, "samples .* 0"),
        ({"samples": 1e4}, "samples .* 10000.0"),
        ({"current": -3}, "current .* -3"),
        ({"multiple": True}, "multiple .* True"),
        ({"smallest": 0}, "smallest .* 0"),
        ({"largest": 2.5}, r"largest .* 2\.5"),
        ({"smallest": 600}, "between 600 and 512"),
        ({"step": 1.0}, r"step .* at least 1\.01 and at most 1000, got 1\.0"),
        ({"step": float("nan")}, "step .* nan"),
        ({"factor": 0.5}, r"factor .* 0\.5"),
        ({"margin": -0.1}, r"margin .* -0\.1"),
        ({"margin": "1 %"}, "margin .* '1 %'"),
    ],
)
@each_rank(2, "local")
def test_wrong_arguments_are_the_same_error_on_every_rank(comm, options, text):
    with pytest.raises(ValueError, match=text):
        search({}, comm, **options)


@each_rank(3, "local")
def test_ranks_that_ask_for_different_things_all_hear_of_it(comm):
    with pytest.raises(PeerMismatch) as caught:
        search({}, comm, margin=0.01 if comm.rank < 2 else "1 %")
    error = caught.value
    found = error.field, error.rank, error.expected, error.got
    assert found == ("margin", 2, "0.01", "'1 %'")


@pytest.mark.parametrize(
    ("error", "text", "bad"),
    [
        (GradcompError, "every trial had a loss of NaN or Inf", math.inf),
        (ValueError, r"train\(192, ...\) yielded no loss on rank 1", None),
    ],
)
@each_rank(3, "local")
def test_what_is_wrong_with_losses_of_one_rank_is_an_error_on_all(comm, error, text, bad):
    mine = [1.0] if comm.rank != 1 else [bad] if bad else []
    with pytest.raises(error, match=text):
        search(dict.fromkeys(SIZES, mine), comm)


# ---- what is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_a_line_for_each_trial_on_stderr(capsys, progress):
    losses = {s: [s / 1000] * 4 for s in SIZES}
    search(losses, progress=progress)
    out, err = capsys.readouterr()
    assert [line.split(" in ")[0] for line in err.splitlines()] == [
        f"minibatch {s}: criterion {s / 1000:g}, 4 steps" for s in SIZES if progress
    ]
    assert not out


def test_the_table_in_plain_text():
    trials = (BatchSizeTrial(64, 2.0, 0.5, 10, 1.25), BatchSizeTrial(128, math.nan, 1.0, 5, 0.5))
    assert str(BatchSizeChoice(64, trials, 0.01)).splitlines() == [
        "   minibatch   criterion    of best  lr factor     steps    seconds",
        "*         64           2    +0.00 %      0.500        10        1.2",
        "         128         nan          -      1.000         5        0.5",
        "minibatch 64: the largest within 1 % of the best",
    ]
