"""Checkpoints of all ranks: complete or not there, and the last good one stays."""

import contextlib
import random
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import _forks
import numpy as np
import pytest
import torch
import torch.distributed as dist
from _ranks import each_rank
from hypothesis import example, given
from hypothesis import strategies as st
from test_conformance import ENTRIES

import gradcomp.ddp
from gradcomp import PeerLost, PeerMismatch
from gradcomp.checkpoint import Checkpoints, write_saved
from gradcomp.files import read_saved


class Numbers:
    """What a run needs, as a tensor large enough to take a moment to write."""

    def __init__(self, value=0.0, numel=1000):
        self.values = torch.full((numel,), value)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, found):
        self.values = found["values"] if isinstance(found, dict) else found


def alone(folder, value=0.0, **options):
    state, model = Numbers(value), Numbers(value + 0.5)
    return Checkpoints(folder, state, model=model, **options), state, model


def saved(folder, *steps, **options):
    for step in steps:
        alone(folder, float(step), **options)[0].save(step)


def loaded(folder):
    checkpoints, state, model = alone(folder)
    step = checkpoints.load()
    assert step is None or (state.values == step).all() and (model.values == step + 0.5).all()
    return step


def flip(file):
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


DAMAGE = {
    "a bit": flip,
    "cut off": cut,
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("no checkpoint"),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("name", ["rank-0-of-1.pt", "shared.pt"])
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_named_and_the_step_before_is_loaded(tmp_path, caplog, name, how):
    assert loaded(tmp_path / "none") is None
    saved(tmp_path, 10, 20)
    assert loaded(tmp_path) == 20
    DAMAGE[how](tmp_path / "step-000000000020" / name)
    assert loaded(tmp_path) == 10
    assert name in caplog.text and "checkpoint of step 20 is left out" in caplog.text
    DAMAGE[how](tmp_path / "step-000000000010" / name)
    with pytest.raises(ValueError, match=rf"no checkpoint in .* can be read.*{name}"):
        loaded(tmp_path)


BYTES = st.tuples(st.integers(0, 2**12), st.integers(1, 255))


@given(edits=st.lists(BYTES, max_size=4), left=st.none() | st.integers(0, 2**12))
@example(edits=[(3232, 1)], left=None)  # an entry before the file's beginning, under torch 2.13
def test_a_file_with_any_bytes_changed_is_refused_or_reads_the_same(edits, left):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state.pt")
        write_saved(file, {"step": 3, "values": torch.arange(4.0), "names": ["a", "b"]})
        content = bytearray(file.read_bytes())
        for place, change in edits:
            content[place % len(content)] ^= change
        file.write_bytes(content[:left])
        try:
            found = read_saved(file)
        except ValueError:
            return
    assert found["step"] == 3 and found["names"] == ["a", "b"]
    assert torch.equal(found["values"], torch.arange(4.0))


def test_the_newest_steps_stay_and_nothing_else(tmp_path):
    saved(tmp_path, *range(0, 60, 10), keep=3)
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        f"step-{n:012d}" for n in (30, 40, 50)
    ]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-000000000050" / "shared.pt.77.part").write_text("of a save that was killed")
    saved(tmp_path, 60, keep=1)
    left = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.*"))
    assert left == [
        "notes.txt",
        *(f"step-000000000060/{n}" for n in ("rank-0-of-1.pt", "shared.pt")),
    ]


def test_what_cannot_be_written_leaves_the_checkpoints_before(tmp_path):
    saved(tmp_path, 10)
    (tmp_path / "step-000000000020").write_text("in the way")
    with pytest.raises(OSError, match="exists"):
        saved(tmp_path, 20)
    (tmp_path / "step-000000000020").unlink()
    checkpoints, state, _ = alone(tmp_path)
    state.values = lambda: None  # cannot be pickled
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        checkpoints.save(20)
    assert not list(tmp_path.rglob("*.part")) and loaded(tmp_path) == 10


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        ({"model": 3}, TypeError, "model must have state_dict and load_state_dict, got int"),
    ],
)
def test_what_is_refused(tmp_path, options, kind, text):
    with pytest.raises(kind, match=text):
        Checkpoints(tmp_path, Numbers(), **options)


