"""Measuring ranks at hand: the fits, and a whole measurement over gloo."""

import json

import pytest

from gradcomp.bench import measure
from gradcomp.bench.predict import planned
from gradcomp.bench.ranks import Place, run
from gradcomp.plan import Rates, Transport, find_model
from gradcomp.plan.cli import build_parser, main, understand
from gradcomp.plan.rates import OUTER, PRECONDITION, STAGES, StageRate, fit, per_value

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


@pytest.mark.parametrize("own_rates", [False, True])
def test_what_was_measured_several_times_is_shown_with_its_range(
    monkeypatch, tmp_path, capsys, own_rates
):
    """With --measure every figure was one median, and the rate at which compression stops paying
    was one number.
    """

    def take(seconds):
        stages = {stage: StageRate(per_value_s=seconds) for stage in STAGES}
        methods = ("onebit all_gather", "onebit reduce_scatter")
        return Rates(dict.fromkeys(methods, stages) | {OUTER: {}, PRECONDITION: {}})

    def transport(alpha, beta):
        return Transport(dict.fromkeys(measure.KINDS, alpha), dict.fromkeys(measure.KINDS, beta))

    repeated = tuple(map(take, (1e-9, 2e-9, 4e-9)))
    transports = transport(1e-3, 1e-9), transport(2e-3, 2e-9), transport(5e-3, 0.0)
    found = measure.Measurement(
        *(2, 64, 1e-3, 0.4, 2e-3, 4e-3, repeated[1], Transport.median(transports), 1.5),
        *((9e-4, 1.2e-3, 1e-3), repeated, transports),
    )
    monkeypatch.setattr(measure, "measure_here", lambda ranks: found)
    words = ["--measure", "--ranks", "2", "--codec", "fp32,onebit"]
    if own_rates:
        rates = tmp_path / "rates.json"
        rates.write_text(json.dumps(repeated[0].to_dict()))
        words += ["--rates", str(rates)]
    file = tmp_path / "found.json"
    assert main([*words, "--json", str(file)]) == 0
    text, answer = capsys.readouterr().out, json.loads(file.read_text())
    assert "LeNet: 1.00 ms (900 us to 1.20 ms) a sample" in text
    assert "all_gather: 2.00 ms (1.00 to 5.00 ms) and 1 GB/s (0.5 to inf)" in text
    # one bit of a million values: statistics, encode, owner, decode over 2 ranks
    times = "Codecs were timed 3 times here: onebit all_gather takes 5.00 to 20.0 ms"
    assert (times in text) == (not own_rates) == bool(answer["rates_repeated"])
    least, most = answer["break_even_range"]
    assert least < 0.9 * most


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
    assert len(first.frames) == len(first.repeated) == len(first.transports) == measure.TIMES
    assert first.rates == Rates.median(first.repeated)
    assert first.transport == Transport.median(first.transports)
    assert set(first.transport.alpha_s) == set(measure.KINDS)
    assert first.t_frame > 0 and 0 < first.forward_share < 1
    assert first.rates.stages["terngrad all_gather"]["encode"].per_value_s > 0
