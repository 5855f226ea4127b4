"""Fixtures of kernel tests: `row` runs a test on every kernel set, `number` on every tier of C."""

import pytest
from _codes import SETS, running
from _tables import TIERS, tier


@pytest.fixture(params=SETS, ids=str)
def row(request):
    """Return the row of the kernel set that the test runs on."""
    with running(request.param):
        yield request.param


@pytest.fixture(params=TIERS)
def number(request):
    """Return the number of the tier that the test runs on."""
    with tier(request.param):
        yield request.param
