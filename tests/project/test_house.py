"""The architecture: layers of modules, quiet import, one C contract."""

import ast
import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest
from _kinds import check_kinds
from _ranks import output_of

import gradcomp
from gradcomp import Ternary, _gc
from gradcomp import __main__ as main
from gradcomp.codecs import KINDS
from gradcomp.kernels.native import library
from gradcomp.kernels.native.library import TIER_FEATURES

ROOT = Path(__file__).parents[2]

# Top to bottom; a package imports only from itself and from packages below it (packages of one
# layer know nothing of each other). A package is a folder of gradcomp/, or a file at its top.
LAYERS = [
    {"__main__", "__init__"},
    {"bench", "launch", "doctor"},
    {"integrations", "checkpoint"},
    {"onebit_sgd", "local"},
    {"ddp", "fsdp", "averager", "allreduce", "server", "amp"},
    {"plan"},
    {"optim"},
    {"engine"},
    {"exchange"},
    {"codecs", "memory"},
    {"comm"},
    {"payload"},
    {"kernels"},
    {"errors", "version", "interrupt", "arguments"},
    {"waits", "files"},
]
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}


def package_of(path):
    parts = path.relative_to(ROOT / "gradcomp").with_suffix("").parts
    # a program stands above all packages
    return "__main__" if parts[-1] == "__main__" else parts[0]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists() or name == "gradcomp._gc"


