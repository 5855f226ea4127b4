"""Channels-last and transposed parameters: elements travel in the order in which they lie in
memory.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from _models import bits
from _ranks import each_rank, run_local
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import GradcompError, GradientAverager, Identity, OneBit, PeerMismatch, TernGrad
from gradcomp.optim import SplitSGD, split_parameters
from gradcomp.payload.order import storage_order, storage_shape, storage_view

LAST = torch.channels_last


@pytest.mark.parametrize(
    ("tensor", "order"),
    [
        (torch.zeros(4, 3, 2, 5), ()),
        (torch.zeros(4, 3, 2, 5).to(memory_format=LAST), (0, 2, 3, 1)),
        (torch.zeros(1, 3, 2, 5).to(memory_format=LAST), (0, 2, 3, 1)),
        # one channel: the same order in memory
        (torch.zeros(4, 1, 2, 5).to(memory_format=LAST), ()),
        (torch.zeros(4, 3, 1, 1).to(memory_format=LAST), ()),
        (torch.zeros(3, 7).t(), (1, 0)),
        (torch.zeros(3, 1, 7).permute(2, 1, 0), (2, 0, 1)),
        (torch.zeros(8, 8)[:, :4], ()),  # does not fill its memory: row-major, as DDP has it
        (torch.zeros(8, 8)[:, :4].t(), ()),
        (torch.zeros(0, 3).t(), ()),
        (torch.zeros(()), ()),
        (torch.zeros(1).expand(5), ()),
    ],
)
def test_order_in_memory(tensor, order):
    assert storage_order(tensor.shape, tensor.stride()) == order
    if order:
        flat = torch.arange(tensor.numel())
        assert torch.equal(
            storage_view(flat, tensor),
            flat.view(storage_shape(tensor)).permute([order.index(d) for d in range(tensor.dim())]),
        )


def convolutions(memory_format=torch.contiguous_format):
    torch.manual_seed(3)
    net = nn.Sequential(
        nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    )
    return net.to(memory_format=memory_format)


MODELS = {"rows": convolutions(), "last": convolutions(LAST)}


def averager_of(comm, name, codec, **options):
    net = copy.deepcopy(MODELS[name])
    named = net.named_parameters()
    return net, GradientAverager(named, codec, comm=comm, min_numel=0, **options)


def averaged(comm, name, codec, exchange):
    """Return averages of small whole numbers, whose sums are exact in any order, and the
    checkpoint.
    """
    net, averager = averager_of(comm, name, codec, exchange=exchange)
    with contextlib.closing(averager):
        out = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            for p in net.parameters():
                drawn = torch.randint(-8, 9, p.shape, generator=generator)
                p.grad = torch.empty_like(p).copy_(drawn)
            averager.average()
            assert all(p.grad.stride() == p.stride() for p in net.parameters())
            out += [p.grad.contiguous().view(-1).tolist() for p in net.parameters()]
        return out, averager.state_dict()


@pytest.mark.parametrize(
    ("codec", "exchange"),
    [
        (Identity(), "all_gather"),
        (Identity(), "reduce_scatter"),
        (OneBit(error_feedback=False), "all_gather"),
    ],
    ids=str,
)
def test_channels_last_is_averaged_as_the_contiguous_model(codec, exchange):
    """The first dimension is outermost in memory in both formats, so 1-bit groups are those of
    one output channel.
    """
    rows, last = (run_local(2, averaged, name, codec, exchange) for name in MODELS)
    assert [out for out, _ in rows] == [out for out, _ in last]


@each_rank(2, "local")
def test_groups_of_a_transposed_weight_are_runs_of_memory(comm):
    exact = torch.arange(1.0, 13).view(4, 3)  # of other strides than the parameter
    for codec, wanted in (
        (Identity(), exact),
        # of columns, the outermost dimension here
        (OneBit(error_feedback=False), torch.tensor([5.5, 6.5, 7.5]).expand(4, 3)),
    ):
        parameter = nn.Parameter(torch.zeros(3, 4).t())
        options = {"comm": comm.duplicate(60.0), "min_numel": 0}
        with GradientAverager([("weight", parameter)], codec, **options) as averager:
            parameter.grad = exact.clone()
            averager.average()
        assert torch.equal(parameter.grad, wanted)


def test_checkpoints_keep_to_their_memory_format():
    (_, saved), _ = run_local(2, averaged, "last", OneBit(), "all_gather")
    comm = gradcomp.comm.LocalCommunicator.group(2)[0]
    same, other = (
        averager_of(comm, name, OneBit(), exchange="all_gather")[1] for name in ("last", "rows")
    )
    same.load_state_dict(saved)
    with pytest.raises(ValueError, match="channels_last"):
        other.load_state_dict(saved)


@each_rank(2, "local")
def test_ranks_with_other_formats_are_told(comm):
    with pytest.raises(PeerMismatch, match="layout"):
        averaged(comm, ("rows", "last")[comm.rank], TernGrad(), "auto")


@each_rank(2, "local")
def test_all_reduce_takes_tensors_that_fill_their_memory(comm):
    tensor = torch.arange(12.0).view(3, 4)
    mine = tensor.t() * (comm.rank + 1)
    assert torch.equal(gradcomp.all_reduce(mine, Identity(), comm=comm), 1.5 * tensor.t())
    with pytest.raises(PeerMismatch, match="layout"):
        gradcomp.all_reduce(tensor.t() if comm.rank else tensor.view(4, 3), Identity(), comm=comm)


# ---- under DDP -----------------------------------------------------------------------------------


def images(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, 8, 8, generator=generator).to(dtype, memory_format=LAST)


def train(model, optimizer, steps=3):
    for step in range(steps):
        optimizer.zero_grad()
        model(images(step, next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    return bits(model)


@each_rank(2)
def test_channels_last_under_ddp_and_fused():
    """Identity is stock DDP to the bit; updates from payloads are those from gradients, also
    where they are written out.
    """
    plain = DDP(copy.deepcopy(MODELS["last"]))
    packed = DDP(copy.deepcopy(MODELS["last"]), bucket_cap_mb=0.005)
    options = {"min_numel": 0, "exchange": "all_gather"}
    with gradcomp.ddp.register(packed, Identity(), **options) as state:
        runs = {train(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, packed)}
        assert len(runs) == 1
        state.check_replicas()
    fused = set()
    for takes in (True, False):
        model = copy.deepcopy(MODELS["last"])
        optimizer = SplitSGD(split_parameters(model), lr=0.1)
        options = {"min_numel": 0, "optimizer": optimizer if takes else None}
        model = DDP(model)
        with gradcomp.ddp.register(model, "terngrad", **options) as state:
            weights = train(model, optimizer)
            model(images(9, torch.bfloat16)).sum().backward()
            state.materialize_gradients()
            fused.add(weights + bits(p.grad for p in model.parameters()))
    assert len(fused) == 1


@pytest.mark.parametrize("when", ["before", "after"])
@each_rank(2)
def test_a_model_converted_after_wrapping_is_refused_by_name(when):
    model = DDP(copy.deepcopy(MODELS["rows"]))
    if when == "before":
        model.to(memory_format=LAST)
    with gradcomp.ddp.register(model, Identity(), min_numel=0, timeout_s=20):
        if when == "after":
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
            model.to(memory_format=LAST)
        for _ in range(2):
            with pytest.raises(GradcompError, match="weight.*memory format"):
                model(images(0)).sum().backward()
