"""Local steps in the planner: cases computed by hand, what calibration finds, what is
recommended.
"""

import json
import math
from dataclasses import replace

import pytest

from gradcomp.plan import (
    METHODS,
    Link,
    Node,
    Rates,
    StageRate,
    Stragglers,
    Transport,
    Workload,
    predict,
    simulate,
)
from gradcomp.plan.accuracy import expected, within
from gradcomp.plan.costs import HIERARCHICAL, IDENTITY, LocalSteps, find_method
from gradcomp.plan.links import format_seconds
from gradcomp.plan.rates import OUTER, STAGES, calibrate
from gradcomp.plan.tolerance import Tolerance
from gradcomp.plan.words import rare

WORK = Workload((("w", (1024, 1024)),), minibatch=1.0, t_frame=0.1, t_update=0.01, weak=True)
TERNARY, ONEBIT = find_method("terngrad all_gather"), find_method("onebit reduce_scatter")
SLOW = Link(1e6)
NBYTES = 1024 * 1024 / 4 + 32 + 4  # a payload of one rank
RATES = Rates(
    {
        OUTER: {"apply": StageRate(0.5)},
        **{m.name: {"encode": StageRate(0.25)} for m in METHODS if m.codec},
    }
)


def test_a_round_is_its_steps_and_one_exchange():
    """10 steps of 0.11 s, 0.5 s of the outer step, 0.25 s of encoding for one slice of four, the
    payload over 1 Mbit/s.
    """
    found = simulate(
        WORK, TERNARY.after(LocalSteps(10)), 2, SLOW, rates=Rates({OUTER: RATES.stages[OUTER]})
    )
    wire = NBYTES * 8 / 1e6
    assert found.seconds == pytest.approx((10 * 0.11 + 0.5 + wire) / 10, rel=0.01)
    assert found.compute_seconds == pytest.approx(0.11 + 0.05)
    assert found.exposed_seconds == pytest.approx(
        wire / 10, rel=0.01
    ) and found.hidden_share == pytest.approx(0.0, abs=1e-9)
    assert found.sent_nbytes == pytest.approx(NBYTES / 10, rel=0.01)


@pytest.mark.parametrize(("cores", "busy"), [(2, 0.0), (1, 1.0)])
def test_steps_hide_what_is_late_but_not_its_work_on_the_only_core(cores, busy):
    """An exchange of one second on a core (four slices of 0.25) beside the wire's 2.1, which 5
    of 10 steps hide 0.55 of.
    """
    rates = Rates({TERNARY.name: {"encode": StageRate(0.0, 0.0, 1.0 / 2**20)}})
    plain, late = (
        simulate(WORK, TERNARY.after(LocalSteps(10, 1, d)), 2, SLOW, rates=rates, cores=cores)
        for d in (0, 5)
    )
    assert late.exposed_seconds == pytest.approx(plain.exposed_seconds - 5 * 0.11 / 10)
    quick = simulate(
        WORK, TERNARY.after(LocalSteps(10, 1, 9)), 2, Link(1e8), rates=rates, cores=cores
    )
    assert 10 * quick.exposed_seconds == pytest.approx(busy, abs=0.05)
    halves = replace(WORK, parameters=(("a", (512, 1024)), ("b", (512, 1024))))
    at_once, later = (
        simulate(
            halves, TERNARY.after(LocalSteps(10, 2, d)), 2, SLOW, rates=rates, cores=cores
        ).exposed_seconds
        for d in (0, 4)
    )
    # each part is hidden by four of its own
    assert later == pytest.approx(at_once - 2 * 4 * 0.11 / 10)