def imports(path):
    """Yield every module of gradcomp that a file imports, and what it reaches through attributes
    of gradcomp.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradcomp":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if is_module(name) else node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("gradcomp."))
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("gradcomp."):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and is_module(name):
                yield name


def files():
    return sorted((ROOT / "gradcomp").rglob("*.py"))


def test_every_package_has_a_layer_and_says_what_it_is_for():
    packages = {package_of(path) for path in files()} - {"launch"}
    assert packages == set(LEVEL) - {"launch"}
    for path in files():
        assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what it is for"


def test_packages_import_only_packages_below():
    """Imports for typing count as well: an interface that is a type of a package above belongs
    below.
    """
    wrong, seen = [], 0
    for path in files():
        package = package_of(path)
        if package in ("__init__", "__main__", "bench"):
            continue
        for module in imports(path):
            used = module.split(".")[1] if "." in module else "__init__"
            if used == "_gc":
                assert package == "kernels", f"{path} calls C past gradcomp.kernels"
                continue
            seen += 1
            if used == package:
                continue
            if used not in LEVEL or LEVEL[used] <= LEVEL[package]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert seen > 200
    assert not wrong, "\n".join(wrong)


def test_no_circles():
    """No module is imported, over however many others, by what it imports itself; imports for
    typing count as well.
    """
    graph = {
        module_of(path): set(imports(path))
        for path in files()
        if path.name not in ("__init__.py", "__main__.py")
    }
    done, circles = set(), []

    def visit(module, way):
        if module in way:
            circles.append(" -> ".join([*way[way.index(module) :], module]))
        elif module not in done:
            for used in sorted(graph.get(module, ())):
                visit(used, [*way, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    assert len(graph) > 90
    assert not circles, "\n".join(circles)


def test_the_reference_imports_numpy_and_itself_only():
    """It shares nothing with what it checks, so it imports nothing of gradcomp or torch."""
    modules = sorted((ROOT / "tests/reference").glob("*.py"))
    assert len(modules) == 6
    for path in modules:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
        roots = {name.split(".")[0] for name in names}
        assert roots - set(sys.stdlib_module_names) <= {"numpy", "reference"}, path


TORCH = ("comm/torchdist.py", "comm/torch_private.py", "ddp.py", "__main__.py")


@pytest.mark.parametrize(
    ("library", "homes"), [(r"torch\.distributed", TORCH), ("mpi4py", ("comm/mpi.py",))]
)
def test_torch_distributed_and_mpi_stay_in_their_packages(library, homes):
    imported = re.compile(rf"^\s*(import|from) {library}|import {library}", re.MULTILINE)
    names = [path.relative_to(ROOT / "gradcomp").as_posix() for path in files()]
    for name in names:
        if imported.search((ROOT / "gradcomp" / name).read_text()):
            assert name in homes or name.startswith("bench/"), name


def test_addresses_are_taken_by_kernels_alone():
    """Everything above hands tensors over; `tracking` compares where weights stand, `timing`
    times a memcpy.
    """
    takers = [path for path in files() if "data_ptr()" in path.read_text()]
    assert {path.relative_to(ROOT / "gradcomp").as_posix() for path in takers} == {
        "kernels/native/library.py",
        "optim/tracking.py",
        "bench/timing.py",
    }


def test_no_clock_of_another_machine_is_trusted():
    """Waits count their own seconds; a site whose clock is off by hours trains like the others."""
    found = {
        str(path.relative_to(ROOT / "gradcomp"))
        for path in (ROOT / "gradcomp").rglob("*.py")
        if re.search(r"\btime\.time\(|datetime\.now\(|utcnow\(", path.read_text())
    }
    assert found == {"doctor/card.py"}, "what is left of a Slurm job, on this machine"


def test_nothing_unpickles():
    """SECURITY.md: what comes from other ranks, and files, are read as tensors and plain values."""
    for path in sorted((ROOT / "gradcomp").rglob("*.py")):
        text = path.read_text()
        unsafe = (
            r"gather_object|broadcast_object|^import pickle|pickle\.loads?|torch\.load\((?!.*True)"
        )
        found = re.findall(unsafe, text, re.MULTILINE)
        # a benchmark's ranks are its own processes, on this machine
        assert not found or "bench" in path.parts, (path, found)


def test_python_files_fit_one_sitting():
    lengths = {path: len(path.read_text().splitlines()) for path in files()}
    assert max(lengths.values()) <= 600, lengths


@pytest.mark.slow
def test_lines_of_python_and_c_have_at_most_100_columns():
    """Ruff lets lines that end in a pragma pass."""
    ours = [ROOT / name for name in ("gradcomp", "launch", "tests", "examples", "docs", "native")]
    ours = [path for folder in ours for path in folder.rglob("*.*")]
    for path in (path for path in ours if path.suffix in {".py", ".c", ".h"}):
        assert max(map(len, path.read_text().splitlines()), default=0) <= 100, path


def test_tables_of_codecs_have_every_codec_or_name_those_that_they_leave_out():
    """A new codec was left out of resumed runs, of lost ranks and of the server without a word."""
    tables = {"test_conformance.py", "_averages.py", "test_slices.py", "test_server_shards.py"}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if re.search(r"^CODECS = [\[{]", text, re.MULTILINE) and path.name != "_replicas.py":
            assert re.search(r"^check_kinds\(\s*CODECS\b", text, re.MULTILINE), path
            tables.discard(path.name)
    assert not tables
    others = tuple(kind.name for kind in KINDS if kind.name not in ("onebit", "ternary"))
    for table in (["onebit", Ternary()], {"one": ("onebit", 1), "other": (Ternary(), 2)}):
        check_kinds(table, without=others)
        with pytest.raises(ValueError, match="add .'terngrad'. to this table"):
            check_kinds(table, without=others[1:])
    with pytest.raises(ValueError, match="add .'onebit'. to this table of codecs, or correct"):
        check_kinds(["onebit", "ternary"], without=(*others, "onebit"))


def test_names_that_were_used_twice():
    """One name for one thing, in the field's words."""
    text = "".join(path.read_text() for path in (ROOT / "gradcomp").rglob("*.py"))
    for name in ("Memory", "Planes", "Row", "Measured", "Parameter"):
        assert len(re.findall(rf"^class {name}\b", text, re.MULTILINE)) <= 1, name
    metaphors = "told", "_settle", "home", "_make_room", "door", "house", "lone"
    assert not [word for word in metaphors if re.search(rf"\b{word}\b", text)]


def test_the_top_level_has_what_most_users_need():
    assert len(gradcomp.__all__) <= 28 and all(hasattr(gradcomp, name) for name in gradcomp.__all__)
    for name, place in gradcomp.MOVED.items():
        with pytest.raises(AttributeError, match=f"has no attribute '{name}': use {place}"):
            getattr(gradcomp, name)
        module, _, attribute = place.rpartition(".")
        assert " " in place or hasattr(importlib.import_module(module), attribute)


def test_import_is_quiet():
    """Promise 9: no MPI, no thread, no network, no environment variable."""
    script = """
import json, os, sys, threading, socket
def now(): return dict(os.environ), threading.active_count()
class Loud(Exception): pass
def refuse(*a, **k): raise Loud("a socket was opened")
begun = now()
import gradcomp
quiet = now() == begun
alone = [name for name in sys.modules if name == "torch" or name.startswith("gradcomp.")]
import torch
begun, native_threads = now(), len(os.listdir("/proc/self/task"))
socket.socket = refuse
import gradcomp.ddp, gradcomp.comm
gradcomp.plan.optimal_nodes
print(json.dumps({
    "alone": alone,
    "quiet": quiet and now() == begun,
    "native_threads": len(os.listdir("/proc/self/task")) - native_threads,
    "mpi": any(m.startswith("mpi4py") for m in sys.modules),
    "initialised": torch.distributed.is_initialized(),
    "bench": any(m in sys.modules for m in ("rich", "matplotlib", "sklearn")),
    "frameworks": any(
        m in sys.modules for m in ("lightning", "accelerate", "transformers", "ray", "torchft")
    ),
}))
"""
    # this process has imported gradcomp, so what an import would set must not be inherited
    kept = {k: os.environ[k] for k in ("PATH", "HOME", "PYTHONPATH") if k in os.environ}
    out = output_of(sys.executable, "-c", script, env=kept)
    assert out.returncode == 0, out.stderr
    nothing = {"quiet": True, "alone": ["gradcomp.version"], "native_threads": 0}
    libraries = dict.fromkeys(("mpi", "initialised", "bench", "frameworks"), False)
    assert json.loads(out.stdout) == nothing | libraries


