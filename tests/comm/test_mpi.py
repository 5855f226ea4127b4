"""What is MPI's own: ranks alone and four of them, the bytes on the wire, thread levels, and
peers that are lost.
"""

import hashlib
import re
import subprocess
import sys
import time

import pytest
import torch
from _averages import CODECS, average_over, check
from _ranks import mpi_environment, mpi_python, mpirun, with_communicator

import gradcomp
from gradcomp import PeerLost, PeerMismatch
from gradcomp.comm import channels
from gradcomp.comm.base import Channel

pytestmark = pytest.mark.slow

FLAVOURS = ["mpich", "openmpi"]


@pytest.fixture(params=FLAVOURS)
def flavour(request):
    return request.param


@pytest.fixture
def mpi(flavour, pools):
    """Return run(world_size, function, *args) with function(MpiCommunicator, *args)."""
    return lambda world, function, *args: pools(
        flavour, world, with_communicator, flavour, function, *args
    )


def script(tmp_path, flavour, world, text, timeout_s=90):
    """Run a program on `world` ranks; return its result and its seconds since a rank first
    printed "at TIME".
    """
    path = tmp_path / "program.py"
    path.write_text(text)
    begun = time.time()
    done = subprocess.run(
        [*mpirun(flavour, world), str(path)],
        env=mpi_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    return done, time.time() - min(
        map(float, re.findall(r" at ([\d.]+)", done.stdout)), default=begun
    )


# ---- the same as elsewhere -----------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("world", [1, 4])
def test_average_on_one_rank_and_on_four(mpi, world, name):
    results = mpi(world, average_over, CODECS[name], (37, 45), "auto", 2)
    if world > 1:
        check(results, CODECS[name], (37, 45), "auto", world, 2)


def sent_bytes(comm, codec, exchange):
    """Return a hash of everything that this rank hands to its communicator, as it stands when
    the transfer ends.
    """
    log = hashlib.sha256()
    for name in ("start_max", "start_all_to_all", "start_all_gather"):
        start = getattr(comm, name)

        def record(send, *rest, start=start, name=name):
            log.update(f"{name} {[list(r) for r in rest if isinstance(r, list)]}".encode())
            log.update(send.numpy().tobytes())
            return start(send, *rest)

        setattr(comm, name, record)
    average_over(comm, codec, (37, 45), exchange, 2)
    return log.hexdigest()


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.every_row
def test_the_same_bytes_go_out_over_gloo_and_mpi(pools, flavour, world, name, exchange):
    seen = [
        pools(kind, world, with_communicator, kind, sent_bytes, CODECS[name], exchange)
        for kind in ("gloo", flavour)
    ]
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == world  # ranks send different bytes, so the hash sees them


# ---- making and closing --------------------------------------------------------------------------


def in_slices(comm, slice_numel):
    parameter = torch.nn.Parameter(torch.zeros(64, 300))
    averager = gradcomp.GradientAverager(
        [("w", parameter)], "onebit", comm, timeout_s=30, slice_numel=slice_numel
    )
    out = []
    for step in range(3):
        parameter.grad = torch.randn(
            64, 300, generator=torch.Generator().manual_seed(10 * step + comm.rank)
        )
        averager.average()
        out.append(parameter.grad.numpy().tobytes())
    averager.close()
    return out


@pytest.mark.parametrize("world", [2, 4])
def test_slices_change_no_bit(mpi, world):
    """More collectives are under way at once than there are buckets."""
    whole, sliced = mpi(world, in_slices, None), mpi(world, in_slices, 1000)
    assert sliced == whole and all(rank == whole[0] for rank in whole)


def many(comm):
    from gradcomp.comm import MpiCommunicator, channels

    before = len(channels._made)
    for _ in range(50):
        other = MpiCommunicator(timeout_s=20)
        other.close()
    assert len(channels._made) <= before + 1  # MPI frees nothing here, and MPICH has 2048 contexts
    with pytest.raises(RuntimeError, match="closed"):
        other.all_gather_bytes(b"x", 1)
    other.close()
    # two at once do not meet each other's messages
    first, second = (MpiCommunicator(), MpiCommunicator())
    order = (first, second) if comm.rank == 0 else (second, first)
    works = {}
    for one in order:
        recv = torch.zeros(2, dtype=torch.uint8)
        send = torch.full((1,), 1 + (one is second), dtype=torch.uint8)
        works[one] = (one.start_all_gather(send, recv, Channel.FIRST), recv)
    found = []
    for one in (first, second):
        works[one][0].wait(20)
        found.append(works[one][1].tolist())
        one.close()
    return found


def test_communicators_can_be_made_again_and_again(mpi):
    assert mpi(2, many) == [[[1, 1], [2, 2]]] * 2


def forgotten(comm):
    """Communicators that nobody closes, and that go a little later on one rank than on the
    other.
    """
    from gradcomp.comm import MpiCommunicator, channels

    before, held = len(channels._made), []
    for turn in range(60):
        held.append(MpiCommunicator(timeout_s=20))
        held[-1].all_gather_bytes(b"%d" % (turn % 10), 20)
        del held[: -1 - comm.rank]
    return len(channels._made) - before


def test_communicators_that_nobody_closes_serve_again(mpi):
    assert all(made <= 4 for made in mpi(2, forgotten))


def test_channels_with_something_under_way_do_not_serve_again():
    class Request:
        def __init__(self, done):
            self.Test = lambda: done

    before = len(channels.unanswered)
    for done, free in ((True, 1), (False, 0)):
        parent = channels.Parent()
        used = channels.Channels({}, None, None, 1, pending={0: (Request(done), "buffers")})
        channels.give_back(parent, used, lambda call: call())
        assert len(parent.free) == free and not used.pending
    assert "buffers" in str(channels.unanswered[before:])
    del channels.unanswered[before:]


def alone(comm):
    """One MPI process whose variables say that something else has started it as one of several."""
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    said = []
    for variables, parent in (
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, MPI.COMM_WORLD),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, MPI.COMM_SELF),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "8"}, None),  # left over in a shell
    ):
        with pytest.MonkeyPatch.context() as patch:
            for name in ("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            try:
                MpiCommunicator(parent).close()
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def test_a_process_that_mpi_does_not_know_the_peers_of_is_refused(mpi):
    (said,) = mpi(1, alone)
    assert all(
        "RANK=1 and WORLD_SIZE=2" in text and "gradcomp.launch -n 2 SCRIPT" in text
        for text in said[:2]
    ), said
    assert "PMI_RANK=1 and PMI_SIZE=4" in said[2] and said[3:] == ["", "", ""], said


def wrong(comm):
    from mpi4py import MPI

    from gradcomp.comm import MpiCommunicator

    messages = []
    for bad in (3, MPI.COMM_NULL, "world"):
        with pytest.raises(TypeError, match="intracommunicator") as error:
            MpiCommunicator(bad)
        messages.append(repr(bad) in str(error.value) or str(bad) in str(error.value))
    return all(messages)


def test_anything_but_an_intracommunicator_is_refused(mpi):
    assert mpi(2, wrong) == [True, True]


def test_without_mpi4py_the_error_says_what_to_install():
    program = (
        "import gradcomp.comm\ntry:\n    gradcomp.comm.MpiCommunicator()\nexcept ImportError as"
        " e:\n    print(e)"
    )
    block = "import sys; sys.modules['mpi4py'] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", block + program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "MpiCommunicator needs mpi4py: pip install 'gradcomp[mpi]'"


def test_the_report_names_flavour_and_thread_level(flavour):
    command = [mpi_python(flavour), "-m", "gradcomp"]
    done = subprocess.run(
        command, env=mpi_environment(), capture_output=True, text=True, check=True
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MPI ")]
    assert {"mpich": "MPICH", "openmpi": "Open MPI"}[flavour] in line and "THREAD_MULTIPLE" in line


# ---- thread levels -------------------------------------------------------------------------------

LEVEL = """
import sys, time, mpi4py
mpi4py.rc.thread_level = {level!r}
import torch
import gradcomp
from torch import nn
from gradcomp.comm import MpiCommunicator
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_{upper}, MPI.Query_thread()
rank = MPI.COMM_WORLD.Get_rank()
comm = MpiCommunicator(timeout_s=20)
tensor = torch.full((5000,), 1.0 + rank)
gradcomp.all_reduce(tensor, gradcomp.Identity(), comm)
assert tensor.eq(1.5).all()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 40))
try:
    averager = gradcomp.GradientAverager(
        model.named_parameters(), gradcomp.Identity(), comm, bucket_cap_mb=0.001
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


@pytest.mark.parametrize(
    "level",
    [
        "multiple",
        "funneled",
        *(pytest.param(x, marks=pytest.mark.long) for x in ("serialized", "single")),
    ],
)
def test_every_thread_level_works_or_says_what_to_set(tmp_path, flavour, level):
    done, _ = script(tmp_path, flavour, 2, LEVEL.format(level=level, upper=level.upper()))
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("alone setup True") == 2, done.stdout
    if level in ("multiple", "serialized"):
        assert done.stdout.count("averaged") == 2, done.stderr[-2000:]
    else:
        assert (
            done.stdout.count("refused") == 2
            and "mpi4py.rc.thread_level = 'serialized'" in done.stdout
        ), done


# ---- peers that are lost -------------------------------------------------------------------------


def gives_up(comm):
    """Rank 1 gives up; the others learn of it long before their timeout."""
    gradcomp.all_reduce(torch.ones(100), "terngrad", comm)
    torch.distributed.barrier()  # what has not come half a second after the end is lost
    if comm.rank == 1:
        comm.abort("no memory left")
        return None
    begun = time.monotonic()
    with pytest.raises(PeerLost) as error:
        gradcomp.all_reduce(torch.ones(100), "terngrad", comm, timeout_s=50)
    return (
        time.monotonic() - begun < 25,
        error.value.phase,
        "rank 1 gave up because of no memory left" in str(error.value),
    )


def test_a_rank_that_gives_up_tells_the_others(mpi):
    first, _, third = mpi(3, gives_up)
    assert first[0] and third[0] and first[1] == third[1] == "fingerprint", (first, third)
    assert first[2] and third[2], (first, third)


FORGOTTEN = """
import gc, os, time
import torch
import gradcomp
from gradcomp.comm import Channel, MpiCommunicator, channels
from mpi4py import MPI
channels.LEAVE_S = 15.0
rank = MPI.COMM_WORLD.Get_rank()
comm = MpiCommunicator(timeout_s=20)
parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(300_000))) for i in range(6)]
averager = gradcomp.GradientAverager(
    parameters, "terngrad", comm, bucket_cap_mb=1, timeout_s=60 if rank else 3.0
)
def other(what):  # waits for what the other rank has to say: a file
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
    open(f"{__file__}.lost{rank}", "w").close()
