"""What the planner recommends, and what it says of accuracy and of local steps."""

import math
import re
from dataclasses import asdict, replace

import pytest

from gradcomp import EntropyCoded, OneBit
from gradcomp.plan import (
    METHODS,
    Link,
    LocalSteps,
    Method,
    Node,
    Rates,
    StageRate,
    Transport,
    Workload,
    find_method,
    predict,
    simulate,
)
from gradcomp.plan.accuracy import expected, within
from gradcomp.plan.links import format_rates, format_seconds
from gradcomp.plan.predict import Tolerance, rare
from gradcomp.plan.rates import OUTER, PRECONDITION, STAGES

EACH = dict.fromkeys((*STAGES, "cast", "uncast"), StageRate(1e-5, 1e-6, 1e-10, 1e-10))
RATES = Rates({m.name: EACH for m in METHODS})
SLOWER = StageRate(*(16 * value for value in asdict(EACH["encode"]).values()))
BIG = tuple((f"w{i}", (1000, 4000)) for i in range(10))  # 160 MB
WORK = Workload(BIG, 1024, 1e-3, 2e-3)
ONEBIT, CODED = expected("adam", OneBit()), expected("adam", EntropyCoded(1.25))
ENTROPY = "entropy:bits=1.25"


def ask(optimizer=None, link=1e9, nodes=(4,), work=WORK, **options):
    """Return the prediction for a link of so many bits per second."""
    options = {"rates": RATES, "optimizer": optimizer} | options
    return predict(work, Link(link, 1e-4), nodes, **options)


def named(*starts):
    return [m for m in METHODS if m.name.startswith(starts)]


# ---- by seconds ----------------------------------------------------------------------------------


def test_a_slow_link_asks_for_compression():
    found = ask(nodes=[1, 2, 4, 8, 16], by_seconds=True)
    assert found.method.compresses and found.nodes == 16 and found.speedup > 5
    start = "Compress: over 1 Gbit/s, 100 us, train on 16 nodes ("
    assert found.sentence.startswith(start) and found.method.name in found.sentence
    assert 1e9 < found.break_even_bits_per_s < 1e12
    above = ask(link=found.break_even_bits_per_s * 1.2, nodes=[16])
    assert not above.method.compresses
    best = found.result(found.method.name, 16)
    assert found.result("fp32", 16).seconds == pytest.approx(found.speedup * best.seconds)
    ratio = 2 * 15 / 16 * 160e6 / best.sent_nbytes
    assert found.optimal_nodes == math.ceil(512e-3 / (1.28 / ratio - 2e-3))
    with pytest.raises(KeyError):
        found.result("fp32", 3)


FEW, WEAK = replace(WORK, minibatch=4), replace(WORK, minibatch=64, weak=True)
ANY = {"nodes": [1, 2, 4]}
EVERY_30 = METHODS[0].after(LocalSteps(30))


@pytest.mark.parametrize(
    ("options", "method", "nodes", "says"),
    [
        ({"link": 1e12, "work": replace(WORK, t_frame=1e-2)}, "fp32", 4, "Do not .* would pay"),
        ({"link": 1e6, "work": FEW, **ANY}, "fp32", 1, "do not distribute: .*faster than one"),
        ({"work": WEAK, "by_seconds": True, **ANY}, "onebit reduce_scatter", 4, "Compress.*Above"),
        ({"link": 1e6, "methods": [METHODS[0], EVERY_30]}, EVERY_30.name, 4, "rarely stops paying"),
        # nothing is said of codecs where none pays
        ({"optimizer": "adamw", "link": 1e13}, "fp32", 4, "Do not compress"),
    ],
)
def test_recommendations(options, method, nodes, says):
    found = ask(**options)
    assert (found.method.name, found.nodes) == (method, nodes)
    assert re.search(says, found.sentence), found.sentence
    if found.setting.workload.weak:  # weak scaling has no formula
        assert found.optimal_nodes == math.inf and "formula" not in found.sentence
        assert "distribute" not in found.sentence
    if method == "fp32":
        assert "not recommended" not in found.sentence and " costs " not in found.sentence
    if method == EVERY_30.name:
        assert "Exchange rarely" in found.sentence and "compression" not in found.sentence


