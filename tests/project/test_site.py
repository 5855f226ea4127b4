"""The documentation site is built without a warning, its links and anchors resolve, and the
notebook in it has run.
"""

import json
import os
import re
import sys
import zlib
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from _ranks import output_of
from test_docs import FENCE, FRAMEWORKS, PAGES, PUBLIC, ROOT

# one build for all of them, by one worker; on a busy machine it takes minutes
pytestmark = [
    *(pytest.mark.slow, pytest.mark.extras, pytest.mark.xdist_group("site")),
    pytest.mark.timeout(900),
]
NOTEBOOK = "examples/notebook.ipynb"
EXTENSIONS = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
SHOWN = [page for page in PAGES if page.name != "index.md" and page != ROOT / "README.md"]


class Page(HTMLParser):
    """What a page refers to, what can be referred to in it, classes of its blocks, rows of its
    tables.
    """

    def __init__(self, file):
        super().__init__()
        self.links, self.loads, self.classes, self.rows, self.ids = [], [], [], [], set()
        self.text, self.images, self._in_cell = "", 0, False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        self.classes += (given.get("class") or "").split()
        self.images += tag == "img"
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") or (
            tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload")
        ):
            self.loads += [given[k] for k in ("src", "href") if k in given]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell &= tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self._in_cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, in an environment that finds no other machine.

    `make docs` builds it with a theme and pages of source code that take longer than all else.
    """
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs"]
    sphinx += ["-D", "html_theme=basic", "-D", f"extensions={','.join(EXTENSIONS)}"]
    command = [*sphinx, "-d", folder / "doctrees", ".", folder / "html"]
    proxies = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
    nowhere = os.environ | dict.fromkeys(proxies, "http://127.0.0.1:9")
    built = output_of(*command, cwd=ROOT, env=nowhere, timeout=800)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    """Return {file: page} of everything but lists that Sphinx makes itself."""
    return {file: Page(file) for file in site.rglob("*.html")}


def test_the_site_for_users_has_these_extensions():
    text = (ROOT / "docs/conf.py").read_text(encoding="utf-8")
    (line,) = re.findall(r"^extensions = (\[.*\])$", text, re.MULTILINE)
    assert json.loads(line) == [*EXTENSIONS, "sphinx.ext.viewcode"]


def test_every_page_is_there(site, pages):
    for page in SHOWN:
        assert site / page.relative_to(ROOT).with_suffix(".html") in pages
    assert (site / "examples/notebook.html") in pages
    assert "url=docs/index.html" in (site / "index.html").read_text(encoding="utf-8")


def test_links_and_anchors_resolve(pages):
    seen, wrong = 0, []
    for file, page in pages.items():
        for link in page.links:
            where = urlsplit(link)
            if where.scheme or link == "#":
                continue
            seen += 1
            there = (file.parent / unquote(where.path)).resolve() if where.path else file
            if not there.is_file():
                wrong.append(f"{file.name}: {link}")
            elif (
                where.fragment
                and there in pages
                and unquote(where.fragment) not in pages[there].ids
            ):
                wrong.append(f"{file.name}: {link} has no such anchor")
    assert seen > 2000
    assert not wrong, wrong[:20]


def test_pages_load_nothing_from_elsewhere(site, pages):
    for file, page in pages.items():
        assert page.loads or file == site / "index.html"
        assert not [target for target in page.loads if urlsplit(target).netloc], file
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_the_first_page_has_the_table_and_the_diff_of_the_readme(site, pages):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first = next(part for part in text.split("\n\n") if part.startswith("|"))
    table = [line.strip("| ").split(" | ") for line in first.splitlines() if "---" not in line]
    plain = [[cell.replace("`", "").strip("| ") for cell in row] for row in table]
    page = pages[site / "docs/index.html"]
    shown = [[cell.strip().replace("\N{NO-BREAK SPACE}", " ") for cell in row] for row in page.rows]
    filled = [[cell for cell in row if cell] for row in shown]
    for row in plain:
        assert [cell for cell in row if cell] in filled, row
    diff = next(block["body"] for block in FENCE.finditer(text) if block["language"] == "diff")
    assert len(plain) == 5 and diff.strip() in page.text
    assert "highlight-diff" in page.classes


def test_every_public_name_is_documented(site):
    packed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]  # after four lines of header
    entries = [line.split() for line in zlib.decompress(packed).decode().splitlines()]
    found = {words[0] for words in entries if words[1].startswith("py:")}
    names = "amp codecs comm ddp fsdp integrations local onebit_sgd optim plan server"
    modules = {f"gradcomp.{name}" for name in names.split()}
    assert modules <= found
    assert not {*PUBLIC, *FRAMEWORKS} - found - {"gradcomp.__version__"}
    assert {
        "gradcomp.TernGrad",
        "gradcomp.PeerLost",
        "gradcomp.ddp.CompressionState.state_dict",
        "gradcomp.optim.SplitOptimizer.trail",
        "gradcomp.exchange.stats.Stats",
        "gradcomp.exchange.quality.Quality.worst",
        "gradcomp.launch.environment",
    } <= found


def test_marks_of_blocks_are_written_out(site, pages):
    """A reader sees which program runs on two ranks and what is only a fragment."""
    for mark, name in (("ranks=2", "on-two-ranks"), ("no-run", "fragment"), ("output", "prints")):
        for page in SHOWN:
            blocks = FENCE.finditer(page.read_text(encoding="utf-8"))
            shown = pages[site / page.relative_to(ROOT).with_suffix(".html")].classes.count(name)
            assert shown == sum(block["info"] == mark for block in blocks), (page.name, mark)
    # two tables; furo adds what scrolls them
    assert pages[site / "docs/howto/which-mode.html"].classes.count("prose") == 2
    assert "div.on-two-ranks::before" in (site / "_static/site.css").read_text(encoding="utf-8")


def test_the_notebook_is_committed_without_outputs_and_has_run(site, pages):
    committed = json.loads((ROOT / NOTEBOOK).read_text(encoding="utf-8"))
    assert not any(
        cell.get("outputs") or cell.get("execution_count") for cell in committed["cells"]
    )
    run = json.loads((site.parent / "jupyter_execute" / NOTEBOOK).read_text(encoding="utf-8"))
    outputs = [output for cell in run["cells"] for output in cell.get("outputs", [])]
    pictures = sum("image/png" in output.get("data", {}) for output in outputs)
    assert pictures == 4 == pages[site / "examples/notebook.html"].images
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, (
        "a warning is no thing to show"
    )
    printed = "".join(
        text for output in outputs if output["output_type"] == "stream" for text in output["text"]
    )
    assert printed.count("equal on all ranks: True") == 6
    rows = {
        line[:14].strip(): [float(n) for n in line[14:].split()]
        for line in printed[printed.index("one gradient") :].splitlines()[1:9]
    }
    assert len(rows) == 8
    for name in ("Block(8)", "Block(4)", "Block(2)", "Ternary", "EntropyCoded", "OneBit"):
        _, once, final, plain = rows[name]
        assert final < once < 1 and 2 * final < plain, name  # what its words say of error feedback
    assert rows["TernGrad"][2] == rows["TernGrad"][3]
    assert min(rows, key=lambda name: rows[name][0]) == "EntropyCoded"
