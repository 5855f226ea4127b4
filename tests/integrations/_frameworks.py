"""What the tests of all frameworks have in common: a model, its data, a plain DDP run of it, ranks
as a launcher makes them; and for each framework one class that trains that model with it.
"""

import contextlib
import gc
import logging
import os
import subprocess
import warnings
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from _forks import python
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradcomp

ROWS, BATCH = 48, 4  # samples, and a rank's share of a minibatch


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 1))


def batches():
    """Return the minibatches of this rank in an epoch: 6 of them on 2 ranks."""
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(ROWS, 40, generator=draw), torch.randn(ROWS, 1, generator=draw)
    )
    here = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, *here, shuffle=False))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def split(model):
    return gradcomp.optim.SplitSGD(gradcomp.optim.split_parameters(model), lr=0.1, momentum=0.9)


def loss_of(model, x, y):
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def same(model, wanted):
    """Whether a model, or a list of tensors, has these bits."""
    values = model.parameters() if isinstance(model, nn.Module) else model
    return all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True))


def plain(codec, optimizer_of=sgd, accumulate=1, clip=None, fused=False):
    """Return the weights of 2 epochs in a torch loop with `ddp.register`, and its state."""
    model = net()
    optimizer = optimizer_of(model)
    model = DistributedDataParallel(model)
    options = {"optimizer": optimizer} if fused else {}
    with gradcomp.ddp.register(model, codec, **options) as state:
        train(model, optimizer, 2, accumulate, clip, state.materialize_gradients)
    dist.barrier()
    return weights_of(model), state


def train(model, optimizer, epochs, accumulate=1, clip=None, after_backward=lambda: None, how=""):
    """Train a DDP model in a plain loop; `how`: see `Framework`."""
    for _ in range(epochs):
        for number, batch in enumerate(batches()):
            last = (number + 1) % accumulate == 0 and how != "no_sync"
            with contextlib.nullcontext() if last else model.no_sync():
                used = model.module if how == "module" else model
                (loss_of(used, *batch) / accumulate).backward()
            if last or how == "no_sync":
                after_backward()
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()


def forget():
    """Let accelerate look for its ranks again: it keeps what it found for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def launched(**more):
    """Let a framework find the ranks that are there already, as a launcher would have made them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, **more}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in place.items()})


@contextlib.contextmanager
def placed():
    """Let accelerate find the ranks that are there already, if there are any."""
    with launched(OMP_NUM_THREADS=1) if dist.is_initialized() else contextlib.nullcontext():
        forget()
        try:
            yield
        finally:
            forget()


@contextlib.contextmanager
def said():
    """Yield a list that has gradcomp's warnings afterwards."""
    ours = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield ours
    ours += [str(one.message) for one in caught if "gradcomp" in str(one.message)]


