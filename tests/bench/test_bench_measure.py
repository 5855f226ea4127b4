"""bench codec, optim and ratio: they check before they measure, judge by stated limits,
write their files and refuse wrong options.
"""

import argparse
import dataclasses
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from _forks import python
from _ranks import output_of

from gradcomp.bench import codec, optim, ratio, timing
from gradcomp.bench.about import save_json
from gradcomp.bench.codec import Case, cases
from gradcomp.bench.models import LeNet
from gradcomp.codecs import EntropyCoded
from gradcomp.kernels import native
from gradcomp.plan.models import MODELS, find_model


def run(name, argv, folder):
    """Run a benchmark; return what it wrote, as read from its JSON file."""
    words = [*argv, "--json", str(folder / "x.json")]
    assert importlib.import_module(f"gradcomp.bench.{name}").main(words) == 0
    found = json.loads((folder / "x.json").read_text())
    assert found["machine"]["torch"] == torch.__version__
    return found


@pytest.mark.parametrize("portable", [True, False])
def test_the_portable_tier_is_not_judged(monkeypatch, capsys, portable):
    """Limits follow from memory's speed, which scalar kernels never reach."""
    monkeypatch.setattr(native, "tiers", lambda: [native.tier() if portable else "none"])
    slow = timing.Verdict("slow", 2.0, 1.0)
    assert timing.finish(argparse.Namespace(json=None), [slow]) == (0 if portable else 1)
    assert ("nothing is judged" in capsys.readouterr().out) == portable


