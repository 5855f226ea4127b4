"""Stages keep order, and one failure ends everything that is pending."""

import gc
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
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    pipeline = Pipeline(4)
    assert set(threading.enumerate()) <= before
    pipeline.submit(Task([lambda: None] * 4, lambda error: None))
    pipeline.wait()
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert set(threading.enumerate()) <= before
    pipeline.close()


def test_the_first_error_stays():
    """A second failure (a peer that is lost because this rank gave up) must not hide the cause."""
    pipeline, ended, stuck = Pipeline(2), [], threading.Event()
    pipeline.submit(Task([lambda: None, lambda: stuck.wait(5)], ended.append))
    first = KeyError("first")
    threading.Timer(0.1, lambda: (pipeline.fail(ValueError("second")), stuck.set())).start()
    pipeline.fail(first)
    pipeline.fail(ValueError("third"))
    assert pipeline.error is first
    with pytest.raises(KeyError, match="first"):
        pipeline.wait()
    pipeline.submit(Task([lambda: None] * 2, ended.append))
    assert ended == [first, first]
    pipeline.close()


def test_a_task_ends_after_its_stage_has():
    """Whoever ends a task overwrites its buffer: a stage that decodes into it must have left it."""
    pipeline, order, entered, gate = Pipeline(2), [], threading.Event(), threading.Event()

    def decode():
        entered.set()
        gate.wait(5)
        order.append("decoded")

    pipeline._on_failure = lambda: threading.Timer(0.05, gate.set).start()  # as an abort ends a collective
    pipeline.submit(Task([lambda: None, decode], lambda error: order.append("ended")))
    assert entered.wait(5)
    pipeline.fail(RuntimeError("from outside"))
    assert order == ["decoded", "ended"]
    pipeline.close()


def test_close_ends_what_is_under_way_at_once():
    aborted, ended, entered = threading.Event(), [], threading.Event()
    pipeline = Pipeline(3, on_failure=aborted.set)

    def collective():
        entered.set()
        assert aborted.wait(30)
        raise ConnectionError("aborted")

    for task in range(3):
        stages = [lambda: None, collective, lambda: None]
        pipeline.submit(Task(stages, lambda error, t=task: ended.append((t, str(error)))))
    assert entered.wait(5)
    threads, begun = list(pipeline._threads), time.monotonic()
    pipeline.close()
    assert time.monotonic() - begun < 4  # close() itself waits for 5
    assert sorted(ended) == [(t, "gradcomp: this state is closed") for t in range(3)]
    assert not any(thread.is_alive() for thread in threads)


def test_close_leaves_a_stage_that_will_not_end_behind():
    pipeline, stuck = Pipeline(4), threading.Event()
    pipeline.submit(Task([lambda: None, lambda: stuck.wait(30), lambda: None, lambda: None], lambda error: None))
    while not pipeline._busy:
        time.sleep(0.001)
    threads = list(pipeline._threads)
    pipeline.close(timeout_s=0.1)
    alive = [thread.is_alive() for thread in threads]
    stuck.set()
    assert alive == [False, True, False, False], "every thread but the stuck one is told to stop"


def test_a_pipeline_that_nobody_uses_frees_its_threads():
    def alive():
        return sum(thread.name.startswith("dropped") for thread in threading.enumerate())

    for _ in range(3):
        pipeline = Pipeline(4, name="dropped")
        pipeline.submit(Task([lambda: None] * 4, lambda error, mine=pipeline: None))  # a task knows its owner
        pipeline.wait()
    assert alive() >= 4
    del pipeline
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() == 0


def test_after_a_failure_no_task_ends_while_a_stage_is_at_work():
    """The slices of one bucket are tasks of their own: the last one ends the bucket, which an earlier one may still write to."""
    pipeline, order = Pipeline(2), []
    writing, failed = threading.Event(), threading.Event()

    def write():
        writing.set()
        failed.wait(5)
        time.sleep(0.2)
        order.append("written")

    def fail():
        writing.wait(5)
        failed.set()
        raise KeyError("stage")

    first = Task([lambda: None, write], lambda error: order.append("first ends"))
    pipeline.submit(first, Task([fail, lambda: None], lambda error: order.append("last ends")))
    with pytest.raises(KeyError):
        pipeline.wait()
    assert order[0] == "written" and sorted(order[1:]) == ["first ends", "last ends"]
    pipeline.close()
