"""Local steps: DiLoCo and LocalSGD by their formulas, the same bits everywhere, commits on all
ranks or on none, resumes anywhere.
"""

import contextlib
import copy
import gc
import time
import warnings
from unittest import mock

import pytest
import torch
from _models import bits, loss_of, minibatch, sgd, train
from _ranks import each_rank, mismatch, one_rank, run_local
from _saved import LEFT_OUT, bits_of, parts_of, paths_of, with_value
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from gradcomp import (
    Advanced,
    DiLoCo,
    GradcompError,
    GradientAverager,
    LocalSGD,
    NotFinite,
    PeerLost,
    PeerMismatch,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.engine import watch
from gradcomp.local.fragment import cut
from gradcomp.local.inner import Turns
from gradcomp.onebit_sgd import AggregateAdagrad
from gradcomp.optim import SplitSGD

pytestmark = pytest.mark.usefixtures("one_thread")

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 5))
SIZES = {"features": 40, "classes": 5}


def fresh():
    torch.set_num_threads(1)  # it counts for the calling thread: ranks may be threads
    return copy.deepcopy(MODEL)


def inner_step(model, optimizer, step, rank):
    train(model, optimizer, rank, [step], **SIZES)


def take_steps(model, optimizer, local, steps, rank):
    for step in steps:
        inner_step(model, optimizer, step, rank)
        local.step()


def made(comm, codec="onebit", kind=DiLoCo, **options):
    """Return a model, its inner optimizer and their local steps."""
    model = fresh()
    optimizer = sgd(model)
    options = {"min_numel": 0, **options}
    return model, optimizer, kind(model, optimizer, codec, comm=comm, **options)


def alone(codec="terngrad", **options):
    return made(one_rank(), codec, **options)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def anchors_of(local):
    return [anchor.detach().clone() for f in local._fragments for _, anchor in f.anchors]


def first_fragment(local):
    return local.state_dict()["extra"]["fragments"][0]


def exact(state):
    """Return a nested state with the bytes of its tensors instead of them."""
    return tree_map(lambda value: repr(bits_of(value)), state)


def close_to(found, wanted):
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def trained(comm, codec, steps, kind=DiLoCo, **options):
    """Return this rank's weights after `steps` steps, and what all ranks agree on."""
    model, optimizer, local = made(comm, codec, kind=kind, **options)
    take_steps(model, optimizer, local, range(steps), comm.rank)
    anchors, stats = anchors_of(local), local.stats
    local.close()
    return weights(model), anchors, (stats.bytes_sent, stats.baseline_bytes)


def simulate(world, steps, h, *, fragments=1, delay=0, alpha=0.5, outer=None):
    """DiLoCo written out, averages in full precision."""
    models = [fresh() for _ in range(world)]
    optimizers = [sgd(model) for model in models]
    parts = cut([p.numel() for p in MODEL.parameters()], fragments)
    anchors = [nn.Parameter(w) for w in weights(MODEL)]
    make = outer or (lambda ps: torch.optim.SGD(ps, lr=0.7, momentum=0.9, nesterov=True))
    outers = [make(anchors[part.start : part.stop]) for part in parts]
    turns, due = Turns(h, fragments), []

    def apply(k, means):
        for at, average in zip(parts[k], means, strict=True):
            anchors[at].grad = average
        outers[k].step()
        with torch.no_grad():
            for at in parts[k]:
                for model in models:
                    p = list(model.parameters())[at]
                    p.copy_(alpha * p + (1 - alpha) * anchors[at] if delay else anchors[at])

    for step in range(steps):
        for rank, model in enumerate(models):
            inner_step(model, optimizers[rank], step, rank)
        while due and due[0][0] == step:
            apply(*due.pop(0)[1:])
        for k in turns.take():
            changes = [
                [anchors[at].detach() - list(m.parameters())[at].detach() for at in parts[k]]
                for m in models
            ]
            means = [torch.stack(each).sum(0) / world for each in zip(*changes, strict=True)]
            due.append((step + delay, k, means))
            if not delay:
                apply(*due.pop(0)[1:])
    return [weights(m) for m in models], [a.detach() for a in anchors]


# ---- what is computed ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("h", "fragments", "delay"), [(4, 1, 0), (4, 3, 0), (1, 1, 0), (5, 2, 3), (6, 1, 2), (4, 4, 3)]
)
def test_diloco_is_its_formula(world, h, fragments, delay):
    wanted, anchors = simulate(world, 17, h, fragments=fragments, delay=delay, alpha=0.25)
    options = {"fragments": fragments, "fragment_sync_delay": delay}
    options |= {"sync_every": h, "fragment_update_alpha": 0.25}
    found = run_local(world, lambda comm: trained(comm, "identity", 17, **options))
    for rank in range(world):
        close_to(found[rank][0], wanted[rank])
        close_to(found[rank][1], anchors)
        assert bits(found[rank][1]) == bits(found[0][1])


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("nesterov", [True, False])
def test_momentum_at_the_owners_is_the_same_formula(world, nesterov):
    def outer(ps):
        return torch.optim.SGD(ps, lr=0.5, momentum=0.75, nesterov=nesterov)

    _, anchors = simulate(world, 13, 4, fragments=2, outer=outer)
    options = {"sync_every": 4, "fragments": 2, "outer_optimizer": outer, "shard_outer": True}
    for _, found, _ in run_local(world, lambda comm: trained(comm, "identity", 13, **options)):
        close_to(found, anchors)


def test_every_rank_keeps_its_share_of_the_outer_state():
    def rank(comm):
        _, _, local = made(comm, "block4", sync_every=1, shard_outer=True)
        local.step()
        state = first_fragment(local)
        local.close()
        buffers = [v.get("momentum_buffer") for v in state["outer"]["state"].values()]
        assert buffers == [None] * len(buffers)
        kept = parts_of(state["averager"])["transform_state"]
        return sum(t.numel() for t in kept.values())

    shares = run_local(3, rank)
    assert sum(shares) == sum(p.numel() for p in MODEL.parameters())
    assert max(shares) < 0.5 * sum(shares)


def test_local_sgd_is_the_mean():
    found = run_local(3, lambda comm: trained(comm, "identity", 4, LocalSGD, sync_every=4))
    wanted, _ = simulate(3, 4, 4, outer=lambda ps: torch.optim.SGD(ps, lr=1.0))
    assert all(bits(one[0]) == bits(found[0][0]) for one in found)
    close_to(found[0][0], wanted[0])


