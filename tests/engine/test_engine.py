"""One model's compression: what a step commits, errors, schedules, the end."""

import contextlib
import gc
import random
import signal
import subprocess
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from _averaging import Run, Scale, same
from _forks import python
from _held import descriptors, steady
from _models import bits, filled
from _ranks import each_rank, run_local
from _saved import bits_of, parts_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from gradcomp import GradcompError, GradientAverager, PeerLost, PeerMismatch
from gradcomp.engine.buckets import fuse
from gradcomp.engine.options import Options
from gradcomp.engine.step import Engine

# ---- what a step commits -------------------------------------------------------------------------


def two_buckets(comm, **options):
    """Return a run of two parameters with a bucket for each of them."""
    return Run(comm, "onebit", {"p0": (600,), "p1": (700,)}, bucket_cap_mb=1e-6, **options)


def average_behind(mine, step):
    """Average the gradients of a step while others may be computed."""
    mine.fill(step)
    mine.averager.average_delayed()
    mine.averager.flush()


def kept(mine):
    """Return what a run has committed: the number of its next step, and what it remembers."""
    state = mine.state()
    return state["step"], bits_of(parts_of(state))


def fails_in_its_last_stage(mine, after=lambda: None):
    """Let the last stage of the second bucket raise in every later step."""
    exchange = list(mine.averager._engine.layouts._exchanges.values())[1]
    finish = exchange.finish

    def stage(number):
        finish(number)
        after()
        raise KeyError("mine")

    exchange.finish = stage


def fail_in_step_one(comm, culprits, ended=None, **options):
    """Run a good step and one in which `culprits` fail at their last bucket; return what is
    kept after both.
    """
    mine = two_buckets(comm, **options)
    mine.step(0)
    before = kept(mine)
    if comm.rank in culprits:
        fails_in_its_last_stage(mine, lambda: ended and ended.wait(0.3))
    with contextlib.suppress(KeyError, PeerLost):
        mine.step(1)
        ended and ended.set()
    return before, kept(mine)


def test_a_bucket_that_failed_keeps_the_others_of_its_step_from_committing():
    for before, after in run_local(2, fail_in_step_one, (0, 1)):
        assert before == after, "the first bucket had ended well"


def test_a_step_counts_on_all_ranks_or_on_none():
    """Rank 0 fails in its last bucket when its peer has all it needs; alone a whole step keeps
    the peer from going ahead.
    """
    ahead = threading.Event()
    (first, second), (before, after) = run_local(2, fail_in_step_one, (0,), ahead)
    assert ahead.is_set() and first == second and after[0] == before[0] + 1
    for before, after in run_local(2, lambda comm: fail_in_step_one(comm, (0,), atomic_steps=True)):
        assert before == after and after[0] == 1


@each_rank(2, "local")
def test_steps_that_rotate_count_on_all_ranks_or_on_none(comm):
    mine = two_buckets(comm, atomic_steps=True)
    average_behind(mine, 0)
    before = kept(mine)
    if comm.rank == 0:
        fails_in_its_last_stage(mine)
    mine.fill(1)
    mine.averager.average_delayed()
    with pytest.raises((KeyError, PeerLost)):
        mine.averager.flush()
    assert before == kept(mine)


@each_rank(2, "local")
def test_ranks_with_other_loss_scales_commit_nothing(comm):
    """torch's GradScaler decides on each rank alone: residuals in other units would never be
    noticed.
    """
    scaler = Scale(4.0)
    mine = two_buckets(comm, grad_scaler=scaler)
    mine.step(0)
    residual = mine.parts()["residual"]["p0"].clone()
    scaler.value = 2.0 if comm.rank else 4.0
    with pytest.raises(PeerMismatch, match="loss_scale") as found:
        mine.step(1)
    state = mine.state()
    assert torch.equal(residual / 4.0 * state["loss_scale"], parts_of(state)["residual"]["p0"])
    assert (found.value.rank, found.value.expected, found.value.got) == (1, 4.0, 2.0)
    assert state["step"] == 1


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan"), -1.0])
@each_rank(2, "local")
def test_a_loss_scale_that_carries_nothing_is_an_error_with_its_value(comm, scale):
    scaler = Scale(4.0)
    mine = two_buckets(comm, grad_scaler=scaler)
    mine.step(0)
    scaler.value = scale
    with pytest.raises(GradcompError, match=f"scale is {scale}"):
        mine.averager.average()
    assert torch.isfinite(mine.parts()["residual"]["p0"]).all()


