"""Derive findings from the cards and measurements of all ranks: `findings` runs every check of
`CHECKS`.

A finding is "wrong" if training would fail, hang, or be several times slower than necessary. Other
information is a "note".
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from gradcomp.comm.addresses import INTERFACE_VARIABLE
from gradcomp.comm.store import SETUP_VARIABLE
from gradcomp.doctor.card import PROTOCOL
from gradcomp.doctor.interfaces import Interface
from gradcomp.doctor.pairs import measured
from gradcomp.errors import PeerLost
from gradcomp.plan.links import format_rate, format_seconds
from gradcomp.version import __version__

FASTER = 2.0  # factor of speed from which another interface is recommended
OUTLIER = 5.0  # a pair is slow if the median of its kind is faster by more than this factor
SLOW_LINK = 0.1  # a link is slow below this share of its interface's reported speed
FAR_S = 5e-3  # latency from which losses slow a connection down: from one city to another
LOOKUP_S = 1.0  # a name server is slow if one look-up takes this long
PATIENCE_S = 1.0  # timeout of the ranks that wait for a silent rank
LATE_S = 3.0  # an error is late if it is raised more than this after the timeout
ALIKE = 2.0  # as in `TorchCommunicator`: factor up to which torch may wait longer without a note
LONG_S = 600.0  # timeouts of at least this length get a note
NO_ADDRESS = "MASTER_ADDR is not set, and no other variable names the host of rank 0"
SET_ADDRESS = "set MASTER_ADDR and MASTER_PORT on every rank"
MUST_AGREE = ("gradcomp", "wire format", "torch")

Found = Mapping[str, Any]  # see `gradcomp.doctor.session.examine`
Card = Mapping[str, Any]  # see `gradcomp.doctor.card.card`
Level = Literal["wrong", "note"]  # "wrong" changes the exit status
Said = Iterator[tuple[Level, str, str]]  # level, text and remedy ("" for none) of findings


def findings(found: Found) -> list[dict[str, str]]:
    """Return the findings of all checks on a result of `gradcomp.doctor.session.examine`, as
    dictionaries: ``level``, ``topic`` (key of `CHECKS`), ``text`` and ``do`` (remedy).
    """
    return [
        {"level": level, "topic": topic, "text": text, "do": remedy}
        for topic, check in CHECKS.items()
        for level, text, remedy in check(found)
    ]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", "ranks 0 and 2" or "ranks 0-3"."""
    some = sorted(set(ranks))
    if len(some) == 1:
        return f"rank {some[0]}"
    if len(some) > 2 and some == list(range(some[0], some[-1] + 1)):
        return f"ranks {some[0]}-{some[-1]}"
    return f"ranks {', '.join(map(str, some[:-1]))} and {some[-1]}"


def by(cards: Sequence[Card], key: Callable[[Card], str]) -> dict[str, list[int]]:
    """Return the ranks grouped by the value of `key` on their cards."""
    found: dict[str, list[int]] = {}
    for card in cards:
        found.setdefault(key(card), []).append(card["rank"])
    return found


def usable(cards: Sequence[Card]) -> float:
    """Return the number of cores that the ranks of one host may use together."""
    cores = float(len({core for card in cards for core in card["cores"]}))
    quotas = [card["quota"] for card in cards if card["quota"] is not None]
    return min(cores, max(quotas)) if quotas else cores


def speed(mbit: int | None) -> str:
    """Return the speed of an interface as text."""
    return "speed unknown" if mbit is None else format_rate(mbit * 1e6)


def are_apart(cards: Sequence[Card]) -> bool:
    """Return whether these ranks are on more than one host."""
    return len({card["identity"] for card in cards}) > 1


def cannot_connect(cards: Sequence[Card]) -> bool:
    """Return whether gloo would fail or wait forever with the interfaces that it chooses here."""
    return any(
        card["gloo"]["problem"]
        or (are_apart(cards) and "loopback" in {i.kind for i in _used(card)})
        for card in cards
    )


def _used(card: Card) -> list[Interface]:
    names = card["gloo"]["names"]
    return [Interface(**one) for one in card["interfaces"] if one["name"] in names]


def _listed(values: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in values.items())


# ---- checks --------------------------------------------------------------------------------------


def _ranks(found: Found) -> Said:
    """Check for ranks that do not answer."""
    cards, who = found["ranks"], ranks_text(found["silent"]) if found["silent"] else ""
    if who and found["measured"]:
        remedy = "look at what the process does (py-spy dump), and at the network of its host"
        yield "wrong", f"{who} fell silent while measuring", remedy
    elif who:
        text = f"{who} did not answer within {cards[0]['options']['wait']:g} s"
        remedy = "check that the process runs, is not stopped, and that it reaches rank 0's host"
        yield "wrong", text, remedy
    elif len(cards) < found["world_size"]:
        text = f"{NO_ADDRESS}: only rank 0 was examined, without links and without a lost peer"
        yield "note", text, SET_ADDRESS


