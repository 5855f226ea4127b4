"""What one rank tells of itself: versions, kernels, cores, interfaces, options. Nothing is
measured and nobody is asked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradcomp.comm.addresses import host_identity
from gradcomp.doctor.interfaces import gloo_takes, interfaces
from gradcomp.kernels import native
from gradcomp.payload.wire import VERSION as WIRE
from gradcomp.version import __version__

PROTOCOL = (
    1  # of the words between ranks: a rank with another one is named, and not spoken to any further
)
CGROUP = Path("/sys/fs/cgroup")
STARTERS = (
    ("TORCHELASTIC_RUN_ID", "torchrun"),
    ("OMPI_COMM_WORLD_RANK", "mpirun of Open MPI"),
    ("PMI_RANK", "mpirun of MPICH or its kin"),
    ("SLURM_PROCID", "srun"),
    ("PMIX_RANK", "something that speaks PMIx"),
    ("RANK", "variables RANK and WORLD_SIZE"),
)


def card(rank: int, options: Mapping[str, Any], mpi: str | None) -> dict[str, Any]:
    """Return what this rank is, made of what JSON knows.

    Args:
        rank: of this process.
        options: of the command line, as far as ranks must agree on them.
        mpi: library and thread level where bytes go over MPI, else None.
    """
    found = interfaces()
    versions = {"gradcomp": __version__, "wire format": str(WIRE), "torch": torch.__version__}
    versions |= {"numpy": np.__version__, "python": platform.python_version()}
    if importlib.util.find_spec("mpi4py") is not None:
        versions["mpi4py"] = importlib.metadata.version("mpi4py")
    if mpi is not None:
        versions["MPI"] = mpi
    return {
        "protocol": PROTOCOL,
        "rank": rank,
        "host": socket.gethostname(),
        "identity": host_identity(),
        "starter": starter(),
        "versions": versions,
        "tier": native.tier(),
        "tiers": native.tiers(),
        "cores": cores(),
        "quota": cpu_quota(),
        "threads": torch.get_num_threads(),
        "interfaces": [asdict(one) for one in found],
        "gloo": asdict(gloo_takes(found)),
        "options": dict(options),
        "told_at": time.time(),
    }


def starter() -> str:
    """Return what has started this process as one of several ranks, "" for nothing."""
    return next((name for variable, name in STARTERS if variable in os.environ), "")


def cores() -> list[int]:
    """Return the cores that this process may run on."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else list(range(os.cpu_count() or 1))
    )


def cpu_quota(root: Path = CGROUP) -> float | None:
    """Return how many cores' worth of time the container grants, None where it sets no limit."""
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            words = (root / name).read_text(encoding="ascii").split()
            period = (
                words[1]
                if name == "cpu.max"
                else (root / "cpu/cpu.cfs_period_us").read_text(encoding="ascii")
            )
            if float(words[0]) > 0:
                return float(words[0]) / float(period)
        except (OSError, ValueError, IndexError, ZeroDivisionError):  # none, "max", or -1: no limit
            continue
    return None
