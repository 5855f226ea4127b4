"""Print the report: sections of lines, with colours on a terminal."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from gradcomp.doctor.advise import in_code
from gradcomp.doctor.judge import PATIENCE_S, by, ranks_text, speed
from gradcomp.plan.links import format_rate, format_seconds

MOST_PAIRS = 28  # with more pairs, only a summary is shown
WIDTH = 14
COPIED_TO = ("to_host", "to_device")  # in keys of `gradcomp.doctor.accelerator`
COLORS = {"ok": "32", "note": "33", "wrong": "1;31"}  # ANSI: green, yellow, bold red
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

Found = Mapping[str, Any]


def show(found: Found, out: TextIO | None = None, *, plain: bool = False) -> None:
    """Print the result of `examine` (default: to standard output); colours are for terminals."""
    stream = sys.stdout if out is None else out
    has_colors = not plain and stream.isatty()

    def colored(level: str, text: str) -> str:
        return f"\x1b[{COLORS[level]}m{text}\x1b[0m" if has_colors else text

    cards = found["ranks"]
    sections = {
        "ranks": _ranks(found),
        "versions": _same(cards, lambda card: ", ".join(map(" ".join, card["versions"].items()))),
        "kernels": _same(cards, lambda card: f"{card['tier']} tier"),
        "accelerator": [*_same(cards, _accelerator), *_copies(cards)],
        "network": _same(cards, _network),
        "link": _link(found),
        "cores": _same(cards, _cores, here=len(cards) > 1),
        "timeouts": [f"{found['timeouts']['order']}, each to be no shorter than the one before"],
        "lost peer": _lost(found),
        "recommended": _advice(found),
    }
    for topic, texts in sections.items():
        findings = [one for one in found["findings"] if one["topic"] == topic]
        levels = {one["level"] for one in findings}
        lines = texts or ["not measured"]
        if topic != "recommended":
            level = "wrong" if "wrong" in levels else "note" if levels else "ok"
            lines = [colored(level, lines[0]), *lines[1:]]
        for one in findings:
            lines.append(colored(one["level"], f"{one['level']}: {one['text']}"))
            lines += [f"  -> {one['do']}"] if one["do"] else []
        for number, line in enumerate(lines):
            print(f"{topic if number == 0 else '':<{WIDTH}}{line}", file=stream)
    last = colored("wrong" if found["status"] else "ok", _verdict(found))
    print(f"\n{last}", file=stream, flush=True)


def _verdict(found: Found) -> str:
    """Return the last line of the report: counts of findings and seconds."""
    wrong = sum(one["level"] == "wrong" for one in found["findings"])
    notes = len(found["findings"]) - wrong
    things = f"{wrong} thing{'s' if wrong != 1 else ''} wrong" if wrong else "Nothing wrong"
    took = f"{found['seconds']:.1f} s"
    if found["seconds"] > found["budget_s"] + 0.5:
        took += f", longer than the {found['budget_s']:g} s of --seconds"
    return f"{things}, {notes} note{'s' if notes != 1 else ''}; {took}."


def _ranks(found: Found) -> list[str]:
    cards = found["ranks"]
    if found["world_size"] == 1:
        text = f"alone on {cards[0]['host']}: its network can be measured from several ranks"
        return [text, *START.splitlines()]
    names = {card["identity"]: card["host"] for card in cards}
    hosts = list(by(cards, lambda card: card["identity"]).items())[:16]
    started = cards[0]["starter"] or "nothing that is known"
    return [
        f"{len(cards)} of {found['world_size']}, started by {started}, bytes over {found['over']}",
        ", ".join(f"{names[host]}: {ranks_text(ranks)}" for host, ranks in hosts),
    ]


def _same(cards: Sequence[Found], text: Callable[[Found], str], *, here: bool = False) -> list[str]:
    """Return one line for each different text, with its ranks unless all ranks have the same."""
    found = by(cards, text)
    if len(found) == 1 and not here:
        return list(found)
    return [f"{ranks_text(ranks)}: {line}" for line, ranks in found.items()]


def _cores(card: Found) -> str:
    quota = "" if card["quota"] is None else f" (the container grants {card['quota']:g})"
    return f"{len(card['cores'])} cores{quota}, {card['threads']} threads of torch"


def _accelerator(card: Found) -> str:
    one = card.get("accelerator")
    if one is None:
        return "none"
    built = f"torch for {one['platform']}" if one["platform"] else ""
    driver = f"driver {one['driver']}" if one["driver"] else ""
    known = ", ".join(filter(None, (f"{one['name']} ({one['device']})", driver, built)))
    if one["failed"]:
        return f"{known}: cannot be used"
    how = "copied to the host and encoded there"
    if one["encodes_on"] == "device":
        how = "encoded by its own kernels, which passed the self-check"
    return f"{known}, {one['triton']}; gradients are {how}"


def _copies(cards: Sequence[Found]) -> list[str]:
    """Return a line with the rates of copies for each rank whose accelerator was measured."""
    lines = []
    for card in cards:
        one = card.get("accelerator")
        if one is not None and not one["failed"]:
            here, back = (f"{one[f'{to}_bytes_per_s'] / 1e9:.3g} GB/s" for to in COPIED_TO)
            rank = f"rank {card['rank']}: " if len(cards) > 1 else ""
            lines.append(f"{rank}copies of 25 MiB: {here} to the host, {back} to the accelerator")
    return lines


def _network(card: Found) -> str:
    used = [i for i in card["interfaces"] if i["name"] in card["gloo"]["names"]]
    up = [i for i in card["interfaces"] if i["kind"] != "loopback" and i["is_up"]]
    more = ", ".join(_interface(i) for i in up if i not in used)
    takes = ", ".join(_interface(i) for i in used) or "nothing"
    return f"gloo takes {takes} ({card['gloo']['why']}){more and f'; also up: {more}'}"


def _interface(one: Found) -> str:
    rate = [speed(one["mbit"])] if one["kind"] != "loopback" else []
    return f"{one['name']} ({', '.join([one['kind'], *one['addresses'][:1], *rate])})"


def _link(found: Found) -> list[str]:
    if found["world_size"] == 1:
        return ["nothing to measure: one rank"]
    good = [pair for pair in found["pairs"] if not pair["failed"]]
    lines = [
        f"{ranks_text(p['ranks'])}: {format_seconds(p['latency_s'])},"
        f" {format_rate(p['bits_per_s'])}, both ways at once {format_rate(p['both_bits_per_s'])}"
        " each"
        for p in good
    ]
    if len(good) > MOST_PAIRS:
        slowest = min(good, key=lambda pair: pair["bits_per_s"])
        lines = [
            f"{len(good)} pairs: {_span([pair['bits_per_s'] for pair in good], format_rate)}",
            f"latency {_span([pair['latency_s'] for pair in good], format_seconds)}",
            f"the slowest: {ranks_text(slowest['ranks'])}",
        ]
    if found["pairs_not_measured"]:
        text = f"{found['pairs_not_measured']} pairs were not measured: the time ran out (--seconds"
        lines.append(f"{text} gives more)")
    return lines


def _span(values: Sequence[float], text: Callable[[float], str]) -> str:
    middle = text(statistics.median(values))
    return f"{text(min(values))} to {text(max(values))}, middle {middle}"


def _lost(found: Found) -> list[str]:
    probe = found["lost_peer"]
    if found["world_size"] == 1:
        return ["not tried: one rank has no peers"]
    if probe["skipped"]:
        return [f"not tried: {probe['skipped']}"]
    seen = [one["silent"] for one in probe["seen"].values() if "silent" in one]
    if not seen:
        return []
    slowest = max(seen, key=lambda one: one["seconds"])
    text = f"rank {probe['lost']} fell silent: {slowest['error'] or 'nothing'} on the others after"
    return [f"{text} {slowest['seconds']:.1f} s, with a timeout of {PATIENCE_S:g} s"]


def _advice(found: Found) -> list[str]:
    advice = found["recommendation"]
    if advice is None:
        alone = found["world_size"] == 1
        why = "start several ranks" if alone else "what is wrong above comes first"
        return [f"nothing yet, without a measured link: {why}"]
    options, gain = found["ranks"][0]["options"], "nothing gains 5 % over fp32"
    if advice["speedup"] > 1.05:
        gain = f"{advice['speedup']:.2g} times as fast as fp32"
    # sentences on codecs that are not recommended are only in --json
    said = [one for one in advice["sentence"].split(". ") if "not recommended" not in one]
    if not advice["rates_measured"]:
        said[-1] += " The time ran out, so codecs were taken to need no time."
    trained = f"{gain}; for {options['parameters']:.3g} parameters,"
    trained += f" {format_seconds(options['compute'])} of computing a step, {options['optimizer']}"
    trained += " (--parameters, --compute, --optimizer change that)"
    return [in_code(advice, found["over"]) or "no compression", trained, ". ".join(said)]
