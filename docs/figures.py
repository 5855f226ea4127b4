"""Keep the measured figures of README and docs equal to docs/results.

`make figures` writes them, `python docs/figures.py --check` compares and changes nothing. Each
function below names a page and yields what it says: a sentence or a row of a table as a template,
and a value for each of its fields. The template must match once; between words any white space
does. A cell or sentence with other words is a change here, too.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "docs/results"
KERNELS = ("native", "gradcomp/kernels", "gradcomp/exchange")  # what speed figures depend on
FIELD = re.compile(r"\{[^}]*\}")
NUMBER = r"[+-]?\d[\d,]*(?:\.\d+)?"
HIDDEN = re.compile(r"^```.*?^```$|`[^`\n]*`|\]\([^)]*\)|https?://\S+", re.MULTILINE | re.DOTALL)
DECIMAL = re.compile(r"(?<![\w.-])[+-]?\d[\d,]*\.\d+(?![\w.])")

Figure = tuple[str, tuple[Any, ...]]  # a template, and values of its fields


# ---- looking up ----------------------------------------------------------------------------------


@functools.lru_cache
def load(name: str) -> Any:
    """Return the content of a result file."""
    text = (ROOT / RESULTS / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def step(name: str, method: str, link: str | None = None, ranks: int | None = None) -> Any:
    """Return the row of a method in a result of bench train."""
    (case,) = (
        case
        for case in load(f"train-{name}.json")["cases"]
        if case["link"] == (link or case["link"]) and case["ranks"] == (ranks or case["ranks"])
    )
    return next(row for row in case["rows"] if row["method"] == method)


def ms(row: Any, what: str = "exposed") -> float:
    """Return the milliseconds of a row; `what` is the name before "_seconds", "" for the step."""
    return 1e3 * float(row[f"{what}_seconds" if what else "seconds"])


def gain(base: Any, row: Any, what: str = "exposed_seconds") -> float:
    """Return how many times less a row has than `base`."""
    return float(base[what] / row[what])


def planner(row: Any) -> float:
    """Return by how many per cent the predicted step is longer than the measured one."""
    return float(100 * (row["predicted_seconds"] / row["seconds"] - 1))


def planners(name: str, link: str) -> tuple[float, float]:
    """Return the least and the most of `planner` over the methods that it knows."""
    (rows,) = (c["rows"] for c in load(f"train-{name}.json")["cases"] if c["link"] == link)
    found = [planner(row) for row in rows if row["predicted_seconds"]]
    return min(found), max(found)


def at(row: Any, number: int) -> float:
    """Return what was measured after so many steps."""
    return float(next(measure for count, _, measure in row["curve"] if count == number))


def demo(name: str, codec: str) -> tuple[float, float]:
    """Return mean and deviation of a codec's accuracy in a result of bench demo."""
    found = load(f"demo-fashion-{name}.json")["codecs"][codec]
    return found["accuracy_mean"], found["accuracy_spread"]


def paper(table: str, method: str, workers: int) -> tuple[float, float]:
    """Return mean and deviation of the accuracy in a table of bench paper."""
    (row,) = (
        row
        for row in load(f"paper-{table}/{table}.json")["rows"]
        if row["method"] == method and row["workers"] == workers
    )
    return row["mean"], row["deviation"]


def losses(method: str, file: str = "residual-decay.jsonl", **settings: Any) -> list[float]:
    """Return the measure of each seed's run in a file, in order of seeds."""
    usual = {"workload": "gpt-1m", "optimizer": "adamw", "workers": 4, "steps": 600, "factor": 1.0}
    wanted = usual | {"changed": None, "batch": 8, "method": method} | settings
    runs = [
        run for run in load(file) if all(run.get(name) == value for name, value in wanted.items())
    ]
    return [run["measure"] for run in sorted(runs, key=lambda run: run["seed"])]


GPT_600 = 1.7746  # fp32, 600 steps at 2e-3
GPT_2000 = 1.3428  # fp32, 2,000 steps: no line (docs/results)


# ---- pages ---------------------------------------------------------------------------------------


def bits_and_loss() -> Iterator[Figure]:
    """The table of all codecs, on the page on accuracy."""
    for row in load("codecs-gpt-1m.json")["rows"]:
        spread = row["deviation"] is not None
        values = [row["bits"], row["mean"], *([row["deviation"]] if spread else []), row["to_fp32"]]
        loss = "{:.4f} ± {:.4f}" if spread else "{:.4f}"
        yield (
            f"| {row['label']} | {{:.1f}} | {loss} | {{:+.3f}} | {{:.0f}} |",
            (*values, row["seeds"]),
        )


def readme() -> Iterator[Figure]:
    for cells, method in (
        ("none (fp32) | 32", "fp32"),
        ('`"ternary"` | 2', "ternary"),
        ('`"onebit"` | 1', "onebit"),
    ):
        yield f"| {cells} | {{:.0f}} |", (ms(step("mlp-1gbit", method)),)
    entropy = step("mlp-entropy", "entropy:bits=1.25", "1gbit")
    yield '| `"auto"`: `EntropyCoded(1.25)` | 1.25 | {:.0f} |', (ms(entropy),)


def benchmarks() -> Iterator[Figure]:
    nine = [demo("9-seeds", codec) for codec in ("fp32", "ternary", "onebit")]
    cells = " | ".join(["{:.2f} ± {:.2f}"] * 3)
    yield f"| Fashion-MNIST | {cells} |", sum(nine, ())
    lost = [nine[0][0] - mean for mean, _ in nine[1:]]
    yield "On Fashion-MNIST ternary lost {:.2f} points and 1 bit {:.2f}", tuple(lost)
    for label, method in (("fp32", "fp32"), ("terngrad", "ternary")):
        found = [paper("terngrad-lenet", method, workers) for workers in (2, 4)]
        yield f"| {label} | {{:.2f}} ± {{:.2f}} | {{:.2f}} ± {{:.2f}} | 99.2", sum(found, ())
    below = [
        paper("terngrad-lenet", "fp32", workers)[0] - paper("terngrad-lenet", "ternary", workers)[0]
        for workers in (2, 4)
    ]
    yield "terngrad is {:.2f} and {:.2f} points below fp32", tuple(below)
    fp32 = paper("ef-sign", "fp32", 2)
    yield "| fp32 | {:.2f} ± {:.2f} | | |", fp32
    for label, method in (
        ("error feedback", "onebit"),
        ("what it leaves out forgotten", "onebit:feedback=off"),
    ):
        found = paper("ef-sign", method, 2)
        yield f"| 1 bit, {label} | {{:.2f}} ± {{:.2f}} | {{:+.1f}} |", (*found, found[0] - fp32[0])
    yield from perceptron()
    yield from other_models()


