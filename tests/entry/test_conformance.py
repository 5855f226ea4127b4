"""What every entry point does: one row of `ENTRIES` for each way to train, one test for each
promise. What is special to one of them is in its own file.
"""

import copy
import gc
import time
import weakref
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _golden import tensors_in
from _kinds import check_kinds
from _models import bits, loss_of, minibatch, sgd
from _ranks import each_rank
from _saved import saved_and_loaded
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves, tree_map_only

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import DiLoCo, GradientAverager, LocalSGD, NotFinite, OneBit, PeerLost, PeerMismatch
from gradcomp.allreduce import Feedback
from gradcomp.comm import TorchCommunicator
from gradcomp.exchange.stats import Stats
from gradcomp.onebit_sgd import DoubleBuffer

TIMEOUT_S = 20


def layers():
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 10))


class Entry:
    """A model, an optimizer and gradcomp between them; `step` makes one training step."""

    resumes = True  # `state_dict` and `load_state_dict`
    exchange = "reduce_scatter"  # of a resumed run: owners of means have residuals, too
    sync_every = 1  # steps until ranks hold the same weights again

    def __init__(self, codec, optimizer=None, **options):
        """`optimizer`: what makes the option of that name of the run's model."""
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.model = self.wrap(layers())
        self.optimizer = sgd(self.model)
        if optimizer is not None:
            options["optimizer"] = optimizer(self.model)
        usual = {"min_numel": 0, "timeout_s": TIMEOUT_S}
        self.opened = self.open(codec, **usual | options)

    def wrap(self, model):
        return model

    def backward(self, step, bad=False):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step, self.rank, features=40)
        (loss * float("nan") if bad else loss).backward()

    def step(self, step, bad=False):
        self.backward(step, bad)
        self.optimizer.step()

    def weights(self):
        parameters = [p.detach() for p in self.model.parameters()]
        return bits(getattr(p, "to_local", lambda p=p: p)() for p in parameters)

    def save(self):
        """Return a checkpoint, read back from the file it was written to."""
        state = self.opened.state_dict()  # first: it may wait for averages and apply them
        everything = self.model.state_dict(), self.optimizer.state_dict(), state
        return saved_and_loaded(everything, weights_only=not isinstance(self, Fsdp))

    def load(self, saved):
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        self.opened.load_state_dict(saved[2])

    def close(self):
        self.opened.close()


class Ddp(Entry):
    def wrap(self, model):
        return DDP(model)

    def open(self, codec, **options):
        return gradcomp.ddp.register(self.model, codec, **options)


class Averager(Entry):
    def open(self, codec, **options):
        return GradientAverager(self.model, codec, **options)

    def backward(self, step, bad=False):
        super().backward(step, bad)
        self.opened.average()


class AllReduce(Entry):
    resumes = False

    def open(self, codec, timeout_s, min_numel, **options):
        self.codec, self.options = codec, dict(options, timeout_s=timeout_s)
        self.comm = TorchCommunicator(timeout_s=timeout_s)
        keeps = codec in ("ternary", "onebit", "block4", "entropy")
        self.feedback = [
            Feedback({key: p.numel()}) if keeps else None
            for key, p in enumerate(self.model.parameters())
        ]
        return self.comm

    def backward(self, step, bad=False):
        super().backward(step, bad)
        for key, p in enumerate(self.model.parameters()):
            given = {"key": key, "feedback": self.feedback[key], **self.options}
            gradcomp.all_reduce(p.grad, self.codec, comm=self.comm, **given)


class Fsdp(Entry):
    def wrap(self, model):
        return fully_shard(model)

    def open(self, codec, exchange=None, **options):  # it has one exchange
        return gradcomp.fsdp.register(self.model, codec, **options)


class Local(Entry):
    kind, sync_every = DiLoCo, 2

    def open(self, codec, **options):
        options.setdefault("sync_every", self.sync_every)
        return self.kind(self.model, self.optimizer, codec, **options)

    def step(self, step, bad=False):
        super().step(step, bad)
        self.opened.step()


class LocalMeans(Local):
    kind = LocalSGD


class Buffered(Entry):
    def open(self, codec, **options):
        return DoubleBuffer(self.model, self.optimizer, codec, **options)

    def step(self, step, bad=False):
        def loss(x, y):
            value = nn.functional.cross_entropy(self.model(x), y)
            return value * float("nan") if bad else value

        self.opened.step(loss, *minibatch(step, self.rank, features=40))

    def weights(self):
        self.model.eval()(torch.zeros(1, 40))  # an evaluation applies what is under way
        self.model.train()
        return super().weights()


ENTRIES = {
    "ddp": Ddp,
    "averager": Averager,
    "all_reduce": AllReduce,
    "fsdp": Fsdp,
    "diloco": Local,
    "local_sgd": LocalMeans,
    "double_buffer": Buffered,
}
RESUME = [name for name, entry in ENTRIES.items() if entry.resumes]
CODECS = ["ternary", "terngrad", "onebit", "block4", "entropy"]
check_kinds(CODECS, without=("block2", "block8", "identity", "bfloat16"))


