"""Local steps at sites that come and go: a sync counts at all its sites or at none, a silent site
is left out and comes back, and no change of the weights is lost or counted twice.
"""

import contextlib
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import _forks
import pytest
import torch
from _models import bits, sgd, train
from _ranks import run_local
from torch import nn

from gradcomp import Advanced, DiLoCo, NotFinite, PeerLost, PeerMismatch
from gradcomp.comm.base import Channel
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.local import Coordinator, ElasticDiLoCo, coordinator, elastic
from gradcomp.local import __main__ as program

pytestmark = pytest.mark.usefixtures("one_thread")

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5))
SIZES = {"features": 40, "classes": 5}
H = 3
WAIT_S = 60
EXAMPLE = Path(__file__).parents[2] / "examples/sites_digits.py"


def fresh(dtype=torch.float32):
    torch.set_num_threads(1)  # it counts for the calling thread
    return copy.deepcopy(MODEL).to(dtype)


class Run:
    """A coordinator, and sites that are threads."""

    def __init__(self, **options):
        self.options = {"host": "127.0.0.1", "patience_s": 20, "give_up_s": 60, **options}
        self.coordinator = Coordinator(port=0, **self.options)
        self.port = self.coordinator.port

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def site(self, name, *, model=None, codec="onebit", kind=ElasticDiLoCo, **options):
        """Join: return a model, its optimizer and its local steps."""
        model = fresh() if model is None else model
        optimizer = sgd(model)
        options = {"min_numel": 0, "timeout_s": 10.0, "sync_every": H, **options}
        local = kind(model, optimizer, codec, coordinator=self.address, name=name, **options)
        return model, optimizer, local

    def each(self, names, body):
        """Return ``body(name)`` of each site, all at once; the first error is raised."""
        found, errors = {}, []

        def work(name):
            try:
                found[name] = body(name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a site hangs"
        if errors:
            raise errors[0]
        return found

    def until_joined(self):
        """Wait until the first sync has counted."""
        end = time.monotonic() + WAIT_S
        while self.coordinator._state.newest < 0:
            assert time.monotonic() < end
            time.sleep(0.01)

    def until_arrived(self, name):
        """Wait until a site waits for a sync."""
        arrived, end = self.coordinator._state.arrived, time.monotonic() + WAIT_S
        while not any(one.name == name for one in list(arrived.values())):
            assert time.monotonic() < end, name
            time.sleep(0.01)

    def restart(self):
        self.coordinator.close()
        self.coordinator = Coordinator(port=self.port, store_port=0, **self.options)


@pytest.fixture
def run():
    """Return a function that starts a coordinator."""
    runs = []

    def start(sites=1, **options):
        runs.append(Run(sites=sites, **options))
        return runs[-1]

    yield start
    for one in runs:
        one.coordinator.close()


def steps(model, optimizer, local, numbers, seed):
    for number in numbers:
        train(model, optimizer, seed, [number], **SIZES)
        local.step()


def changed(model, local, value):
    """A round in which the site's training moves every weight by -value."""
    with torch.no_grad():
        for p in model.parameters():
            p -= value
    for _ in range(H):
        local.step()


def zeros():
    model = fresh()
    for p in model.parameters():
        nn.init.zeros_(p)
    return model


def everywhere(model, value):
    for p in model.parameters():
        torch.testing.assert_close(p.detach(), torch.full_like(p, value), rtol=1e-6, atol=0)
    return True


def undisturbed(sites):
    """Return the outcome of three syncs of three sites."""

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(3 * H), "abc".index(name))
            return outcome(local)

    (wanted,) = set(sites.each("abc", site).values())
    return wanted


def outcome(local):
    """Return what must be the same bits on all sites after a sync."""
    state = local._fragments[0].shared_state()
    momenta = [t for one in state["outer"]["state"].values() for t in one.values() if t is not None]
    return state["syncs"], bits(state["anchors"].values()), bits(momenta)


