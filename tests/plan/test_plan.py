"""The planner's arithmetic: the optimal node count, links, models, bytes, and what is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcomp.comm.rounds import ring_bytes
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose, ddp_buckets, predict_bytes
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
from gradcomp.plan.models import MODELS, load_shapes

ONE = (("w", (1000, 1000)),)
WORK, FAST, GATHERED = Workload(ONE, 1, 1), Link(math.inf), find_method("terngrad all_gather")
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
        (
            {"t_post": 0, "minibatch": 70, "t_frame": 1, "t_comm_fp32": 256, "t_update": 3},
            7,
        ),  # 35/5
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


@pytest.mark.parametrize("name", [*BY_HAND, "compression_ratio", "parallel_post"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, 0, "1ms"])
def test_a_bad_number_is_named(name, value):
    if value == 0 and name not in ("minibatch", "t_frame", "compression_ratio"):
        assert optimal_nodes(**BY_HAND | {name: value})
        return
    error, must = (TypeError, "a number") if value == "1ms" else (ValueError, ".*")
    with pytest.raises(error, match=rf"{name} must be {must}.*, got {value!r}"):
        optimal_nodes(**BY_HAND | {name: value})


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


@pytest.mark.parametrize("model", ["LeNet", "ResNet-50"])
@pytest.mark.parametrize("method", [m for m in METHODS if m.codec], ids=lambda m: m.name)
def test_bytes_are_those_of_the_bucket_plans(model, method):
    shapes, codec = MODELS[model](), method.codec
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
            assert (bucket.sent_nbytes, bucket.slices) == (plan.sent_nbytes, len(plan.slices))
            sent += plan.sent_nbytes
        if strategy == choose(codec, world_size, method.exchange):
            options = {"exchange": method.exchange, "bucket_cap_mb": cap}
            assert predict_bytes(codec, shapes, world_size, **options).sent == sent
        assert sorted(i for b in planned for i in b.parameters) == list(range(len(shapes)))


def test_ddps_own_all_reduce_sends_a_ring():
    for name, share in (("fp32", 1), ("bf16", 0.5)):
        planned = plan_buckets(find_method(name), MODELS["LeNet"](), 8)
        sent = sum(b.sent_nbytes for b in planned)
        assert sent == pytest.approx(share * ring_bytes(1_256_080, 8), abs=4)
        assert {c.rounds for b in planned for c in b.collectives} == {14}


def test_thousands_of_ranks_are_quick_and_own_everything():
    planned = plan_buckets(find_method("onebit reduce_scatter"), MODELS["BERT-base"](), 4096)
    assert sum(b.numel for b in planned) == 109_482_240
    assert 0 < sum(b.owned_numel for b in planned) < 109_482_240 / 4000


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *(
            (lambda d=d: own_model("mine", d), "shape")
            for d in ([], [["w"]], [["w", 3]], [["w", [0]]])
        ),
        *(
            (lambda d=d: own_model("mine", d), "shape")
            for d in ([["w", [2.5]]], [[3, [3]]], ["ab"])
        ),
        (
            lambda: find_model("vgg19"),
            "unknown model 'vgg19'; there are LeNet.*did you mean VGG-16",
        ),
        (lambda: find_model(""), "unknown model ''; there are LeNet"),
        (lambda: find_method("zip"), "unknown method 'zip'; there are fp32"),
        (
            lambda: plan_buckets(METHODS[0], ONE, 2, bucket_cap_mb=0),
            "bucket_cap_mb must be .* got 0",
        ),
        (lambda: Link(0), "bits_per_s must be positive, got 0"),
        (lambda: Link(math.nan), "bits_per_s must be positive, got nan"),
        (lambda: Link(1e9, -1), "latency_s must be at least 0 and finite, got -1"),
        (lambda: Link(1e9, math.inf), "latency_s must be at least 0 and finite, got inf"),
        *((lambda n=n: Node(n), "ranks of a node must be an integer") for n in (0, -1, True, 1.5)),
        (lambda: Workload((), 1, 1), "parameters must name at least one"),
        (lambda: Workload((("w", (10**10, 10**10)),), 1, 1), "parameters must hold at most"),
        (lambda: Workload(ONE, 0, 1), "minibatch must be positive and finite, got 0"),
        (lambda: Workload(ONE, 1, -1), "t_frame must be at least 0 and finite, got -1"),
        (lambda: Workload(ONE, 1, 1, t_update=math.inf), "t_update must be at least 0 .* got inf"),
        (lambda: Workload(ONE, 1, 1, forward_share=2), "forward_share must be in"),
        (lambda: Workload(ONE, 1, 1, flops=()), "flops must have one entry per parameter"),
        (lambda: Workload(ONE, 1, 1, flops=(-1.0,)), "flops must be at least 0 .* got -1.0"),
        (lambda: Workload(ONE, 1, 1, flops=(math.nan,)), "flops must be at least 0 .* got nan"),
        (lambda: Workload(ONE, 1, 1, bucket_cap_mb=0), "bucket_cap_mb must be positive .* got 0"),
        (lambda: Workload(ONE, 1, 1, bucket_cap_mb=math.inf), "bucket_cap_mb must be .* got inf"),
        (lambda: Stragglers(jitter=-1), r"jitter must be in \[0, 10\], got -1"),
        (lambda: Stragglers(jitter=1e200), r"jitter must be in \[0, 10\], got 1e\+200"),
        (lambda: Stragglers(slow_share=2), "slow_share must be in"),
        (lambda: Stragglers(slow_factor=0.5), "slow_factor must be at least 1 .* got 0.5"),
        (lambda: StageRate(-1.0), "fixed_s must be at least 0 and finite, got -1.0"),
        *(
            (lambda n=n: LocalSteps(*n), "must be an integer")
            for n in ((0,), (True,), (2.5,), (3, 1, -1))
        ),
        *((lambda n=n: LocalSteps(*n), "do not go into") for n in ((3, 4), (3, 1, 3))),
        *(
            (lambda n=n: simulate(WORK, "fp32", n, FAST), "from 1 to 4096, got")
            for n in (0, 4097, 2.0)
        ),
        (lambda: simulate(WORK, "zip", 2, FAST), "unknown method 'zip'"),
        (lambda: simulate(WORK, "fp32", 2, FAST, cores=0), "cores must be positive .* got 0"),
        (
            lambda: simulate(WORK, GATHERED.after(LocalSteps(2)), 2, FAST, double_buffering=True),
            "with local steps none is exchanged",
        ),
        (
            lambda: simulate(WORK, GATHERED.after(LocalSteps(9, 3)), 2, FAST),
            "3 fragments of 1 tensors",
        ),
        (lambda: predict(WORK, FAST, []), "nodes must name at least one"),
        (lambda: predict(WORK, FAST, [2], methods=[]), "methods must name at least one"),
        (lambda: calibrate(sizes=(100,)), r"sizes must be multiples of 512, got \(100,\)"),
        (lambda: calibrate(world_sizes=(6,)), "world_sizes must be powers of two"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        *((load_shapes, text, r"file\.json") for text in ("", "{}", '{"a": 1}', "[1")),
        *(
            (Rates.load, text, r"file\.json does not hold rates")
            for text in ("", "[]", '{"fp32": 3}')
        ),
        (Rates.load, '{"fp32": {"cast": {"speed": 3}}}', "speed"),
        (Rates.load, '{"bf16": {"cast": {"fixed_s": -3}}}', "fixed_s must be at least 0"),
        (Rates.load, '{"onebitt all_gather": {}}', "unknown method 'onebitt all_gather'"),
        (Rates.load, '{"onebit all_gather": {"encod": {}}}', "has no stage 'encod', only stat"),
        (Rates.load, '{"bf16": {"encode": {}}}', "has no stage 'encode', only cast, uncast"),
    ],
)
def test_a_bad_file_is_named(load, text, message, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "file.json")
