"""bench codec: it checks before it times, judges by what kernels move, and writes its files."""

import argparse
import json

import pytest
import torch

from gradcomp.bench import codec, timing
from gradcomp.bench.kernels import Case, cases
from gradcomp.kernels import native

KERNELS = {case.name: case.nbytes for case in cases(4096, torch.float32)}


def row(kernel, threads, ratio, gain=1.0):
    """Return a row whose fastest repetition is `gain` times as fast as a second."""
    size = ("float32", 1 << 26, threads)
    return codec.Row(kernel, "avx2", *size, KERNELS[kernel], ratio, 1.0, least_s=1 / gain)


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
    """The limit is twice the kernel's bytes in memcpys, plus the arithmetic that is named."""
    rows = []
    for kernel, nbytes in KERNELS.items():
        limit = 2.0 * (nbytes / 8 + codec.ARITHMETIC.get(kernel, 0.0))
        rows.append(row(kernel, 1, limit * (1.01 if kernel == late else 0.99)))
        rows.append(row(kernel, 2, limit, 1.3))
    found = codec.verdicts(rows, gain=10.1)
    assert [v.what for v in found if not v.passed] == ([f"{late} / memcpy"] if late else [])
    assert len(found) == len(KERNELS) - len(codec.UNJUDGED) + len(codec.THREAD_GAIN) + 1


@pytest.mark.parametrize("kernel", codec.THREAD_GAIN)
def test_two_threads_and_torch_are_judged(kernel):
    rows = [row(k, 1, 0.1) for k in KERNELS] + [row(k, 2, 0.1, 1.3) for k in codec.THREAD_GAIN]
    rows += [row(kernel, 2, 0.1, 1.05)]
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


def test_it_runs_small_and_writes_its_files(tmp_path, capsys):
    argv = ["--sizes", "1000,4096", "--dtypes", "bfloat16", "--threads", "1,2", "--repeat", "1"]
    files = ["--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png")]
    assert codec.main([*argv, *files]) == 0
    assert "x memcpy" in capsys.readouterr().out
    found = json.loads((tmp_path / "c.json").read_text())
    assert len(found["rows"]) == 2 * 2 * len(native.tiers()) * len(KERNELS)
    assert all(r["ratio"] > 0 and r["gb_per_s"] > 0 for r in found["rows"])
    assert found["check"] == [] and found["terngrad_encode_over"]["torch"] > 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("load", "threads"), [(0.2, [1, 2]), (1.0, [1])])
def test_two_threads_are_judged_where_two_cores_are_free(monkeypatch, capsys, load, threads):
    monkeypatch.setattr(codec.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(codec.os, "getloadavg", lambda: (load, 0.0, 0.0))
    assert codec.parse(["--check"]).threads == threads
    assert ("1.0 cores are free" in capsys.readouterr().out) == (threads == [1])


@pytest.mark.parametrize(
    "argv",
    [["--dtypes", "float8"], ["--tiers", "mmx"], ["--sizes", "0"], ["--threads", "0"]],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as error:
        codec.main(argv)
    assert error.value.code == 2
    assert "bench codec: " in capsys.readouterr().err


@pytest.mark.parametrize("portable", [True, False])
def test_the_portable_tier_is_not_judged(monkeypatch, capsys, portable):
    """Limits follow from memory's speed, which scalar kernels never reach."""
    monkeypatch.setattr(native, "tiers", lambda: [native.tier() if portable else "none"])
    args = argparse.Namespace(json=None)
    assert timing.finish(args, {}, [timing.Verdict("slow", 2.0, 1.0)]) == (0 if portable else 1)
    assert ("nothing is judged" in capsys.readouterr().out) == portable