# averages in fp32, and an outer step that moves the anchors by them
PLAIN = {"codec": "identity", "outer_optimizer": lambda anchors: torch.optim.SGD(anchors, lr=1.0)}


# ---- sites that stay -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["onebit", "terngrad", "ternary"])
def test_sites_that_stay_have_the_bits_of_diloco(run, codec):
    sites = run(sites=3)

    def elastic(name):
        model, optimizer, local = sites.site(name, codec=codec)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(4 * H), "abc".index(name))
            assert local.members == ["a", "b", "c"] and local.syncs == 4
            return bits(model), local.stats.bytes_sent

    def fixed(comm):
        model = fresh()
        optimizer = sgd(model)
        local = DiLoCo(model, optimizer, codec, sync_every=H, comm=comm, min_numel=0)
        steps(model, optimizer, local, range(4 * H), comm.rank)
        sent = local.stats.bytes_sent
        local.close()
        return bits(model), sent

    found = sites.each("abc", elastic)
    assert [found[name] for name in "abc"] == run_local(3, fixed)


def test_models_need_not_be_equal_at_the_start(run):
    sites = run(sites=2)

    def site(name):
        model = fresh()
        if name == "b":
            nn.init.zeros_(model[0].weight)
        model, optimizer, local = sites.site(name, model=model)
        with contextlib.closing(local):
            assert bits(model) == bits(MODEL), name
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters(run, dtype):
    sites = run(sites=2)

    def site(name):
        model, optimizer, local = sites.site(name, model=fresh(dtype))
        with contextlib.closing(local):
            steps(model, optimizer, local, range(2 * H), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 2


def test_sites_with_other_numbers_of_inner_steps(run):
    sites = run(sites=2)

    def site(name):
        every = H if name == "a" else 2 * H
        model, optimizer, local = sites.site(name, sync_every=every)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(2 * every), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 2


def test_in_a_with_block(run):
    sites = run(sites=2)

    def site(name):
        model, optimizer, local = sites.site(name)
        with local:
            train(model, optimizer, ord(name), range(H), **SIZES)
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 1


# ---- sites that come, go and are late ------------------------------------------------------------


@pytest.mark.parametrize("late", ["add", "drop"])
def test_a_late_change_is_added_to_the_next_sync_or_dropped(run, late):
    """a, b and c sync while d is silent; their changes are 1 each time, the late one is 5."""
    sites = run(sites=4, patience_s=1.0)
    synced = threading.Event()

    def site(name):
        model, _, local = sites.site(name, model=zeros(), late=late, **PLAIN)
        with contextlib.closing(local):
            if name == "d":
                assert synced.wait(WAIT_S)
                changed(model, local, 5.0)
            else:
                changed(model, local, 1.0)
                assert local.members == ["a", "b", "c"] and everywhere(model, -1.0)
                synced.set()
                sites.until_arrived("d")
                changed(model, local, 1.0)
            assert local.members == ["a", "b", "c", "d"]
            assert everywhere(model, -3.0 if late == "add" else -2.0)
            return local.late_added, local.late_dropped, outcome(local)

    found = sites.each("abcd", site)
    assert len({one[-1] for one in found.values()}) == 1
    assert [found[name][:2] for name in "abc"] == [(0, 0)] * 3
    assert found["d"][:2] == ((1, 0) if late == "add" else (0, 1))


def test_a_new_site_takes_anchors_and_outer_state(run):
    sites = run(sites=2)
    begun = threading.Event()

    def site(name):
        if name == "c":
            assert begun.wait(WAIT_S)
            model, optimizer, local = sites.site(name, model=zeros())
        else:
            model, optimizer, local = sites.site(name)
            steps(model, optimizer, local, range(2 * H), ord(name))
            begun.set()
            sites.until_arrived("c")
            steps(model, optimizer, local, range(H), ord(name))
        with contextlib.closing(local):
            assert local.syncs == 3 and local.members == ["a", "b", "c"]
            steps(model, optimizer, local, range(2 * H), ord(name))
            assert local.late_added == local.late_dropped == 0
            return outcome(local)

    found = sites.each("abc", site)
    assert len(set(found.values())) == 1 and found["a"][0] == 5


def test_a_site_that_leaves_is_not_waited_for(run):
    sites = run(sites=2, patience_s=600, give_up_s=600)

    def site(name):
        model, optimizer, local = sites.site(name)
        steps(model, optimizer, local, range(H), ord(name))
        if name == "a":
            local.close()
            return 0
        with contextlib.closing(local):
            steps(model, optimizer, local, range(2 * H), ord(name))
            return local.syncs

    assert sites.each("ab", site)["b"] == 3


def test_a_sync_waits_for_enough_sites(run):
    sites = run(sites=2, min_sites=2, patience_s=0.5, give_up_s=2.0)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            if name == "a":
                with pytest.raises(PeerLost, match="1 of at least 2 sites have come"):
                    steps(model, optimizer, local, range(H), 0)

    sites.each("ab", site)


# ---- syncs that fail -----------------------------------------------------------------------------


PHASES = ["first", "second", "vote"]


def break_next(local, phase):
    """Make this site fail in a phase of its next sync, once."""
    due = [phase]

    def once(*phases):
        if due and due[0] in phases:
            due.clear()
            raise ConnectionError("the network is gone, a test says")

    class Broken(TorchCommunicator):
        def _start_all_to_all(self, *args):
            once("anchors" if args[-1] is Channel.CONTROL else "first")
            return super()._start_all_to_all(*args)

        def _start_all_gather(self, *args):
            if args[-1] is Channel.SECOND:
                once("second")
            return super()._start_all_gather(*args)

    class Against(coordinator.Client):
        def vote(self, sync, site, syncs, why="", lost=None):
            with contextlib.suppress(ConnectionError):
                once("vote")
                return super().vote(sync, site, syncs, why, lost)
            return super().vote(sync, site, syncs, "a test says")

    def connect(host, plan):
        comm = type(local)._connect(local, host, plan)
        comm.__class__ = Broken
        return comm

    local._connect = connect
    local._client = lambda: Against(local._coordinator, WAIT_S)


@pytest.mark.parametrize("phase", PHASES)
def test_a_sync_that_fails_changes_nothing_and_is_made_again(run, phase, caplog):
    wanted, sites = undisturbed(run(sites=3)), run(sites=3)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), "abc".index(name))
            if name == "b":
                break_next(local, phase)
            steps(model, optimizer, local, range(H, 3 * H), "abc".index(name))
            assert local.members == ["a", "b", "c"]
            return outcome(local)

    found = sites.each("abc", site)
    assert set(found.values()) == {wanted} and "a test says" in caplog.text


