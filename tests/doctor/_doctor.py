"""Forks ranks that run the doctor, from a process that has imported it already; started by
test_doctor.py.

Reads a line of JSON for each: [arguments, variables, a program that comes first, file for the
output, file for the errors] and answers with a process id; or a process id alone, and answers with
how that process has ended.
"""

import gc
import json
import os
import sys
import time

from gradcomp.doctor.__main__ import main

DEADLINE_S = 90


def be_rank(argv, variables, first, out, err):
    status = 99
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.setpgid(0, 0)
        os.environ.update(variables)
        exec(first, {})  # noqa: S102
        try:
            status = main(argv)
        except SystemExit as end:
            status = end.code or 0
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def wait(pid):
    for _ in range(DEADLINE_S * 50):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


gc.freeze()
for line in sys.stdin:
    told = json.loads(line)
    if isinstance(told, int):
        print(json.dumps(wait(told)), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        be_rank(*told)
    print(pid, flush=True)
