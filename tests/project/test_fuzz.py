"""The committed cases of `make fuzz`: each is read by hypothesis as a case, and passes."""

import _fuzz
import pytest

CASES = _fuzz.committed()


@pytest.mark.parametrize("name", CASES)
def test_committed_cases_pass(name):
    one_input = _fuzz.of_bytes(name)
    assert all(one_input(case) is not None for case in CASES[name])
