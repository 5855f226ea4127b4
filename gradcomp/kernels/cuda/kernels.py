"""The kernel set of CUDA devices: Triton kernels that give the same bits as the CPU's kernels.

The CPU's set rotates values, on copies in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradcomp.kernels import host
from gradcomp.kernels.cuda import elementwise, programs, records, streams, updates
from gradcomp.kernels.cuda.launch import Launcher, host_copy, pinned
from gradcomp.kernels.cuda.plan import CHUNK, STREAM_NUMEL, Plan
from gradcomp.kernels.interface import NO_RESIDUALS, Code, Kernels, Payloads, Residuals
from gradcomp.kernels.native.kernels import NativeKernels, entropy_tables
from gradcomp.kernels.native.library import address
from gradcomp.kernels.rules import NO_RULE
from gradcomp.kernels.tables import BLOCK, DTYPES, Groups, Table

BLOCKS = 32  # blocks that one program sums
SPANS = 64  # spans or groups per program
CHAINS = 32  # half streams that one warp reads
ZEROS = {2: 1.5, 4: 7.0, 8: 127.0}  # bits of block codes -> the code of 0
BLOCK2_STEP = 0.9957  # GC_BLOCK2_STEP
LARGEST = float(np.finfo(np.float32).max)
FEED_BACK = {"nearest": programs.NEAREST, "block": programs.LEVELS, "onebit": programs.SIGNS}
# (bits per code, scales per group)
FORMS = {"ternary": (2, 1), "nearest": (2, 1), "onebit": (1, 2), "entropy": (0, 1)}
STREAM_WARPS = 8  # warps of a stream's program: its 4,096 elements stay in registers


class EntropyTables(NamedTuple):
    """The tables of entropy-coded streams on a device (gc_entropy_tables_of); `octave` is
    2^(i / 32), float64.
    """

    octave: Tensor
    symbols: Tensor
    decode: Tensor
    costs: Tensor
    pair_costs: Tensor
    tops: Tensor

    @classmethod
    def on(cls, device: torch.device) -> EntropyTables:
        """Return the tables in memory of a device."""
        return cls(**{k: torch.from_numpy(v).to(device) for k, v in entropy_tables().items()})


class TritonKernels(Launcher, Kernels):
    """Operations on tensors of one device; `Kernels` documents the methods.

    Args:
        device: device of the values; "cpu" for Triton's interpreter (``TRITON_INTERPRET=1``).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._native = NativeKernels()
        self._name, self._entropy = f"cuda {device}", cast("EntropyTables | None", None)
        self._numbers: dict[float, Tensor] = {}

    # ---- memory ----------------------------------------------------------------------------------

    def empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    # ---- statistics ------------------------------------------------------------------------------

    def scratch(self, groups: Groups, free: Tensor | None = None) -> Tensor:
        return self._native.scratch(groups)

    def scales(
        self,
        values: Tensor,
        table: Table,
        groups: Groups,
        clip_sigma: float | None,
        scratch: Tensor,
        out: Tensor,
    ) -> bool:
        if not table.numel:
            return self._native.scales(values[:0].cpu(), table, groups, clip_sigma, scratch, out)
        plan = self._plan(table)
        sums, counts = self._block_sums(plan, values, None, programs.MOMENTS)
        both, largest = sums.cpu().numpy(), counts[0].cpu().numpy()
        blocks = scratch.numpy().view(BLOCK)
        rows = plan.block_rows
        both[np.isnan(both)] = np.nan  # the canonical NaN
        blocks["sum"][rows], blocks["sum_squares"][rows] = both
        blocks["absmax_bits"][rows], blocks["reserved"][rows] = largest, 0
        self._native.ternary_scales(scratch, groups, clip_sigma, out)
        return bool((largest >= 0x7F800000).any())

    # ---- encoding --------------------------------------------------------------------------------

    def encode(
        self,
        code: Code,
        values: Tensor,
        table: Table,
        payload: Tensor,
        *,
        key: tuple[int, int, int, int] | None = None,
        residuals: Residuals = NO_RESIDUALS,
        kept: Tensor | None = None,
    ) -> bool:
        name = code.encoder or code.kernel
        if not table.numel:
            return False
        plan = self._plan(table, code)
        memory = torch.empty(plan.packed.nbytes, dtype=torch.uint8, device=self.device)
        flag = memory[:4].view(torch.int32).zero_()
        codes = memory[plan.packed.codes :]
        if name == "values":
            wide = code.dtype == torch.float32
            self._launch(
                programs.encode_values,
                plan.chunk_count,
                (_words(values), plan.chunks, plan.segments, codes, flag),
                FROM=DTYPES[values.dtype],
                WIDE=wide,
                E=CHUNK,
            )
        elif name == "ternary":
            self._draw(plan, values, payload, memory, key or (0, 0, 0, 0))
        else:
            encode = self._encode_streams if name == "entropy" else self._encode_levels
            dropped = encode(plan, code, values, memory, residuals, kept)
            if dropped is not None and residuals.counted is not None and not flag.item():
                decay: Any = code.decay
                residuals.counted((1.0 - decay) * float(dropped.sum()))
        here, packed = host_copy(memory), plan.packed
        measured = name not in ("values", "ternary")
        host.copy(payload, here, packed.down if measured else packed.codes_down)
        return bool(here[:4].view(torch.int32).item())

    def _encode_levels(
        self,
        plan: Plan,
        code: Code,
        values: Tensor,
        memory: Tensor,
        residuals: Residuals,
        kept: Tensor | None,
    ) -> Tensor | None:
        """Measure scales and write codes with error feedback; return the sum of |error| of each
        chunk if it is counted, else None.
        """
        kind = FEED_BACK[code.encoder or code.kernel]
        bits, per_group = _form(code)
        old, new = residuals.old, residuals.new
        sums, counts = self._group_sums(
            plan, values, old, programs.CLASSES if kind == programs.SIGNS else programs.SQUARES
        )
        packed = plan.packed
        scales = memory[packed.scales :][: 4 * per_group * plan.group_count].view(torch.float32)
        zero = 1.0 if kind == programs.NEAREST else ZEROS.get(bits, 1.0)
        most = LARGEST if kind == programs.NEAREST else LARGEST / (2 * zero)
        means = code.means or (0.0, 0.0)
        step = self._number(code.step or BLOCK2_STEP)
        self._launch(
            programs.measure_scales,
            -(-plan.group_count // SPANS),
            (sums, counts, plan.blocks()[3], plan.group_count, step, zero, most, *means, scales),
            memory[:4].view(torch.int32),
            KIND=kind,
            OF_SQUARES=bits == 2,
            HAS_MEANS=code.means is not None,
            B=SPANS,
        )
        has_new, dropped = self._dropped(code, residuals, plan.chunk_count)
        self._launch(
            programs.encode_codes,
            plan.chunk_count,
            (_words(values), old, new, kept, plan.chunks, plan.segments, scales),
            memory[packed.codes :],
            dropped,
            1.0 if code.decay is None else code.decay,
            zero,
            FROM=DTYPES[values.dtype],
            KIND=kind,
            BITS=bits,
            PADDING=1 if kind == programs.NEAREST else 0,
            HAS_OLD=old is not None,
            HAS_NEW=has_new,
            KEEPS=kept is not None and old is not None,
            COUNTS=dropped is not None,
            E=CHUNK,
        )
        return dropped

    def _draw(
        self,
        plan: Plan,
        values: Tensor,
        payload: Tensor,
        memory: Tensor,
        key: tuple[int, int, int, int],
    ) -> None:
        """Write random ternary codes, with the scales in the payload."""
        packed, (seed, rank, step, stream) = plan.packed, key
        end = packed.scales + 4 * plan.group_count
        here = pinned(end)
        host.copy(here, payload, packed.scales_up)
        scales = memory[packed.scales : end]
        scales.copy_(here[packed.scales :], non_blocking=True)
        words = torch.tensor([seed | rank << 32, step, stream], dtype=torch.uint64)
        self._launch(
            programs.draw_codes,
            plan.chunk_count,
            (_words(values), plan.chunks, plan.segments, scales.view(torch.float32)),
            memory[packed.codes :],
            words.view(torch.int64).to(self.device),
            memory[:4].view(torch.int32),
            FROM=DTYPES[values.dtype],
            E=CHUNK,
        )

    def _encode_streams(
        self,
        plan: Plan,
        code: Code,
        values: Tensor,
        memory: Tensor,
        residuals: Residuals,
        kept: Tensor | None,
    ) -> Tensor | None:
        """Write entropy-coded streams and their scales; return the sum of |error| of each stream if
        it is counted, else None.
        """
        old, new, packed = residuals.old, residuals.new, plan.packed
        sums, counts = self._group_sums(plan, values, old, programs.SQUARES)
        memory[packed.codes :].zero_()
        scales = memory[packed.scales :][: 4 * plan.group_count].view(torch.float32)
        has_new, dropped = self._dropped(code, residuals, plan.group_count)
        tables = self._tables()
        self._launch(
            streams.encode_streams,
            plan.group_count,
            (_words(values), old, new, kept, plan.streams(), plan.group_count, sums, counts),
            *(tables.octave, tables.costs, tables.pair_costs, tables.symbols, tables.tops),
            *(scales, memory.view(torch.int32), dropped, memory[:4].view(torch.int32)),
            1.0 if code.decay is None else code.decay,
            FROM=DTYPES[values.dtype],
            HAS_OLD=old is not None,
            HAS_NEW=has_new,
            KEEPS=kept is not None and old is not None,
            COUNTS=dropped is not None,
            num_warps=STREAM_WARPS,
        )
        return dropped

    def _dropped(self, code: Code, residuals: Residuals, parts: int) -> tuple[bool, Tensor | None]:
        """Return whether new residuals are written, and ``(parts,)`` float64 memory for sums of
        |error| if they are counted, else None.
        """
        has_new = code.decay is not None and residuals.new is not None
        if not has_new or residuals.counted is None or (code.decay or 0.0) >= 1:
            return has_new, None
        return has_new, torch.empty(parts, dtype=torch.float64, device=self.device)

    # ---- averages --------------------------------------------------------------------------------

    def sum_decode(self, payloads: Payloads, table: Table, out: Tensor, written: int = 0) -> bool:
        if not table.numel:
            return False
        code = payloads.code
        plan = self._plan(table, code)
        packed, tensors = plan.packed, payloads.tensors
        kind, zero, count = _decoder(code, len(tensors))
        tensors = tensors[:1] if code.kernel == "lanes" else tensors
        stride = packed.nbytes + -packed.nbytes % 16
        here, ranges = pinned(stride * len(tensors)), packed.up
        for number, payload in enumerate(tensors):
            host.copy(here[stride * number :], payload, ranges)
        there = here.to(self.device, non_blocking=True)
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        read = self._read(plan, there, stride, len(tensors)) if kind == programs.ENTROPY else None
        self._launch(
            programs.decode_average,
            plan.chunk_count,
            (
                there,
                stride,
                read,
                plan.numel,
                count,
                packed.scales,
                packed.codes,
                plan.chunks,
                plan.segments,
            ),
            _words(out),
            float(np.float32(1) / np.float32(len(tensors))),
            zero,
            flag,
            KIND=kind,
            BITS=_form(code)[0],
            OUT=DTYPES[out.dtype],
            E=CHUNK,
        )
        return bool(flag.item())

    def _read(self, plan: Plan, payloads: Tensor, stride: int, count: int) -> Tensor:
        """Decode streams to codes, ``(count, numel)`` int16."""
        read = torch.empty(count, plan.numel, dtype=torch.int16, device=self.device)
        self._launch(
            streams.read_streams,
            -(-2 * plan.group_count * count // CHAINS),
            (payloads, stride, plan.streams(), plan.group_count, count, read, plan.numel),
            self._tables().decode,
            B=CHAINS,
            num_warps=1,
        )
        return read

    def are_finite(self, values: Tensor) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._each(elementwise.find_special, values.numel(), values.view(torch.int32), flag)
        return not flag.item()

    # ---- units of second moments -----------------------------------------------------------------

    def divide(
        self,
        values: Tensor,
        residual: Tensor | None,
        moments: Tensor,
        floor: float,
        units: Tensor,
        out: Tensor,
    ) -> None:
        self._each(
            elementwise.divide_values,
            values.numel(),
            *(values, residual, moments, floor, units, out),
            HAS_RESIDUAL=residual is not None,
        )

    def multiply(self, values: Tensor, units: Tensor) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._each(elementwise.multiply_values, values.numel(), values, units, flag)
        return bool(flag.item())

    def follow(
        self,
        values: Tensor,
        inverse: float,
        before: Tensor | None,
        keep: float,
        gain: float,
        after: Tensor,
    ) -> bool:
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._each(
            elementwise.follow_squares,
            values.numel(),
            *(values, inverse, before, keep, gain, after, flag),
            HAS_BEFORE=before is not None,
        )
        return bool(flag.item())

    # ---- rotation --------------------------------------------------------------------------------

    def rotate(
        self,
        values: Tensor,
        group_numel: int,
        first: int,
        parameter: int,
        key: tuple[int, int, int, int],
        *,
        back: bool = False,
    ) -> None:
        call = partial(self._native.rotate, back=back)
        _on_host(values, lambda host_values: call(host_values, group_numel, first, parameter, key))

    def unbias(self, values: Tensor, group_numel: int, first: int) -> None:
        _on_host(values, lambda host_values: self._native.unbias(host_values, group_numel, first))

    # ---- residuals -------------------------------------------------------------------------------

    def rescale(self, plane: Tensor, factor: float) -> None:
        self._each(elementwise.scale_values, plane.numel(), plane, factor)

    # ---- weights ---------------------------------------------------------------------------------

    def split(self, weights: Tensor, top: Tensor, trail: Tensor, *, nearest: bool) -> None:
        bits = weights.detach().view(torch.int32)
        given = bits, top.detach().view(torch.int16), trail.view(torch.int16), int(nearest)
        self._each(updates.split_values, weights.numel(), *given)

    def join(self, top: Tensor, trail: Tensor, weights: Tensor, *, nearest: bool) -> None:
        bits = weights.detach().view(torch.int32)
        given = top.detach().view(torch.int16), trail.view(torch.int16), bits, int(nearest)
        self._each(updates.join_values, weights.numel(), *given)

    def targets(self, **tensors: Sequence[Tensor | None]) -> NDArray[Any]:
        return self._native.targets(**tensors)

    def update(
        self,
        table: Table,
        targets: NDArray[Any],
        rules: NDArray[Any],
        payloads: Payloads | None = None,
        norms: NDArray[Any] | None = None,
    ) -> bool:
        given, kinds = records.records_of(targets, rules), np.full(len(table), NO_RULE)
        live = table.rows["numel"] > 0
        kinds[live] = given["kind"][table.rows["parameter"][live]]
        passes, bad = records.passes_of(kinds), False
        if not passes:
            return False
        if payloads is not None:
            dense = self._dense(table)
            averages = self.empty(dense.numel, payloads.dtype)
            bad = self.sum_decode(payloads, dense, averages)
            given["gradient"], given["dtype"] = address(averages), DTYPES[averages.dtype]
        here = pinned(given.nbytes)
        here.numpy()[:] = given.view(np.uint8)
        there = here.to(self.device, non_blocking=True)
        values = self._ranges(table, payloads)
        for kind in passes:
            if kind not in records.SUMS:
                self._launch(
                    updates.update_values,
                    values.number,
                    (values.there, there),
                    KIND=int(kind),
                    E=records.NUMEL,
                )
        if norms is not None and (adding := [kind for kind in passes if kind in records.SUMS]):
            ranges = self._ranges(table, payloads, are_sums=True)
            sums = torch.empty(2, ranges.number, dtype=torch.float64, device=self.device)
            for kind in adding:
                self._launch(
                    updates.add_squares,
                    -(-ranges.number // records.ROWS),
                    (ranges.there, there, ranges.number, sums),
                    KIND=int(kind),
                    B=records.ROWS,
                    STEPS=records.STEPS,
                    num_warps=1,
                )
            added, found = np.isin(kinds, records.SUMS), sums.cpu().numpy()
            norms.reshape(-1, 2)[added] = ranges.totals(found, len(table))[added]
        return bad

    def _dense(self, table: Table) -> Table:
        """Return the rows of a table with averages that lie side by side."""
        name = f"{self._name} dense"
        if name not in table.prepared:
            rows = table.rows.copy()
            rows["data"] = np.cumsum(rows["numel"], dtype=np.uint64) - rows["numel"]
            table.prepared[name] = Table(rows)
        dense: Table = table.prepared[name]
        return dense

    def _ranges(
        self, table: Table, payloads: Payloads | None, *, are_sums: bool = False
    ) -> records.Ranges:
        """Return the ranges of a table that programs update, or whose squares they add."""
        largest, part_numel, gradients = records.NUMEL, 0, None
        if are_sums:
            largest = records.RUN if payloads is not None else int(table.rows["numel"].max())
        if payloads is not None:
            gradients = self._dense(table).rows["data"].astype(np.int64)
            part_numel = STREAM_NUMEL if payloads.code.kernel == "entropy" else 0
        name = f"{self._name} {largest} {part_numel} {payloads is None}"
        if name not in table.prepared:
            given = largest, self.device, gradients, part_numel
            table.prepared[name] = records.ranges_of(table, *given)
        ranges: records.Ranges = table.prepared[name]
        return ranges

    # ---- programs --------------------------------------------------------------------------------

    def _plan(self, table: Table, code: Code | None = None) -> Plan:
        """Return the cached plan of a table; without a code, it is for scales only."""
        bits, per_group = (2, 1) if code is None else _form(code)
        nbytes = 0 if code is None else code.stream_nbytes or 0
        kind = f"{self._name} {bits} {per_group} {nbytes}"
        if kind not in table.prepared:
            table.prepared[kind] = Plan(table, bits, per_group, self.device, nbytes)
        plan: Plan = table.prepared[kind]
        return plan

    def _number(self, value: float) -> Tensor:
        """Return a float64 tensor of a number: a launch would convert the number to float32."""
        if value not in self._numbers:
            tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
            self._numbers[value] = tensor
        return self._numbers[value]

    def _tables(self) -> EntropyTables:
        if self._entropy is None:
            self._entropy = EntropyTables.on(self.device)
        return self._entropy

    def _block_sums(
        self, plan: Plan, values: Tensor, old: Tensor | None, kind: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of every block, ``(2, blocks)`` float64, and its counts, ``(3, blocks)``
        int32 (`programs.add_blocks`).
        """
        blocks = plan.blocks()[0]
        sums, counts = self._sums(len(blocks))
        self._launch(
            programs.add_blocks,
            -(-len(blocks) // BLOCKS),
            (_words(values), old, blocks, len(blocks), sums, counts),
            FROM=DTYPES[values.dtype],
            KIND=kind,
            HAS_OLD=old is not None,
            B=BLOCKS,
        )
        return sums, counts

    def _group_sums(
        self, plan: Plan, values: Tensor, old: Tensor | None, kind: int
    ) -> tuple[Tensor, Tensor]:
        """Return the sums and counts of every group, in the form of `_block_sums`."""
        sums, counts = self._block_sums(plan, values, old, kind)
        for spans in plan.blocks()[1:3]:
            parts, (into, numbers) = sums.shape[1], self._sums(spans.number)
            self._launch(
                programs.add_in_order,
                -(-spans.number // SPANS),
                (sums, counts, parts, spans.rows, spans.number, spans.most, into, numbers),
                B=SPANS,
            )
            sums, counts = into, numbers
        return sums, counts

    def _sums(self, count: int) -> tuple[Tensor, Tensor]:
        there: Any = {"device": self.device}
        return (
            torch.empty(2, count, dtype=torch.float64, **there),
            torch.empty(3, count, dtype=torch.int32, **there),
        )


def _words(values: Tensor) -> Tensor:
    """Return values as arguments for programs: 16-bit dtypes as int16."""
    return values if values.dtype == torch.float32 else values.view(torch.int16)


def _form(code: Code) -> tuple[int, int]:
    """Return (bits per code, scales per group)."""
    if code.kernel == "values":
        assert code.dtype is not None
        return 8 * code.dtype.itemsize, 0
    return (code.bits, 1) if code.bits is not None else FORMS[code.kernel]


def _decoder(code: Code, count: int) -> tuple[int, float, int]:
    """Return the kind of a code's decoder, a number (the code of 0, or the divisor of shared
    scales), and the number of ranks or payloads.
    """
    if code.kernel == "values":
        return programs.PLAIN, 0.0, count
    if code.kernel == "lanes":
        assert code.world_size is not None
        return programs.LANE_SUMS, float(code.world_size), code.world_size
    if code.kernel == "onebit":
        return programs.SIGNS, 0.0, count
    if code.kernel == "block":
        assert code.bits is not None
        return programs.LEVELS, ZEROS[code.bits], count
    if code.kernel == "entropy":
        return programs.ENTROPY, 0.0, count
    return (programs.SHARED, float(count), count) if code.shared else (programs.TERNARY, 1.0, count)


def _copied(tensor: Tensor | None) -> Tensor | None:
    """Return a copy in host memory."""
    return None if tensor is None else tensor.detach().to("cpu", copy=True)


def _on_host(values: Tensor, call: Callable[[Tensor], None]) -> None:
    """Let `call` change a copy of values in host memory, then copy it back to `values`."""
    here = _copied(values)
    assert here is not None
    call(here)
    values.copy_(here)