def test_more_steps_cost_less_and_one_node_nothing():
    seconds = [
        simulate(WORK, ONEBIT.after(LocalSteps(h)), 4, SLOW, rates=RATES).seconds
        for h in (1, 3, 10, 100)
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0.11
    assert simulate(
        WORK, ONEBIT.after(LocalSteps(10)), 1, SLOW, rates=RATES
    ).seconds == pytest.approx(0.11)


def test_stragglers_are_waited_for_once_a_round():
    jitter = Stragglers(jitter=0.3)
    each = simulate(WORK, TERNARY, 8, Link(math.inf), stragglers=jitter)
    rare_one = simulate(WORK, TERNARY.after(LocalSteps(25)), 8, Link(math.inf), stragglers=jitter)
    assert rare_one.straggler_seconds == pytest.approx(each.straggler_seconds / 5, rel=0.25)


def test_the_exchange_is_that_of_every_step():
    for method in (*METHODS, *HIERARCHICAL):
        late = method.after(LocalSteps(30, 2, 5))
        assert late.each_step == (method if method.codec is not None else IDENTITY)
        assert (
            late.name == f"{late.each_step.name} every 30 in 2 parts, 5 late"
            and not late.keeps_loss
        )
        assert late.after(LocalSteps(3)).name == f"{late.each_step.name} every 3"


def test_calibration_measures_the_outer_step(tmp_path):
    rates = calibrate(
        [TERNARY.after(LocalSteps(30)), ONEBIT],
        sizes=(1 << 10, 1 << 20),
        world_sizes=(2,),
        repeats=5,
    )
    assert set(rates.stages) == {OUTER, TERNARY.name, ONEBIT.name}
    assert 0 < rates.outer_seconds(1 << 20) < rates.outer_seconds(1 << 24) < 60
    (tmp_path / "rates.json").write_text(json.dumps(rates.to_dict()))
    assert Rates.load(tmp_path / "rates.json") == rates
    assert calibrate([ONEBIT], sizes=(512,), world_sizes=(2,), repeats=1).outer_seconds(100) == 0.0


def test_halves_do_not_go_with_local_steps():
    with pytest.raises(ValueError, match="with local steps none is exchanged"):
        simulate(WORK, TERNARY.after(LocalSteps(2)), 2, SLOW, double_buffering=True)


@pytest.mark.parametrize("numbers", [(0,), (True,), (3, 4), (3, 1, 3), (3, 1, -1), (2.5,)])
def test_bad_numbers_are_refused(numbers):
    with pytest.raises(ValueError, match="must be an integer of at least|do not go into"):
        LocalSteps(*numbers)


# ---- what is recommended -------------------------------------------------------------------------

FREE = Rates({m.name: dict.fromkeys(STAGES, StageRate(1e-5)) for m in METHODS if m.codec})


def test_a_step_that_waits_for_the_network_mentions_them_with_their_price():
    slow = predict(WORK, Link(1e6), [4], rates=FREE, optimizer="adamw")
    row = expected("adam", rare(4, Node()).codec, every=30)
    assert (
        "local steps (--every 30, gradcomp.DiLoCo) with terngrad" in slow.sentence
        and f"{row.cost} with {row.given()}" in slow.sentence
    )
    # and a tenth of the run in fp32
    late = simulate(WORK, rare(4, Node()), 4, Link(1e6), rates=FREE).seconds
    whole = 0.9 * late + 0.1 * slow.result("fp32", 4).seconds
    assert (
        f"{slow.result(slow.method.name, 4).seconds / whole:.2g} times as fast, and cost"
        in slow.sentence
    )
    assert slow.method.local is None  # more is lost than is tolerated
    assert "--every" not in predict(WORK, Link(1e9), [4], rates=FREE, optimizer="adamw").sentence
    unknown = predict(WORK, Link(1e6), [4], rates=FREE, optimizer="sgd").sentence
    assert "and cost an accuracy that was not measured" in unknown


def test_asked_for_they_are_recommended_by_seconds_or_by_what_they_cost():
    chosen = [TERNARY, TERNARY.after(LocalSteps(30)), METHODS[0], METHODS[0].after(LocalSteps(30))]
    found = predict(WORK, Link(1e6), [2], rates=FREE, methods=chosen)
    assert found.method == chosen[1] and found.sentence.startswith("Exchange rarely: over 1 Mbit/s")
    assert "terngrad every 30 costs" in found.sentence
    careful = predict(WORK, Link(1e6), [2], rates=FREE, methods=chosen, optimizer="adamw")
    assert careful.method == METHODS[0] and careful.permitted == ("fp32",)
    assert predict(
        WORK, Link(1e6), [2], rates=FREE, methods=chosen, optimizer="lion"
    ).permitted == ("fp32",)


def test_figures_of_local_steps_decide_nothing_about_every_step():
    tolerance = Tolerance("adamw")
    assert (
        not tolerance.cost(TERNARY).counts
        and tolerance.cost(TERNARY.after(LocalSteps(30))) is not None
    )
    others = (LocalSteps(31), LocalSteps(30, 2), LocalSteps(30, 1, 5), LocalSteps(1))
    assert [
        Tolerance("sgd").cost(TERNARY.after(LocalSteps(1))),
        *(tolerance.cost(TERNARY.after(one)) for one in others),
    ] == [None] * 5
    assert all(row.every == 1 for row in within("adam"))


def test_every_fragment_is_an_exchange():
    """An exchange takes its latencies whatever it carries."""
    work, link = (
        Workload((("a", (512, 512)), ("b", (512, 512))), 1.0, 0.1, weak=True),
        Link(1e9, 0.1),
    )
    one, two = (simulate(work, TERNARY.after(LocalSteps(10, k)), 2, link) for k in (1, 2))
    assert 10 * one.exposed_seconds > 0.2 and two.exposed_seconds == pytest.approx(
        2 * one.exposed_seconds, rel=0.02
    )
    with pytest.raises(ValueError, match="3 fragments of 2 tensors"):
        simulate(work, TERNARY.after(LocalSteps(10, 3)), 2, link)


def test_post_processing_is_shared_out_with_what_is_exchanged():
    each, late = (
        simulate(replace(WORK, t_post=1.0), m, 4, Link(math.inf)).compute_seconds
        for m in (TERNARY, TERNARY.after(LocalSteps(30)))
    )
    assert (each, late) == pytest.approx((0.11 + 0.25, 0.11 + 1.0))


def test_nodes_of_several_ranks_are_offered_one_exchange_a_node():
    node = Node(2, Link(1e10))
    assert (
        rare(2, node).name == "terngrad hierarchical every 30"
        and rare(2, Node()).name == "terngrad all_gather every 30"
    )
    # calibrates what it mentions
    found = predict(WORK, Link(1e6), [2], node=node, methods=METHODS[:1])
    assert "local steps" in found.sentence and {OUTER, "identity", "terngrad all_gather"} <= set(
        found.rates.stages
    )
    late = simulate(WORK, rare(2, node), 2, Link(1e6), node=node, rates=found.rates)
    assert f"would take {format_seconds(late.seconds)} a step" in found.sentence


def test_rare_exchanges_of_fp32_are_no_compression():
    found = predict(
        WORK, Link(1e6), [2], rates=FREE, methods=[METHODS[0], METHODS[0].after(LocalSteps(30))]
    )
    assert found.sentence.startswith("Exchange rarely") and "compression" not in found.sentence


def test_bytes_move_once_a_round():
    transport = Transport({"all_gather": 0.0}, {"all_gather": 1e-6})
    every, late = (
        simulate(WORK, m, 2, Link(math.inf), transport=transport)
        for m in (TERNARY, TERNARY.after(LocalSteps(20)))
    )
    assert (
        20 * late.exposed_seconds == pytest.approx(NBYTES * 1e-6, rel=0.02)
        and every.exposed_seconds > 10 * late.exposed_seconds
    )
