"""bench accuracy and bench paper: workloads, runs that are kept, tables of what was measured."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from _idx import write_folder
from torch import nn

from gradcomp.bench import accuracy, hosts, paper
from gradcomp.bench.methods import parse
from gradcomp.bench.models import ByteGPT, SmallResNet
from gradcomp.bench.sweep import append, finished, key_of
from gradcomp.bench.trainer import Task
from gradcomp.bench.workloads import (
    BLOCK,
    HELD_OUT_SHARE,
    Epochs,
    Images,
    Settings,
    cosine,
    square_root,
)


@pytest.mark.parametrize(("decay", "last"), [(cosine, 0.1), (square_root, math.sqrt(1 / 90))])
def test_the_rate_rises_and_falls(decay, last):
    settings = Settings(100, 4, None, 0.1, {}, decay=decay)
    rates = [settings.rate_at(step, 100) for step in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0
    assert rates[99] == pytest.approx(last, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_batch_is_of_each_worker_or_of_all():
    assert Settings(1, 64, None, 0.0, {}).batch_of(4) == 64
    shared = Settings(1, 64, None, 0.0, {}, shared=True)
    assert (shared.batch_of(1), shared.batch_of(4)) == (64, 16)


def test_models_have_the_size_that_they_say():
    for model, numel in (
        (ByteGPT(), 875_264),
        (ByteGPT(256, 8, 8), 6_482_432),
        (SmallResNet(), 701_466),
    ):
        assert sum(p.numel() for p in model.parameters()) == numel
    assert SmallResNet(8)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    text = torch.randint(256, (2, 16))
    model, changed = ByteGPT(16, 2, 2, 16), text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    # a position does not see later ones
    assert torch.equal(model(text)[:, :9], model(changed)[:, :9])


def test_a_quick_look_sees_images_of_every_class():
    """CIFAR-10's test file has its classes in turns: every tenth image is an airplane."""
    labels = torch.arange(1000) % 10
    pairs = (labels, labels), (torch.eye(10)[labels], labels)
    images = Images("turns", Settings(1, 1, None, 0.0, {}), nn.Identity, *pairs, flips=False)

    class Always(nn.Module):
        def forward(self, x):
            return torch.eye(10)[3].expand(len(x), 10)

    assert images.test(nn.Identity(), quick=True) == 100
    assert 2 < images.test(Always(), quick=True) < 25 and images.test(Always()) == 10


def test_an_epoch_takes_every_image_once_in_an_order_of_the_seed_alone():
    pairs = (torch.arange(100.0).view(100, 1, 1, 1), torch.arange(100))

    def taken(seed, count=7, batch=15):
        workload = Epochs("", Settings(1, 30, None, 0.0, {}), None, pairs, pairs, flips=False)
        ranks = [workload.minibatches(seed, rank, 2, batch) for rank in range(2)]
        return [torch.cat([next(rank)[1] for rank in ranks]) for _ in range(count)]

    batches = taken(3)
    assert [len(one.unique()) for one in batches] == [30] * 7
    for epoch in (batches[0:3], batches[3:6]):
        assert len(torch.cat(epoch).unique()) == 90
    assert all(torch.equal(a, b) for a, b in zip(batches, taken(3), strict=True))
    assert not torch.equal(batches[0], taken(4)[0])
    with pytest.raises(ValueError, match="batch 102 is larger than the training set of 100"):
        taken(0, batch=51)


METHODS = ["fp32", "bf16", "onebit", "powersgd1", "terngrad:every=3"]


