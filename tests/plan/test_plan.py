"""The planner's arithmetic: the optimal node count, links, models, bytes."""

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from gradcomp.comm.rounds import ring_bytes
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose, ddp_buckets, predict_bytes
from gradcomp.exchange.slices import Slicing
from gradcomp.payload.pieces import Slot
from gradcomp.plan import find_model, optimal_nodes, own_model, parse_link
from gradcomp.plan.costs import METHODS, find_method, plan_buckets
from gradcomp.plan.links import Link, format_rate, format_seconds, parse_rate, parse_seconds
from gradcomp.plan.models import MODELS, load_shapes

# ---- optimal node count --------------------------------------------------------------------------


def brute_force(settings):
    """Return the smallest K among those with the least max(T_calc(K), T_comm), by trying them;
    inf: there is no least one.
    """
    of = {name: Fraction(value) for name, value in settings.items()}
    comm, update = of["t_comm_fp32"] / of["compression_ratio"], of["t_update"]
    frames = of["minibatch"] * of["t_frame"] / (2 if settings["double_buffering"] else 1)
    if comm <= update:
        return math.inf  # T_calc(K) > T_upd >= T_comm for all K: a larger K is always better
    best, best_nodes = None, 0
    for nodes in range(1, 20_000):
        calc = (frames + of["parallel_post"] * of["t_post"]) / nodes + update
        longest = max(calc, comm)
        if best is None or longest < best:
            best, best_nodes = longest, nodes
        if longest == comm:  # no K has less, and none that follows is smaller
            return best_nodes
    raise AssertionError("the settings of these tests have an answer below 20000")


def random_settings(number):
    draw = random.Random(number)
    double_buffering = draw.random() < 0.5
    if number % 3 == 0:  # K^ is an integer in exact arithmetic on integers
        target, gap = draw.randint(1, 300), draw.randint(1, 50)
        update = draw.randint(0, 20)
        minibatch = 2 * target * gap if double_buffering else target * gap
        return {
            "minibatch": minibatch,
            "t_frame": 1,
            "t_post": 0,
            "t_comm_fp32": 32 * (gap + update),
            "t_update": update,
            "compression_ratio": 32,
            "parallel_post": 1,
            "double_buffering": double_buffering,
        }, target
    if number % 3 == 1:  # near an integer, where floats round
        target, unit = draw.randint(1, 300), draw.choice([0.1, 0.3, 0.7, 1e-3])
        return {
            "minibatch": 2.0 * target if double_buffering else float(target),
            "t_frame": unit,
            "t_post": 0.0,
            "t_comm_fp32": unit * 32,
            "t_update": 0.0,
            "compression_ratio": 32.0,
            "parallel_post": 1.0,
            "double_buffering": double_buffering,
        }, None
    return {
        "minibatch": draw.choice([32, 256, 1024, 2880.0]),
        "t_frame": 10 ** draw.uniform(-5, -2),
        "t_post": draw.choice([0, 0.0182, 1e-3]),
        "t_comm_fp32": 10 ** draw.uniform(-1, 1.5),
        "t_update": draw.choice([0, 1e-3, 0.009]),
        "compression_ratio": draw.choice([1, 2.0, 15.8, 29.1, 32.0]),
        "parallel_post": draw.choice([0, 0.5, 1.0, 2]),
        "double_buffering": double_buffering,
    }, None


