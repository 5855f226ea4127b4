"""The simulated step: cases computed by hand, orders that must hold, and what `predict` makes of
it.
"""

import itertools
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from gradcomp import Block, OneBit, TernGrad
from gradcomp.exchange.routes import NodeRoute
from gradcomp.exchange.slices import Slicing
from gradcomp.payload.pieces import Slot
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
from gradcomp.plan.accuracy import expected
from gradcomp.plan.costs import (
    HIERARCHICAL,
    IDENTITY,
    Collective,
    Method,
    between,
    find_method,
    plan_buckets,
)
from gradcomp.plan.links import format_rates, format_seconds
from gradcomp.plan.rates import STAGES, calibrate
from gradcomp.plan.step import Stage, Step, _slice_work

FAST = Link(math.inf)
ONE = (("w", (1000, 1000)),)  # one bucket: 4 MB in fp32
MANY = tuple((f"w{i}", (500, 1000)) for i in range(12))
RATES = Rates(
    {
        m.name: {s: StageRate(1e-5, 1e-6, 1e-10, 1e-10) for s in (*STAGES, "cast", "uncast")}
        for m in METHODS
    }
)


# ---- by hand

GATHER = Collective("all_gather", 1000, 3, 1000)  # 8 s over 1 kbit/s, and three latencies
ALONE = Collective("all_gather", 1000, 0, 1000)
SLOW = Link(1000.0, 0.5)
WORKS, WAITS = Transport({}, {"all_gather": 0.01}), Transport({"all_gather": 1.0}, {})
BOTH = Transport({"all_gather": 1.0}, {"all_gather": 0.01})
HALF = Transport({"all_gather": 0.5}, {"all_gather": 0.0005})
TOGETHER = {"pieces": ((1.0, (0, 1)),)}
EARLY = {"pieces": ((0.25, (0,)), (0.75, ())), "compute": 9.0, "forward_share": 1 / 9}
EIGHT = {"pieces": tuple((0.125, (i,)) for i in range(8)), "compute": 4.0}
PIPELINE, MOVED = ((1.0, None), (2.0, None)), ((0.0, GATHER), (0.0, None))
THREE, MIDWAY = {"pieces": ((1.0, (0, 1, 2)),)}, {"pieces": ((0.5, (0,)), (0.5, ()))}


def run_one(
    stages, *, compute=1.0, halves=1, pieces=((1.0, (0,)),), forward_share=0.5, update=0.0, **more
):
    """Return when the halves of one node begin that exchanges buckets of one kind."""
    count = sum(len(ready) for _, ready in pieces)
    slices = [tuple(Stage(*one) for one in stages)] * count
    step = Step(slices, pieces, forward_share, update, **{"link": FAST} | more)
    return step.run([[compute]] * halves)[0]


@pytest.mark.parametrize(
    ("stages", "options", "end"),
    [
        # computing, encoding, the link, under way, decoding, update: one after the other
        *(
            (
                ((0.25, GATHER), (0.5, None)),
                {"link": SLOW, "cores": cores, "update": 0.125},
                1 + 0.25 + 8 + 1.5 + 0.5 + 0.125,
            )
            for cores in (1, 2)
        ),
        # the second of two buckets leaves 8 s after the first and arrives as late after it
        (MOVED, {"link": SLOW, **TOGETHER}, 1 + 16 + 1.5),
        # stages of 1 s and 2 s: on a core each, or one after the other
        (PIPELINE, {"cores": 3, **THREE}, 1 + 7),
        (PIPELINE, {"cores": 2, **THREE}, 1 + 9),
        # 4 s of encoding hide behind the 6 s of backward that follow, where there is a core for it
        (((4.0, None),), EARLY, 9),
        (((4.0, None),), {"cores": 1, **EARLY}, 13),
        # a shared core never pauses
        (((0.5, None), (0.25, None)), {"cores": 1, **EIGHT}, 4 + 8 * 0.75),
        # what moves bytes comes after the link, one collective at a time
        (MOVED, {"transport": BOTH, **TOGETHER}, 1 + 2 * (1 + 10)),
        (MOVED, {"transport": BOTH, "link": SLOW, **TOGETHER}, 1 + 8 + 1.5 + 2 * 11),
        # an only core works beside the link, and waits for what it does not do itself
        (MOVED, {"transport": WORKS, "link": SLOW, "cores": 1}, 1 + max(9.5, 10)),
        (MOVED, {"transport": WAITS, "link": SLOW, "cores": 1}, 1 + 9.5 + 1),
        # half a second of waiting hides behind backward everywhere, half a second of work does not
        (MOVED, {"transport": HALF, "compute": 4.0, "cores": 1, **MIDWAY}, 4 + 0.5),
        (MOVED, {"transport": HALF, "compute": 4.0, "cores": 2, **MIDWAY}, 4),
    ],
)
def test_a_step_by_hand(stages, options, end):
    assert run_one(stages, **options) == [0, pytest.approx(end)]


