"""Measuring ranks at hand: the fits, and a whole measurement over gloo."""

import pytest

from gradcomp.bench import measure
from gradcomp.bench.predict import planned
from gradcomp.bench.ranks import Place, run
from gradcomp.plan import Rates, Transport, find_model
from gradcomp.plan.cli import build_parser, understand
from gradcomp.plan.rates import OUTER, StageRate, fit, per_value

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("alpha", "beta", "seconds"),
    [
        (1e-4, 1e-9, None),
        (0.0, 1e-9, None),
        (1e-4, 0.0, None),
        (0.0, 2e-9, [1e-6, 1e-4, 1e-3, 1e-2]),  # faster than in proportion: alpha would be negative
    ],
)
def test_alpha_and_beta_are_found(alpha, beta, seconds):
    sizes = [1e3, 1e5, 1e6, 1e7]
    taken = seconds or [alpha + beta * size for size in sizes]
    found = fit([*zip(map(per_value, sizes), taken, strict=True)])
    tolerance = pytest.approx(beta, abs=1e-15, rel=0 if seconds is None else 1)
    assert (found.fixed_s, found.per_value_s) == (pytest.approx(alpha, abs=1e-12), tolerance)


def test_a_measurement_becomes_a_workload():
    transport = Transport({"all_gather": 1e-3}, {})
    found = measure.Measurement(2, 64, 1e-3, 0.4, 2e-3, 4e-3, Rates(), transport, 1.0)
    lenet, other = find_model("lenet"), find_model("resnet50")
    work = found.workload(lenet, None)
    assert (work.minibatch, work.overlaps) == (128, True)
    assert (work.t_frame, work.t_update) == (pytest.approx(1e-3), pytest.approx(2e-3))
    larger = found.workload(other, 8)
    assert larger.minibatch == 8 and larger.t_post == 0
    assert larger.t_frame == pytest.approx(1e-3 * other.forward_flops / lenet.forward_flops)
    assert larger.t_update == pytest.approx(2e-3 * other.numel / lenet.numel)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("", (128, False, 1e-3, 2e-3, 0.0, (1, 2), 1.5)),
        ("--weak", (64, True, 1e-3, 2e-3, 0.0, (1, 2), 1.5)),
        (
            "--minibatch 32 --nodes 2,4 --cores 3 --update-time 7ms --post-time 1ms",
            (32, False, 1e-3, 7e-3, 1e-3, (2, 4), 3.0),
        ),
    ],
)
def test_measured_figures_take_the_place_of_defaults(words, wanted):
    transport, rates = Transport({"all_gather": 1e-3}, {}), Rates({OUTER: {}})
    found = measure.Measurement(2, 64, 1e-3, 0.4, 2e-3, 4e-3, rates, transport, 1.5)
    _, asked = understand(build_parser().parse_args(["--measure", *words.split()]), found)
    setting, work = asked.setting, asked.setting.workload
    times = work.t_frame, work.t_update, work.t_post
    assert (work.minibatch, work.weak, *times, asked.counts, setting.cores) == wanted
    assert setting.transport is transport and setting.as_measured and setting.rates == rates


def rates_of_the_slowest():
    """Rank 0 is slow in one stage, rank 1 in the other."""
    one, two = (0.1, 0.2) if measure.dist.get_rank() else (0.05, 0.3)
    own = {"m": {"encode": StageRate(one, per_value_s=two), "decode": StageRate(two)}}
    return measure._slowest_rates(Rates(own)), measure.slowest([one, two, one])


def test_the_slowest_rank_counts_to_the_last_bit(gloo):
    slow = {"encode": StageRate(0.1, per_value_s=0.3), "decode": StageRate(0.3)}
    assert gloo(2, rates_of_the_slowest) == [(Rates({"m": slow}), 0.1)] * 2


def measure_quickly(emit):
    measure.REPEATS = 2
    # so many values that codecs take longer than calls do, a busy machine's too
    measure.measure(emit, [planned("terngrad", 2)], steps=6, largest=262_144)


@pytest.mark.timed  # of a fit to seconds that somebody else has taken part of, nothing may be left
def test_all_ranks_measure_the_same():
    results = []
    run(Place(2), measure_quickly, on_message=results.append)
    first, second = results
    assert first == second and first.ranks == 2
    assert set(first.transport.alpha_s) == set(measure.KINDS)
    assert first.t_frame > 0 and 0 < first.forward_share < 1
    assert first.rates.stages["terngrad all_gather"]["encode"].per_value_s > 0