averager.close()
open(f"{__file__}.sent{rank}", "w").close()
del averager
gc.collect()
filled = [torch.full((1_000_000,), 7.0) for _ in range(20)]  # where freed buffers were
other(f"sent{1 - rank}")
time.sleep(0.5)  # what the other has sent arrives
assert all(t.eq(7.0).all() for t in filled)
# what is printed last may be lost where a job ends by MPI_Abort
open(__file__ + f".intact{rank}", "w").close()
"""


def test_buffers_of_a_failed_step_stay_until_mpi_is_done(tmp_path, flavour):
    """Requests that nobody waited for: what MPI still writes to is not given back to other
    tensors.
    """
    done, took = script(tmp_path, flavour, 2, FORGOTTEN)
    intact = list(tmp_path.glob("*.intact*"))
    assert len(intact) == 2 and list(tmp_path.glob("*.lost0")) and took < 40, (done, took)
    assert "egmentation" not in done.stderr


CAUGHT = """
import time
import torch
import gradcomp
from gradcomp.comm import MpiCommunicator, mpi
from mpi4py import MPI
mpi.GRACE_S = 10.0  # for a rank that stands still, while another has caught it and left
rank = MPI.COMM_WORLD.Get_rank()
parameters = [("p", torch.nn.Parameter(torch.zeros(5000)))]
parameters[0][1].grad = torch.ones(5000)
try:
    averager = gradcomp.GradientAverager(
        parameters, "terngrad", MpiCommunicator(),
        exchange="hierarchical" if rank else "auto", timeout_s=20
    )
    try:
        averager.average()
    finally:
        averager.close()
