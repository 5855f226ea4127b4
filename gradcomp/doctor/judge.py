"""Findings: what the ranks' cards and measurements mean, each with what to do about it.

A finding is "wrong" where training would fail, hang, or be several times slower than it needs to
be, and a "note" elsewhere.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gradcomp.comm.addresses import INTERFACE_VARIABLE
from gradcomp.doctor.interfaces import Interface
from gradcomp.errors import PeerLost
from gradcomp.plan.links import format_rate, format_seconds

FASTER = 2.0  # another interface with so many times the speed is the better one
OUTLIER = 5.0  # a pair that is so many times slower than the middle of its kind
SLOW_LINK = 0.1  # of what the interface says it does
LOOKUP_S = 1.0  # for the name of one address
PATIENCE_S = 1.0  # of those that wait for a silent member of a probe
LATE_S = 3.0  # an error that comes so much later comes too late
MUST_AGREE = ("gradcomp", "wire format", "torch")

Card = Mapping[str, Any]


class Finding(NamedTuple):
    """One thing that was found.

    Attributes:
        level: "wrong" or "note".
        topic: the section of the report that it belongs to.
        text: what it is.
        do: what to do about it; "" for nothing.
    """

    level: str
    topic: str
    text: str
    do: str = ""


def wrong(topic: str, text: str, do: str = "") -> Finding:
    """Return a finding that changes the exit status."""
    return Finding("wrong", topic, text, do)


def note(topic: str, text: str, do: str = "") -> Finding:
    """Return a finding that does not change the exit status."""
    return Finding("note", topic, text, do)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0 and 2", "ranks 0-3"."""
    some = sorted(set(ranks))
    if len(some) == 1:
        return f"rank {some[0]}"
    if len(some) > 2 and some == list(range(some[0], some[-1] + 1)):
        return f"ranks {some[0]}-{some[-1]}"
    return f"ranks {', '.join(map(str, some[:-1]))} and {some[-1]}"


def by(cards: Sequence[Card], key: Callable[[Card], str]) -> dict[str, list[int]]:
    """Return the ranks of every value of `key`."""
    found: dict[str, list[int]] = {}
    for card in cards:
        found.setdefault(key(card), []).append(card["rank"])
    return found


def judge_versions(cards: Sequence[Card]) -> Iterator[Finding]:
    """Versions, kernels and options that differ between ranks, and kernels that are slow."""
    for name, values in _differing(cards, "versions"):
        level = "wrong" if name in MUST_AGREE else "note"
        text = f"{name} differs: {values}"
        yield Finding(level, "versions", text, "install the same on every host")
    tiers = by(cards, lambda card: card["tier"])
    for tier, ranks in tiers.items():
        who, best = ranks_text(ranks), cards[ranks[0]]["tiers"][-1]
        if tier != best:
            text = f"{who}: the {best} tier is switched off"
            yield note("kernels", text, "unset GRADCOMP_DISABLE_CPU_FEATURES")
        elif tier == "portable":
            text = (
                f"{who}: plain C kernels, several times slower; this CPU has no vector instructions"
                " that gradcomp knows"
            )
            yield note("kernels", text)
    if len(tiers) > 1:
        text = (
            f"tiers differ: {_listed(tiers)}; results are the same to the bit, the slowest rank"
            " sets the pace"
        )
        yield note("kernels", text)
    for option, values in _differing(cards, "options"):
        text = f"--{option.replace('_', '-')} differs: {values}; rank 0's was taken"
        do = "start every rank with the same command line: training needs that as well"
        yield wrong("versions", text, do)
    starters = by(cards, lambda card: card["starter"] or "nothing")
    if len(starters) > 1:
        text = f"ranks were started by different launchers: {_listed(starters)}"
        yield wrong("versions", text, "start all of them with one")


def _differing(cards: Sequence[Card], what: str) -> Iterator[tuple[str, str]]:
    """Yield the names below `what` whose values differ between ranks, and these values."""
    for name in dict.fromkeys(name for card in cards for name in card[what]):
        values = by(cards, lambda card, name=name: str(card[what].get(name, "none")))  # type: ignore[misc]
        if len(values) > 1:
            yield name, _listed(values)


def _listed(values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())