@pytest.mark.parametrize(("fragments", "shard_outer"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("codec", ["terngrad", "onebit"])
@each_rank(3, "over")
def test_after_a_sync_all_ranks_have_the_same_bits(comm, codec, fragments, shard_outer):
    options = {"fragments": fragments, "shard_outer": shard_outer}
    found, anchors, (sent, plain) = trained(comm, codec, 12, sync_every=4, **options)
    assert 0 < sent < plain
    return bits(anchors), fragments > 1 or bits(found)


def test_two_savings_multiply():
    """Against an fp32 ring every step: 30 local steps of 2 bits 470 times fewer bytes, of 1 bit
    900 times.
    """

    def rank(comm, codec):
        model = nn.Linear(1024, 1024, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(model, optimizer, codec, comm=comm, sync_every=30) as local:
            model.weight.grad = torch.randn(1024, 1024)
            for _ in range(60):
                optimizer.step()
            assert (local.inner_steps, local.syncs) == (60, 2)
            stats = local.stats
            return 30 * stats.baseline_bytes / (stats.bytes_sent + stats.setup_bytes)

    for world, codec, least in (
        (2, "terngrad", 470),
        (2, "onebit", 895),
        (4, TernGrad(second_phase="block2"), 470),
    ):
        assert min(run_local(world, rank, codec)) >= least


def test_start_averages_gradients_every_step():
    """Until `warmup_steps` ranks hold the same bits after every step, as under DDP; then they
    part.
    """

    def rank(comm):
        model, optimizer, local = made(comm, "terngrad", sync_every=5, warmup_steps=4)
        seen = []
        for step in range(9):
            # in every second step; otherwise the optimizer's step does it
            average = local.average_gradients if step % 2 else lambda: None
            train(model, optimizer, comm.rank, [step], average, **SIZES)
            local.step()
            seen.append(weights(model))
        local.close()
        return seen

    one, two = run_local(2, rank)
    same = [bits(a) == bits(b) for a, b in zip(one, two, strict=True)]
    assert same == [True] * 4 + [False] * 4 + [True]
    plain = fresh()
    optimizer = sgd(plain)
    for step in range(4):
        optimizer.zero_grad()
        for r in range(2):
            (loss_of(plain, step, r, **SIZES) / 2).backward()
        optimizer.step()
    close_to(one[3], weights(plain))


def test_split_weights_keep_their_lower_halves():
    """The mean is of fp32 weights, and it is what the optimizer goes on from."""

    def rank(comm):
        model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, 64 * 64).view(64, 64))
        optimizer = SplitSGD(model.parameters(), lr=1e-4)
        local = LocalSGD(model, optimizer, "identity", comm=comm, sync_every=3)
        for step in range(3):
            model.weight.grad = torch.full((64, 64), float(comm.rank + step), dtype=torch.bfloat16)
            optimizer.step()
            before = optimizer.fp32(model.weight)
            local.step()
        after = optimizer.fp32(model.weight)
        local.close()
        return before, after

    (a, after), (b, other) = run_local(2, rank)
    assert torch.equal(after, other) and not torch.equal(a, b)
    assert (after - (a + b) / 2).abs().max() < 1e-7 < (a - b).abs().min()


def test_rounding_to_bf16_is_no_change():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {"sync_every": 1, "outer_optimizer": lambda ps: torch.optim.SGD(ps, lr=0.3)}
    local = DiLoCo(model, optimizer, "identity", comm=one_rank(), **options)
    with torch.no_grad():
        model.weight.sub_(2**-7)
    local.step()
    (anchor,) = anchors_of(local)
    assert anchor.item() == pytest.approx(1 - 0.3 * 2**-7)
    for _ in range(5):
        local.step()
    assert anchors_of(local) == [anchor]
    local.close()


# ---- turns ---------------------------------------------------------------------------------------


def test_turns_lie_apart_and_a_schedule_changes_their_length():
    turns = Turns(lambda number: (3, 6)[min(number, 1)], 3)
    assert [turns.take() for _ in range(9)] == [[0], [1], [2], [], [0], [], [1], [], [2]]
    assert (turns.round, turns.done) == (2, 0)
    with pytest.raises(ValueError, match="2 in round 0: 3 fragments"):
        Turns(2, 3)
    late = Turns(lambda number: 3 if number < 1 else 0, 1)
    with pytest.raises(ValueError, match="for round 1"):
        [late.take() for _ in range(4)]


@pytest.mark.parametrize(
    "sizes", [[5], [1, 1, 1, 1], [100, 1, 1], [1, 1, 100], [3, 3, 3, 3, 3, 3], [0, 0, 7]]
)
def test_fragments_are_all_of_the_tensors_in_order(sizes):
    for count in range(1, len(sizes) + 1):
        parts = cut(sizes, count)
        assert [i for part in parts for i in part] == list(range(len(sizes))) and all(parts)
    assert [len(p) for p in cut([3] * 6, 3)] == [2, 2, 2]
    with pytest.raises(ValueError, match="9 fragments of"):
        cut(sizes, 9)


# ---- checkpoints ---------------------------------------------------------------------------------


def part_of(comm, codec, options, first, steps, saved):
    """Train from `saved` (of all ranks) or the beginning; return states and weights."""
    model, optimizer, local = made(comm, codec, **options)
    if saved is not None:
        for one, state in zip((model, optimizer, local), saved[comm.rank], strict=True):
            one.load_state_dict(state)
    take_steps(model, optimizer, local, range(first, steps), comm.rank)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), local.state_dict()))
    local.close()
    return state, bits(model)


FRAGMENTS = {"fragments": 2, "fragment_sync_delay": 3, "fragment_update_alpha": 0.3}


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("ternary", {"sync_every": 6, **FRAGMENTS}),
        ("terngrad", {"sync_every": 6, **FRAGMENTS}),
        ("onebit", {"sync_every": 4, "warmup_steps": 6}),
        ("block2", {"sync_every": 5, "shard_outer": True}),
        # the delay is longer than later rounds: own states were refused
        ("onebit", {"sync_every": lambda n: 2 if n else 8, "fragment_sync_delay": 5}),
        # keeps other moments of a matrix than of a bias: own states were refused
        ("ternary", {"sync_every": 5, "outer_optimizer": torch.optim.Adafactor}),
    ],
)
def test_a_run_goes_on_bit_for_bit_wherever_it_was(codec, options):
    """Every codec with one fragment is in test_conformance.py."""
    whole = run_local(2, part_of, codec, options, 0, 17, None)
    for middle in (2, 7, 12, 13):
        saved = [one[0] for one in run_local(2, part_of, codec, options, 0, middle, None)]
        again = run_local(2, part_of, codec, options, middle, 17, saved)
        assert [one[1] for one in again] == [one[1] for one in whole], middle


