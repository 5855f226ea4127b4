"""One line for logs: what is compressed, what is not, the exchange, the expected ratio."""

from __future__ import annotations

from gradcomp.engine.layouts import Layouts


def describe(layouts: Layouts) -> str:
    """Return the line."""
    trained = [p for p in layouts.parameters if p.index in layouts.trained]
    packed, plain = ([p for p in trained if p.compressed is kind] for kind in (True, False))
    codec, world, chosen = layouts.codec, layouts.comm.world_size, layouts.options.transform
    where = (
        "the aggregate"
        if chosen is not None and chosen.place == "owner"
        else "each rank's gradients"
    )
    transform = f"; {chosen!r} on {where}" if chosen is not None else ""
    if layouts.options.precondition is not None:
        transform += f"; {layouts.options.precondition!r}"
    if world == 1:
        return f"gradcomp: {codec!r} is off: world size 1, gradients pass through{transform}"
    if not layouts.route.packs:
        return f"gradcomp: {codec!r} is off: all {world} ranks are on one node and average in fp32"
    before = f" ({layouts.options.start_codec!r} before it)" if layouts.options.start_codec else ""
    start = (
        f", from step {layouts.options.start_step} on{before}" if layouts.options.start_step else ""
    )
    return (
        f"gradcomp: {codec!r} on {len(packed)} tensors ({sum(p.numel for p in packed):,} values), "
        f"fp32 for {len(plain)} ({sum(p.numel for p in plain):,} values), "
        f"{layouts.strategy} over {world} ranks{start}; "
        f"expected {layouts.expected_ratio():.1f}x fewer bytes than an fp32 ring{transform}"
    )
