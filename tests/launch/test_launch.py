"""The launcher: right variables, exit status and last words under both MPIs and torchrun, and
nothing left behind.
"""

import ast
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from _ranks import mpi_python, output_of
from gradcomp.launch import cli, mpirun, supervise, sweep
from gradcomp.launch.variables import NAMES

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
how, rank, mpi = sys.argv[1], int(os.environ["RANK"]), "nompi" not in sys.argv
if mpi:
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    assert (comm.rank, comm.size) == (rank, int(os.environ["WORLD_SIZE"]))
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
os.system("sleep 300 &")  # a process of the rank's own, which must go too
comm.Barrier() if mpi else time.sleep(0.5)
segments = {line.split()[5] + "\\n" for line in open("/proc/self/maps") if "/dev/shm/" in line}
# what is printed last may be lost where a job ends by MPI_Abort
with open(f"segments.{rank}", "w") as mine:
    mine.writelines(segments)
os.write(1, b"ready\\n")  # one piece: print's newline may be parted from its text
if rank == 1 and how != "wait":
    if how == "raise":
        raise LookupError("this rank's own words")
    if how == "sys.exit":
        sys.exit(3)
    if how == "text":
        sys.exit("these were my last words")
    if how == "_exit":
        os._exit(5)
    os.kill(os.getppid() if "watcher" in sys.argv else os.getpid(), getattr(signal, how))
if mpi and how != "wait":
    comm.recv(source=1)
time.sleep(300)
"""
SHOW = """
import os, sys
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
line = repr({"argv": sys.argv[1:], "main": __name__, "path": sys.path[0]}
            | {"torch": "torch" in sys.modules}
            | {n: os.environ.get(n) for n in names.split()})
os.write(1, (line + "\\n").encode())
"""


@pytest.fixture(params=["mpich", "openmpi"])
def python(request):
    return mpi_python(request.param)


class Launch:
    """One run of the launcher whose processes can all be recognised."""

    def __init__(self, python, *arguments, cwd, **variables):
        self.mark = f"GRADCOMP_TEST_MARK={uuid.uuid4().hex}"
        self.scratch = cwd / "scratch"
        self.scratch.mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if k not in NAMES and k != "OMP_NUM_THREADS"}
        self.process = subprocess.Popen(
            [python, "-m", "gradcomp.launch", *map(str, arguments)],
            cwd=cwd,
            env=kept | dict([self.mark.split("=")]) | {"TMPDIR": str(self.scratch)} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def end(self):
        """Return exit status and the lines printed."""
        out, _ = self.process.communicate(timeout=90)
        assert [p.name for p in self.scratch.iterdir() if re.match("gradcomp|ompi", p.name)] == []
        return self.process.returncode, out.decode(errors="replace").splitlines()

    def wait_ready(self, ranks):
        for _ in range(ranks):
            while b"ready" not in (line := self.process.stdout.readline()):
                assert line, "ended before it was ready"

    def left(self):
        """Return the command lines of all processes that still carry the mark."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
        return found


def launch(python, *arguments, cwd, **variables):
    run = Launch(python, *arguments, cwd=cwd, **variables)
    status, lines = run.end()
    assert run.left() == []
    return status, lines


def bootstrap(folder, script, **options):
    """Start a rank as the launcher does, with its records in `folder`."""
    command = [sys.executable, str(cli.BOOTSTRAP), str(folder), str(script)]
    environ = {"PATH": os.environ["PATH"]}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


# ---- what every rank is given


def shown(lines):
    return sorted(
        (ast.literal_eval(line) for line in lines if line.startswith("{")),
        key=lambda f: int(f["RANK"]),
    )


