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
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
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


def exposed(name: str, *methods: str, link: str | None = None) -> tuple[float, ...]:
    """Return the exposed milliseconds of methods in a result of bench train."""
    return tuple(ms(step(name, method, link)) for method in methods)


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
    found = load(f"demo-{name}.json")["codecs"][codec]
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


def mean_loss(method: str, file: str = "residual-decay.jsonl", **settings: Any) -> float:
    """Return the mean of `losses`."""
    return fmean(losses(method, file, **settings))


def with_mean(runs: Sequence[float]) -> tuple[float, ...]:
    """Return the measures of runs and their mean, as `SEEDS` shows them."""
    return (*runs, fmean(runs))


def against(runs: Sequence[float], base: float) -> tuple[float, ...]:
    """Return the measures of runs, their mean, and what the mean has above `base`."""
    return (*with_mean(runs), fmean(runs) - base)


def row_of(*cells: str) -> str:
    """Return the template of a table's row."""
    return f"| {' | '.join(cells)} |"


SEEDS = "{:.4f} / {:.4f} / {:.4f}: {:.4f}"  # three runs and their mean
SPREAD = "{:.2f} ± {:.2f}"  # mean and deviation
GPT_600 = 1.7746  # fp32, 600 steps at 2e-3
GPT_2000 = 1.3428  # fp32, 2,000 steps: no line (docs/results)


# ---- pages ---------------------------------------------------------------------------------------


def readme() -> Iterator[Figure]:
    for cells, method in (
        ("none (fp32) | 32", "fp32"),
        ('`"auto"`: `EntropyCoded(1.25)` | 1.25', "entropy:bits=1.25"),
        ('`"ternary"` | 2', "ternary"),
        ('`"onebit"` | 1', "onebit"),
    ):
        seconds, accuracy = exposed("mlp-rounds", method), demo("digits", method)
        yield f"| {cells} | {{:.0f}} | {SPREAD} |", (*seconds, *accuracy)


def benchmarks() -> Iterator[Figure]:
    nine = [demo("fashion-9-seeds", codec) for codec in ("fp32", "ternary", "onebit")]
    yield row_of("Fashion-MNIST", *[SPREAD] * 3), sum(nine, ())
    lost = [nine[0][0] - mean for mean, _ in nine[1:]]
    yield "On Fashion-MNIST ternary lost {:.2f} points and 1 bit {:.2f}", tuple(lost)
    lenet = {
        method: [paper("terngrad-lenet", method, workers) for workers in (2, 4)]
        for method in ("fp32", "ternary")
    }
    for label, method in (("fp32", "fp32"), ("terngrad", "ternary")):
        yield f"| {label} | {SPREAD} | {SPREAD} | 99.2", sum(lenet[method], ())
    below = [plain[0] - packed[0] for plain, packed in zip(*lenet.values(), strict=True)]
    yield "terngrad is {:.2f} and {:.2f} points below fp32", tuple(below)
    fp32 = paper("ef-sign", "fp32", 2)
    yield f"| fp32 | {SPREAD} | | |", fp32
    for label, method in (
        ("error feedback", "onebit"),
        ("what it leaves out forgotten", "onebit:feedback=off"),
    ):
        found = paper("ef-sign", method, 2)
        yield row_of(f"1 bit, {label}", SPREAD, "{:+.1f}"), (*found, found[0] - fp32[0])
    yield from mlp()
    yield from other_models()