@each_rank(2, "local")
def test_steps_are_counted_below_two_to_the_32(comm):
    mine = two_buckets(comm)
    state = mine.state()
    for step in (2**32, 2**64, -1):
        with pytest.raises(ValueError, match=f"step {step}, an integer"):
            mine.averager.load_state_dict({**state, "step": step})
    mine.averager.load_state_dict({**state, "step": 2**32 - 1})
    mine.step(0)
    with pytest.raises(GradcompError, match="step 4294967296"):
        mine.averager.average()


@each_rank(2, "local")
def test_an_abandoned_step_is_waited_for_and_commits_nothing(comm):
    """An exception of the user's in the middle of a backward: its buckets must not run on into
    the next step.
    """
    plain, mine = two_buckets(comm.duplicate(60.0)), two_buckets(comm)
    plain.step(0)
    averager = mine.averager
    engine, bucket, ended = averager._engine, averager._buckets[0], []
    mine.fill(0)
    bucket.load()
    abandoned = engine.begin()
    if comm.rank == 1:
        time.sleep(0.2)
    abandoned.submit(bucket.flat, bucket.members, lambda error: ended.append(error is None))
    step = engine.begin()
    assert ended == [True], "the bucket of the abandoned step was still under way"
    for bucket in averager._buckets:
        bucket.load()
        step.submit(bucket.flat, bucket.members)
    step.finish()
    assert kept(mine) == kept(plain)


@each_rank(2, "local")
def test_buffers_of_layouts_that_are_used_no_more_are_freed(comm):
    """DDP rebuilds its buckets after the first backward: the exchanges of the first ones hold as
    much as the gradients.
    """
    mine = two_buckets(comm)
    mine.step(0)
    layouts = mine.averager._engine.layouts
    old = [weakref.ref(exchange) for exchange in layouts._exchanges.values()]
    mine.averager._buckets = fuse(mine.averager._sources, 25.0)
    mine.step(1)
    gc.collect()
    assert [ref() for ref in old] == [None, None]
    assert len(layouts._exchanges) == 1


class Drift:
    """How far a tensor has come from an anchor that every rank holds alike: what local steps
    average.
    """

    trained, shard = True, None

    def __init__(self, name, anchor, local):
        self.name, self.like, self.local = name, anchor, local

    def load(self, view):
        view.copy_(self.like - self.local)

    def store(self, view):
        self.like.sub_(view)
        self.local.copy_(self.like)

    def clear(self):
        self.local.copy_(self.like)


@each_rank(2, "local")
def test_anything_with_a_name_can_be_averaged(comm):
    """Buckets and engines know no gradients: pseudo-gradients of local steps are a source like
    any other.
    """
    anchors = [torch.ones(64, 3), torch.ones(100), torch.full((7,), 5.0, dtype=torch.bfloat16)]
    sources = [Drift(f"t{n}", a, a - (comm.rank + 1) * (n + 1)) for n, a in enumerate(anchors)]
    engine = Engine(sources, "identity", comm, Options(timeout_s=20))
    buckets = fuse(sources, 25.0)
    assert [len(bucket.members) for bucket in buckets] == [2, 1], "one bucket a dtype"
    step = engine.begin()
    for bucket in buckets:
        bucket.load()
        step.submit(bucket.flat, bucket.members)
    step.finish()
    for bucket in buckets:
        bucket.store()
    engine.check_replicas()
    engine.close()
    assert all(torch.equal(source.local, source.like) for source in sources)
    assert [anchor.flatten()[0].item() for anchor in anchors] == [1 - 1.5, 1 - 3.0, 5 - 4.5]


