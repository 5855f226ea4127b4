"""Many training runs, side by side or one after the other, and the file of those that are done."""

from __future__ import annotations

import json
import multiprocessing
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from gradcomp.bench import trainer
from gradcomp.bench.ranks import Place, all_cores, warm_context
from gradcomp.bench.trainer import KEY, Task, run_task

HANG_S = 600.0
Result = dict[str, Any]


def bar(*, shown: bool = True) -> Progress:
    """Return a progress bar on stderr, where that is a terminal, that takes ranks little time."""
    console = Console(stderr=True)
    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        refresh_per_second=2,
    )


def run_all(
    tasks: Sequence[Task], processes: int, *, done: Sequence[Task] = (), spread: bool = False
) -> Iterator[tuple[Task, list[Result], float]]:
    """Run tasks over loopback, `processes` at a time; yield each with its ranks' results and its
    seconds as it ends. The bar counts tasks that were `done` before, too. `spread` gives each rank
    its share of the cores; otherwise all ranks of a task have one core.

    Raises:
        gradcomp.bench.ranks.RankFailed: a rank failed; all others have been ended.
    """
    cores: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for number in range(processes):
        cores.put(() if spread else (all_cores()[number % len(all_cores())],))
    steps = dict.fromkeys(tasks, 0) | {task: task.steps for task in done}

    def on_step(task: Task, step: int) -> None:
        steps[task] = step
        ended = sum(done == task.steps for task, done in steps.items())
        last = f"{task.method} {task.workload} {task.optimizer}, seed {task.seed}"
        text = f"{ended}/{len(steps)} runs; {last}"
        progress.update(shown, completed=sum(steps.values()), description=text)

    def run(task: Task) -> tuple[Task, list[Result], float]:
        mine, begun = cores.get(), time.perf_counter()
        try:
            placed, place = replace(task, cores=mine), Place(task.workers)
            results = run_task(placed, place, HANG_S, lambda step: on_step(task, step))
            return task, results, time.perf_counter() - begun
        finally:
            cores.put(mine)

    warm_context(trainer.__name__)  # here, where an interrupt of its start is heeded
    pool = ThreadPoolExecutor(processes)
    with bar() as progress:
        total = sum(task.steps for task in steps)
        shown = progress.add_task("starting the ranks", total=total, completed=sum(steps.values()))
        try:
            for future in as_completed([pool.submit(run, task) for task in tasks]):
                found = future.result()
                on_step(found[0], found[0].steps)
                yield found
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.kill()  # `run_task` then returns
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
