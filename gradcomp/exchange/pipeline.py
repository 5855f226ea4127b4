"""A pipeline of FIFO stages that overlaps exchanges and keeps them in bucket order.

Each stage is a thread with a queue, and starts collectives on one channel only. So every channel
has its collectives in bucket order on every rank, and no callback blocks a thread that another
collective needs. (Chaining collectives in `Future.then` deadlocks on gloo: its callbacks occupy the
threads that would run the next collective.)
"""

from __future__ import annotations

import atexit
import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradcomp.errors import without_traceback

logger = logging.getLogger("gradcomp")

# longest wait for busy stages after a failure, in seconds: an abort ends their collectives within 1
QUIET_S = 1.5
# longest wait for the end of all tasks after a failure, in seconds: peers are notified first
ENDED_S = 30.0
# longest uninterrupted wait, in seconds: Python runs signal handlers (Ctrl-C) between waits only
LOOK_S = 0.25


@dataclass(eq=False)
class Task:
    """The work of one slice or bucket in all stages of a pipeline.

    Attributes:
        stages: one function per stage, in order.
        done: called once when the task ends, with the error that ended it or None. By default it
            does nothing: the last slice of a bucket reports the bucket's end.
    """

    stages: Sequence[Callable[[], None]]
    done: Callable[[BaseException | None], None] = lambda error: None
    _finished: bool = field(default=False, repr=False)
    _stages_run: int = field(default=0, repr=False)  # used by `InlinePipeline`


Inbox = queue.SimpleQueue["Task | None"]
_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def _close_all() -> None:
    """Stop the threads of every pipeline before the interpreter shuts down: a thread that returns
    from C++ afterwards would abort the process.
    """
    for pipeline in list(_running):
        # pass an uncaught exception on to waiting ranks
        pipeline.close(error=getattr(sys, "last_value", None))


