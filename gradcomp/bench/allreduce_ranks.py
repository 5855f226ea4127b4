"""What every rank of ``bench allreduce`` does: check each result, then time packed and fp32
averages in turn.

Started by `gradcomp.bench.allreduce`: over gloo as a function of every rank, over MPI as ``python
-m gradcomp.launch -n N -m gradcomp.bench.allreduce_ranks SETTINGS`` whose rank 0 prints one JSON
line a row.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import gradcomp
from gradcomp.codecs import resolve
from gradcomp.comm import Communicator, LocalCommunicator
from gradcomp.exchange.sizing import predict_bytes

MARK = "bench-allreduce "
CHECKED_NUMEL = 1 << 20  # larger results are compared between ranks only
Average = Callable[[Tensor], object]


@dataclass
class Row:
    """One measurement: `codec` ("fp32" is the library's own sum) at one size.

    Attributes:
        nbytes: of the fp32 tensor.
        seconds: median over repetitions of the slowest rank's time.
        over_fp32: median of seconds / seconds of the library's fp32 all_reduce just before.
        sent_nbytes: bytes that one rank sends; 0 for fp32.
    """

    transport: str
    world_size: int
    codec: str
    nbytes: int
    seconds: float
    over_fp32: float
    sent_nbytes: int

    @property
    def algbw(self) -> float:
        """GB/s of fp32 tensor averaged."""
        return self.nbytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """algbw * 2 (N - 1) / N, as nccl-tests define it: comparable over N."""
        return self.algbw * 2 * (self.world_size - 1) / self.world_size


def values(rank: int, numel: int) -> Tensor:
    """Return what `rank` brings."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + rank))


def measure_all(
    transport: str,
    comm: Communicator,
    library: Average,
    sizes: Sequence[int],
    codecs: Sequence[str],
    repeat: int,
    emit: Callable[[Any], None],
) -> None:
    """Check and time every codec at every size; rank 0 emits the rows.

    Args:
        transport: name for the rows.
        comm: the ranks.
        library: sums an fp32 tensor over the ranks in place, or into a buffer of its own.
        sizes: bytes of fp32 tensors.
        codecs: names.
        repeat: timed repetitions of the smallest sizes; large ones take fewer.
        emit: takes a row.
    """
    for nbytes in sizes:
        numel = nbytes // 4
        mine = values(comm.rank, numel)
        _check_library(comm, library, mine)
        packed = {codec: _packed(comm, codec) for codec in codecs}
        for codec, average in packed.items():
            _check(comm, codec, average, mine)
        times = _time(
            comm,
            {"fp32": library, **packed},
            mine,
            max(5, min(repeat, repeat * (8 << 20) // nbytes)),
        )
        for codec in ("fp32", *codecs):
            if comm.rank == 0:
                emit(_row(transport, comm.world_size, codec, nbytes, times))
        comm.kept.clear()


def _row(
    transport: str, world_size: int, codec: str, nbytes: int, times: dict[str, list[float]]
) -> Row:
    ratios = [t / f for t, f in zip(times[codec], times["fp32"], strict=True)]
    sent = 0
    if codec != "fp32":
        shapes = [("x", (nbytes // 4,))]
        sent = predict_bytes(resolve(codec), shapes, world_size, min_numel=0).sent
    return Row(
        transport,
        world_size,
        codec,
        nbytes,
        statistics.median(times[codec]),
        statistics.median(ratios),
        sent,
    )


def _packed(comm: Communicator, codec: str) -> Average:
    return lambda tensor: gradcomp.all_reduce(tensor, codec, comm, timeout_s=120)


def _time(
    comm: Communicator, averages: dict[str, Average], mine: Tensor, repeat: int
) -> dict[str, list[float]]:
    """Return every repetition's seconds of the slowest rank, the averages in turn."""
    taken: dict[str, list[float]] = {name: [] for name in averages}
    tensor = mine.clone()
    for number in range(repeat + 1):
        for name, average in averages.items():
            tensor.copy_(mine)
            comm.all_gather_bytes(b"ready", 120)
            begun = time.perf_counter()
            average(tensor)
            if number:  # the first is a warm-up
                taken[name].append(time.perf_counter() - begun)
    everyone = [
        json.loads(t) for t in comm.all_gather_bytes(json.dumps(taken).encode().ljust(1 << 16), 120)
    ]
    return {
        name: [max(t) for t in zip(*(e[name] for e in everyone), strict=True)] for name in averages
    }


def _check_library(comm: Communicator, library: Average, mine: Tensor) -> None:
    tensor = mine.clone()
    result = library(tensor)
    total = result if isinstance(result, Tensor) else tensor
    wanted = torch.stack([values(rank, mine.numel()) for rank in range(comm.world_size)]).sum(
        0, dtype=torch.float64
    )
    if not torch.allclose(total.double(), wanted, atol=1e-4):
        raise SystemExit(f"the library's all_reduce of {mine.numel()} values is wrong")


def _check(comm: Communicator, codec: str, average: Average, mine: Tensor) -> None:
    """End the program unless all ranks have the same bits, and the bits that threads of one
    process compute.
    """
    tensor = mine.clone()
    average(tensor)
    digest = hashlib.blake2b(tensor.numpy().tobytes(), digest_size=16).digest()
    everyone = comm.all_gather_bytes(digest, 120)
    same = all(d == everyone[0] for d in everyone)
    if comm.rank == 0 and same and mine.numel() <= CHECKED_NUMEL:
        same = torch.equal(tensor, _expected(codec, comm.world_size, mine.numel()))
    verdict = comm.all_gather_bytes(b"y" if same else b"n", 120)
    if b"n" in verdict:
        raise SystemExit(f"{codec} of {mine.numel()} values differs from what it should be")


def _expected(codec: str, world_size: int, numel: int) -> Tensor:
    """Return the first average of that many values, computed by threads of this process."""
    tensors = [values(rank, numel) for rank in range(world_size)]
    threads = [
        threading.Thread(target=gradcomp.all_reduce, args=(tensor, codec, comm))
        for tensor, comm in zip(tensors, LocalCommunicator.group(world_size), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tensors[0]


def over_gloo(rank: int, emit: Callable[[Any], None], settings: dict[str, Any]) -> None:
    """Measure in one rank of a gloo group."""
    import torch.distributed as dist

    torch.set_num_threads(settings["threads"])
    comm = gradcomp.comm.TorchCommunicator(timeout_s=120)
    measure_all(
        "gloo",
        comm,
        dist.all_reduce,
        settings["sizes"],
        settings["codecs"],
        settings["repeat"],
        emit,
    )
    comm.close()


def over_mpi(settings: dict[str, Any]) -> None:
    """Measure in one rank of an MPI job."""
    from mpi4py import MPI

    torch.set_num_threads(settings["threads"])
    comm = gradcomp.comm.MpiCommunicator(timeout_s=120)
    room: dict[int, Tensor] = {}

    def library(tensor: Tensor) -> Tensor:
        out = room.get(tensor.numel())
        if out is None:
            room.clear()
            out = room[tensor.numel()] = torch.zeros_like(tensor)
        MPI.COMM_WORLD.Allreduce(tensor.numpy(), out.numpy())
        return out

    def emit(row: Row) -> None:
        print(MARK + json.dumps(asdict(row)), flush=True)

    flavour = (
        "Open MPI"
        if "Open MPI" in MPI.Get_library_version()
        else MPI.Get_library_version().split()[0]
    )
    measure_all(
        flavour, comm, library, settings["sizes"], settings["codecs"], settings["repeat"], emit
    )
    comm.close()


if __name__ == "__main__":
    over_mpi(json.loads(sys.argv[1]))
