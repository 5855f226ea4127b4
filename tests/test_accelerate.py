"""accelerate with compressed gradients and local steps: the plain run's weights to the last bit,
checkpoints, what is refused and said.
"""

import contextlib
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
from gradcomp import GradcompError, PeerMismatch, UnsupportedTensor

pytestmark = pytest.mark.extras

ROWS, BATCH = 48, 4  # samples, and a rank's share of a minibatch


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 1))


def loader(rank, world):
    draw = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(ROWS, 40, generator=draw), torch.randn(ROWS, 1, generator=draw)
    )
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, world, rank, shuffle=False))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def split(model):
    return gradcomp.optim.SplitSGD(gradcomp.optim.split_parameters(model), lr=0.1, momentum=0.9)


def forget():
    """Let accelerate look for its ranks anew: it keeps what it found for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def accelerator(**options):
    """Yield an Accelerator of the ranks that are there already, as a launcher would have made
    them.
    """
    import torch.distributed as dist
    from accelerate import Accelerator

    place = {
        "RANK": dist.get_rank(),
        "LOCAL_RANK": dist.get_rank(),
        "WORLD_SIZE": dist.get_world_size(),
    }
    place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    forget()
    try:
        yield Accelerator(cpu=True, **options)
    finally:
        forget()
        for name in place:
            os.environ.pop(name, None)


def loss_of(model, x, y):
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(x.to(dtype)), y.to(dtype))


def epoch(accelerator, model, optimizer, data):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, x, y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def plain(rank, world, codec, optimizer_of, accumulate):
    """Return the weights of a torch loop with `gradcomp.ddp.register`."""
    model = net()
    optimizer = optimizer_of(model)
    model = DistributedDataParallel(model)
    state = gradcomp.ddp.register(model, codec)
    for _ in range(2):
        for number, (x, y) in enumerate(loader(rank, world)):
            last = (number + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model, x, y) / accumulate).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    state.close()
    return [p.detach().clone() for p in model.parameters()], state.stats.bytes_sent


def compare_with_plain(codec, how, accumulate):
    import torch.distributed as dist

    from gradcomp.integrations.accelerate import register

    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer_of = {"sgd": sgd, "split": split}[how]
    wanted, sent = plain(rank, world, codec, optimizer_of, accumulate)
    dist.barrier()
    with accelerator(gradient_accumulation_steps=accumulate) as own:
        model = net()
        model, optimizer = own.prepare(model, optimizer_of(model))
        state = register(own, model, codec)
        for _ in range(2):
            epoch(own, model, optimizer, loader(rank, world))
    assert state.stats.bytes_sent == sent > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), wanted, strict=True))
    state.close()


@pytest.mark.parametrize(
    ("codec", "how", "accumulate"),
    [("terngrad", "sgd", 1), ("onebit", "sgd", 3), ("onebit", "split", 1)],
)
def test_weights_are_those_of_plain_ddp(gloo, codec, how, accumulate):
    gloo(2, compare_with_plain, codec, how, accumulate)


def resume(folder):
    import torch.distributed as dist

    from gradcomp.integrations.accelerate import register

    rank, world = dist.get_rank(), dist.get_world_size()

    def run(codec, epochs, start="", save=""):
        with accelerator() as own, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = net()
            model, optimizer = own.prepare(model, sgd(model))
            state = register(own, model, codec)
            if start:
                own.load_state(f"{folder}/{start}")
            for _ in range(epochs):
                epoch(own, model, optimizer, loader(rank, world))
            if save:
                own.save_state(f"{folder}/{save}")
            state.close()
        ours = [str(one.message) for one in said if "gradcomp" in str(one.message)]
        return [p.detach().clone() for p in model.parameters()], state, ours

    wanted = run("onebit", 4)[0]
    run("onebit", 2, save="half")
    dist.barrier()  # every rank writes its own file
    assert sorted(file.name for file in Path(folder, "half").glob("gradcomp*")) == [
        f"gradcomp-{n}-of-2.pt" for n in (0, 1)
    ]
    weights, state, said = run("onebit", 2, "half")
    assert all(torch.equal(a, b) for a, b in zip(weights, wanted, strict=True)) and not said
    assert state.step == 24 and state.stats.steps == 12  # 6 steps an epoch
    with pytest.raises(ValueError, match="does not fit.*OneBit.*delete gradcomp-\\*.pt from"):
        run("block4", 1, "half")
    dist.barrier()
    if rank == 1:
        Path(folder, "half/gradcomp-1-of-2.pt").rename(f"{folder}/one")
    dist.barrier()
    other, _, said = run("onebit", 2, "half")
    assert not all(torch.equal(a, b) for a, b in zip(other, wanted, strict=True)), (
        "residuals do not matter here"
    )
    assert "ranks [1] have no gradcomp-*.pt in" in said[0]
    if rank == 0:
        Path(folder, "half/gradcomp-1-of-2.pt").write_bytes(b"cut off")
    dist.barrier()
    with pytest.raises(ValueError, match="rank 1 cannot read its gradcomp-\\*.pt in"):
        run("onebit", 2, "half")
    dist.barrier()
    if rank == 0:
        Path(folder, "one").rename(f"{folder}/half/gradcomp-1-of-2.pt")
    dist.barrier()
    dist.destroy_process_group()  # the same checkpoint in a run of one rank, each rank for itself
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = 0, 1
    _, state, said = run("onebit", 1, "half")
    assert state.step == 24 and not said


def test_a_run_resumes_bit_for_bit(gloo, tmp_path):
    gloo(2, resume, str(tmp_path))


def not_called():
    import torch.distributed as dist

    from gradcomp.integrations.accelerate import local_steps, register

    rank, world = dist.get_rank(), dist.get_world_size()
    (x, y), *_ = loader(rank, world)
    with accelerator() as own:
        for how, why in (
            ("module", "no forward pass went through"),
            ("no_sync", "ran under no_sync"),
            ("wrapped again", "no forward pass went through"),
        ):
            model = net()
            model, optimizer = own.prepare(model, sgd(model))
            state = register(own, model, "terngrad")
            before = [p.detach().clone() for p in model.parameters()]
            used = {
                "module": model.module,
                "no_sync": model,
                "wrapped again": own.prepare_model(model.module),
            }[how]
            with model.no_sync() if how == "no_sync" else contextlib.nullcontext():
                own.backward(loss_of(used, x, y))
            with pytest.raises(
                GradcompError, match=f"gradcomp was registered but not called in this step: .*{why}"
            ):
                optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
            state.close()
            own.free_memory()
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        state = register(own, model, "terngrad")
        own.backward(loss_of(model, x, y))
        optimizer.step()
        with pytest.raises(
            GradcompError, match="a second step on gradients that were averaged once"
        ):
            optimizer.step()
        state.close()
        own.free_memory()
        model = net()
        optimizer = own.prepare(sgd(model))
        local = local_steps(own, model, optimizer, "terngrad", sync_every=2)
        with pytest.raises(GradcompError, match="was not called after it, so ranks never sync"):
            epoch(own, model, optimizer, [(x, y)] * 2)
        local.close()


def test_a_step_without_the_hook_is_an_error(gloo):
    gloo(2, not_called)


def local_run(method, folder, other_size=False):
    import torch.distributed as dist

    from gradcomp.integrations.accelerate import local_steps

    rank, world = dist.get_rank(), dist.get_world_size()
    kind = {"DiLoCo": gradcomp.DiLoCo, "LocalSGD": gradcomp.LocalSGD}[method]

    def run(epochs, start="", save="", seed=0):
        with accelerator(gradient_accumulation_steps=2) as own:
            model = net(seed)
            optimizer = own.prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
            local = local_steps(own, model, optimizer, "onebit", sync_every=5, method=kind)
            if start:
                own.load_state(start)
            with local:
                for _ in range(epochs):
                    epoch(own, model, optimizer, loader(rank, world))
                if save:
                    own.save_state(save)
        return [p.detach().clone() for p in model.parameters()], local

    wanted = net()
    optimizer, steps = torch.optim.AdamW(wanted.parameters(), lr=0.01), 0
    with kind(wanted, optimizer, "onebit", sync_every=5) as plain_local:
        for _ in range(4):
            for number, (x, y) in enumerate(loader(rank, world)):
                (loss_of(wanted, x, y) / 2).backward()
                if number % 2:
                    nn.utils.clip_grad_norm_(wanted.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
    half = f"{folder}/half"
    whole, local = run(4, seed=rank)  # weights of rank 0 are sent to all
    assert steps == local.inner_steps == 12 and local.syncs == plain_local.syncs == 2
    assert all(torch.equal(a, b) for a, b in zip(whole, wanted.parameters(), strict=True))
    run(2, save=half)
    resumed, local = run(2, half)
    assert local.inner_steps == 12
    assert all(torch.equal(a, b) for a, b in zip(resumed, wanted.parameters(), strict=True))
    dist.barrier()
    dist.destroy_process_group()  # the same checkpoint in a run of one rank, each rank for itself
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = 0, 1
    _, local = run(1, half)
    assert local.inner_steps == 12
    Path(folder, str(os.getpid())).mkdir()
    with pytest.raises(ValueError, match="was not saved with local steps"):
        run(1, f"{folder}/{os.getpid()}")


@pytest.mark.parametrize("method", ["DiLoCo", "LocalSGD"])
def test_local_steps_are_those_of_a_plain_loop_and_resume(gloo, tmp_path, method):
    gloo(2, local_run, method, str(tmp_path))


def refused():
    import torch.distributed as dist
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
        with pytest.warns(UserWarning, match="no optimizer of this model was prepared yet"):
            register(own, prepared, "auto", optimizer=sgd(model)).close()
    with accelerator() as own, pytest.raises(PeerMismatch, match="codec"):
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        register(own, model, ["terngrad", "onebit"][dist.get_rank()])
        epoch(own, model, optimizer, loader(dist.get_rank(), 2))


def test_what_is_refused(gloo):
    gloo(2, refused)


def alone():
    import torch.distributed as dist

    from gradcomp.integrations.accelerate import register

    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with accelerator() as own:
        own.state._shared_state["distributed_type"] = own.state._shared_state[
            "distributed_type"
        ].__class__.NO  # as without a launcher
        model = net()
        model, optimizer = own.prepare(model, sgd(model))
        with pytest.warns(UserWarning, match="one process: there is nobody to send gradients to"):
            assert register(own, model, "terngrad") is None
        epoch(own, model, optimizer, loader(0, 1))
    return rank


def test_one_process_trains_and_says_that_nothing_is_compressed(gloo):
    assert gloo(2, alone) == [0, 1]


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


@pytest.mark.filterwarnings("ignore:gradcomp. no optimizer")
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


EXAMPLE = Path(__file__).parents[1] / "examples/accelerate_digits.py"


@pytest.mark.parametrize(
    ("options", "ratio"),
    [(("--codec", "onebit"), "30.3 times"), (("--sync-every", "7"), "15.*in each of [36] syncs")],
)
def test_the_example_trains_and_goes_on_where_it_was(gloo, tmp_path, options, ratio):
    for _ in range(2):
        out = "".join(
            gloo(
                2,
                example,
                str(EXAMPLE),
                "--epochs",
                1,
                "--checkpoint",
                tmp_path / "saved",
                *options,
            )
        )
        assert re.search(ratio, out.splitlines()[-1]), out
    assert float(re.search(r"test accuracy ([\d.]+) %", out)[1]) > 60, out  # 10 is chance
    saved = torch.load(tmp_path / "saved/gradcomp-1-of-2.pt", weights_only=True)
    assert (saved["local"]["inner_steps"] if "local" in saved else saved["step"]) == 2 * 21


def example(*arguments):
    forget()
    return program(*arguments)


@pytest.mark.long
def test_the_example_runs_under_torchrun():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLE),
        "--epochs",
        "1",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0 and "15.8 times fewer bytes" in done.stdout, (
        done.stdout + done.stderr[-4000:]
    )