def mlp() -> Iterator[Figure]:
    """Tables of bench train's mlp on the page on benchmarks."""
    fp32 = step("mlp-rounds", "fp32")
    none, noop = (ms(step("mlp-rounds", method), "") for method in ("none", "noop"))
    yield "| none | {:.1f} | | |", (none,)
    yield "| noop | {:.1f} | | |", (noop,)
    for label, method in (
        ("fp32", "fp32"),
        ("bf16, buckets cast", "bf16"),
        ("torch's fp16 hook", "fp16"),
        ("ternary", "ternary"),
        ("terngrad", "terngrad"),
        ("terngrad, own scales, requantized", "terngrad-requantize"),
        ("block2", "block2"),
        ("block4", "block4"),
        ("entropy:bits=2.2", "entropy:bits=2.2"),
        ("entropy:bits=1.25", "entropy:bits=1.25"),
        ("PowerSGD, rank 1", "powersgd1"),
        ("PowerSGD, rank 4", "powersgd4"),
        ("onebit", "onebit"),
        ("onebit, double buffering", "onebit:double"),
    ):
        row = step("mlp-rounds", method)
        bound = row["exposed_seconds"] / row["bound_seconds"]
        expected = ()
        if row["predicted_seconds"] is not None:
            expected = ms(row, "predicted"), planner(row)
        sent = row["sent_nbytes"] / 1e6, gain(fp32, row, "sent_nbytes")
        cells = ["{:.1f}", "{:.1f}", "{:.1f}", "{:.2f}", "{:.0f} ({:+.0f} %)" if expected else ""]
        values = ms(row, ""), ms(row), gain(fp32, row), bound, *expected, *sent
        yield row_of(label, *cells, "{:.2f}", "{:.1f}"), values
    copied = [more + noop - none for more in exposed("mlp-rounds", "fp32", "ternary", "onebit")]
    text = "With the copies counted as exchange fp32 exposes {:.1f} times what ternary does"
    times = copied[0] / copied[1], copied[0] / copied[2]
    yield f"{text} and {{:.1f}} times what 1 bit does", times
    for label, method in (("fp32", "fp32"), ("terngrad", "ternary"), ("onebit", "onebit")):
        values = (None,) * 4  # of gloo: that run has no file
        for name in ("mlp-mpich", "mlp-openmpi"):
            row = step(name, method)
            values += ms(row, ""), ms(row), gain(step(name, "fp32"), row), planner(row)
        cell = "{:,.0f} ({:.0f}; {:.1f}x; {:+.0f} %)"
        yield row_of(label, "{} ({}; {}x; {} %)", cell, cell), values
    links = ("100mbit", "1gbit", "10gbit", "none")
    for method in ("fp32", "bf16", "ternary", "terngrad", "block2", "block4", "onebit"):
        rows = [(step("mlp", method, link), step("mlp", "fp32", link)) for link in links]
        shown = [(ms(row), gain(base, row), planner(row)) for row, base in rows]
        yield row_of(method, *["{:,.0f} ({:.1f}x; {:+.0f} %)"] * len(links)), sum(shown, ())
    text = "{:+.0f} to {:+.0f} % off for the MLP at 1 Gbit/s, {:+.0f} to {:+.0f} % for LeNet at"
    names = ("mlp-rounds", "1gbit"), ("lenet-rounds", "100mbit"), ("lenet-rounds", "1gbit")
    apart = [planners(name, link) for name, link in names]
    yield f"{text} 100 Mbit/s, and {{:+.0f}} to {{:+.0f}} % at 1 Gbit/s", sum(apart, ())
    for method, text in (
        ("fp32", "fp32 exposes {:,.0f} ms ({:.1f} times as much, as it sends)"),
        ("onebit", "1 bit {:.0f} ({:.1f} times; {:.1f} times the bytes)"),
        (
            "ternary",
            "terngrad {:,.0f} ({:.1f} times; sums of 4 bits make it {:.1f} times the bytes)",
        ),
    ):
        two, four = (step("mlp-4-hosts", method, ranks=ranks) for ranks in (2, 4))
        values = ms(four), gain(four, two), gain(four, two, "sent_nbytes")
        yield text, values[: len(FIELD.findall(text))]


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
        cells = [cell if method else "-" for method in methods]
        yield row_of(label, *cells), sum(((ms(row, ""), ms(row)) for row in rows), ())
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
    for label, fashion, method in (
        ("fp32 | 32", demo("fashion-9-seeds", "fp32"), "fp32"),
        ("bf16, buckets cast | 16", (), "bf16"),
        ("`Block(4)` | 4", demo("fashion-codecs", "b4"), "block4"),
        ('`"ternary"` | 2', demo("fashion-9-seeds", "ternary"), "ternary"),
        ('`"terngrad"` | 2', (None, None), "terngrad"),  # an earlier run has no file
        ("`Block(2), precondition=True` | 2", demo("fashion-codecs", "b2"), "block2"),
        ('`"onebit"` | 1', demo("fashion-9-seeds", "onebit"), "onebit"),
    ):
        seconds = ms(step("mlp-rounds", method)), ms(step("mlp", method, "100mbit"))
        cells = [SPREAD if fashion else "", "{} ± {}", "{:.0f}", "{:,.0f}"]
        yield row_of(label, *cells), (*fashion, None, None, *seconds)
    method = "entropy:bits=1.25,exempt=vectors,precondition,decay=0.25"
    found = losses(method, "entropy.jsonl", steps=2000, batch=0)
    low = "entropy:bits=1.25"
    entropy = ms(step("mlp-rounds", low)), ms(step("mlp-entropy", low, "100mbit"))
    fp32, images = (losses(m, "entropy.jsonl", **IN_DEMO) for m in ("fp32", LOW_IN_DEMO))
    text = f'| `EntropyCoded(1.25)`, what `"auto"` takes | 1.25 | {SPREAD} | {{:.3f}} ± {{:.3f}} |'
    values = fmean(images), stdev(images), fmean(found), stdev(found), *entropy
    yield text + " {:.0f} | {:.0f} |", values
    yield f"without `precondition` there (fp32 {SPREAD})", demo("fashion-codecs", "fp32")
    yield f"and for 1.25 bits (fp32 {SPREAD})", (fmean(fp32), stdev(fp32))
    digits = load("demo-digits.json")["codecs"]
    means = {codec: demo("digits", codec) for codec in digits}
    (ternary, onebit) = (digits[codec]["compression_ratio"] for codec in ("ternary", "onebit"))
    text = f"3 seeds): {SPREAD} % in fp32, {SPREAD} with ternary and {{:.1f}} times fewer bytes,"
    values = (*means["fp32"], *means["ternary"], ternary, *means["onebit"], onebit)
    yield f"{text} {SPREAD} with 1 bit and {{:.1f}} times fewer", values
    here = exposed("mlp", "fp32", "ternary", "onebit", "bf16", link="none")
    yield "fp32 adds {:.0f} ms, ternary {:.0f}, 1 bit {:.0f} and bf16 {:.0f}", here
    yield from entropy_over_links()


def entropy_over_links() -> Iterator[Figure]:
    """Entropy-coded codes of bench train's mlp, in rounds."""
    gains: dict[str, float] = {}
    for label, method in (
        ("fp32", "fp32"),
        ("`Block(2)`", "block2"),
        ("`Ternary()`", "ternary"),
        ("`EntropyCoded(2.2)`", "entropy:bits=2.2"),
        ("`EntropyCoded(1.25)`", "entropy:bits=1.25"),
    ):
        values: list[float] = []
        for name, link in (("mlp-entropy", "100mbit"), ("mlp-rounds", "1gbit")):
            row = step(name, method, link)
            least, *_, most = sorted(1e3 * seconds for seconds in row["exposed_rounds"])
            values += [ms(row), least, most, gain(step(name, "fp32", link), row)]
        gains[method] = values[3]
        yield row_of(label, *["{:,.0f} ({:,.0f} to {:,.0f})", "{:.1f}"] * 2), tuple(values)
    text = "with 2.2 bits, which is missed ({:.1f}), and 25 with 1.25 bits, which is met ({:.1f})"
    yield text, (gains["entropy:bits=2.2"], gains["entropy:bits=1.25"])
    phases = [step("mlp-rounds", m)["phases"] for m in ("entropy:bits=2.2", "block2")]
    taken = [1e3 * phase[what] for what in ("encode", "decode") for phase in phases]
    text = "encode takes {:.0f} ms of a step with 2.2 bits and {:.0f} with `Block(2)`, decode"
    yield f"{text} {{:.0f}} and {{:.0f}}.", tuple(taken)