@pytest.mark.parametrize("options", [{"sync_every": 5}, {"sync_every": 5, "shard_outer": True}])
def test_other_numbers_of_ranks_go_on_from_the_anchors(options):
    saved = [one[0][2] for one in run_local(3, part_of, "onebit", options, 0, 12, None)]

    def go_on(comm):
        model, optimizer, local = made(comm, "onebit", **options)
        local.load_state_dict(saved)
        assert bits(model) == bits(saved[0]["extra"]["fragments"][0]["anchors"].values())
        take_steps(model, optimizer, local, range(12, 20), comm.rank)
        local.close()
        assert local.syncs == 4
        return bits(model)

    one, two = run_local(2, go_on)
    assert one == two


def changed(state, what):
    """Return a state of which something that every rank must hold alike is another run's."""
    state = copy.deepcopy(state)
    fragments = state["extra"]["fragments"]
    of_this = [one for one in fragments if what.split()[-1] in one["anchors"]]
    fragment = (of_this or fragments)[0]
    if what == "parameter 2.bias":
        fragment["anchors"]["2.bias"][5] += 1e-3
    elif what == "outer momentum_buffer of 0.bias":
        fragment["outer"]["state"][1]["momentum_buffer"][2] *= 2
    elif what == "options of outer group 0":
        fragment["outer"]["param_groups"][0]["lr"] = 0.71
    elif what == "syncs":
        fragment["syncs"] += 1
    elif what == "second moment of 0.weight":
        parts_of(fragment["averager"])["second_moment"]["0.weight"][7] *= 2
    elif what == "guard":
        fragment["averager"]["extra"]["guard"]["level"] = 1
    elif what == "progress":
        state["extra"]["round"] += 1
    elif what.startswith("average"):
        fragment["averages"]["4.bias"] *= 2
    return state


@pytest.mark.parametrize(
    ("what", "live", "options"),
    [
        ("parameter 2.bias", True, {"sync_every": 5}),
        ("parameter 2.bias", False, {"sync_every": 6, "fragments": 2, "fragment_sync_delay": 3}),
        ("outer momentum_buffer of 0.bias", True, {"sync_every": 5}),
        ("options of outer group 0", False, {"sync_every": 5}),
        ("syncs", True, {"sync_every": 5}),
        ("progress", True, {"sync_every": 5}),
        ("second moment of 0.weight", True, {"sync_every": 5, "precondition": True}),
        ("guard", True, {"sync_every": 5, "advanced": Advanced(guard=True)}),
        ("average of 4.bias", True, {"sync_every": 6, **FRAGMENTS, "fragments": 1}),
        # before the fourth sync: after the first, second, fourth all ranks compare anyway
        ("loaded", True, {"sync_every": 4}),
    ],
)
@each_rank(2, "over")
def test_what_one_rank_loads_wrongly_is_a_mismatch(comm, what, live, options):
    """Anchors and outer state are the same on all ranks: without a word, every sync after this
    one drove them apart. Rank 1 loads what is another run's; then all load the right state.
    """
    saved = part_of(comm.duplicate(), "block4", options, 0, 14, None)[0]
    wanted = part_of(comm.duplicate(), "block4", options, 0, 22, None)[1]
    model, optimizer, local = made(comm.duplicate(), "block4", **options)
    take_steps(model, optimizer, local, range(14 if live else 0), comm.rank)
    net, inner, state = saved

    def go_on():
        model.load_state_dict(net)
        optimizer.load_state_dict(copy.deepcopy(inner))
        take_steps(model, optimizer, local, range(14, 22), comm.rank)

    if what != "loaded" or comm.rank:
        local.load_state_dict(changed(state, what) if comm.rank else state)
    # averages move the anchors before anything is exchanged again
    later = "parameter 4.bias" if what.startswith("average") else what
    for check, field in ((local.check_replicas, what), (go_on, later)):
        if (check, what) == (local.check_replicas, "loaded"):
            check()
            continue
        with pytest.raises(PeerMismatch, match="rank 0 has .*rank 1 has") as caught:
            check()
        assert (caught.value.field, caught.value.rank) == (field, 1)
    local.reset()
    local.load_state_dict(state)
    go_on()
    local.close()
    assert bits(model) == wanted


class Shrinking(torch.optim.SGD):
    """An outer optimizer whose option stands in no repr, nor in its groups."""

    def __init__(self, params, factor, hidden=False):
        super().__init__(params, lr=0.7)
        if not hidden:
            self._factor = factor
        self.change = lambda grad: grad.mul_(factor if hidden else self._factor)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.change(p.grad)
        super().step(closure)


@pytest.mark.parametrize(
    ("hidden", "field"), [(False, "outer_optimizer"), (True, "parameter 0.weight")]
)
@each_rank(2, "local")
def test_an_option_of_the_outer_optimizer_that_no_repr_shows_is_a_mismatch(comm, hidden, field):
    """Ranks with other factors went on silently with other anchors."""

    def outer(ps):
        return Shrinking(ps, 1 - 0.1 * comm.rank, hidden)

    with pytest.raises(PeerMismatch) as caught:
        model, optimizer, local = made(comm, "block4", sync_every=2, outer_optimizer=outer)
        take_steps(model, optimizer, local, range(6), comm.rank)
    assert caught.value.field == field
    assert ("'_factor': 0.9" in str(caught.value.got)) != hidden


@pytest.mark.parametrize(
    ("when", "field", "found"),
    [
        (1, "options of outer group 0", 1),
        (4, "options of outer group 0", 4),
        (5, "parameter 0.weight", 8),
    ],
)
@each_rank(2, "local")
def test_an_outer_rate_that_one_rank_changes_later_is_a_mismatch(comm, when, field, found):
    """State that is the same on all ranks was compared before the second sync, and never again:
    now after 1, 2, 4, 8 ... syncs.
    """
    model, optimizer, local = made(comm, "block4", sync_every=1)
    with pytest.raises(PeerMismatch) as caught:
        for step in range(9):
            inner_step(model, optimizer, step, comm.rank)
            if step == when and comm.rank:
                local._fragments[0].optimizer.param_groups[0]["lr"] = 0.5
            local.step()
    assert (caught.value.field, step) == (field, found)