class Pipeline:
    """Runs tasks through `stage_count` stages, in the order in which they are submitted.

    The first exception of any stage ends all pending tasks and all later ones with that error. A
    pending task ends once no stage is busy, or QUIET_S seconds after the failure. Threads start
    with the first task. They end with `close`, when the pipeline is garbage-collected, or when the
    interpreter exits.

    Args:
        stage_count: number of stages, each with a thread.
        name: prefix of the threads' names.
        on_failure: called at every failure with a text of the first error, before tasks are ended.
            It should make the waits of other stages return soon.

    Attributes:
        error: the first error without its traceback, or None; `wait` raises it.
        closed: whether `close` was called.
    """

    def __init__(
        self,
        stage_count: int,
        name: str = "gradcomp",
        on_failure: Callable[[str], object] = lambda reason: None,
    ) -> None:
        self._inboxes: list[Inbox] = [queue.SimpleQueue() for _ in range(stage_count)]
        self._name, self._on_failure = name, on_failure
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()
        self._pending: list[Task] = []
        self._busy: set[int] = set()  # stages that are running a task
        self.error: BaseException | None = None
        self._raised: BaseException | None = None  # the same with its traceback, for the first wait
        self.closed = False

    def submit(self, *tasks: Task) -> None:
        """Queue tasks in order. If the pipeline has failed, end them at once with its error."""
        with self._changed:
            failed = self.error
            if failed is None:
                self._pending += tasks
                if not self._threads:
                    self._start()
        for task in tasks:
            if failed is None:
                self._inboxes[0].put(task)
            else:
                self._finish(task, failed)

    def wait(self) -> None:
        """Wait until no task is pending; after a failure, until `fail` has ended all tasks.

        Raises:
            BaseException: the error of the stage that failed, in every later call, too.
        """
        with self._changed:
            while self._pending and self.error is None:
                self._changed.wait(LOOK_S)
            if self.error is not None:
                self._changed.wait_for(lambda: not self._pending, ENDED_S)
                self._changed.wait_for(lambda: not self._busy, QUIET_S)
        self.check()

    def check(self) -> None:
        """Raise `error` if there is one, the first time with the traceback of the failure."""
        if self.error is not None:
            raised, self._raised = self._raised, None
            raise raised or without_traceback(self.error)

    @property
    def is_empty(self) -> bool:
        """Whether no task is pending."""
        return not self._pending

    def rest(self) -> None:
        """Wait until no stage is busy, for at most QUIET_S seconds. After a failure no stage writes
        to any buffer then.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, QUIET_S)

    def fail(self, error: BaseException) -> None:
        """End every pending task, and all later ones, with `error` or with an earlier error."""
        with self._changed:
            if self.error is None:
                self.error, self._raised = without_traceback(error), error
            self._changed.notify_all()
        try:
            self._on_failure(f"{type(self.error).__name__}: {self.error}")
        except Exception:
            logger.exception("the peers could not be notified of a failure")
        # wait for busy stages first: their buffers are in use until they return
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, QUIET_S)
            pending = list(self._pending)
        for task in pending:
            self._finish(task, self.error)

    def close(self, timeout_s: float = 5.0, error: BaseException | None = None) -> None:
        """End pending tasks and stop the threads.

        Args:
            timeout_s: longest wait for the threads, in seconds. A daemon thread that is blocked in
                a collective after that is left running.
            error: error of the pending tasks; by default a RuntimeError.
        """
        _running.discard(self)
        closed = error or RuntimeError("gradcomp: this state is closed")
        with self._changed:
            self.closed, self._raised = True, None
            if not self._pending and self.error is None:
                self.error = closed
        if self._pending:
            self.fail(closed)
        threads, self._threads = self._threads, []
        _stop(self._inboxes)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        if not _running:
            atexit.unregister(_close_all)
            atexit.register(_close_all)
        _running.add(self)
        self_ref = weakref.ref(self)
        weakref.finalize(self, _stop, self._inboxes).atexit = False
        for number, inbox in enumerate(self._inboxes):
            name = f"{self._name}-{number}"
            thread = threading.Thread(
                target=_serve, args=(self_ref, number, inbox), name=name, daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, number: int, task: Task) -> None:
        """Run one stage of a task, then queue the task for the next stage or end it."""
        with self._changed:
            is_running = self.error is None
            if is_running:
                self._busy.add(number)
        error: BaseException | None = None
        try:
            if is_running:
                task.stages[number]()
        except BaseException as failure:
            logger.debug("stage %d failed", number, exc_info=True)
            error = failure
        with self._changed:
            self._busy.discard(number)
            self._changed.notify_all()
        if error is not None:
            self.fail(error)
        elif self.error is not None:
            # `fail` ends all tasks, since another stage may be busy with a slice of the same bucket
            return
        elif number == len(self._inboxes) - 1:
            self._finish(task, None)
        else:
            self._inboxes[number + 1].put(task)

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


class InlinePipeline(Pipeline):
    """A pipeline without threads: each `submit` runs the next stage of every pending task, the
    oldest first, and then the first stage of the new task, on the calling thread.

    So up to n - 1 tasks of n stages are pending between calls; a task of one stage ends in
    `submit`. An error of a stage ends all tasks, and `wait` raises it, as in `Pipeline`.
    """

    def __init__(self, on_failure: Callable[[str], object] = lambda reason: None) -> None:
        super().__init__(stage_count=0, on_failure=on_failure)

    def submit(self, *tasks: Task) -> None:
        """For each new task run the next stage of every pending task, then its first stage."""
        for task in tasks:
            self._run_stages()
            if self.error is None:
                self._pending.append(task)
                self._run_stage(task)
            else:
                self._finish(task, self.error)

    def wait(self) -> None:
        """Run all pending tasks to their ends; raise the error of a stage that failed."""
        while self._pending:
            self._run_stages()
        super().wait()

    def _run_stages(self) -> None:
        for task in list(self._pending):
            self._run_stage(task)

    def _run_stage(self, task: Task) -> None:
        if self.error is not None:
            return
        try:
            task.stages[task._stages_run]()
        except BaseException as error:  # noqa: BLE001 - `wait` raises it, as for a stage thread
            self.fail(error)
            return
        task._stages_run += 1
        if task._stages_run == len(task.stages):
            self._finish(task, None)


def _serve(pipeline: weakref.ref[Pipeline], number: int, inbox: Inbox) -> None:
    """Run one stage until the queue returns None. Between tasks the thread has only a weak
    reference, so an unused pipeline can be garbage-collected.
    """
    while (task := inbox.get()) is not None:
        owner = pipeline()
        if owner is not None:
            owner._work(number, task)
        elif not task._finished:
            task.done(RuntimeError("gradcomp: this state is gone"))
        del owner, task


def _stop(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
