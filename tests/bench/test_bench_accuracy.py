"""bench accuracy: methods, finished runs are kept, the table says what was measured."""

import json
import math
import struct
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gradcomp.bench import accuracy, paper
from gradcomp.bench.accuracy.report import longest, summarize, tables
from gradcomp.bench.accuracy.run import Job, finished, run_all
from gradcomp.bench.methods import parse, wrap
from gradcomp.bench.models import ByteGPT, SmallResNet
from gradcomp.bench.optimizers import exchanging_momentum
from gradcomp.bench.train import rank
from gradcomp.bench.train.rank import rate_at
from gradcomp.bench.workloads import (
    BLOCK,
    HELD_OUT_SHARE,
    Images,
    Settings,
    cosine,
    square_root,
)
from gradcomp.optim import OneBitAdam, OneBitLamb, SplitLAMB, ZeroOneAdam


def test_methods_whose_momentum_travels():
    parameters = [nn.Parameter(torch.zeros(3))]
    kinds = {"": OneBitAdam, "=frozen": OneBitAdam, "=renewed": ZeroOneAdam}
    for value, kind in kinds.items():
        method = parse(f"block4:momentum{value},start_step=7")
        (made,) = exchanging_momentum(
            [torch.optim.AdamW(parameters, lr=0.25, betas=(0.5, 0.75), eps=1e-3)],
            method.momentum,
            method.options["start_step"],
        )
        group = made.param_groups[0]
        assert type(made) is kind and (group["lr"], group["betas"], group["eps"]) == (
            0.25,
            (0.5, 0.75),
            1e-3,
        )
        assert made.wants_gradients(6) and not made.wants_gradients(7)
    (lamb,) = exchanging_momentum([SplitLAMB(parameters)], "frozen", 7)
    assert type(lamb) is OneBitLamb
    with pytest.raises(ValueError, match="there is no SGD whose momentum travels"):
        exchanging_momentum([torch.optim.SGD(parameters)], "frozen", 7)
    for text, said in (
        ("onebit:momentum", "needs a codec and a warm-up"),
        ("bf16:momentum,start_step=3", "needs a codec"),
        ("onebit:momentum=moving,start_step=3", "frozen or renewed"),
        ("bf16:second=block4", "no second phase"),
        ("onebit:second=exact", "integer sums"),
        ("onebit:start=bf16,start_step=3", "bf16 is none"),
        ("onebit:start=block4", "start_step=N"),
        ("onebit:momentum=renewed,start=block4,start_step=3", "take turns"),
    ):
        with pytest.raises(ValueError, match=said):
            parse(text)
    assert parse("terngrad:second=block4").codec.second_phase == "block4"
    assert parse("onebit:start=block4,start_step=3").options["start_codec"].name == "block4"


def averages(name):
    """Return whether later averages of the same gradients equal the first."""
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(8, 64)
    torch.manual_seed(0)
    workload = SimpleNamespace(
        loss=lambda model, x: model(x)[:, :2].sum(), settings=Settings(1, 8, None, 0.0, {})
    )
    model = nn.Linear(64, 4)
    ready = wrap(
        model, parse(name), lambda m: [torch.optim.SGD(m.parameters(), lr=0.0)], min_numel=0
    )
    grads = []
    for _ in range(3):
        rank._step(ready, workload, model, x)
        grads.append(model.weight.grad.clone())
    ready.state.close()
    return [torch.equal(grads[0], other) for other in grads[1:]]


@pytest.mark.parametrize(("name", "same"), [("onebit", False), ("onebit:feedback=off", True)])
def test_without_feedback_every_step_is_a_first_one(gloo, name, same):
    """What codes leave out is forgotten: the same gradients give the same average again, which
    residuals would change.
    """
    assert gloo(2, averages, name) == [[same, same]] * 2


def rounded():
    model = nn.Linear(1, 1, bias=False)
    ready = wrap(model, parse("bf16"), lambda m: [torch.optim.SGD(m.parameters(), lr=0.0)])
    x = torch.tensor([[1.0 + 2**-9], [3.0]])[torch.distributed.get_rank()]
    (ready.model(torch.ones(1, 1)) * 0 + model.weight * x).sum().backward()
    return model.weight.grad.item(), rank._total_nbytes(ready, 1, 2)


def test_bf16_rounds_before_and_after_the_sum(gloo):
    assert gloo(2, rounded) == [(2.0, 2)] * 2


