"""fp32 inside nodes, packed between them: against the reference, over every communicator, and
what goes wrong.
"""

import threading

import numpy as np
import pytest
import torch
from _averages import CODECS
from _expected import hierarchical
from _ranks import run_local
from torch import nn

from gradcomp import Advanced, GradientAverager, PeerLost, PeerMismatch, TernGrad
from gradcomp.comm import LocalCommunicator
from gradcomp.exchange.nodes import find_nodes

SHAPES = [(37, 45), (70,), (3, 5, 7, 2), (5,)]  # the last two ranks' shards of (5,) are empty


def gradient(rank, number, step):
    generator = np.random.default_rng([rank, number, step])
    return (generator.standard_normal(SHAPES[number]) * 0.1).astype(np.float32)


def parameters(dtype=torch.float32):
    return [
        (f"p{n}", nn.Parameter(torch.zeros(shape, dtype=dtype))) for n, shape in enumerate(SHAPES)
    ]


def over_nodes(comm, nodes, codec="terngrad", named=None, **options):
    """Return an averager of a hierarchical exchange."""
    return GradientAverager(
        parameters() if named is None else named,
        codec,
        comm=comm,
        exchange="hierarchical",
        advanced=Advanced(nodes=nodes),
        **options,
    )


def averages(comm, codec, nodes, steps, bad_rank=None, **options):
    """Return what every step's average is on this rank, and bytes sent to other nodes."""
    named = parameters()
    averager = over_nodes(comm, nodes, codec, named, min_numel=0, **options)
    out = []
    for step in range(steps):
        for number, (_, p) in enumerate(named):
            p.grad = torch.from_numpy(gradient(comm.rank, number, step))
            if bad_rank == comm.rank and step == 1:
                p.grad.view(-1)[-1] = float("inf")
        averager.average()
        out.append([p.grad.numpy().copy() for _, p in named])
    stats = averager.stats
    averager.close()
    return out, stats.bytes_sent, stats.inside_nodes.bytes_sent


def check(results, codec, nodes, steps, skipped=()):
    world = sum(len(node) for node in nodes)
    for number, shape in enumerate(SHAPES):
        state = None
        for step in range(steps):
            if step in skipped:
                for rank in range(world):
                    assert np.isnan(results[rank][0][step][number]).all(), (rank, step)
                continue
            grads = [gradient(r, number, step).reshape(-1) for r in range(world)]
            wanted, state = hierarchical(
                grads, codec, nodes, step=step, parameter=number, shape=shape, state=state
            )
            for rank in range(world):
                got = results[rank][0][step][number].reshape(-1)
                assert got.tobytes() == wanted.tobytes(), (
                    number,
                    rank,
                    step,
                    np.flatnonzero(got != wanted)[:5],
                )


@pytest.mark.parametrize("name", CODECS)
def test_average_is_the_references(over, name):
    nodes = [[0, 2], [1, 3]]
    results = over(4, averages, CODECS[name], nodes, 2)
    check(results, CODECS[name], nodes, 2)


@pytest.mark.parametrize(
    "name", ["ternary", "terngrad", "terngrad-requantize", "onebit", "identity"]
)
@pytest.mark.parametrize(
    "nodes", [[[0, 1, 2], [3, 4, 5]], [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]], ids=["2x3", "5x2"]
)
def test_average_at_other_sizes(name, nodes):
    results = run_local(sum(map(len, nodes)), averages, CODECS[name], nodes, 3)
    check(results, CODECS[name], nodes, 3)


@pytest.mark.parametrize("name", ["ternary", "terngrad", "terngrad-requantize", "onebit"])
def test_infinity_on_one_rank_is_nan_on_all_and_leaves_no_trace(over, name):
    nodes = [[0, 1], [2, 3]]
    results = over(4, averages, CODECS[name], nodes, 3, 2)
    check(results, CODECS[name], nodes, 3, skipped=(1,))