def _versions(found: Found) -> Said:
    """Check for versions (also of the doctor), options and launchers that differ between ranks."""
    for card in found["ranks"]:
        if card["protocol"] != PROTOCOL:
            text = (
                f"rank {card['rank']} has another doctor (gradcomp {card['versions']['gradcomp']}"
                f" there, {__version__} on rank 0): nothing was measured"
            )
            yield "wrong", text, "install the same gradcomp on every host"
    for name, values in _differing(found["ranks"], "versions"):
        level: Level = "wrong" if name in MUST_AGREE else "note"
        yield level, f"{name} differs: {values}", "install the same on every host"
    for option, values in _differing(found["ranks"], "options"):
        text = f"--{option.replace('_', '-')} differs: {values}; rank 0's was taken"
        remedy = "start every rank with the same command line: training needs that as well"
        yield "wrong", text, remedy
    starters = by(found["ranks"], lambda card: card["starter"] or "nothing")
    if len(starters) > 1:
        text = f"ranks were started by different launchers: {_listed(starters)}"
        yield "wrong", text, "start all of them with one"


def _differing(cards: Sequence[Card], what: str) -> Iterator[tuple[str, str]]:
    """Yield name and values, as text, of the entries of `what` that differ between cards."""
    for name in dict.fromkeys(name for card in cards for name in card[what]):
        values: dict[str, list[int]] = defaultdict(list)
        for card in cards:
            values[str(card[what].get(name, "none"))].append(card["rank"])
        if len(values) > 1:
            yield name, _listed(values)


def _kernels(found: Found) -> Said:
    """Check for kernels that are slow, or that differ between ranks."""
    tiers = by(found["ranks"], lambda card: card["tier"])
    used_and_best = by(found["ranks"], lambda card: f"{card['tier']} {card['tiers'][-1]}")
    for names, ranks in used_and_best.items():
        tier, best = names.split()
        if tier != best:
            text = f"{ranks_text(ranks)}: the {best} tier is switched off"
            yield "note", text, "unset GRADCOMP_DISABLE_CPU_FEATURES"
        elif tier == "portable":
            why = "this CPU has no vector instructions that gradcomp knows"
            yield "note", f"{ranks_text(ranks)}: plain C kernels, several times slower; {why}", ""
    if len(tiers) > 1:
        text = "results are the same to the bit, the slowest rank sets the pace"
        yield "note", f"tiers differ: {_listed(tiers)}; {text}", ""


def _accelerator(found: Found) -> Said:
    """Check for accelerators that fail, and for their kernels that are asked for and not used."""
    for card in found["ranks"]:
        one, rank = card.get("accelerator"), f"rank {card['rank']}"
        if one is not None and one["failed"]:
            remedy = "look at what else uses it (nvidia-smi), and at its driver"
            yield "wrong", f"{rank}: {one['name']} ({one['device']}) fails: {one['failed']}", remedy
        elif one is not None and one["refused"]:
            text = f"{rank}: GRADCOMP_CUDA_KERNELS=1, and gradients are copied to the host all the"
            remedy = "mend that, or unset GRADCOMP_CUDA_KERNELS; every average has the same bits"
            yield "note", f"{text} same: {one['refused']}", remedy


def _network(found: Found) -> Said:
    """Check gloo's interfaces (missing, loopback, bridge or slow) and name servers (slow)."""
    cards, over_mpi = found["ranks"], found["over"] == "mpi"
    level: Level = "note" if over_mpi else "wrong"
    of_mpi = " (gloo's; an MPI chooses by itself)" if over_mpi else ""
    alike, shared = defaultdict(list), defaultdict(set)
    for card in cards:
        problem = _wrong_interface(card, are_apart(cards))
        if problem is not None:
            alike[problem].append(card["rank"])
        for one in _used(card):
            for address in one.addresses if one.kind != "loopback" else ():
                shared[address].add(card["identity"])
    for (text, remedy), ranks in alike.items():
        yield level, f"{ranks_text(ranks)}: {text}{of_mpi}", remedy
    for address, hosts in shared.items():
        if len(hosts) > 1:
            text = f"{len(hosts)} hosts have the address {address}{of_mpi}"
            remedy = f"set {INTERFACE_VARIABLE} to an interface that joins the hosts"
            yield level, f"{text}: it leads from each of them to itself", remedy
    waits = {card["rank"]: card.get("lookup_s", 0.0) for card in cards}
    slow = [rank for rank, seconds in waits.items() if seconds >= LOOKUP_S]
    if slow:  # torch does such a look-up at every start
        text = f"the name of an address is looked up for {format_seconds(max(waits.values()))}"
        remedy = (
            "repair the name server in /etc/resolv.conf, or set RES_OPTIONS='timeout:1 attempts:1'"
            " on every rank, or name the hosts in /etc/hosts as ::ffff:ADDRESS"
        )
        yield "note", f"{ranks_text(slow)}: {text}, as torch does at every start", remedy


