"""The fuzzer's known cases, corpus.txt: a line of base64 each.

``corpus.py unpack FOLDER`` writes them as files, for libFuzzer; ``corpus.py pack FOLDER`` makes
corpus.txt of a folder that libFuzzer has made small (``fuzz_kernels -merge=1 SMALL FOLDER``).
"""

import base64
import hashlib
import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus.txt")


def main(verb, folder):
    if verb == "unpack":
        for line in CORPUS.read_text(encoding="ascii").split():
            case = base64.b64decode(line)
            Path(folder, hashlib.sha256(case).hexdigest()[:16]).write_bytes(case)
    else:
        lines = sorted(base64.b64encode(file.read_bytes()) for file in Path(folder).iterdir())
        CORPUS.write_bytes(b"".join(line + b"\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
