"""How long gradcomp, torch and the job wait for a peer that does not answer."""

from __future__ import annotations

import os
import time
from typing import Any

from gradcomp.comm.store import setup_timeout_s
from gradcomp.comm.torch_private import default_timeout_s

OVER_MPI_S = 300.0  # default of timeout_s if it does not come from a process group


def timeouts(
    over: str, timeout_s: float | None, torch_timeout_s: float | None, apart_s: float
) -> dict[str, Any]:
    """Return the timeouts, in seconds, of a training on these ranks.

    Args:
        over: "gloo" or "mpi".
        timeout_s, torch_timeout_s: that its script gives; None: the defaults.
        apart_s: how far apart the ranks came to the doctor.

    Returns:
        `setup_s`: longest wait for the other ranks to call `register` or make communicators.
        `gradcomp_s`: until gradcomp gives a silent peer up. `torch_s`: until torch's own
        collectives do, None over MPI, which needs none. `job_s`: until the job ends, None if no
        variable says so. `apart_s`. `setup_problem`: why GRADCOMP_SETUP_TIMEOUT_S is not valid, or
        "". `order`: all that are known, in words.
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
        "setup_s": setup_s,
        "gradcomp_s": ours_s,
        "torch_s": torch_s,
        "job_s": job_s,
        "apart_s": apart_s,
        "setup_problem": problem,
        "order": ", ".join(f"{name} {s:g} s" for name, s in named.items() if s is not None),
    }
