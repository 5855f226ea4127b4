"""Fixtures for every test; under GRADCOMP_CI=1 a skipped test is a failed one."""

import functools
import os

import pytest
from _ranks import MpiPool, RankPool, run_local, with_communicator, with_mpi_beneath

from gradcomp.kernels import native


@pytest.fixture(params=native.tiers())
def tier(request):
    """Run the test once on every kernel tier of this machine."""
    before = native.tier()
    native.select_tier(request.param)
    yield request.param
    native.select_tier(before)


@pytest.fixture(scope="session")
def pools():
    """Return run(kind, world_size, function, *args) in warm processes, one pool for each kind and size."""
    kept = {}

    def run(kind, world_size, function, *args, timeout_s=120):
        pool = kept.get((kind, world_size))
        if pool is None or not pool.alive():
            if pool is not None:
                pool.close()
            pool = RankPool(world_size) if kind == "gloo" else MpiPool(kind, world_size)
            kept[kind, world_size] = pool
        return pool.run(function, *args, timeout_s=timeout_s)

    yield run
    for pool in kept.values():
        pool.close()


@pytest.fixture(scope="session")
def gloo(pools):
    """Return run(world_size, function, *args): results of `function` in that many gloo processes."""
    return functools.partial(pools, "gloo")


@pytest.fixture(params=["gloo", "mpich", "openmpi"])
def ranks(request, pools):
    """Return run(world_size, function, *args) in processes of a gloo group; gradcomp's own bytes go by each in turn."""
    if request.param == "gloo":
        return functools.partial(pools, "gloo")
    return lambda world_size, function, *args, **options: pools(
        request.param, world_size, with_mpi_beneath, function, *args, **options
    )


@pytest.fixture(params=["local", "gloo", "mpich", "openmpi"])
def over(request):
    """Return run(world_size, function, *args) with function(comm, *args), over each communicator in turn."""
    if request.param == "local":
        return run_local
    pools, kind = request.getfixturevalue("pools"), request.param
    return lambda world_size, function, *args: pools(kind, world_size, with_communicator, kind, function, *args)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("GRADCOMP_CI") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in CI: {report.longrepr}"