def which_mode() -> Iterator[Figure]:
    fp32, ternary, onebit = exposed("mlp-rounds", "fp32", "ternary", "onebit")
    yield (
        "adds {:.1f} ms to a step of a 25 M-parameter MLP at 1 Gbit/s, ternary {:.1f}",
        (fp32, ternary),
    )
    here = exposed("mlp", "fp32", "ternary", "bf16", link="none")
    yield "it is {:.0f} and {:.0f}, and {:.0f} with buckets cast", here
    resnet, packed = (step("resnet-11m", method) for method in ("fp32", "ternary"))
    text = "takes {:,.1f} ms a step in fp32, of which the exchange is {:.1f}, and {:,.1f} with"
    yield text, (ms(resnet, ""), ms(resnet), ms(packed, ""))
    text = "fp32 adds {:.1f} ms to a step of the MLP at 1 Gbit/s, ternary {:.1f}, 1 bit {:.1f};"
    yield text, (fp32, ternary, onebit)
    slow = exposed("mlp", "fp32", "ternary", "onebit", link="100mbit")
    yield "at 100 Mbit/s {:,.0f}, {:.0f} and {:.0f} ([over", slow
    mpich = exposed("mlp-mpich", "fp32", "ternary")
    yield (
        "over MPICH fp32 adds {:.0f} ms to a step of the MLP at 1 Gbit/s, `TernGrad()` {:.0f}",
        mpich,
    )
    fsdp = [step("gpt-25m-fsdp2", m) for m in ("fsdp2", "fsdp2:ternary,weights=block8,keep")]
    sent, seconds = ([row[name] for row in fsdp] for name in ("sent_nbytes", "seconds"))
    text = "sent {:.0f} MB a step, and {:.0f} with `TernGrad()` and weights in 8 bits that"
    text += " backward keeps: {:.2f} s and {:.2f}"
    yield text, (sent[0] / 1e6, sent[1] / 1e6, *seconds)
    ddp = [step("gpt-25m-fsdp2", method)["seconds"] for method in ("fp32", "ternary")]
    yield "Where it fits take DDP: {:.2f} in fp32, {:.2f} with", tuple(ddp)
    reached = [step("gpt-25m-100mbit", method)["target_seconds"] for method in (LATE, "fp32")]
    yield "2.6 in {:.0f} s, with fp32 every step in {:,.0f}", tuple(reached)
    steps = [ms(step("mlp-rounds", method), "") for method in ("onebit:double", "onebit")]
    yield "step took {:.1f} ms with it and {:.1f} without", tuple(steps)


def from_powersgd() -> Iterator[Figure]:
    for label, method in (
        ("fp32", "fp32"),
        ("PowerSGD, rank 1", "powersgd1"),
        ("PowerSGD, rank 4", "powersgd4"),
        ("`Block(4)`", "block4"),
        ("`TernGrad()`", "terngrad"),
        ("`EntropyCoded(1.25)`", "entropy:bits=1.25"),
        ("`OneBit()`", "onebit"),
    ):
        row = step("mlp-rounds", method)
        yield row_of(label, "{:.1f}", "{:.2f}"), (ms(row), row["sent_nbytes"] / 1e6)
    cpu = [ms(step("mlp-rounds", f"powersgd{rank}"), "exchange_cpu") for rank in (1, 4)]
    yield "CPU time ({:.0f} ms per step at rank 1, {:.0f} at rank 4)", tuple(cpu)
    lost = {row["label"]: row["to_fp32"] for row in load("codecs-gpt-1m.json")["rows"]}
    rank_4 = lost["PowerSGD, rank 4, 60 steps of fp32 first"]
    yield "{:+.3f} nats above fp32 with PowerSGD", (rank_4,)
    others = lost['EntropyCoded(1.25), "auto"'], lost["Ternary"]
    yield "{:+.3f} with `EntropyCoded(1.25)` and {:+.3f} with `Ternary()`", others


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
        row = step("gpt-25m-fsdp2", method)
        seconds = "**{:.2f} s**" if label == "and `keep_weights=True`" else "{:.2f} s"
        cells, values = [seconds, "{:.0f}", "{}"], [row["seconds"], row["sent_nbytes"] / 1e6, None]
        if decimals:
            cells.append(seconds)
            values.append(step("gpt-25m-fsdp2-malloc", method)["seconds"])
        yield row_of(label, *cells), tuple(values)
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
    fp32, ternary, late = (step("gpt-25m-100mbit", m) for m in ("fp32", "ternary", LATE))
    ends = {
        row["method"]: (at(row, 130), at(row, 200), row["target_seconds"])
        for row in (fp32, ternary, late)
    }
    seconds = ends["fp32"][-1] / 130  # later steps were disturbed
    cells = "{:.2f} s", "{:.3f}", "{:.3f}"
    yield row_of("fp32, every step", *cells, "{:,.0f}"), (seconds, *ends["fp32"])
    values = ternary["seconds"], *ends["ternary"]
    yield row_of("`TernGrad()`, every step", *cells, "{:,.0f}"), values
    text = f"after 20 steps of `TernGrad()` {row_of(*cells, '**{:.0f}**')}"
    yield text, (late["seconds"], *ends[LATE])
    yield "{:.0f} times as soon as fp32", (fp32["target_seconds"] / late["target_seconds"],)
    yield "they are {:.3f} nats behind", (at(late, 200) - at(fp32, 200),)


