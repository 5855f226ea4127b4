"""Determine rank, world size and rendezvous of a process from its launcher's environment variables.

Imports only the standard library and nothing of gradcomp, because a rank runs this file before
anything else.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_PORT = 29500  # torch's own
FIRST_PORT, PORTS = 10000, 20000  # below 32768, from which on Linux assigns ports by itself
NOT_A_TASK = range(4294967290, 4294967293)  # Slurm's steps "interactive", "batch" and "extern"
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


class _Source(NamedTuple):
    """A launcher's variables for rank, world size, local rank, local world size and job id.

    Each field has one or more names, separated by spaces; the first that is set is used.
    """

    rank: str
    size: str
    local_rank: str
    local_size: str = ""
    job: str = ""


# The innermost launcher comes first: mpirun inside a Slurm job inherits Slurm's variables of the
# whole step.
_OMPI = "OMPI_COMM_WORLD_"
_SLURM = "SLURM_STEP_NUM_TASKS SLURM_NTASKS"
_SOURCES = (
    _Source("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    _Source(
        f"{_OMPI}RANK",
        f"{_OMPI}SIZE",
        f"{_OMPI}LOCAL_RANK",
        f"{_OMPI}LOCAL_SIZE",
        "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    ),
    _Source(
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID PMI_LOCAL_RANK SLURM_LOCALID",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
        "PMI_JOBID",
    ),
    _Source("SLURM_PROCID", f"{_SLURM} SLURM_NPROCS", "SLURM_LOCALID"),
    _Source(
        "PMIX_RANK", f"PMIX_SIZE {_SLURM}", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", "PMIX_NAMESPACE"
    ),
)


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return torchrun's variables for this process, for any supported launcher.

    Args:
        variables: environment to read, not modified; None: `os.environ`.

    Returns:
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as strings.
        Variables that are set already keep their values. Without a launcher, the world size is 1.
        Unknown variables are left out: LOCAL_RANK and LOCAL_WORLD_SIZE under a bare PMI, and
        MASTER_ADDR if the ranks are on several hosts and no variable names the first host.

    Raises:
        ValueError: a rank is set without a size, or a value is not a whole number; the message has
            the variable's name.
    """
    given = os.environ if variables is None else variables
    source = next((one for one in _SOURCES if _applies(one, given)), None)
    found = _ranks(source, given) if source else dict(ALONE)
    found |= _rendezvous(source, found, given)
    # RANK without WORLD_SIZE, or the other way round, is a leftover of a shell and is ignored.
    kept = NAMES if source and source.rank == "RANK" else ("MASTER_ADDR", "MASTER_PORT")
    return found | {name: given[name] for name in kept if given.get(name)}


def export_environment() -> dict[str, str]:
    """Set the variables of `environment` in `os.environ` and return them."""
    found = environment()
    os.environ.update(found)
    return found


def _applies(source: _Source, given: Mapping[str, str]) -> bool:
    if source.rank == "SLURM_PROCID":  # also set in a batch script, which is not a task
        step = given.get("SLURM_STEP_ID") or given.get("SLURM_STEPID")
        if step is not None and step in map(str, NOT_A_TASK):
            return False
        is_step = "SLURM_STEP_NODELIST" in given or "SLURM_LAUNCH_NODE_IPADDR" in given
        return source.rank in given and (step is not None or is_step)
    return source.rank in given and (source.rank != "RANK" or "WORLD_SIZE" in given)


def _ranks(source: _Source, given: Mapping[str, str]) -> dict[str, str]:
    size = _first_number(given, source.size)
    if size is None:
        names = ", ".join(source.size.split())
        raise ValueError(f"{source.rank} is set, but none of {names}: set WORLD_SIZE and RANK")
    rank = _number(source.rank, given[source.rank])
    if size == "1":
        return dict(ALONE)
    found = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": _first_number(given, source.local_rank),
        "LOCAL_WORLD_SIZE": _first_number(given, source.local_size) or _slurm_local_size(given),
    }
    return {name: value for name, value in found.items() if value is not None}


def _rendezvous(
    source: _Source | None, found: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the address of rank 0's host and a port, equal on all ranks without communication."""
    # Under mpirun, the Slurm step is that of the host's daemon and differs between hosts.
    is_mpirun = _OMPI + "RANK" in given or "MPI_LOCALRANKID" in given
    job = _first(given, source.job) if source else None
    if job is None and "SLURM_JOB_ID" in given and source is not None:
        step = "" if is_mpirun else given.get("SLURM_STEP_ID", "")
        job = f"{given['SLURM_JOB_ID']}.{step}"
    port = DEFAULT_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    of_step = "" if is_mpirun else "SLURM_STEP_NODELIST "
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        address: str | None = "127.0.0.1"
    elif nodes := _first(given, of_step + "SLURM_JOB_NODELIST SLURM_NODELIST"):
        address = first_node(nodes)
    else:
        address = given.get("SLURM_LAUNCH_NODE_IPADDR")
    return {"MASTER_PORT": str(port)} | ({"MASTER_ADDR": address} if address else {})


def first_node(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``n03-ib`` for ``n[03-05,9]-ib,m1``."""
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _slurm_local_size(given: Mapping[str, str]) -> str | None:
    """Return the number of tasks on this node; ``2(x3),1`` means 2 on nodes 0 to 2, 1 on node 3."""
    counts = _first(given, "SLURM_STEP_TASKS_PER_NODE SLURM_TASKS_PER_NODE") or ""
    node = int(_number("SLURM_NODEID", given.get("SLURM_NODEID", "0"))) if counts else 0
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        node -= int(times or 1)
        if node < 0:
            return str(int(count))
    return None


def _first(given: Mapping[str, str], names: str) -> str | None:
    return next((given[name] for name in names.split() if given.get(name)), None)


def _first_number(given: Mapping[str, str], names: str) -> str | None:
    """Return the first variable that is set; a value that is not a whole number is a ValueError."""
    name = next((name for name in names.split() if given.get(name)), None)
    return None if name is None else _number(name, given[name])


def _number(name: str, text: str) -> str:
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r} is not a whole number")
    return str(int(text))
