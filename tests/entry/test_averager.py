"""GradientAverager and all_reduce: models without DDP, over threads and over gloo."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from _models import MODEL, averager_of, bits, filled, loss_of
from _ranks import each_rank, warnings_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import GradientAverager, Identity, OneBit, PeerMismatch, TernGrad, UnsupportedTensor
from gradcomp.allreduce import Feedback
from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.plan.nbytes import predict_bytes


@each_rank(2, "local")
def test_a_missing_gradient_counts_as_zero(comm):
    net, averager = averager_of(comm, Identity(), min_numel=0)
    filled(net, 4.0)
    for p in list(net.parameters())[:2] if comm.rank == 0 else ():
        p.grad = None
    averager.average()
    found = [p.grad.unique().tolist() for p in net.parameters()]
    assert found == [[2.0], [2.0], [4.0], [4.0], [4.0], [4.0]]


@pytest.mark.parametrize("names", [["b", "a"], ["a", "c"]], ids=["order", "name"])
@each_rank(2)
def test_parameters_of_one_shape_with_other_names_are_refused(names):
    there = names if dist.get_rank() else ["a", "b"]
    model = [(name, nn.Parameter(torch.zeros(8, 8))) for name in there]
    for _, p in model:
        p.grad = torch.ones(8, 8)
    with (
        contextlib.closing(GradientAverager(model, "onebit")) as averager,
        pytest.raises(PeerMismatch, match="layout: rank 0 has parameter a .*, rank 1 has param"),
    ):
        averager.average()


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MIX = nn.ModuleList([nn.Linear(32, 32).to(dtype) for dtype in DTYPES])


@each_rank(2, "local")
def test_models_of_several_dtypes(comm):
    net, averager = averager_of(comm, model=MIX, min_numel=0)
    filled(net, float(comm.rank))
    averager.average()
    assert [layer.weight.grad.dtype for layer in net] == DTYPES
    assert averager.stats.nonfinite_buckets == 0


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "codec", [TernGrad(), TernGrad(scale="own"), OneBit()], ids=["shared", "own", "onebit"]
)
@each_rank(3)
def test_predicted_bytes_are_the_bytes_sent(codec, exchange):
    """To the byte, of a DDP step after the bucket rebuild."""
    net = DDP(copy.deepcopy(MODEL), bucket_cap_mb=0.02)
    with gradcomp.ddp.register(net, codec, exchange=exchange) as state:
        for step in range(3):
            state.stats.reset()
            loss_of(net, step, dist.get_rank()).backward()
        shapes = [(n, tuple(p.shape)) for n, p in net.module.named_parameters()]
        options = {"exchange": exchange, "bucket_cap_mb": 0.02, "rank": dist.get_rank()}
        said, stats = predict_bytes(codec, shapes, 3, **options), state.stats
        counted = stats.bytes_sent, stats.bytes_received, stats.baseline_bytes
        assert counted == (said.sent, said.received, said.baseline)


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@each_rank(2)
def test_counted_bytes_are_the_bytes_of_the_buffers(exchange):
    """Promise 1: what really goes into the collectives, behind stats' back. (Own scales: a scale
    round's all_reduce is counted by the ring formula instead.)
    """
    comm, counted = TorchCommunicator(timeout_s=60), [0]
    to_all, gather = comm._start_all_to_all, comm._start_all_gather

    def start_all_to_all(send, send_nbytes, recv, recv_nbytes, channel):
        assert sum(send_nbytes) == send.numel() and sum(recv_nbytes) == recv.numel()
        counted[0] += send.numel() - send_nbytes[comm.rank]
        return to_all(send, send_nbytes, recv, recv_nbytes, channel)

    def start_all_gather(send, recv, channel):
        counted[0] += (comm.world_size - 1) * send.numel()
        return gather(send, recv, channel)

    comm._start_all_to_all, comm._start_all_gather = start_all_to_all, start_all_gather
    net, averager = averager_of(comm, TernGrad(scale="own"), exchange=exchange)
    for step in range(2):
        loss_of(net, step, comm.rank).backward()
        averager.average()
    averager.close()
    assert counted[0] == averager.stats.bytes_sent + averager.stats.setup_bytes


@each_rank(2)
def test_all_reduce_over_the_default_group():
    tensor = torch.full((2000,), float(dist.get_rank()))
    assert gradcomp.all_reduce(tensor, Identity()) is tensor and (tensor == 0.5).all()
    again = gradcomp.all_reduce(torch.ones(2000), TernGrad(clip_sigma=None), key=1)
    assert (again == 1.0).all()


@each_rank(2, "local")
def test_discard_undoes_the_last_all_reduce(comm):
    feedback, seen = Feedback({0: 2000}), []
    for seed in range(3):
        x = torch.randn(2000, generator=torch.Generator().manual_seed(seed))
        gradcomp.all_reduce(x, OneBit(), comm=comm, feedback=feedback)
        seen.append(feedback.residual(0).clone())
    feedback.discard()
    assert torch.equal(feedback.residual(0), seen[1]) and not torch.equal(seen[1], seen[2])


@each_rank(2, "local")
def test_all_reduce_counts_steps_per_key(comm):
    def reduced(**given):
        x = torch.linspace(-1, 1, 1000)
        return bits([gradcomp.all_reduce(x, TernGrad(clip_sigma=None), comm=comm, **given)])

    implicit = [reduced(key=5) for _ in range(2)]
    assert implicit == [reduced(key=5, step=step) for step in range(2)]
    assert implicit[0] != implicit[1] and reduced(key=6) != implicit[0]


@each_rank(2, "local")
def test_freezing_and_unfreezing_after_the_averager_was_made(comm):
    net = copy.deepcopy(MODEL)
    net[0].requires_grad_(False)
    averager = GradientAverager(net.named_parameters(), TernGrad(), comm=comm)
    net[2].requires_grad_(False)
    loss_of(net, 0, comm.rank).backward()
    averager.average()
    assert net[2].weight.grad is None and net[0].weight.grad is None
    net[0].requires_grad_(True)
    with pytest.raises(gradcomp.GradcompError, match="0.weight"):
        averager.average()


@each_rank(2, "local")
def test_a_closure_averages_and_one_optimizer_steps_two_models(comm):
    """Also: a parameter without elements does no harm."""
    nets = [copy.deepcopy(MODEL) for _ in range(2)]
    nets[1].register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    params = [p for net in nets for p in net.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    averagers = [
        GradientAverager(net, Identity(), comm=comm.duplicate(30), optimizer=optimizer)
        for net in nets
    ]
    with pytest.raises(ValueError, match="updates no parameter of this model"):
        averager_of(comm.duplicate(30), optimizer=optimizer)

    def closure(step):
        optimizer.zero_grad()
        nets[1].empty.grad = torch.zeros(0, 4)
        for net, averager in zip(nets, averagers, strict=True):
            loss_of(net, step, comm.rank).backward()
            averager.average()
        return step

    for step in range(3):
        assert optimizer.step(lambda step=step: closure(step)) == step
    for averager in averagers:
        averager.check_replicas()
        averager.close()
    assert bits(nets[0].parameters()) == bits(p for p in nets[1].parameters() if p.numel())


def test_no_group_is_a_clear_error():
    with pytest.raises(RuntimeError, match="init_process_group"):
        gradcomp.all_reduce(torch.ones(4), "terngrad")
    with pytest.raises(RuntimeError, match="torchrun"):
        GradientAverager(MODEL, "terngrad")


# what an averager is made of, codec, error, what it says; options are in engine/test_options.py
WRONG_MODELS = [
    ([], "terngrad", ValueError, "no parameters"),
    (
        nn.Embedding(10, 4, sparse=True),
        "terngrad",
        UnsupportedTensor,
        r"parameter 'weight' of an Embedding.*\(sparse=True\)",
    ),
    (
        nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=True)),
        "terngrad",
        UnsupportedTensor,
        r"parameter '0.weight' of an Embedding.*\(sparse=True\)",
    ),
    (
        nn.Linear(4, 4).requires_grad_(False),
        "terngrad",
        ValueError,
        r"none of the 2 parameters \('weight' \.\.\.\) is trained",
    ),
    (
        [*nn.Linear(4, 4).named_parameters(), *nn.Linear(4, 4).named_parameters()],
        "terngrad",
        ValueError,
        "several parameters are called 'weight'",
    ),
    (
        nn.Linear(4, 4),
        gradcomp.Ternary,
        TypeError,
        r"codec is the class Ternary: write Ternary\(\)",
    ),
]


def test_wrong_arguments():
    comm = LocalCommunicator.group(2)[0]
    for model, codec, error, said in WRONG_MODELS:
        with pytest.raises(error, match=said):
            GradientAverager(model, codec, comm=comm)
    with pytest.raises(ValueError, match="bucket_cap_mb.*0"):
        averager_of(comm, bucket_cap_mb=0)
    for given, said in (
        ({"step": -5}, "-5"),
        ({"key": -3}, "-3"),
        ({"feedback": Feedback({0: 4})}, "feedback"),
    ):
        with pytest.raises(ValueError, match=said):
            gradcomp.all_reduce(torch.ones(4), TernGrad(), comm=comm, **given)
    net = nn.Embedding(10, 4, sparse=True)
    averager = GradientAverager(net.named_parameters(), "terngrad", comm=comm)
    net(torch.tensor([1])).sum().backward()
    said = "the gradient of 'weight' is torch.sparse_coo, .* sparse=False"
    with pytest.raises(UnsupportedTensor, match=said):
        averager.average()
    net, averager = averager_of(comm, model=nn.Linear(4, 4))
    if hasattr(net.weight, "grad_dtype"):  # an older torch refuses such a gradient by itself
        net.weight.grad_dtype = torch.bfloat16
        net.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedTensor, match="bfloat16"):
            averager.average()


@pytest.mark.parametrize(
    ("codec", "shape", "bits"),
    [
        (TernGrad(group="row"), (4096, 1), 34),
        (OneBit(), (300, 9), 8.1),
        (OneBit(), (300, 16), None),
        (TernGrad(), (9,), None),
    ],
)
def test_scales_that_cost_more_than_codes_are_warned_of(codec, shape, bits):
    """A row of one element costs more in ternary than in fp32, and nothing said so."""
    shapes = {"thin.weight": shape, "wide": (40, 40)}
    named = [(name, nn.Parameter(torch.zeros(of))) for name, of in shapes.items()]
    comm = LocalCommunicator.group(2)[0]
    with warnings_of("scale groups") as messages:
        GradientAverager(named, codec, comm=comm, min_numel=0).close()
    assert len(messages) == (bits is not None)
    for text in messages:
        said = f"'thin.weight' has {shape[1]} and costs {bits:.1f} bits"
        assert "1 of" in text and said in text
