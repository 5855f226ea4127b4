"""The visit: ranks come, tell who they are, measure, and rank 0 puts together what is wrong and
what to do.

Rank 0 asks and the others answer by notices, so that a rank that is silent is known by its number
and keeps nobody waiting. What it has found is one dictionary, made of what JSON knows.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gradcomp.comm.notices import Notices
from gradcomp.doctor import advise, judge
from gradcomp.doctor.card import PROTOCOL, card
from gradcomp.doctor.judge import Finding, ranks_text
from gradcomp.doctor.names import Lookup
from gradcomp.doctor.options import agreed
from gradcomp.doctor.pairs import measure_all, rounds
from gradcomp.doctor.probe import ENDED, SETUP_S, members_of, probe_here
from gradcomp.doctor.start import CONNECT_S, Me, Watch, say
from gradcomp.doctor.timeouts import Timeouts
from gradcomp.errors import GradcompError
from gradcomp.version import __version__

PAIRS_SHARE = 0.4  # of the time, for pairs
PROBE_S = 3.0  # that a probe takes
LATE_S = 5.0  # for the last words of ranks whose time is up
BESIDE_S = 60.0  # longer than everything together, after which a rank ends itself

Found = dict[str, Any]


def visit(me: Me, options: argparse.Namespace) -> Found | None:
    """Return what was found, on rank 0; None on the others, and where there is nobody to tell it
    to.

    Raises:
        ConnectionError: no way to the other ranks.
    """
    begun = time.monotonic()
    mine = card(me.rank, agreed(options), me.mpi)
    if me.world_size == 1:
        return _conclude([mine], options, me, begun, {}, apart_s=0.0)
    watch = Watch(me.rank, 2 * options.wait + options.seconds + BESIDE_S)
    watch.doing = "meeting the other ranks"
    lookup = Lookup(me.address[0]) if me.address is not None else None
    notices = me.meet(options.wait)
    if lookup is not None:
        mine["lookup_s"] = lookup.seconds
    if me.rank:
        _answer(me, notices, mine, options, watch)
        return None
    return _ask(me, notices, mine, options, watch, begun)


def _answer(
    me: Me, notices: Notices, mine: Found, options: argparse.Namespace, watch: Watch
) -> None:
    notices.post(0, "card", json.dumps(mine).encode())
    waited_s = 2 * options.wait
    word = notices.take(0, "go", waited_s)
    if word is None:
        say(
            f"rank {me.rank}: rank 0 did not answer within {waited_s:g} s, so nobody reports: is it"
            " running, and not stopped?"
        )
        raise SystemExit(1)
    go = json.loads(word)
    notices.post(
        0, "seen", json.dumps(_measure(me, notices, go, watch) if go["measure"] else {}).encode()
    )


def _ask(
    me: Me, notices: Notices, mine: Found, options: argparse.Namespace, watch: Watch, begun: float
) -> Found:
    others = range(1, me.world_size)
    told: dict[int, bytes] = {}
    first_at = last_at = time.monotonic()
    while (
        len(told) < len(others) and time.monotonic() - first_at < options.wait
    ):  # since others can connect
        news = notices.collect([r for r in others if r not in told], "card", 0.2)
        told |= news
        last_at = time.monotonic() if news else last_at
    cards = [mine, *(json.loads(told[rank]) for rank in sorted(told))]
    silent = [rank for rank in others if rank not in told]
    findings = list(_strangers(cards))
    if silent:
        waited = f"{ranks_text(silent)} did not answer within {options.wait:g} s"
        findings.append(
            Finding(
                "wrong",
                "ranks",
                waited,
                "look whether the process runs there and is not stopped, and whether its host"
                " reaches rank 0's",
            )
        )
    measures = not findings and not (me.over == "gloo" and judge.cannot_connect(cards))
    go = {
        "measure": measures,
        "seconds": options.seconds,
        "members": members_of([c["identity"] for c in cards]) if measures else [],
    }
    for rank in told:
        notices.post(rank, "go", json.dumps(go).encode())
    seen: dict[int, Found] = {}
    started = time.monotonic()
    if measures:
        seen[0] = _measure(me, notices, go, watch)
        left_s = max(0.0, started + options.seconds - time.monotonic())
        answers = notices.collect(others, "seen", LATE_S + (left_s if _is_short(seen[0]) else 0.0))
        seen |= {rank: json.loads(answer) for rank, answer in answers.items()}
        silent = [rank for rank in others if rank not in seen]
        if silent:
            text = f"{ranks_text(silent)} fell silent while measuring"
            findings.append(
                Finding(
                    "wrong",
                    "ranks",
                    text,
                    "look at what the process does there (py-spy dump), and at that host's network",
                )
            )
    else:
        notices.collect(
            told, "seen", LATE_S
        )  # the store ends with this rank: the others are to have heard
    watch.doing = "predicting"
    found = _conclude(
        cards,
        options,
        me,
        started if measures else begun,
        seen,
        apart_s=last_at - first_at,
        more=findings,
        silent=silent,
    )
    found["measured"] = measures
    return found


def _is_short(seen: Found) -> bool:
    return bool(seen["failed"]) or any(pair["failed"] for pair in seen["pairs"])


def _strangers(cards: Sequence[Found]) -> Iterable[Finding]:
    for one in cards:
        if one["protocol"] != PROTOCOL:
            text = (
                f"rank {one['rank']} has another doctor (gradcomp {one['versions']['gradcomp']}"
                f" there, {__version__} on rank 0): nothing was measured"
            )
            yield Finding("wrong", "versions", text, "install the same gradcomp on every host")


def _measure(me: Me, notices: Notices, go: Mapping[str, Any], watch: Watch) -> Found:
    """Return what this rank sees: pairs, and a lost peer; and why it does not."""
    seen: Found = {"pairs": [], "probe": {}, "failed": ""}
    begun, members = time.monotonic(), go["members"]
    watch.doing = "connecting"
    try:
        comm = me.connect()
    except (RuntimeError, ConnectionError, TimeoutError, OSError, GradcompError) as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        seen["failed"] = (
            f"rank {me.rank} is not connected to all others after {time.monotonic() - begun:.1f} s"
            f" (longest {CONNECT_S:g} s): {first}"
        )
        return seen
    try:
        watch.doing = "measuring pairs"
        seen["pairs"] = measure_all(comm, notices, begun + PAIRS_SHARE * go["seconds"])
        watch.doing = "losing a peer"
        left_s = go["seconds"] - (time.monotonic() - begun)
        if me.rank in members:
            seen["probe"] = _probe(me, comm, members, left_s, notices)
    finally:
        comm.close()
    return seen


def _probe(me: Me, comm: Any, members: Sequence[int], left_s: float, notices: Notices) -> Found:
    """Return what this rank, or its helper, sees when a peer is lost."""
    for rank in members:  # all of them or none: who has no time left says so
        if rank != me.rank:
            notices.post(rank, "probe", bytes([left_s > PROBE_S]))
    others = [rank for rank in members if rank != me.rank]
    words = notices.collect(others, "probe", PROBE_S)
    if len(words) < len(others):
        return {
            "skipped": (
                f"{ranks_text([rank for rank in others if rank not in words])} did not answer"
            )
        }
    if left_s <= PROBE_S or not all(word[0] for word in words.values()):
        return {"skipped": "there was no time left for it (--seconds gives more)"}
    try:
        if me.helper is None:
            return probe_here(comm, members, notices)
        me.helper.start(me.probe_prefix(), members.index(me.rank), len(members))
        told = me.helper.answer(SETUP_S + 2 * PROBE_S)
        return {"lost": True} if me.rank == members[-1] and told == ENDED else told
    except (RuntimeError, ConnectionError, TimeoutError, OSError, GradcompError) as error:
        return {"failed": f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"}


def _conclude(
    cards: Sequence[Found],
    options: argparse.Namespace,
    me: Me,
    started: float,
    seen: Mapping[int, Found],
    *,
    apart_s: float,
    more: Iterable[Finding] = (),
    silent: Sequence[int] = (),
) -> Found:
    """Return everything that was found, findings and recommendation included."""
    pairs = _merged([pair for one in seen.values() for pair in one["pairs"]])
    clocks = [
        {"rank": pair["ranks"][1], "ahead_s": pair["second_ahead_s"], "within_s": pair["within_s"]}
        for pair in pairs
        if pair["ranks"][0] == 0 and not pair["failed"]
    ]
    probe = {"seen": {}, "skipped": ""} | _probes(seen)
    timeouts = Timeouts.here(me.over, options.timeout, options.torch_timeout, apart_s)
    findings = [
        *more,
        *judge.judge_versions(cards),
        *judge.judge_network(cards, me.over),
        *judge.judge_names(cards),
        *judge.judge_cores(cards),
    ]
    failed = [one["failed"] for one in seen.values() if one["failed"]]
    findings += [
        Finding(
            "wrong",
            "link",
            text,
            "look for a firewall between the hosts, and at the interfaces below 'network'",
        )
        for text in failed[:1]
    ]
    if not failed:
        findings += judge.judge_pairs(cards, pairs, silent)
    findings += [
        *judge.judge_clocks(clocks),
        *judge.judge_timeouts(timeouts, options.compute),
        *judge.judge_probe(probe),
    ]
    missing = sum(map(len, rounds(me.world_size))) - len(pairs)
    advice = _advice(cards, pairs, options, options.seconds - (time.monotonic() - started))
    took_s = time.monotonic() - started
    return {
        "gradcomp": __version__,
        "over": me.over,
        "ranks": [dict(one) for one in cards],
        "world_size": me.world_size,
        "silent": list(silent),
        "pairs": pairs,
        "pairs_not_measured": missing if seen else 0,
        "measured": bool(seen),
        "clocks": clocks,
        "timeouts": asdict(timeouts) | {"order": timeouts.order()},
        "lost_peer": probe,
        "recommendation": advice,
        "findings": [asdict(finding) for finding in findings],
        "seconds": took_s,
        "budget_s": options.seconds,
        "status": 1 if any(finding.level == "wrong" for finding in findings) else 0,
    }


def _advice(
    cards: Sequence[Found], pairs: Sequence[Found], options: argparse.Namespace, left_s: float
) -> Found | None:
    link = advise.link_of([one["identity"] for one in cards], pairs)
    if link is None:
        return None
    here = [one for one in cards if one["identity"] == cards[0]["identity"]]
    return advise.recommend(*link, vars(options), judge.usable(here) / len(here), left_s)


def _merged(pairs: Sequence[Found]) -> list[Found]:
    """Return one of the two entries of each pair, one that worked if there is one."""
    found: dict[tuple[int, ...], Found] = {}
    for pair in sorted(pairs, key=lambda pair: bool(pair["failed"])):
        found.setdefault(tuple(pair["ranks"]), pair)
    return [found[ranks] for ranks in sorted(found)]


def _probes(seen: Mapping[int, Found]) -> Found:
    """Return what the survivors of a probe have seen, by rank, and which rank's was lost."""
    took_part = {rank: one["probe"] for rank, one in seen.items() if one["probe"]}
    skipped = next((one["skipped"] for one in took_part.values() if "skipped" in one), "")
    lost = next((rank for rank, one in took_part.items() if "lost" in one), None)
    survivors = {
        str(rank): one
        for rank, one in took_part.items()
        if "lost" not in one and "skipped" not in one
    }
    return {"seen": {} if skipped else survivors, "skipped": skipped, "lost": lost}