def _wrong_interface(card: Card, between_hosts: bool) -> tuple[str, str] | None:
    """Return the problem of gloo's interface on a rank and its remedy; None if there is none."""
    choice, used = card["gloo"], _used(card)
    there = [Interface(**one) for one in card["interfaces"]]
    loopback = [i.name for i in there if i.kind == "loopback" and i.is_up]
    carriers = sorted((i for i in there if i.carries), key=lambda i: i.mbit or 0)
    names = [*loopback[:1], *(i.name for i in carriers)]
    remedy = f"{INTERFACE_VARIABLE}={names[-1]}" if names else "switch on one that has an address"
    kinds = {i.kind for i in used} if between_hosts else set()
    taken, why = f"gloo takes {', '.join(choice['names'])}", choice["why"]
    if choice["problem"]:
        return f"gloo cannot start: {choice['problem']}", remedy
    if "loopback" in kinds:
        return f"{taken}, the loopback, which leads to no other host ({why})", remedy
    if "bridge" in kinds:
        return f"{taken}, a bridge of containers or virtual machines ({why})", remedy
    is_known = bool(used) and all(i.mbit and i.kind != "loopback" for i in used)
    if not is_known or not carriers or not (between_hosts or choice["variable"]):
        return None
    fast, slow = carriers[-1], min(used, key=lambda i: i.mbit or 0)
    if (fast.mbit or 0) < FASTER * sum(i.mbit or 0 for i in used):
        return None
    better = f"although {fast.name} ({speed(fast.mbit)}) is up"
    remedy = f"{INTERFACE_VARIABLE}={fast.name}, if it leads to the other ranks"
    return f"gloo takes {slow.name} ({speed(slow.mbit)}) {better}", remedy


