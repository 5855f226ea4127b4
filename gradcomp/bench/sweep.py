"""Run many trainings, in parallel or in sequence, and store finished ones in a file."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

from gradcomp.bench import trainer
from gradcomp.bench.ranks import Place, RankFailed, all_cores, warm_context
from gradcomp.bench.ranks import run as run_ranks
from gradcomp.bench.trainer import KEY, Task, train_rank

HANG_S = 600.0
FORMAT = 2  # of a line in a file of finished runs; 1: "ternary" was TernGrad, no data_crc, no link
Result = dict[str, Any]
Finished = tuple[Task, list[Result], float]  # with the seconds of the run


def run_all(
    tasks: Sequence[Task],
    processes: int = 1,
    *,
    place: Place | None = None,
    hang_s: float = HANG_S,
    failed: dict[Task, str] | None = None,
    spread: bool = True,
) -> Iterator[Finished]:
    """Run tasks, `processes` at a time; yield each when it ends, with the results of `train` on all
    ranks (in a launched job only on rank 0) and its seconds.

    Args:
        place: where the ranks run; None: on this machine over loopback.
        hang_s: seconds of silence after which the ranks of a task count as hung.
        failed: filled with the reason for each task whose ranks failed; it has no results.
        spread: give each rank its share of the cores; False: all ranks of a task share one core.

    Raises:
        gradcomp.bench.ranks.RankFailed: a rank failed, and `failed` is None; all others are ended.
    """
    cores: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for number in range(processes):
        cores.put(() if spread else (all_cores()[number % len(all_cores())],))

    def run(task: Task) -> Finished:
        mine, begun = cores.get(), time.perf_counter()
        where = replace(place or Place(task.workers), shift=1 + tasks.index(task))
        placed = replace(task, cores=mine or (all_cores() if where.launched else ()))
        results: list[Result] = []

        def heard(found: list[Result] | int | None) -> None:  # None is a heartbeat
            if isinstance(found, int):
                show(task, found)
            elif found is not None:
                results.extend(found)

        try:
            run_ranks(where, train_rank, placed, on_message=heard, hang_s=hang_s)
        except RankFailed as error:
            if failed is None:
                raise
            failed[task] = str(error)
        finally:
            cores.put(mine)
            show(task, task.steps)
        return task, results, time.perf_counter() - begun

    warm_context(trainer.__name__)  # in the main thread, which handles an interrupt meanwhile
    with _progress() as progress:
        text = f"{{}} of {len(tasks)} trainings"
        bar = progress.add_task(text.format(0), total=sum(task.steps for task in tasks))
        steps, lock = dict.fromkeys(tasks, 0), threading.Lock()

        def show(task: Task, done: int) -> None:  # called by the threads of all trainings
            with lock:
                steps[task] = max(steps[task], done)  # ranks report in any order
                ended = text.format(sum(steps[one] == one.steps for one in tasks))
                now = sum(steps.values())
                progress.update(bar, completed=now, description=ended, refresh=True)

        yield from _run_each(run, tasks, processes)


def _progress() -> Progress:
    """Return a progress bar of steps, which rank 0 shows if stderr is a terminal."""
    console = Console(stderr=True)
    off = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    columns = SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn()
    return Progress(*columns, console=console, disable=off)


def _run_each(
    run: Callable[[Task], Finished], tasks: Sequence[Task], processes: int
) -> Iterator[Finished]:
    if processes == 1:
        yield from map(run, tasks)
        return
    pool = ThreadPoolExecutor(processes)
    try:
        futures = [pool.submit(run, task) for task in tasks]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()  # `run` then returns
        raise
    finally:
        pool.shutdown()


def key_of(task: Task) -> Result:
    """Return the format of a result's line, and the fields of a task that determine the result."""
    return {"format": FORMAT, **{name: getattr(task, name) for name in KEY}}


def finished(file: Path, tasks: Sequence[Task]) -> dict[Task, Result]:
    """Return the results of those tasks that a file has; ValueError if a line is not a result."""
    out: dict[tuple[Any, ...], Result] = {}
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines):
        try:
            result = dict(json.loads(line))
            made = result.get("format", 1)
            if result and made != FORMAT:
                raise ValueError(
                    f"format {made}, expected {FORMAT}: earlier versions called terngrad 'ternary',"
                    " and did not write the data and the link; choose another --out"
                )
            out[tuple(result[name] for name in KEY)] = result
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1 and not line.endswith("\n"):
                break  # the program was killed while it wrote this line
            raise ValueError(
                f"{file}, line {number + 1}: no result of this benchmark ({error})"
            ) from error
    keys = {task: tuple(getattr(task, name) for name in KEY) for task in tasks}
    return {task: out[key] for task, key in keys.items() if key in out}


def append(file: Path, result: Result) -> None:
    """Append a result to a file; an incomplete last line is removed first."""
    if file.exists() and not (text := file.read_bytes()).endswith(b"\n"):
        file.write_bytes(text[: text.rfind(b"\n") + 1])
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")
