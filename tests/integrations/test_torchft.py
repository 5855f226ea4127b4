"""Replica groups of torchft that come and go, with compressed averages: a lost group costs the
others one step at most, and all groups end with the same bits.
"""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from unittest import mock

import _forks
import pytest
import torch
from _averaging import Run
from _ranks import run_local
from _soak import SAMPLES, STEPS, WAIT_S, flat
from _spoken import PATIENCE_S, Spoken
from gradcomp.launch.ports import free_port

from gradcomp import Advanced, GradcompError, GradientAverager, UnsupportedTensor
from gradcomp.comm import LocalCommunicator
from gradcomp.onebit_sgd import AggregateAdagrad

pytestmark = [pytest.mark.extras, pytest.mark.slow]

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples/torchft_digits.py"


class Group(Spoken):
    """A process of a replica group."""

    def __init__(self, folder, address, **more):
        out = Path(folder, f"{more['group']}-{more.get('rank', 0)}.pt")
        super().__init__(HERE / "_replicas.py", out, lighthouse=address, **more)

    def made(self, step):
        """Wait for this step, or a later one: a group that came late begins with that."""
        self.said(r"step (\d+) ", lambda match: int(match[1]) >= step)


@pytest.fixture
def start(tmp_path, request):
    """Return a function that starts a group, below one lighthouse that wants one group, or as many
    as its parameter says.
    """
    torchft = pytest.importorskip("torchft._torchft")
    lighthouse = torchft.LighthouseServer(
        bind="[::]:0",
        min_replicas=getattr(request, "param", 1),
        join_timeout_ms=1000,
        heartbeat_timeout_ms=3000,
    )
    started = []

    def one(group, **more):
        address = more.pop("lighthouse", lighthouse.address())
        started.append(Group(tmp_path, address, group=group, **more))
        return started[-1]

    one.folder = tmp_path
    yield one
    for group in started:
        group.program.kill()
        group.program.wait()
    lighthouse.shutdown()


def ended(groups):
    """Return what groups say at their end. Weights, the optimizer's state and second moments must
    be the same bits.
    """
    results = [group.result() for group in groups]
    (_, first), *others = results
    for _, other in others:
        for part in first.keys() - {"inner"}:
            assert first[part].keys() == other[part].keys()
            for name, tensor in first[part].items():
                assert torch.equal(tensor, other[part][name]), (part, name)
        for key, values in first["inner"].items():
            for name, value in values.items():
                assert torch.equal(value, other["inner"][key][name]), name
    return [done for done, _ in results]


MORE = {"until": 3, "options": {"precondition": True}}
LONG = pytest.mark.long
FAULTS = "die", "die first", "die second", "break first", "refuse"


def together(start, faults, **more):
    """Start groups that begin when all are there, with their faults."""
    gate = start.folder / "gate"
    gate.unlink(missing_ok=True)  # of a trial before
    groups = [start(g, faults=one, gate=str(gate), **more) for g, one in enumerate(faults)]
    for group in groups:
        group.said("ready")
    gate.touch()
    return groups


def lose_and_find(start, fault, most=2, **more):
    """Have a fault in group 2 of 3, start the group again where it has died, and look at the end
    whether all have the same bits, and the others have lost `most` steps: one, and on a busy host
    another one, for which a quorum was asked before the lighthouse knew.
    """
    groups = together(start, [{8: fault} if g == 2 else {} for g in range(3)], **more)
    if fault.startswith("die"):
        groups[2].said("die")
        groups[2].program.wait(PATIENCE_S)
        groups[2] = start(2, **more)
    done = ended(groups)
    assert all(len(one["lost"]) <= most for one in done[:2]), done
    assert done[2]["groups"][-1] == 3, "it takes part again"


@pytest.mark.parametrize("trials", [1, pytest.param(10, marks=LONG)])
@pytest.mark.parametrize(
    ("fault", "sync"),
    [
        pytest.param(fault, sync, marks=[LONG] * ((fault, sync) not in {("die first", False)}))
        for fault in FAULTS
        for sync in (True, False)
    ],
)
def test_a_fault_costs_the_others_a_step_at_most(start, fault, sync, trials):
    for _ in range(trials):
        lose_and_find(start, fault, most=1 + (trials == 1), sync=sync, **MORE)