def test_measured_collectives_take_the_place_of_a_link():
    """An all_reduce of 2 * 3/4 * 160 MB at 1 ns a byte: 0.24 s / ratio against 2 ms of update."""
    slow = Transport({}, dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), 1e-9))
    found = ask(link=math.inf, transport=slow)
    assert "over these ranks" in found.sentence
    ratio = 240e6 / found.result(found.method.name, 4).sent_nbytes
    assert found.optimal_nodes == math.ceil(0.512 / (0.24 / ratio - 0.002))


def test_fewer_nodes_than_asked_for_may_be_best():
    found = ask(link=1e6, nodes=[2, 4], work=FEW)
    alone = simulate(FEW, found.method, 1, Link(1e6, 1e-4), rates=RATES).seconds
    start = f"Do not distribute: one node alone takes {format_seconds(alone)} a step. Else: "
    assert found.sentence.startswith(start)


def test_crossings_are_where_the_fastest_method_changes():
    coarse, fine = (ask(link=1e10, nodes=n, by_seconds=True) for n in ([2, 64], range(2, 65)))
    assert coarse.crossings
    for crossing in coarse.crossings:
        assert crossing in fine.crossings
        now, before = (
            {m.name: fine.result(m.name, n).seconds for m in METHODS}
            for n in (crossing.nodes, crossing.nodes - 1)
        )
        assert now[crossing.after] <= 1.01 * min(now.values()) < now[crossing.before]
        assert before[crossing.before] <= 1.01 * min(before.values())


def test_the_rate_at_which_compression_stops_paying_is_a_range():
    """Measured a minute apart it was 50 and 98 Gbit/s, each given as if it were exact."""
    slower = Rates({name: dict.fromkeys(EACH, SLOWER) for name in RATES.stages})
    once, again = (ask(methods=METHODS, repeated=rates) for rates in ([], [RATES, slower]))
    assert once.break_even_range == (once.break_even_bits_per_s,) * 2
    least, most = again.break_even_range
    assert least < 0.7 * most and most == again.break_even_bits_per_s == once.break_even_bits_per_s
    alone = ask(methods=METHODS, rates=slower)
    assert least == pytest.approx(alone.break_even_bits_per_s, rel=0.05)
    assert f"Above {format_rates(least, most)} compression stops paying there." in again.sentence


def test_averaging_inside_nodes_first_pays_where_links_are_slow_and_ranks_many():
    work = Workload((("w", (4096, 4096)),), 64, 1e-4)
    found = ask(link=1e8, work=work, node=Node(8, Link(1e11)), by_seconds=True)
    seconds = {row.method.name: row.result.seconds for row in found.rows}
    assert seconds["terngrad hierarchical"] < 0.5 * seconds["terngrad exact"]
    assert found.method.exchange == "hierarchical" and found.method.name in found.permitted
    flat = ask(link=1e8, work=work)
    assert "hierarchical" not in {row.method.exchange for row in flat.rows}
    # what it was measured with is not possible with it
    adamw = ask("adamw", link=1e8, work=work, node=Node(8))
    assert "onebit hierarchical" not in adamw.permitted


# ---- accuracy ------------------------------------------------------------------------------------


def test_every_block_is_a_candidate():
    ways = {f"block{bits} {how}" for bits in (2, 4, 8) for how in ("all_gather", "reduce_scatter")}
    assert ways <= {m.name for m in METHODS}


@pytest.mark.parametrize(
    ("optimizer", "kind", "says"),
    [
        ("adamw", ENTROPY, [f" It costs {CODED.price} (a byte GPT"]),
        ("NAdam", ENTROPY, [" It costs -0.026 nats with precondition=True (a byte GPT"]),
        ("lamb", "block8", [" It costs -0.000 nats (a byte GPT", f"costs {ONEBIT.price}; not"]),
        ("splitadamw", "block8", [" It costs -0.000 nats (a byte GPT"]),
        ("SGD", ENTROPY, [" It costs +0.06 points of test error (LeNet"]),
        (
            "muon",
            "entropy:bits=3.2",
            [" nats (a byte GPT of 0.87 M parameters on prose under Muon and"],
        ),
        ("lion", "block8", [" What it costs in accuracy under lion was not measured."]),
    ],
)
def test_what_loses_too_much_is_not_recommended(optimizer, kind, says):
    fast, kept = ask(methods=METHODS), ask(optimizer, methods=METHODS)
    assert fast.method.kind == "onebit" and kept.method.kind == kind
    assert all(one in kept.sentence for one in says), kept.sentence
    assert 1 < kept.speedup < fast.speedup
    assert set(kept.permitted) < set(fast.permitted) == {m.name for m in METHODS}
    assert {"fp32", "bf16"} < set(kept.permitted)
    assert not any(name.startswith("onebit") for name in kept.permitted)
    # over a whole run, warm-up included
    times = kept.seconds(kept.method, 4) / kept.seconds(fast.method, 4)
    faster = f" {fast.method.name} would be {times:.2g} times as fast a step and "
    assert (faster in kept.sentence) is (times > 1.05)  # what gains less is not mentioned
    assert kept.sentence.count(" onebit ") == (times > 1.05)
    assert ("not recommended." in kept.sentence) is (kind in ("block8", "entropy:bits=3.2"))


