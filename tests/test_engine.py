"""One model's compression: options."""

import inspect
from typing import get_type_hints

import pytest
import torch
from torch import nn

import gradcomp.ddp
from gradcomp import GradientAverager, Options
from gradcomp.comm import LocalCommunicator
from gradcomp.engine.options import Changes
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer
from gradcomp.payload import fingerprint

# ---- options ---------------------------------------------------------------------------------------------------------

DOORS = [gradcomp.ddp.register, gradcomp.ddp.CompressionState, GradientAverager, DoubleBuffer]


def test_options_are_the_same_by_name_and_as_one():
    given = {"start_step": 3, "exclude": "a*", "exchange": "all_gather", "timeout_s": 5}
    assert Options.of(None, **given) == Options(**given) == Options.of(Options(start_step=9, timeout_s=5), **given)
    assert Options.of(Options(start_step=9), min_numel=0).start_step == 9
    assert Options(exclude="a*").exclude == Options(exclude=["a*"]).exclude == ("a*",)
    with pytest.raises(AttributeError):
        Options().start_step = 1


@pytest.mark.parametrize("door", DOORS)
def test_every_door_shows_every_option_with_its_default(door):
    shown = inspect.signature(door).parameters
    for name, option in inspect.signature(Options).parameters.items():
        assert (shown[name].kind, shown[name].default) == (inspect.Parameter.KEYWORD_ONLY, option.default), name
    assert shown["options"].default is None
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]


def test_type_checkers_know_the_same_options():
    assert list(get_type_hints(Changes)) == list(inspect.signature(Options).parameters)


WRONG_OPTIONS = {
    "start_step": ({"start_step": -1}, ValueError, "start_step must be an integer of at least 0, got -1"),
    "min_numel": ({"min_numel": 2.5}, ValueError, "min_numel must be an integer of at least 0, got 2.5"),
    "exclude": ({"exclude": 7}, ValueError, "exclude must be a sequence of names or patterns, got 7"),
    "excluded": ({"exclude": ["a", 7]}, ValueError, r"exclude must be .*, got \['a', 7\]"),
    "exchange": ({"exchange": "ring"}, ValueError, "exchange must be one of .*'hierarchical'.*, got 'ring'"),
    "nodes": ({"nodes": [[0]]}, ValueError, "nodes= needs exchange='hierarchical', got exchange='auto'"),
    "transform": ({"transform": "adagrad"}, TypeError, "transform must be a gradcomp.Transform, got str"),
    "by nodes": (
        {"transform": AggregateAdagrad(), "exchange": "hierarchical"},
        ValueError,
        "a transform needs exchange=.*, got 'hierarchical'",
    ),
    "scaler": ({"grad_scaler": object()}, ValueError, r"grad_scaler must have get_scale\(\), got object"),
    "transactional": ({"transactional": "yes"}, ValueError, "transactional must be None, True or False, got 'yes'"),
    "both": (
        {"grad_scaler": torch.amp.GradScaler("cpu"), "transactional": False},
        ValueError,
        "transactional=False cannot work with a grad_scaler",
    ),
    "timeout": ({"timeout_s": 0}, ValueError, "timeout_s must be a number of seconds, at most 1e.06, got 0"),
    "typing error": ({"start_steps": 3}, TypeError, "there is no option 'start_steps'; did you mean 'start_step'?"),
    "guess": ({"timeout": 3}, TypeError, "no option 'timeout'; did you mean 'timeout_s'?"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_are_refused_with_their_value(name):
    given, kind, text = WRONG_OPTIONS[name]
    with pytest.raises(kind, match=text):
        GradientAverager(nn.Linear(2, 2).named_parameters(), "onebit", LocalCommunicator.group(1)[0], **given)
    with pytest.raises(TypeError, match="options must be a gradcomp.Options, got dict"):
        Options.of(given)


def test_an_averager_takes_options_and_keywords_win():
    comm, named = LocalCommunicator.group(2)[0], list(nn.Linear(2, 2).named_parameters())
    comm.timeout_s = 7.0
    averager = GradientAverager(named, "onebit", comm, Options(start_step=3, min_numel=5), min_numel=0)
    assert "on 2 tensors (6 values)" in averager.describe() and "from step 3 on" in averager.describe()
    assert averager._engine.timeout_s == 7.0, "no word on it: the communicator's own"
    assert GradientAverager(named, "onebit", comm, timeout_s=9)._engine.timeout_s == 9


def test_ranks_compare_every_option_that_could_make_them_differ():
    """What is not in `compared` is compared as the strategy (exchange, nodes), or is each rank's own affair."""
    own = {"exchange", "nodes", "grad_scaler", "timeout_s"}
    assert set(Options().compared()) == set(inspect.signature(Options).parameters) - own
    assert set(Options().compared()) <= set(fingerprint.FIELDS)
    assert Options(grad_scaler=torch.amp.GradScaler("cpu")).compared() == Options(transactional=True).compared()