def test_what_load_would_refuse_is_not_written(tmp_path):
    """Such checkpoints were written, and none of them could be read: "damaged", `load` said."""
    saved(tmp_path, 10)
    checkpoints, state, _ = alone(tmp_path)
    state.values = np.float64(1.5)
    with pytest.raises(TypeError, match=r"rank-0-of-1\.pt would have .*numpy.*scalar.*float\(x\)"):
        checkpoints.save(20)
    assert loaded(tmp_path) == 10


def test_what_a_checkpoint_lacks_is_named_and_nothing_changes(tmp_path):
    saved(tmp_path, 10)
    state, model = Numbers(1.0), Numbers(2.0)
    with pytest.raises(ValueError, match=r"shared\.pt has no optimizer"):
        Checkpoints(tmp_path, state, model=model, optimizer=Numbers()).load()
    assert (state.values == 1).all() and (model.values == 2).all()


def unfinished(folder, *names):
    """Make the folder of a save of step 10 that was killed after it had written these files."""
    saved(folder, 10)
    for file in folder.glob("step-*/*"):
        file.unlink()
    for name in names:
        (folder / "step-000000000010" / name).write_bytes(b"PK")


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("rank-0-of-1.pt.part",),
        ("shared.pt.77.part",),
        ("rank-0-of-1.pt.part", "shared.pt"),
        ("rank-0-of-1.pt.part", "shared.pt", "rank-0-of-1.pt.77.part"),
        ("rank-0-of-2.pt.part", "shared.pt", "rank-0-of-2.pt", "rank-1-of-2.pt.part"),
    ],
)
def test_a_first_save_that_was_killed_is_no_checkpoint(tmp_path, caplog, names):
    """It was an error, in every restart."""
    unfinished(tmp_path, *names)
    assert loaded(tmp_path) is None
    assert f"no save to {tmp_path} was ever completed" in caplog.text
    saved(tmp_path, 10)
    assert loaded(tmp_path) == 10
    assert len(list(tmp_path.rglob("*.*"))) == 2


@pytest.mark.parametrize("name", ["rank-0-of-1.pt", "shared.pt"])
@pytest.mark.parametrize("later", [(), ("rank-0-of-1.pt.part", "shared.pt.77.part")])
def test_a_completed_save_of_which_a_file_is_gone_is_an_error(tmp_path, name, later):
    """Also behind a later one that was killed."""
    saved(tmp_path, 5)
    (tmp_path / "step-000000000005" / name).unlink()
    if later:
        saved(tmp_path, 10)
        for file in tmp_path.glob("step-000000000010/*"):
            file.unlink()
        for part in later:
            (tmp_path / "step-000000000010" / part).touch()
    with pytest.raises(ValueError, match="no checkpoint in .* can be read"):
        loaded(tmp_path)


class Picky(Numbers):
    """Changes half of its values before it refuses the rest, as a module does."""

    def load_state_dict(self, found):
        self.values[:500] = found["values"][:500]
        if found["values"][0] == 10.5:
            raise RuntimeError("size mismatch for w")
        super().load_state_dict(found)


def save_on_and_on(folder):
    step, state, model = 0, Numbers(0.0, 300_000), Numbers(0.5, 300_000)
    checkpoints = Checkpoints(folder, state, model=model)
    checkpoints.load()
    while True:
        step += 1
        state.values.fill_(step)
        model.values.fill_(step + 0.5)
        checkpoints.save(step)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_resumes(tmp_path):
    draw = random.Random(1)
    for _ in range(8):
        process, wanted = _forks.start(save_on_and_on, tmp_path), draw.randint(1, 6)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and last_saved(tmp_path) < wanted:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.05))
        _forks.kill(process)
        assert (loaded(tmp_path) or 0) >= wanted - 1
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def last_saved(folder):
    """Return the last step of which a file is there, 0 without any."""
    return max((int(f.parent.name[5:]) for f in folder.glob("step-*/shared.pt")), default=0)


# ---- ranks ---------------------------------------------------------------------------------------


def started(name, folder, **options):
    """Return a run of an entry point, and its checkpoints."""
    run = ENTRIES[name]("onebit")
    everything = {"model": run.model, "optimizer": run.optimizer, "timeout_s": 30}
    return run, Checkpoints(folder, run.opened, **everything, **options)


def take_steps(run, *numbers):
    for step in range(*numbers):
        run.step(step)