@pytest.mark.slow
def test_optimal_nodes_is_the_brute_force_optimum():
    infinite = 0
    for number in range(1000):
        settings, known = random_settings(number)
        found = optimal_nodes(**settings)
        assert found == brute_force(settings), settings
        assert known is None or found == known, settings
        infinite += math.isinf(found)
    assert 5 < infinite < 500


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, 8),  # (1000/2 * 1 ms + 20 ms) / (2.4 s / 32 - 5 ms) = 520 / 70 = 7.43
        ({"double_buffering": False}, 15),  # 1020 / 70 = 14.57
        ({"t_post": 0}, 8),  # 500 / 70 = 7.14
        ({"t_comm_fp32": 32 * 0.525, "t_update": 0}, 1),  # 520 / 525
        ({"parallel_post": 4}, 9),  # 580 / 70 = 8.29
        ({"compression_ratio": 1}, 1),
        ({"t_update": 0.075}, math.inf),  # 2.4 s / 32 is a little less than this float
        ({"t_update": 0.08}, math.inf),
        ({"t_comm_fp32": 0}, math.inf),
        ({"minibatch": np.float64(1000)}, 8),
    ],
)
def test_optimal_nodes_by_hand(changed, expected):
    settings = {
        "minibatch": 1000,
        "t_frame": 1e-3,
        "t_post": 0.02,
        "t_comm_fp32": 2.4,
        "t_update": 0.005,
    }
    assert optimal_nodes(**settings | changed) == expected


@pytest.mark.parametrize(
    "name",
    [
        "minibatch",
        "t_frame",
        "t_post",
        "t_comm_fp32",
        "t_update",
        "compression_ratio",
        "parallel_post",
    ],
)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bad_number_is_named(name, value):
    settings = {"minibatch": 1, "t_frame": 1, "t_post": 0, "t_comm_fp32": 1, "t_update": 0} | {
        name: value
    }
    with pytest.raises(ValueError, match=rf"{name} must be .*, got {value}"):
        optimal_nodes(**settings)


@pytest.mark.parametrize("name", ["minibatch", "t_frame", "compression_ratio"])
def test_zero_is_refused_where_it_means_nothing(name):
    settings = {"minibatch": 1, "t_frame": 1, "t_post": 0, "t_comm_fp32": 1, "t_update": 0} | {
        name: 0
    }
    with pytest.raises(ValueError, match=f"{name} must be positive and finite, got 0"):
        optimal_nodes(**settings)


def test_what_is_no_number_is_a_type_error():
    with pytest.raises(TypeError, match="t_frame must be a number, got '1ms'"):
        optimal_nodes(minibatch=1, t_frame="1ms", t_post=0, t_comm_fp32=1, t_update=0)


# ---- links ---------------------------------------------------------------------------------------


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
    "text", ["", "fast", "1", "-1gbit", "0gbit", "1gb yte", "nan", "1.2.3gbit"]
)
def test_a_rate_that_is_not_understood_lists_what_is(text):
    with pytest.raises(ValueError, match="understood") as caught:
        parse_rate(text)
    assert (
        repr(text) in str(caught.value)
        and "gbit" in str(caught.value)
        and "10gbe" in str(caught.value)
    )


@pytest.mark.parametrize("text", ["", "1", "-1ms", "1 hour", "ms"])
def test_a_time_that_is_not_understood_lists_what_is(text):
    with pytest.raises(ValueError, match="0.1ms, 50us"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0,), "bits_per_s"),
        ((1e9, -1), "latency_s"),
        ((math.nan,), "bits_per_s"),
        ((1e9, math.inf), "latency_s"),
    ],
)
def test_a_bad_link_is_refused(arguments, name):
    with pytest.raises(ValueError, match=f"{name} must be"):
        Link(*arguments)


def test_quantities_are_written_with_units():
    assert [format_rate(r) for r in (1e9, 2.5e6, 12)] == ["1 Gbit/s", "2.5 Mbit/s", "12 bit/s"]
    assert [format_seconds(s) for s in (0, 0.1234, 2.5e-6, 12)] == [
        "0 s",
        "123 ms",
        "2.50 us",
        "12.0 s",
    ]


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gflops"),
    [
        ("LeNet", 2 * (784 * 500 + 196 * 25_000 + 1_225_000 + 5000) / 1e9),
        ("ResNet-50", 2 * 4.089),  # torchvision's table of weights, in multiply-adds
        ("VGG-16", 2 * 15.47),
        ("BERT-base", 22.35),  # 2 * 85.05 M * 128 + 12 * 4 * 128^2 * 768, and the pooler
        ("GPT-2 small", 291.6),  # 2 * 123.5 M * 1024 + 12 * 4 * 1024^2 * 768
    ],
)
def test_forward_flops(name, gflops):
    assert find_model(name).forward_flops / 1e9 == pytest.approx(gflops, rel=0.002)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("vgg16", "VGG-16"),
        ("VGG-16", "VGG-16"),
        ("resnet 50", "ResNet-50"),
        ("bert", "BERT-base"),
        ("gpt2", "GPT-2 small"),
    ],
)
def test_model_names_are_forgiving(name, found):
    assert find_model(name).name == found


