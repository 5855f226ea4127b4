"""The coordinator of tests of sites."""

import pytest
from _elastic import Run


@pytest.fixture
def run():
    """Return a function that starts a coordinator."""
    runs = []

    def start(sites=1, **options):
        runs.append(Run(sites=sites, **options))
        return runs[-1]

    yield start
    for one in runs:
        one.coordinator.close()
