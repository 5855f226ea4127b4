"""The planner's recommendation for the link that these ranks have measured."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from gradcomp.doctor.pairs import measured
from gradcomp.kernels import CPU
from gradcomp.plan.accuracy import written
from gradcomp.plan.costs import LocalSteps
from gradcomp.plan.links import Link, Node
from gradcomp.plan.predict import predict, to_calibrate, ways
from gradcomp.plan.rates import Rates, calibrate
from gradcomp.plan.workload import ALONE, Workload

# arguments of `calibrate`, which then takes half a second on an idle core
SIZES, WORLD_SIZES, REPEATS = (1 << 12, 1 << 17), (2, 8), 2
LEAST_S = 1.5  # with less time left, the rates of codecs are not measured
WIDTH, TENSORS = 1024, 16_000  # columns and largest number of the matrices that represent the model


def link_of(
    identities: Sequence[str], pairs: Sequence[Mapping[str, Any]]
) -> tuple[Link, Node, int] | None:
    """Return link, node and number of nodes for the planner; None if nothing was measured.

    A node is a host if all hosts have equally many ranks, otherwise it is a rank. The rate of a
    host is the sum over all pairs of its ranks with ranks of other hosts in one round, in the best
    round. The slowest host determines the link. `identities` are those of the ranks' hosts.
    """
    apart, inside = measured(pairs, identities)
    counts = {host: identities.count(host) for host in identities}
    if len(counts) == 1 or len(set(counts.values())) > 1 or not apart:
        used = apart or inside
        return (_middle(used), ALONE, len(identities)) if used else None
    rates: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for pair in apart:
        for rank in pair["ranks"]:
            rates[identities[rank]][pair["round"]] += pair["bits_per_s"]
    rate = min(max(by_round.values()) for by_round in rates.values())
    ranks = counts[identities[0]]
    node = Node(ranks, _middle(inside)) if ranks > 1 and inside else Node(ranks)
    return Link(rate, statistics.median(pair["latency_s"] for pair in apart)), node, len(counts)


def recommend(
    link: Link,
    node: Node,
    nodes: int,
    options: Mapping[str, Any],
    cores: float,
    left_s: float,
    device: torch.device = CPU,
) -> tuple[dict[str, Any], Rates]:
    """Return the planner's recommendation as JSON values, and the measured rates of codecs.

    With `left_s` below `LEAST_S`, codecs are assumed to take no time (``rates_measured`` is False).
    """
    rows = max(1, round(options["parameters"] / WIDTH))
    # matrices of at most a million values, several in each bucket; of large models larger ones
    most = max(WIDTH, -(-rows // TENSORS))
    heights = [min(most, rows - first) for first in range(0, rows, most)]
    shapes = tuple((f"weight{k}", (height, WIDTH)) for k, height in enumerate(heights))
    work = Workload(shapes, 1, options["compute"], weak=True)
    methods = list(ways(node))
    if options["every"] is not None:
        local = LocalSteps(options["every"])
        methods += {one.name: one for one in (method.after(local) for method in methods)}.values()
    rates = Rates()
    if left_s >= LEAST_S:
        wanted = to_calibrate(methods, [nodes], node)
        rates = calibrate(
            wanted, sizes=SIZES, world_sizes=WORLD_SIZES, repeats=REPEATS, device=device
        )
    limits = {} if options["tolerance"] is None else {"nats": options["tolerance"]}
    found = predict(
        work,
        link,
        [nodes],
        node=node,
        methods=methods,
        rates=rates,
        cores=max(cores, 0.1),
        optimizer=options["optimizer"],
        tolerances=limits,
        by_seconds=False,
    )
    method, measured = found.method, found.tolerance.cost(found.method)
    step, break_even = found.result(method.name, nodes), found.break_even_bits_per_s
    advice = {
        "method": method.name,
        "codec": None if method.codec is None or not method.compresses else written(method.codec),
        "exchange": method.exchange,
        "second_phase": method.second_phase,
        "sync_every": 1 if method.local is None else method.local.every,
        "options": measured.given() if measured is not None else "",
        "speedup": found.speedup,
        "step_s": step.seconds,
        "exposed_s": step.exposed_seconds,
        "break_even_bits_per_s": None if break_even == math.inf else break_even,
        "link": {**asdict(link), "nodes": nodes, "ranks_of_a_node": node.ranks},
        "sentence": found.sentence,
        "rates_measured": bool(rates.stages),
    }
    return advice, rates


def in_code(advice: Mapping[str, Any], over: str) -> str:
    """Return a result of `recommend` as a line of a training script, "" for no compression."""
    codec, every, given = advice["codec"], advice["sync_every"], advice["options"]
    rest = f'exchange="{advice["exchange"]}"'
    comm = ", comm=MpiCommunicator()" if over == "mpi" else ""
    if every > 1:
        codec = codec or "Identity()"
        return f"DiLoCo(model, optimizer, {codec}, sync_every={every}, {rest}{comm})"
    if codec is not None:
        more = f", {given.replace(' and ', ', ')}" if given else ""
        return f"ddp.register(model, {codec}, {rest}, optimizer=optimizer{more}{comm})"
    if advice["method"] != "bf16":
        return ""
    if comm:
        return f'ddp.register(model, "bf16", optimizer=optimizer{comm})'
    return "model.register_comm_hook(None, bf16_compress_hook)"


def _middle(pairs: Sequence[Mapping[str, Any]]) -> Link:
    return Link(
        statistics.median(p["bits_per_s"] for p in pairs),
        statistics.median(p["latency_s"] for p in pairs),
    )
