"""What a rank waits for: seen from outside, and logged where it takes long."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from _ranks import logged, with_communicator

import gradcomp
from gradcomp import PeerLost, waits
from gradcomp.comm import gloo as groups
from gradcomp.comm.base import log_wait
from gradcomp.doctor.__main__ import main as doctor
from gradcomp.waits import look, waiting


def test_a_page_shows_what_a_process_waits_for():
    with waiting("first_phase", "first_phase of bucket 2"):
        inside = threading.Event()

        def wait_longer():
            with waiting("second_phase", "second_phase of bucket 1"):
                inside.set()
                time.sleep(0.3)

        thread = threading.Thread(target=wait_longer)
        thread.start()
        assert inside.wait(10)
        seen = look(os.getpid()).waits
        assert [what for what, _ in seen] == ["first_phase of bucket 2", "second_phase of bucket 1"]
        assert 0 <= seen[1][1] <= seen[0][1] < 10
        thread.join()
        assert [what for what, _ in look(os.getpid()).waits] == ["first_phase of bucket 2"]
    assert look(os.getpid()).waits == []


def test_more_waits_than_the_page_has_room_for_are_left_out():
    opened = [waiting("x", f"{n}" * 200) for n in range(100)]
    for one in opened:
        one.__enter__()
    assert 20 < len(look(os.getpid()).waits) < 100
    for one in reversed(opened):
        one.__exit__(None, None, None)
    assert look(os.getpid()).waits == []
    with waiting("x", "y"):
        assert len(look(os.getpid()).waits) == 1


def test_the_doctor_says_whom_a_long_wait_is_for(monkeypatch, capsys):
    """It named the phase only, while the log named the rank."""
    monkeypatch.setattr(waits, "WATCH_S", 0.0)
    monkeypatch.setattr(waits, "_longest", {})
    with waiting("first_phase", "first_phase of bucket 2"), logged("waits") as lines:
        log_wait(0, lambda: "rank 3, not waiting for any rank")
        assert doctor(["--attach", str(os.getpid())]) == 0
    said = "in first_phase of bucket 2 for rank 3, not waiting for any rank"
    assert lines[0].endswith(said) and capsys.readouterr().out.endswith(f"{said}\n")


CHILD = """
import os, sys
from gradcomp import waits

def write(*words):  # at once: print writes the end of a line later where PYTHONUNBUFFERED is set
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

with waits.waiting("a", "parent"):
    child = os.fork()
    if child == 0:
        with waits.waiting("b", "child"):
            write(*[what for what, _ in waits.look(os.getpid()).waits])
            sys.stdin.readline()
        os._exit(0)
    write(os.getpid())
    os.waitpid(child, 0)
"""


def test_a_fork_has_a_page_of_its_own():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environ = {"LOCAL_RANK": "1", "GROUP_RANK": "2"} | os.environ | {"RANK": "3"}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=environ, **pipes) as process:
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}
        assert lines == {"child", str(process.pid)}
        seen = look(process.pid)
        assert seen.rank == 3 and [what for what, _ in seen.waits] == ["parent"]
        process.communicate("\n")


def test_the_doctor_says_what_processes_wait_for(capsys):
    with (
        subprocess.Popen(["sleep", "60"]) as other,
        waiting("first_phase", "first_phase of bucket 2"),
    ):
        assert doctor(["--attach", f"{os.getpid()},{other.pid}"]) == 0
        other.kill()
    mine, others = capsys.readouterr().out.splitlines()
    assert mine.startswith(f"pid {os.getpid()}") and mine.endswith(" s in first_phase of bucket 2")
    assert (
        others == f"pid {other.pid}: has not waited for another rank yet, or does not run gradcomp"
    )
    assert doctor(["--attach", f"{other.pid},{os.getpid()}"]) == 1
    printed = capsys.readouterr()
    assert "waits for no other rank; py-spy dump" in printed.out
    assert f"pid {other.pid}: no process with that number" in printed.err


def late(comm, kind):
    """Return what each rank logs while rank 2 comes late, once, and then again."""
    with pytest.MonkeyPatch.context() as patch, logged("waits") as found:
        patch.setattr(waits, "WATCH_S", 1.0)
        patch.setattr(waits, "_longest", {})
        patch.setattr(groups, "NOTE_S", 0.3)
        gradcomp.all_reduce(torch.ones(100), "ternary", comm=comm)
        for seconds in (3.0, 2.5):  # what lasts as long as before is usual
            if comm.rank == 2:
                time.sleep(seconds)
            gradcomp.all_reduce(torch.ones(100), "ternary", comm=comm)
    return found


@pytest.mark.parametrize("kind", ["gloo", "mpich"])
@pytest.mark.slow
def test_a_long_wait_is_logged_once_with_the_rank_that_is_late(pools, kind):
    whom = "rank 2, not waiting for any rank"
    *early, third = pools(kind, 3, with_communicator, kind, late, kind)
    assert third == []
    for rank, (line,) in enumerate(early):
        assert line.startswith(f"gradcomp: rank {rank} waits ") and line.endswith(f" for {whom}")


def meeting():
    """Return what a rank logs while another one does not call what all have to call."""
    gradcomp.comm.TorchCommunicator(timeout_s=60).close()  # what a process does once takes long
    with pytest.MonkeyPatch.context() as patch, logged("waits") as found:
        patch.setattr(waits, "WATCH_S", 0.5)
        if dist.get_rank() == 1:
            time.sleep(3.5)
        gradcomp.comm.TorchCommunicator(timeout_s=60).close()
    return found


@pytest.mark.slow
def test_who_has_not_come_yet_is_logged(gloo):
    (line,), other = gloo(2, meeting)
    assert line.startswith("gradcomp: rank 0 waits ") and " for rank 1 to have " in line
    assert other == []


def test_ranks_that_wait_for_each_other_are_all_named(monkeypatch):
    class Notes:
        found = {0: "first_phase of bucket 0", 1: "second_phase of bucket 4"}  # noqa: RUF012

        def who_waits(self, patience_s):
            return self.found

    one = groups.Groups(None, 0, range(2), 1.0, Notes, one_host=True)
    one.notes = Notes()
    monkeypatch.setattr(groups, "find_lost", lambda *_: None)
    assert one._whom() == "ranks that wait, too: 1 in second_phase of bucket 4"
    Notes.found = None
    assert one._whom() == ""  # the store does not answer
    stopped = (1, "(pid 7 on h) is stopped (SIGSTOP, or a debugger)")
    monkeypatch.setattr(groups, "find_lost", lambda *_: stopped)
    assert one._whom() == "rank 1 (pid 7 on h), which is stopped (SIGSTOP, or a debugger)"


def test_an_error_has_the_rank_and_survives_pickle():
    error = PeerLost("first_phase", 2, 1.5, "rank 3 is stopped", 3)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, str(again)) == (3, str(error)) and PeerLost("setup", -1, 0.0).rank is None