def trained(entry, codec, steps, **options):
    """Return a run that has made these steps."""
    run = entry(codec, **options)
    for step in steps:
        run.step(step)
    return run


def closed(run):
    """Close a run and return its weights."""
    found = run.weights()
    run.close()
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "fsdp"])
@each_rank(3)
def test_ranks_hold_the_same_bits(name, codec):
    """Of FSDP2 each rank holds other shards."""
    entry = ENTRIES[name]
    return closed(trained(entry, codec, range(2 * entry.sync_every)))


@pytest.mark.parametrize("codec", [*CODECS, OneBit(rotate=True)], ids=str)
@pytest.mark.parametrize("name", RESUME)
@each_rank(2)
def test_a_resumed_run_is_the_uninterrupted_one(name, codec):
    entry = ENTRIES[name]
    run = trained(entry, codec, range(3), exchange=entry.exchange)
    saved = run.save()
    for step in range(3, 6):
        run.step(step)
    whole = closed(run)
    again = entry(codec, exchange=entry.exchange)
    again.load(saved)
    for step in range(3, 6):
        again.step(step)
    assert closed(again) == whole


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ddp", {}),
        ("averager", {}),
        ("fsdp", {}),
        # means are encoded again: their owners' residuals decay, too
        ("ddp", {"exchange": "reduce_scatter"}),
        ("averager", {"exchange": "reduce_scatter"}),
    ],
)
@each_rank(2)
def test_what_a_decay_drops_is_counted(name, options):
    """A decay of one half drops as much as it keeps, in each phase of the step's exchange."""
    entry = ENTRIES[name]
    for decay in (0.5, 1.0):
        run = trained(entry, OneBit(residual_decay=decay), range(entry.sync_every), **options)
        state, found = run.save()[2]["ranks"][str(run.rank)], run.opened.stats.dropped_residual
        run.close()
        kept = {
            key: sum(plane.double().abs().sum().item() for plane in tree_leaves(planes))
            for key, planes in state.items()
            if "residual" in key
        }
        assert kept["residual"] > 0 and (kept.get("owner_residual", 0) > 0) == bool(options)
        assert found == pytest.approx(sum(kept.values()) * (decay < 1), rel=1e-5)


@pytest.mark.parametrize("name", RESUME)
@each_rank(2)
def test_torchs_checkpoints_unite_the_states_of_all_ranks(tmp_path, name):
    """Each rank has its own tensors back, which differ from those of the other."""
    entry = ENTRIES[name]
    run, folder = trained(entry, "onebit", range(3), exchange=entry.exchange), str(tmp_path)
    saved = run.save()[2]
    dcp.save({"gradcomp": run.opened}, checkpoint_id=folder)
    for step in range(3, 5):
        run.step(step)
    dcp.load({"gradcomp": run.opened}, checkpoint_id=folder)
    found = run.opened.state_dict()
    run.close()
    assert list(saved["ranks"]) == [str(run.rank)]
    assert tensors_in(saved) == tensors_in(found) != []


def with_tensors(change):
    """Return a function that changes every tensor of a state."""
    return partial(tree_map_only, torch.Tensor, change)


def changed(**changes):
    """Return a function that puts other values into a state."""
    return lambda state: dict(state, **changes)


def of_rank(**parts):
    """Return a function that puts other tensors of its rank into a state."""
    return lambda state: dict(
        state, ranks={rank: {**own, **parts} for rank, own in state["ranks"].items()}
    )


FOREIGN = [
    None,
    5,
    [],
    {},
    {"step": 3},
    {"version": 99},
    {"format": 2},
    lambda state: {k: v for k, v in state.items() if k != min(state)},
    lambda state: dict.fromkeys(state),
    with_tensors(lambda t: torch.full_like(t, float("nan"))),
    with_tensors(lambda t: t.double()),
    with_tensors(lambda t: torch.cat([t.flatten(), t.flatten()])),
    with_tensors(lambda t: [1]),
    changed(ranks={"1": {}, "0": {}}),
    lambda state: {k: v for k, v in state.items() if k != "ranks"},
    changed(ranks={"5": {"tensors": 0}}),
    changed(ranks=None),
    changed(format=1),
    changed(origin={}),
    changed(replicated=None),
    changed(world_size=0),
    of_rank(tensors=1),
    *(changed(step=step) for step in ("7", -5, 2.9)),
    *(changed(loss_scale=scale) for scale in (float("nan"), 0.0)),
    of_rank(residual=[1]),
    of_rank(owner_residual=None),
    of_rank(owner_residual={1: 2}),
]