def internet() -> Iterator[Figure]:
    files = "gpt-1m-20ms", "gpt-1m-20ms-loss", "gpt-1m-20ms-loss-cubic"
    for label, method in (
        ("fp32", "fp32"),
        ('`"ternary"`', "ternary"),
        ("`EntropyCoded(1.25)`", "entropy:bits=1.25"),
    ):
        found = [ms(step(file, method)) for file in (*files, "gpt-1m-200ms-loss")]
        yield row_of(label, "{:.1f}", "{:.1f}", "{:,.1f}", "{:,.0f}"), tuple(found)
    yield "| bf16 | {:.1f} | {:.1f} | {:,.1f} |", tuple(ms(step(file, "bf16")) for file in files)
    rows = [step(file, "terngrad:every=30") for file in files[:2]]
    yield "| `TernGrad()` every 30 steps | {:.1f} | {:.1f} |", tuple(map(ms, rows))
    late = exposed("gpt-1m-200ms-loss", "terngrad:every=10")
    yield "| `TernGrad()` every 10 steps | | | | {:,.0f} |", late


# ---- the page on accuracy ------------------------------------------------------------------------

TERNARY = "ternary:exempt=vectors,precondition,decay=0.25"
BLOCK2 = "block2:exempt=vectors,precondition,decay="
ONEBIT = "onebit:exempt=vectors,precondition,decay="
PLAIN = "ternary:exempt=vectors,decay=0.25"
ENTROPY = "entropy:bits={},exempt=vectors,precondition,decay=0.25"
AUTO = ENTROPY.format("1.25") + ",scale_lr"
SCALED_TERNARY = f"{TERNARY},scale_lr"
GROWS = "decay grows from 0.1 to 0.6, geometrically"
IMAGES = {"workload": "lenet", "optimizer": "sgd", "workers": 2, "batch": 0}
SOURCE = {"workload": "gpt-1m, second text"}  # source code
TWO, EIGHT, TWICE = {"workers": 2}, {"workers": 8}, {"factor": 2.0}
LONG = {"steps": 2000, "batch": 0}  # 4 sequences, the workload's own number
IN_DEMO = {"workload": "lenet-demo", "optimizer": "sgd", "workers": 2, "batch": 32}
LOW_IN_DEMO = "entropy:bits=1.25,min_numel=1024,exempt=vectors"
REPEATED = "repeated-gpt-1m.jsonl"


def accuracy() -> Iterator[Figure]:
    for part in (
        all_codecs,
        steps_and_decays,
        rates_and_workers,
        other_codecs,
        images,
        entropy,
        low_rates,
        scaled,
        repeated,
        muon,
        auto,
        long_runs,
        entropy_images,
        missed,
    ):
        yield from part()


def all_codecs() -> Iterator[Figure]:
    """The table of all codecs."""
    for row in load("codecs-gpt-1m.json")["rows"]:
        loss, values = "{:.4f}", [row["bits"], row["mean"]]
        if row["deviation"] is not None:
            loss, values = "{:.4f} ± {:.4f}", [*values, row["deviation"]]
        cells = row_of(row["label"], "{:.1f}", loss, "{:+.3f}", "{:.0f}")
        yield cells, (*values, row["to_fp32"], row["seeds"])


def steps_and_decays() -> Iterator[Figure]:
    """Steps and decays of ternary codes."""
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
        yield row_of(label, "{:.4f}", "{:+.3f}"), (loss, loss - base)
    for label, method in (
        ("`Block(2), precondition=True`, d = 1: four fixed levels, the baseline", f"{BLOCK2}1"),
        ("`Ternary(step=1.8, residual_decay=0.25)`", TERNARY),
        ("d = 1, seed 0", f"{ternary},decay=1"),
        ("step 1.5, seed 0", f"{ternary},step=1.5,decay=0.25"),
        ("without `precondition`, seed 0", "ternary:exempt=vectors,decay=0.25"),
        ("`Block(4)`, seed 0", "block4:exempt=vectors,precondition,decay=0.25"),
    ):
        found = losses(method, "residual-decay-again.jsonl")
        plain = fmean(losses("fp32", REPEATED)[: len(found)])
        runs = " / ".join(["{:.4f}"] * len(found))
        yield row_of(label, runs, "{:+.3f}"), (*found, fmean(found) - plain)


def rates_and_workers() -> Iterator[Figure]:
    """Learning rates, numbers of workers, and another text."""
    block2 = "ternary:second=block2,exempt=vectors,precondition,decay=0.25"
    short, without = {"steps": 400}, "without `precondition`"
    for label, method, settings in (
        ("4e-3, the best of 2, 4 and 8e-3 for fp32", TERNARY, TWICE),
        ("8e-3", TERNARY, {"factor": 4.0}),
        ("16 sequences, 2e-3", TERNARY, {"batch": 16}),
        ("N = 2, 4e-3", TERNARY, TWO | TWICE),
        ("N = 2, 2e-3", TERNARY, TWO),
        ("N = 8, 4e-3", TERNARY, EIGHT | TWICE),
        ("source code, 2e-3, the best of 2, 3 and 4e-3 for fp32", TERNARY, SOURCE),
        ("source code, 3e-3", TERNARY, SOURCE | {"factor": 1.5}),
        ("source code, 4e-3", TERNARY, SOURCE | TWICE),
        ("source code, N = 2, 2e-3", TERNARY, SOURCE | TWO),
        ("the same, source code", block2, SOURCE),
        ("400 steps, 2e-3, `OneBit(), precondition=True`, d = 0.25", f"{ONEBIT}0.25", short),
        ("400 steps, 4e-3, the same", f"{ONEBIT}0.25", short | TWICE),
        ("400 steps, 4e-3, d = 1", f"{ONEBIT}1", short | TWICE),
        (f"Muon, 2e-2, `Ternary(residual_decay=0.25)` {without}", PLAIN, {"optimizer": "muon"}),
    ):
        packed = losses(method, **settings)
        plain = losses("fp32", **settings)[: len(packed)]
        if len(packed) == 1:
            values = (*plain, *packed, packed[0] - plain[0])
            yield row_of(label, "{:.4f}", "{:.4f}", "{:+.3f}"), values
            continue
        runs = " / ".join(["{:.4f}"] * len(packed)) + ": {:.4f}"
        values = (*with_mean(plain), *against(packed, fmean(plain)))
        yield row_of(label, runs, runs, "{:+.3f}"), values


