"""Check every kernel, then time it beside memcpy in the same run.

ratio = seconds of the kernel / seconds of memcpy of the same number of fp32 elements, measured in
turn within one run; the median over repetitions is shown. GB/s = numel * 4 bytes / seconds / 1e9,
whatever the source dtype. Every result is compared with the portable tier's before its kernel is
timed; the tests compare the portable tier with the NumPy reference.

With --device the kernels of a GPU are timed beside a copy of the same elements on it, from values
there to a payload in host memory and back. Their results are compared with the CPU's.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from gradcomp import Block, OneBit, Ternary, TernGrad
from gradcomp.arguments import counts, words
from gradcomp.bench import timing
from gradcomp.bench.about import table
from gradcomp.bench.options import command_line
from gradcomp.bench.timing import MEMCPY_NBYTES, Verdict, memcpy_of, turns, using
from gradcomp.codecs import KINDS, Codec, RngKey
from gradcomp.codecs.lanes import Lanes
from gradcomp.kernels import CPU, NO_RESIDUALS, Code, Kernels, Payloads, Residuals, host, native, of
from gradcomp.kernels.staging import wait_for
from gradcomp.payload.form import lanes_form
from gradcomp.payload.layout import PayloadLayout
from gradcomp.payload.pieces import Slot, whole_pieces

Row = dict[str, Any]  # one measurement, as in the JSON file
KERNELS = of(CPU)
KEY = RngKey(seed=1, rank=1, step=5)
GROUP = 512  # a usual row, for the codecs whose groups are rows: one flat tensor has none
DTYPES = ("float32", "bfloat16", "float16")
DECAY = ", decay"  # ends the names of encoders with a decay below 1

# With one thread, a kernel may take MARGIN * (bytes that it moves / 8 + ARITHMETIC) memcpys. One
# that is not in ARITHMETIC is bound by memory.
MARGIN = 2.0
ARITHMETIC = {
    "terngrad encode": 1.0,  # random numbers: ten rounds of Philox for every eight elements
    "terngrad decode 4 shared": 0.25,
    "terngrad decode 4 own": 0.25,
    # the step is found by a search, and every two codes depend on the bits of the codes before:
    # 3.5 memcpys to encode, 2 to decode
    "entropy encode": 0.216,
    "entropy decode 1": 0.466,
}
# in memcpys, where less is required than a kernel's bytes allow
MOST = {"ternary encode": 2.0, "ternary encode, decay": 2.0}
MOST_WITH_DECAY = 1.05  # an encoder with a decay below 1, over one without, measured in turn
UNJUDGED = ("ternary sum to lanes 4", "lanes decode", "crc32c of a payload")
# Least speedup with two threads: 1.7 was measured on two free cores, one thread alone gives 1.0.
# Entropy-coded codes are bound by arithmetic: 1.9 and 2.0 were measured.
THREAD_GAIN = {
    "terngrad encode": 1.1,
    "terngrad decode 4 own": 1.1,
    "entropy encode": 1.5,
    "entropy decode 1": 1.5,
}
FREE_CORES = 1.5  # with fewer, other programs delay a second thread
ELEMENTS = 1 << 22  # short calls are repeated to so many, for the clock's resolution
TORCH_GAIN = 10.0  # torch operations move about 60 bytes per element, terngrad encode 4.25


# ---- kernels: function, results and bytes of each ------------------------------------------------


@dataclass
class Case:
    """Kernel to time: `run` writes `results`, and reads and writes `nbytes` bytes per element."""

    name: str
    run: Callable[[], object]
    nbytes: float
    results: list[Tensor]
    restart: Callable[[], object] = lambda: None  # resets the input that a run changes in place

    def is_right(self) -> bool:
        """Return whether this tier writes the same bytes as the portable tier."""
        self.restart()
        self.run()
        found = [result.clone() for result in self.results]
        with using(native.tiers()[0]):
            self.restart()
            self.run()
        pairs = zip(found, self.results, strict=True)
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def cases(numel: int, dtype: torch.dtype) -> list[Case]:
    """Return all kernels to time, for tensors of `numel` elements of `dtype`."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = _ternary_cases(x)
    for kind in KINDS:
        found += _cases_of(_grouped(kind), x)
    found.append(_one_tensor(x))
    for codec in (OneBit(group=GROUP), Block(2, group=GROUP), Ternary(group=GROUP)):
        encode = _cases_of(codec.with_decay(0.25), x)[0]
        encode.name += DECAY
        found.append(encode)
    return found