def trained_alone(kind=DiLoCo, **options):
    """Return local steps of one rank after 8 inner steps, by default while the averages of the
    second sync are under way.
    """
    options = {"sync_every": 4, "fragment_sync_delay": 2, **options}
    model, optimizer, local = alone("onebit", kind=kind, **options)
    take_steps(model, optimizer, local, range(8), 0)
    return local


def test_what_others_have_put_into_outer_groups_is_no_part_of_a_state():
    """A scheduler's initial_lr in a state stayed, and from then on states without it were
    refused.
    """
    local = trained_alone()
    state = local.state_dict()
    before, foreign = exact(state), copy.deepcopy(state)
    foreign["extra"]["fragments"][0]["outer"]["param_groups"][0]["initial_lr"] = 0.7
    local.load_state_dict(foreign)
    local.load_state_dict(state)
    assert exact(local.state_dict()) == before
    local.close()


NAN = float("nan")


def poisoned(tensor):
    tensor.view(-1)[-1] = NAN
    return tensor


EXTRA = ("extra",)
FIRST = ("extra", "fragments", 0)
ANCHORS, AVERAGES = (*FIRST, "anchors"), (*FIRST, "averages")
BIAS = (*ANCHORS, "2.bias")
OUTER = (*FIRST, "outer")
GROUP, OF_0 = (*OUTER, "param_groups", 0), (*OUTER, "state", 0)
MOMENTUM = (*OF_0, "momentum_buffer")
RANK = (*FIRST, "averager", "ranks", "0")
WRONG_RESIDUAL = {"tensors": 1, "residual": {"0.bias": torch.ones(64)}}
ONE_TWICE = [[0, 9], [0, 10]]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("step",), "6", "step '6'"),
        (("step",), True, "step True"),
        (("step",), 2**70, "step 1180591620717411303424"),
        ((*EXTRA, "done"), 99, r"done 99, less than sync_every \(4\)"),
        ((*EXTRA, "round"), -3, "round -3"),
        ((*EXTRA, "sync_every"), 5, "sync_every 5 in round 2, this has 4"),
        ((*EXTRA, "under_way"), [[7, 9]], r"under_way \[\[7, 9\]\]"),
        ((*EXTRA, "under_way"), [[0, 8]], "inner step after 8"),
        ((*EXTRA, "under_way"), [[0, 99]], "at most 12"),
        ((*EXTRA, "under_way"), ONE_TWICE, r"averages of fragments \[0\]: each of them once"),
        ((*EXTRA, "under_way"), [[0, "9"]], "'9'"),
        ((*EXTRA, "under_way"), LEFT_OUT, "no 'under_way'"),
        ((*EXTRA, "under_way"), [], r"under_way \[\], but averages of fragments \[0\]"),
        (("format",), 1, "format 1, 2 expected"),
        (("origin", "kind"), "LocalSGD", "kind 'LocalSGD'"),
        (("origin", "warmup_steps"), 3, "warmup_steps 3"),
        ((*EXTRA, "fragments"), [], "0 fragments"),
        ((*EXTRA, "gradients"), {}, "gradients"),
        (FIRST, "x", "a fragment of this state is a dictionary, got 'x'"),
        ((*FIRST, "syncs"), 1.5, "syncs 1.5"),
        (ANCHORS, {}, "anchors do not fit this model .*: missing key '0.bias'"),
        (ANCHORS, [1], r"anchors by name is a dictionary, got \[1\]"),
        (BIAS, LEFT_OUT, "missing key '2.bias'"),
        (BIAS, poisoned, "anchor of '2.bias' has values that are not finite"),
        (BIAS, torch.ones(50, dtype=torch.int64), r"\(50,\) torch.int64"),
        (BIAS, torch.ones(50, dtype=torch.float64), "torch.float64"),
        (BIAS, torch.ones(5, 10), r"\(5, 10\)"),
        (BIAS, 3.0, "must be .50,. torch.float32, got 3.0"),
        (BIAS, torch.ones(50, device="meta"), "torch.float32 on meta"),
        (BIAS, torch.ones(50).to_sparse(), "got tensor.indices"),
        (AVERAGES, {}, r"averages of fragments \[\]: each"),
        ((*AVERAGES, "0.bias"), LEFT_OUT, "missing key '0.bias'"),
        ((*OUTER, "state"), LEFT_OUT, "no 'state'"),
        ((*OUTER, "param_groups"), [], r"groups of \[\] parameters, this has \[6\]"),
        ((*GROUP, "params"), [0, 1, 2, 3, 4], r"groups of \[5\] parameters"),
        ((*GROUP, "params"), [0, 1, 2, 3, 4, 9], r"params \[0, 1, 2, 3, 4, 9\]"),
        ((*GROUP, "lr"), "0.7", "lr '0.7'"),
        ((*GROUP, "lr"), NAN, "lr nan"),
        ((*GROUP, "momentum"), LEFT_OUT, "no 'momentum'"),
        ((*GROUP, "nesterov"), "yes", "nesterov 'yes', expected True"),
        (OF_0, LEFT_OUT, "has no '"),
        ((*OUTER, "state"), lambda old: old | {77: {}}, "of parameter 77"),
        (MOMENTUM, poisoned, "momentum_buffer of parameter 0 holds NaN"),
        (MOMENTUM, lambda old: old.double().fill_(1e39), "Inf in float32"),
        (MOMENTUM, lambda old: old.to_sparse(), "sparse_coo"),
        (MOMENTUM, torch.ones(3), r"shape \(3,\)"),
        ((*FIRST, "averager", "step"), "2", "step '2'"),
        (RANK, WRONG_RESIDUAL, "(missing|unexpected) key"),
        ((*RANK, "tensors"), 3, "has 0 tensors of 3"),
    ],
)
def test_values_that_no_state_has_are_refused_before_anything_is_written(path, value, said):
    """Half of them were taken (and `state_dict()` raised IndexError from then on), others raised
    KeyError half-way.
    """
    local = trained_alone()
    state = local.state_dict()
    before = exact(state)
    with pytest.raises(ValueError, match=said):
        local.load_state_dict(with_value(state, path, value))
    assert exact(local.state_dict()) == before
    local.load_state_dict(local.state_dict())
    assert exact(local.state_dict()) == before
    local.close()


