"""Stages keep order, and one failure ends everything that is pending."""

import threading
import time

import pytest

from gradcomp.exchange.pipeline import Pipeline, Task


def test_every_stage_sees_tasks_in_order():
    pipeline, seen, ended = Pipeline(3), [[], [], []], []

    def stage(number, task):
        def run():
            time.sleep(0.001 * ((task + number) % 3))
            seen[number].append(task)

        return run

    for task in range(20):
        pipeline.submit(Task([stage(n, task) for n in range(3)], lambda error, t=task: ended.append((t, error))))
    pipeline.wait()
    assert seen == [list(range(20))] * 3
    assert ended == [(t, None) for t in range(20)]
    pipeline.close()


def test_a_failure_ends_pending_tasks_and_later_ones():
    pipeline, ended, gate = Pipeline(2), [], threading.Event()

    def fail():
        gate.wait(5)
        raise KeyError("stage")

    for task in range(4):
        first = fail if task == 1 else lambda: None
        pipeline.submit(Task([first, lambda: None], lambda error, t=task: ended.append((t, type(error)))))
    gate.set()
    with pytest.raises(KeyError):
        pipeline.wait()
    pipeline.submit(Task([lambda: None] * 2, lambda error: ended.append(("late", type(error)))))
    deadline = time.monotonic() + 5
    while len(ended) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    kinds = dict(ended)
    assert len(ended) == 5, "each task ends exactly once"
    assert kinds[1] is kinds[2] is kinds[3] is kinds["late"] is KeyError
    with pytest.raises(KeyError):
        pipeline.wait()
    pipeline.close()


def test_a_task_stuck_in_a_stage_does_not_keep_the_others_waiting():
    pipeline, stuck, ended = Pipeline(2), threading.Event(), threading.Event()
    pipeline.submit(Task([lambda: None, lambda: stuck.wait(30)], lambda error: ended.set()))
    pipeline.fail(RuntimeError("from outside"))
    assert ended.wait(2)
    stuck.set()
    pipeline.close()


def test_no_thread_before_the_first_task_and_none_after_close():
    before = threading.active_count()
    pipeline = Pipeline(4)
    assert threading.active_count() == before
    pipeline.submit(Task([lambda: None] * 4, lambda error: None))
    pipeline.wait()
    pipeline.close()
    assert threading.active_count() == before
    pipeline.close()