@pytest.mark.parametrize("fails", ["a", "c"])
def test_anchors_that_do_not_arrive_are_sent_again(run, fails):
    sites = run(sites=2)
    begun = threading.Event()

    def site(name):
        if name == "c":
            assert begun.wait(WAIT_S)
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            if name == "c":
                return outcome(local)
            steps(model, optimizer, local, range(H), ord(name))
            begun.set()
            sites.until_arrived("c")
            if name == fails:
                break_next(local, "anchors")
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    if fails == "c":  # it connects in its constructor
        receive, due = elastic._unpacked, [1]

        def damaged(data):
            return receive(data[:-100] if due and due.pop() else data)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(elastic, "_unpacked", damaged)
            found = sites.each("abc", site)
    else:
        found = sites.each("abc", site)
    assert len(set(found.values())) == 1 and found["a"][0] == 2


def test_no_change_is_lost_or_counted_twice(run):
    """Applied averages and residuals add up to the changes, exactly, though a sync fails in each
    phase: weights are small integers.
    """
    sites = run(sites=4)

    def site(name):
        model, _, local = sites.site(name, model=zeros(), **{**PLAIN, "codec": "onebit"})
        with contextlib.closing(local), torch.no_grad():
            sent = [torch.zeros_like(p) for p in model.parameters()]
            draw = torch.Generator().manual_seed(ord(name))
            for phase in PHASES:
                if name == "b":
                    break_next(local, phase)
                for p, whole in zip(model.parameters(), sent, strict=True):
                    change = torch.randint(-4, 5, p.shape, generator=draw).float()
                    p -= change
                    whole += change
                for _ in range(H):
                    local.step()
            parts = local.state_dict()["extra"]["fragments"][0]["averager"]["ranks"]
            (own,) = parts.values()
            names = [name for name, _ in model.named_parameters()]
            assert local.syncs == len(PHASES) and set(own["residual"]) == set(names)
            owed = [own["residual"][name].double() for name in names]
            owner = [own["owner_residual"][name].double() for name in names]
            moved = [-anchor.double() for anchor in model.parameters()]
            return sent, owed, owner, moved

    found = list(sites.each("abcd", site).values())
    for at, _ in enumerate(MODEL.parameters()):
        sent = sum(one[0][at].double().sum() for one in found)
        owed = sum(one[1][at].sum() + 4 * one[2][at].sum() for one in found)
        moved = 4 * found[0][3][at].sum()
        torch.testing.assert_close(moved + owed, sent, rtol=1e-4, atol=1e-3)


