"""The planner's arithmetic: the optimal node count, links, models, bytes, and what is refused."""

import math
import re
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.comm.rounds import ring_bytes
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose
from gradcomp.exchange.slices import Slicing
from gradcomp.payload.pieces import Slot
from gradcomp.plan import (
    METHODS,
    Link,
    LocalSteps,
    Node,
    Rates,
    StageRate,
    Stragglers,
    Workload,
    calibrate,
    find_method,
    find_model,
    optimal_nodes,
    own_model,
    parse_link,
    predict,
    simulate,
)
from gradcomp.plan.costs import plan_buckets
from gradcomp.plan.links import format_rate, format_seconds, parse_rate, parse_seconds
from gradcomp.plan.models import load_shapes
from gradcomp.plan.nbytes import ddp_buckets, predict_bytes
from gradcomp.plan.predict import Tolerance

ONE = (("w", (1000, 1000)),)
LATE = find_method("terngrad all_gather").after(LocalSteps(9, 3))
BY_HAND = {"minibatch": 1000, "t_frame": 1e-3, "t_post": 0.02, "t_comm_fp32": 2.4, "t_update": 5e-3}

# ---- optimal node count --------------------------------------------------------------------------


@given(
    target=st.integers(1, 300),
    unit=st.sampled_from([1, 0.1, 0.3, 0.7, 1e-3]),
    comm=st.none() | st.floats(0, 30),  # None: K^ is an integer, or near one where floats round
    update=st.sampled_from([0, 1e-3, 0.009, 1]),
    post=st.sampled_from([0, 0.0182]),
    ratio=st.sampled_from([1, 2.0, 15.8, 32]),
    parallel_post=st.sampled_from([0, 0.5, 2]),
    double_buffering=st.booleans(),
)
def test_optimal_nodes_is_the_smallest_number_that_communication_hides(
    target, unit, comm, update, post, ratio, parallel_post, double_buffering
):
    comm = ratio * (unit + update) if comm is None else comm
    minibatch = target * (2 if double_buffering else 1)
    found = optimal_nodes(
        minibatch=minibatch,
        t_frame=unit,
        t_post=post,
        t_comm_fp32=comm,
        t_update=update,
        compression_ratio=ratio,
        parallel_post=parallel_post,
        double_buffering=double_buffering,
    )
    frames = target * Fraction(unit) + Fraction(parallel_post) * Fraction(post)
    gap = Fraction(comm) / Fraction(ratio) - Fraction(update)  # frames / K <= gap, in exact numbers
    if gap <= 0:
        assert found == math.inf
    else:
        assert frames / found <= gap and (found == 1 or frames / (found - 1) > gap)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 8),  # (1000/2 * 1 ms + 20 ms) / (2.4 s / 32 - 5 ms) = 520 / 70 = 7.43
        ({"double_buffering": False}, 15),  # 1020 / 70 = 14.57
        ({"t_post": 0}, 8),  # 500 / 70 = 7.14
        ({"t_post": 0, "minibatch": 70, "t_frame": 1, "t_comm_fp32": 256, "t_update": 3}, 7),
        ({"t_comm_fp32": 32 * 0.525, "t_update": 0}, 1),  # 520 / 525
        ({"parallel_post": 4}, 9),  # 580 / 70 = 8.29
        ({"compression_ratio": 1}, 1),
        ({"t_update": 0.075}, math.inf),  # 2.4 s / 32 is a little less than this float
        ({"t_comm_fp32": 0}, math.inf),
        ({"minibatch": np.float64(1000)}, 8),
    ],
)
def test_optimal_nodes_by_hand(changed, expected):
    assert optimal_nodes(**BY_HAND | changed) == expected


# ---- links and models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "latency", "expected"),
    [
        ("1gbit", None, (1e9, 0.0)),
        ("100 Mbit/s", "0.1ms", (1e8, 1e-4)),
        ("2.5Gbps", "50us", (2.5e9, 5e-5)),
        ("40g", "2 s", (4e10, 2.0)),
        ("10gbe", None, (1e10, 5e-5)),
        ("10GbE", "1ms", (1e10, 1e-3)),
        ("inf", "0", (math.inf, 0.0)),
        ("1e9bit", "1e3ns", (1e9, 1e-6)),
    ],
)
def test_links_are_understood(text, latency, expected):
    link = parse_link(text, latency)
    assert (link.bits_per_s, link.latency_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text", ["", "fast", "1", "-1gbit", "0gbit", "1gb yte", "1.2.3gbit", "1 hour"]
)
def test_what_is_not_understood_lists_what_is(text):
    with pytest.raises(ValueError, match=rf"link {text!r} is not understood; .*Gbit.*10gbe"):
        parse_rate(text)
    with pytest.raises(ValueError, match=rf"time {text!r} is not understood; .*0\.1ms, 50us"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("format_one", "values", "expected"),
    [
        (format_rate, (1e9, 2.5e6, 12), ["1 Gbit/s", "2.5 Mbit/s", "12 bit/s"]),
        (format_seconds, (0, 0.1234, 2.5e-6, 12), ["0 s", "123 ms", "2.50 us", "12.0 s"]),
    ],
)
def test_quantities_are_written_with_units(format_one, values, expected):
    assert [format_one(value) for value in values] == expected