def perceptron() -> Iterator[Figure]:
    """Tables of bench train's mlp on the page on benchmarks."""
    fp32 = step("mlp-1gbit", "fp32")
    for method in ("none", "noop"):
        yield f"| {method} | {{:.1f}} | | |", (ms(step("mlp-1gbit", method), ""),)
    for label, method in (
        ("fp32", "fp32"),
        ("bf16, buckets cast", "bf16"),
        ("torch's fp16 hook", "fp16"),
        ("ternary", "ternary"),
        ("terngrad", "terngrad"),
        ("terngrad, own scales, requantized", "terngrad-requantize"),
        ("block2", "block2"),
        ("block4", "block4"),
        ("onebit", "onebit"),
        ("onebit, double buffering", "onebit:double"),
    ):
        row = step("mlp-1gbit", method)
        bound = row["exposed_seconds"] / row["bound_seconds"]
        predicted = row["predicted_seconds"]
        expected = () if predicted is None else (ms(row, "predicted"), planner(row))
        predicted_cell = "{:.0f} ({:+.0f} %)" if expected else ""
        text = f"| {label} | {{:.1f}} | {{:.1f}} | {{:.1f}} | {{:.2f}} | {predicted_cell} |"
        sent = row["sent_nbytes"] / 1e6, gain(fp32, row, "sent_nbytes")
        values = ms(row, ""), ms(row), gain(fp32, row), bound, *expected, *sent
        yield f"{text} {{:.2f}} | {{:.1f}} |", values
    noop, none = ms(step("mlp-1gbit", "noop"), ""), ms(step("mlp-1gbit", "none"), "")
    copied = [ms(step("mlp-1gbit", m)) + noop - none for m in ("fp32", "ternary", "onebit")]
    text = "With the copies counted as exchange fp32 exposes {:.1f} times what ternary does"
    yield (
        f"{text} and {{:.1f}} times what 1 bit does",
        (copied[0] / copied[1], copied[0] / copied[2]),
    )
    xeon = [ms(step("mlp-1gbit-xeon", m)) for m in ("fp32", "powersgd1", "powersgd4")]
    yield "fp32 {:.1f} ms) they exposed {:.1f} and {:.1f} ms", tuple(xeon)
    for label, method in (("fp32", "fp32"), ("terngrad", "ternary"), ("onebit", "onebit")):
        values: list[float] = []
        for mpi in ("mpich", "openmpi"):
            row = step(f"mlp-{mpi}", method)
            values += [ms(row, ""), ms(row), gain(step(f"mlp-{mpi}", "fp32"), row), planner(row)]
        gloo = "{} ({}; {}x; {} %)"  # that run has no file
        cell = "{:,.0f} ({:.0f}; {:.1f}x; {:+.0f} %)"
        yield f"| {label} | {gloo} | {cell} | {cell} |", (None,) * 4 + tuple(values)
    links = ("100mbit", "1gbit", "10gbit", "none")
    for method in ("fp32", "bf16", "ternary", "terngrad", "block2", "block4", "onebit"):
        rows = [(step("mlp", method, link), step("mlp", "fp32", link)) for link in links]
        cells = " | ".join(["{:,.0f} ({:.1f}x; {:+.0f} %)"] * len(links))
        shown = [(ms(row), gain(base, row), planner(row)) for row, base in rows]
        yield f"| {method} | {cells} |", sum(shown, ())
    text = (
        "{:+.0f} to {:+.0f} % off for the perceptron at 1 Gbit/s, {:+.0f} to {:+.0f} % for LeNet at"
    )
    names = ("mlp-rounds", "1gbit"), ("lenet-rounds", "100mbit"), ("lenet-rounds", "1gbit")
    apart = [planners(name, link) for name, link in names]
    yield f"{text} 100 Mbit/s, and {{:+.0f}} to {{:+.0f}} % at 1 Gbit/s", sum(apart, ())
    four = {m: step("mlp-4-hosts", m, ranks=4) for m in ("fp32", "onebit", "ternary")}
    two = {m: step("mlp-4-hosts", m, ranks=2) for m in four}
    more = {m: gain(four[m], two[m]) for m in four}
    sent = {m: gain(four[m], two[m], "sent_nbytes") for m in four}
    text = "fp32 exposes {:,.0f} ms ({:.1f} times as much, as it sends)"
    yield text, (ms(four["fp32"]), more["fp32"])
    text = "1 bit {:.0f} ({:.1f} times; {:.1f} times the bytes)"
    yield text, (ms(four["onebit"]), more["onebit"], sent["onebit"])
    text = "terngrad {:,.0f} ({:.1f} times; sums of 4 bits make it {:.1f} times the bytes)"
    yield text, (ms(four["ternary"]), more["ternary"], sent["ternary"])


GPT_1BIT = "onebit:precondition"


def other_models() -> Iterator[Figure]:
    """Tables of bench train's other workloads on the page on benchmarks."""
    cell, usual = "{:,.1f} ({:.1f})", ("fp32", "bf16", "ternary", "block4", "onebit")
    for label, name, link, methods in (
        ("LeNet, 1 Gbit/s", "lenet", "1gbit", usual),
        ("LeNet, not shaped", "lenet", "none", usual),
        ("GPT 25 M, 1 Gbit/s", "gpt-25m", "1gbit", ("fp32", "bf16", "", "block4", GPT_1BIT)),
        ("ResNet 11 M, 1 Gbit/s", "resnet-11m", "1gbit", usual),
    ):
        rows = [step(name, method, link) for method in methods if method]
        cells = " | ".join(cell if method else "-" for method in methods)
        yield f"| {label} | {cells} |", sum(((ms(row, ""), ms(row)) for row in rows), ())
    block2 = step("gpt-25m", "block2:precondition")
    text = "`block2:precondition` takes {:,.1f} ({:.1f}) ms there"
    yield text, (ms(block2, ""), ms(block2))
    order = ("fp32", "bf16", "block4", "onebit", "ternary")
    rows = {m: step("lenet-time", m) for m in order}
    reached = [next(at for _, at, found in rows[m]["curve"] if found >= 82) for m in order]
    text = "fp32 {:.0f} s, bf16 {:.0f}, `block4` {:.0f}, 1 bit {:.0f}, terngrad {:.0f}"
    yield text, tuple(reached)
    ends = [rows[m]["measure"] for m in ("fp32", "ternary", "onebit")]
    yield "at the end fp32 had {:.1f}, terngrad {:.1f} and 1 bit {:.1f}", tuple(ends)