@pytest.mark.parametrize("name", RESUME)
@each_rank(2)
def test_foreign_states_change_nothing(name):
    entry = ENTRIES[name]
    run = trained(entry, "onebit", range(2), exchange=entry.exchange)
    good, taken = run.save(), []
    for number, foreign in enumerate(FOREIGN):
        bad = foreign(run.opened.state_dict()) if callable(foreign) else foreign
        try:
            run.opened.load_state_dict(bad)
            taken.append(number)
        except ValueError as error:
            assert str(error)
    assert not taken
    again = entry("onebit", exchange=entry.exchange)
    again.load(good)
    for one in (run, again):
        for step in range(2, 4):
            one.step(step)
    assert closed(run) == closed(again)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ENTRIES)
@each_rank(2)
def test_a_value_that_is_not_finite_is_seen_by_every_rank_and_leaves_no_trace(name, codec):
    """Rank 1's second exchange holds NaN; later steps are good."""
    entry = ENTRIES[name]
    sync = entry.sync_every
    run, buffered = trained(entry, codec, range(sync)), entry is Buffered
    raised = False
    for step in range(sync, 2 * sync):
        act = run.step if buffered or sync > 1 else run.backward
        try:
            act(step, bad=run.rank == 1)
        except NotFinite:
            raised = True
    if raised:  # local steps: go back to what ranks agreed on
        run.opened.restore()
        run.optimizer.state.clear()
    else:
        grads = [p.grad for p in run.model.parameters()]
        assert all(bool(getattr(g, "to_local", lambda g=g: g)().isnan().all()) for g in grads)
    if buffered:
        return  # its update is under way already: a loss scaler would have skipped it
    for step in range(2 * sync, 4 * sync):
        run.step(step)
    assert all(bool(p.isfinite().all()) for p in run.model.parameters())
    run.close()


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ("ddp", "fsdp")])
@each_rank(2)
def test_a_rank_that_leaves_is_peer_lost(name):
    """Under DDP and FSDP2 torch's own collectives may be the first to notice: see their files.
    Rank 1 closes after its first exchange.
    """
    entry = ENTRIES[name]
    run = trained(entry, "onebit", range(entry.sync_every))
    if run.rank == 0:
        begun = time.monotonic()
        with pytest.raises(PeerLost):
            for step in range(entry.sync_every, 4 * entry.sync_every):
                run.step(step)
        assert time.monotonic() - begun < 2 * TIMEOUT_S
    run.close()
    dist.barrier()


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "all_reduce"])
@each_rank(2)
def test_bytes_are_counted_and_fewer_than_fp32(name):
    """By every rank; what an exchange of a known size sends is in test_averager and test_fsdp."""
    for codec, least in (("terngrad", 6), ("onebit", 6), ("identity", 0.9)):
        run = trained(ENTRIES[name], codec, range(2 * ENTRIES[name].sync_every))
        closed(run)  # what is under way has arrived
        stats = run.opened.stats
        assert stats.bytes_sent > 0 and stats.bytes_received > 0
        assert stats.baseline_bytes / stats.bytes_sent > least, codec


@pytest.mark.parametrize("name", ENTRIES)
@each_rank(1)
def test_one_rank_sends_nothing_and_trains(name):
    """As without gradcomp, where it averages gradients."""
    run = trained(ENTRIES[name], "ternary", range(3))
    assert getattr(run.opened, "stats", Stats()).bytes_sent == 0
    torch.manual_seed(0)
    plain = Entry.__new__(Entry)
    plain.rank, plain.model = 0, layers()
    plain.optimizer = sgd(plain.model)
    for step in range(3):
        plain.step(step)
    same = closed(run) == plain.weights()
    assert same or name in ("diloco", "local_sgd", "double_buffer")


@pytest.mark.parametrize("codec", CODECS)
@each_rank(2)
def test_ddp_and_the_averager_are_the_same_run(codec):
    one, other = (closed(trained(entry, codec, range(4))) for entry in (Ddp, Averager))
    assert one == other
    return one


@pytest.mark.parametrize("name", ENTRIES)
@each_rank(2)
def test_closing_twice_is_closing(name):
    run = trained(ENTRIES[name], "terngrad", range(1))
    run.close()
    run.close()
    assert repr(run.opened)


@pytest.mark.parametrize("name", RESUME)
@each_rank(2)
def test_a_run_that_has_failed_is_freed(name):
    """Each error that a program caught and went on from kept a model and its process groups."""
    seen = []

    class Watched(ENTRIES[name]):
        def wrap(self, model):
            seen.append(weakref.ref(model))
            return super().wrap(model)

    def fail():
        with pytest.raises(PeerMismatch):
            run = Watched(("onebit", "ternary")[dist.get_rank()])
            try:
                for step in range(2):
                    run.step(step)
            except PeerMismatch:
                with pytest.raises(PeerMismatch):
                    run.step(2)
                raise

    for _ in range(3):
        fail()
    gc.collect()
    # torch keeps the last DDP model
    assert [model() for model in seen[:-1]] == [None, None]
