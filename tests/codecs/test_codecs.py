"""encode and decode of one tensor: what users call, on every tier, with good and bad arguments."""

import itertools
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from _ranks import run_local
from hypothesis import given
from hypothesis import strategies as st

import gradcomp
from gradcomp import (
    Block,
    CorruptPayload,
    EntropyCoded,
    Identity,
    OneBit,
    Ternary,
    TernGrad,
    UnsupportedTensor,
)
from gradcomp.bench import methods
from gradcomp.codecs import RngKey
from gradcomp.fsdp.residuals import ModelResiduals
from gradcomp.memory.saved import Saved, write
from gradcomp.payload import wire

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    bits=st.sampled_from([2, 4, 8]),
    numel=st.integers(1, 3000),
    group=st.integers(1, 700),
    seed=st.integers(0, 1000),
)
def test_blocks_leave_at_most_half_a_step(bits, numel, group, seed):
    """But for the outermost codes of 2 bits."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    left = torch.zeros(numel)
    Block(bits, group=group).encode(x, residual=left)
    for part, rest in zip(x.split(group), left.abs().split(group), strict=True):
        if bits == 2:
            step = 0.9957 * part.double().square().mean().sqrt()
            assert (rest[part.abs() < 2 * step] <= 0.5001 * step).all()
        else:
            assert rest.max() <= 0.5001 * part.abs().max() / (7 if bits == 4 else 127)


def test_block_of_a_known_vector():
    """Root mean square 2: with 2 bits the step is 1.9914; with 4 bits it is a seventh of the
    largest.
    """
    x = torch.tensor([-2.0, 2.0, -2.0, 2.0])
    assert Block(2).decode(Block(2).encode(x)).tolist() == pytest.approx(
        [-2.9871, 2.9871, -2.9871, 2.9871], rel=1e-6
    )
    x = torch.tensor([-14.0, 0.0, 2.9, 7.1, -0.9])
    assert Block(4).decode(Block(4).encode(x)).tolist() == [-14, 0, 2, 8, 0]


def test_encoding_again_without_a_key_warns_once(monkeypatch):
    """The same draws on 8 ranks: an average as noisy as one payload (std 0.458 where 8 ranks of
    their own give 0.162).
    """
    monkeypatch.setattr("gradcomp.codecs.terngrad._encodings_without_key", itertools.count())
    x, codec = torch.full((20_000,), 0.3), TernGrad(clip_sigma=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codec.encode(x, key=RngKey(rank=1))
        first = codec.encode(x, scale=1.0)
        OneBit().encode(x), OneBit().encode(x)
    said = "same random numbers at every call and on every rank"
    with pytest.warns(UserWarning, match=said) as seen:
        again = [codec.encode(x, scale=1.0) for _ in range(2)]
    assert all(torch.equal(payload, first) for payload in again)
    (mine,) = [one for one in seen if "same random numbers" in str(one.message)]
    assert mine.filename == __file__
    ranks = [codec.decode(codec.encode(x, scale=1.0, key=RngKey(rank=r))) for r in range(8)]
    assert codec.decode(first).std() > 0.45
    assert sum(ranks).div(8).std() < 0.17


def test_encoding_with_a_residual_allocates_no_plane():
    """A fresh plane and its page faults made one encoding as dear as eight memcpys."""
    x, residual, codec = torch.randn(1 << 20), torch.zeros(1 << 20), OneBit(group=512)
    out = codec.encode(x, residual=residual)
    with torch.profiler.profile(profile_memory=True) as seen:
        codec.encode(x, residual=residual, out=out)
    assert sum(max(0, e.cpu_memory_usage) for e in seen.events()) < 4096


@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_decode_to_one_and_lose_nothing(tier, dtype):
    codec, generator = OneBit(values="sign", group=64), torch.Generator().manual_seed(0)
    residual, sent, given = torch.zeros(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(400):
        x = (torch.randn(1000, generator=generator) * 0.3 + 0.1).to(dtype)
        x[64:128] = 0  # a group without gradient says nothing and moves nothing
        before = residual.clone()
        q = codec.decode(codec.encode(x, residual=residual))
        assert torch.equal(residual, (x.float() + before) - q)
        assert set(q.tolist()) == {-1.0, 0.0, 1.0}
        assert (q[64:128] == 0).all() and q.count_nonzero() == 936
        sent, given = sent + q, given + x.float()
    assert residual.abs().max() < 3
    assert (sent - given).abs().max() < 3  # of a sum of about 40: what was not sent yet


def test_given_scale():
    x = torch.tensor([0.5, -2.0, 0.0, 1.0])
    codec = TernGrad(clip_sigma=None)
    decoded = codec.decode(codec.encode(x, scale=1.0))
    assert decoded[1] == -1 and decoded[3] == 1 and decoded[2] == 0
    assert codec.decode(codec.encode(x, scale=0.0)).tolist() == [0.0] * 4
    rows = TernGrad(group=2, clip_sigma=None)
    assert rows.decode(rows.encode(x, scale=torch.tensor([2.0, 1.0])))[1] == -2


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: TernGrad(clip_sigma=0), "0"),
        (lambda: TernGrad(clip_sigma=-1.0), "-1.0"),
        (lambda: OneBit(values="signs"), "signs"),
        (lambda: TernGrad(clip_sigma=float("nan")), "nan"),
        (lambda: TernGrad(scale="global"), "global"),
        (lambda: TernGrad(group="column"), "column"),
        (lambda: TernGrad(group=0), "0"),
        (lambda: TernGrad(group=True), "True"),
        (lambda: TernGrad(second_phase="int8"), "int8"),
        (lambda: TernGrad(scale="own", second_phase="exact"), "own"),
        (lambda: TernGrad(seed=-1), "-1"),
        (lambda: TernGrad(seed=2**32), str(2**32)),
        (lambda: OneBit(second_phase="exact"), "exact"),
        (lambda: OneBit(group=-4), "-4"),
        (lambda: Block(3), "3"),
        (lambda: Block(True), "True"),
        *(
            (partial(EntropyCoded, bits), f"from 1 to 4, got {bits!r}; Block")
            for bits in (0.9, 4.1, math.nan, True, "2")
        ),
        (lambda: Block(2, second_phase="exact"), "exact"),
        (lambda: Block(4, group="channel"), "channel"),
        (lambda: Block(4, error_feedback=1.5), "1.5"),
        (
            lambda: Block(8, error_feedback=False).encode(torch.ones(3), residual=torch.ones(3)),
            "residual",
        ),
        (lambda: Block(2).encode(torch.ones(3), scale=1.0), "1.0"),
        (lambda: Identity("fp8"), "fp8"),
        (lambda: OneBit(error_feedback="yes"), "yes"),
        (lambda: RngKey(rank=-1), "-1"),
        (lambda: RngKey(stream=2**31), str(2**31)),
        (lambda: TernGrad().encode(torch.ones(3), scale=-1.0), "-1.0"),
        (lambda: TernGrad().encode(torch.ones(3), scale=float("inf")), "inf"),
        (lambda: TernGrad().encode(torch.ones(3), scale=torch.ones(2)), "2"),
        (lambda: TernGrad().encode(torch.ones(3), residual=torch.ones(3)), "residual"),
        (lambda: OneBit().encode(torch.ones(3), scale=1.0), "1.0"),
        (lambda: OneBit().encode(torch.ones(3), residual=torch.ones(4)), "4"),
        (
            lambda: OneBit(error_feedback=False).encode(torch.ones(3), residual=torch.ones(3)),
            "residual",
        ),
        (lambda: TernGrad().decode(TernGrad().encode(torch.ones(3)), out=torch.ones(4)), "4"),
        (lambda: TernGrad().payload_nbytes(-1), "-1"),
        (lambda: gradcomp.codecs.resolve("fp8"), "fp8"),
    ],
)
def test_wrong_arguments_are_value_errors_with_the_value(make, word):
    with pytest.raises(ValueError, match=word):
        make()


@pytest.mark.parametrize("options", [{"scale": "own"}, {"clip_sigma": 2.5}, {"seed": 1}])
def test_options_of_terngrad_name_it(options):
    ((name, value),) = options.items()
    said = rf"Ternary has no option {name}: write TernGrad\({name}={value!r}\)"
    with pytest.raises(TypeError, match=said):
        Ternary(**options)


def test_ternary_has_neither_exact_sums_nor_other_options():
    with pytest.raises(ValueError, match=r'TernGrad\(second_phase="exact"\) has it'):
        Ternary(second_phase="exact")
    with pytest.raises(TypeError, match="Ternary has no option 'steps'"):
        Ternary(steps=1.8)


@pytest.mark.parametrize("names", [("fp32", "float32"), ("bf16", "bfloat16")])
def test_identity_takes_names_of_dtypes_and_torch_s(names):
    same = [Identity(name) for name in (*names, getattr(torch, names[1]))]
    assert {repr(codec) for codec in same} == {repr(Identity(names[0]))}
    assert all(codec.options() == same[0].options() for codec in same)


@pytest.mark.parametrize("names", [("fp32", "float32"), ("bf16", "bfloat16")])
def test_second_phases_and_fsdp_residuals_take_names_of_dtypes_as_identity_does(names):
    """They refused "float32" and "bfloat16"; ranks compare the short name."""
    for name in (*names, getattr(torch, names[1])):
        for kind in (Block, EntropyCoded, OneBit, TernGrad, Ternary):
            codec = kind(second_phase=name)
            assert codec.second_phase == names[0] and f"second_phase='{names[0]}'" in repr(codec)
        assert ModelResiduals(name).dtype == names[0]


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.ones(3, dtype=torch.int64), "int64"),
        (torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.arange(32.0).view(4, 8)[:, :4].t(), "contiguous"),
        (torch.ones(8)[::2], "contiguous"),
        (torch._neg_view(torch.ones(8)), "negative view"),
        (torch.ones(3).to_sparse(), "sparse"),
        (torch.ones(3, device="meta"), "meta"),
    ],
)
@pytest.mark.parametrize("codec", [TernGrad(), OneBit(), Identity()])
def test_unsupported_tensors_are_named(codec, tensor, word):
    with pytest.raises(UnsupportedTensor, match=word):
        codec.encode(tensor)
    with pytest.raises(TypeError, match=word):
        gradcomp.all_reduce(tensor, codec, comm=gradcomp.comm.LocalCommunicator.group(1)[0])


@pytest.mark.parametrize("kind", [Ternary, OneBit, Block, EntropyCoded])
@pytest.mark.parametrize(
    "decay", [-0.1, 1.0000000001, 2, math.nan, math.inf, -math.inf, True, "0.5", [0.5]]
)
def test_decays_outside_0_to_1_are_refused(kind, decay):
    said = "residual_decay must be None or a number from 0 to 1, got "
    with pytest.raises(ValueError, match=said):
        kind(residual_decay=decay)


@pytest.mark.parametrize(
    "step", [0, -1.8, math.nan, math.inf, 1e-46, 1e39, 10**400, True, "1.8", None]
)
def test_steps_that_float32_has_not_are_refused(step):
    """Beyond its range every value was encoded as 0."""
    said = "step must be a positive number that float32 can hold, got "
    with pytest.raises(ValueError, match=said):
        Ternary(step=step)


def test_numbers_of_numpy_are_numbers():
    codec = Ternary(step=np.float32(1.5), residual_decay=np.float32(0.25))
    assert codec.options() == Ternary(step=1.5, residual_decay=0.25).options()


@pytest.mark.parametrize("decay", [0, 1e-46])  # the latter is 0 in float32
@pytest.mark.parametrize("kind", [Ternary, OneBit, Block, EntropyCoded])
def test_a_decay_of_zero_and_no_feedback_are_the_same_codec(kind, decay):
    assert kind(residual_decay=decay).options() == kind(error_feedback=False).options()
    assert kind(residual_decay=0).options()["residual_decay"] == 0.0
    x = torch.randn(2, 64)
    assert torch.equal(kind(residual_decay=0).encode(x[0]), kind(error_feedback=False).encode(x[0]))
    averages = run_local(
        2, lambda comm: gradcomp.all_reduce(x[comm.rank].clone(), kind(residual_decay=0), comm=comm)
    )
    assert torch.equal(averages[0], averages[1]) and bool(averages[0].abs().max() > 0)


def load_topk_state():
    (comm,) = gradcomp.comm.LocalCommunicator.group(1)
    with gradcomp.GradientAverager(torch.nn.Linear(2, 2), "ternary", comm=comm) as averager:
        state = averager.state_dict()
        state["origin"]["codec"] = "TopK(error_feedback=True)"
        averager.load_state_dict(state)


def decode_topk_payload():
    payload = Ternary().encode(torch.ones(8)).numpy()
    wire.seal(payload, wire.parse(payload)._replace(codec=9))
    Ternary().decode(torch.from_numpy(payload))


@pytest.mark.parametrize(
    ("use", "error"),
    [
        (lambda: gradcomp.TopK, AttributeError),
        (lambda: gradcomp.codecs.resolve("topk"), ValueError),
        (lambda: gradcomp.plan.costs.find_method("topk all_gather"), ValueError),
        (lambda: methods.parse("topk:every=30"), ValueError),
        (lambda: methods.parse("fsdp2:topk"), ValueError),
        (
            lambda: Saved.of(write({"codec": "TopK()"}, 0, 1, 0, {})).check_origin({"codec": "x"}),
            ValueError,
        ),
        (load_topk_state, ValueError),
        (decode_topk_payload, CorruptPayload),
    ],
)
def test_topk_was_removed_and_says_what_to_use(use, error):
    with pytest.raises(error, match=r"TopK was removed: use TernGrad\(\) with local steps"):
        use()