def codecs() -> Iterator[Figure]:
    for label, fashion, loss, method in (
        ("fp32 | 32", demo("9-seeds", "fp32"), True, "fp32"),
        ("bf16, buckets cast | 16", (), True, "bf16"),
        ("`Block(4)` | 4", demo("codecs", "b4"), True, "block4"),
        ('`"ternary"` | 2', demo("9-seeds", "ternary"), True, "ternary"),
        ('`"terngrad"` | 2', (None, None), True, "terngrad"),  # an earlier run has no file
        ("`Block(2), precondition=True` | 2", (), True, "block2"),
        ('`"onebit"` | 1', demo("9-seeds", "onebit"), True, "onebit"),
    ):
        accuracy = "{:.2f} ± {:.2f}" if fashion else ""
        seconds = ms(step("mlp-1gbit", method)), ms(step("mlp", method, "100mbit"))
        yield (
            f"| {label} | {accuracy} | {{}} ± {{}} | {{:.0f}} | {{:,.0f}} |",
            (*fashion, None, None, *seconds),
        )
    entropy = [ms(step("mlp-entropy", "entropy:bits=1.25", link)) for link in ("1gbit", "100mbit")]
    method = "entropy:bits=1.25,exempt=vectors,precondition,decay=0.25"
    found = losses(method, "entropy.jsonl", steps=2000, batch=0)
    text = '| `EntropyCoded(1.25)`, what `"auto"` takes | 1.25 | | {:.3f} ± {:.3f} |'
    spread = statistics.fmean(found), statistics.stdev(found)
    yield text + " {:.0f} | {:.0f} |", (*spread, *entropy)
    here = [ms(step("mlp", method, "none")) for method in ("fp32", "ternary", "onebit", "bf16")]
    yield "fp32 adds {:.0f} ms, ternary {:.0f}, 1 bit {:.0f} and bf16 {:.0f}", tuple(here)
    base = {link: step("mlp-entropy", "fp32", link) for link in ("100mbit", "1gbit")}
    for label, method in (
        ("fp32", "fp32"),
        ("`Block(2)`", "block2"),
        ("`EntropyCoded(2.2)`", "entropy:bits=2.2"),
        ("`EntropyCoded(1.25)`", "entropy:bits=1.25"),
    ):
        cells: list[float] = []
        for link, fp32 in base.items():
            row = step("mlp-entropy", method, link)
            cells += [ms(row), gain(fp32, row)]
        yield f"| {label} | {{:,.0f}} | {{:.1f}} | {{:.0f}} | {{:.1f}} |", tuple(cells)


def which_mode() -> Iterator[Figure]:
    fp32, ternary, onebit = (step("mlp-1gbit", m) for m in ("fp32", "ternary", "onebit"))
    yield (
        "waits {:.0f} ms a step for fp32 at 1 Gbit/s, and {:.1f} for ternary",
        (
            ms(fp32),
            ms(ternary),
        ),
    )
    here = [ms(step("mlp", method, "none")) for method in ("fp32", "ternary", "bf16")]
    yield "it is {:.0f} and {:.0f}, and {:.0f} with buckets cast", tuple(here)
    resnet = step("resnet-11m", "fp32")
    yield (
        "takes {:,.1f} ms a step in fp32, of which the exchange is {:.1f}, and {:,.1f} with",
        (ms(resnet, ""), ms(resnet), ms(step("resnet-11m", "ternary"), "")),
    )
    text = "waits {:.0f} ms a step for fp32, {:.1f} for ternary, {:.1f} for 1 bit"
    yield text, (ms(fp32), ms(ternary), ms(onebit))
    slow = [ms(step("mlp", method, "100mbit")) for method in ("fp32", "ternary", "onebit")]
    yield "for 1 bit; at 100 Mbit/s {:,.0f}, {:.0f} and {:.0f}", tuple(slow)
    mpich = [ms(step("mlp-mpich", method)) for method in ("fp32", "ternary")]
    yield "over MPICH waits {:.0f} ms a step for fp32, {:.0f} for", tuple(mpich)
    fsdp = [step("gpt-25m-fsdp2", m) for m in ("fsdp2", "fsdp2:ternary,weights=block8,keep")]
    text = "sent {:.0f} MB a step, and {:.0f} with `TernGrad()` and weights in 8 bits that"
    yield (
        f"{text} backward keeps: {{:.2f}} s and {{:.2f}}",
        (
            *(row["sent_nbytes"] / 1e6 for row in fsdp),
            *(row["seconds"] for row in fsdp),
        ),
    )
    ddp = [step("gpt-25m-fsdp2", method)["seconds"] for method in ("fp32", "ternary")]
    yield "Where it fits take DDP: {:.2f} in fp32, {:.2f} with", tuple(ddp)
    late = step("gpt-25m-100mbit", LATE), step("gpt-25m-100mbit", "fp32")
    yield (
        "2.6 in {:.0f} s, with fp32 every step in {:,.0f}",
        tuple(row["target_seconds"] for row in late),
    )
    double = step("mlp-1gbit", "onebit:double")
    yield "step took {:.1f} ms with it and {:.1f} without", (ms(double, ""), ms(onebit, ""))


def from_powersgd() -> Iterator[Figure]:
    for label, method in (
        ("fp32", "fp32"),
        ("PowerSGD, rank 1", "powersgd1"),
        ("PowerSGD, rank 4", "powersgd4"),
        ("`Block(4)`", "block4"),
        ("`TernGrad()`", "ternary"),
        ("`OneBit()`", "onebit"),
    ):
        row = step("mlp-1gbit-xeon", method)
        yield f"| {label} | {{:.1f}} | {{:.2f}} |", (ms(row), row["sent_nbytes"] / 1e6)
    cpu = [ms(step("mlp-1gbit-xeon", f"powersgd{rank}"), "exchange_cpu") for rank in (1, 4)]
    yield "CPU time ({:.0f} ms per step at rank 1, {:.0f} at rank 4)", tuple(cpu)
    lost = {row["label"]: row["to_fp32"] for row in load("codecs-gpt-1m.json")["rows"]}
    yield (
        "{:+.3f} nats above fp32 with PowerSGD",
        (lost["PowerSGD, rank 4, 60 steps of fp32 first"],),
    )
    yield (
        "{:+.3f} with `EntropyCoded(1.25)` and {:+.3f} with `Ternary()`",
        (lost['EntropyCoded(1.25), "auto"'], lost["Ternary"]),
    )


def fsdp() -> Iterator[Figure]:
    all_options = '`"onebit"`, `weights="block8"`, `keep_weights=True`'
    for label, method, decimals in (
        ("FSDP2", "fsdp2", True),
        ('`register(model, "terngrad")`', "fsdp2:ternary", False),
        ('and `weights="block8"`', "fsdp2:ternary,weights=block8", False),
        ("and `keep_weights=True`", "fsdp2:ternary,weights=block8,keep", True),
        (all_options, "fsdp2:onebit,weights=block8,keep", True),
        ("DDP in fp32, where the weights fit", "fp32", True),
        ("DDP with `TernGrad()`", "ternary", False),
    ):
        row, bold = step("gpt-25m-fsdp2", method), "**" * (label == "and `keep_weights=True`")
        kept = (step("gpt-25m-fsdp2-malloc", method)["seconds"],) if decimals else ()
        yield (
            f"| {label} | {bold}{{:.2f}} s{bold} | {{:.0f}} | {{}} |"
            + (f" {bold}{{:.2f}} s{bold} |" if kept else " |"),
            (row["seconds"], row["sent_nbytes"] / 1e6, None, *kept),
        )
    alone = [step(f"gpt-25m-fsdp2{kind}", "none")["seconds"] for kind in ("", "-malloc")]
    yield "| computing alone | {:.2f} s | 0 | | {:.2f} s |", tuple(alone)
    faster = [
        step(name, "fsdp2")["seconds"] / step(name, "fsdp2:ternary,weights=block8,keep")["seconds"]
        for name in ("gpt-25m-fsdp2", "gpt-25m-fsdp2-malloc")
    ]
    text = "a step is {:.1f} times as fast as FSDP2's ({:.2f}), with those two variables, too"
    yield f"{text} ({{:.2f}})", (faster[0], *faster)


