"""Fixtures for every test; under GRADCOMP_CI=1 a skipped test is a failed one."""

import os

import pytest
from _ranks import RankPool, run_local

from gradcomp import _native


@pytest.fixture(params=_native.tiers())
def tier(request):
    """Run the test once on every kernel tier of this machine."""
    before = _native.tier()
    _native.select_tier(request.param)
    yield request.param
    _native.select_tier(before)


@pytest.fixture(scope="session")
def gloo():
    """Return run(world_size, function, *args): results of `function` in that many gloo processes, kept warm."""
    pools = {}

    def run(world_size, function, *args, timeout_s=120):
        pool = pools.get(world_size)
        if pool is None or not pool.alive():
            pool = pools[world_size] = RankPool(world_size)
        return pool.run(function, *args, timeout_s=timeout_s)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=["local", "gloo"])
def over(request):
    """Return run(world_size, function, *args) with function(comm, *args), over each communicator in turn."""
    if request.param == "local":
        return run_local
    gloo_run = request.getfixturevalue("gloo")
    return lambda world_size, function, *args: gloo_run(world_size, _with_torch_communicator, function, *args)


def _with_torch_communicator(function, *args):
    from gradcomp.comm import TorchCommunicator

    comm = TorchCommunicator(timeout_s=60)
    try:
        return function(comm, *args)
    finally:
        comm.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("GRADCOMP_CI") == "1" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped in CI: {report.longrepr}"
