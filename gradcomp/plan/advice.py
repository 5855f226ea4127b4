"""What the entry points do with the table of `gradcomp.plan.accuracy`: ``codec="auto"``, and a
warning where a codec is known to lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gradcomp.codecs import Block, Codec, resolve
from gradcomp.engine.buckets import Source
from gradcomp.engine.options import Advanced, CommonOptions, Options
from gradcomp.engine.rate import divides_by_squares, gains, unwrapped
from gradcomp.optim.base import SplitOptimizer
from gradcomp.payload.order import storage_shape
from gradcomp.payload.parameters import THIN_GROUP_NUMEL, Parameter, describe_parameters
from gradcomp.plan.accuracy import TABLE, Measured, decayed, family_of, within, written

AUTO = "auto"
# for optimizers that are not known or not in the table: it trains under all that were tried
FALLBACK = Block(4)
BLOCK = 128  # the shortest rows that were measured


class Chosen(NamedTuple):
    """What an entry point goes by.

    Attributes:
        codec, options: those given, or for "auto" those that were chosen.
        said: what `describe` says of them.
        guarded: whether the run is watched (`gradcomp.engine.guard`).
    """

    codec: Codec
    options: Options
    said: str
    guarded: bool


def resolve_auto(
    codec: Codec | str,
    common: CommonOptions,
    advanced: Advanced | None,
    optimizer: Any,
    sources: Sequence[Source],
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> Chosen:
    """Return codec and options: those given, or for "auto" those that are chosen.

    A residual decay that was not given is the one that was measured for the optimizer
    (`gradcomp.plan.accuracy.decayed`).

    The choice depends on the optimizer's class, the options, the tensors' shapes and the number of
    ranks alone, so that all ranks make the same. It is the codec with the fewest bits whose
    measured loss is tolerated, with the second phase that so many ranks have. Explicit options win:
    what needs others is not chosen. Nor is what needs a warm start, because the number of steps is
    not known here.

    Args:
        codec: a codec, a name, or "auto".
        common, advanced: as given.
        optimizer: read for its class; None: not known.
        sources: the tensors.
        world_size: ranks; between nodes those of ``nodes=`` count.
        table: of what was measured.

    Raises:
        TypeError: an unknown option; an optimizer's class or name in place of an optimizer.
        ValueError: an option out of its range.
    """
    family = None if optimizer is None else family_of(optimizer)
    mine = Options(**common, advanced=advanced)  # type: ignore[arg-type]
    if mine.warmup_codec is not None:
        mine = replace(mine, warmup_codec=decayed(resolve(mine.warmup_codec), optimizer))
    name = type(unwrapped(optimizer)).__name__
    if not (isinstance(codec, str) and codec == AUTO):
        known = resolve(codec)
        found = decayed(known, optimizer)
        changed = found.decay != known.decay
        said = f"residual_decay={found.decay:g} for {name}" if changed else ""
        return Chosen(found, mine, said, bool(mine.advanced.guard))
    guarded = mine.advanced.guard is not False and mine.advanced.transform is None
    nodes = mine.advanced.nodes
    ranks = world_size if nodes is None else len(nodes)
    scales = (
        optimizer is not None
        and mine.scale_lr is not False
        and divides_by_squares(optimizer)
        # preconditioned averages would not go straight from payloads to weights
        and not isinstance(optimizer, SplitOptimizer)
    )
    for row in within(family, table):
        fits = _as_measured(row, ranks) and not row.start
        chosen = _with(row, mine, common, scales) if fits else None
        if chosen is not None:
            best = decayed(_not_thin(row.codec, chosen, sources), optimizer)
            how = f" with {row.given()}" if row.given() else ""
            said = f"auto: {written(best)}{how} for {name}: {row.cost} ({row.training})"
            return Chosen(best, chosen, said, guarded)
    best = decayed(_not_thin(FALLBACK, mine, sources), optimizer)
    why = ", which is safe for every optimizer; pass optimizer= for fewer bytes"
    if optimizer is not None:
        within_options = "nothing with these options is known to be within tolerance"
        reason = within_options if family else "this optimizer is not in the table"
        why = f" for {name}: not measured ({reason})"
    return Chosen(best, mine, f"auto: {written(best)}{why}", guarded)


def warning_of(
    codec: Codec,
    options: Options,
    optimizer: Any,
    world_size: int,
    table: Sequence[Measured] = TABLE,
) -> str | None:
    """Return the warning for a codec that lost under such an optimizer and loses less with
    ``precondition=True``, or None.
    """
    if options.precondition is not None:
        return None
    family = None if optimizer is None else family_of(optimizer)
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
    name = type(unwrapped(optimizer)).__name__
    return (
        f"{codec!r} under {name} without precondition=True: {done.who} lost"
        f" {worst.loss:.2f} {unit} over fp32's {done.fp32:.2f} after {done.steps:,} steps."
        f" {best.given(start=not options.warmup_steps)} keeps all but {best.loss:.3f} {unit}{more}"
        f" ({done.source})"
    )


def _as_measured(row: Measured, ranks: int) -> bool:
    """Whether a row's codec has among so many ranks the second phase it was measured with."""
    return row.phase_of(row.codec) == row.codec.resolved_second_phase(ranks)


def _with(row: Measured, mine: Options, given: CommonOptions, scales: bool) -> Options | None:
    """Return the user's options with those of a row; None where they exclude each other, or the
    row was measured with others.

    `scales`: preconditioned gradients come with a larger learning rate (`gradcomp.engine.rate`).
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


def _not_thin(codec: Codec, options: Options, sources: Sequence[Source]) -> Codec:
    """Return the codec with blocks in place of rows where scales of short rows outweigh codes."""
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
