"""What an exchange must give, from tests/reference alone: one parameter, every codec, every way."""

import numpy as np
from reference import codec as ref
from reference import payload as ref_payload

from gradcomp.codecs import Block
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import choose
from gradcomp.payload.pieces import ByElements


def average(
    grads,
    codec,
    strategy,
    *,
    step=0,
    parameter=0,
    shape=None,
    residuals=None,
    owner_residuals=None,
    start=0,
    ranks=None,
    transform=lambda mean: mean,
):
    """Return (average float32, new residuals, new owner residuals) of one compressed parameter.

    grads: one flat float32 array a rank. residuals, owner_residuals: one array a rank or None.
    start: where in the parameter the gradients begin. ranks: whose random numbers are drawn.
    transform: what owners do to the mean.
    """
    ranks = ranks or range(len(grads))
    n, world = grads[0].size, len(grads)
    group = codec.group_numel(tuple(shape) if shape is not None else (n,))
    whole = ref.Piece(n, group, start)
    if codec.name == "identity":
        return transform(ref.float_average(grads)), None, None
    if codec.name == "bfloat16":
        rounded = [ref.to_float32(ref.from_float32(g, ref.BF16)) for g in grads]
        mean = transform(ref.float_average(rounded))
        if strategy.exchange == "reduce_scatter":
            mean = ref.to_float32(ref.from_float32(mean, ref.BF16))
        return mean, None, None
    if codec.name == "terngrad":
        clip = codec.clip_sigma or 0.0
        scales = [ref.ternary_scales(g, whole, clip) for g in grads]
        if codec.shares_scale:
            scales = [np.maximum.reduce(scales)] * world
        codes = [
            ref.ternary_encode(g, s, whole, ref.Key(codec.seed, k, step, parameter, 0))
            for k, g, s in zip(ranks, grads, scales)
        ]
        mean = ref.ternary_sum_decode(codes, scales, whole, codec.shares_scale)
        new = None
    else:
        old = residuals or [None] * world
        pieces = [whole]
        if not codec.form.cuts and strategy.exchange == "reduce_scatter":
            bounds = [ByElements(world).bounds(n, k) for k in range(world)]
            pieces = [ref.Piece(last - first, group, start + first) for first, last in bounds]
        encoded = [fed_back_in(pieces, codec, g, r) for g, r in zip(grads, old)]
        mean = ref.float_average([decoded for decoded, _ in encoded])
        new = [left for _, left in encoded] if codec.error_feedback else None
    mean = transform(mean)
    if strategy.exchange == "all_gather" or strategy.second_phase in ("exact", "fp32"):
        return mean, new, None
    if strategy.second_phase == "bf16":
        return ref.to_float32(ref.from_float32(mean, ref.BF16)), new, None
    out, owners = np.empty(n, np.float32), []
    for k in range(world):
        first, last = ByElements(world).bounds(n, k)
        piece, part = ref.Piece(last - first, group, start + first), mean[first:last]
        if last == first:
            owners.append(np.zeros(0, np.float32))
        elif strategy.second_phase.startswith("block"):
            old = owner_residuals[k] if owner_residuals else None
            out[first:last], left = feed_back(
                Block(int(strategy.second_phase[5:]), residual_decay=codec.decay), part, piece, old
            )
            owners.append(left)
        elif codec.name == "terngrad":
            s = ref.ternary_scales(part, piece, 0.0)
            codes = ref.ternary_encode(
                part, s, piece, ref.Key(codec.seed, ranks[k], step, parameter, 1)
            )
            out[first:last] = ref.ternary_sum_decode([codes], [s], piece, False)
        else:
            old = owner_residuals[k] if owner_residuals else None
            out[first:last], left = feed_back(codec, part, piece, old)
            owners.append(left)
    return out, new, (owners or None) if owners_feed_back(strategy.second_phase, codec) else None


def fed_back_in(pieces, codec, values, residual):
    """Return (decoded, new residual) of a codec that encodes these pieces, one after the other."""
    edges = np.cumsum([piece.numel for piece in pieces])[:-1]
    old = [None] * len(pieces) if residual is None else np.split(residual, edges)
    parts = zip(np.split(values, edges), pieces, old)
    if not values.size:
        return values, values
    found = [feed_back(codec, part, piece, left) for part, piece, left in parts if piece.numel]
    return tuple(np.concatenate(side) for side in zip(*found))


def feed_back(codec, values, piece, residual):
    """Return (decoded, new residual) of a codec with error feedback."""
    kind, option = fed_back(codec)
    encode, decode = ref_payload.FED_BACK[kind]
    scales, codes, left = encode(values, piece, option, residual, codec.decay)
    return decode(codes, scales, piece, option), left


def fed_back(codec):
    """Return the reference's name of a codec with error feedback, and the option of its codes."""
    if codec.name == "onebit":
        return "onebit", (-1.0, 1.0) if codec.options().get("values") == "sign" else None
    if codec.name == "ternary":
        return "nearest", codec.step
    if codec.name == "entropy":
        return "entropy", codec.form.stream_nbytes
    return "block", codec.bits


def hierarchical(grads, codec, nodes, *, step=0, parameter=0, shape=None, state=None):
    """Return (average float32, state for the next step): fp32 means of nodes, then the codec,
    shard by shard.
    """
    size, n = len(nodes[0]), grads[0].size
    means = [ref.float_average([grads[r] for r in node]) for node in nodes]
    out, after = np.empty(n, np.float32), []
    for place in range(size):
        first, last = ByElements(size).bounds(n, place)
        residuals, owners = state[place] if state else (None, None)
        out[first:last], *left = average(
            [m[first:last] for m in means],
            codec,
            choose(codec, len(nodes)),
            step=step,
            parameter=parameter,
            shape=shape if shape is not None else (n,),
            residuals=residuals,
            owner_residuals=owners,
            start=first,
            ranks=[node[place] for node in nodes],
        )
        after.append(left)
    return out, after


class Adagrad:
    """AdaGrad's formula in NumPy, float32 rounding at every operation."""

    def __init__(self):
        self.total = np.float32(0)

    def __call__(self, g):
        self.total = self.total + g * g
        return g / (np.sqrt(self.total) + np.float32(1e-10))
