"""The documentation runs, its links resolve, and it names everything that is public."""

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from _ranks import as_torchrun, logged

import gradcomp
import gradcomp.ddp
from gradcomp import comm, errors, fsdp
from gradcomp.engine.options import COMMON
from gradcomp.exchange import stats
from gradcomp.exchange.agree import EXCHANGE_FIELDS
from gradcomp.integrations.versions import TRIED
from gradcomp.kernels.native.library import TIER_FEATURES
from gradcomp.payload import wire
from gradcomp.plan import accuracy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```(?P<language>\w*) ?(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
EXPECTED = re.compile(
    r"\A\n+(?:[^\n`#]+\n+)?```text output\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    """Return a page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def snippets():
    """Yield (page and line, kind, source, output that must be printed or None) of every Python
    block.
    """
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in FENCE.finditer(text):
            if block["language"] == "python":
                line = text.count("\n", 0, block.start("body"))
                output = EXPECTED.match(text[block.end() :])
                # so that a traceback has the page's line numbers
                source = "\n" * line + block["body"]
                place = f"{name_of(page)}:{line}"
                yield place, block["info"], source, output["body"] if output else None


SNIPPETS = list(snippets())


def execute(place, source, folder):
    """Run a snippet as a script of its own in `folder`; return what it printed."""
    printed, before, threads = io.StringIO(), os.getcwd(), torch.get_num_threads()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(source, place, "exec"), {"__name__": "__main__"})
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
    return printed.getvalue()


def execute_as_rank(place, source, folder):
    """Run a snippet in a process that has its process group already."""
    import torch.distributed as dist

    kept = dist.init_process_group, dist.destroy_process_group
    dist.init_process_group = dist.destroy_process_group = lambda *args, **options: None
    try:
        with as_torchrun(dist.get_rank(), dist.get_world_size(), port=1):
            return execute(place, source, folder)
    finally:
        dist.init_process_group, dist.destroy_process_group = kept


def of_kind(kind):
    pages = tuple(f"docs/howto/{name}.md" for name in (*TRIED, "lora"))
    chosen = []
    for place, found, source, output in SNIPPETS:
        if found == kind:
            marks = [pytest.mark.extras] * (kind != "no-run" and place.startswith(pages))
            chosen.append(pytest.param(place, source, output, id=place, marks=marks))
    return pytest.mark.parametrize(("place", "source", "output"), chosen)


@of_kind("no-run")
def test_snippets_compile(place, source, output):
    compile(source, place, "exec")


@pytest.mark.slow
@of_kind("")
def test_snippets_run_and_print_what_is_shown(place, source, output, tmp_path):
    printed = execute(place, source, tmp_path)
    assert output is None or printed == output


@of_kind("ranks=2")
def test_snippets_of_ranks_run_and_print_what_is_shown(place, source, output, tmp_path, gloo):
    printed = gloo(2, execute_as_rank, place, source, str(tmp_path))[0]
    assert output is None or printed == output


def execute_and_listen(place, source, folder):
    with logged("weights have grown") as warned:
        printed = execute_as_rank(place, source, folder)
    return printed, len(warned)


@pytest.mark.long
def test_the_tutorial_loses_in_200_steps_what_it_says(tmp_path, gloo):
    """Its own scripts, which run with 50 steps above; runs that diverge differ by more."""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    plain, packed = (s for p, _, s, _ in SNIPPETS if "tutorial" in p and "in the last ten" in s)
    text = re.search(r"With 200 steps instead of 50, .*? logs a warning", " ".join(page.split()))[0]
    said = re.findall(r"([\d.]+) (?:in|with) `?\"?(fp32|\w+)", text)
    found = {name: float(loss) for loss, name in said}
    assert list(found) == ["fp32", "ternary", "onebit", "terngrad"]
    for name, loss in found.items():
        source = plain if name == "fp32" else packed.replace('"ternary"', f'"{name}"')
        source = source.replace("range(50)", "range(200)")
        results = gloo(2, execute_and_listen, "tutorial", source, str(tmp_path))
        ended = float(re.search(r", ([\d.]+) in the last ten", results[0][0])[1])
        diverges = name == "terngrad"
        assert abs(ended - loss) < (0.5 if diverges else 0.06), (name, ended)
        assert [warned for _, warned in results] == [diverges, 0], name