def test_a_site_that_makes_every_sync_fail_is_sent_away(run):
    """Its votes name nobody, as where its memory does not suffice for the others' anchors."""
    sites = run(sites=2)
    begun = threading.Event()

    def site(name):
        if name == "c":
            assert begun.wait(WAIT_S)
            with pytest.raises(PeerLost, match="lost this one in 3 syncs in a row"):
                sites.site(name, kind=Failing)
            return None
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            begun.set()
            sites.until_arrived("c")
            steps(model, optimizer, local, range(H), ord(name))
            assert local.members == ["a", "b"]
            return outcome(local)

    found = sites.each("abc", site)
    assert found["a"] == found["b"] and found["a"][0] == 1


class Failing(ElasticDiLoCo):
    def _take_anchors(self, plan, trained):
        super()._take_anchors(plan, trained)
        self._has_anchors = False
        raise PeerLost("anchors", -1, 0.0, "a test says")


def test_the_next_run_on_the_same_coordinator(run):
    sites = run(patience_s=0.5, give_up_s=600)
    for _ in range(2):
        model, optimizer, local = sites.site("a")
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), 0)
            assert local.syncs == 1


def test_weights_that_are_not_finite(run):
    sites = run(sites=2)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), ord(name))
            train(model, optimizer, ord(name), range(H), **SIZES)
            before = outcome(local)
            if name == "a":
                with torch.no_grad():
                    model[0].bias[3] = torch.nan
            with pytest.raises(NotFinite) as caught:
                for _ in range(H):
                    local.step()
            assert caught.value.names == (["0.bias"] if name == "a" else [])
            assert outcome(local) == before
            local.restore()
            for group in optimizer.param_groups:
                for p in group["params"]:
                    optimizer.state[p].clear()
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 2


def test_anchors_that_differ_are_replaced_by_those_of_the_first(run, caplog):
    sites = run(sites=2)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), ord(name))
            if name == "b":
                local._fragments[0].anchors[0][1].data[0, 0] += 1  # a bit that has flipped
                local.check_replicas()
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and "parameter 0.weight" in caplog.text


# ---- refusals ------------------------------------------------------------------------------------

