"""Property tests with cases that libFuzzer chooses by what they reach in gradcomp (`make fuzz`):
``python tests/support/_fuzz.py CORPUS SECONDS FILE::TEST...``, with PyPI's atheris.

Each test has so many seconds. A failure is printed as pytest would, and the bytes that led to it
stay in CORPUS/TEST.
"""

import os
import random
import sys
from pathlib import Path

import atheris


def load(file):
    """Import a test file with gradcomp instrumented; pytest has these folders on the path, too."""
    support = Path(__file__).parent
    sys.path[:0] = [str(Path(file).parent), str(support), str(support.parent)]
    with atheris.instrument_imports(include=["gradcomp"]):
        return __import__(Path(file).stem)


def fuzz(file, test, corpus, seconds):
    """Fuzz one test until a case fails or the time is over, and end the process."""
    one_input = getattr(load(file), test).hypothesis.fuzz_one_input
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in range(10):  # long enough for hypothesis, which refuses what ends too soon
        corpus.joinpath(f"seed-{seed}").write_bytes(random.Random(seed).randbytes(2048))
    limits = [f"-max_total_time={seconds}", "-max_len=4096"]
    output = ["-verbosity=0", f"-artifact_prefix={corpus}/failed-"]
    atheris.Setup([test, str(corpus), *limits, *output], lambda data: one_input(data) and None)
    atheris.Fuzz()


def main(corpus, seconds, *names):
    for number, name in enumerate(names, 1):
        file, test = name.split("::")
        child = os.fork()  # atheris fuzzes one function a process
        if child == 0:
            fuzz(file, test, Path(corpus, test), seconds)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        outcome = "FAILED" if status else "ok"
        print(f"{number} of {len(names)}: {name}: {outcome}", flush=True)
        if status:
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
