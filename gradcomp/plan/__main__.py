"""``python -m gradcomp.plan ...`` is ``python -m gradcomp.bench plan ...``."""

import sys

from gradcomp.bench.__main__ import main
from gradcomp.interrupt import leave

if __name__ == "__main__":
    leave(main(["plan", *sys.argv[1:]]))