def _cases_of(codec: Codec, x: Tensor, kernels: Kernels = KERNELS) -> list[Case]:
    """Return encode and decode of one payload of a codec; `kernels` must be those of x's device."""
    layout, out = _layout(codec, x.numel()), torch.empty_like(x)
    payload, residuals = torch.zeros(layout.nbytes, dtype=torch.uint8), NO_RESIDUALS
    moved, written = x.element_size() + layout.nbytes / x.numel(), [payload]
    if codec.error_feedback:
        new = torch.zeros(x.numel(), device=x.device)
        residuals = Residuals(_residual(x).to(x.device), new, lambda dropped: None)
        written.append(new)
    _place_scales(codec, layout, x, payload, kernels)
    encode = partial(codec.encode_body, kernels, x, layout, payload, KEY, residuals)
    source = Payloads([payload], codec.code, x.dtype)
    decode = partial(kernels.sum_decode, source, layout.packed, out)
    encode()
    return [
        Case(f"{codec.name} encode", encode, moved + 8 * codec.error_feedback, written),
        Case(f"{codec.name} decode 1", decode, moved, [out]),
    ]


def _ternary_cases(x: Tensor) -> list[Case]:
    """Return TernGrad's kernels for scales, for payloads of four ranks, and for exact sums."""
    codec, size = TernGrad(clip_sigma=None), x.element_size()
    layout, out = _layout(codec, x.numel()), torch.empty_like(x)
    blocks, scales = codec.scratch(KERNELS, layout), torch.empty(1)
    sent = [torch.empty(layout.nbytes, dtype=torch.uint8) for _ in range(4)]
    for rank, payload in enumerate(sent):
        _place_scales(codec, layout, x, payload)
        codec.encode_body(KERNELS, x, layout, payload, RngKey(seed=1, rank=rank, step=5))
    shared = Payloads(sent, Code("ternary", shared=True), x.dtype)
    own = Payloads(sent, Code("ternary", shared=False), x.dtype)
    lanes, code = PayloadLayout(lanes_form(4), layout.pieces), Lanes(4).code
    bits, summed = lanes.form.bits, torch.zeros(lanes.nbytes, dtype=torch.uint8)
    _place_scales(codec, layout, x, summed)
    sums = Payloads([summed], code, x.dtype)
    measure = partial(TernGrad().measure, KERNELS, x, layout, blocks, scales)
    add = partial(host.sum_lanes, shared.tensors, layout.packed, lanes.packed, code, summed)
    add()
    crc, raw = torch.zeros(1, dtype=torch.int64), sent[0].numpy()
    found = [
        Case("absmax + moments", measure, size, [blocks, scales]),
        Case("ternary sum to lanes 4", add, 1 + bits / 8, [summed]),
        Case("crc32c of a payload", lambda: crc.fill_(host.crc32c(raw)), 0.25, [crc]),
    ]
    for name, source, packed, moved in (
        ("terngrad decode 4 shared", shared, layout.packed, 1),
        ("terngrad decode 4 own", own, layout.packed, 1),
        ("lanes decode", sums, lanes.packed, bits / 8),
    ):
        decode = partial(KERNELS.sum_decode, source, packed, out)
        found.append(Case(name, decode, size + moved, [out]))
    return found


def _one_tensor(x: Tensor) -> Case:
    """Return a user's call of ``encode``: with header, checksum and a residual updated in place."""
    codec, old = OneBit(group=GROUP), _residual(x)
    kept, payload = old.clone(), torch.zeros(_layout(codec, x.numel()).nbytes, dtype=torch.uint8)
    run = partial(codec.encode, x, residual=kept, key=KEY, out=payload)
    moved = x.element_size() + payload.numel() / x.numel() + 12  # reads, saves, writes the residual
    return Case("onebit encode, one tensor", run, moved, [payload, kept], lambda: kept.copy_(old))


def _residual(x: Tensor) -> Tensor:
    return torch.randn(x.numel(), generator=torch.Generator().manual_seed(1))


def _place_scales(
    codec: Codec, layout: PayloadLayout, x: Tensor, payload: Tensor, kernels: Kernels = KERNELS
) -> None:
    """Write scales into a payload, if the codec measures them before it encodes."""
    if codec.measures:
        scales = torch.empty(layout.group_count)
        codec.measure(kernels, x, layout, codec.scratch(kernels, layout), scales)
        codec.place_scales(layout, scales, payload)


