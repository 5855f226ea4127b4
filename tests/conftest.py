"""Fixtures for every test, and which rows of a table run where; under GRADCOMP_CI=1 a skipped test
is a failed one.

Two rules say which rows of a table run; ``--every-row`` runs all of them (make test-long), and so
does the mark ``every_row``:

- Arithmetic does not depend on transports: a test that runs over several of them has its table on
  the first, and one row, not always the same, on one of the others, which take turns.
- A table of three or more factors runs every pair of their values, not every combination (pairwise
  testing, as Cohen, Dalal, Fredman, Patton, "The AETG System", IEEE TSE 23(7), 1997).
"""

import functools
import gc
import importlib
import importlib.util
import itertools
import os
import pickle
import shutil
import signal
import time

import _forks
import hypothesis
import pytest
import torch
from _lazy_build import build
from _ranks import MpiPool, Pool, RankPool, run_local, unpacked, with_communicator, with_mpi_beneath

from gradcomp.kernels import native

# before anything imports Triton
if os.environ.get("GRADCOMP_TRITON") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"
# make test-triton has it
collect_ignore = [] if importlib.util.find_spec("triton") else ["kernels/test_cuda.py"]

# make test-long takes --hypothesis-profile long, and few under Triton's interpreter
for name, examples in (("few", 20), ("short", 50), ("long", 400)):
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None)
hypothesis.settings.load_profile("short")

# a shell's "&" makes it so, and every program that a test interrupts would inherit it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=native.tiers())
def tier(request):
    """Run the test once on every kernel tier of this machine."""
    before = native.tier()
    native.select_tier(request.param)
    yield request.param
    native.select_tier(before)


@pytest.fixture
def one_thread():
    """Matrix products of torch depend on its number of threads; ranks in processes have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


FRAMEWORKS = ("lightning", "transformers.trainer", "accelerate", "ray.train.torch")


@pytest.fixture(scope="session")
def pools(pytestconfig):
    """Return run(kind, world_size, function, *args) in warm processes: a pool for gloo, one for
    gloo where frameworks are imported, one with the device of tests, and one for each MPI, where 2
    to 4 ranks are some of one job's.
    """
    kept = {}

    def run(kind, world_size, function, *args, timeout_s=120):
        size = 4 if 1 < world_size < 4 else world_size
        imports = FRAMEWORKS if pytestconfig.running.get_closest_marker("extras") else ()
        which = (kind, imports) if kind in ("gloo", "accelerator") else (kind, size)
        pool = kept.get(which)
        if pool is None or not pool.alive():
            if pool is not None:
                pool.close()
            if kind == "accelerator":
                pool = RankPool(imports, "_" + pytestconfig.getoption("--accelerator"))
            elif kind == "gloo":
                pool = RankPool(imports)
            else:
                pool = MpiPool(kind, size)
            kept[which] = pool
        return pool.run(world_size, function, *args, timeout_s=timeout_s)

    yield run
    for pool in kept.values():
        pool.release()
    for pool in kept.values():
        pool.close()


@pytest.fixture(scope="session")
def gloo(pools):
    """Return run(world_size, function, *args): results of `function` in that many gloo
    processes.
    """
    return functools.partial(pools, "gloo")


@pytest.fixture(scope="session")
def accelerator(pools, pytestconfig):
    """Return run(world_size, function, *args) in processes with an accelerator, `_lazy`'s or that
    of ``--accelerator``, and a default process group for its tensors.
    """
    if pytestconfig.getoption("--accelerator") == "lazy":
        if shutil.which("g++") is None:
            pytest.skip("the device for tests is compiled with g++")
        build()
    return functools.partial(pools, "accelerator")


@pytest.fixture
def lazy(accelerator, pytestconfig):
    """Return the same for what `_lazy`'s device alone can show."""
    if pytestconfig.getoption("--accelerator") != "lazy":
        pytest.skip("of the device that waits until somebody waits for it")
    return accelerator


@pytest.fixture(params=["gloo", "mpich", "openmpi"])
def ranks(request, pools):
    """Return run(world_size, function, *args) in processes of a gloo group; gradcomp's own bytes
    go by each in turn.
    """
    if request.param == "gloo":
        return functools.partial(pools, "gloo")
    return lambda world_size, function, *args, **options: pools(
        request.param, world_size, with_mpi_beneath, function, *args, **options
    )


@pytest.fixture(params=["local", "gloo", "mpich", "openmpi"])
def over(request):
    """Return run(world_size, function, *args) with function(comm, *args), over each communicator
    in turn.
    """
    if request.param == "local":
        return run_local
    pools, kind = request.getfixturevalue("pools"), request.param

    def run(world_size, function, *args):
        # here and not in the pipe, where torch would share memory instead
        given = pickle.dumps(args)
        return [
            pickle.loads(r)
            for r in pools(kind, world_size, with_communicator, kind, unpacked, function, given)
        ]

    return run


# and the transport that has the whole table; the last two are of programs that are started under
# both MPIs
TRANSPORT_FIXTURES = {"over": "local", "ranks": "gloo", "flavour": "mpich", "python": "mpich"}
FEW_ROWS = 8  # a table of so many runs whole


@pytest.hookimpl(hookwrapper=True)
def pytest_cmdline_main():
    with _forks.available():
        yield


def pytest_addoption(parser):
    parser.addoption(
        "--accelerator",
        choices=["lazy", "cuda"],
        default="lazy",
        help="what tests of accelerators run on",
    )
    parser.addoption(
        "--every-row",
        action="store_true",
        help="whole tables on every transport, not on the first alone",
    )
    parser.addoption(
        "--write-golden",
        action="store_true",
        help="write tests/vectors/golden.json as the code is now, instead of comparing with it",
    )