@pytest.mark.long
@pytest.mark.parametrize(
    ("codec", "optimizer"),
    [("onebit", "sgd"), ("terngrad", "sgd"), ("auto", "adam"), ("block4", "adam")],
)
def test_any_codec_goes_on(start, codec, optimizer):
    lose_and_find(start, "die first", codec=codec, optimizer=optimizer, until=3)


def test_a_group_that_comes_late_takes_part(start):
    groups = [start(g, **MORE) for g in range(2)]
    groups[0].made(8)
    groups.append(start(2, **MORE))
    done = ended(groups)
    assert not any(one["lost"] for one in done)
    assert done[2]["groups"][-1] == 3


@pytest.mark.long
def test_groups_of_one_name_are_two(start):
    """torchft adds an id of its own to names."""
    done = ended([start(g, called=0, **MORE | {"until": 2}) for g in range(2)])
    assert [one["groups"][-1] for one in done] == [2, 2]


@pytest.mark.long
def test_a_group_that_was_frozen_comes_back(start):
    """Longer than the others wait for it: they go on without it, and it gets what they have."""
    more = {**MORE, "timeout_s": 3}
    groups = together(start, [{}, {}, {8: "freeze"}], **more)
    groups[2].said("freeze")
    groups[0].made(14)
    groups[2].program.send_signal(signal.SIGCONT)
    assert ended(groups)[2]["groups"][-1] == 3


@pytest.mark.parametrize(
    ("odd", "words", "sync"),
    [
        (
            {"codec": "other"},
            r"PeerMismatch: codec: rank .*(OneBit.*Ternary|Ternary.*OneBit)",
            False,
        ),
        pytest.param({"codec": "other"}, "PeerMismatch: codec: ", True, marks=LONG),
        # it was torch's "size mismatch", or a ValueError of second moments
        ({"width": 65}, r"PeerMismatch: parameters: .*\(65, 40\).*\(64, 40\)", False),
        pytest.param({"width": 65}, r"PeerMismatch: parameters: .*\(65, 40\)", True, marks=LONG),
        pytest.param({"timeout_s": 4.0}, "PeerMismatch: timeout_s: rank", False, marks=LONG),
        pytest.param({"name": "mine"}, "KeyError: 'gradcomp mine'", False, marks=LONG),
        pytest.param({"name": "mine"}, "KeyError: 'gradcomp mine'", True, marks=LONG),
    ],
)
def test_a_group_with_other_settings_is_told_and_the_others_go_on(start, odd, words, sync):
    """Also one that comes with it and has the right ones."""
    more = {**MORE, "steps": 100, "sync": sync}
    groups = [start(0, **more), start(1, **more)]
    groups[0].made(8)
    wrong = start(3, **more | odd)
    groups.append(start(2, **more))
    assert wrong.program.wait(PATIENCE_S) == 1
    assert re.search(words, wrong.text()), wrong.text()
    ended(groups)


@pytest.mark.long
@pytest.mark.parametrize("sync", [True, False])
def test_a_group_that_has_loaded_a_checkpoint_takes_part(start, sync):
    """As a script does that is started again."""
    more = {**MORE, "steps": 60, "sync": sync}
    first = [start(g, **more | {"steps": 8}) for g in range(3)]
    for group in first:
        group.result()
    files = [f"{group.out}.state" for group in first]
    groups = [start(g, **more) for g in range(2)]
    groups[0].made(8)
    groups.append(start(2, state=files, **more))
    assert not any(one["lost"] for one in ended(groups)[:2])


@pytest.mark.long
def test_nobody_waits_for_a_group_that_does_not_want_a_step(start):
    lose_and_find(start, "refuse", timeout_s=2 * PATIENCE_S, **MORE)


@pytest.mark.long
def test_groups_of_two_ranks(start):
    """A rank averages with those of its number; one that dies takes its group along."""
    ports = [free_port() for _ in range(3)]

    def group(number, faults=()):
        more = {**MORE, "until": 2, "ranks": 2, "port": ports[number], "sync": True}
        return [start(number, rank=r, faults=dict(faults) if r else {}, **more) for r in (0, 1)]

    groups = [group(0), group(1, {8: "die"})]
    groups[1][1].said("die")
    groups[1][0].program.kill()
    for one in groups[1]:
        one.program.wait(PATIENCE_S)
    groups[1] = group(1)
    for rank in (0, 1):
        ended([group[rank] for group in groups])