OTHERS = {
    "codec": ({"codec": "terngrad"}, "codec: this rank has TernGrad"),
    "parameters": ({"model": nn.Linear(40, 5)}, "parameters: this rank has"),
    "outer_optimizer": (
        {"outer_optimizer": lambda ps: torch.optim.SGD(ps, 0.5)},
        "outer_optimizer: this rank has",
    ),
    "options": ({"min_numel": 7}, "options: this rank has"),
    "timeout_s": ({"timeout_s": 11.0}, "timeout_s: this rank has 11.0, rank 0 has 10.0"),
    "exchange": (
        {"exchange": "all_gather"},
        "exchange: this rank has all_gather, rank 0 has auto",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_site_with_other_settings_gets_an_error_and_the_others_go_on(run, what):
    sites = run(sites=2)
    begun, refused = threading.Event(), threading.Event()
    options, text = OTHERS[what]

    def site(name):
        if name == "c":
            assert begun.wait(WAIT_S)
            with pytest.raises(PeerMismatch, match=re.escape(text)):
                sites.site(name, **options)
            refused.set()
            return None
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            begun.set()
            assert refused.wait(WAIT_S)
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    found = sites.each("abc", site)
    assert found["a"] == found["b"] and found["a"][0] == 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"late": "forget"}, "late must be one of"),
        ({"coordinator": "localhost"}, "coordinator must be 'HOST:PORT'"),
        ({"coordinator": 29400}, "coordinator must be 'HOST:PORT'"),
        ({"exchange": "hierarchical"}, "the same ranks in every sync"),
        ({"advanced": Advanced(nodes=[[0], [1]])}, "the same ranks in every sync"),
        ({"fragments": 2}, "fragments"),
        ({"warmup_steps": 2}, "warmup_steps"),
        ({"shard_outer": True}, "shard_outer"),
    ],
)
def test_wrong_options(options, text):
    model = fresh()
    options = {"coordinator": "127.0.0.1:1", "sync_every": H, **options}
    with pytest.raises((ValueError, TypeError), match=text):
        ElasticDiLoCo(model, sgd(model), "onebit", **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sites": 0}, "sites must be an integer of at least 1, got 0"),
        ({"min_sites": 1.5}, "min_sites must be an integer"),
        ({"patience_s": 0}, "patience_s must be positive"),
        ({"patience_s": 9, "give_up_s": 5}, "at most give_up_s"),
    ],
)
def test_wrong_options_of_a_coordinator(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        Coordinator(port=0, **options)


def test_a_coordinator_that_is_not_there(monkeypatch):
    monkeypatch.setattr(elastic, "TIMEOUT_S", 0.5)
    model = fresh()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            Coordinator("127.0.0.1", port)
    with pytest.raises(PeerLost, match=f"coordinator at 127.0.0.1:{port} does not answer"):
        ElasticDiLoCo(model, sgd(model), "onebit", coordinator=f"127.0.0.1:{port}", sync_every=H)


GOOD = {
    "kind": "arrive",
    "version": 1,
    "site": "s",
    "name": "odd",
    "syncs": 0,
    "synced": [],
    "pending": "",
    "size": 0,
    "trained": False,
    "late": "add",
    "heal": False,
    "compare": False,
    "settings": {},
}
FOREIGN = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0" * 100 + b"\n",
    b"[" * 100_000 + b"\n",
    b"[]\n",
    b'"arrive"\n',
    b"{}\n",
    *(
        json.dumps({**GOOD, **wrong}).encode() + b"\n"
        for wrong in (
            {"kind": "reboot"},
            {"kind": []},
            {"version": 2},
            {"syncs": "7"},
            {"syncs": True},
            {"syncs": 10**4000},
            {"syncs": -1},
            {"synced": [7]},
            {"synced": ["x"] * 1000},
            {"late": "forget"},
            {"settings": {"codec": 5}},
            {"kind": "vote", "sync": "x", "lost": None, "why": "", "syncs": float("inf")},
            {"kind": "vote", "sync": "x", "lost": 0},
            {"kind": "leave", "site": {}},
        )
    ),
]