def other_codecs() -> Iterator[Figure]:
    """Blocks and codes without second moments."""
    base = losses("fp32", **TWICE)[0]
    yield "**Other codecs** at 4e-3, seed 0, fp32 {:.4f}:", (base,)
    block4 = "block4:exempt=vectors,decay=0.25"
    for label, method in (
        ("`Ternary(), precondition=True`, d = 0.25 | 2.4", TERNARY),
        ("`Ternary()` without `precondition`, d = 0.25 | 2.4", PLAIN),
        ("`Block(2), precondition=True`, d = 0.25 | 2.4", f"{BLOCK2}0.25"),
        ("`Block(2), precondition=True`, d = 1 | 2.4", f"{BLOCK2}1"),
        ("`Block(4)`, d = 0.25 | 4.4", block4),
    ):
        loss = losses(method, **TWICE)[0]
        yield row_of(label, "{:.4f}", "{:+.3f}"), (loss, loss - base)
    code = against(losses(block4, **SOURCE), mean_loss("fp32", **SOURCE))
    yield f"`Block(4)` comes to {SEEDS}, {{:+.3f}}", code
    yield f"on prose to {SEEDS}, {{:+.3f}}", against(losses(block4), GPT_600)


def images() -> Iterator[Figure]:
    """Images, without entropy-coded codes."""
    plain, packed = (losses(method, **IMAGES) for method in ("fp32", "ternary"))
    cell = "{:.2f} / {:.2f} / {:.2f}: {:.2f} %"
    label = "LeNet on Fashion-MNIST, SGD, N = 2, 600 steps, `Ternary()`"
    values = (*with_mean(plain), *against(packed, fmean(plain)))
    yield row_of(label, cell, cell, "{:+.2f} points"), values
    yield table_of_images()
    lost = [
        demo("fashion-9-seeds", "fp32")[0] - demo("fashion-9-seeds", c)[0]
        for c in ("ternary", "onebit")
    ]
    yield "({:+.2f} points of test error; `OneBit()` {:+.2f})", tuple(lost)


def table_of_images() -> Figure:
    """The table of accuracies on Fashion-MNIST, whole: other tables have rows of these names."""
    lines, values = ["| | 9 seeds | 5 seeds |", "|---|---|---|"], []
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
            several = len(names) > 1  # means alone
            cells.append(", ".join(["{:.2f}" if several else SPREAD] * len(names)))
            for name in names:
                values += demo(f"fashion-{run}", name)[: 1 if several else 2]
        lines.append(row_of(label, *cells))
    return "\n".join(lines), tuple(values)


def entropy() -> Iterator[Figure]:
    """Entropy-coded codes."""

    def runs(bits: str, decay: str = "0.25", **settings: Any) -> list[float]:
        method = f"entropy:bits={bits},exempt=vectors,precondition,decay={decay}"
        return losses(method, "entropy.jsonl", **settings)

    best = "600 steps, 4e-3, the best of 2, 4 and 8e-3 for fp32"
    for label, settings, base in (
        ("**2,000 steps**, 4 sequences, 2e-3", LONG, GPT_2000),
        (best, TWICE, mean_loss("fp32", **TWICE)),
    ):
        both = [against(runs(bits, **settings), base) for bits in ("2.2", "1.25")]
        yield row_of(label, "{:.4f}", *[SEEDS, "{:+.3f}"] * 2), (base, *both[0], *both[1])
    first = {"changed": "the first tables"}  # of Huffman codes
    fp32 = losses("fp32", "entropy.jsonl")[0]
    (low,), (middle,), (high,) = (runs(bits, **first) for bits in ("1.25", "2.2", "3.2"))
    cells = "{:.4f}", "{:.4f}", "{:+.3f}", "{:.4f}", "{:+.3f}"
    values = fp32, middle, middle - fp32, low, low - fp32
    yield row_of("600 steps, 2e-3, seed 0", *cells), values
    (half,) = losses("bf16", "entropy.jsonl")
    text = "3.2 bits lose {:.3f} ({:.4f}), buckets cast to bf16 nothing ({:.4f})"
    yield text, (high - fp32, high, half)
    cut = [runs(bits, changed="x cut to 3 root mean squares")[0] for bits in ("2.2", "1.25")]
    yield "a bound such as `Ternary()` has: {:.4f} and {:.4f} (a prototype)", tuple(cut)
    whole = [runs(bits, "1", **first)[0] for bits in ("2.2", "3.2")]
    yield "Residuals that are kept whole lose more: {:.4f} at 2.2 bits, {:.4f} at 3.2", tuple(whole)


def low_rates() -> Iterator[Figure]:
    """Prototypes of low rates, and one bit."""
    for run in load("low-rates.jsonl"):
        yield row_of(run["label"], "{:.4f}"), (run["measure"],)
    (one,) = losses(ENTROPY.format("1") + ",scale_lr", "entropy.jsonl")
    yield "`EntropyCoded(1)` (25 times fewer bytes) ends at {:.4f}", (one,)