@pytest.mark.parametrize("start", [2], indirect=True)
def test_too_few_groups_end_the_wait_for_a_quorum(start):
    """By torchft's error, after its `quorum_timeout`."""
    alone = start(0, least=2, quorum_s=3.0)
    assert alone.program.wait(PATIENCE_S) == 1
    assert "imeout" in alone.text() or "imed out" in alone.text(), alone.text()


def lighthouse_at(port):
    """Return the process of a lighthouse: `LighthouseServer.shutdown` leaves connections open."""
    words = ["--bind", f"[::]:{port}", "--min_replicas", "1", "--join_timeout_ms", "1000"]
    program = str(Path(sys.executable).with_name("torchft_lighthouse"))
    return subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)


def without_lighthouse(start, **more):
    """Return two groups whose lighthouse is killed after step 8, and its port."""
    port = free_port()
    with lighthouse_at(port) as lighthouse:
        try:
            address = f"http://localhost:{port}"
            groups = together(start, [{}, {}], lighthouse=address, steps=10**6, **more)
            groups[0].made(8)
        finally:
            lighthouse.kill()
    return groups, port


@pytest.mark.parametrize("sync", [True, pytest.param(False, marks=LONG)])
def test_a_lighthouse_that_is_gone_is_named(start, sync):
    """It was torchft's "Timeout expired" alone."""
    groups, port = without_lighthouse(start, sync=sync, quorum_s=3.0)
    said = f"TimeoutError: the lighthouse at http://localhost:{port} does not answer .*: start it"
    for group in groups:
        assert group.program.wait(PATIENCE_S) == 1
        assert re.search(said, group.text()), group.text()


@LONG
def test_a_lighthouse_that_is_back_in_time_is_asked_again(start):
    """If the manager has `quorum_retries`."""
    groups, port = without_lighthouse(start, quorum_s=60.0, retries=30)
    made = max(int(line.split()[1]) for line in groups[0].lines if line.startswith("step"))
    with lighthouse_at(port) as again:
        try:
            for group in groups:
                group.made(made + 50)
        finally:
            again.kill()


@pytest.mark.parametrize(
    ("fragments", "fault"),
    [
        pytest.param(n, fault, marks=[LONG] * ((n, fault) != (2, "die first")))
        for n in (1, 2)
        for fault in FAULTS
    ],
)
def test_local_steps_lose_a_sync_at_most(start, fragments, fault):
    """torchft's DiLoCo and its fragments with a delay; what all hold alike are anchors and outer
    state.
    """
    lose_and_find(start, fault, sync=True, fragments=fragments, until=3)