def large(comm, nodes):
    """Values whose sum inside one node, and only there, is too large for fp32."""
    named = parameters()
    averager = over_nodes(comm, nodes, named=named, min_numel=0)
    for _, p in named:
        p.grad = torch.zeros_like(p)
    if comm.rank in nodes[1]:
        named[0][1].grad.view(-1)[0] = 3e38
    averager.average()
    averager.close()
    return [bool(torch.isnan(p.grad).all()) for _, p in named]


def test_a_nodes_sum_that_overflows_is_nan_on_all():
    assert run_local(4, large, [[0, 1], [2, 3]]) == [[True] * len(SHAPES)] * 4


def flat_bytes(comm):
    named = parameters()
    averager = GradientAverager(named, TernGrad(), comm=comm, min_numel=0)
    for _, p in named:
        p.grad = torch.ones_like(p)
    averager.average()
    averager.close()
    return averager.stats.bytes_sent


def test_bytes_between_nodes_fall_by_the_ranks_of_a_node():
    """Two nodes: flat, every rank sends its codes to another node; here, a share of them.
    Headers and scales stay.
    """
    flat = sum(run_local(2, flat_bytes))
    for size in (2, 4):
        nodes = [list(range(size)), list(range(size, 2 * size))]
        results = run_local(2 * size, averages, TernGrad(), nodes, 1)
        between = sum(sent for _, sent, _ in results)
        assert between < flat + 2 * size * 4 * 32 + 2 * size * 4 * 8 * len(SHAPES), (between, flat)
        assert all(inside > 0 for _, _, inside in results)


def by_host(comm, hosts):
    import os

    os.environ["GRADCOMP_HOST_ID"] = hosts[comm.rank]
    try:
        return find_nodes(comm, None, 20)
    finally:
        del os.environ["GRADCOMP_HOST_ID"]


@pytest.mark.parametrize("flavour", ["gloo", "mpich", "openmpi"])
def test_nodes_are_found_by_host_identity(pools, flavour):
    from _ranks import with_communicator

    found = pools(flavour, 4, with_communicator, flavour, by_host, ["b", "a", "b", "a"])
    assert found == [((0, 2), (1, 3))] * 4
    found = pools(flavour, 4, with_communicator, flavour, find_nodes, None, 20)
    assert found == [((0, 1, 2, 3),)] * 4


def test_nodes_of_unequal_sizes_are_refused_on_every_rank(pools):
    from _ranks import with_communicator

    with pytest.raises(AssertionError, match=r"equally many ranks, got \[3, 1\]"):
        pools("gloo", 4, with_communicator, "gloo", by_host, ["a", "a", "a", "b"])
    for nodes, text in (
        ([[0, 1, 2], [3]], "equally many"),
        ([[0, 1], [2]], "every rank below 4 once"),
        ([], "once"),
    ):
        with pytest.raises(ValueError, match=text):
            run_local(4, find_nodes, nodes, 60)


def described(comm, nodes):
    averager = over_nodes(comm, nodes)
    try:
        return averager.describe()
    finally:
        averager.close()


def test_the_description_says_when_nothing_is_compressed():
    alone, together = [[0], [1]], [[0, 1]]
    assert all(
        "is off: all 2 ranks are on one node and average in fp32" in t
        for t in run_local(2, described, together)
    )
    assert not any("is off" in text for text in run_local(2, described, alone))


def others(comm, exchanges, nodes):
    """Ranks that ask for other nodes, or for another exchange."""
    named = parameters()
    for _, p in named:
        p.grad = torch.ones_like(p)
    with pytest.raises(PeerMismatch) as error:
        averager = GradientAverager(
            named,
            "terngrad",
            comm=comm,
            exchange=exchanges[comm.rank],
            advanced=Advanced(nodes=nodes[comm.rank]),
            timeout_s=20,
        )
        try:
            averager.average()
        finally:
            averager.close()
    return error.value.field