except gradcomp.PeerMismatch as error:
    print(f"caught {error.field} at {time.time()}", flush=True)
"""


def test_a_mismatch_that_all_ranks_catch_ends_the_job_well_and_soon(tmp_path, flavour):
    done, took = script(tmp_path, flavour, 3, CAUGHT)
    assert done.stdout.count("caught call") == 3, done
    assert done.returncode == 0 and took < 15, (done, took)


def mismatched(comm):
    with pytest.raises(PeerMismatch, match="codec"):
        gradcomp.all_reduce(torch.ones(100), ["terngrad", "onebit"][comm.rank], comm)


def test_a_mismatch_leaves_mpi_usable(mpi):
    mpi(2, mismatched)
    assert mpi(2, many) == [[[1, 1], [2, 2]]] * 2


SILENT = """
import logging, sys, time
import torch
import gradcomp
from gradcomp.comm import MpiCommunicator, channels
from mpi4py import MPI
# what is printed last may be lost where a job ends by MPI_Abort
logging.basicConfig(level=logging.INFO, filename=f"{{__file__}}.log")
channels.LEAVE_S = 1.5
rank = MPI.COMM_WORLD.Get_rank()
comm = MpiCommunicator(timeout_s=20, abort={abort})
gradcomp.all_reduce(torch.ones(1000), "terngrad", comm, timeout_s=20)
print(f"rank {{rank}} at {{time.time()}}", flush=True)
if rank == 1:
    time.sleep({sleep})
    print("the silent rank ends", flush=True)
    sys.exit(0)
