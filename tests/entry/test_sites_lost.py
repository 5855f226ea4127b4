"""Syncs of sites that fail, are interrupted, or lose a site or the coordinator: a sync counts at
all its sites or at none, and no change of the weights is lost or counted twice.
"""

import contextlib
import copy
import os
import signal
import socket
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from _elastic import (
    MODEL,
    PLAIN,
    SIZES,
    WAIT_S,
    H,
    changed,
    everywhere,
    outcome,
    steps,
    undisturbed,
    zeros,
)
from _models import bits, train
from _spoken import Spoken

from gradcomp import NotFinite, PeerLost
from gradcomp.comm.base import Channel
from gradcomp.comm.torchdist import TorchCommunicator
from gradcomp.errors import peers_answer
from gradcomp.local import ElasticDiLoCo, coordinator, elastic
from gradcomp.local.client import Client

SITE = Path(__file__).with_name("_sites.py")

pytestmark = pytest.mark.usefixtures("one_thread")

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

    class Against(Client):
        def vote(self, sync, site, syncs, why="", lost=None):
            with contextlib.suppress(ConnectionError):
                once("vote")
                return super().vote(sync, site, syncs, why, lost)
            return super().vote(sync, site, syncs, "a test says")

    def connect(host, plan):
        with peers_answer("setup"):
            once("setup")
        comm = type(local)._connect(local, host, plan)
        comm.__class__ = Broken
        return comm

    local._connect = connect
    local._client = lambda: Against(local._coordinator, WAIT_S)


@pytest.mark.parametrize("phase", PHASES)
def test_a_sync_that_fails_changes_nothing_and_is_made_again(run, phase, caplog):
    wanted, sites = undisturbed(run(sites=3)), run(sites=3)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            steps(model, optimizer, local, range(H), "abc".index(name))
            if name == "b":
                break_next(local, phase)
            steps(model, optimizer, local, range(H, 3 * H), "abc".index(name))
            assert local.members == ["a", "b", "c"]
            return outcome(local)

    assert sites.alike("abc", site) == wanted and "a test says" in caplog.text


@pytest.mark.parametrize("fails", ["a", "c"])
def test_anchors_that_do_not_arrive_are_sent_again(run, fails):
    sites = run(sites=2)
    begun = threading.Event()

    def site(name):
        if name == "c":
            assert begun.wait(WAIT_S)
        with sites.joined(name) as (model, optimizer, local):
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
            found = sites.alike("abc", site)
    else:
        found = sites.alike("abc", site)
    assert found[0] == 2


def test_no_change_is_lost_or_counted_twice(run):
    """Applied averages and residuals add up to the changes, but for rounding, though a sync fails
    in each phase.
    """
    sites = run(sites=4)

    def site(name):
        options = {**PLAIN, "codec": "onebit", "model": zeros()}
        with sites.joined(name, **options) as (model, _, local), torch.no_grad():
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
        with sites.joined(name) as (model, optimizer, local):
            begun.set()
            sites.until_arrived("c")
            steps(model, optimizer, local, range(H), ord(name))
            assert local.members == ["a", "b"]
            return outcome(local)

    assert sites.alike("abc", site)[0] == 1


class Failing(ElasticDiLoCo):
    def _take_anchors(self, plan, trained):
        super()._take_anchors(plan, trained)
        self._has_anchors = False
        raise PeerLost("anchors", -1, 0.0, "a test says")


def test_the_next_run_on_the_same_coordinator(run):
    sites = run(sync_timeout_s=0.5, min_sites_timeout_s=600)
    for _ in range(2):
        with sites.joined("a") as (model, optimizer, local):
            steps(model, optimizer, local, range(H), 0)
            assert local.syncs == 1


def test_weights_that_are_not_finite(run):
    sites = run(sites=2)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
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

    assert sites.alike("ab", site)[0] == 2


def test_anchors_that_differ_are_replaced_by_those_of_the_first(run, caplog):
    sites = run(sites=2)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            steps(model, optimizer, local, range(H), ord(name))
            if name == "b":
                local._fragments[0].anchors[0][1].data[0, 0] += 1  # a bit that has flipped
                local.check_replicas()
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    sites.alike("ab", site)
    assert "parameter 0.weight" in caplog.text


def test_a_verdict_that_is_lost_is_asked_for_again(run, monkeypatch):
    sites = run(sites=2)
    read, due = Client._read, []

    def broken(client):
        reply = read(client)
        if due and reply["kind"] == "verdict":
            due.pop()
            raise ConnectionResetError("a test says")
        return reply

    monkeypatch.setattr(Client, "_read", broken)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            if name == "a":
                due.append(1)
            steps(model, optimizer, local, range(2 * H), ord(name))
            assert local.members == ["a", "b"]
            return outcome(local)

    assert sites.alike("ab", site)[0] == 2 and not due


INTERRUPTED = [
    pytest.param(KeyboardInterrupt, 1, id="when it reads the verdict"),
    pytest.param(PeerLost("sync", -1, 0.0, "a test says"), 1, id="the coordinator is lost"),
    pytest.param(RuntimeError("a test says"), 2, id="its outer optimizer raises"),
]


