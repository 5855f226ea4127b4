"""Every entry point on an accelerator gives the bits that it gives on the CPU, and each wait that
orders copies is needed.

The accelerator is a device for tests (`_lazy`): real tensors of torch's PrivateUse1, whose memory
the host cannot read and whose copies are made only when somebody waits for them. No GPU is needed;
`make test-cuda` runs the same on one, and none has yet.
"""

import contextlib
import copy
import hashlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _hosted import HostedKernels
from _ranks import RankFailed, each_rank, run_local
from _saved import bits_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradcomp
from gradcomp import (
    Advanced,
    EntropyCoded,
    OneBit,
    PeerMismatch,
    Ternary,
    UnsupportedTensor,
    kernels,
)
from gradcomp.allreduce import Feedback
from gradcomp.integrations.torchtitan import ReplicaAverage
from gradcomp.kernels import check, staging
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer, LocalAdagrad
from gradcomp.onebit_sgd.restore import rolled_back
from gradcomp.optim import fp32_state_dict, split_parameters
from gradcomp.optim.placeholder import Placeholder

STEPS = 5


def digest(*values):
    """Return a hash of the bits of tensors, in any nesting of lists and dicts."""
    return hashlib.sha256(repr(bits_of(values)).encode()).hexdigest()


class Layer(nn.Module):
    """Its parameters' gradients are what it is given, to the last bit, on any device."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))
        self.bias = nn.Parameter(torch.randn(rows))

    def forward(self, before, weight, bias):
        before = before.to(self.weight.device)
        return before + (self.weight * weight).sum() + (self.bias * bias).sum()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(65, 48), Layer(40, 65)])

    def forward(self, batch):
        out = batch[0][0].new_zeros(())
        for layer, given in zip(self.layers, batch, strict=True):
            out = layer(out, *given)
        return out


def network(device):
    """Return a model, and what its gradients are in every step: the same on every device."""
    torch.manual_seed(0)
    model = Network()
    torch.manual_seed(dist.get_rank())
    sizes = [(layer.weight.shape, layer.bias.shape) for layer in model.layers]
    data = [[tuple(map(torch.randn, two)) for two in sizes] for _ in range(STEPS)]
    return model.to(device), moved(data, device, device)


def moved(data, *devices):
    """Return what layers are given on the device of each."""
    return [
        [tuple(x.to(device) for x in given) for given, device in zip(batch, devices, strict=True)]
        for batch in data
    ]


def sgd(model):
    """Return an optimizer whose products are exact, whether or not a device fuses them."""
    return torch.optim.SGD(model.parameters(), lr=2**-4, momentum=0.5)


def train(model, data, optimizer, after_backward=lambda: None):
    for batch in data:
        optimizer.zero_grad()
        model(batch).backward()
        after_backward()
        optimizer.step()


# ---- entry points: each returns what must be the same on every device ----------------------------


def by_ddp(device, codec="onebit", group=None, **options):
    model, data = network(device)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, process_group=group)
    optimizer = sgd(model)
    state = gradcomp.ddp.register(model, codec, min_numel=0, optimizer=optimizer, **options)
    copied = f"{device} tensors are copied to the host" in state.describe()
    assert copied == (
        kernels.encoding_device(next(model.parameters()).device) != next(model.parameters()).device
    )
    train(model, data[:3], optimizer)
    saved = state.state_dict()
    train(model, data[3:], optimizer)
    state.check_replicas()
    after = state.state_dict()
    state.load_state_dict(saved)
    train(model, data[:1], optimizer)
    state.close()
    return digest(list(model.parameters()), saved, after)


def by_split_weights(device, optimizer="SplitSGD", entry="ddp", **options):
    """DDP updates from payloads where the weights' device encodes, all others from averages."""
    model, data = network(device)
    options |= {"lr": 0.01, "weight_decay": 0.1}
    parameters = split_parameters(
        model, predicate=lambda name, p: name != "layers.1.bias", rounding="nearest"
    )
    optimizer = getattr(gradcomp.optim, optimizer)(parameters, **options)
    if entry == "ddp":
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        state = gradcomp.ddp.register(model, "onebit", min_numel=0, optimizer=optimizer)
        there = next(model.parameters()).device
        assert state.describe().endswith(
            "from payloads to weights"
            if kernels.encoding_device(there) == there
            else "weights are on an accelerator"
        )
        train(model, data, optimizer)
        state.check_replicas()
    else:
        state = gradcomp.GradientAverager(model, "ternary", min_numel=0, optimizer=optimizer)
        train(model, data, optimizer, state.average)
    saved = state.state_dict()
    state.close()
    trails = optimizer.state_dict()["state"]
    return digest(list(model.parameters()), trails, fp32_state_dict(model, optimizer), saved)


