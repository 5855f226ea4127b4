"""The simulated step: cases computed by hand, and orders that must hold."""

import itertools
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _hosted import HostedKernels
from _ranks import each_rank

from gradcomp import Block, TernGrad, kernels
from gradcomp.exchange.routes import HierarchicalRoute
from gradcomp.exchange.slices import Slicing
from gradcomp.payload.pieces import Slot
from gradcomp.plan import (
    HIERARCHICAL,
    METHODS,
    Link,
    LocalSteps,
    Node,
    Rates,
    StageRate,
    Stragglers,
    Transport,
    Workload,
    calibrate,
    find_method,
    simulate,
    step,
)
from gradcomp.plan.costs import IDENTITY, Collective, between, plan_buckets
from gradcomp.plan.rates import COPIES, OUTER, PRECONDITION, STAGES
from gradcomp.plan.step import Setting, Stage, slice_work

FAST = Link(math.inf)
ONE = (("w", (1000, 1000)),)  # one bucket: 4 MB in fp32
MANY = tuple((f"w{i}", (500, 1000)) for i in range(12))
EACH = dict.fromkeys((*STAGES, "cast", "uncast"), StageRate(1e-5, 1e-6, 1e-10, 1e-10))
RATES = Rates({m.name: EACH for m in METHODS})

# ---- by hand -------------------------------------------------------------------------------------

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
    slices = [tuple(Stage(*one) for one in stages)] * sum(len(ready) for _, ready in pieces)
    work = Workload(ONE, 1, 1, forward_share=forward_share)
    setting = Setting(work, **{"link": FAST} | more)
    return setting.schedule(slices, pieces, [[compute]] * halves, update)[0]


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
        # copies of 1 s, one at a time; of the other stage half a second hides behind the next one
        (((0.0, None, 1.0), (0.5, None)), {"cores": 3, **THREE}, 1 + 3 * 1.0 + 0.5),
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
    fp32, bf16 = {"all_reduce": 1.0}, {"all_reduce_bf16": 2.0}
    measured, older = Transport(fp32 | bf16, fp32 | bf16), Transport(fp32, fp32)
    assert sum(measured.parts("all_reduce_bf16", 4)) == 10.0
    assert sum(older.parts("all_reduce_bf16", 4)) == sum(measured.parts("all_reduce", 4)) == 5.0


def test_fp32_over_a_link_by_hand():
    """4 nodes, 4 MB: 2 * 3/4 * 4 MB at 1 Gbit/s = 48 ms, six latencies; compute 100 ms, update 5
    ms.
    """
    found = simulate(Workload(ONE, 100, 4e-3, 5e-3), "fp32", 4, Link(1e9, 1e-3))
    seconds = {"seconds": 0.159, "compute_seconds": 0.105, "straggler_seconds": 0}
    waits = {"exposed_seconds": 0.054, "exchange_seconds": 0.054, "hidden_share": 0}
    sizes = {"nodes": 4, "sent_nbytes": 6_000_000, "ranks": 4}
    assert asdict(found) == pytest.approx(seconds | waits | sizes)


# ---- orders that must hold -----------------------------------------------------------------------


@pytest.mark.parametrize("method", [m.name for m in METHODS])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_one_node_and_an_infinite_link_only_compute(method, cores):
    work = Workload(MANY, 64, 1e-3, 2e-3)
    alone = simulate(work, method, 1, Link(1e6, 1e-3), rates=RATES, cores=cores)
    assert alone.seconds == pytest.approx(0.066)
    for nodes in (2, 32):
        found = simulate(work, method, nodes, FAST, cores=cores)
        assert found.seconds == pytest.approx(0.064 / nodes + 0.002)
        assert found.exposed_seconds == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("method", [m.name for m in METHODS])
