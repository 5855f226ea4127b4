"""Many training runs, side by side or one after the other, and the file of those that are done."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from gradcomp.bench import trainer
from gradcomp.bench.ranks import Place, RankFailed, all_cores, warm_context
from gradcomp.bench.ranks import run as run_ranks
from gradcomp.bench.trainer import KEY, Task, train_rank

HANG_S = 600.0
Result = dict[str, Any]


def run_all(
    tasks: Sequence[Task],
    processes: int = 1,
    *,
    place: Place | None = None,
    hang_s: float = HANG_S,
    failed: dict[Task, str] | None = None,
    spread: bool = True,
) -> Iterator[tuple[Task, list[Result], float]]:
    """Run tasks; yield each with what `train` measured in every rank (nothing in a launched job but
    for rank 0) and its seconds as it ends.

    Args:
        processes: tasks at a time.
        place: where to run them; None: on this machine over loopback.
        hang_s: silence in seconds after which the ranks of a task count as hung.
        failed: takes the reason of each task whose ranks failed, which then has no results.
        spread: give each rank its share of the cores; otherwise all ranks of a task have one core.

    Raises:
        gradcomp.bench.ranks.RankFailed: a rank failed, without `failed`; all others have been
            ended.
    """
    cores: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for number in range(processes):
        cores.put(() if spread else (all_cores()[number % len(all_cores())],))

    def run(task: Task) -> tuple[Task, list[Result], float]:
        mine, begun = cores.get(), time.perf_counter()
        where = replace(place or Place(task.workers), shift=1 + tasks.index(task))
        placed = replace(task, cores=mine or (all_cores() if where.launched else ()))
        results: list[Result] = []
        heard = lambda found: results.extend(found or ())  # None is a sign of life
        try:
            run_ranks(where, train_rank, placed, on_message=heard, hang_s=hang_s)
        except RankFailed as error:
            if failed is None:
                raise
            failed[task] = str(error)
        finally:
            cores.put(mine)
        return task, results, time.perf_counter() - begun

    warm_context(trainer.__name__)  # here, where an interrupt of its start is heeded
    console = Console(stderr=True)
    shown: dict[str, Any] = {"total": len(tasks), "console": console}
    shown["disable"] = not console.is_terminal or os.environ.get("RANK", "0") != "0"
    if processes == 1:
        yield from map(run, track(tasks, "trainings", **shown))
        return
    pool = ThreadPoolExecutor(processes)
    try:
        futures = [pool.submit(run, task) for task in tasks]
        for future in track(as_completed(futures), "trainings", **shown):
            yield future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()  # `run` then returns
        raise
    finally:
        pool.shutdown()


def key_of(task: Task) -> Result:
    """Return the fields of a task that decide what it gives."""
    return {name: getattr(task, name) for name in KEY}


def finished(file: Path, tasks: Sequence[Task]) -> dict[Task, Result]:
    """Return the results in a file of those tasks that it has.

    Raises:
        ValueError: a line that is no result.
    """
    out: dict[tuple[Any, ...], Result] = {}
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines):
        try:
            result = {"batch": 0} | json.loads(line)  # older files have no batch
            out[tuple(result[name] for name in KEY)] = result
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) - 1 and not line.endswith("\n"):
                break  # the program was killed while it wrote this
            raise ValueError(
                f"{file}, line {number + 1}: no result of this benchmark ({error})"
            ) from error
    keys = {task: tuple(key_of(task).values()) for task in tasks}
    return {task: out[key] for task, key in keys.items() if key in out}


def append(file: Path, result: Result) -> None:
    """Add a result to a file, in place of a last line that was cut off."""
    if file.exists() and not (text := file.read_bytes()).endswith(b"\n"):
        file.write_bytes(text[: text.rfind(b"\n") + 1])
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(result) + "\n")