def by_fused(device, optimizer="SplitSGD", codec="onebit", *, ddp=(), to_none=True, **given):
    """Clipped, skipped and changed gradients, and a checkpoint, all with updates from payloads if
    the weights' device encodes.
    """
    model, data = network(device)
    parameters = split_parameters(model, predicate=lambda name, p: name != "layers.1.bias")
    optimizer = getattr(gradcomp.optim, optimizer)(parameters, lr=0.01, weight_decay=0.1)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01, **dict(ddp))
    state = gradcomp.ddp.register(model, codec, min_numel=0, optimizer=optimizer, **given)
    assert state.describe().endswith("from payloads to weights")
    if dist.get_rank() == 1:
        data[2][0][0][3, 4] = float("nan")
    parts, packed, norms, saved = (model, optimizer, state), [], [], []

    def step(number, batch):
        optimizer.zero_grad(set_to_none=to_none)
        model(batch).backward()
        packed.append(sum(isinstance(p.grad, Placeholder) for p in model.parameters()))
        if number == 1:
            norms.append(state.clip_grad_norm_(0.5))
            assert norms[-1].device == next(model.parameters()).device
        if number == 2:
            norms.append(state.clip_grad_norm_(0.5))
            state.discard_step()
            return  # skipped
        if number == 3:
            state.materialize_gradients()
            model.module.layers[1].weight.grad.mul_(0.5)
        if number == 4:
            model.module.layers[0].bias.grad.data.zero_()
        optimizer.step()

    for number, batch in enumerate(data):
        step(number, batch)
    saved.append(copy.deepcopy([part.state_dict() for part in parts]))
    for _ in range(2):  # the second time from the saved states
        step(0, data[0])
        saved.append(copy.deepcopy([part.state_dict() for part in parts]))
        for part, one in zip(parts, saved[0], strict=True):
            part.load_state_dict(one)
    assert bits_of(saved[1]) == bits_of(saved[2]) != bits_of(saved[0])
    state.check_replicas()
    state.close()
    assert norms[0] > 0.5 and norms[1].isnan()
    assert (packed[1] == 4) is (packed[3] == 4) is to_none
    return digest(saved, norms), packed


def by_mixed_group(device):
    """A process group with a backend for each kind of device, as ``"cpu:gloo,cuda:nccl"``. (NCCL
    takes one rank per GPU; these share one.)
    """
    backends = {"cpu": "gloo", "lazy": "_lazy", "cuda": "gloo"}
    mixed = {name: backends[name] for name in dict.fromkeys(("cpu", device))}
    group = dist.new_group(backend=",".join(f"{name}:{backend}" for name, backend in mixed.items()))
    digests = by_ddp(device, group=group)
    dist.destroy_process_group(group)
    return digests


def by_ddp_of_a_stream(device, codec="ternary"):
    """As on a GPU with everything on a stream of the user's."""
    around = torch.Stream(device) if device != "cpu" else contextlib.nullcontext()
    with around:
        return by_ddp(device, codec)


def by_averager(device, codec="ternary", *, devices=1, delayed=False, **options):
    model, data = network(device)
    if device != "cpu" and devices > 1:  # one layer here, the other one elsewhere
        other = f"{device}:{torch.accelerator.device_count() - 1}"
        model.layers[0].to("cpu"), model.layers[1].to(other)
        data = moved(data, "cpu", other)
    averager = gradcomp.GradientAverager(model, codec, min_numel=0, bucket_cap_mb=0.01, **options)
    average = averager.average_delayed if delayed else averager.average
    train(model, data, sgd(model), average)
    if delayed:
        averager.flush()
    gradients = [p.grad for p in model.parameters()]
    state = averager.state_dict()
    averager.close()
    return digest(list(model.parameters()), gradients, state)