def _cores(found: Found) -> Said:
    """Check for more threads or ranks than cores, and for ranks bound to the same cores."""
    cards = found["ranks"]
    for alike in by(cards, lambda card: card["identity"]).values():
        here = [card for card in cards if card["rank"] in alike]
        cores, threads = usable(here), [card["threads"] for card in here]
        where = f"{ranks_text(alike)} on {here[0]['host']}" if len(cards) > 1 else "here"
        if sum(threads) > cores + 0.5 and max(threads) > 1:
            each = max(1, int(cores // len(here)))
            text = f"{where}: {sum(threads)} threads of torch on {cores:g} cores"
            remedy = f"OMP_NUM_THREADS={each}, or torch.set_num_threads({each})"
            yield "wrong", f"{text} take the cores from each other", remedy
        elif len(here) > cores + 0.5:
            text = f"{where}: {len(here)} ranks on {cores:g} cores"
            yield "note", text, "fewer ranks: they compute no faster than the cores there are"
        bound = Counter(tuple(card["cores"]) for card in here)
        machine = max(os.cpu_count() or 1, max(max(card["cores"]) for card in here) + 1)
        for some, count in bound.items():
            if count > len(some) and len(some) * 2 <= machine and len(bound) > 1:
                same = ranks_text([card["rank"] for card in here if tuple(card["cores"]) == some])
                text = f"{same} are bound to the same {len(some)} of {machine} cores"
                yield "wrong", text, "look at the launcher's --bind-to"


def _link(found: Found) -> Said:
    """Check for pairs that fail or are slow, and for links slower than their interfaces."""
    cards, pairs = found["ranks"], found["pairs"]
    if found["not_connected"]:  # pairs fail for the same reason
        remedy = "look for a firewall between the hosts, and at the interfaces below 'network'"
        yield "wrong", found["not_connected"], remedy
        return
    for pair in pairs:
        if pair["failed"] and not found["silent"]:  # a silent rank is reported already
            text = f"{ranks_text(pair['ranks'])} do not reach each other: {pair['failed']}"
            yield "wrong", text, "look for a firewall, or another interface"
    between, inside = measured(pairs, [card["identity"] for card in cards])
    yield from _slow_pairs(between, "between", "wrong")
    if between:
        yield from _slow_network(cards, between)
    yield from _slow_pairs(inside, "inside", "note")


def _slow_pairs(pairs: Sequence[Found], kind: str, level: Level) -> Said:
    """Check for pairs that are slower than most others `kind` ("between", "inside") hosts."""
    usual = statistics.median(pair["bits_per_s"] for pair in pairs) if pairs else 0.0
    for pair in [pair for pair in pairs if pair["bits_per_s"] * OUTLIER < usual][:5]:
        slow = f"{ranks_text(pair['ranks'])}: {format_rate(pair['bits_per_s'])}"
        text = f"{slow}, where pairs {kind} hosts have {format_rate(usual)}"
        yield level, text, "look at the cable, the port and the interface of these hosts"


def _slow_network(cards: Sequence[Card], pairs: Sequence[Found]) -> Said:
    """Check for a network slower than its interfaces, or so far that lost packets matter."""
    rate = statistics.median(pair["bits_per_s"] for pair in pairs)
    speeds = [i.mbit * 1e6 for card in cards for i in _used(card) if i.mbit]
    if speeds and rate < SLOW_LINK * min(speeds):
        said = f"over interfaces that say {format_rate(min(speeds))}"
        remedy = (
            "something between the hosts is slower (a switch, a limit, another job): iperf3"
            " shows whether it is the network"
        )
        yield "note", f"pairs between hosts have {format_rate(rate)} {said}", remedy
    latency = statistics.median(pair["latency_s"] for pair in pairs)
    others = by(cards, lambda card: card.get("congestion") or "bbr")
    others.pop("bbr", None)
    if latency >= FAR_S and others:
        text = f"messages between hosts take {format_seconds(latency)}, and TCP uses"
        remedy = (
            "if packets are lost on the way, sysctl net.ipv4.tcp_congestion_control=bbr on"
            " every host makes a connection many times faster"
        )
        yield "note", f"{text} {_listed(others)}", remedy


def _timeouts(found: Found) -> Said:
    """Check for timeouts in the wrong order, too short for a step, or very long."""
    limits, compute_s = found["timeouts"], found["ranks"][0]["options"]["compute"]
    ours_s, setup_s, apart_s = (limits[f"{name}_s"] for name in ("gradcomp", "setup", "apart"))
    torch_s = ours_s if limits["torch_s"] is None else limits["torch_s"]  # None: over MPI
    job_s = math.inf if limits["job_s"] is None else limits["job_s"]
    group = f"init_process_group(timeout=timedelta(seconds={ours_s:g}))"

    if limits["setup_problem"]:
        yield "wrong", limits["setup_problem"], f"unset {SETUP_VARIABLE}"
    if apart_s > setup_s / 2:
        waits = f"wait {setup_s:g} s for each other to register"
        remedy = f"{SETUP_VARIABLE}={4 * apart_s:.0f}, on every rank"
        yield "wrong", f"the ranks came {apart_s:.0f} s apart, and {waits}", remedy
    if compute_s >= ours_s / 2:
        text = f"a step computes for {compute_s:g} s, and a peer is given up after {ours_s:g} s"
        remedy = f"timeout_s={10 * compute_s:.0f} in register, and the same in init_process_group"
        yield "wrong", f"{text}: a slow step would end training", remedy
    if torch_s < ours_s:
        text = f"torch gives up after {torch_s:g} s, before gradcomp after {ours_s:g} s"
        remedy = f"{group}, or a shorter timeout_s in register"
        yield "wrong", f"{text}: the error then names no rank", remedy
    if torch_s > ALIKE * ours_s:
        later = f"torch's own collectives (broadcast of buffers) after {torch_s:g} s"
        text = f"gradcomp gives a peer up after {ours_s:g} s, {later}"
        yield "note", text, f"{group} makes them alike"
    if ours_s >= LONG_S:
        who = "a peer that falls silent without ending (a frozen host, a pulled cable)"
        remedy = (
            "a shorter timeout_s in register and in init_process_group, several times the longest"
            " step and checkpoint"
        )
        yield "note", f"{who} is given up after {ours_s:g} s", remedy
    if job_s < ours_s:
        text = f"the job ends in {job_s:.0f} s, before a silent peer is given up after {ours_s:g} s"
        yield "note", text, "a shorter timeout_s"


def _lost_peer(found: Found) -> Said:
    """Check that a lost peer was noticed in time."""
    for rank, seen in found["lost_peer"]["seen"].items():
        one = seen.get("silent")
        if one is None:
            text = f"the probe did not come to its end on rank {rank}: {seen['failed']}"
            yield "wrong", text, "the same would happen to training: send this report"
        elif one["error"] != PeerLost.__name__ or one["seconds"] > PATIENCE_S + LATE_S:
            got = f"{one['error'] or 'no error'} after {one['seconds']:.1f} s"
            text = f"rank {rank} did not get an error for a lost peer in time (silent: {got})"
            yield "wrong", text, "send this report"


CHECKS = {
    "ranks": _ranks,
    "versions": _versions,
    "kernels": _kernels,
    "accelerator": _accelerator,
    "network": _network,
    "cores": _cores,
    "link": _link,
    "timeouts": _timeouts,
    "lost peer": _lost_peer,
}
