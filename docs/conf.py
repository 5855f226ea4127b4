"""The documentation site: `make docs`. Sources are read from the root of the repository, so that
links are those of the files.

The Markdown pages are those that any viewer of Markdown shows, and that
tests/project/test_docs.py runs.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.ext.autodoc.mock import MockFinder

from gradcomp.version import __version__

project = "gradcomp"
release = version = __version__
project_copyright = ""
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "examples/notebook.ipynb",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "gradcomp",
    "launch",
    "native",
    "tests",
    "**/__pycache__",
    "docs/_*",
]

html_theme = "furo"
html_title = f"gradcomp {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["_root"]
html_show_sphinx = html_show_copyright = html_copy_source = False
highlight_language = "none"
default_role = "py:obj"

myst_heading_anchors = 6

# The notebook is committed without outputs and run here; an error in it is an error of the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_show_tb = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# extras; what is ours is documented without them
autodoc_mock_imports = ["mpi4py", "lightning", "accelerate", "transformers", "ray", "torchft"]
sys.meta_path.insert(0, MockFinder(autodoc_mock_imports))  # viewcode imports modules, too
napoleon_numpy_docstring = False
napoleon_use_ivar = True

MARK = re.compile(r"^`{3,}(?:python|text) +(ranks=2|no-run|output)\s*$")
CLASSES = {"ranks=2": "on-two-ranks", "no-run": "fragment", "output": "prints"}


def mark_blocks(app, doctree):
    """Give blocks with a mark for the tests a class that `site.css` writes out."""
    for block in doctree.findall(nodes.literal_block):
        page = Path(block.source or "")
        if page.suffix == ".md" and block.line:
            found = MARK.match(page.read_text(encoding="utf-8").splitlines()[block.line - 1])
            if found:
                block["classes"].append(CLASSES[found[1]])


def keep_deviations(app, doctree):
    """Keep a figure and its deviation on one line, in tables that a narrow window squeezes."""
    for text in list(doctree.findall(nodes.Text)):
        if " ± " in text:
            text.parent.replace(
                text, nodes.Text(text.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))
            )


def mark_prose(app, doctree):
    """Give tables of sentences a class: a narrow window scrolls them rather than squeeze them."""
    for table in doctree.findall(nodes.table):
        if any(len(cell.astext()) > 60 for cell in table.findall(nodes.entry)):
            table["classes"].append("prose")


def setup(app):
    app.connect("doctree-read", mark_blocks)
    app.connect("doctree-read", keep_deviations)
    app.connect("doctree-read", mark_prose)