def by_one_rank(device):
    """Residuals of two ranks are handed out, and a transform has its say."""
    options = {"min_numel": 0, "advanced": Advanced(transform=LocalAdagrad())}

    def averaged(comm, states=None):
        p = nn.Parameter(torch.zeros(40, 30, device=device))
        with gradcomp.GradientAverager([("w", p)], "onebit", comm=comm, **options) as averager:
            if states is not None:
                averager.load_state_dict(states)
            draws = torch.Generator().manual_seed(comm.rank)
            found = []
            for _ in range(3):
                p.grad = torch.randn(40, 30, generator=draws).to(device)
                averager.average()
                found.append(p.grad.clone())
            return found, averager.state_dict()

    if dist.get_rank():
        return None
    states = [state for _, state in run_local(2, averaged)]
    return digest(run_local(1, partial(averaged, states=states))[0])


def by_all_reduce(device, codec="onebit"):
    feedback = Feedback({3: 4 * 6 * 5 * 5}) if codec == "onebit" else None
    torch.manual_seed(dist.get_rank())
    found = []
    for order in (torch.contiguous_format, torch.channels_last):
        for _ in range(2):
            given = torch.randn(4, 6, 5, 5).to(device).to(memory_format=order)
            gradcomp.all_reduce(given, codec, key=3, feedback=feedback)
            found.append(given * 2)  # at once
    return digest(found)


def by_local_steps(device, codec="ternary", **options):
    model, data = network(device)
    inner = sgd(model)
    local = gradcomp.DiLoCo(model, inner, codec, sync_every=2, **options)
    for batch in data:
        train(model, [batch], inner)
        local.step()
    state = local.state_dict()
    local.close()
    return digest(list(model.parameters()), state)


def by_scaler(device):
    model, data = network(device)
    scaler = gradcomp.amp.DynamicLossScaler(scale=256.0, interval=2)
    averager = gradcomp.GradientAverager(model, "onebit", min_numel=0, grad_scaler=scaler)
    optimizer = sgd(model)
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        scaler.scale(model(batch)).backward()
        if number == 1 and dist.get_rank() == 1:
            model.layers[0].bias.grad[0] = float("inf")
        averager.average()
        scaler.step(optimizer)
        scaler.update()
    state = averager.state_dict()
    averager.close()
    return digest(list(model.parameters()), state, scaler.state_dict())


def by_double_buffer(device):
    model, data = network(device)
    options = {"min_numel": 0, "advanced": Advanced(transform=AggregateAdagrad())}
    options |= {"exchange": "reduce_scatter", "whole_steps": True}
    with DoubleBuffer(model, sgd(model), "onebit", **options) as buffer:
        for batch in data:
            buffer.step(model, batch)
        buffer.drain()
        return digest(list(model.parameters()), buffer.state_dict())


def by_default_device(device):
    """Of a program that has every new tensor made on its device."""
    with torch.device(device):
        return digest(by_averager(device), by_all_reduce(device), by_local_steps(device))


def by_parameter_that_requires_grad(device):
    p = nn.Parameter(torch.full((6,), float(dist.get_rank())).to(device))
    with torch.no_grad():
        gradcomp.all_reduce(p, "bfloat16", key=1)
    return digest(p)