@pytest.mark.slow
def test_a_table_of_small_runs_continues_where_it_was(tmp_path, capsys):
    words = b"the quick brown fox jumps over the lazy dog. " * (HELD_OUT_SHARE * BLOCK // 45 + 1)
    (tmp_path / "prose.txt").write_bytes(words)
    out = tmp_path / "out"
    options = f"--data {tmp_path} --out {out} --steps 3 --seeds 2 --workers 2 --jobs 2 --methods"
    assert accuracy.main([*options.split(), "fp32", "bf16", "fp32"]) == 0
    first = (out / "runs.jsonl").read_text()
    assert len(first.splitlines()) == 4  # a method that is named twice runs once
    # killed while it wrote a line
    (out / "runs.jsonl").write_text(first + first.splitlines()[0][:50])
    assert accuracy.main([*options.split(), *METHODS]) == 0
    assert (out / "runs.jsonl").read_text().startswith(first)
    printed = capsys.readouterr().out
    assert "held-out loss, nats a byte" in printed and "to bf16" in printed
    rows = {row["method"]: row for row in json.loads((out / "accuracy.json").read_text())["rows"]}
    assert rows["fp32"]["to_fp32"] == 0 != rows["onebit"]["to_fp32"]
    assert rows["onebit"]["seeds"] == 2
    for name, bits in (("fp32", 32), ("bf16", 16), ("terngrad:every=3", 2 / 3)):
        assert rows[name]["bits"] == pytest.approx(bits, rel=0.1 if bits < 1 else 0.01)
    assert 1 < rows["onebit"]["bits"] < 4
    # of three steps one; two in fp32
    assert 2 / 3 * 32 < rows["powersgd1"]["bits"] < 2 / 3 * 32 + 1
    assert (out / "accuracy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_workers_on_hosts_with_links_and_the_choice_of_auto(tmp_path, capsys):
    """Over hosts where they can be made; elsewhere the command says why not."""
    words = b"the quick brown fox jumps over the lazy dog. " * (HELD_OUT_SHARE * BLOCK // 45 + 1)
    (tmp_path / "prose.txt").write_bytes(words)
    options = f"--data {tmp_path} --out {tmp_path} --steps 3 --seeds 1 --methods auto:guard=off"
    options += " --workers 2 --link 1gbit"
    if why := hosts.unavailable():
        assert accuracy.main(options.split()) == 2
        assert why in capsys.readouterr().err
        return
    assert accuracy.main(options.split()) == 0
    line = json.loads((tmp_path / "runs.jsonl").read_text())
    assert "auto: EntropyCoded(1.25) with precondition=True for AdamW" in line["described"]
    assert line["bits"] < 2  # vectors in fp32, as users get it
    assert accuracy.main([*options.split(), "--link", "fast", "--steps", "4"]) == 2
    assert "link 'fast' is not understood" in capsys.readouterr().err


@pytest.mark.slow
def test_a_paper_s_table_beside_what_was_published(tmp_path, capsys):
    (tmp_path / "mnist").mkdir()
    write_folder(tmp_path / "mnist", train=200, test=40)
    words = f"terngrad-lenet --data {tmp_path} --steps 3 --seeds 1 --out {tmp_path / 'out'}"
    assert paper.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "2 workers, 3 steps" in printed and "published: Wen et al. 2017" in printed
    made = json.loads((tmp_path / "out" / "terngrad-lenet.json").read_text())
    rows = [(row["workers"], row["method"]) for row in made["rows"]]
    assert rows == [(2, "fp32"), (2, "terngrad"), (4, "fp32"), (4, "terngrad")]
    assert made["machine"]["torch"] == torch.__version__ and made["arguments"]["steps"] == 3
    wrong = f"--data {tmp_path} --workloads lenet-terngrad --methods fp32 --optimizers"
    for more, said in (
        ("lamb", "no rate for lamb; it has sgd"),
        ("sgd --workers 3", "3 workers cannot share a batch of 64"),
    ):
        assert accuracy.main(f"{wrong} {more}".split()) == 2
        assert said in capsys.readouterr().err


def test_every_method_of_the_papers_tables_is_read():
    for table in paper.TABLES.values():
        assert all(parse(method).name == method for method in table.methods) and table.published


def test_a_line_that_was_cut_off_is_run_again_and_an_odd_one_refused(tmp_path):
    file, task = tmp_path / "runs.jsonl", Task("gpt-1m", "adamw", "fp32", 2, 6)
    line = json.dumps(key_of(task) | {"measure": 1.0})
    file.write_text(f"{line}\n{line[:40]}")
    other = Task("gpt-1m", "adamw", "fp32", 2, 6, seed=1)
    assert [one["measure"] for one in finished(file, [other, task]).values()] == [1.0]
    append(file, key_of(other))
    assert list(finished(file, [other, task])) == [other, task]
    file.write_text(f"{{}}\n{line}\n")
    with pytest.raises(ValueError, match="line 1: no result of this benchmark"):
        finished(file, [task])


def test_a_line_of_an_earlier_version_is_refused(tmp_path):
    """A line whose "ternary" was TernGrad was taken for a result of Ternary."""
    file, task = tmp_path / "runs.jsonl", Task("gpt-1m", "adamw", "ternary", 2, 6)
    new = ("format", "data_crc", "link")
    older = {name: value for name, value in key_of(task).items() if name not in new}
    for line in (older, older | {"format": 3}):
        file.write_text(json.dumps(line | {"measure": 1.0}) + "\n")
        with pytest.raises(ValueError, match="line 1: .*expected 2: .* called terngrad 'ternary'"):
            finished(file, [task])


def test_runs_of_other_data_or_links_are_run_again(tmp_path, monkeypatch):
    """The numbers of the first data, or of loopback, were printed again."""
    words = "the quick brown fox jumps over the lazy dog. " * (HELD_OUT_SHARE * BLOCK // 45 + 1)
    for name, text in (("a", words), ("b", words.upper()), ("c", words)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "prose.txt").write_text(text)
    first = {"total_nbytes": 5, "parameters": 5, "steps_done": 3, "curve": [], "measure": 1.0}
    run = []

    def pretend(tasks, processes, link):
        run.append(len(tasks))
        return [(task, [first], 1.0) for task in tasks]

    monkeypatch.setattr(accuracy, "_run", pretend)
    for data, *more in (
        ("a",),
        ("b",),
        ("c",),  # the same text in another folder
        ("a", "--link", "1gbit"),
        ("b", "--link", "1gbit"),
        ("b", "--link", "1gbit"),
    ):
        options = f"--data {tmp_path / data} --out {tmp_path} --steps 3 --seeds 2 --methods fp32"
        assert accuracy.main([*options.split(), *more]) == 0
    assert run == [2, 2, 0, 2, 2, 0]


def result(method, measure, *, workload="w", bits=1.0, **more):
    task = Task(workload, "o", method, 4, 10, **more)
    return {**key_of(task), "measure": measure, "curve": [], "bits": bits}


def test_a_single_worker_has_no_bits():
    """It sends nothing: the first run of --workers 1 ended in a ZeroDivisionError."""
    first = {"total_nbytes": 0, "parameters": 5, "steps_done": 3, "curve": []}
    assert accuracy._line(Task("w", "o", "fp32", 1, 3), first, 1.0)["bits"] is None


def test_a_run_that_diverged_is_counted_and_not_averaged():
    runs = [result("m", measure, seed=s) for s, measure in enumerate((2.0, None, 4.0))]
    (row,) = accuracy.summarize(runs)
    assert (row["mean"], row["diverged"], row["seeds"], row["to_fp32"]) == (3.0, 1, 3, None)


def test_a_method_whose_bytes_are_not_known_has_a_row():
    """A hook of the user's own does not count what it sends."""
    (row,) = rows = accuracy.summarize([result("module:hook", 2.0, bits=None)])
    ((_, _, table),) = accuracy.tables(rows, {"w": "loss"})
    assert row["bits"] is None and list(table.columns[2].cells) == ["-"]


def test_the_largest_h_that_costs_little_is_printed():
    means = {
        "fp32": 1.0,
        "terngrad:every=30,warmup_steps=5": 1.03,
        "terngrad:every=45,warmup_steps=5": 1.05,
        "terngrad:every=60,warmup_steps=5": 1.2,
        "fp32:every=30": 1.5,
    }
    runs = [result(name, mean, workload="low") for name, mean in means.items()]
    runs += [result(name, 90 - mean, workload="high") for name, mean in means.items()]
    workloads = {name: SimpleNamespace(lower_is_better=name == "low") for name in ("low", "high")}
    lines = accuracy.longest(accuracy.summarize(runs), workloads, 0.06)
    for line, name in zip(lines[::2], workloads, strict=True):
        assert line.startswith(
            f"terngrad:every=H,warmup_steps=5, {name} under o, 4 workers, 10 steps: largest H"
            " within 0.06 of fp32 every step: 45 (30 costs 0.030, "
        )
    assert all(line.endswith(": none (30 costs 0.500)") for line in lines[1::2]) and len(lines) == 4