@pytest.mark.parametrize(
    ("outer", "where", "value", "said"),
    [
        (torch.optim.Adafactor, (0, "row_var"), torch.ones(1, 4), r"row_var .* \(3, 1\) expected"),
        (torch.optim.Adafactor, (0, "col_var"), torch.ones(3, 1), r"col_var .* \(1, 4\) expected"),
        (torch.optim.Adafactor, (0, "col_var"), LEFT_OUT, "'row_var' of some parameters only"),
        (torch.optim.Adafactor, (1, "variance"), LEFT_OUT, "'variance' of some parameters only"),
        (torch.optim.Adafactor, (0, 7), torch.ones(3), r"7 of parameter 0 has shape \(3,\)"),
        (torch.optim.AdamW, (1, "exp_avg"), LEFT_OUT, "'exp_avg' of some parameters only"),
    ],
)
def test_moments_that_an_outer_optimizer_cannot_have_are_refused(outer, where, value, said):
    """Of one matrix and one bias, loaded where no step was made: only the state itself tells."""

    def alone():
        model = nn.Linear(4, 3)
        optimizer = sgd(model)
        options = {"sync_every": 1, "outer_optimizer": outer}
        return model, optimizer, DiLoCo(model, optimizer, "identity", comm=one_rank(), **options)

    (model, optimizer, local), (*_, new) = alone(), alone()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    local.step()
    state = local.state_dict()
    with pytest.raises(ValueError, match=said):
        new.load_state_dict(with_value(state, (*OUTER, "state", *where), value))
    new.load_state_dict(state)
    local.close()
    new.close()


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 2},
        pytest.param({"warmup_steps": 12, "fragment_sync_delay": 0}, marks=pytest.mark.long),
        {"outer_optimizer": lambda ps: torch.optim.AdamW(ps, lr=0.1), "fragment_sync_delay": 1},
    ],
)
def test_any_value_of_a_state_replaced_is_refused_or_harmless(pytestconfig, options):
    """Whatever a state's values are, loading raises ValueError and changes nothing, or
    `state_dict()` goes on. Each place has two of the values in turn, in `make test-long` all.
    """
    values = [LEFT_OUT, None, "x", -1, 1.5, [], {}, torch.tensor(NAN)]
    apart = 1 if pytestconfig.getoption("--every-row") else 4
    local = trained_alone(**options)
    state = local.state_dict()
    before, refused = exact(state), 0
    for number, path in enumerate(paths_of(state)):
        for value in values[number % apart :: apart]:
            try:
                local.load_state_dict(with_value(state, path, value))
            except ValueError:
                refused += 1
            else:
                local.state_dict()
                local.load_state_dict(copy.deepcopy(state))
            assert exact(local.state_dict()) == before, path
    assert refused > 500 / apart
    local.close()


# ---- the bad day ---------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("shard_outer", [False, True])
@pytest.mark.parametrize("codec", ["terngrad", "onebit"])
@each_rank(2, "local")
def test_weights_that_are_not_finite_are_committed_nowhere(comm, codec, delay, shard_outer):
    options = {"sync_every": 3, "fragment_sync_delay": delay, "shard_outer": shard_outer}
    model, optimizer, local = made(comm, codec, **options)
    take_steps(model, optimizer, local, range(3 + delay), comm.rank)
    before = copy.deepcopy(first_fragment(local))
    caught = None
    for step in range(3 + delay, 6 + delay):
        inner_step(model, optimizer, step, comm.rank)
        if comm.rank == 1 and step == 3 + delay:
            with torch.no_grad():
                model[2].weight[3, 4] = float("nan")
        try:
            local.step()
        except NotFinite as error:
            caught = error
    if comm.rank:
        assert "2.weight" in caught.names
    else:
        assert caught.names == [] and "on another rank" in str(caught)
    after = first_fragment(local)
    assert bits(after["anchors"].values()) == bits(before["anchors"].values())
    for what in ("outer", "averager"):
        assert exact({**after[what], "step": 0}) == exact({**before[what], "step": 0})
    local.restore()
    optimizer.state.clear()  # the inner momentum of that rank is NaN, too
    take_steps(model, optimizer, local, range(6 + delay, 12 + delay), comm.rank)
    local.close()
    assert torch.isfinite(model[2].weight).all()
    return bits(local._fragments[0].optimizer.param_groups[0]["params"])


@each_rank(2, "local")
def test_a_rank_that_is_gone_costs_the_others_their_sync_alone(comm):
    model, optimizer, local = made(comm, "onebit", sync_every=2, timeout_s=60.0)
    take_steps(model, optimizer, local, range(2), comm.rank)
    agreed = bits(first_fragment(local)["anchors"].values())
    if comm.rank == 0:
        take_steps(model, optimizer, local, [2], 0)
        inner_step(model, optimizer, 3, 0)
        mine = bits(model)
        with pytest.raises(PeerLost):
            local.step()
        assert bits(model) == mine and bits(anchors_of(local)) == agreed
    local.close()


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("sync_every", lambda number: 4 + number),
        (
            "outer_optimizer",
            lambda ps: torch.optim.SGD([{"params": ps, "lr": 0.1}], 0.7, 0.9, nesterov=True),
        ),
    ],
)
@each_rank(2, "local")
def test_functions_of_ranks_that_return_other_values_are_told_apart(comm, field, theirs):
    """Every option with another value is in test_mismatch.py."""
    options = {"sync_every": lambda number: 4} | ({field: theirs} if comm.rank else {})
    assert mismatch(lambda: made(comm, "terngrad", **options))[0] == field


@each_rank(2, "over")
def test_other_numbers_of_parameters_are_a_mismatch(comm):
    model = nn.Sequential(*[nn.Linear(5, 5) for _ in range(2 + comm.rank)])
    found, _ = mismatch(lambda: DiLoCo(model, sgd(model), "onebit", comm=comm, sync_every=2))
    assert found == "parameters"


@each_rank(2, "local")
def test_models_that_differ_are_named(comm):
    model = fresh()
    with torch.no_grad():
        model[2].bias += comm.rank
    with pytest.raises(PeerMismatch, match="2.bias"):
        DiLoCo(model, sgd(model), "terngrad", comm=comm, sync_every=4)


def two_rates(ps):
    groups = [{"params": ps[:1], "lr": 0.1}, {"params": ps[1:]}]
    return torch.optim.SGD(groups if len(ps) > 1 else ps, lr=0.7)


def with_decay(ps):
    return torch.optim.SGD(ps, lr=1.0, weight_decay=0.1)