@pytest.mark.parametrize(("link_s", "half"), [(0.5, 1.25), (1.25, 1.25), (3.0, 3.0)])
def test_double_buffering_takes_the_longer_of_both(link_s, half):
    """max(T_calc, T_comm) a half, as in the formula; with T_calc = 1 s + 0.25 s of update."""
    for buffered, seconds in ((True, half), (False, 1.25 + link_s)):
        options = {"link": Link(8000 / link_s), "update": 0.25, "double_buffering": buffered}
        starts = run_one(((0.0, ALONE), (0.0, None)), halves=8, **options)
        assert starts[-1] - starts[-2] == pytest.approx(seconds)


def test_bf16_that_was_not_measured_moves_as_fp32_does():
    measured = Transport(
        {"all_reduce": 1.0, "all_reduce_bf16": 2.0}, {"all_reduce": 0.5, "all_reduce_bf16": 0.75}
    )
    assert (measured.seconds("all_reduce_bf16", 4), measured.seconds("all_reduce", 4)) == (5.0, 3.0)
    assert Transport({"all_reduce": 1.0}, {"all_reduce": 0.5}).seconds("all_reduce_bf16", 4) == 3.0


def test_fp32_over_a_link_by_hand():
    """4 nodes, 4 MB: 2 * 3/4 * 4 MB at 1 Gbit/s = 48 ms, six latencies; compute 100 ms, update 5
    ms.
    """
    found = simulate(Workload(ONE, 100, 4e-3, 5e-3), "fp32", 4, Link(1e9, 1e-3))
    assert found.seconds == pytest.approx(0.1 + 0.048 + 0.006 + 0.005)
    assert found.compute_seconds == pytest.approx(0.105)
    assert found.exposed_seconds == pytest.approx(0.054)
    assert found.exchange_seconds == pytest.approx(0.054)
    assert found.hidden_share == pytest.approx(0)
    assert found.sent_nbytes == 6_000_000


# ---- orders that must hold -----------------------------------------------------------------------


@pytest.mark.parametrize("method", [m.name for m in METHODS])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_one_node_and_an_infinite_link_only_compute(method, cores):
    work = Workload(MANY, 64, 1e-3, 2e-3)
    assert simulate(
        work, method, 1, Link(1e6, 1e-3), rates=RATES, cores=cores
    ).seconds == pytest.approx(0.066)
    for nodes in (2, 32):
        found = simulate(work, method, nodes, FAST, cores=cores)
        assert found.seconds == pytest.approx(0.064 / nodes + 0.002)
        assert found.exposed_seconds == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", [m.name for m in METHODS])
@pytest.mark.parametrize("double_buffering", [False, True])
def test_a_faster_link_is_never_slower(method, double_buffering):
    work = Workload(MANY, 64, 1e-3, 2e-3)
    for cores in (1, 2):
        seconds = [
            simulate(
                work,
                method,
                8,
                Link(rate, 1e-4),
                rates=RATES,
                cores=cores,
                double_buffering=double_buffering,
            ).seconds
            for rate in (1e7, 1e8, 1e9, 1e10, 1e11)
        ]
        # jobs may change places
        assert all(b <= a * 1.02 for a, b in itertools.pairwise(seconds)), seconds
        assert seconds[-1] < seconds[0] / 2


def test_double_buffering_hides_what_backward_cannot():
    work = Workload(ONE, 64, 1e-3, 0)  # one bucket: ready when backward is over
    plain = simulate(work, "onebit reduce_scatter", 4, Link(1e9), rates=RATES)
    buffered = simulate(
        work, "onebit reduce_scatter", 4, Link(1e9), rates=RATES, double_buffering=True
    )
    assert buffered.seconds == pytest.approx(0.016) and plain.seconds > 0.017
    assert buffered.sent_nbytes == 2 * plain.sent_nbytes  # each half's gradient is exchanged


