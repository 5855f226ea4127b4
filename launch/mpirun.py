"""Find an mpirun, tell its flavour, and write the command that it understands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Open MPI passes no variables to other hosts; MPICH passes all. Variables that matter to a
# training, by name or prefix:
FORWARDED = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|PYTHON\w+|PATH|LD_LIBRARY_PATH|(OMP|MKL|GRADCOMP|GLOO|NCCL|TORCH|CUDA)_\w+)"
)
# What another launcher has told this process about itself must not reach the ranks.
STALE = re.compile(
    r"((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|PMI_\w+|PMIX_(?!MCA_)\w+|MPI_LOCALN?RANK(ID|S)|OMPI_COMM_WORLD_\w+)"
)
FLAVOURS = {"openmpi": r"Open ?MPI\D*(\d+)", "mpich": r"HYDRA build details:\s+Version:\s+(\d+)"}


class LaunchError(Exception):
    """Something the user can put right, said in one line."""


class Mpi(NamedTuple):
    """An mpirun: path, flavour (openmpi, mpich or unknown), major version (0 if unknown)."""

    path: str
    flavour: str
    major: int


def find(python: str, environ: Mapping[str, str]) -> str:
    """Return the mpirun to use: GRADCOMP_MPIRUN, or the one beside `python`, or the first on
    PATH.
    """
    path, wanted = environ.get("PATH", os.defpath), environ.get("GRADCOMP_MPIRUN")
    if wanted:
        if found := shutil.which(wanted, path=path):
            return found
        raise LaunchError(f"GRADCOMP_MPIRUN={wanted} is not a program that can be run")
    beside = str(Path(python).parent)
    for folder in (beside, path):
        for name in ("mpirun", "mpiexec"):
            if found := shutil.which(name, path=folder):
                return found
    install = "install one with: pip install 'gradcomp[mpi]'"
    raise LaunchError(f"no mpirun or mpiexec found in {beside} or on PATH; {install}")


def identify(path: str, environ: Mapping[str, str]) -> Mpi:
    """Ask an mpirun for its version."""
    ask, nothing = [path, "--version"], subprocess.DEVNULL
    try:
        out = subprocess.run(
            ask, check=False, env=environ, stdin=nothing, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not run: {error}") from None
    return parse_version(path, out.stdout + out.stderr)


def parse_version(path: str, text: str) -> Mpi:
    """Tell the flavour from what ``--version`` printed."""
    for flavour, pattern in FLAVOURS.items():
        if found := re.search(pattern, text, re.IGNORECASE):
            return Mpi(path, flavour, int(found[1]))
    return Mpi(path, "unknown", 0)


def parse_hosts(text: str) -> list[str]:
    """Read ``a,b:4``: names of hosts, with the number of ranks each takes if that is given."""
    return [_host(word) for word in text.split(",")]


def read_hostfile(path: str) -> list[str]:
    """Read a line a host: ``name``, ``name:4`` or ``name slots=4``; ``#`` begins a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the host file {path}: {error}") from None
    words = [re.sub(r"\s+slots\s*=\s*", ":", line.partition("#")[0].strip()) for line in lines]
    hosts = [_host(word) for word in words if word]
    if not hosts:
        raise LaunchError(f"the host file {path} names no host")
    return hosts


def _host(word: str) -> str:
    if not re.fullmatch(r"[\w.\-]+(:[1-9]\d*)?", word.strip()):
        raise LaunchError(
            f"{word!r} is not a host: write NAME or NAME:RANKS (in a file also NAME slots=RANKS)"
        )
    return word.strip()


def command(
    mpi: Mpi,
    ranks: int,
    *,
    hosts: Sequence[str] = (),
    bind: str = "none",
    as_root: bool,
    forward: Sequence[str] = (),
) -> list[str]:
    """Return the mpirun command line up to the program, or raise LaunchError for hosts or a
    binding that this MPI cannot be given.

    Without `hosts` the ranks run on this host, or on what a batch system has allotted. `forward`
    names the variables that Open MPI passes to other hosts.
    """
    options, names = [], ",".join(hosts)
    if mpi.flavour == "openmpi":
        modern = mpi.major >= 5
        target = "package" if bind == "socket" and modern else bind
        options += ["--allow-run-as-root"] if as_root else []
        options += ["--map-by", ":OVERSUBSCRIBE"] if modern else ["--oversubscribe"]
        options += ["--bind-to", target if bind == "none" else f"{target}:overload-allowed"]
        if hosts:
            options += ["--host", names, *(word for name in forward for word in ("-x", name))]
    elif mpi.flavour == "mpich":
        options = ["-bind-to", bind, *(["-hosts", names] if hosts else [])]
    elif hosts or bind != "none":
        raise LaunchError(
            f"{mpi.path} is neither Open MPI nor MPICH: hosts and --bind cannot be passed to it;"
            " start the program by that mpirun itself and call gradcomp.launch.export_environment()"
        )
    return [mpi.path, "-n", str(ranks), *options]
