"""What is MPI's own: ranks alone and four of them, the bytes on the wire, thread levels, and
peers that are lost.
"""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from _averages import CODECS, average_over, check
from _forks import python
from _golden import Recorder, digest_of
from _ranks import mpi_environment, mpi_python, mpirun, output_of, with_communicator

import gradcomp
from gradcomp import PeerMismatch
from gradcomp.comm import mpi_channels
from gradcomp.comm.base import Channel

pytestmark = pytest.mark.slow

FLAVOURS = ["mpich", "openmpi"]


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


MPICH_FIRST = pytest.mark.parametrize(
    "flavour", ["mpich", pytest.param("openmpi", marks=pytest.mark.long)]
)


@pytest.fixture
def mpi(flavour, pools):
    """Return run(world_size, function, *args) with function(MpiCommunicator, *args)."""
    return lambda world, function, *args: pools(
        flavour, world, with_communicator, flavour, function, *args
    )


START = """
import gc, logging, os, sys, time
import mpi4py
mpi4py.rc.thread_level = {level!r}
import torch
import gradcomp
from gradcomp.comm import MpiCommunicator, mpi, mpi_channels
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
def write(name, *words):  # what is printed last may be lost where a job ends by MPI_Abort
    with open(f"{{__file__}}.{{name}}", "a") as file:
        print(*words, file=file)
"""


def script(tmp_path, flavour, world, text, level="multiple"):
    """Run a program on `world` ranks; return its result and its seconds since a rank first
    printed "at TIME".
    """
    path, begun = tmp_path / "program.py", time.time()
    path.write_text(START.format(level=level) + text)
    done = output_of(*mpirun(flavour, world), path, env=mpi_environment())
    printed = map(float, re.findall(r" at ([\d.]+)", done.stdout))
    return done, time.time() - min(printed, default=begun)


def written(tmp_path, name):
    """Return the words of a program's `write`; none where it wrote nothing."""
    path = tmp_path / f"program.py.{name}"
    return path.read_text().split() if path.exists() else []


# ---- the same as elsewhere -----------------------------------------------------------------------


def sent(comm, codec, exchange):
    """Return a digest of the payloads that this rank sends, and the averages."""
    with Recorder() as recorder:
        averages = average_over(comm, codec, (37, 45), exchange, 2)
    return digest_of(recorder.sent), averages


CASES = [(name, exchange) for name in CODECS for exchange in ("all_gather", "reduce_scatter")]


def all_sent(kind):
    return [with_communicator(kind, sent, CODECS[name], exchange) for name, exchange in CASES]


@pytest.mark.parametrize(
    "world", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 4)), 3]
)
def test_the_same_bytes_go_out_over_gloo_and_mpi(pools, flavour, world):
    """Ranks send different bytes, so the hash sees them."""
    seen = [pools(kind, world, all_sent, kind) for kind in ("gloo", flavour)]
    for case, *ranks in zip(CASES, *seen[0], *seen[1], strict=True):
        digests = [digest for digest, _ in ranks]
        assert digests[:world] == digests[world:] and len(set(digests)) == world, case
        if world > 1:
            averages = [averages for _, averages in ranks[world:]]
            check(averages, CODECS[case[0]], (37, 45), case[1], world, 2)


# ---- making and closing --------------------------------------------------------------------------


def many(comm):
    """Communicators that are made and closed again, and then the first one is used."""
    from gradcomp.comm import MpiCommunicator, mpi_channels

    before = len(mpi_channels._made)
    for _ in range(50):
        other = MpiCommunicator(timeout_s=20)
        other.close()
    # MPI frees nothing here, and MPICH has 2048 contexts
    assert len(mpi_channels._made) <= before + 1
    with pytest.raises(RuntimeError, match="closed"):
        other.all_gather_bytes(b"x", 1)
    return comm.all_gather_bytes(b"%d" % comm.rank, 20, Channel.FIRST)


