"""`bench codec --check`: verdicts, and the roof that memory sets to the gain of a second thread."""

import pytest
import torch

from gradcomp.bench import codec
from gradcomp.bench.kernels import cases
from gradcomp.kernels import native


def rows(gains):
    """Return rows in which one thread passes 32 GB/s of fp32 and two threads `gains` times that."""
    tier = native.tiers()[-1]
    return [
        codec.Row(
            kernel,
            tier,
            "float32",
            1 << 26,
            count,
            0.5,
            32.0 * (gains.get(kernel, 2.0) if count == 2 else 1.0),
        )
        for kernel in (*codec.LIMITS, *(f"{name}, decay" for name in codec.DECAYED))
        for count in (1, 2)
    ]


@pytest.mark.parametrize(
    ("kernel", "gain", "memcpy", "memset", "outcome"),
    [
        ("onebit decode 1", 1.30, 40.0, 36.0, "pass"),
        ("onebit decode 1", 1.10, 40.0, 36.0, "roof"),  # needs 40 GB/s of stores, memory takes 36
        ("onebit decode 1", 1.10, 40.0, 48.0, "FAIL"),
        ("onebit encode", 1.75, 40.0, 36.0, "pass"),
        (
            "onebit encode",
            1.30,
            120.0,
            36.0,
            "roof",
        ),  # moves 32 * 1.3 * 12.125 / 4 = 126 GB/s, memcpy 120
        ("onebit encode", 1.30, 130.0, 36.0, "FAIL"),
        ("absmax + moments", 1.10, 40.0, 36.0, "FAIL"),  # moves 35 GB/s where memcpy moves 40
    ],
)
def test_the_gain_of_a_second_thread(kernel, gain, memcpy, memset, outcome):
    memory = codec.Memory((38.0, memcpy), (33.0, memset))
    found = codec.verdicts(rows({kernel: gain}), {"torch": 41.0}, memory)
    by_name = {v.what: v for v in found}
    assert by_name[f"{kernel}, two threads over one, at least"].outcome == outcome
    assert all(v.outcome == "pass" for v in found if v.what.endswith("at most"))
    assert by_name["terngrad encode over torch, at least"].outcome == "pass"
    assert sum(v.outcome != "pass" for v in found) == (outcome != "pass")


def test_memory_rates_are_measured():
    memory = codec.memory_rates(1 << 20, 2)
    assert all(rate > 0 for rate in (*memory.memcpy, *memory.memset))


def test_every_kernel_is_right_when_those_before_it_have_run_several_times():
    """One case wrote into the payload that the next one decodes: the benchmark stopped at a
    difference that was its own.
    """
    for case in cases(4096, torch.float32):
        case.run(), case.run()
        assert case.check(), case.name
