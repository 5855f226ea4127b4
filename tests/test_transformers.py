"""Transformers' Trainer with compressed gradients: the plain run's weights to the last bit,
checkpoints, what is refused and said.
"""

import contextlib
import functools
import gc
import os
import re
import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from _ranks import program
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp
from gradcomp import GradcompError

pytestmark = pytest.mark.extras

if sys.version_info < (3, 11):
    pytest.skip("Transformers 5.23 needs Python 3.11", allow_module_level=True)

LENGTH, SAMPLES, BATCH = 16, 48, 4


def forget():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@functools.cache
def import_once():
    """Import what takes seconds, and spare every gc.collect() of a Trainer a look through it."""
    import gradcomp.integrations.transformers

    assert net() is not None and gradcomp.integrations.transformers
    gc.freeze()


@contextlib.contextmanager
def launched():
    """Let Transformers find the ranks that are there already, as a launcher would have made
    them.
    """
    import torch.distributed as dist

    place = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    import_once()
    forget()
    try:
        yield
    finally:
        forget()
        for name in place:
            os.environ.pop(name, None)


def net():
    """Return a small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "n_positions": LENGTH,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def data():
    draw = torch.Generator().manual_seed(3)
    return [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(64, (SAMPLES, LENGTH), generator=draw)
    ]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trainer_of(
    folder,
    seen=None,
    codec="onebit",
    compression=None,
    optimizer=sgd,
    model=None,
    kind=None,
    **options,
):
    """Return a CompressedTrainer; what its model is given goes to `seen`."""
    from transformers import TrainingArguments
    from transformers.utils import logging

    from gradcomp.integrations.transformers import Compressed, CompressedTrainer

    logging.set_verbosity_error()
    options = {
        "max_steps": 8,
        "gradient_accumulation_steps": 1,
        "save_strategy": "no",
        "lr_scheduler_type": "constant",
        **options,
    }
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        **options,
    )

    class Own(kind or CompressedTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if seen is not None:
                seen.append({**inputs, "num_items_in_batch": kwargs.get("num_items_in_batch")})
            return super().compute_loss(model, inputs, *args, **kwargs)

    assert issubclass(CompressedTrainer, Compressed)
    model = net() if model is None else model
    trainer = Own(
        model=model,
        args=arguments,
        train_dataset=data(),
        optimizers=(optimizer(model), None),
        codec=codec,
        compression=compression,
    )
    trainer.remove_callback(
        next(
            type(one)
            for one in trainer.callback_handler.callbacks
            if "Printer" in type(one).__name__
        )
    )
    return trainer


def compare_with_plain(codec, accumulate, how, folder):
    """Train, then give a plain DDP loop the minibatches that the Trainer has given its model."""
    import torch.distributed as dist

    def split(model):
        return gradcomp.optim.SplitSGD(gradcomp.optim.split_parameters(model), lr=0.1, momentum=0.9)

    optimizer_of, seen, world = {"sgd": sgd, "split": split}[how], [], dist.get_world_size()
    with launched():
        trainer = trainer_of(
            folder,
            seen,
            codec,
            gradcomp.Options(min_numel=500),
            optimizer_of,
            gradient_accumulation_steps=accumulate,
        )
        trainer.train()
    dist.barrier()
    model = net()
    optimizer = optimizer_of(model)
    model = DistributedDataParallel(model)
    state = gradcomp.ddp.register(model, codec, min_numel=500)
    for number, inputs in enumerate(seen):
        last = (number + 1) % accumulate == 0 or (number + 1) % (SAMPLES // BATCH // world) == 0
        with contextlib.nullcontext() if last else model.no_sync():
            (model(**inputs).loss * world).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert trainer.compression.stats.steps == state.stats.steps == 8
    assert trainer.compression.stats.bytes_sent == state.stats.bytes_sent > 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(trainer.model.parameters(), model.module.parameters(), strict=True)
    )
    state.close()
    trainer.compression.close()


@pytest.mark.parametrize(
    ("codec", "accumulate", "how"),
    [("terngrad", 1, "sgd"), ("onebit", 3, "sgd"), ("onebit", 1, "split")],
)
def test_weights_are_those_of_plain_ddp(gloo, tmp_path, codec, accumulate, how):
    gloo(2, compare_with_plain, codec, accumulate, how, str(tmp_path))


def resume(folder):
    import torch.distributed as dist

    rank = dist.get_rank()

    def run(to, start=None, codec="onebit", **options):
        with launched(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer = trainer_of(f"{folder}/run", codec=codec, max_steps=to, **options)
            trainer.train(resume_from_checkpoint=start)
            trainer.compression.close()
        ours = [str(one.message) for one in said if "gradcomp" in str(one.message)]
        return [p.detach().clone() for p in trainer.model.parameters()], trainer.compression, ours

    wanted = run(8, save_strategy="steps", save_steps=4)[0]
    files = [file.name for file in sorted(Path(folder, "run/checkpoint-4").glob("gradcomp*"))]
    dist.barrier()
    assert files == ["gradcomp-0-of-2.pt", "gradcomp-1-of-2.pt"]
    if rank == 0:
        shutil.rmtree(f"{folder}/run/checkpoint-8")
    dist.barrier()
    weights, state, said = run(
        8, True
    )  # the last in the folder, in the middle of an epoch of 6 steps
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True)) and not said
    assert (state.step, state.stats.steps) == (8, 4)
    half = f"{folder}/run/checkpoint-4"
    with pytest.raises(ValueError, match="does not fit.*OneBit.*delete gradcomp-\\*.pt from"):
        run(8, half, "block4")
    dist.barrier()
    if rank == 0:
        for file in Path(half).glob("gradcomp*"):
            file.unlink()
    dist.barrier()
    other, state, said = run(8, half)
    assert not all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True)), (
        "residuals do not matter here"
    )
    assert state.step == 4
    return said


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    said = gloo(2, resume, str(tmp_path))
    assert (
        "checkpoint-4 has no gradcomp state: residuals begin at zero" in said[0][0] and not said[1]
    )


def other_days(folder):
    """A second train(), a step past the hook, arguments that are refused, another subclass of
    Trainer.
    """
    import torch.distributed as dist
    from transformers import Trainer

    from gradcomp.integrations.transformers import Compressed

    with launched():
        trainer = trainer_of(folder, max_steps=2, optimizer=sgd)
        trainer.train()
        first = trainer.compression
        trainer.train()
        assert trainer.compression is first and first.stats.steps == 4
        wrapped, step = trainer.model_wrapped, trainer.training_step

        def past_ddp(model, *args):
            assert model is wrapped
            return step(model.module, *args)

        trainer.training_step = past_ddp
        with pytest.raises(
            GradcompError,
            match=(
                "gradcomp was registered but not called in this step: no forward pass went through"
            ),
        ):
            trainer.train()
        first.close()
        for error, match, arguments in (
            (ValueError, "unknown codec 'ternari'", {"codec": "ternari"}),
            (
                TypeError,
                "options must be a gradcomp.Options, got dict",
                {"compression": {"start_step": 3}},
            ),
        ):
            with pytest.raises(error, match=match):
                trainer_of(folder, **arguments)

        class Base(Trainer):
            pass

        class Own(Compressed, Base):
            pass

        forget()
        trainer = trainer_of(
            folder,
            codec="auto",
            max_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_only_model=True,
            kind=Own,
        )
        trainer.train()
        assert isinstance(trainer, Base) and trainer.compression.stats.steps == 1
        assert Path(folder, "checkpoint-1").is_dir() and not list(
            Path(folder, "checkpoint-1").glob("gradcomp*")
        )
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


EXAMPLE = Path(__file__).parents[1] / "examples/transformers_gpt.py"


def example(*arguments):
    forget()
    try:
        return program(*arguments)
    finally:
        forget()


def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path):
    def run(steps):
        options = [
            "--output",
            tmp_path / "out",
            "--steps",
            steps,
            "--save-every",
            5,
            "--batch",
            2,
            "--layers",
            1,
        ]
        return "".join(gloo(2, example, str(EXAMPLE), *options)).splitlines()[-1]

    assert re.fullmatch(r"5 steps: loss \d\.\d+, 7.\d times fewer bytes than fp32", run(5))
    assert re.fullmatch(r"10 steps: loss \d\.\d+, 7.\d times fewer bytes than fp32", run(10))
    assert (
        torch.load(tmp_path / "out/checkpoint-10/gradcomp-1-of-2.pt", weights_only=True)["step"]
        == 10
    )