def scaled() -> Iterator[Figure]:
    """Steps that keep their length (scale_lr)."""
    by_hand: list[float] = []
    for bits, factor in (("2.2", 1.08), ("1.25", 1.376)):
        found = losses(ENTROPY.format(bits), "entropy.jsonl", factor=factor)
        by_hand += [factor, *against(found, GPT_600)]
    text = f"bits x {{:g}} {SEEDS} ({{:+.3f}})"
    yield f"2.2 {text}, 1.25 {text}", tuple(by_hand)
    middle, high = (ENTROPY.format(bits) + ",scale_lr" for bits in ("2.2", "3.2"))
    for label, method, settings in (
        ("600 steps, 2e-3", AUTO, {}),
        ("4e-3, the best of 2, 4 and 8e-3 for fp32", AUTO, TWICE),
        ("source code, 2e-3, the best of 2, 3 and 4e-3 for fp32", AUTO, SOURCE),
        ("N = 2, 4e-3", AUTO, TWICE | TWO),
        ("source code, N = 2, 2e-3", AUTO, SOURCE | TWO),
        ("600 steps, 2e-3, `Ternary()` (13 times fewer bytes)", SCALED_TERNARY, {}),
        ("600 steps, 2e-3, `EntropyCoded(2.2)` (13 times fewer bytes)", middle, {}),
        ("600 steps, 2e-3, `EntropyCoded(3.2)` (9 times fewer bytes)", high, {}),
    ):
        found = losses(method, "entropy.jsonl", **settings)
        base = mean_loss("fp32", **settings) if settings else GPT_600
        yield row_of(label, "{:.4f}", SEEDS, "{:+.3f}"), (base, *against(found, base))
    found = losses(f"{ONEBIT}0.25,scale_lr", "entropy.jsonl", steps=400)
    yield f"{SEEDS}, {{:+.3f}} to fp32", against(found, mean_loss("fp32", steps=400))
    longer = losses("fp32", "entropy.jsonl", factor=1.3934)
    yield "with 1.39 times the rate it ends at {:.4f}, seed 0", tuple(longer)
    (longer,) = losses("fp32", "entropy.jsonl", factor=2.787)
    best, packed = losses("fp32", **TWICE)[0], losses(AUTO, "entropy.jsonl", **TWICE)[0]
    text = "fp32 ends at {:.4f}, {:.3f} below {:.4f} (seed 0), and 1.25 bits at {:.4f}"
    yield text, (longer, best - longer, best, packed)


def repeated() -> Iterator[Figure]:
    """The main runs again, with later versions and on another machine."""
    long = {"steps": 2000, "batch": 4}
    for label, method, settings in (
        ("`Ternary()`, 600 steps", SCALED_TERNARY, {}),
        ("`Ternary()`, N = 2", SCALED_TERNARY, TWO),
        ("`Ternary()`, N = 8", SCALED_TERNARY, EIGHT),
        ("`Ternary()`, 2,000 steps of 4 sequences", SCALED_TERNARY, long),
        ('`EntropyCoded(1.25)`, which is `"auto"`, 600 steps', AUTO, {}),
        ("`EntropyCoded(1.25)`, N = 2", AUTO, TWO),
        ("`EntropyCoded(1.25)`, source code", AUTO, SOURCE),
        ("`EntropyCoded(1.25)`, source code, N = 2", AUTO, SOURCE | TWO),
    ):
        plain, packed = (losses(m, REPEATED, **settings) for m in ("fp32", method))
        values = (*with_mean(plain), *against(packed, fmean(plain)))
        yield row_of(label, SEEDS, SEEDS, "{:+.3f}"), values
    onebit = f"{ONEBIT}0.25"
    found, base = losses(onebit, REPEATED, steps=400), mean_loss("fp32", steps=400)
    cells = row_of("`OneBit()`, 400 steps (fp32: above)", "{:.4f}", SEEDS, "{:+.3f}")
    yield cells, (base, *against(found, base))

    other = "repeated-gpt-1m-zen4.jsonl"

    def excess(method: str, **settings: Any) -> float:
        return mean_loss(method, other, **settings) - mean_loss("fp32", other, **settings)

    ternary = [excess(SCALED_TERNARY, **settings) for settings in ({}, TWO, EIGHT, long)]
    yield "`Ternary()` {:+.3f}, N = 2 {:+.3f}, N = 8 {:+.3f}, 2,000 steps {:+.3f}", tuple(ternary)
    found, base = losses(SCALED_TERNARY, other, **SOURCE), mean_loss("fp32", other, **SOURCE)
    yield f"source code {SEEDS}, {{:+.3f}} to {{:.4f}}", (*against(found, base), base)
    text = "`EntropyCoded(1.25)` {:+.3f}, N = 2 {:+.3f}, source code {:+.3f}, N = 2 {:+.3f};"
    low = [excess(AUTO, **settings) for settings in ({}, TWO, SOURCE, SOURCE | TWO)]
    yield f"{text} `OneBit()` {{:+.3f}}", (*low, excess(onebit, steps=400))


def muon() -> Iterator[Figure]:
    """Entropy-coded codes under Muon."""
    runs = {"file": "muon.jsonl", "optimizer": "muon"}
    (fp32,) = losses("fp32", optimizer="muon")
    for label, options in (
        ("`EntropyCoded(4)`, residuals kept whole", "bits=4,exempt=vectors,decay=1"),
        ("`EntropyCoded(3.2)`, residuals kept whole", "bits=3.2,exempt=vectors,decay=1"),
        ("`EntropyCoded(2.2)`, residuals kept whole", "bits=2.2,exempt=vectors,decay=1"),
        ("`EntropyCoded(2.2)`, a decay of 0.25", "bits=2.2,exempt=vectors,decay=0.25"),
    ):
        (loss,) = losses(f"entropy:{options}", **runs)
        yield row_of(label, "{:.4f}, {:+.3f}"), (loss, loss - fp32)
    packed = "entropy:bits=3.2,exempt=vectors,decay=0.25"
    plain, found = (losses(method, **runs) for method in ("fp32", packed))
    cells = row_of("`EntropyCoded(3.2)`, 9 times fewer bytes", SEEDS, SEEDS, "{:+.3f}")
    yield cells, (*with_mean(plain), *against(found, fmean(plain)))


