"""python -m gradcomp.plan: what it prints and writes, and what it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from gradcomp import Block, OneBit
from gradcomp.plan import METHODS, Rates, StageRate
from gradcomp.plan import cli as plan
from gradcomp.plan.accuracy import expected
from gradcomp.plan.rates import CAST_STAGES, STAGES

BLOCK2, ONEBIT = (expected("adam", codec).figure for codec in (Block(2), OneBit()))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    path = tmp_path_factory.mktemp("rates") / "rates.json"
    found = {
        m.name: dict.fromkeys(
            STAGES if m.codec else CAST_STAGES, StageRate(1e-5, 1e-6, 1e-10, 1e-10)
        )
        for m in METHODS
    }
    path.write_text(json.dumps(Rates(found).to_dict()))
    return str(path)


def run(*words, module="gradcomp.plan", **environment):
    command = [sys.executable, "-m", *module.split(), *(str(w) for w in words)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=os.environ | {"COLUMNS": "100"} | environment,
    )


@pytest.fixture
def answer(capsys, monkeypatch):
    """Return a function like `run` that starts no process."""

    def answer(*words, **environment):
        for name, value in ({"COLUMNS": "100"} | environment).items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        status = plan.main([str(w) for w in words])
        return subprocess.CompletedProcess(words, status, *capsys.readouterr())

    return answer


def test_the_program_answers_and_writes(tmp_path, rates):
    out = run(
        "--model",
        "vgg16",
        "--link",
        "1gbit",
        "--latency",
        "0.1ms",
        "--nodes",
        "1:64",
        "--rates",
        rates,
        "--json",
        tmp_path / "plan.json",
        "--plot",
        tmp_path / "plan.png",
    )
    assert out.returncode == 0, out.stderr
    assert "VGG-16: 138,357,544 parameters" in out.stdout and "1 Gbit/s, 100 us" in out.stdout
    assert "Compress: over 1 Gbit/s, 100 us, train on" in " ".join(out.stdout.split())
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [r["nodes"] for r in found["rows"]][:: len(METHODS)] == [1, 2, 4, 8, 16, 32, 64]
    assert (
        found["method"].startswith("block4") and found["speedup"] > 5 and found["optimal_nodes"] > 1
    )
    assert found["recommendation"] in " ".join(out.stdout.split())
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "chosen", "columns"),
    [
        ([], "block4", {"Adam and its relatives", "SGD"}),
        (["--by-seconds"], "onebit", {"Adam and its relatives", "SGD"}),
        (["--codec", "onebit,block2,block4"], "onebit", {"Adam and its relatives", "SGD"}),
        (["--optimizer", "adamw"], "block4", {"adamw"}),
        (["--optimizer", "sgd"], "block4", {"sgd"}),
        (["--optimizer", "adamw", "--tolerance", "0.05"], "block2", {"adamw"}),
        (
            ["--optimizer", "sgd", "--tolerance-points", "2.0", "--tolerance", "0.1"],
            "onebit",
            {"sgd"},
        ),
        (["--optimizer", "muon"], "block4", {"muon"}),
    ],
)
def test_losses_stand_beside_the_seconds(answer, tmp_path, rates, words, chosen, columns):
    out = answer(
        "--model",
        "vgg16",
        "--link",
        "1gbit",
        "--nodes",
        "8",
        "--rates",
        rates,
        "--json",
        tmp_path / "plan.json",
        *words,
    )
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["method"].startswith(chosen) and found["method"] in found["permitted"]
    optimizer = words[1] if "--optimizer" in words else None
    assert found["optimizer"] == optimizer and set(found["losses"]["block4 all_gather"]) == columns
    (row,) = [
        line.split() for line in out.stdout.splitlines() if line.startswith("block2 all_gather ")
    ]
    wanted = {"adamw": [BLOCK2], "sgd": ["+0.51"], "muon": ["-"], None: [BLOCK2, "+0.51"]}[
        optimizer
    ]
    assert row[2 : 2 + len(columns)] == wanted
    if columns & {"adamw"}:
        loss = found["losses"]["onebit all_gather"]["adamw"]
        assert (
            loss["loss"] == pytest.approx(expected("adam", OneBit()).loss)
            and loss["unit"] == "nats"
            and loss["seeds"] == 3
        )
        said = " ".join(out.stdout.split())
        assert (
            "of a byte GPT of 0.87 M parameters on prose under AdamW, N = 4, 2,000 steps, 3 seeds:"
            " terngrad" in said
        )
        assert (
            "terngrad -0.020 nats with precondition=True (decides nothing: runs of 600 steps"
            in said
        )
        assert not any(name.startswith("terngrad exact") for name in found["permitted"])
    assert ("Name the optimizer" in out.stdout) == (optimizer is None and bool(words))
    assert (
        "under some optimizer are left out: name yours with --optimizer"
        in " ".join(out.stdout.split())
    ) == (not words)


def test_a_codec_that_is_left_out_is_named_where_no_more_nodes_than_one_are_recommended(
    answer, rates
):
    """It said that no more nodes are faster than one, below a table in which they were."""
    out = answer(
        "--model",
        "resnet50",
        "--link",
        "1gbe",
        "--nodes",
        "1:4",
        "--codec",
        "terngrad,fp32",
        "--optimizer",
        "adamw",
        "--rates",
        rates,
    )
    assert out.returncode == 0 and "no more nodes are faster than one" in out.stdout
    assert re.search(
        r"terngrad requantize would be [\d.]+ times as fast a step and was not measured"
        r" under adamw; not recommended",
        out.stdout,
    )


def test_a_column_with_losses_in_two_units_says_which(answer, rates):
    out = answer(
        "--model",
        "lenet",
        "--nodes",
        "1:2",
        "--codec",
        "terngrad,onebit,fp32",
        "--optimizer",
        "sgd",
        "--rates",
        rates,
    )
    assert re.search(r"terngrad all_gather +\+7\.510 nats ", out.stdout) and re.search(
        r"onebit all_gather +\+1\.95 points ", out.stdout
    )


def test_no_cell_of_a_table_is_cut(answer, rates):
    out = answer("--model", "vgg16", "--nodes", "1:64", "--rates", rates, COLUMNS="40")
    assert out.returncode == 0 and "\u2026" not in out.stdout
    assert re.search(
        rf"onebit reduce_scatter +{re.escape(ONEBIT)} +\+1\.95 points +2\.40 s", out.stdout
    )


def test_it_calibrates_where_no_rates_are_given(answer, tmp_path):
    out = answer(
        "--model",
        "lenet",
        "--nodes",
        "2",
        "--codec",
        "fp32,onebit",
        "--json",
        tmp_path / "plan.json",
    )
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    # its rates differ from time to time
    assert "Codecs were timed 3 times here: onebit " in " ".join(out.stdout.split())
    assert len(found["rates_repeated"]) == 3
    beside = {"terngrad all_gather", "outer step"}  # for what is said of local steps
    assert found["rates"].keys() == {"onebit all_gather", "onebit reduce_scatter", *beside}
    assert 0 < found["rates"]["onebit all_gather"]["encode"]["per_value_s"] < 1e-5


def test_rates_from_before_local_steps_are_not_taken_for_free(rates, capsys):
    with pytest.raises(SystemExit):
        plan.parse(["--rates", rates, "--every", "30"])
    assert "says nothing of 'outer step'" in capsys.readouterr().err


def test_rates_of_an_earlier_answer_serve_again(answer, tmp_path, rates):
    asked = ("--model", "lenet", "--nodes", "2,4", "--codec", "fp32,onebit")
    first, second = (tmp_path / name for name in ("first.json", "second.json"))
    assert answer(*asked, "--rates", rates, "--json", first).returncode == 0
    out = answer(*asked, "--rates", first, "--json", second)
    assert out.returncode == 0, out.stderr
    assert json.loads(first.read_text()) == json.loads(second.read_text())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"onebitt all_gather": {}}, "unknown method 'onebitt all_gather'"),
        ({"onebit all_gather": {"statistisc": {"fixed_s": 1.0}}}, "has no stage 'statistisc'"),
        ({"bf16": {"encode": {}}}, "has no stage 'encode', only cast, uncast"),
        ({"onebit all_gather": {"encode": {"fixed_s": -1.0}}}, "fixed_s must be at least 0"),
        ({"onebit all_gather": {"encode": {"fixed": 1.0}}}, "fixed"),
        ([1], "does not hold rates"),
    ],
)
def test_rates_that_are_none(tmp_path, capsys, found, message):
    (tmp_path / "rates.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit):
        plan.parse(["--rates", str(tmp_path / "rates.json")])
    assert message in capsys.readouterr().err


def test_shapes_of_ones_own_and_every_option(answer, tmp_path, rates):
    (tmp_path / "mine.json").write_text(
        json.dumps([["fc.weight", [4000, 1000]], ["fc.bias", [4000]]])
    )
    out = answer(
        "--shapes",
        tmp_path / "mine.json",
        "--nodes",
        "2:6:2",
        "--frame-time",
        "1ms",
        "--update-time",
        "2ms",
        "--post-time",
        "3ms",
        "--minibatch",
        "8",
        "--weak",
        "--cores",
        "1",
        "--jitter",
        "0.05",
        "--stragglers",
        "0.5:2",
        "--double-buffering",
        "--exchange",
        "all_reduce,reduce_scatter",
        "--rates",
        rates,
        "--json",
        tmp_path / "plan.json",
    )
    assert out.returncode == 0, out.stderr
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["model"], found["numel"], found["weak"], found["t_post"]) == (
        "mine",
        4_004_000,
        True,
        0.003,
    )
    assert {(r["nodes"], r["method"]) for r in found["rows"]} >= {
        (2, "fp32"),
        (4, "onebit reduce_scatter"),
    }
    assert not any("all_gather" in r["method"] for r in found["rows"])
    assert all(r["straggler_seconds"] > 0 for r in found["rows"])
    assert "waits" in out.stdout and "; double buffering" in out.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "vgg19"], "unknown model 'vgg19'; there are LeNet"),
        (["--link", "fast"], "link 'fast' is not understood; rates like 100mbit"),
        (["--link", "infinband"], "infiniband are; did you mean infiniband?"),
        (["--model", "vgg61"], "did you mean VGG-16?"),
        (["--codec", "fp32,onebitt"], "did you mean onebit?"),
        (["--modl", "vgg16"], "unknown option --modl; did you mean --model?"),
        (
            ["--optimizer", "adamv"],
            "optimizer 'adamv' is unknown; did you mean adam or adamw? choose one of adam, adamw",
        ),
        (["--latency", "soon"], "time 'soon' is not understood"),
        (["--nodes", "64:1"], "--nodes '64:1' is not understood"),
        (["--nodes", "0:4"], "--nodes '0:4' is not understood"),
        (["--nodes", "1:5000"], "from 1 to 4096"),
        (["--nodes", "two"], "--nodes 'two' is not understood"),
        (
            ["--codec", "zip"],
            "--codec 'zip' is unknown; there are fp32, bf16, terngrad, ternary, onebit",
        ),
        (["--exchange", "mail"], "--exchange 'mail' is unknown; there are all_reduce"),
        (["--codec", "fp32", "--exchange", "all_gather"], "no method has both"),
        (["--minibatch", "0"], "minibatch must be positive and finite, got 0.0"),
        (["--flops", "-1"], "--flops must be positive and finite, got -1.0"),
        (["--flops", "1e12", "--frame-time", "1ms"], "exclude each other"),
        (["--model", "lenet", "--shapes", "x.json"], "exclude each other"),
        (["--shapes", "/nowhere.json"], "No such file"),
        (["--rates", "/nowhere.json"], "No such file"),
        (["--cores", "0"], "--cores must be positive and finite, got 0.0"),
        (["--jitter", "-1"], "jitter must be in [0, 10]"),
        (["--stragglers", "0.1"], "--stragglers '0.1' is not understood; SHARE:FACTOR"),
        (["--stragglers", "2:2"], "slow_share must be in"),
        (["--jitter", "1e200"], "jitter must be in [0, 10]"),
        (["--seed", "3"], "--seed has no effect: the slowest of N nodes is computed, not drawn"),
        (["--bucket-cap-mb", "1"], "--bucket-cap-mb is gone: set bucket_cap_mb"),
        (["--validate"], "--validate is gone: python -m gradcomp.bench train compares"),
        (["--measure", "--adagrad"], "--adagrad is gone: --measure prints the seconds"),
        (["--measure", "--flops", "1e12"], "give --frame-time, not --flops"),
        (["--ranks", "2"], "--ranks needs --measure"),
        (
            ["--optimizer", "adam w"],
            "optimizer must be a name such as adamw, sgd or lamb, got 'adam w'",
        ),
        (
            ["--optimizer", "sgd", "--tolerance", "-1"],
            "the tolerance in nats must be at least 0 and finite, got -1.0",
        ),
        (
            ["--optimizer", "sgd", "--tolerance-points", "inf"],
            "the tolerance in points must be at least 0 and finite, got inf",
        ),
        (["--tolerance", "0.1"], "--tolerance goes with --optimizer, got 0.1 without one"),
        (["--every", "0"], "every must be an integer of at least 1, got 0"),
        (["--every", "4", "--delay", "4"], "1 fragments and a delay of 4 do not go into 4 steps"),
        (["--fragments", "2"], "--fragments and --delay go with --every"),
        (
            ["--every", "4", "--double-buffering"],
            "--every and --double-buffering exclude each other",
        ),
        (
            ["--tolerance-points", "1"],
            "--tolerance-points goes with --optimizer, got 1.0 without one",
        ),
    ],
)
def test_bad_input_is_one_sentence(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        plan.parse(words)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert message in error and error.count("\n") == 1


def test_bad_input_as_a_program_has_no_traceback():
    for module in ("gradcomp.plan", "gradcomp.bench plan"):
        out = run("--link", "fast", module=module)
        assert out.returncode == 2 and out.stdout == ""
        assert out.stderr.count("\n") == 1 and "not understood" in out.stderr


def test_help_teaches():
    out = run("--help")
    assert out.returncode == 0
    for word in (
        "examples:",
        "--link 1gbit",
        "--stragglers 0.1:2",
        "infiniband",
        "--measure --ranks 2",
    ):
        assert word in out.stdout


def test_without_rich_it_says_what_to_install(tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich/__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    out = run("--nodes", "2", PYTHONPATH=path)
    assert out.returncode == 2
    assert (
        "needs rich: pip install 'gradcomp[bench]'" in out.stderr and "Traceback" not in out.stderr
    )


def test_shapes_beyond_any_model_are_refused(tmp_path, rates):
    (tmp_path / "huge.json").write_text(json.dumps([["w", [10**11, 10**11]]]))
    out = run("--shapes", tmp_path / "huge.json", "--nodes", "2", "--rates", rates)
    assert (
        out.returncode == 2 and "must hold at most" in out.stderr and "Traceback" not in out.stderr
    )


def test_importing_the_room_is_quiet():
    script = (
        "import sys, gradcomp; assert 'gradcomp.plan' not in sys.modules;"
        " gradcomp.plan.optimal_nodes; print([m for m in ('rich', 'matplotlib') if m in"
        " sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1:64", [1, 2, 4, 8, 16, 32, 64]),
        ("3:20", [3, 6, 12, 20]),
        ("2:10:4", [2, 6, 10]),
        ("8,2,8", [2, 8]),
        ("7", [7]),
    ],
)
def test_node_counts(text, expected):
    assert plan.parse_nodes(text) == expected


def test_nodes_of_several_ranks_have_hierarchical_ways(capsys, tmp_path):
    words = [
        "--model",
        "lenet",
        "--link",
        "100mbit",
        "--nodes",
        "2,4",
        "--codec",
        "fp32,terngrad",
        "--frame-time",
        "1ms",
    ]
    assert (
        plan.main(
            [
                *words,
                "--ranks-per-node",
                "4",
                "--inside",
                "10gbit",
                "--json",
                str(tmp_path / "x.json"),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "terngrad hierarchical" in shown and "4 ranks a node, 10 Gbit/s, 0 s inside" in shown
    found = json.loads((tmp_path / "x.json").read_text())
    assert (found["ranks_per_node"], found["inside_bits_per_s"], found["rows"][0]["ranks"]) == (
        4,
        1e10,
        8,
    )
    assert plan.main([*words]) == 0
    assert "hierarchical" not in capsys.readouterr().out
    for wrong, said in (
        (["--inside", "10gbit"], "goes with --ranks-per-node"),
        (["--ranks-per-node", "0"], "ranks of a node must be"),
        (["--exchange", "hierarchical"], "needs --ranks-per-node"),
    ):
        with pytest.raises(SystemExit):
            plan.main([*words, *wrong])
        assert said in capsys.readouterr().err
