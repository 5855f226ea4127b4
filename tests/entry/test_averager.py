"""GradientAverager and all_reduce: models without DDP, over threads and over gloo."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from _ranks import run_local
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp
import gradcomp.ddp
from gradcomp import GradientAverager, Identity, OneBit, TernGrad, UnsupportedTensor
from gradcomp.allreduce import Feedback
from gradcomp.comm import LocalCommunicator, TorchCommunicator
from gradcomp.plan.nbytes import predict_bytes


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
    )


# threads share torch's global generator, so models are made once and copied
MODEL, OTHER = (model(0), model(1))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 64, generator=generator), torch.randint(10, (8,), generator=generator)


@pytest.fixture
def one_thread():
    """Matrix products of torch depend on its number of threads; ranks in processes have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(net):
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


def train(net, averager, rank, steps):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if averager is not None:
            averager.average()
        optimizer.step()
    return bits(net)


def with_averager(comm, codec, cap, steps=4):
    net = copy.deepcopy(MODEL)
    averager = GradientAverager(
        net.named_parameters(), codec, comm=comm, min_numel=0, bucket_cap_mb=cap
    )
    out = train(net, averager, comm.rank, steps)
    averager.check_replicas()
    sent = averager.stats.bytes_sent
    return out, sent


@pytest.mark.parametrize(
    "codec", [TernGrad(), TernGrad(second_phase="requantize"), OneBit(), Identity()], ids=repr
)
def test_same_run_over_threads_and_gloo_and_any_bucket_size(gloo, codec, one_thread):
    """Promise 2 over transports: LocalCommunicator and gloo give the same bits, whatever the
    buckets.
    """
    runs = {run_local(3, with_averager, codec, cap)[r][0] for cap in (0.01, 25) for r in range(3)}
    runs |= {out for out, _ in gloo(3, over_gloo, codec)}
    assert len(runs) == 1


def over_gloo(codec):
    return with_averager(TorchCommunicator(timeout_s=60), codec, 25)


def missing(comm):
    net = copy.deepcopy(MODEL)
    averager = GradientAverager(net.named_parameters(), Identity(), comm=comm, min_numel=0)
    for index, p in enumerate(net.parameters()):
        p.grad = None if comm.rank == 0 and index < 2 else torch.full_like(p, 4.0)
    averager.average()
    return [p.grad.unique().tolist() for p in net.parameters()]


def test_a_missing_gradient_counts_as_zero():
    for grads in run_local(2, missing):
        assert grads == [[2.0], [2.0], [4.0], [4.0], [4.0], [4.0]]


MIX = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32).bfloat16(), nn.Linear(32, 32).half()])


def half_precision_mix(comm):
    net = copy.deepcopy(MIX)
    averager = GradientAverager(net.named_parameters(), "terngrad", comm=comm, min_numel=0)
    for p in net.parameters():
        p.grad = torch.full_like(p, float(comm.rank))
    averager.average()
    dtypes = {p.grad.dtype for p in net.parameters()}
    return dtypes, averager.stats.nonfinite_buckets


def test_models_of_several_dtypes():
    for dtypes, bad in run_local(2, half_precision_mix):
        assert dtypes == {torch.float32, torch.bfloat16, torch.float16}
        assert bad == 0


def bytes_counted(codec, exchange, world):
    """Real DDP steps: what stats counts is what predict_bytes says, to the byte, after the
    bucket rebuild.
    """
    net = DDP(copy.deepcopy(MODEL), bucket_cap_mb=0.02)
    state = gradcomp.ddp.register(net, codec, exchange=exchange)
    for step in range(3):
        if step == 2:
            state.stats.reset()
        x, y = batch(step, dist.get_rank())
        nn.functional.cross_entropy(net(x), y).backward()
    shapes = [(n, tuple(p.shape)) for n, p in net.module.named_parameters()]
    said = predict_bytes(
        codec, shapes, world, exchange=exchange, bucket_cap_mb=0.02, rank=dist.get_rank()
    )
    stats = state.stats
    state.close()
    return (stats.bytes_sent, stats.bytes_received, stats.baseline_bytes), (
        said.sent,
        said.received,
        said.baseline,
    )


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    "codec", [TernGrad(), TernGrad(scale="own"), OneBit()], ids=["shared", "own", "onebit"]
)
def test_predicted_bytes_are_the_bytes_sent(gloo, codec, exchange):
    for counted, predicted in gloo(3, bytes_counted, codec, exchange, 3):
        assert counted == predicted