def _grouped(codec: Codec) -> Codec:
    """Return the codec with groups of `GROUP` elements, if its groups are rows by default."""
    if isinstance(codec, TernGrad):
        return TernGrad(clip_sigma=None)
    options = codec.options()
    return type(codec)(**options | {"group": GROUP}) if "group" in options else codec


def _layout(codec: Codec, numel: int) -> PayloadLayout:
    slot = Slot(0, numel, codec.group_numel((numel,)), True, 0)
    pieces, whole = whole_pieces([slot]), codec.whole_groups
    return PayloadLayout(codec.form, pieces, segmented=False, whole_groups=whole)


# ---- the benchmark -------------------------------------------------------------------------------


def measure(
    case: Case, beside: Callable[[], object], numel: int, repetitions: int
) -> dict[str, float]:
    """Return the median ratio to `beside` and GB/s, and the fastest (least disturbed) seconds."""
    calls = max(1, ELEMENTS // numel)
    other, taken = turns([beside, case.run], repetitions, calls).T
    gb_per_s = numel * 4 / float(np.median(taken)) / 1e9
    ratio = float(np.median(taken / other))
    return {"ratio": ratio, "gb_per_s": gb_per_s, "least_s": float(taken.min())}


def gain_over_torch(numel: int, repetitions: int) -> float:
    """Return the speedup of terngrad's encode over torch operations, with one thread each."""
    numel, scale = max(4, numel // 4 * 4), 2.5
    x = torch.randn(numel)

    def in_torch() -> Tensor:  # the same codes, with other random numbers
        nonzero = torch.rand_like(x) < x.abs() / scale
        codes = (torch.sign(x) * nonzero + 1).to(torch.uint8).view(-1, 4)
        return codes[:, 0] | codes[:, 1] << 2 | codes[:, 2] << 4 | codes[:, 3] << 6

    encode = next(case for case in cases(numel, torch.float32) if case.name == "terngrad encode")
    with using(native.tier(), 1):
        return 1 / measure(encode, in_torch, numel, repetitions)["ratio"]


def run(args: argparse.Namespace) -> list[Row]:
    """Check and time all requested kernels; ``nbytes`` of a row are bytes moved per element."""
    rows: list[Row] = []
    for numel, dtype in itertools.product(args.sizes, args.dtypes):
        memcpy, kernels = memcpy_of(numel), cases(numel, getattr(torch, dtype))
        # threads vary fastest, so that their speedup is measured at about the same time
        work = list(itertools.product(args.tiers, kernels, args.threads))
        for name, case, count in track(work, f"{numel:,} x {dtype}", transient=True):
            with using(name, count):
                if not case.is_right():
                    raise SystemExit(f"{case.name} on tier {name} differs from the portable tier")
                found = measure(case, memcpy, numel, args.repeat)
                if case.name.endswith(DECAY):  # in turn: a machine's speed changes within minutes
                    plain = next(k for k in kernels if k.name == case.name.removesuffix(DECAY))
                    found["to_plain"] = measure(case, plain.run, numel, args.repeat)["ratio"]
            what = {"kernel": case.name, "tier": name, "dtype": dtype, "numel": numel}
            rows.append({**what, "threads": count, "nbytes": case.nbytes, **found})
    return rows


def run_on_device(args: argparse.Namespace, kernels: Kernels, device: torch.device) -> list[Row]:
    """Check and time the kernels of a device; ratios are to a copy on the device."""
    rows: list[Row] = []
    for numel, dtype in itertools.product(args.sizes, args.dtypes):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
        x = x.to(getattr(torch, dtype))
        there, wide = x.to(device), torch.ones(numel, device=device)
        copy = partial(_waited, device, partial(torch.empty_like(wide).copy_, wide))
        for codec in map(_grouped, KINDS):
            for case, here in zip(
                _cases_of(codec, there, kernels), _cases_of(codec, x), strict=True
            ):
                for one in (case, here):
                    one.run()
                if not all(map(torch.equal, (a.cpu() for a in case.results), here.results)):
                    raise SystemExit(f"{case.name} on {device} differs from the CPU's")
                case.run = partial(_waited, device, case.run)
                found = measure(case, copy, numel, args.repeat)
                what = {"kernel": case.name, "tier": str(device), "dtype": dtype, "numel": numel}
                rows.append({**what, "threads": 1, "nbytes": case.nbytes, **found})
    return rows


def _waited(device: torch.device, run: Callable[[], object]) -> None:
    """Call `run` and wait for the device."""
    run()
    wait_for(device)


def verdicts(rows: list[Row], gain: float) -> list[Verdict]:
    """Return the verdict on every requirement, from rows of one tier, size and dtype."""
    best = {(row["kernel"], row["threads"]): row for row in rows}
    out = []
    for (kernel, threads), row in best.items():
        if threads == 1 and kernel not in UNJUDGED:
            limit = MARGIN * (row["nbytes"] / MEMCPY_NBYTES + ARITHMETIC.get(kernel, 0.0))
            limit = min(limit, MOST.get(kernel, limit))
            out.append(Verdict(f"{kernel} / memcpy", row["ratio"], limit))
        if threads == 1 and "to_plain" in row:
            what = f"{kernel} / {kernel.removesuffix(DECAY)}"
            out.append(Verdict(what, row["to_plain"], MOST_WITH_DECAY))
    for kernel, least in THREAD_GAIN.items():
        if (kernel, 2) in best:
            found = best[kernel, 1]["least_s"] / best[kernel, 2]["least_s"]
            out.append(Verdict(f"{kernel}, two threads over one", found, least, at_least=True))
    return [*out, Verdict("terngrad encode over torch", gain, TORCH_GAIN, at_least=True)]


def read_options(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    tiers = "kernel tiers to time, a list; all: every tier that this machine has"
    dtypes = f"dtypes of the gradients, a list of {', '.join(DTYPES)}"
    options = {
        "sizes": ("65536,4194304,67108864", "", "elements of the tensors, a list", counts),
        "dtypes": ("float32", "", dtypes, words(*DTYPES)),
        "tiers": ("all", "", tiers, words(*native.tiers(), "all")),
        "threads": ("1", "", "numbers of threads to time with, a list", counts),
        "device": ("cpu", "", "cpu, or a GPU (cuda), whose kernels need triton", str),
    }
    epilog = """--check takes 64 Mi float32 elements, the tier in use, 1 and 2 threads, and 4 GB.

example:
  python -m gradcomp.bench codec --sizes 4194304 --dtypes float32,bfloat16 --threads 1,2
"""
    args = command_line("codec", __doc__, epilog, options, timing.OPTIONS).parse_args(argv)
    if "all" in args.tiers:
        args.tiers = native.tiers()
    if args.check:
        args.sizes, args.dtypes, args.tiers = [1 << 26], ["float32"], [native.tier()]
        free = (os.cpu_count() or 1) - os.getloadavg()[0]
        args.threads = [1, 2] if free >= FREE_CORES else [1]
        if args.threads == [1]:
            print(f"two threads are not judged: {max(0.0, free):.1f} cores are free")
    return args


def main(argv: list[str]) -> int:
    """Run the benchmark; return the exit status."""
    args = read_options(argv)
    if args.device != "cpu":
        return _main_on_device(args)
    rows = run(args)
    gain = gain_over_torch(min(max(args.sizes), 1 << 24), args.repeat)
    _show(rows, "memcpy")
    print(f"terngrad encode, one thread: {gain:.0f}x the same codec in torch operations")
    judged = verdicts(rows, gain) if args.check else []
    return timing.finish(args, judged, rows=rows, terngrad_encode_over={"torch": gain})


def _main_on_device(args: argparse.Namespace) -> int:
    option = f"gradcomp.bench codec: --device {args.device}"
    if not args.device.startswith("cuda") or not torch.cuda.is_available():
        print(f"{option}: not here; cuda or cuda:1 is a GPU", file=sys.stderr)
        return 2
    try:
        from gradcomp.kernels.cuda import TritonKernels
    except ModuleNotFoundError as error:
        print(f"{option} needs {error.name}: pip install 'gradcomp[cuda]'", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    rows = run_on_device(args, TritonKernels(device), device)
    _show(rows, "copy")
    return timing.finish(args, [], rows=rows)


def _show(rows: list[Row], unit: str) -> None:
    form = "{kernel}|{tier}|{dtype}|{numel:,}|{threads}|{ratio:.2f}|{gb_per_s:.2f}"
    texts = [form.format(**row).split("|") for row in rows]
    heads = ["kernel", "tier", "dtype", "elements", "threads", f"x {unit}", "GB/s of fp32"]
    title = f"Kernels beside {unit} of the same fp32 elements (median)"
    Console().print(table(heads, texts, left=3, title=title))
