"""Ranks in their own processes: they are heard, named on failure, and end with the program."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from _held import settled
from _ranks import is_alive

from gradcomp.bench import ranks
from gradcomp.bench.ranks import Place, RankFailed, cores_of, run


def say_rank_then(emit, failing):
    rank = torch.distributed.get_rank()
    emit(rank)
    # a rank that ends while others still connect would be lost to them
    torch.distributed.barrier()
    if failing == "raise" and rank == 1:
        raise RuntimeError("made to fail")
    if failing == "killed":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # until it is ended


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("raise", "rank 1: RuntimeError: made to fail"),
        ("killed", "rank 1: ended by signal SIGKILL"),
    ],
)
def test_a_failing_rank_is_reported(failing, message):
    with pytest.raises(RankFailed, match=message):
        run(Place(2), say_rank_then, failing, on_message=lambda message: None)


@pytest.mark.slow
def test_ranks_are_heard():
    heard = []
    run(Place(3), say_rank_then, "nothing", on_message=heard.append)
    assert sorted(heard) == [0, 1, 2]


def test_the_rank_that_failed_first_is_named_and_not_those_that_lost_it():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.2]:34478"
    said = {0: lost, 1: "PeerLost: rank 2 is gone", 2: "ValueError: x"}
    assert ranks._why(said) == "rank 2: ValueError: x"
    assert ranks._why({1: lost, 3: "PeerLost: y"}) == f"rank 1: {lost}"


def test_a_rank_whose_status_is_lost_with_its_server_is_ended_all_the_same():
    rank = subprocess.Popen(["sleep", "100"], start_new_session=True)
    lost = SimpleNamespace(pid=rank.pid, poll=lambda: ranks.LOST, wait=lambda timeout_s: None)
    ranks._end([lost])
    assert rank.wait(20) < 0


def test_cores_are_shared_out():
    have = ranks.all_cores()
    if len(have) > 1:
        shared = [core for number in range(2) for core in cores_of(number, 2)]
        assert shared == list(have[: len(have) // 2 * 2])
    assert all(len(cores_of(number, 99)) == 1 for number in range(99))


KILLED = """
import os, time
import numpy
from gradcomp.bench.ranks import Place, run

def body(emit):
    emit((os.getpid(), os.environ["SET_SINCE"], numpy.random.rand()))
    time.sleep(100)

if __name__ == "__main__":
    for turn in "12":
        os.environ["SET_SINCE"] = turn
        said = []
        def heard(message):
            said.append(message)
            if len(said) == 2:
                print(*said[0], *said[1], flush=True)
                if turn == "1":
                    for pid, _, _ in said:
                        os.kill(pid, 9)
        try:
            run(Place(2), body, on_message=heard)
        except Exception:
            assert turn == "1"
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["", "x" * 100], ids=["", "TMPDIR too long for a socket"])
def test_ranks_of_a_program_that_is_killed_end_with_it(tmp_path, folder):
    """They are not its own children, nor do they inherit its variables."""
    (tmp_path / "program.py").write_text(KILLED)
    place = tmp_path / folder
    place.mkdir(exist_ok=True)
    run = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(place)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pids = []
        for turn in "12":
            one, its, drawn, two, theirs, other = run.stdout.readline().split()
            assert its == theirs == turn and drawn != other
            pids += [one, two]
    finally:
        run.kill()
        run.communicate()
    assert settled(lambda: sum(map(is_alive, pids)), 0) == 0


EARLY = """
import signal, sys, time
from gradcomp.bench.ranks import become_rank, warm_context

def body(said):
    become_rank({})
    said.put(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))

if __name__ == "__main__":
    context = warm_context()
    try:
        print("started", flush=True)
        time.sleep(100)
    except KeyboardInterrupt:
        said = context.Queue()
        context.Process(target=body, args=(said,), daemon=True).start()
        print(said.get(), flush=True)
"""


@pytest.mark.slow
def test_an_interrupt_while_the_server_of_ranks_imports_torch_prints_nothing(tmp_path):
    """Ctrl-C in the first three seconds of a bench printed a traceback of that server, which is
    of the same terminal.
    """
    (tmp_path / "program.py").write_text(EARLY)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    run = subprocess.Popen(
        [sys.executable, "program.py"], cwd=tmp_path, start_new_session=True, **pipes
    )
    try:
        assert run.stdout.readline() == "started\n"
        time.sleep(0.3)
        os.killpg(run.pid, signal.SIGINT)
        out, errors = run.communicate(timeout=120)
        assert errors == ""
        assert out == "False\n", "a rank cannot be interrupted"
    finally:
        run.kill()
        run.wait()
