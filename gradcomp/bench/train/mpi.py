"""mpiexec across the hosts of a bench: each is a network namespace of this machine, so what would
be ssh is a script that enters one.

The MPI is that of this interpreter's mpi4py. Left to itself it would find all ranks on one machine
and use its memory; it is told to use TCP alone, over the interface that the ranks share.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from gradcomp.bench.train.hosts import INTERFACE, Hosts

AGENT = """#!/bin/sh
# Stands for ssh: [OPTION ...] ADDRESS COMMAND ...
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
case "$address" in
"""


class Mpiexec:
    """Starts the ranks of a method while a ``with`` block runs.

    Args:
        hosts: one rank on each; None: all on this machine.

    Raises (on entry): ValueError: there is no MPI here that it knows how to start.
    """

    def __init__(self, hosts: Hosts | None) -> None:
        self._hosts = hosts
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Mpiexec:  # noqa: PYI034 - Self is of Python 3.11
        if importlib.util.find_spec("mpi4py") is None:
            raise ValueError("--over mpi needs mpi4py and an MPI: pip install 'gradcomp[mpi]'")
        self._launch: Any = importlib.import_module("gradcomp.launch.mpirun")
        try:
            self._mpi = self._launch.identify(
                self._launch.find(sys.executable, os.environ), os.environ
            )
        except self._launch.LaunchError as error:
            raise ValueError(f"--over mpi: {error}") from None
        if self._hosts is not None and (self._mpi.flavour, self._mpi.major >= 5) not in (
            ("mpich", True),
            ("openmpi", True),
        ):
            raise ValueError(
                f"--over mpi with --hosts knows MPICH and Open MPI from 5 on, not {self._mpi.path} "
                f"({self._mpi.flavour} {self._mpi.major}); with --hosts 0 any will do"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="gradcomp-bench-")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def command(self, ranks: int, *, apart: bool = True) -> list[str]:
        """Return the words that run a program on every rank: each on its host, or on this
        machine where there are none or they are not `apart`.
        """
        hosts = self._hosts if apart else None
        places = (
            []
            if hosts is None
            else [self._launch.Host(hosts.address(rank), 1) for rank in range(ranks)]
        )
        words = self._launch.command(self._mpi, ranks, hosts=places, as_root=os.geteuid() == 0)
        if hosts is None:
            return list(words)
        agent = self._agent(hosts)
        if self._mpi.flavour == "mpich":
            words += ["-launcher", "ssh", "-launcher-exec", agent, "-iface", INTERFACE]
        else:
            words += [
                "--prtemca",
                "plm",
                "ssh",
                "--prtemca",
                "plm_ssh_agent",
                agent,
                "--prtemca",
                "prte_if_include",
                INTERFACE,
            ]
        return [*hosts.command(0), *words]

    def environment(self, interface: str) -> dict[str, str]:
        """Return what keeps the MPI to TCP over an interface; nothing for ranks that are to find
        their own way.
        """
        if self._hosts is None:
            return {}
        return {
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": interface,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": interface,
        }

    def _agent(self, hosts: Hosts) -> str:
        assert self._folder is not None
        path = Path(self._folder.name, "agent")
        if not path.exists():
            cases = [
                f'{hosts.address(n)}) exec {shlex.join(hosts.command(n))} sh -c "$*" ;;\n'
                for n in range(hosts.count)
            ]
            path.write_text(
                f'{AGENT}{"".join(cases)}*) echo "no host $address" >&2; exit 1 ;;\nesac\n',
                encoding="utf-8",
            )
            path.chmod(0o700)
        return str(path)
