"""Transformers' Trainer with compressed gradients: the plain run's weights to the last bit,
checkpoints, what is refused and said.
"""

import contextlib
import functools
import gc
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _frameworks import forget, launched, said, same, sgd, split, weights_of
from _ranks import program
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp import GradcompError

pytestmark = pytest.mark.extras

if sys.version_info < (3, 11):
    pytest.skip("Transformers 5.23 needs Python 3.11", allow_module_level=True)

LENGTH, SAMPLES, BATCH = 16, 48, 4


@functools.cache
def import_once():
    """Import what takes seconds, and spare every gc.collect() of a Trainer a look through it."""
    import gradcomp.integrations.transformers

    assert net() is not None and gradcomp.integrations.transformers
    gc.freeze()


@contextlib.contextmanager
def started():
    """Let Transformers find the ranks that are there already."""
    with launched(OMP_NUM_THREADS=1):
        import_once()
        forget()
        try:
            yield
        finally:
            forget()


def net():
    """Return a small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))


def data():
    draw = torch.Generator().manual_seed(3)
    return [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(64, (SAMPLES, LENGTH), generator=draw)
    ]


def trainer_of(folder, seen=None, codec="onebit", compression=None, kind=None, **options):
    """Return a CompressedTrainer; what its model is given goes to `seen`."""
    from transformers import TrainingArguments
    from transformers.utils import logging

    from gradcomp.integrations.transformers import Compressed, CompressedTrainer

    logging.set_verbosity_error()
    optimizer_of = options.pop("optimizer_of", sgd)
    quiet = {"report_to": [], "disable_tqdm": True, "logging_strategy": "no"}
    usual = {"max_steps": 8, "save_strategy": "no", "lr_scheduler_type": "constant"}
    usual |= {"use_cpu": True, "per_device_train_batch_size": BATCH}
    arguments = TrainingArguments(output_dir=folder, **{**quiet, **usual, **options})

    class Own(kind or CompressedTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if seen is not None:
                seen.append({**inputs, "num_items_in_batch": kwargs.get("num_items_in_batch")})
            return super().compute_loss(model, inputs, *args, **kwargs)

    assert issubclass(CompressedTrainer, Compressed)
    model = net()
    compression = {"codec": codec, "compression": compression}
    optimizers = optimizer_of(model), None
    trainer = Own(model, arguments, train_dataset=data(), optimizers=optimizers, **compression)
    callbacks = trainer.callback_handler.callbacks
    trainer.remove_callback(next(type(one) for one in callbacks if "Printer" in type(one).__name__))
    return trainer


def compare_with_plain(codec, accumulate, optimizer_of, folder):
    """Train, then give a plain DDP loop the minibatches that the Trainer has given its model."""
    seen, world, options = [], dist.get_world_size(), gradcomp.Options(min_numel=500)
    more = {"optimizer_of": optimizer_of, "gradient_accumulation_steps": accumulate}
    with started():
        trainer = trainer_of(folder, seen, codec, options, **more)
        trainer.train()
    dist.barrier()
    model = net()
    optimizer = optimizer_of(model)
    model = DistributedDataParallel(model)
    with gradcomp.ddp.register(model, codec, options) as state:
        for number, inputs in enumerate(seen, 1):
            last = number % accumulate == 0 or number % (SAMPLES // BATCH // world) == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (model(**inputs).loss * world).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert trainer.compression.stats.steps == state.stats.steps == 8
    assert trainer.compression.stats.bytes_sent == state.stats.bytes_sent > 0
    assert same(trainer.model, weights_of(model))
    trainer.compression.close()


@pytest.mark.parametrize(
    ("codec", "accumulate", "optimizer_of"),
    [("terngrad", 1, sgd), ("onebit", 3, sgd), ("onebit", 1, split)],
)
def test_weights_are_those_of_plain_ddp(gloo, tmp_path, codec, accumulate, optimizer_of):
    gloo(2, compare_with_plain, codec, accumulate, optimizer_of, str(tmp_path))


def resume(folder):
    rank, half = dist.get_rank(), f"{folder}/run/checkpoint-4"

    def train(to, start=None, codec="onebit", **options):
        with started(), said() as warned:
            trainer = trainer_of(f"{folder}/run", codec=codec, max_steps=to, **options)
            trainer.train(resume_from_checkpoint=start)
            trainer.compression.close()
        return weights_of(trainer.model), trainer.compression, warned

    wanted = train(8, save_strategy="steps", save_steps=4)[0]
    files = [file.name for file in sorted(Path(half).glob("gradcomp*"))]
    dist.barrier()
    assert files == ["gradcomp-0-of-2.pt", "gradcomp-1-of-2.pt"]
    if rank == 0:
        shutil.rmtree(f"{folder}/run/checkpoint-8")
    dist.barrier()
    # True: the last in the folder, in the middle of an epoch of 6 steps
    weights, state, warned = train(8, True)
    assert same(weights, wanted) and not warned
    assert (state.step, state.stats.steps) == (8, 4)
    with pytest.raises(ValueError, match="does not fit.*OneBit.*delete gradcomp-\\*.pt from"):
        train(8, half, "block4")
    dist.barrier()
    if rank == 0:
        for file in Path(half).glob("gradcomp*"):
            file.unlink()
    dist.barrier()
    other, state, warned = train(8, half)
    assert not same(other, wanted), "residuals do not matter here"
    assert state.step == 4
    return warned


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    first, second = gloo(2, resume, str(tmp_path))
    assert "checkpoint-4 has no gradcomp state: residuals begin at zero" in first[0] and not second


def other_days(folder):
    """A second train(), a step past the hook, arguments that are refused, another subclass of
    Trainer.
    """
    from transformers import Trainer

    from gradcomp.integrations.transformers import Compressed

    class Base(Trainer):
        pass

    class Own(Compressed, Base):
        pass

    with started():
        trainer = trainer_of(folder, max_steps=2)
        trainer.train()
        first = trainer.compression
        trainer.train()
        assert trainer.compression is first and first.stats.steps == 4
        wrapped, step = trainer.model_wrapped, trainer.training_step

        def past_ddp(model, *args):
            assert model is wrapped
            return step(model.module, *args)

        trainer.training_step = past_ddp
        why = "gradcomp was registered but not called in this step: no forward pass went through"
        with pytest.raises(GradcompError, match=why):
            trainer.train()
        first.close()
        with pytest.raises(ValueError, match="unknown codec 'ternari'"):
            trainer_of(folder, codec="ternari")
        with pytest.raises(TypeError, match="options must be a gradcomp.Options, got dict"):
            trainer_of(folder, compression={"start_step": 3})
        forget()
        saves = {"save_strategy": "steps", "save_steps": 1, "save_only_model": True}
        trainer = trainer_of(folder, codec="auto", max_steps=1, kind=Own, **saves)
        trainer.train()
        assert isinstance(trainer, Base) and trainer.compression.stats.steps == 1
        saved = Path(folder, "checkpoint-1")
        assert saved.is_dir() and not list(saved.glob("gradcomp*"))
        trainer.compression.close()
    rank = dist.get_rank()
    dist.destroy_process_group()
    forget()
    trainer = trainer_of(f"{folder}/{rank}", max_steps=1)
    with pytest.warns(UserWarning, match="one process: there is nobody to send gradients to"):
        trainer.train()
    assert trainer.compression is None
    forget()


def test_second_trains_steps_past_the_hook_and_what_is_refused(gloo, tmp_path):
    gloo(2, other_days, str(tmp_path))


EXAMPLE = Path(__file__).parents[2] / "examples/transformers_gpt.py"


def example(*arguments):
    forget()
    try:
        return program(*arguments)
    finally:
        forget()


def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path):
    small = "--save-every", 5, "--batch", 2, "--layers", 1

    def run(steps):
        options = "--output", tmp_path / "out", "--steps", steps, *small
        return "".join(gloo(2, example, str(EXAMPLE), *options)).splitlines()[-1]

    assert re.fullmatch(r"5 steps: loss \d\.\d+, 7.\d times fewer bytes than fp32", run(5))
    assert re.fullmatch(r"10 steps: loss \d\.\d+, 7.\d times fewer bytes than fp32", run(10))
    saved = torch.load(tmp_path / "out/checkpoint-10/gradcomp-1-of-2.pt", weights_only=True)
    assert saved["step"] == 10