@pytest.mark.parametrize(("error", "step"), INTERRUPTED)
@pytest.mark.parametrize("where", ["b", "ab", "b, which fails at the next sync, too"])
def test_a_change_counts_once_wherever_a_sync_is_interrupted(run, error, step, where):
    """If all are interrupted nobody has the new anchors: then the sync is made again."""
    sites = run(sites=2)

    def site(name):
        with sites.joined(name, model=zeros(), timeout_s=6.0, **PLAIN) as (model, _, local):
            if name in where.split(",")[0]:
                interrupt(local, error, after_verdict=step == 2)
                with pytest.raises(error if isinstance(error, type) else type(error)):
                    changed(model, local, 1.0)
            else:
                changed(model, local, 1.0)
            if name == "b" and "too" in where:
                break_next(local, "setup")
            for _ in range(H):
                local.step()
            assert local.members == ["a", "b"] and everywhere(model, -1.0)
            changed(model, local, 1.0)
            assert everywhere(model, -2.0)
            return outcome(local)[1:]

    sites.alike("ab", site)


def test_a_change_counts_once_where_the_attempt_after_the_interrupted_one_is_interrupted_too(run):
    sites = run(sites=2)

    def site(name):
        with sites.joined(name, model=zeros(), timeout_s=6.0, **PLAIN) as (model, _, local):
            if name == "b":
                interrupt(local, KeyboardInterrupt, after_verdict=False)
                with pytest.raises(KeyboardInterrupt):
                    changed(model, local, 1.0)
                with (
                    mock.patch.object(local, "_connect", side_effect=KeyboardInterrupt),
                    pytest.raises(KeyboardInterrupt),
                ):
                    for _ in range(H):
                        local.step()
            else:
                changed(model, local, 1.0)
            for _ in range(H):
                local.step()
            assert local.members == ["a", "b"] and everywhere(model, -1.0)
            return outcome(local)[1:]

    sites.alike("ab", site)


def test_an_interrupted_site_goes_on_from_its_checkpoint(run):
    """Its state had averages, but no exchange under way: loading it raised ValueError."""
    sites = run(sites=2)

    def site(name):
        model, _, local = sites.site(name, model=zeros(), **PLAIN)
        with contextlib.closing(local):
            if name == "b":
                interrupt(local, KeyboardInterrupt, after_verdict=False)
                with pytest.raises(KeyboardInterrupt):
                    changed(model, local, 1.0)
                local.load_state_dict(copy.deepcopy(local.state_dict()))
            else:
                changed(model, local, 1.0)
            for _ in range(H):
                local.step()
            assert local.members == ["a", "b"] and everywhere(model, -1.0)
            return outcome(local)

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

    class Once(Client):
        def vote(self, *args, **more):
            super().vote(*args, **more)
            local._client = client
            raise error

    client, local._client = local._client, lambda: Once(local._coordinator, WAIT_S)


def test_a_coordinator_that_closes_leaves_no_connection_open():
    """One that was accepted at that moment stayed open, and its site waited for 20 s."""
    for k in range(25):
        found, together = [], threading.Barrier(2)
        coordinator_here = coordinator.Coordinator(port=0, store_port=0, sites=2)
        address = "127.0.0.1", coordinator_here.port
        awake = socket.create_connection(address)

        def connect(found=found, together=together, address=address, pause_s=2e-5 * (k % 10)):
            together.wait()
            time.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                found.append(socket.create_connection(address, 10))

        thread = threading.Thread(target=connect)
        thread.start()
        together.wait()
        awake.close()
        coordinator_here.close()
        thread.join()
        for one in found:
            with one, contextlib.suppress(ConnectionError):
                assert not one.recv(1)


def test_a_verdict_that_only_some_learned_before_the_coordinator_was_started_again(run):
    sites = run(sites=2)
    synced = threading.Barrier(2)

    def site(name):
        with sites.joined(name, model=zeros(), **PLAIN) as (model, _, local):
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

    sites.alike("ab", site)


def test_after_a_restart_the_coordinator_waits_for_as_many_sites_as_before(run):
    sites = run(sites=1, sync_timeout_s=20.0)
    both = threading.Barrier(2)

    def site(name):
        if name == "b":
            sites.until_joined()
        with sites.joined(name, model=zeros(), **PLAIN) as (model, _, local):
            if name == "a":
                sites.until_arrived("b")
                changed(model, local, 1.0)
                sites.restart()
            both.wait(WAIT_S)
            time.sleep(name == "a")  # b comes first
            changed(model, local, 1.0)
            assert local.members == ["a", "b"] and everywhere(model, -2.0)
            return outcome(local)

    sites.alike("ab", site)


def test_a_site_that_was_alone_takes_the_others_anchors(run):
    """Both have made sync 1, each without the other."""
    sites, one = run(sites=2), {name: run(sync_timeout_s=0.2) for name in "ab"}

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

    sites.alike("ab", alone)


def test_a_coordinator_that_is_started_again(run):
    sites = run(sites=2)
    done = threading.Barrier(2)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            steps(model, optimizer, local, range(H), ord(name))
            if done.wait(WAIT_S) == 0:
                sites.restart()
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    assert sites.alike("ab", site)[0] == 2


# ---- processes -----------------------------------------------------------------------------------


@pytest.fixture
def start(run, tmp_path, monkeypatch):
    """Return a function that starts a site in a process."""
    monkeypatch.setattr(coordinator, "SILENT_S", 1.0)
    sites, started = run(sites=3, sync_timeout_s=2.0), []

    def one(name, **more):
        options = {**more, "name": name, "address": sites.address}
        started.append(Spoken(SITE, tmp_path / name, **options))
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