def wire_bytes(codec, exchange):
    """Count what really goes into the collectives, behind stats' back."""
    comm, counted = TorchCommunicator(timeout_s=60), [0]
    rank, world = comm.rank, comm.world_size
    to_all, gather = comm._start_all_to_all, comm._start_all_gather

    def start_all_to_all(send, send_nbytes, recv, recv_nbytes, channel):
        assert sum(send_nbytes) == send.numel() and sum(recv_nbytes) == recv.numel()
        counted[0] += send.numel() - send_nbytes[rank]
        return to_all(send, send_nbytes, recv, recv_nbytes, channel)

    def start_all_gather(send, recv, channel):
        counted[0] += (world - 1) * send.numel()
        return gather(send, recv, channel)

    comm._start_all_to_all, comm._start_all_gather = start_all_to_all, start_all_gather
    net = copy.deepcopy(MODEL)
    averager = GradientAverager(net.named_parameters(), codec, comm=comm, exchange=exchange)
    train(net, averager, rank, 2)
    stats = averager.stats
    averager.close()
    return counted[0], stats.bytes_sent + stats.setup_bytes


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
def test_counted_bytes_are_the_bytes_of_the_buffers(gloo, exchange):
    """Promise 1. (Own scales: a scale round's all_reduce is counted by the ring formula
    instead.)
    """
    for sent, counted in gloo(2, wire_bytes, TernGrad(scale="own"), exchange):
        assert sent == counted


def default_group():
    tensor = torch.full((2000,), float(dist.get_rank()))
    out = gradcomp.all_reduce(tensor, Identity())
    again = gradcomp.all_reduce(torch.full((2000,), 1.0), TernGrad(clip_sigma=None), key=1)
    return out is tensor, tensor.unique().tolist(), again.unique().tolist()


def test_all_reduce_over_the_default_group(gloo):
    assert gloo(2, default_group) == [(True, [0.5], [1.0])] * 2


def counted_steps(comm):
    x = torch.linspace(-1, 1, 1000)
    codec = TernGrad(clip_sigma=None)
    implicit = [gradcomp.all_reduce(x.clone(), codec, comm=comm, key=5) for _ in range(2)]
    explicit = [gradcomp.all_reduce(x.clone(), codec, comm=comm, key=5, step=s) for s in range(2)]
    other_key = gradcomp.all_reduce(x.clone(), codec, comm=comm, key=6)
    return (
        [torch.equal(a, b) for a, b in zip(implicit, explicit)],
        torch.equal(implicit[0], implicit[1]),
        torch.equal(other_key, implicit[0]),
    )


def test_discard_undoes_the_last_all_reduce():
    def run(comm):
        feedback, seen = Feedback({0: 2000}), []
        for seed in range(3):
            x = torch.randn(2000, generator=torch.Generator().manual_seed(seed))
            gradcomp.all_reduce(x, OneBit(), comm=comm, feedback=feedback)
            seen.append(feedback.residual(0).clone())
        feedback.discard()
        return torch.equal(feedback.residual(0), seen[1]) and not torch.equal(seen[1], seen[2])

    assert run_local(2, run) == [True, True]


def test_all_reduce_counts_steps_per_key():
    assert run_local(2, counted_steps) == [([True, True], False, False)] * 2


