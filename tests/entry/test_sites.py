"""Local steps at sites that come and go: the bits of DiLoCo while no site does, late changes, new
sites, checkpoints, refusals.
"""

import contextlib
import copy
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import _forks
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
    fresh,
    outcome,
    steps,
    undisturbed,
    zeros,
)
from _models import bits, sgd, train
from _ranks import run_local
from torch import nn

from gradcomp import Advanced, DiLoCo, PeerLost, PeerMismatch
from gradcomp.local import Coordinator, ElasticDiLoCo, elastic
from gradcomp.local import __main__ as program

pytestmark = pytest.mark.usefixtures("one_thread")

EXAMPLE = Path(__file__).parents[2] / "examples/sites_digits.py"


# ---- sites that stay -----------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["onebit", "terngrad", "ternary"])
def test_sites_that_stay_have_the_bits_of_diloco(run, codec):
    sites = run(sites=3)

    def elastic(name):
        with sites.joined(name, codec=codec) as (model, optimizer, local):
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


def with_other_weights():
    model = fresh()
    nn.init.zeros_(model[0].weight)
    return model


# what makes the options of two sites that need not be equal
SITES = {
    "other weights": lambda name: {"model": with_other_weights() if name == "b" else fresh()},
    "bfloat16": lambda name: {"model": fresh(torch.bfloat16)},
    "float16": lambda name: {"model": fresh(torch.float16)},
    "other numbers of inner steps": lambda name: {"sync_every": H if name == "a" else 2 * H},
    "one name": lambda name: {"name": "here"},
}


@pytest.mark.parametrize("what", SITES)
def test_two_sites_hold_the_same_bits(run, what):
    sites = run(sites=2)

    def site(name):
        options = {"name": name, "sync_every": H, **SITES[what](name)}
        with sites.joined(**options) as (model, optimizer, local):
            assert what != "other weights" or bits(model) == bits(MODEL), name
            steps(model, optimizer, local, range(2 * options["sync_every"]), ord(name))
            assert local.members == (["here"] * 2 if what == "one name" else ["a", "b"])
            return outcome(local)

    assert sites.alike("ab", site)[0] == 2


def test_in_a_with_block(run):
    sites = run(sites=2)

    def site(name):
        model, optimizer, local = sites.site(name)
        with local:
            train(model, optimizer, ord(name), range(H), **SIZES)
            return outcome(local)

    assert sites.alike("ab", site)[0] == 1


# ---- sites that come, go and are late ------------------------------------------------------------


@pytest.mark.parametrize("late", ["add", "drop"])
def test_a_late_change_is_added_to_the_next_sync_or_dropped(run, late):
    """a, b and c sync while d is silent; their changes are 1 each time, the late one is 5."""
    sites = run(sites=4, sync_timeout_s=1.0)
    synced = threading.Event()

    def site(name):
        with sites.joined(name, model=zeros(), late=late, **PLAIN) as (model, _, local):
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

    assert sites.alike("abc", site)[0] == 5


def test_a_site_that_leaves_is_not_waited_for(run):
    sites = run(sites=2, sync_timeout_s=600, min_sites_timeout_s=600)

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
    sites = run(sites=2, min_sites=2, sync_timeout_s=0.5, min_sites_timeout_s=2.0)

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
            if name == "a":
                with pytest.raises(PeerLost, match="1 of at least 2 sites have come"):
                    steps(model, optimizer, local, range(H), 0)

    sites.each("ab", site)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit_from_its_checkpoints(run, tmp_path):
    """Also in the middle of a round."""
    wanted, sites, later = undisturbed(run(sites=3)), run(sites=3), run(sites=3)
    half = H + 1

    def first(name):
        with sites.joined(name) as (model, optimizer, local):
            steps(model, optimizer, local, range(half), "abc".index(name))
            parts = model.state_dict(), optimizer.state_dict(), local.state_dict()
            torch.save(parts, tmp_path / name)

    def second(name):
        with later.joined(name) as (model, optimizer, local):
            parts = torch.load(tmp_path / name, weights_only=True)
            for part, state in zip((model, optimizer, local), parts, strict=True):
                part.load_state_dict(state)
            steps(model, optimizer, local, range(half, 3 * H), "abc".index(name))
            return outcome(local)

    sites.each("abc", first)
    assert later.alike("abc", second) == wanted


def test_a_site_with_an_older_checkpoint_takes_the_newer_anchors(run):
    sites = run(sites=2)
    old = {}

    def site(name):
        with sites.joined(name) as (model, optimizer, local):
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
    sites = run(sync_timeout_s=1.0)
    with sites.joined("a") as (model, optimizer, local):
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
        with sites.joined(name) as (model, optimizer, local):
            begun.set()
            assert refused.wait(WAIT_S)
            steps(model, optimizer, local, range(H), ord(name))
            return outcome(local)

    assert sites.alike("abc", site)[0] == 1


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
        ({"sync_timeout_s": 0}, "sync_timeout_s must be positive"),
        ({"sync_timeout_s": 9, "min_sites_timeout_s": 5}, "at most min_sites_timeout_s"),
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
    sites = run(sync_timeout_s=1.0)
    with socket.create_connection(("127.0.0.1", sites.port), 10) as foreign:
        foreign.sendall(data)
        foreign.shutdown(socket.SHUT_WR)
        answer = foreign.makefile().read()
        assert json.loads(answer.splitlines()[0])["error"] == "message", answer
    with sites.joined("a") as (model, optimizer, local):
        steps(model, optimizer, local, range(H), 0)
        assert local.syncs == 1


# ---- programs ------------------------------------------------------------------------------------


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
    for words, said in (
        (["--patience", "5"], "--patience is called --sync-timeout"),
        (["--give-up=9"], "--give-up is called --min-sites-timeout"),
    ):
        with pytest.raises(SystemExit):
            program.main(words)
        assert said in capsys.readouterr().err
    for old, now in (("patience_s", "sync_timeout_s"), ("give_up_s", "min_sites_timeout_s")):
        with pytest.raises(TypeError, match=f"no option '{old}': it is called '{now}'"):
            Coordinator(port=0, **{old: 5.0})
    with pytest.raises(TypeError, match="there is no option 'site'$"):
        Coordinator(port=0, site=2)