@pytest.mark.parametrize(
    "stragglers", [Stragglers(jitter=0.2), Stragglers(slow_share=0.1, slow_factor=2.0)]
)
def test_stragglers_slow_everyone(stragglers):
    work = Workload(MANY, 320, 1e-3, 2e-3)
    calm = simulate(work, "terngrad exact", 10, Link(1e9, 1e-4), rates=RATES)
    found = simulate(
        work, "terngrad exact", 10, Link(1e9, 1e-4), rates=RATES, stragglers=stragglers
    )
    assert found.seconds > 1.1 * calm.seconds
    assert found.straggler_seconds > 0.1 * calm.compute_seconds
    assert found.seconds == pytest.approx(
        found.compute_seconds + found.straggler_seconds + found.exposed_seconds
    )
    assert found == simulate(
        work, "terngrad exact", 10, Link(1e9, 1e-4), rates=RATES, stragglers=stragglers
    )


def test_one_slow_node_sets_the_pace():
    """One of 4 nodes takes twice as long: 64/4 * 1 ms * 2 for all of them."""
    found = simulate(
        Workload(ONE, 64, 1e-3),
        "fp32",
        4,
        FAST,
        stragglers=Stragglers(slow_share=0.25, slow_factor=2.0),
    )
    assert found.seconds == pytest.approx(0.032)
    assert (found.compute_seconds, found.straggler_seconds) == pytest.approx((0.020, 0.012))


@pytest.mark.parametrize("jitter", [0.05, 0.5])
@pytest.mark.parametrize("nodes", [1, 2, 10, 4096])
def test_the_slowest_of_many_nodes_is_waited_for(jitter, nodes):
    """Where nothing else takes time, a step is the mean of the largest of as many lognormals."""
    draws = np.random.default_rng(0).standard_normal((20_000_000 // max(nodes, 1000), nodes))
    slowest = np.exp(jitter * draws.max(axis=1) - jitter**2 / 2).mean()
    work, options = Workload(ONE, nodes, 1.0), {"stragglers": Stragglers(jitter=jitter)}
    found = simulate(work, "fp32", nodes, FAST, **options)
    assert found.seconds == pytest.approx(slowest, rel=0.01)
    assert (found.compute_seconds, found.exposed_seconds) == (1.0, pytest.approx(0, abs=1e-9))
    late = simulate(work, "fp32", nodes, FAST, double_buffering=True, **options)
    assert 0.8 < late.seconds < 1.02 * found.seconds  # a node makes up for a slow half


def test_weak_scaling_keeps_the_work_of_a_node():
    work = Workload(ONE, 32, 1e-3, weak=True)
    assert [simulate(work, "fp32", n, FAST).seconds for n in (1, 4, 64)] == pytest.approx(
        [0.032] * 3
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes must be an integer from 1 to 4096, got 0"),
        ({"nodes": 4097}, "got 4097"),
        ({"nodes": 2.0}, "got 2.0"),
        ({"cores": 0}, "cores must be positive and finite, got 0"),
        ({"method": "zip"}, "unknown method 'zip'"),
    ],
)
def test_bad_arguments_are_refused(options, message):
    arguments = {
        "workload": Workload(ONE, 1, 1),
        "method": "fp32",
        "nodes": 2,
        "link": FAST,
    } | options
    with pytest.raises(ValueError, match=message):
        simulate(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Workload((), 1, 1), "parameters must name at least one"),
        (lambda: Workload(ONE, 0, 1), "minibatch must be positive and finite, got 0"),
        (lambda: Workload(ONE, 1, -1), "t_frame must be at least 0 and finite, got -1"),
        (
            lambda: Workload(ONE, 1, 1, t_update=math.inf),
            "t_update must be at least 0 and finite, got inf",
        ),
        (lambda: Workload(ONE, 1, 1, forward_share=2), "forward_share must be in"),
        (lambda: Workload(ONE, 1, 1, flops=()), "flops must have one entry a parameter"),
        (
            lambda: Workload(ONE, 1, 1, flops=(-1.0,)),
            "flops must be at least 0 and finite, got -1.0",
        ),
        (
            lambda: Workload(ONE, 1, 1, flops=(math.nan,)),
            "flops must be at least 0 and finite, got nan",
        ),
        (
            lambda: Workload(ONE, 1, 1, bucket_cap_mb=0),
            "bucket_cap_mb must be positive and finite, got 0",
        ),
        (
            lambda: Workload(ONE, 1, 1, bucket_cap_mb=math.inf),
            "bucket_cap_mb must be positive and finite, got inf",
        ),
        (lambda: Workload((("w", (10**10, 10**10)),), 1, 1), "parameters must hold at most"),
        (lambda: Stragglers(jitter=-1), r"jitter must be in \[0, 10\], got -1"),
        (lambda: Stragglers(jitter=1e200), r"jitter must be in \[0, 10\], got 1e\+200"),
        (lambda: Stragglers(slow_share=2), "slow_share must be in"),
        (lambda: Stragglers(slow_factor=0.5), "slow_factor must be at least 1 and finite, got 0.5"),
        (lambda: StageRate(-1.0), "fixed_s must be at least 0 and finite, got -1.0"),
    ],
)
def test_bad_descriptions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- rates ---------------------------------------------------------------------------------------