def by_fsdp(device, codec="ternary", **options):
    model, data = network(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
    state = gradcomp.fsdp.register(model, codec, min_numel=0, **options)
    train(model, data, sgd(model))
    saved = {key: value for key, value in state.state_dict().items() if key != "parameters"}
    local = [p.to_local() for p in model.parameters()]
    state.close()
    return digest(local, sorted(saved))


def by_codec(device):
    torch.manual_seed(0)
    found = []
    for codec in (OneBit(), Ternary(), EntropyCoded(2.2), gradcomp.TernGrad()):
        x = torch.randn(40, 129).to(device)
        residual = torch.randn(40 * 129).to(device) if codec.error_feedback else None
        payload = codec.encode(x, residual=residual)
        out = torch.zeros(x.numel(), device=device)
        assert payload.is_cpu
        assert codec.decode(payload, out=out) is out
        found += [payload, out, residual, codec.decode(payload)]
    found.append(gradcomp.TernGrad().encode(x, scale=x.abs().max()))
    return digest(found)


def by_nonfinite_steps(device, **options):
    """Steps in which some rank has NaN leave NaN everywhere and residuals as they were."""
    model, data = network(device)
    averager = gradcomp.GradientAverager(model, "onebit", min_numel=0, **options)
    found = []
    for number, batch in enumerate(data):
        model.zero_grad()
        model(batch).backward()
        if number == 2 and dist.get_rank() == 1:
            model.layers[0].weight.grad[3, 4] = float("nan")
        averager.average()
        found.append([p.grad.isnan().all() for p in model.parameters()])
        found.append(averager.state_dict())
    averager.close()
    assert any(map(bool, found[4])), found[4]
    return digest(found)


def by_replicas(device):
    """Plain FSDP2 inside a node; gradients of shards packed between nodes."""
    model, data = network(device)
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("replica", "shard"))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    group = mesh["replica"].get_group()
    with ReplicaAverage(model, group, "onebit", min_numel=0) as replicas:
        train(model, data, sgd(model))
        return digest([p.to_local() for p in model.parameters()], replicas.averager.state_dict())


SAME = {
    "ddp": (by_ddp, {}),
    "ddp ternary": (by_ddp, {"codec": Ternary(), "precondition": True}),
    "ddp entropy": (by_ddp, {"codec": EntropyCoded(2.2), "exchange": "reduce_scatter"}),
    "ddp slices": (by_ddp, {"codec": "terngrad", "advanced": Advanced(slice_numel=512)}),
    "ddp rotated": (by_ddp, {"codec": OneBit(rotate=True)}),
    "ddp atomic": (by_ddp, {"atomic_steps": True, "warmup_steps": 2}),
    "ddp auto": (by_ddp, {"codec": "auto"}),
    "ddp of split weights": (by_split_weights, {"momentum": 0.9}),
    "ddp of split weights, lamb": (by_split_weights, {"optimizer": "SplitLAMB"}),
    "averager of split weights": (
        by_split_weights,
        {"optimizer": "SplitAdamW", "entry": "averager"},
    ),
    "a stream of the user's": (by_ddp_of_a_stream, {}),
    "a group of two backends": (by_mixed_group, {}),
    "averager": (by_averager, {}),
    "averager delayed": (by_averager, {"delayed": True}),
    "averager on two devices": (by_averager, {"devices": 2}),
    "averager on two devices, delayed": (by_averager, {"devices": 2, "delayed": True}),
    "averager of one rank": (by_one_rank, {}),
    "all_reduce": (by_all_reduce, {}),
    "all_reduce terngrad": (by_all_reduce, {"codec": "terngrad"}),
    "local steps": (by_local_steps, {}),
    "local steps, fragments": (by_local_steps, {"fragments": 2, "fragment_sync_delay": 1}),
    "loss scaler": (by_scaler, {}),
    "double buffer": (by_double_buffer, {}),
    "default device": (by_default_device, {}),
    "a parameter itself": (by_parameter_that_requires_grad, {}),
    "fsdp": (by_fsdp, {}),
    "fsdp with weights": (by_fsdp, {"codec": "onebit", "weights": "block8"}),
    "fsdp, kept weights": (by_fsdp, {"weights": "block8", "keep_weights": True}),
    "fsdp, warm-up": (by_fsdp, {"warmup_steps": 6, "residuals": "bf16"}),
    "codecs": (by_codec, {}),
    "not finite": (by_nonfinite_steps, {}),
    "not finite, atomic": (by_nonfinite_steps, {"atomic_steps": True}),
}


