"""One training run, and many of them side by side: each finished one is a line of a file, and is
not run again.
"""

from __future__ import annotations

import json
import math
import os
import queue as queues
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gradcomp.bench.accuracy.methods import parse
from gradcomp.bench.accuracy.optimizers import OPTIMIZERS, exchanging_momentum
from gradcomp.bench.accuracy.workers import Apart, Workers
from gradcomp.bench.accuracy.workloads import WORKLOADS, Settings, Workload
from gradcomp.bench.ranks import become_rank, warm_context
from gradcomp.errors import NotFinite

POINTS = 20  # of a curve
DIVERGED = 1e4  # a loss beyond this ends a run


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


def rate_at(step: int, steps: int, settings: Settings) -> float:
    """Return the factor of the rate at a step: up linearly, then down as `settings.decay`."""
    rising = max(1, round(steps * settings.warm_up))
    if step < rising:
        return (step + 1) / rising
    return settings.decay((step - rising) / max(1, steps - rising))


def train(job: Job, workload: Workload, tell: Callable[[int], None]) -> dict[str, Any]:
    """Return the result of a run: curve, measure at the end, bytes.

    Args:
        job: what to run.
        workload: of that name.
        tell: called with the number of steps done, now and then.
    """
    torch.manual_seed(job.seed)
    model, settings = workload.model(), workload.settings
    method = parse(job.method)
    rate = settings.rates[job.optimizer] * job.factor

    def make(one: torch.nn.Module) -> list[torch.optim.Optimizer]:
        return OPTIMIZERS[job.optimizer](one, rate)

    workers: Workers | Apart
    if method.local:
        workers = Apart(model, method, job.workers, make)
        optimizers = workers.optimizers
    else:
        optimizers = exchanging_momentum(make(model), method) if method.momentum else make(model)
        workers = Workers(model, method, job.workers, *(optimizers if method.momentum else ()))
    rates = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    draws = [
        torch.Generator().manual_seed(1 + 1000 * job.seed + worker) for worker in range(job.workers)
    ]
    batch = job.batch or settings.batch_of(job.workers)
    curve: list[tuple[int, float, float]] = []
    begun, last, every = time.perf_counter(), math.inf, max(1, job.steps // POINTS)
    for step in range(job.steps):
        for group, rate in rates:
            group["lr"] = rate * rate_at(step, job.steps, settings)
        last = workers.backward(workload.loss, [workload.minibatch(draw, batch) for draw in draws])
        if not last < DIVERGED:
            break
        for each in workers.models:
            if settings.clip is not None:
                torch.nn.utils.clip_grad_norm_(each.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
        try:
            workers.end_step()
        except NotFinite:
            last = math.inf
            break
        if (step + 1) % every == 0:
            curve.append((step + 1, last, _test(workload, model, quick=True)))
            tell(step + 1)
    workers.close()  # of models that are apart, at what they agreed on
    values = sum(p.numel() for p in model.parameters()) * (step + 1)
    return {
        **asdict(job),
        "measure": _test(workload, model) if last < DIVERGED else None,
        "curve": curve,
        "sent_nbytes": workers.sent_nbytes,
        "bits": 8 * workers.sent_nbytes / (2 * values * (job.workers - 1) / job.workers),
        "seconds": time.perf_counter() - begun,
    }


def _test(workload: Workload, model: torch.nn.Module, *, quick: bool = False) -> float:
    model.eval()
    with torch.no_grad():
        return workload.test(model, quick=quick)


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
        context = warm_context(__name__)
        todo, news = context.Queue(), context.Queue()
        for each in (*left, *[None] * processes):
            todo.put(each)
        ranks = [
            context.Process(target=_serve, args=(folder, todo, news, dict(os.environ)), daemon=True)
            for _ in range(processes)
        ]
        for process in ranks:
            process.start()
        try:
            _collect(len(left), ranks, news, file, done, on_step)
        finally:
            for process in ranks:
                process.terminate()
                process.join()
    return {job: done[job] for job in wanted}


def _collect(
    count: int,
    processes: list[Any],
    news: Any,
    file: Path,
    done: dict[Job, dict[str, Any]],
    on_step: Callable[[Job, int], None],
) -> None:
    while count:
        try:
            job, what = news.get(timeout=5.0)
        except queues.Empty:
            if not any(process.is_alive() for process in processes):
                raise RuntimeError(
                    "the processes that train have died; their output above says why"
                ) from None
            continue
        if isinstance(what, int):
            on_step(job, what)
            continue
        if not isinstance(what, dict):
            raise RuntimeError(f"{job} failed:\n{what}")  # noqa: TRY004 - what went wrong there
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(what) + "\n")
        done[job], count = what, count - 1
        on_step(job, job.steps)


def _serve(folder: Path, todo: Any, news: Any, variables: Mapping[str, str]) -> None:
    import traceback

    become_rank(variables)
    torch.set_num_threads(1)
    loaded: dict[str, Workload] = {}
    while (job := todo.get()) is not None:
        try:
            workload = loaded.get(job.workload) or loaded.setdefault(
                job.workload, WORKLOADS[job.workload](folder)
            )
            news.put((job, train(job, workload, lambda step, job=job: news.put((job, step)))))  # type: ignore[misc]
        except Exception:  # noqa: BLE001 - told to the program
            news.put((job, traceback.format_exc()))
