"""Time packed averages beside the library's own fp32 all_reduce.

Times are those of the slowest rank, medians over repetitions, fp32 and packed in turn within one
run, after a warm-up of each. algbw = bytes of the fp32 tensor / seconds, busbw = algbw * 2 (N - 1)
/ N, as in nccl-tests, for every codec: what an fp32 all_reduce would have needed to be as fast.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import sys
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

import gradcomp
from gradcomp.arguments import count, counts, words
from gradcomp.bench.about import save_json, table
from gradcomp.bench.mpi import Mpiexec
from gradcomp.bench.options import command_line
from gradcomp.bench.ranks import Emit, Place, RankFailed, run
from gradcomp.bench.timing import turns
from gradcomp.codecs import resolve
from gradcomp.plan.nbytes import predict_bytes

CODECS = ("terngrad", "onebit")
SIZES = "4K,16K,64K,256K,1M,4M,16M,64M,100000000,256M"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
TIMEOUT_S = 120.0


def sizes(text: str) -> list[int]:
    """Return the bytes of "4K,1M,100000000", a `type` of argparse."""
    out = []
    for part in text.upper().split(","):
        digits, factor = (part[:-1], UNITS[part[-1]]) if part[-1:] in UNITS else (part, 1)
        if not digits.isdecimal() or int(digits) < 1 or int(digits) * factor % 4:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a list of sizes such as 4K,1M: a size must be a positive multiple"
                f" of 4 bytes, got {part!r}"
            )
        out.append(int(digits) * factor)
    return out


def run_rank(emit: Emit, over: str, settings: dict[str, Any]) -> None:
    """Time every codec at every size; rank 0 emits the rows (fp32's have no `sent_nbytes`)."""
    torch.set_num_threads(settings["threads"])
    comm: Any
    library: Any = dist.all_reduce
    if over == "mpi":
        from mpi4py import MPI

        sums = torch.zeros(max(settings["sizes"]) // 4)
        comm, over = gradcomp.comm.MpiCommunicator(timeout_s=TIMEOUT_S), MPI.get_vendor()[0]

        def library(tensor: torch.Tensor) -> None:
            MPI.COMM_WORLD.Allreduce(tensor.numpy(), sums[: tensor.numel()].numpy())
    else:
        comm = gradcomp.comm.TorchCommunicator(timeout_s=TIMEOUT_S)
    averages = {"fp32": library}
    for codec in settings["codecs"]:
        averages[codec] = partial(gradcomp.all_reduce, codec=codec, comm=comm, timeout_s=TIMEOUT_S)
    ranks = comm.world_size
    for nbytes in settings["sizes"]:
        repeat = max(5, min(settings["repeat"], settings["repeat"] * (8 << 20) // nbytes))
        slowest = _time(comm, list(averages.values()), nbytes, repeat)
        for codec, seconds in zip(averages, slowest.T, strict=True):
            median_s, sent, shapes = float(np.median(seconds)), 0, [("x", (nbytes // 4,))]
            if codec != "fp32":
                sent = predict_bytes(resolve(codec), shapes, ranks, min_numel=0).sent
            row = {
                "transport": over,
                "world_size": ranks,
                "codec": codec,
                "nbytes": nbytes,
                "seconds": median_s,
                "over_fp32": float(np.median(seconds / slowest[:, 0])),
                "sent_nbytes": sent,
                "algbw": nbytes / median_s / 1e9,
                "busbw": nbytes / median_s / 1e9 * 2 * (ranks - 1) / ranks,
            }
            if comm.rank == 0:
                emit(row)
    comm.close()


def _time(comm: Any, averages: list[Any], nbytes: int, repeat: int) -> Any:
    """Return the slowest rank's seconds of every average in every repetition."""
    mine = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(1000 + comm.rank))
    tensor = mine.clone()

    def ready() -> None:
        tensor.copy_(mine)
        comm.all_gather_bytes(b"ready", TIMEOUT_S)

    own = turns([partial(average, tensor) for average in averages], repeat, before=ready)
    everyone = comm.all_gather_bytes(own.tobytes(), TIMEOUT_S)
    comm.kept.clear()
    return np.max([np.frombuffer(one).reshape(own.shape) for one in everyone], axis=0)


def read_options(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    over = "gloo,mpi" if importlib.util.find_spec("mpi4py") else "gloo"
    codecs = f"codecs, a list out of {' and '.join(CODECS)}"
    options = {
        "over": (over, "", "transports, a list out of gloo and mpi", words("gloo", "mpi")),
        "ranks": ("2,4", "", "numbers of ranks, a list", counts),
        "sizes": (SIZES, "", "bytes of the fp32 tensor, a list", sizes),
        "codecs": (",".join(CODECS), "", codecs, words(*CODECS)),
        "threads": (1, "", "kernel threads of each rank", count),
        "repeat": (40, "", "repetitions up to 8M; fewer of larger sizes, at least 5", count),
    }
    epilog = """--over mpi needs the extra mpi (pip install '.[mpi]').

example:
  python -m gradcomp.bench allreduce --over gloo --ranks 2 --sizes 1M,16M
"""
    parser = command_line("allreduce", __doc__, epilog, options, ["json"])
    args = parser.parse_args(argv)
    if min(args.ranks) < 2:
        parser.error(f"--ranks takes at least 2 ranks, got {min(args.ranks)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = read_options(argv)
    rows: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as made:
            mpi = made.enter_context(Mpiexec(None)) if "mpi" in args.over else None
            for over, ranks in itertools.product(args.over, args.ranks):
                place = Place(ranks, mpi=mpi if over == "mpi" else None)
                with Console(stderr=True).status(f"{over}, N = {ranks}"):
                    run(place, run_rank, over, vars(args), on_message=rows.append)
    except (ValueError, RankFailed) as error:
        print(f"gradcomp.bench allreduce: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankFailed) else 2
    heads = ("over", "codec", "N", "bytes", "ms", "busbw, GB/s", "x fp32 time")
    cells = []
    for r in rows:
        shown = r["transport"], r["codec"], str(r["world_size"]), f"{r['nbytes']:,}"
        figures = f"{r['seconds'] * 1e3:.3f}", f"{r['busbw']:.2f}", f"{r['over_fp32']:.2f}"
        cells.append((*shown, *figures))
    Console().print(table(heads, cells, left=2))
    save_json(args.json, rows=rows)
    return 0