@pytest.mark.parametrize("double_buffering", [False, True])
@pytest.mark.parametrize("cores", [1, 2])
def test_a_faster_link_is_never_slower(method, double_buffering, cores):
    work = Workload(MANY, 64, 1e-3, 2e-3)
    options = {"rates": RATES, "cores": cores, "double_buffering": double_buffering}
    links = [Link(rate, 1e-4) for rate in (1e7, 1e8, 1e9, 1e10, 1e11)]
    seconds = [simulate(work, method, 8, link, **options).seconds for link in links]
    # jobs may change places
    assert all(b <= a * 1.02 for a, b in itertools.pairwise(seconds)), seconds
    assert seconds[-1] < seconds[0] / 2


def test_double_buffering_hides_what_backward_cannot():
    work = Workload(ONE, 64, 1e-3, 0)  # one bucket: ready when backward is over
    plain, buffered = (
        simulate(work, "onebit reduce_scatter", 4, Link(1e9), rates=RATES, double_buffering=buffers)
        for buffers in (False, True)
    )
    assert buffered.seconds == pytest.approx(0.016) and plain.seconds > 0.017
    assert buffered.sent_nbytes == 2 * plain.sent_nbytes  # each half's gradient is exchanged


@pytest.mark.parametrize("stragglers", [Stragglers(0.2), Stragglers(slow_share=0.1, slow_factor=2)])
def test_stragglers_slow_everyone(stragglers):
    work = Workload(MANY, 320, 1e-3, 2e-3)
    calm, found, again = (
        simulate(work, "terngrad exact", 10, Link(1e9, 1e-4), rates=RATES, stragglers=differ)
        for differ in (None, stragglers, stragglers)
    )
    assert found.seconds > 1.1 * calm.seconds and found == again
    assert found.straggler_seconds > 0.1 * calm.compute_seconds
    parts = found.compute_seconds + found.straggler_seconds + found.exposed_seconds
    assert found.seconds == pytest.approx(parts)


def test_one_slow_node_sets_the_pace():
    """One of 4 nodes takes twice as long: 64/4 * 1 ms * 2 for all of them."""
    slow = Stragglers(slow_share=0.25, slow_factor=2.0)
    found = simulate(Workload(ONE, 64, 1e-3), "fp32", 4, FAST, stragglers=slow)
    times = found.seconds, found.compute_seconds, found.straggler_seconds
    assert times == pytest.approx((0.032, 0.020, 0.012))


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


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Workload(ONE, 32, 1e-3, weak=True), [0.032] * 3),
        (Workload(ONE, 32, 1e-3), [0.032, 0.008, 0.001]),  # a sample at least
        (Workload((("w", (0, 10)), ("v", (0,))), 64, 1e-3), [0.064, 0.016, 0.001]),  # no values
    ],
)
def test_the_work_of_a_node(work, seconds):
    found = [simulate(work, "onebit reduce_scatter", n, FAST).seconds for n in (1, 4, 64)]
    assert found == pytest.approx(seconds)


def test_flops_that_are_all_zero_say_nothing():
    zero, none = (Workload(MANY, 64, 1e-3, flops=flops) for flops in ((0.0,) * len(MANY), None))
    assert simulate(zero, "fp32", 4, Link(1e9)) == simulate(none, "fp32", 4, Link(1e9))


@pytest.mark.parametrize(
    ("method", "link", "options", "extrapolates"),
    [
        ("fp32", Link(1e9, 1e-4), {}, True),
        ("onebit reduce_scatter", Link(1e9, 1e-4), {"cores": 1}, True),
        ("onebit reduce_scatter", Link(1e9, 1e-4), {"double_buffering": True}, False),
        # scales take 30 latencies, more than all slices take
        ("terngrad exact", Link(3e10, 0.05), {}, False),
    ],
)
def test_a_long_run_of_equal_buckets_is_extrapolated(
    method, link, options, extrapolates, monkeypatch
):
    """Each of them was simulated, so that the doctor took minutes for 7e10 parameters."""
    work, lengths = Workload((("w", (7, 1 << 20)),) * 150, 1, 0.5, t_update=0.1, weak=True), []
    schedule = Setting.schedule

    def recorded(self, slices, *args):
        lengths.append(len(slices))
        return schedule(self, slices, *args)

    monkeypatch.setattr(Setting, "schedule", recorded)
    found = []
    for long in (60, 10**9):
        monkeypatch.setattr(step, "LONG", long)
        found.append(asdict(simulate(work, method, 16, link, rates=RATES, **options)))
    assert found[0] == pytest.approx(found[1], rel=2e-3)
    *some, whole = lengths
    assert (max(some) < whole) is extrapolates


