"""FIFO stages that keep overlapped exchanges in bucket order.

Each stage is a thread with a queue of its own, and each stage starts collectives on one channel only; so every channel
sees its collectives in bucket order on every rank, and no callback ever blocks a thread that another collective needs.
(Chaining collectives in `Future.then` deadlocks on gloo: its callbacks occupy the threads that would run the next one.)
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

logger = logging.getLogger("gradcomp")


@dataclass(eq=False)
class Task:
    """One bucket's way through the stages.

    Attributes:
        stages: what to do in each stage, in order.
        done: called once at the end, with the error that ended it or None.
    """

    stages: Sequence[Callable[[], None]]
    done: Callable[[BaseException | None], None]
    _finished: bool = field(default=False, repr=False)


_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def _close_all() -> None:
    """Stop the threads of every pipeline before the interpreter goes: one that comes back from C++ later would abort it."""
    for pipeline in list(_running):
        pipeline.close()


class Pipeline:
    """Runs tasks through `stage_count` stages, each task after the one before it.

    The first exception of any stage ends every pending task with it and refuses all later ones: nothing hangs, nothing
    continues silently. Threads start with the first task and end at the latest when the interpreter does.

    Args:
        stage_count: threads, one a stage.
        name: of the threads.
        on_failure: called at every failure, before tasks are ended; it should make waits of other stages end soon.
    """

    def __init__(self, stage_count: int, name: str = "gradcomp", on_failure: Callable[[], None] = lambda: None) -> None:
        self._queues: list[queue.SimpleQueue[Task | None]] = [queue.SimpleQueue() for _ in range(stage_count)]
        self._name, self._on_failure = name, on_failure
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._pending: list[Task] = []
        self.error: BaseException | None = None

    def submit(self, task: Task) -> None:
        """Send a task on its way; it ends at once if the pipeline has failed."""
        with self._changed:
            failed = self.error
            if failed is None:
                self._pending.append(task)
                if not self._threads:
                    self._start()
        if failed is None:
            self._queues[0].put(task)
        else:
            self._finish(task, failed)

    def run(self, task: Task) -> None:
        """Run a task here and now, without threads: for work that waits for nobody."""
        try:
            if self.error is None:
                for stage in task.stages:
                    stage()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it, as for a stage thread
            self.fail(error)
        self._finish(task, self.error)

    def wait(self) -> None:
        """Block until no task is pending.

        Raises:
            BaseException: what made a stage fail; every later call raises it again.
        """
        with self._changed:
            while self._pending and self.error is None:
                self._changed.wait()
            if self.error is not None:
                raise self.error

    def fail(self, error: BaseException) -> None:
        """End every pending task with `error`, now and for good. The first error stays."""
        with self._changed:
            if self.error is None:
                self.error = error
            pending = list(self._pending)
        try:
            self._on_failure()
        except Exception:
            logger.exception("the peers could not be told of a failure")
        for task in pending:
            self._finish(task, self.error)
        with self._changed:
            self._changed.notify_all()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads; one that is stuck in a collective is left behind (it is a daemon)."""
        _running.discard(self)
        threads, self._threads = self._threads, []
        if self.error is None:
            self.error = RuntimeError("gradcomp: this state is closed")
        if threads:
            self._queues[0].put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _start(self) -> None:
        if not _running:
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _running.add(self)
        for number in range(len(self._queues)):
            thread = threading.Thread(target=self._serve, args=(number,), name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, number: int) -> None:
        last = number == len(self._queues) - 1
        while True:
            task = self._queues[number].get()
            if task is None:
                if not last:
                    self._queues[number + 1].put(None)
                return
            try:
                if self.error is None:
                    task.stages[number]()
            except BaseException as error:  # a stage thread has nobody else to tell
                logger.debug("stage %d failed", number, exc_info=True)
                self.fail(error)
            if self.error is not None:
                self._finish(task, self.error)
            elif last:
                self._finish(task, None)
            else:
                self._queues[number + 1].put(task)

    def _finish(self, task: Task, error: BaseException | None) -> None:
        with self._changed:
            if task._finished:
                return
            task._finished = True
        try:
            task.done(error)
        except Exception:
            logger.exception("a bucket's completion failed")
        finally:
            with self._changed:
                if task in self._pending:
                    self._pending.remove(task)
                self._changed.notify_all()