@pytest.mark.parametrize(("optimizer", "takes"), [("adamw", True), ("sgd", False), (None, False)])
def test_the_time_of_preconditioning_counts_where_the_loss_was_measured_with_it(optimizer, takes):
    slow = Rates({**RATES.stages, PRECONDITION: {"apply": StageRate(per_value_s=1e-8)}})
    methods = [*named("fp32"), find_method(f"{ENTROPY} reduce_scatter")]
    plain, found = (ask(optimizer, methods=methods, rates=rates) for rates in (RATES, slow))
    more = [found.result(m.name, 4).seconds - plain.result(m.name, 4).seconds for m in methods]
    assert more[0] == 0 and (more[1] > 0.1) is takes


class Unmeasured(OneBit):
    name = "unmeasured"


@pytest.mark.parametrize(("optimizer", "under"), [(None, ""), ("adamw", " under adamw")])
def test_a_codec_that_was_measured_nowhere_is_not_recommended(optimizer, under):
    """Not for seconds alone either, though it sends least and would be the answer to every slow
    link.
    """
    known = named("fp32", "block8 reduce_scatter")
    methods = [*known, Method("unmeasured all_gather", Unmeasured(), "all_gather")]
    found = ask(optimizer, link=1e8, methods=methods)
    assert min(found.rows, key=lambda row: row.seconds).method == methods[-1]
    assert found.permitted == ("fp32", "block8 reduce_scatter")
    assert "unmeasured all_gather would be" in found.sentence
    says = f"times as fast a step and was not measured{under}; not recommended."
    assert says in found.sentence
    alone = ask(optimizer, methods=methods[-1:])
    start = f"Nothing here is known to keep the accuracy{under}; by seconds alone: "
    assert alone.sentence.startswith(start)


def test_without_an_optimizer_the_losses_are_named():
    found = ask(methods=METHODS)
    assert f"by seconds a step alone: onebit costs {ONEBIT.cost}" in found.sentence
    assert "+1.95 points" in found.sentence
    costs = found.tolerance.costs(found.method)
    assert {cost.training.optimizer for cost in costs.values()} == {"AdamW", "SGD"}


def test_without_an_optimizer_only_what_is_safe_for_all_is_recommended():
    """It recommended 1 bit by seconds alone; later what loses nothing under Adam and SGD, and has
    not been measured under any other.
    """
    for options in ({}, {"tolerances": {"nats": 1, "points": 2}}):
        found = ask(**options)
        assert {name.split()[0] for name in found.permitted} == {"fp32", "bf16", "block8"}
        assert found.method.kind == "block8" and "not recommended" not in found.sentence
        assert "safe for every optimizer is recommended: name yours" in found.sentence
    codec = ask(link=1e8).sentence  # what a name would gain, and at which price under which one
    assert (
        f"{ENTROPY} reduce_scatter would be" in codec
        and "nats with precondition=True under AdamW" in codec
    )


