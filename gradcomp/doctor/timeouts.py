"""Who gives a peer up first: gradcomp, torch, the launcher or the job, and which of them must be
shorter than which.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gradcomp.comm.meeting import SETUP_VARIABLE, setup_timeout_s
from gradcomp.comm.torch_private import default_timeout_s

OVER_MPI_S = 300.0  # timeout_s unless it is given, where it does not come from a process group
# as `TorchCommunicator` has it: torch may wait so many times longer before it is worth a word
ALIKE = 2.0
LONG_S = 600.0
JOB_ENDS = "SLURM_JOB_END_TIME"


@dataclass(frozen=True)
class Timeouts:
    """Seconds.

    Attributes:
        setup_s: longest wait for the other ranks to call `register` or to make their communicators.
        gradcomp_s: until a silent peer is given up by gradcomp.
        torch_s: by torch's own collectives; None over MPI, where none are needed.
        job_s: until the job ends; None where nothing says so.
        apart_s: how far apart the ranks came to the doctor.
        setup_problem: GRADCOMP_SETUP_TIMEOUT_S is no number; "" if it is fine.
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
        return Timeouts(setup_s, ours_s, torch_s, _job_s(), apart_s, problem)

    def order(self) -> str:
        """Return who gives up after whom, shortest first."""
        known = [
            ("setup", self.setup_s),
            ("gradcomp", self.gradcomp_s),
            ("torch", self.torch_s),
            ("end of the job", self.job_s),
        ]
        return ", ".join(f"{name} {seconds:g} s" for name, seconds in known if seconds is not None)

    def findings(self, compute_s: float) -> Iterator[tuple[str, str, str]]:
        """Yield (level, text, what to do) of what stands in the wrong order.

        Args:
            compute_s: what a step computes.
        """
        ours = self.gradcomp_s
        if self.setup_problem:
            yield "wrong", self.setup_problem, f"unset {SETUP_VARIABLE}"
        if self.apart_s > self.setup_s / 2:
            text = (
                f"the ranks came {self.apart_s:.0f} s apart, and wait {self.setup_s:g} s for each"
                " other to register"
            )
            yield "wrong", text, f"{SETUP_VARIABLE}={4 * self.apart_s:.0f}, on every rank"
        if compute_s >= ours / 2:
            text = (
                f"a step computes for {compute_s:g} s, and a peer is given up after {ours:g} s: a"
                " slow step would end training"
            )
            yield (
                "wrong",
                text,
                f"timeout_s={10 * compute_s:.0f} in register, and the same in init_process_group",
            )
        if self.torch_s is not None and self.torch_s < ours:
            text = (
                f"torch gives up after {self.torch_s:g} s, before gradcomp after {ours:g} s: the"
                " error then names no rank"
            )
            yield (
                "wrong",
                text,
                (
                    f"init_process_group(timeout=timedelta(seconds={ours:g})), or a shorter"
                    " timeout_s in register"
                ),
            )
        elif self.torch_s is not None and self.torch_s > ALIKE * ours:
            text = (
                f"gradcomp gives a peer up after {ours:g} s, torch's own collectives (broadcast of"
                f" buffers) after {self.torch_s:g} s"
            )
            yield (
                "note",
                text,
                f"init_process_group(timeout=timedelta(seconds={ours:g})) makes them alike",
            )
        if ours >= LONG_S:
            text = (
                "a peer that falls silent without ending (a frozen host, a pulled cable) is given"
                f" up after {ours:g} s"
            )
            yield (
                "note",
                text,
                (
                    "a shorter timeout_s in register and in init_process_group, several times the"
                    " longest step and checkpoint"
                ),
            )
        if self.job_s is not None and self.job_s < ours:
            yield (
                "note",
                (
                    f"the job ends in {self.job_s:.0f} s, before a silent peer is given up after"
                    f" {ours:g} s"
                ),
                "a shorter timeout_s",
            )


def _job_s() -> float | None:
    text = os.environ.get(JOB_ENDS, "")
    return max(0.0, int(text) - time.time()) if text.isdecimal() else None
