"""`bench allreduce`: sizes, rows over gloo and both MPIs, verdicts, and a wrong result that ends
it.
"""

import json
import subprocess
import sys

import pytest
import torch
from _ranks import mpi_environment, mpi_python, run_local

from gradcomp.bench import allreduce, allreduce_ranks
from gradcomp.bench.allreduce_ranks import Row

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
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    done = bench(python, "--over", "gloo" if transport == "gloo" else "mpi", *SHORT, *files)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(r["nbytes"], r["codec"]) for r in rows] == [
        (n, c) for n in (4096, 262144) for c in ("fp32", "terngrad", "onebit")
    ]
    for r in rows:
        assert (
            r["transport"] == transport and r["seconds"] > 0 and r["busbw"] == r["algbw"]
        )  # at N = 2
        least = {"fp32": 0, "terngrad": r["nbytes"] // 16, "onebit": r["nbytes"] // 32}[r["codec"]]
        assert least <= r["sent_nbytes"] <= least + 100 * bool(least)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def off_by_one_bit(comm):
    def library(tensor):
        everyone = [allreduce_ranks.values(rank, tensor.numel()) for rank in range(comm.world_size)]
        return tensor.copy_(torch.stack(everyone).sum(0))

    packed = allreduce_ranks._packed

    def spoiled(comm, codec):
        average = packed(comm, codec)

        def run(tensor):
            average(tensor)
            if comm.rank == 1:
                tensor.view(torch.int32)[-1] ^= 1

        return run

    rows = []
    for make in (packed, spoiled):
        allreduce_ranks._packed = make
        try:
            allreduce_ranks.measure_all(
                "local", comm, library, [4096], ["terngrad"], 2, rows.append
            )
        except SystemExit as error:
            rows.append(str(error))
        finally:
            allreduce_ranks._packed = packed
    return rows


def test_a_result_that_differs_by_one_bit_ends_the_run():
    rows, _ = run_local(2, off_by_one_bit)
    assert [r if isinstance(r, str) else r.codec for r in rows] == [
        "fp32",
        "terngrad",
        "terngrad of 1024 values differs from what it should be",
    ]


def test_verdicts():
    def row(over_fp32, **other):
        return Row(
            **{
                "transport": "MPICH",
                "world_size": 2,
                "codec": "terngrad",
                "nbytes": 4 << 20,
                "seconds": 1.0,
                "over_fp32": over_fp32,
                "sent_nbytes": 0,
            }
            | other
        )

    rows = [row(1.31), row(1.29), row(0.99, nbytes=10**8), row(1.01, nbytes=10**8)]
    assert [v[:4] for v in allreduce.verdicts(rows)] == ["FAIL", "pass", "pass", "FAIL"]
    assert (
        allreduce.verdicts(
            [
                row(9, transport="gloo"),
                row(9, world_size=4),
                row(9, codec="onebit"),
                row(9, nbytes=8),
            ]
        )
        == []
    )


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4", 4), ("4K", 4096), ("1m", 1 << 20), ("100000000", 10**8)]
)
def test_sizes(text, nbytes):
    assert allreduce.parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--sizes", "3"],
            "'3' is no list of sizes such as 4K,1M: a size must be a positive multiple of 4 bytes",
        ),
        (["--sizes", "-4"], "a size must be a positive multiple of 4 bytes"),
        (["--sizes", "x"], "'x' is no list of sizes such as 4K,1M"),
        (["--ranks", "x"], "'x' is no list of integers such as 1,2,4"),
        (["--ranks", "1"], "at least 2 ranks"),
        (["--over", "nccl"], "--over takes gloo and mpi, got nccl"),
        (["--codecs", "powersgd"], "--codecs takes terngrad and onebit, got powersgd"),
    ],
)
def test_wrong_options_are_one_line_and_status_2(options, said, capsys):
    with pytest.raises(SystemExit) as error:
        allreduce.parse(options)
    shown = capsys.readouterr().err
    assert error.value.code == 2 and said in shown and shown.count("\n") == 1


def test_sizes_are_shown_as_they_are_meant():
    assert [allreduce.show_size(n) for n in (4096, 4 << 20, 10**8, 1 << 30)] == [
        "4 KiB",
        "4 MiB",
        "100 MB",
        "1 GiB",
    ]


def test_without_an_mpi_the_answer_is_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(allreduce.importlib.util, "find_spec", lambda name: None)
    assert allreduce.main(["--over", "mpi"]) == 2
    assert "pip install 'gradcomp[mpi]'" in capsys.readouterr().err