def judge_network(cards: Sequence[Card], over: str) -> Iterator[Finding]:
    """The interfaces that gloo takes: missing, the loopback between hosts, a bridge, a slower
    one than there is.
    """
    several = len({card["identity"] for card in cards}) > 1
    level, of_mpi = "wrong", ""
    if over == "mpi":
        level, of_mpi = "note", " (gloo's; an MPI chooses by itself)"
    alike, shared = defaultdict(list), defaultdict(set)
    for card in cards:
        found = _wrong_interface(card, several)
        if found is not None:
            alike[found].append(card["rank"])
        for one in _used(card):
            if one.kind != "loopback":
                for address in one.addresses:
                    shared[address].add(card["identity"])
    for (text, do), ranks in alike.items():
        yield Finding(level, "network", f"{ranks_text(ranks)}: {text}{of_mpi}", do)
    for address, hosts in shared.items():
        if len(hosts) > 1:
            text = (
                f"{len(hosts)} hosts have the address {address}{of_mpi}: it leads from each of them"
                " to itself"
            )
            do = f"set {INTERFACE_VARIABLE} to an interface that joins the hosts"
            yield Finding(level, "network", text, do)


def cannot_connect(cards: Sequence[Card]) -> bool:
    """Whether gloo would fail, or wait for nothing, by what these ranks take."""
    several = len({card["identity"] for card in cards}) > 1
    return any(
        card["gloo"]["problem"] or (several and any(i.kind == "loopback" for i in _used(card)))
        for card in cards
    )


def _wrong_interface(card: Card, several: bool) -> tuple[str, str] | None:
    """Return what is wrong with the interface that gloo takes on a rank, and what to do, or
    None.
    """
    choice, there, used = card["gloo"], _interfaces(card), _used(card)
    better = _better(used, there) if several or choice["variable"] else None
    loopback = [i.name for i in there if i.kind == "loopback" and i.is_up]
    fast = sorted((i for i in there if i.carries), key=lambda i: i.mbit or 0)
    names = [*(loopback[:1]), *(i.name for i in fast)]
    do = f"{INTERFACE_VARIABLE}={names[-1]}" if names else "switch an interface with an address on"
    kinds = {i.kind for i in used} if several else set()
    taken, why = f"gloo takes {', '.join(choice['names'])}", choice["why"]
    if choice["problem"]:
        return f"gloo cannot start: {choice['problem']}", do
    if "loopback" in kinds:
        return f"{taken}, the loopback, which leads to no other host ({why})", do
    if "bridge" in kinds:
        return f"{taken}, a bridge of containers or virtual machines ({why})", do
    if better is not None:
        slow = min(used, key=lambda i: i.mbit or 0)
        text = (
            f"gloo takes {slow.name} ({speed(slow.mbit)}) although {better.name}"
            f" ({speed(better.mbit)}) is up"
        )
        return text, f"{INTERFACE_VARIABLE}={better.name}, if it leads to the other ranks"
    return None


def _better(used: Sequence[Interface], there: Sequence[Interface]) -> Interface | None:
    """Return an interface that is much faster than those in use, as far as the kernel gives
    speeds.
    """
    if not used or any(i.mbit is None or i.kind == "loopback" for i in used):
        return None
    others = [i for i in there if i.carries and i.mbit is not None]
    fast = max(others, key=lambda i: i.mbit or 0, default=None)
    total = sum(i.mbit or 0 for i in used)
    return fast if fast is not None and (fast.mbit or 0) >= FASTER * total else None


def judge_names(cards: Sequence[Card]) -> Iterator[Finding]:
    """Name servers that do not answer: torch asks them at every start."""
    waits = {card["rank"]: card.get("lookup_s", 0.0) for card in cards}
    slow = [rank for rank, seconds in waits.items() if seconds >= LOOKUP_S]
    if slow:
        text = (
            f"{ranks_text(slow)}: the name of an address is looked up for"
            f" {format_seconds(max(waits.values()))}, as torch does at every start"
        )
        do = (
            "repair the name server in /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1'"
            " on every rank, or name the hosts in /etc/hosts as ::ffff:ADDRESS"
        )
        yield note("network", text, do)