@pytest.mark.timed
def test_calibration_finds_rates_that_describe_a_stage(tmp_path):
    methods = [find_method(n) for n in ("terngrad exact", "onebit all_gather", "bf16")]
    rates = calibrate(methods, sizes=(1 << 10, 1 << 20), repeats=5)
    small, large = (rates.stage_seconds(methods[0], 4, n, n // 4) for n in (1 << 10, 1 << 22))
    assert len(small) == 4 and min(small) >= 0 and 10 * sum(small) < sum(large) < 10
    few, more = (rates.stage_seconds(methods[1], n, 1 << 20, 1 << 20) for n in (2, 64))
    # decoding grows with the ranks, encoding does not
    assert more[3] > 4 * few[3] and more[3] > more[1]
    assert 0 < sum(rates.stage_seconds(methods[2], 4, 1 << 22, 1 << 20)) < 1
    (tmp_path / "rates.json").write_text(json.dumps(rates.to_dict()))
    assert Rates.load(tmp_path / "rates.json") == rates


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"fp32": 3}',
        '{"fp32": {"cast": {"speed": 3}}}',
        '{"fp32": {"cast": {"fixed_s": -3}}}',
    ],
)
def test_bad_rates_are_refused(text, tmp_path):
    (tmp_path / "rates.json").write_text(text)
    with pytest.raises(ValueError, match=r"rates\.json does not hold rates"):
        Rates.load(tmp_path / "rates.json")


# ---- predictions ---------------------------------------------------------------------------------

BIG = tuple((f"w{i}", (1000, 4000)) for i in range(10))  # 160 MB


def test_a_slow_link_asks_for_compression():
    found = predict(
        Workload(BIG, 1024, 1e-3, 2e-3),
        Link(1e9, 1e-4),
        [1, 2, 4, 8, 16],
        rates=RATES,
        by_seconds=True,
    )
    assert found.method.compresses and found.nodes == 16 and found.speedup > 5
    assert (
        found.sentence.startswith("Compress: over 1 Gbit/s") and found.method.name in found.sentence
    )
    assert 1e9 < found.break_even_bits_per_s < 1e12
    above = predict(
        Workload(BIG, 1024, 1e-3, 2e-3),
        Link(found.break_even_bits_per_s * 1.2, 1e-4),
        [16],
        rates=RATES,
    )
    assert not above.method.compresses
    assert found.result("fp32", 16).seconds == pytest.approx(
        found.speedup * found.result(found.method.name, 16).seconds
    )
    ratio = 2 * 15 / 16 * 160e6 / found.result(found.method.name, 16).sent_nbytes
    assert found.optimal_nodes == math.ceil(512e-3 / (1.28 / ratio - 2e-3))


def test_a_fast_link_asks_for_nothing():
    found = predict(Workload(BIG, 1024, 1e-2, 2e-3), Link(1e12), [2, 4, 8], rates=RATES)
    assert found.method.name == "fp32" and found.speedup == 1
    assert found.sentence.startswith("Do not compress") and "would pay" in found.sentence
    assert found.break_even_bits_per_s < 1e12


def test_measured_collectives_take_the_place_of_a_link():
    """An all_reduce of 2 * 3/4 * 160 MB at 1 ns a byte: 0.24 s / ratio against 2 ms of update."""
    slow = Transport({}, dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), 1e-9))
    found = predict(Workload(BIG, 1024, 1e-3, 2e-3), FAST, [4], rates=RATES, transport=slow)
    assert "over these ranks" in found.sentence
    ratio = 240e6 / found.result(found.method.name, 4).sent_nbytes
    assert found.optimal_nodes == math.ceil(0.512 / (0.24 / ratio - 0.002))


def test_one_node_may_be_best():
    found = predict(Workload(BIG, 4, 1e-3, 2e-3), Link(1e6), [1, 2, 4], rates=RATES)
    assert found.nodes == 1 and "do not distribute" in found.sentence


def test_fewer_nodes_than_asked_for_may_be_best():
    work = Workload(BIG, 4, 1e-3, 2e-3)
    found = predict(work, Link(1e6), [2, 4], rates=RATES)
    alone = simulate(work, found.method, 1, Link(1e6), rates=RATES).seconds
    assert found.sentence.startswith(
        f"Do not distribute: one node alone takes {format_seconds(alone)} a step. Else: "
    )