@pytest.mark.parametrize(
    ("name", "found", "gflops"),
    [
        ("lenet", "LeNet", 2 * (784 * 500 + 196 * 25_000 + 1_225_000 + 5000) / 1e9),
        ("resnet 50", "ResNet-50", 2 * 4.089),  # torchvision's table of weights, in multiply-adds
        ("VGG-16", "VGG-16", 2 * 15.47),
        ("bert", "BERT-base", 22.35),  # 2 * 85.05 M * 128 + 12 * 4 * 128^2 * 768, and the pooler
        ("gpt2", "GPT-2 small", 291.6),  # 2 * 123.5 M * 1024 + 12 * 4 * 1024^2 * 768
    ],
)
def test_models_are_found_with_their_flops(name, found, gflops):
    model = find_model(name)
    assert model.name == found and model.forward_flops / 1e9 == pytest.approx(gflops, rel=0.002)


# ---- bytes ---------------------------------------------------------------------------------------


def sent_nbytes(bucket):
    return sum(c.nbytes for c in bucket.collectives if c is not None)


@pytest.mark.parametrize("model", ["LeNet", "ResNet-50"])
@pytest.mark.parametrize("method", [m for m in METHODS if m.codec], ids=lambda m: m.name)
def test_bytes_are_those_of_the_bucket_plans(model, method):
    shapes, codec = find_model(model).parameters, method.codec
    strategy = Strategy(method.exchange, method.second_phase)
    for world_size, cap in ((2, None), (3, 0.5), (8, None), (17, 0.5)):
        planned = plan_buckets(method, shapes, world_size, bucket_cap_mb=cap)
        buckets, sent = ddp_buckets(codec, shapes, bucket_cap_mb=cap), 0
        for bucket, parameters in zip(planned, buckets, strict=True):
            slots, offset = [], 0
            for p in parameters:
                slots.append(Slot(p.index, p.numel, p.group_numel, p.compressed, offset))
                offset += p.numel
            plan = BucketPlan(codec, slots, strategy, world_size, 0, slicing=Slicing())
            assert (sent_nbytes(bucket), bucket.slices) == (plan.sent_nbytes, len(plan.slices))
            sent += plan.sent_nbytes
        if strategy == choose(codec, world_size, method.exchange):
            options = {"exchange": method.exchange, "bucket_cap_mb": cap}
            assert predict_bytes(codec, shapes, world_size, **options).sent == sent
        assert sorted(i for b in planned for i in b.parameters) == list(range(len(shapes)))


def test_ddps_own_all_reduce_sends_a_ring():
    for name, share in (("fp32", 1), ("bf16", 0.5)):
        planned = plan_buckets(find_method(name), find_model("LeNet").parameters, 8)
        sent = sum(map(sent_nbytes, planned))
        assert sent == pytest.approx(share * ring_bytes(1_256_080, 8), abs=4)
        assert {c.rounds for b in planned for c in b.collectives} == {14}


def test_thousands_of_ranks_are_quick_and_own_everything():
    bert = find_model("BERT-base")
    planned = plan_buckets(find_method("onebit reduce_scatter"), bert.parameters, 4096)
    assert sum(b.numel for b in planned) == bert.numel == 109_482_240
    assert 0 < sum(b.owned_numel for b in planned) < 109_482_240 / 4000


# ---- what is refused -----------------------------------------------------------------------------

