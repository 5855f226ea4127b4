"""Run ``python -m gradcomp.doctor``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradcomp.comm.mpi_channels import end_job
from gradcomp.doctor.attach import attach
from gradcomp.doctor.options import parse
from gradcomp.doctor.report import show
from gradcomp.doctor.session import Me, examine, say

WRONG, BAD_USE = 1, 2  # exit statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print on rank 0, and return the exit status."""
    options = parse(argv)
    if options.attach:
        return attach(options.attach)
    logging.getLogger("gradcomp").setLevel(logging.ERROR)  # the report has its warnings
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
            Path(options.json).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            say(f"--json: {error}")
            return BAD_USE
    status: int = found["status"]
    if found["silent"]:  # do not wait for that rank in what ends the process
        sys.stdout.flush()
        if me.over == "mpi":
            end_job()
        os._exit(status)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
