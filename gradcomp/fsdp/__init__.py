"""FSDP2: compressed reduce-scatter of the gradients of `fully_shard` models, and optionally a
compressed all-gather of their weights.

`register` replaces the reduce-scatter of every FSDP module. Owners are FSDP's: rank k owns chunk k
of every parameter. Each rank encodes its gradients of a chunk and sends them to the owner, who
averages them in fp32. Nothing is sent back, so gradients need only the first of DDP's two phases.
gloo's own reduce-scatter is an all_reduce, which sends 2 (N - 1) / N of all values in fp32.
`reduce` and `weights` handle one module, `residuals` the residuals, `state` the whole model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradcomp.codecs import Codec, resolve
from gradcomp.engine.options import Options, ShardedOptions, takes
from gradcomp.fsdp.state import FsdpState
from gradcomp.fsdp.weights import weights_codec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FsdpState", "register"]


@takes(
    ShardedOptions,
    others="each rank keeps only its own shard of the averages",
    absent={
        "comm": "gradients go over the process group of each module's mesh: fully_shard(mesh=...)",
        "optimizer": "no setting depends on it; under Adam keep the default codec, or set"
        " residual_decay=0.25",
    },
)
def register(
    model: nn.Module,
    codec: Codec | str = "auto",
    *,
    weights: Codec | str | None = None,
    keep_weights: bool = False,
    residuals: str = "fp32",
    **common: Unpack[ShardedOptions],
) -> FsdpState:
    """Compress the gradients that a `fully_shard` model reduce-scatters. Collective.

    ::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = gradcomp.fsdp.register(model)

    The training loop does not change: every rank gets its shard of the averaged gradients. Payloads
    depend only on parameters and the number of ranks, so wrapping other submodules of the same
    model gives the same bits.

    Args:
        model: an FSDP module, or a model that contains some. Each may be sharded over another group
            of ranks.
        codec: codec or name; "auto": `Ternary(error_feedback=False)`, which needs no memory; its
            measured loss under AdamW is logged. With `Ternary()`, `OneBit` and `Block` every rank
            has residuals as large as the unsharded gradients; their size is logged. Rank 0 logs
            `FsdpState.describe` to the logger "gradcomp", at INFO.
        weights: codec of the weights that are gathered for forward and backward: "block8",
            "block4", "bfloat16", or `Block` with another group; None: not compressed. Shards and
            optimizer steps stay exact (Wang et al. 2023, ZeRO++, section 3.1).
        keep_weights: keep the encoded weights of forward for backward. This halves the number of
            gathers; with "block8" every rank needs (N + 1) / N bytes per value of the whole model
            (ZeRO++, section 3.2, keeps a copy inside a machine).
        residuals: dtype in which residuals are stored: "fp32" ("float32"), or "bf16" ("bfloat16")
            for half of the memory.
        common: `min_numel`, `exclude` (both for unsharded parameters), `warmup_steps`,
            `warmup_codec`, `grad_scaler` and `timeout_s`, see `gradcomp.ddp.register`. A step of
            the warm-up is one reduce-scatter of a module. `grad_scaler` doubles the memory of
            residuals: a step that it skips undoes them.

    Raises:
        TypeError: not a module, or no module in it is wrapped by `fully_shard`; an option of other
            exchanges.
        ValueError: an unknown codec; an option out of its range; several meshes in a
            module; `keep_weights` without `weights`; the model is registered already.
        UnsupportedTensor: parameters on an unsupported device, or with sparse gradients.
        PeerMismatch: a rank has other parameters, another codec or other options.
        PeerLost: a rank did not answer.
    """
    chosen = ""
    if isinstance(codec, str) and codec == "auto":
        from gradcomp.plan.accuracy import SHARDED

        codec, chosen = SHARDED.codec, f"auto: {SHARDED.cost} to fp32 ({SHARDED.training})"
        chosen += "; FSDP2 was measured under AdamW only, not under SGD"
    return FsdpState(
        model,
        resolve(codec),
        Options(**common),
        weights=None if weights is None else weights_codec(weights),
        keep_weights=keep_weights,
        residuals=residuals,
        chosen=chosen,
    )


def __getattr__(name: str) -> Any:
    more = ": it is called gradcomp.fsdp.register" if name == "compress" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{more}")