LATE = "diloco:ternary:30,start_step=20,start_codec=ternary"


def local_steps() -> Iterator[Figure]:
    rows = [step("gpt-25m-100mbit", method) for method in ("fp32", "ternary", LATE)]
    for label, row in zip(("fp32", "ternary"), rows, strict=False):
        reached = row["target_seconds"]
        seconds = reached / 130 if label == "fp32" else row["seconds"]  # later steps were disturbed
        found = seconds, at(row, 130), at(row, 200), reached
        yield f"| {label}, every step | {{:.2f}} s | {{:.3f}} | {{:.3f}} | {{:,.0f}} |", found
    late = rows[2]
    yield (
        "after 20 steps of ternary | {:.2f} s | {:.3f} | {:.3f} | **{:.0f}** |",
        (late["seconds"], at(late, 130), at(late, 200), late["target_seconds"]),
    )
    gains = [row["target_seconds"] / late["target_seconds"] for row in rows[:2]]
    yield "{:.0f} times as soon as fp32", (gains[0],)
    yield "they are {:.3f} nats behind", (at(late, 200) - at(rows[0], 200),)


def internet() -> Iterator[Figure]:
    files = "gpt-1m-20ms", "gpt-1m-20ms-loss", "gpt-1m-20ms-loss-cubic"
    for label, method in (
        ("fp32", "fp32"),
        ('`"ternary"`', "ternary"),
        ("`EntropyCoded(1.25)`", "entropy:bits=1.25"),
    ):
        found = [ms(step(file, method)) for file in (*files, "gpt-1m-200ms-loss")]
        yield f"| {label} | {{:.1f}} | {{:.1f}} | {{:,.1f}} | {{:,.0f}} |", tuple(found)
    yield "| bf16 | {:.1f} | {:.1f} | {:,.1f} |", tuple(ms(step(file, "bf16")) for file in files)
    rows = [step(file, "terngrad:every=30") for file in files[:2]]
    yield "| `TernGrad()` every 30 steps | {:.1f} | {:.1f} |", tuple(map(ms, rows))
    late = ms(step("gpt-1m-200ms-loss", "terngrad:every=10"))
    yield "| `TernGrad()` every 10 steps | | | | {:,.0f} |", (late,)


TERNARY = "ternary:exempt=vectors,precondition,decay=0.25"
BLOCK2 = "block2:exempt=vectors,precondition,decay="
ONEBIT = "onebit:exempt=vectors,precondition,decay="
PLAIN = "ternary:exempt=vectors,decay=0.25"
GROWS = "decay grows from 0.1 to 0.6, geometrically"
IMAGES = {"workload": "lenet", "optimizer": "sgd", "workers": 2, "batch": 0}
SOURCE = {"workload": "gpt-1m, second text"}  # source code


def accuracy() -> Iterator[Figure]:
    yield from bits_and_loss()
    base = losses("fp32")[0]
    yield "**Step and decay**, at 2e-3, fp32 {:.4f}:", (base,)
    ternary = "ternary:exempt=vectors,precondition"
    for label, method, changed in (
        ("d = 0.15", f"{ternary},decay=0.15", None),
        ("d = 0, no residuals (`error_feedback=False`)", f"{ternary},decay=0", None),
        ("step 2.1", f"{ternary},step=2.1,decay=0.25", None),
        ("step 2.4", f"{ternary},step=2.4,decay=0.25", None),
        ("a decay that grows from 0.1 to 0.6", TERNARY, GROWS),
        ("the owners' decay 0.1", TERNARY, "owners: decay 0.1"),
        ("the owners' step 1.5", TERNARY, "owners: step 1.5"),
        ("second moments over 100 steps in place of 20", TERNARY, "Precondition(beta=0.99)"),
    ):
        (loss,) = losses(method, changed=changed)
        yield f"| {label} | {{:.4f}} | {{:+.3f}} |", (loss, loss - base)
    block2 = "ternary:second=block2,exempt=vectors,precondition,decay=0.25"
    n2, n8, short, without = (
        {"workers": 2},
        {"workers": 8},
        {"steps": 400},
        "without `precondition`",
    )
    for label, method, settings in (
        ("4e-3, the best of 2, 4 and 8e-3 for fp32", TERNARY, {"factor": 2.0}),
        ("8e-3", TERNARY, {"factor": 4.0}),
        ("16 sequences, 2e-3", TERNARY, {"batch": 16}),
        ("N = 2, 4e-3", TERNARY, n2 | {"factor": 2.0}),
        ("N = 2, 2e-3", TERNARY, n2),
        ("N = 8, 4e-3", TERNARY, n8 | {"factor": 2.0}),
        ("source code, 2e-3, the best of 2, 3 and 4e-3 for fp32", TERNARY, SOURCE),
        ("source code, 3e-3", TERNARY, SOURCE | {"factor": 1.5}),
        ("source code, 4e-3", TERNARY, SOURCE | {"factor": 2.0}),
        ("source code, N = 2, 2e-3", TERNARY, SOURCE | n2),
        ("the same, source code", block2, SOURCE),
        ("400 steps, 2e-3, `OneBit(), precondition=True`, d = 0.25", f"{ONEBIT}0.25", short),
        ("400 steps, 4e-3, the same", f"{ONEBIT}0.25", short | {"factor": 2.0}),
        ("400 steps, 4e-3, d = 1", f"{ONEBIT}1", short | {"factor": 2.0}),
        (f"Muon, 2e-2, `Ternary(residual_decay=0.25)` {without}", PLAIN, {"optimizer": "muon"}),
    ):
        packed = losses(method, **settings)
        plain = losses("fp32", **settings)[: len(packed)]
        by_seed = [" / ".join(["{:.4f}"] * len(runs)) for runs in (plain, packed)]
        mean = ": {:.4f}" * (len(packed) > 1)
        difference = statistics.fmean(packed) - statistics.fmean(plain)
        values = [(*r, statistics.fmean(r)) if len(r) > 1 else r for r in (plain, packed)]
        yield (
            f"| {label} | {by_seed[0]}{mean} | {by_seed[1]}{mean} | {{:+.3f}} |",
            (*values[0], *values[1], difference),
        )
    yield from codecs_and_images()
    yield from entropy()
    yield from scaled()