def trained(folder, begin, end, every_rank=False):
    """Train to step `end`, saving every five steps; return where it began, and the weights."""
    where = Path(folder, str(dist.get_rank())) if every_rank else folder
    run, checkpoints = started("ddp", where, every_rank=every_rank)
    begun = checkpoints.load()
    assert (begun or 0) == begin
    for step in range(begin, end, 5):
        take_steps(run, step, step + 5)
        checkpoints.save(step + 5)
    run.close()
    return begun, run.weights()


@pytest.mark.slow
@pytest.mark.parametrize("every_rank", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one(gloo, tmp_path, every_rank):
    (_, wanted), _ = gloo(2, trained, str(tmp_path / "whole"), 0, 15, every_rank)
    gloo(2, trained, str(tmp_path / "parts"), 0, 10, every_rank)
    # rank 1 alone has lost the newest: both go back to the one before
    (newest,) = (tmp_path / "parts").rglob("step-000000000010/rank-1-of-2.pt")
    flip(newest)
    for begun, weights in gloo(2, trained, str(tmp_path / "parts"), 5, 15, every_rank):
        assert begun == 5 and weights == wanted


def of_ranks(folder, value=0.0, timeout_s=20, **options):
    model = Numbers(value + 0.5)
    return Checkpoints(folder, Numbers(value), model=model, timeout_s=timeout_s, **options)


@pytest.mark.slow
@each_rank(2)
def test_ranks_that_save_different_steps_remove_nothing(tmp_path):
    checkpoints = of_ranks(tmp_path, keep=1)
    checkpoints.save(5)
    with pytest.raises(PeerMismatch, match="step"):
        checkpoints.save(10 + dist.get_rank())
    assert of_ranks(tmp_path).load() == 5


@pytest.mark.slow
@each_rank(2)
def test_files_of_two_runs_make_no_checkpoint(tmp_path):
    """Rank 1 fails in a second run's save of the same step; rank 0 waited until its timeout."""
    of_ranks(tmp_path, 1.0).save(5)
    checkpoints = of_ranks(tmp_path, 2.0)
    fails, said = (ZeroDivisionError, "") if dist.get_rank() else (OSError, r"ranks \[1\] could")
    how = {"side_effect": ZeroDivisionError if dist.get_rank() else write_saved}
    with (
        mock.patch("gradcomp.checkpoint.write_saved", **how),
        pytest.raises(fails, match=said),
    ):
        checkpoints.save(5)
    dist.barrier()
    assert of_ranks(tmp_path).load() is None


def steps_in(folder):
    return sorted(int(one.name.removeprefix("step-")) for one in folder.iterdir())


class Torn(Numbers):
    """Has no state to save when `broken`."""

    broken = False

    def state_dict(self):
        if self.broken:
            raise ZeroDivisionError
        return super().state_dict()


@pytest.mark.slow
@each_rank(2)
def test_a_save_that_failed_takes_no_place_of_those_to_keep(tmp_path):
    state = Torn()
    checkpoints = Checkpoints(tmp_path, state, keep=2, timeout_s=20)
    for step in (10, 20):
        checkpoints.save(step)
    state.broken = dist.get_rank() == 1
    fails, said = (ZeroDivisionError, "") if state.broken else (OSError, r"ranks \[1\] could")
    with pytest.raises(fails, match=said):
        checkpoints.save(30)
    state.broken = False
    checkpoints.save(40)
    dist.barrier()
    assert steps_in(tmp_path) == [20, 40]


@pytest.mark.slow
@each_rank(2)
def test_a_save_that_another_rank_was_late_for_can_be_repeated(tmp_path):
    """The timeout breaks the communicator that checkpoints share with `all_reduce`."""
    checkpoints = of_ranks(tmp_path, timeout_s=1)
    checkpoints.save(4)
    if dist.get_rank() == 0:
        with pytest.raises(PeerLost, match="save or load of its Checkpoints"):
            checkpoints.save(5)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(PeerLost):
            checkpoints.save(5)
    dist.barrier()
    checkpoints.save(6)
    dist.barrier()
    assert of_ranks(tmp_path).load() == 6


@pytest.mark.slow
@each_rank(2)
def test_damage_on_one_rank_is_an_error_on_all(tmp_path):
    of_ranks(tmp_path).save(5)
    if dist.get_rank() == 1:
        flip(tmp_path / "step-000000000005" / "rank-1-of-2.pt")
    with pytest.raises(ValueError, match="no checkpoint in .* can be read by every rank") as error:
        of_ranks(tmp_path).load()
    said = str(error.value)
    assert "rank-1-of-2.pt is damaged" in said if dist.get_rank() else "rank-1" not in said


@pytest.mark.slow
@each_rank(2)
def test_a_state_of_a_later_version_changes_nothing(tmp_path):
    run, checkpoints = started("ddp", tmp_path)
    with contextlib.closing(run):
        take_steps(run, 3)
        checkpoints.save(3)
        file = tmp_path / "step-000000000003" / f"rank-{dist.get_rank()}-of-2.pt"
        write_saved(file, read_saved(file) | {"format": 9})
        take_steps(run, 3, 5)
        before = run.weights()
        with pytest.raises(ValueError, match="does not fit state: .*format"):
            checkpoints.load()
        assert run.weights() == before and run.opened.step == 5


@pytest.mark.slow
@each_rank(2)
def test_what_an_object_of_one_rank_refuses_changes_nothing_on_any(tmp_path):
    of_ranks(tmp_path, 10.0).save(5)
    state, model = Numbers(1.0), Picky(2.0) if dist.get_rank() else Numbers(2.0)
    said = "does not fit model: size" if dist.get_rank() else r"ranks \[1\] could not load the chec"
    with pytest.raises(ValueError, match=said):
        Checkpoints(tmp_path, state, model=model, timeout_s=20).load()
    assert (state.values == 1).all() and (model.values == 2).all()


class Late(Numbers):
    """Is cut off when rank 0 has written both of its files, before it writes any."""

    def __init__(self, folder):
        super().__init__()
        self._file = folder / "step-000000000005" / "rank-0-of-2.pt"

    def state_dict(self):
        while not self._file.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt  # leaves files as SIGKILL does


def cut_off_in_its_first_save(folder):
    rank = dist.get_rank()
    state, ended = (Late(folder), KeyboardInterrupt) if rank else (Numbers(), PeerLost)
    with pytest.raises(ended):
        Checkpoints(folder, state, model=Numbers(), timeout_s=2).save(5)


def begun_again(folder):
    found = of_ranks(folder).load()
    of_ranks(folder).save(5)
    dist.barrier()
    return found, of_ranks(folder).load()


@pytest.mark.slow
def test_a_first_save_that_one_rank_was_killed_in_is_no_checkpoint(gloo, tmp_path):
    gloo(2, cut_off_in_its_first_save, tmp_path)
    files = ["rank-0-of-2.pt", "rank-1-of-2.pt", "shared.pt"]
    (folder,) = tmp_path.iterdir()
    assert {"rank-0-of-2.pt", "shared.pt"} <= {one.name for one in folder.iterdir()}
    assert gloo(2, begun_again, tmp_path) == [(None, 5)] * 2
    assert sorted(one.name for one in folder.iterdir()) == files


def weight_of(saved):
    return next(one for name, one in saved["model"].items() if name.endswith("0.weight"))


def momentum_of(saved):
    return saved["optimizer"]["state"][1]["momentum_buffer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("ddp", weight_of, "parameter 0.weight"),
        ("averager", weight_of, "parameter 0.weight"),
        ("double_buffer", momentum_of, "optimizer of 0.bias"),
        ("ddp", momentum_of, "optimizer of 0.bias"),
        ("ddp", None, None),
    ],
)
@each_rank(2)
def test_ranks_that_have_loaded_different_weights_are_told(tmp_path, name, change, field):
    """They trained on, each with its own."""
    rank = dist.get_rank()
    run, checkpoints = started(name, tmp_path / str(rank), every_rank=True)
    with contextlib.closing(run):
        take_steps(run, 2)
        checkpoints.save(2)
        if rank and change:
            file = tmp_path / str(rank) / "step-000000000002" / "shared.pt"
            found = read_saved(file)
            change(found)[0] += 1
            write_saved(file, found)
        take_steps(run, 2, 4)
        before = run.weights(), run.opened.step
        if field is None:
            assert checkpoints.load() == 2
            return
        with pytest.raises(PeerMismatch) as caught:
            checkpoints.load()
        assert (caught.value.field, caught.value.rank) == (field, 1)
        assert (run.weights(), run.opened.step) == before
        take_steps(run, 4, 6)
        run.opened.check_replicas()


