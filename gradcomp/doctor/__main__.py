"""Entry point of ``python -m gradcomp.doctor``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence

from gradcomp import waits
from gradcomp.comm.mpi_channels import end_job
from gradcomp.doctor.options import parse
from gradcomp.doctor.report import show
from gradcomp.doctor.session import Me, examine, say

WRONG, BAD_USE = 1, 2  # exit statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, print the report on rank 0, and return the exit status."""
    options = parse(argv)
    if options.attach:
        return attach(options.attach)
    logging.getLogger("gradcomp").setLevel(logging.ERROR)  # the report repeats its warnings
    try:
        me = Me.find(options.over)
    except (ValueError, ImportError, RuntimeError) as error:
        say(f"{error}{'' if options.over == 'gloo' else ' (--over gloo does without MPI)'}")
        return WRONG
    try:
        found = examine(me, options)
    except ConnectionError as error:
        say(str(error))
        return WRONG
    if found is None:
        return 0
    text = json.dumps(found, indent=2)
    if options.json == "-":
        print(text, flush=True)
    else:
        show(found, plain=options.plain)
    if options.json not in (None, "-"):
        try:
            options.json.write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            say(f"--json: {error}")
            return BAD_USE
    status: int = found["status"]
    if found["silent"]:  # exit without cleanup, which would wait for that rank
        sys.stdout.flush()
        if me.over == "mpi":
            end_job()
        os._exit(status)
    return status


def attach(pids: Sequence[int]) -> int:
    """Print what processes of this machine wait for; return 1 if one cannot be inspected."""
    failed = False
    for pid in pids:
        try:
            seen = waits.look(pid)
        except OSError as error:
            why = "no process with that number, or another user's, or this is not Linux"
            print(f"pid {pid}: {why} ({error.strerror})", file=sys.stderr)
            failed = True
            continue
        if seen is None:
            print(f"pid {pid}: has not waited for another rank yet, or does not run gradcomp")
            continue
        name = f"pid {pid}{'' if seen.rank is None else f', rank {seen.rank}'}"
        if not seen.waits:
            print(f"{name}: waits for no other rank; py-spy dump --pid {pid} shows what it does")
        for what, seconds in seen.waits:
            print(f"{name}: has waited {seconds:.1f} s in {what}")
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