def test_exemptions_and_wrong_methods():
    named = list(ByteGPT(8, 1, 1, 4).named_parameters())
    assert parse("onebit").options_for(named) == {}
    ends = parse("onebit:exempt=ends,start_step=3").options_for(named)
    assert {"head.weight", "embedding.weight", "norm.bias"} <= set(ends["exclude"]) and ends[
        "start_step"
    ] == 3
    assert "blocks.0.up.weight" not in ends["exclude"]
    wrong = [
        ("twobit", "no method named"),
        ("onebit:exempt=all", "one of none"),
        ("onebit:x=1", "unknown"),
    ]
    wrong += [
        ("terngrad:feedback=off", "for codecs that have"),
        ("onebit:feedback=no", "feedback=off is"),
        ("onebit:precondition,feedback=off", "forgotten"),
    ]
    wrong += [
        ("block2:rotate", "rotate is for onebit"),
        ("onebit:double,feedback=off", "double buffering has neither"),
        ("onebit:double,every=3", "double buffering has neither"),
        ("fsdp2:terngrad:precondition", "under FSDP2 a codec takes"),
        ("fsdp2:onebit:every=3", "under FSDP2 a codec takes"),
    ]
    wrong += [
        ("onebit:fragments=2", "every=H"),
        ("bf16:every=3", "need a codec"),
        ("onebit:every=3,feedback=off", "neither momentum"),
    ]
    for text, said in wrong:
        with pytest.raises(ValueError, match=said):
            parse(text)
    assert parse("terngrad:every=3,delay=1,outer_momentum=0.5").local == {
        "every": 3,
        "delay": 1,
        "outer_momentum": 0.5,
    }


def test_the_rate_rises_and_falls():
    for decay, last in ((cosine, 0.1), (square_root, math.sqrt(1 / 90))):
        settings = Settings(100, 4, None, 0.1, {}, decay=decay)
        rates = [rate_at(step, 100, settings) for step in range(100)]
        assert (
            rates[0] == 0.1
            and rates[9] == rates[10] == 1.0
            and rates[99] == pytest.approx(last, abs=1e-3)
        )
        assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_batch_is_of_each_worker_or_of_all():
    assert Settings(1, 64, None, 0.0, {}).batch_of(4) == 64
    shared = Settings(1, 64, None, 0.0, {}, shared=True)
    assert (shared.batch_of(1), shared.batch_of(4)) == (64, 16)
    with pytest.raises(ValueError, match="3 workers cannot share a batch of 64"):
        shared.batch_of(3)


def test_models_have_the_size_that_they_say():
    assert sum(p.numel() for p in ByteGPT().parameters()) == 875_264
    assert sum(p.numel() for p in ByteGPT(256, 8, 8).parameters()) == 6_482_432
    assert sum(p.numel() for p in SmallResNet().parameters()) == 701_466
    assert SmallResNet(8)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    text = torch.randint(256, (2, 16))
    model = ByteGPT(16, 2, 2, 16)
    changed = text.clone()
    changed[:, 9] += 1
    # nobody sees what is to come
    assert torch.equal(model(text)[:, :9], model(changed % 256)[:, :9])


