"""gradcomp: data-parallel gradients in 2 bits or 1 bit instead of 32.

One line after ``DistributedDataParallel(...)``::

    state = gradcomp.ddp.register(model, "ternary")

Importing gradcomp starts no thread, no network and no MPI, and changes no environment variable.
Submodules and torch are imported on first use, so the launcher, Ctrl-C and ``--help`` respond at
once.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gradcomp.version import __version__ as __version__

if TYPE_CHECKING:
    from gradcomp import amp, codecs, comm, ddp, fsdp, onebit_sgd, optim, plan, server
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
    from gradcomp.local import DiLoCo, LocalSGD
    from gradcomp.memory.moments import Precondition
    from gradcomp.memory.transform import Transform

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

# module of each name above that is not a module itself
MODULES = {
    "Advanced": "engine.options",
    "Block": "codecs",
    "CorruptPayload": "errors",
    "DiLoCo": "local",
    "EntropyCoded": "codecs",
    "GradcompError": "errors",
    "GradientAverager": "averager",
    "Identity": "codecs",
    "LocalSGD": "local",
    "NotFinite": "errors",
    "OneBit": "codecs",
    "PeerLost": "errors",
    "PeerMismatch": "errors",
    "Precondition": "memory.moments",
    "TernGrad": "codecs",
    "Ternary": "codecs",
    "Transform": "memory.transform",
    "UnsupportedTensor": "errors",
    "all_reduce": "allreduce",
}
MOVED = {
    "Codec": "gradcomp.codecs.Codec",
    "Feedback": "gradcomp.allreduce.Feedback",
    "NativeError": "gradcomp.errors.NativeError",
    "Options": "keywords of the entry points, and gradcomp.Advanced for rare options",
    "RngKey": "gradcomp.codecs.RngKey",
    "forget_buffers": "gradcomp.allreduce.forget_buffers",
}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        globals()[name] = found = getattr(import_module(f"gradcomp.{MODULES[name]}"), name)
        return found
    if not name.startswith("_") and find_spec(f"gradcomp.{name}"):
        return import_module(f"gradcomp.{name}")
    from gradcomp.payload.form import removal

    why = f": use {MOVED[name]}" if name in MOVED else removal(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
