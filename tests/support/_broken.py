"""Run tests in a fork in which something of gradcomp was broken on purpose: promises
(`tests/project/test_promises.py`) and mutants (`_mutants.py`).
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import _forks
import pytest
from _ranks import Pool, cpu_s

ROOT = Path(__file__).parents[2]


class Outcomes:
    """A pytest plugin that counts tests that ran, and keeps the names of those that failed.

    Only the first `rows` rows of a table run.
    """

    def __init__(self, rows=None):
        self.count, self.failed, self.rows = 0, [], rows

    def pytest_collection_modifyitems(self, items):
        tables = {}
        for item in items:
            tables.setdefault(item.function, []).append(item)
        items[:] = [item for rows in tables.values() for item in rows[: self.rows]]

    def pytest_runtest_logreport(self, report):
        self.count += report.when == "call"
        if report.failed or report.skipped:
            self.failed.append(f"failed {report.nodeid}")


def run_tests(apply, tests, folder, options, rows):
    """Be a fork: break something with apply(), run tests, write `folder`/failed."""
    os.setsid()
    with open(Path(folder, "output"), "w", buffering=1) as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        for name in [name for name in os.environ if name.startswith("PYTEST_")]:
            del os.environ[name]
        _forks.from_here = True
        apply()
        outcomes = Outcomes(rows)
        given = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
        given += ["-k", "not mpich and not openmpi", *options]
        status = pytest.main([*given, *tests], plugins=[outcomes])
        Path(folder, "cpu_s").write_text(str(cpu_s() + Pool.cpu_s))
        assert status in (0, 1) and outcomes.count, f"pytest ended with {status}"
        Path(folder, "failed").write_text("\n".join(outcomes.failed))


def failed_in_a_fork(apply, tests, folder, timeout_s, *options, rows=None):
    """Return what did not pass after apply(), "hangs" if there was no end to it.

    Args:
        apply: a function without arguments that can be pickled; gradcomp is imported already.
        tests: names of tests and files, relative to tests/.
        folder: an empty one, for the output.
        timeout_s: seconds after which they hang.
        options: of pytest.
        rows: how many rows of a table run; None: all.
    """
    there = [str(ROOT / "tests" / test) for test in tests]
    child = _forks.start(run_tests, apply, there, str(folder), options, rows)
    deadline = time.monotonic() + timeout_s
    while _forks.is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    hangs = _forks.is_alive(child)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its ranks, too
    if hangs:
        return ["hangs"]
    assert (folder / "failed").exists(), (folder / "output").read_text()[-4000:]
    Pool.cpu_s += float((folder / "cpu_s").read_text())
    return (folder / "failed").read_text().splitlines()