@pytest.mark.parametrize(("methods", "first"), [(METHODS, "block4"), (named("fp32"), "fp32")])
def test_a_tolerance_lets_more_in(methods, first):
    """1 bit is measured with a warm start of 4: over a run it takes longer than by its own
    steps, without them yet longer.
    """
    methods = list(dict.fromkeys([*methods, *named("onebit reduce_scatter")]))
    found = ask("adamw", tolerances={"nats": 0.07}, methods=methods)
    rows = {row.method.name: row for row in found.rows}
    onebit = rows["onebit reduce_scatter"]
    start = rows.get(f"{first} reduce_scatter") or rows[first]
    assert onebit.result.seconds < onebit.seconds < start.seconds == start.result.seconds
    mean = 5 / 6 * onebit.result.seconds + start.result.seconds / 6
    assert onebit.seconds == pytest.approx(mean) and "with precondition=True" in found.sentence


@pytest.mark.parametrize(("points", "nats", "onebit"), [(2, 0.1, True), (0, 0.0, False)])
def test_tolerances_of_points(points, nats, onebit):
    found = ask("sgd", tolerances={"points": points, "nats": nats})
    assert (found.method.kind == "onebit") is onebit
    assert onebit or found.method.kind not in ("ternary", "terngrad")


# ---- local steps ---------------------------------------------------------------------------------

SMALL = Workload((("w", (1024, 1024)),), minibatch=1.0, t_frame=0.1, t_update=0.01, weak=True)
TERNARY, RARELY = find_method("terngrad all_gather"), LocalSteps(30)
QUICK = Rates({m.name: dict.fromkeys(STAGES, StageRate(1e-5)) for m in METHODS if m.codec})


def test_a_step_that_waits_for_the_network_mentions_them_with_their_price():
    options = {"work": SMALL, "rates": QUICK}
    slow = ask("lamb", 1e6, **options)
    row = expected("adam", rare(4, Node()).codec, every=30)
    assert "local steps (--every 30, gradcomp.DiLoCo) with terngrad" in slow.sentence
    assert row.price in slow.sentence and "with" in row.price
    # and a tenth of the run in fp32
    late = simulate(SMALL, rare(4, Node()), 4, Link(1e6, 1e-4), rates=QUICK).seconds
    whole = 0.9 * late + 0.1 * slow.result("fp32", 4).seconds
    times = slow.result(slow.method.name, 4).seconds / whole
    assert f"{times:.2g} times as fast, and cost" in slow.sentence
    assert slow.method.local is None  # more is lost than is tolerated
    assert "--every" not in ask("lamb", **options).sentence
    assert "--every" not in ask("sgd", 1e6, **options).sentence  # not measured


def test_asked_for_they_are_recommended_by_seconds_or_by_what_they_cost():
    chosen = [TERNARY, TERNARY.after(RARELY), METHODS[0], METHODS[0].after(RARELY)]
    options = {"link": 1e6, "nodes": [2], "work": SMALL, "rates": QUICK, "methods": chosen}
    found = ask(**options)
    assert found.method == chosen[1] and found.sentence.startswith("Exchange rarely: over 1 Mbit/s")
    assert "terngrad every 30 costs" in found.sentence
    for optimizer in ("adamw", "lion"):
        careful = ask(optimizer, **options)
        assert careful.method == METHODS[0] and careful.permitted == ("fp32",)


def test_figures_of_local_steps_decide_nothing_about_every_step():
    tolerance = Tolerance("adamw")
    assert not tolerance.cost(TERNARY).counts
    assert tolerance.cost(TERNARY.after(RARELY)) is not None
    others = (LocalSteps(31), LocalSteps(30, 2), LocalSteps(30, 1, 5), LocalSteps(1))
    assert not any(tolerance.cost(TERNARY.after(one)) for one in others)
    assert Tolerance("sgd").cost(TERNARY.after(LocalSteps(1))) is None
    assert all(row.every == 1 for row in within("adam"))


def test_nodes_of_several_ranks_are_offered_one_exchange_a_node():
    node, link = Node(2, Link(1e10)), Link(1e6, 1e-4)
    names = [rare(2, one).name for one in (node, Node())]
    assert names == ["terngrad hierarchical every 30", "terngrad all_gather every 30"]
    # calibrates what it mentions
    found = ask(link=1e6, nodes=[2], work=SMALL, rates=None, node=node, methods=METHODS[:1])
    assert {OUTER, "identity", "terngrad all_gather"} <= set(found.rates.stages)
    late = simulate(SMALL, rare(2, node), 2, link, node=node, rates=found.rates)
    assert "local steps" in found.sentence
    assert f"would take {format_seconds(late.seconds)} a step" in found.sentence
