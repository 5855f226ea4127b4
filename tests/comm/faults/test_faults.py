"""Promise 4: a rank that dies or freezes in the middle of a step is PeerLost on the others
within timeout_s + 5 s.
"""

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import _forks
import _restart
import pytest
from _ranks import mpi_environment, mpi_python, output_of
from gradcomp.launch.ports import free_port

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
TIMEOUT_S = 3.0


@contextlib.contextmanager
def started(script, first, *more, world=3):
    """Start `script` FIRST RANK MORE... as every rank; kill what is left of them in the end."""
    ranks = [_forks.Program(HERE / script, first, rank, *more) for rank in range(world)]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


CLOSED = r": rank 1 \(pid \d+ on \S+\) closed its communicator"
GAVE_UP = r": rank 1 \(pid \d+ on \S+\) gave up because of "


@pytest.mark.parametrize("trials", [1, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("how", "timeout_s", "survivors", "wanted"),
    [
        ("die", TIMEOUT_S, (0, 1), r": rank 2 \(pid \d+ on \S+\) has ended: killed"),
        ("freeze", TIMEOUT_S, (0, 1), r": rank 2 \(pid \d+ on \S+\) is stopped"),
        ("elsewhere", TIMEOUT_S, (0, 1), r": rank 2 \(pid \d+ on \S+\) did not answer for 3 s"),
        ("stuck", TIMEOUT_S, (0, 2), r": rank 1 \(pid \d+ on \S+\) did not answer for 3 s"),
        ("nodes", TIMEOUT_S, (0, 1, 2), r": rank 3 \(pid \d+ on \S+\) did not answer for 3 s"),
        ("return", 60, (0, 2), CLOSED),
        pytest.param("close", 60, (0, 2), CLOSED, marks=pytest.mark.long),
        pytest.param("exits", 60, (0, 2), CLOSED, marks=pytest.mark.long),
        ("raises", 60, (0, 2), f"{GAVE_UP}LookupError: no more data"),
        ("interrupted", 60, (0, 2), rf"{GAVE_UP}KeyboardInterrupt\b(?!:)"),
        pytest.param(
            "out of memory", 60, (0, 2), f"{GAVE_UP}RuntimeError.*memory", marks=pytest.mark.long
        ),
        ("killed", 60, (0, 2), r": rank 1 \(pid \d+ on \S+\) has ended: killed"),
        ("buffers", 60, (0, 2), r": rank 1 \(pid \d+ on \S+\) has ended: killed"),
    ],
)
def test_survivors_end_soon_and_blame_no_survivor(how, timeout_s, survivors, wanted, trials):
    """It was gloo's "Connection closed by peer" without a rank, or "rank 2 is gone" of another
    survivor. Where a rank was stuck, or stopped on another host, survivors blamed each other.
    """
    for _ in range(trials):
        world = 4 if how == "nodes" else 3
        with started("_train.py", free_port(), world, how, timeout_s, world=world) as ranks:
            begun = time.monotonic()
            for rank in survivors:
                out, errors = ranks[rank].communicate(timeout=90 - (time.monotonic() - begun))
                found = re.search(r"PeerLost step=3 seconds=([\d.]+) (.*)", out)
                assert found and float(found[1]) < TIMEOUT_S + 5, out + errors
                assert re.search(wanted, found[2]), out
                assert f"\nlost {re.search('rank (.)', wanted)[1]}\n" in out, out
                assert not re.search(r"rank \d is gone", out), out
                assert wanted == CLOSED or "closed its communicator" not in out
                assert "again" in out
                assert "saved 3" in out, "an emergency checkpoint of before the failed step"
                assert ranks[rank].returncode == 1, "the interpreter ends by itself, with the error"
                assert "PeerLost" in errors


def test_survivors_end_by_themselves_when_a_frozen_host_of_the_store_wakes():
    """It was SIGABRT (-6): a thread of theirs came back from a call of the store while the
    interpreter finalized.
    """
    with started("_train.py", free_port(), 3, "host", TIMEOUT_S) as (host, *others):
        for process in others:
            text = "".join(iter(process.stdout.readline, "finalizing\n"))
            # it was "Operation timed out!" alone
            found = re.search(r"seconds=([\d.]+) .*: rank 0 \(pid \d+ on \S+\) is stopped", text)
            assert found, text
            assert float(found[1]) < TIMEOUT_S + 1.5, (
                "a store that does not answer is not waited for"
            )
        host.send_signal(signal.SIGCONT)
        for process in others:
            process.communicate(timeout=60)
            assert process.returncode == 1


FIRST = r"gradcomp\.launch: rank {} \(pid \d+ on \S+\) failed first: {}"
RANK_1 = r"rank 1 \(pid \d+ on \S+\) "
LONG = pytest.mark.long
SHORT = {("mpich", "freeze"), ("openmpi", "close")}  # the others are for `make test-long`


@pytest.mark.every_row
@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=LONG)])
@pytest.mark.parametrize(
    ("flavour", "how", "status", "wanted"),
    [
        pytest.param(
            *(flavour, *row),
            id=f"{flavour}-{row[0]}",
            marks=[LONG] * ((flavour, row[0]) not in SHORT),
        )
        for flavour in ("mpich", "openmpi")
        for row in (
            # survivors hear of it
            ("freeze", 1, r"rank 2 \(pid \d+ on \S+\) is stopped"),
            ("nodes", 1, r"rank 3 \(pid \d+ on \S+\) did not answer for 3 s"),
            ("close", 1, f"{RANK_1}closed its communicator"),
            ("return", 1, f"{RANK_1}(has ended|closed its communicator)"),
            # MPI ends them, and the launcher says it
            ("die", 137, FIRST.format(2, "killed by signal 9")),
            ("killed", 137, FIRST.format(1, "killed by signal 9")),
            ("exits", 3, FIRST.format(1, "exit status 3")),
            ("raises", 1, FIRST.format(1, "exit status 1")),
            ("interrupted", 130, FIRST.format(1, "exit status 130")),
            ("out of memory", 1, FIRST.format(1, "exit status 1")),
        )
    ],
)
def test_the_lost_rank_is_named_over_mpi(flavour, how, status, wanted, trials):
    """Under the launcher. A survivor that dies of it takes the job along, long before the
    launcher's grace is over. It was "no answer from a peer for 3 s".
    """
    grace_s = 20.0
    world = 4 if how == "nodes" else 3
    command = [mpi_python(flavour), "-m", "gradcomp.launch", "-n", world, "--grace", grace_s]
    for _ in range(trials):
        program = [HERE / "_train.py", free_port(), "mpi", world, how, TIMEOUT_S]
        done = output_of(*command, *program, env=mpi_environment())
        ended = time.time()
        assert done.returncode == status, done
        if wanted.startswith("gradcomp"):
            assert re.match(wanted, done.stderr.strip().splitlines()[-1]), done
            continue
        found = [line for line in done.stdout.splitlines() if line.startswith("PeerLost step=3")]
        woken = ": no answer from a peer"  # of the frozen one, which Open MPI wakes to end it
        found = [line for line in found if how != "freeze" or woken not in line]
        assert found and all(re.search(wanted, line) for line in found), done
        took = [float(re.findall(r"seconds=([\d.]+)", line)[0]) for line in found]
        assert max(took) < TIMEOUT_S + 5
        assert "again" in done.stdout and "saved 3" in done.stdout
        assert re.search(wanted, done.stderr.strip().splitlines()[-1]), done
        heard = float(re.findall(r"time=([\d.]+)", done.stdout)[0])
        assert ended - heard < grace_s, done