@pytest.mark.every_row
@pytest.mark.parametrize("row", SAME)
def test_bits_are_those_of_the_cpu(gloo, accelerator, row):
    function, options = SAME[row]
    expected = gloo(2, on, function, "cpu", options)
    assert accelerator(2, on, function, None, options) == expected


FUSED = {
    "sgd": (by_fused, {}),
    "adamw": (
        by_fused,
        {"optimizer": "SplitAdamW", "codec": EntropyCoded(2.2), "exchange": "reduce_scatter"},
    ),
    "lamb": (
        by_fused,
        {"optimizer": "SplitLAMB", "codec": Ternary(), "ddp": {"gradient_as_bucket_view": True}},
    ),
    "adagrad": (by_fused, {"optimizer": "SplitAdagrad", "warmup_steps": 2, "atomic_steps": True}),
    "between nodes": (
        by_fused,
        {"exchange": "hierarchical", "advanced": Advanced(nodes=((0,), (1,)))},
    ),
    "averages that are unpacked": (
        by_fused,
        {"ddp": {"find_unused_parameters": True}, "to_none": False},
    ),
}
BY_KERNELS = [
    "ddp",
    "ddp ternary",
    "ddp entropy",
    "ddp slices",
    "ddp of split weights",
    "ddp of split weights, lamb",
    "averager of split weights",
    "a stream of the user's",
    "averager delayed",
    "averager on two devices",
    "all_reduce",
    "all_reduce terngrad",
    "loss scaler",
    "double buffer",
    "fsdp",
    "fsdp with weights",
    "fsdp, kept weights",
    "fsdp, warm-up",
    "codecs",
    "not finite, atomic",
]


@pytest.mark.every_row
@pytest.mark.parametrize("row", BY_KERNELS)
def test_bits_are_those_of_the_cpu_where_the_device_has_kernels(gloo, accelerator, row):
    """A GPU's are Triton's; the device for tests has the CPU's, on copies (`_hosted`)."""
    function, options = SAME[row]
    expected = gloo(2, on, function, "cpu", options)
    assert accelerator(2, by_kernels, function, options) == expected


@pytest.mark.every_row
@pytest.mark.parametrize("row", FUSED)
def test_updates_from_payloads_on_a_device_with_kernels_are_those_of_the_cpu(
    gloo, accelerator, row
):
    """On a GPU these are Triton's programs, which `tests/kernels/test_cuda.py` runs interpreted."""
    function, options = FUSED[row]
    expected = gloo(2, on, function, "cpu", options)
    assert accelerator(2, by_kernels, function, options) == expected


def by_kernels(function, options):
    device = torch.accelerator.current_accelerator().type
    with encoding(device):
        return on(function, device, options)


@contextlib.contextmanager
def encoding(device):
    """Let a device encode: by the kernels for GPUs, or `HostedKernels`."""
    made = []

    def make(there):
        if device == "cuda":
            from gradcomp.kernels.cuda import TritonKernels

            made.append(check.checked(there, TritonKernels))
        else:
            made.append(HostedKernels(there))
        return made[-1]

    before = kernels.install(device, make)
    try:
        yield
    finally:
        kernels.install(device, before)
    assert made and all(made)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (by_ddp, {"exchange": "hierarchical", "advanced": Advanced(nodes=((0, 1), (2, 3)))}),
        (by_replicas, {}),
    ],
)
def test_bits_are_those_of_the_cpu_between_nodes(gloo, accelerator, function, options):
    expected = gloo(4, on, function, "cpu", options)
    assert accelerator(4, on, function, None, options) == expected


