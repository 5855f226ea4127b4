"""Measured figures of README and docs are those of docs/results, and every result is described."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("figures", ROOT / "docs/figures.py")
figures = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(figures)

RESULTS = ROOT / "docs/results"
DESCRIPTION = (RESULTS / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path):
    """Return a folder with the pages of the repository."""
    shutil.copy(ROOT / "README.md", tmp_path)
    pages = shutil.ignore_patterns("*.json*", "*.png", "*.csv")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=pages)
    return tmp_path


def test_pages_say_what_results_say():
    differences, counts = figures.check()
    assert not differences, "make figures: " + "; ".join(differences)
    assert sum(sourced for sourced, _ in counts.values()) > 500


@pytest.mark.parametrize(
    ("page", "right", "wrong"),
    [
        ("README.md", "| 32 | 834 |", "| 32 | 833 |"),
        ("README.md", "| 54 | 97.85 ± 0.13 |", "| 54 | 97.85 ± 1.13 |"),
        ("docs/howto/benchmarks.md", "9,108 (1.0x; -11 %)", "9,108 (1.0x; +11 %)"),
        ("docs/howto/benchmarks.md", "57.76 ± 0.61", "57.76 ± 0.62"),
        ("docs/explanation/accuracy.md", "1.5629 / 1.6080 / 1.5593: 1.5768", "1 / 2 / 3: 4"),
        ("docs/explanation/local-steps.md", "24 times as soon", "25 times as soon"),
    ],
)
def test_a_wrong_figure_is_named_and_written_anew(copy, page, right, wrong):
    file = copy / page
    before = file.read_text(encoding="utf-8")
    assert right in before
    file.write_text(before.replace(right, wrong), encoding="utf-8")
    differences, _ = figures.check(copy)
    assert differences and all(d.startswith(f"{page}: ") for d in differences)
    figures.check(copy, write=True)
    assert file.read_text(encoding="utf-8") == before


def test_a_sentence_that_is_gone_is_an_error_and_one_that_is_wrapped_is_not(copy):
    file = copy / "docs/explanation/local-steps.md"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("24 times as soon", "24\ntimes as soon"), encoding="utf-8")
    assert figures.check(copy)[0] == []
    file.write_text(text.replace("24 times as soon", "much sooner"), encoding="utf-8")
    (difference,) = figures.check(copy, write=True)[0]
    assert "found 0 times instead of once: '{:.0f} times as soon as fp32'" in difference


@pytest.mark.parametrize(
    "result",
    [p for p in RESULTS.iterdir() if p.suffix in (".json", ".jsonl") or p.is_dir()],
    ids=lambda p: p.name,
)
def test_every_result_has_a_date_a_machine_and_a_command(result):
    row = next(line for line in DESCRIPTION.splitlines() if line.startswith(f"| `{result.name}` |"))
    date, machine = row.split(" | ")[1:3]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date) and figures.runs()[result.name] == date
    commands = DESCRIPTION.split("```sh")[1]
    assert result.name in commands or f"`{result.name}` is the demo" in DESCRIPTION
    for file in (result / f"{result.name.partition('-')[2]}.json", result):
        if file.is_file() and file.suffix == ".json":
            found = json.loads(file.read_text(encoding="utf-8"))
            name = found.get("machine", {}).get("processor", machine)
            assert name.replace("(R)", "").startswith(machine)
            assert found.get("date", date) == date


def test_the_table_of_faults_says_of_how_many_cells_it_is(tmp_path, monkeypatch):
    """The last row of a cell counts; the page has one place for the table."""
    lost, unsaved = "PeerLost: rank 2 is stopped", "OSError: ranks [2] could not write their files"
    said = {"encode": [lost], "decode": ["PeerLost: wrong"], "checkpoint": [lost, unsaved]}
    rows = [
        {"transport": "mpich", "phase": phase, "fault": "frozen", "said": words}
        for phase, words in [*said.items(), ("decode", [lost])]
    ]
    file = tmp_path / figures.RESULTS / figures.FAULTS_FILE
    file.parent.mkdir(parents=True)
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    page = (ROOT / figures.FAULTS_PAGE).read_text(encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    figures.load.cache_clear()
    text = figures.with_faults(figures.FAULTS_PAGE, page)
    figures.load.cache_clear()
    row = f"| no record | {lost} (3 of 3 phases); {unsaved} (1 of 3 phases) | no record |"
    assert text.count(f"(SIGSTOP, a debugger) {row}\n") == 1
    assert text.count(f"Record of 3 of {figures.CELLS} cells.\n<!-- /faults -->\n") == 1
    parts = [re.split("<!-- /?faults -->", one) for one in (page, text)]
    assert [len(one) for one in parts] == [3, 3] and parts[0][::2] == parts[1][::2]


def test_speed_that_is_older_than_its_kernels_is_listed(monkeypatch, capsys):
    days = {"train-old.json": "2000-01-01", "demo-old.json": "2000-01-01", "train-new.json": "9999"}
    monkeypatch.setattr(figures, "runs", lambda: days)
    listed = figures.older_than_kernels()
    assert listed in ([], ["train-old.json"])  # none without a history
    assert figures.main(["--check"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("older than the kernels that it measured") == len(listed)