@pytest.mark.parametrize("atomic_steps", [False, True])
def test_reset_goes_on_from_before_the_step_that_failed(atomic_steps):
    def run(comm, fails):
        mine = two_buckets(comm, atomic_steps=atomic_steps)
        mine.step(0)
        if fails:
            fails_in_its_last_stage(mine)
            with pytest.raises(KeyError):
                mine.step(7)
            assert all(p.grad.isnan().all() for p in mine.named.values())
            mine.averager.reset()
        average_behind(mine, 1)
        assert mine.averager.step == 2
        return bits(p.grad for p in mine.named.values()), kept(mine)

    assert run_local(2, run, False) == run_local(2, run, True)


@each_rank(2)
def test_a_model_in_ddp_goes_on_after_a_reset():
    """DDP's reducer comes to its end before the error leaves backward: the next forward finds it
    ready.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3)))
    rank = torch.distributed.get_rank()
    with gradcomp.ddp.register(
        model, "onebit", min_numel=0, atomic_steps=True, timeout_s=20
    ) as state:

        def backward():
            model.zero_grad()
            model(torch.full((2, 40), 1.0 + rank)).square().sum().backward()

        for _ in range(3):
            backward()
        if rank == 0:
            state._step.buckets[0][0].own = lambda number: 1 / 0
        with pytest.raises(PeerLost if rank else ZeroDivisionError):
            backward()
        left = [bool(p.grad.isnan().all()) for p in model.parameters()]
        with pytest.raises(PeerLost if rank else ZeroDivisionError):
            backward()
        state.reset()
        for _ in range(2):
            backward()
        state.check_replicas()
        assert state.step == 5 and all(left)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    return bits(p.grad for p in model.parameters())


def test_reset_says_so_where_the_failure_left_ranks_at_different_steps():
    ahead = threading.Event()

    def run(comm):
        mine = two_buckets(comm)
        mine.step(0)
        saved = mine.state()
        if comm.rank == 0:
            fails_in_its_last_stage(mine, lambda: ahead.wait(5))
        with contextlib.suppress(KeyError):
            mine.averager.average()
            ahead.set()
        for call in (mine.averager.reset, mine.averager.average) * 2:
            with pytest.raises(PeerMismatch, match="step"):
                call()
        # the state could not be loaded: that raised the mismatch again
        mine.averager.load_state_dict(saved)
        mine.averager.reset()
        assert mine.averager.step == 1
        return mine.step(1)

    assert same(*run_local(2, run))


@each_rank(2, "local")
def test_a_state_is_loaded_after_an_exchange_that_failed_behind(comm):
    """Its averages are dropped; loading raised its error once."""
    mine = two_buckets(comm)
    mine.step(0)
    saved = mine.state()
    mine.fill(1)
    mine.averager.average_delayed()
    mine.averager._engine.fail(KeyError("mine"))
    mine.averager.load_state_dict(saved)
    mine.averager.reset()
    mine.step(1)
    return bits(p.grad for p in mine.named.values())


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"exchange": "all_gather"}, {"exchange": "reduce_scatter", "atomic_steps": True}]
)
@pytest.mark.parametrize("seed", range(3))
def test_delays_anywhere_change_no_bit(seed, options):
    """Every stage of every bucket on every rank takes its time, in another order each run."""

    def run(comm, delays):
        shapes = {str(numel): (numel,) for numel in (64, 200, 333, 1024, 5)}
        mine = Run(comm, "onebit", shapes, bucket_cap_mb=1e-6, **options)
        draw = random.Random(1000 * seed + comm.rank)
        pipeline = mine.averager._engine.pipeline
        work, found = pipeline._work, []

        def delayed(number, task):
            time.sleep(draw.choice((0, 0, 0.0005, 0.004)))
            work(number, task)

        if delays:
            pipeline._work = delayed
        for step in range(4):
            if delays:
                time.sleep(draw.choice((0, 0.003)))
            mine.step(step) if step % 2 else average_behind(mine, step)
            found.append(bits(p.grad for p in mine.named.values()))
        return found, kept(mine)

    assert run_local(3, run, False) == run_local(3, run, True)


# ---- the end -------------------------------------------------------------------------------------


def stage_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("gradcomp-")}


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_dropped_without_close_gives_everything_back(fails):
    """Notebooks and sweeps make one after the other: threads and buffers went on living, each
    with a communicator.
    """
    before = stage_threads()

    def run(comm):
        mine = two_buckets(comm, atomic_steps=True)
        mine.step(0)
        average_behind(mine, 1)
        if fails:
            fails_in_its_last_stage(mine)
            with pytest.raises((KeyError, PeerLost)):
                mine.averager.average()
        return weakref.ref(mine.averager._engine), weakref.ref(comm)

    alive = [ref for refs in run_local(2, run) for ref in refs]
    assert wait_for(lambda: all(ref() is None for ref in alive)), (
        "somebody holds an engine or a communicator"
    )
    assert wait_for(lambda: not stage_threads() - before)


def dropped_over_gloo():
    def held():
        return len(stage_threads()), descriptors()

    def one():
        torch.manual_seed(0)
        model = nn.Linear(30, 20)
        averager = GradientAverager(model, "onebit", min_numel=0, timeout_s=20)
        filled(model, 1.0)
        averager.average()

    one()
    before = steady(held)
    for _ in range(3):
        one()
    wait_for(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    return before, held()


def test_what_is_dropped_gives_its_sockets_back_over_gloo(gloo):
    for (threads, files), after in gloo(2, dropped_over_gloo):
        assert after[0] <= threads and after[1] <= files


def test_with_closes_and_tells_the_peers():
    def run(comm):
        mine = two_buckets(comm)
        mine.fill(0)
        averager = mine.averager
        with contextlib.suppress(ZeroDivisionError), averager as same:
            assert same is averager
            averager.average()
            if comm.rank == 0:
                raise ZeroDivisionError
            begun = time.monotonic()
            with pytest.raises(PeerLost):
                averager.average()
            assert time.monotonic() - begun < 15
        with pytest.raises((RuntimeError, PeerLost)):
            averager.average()

    before = stage_threads()
    run_local(2, run)
    assert wait_for(lambda: not stage_threads() - before)


# 1: torch by itself ends so where certain packages are installed (Sphinx's notebook reader brings
# some), without gradcomp, too
@pytest.mark.parametrize(
    ("how", "status"), [("interrupt", {130, -signal.SIGINT, 1}), ("rotate", {3})]
)
@pytest.mark.slow
def test_a_program_ends_at_once_with_an_exchange_under_way_and_without(how, status, tmp_path):
    """Ctrl-C in backward, or an exit after `rotate`: it took 15 s, a core dump and the exit
    status.
    """
    script = Path(__file__).with_name("_interrupted.py")
    pipes = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
    ranks = [
        subprocess.Popen([*python(), script, str(rank), tmp_path / "store", how], **pipes)
        for rank in range(2)
    ]
    try:
        out, errors = ranks[0].communicate(timeout=120)
        took = [time.time() - float(out.split()[0])]
        assert ranks[0].returncode in status, errors
        assert "terminate called" not in errors
        assert "KeyboardInterrupt" in errors or how == "rotate"
        out, errors = ranks[1].communicate("go\n", timeout=60)
        took.append(time.time() - float(out.split()[0]))
        assert ranks[1].returncode == 4, errors
    finally:
        for rank in ranks:
            rank.kill()
    assert max(took) < 14, took  # about 1.3 s where nobody else computes; the timeout is 60 s