@pytest.mark.parametrize("fault", ["die", "freeze"])
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_worker_or_server_that_dies_or_freezes_in_a_round(tmp_path, who, fault):
    with started("_serve.py", tmp_path / "store", who, fault, TIMEOUT_S) as ranks:
        out, errors = ranks[0].communicate(timeout=60)
        found = re.search(r"PeerLost seconds=([\d.]+) (.*)", out)
        assert found, out + errors
        assert float(found[1]) < TIMEOUT_S + 5
        if who == "worker":
            assert "rank 1" in found[2] or "[1]" in found[2], found[2]
            assert "still [3.0, 3.0, 3.0, 3.0]" in out


@pytest.mark.long
def test_workers_that_torchrun_starts_again_end_as_if_nothing_had_been(tmp_path, gloo):
    """The settings of docs/howto/restarts.md; without the variable, restarted workers dial dead
    ones.
    """
    for name in ("plain", "restarted"):
        (tmp_path / name).mkdir()
    expected = gloo(2, _restart.train, str(tmp_path / "plain"), None)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "--max-restarts=1", _restart.__file__]
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    done = output_of(*torchrun, tmp_path / "restarted", env=os.environ | settings)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LookupError: once" in done.stderr
    found = [(tmp_path / "restarted" / f"end.{rank}").read_text().split() for rank in range(2)]
    assert found == [["1", digest] for digest in expected] and len(set(expected)) == 1
