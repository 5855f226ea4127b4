"""FSDP2: the gradients of `fully_shard` models are reduce-scattered as packed codes, and if asked
for weights gathered in 8 bits.

`register` gives every FSDP module a reduce-scatter of its own. Pieces and owners are FSDP's: rank k
owns chunk k of every parameter. A rank encodes what it has of a chunk and sends it to its owner,
who averages what has come, in fp32; nothing is sent back. So gradients take one phase here where
DDP's take two, and gloo's own reduce-scatter, which is a whole all_reduce, sends 2 (N - 1) / N of
everything in fp32. `reduce` and `weights` are what one module does, `residuals` what is left out
between steps, `state` all of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from gradcomp.codecs import Codec, Ternary, resolve
from gradcomp.engine.options import Options, ShardedOptions, takes
from gradcomp.fsdp.state import FsdpState
from gradcomp.fsdp.weights import weights_codec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FsdpState", "register"]


@takes(ShardedOptions, others="FSDP2 leaves averages as shards with their owners")
def register(
    model: nn.Module,
    codec: Codec | str | None = None,
    *,
    weights: Codec | str | None = None,
    keep_weights: bool = False,
    residuals: str = "fp32",
    **common: Unpack[ShardedOptions],
) -> FsdpState:
    """Pack the gradients that a `fully_shard` model reduce-scatters. Collective.

    ::

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        state = gradcomp.fsdp.register(model)

    Training goes on as before: gradients come out averaged, a shard a rank. What is packed depends
    on parameters and the number of ranks alone, so another wrapping of the same model gives the
    same bits.

    Args:
        model: with FSDP modules inside, or one itself; each may share its parameters out over
            another group of ranks.
        codec: codec or name; None: `Ternary(error_feedback=False)`, which needs no memory.
            Residuals of `Ternary()`, `OneBit` and `Block` are on every rank as large as whole
            gradients, which FSDP is there to avoid: how large is logged.
        weights: what the weights are gathered in for forward and backward: "block8", "block4",
            "bfloat16", or `Block` with a group of its own; as they are when None. Shards and what
            optimizers do stay exact (Wang et al. 2023, ZeRO++, section 3.1).
        keep_weights: backward takes the weights that forward has gathered, which stay packed
            meanwhile: half of the gathers, for (N + 1) / N bytes a value of the whole model on
            every rank with "block8" (ZeRO++, section 3.2, keeps a copy inside a machine).
        residuals: "fp32", or "bf16" for half of the memory, of codecs that leave some.
        common: `min_numel`, `exclude` (of parameters as they were before they were sharded),
            `warmup_steps`, `warmup_codec` and `timeout_s` as of `gradcomp.ddp.register`. A step of
            the warm-up is one reduce-scatter of a module.

    Raises:
        TypeError: no module, or none inside that `fully_shard` has wrapped.
        ValueError: a codec that gathers; an option that is of other exchanges; several meshes in a
            module; `keep_weights` without `weights`.
        UnsupportedTensor: parameters on a device that gradcomp does not take.
        PeerMismatch: ranks with other parameters, codec or options.
        PeerLost: a rank did not answer.
    """
    packed = None if weights is None else weights_codec(weights)
    return FsdpState(
        model,
        Ternary(error_feedback=False) if codec is None else resolve(codec),
        Options(**common),
        weights=packed,
        keep_weights=keep_weights,
        residuals=residuals,
    )


def __getattr__(name: str) -> Any:
    more = ": it is called gradcomp.fsdp.register" if name == "compress" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{more}")
