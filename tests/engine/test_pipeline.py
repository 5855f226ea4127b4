"""Stages keep order, and one failure ends everything that is pending."""

import gc
import threading
import time

import pytest

from gradcomp.exchange import pipeline as pipelines
from gradcomp.exchange.pipeline import InlinePipeline, Pipeline, Task


@pytest.fixture
def patient(monkeypatch):
    """Have a failure wait for stages at work as long as they take."""
    monkeypatch.setattr(pipelines, "QUIET_S", 60.0)


def nothing(error=None):
    """What a stage does, or the end of a task, that a test is not about."""


def submit_stuck(pipeline, stage_count=2, then=nothing, done=nothing):
    """Submit a task and return once it is in its second stage, which waits for the event that is
    returned.
    """
    entered, gate = threading.Event(), threading.Event()

    def stage():
        entered.set()
        gate.wait(60)
        then()

    pipeline.submit(Task([nothing, stage, *[nothing] * (stage_count - 2)], done))
    assert entered.wait(20)
    return gate


def test_every_stage_sees_tasks_in_order():
    pipeline, seen, ended = Pipeline(3), [[], [], []], []

    def stage(number, task):
        def run():
            time.sleep(0.001 * ((task + number) % 3))
            seen[number].append(task)

        return run

    for task in range(20):
        pipeline.submit(
            Task([stage(n, task) for n in range(3)], lambda error, t=task: ended.append((t, error)))
        )
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
        stages = [fail if task == 1 else nothing, nothing]
        pipeline.submit(Task(stages, lambda error, t=task: ended.append((t, type(error)))))
    gate.set()
    with pytest.raises(KeyError):
        pipeline.wait()
    pipeline.submit(Task([nothing] * 2, lambda error: ended.append(("late", type(error)))))
    deadline = time.monotonic() + 5
    while len(ended) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    kinds = dict(ended)
    assert len(ended) == 5, "each task ends exactly once"
    assert kinds[1] is kinds[2] is kinds[3] is kinds["late"] is KeyError
    with pytest.raises(KeyError):
        pipeline.wait()
    pipeline.close()


def test_wait_returns_after_all_tasks_have_ended(monkeypatch):
    """However long peers take to be notified, while a stage is busy."""
    monkeypatch.setattr(pipelines, "QUIET_S", 0.2)
    pipeline, ended = Pipeline(2, on_failure=lambda reason: time.sleep(0.5)), []
    gate = submit_stuck(pipeline, done=ended.append)
    pipeline.submit(Task([lambda: 1 / 0, nothing], ended.append))
    with pytest.raises(ZeroDivisionError):
        pipeline.wait()
    assert len(ended) == 2
    gate.set()
    pipeline.close()


def test_a_task_ends_once_even_if_its_pipeline_is_gone(monkeypatch):
    monkeypatch.setattr(pipelines, "QUIET_S", 0.1)
    pipeline, ended = Pipeline(2), []
    (gate, thread) = submit_stuck(pipeline, done=ended.append), pipeline._threads[1]
    pipeline.submit(Task([nothing, nothing], ended.append))
    while not pipeline._inboxes[1].qsize():  # it waits for the second stage
        time.sleep(0.01)
    pipeline.fail(ValueError("lost"))
    del pipeline
    gc.collect()
    gate.set()
    thread.join(20)
    assert [str(error) for error in ended] == ["lost"] * 2


def test_a_task_stuck_in_a_stage_does_not_keep_the_others_waiting():
    pipeline, ended = Pipeline(2), []
    stuck, begun = submit_stuck(pipeline, done=ended.append), time.monotonic()
    pipeline.fail(RuntimeError("from outside"))
    assert ended and time.monotonic() - begun < 30
    stuck.set()
    pipeline.close()


def test_no_thread_before_the_first_task_and_none_after_close():
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    pipeline = Pipeline(4)
    assert set(threading.enumerate()) <= before
    pipeline.submit(Task([nothing] * 4, nothing))
    pipeline.wait()
    assert set(threading.enumerate()) - before
    pipeline.close()
    assert set(threading.enumerate()) <= before
    pipeline.close()


def test_the_first_error_stays(patient):
    """A second failure (a peer that is lost because this rank gave up) must not hide the cause."""
    pipeline, ended, first = Pipeline(2), [], KeyError("first")
    stuck = submit_stuck(pipeline, done=ended.append)

    def later():
        while pipeline.error is None:
            time.sleep(0.001)
        threading.Timer(0.1, stuck.set).start()  # until then the first one waits for the stage
        pipeline.fail(ValueError("second"))

    threading.Thread(target=later, daemon=True).start()
    pipeline.fail(first)
    pipeline.fail(ValueError("third"))
    assert repr(pipeline.error) == repr(first)
    with pytest.raises(KeyError, match="first"):
        pipeline.wait()
    pipeline.submit(Task([nothing] * 2, ended.append))
    assert ended == [pipeline.error] * 2
    pipeline.close()