@each_rank(2, "lazy")
def test_a_device_that_fails_ends_the_step_on_every_rank():
    """Not even NaN can be written to it: the backward pass that waits for averages ends."""
    model, data = network("lazy")
    model = nn.parallel.DistributedDataParallel(model)
    state = gradcomp.ddp.register(model, "onebit")
    train(model, data[:1], sgd(model))
    broken = mock.Mock(side_effect=RuntimeError("the device is lost"))
    ours = dist.get_rank() == 1
    with (
        mock.patch("gradcomp.engine.step.on_stream", broken) if ours else contextlib.nullcontext(),
        mock.patch.object(staging.Staged, "give", broken) if ours else contextlib.nullcontext(),
        pytest.raises((RuntimeError, gradcomp.PeerLost)) as error,
    ):
        train(model, data, sgd(model))
    state.close()
    if ours:
        assert "the device is lost" in str(error.value)  # as C++ has it: "Unable to cast ..."
    else:
        assert error.type is gradcomp.PeerLost


@each_rank(2, "lazy")
def test_a_device_without_memory_left_changes_no_state():
    """On one rank, in the middle of a step: both are told, and keep the state of before."""
    model, data = network("lazy")
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = sgd(model)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, atomic_steps=True, timeout_s=20)
    train(model, data[:2], optimizer)
    before, weights = digest(state.state_dict()), digest(list(model.parameters()))
    instead = contextlib.nullcontext()
    if dist.get_rank() == 1:
        full = torch.OutOfMemoryError("out of memory, says the test")
        instead = mock.patch.object(staging.Staged, "wait", side_effect=full)
    with instead, pytest.raises((RuntimeError, gradcomp.PeerLost), match="out of memory, says"):
        train(model, data[2:3], optimizer)
    assert digest(list(model.parameters())) == weights
    assert digest(state.state_dict()) == before
    state.close()


def fused_on_lazy():
    """Return model, minibatches, optimizer and state of a training whose updates are fused."""
    model, data = network("lazy")
    optimizer = gradcomp.optim.SplitAdamW(split_parameters(model), lr=0.01)
    model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    state = gradcomp.ddp.register(model, "onebit", min_numel=0, optimizer=optimizer, timeout_s=60)
    return model, data, optimizer, state


def states(*parts):
    return [bits_of(part.state_dict()) for part in parts]


@each_rank(2, "lazy")
def test_an_exchange_without_memory_left_gives_a_fused_step_nothing():
    with encoding("lazy"):
        model, data, optimizer, state = fused_on_lazy()
        train(model, data[:2], optimizer)
        before = states(model, optimizer, state)
        instead = contextlib.nullcontext()
        if dist.get_rank() == 1:
            full = torch.OutOfMemoryError("out of memory, says the test")
            instead = mock.patch.object(HostedKernels, "encode", side_effect=full)
        with instead, pytest.raises((RuntimeError, gradcomp.PeerLost), match="memory, says"):
            train(model, data[2:3], optimizer)
        with pytest.raises(gradcomp.GradcompError, match="or from one that failed"):
            optimizer.step()
        assert states(model, optimizer, state) == before
        state.close()


@each_rank(2, "lazy")
def test_a_fused_step_without_memory_left_has_updated_some_buckets():
    """On one rank: its residuals are those of the exchange, which has ended, and a checkpoint of
    before the step goes on as if nothing had been.
    """
    with encoding("lazy"):
        model, data, optimizer, state = fused_on_lazy()
        parts = model, optimizer, state
        train(model, data[:2], optimizer)
        saved = copy.deepcopy([part.state_dict() for part in parts])
        train(model, data[2:3], optimizer)
        wanted = states(*parts)
        for part, one in zip(parts, saved, strict=True):
            part.load_state_dict(one)
        weights = bits_of(list(model.parameters()))
        calls, update = [], HostedKernels.update

        def full(self, *given, **named):
            calls.append(given)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("out of memory, says the test")
            return update(self, *given, **named)

        if dist.get_rank() == 1:
            with (
                mock.patch.object(HostedKernels, "update", full),
                pytest.raises(torch.OutOfMemoryError, match="says the test"),
            ):
                train(model, data[2:3], optimizer)
            pairs = zip(bits_of(list(model.parameters())), weights, strict=True)
            assert {now == then for now, then in pairs} == {True, False}
            assert {int(optimizer.state[p]["step"]) for p in model.parameters()} == {2}
            failed = bits_of(list(model.parameters()))
            with pytest.raises(
                gradcomp.GradcompError, match="is gone: .* or from a step that failed"
            ):
                optimizer.step()  # it would update the first buckets twice
            assert bits_of(list(model.parameters())) == failed
        else:
            train(model, data[2:3], optimizer)
            assert states(*parts) == wanted
        assert states(state) == wanted[2:]
        with pytest.raises(PeerMismatch):
            state.check_replicas()
        for part, one in zip(parts, saved, strict=True):
            part.load_state_dict(one)
        train(model, data[2:3], optimizer)
        assert states(*parts) == wanted
        state.check_replicas()
        state.close()