def test_weak_scaling_has_no_formula():
    found = predict(
        Workload(BIG, 64, 1e-3, weak=True), Link(1e9), [1, 2, 4], rates=RATES, by_seconds=True
    )
    assert (
        found.optimal_nodes == math.inf
        and "formula" not in found.sentence
        and "distribute" not in found.sentence
    )


def test_crossings_are_where_the_fastest_method_changes():
    work, link = Workload(BIG, 1024, 1e-3, 2e-3), Link(1e10, 1e-4)
    coarse = predict(work, link, [2, 64], rates=RATES, by_seconds=True)
    fine = predict(work, link, range(2, 65), rates=RATES, by_seconds=True)
    assert coarse.crossings
    for crossing in coarse.crossings:
        assert crossing in fine.crossings
        now, before = (
            {m.name: fine.result(m.name, n).seconds for m in METHODS}
            for n in (crossing.nodes, crossing.nodes - 1)
        )
        assert now[crossing.after] <= 1.01 * min(now.values())
        assert now[crossing.before] > 1.01 * min(now.values())
        assert before[crossing.before] <= 1.01 * min(before.values())


def test_predictions_need_nodes_and_methods():
    with pytest.raises(ValueError, match="nodes must name at least one"):
        predict(Workload(ONE, 1, 1), FAST, [])
    with pytest.raises(ValueError, match="methods must name at least one"):
        predict(Workload(ONE, 1, 1), FAST, [2], methods=[])
    with pytest.raises(KeyError):
        predict(Workload(ONE, 1, 1), FAST, [2], rates=RATES).result("fp32", 3)


# ---- accuracy ------------------------------------------------------------------------------------


def ask(optimizer=None, link=1e9, methods=METHODS, **more):
    work = Workload(BIG, 1024, 1e-3, 2e-3)
    return predict(
        work, Link(link, 1e-4), [4], methods=methods, rates=RATES, optimizer=optimizer, **more
    )


def test_every_block_is_a_candidate():
    assert {
        f"block{bits} {how}" for bits in (2, 4, 8) for how in ("all_gather", "reduce_scatter")
    } <= {m.name for m in METHODS}


@pytest.mark.parametrize(
    ("optimizer", "codec", "costs"),
    [
        ("adamw", "block4", " It costs +0.001 nats (a byte GPT"),
        ("NAdam", "block4", " It costs +0.001 nats (a byte GPT"),
        ("SGD", "block4", " It costs +0.16 points of test error (LeNet"),
        ("muon", "block4", " What it costs in accuracy under muon was not measured."),
    ],
)
def test_what_loses_too_much_is_not_recommended(optimizer, codec, costs):
    fast, kept = ask(), ask(optimizer)
    assert (
        fast.method.name.startswith("onebit")
        and kept.method.name.startswith(codec)
        and costs in kept.sentence
    )
    assert 1 < kept.speedup < fast.speedup
    assert set(kept.permitted) < set(fast.permitted) == {m.name for m in METHODS}
    assert {"fp32", "bf16"} < set(kept.permitted) and not any(
        n.startswith("onebit") for n in kept.permitted
    )
    times = kept.result(kept.method.name, 4).seconds / fast.result(fast.method.name, 4).seconds
    if times > 1.05:  # what gains less is not mentioned
        assert (
            f" {fast.method.name} would be {times:.2g} times as fast a step and " in kept.sentence
        )
    assert "not recommended." in kept.sentence and kept.sentence.count(" onebit ") == (times > 1.05)


class Unmeasured(OneBit):
    name = "unmeasured"


def test_a_codec_that_was_measured_nowhere_is_not_recommended():
    """Not for seconds alone either, though it sends least and would be the answer to every slow
    link.
    """
    slow = [m for m in METHODS if m.name in ("fp32", "block4 reduce_scatter")]
    methods = [*slow, Method("unmeasured all_gather", Unmeasured(), "all_gather")]
    found = ask(link=1e8, methods=methods)
    times = {row.method.name: row.seconds for row in found.rows}
    assert min(times, key=times.get) == "unmeasured all_gather"
    assert set(found.permitted) == {"fp32", "block4 reduce_scatter"}
    assert (
        "unmeasured all_gather would be" in found.sentence
        and "times as fast a step and was not measured; not recommended." in found.sentence
    )
    under_adamw = ask("adamw", link=1e8, methods=methods).sentence
    assert "was not measured under adamw; not recommended." in under_adamw
    alone = ask(methods=methods[-1:])
    assert alone.sentence.startswith(
        "Nothing here is known to keep the accuracy; by seconds alone: "
    )


