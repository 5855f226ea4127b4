"""Options of entry points: signatures, what is refused and how, what ranks compare."""

import inspect
from typing import get_type_hints

import pytest
import torch
from torch import nn

import gradcomp.ddp
from gradcomp import GradientAverager
from gradcomp.comm import LocalCommunicator
from gradcomp.engine.options import (
    RENAMED,
    CommonOptions,
    DelayedOptions,
    LocalOptions,
    Options,
    ShardedOptions,
    SiteOptions,
)
from gradcomp.exchange.agree import EXCHANGE_FIELDS
from gradcomp.integrations.torchtitan import ReplicaAverage
from gradcomp.local.elastic import ElasticDiLoCo
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer

COMMON = {
    "min_numel": None,
    "exclude": (),
    "exchange": "auto",
    "warmup_steps": 0,
    "warmup_codec": None,
    "precondition": None,
    "grad_scaler": None,
    "atomic_steps": None,
    "timeout_s": None,
}
SHARDED = get_type_hints(ShardedOptions)
# what entry points take, beside codec and arguments of their own
ENTRY_POINTS = [
    (gradcomp.ddp.register, CommonOptions),
    (gradcomp.ddp.CompressionState, CommonOptions),
    (GradientAverager, CommonOptions),
    (ReplicaAverage, CommonOptions),
    (DoubleBuffer, DelayedOptions),
    (gradcomp.DiLoCo, LocalOptions),
    (gradcomp.LocalSGD, LocalOptions),
    (ElasticDiLoCo, SiteOptions),
    (gradcomp.fsdp.register, ShardedOptions),
]
BY_NAME = [entry.__qualname__ for entry, _ in ENTRY_POINTS]


@pytest.mark.parametrize(("entry", "kind"), ENTRY_POINTS, ids=BY_NAME)
def test_signatures_show_the_options_that_an_entry_point_takes(entry, kind):
    shown = inspect.signature(entry).parameters
    options = [p for p in shown.values() if p.name in COMMON]
    assert [p.name for p in options] == [name for name in COMMON if name in get_type_hints(kind)]
    assert all(p.kind is p.KEYWORD_ONLY and p.default == COMMON[p.name] for p in options)
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]
    assert ("advanced" in shown) is (kind is not ShardedOptions)
    assert all(shown[p].kind is inspect.Parameter.KEYWORD_ONLY for p in ("comm",) if p in shown)


def test_entry_points_without_a_reason_take_all_options():
    assert len(COMMON) <= 9, "rare ones belong in Advanced"
    assert list(inspect.signature(Options).parameters) == [*COMMON, "advanced"]
    assert set(get_type_hints(CommonOptions)) == set(COMMON)
    assert Options(exclude="a*").exclude == Options(exclude=["a*"]).exclude == ("a*",)
    assert Options(advanced=None) == Options()
    with pytest.raises(AttributeError):
        Options().warmup_steps = 1


MISPLACED = {
    "rare": ({"quality_every": 2}, r"pass advanced=gradcomp.Advanced\(quality_every=...\)"),
    "old object": ({"options": 1}, "'options': pass its fields by keyword, rare ones as advanced="),
    "close": ({"min_nume": 3}, "there is no option 'min_nume'; did you mean 'min_numel'?"),
}


@pytest.mark.parametrize(("entry", "kind"), ENTRY_POINTS, ids=BY_NAME)
@pytest.mark.parametrize("name", MISPLACED)
def test_a_misplaced_option_says_where_it_goes(entry, kind, name):
    given, text = MISPLACED[name]
    if kind is ShardedOptions and name != "close":
        rare = "gradcomp.fsdp.register does not support 'quality_every'"
        text = rare if name == "rare" else "no option 'options': pass its fields by keyword"
    with pytest.raises(TypeError, match=text):
        entry(**given)


@pytest.mark.parametrize("entry", [entry for entry, _ in ENTRY_POINTS], ids=BY_NAME)
def test_options_by_position_are_refused(entry):
    with pytest.raises(TypeError, match="takes keywords after 'codec': .*min_numel=, exclude="):
        entry(1, 2, 3, 4)


def test_what_takes_no_options_is_refused_alike():
    with pytest.raises(TypeError, match="all_reduce takes keywords after 'codec': comm=, key="):
        gradcomp.all_reduce(torch.ones(4), "onebit", one_rank())
    with pytest.raises(
        TypeError, match="does not support 'warmup_steps': pass it beside advanced="
    ):
        gradcomp.Advanced(warmup_steps=3)


