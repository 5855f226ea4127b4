"""What every entry point does: one row of `ENTRIES` for each way to train, one test for each
promise. What is special to one of them is in its own file.
"""

import copy
import io
import re
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _golden import tensors_in
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import (
    DiLoCo,
    GradcompError,
    GradientAverager,
    LocalSGD,
    NotFinite,
    OneBit,
)
from gradcomp.allreduce import Feedback
from gradcomp.codecs import EntropyCoded
from gradcomp.comm import TorchCommunicator
from gradcomp.exchange.stats import Stats
from gradcomp.onebit_sgd import DoubleBuffer

TIMEOUT_S = 20


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 40, generator=generator), torch.randint(10, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def layers():
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Entry:
    """A model, an optimizer and gradcomp between them; `step` makes one training step."""

    resumes = True  # `state_dict` and `load_state_dict`
    exchange = "reduce_scatter"  # of a resumed run: owners of means have residuals, too
    sync_every = 1  # steps until ranks hold the same weights again

    def __init__(self, codec, **options):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.rank = dist.get_rank()
        self.model = self.wrap(layers())
        self.optimizer = sgd(self.model)
        self.opened = self.open(codec, min_numel=0, timeout_s=TIMEOUT_S, **options)

    def wrap(self, model):
        return model

    def backward(self, step, bad=False):
        self.optimizer.zero_grad()
        loss = loss_of(self.model, step, self.rank)
        (loss * float("nan") if bad else loss).backward()

    def step(self, step, bad=False):
        self.backward(step, bad)
        self.optimizer.step()

    def weights(self):
        parameters = [p.detach() for p in self.model.parameters()]
        local = [getattr(p, "to_local", lambda p=p: p)() for p in parameters]
        return b"".join(p.contiguous().numpy().tobytes() for p in local)

    def save(self):
        """Return a checkpoint, read back from the file it was written to."""
        state = self.opened.state_dict()  # first: it may wait for averages and apply them
        file = io.BytesIO()
        torch.save((self.model.state_dict(), self.optimizer.state_dict(), state), file)
        file.seek(0)
        return torch.load(file, weights_only=not isinstance(self, Fsdp))

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
        return self.kind(self.model, self.optimizer, codec, sync_every=self.sync_every, **options)

    def step(self, step, bad=False):
        super().step(step, bad)
        self.opened.step()


class LocalMeans(Local):
    kind = LocalSGD


class Buffered(Entry):
    def open(self, codec, **options):
        return DoubleBuffer(self.model, self.optimizer, codec, **options)

    def step(self, step, bad=False):
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x, y = torch.randn(8, 40, generator=generator), torch.randint(10, (8,), generator=generator)

        def loss(x, y):
            value = nn.functional.cross_entropy(self.model(x), y)
            return value * float("nan") if bad else value

        self.opened.step(loss, x, y)

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


def trained(entry, codec, steps):
    run = entry(codec)
    for step in range(steps):
        run.step(step)
    found = run.weights()
    run.close()
    return found


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "fsdp"])
def test_ranks_hold_the_same_bits(gloo, name, codec):
    """Of FSDP2 each rank holds other shards."""
    entry = ENTRIES[name]
    first, *others = gloo(3, trained, entry, codec, 2 * entry.sync_every)
    assert all(other == first for other in others)


def resumed(entry, codec, middle):
    run = entry(codec, exchange=entry.exchange)
    for step in range(middle):
        run.step(step)
    saved = run.save()
    for step in range(middle, middle + 3):
        run.step(step)
    whole = run.weights()
    run.close()
    again = entry(codec, exchange=entry.exchange)
    again.load(saved)
    for step in range(middle, middle + 3):
        again.step(step)
    found = again.weights()
    again.close()
    return found == whole


@pytest.mark.parametrize("codec", [*CODECS, OneBit(rotate=True)], ids=str)
@pytest.mark.parametrize("name", RESUME)
def test_a_resumed_run_is_the_uninterrupted_one(gloo, name, codec):
    assert gloo(2, resumed, ENTRIES[name], codec, 3) == [True] * 2