def entropy() -> Iterator[Figure]:
    """Entropy-coded codes, on the page on accuracy."""

    def runs(bits: str, decay: str = "0.25", **settings: Any) -> list[float]:
        method = f"entropy:bits={bits},exempt=vectors,precondition,decay={decay}"
        return losses(method, "entropy.jsonl", **settings)

    long = {"steps": 2000, "batch": 0}
    for label, settings, base in (
        ("**2,000 steps**, 4 sequences, 2e-3", long, 1.3428),
        (
            "600 steps, 4e-3, the best of 2, 4 and 8e-3 for fp32",
            {"factor": 2.0},
            statistics.fmean(losses("fp32", factor=2.0)),
        ),
    ):
        values: list[Any] = []
        for bits in ("2.2", "1.25"):
            found = runs(bits, **settings)
            values += [*found, statistics.fmean(found), statistics.fmean(found) - base]
        cells = " | ".join(["{:.4f} / {:.4f} / {:.4f}: {:.4f} | {:+.3f}"] * 2)
        yield f"| {label} | {{:.4f}} | {cells} |", (base, *values)
    first = {"changed": "the first tables"}  # of Huffman codes
    fp32 = losses("fp32", "entropy.jsonl")[0]
    (low,), (middle,), (high,) = (runs(bits, **first) for bits in ("1.25", "2.2", "3.2"))
    yield (
        "| 600 steps, 2e-3, seed 0 | {:.4f} | {:.4f} | {:+.3f} | {:.4f} | {:+.3f} |",
        (fp32, middle, middle - fp32, low, low - fp32),
    )
    (half,) = losses("bf16", "entropy.jsonl")
    yield (
        "3.2 bits lose {:.3f} ({:.4f}), buckets cast to bf16 nothing ({:.4f})",
        (high - fp32, high, half),
    )
    cut = [runs(bits, changed="x cut to 3 root mean squares")[0] for bits in ("2.2", "1.25")]
    yield "a bound such as `Ternary()` has: {:.4f} and {:.4f} (a prototype)", tuple(cut)
    whole = [runs(bits, "1", **first)[0] for bits in ("2.2", "3.2")]
    yield "Residuals that are kept whole lose more: {:.4f} at 2.2 bits, {:.4f} at 3.2", tuple(whole)


