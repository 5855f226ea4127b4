"""Property tests with cases that libFuzzer chooses by what they reach in gradcomp (`make fuzz`):
``python tests/support/_fuzz.py CORPUS SECONDS FILE::TEST...``, with PyPI's atheris.

Each test has so many seconds, and begins with its cases of fuzz_corpus.txt: a line of FILE::TEST
and base64 each. A failure is printed as pytest would, and the bytes that led to it stay in
CORPUS/TEST. ``_fuzz.py pack CORPUS FILE::TEST...``, without atheris, makes fuzz_corpus.txt of what
is in CORPUS and in the file: the shortest cases that reach all lines of gradcomp that any reaches.
"""

import base64
import collections
import hashlib
import importlib
import os
import random
import sys
from pathlib import Path

COMMITTED = Path(__file__).with_name("fuzz_corpus.txt")
ROOT = Path(__file__).parents[2]


def committed():
    """Return the committed cases of every test, by FILE::TEST."""
    cases = collections.defaultdict(list)
    for line in COMMITTED.read_text(encoding="ascii").splitlines():
        name, text = line.split()
        cases[name].append(base64.b64decode(text))
    return cases


def of_bytes(name):
    """Return a function that runs FILE::TEST with the case of some bytes; it returns the bytes that
    hypothesis has read, or None if they are no case.
    """
    file, test = name.split("::")
    folders = (ROOT / file).parent, ROOT / "tests/support", ROOT / "tests"  # as pytest has them
    sys.path[:0] = [folder for folder in map(str, folders) if folder not in sys.path]
    return getattr(importlib.import_module(Path(file).stem), test).hypothesis.fuzz_one_input


def fuzz(name, corpus, seconds):
    """Fuzz one test until a case fails or the time is over, and end the process."""
    import atheris

    with atheris.instrument_imports(include=["gradcomp"]):
        one_input = of_bytes(name)
    corpus.mkdir(parents=True, exist_ok=True)
    # the random ones are long enough for hypothesis, which refuses what ends too soon
    seeds = [random.Random(seed).randbytes(2048) for seed in range(10)] + committed()[name]
    for case in seeds:
        corpus.joinpath(hashlib.sha256(case).hexdigest()[:16]).write_bytes(case)
    limits = [f"-max_total_time={seconds}", "-max_len=4096"]
    output = ["-verbosity=0", f"-artifact_prefix={corpus}/failed-"]
    atheris.Setup([name, str(corpus), *limits, *output], lambda data: one_input(data) and None)
    atheris.Fuzz()


def reached(one_input, case):
    """Return what hypothesis reads of a case, and the lines of gradcomp that it reaches."""
    lines, folder = set(), f"{ROOT}/gradcomp/"

    def trace(frame, event, _):
        file = frame.f_code.co_filename
        if not file.startswith(folder):
            return None
        if event == "line":
            lines.add((file, frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        return one_input(case), lines
    finally:
        sys.settrace(None)


def pack(corpus, *names):
    """Write the cases of these tests to fuzz_corpus.txt, and no others."""
    kept, before = [], committed()
    for name in names:
        one_input, known = of_bytes(name), set()
        files = [path.read_bytes() for path in Path(corpus, name.split("::")[1]).glob("*")]
        reads = {reached(one_input, case)[0] for case in files + before[name]} - {None}
        for case in sorted(reads, key=lambda read: (len(read), read)):
            lines = reached(one_input, case)[1]
            if lines - known:
                kept.append(f"{name} {base64.b64encode(case).decode()}\n")
            known |= lines
    COMMITTED.write_text("".join(kept), encoding="ascii")


def main(corpus, seconds, *names):
    for number, name in enumerate(names, 1):
        child = os.fork()  # atheris fuzzes one function a process
        if child == 0:
            fuzz(name, Path(corpus, name.split("::")[1]), seconds)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcome = "FAILED" if status else "ok"
        print(f"{number} of {len(names)}: {name}: {outcome}", flush=True)
        if status:
            sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        pack(*sys.argv[2:])
    else:
        main(*sys.argv[1:])