def judge_pairs(
    cards: Sequence[Card], pairs: Sequence[Mapping[str, Any]], silent: Sequence[int]
) -> Iterator[Finding]:
    """Pairs that do not reach each other, that are much slower than others, and links that are
    slower than their interfaces say.
    """
    for pair in pairs:
        if pair["failed"] and not silent:
            text = f"{ranks_text(pair['ranks'])} do not reach each other: {pair['failed']}"
            yield wrong("link", text, "look for a firewall, or another interface")
    for kind, level in (("between", "wrong"), ("inside", "note")):
        some = []
        for pair in pairs:
            first, second = (cards[rank]["identity"] for rank in pair["ranks"])
            if not pair["failed"] and (first != second) == (kind == "between"):
                some.append(pair)
        rate = statistics.median(pair["bits_per_s"] for pair in some) if some else 0.0
        for pair in [pair for pair in some if pair["bits_per_s"] * OUTLIER < rate][:5]:
            text = (
                f"{ranks_text(pair['ranks'])}: {format_rate(pair['bits_per_s'])}, where pairs"
                f" {kind} hosts have {format_rate(rate)}"
            )
            do = "look at the cable, the port and the interface of these hosts"
            yield Finding(level, "link", text, do)
        told = [i.mbit * 1e6 for card in cards for i in _used(card) if i.mbit]
        if some and kind == "between" and told and rate < SLOW_LINK * min(told):
            text = (
                f"pairs between hosts have {format_rate(rate)} over interfaces that say"
                f" {format_rate(min(told))}"
            )
            do = (
                "something between the hosts is slower (a switch, a limit, another job): iperf3"
                " shows whether it is the network"
            )
            yield note("link", text, do)


def judge_cores(cards: Sequence[Card]) -> Iterator[Finding]:
    """More threads, or ranks, than cores; ranks that are bound to the same core."""
    for alike in by(cards, lambda card: card["identity"]).values():
        here = [card for card in cards if card["rank"] in alike]
        together, threads = usable(here), [card["threads"] for card in here]
        where = f"{ranks_text(alike)} on {here[0]['host']}" if len(cards) > 1 else "here"
        if sum(threads) > together + 0.5 and max(threads) > 1:
            each = max(1, int(together // len(here)))
            text = (
                f"{where}: {sum(threads)} threads of torch on {together:g} cores take the cores"
                " from each other"
            )
            yield wrong("cores", text, f"OMP_NUM_THREADS={each}, or torch.set_num_threads({each})")
        elif len(here) > together + 0.5:
            text = f"{where}: {len(here)} ranks on {together:g} cores"
            yield note(
                "cores", text, "fewer ranks: they compute no faster than the cores there are"
            )
        bound = Counter(tuple(card["cores"]) for card in here)
        machine = max(os.cpu_count() or 1, max(max(card["cores"]) for card in here) + 1)
        for some, count in bound.items():
            if count > len(some) and len(some) * 2 <= machine and len(bound) > 1:
                same = ranks_text([card["rank"] for card in here if tuple(card["cores"]) == some])
                text = f"{same} are bound to the same {len(some)} of {machine} cores"
                yield wrong("cores", text, "look at the launcher's --bind-to")


def usable(cards: Sequence[Card]) -> float:
    """Return the cores that the ranks of one host have together."""
    cores = float(len({core for card in cards for core in card["cores"]}))
    quotas = [card["quota"] for card in cards if card["quota"] is not None]
    return min(cores, max(quotas)) if quotas else cores


def judge_probe(probe: Mapping[str, Any]) -> Iterator[Finding]:
    """A lost peer that was not noticed, or not in time."""
    for rank, seen in probe["seen"].items():
        one = seen.get("silent")
        if one is None:
            text = f"the probe did not come to its end on rank {rank}: {seen['failed']}"
            do = "the same would happen to training: send this report"
            yield wrong("lost peer", text, do)
        elif one["error"] != PeerLost.__name__ or one["seconds"] > PATIENCE_S + LATE_S:
            text = (
                f"rank {rank} did not get an error for a lost peer in time (silent:"
                f" {one['error'] or 'no error'} after {one['seconds']:.1f} s)"
            )
            yield wrong("lost peer", text, "send this report")


def speed(mbit: int | None) -> str:
    """Return the speed of an interface in words."""
    return "speed unknown" if mbit is None else format_rate(mbit * 1e6)


def _interfaces(card: Card) -> list[Interface]:
    return [Interface(**one) for one in card["interfaces"]]


def _used(card: Card) -> list[Interface]:
    return [one for one in _interfaces(card) if one.name in card["gloo"]["names"]]