def scaled() -> Iterator[Figure]:
    """Steps that keep their length, on the page on accuracy."""
    usual = "entropy:bits={},exempt=vectors,precondition,decay=0.25"
    by_hand: list[float] = []
    for bits, factor in (("2.2", 1.08), ("1.25", 1.376)):
        found = losses(usual.format(bits), "entropy.jsonl", factor=factor)
        by_hand += [factor, *found, statistics.fmean(found), statistics.fmean(found) - GPT_600]
    text = "bits x {{:g}} {{:.4f}} / {{:.4f}} / {{:.4f}}: {{:.4f}} ({{:+.3f}})"
    yield f"2.2 {text}, 1.25 {text}".replace("{{", "{").replace("}}", "}"), tuple(by_hand)
    method = usual.format("1.25") + ",scale_lr"
    best = {"factor": 2.0}
    code = {"workload": "gpt-1m, second text"}
    two, two_code = best | {"workers": 2}, code | {"workers": 2}
    ternary = f"{TERNARY},scale_lr"
    for label, settings, base in (
        ("600 steps, 2e-3", {}, GPT_600),
        (
            "4e-3, the best of 2, 4 and 8e-3 for fp32",
            best,
            statistics.fmean(losses("fp32", factor=2.0)),
        ),
        (
            "source code, 2e-3, the best of 2, 3 and 4e-3 for fp32",
            code,
            statistics.fmean(losses("fp32", workload="gpt-1m, second text")),
        ),
        ("N = 2, 4e-3", two, statistics.fmean(losses("fp32", **two))),
        ("source code, N = 2, 2e-3", two_code, statistics.fmean(losses("fp32", **two_code))),
        ("600 steps, 2e-3, `Ternary()` (13 times fewer bytes)", {"method": ternary}, GPT_600),
        (
            "600 steps, 2e-3, `EntropyCoded(2.2)` (13 times fewer bytes)",
            {"method": usual.format("2.2") + ",scale_lr"},
            GPT_600,
        ),
        (
            "600 steps, 2e-3, `EntropyCoded(3.2)` (9 times fewer bytes)",
            {"method": usual.format("3.2") + ",scale_lr"},
            GPT_600,
        ),
    ):
        found = losses(**{"method": method, "file": "entropy.jsonl"} | settings)
        yield (
            f"| {label} | {{:.4f}} | {{:.4f}} / {{:.4f}} / {{:.4f}}: {{:.4f}} | {{:+.3f}} |",
            (base, *found, statistics.fmean(found), statistics.fmean(found) - base),
        )
    again = "repeated-gpt-1m.jsonl"
    long = {"steps": 2000, "batch": 4}
    short_fp32 = losses("fp32", steps=400)
    onebit = "onebit:exempt=vectors,precondition,decay=0.25"
    for label, method_again, settings in (
        ("`Ternary()`, 600 steps", ternary, {}),
        ("`Ternary()`, N = 2", ternary, {"workers": 2}),
        ("`Ternary()`, N = 8", ternary, {"workers": 8}),
        ("`Ternary()`, 2,000 steps of 4 sequences", ternary, long),
        ('`EntropyCoded(1.25)`, which is `"auto"`, 600 steps', method, {}),
        ("`EntropyCoded(1.25)`, N = 2", method, {"workers": 2}),
        ("`EntropyCoded(1.25)`, source code", method, code),
        ("`EntropyCoded(1.25)`, source code, N = 2", method, two_code),
    ):
        base_of, found = (losses(m, again, **settings) for m in ("fp32", method_again))
        base, mean = statistics.fmean(base_of), statistics.fmean(found)
        three = "{:.4f} / {:.4f} / {:.4f}: {:.4f}"
        values = (*base_of, base, *found, mean, mean - base)
        yield f"| {label} | {three} | {three} | {{:+.3f}} |", values
    found, base = losses(onebit, again, steps=400), statistics.fmean(short_fp32)
    mean = statistics.fmean(found)
    yield (
        f"| `OneBit()`, 400 steps (fp32: above) | {{:.4f}} | {three} | {{:+.3f}} |",
        (base, *found, mean, mean - base),
    )
    once_more = "repeated-gpt-1m-zen4.jsonl"

    def excess(method_again: str, **settings: Any) -> float:
        fp32 = losses("fp32", once_more, **settings)
        return statistics.fmean(losses(method_again, once_more, **settings)) - statistics.fmean(
            fp32
        )

    yield (
        "`Ternary()` {:+.3f}, N = 2 {:+.3f}, N = 8 {:+.3f}, 2,000 steps {:+.3f}",
        tuple(excess(ternary, **s) for s in ({}, {"workers": 2}, {"workers": 8}, long)),
    )
    found = losses(ternary, once_more, **code)
    yield (
        "source code {:.4f} / {:.4f} / {:.4f}: {:.4f}, {:+.3f} to {:.4f}",
        (
            *found,
            statistics.fmean(found),
            excess(ternary, **code),
            statistics.fmean(losses("fp32", once_more, **code)),
        ),
    )
    text = "`EntropyCoded(1.25)` {:+.3f}, N = 2 {:+.3f}, source code {:+.3f}, N = 2 {:+.3f};"
    yield (
        f"{text} `OneBit()` {{:+.3f}}",
        (
            *(excess(method, **s) for s in ({}, {"workers": 2}, code, two_code)),
            excess(onebit, steps=400),
        ),
    )
    muon = {"file": "muon.jsonl", "optimizer": "muon"}
    for label, options in (
        ("`EntropyCoded(4)`, residuals kept whole", "bits=4,exempt=vectors,decay=1"),
        ("`EntropyCoded(3.2)`, residuals kept whole", "bits=3.2,exempt=vectors,decay=1"),
        ("`EntropyCoded(2.2)`, residuals kept whole", "bits=2.2,exempt=vectors,decay=1"),
        ("`EntropyCoded(2.2)`, a decay of 0.25", "bits=2.2,exempt=vectors,decay=0.25"),
    ):
        (found_one,) = losses(f"entropy:{options}", **muon)
        (fp32_muon,) = losses("fp32", optimizer="muon")
        yield f"| {label} | {{:.4f}}, {{:+.3f}} |", (found_one, found_one - fp32_muon)
    of_muon = "entropy:bits=3.2,exempt=vectors,decay=0.25"
    base_of, found = (losses(m, **muon) for m in ("fp32", of_muon))
    base, mean = statistics.fmean(base_of), statistics.fmean(found)
    text = f"| `EntropyCoded(3.2)`, 9 times fewer bytes | {three} | {three} | {{:+.3f}} |"
    yield text, (*base_of, base, *found, mean, mean - base)
    for label, workers, words, plain in (
        ("prose", 4, "prose", GPT_600),
        ("prose, N = 2", 2, "prose", statistics.fmean(losses("fp32", again, workers=2))),
        ("source code", 4, "source code", statistics.fmean(losses("fp32", again, **code))),
        (
            "source code, N = 2",
            2,
            "source code",
            statistics.fmean(losses("fp32", again, **two_code)),
        ),
    ):
        own = {"workers": workers, "text": words}
        runs_of = [r for r in load("auto-gpt-1m.jsonl") if own.items() <= r.items()]
        found = [r["measure"] for r in sorted(runs_of, key=lambda r: r["seed"])]
        mean = statistics.fmean(found)
        fewer = 32 / statistics.fmean(r["bits"] for r in runs_of)
        yield f"| {label} | {three} | {{:+.3f}} | {{:.1f}} |", (*found, mean, mean - plain, fewer)
    for run in load("low-rates.jsonl"):
        yield f"| {run['label']} | {{:.4f}} |", (run["measure"],)
    six = {"workload": "gpt-6m", "batch": 4}
    (base,) = losses("fp32", "gpt-6m.jsonl", **six)
    yield "| fp32 | 32.0 | {:.4f} | |\n| `EntropyCoded(1.25)", (base,)
    for label, bits in (
        ('`EntropyCoded(1.25), precondition=True`, which is `"auto"`', "1.25"),
        ("`EntropyCoded(2.2), precondition=True`", "2.2"),
    ):
        coded = f"{usual.format(bits)},scale_lr"
        run = next(r for r in load("gpt-6m.jsonl") if r["method"] == coded)
        values = (run["bits"], run["measure"], run["measure"] - base)
        yield f"| {label} | {{:.1f}} | {{:.4f}} | {{:+.3f}} |", values
    rare = {"steps": 2000, "batch": 0}
    local = "entropy:bits=1.25,every=30,warmup_steps=200,exempt=vectors"
    for label, one in (
        ("`EntropyCoded(1.25)`, residuals kept whole", local),
        ("the same, no residuals", f"{local},decay=0"),
    ):
        (found_one,) = losses(one, "entropy.jsonl", **rare)
        more = "; fp32 every step 1.3438" if one == local else ""
        yield (
            f"| {label} | 60 | {{:.4f}} (seed 0{more}) | {{:+.3f}} |",
            (found_one, found_one - 1.3438),
        )
    row = "| {} | {{:.4f}} | {{:.4f}} / {{:.4f}} / {{:.4f}}: {{:.4f}} | {{:+.3f}} |"
    for label, one, settings in (
        ("2,000 steps, 4 sequences, 2e-3 (fp32 at its best rate, 4e-3: 1.2942)", method, rare),
        ("the same, `Ternary()`", ternary, rare),
        ("N = 2, 600 steps, 2e-3, `Ternary()`", ternary, {"workers": 2}),
        ("N = 8, 600 steps, 2e-3, `Ternary()`", ternary, {"workers": 8}),
    ):
        found = losses(one, "entropy.jsonl", **settings)
        plain = losses("fp32", "entropy.jsonl", **settings)
        base = GPT_2000 if settings == rare else statistics.fmean(plain)
        mean = statistics.fmean(found)
        yield row.format(label), (base, *found, mean, mean - base)
    now, seeds = rare | {"batch": 4}, "{:.4f} / {:.4f} / {:.4f}: {:.4f} | {:+.3f} |"
    plain = [1.2942, *losses("fp32", "entropy.jsonl", **now | {"factor": 2.0})]  # seed 0: no line
    base = statistics.fmean(plain)
    yield "fp32 at 4e-3 | {:.4f} / {:.4f} / {:.4f}: {:.4f} | |", (*plain, base)
    for bits in ("1.25", "2.2", "3.2"):
        method_of = f"{usual.format(bits)},scale_lr"
        found = losses(method_of, "entropy.jsonl", **now | {"factor": 2.0})
        mean = statistics.fmean(found)
        yield f"`EntropyCoded({bits})` at 4e-3 | {seeds}", (*found, mean, mean - base)
    for bits in ("2.2", "3.2"):
        found = losses(f"{usual.format(bits)},scale_lr", "entropy.jsonl", **now)
        mean = statistics.fmean(found)
        text = f"`EntropyCoded({bits})` at 2e-3 (fp32 {GPT_2000:.4f}) | {seeds}"
        yield text, (*found, mean, mean - GPT_2000)
    found = losses(f"{ONEBIT}0.25,scale_lr", "entropy.jsonl", steps=400)
    yield (
        "{:.4f} / {:.4f} / {:.4f}: {:.4f}, {:+.3f} to fp32",
        (*found, statistics.fmean(found), statistics.fmean(found) - statistics.fmean(short_fp32)),
    )
    yield (
        "with 1.39 times the rate it ends at {:.4f}, seed 0",
        tuple(losses("fp32", "entropy.jsonl", factor=1.3934)),
    )
    (longer,) = losses("fp32", "entropy.jsonl", factor=2.787)
    best = losses("fp32", factor=2.0)[0]
    yield (
        "fp32 ends at {:.4f}, {:.3f} below {:.4f} (seed 0), and 1.25 bits at {:.4f}",
        (longer, best - longer, best, losses(method, "entropy.jsonl", factor=2.0)[0]),
    )
    usual_sgd = {"optimizer": "sgd", "workers": 2}
    now, demo = {"batch": 0}, {"workload": "lenet-demo", "batch": 32}
    lenet, resnet = {"workload": "lenet"}, {"workload": "resnet", "steps": 300}
    for label, what, base, more in (
        ("LeNet on Fashion-MNIST, the demo", demo, "entropy.jsonl", ",min_numel=1024"),
        ("LeNet on Fashion-MNIST, a falling rate", lenet | now, "residual-decay.jsonl", ""),
        ("a small ResNet on CIFAR-10, 300 steps", resnet | now, "entropy.jsonl", ""),
    ):
        images: list[float] = []
        for images_of in ("fp32", "2.2", "1.25"):
            bits = f"entropy:bits={images_of}{more},exempt=vectors"
            one_of = ("fp32", base) if images_of == "fp32" else (bits, "entropy.jsonl")
            found = losses(*one_of, **usual_sgd | what)
            images += [*found, statistics.fmean(found)]
        cells = " | ".join(["{:.2f} / {:.2f} / {:.2f}: {:.2f}"] * 3)
        yield f"| {label} | {cells} |", tuple(images)
    twice = usual_sgd | now | {"factor": 2.0}
    packed = "entropy:bits=1.25,exempt=vectors"
    two_rates: list[float] = []
    for images_of in ("fp32", packed):
        found = losses(images_of, "entropy.jsonl", **twice | resnet)
        two_rates += [*found, statistics.fmean(found)]
    text = "{:.2f} / {:.2f} / {:.2f}: {:.2f}"
    yield f"which is above fp32's best | {text} | | {text} |", tuple(two_rates)
    both = [losses(one, "entropy.jsonl", **twice | lenet) for one in ("fp32", packed)]
    yield (
        "reaches {:.2f} and {:.2f} in fp32 and {:.2f} and\n{:.2f} with 1.25 bits there",
        (*both[0][:2], *both[1][:2]),
    )
    (one,) = losses(usual.format("1") + ",scale_lr", "entropy.jsonl")
    yield "`EntropyCoded(1)` (25 times fewer bytes) ends at {:.4f}", (one,)


