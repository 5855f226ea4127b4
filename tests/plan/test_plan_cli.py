"""python -m gradcomp.plan: what it prints and writes, and what it refuses."""

import json
import os
import re
import sys

import pytest
from _forks import python
from _ranks import output_of

from gradcomp import Block, OneBit
from gradcomp.plan import METHODS, Rates, StageRate, cli
from gradcomp.plan.accuracy import expected
from gradcomp.plan.rates import CAST_STAGES, OUTER, PRECONDITION, STAGES

BLOCK2, ONEBIT = (expected("adam", codec).figure for codec in (Block(2), OneBit()))
FAMILIES = {"Adam and its relatives", "SGD"}
RATE = StageRate(1e-5, 1e-6, 1e-10, 1e-10)

pytestmark = pytest.mark.slow


@pytest.fixture
def ask(capsys, monkeypatch, tmp_path):
    """Return a function that runs the planner in this process, on rates that never change; it
    returns what was printed, on one line, and what was written.
    """
    stages = {m.name: dict.fromkeys(STAGES if m.codec else CAST_STAGES, RATE) for m in METHODS}
    stages[PRECONDITION] = {"apply": RATE}
    rates, file = tmp_path / "rates.json", tmp_path / "plan.json"
    rates.write_text(json.dumps(Rates(stages).to_dict()))

    def ask(words, *more, columns=100):
        monkeypatch.setenv("COLUMNS", str(columns))
        given = [] if "--rates" in more else ["--rates", rates]
        words = [str(w) for w in (*words.split(), *more, *given, "--json", file)]
        assert cli.main(words) == 0, capsys.readouterr().err
        return capsys.readouterr().out, json.loads(file.read_text())

    ask.rates = rates
    return ask


def run(*words, module="gradcomp.plan", start=None, **environment):
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment = alone | {"COLUMNS": "100"} | environment
    command = *(start or python()), "-m", *module.split(), *words
    return output_of(*command, env=environment, timeout=200)


def run_with(folder, name, text):
    """Run the planner with a module of this text in place of another."""
    (folder / f"{name}.py").write_text(text)
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return run("--nodes", 2, start=[sys.executable], PYTHONPATH=path)


# ---- answers -------------------------------------------------------------------------------------


def test_it_answers_and_writes(ask, tmp_path):
    picture = tmp_path / "plan.png"
    words = "--model vgg16 --link 1gbit --latency 0.1ms --nodes 1:64 --plot"
    shown, found = ask(words, picture)
    assert "VGG-16: 138,357,544 parameters" in shown and "1 Gbit/s, 100 us" in shown
    assert "Compress: over 1 Gbit/s, 100 us, train on" in shown
    assert [r["nodes"] for r in found["rows"]][:: len(METHODS)] == [1, 2, 4, 8, 16, 32, 64]
    assert found["method"].startswith("block8") and found["speedup"] > 3
    assert found["optimal_nodes"] > 1 and found["recommendation"] in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "chosen", "columns", "block2"),
    [
        ("", "block8", FAMILIES, [BLOCK2, "+0.51"]),
        ("--by-seconds", "onebit", FAMILIES, [BLOCK2, "+0.51"]),
        ("--codec onebit,block2,block4", "onebit", FAMILIES, [BLOCK2, "+0.51"]),
        ("--optimizer adamw", "entropy:bits=1.25", {"adamw"}, [BLOCK2]),
        ("--optimizer splitadamw", "block8", {"splitadamw"}, [BLOCK2]),
        ("--optimizer splitadamw --tolerance 0.05", "block2", {"splitadamw"}, [BLOCK2]),
        ("--optimizer sgd", "entropy:bits=1.25", {"sgd"}, ["+0.51"]),
        ("--optimizer sgd --tolerance-points 2 --tolerance 0.1", "onebit", {"sgd"}, ["+0.51"]),
        ("--optimizer muon", "entropy:bits=3.2", {"muon"}, ["-"]),
        ("--optimizer lion", "block8", {"lion"}, ["-"]),
    ],
)
def test_losses_stand_beside_the_seconds(ask, words, chosen, columns, block2):
    shown, found = ask(f"--model vgg16 --link 1gbit --nodes 8 {words}")
    assert found["method"].startswith(chosen) and found["method"] in found["permitted"]
    named = "--optimizer" in words
    assert found["optimizer"] == (next(iter(columns)) if named else None)
    assert set(found["losses"]["block4 all_gather"]) == columns
    (row,) = [line.split() for line in shown.splitlines() if line.startswith("block2 all_gather ")]
    assert row[2 : 2 + len(columns)] == block2
    if "adamw" in columns:
        loss = found["losses"]["onebit all_gather"]["adamw"]
        assert loss["loss"] == pytest.approx(expected("adam", OneBit()).loss)
        assert (loss["unit"], loss["seeds"]) == ("nats", 3)
        for line in (
            "of a byte GPT of 0.87 M parameters on prose under AdamW, N = 4, 2,000 steps, 3 seeds:",
            "terngrad -0.020 nats with precondition=True (decides nothing: runs of 600 steps",
        ):
            assert line in shown
        assert not any(name.startswith("terngrad exact") for name in found["permitted"])
    assert ("Name the optimizer" in shown) == (bool(words) and not named)
    left_out = "safe for every optimizer is recommended: name yours with --optimizer"
    assert (left_out in shown) == (not words)


