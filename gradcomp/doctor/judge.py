"""What is to be said of what the ranks have told and measured: findings, each with what to do about
it.

A finding is "wrong" where training would fail, hang, or be several times slower than it needs to
be, and a "note" elsewhere.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradcomp.comm.addresses import INTERFACE_VARIABLE
from gradcomp.doctor.interfaces import Interface
from gradcomp.doctor.probe import in_time
from gradcomp.doctor.timeouts import Timeouts
from gradcomp.plan.links import format_rate, format_seconds

FASTER = 2.0  # another interface with so many times the speed is the better one
OUTLIER = 5.0  # a pair that is so many times slower than the middle of its kind
SLOW_LINK = 0.1  # of what the interface says it does
LOOKUP_S = 1.0  # for the name of one address
CLOCK_S = 0.5  # logs of ranks cannot be put in order any more
MUST_AGREE = ("gradcomp", "wire format", "torch")


@dataclass(frozen=True)
class Finding:
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


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3", "ranks 0 and 2", "ranks 0-3"."""
    some = sorted(set(ranks))
    if len(some) == 1:
        return f"rank {some[0]}"
    if len(some) > 2 and some == list(range(some[0], some[-1] + 1)):
        return f"ranks {some[0]}-{some[-1]}"
    return f"ranks {', '.join(map(str, some[:-1]))} and {some[-1]}"