def auto() -> Iterator[Figure]:
    """What "auto" loses among hosts with links, and on a larger model."""
    for label, words, settings in (
        ("prose", "prose", {}),
        ("prose, N = 2", "prose", TWO),
        ("source code", "source code", SOURCE),
        ("source code, N = 2", "source code", SOURCE | TWO),
    ):
        wanted = {"workers": settings.get("workers", 4), "text": words}
        runs = [run for run in load("auto-gpt-1m.jsonl") if wanted.items() <= run.items()]
        found = [run["measure"] for run in sorted(runs, key=lambda run: run["seed"])]
        base = mean_loss("fp32", REPEATED, **settings) if settings else GPT_600
        fewer = 32 / fmean(run["bits"] for run in runs)
        yield row_of(label, SEEDS, "{:+.3f}", "{:.1f}"), (*against(found, base), fewer)
    (base,) = losses("fp32", "gpt-6m.jsonl", workload="gpt-6m", batch=4)
    yield "| fp32 | 32.0 | {:.4f} | |\n| `EntropyCoded(1.25)", (base,)
    for label, bits in (
        ('`EntropyCoded(1.25), precondition=True`, which is `"auto"`', "1.25"),
        ("`EntropyCoded(2.2), precondition=True`", "2.2"),
    ):
        method = ENTROPY.format(bits) + ",scale_lr"
        run = next(r for r in load("gpt-6m.jsonl") if r["method"] == method)
        values = run["bits"], run["measure"], run["measure"] - base
        yield row_of(label, "{:.1f}", "{:.4f}", "{:+.3f}"), values


def long_runs() -> Iterator[Figure]:
    """Runs of 2,000 steps, with local steps among them, and those of other numbers of workers."""
    local = "entropy:bits=1.25,every=30,warmup_steps=200,exempt=vectors"
    fp32 = 1.3438  # seed 0
    for label, seed, method in (
        ("`EntropyCoded(1.25)`, residuals kept whole", f"0; fp32 every step {fp32}", local),
        ("the same, no residuals", "0", f"{local},decay=0"),
    ):
        (loss,) = losses(method, "entropy.jsonl", **LONG)
        yield row_of(label, "60", f"{{:.4f}} (seed {seed})", "{:+.3f}"), (loss, loss - fp32)
    for label, method, settings in (
        ("2,000 steps, 4 sequences, 2e-3 (fp32 at its best rate, 4e-3: 1.2942)", AUTO, LONG),
        ("the same, `Ternary()`", SCALED_TERNARY, LONG),
        ("N = 2, 600 steps, 2e-3, `Ternary()`", SCALED_TERNARY, TWO),
        ("N = 8, 600 steps, 2e-3, `Ternary()`", SCALED_TERNARY, EIGHT),
    ):
        found = losses(method, "entropy.jsonl", **settings)
        base = GPT_2000 if settings == LONG else mean_loss("fp32", "entropy.jsonl", **settings)
        yield row_of(label, "{:.4f}", SEEDS, "{:+.3f}"), (base, *against(found, base))
    usual = LONG | {"batch": 4}
    best = usual | TWICE
    plain = [1.2942, *losses("fp32", "entropy.jsonl", **best)]  # seed 0: no line
    yield f"fp32 at 4e-3 | {SEEDS} | |", with_mean(plain)
    for bits in ("1.25", "2.2", "3.2"):
        found = losses(ENTROPY.format(bits) + ",scale_lr", "entropy.jsonl", **best)
        text = f"`EntropyCoded({bits})` at 4e-3 | {SEEDS} | {{:+.3f}} |"
        yield text, against(found, fmean(plain))
    for bits in ("2.2", "3.2"):
        found = losses(ENTROPY.format(bits) + ",scale_lr", "entropy.jsonl", **usual)
        text = f"`EntropyCoded({bits})` at 2e-3 (fp32 {GPT_2000:.4f}) | {SEEDS} | {{:+.3f}} |"
        yield text, against(found, GPT_2000)


def missed() -> Iterator[Figure]:
    """Goals that are missed."""
    found = losses(ENTROPY.format("3.2") + ",scale_lr", "entropy.jsonl")
    text = "`EntropyCoded(3.2)` loses {:.3f} ± {:.3f} nats in 600 steps"
    yield text, (fmean(found) - GPT_600, stdev(found))
    low = next(run["bits"] for run in load(REPEATED) if run["method"] == AUTO)
    guarded = fmean(run["bits"] for run in load("auto-gpt-1m.jsonl"))
    text = "under AdamW sends {:.1f} times fewer bytes, and {:.1f} in 600 steps with the"
    yield text, (32 / low, 32 / guarded)
    images = next(r["bits"] for r in load("entropy.jsonl") if r["method"] == LOW_IN_DEMO)
    yield "Under SGD LeNet has {:.1f}", (32 / images,)
    runs = {run["method"]: run["measure"] for run in load("gpt-6m.jsonl")}
    yield "one seed, and loses {:.3f} with 1.25 bits", (runs[AUTO] - runs["fp32"],)