AT_LEAST_0 = "must be an integer of at least 0, got"
NODES = {"advanced": {"nodes": [[0]]}}
ADAGRAD = {"advanced": {"transform": AggregateAdagrad()}}
SCALER = {"grad_scaler": torch.amp.GradScaler("cpu")}
WRONG_VALUES = [
    ({"warmup_steps": -1}, f"warmup_steps {AT_LEAST_0} -1"),
    ({"min_numel": 2.5}, f"min_numel {AT_LEAST_0} 2.5"),
    ({"exclude": 7}, "exclude must be a sequence of names, patterns or func.*, got 7"),
    ({"exclude": ["a", 7]}, r"exclude must be .*, got \['a', 7\]"),
    ({"exchange": "ring"}, "exchange must be one of .*'hierarchical'.*, got 'ring'"),
    (NODES, "nodes= needs exchange='hierarchical', got exchange='auto'"),
    ({"precondition": True, **ADAGRAD}, "AggregateAdagrad"),
    ({"advanced": {"scale_lr": "yes"}}, "scale_lr must be None, True or False, got 'yes'"),
    ({"advanced": {"scale_lr": True}}, "scale_lr=True requires precondition=True"),
    ({"exchange": "hierarchical", **ADAGRAD}, "a transform needs exchange=.*, got 'hierarchical'"),
    ({"grad_scaler": object()}, r"grad_scaler must have get_scale\(\), got object"),
    ({"atomic_steps": "yes"}, "atomic_steps must be None, True or False, got 'yes'"),
    ({**SCALER, "atomic_steps": False}, "atomic_steps=False cannot work with a grad_scaler"),
    ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, at most 1e.06, got 0"),
]
WRONG_KINDS = [
    ({"advanced": {"transform": "adagrad"}}, "transform must be a gradcomp.Transform, got str"),
    (
        {"precondition": "yes"},
        "precondition must be True, False or a gradcomp.Precondition, got str",
    ),
    ({"start_steps": 3}, "no option 'start_steps'; did you mean 'warmup_steps'?"),
    ({"timeout": 3}, "no option 'timeout'; did you mean 'timeout_s'?"),
    ({"process_group": 3}, r"no option 'process_group' \(all: min_numel, "),
]
WRONG_OPTIONS = [(ValueError, *row) for row in WRONG_VALUES]
WRONG_OPTIONS += [(TypeError, *row) for row in WRONG_KINDS]


def one_rank():
    return LocalCommunicator.group(1)[0]


@pytest.mark.parametrize(("kind", "given", "text"), WRONG_OPTIONS)
def test_wrong_options_are_refused_with_their_value(kind, given, text):
    with pytest.raises(kind, match=text):
        if "advanced" in given:
            given = given | {"advanced": gradcomp.Advanced(**given["advanced"])}
        GradientAverager(nn.Linear(2, 2), "onebit", comm=one_rank(), **given)
    with pytest.raises(TypeError, match="advanced must be a gradcomp.Advanced, got dict"):
        Options(advanced=given)


def test_an_averager_takes_its_options():
    comm, named = LocalCommunicator.group(2)[0], list(nn.Linear(2, 2).named_parameters())
    comm.timeout_s = 7.0
    averager = GradientAverager(named, "onebit", comm=comm, warmup_steps=3, min_numel=0)
    said = averager.describe()
    assert "on 2 tensors (6 values)" in said and "from step 3 on" in said
    assert averager._engine.timeout_s == 7.0, "no word on it: the communicator's own"
    assert GradientAverager(named, "onebit", comm=comm, timeout_s=9)._engine.timeout_s == 9


def test_ranks_compare_every_option_that_could_make_them_differ():
    """What is not in `compared` is compared as the strategy (exchange, nodes), as part of another
    option, or is each rank's own affair.
    """
    own = {"exchange", "nodes", "grad_scaler", "timeout_s", "quality_every"}
    # compared with precondition (`Engine.precondition_of`) and with warmup_steps
    own |= {"scale_lr", "warmup_codec"}
    options = {*COMMON, *inspect.signature(gradcomp.Advanced).parameters}
    assert set(Options().compared()) == options - own
    assert set(Options().compared()) <= set(EXCHANGE_FIELDS)
    assert Options(**SCALER).compared() == Options(atomic_steps=True).compared()


@pytest.mark.parametrize("name", RENAMED)
def test_an_option_of_an_earlier_version_says_how_it_is_called(name):
    now = RENAMED[name]
    renamed = f"there is no option '{name}': it is called '{now}'"
    elsewhere = f"does not support '{now}', earlier called '{name}'"
    for call, options in (
        (gradcomp.Advanced, ()),
        (lambda **old: GradientAverager(nn.Linear(2, 2), "onebit", comm=one_rank(), **old), COMMON),
        (lambda **old: gradcomp.fsdp.register(nn.Linear(2, 2), "onebit", **old), SHARDED),
    ):
        there = now in options or now not in COMMON
        with pytest.raises(TypeError, match=renamed if there else elsewhere):
            call(**{name: 1})


def test_functions_of_an_earlier_version_say_how_they_are_called():
    averager = GradientAverager(nn.Linear(2, 2), "onebit", comm=one_rank())
    for owner, name, said in (
        (averager, "rotate", r"'rotate': it is called average_delayed\(\)"),
        (gradcomp.fsdp, "compress", "'compress': it is called gradcomp.fsdp.register"),
        (gradcomp.codecs, "TopK", "TopK was removed: use TernGrad"),
        (gradcomp.onebit_sgd, "warm_start_steps", "use math.ceil"),
    ):
        with pytest.raises(AttributeError, match=said):
            getattr(owner, name)
        assert not hasattr(owner, "others")