# ---- rates and slices ----------------------------------------------------------------------------


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
    assert rates.outer_seconds(100) == 0.0
    (tmp_path / "rates.json").write_text(json.dumps(rates.to_dict()))
    assert Rates.load(tmp_path / "rates.json") == rates


def test_calibration_measures_the_outer_step():
    methods = [TERNARY.after(LocalSteps(30)), ONEBIT]
    rates = calibrate(methods, sizes=(1 << 10, 1 << 20), world_sizes=(2,))
    assert set(rates.stages) == {OUTER, PRECONDITION, TERNARY.name, ONEBIT.name}
    assert rates.stages[PRECONDITION]["apply"].per_value_s > 0
    assert 0 < rates.outer_seconds(1 << 20) < rates.outer_seconds(1 << 24) < 60


def per_value(seconds):
    return StageRate(per_value_s=seconds)


COPIED = Rates({COPIES: {"to host": per_value(1e-9), "to device": per_value(2e-9)}})


@pytest.mark.parametrize(
    ("name", "node", "copied"),
    [
        ("fp32", Node(), 0.0),
        ("bf16", Node(), 0.0),
        ("onebit all_gather", Node(), 3e-3),
        ("terngrad block4", Node(), 3e-3),
        ("onebit hierarchical", Node(2), 3e-3),
    ],
)
def test_a_step_includes_copies_of_buckets_on_an_accelerator(name, node, copied):
    """A million values to the host and back, once, as fp32: nothing else takes time here. DDP's own
    all_reduce is not copied.
    """
    work = Workload(ONE, 100, 1e-3)
    found = simulate(work, name, 2, FAST, node=node, rates=COPIED)
    assert found.exposed_seconds == pytest.approx(copied)
    local = find_method("onebit all_gather").after(LocalSteps(10))
    assert simulate(work, local, 2, FAST, rates=COPIED).exposed_seconds == pytest.approx(3e-4)


def test_all_slices_of_a_bucket_are_copied_at_once():
    (bucket,) = plan_buckets(ONEBIT, (("w", (4096, 4096)),), 8)
    slices = slice_work(ONEBIT, bucket, 8, 8, COPIED)
    assert len(slices) == bucket.slices > 1
    copied = [[stage.copied_s for stage in stages] for stages in slices]
    assert sum(map(sum, copied)) == pytest.approx(4096**2 * 3e-9)
    assert copied[0][0] == pytest.approx(4096**2 * 1e-9) and sum(copied[0]) == copied[0][0]
    assert copied[-1][-2] == pytest.approx(4096**2 * 2e-9) and sum(copied[-1]) == copied[-1][-2]


@each_rank(1, "lazy")
def test_calibration_includes_copies_to_an_accelerator():
    """Those of fp32 where the CPU encodes; where the accelerator does, its stages copy codes."""
    device, settings = torch.device("lazy:0"), {"sizes": (1 << 10, 1 << 14), "world_sizes": (2,)}
    rates = calibrate([ONEBIT], **settings, repeats=1, device=device)
    assert rates.stages.keys() == {COPIES, PRECONDITION, ONEBIT.name}
    assert min(rates.copy_seconds(1 << 22)) > 0
    made, encoded = HostedKernels(device), []
    encode = made.encode
    made.encode = lambda *given, **more: encoded.append(given[1].device) or encode(*given, **more)
    before = kernels.install("lazy", lambda _: made)
    try:
        rates = calibrate([ONEBIT], **settings, repeats=1, device=device)
    finally:
        kernels.install("lazy", before)
    assert rates.stages.keys() == {PRECONDITION, ONEBIT.name} and set(encoded) == {device}
    assert rates.copy_seconds(1 << 22) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["terngrad block4", "block4 reduce_scatter"])
