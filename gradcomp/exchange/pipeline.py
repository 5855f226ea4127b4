"""FIFO stages that keep overlapped exchanges in bucket order.

Each stage is a thread with a queue of its own, and each stage starts collectives on one channel
only; so every channel sees its collectives in bucket order on every rank, and no callback ever
blocks a thread that another collective needs. (Chaining collectives in `Future.then` deadlocks on
gloo: its callbacks occupy the threads that would run the next one.)
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

logger = logging.getLogger("gradcomp")

# after a failure, longest wait for stages that are at work: an abort ends their collectives within
# a second
QUIET_S = 1.5
# Python runs signal handlers between waits: a Ctrl-C that another thread received is seen this late
LOOK_S = 0.25


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
    _stages_run: int = field(default=0, repr=False)  # by an `InlinePipeline`


Inbox = queue.SimpleQueue["Task | None"]
_running: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def _close_all() -> None:
    """Stop the threads of every pipeline before the interpreter goes: one that comes back from
    C++ later would abort it.
    """
    for pipeline in list(_running):
        # peers that wait hear of the exception that nobody caught
        pipeline.close(error=getattr(sys, "last_value", None))


class Pipeline:
    """Runs tasks through `stage_count` stages, each task after the one before it.

    The first exception of any stage ends every pending task with it and refuses all later ones:
    nothing hangs, nothing continues silently. A task ends when no stage works on it any more, or
    QUIET_S after the failure. Threads start with the first task; they end with `close`, with the
    pipeline, and with the interpreter.

    Args:
        stage_count: threads, one a stage.
        name: of the threads.
        on_failure: called at every failure with the first error in words, before tasks are ended;
            it should make waits of other stages end soon.

    Attributes:
        error: the first that there was.
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
        self._busy: set[int] = set()  # stages at work
        self.error: BaseException | None = None
        self.closed = False

    def submit(self, *tasks: Task) -> None:
        """Send tasks on their way, one after the other; all of them end at once if the pipeline
        has failed.
        """
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
        """Block until no task is pending and, after a failure, no stage is at work (for QUIET_S at
        most).

        Raises:
            BaseException: what made a stage fail; every later call raises it again.
        """
        with self._changed:
            while self._pending and self.error is None:
                self._changed.wait(LOOK_S)
            if self.error is not None:
                self._changed.wait_for(lambda: not self._pending and not self._busy, QUIET_S)
                raise self.error

    @property
    def is_empty(self) -> bool:
        """Whether no task is under way."""
        return not self._pending

    def rest(self) -> None:
        """Block until no stage is at work, for QUIET_S at most: after a failure nothing is
        written any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, QUIET_S)

    def fail(self, error: BaseException) -> None:
        """End every pending task with `error`, now and for good. The first error stays."""
        with self._changed:
            if self.error is None:
                self.error = error
            self._changed.notify_all()
        try:
            self._on_failure(f"{type(self.error).__name__}: {self.error}")
        except Exception:
            logger.exception("the peers could not be notified of a failure")
        # a stage that works on a task ends it: nobody touches its buffers before that
        with self._changed:
            self._changed.wait_for(lambda: not self._busy, QUIET_S)
            pending = list(self._pending)
        for task in pending:
            self._finish(task, self.error)

    def close(self, timeout_s: float = 5.0, error: BaseException | None = None) -> None:
        """End what is pending, with `error` if there is one, and stop the threads; one that is
        stuck in a collective is left behind (it is a daemon).
        """
        _running.discard(self)
        self.closed = True
        closed = error or RuntimeError("gradcomp: this state is closed")
        if self._pending:
            self.fail(closed)
        elif self.error is None:
            self.error = closed
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
        me = weakref.ref(self)
        weakref.finalize(self, _stop, self._inboxes).atexit = False
        for number, inbox in enumerate(self._inboxes):
            name = f"{self._name}-{number}"
            thread = threading.Thread(
                target=_serve, args=(me, number, inbox), name=name, daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _work(self, number: int, task: Task) -> None:
        """Run one stage of a task and send it on, or end it."""
        with self._changed:
            works = self.error is None
            if works:
                self._busy.add(number)
        error: BaseException | None = None
        try:
            if works:
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
            # `fail` ends all tasks together, since another stage may be at work on a slice of the
            # same bucket
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
    """Runs tasks on the calling thread, and has no threads of its own: each `submit` runs the next
    stage of every task under way, the oldest first, then the first stage of the new one.

    So n - 1 tasks of n stages are under way between calls; a task of one stage ends in `submit`.
    What a stage raises ends all tasks, as in any `Pipeline`; `wait` raises it.
    """

    def __init__(self) -> None:
        super().__init__(stage_count=0)

    def submit(self, *tasks: Task) -> None:
        """Run one stage of every task under way and of these."""
        for task in tasks:
            self._run_stages()
            if self.error is None:
                self._pending.append(task)
                self._run_stage(task)
            else:
                self._finish(task, self.error)

    def wait(self) -> None:
        """Run the tasks under way to their ends; raise what made a stage fail."""
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
    """Run one stage until None comes. Between tasks a thread holds nothing: a pipeline that
    nobody uses can go.
    """
    while (task := inbox.get()) is not None:
        owner = pipeline()
        if owner is None:
            task.done(RuntimeError("gradcomp: this state is gone"))
        else:
            owner._work(number, task)
        del owner, task


def _stop(inboxes: Sequence[Inbox]) -> None:
    for inbox in inboxes:
        inbox.put(None)
