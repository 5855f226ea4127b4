"""Communicators, which move bytes between ranks and are independent of any codec."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gradcomp.comm.base import Channel, Communicator, Lease, RankGone, Work
from gradcomp.comm.link import LinkCommunicator
from gradcomp.comm.local import LocalCommunicator

if TYPE_CHECKING:
    from gradcomp.comm.mpi import MpiCommunicator
    from gradcomp.comm.torchdist import TorchCommunicator

__all__ = [
    "Channel",
    "Communicator",
    "Lease",
    "LinkCommunicator",
    "LocalCommunicator",
    "MpiCommunicator",
    "RankGone",
    "TorchCommunicator",
    "Work",
]
_LATER = {"TorchCommunicator": "gradcomp.comm.torchdist", "MpiCommunicator": "gradcomp.comm.mpi"}


def __getattr__(name: str) -> object:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