@pytest.mark.parametrize("data", FOREIGN, ids=range(len(FOREIGN)))
def test_bytes_that_are_no_message_are_answered_and_hinder_nothing(run, data):
    sites = run(patience_s=1.0)
    with socket.create_connection(("127.0.0.1", sites.port), 10) as foreign:
        foreign.sendall(data)
        foreign.shutdown(socket.SHUT_WR)
        answer = foreign.makefile().read()
        assert json.loads(answer.splitlines()[0])["error"] == "message", answer
    model, optimizer, local = sites.site("a")
    with contextlib.closing(local):
        steps(model, optimizer, local, range(H), 0)
        assert local.syncs == 1


def test_a_verdict_that_is_lost_is_asked_for_again(run, monkeypatch):
    sites = run(sites=2)
    read, due = coordinator.Client._read, []

    def broken(client):
        reply = read(client)
        if due and reply["kind"] == "verdict":
            due.pop()
            raise ConnectionResetError("a test says")
        return reply

    monkeypatch.setattr(coordinator.Client, "_read", broken)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            if name == "a":
                due.append(1)
            steps(model, optimizer, local, range(2 * H), ord(name))
            assert local.members == ["a", "b"]
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 2 and not due


INTERRUPTED = [
    pytest.param(KeyboardInterrupt, 1, id="when it reads the verdict"),
    pytest.param(PeerLost("sync", -1, 0.0, "a test says"), 1, id="the coordinator is lost"),
    pytest.param(RuntimeError("a test says"), 2, id="its outer optimizer raises"),
]


@pytest.mark.parametrize(("error", "step"), INTERRUPTED)
@pytest.mark.parametrize("where", ["b", "ab"])
def test_a_change_counts_once_wherever_a_sync_is_interrupted(run, error, step, where):
    """If all are interrupted nobody has the new anchors: then the sync is made again."""
    sites = run(sites=2)

    def site(name):
        model, _, local = sites.site(name, model=zeros(), **PLAIN)
        with contextlib.closing(local):
            if name in where:
                interrupt(local, error, after_verdict=step == 2)
                with pytest.raises(error if isinstance(error, type) else type(error)):
                    changed(model, local, 1.0)
            else:
                changed(model, local, 1.0)
            for _ in range(H):
                local.step()
            assert local.members == ["a", "b"] and everywhere(model, -1.0)
            changed(model, local, 1.0)
            assert everywhere(model, -2.0)
            return outcome(local)[1:]

    found = sites.each("ab", site)
    assert found["a"] == found["b"]


def interrupt(local, error, *, after_verdict):
    """Raise an error when this site has voted in its next sync, once."""
    if after_verdict:
        optimizer = local._fragments[0].optimizer
        step = optimizer.step

        def broken():
            optimizer.step = step
            raise error

        optimizer.step = broken
        return

    class Once(coordinator.Client):
        def vote(self, *args, **more):
            super().vote(*args, **more)
            local._client = client
            raise error

    client, local._client = local._client, lambda: Once(local._coordinator, WAIT_S)


def test_a_verdict_that_only_some_learned_before_the_coordinator_was_started_again(run):
    sites = run(sites=2)
    synced = threading.Barrier(2)

    def site(name):
        model, _, local = sites.site(name, model=zeros(), **PLAIN)
        with contextlib.closing(local):
            if name == "b":
                interrupt(local, KeyboardInterrupt, after_verdict=False)
                with pytest.raises(KeyboardInterrupt):
                    changed(model, local, 1.0)
                synced.wait(WAIT_S)
                sites.restart()
            else:
                changed(model, local, 1.0)
                synced.wait(WAIT_S)
            for _ in range(H):
                local.step()
            assert everywhere(model, -1.0)
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"]


def test_after_a_restart_the_coordinator_waits_for_as_many_sites_as_before(run):
    sites = run(sites=1, patience_s=20.0)
    both = threading.Barrier(2)

    def site(name):
        if name == "b":
            sites.until_joined()
        model, _, local = sites.site(name, model=zeros(), **PLAIN)
        with contextlib.closing(local):
            if name == "a":
                sites.until_arrived("b")
                changed(model, local, 1.0)
                sites.restart()
            both.wait(WAIT_S)
            time.sleep(name == "a")  # b comes first
            changed(model, local, 1.0)
            assert local.members == ["a", "b"] and everywhere(model, -2.0)
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"]


