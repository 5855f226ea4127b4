"""Averages of every codec over any communicator, and whether they are what the reference says."""

import numpy as np
import torch
from _expected import average
from _kinds import check_kinds

import gradcomp
from gradcomp import Block, EntropyCoded, Identity, OneBit, Ternary, TernGrad
from gradcomp.allreduce import Feedback
from gradcomp.exchange.second import owners_feed_back
from gradcomp.exchange.sizing import choose

CODECS = {
    "identity": Identity(),
    "terngrad": TernGrad(seed=3),
    "ternary": Ternary(residual_decay=0.25),
    "ternary-tensor": Ternary(step=2.5, group="tensor", second_phase="block4", residual_decay=0.5),
    "ternary-forgets": Ternary(group=24, error_feedback=False),
    "entropy": EntropyCoded(2.2),
    "entropy-block8": EntropyCoded(1, second_phase="block8", residual_decay=0.25),
    "onebit-decays": OneBit(residual_decay=0.25),
    "block2-decays": Block(2, residual_decay=0.25, second_phase="block4"),
    "terngrad-requantize": TernGrad(second_phase="requantize", clip_sigma=None),
    "terngrad-own": TernGrad(scale="own"),
    "terngrad-own-bf16": TernGrad(scale="own", second_phase="bf16"),
    "terngrad-row": TernGrad(group="row"),
    "terngrad-block": TernGrad(group=24, second_phase="requantize"),
    "terngrad-fp32": TernGrad(second_phase="fp32"),
    "terngrad-block4": TernGrad(second_phase="block4"),
    "terngrad-row-block2": TernGrad(scale="own", group="row", second_phase="block2"),
    "onebit": OneBit(),
    "onebit-block8": OneBit(second_phase="block8"),
    "onebit-tensor": OneBit(group="tensor"),
    "onebit-sign": OneBit(values="sign"),
    "onebit-block": OneBit(group=512, second_phase="bf16"),
    "block2": Block(2),
    "block4": Block(4, group=24),
    "block8": Block(8, error_feedback=False),
    "bf16": Identity("bf16"),
}
check_kinds(CODECS)


def gradient(rank, numel, step=0):
    generator = np.random.default_rng([rank, numel, step])
    return (generator.standard_normal(numel) * 0.1).astype(np.float32)


def average_over(comm, codec, shape, exchange, steps):
    """Return this rank's average of each step, with error feedback where the codec has it."""
    numel = int(np.prod(shape))
    keeps = codec.error_feedback or owners_feed_back(
        codec.resolved_second_phase(comm.world_size), codec
    )
    feedback = Feedback({7: numel}) if keeps else None
    out = []
    for step in range(steps):
        tensor = torch.from_numpy(gradient(comm.rank, numel, step)).reshape(shape).clone()
        gradcomp.all_reduce(tensor, codec, comm=comm, key=7, feedback=feedback, exchange=exchange)
        out.append(tensor.flatten().numpy())
    return out


def check(results, codec, shape, exchange, world, steps):
    numel = int(np.prod(shape))
    strategy = choose(codec, world, exchange)
    residuals = owners = None
    for step in range(steps):
        grads = [gradient(r, numel, step) for r in range(world)]
        wanted, residuals, owners = average(
            grads,
            codec,
            strategy,
            step=step,
            parameter=7,
            shape=shape,
            residuals=residuals,
            owner_residuals=owners,
        )
        for rank in range(world):
            got = results[rank][step]
            assert got.tobytes() == wanted.tobytes(), (
                rank,
                step,
                np.flatnonzero(got != wanted)[:5],
            )