def strip_c(text):
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    text = re.sub(r"^\s*#.*$", " ", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", text).strip()


def test_the_module_has_every_function_of_the_header():
    from gradcomp._gc import lib

    header = strip_c((ROOT / "native/include/gradcomp.h").read_text())
    functions = re.findall(r"\b(gc_\w+) ?\([^)]*\);", header)
    assert len(functions) > 25 and set(functions) <= set(dir(lib))
    tests = "".join(p.read_text() for p in (ROOT / "tests/native").glob("test_*.c"))
    assert not [name for name in functions if f"{name}(" not in tests], "between guard pages, too"


def test_every_tier_names_every_kernel():
    """A field that a tier's table leaves out is NULL, and the first call there ends the process."""
    text = (ROOT / "native/src/dispatch.c").read_text()
    tables = re.findall(r"\n    \[TIER_\w+\] =\s+\{(.*?)\n        \}", text, re.DOTALL)
    fields = [sorted(re.findall(r"\.(\w+) =", table)) for table in tables]
    assert len(fields) > 2 and len(fields[0]) > 10
    assert all(names == fields[0] for names in fields)


def test_structs_have_the_size_that_numpy_thinks():
    from gradcomp._gc import ffi
    from gradcomp.kernels.tables import BLOCK, COPY_RANGE, SEGMENT

    for dtype, name in (
        (SEGMENT, "gc_segment"),
        (BLOCK, "gc_block"),
        (COPY_RANGE, "gc_copy_range"),
    ):
        assert dtype.itemsize == ffi.sizeof(name)
        assert {f: dtype.fields[f][1] for f in dtype.names} == {
            f: ffi.offsetof(name, f) for f in dtype.names
        }


@pytest.mark.slow
def test_disabling_a_cpu_feature_that_does_not_exist():
    code, environment = "import gradcomp.kernels.native", {"GRADCOMP_DISABLE_CPU_FEATURES": "avx3"}
    out = output_of(sys.executable, "-c", code, env=os.environ | environment)
    assert out.returncode == 1
    (line,) = [line for line in out.stderr.splitlines() if "GRADCOMP_DISABLE_CPU_FEATURES" in line]
    assert "avx3" in line


@pytest.mark.parametrize("feature", sorted(TIER_FEATURES["avx512"] - TIER_FEATURES["avx2"]))
def test_each_feature_of_avx512_can_be_switched_off(feature, monkeypatch):
    monkeypatch.setattr(library, "select_tier", lambda name: chosen.append(name))
    monkeypatch.setattr(library, "tiers", lambda: ["portable", "avx2", "avx512"])
    chosen = []
    for value in ("", feature.upper(), f"{feature},fma"):
        library._select_from_environment(value)
    assert chosen == ["avx512", "avx2", "portable"]


@pytest.mark.slow
def test_the_report_says_what_the_tier_is():
    def report(*options, disabled=""):
        environment = os.environ | {"GRADCOMP_DISABLE_CPU_FEATURES": disabled}
        done = output_of(sys.executable, "-m", "gradcomp", *options, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found = json.loads(report("--json"))
    assert found["tier"] in found["tiers"] and found["threads"] >= 1
    table = report(disabled=",".join(set().union(*TIER_FEATURES.values())))
    assert "gloo" in table and "MPI" in table
    (line,) = [line for line in table.splitlines() if line.startswith("tier ")]
    best = found["tiers"][-1]
    assert "portable tier" in line and (best == "portable" or f"{best} is switched off" in line)
    assert "portable tier: plain C" in main._tier("portable", ["portable"])


def test_every_tier_has_its_features_named():
    assert {
        _gc.ffi.string(_gc.lib.gc_tier_name(t)).decode() for t in range(_gc.lib.gc_tier_count())
    } == set(TIER_FEATURES)
