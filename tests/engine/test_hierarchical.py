"""fp32 inside nodes, packed between them: against the reference, over every communicator, and
what goes wrong.
"""

import os
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from _averages import CODECS
from _averaging import Run
from _expected import hierarchical
from _models import bits, small_model, train
from _ranks import each_rank, run_local, with_communicator
from torch.nn.parallel import DistributedDataParallel as DDP

import gradcomp.ddp
from gradcomp import Advanced, PeerLost, PeerMismatch, TernGrad
from gradcomp.exchange.nodes import find_nodes

# the last two ranks' shards of (5,) are empty
SHAPES = {f"p{n}": shape for n, shape in enumerate([(37, 45), (70,), (3, 5, 7, 2), (5,)])}
TWO_BY_TWO = [[0, 1], [2, 3]]


def gradient(name, shape, step, rank):
    generator = np.random.default_rng([rank, int(name[1:]), step])
    return torch.from_numpy((generator.standard_normal(shape) * 0.1).astype(np.float32))


def run(comm, nodes, codec="terngrad", exchange="hierarchical", **options):
    """Return a run of a hierarchical exchange."""
    given = {"exchange": exchange, "nodes": nodes, "gradient": gradient}
    return Run(comm, codec, SHAPES, **given, **options)


def reference(codec, nodes, steps):
    """Yield the averages of a step by name."""
    states, world = {}, sum(map(len, nodes))
    for step in steps:
        out = {}
        for number, (name, shape) in enumerate(SHAPES.items()):
            grads = [gradient(name, shape, step, r).numpy().ravel() for r in range(world)]
            given = {"step": step, "parameter": number, "shape": shape}
            out[name], states[name] = hierarchical(
                grads, codec, nodes, state=states.get(name), **given
            )
        yield out


def check(mine, codec, nodes, steps):
    """Return the bits of all averages, which are equal on all ranks and on rank 0 the reference's;
    close the run.
    """
    found = [mine.step(step) for step in steps]
    mine.averager.close()
    for step, wanted in enumerate(reference(codec, nodes, steps) if mine.rank == 0 else ()):
        for name, got in found[step].items():
            assert got.numpy().ravel().tobytes() == wanted[name].tobytes(), (name, step)
    return bits([got for averages in found for got in averages.values()])


@pytest.mark.parametrize("name", CODECS)
@each_rank(4, "over")
def test_average_is_the_references(comm, name):
    nodes = [[0, 2], [1, 3]]
    mine = run(comm, nodes, CODECS[name])
    return check(mine, CODECS[name], nodes, range(2))


@pytest.mark.parametrize(
    "name", ["ternary", "terngrad", "terngrad-requantize", "onebit", "identity"]
)
@pytest.mark.parametrize(
    "nodes", [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]], ids=["2x3", "5x2"]
)
def test_average_at_other_sizes(name, nodes):
    def work(comm):
        return check(run(comm, nodes, CODECS[name]), CODECS[name], nodes, range(2))

    assert len(set(run_local(sum(map(len, nodes)), work))) == 1


@pytest.mark.parametrize("name", ["ternary", "terngrad", "terngrad-requantize", "onebit"])
@each_rank(4, "over")
def test_infinity_on_one_rank_is_nan_on_all_and_leaves_no_trace(comm, name):
    mine, steps = run(comm, TWO_BY_TWO, CODECS[name]), reference(CODECS[name], TWO_BY_TWO, (0, 2))
    for step in range(3):
        mine.fill(step)
        if (comm.rank, step) == (2, 1):
            for p in mine.named.values():
                p.grad.view(-1)[-1] = float("inf")
        mine.averager.average()
        wanted = next(steps) if step != 1 else None
        for key, p in mine.named.items():
            if wanted is None:
                assert p.grad.isnan().all(), key
            else:
                assert p.grad.numpy().ravel().tobytes() == wanted[key].tobytes(), (key, step)
    mine.averager.close()


@each_rank(4, "local")
def test_a_nodes_sum_that_overflows_is_nan_on_all(comm):
    """Values whose sum inside one node, and only there, is too large for fp32."""
    mine = run(comm, TWO_BY_TWO)
    mine.fill(0, 0.0)
    if comm.rank in TWO_BY_TWO[1]:
        mine.named["p0"].grad.view(-1)[0] = 3e38
    mine.averager.average()
    assert all(bool(p.grad.isnan().all()) for p in mine.named.values())


def bytes_sent(comm, nodes):
    """Return what one step sends to other nodes, and inside its own; without nodes to ranks."""
    mine = run(comm, nodes, TernGrad(), "hierarchical" if nodes else "auto")
    mine.step(0)
    stats = mine.averager.stats
    return stats.bytes_sent, stats.inside_nodes.bytes_sent if nodes else 0


