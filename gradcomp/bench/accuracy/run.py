"""Many training runs side by side: each finished one is a line of a file, and is not run again."""

from __future__ import annotations

import json
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradcomp.bench.ranks import warm_context
from gradcomp.bench.train import rank
from gradcomp.bench.train.rank import Task
from gradcomp.bench.train.run import Place, all_cores, run_method

POINTS = 20  # of a curve
HANG_S = 600.0


@dataclass(frozen=True)
class Job:
    """What one run depends on, all of it; equal jobs give equal results.

    Attributes:
        workload, optimizer, method: by name, a method with its options.
        workers: how many.
        steps: of the run; the schedule of the rate is stretched to it.
        factor: of the workload's rate for this optimizer.
        seed: of the weights and of the minibatches.
        batch: samples of a worker's minibatch; 0: the workload's own number.
    """

    workload: str
    optimizer: str
    method: str
    workers: int
    steps: int
    factor: float
    seed: int
    batch: int = 0


def train(job: Job, folder: Path, core: int, on_step: Callable[[int], None]) -> dict[str, Any]:
    """Run a job's ranks on one core, over loopback; return curve, measure at the end and bytes.

    Args:
        job: what to run.
        folder: of the data.
        core: for all of its ranks.
        on_step: called with the number of steps done, now and then.

    Raises:
        RuntimeError: a rank failed.
    """
    begun = time.perf_counter()
    task = Task(
        job.method,
        job.workload,
        str(folder),
        job.optimizer,
        job.steps,
        job.seed,
        job.batch or None,
        min(POINTS, job.steps),
        (core,),
        factor=job.factor,
        min_numel=0,
        stops=True,
    )
    found = run_method([task] * job.workers, Place(), HANG_S, on_step)
    if found.failed:
        raise RuntimeError(f"{job} failed: {found.failed}")
    first = found.results[0]
    sent = first["total_nbytes"]
    values = first["parameters"] * first["steps_done"] * 2 * (job.workers - 1) / job.workers
    return {
        **asdict(job),
        "measure": first.get("measure"),
        "curve": first["curve"],
        "sent_nbytes": sent,
        "bits": 8 * sent / values if sent is not None else None,
        "seconds": time.perf_counter() - begun,
    }


def finished(file: Path) -> dict[Job, dict[str, Any]]:
    """Return the results in a file, by job.

    Raises:
        ValueError: a line that is no result.
    """
    out: dict[Job, dict[str, Any]] = {}
    if not file.exists():
        return out
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        try:
            result = json.loads(line)
            out[
                Job(
                    **{
                        name: result.get(name, 0) if name == "batch" else result[name]
                        for name in Job.__dataclass_fields__
                    }
                )
            ] = result
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1 and not line.endswith("\n"):
                break  # the program was killed while it wrote this
            raise ValueError(
                f"{file}, line {number + 1}: no result of this benchmark ({error})"
            ) from error
    return out


def run_all(
    jobs: Iterable[Job],
    folder: Path,
    file: Path,
    processes: int,
    on_step: Callable[[Job, int], None],
) -> dict[Job, dict[str, Any]]:
    """Run what is not in `file` yet, `processes` jobs at a time with one thread each; return all
    results.

    Args:
        jobs: what to run, in this order.
        folder: of the data.
        file: gets a line for each job as it ends.
        processes: how many at a time.
        on_step: called with a job and its steps done.
    """
    wanted = list(jobs)
    done = finished(file)
    left = [job for job in wanted if job not in done]
    for job in wanted:
        if job in done:
            on_step(job, job.steps)
    if left:
        if file.exists() and not (text := file.read_bytes()).endswith(b"\n"):
            file.write_bytes(text[: text.rfind(b"\n") + 1])
        warm_context(rank.__name__)  # here, where an interrupt of its start is heeded
        cores: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(processes):
            cores.put(all_cores()[number % len(all_cores())])

        def run(job: Job) -> tuple[Job, dict[str, Any]]:
            core = cores.get()
            try:
                return job, train(job, folder, core, lambda step: on_step(job, step))
            finally:
                cores.put(core)

        pool = ThreadPoolExecutor(processes)
        try:
            for future in as_completed([pool.submit(run, job) for job in left]):
                job, result = future.result()
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(result) + "\n")
                done[job] = result
                on_step(job, job.steps)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # `run_method` then returns
            raise
        finally:
            pool.shutdown()
    return {job: done[job] for job in wanted}
