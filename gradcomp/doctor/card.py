"""Report of one rank on itself: versions, kernels, accelerator, cores, interfaces, options and
timeouts. Only copies to and from the accelerator and the time of a name look-up are measured.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradcomp.comm.addresses import host_identity
from gradcomp.comm.store import setup_timeout_s
from gradcomp.comm.torch_private import default_timeout_s
from gradcomp.doctor.accelerator import accelerator
from gradcomp.doctor.interfaces import gloo_takes, interfaces
from gradcomp.kernels import native
from gradcomp.payload.wire import VERSION as WIRE
from gradcomp.version import __version__

PROTOCOL = 2  # version of the messages between ranks; ranks with another version do not measure
CGROUP = Path("/sys/fs/cgroup")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
OVER_MPI_S = 300.0  # default of timeout_s without a process group
STARTERS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "OMPI_COMM_WORLD_RANK": "mpirun of Open MPI",
    "PMI_RANK": "mpirun of MPICH or Intel MPI",
    "SLURM_PROCID": "srun",
    "PMIX_RANK": "something that speaks PMIx",
    "RANK": "variables RANK and WORLD_SIZE",
}


def card(rank: int, options: Mapping[str, Any], mpi: str | None) -> dict[str, Any]:
    """Return the report of this rank on itself, as JSON values; ranks must agree on `options`."""
    found = interfaces()
    versions = {"gradcomp": __version__, "wire format": str(WIRE), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "python": platform.python_version()}
    if importlib.util.find_spec("mpi4py") is not None:
        versions["mpi4py"] = importlib.metadata.version("mpi4py")
    if mpi is not None:
        versions["MPI"] = mpi
    has_cores = hasattr(os, "sched_getaffinity")
    return {
        "protocol": PROTOCOL,
        "rank": rank,
        "host": socket.gethostname(),
        "identity": host_identity(),
        "starter": starter(),
        "versions": versions,
        "tier": native.tier(),
        "tiers": native.tiers(),
        "accelerator": accelerator(rank),
        "cores": sorted(os.sched_getaffinity(0) if has_cores else range(os.cpu_count() or 1)),
        "quota": cpu_quota(),
        "threads": torch.get_num_threads(),
        "interfaces": [one._asdict() for one in found],
        "gloo": gloo_takes(found)._asdict(),
        "congestion": congestion_control(),
        "options": dict(options),
    }


def starter() -> str:
    """Return the launcher that started this process as one of several ranks, "" for none."""
    return next((name for variable, name in STARTERS.items() if variable in os.environ), "")


def cpu_quota() -> float | None:
    """Return how many cores' worth of time the container grants, None where it sets no limit."""
    for name, period in (("cpu.max", ""), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = (CGROUP / name).read_text(encoding="ascii").split()
            words += (CGROUP / period).read_text(encoding="ascii").split() if period else []
            if float(words[0]) > 0:
                return float(words[0]) / float(words[1])
        except (OSError, ValueError, IndexError, ZeroDivisionError):  # none, "max", or -1: no limit
            continue
    return None


def congestion_control() -> str:
    """Return TCP's congestion control for new connections, "" if it is unknown."""
    with contextlib.suppress(OSError):
        return CONGESTION.read_text(encoding="ascii").strip()
    return ""


def start_lookup(host: str) -> Callable[[], float]:
    """Look up the name of a host's address in a thread, because the look-up has no timeout. Return
    a function that returns the seconds it took, or has taken so far.

    torch does this look-up whenever a process first connects to another (pytorch#159007). A name
    server that does not answer delays each start of each rank by 10 s.
    """
    begun, ended = time.monotonic(), list[float]()

    def ask() -> None:
        # UnicodeError: the text cannot be a host name
        with contextlib.suppress(OSError, UnicodeError):
            address = socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0]
            # torch's form of the address: an entry of /etc/hosts must have the same form
            socket.getnameinfo((f"::ffff:{address}", 0), 0)
        ended.append(time.monotonic())

    threading.Thread(target=ask, name="gradcomp-lookup", daemon=True).start()
    return lambda: (ended[0] if ended else time.monotonic()) - begun


def timeouts(
    over: str, timeout_s: float | None, torch_timeout_s: float | None, apart_s: float
) -> dict[str, Any]:
    """Return the timeouts of a training on these ranks, in seconds. Those that the script sets may
    be None; `apart_s` is the time between the first and the last rank's start of the doctor.
    """
    torch_s = torch_timeout_s or (default_timeout_s() if over == "gloo" else None)
    ours_s = timeout_s or (OVER_MPI_S if torch_s is None or over == "mpi" else torch_s)
    try:
        setup_s, problem = setup_timeout_s(ours_s), ""
    except ValueError as error:
        setup_s, problem = ours_s, str(error)
    ends = os.environ.get("SLURM_JOB_END_TIME", "")
    job_s = max(0.0, int(ends) - time.time()) if ends.isdecimal() else None
    named = {"setup": setup_s, "gradcomp": ours_s, "torch": torch_s, "end of the job": job_s}
    return {
        "setup_s": setup_s,  # longest wait for the other ranks to call `register`
        "gradcomp_s": ours_s,  # timeout of gradcomp's wait for a silent peer
        "torch_s": torch_s,  # timeout of torch's collectives; None over MPI, which uses none
        "job_s": job_s,  # until the job ends; None if no variable says so
        "apart_s": apart_s,
        "setup_problem": problem,  # why GRADCOMP_SETUP_TIMEOUT_S is not valid
        "order": ", ".join(f"{name} {s:g} s" for name, s in named.items() if s is not None),
    }