HOSTS = "--model lenet --nodes 2,4 --codec fp32,terngrad --ranks-per-node 4 --inside 10gbit"


@pytest.mark.parametrize(
    ("words", "columns", "shows"),
    [
        # it said that no more nodes are faster than one, below a table in which they were
        ("--codec terngrad,fp32 --optimizer adamw --nodes 1:4", 100, "no more nodes are faster"),
        (
            "--codec terngrad,fp32 --optimizer adamw --nodes 1:4",
            100,
            r"terngrad requantize would be [\d.]+ times as fast a step and was not measured under",
        ),
        # a column with losses in two units says which; no cell is cut
        ("--optimizer sgd --nodes 1:2", 100, r"terngrad all_gather +\+7\.510 nats "),
        ("--by-seconds --nodes 1:64", 40, r"onebit all_gather .* \+1\.95 points( +[\d.]+ m?s){7}"),
        (HOSTS, 100, "terngrad hierarchical"),
        (HOSTS, 100, "; 4 ranks a node, 10 Gbit/s, 0 s inside"),
        ("--model lenet --nodes 2 --double-buffering", 100, "; double buffering"),
    ],
)
def test_what_is_shown(ask, words, columns, shows):
    shown, _ = ask(words, columns=columns)
    assert re.search(shows, shown) and "\u2026" not in shown, shown
    assert ("hierarchical" in shown) == ("--ranks-per-node" in words)


def test_shapes_of_ones_own_and_every_option(ask, tmp_path):
    (tmp_path / "mine.json").write_text('[["fc.weight", [4000, 1000]], ["fc.bias", [4000]]]')
    shown, found = ask(
        "--nodes 2:6:2 --frame-time 1ms --update-time 2ms --post-time 3ms --minibatch 8 --weak"
        " --cores 1 --jitter 0.05 --stragglers 0.5:2 --double-buffering --ranks-per-node 2"
        " --inside 1gbit --exchange all_reduce,reduce_scatter --shapes",
        tmp_path / "mine.json",
    )
    wanted = {"model": "mine", "numel": 4_004_000, "weak": True, "minibatch": 8, "t_frame": 1e-3}
    wanted |= {"t_update": 2e-3, "t_post": 3e-3, "ranks_per_node": 2, "inside_bits_per_s": 1e9}
    wanted |= {"stragglers": {"jitter": 0.05, "slow_share": 0.5, "slow_factor": 2}}
    assert {name: found[name] for name in wanted} == wanted
    rows = {(r["nodes"], r["method"]): r for r in found["rows"]}
    assert {(2, "fp32"), (4, "onebit reduce_scatter")} <= rows.keys()
    assert not any("all_gather" in name or "hierarchical" in name for _, name in rows)
    assert all(r["straggler_seconds"] > 0 and r["ranks"] == 2 * r["nodes"] for r in rows.values())
    assert "waits" in shown and "; double buffering" in shown