def judge_versions(cards: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Versions, kernels and options that differ between ranks, and kernels that are slow."""
    names = dict.fromkeys(name for card in cards for name in card["versions"])
    for name in names:
        by_value = _by(cards, lambda card, name=name: card["versions"].get(name, "none"))
        if len(by_value) > 1:
            level = "wrong" if name in MUST_AGREE else "note"
            yield Finding(
                level,
                "versions",
                f"{name} differs: {_listed(by_value)}",
                "install the same on every host",
            )
    tiers = _by(cards, lambda card: card["tier"])
    for tier, ranks in tiers.items():
        best = cards[ranks[0]]["tiers"][-1]
        if tier != best:
            yield Finding(
                "note",
                "kernels",
                f"{ranks_text(ranks)}: the {best} tier is switched off",
                "unset GRADCOMP_DISABLE_CPU_FEATURES",
            )
        elif tier == "portable":
            text = (
                f"{ranks_text(ranks)}: plain C kernels, several times slower; this CPU has no"
                " vector instructions that gradcomp knows"
            )
            yield Finding("note", "kernels", text)
    if len(tiers) > 1:
        yield Finding(
            "note",
            "kernels",
            f"tiers differ: {_listed(tiers)}; results are the same to the bit, the slowest rank"
            " sets the pace",
        )
    for option in dict.fromkeys(name for card in cards for name in card["options"]):
        by_value = _by(cards, lambda card, option=option: str(card["options"].get(option, "none")))
        if len(by_value) > 1:
            flag = f"--{option.replace('_', '-')}"
            text = f"{flag} differs: {_listed(by_value)}; rank 0's was taken"
            yield Finding(
                "wrong",
                "versions",
                text,
                "start every rank with the same command line: training needs that as well",
            )
    starters = _by(cards, lambda card: card["starter"] or "nothing")
    if len(starters) > 1:
        yield Finding(
            "wrong",
            "versions",
            f"ranks were started by different launchers: {_listed(starters)}",
            "start all of them with one",
        )


def judge_network(cards: Sequence[Mapping[str, Any]], over: str) -> Iterator[Finding]:
    """The interfaces that gloo takes: missing, the loopback between hosts, a bridge, a slower
    one than there is.
    """
    several = len({card["identity"] for card in cards}) > 1
    level, of_mpi = (
        ("wrong", "") if over == "gloo" else ("note", " (gloo's; an MPI chooses by itself)")
    )
    alike: dict[tuple[str, str], list[int]] = {}
    for card in cards:
        found = _wrong_interface(card, several)
        if found is not None:
            alike.setdefault(found, []).append(card["rank"])
    for (text, fix), ranks in alike.items():
        yield Finding(level, "network", f"{ranks_text(ranks)}: {text}{of_mpi}", fix)
    shared: dict[str, set[str]] = defaultdict(set)
    for card in cards:
        for one in card["interfaces"]:
            if one["name"] in card["gloo"]["names"] and one["kind"] != "loopback":
                for address in one["addresses"]:
                    shared[address].add(card["identity"])
    for address, there in shared.items():
        if len(there) > 1:
            text = (
                f"{len(there)} hosts have the address {address}{of_mpi}: it leads from each of them"
                " to itself"
            )
            yield Finding(
                level,
                "network",
                text,
                f"set {INTERFACE_VARIABLE} to an interface that joins the hosts",
            )


def judge_names(cards: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Name servers that do not answer: torch asks them at every start."""
    slow = {
        card["rank"]: card["lookup_s"] for card in cards if card.get("lookup_s", 0.0) >= LOOKUP_S
    }
    if slow:
        text = (
            f"{ranks_text(list(slow))}: the name of an address is looked up for"
            f" {format_seconds(max(slow.values()))}, as torch does at every start"
        )
        fix = (
            "mend the name server in /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1' on"
            " every rank, or name the hosts in /etc/hosts as ::ffff:ADDRESS"
        )
        yield Finding("note", "network", text, fix)


def cannot_connect(cards: Sequence[Mapping[str, Any]]) -> bool:
    """Whether gloo would fail, or wait for nothing, by what these ranks take."""
    several = len({card["identity"] for card in cards}) > 1
    return any(
        card["gloo"]["problem"] or (several and any(i.kind == "loopback" for i in _used(card)))
        for card in cards
    )


def _wrong_interface(card: Mapping[str, Any], several: bool) -> tuple[str, str] | None:
    """Return what is wrong with the interface that gloo takes on a rank, and what to do; None:
    nothing.
    """
    choice, there, used = card["gloo"], _interfaces(card), _used(card)
    better = _better(used, there) if several or choice["variable"] else None
    fix = (
        f"{INTERFACE_VARIABLE}={_suggest(there)}"
        if _suggest(there)
        else "switch an interface with an address on"
    )
    taken = f"gloo takes {', '.join(choice['names'])}"
    if choice["problem"]:
        return f"gloo cannot start: {choice['problem']}", fix
    if several and any(i.kind == "loopback" for i in used):
        return f"{taken}, the loopback, which leads to no other host ({choice['why']})", fix
    if several and any(i.kind == "bridge" for i in used):
        return f"{taken}, a bridge of containers or virtual machines ({choice['why']})", fix
    if better is not None:
        slow = min(used, key=lambda i: i.mbit or 0)
        text = (
            f"gloo takes {slow.name} ({_speed(slow)}) although {better.name} ({_speed(better)})"
            " is up"
        )
        return text, f"{INTERFACE_VARIABLE}={better.name}, if it leads to the other ranks"
    return None


def judge_pairs(
    cards: Sequence[Mapping[str, Any]], pairs: Sequence[Mapping[str, Any]], silent: Sequence[int]
) -> Iterator[Finding]:
    """Pairs that do not reach each other, that are much slower than others, and links that are
    slower than their interfaces say.
    """
    for pair in pairs:
        if pair["failed"] and not set(pair["ranks"]) & set(silent) and not silent:
            yield Finding(
                "wrong",
                "link",
                f"{ranks_text(pair['ranks'])} do not reach each other: {pair['failed']}",
                "look for a firewall, or another interface",
            )
    kinds = ("between hosts", "inside hosts")
    for kind in kinds:
        some = [p for p in pairs if not p["failed"] and _apart(cards, p) == (kind == kinds[0])]
        if not some:
            continue
        rate = statistics.median(p["bits_per_s"] for p in some)
        slow = [p for p in some if p["bits_per_s"] * OUTLIER < rate]
        for pair in slow[:5]:
            text = (
                f"{ranks_text(pair['ranks'])}: {format_rate(pair['bits_per_s'])}, where pairs"
                f" {kind} have {format_rate(rate)}"
            )
            yield Finding(
                "wrong" if kind == kinds[0] else "note",
                "link",
                text,
                "look at the cable, the port and the interface of these hosts",
            )
        told = [
            i["mbit"] * 1e6
            for card in cards
            for i in card["interfaces"]
            if i["name"] in card["gloo"]["names"] and i["mbit"]
        ]
        if kind == kinds[0] and told and rate < SLOW_LINK * min(told):
            text = (
                f"pairs between hosts have {format_rate(rate)} over interfaces that say"
                f" {format_rate(min(told))}"
            )
            yield Finding(
                "note",
                "link",
                text,
                "something between the hosts is slower (a switch, a limit, another job): iperf3"
                " shows whether it is the network",
            )


def judge_clocks(clocks: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Clocks that differ by more than logs can bear."""
    for clock in clocks:
        if abs(clock["ahead_s"]) - clock["within_s"] > CLOCK_S:
            way = "ahead of" if clock["ahead_s"] > 0 else "behind"
            text = (
                f"the clock of rank {clock['rank']} is {format_seconds(abs(clock['ahead_s']))}"
                f" {way} rank 0's"
            )
            yield Finding(
                "note",
                "clocks",
                text,
                "gradcomp does not mind; logs, profiles and files' times do: run chrony or another"
                " NTP client",
            )


def judge_cores(cards: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """More threads, or ranks, than cores; ranks that are tied to the same core."""
    for alike in _by(cards, lambda card: card["identity"]).values():
        here = [card for card in cards if card["rank"] in alike]
        together = usable(here)
        threads = sum(card["threads"] for card in here)
        where = f"{ranks_text(alike)} on {here[0]['host']}" if len(cards) > 1 else "here"
        if threads > together + 0.5 and max(card["threads"] for card in here) > 1:
            each = max(1, int(together // len(here)))
            text = (
                f"{where}: {threads} threads of torch on {together:g} cores take the cores from"
                " each other"
            )
            yield Finding(
                "wrong", "cores", text, f"OMP_NUM_THREADS={each}, or torch.set_num_threads({each})"
            )
        elif len(here) > together + 0.5:
            yield Finding(
                "note",
                "cores",
                f"{where}: {len(here)} ranks on {together:g} cores",
                "fewer ranks: they compute no faster than the cores there are",
            )
        bound = Counter(tuple(card["cores"]) for card in here)
        machine = max(os.cpu_count() or 1, max(max(card["cores"]) for card in here) + 1)
        for some, count in bound.items():
            if count > len(some) and len(some) * 2 <= machine and len(bound) > 1:
                same = [card["rank"] for card in here if tuple(card["cores"]) == some]
                yield Finding(
                    "wrong",
                    "cores",
                    f"{ranks_text(same)} are tied to the same {len(some)} of {machine} cores",
                    "look at the launcher's --bind-to",
                )


def judge_timeouts(found: Timeouts, compute_s: float) -> Iterator[Finding]:
    """Timeouts in the wrong order."""
    for level, text, do in found.findings(compute_s):
        yield Finding(level, "timeouts", text, do)


def judge_probe(probe: Mapping[str, Any]) -> Iterator[Finding]:
    """A lost peer that was not noticed, or not in time."""
    for rank, seen in probe.get("seen", {}).items():
        if "failed" in seen:
            yield Finding(
                "wrong",
                "lost peer",
                f"the probe did not come to its end on rank {rank}: {seen['failed']}",
                "the same would happen to training: send this report",
            )
        elif not in_time(seen):
            what = ", ".join(
                f"{how}: {one['error'] or 'no error'} after {one['seconds']:.1f} s"
                for how, one in seen.items()
            )
            yield Finding(
                "wrong",
                "lost peer",
                f"rank {rank} did not hear of a lost peer in time ({what})",
                "send this report",
            )


def usable(cards: Sequence[Mapping[str, Any]]) -> float:
    """Return the cores that the ranks of one host have together."""
    cores = float(len({core for card in cards for core in card["cores"]}))
    quotas = [card["quota"] for card in cards if card["quota"] is not None]
    return min(cores, max(quotas)) if quotas else cores


def _by(cards: Sequence[Mapping[str, Any]], key: Any) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for card in cards:
        found.setdefault(key(card), []).append(card["rank"])
    return found


def _listed(by_value: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_value.items())


def _interfaces(card: Mapping[str, Any]) -> list[Interface]:
    return [
        Interface(**{**one, "addresses": tuple(one["addresses"])}) for one in card["interfaces"]
    ]


def _used(card: Mapping[str, Any]) -> list[Interface]:
    return [one for one in _interfaces(card) if one.name in card["gloo"]["names"]]


def _better(used: Sequence[Interface], there: Sequence[Interface]) -> Interface | None:
    """Return an interface that is much faster than those in use, as far as the kernel gives
    speeds.
    """
    if not used or any(i.mbit is None for i in used) or any(i.kind == "loopback" for i in used):
        return None
    fast = max(
        (i for i in there if i.carries and i.mbit is not None),
        key=lambda i: i.mbit or 0,
        default=None,
    )
    speed = sum(i.mbit or 0 for i in used)
    return fast if fast is not None and (fast.mbit or 0) >= FASTER * speed else None


def _suggest(there: Sequence[Interface]) -> str:
    fast = sorted((i for i in there if i.carries), key=lambda i: i.mbit or 0)
    loopback = [i for i in there if i.kind == "loopback" and i.is_up]
    return fast[-1].name if fast else loopback[0].name if loopback else ""


def _speed(one: Interface) -> str:
    return "speed unknown" if one.mbit is None else format_rate(one.mbit * 1e6)


def _apart(cards: Sequence[Mapping[str, Any]], pair: Mapping[str, Any]) -> bool:
    first, second = pair["ranks"]
    return bool(cards[first]["identity"] != cards[second]["identity"])