def test_marks_of_snippets_are_known_and_few_are_not_run():
    kinds = [kind for _, kind, _, _ in SNIPPETS]
    assert set(kinds) == {"", "no-run", "ranks=2"} and len(kinds) > 15
    assert kinds.count("no-run") <= len(kinds) // 4


def test_no_page_starts_adam_with_few_bits_outside_of_units_of_second_moments():
    """Pages of frameworks did, with "ternary" for the Trainer's and Ray's AdamW."""
    adam = re.compile(r"\bAdamW?\(|\bTrainingArguments\(")
    few = re.compile(r'"(ternary|onebit)"|\b(Ternary|OneBit)\(')
    found = [(place, source) for place, _, source, _ in SNIPPETS if adam.search(source)]
    assert len(found) > 8
    for place, source in found:
        assert "precondition=True" in source or not few.search(source), place


# ---- links, placeholders, commands ---------------------------------------------------------------


def anchor_of(heading):
    """Return GitHub's anchor for a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def anchors(page):
    return {anchor_of(h) for h in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)}


def links(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith(("http://", "https://")):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve_and_no_figure_is_missing(page):
    assert "@@MEASURE@@" not in page.read_text(encoding="utf-8")
    for target in links(page):
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(there), (
                f"{name_of(page)} links to {target}; it has {sorted(anchors(there))}"
            )


def test_every_page_is_linked():
    here = ROOT / "docs/README.md"
    linked = {(here.parent / t.partition("#")[0]).resolve() for t in links(here)} | {here}
    contents = ("README.md", "index.md")  # the latter is the site's first page
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in contents]
    assert [name_of(page) for page in pages if page not in linked] == []


def test_the_readme_is_read_in_two_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 80 and "docs/README.md" in text
    prose = re.sub(
        r"```.*?```|\]\([^)]*\)", " ", text.partition("## Documentation")[0], flags=re.DOTALL
    )
    assert len(prose.split()) <= 500  # at 250 words a minute


# ---- the page that decides -----------------------------------------------------------------------

WHICH = ROOT / "docs/howto/which-mode.md"
FIGURE = re.compile(r"(?<![\w.-])[+-]?\d[\d,]*(?:\.\d+)?")


def figures(text):
    return {figure.rstrip(",") for figure in FIGURE.findall(text)}


def test_figures_that_decide_stand_on_the_pages_that_they_link_to():
    """Those of every paragraph, entry of a list and row of a table that links to pages."""
    seen = 0
    for block in re.split(r"\n\n|\n(?=[-|])", prose(WHICH)):
        targets = re.findall(r"\]\(([^)\s]+\.md)[^)\s]*\)", block)
        linked = {(WHICH.parent / target).resolve() for target in targets}
        claimed = figures(re.sub(r"`[^`]*`|\]\([^)]*\)", "", block))
        there = set().union(*(figures(page.read_text(encoding="utf-8")) for page in linked))
        seen += len(claimed)
        assert not claimed - there, (sorted(claimed - there), [name_of(page) for page in linked])
    assert seen > 60


@pytest.mark.parametrize(
    ("row", "family", "codecs"),
    [
        ("`torch.optim.SGD`", "sgd", ["entropy", "block4", "ternary", "onebit"]),
        ("Adam, AdamW", "adam", ["entropy"]),
        ("the same, where computing", "adam", ["block8", "block4", "block2", "onebit"]),
    ],
)
def test_the_page_that_decides_takes_what_auto_takes(row, family, codecs):
    lines = WHICH.read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {row}"))
    counted = [way for way in accuracy.ways(family) if way.counts and way.training.world_size <= 4]
    counted.sort(key=lambda way: -way.bits)  # of entropy-coded codes those of the fewest bits
    found = {way.codec.name: way.figure for way in counted if way.codec.name in codecs}
    assert sorted(found) == sorted(codecs)
    assert all(figure in line for figure in found.values()), found
    best = next(way for way in accuracy.within(family) if way.codec.name in codecs)
    assert accuracy.written(best.codec) in line.split(" | ")[1], best


def commands():
    """Yield (page, words) of every command line in a shell block."""
    for page in PAGES:
        for block in FENCE.finditer(page.read_text(encoding="utf-8")):
            for line in block["body"].splitlines() if block["language"] == "sh" else ():
                if words := shlex.split(line, comments=True):
                    yield page, words


def parsers():
    """Return {program: what reads its arguments}."""
    from gradcomp.bench.__main__ import BENCHMARKS
    from gradcomp.doctor import options as doctor

    names = [*BENCHMARKS]
    names.remove("plan")
    found = {n: importlib.import_module(f"gradcomp.bench.{n}").read_options for n in names}
    found["plan"] = importlib.import_module("gradcomp.plan.cli").build_parser().parse_args
    return found | {"gradcomp.doctor": doctor.parse, "gradcomp.plan": found["plan"]}


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    seen, known = 0, parsers()
    for page, words in commands():
        if words[0] == "make":
            assert words[1] in targets, f"{name_of(page)}: make {words[1]}"
            for word in words[2:]:
                variable, _, value = word.partition("=")
                assert variable in ("DEMO_ARGS", "RELEASE", "TORCH")
                if variable == "DEMO_ARGS":
                    known["demo"](shlex.split(value))
            seen += 1
        program = next((word for word in words if word.startswith("gradcomp.")), "")
        after = words[words.index(program) + 1 :] if program else []
        if program == "gradcomp.bench":
            program, *after = after
        if program in known:
            known[program](after)
            seen += 1
    assert seen > 8


# ---- the reference is complete -------------------------------------------------------------------

ERRORS = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")


def public_names():
    found = {f"gradcomp.{name}": getattr(gradcomp, name) for name in gradcomp.__all__}
    for module in (comm, gradcomp.server, gradcomp.amp, gradcomp.optim, gradcomp.onebit_sgd, fsdp):
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    for name in ("optimal_nodes", "simulate", "predict"):
        found[f"gradcomp.plan.{name}"] = getattr(gradcomp.plan, name)
    for name, value in vars(gradcomp.ddp).items():
        defined_there = getattr(value, "__module__", None) == gradcomp.ddp.__name__
        if defined_there and not name.startswith("_"):
            found[f"gradcomp.ddp.{name}"] = value
    return found


PUBLIC = public_names()


def of_frameworks():
    """Return {name: (arguments, docstrings)} of what integrations offer; read and not imported,
    which takes seconds.
    """
    found = {}
    for framework in (*TRIED, "torchtitan"):  # the last imports nothing of its own
        tree = ast.parse(
            (ROOT / f"gradcomp/integrations/{framework}.py").read_text(encoding="utf-8")
        )
        for node in tree.body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef)]
                made = [n for n in inner if n is node or n.name == "__init__"]
                arguments = {
                    a.arg
                    for n in made
                    for a in [*n.args.args, *n.args.kwonlyargs, n.args.vararg, n.args.kwarg]
                    if a is not None
                }
                found[f"gradcomp.integrations.{framework}.{node.name}"] = (
                    arguments - {"self", "args", "kwargs"},
                    ast.get_docstring(node) or "",
                )
    return found


FRAMEWORKS = of_frameworks()


def mentions(text, word):
    """Whether `word` stands in code marks somewhere in `text`."""
    spans = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", span) for span in spans)


def docstrings(value):
    """Return the docstrings of a function, or of a class, its public members and its bases."""
    if not isinstance(value, type):
        return inspect.getdoc(value) or ""
    bases = [base for base in value.__mro__ if base.__module__.startswith("gradcomp")]
    members = [v for base in bases for n, v in vars(base).items() if not n.startswith("_")]
    return "\n".join(inspect.getdoc(v) or "" for v in (*bases, *members) if not isinstance(v, str))


def is_described(text, argument):
    """Whether a docstring has an entry for an argument, or names it in code marks."""
    entry = rf"^ *(?:[\w*]+, )*\*{{0,2}}{re.escape(argument)}(?:, [\w, ]+)?:"
    return bool(re.search(entry, text, re.MULTILINE)) or mentions(text, argument)


MADE_BY_OTHERS = {  # whose constructors are not for users, or take what another docstring says
    gradcomp.comm.LocalCommunicator,
    gradcomp.ddp.CompressionState,
    fsdp.FsdpState,
    gradcomp.optim.SplitOptimizer,
    gradcomp.optim.SplitParameters,
    gradcomp.server.Pending,
}


@pytest.mark.parametrize("name", sorted(n for n, v in PUBLIC.items() if callable(v)))
def test_docstrings_describe_every_argument(name):
    value = PUBLIC[name]
    text = docstrings(value)
    assert text
    made = inspect.isfunction(value) or "__init__" in vars(value)
    if made and value not in MADE_BY_OTHERS and value is not gradcomp.ddp.compression_hook:
        wanted = set(inspect.signature(value).parameters) - {"others"}
        if is_described(text, "common"):  # at `gradcomp.ddp.register`
            wanted -= set(COMMON)
        assert not [w for w in sorted(wanted) if not is_described(text, w)]


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_docstrings_of_a_framework_describe_every_argument(name):
    arguments, text = FRAMEWORKS[name]
    assert text and not [word for word in sorted(arguments) if not is_described(text, word)]


@pytest.mark.parametrize("method", ["encode", "decode", "payload_nbytes"])
def test_codec_methods_have_their_arguments(method):
    text = inspect.getdoc(getattr(gradcomp.codecs.Codec, method))
    for parameter in list(inspect.signature(getattr(gradcomp.codecs.Codec, method)).parameters)[1:]:
        assert is_described(text, parameter), parameter


def test_stats_and_phases_are_listed():
    text = docstrings(stats.Stats)
    for word in [n for n in vars(stats.Stats()) if not n.startswith("_")]:
        assert is_described(text, word), word
    for phase in [*stats.PHASES, "hidden", "exposed"]:
        assert f'"{phase}"' in text, phase


def test_error_page_has_every_class_check_field_and_phase():
    kinds = {n: v for n, v in vars(errors).items() if isinstance(v, type)}
    for name in (n for n, v in kinds.items() if issubclass(v, errors.GradcompError)):
        assert name in ERRORS
        assert name == "GradcompError" or f"## {name}\n" in ERRORS
    wire_format = (ROOT / "docs/reference/wire-format.md").read_text(encoding="utf-8")
    rejections = wire_format.split("## Rejections")[1]
    checks = re.findall(r"^\| `(\w+)` \|", rejections.split("In an exchange")[0], re.MULTILINE)
    fields = re.findall(r"^\| `(\w+)` \|", rejections.split("In an exchange")[1], re.MULTILINE)
    assert len(checks) > 12 and len(fields) > 5
    source = "".join(p.read_text() for p in (ROOT / "gradcomp").rglob("*.py"))
    raised = re.findall(r"CorruptPayload\(\s*\"(\w+)\"", source)
    calls = r"_wait\(", r"\b_?gather\([^\"]{0,60}", r"peers_answer\(", r"\bphase(?:: str = |=)"
    calls += r"\b_compare\(self[^\"]*", r"\bKind\("
    phases = [word for call in calls for word in re.findall(rf'{call}"(\w+)"', source)]
    assert len(raised) > 8 and len(set(phases)) == 15
    for word in [*checks, *raised, *fields, *EXCHANGE_FIELDS, *phases]:
        assert mentions(ERRORS, word), word


def test_changelog_has_the_wire_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "### Wire format" in text and f"Version {wire.VERSION}," in text


def test_environment_page_has_every_variable():
    text = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    source = "".join(p.read_text() for p in (ROOT / "gradcomp").rglob("*.py"))
    for variable in set(re.findall(r"\"(GRADCOMP_\w+)\"", source)):
        assert mentions(text, variable), variable
    for feature in set().union(*TIER_FEATURES.values()):
        assert mentions(text, feature)