SHARDED = {"shard_outer": True}


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sync_every": 0}, ValueError, "at least 1, got 0"),
        ({"sync_every": 2.5}, ValueError, "got 2.5"),
        ({"fragments": 0}, ValueError, "fragments must be"),
        ({"fragments": 5}, ValueError, "5 fragments need"),
        ({"sync_every": 9, "fragments": 7}, ValueError, "7 fragments of 6 tensors"),
        ({"fragment_sync_delay": 4}, ValueError, "less than sync_every, got 4"),
        ({"fragment_sync_delay": -1}, ValueError, "got -1"),
        ({"fragment_update_alpha": 1.5}, ValueError, "alpha"),
        ({"fragment_update_alpha": -0.5}, ValueError, "alpha"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, TypeError, "grad_scaler"),
        ({"warmup_codec": "block4"}, ValueError, "warmup_codec"),
        ({"advanced": Advanced(transform=AggregateAdagrad())}, ValueError, "is for gradients"),
        (
            {"precondition": True, "advanced": Advanced(scale_lr=True)},
            ValueError,
            "scale_lr=True is for gradients",
        ),
        ({**SHARDED, "outer_optimizer": torch.optim.Adam}, ValueError, "momentum of torch.optim.S"),
        ({**SHARDED, "outer_optimizer": with_decay}, ValueError, "this is SGD"),
        ({**SHARDED, "outer_optimizer": two_rates}, ValueError, "the same for all anchors"),
        ({**SHARDED, "exchange": "all_gather"}, ValueError, "needs exchange='auto' or 'reduce_sc"),
        ({**SHARDED, "exchange": "hierarchical"}, ValueError, "got 'hierarchical'"),
        ({**SHARDED, "precondition": True}, ValueError, "precondition cannot be used with"),
        ({"sync_evry": 4}, TypeError, "sync_evry"),
    ],
)
def test_wrong_arguments_are_named(options, error, said):
    with pytest.raises(error, match=said):
        alone(**{"sync_every": 4} | options)


def test_wrong_models_and_inner_optimizers_are_named():
    model = fresh()
    optimizer, foreign = sgd(model), sgd(fresh())
    for kind, given, inner, said in (
        (TypeError, [model], optimizer, "nn.Module"),
        (ValueError, model, foreign, "no parameter of this model"),
        (TypeError, model, [], "got an empty list"),
        (TypeError, model, None, "got an empty list"),
        (ValueError, model, [optimizer, optimizer], "the same SGD twice"),
        (ValueError, model, [optimizer, foreign], "no parameter of this model"),
        (UnsupportedTensor, fresh().double(), optimizer, "float64"),
    ):
        with pytest.raises(kind, match=said):
            DiLoCo(given, inner, "terngrad", comm=one_rank(), sync_every=2)


def test_parameters_that_are_no_longer_what_they_were():
    model, _, local = alone("terngrad", sync_every=1)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"0\.weight is not trained"):
        local.step()
    model[0].weight.requires_grad_(True)
    model[2].bias.data = torch.zeros(3)
    with pytest.raises(ValueError, match=r"2\.bias has shape \(3,\)"):
        local.step()
    local.close()


def test_parameters_that_take_no_part_are_named():
    model = fresh()
    model[0].weight.requires_grad_(False)
    local = DiLoCo(model, sgd(model), "terngrad", comm=one_rank(), sync_every=2)
    local.step()
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0\.weight was not trained"):
        local.step()
    model[0].weight.requires_grad_(False)
    model[2].bias = nn.Parameter(torch.zeros(50))
    local.step()
    with pytest.raises(ValueError, match=r"2\.bias was replaced"):
        local.step()
    local.close()


def test_a_start_that_is_interrupted_goes_on_from_where_it_was():
    """`restore` in the start phase keeps its weights, a list of its states has them; a batch
    averaged twice counts once.
    """

    def rank(comm):
        model, optimizer, local = made(comm, "onebit", sync_every=3, warmup_steps=6)
        take_steps(model, optimizer, local, range(4), comm.rank)
        for attempt in range(2):  # the first is thrown away
            optimizer.zero_grad()
            loss_of(model, 10 + attempt, comm.rank, **SIZES).backward()
            local.average_gradients()
        grads = bits(p.grad for p in model.parameters())
        local.load_state_dict(local.state_dict())  # the next gradients are not averaged yet
        with pytest.raises(GradcompError, match="closure"):
            optimizer.step(lambda: None)
        before = bits(model)
        local.restore()
        assert bits(model) == before
        state = local.state_dict()
        local.close()
        return grads, before, state

    def loaded(comm, saved):
        model, _, local = made(comm, "onebit", sync_every=3, warmup_steps=6)
        local.load_state_dict(saved)
        local.close()
        return bits(model)

    one, two = run_local(2, rank)
    assert one[:2] == two[:2]
    assert run_local(3, loaded, [one[2], two[2]]) == [one[1]] * 3


@each_rank(2, "local")
def test_an_exchange_that_fails_behind_steps_is_not_half_there(comm):
    """The first error is the peer's, and so is every later one; states are those of before."""
    options = {"sync_every": 4, "fragment_sync_delay": 2, "timeout_s": 60.0}
    model, optimizer, local = made(comm, "onebit", **options)
    take_steps(model, optimizer, local, range(6), comm.rank)
    caught = []
    for step in range(6, 6 if comm.rank else 17):
        inner_step(model, optimizer, step, comm.rank)
        try:
            local.step()
        except GradcompError as error:
            caught.append(type(error))
    if comm.rank == 0:
        assert len(caught) >= 2 and set(caught) == {PeerLost}
        state = local.state_dict()["extra"]
        assert state["under_way"] == [] and state["fragments"][0]["averages"] == {}
        assert state["fragments"][0]["syncs"] == 1
    local.close()


@each_rank(2, "local")
def test_averages_that_have_arrived_survive_a_reset(comm):
    options = {"sync_every": 4, "fragment_sync_delay": 3}
    _, wanted, _ = trained(comm.duplicate(), "onebit", 16, **options)
    model, optimizer, local = made(comm, "onebit", **options)
    take_steps(model, optimizer, local, range(5), comm.rank)
    if comm.rank == 0:
        local.state_dict()
    local.reset()
    take_steps(model, optimizer, local, range(5, 16), comm.rank)
    assert bits(anchors_of(local)) == bits(wanted) and local.syncs == 3
    local.close()


