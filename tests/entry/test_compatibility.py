"""States and files that a version has written are read by all later ones
(docs/reference/compatibility.md): tests/vectors/states-VERSION.json has what each has written.

`--write-golden` (without xdist) writes the file of this version; one of a released version never
changes.
"""

import base64
import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from _ranks import run_local
from _saved import bits_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradcomp
import gradcomp.fsdp
from gradcomp import Block, DiLoCo, GradientAverager, OneBit, Ternary, TernGrad
from gradcomp.amp import DynamicLossScaler
from gradcomp.checkpoint import Checkpoints
from gradcomp.codecs import EntropyCoded
from gradcomp.local import Coordinator, ElasticDiLoCo
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


class Site(Local):
    address = ""  # of the coordinator of this run

    def __init__(self, comm, codec):
        self.model, self.rank = layers(), comm.rank
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        options = {"coordinator": self.address, "name": "ab"[comm.rank]}
        self.state = ElasticDiLoCo(
            self.model, self.optimizer, codec, sync_every=1, min_numel=0, **options
        )


class Sharded:
    """Its weights, which no optimizer changes, are not saved."""

    def __init__(self, comm, codec):
        self.model, self.rank, self.net = nn.Module(), comm.rank, fully_shard(layers())
        self.state = gradcomp.fsdp.register(self.net, codec, min_numel=0)

    def step(self, number):
        self.net.zero_grad()
        x = torch.arange(64.0).view(4, 16) + 5 * number + self.rank
        self.net(x % 13 - 6).sum().backward()


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
    "site, onebit": partial(Site, codec="onebit"),
    "FSDP2, onebit": partial(Sharded, codec="onebit"),
    "FSDP2, ternary": partial(Sharded, codec=Ternary(residual_decay=0.25)),
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


def of_ranks(name, function, request):
    """Return function(comm) of two ranks, of the kind that an entry needs."""
    if name.startswith("FSDP2"):
        return request.getfixturevalue("gloo")(2, of_a_process, function)
    if name.startswith("site"):
        with Coordinator("127.0.0.1", 0, store_port=0, sites=2, min_sites=2) as served:
            Site.address = f"127.0.0.1:{served.port}"
            return run_local(2, function)
    return run_local(2, function)


def of_a_process(function):
    return function(SimpleNamespace(rank=dist.get_rank()))


def row_of(file, name, request, write):
    """Return what a version has written; with `--write-golden` write() of this version first."""
    if request.config.getoption("--write-golden") and file == THIS:
        rows = json.loads(file.read_text()) if file.exists() else {}
        rows[name] = write()
        lines = (f"{json.dumps(one)}: {json.dumps(row)}" for one, row in rows.items())
        file.write_text("{" + ",\n".join(lines) + "}\n")
    return json.loads(file.read_text())[name]


EACH_FILE = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


@pytest.mark.parametrize("name", ENTRIES)
@EACH_FILE
def test_states_of_a_version_are_read_and_none_of_their_bits_is_lost(file, name, request):
    saved = row_of(file, name, request, lambda: of_ranks(name, partial(save, name), request))
    again = of_ranks(name, partial(load, name, saved), request)
    assert bits_of(decoded(again)) == bits_of(decoded(saved))


def checkpoints_of(folder, comm):
    entry = Averaged(comm, "onebit")
    return entry, Checkpoints(folder, entry.state, comm=comm, model=entry.model)


@EACH_FILE
def test_files_of_checkpoints_of_a_version_are_read(file, request, tmp_path):
    """The files as bytes, and the states that are in them."""

    def save_files(comm):
        entry, checkpoints = checkpoints_of(tmp_path / "written", comm)
        for number in range(STEPS):
            entry.step(number)
        checkpoints.save(STEPS)
        return saved_by(entry)

    def write():
        saved, root = run_local(2, save_files), tmp_path / "written"
        found = {str(one.relative_to(root)): one.read_bytes() for one in root.glob("*/*")}
        return [{one: base64.b64encode(raw).decode() for one, raw in found.items()}, saved]

    def load_files(comm):
        entry, checkpoints = checkpoints_of(tmp_path, comm)
        assert checkpoints.load() == STEPS
        return saved_by(entry)

    files, saved = row_of(file, "files of Checkpoints", request, write)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(base64.b64decode(text))
    assert bits_of(decoded(run_local(2, load_files))) == bits_of(decoded(saved))


# ---- states of before 0.1 ------------------------------------------------------------------------

OLD = json.loads((VECTORS / "before-0.1.json").read_text())  # written by commit c3a419b
PAGE = (VECTORS.parents[1] / "docs/reference/compatibility.md").read_text(encoding="utf-8")
(CONVERTER,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DECAYED = OneBit(residual_decay=1.0)


def convert(*args, **options):
    """Call the function that the page shows."""
    names = {}
    exec(CONVERTER, names)
    return names["converted"](*args, **options)


def next_of_averager(codec, options, old, comm):
    entry = Averaged(comm, codec, **options)
    with pytest.raises(ValueError, match=r"format None, 2 expected\): go on .* convert it \(docs/"):
        entry.state.load_state_dict(old["state"])
    entry.state.load_state_dict(convert(old["state"]))
    entry.step(2)
    return [p.grad for p in entry.model.parameters()]


def next_of_local_steps(old, comm):
    entry = Local(comm, DECAYED)
    with torch.no_grad():
        for parameter, saved in zip(entry.model.parameters(), old["weights"], strict=True):
            parameter.copy_(saved)
    entry.state.load_state_dict(convert(old["state"], sync_every=1))
    entry.step(2)
    return [p.detach() for p in entry.model.parameters()]


def next_of_fsdp2(old, comm):
    model = layers()
    fully_shard(model)
    state = gradcomp.fsdp.register(model, DECAYED, min_numel=0)
    state.load_state_dict(convert(old["state"]))
    x = ((torch.arange(48).view(3, 16) * 7 + 10 + comm.rank) % 13 - 6) / 8
    model(x).sum().backward()
    found = [p.grad.to_local() for p in model.parameters()]
    state.close()
    return found


@pytest.mark.parametrize(
    ("name", "follow"),
    [
        ("averager", partial(next_of_averager, DECAYED, {"precondition": True})),
        ("ternary", partial(next_of_averager, TernGrad(), {})),
        ("block", partial(next_of_averager, Block(4, error_feedback=False), {})),
        ("local", next_of_local_steps),
        ("FSDP2", next_of_fsdp2),
    ],
    ids=["averager", "stochastic", "no residuals", "local steps", "FSDP2"],
)
def test_states_from_before_residual_decay_are_converted_with_a_decay_of_1(name, follow, request):
    has_residuals = name not in ("ternary", "block")
    found = of_ranks(name, partial(goes_on, name, follow), request)
    assert found == [(True, has_residuals)] * 2


def goes_on(name, follow, comm):
    """Return whether the next values are those of the old version, and whether it had residuals."""
    old = decoded(OLD["fsdp" if name == "FSDP2" else name])[comm.rank]
    found = follow(old, comm)
    residuals = any(bool(t.any()) for t in tensors_of(old["state"], "residual"))
    return bits_of(found) == bits_of(old["next"]), residuals


def tensors_of(state, part):
    """Yield the tensors under a key of this name, at any depth."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if key == part:
            yield from torch.utils._pytree.tree_leaves(value)
        elif isinstance(value, (dict, list)):
            yield from tensors_of(value, part)