def entropy_images() -> Iterator[Figure]:
    """Entropy-coded codes and images."""
    sgd = {"optimizer": "sgd", "workers": 2}
    lenet = sgd | {"workload": "lenet", "batch": 0}
    resnet = sgd | {"workload": "resnet", "steps": 300, "batch": 0}
    cell = "{:.2f} / {:.2f} / {:.2f}: {:.2f}"
    for label, settings, file, more in (
        ("LeNet on Fashion-MNIST, the demo", IN_DEMO, "entropy.jsonl", ",min_numel=1024"),
        ("LeNet on Fashion-MNIST, a falling rate", lenet, "residual-decay.jsonl", ""),
        ("a small ResNet on CIFAR-10, 300 steps", resnet, "entropy.jsonl", ""),
    ):
        values = with_mean(losses("fp32", file, **settings))
        for bits in ("2.2", "1.25"):
            method = f"entropy:bits={bits}{more},exempt=vectors"
            values += with_mean(losses(method, "entropy.jsonl", **settings))
        yield row_of(label, cell, cell, cell), values
    for label, workload, steps, batch in (
        ("the demo, 16 images a rank", "lenet-demo", 600, 16),
        ("LeNet, a falling rate", "lenet", 600, 0),
        ("the ResNet, 300 steps", "resnet", 300, 0),
    ):
        settings = {"optimizer": "sgd", "workload": workload, "steps": steps, "batch": batch}
        methods = ("fp32", *(f"entropy:bits={bits},exempt=vectors" for bits in ("2.2", "1.25")))
        runs = [with_mean(losses(m, "images-4-ranks.jsonl", **settings)) for m in methods]
        yield row_of(label, cell, cell, cell), sum(runs, ())
    methods = "fp32", "entropy:bits=1.25,exempt=vectors"
    plain, packed = (losses(m, "entropy.jsonl", **resnet | TWICE) for m in methods)
    text = f"which is above fp32's best | {cell} | | {cell} |"
    yield text, (*with_mean(plain), *with_mean(packed))
    plain, packed = (losses(m, "entropy.jsonl", **lenet | TWICE) for m in methods)
    text = "reaches {:.2f} and {:.2f} in fp32 and {:.2f} and\n{:.2f} with 1.25 bits there"
    yield text, (*plain[:2], *packed[:2])


def lora() -> Iterator[Figure]:
    runs = [run for run in load("lora.jsonl") if run["lr"] == 3e-3]

    def spread(chosen: Callable[[str], bool]) -> tuple[float, float]:
        """Return mean and deviation of the losses of methods."""
        found = [run["loss"] for run in runs if chosen(run["method"])]
        return fmean(found), stdev(found)

    base = spread(lambda name: name == "fp32")
    yield "| none (fp32) | 1 | {:.3f} ± {:.3f} |", base
    for method, label in {
        "bfloat16": '`"bfloat16"`',
        "auto": "`Block(4, group=128)`",
        "block4": "`Block(4)`, a scale a row",
        "ternary 128 precondition": "`Ternary(group=128)`, `precondition=True`",
        "ternary precondition": "`Ternary()`, a scale a row, `precondition=True`",
        "ternary": "`Ternary()`, a scale a row",
        "onebit 128 precondition": "`OneBit(group=128)`, `precondition=True`",
        "terngrad": "`TernGrad()`",
    }.items():
        loss = spread(lambda name, method=method: name == method)
        ratio = next(run["ratio"] for run in runs if run["method"] == method)
        values = ratio, *loss, loss[0] - base[0]
        yield row_of(label, "{:.1f}", "{:.3f} ± {:.3f}", "{:+.3f}"), values
    auto_loss, fp32_loss = (
        spread(lambda name, way=way: name.startswith(way)) for way in ("auto:", "fp32,")
    )
    text = "{:.3f} ± {:.3f}, where fp32 ended at {:.3f} ± {:.3f} ({:+.3f}, 25.1 times fewer bytes)"
    yield text, (*auto_loss, *fp32_loss, auto_loss[0] - fp32_loss[0])


# ---- what comes of faults ------------------------------------------------------------------------

FAULTS = {  # as tests/comm/faults/test_matrix.py calls them
    "killed": "is killed (SIGKILL, the kernel's out-of-memory killer)",
    "frozen": "is stopped (SIGSTOP, a debugger)",
    "raises": "raises an exception",
    "exits": "calls `sys.exit`",
    "interrupted": "is interrupted (Ctrl-C)",
    "out of memory": "is out of memory in Python",
    "closes": "calls `close()` and lives on",
    "cut off": "is cut off: the link of its host goes down",
    "slow link": "has a link that becomes 100 times slower",
}
TRANSPORTS = {"gloo": "gloo", "mpich": "MPICH", "openmpi": "Open MPI"}
FAULTS_FILE, FAULTS_PAGE, CELLS = "faults.jsonl", "docs/explanation/reliability.md", 225
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
        name, before = page.relative_to(root).as_posix(), page.read_text(encoding="utf-8")
        if name.startswith(("docs/reference/", "docs/results/")):
            continue
        text = with_faults(name, before)
        if text != before:
            differences.append(f"{name}: another table of faults than {FAULTS_FILE}")
        try:
            found = compare(text, PAGES[name]()) if name in PAGES else []
        except LookupError as error:
            differences.append(f"{name}: {error}")
            continue
        after, rest, end = "", "", 0  # the page with new figures, and without any
        for start, stop, new, template in found:
            if text[start:stop] != new:
                differences.append(f"{name}: {text[start:stop]} instead of {new} in {template!r}")
            after, rest = after + text[end:start] + new, rest + text[end:start]
            end = stop
        after, rest = after + text[end:], rest + text[end:]
        if write and after != before:
            page.write_text(after, encoding="utf-8")
        counts[name] = [len(found), len(DECIMAL.findall(HIDDEN.sub("", rest)))]
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
