"""The report in words: sections of lines, with rich where it is installed, as plain text
elsewhere.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from gradcomp.doctor.advise import in_code
from gradcomp.doctor.judge import ranks_text
from gradcomp.plan.links import format_rate, format_seconds

MOST_PAIRS = 28  # that are shown one by one
WIDTH = 14
COLORS = {"ok": "green", "note": "yellow", "wrong": "bold red"}
START = """\
several ranks here, under the MPI that is installed:
  python -m gradcomp.launch -n 2 -m gradcomp.doctor
the same without an MPI:
  torchrun --standalone --nproc-per-node 2 -m gradcomp.doctor
on each of two hosts:
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    -m gradcomp.doctor
under Slurm:
  srun -n 4 python -m gradcomp.doctor"""

Line = tuple[str, str]  # what it is ("", "ok", "note", "wrong"), and its text
Found = Mapping[str, Any]


def sections(found: Found) -> list[tuple[str, list[Line]]]:
    """Return the report: (topic, lines)."""
    cards = found["ranks"]
    said = {
        "ranks": _ranks(found),
        "versions": _same(
            cards, lambda card: ", ".join(f"{k} {v}" for k, v in card["versions"].items())
        ),
        "kernels": _same(cards, lambda card: f"{card['tier']} tier"),
        "network": _same(cards, _network),
        "link": _link(found),
        "clocks": _clocks(found),
        "cores": _same(
            cards,
            lambda card: (
                f"{len(card['cores'])} cores{_quota(card)}, {card['threads']} threads of torch"
            ),
            here=True,
        ),
        "timeouts": [f"{found['timeouts']['order']}, each to be no shorter than the one before"],
        "lost peer": _lost(found),
    }
    out = []
    for topic, lines in said.items():
        findings = [one for one in found["findings"] if one["topic"] == topic]
        level = (
            "wrong"
            if any(f["level"] == "wrong" for f in findings)
            else "note"
            if findings
            else "ok"
        )
        told: list[Line] = [
            (level if number == 0 else "", line)
            for number, line in enumerate(lines or ["not measured"])
        ]
        for one in findings:
            told.append((one["level"], f"{one['level']}: {one['text']}"))
            if one["do"]:
                told.append(("", f"  -> {one['do']}"))
        out.append((topic, told))
    out.append(("recommended", [("", line) for line in _advice(found)]))
    return out


def show(found: Found, out: TextIO | None = None, *, plain: bool | None = None) -> None:
    """Print the report.

    Args:
        found: of `gradcomp.doctor.visit`.
        out: where; the standard output unless given.
        plain: without rich; None: unless it is installed and `out` is a terminal, since lines of a
            log are better whole.
    """
    stream = sys.stdout if out is None else out
    last = verdict(found)
    if plain is None:
        plain = importlib.util.find_spec("rich") is None or not stream.isatty()
    if plain:
        for topic, lines in sections(found):
            for number, (_, text) in enumerate(lines):
                print(f"{topic if number == 0 else '':<{WIDTH}}{text}", file=stream)
        print(f"\n{last}", file=stream, flush=True)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream, highlight=False, soft_wrap=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for topic, lines in sections(found):
        body = Text()
        for number, (level, text) in enumerate(lines):
            body.append(
                f"{text}\n" if number < len(lines) - 1 else text, style=COLORS.get(level, "")
            )
        table.add_row(topic, body)
    console.print(table)
    console.print(Text(f"\n{last}", style=COLORS["wrong" if found["status"] else "ok"]))


def verdict(found: Found) -> str:
    """Return the last line."""
    wrong = sum(one["level"] == "wrong" for one in found["findings"])
    notes = len(found["findings"]) - wrong
    things = f"{wrong} thing{'s' if wrong != 1 else ''} wrong" if wrong else "Nothing wrong"
    over = (
        f", longer than the {found['budget_s']:g} s of --seconds"
        if found["seconds"] > found["budget_s"] + 0.5
        else ""
    )
    return f"{things}, {notes} note{'s' if notes != 1 else ''}; {found['seconds']:.1f} s{over}."


def _ranks(found: Found) -> list[str]:
    cards = found["ranks"]
    if found["world_size"] == 1:
        return [
            f"alone on {cards[0]['host']}: its network can be measured from several ranks",
            *START.splitlines(),
        ]
    hosts: dict[str, list[int]] = {}
    for card in cards:
        hosts.setdefault(card["identity"], []).append(card["rank"])
    names = {card["identity"]: card["host"] for card in cards}
    started = cards[0]["starter"] or "nothing that is known"
    where = ", ".join(
        f"{names[host]}: {ranks_text(ranks)}" for host, ranks in list(hosts.items())[:16]
    )
    return [
        f"{len(cards)} of {found['world_size']}, started by {started}, bytes over {found['over']}",
        where,
    ]


def _same(cards: Sequence[Found], text: Any, *, here: bool = False) -> list[str]:
    """Return what ranks have in common, once; `here`: with how many of them share it."""
    found: dict[str, list[int]] = {}
    for card in cards:
        found.setdefault(text(card), []).append(card["rank"])
    if len(found) == 1 and not (here and len(cards) > 1):
        return list(found)
    return [f"{ranks_text(ranks)}: {line}" for line, ranks in found.items()]


def _network(card: Found) -> str:
    used = [i for i in card["interfaces"] if i["name"] in card["gloo"]["names"]]
    others = [
        i for i in card["interfaces"] if i not in used and i["kind"] != "loopback" and i["is_up"]
    ]
    takes = ", ".join(_interface(i) for i in used) or "nothing"
    more = f"; also up: {', '.join(_interface(i) for i in others)}" if others else ""
    return f"gloo takes {takes} ({card['gloo']['why']}){more}"


def _interface(one: Found) -> str:
    speed = "speed unknown" if one["mbit"] is None else format_rate(one["mbit"] * 1e6)
    rate = [speed] if one["kind"] != "loopback" else []
    return f"{one['name']} ({', '.join([one['kind'], *one['addresses'][:1], *rate])})"


def _link(found: Found) -> list[str]:
    if found["world_size"] == 1:
        return ["nothing to measure: one rank"]
    good = [pair for pair in found["pairs"] if not pair["failed"]]
    lines = []
    if len(good) <= MOST_PAIRS:
        lines = [
            f"{ranks_text(p['ranks'])}: {format_seconds(p['latency_s'])},"
            f" {format_rate(p['bits_per_s'])}, both ways at once"
            f" {format_rate(p['both_bits_per_s'])} each"
            for p in good
        ]
    elif good:
        rates, late = [p["bits_per_s"] for p in good], [p["latency_s"] for p in good]
        slowest = min(good, key=lambda p: p["bits_per_s"])
        lines = [
            (
                f"{len(good)} pairs: {format_rate(min(rates))} to {format_rate(max(rates))}, middle"
                f" {format_rate(statistics.median(rates))}"
            ),
            (
                f"latency {format_seconds(min(late))} to {format_seconds(max(late))}, middle"
                f" {format_seconds(statistics.median(late))}"
            ),
            f"the slowest: {ranks_text(slowest['ranks'])}",
        ]
    if found["pairs_not_measured"]:
        lines.append(
            f"{found['pairs_not_measured']} pairs were not measured: the time ran out (--seconds"
            " gives more)"
        )
    return lines


def _clocks(found: Found) -> list[str]:
    if found["world_size"] == 1:
        return ["nothing to compare: one rank"]
    if not found["clocks"]:
        return []
    widest = max(found["clocks"], key=lambda clock: abs(clock["ahead_s"]))
    way = "ahead of" if widest["ahead_s"] > 0 else "behind"
    return [
        (
            f"within {format_seconds(abs(widest['ahead_s']))} of rank 0's (rank {widest['rank']}"
            f" {way} it, to within {format_seconds(widest['within_s'])})"
        )
    ]


def _lost(found: Found) -> list[str]:
    probe = found["lost_peer"]
    if found["world_size"] == 1:
        return ["not tried: one rank has no peers"]
    if probe["skipped"]:
        return [f"not tried: {probe['skipped']}"]
    lines = []
    for how, told in (("silent", "fell silent"), ("killed", "was killed")):
        some = {rank: one[how] for rank, one in probe["seen"].items() if how in one}
        if some:
            slowest = max(some.values(), key=lambda one: one["seconds"])
            who = "a helper beside" if found["over"] == "gloo" else ""
            waited_s = slowest["seconds"]
            when = (
                f"after {waited_s:.1f} s, with a timeout of 1 s"
                if how == "silent"
                else f"within {math.ceil(10 * max(waited_s, 0.01)) / 10:.1f} s"
            )
            lines.append(
                f"{who} rank {probe['lost']} {told}: {slowest['error'] or 'nothing'} on the others"
                f" {when}".strip()
            )
    if lines and found["over"] == "mpi":
        lines.append("a rank that is killed ends the whole job: its launcher does that")
    return lines


def _advice(found: Found) -> list[str]:
    advice = found["recommendation"]
    if advice is None:
        why = (
            "start several ranks" if found["world_size"] == 1 else "what is wrong above comes first"
        )
        return [f"nothing yet, without a measured link: {why}"]
    options = found["ranks"][0]["options"]
    code = in_code(advice, found["over"])
    head = code or "no compression"
    gain = (
        f"{advice['speedup']:.2g} times as fast as fp32"
        if advice["speedup"] > 1.05
        else "nothing gains 5 % over fp32"
    )
    taken = (
        f"for {options['parameters']:.3g} parameters, {format_seconds(options['compute'])} of"
        f" computing a step, {options['optimizer']}"
    )
    free = (
        ""
        if advice["rates_measured"]
        else " The time ran out, so codecs were taken to need no time."
    )
    said = [
        one for one in advice["sentence"].split(". ") if "not recommended" not in one
    ]  # --json has why others are not
    return [
        head,
        f"{gain}; {taken} (--parameters, --compute, --optimizer say otherwise)",
        f"{'. '.join(said)}{free}",
    ]


def _quota(card: Found) -> str:
    return "" if card["quota"] is None else f" (the container grants {card['quota']:g})"