@pytest.fixture
def data(tmp_path):
    words = b"the quick brown fox jumps over the lazy dog. " * (HELD_OUT_SHARE * BLOCK // 45 + 1)
    (tmp_path / "prose.txt").write_bytes(words)
    return tmp_path


@pytest.mark.slow
def test_a_table_of_small_runs_goes_on_where_it_was(data, capsys):
    out = data / "out"
    words = [
        "--data",
        str(data),
        "--out",
        str(out),
        "--steps",
        "3",
        "--seeds",
        "2",
        "--workers",
        "2",
        "--jobs",
        "2",
    ]
    assert accuracy.main([*words, "--methods", "fp32", "bf16"]) == 0
    first = (out / "runs.jsonl").read_text()
    assert len(first.splitlines()) == 4
    # killed while it wrote a line
    (out / "runs.jsonl").write_text(first + first.splitlines()[0][:50])
    assert accuracy.main([*words, "--methods", "fp32", "bf16", "onebit", "terngrad:every=3"]) == 0
    assert (out / "runs.jsonl").read_text().startswith(first)
    printed = capsys.readouterr().out
    assert "held-out loss, nats a byte" in printed and "to bf16" in printed
    rows = {row["method"]: row for row in json.loads((out / "accuracy.json").read_text())["rows"]}
    assert (
        rows["fp32"]["to_fp32"] == 0
        and rows["onebit"]["to_fp32"] != 0
        and rows["onebit"]["seeds"] == 2
    )
    assert rows["fp32"]["bits"] == pytest.approx(32, rel=0.01) and rows["bf16"][
        "bits"
    ] == pytest.approx(16, rel=0.01)
    assert 1 < rows["onebit"]["bits"] < 4
    assert rows["terngrad:every=3"]["bits"] == pytest.approx(2 / 3, rel=0.1)
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def idx(array):
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.to(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_a_paper_s_table_beside_what_was_published(tmp_path, capsys):
    folder, draw = tmp_path / "mnist", torch.Generator().manual_seed(0)
    folder.mkdir()
    for part, count in (("train", 200), ("t10k", 40)):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(
            idx(torch.randint(256, (count, 28, 28), generator=draw))
        )
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(torch.arange(count) % 10))
    words = [
        "terngrad-lenet",
        "--data",
        str(tmp_path),
        "--steps",
        "3",
        "--seeds",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert paper.main(words) == 0
    printed = capsys.readouterr().out
    assert "2 workers, 3 steps" in printed and "published: Wen et al. 2017" in printed
    made = json.loads((tmp_path / "out" / "terngrad-lenet.json").read_text())
    assert [(row["workers"], row["method"]) for row in made["rows"]] == [
        (2, "fp32"),
        (2, "terngrad"),
        (4, "fp32"),
        (4, "terngrad"),
    ]
    assert made["machine"]["torch"] == torch.__version__ and made["arguments"]["steps"] == 3
    wrong = ["--data", str(tmp_path), "--workloads", "lenet-terngrad", "--methods", "fp32"]
    for more, said in (
        (["--optimizers", "lamb"], "no rate for lamb; it has sgd"),
        (["--optimizers", "sgd", "--workers", "3"], "3 workers cannot share"),
    ):
        assert accuracy.main([*wrong, *more]) == 2
        assert said in capsys.readouterr().err
    assert paper.main(["ef-sign", "--data", str(tmp_path)]) == 2
    assert "cifar10_jpeg.npz" in capsys.readouterr().err
    for table in paper.TABLES.values():
        assert all(parse(method).name == method for method in table.methods) and table.published


def finished_of(folder, text):
    (folder / "broken.jsonl").write_text(text)
    return finished(folder / "broken.jsonl")


def test_a_line_that_was_cut_off_is_run_again_and_an_odd_one_refused(tmp_path):
    job = Job("gpt-1m", "adamw", "fp32", 2, 6, 1.0, 0)
    line = json.dumps({**job.__dict__, "measure": 1.0, "curve": [], "bits": 32.0})
    assert list(finished_of(tmp_path, f"{line}\n{line[:40]}")) == [job]
    assert (
        run_all([job], tmp_path, tmp_path / "broken.jsonl", 1, lambda job, step: None)[job][
            "measure"
        ]
        == 1.0
    )
    with pytest.raises(ValueError, match="line 1"):
        finished_of(tmp_path, f"{{}}\n{line}\n")


def test_a_run_that_diverged_is_counted_and_not_averaged():
    kinds = [(0, 2.0), (1, None), (2, 4.0)]
    results = {
        Job("w", "o", "m", 4, 10, 1.0, s): {"measure": m, "curve": [], "bits": 1.0}
        for s, m in kinds
    }
    (row,) = summarize(results)
    assert (row["mean"], row["diverged"], row["seeds"], row["to_fp32"]) == (3.0, 1, 3, None)


def test_a_way_whose_bytes_are_not_known_has_a_row():
    """PowerSGD's hook tells nobody what it sends."""
    (row,) = rows = summarize(
        {Job("w", "o", "powersgd1", 4, 10, 1.0, 0): {"measure": 2.0, "curve": [], "bits": None}}
    )
    ((_, _, table),) = tables(rows, {"w": "loss"})
    assert row["bits"] is None and list(table.columns[2].cells) == ["-"]


def test_the_largest_h_that_costs_little_is_printed():
    means = {
        "fp32": 1.0,
        "terngrad:every=30,start_step=5": 1.03,
        "terngrad:every=45,start_step=5": 1.05,
        "terngrad:every=60,start_step=5": 1.2,
        "fp32:every=30": 1.5,
    }
    results = {
        Job("low", "o", m, 4, 10, 1.0, 0): {"measure": mean, "curve": [], "bits": 1.0}
        for m, mean in means.items()
    }
    results |= {
        Job("high", "o", m, 4, 10, 1.0, 0): {"measure": 90 - mean, "curve": [], "bits": 1.0}
        for m, mean in means.items()
    }
    settings = Settings(1, 1, None, 0.0, {})
    workloads = {
        name: SimpleNamespace(lower_is_better=name == "low", settings=settings)
        for name in ("low", "high")
    }
    lines = longest(summarize(results), workloads, 0.06)
    assert len(lines) == 4
    for line, name in zip(lines[::2], workloads, strict=True):
        assert line.startswith(
            f"terngrad:every=H,start_step=5, {name} under o, 4 workers, 10 steps: largest H within"
            " 0.06 of fp32 every step: 45 (30 costs 0.030, "
        )
    assert all(line.endswith(": none (30 costs 0.500)") for line in lines[1::2])


def test_wrong_usage(tmp_path, capsys):
    assert accuracy.main(["--data", str(tmp_path)]) == 2
    assert "prose.txt" in capsys.readouterr().err
    assert accuracy.main(["--data", str(tmp_path), "--methods", "nonsense"]) == 2
    assert "no method named 'nonsense'" in capsys.readouterr().err


def test_a_quick_look_sees_images_of_every_class():
    """CIFAR-10's test file has its classes in turns: every tenth image is an airplane."""
    labels = torch.arange(1000) % 10
    images = Images(
        "turns",
        Settings(1, 1, None, 0.0, {}),
        nn.Identity,
        (labels, labels),
        (torch.eye(10)[labels], labels),
        flips=False,
    )

    class Always(nn.Module):
        def forward(self, x):
            return torch.eye(10)[3].expand(len(x), 10)

    assert (
        images.test(nn.Identity(), quick=True) == 100 and 2 < images.test(Always(), quick=True) < 25
    )
    assert images.test(Always()) == 10