def params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def transport(item):
    """Return (fixture, transport) of a test that runs over several transports, else None."""
    return next(((f, params(item)[f]) for f in TRANSPORT_FIXTURES if f in params(item)), None)


def kind_of_ranks(item):
    """Return "gloo", "mpich" or "openmpi" of a test that needs warm processes, else None."""
    given = params(item)
    pooled = given.get("flavour", "gloo") if "pools" in item.fixturenames else "local"
    kind = given.get("over") or given.get("ranks") or pooled
    if "accelerator" in item.fixturenames:
        return "accelerator"
    return None if kind == "local" else kind


def order(item):
    """Return when a test runs: long chains first, and of both what needs packages that CI installs
    meanwhile last.
    """
    return not item.get_closest_marker("xdist_group"), bool(item.get_closest_marker("extras"))


def factors(item):
    """Return {factor: value} of a row: a factor is what one `parametrize` or fixture gives, and its
    values are told apart by identity.
    """
    given = {name: id(value) for name, value in params(item).items()}
    found = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        names = tuple(name.strip() for name in names)
        found[names] = tuple(given.pop(name, None) for name in names)
    return found | given


def every_pair(rows):
    """Return rows of a table in which each pair of values of two factors occurs that occurs in the
    table: each time the row that adds most of them.
    """
    if len(rows) <= FEW_ROWS or len(factors(rows[0])) < 3:
        return rows
    pairs = [set(itertools.combinations(factors(row).items(), 2)) for row in rows]
    kept, left = [], set().union(*pairs)
    while left:
        best = max(range(len(rows)), key=lambda k: len(pairs[k] & left))
        kept.append(rows[best])
        left -= pairs[best]
    return kept


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(config, items):
    """Mark what starts processes, and leave out rows of tables on transports that do not have
    the whole one.
    """
    for item in items:
        kind = kind_of_ranks(item)
        if kind is not None:
            item.add_marker(pytest.mark.slow)
            if kind != "gloo" and not item.get_closest_marker("xdist_group"):
                # its jobs for one worker; each has its own gloo ranks
                item.add_marker(pytest.mark.xdist_group(kind))
            elif kind == "gloo" and item.get_closest_marker("extras"):
                # one worker's ranks import all frameworks: 15 s of CPU
                item.add_marker(pytest.mark.xdist_group("frameworks"))
    items.sort(key=order)
    if config.getoption("--every-row"):
        return
    tables = {}
    for item in items:
        if not item.get_closest_marker("every_row"):
            tables.setdefault((item.function, item.module, transport(item)), []).append(item)
    others = {}  # of a test's tables those that are not on the first transport
    for key in tables:
        if key[2] is not None and TRANSPORT_FIXTURES[key[2][0]] != key[2][1]:
            others.setdefault(key[:2], []).append(key)
    left_out = {id(row) for rows in tables.values() for row in rows}
    for key, rows in tables.items():
        if key not in others.get(key[:2], ()):
            left_out -= {id(row) for row in every_pair(rows)}
    for number, keys in enumerate(others.values()):
        rows = tables[keys[number % len(keys)]]
        left_out.discard(id(rows[number % len(rows)]))
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left_out])
    items[:] = [item for item in items if id(item) not in left_out]


def pytest_collection_finish(session):
    if getattr(session.config.option, "loadgroup", False):
        apart = [
            i.nodeid
            for i in session.items
            if i.get_closest_marker("xdist_group") and "@" not in i.nodeid
        ]
        assert not apart, "pytest-xdist does not see groups: install what constraints.txt says"
    gc.freeze()  # what is imported and collected need not be looked through by every gc.collect()


def pytest_runtest_setup(item):
    """Wait for packages that `.ci/run` installs beside the first tests: a file says they are
    there.
    """
    there = os.environ.get("GRADCOMP_CI_EXTRAS")
    if there and item.get_closest_marker("extras"):
        while not os.path.exists(there):
            assert not os.path.exists(there + ".failed"), "what this test needs was not installed"
            time.sleep(0.1)
        importlib.invalidate_caches()


def cpu_seconds():
    """Return CPU seconds of this process, and those of children that have ended and of the
    pools' ranks.
    """
    user, system, *children = os.times()[:4]
    return user + system, sum(children) + Pool.cpu_s


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    item.config.running, item.config.cpu_seconds = item, cpu_seconds()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    before, item.config.cpu_seconds = item.config.cpu_seconds, cpu_seconds()
    report.user_properties.append(
        ("cpu", [now - then for now, then in zip(item.config.cpu_seconds, before, strict=True)])
    )
    if report.skipped and os.environ.get("GRADCOMP_CI") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in CI: {report.longrepr}"


def pytest_terminal_summary(terminalreporter):
    """Print in CI where the time went: what a file's tests took, and what CPU they and their
    processes used.
    """
    if os.environ.get("GRADCOMP_CI") != "1":
        return
    files = {}
    for report in itertools.chain(*terminalreporter.stats.values()):
        cpu = [value for name, value in getattr(report, "user_properties", []) if name == "cpu"]
        if cpu:
            took = files.setdefault(report.nodeid.partition("::")[0], [0.0, 0.0, 0.0])
            took[:] = [a + b for a, b in zip(took, (report.duration, *cpu[-1]), strict=True)]
    if not files:
        return
    terminalreporter.section("seconds: wall, CPU of the tests, CPU of processes they started")
    files["all"] = [sum(column) for column in zip(*files.values(), strict=True)]
    for file, took in sorted(files.items(), key=lambda row: -row[1][0]):
        terminalreporter.line("".join(f"{seconds:9.1f}" for seconds in took) + f"  {file}")
