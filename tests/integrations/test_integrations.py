"""What all integrations share: versions, missing frameworks."""

import gc
import importlib
import re
import sys
import time
import warnings
import weakref
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from _ranks import each_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradcomp.ddp
from gradcomp.errors import GradcompError
from gradcomp.integrations import versions
from gradcomp.integrations.checkpoints import gather_states

pytestmark = pytest.mark.extras
PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
CONSTRAINTS = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
HOWTO = Path(__file__).parents[2] / "docs/howto"


@pytest.mark.parametrize("framework", versions.TRIED)
def test_a_missing_framework_names_the_extra(monkeypatch, framework):
    module = f"gradcomp.integrations.{framework}"
    monkeypatch.setitem(sys.modules, framework, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, module, raising=False)
    words = rf"{module} needs {framework}: pip install 'gradcomp\[{framework}\]'"
    with pytest.raises(ImportError, match=words) as caught:
        importlib.import_module(module)
    assert caught.value.name == framework


@pytest.mark.parametrize("framework", versions.TRIED)
def test_extras_pins_and_pages_are_what_was_tried(framework):
    oldest, (major, minor) = versions.TRIED[framework]
    pattern = rf'^(\w+) = \[.*"{framework}(?:\[train\])?>=([\d.]+),<([\d.]+)'
    asked = re.findall(pattern, PYPROJECT, re.MULTILINE)
    assert framework in {extra for extra, *_ in asked}  # transformers asks for accelerate, too
    wanted = ".".join(map(str, oldest)), f"{major}.{minor + 1}"
    assert {(low, high) for _, low, high in asked} == {wanted}
    assert re.search(rf"^{framework}=={major}\.{minor}\.", CONSTRAINTS, re.MULTILINE)
    text = (HOWTO / f"{framework}.md").read_text(encoding="utf-8")
    pattern = rf"^Tried with {framework} ([\d., and]+\d)"
    (listed,) = re.findall(pattern, text, re.MULTILINE | re.IGNORECASE)
    releases = [tuple(map(int, one.split("."))) for one in re.findall(r"\d+\.\d+\.\d+", listed)]
    assert releases == sorted(releases)
    assert (releases[0][:2], releases[-1][:2]) == versions.TRIED[framework]


@pytest.mark.parametrize("framework", versions.TRIED)
def test_other_versions_are_warned_of_with_the_range(framework):
    oldest, newest = versions.TRIED[framework]
    tried = rf"was tried with {framework} {oldest[0]}\.{oldest[1]}"
    for found in (f"{newest[0]}.{newest[1] + 1}.0", f"{oldest[0] - 1}.99", "main"):
        with pytest.warns(UserWarning, match=f"{tried}.*this is {found}.*pip install"):
            versions.warn_unless_tried(framework, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        versions.warn_unless_tried(framework, f"{newest[0]}.{newest[1]}.7rc1")
        versions.warn_unless_tried(framework, version(framework))  # the one of constraints.txt


@each_rank(2)
def test_what_watches_all_optimizers_ends_with_its_model():
    """A program that trains one model after another in the same process: nothing of the first is
    left, nobody watches the second for it.
    """
    from gradcomp.engine import watch
    from gradcomp.integrations import ray as packed

    gc.collect()  # models of earlier tests
    others = set(watch._watchers)

    def train():
        model = DistributedDataParallel(nn.Linear(64, 64))
        state = packed.register(model, "terngrad")
        optimizer, stranger = torch.optim.SGD(model.parameters(), lr=0.1), nn.Linear(2, 2)
        torch.optim.SGD(stranger.parameters(), lr=0.1).step()  # of another model
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        before = model.module.weight.detach().clone()
        twice = "not called in this step: no forward pass.*a second step on gradients that were"
        with pytest.raises(GradcompError, match=twice):
            optimizer.step()
        assert torch.equal(model.module.weight, before)
        assert len(set(watch._watchers) - others) == 2  # of the state, and of Ray's check
        return weakref.ref(state), weakref.ref(model.module.weight)

    left, deadline = train(), time.monotonic() + 20
    # a stage's thread may hold the last task yet
    while any(one() is not None for one in left) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert all(one() is None for one in left) and not set(watch._watchers) - others


@each_rank(1)
def test_a_watched_model_is_copied_and_saved():
    from gradcomp.integrations.watch import DdpWatch

    model = DistributedDataParallel(nn.Linear(4, 4))
    state = gradcomp.ddp.register(model, "ternary")
    watch = DdpWatch(state, model)
    other = torch.optim.swa_utils.AveragedModel(model)
    other(torch.ones(1, 4))
    watch.close()
    state.close()


@each_rank(1)
def test_neither_a_loaded_state_nor_reset_statistics_are_an_exchange():
    """After ``stats.reset()`` a step without an exchange went unnoticed."""
    from gradcomp.integrations.watch import DdpWatch

    model = DistributedDataParallel(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradcomp.ddp.register(model, "ternary") as state:
        watch, saved = DdpWatch(state, model), state.state_dict()
        for change in (lambda: state.load_state_dict(saved), state.stats.reset):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            change()
            with pytest.raises(GradcompError, match="not called in this step: no forward pass"):
                optimizer.step()
        watch.close()
        optimizer.step()


@each_rank(3, "local")
def test_states_of_any_size_are_gathered(comm):
    """In parts: the longest has several, the shortest one."""

    class State:
        def state_dict(self):
            return {"values": torch.arange(50_000.0 * comm.rank), "rank": comm.rank}

    found = gather_states(State(), comm)
    if comm.rank:
        assert found is None
        return
    assert [one["rank"] for one in found] == [0, 1, 2]
    assert all(torch.equal(one["values"], torch.arange(50_000.0 * one["rank"])) for one in found)