@each_rank(2, "lazy")
def test_updates_are_fused_only_where_all_weights_and_averages_are_on_one_device():
    """Without kernels averages are in host memory (`by_split_weights`), as they are if the weights
    are on several devices. Ranks must not differ in it: norms of packed gradients have other bits.
    """
    with encoding("lazy"):
        model, _ = network("lazy")
        model.layers[1].to("lazy:1")
        optimizer = gradcomp.optim.SplitSGD(split_parameters(model), lr=0.01)
        model = nn.parallel.DistributedDataParallel(model)
        with gradcomp.ddp.register(model, "onebit", optimizer=optimizer) as state:
            assert state.describe().endswith("not fused: the weights are on an accelerator")
    with encoding("lazy") if dist.get_rank() else contextlib.nullcontext():
        text = "rank 0 has SplitAdamW, not fused: the weights are on an .* rank 1 has .*, fused"
        with pytest.raises(PeerMismatch, match=text) as error:
            fused_on_lazy()
    assert error.value.field == "optimizer"


def on(function, device, options):
    """Return what a function returns on a device; None: on the accelerator."""
    torch.set_num_threads(1)
    return function(device or torch.accelerator.current_accelerator().type, **options)


# ---- waits ---------------------------------------------------------------------------------------


class FutureOfNoDevice(torch.futures.Future):
    def __new__(cls, *, devices=()):
        return super().__new__(cls)

    def __init__(self, *, devices=()):
        super().__init__()


def fetch_at_once(self, values):
    """As `Staged.fetch`, but its stream does not wait for what has been queued before."""
    here = self.host[: values.numel()]
    self._copy(here, values, values)
    self._arrived = self._stream.record_event()
    return here


# a wait that is missing: where it is, what is there instead, and an entry point that needs it
MISSING = {
    "the encoder's for the copy": ("kernels.staging.Staged.wait", print, by_ddp),
    "the encoder's for the copy, under FSDP2": ("kernels.staging.Staged.wait", print, by_fsdp),
    "the copy's for gradients": ("kernels.staging.Staged.fetch", fetch_at_once, by_averager),
    "the future's device": ("ddp.torch.futures.Future", FutureOfNoDevice, by_ddp),
    "completion behind the copy": ("engine.step.on_stream", contextlib.nullcontext, by_ddp),
    "the caller's for averages": ("engine.step.join", print, by_averager),
    "all_reduce's for averages": ("allreduce.join", print, by_all_reduce),
    "FSDP's for averages": ("fsdp.reduce.join", print, by_fsdp),
}
MISSING_BY_KERNELS = {
    "the kernels' for gradients": ("exchange.staged.DeviceExchange._wait", print, by_averager),
    "the kernels' stream": (
        "exchange.staged.on_stream",
        contextlib.nullcontext,
        by_ddp_of_a_stream,
    ),
}


def without(device, where, instead, function):
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch(f"gradcomp.{where}", instead))
        if function is by_ddp:  # whose futures and steps both wait
            patches.enter_context(mock.patch("gradcomp.engine.step.join", print))
        return on(function, device, {})


def shows(run, where, instead, function):
    """Whether a wait that is missing changes what `run` returns, or ends it."""
    expected = run(function, {})
    try:
        return run(without, {"where": where, "instead": instead, "function": function}) != expected
    except RankFailed:  # NaN, or other bytes on other ranks
        return True


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_wait_shows(lazy, what):
    assert shows(lambda function, options: lazy(2, on, function, "lazy", options), *MISSING[what])


