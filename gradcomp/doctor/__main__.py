"""Run ``python -m gradcomp.doctor``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gradcomp.doctor.options import parse
from gradcomp.doctor.report import show
from gradcomp.doctor.start import Me, say
from gradcomp.doctor.visit import visit

WRONG, BAD_USE = 1, 2  # exit statuses


def main(argv: Sequence[str] | None = None) -> int:
    """Examine, print on rank 0, and return the exit status."""
    options = parse(argv)
    logging.getLogger("gradcomp").setLevel(logging.ERROR)  # what it would warn of is in the report
    try:
        me = Me.find(options.over)
    except (ValueError, ImportError, RuntimeError) as error:
        say(f"{error}{'' if options.over == 'gloo' else ' (--over gloo does without MPI)'}")
        return WRONG
    try:
        found = visit(me, options)
    except ConnectionError as error:
        say(str(error))
        return WRONG
    finally:
        if me.helper is not None:
            me.helper.end()
    if found is None:
        return 0
    text = json.dumps(found, indent=2)
    if options.json == "-":
        print(text, flush=True)
    else:
        show(found, plain=options.plain or None)
        if options.json is not None:
            try:
                Path(options.json).write_text(f"{text}\n", encoding="utf-8")
            except OSError as error:
                say(f"--json: {error}")
                return BAD_USE
    status: int = found["status"]
    if found["silent"]:  # do not wait for that rank in what ends the process
        sys.stdout.flush()
        if me.notices is not None:
            me.notices.end(at_once=True)
        os._exit(status)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