def test_a_task_ends_after_its_stage_has(patient):
    """Whoever ends a task overwrites its buffer: a stage that decodes into it must have left it."""
    pipeline, order = Pipeline(2), []
    decode, end = (lambda: order.append("decoded")), (lambda error: order.append("ended"))
    gate = submit_stuck(pipeline, then=decode, done=end)
    # as an abort ends a collective
    pipeline._on_failure = lambda reason: threading.Timer(0.05, gate.set).start()
    pipeline.fail(RuntimeError("from outside"))
    assert order == ["decoded", "ended"]
    pipeline.close()


def test_close_ends_what_is_under_way_at_once():
    aborted, ended, entered = threading.Event(), [], threading.Event()
    pipeline = Pipeline(3, on_failure=lambda reason: aborted.set())

    def collective():
        entered.set()
        assert aborted.wait(30)
        raise ConnectionError("aborted")

    for task in range(3):
        stages = [nothing, collective, nothing]
        pipeline.submit(Task(stages, lambda error, t=task: ended.append((t, str(error)))))
    assert entered.wait(20)
    threads, begun = list(pipeline._threads), time.monotonic()
    pipeline.close(timeout_s=60)
    assert time.monotonic() - begun < 30
    assert sorted(ended) == [(t, "gradcomp: this state is closed") for t in range(3)]
    assert not any(thread.is_alive() for thread in threads)


def test_close_leaves_a_stage_that_will_not_end_behind():
    pipeline = Pipeline(4)
    stuck, threads = submit_stuck(pipeline, stage_count=4), list(pipeline._threads)
    pipeline.close(timeout_s=0.1)
    for number in (0, 2, 3):
        threads[number].join(20)
    alive = [thread.is_alive() for thread in threads]
    stuck.set()
    assert alive == [False, True, False, False], "every thread but the stuck one is told to stop"


def test_a_pipeline_that_nobody_uses_frees_its_threads():
    def alive():
        return sum(thread.name.startswith("dropped") for thread in threading.enumerate())

    for _ in range(3):
        pipeline = Pipeline(4, name="dropped")
        # a task knows its owner
        pipeline.submit(Task([nothing] * 4, lambda error, mine=pipeline: None))
        pipeline.wait()
    assert alive() >= 4
    del pipeline
    deadline = time.monotonic() + 20
    while alive() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive() == 0


def test_after_a_failure_no_task_ends_while_a_stage_is_at_work(patient):
    """The slices of one bucket are tasks of their own: the last one ends the bucket, which an
    earlier one may still write to.
    """
    pipeline, order = Pipeline(2), []
    writing, failed = threading.Event(), threading.Event()

    def write():
        writing.set()
        failed.wait(20)
        time.sleep(0.2)
        order.append("written")

    def fail():
        writing.wait(20)
        failed.set()
        raise KeyError("stage")

    first = Task([nothing, write], lambda error: order.append("first ends"))
    pipeline.submit(first, Task([fail, nothing], lambda error: order.append("last ends")))
    with pytest.raises(KeyError):
        pipeline.wait()
    assert order[0] == "written" and sorted(order[1:]) == ["first ends", "last ends"]
    pipeline.close()


def test_an_inline_pipeline_runs_a_stage_of_every_task_at_each_call():
    pipeline, seen = InlinePipeline(), []

    def task(name):
        stages = [lambda number=number: seen.append(f"{name}{number}") for number in range(3)]
        return Task(stages, lambda error: seen.append(f"{name} ends"))

    threads = threading.active_count()
    for name, wanted in [("a", ["a0"]), ("b", ["a1", "b0"]), ("c", ["a2", "a ends", "b1", "c0"])]:
        seen.clear()
        pipeline.submit(task(name))
        assert seen == wanted and threading.active_count() == threads
    seen.clear()
    pipeline.wait()
    assert seen == ["b2", "b ends", "c1", "c2", "c ends"] and pipeline.is_empty
    seen.clear()
    pipeline.submit(Task([lambda: seen.append("only")], lambda error: seen.append("ended")))
    assert seen == ["only", "ended"], "a task of one stage waits for no other call"


def test_an_inline_pipeline_ends_every_task_with_the_first_error():
    pipeline, ended = InlinePipeline(), []
    never = [nothing, lambda: pytest.fail("a stage ran after the failure")]
    pipeline.submit(Task([nothing, lambda: 1 / 0], ended.append))
    pipeline.submit(Task(never, ended.append))
    pipeline.submit(Task(never, ended.append))
    assert [type(error) for error in ended] == [ZeroDivisionError] * 3 and pipeline.is_empty
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pipeline.wait()
    pipeline.close()
    assert pipeline.closed and isinstance(pipeline.error, ZeroDivisionError)
