"""gradcomp: data-parallel gradients in 2 bits or 1 bit instead of 32.

One line after ``DistributedDataParallel(...)``::

    state = gradcomp.ddp.register(model, "ternary")

Importing gradcomp starts no thread, no network and no MPI, and changes no environment variable.
Packages that not every run needs are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradcomp import interrupt

interrupt.begin()

import torch

from gradcomp import codecs, comm
from gradcomp.allreduce import all_reduce
from gradcomp.averager import GradientAverager
from gradcomp.codecs import Block, EntropyCoded, Identity, OneBit, Ternary, TernGrad
from gradcomp.engine.options import Advanced
from gradcomp.errors import (
    CorruptPayload,
    GradcompError,
    NotFinite,
    PeerLost,
    PeerMismatch,
    UnsupportedTensor,
)
from gradcomp.memory.moments import Precondition
from gradcomp.memory.transform import Transform
from gradcomp.payload.form import removal
from gradcomp.version import __version__, warn_about_torch

if TYPE_CHECKING:
    from gradcomp import amp, ddp, onebit_sgd, optim, plan, server
    from gradcomp.local import DiLoCo, LocalSGD

__all__ = [
    "Advanced",
    "Block",
    "CorruptPayload",
    "DiLoCo",
    "EntropyCoded",
    "GradcompError",
    "GradientAverager",
    "Identity",
    "LocalSGD",
    "NotFinite",
    "OneBit",
    "PeerLost",
    "PeerMismatch",
    "Precondition",
    "TernGrad",
    "Ternary",
    "Transform",
    "UnsupportedTensor",
    "__version__",
    "all_reduce",
    "amp",
    "codecs",
    "comm",
    "ddp",
    "fsdp",
    "onebit_sgd",
    "optim",
    "plan",
    "server",
]

warn_about_torch(torch.__version__)


MOVED = {
    "Codec": "gradcomp.codecs.Codec",
    "Feedback": "gradcomp.allreduce.Feedback",
    "NativeError": "gradcomp.errors.NativeError",
    "Options": "keywords of the entry points, and gradcomp.Advanced for rare options",
    "RngKey": "gradcomp.codecs.RngKey",
    "forget_buffers": "gradcomp.allreduce.forget_buffers",
}
LATER = ("amp", "ddp", "fsdp", "local", "onebit_sgd", "optim", "plan", "server")


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("DiLoCo", "LocalSGD"):
        return getattr(importlib.import_module("gradcomp.local"), name)
    if name in LATER:
        return importlib.import_module(f"gradcomp.{name}")
    why = f": use {MOVED[name]}" if name in MOVED else removal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")