class Apart(torch.optim.SGD):
    """Has momentum of the parameters that this rank owns only, as optimizers that are sharded."""

    def state_dict(self):
        found = super().state_dict()
        own = found["state"].items()
        return found | {"state": {n: one for n, one in own if n % 2 == dist.get_rank()}}


@pytest.mark.slow
@each_rank(2)
def test_what_ranks_may_have_different_is_not_compared(tmp_path):
    """Buffers, frozen parameters, shares of an optimizer's state, other objects of a rank."""
    rank = dist.get_rank()

    def start():
        net = torch.nn.Sequential(torch.nn.Linear(40, 64), torch.nn.BatchNorm1d(64))
        net[0].bias.requires_grad_(False)
        model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
        state = gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=30)
        optimizer = Apart(model.parameters(), lr=0.1, momentum=0.9)
        more = {"model": net, "optimizer": optimizer, "position": Numbers(rank)}
        where = tmp_path / str(rank)
        return net, model, state, optimizer, Checkpoints(where, state, every_rank=True, **more)

    torch.manual_seed(rank)
    net, model, state, optimizer, checkpoints = start()
    with state, torch.no_grad():
        net[0].bias.fill_(rank)
        with torch.enable_grad():
            model(torch.randn(16, 40)).square().sum().backward()
        optimizer.step()
        checkpoints.save(1)
    net, model, state, optimizer, checkpoints = start()
    with state:
        assert checkpoints.load() == 1
        assert (net[0].bias == rank).all() and len(optimizer.state) in (1, 2)
        model(torch.randn(16, 40)).square().sum().backward()
        optimizer.step()
        assert state.step == 2


