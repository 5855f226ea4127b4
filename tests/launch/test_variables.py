"""Who a process is among its ranks, by the variables that starters of ranks set."""

import os
import re
from unittest import mock

import pytest
from gradcomp.launch import environment, export_environment, ports
from gradcomp.launch.variables import NAMES, first_node


def variables(text):
    """Return the variables of ``NAME=value NAME=value``."""
    return dict(word.split("=") for word in text.split())


ALONE = (
    "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)
ONE_OF_TWO = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1"
TWO_OF_FOUR = "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2"


def ompi(rank, size, local_rank, local_size):
    given = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return " ".join(f"OMPI_COMM_WORLD_{name}={value}" for name, value in given.items())


SLURM = (
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0"
    " SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=n[07-08]"
    " SLURM_LAUNCH_NODE_IPADDR=10.0.0.9 "
)
DAEMON = "SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_STEP_ID=0"  # of an mpirun
OF_SLURM = f"{TWO_OF_FOUR} MASTER_ADDR=n07 MASTER_PORT=12573"  # 10000 + CRC-32("4711.0") % 20000
RECORDED = {  # what is set, and what is found
    "torchrun": 2 * (f"{TWO_OF_FOUR} MASTER_ADDR=n1 MASTER_PORT=29400",),
    "openmpi": (f"{ompi(1, 2, 1, 2)} PMIX_RANK=1 PMIX_NAMESPACE=prterun-vm-4401@1", ONE_OF_TWO),
    "openmpi in slurm": (
        f"{ompi(2, 4, 0, 2)} {DAEMON} SLURM_STEP_NODELIST=n08 SLURM_JOB_NODELIST=n[07-08]",
        f"{TWO_OF_FOUR} MASTER_ADDR=n07",
    ),
    "hydra": (
        "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_FD=9",
        f"{ONE_OF_TWO} MASTER_PORT=29500",
    ),
    "hydra, two hosts": (
        "PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2",
        f"{TWO_OF_FOUR} MASTER_PORT=29500",
    ),
    "intel": (
        "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 I_MPI_MPIRUN=mpirun",
        f"{ONE_OF_TWO} MASTER_PORT=29500",
    ),
    "slurm": (SLURM, OF_SLURM),
    "slurm with pmi2": (f"{SLURM} PMI_RANK=2 PMI_SIZE=4 PMI_FD=3", OF_SLURM),
    "slurm with pmix": (f"{SLURM} PMIX_RANK=2 PMIX_NAMESPACE=slurm.pmix.4711.0", OF_SLURM),
    "slurm, named only by address": (
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_LAUNCH_NODE_IPADDR=10.0.0.9",
        "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=10.0.0.9 MASTER_PORT=29500",
    ),
    "slurm's batch script": (
        "SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0",
        ALONE,
    ),
    "slurm's batch step": (f"{SLURM} SLURM_STEP_ID=4294967291", ALONE),
    "bare pmi": ("PMI_RANK=1 PMI_SIZE=2", "RANK=1 WORLD_SIZE=2 MASTER_PORT=29500"),
    "bare pmix": ("PMIX_RANK=1 PMIX_SIZE=2 PMIX_NAMESPACE=ns", "RANK=1 WORLD_SIZE=2"),
    "nothing": ("", ALONE),
    "a stale rank": ("RANK=3", ALONE),
}


@pytest.mark.parametrize("name", RECORDED)
def test_environment_of_recorded_variables(name):
    given, expected = map(variables, RECORDED[name])
    before = dict(given)
    found = environment(given)
    port = found.pop("MASTER_PORT")
    assert given == before
    assert found == {k: v for k, v in expected.items() if k != "MASTER_PORT"}
    assert port == expected.get("MASTER_PORT", port) and 10000 <= int(port) < 30000
    kept = environment(given | {"MASTER_ADDR": "mine", "MASTER_PORT": "77"})
    assert (kept["MASTER_ADDR"], kept["MASTER_PORT"]) == ("mine", "77")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("PMIX_RANK=1", "PMIX_RANK is set, but none of PMIX_SIZE"),
        ("PMI_RANK=1", "PMI_RANK is set, but none of PMI_SIZE"),
        ("PMI_RANK=one PMI_SIZE=2", "PMI_RANK='one' is not a whole number"),
        # it named the first variable that might have been set, or the one that was asked for
        ("SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_NTASKS=two", "^SLURM_NTASKS='two'"),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=one", "^MPI_LOCALRANKID='one'"),
    ],
)
def test_a_rank_that_cannot_be_placed_is_an_error(given, says):
    with pytest.raises(ValueError, match=says):
        environment(variables(given))


def test_ranks_agree_on_address_and_port():
    def rendezvous(more):
        found = environment(variables(f"{SLURM} {more}"))
        return found["MASTER_ADDR"], found["MASTER_PORT"]

    ranks = "SLURM_PROCID={} SLURM_LOCALID={} SLURM_NODEID={}"
    (one,) = {rendezvous(ranks.format(rank, rank % 2, rank // 2)) for rank in range(4)}
    assert len({one, rendezvous("SLURM_JOB_ID=4712"), rendezvous("SLURM_STEP_ID=1")}) == 3


NODES = {"n1": "n1", "n[03-05,9]-ib,m1": "n03-ib", "a,b": "a", "r[1-2]n[4,6-9]": "r1n4"}


def test_first_node():
    assert {nodelist: first_node(nodelist) for nodelist in NODES} == NODES


def test_export_sets_what_it_returns(monkeypatch):
    for name in [*NAMES, *(n for n in os.environ if re.match(r"SLURM|PMI|OMPI", n))]:
        monkeypatch.setenv(name, "x")  # so that monkeypatch puts the old state back
        monkeypatch.delenv(name)
    found = export_environment()
    assert found["WORLD_SIZE"] == "1" and found.items() <= os.environ.items()


def test_where_all_ports_are_in_use_it_says_so(monkeypatch):
    monkeypatch.setattr(ports.socket, "socket", mock.Mock(side_effect=OSError("in use")))
    with pytest.raises(OSError, match="of 100 ports between .* none is free"):
        ports.free_port()