def test_freezing_and_unfreezing_after_the_averager_was_made():
    def work(comm):
        net = copy.deepcopy(MODEL)
        net[0].requires_grad_(False)
        averager = GradientAverager(net.named_parameters(), TernGrad(), comm=comm)
        net[2].requires_grad_(False)
        x, y = batch(0, comm.rank)
        nn.functional.cross_entropy(net(x), y).backward()
        averager.average()
        untouched = net[2].weight.grad is None and net[0].weight.grad is None
        net[0].requires_grad_(True)
        with pytest.raises(gradcomp.GradcompError, match="0.weight"):
            averager.average()
        return untouched

    assert run_local(2, work) == [True, True]


def test_no_group_is_a_clear_error():
    with pytest.raises(RuntimeError, match="init_process_group"):
        gradcomp.all_reduce(torch.ones(4), "terngrad")
    with pytest.raises(RuntimeError, match="torchrun"):
        GradientAverager(model().named_parameters(), "terngrad")


def test_wrong_arguments():
    comm = LocalCommunicator.group(2)[0]
    named = list(model().named_parameters())
    for options in (
        {"bucket_cap_mb": 0},
        {"min_numel": -1},
        {"warmup_steps": -2},
        {"exchange": "ring"},
        {"timeout_s": -1},
    ):
        (value,) = options.values()
        with pytest.raises(ValueError, match=str(value)):
            GradientAverager(named, "terngrad", comm=comm, **options)
    with pytest.raises(ValueError, match="no parameters"):
        GradientAverager([], "terngrad", comm=comm)
    with pytest.raises(ValueError, match="get_scale"):
        GradientAverager(named, "terngrad", comm=comm, grad_scaler=3)
    with pytest.raises(ValueError, match="-5"):
        gradcomp.all_reduce(torch.ones(4), TernGrad(), comm=comm, step=-5)
    with pytest.raises(ValueError, match="feedback"):
        gradcomp.all_reduce(
            torch.ones(4), TernGrad(), comm=comm, feedback=gradcomp.allreduce.Feedback({0: 4})
        )
    with pytest.raises(ValueError, match="-3"):
        gradcomp.all_reduce(torch.ones(4), TernGrad(), comm=comm, key=-3)
    net = nn.Embedding(10, 4, sparse=True)
    averager = GradientAverager(net.named_parameters(), "terngrad", comm=comm)
    net(torch.tensor([1])).sum().backward()
    with pytest.raises(
        UnsupportedTensor, match="the gradient of 'weight' is torch.sparse_coo, .* sparse=False"
    ):
        averager.average()
    for made, name in (
        (net, "weight"),
        (nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum", sparse=True)), "0.weight"),
    ):
        with pytest.raises(
            UnsupportedTensor, match=rf"parameter '{name}' of an Embedding.*\(sparse=True\)"
        ):
            GradientAverager(made, "terngrad", comm=comm)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"none of the 2 parameters \('weight' \.\.\.\) is trained"
    ):
        GradientAverager(frozen, "terngrad", comm=comm)
    with pytest.raises(TypeError, match=r"codec is the class Ternary: write Ternary\(\)"):
        GradientAverager(nn.Linear(4, 4), gradcomp.Ternary, comm=comm)
    net = nn.Linear(4, 4)
    if hasattr(net.weight, "grad_dtype"):  # an older torch refuses such a gradient by itself
        net.weight.grad_dtype = torch.bfloat16
        net.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
        with pytest.raises(UnsupportedTensor, match="bfloat16"):
            GradientAverager(net.named_parameters(), "terngrad", comm=comm).average()


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
    named = [
        ("thin.weight", nn.Parameter(torch.zeros(shape))),
        ("wide", nn.Parameter(torch.zeros(40, 40))),
    ]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        GradientAverager(named, codec, comm=LocalCommunicator.group(2)[0], min_numel=0).close()
    messages = [str(w.message) for w in seen if "scale groups" in str(w.message)]
    assert len(messages) == (bits is not None)
    assert not messages or (
        "1 of" in messages[0]
        and f"'thin.weight' has {shape[1]} and costs {bits:.1f} bits" in messages[0]
    )