def test_ratios_are_of_seconds_in_turn_and_the_median_counts(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    taken = iter([9.0, 1.0, 7.0, 1.0])  # the first warms up

    def take(seconds):
        now[0] += seconds

    case = Case("x", lambda: take(next(taken)), 8.0, [])
    found = codec.measure(case, lambda: take(2.0), 1 << 22, 3)
    assert found == {"ratio": 0.5, "gb_per_s": (1 << 24) / 1e9, "least_s": 1.0}


@pytest.mark.parametrize("target", ["/dev/null", "other.json"])
def test_a_result_goes_into_a_device_or_through_a_link(tmp_path, target):
    """The device or the link was replaced by a file: as root, /dev/null of the whole machine."""
    link, target = tmp_path / "x.json", tmp_path / target
    link.symlink_to(target)
    save_json(link, rows=[1])
    assert link.is_symlink() and target.is_char_device() == (target == Path("/dev/null"))
    if not target.is_char_device():
        assert json.loads(target.read_text())["rows"] == [1]


# ---- codec ---------------------------------------------------------------------------------------

KERNELS = {case.name: case.nbytes for case in cases(4096, torch.float32)}
DECAYED = [kernel for kernel in KERNELS if kernel.endswith(", decay")]


def kernel_row(kernel, threads, ratio, gain=1.0):
    """Return a row whose fastest repetition is `gain` times as fast as a second."""
    row = {"kernel": kernel, "threads": threads, "nbytes": KERNELS[kernel], "ratio": ratio}
    more = {"to_plain": 1.0} if kernel.endswith(", decay") else {}
    return row | {"least_s": 1 / gain} | more


@pytest.mark.parametrize(
    ("kernel", "nbytes"),  # read and written an element, payloads of 2, 1 and 8 bits
    [
        ("terngrad encode", 4.25),
        ("terngrad decode 4 own", 5.0),
        ("onebit encode", 12.125),
        ("onebit encode, decay", 12.125),
        ("onebit encode, one tensor", 16.125),
        ("block8 decode 1", 5.0),
        ("identity encode", 8.0),
        ("absmax + moments", 4.0),
    ],
)
def test_what_kernels_move(kernel, nbytes):
    assert KERNELS[kernel] == pytest.approx(nbytes, abs=0.03)  # headers and scales


@pytest.mark.parametrize("late", [None, *(k for k in KERNELS if k not in codec.UNJUDGED)])
def test_a_kernel_that_takes_more_than_it_moves_fails(late):
    """The limit is twice the kernel's bytes in memcpys, plus the arithmetic that is named; ternary
    encoding has 2 memcpys.
    """
    rows = []
    for kernel, nbytes in KERNELS.items():
        limit = 2.0 * (nbytes / 8 + codec.ARITHMETIC.get(kernel, 0.0))
        limit = 2.0 if kernel.startswith("ternary encode") else limit
        rows.append(kernel_row(kernel, 1, limit * (1.01 if kernel == late else 0.99)))
        rows.append(kernel_row(kernel, 2, limit, 1.6))
    found = codec.verdicts(rows, gain=10.1)
    assert [v.what for v in found if not v.passed] == ([f"{late} / memcpy"] if late else [])
    assert (
        len(found) == len(KERNELS) - len(codec.UNJUDGED) + len(DECAYED) + len(codec.THREAD_GAIN) + 1
    )


@pytest.mark.parametrize("late", DECAYED)
def test_a_decay_that_takes_time_fails(late):
    """At most 5 % more than without it."""
    rows = [kernel_row(k, 1, 0.1) | {"to_plain": 1.06 if k == late else 1.04} for k in DECAYED]
    failed = [v.what for v in codec.verdicts(rows, gain=10.1) if not v.passed]
    assert failed == [f"{late} / {late.removesuffix(', decay')}"]


@pytest.mark.parametrize("kernel", codec.THREAD_GAIN)
def test_two_threads_and_torch_are_judged(kernel):
    rows = [kernel_row(k, 1, 0.1) for k in KERNELS]
    for k, least in codec.THREAD_GAIN.items():
        rows.append(kernel_row(k, 2, 0.1, least + (-0.05 if k == kernel else 0.05)))
    failed = [v.what for v in codec.verdicts(rows, gain=9.9) if not v.passed]
    assert failed == [f"{kernel}, two threads over one", "terngrad encode over torch"]


def test_every_kernel_is_right_when_those_before_it_have_run_several_times():
    """One case wrote into the payload that the next one decodes: the benchmark stopped at a
    difference that was its own.
    """
    for case in cases(4096, torch.float32):
        case.run(), case.run()
        assert case.is_right(), case.name


def test_a_kernel_that_differs_between_tiers_is_not_timed(monkeypatch):
    result = torch.zeros(4)
    wrong = Case("wrong", lambda: result.add_(1), 8.0, [result])
    monkeypatch.setattr(codec, "cases", lambda numel, dtype: [wrong])
    with pytest.raises(SystemExit, match="wrong on tier .* differs from the portable tier"):
        codec.main(["--sizes", "4"])


def test_codec_runs_small(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(codec, "ELEMENTS", 1 << 17)
    argv = ["--sizes", "65537", "--dtypes", "bfloat16", "--threads", "1,2", "--repeat", "1"]
    found = run("codec", argv, tmp_path)
    assert "x memcpy" in capsys.readouterr().out
    assert len(found["rows"]) == 2 * len(native.tiers()) * len(KERNELS)
    assert all(r["ratio"] > 0 and r["gb_per_s"] > 0 for r in found["rows"])
    assert found["check"] == [] and found["terngrad_encode_over"]["torch"] > 0


@pytest.mark.parametrize(("load", "threads"), [(0.2, [1, 2]), (1.0, [1])])
def test_two_threads_are_judged_where_two_cores_are_free(monkeypatch, capsys, load, threads):
    monkeypatch.setattr(codec.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(codec.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert codec.read_options(["--check"]).threads == threads
    assert ("1.0 cores are free" in capsys.readouterr().out) == (threads == [1])


# ---- optim ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_optim_runs_small_and_counts_bytes(tmp_path, capsys):
    found = run("optim", ["--numel", "65600", "--repeat", "1"], tmp_path)
    assert "bytes a weight" in capsys.readouterr().out
    parts = ("weight_bytes", "state_bytes", "gradient_bytes")
    rows = {(r["optimizer"], r["contender"]): r for r in found["rows"]}
    nbytes = {key: tuple(round(r[part], 1) for part in parts) for key, r in rows.items()}
    assert found["numel"] == 65600
    assert nbytes["SGD", "torch fused fp32"] == (4, 0, 4)
    assert nbytes["AdamW", "torch foreach fp32"] == (4, 8, 4)
    weights, state, gradient = nbytes["Adagrad", "split"]
    assert (state, gradient) == (4, 2)
    assert 4 <= weights < 4.2  # trails begin up to 4 KB into their memory
    assert nbytes["SGD from payloads", "2 payloads, straight"][2] == 0
    assert all(r["ms"] > 0 and r["memcpys"] > 0 for r in found["rows"])


@pytest.mark.slow
def test_a_wrong_optimizer_is_not_timed(monkeypatch):
    """The check before the clock starts notices a learning rate that is off in one tier."""
    rates = iter([optim.LR, optim.LR * (1 + 1e-6)])
    wrong = lambda p, lr: optim.SplitAdamW(p, lr=next(rates))
    monkeypatch.setitem(optim.OPTIMIZERS, "AdamW", (wrong, None, {"lr": optim.LR}))
    with pytest.raises(SystemExit, match="split AdamW differs from the portable tier"):
        optim.main(["--numel", "64"])


@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_limits_of_optimizers(factor):
    """The limit is 1.5 times what a step moves over what the other one moves, and 4.01 bytes."""
    state, copies = 0.02 * (factor > 1), 1.875 * factor
    split = {"contender": "split", "memcpys": copies, "weight_bytes": 4.0, "state_bytes": state}
    rows = [{"optimizer": name, **split} for name, *_ in optim.MOVES]
    for name, beside, moved, other in optim.MOVES:
        ratio = 1.5 * factor * moved / other
        rows.append({"optimizer": name, "contender": beside, "ratio": ratio})
    found = optim.verdicts(rows)
    assert [v.passed for v in found] == [factor < 1] * (len(optim.MOVES) + 1)


# ---- ratio ---------------------------------------------------------------------------------------

PUBLISHED = {  # values, tensors, and a few (name, shape) that only the real model has
    "LeNet": (1_256_080, 8, {"fc1.weight": (500, 2450)}),
    "ResNet-50": (25_557_032, 161, {"layer4.0.downsample.0.weight": (2048, 1024, 1, 1)}),
    "VGG-16": (138_357_544, 32, {"classifier.0.weight": (4096, 25088)}),
    "BERT-base": (109_482_240, 199, {"encoder.layer.11.output.dense.weight": (768, 3072)}),
    "GPT-2 small": (124_439_808, 148, {"h.0.attn.c_attn.weight": (768, 2304), "ln_f.bias": (768,)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_lists_are_the_published_ones(name):
    numel, tensors, some = PUBLISHED[name]
    model = find_model(name)
    assert model.numel == numel
    assert len(model.parameters) == len(dict(model.parameters)) == tensors
    assert some.items() <= dict(model.parameters).items()


def test_lenet_list_is_the_module():
    module = tuple((name, tuple(p.shape)) for name, p in LeNet().named_parameters())
    assert find_model("LeNet").parameters == module


@pytest.fixture(scope="module")
def rows():
    return ratio.count(["LeNet", "ResNet-50"])


def test_promised_ratios_hold(rows):
    checks = ratio.check_ratios(rows)
    assert len(checks) == 8
    assert [c for c in checks if not c.passed] == []


@pytest.mark.slow
def test_ratios_are_near_the_bits_of_the_design(rows):
    bits = {  # sent per element and rank, N = 8
        "fp32 (Identity)": 7 / 8 * 64,
        "terngrad all_gather": 7 * 2,
        "terngrad exact": 7 / 8 * (2 + 5),
        "terngrad block4": 7 / 8 * (2 + 4),
        "terngrad requantize": 7 / 8 * (2 + 2),
        "terngrad own requantize": 7 / 8 * (2 + 2),
        "ternary all_gather": 7 * 2,
        "ternary reduce_scatter": 7 / 8 * (2 + 2),
        "onebit all_gather": 7,
        "onebit reduce_scatter": 7 / 8 * 2,
        **{f"block{bits} all_gather": 7 * bits for bits in (2, 4, 8)},
        **{f"block{bits} reduce_scatter": 7 / 8 * 2 * bits for bits in (2, 4, 8)},
        "entropy all_gather": 7 * EntropyCoded().form.bits,
        "entropy reduce_scatter": 7 / 8 * 2 * EntropyCoded().form.bits,
        **{f"entropy:bits={bits:g} all_gather": 7 * bits for bits in (1.25, 3.2)},
        **{f"entropy:bits={bits:g} reduce_scatter": 7 / 8 * 2 * bits for bits in (1.25, 3.2)},
    }
    for row in rows:
        if row["world_size"] == 8:
            numel = find_model(row["model"]).numel
            assert row["baseline_bytes"] >= math.ceil(7 / 8 * 8 * numel)
            extra = row["bytes_sent"] / (bits[row["scheme"]] * numel / 8)
            # scales, headers and vectors in fp32 cost a little, and never nothing
            assert 1.0 <= extra < 1.15, (row, extra)


@pytest.mark.parametrize(
    ("scheme", "world_size", "failing"),
    [
        ("terngrad requantize", 8, "at least 15x"),
        ("onebit reduce_scatter", 64, "flat"),
        ("terngrad exact", 16, "follows"),
    ],
)
def test_a_broken_promise_fails(rows, scheme, world_size, failing):
    worse = [dict(row) for row in rows]
    for row in worse:
        if (row["scheme"], row["world_size"]) == (scheme, world_size):
            row["compression_ratio"] *= 0.85
    failed = [c.name for c in ratio.check_ratios(worse) if not c.passed]
    assert any(failing in name and name.startswith(scheme) for name in failed), failed
    assert all(name.startswith(scheme) for name in failed)


@pytest.mark.slow
def test_predictions_equal_what_gloo_counted_to_the_byte(monkeypatch):
    """Those of every other scheme are a byte off here."""
    true, schemes = ratio.predict_bytes, list(ratio.SCHEMES.values())

    def predict(codec, *args, exchange, **kwargs):
        n = true(codec, *args, exchange=exchange, **kwargs)
        return dataclasses.replace(n, sent=n.sent + schemes.index((codec, exchange)) % 2)

    monkeypatch.setattr(ratio, "predict_bytes", predict)
    assert [c.passed for c in ratio.verify()] == [k % 2 == 0 for k in range(len(schemes))]


@pytest.mark.slow
def test_ratio_as_a_program_writes_its_files(tmp_path):
    options = ["--no-verify", "--check", "--models", "LeNet"]
    options += ["--json", tmp_path / "r.json", "--plot", tmp_path / "r.png"]
    done = output_of(*python(), "-m", "gradcomp.bench", "ratio", *options)
    assert done.returncode == 0, done.stderr
    assert "1,256,080 parameters" in done.stdout
    assert done.stdout.count("pass ") == 8 and "FAIL" not in done.stdout
    assert "…" not in done.stdout, "the table is cut at 80 columns"
    report = json.loads((tmp_path / "r.json").read_text())
    assert len(report["rows"]) == len(ratio.SCHEMES) * len(ratio.WORLD_SIZES)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_failed_check_is_the_exit_status(monkeypatch, capsys):
    failed = ratio.Check("made to fail", False, "1.00x")
    monkeypatch.setattr(ratio, "check_ratios", lambda rows: [failed])
    assert ratio.main(["--no-verify", "--check", "--models", "LeNet"]) == 1
    assert "FAIL  made to fail: 1.00x" in capsys.readouterr().out
