"""States and files that a version has written are read by all later ones
(docs/reference/compatibility.md): tests/vectors/states-VERSION.json has what each has written.

`--write-golden` (without xdist) writes the file of this version; one of a released version never
changes.
"""

import base64
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from _ranks import run_local
from _saved import bits_of
from torch import nn

import gradcomp
from gradcomp import DiLoCo, GradientAverager, Ternary
from gradcomp.amp import DynamicLossScaler
from gradcomp.codecs import EntropyCoded
from gradcomp.onebit_sgd import AggregateAdagrad, DoubleBuffer, LocalAdagrad
from gradcomp.optim import (
    SplitAdagrad,
    SplitAdamW,
    SplitLAMB,
    SplitSGD,
    split_parameters,
)

VECTORS = Path(__file__).parents[1] / "vectors"
STEPS = 2


def encoded(value):
    """Return a state as what JSON can hold."""
    if isinstance(value, torch.Tensor):
        kind, shape, raw = bits_of(value)
        return {"tensor": [kind.removeprefix("torch."), shape, base64.b64encode(raw).decode()]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(one)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [encoded(one) for one in value]}
    return value


def decoded(value):
    if isinstance(value, list):  # of ranks
        return [decoded(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        dtype, shape, text = content
        found = torch.empty(shape, dtype=getattr(torch, dtype))
        raw = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
        found.view(-1).view(torch.uint8).copy_(raw)
        return found
    if kind == "dict":
        return {decoded(key): decoded(one) for key, one in content}
    return {"list": list, "tuple": tuple}[kind](map(decoded, content))


def layers():
    model = nn.Sequential(nn.Linear(16, 2), nn.Linear(2, 1))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    return model


def set_gradients(model, step, rank):
    for number, parameter in enumerate(model.parameters()):
        values = torch.arange(parameter.numel()) * (number + 3) + 5 * step + rank
        parameter.grad = ((values % 13 - 6) / 8).view_as(parameter).to(parameter.dtype)


# ---- what has a state: each opens it, and makes a step -------------------------------------------


class Averaged:
    def __init__(self, comm, codec, **options):
        self.model, self.rank = layers(), comm.rank
        self.state = GradientAverager(self.model, codec, comm=comm, min_numel=0, **options)

    def step(self, number):
        set_gradients(self.model, number, self.rank)
        self.state.average()


class Local:
    def __init__(self, comm, codec, **options):
        self.model, self.rank = layers(), comm.rank
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        options = {"comm": comm, "min_numel": 0, "sync_every": 1, **options}
        self.state = DiLoCo(self.model, self.optimizer, codec, **options)

    def step(self, number):
        set_gradients(self.model, number, self.rank)
        self.optimizer.step()
        self.state.step()


class Buffered:
    def __init__(self, comm, codec):
        self.model, self.rank = layers(), comm.rank
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.state = DoubleBuffer(self.model, optimizer, codec, comm=comm, min_numel=0)

    def step(self, number):
        x = torch.arange(64.0).view(4, 16) % (3 + number + self.rank)
        self.state.step(lambda part: self.model(part).sum(), x)


class Updated:
    def __init__(self, comm, kind, **options):
        self.model, self.rank = layers(), comm.rank
        self.state = kind(split_parameters(self.model), **options)

    def step(self, number):
        set_gradients(self.model, number, 0)
        self.state.step()


class Scaled:
    def __init__(self, comm):
        self.model, self.state = layers(), DynamicLossScaler(1024.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)

    def step(self, number):
        self.optimizer.zero_grad()
        self.state.scale(self.model(torch.ones(1, 16)).sum()).backward()
        self.state.step(self.optimizer)
        self.state.update()


ENTRIES = {
    "averager, ternary": partial(Averaged, codec=Ternary(residual_decay=0.25)),
    "averager, terngrad": partial(Averaged, codec="terngrad"),
    "averager, onebit": partial(Averaged, codec="onebit"),
    "averager, block4": partial(Averaged, codec="block4"),
    "averager, entropy-coded": partial(Averaged, codec=EntropyCoded(2.2)),
    "averager, preconditioned": partial(Averaged, codec="ternary", precondition=True),
    "averager, aggregate AdaGrad": partial(
        Averaged, codec="onebit", advanced=gradcomp.Advanced(transform=AggregateAdagrad())
    ),
    "averager, local AdaGrad": partial(
        Averaged, codec="onebit", advanced=gradcomp.Advanced(transform=LocalAdagrad())
    ),
    "DiLoCo, ternary": partial(Local, codec="ternary"),
    "DiLoCo, two fragments": partial(Local, codec="terngrad", fragments=2, sync_every=2),
    "double buffer, onebit": partial(Buffered, codec="onebit"),
    "SplitSGD": partial(Updated, kind=SplitSGD, lr=0.125, momentum=0.5),
    "SplitAdamW": partial(Updated, kind=SplitAdamW, lr=0.125),
    "SplitAdagrad": partial(Updated, kind=SplitAdagrad, lr=0.125),
    "SplitLAMB": partial(Updated, kind=SplitLAMB, lr=0.125),
    "loss scaler": Scaled,
}


def saved_by(entry):
    """Return what a rank saves: gradcomp's state (first: it may wait for averages), the weights."""
    return [encoded(part.state_dict()) for part in (entry.state, entry.model)]


def save(name, comm):
    """Return what a rank saves after some steps."""
    entry = ENTRIES[name](comm)
    for number in range(STEPS):
        entry.step(number)
    return saved_by(entry)


def load(name, saved, comm):
    """Load what a rank has saved into a new run, which goes on; return what it would save before
    that.
    """
    entry = ENTRIES[name](comm)
    state, weights = map(decoded, saved[comm.rank])
    entry.model.load_state_dict(weights)
    entry.state.load_state_dict(state)
    again = saved_by(entry)
    entry.step(STEPS)
    return again


THIS = VECTORS / f"states-{'.'.join(gradcomp.__version__.split('.')[:2])}.json"
FILES = sorted({*VECTORS.glob("states-*.json"), THIS})


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_states_of_a_version_are_read_and_none_of_their_bits_is_lost(file, name, request):
    if request.config.getoption("--write-golden") and file == THIS:
        rows = json.loads(file.read_text()) if file.exists() else {}
        rows[name] = run_local(2, partial(save, name))
        lines = (f"{json.dumps(one)}: {json.dumps(row)}" for one, row in rows.items())
        file.write_text("{" + ",\n".join(lines) + "}\n")
    saved = json.loads(file.read_text())[name]
    again = run_local(2, partial(load, name, saved))
    assert bits_of(decoded(again)) == bits_of(decoded(saved))
