"""A warm start that is packed itself: nothing is lost on the way from one codec to the other."""

import re

import pytest
import torch
from _averaging import Run, gradient, same
from _models import bits
from _ranks import each_rank, logged, run_local
from _saved import parts_of

from gradcomp import Block, EntropyCoded, Identity, OneBit, Ternary, TernGrad
from gradcomp.engine.options import Options

START, STEPS = 4, 8
SHAPES = {"w": (40, 60), "v": (70,)}


def run(comm, codec, **options):
    """Return averages of all steps, bytes of every step, and the averager."""
    options = {"warmup_steps": START, "warmup_codec": Block(4), **options}
    mine, sent = Run(comm, codec, SHAPES, **options), [0]
    found = []
    for step in range(STEPS):
        found.append(mine.step(step))
        sent.append(mine.averager.stats.bytes_sent)
    return found, torch.tensor(sent).diff().tolist(), mine.averager


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("codec", [OneBit(), Block(2)], ids=repr)
def test_what_codes_leave_out_goes_over_to_the_codec_that_follows(codec, world):
    """Gradients = averages + residuals of all ranks + those of owners, across the change."""

    def one(comm):
        averages, sent, averager = run(comm, codec)
        return averages, sent, parts_of(averager.state_dict())

    ranks = run_local(world, one)
    for name, shape in SHAPES.items():
        given = sum(gradient(name, shape, s, r) for s in range(STEPS) for r in range(world)) / world
        left = sum(parts["residual"][name] for *_, parts in ranks).view(shape) / world
        owned = [p["owner_residual"][name] for *_, p in ranks if p["owner_residual"]]
        owed = torch.cat(owned).view(shape) if owned else torch.zeros(shape)
        got = sum(averages[name] for averages in ranks[0][0])
        torch.testing.assert_close(got + left + owed, given, atol=1e-5, rtol=0)
    sent = ranks[0][1]
    assert len(set(sent[:START])) == len(set(sent[START:])) == 1
    assert sent[START] < 0.7 * sent[0]


@pytest.mark.parametrize("codec", [OneBit(), TernGrad()], ids=repr)
@pytest.mark.parametrize(
    "options",
    [{"precondition": True}, {"exchange": "hierarchical", "nodes": [[0, 1], [2, 3]]}],
    ids=str,
)
def test_it_goes_with_other_options_and_replicas_stay_equal(codec, options):
    def one(comm):
        averages, sent, averager = run(comm, codec, **options)
        assert f"from step {START} on ({Block(4)!r} before it)" in averager.describe()
        return [bits(one.values()) for one in averages], sent

    ranks = run_local(4, one)
    assert all(averages == ranks[0][0] for averages, _ in ranks)
    assert sum(sent[0] for _, sent in ranks) > sum(sent[-1] for _, sent in ranks)


@pytest.mark.parametrize("codec", [Ternary(), EntropyCoded(2.2), Block(8), "terngrad"], ids=str)
@pytest.mark.parametrize("packed", [EntropyCoded(2.2), Block(4), OneBit(), "terngrad"], ids=str)
@each_rank(3, "local")
def test_any_codec_may_pack_the_warm_up(comm, codec, packed):
    """Each has its own groups."""
    averages = run(comm, codec, warmup_codec=packed)[0][0]
    for name, shape in SHAPES.items():
        given = sum(gradient(name, shape, 0, rank) for rank in range(3)) / 3
        assert torch.cosine_similarity(averages[name].view(-1), given.view(-1), dim=0) > 0.5


@each_rank(2, "local")
def test_a_warm_start_in_identity_is_that_in_fp32(comm):
    packed, plain = (run(comm, OneBit(), warmup_codec=codec)[0] for codec in (Identity(), None))
    assert all(same(a, b) for a, b in zip(packed, plain, strict=True))


@pytest.mark.parametrize(("steps", "says"), [(START, 1), (START + 1, 0)])
def test_a_run_that_ended_in_its_warm_up_says_so(steps, says):
    def one(comm):
        mine = Run(comm, OneBit(), SHAPES, warmup_steps=START)
        mine.steps(steps)
        mine.averager.close()

    with logged() as found:
        run_local(2, one)
    wanted = (
        rf"nothing was compressed: {START} exchanges, .* to the warm-up \(warmup_steps={START}\)"
    )
    assert sum(bool(re.match(wanted, text)) for text in found) == says


def test_what_is_refused():
    with pytest.raises(TypeError, match="codec must be"):
        Options(warmup_codec=3, warmup_steps=3)
    for codec, steps, said in (
        (Block(4), 0, r"warmup_codec=Block\(bits=4.*requires warmup_steps > 0, got 0"),
        ("block5", 3, "unknown codec 'block5'"),
    ):
        with pytest.raises(ValueError, match=said):
            Options(warmup_codec=codec, warmup_steps=steps)
    assert repr(Options(warmup_codec="block4", warmup_steps=3).warmup_codec) == repr(Block(4))