def forgotten(comm):
    """Communicators that nobody closes, and that go a little later on one rank than on the
    other.
    """
    from gradcomp.comm import MpiCommunicator, mpi_channels

    before, held = len(mpi_channels._made), []
    for turn in range(60):
        held.append(MpiCommunicator(timeout_s=20))
        held[-1].all_gather_bytes(b"%d" % (turn % 10), 20)
        del held[: -1 - comm.rank]
    return len(mpi_channels._made) - before


def test_communicators_that_nobody_closes_serve_again(mpi):
    assert all(made <= 4 for made in mpi(2, forgotten))


def test_channels_with_something_under_way_do_not_serve_again(monkeypatch):
    monkeypatch.setattr(mpi_channels, "call", lambda function: function())
    monkeypatch.setattr(mpi_channels, "unanswered", [])
    for done, free in ((True, 1), (False, 0)):
        request = SimpleNamespace(Test=lambda done=done: done)
        parent = mpi_channels.Parent()
        used = mpi_channels.Channels({}, None, None, 1, [0], pending={0: (request, "buffers")})
        parent.give_back(used)
        assert len(parent.free) == free and not used.pending
    assert "buffers" in str(mpi_channels.unanswered)


LAUNCHERS = ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE")


def alone(comm, variables, parent):
    """Make a communicator of one MPI process where variables of a launcher say what they say."""
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    with pytest.MonkeyPatch.context() as patch:
        for name in LAUNCHERS:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            MpiCommunicator(parent and getattr(MPI, parent)).close()
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("variables", "parent", "wanted"),
    [
        ("RANK=1 WORLD_SIZE=2", None, "RANK=1 and WORLD_SIZE=2.* gradcomp.launch -n 2 SCRIPT"),
        ("RANK=1 WORLD_SIZE=2", "COMM_WORLD", "RANK=1 and WORLD_SIZE=2"),
        ("PMI_RANK=1 PMI_SIZE=4", None, "PMI_RANK=1 and PMI_SIZE=4"),
        ("RANK=1 WORLD_SIZE=2", "COMM_SELF", None),
        ("RANK=0 WORLD_SIZE=1", None, None),
        ("WORLD_SIZE=8", None, None),  # left over in a shell
    ],
)
@pytest.mark.every_row
def test_a_process_that_mpi_does_not_know_the_peers_of_is_refused(mpi, variables, parent, wanted):
    given = dict(one.split("=") for one in variables.split())
    (said,) = mpi(1, alone, given, parent)
    assert re.search(wanted, said) if wanted else said == ""


def wrong(comm):
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    for bad in (3, MPI.COMM_NULL, "world"):
        with pytest.raises(TypeError, match="intracommunicator") as error:
            MpiCommunicator(bad)
        assert repr(bad) in str(error.value)


def other_subset(comm):
    with pytest.raises(PeerMismatch, match="a communicator of other ranks"):
        comm.subset([0, 1] if comm.rank else [1, 0], 20)


def mismatched(comm):
    with pytest.raises(PeerMismatch, match="codec"):
        gradcomp.all_reduce(torch.ones(100), ["terngrad", "onebit"][comm.rank], comm=comm)


@pytest.mark.parametrize("refusal", [None, wrong, other_subset, mismatched])
@pytest.mark.every_row
def test_communicators_can_be_made_again_and_again_after_refusals_too(mpi, refusal):
    if refusal is not None:
        mpi(2, refusal)
    assert mpi(2, many) == [[b"0", b"1"]] * 2


def test_without_mpi4py_the_error_says_what_to_install():
    program = "import sys; sys.modules['mpi4py'] = None\n"
    program += "import gradcomp.comm\ngradcomp.comm.MpiCommunicator()"
    done = output_of(*python(), "-c", program)
    wanted = "ImportError: MpiCommunicator needs mpi4py: pip install 'gradcomp[mpi]'"
    assert done.stderr.strip().splitlines()[-1] == wanted