@each_rank(2, "local")
def test_averages_that_have_arrived_survive_the_failure_of_another_fragment(comm):
    options = {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3}
    model, optimizer, local = made(comm, "onebit", **options)
    take_steps(model, optimizer, local, range(2), comm.rank)
    first, second = (fragment.averager._engine for fragment in local._fragments)
    assert first.is_open and not second.is_open
    while not first.pipeline.is_empty:
        time.sleep(0.001)
    before = bits(anchors_of(local)[:2])
    take_steps(model, optimizer, local, range(2, 4), comm.rank)
    assert first.is_open and second.is_open
    second.fail(GradcompError("out of memory, say"))
    local.reset()
    assert local._under_way() and (first.step, second.step) == (1, 0)
    take_steps(model, optimizer, local, range(4, 5), comm.rank)
    assert [fragment.syncs for fragment in local._fragments] == [1, 0]
    assert bits(anchors_of(local)[:2]) != before
    take_steps(model, optimizer, local, range(5, 12), comm.rank)
    local.check_replicas()
    anchors = bits(anchors_of(local))
    local.close()
    return anchors


@each_rank(2, "local")
def test_a_rank_that_has_made_fewer_steps_is_waited_for_until_it_leaves(comm):
    """Syncs are paired by their number: who has skipped a step makes one more before the next
    one; who ends early is named at once.
    """
    model, optimizer, local = made(comm, "onebit", sync_every=2, timeout_s=60.0)
    for step in range(4 if comm.rank else 5):
        inner_step(model, optimizer, step, comm.rank)
        if comm.rank or step != 1:  # a minibatch that rank 0 did not count
            local.step()
    assert local.syncs == 2
    anchors = bits(anchors_of(local))
    if comm.rank == 0:
        local.step()
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            local.step()
        assert time.monotonic() - begun < 30
    local.close()
    return anchors


# ---- steps of inner optimizers -------------------------------------------------------------------


@each_rank(2, "local")
def test_ctrl_c_in_a_delayed_sync_loses_no_sync(comm):
    """One rank is interrupted while it waits, and goes on: the averages are still under way."""
    model, optimizer, local = made(comm, sync_every=4, fragment_sync_delay=2, timeout_s=60)
    for step in range(16):
        inner_step(model, optimizer, step, comm.rank)
        if step == 8 and comm.rank == 1:
            engine = local._fragments[0].averager._engine
            with (
                mock.patch.object(engine, "wait", side_effect=KeyboardInterrupt),
                pytest.raises(KeyboardInterrupt),
            ):
                local.state_dict()
        local.step()
    local.state_dict()  # waits
    return local.syncs, exact(anchors_of(local))


@each_rank(2, "local")
def test_a_step_that_torchs_checkpoints_make_uses_up_no_average(comm):
    """`get_optimizer_state_dict` steps an optimizer without state, with zero gradients."""
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    local = DiLoCo(model, optimizer, "onebit", comm=comm, sync_every=2, warmup_steps=3)
    get_optimizer_state_dict(model, optimizer)
    take_steps(model, optimizer, local, range(3), comm.rank)  # compares the ranks at the end
    return bits(model)


@each_rank(2, "local")
def test_averages_that_are_not_finite_are_saved_and_loaded(comm):
    """They raise NotFinite when they are due, as without the restart."""
    options = {"sync_every": 2, "fragment_sync_delay": 1, "timeout_s": 60}
    model, optimizer, local = made(comm, **options)
    take_steps(model, optimizer, local, range(1), comm.rank)
    inner_step(model, optimizer, 1, comm.rank)
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] = torch.nan
    local.step()
    local.restore()
    state = local.state_dict()
    model, optimizer, local = made(comm.duplicate(60.0), **options)
    local.load_state_dict(state)
    inner_step(model, optimizer, 2, comm.rank)
    with pytest.raises(NotFinite):
        local.step()


def test_steps_count_once_in_a_with_block():
    model, optimizer, local = alone(sync_every=2, fragments=2)
    with local:
        inner_step(model, optimizer, 0, 0)
        with pytest.raises(GradcompError, match="by themselves"):
            local.step()
        inner_step(model, optimizer, 1, 0)
        assert (local.inner_steps, local.syncs) == (2, 1)
        assert local.describe().startswith("DiLoCo every 2 inner steps, 2 fragments in turns: ")
    inner_step(model, optimizer, 2, 0)
    assert local.inner_steps == 2


def test_auto_says_what_it_chose(caplog):
    caplog.set_level("INFO", "gradcomp")
    *_, local = alone("auto", sync_every=2)
    assert "; auto: Block(8) for SGD: not measured with local steps" in local.describe()
    assert local.describe() in caplog.text
    local.close()


def pair(model, rest=torch.optim.AdamW):
    """Muon for matrices, or where torch has none momentum; something else for vectors."""
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim == 2) is wide] for wide in (True, False)
    )
    first = torch.optim.Muon if hasattr(torch.optim, "Muon") else torch.optim.SGD
    return [first(matrices, lr=0.02), rest(vectors, lr=0.01)]


@pytest.mark.parametrize("rest", [torch.optim.AdamW, SplitSGD])
@each_rank(2, "local")
def test_two_optimizers_share_a_model(comm, rest):
    """Which of them steps first does not matter, and gradients before warmup_steps are averaged
    once, by the first.
    """
    found = set()
    for order, counts in ((1, False), (-1, False), (1, True), (-1, True)):
        model = fresh()
        optimizers, options = pair(model, rest), {"sync_every": 2, "warmup_steps": 2}
        local = DiLoCo(model, optimizers, "terngrad", comm=comm.duplicate(60.0), **options)
        with local if counts else contextlib.nullcontext():
            for step in range(6):
                model.zero_grad()
                model(minibatch(step, comm.rank, **SIZES)[0]).square().mean().backward()
                for optimizer in optimizers[::order]:
                    optimizer.step()
                if not counts:
                    local.step()
                assert local.inner_steps == step + 1
                assert step != 1 or local.start_stats.steps == 2
            assert local.syncs == 2
        local.close()
        found.add(bits(model))
    assert len(found) == 1
    return found


def test_an_inner_optimizer_that_was_swapped_is_refused_before_it_changes_anything():
    model, _, local = alone(sync_every=2)
    other, before = torch.optim.AdamW(model.parameters()), bits(model)
    with pytest.raises(
        GradcompError, match="AdamW was not passed to DiLoCo but updates.*a new DiLoCo"
    ):
        inner_step(model, other, 0, 0)
    assert bits(model) == before
    another = fresh()
    inner_step(another, sgd(another), 0, 0)  # of another model: nobody's business
    state = local.state_dict()
    local.close()
    inner_step(model, other, 1, 0)  # it is over
    with DiLoCo(model, other, "terngrad", comm=one_rank(), sync_every=2) as again:
        again.load_state_dict(state)
        inner_step(model, other, 2, 0)
        assert again.inner_steps == 1