def test_a_second_phase_in_one_piece_follows_the_last_slice(name):
    """`TernGrad`'s means of a whole tensor have one scale, so 8 ranks wait for all of the first
    phase; rows do not.
    """
    rate, whole = StageRate(per_value_s=1e-9), name.startswith("terngrad")
    rates = Rates({name: dict.fromkeys(("encode", "owner", "decode"), rate)})
    method = find_method(name)
    method = method if whole else replace(method, codec=Block(4, group=512))
    (bucket,) = plan_buckets(method, (("w", (4096, 4096)),), 8)
    assert bucket.slices == 8 and bucket.whole_second is whole
    slices = slice_work(method, bucket, 8, 8, rates)
    assert [one[2].collective is not None for one in slices] == [not whole] * 7 + [True]
    assert sum(one[1].seconds for one in slices) == pytest.approx(4096**2 * 1e-9)


# ---- nodes of several ranks ----------------------------------------------------------------------

FOUR = Node(4, Link(8e9, 1e-6))
WEIGHT = (("w", (1024, 4096)),)  # 16.8 MB in fp32


@pytest.mark.parametrize(
    ("collective", "leaving", "staying", "rounds"),
    [
        (Collective.of("all_gather", 700, 8, 4), 700, 700, 7),  # a ring: one rank's bytes leave
        (Collective.of("all_to_all", 700, 8, 4), 4 * 400, 300, 1),  # pairs: most leave
        (Collective.of("all_to_all", 300, 4, 4), 0, 300, 1),
        (Collective.of("max", 8, 8), 8, 0, 14),
    ],
)
def test_ranks_of_a_node_share_its_link(collective, leaving, staying, rounds):
    found = collective.leaving_nbytes, collective.staying_nbytes, collective.rounds
    assert found == (leaving, staying, rounds)


def test_a_hierarchical_exchange_by_hand():
    """2 nodes of 4 ranks, 1 Gbit/s between and 8 Gbit/s inside: 12.6 MB to the node's ranks, 2
    bits of a quarter between nodes, 12.6 MB back.
    """
    (bucket,) = plan_buckets(find_method("terngrad hierarchical"), WEIGHT, 8, node_ranks=4)
    numel = 1024 * 4096
    inside, scale, packed, *_, back = bucket.collectives
    for one in (inside, back):
        sizes = one.nbytes, one.leaving_nbytes, one.staying_nbytes
        assert sizes == (3 * numel, 0, 3 * numel)
    assert packed.kind == "all_gather" and packed.leaving_nbytes == 4 * packed.nbytes
    assert packed.leaving_nbytes == pytest.approx(numel / 4, rel=0.01)
    leaving = packed.leaving_nbytes + scale.leaving_nbytes
    work = Workload(WEIGHT, minibatch=1.0, t_frame=0.0, weak=True)
    found = simulate(work, "terngrad hierarchical", 2, Link(1e9, 1e-3), node=FOUR)
    assert found.seconds == pytest.approx(2 * 3 * numel / 1e9 + 4e-6 + 3e-3 + leaving * 8e-9)
    assert (found.sent_nbytes, found.ranks) == (leaving, 8)
    codec, nodes = TernGrad(), ((0, 1, 2, 3), (4, 5, 6, 7))
    everyone, inside, across = (SimpleNamespace(world_size=n, rank=0) for n in (8, 4, 2))
    route = HierarchicalRoute(everyone, codec, nodes, inside, across, Slicing(0))
    sent_nbytes = route.sent_nbytes([Slot(0, numel, numel, True, 0, 0)], codec)
    assert packed.nbytes + scale.nbytes == pytest.approx(sent_nbytes, abs=64)


