"""What the doors do with the table of `gradcomp.plan.accuracy`: ``codec="auto"``, and a warning
where a codec is known to lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gradcomp.codecs import Block, Codec, resolve
from gradcomp.engine.buckets import Source
from gradcomp.engine.options import Changes, Options
from gradcomp.payload.order import storage_shape
from gradcomp.payload.parameters import THIN_GROUP_NUMEL, describe_parameters
from gradcomp.plan.accuracy import OWN_WARM_UP, TABLE, Measured, decayed, family_of, within, written

AUTO = "auto"
# for optimizers that are not known or not in the table: it trains under all that were tried
FALLBACK = Block(4)
BLOCK = 128  # the shortest rows that were measured


def settle(
    codec: Codec | str,
    options: Options | None,
    changes: Mapping[str, Any],
    optimizer: Any,
    sources: Sequence[Source],
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> tuple[Codec, Options, str]:
    """Return codec, options and what `describe` is to say of them: as they are given, or for "auto"
    chosen.

    A residual decay that nobody named is the one that was measured for the optimizer
    (`gradcomp.plan.accuracy.decayed`).

    The choice depends on the optimizer's class, the options, the tensors' shapes and the number of
    ranks alone, so that all ranks make the same. It is the way with the fewest bits whose measured
    loss is tolerated, with the second phase that so many ranks have, and that goes with what the
    user gave; what the user gave counts. A way with a warm start is none: the number of steps is
    not known here.

    Args:
        codec: a codec, a name, or "auto".
        options, changes: as the user gave them; a momentum that travels is added (`Options.under`).
        optimizer: read for its class; None: not known.
        sources: the tensors.
        world_size: ranks; what travels between nodes does so among as many as ``nodes=`` says.
        table: of what was measured.

    Raises:
        TypeError: an option that there is not; an optimizer's class or name in place of an
            optimizer.
        ValueError: an option out of its range, or that does not go with the optimizer.
    """
    family = None if optimizer is None else family_of(optimizer)
    mine = Options.of(options, **changes).under(optimizer)
    if mine.start_codec is not None:
        mine = Options.of(mine, start_codec=decayed(resolve(mine.start_codec), optimizer))
    if not (isinstance(codec, str) and codec == AUTO):
        known = resolve(codec)
        found = decayed(known, optimizer)
        said = (
            f"residual_decay={found.decay:g} for {type(optimizer).__name__}"
            if found.decay != known.decay
            else ""
        )
        return found, mine, said
    if optimizer is None:
        best = decayed(_not_thin(FALLBACK, mine, sources), None)
        return (
            best,
            mine,
            (
                f"auto: {written(best)}, which is safe for every optimizer; pass optimizer= for"
                " fewer bytes"
            ),
        )
    given = {
        f.name
        for f in fields(Options)
        if options is not None and getattr(options, f.name) != f.default
    }
    name = type(optimizer).__name__
    ranks = world_size if mine.nodes is None else len(mine.nodes)
    for row in within(family, table):
        needs_steps = row.start and family not in OWN_WARM_UP
        chosen = (
            _with(row, mine, given | changes.keys())
            if _as_measured(row, ranks) and not needs_steps
            else None
        )
        if chosen is not None:
            best = decayed(_not_thin(row.codec, chosen, sources), optimizer)
            # the optimizer's own warm-up included
            how = f" with {row.given()}" if row.given() else ""
            return (
                best,
                chosen,
                f"auto: {written(best)}{how} for {name}: {row.cost} ({row.training})",
            )
    best = decayed(_not_thin(FALLBACK, mine, sources), optimizer)
    why = (
        "nothing with these options is known to be within tolerance"
        if family
        else "this optimizer is not in the table"
    )
    return best, mine, f"auto: {written(best)} for {name}: not measured ({why})"


def warning_of(
    codec: Codec,
    options: Options,
    optimizer: Any,
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> str | None:
    """Return what is to be said of a codec that lost under such an optimizer and loses less with
    other options, or None.
    """
    family = None if optimizer is None else family_of(optimizer)
    phase = codec.resolved_second_phase(world_size)
    rows = [
        row
        for row in table
        if row.training.family == family
        and row.codec.name == codec.name
        and row.codec.rotates == codec.rotates
        and row.phase_of(row.codec) == phase
        and row.every == 1
    ]
    plain = [row for row in rows if not row.precondition and not row.start]
    better = [row for row in rows if row.precondition and row.counts]
    if options.precondition is not None or not plain or not better:
        return None
    worst, best = max(plain, key=Measured.excess), min(better, key=Measured.excess)
    if worst.excess() <= 1 or best.excess() >= worst.excess():
        return None
    done, safe = (
        worst.training,
        next((row for row in within(family, table) if _as_measured(row, world_size)), None),
    )
    unit = done.unit
    more = f"; {written(safe.codec)} all but {max(0.0, safe.loss):.3f}" if safe is not None else ""
    return (
        f"{codec!r} under {type(optimizer).__name__} without precondition=True: {done.who} lost"
        f" {worst.loss:.2f} {unit} over fp32's {done.fp32:.2f} after {done.steps:,} steps."
        f" {best.given(start=not options.start_step)} keeps all but {best.loss:.3f} {unit}{more}"
        f" ({done.source})"
    )


def _as_measured(row: Measured, ranks: int) -> bool:
    """Whether the codec of a row has the second phase among so many ranks that it was measured
    with.
    """
    return row.phase_of(row.codec) == row.codec.resolved_second_phase(ranks)


def _with(row: Measured, mine: Options, given: set[str]) -> Options | None:
    """Return the user's options with those of a row; None where they exclude each other, or the
    row measured others.
    """
    wanted: Changes = {}
    if row.precondition != (mine.precondition is not None):
        if not row.precondition or "precondition" in given:
            return None
        wanted["precondition"] = True
    if row.training.family in OWN_WARM_UP and "start_codec" not in given:
        wanted["start_codec"] = row.start_codec
    try:
        return Options.of(mine, **wanted)
    except ValueError:
        return None


def _not_thin(codec: Codec, options: Options, sources: Sequence[Source]) -> Codec:
    """Return the codec with scales of blocks in place of rows where rows are so short that
    scales cost more than codes.
    """
    shapes = [(source.name, storage_shape(source.like)) for source in sources]
    blocks = codec.of_groups(BLOCK)
    by_rows, by_blocks = (
        [
            p
            for p in describe_parameters(shapes, c.group_numel, options.min_numel, options.exempts)
            if p.compressed
        ]
        for c in (codec, blocks)
    )
    rows_are_thin = any(p.group_numel < min(THIN_GROUP_NUMEL, p.numel) for p in by_rows)
    fewer = sum(-(-p.numel // p.group_numel) for p in by_blocks) < sum(
        -(-p.numel // p.group_numel) for p in by_rows
    )
    return blocks if codec.form.scales_per_group and rows_are_thin and fewer else codec