@MPICH_FIRST
def test_the_report_names_flavour_and_thread_level(flavour):
    done = output_of(*python(mpi_python(flavour)), "-m", "gradcomp", env=mpi_environment())
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MPI ")]
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[flavour] in line and "THREAD_MULTIPLE" in line


# ---- thread levels -------------------------------------------------------------------------------

LEVEL = """
assert MPI.Query_thread() == MPI.THREAD_LEVEL, MPI.Query_thread()
comm = MpiCommunicator(timeout_s=20)
tensor = torch.full((5000,), 1.0 + rank)
gradcomp.all_reduce(tensor, gradcomp.Identity(), comm=comm)
assert tensor.eq(1.5).all()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Linear(50, 40))
try:
    averager = gradcomp.GradientAverager(
        model.named_parameters(), gradcomp.Identity(), comm=comm, bucket_cap_mb=0.001
    )
    for step in range(20):
        for p in model.parameters():
            p.grad = torch.full_like(p, rank + step)
        averager.average()
        assert all(p.grad.eq(0.5 + step).all() for p in model.parameters())
    averager.close()
    print("averaged", flush=True)
except RuntimeError as error:
    print("refused:", error, flush=True)
comm = MpiCommunicator(timeout_s=20)
inside = comm.subset([1, 0], 20)
assert inside.rank == 1 - rank and inside.all_gather_bytes(b"%d" % rank, 20) == [b"1", b"0"]
late = MpiCommunicator(timeout_s=20)
for turn in (0, 1):  # rank 1 comes when rank 0 has given up
    if rank == turn:
        begun = time.monotonic()
        try:
            late.subset([0, 1], 0.3 if rank == 0 else 30)
        except gradcomp.PeerLost as error:
            print("alone", error.phase, time.monotonic() - begun < 15, flush=True)
    comm.all_gather_bytes(b"turn", 20)
"""
REFUSED = "mpi4py.rc.thread_level = 'serialized'"


@pytest.mark.parametrize(
    ("level", "wanted"),
    [
        ("multiple", "averaged"),
        ("funneled", REFUSED),
        pytest.param("serialized", "averaged", marks=pytest.mark.long),
        pytest.param("single", REFUSED, marks=pytest.mark.long),
    ],
)
def test_every_thread_level_works_or_says_what_to_set(tmp_path, flavour, level, wanted):
    text = LEVEL.replace("THREAD_LEVEL", f"THREAD_{level.upper()}")
    done, _ = script(tmp_path, flavour, 2, text, level)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("alone setup True") == done.stdout.count(wanted) == 2, done


# ---- peers that are lost -------------------------------------------------------------------------

FORGOTTEN = """
mpi_channels.LEAVE_S = 15.0
comm = MpiCommunicator(timeout_s=20)
parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(300_000))) for i in range(6)]
averager = gradcomp.GradientAverager(
    parameters, "terngrad", comm=comm, bucket_cap_mb=1, timeout_s=60 if rank else 3.0
)
def other(what):  # waits for what the other rank writes
    deadline = time.monotonic() + 60
    while not os.path.exists(f"{__file__}.{what}") and time.monotonic() < deadline:
        time.sleep(0.01)
for _, p in parameters:
    p.grad = torch.ones_like(p)
comm.all_gather_bytes(b"begin", 60)
averager.average()
print(f"averaged at {time.time()}", flush=True)
if rank == 1:
    other("lost0")
try:
    averager.average()
except gradcomp.PeerLost:
    write(f"lost{rank}")
averager.close()
write(f"sent{rank}")
del averager
gc.collect()
filled = [torch.full((1_000_000,), 7.0) for _ in range(20)]  # where freed buffers were
other(f"sent{1 - rank}")
time.sleep(0.5)  # what the other has sent arrives
assert all(t.eq(7.0).all() for t in filled)
write("intact", rank)
"""


