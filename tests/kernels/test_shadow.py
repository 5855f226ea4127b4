"""The shadow set refuses what a device refuses, and counts: what tests that run on it rely on; and
which kernel set is whose.
"""

import copy
import io
import re

import pytest
import torch
from _averaging import Run
from _ranks import run_local
from _shadow import Shadow, ShadowKernels, shadowed

from gradcomp import EntropyCoded, OneBit, Ternary, UnsupportedTensor, kernels
from gradcomp.kernels import check
from gradcomp.kernels.weights import TorchWeights

NATIVE = kernels.of(kernels.CPU)


def access(tensor):
    """Return the rights to the pages of a shadow tensor, as the system has them."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            first, last, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()
            if int(first, 16) <= tensor.memory.address < int(last, 16):
                return rights[:3]
    raise AssertionError("no such pages")


def shadow(*values):
    return ShadowKernels().empty(len(values)).copy_(torch.tensor(values))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        lambda x: x.tolist(),
        lambda x: x.data_ptr(),
        lambda x: x[1:].view(torch.uint8).numpy(),
        lambda x: (x + 1).numpy(),
        NATIVE.are_finite,
        lambda x: NATIVE.rescale(x[1:], 2.0),
    ],
)
def test_values_are_not_read_past_their_set(read):
    x = shadow(1.0, 2.0)
    with pytest.raises((AssertionError, RuntimeError), match="address of values|not supported"):
        read(x)
    assert access(x) == "---"


def test_payloads_are_not_values():
    made = ShadowKernels()
    x, payload = made.empty(8).zero_(), made.empty(100, torch.uint8)
    table = kernels.tables.Table([(0, 0, 32, 32, 0, 0, 8, 8, 0)])
    with pytest.raises(AssertionError, match="encode: payloads and scales are host memory"):
        made.encode(kernels.Code("values", dtype=torch.float32), x, table, payload)
    assert not made.counts["host values"]
    assert made.are_finite(torch.zeros(3)) and made.counts["host values"] == 1


def test_memory_is_open_within_calls_alone():
    made, seen = ShadowKernels(), []
    x = made.empty(3)
    assert torch.isnan(x).all()  # what nobody has written
    made._kernels.rescale = lambda plane, factor: seen.append((access(x), plane.tolist()))
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    made.rescale(x, 2.0)
    assert seen == [("rw-", [1.0, 2.0, 3.0])]
    assert access(x) == "---"
    with pytest.raises(RuntimeError):
        x.view(7)
    assert access(x) == "---"


def test_what_torch_makes_of_values_is_closed_and_counted():
    x = shadow(1.0, 2.0, 3.0, 4.0)
    counts = x.owner.counts
    before = counts.copy()
    parts = torch.split(x, [1, 3])
    assert all(type(one) is Shadow and one.memory is x.memory for one in parts)
    assert counts - before == {"torch operations": 1}
    y = parts[1] * 2
    assert type(y) is Shadow and y.memory is not x.memory and access(y) == "---"
    assert counts - before == {"torch operations": 2, "new tensors": 1}
    there = torch.zeros(3)
    assert there.copy_(y) is there
    x[:3].copy_(y)
    assert (counts - before)["new tensors"] == 1
    assert x.cpu().tolist() == [4.0, 6.0, 8.0, 4.0] and bool((x > 3).all())
    assert type(copy.deepcopy(x)) is Shadow
    assert counts["copies to the host"] == 1
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert type(torch.load(file)) is torch.Tensor


@pytest.mark.parametrize("exchange", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        (OneBit(), {}),
        (Ternary(), {"slice_numel": 2048}),
        (OneBit(rotate=True), {}),
        (EntropyCoded(2.2), {"slice_numel": 2048}),
    ],
    ids=str,
)
def test_no_step_allocates_values(codec, options, exchange):
    def counts(steps):
        def average(comm):
            mine = Run(comm, codec, {"w": (40, 128)}, exchange=exchange, **options)
            mine.steps(steps)
            mine.averager.close()

        with shadowed() as made:
            run_local(2, average)
        return made.counts

    two, four = counts(2), counts(4)
    assert two["empty"] == four["empty"] > 0
    assert not four["copies to the host"] and not four["host values"]


def test_a_device_has_the_set_that_was_installed_for_its_kind():
    one, other = torch.device("xpu", 0), torch.device("xpu", 1)
    made = []
    assert kernels.install("xpu", lambda device: made.append(device) or ShadowKernels()) is None
    try:
        assert kernels.of(one) is kernels.of(one) is not kernels.of(other)
        assert made == [one, other]
        kernels.check_device(one, "x")
        assert kernels.of_weights(one) is kernels.of(one)
    finally:
        assert kernels.install("xpu", None) is not None
    with pytest.raises(UnsupportedTensor, match="no kernels for xpu:1"):
        kernels.of(other)
    with pytest.raises(UnsupportedTensor, match="x is on xpu:1: not supported yet, .* CPU tensors"):
        kernels.check_device(other, "x")
    assert kernels.of(kernels.CPU) is kernels.of_weights(kernels.CPU) is NATIVE
    assert type(kernels.of_weights(one)) is TorchWeights


# ---- which kernel set is used --------------------------------------------------------------------


def test_kernels_that_differ_from_the_cpus_are_not_used(monkeypatch, caplog):
    shadow_set = ShadowKernels()
    assert check.checked(kernels.CPU, lambda device: shadow_set) is shadow_set
    assert not [one for one in caplog.records if one.levelname == "WARNING"]
    monkeypatch.setattr(check, "CODES", {"bf16": check.CODES["bf16"]})
    monkeypatch.setattr(shadow_set, "sum_decode", lambda *_: False)
    assert check.checked(kernels.CPU, lambda device: shadow_set) is None
    said = caplog.records[-1].getMessage()
    assert "differ from the CPU's: bf16 of float32, bf16 of bfloat16" in said
    assert "sums of codes" in said and "scales" not in said
    assert "copied to the host" in said


@pytest.mark.parametrize(
    ("release", "why"),
    [
        (None, "Triton is not installed"),
        ("3.8.7", "Triton 3.8.7 is too old, 3.9 is needed"),
        ("3.10.0+git1", ""),
    ],
)
def test_a_gpu_whose_kernels_cannot_be_had_is_named(release, why, monkeypatch, caplog):
    before = kernels.install("cuda", kernels._cuda)  # forgets what was found
    there = torch.device("cuda:77")
    try:
        assert kernels.encoding_device(there) == kernels.CPU
        assert not [one for one in caplog.records if one.levelname == "WARNING"]
        kernels.install("cuda", kernels._cuda)
        monkeypatch.setenv(kernels.USES_CUDA, "1")
        if release is not None:
            monkeypatch.setattr("importlib.metadata.version", lambda name: release)
        assert kernels.encoding_device(there) == kernels.CPU
        said = caplog.records[-1].getMessage()
        assert "gradients on cuda:77 are copied to the host" in said and why in said
        if why:
            assert "pip install 'gradcomp[cuda]'" in said
    finally:
        kernels.install("cuda", before)