def united(entry, folder):
    """Return the digests of a state and of what is loaded from torch's checkpoint of all ranks."""
    run = entry("onebit", exchange=entry.exchange)
    for step in range(3):
        run.step(step)
    saved = run.save()
    dcp.save({"gradcomp": run.opened}, checkpoint_id=folder)
    for step in range(3, 5):
        run.step(step)
    dcp.load({"gradcomp": run.opened}, checkpoint_id=folder)
    found = run.opened.state_dict()
    run.close()
    return list(saved[2]["ranks"]), tensors_in(saved[2]), tensors_in(found)


@pytest.mark.parametrize("name", RESUME)
def test_torchs_checkpoints_unite_the_states_of_all_ranks(gloo, tmp_path, name):
    """Each rank has its own tensors back, which differ from those of the other."""
    for rank, (ranks, saved, found) in enumerate(gloo(2, united, ENTRIES[name], str(tmp_path))):
        assert ranks == [str(rank)] and found == saved and saved


def with_tensors(state, change):
    """Return a nested state with every tensor changed."""
    if isinstance(state, dict):
        return {key: with_tensors(value, change) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [with_tensors(value, change) for value in state]
    return change(state) if isinstance(state, torch.Tensor) else state


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
    lambda state: with_tensors(state, lambda t: torch.full_like(t, float("nan"))),
    lambda state: with_tensors(state, lambda t: t.double()),
    lambda state: with_tensors(state, lambda t: torch.cat([t.flatten(), t.flatten()])),
    lambda state: with_tensors(state, lambda t: [1]),
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


def misled(entry):
    """Return which foreign states were taken, and whether the run is what it was before them."""
    run = entry("onebit", exchange=entry.exchange)
    for step in range(2):
        run.step(step)
    good, taken = run.save(), []
    for number, foreign in enumerate(FOREIGN):
        bad = foreign(run.opened.state_dict()) if callable(foreign) else foreign
        try:
            run.opened.load_state_dict(bad)
            taken.append(number)
        except ValueError as error:
            assert str(error)
    again = entry("onebit", exchange=entry.exchange)
    again.load(good)
    for one in (run, again):
        for step in range(2, 4):
            one.step(step)
    same = run.weights() == again.weights()
    run.close()
    again.close()
    return taken, same


@pytest.mark.parametrize("name", RESUME)
def test_foreign_states_change_nothing(gloo, name):
    assert gloo(2, misled, ENTRIES[name]) == [([], True)] * 2


def not_finite(entry, codec):
    """Rank 1's second exchange holds NaN; return what it left, and whether later steps are good."""
    run, sync = entry(codec), entry.sync_every
    for step in range(sync):
        run.step(step)
    raised = False
    for step in range(sync, 2 * sync):
        try:
            run.backward(step, bad=run.rank == 1) if sync == 1 and not isinstance(
                run, Buffered
            ) else run.step(step, bad=run.rank == 1)
        except NotFinite:
            raised = True
    if raised:  # local steps: go back to what ranks agreed on
        run.opened.restore()
        run.optimizer.state.clear()
        left = True
    else:
        grads = [p.grad for p in run.model.parameters()]
        left = all(bool(getattr(g, "to_local", lambda g=g: g)().isnan().all()) for g in grads)
    if isinstance(run, Buffered):
        return left, True  # its update is under way already: a loss scaler would have skipped it
    for step in range(2 * sync, 4 * sync):
        run.step(step)
    good = all(bool(p.isfinite().all()) for p in run.model.parameters())
    run.close()
    return left, good


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ENTRIES)
def test_a_value_that_is_not_finite_is_seen_by_every_rank_and_leaves_no_trace(gloo, name, codec):
    assert gloo(2, not_finite, ENTRIES[name], codec) == [(True, True)] * 2


def with_other_codecs(entry, codecs=("terngrad", "onebit")):
    """Return what each of two ranks with other codecs is told."""
    with pytest.raises(gradcomp.PeerMismatch) as caught:
        run = entry(codecs[dist.get_rank()])
        for step in range(entry.sync_every):
            run.step(step)
    return caught.value.field, caught.value.rank, str(caught.value)


