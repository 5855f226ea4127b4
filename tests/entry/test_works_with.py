"""Beside other features of torch weights get the bits that they have without those
(docs/reference/works-with.md).
"""

import contextlib
from functools import partial
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from _models import bits, small_model, train
from _ranks import each_rank
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradcomp
from gradcomp import UnsupportedTensor
from gradcomp.kernels import staging

# what torch.compile imports at its first call takes each rank 4 s of CPU: by one worker's ranks
pytestmark = pytest.mark.xdist_group("compiled")
OPTIONS = {"min_numel": 0, "timeout_s": 20}
# Calls the operators that eager torch calls, with the same values, strides and dtypes (compared in
# torch's profiler), so bits may be compared; inductor's kernels may round otherwise.
BACKEND = "aot_eager"
compiled = partial(torch.compile, backend=BACKEND)


class Recomputed(nn.Module):
    """Layers that compute their activations again in backward."""

    def __init__(self, layers, use_reentrant):
        super().__init__()
        self.layers, self.use_reentrant = layers, use_reentrant

    def forward(self, x):
        x.requires_grad_()  # otherwise the first layer's reentrant checkpoint has no backward
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class Autocast(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x)


def same(model):
    return model


class Block(nn.Module):
    """What is compiled: torch compiles no module of its own."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x).tanh()


def graphs():
    """Return the number of graphs that were compiled since `network` made one."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def network(use_reentrant=None):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    blocks = nn.Sequential(*(Block(m) for m in small_model() if isinstance(m, nn.Linear)))
    return blocks if use_reentrant is None else Recomputed(blocks, use_reentrant)


def adamw(parameters, kind=None):
    if kind is None:
        return torch.optim.AdamW(parameters, lr=1e-2)
    return kind(parameters, torch.optim.AdamW, lr=1e-2)


def by_ddp(
    around=same, inside=same, use_reentrant=None, optimizer=None, joins=False, settings=None, **ddp
):
    net = network(use_reentrant)
    optimizer = adamw(net.parameters(), optimizer)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(**(settings or {})))
        model = DDP(inside(net), **ddp)
        options = OPTIONS | {"optimizer": optimizer, "precondition": True}
        state = stack.enter_context(gradcomp.ddp.register(model, "ternary", **options))
        said = state.describe()
        assert "residual_decay=0.25 for AdamW" in said and "rate of AdamW x" in said
        if joins:
            stack.enter_context(model.join())
        train(around(model), optimizer, dist.get_rank(), range(3))
        assert state.step == 3 and state.stats.compression_ratio > 8
    return bits(net)


BESIDE_DDP = {
    "torch.compile": {"around": compiled},
    "torch.compile of the module inside": {"inside": compiled},
    "torch.compile of checkpoints": {"around": compiled, "use_reentrant": False},
    "torch.compile, whole": {"around": compiled, "settings": {"optimize_ddp": False}},
    "checkpoints": {"use_reentrant": False},
    "reentrant checkpoints": {"use_reentrant": True},
    # each layer's backward is a graph task of its own inside the outer one
    "reentrant checkpoints, small buckets": {"use_reentrant": True, "bucket_cap_mb": 0.01},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "Join": {"joins": True},
    "ZeroRedundancyOptimizer": {"optimizer": ZeroRedundancyOptimizer},
}


@pytest.mark.parametrize("row", BESIDE_DDP)
@each_rank(2)
def test_beside_ddp(row):
    found = by_ddp(**BESIDE_DDP[row])
    assert (graphs() > 0) is ("torch.compile" in row)
    assert found == by_ddp()


@each_rank(2)
def test_autocast_compiled_and_not():
    cast = by_ddp(around=Autocast)
    found = by_ddp(around=lambda model: Autocast(compiled(model)))
    assert graphs() > 0
    assert found == cast != by_ddp()


def by_fsdp(compiles=False, use_reentrant=None, keep_weights=False):
    net = network(use_reentrant)
    for block in [module for module in net.modules() if isinstance(module, Block)]:
        if compiles:
            block.compile(backend=BACKEND)
        fully_shard(block)
    fully_shard(net)
    options = OPTIONS | {"weights": "block8", "keep_weights": keep_weights}
    with gradcomp.fsdp.register(net, **options) as state:
        train(net, adamw(net.parameters()), dist.get_rank(), range(3))
        assert state.plain == 0 and state.stats.compression_ratio > 8
    assert (graphs() >= 3) is compiles
    return bits(p.to_local() for p in net.parameters())


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["", "checkpoints", "reentrant"])
@pytest.mark.parametrize("compiles", [False, True], ids=["", "compiled"])
@each_rank(2)
def test_beside_fsdp(compiles, use_reentrant, keep_weights):
    assert by_fsdp(compiles, use_reentrant, keep_weights) == by_fsdp()


def by_averager(around=same):
    net = network()
    optimizer = adamw(net.parameters())
    with gradcomp.GradientAverager(net, "onebit", optimizer=optimizer, **OPTIONS) as averager:
        train(around(net), optimizer, dist.get_rank(), range(3), averager.average)
    return bits(net)


def by_local_steps(around=same):
    net = network()
    optimizer = adamw(net.parameters())
    with gradcomp.DiLoCo(net, optimizer, "ternary", sync_every=2):
        train(around(net), optimizer, dist.get_rank(), range(4))
    return bits(net)


@pytest.mark.parametrize("entry", [by_averager, by_local_steps])
@each_rank(2)
def test_beside_the_others(entry):
    found = entry(compiled)
    assert graphs() > 0
    assert found == entry()


@each_rank(2)
def test_compiled_autograd_is_refused_by_torch():
    model = DDP(network())
    with gradcomp.ddp.register(model, "ternary", **OPTIONS):
        loss = model(torch.ones(8, 64)).sum()
        refused = pytest.raises(RuntimeError, match="is not compatible with C.. DDP Reducer")
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=BACKEND)), refused:
            loss.backward()


@each_rank(1)
def test_the_python_reducer_is_refused_by_name():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        model = DDP(small_model())
    with pytest.raises(ValueError, match="python_reducer.* set it to True"):
        gradcomp.ddp.register(model, "ternary")


def test_recording_a_graph_is_refused_by_name():
    """torch's answer is made up: there is no graph without a GPU."""
    gpu = torch.device("cuda")
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
        staging.refuse_graphs(torch.device("cpu"))
        with pytest.raises(UnsupportedTensor, match="a CUDA graph records no exchange"):
            staging.follow(gpu)
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=False):
        staging.refuse_graphs(gpu)
