"""Second phases as objects: their forms and bits, what they refuse; kernel sets by device."""

import pytest
import torch

from gradcomp import Block, CorruptPayload, Identity, OneBit, TernGrad, UnsupportedTensor, kernels
from gradcomp.codecs.checks import SECOND_PHASES
from gradcomp.exchange.second import second_phase
from gradcomp.exchange.sizing import BucketPlan, Strategy, choose
from gradcomp.kernels.interface import Kernels, WeightKernels
from gradcomp.payload.form import BFLOAT16, BLOCKS, ONEBIT, PLAIN, TERNARY, lanes_form
from gradcomp.payload.pieces import Slot

FORMS = {
    ("exact", TernGrad()): lanes_form(5),
    ("requantize", TernGrad(scale="own")): TERNARY,
    ("requantize", OneBit()): ONEBIT,
    ("block2", TernGrad()): BLOCKS[2],
    ("block8", OneBit()): BLOCKS[8],
    ("requantize", Block(4)): BLOCKS[4],
    ("bf16", OneBit()): BFLOAT16,
    ("fp32", Identity()): PLAIN,
}


@pytest.mark.parametrize(("name", "codec"), FORMS, ids=str)
def test_a_second_phase_knows_its_form(name, codec):
    assert second_phase(name, codec, 5).form == FORMS[name, codec]


def test_there_is_a_phase_for_every_name_that_options_take():
    bits = [second_phase(name, TernGrad(), 3).form.bits for name in SECOND_PHASES]
    assert bits == [3, 2, 2, 4, 8, 16, 32]
    with pytest.raises(ValueError, match="fp64"):
        second_phase("fp64", TernGrad(), 3)


@pytest.mark.parametrize(
    "codec", [OneBit(), TernGrad(scale="own"), Identity()], ids=lambda c: c.name
)
def test_codes_without_integer_sums_have_no_exact_phase(codec):
    assert codec.sum_form(3) is None
    with pytest.raises(ValueError, match="integer sums"):
        second_phase("exact", codec, 3)


def test_auto_counts_the_bits_of_the_phase():
    """The most ranks at which all_gather sends fewer bits than a reduce_scatter with each second
    phase.
    """
    for name, most in (("exact", 2), ("requantize", 2), ("block4", 3), ("bf16", 9), ("fp32", 17)):
        codec = TernGrad(second_phase=name)
        assert max(n for n in range(2, 40) if choose(codec, n).exchange == "all_gather") == most


@pytest.mark.parametrize(("second", "plain_only"), [("exact", True), ("requantize", False)])
def test_exact_sums_take_no_room_in_the_shard(second, plain_only):
    slots = [Slot(0, 1000, 1000, True, 0), Slot(1, 100, 100, False, 1000)]
    plan = BucketPlan(TernGrad(), slots, Strategy("reduce_scatter", second), 2, 0)
    assert plan.shard_numel == (48 if plain_only else 496 + 48)


def test_lanes_above_their_sum_are_refused():
    slots, strategy = [Slot(0, 64, 64, True, 0)], Strategy("reduce_scatter", "exact")
    plan = BucketPlan(TernGrad(), slots, strategy, 3, 0)
    layout = plan.slices[0].second[0]
    payload = torch.zeros(layout.nbytes, dtype=torch.uint8)
    plan.second_phase.validate(payload, layout)
    payload[-1] = 0xFF  # lanes of 7 where three ranks reach 6
    with pytest.raises(CorruptPayload, match="lane"):
        plan.second_phase.validate(payload, layout)


def test_the_cpu_has_kernels_and_other_devices_say_so():
    kernel_set = kernels.of(torch.device("cpu"))
    assert kernel_set is kernels.of(kernels.CPU)
    with pytest.raises(UnsupportedTensor, match="cuda:1"):
        kernels.of(torch.device("cuda", 1))
    offered = vars(Kernels) | vars(WeightKernels)
    offered = {name for name in offered if not name.startswith("_")}
    assert len(offered) > 12 and offered <= set(vars(type(kernel_set)))


def test_ternary_sends_sums_as_long_as_they_take_four_bits():
    """Up to 7 ranks; means of 4 bits from 8 on, and what was said is left alone."""
    phases = {n: TernGrad().resolved_second_phase(n) for n in range(2, 65)}
    assert [phases[n] for n in (2, 7, 8, 64)] == ["exact", "exact", "block4", "block4"]
    assert {second_phase(phases[n], TernGrad(), n).form.bits for n in range(4, 65)} == {4}
    assert TernGrad(second_phase="exact").resolved_second_phase(64) == "exact"
    assert TernGrad().resolved_second_phase(64, transformed=True) == "requantize"
    for codec in (OneBit(), Block(4), TernGrad(scale="own")):
        assert {codec.resolved_second_phase(n) for n in (2, 64)} == {"requantize"}
