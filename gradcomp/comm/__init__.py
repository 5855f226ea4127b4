"""Communicators: they move bytes between ranks and know no codec."""

from __future__ import annotations

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


def __getattr__(name: str) -> object:
    if name == "TorchCommunicator":
        from gradcomp.comm.torchdist import TorchCommunicator

        return TorchCommunicator
    if name == "MpiCommunicator":
        from gradcomp.comm.mpi import MpiCommunicator

        return MpiCommunicator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
