"""Change one thing in a function of gradcomp and see whether a test notices, many times
(`make mutants`): ``python tests/support/_mutants.py MUTANTS SEED WORKERS``.

A mutant is a fork of the server that has imported gradcomp, in which that function has other code;
pytest runs the tests of `TESTS` there, and ranks are forks of that fork. So a mutant costs no
import. Programs with an interpreter of their own and ranks of MPI are not mutated: their tests are
left out. Code outside functions is not mutated, nor are texts, type annotations and asserts.

Results are lines of build/mutants/SEED.jsonl. A second run continues there and tries survivors
again. `survivors.json` says why a mutant may survive.
"""

import ast
import functools
import gc
import importlib
import json
import random
import sys
import tempfile
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _forks
from _broken import ROOT, failed_in_a_fork

LEAST = 0.85  # of the mutants are killed
TIMEOUT_S = 600.0  # for the tests of one; a test that hangs has noticed, too
OPTIONS = ["-x", "-m", "not long and not timed and not extras"]
# what can notice a change of a file or folder: the first name that a file starts with; quick first
CORE = "engine/test_exchange engine/test_slices engine/test_stages entry/test_averager"
TESTS = {
    "codecs/": f"codecs/test_layout codecs/test_wire codecs/test_codecs {CORE}"
    " engine/test_second engine/test_quality codecs/test_codec_conformance",
    "exchange/agree": "engine/test_options engine/test_engine entry/test_averager"
    " entry/test_mismatch",
    "exchange/gather": "entry/test_fsdp",
    "exchange/staged": "entry/test_accelerator",
    "exchange/nodes": "comm/test_peers engine/test_hierarchical",
    "exchange/routes": f"engine/test_hierarchical {CORE} engine/test_engine",
    "exchange/pipeline": f"engine/test_pipeline engine/test_nonfinite {CORE} engine/test_engine",
    "exchange/stages": f"engine/test_precondition engine/test_rotate engine/test_transform {CORE}",
    "exchange/": f"engine/test_second engine/test_quality engine/test_telemetry {CORE}"
    " engine/test_transform engine/test_hierarchical entry/test_ddp",
    "memory/": "engine/test_planes engine/test_memory engine/test_transform"
    " entry/test_memory_format entry/test_averager engine/test_precondition entry/test_checkpoint"
    " entry/test_compatibility engine/test_exchange",
    "optim/": "optim/test_optim optim/test_fused",
    "local/coordinator": "entry/test_sites entry/test_sites_lost",
    "local/client": "entry/test_sites entry/test_sites_lost",
    "local/elastic": "entry/test_sites entry/test_sites_lost",
    "local/": "entry/test_local entry/test_sites entry/test_memory_format",
}
PAIRS = (
    "Lt>LtE LtE>Lt Gt>GtE GtE>Gt Eq>NotEq NotEq>Eq Is>IsNot IsNot>Is In>NotIn NotIn>In"
    " Add>Sub Sub>Add Mult>Add Div>Mult FloorDiv>Mult Mod>FloorDiv LShift>RShift RShift>LShift"
    " BitAnd>BitOr BitOr>BitAnd BitXor>BitOr And>Or Or>And Break>Continue Continue>Break"
)
SWAPS = dict(pair.split(">") for pair in PAIRS.split())
NOT_MUTATED = (ast.arguments, ast.Assert, ast.JoinedStr)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def changes(node, put):
    """Yield functions that each change a node in place; put(new) replaces it."""
    kind = type(node).__name__
    if kind in SWAPS:
        yield lambda: put(getattr(ast, SWAPS[kind])())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda: put(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield lambda: put(ast.Constant(node.value + 1))
        yield lambda: put(ast.Constant(node.value - 1))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield lambda: put(node.operand)
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
            yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Return) and not isinstance(node.value, (ast.Constant, type(None))):
        yield lambda: setattr(node, "value", ast.Constant(None))
    is_statement = isinstance(node, (ast.AugAssign, ast.Raise, ast.Delete)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    targets = node.targets if isinstance(node, ast.Assign) else []
    if is_statement or any(isinstance(t, (ast.Attribute, ast.Subscript)) for t in targets):
        # and not `pass`: what a closure has of the function around it stays the same
        yield lambda: put(ast.If(ast.Constant(False), [node], []))


def sites(node, statement=None):
    """Yield (statement, change) of everything that can be changed within a function's node."""
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "annotation", "returns", "exc"):
            continue
        for number, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or isinstance(child, NOT_MUTATED):
                continue
            put = functools.partial(setattr, node, field)
            if isinstance(value, list):
                put = functools.partial(value.__setitem__, number)
            within = child if isinstance(child, (ast.stmt, ast.excepthandler)) else statement
            for change in changes(child, put):
                yield within or child, change
            yield from sites(child, within)


def functions(node):
    """Yield functions of a module and of its classes, not those within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield child
        elif not isinstance(child, ast.expr):
            yield from functions(child)


def mutations(file):
    """Return a file's tree and what can be changed in it, always in the same order."""
    tree = ast.parse(Path(file).read_text())
    return tree, [site for function in functions(tree) for site in sites(function)]