@LONG
@pytest.mark.soak
@pytest.mark.timeout(WAIT_S)
@pytest.mark.parametrize("fragments", [0, 2])
def test_nothing_grows_over_steps(start, fragments):
    """With fragments a step is a sync, after four steps of training."""
    steps = STEPS // 4 if fragments else STEPS
    more = {"fragments": fragments, "sync": True, "codec": "onebit", "until": 2}
    groups = [start(g, steps=steps, sample_every=steps // SAMPLES, **more) for g in range(2)]
    for group in groups:
        group.result(WAIT_S)
        flat([json.loads(line[5:]) for line in group.lines if line.startswith("held ")])


def accuracy_of(address, seed, *, disturbed):
    """Return the accuracy of `examples/torchft_digits.py`: three groups, of which one is killed
    after step 80 and started again.
    """
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}

    def group(number):
        return subprocess.Popen(
            [*_forks.python(), EXAMPLE, "--group", str(number), "--seed", str(seed)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    groups = [group(number) for number in range(3)]
    try:
        while disturbed and "step 80 " not in groups[2].stdout.readline():
            assert groups[2].poll() is None
        if disturbed:
            groups[2].kill()
            groups[2].wait()
            groups[2] = group(2)
        found = [one.communicate(timeout=600)[0] for one in groups]
    finally:
        for one in groups:
            one.kill()
    assert all("with 3 groups" in text for text in found), "all have taken part in the end"
    (accuracy,) = {re.search(r"test accuracy ([\d.]+) %", text)[1] for text in found}
    return float(accuracy)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_lost_and_a_new_group_cost_no_accuracy():
    torchft = pytest.importorskip("torchft._torchft")
    found = {}
    for disturbed in (False, True):
        for seed in range(3):
            lighthouse = torchft.LighthouseServer(
                bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=3000
            )
            found[disturbed, seed] = accuracy_of(lighthouse.address(), seed, disturbed=disturbed)
            lighthouse.shutdown()
    print(found)
    whole, parts = ([found[kind, seed] for seed in range(3)] for kind in (False, True))
    spread = max(stdev(whole), 0.5)  # one image of 450 is 0.22 %
    assert mean(parts) > mean(whole) - spread


# ---- in this process


@pytest.fixture
def manager():
    torchft = pytest.importorskip("torchft")
    lighthouse = torchft._torchft.LighthouseServer(bind="[::]:0", min_replicas=1)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    made = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse.address(),
    )
    yield made
    made.shutdown(wait=False)
    lighthouse.shutdown()


def averager_of(*args, **options):
    from gradcomp.integrations.torchft import ManagedAverager

    return ManagedAverager(*args, **options)


def test_what_needs_the_same_ranks_is_refused(manager):
    model = torch.nn.Linear(8, 8)
    refused = {
        "exchange='hierarchical'": {"exchange": "hierarchical"},
        "grad_scaler": {"grad_scaler": torch.amp.GradScaler("cpu")},
        "a transform": {"advanced": Advanced(transform=AggregateAdagrad())},
    }
    for what, options in refused.items():
        with pytest.raises(ValueError, match=f"{what}.* needs the same ranks in every step"):
            averager_of(manager, model, "ternary", **options)
    with averager_of(manager, model, "ternary") as averager:
        with pytest.raises(ValueError, match="has an averager '' already: give it a name"):
            averager_of(manager, model, "ternary")
        with pytest.raises(GradcompError, match="exclude each other"):
            averager.average_delayed()
    averager_of(manager, model, "ternary").close()
    manager.start_quorum()
    with pytest.raises(ValueError, match="make the averager before the first"):
        averager_of(manager, model, "ternary")


def test_options_of_torchfts_own_exchange_are_refused(manager):
    from gradcomp.integrations.torchft import DiLoCo

    model = torch.nn.Linear(8, 8)
    inner, outer = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for name in ("should_quantize", "use_bucketization", "bucket_cap_mb"):
        with pytest.raises(TypeError, match=f"{name} is not supported: .*use codec="):
            DiLoCo(manager, [model], inner, outer, 4, codec="ternary", **{name: True})


def test_averagers_of_one_manager_connect_apart(manager):
    """Their places in the store were counted, and one made after another was closed took that of a
    third.
    """
    from gradcomp.integrations import torchft as packed

    places = []

    def client(place, timeout):
        places.append(place)
        raise ConnectionError("no store here")

    first, second = (
        averager_of(manager, torch.nn.Linear(8, 8), "ternary", name=name) for name in "ab"
    )
    first.close()
    third = averager_of(manager, torch.nn.Linear(8, 8), "ternary", name="c")
    with mock.patch.object(packed, "create_store_client", client):
        for one in (second, third):
            with pytest.raises(ConnectionError, match="no store here"):
                one._connect("localhost:1", 0, 2)
            one.close()
    assert len(set(places)) == 2


def test_a_step_without_averages_is_an_error(manager):
    import torchft

    model = torch.nn.Linear(8, 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with averager_of(manager, model, "ternary", optimizer=torchft.Optimizer(manager, inner)) as one:
        managed = torchft.Optimizer(manager, inner)
        managed.zero_grad()
        model(torch.ones(8)).sum().backward()
        with pytest.raises(GradcompError, match=r"call averager.average\(\) after"):
            managed.step()
        managed.zero_grad()
        model(torch.ones(8)).sum().backward()
        one.average()
        managed.step()
        assert manager.current_step() == 2


def test_a_step_that_did_not_count_is_in_no_state(manager):
    import torchft

    model = {"w": torch.nn.Parameter(torch.zeros(64, 40))}
    inner = torch.optim.SGD(model.values(), lr=0.1)
    with averager_of(manager, model.items(), "onebit", min_numel=0) as averager:
        managed = torchft.Optimizer(manager, inner)
        for number in range(3):
            managed.zero_grad()
            model["w"].grad = torch.ones(64, 40)
            averager.average()
            if number == 2:
                manager.report_error(RuntimeError("not this one"))
            managed.step()
        assert averager.state_dict()["step"] == manager.current_step() == 2
        # another kind of error: the step does not count for its NaN gradients
        managed.zero_grad()
        model["w"].grad = torch.sparse_coo_tensor(size=(64, 40))
        with pytest.raises(UnsupportedTensor, match="sparse"):
            averager.average()
        managed.step()
        assert manager.current_step() == 2 and not model["w"].isnan().any()


def test_a_step_that_did_not_count_is_not_kept_by_a_group_that_heals(manager):
    """The others counted the step: this group takes their weights and their step number, and kept
    residuals of an average that it never applied.
    """
    import torchft

    heals, quorum = [], type(manager)._async_quorum

    def healing(self, **options):
        quorum(self, **options)
        if heals:  # as the manager does after it has received another group's state
            self._pending_state_dict = heals.pop()
            self._healing = True
            self.load_state_dict(self._pending_state_dict["torchft"])

    def residual():
        return averager._engine.store.residuals.current(0).clone()

    mine, theirs = LocalCommunicator.group(2)
    options = {"min_numel": 0, "atomic_steps": True, "timeout_s": 20.0}
    model, other = ({"w": torch.nn.Parameter(torch.zeros(64, 40))} for _ in range(2))
    inner = torch.optim.SGD(model.values(), lr=0.1)
    with (
        mock.patch.object(type(manager), "_async_quorum", healing),
        averager_of(manager, model.items(), "onebit", **options) as averager,
        GradientAverager(other.items(), "onebit", comm=theirs, **options) as peer,
        ThreadPoolExecutor(1) as thread,
    ):
        peer._compared = True  # as those of managers are
        managed, found = torchft.Optimizer(manager, inner), []
        for number in range(2):
            managed.zero_grad()
            if number == 0:
                averager._quorum = mine
            for one in (model, other):
                one["w"].grad = torch.randn(64, 40)
            average = thread.submit(peer.average)
            averager.average()
            average.result()
            found.append(residual())
            if number == 1:
                manager.report_error(RuntimeError("not this one"))
            managed.step()
        assert manager.current_step() == 1 and not torch.equal(*found)
        user = {"default": {}, "gradcomp": {}}
        heals.append({"user": user, "torchft": {"step": 2, "batches_committed": 4}})
        managed.zero_grad()
        assert manager.current_step() == 2 and not heals
        assert torch.equal(residual(), found[0])


def test_a_dropped_averager_is_gone(manager):
    import torchft

    model = torch.nn.Linear(8, 8)
    averager = averager_of(manager, model, "onebit")
    assert "gradcomp" in manager._user_state_dicts
    del averager
    gc.collect()
    assert "gradcomp" not in manager._user_state_dicts
    managed = torchft.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    managed.zero_grad()
    managed.step()
    assert manager.current_step() == 1


def test_states_of_all_groups_are_loaded_before_the_first_quorum(manager):
    def train(comm):
        run = Run(comm, "onebit", {"w": (64, 40)})
        run.steps(3)
        return run.averager.state_dict()

    states = run_local(3, train)
    model = {"w": torch.nn.Parameter(torch.zeros(64, 40))}
    with averager_of(manager, model.items(), "onebit", min_numel=0) as averager:
        with pytest.raises(ValueError, match="values of rank 1 are missing|list of the states"):
            averager.load_state_dict(states[0])
        averager.load_state_dict(states)
        wanted = sum(one["ranks"][str(r)]["residual"]["w"] for r, one in enumerate(states)) / 3
        owned = [one["ranks"][str(r)]["owner_residual"] for r, one in enumerate(states)]
        if owned[0]:
            wanted = wanted + torch.cat([one["w"] for one in owned])
        found = averager._engine.store.residuals.current(0)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
