"""Lightning with compressed gradients: the plain DDP run's weights to the last bit, checkpoints,
what is refused and said.
"""

import contextlib
import logging
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _frameworks import (
    become_a_run_of_one,
    launched,
    loader,
    loss_of,
    net,
    plain,
    run,
    said,
    same,
    sgd,
    split,
    weights_of,
)
from _ranks import program

from gradcomp import GradcompError, UnsupportedTensor

pytestmark = pytest.mark.extras


def batches():
    return loader(dist.get_rank(), dist.get_world_size(), seed=3)


@contextlib.contextmanager
def cluster(**place):
    """Let Lightning find the ranks that are there already, and say little."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with launched(NODE_RANK=0, TORCHELASTIC_RUN_ID="tests", **place), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning|torch")
        yield


def module_class(optimizer_of=sgd):
    import lightning

    class Module(lightning.LightningModule):
        """The same model and steps as `plain`."""

        def __init__(self):
            super().__init__()
            self.net = net()
            self.optimizer = optimizer_of(self.net)

        def training_step(self, batch, index):
            return loss_of(self.net, *batch)

        def configure_optimizers(self):
            return self.optimizer

    return Module


def fit(codec, epochs, folder, start=None, kind=None, **options):
    """Train with Lightning; return strategy, module, a checkpoint and what was warned of."""
    from lightning import Trainer

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    quiet = dict.fromkeys(
        ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False
    )
    with cluster(), said() as warned:
        strategy, module = CompressedDDPStrategy(codec), (kind or module_class())()
        own = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=strategy,
            max_epochs=epochs,
            default_root_dir=folder,
            use_distributed_sampler=False,
            **quiet,
            **options,
        )
        own.fit(module, batches(), ckpt_path=start)
        file = str(Path(folder, f"{codec}-{epochs}.ckpt"))
        own.save_checkpoint(file)
    return strategy.compression, module, file, warned


def compare_with_plain(codec, optimizer_of, accumulate, clip, folder):
    wanted, theirs = plain(
        batches(), codec, optimizer_of, 2, accumulate, clip, fused=optimizer_of is split
    )
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    state, module, *_ = fit(codec, 2, folder, kind=module_class(optimizer_of), **options)
    assert state.stats.bytes_sent == theirs.stats.bytes_sent > 0
    assert same(module.net, wanted)
    return state.stats.compression_ratio, state.describe()


@pytest.mark.parametrize(
    ("codec", "optimizer_of", "accumulate", "clip", "line"),
    [
        ("terngrad", sgd, 1, None, "TernGrad"),
        ("onebit", sgd, 3, 0.5, "OneBit"),
        ("auto", split, 1, 0.1, "straight from payloads"),
    ],
)
def test_weights_are_those_of_plain_ddp(
    gloo, tmp_path, codec, optimizer_of, accumulate, clip, line
):
    given = codec, optimizer_of, accumulate, clip, str(tmp_path)
    ratio, described = gloo(2, compare_with_plain, *given)[0]
    assert ratio > 3 and line in described


def resume(folder):
    codec, rank = "onebit", dist.get_rank()
    wanted = weights_of(fit(codec, 4, folder)[1].net)
    half = fit(codec, 2, folder)[2]
    state, module, _, warned = fit(codec, 4, folder, half)
    assert same(module.net, wanted) and not warned
    assert state.step == 24 and state.stats.steps == 12  # 6 steps an epoch
    saved = torch.load(half, weights_only=True)
    assert [one["rank"] for one in saved["gradcomp"]] == [0, 1] and saved["gradcomp"][0]["residual"]
    del saved["gradcomp"]
    bare = str(Path(folder, f"bare{rank}.ckpt"))
    torch.save(saved, bare)
    _, module, _, warned = fit(codec, 4, folder, bare)
    assert not same(module.net, wanted), "residuals do not matter here"
    with pytest.raises(ValueError, match="does not fit.*OneBit.*remove its entry 'gradcomp'"):
        fit("block4", 4, folder, half)
    become_a_run_of_one()  # the same checkpoint, each rank for itself
    assert fit(codec, 3, f"{folder}/{rank}", half)[0].step == 24  # 12 and an epoch of 12
    return warned


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    first, second = gloo(2, resume, str(tmp_path))
    assert "this checkpoint has no gradcomp state: residuals begin at zero" in first[0]
    assert not second


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
                wrapped = self.trainer.strategy.model
                with wrapped.no_sync():
                    loss_of(wrapped.module.net, *batch).backward()
            else:
                parameters = list(self.parameters())
                for p, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    p.grad = grad
            optimizer.step()

    return Module


def not_called(folder):
    why = "gradcomp was registered but not called in this step: .*another hook.*changed nothing yet"
    for how in ("no_sync", "grad"):
        with pytest.raises(GradcompError, match=why):
            fit("terngrad", 1, folder, kind=by_hand(how))


def test_a_step_without_the_hook_is_an_error(gloo, tmp_path):
    gloo(2, not_called, str(tmp_path))


def alone(folder):
    folder = f"{folder}/{dist.get_rank()}"
    become_a_run_of_one()
    warned = fit("terngrad", 1, folder)[3]
    assert any("on one device: there is nobody to send gradients to" in one for one in warned)
    fit("terngrad", 1, folder)


def test_one_device_trains_and_says_that_nothing_is_compressed(gloo, tmp_path):
    gloo(2, alone, str(tmp_path))


def refused():
    from lightning import Trainer
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    from gradcomp.integrations.lightning import CompressedDDPStrategy

    for error, match, arguments in (
        (ValueError, "unknown codec 'ternari'", {"codec": "ternari"}),
        (ValueError, "start_step must be an integer of at least 0, got -1", {"start_step": -1}),
        (
            TypeError,
            "no.* argument 'find_unused'; did you mean find_unused_parameters",
            {"find_unused": True},
        ),
        (TypeError, "options must be a gradcomp.Options, got dict", {"options": {}}),
        (ValueError, "DDP takes one communication hook", {"ddp_comm_hook": len}),
    ):
        with pytest.raises(error, match=match):
            CompressedDDPStrategy(**arguments)
    on_gpu = CompressedDDPStrategy("terngrad", parallel_devices=[torch.device("cuda", 0)])
    with cluster(), pytest.raises(UnsupportedTensor, match="runs on cuda:0: Trainer"):
        on_gpu.cluster_environment = type("Environment", (), {"local_rank": lambda self: 0})()
        on_gpu.setup_environment()
    # Lightning's own words, where there is none
    with pytest.raises(MisconfigurationException, match="gpu"):
        Trainer(accelerator="gpu", devices=1, strategy=CompressedDDPStrategy("terngrad"))


def test_what_is_refused(gloo):
    gloo(2, refused)


EXAMPLE = Path(__file__).parents[2] / "examples/lightning_digits.py"


def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path):
    for epochs in (1, 2):
        options = "--epochs", epochs, "--codec", "onebit", "--checkpoint", tmp_path / "saved"
        out = "".join(gloo(2, program, str(EXAMPLE), *options))
        accuracy, ratio = re.fullmatch(
            r"test accuracy ([\d.]+) %, ([\d.]+) times fewer bytes than fp32\n", out
        ).groups()
        assert float(ratio) > 29, out
    assert float(accuracy) > 70, out  # 10 is chance
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert [one["step"] for one in saved["gradcomp"]] == [42, 42]


@pytest.mark.long
def test_lightning_starts_the_ranks_of_the_example_itself():
    assert "15.8 times fewer bytes" in run(EXAMPLE, "--epochs", 2)
