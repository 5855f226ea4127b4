"""`bench allreduce`: sizes, rows over gloo and both MPIs, and wrong options."""

import json
import subprocess
import sys

import pytest
from _ranks import mpi_environment, mpi_python

from gradcomp.bench import allreduce

pytestmark = pytest.mark.slow

SHORT = ["--ranks", "2", "--sizes", "4K,256K", "--repeat", "3"]


def bench(python, *options):
    command = [python, "-m", "gradcomp.bench", "allreduce", *options]
    return subprocess.run(
        command, env=mpi_environment(), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "transport", ["gloo", "MPICH", pytest.param("Open MPI", marks=pytest.mark.long)]
)
def test_a_short_run_has_every_row(tmp_path, transport):
    python = (
        sys.executable
        if transport == "gloo"
        else mpi_python({"MPICH": "mpich", "Open MPI": "openmpi"}[transport])
    )
    over = "gloo" if transport == "gloo" else "mpi"
    done = bench(python, "--over", over, *SHORT, "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("262,144") == 3
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(r["nbytes"], r["codec"]) for r in rows] == [
        (n, c) for n in (4096, 262144) for c in ("fp32", "terngrad", "onebit")
    ]
    for r in rows:
        # at N = 2
        assert r["transport"] == transport and r["seconds"] > 0 and r["busbw"] == r["algbw"]
        least = {"fp32": 0, "terngrad": r["nbytes"] // 16, "onebit": r["nbytes"] // 32}[r["codec"]]
        assert least <= r["sent_nbytes"] <= least + 100 * bool(least)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4", 4), ("4K", 4096), ("1m", 1 << 20), ("100000000", 10**8)]
)
def test_sizes(text, nbytes):
    assert allreduce.sizes(f"{text},8") == [nbytes, 8]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--sizes", "3"],
            "'3' is not a list of sizes such as 4K,1M: a size must be a positive multiple of 4",
        ),
        (["--sizes", "-4"], "a size must be a positive multiple of 4 bytes"),
        (["--sizes", "x"], "'x' is not a list of sizes such as 4K,1M"),
        (["--ranks", "x"], "'x' is no list of integers such as 1,2,4"),
        (["--ranks", "1"], "at least 2 ranks"),
        (["--over", "nccl"], "--over takes gloo and mpi, got nccl"),
        (["--repeat", "0"], "and 1 repetition"),
        (["--codecs", "powersgd"], "--codecs takes terngrad and onebit, got powersgd"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        allreduce.parse(options)
    shown = capsys.readouterr().err
    assert error.value.code == 2 and said in shown and shown.count("\n") == 1


def test_without_an_mpi_the_answer_is_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(allreduce.importlib.util, "find_spec", lambda name: None)
    assert allreduce.main(["--over", "mpi"]) == 2
    assert "pip install 'gradcomp[mpi]'" in capsys.readouterr().err