def test_a_site_that_was_alone_takes_the_others_anchors(run):
    """Both have made sync 1, each without the other."""
    sites, one = run(sites=2), {name: run(patience_s=0.2) for name in "ab"}

    def alone(name):
        model, _, local = sites.site(name, model=zeros(), **PLAIN)
        local._coordinator = one[name].address
        with contextlib.closing(local):
            changed(model, local, 1.0 + (name == "b"))
            assert local.members == [name] and local.syncs == 1
            local._coordinator = sites.address
            changed(model, local, 1.0)
            assert local.members == ["a", "b"]
            return outcome(local)

    found = sites.each("ab", alone)
    assert found["a"] == found["b"]


def test_a_coordinator_that_is_started_again(run):
    sites = run(sites=2)
    done = threading.Barrier(2)

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), ord(name))
            if done.wait(WAIT_S) == 0:
                sites.restart()
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    found = sites.each("ab", site)
    assert found["a"] == found["b"] and found["a"][0] == 2


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit_from_its_checkpoints(run, tmp_path):
    """Also in the middle of a round."""
    wanted, sites, later = undisturbed(run(sites=3)), run(sites=3), run(sites=3)
    half = H + 1

    def first(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(half), "abc".index(name))
            parts = model.state_dict(), optimizer.state_dict(), local.state_dict()
            torch.save(parts, tmp_path / name)

    def second(name):
        model, optimizer, local = later.site(name)
        with contextlib.closing(local):
            parts = torch.load(tmp_path / name, weights_only=True)
            for part, state in zip((model, optimizer, local), parts, strict=True):
                part.load_state_dict(state)
            steps(model, optimizer, local, range(half, 3 * H), "abc".index(name))
            return outcome(local)

    sites.each("abc", first)
    assert set(later.each("abc", second).values()) == {wanted}


def test_a_site_with_an_older_checkpoint_takes_the_newer_anchors(run):
    sites = run(sites=2)
    old = {}

    def site(name):
        model, optimizer, local = sites.site(name)
        with contextlib.closing(local):
            steps(model, optimizer, local, range(H), ord(name))
            old[name] = copy.deepcopy(local.state_dict())
            steps(model, optimizer, local, range(H), ord(name))
            if name == "b":
                local.load_state_dict(old["b"])
                assert local.syncs == 1
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local), local.late_added

    found = sites.each("ab", site)
    assert found["a"][0] == found["b"][0] and found["a"][0][0] == 3
    assert (found["a"][1], found["b"][1]) == (0, 1)


def test_states_that_do_not_fit_are_refused(run):
    sites = run(patience_s=1.0)
    model, optimizer, local = sites.site("a")
    with contextlib.closing(local):
        steps(model, optimizer, local, range(H), 0)
        good, before = copy.deepcopy(local.state_dict()), outcome(local)
        for wrong in (
            {},
            [good, good],
            {**good, "extra": {**good["extra"], "fragments": []}},
            {**good, "extra": {**good["extra"], "fragments": [{}]}},
            {**good, "origin": {**good["origin"], "kind": "DiLoCo"}},
        ):
            with pytest.raises(ValueError, match=r"state|fragment"):
                local.load_state_dict(wrong)
            assert outcome(local) == before
        local.load_state_dict(good)


# ---- processes -----------------------------------------------------------------------------------