def test_why_a_faster_codec_is_left_out():
    adam, sgd = ask("adamw").sentence, ask("sgd").sentence
    onebit = expected("adam", OneBit())
    assert f"costs {onebit.cost} with {onebit.given()}; not recommended." in adam
    assert (
        "terngrad requantize would be" in adam
        and "was not measured under adamw; not recommended." in adam
    )
    assert (
        "It costs +0.16 points of test error (LeNet on Fashion-MNIST under SGD" in sgd
        and "was not measured under sgd" in sgd
    )


def test_without_an_optimizer_the_losses_are_told():
    found = ask()
    assert (
        f"by seconds a step alone: onebit costs {expected('adam', OneBit()).cost}" in found.sentence
        and "+1.95 points" in found.sentence
    )
    row = found.tolerance.costs(found.method)
    assert {cost.training.optimizer for cost in row.values()} == {"AdamW", "SGD"}


def test_without_an_optimizer_only_what_is_safe_for_all_is_recommended():
    """It recommended 1 bit by seconds alone and said last that it costs 1.95 points."""
    found = ask(by_seconds=False)
    assert {name.split()[0] for name in found.permitted} == {"fp32", "bf16", "block4"}
    assert (
        found.method.name.startswith("block4")
        and "under some optimizer are left out" in found.sentence
    )
    assert "not recommended" not in found.sentence
    loose = ask(by_seconds=False, tolerances={"nats": 1, "points": 2})
    assert loose.method.name.startswith("onebit")  # within what is tolerated under each


def test_the_rate_at_which_compression_stops_paying_is_a_range():
    """Measured a minute apart it was 50 and 98 Gbit/s, each given as if it were exact."""
    slower = Rates(
        {
            method: {
                stage: StageRate(*(16 * value for value in asdict(rate).values()))
                for stage, rate in stages.items()
            }
            for method, stages in RATES.stages.items()
        }
    )
    once, again = ask(), ask(repeated=[RATES, slower])
    assert once.break_even_range == (once.break_even_bits_per_s,) * 2
    least, most = again.break_even_range
    assert least < 0.7 * most and most == again.break_even_bits_per_s == once.break_even_bits_per_s
    work = Workload(BIG, 1024, 1e-3, 2e-3)
    alone = predict(work, Link(1e9, 1e-4), [again.nodes], methods=METHODS, rates=slower)
    assert least == pytest.approx(alone.break_even_bits_per_s, rel=0.05)
    assert f"Above {format_rates(least, most)} compression stops paying there." in again.sentence


def test_a_tolerance_lets_more_in():
    """1 bit is measured with a warm start of 4: over a run it takes longer than by its own
    steps, without them yet longer.
    """
    found = ask("adamw", tolerances={"nats": 0.07})
    rows = {row.method.name: row for row in found.rows}
    onebit, block4 = rows["onebit reduce_scatter"], rows["block4 reduce_scatter"]
    assert "with precondition=True" in found.sentence
    assert onebit.result.seconds < onebit.seconds < block4.seconds == block4.result.seconds
    assert onebit.seconds == pytest.approx(
        5 / 6 * onebit.result.seconds + block4.result.seconds / 6
    )
    without = ask(
        "adamw",
        tolerances={"nats": 0.07},
        methods=[m for m in METHODS if m.name in ("fp32", "onebit reduce_scatter")],
    )
    rows = {row.method.name: row for row in without.rows}
    onebit = rows["onebit reduce_scatter"]
    assert onebit.seconds == pytest.approx(
        5 / 6 * onebit.result.seconds + rows["fp32"].result.seconds / 6
    )
    assert ask("sgd", tolerances={"points": 2, "nats": 0.1}).method.name.startswith("onebit")
    assert not ask("sgd", tolerances={"points": 0, "nats": 0.0}).method.name.startswith(
        ("onebit", "ternary", "terngrad")
    )


def test_where_nothing_asked_for_keeps_the_accuracy_it_says_so():
    found = ask("adamw", methods=[m for m in METHODS if m.name.startswith("onebit")])
    assert found.sentence.startswith(
        "Nothing here is known to keep the accuracy under adamw; by seconds alone: Compress"
    )