@pytest.mark.parametrize("what", MISSING_BY_KERNELS)
def test_a_wait_that_kernels_of_the_device_miss_shows(lazy, what):
    assert shows(partial(lazy, 2, by_kernels), *MISSING_BY_KERNELS[what])


@each_rank(1, "lazy")
def test_memory_that_is_freed_too_early_is_read_all_the_same():
    values = torch.full((4,), 3.0, device="lazy")
    staged = staging.Staged(values)
    assert staged.host.is_pinned()
    staged.fetch(values)
    del values
    staged.wait()
    assert staged.host.tolist() == [3.0] * 4


def test_a_device_without_streams_or_pinned_memory_waits_on_the_host(lazy):
    expected = lazy(2, on, by_ddp, "lazy", {})
    assert lazy(2, without_streams) == expected


def without_streams():
    staging._make_stream.cache_clear()
    empty = torch.empty

    def unpinned(*args, pin_memory=False, **options):
        if pin_memory:
            raise NotImplementedError("no such memory")
        return empty(*args, **options)

    try:
        with (
            mock.patch.object(torch, "Stream", side_effect=NotImplementedError),
            mock.patch.object(torch, "empty", unpinned),
        ):
            return on(by_ddp, "lazy", {})
    finally:
        staging._make_stream.cache_clear()


# ---- what is refused, and what goes wrong --------------------------------------------------------


@each_rank(2, "lazy")
def test_a_mismatch_leaves_no_gradient_that_a_step_could_take():
    model, data = network("lazy")
    codec = ("onebit", "ternary")[dist.get_rank()]
    averager = gradcomp.GradientAverager(model, codec, min_numel=0)
    model(data[0]).backward()
    with pytest.raises(PeerMismatch, match="codec: rank 0 has"):
        averager.average()
    assert all(bool(p.grad.isnan().all()) for p in model.parameters())
    averager.close()


@each_rank(1, "lazy")
def test_a_rolled_back_training_draws_the_same_numbers_again():
    model, _ = network("lazy")
    before = torch.lazy.get_rng_state("lazy:0")
    with rolled_back(model, sgd(model), []):
        torch.lazy.set_rng_state(
            torch.Generator().manual_seed(7).get_state(), torch.device("lazy:0")
        )
        assert not torch.equal(torch.lazy.get_rng_state("lazy:0"), before)
    assert torch.equal(torch.lazy.get_rng_state("lazy:0"), before)


@each_rank(1, "lazy")
def test_what_is_not_taken_is_refused_by_name():
    for call in (
        lambda: gradcomp.Ternary().encode(torch.zeros(4), residual=torch.zeros(4, device="lazy")),
        lambda: gradcomp.OneBit().decode(torch.zeros(64, dtype=torch.uint8, device="lazy")),
    ):
        with pytest.raises(UnsupportedTensor, match="lazy:0"):
            call()
    with pytest.raises(UnsupportedTensor, match="x is on meta: .*CPU and LAZY tensors"):
        gradcomp.Ternary().encode(torch.zeros(4, device="meta"))


# ---- memory --------------------------------------------------------------------------------------

LASTING = [
    "ddp",
    "ddp slices",
    "averager",
    "averager delayed",
    "averager on two devices",
    "double buffer",
    "fsdp",
    "fsdp with weights",
]


def page_locked(steps, function, options):
    """Return how many tensors in page-locked memory a training of so many steps allocates."""
    empty, sizes = torch.empty, []

    def counted(*args, pin_memory=False, **given):
        made = empty(*args, pin_memory=pin_memory, **given)
        if pin_memory:
            assert made.is_pinned()
            sizes.append(made.numel())
        return made

    with mock.patch.object(torch, "empty", counted), mock.patch.dict(globals(), STEPS=steps):
        on(function, "lazy", options)
    return len(sizes)


@pytest.mark.parametrize("row", LASTING)
def test_page_locked_memory_is_allocated_once(lazy, row):
    """Not in every step: that of more steps is as much."""
    few, many = (lazy(2, page_locked, steps, *SAME[row]) for steps in (5, 11))
    assert few == many and min(few) > 0
