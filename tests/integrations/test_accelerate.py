"""accelerate with compressed gradients and local steps: the plain run's weights to the last bit,
checkpoints, what is refused and said.
"""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _frameworks import (
    become_a_run_of_one,
    forget,
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
from torch import nn

import gradcomp
from gradcomp import GradcompError, PeerMismatch, UnsupportedTensor

pytestmark = pytest.mark.extras


def batches():
    return loader(dist.get_rank(), dist.get_world_size(), shuffle=False)


@contextlib.contextmanager
def accelerator(**options):
    """Yield an Accelerator of the ranks that are there already."""
    from accelerate import Accelerator

    with launched(OMP_NUM_THREADS=1):
        forget()
        try:
            yield Accelerator(cpu=True, **options)
        finally:
            forget()


def epoch(accelerator, model, optimizer, data):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def compare_with_plain(codec, optimizer_of, accumulate):
    from gradcomp.integrations.accelerate import register

    wanted, theirs = plain(batches(), codec, optimizer_of, accumulate=accumulate, clip=0.5)
    with accelerator(gradient_accumulation_steps=accumulate) as own:
        model = net()
        model, optimizer = own.prepare(model, optimizer_of(model))
        with register(own, model, codec) as state:
            for _ in range(2):
                epoch(own, model, optimizer, batches())
    assert state.stats.bytes_sent == theirs.stats.bytes_sent > 0
    assert same(model, wanted)


@pytest.mark.parametrize(
    ("codec", "optimizer_of", "accumulate"),
    [("terngrad", sgd, 1), ("onebit", sgd, 3), ("onebit", split, 1)],
)
def test_weights_are_those_of_plain_ddp(gloo, codec, optimizer_of, accumulate):
    gloo(2, compare_with_plain, codec, optimizer_of, accumulate)


def resume(folder):
    from gradcomp.integrations.accelerate import register

    rank = dist.get_rank()

    def train(codec, epochs, start="", save=""):
        with accelerator() as own, said() as warned:
            model = net()
            model, optimizer = own.prepare(model, sgd(model))
            with register(own, model, codec) as state:
                if start:
                    own.load_state(f"{folder}/{start}")
                for _ in range(epochs):
                    epoch(own, model, optimizer, batches())
                if save:
                    own.save_state(f"{folder}/{save}")
        dist.barrier()  # every rank writes its own file
        return weights_of(model), state, warned

    wanted = train("onebit", 4)[0]
    train("onebit", 2, save="half")
    files = [f"gradcomp-{n}-of-2.pt" for n in (0, 1)]
    assert sorted(file.name for file in Path(folder, "half").glob("gradcomp*")) == files
    weights, state, warned = train("onebit", 2, "half")
    assert same(weights, wanted) and not warned
    assert state.step == 24 and state.stats.steps == 12  # 6 steps an epoch
    with pytest.raises(ValueError, match="does not fit.*OneBit.*delete gradcomp-\\*.pt from"):
        train("block4", 1, "half")
    dist.barrier()
    theirs = Path(folder, "half", files[1])
    if rank == 1:
        theirs.rename(f"{folder}/one")
    dist.barrier()
    other, _, warned = train("onebit", 2, "half")
    assert not same(other, wanted), "residuals do not matter here"
    assert "ranks [1] have no gradcomp-*.pt in" in warned[0]
    if rank == 0:
        theirs.write_bytes(b"cut off")
    dist.barrier()
    with pytest.raises(ValueError, match="rank 1 cannot read its gradcomp-\\*.pt in"):
        train("onebit", 2, "half")
    dist.barrier()
    if rank == 0:
        Path(folder, "one").rename(theirs)
    become_a_run_of_one()  # the same checkpoint, each rank for itself
    _, state, warned = train("onebit", 1, "half")
    assert state.step == 24 and not warned


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    gloo(2, resume, str(tmp_path))


def not_called():
    from gradcomp.integrations.accelerate import local_steps, register

    (x, y), *_ = batches()
    missed = "gradcomp was registered but not called in this step: .*"
    with accelerator() as own:
        for how, why in (
            ("module", f"{missed}no forward pass went through"),
            ("no_sync", f"{missed}ran under no_sync"),
            ("wrapped again", f"{missed}no forward pass went through"),
            ("stepped twice", "a second step on gradients that were averaged once"),
        ):
            model = net()
            model, optimizer = own.prepare(model, sgd(model))
            with register(own, model, "terngrad"):
                used = model.module if how == "module" else model
                if how == "wrapped again":
                    used = own.prepare_model(model.module)
                with model.no_sync() if how == "no_sync" else contextlib.nullcontext():
                    own.backward(loss_of(used, x, y))
                if how == "stepped twice":
                    optimizer.step()
                before = weights_of(model)
                with pytest.raises(GradcompError, match=why):
                    optimizer.step()
                assert same(model, before)
            own.free_memory()
        model = net()
        optimizer = own.prepare(sgd(model))
        local = local_steps(own, model, optimizer, "terngrad", sync_every=2)
        with pytest.raises(GradcompError, match="was not called after it, so ranks never sync"):
            epoch(own, model, optimizer, [(x, y)] * 2)
        local.close()


def test_a_step_without_the_hook_is_an_error(gloo):
    gloo(2, not_called)


def local_run(method, folder):
    from gradcomp.integrations.accelerate import local_steps

    rank, half = dist.get_rank(), f"{folder}/half"

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(epochs, start="", save="", seed=0):
        with accelerator(gradient_accumulation_steps=2) as own:
            model = net(seed)
            optimizer = own.prepare(adamw(model))
            local = local_steps(own, model, optimizer, "onebit", sync_every=5, method=method)
            if start:
                own.load_state(start)
            with local:
                for _ in range(epochs):
                    epoch(own, model, optimizer, batches())
                if save:
                    own.save_state(save)
        return weights_of(model), local

    wanted, steps = net(), 0
    optimizer = adamw(wanted)
    with method(wanted, optimizer, "onebit", sync_every=5) as plain_local:
        for _ in range(4):
            for number, (x, y) in enumerate(batches()):
                (loss_of(wanted, x, y) / 2).backward()
                if number % 2:
                    nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    whole, local = train(4, seed=rank)  # weights of rank 0 are sent to all
    assert steps == local.inner_steps == 12 and local.syncs == plain_local.syncs == 2
    assert same(wanted, whole)
    train(2, save=half)
    resumed, local = train(2, half)
    assert local.inner_steps == 12 and same(wanted, resumed)
    become_a_run_of_one()  # the same checkpoint, each rank for itself
    assert train(1, half)[1].inner_steps == 12
    Path(folder, str(rank)).mkdir()
    with pytest.raises(ValueError, match="was not saved with local steps"):
        train(1, f"{folder}/{rank}")


@pytest.mark.parametrize("method", [gradcomp.DiLoCo, gradcomp.LocalSGD])
def test_local_steps_are_those_of_a_plain_loop_and_resume(gloo, tmp_path, method):
    gloo(2, local_run, method, str(tmp_path))


def refused():
    from accelerate import DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    from gradcomp.integrations.accelerate import local_steps, register

    with accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    ) as own:
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        with pytest.raises(ValueError, match="comm_hook=.*fp16.* leave it out"):
            register(own, model, "terngrad")
    with accelerator() as own:
        model = net()
        with pytest.raises(
            TypeError, match="must be what accelerator.prepare\\(model\\) returns.*got Sequential"
        ):
            register(own, model, "terngrad")
        prepared, optimizer = own.prepare(model, sgd(model))
        with pytest.raises(ValueError, match="unknown codec 'ternari'"):
            register(own, prepared, "ternari")
        with pytest.raises(TypeError, match="leave it out there"):
            local_steps(own, prepared, optimizer, "terngrad", sync_every=2)
        with pytest.raises(ValueError, match="sync_every"):
            local_steps(own, net(), sgd(net()), "terngrad", sync_every=0)
        on_gpu = type("Accelerator", (), {"device": torch.device("cuda", 0)})()
        with pytest.raises(UnsupportedTensor, match="runs on cuda:0: Accelerator\\(cpu=True\\)"):
            register(on_gpu, prepared, "terngrad")
        own.free_memory()
        model = net()
        prepared = own.prepare(model)
        optimizer = sgd(model)  # not prepared, and watched all the same
        with register(own, prepared, "auto", optimizer=optimizer):
            loss_of(model, *next(iter(batches()))).backward()
            with pytest.raises(GradcompError, match="no forward pass went through"):
                optimizer.step()
    with accelerator() as own, pytest.raises(PeerMismatch, match="codec"):
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        register(own, model, ["terngrad", "onebit"][dist.get_rank()])
        epoch(own, model, optimizer, batches())