@pytest.mark.parametrize("name", [m.name for m in HIERARCHICAL])
def test_a_hierarchical_method_is_the_flat_one_on_nodes_of_one_rank_and_fp32_on_one_node(name):
    work = Workload(MANY, 64, 1e-3)
    flat = between(find_method(name), 4)
    assert simulate(work, name, 4, SLOW, rates=RATES) == simulate(work, flat, 4, SLOW, rates=RATES)
    one = simulate(work, name, 1, SLOW, node=FOUR)
    assert one.sent_nbytes == 0 and one.exposed_seconds > 0 and one.ranks == 4
    plain = simulate(work, IDENTITY, 1, SLOW, node=FOUR)  # its slices are cut elsewhere
    assert asdict(one) == pytest.approx(asdict(plain), rel=0.01)
    more, ranks = simulate(work, name, 4, SLOW, node=FOUR), simulate(work, name, 16, SLOW)
    assert 0 < more.sent_nbytes
    assert more.compute_seconds == pytest.approx(ranks.compute_seconds)


def test_slices_between_nodes():
    """The exchange inside begins before the first and ends after the last, whose work is as much
    as in one piece.
    """
    method = find_method("onebit hierarchical")
    (bucket,) = plan_buckets(method, (("w", (8192, 4096)),), 4, node_ranks=2)
    inside = {"owner": StageRate(fixed_s=1.0), "decode": StageRate(fixed_s=2.0)}
    across = {"encode": StageRate(per_value_s=1e-9)}
    rates = Rates({"identity": inside, "onebit all_gather": across})
    slices = slice_work(between(method, 2), bucket, 4, 2, rates)
    assert len(slices) == bucket.slices == 8192 * 4096 // 2 // 2**21
    kinds = [[stage.collective and stage.collective.kind for stage in one] for one in slices]
    first, *middle, last = [(k[0], k[2], k[4]) for k in kinds]
    assert first == ("all_to_all", "all_gather", None) and last == (None, *["all_gather"] * 2)
    assert set(middle) == {(None, "all_gather", None)} and {len(k) for k in kinds} == {6}
    assert sum(s.seconds for one in slices for s in one) == pytest.approx(3.0 + 8192 * 2048 * 1e-9)


# ---- local steps ---------------------------------------------------------------------------------

WORK = Workload((("w", (1024, 1024)),), minibatch=1.0, t_frame=0.1, t_update=0.01, weak=True)
TERNARY, ONEBIT = find_method("terngrad all_gather"), find_method("onebit reduce_scatter")
NBYTES = 1024 * 1024 / 4 + 32 + 4  # a payload of one rank
MBIT = Link(1e6)


def late(method, *numbers, work=WORK, nodes=2, link=MBIT, **options):
    """Return the simulation of a method after local steps, or with none of them at every step."""
    method = method.after(LocalSteps(*numbers)) if numbers else method
    return simulate(work, method, nodes, link, **options)


def test_a_round_is_its_steps_and_one_exchange():
    """10 steps of 0.11 s, 0.5 s of the outer step, the payload over 1 Mbit/s."""
    found = late(TERNARY, 10, rates=Rates({OUTER: {"apply": StageRate(0.5)}}))
    wire = NBYTES * 8 / 1e6
    assert found.seconds == pytest.approx((10 * 0.11 + 0.5 + wire) / 10, rel=0.01)
    assert found.compute_seconds == pytest.approx(0.11 + 0.05)
    assert found.exposed_seconds == pytest.approx(wire / 10, rel=0.01)
    assert found.hidden_share == pytest.approx(0.0, abs=1e-9)
    assert found.sent_nbytes == pytest.approx(NBYTES / 10, rel=0.01)


