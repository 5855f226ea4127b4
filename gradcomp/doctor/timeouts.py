"""Which of gradcomp, torch and the job gives a peer up first, and in which order they should."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from gradcomp.comm.store import SETUP_VARIABLE, setup_timeout_s
from gradcomp.comm.torch_private import default_timeout_s
from gradcomp.doctor.judge import Finding, note, wrong

OVER_MPI_S = 300.0  # timeout_s unless it is given, where it does not come from a process group
ALIKE = 2.0  # as `TorchCommunicator` has it: torch may wait so many times longer without a note
LONG_S = 600.0


class Timeouts(NamedTuple):
    """Seconds.

    Attributes:
        setup_s: longest wait for the other ranks to call `register` or to make their communicators.
        gradcomp_s: until gradcomp gives a silent peer up.
        torch_s: until torch's own collectives do; None over MPI, where none are needed.
        job_s: until the job ends; None where nothing says so.
        apart_s: how far apart the ranks came to the doctor.
        setup_problem: why GRADCOMP_SETUP_TIMEOUT_S is not valid; "" if it is.
    """

    setup_s: float
    gradcomp_s: float
    torch_s: float | None
    job_s: float | None
    apart_s: float
    setup_problem: str = ""

    @staticmethod
    def here(
        over: str, timeout_s: float | None, torch_timeout_s: float | None, apart_s: float
    ) -> Timeouts:
        """Return those of a training on these ranks.

        Args:
            over: "gloo" or "mpi".
            timeout_s, torch_timeout_s: that its script gives; None: the defaults.
            apart_s: as of the attribute.
        """
        torch_s = torch_timeout_s or (default_timeout_s() if over == "gloo" else None)
        ours_s = timeout_s or (OVER_MPI_S if torch_s is None or over == "mpi" else torch_s)
        try:
            setup_s, problem = setup_timeout_s(ours_s), ""
        except ValueError as error:
            setup_s, problem = ours_s, str(error)
        ends = os.environ.get("SLURM_JOB_END_TIME", "")
        job_s = max(0.0, int(ends) - time.time()) if ends.isdecimal() else None
        return Timeouts(setup_s, ours_s, torch_s, job_s, apart_s, problem)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and, as "order", which are known, in words."""
        names = ("setup", "gradcomp", "torch", "end of the job")
        known = [f"{name} {s:g} s" for name, s in zip(names, self, strict=False) if s is not None]
        return self._asdict() | {"order": ", ".join(known)}

    def findings(self, compute_s: float) -> Iterator[Finding]:
        """Yield what is in the wrong order for a step that computes for `compute_s`."""
        ours, torch_s = self.gradcomp_s, self.torch_s
        group = f"init_process_group(timeout=timedelta(seconds={ours:g}))"
        if self.setup_problem:
            yield wrong("timeouts", self.setup_problem, f"unset {SETUP_VARIABLE}")
        if self.apart_s > self.setup_s / 2:
            text = (
                f"the ranks came {self.apart_s:.0f} s apart, and wait {self.setup_s:g} s for each"
                " other to register"
            )
            do = f"{SETUP_VARIABLE}={4 * self.apart_s:.0f}, on every rank"
            yield wrong("timeouts", text, do)
        if compute_s >= ours / 2:
            text = (
                f"a step computes for {compute_s:g} s, and a peer is given up after {ours:g} s: a"
                " slow step would end training"
            )
            do = f"timeout_s={10 * compute_s:.0f} in register, and the same in init_process_group"
            yield wrong("timeouts", text, do)
        if torch_s is not None and torch_s < ours:
            text = (
                f"torch gives up after {torch_s:g} s, before gradcomp after {ours:g} s: the error"
                " then names no rank"
            )
            yield wrong("timeouts", text, f"{group}, or a shorter timeout_s in register")
        elif torch_s is not None and torch_s > ALIKE * ours:
            text = (
                f"gradcomp gives a peer up after {ours:g} s, torch's own collectives (broadcast of"
                f" buffers) after {torch_s:g} s"
            )
            yield note("timeouts", text, f"{group} makes them alike")
        if ours >= LONG_S:
            text = (
                "a peer that falls silent without ending (a frozen host, a pulled cable) is given"
                f" up after {ours:g} s"
            )
            do = (
                "a shorter timeout_s in register and in init_process_group, several times the"
                " longest step and checkpoint"
            )
            yield note("timeouts", text, do)
        if self.job_s is not None and self.job_s < ours:
            text = (
                f"the job ends in {self.job_s:.0f} s, before a silent peer is given up after"
                f" {ours:g} s"
            )
            yield note("timeouts", text, "a shorter timeout_s")
