"""``python -m gradcomp.plan ...`` is ``python -m gradcomp.bench plan ...``."""

import sys

from gradcomp.bench.__main__ import main

if __name__ == "__main__":
    try:
        sys.exit(main(["plan", *sys.argv[1:]]))
    except KeyboardInterrupt:
        sys.exit(130)