def test_bytes_between_nodes_fall_by_the_ranks_of_a_node():
    """Two nodes: flat, every rank sends its codes to another node; here, a share of them.
    Headers and scales stay.
    """
    flat = sum(sent for sent, _ in run_local(2, bytes_sent, None))
    for size in (2, 4):
        nodes = [list(range(size)), list(range(size, 2 * size))]
        between, inside = zip(*run_local(2 * size, bytes_sent, nodes), strict=True)
        assert sum(between) < flat + 2 * size * 4 * 32 + 2 * size * 4 * 8 * len(SHAPES), between
        assert min(inside) > 0


def by_host(comm, hosts):
    os.environ["GRADCOMP_HOST_ID"] = hosts[comm.rank]
    try:
        return find_nodes(comm, None, 20)
    finally:
        del os.environ["GRADCOMP_HOST_ID"]


@pytest.mark.parametrize("flavour", ["gloo", "mpich", "openmpi"])
def test_nodes_are_found_by_host_identity(pools, flavour):
    found = pools(flavour, 4, with_communicator, flavour, by_host, ["b", "a", "b", "a"])
    assert found == [((0, 2), (1, 3))] * 4
    found = pools(flavour, 4, with_communicator, flavour, find_nodes, None, 20)
    assert found == [((0, 1, 2, 3),)] * 4


def test_nodes_of_unequal_sizes_are_refused_on_every_rank(pools):
    with pytest.raises(AssertionError, match=r"equally many ranks, got \[3, 1\]"):
        pools("gloo", 4, with_communicator, "gloo", by_host, ["a", "a", "a", "b"])
    for nodes, text in (
        ([[0, 1, 2], [3]], "equally many"),
        ([[0, 1], [2]], "every rank below 4 once"),
        ([], "once"),
    ):
        with pytest.raises(ValueError, match=text):
            run_local(4, find_nodes, nodes, 60)


@pytest.mark.parametrize(
    ("exchanges", "nodes", "field"),
    [
        (["hierarchical"] * 4, [TWO_BY_TWO] * 3 + [[[0, 2], [1, 3]]], "nodes"),
        (["hierarchical"] * 4, [None] * 3 + [[[0, 2], [1, 3]]], "nodes"),
        (["hierarchical"] * 3 + ["auto"], [TWO_BY_TWO] * 3 + [None], "call"),
        (["all_gather"] + ["hierarchical"] * 3, [None] * 4, "call"),
    ],
)
@each_rank(4, "over")
def test_ranks_that_ask_for_other_nodes_are_a_mismatch_everywhere(comm, exchanges, nodes, field):
    with pytest.raises(PeerMismatch) as error:
        mine = run(comm, nodes[comm.rank], exchange=exchanges[comm.rank])
        try:
            mine.step(0)
        finally:
            mine.averager.close()
    assert error.value.field == field


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]], ids=["one node", "nodes of one rank"])
@each_rank(2, "local")
def test_the_ends_of_the_scale(comm, nodes):
    """On one node nothing is packed, which the description says; with one rank a node all is."""
    mine, one_node = run(comm, nodes, TernGrad()), len(nodes) == 1
    said = "is off: all 2 ranks are on one node and average in fp32"
    assert (said in mine.averager.describe()) == one_node
    found = mine.step(0)
    for name, got in found.items():
        mean = sum(gradient(name, SHAPES[name], 0, rank) for rank in range(2)) / 2
        assert torch.equal(got, mean) == one_node, name
    return bits(found.values())


@pytest.mark.slow
def test_a_silent_rank_is_lost_to_every_node():
    """Rank 3 never comes to its second step."""
    told = threading.Semaphore(0)

    def work(comm):
        mine = run(comm, TWO_BY_TWO, timeout_s=3)
        mine.step(0)
        if comm.rank == 3:
            for _ in range(3):
                told.acquire(timeout=60)
        else:
            with pytest.raises(PeerLost) as error:
                mine.step(1)
            assert error.value.waited_s < 20
        mine.averager.close()
        told.release()

    run_local(4, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_rank(4, "ranks")
def test_ddp_trains(dtype):
    """Replicas stay equal, bytes inside nodes are counted apart, and a model may be registered
    again.
    """
    module = small_model(dtype)
    options = {"exchange": "hierarchical", "advanced": Advanced(nodes=[[0, 3], [1, 2]])}
    for _ in range(2):
        model = DDP(module, bucket_cap_mb=0.005)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with gradcomp.ddp.register(model, "onebit", min_numel=0, timeout_s=30, **options) as state:
            train(model, optimizer, dist.get_rank(), range(4))
            state.check_replicas()
            assert 0 < state.stats.bytes_sent < state.stats.inside_nodes.bytes_sent
            assert "hierarchical" in state.describe()
    return bits(module)