NEGATIVE, NO_INTEGER = (-1.0, math.nan, math.inf), (True, 2.5)
NOT_POSITIVE = (0, *NEGATIVE)
work = partial(Workload, ONE, minibatch=1, t_frame=1)
step = partial(simulate, work(), method="fp32", nodes=2, link=Link(math.inf))
formula = partial(optimal_nodes, **BY_HAND)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        *((formula, n, NOT_POSITIVE) for n in ("minibatch", "t_frame", "compression_ratio")),
        *((formula, n, NEGATIVE) for n in ("t_post", "t_comm_fp32", "t_update", "parallel_post")),
        *((work, n, NEGATIVE) for n in ("t_frame", "t_update", "t_post")),
        *((work, n, NOT_POSITIVE) for n in ("minibatch", "bucket_cap_mb")),
        (work, "forward_share", (*NEGATIVE, 2)),
        (lambda flops: work(flops=(flops,)), "flops", NEGATIVE),
        (partial(Link, 1e9), "latency_s", NEGATIVE),
        (Link, "bits_per_s", (0, -1, math.nan)),
        (Stragglers, "jitter", (-1, 1e200, math.nan)),
        (Stragglers, "slow_share", (-1, 2, math.nan)),
        (Stragglers, "slow_factor", (0.5, math.nan, math.inf)),
        *((StageRate, n, NEGATIVE) for n in ("fixed_s", "per_payload_s", "per_value_s")),
        (lambda nats: Tolerance("sgd", {"nats": nats}), "nats", NEGATIVE),
        (lambda points: Tolerance("sgd", {"points": points}), "points", NEGATIVE),
        (Node, "ranks", (0, -1, *NO_INTEGER)),
        (partial(LocalSteps, 5), "fragments", (0, *NO_INTEGER)),
        (partial(LocalSteps, 5), "delay", (-1, *NO_INTEGER)),
        (LocalSteps, "every", (0, *NO_INTEGER)),
        (step, "nodes", (0, 4097, *NO_INTEGER)),
        (step, "cores", NOT_POSITIVE),
        (partial(predict, work(), Link(1e9)), "nodes", ([],)),
        (partial(predict, work(), Link(1e9), [2]), "methods", ([],)),
        (calibrate, "sizes", ((100,), ())),
        (calibrate, "world_sizes", ((6,), (3,))),
        (lambda shape: own_model("mine", [["w", shape]]), "shape", (3, [0], [2.5], [True])),
    ],
)
def test_a_bad_value_is_named(make, name, values):
    for value in values:
        message = rf"{name}\b.* must .*got {re.escape(repr(value))}"
        with pytest.raises(ValueError, match=message):
            make(**{name: value})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (partial(own_model, "mine", d), "shapes must")
            for d in ([], [["w"]], [[3, [3]]], ["ab"])
        ),
        (lambda: find_model("vgg19"), "unknown model 'vgg19'; there are LeNet.*mean VGG-16"),
        (lambda: find_model("resnet5"), "unknown model 'resnet5'; .*mean ResNet-50"),
        (lambda: find_model(""), "unknown model ''; there are LeNet"),
        (lambda: find_method("zip"), "unknown method 'zip'; there are fp32"),
        (lambda: step(method="zip"), "unknown method 'zip'"),
        (lambda: Workload((), 1, 1), "parameters must name at least one"),
        (lambda: Workload((("w", (10**10, 10**10)),), 1, 1), "parameters must hold at most"),
        (lambda: work(flops=()), "flops must have one entry per parameter"),
        (lambda: LocalSteps(3, 4), "4 fragments and a delay of 0 do not go into 3 steps"),
        (lambda: LocalSteps(3, 1, 3), "1 fragments and a delay of 3 do not go into 3 steps"),
        (lambda: step(method=LATE, double_buffering=True), "with local steps none is exchanged"),
        (lambda: step(method=LATE), "3 fragments of 1 tensors"),
        (lambda: Tolerance(""), "optimizer must be a name such as adamw, sgd or lamb, got ''"),
        (lambda: Tolerance("adam w"), "got 'adam w'"),
        (lambda: Tolerance("sgd", {"bits": 1}), "tolerances are in nats and points, got 'bits'"),
    ],
)
def test_what_is_refused_says_why(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("make", [formula, work])
def test_what_is_no_number_is_a_type_error(make):
    with pytest.raises(TypeError, match="t_frame must be a number, got '1ms'"):
        make(t_frame="1ms")


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        *((load_shapes, text, r"file\.json") for text in ("", "{}", '{"a": 1}', "[1")),
        *((Rates.load, text, r"file\.json does not hold") for text in ("", "[]", '{"fp32": 3}')),
        (Rates.load, '{"fp32": {"cast": {"speed": 3}}}', "speed"),
        (Rates.load, '{"bf16": {"cast": {"fixed_s": -3}}}', "fixed_s must be at least 0"),
        (Rates.load, '{"onebitt all_gather": {}}', "unknown method 'onebitt all_gather'"),
        (Rates.load, '{"onebit all_gather": {"encod": {}}}', "has no stage 'encod', only stat"),
        (Rates.load, '{"ternary exact": {}}', "'ternary exact' is 'terngrad exact' now"),
        (Rates.load, '{"rates": {"onebit all_gather": {}, "ternary all_gather": {}}}', "terngrad"),
        (Rates.load, '{"format": 3, "fp32": {}}', "format 3, expected 2"),
        (Rates.load, '{"": {}}', "unknown method ''"),
        (Rates.load, '{"bf16": {"encode": {}}}', "has no stage 'encode', only cast, uncast"),
        (Rates.load, '{"copies": {"apply": {}}}', "no stage 'apply', only to host, to device"),
    ],
)
def test_a_bad_file_is_named(load, text, message, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "file.json")
