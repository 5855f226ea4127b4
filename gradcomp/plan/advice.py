"""Resolve ``codec="auto"`` with the table of `gradcomp.plan.accuracy`, and warn about codecs that
are known to lose accuracy; used by the entry points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradcomp.codecs import Block, Codec, EntropyCoded, Identity, resolve
from gradcomp.engine.buckets import Gradient
from gradcomp.engine.optimizers import left_out, name_of
from gradcomp.engine.options import Advanced, CommonOptions, Options
from gradcomp.engine.rate import divides_by_squares, gains
from gradcomp.optim.base import SplitOptimizer
from gradcomp.payload.order import storage_shape
from gradcomp.payload.parameters import THIN_GROUP_NUMEL, Parameter, describe_parameters
from gradcomp.plan.accuracy import TABLE, TOLERANCES, Measured, decayed, family_of, within, written

AUTO = "auto"
# for optimizers that are unknown or not in the table: no training lost anything with it
FALLBACK = Block(8)
BLOCK = 128  # elements of the shortest rows that were measured


class Chosen(NamedTuple):
    """Codec and options that an entry point uses: the given ones, or those chosen for "auto"."""

    codec: Codec
    options: Options
    said: str  # text about the choice for `describe`, "" for none
    guarded: bool  # whether the guard watches the run (`gradcomp.engine.guard`)
    faster: Codec | None = None  # a codec that takes less time, for the guard to try


def resolve_auto(
    codec: Codec | str,
    common: CommonOptions,
    advanced: Advanced | None,
    optimizers: Sequence[Any],
    sources: Sequence[Gradient],
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> Chosen:
    """Return the given codec and options, or choose them for "auto".

    A residual decay that was not given is set to the one measured for the optimizer
    (`gradcomp.plan.accuracy.decayed`).

    "auto" chooses the codec with the fewest bits whose measured loss is tolerated, among rows whose
    codec resolves to the same second phase on this number of ranks (with ``nodes=``, of nodes) as
    on the measurement's. 2 ranks have none with most codecs, since they take all_gather, which
    rounds once; their rows count for more ranks, too, where codes are rounded twice.
    Explicit options win: a codec that needs other options is not chosen. Neither is one that needs
    a warm-up, because the number of steps is not known here. If a trained parameter is in no
    optimizer, another kind may update it, so the codec is one that is safe for all. All ranks
    choose the same: only the optimizers' classes and parameters, the options, the tensors' shapes
    and the number of ranks count.

    Raises:
        TypeError: an option is unknown.
        ValueError: an option is out of its range.
    """
    family = family_of(optimizers)
    mine = Options(**common, advanced=advanced)  # type: ignore[arg-type]
    if mine.warmup_codec is not None:
        mine = replace(mine, warmup_codec=decayed(resolve(mine.warmup_codec), family))
    name = name_of(optimizers)
    if not (isinstance(codec, str) and codec == AUTO):
        known = resolve(codec)
        given = decayed(known, family)
        changed = given.decay != known.decay
        said = f"residual_decay={given.decay:g} for {name}" if changed else ""
        return Chosen(given, mine, said, bool(mine.advanced.guard))
    left = left_out(optimizers, [(s.name, s.parameter) for s in sources]) if optimizers else []
    family = None if left else family
    guarded = mine.advanced.guard is not False and mine.advanced.transform is None
    nodes = mine.advanced.nodes
    ranks = world_size if nodes is None else len(nodes)
    # fused updates from payloads to weights cannot use preconditioned averages
    scales = mine.advanced.scale_lr is not False and all(
        divides_by_squares(one) and not isinstance(one, SplitOptimizer) for one in optimizers
    )
    found: list[tuple[Measured, Options]] = []
    for row in within(family, table):
        fits = _as_measured(row, ranks) and not row.start
        fitting = _with(row, mine, common, scales) if fits else None
        if fitting is not None:
            found.append((row, fitting))
    if found:
        row, chosen = found[0]
        codecs = [
            decayed(_not_thin(one.codec, chosen, sources), family)
            for one, options in found
            if options == chosen
        ]
        how = f" with {row.given()}" if row.given() else ""
        said = f"auto: {written(codecs[0])}{how} for {name}: {row.cost} ({row.training})"
        coded = isinstance(codecs[0], EntropyCoded)  # a code of variable lengths takes longest
        faster = (one for one in codecs if coded and not isinstance(one, EntropyCoded))
        return Chosen(codecs[0], chosen, said, guarded, next(faster, None))
    best = decayed(_not_thin(FALLBACK, mine, sources), family)
    why = ", which is safe for every optimizer; pass optimizer= for fewer bytes"
    if left:
        also = f" and {len(left) - 1} more" if len(left) > 1 else ""
        why = (
            f", because optimizer= ({name}) does not train {left[0]!r}{also}; pass a list of all"
            " optimizers of this model for fewer bytes"
        )
    elif optimizers:
        within_options = "nothing with these options is known to be within tolerance"
        reason = within_options if family else "this optimizer is not in the table"
        why = f" for {name}: not measured ({reason})"
    return Chosen(best, mine, f"auto: {written(best)}{why}", guarded)


def resolve_local(
    codec: Codec | str,
    optimizers: Sequence[Any],
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> tuple[Codec, str]:
    """Return the codec of local steps and "", or for "auto" the chosen one and text about it.

    "auto" chooses the fewest bits whose loss against local steps in fp32 is tolerated: what these
    lose against an exchange in every step is not the codec's. The choice depends only on the
    classes of the inner optimizers and the number of ranks.

    Raises:
        ValueError, TypeError: see `gradcomp.codecs.resolve`.
    """
    if not (isinstance(codec, str) and codec == AUTO):
        return resolve(codec), ""
    family, name = family_of(optimizers), name_of(optimizers)
    rows = [row for row in table if row.training.family == family and row.every > 1 and row.counts]
    exact = {row.training: row.loss for row in rows if isinstance(row.codec, Identity)}
    found = [
        (row.bits, row.loss - exact[row.training], row)
        for row in rows
        if row.training in exact and _as_measured(row, world_size)
    ]
    tolerated = [one for one in found if one[1] <= TOLERANCES[one[2].training.unit]]
    if not tolerated:
        return FALLBACK, f"auto: {written(FALLBACK)} for {name}: not measured with local steps"
    _, loss, row = min(tolerated, key=lambda one: one[:2])
    how = f"{loss:+.3f} {row.training.unit} to local steps in fp32"
    return row.codec, (
        f"auto: {written(row.codec)} for {name}: {how} ({row.training}, sync_every={row.every})"
    )


def warning_of(
    codec: Codec,
    options: Options,
    optimizers: Sequence[Any],
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> str | None:
    """Return a warning if a codec lost more than is tolerated under this family of optimizers and
    less with ``precondition=True``; None otherwise, and if ``precondition`` was given.
    """
    if options.precondition is not None:
        return None
    family = family_of(optimizers)
    phase = codec.resolved_second_phase(world_size)
    rows = [row for row in table if row.is_of(family, codec, phase)]
    plain = [row for row in rows if not row.precondition and not row.start]
    better = [row for row in rows if row.precondition and row.counts]
    if not plain or not better:
        return None
    worst, best = max(plain, key=Measured.excess), min(better, key=Measured.excess)
    if worst.excess() <= 1 or best.excess() >= worst.excess():
        return None
    done, unit = worst.training, worst.training.unit
    safe = next((row for row in within(family, table) if _as_measured(row, world_size)), None)
    more = ""
    if safe is not None:
        how = f" with {safe.given()}" if safe.given() else ""
        more = f"; {written(safe.codec)}{how} all but {max(0.0, safe.loss):.3f}"
    return (
        f"{codec!r} under {name_of(optimizers)} without precondition=True: {done.who} lost"
        f" {worst.loss:.2f} {unit} over fp32's {done.fp32:.2f} after {done.steps:,} steps."
        f" {best.given(start=not options.warmup_steps)} keeps all but {best.loss:.3f} {unit}{more}"
        f" ({done.source})"
    )


def _as_measured(row: Measured, ranks: int) -> bool:
    """Return whether a row's codec resolves to the same second phase on `ranks` ranks as on the
    measurement's, whether these had a second phase (reduce_scatter) or none (all_gather).
    """
    return row.phase_of(row.codec) == row.codec.resolved_second_phase(ranks)


def _with(row: Measured, mine: Options, given: CommonOptions, scales: bool) -> Options | None:
    """Return the user's options combined with those of a row; None if they exclude each other, or
    if the row was measured with different options.

    `scales`: with ``precondition`` the learning rate is scaled, too (`gradcomp.engine.rate`).
    """
    wanted: CommonOptions = {}
    if row.scale_lr != (row.precondition and scales and gains(row.codec)):
        return None
    if row.precondition != (mine.precondition is not None):
        if not row.precondition or "precondition" in given:
            return None
        wanted["precondition"] = True
    try:
        return replace(mine, **wanted)
    except ValueError:
        return None


def _not_thin(codec: Codec, options: Options, sources: Sequence[Gradient]) -> Codec:
    """Return the codec, with groups of `BLOCK` elements if short rows would need more scales."""
    shapes = [(source.name, storage_shape(source.like)) for source in sources]

    def compressed(codec: Codec) -> list[Parameter]:
        of = describe_parameters(shapes, codec.group_numel, options.min_numel, options.exempts)
        return [p for p in of if p.compressed]

    def scales(parameters: Sequence[Parameter]) -> int:
        return sum(-(-p.numel // p.group_numel) for p in parameters)

    rows, blocks = compressed(codec), codec.of_groups(BLOCK)
    thin = any(p.group_numel < min(THIN_GROUP_NUMEL, p.numel) for p in rows)
    fewer = thin and scales(compressed(blocks)) < scales(rows)
    return blocks if codec.form.scales_per_group and fewer else codec