def nothing_on_rank_1(folder):
    where = Path(folder, "elsewhere" if dist.get_rank() else ".")
    with pytest.raises(ValueError, match="another rank has none") as error:
        of_ranks(where, every_rank=True).load()
    return str(error.value)


@pytest.mark.slow
def test_a_rank_that_has_nothing_is_no_fresh_start(gloo, tmp_path):
    gloo(2, trained, str(tmp_path), 0, 5)
    assert len(set(gloo(2, nothing_on_rank_1, str(tmp_path)))) == 2


def fewer(folder):
    run, checkpoints = started("ddp", folder)
    return checkpoints.load(), run.opened.step


@pytest.mark.slow
def test_another_number_of_ranks_reads_them_too(gloo, tmp_path):
    gloo(2, trained, str(tmp_path), 0, 5)
    assert gloo(3, fewer, str(tmp_path)) == [(5, 5)] * 3
    (tmp_path / "step-000000000005" / "rank-1-of-2.pt").unlink()
    with pytest.raises(AssertionError, match=r"is incomplete: it has no rank-0-of-3\.pt"):
        gloo(3, fewer, str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["double_buffer", "diloco", "local_sgd"])
@each_rank(2)
def test_updates_under_way_and_weights_of_each_rank_are_saved(tmp_path, name):
    """Weights were those from before the update, or on every rank those of rank 0."""
    run, checkpoints = started(name, tmp_path)
    take_steps(run, 5)  # one more than the last exchange of local steps
    checkpoints.save(5)
    here = run.weights()
    take_steps(run, 5, 11)
    wanted = run.weights()
    run.close()
    again, checkpoints = started(name, tmp_path)
    assert checkpoints.load() == 5 and again.weights() == here
    take_steps(again, 5, 11)
    assert again.weights() == wanted
    again.close()


def saved_apart(folder):
    run, checkpoints = started("diloco", folder)
    take_steps(run, 5)
    checkpoints.save(5)
    run.close()


def loaded_apart(folder):
    run, checkpoints = started("diloco", folder)
    assert checkpoints.load() == 5
    anchors = dict(run.opened._fragments[0].anchors)
    run.close()
    return [torch.equal(p, anchors[name]) for name, p in run.model.named_parameters()]


@pytest.mark.slow
def test_with_other_ranks_local_steps_go_on_from_the_anchors(gloo, tmp_path):
    gloo(2, saved_apart, tmp_path)
    assert gloo(3, loaded_apart, tmp_path) == [[True] * 4] * 3
