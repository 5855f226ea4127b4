"""Lightning with compressed gradients: the plain DDP run's weights to the last bit, checkpoints,
what is refused and said.
"""

import contextlib
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from _ranks import program
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp
from gradcomp import GradcompError, UnsupportedTensor

pytestmark = pytest.mark.extras

ROWS, BATCH = 48, 4  # samples, and a rank's share of a minibatch


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 1))


def loader(rank, world):
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(ROWS, 40, generator=draw), torch.randn(ROWS, 1, generator=draw)
    )
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, seed=3))


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextlib.contextmanager
def cluster(rank, world):
    """Let Lightning find the ranks that are there already, as a launcher would have made them."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "NODE_RANK": 0,
        "TORCHELASTIC_RUN_ID": "tests",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    os.environ.update({name: str(value) for name, value in place.items()})
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning|torch")
            yield
    finally:
        for name in place:
            del os.environ[name]


def module_class():
    import lightning

    class Module(lightning.LightningModule):
        """The same model and steps as `plain`."""

        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return optimizer_of(self)

    return Module


def trainer(strategy, epochs, folder, **options):
    import torch.distributed as dist
    from lightning import Trainer

    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        default_root_dir=folder,
        **{**quiet, **options},
    )


def plain(rank, world, codec, epochs, accumulate=1, clip=None):
    """Return the weights of a torch loop with `gradcomp.ddp.register`."""
    model = DistributedDataParallel(net())
    optimizer, data = optimizer_of(model), loader(rank, world)
    state = gradcomp.ddp.register(model, codec)
    for epoch in range(epochs):
        data.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(data):
            last = (number + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (nn.functional.mse_loss(model(x), y) / accumulate).backward()
            if last:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    sent = state.stats.bytes_sent
    state.close()
    return [p.detach().clone() for p in model.module.parameters()], sent


def compare_with_plain(codec, accumulate, clip, folder):
    import torch.distributed as dist

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    rank, world = dist.get_rank(), dist.get_world_size()
    wanted, sent = plain(rank, world, codec, 2, accumulate, clip)
    dist.barrier()
    with cluster(rank, world):
        strategy, module = CompressedDDPStrategy(codec), module_class()()
        own = trainer(
            strategy,
            2,
            folder,
            use_distributed_sampler=False,
            accumulate_grad_batches=accumulate,
            gradient_clip_val=clip,
        )
        own.fit(module, loader(rank, world))
    assert strategy.compression.stats.bytes_sent == sent > 0
    assert all(torch.equal(a, b) for a, b in zip(module.net.parameters(), wanted, strict=True))
    return strategy.compression.stats.compression_ratio


@pytest.mark.parametrize(
    ("codec", "accumulate", "clip"), [("terngrad", 1, None), ("onebit", 3, 0.5)]
)
def test_weights_are_those_of_plain_ddp(gloo, tmp_path, codec, accumulate, clip):
    assert gloo(2, compare_with_plain, codec, accumulate, clip, str(tmp_path))[0] > 7


def fit(codec, epochs, folder, start=None, changed=None, **options):
    """Train with Lightning; return strategy, weights and what was warned of."""
    import torch.distributed as dist

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    rank, world = dist.get_rank(), dist.get_world_size()
    with cluster(rank, world), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        strategy, module = CompressedDDPStrategy(codec, **options), (changed or module_class)()()
        own = trainer(strategy, epochs, folder, use_distributed_sampler=False)
        own.fit(module, loader(rank, world), ckpt_path=start)
        file = str(Path(folder, f"{codec}-{epochs}.ckpt"))
        own.save_checkpoint(file)
    ours = [str(one.message) for one in said if "gradcomp" in str(one.message)]
    return strategy, [p.detach().clone() for p in module.net.parameters()], file, ours


def resume(folder):
    import torch.distributed as dist

    codec = "onebit"
    wanted = fit(codec, 4, folder)[1]
    half = fit(codec, 2, folder)[2]
    again, weights, _, said = fit(codec, 4, folder, half)
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True)) and not said
    assert again.compression.step == 24 and again.compression.stats.steps == 12  # 6 steps an epoch
    saved = torch.load(half, weights_only=True)
    assert [one["rank"] for one in saved["gradcomp"]] == [0, 1] and saved["gradcomp"][0]["residual"]
    without = {**saved}
    del without["gradcomp"]
    bare = str(Path(folder, f"bare{dist.get_rank()}.ckpt"))
    torch.save(without, bare)
    _, other, _, said = fit(codec, 4, folder, bare)
    assert not all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True)), (
        "residuals do not matter here"
    )
    with pytest.raises(ValueError, match="does not fit.*OneBit.*remove its entry 'gradcomp'"):
        fit("block4", 4, folder, half)
    dist.destroy_process_group()  # the same checkpoint in a run of one rank
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = fit(codec, 3, f"{folder}/{bare[-6]}", half)[0]
    assert alone.compression.step == 24  # 12 and an epoch of 12
    return said


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    said = gloo(2, resume, str(tmp_path))
    assert (
        "this checkpoint has no gradcomp state: residuals begin at zero" in said[0][0]
        and not said[1]
    )


def by_hand(how):
    """Return a module that gradcomp is not called for: its loop accumulates only, or sets
    gradients itself.
    """

    class Module(module_class()):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            loss, optimizer = super().training_step(batch, index), self.optimizers()
            if how == "no_sync":
                with self.trainer.strategy.model.no_sync():
                    nn.functional.mse_loss(
                        self.trainer.strategy.model.module.net(batch[0]), batch[1]
                    ).backward()
            else:
                parameters = list(self.parameters())
                for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = grad
            optimizer.step()

    return Module


def not_called(folder):
    for how in ("no_sync", "grad"):
        with pytest.raises(
            GradcompError,
            match=(
                "gradcomp was registered but not called in this step: .*another hook or"
                " none.*changed nothing yet"
            ),
        ):
            fit("terngrad", 1, folder, changed=lambda how=how: by_hand(how))


def test_a_step_without_the_hook_is_an_error(gloo, tmp_path):
    gloo(2, not_called, str(tmp_path))


def auto_and_split(folder):
    """A split optimizer under "auto": gradients are there for Lightning to clip, and updates are
    those of the plain loop.
    """
    import torch.distributed as dist

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    rank, world = dist.get_rank(), dist.get_world_size()

    def split(model):
        return gradcomp.optim.SplitSGD(gradcomp.optim.split_parameters(model), lr=0.1, momentum=0.9)

    model = net()
    optimizer = split(model)
    model = DistributedDataParallel(model)
    state = gradcomp.ddp.register(model, "auto", optimizer=optimizer)
    for x, y in loader(rank, world):
        nn.functional.mse_loss(model(x.bfloat16()), y.bfloat16()).backward()
        state.materialize_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state.close()
    dist.barrier()

    class Module(module_class()):
        def __init__(self):
            super().__init__()
            self.optimizer = split(self)

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0].bfloat16()), batch[1].bfloat16())

        def configure_optimizers(self):
            return self.optimizer

    with cluster(rank, world):
        strategy, module = CompressedDDPStrategy("auto"), Module()
        trainer(strategy, 1, folder, use_distributed_sampler=False, gradient_clip_val=0.1).fit(
            module, loader(rank, world)
        )
    assert all(
        torch.equal(a, b)
        for a, b in zip(module.net.parameters(), model.module.parameters(), strict=True)
    )
    return strategy.compression.describe()


def test_auto_and_split_optimizers(gloo, tmp_path):
    assert "straight from payloads" in gloo(2, auto_and_split, str(tmp_path))[0]


def alone(folder):
    said = fit("terngrad", 1, folder)[3]
    assert any("on one device: there is nobody to send gradients to" in one for one in said), said
    fit("terngrad", 1, folder)


def test_one_device_trains_and_says_that_nothing_is_compressed(gloo, tmp_path):
    gloo(2, by_itself, alone, str(tmp_path))


def by_itself(function, folder):
    """Run a function in a group of this rank alone."""
    import torch.distributed as dist

    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    function(f"{folder}/{rank}")


def refused():
    from lightning import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    for error, match, arguments in (
        (ValueError, "unknown codec 'ternari'", {"codec": "ternari"}),
        (ValueError, "start_step must be an integer of at least 0, got -1", {"start_step": -1}),
        (
            TypeError,
            "no.* argument 'find_unused'; did you mean 'find_unused_parameters'",
            {"find_unused": True},
        ),
        (TypeError, "options must be a gradcomp.Options, got dict", {"options": {}}),
        (ValueError, "DDP takes one communication hook", {"ddp_comm_hook": len}),
    ):
        with pytest.raises(error, match=match):
            CompressedDDPStrategy(**arguments)
    on_gpu = CompressedDDPStrategy("terngrad", parallel_devices=[torch.device("cuda", 0)])
    with cluster(0, 1), pytest.raises(UnsupportedTensor, match="runs on cuda:0: Trainer"):
        on_gpu.cluster_environment = type("Environment", (), {"local_rank": lambda self: 0})()
        on_gpu.setup_environment()
    with pytest.raises(
        MisconfigurationException, match="gpu"
    ):  # Lightning's own words, where there is none
        Trainer(accelerator="gpu", devices=1, strategy=CompressedDDPStrategy("terngrad"))


def test_what_is_refused(gloo):
    gloo(2, refused)


EXAMPLE = Path(__file__).parents[1] / "examples/lightning_digits.py"


def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path):
    for epochs in (1, 2):
        out = "".join(
            gloo(
                2,
                program,
                str(EXAMPLE),
                "--epochs",
                epochs,
                "--codec",
                "onebit",
                "--checkpoint",
                tmp_path / "saved",
            )
        )
        accuracy, ratio = re.fullmatch(
            r"test accuracy ([\d.]+) %, ([\d.]+) times fewer bytes than fp32\n", out
        ).groups()
        assert float(ratio) > 29, out
    assert float(accuracy) > 70, out  # 10 is chance
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert [one["step"] for one in saved["gradcomp"]] == [42, 42]


@pytest.mark.long
def test_lightning_starts_the_ranks_of_the_example_itself():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(EXAMPLE), "--epochs", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0 and "15.8 times fewer bytes" in done.stdout, done.stderr[-4000:]
