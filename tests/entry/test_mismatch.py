"""Ranks that are given different options: each option of each entry point is refused by name, on
every rank, or listed as one that a rank may have to itself.
"""

import contextlib
import dataclasses
import inspect
import re
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from _ranks import each_rank, mismatch, run_local
from test_conformance import ENTRIES, trained

import gradcomp
import gradcomp.ddp
import gradcomp.fsdp
from gradcomp import Advanced, GradientAverager, Precondition
from gradcomp.allreduce import Feedback
from gradcomp.codecs import KINDS, Codec
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer

CALLS = {
    "ddp": gradcomp.ddp.register,
    "averager": GradientAverager,
    "all_reduce": gradcomp.all_reduce,
    "fsdp": gradcomp.fsdp.register,
    "diloco": gradcomp.DiLoCo,
    "local_sgd": gradcomp.LocalSGD,
    "double_buffer": DoubleBuffer,
}
# what a rank trains, how it sends, what it measures for itself
OWN = {"model", "named_parameters", "tensor", "inner_optimizer", "comm"}
OWN |= {"advanced", "quality_every"}
RARE = {field.name for field in dataclasses.fields(Advanced)}


def sgd(parameters, momentum=0.0):
    return torch.optim.SGD(parameters, lr=0.5, momentum=momentum)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


class Scaler:
    def get_scale(self):
        return 2.0


class Row(NamedTuple):
    """One option of which ranks 0 and 1 are given different values."""

    values: tuple
    field: str = ""  # that the error may name, too
    both: dict | None = None  # what both ranks are given beside it


WARM, LATE = {"warmup_steps": 3}, {"fragment_sync_delay": 1}
SCALED = {"precondition": True, "optimizer": adamw}
ROWS = {  # by option; after a comma, which of its rows
    "codec": Row(("terngrad", "onebit")),
    "codec, plain": Row(("bf16", "identity")),
    "optimizer": Row((None, adamw), "codec_options"),  # decay of residuals
    "min_numel": Row((0, 1_000)),
    "exclude": Row(((), ["0.weight"]), "parameters"),
    "exchange": Row(("all_gather", "reduce_scatter")),
    "warmup_steps": Row((0, 3)),
    "warmup_codec": Row(("bf16", "block4"), "warmup_steps", WARM),
    "precondition": Row((False, True)),
    "precondition, how": Row((Precondition(0.9), Precondition(0.95))),
    "scale_lr": Row((False, True), "precondition", SCALED),
    "grad_scaler": Row((None, Scaler()), "atomic_steps"),
    "atomic_steps": Row((False, True)),
    "bucket_cap_mb": Row((25.0, 0.001), "numel"),
    "key": Row((0, 1), "layout", {"feedback": None}),
    "step": Row((3, 4)),
    "feedback": Row((None, Feedback({0: 2560})), "codec_options"),
    "timeout_s": Row((20.0, 30.0)),
    "weights": Row((None, "block8")),
    "keep_weights": Row((False, True), both={"weights": "block8"}),
    "residuals": Row(("fp32", "bf16")),
    "sync_every": Row((2, 3)),
    "outer_optimizer": Row((sgd, partial(sgd, momentum=0.9))),
    "fragments": Row((1, 2)),
    "fragment_sync_delay": Row((0, 1)),
    "fragment_update_alpha": Row((0.5, 0.75), both=LATE),
    "shard_outer": Row((False, True)),
    "whole_steps": Row((False, True)),
    "nodes": Row((((0,), (1,)), ((0, 1),)), both={"exchange": "hierarchical"}),
    "slice_numel": Row((None, 512)),
    "transform": Row((None, AggregateAdagrad()), both={"exchange": "reduce_scatter"}),
    "guard": Row((False, True)),
}
# DoubleBuffer's optimizer is what it trains, here SGD; DiLoCo refuses options of gradients
NOT_THERE = {("double_buffer", "optimizer"), ("double_buffer", "scale_lr")}
NOT_THERE |= {("diloco", "transform"), ("diloco", "scale_lr")}
NOT_THERE |= {("local_sgd", "transform"), ("local_sgd", "scale_lr")}


def options_of(name):
    """Return the options of an entry point, the rare ones included."""
    found = set(inspect.signature(CALLS[name]).parameters)
    found |= RARE if "advanced" in found else set()
    return {word for word in found if (name, word) not in NOT_THERE}


def option(row):
    return row.partition(",")[0]


@pytest.mark.parametrize("name", CALLS)
def test_no_option_is_forgotten(name):
    assert options_of(name) <= OWN | set(map(option, ROWS))


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name in CALLS for row in ROWS if option(row) in options_of(name)],
)
@each_rank(2, by="ranks")
def test_ranks_with_other_options_are_told_both(name, row):
    word, (values, field, both) = option(row), ROWS[row]
    given = {**(both or {}), word: values[dist.get_rank()]}
    if word in RARE:
        given["advanced"] = Advanced(**{word: given.pop(word)})
    codec = given.pop("codec", "onebit")
    found, text = mismatch(lambda: trained(ENTRIES[name], codec, range(4), **given))
    assert found in (word, field) and re.search("rank 0 has .*, rank 1 has", text), (found, text)


# an option of a codec, and other values than any codec has by default
OTHER = {
    "clip_sigma": 3.0,
    "scale": "own",
    "group": 64,
    "seed": 1,
    "step": 2.0,
    "bits": {"block2": 4, "block4": 8, "block8": 4, "entropy": 2.5},
    "error_feedback": False,
    "residual_decay": 0.5,
    "second_phase": "fp32",
    "values": "signs",
    "rotate": True,
    "dtype": {"identity": "bf16", "bfloat16": "fp32"},
}


def codec_pairs():
    """Return each codec, and it with one option changed."""
    found = []
    for codec, word in [(kind, word) for kind in KINDS for word in kind.options()]:
        value = OTHER[word][codec.name] if isinstance(OTHER[word], dict) else OTHER[word]
        others = {} if word == "rotate" else codec.options()  # it excludes their defaults
        changed = type(codec)(**others | {word: value})
        found.append(pytest.param(codec, changed, id=f"{codec.name}, {word}"))
    return found


@pytest.mark.parametrize(("one", "other"), codec_pairs())
def test_ranks_with_other_options_of_a_codec_are_told_both(one, other):
    assert isinstance(one, Codec) and one != other

    def average(comm):
        weight = torch.nn.Parameter(torch.zeros(40, 64))
        weight.grad = torch.ones(40, 64)
        averager = GradientAverager([("w", weight)], (one, other)[comm.rank], comm=comm)
        with contextlib.closing(averager):
            return mismatch(averager.average)[1]

    said = run_local(2, average)
    assert said[0] == said[1] and repr(one)[:30] in said[0], said
