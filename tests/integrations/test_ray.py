"""Ray Train with compressed gradients: restarted by Ray after a failure, the plain run's weights
to the last bit; what is refused and said.
"""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _frameworks import net, run
from _ranks import each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp

pytestmark = pytest.mark.extras


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("ray.train")


def packed():
    """Return what is tested; ray takes seconds to import, which collecting tests need not wait
    for.
    """
    from gradcomp.integrations import ray

    return ray


STEPS, FAILS = 6, 4  # of a run, and the one before which a worker dies once
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


def minibatch(step, rank):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, 40, generator=draw), torch.randn(8, 1, generator=draw)


def advance(model, optimizer, step, rank):
    x, y = minibatch(step, rank)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


PROGRAM = f"""
import json, sys, tempfile
import ray
import ray.train.torch
import torch
from torch import nn
from gradcomp.integrations import ray as packed

{inspect.getsource(net)}
{inspect.getsource(minibatch)}
{inspect.getsource(advance)}

def train(config):
    torch.set_num_threads(1)
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = packed.register(model, "onebit", min_numel=0, optimizer=optimizer)
    begun, checkpoint = 0, ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{{folder}}/train.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            begun = saved["steps"]
            assert packed.load(state, folder)
    for step in range(begun, {STEPS}):
        if step == {FAILS} and not checkpoint and rank == 1:
            raise RuntimeError("this worker falls over once")
        advance(model, optimizer, step, rank)
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                state_now = {{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
                torch.save(state_now | {{"steps": step + 1}}, f"{{folder}}/train.pt")
            packed.save(state, folder)
            weights = [p.tolist() for p in model.parameters()]
            kept = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({{"begun": begun, "weights": weights}}, checkpoint=kept)

ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
trainer = ray.train.torch.TorchTrainer(
    train,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(
        storage_path=sys.argv[1], failure_config=ray.train.FailureConfig(max_failures=1)
    ),
)
print("@" + json.dumps(trainer.fit().metrics))
"""


def plain():
    torch.set_num_threads(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with gradcomp.ddp.register(model, "onebit", min_numel=0, optimizer=optimizer):
        for step in range(STEPS):
            advance(model, optimizer, step, dist.get_rank())
    return [p.tolist() for p in model.parameters()]


@pytest.mark.long  # a cluster of Ray starts in a minute
def test_a_run_that_ray_restarts_is_the_plain_run(gloo, tmp_path):
    """Residuals of both workers travel through Ray's checkpoints."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = tmp_path / "program.py", tmp_path / "kept"
    try:
        out = run(*command, timeout_s=140, **QUIET)
    except AssertionError as failed:
        if "timed out during startup" not in str(failed):
            raise
        out = run(*command, timeout_s=140, **QUIET)  # Ray gives its own processes 30 s
    (line,) = [one[1:] for one in out.splitlines() if one.startswith("@")] or [out]
    told = json.loads(line)
    assert told["begun"] == FAILS
    assert all(weights == told["weights"] for weights in gloo(2, plain))


@pytest.mark.long
def test_the_example_goes_on_where_it_was(tmp_path):
    example = Path(__file__).parents[2] / "examples/ray_digits.py"
    cpus = {"RAY_OVERRIDE_RESOURCES": '{"CPU": 3}'}  # 2.50's trainer takes one
    for epochs, expected in (
        (1, r"epoch 1: .*\n3\d.\d times"),
        (2, r"epoch 2: .*\n3\d.\d times"),
        (2, "nothing to do"),
    ):
        options = "--epochs", epochs, "--codec", "onebit", "--checkpoint", tmp_path
        assert re.search(expected, run(example, *options, **QUIET, **cpus))


@each_rank(2)
def test_what_is_refused(tmp_path):
    wrapped = "must be what ray.train.torch.prepare_model returns.*got Linear.*fsdp.register"
    with pytest.raises(TypeError, match=wrapped):
        packed().register(nn.Linear(4, 4))
    packed().save(None, tmp_path)  # the state of a run of one
    assert not packed().load(None, tmp_path) and not list(tmp_path.iterdir())


@each_rank(2)
def test_a_state_of_ddp_register_is_loaded_too(tmp_path):
    """It has no watch, which was a KeyError of a weak reference."""
    model = DistributedDataParallel(nn.Linear(64, 64))
    with gradcomp.ddp.register(model, "onebit") as state:
        packed().save(state, tmp_path)
        dist.barrier()  # every rank writes its own file
        assert packed().load(state, tmp_path)