@pytest.mark.parametrize(
    ("name", "hint"), [("vgg19", "did you mean VGG-16"), ("", "LeNet"), ("alexnet", "GPT-2 small")]
)
def test_an_unknown_model_lists_the_known(name, hint):
    with pytest.raises(ValueError, match=hint):
        find_model(name)


@pytest.mark.parametrize(
    "bad", [[], [["w"]], [["w", 3]], [["w", [0]]], [["w", [2.5]]], [[3, [3]]], ["ab"]]
)
def test_bad_shapes_are_refused(bad):
    with pytest.raises(ValueError, match="shape"):
        own_model("mine", bad)


@pytest.mark.parametrize("text", ["", "{}", '{"a": 1}', "[1"])
def test_a_bad_file_of_shapes_is_refused(text, tmp_path):
    (tmp_path / "shapes.json").write_text(text)
    with pytest.raises(ValueError, match=r"shapes\.json"):
        load_shapes(tmp_path / "shapes.json")


# ---- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["LeNet", "ResNet-50"])
@pytest.mark.parametrize("method", [m for m in METHODS if m.codec], ids=lambda m: m.name)
def test_bytes_are_those_of_the_bucket_plans(model, method):
    shapes, codec = MODELS[model](), method.codec
    strategy = Strategy(method.exchange, method.second_phase)
    for world_size, rank in ((2, 0), (2, 1), (3, 2), (8, 0), (17, 16)):
        for cap in (None, 0.5):
            planned = plan_buckets(method, shapes, world_size, rank=rank, bucket_cap_mb=cap)
            sent = 0
            for bucket, parameters in zip(
                planned, ddp_buckets(codec, shapes, bucket_cap_mb=cap), strict=True
            ):
                slots, offset = [], 0
                for p in parameters:
                    slots.append(Slot(p.index, p.numel, p.group_numel, p.compressed, offset))
                    offset += p.numel
                plan = BucketPlan(codec, slots, strategy, world_size, rank, slicing=Slicing())
                assert (bucket.sent_nbytes, bucket.slices) == (plan.sent_nbytes, len(plan.slices))
                sent += plan.sent_nbytes
            if strategy == choose(codec, world_size, method.exchange):
                said = predict_bytes(
                    codec,
                    shapes,
                    world_size,
                    exchange=method.exchange,
                    rank=rank,
                    bucket_cap_mb=cap,
                )
                assert said.sent == sent
            assert sorted(i for b in planned for i in b.parameters) == list(range(len(shapes)))


def test_ddps_own_all_reduce_sends_a_ring():
    shapes = MODELS["LeNet"]()
    for name, share in (("fp32", 1), ("bf16", 0.5)):
        sent = sum(b.sent_nbytes for b in plan_buckets(find_method(name), shapes, 8))
        assert sent == pytest.approx(share * ring_bytes(1_256_080, 8), abs=4)
        assert {
            c.rounds for b in plan_buckets(find_method(name), shapes, 8) for c in b.collectives
        } == {14}


def test_thousands_of_ranks_are_quick_and_own_everything():
    planned = plan_buckets(find_method("onebit reduce_scatter"), MODELS["BERT-base"](), 4096)
    assert sum(b.numel for b in planned) == 109_482_240
    assert 0 < sum(b.owned_numel for b in planned) < 109_482_240 / 4000


def test_unknown_methods_and_caps_are_refused():
    with pytest.raises(ValueError, match="unknown method 'zip'; there are fp32"):
        find_method("zip")
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive, got 0"):
        plan_buckets(METHODS[0], MODELS["LeNet"](), 2, bucket_cap_mb=0)