def test_buffers_of_a_failed_step_stay_until_mpi_is_done(tmp_path, flavour):
    """Requests that nobody waited for: what MPI still writes to is not given back to other
    tensors.
    """
    done, took = script(tmp_path, flavour, 2, FORGOTTEN)
    assert sorted(written(tmp_path, "intact")) == ["0", "1"] and took < 40, (done, took)
    assert (tmp_path / "program.py.lost0").exists() and "egmentation" not in done.stderr


CAUGHT = """
mpi.GRACE_S = 10.0  # for a rank that stands still, while another has caught it and left
parameters = [("p", torch.nn.Parameter(torch.zeros(5000)))]
parameters[0][1].grad = torch.ones(5000)
exchange = "hierarchical" if rank else "auto"
try:
    averager = gradcomp.GradientAverager(
        parameters, "terngrad", comm=MpiCommunicator(), exchange=exchange, timeout_s=20
    )
    try:
        averager.average()
    finally:
        averager.close()
except gradcomp.PeerMismatch as error:
    print(f"caught {error.field} at {time.time()}", flush=True)
"""


@MPICH_FIRST
def test_a_mismatch_that_all_ranks_catch_ends_the_job_well_and_soon(tmp_path, flavour):
    done, took = script(tmp_path, flavour, 3, CAUGHT)
    assert done.stdout.count("caught call") == 3, done
    assert done.returncode == 0 and took < 15, (done, took)


SILENT = """
logging.basicConfig(level=logging.INFO, filename=f"{{__file__}}.log")
mpi_channels.LEAVE_S = 1.5
comm = MpiCommunicator(timeout_s=20, abort={abort})
gradcomp.all_reduce(torch.ones(1000), "terngrad", comm=comm, timeout_s=20)
print(f"rank {{rank}} at {{time.time()}}", flush=True)
if rank == 1:
    time.sleep({sleep})
    print("the silent rank ends", flush=True)
    sys.exit(0)
begun = time.monotonic()
try:
    gradcomp.all_reduce(torch.ones(1000), "terngrad", comm=comm, timeout_s=0.5)
except gradcomp.PeerLost as error:
    write("heard", error.phase, time.monotonic() - begun < 8)
    {after}
write("ends", rank)
"""


@pytest.mark.parametrize(
    ("sleep", "abort", "after"),
    [
        (1.5, False, "pass"),
        (1.5, False, "raise"),
        (1.5, False, "sys.exit(3)"),
        pytest.param(50, False, "pass", marks=pytest.mark.every_row),  # sleeps for ever
        pytest.param(50, True, "pass", marks=pytest.mark.every_row),  # MPI_Abort at once
    ],
)
def test_after_a_lost_peer_nobody_waits_in_finalize(tmp_path, flavour, sleep, abort, after):
    done, took = script(tmp_path, flavour, 2, SILENT.format(abort=abort, sleep=sleep, after=after))
    assert done.returncode != 0 and took < (30 if abort else 15), (done, took)
    assert sleep < 50 or "the silent rank ends" not in done.stdout
    assert bool(written(tmp_path, "ends")) == (after == "pass" and not abort)
    if abort:
        said = " ".join(written(tmp_path, "log"))
        assert "rank 0 ends the MPI job" in said and "for 0.5 s" in said
    else:
        assert written(tmp_path, "heard") == ["fingerprint", "True"]


NOBODY = """
mpi_channels.LEAVE_S = 1.5
if rank == 1:
    time.sleep(6)  # the job ends before
    sys.exit(0)
for _ in range(2):
    try:
        MpiCommunicator(timeout_s=0.3)
    except gradcomp.PeerLost as error:
        write("heard", error.phase)
"""


def test_a_rank_that_makes_no_communicator_is_lost(tmp_path, flavour):
    done, took = script(tmp_path, flavour, 2, NOBODY)
    assert written(tmp_path, "heard") == ["setup", "setup"], done
    assert took < 30 and done.returncode != 0, (done, took)