def codecs_and_images() -> Iterator[Figure]:
    """Other codecs and images, on the page on accuracy."""
    base = losses("fp32", factor=2.0)[0]
    yield "**Other codecs** at 4e-3, seed 0, fp32 {:.4f}:", (base,)
    for label, method in (
        ("`Ternary(), precondition=True`, d = 0.25 | 2.4", TERNARY),
        ("`Ternary()` without `precondition`, d = 0.25 | 2.4", PLAIN),
        ("`Block(2), precondition=True`, d = 0.25 | 2.4", f"{BLOCK2}0.25"),
        ("`Block(2), precondition=True`, d = 1 | 2.4", f"{BLOCK2}1"),
        ("`Block(4)`, d = 0.25 | 4.4", "block4:exempt=vectors,decay=0.25"),
    ):
        loss = losses(method, factor=2.0)[0]
        yield f"| {label} | {{:.4f}} | {{:+.3f}} |", (loss, loss - base)
    block4 = losses("block4:exempt=vectors,decay=0.25", **SOURCE)
    mean = statistics.fmean(block4)
    yield (
        "`Block(4)` comes to {:.4f} / {:.4f} / {:.4f}: {:.4f}, {:+.3f}",
        (*block4, mean, mean - statistics.fmean(losses("fp32", **SOURCE))),
    )
    block4 = losses("block4:exempt=vectors,decay=0.25")
    mean = statistics.fmean(block4)
    yield "on prose to {:.4f} / {:.4f} / {:.4f}: {:.4f}, {:+.3f}", (*block4, mean, mean - GPT_600)
    plain, packed = [losses(m, **IMAGES) for m in ("fp32", "ternary")]
    mean = statistics.fmean(packed) - statistics.fmean(plain)
    cells = " | ".join(["{:.2f} / {:.2f} / {:.2f}: {:.2f} %"] * 2)
    label = "LeNet on Fashion-MNIST, SGD, N = 2, 600 steps, `Ternary()`"
    values = *plain, statistics.fmean(plain), *packed, statistics.fmean(packed), mean
    yield f"| {label} | {cells} | {{:+.2f}} points |", values
    yield table_of_images()
    lost = [demo("9-seeds", "fp32")[0] - demo("9-seeds", c)[0] for c in ("ternary", "onebit")]
    yield "({:+.2f} points of test error; `OneBit()` {:+.2f})", tuple(lost)


def table_of_images() -> Figure:
    """The table of accuracies on Fashion-MNIST, whole: other tables have rows of these names."""
    lines, values = ["| | 9 seeds | 5 seeds |", "|---|---|---|"], []
    spread = "{:.2f} ± {:.2f}"
    for label, nine, five in (
        ("fp32", ["fp32"], ["fp32"]),
        ("`Block(4)`", [], ["b4"]),
        ("`Block(2)`", [], ["b2"]),
        ("`Ternary()`", ["ternary"], ["ternary"]),
        ("`Ternary(residual_decay=0.75)`, 0.5, 0.25", [], ["d75", "d50", "d25"]),
        ("`Ternary(error_feedback=False)`", [], ["d0"]),
        ("`Ternary(step=1.2)`, 1.5, 2.4", [], ["s12", "s15", "s24"]),
        ("`TernGrad()`", [], ["terngrad"]),
        ("`OneBit()`", ["onebit"], []),
    ):
        cells = []
        for run, names in (("9-seeds", nine), ("codecs", five)):
            found = [demo(run, name) for name in names]
            several = len(found) > 1  # means alone
            cells.append(", ".join("{:.2f}" if several else spread for _ in found))
            values += [number for pair in found for number in pair[: 1 if several else 2]]
        lines.append(f"| {label} | {cells[0]} | {cells[1]} |".replace("|  |", "| |"))
    return "\n".join(lines), tuple(values)


def lora() -> Iterator[Figure]:
    runs = [run for run in load("lora.jsonl") if run["lr"] == 3e-3]
    for method, cells in {
        "fp32": "none (fp32) |",
        "bfloat16": '`"bfloat16"` |',
        "auto": "`Block(4, group=128)` |",
        "block4": "`Block(4)`, a scale a row |",
        "ternary 128 precondition": "`Ternary(group=128)`, `precondition=True` |",
        "ternary precondition": "`Ternary()`, a scale a row, `precondition=True` |",
        "ternary": "`Ternary()`, a scale a row |",
        "onebit 128 precondition": "`OneBit(group=128)`, `precondition=True` |",
        "terngrad": "`TernGrad()` |",
    }.items():
        found = [run["loss"] for run in runs if run["method"] == method]
        loss = statistics.mean(found), statistics.stdev(found)
        if method == "fp32":
            base = loss[0]
            yield f"| {cells} 1 | {{:.3f}} ± {{:.3f}} |", loss
            continue
        ratio = next(run["ratio"] for run in runs if run["method"] == method)
        yield (
            f"| {cells} {{:.1f}} | {{:.3f}} ± {{:.3f}} | {{:+.3f}} |",
            (ratio, *loss, loss[0] - base),
        )

    found = [[r["loss"] for r in runs if r["method"].startswith(way)] for way in ("auto:", "fp32,")]
    auto, base = ((statistics.mean(losses), statistics.stdev(losses)) for losses in found)
    yield (
        "{:.3f} ± {:.3f}, where fp32 ended at {:.3f} ± {:.3f} ({:+.3f}, 25.1 times fewer bytes)",
        (*auto, *base, auto[0] - base[0]),
    )