def become_a_run_of_one():
    """Make a default group of this rank alone."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run(*command, timeout_s=240, **more):
    """Return what a program has printed; `more` are environment variables."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more
    done = subprocess.run(
        [*python(), *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


# ---- frameworks


class Run(NamedTuple):
    """What a framework's training has left."""

    state: object  # gradcomp's
    weights: list
    saved: Path  # its checkpoint
    warned: list  # gradcomp's warnings


BY_DDP = (("module", "no forward pass went through"), ("no_sync", "ran under no_sync"))


class Framework:
    """Trains `net` on `batches` with a framework, as a user would.

    `fit(codec, until, folder)` trains for `until` epochs, of which a checkpoint `start` has two,
    and saves one in `folder`; with `optimizer_of`, `accumulate` and `clip` if they are given. `how`
    is a way to train past gradcomp: "module" calls the module inside DDP, "no_sync" never leaves
    no_sync, "grad" sets gradients itself.

    Attributes:
        past: ways to train past gradcomp, and what the error says of them.
        alone: what the warning says of a run of one rank.
        remedy: what the error says about a checkpoint whose state does not fit.
        fused: whether it gives gradcomp its optimizer.
    """

    fused = False

    def become_alone(self):
        """Become a run of one rank, as without a launcher."""
        dist.barrier()
        dist.destroy_process_group()

    def strip(self, saved):
        """Remove gradcomp's state from a checkpoint."""
        for file in Path(saved).glob("gradcomp*"):
            file.unlink()


class Accelerate(Framework):
    past = BY_DDP
    alone = "accelerate runs one process: world size is 1, so nothing is compressed"
    remedy = r"delete gradcomp-\*.pt from"

    def fit(
        self, codec, until, folder, start="", optimizer_of=sgd, accumulate=1, clip=None, how=""
    ):
        from accelerate import Accelerator

        from gradcomp.integrations.accelerate import register

        with placed(), said() as warned:
            own = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
            model = net()
            model, optimizer = own.prepare(model, optimizer_of(model))
            with register(own, model, codec) or contextlib.nullcontext() as state:
                if start:
                    own.load_state(start)
                used = model.module if how == "module" else model
                for batch in [*batches()] * (until - 2 * bool(start)):
                    with model.no_sync() if how == "no_sync" else own.accumulate(model):
                        own.backward(loss_of(used, *batch))
                        if clip and own.sync_gradients:
                            own.clip_grad_norm_(model.parameters(), clip)
                        optimizer.step()
                        optimizer.zero_grad()
                saved = Path(folder, f"{codec}-{until}")
                own.save_state(str(saved))
        return Run(state, weights_of(model), saved, warned)


class Lightning(Framework):
    past = tuple((how, "called another hook.*changed nothing yet") for how in ("no_sync", "grad"))
    alone = "on one device: world size is 1, so nothing is compressed"
    remedy = "remove its entry 'gradcomp'"
    fused = True

    def become_alone(self):
        become_a_run_of_one()

    def strip(self, saved):
        found = torch.load(saved, weights_only=True)
        del found["gradcomp"]
        torch.save(found, saved)

    def fit(
        self, codec, until, folder, start=None, optimizer_of=sgd, accumulate=1, clip=None, how=""
    ):
        import lightning

        from gradcomp.integrations.lightning import CompressedDDPStrategy

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = net()
                self.optimizer = optimizer_of(self.net)
                self.automatic_optimization = not how

            def training_step(self, batch, index):
                if not how:
                    return loss_of(self.net, *batch)
                parameters = list(self.parameters())
                if how == "no_sync":
                    with self.trainer.strategy.model.no_sync():
                        loss_of(self.trainer.strategy.model.module.net, *batch).backward()
                else:
                    grads = torch.autograd.grad(loss_of(self.net, *batch), parameters)
                    for p, grad in zip(parameters, grads, strict=True):
                        p.grad = grad
                self.optimizers().step()

            def configure_optimizers(self):
                return self.optimizer

        quiet = "enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"
        more = {} if how else {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
        with self.cluster(), said() as warned:
            strategy, module = CompressedDDPStrategy(codec), Module()
            trainer = lightning.Trainer(
                accelerator="cpu",
                devices=dist.get_world_size(),
                strategy=strategy,
                max_epochs=until,
                default_root_dir=folder,
                use_distributed_sampler=False,
                **dict.fromkeys(quiet, False),
                **more,
            )
            trainer.fit(module, batches(), ckpt_path=start)
            saved = Path(folder, f"{codec}-{until}.ckpt")
            trainer.save_checkpoint(saved)
        return Run(strategy.compression, weights_of(module.net), saved, warned)

    @contextlib.contextmanager
    def cluster(self):
        """Let Lightning find the ranks that are there already, and say little."""
        for name in ("pytorch", "fabric"):
            logging.getLogger(f"lightning.{name}.utilities.rank_zero").setLevel(logging.WARNING)
        with launched(NODE_RANK=0, TORCHELASTIC_RUN_ID="tests"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning|torch")
            yield


class Transformers(Accelerate):
    past = BY_DDP[:1]
    fused = True

    def fit(self, codec, until, folder, start=None, accumulate=1, clip=None, **more):
        steps = 6 // accumulate  # of an epoch
        options = {"max_steps": steps * until, "gradient_accumulation_steps": accumulate}
        options |= {"save_strategy": "steps", "save_steps": 2 * steps, "max_grad_norm": clip or 0}
        with placed(), said() as warned:
            trainer = self.trainer(folder, codec, **options, **more)
            trainer.train(resume_from_checkpoint=start and str(start))
            if trainer.compression is not None:
                trainer.compression.close()
        saved = Path(folder, f"checkpoint-{2 * steps}")
        return Run(trainer.compression, weights_of(trainer.model), saved, warned)

    def trainer(
        self,
        folder,
        codec="onebit",
        optimizer_of=sgd,
        how="",
        kind=None,
        compression=None,
        **options,
    ):
        """Return a CompressedTrainer, or a subclass of `kind`, of `net`."""
        from transformers import TrainingArguments
        from transformers.utils import logging

        import gradcomp.integrations.transformers as packed

        gc.freeze()  # spare every gc.collect() of a Trainer a look through Transformers
        logging.set_verbosity_error()
        quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
        usual = {"use_cpu": True, "lr_scheduler_type": "constant", "save_strategy": "no"}
        arguments = TrainingArguments(output_dir=folder, **{**quiet, **usual, **options})

        class Own(kind or packed.CompressedTrainer):
            def get_train_dataloader(self):
                return batches()

            def compute_loss(self, model, inputs, *args, **kwargs):
                return loss_of(model.module if how == "module" else model, *inputs)

        model = net()
        compression = {"codec": codec, "compression": compression}
        data, optimizers = batches().dataset, (optimizer_of(model), None)
        trainer = Own(model, arguments, train_dataset=data, optimizers=optimizers, **compression)
        callbacks = [type(one) for one in trainer.callback_handler.callbacks]
        trainer.remove_callback(next(one for one in callbacks if "Printer" in one.__name__))
        return trainer


class Ray(Accelerate):
    """Without Ray's own processes: `register`, `save` and `load` need only its process group."""

    alone = "Ray Train runs one worker: world size is 1, so nothing is compressed"
    fused = True

    def fit(self, codec, until, folder, start=None, optimizer_of=sgd, how="", **more):
        from gradcomp.integrations import ray as packed

        model = net()
        optimizer = optimizer_of(model)
        if dist.is_initialized():
            model = DistributedDataParallel(model)
        options = {"optimizer": optimizer, "timeout_s": 60}
        with (
            said() as warned,
            packed.register(model, codec, **options) or contextlib.nullcontext() as state,
        ):
            if state is not None:
                more["after_backward"] = state.materialize_gradients
            if start:
                kept = torch.load(Path(start, "train.pt"), weights_only=True)
                model.load_state_dict(kept["model"])
                optimizer.load_state_dict(kept["optimizer"])
                has_all = len([*Path(start).glob("gradcomp*")]) == 2
                assert packed.load(state, start) == has_all
            train(model, optimizer, until - 2 * bool(start), how=how, **more)
            saved = Path(folder, f"{codec}-{until}")
            saved.mkdir(exist_ok=True, parents=True)
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(kept, saved / "train.pt")
            packed.save(state, saved)
        return Run(state, weights_of(model), saved, warned)


FRAMEWORKS = {
    "accelerate": Accelerate(),
    "lightning": Lightning(),
    "transformers": Transformers(),
    "ray": Ray(),
}