def assert_ranks(found, size):
    for rank, fields in enumerate(found):
        assert (fields["RANK"], fields["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (fields["WORLD_SIZE"], fields["LOCAL_WORLD_SIZE"]) == (str(size), str(size))
        assert fields["MASTER_ADDR"] == "127.0.0.1" and int(fields["MASTER_PORT"]) > 1023
        assert fields["main"] == "__main__" and not fields["torch"]
    assert len(found) == size and len({f["MASTER_PORT"] for f in found}) == 1


def test_every_rank_has_its_variables_and_arguments(python, folder):
    ranks = len(os.sched_getaffinity(0)) + 1
    words = ["-n", ranks, "show.py", "-n", "a b", "--dry-run"]
    stale = {"RANK": 7, "WORLD_SIZE": 9, "PMI_RANK": 5, "PMI_SIZE": 6, "OMPI_COMM_WORLD_RANK": 4}
    stale = {name: str(value) for name, value in stale.items()}
    status, lines = launch(python, *words, cwd=folder, **stale)
    assert status == 0, lines
    found = shown(lines)
    assert_ranks(found, ranks)
    assert all(f["argv"] == ["-n", "a b", "--dry-run"] and f["path"] == str(folder) for f in found)
    assert all(f["OMP_NUM_THREADS"] == "1" for f in found)
    assert sum("OMP_NUM_THREADS=1" in line for line in lines) == 1


def test_a_module_runs_on_named_hosts_and_what_is_set_is_kept(python, folder):
    """Both MPIs accept the host list and hand the variables on."""
    (folder / "hosts").write_text("localhost slots=2\n")
    given = {"MASTER_PORT": "12345", "OMP_NUM_THREADS": "2"}
    words = ["--bind", "core", "--hostfile", "hosts", "-m", "show", "x"]
    status, lines = launch(python, "-n", 2, *words, cwd=folder, **given)
    assert status == 0, lines
    found = shown(lines)
    assert [f["RANK"] for f in found] == ["0", "1"]
    for one in found:
        assert one["argv"] == ["x"] and one["path"] == str(folder)
        assert (given | {"MASTER_ADDR": "localhost"}).items() <= one.items()


def test_torchrun_gives_the_same_variables_and_rules(folder):
    status, lines = launch(sys.executable, "-n", 2, "--torch", "show.py", "x", cwd=folder)
    assert status == 0, lines
    assert_ranks(shown(lines), 2)
    status, lines = launch(
        sys.executable, "-n", 2, "--torch", "program.py", "_exit", "nompi", cwd=folder
    )
    assert status == 5 and "rank 1 " in lines[-1], lines  # torchrun's own status is 1


# ---- how it ends

ENDS = {
    "raise": (1, "LookupError: this rank's own words"),
    "sys.exit": (3, "exit status 3"),
    "text": (1, "these were my last words"),
    "_exit": (5, "exit status 5"),
    "SIGKILL": (137, "killed by signal 9 (SIGKILL), exit status 137"),
    "SIGABRT": (134, "killed by signal 6 (SIGABRT), exit status 134"),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_first_failing_rank_decides(python, folder, how):
    status, lines = launch(python, "-n", 3, "--grace", 1, "program.py", how, cwd=folder)
    expected, last = ENDS[how]
    assert status == expected, lines
    assert lines[-1].endswith(last), lines
    assert re.match(r"gradcomp\.launch: rank 1 \(pid \d+ on \S+\) failed first: ", lines[-1]), lines
    segments = {line for path in folder.glob("segments.*") for line in path.read_text().split()}
    segments = {line for line in segments if line.startswith("/")}
    assert segments and not [path for path in segments if Path(path).exists()]
    if how == "raise":
        assert "runpy" not in "\n".join(lines) and "bootstrap.py" not in "\n".join(lines[-6:])


def test_a_watcher_that_is_killed_makes_no_other_rank_the_first_failure(python, folder):
    """Open MPI stops the others by SIGTERM; it was "rank 0 failed first: killed by signal 15".
    Under MPICH the job never ended, because the lost rank's own process was left.
    """
    words = ["--grace", 1, "program.py", "SIGKILL", "watcher"]
    status, lines = launch(python, "-n", 3, *words, cwd=folder)
    # MPICH kills the other watchers, too, perhaps before the launcher has looked
    known = r"\[1\]" if "openmpi" in python else r"\[(0, )?1(, 2)?\]"
    assert status in (1, 137) and "failed first" not in "".join(lines), lines
    assert re.search(f"ranks {known} were killed before they could say why$", lines[-1]), lines


def test_ranks_without_mpi_that_ignore_sigterm_go_too(python, folder):
    status, lines = launch(
        python, "-n", 2, "--grace", "0.5", "program.py", "raise", "nompi", "deaf", cwd=folder
    )
    said = "LookupError: this rank's own words"
    assert status == 1 and lines[-2] == said and lines[-1].endswith(f"exit status 1: {said}")


@pytest.mark.parametrize(
    ("number", "deaf"), [(signal.SIGINT, ()), (signal.SIGTERM, ("deaf",))], ids=["SIGINT", "deaf"]
)
def test_a_signal_to_the_launcher_ends_every_process(python, folder, number, deaf):
    run = Launch(python, "-n", 2, "--grace", "1", "program.py", "wait", *deaf, cwd=folder)
    run.wait_ready(2)
    assert len(run.left()) > 4  # the search does find them
    run.process.send_signal(number)
    status, lines = run.end()
    assert status == 128 + number, lines
    assert number.name in lines[-1]
    assert run.left() == []


def test_a_second_ctrl_c_kills_at_once(folder):
    run = Launch(
        mpi_python("mpich"), "-n", 2, "--grace", "60", "program.py", "wait", "deaf", cwd=folder
    )
    run.wait_ready(2)
    begin = time.monotonic()
    # two that come at once are one
    while run.process.poll() is None and time.monotonic() - begin < 30:
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    status, _ = run.end()
    assert status == 130 and run.left() == [] and time.monotonic() - begin < 30


def test_a_rank_killed_while_the_mpi_cleans_up_is_still_on_record(tmp_path):
    """A SIGTERM that comes together with the kill -9 must not keep the watcher from writing."""
    script, folder = tmp_path / "dies.py", tmp_path / "records"
    script.write_text("import time\nopen('up', 'w').close()\ntime.sleep(60)\n")
    folder.mkdir(0o700)
    watcher = bootstrap(folder, script, cwd=tmp_path)
    while not (tmp_path / "up").exists():
        time.sleep(0.01)
    (rank,) = supervise.descendants(watcher.pid)
    watcher.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    watcher.send_signal(signal.SIGTERM)
    watcher.send_signal(signal.SIGCONT)
    assert watcher.wait(30) == -signal.SIGKILL
    assert cli.first_failure(folder).status == 137


@pytest.mark.parametrize(
    ("ends", "died"), [("raise LookupError", True), ("raise SystemExit(3)", False), ("", False)]
)
def test_what_runs_at_exit_sees_whether_the_program_died(tmp_path, ends, died):
    """MpiCommunicator ends the job at once after an exception, and waits for other ranks after
    any other end.
    """
    script = tmp_path / "script.py"
    script.write_text(
        f"import atexit, sys\natexit.register(lambda: print(hasattr(sys, 'last_value')))\n{ends}\n"
    )
    assert bootstrap(cli.NO_FOLDER, script).communicate()[0].split() == [str(died)]


def ignore_sigchld():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def test_a_rank_ends_where_its_starter_ignores_sigchld(tmp_path):
    """Its watcher waited for ever."""
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(3)\n")
    with bootstrap(cli.NO_FOLDER, script, preexec_fn=ignore_sigchld) as rank:
        try:
            assert rank.wait(60) == 3
        finally:
            rank.kill()


def test_a_command_that_fails_has_its_status_where_sigchld_is_ignored():
    """It was 0."""
    code = "import os; from gradcomp.launch.supervise import supervise\n"
    code += "print(supervise(['false'], os.environ, grace_s=1, has_failed=lambda: False))"
    done = output_of(sys.executable, "-c", code, preexec_fn=ignore_sigchld)
    assert done.stdout == "(1, 0)\n", done


ENDS_ON_RECORD = [
    # (rank, when, status) of ends, ranks that started, {rank: when} the MPI stopped it, mpirun's
    # status, ours, words
    ([(0, 30, 1), (1, 20, 137), (2, 10, 0)], [], {}, 1, 137, "rank 1 (pid 5 on h) failed first"),
    ([(0, 30, 1), (1, 20, 143)], [], {1: 15, 0: 31}, 1, 1, "rank 0 (pid 5 on h) failed first"),
    ([(0, 30, 143)], [0, 1, 2], {0: 20, 1: 20}, 137, 137, "ranks [2] were killed"),
    ([(0, 30, 143)], [0], {0: 20}, 0, 143, "status 143; no rank of this host failed"),
    ([(0, 30, 0)], [0], {0: 20}, 0, 0, ""),
    ([], [0], {}, 9, 137, "ranks [0] were killed"),  # MPICH gives the bare number of a signal
    ([], [0], {}, 137, 137, "ranks [0] were killed"),
    ([], [0], {}, 1, 1, "ranks [0] were killed"),  # MPI_Abort(1) under MPICH; it was 129
    ([], [0], {}, 40, 40, "ranks [0] were killed"),
    ([], [], {}, 7, 7, "mpirun ended with status 7; no rank of this host failed"),
]


@pytest.mark.parametrize(("ends", "begun", "stopped", "status", "expected", "says"), ENDS_ON_RECORD)
def test_the_first_failure_on_record_is_the_status(
    tmp_path, capsys, ends, begun, stopped, status, expected, says
):
    for rank, when in stopped.items():
        (tmp_path / f"stopped.{rank}").write_text(json.dumps({"time_ns": when}))
    for rank, when, own in ends:
        record = {"rank": rank, "host": "h", "pid": 5, "time_ns": when, "status": own, "signal": 0}
        (tmp_path / f"ended.{rank}").write_text(json.dumps(record))
    for rank in begun:
        (tmp_path / f"started.{rank}").touch()
    assert cli._verdict(tmp_path, status, "mpirun") == expected
    assert says in capsys.readouterr().err


def test_a_survivor_of_a_killed_watcher_is_not_the_first_failure(tmp_path, capsys):
    """It raises PeerLost before MPICH ends it."""
    record = {"rank": 0, "host": "h", "pid": 5, "time_ns": 30, "status": 1, "signal": 0}
    (tmp_path / "ended.0").write_text(json.dumps(record))
    for rank in range(2):
        (tmp_path / f"started.{rank}").touch()
    for when, says in ((20, "ranks [1] were killed"), (40, "rank 0 (pid 5 on h) failed first")):
        (tmp_path / "killed").write_text(json.dumps({"ranks": [1], "time_ns": when}))
        assert cli._verdict(tmp_path, 1, "mpirun") == 1
        assert says in capsys.readouterr().err


def test_survivors_that_are_killed_later_are_not_called_lost(tmp_path, capsys):
    """Without a record, on a busy machine: it was "ranks [0, 1] were killed"."""
    for rank in range(3):
        (tmp_path / f"started.{rank}").touch()
    (tmp_path / "killed").write_text(json.dumps({"ranks": [1], "time_ns": 20}))
    assert cli._verdict(tmp_path, 1, "mpirun") == 1
    assert "ranks [1] were killed" in capsys.readouterr().err
    (tmp_path / "killed").write_text("")  # the disk was full
    assert cli._verdict(tmp_path, 1, "mpirun") == 1
    assert "ranks [0, 1, 2] were killed" in capsys.readouterr().err


def test_a_folder_that_others_can_write_gets_no_record(tmp_path):
    script = tmp_path / "empty.py"
    script.touch()
    for mode, expected in ((0o777, []), (0o700, ["ended.0", "started.0"])):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        assert bootstrap(folder, script).wait() == 0
        assert sorted(p.name for p in folder.iterdir()) == expected


def test_a_rank_whose_end_cannot_be_recorded_does_not_count_as_killed(tmp_path):
    """The launcher ended the other ranks, on a full disk say."""
    folder, script = tmp_path / "records", tmp_path / "program.py"
    folder.mkdir(mode=0o700)
    script.write_text(
        "import os, resource\n"
        "for process in (0, os.getppid()):\n"
        "    resource.prlimit(process, resource.RLIMIT_FSIZE, (0, 0))\n"
    )
    with bootstrap(folder, script, stderr=subprocess.PIPE) as rank:
        assert "rank 0 left no record" in rank.communicate()[1]
    assert rank.returncode == 0
    assert not list(folder.glob("started.*"))
    assert not cli.is_ending(folder)


HOLD = """
import mmap, os, sys
mapped, opened = (os.open(path, os.O_RDWR) for path in sys.argv[1:])
held = mmap.mmap(mapped, 4096)
os.close(mapped)
print("holding", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shm(tmp_path, monkeypatch):
    """Return (folder, before): a /dev/shm in which files have come since the job began, some of
    them another job's, and what was there before; another process uses two of the files.
    """
    monkeypatch.setattr(sweep, "FOLDER", tmp_path)
    (tmp_path / "mpich_shm_earlier_0").write_bytes(bytes(4096))
    before = sweep.segments()
    for name in (*OURS, *THEIRS):
        (tmp_path / name).write_bytes(bytes(4096))
    if os.geteuid() == 0:
        os.chown(tmp_path / "mpich_shm_user_0", 65534, -1)
    else:
        (tmp_path / "mpich_shm_user_0").rename(tmp_path / "user")
    used = [str(tmp_path / name) for name in ("mpich_shm_mapped_0", "sm_segment.opened")]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD, *used], stdin=pipe, stdout=pipe) as other:
        assert other.stdout.readline()
        yield tmp_path, before
        other.stdin.close()


OURS = {"mpich_shm_1f_0", "sm_segment.host.0.1f.0", "vader_segment.host.0.1f.0"}
THEIRS = [
    "mpich_shm_mapped_0",
    "sm_segment.opened",
    "mpich_shm_user_0",
    "data.bin",
    "my_mpich_shm_1",
]


def test_the_sweep_touches_no_file_of_another_job_or_user(shm):
    folder, before = shm
    there = {path.name for path in folder.iterdir()}
    sweep.remove(before)
    assert {path.name for path in folder.iterdir()} == there - OURS
    assert OURS < there and len(there - OURS) == 1 + len(THEIRS)


@pytest.mark.parametrize("why", ["container", "unreadable", "no /proc"])
def test_the_sweep_removes_nothing_if_it_cannot_see_every_process(
    shm, tmp_path_factory, monkeypatch, why
):
    _, before = shm
    there = sweep.segments()
    with monkeypatch.context() as patch:
        proc = tmp_path_factory.mktemp("proc")
        patch.setattr(sweep, "PROC", proc)
        if why != "no /proc":
            (proc / "self/ns").mkdir(parents=True)
            for path in ("self/ns/ipc", "self/ns/pid", "17"):
                (proc / path).touch()
        if why == "container":
            patch.setattr(sweep, "HOST_IPC", (proc / "self/ns/ipc").stat().st_ino)
        if why == "unreadable":

            def refuse(path):
                raise PermissionError(path)

            patch.setattr(sweep.os, "listdir", refuse)
        sweep.remove(before)
        assert sweep.segments() == there
    sweep.remove(before)
    assert sweep.segments() < there


# ---- command lines


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return make(version text): an mpirun that prints it, chosen by GRADCOMP_MPIRUN."""

    def make(text):
        path = tmp_path / "mpirun"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        path.chmod(0o755)
        monkeypatch.setenv("GRADCOMP_MPIRUN", str(path))
        monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: object())
        return str(path)

    return make


HYDRA = "HYDRA build details:\n    Version:  4.2.0"
WRONG = [  # "FILE" is a script that there is
    ("-n 2 nowhere.py", "script not found: nowhere.py"),
    ("-n 2 -m no_such_module_here.x", "module not found: no_such_module_here.x"),
    ("-n 0 x.py", "'0' is not a positive integer"),
    ("-n -1 x.py", "-n"),
    ("-n x x.py", "'x' is not a positive integer"),
    ("x.py", "-n"),
    ("-n 2", "no program given"),
    ("-n 2 --bogus x.py", "unknown option --bogus"),
    ("-n 2 --grase 3 x.py", "unknown option --grase; did you mean --grace?"),
    ("-n 2 --grace -1 FILE", "'-1'"),
    ("-n 2 --grace soon FILE", "'soon' is not a number of seconds"),
    ("-n 2 --bind chair FILE", "'chair'"),
    ("-n 2 -H a:0 FILE", "'a:0' is not a host"),
    ("-n 2 --hostfile nowhere FILE", "cannot read the host file nowhere"),
    ("-n 2 --torch -H a FILE", "--torch"),
]


@pytest.mark.parametrize(("arguments", "says"), WRONG)
def test_a_wrong_command_line_is_one_line_and_status_2(arguments, says, capsys):
    assert cli.main(arguments.replace("FILE", __file__).split()) == 2
    err = capsys.readouterr().err
    assert says in err and err.startswith("gradcomp.launch: ") and err.count("\n") == 1


def test_without_an_mpi_the_process_says_what_to_install(folder):
    status, lines = launch(sys.executable, "-n", 2, "show.py", cwd=folder, PATH=str(folder))
    assert status == 2 and len(lines) == 1 and "pip install 'gradcomp[mpi]'" in lines[0]


def test_a_port_of_another_job_is_told_and_a_free_one_is_not(fake, monkeypatch, capsys):
    fake(HYDRA)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("MASTER_PORT", port)
        assert cli.main(["-n", "1", "--dry-run", __file__]) == 2
        assert f"MASTER_PORT={port} is in use on 127.0.0.1" in capsys.readouterr().err
        monkeypatch.setenv("MASTER_ADDR", "203.0.113.7")  # another host's port
        assert cli.main(["-n", "1", "--dry-run", __file__]) == 0
        monkeypatch.delenv("MASTER_ADDR")
    assert cli.main(["-n", "1", "--dry-run", __file__]) == 0
    monkeypatch.setenv("MASTER_PORT", "no port")  # for the ranks to say
    assert cli.main(["-n", "1", "--dry-run", __file__]) == 0


def test_a_missing_mpi4py_or_mpirun_is_named(fake, monkeypatch, capsys):
    fake(HYDRA)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["-n", "1", __file__]) == 2
    says = "mpi4py is not installed; install it with: pip install 'gradcomp[mpi]'"
    assert says in capsys.readouterr().err
    monkeypatch.setenv("GRADCOMP_MPIRUN", "/nowhere/mpirun")
    assert cli.main(["-n", "1", __file__]) == 2
    assert "GRADCOMP_MPIRUN=/nowhere/mpirun is not a program" in capsys.readouterr().err


def test_the_environment_s_own_mpirun_comes_before_path(tmp_path):
    for folder in ("bin", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(0o755)
    own, other = (str(tmp_path / f / "mpiexec") for f in ("bin", "path"))
    environ = {"PATH": str(tmp_path / "path")}
    assert mpirun.find(str(tmp_path / "bin/python"), environ) == own
    assert mpirun.find(str(tmp_path / "elsewhere/python"), environ) == other
    environ["GRADCOMP_MPIRUN"] = "mpiexec"
    assert mpirun.find(str(tmp_path / "bin/python"), environ) == other


VERSIONS = {
    "mpirun (Open MPI) 5.0.11\n\nReport bugs to": ("openmpi", 5),
    "mpirun (Open MPI) 4.1.6": ("openmpi", 4),
    "mpiexec (OpenRTE) 2.0.1": ("unknown", 0),
    "HYDRA build details:\n    Version:                                 5.0.2": ("mpich", 5),
    "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619": ("unknown", 0),
    "": ("unknown", 0),
}


def test_flavour_from_version():
    for text, wanted in VERSIONS.items():
        assert mpirun.parse_version("mpirun", text)[1:] == wanted, text


OPENMPI_5 = "--map-by :OVERSUBSCRIBE --bind-to"
COMMANDS = [  # flavour, major version, options, what they become; None: they are refused
    ("openmpi", 5, {}, f"{OPENMPI_5} none"),
    ("openmpi", 5, {"as_root": True}, f"--allow-run-as-root {OPENMPI_5} none"),
    ("openmpi", 5, {"bind": "socket"}, f"{OPENMPI_5} package:overload-allowed"),
    ("openmpi", 4, {"bind": "socket"}, "--oversubscribe --bind-to socket:overload-allowed"),
    ("openmpi", 5, {"hosts": "a,b:2", "forward": ["A"]}, f"{OPENMPI_5} none --host a,b:2 -x A"),
    ("mpich", 4, {"as_root": True, "bind": "core", "hosts": "a,b:2"}, "-bind-to core -hosts a,b:2"),
    ("unknown", 0, {}, ""),
    ("unknown", 1, {"hosts": "a"}, None),
    ("unknown", 1, {"bind": "core"}, None),
]


@pytest.mark.parametrize(("flavour", "major", "options", "expected"), COMMANDS)
def test_command_of_each_flavour(flavour, major, options, expected):
    options = {"as_root": False} | options
    options["hosts"] = mpirun.parse_hosts(options["hosts"]) if "hosts" in options else []
    mpi = mpirun.Mpi("mpirun", flavour, major)
    if expected is None:
        with pytest.raises(mpirun.LaunchError, match="neither Open MPI nor MPICH"):
            mpirun.command(mpi, 3, **options)
    else:
        assert mpirun.command(mpi, 3, **options) == ["mpirun", "-n", "3", *expected.split()]


def test_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# a comment\nnode1 slots=4\n\nnode2:2  # more\nnode3\n")
    assert mpirun.read_hostfile(str(path)) == ["node1:4", "node2:2", "node3"]
    example = cli.BOOTSTRAP.with_name("hostfile.example")
    assert mpirun.read_hostfile(str(example)) == ["node1:4", "node2:4"]
    for wrong in ("", "node1 max_slots=4", "node1 4"):
        path.write_text(wrong)
        with pytest.raises(mpirun.LaunchError):
            mpirun.read_hostfile(str(path))


def test_dry_run_prints_what_a_shell_can_run(fake, capsys, monkeypatch):
    path = fake("mpirun (Open MPI) 5.0.3")
    monkeypatch.setattr(cli.os, "geteuid", lambda: 0)
    monkeypatch.setenv("MASTER_PORT", "1234")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert cli.main(["-n", "1", "-H", "h", "--dry-run", __file__, "a b"]) == 0
    out, err = capsys.readouterr()
    words = shlex.split(out)
    assert words[:3] == ["MASTER_ADDR=h", "MASTER_PORT=1234", path]
    assert words[-2:] == [__file__, "a b"]
    assert "--allow-run-as-root" in words and words[words.index("--host") + 1] == "h"
    passed = [after for word, after in itertools.pairwise(words) if word == "-x"]
    assert {"MASTER_ADDR", "MASTER_PORT"} <= set(passed)
    assert words[words.index("mpi4py") - 2 :][0] == sys.executable
    assert err.count("\n") == 1 and "root" in err


@pytest.mark.parametrize(
    ("nodes", "count", "options", "address"),
    [
        ("node[07-08]", "2", [], "node07"),  # 127.0.0.1 is another host for the ranks of node08
        ("node[07-08]", "2", ["--torch"], "127.0.0.1"),
        ("node07", "1", [], "127.0.0.1"),
    ],
)
def test_ranks_of_a_slurm_allocation_find_its_first_node(
    nodes, count, options, address, fake, capsys, monkeypatch
):
    fake(HYDRA)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", count)
    assert cli.main(["-n", "1", *options, "--dry-run", __file__]) == 0
    assert shlex.split(capsys.readouterr().out)[0] == f"MASTER_ADDR={address}"


def test_dry_run_runs(python, folder):
    status, lines = launch(python, "-n", 1, "--dry-run", "show.py", "a b", cwd=folder)
    assert status == 0 and not shown(lines)
    out = output_of("sh", "-c", lines[-1], cwd=folder).stdout
    assert shown(out.splitlines())[0]["argv"] == ["a b"]


# ---- environment(), of which test_variables.py has the rest


def test_a_plain_mpirun_or_srun_needs_no_launcher(python, folder):
    """environment() inside ranks that mpirun itself started."""
    (folder / "plain.py").write_text(
        "import os, runpy\n"
        f"find = runpy.run_path({str(cli.BOOTSTRAP.with_name('variables.py'))!r})['environment']\n"
        "os.write(1, (repr(find()) + '\\n').encode())\n"
    )
    path = str(Path(python).with_name("mpirun"))
    mpi = mpirun.identify(path, os.environ)
    command = mpirun.command(mpi, 2, as_root=os.geteuid() == 0)
    out = output_of(*command, python, "plain.py", cwd=folder).stdout
    found = shown(out.splitlines())
    ranks = [(f["RANK"], f["WORLD_SIZE"], f["LOCAL_RANK"], f["LOCAL_WORLD_SIZE"]) for f in found]
    assert ranks == [("0", "2", "0", "2"), ("1", "2", "1", "2")]
    assert len({(f["MASTER_ADDR"], f["MASTER_PORT"]) for f in found}) == 1
