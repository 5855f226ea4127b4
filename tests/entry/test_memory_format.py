"""Channels-last and transposed parameters: elements travel in the order in which they lie in
memory.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from _ranks import run_local
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


def averaged(comm, name, codec, exchange):
    """Return averages of small whole numbers, whose sums are exact in any order, and the
    checkpoint.
    """
    net = copy.deepcopy(MODELS[name])
    averager = GradientAverager(
        net.named_parameters(), codec, comm=comm, min_numel=0, exchange=exchange
    )
    with contextlib.closing(averager):
        out = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            for p in net.parameters():
                p.grad = torch.empty_like(p).copy_(
                    torch.randint(-8, 9, p.shape, generator=generator).float()
                )
            averager.average()
            assert all(p.grad.stride() == p.stride() for p in net.parameters())
            out += [p.grad.contiguous().view(-1).tolist() for p in net.parameters()]
        return out, averager.state_dict()


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
def test_channels_last_is_averaged_as_the_contiguous_model(exchange):
    rows, last = (run_local(2, averaged, name, Identity(), exchange) for name in MODELS)
    assert [out for out, _ in rows] == [out for out, _ in last]


def test_a_row_is_the_same_row_in_channels_last():
    """The first dimension is outermost in memory in both formats, so 1-bit groups are those of
    one output channel.
    """
    codec = OneBit(error_feedback=False)
    rows, last = (run_local(2, averaged, name, codec, "all_gather") for name in MODELS)
    assert rows[0][0] == last[0][0]


def transposed(comm, codec):
    parameter = nn.Parameter(torch.zeros(3, 4).t())
    averager = GradientAverager([("weight", parameter)], codec, comm=comm, min_numel=0)
    with contextlib.closing(averager):
        parameter.grad = torch.arange(1.0, 13).view(4, 3)  # of other strides than the parameter
        averager.average()
        return parameter.grad


def test_groups_of_a_transposed_weight_are_runs_of_memory():
    assert torch.equal(run_local(2, transposed, Identity())[0], torch.arange(1.0, 13).view(4, 3))
    means = run_local(2, transposed, OneBit(error_feedback=False))[0]
    # of columns, the outermost dimension here
    assert torch.equal(means, torch.tensor([5.5, 6.5, 7.5]).expand(4, 3))


def test_checkpoints_keep_to_their_memory_format():
    (_, saved), _ = run_local(2, averaged, "last", OneBit(), "all_gather")
    comm = gradcomp.comm.LocalCommunicator.group(2)[0]
    same, other = (
        GradientAverager(
            MODELS[name].named_parameters(), OneBit(), comm=comm, min_numel=0, exchange="all_gather"
        )
        for name in ("last", "rows")
    )
    same.load_state_dict(saved)
    with pytest.raises(ValueError, match="channels_last"):
        other.load_state_dict(saved)


def formats_differ(comm):
    return averaged(comm, ("rows", "last")[comm.rank], TernGrad(), "auto")


def test_ranks_with_other_formats_are_told():
    with pytest.raises(PeerMismatch, match="layout"):
        run_local(2, formats_differ)


def reduced(comm, transpose):
    tensor = torch.arange(12.0).view(3, 4)
    tensor = (
        tensor.t()
        if transpose == "all" or (transpose == "one" and comm.rank)
        else tensor.view(4, 3)
    )
    return gradcomp.all_reduce(tensor * (comm.rank + 1), Identity(), comm=comm)


def test_all_reduce_takes_tensors_that_fill_their_memory():
    assert torch.equal(run_local(2, reduced, "all")[1], 1.5 * torch.arange(12.0).view(3, 4).t())
    with pytest.raises(PeerMismatch, match="layout"):
        run_local(2, reduced, "one")


# ---- under DDP -----------------------------------------------------------------------------------


def images(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, 8, 8, generator=generator).to(memory_format=LAST)


def train(model, optimizer, steps=3, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(images(step).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def under_ddp():
    plain, packed = (
        DDP(copy.deepcopy(MODELS["last"])),
        DDP(copy.deepcopy(MODELS["last"]), bucket_cap_mb=0.005),
    )
    state = gradcomp.ddp.register(packed, Identity(), min_numel=0, exchange="all_gather")
    runs = [train(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (plain, packed)]
    state.check_replicas()
    state.close()
    fused = []
    for optimize in (True, False):
        model = copy.deepcopy(MODELS["last"])
        optimizer = SplitSGD(split_parameters(model), lr=0.1)
        model = DDP(model)
        state = gradcomp.ddp.register(
            model, "terngrad", min_numel=0, optimizer=optimizer if optimize else None
        )
        fused.append(train(model, optimizer))
        model(images(9).bfloat16()).sum().backward()
        state.materialize_gradients()
        fused[-1] += [p.grad.clone() for p in model.parameters()]
        state.close()
    return [all(map(torch.equal, *pair)) for pair in (runs, fused)]


def test_channels_last_under_ddp_and_fused(gloo):
    """Identity is stock DDP to the bit; updates from payloads are those from gradients, also
    where they are written out.
    """
    assert gloo(2, under_ddp) == [[True, True]] * 2


def converted(when):
    model = DDP(copy.deepcopy(MODELS["rows"]))
    if when == "before":
        model.to(memory_format=LAST)
    state = gradcomp.ddp.register(model, Identity(), min_numel=0, timeout_s=20)
    if when == "after":
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
        model.to(memory_format=LAST)
    errors = []
    for _ in range(2):
        with pytest.raises(GradcompError, match="memory format") as caught:
            model(images(0)).sum().backward()
        errors.append(str(caught.value))
    state.close()
    return errors[0] == errors[1], "weight" in errors[0]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_converted_after_wrapping_is_refused_by_name(gloo, when):
    assert gloo(2, converted, when) == [(True, True)] * 2