@pytest.mark.parametrize(
    ("exchanges", "nodes", "field"),
    [
        (["hierarchical"] * 4, [[[0, 1], [2, 3]]] * 3 + [[[0, 2], [1, 3]]], "nodes"),
        (["hierarchical"] * 4, [None] * 3 + [[[0, 2], [1, 3]]], "nodes"),
        (["hierarchical"] * 3 + ["auto"], [[[0, 1], [2, 3]]] * 3 + [None], "call"),
        (["all_gather"] + ["hierarchical"] * 3, [None] * 4, "call"),
    ],
)
def test_ranks_that_ask_for_other_nodes_are_a_mismatch_everywhere(over, exchanges, nodes, field):
    assert over(4, others, exchanges, nodes) == [field] * 4


def test_nodes_need_the_hierarchical_exchange():
    comm = LocalCommunicator.group(2)[0]
    with pytest.raises(
        ValueError, match="nodes= needs exchange='hierarchical', got exchange='auto'"
    ):
        GradientAverager(parameters(), "terngrad", comm=comm, advanced=Advanced(nodes=[[0], [1]]))


@pytest.mark.parametrize("nodes", [[[0, 1]], [[0], [1]]], ids=["one node", "nodes of one rank"])
def test_the_ends_of_the_scale(nodes):
    """On one node nothing is packed; with one rank a node everything is."""
    results = run_local(2, averages, TernGrad(), nodes, 1)
    for number in range(len(SHAPES)):
        mean = (gradient(0, number, 0) + gradient(1, number, 0)) / np.float32(2)
        exact = np.array_equal(results[0][0][0][number], mean)
        assert exact == (len(nodes) == 1), number
        assert results[0][0][0][number].tobytes() == results[1][0][0][number].tobytes()


def one_dies(comm, nodes, told):
    """Rank 3 never comes to its second step."""
    named = parameters()
    averager = over_nodes(comm, nodes, named=named, min_numel=0, timeout_s=3)
    for _ in range(1 if comm.rank == 3 else 2):
        for _, p in named:
            p.grad = torch.ones_like(p)
        try:
            averager.average()
        except PeerLost as error:
            averager.close()
            told.release()
            return error.waited_s < 20
    for _ in range(3):
        told.acquire(timeout=60)
    averager.close()
    return None


@pytest.mark.slow
def test_a_silent_rank_is_lost_to_every_node():
    assert run_local(4, one_dies, [[0, 1], [2, 3]], threading.Semaphore(0)) == [
        True,
        True,
        True,
        None,
    ]


def trained(nodes, dtype):
    """Train DDP models over gloo or MPI; replicas stay equal, and bytes inside nodes are counted
    apart.
    """
    from torch.nn.parallel import DistributedDataParallel as DDP

    import gradcomp.ddp

    torch.manual_seed(0)
    model = DDP(
        nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 10)).to(dtype),
        bucket_cap_mb=0.005,
    )
    for _ in range(2):  # registered again after the first state was closed
        state = gradcomp.ddp.register(
            model,
            "onebit",
            exchange="hierarchical",
            advanced=Advanced(nodes=nodes),
            min_numel=0,
            timeout_s=30,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(8):
            generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            x = torch.randn(16, 40, generator=generator).to(dtype)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).float(), (x[:, :10].argmax(1)))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        state.check_replicas()
        found = (
            state.stats.bytes_sent,
            state.stats.inside_nodes.bytes_sent,
            "hierarchical" in state.describe(),
        )
        state.close()
        model = DDP(model.module, bucket_cap_mb=0.005)
    return [p.detach().float().numpy().tobytes() for p in model.module.parameters()], found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ddp_trains(ranks, dtype):
    results = ranks(4, trained, [[0, 3], [1, 2]], dtype)
    assert all(weights == results[0][0] for weights, _ in results)
    assert all(0 < between < inside and named for _, (between, inside, named) in results)