def test_nothing_is_said_of_codecs_where_none_pays():
    found = ask("adamw", link=1e13)
    assert (
        found.method.name == "fp32"
        and "costs" not in found.sentence
        and "not recommended" not in found.sentence
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": ""}, "optimizer must be a name such as adamw, sgd or lamb, got ''"),
        ({"optimizer": "adam w"}, "got 'adam w'"),
        (
            {"optimizer": "sgd", "tolerances": {"nats": -1}},
            "the tolerance in nats must be at least 0 and finite, got -1",
        ),
        (
            {"optimizer": "sgd", "tolerances": {"points": math.nan}},
            "the tolerance in points must be .* got nan",
        ),
        (
            {"optimizer": "sgd", "tolerances": {"bits": 1}},
            "tolerances are in nats and points, got 'bits'",
        ),
    ],
)
def test_bad_tolerances_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ask(**settings)


def test_flops_that_are_all_zero_say_nothing():
    zero, none = (Workload(BIG, 64, 1e-3, flops=f) for f in ((0.0,) * len(BIG), None))
    assert simulate(zero, "fp32", 4, SLOW) == simulate(none, "fp32", 4, SLOW)


def test_parameters_without_values_still_compute():
    empty = Workload((("w", (0, 10)), ("v", (0,))), 10, 1.0)
    assert simulate(empty, "onebit reduce_scatter", 2, FAST).seconds == pytest.approx(5.0)


def test_a_second_phase_in_one_piece_follows_the_last_slice():
    """`TernGrad`'s means of a whole tensor have one scale, so 8 ranks wait for all of the first
    phase; rows do not.
    """
    workload = Workload((("w", (4096, 4096)),), minibatch=1.0, t_frame=0.0, weak=True)
    rates = Rates(
        {
            name: {s: StageRate(per_value_s=1e-9) for s in ("encode", "owner", "decode")}
            for name in ("terngrad block4", "block4 reduce_scatter")
        }
    )
    work = {}
    for name in rates.stages:
        method = find_method(name)
        codec = method.codec if name.startswith("terngrad") else Block(4, group=512)
        method = replace(method, codec=codec)
        (bucket,) = plan_buckets(method, workload.parameters, 8)
        assert bucket.slices == 8 and bucket.whole_second is name.startswith("terngrad")
        work[name] = _slice_work(method, bucket, 8, 8, rates)
    for name, slices in work.items():
        sent = [one[2].collective is not None for one in slices]
        assert sent == [not name.startswith("terngrad")] * 7 + [True]
        assert sum(one[1].seconds for one in slices) == pytest.approx(4096**2 * 1e-9)


# ---- nodes of several ranks ----------------------------------------------------------------------

FOUR = Node(4, Link(8e9, 1e-6))
WEIGHT = (("w", (1024, 4096)),)  # 16.8 MB in fp32


def test_ranks_of_a_node_share_its_link():
    """Of pairs most leave the node, of a ring one rank's bytes do; what stays goes over what
    joins the ranks.
    """
    ring = Collective.of("all_gather", 700, 8, 4)
    assert (ring.leaving_nbytes, ring.staying_nbytes, ring.rounds) == (700, 700, 7)
    pairs = Collective.of("all_to_all", 700, 8, 4)
    assert (pairs.leaving_nbytes, pairs.staying_nbytes) == (4 * 400, 300)
    alone = Collective.of("all_to_all", 300, 4, 4)
    assert (alone.leaving_nbytes, alone.staying_nbytes) == (0, 300)
    each = Collective.of("all_to_all", 100, 2).of_each(4)
    assert (each.leaving_nbytes, each.staying_nbytes) == (400, 0)
    assert Collective.of("max", 8, 8) == Collective("max", 8, 14, 8)


def test_a_hierarchical_exchange_by_hand():
    """2 nodes of 4 ranks, 1 Gbit/s between and 8 Gbit/s inside: 12.6 MB to the node's ranks, 2
    bits of a quarter between nodes, 12.6 MB back.
    """
    work = Workload(WEIGHT, minibatch=1.0, t_frame=0.0, weak=True)
    (bucket,) = plan_buckets(find_method("terngrad hierarchical"), WEIGHT, 8, node_ranks=4)
    numel = 1024 * 4096
    inside, scale, packed, *_, back = bucket.collectives
    assert (inside.nbytes, inside.leaving_nbytes, inside.staying_nbytes) == (
        3 * numel,
        0,
        3 * numel,
    )
    assert (back.nbytes, back.leaving_nbytes, back.staying_nbytes) == (3 * numel, 0, 3 * numel)
    assert (
        packed.kind == "all_gather"
        and packed.leaving_nbytes == 4 * packed.nbytes == pytest.approx(numel / 4, rel=0.01)
    )
    found = simulate(work, "terngrad hierarchical", 2, Link(1e9, 1e-3), node=FOUR)
    by_hand = (
        2 * 3 * numel / 1e9
        + 4e-6
        + 2e-3
        + packed.leaving_nbytes * 8e-9
        + 1e-3
        + scale.leaving_nbytes * 8e-9
    )
    assert found.seconds == pytest.approx(by_hand, rel=1e-6)
    assert found.sent_nbytes == packed.leaving_nbytes + scale.leaving_nbytes and found.ranks == 8
    places = _Places(2, 4)
    plan = NodeRoute.plan(places, [Slot(0, numel, numel, True, 0, 0)], places._codec, None)
    assert packed.nbytes + scale.nbytes == pytest.approx(plan.sent_nbytes, abs=64)