# ---- what comes of faults ------------------------------------------------------------------------

FAULTS = {  # as tests/comm/faults/test_matrix.py calls them
    "killed": "is killed (SIGKILL, the kernel's out-of-memory killer)",
    "frozen": "is stopped (SIGSTOP, a debugger)",
    "raises": "raises an exception",
    "exits": "calls `sys.exit`",
    "interrupted": "is interrupted (Ctrl-C)",
    "out of memory": "is out of memory in Python",
    "cut off": "is cut off: the link of its host goes down",
    "slow link": "has a link that becomes 100 times slower",
}
TRANSPORTS = {"gloo": "gloo", "mpich": "MPICH", "openmpi": "Open MPI"}
FAULTS_FILE, FAULTS_PAGE, CELLS = "faults.jsonl", "docs/explanation/reliability.md", 170
TABLE = re.compile(r"(?<=<!-- faults -->\n).*?(?=<!-- /faults -->)", re.DOTALL)


def table_of_faults(rows: list[Any]) -> str:
    """Return the table of what survivors saw, from the rows of a record. The last row of a cell
    counts; a record of some cells says of how many.
    """
    cells = {(row["fault"], row["transport"], row["phase"]): row["said"] for row in rows}
    lines = [f"| the last rank | {' | '.join(TRANSPORTS.values())} |", "|---|---|---|---|"]
    for fault, label in FAULTS.items():
        columns = [label]
        for transport in TRANSPORTS:
            found = [said for cell, said in cells.items() if cell[:2] == (fault, transport)]
            times = collections.Counter(words.rstrip(": ") for said in found for words in said)
            shown = [f"{words} ({n} of {len(found)} phases)" for words, n in times.most_common()]
            columns.append("; ".join(shown) or "no record")
        lines.append(f"| {' | '.join(columns)} |")
    return "\n".join([*lines, "", f"Record of {len(cells)} of {CELLS} cells.", ""])


def with_faults(name: str, text: str) -> str:
    """Return a page with the table of what was recorded, if it is of that page."""
    if name != FAULTS_PAGE or not (ROOT / RESULTS / FAULTS_FILE).exists():
        return text
    table = table_of_faults(load(FAULTS_FILE))
    return TABLE.sub(lambda _: table, text)


PAGES: dict[str, Callable[[], Iterator[Figure]]] = {
    "README.md": readme,
    "docs/howto/benchmarks.md": benchmarks,
    "docs/howto/from-powersgd.md": from_powersgd,
    "docs/howto/fsdp.md": fsdp,
    "docs/howto/internet.md": internet,
    "docs/howto/lora.md": lora,
    "docs/howto/which-mode.md": which_mode,
    "docs/explanation/accuracy.md": accuracy,
    "docs/explanation/codecs.md": codecs,
    "docs/explanation/local-steps.md": local_steps,
}


# ---- comparing -----------------------------------------------------------------------------------


def pattern(template: str) -> re.Pattern[str]:
    """Return what finds a template in a page; each field is a group."""
    words = [r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in FIELD.split(template)]
    return re.compile(f"({NUMBER})".join(words))


def compare(text: str, figures: Iterator[Figure]) -> list[tuple[int, int, str, str]]:
    """Return (start, end, what the results say, template) of every figure of a page.

    Raises:
        LookupError: the page has a sentence never or more than once.
    """
    out = []
    for template, values in figures:
        found = list(pattern(template).finditer(text))
        if len(found) != 1:
            raise LookupError(f"found {len(found)} times instead of once: {template!r}")
        forms = FIELD.findall(template)
        for number, (form, value) in enumerate(zip(forms, values, strict=True), 1):
            if value is not None:  # which has no result file
                out.append((*found[0].span(number), form.format(value), template))
    return sorted(out)


def check(root: Path = ROOT, *, write: bool = False) -> tuple[list[str], dict[str, list[int]]]:
    """Compare the pages in `root` with the results, and with `write` make them equal.

    Returns:
        What differs, and for each page how many figures come from results and how many decimal
        numbers are typed by hand. Of these some are settings and not measurements; code, links
        and the reference are left out.
    """
    differences: list[str] = []
    counts = {}
    for page in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        name, text = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        if name.startswith(("docs/reference/", "docs/results/")):
            continue
        try:
            found = compare(text, PAGES[name]()) if name in PAGES else []
        except LookupError as error:
            differences.append(f"{name}: {error}")
            continue
        faults, after, rest, end = with_faults(name, text), "", "", 0
        if faults != text:
            differences.append(f"{name}: another table of faults than {FAULTS_FILE}")
            if write:
                page.write_text(faults, encoding="utf-8")
        for start, stop, new, template in found:
            if text[start:stop] != new:
                differences.append(f"{name}: {text[start:stop]} instead of {new} in {template!r}")
            after, rest = after + text[end:start] + new, rest + text[end:start]
            end = stop
        if write and after + text[end:] != text:
            page.write_text(after + text[end:], encoding="utf-8")
        by_hand = DECIMAL.findall(HIDDEN.sub("", rest + text[end:]))
        counts[name] = [len(found), len(by_hand)]
    return differences, counts


# ---- age -----------------------------------------------------------------------------------------


def runs() -> dict[str, str]:
    """Return {file or folder of docs/results: date of its run}, as the table of README.md there
    says.
    """
    text = (ROOT / RESULTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w./-]+)` \| (\d{4}-\d\d-\d\d)", text, re.MULTILINE)
    return dict(rows)


def older_than_kernels() -> list[str]:
    """Return the results of speed that are older than the last change of what they measured, from
    the history of git; none where there is no history.
    """
    command = ["git", "log", "-1", "--format=%cs", "--", *KERNELS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    changed = done.stdout.strip() if done.returncode == 0 else ""
    return [name for name, date in runs().items() if name.startswith("train-") and date < changed]


def main(argv: list[str] | None = None) -> int:
    """Write or compare; return the exit status: 1 where --check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    text = "change nothing; exit with status 1 if a page differs from the results"
    parser.add_argument("--check", action="store_true", help=text)
    args = parser.parse_args(argv)
    differences, counts = check(write=not args.check)
    print(*differences, sep="\n", end="\n" * bool(differences))
    sourced, by_hand = map(sum, zip(*counts.values(), strict=True))
    print(f"{sourced} figures from docs/results, {by_hand} decimal numbers typed by hand:")
    for name, (figures, numbers) in counts.items():
        if figures or numbers:
            print(f"  {name}: {figures} and {numbers}")
    for name in older_than_kernels():
        print(f"older than the kernels that it measured: {name}")
    return int(any(args.check or "instead of once" in found for found in differences))


if __name__ == "__main__":
    sys.exit(main())
