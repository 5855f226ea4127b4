"""accelerate: local steps, several models, and what is refused; the rest is in
test_integration_conformance.py.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from _frameworks import (
    batches,
    become_a_run_of_one,
    loss_of,
    net,
    placed,
    same,
    sgd,
    split,
    weights_of,
)
from _ranks import each_rank
from torch import nn

import gradcomp
from gradcomp import GradcompError, PeerMismatch

pytestmark = pytest.mark.extras


@contextlib.contextmanager
def accelerator(**options):
    """Yield an Accelerator of the ranks that are there already."""
    from accelerate import Accelerator

    with placed():
        yield Accelerator(cpu=True, **options)


def epoch(accelerator, model, optimizer, data):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


@each_rank(2)
def test_an_optimizer_without_its_local_steps_is_an_error():
    from gradcomp.integrations.accelerate import local_steps

    batch, *_ = batches()
    with accelerator() as own:
        model = net()
        kept = torch.arange(20.0).view(4, 5) * (1 - dist.get_rank())
        model.register_buffer("kept", kept[:, :2])  # not contiguous
        optimizer = own.prepare(sgd(model))
        local = local_steps(own, model, optimizer, "terngrad", sync_every=2)
        assert model.kept[-1].tolist() == [15, 16]
        with pytest.raises(GradcompError, match="was not called after it, so ranks never sync"):
            epoch(own, model, optimizer, [batch] * 2)
        local.close()
        epoch(own, model, optimizer, [batch] * 2)  # it is over


@pytest.mark.parametrize("method", [gradcomp.DiLoCo, gradcomp.LocalSGD])
@each_rank(2)
def test_local_steps_are_those_of_a_plain_loop_and_resume(tmp_path, method):
    from gradcomp.integrations.accelerate import local_steps

    rank, half = dist.get_rank(), f"{tmp_path}/half"

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
    (tmp_path / str(rank)).mkdir()
    with pytest.raises(ValueError, match="was not saved with local steps"):
        train(1, f"{tmp_path}/{rank}")


@each_rank(2)
def test_a_checkpoint_that_cannot_be_loaded_changes_nothing_later(tmp_path):
    """An optimizer ignored the next state that was loaded, and the model had the checkpoint's
    weights.
    """
    from gradcomp.integrations.accelerate import local_steps

    def started(sync_every):
        model = net()
        optimizer = sgd(model)
        more = own.prepare(optimizer), "onebit"
        return model, optimizer, local_steps(own, model, *more, sync_every=sync_every)

    with accelerator() as own:
        model, optimizer, local = started(5)
        with local:
            epoch(own, model, optimizer, [next(iter(batches()))])
            own.save_state(str(tmp_path))
        dist.barrier()
        own.free_memory()
        model, _, local = started(4)
        with pytest.raises(ValueError, match="does not fit: the state has sync_every 5"):
            own.load_state(str(tmp_path))
        assert same(model, weights_of(net()))
        local.close()
        own.free_memory()
        model, optimizer, local = started(5)
        dist.barrier()
        (tmp_path / "optimizer.bin").unlink(missing_ok=True)
        dist.barrier()
        with pytest.raises(FileNotFoundError, match="optimizer.bin"):
            own.load_state(str(tmp_path))
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.7
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.7
        local.close()


@each_rank(2)
def test_what_is_refused():
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


@each_rank(2)
def test_split_optimizers_in_a_list_are_compared_between_ranks():
    """In a list they stayed in accelerate's wrapper, and trails of other seeds went unnoticed."""
    from gradcomp.integrations.accelerate import register

    with accelerator() as own:
        model = net(seed=dist.get_rank())
        prepared, optimizer = own.prepare(model, split(model))
        with pytest.raises(PeerMismatch, match="trail of"):
            register(own, prepared, "onebit", optimizer=[optimizer])


@each_rank(2)
def test_every_model_has_files_of_its_own(tmp_path):
    from gradcomp.integrations.accelerate import register

    with accelerator() as own:
        first, second = own.prepare(net(), net())
        one, two = (
            register(own, model, "onebit", optimizer=sgd(model)) for model in (first, second)
        )

        def names(saved):
            own.save_state(str(tmp_path / saved))
            dist.barrier()
            return {file.name.split("-")[0] for file in (tmp_path / saved).glob("gradcomp*")}

        assert names("two") == {"gradcomp", "gradcomp1"}
        one.close()
        assert names("one") == {"gradcomp1"}
        third = register(own, own.prepare(net()), "onebit")
        assert names("new") == {"gradcomp", "gradcomp1"}
        two.close()
        third.close()
        assert not own._save_model_state_pre_hook, "closed, it keeps the model alive"
