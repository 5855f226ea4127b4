"""Find an mpirun, identify its implementation, and build its command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Variables that a training needs, by name or prefix. Open MPI passes none to other hosts unless
# they are named; MPICH passes all.
FORWARDED = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|PYTHON\w+|PATH|LD_LIBRARY_PATH"
    r"|(OMP|MKL|GRADCOMP|GLOO|NCCL|TORCH|CUDA)_\w+)"
)
# Variables of another launcher that describe this process; the ranks must not inherit them.
STALE = re.compile(
    r"((LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE|PMI_\w+|PMIX_(?!MCA_)\w+"
    r"|MPI_LOCALN?RANK(ID|S)|OMPI_COMM_WORLD_\w+)"
)
FLAVOURS = {"openmpi": r"Open ?MPI\D*(\d+)", "mpich": r"HYDRA build details:\s+Version:\s+(\d+)"}


class LaunchError(Exception):
    """An error that the user can fix; the message is one line."""


class Mpi(NamedTuple):
    """An mpirun: path, flavour (openmpi, mpich or unknown), major version (0 if unknown)."""

    path: str
    flavour: str
    major: int


def find(python: str, environ: Mapping[str, str]) -> str:
    """Return the path of the mpirun to use: GRADCOMP_MPIRUN, or the one in the folder of `python`,
    or the first on PATH. No mpirun, or a wrong GRADCOMP_MPIRUN, is a LaunchError.
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
    """Return implementation and version of an mpirun, or raise LaunchError if it does not run."""
    ask, nothing = [path, "--version"], subprocess.DEVNULL
    try:
        out = subprocess.run(
            ask, check=False, env=environ, stdin=nothing, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version does not run: {error}") from None
    return parse_version(path, out.stdout + out.stderr)


def parse_version(path: str, text: str) -> Mpi:
    """Return implementation and version from the output of ``--version``."""
    for flavour, pattern in FLAVOURS.items():
        if found := re.search(pattern, text, re.IGNORECASE):
            return Mpi(path, flavour, int(found[1]))
    return Mpi(path, "unknown", 0)


def parse_hosts(text: str) -> list[str]:
    """Return the hosts of a text such as ``a,b:4``: names, optionally with a number of ranks."""
    return [_host(word) for word in text.split(",")]


def read_hostfile(path: str) -> list[str]:
    """Return the hosts of a file with a line for each: ``name``, ``name:4`` or ``name slots=4``;
    ``#`` starts a comment. An unreadable, invalid or empty file is a LaunchError.
    """
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
    """Return the mpirun command line up to the program.

    Without `hosts`, the ranks run on this host, or on a batch system's allocation. `bind` is
    "none", "core" or "socket". `forward` names the variables that Open MPI passes to other hosts.

    Raises:
        LaunchError: hosts or a binding for an MPI that is neither Open MPI nor MPICH.
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
