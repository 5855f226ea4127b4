"""Who a process is among its ranks, read from the variables of whatever started it.

Imports the standard library only and nothing of gradcomp: a rank runs this file before anything
else.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_PORT = 29500  # torch's own
FIRST_PORT, PORTS = 10000, 20000  # below 32768, where Linux begins to hand out ports by itself
NOT_A_TASK = (
    "4294967290",
    "4294967291",
    "4294967292",
)  # Slurm's steps "interactive", "batch" and "extern"


class _Source(NamedTuple):
    """What one starter calls the rank, the size, both of them on this host, and the job; names
    in order of trust.
    """

    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job: tuple[str, ...] = ()


# The starter nearest to the process comes first: mpirun inside a Slurm job leaves Slurm's variables
# of the whole step.
_SOURCES = (
    _Source(
        "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), ("TORCHELASTIC_RUN_ID",)
    ),
    _Source(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Source(
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID",),
    ),
    _Source(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
        ("SLURM_LOCALID",),
        (),
    ),
    _Source(
        "PMIX_RANK", ("PMIX_SIZE",), ("PMIX_LOCAL_RANK",), ("PMIX_LOCAL_SIZE",), ("PMIX_NAMESPACE",)
    ),
)


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return torchrun's variables for this process, whichever way it was started.

    Args:
        variables: what to read, by default `os.environ`. It is not changed.

    Returns:
        RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as text. Those
        that are set already are kept. A process that nothing has started is a world of one. What
        cannot be known is left out: the local pair under a bare PMI, and MASTER_ADDR when the ranks
        are on several hosts and no variable names the first.

    Raises:
        ValueError: a rank without a size, or a number that is none, with the variable's name.
    """
    given = os.environ if variables is None else variables
    source = next((s for s in _SOURCES if _applies(s, given)), None)
    found = _ranks(source, given) if source else _alone()
    found |= _rendezvous(source, found, given)
    return found | {name: given[name] for name in NAMES if given.get(name) and _keeps(name, source)}


def export_environment() -> dict[str, str]:
    """Set the variables of `environment` in `os.environ` and return them."""
    found = environment()
    os.environ.update(found)
    return found


def _applies(source: _Source, given: Mapping[str, str]) -> bool:
    if source.rank == "RANK":
        return "RANK" in given and "WORLD_SIZE" in given
    return source.rank in given and (source.rank != "SLURM_PROCID" or _is_slurm_task(given))


def _is_slurm_task(given: Mapping[str, str]) -> bool:
    """Whether srun started this process as a task: a batch script has a SLURM_PROCID too."""
    step = given.get("SLURM_STEP_ID") or given.get("SLURM_STEPID")
    if step is not None:
        return step not in NOT_A_TASK
    return "SLURM_STEP_NODELIST" in given or "SLURM_LAUNCH_NODE_IPADDR" in given


def _keeps(name: str, source: _Source | None) -> bool:
    """Whether a variable of the given ones stands: a lone RANK or WORLD_SIZE left over in a
    shell does not.
    """
    return name.startswith("MASTER_") or (source is not None and source.rank == "RANK")


def _alone() -> dict[str, str]:
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}


def _ranks(source: _Source, given: Mapping[str, str]) -> dict[str, str]:
    size = _first(given, source.size)
    if size is None and source.rank == "PMIX_RANK":
        size = _first(given, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if size is None:
        raise ValueError(
            f"{source.rank} is set, but none of {', '.join(source.size)}: set WORLD_SIZE and RANK"
            " yourself"
        )
    local_size = _first(given, source.local_size) or _slurm_local_size(given)
    found = {
        "RANK": _number(source.rank, given[source.rank]),
        "WORLD_SIZE": _number(source.size[0], size),
        "LOCAL_RANK": _first(given, source.local_rank),
        "LOCAL_WORLD_SIZE": local_size,
    }
    if found["WORLD_SIZE"] == "1":
        return _alone()
    return {name: _number(name, value) for name, value in found.items() if value is not None}


def _rendezvous(
    source: _Source | None, found: Mapping[str, str], given: Mapping[str, str]
) -> dict[str, str]:
    """Return the address of rank 0's host and a port: the same on every rank, without asking
    anybody.
    """
    job = _first(given, source.job) if source else None
    if job is None and "SLURM_JOB_ID" in given and source is not None:
        step = "" if _is_mpirun(given) else given.get("SLURM_STEP_ID", "")
        job = f"{given['SLURM_JOB_ID']}.{step}"
    port = DEFAULT_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    address = _first_host(found, given)
    return {"MASTER_PORT": str(port)} | ({"MASTER_ADDR": address} if address else {})


def _first_host(found: Mapping[str, str], given: Mapping[str, str]) -> str | None:
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        return "127.0.0.1"
    of_step = () if _is_mpirun(given) else ("SLURM_STEP_NODELIST",)
    nodes = _first(given, (*of_step, "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    return first_node(nodes) if nodes else given.get("SLURM_LAUNCH_NODE_IPADDR")


def _is_mpirun(given: Mapping[str, str]) -> bool:
    """Whether an mpirun started this process: its Slurm step is then its host's daemon's and
    differs between hosts.
    """
    return "OMPI_COMM_WORLD_RANK" in given or "MPI_LOCALRANKID" in given


def first_node(nodelist: str) -> str:
    """Return the first name of a Slurm node list: ``n[03-05,9]-ib,m1`` begins with ``n03-ib``."""
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _slurm_local_size(given: Mapping[str, str]) -> str | None:
    """Return how many tasks of the step are on this node: ``2(x3),1`` is 2 on nodes 0 to 2 and 1
    on node 3.
    """
    counts = _first(given, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    if counts is None:
        return None
    tasks = list(_expand(counts))
    node = int(_number("SLURM_NODEID", given.get("SLURM_NODEID", "0")))
    return tasks[node] if node < len(tasks) else None


def _expand(counts: str) -> Iterator[str]:
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        yield from [count] * int(times or 1)


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((given[name] for name in names if given.get(name)), None)


def _number(name: str, text: str) -> str:
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r} is not a whole number")
    return str(int(text))