class Around(torch.optim.Optimizer):
    """As SAM and Lookahead are written."""

    def __init__(self, inside):
        super().__init__(inside.param_groups, {})
        self.inside, self.param_groups = inside, inside.param_groups

    def step(self, closure=None):
        return self.inside.step(closure)


class Bare(Around):
    """As accelerate's: without what Optimizer.__init__ makes."""

    def __init__(self, inside):
        self.inside, self.param_groups = inside, inside.param_groups
        self.state, self.defaults = inside.state, {}

    def step(self, closure=None):  # of its own, as zero_grad: torch's makes a step one with hooks
        return self.inside.step(closure)

    def zero_grad(self, set_to_none=True):
        self.inside.zero_grad(set_to_none)


class Shared(Around):
    """As Lightning's: it has what the one inside has."""

    def __init__(self, inside):
        self.__dict__ = dict(inside.__dict__) | {"inside": inside}

    step, zero_grad = Bare.step, Bare.zero_grad


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("given", ["inside", "around"])
@pytest.mark.parametrize("kind", [Around, Bare, Shared])
def test_optimizers_as_frameworks_wrap_them(kind, given, block):
    model = fresh()
    inside = sgd(model)
    around = kind(inside)
    known = inside if given == "inside" else around
    local = DiLoCo(model, known, "terngrad", comm=one_rank(), sync_every=2)
    with local if block else contextlib.nullcontext():
        for step in range(2):
            inner_step(model, around, step, 0)
            if not block:
                local.step()
        assert (local.inner_steps, local.syncs) == (2, 1)
    local.close()


def test_an_optimizer_without_hooks_is_counted_by_who_calls_step():
    class Foreign:
        def __init__(self, inside):
            self.param_groups, self.state = inside.param_groups, inside.state
            self._step, self.zero_grad = inside.step, inside.zero_grad

        def step(self):
            self._step()

    model = fresh()
    optimizer = Foreign(sgd(model))
    local = DiLoCo(model, optimizer, "terngrad", comm=one_rank(), sync_every=2)
    said = r"steps of Foreign cannot be counted.*call step\(\) after each"
    with pytest.raises(TypeError, match=said):
        local.__enter__()
    take_steps(model, optimizer, local, range(2), 0)
    assert (local.inner_steps, local.syncs) == (2, 1)
    local.close()


def test_parameters_may_be_swapped_and_local_steps_forgotten_during_a_step():
    model, _, local = alone(sync_every=2)
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
    other = fresh()
    optimizer = sgd(other)
    hooks = [
        register_optimizer_step_pre_hook(call)
        for call in (lambda *_: gc.collect() and None, lambda *_: None)
    ]
    gc.collect()  # models of earlier tests
    gc.disable()
    watching = len(watch._watchers)
    try:
        model.kept = local
        del local, model
        assert len(watch._watchers) == watching
        inner_step(other, optimizer, 0, 0)  # torch walks through its hooks while ours goes
        assert len(watch._watchers) == watching - 2  # of the inner optimizer, of the outer one
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()


def test_optimizers_that_follow_each_other_are_not_taken_for_one():
    first, second = fresh().parameters(), fresh().parameters()
    one, two = next(first), next(second)
    missed = []
    steps = watch.Steps(watch.Mine([one, two]), lambda: len(missed), lambda: missed.append(1))
    steps._begun = None  # averages have come since
    for parameter in (one, two):
        parameter.grad = torch.ones_like(parameter)
        # at the place in memory of the one before
        steps.check(torch.optim.SGD([parameter], lr=0.1))
    assert not missed


@pytest.mark.parametrize("itself", [True, False])
def test_gradients_that_add_up_are_no_inner_steps(itself):
    """A sync falls behind optimizer steps and never between minibatches; who calls `step` after
    each of those is told.
    """
    model, optimizer, local = alone("terngrad", sync_every=4)
    synced_at = []
    with (
        warnings.catch_warnings(record=True) as told,
        local if itself else contextlib.nullcontext(),
    ):
        warnings.simplefilter("always")
        for number in range(48):
            before = local.syncs
            model(torch.ones(2, 40)).sum().backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            if not itself:
                local.step()
            if local.syncs > before:
                synced_at.append(number)
    local.close()
    told = [one for one in told if "inner optimizer" in str(one.message)]
    if itself:
        assert local.inner_steps == 24 and synced_at == [7, 15, 23, 31, 39, 47] and not told
    else:
        (one,) = told
        said = "called 16 times while the inner optimizer stepped 8 times: call it after optimizer."
        assert said in str(one.message) and one.filename == __file__
        assert str(one.message).endswith("a sync can fall inside gradient accumulation")


@pytest.mark.timed
def test_a_sync_takes_little_more_than_its_exchange():
    """What is around the exchange is a few passes over the weights: changes, the outer step, the
    copy back.
    """

    def rank(comm):
        torch.set_num_threads(1)
        model = nn.Linear(2048, 2048, bias=False)
        nn.init.constant_(model.weight, 0.5)
        found = {}
        local = DiLoCo(model, sgd(model), "terngrad", comm=comm.duplicate(60.0), sync_every=1)
        other = copy.deepcopy(model)
        averager = GradientAverager(other, "terngrad", comm=comm, atomic_steps=True)
        noise = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(comm.rank))
        for what in ["sync", "exchange"] * 7:
            with torch.no_grad():
                model.weight.add_(noise, alpha=1e-3)
                other.weight.grad = noise.clone()
            begun = time.perf_counter()
            local.step() if what == "sync" else averager.average()
            found.setdefault(what, []).append(time.perf_counter() - begun)
        local.close()
        averager.close()
        return found

    seconds = run_local(2, rank)[0]
    # the least of each: two ranks on two cores wait for whatever else runs, at times for 0.1 s
    least = {what: min(each) for what, each in seconds.items()}
    assert least["sync"] < 4 * least["exchange"], seconds  # 2.4 on two hosts, of 25 M values


@pytest.mark.parametrize("kind", [DiLoCo, LocalSGD])
@each_rank(2, "local")
def test_weights_loaded_after_it_was_made_are_no_training(comm, kind):
    """The outer optimizer took them for a large step, and made it larger."""
    model, optimizer, local = made(comm, "block4", kind=kind, sync_every=2)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    with pytest.raises(GradcompError, match="weights were changed after this .* was made"):
        inner_step(model, optimizer, 0, comm.rank)
    local.close()