HASH = re.compile(r"\d{12,}|[0-9a-f]{16,}")


@pytest.mark.parametrize("name", ENTRIES)
def test_ranks_with_other_codecs_are_told_both_by_name(gloo, name):
    for field, rank, text in gloo(2, with_other_codecs, ENTRIES[name]):
        assert (field, rank) == ("codec", 1), text
        assert re.search(r"rank 0 has TernGrad\(.*rank 1 has OneBit\(", text), text
        assert not HASH.search(text), text


@pytest.mark.parametrize("name", ENTRIES)
def test_ranks_with_other_bits_are_told_both(gloo, name):
    codecs = EntropyCoded(2.2), EntropyCoded(2.25)
    for field, rank, text in gloo(2, with_other_codecs, ENTRIES[name], codecs):
        assert field in ("codec", "codec_options") and rank == 1, text
        assert re.search(r"EntropyCoded\(bits=2\.2,.*EntropyCoded\(bits=2\.25,", text), text
        assert not HASH.search(text), text


def left_behind(entry):
    """Rank 1 closes after its first exchange; return what rank 0 gets, and how soon."""
    run = entry("onebit")
    for step in range(entry.sync_every):
        run.step(step)
    if run.rank == 1:
        run.close()
        dist.barrier()
        return None
    begun = time.monotonic()
    with pytest.raises(GradcompError) as caught:
        for step in range(entry.sync_every, 4 * entry.sync_every):
            run.step(step)
    run.close()
    dist.barrier()
    return type(caught.value).__name__, time.monotonic() - begun < 2 * TIMEOUT_S


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in ("ddp", "fsdp")])
def test_a_rank_that_leaves_is_peer_lost(gloo, name):
    """Under DDP and FSDP2 torch's own collectives may be the first to notice: see their files."""
    assert gloo(2, left_behind, ENTRIES[name]) == [("PeerLost", True), None]


def counted(entry, codec):
    run = entry(codec)
    for step in range(2 * entry.sync_every):
        run.step(step)
    run.weights()  # what is under way has arrived
    stats = run.opened.stats
    found = stats.bytes_sent, stats.bytes_received, stats.baseline_bytes
    run.close()
    return found


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "all_reduce"])
def test_bytes_are_counted_and_fewer_than_fp32(gloo, name):
    """By every rank; what an exchange of a known size sends is in test_averager and test_fsdp."""
    for codec, least in (("terngrad", 6), ("onebit", 6), ("identity", 0.9)):
        for sent, received, baseline in gloo(2, counted, ENTRIES[name], codec):
            assert sent > 0 and received > 0 and baseline / sent > least, (codec, baseline / sent)


def alone(entry):
    """Train on one rank; return the weights, the same without gradcomp, and the bytes sent."""
    run, plain = entry("ternary"), Entry.__new__(Entry)
    for step in range(3):
        run.step(step)
    found, sent = run.weights(), getattr(run.opened, "stats", Stats()).bytes_sent
    run.close()
    torch.manual_seed(0)
    plain.rank = 0
    plain.model = layers()
    plain.optimizer = sgd(plain.model)
    for step in range(3):
        plain.step(step)
    return found, plain.weights(), sent


@pytest.mark.parametrize("name", ENTRIES)
def test_one_rank_sends_nothing_and_trains(gloo, name):
    ((found, plain, sent),) = gloo(1, alone, ENTRIES[name])
    assert sent == 0
    assert found == plain or name in ("diloco", "local_sgd", "double_buffer")


@pytest.mark.parametrize("codec", CODECS)
def test_ddp_and_the_averager_are_the_same_run(gloo, codec):
    assert (
        len(
            {
                run
                for name in ("ddp", "averager")
                for run in gloo(2, trained, ENTRIES[name], codec, 4)
            }
        )
        == 1
    )


def closed_twice(entry):
    run = entry("terngrad")
    run.step(0)
    run.close()
    run.close()
    text = repr(run.opened)
    del run
    return bool(text)


@pytest.mark.parametrize("name", ENTRIES)
def test_closing_twice_is_closing(gloo, name):
    assert gloo(2, closed_twice, ENTRIES[name]) == [True] * 2