def mutate(file, number):
    """Return a file's tree with one change, its line, and the line's text before and after."""
    tree, found = mutations(file)
    before = ast.unparse(tree).splitlines()
    statement, change = found[number]
    change()
    after = ast.unparse(ast.fix_missing_locations(tree)).splitlines()
    old, new = next(pair for pair in zip(before, after, strict=False) if pair[0] != pair[1])
    return tree, statement.lineno, f"{old.strip()}  ->  {new.strip()}"


def codes(code):
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from codes(const)


def apply(file, number):
    """Give a function the code of a mutant, in this process."""
    name = ".".join(Path(file).relative_to(ROOT).with_suffix("").parts)
    origin = importlib.import_module(name).__file__
    tree, *_ = mutate(file, number)
    new = {(c.co_name, c.co_firstlineno): c for c in codes(compile(tree, origin, "exec"))}
    gc.unfreeze()
    changed = 0
    for one in gc.get_objects():
        if type(one) is types.FunctionType and one.__code__.co_filename == origin:
            code = new.get((one.__code__.co_name, one.__code__.co_firstlineno))
            if code is not None and one.__code__ != code and one.__name__ != "<lambda>":
                one.__code__ = code
                changed += 1
    assert changed, "no function requires a code object that is other"
    gc.freeze()


def nothing():
    """Leave everything as it is."""


def tests_of(file):
    name = str(Path(file).relative_to(ROOT / "gradcomp"))
    found = next(tests for start, tests in TESTS.items() if name.startswith(start))
    return [f"{test}.py" for test in dict.fromkeys(found.split())]


def failed(break_it, tests, *options):
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as folder:
        return failed_in_a_fork(break_it, tests, Path(folder), TIMEOUT_S, *OPTIONS, *options)


@functools.cache
def is_sound(test):
    """Return whether a test passes where nothing was changed."""
    return not failed(nothing, [test.removeprefix("tests/")])


def outcome_of(mutant):
    """Return the line of the results of a mutant, (file, number)."""
    file, number = mutant
    began = time.monotonic()
    *_, line, change = mutate(file, number)
    row = {"file": str(file.relative_to(ROOT)), "line": line, "change": change}
    broken, tests, without = functools.partial(apply, file, number), tests_of(file), []
    try:
        while True:
            by = "".join(failed(broken, tests, *without)[:1])
            test = by.removeprefix("failed ")
            if test == by or is_sound(test):
                break
            print(f"left out, fails without a mutant, too: {test}", flush=True)
            without.append(f"--deselect={test}")
        row["outcome"] = "killed" if by else "survived"
    except AssertionError as error:  # the fork has died
        text = str(error)
        by = text.strip().splitlines()[-1][:200]
        cannot = "requires a code object" in text or "server of forks" in text
        row["outcome"] = "not run" if cannot else "killed"
    return row | {"by": by, "seconds": round(time.monotonic() - began)}


def name_of(row):
    return f"{row['file']}: {row['change']}"


def main(count, seed, workers, starts):
    folders = dict.fromkeys(start.partition("/")[0] for start in TESTS)
    files = [f for name in folders for f in sorted((ROOT / "gradcomp" / name).glob("[a-z]*.py"))]
    files = [f for f in files if str(f.relative_to(ROOT / "gradcomp")).startswith(starts)]
    mutants = [(f, number) for f in files for number in range(len(mutations(f)[1]))]
    random.Random(seed).shuffle(mutants)
    print(f"{count} of {len(mutants)} mutants of {len(files)} files", flush=True)

    results = ROOT / "build" / "mutants" / f"{seed}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.touch()
    rows = map(json.loads, results.read_text().splitlines())
    known = {(row["file"], row["line"], row["change"]): row for row in rows}

    def look(mutant):
        *_, line, change = mutate(*mutant)
        row = known.get((str(mutant[0].relative_to(ROOT)), line, change))
        if row is None or row["outcome"] == "survived":
            row = outcome_of(mutant)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{row['outcome']}: {row['file']}:{row['line']}: {row['change']}", flush=True)
        return row

    with _forks.available(), ThreadPoolExecutor(workers) as pool:
        rows = [row for row in pool.map(look, mutants[:count]) if row["outcome"] != "not run"]
    survivors = [row for row in rows if row["outcome"] == "survived"]
    reasons = json.loads(Path(__file__).with_name("survivors.json").read_text())
    print(f"\n{len(rows) - len(survivors)} of {len(rows)} were noticed; not these:")
    for row in survivors:
        print(f"{row['file']}:{row['line']}: {row['change']}")
        print("   ", reasons.get(name_of(row), "NOT EXPLAINED: write a test, or say why there"))
    unexplained = [row for row in survivors if name_of(row) not in reasons]
    return len(survivors) > (1 - LEAST) * len(rows) or bool(unexplained)


if __name__ == "__main__":
    import _mutants  # what forks import is this module, not __main__

    count, seed, workers, *starts = sys.argv[1:]
    sys.exit(_mutants.main(int(count), int(seed), int(workers), tuple(starts) or ""))