begun = time.monotonic()
try:
    gradcomp.all_reduce(torch.ones(1000), "terngrad", comm, timeout_s=0.5)
except gradcomp.PeerLost as error:
    with open(f"{{__file__}}.heard", "w") as heard:
        print("lost", error.phase, time.monotonic() - begun < 8, file=heard)
    {after}
open(f"{{__file__}}.ends", "w").close()
"""


def heard(tmp_path):
    return (tmp_path / "program.py.heard").read_text()


@pytest.mark.parametrize("after", ["pass", "raise", "sys.exit(3)"])
def test_after_a_lost_peer_nobody_waits_in_finalize(tmp_path, flavour, after):
    done, took = script(tmp_path, flavour, 2, SILENT.format(abort=False, sleep=1.5, after=after))
    assert heard(tmp_path) == "lost fingerprint True\n" and took < 15, (done, took)
    assert done.returncode != 0


def test_a_peer_that_sleeps_for_ever_does_not_keep_the_job(tmp_path, flavour):
    done, took = script(tmp_path, flavour, 2, SILENT.format(abort=False, sleep=50, after="pass"))
    assert (
        (tmp_path / "program.py.ends").exists()
        and "the silent rank ends" not in done.stdout
        and took < 15
    )
    assert done.returncode != 0


def test_abort_ends_the_job_at_once_and_says_why(tmp_path, flavour):
    done, took = script(tmp_path, flavour, 2, SILENT.format(abort=True, sleep=50, after="pass"))
    assert done.returncode != 0 and took < 30, took
    assert not (tmp_path / "program.py.ends").exists()
    said = (tmp_path / "program.py.log").read_text()
    assert "rank 0 ends the MPI job" in said and "for 0.5 s" in said


def test_a_rank_that_makes_no_communicator_is_lost(tmp_path, flavour):
    text = """
import sys, time
from gradcomp import PeerLost
from gradcomp.comm import MpiCommunicator, channels
from mpi4py import MPI
channels.LEAVE_S = 1.5
if MPI.COMM_WORLD.Get_rank() == 1:
    time.sleep(6)  # the job ends before
    sys.exit(0)
for _ in range(2):
    try:
        MpiCommunicator(timeout_s=0.3)
    except PeerLost as error:
        # an mpirun that ends the job may lose what was printed last
        with open(sys.argv[0] + ".heard", "a") as heard:
            print(error.phase, file=heard)
"""
    done, took = script(tmp_path, flavour, 2, text)
    assert (tmp_path / "program.py.heard").read_text().split() == [
        "setup",
        "setup",
    ] and took < 30, (done, took)
    assert done.returncode != 0