def test_what_is_refused(gloo):
    gloo(2, refused)


def alone():
    from gradcomp.integrations.accelerate import register

    become_a_run_of_one()
    with accelerator() as own:
        kinds = type(own.state._shared_state["distributed_type"])
        own.state._shared_state["distributed_type"] = kinds.NO  # as without a launcher
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        with pytest.warns(UserWarning, match="one process: there is nobody to send gradients to"):
            assert register(own, model, "terngrad") is None
        epoch(own, model, optimizer, batches())


def test_one_process_trains_and_says_that_nothing_is_compressed(gloo):
    gloo(2, alone)


def two_models(folder):
    from gradcomp.integrations.accelerate import register

    with accelerator() as own:
        first, second = own.prepare(net(), net())
        one, two = (
            register(own, model, "onebit", optimizer=sgd(model)) for model in (first, second)
        )
        own.save_state(f"{folder}/two")
        one.close()
        own.save_state(f"{folder}/one")
        third = register(own, own.prepare(net()), "onebit")
        own.save_state(f"{folder}/new")
        two.close()
        third.close()


def test_every_model_has_files_of_its_own(gloo, tmp_path):
    gloo(2, two_models, str(tmp_path))
    found = {
        name: {file.name.split("-")[0] for file in (tmp_path / name).glob("gradcomp*")}
        for name in ("two", "one", "new")
    }
    assert found == {
        "two": {"gradcomp", "gradcomp1"},
        "one": {"gradcomp1"},
        "new": {"gradcomp", "gradcomp1"},
    }


EXAMPLE = Path(__file__).parents[2] / "examples/accelerate_digits.py"


@pytest.mark.parametrize(
    ("options", "ratio"),
    [(("--codec", "onebit"), "30.3 times"), (("--sync-every", "7"), "15.*in each of [36] syncs")],
)
def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path, options, ratio):
    arguments = "--epochs", 1, "--checkpoint", tmp_path / "saved", *options
    for _ in range(2):
        out = "".join(gloo(2, example, str(EXAMPLE), *arguments))
        assert re.search(ratio, out.splitlines()[-1]), out
    assert float(re.search(r"test accuracy ([\d.]+) %", out)[1]) > 60, out  # 10 is chance
    saved = torch.load(tmp_path / "saved/gradcomp-1-of-2.pt", weights_only=True)
    assert (saved["local"]["inner_steps"] if "local" in saved else saved["step"]) == 2 * 21


def example(*arguments):
    forget()
    return program(*arguments)


@pytest.mark.long
def test_the_example_runs_under_torchrun():
    launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2
    assert "15.8 times fewer bytes" in run(*launcher, EXAMPLE, "--epochs", 1)