class Site:
    """A site that is a process; what it prints is read as it comes."""

    def __init__(self, folder, address, name, **more):
        self.out = Path(folder, name)
        words = json.dumps({**more, "name": name, "address": address, "out": str(self.out)})
        self.program = _forks.Program(Path(__file__).with_name("_sites.py"), words)
        self.lines, self._came = [], threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.program.stdout:
            with self._came:
                self.lines.append(line.strip())
                self._came.notify_all()

    def said(self, pattern):
        """Wait for a line that matches."""

        def found():
            return next((m for m in (re.match(pattern, one) for one in self.lines) if m), None)

        with self._came:
            match = self._came.wait_for(found, WAIT_S)
        assert match, (pattern, self.lines, self._errors())
        return match

    def _errors(self):
        self.program._errors.seek(0)
        return self.program._errors.read()[-4000:]

    def result(self):
        """Return its numbers of late changes, and the state that all sites share."""
        late = json.loads(self.said(r"done (.*)")[1])
        assert self.program.wait(WAIT_S) == 0, self._errors()
        return late, torch.load(self.out, weights_only=True)


@pytest.fixture
def start(run, tmp_path, monkeypatch):
    """Return a function that starts a site in a process."""
    monkeypatch.setattr(coordinator, "SILENT_S", 1.0)
    sites, started = run(sites=3, patience_s=2.0), []

    def one(name, **more):
        started.append(Site(tmp_path, sites.address, name, **more))
        return started[-1]

    yield one
    for site in started:
        site.program.kill()
        site.program.wait()


CASES = [("die", "first"), ("freeze", "second")]
EVERY = [(does, phase) for does in ("die", "freeze") for phase in ("before", *PHASES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "phase"),
    [
        pytest.param(*one, marks=[] if one in CASES else pytest.mark.long, id=" ".join(one))
        for one in EVERY
    ],
)
def test_a_site_that_is_lost_in_a_sync_comes_back(start, does, phase):
    stay = [start(name) for name in "ab"]
    lost = start("c", fault=(does, phase))
    lost.said(does)
    for site in stay:
        site.said(r"sync \d+ a,b$")
    if does == "die":
        lost.program.wait(WAIT_S)
        lost = start("c")
    else:
        os.kill(lost.program.pid, signal.SIGCONT)
    (_, first), (_, second), (late, third) = [site.result() for site in (*stay, lost)]
    assert _bits(first) == _bits(second) == _bits(third)
    assert first["syncs"] >= 6
    voted = phase == "vote" and does == "freeze"  # whether its sync counted is told afterwards
    assert late == [0, 0] if does == "die" else late[0] <= 1 if voted else late == [1, 0]
    for site in stay:
        assert site.lines[-1] == "done [0, 0]"


def _bits(state):
    momenta = [one["momentum_buffer"] for one in state["outer"]["state"].values()]
    return state["syncs"], bits([*state["anchors"].values(), *momenta])


@pytest.mark.slow
def test_the_program():
    words = [sys.executable, "-m", "gradcomp.local", "--host", "127.0.0.1", "--port", "0"]
    served = subprocess.Popen(
        [*words, "--sites", "1"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        (port,) = re.findall(r"coordinator of sites, at port (\d+)\n", served.stdout.readline())
        model = fresh()
        local = ElasticDiLoCo(
            model, sgd(model), "onebit", coordinator=f"127.0.0.1:{port}", sync_every=1, name="paris"
        )
        local.step()
        local.close()
        served.send_signal(signal.SIGINT)
        told = served.communicate(timeout=WAIT_S)[0]
    finally:
        served.kill()
    assert served.returncode == 130 and "Traceback" not in told, told
    assert re.search(r"sync 1: paris\n", told), told


@pytest.mark.slow
def test_the_example_trains(run):
    sites = run(sites=2)
    words = ["--coordinator", sites.address, "--syncs", "10"]
    programs = [_forks.Program(EXAMPLE, "--site", name, *words) for name in "ab"]
    ends = [program.communicate(WAIT_S) for program in programs]
    found = [re.search(r"[ab]: test accuracy ([\d.]+) %", out)[1] for out, _ in ends]
    assert found[0] == found[1] and float(found[0]) > 40.0, ends  # 10 is chance


def test_wrong_words_to_the_program(capsys):
    with pytest.raises(SystemExit):
        program.main(["--sites", "0"])
    assert "sites must be an integer of at least 1, got 0" in capsys.readouterr().err
