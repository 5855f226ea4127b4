"""Who this process is among its ranks, and how they speak before anything else of a transport is
trusted.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradcomp.comm.base import Communicator
from gradcomp.comm.mpi import RANK_VARIABLES, MpiCommunicator, describe_mpi
from gradcomp.comm.notices import MpiNotices, Notices, StoreNotices
from gradcomp.comm.torch_private import store_below
from gradcomp.comm.torchdist import TorchCommunicator, open_group, open_store
from gradcomp.doctor.probe import Helper

CONNECT_S = 8.0  # longest wait for ranks that are all there to connect
TIMEOUT_S = 30.0  # of the communicator; what uses it has limits of its own
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun serves the store, not rank 0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"


@dataclass
class Me:
    """This process among the ranks.

    Attributes:
        rank, world_size: as they say.
        over: "gloo" or "mpi".
        mpi: library and thread level, None over gloo.
        address: of the store, None over MPI.
        helper: for a probe over gloo; forked before anything else was started.
    """

    rank: int
    world_size: int
    over: str
    mpi: str | None = None
    address: tuple[str, int] | None = None
    helper: Helper | None = None
    notices: Notices | None = None
    _store: Any = field(default=None, repr=False)

    @staticmethod
    def find(over: str, variables: Mapping[str, str] | None = None) -> Me:
        """Return who this is, by the variables of its launcher.

        Args:
            over: "auto", "gloo" or "mpi".
            variables: by default those of the environment.

        Raises:
            ValueError: variables that say no sense, or not enough.
            ImportError, RuntimeError: MPI is asked for, and there is none.
        """
        given = os.environ if variables is None else variables
        found = importlib.import_module("gradcomp.launch").environment(given)
        if over == "auto":
            over = "mpi" if _is_of_mpi(given) else "gloo"
        if over == "mpi":
            mpi = describe_mpi()
            notices = MpiNotices()
            return Me(notices.rank, notices.world_size, over, mpi, notices=notices)
        rank, world_size = int(found["RANK"]), int(found["WORLD_SIZE"])
        if world_size == 1:
            return Me(0, 1, over)
        if not found.get("MASTER_ADDR"):
            raise ValueError(
                "MASTER_ADDR is not set, and nothing says where rank 0 is: set MASTER_ADDR and"
                " MASTER_PORT on every rank, or --over mpi"
            )
        if not found["MASTER_PORT"].isdecimal():
            raise ValueError(f"MASTER_PORT={found['MASTER_PORT']!r} is not a number")
        return Me(
            rank,
            world_size,
            over,
            address=(found["MASTER_ADDR"], int(found["MASTER_PORT"])),
            helper=Helper(),
        )

    def meet(self, wait_s: float) -> Notices:
        """Return the way to the other ranks' ears.

        Raises:
            ConnectionError: there is none.
        """
        if self.notices is None:
            assert self.address is not None
            agent = os.environ.get(AGENT_STORE) == "True"
            host, port = self.address
            if self.helper is not None:
                self.helper.connect(host, port, wait_s)
            try:
                self._store = open_store(
                    host, port, serves=self.rank == 0 and not agent, timeout_s=wait_s
                )
            except ConnectionError as error:
                who = "torchrun" if agent else "rank 0"
                what = (
                    "cannot serve the ranks' meeting at"
                    if self.rank == 0 and not agent
                    else f"does not reach {who} at"
                )
                raise ConnectionError(
                    f"rank {self.rank} {what} {host}:{port} ({error}): is {who} running, and"
                    " MASTER_ADDR and MASTER_PORT its address on a network that all ranks have? Is"
                    " the port free?"
                ) from error
            self._store = store_below(self._store, self._prefix("doctor"))
            self.notices = StoreNotices(self._store, self.rank, self.world_size)
        return self.notices

    def connect(self) -> Communicator:
        """Return a communicator of all ranks. Collective.

        Raises:
            RuntimeError, ConnectionError, GradcompError: it does not come about.
        """
        if self.over == "mpi":
            return MpiCommunicator(timeout_s=CONNECT_S)
        open_group(store_below(self._store, "group"), self.rank, self.world_size, CONNECT_S)
        return TorchCommunicator(timeout_s=TIMEOUT_S)

    def probe_prefix(self) -> str:
        """Return below what helpers meet in the store."""
        return self._prefix("probe")

    def _prefix(self, what: str) -> str:
        return f"gradcomp.doctor/{os.environ.get(RESTARTS, '0')}/{what}"


def _is_of_mpi(given: Mapping[str, str]) -> bool:
    """Whether an MPI that mpi4py can speak started this process, and torchrun did not."""
    names = [rank for rank, _ in RANK_VARIABLES if rank != "RANK"]
    if "TORCHELASTIC_RUN_ID" in given or not any(name in given for name in names):
        return False
    return importlib.util.find_spec("mpi4py") is not None


class Watch:
    """Ends this process where a call of somebody else's never returns: nothing waits for ever here.

    Args:
        rank: of this process.
        seconds: after which.
    """

    def __init__(self, rank: int, seconds: float) -> None:
        self.doing = "starting"
        self._rank, self._seconds = rank, seconds
        self._timer = threading.Timer(seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self) -> None:
        say(
            f"rank {self._rank} gave up after {self._seconds:g} s of {self.doing}: a call did not"
            " return. A rank is stuck, or the network drops everything"
        )
        os._exit(1)


def say(text: str) -> None:
    """Tell who has started this, on the standard error."""
    print(f"gradcomp.doctor: {text}", file=sys.stderr, flush=True)
