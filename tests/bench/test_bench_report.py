"""``python -m gradcomp.bench report``: one page of result files, whatever state they are in."""

import csv
import json
import re
from html.parser import HTMLParser

from gradcomp.bench.report import main, page


def row(method, seconds, **more):
    found = {
        "method": method,
        "seconds": seconds,
        "p95_seconds": 1.1 * seconds,
        "exposed_seconds": seconds - 0.1,
        "predicted_seconds": 0.9 * seconds,
        "sent_nbytes": 4e6 * seconds,
        "cpu_seconds": 0.2,
        "phases": {"encode": 0.02, "first_phase": 0.1, "hidden": 0.03},
        "hidden_share": 0.25,
        "peak_nbytes": 5e8,
        "measure": None,
        "curve": [],
        "target_seconds": None,
    }
    return found | more


def train(rows=None, **more):
    """Return a result of bench train; `more` changes its case."""
    rows = rows or [
        row("none", 0.1),
        row("noop", 0.12),
        row("fp32", 1.1),
        row("terngrad <&>", 0.2),
        {"method": "mine", "failed": "hung <after> 3 s"},
    ]
    return {
        "benchmark": "train",
        "arguments": {"workload": "mlp", "steps": 9, "target": 85.0},
        "machine": {"processor": "A & B", "cores": 2, "torch": "2.13"},
        "cases": [{"ranks": 2, "link": "1gbit", "latency_s": 0.001, "rows": rows} | more],
    }


def accuracy():
    case = {"workload": "gpt-1m", "optimizer": "adamw", "workers": 4, "steps": 2000}
    method = {"method": "fp32", "factor": 1.0, "bits": 32.0, "seeds": 3, "diverged": 0}
    measured = {"mean": 1.34, "deviation": None, "curve": [[100, 2.0], [2000, 1.34]]}
    row = case | method | measured | {"to_fp32": 0.0, "to_bf16": None}
    return {"rows": [row], "measures": {"gpt-1m": "nats a byte"}}


def written(folder, **files):
    for name, found in files.items():
        (folder / f"{name}.json").write_text(found if isinstance(found, str) else json.dumps(found))


class Well(HTMLParser):
    """Every tag is closed in its order; nothing is fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.pictures = [], 0

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            assert name not in ("src", "href") or value.startswith("data:image/png;base64,")
        self.pictures += tag == "img"
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_has_tables_and_pictures_and_needs_nothing_else(tmp_path, capsys):
    curve = [[5, 5.5, 70.0], [9, 9.9, 88.0]]
    rows = [row("none", 0.1), row("fp32", 1.1, measure=88.0, curve=curve, target_seconds=9.9)]
    written(tmp_path, a=train(), b=train(rows), c=accuracy())
    assert main([str(tmp_path)]) == 0
    assert "3 of 3 files" in capsys.readouterr().out
    text = (tmp_path / "report.html").read_text()
    seen = Well()
    seen.feed(text)
    assert not seen.open and seen.pictures == 3 and text.count("─ ") == 3
    escaped = ["terngrad &lt;&amp;&gt;", "hung &lt;after&gt; 3 s", "A &amp; B"]
    of_train = ["2 ranks, 1gbit, 1 ms", "10.0x", "s to 85", "88"]
    of_accuracy = ["gpt-1m under adamw, 4 workers, 2000 steps: nats a byte", "+0.000"]
    for words in (*escaped, *of_train, *of_accuracy):
        assert words in text, words
    assert "<&>" not in text and "http" not in text


def test_tables_as_markdown(tmp_path):
    rows = [row("fp32", 1.1), {"method": "mine", "failed": "[Errno 9] no"}]
    written(tmp_path, a=train(rows, latency_s=None, over="mpi"), c=accuracy(), bad="{")
    assert main([str(tmp_path), "--out", str(tmp_path / "x.md")]) == 0
    lines = [line.rstrip() for line in (tmp_path / "x.md").read_text().splitlines()]
    heads = {"## a", "### mlp, 9 steps, 2 ranks, 1gbit, over MPI", "### left out bad.json"}
    assert heads < {*lines}
    assert "mine: [Errno 9] no" in lines and any(re.fullmatch(r"\|[-|]+\|", x) for x in lines)
    assert any(re.fullmatch(r"\| fp32 +\| +1100.0 \|.*", line) for line in lines)


def test_rows_and_pictures_beside_the_files(tmp_path):
    written(tmp_path, a=train(), bad="{", c=accuracy())
    assert main([str(tmp_path), "--beside"]) == 0
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["none", "noop", "fp32", "terngrad <&>", "mine"]
    third = [rows[2][name] for name in ("link", "seconds", "first_phase_seconds")]
    assert third == ["1gbit", "1.1", "0.1"] and rows[4]["failed"] == "hung <after> 3 s"
    for name in ("a", "c"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "bad.csv").exists() and "1.34" in (tmp_path / "c.csv").read_text()


def test_files_that_are_no_results_are_named_and_the_others_shown(tmp_path, capsys):
    written(tmp_path, good=train(), cut=json.dumps(train())[:200], other="[1, 2]")
    written(
        tmp_path, old={"benchmark": "train", "rows": []}, half=train() | {"cases": [{"ranks": 2}]}
    )
    lack = ("seconds", "phases", "method")  # a row of a file: the table, a picture, all of it
    for field in lack:
        broken = train()
        del broken["cases"][0]["rows"][2][field]
        written(tmp_path, **{field: broken})
    assert main([str(tmp_path), "--out", str(tmp_path / "x.html")]) == 0
    said = capsys.readouterr()
    assert "1 of 8 files" in said.out
    for name in map("{}.json".format, ("cut", "old", "other", "half", *lack)):
        assert f"left out {name}: " in said.err and name in (tmp_path / "x.html").read_text()
    assert "older version" in said.err


def test_nothing_to_show_is_said(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "no .json files" in capsys.readouterr().err
    written(tmp_path, x="{}")
    assert main([str(tmp_path)]) == 1


def test_the_same_files_make_the_same_page(tmp_path):
    written(tmp_path, a=train())
    files = [tmp_path / "a.json"]
    assert page(files) == page(files)