def test_local_steps_are_compared_beside_every_step(ask, tmp_path):
    stages = json.loads(ask.rates.read_text()) | {OUTER: {"apply": {"fixed_s": 1e-3}}}
    (tmp_path / "new.json").write_text(json.dumps(stages))
    words = "--model lenet --nodes 2 --codec fp32,onebit --every 30 --fragments 2 --delay 5"
    _, found = ask(words, "--rates", tmp_path / "new.json")
    late = " every 30 in 2 parts, 5 late"
    plain = ["onebit all_gather", "onebit reduce_scatter"]
    names = [row["method"] for row in found["rows"]]
    assert names == ["fp32", *plain, f"identity{late}", *(name + late for name in plain)]


def test_it_calibrates_where_no_rates_are_given_and_takes_them_again(ask, tmp_path, capsys):
    words = ["--model", "lenet", "--nodes", "2,4", "--codec", "fp32,onebit", "--json"]
    first, second = (tmp_path / name for name in ("first.json", "second.json"))
    assert cli.main([*words, str(first)]) == 0
    shown, found = capsys.readouterr().out, json.loads(first.read_text())
    # its rates differ from time to time
    assert "Codecs were timed 3 times here: onebit " in shown and len(found["rates_repeated"]) == 3
    beside = {"terngrad all_gather", "terngrad exact", "outer step"}  # of local steps
    beside.add("precondition")
    assert found["rates"].keys() == {
        "format",
        "onebit all_gather",
        "onebit reduce_scatter",
        *beside,
    }
    assert 0 < found["rates"]["onebit all_gather"]["encode"]["per_value_s"] < 1e-5
    assert cli.main([*words, str(second), "--rates", str(first)]) == 0
    again = json.loads(second.read_text())
    for one in (found, again):  # of rates that were measured once there is no range
        del one["rates_repeated"], one["break_even_range"], one["crossing_lines"]
        del one["recommendation"]
    assert again == found


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
    assert cli.parse_nodes(text) == expected


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--modl vgg16", "unknown option --modl; did you mean --model?"),
        ("--model vgg61", "did you mean VGG-16?"),
        ("--model lenet --shapes x.json", "--model and --shapes exclude each other"),
        ("--shapes /nowhere.json", "/nowhere.json: No such file"),
        ("--minibatch 0", "minibatch must be positive and finite, got 0.0"),
        ("--minibatch x", "argument --minibatch: invalid float value: 'x'"),
        ("--flops -1", "--flops must be positive and finite, got -1.0"),
        ("--flops 1e12 --frame-time 1ms", "--frame-time and --flops exclude each other"),
        ("--link fast", "link 'fast' is not understood; write a rate like 100mbit"),
        ("--link infinband", "infiniband; did you mean infiniband?"),
        ("--nodes 64:1", "--nodes '64:1' is not understood"),
        ("--nodes 0:4", "--nodes '0:4' is not understood"),
        ("--nodes 1:5000", "from 1 to 4096"),
        ("--nodes two", "--nodes 'two' is not understood"),
        ("--inside 10gbit", "--inside needs --ranks-per-node"),
        ("--ranks-per-node 0", "ranks of a node must be"),
        ("--cores 0", "--cores must be positive and finite, got 0.0"),
        ("--stragglers 0.1", "--stragglers '0.1' is not understood; write SHARE:FACTOR"),
        ("--codec zip", "--codec 'zip' is unknown; there are fp32, bf16, terngrad, ternary"),
        ("--codec fp32,onebitt", "did you mean onebit?"),
        ("--codec topk", "--codec 'topk' is unknown"),
        ("--exchange mail", "--exchange 'mail' is unknown; there are all_reduce"),
        ("--exchange hierarchical", "needs --ranks-per-node"),
        ("--codec fp32 --exchange all_gather", "no method has both"),
        ("--optimizer adamv", "is unknown; did you mean adam or adamw? choose one of adam,"),
        ("--optimizer sgd --tolerance -1", "in nats must be at least 0 and finite, got -1.0"),
        ("--optimizer sgd --tolerance-points inf", "in points must be at least 0 and finite, got"),
        ("--tolerance 0.1", "--tolerance needs --optimizer"),
        ("--tolerance-points 1", "--tolerance-points needs --optimizer"),
        ("--every 4 --double-buffering", "--every and --double-buffering exclude each other"),
        ("--fragments 2", "--fragments needs --every"),
        ("--delay 2", "--delay needs --every"),
        ("--rates /nowhere.json", "/nowhere.json: No such file"),
        ("--rates rates.json --every 30", "rates.json has no rates of 'outer step'"),
        ("--rates old.json --codec entropy", "old.json has no rates of 'entropy all_gather'"),
        ("--rates old.json --codec ternary --optimizer sgd", "no rates of 'ternary all_gather'"),
        ("--rates old.json --codec fp32,onebit --optimizer adamw", "no rates of 'precondition'"),
        ("--measure --flops 1e12", "give --frame-time"),
        ("--ranks 2", "--ranks needs --measure"),
        ("--measure --ranks 1", "--ranks must be at least 2, got 1"),
        ("--seed 3", "--seed has no effect: the slowest of N nodes is computed, not drawn"),
        ("--bucket-cap-mb 1", "--bucket-cap-mb is gone: set bucket_cap_mb"),
        ("--validate", "--validate is gone: python -m gradcomp.bench train compares"),
        ("--measure --adagrad", "--adagrad is gone: --measure prints the seconds"),
        ("--nodes 2 --model lenet --json /nowhere/x", "/nowhere/x: No such file"),
        ("--nodes 2 --model lenet --plot x.zip", "Format 'zip' is not supported"),
    ],
)
def test_bad_input_is_one_sentence(words, message, ask, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text('{"onebit all_gather": {}, "onebit reduce_scatter": {}}')
    rates = ["--rates", str(ask.rates)] if "/nowhere/x" in words or "--plot" in words else []
    try:
        status = cli.main([*words.split(), *rates])
    except SystemExit as ended:
        status = ended.code
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize("module", ["gradcomp.plan", "gradcomp.bench plan"])
def test_bad_input_as_a_program_has_no_traceback(module):
    out = run("--link", "fast", module=module)
    assert (out.returncode, out.stdout, out.stderr.count("\n")) == (2, "", 1)
    assert "not understood" in out.stderr


def test_it_measures_with_ranks_of_its_own(tmp_path):
    out = run("--measure", "--ranks", 2, "--json", tmp_path / "plan.json")
    assert out.returncode == 0, out.stderr
    for said in ("2 ranks at once", "all_to_all: ", "AdaGrad", "(--post-time)"):
        assert said in out.stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    assert {r["nodes"] for r in found["rows"]} == {1, 2}
    assert found["model"] == "LeNet" and found["minibatch"] == 128


def test_measuring_without_ranks_says_how_to_get_some():
    out = run("--measure")
    assert out.returncode == 2
    assert "--ranks 2 starts some here" in out.stderr and out.stderr.count("\n") == 1


def test_help_teaches():
    out = run("--help")
    assert out.returncode == 0
    for word in ("examples (docs/", "--link 1gbit", "infiniband", "--measure --ranks 2", ": 0.02"):
        assert word in out.stdout


def test_without_rich_it_says_what_to_install(tmp_path):
    out = run_with(tmp_path, "rich", "raise ModuleNotFoundError('no rich', name='rich')")
    assert out.returncode == 2 and "Traceback" not in out.stderr
    assert "needs rich: pip install 'gradcomp[bench]'" in out.stderr


def test_ctrl_c_during_imports_is_one_line(tmp_path):
    """It ended in a traceback: torch is imported before the program's own first line."""
    out = run_with(tmp_path, "torch", "import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert (out.returncode, out.stderr) == (130, "interrupted\n")
