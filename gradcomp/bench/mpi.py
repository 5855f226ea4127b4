"""mpiexec for the ranks of a benchmark, on this machine or on its hosts (`gradcomp.bench.hosts`).

A host is a network namespace of this machine, so a script that enters the namespace replaces ssh.
The MPI of this interpreter's mpi4py would use shared memory, because all ranks are on one machine;
environment variables restrict it to TCP over the hosts' interface.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradcomp.bench.hosts import INTERFACE, Hosts

AGENT = """#!/bin/sh
# Stands for ssh: [OPTION ...] ADDRESS COMMAND ...
while [ "${1#-}" != "$1" ]; do shift; done
address=$1
shift
case "$address" in
"""
# mpiexec options for starting ranks with `AGENT`, by MPI
THROUGH_AGENT = {
    "mpich": "-launcher ssh -launcher-exec {agent} -iface {interface}",
    "openmpi": (
        "--prtemca plm ssh --prtemca plm_ssh_agent {agent} --prtemca prte_if_include {interface}"
    ),
}


class Mpiexec(contextlib.ExitStack):
    """Starter of a method's ranks during a ``with`` block, one on each host or all on this machine.
    On entry, no MPI, or one that cannot start ranks on hosts, is a ValueError.
    """

    def __init__(self, hosts: Hosts | None) -> None:
        super().__init__()
        self._hosts = hosts

    def __enter__(self) -> Mpiexec:  # noqa: PYI034 - Self is of Python 3.11
        if importlib.util.find_spec("mpi4py") is None:
            raise ValueError("--over mpi needs mpi4py and an MPI: pip install 'gradcomp[mpi]'")
        self._launch: Any = importlib.import_module("gradcomp.launch.mpirun")
        try:
            found = self._launch.find(sys.executable, os.environ)
            self._mpi = self._launch.identify(found, os.environ)
        except self._launch.LaunchError as error:
            raise ValueError(f"--over mpi: {error}") from None
        knows_hosts = self._mpi.flavour in THROUGH_AGENT and self._mpi.major >= 5
        if self._hosts is not None and not knows_hosts:
            raise ValueError(
                f"--over mpi with --hosts knows MPICH and Open MPI from 5 on, not {self._mpi.path} "
                f"({self._mpi.flavour} {self._mpi.major}); with --hosts 0 any will do"
            )
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="gradcomp-bench-"))
        self._agent = Path(folder, "agent")
        return self

    def command(self, ranks: int, *, on_hosts: bool) -> list[str]:
        """Return the command prefix that runs a program on every rank."""
        hosts = self._hosts if on_hosts else None
        places = [f"{hosts.address(n)}:1" for n in range(ranks)] if hosts else []
        words = self._launch.command(self._mpi, ranks, hosts=places, as_root=os.geteuid() == 0)
        if hosts is None:
            return list(words)
        self._write_agent(hosts)
        words += [
            word.format(agent=self._agent, interface=INTERFACE)
            for word in THROUGH_AGENT[self._mpi.flavour].split()
        ]
        return [*hosts.command(0), *words]

    def environment(self, interface: str) -> dict[str, str]:
        """Return the variables that restrict the MPI to TCP over `interface`; {} without hosts."""
        if self._hosts is None:
            return {}
        return {
            "UCX_TLS": "tcp,self",
            "UCX_NET_DEVICES": interface,
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self",
            "OMPI_MCA_btl_tcp_if_include": interface,
        }

    def _write_agent(self, hosts: Hosts) -> None:
        lines = [
            f'{hosts.address(n)}) exec {shlex.join(hosts.command(n))} sh -c "$*" ;;\n'
            for n in range(hosts.count)
        ]
        lines.append('*) echo "no host $address" >&2; exit 1 ;;\nesac\n')
        self._agent.write_text(AGENT + "".join(lines), encoding="utf-8")
        self._agent.chmod(0o700)