class _Places:
    """What `NodeRoute.plan` asks of communicators."""

    def __init__(self, nodes, ranks):
        self._codec, self._slicing = TernGrad(), Slicing(0)
        self._nodes = SimpleNamespace(
            inside=SimpleNamespace(world_size=ranks, rank=0),
            across=SimpleNamespace(world_size=nodes, rank=0),
        )


@pytest.mark.parametrize("name", [m.name for m in HIERARCHICAL])
def test_a_hierarchical_method_is_the_flat_one_on_nodes_of_one_rank_and_fp32_on_one_node(name):
    work = Workload(MANY, 64, 1e-3)
    flat = between(find_method(name), 4)
    assert simulate(work, name, 4, SLOW, rates=RATES) == simulate(work, flat, 4, SLOW, rates=RATES)
    one = simulate(work, name, 1, SLOW, node=FOUR)
    assert one.sent_nbytes == 0 and one.exposed_seconds > 0 and one.ranks == 4
    plain = simulate(work, IDENTITY, 1, SLOW, node=FOUR)  # its slices are cut elsewhere
    assert asdict(one) == pytest.approx(asdict(plain), rel=0.01)
    more = simulate(work, name, 4, SLOW, node=FOUR)
    assert 0 < more.sent_nbytes and more.compute_seconds == pytest.approx(
        simulate(work, name, 16, SLOW).compute_seconds
    )


def test_averaging_inside_nodes_first_pays_where_links_are_slow_and_ranks_many():
    work = Workload((("w", (4096, 4096)),), 64, 1e-4)
    found = predict(work, Link(1e8), [4], node=Node(8, Link(1e11)), rates=RATES, by_seconds=True)
    seconds = {row.method.name: row.result.seconds for row in found.rows}
    assert (
        seconds["terngrad hierarchical"] < 0.5 * seconds["terngrad exact"]
        and "terngrad hierarchical" in found.permitted
    )
    assert found.method.exchange == "hierarchical"
    assert not any(
        row.method.exchange == "hierarchical"
        for row in predict(work, Link(1e8), [4], rates=RATES).rows
    )
    adamw = predict(work, Link(1e8), [4], node=Node(8), rates=RATES, optimizer="adamw")
    # what it was measured with does not go with it
    assert "onebit hierarchical" not in adamw.permitted
    for ranks in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="ranks of a node"):
            Node(ranks)


def test_slices_between_nodes():
    """The exchange inside begins before the first and ends after the last, whose work is as much
    as in one piece.
    """
    work = (("w", (8192, 4096)),)
    method = find_method("onebit hierarchical")
    (bucket,) = plan_buckets(method, work, 4, node_ranks=2)
    rates = Rates(
        {
            "identity": {"owner": StageRate(fixed_s=1.0), "decode": StageRate(fixed_s=2.0)},
            "onebit all_gather": {"encode": StageRate(per_value_s=1e-9)},
        }
    )
    slices = _slice_work(between(method, 2), bucket, 4, 2, rates)
    assert len(slices) == bucket.slices == 8192 * 4096 // 2 // 2**21
    kinds = [[s.collective and s.collective.kind for s in one] for one in slices]
    assert (
        kinds[0][0] == "all_to_all"
        and kinds[-1][4] == "all_gather"
        and all(len(k) == 6 for k in kinds)
    )
    assert (
        not any(k[0] for k in kinds[1:])
        and not any(k[4] for k in kinds[:-1])
        and all(k[2] == "all_gather" for k in kinds)
    )
    assert sum(s.seconds for one in slices for s in one) == pytest.approx(3.0 + 8192 * 2048 * 1e-9)


def test_rates_of_another_way_of_the_codec_stand_in_for_missing_ones():
    """Files of before a method was there do not make it free."""
    rates = Rates({"terngrad requantize": {"encode": StageRate(per_value_s=1.0)}})
    assert rates.stage_seconds(find_method("terngrad block4"), 8, 10, 2)[1] == 10.0
    assert rates.stage_seconds(find_method("onebit reduce_scatter"), 8, 10, 2) == (0.0,) * 4