@pytest.mark.parametrize(("cores", "busy"), [(2, 0.0), (1, 1.0)])
def test_steps_hide_what_is_late_but_not_its_work_on_the_only_core(cores, busy):
    """An exchange of one second on a core (four slices of 0.25) beside the wire's 2.1, which 5
    of 10 steps hide 0.55 of.
    """
    rates = Rates({TERNARY.name: {"encode": StageRate(0.0, 0.0, 1.0 / 2**20)}})
    options = {"rates": rates, "cores": cores}
    plain, delayed = (late(TERNARY, 10, 1, d, **options).exposed_seconds for d in (0, 5))
    assert delayed == pytest.approx(plain - 5 * 0.11 / 10)
    quick = late(TERNARY, 10, 1, 9, link=Link(1e8), **options)
    assert 10 * quick.exposed_seconds == pytest.approx(busy, abs=0.05)
    halves = replace(WORK, parameters=(("a", (512, 1024)), ("b", (512, 1024))))
    plain, delayed = (
        late(TERNARY, 10, 2, d, work=halves, **options).exposed_seconds for d in (0, 4)
    )
    # each part is hidden by four of its own
    assert delayed == pytest.approx(plain - 2 * 4 * 0.11 / 10)


def test_more_steps_cost_less_and_one_node_nothing():
    each = {m.name: {"encode": StageRate(0.25)} for m in METHODS if m.codec}
    rates = Rates({OUTER: {"apply": StageRate(0.5)}, **each})
    seconds = [late(ONEBIT, h, nodes=4, rates=rates).seconds for h in (1, 3, 10, 100)]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] > 0.11
    assert late(ONEBIT, 10, nodes=1, rates=rates).seconds == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("options", "attribute", "every", "times", "rel"),
    [
        # times of 25 steps differ a fifth as much as those of one
        ({"stragglers": Stragglers(jitter=0.3)}, "straggler_seconds", 25, 5, 0.25),
        # bytes move once in 20 steps, and hide behind nothing
        ({"transport": Transport({}, {"all_gather": 1e-6})}, "exposed_seconds", 20, 20, 0.02),
    ],
)
def test_what_an_exchange_costs_is_shared_by_the_steps(options, attribute, every, times, rel):
    work = replace(WORK, overlaps=False)
    each, rare = (
        getattr(late(TERNARY, *n, work=work, nodes=8, link=FAST, **options), attribute)
        for n in ((), (every,))
    )
    assert rare == pytest.approx(each / times, rel=rel) and each > 0


def test_post_processing_is_shared_out_with_what_is_exchanged():
    work = replace(WORK, t_post=1.0)
    found = [late(TERNARY, *n, work=work, nodes=4, link=FAST).compute_seconds for n in ((), (30,))]
    assert found == pytest.approx([0.11 + 0.25, 0.11 + 1.0])


def test_every_fragment_is_an_exchange():
    """An exchange takes its latencies whatever it carries."""
    halves = replace(WORK, parameters=(("a", (512, 512)), ("b", (512, 512))))
    one, two = (
        late(TERNARY, 10, k, work=halves, link=Link(1e9, 0.1)).exposed_seconds for k in (1, 2)
    )
    assert 10 * one > 0.2 and two == pytest.approx(2 * one, rel=0.02)


def test_the_exchange_is_that_of_every_step():
    for method in (*METHODS, *HIERARCHICAL):
        rare = method.after(LocalSteps(30, 2, 5))
        assert rare.each_step == (method if method.codec is not None else IDENTITY)
        assert rare.name == f"{rare.each_step.name} every 30 in 2 parts, 5 late"
        assert rare.after(LocalSteps(3)).name == f"{rare.each_step.name} every 3"
        assert not rare.keeps_loss
